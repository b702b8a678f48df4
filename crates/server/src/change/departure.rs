//! The last step of a change: services that leave are drained and released, as are the prepared services of a failed
//! change.
//!
//! What workers do not release in time is leaked (`base/slots.rs`), and reclaimed by a later change.

use std::sync::Arc;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use engine::metrics::ServiceMetrics;
use engine::topology::Launch;
use engine::{ControlMessage, DrainBarrier};
use wire::DropReason;
use wire::nic::PortIndex;

use crate::base::engine::Engine;
use crate::base::slots::{Holder, LeakedSlot, Releasing};
use crate::runtimes::Runtimes;
use crate::runtimes::supervisor::{PendingStarts, PreparedRuntime};

/// How often the barrier is checked.
const POLL_INTERVAL: Duration = Duration::from_millis(1);

/// A version of a service that leaves.
pub(super) struct DepartingService {
    pub(super) name: String,
    pub(super) slot: u16,
    pub(super) metrics: Arc<ServiceMetrics>,
    pub(super) barrier: DrainBarrier,
    pub(super) dropped_before: u64,
    /// Ports that the successor does not take over.
    pub(super) stopped: Vec<PortIndex>,
    /// Devices that it uses, by [`runtime::kinds::Kind::exclusive_key`], with their tenants.
    pub(super) devices: Vec<(String, String)>,
    /// Runtimes of its successor that wait for its own to end.
    pub(super) after_departure: Vec<PreparedRuntime>,
}

impl DepartingService {
    /// Whether it may run in a process that uses the device of the runtime.
    fn holds(&self, runtime: &PreparedRuntime) -> bool {
        let wanted = runtime.spec.exclusive_key();
        let of = |(device, tenant): &(String, String)| {
            wanted.as_ref() == Some(device) && runtime.spec.service.tenant == *tenant
        };
        matches!(runtime.spec.launch().0, Launch::Engine { .. }) && self.devices.iter().any(of)
    }
}

/// The result for a service that left.
pub(super) struct DepartureOutcome {
    pub(super) name: String,
    pub(super) unanswered: u64,
    pub(super) left_behind: bool,
    /// Runtimes of its successor.
    pub(super) awaited: Option<PendingStarts>,
    pub(super) not_started: Option<String>,
}

impl DepartureOutcome {
    pub(super) fn of(name: String) -> Self {
        Self { name, unanswered: 0, left_behind: false, awaited: None, not_started: None }
    }

    /// Waits until the runtimes serve or have failed.
    pub(super) fn wait(mut self, give_up: &dyn Fn() -> bool) -> Self {
        let waited = self.awaited.take().map_or(Ok(()), |awaited| awaited.wait(&mut || give_up()));
        if let Err(unready) = waited {
            let mut reasons: Vec<_> = unready.reasons().into_iter().map(|(_, why)| why).collect();
            // On several accelerators it may have several reasons.
            reasons.dedup();
            self.not_started = (!reasons.is_empty()).then(|| reasons.join("; "));
        }
        self
    }
}

/// Drains and releases the services that leave, one after the other. A runtime that waits for one of them starts
/// when no service that may share its process is left on its device; those that share a process start together.
pub(super) fn remove_all(
    engine: &mut Engine,
    runtimes: &mut Runtimes,
    departing: Vec<DepartingService>,
    give_up: &dyn Fn() -> bool,
) -> Vec<DepartureOutcome> {
    let mut outcomes: Vec<DepartureOutcome> = Vec::new();
    let mut waiting: Vec<(usize, Vec<PreparedRuntime>)> = Vec::new();
    let mut departing = departing.into_iter();
    while let Some(mut departing_service) = departing.next() {
        waiting.push((outcomes.len(), std::mem::take(&mut departing_service.after_departure)));
        outcomes.push(remove_service(engine, runtimes, departing_service, give_up));
        let left = departing.as_slice();
        let paused = |after_departure: &[PreparedRuntime]| {
            after_departure.iter().any(|s| left.iter().any(|l| l.holds(s)))
        };
        let free: Vec<_> =
            waiting.extract_if(.., |(_, after_departure)| !paused(after_departure)).collect();
        let (of, free): (Vec<_>, Vec<_>) =
            free.into_iter().filter(|(_, after_departure)| !after_departure.is_empty()).unzip();
        if let Some(supervisor) = runtimes.supervisor().filter(|_| !free.is_empty()) {
            let awaited = supervisor.add_each(free, engine.drain_time());
            for (of, awaited) in of.into_iter().zip(awaited) {
                outcomes[of].awaited = Some(awaited);
            }
        }
    }
    outcomes
}

/// Drains a service and releases it.
fn remove_service(
    engine: &mut Engine,
    runtimes: &mut Runtimes,
    departing_service: DepartingService,
    give_up: &dyn Fn() -> bool,
) -> DepartureOutcome {
    let DepartingService { name, slot, metrics, barrier, dropped_before, stopped, .. } =
        departing_service;
    let mut settled = wait_for(engine, &barrier, engine.drain_time(), give_up);
    if !settled && !give_up() {
        engine.fabric.post_to_all(|_| ControlMessage::Expire(slot));
        settled = wait_for(engine, &barrier, engine.timeouts.expiry, give_up);
    }
    let gone = if settled {
        release_slot(engine, runtimes, slot, &metrics, stopped, give_up)
    } else {
        let (metrics, holder) = (metrics.clone(), Holder::Unsettled(barrier));
        engine.leaked.push(LeakedSlot { slot, metrics, ports: stopped, holder });
        false
    };
    let dropped = metrics.snapshot().dropped(DropReason::DrainTimeout);
    let unanswered = dropped - dropped_before;
    DepartureOutcome { unanswered, left_behind: !gone, ..DepartureOutcome::of(name) }
}

/// Releases a slot that has nothing outstanding, and its own ports; returns whether everything was released. The
/// rest is leaked.
pub(super) fn release_slot(
    engine: &mut Engine,
    runtimes: &mut Runtimes,
    slot: u16,
    metrics: &Arc<ServiceMetrics>,
    ports: Vec<PortIndex>,
    give_up: &dyn Fn() -> bool,
) -> bool {
    let ended = stop_runtimes(engine, runtimes, slot, give_up);
    // Even if a runtime does not end: otherwise the workers' ports would be read again after the next switch.
    let mut releasing = release(engine, slot);
    if releasing.is_complete(engine.timeouts.step) {
        return free(engine, runtimes, slot, metrics, ended);
    }
    let holder = Holder::Unreleased(releasing, ended);
    engine.leaked.push(LeakedSlot { slot, metrics: metrics.clone(), ports, holder });
    false
}

/// The workers have released a slot; returns whether nothing else uses it.
fn free(
    engine: &mut Engine,
    runtimes: &mut Runtimes,
    slot: u16,
    metrics: &Arc<ServiceMetrics>,
    ended: bool,
) -> bool {
    let all = runtimes.release(slot) && ended;
    if !all {
        let (metrics, ports) = (metrics.clone(), Vec::new());
        engine.leaked.push(LeakedSlot { slot, metrics, ports, holder: Holder::Running });
    }
    all
}

/// Reclaims leaked slots that all workers have released by now; returns whether there were any.
pub(super) fn reclaim_leaked(
    engine: &mut Engine,
    runtimes: &mut Runtimes,
    give_up: &dyn Fn() -> bool,
) -> bool {
    let before = engine.leaked.len();
    for mut leaked in std::mem::take(&mut engine.leaked) {
        let complete = match &mut leaked.holder {
            Holder::Unsettled(barrier) => barrier.is_complete(engine.fabric.workers()),
            Holder::Unreleased(releasing, _) => releasing.is_complete(Duration::ZERO),
            Holder::Running => false,
        };
        if !complete {
            engine.leaked.push(leaked);
            continue;
        }
        let LeakedSlot { slot, metrics, ports, holder } = leaked;
        let gone = match holder {
            Holder::Unreleased(_, ended) => free(engine, runtimes, slot, &metrics, ended),
            _ => release_slot(engine, runtimes, slot, &metrics, ports, give_up),
        };
        if gone {
            let service = metrics.name();
            tracing::info!(service, "the remains of a previous version have been released");
        }
    }
    engine.leaked.len() != before
}

/// Stops the runtimes of a slot that has nothing outstanding; returns whether all have ended.
fn stop_runtimes(
    engine: &Engine,
    runtimes: &Runtimes,
    slot: u16,
    give_up: &dyn Fn() -> bool,
) -> bool {
    let drain = engine.drain_time();
    runtimes.supervisor().is_none_or(|supervisor| supervisor.leave(slot, drain, give_up))
}

fn wait_for(
    engine: &Engine,
    barrier: &DrainBarrier,
    timeout: Duration,
    give_up: &dyn Fn() -> bool,
) -> bool {
    let deadline = Instant::now() + timeout;
    while !barrier.is_complete(engine.fabric.workers()) {
        if Instant::now() >= deadline || give_up() {
            return false;
        }
        engine.fabric.wake_all();
        std::thread::sleep(POLL_INTERVAL);
    }
    true
}

/// Asks every worker to release a slot.
fn release(engine: &Engine, slot: u16) -> Releasing {
    let (answer, answers) = mpsc::channel();
    engine.fabric.post_to_all(|_| ControlMessage::Release(slot, answer.clone()));
    Releasing::new(answers, engine.fabric.workers())
}
