//! The report of a measurement, and whether it is valid.

use std::time::Duration;

use serde_json::{Value as Json, json};

use super::{Class, Mode, Plan, Target};
use crate::client::{Outcome, distribution_us};

/// Tolerance of Little's law.
const LITTLE_TOLERANCE: f64 = 0.05;
/// Minimum share of the window of a closed loop that is in flight in the mean: clients that send in batches or wait
/// for their turn do not fill it completely.
const FILLED_MIN: f64 = 0.7;
/// Maximum; values above 1 are due to the accuracy of clock readings.
const FILLED_MAX: f64 = 1.05;
/// Maximum share of lost requests in a closed loop: lost requests were not served, and a client that waits for them
/// loads the server less than it reports.
pub(crate) const LOST_MAX: f64 = 0.001;
/// Maximum share of an open loop's arrivals that may be unsent.
const UNSENT_MAX: f64 = 0.01;
/// Maximum share of silence at the end of the measured part, if requests were lost.
const SILENCE_MAX: f64 = 0.1;
/// Minimum number of replies for a distribution.
const REPLIES_MIN: u64 = 100;
/// From this share on, the client or the server is fully loaded.
const BUSY: f64 = 0.95;

/// One measurement. All times are nanoseconds of CLOCK_MONOTONIC or CPU time.
#[derive(Clone, Debug)]
pub struct Report {
    /// The server.
    pub target: String,
    /// The kind of client.
    pub class: Class,
    /// When requests were sent.
    pub mode: Mode,
    /// The workload.
    pub work: String,
    /// Requests sent, or in flight when the measurement began.
    pub sent: u64,
    /// Correct replies.
    pub replied: u64,
    /// Wrong replies.
    pub wrong: u64,
    /// Requests without a reply in time.
    pub lost: u64,
    /// Duplicate replies.
    pub duplicated: u64,
    /// Correct replies that arrived after their request had been given up.
    pub late: u64,
    /// The share of gets that found their value, if there were any.
    pub hit_ratio: Option<f64>,
    /// Correct replies per second.
    pub rate: f64,
    /// From sending (open loop: arrival) to reply.
    pub latency: Latency,
    /// Shares of the replies, and the corresponding latencies in microseconds: the whole distribution.
    pub distribution_us: Vec<(f64, f64)>,
    /// Requests in flight by Little's law, divided by the client's own count: in a closed loop of sockets and
    /// connections, rate x mean latency / window. Requests that were lost or were in flight at the beginning or the
    /// end count with their measured time in flight.
    pub little: f64,
    /// Mean number of requests in flight.
    pub in_flight: f64,
    /// CPU time of the client per reply; a client that polls uses all of its core.
    pub client_cpu_ns_per_message: f64,
    /// Busy time of the client's loop per reply.
    pub client_busy_ns_per_message: f64,
    /// The share of the time in which the client was busy; the mean of several clients.
    pub client_busy: f64,
    /// The share of the time that other processes took from the client; the mean of several clients.
    pub stolen: f64,
    /// The server's resource use, as far as it was observed.
    pub server: ServerCost,
    /// Why the report is not valid; causes before their consequences. Empty: it is.
    pub reasons: Vec<Void>,
}

/// Nanoseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Latency {
    /// Arithmetic mean.
    pub mean_ns: f64,
    /// Median.
    pub p50_ns: u64,
    /// 90th percentile.
    pub p90_ns: u64,
    /// 99th percentile.
    pub p99_ns: u64,
    /// The median of the 99th percentiles of slices of the run; that of the run if it has too few replies for a slice.
    pub slice_p99_ns: u64,
    /// 99.9th percentile.
    pub p999_ns: u64,
    /// The longest.
    pub max_ns: u64,
}

/// Mean resource use of the server, in cores (seconds per second).
#[derive(Clone, Copy, Debug, Default)]
pub struct ServerCost {
    /// CPU time of its process; polling counts.
    pub cores: Option<f64>,
    /// Time in which its workers found work, from its metrics.
    pub busy: Option<f64>,
}

/// What limited the rate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bottleneck {
    /// The client was fully loaded: the server may be faster than this.
    Client,
    /// The client was not: the server, or the window or rate.
    Elsewhere,
}

/// Why a run is not valid.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum Void {
    /// The client could not use its core.
    #[error("the client cannot be pinned to core {core}: {why}")]
    NotPinned {
        /// The configured core.
        core: usize,
        /// The host kernel's error.
        why: String,
    },
    /// A signal was received.
    #[error("the run was interrupted")]
    Interrupted,
    /// Wrong replies.
    #[error("{0} replies were wrong{1}")]
    Wrong(u64, &'static str),
    /// Duplicate replies.
    #[error("{0} replies were duplicates")]
    Duplicated(u64),
    /// The server accepts no more connections.
    #[error("the server closed its port during the run: did it end?")]
    Gone,
    /// The server stopped answering.
    #[error(
        "the server sent nothing in the last {0:.0?} of {1:.0?}, and {2} requests were lost: did it end?"
    )]
    Silent(Duration, Duration, u64),
    /// A closed loop lost requests.
    #[error(
        "{0} requests were lost, more than {percent:.1} % of a closed loop: look for the reason in the server's counters, or ask for less in flight",
        percent = 100.0 * LOST_MAX
    )]
    Lost(u64),
    /// Fewer requests were in flight than configured, since connections ended.
    #[error(
        "{0} connections were closed by the server or fell silent, and {1} requests were lost with them, so that fewer were in flight than were asked for: look for the reason in the server's log and counters"
    )]
    Closed(u64, u64),
    /// Little's law does not hold.
    #[error(
        "rate x mean latency gives {:.2} times the requests that had to be in flight (Little's law): {}", .0,
        if *.1 {
            "the client had no processor time left, so it sent late and its latencies are not those of the server; give it more cores (--core) or ask for less in flight"
        } else {
            "the client did not keep the configured number in flight, or its latencies are wrong; run it again while the machine is quiet"
        }
    )]
    Little(f64, bool),
    /// The client did not have its core to itself.
    #[error(
        "other processes used {} % of the client's core: keep the machine quiet, give the client a core of its own (--core), or ask for less in flight",
        percent(*.0)
    )]
    Stolen(f64),
    /// The open loop could not send its rate.
    #[error(
        "{:.1} % of the requests could not be sent, since {}: ask for a lower rate", 100.0 * .0,
        if *.1 { "the client is too slow" } else { "too many were in flight" }
    )]
    Unsent(f64, bool),
    /// Too short.
    #[error(
        "only {0} replies came, which is too few for percentiles: measure for longer (--duration)"
    )]
    Few(u64),
}

/// A share in percent, rounded up: it never looks smaller than the exceeded limit.
fn percent(share: f64) -> u64 {
    (100.0 * share - 1e-6).ceil() as u64
}

impl Void {
    /// The option of `serval bench` that accepts such a run. Wrong replies are never accepted.
    pub fn accepted_by(&self) -> Option<String> {
        match self {
            // With a margin for the next run.
            Self::Stolen(share) => {
                Some(format!("--stolen-max {}", ((percent(*share) + 3) / 5 * 5 + 5).min(100)))
            }
            _ => None,
        }
    }
}

impl Report {
    pub(super) fn nothing(plan: &Plan, void: Void) -> Self {
        Self {
            target: plan.target.to_string(),
            class: plan.class(),
            mode: plan.mode,
            work: plan.work.to_string(),
            sent: 0,
            replied: 0,
            wrong: 0,
            lost: 0,
            duplicated: 0,
            late: 0,
            hit_ratio: None,
            rate: 0.0,
            latency: Latency::default(),
            distribution_us: Vec::new(),
            little: 0.0,
            in_flight: 0.0,
            client_cpu_ns_per_message: 0.0,
            client_busy_ns_per_message: 0.0,
            client_busy: 0.0,
            stolen: 0.0,
            server: ServerCost::default(),
            reasons: vec![void],
        }
    }

    pub(super) fn new(
        plan: &Plan,
        window: Option<usize>,
        outcome: &Outcome,
        server: ServerCost,
    ) -> Self {
        let elapsed_ns = (outcome.elapsed.as_nanos() as f64).max(1.0);
        // Of all clients together.
        let client_ns = elapsed_ns * plan.clients() as f64;
        let in_flight = outcome.waiting_ns as f64 / elapsed_ns;
        let expected = window.map_or(in_flight, |window| window as f64).max(1e-9);
        let busy = outcome.busy.as_nanos() as f64;
        let measured = (outcome.measured as f64).max(1.0);
        let cpu = outcome.cpu.as_nanos() as f64;
        let hist = &outcome.latency;
        let quantile = |q| hist.value_at_quantile(q);
        let mut report = Self {
            sent: outcome.sent,
            replied: outcome.replied,
            wrong: outcome.wrong,
            lost: outcome.lost,
            duplicated: outcome.duplicated,
            late: outcome.late,
            hit_ratio: outcome.lookups.hit_ratio(),
            rate: outcome.rate(),
            latency: Latency {
                mean_ns: hist.mean(),
                p50_ns: quantile(0.5),
                p90_ns: quantile(0.9),
                p99_ns: quantile(0.99),
                slice_p99_ns: outcome.slice_p99_ns().unwrap_or(quantile(0.99)),
                p999_ns: quantile(0.999),
                max_ns: hist.max(),
            },
            distribution_us: distribution_us(hist),
            little: outcome.in_flight_ns as f64 / elapsed_ns / expected,
            in_flight,
            client_cpu_ns_per_message: cpu / (outcome.replied as f64).max(1.0),
            client_busy_ns_per_message: busy / measured,
            client_busy: busy / client_ns,
            stolen: outcome.stolen.as_nanos() as f64 / client_ns,
            server,
            ..Self::nothing(plan, Void::Interrupted)
        };
        report.reasons = report.judge(plan, window, outcome);
        report
    }

    /// Whether the numbers can be trusted.
    pub fn is_trusted(&self) -> bool {
        self.reasons.is_empty()
    }

    /// The first reason why they cannot.
    pub fn void(&self) -> Option<&Void> {
        self.reasons.first()
    }

    /// Whether there are numbers: a run that could not begin has none.
    pub fn has_numbers(&self) -> bool {
        self.rate > 0.0
    }

    /// The reasons that make the run void, causes before their consequences.
    fn judge(&self, plan: &Plan, window: Option<usize>, outcome: &Outcome) -> Vec<Void> {
        let mut reasons = Vec::new();
        if plan.cancel.load(std::sync::atomic::Ordering::Relaxed) {
            reasons.push(Void::Interrupted);
        }
        if outcome.duplicated > 0 {
            reasons.push(Void::Duplicated(outcome.duplicated));
        }
        if outcome.wrong > 0 {
            let in_order = self.class == Class::T2 && !plan.work.has_identity();
            let hint = if in_order {
                ", or came behind one that was lost (the server's drops tell), or in another order than their requests (which only dispatch = \"flow-hash\" avoids)"
            } else {
                ""
            };
            reasons.push(Void::Wrong(outcome.wrong, hint));
        }
        let closed = plan.window();
        let silence = outcome.silence.as_secs_f64() / outcome.elapsed.as_secs_f64().max(1e-9);
        if outcome.lost > 0 && silence > SILENCE_MAX {
            reasons.push(Void::Silent(outcome.silence, outcome.elapsed, outcome.lost));
        } else if closed.is_some() && outcome.lost as f64 > LOST_MAX * outcome.sent as f64 {
            reasons.push(Void::Lost(outcome.lost));
        }
        if self.stolen > plan.stolen_max {
            reasons.push(Void::Stolen(self.stolen));
        }
        let unsent = outcome.unsent as f64 / (outcome.unsent + outcome.sent).max(1) as f64;
        if unsent > UNSENT_MAX {
            reasons.push(Void::Unsent(unsent, self.client_busy >= BUSY));
        }
        if outcome.latency.len() < REPLIES_MIN {
            reasons.push(Void::Few(outcome.latency.len()));
        } else if let Some(ratio) = self.contradiction(closed, window, outcome) {
            // The requests of a closed connection are not in flight until another one is open.
            let tcp = matches!(plan.target, Target::Tcp(_));
            reasons.push(match outcome.reconnects {
                times @ 1.. if tcp => Void::Closed(times, outcome.lost),
                _ => Void::Little(ratio, self.bottleneck() == Bottleneck::Client),
            });
        }
        reasons
    }

    /// The ratio of the sides of Little's law, if they contradict each other.
    fn contradiction(
        &self,
        closed: Option<usize>,
        window: Option<usize>,
        outcome: &Outcome,
    ) -> Option<f64> {
        if !little_holds(self.little, LITTLE_TOLERANCE) {
            return Some(self.little);
        }
        // Both sides are sums of the same client: the configured window is not.
        let filled = self.in_flight / closed? as f64;
        if !(FILLED_MIN..=FILLED_MAX).contains(&filled) {
            return Some(filled);
        }
        // The reported values must obey it as well, except for requests that were in flight at the beginning or the
        // end, whose latency counts completely or not at all. Lost requests have no latency, but were in flight.
        let elapsed_ns = outcome.elapsed.as_nanos().max(1) as f64;
        let in_flight = window.map_or(self.in_flight, |window| window as f64);
        let lost = outcome.lost_ns as f64 / elapsed_ns;
        let shown = (self.rate * self.latency.mean_ns / 1e9 + lost) / in_flight;
        let edge = 2.0 * self.latency.max_ns as f64 / elapsed_ns;
        (!little_holds(shown, LITTLE_TOLERANCE + edge)).then_some(shown)
    }

    /// What limited the rate.
    pub fn bottleneck(&self) -> Bottleneck {
        if self.client_busy >= BUSY { Bottleneck::Client } else { Bottleneck::Elsewhere }
    }

    /// CPU time of the server per reply, if its process is known.
    pub fn server_cpu_ns_per_message(&self) -> Option<f64> {
        self.server.cores.filter(|_| self.rate > 0.0).map(|cores| 1e9 * cores / self.rate)
    }

    /// Busy time of the server's workers per reply, if its metrics are known.
    pub fn server_busy_ns_per_message(&self) -> Option<f64> {
        self.server.busy.filter(|_| self.rate > 0.0).map(|busy| 1e9 * busy / self.rate)
    }

    /// Everything as JSON. A run without replies has only counts.
    pub fn to_json(&self) -> Json {
        let (mode, asked) = match self.mode {
            Mode::Closed { window } => ("closed", json!({ "window": window })),
            Mode::Open { rate } => ("open", json!({ "rate": rate })),
        };
        let mut json = json!({
            "target": self.target, "class": self.class.to_string(), "work": self.work,
            "mode": mode, "asked": asked, "trusted": self.is_trusted(),
            "reasons": self.reasons.iter().map(reason_json).collect::<Vec<_>>(),
            "sent": self.sent, "replied": self.replied, "wrong": self.wrong, "lost": self.lost,
            "duplicated": self.duplicated, "late": self.late,
        });
        let Some(fields) = json.as_object_mut().filter(|_| self.has_numbers()) else {
            return json;
        };
        let l = &self.latency;
        fields.insert("rate".into(), json!(self.rate));
        if let Some(ratio) = self.hit_ratio {
            fields.insert("hit_ratio".into(), json!(ratio));
        }
        let latency = json!({
            "mean": l.mean_ns, "p50": l.p50_ns, "p90": l.p90_ns, "p99": l.p99_ns,
            "slice_p99": l.slice_p99_ns, "p999": l.p999_ns, "max": l.max_ns,
        });
        fields.insert("latency_ns".into(), latency);
        fields.insert("little".into(), json!(self.little));
        fields.insert("in_flight".into(), json!(self.in_flight));
        fields.insert("client_cpu_ns_per_message".into(), json!(self.client_cpu_ns_per_message));
        fields.insert("client_busy_ns_per_message".into(), json!(self.client_busy_ns_per_message));
        fields.insert("client_busy".into(), json!(self.client_busy));
        fields.insert("stolen".into(), json!(self.stolen));
        let client = self.bottleneck() == Bottleneck::Client;
        fields.insert("bottleneck".into(), json!(if client { "client" } else { "elsewhere" }));
        let server = self.server_cpu_ns_per_message();
        fields.insert("server_cpu_ns_per_message".into(), json!(server));
        let busy = self.server_busy_ns_per_message();
        fields.insert("server_busy_ns_per_message".into(), json!(busy));
        json
    }
}

/// A reason as JSON, with `accepted_by` if an option accepts it.
fn reason_json(reason: &Void) -> Json {
    let mut json = json!({ "reason": reason.to_string() });
    if let (Some(fields), Some(option)) = (json.as_object_mut(), reason.accepted_by()) {
        fields.insert("accepted_by".into(), json!(option));
    }
    json
}

/// Little's law, as the ratio of its sides.
fn little_holds(ratio: f64, tolerance: f64) -> bool {
    (ratio - 1.0).abs() <= tolerance
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::client;
    use proptest::prelude::*;

    /// The result of a client with `really` requests in flight when each takes `took_ns`.
    fn outcome(really: u64, took_ns: u64, replies: u64) -> Outcome {
        let mut outcome = Outcome::new(client::latencies());
        outcome.latency.record_n(took_ns, replies).unwrap();
        outcome.sent = replies;
        outcome.replied = replies;
        outcome.measured = replies;
        outcome.in_flight_ns = replies * took_ns;
        outcome.waiting_ns = u128::from(outcome.in_flight_ns);
        outcome.elapsed = Duration::from_nanos(outcome.in_flight_ns / really);
        outcome
    }

    fn judged(plan: &Plan, outcome: &Outcome) -> Option<Void> {
        Report::new(plan, plan.window(), outcome, ServerCost::default()).void().cloned()
    }

    proptest! {
        #[test]
        fn a_client_that_miscounts_its_window_is_caught(
            really in 1..5000u64, says in 1..5000usize, took_ns in 1000..1_000_000u64,
        ) {
            let mut plan = Plan::new("udp://127.0.0.1:9".parse().unwrap());
            plan.mode = Mode::Closed { window: says };
            let ratio = really as f64 / says as f64;
            let void = judged(&plan, &outcome(really, took_ns, 100 * really + 10_000));
            if (ratio - 1.0).abs() < 0.04 {
                prop_assert_eq!(void, None);
            } else if (ratio - 1.0).abs() > 0.06 {
                prop_assert!(matches!(void, Some(Void::Little(..))), "{:?}", void);
            }
        }

        #[test]
        fn latencies_in_another_unit_are_caught(window in 1..5000u64, factor in prop_oneof![0.0..0.8, 1.3..1000.0f64]) {
            let mut plan = Plan::new("tcp://127.0.0.1:9".parse().unwrap());
            plan.mode = Mode::Closed { window: window as usize };
            let mut outcome = outcome(window, 100_000, 100 * window + 10_000);
            let count = outcome.latency.len();
            outcome.latency.reset();
            outcome.latency.record_n((100_000.0 * factor) as u64 + 1, count).unwrap();
            prop_assert!(matches!(judged(&plan, &outcome), Some(Void::Little(..))));
        }
    }

    #[test]
    fn causes_are_reported_before_consequences() {
        let plan = Plan::new("udp://127.0.0.1:9".parse().unwrap());
        let mut bad = outcome(1, 1000, 10_000);
        assert_eq!(judged(&plan, &bad), None);
        bad.in_flight_ns *= 2;
        assert_eq!(judged(&plan, &bad), Some(Void::Little(2.0, false)));
        bad.stolen = bad.elapsed / 2;
        assert_eq!(judged(&plan, &bad), Some(Void::Stolen(0.5)));
        bad.lost = 10;
        bad.silence = bad.elapsed / 5;
        assert!(matches!(judged(&plan, &bad), Some(Void::Silent(..))));
        bad.wrong = 3;
        assert_eq!(judged(&plan, &bad), Some(Void::Wrong(3, "")));
        bad.duplicated = 2;
        assert_eq!(judged(&plan, &bad), Some(Void::Duplicated(2)));
    }

    #[test]
    fn closed_connections_are_reported_before_littles_law() {
        let mut bad = outcome(1, 1000, 10_000);
        (bad.lost, bad.reconnects, bad.in_flight_ns) = (5, 2, bad.in_flight_ns / 2);
        let tcp = Plan::new("tcp://127.0.0.1:9".parse().unwrap());
        assert_eq!(judged(&tcp, &bad), Some(Void::Closed(2, 5)));
        let udp = Plan::new("udp://127.0.0.1:9".parse().unwrap());
        assert!(
            matches!(judged(&udp, &bad), Some(Void::Little(..))),
            "a socket is not a connection"
        );
        bad.in_flight_ns *= 2;
        assert_eq!(judged(&tcp, &bad), None, "a connection that was reopened at once");
    }

    #[test]
    fn a_closed_loop_fills_its_window_and_loses_nothing() {
        // Without a window that is always full (batches, shared memory), and with losses.
        let judged = |plan: &Plan, outcome: &Outcome| {
            Report::new(plan, None, outcome, ServerCost::default()).void().cloned()
        };
        let mut plan = Plan::new("udp://127.0.0.1:9".parse().unwrap());
        plan.mode = Mode::Closed { window: 64 };
        assert_eq!(judged(&plan, &outcome(64, 10_000, 100_000)), None);
        assert_eq!(judged(&plan, &outcome(48, 10_000, 100_000)), None);
        let half = judged(&plan, &outcome(32, 10_000, 100_000));
        assert!(
            matches!(half, Some(Void::Little(share, _)) if (share - 0.5).abs() < 0.01),
            "{half:?}"
        );
        // Latencies that do not match the requests in flight.
        let mut other = outcome(64, 10_000, 100_000);
        other.latency.reset();
        other.latency.record_n(5_000, 100_000).unwrap();
        other.lost = 1;
        assert!(matches!(judged(&plan, &other), Some(Void::Little(..))));
        // A few lost requests explain their own time, and no more.
        let mut few = outcome(64, 10_000, 100_000);
        (few.lost, few.lost_ns) = (50, few.in_flight_ns / 10);
        few.in_flight_ns += few.lost_ns;
        few.waiting_ns += u128::from(few.lost_ns);
        few.elapsed += few.elapsed / 10;
        assert_eq!(judged(&plan, &few), None);
        few.lost_ns = 0;
        assert!(matches!(judged(&plan, &few), Some(Void::Little(..))));
        (few.lost, few.lost_ns) = (101, few.in_flight_ns / 11);
        assert_eq!(judged(&plan, &few), Some(Void::Lost(101)));
        plan.mode = Mode::Open { rate: 1000.0 };
        assert_eq!(judged(&plan, &few), None, "an open loop does not wait for lost requests");
    }

    #[test]
    fn the_json_says_whether_the_numbers_are_trusted() {
        let mut plan = Plan::new("udp://127.0.0.1:9".parse().unwrap());
        let sound = Report::new(&plan, Some(1), &outcome(1, 1000, 10_000), ServerCost::default());
        assert_eq!(sound.to_json()["latency_ns"]["p50"], 1000);
        assert_eq!(sound.to_json()["trusted"], true);
        assert_eq!(sound.to_json()["reasons"], json!([]));
        plan.mode = Mode::Closed { window: 2 };
        let void = Report::new(&plan, Some(2), &outcome(1, 1000, 10_000), ServerCost::default());
        let json = void.to_json();
        assert_eq!((&json["trusted"], &json["latency_ns"]["p50"]), (&json!(false), &json!(1000)));
        assert!(json["reasons"][0]["reason"].as_str().unwrap().contains("Little"), "{json}");
        let nothing = Report::nothing(&plan, Void::Gone).to_json();
        assert!(nothing["rate"].is_null() && nothing["trusted"] == false, "{nothing}");
    }

    #[test]
    fn every_reason_is_reported_and_only_a_stolen_core_is_accepted_by_an_option() {
        let mut plan = Plan::new("udp://127.0.0.1:9".parse().unwrap());
        let mut bad = outcome(1, 1000, 10_000);
        bad.stolen = bad.elapsed / 10;
        let report = |plan: &Plan, bad: &Outcome| {
            Report::new(plan, Some(1), bad, ServerCost::default()).reasons
        };
        let stolen = report(&plan, &bad);
        assert_eq!(stolen, [Void::Stolen(0.1)]);
        assert!(
            stolen[0].to_string().starts_with("other processes used 10 % of the client's core")
        );
        assert_eq!(stolen[0].accepted_by().as_deref(), Some("--stolen-max 15"));
        plan.stolen_max = 0.15;
        assert_eq!(report(&plan, &bad), []);
        plan.stolen_max = 1.0;
        bad.wrong = 1;
        bad.duplicated = 1;
        let wrong = report(&plan, &bad);
        assert_eq!(wrong, [Void::Duplicated(1), Void::Wrong(1, "")]);
        assert!(wrong.iter().all(|reason| reason.accepted_by().is_none()));
        for (share, option) in [(0.051, "10"), (0.12, "20"), (0.15, "20"), (0.99, "100")] {
            let option = format!("--stolen-max {option}");
            assert_eq!(Void::Stolen(share).accepted_by(), Some(option), "{share}");
        }
    }
}
