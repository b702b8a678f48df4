//! The supervisor's thread: its state, its loop, and how generations of runtimes start and end.

use std::collections::BTreeMap;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::Path;
use std::process::Child;
use std::sync::atomic::Ordering;
use std::sync::mpsc::Sender;
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use engine::metrics::RuntimeMetrics;
use engine::{ControlMessage, RuntimeEvent};
use mqueue::abi::{reason, state, stop};
use runtime::HeartbeatMonitor;
use sys::SharedMemory;
use sys::readiness::wait_readable;
use wire::DropReason;
use wire::attach::{MESSAGE_BYTES_MAX, Ready, TOGETHER_MAX};

use super::slot::{
    EndCause, FirstStart, RuntimeRegion, RuntimeSlot, State, is_same_kernel, reason_label,
    warn_of_shared_devices,
};
use super::{
    Command, MEMORY_RETRY_INTERVAL, POLL_INTERVAL, PeerOrigin, START_TIMEOUT, STOP_TIMEOUT, Shared,
};
use crate::base::handshake_queue::HandshakeQueue;
use crate::runtimes::heartbeat::HeartbeatWriter;
use worker::WorkerFabric;

/// A process that was killed.
pub(super) struct KilledProcess {
    pub(super) child: Child,
    /// The device that it uses until it has ended …
    pub(super) device: Option<String>,
    /// … or until this time.
    pub(super) until: Instant,
}

/// A planned change of the processes that runtimes share. Generations of services that stay end for it, when all
/// their accepted requests have been answered.
pub(super) enum Regroup {
    /// The runtimes of this service slot are removed; the sender is dropped when they are gone.
    Leave(u16, Sender<()>),
    /// This runtime is to share a process with others of its device.
    Join(u64),
}

/// The thread's state.
pub(super) struct SupervisorState {
    pub(super) handshakes: HandshakeQueue<PeerOrigin>,
    /// By number, in the order in which they were added.
    pub(super) runtimes: BTreeMap<u64, RuntimeSlot>,
    /// Runtime slots added so far.
    pub(super) created: u64,
    /// See [`service_accelerators`](super::service_accelerators); of the running topology.
    pub(super) service_accelerators: Vec<(String, String)>,
    pub(super) fabric: Arc<WorkerFabric>,
    pub(super) heartbeat_writer: Arc<HeartbeatWriter>,
    pub(super) shared: Arc<Shared>,
    /// Regions of ended generations, until the workers have released them.
    pub(super) retired: Vec<Arc<SharedMemory>>,
    /// Processes that were killed and have not ended yet.
    pub(super) killed: Vec<KilledProcess>,
    /// Processes started so far.
    pub(super) processes: u64,
    /// Planned changes that wait until all accepted requests have been answered …
    pub(super) regroups: Vec<Regroup>,
    /// … for at most this time.
    pub(super) drain: Duration,
    /// Whether two paths name the same kernel of a file; may wait for a file system.
    pub(super) is_same_kernel: fn(&str, &str) -> bool,
}

impl SupervisorState {
    /// Without runtimes and listeners.
    pub(super) fn new(
        fabric: Arc<WorkerFabric>,
        heartbeat_writer: Arc<HeartbeatWriter>,
        shared: Arc<Shared>,
    ) -> Self {
        Self {
            handshakes: HandshakeQueue::new(MESSAGE_BYTES_MAX),
            runtimes: BTreeMap::new(),
            created: 0,
            service_accelerators: Vec::new(),
            fabric,
            heartbeat_writer,
            shared,
            retired: Vec::new(),
            killed: Vec::new(),
            processes: 0,
            regroups: Vec::new(),
            drain: Duration::ZERO,
            is_same_kernel,
        }
    }

    pub(super) fn run(&mut self) {
        while !self.shared.stop.load(Ordering::Relaxed) {
            if self.draining() {
                self.handshakes.close();
            }
            self.run_commands();
            self.check_all();
            self.wait_and_dispatch();
        }
        self.shutdown();
    }

    /// Runs the commands, in order.
    pub(super) fn run_commands(&mut self) {
        let commands = std::mem::take(
            &mut *self.shared.commands.lock().unwrap_or_else(PoisonError::into_inner),
        );
        for command in commands {
            match command {
                Command::Add(starts, committed) => {
                    for (start, first) in starts {
                        self.created += 1;
                        self.runtimes
                            .insert(self.created, RuntimeSlot::new(start, &first, committed));
                        if committed {
                            self.retry_sharing(self.created);
                        }
                    }
                    warn_of_shared_devices(&self.runtimes);
                }
                Command::SetListeners { names, new, service_accelerators, leaving, drain } => {
                    (self.service_accelerators, self.drain) = (service_accelerators, drain);
                    let name = |path: &Path| {
                        let found = names.iter().find(|(of, _)| of == path)?;
                        Some(PeerOrigin::AttachPath(found.1.clone()))
                    };
                    self.handshakes.set_listeners(name, new.0);
                    for runtime in
                        self.runtimes.values_mut().filter(|s| leaving.contains(&s.spec.slot))
                    {
                        (runtime.retiring, runtime.next_try) = (true, None);
                    }
                    self.commit();
                }
                Command::Remove(slot, gone) => self.leave(slot, gone),
                // No runtime is accepted any more.
                Command::Compared(..) if self.draining() => {}
                Command::Compared(arrived, same) => self.answer_hello(arrived, &Ok(same)),
                Command::NotifyRegrouped(tell) => {
                    self.run_regroups();
                    let regroups =
                        |s: &&mut RuntimeSlot| (s.regrouping || s.pause.is_some()) && !s.retiring;
                    for runtime in self.runtimes.values_mut().filter(regroups) {
                        if runtime.first.is_none() {
                            runtime.report_start_to(&tell);
                        }
                    }
                }
            }
        }
    }

    pub(super) fn runtime(&mut self, id: u64) -> &mut RuntimeSlot {
        self.runtimes.get_mut(&id).expect("the id is of an existing runtime slot")
    }

    pub(super) fn draining(&self) -> bool {
        self.shared.draining.load(Ordering::Relaxed)
    }

    /// Handles everything that is due by time.
    pub(super) fn check_all(&mut self) {
        // Unmaps the regions that no worker uses any more.
        self.retired.retain(|memory| Arc::strong_count(memory) > 1);
        self.killed.retain_mut(|killed| matches!(killed.child.try_wait(), Ok(None)));
        // Stopping ones first: the server waits for them, and creating regions takes time.
        for id in self.runtimes.keys().copied().collect::<Vec<_>>() {
            if self.runtime(id).has_stopped() {
                self.remove(id);
            }
        }
        self.run_regroups();
        for id in self.runtimes.keys().copied().collect::<Vec<_>>() {
            self.check(id);
        }
    }

    pub(super) fn wait_and_dispatch(&mut self) {
        let mut files: Vec<BorrowedFd<'_>> = vec![self.shared.wake_fd.as_fd()];
        let spoken = self.runtimes.iter().filter(|(_, runtime)| runtime.socket().is_some());
        let spoken: Vec<u64> = spoken.map(|(id, _)| *id).collect();
        files.extend(self.runtimes.values().filter_map(|s| Some(s.socket()?.as_fd())));
        files.extend(self.handshakes.descriptors());
        let leaving =
            !self.retired.is_empty() || !self.killed.is_empty() || !self.regroups.is_empty();
        let pause = leaving.then(|| Instant::now() + POLL_INTERVAL);
        let due = self
            .runtimes
            .values()
            .filter_map(RuntimeSlot::due)
            .chain(self.handshakes.next_deadline())
            .chain(pause)
            .min();
        let timeout = due.map(|due| due.saturating_duration_since(Instant::now()));
        let ready = wait_readable(&files, timeout);
        let (wake_fd, rest) = ready.split_at(1);
        let (runtimes, handshakes) = rest.split_at(spoken.len());
        if wake_fd[0] {
            self.shared.wake_fd.clear();
        }
        for (runtime, _) in spoken.into_iter().zip(runtimes).filter(|(_, ready)| **ready) {
            self.on_message(runtime);
        }
        for arrived in self.handshakes.poll(handshakes) {
            self.on_hello(arrived);
        }
    }

    /// Handles everything that is due by time for one runtime slot.
    pub(super) fn check(&mut self, id: u64) {
        let now = Instant::now();
        let draining = self.draining();
        let due = self.runtimes[&id].next_try.is_some_and(|due| due <= now);
        let held = due && (self.device_is_in_use(id) || self.join_is_pending(id));
        let runtime = self.runtime(id);
        if due {
            runtime.next_try = held.then(|| now + POLL_INTERVAL);
            if held {
                return;
            }
            if runtime.region.is_none() {
                self.prepare_region(id);
            } else if !draining && runtime.is_launched() && matches!(runtime.state, State::Vacant) {
                self.launch(id);
            }
            return;
        }
        let seconds = START_TIMEOUT.as_secs();
        let cause = match &mut runtime.state {
            State::Expected { until } if now >= *until => {
                EndCause::lost("silent", format!("it sent no hello within {seconds} s"))
            }
            State::Starting { until, .. } if now >= *until => {
                EndCause::lost("silent", format!("its blocks were not ready within {seconds} s"))
            }
            State::Serving { monitor, .. } => {
                let Some(region) = &mut runtime.region else { return };
                let metrics = &runtime.spec.metrics;
                let probe = region.probe.as_mut();
                metrics.set_round_trip_ns(region.words.round_trip_ns());
                let intact = probe.is_none_or(|probe| probe.check(metrics, region.generation));
                if !intact || region.link.condemned() {
                    EndCause::lost("ring_corrupt", "it wrote impossible words into its region")
                } else if monitor.lost(region.words.accelerator_heartbeat()) {
                    let ms = runtime.spec.launch().1.as_millis();
                    let reason = DropReason::AcceleratorStalled;
                    let text = format!("it sent no heartbeat for {ms} ms");
                    EndCause { label: "stalled", reason, text, reported: false }
                } else if let Some(block) = (0..runtime.spec.blocks())
                    .find(|b| region.words.block_state(*b) == state::ENDED)
                {
                    let why = region.words.block(block).reason;
                    EndCause::lost(reason_label(why), reason::of_block(block, why))
                } else {
                    return;
                }
            }
            _ => return,
        };
        self.end_group(id, cause);
    }

    /// Removes a runtime slot that has stopped.
    pub(super) fn remove(&mut self, id: u64) {
        self.retire_region(id);
        // Dropping it closes the channel on which the server waits.
        self.runtimes.remove(&id);
    }

    /// Starts a process for a runtime slot and for those that wait for one and can share it.
    pub(super) fn launch(&mut self, id: u64) {
        self.processes += 1;
        let (process, until) = (self.processes, Instant::now() + START_TIMEOUT);
        let leader = &self.runtimes[&id];
        let joins = |(at, runtime): &(&u64, &RuntimeSlot)| {
            let waits =
                matches!(runtime.state, State::Vacant) && runtime.committed == leader.committed;
            **at != id && waits && runtime.can_share_process(leader)
        };
        let others = self.runtimes.iter().filter(joins).map(|(at, _)| *at);
        let mut others: Vec<u64> = others.take(TOGETHER_MAX as usize - 1).collect();
        others.retain(|at| {
            if self.runtimes[at].region.is_none() {
                self.prepare_region(*at);
            }
            self.runtimes[at].region.is_some()
        });
        let all = others.iter().chain([&id]);
        let hang_ms = all.map(|at| self.runtimes[at].hang_ms()).max().expect("at least one");
        for at in others.into_iter().chain([id]) {
            let runtime = self.runtime(at);
            (runtime.process, runtime.next_try) = (process, None);
            runtime.state = State::Expected { until };
        }
        match self.runtime(id).launch(hang_ms) {
            Ok(socket) => self.handshakes.add(PeerOrigin::Launched(id, process), socket, until),
            Err(error) => {
                let text = format!("its process cannot be started: {error}");
                self.end_group(id, EndCause::lost("not_started", text));
            }
        }
    }

    /// The blocks of a runtime run, and those of its group.
    pub(super) fn on_ready(&mut self, id: u64, ready: Ready) -> Result<(), String> {
        let group = self.group(id);
        let starting = matches!(self.runtimes[&id].state, State::Starting { .. });
        let first = self.runtimes[&group[0]].generation;
        let blocks: u32 = group.iter().map(|at| self.runtimes[at].spec.blocks()).sum();
        if !starting || (ready.generation, ready.blocks) != (first, blocks) {
            return Err("its ready message does not match its offer".into());
        }
        group.iter().for_each(|at| self.mark_serving(*at));
        self.plan_join(id);
        for at in group {
            // One that is being removed may have been removed by now.
            let Some(runtime) = self.runtimes.get_mut(&at) else { continue };
            // One that is to join another process serves when that process does.
            let serves = matches!(runtime.state, State::Serving { .. }) && runtime.pause.is_none();
            if let Some(first) = runtime.first.take_if(|_| serves) {
                // The server may have stopped waiting already.
                let _ = first.send(FirstStart::Result(runtime.spec.service.name.clone(), Ok(())));
            }
        }
        Ok(())
    }

    pub(super) fn mark_serving(&mut self, id: u64) {
        let fabric = self.fabric.clone();
        let runtime = self.runtime(id);
        let (State::Starting { socket, .. }, Some(region)) = (&runtime.state, &mut runtime.region)
        else {
            unreachable!("all of a group have the same state")
        };
        if let Some(probe) = &mut region.probe {
            probe.begin();
        }
        let socket = socket.clone();
        let heartbeat = region.words.accelerator_heartbeat();
        let monitor = HeartbeatMonitor::new(runtime.heartbeat(), heartbeat);
        runtime.state = State::Serving { socket, since: Instant::now(), monitor };
        runtime.spec.metrics.begin(runtime.generation);
        let (service, accelerator) = (runtime.spec.slot, runtime.spec.position as u16);
        let started = || RuntimeEvent::Started { service, accelerator };
        fabric.post_to_all(|_| ControlMessage::Runtime(started()));
        let RuntimeMetrics { service, accelerator, .. } = &*runtime.spec.metrics;
        tracing::info!(service, accelerator, generation = runtime.generation, "a runtime serves");
        (runtime.regrouping, runtime.lost_at_start) = (false, false);
    }

    /// Ends the generation of a runtime, or its start, and those of its group.
    pub(super) fn end_group(&mut self, id: u64, cause: EndCause) {
        let group = self.group(id);
        if group.len() > 1 && matches!(self.runtimes[&id].state, State::Starting { .. }) {
            self.on_group_start_failed(&group, &cause);
        }
        for at in group {
            self.end_generation(at, cause.clone());
        }
    }

    /// Drops its requests in flight with the reason, kills the process, creates the next region.
    pub(super) fn end_generation(&mut self, id: u64, cause: EndCause) {
        let fabric = self.fabric.clone();
        let runtime = self.runtime(id);
        let (service, accelerator) = (runtime.spec.slot, runtime.spec.position as u16);
        let before = std::mem::replace(&mut runtime.state, State::Vacant);
        let mut lasted = Duration::ZERO;
        if let State::Serving { since, .. } = &before {
            lasted = since.elapsed();
            let reason = cause.reason;
            let ended = || RuntimeEvent::Ended { service, accelerator, reason };
            fabric.post_to_all(|_| ControlMessage::Runtime(ended()));
        }
        runtime.spec.metrics.end(runtime.generation, cause.label);
        runtime.process = 0;
        if let State::Serving { socket, .. } | State::Starting { socket, .. } = &before {
            // Blocks that still run read it in the region; their process notices the closed connection.
            if let Some(region) = &runtime.region {
                region.words.set_stop(stop::NOW);
                region.link.wake();
            }
            socket.shut_down();
        }
        let planned = cause.reason == DropReason::Reconfiguring;
        let next_try = (!runtime.retiring).then(|| runtime.next_back_off(lasted, planned));
        runtime.next_try = next_try.map(|pause| Instant::now() + pause);
        let RuntimeMetrics { service, accelerator, .. } = &*runtime.spec.metrics;
        let next_try_ms = next_try.map(|pause| pause.as_millis());
        let (generation, text) = (runtime.generation, &cause.text);
        tracing::warn!(service, accelerator, generation, next_try_ms, "a runtime ended: {text}");
        (runtime.regrouping, runtime.pause) = (planned, None);
        let regrouping = runtime.regrouping;
        if let Some(first) = runtime.first.take_if(|_| !regrouping) {
            let _ =
                first.send(FirstStart::Result(runtime.spec.service.name.clone(), Err(cause.text)));
        }
        let (launched, retiring, device) =
            (runtime.is_launched(), runtime.retiring, runtime.exclusive_key());
        if let Some(mut child) = runtime.child.take() {
            // It may have ended already.
            let _ = child.kill();
            self.killed.push(KilledProcess { child, device, until: Instant::now() + STOP_TIMEOUT });
        }
        // A runtime that was offered the region may have written into it; before the offer it is unused.
        if !matches!(before, State::Vacant | State::Expected { .. }) {
            self.retire_region(id);
            // One that changes processes gets its region when it starts: the server may be waiting for another one
            // that stops.
            if launched && !retiring && !regrouping {
                self.prepare_region(id);
            }
        }
    }

    /// Releases the region of an ended generation.
    pub(super) fn retire_region(&mut self, id: u64) {
        let runtime = self.runtime(id);
        let inherited = std::mem::take(&mut runtime.inherited);
        let Some(region) = runtime.region.take() else { return };
        self.retired.extend(inherited.into_iter().chain([region]).map(|region| region.memory));
    }

    /// Creates the region of the next generation and passes it to the workers.
    pub(super) fn prepare_region(&mut self, id: u64) {
        let (fabric, heartbeat_writer) = (self.fabric.clone(), self.heartbeat_writer.clone());
        let runtime = self.runtime(id);
        runtime.generation = runtime.spec.metrics.next_generation();
        match RuntimeRegion::make(&runtime.spec, runtime.generation, &heartbeat_writer) {
            Ok((region, shares)) => {
                runtime.region = Some(region);
                if runtime.is_launched() && runtime.next_try.is_none() {
                    runtime.next_try = Some(Instant::now());
                }
                let (service, accelerator) = (runtime.spec.slot, runtime.spec.position as u16);
                for (worker, attachment) in shares.into_iter().enumerate() {
                    let replaced = RuntimeEvent::RingsReplaced { service, accelerator, attachment };
                    fabric.post(worker as u16, ControlMessage::Runtime(replaced));
                }
            }
            Err(error) => {
                let RuntimeMetrics { service, accelerator, .. } = &*runtime.spec.metrics;
                tracing::error!(
                    service,
                    accelerator,
                    "the region of the next runtime cannot be created: {error}"
                );
                runtime.next_try = Some(Instant::now() + MEMORY_RETRY_INTERVAL);
            }
        }
    }

    /// The engine ends: every runtime is asked to end, then killed.
    pub(super) fn shutdown(&mut self) {
        self.handshakes.close();
        // Planned changes do not matter any more: all runtimes end.
        self.regroups.clear();
        for runtime in self.runtimes.values_mut() {
            runtime.begin_stop(None);
        }
        let deadline = Instant::now() + 2 * STOP_TIMEOUT;
        self.check_all();
        while !self.runtimes.is_empty() && Instant::now() < deadline {
            self.wait_and_dispatch();
            self.check_all();
        }
        let children = self.runtimes.values_mut().filter_map(|runtime| runtime.child.take());
        let killed = self.killed.drain(..).map(|killed| killed.child);
        let mut children: Vec<Child> = children.chain(killed).collect();
        for child in &mut children {
            // It may have ended already.
            let _ = child.kill();
        }
        wait_for_exits(&mut children, 2 * STOP_TIMEOUT);
        for child in children {
            let process = child.id();
            tracing::warn!(
                process,
                "a runtime was killed and has not ended: it is no longer waited for"
            );
        }
    }
}

/// Waits until these processes have ended, at most for `limit`; those that have not remain in the list. The host
/// kernel determines when a killed process ends, and a driver may delay it without limit.
pub(super) fn wait_for_exits(children: &mut Vec<Child>, limit: Duration) {
    let deadline = Instant::now() + limit;
    loop {
        children.retain_mut(|child| matches!(child.try_wait(), Ok(None)));
        if children.is_empty() || Instant::now() >= deadline {
            return;
        }
        std::thread::sleep(POLL_INTERVAL);
    }
}
