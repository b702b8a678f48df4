//! The last step of a change: services that leave are drained and released, as are the prepared services of a failed
//! change.
//!
//! A worker that is inside a long kernel releases a slot when the kernel returns. Until then the slot is *leaked*: it
//! and its ports are not reused. The next change reclaims them if all workers have released them by then.

use std::sync::Arc;
use std::sync::mpsc::{self, Receiver};
use std::time::{Duration, Instant};

use engine::metrics::ServiceMetrics;
use engine::topology::Launch;
use engine::{ControlMessage, Detached, DrainBarrier};
use wire::DropReason;
use wire::nic::PortIndex;

use crate::runtimes::supervisor::{PendingStarts, PreparedRuntime};
use crate::server::Server;

/// How often the barrier is checked.
const POLL_INTERVAL: Duration = Duration::from_millis(1);

/// A slot that is still in use although its service has left or is leaving.
pub(crate) struct LeakedSlot {
    pub(crate) slot: u16,
    pub(crate) metrics: Arc<ServiceMetrics>,
    /// Ports that the workers may still have.
    pub(super) ports: Vec<PortIndex>,
    holder: Holder,
}

/// What still uses a leaked slot.
enum Holder {
    /// Workers that have not voted.
    Unsettled(DrainBarrier),
    /// Workers that have not released it; whether its runtimes have ended.
    Unreleased(Releasing, bool),
    /// Runtimes or accelerator threads that did not end; no longer waited for.
    Running,
}

/// Workers that were asked to release a slot.
struct Releasing {
    answers: Receiver<Detached>,
    missing: usize,
}

impl Releasing {
    /// Whether all have released it; each may take this long. What they return is freed here.
    fn is_complete(&mut self, timeout: Duration) -> bool {
        while self.missing > 0 && self.answers.recv_timeout(timeout).is_ok() {
            self.missing -= 1;
        }
        self.missing == 0
    }
}

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

impl Server {
    /// Drains and releases the services that leave, one after the other. A runtime that waits for one of them starts
    /// when no service that may share its process is left on its device; those that share a process start together.
    pub(super) fn remove_all(
        &mut self,
        departing: Vec<DepartingService>,
        give_up: &dyn Fn() -> bool,
    ) -> Vec<DepartureOutcome> {
        let mut outcomes: Vec<DepartureOutcome> = Vec::new();
        let mut waiting: Vec<(usize, Vec<PreparedRuntime>)> = Vec::new();
        let mut departing = departing.into_iter();
        while let Some(mut departing_service) = departing.next() {
            waiting.push((outcomes.len(), std::mem::take(&mut departing_service.after_departure)));
            outcomes.push(self.remove_service(departing_service, give_up));
            let left = departing.as_slice();
            let paused = |after_departure: &[PreparedRuntime]| {
                after_departure.iter().any(|s| left.iter().any(|l| l.holds(s)))
            };
            let free: Vec<_> =
                waiting.extract_if(.., |(_, after_departure)| !paused(after_departure)).collect();
            let (of, free): (Vec<_>, Vec<_>) =
                free.into_iter().filter(|(_, after_departure)| !after_departure.is_empty()).unzip();
            if let Some(runtimes) = self.supervisor.as_ref().filter(|_| !free.is_empty()) {
                let awaited = runtimes.add_each(free, self.drain_time());
                for (of, awaited) in of.into_iter().zip(awaited) {
                    outcomes[of].awaited = Some(awaited);
                }
            }
        }
        outcomes
    }

    /// Drains a service and releases it.
    fn remove_service(
        &mut self,
        departing_service: DepartingService,
        give_up: &dyn Fn() -> bool,
    ) -> DepartureOutcome {
        let DepartingService { name, slot, metrics, barrier, dropped_before, stopped, .. } =
            departing_service;
        let mut settled = self.wait_for(&barrier, self.drain_time(), give_up);
        if !settled && !give_up() {
            self.fabric.post_to_all(|_| ControlMessage::Expire(slot));
            settled = self.wait_for(&barrier, self.timeouts.expiry, give_up);
        }
        let gone = if settled {
            self.release_slot(slot, &metrics, stopped, give_up)
        } else {
            let (metrics, holder) = (metrics.clone(), Holder::Unsettled(barrier));
            self.leaked.push(LeakedSlot { slot, metrics, ports: stopped, holder });
            false
        };
        let dropped = metrics.snapshot().dropped(DropReason::DrainTimeout);
        let unanswered = dropped - dropped_before;
        DepartureOutcome { unanswered, left_behind: !gone, ..DepartureOutcome::of(name) }
    }

    /// Releases a slot that has nothing outstanding, and its own ports; returns whether everything was released. The
    /// rest is leaked.
    pub(super) fn release_slot(
        &mut self,
        slot: u16,
        metrics: &Arc<ServiceMetrics>,
        ports: Vec<PortIndex>,
        give_up: &dyn Fn() -> bool,
    ) -> bool {
        let ended = self.stop_runtimes(slot, give_up);
        // Even if a runtime does not end: otherwise the workers' ports would be read again after the next switch.
        let mut releasing = self.release(slot);
        if releasing.is_complete(self.timeouts.step) {
            return self.free(slot, metrics, ended);
        }
        let holder = Holder::Unreleased(releasing, ended);
        self.leaked.push(LeakedSlot { slot, metrics: metrics.clone(), ports, holder });
        false
    }

    /// The workers have released a slot; returns whether nothing else uses it.
    fn free(&mut self, slot: u16, metrics: &Arc<ServiceMetrics>, ended: bool) -> bool {
        let all = self.drop_accelerators(slot) && ended;
        if !all {
            let (metrics, ports) = (metrics.clone(), Vec::new());
            self.leaked.push(LeakedSlot { slot, metrics, ports, holder: Holder::Running });
        }
        all
    }

    /// Reclaims leaked slots that all workers have released by now.
    pub(super) fn reclaim_leaked(&mut self, give_up: &dyn Fn() -> bool) {
        let before = self.leaked.len();
        for mut leaked in std::mem::take(&mut self.leaked) {
            let complete = match &mut leaked.holder {
                Holder::Unsettled(barrier) => barrier.is_complete(self.fabric.workers()),
                Holder::Unreleased(releasing, _) => releasing.is_complete(Duration::ZERO),
                Holder::Running => false,
            };
            if !complete {
                self.leaked.push(leaked);
                continue;
            }
            let LeakedSlot { slot, metrics, ports, holder } = leaked;
            let gone = match holder {
                Holder::Unreleased(_, ended) => self.free(slot, &metrics, ended),
                _ => self.release_slot(slot, &metrics, ports, give_up),
            };
            if gone {
                let service = metrics.name();
                tracing::info!(service, "the remains of a previous version have been released");
            }
        }
        if self.leaked.len() != before {
            self.publish_metrics();
        }
    }

    /// Stops the runtimes of a slot that has nothing outstanding; returns whether all have ended.
    fn stop_runtimes(&self, slot: u16, give_up: &dyn Fn() -> bool) -> bool {
        let drain = self.drain_time();
        self.supervisor.as_ref().is_none_or(|runtimes| runtimes.leave(slot, drain, give_up))
    }

    /// The time limit for accepted requests.
    pub(super) fn drain_time(&self) -> Duration {
        Duration::from_millis(self.topology.engine.drain_ms)
    }

    fn wait_for(
        &self,
        barrier: &DrainBarrier,
        timeout: Duration,
        give_up: &dyn Fn() -> bool,
    ) -> bool {
        let deadline = Instant::now() + timeout;
        while !barrier.is_complete(self.fabric.workers()) {
            if Instant::now() >= deadline || give_up() {
                return false;
            }
            self.fabric.wake_all();
            std::thread::sleep(POLL_INTERVAL);
        }
        true
    }

    /// Asks every worker to release a slot.
    fn release(&self, slot: u16) -> Releasing {
        let (answer, answers) = mpsc::channel();
        self.fabric.post_to_all(|_| ControlMessage::Release(slot, answer.clone()));
        Releasing { answers, missing: self.fabric.workers() }
    }
}
