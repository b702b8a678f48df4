//! Figures as text. Records contain these texts, so that all tables are equal.

use std::collections::BTreeMap;

use serde::Serialize;

use super::statistics::Summary;
use super::verdict::{Better, Combine};
use crate::units::per_second;

/// The figures of one measurement by name; times in nanoseconds (`p50_ns`), `rate` per second.
pub type Figures = BTreeMap<String, f64>;

/// Figures that a table shows besides the compared one, with their labels.
const BESIDE: [(&str, &str); 8] = [
    ("rate", ""),
    ("p50_ns", "p50 "),
    ("p99_ns", "p99 "),
    ("slice_p99_ns", "p99 of a slice "),
    ("busy_ns", "busy "),
    ("server_cpu_ns", "server CPU "),
    ("client_cpu_ns", "client CPU "),
    ("database_cpu_ns", "database CPU "),
];

/// The texts of a record.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Shown {
    /// `at least 0.95x`; empty when nothing is claimed.
    pub must: String,
    /// The same for the aim.
    pub aim: String,
    /// `0.97x [0.95x, 0.99x]`; empty when nothing was measured.
    pub value: String,
    /// `0.94x to 1.01x`.
    pub range: String,
    /// The candidate's figures.
    pub a: String,
    /// The baseline's figures.
    pub b: String,
}

/// The format of the values of a row.
#[derive(Clone, Copy, Debug)]
pub struct Style<'s> {
    /// The figure.
    pub metric: &'s str,
    /// How two of them became a value.
    pub combine: Combine,
    /// Which way the value improves.
    pub better: Better,
}

impl Style<'_> {
    /// One value.
    pub fn value(&self, value: f64) -> String {
        match self.combine {
            Combine::Ratio if value < 10.0 => format!("{value:.3}x"),
            Combine::Ratio => format!("{value:.1}x"),
            _ => amount(self.metric, value),
        }
    }

    /// A threshold.
    pub fn threshold(&self, value: Option<f64>) -> String {
        let bound = match self.better {
            Better::Higher => "at least",
            Better::Lower => "at most",
        };
        value.map_or_else(String::new, |value| format!("{bound} {}", self.value(value)))
    }

    /// A threshold, or the two that a value must lie between.
    pub fn range_of(&self, must: Option<f64>, most: Option<f64>) -> String {
        match must.zip(most) {
            Some((must, most)) => format!("{} to {}", self.value(must), self.value(most)),
            None => self.threshold(must),
        }
    }

    /// The middle and its interval.
    pub fn summary(&self, summary: &Summary) -> String {
        let median = self.value(summary.median);
        match summary.interval {
            None => median,
            Some(interval) => {
                let (low, high) = (self.value(interval.low), self.value(interval.high));
                format!("{median} [{low}, {high}]")
            }
        }
    }

    /// From the smallest to the largest.
    pub fn range(&self, summary: &Summary) -> String {
        format!("{} to {}", self.value(summary.min), self.value(summary.max))
    }
}

/// The compared figure first, then the other known ones.
pub fn figures(all: &Figures, main: &str) -> String {
    let known = |name: &str| BESIDE.iter().find(|(n, _)| *n == name).map(|(_, called)| *called);
    let entry = |name: &str, value: f64| match known(name) {
        Some(called) => format!("{called}{}", amount(name, value)),
        None => format!("{} {}", name.replace('_', " "), amount(name, value)),
    };
    let beside = BESIDE.iter().map(|(name, _)| *name).filter(|name| *name != main);
    let names = std::iter::once(main).chain(beside);
    let parts = names.filter_map(|name| Some(entry(name, *all.get(name)?)));
    parts.collect::<Vec<_>>().join(", ")
}

/// A figure in the unit of its name.
pub fn amount(name: &str, value: f64) -> String {
    match name {
        "rate" | "peak_rate" => per_second(value),
        _ if name.ends_with("_ns") || name == "ns_per_call" => match value.abs() {
            ns if ns >= 1e6 => format!("{:.2} ms", value / 1e6),
            ns if ns >= 1e3 => format!("{:.2} us", value / 1e3),
            ns if ns >= 10.0 => format!("{value:.0} ns"),
            _ => format!("{value:.1} ns"),
        },
        _ if name.ends_with("percent") => format!("{value:.2} %"),
        _ if name.ends_with("mib") => format!("{value:.1} MiB"),
        _ => format!("{value:.3}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_have_their_units() {
        for (name, value, text) in [
            ("rate", 71_340.0, "71.3 k/s"),
            ("rate", 2_500_000.0, "2.50 M/s"),
            ("rate", 12.0, "12 /s"),
            ("p50_ns", 5_210.0, "5.21 us"),
            ("busy_ns", 88.4, "88 ns"),
            ("busy_ns", 1.24, "1.2 ns"),
            ("p50_ns", -2_000_000.0, "-2.00 ms"),
            ("percent", 0.0, "0.00 %"),
            ("other_mib", 8.04, "8.0 MiB"),
            ("share_of_peak", 0.95, "0.950"),
        ] {
            assert_eq!(amount(name, value), text);
        }
    }

    #[test]
    fn values_are_shown_with_their_interval() {
        let ratio = Style { metric: "p50_ns", combine: Combine::Ratio, better: Better::Higher };
        let seven = Summary::of(&[0.9, 1.0, 1.1, 1.2, 1.3, 1.4, 12.0]).unwrap();
        assert_eq!(ratio.summary(&seven), "1.200x [0.900x, 12.0x]");
        assert_eq!(ratio.range(&seven), "0.900x to 12.0x");
        assert_eq!(ratio.summary(&Summary::of(&[1.5]).unwrap()), "1.500x");
        assert_eq!(ratio.threshold(Some(0.95)), "at least 0.950x");
        assert_eq!(ratio.threshold(None), "");
        assert_eq!(ratio.range_of(Some(0.9), Some(1.1)), "0.900x to 1.100x");
        assert_eq!(ratio.range_of(Some(0.9), None), "at least 0.900x");
        let alone = Style { metric: "p50_ns", combine: Combine::Alone, better: Better::Lower };
        assert_eq!(alone.threshold(Some(600.0)), "at most 600 ns");
    }

    #[test]
    fn the_compared_figure_comes_first() {
        let all = [("rate", 1e6), ("p50_ns", 900.0), ("share_of_peak", 0.9), ("max_ns", 1.0)];
        let all: Figures = all.map(|(name, value)| (name.to_owned(), value)).into();
        assert_eq!(figures(&all, "p50_ns"), "p50 900 ns, 1.00 M/s");
        assert_eq!(figures(&all, "share_of_peak"), "share of peak 0.900, 1.00 M/s, p50 900 ns");
        assert_eq!(figures(&all, "other"), "1.00 M/s, p50 900 ns");
    }
}
