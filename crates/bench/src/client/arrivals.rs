//! Arrival times of requests in an open loop: a Poisson process.
//!
//! The gaps between arrivals are exponentially distributed, like those of many independent clients. The schedule
//! depends neither on the server nor on delays of the client: the latency of a request that is sent late counts from
//! its arrival. If it counted from the time of sending, a stall would hide the requests that it delayed ("coordinated
//! omission", G. Tene, "How NOT to Measure Latency", 2013). Requests may arrive in batches of one size: then the times of the batches are
//! the Poisson process.

/// A Poisson process in nanoseconds; the same seed gives the same arrivals.
#[derive(Clone, Debug)]
pub(super) struct Arrivals {
    start_ns: u64,
    /// From the start to the next arrival.
    next: f64,
    gap_ns: f64,
    state: u64,
    batch: usize,
    /// Of the next batch, those that have not been taken.
    left: usize,
}

impl Arrivals {
    /// Arrivals from `start_ns` on, with a mean of `rate` requests per second, `batch` at a time; both are positive.
    pub(super) fn new(rate: f64, batch: usize, seed: u64, start_ns: u64) -> Self {
        let gap_ns = 1e9 * batch as f64 / rate;
        let mut arrivals = Self { start_ns, next: 0.0, gap_ns, state: seed, batch, left: batch };
        arrivals.next = arrivals.gap();
        arrivals
    }

    /// The next arrival if it is not after `now_ns`; advances to the one after it.
    #[inline]
    pub(super) fn due(&mut self, now_ns: u64) -> Option<u64> {
        if !self.is_due(now_ns) {
            return None;
        }
        let at_ns = self.start_ns + self.next as u64;
        self.left -= 1;
        if self.left == 0 {
            self.left = self.batch;
            self.next += self.gap();
        }
        Some(at_ns)
    }

    /// Whether an arrival until `now_ns` has not been taken.
    pub(super) fn is_due(&self, now_ns: u64) -> bool {
        self.start_ns + self.next as u64 <= now_ns
    }

    /// Arrivals until `now_ns` that were not taken.
    pub(super) fn overdue(mut self, now_ns: u64) -> u64 {
        std::iter::from_fn(|| self.due(now_ns)).count() as u64
    }

    /// A gap by inversion: -ln(u) times the mean, u uniform in (0, 1].
    fn gap(&mut self) -> f64 {
        // splitmix64 (G. Steele et al., "Fast Splittable Pseudorandom Number Generators", 2014).
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut word = self.state;
        word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        word ^= word >> 31;
        let uniform = ((word >> 11) + 1) as f64 / (1u64 << 53) as f64;
        -uniform.ln() * self.gap_ns
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const COUNT: usize = 20_000;

    fn gaps(rate: f64, seed: u64) -> Vec<f64> {
        let mut arrivals = Arrivals::new(rate, 1, seed, 0);
        let mut last = 0;
        let mut gap = || {
            let at = arrivals.due(u64::MAX).expect("everything is due at the end of time");
            assert!(at >= last, "time does not go back");
            let gap = (at - last) as f64;
            last = at;
            gap
        };
        (0..COUNT).map(|_| gap()).collect()
    }

    proptest! {
        #[test]
        fn gaps_are_exponential(rate in 10.0..1e6, seed: u64) {
            let gaps = gaps(rate, seed);
            let mean = gaps.iter().sum::<f64>() / COUNT as f64;
            // Six standard errors of a mean (1/sqrt(n)) and of a variance (sqrt(8/n)).
            let expected = 1e9 / rate;
            prop_assert!((mean / expected - 1.0).abs() < 0.045, "mean {mean} of {expected}");
            let variance = gaps.iter().map(|g| (g - mean).powi(2)).sum::<f64>() / COUNT as f64;
            prop_assert!((variance / mean.powi(2) - 1.0).abs() < 0.15, "variance {variance}");
            // P(gap > k * mean) = exp(-k).
            for k in [0.1, 1.0, 3.0] {
                let share = gaps.iter().filter(|g| **g > k * mean).count() as f64 / COUNT as f64;
                prop_assert!((share - f64::exp(-k)).abs() < 0.025, "{share} beyond {k}");
            }
            // No memory: neighbours are uncorrelated.
            let pairs = gaps.windows(2).map(|w| (w[0] - mean) * (w[1] - mean)).sum::<f64>();
            prop_assert!((pairs / variance / COUNT as f64).abs() < 0.05);
        }

        #[test]
        fn arrivals_are_never_early_and_untaken_ones_are_overdue(
            rate in 1e3..1e6, batch in 1..100usize, seed: u64, start in 0..u64::MAX / 4, steps in prop::collection::vec(0..100_000u64, 1..50),
        ) {
            let mut arrivals = Arrivals::new(rate, batch, seed, start);
            let untouched = arrivals.clone();
            let (mut now, mut taken, mut before) = (start, 0, None);
            for step in steps {
                now += step;
                while let Some(at) = arrivals.due(now) {
                    prop_assert!((start..=now).contains(&at));
                    taken += 1;
                    if taken as usize % batch != 1 % batch {
                        prop_assert_eq!(Some(at), before, "a batch arrives at one time");
                    }
                    before = Some(at);
                }
                prop_assert_eq!(arrivals.clone().overdue(now), 0);
            }
            prop_assert_eq!(untouched.overdue(now), taken);
        }
    }

    #[test]
    fn batches_arrive_at_the_rate_of_their_requests() {
        let times = |batch| {
            let mut arrivals = Arrivals::new(1e6, batch, 7, 0);
            (0..64 * COUNT).map(|_| arrivals.due(u64::MAX).unwrap()).collect::<Vec<_>>()
        };
        let (single, batches) = (times(1), times(64));
        let ratio = *batches.last().unwrap() as f64 / *single.last().unwrap() as f64;
        assert!((ratio - 1.0).abs() < 0.05, "{ratio}");
        assert_eq!(batches.chunk_by(|a, b| a == b).map(<[u64]>::len).max(), Some(64));
    }

    #[test]
    fn the_seed_decides() {
        assert_eq!(gaps(1e4, 7), gaps(1e4, 7));
        assert_ne!(gaps(1e4, 7), gaps(1e4, 8));
    }
}
