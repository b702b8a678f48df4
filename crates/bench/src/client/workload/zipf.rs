//! Ranks with Zipf's distribution, in constant memory.
//!
//! Rejection-inversion (W. Hörmann and G. Derflinger, "Rejection-inversion to generate variates from monotone discrete
//! distributions", ACM TOMACS 6(3), 1996): a point under the curve x^-s is chosen by inversion of its integral, and kept if it
//! lies in the bar of the rank next to it. Less than every third is rejected, for any number of ranks.

/// The rank k of 1..=`count` has a probability that is proportional to k^-s.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Zipf {
    count: u64,
    exponent: f64,
    /// The integral up to the left end of the first bar and to the right end of the last one.
    from: f64,
    to: f64,
    /// Points at most this far below a rank are in its bar.
    inside: f64,
}

impl Zipf {
    /// `count` is at least 1; with `exponent` 0 all ranks are equally probable.
    pub(super) fn new(count: u64, exponent: f64) -> Self {
        let mut zipf = Self { count, exponent, from: 0.0, to: 0.0, inside: 0.0 };
        zipf.from = zipf.integral(1.5) - 1.0;
        zipf.to = zipf.integral(count as f64 + 0.5);
        zipf.inside = 2.0 - zipf.inverse(zipf.integral(2.5) - zipf.height(2.0));
        zipf
    }

    /// A rank, from 0; the same for the same seed.
    pub(super) fn rank(&self, seed: u64) -> u64 {
        let mut word = seed;
        loop {
            word = mixed(word);
            let uniform = (word >> 11) as f64 / (1u64 << 53) as f64;
            let under = self.to + uniform * (self.from - self.to);
            let x = self.inverse(under);
            let rank = x.round().clamp(1.0, self.count as f64);
            if rank - x <= self.inside || under >= self.integral(rank + 0.5) - self.height(rank) {
                return rank as u64 - 1;
            }
        }
    }

    /// x^-s.
    fn height(&self, x: f64) -> f64 {
        (-self.exponent * x.ln()).exp()
    }

    /// The integral of x^-s from 1: (x^(1 - s) - 1) / (1 - s), or ln(x) for s = 1.
    fn integral(&self, x: f64) -> f64 {
        let log = x.ln();
        let power = (1.0 - self.exponent) * log;
        // Near s = 1 both are close to zero.
        log * if power.abs() > 1e-8 { power.exp_m1() / power } else { 1.0 + power / 2.0 }
    }

    /// The x of which `integral` is the integral.
    fn inverse(&self, integral: f64) -> f64 {
        // Rounding must not make it the logarithm of a negative number.
        let product = (integral * (1.0 - self.exponent)).max(-1.0);
        let log =
            if product.abs() > 1e-8 { product.ln_1p() / product } else { 1.0 - product / 2.0 };
        (integral * log).exp()
    }
}

/// A pseudo-random function of `number` (SplitMix64).
pub(super) fn mixed(number: u64) -> u64 {
    let mut word = number.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    word ^ (word >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Sum of k^-s for k in 1..=n (Euler-Maclaurin from 1000 on).
    fn harmonic(n: u64, s: f64) -> f64 {
        let exact = n.min(1000);
        let head: f64 = (1..=exact).map(|k| (k as f64).powf(-s)).sum();
        let (a, b) = (exact as f64, n as f64);
        let tail = match (s - 1.0).abs() < 1e-9 {
            true => (b / a).ln(),
            false => (b.powf(1.0 - s) - a.powf(1.0 - s)) / (1.0 - s),
        };
        head + tail + (b.powf(-s) - a.powf(-s)) / 2.0
    }

    #[test]
    fn ranks_have_their_shares() {
        const DRAWS: u64 = 100_000;
        for (count, s) in [
            (1, 0.9),
            (2, 0.9),
            (1000, 0.0),
            (1000, 0.5),
            (1000, 0.99),
            (1000, 1.0),
            (1000, 2.0),
            (32_000_000, 0.9),
            (999_999_999, 0.9),
        ] {
            let zipf = Zipf::new(count, s);
            let ranks: Vec<u64> = (0..DRAWS).map(zipf_of(&zipf)).collect();
            assert!(ranks.iter().all(|rank| *rank < count), "{count} {s}");
            for top in [1, 2, 10, 500, 10_000, count / 2]
                .into_iter()
                .filter(|top| (1..=count).contains(top))
            {
                let expected = harmonic(top, s) / harmonic(count, s);
                let found = ranks.iter().filter(|rank| **rank < top).count() as f64 / DRAWS as f64;
                // Five standard errors.
                let error = 5.0 * (expected * (1.0 - expected) / DRAWS as f64).sqrt() + 1e-4;
                assert!((found - expected).abs() < error, "{count} {s} {top}: {found} {expected}");
            }
        }
    }

    fn zipf_of(zipf: &Zipf) -> impl Fn(u64) -> u64 + '_ {
        |seed| zipf.rank(mixed(seed))
    }

    #[test]
    fn the_seed_decides_and_memory_does_not_grow() {
        let zipf = Zipf::new(32_000_000, 0.9);
        assert_eq!(zipf.rank(7), zipf.rank(7));
        assert_ne!((0..20).map(|seed| zipf.rank(seed)).max(), Some(0));
        assert!(size_of_val(&zipf) <= 40, "no table of ranks");
    }
}
