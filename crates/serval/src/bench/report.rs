//! What a measurement found, and whether it is to be believed.

use std::time::Duration;

use serde_json::{Value as Json, json};

use super::{Class, Mode, Plan, Target};
use crate::client::{Outcome, distribution_us};

/// How far a run may be from Little's law.
const LITTLE_TOLERANCE: f64 = 0.05;
/// Share of the window of a closed loop that is in flight in the mean, at least: who sends in trains or
/// waits for its turn fills it less than whole.
const FILLED_MIN: f64 = 0.7;
/// At most; what is above 1 is the inaccuracy of the clock's looks.
const FILLED_MAX: f64 = 1.05;
/// Share of a closed loop's requests that may be lost: what is lost was not served, and a client that
/// waits for it loads the server less than it says.
const LOST_MAX: f64 = 0.001;
/// Share of an open loop's arrivals that may be left unsent.
const UNSENT_MAX: f64 = 0.01;
/// Share of the measured part that a server which loses requests may end with in silence.
const SILENCE_MAX: f64 = 0.1;
/// Fewer replies than this say nothing about a distribution.
const REPLIES_MIN: u64 = 100;
/// From this share on, the client or the server has no time left.
const BUSY: f64 = 0.95;

/// One measurement. All times are nanoseconds of CLOCK_MONOTONIC or CPU time.
#[derive(Clone, Debug)]
pub struct Report {
    /// The server.
    pub target: String,
    /// The kind of client.
    pub class: Class,
    /// When requests left.
    pub mode: Mode,
    /// What was asked.
    pub work: String,
    /// Requests sent, or in flight when the measurement began.
    pub sent: u64,
    /// Right replies.
    pub replied: u64,
    /// Replies that were not the right ones.
    pub wrong: u64,
    /// Requests without a reply in time.
    pub lost: u64,
    /// Replies that came twice.
    pub duplicated: u64,
    /// Right replies that came after their request had been given up.
    pub late: u64,
    /// The share of gets that found their value, where there were any.
    pub hit_ratio: Option<f64>,
    /// Right replies a second.
    pub rate: f64,
    /// From sending (open loop: arrival) to reply.
    pub latency: Latency,
    /// Shares of the replies, and the microseconds they took at most: the whole distribution.
    pub distribution_us: Vec<(f64, f64)>,
    /// Requests in flight by Little's law, over those there were by the client's count: in a closed loop
    /// of sockets and connections, rate x mean latency / window. Requests that were lost or were in
    /// flight at the beginning or the end count with the measured time they were in flight.
    pub little: f64,
    /// Requests in flight, in the mean.
    pub in_flight: f64,
    /// CPU time of the client for each reply; a client that polls uses all of its core.
    pub client_cpu_ns_per_message: f64,
    /// Time of the client's loop in which it did anything, for each reply.
    pub client_busy_ns_per_message: f64,
    /// The share of the time in which the client did anything; of several clients, in the mean.
    pub client_busy: f64,
    /// The share of the time that others took from the client; of several clients, in the mean.
    pub stolen: f64,
    /// What the server used, as far as it was looked at.
    pub server: ServerCost,
    /// Why none of this is to be believed.
    pub void: Option<Void>,
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
    /// 99.9th percentile.
    pub p999_ns: u64,
    /// The longest.
    pub max_ns: u64,
}

/// What the server used in the mean, in cores (seconds a second).
#[derive(Clone, Copy, Debug, Default)]
pub struct ServerCost {
    /// CPU time of its process; polling counts.
    pub cores: Option<f64>,
    /// Time in which its workers found something to do, by its own metrics.
    pub busy: Option<f64>,
}

/// What kept the rate from being higher.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bottleneck {
    /// The client had no time left: the server may be faster than this.
    Client,
    /// The client had time left: the server, or the window or rate asked for.
    Elsewhere,
}

/// Why a run is not to be believed.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum Void {
    /// The client could not have its core.
    #[error("the client cannot be pinned to core {core}: {why}")]
    NotPinned {
        /// The core asked for.
        core: usize,
        /// What the host kernel said.
        why: String,
    },
    /// A signal came.
    #[error("the run was interrupted")]
    Interrupted,
    /// Wrong replies.
    #[error("{0} replies were wrong{1}")]
    Wrong(u64, &'static str),
    /// Replies that came twice.
    #[error("{0} replies came twice")]
    Duplicated(u64),
    /// The server accepts nobody any more.
    #[error("the server closed its port during the run: did it end?")]
    Gone,
    /// The server stopped answering.
    #[error(
        "the server said nothing in the last {0:.0?} of {1:.0?}, and {2} requests were lost: did it end?"
    )]
    Silent(Duration, Duration, u64),
    /// A closed loop lost requests.
    #[error(
        "{0} requests were lost, more than {percent:.1} % of a closed loop: look for the reason in the server's counters, or ask for less in flight",
        percent = 100.0 * LOST_MAX
    )]
    Lost(u64),
    /// Fewer were in flight than asked for, since connections ended.
    #[error(
        "{0} connections were closed by the server or fell silent, and {1} requests were lost with them, so that fewer were in flight than were asked for: look for the reason in the server's log and counters"
    )]
    Closed(u64, u64),
    /// Little's law does not hold.
    #[error(
        "rate x mean latency gives {0:.2} times the requests that were in flight (Little's law): the client does not count what it says it does"
    )]
    Little(f64),
    /// The client was not let work.
    #[error(
        "somebody else had the client's core for {:.0} % of the time: keep the machine quiet, give the client a core of its own (--core), or ask for less in flight",
        100.0 * .0
    )]
    Stolen(f64),
    /// The open loop was none.
    #[error(
        "{:.1} % of the requests could not be sent, since {}: ask for a lower rate", 100.0 * .0,
        if *.1 { "the client is too slow" } else { "too many were in flight" }
    )]
    Unsent(f64, bool),
    /// Too short.
    #[error("only {0} replies came, which is too few for percentiles: measure for longer")]
    Few(u64),
}

impl Report {
    pub(super) fn void(plan: &Plan, void: Void) -> Self {
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
            void: Some(void),
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
        let measured = (outcome.latency.len() as f64).max(1.0);
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
            ..Self::void(plan, Void::Interrupted)
        };
        report.void = report.judge(plan, window, outcome);
        report
    }

    /// What, if anything, makes the run void; the cause before its consequences.
    fn judge(&self, plan: &Plan, window: Option<usize>, outcome: &Outcome) -> Option<Void> {
        use std::sync::atomic::Ordering;
        if plan.cancel.load(Ordering::Relaxed) {
            return Some(Void::Interrupted);
        }
        if outcome.duplicated > 0 {
            return Some(Void::Duplicated(outcome.duplicated));
        }
        if outcome.wrong > 0 {
            let in_order = self.class == Class::T2 && !plan.work.has_identity();
            let hint = if in_order {
                ", or came behind one that was lost (the server's drops tell), or in another order than their requests (which only dispatch = \"flow-hash\" avoids)"
            } else {
                ""
            };
            return Some(Void::Wrong(outcome.wrong, hint));
        }
        let silence = outcome.silence.as_secs_f64() / outcome.elapsed.as_secs_f64().max(1e-9);
        if outcome.lost > 0 && silence > SILENCE_MAX {
            return Some(Void::Silent(outcome.silence, outcome.elapsed, outcome.lost));
        }
        let closed = plan.window();
        if closed.is_some() && outcome.lost as f64 > LOST_MAX * outcome.sent as f64 {
            return Some(Void::Lost(outcome.lost));
        }
        if self.stolen > plan.stolen_max {
            return Some(Void::Stolen(self.stolen));
        }
        let unsent = outcome.unsent as f64 / (outcome.unsent + outcome.sent).max(1) as f64;
        if unsent > UNSENT_MAX {
            return Some(Void::Unsent(unsent, self.client_busy >= BUSY));
        }
        if outcome.latency.len() < REPLIES_MIN {
            return Some(Void::Few(outcome.latency.len()));
        }
        let ratio = self.contradiction(closed, window, outcome)?;
        // What a closed connection held is not in flight until another one is open.
        let tcp = matches!(plan.target, Target::Tcp(_));
        Some(match outcome.reconnects {
            times @ 1.. if tcp => Void::Closed(times, outcome.lost),
            _ => Void::Little(ratio),
        })
    }

    /// The sides of Little's law as a ratio, where they contradict each other.
    fn contradiction(
        &self,
        closed: Option<usize>,
        window: Option<usize>,
        outcome: &Outcome,
    ) -> Option<f64> {
        if !little_holds(self.little, LITTLE_TOLERANCE) {
            return Some(self.little);
        }
        // Both sides of that are sums of the same client: the window asked for is not.
        let filled = self.in_flight / closed? as f64;
        if !(FILLED_MIN..=FILLED_MAX).contains(&filled) {
            return Some(filled);
        }
        // What is shown has to obey it as well, but for requests that were in flight at the beginning
        // or the end: of those, the latency counts whole or not at all. What was lost has no latency,
        // but it was in flight.
        let elapsed_ns = outcome.elapsed.as_nanos().max(1) as f64;
        let in_flight = window.map_or(self.in_flight, |window| window as f64);
        let lost = outcome.lost_ns as f64 / elapsed_ns;
        let shown = (self.rate * self.latency.mean_ns / 1e9 + lost) / in_flight;
        let edge = 2.0 * self.latency.max_ns as f64 / elapsed_ns;
        (!little_holds(shown, LITTLE_TOLERANCE + edge)).then_some(shown)
    }

    /// What kept the rate from being higher.
    pub fn bottleneck(&self) -> Bottleneck {
        if self.client_busy >= BUSY { Bottleneck::Client } else { Bottleneck::Elsewhere }
    }

    /// CPU time of the server for each reply, if its process is known.
    pub fn server_cpu_ns_per_message(&self) -> Option<f64> {
        self.server.cores.filter(|_| self.rate > 0.0).map(|cores| 1e9 * cores / self.rate)
    }

    /// Time for which the server's workers had something to do for each reply, if its metrics are known.
    pub fn server_busy_ns_per_message(&self) -> Option<f64> {
        self.server.busy.filter(|_| self.rate > 0.0).map(|busy| 1e9 * busy / self.rate)
    }

    /// Everything, for programs. A void report has no numbers but counts.
    pub fn to_json(&self) -> Json {
        let (mode, asked) = match self.mode {
            Mode::Closed { window } => ("closed", json!({ "window": window })),
            Mode::Open { rate } => ("open", json!({ "rate": rate })),
        };
        let mut json = json!({
            "target": self.target, "class": self.class.to_string(), "work": self.work,
            "mode": mode, "asked": asked,
            "sent": self.sent, "replied": self.replied, "wrong": self.wrong, "lost": self.lost,
            "duplicated": self.duplicated, "late": self.late,
            "void": self.void.as_ref().map(ToString::to_string),
        });
        let Some(fields) = json.as_object_mut().filter(|_| self.void.is_none()) else {
            return json;
        };
        let l = &self.latency;
        fields.insert("rate".into(), json!(self.rate));
        if let Some(ratio) = self.hit_ratio {
            fields.insert("hit_ratio".into(), json!(ratio));
        }
        let latency = json!({
            "mean": l.mean_ns, "p50": l.p50_ns, "p90": l.p90_ns, "p99": l.p99_ns,
            "p999": l.p999_ns, "max": l.max_ns,
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

/// Little's law, as a ratio of its sides.
fn little_holds(ratio: f64, tolerance: f64) -> bool {
    (ratio - 1.0).abs() <= tolerance
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::client;
    use proptest::prelude::*;

    /// What a client with `really` requests in flight reports when each takes `took_ns`.
    fn outcome(really: u64, took_ns: u64, replies: u64) -> Outcome {
        let mut outcome = Outcome::new(client::latencies());
        outcome.latency.record_n(took_ns, replies).unwrap();
        outcome.sent = replies;
        outcome.replied = replies;
        outcome.in_flight_ns = replies * took_ns;
        outcome.waiting_ns = u128::from(outcome.in_flight_ns);
        outcome.elapsed = Duration::from_nanos(outcome.in_flight_ns / really);
        outcome
    }

    fn judged(plan: &Plan, outcome: &Outcome) -> Option<Void> {
        Report::new(plan, plan.window(), outcome, ServerCost::default()).void
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
                prop_assert!(matches!(void, Some(Void::Little(_))), "{:?}", void);
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
            prop_assert!(matches!(judged(&plan, &outcome), Some(Void::Little(_))));
        }
    }

    #[test]
    fn causes_are_told_before_consequences() {
        let plan = Plan::new("udp://127.0.0.1:9".parse().unwrap());
        let mut bad = outcome(1, 1000, 10_000);
        assert_eq!(judged(&plan, &bad), None);
        bad.in_flight_ns *= 2;
        assert_eq!(judged(&plan, &bad), Some(Void::Little(2.0)));
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
    fn closed_connections_are_told_before_the_law_that_they_break() {
        let mut bad = outcome(1, 1000, 10_000);
        (bad.lost, bad.reconnects, bad.in_flight_ns) = (5, 2, bad.in_flight_ns / 2);
        let tcp = Plan::new("tcp://127.0.0.1:9".parse().unwrap());
        assert_eq!(judged(&tcp, &bad), Some(Void::Closed(2, 5)));
        let udp = Plan::new("udp://127.0.0.1:9".parse().unwrap());
        assert!(matches!(judged(&udp, &bad), Some(Void::Little(_))), "a socket is no connection");
        bad.in_flight_ns *= 2;
        assert_eq!(judged(&tcp, &bad), None, "one that was opened again at once");
    }

    #[test]
    fn a_closed_loop_fills_its_window_and_loses_nothing() {
        // Without a window that the client keeps full (trains, shared memory), and with what is lost.
        let judged = |plan: &Plan, outcome: &Outcome| {
            Report::new(plan, None, outcome, ServerCost::default()).void
        };
        let mut plan = Plan::new("udp://127.0.0.1:9".parse().unwrap());
        plan.mode = Mode::Closed { window: 64 };
        assert_eq!(judged(&plan, &outcome(64, 10_000, 100_000)), None);
        assert_eq!(judged(&plan, &outcome(48, 10_000, 100_000)), None);
        let half = judged(&plan, &outcome(32, 10_000, 100_000));
        assert!(
            matches!(half, Some(Void::Little(share)) if (share - 0.5).abs() < 0.01),
            "{half:?}"
        );
        // Latencies that are not those of what was in flight.
        let mut other = outcome(64, 10_000, 100_000);
        other.latency.reset();
        other.latency.record_n(5_000, 100_000).unwrap();
        other.lost = 1;
        assert!(matches!(judged(&plan, &other), Some(Void::Little(_))));
        // A few lost requests explain what they held, and no more.
        let mut few = outcome(64, 10_000, 100_000);
        (few.lost, few.lost_ns) = (50, few.in_flight_ns / 10);
        few.in_flight_ns += few.lost_ns;
        few.waiting_ns += u128::from(few.lost_ns);
        few.elapsed += few.elapsed / 10;
        assert_eq!(judged(&plan, &few), None);
        few.lost_ns = 0;
        assert!(matches!(judged(&plan, &few), Some(Void::Little(_))));
        (few.lost, few.lost_ns) = (101, few.in_flight_ns / 11);
        assert_eq!(judged(&plan, &few), Some(Void::Lost(101)));
        plan.mode = Mode::Open { rate: 1000.0 };
        assert_eq!(judged(&plan, &few), None, "an open loop does not stand still for what is lost");
    }

    #[test]
    fn a_void_report_tells_programs_no_rate() {
        let mut plan = Plan::new("udp://127.0.0.1:9".parse().unwrap());
        let sound = Report::new(&plan, Some(1), &outcome(1, 1000, 10_000), ServerCost::default());
        assert_eq!(sound.to_json()["latency_ns"]["p50"], 1000);
        assert!(sound.to_json()["void"].is_null());
        plan.mode = Mode::Closed { window: 2 };
        let void = Report::new(&plan, Some(2), &outcome(1, 1000, 10_000), ServerCost::default());
        assert!(void.to_json()["rate"].is_null() && void.to_json()["latency_ns"].is_null());
        assert!(void.to_json()["void"].as_str().unwrap().contains("Little"));
    }
}
