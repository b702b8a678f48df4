//! The accelerators of services: their regions and kernels, threads of this process, and runtimes in processes of their own.

mod attach;
mod heartbeat;
pub(crate) mod kernel_files;
mod region;
pub(crate) mod supervisor;

use std::sync::Arc;
use std::time::{Duration, Instant};

use accel::cpu::CpuAccelerator;
use mqueue::abi::stop;
use worker::WorkerFabric;

use self::attach::OpenRegion;
use self::heartbeat::HeartbeatWriter;
use self::supervisor::Supervisor;
use crate::base::error::ServerError;
use crate::base::watchdog::Watched;

/// How long accelerator threads may take to end: only one that is not scheduled, or has a block that hangs, takes
/// this long.
const BLOCKS_TIMEOUT: Duration = Duration::from_secs(5);

/// The accelerators of all services, by the slots of those.
pub(crate) struct Runtimes {
    fabric: Arc<WorkerFabric>,
    watched: Arc<Watched>,
    heartbeat_writer: Arc<HeartbeatWriter>,
    /// Threads of this process.
    accelerators: Vec<(u16, CpuAccelerator)>,
    /// Of accelerators in this process.
    regions: Vec<OpenRegion>,
    /// Of runtimes in processes of their own; they end after the workers.
    supervisor: Option<Supervisor>,
}

impl Runtimes {
    /// None yet; starts the thread that writes heartbeats.
    pub(crate) fn new(
        fabric: Arc<WorkerFabric>,
        watched: Arc<Watched>,
    ) -> Result<Self, ServerError> {
        let writer = HeartbeatWriter::start().map_err(ServerError::no_thread("heartbeat"))?;
        let (accelerators, regions) = (Vec::new(), Vec::new());
        let heartbeat_writer = Arc::new(writer);
        Ok(Self { fabric, watched, heartbeat_writer, accelerators, regions, supervisor: None })
    }

    /// The supervisor of runtimes in processes of their own, if there has been one to supervise.
    pub(crate) fn supervisor(&self) -> Option<&Supervisor> {
        self.supervisor.as_ref()
    }

    /// The same; it is started when it is first needed.
    pub(crate) fn supervisor_started(&mut self) -> Result<&Supervisor, ServerError> {
        if self.supervisor.is_none() {
            let started = Supervisor::start(self.fabric.clone(), self.heartbeat_writer.clone());
            self.supervisor = Some(started.map_err(ServerError::no_thread("runtimes"))?);
        }
        Ok(self.supervisor.as_ref().expect("it is started above"))
    }

    /// Requests that each block of a slot has received, from the blocks' status lines: accelerators in order,
    /// blocks in order, without those in other processes.
    pub(crate) fn received_by_block(&self, slot: u16) -> Vec<u64> {
        let of_slot = self.regions.iter().filter(|region| region.slot == slot);
        of_slot.flat_map(|r| (0..r.blocks).map(|b| r.words.block(b).received)).collect()
    }

    /// Stops the accelerator threads of a slot and frees its regions; returns whether all threads have ended. No
    /// worker uses the regions any more.
    pub(crate) fn release(&mut self, slot: u16) -> bool {
        let mut ended = true;
        let of_slot = |(of, _): &mut (u16, _)| *of == slot;
        for (_, accelerator) in self.accelerators.extract_if(.., of_slot) {
            accelerator.stop(stop::NOW);
            ended &= has_ended(accelerator, BLOCKS_TIMEOUT);
        }
        self.watched.forget(slot);
        self.regions.retain(|region| region.slot != slot);
        ended
    }

    /// Stops everything until `deadline`. Returns whether something hangs.
    pub(crate) fn stop(&mut self, deadline: Instant) -> bool {
        // Asks the runtimes to end, then kills them.
        self.supervisor = None;
        for (_, accelerator) in &self.accelerators {
            accelerator.stop(stop::NOW);
        }
        let mut hung = false;
        for (_, accelerator) in self.accelerators.drain(..) {
            let left = deadline.saturating_duration_since(Instant::now());
            hung |= !has_ended(accelerator, left.clamp(Duration::from_millis(100), BLOCKS_TIMEOUT));
        }
        hung
    }

    /// Whether nothing of it runs.
    pub(crate) fn is_empty(&self) -> bool {
        self.accelerators.is_empty() && self.supervisor.is_none()
    }
}

/// Whether the threads of an accelerator, which were asked to, end in time.
fn has_ended(accelerator: CpuAccelerator, timeout: Duration) -> bool {
    let left = accelerator.join(timeout);
    if !left.is_empty() {
        tracing::error!(blocks = ?left, "blocks did not end; their threads are left behind");
    }
    left.is_empty()
}
