//! Rates and times as text.

/// `71.3 k/s`.
pub fn per_second(rate: f64) -> String {
    match rate {
        rate if rate >= 1e6 => format!("{:.2} M/s", rate / 1e6),
        rate if rate >= 1e3 => format!("{:.1} k/s", rate / 1e3),
        rate => format!("{rate:.0} /s"),
    }
}

/// `6.3 us` from nanoseconds.
pub fn span(ns: f64) -> String {
    match ns {
        ns if ns >= 1e9 => format!("{:.2} s", ns / 1e9),
        ns if ns >= 1e6 => format!("{:.2} ms", ns / 1e6),
        ns if ns >= 1e3 => format!("{:.1} us", ns / 1e3),
        ns => format!("{ns:.0} ns"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantities_have_their_units() {
        assert_eq!(per_second(71_340.0), "71.3 k/s");
        assert_eq!(per_second(2_500_000.0), "2.50 M/s");
        assert_eq!(span(6_300.0), "6.3 us");
        assert_eq!(span(2.5e6), "2.50 ms");
    }
}
