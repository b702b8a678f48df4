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

    /// Shuffles `items`.
    pub fn shuffle<T>(&mut self, items: &mut [T]) {
        for i in (1..items.len()).rev() {
            items.swap(i, self.below(i as u64 + 1) as usize);
        }
    }
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
}
