//! Statistics of several measurements of one figure, without an assumption about their distribution.
//!
//! The middle of the measurements is their median. Its interval is the exact one of order statistics (the inverted
//! sign test; Conover, "Practical Nonparametric Statistics", §3.2): with `n` independent measurements, the k-th
//! smallest and the k-th largest enclose the true median unless fewer than k of them fall on one side of it, and that
//! number has the binomial distribution of `n` fair coin tosses. There are no random numbers and no normal
//! distribution, and one outlier cannot move the result.

use serde::Serialize;

/// Coverage an interval must have.
pub const COVERAGE_MIN: f64 = 0.95;

/// Summary of a set of measurements.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Summary {
    /// Number of measurements.
    pub count: usize,
    /// The median; for an even count the mean of the two in the middle.
    pub median: f64,
    /// The smallest.
    pub min: f64,
    /// The largest.
    pub max: f64,
    /// The confidence interval of the true median; `None` if there are too few measurements (5 or fewer).
    pub interval: Option<Interval>,
}

/// An interval that encloses the true median with the given probability.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Interval {
    /// Lower end.
    pub low: f64,
    /// Upper end.
    pub high: f64,
    /// Probability, at least [`COVERAGE_MIN`].
    pub coverage: f64,
}

impl Summary {
    /// `None` without measurements, or if one of them is not a number.
    pub fn of(values: &[f64]) -> Option<Self> {
        if values.is_empty() || values.iter().any(|value| !value.is_finite()) {
            return None;
        }
        let mut sorted = values.to_vec();
        sorted.sort_by(f64::total_cmp);
        let (count, middle) = (sorted.len(), sorted.len() / 2);
        let below = sorted[(count - 1) / 2];
        let interval = interval_rank(count).map(|(rank, coverage)| Interval {
            low: sorted[rank - 1],
            high: sorted[count - rank],
            coverage,
        });
        Some(Self {
            count,
            median: below + (sorted[middle] - below) / 2.0,
            min: sorted[0],
            max: sorted[count - 1],
            interval,
        })
    }
}

/// The largest rank k whose k-th smallest and k-th largest of `count` enclose the median with the required
/// probability, and that probability.
fn interval_rank(count: usize) -> Option<(usize, f64)> {
    let mut best = None;
    // Probability of exactly `below` heads in `count` tosses, and of at most that many.
    let (mut exactly, mut at_most) = (0.5f64.powi(count as i32), 0.0);
    for below in 0..count / 2 {
        at_most += exactly;
        let coverage = 1.0 - 2.0 * at_most;
        if coverage < COVERAGE_MIN {
            break;
        }
        best = Some((below + 1, coverage));
        exactly *= (count - below) as f64 / (below + 1) as f64;
    }
    best
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn known_cases() {
        assert_eq!(Summary::of(&[]), None);
        assert_eq!(Summary::of(&[1.0, f64::NAN]), None);
        assert_eq!(Summary::of(&[1.0, f64::INFINITY]), None);
        let one = Summary::of(&[3.0]).unwrap();
        assert_eq!((one.median, one.min, one.max, one.interval), (3.0, 3.0, 3.0, None));
        assert_eq!(Summary::of(&[4.0, 1.0, 2.0, 3.0]).unwrap().median, 2.5);
        let seven = Summary::of(&[7.0, 1.0, 6.0, 2.0, 5.0, 3.0, 4.0]).unwrap();
        let interval = seven.interval.unwrap();
        assert_eq!((seven.median, interval.low, interval.high), (4.0, 1.0, 7.0));
        assert!((interval.coverage - 0.984_375).abs() < 1e-12);
    }

    /// Ranks and coverages from tables of the sign test (Conover, table A3).
    #[test]
    fn ranks_match_the_tables() {
        for (count, rank, coverage) in [
            (6, 1, 0.9688),
            (8, 1, 0.9922),
            (9, 2, 0.9609),
            (10, 2, 0.9785),
            (15, 4, 0.9648),
            (20, 6, 0.9586),
            (25, 8, 0.9567),
        ] {
            let (found, probability) = interval_rank(count).unwrap();
            assert_eq!(found, rank, "{count}");
            assert!((probability - coverage).abs() < 5e-5, "{count}: {probability}");
        }
        for count in 0..6 {
            assert_eq!(interval_rank(count), None, "{count}");
        }
    }

    #[test]
    fn the_interval_has_the_stated_coverage() {
        // Every outcome of 9 fair coins: which measurements lie above the true median 0.
        let covered = (0u32..1 << 9).filter(|outcome| {
            let sign = |bit: u32| if outcome >> bit & 1 == 1 { 1.0 } else { -1.0 };
            let values: Vec<f64> = (0..9).map(|bit| sign(bit) * f64::from(bit + 1)).collect();
            let interval = Summary::of(&values).unwrap().interval.unwrap();
            interval.low < 0.0 && 0.0 < interval.high
        });
        let share = covered.count() as f64 / 512.0;
        assert!((share - interval_rank(9).unwrap().1).abs() < 1e-12, "{share}");
    }

    proptest! {
        #[test]
        fn order_and_bounds_hold(values in prop::collection::vec(-1e9f64..1e9, 1..60)) {
            let summary = Summary::of(&values).unwrap();
            prop_assert!(summary.min <= summary.median && summary.median <= summary.max);
            let below = values.iter().filter(|v| **v < summary.median).count();
            let above = values.iter().filter(|v| **v > summary.median).count();
            prop_assert!(below <= values.len() / 2 && above <= values.len() / 2);
            match summary.interval {
                None => prop_assert!(values.len() < 6),
                Some(Interval { low, high, coverage }) => {
                    prop_assert!((COVERAGE_MIN..=1.0).contains(&coverage));
                    prop_assert!(summary.min <= low && low <= summary.median);
                    prop_assert!(summary.median <= high && high <= summary.max);
                }
            }
        }

        #[test]
        fn order_and_scale_do_not_matter(
            values in prop::collection::vec(1.0f64..1e6, 1..40), swaps in any::<u64>(),
        ) {
            let mut turned = values.clone();
            turned.rotate_left(swaps as usize % values.len());
            prop_assert_eq!(Summary::of(&turned), Summary::of(&values));
            let doubled: Vec<f64> = values.iter().map(|v| v * 2.0).collect();
            let (one, two) = (Summary::of(&values).unwrap(), Summary::of(&doubled).unwrap());
            prop_assert!((two.median - 2.0 * one.median).abs() <= 1e-9 * two.median);
        }
    }
}
