//! Which runtime slots share a process: those on one exclusive device are joined and separated here; see the
//! documentation of [`super`].

use std::collections::BTreeMap;
use std::sync::mpsc::Sender;
use std::time::Instant;

use engine::{ControlMessage, DrainBarrier, RuntimeEvent};
use wire::attach::TOGETHER_MAX;

use super::STOP_TIMEOUT;
use super::slot::{EndCause, FirstStart, Pause, RuntimeSlot, State, warn_of_shared_devices};
use super::state::{KilledProcess, Regroup, SupervisorState};

impl SupervisorState {
    /// Carries out the planned changes that need not wait any more. Services whose restart is no longer needed are
    /// resumed.
    pub(super) fn run_regroups(&mut self) {
        self.runtimes.values_mut().filter_map(|s| s.pause.as_mut()).for_each(|h| h.wanted = false);
        for next in std::mem::take(&mut self.regroups) {
            let ends = self.ends_for(&next);
            if self.draining() && !ends.is_empty() {
                // The engine is about to end all of them; accepted requests are answered before.
                continue;
            }
            if !self.pause_and_check_drained(&ends) {
                self.regroups.push(next);
                continue;
            }
            match next {
                Regroup::Leave(slot, gone) => self.stop_slot(slot, &gone),
                Regroup::Join(_) => {
                    let text = "it restarts to share its process with a new service";
                    for at in ends {
                        // Those of one process end together.
                        if matches!(self.runtimes[&at].state, State::Serving { .. }) {
                            self.end_group(at, EndCause::reconfigured(text));
                        }
                    }
                }
            }
        }
        let unwanted =
            |runtime: &RuntimeSlot| runtime.pause.as_ref().is_some_and(|pause| !pause.wanted);
        let free = self.runtimes.iter().filter(|(_, runtime)| unwanted(runtime)).map(|(id, _)| *id);
        free.collect::<Vec<_>>().into_iter().for_each(|id| self.resume(id));
    }

    /// The serving generations of services that stay that end for a change.
    fn ends_for(&self, planned: &Regroup) -> Vec<u64> {
        let serves = |at: &u64| matches!(self.runtimes[at].state, State::Serving { .. });
        match planned {
            Regroup::Join(id) => self.ends_for_join(*id),
            Regroup::Leave(slot, _) => {
                let of_slot = self.runtimes.iter().filter(|(_, s)| s.spec.slot == *slot);
                let of_slot = of_slot.filter(|(id, _)| self.process_successor(**id).is_none());
                let others = of_slot.flat_map(|(id, _)| self.group(*id));
                others.filter(|at| serves(at) && !self.runtimes[at].retiring).collect()
            }
        }
    }

    /// Pauses the services of these runtimes; returns whether all their accepted requests have been answered, or the
    /// drain time is over.
    fn pause_and_check_drained(&mut self, runtimes: &[u64]) -> bool {
        let (workers, now) = (self.fabric.workers(), Instant::now());
        let mut quiet = true;
        for id in runtimes {
            if self.runtimes[id].pause.is_none() {
                self.pause(*id);
            }
            let Some(pause) = &mut self.runtime(*id).pause else { continue };
            pause.wanted = true;
            quiet &= pause.barrier.is_complete(workers) || now >= pause.until;
        }
        quiet
    }

    fn pause(&mut self, id: u64) {
        let (fabric, drain) = (self.fabric.clone(), self.drain);
        let runtime = self.runtime(id);
        let barrier = DrainBarrier::default();
        let (service, accelerator) = (runtime.spec.slot, runtime.spec.position as u16);
        let drain_ns = u64::try_from(drain.as_nanos()).unwrap_or(u64::MAX);
        fabric.post_to_all(|_| {
            let barrier = barrier.clone();
            ControlMessage::Runtime(RuntimeEvent::Paused {
                service,
                accelerator,
                drain_ns,
                barrier,
            })
        });
        runtime.pause = Some(Pause { barrier, until: Instant::now() + drain, wanted: true });
        let service = &runtime.spec.service.name;
        tracing::info!(service, "paused: its runtime restarts for a change of other services");
    }

    /// A generation that was about to end continues.
    fn resume(&mut self, id: u64) {
        let fabric = self.fabric.clone();
        let runtime = self.runtime(id);
        runtime.pause = None;
        let (service, accelerator) = (runtime.spec.slot, runtime.spec.position as u16);
        let resumed = || RuntimeEvent::Resumed { service, accelerator };
        fabric.post_to_all(|_| ControlMessage::Runtime(resumed()));
        let service = &runtime.spec.service.name;
        tracing::info!(service, "resumed: its runtime need not restart");
        if let Some(first) = runtime.first.take() {
            // The server may have stopped waiting already.
            let _ = first.send(FirstStart::Result(runtime.spec.service.name.clone(), Ok(())));
        }
    }

    /// Whether others will join a runtime slot that waits for a process, once their generations have ended.
    pub(super) fn join_is_pending(&self, id: u64) -> bool {
        let with = |other: &u64| {
            self.runtimes.get(other).is_some_and(|s| s.can_share_process(&self.runtimes[&id]))
        };
        self.regroups.iter().any(|planned| matches!(planned, Regroup::Join(other) if with(other)))
    }

    /// The change is committed: its runtime slots may share processes with those that stay.
    pub(super) fn commit(&mut self) {
        let came = self.runtimes.iter_mut().filter(|(_, runtime)| !runtime.committed);
        let came = came.map(|(id, runtime)| {
            runtime.committed = true;
            *id
        });
        for id in came.collect::<Vec<_>>() {
            self.retry_sharing(id);
            // The previous one may have ended it.
            let serves = |runtime: &RuntimeSlot| matches!(runtime.state, State::Serving { .. });
            if self.runtimes.get(&id).is_some_and(serves) {
                self.plan_join(id);
            }
        }
    }

    /// Removes the runtimes of a service slot; `gone` is dropped when they have ended.
    pub(super) fn leave(&mut self, slot: u16, gone: Sender<()>) {
        // Runtime slots that were not committed are all being removed; none of them may start again.
        for runtime in self.runtimes.values_mut().filter(|s| !s.committed) {
            (runtime.retiring, runtime.next_try) = (true, None);
        }
        self.regroups.push(Regroup::Leave(slot, gone));
        self.run_regroups();
    }

    /// A joint start failed. If it was refused, each starts separately from now on. If the process was lost, the
    /// cause is unknown, and they are started together once more.
    pub(super) fn on_group_start_failed(&mut self, group: &[u64], cause: &EndCause) {
        let mut apart = false;
        for at in group {
            let runtime = self.runtime(*at);
            runtime.unshared |= cause.reported || runtime.lost_at_start;
            runtime.lost_at_start = true;
            apart |= runtime.unshared;
        }
        if apart {
            warn_of_shared_devices(&self.runtimes);
        }
    }

    /// A runtime slot is added, changed or removed: those on its device that did not start together are started
    /// together again. Returns one of them that serves.
    pub(super) fn retry_sharing(&mut self, id: u64) -> Option<u64> {
        let changed = &self.runtimes[&id];
        let again = |(_, runtime): &(&u64, &RuntimeSlot)| {
            runtime.unshared && !runtime.retiring && runtime.shares_device(changed)
        };
        let again: Vec<u64> = self.runtimes.iter().filter(again).map(|(at, _)| *at).collect();
        for at in &again {
            let runtime = self.runtime(*at);
            (runtime.unshared, runtime.lost_at_start) = (false, false);
        }
        again.into_iter().find(|at| matches!(self.runtimes[at].state, State::Serving { .. }))
    }

    /// A serving runtime in the same process that is being removed as well, but later.
    fn process_successor(&self, id: u64) -> Option<u64> {
        let serves = |at: &u64| matches!(self.runtimes[at].state, State::Serving { .. });
        let others = self.group(id).into_iter().filter(|at| *at != id);
        others.filter(|_| serves(&id)).find(|at| self.runtimes[at].retiring && serves(at))
    }

    fn stop_slot(&mut self, slot: u16, gone: &Sender<()>) {
        let of_slot = self.runtimes.iter().filter(|(_, s)| s.spec.slot == slot).map(|(id, _)| *id);
        for id in of_slot.collect::<Vec<_>>() {
            if let Some(successor) = self.process_successor(id) {
                self.hand_over_process(id, successor);
                continue;
            }
            // One that was not committed has changed nothing for those that stay.
            let committed = self.runtimes[&id].committed;
            let again = if committed { self.retry_sharing(id) } else { None };
            let mut others = self.group(id);
            others.retain(|at| *at != id);
            // It ends with the process; any runtime of the group may own the child.
            let child = others.iter().find_map(|at| self.runtime(*at).child.take());
            let runtime = self.runtime(id);
            runtime.child = runtime.child.take().or(child);
            runtime.process = 0;
            runtime.begin_stop(Some(gone.clone()));
            for at in &others {
                let text = "a service that shares its process is being removed";
                self.end_generation(*at, EndCause::reconfigured(text));
            }
            // Runtimes that were added meanwhile have their own processes.
            let stays = others.into_iter().find(|at| !self.runtimes[at].retiring);
            self.regroups.extend(stays.or(again).map(Regroup::Join));
        }
    }

    /// Removes a runtime slot whose process still serves others that are being removed. The process ends with the
    /// last of them, which keeps everything that the process still uses.
    fn hand_over_process(&mut self, id: u64, successor: u64) {
        let Some(mut runtime) = self.runtimes.remove(&id) else { return };
        runtime.spec.metrics.end(runtime.generation, "changed");
        let successor = self.runtime(successor);
        successor.child = successor.child.take().or(runtime.child.take());
        successor.inherited.append(&mut runtime.inherited);
        successor.inherited.extend(runtime.region.take());
    }

    /// The runtime slots that share a process with this one, itself included.
    pub(super) fn group(&self, id: u64) -> Vec<u64> {
        let process = self.runtimes[&id].process;
        let with = |(at, runtime): (&u64, &RuntimeSlot)| {
            (*at == id || process > 0 && runtime.process == process).then_some(*at)
        };
        self.runtimes.iter().filter_map(with).collect()
    }

    /// Whether a runtime that was asked to end, or killed, may still hold the device that a runtime slot waits for.
    pub(super) fn device_is_in_use(&self, id: u64) -> bool {
        let runtime = &self.runtimes[&id];
        let Some(device) = runtime.exclusive_key().filter(|_| runtime.is_launched()) else {
            return false;
        };
        let now = Instant::now();
        // A process that cannot be killed is waited for with a limit.
        let leaves = |runtime: &RuntimeSlot| match &runtime.state {
            State::Stopping { until, .. } => {
                runtime.child.is_some()
                    && now < *until + STOP_TIMEOUT
                    && runtime.exclusive_key().as_ref() == Some(&device)
            }
            _ => false,
        };
        let dies =
            |killed: &KilledProcess| now < killed.until && killed.device.as_ref() == Some(&device);
        self.runtimes.values().any(leaves) || self.killed.iter().any(dies)
    }

    /// A runtime serves or is about to: if other serving ones should share its process, all of them restart in one
    /// process.
    pub(super) fn plan_join(&mut self, id: u64) {
        self.regroups.push(Regroup::Join(id));
        self.run_regroups();
    }

    /// The generations that end so that a runtime can share a process with others of its device; none if it does
    /// already. Processes with runtimes that are being removed, or of a change that is not committed, are not
    /// affected.
    fn ends_for_join(&self, id: u64) -> Vec<u64> {
        let Some(runtime) = self.runtimes.get(&id) else { return Vec::new() };
        let fits =
            |at: &u64| self.runtimes[at].committed && self.runtimes[at].can_share_process(runtime);
        if !self.group(id).iter().all(fits) {
            return Vec::new();
        }
        let mut apart: BTreeMap<u64, Vec<u64>> = BTreeMap::new();
        // Those that wait are included in the restart.
        let mut room = TOGETHER_MAX as usize;
        for (at, other) in self.runtimes.iter().filter(|(at, _)| fits(at)) {
            if other.process == runtime.process || matches!(other.state, State::Vacant) {
                room = room.saturating_sub(1);
            } else if matches!(other.state, State::Serving { .. }) {
                apart.entry(other.process).or_default().push(*at);
            }
        }
        apart.retain(|_, runtimes| {
            let joins = runtimes.len() <= room && self.group(runtimes[0]).iter().all(fits);
            room -= if joins { runtimes.len() } else { 0 };
            joins
        });
        if apart.is_empty() {
            return Vec::new();
        }
        let serves = |at: &u64| matches!(self.runtimes[at].state, State::Serving { .. });
        let own = self.group(id).into_iter().filter(serves);
        own.chain(apart.into_values().flatten()).collect()
    }
}
