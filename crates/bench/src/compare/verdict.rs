//! Verdicts: when a measurement proves a claim.
//!
//! A claim is a value and a threshold. It holds if the whole confidence interval is on the better side of the
//! threshold, fails if the whole interval is on the worse side, and is undecided otherwise. Fewer than [`PAIRS_MIN`]
//! measurements prove nothing.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::statistics::Summary;

/// Minimum number of measurements for a verdict.
pub const PAIRS_MIN: usize = 7;

/// Which direction of a figure is better.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Better {
    /// More is better.
    Higher,
    /// Less is better.
    Lower,
}

/// How the figures of the two sides become one value.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Combine {
    /// How many times better A is than B: above 1, A is better, for any direction of the figure.
    Ratio,
    /// A's figure less B's.
    Difference,
    /// A's figure; there is no B.
    Alone,
}

/// A claim about a value.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Claim {
    /// Which direction of the *value* is better; for a ratio always higher.
    pub better: Better,
    /// The required value; `None`: nothing is claimed.
    pub must: Option<f64>,
    /// The target value.
    pub aim: Option<f64>,
    /// The largest allowed value, of a value that is better the higher it is.
    pub most: Option<f64>,
}

/// The result of the measurements for a claim.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Verdict {
    /// The interval is on the better side of `must`.
    Pass,
    /// The interval is on the worse side of `must`.
    Fail,
    /// `must` is inside the interval.
    Undecided,
    /// Nothing was claimed, or there are too few measurements.
    NoVerdict,
    /// The measurements are invalid.
    Void,
}

impl Verdict {
    /// Whether a run with this verdict succeeds.
    pub fn is_good(self) -> bool {
        matches!(self, Self::Pass | Self::NoVerdict)
    }
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Pass => "pass",
            Self::Fail => "fail",
            Self::Undecided => "undecided",
            Self::NoVerdict => "no verdict",
            Self::Void => "void",
        })
    }
}

impl Combine {
    /// The value of one measurement; `None` if there is none (a missing B, a division by zero).
    pub fn value(self, better: Better, a: f64, b: Option<f64>) -> Option<f64> {
        let value = match (self, better) {
            (Self::Ratio, Better::Higher) => a / b?,
            (Self::Ratio, Better::Lower) => b? / a,
            (Self::Difference, _) => a - b?,
            (Self::Alone, _) => a,
        };
        value.is_finite().then_some(value)
    }

    /// The better direction of the value for that of the figure.
    pub fn better(self, figure: Better) -> Better {
        if self == Self::Ratio { Better::Higher } else { figure }
    }
}

impl Claim {
    /// The verdict of the measurements on `must`.
    pub fn judge(&self, summary: &Summary) -> Verdict {
        let (Some(must), Some((good, bad))) = (self.must, self.ends(summary)) else {
            return Verdict::NoVerdict;
        };
        let most = self.most.unwrap_or(f64::INFINITY);
        match () {
            () if self.beats(good, must) && bad < most => Verdict::Pass,
            () if self.beats(must, bad) || good > most => Verdict::Fail,
            () => Verdict::Undecided,
        }
    }

    /// Whether the measurements prove that the aim is met; `None` without an aim or with too few
    /// measurements.
    pub fn meets_aim(&self, summary: &Summary) -> Option<bool> {
        let (good, _) = self.ends(summary)?;
        Some(self.beats(good, self.aim?))
    }

    /// The worst and the best value of the interval, as far as they are ordered by the claim.
    fn ends(&self, summary: &Summary) -> Option<(f64, f64)> {
        let interval = summary.interval.filter(|_| summary.count >= PAIRS_MIN)?;
        Some(match self.better {
            Better::Higher => (interval.low, interval.high),
            Better::Lower => (interval.high, interval.low),
        })
    }

    /// Whether `one` is strictly better than `other`.
    fn beats(&self, one: f64, other: f64) -> bool {
        match self.better {
            Better::Higher => one > other,
            Better::Lower => one < other,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn claim(better: Better, must: f64) -> Claim {
        Claim { better, must: Some(must), aim: Some(must * 2.0), most: None }
    }

    fn summary(values: &[f64]) -> Summary {
        Summary::of(values).unwrap()
    }

    const SEVEN: [f64; 7] = [1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6];

    #[test]
    fn a_claim_holds_only_when_the_whole_interval_does() {
        let seven = summary(&SEVEN);
        for (must, higher, lower) in [
            (0.9, Verdict::Pass, Verdict::Fail),
            (1.0, Verdict::Undecided, Verdict::Undecided),
            (1.3, Verdict::Undecided, Verdict::Undecided),
            (1.6, Verdict::Undecided, Verdict::Undecided),
            (1.7, Verdict::Fail, Verdict::Pass),
        ] {
            assert_eq!(claim(Better::Higher, must).judge(&seven), higher, "{must}");
            assert_eq!(claim(Better::Lower, must).judge(&seven), lower, "{must}");
        }
    }

    #[test]
    fn a_value_with_a_largest_allowed_one_lies_between() {
        let seven = summary(&SEVEN);
        for (must, most, verdict) in [
            (0.9, 1.7, Verdict::Pass),
            (0.9, 1.5, Verdict::Undecided),
            (1.1, 1.7, Verdict::Undecided),
            (0.8, 0.9, Verdict::Fail),
            (1.7, 1.8, Verdict::Fail),
        ] {
            let claim = Claim { most: Some(most), ..claim(Better::Higher, must) };
            assert_eq!(claim.judge(&seven), verdict, "{must} to {most}");
        }
    }

    #[test]
    fn too_few_measurements_and_no_claim_give_no_verdict() {
        let six = summary(&SEVEN[..6]);
        assert!(six.interval.is_some(), "enough for an interval, not for a claim");
        assert_eq!(claim(Better::Higher, 0.1).judge(&six), Verdict::NoVerdict);
        assert_eq!(claim(Better::Higher, 0.1).meets_aim(&six), None);
        let nothing = Claim { better: Better::Higher, must: None, aim: Some(0.5), most: None };
        assert_eq!(nothing.judge(&summary(&SEVEN)), Verdict::NoVerdict);
        assert_eq!(nothing.meets_aim(&summary(&SEVEN)), Some(true));
    }

    #[test]
    fn ratios_improve_upwards() {
        assert_eq!(Combine::Ratio.value(Better::Higher, 2.0, Some(1.0)), Some(2.0));
        assert_eq!(Combine::Ratio.value(Better::Lower, 2.0, Some(1.0)), Some(0.5));
        assert_eq!(Combine::Difference.value(Better::Lower, 2.0, Some(1.5)), Some(0.5));
        assert_eq!(Combine::Alone.value(Better::Lower, 2.0, None), Some(2.0));
        assert_eq!(Combine::Ratio.value(Better::Higher, 2.0, None), None);
        assert_eq!(Combine::Ratio.value(Better::Higher, 2.0, Some(0.0)), None);
        assert_eq!(Combine::Ratio.better(Better::Lower), Better::Higher);
        assert_eq!(Combine::Difference.better(Better::Lower), Better::Lower);
    }
}
