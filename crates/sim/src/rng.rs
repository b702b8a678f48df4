//! Randomness: splitmix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators",
//! 2014). Small, and the same on every machine and in every version: a seed is a test case.

/// A seeded generator.
#[derive(Clone, Debug)]
pub struct Rng(u64);

impl Rng {
    /// The generator of a seed.
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// The generator of one decision about a seed, independent of all others: a new decision changes no other one.
    pub fn named(seed: u64, decision: &str) -> Self {
        Self(mix(seed ^ hash(decision)))
    }

    /// An independent generator.
    pub fn fork(&mut self) -> Self {
        Self(self.draw())
    }

    /// The next number.
    pub fn draw(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mix(self.0)
    }

    /// A number in [0, `bound`); 0 when `bound` is 0.
    pub fn below(&mut self, bound: u64) -> u64 {
        // The bias of a remainder is far below what any test could notice.
        if bound == 0 { 0 } else { self.draw() % bound }
    }

    /// A number in [`low`, `high`].
    pub fn between(&mut self, low: u64, high: u64) -> u64 {
        low + self.below(high - low + 1)
    }

    /// True with a probability of `per_mille` / 1000. Draws nothing if the result is certain.
    pub fn chance(&mut self, per_mille: u32) -> bool {
        per_mille > 0 && (per_mille >= 1000 || self.below(1000) < u64::from(per_mille))
    }

    /// One of `choices`, which is not empty.
    pub fn pick<T: Copy>(&mut self, choices: &[T]) -> T {
        choices[self.below(choices.len() as u64) as usize]
    }

    /// One of `choices`, which is not empty, by their names: the one with the highest hash (Thaler and Ravishankar, "Using
    /// name-based mappings to increase hit rates", 1998). A further choice takes its own share of the draws; the
    /// others stay as they are.
    pub fn pick_named<T>(&mut self, choices: impl IntoIterator<Item = (String, T)>) -> T {
        let draw = self.draw();
        let highest = choices.into_iter().max_by_key(|(name, _)| mix(draw ^ hash(name)));
        highest.expect("there are choices").1
    }

    /// Shuffles `items`.
    pub fn shuffle<T>(&mut self, items: &mut [T]) {
        for i in (1..items.len()).rev() {
            items.swap(i, self.below(i as u64 + 1) as usize);
        }
    }
}

/// A hash of a name (FNV-1a, spread).
fn hash(name: &str) -> u64 {
    let step = |hash: u64, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
    mix(name.bytes().fold(0xcbf2_9ce4_8422_2325, step))
}

/// Spreads every bit of `x` over the result (the finisher of splitmix64).
pub fn mix(x: u64) -> u64 {
    let x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_gives_the_published_sequence() {
        let mut rng = Rng::new(1_234_567);
        let first: Vec<u64> = (0..3).map(|_| rng.draw()).collect();
        assert_eq!(
            first,
            [6_457_827_717_110_365_317, 3_203_168_211_198_807_973, 9_817_491_932_198_370_423]
        );
    }

    #[test]
    fn ranges_and_chances_are_kept() {
        let mut rng = Rng::new(7);
        assert_eq!(rng.below(0), 0);
        assert!((0..1000).all(|_| (3..=5).contains(&rng.between(3, 5))));
        assert!((0..1000).all(|_| !rng.chance(0) && rng.chance(1000)));
        let hits = (0..10_000).filter(|_| rng.chance(250)).count();
        assert!((2300..2700).contains(&hits), "{hits}");
    }

    #[test]
    fn a_new_choice_takes_its_own_share_and_moves_no_other() {
        let names = ["raw", "fixed:100", "line", "memcached"];
        let (mut few, mut many) = (Rng::new(7), Rng::new(7));
        let mut taken = [0; 5];
        for _ in 0..10_000 {
            let named = |names: &[&'static str]| {
                names.iter().map(|name| ((*name).to_owned(), *name)).collect::<Vec<_>>()
            };
            let before = few.pick_named(named(&names));
            let after = many.pick_named(named(&[&names[..2], &["new"], &names[2..]].concat()));
            assert!(after == before || after == "new", "{before} became {after}");
            let place = names.iter().position(|name| *name == after).unwrap_or(4);
            taken[place] += 1;
        }
        assert!(taken.iter().all(|count| (1800..2200).contains(count)), "{taken:?}");
    }

    #[test]
    fn decisions_do_not_depend_on_each_other() {
        let first = |seed, name| Rng::named(seed, name).draw();
        assert_eq!(first(1, "limits.pipelined"), first(1, "limits.pipelined"));
        assert_ne!(first(1, "limits.pipelined"), first(1, "limits.idle_ms"));
        assert_ne!(first(1, "limits.pipelined"), first(2, "limits.pipelined"));
    }
}
