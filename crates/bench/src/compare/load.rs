//! The load on a server under measurement, and the resulting figures.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use super::pairs::Run;
use super::server::{START_MAX, Server};
use super::show::Figures;
use super::suite::{Load, SideSpec};
use super::{Cores, Schedule, SideError, Surroundings};
use crate::{Mode, Plan, PlanError, Report, Void};

/// Maximum share of the time that others may have a core that the client shares with them.
const SHARED_MAX: f64 = 0.5;
/// Share of the duration for which each window of the peak is measured, if a load is a multiple of it.
const PEAK_SHARE: f64 = 0.5;
/// If more than this multiple of the peak is answered, the peak was measured wrongly.
const PEAK_MAX: f64 = 1.05;
/// Largest share of the time that the client of an open loop may be busy if latencies are compared: with more, its own
/// queue is a part of them.
const CLIENT_BUSY_MAX: f64 = 0.75;

/// A load, and what the row knows about it.
pub(super) struct Offer<'r> {
    pub(super) load: &'r Load,
    /// The rate that `times_lower_peak` multiplies.
    pub(super) lower_peak: Option<f64>,
    /// Whether the row compares a latency.
    pub(super) is_latency: bool,
}

/// Whether a figure of a load is a latency.
pub(super) fn is_latency(figure: &str) -> bool {
    figure.ends_with("_ns") && !figure.ends_with("busy_ns") && !figure.ends_with("cpu_ns")
}

/// Measures one server once: starts it, applies the load, ends it. Without a command the side's memcached is the
/// server.
pub(super) fn measure_server(
    command: Option<&str>,
    side: &SideSpec,
    offer: &Offer<'_>,
    schedule: &Schedule,
    cores: &Cores,
    cancel: &Arc<AtomicBool>,
) -> Result<Run, SideError> {
    let Offer { load, lower_peak, is_latency } = *offer;
    // Lives as long as the server.
    let surroundings = Surroundings::new(side, cores)?;
    let command = command.map(|command| surroundings.fill_in(command, cores));
    let start = |command: String| Server::start(&command, cores.of(side), START_MAX);
    let server = command.map(start).transpose()?;
    let (url, id) = match (&server, &surroundings.database) {
        (Some(server), _) => (server.url(&load.url)?, server.id()),
        (None, Some(database)) => (format!("tcp://{}", database.0.address()), database.0.id()),
        (None, None) => unreachable!("rows are checked when they are read"),
    };
    let mut plan = closed_loop(&url, load, schedule, cores, cancel)?;
    let (mut peak, mut noise) = (lower_peak, None);
    let mut rate = load.rate;
    if let (Some(times), Some(found)) = (load.times_lower_peak, lower_peak) {
        rate = Some(times * found);
    }
    if let Some(times) = load.times_peak {
        match measure_peak(&plan, load.window, cores)? {
            Peak::Void(why) => return Ok(Run::Void(why)),
            Peak::Rate(found, disturbed) => {
                noise = disturbed;
                (peak, rate) = (Some(found), Some(times * found));
            }
        }
    }
    if let Some(rate) = rate {
        plan.mode = Mode::Open { rate };
    }
    plan.server_pid = Some(id);
    let database_cpu = || surroundings.database.as_ref()?.cpu_ns();
    let filled_ns = database_cpu();
    let report = run(&plan, cores)?;
    let account = server.map(Server::stop).transpose()?;
    let asked_ns = database_cpu().zip(filled_ns).map(|(now, before)| now - before);
    if let Some(void) = report.void() {
        if let Some(invalid) = invalid(void, lower_peak.is_some()) {
            return Ok(invalid);
        }
        noise = Some(void.to_string());
    }
    if rate.is_some() && is_latency && report.client_busy > CLIENT_BUSY_MAX {
        return Ok(Run::Void(format!(
            "the client was busy for {:.0} % of the time, so that its own queue is a part of the latency: give the load more `cores`, or a lower rate",
            100.0 * report.client_busy
        )));
    }
    let mut figures = figures(&report);
    if let Some(peak) = peak {
        if load.times_peak.is_some() && report.rate > PEAK_MAX * peak {
            let share = 100.0 * report.rate / peak;
            noise = Some(format!("{share:.0} % of the peak was answered: that was not the peak"));
        }
        figures.insert("peak_rate".to_owned(), peak);
        figures.insert("share_of_peak".to_owned(), report.rate / peak);
    }
    if let Some(account) = account.filter(|account| account.messages > 0) {
        let per_message = |ns: u64| ns as f64 / account.messages as f64;
        figures.insert("busy_ns".to_owned(), per_message(account.busy_ns));
        // Of its whole run, if the host does not provide the value of the measured part.
        figures.entry("server_cpu_ns".to_owned()).or_insert(per_message(account.cpu_ns));
        if let Some(ns) = asked_ns {
            figures.insert("database_cpu_ns".to_owned(), ns / account.messages as f64);
        }
    }
    Ok(match noise {
        None => Run::Figures(figures),
        Some(noise) => Run::Noisy(figures, noise),
    })
}

/// The peak of a server, which is started for it and ended; or why it has none.
pub(super) fn peak_of(
    command: &str,
    side: &SideSpec,
    load: &Load,
    schedule: &Schedule,
    cores: &Cores,
    cancel: &Arc<AtomicBool>,
) -> Result<Result<f64, String>, SideError> {
    let surroundings = Surroundings::new(side, cores)?;
    let command = surroundings.fill_in(command, cores);
    let server = Server::start(&command, cores.of(side), START_MAX)?;
    let plan = closed_loop(&server.url(&load.url)?, load, schedule, cores, cancel)?;
    let peak = measure_peak(&plan, load.window, cores)?;
    server.stop()?;
    Ok(match peak {
        // Noise in one of its loops does not matter: the best of them counts, and the figure is recorded.
        Peak::Rate(peak, _) => Ok(peak),
        Peak::Void(why) => Err(why),
    })
}

/// The load as a closed loop on a server.
fn closed_loop(
    url: &str,
    load: &Load,
    schedule: &Schedule,
    cores: &Cores,
    cancel: &Arc<AtomicBool>,
) -> Result<Plan, SideError> {
    let mut plan = Plan::new(url.parse().map_err(PlanError::from)?);
    plan.class = load.class();
    plan.work = load.workload.parse()?;
    plan.framing = load.framing().map_err(SideError::Load)?;
    plan.connections = load.connections;
    plan.timeout = load.timeout_s.map(Duration::from_secs_f64);
    plan.batch = load.batch.unwrap_or(1);
    if !load.shares_core {
        plan.cores = cores.client[..load.cores.unwrap_or(1)].to_vec();
    } else {
        // The time of other processes on a shared core is a part of the measurement.
        plan.stolen_max = SHARED_MAX;
    }
    plan.cancel = cancel.clone();
    plan.warmup = Duration::from_secs_f64(schedule.warmup_s);
    plan.duration = Duration::from_secs_f64(schedule.duration_s);
    plan.mode = Mode::Closed { window: load.window };
    Ok(plan)
}

/// The result of the search for the peak.
enum Peak {
    /// Right answers a second, and what disturbed the search.
    Rate(f64, Option<String>),
    /// Invalid, and not because of the machine.
    Void(String),
}

/// The highest rate of closed loops with half the window, the window and twice as much: a single one may be too short
/// to keep the server busy, or so long that requests are lost.
fn measure_peak(plan: &Plan, window: usize, cores: &Cores) -> Result<Peak, SideError> {
    let (mut peak, mut noise) = (0.0_f64, None);
    for window in [(window / 2).max(1), window, 2 * window] {
        let plan = Plan {
            mode: Mode::Closed { window },
            duration: plan.duration.mul_f64(PEAK_SHARE),
            connections: plan.connections.map(|count| count.min(window)),
            ..plan.clone()
        };
        let report = run(&plan, cores)?;
        match report.void() {
            // The rate is that of correct answers.
            None | Some(Void::Lost(_)) => {}
            // One that has ended does not answer the next loop either.
            Some(void) if is_noise(void) || matches!(void, Void::Silent(..)) => {
                noise = Some(format!("peak: {void}"));
            }
            Some(void) => return Ok(Peak::Void(format!("peak: {void}"))),
        }
        peak = peak.max(report.rate);
    }
    Ok(Peak::Rate(peak, noise))
}

/// Whether the machine (or the client on it) is the cause and not the server.
fn is_noise(void: &Void) -> bool {
    matches!(void, Void::Stolen(_) | Void::Little(..) | Void::Unsent(_, true))
}

/// What a void report means for its side; `None`: the machine disturbed it. `is_bearable`: the server could do more than the load asks for,
/// and has ended as it should.
fn invalid(void: &Void, is_bearable: bool) -> Option<Run> {
    let why = void.to_string();
    match void {
        void if is_noise(void) => None,
        // It stalled, or the machine did: the calibration around it tells.
        Void::Unsent(..) | Void::Silent(..) if is_bearable => Some(Run::Unloaded(why)),
        _ => Some(Run::Void(why)),
    }
}

/// Runs a load from the client's cores, whether the client spins there or shares it.
fn run(plan: &Plan, cores: &Cores) -> Result<Report, SideError> {
    let pinned = || {
        let core = cores.client[0];
        let pinned = sys::affinity::pin_current_thread(core);
        pinned.map_err(|error| SideError::Pin(core, error))?;
        // A client that is not pinned is a thread started by this one: it inherits the core.
        Ok(crate::run(plan)?)
    };
    let ran = std::thread::scope(|scope| scope.spawn(pinned).join());
    ran.unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}

fn figures(report: &Report) -> Figures {
    let latency = &report.latency;
    let mut figures: Figures = [
        ("rate", report.rate),
        ("mean_ns", latency.mean_ns),
        ("p50_ns", latency.p50_ns as f64),
        ("p90_ns", latency.p90_ns as f64),
        ("p99_ns", latency.p99_ns as f64),
        ("slice_p99_ns", latency.slice_p99_ns as f64),
        ("p999_ns", latency.p999_ns as f64),
        ("max_ns", latency.max_ns as f64),
        ("lost_share", report.lost as f64 / (report.sent as f64).max(1.0)),
        ("client_cpu_ns", report.client_cpu_ns_per_message),
        ("client_busy", report.client_busy),
    ]
    .map(|(name, value)| (name.to_owned(), value))
    .into();
    if let Some(ns) = report.server_cpu_ns_per_message() {
        figures.insert("server_cpu_ns".to_owned(), ns);
    }
    figures
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_side_that_stalls_under_a_load_that_it_can_bear_is_no_noise() {
        let (second, minute) = (Duration::from_secs(1), Duration::from_secs(60));
        for void in [Void::Unsent(0.2, false), Void::Silent(second, minute, 7)] {
            assert_eq!(invalid(&void, true), Some(Run::Unloaded(void.to_string())));
            assert_eq!(invalid(&void, false), Some(Run::Void(void.to_string())));
        }
        assert_eq!(invalid(&Void::Unsent(0.2, true), true), None, "the client was the cause");
        assert_eq!(invalid(&Void::Stolen(0.2), true), None);
        assert!(matches!(invalid(&Void::Gone, true), Some(Run::Void(_))));
    }
}
