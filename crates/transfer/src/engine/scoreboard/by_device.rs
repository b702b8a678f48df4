//! What entries do, by their devices, for a list. Nothing is counted for it while they run.

use std::collections::BTreeMap;

use super::{Activity, Scoreboard, State, Work};
use crate::command::device::{Device, End};

/// Steps on a device at a moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AtWork {
    /// Those that wait for a thread.
    pub queued: u64,
    /// Those that run.
    pub running: u64,
    /// Bytes of the chunks of both.
    pub bytes: u64,
}

impl<T: Work> Scoreboard<T> {
    /// The entries, parts of transfers as well, with what they do.
    pub fn entries(&self) -> impl Iterator<Item = (&T::Handle, Activity)> {
        let entries = self.slots.iter().flatten();
        entries.filter_map(|entry| Some((&entry.handle, self.activity(entry.id)?)))
    }

    /// Steps by their kind of device and, of files, by the device number of their file system; and how many entries wait for a socket.
    pub fn by_device(&self) -> (BTreeMap<(Device, Option<u64>), AtWork>, u64) {
        let (mut all, mut waiting) = (BTreeMap::<_, AtWork>::new(), 0);
        for entry in self.slots.iter().flatten() {
            let (device, end, runs) = match entry.state {
                State::Queued(device, end) => (device, end, false),
                State::Running(device, end) => (device, end, true),
                State::Waiting => {
                    waiting += 1;
                    continue;
                }
            };
            let block = match end {
                End::Source => entry.blocks[0],
                End::Sink => entry.blocks[1],
            };
            let of = all.entry((device, block)).or_default();
            of.queued += u64::from(!runs);
            of.running += u64::from(runs);
            of.bytes += entry.chunk_bytes as u64;
        }
        (all, waiting)
    }
}
