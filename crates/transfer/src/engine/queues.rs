//! The queues of an engine by device, as they are at a moment.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use super::Engine;
use super::handle::Status;
use crate::command::device::Device;
use crate::engine::counters::DeviceLoad;
use crate::engine::scoreboard::{Activity, AtWork};

/// What the sockets, the accelerators or the files of one block device do for an engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceQueue {
    /// The device number of the files' file system (`st_dev`). `None`: they are no files, or files of more file systems than are counted apart.
    pub block: Option<u64>,
    /// What it does and has done.
    pub load: DeviceLoad,
    /// Transfers that wait until a socket is ready; 0 of other devices.
    pub waiting: u64,
}

/// A transfer in flight.
pub(crate) struct InFlight {
    pub(crate) status: Arc<Status>,
    pub(crate) activity: Activity,
}

impl Engine {
    /// The transfers in flight.
    pub(crate) fn transfers(&self) -> Vec<InFlight> {
        let board = self.shared.board();
        let mut all = HashMap::<*const Status, InFlight>::new();
        for (ending, activity) in board.entries.entries() {
            let status = &ending.status;
            let known = all
                .entry(Arc::as_ptr(status))
                .or_insert_with(|| InFlight { status: status.clone(), activity });
            if activity == Activity::Running {
                known.activity = activity;
            }
        }
        all.into_values().collect()
    }

    /// The queues of all devices that transfers have used.
    pub fn queues(&self) -> Vec<DeviceQueue> {
        let counters = self.counters();
        let (steps, waiting) = {
            let board = self.shared.board();
            board.entries.by_device()
        };
        let blocks: BTreeMap<u64, (u64, u64)> = counters.blocks();
        let mut at_work = BTreeMap::<_, AtWork>::new();
        for ((device, block), of) in steps {
            let block = block.filter(|block| blocks.contains_key(block));
            let sum = at_work.entry((device, block)).or_default();
            sum.queued += of.queued;
            sum.running += of.running;
            sum.bytes += of.bytes;
        }
        let mut queues = Vec::new();
        let mut add = |device, block: Option<u64>, taken, given| {
            let now = at_work.remove(&(device, block)).unwrap_or_default();
            let waiting = if device == Device::Socket { waiting } else { 0 };
            let (queued, running, bytes_in_flight) = (now.queued, now.running, now.bytes);
            let load = DeviceLoad { device, queued, running, bytes_in_flight, taken, given };
            queues.push(DeviceQueue { block, load, waiting });
        };
        for (block, (taken, given)) in &blocks {
            add(Device::File, Some(*block), *taken, *given);
        }
        for DeviceLoad { device, taken, given, .. } in counters.devices() {
            let (mut taken, mut given) = (taken, given);
            if device == Device::File {
                // Those that are not counted apart.
                for (of_block, to_block) in blocks.values() {
                    taken = taken.saturating_sub(*of_block);
                    given = given.saturating_sub(*to_block);
                }
            }
            add(device, None, taken, given);
        }
        let is_used = |queue: &DeviceQueue| {
            let DeviceLoad { queued, running, taken, given, .. } = queue.load;
            queued + running + queue.waiting + taken + given > 0
        };
        queues.retain(is_used);
        queues
    }
}
