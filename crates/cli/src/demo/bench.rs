//! Two servers side by side: interleaved rounds with the same client.

use std::net::SocketAddr;
use std::time::Duration;

use hdrhistogram::Histogram;
use serde_json::{Value as Json, json};

use super::other_load::OtherLoad;
use super::{DemoError, Stage, check_complete};
use crate::screen::{Screen, Table, Tone};
use bench::client::{self, Load, Outcome, Stream, Workload};
use bench::plot::{self, Chart, Line};
use bench::units::per_second;

/// Requests in flight for the rate.
pub(super) const MANY: usize = 64;

/// A comparison of two servers.
pub(super) struct Comparison {
    /// Names of the two servers, one word each.
    pub(super) names: [&'static str; 2],
    /// Their descriptions, in one or two lines.
    pub(super) about: String,
    /// The first one's UDP and TCP ports.
    pub(super) udp: SocketAddr,
    pub(super) tcp: SocketAddr,
    pub(super) stream: Stream,
    /// The UDP port of the other server.
    pub(super) other: SocketAddr,
}

impl Comparison {
    /// Serval with its kernel on the workers against a host-centric server, with the same number of workers.
    pub(super) fn with_host_centric(
        (udp, tcp): (SocketAddr, SocketAddr),
        stream: Stream,
        other: SocketAddr,
        workers: usize,
    ) -> Self {
        let plural = if workers == 1 { "" } else { "s" };
        let about = format!(
            "Serval: {workers} worker{plural}, network and kernel on the same core. Host-centric: a network thread,\n  \
             a queue, {workers} worker thread{plural}, and the same compiled kernel."
        );
        Self { names: ["Serval", "host-centric"], about, udp, tcp, stream, other }
    }
}

/// Medians over the rounds.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Figures {
    p50_us: f64,
    p99_us: f64,
    rate: f64,
    /// `None`: it was not measured over TCP.
    tcp_rate: Option<f64>,
}

/// The result of a comparison.
#[derive(Clone, Debug)]
pub(super) struct Verdict {
    names: [&'static str; 2],
    about: String,
    first: Figures,
    other: Figures,
    /// Medians of the rounds' ratios: p50 and p99 (other / first), rate (first / other).
    p50_ratio: f64,
    p99_ratio: f64,
    rate_ratio: f64,
    /// Why the ratios mean nothing, if they do.
    disturbance: Option<String>,
    pub(super) rounds: usize,
    /// Latencies with one in flight, of all rounds.
    first_latency: Histogram<u64>,
    other_latency: Histogram<u64>,
}

impl Stage<'_> {
    /// Number of rounds, and the time of each measurement.
    fn rounds(&self) -> (usize, Duration) {
        if self.options.quick {
            (3, Duration::from_millis(150))
        } else {
            (5, Duration::from_millis(800))
        }
    }

    /// Runs one load and checks every reply.
    pub(super) fn measure(
        &self,
        address: SocketAddr,
        stream: Option<&Stream>,
        window: usize,
        workload: &mut dyn Workload,
    ) -> Result<Outcome, DemoError> {
        let (_, duration) = self.rounds();
        let load = Load {
            window,
            // The effects of a cold cache and a sleeping server are not measured.
            warmup: duration / 8,
            duration,
            timeout: Duration::from_secs(5),
            cancel: self.options.cancel.clone(),
            ..Load::default()
        };
        let mut workload = self.spoiled(workload);
        let outcome = match stream {
            Some(stream) => client::tcp(address, stream, &load, &mut workload),
            None => client::udp(address, &load, &mut workload),
        }?;
        self.check_interrupted()?;
        check_complete("measuring", &outcome)?;
        Ok(outcome)
    }

    /// The whole comparison. `workload` creates a new workload for each measurement.
    pub(super) fn compare<'w>(
        &self,
        comparison: &Comparison,
        mut workload: impl FnMut() -> Box<dyn Workload + 'w>,
    ) -> Result<Verdict, DemoError> {
        let (rounds, _) = self.rounds();
        let bar = self.progress("comparing, rounds interleaved", rounds);
        let (mut first, mut other) = (Vec::new(), Vec::new());
        let [mut first_latency, mut other_latency] = [(); 2].map(|()| client::latencies());
        let other_load = OtherLoad::begin();
        for _ in 0..rounds {
            let mut udp = |at, window| self.measure(at, None, window, &mut *workload());
            let one = [udp(comparison.udp, 1)?, udp(comparison.other, 1)?];
            let many = [udp(comparison.udp, MANY)?, udp(comparison.other, MANY)?];
            let tcp =
                self.measure(comparison.tcp, Some(&comparison.stream), MANY, &mut *workload())?;
            // Both have the same bucket bounds.
            let _ = first_latency.add(&one[0].latency);
            let _ = other_latency.add(&one[1].latency);
            first.push(figures(&one[0], &many[0], Some(tcp.rate())));
            other.push(figures(&one[1], &many[1], None));
            bar.inc(1);
        }
        bar.finish_and_clear();
        let pairs = || first.iter().zip(&other);
        Ok(Verdict {
            p50_ratio: median(pairs().map(|(s, o)| o.p50_us / s.p50_us)),
            p99_ratio: median(pairs().map(|(s, o)| o.p99_us / s.p99_us)),
            rate_ratio: median(pairs().map(|(s, o)| s.rate / o.rate)),
            disturbance: other_load.disturbance(),
            names: comparison.names,
            about: comparison.about.clone(),
            first: middle(&first),
            other: middle(&other),
            rounds,
            first_latency,
            other_latency,
        })
    }

    /// The conditions of the measurement.
    pub(super) fn caption(&self, verdict: &Verdict) -> String {
        format!(
            "  Client: one thread with ordinary kernel sockets on loopback (class T0); {}.\n  \
             Medians of {} interleaved rounds; ratios are medians of the rounds' ratios.\n  \
             {} Every reply was checked.\n",
            self.cores(),
            verdict.rounds,
            verdict.about,
        )
    }
}

impl Verdict {
    /// Name of the other server.
    pub(super) fn other_name(&self) -> &'static str {
        self.names[1]
    }

    /// The table.
    pub(super) fn table(&self, screen: &Screen) -> String {
        let [first, other] = self.names;
        let mut table = Table::new(&["", &format!(">{first}"), &format!(">{other}"), ""]);
        let (s, o) = (&self.first, &self.other);
        let us = |value: f64| format!("{value:.1} us");
        let mut row = |name: String, a: String, b: String, ratio: String, tone: Tone| {
            table.toned([(Tone::Plain, name), (Tone::Bold, a), (Tone::Plain, b), (tone, ratio)]);
        };
        // A ratio that the machine's load has made would be taken for Serval's.
        let shown = |ratio: f64, words: fn(f64) -> String| match &self.disturbance {
            Some(_) => ("disturbed".to_owned(), Tone::Yellow),
            None => (words(ratio), if ratio >= 1.0 { Tone::Green } else { Tone::Yellow }),
        };
        let (ratio, tone) = shown(self.p50_ratio, lower);
        row("p50, 1 in flight".into(), us(s.p50_us), us(o.p50_us), ratio, tone);
        let (ratio, tone) = shown(self.p99_ratio, lower);
        row("p99, 1 in flight".into(), us(s.p99_us), us(o.p99_us), ratio, tone);
        let (ratio, tone) = shown(self.rate_ratio, higher);
        let name = format!("rate, {MANY} in flight");
        row(name, per_second(s.rate), per_second(o.rate), ratio, tone);
        let name = format!("rate, {MANY} in flight, TCP");
        let shown = |rate: Option<f64>| rate.map_or_else(String::new, per_second);
        row(name, shown(s.tcp_rate), shown(o.tcp_rate), String::new(), Tone::Plain);
        table.render(screen)
    }

    /// The distributions of both servers' latencies.
    pub(super) fn chart(&self, title: &str, stage: &Stage<'_>) -> Chart {
        let [first, other] = self.names;
        let line = |name: &str, latency| Line {
            name: name.to_owned(),
            points: client::distribution_us(latency),
        };
        Chart {
            title: title.to_owned(),
            caption: format!(
                "One request in flight, client class T0, loopback; {} rounds; {}.",
                self.rounds,
                stage.cores()
            ),
            warning: None,
            x: plot::shares(),
            y: plot::latencies(),
            lines: vec![line(first, &self.first_latency), line(other, &self.other_latency)],
        }
    }

    pub(super) fn json(&self) -> Json {
        let figures = |f: &Figures| {
            let mut shown = json!({ "p50_us": f.p50_us, "p99_us": f.p99_us, "rate": f.rate });
            if let Some(rate) = f.tcp_rate {
                shown["tcp_rate"] = rate.into();
            }
            shown
        };
        let [first, other] = self.names.map(|name| name.to_lowercase().replace('-', "_"));
        let ratio = |ratio: f64| self.disturbance.is_none().then_some(ratio);
        json!({
            "rounds": self.rounds,
            first: figures(&self.first),
            other: figures(&self.other),
            "p50_ratio": ratio(self.p50_ratio), "p99_ratio": ratio(self.p99_ratio),
            "rate_ratio": ratio(self.rate_ratio), "disturbed": self.disturbance,
        })
    }
}

fn figures(one: &Outcome, many: &Outcome, tcp_rate: Option<f64>) -> Figures {
    let (p50_us, p99_us) = (one.quantile_us(0.5), one.quantile_us(0.99));
    Figures { p50_us, p99_us, rate: many.rate(), tcp_rate }
}

fn middle(rounds: &[Figures]) -> Figures {
    Figures {
        p50_us: median(rounds.iter().map(|f| f.p50_us)),
        p99_us: median(rounds.iter().map(|f| f.p99_us)),
        rate: median(rounds.iter().map(|f| f.rate)),
        tcp_rate: rounds
            .iter()
            .all(|f| f.tcp_rate.is_some())
            .then(|| median(rounds.iter().filter_map(|f| f.tcp_rate))),
    }
}

/// The middle value; for an even count the lower of the two.
fn median(values: impl Iterator<Item = f64>) -> f64 {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    values.get(values.len().saturating_sub(1) / 2).copied().unwrap_or(0.0)
}

fn lower(ratio: f64) -> String {
    if ratio >= 1.0 { format!("{ratio:.1}x lower") } else { format!("{:.1}x higher", 1.0 / ratio) }
}

fn higher(ratio: f64) -> String {
    if ratio >= 1.0 { format!("{ratio:.1}x higher") } else { format!("{:.1}x lower", 1.0 / ratio) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_ratio_is_shown_of_a_disturbed_comparison() {
        let verdict = |disturbance: Option<&str>| Verdict {
            names: ["Serval", "host-centric"],
            about: String::new(),
            first: Figures::default(),
            other: Figures::default(),
            p50_ratio: 1.5,
            p99_ratio: 0.5,
            rate_ratio: 2.0,
            disturbance: disturbance.map(str::to_owned),
            rounds: 3,
            first_latency: client::latencies(),
            other_latency: client::latencies(),
        };
        let screen = Screen { json: false, colour: false };
        let (quiet, busy) = (verdict(None), verdict(Some("others")));
        let ratios = ["1.5x lower", "2.0x higher"];
        assert!(ratios.iter().all(|ratio| quiet.table(&screen).contains(ratio)));
        assert!(!ratios.iter().any(|ratio| busy.table(&screen).contains(ratio)));
        assert!(busy.table(&screen).contains("disturbed"));
        assert_eq!(quiet.json()["p99_ratio"], 0.5);
        assert!(busy.json()["p99_ratio"].is_null() && busy.json()["disturbed"] == "others");
    }

    #[test]
    fn medians_and_words() {
        assert_eq!(median([3.0, 1.0, 2.0].into_iter()), 2.0);
        assert_eq!(median([4.0, 1.0, 2.0, 3.0].into_iter()), 2.0);
        assert_eq!(median([].into_iter()), 0.0);
        assert_eq!(lower(4.0), "4.0x lower");
        assert_eq!(lower(0.5), "2.0x higher");
        assert_eq!(higher(0.25), "4.0x lower");
    }
}
