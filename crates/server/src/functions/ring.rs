//! The rings of applications: where a function delivers requests to the application that made it.
//!
//! A ring is a region as those of accelerators are, with a block for each worker, whose RX ring that worker fills: so no worker waits for
//! another one, and what one worker receives stays in order. The application reads it in the role of an accelerator. It maps the whole region
//! and may write anything there: a worker checks each count that it reads, and does not use a ring with an impossible one any more.
//!
//! A message's token is its number among those that the function has delivered on this worker, with those for which there was no room. The tag of a
//! datagram has its sender ([`tag_of`]); other messages have the tag 0.

use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::{Arc, Mutex};

use mqueue::abi::{DEPTH_MAX, MESSAGE_BYTES_MAX, kind};
use mqueue::{
    Head, LoanError, MappedMemory, MqueuePlan, Producer, Region, RegionPlan, RingPlan, Words,
};
use onpath::{RequestId, SharedSink, Sink};
use runtime::custom_ring::tag_of;
use sys::readiness::{WakeFd, WakeSender};
use sys::{RegionOptions, SharedMemory};
use wire::session::Origin;

use super::error::FunctionError;

/// Requests in a ring for each worker, at most.
const ENTRIES_MAX: u32 = DEPTH_MAX;
/// Memory of all rings together, in bytes.
pub(super) const BYTES_MAX: u64 = 256 << 20;
/// Of the functions of one user, unless it is the operator.
pub(super) const BYTES_PER_USER_MAX: u64 = 64 << 20;
/// Longest payload of the rings toward the engine, which are not used.
const UNUSED_BYTES: u32 = 8;

/// The ring of one function.
pub(super) struct ApplicationRing {
    memory: Arc<SharedMemory>,
    /// The application's end of the wake-ups.
    bell: WakeFd,
    sinks: Vec<SharedSink>,
}

impl ApplicationRing {
    /// A ring with `entries` places for each worker. `left_bytes` is the memory that there is for it.
    pub(super) fn new(
        name: &str,
        workers: usize,
        entries: u32,
        message_bytes: u32,
        left_bytes: u64,
    ) -> Result<Self, FunctionError> {
        let cannot = |why: String| FunctionError::Ring(name.to_owned(), why);
        if !entries.is_power_of_two() || entries > ENTRIES_MAX {
            return Err(cannot(format!(
                "it has {entries} entries, and not a power of two up to {ENTRIES_MAX}"
            )));
        }
        if !(1..=MESSAGE_BYTES_MAX).contains(&message_bytes) {
            return Err(cannot(format!(
                "its messages have up to {message_bytes} bytes, and not 1 to {MESSAGE_BYTES_MAX}"
            )));
        }
        let mqueue = MqueuePlan {
            depth: entries,
            // An application that stops reading may have as many of the longest messages as there is memory for.
            rx: RingPlan::doorbell(message_bytes, u64::from(entries) * u64::from(message_bytes)),
            tx: RingPlan::doorbell(UNUSED_BYTES, 0),
        };
        let plan = RegionPlan::of_blocks(workers as u32, &[mqueue], 1);
        let bytes = plan.bytes().map_err(|error| cannot(error.to_string()))?;
        if bytes > left_bytes {
            return Err(cannot(format!(
                "it needs {} MiB, {} are left, and all rings together have at most {}, those of a user {}: give it fewer entries or \
                 shorter messages",
                bytes.div_ceil(1 << 20),
                left_bytes >> 20,
                BYTES_MAX >> 20,
                BYTES_PER_USER_MAX >> 20
            )));
        }
        let memory = SharedMemory::create(
            &format!("serval:ring:{name}"),
            bytes as usize,
            &RegionOptions::default(),
        );
        let memory = Arc::new(memory.map_err(|error| cannot(error.to_string()))?);
        let region = Region::format(MappedMemory::new(memory.clone()), &plan);
        let mut region = region.map_err(|error| cannot(error.to_string()))?;
        let (sender, bell) = WakeSender::new()
            .map_err(|error| cannot(format!("the engine has no free descriptors: {error}")))?;
        let (sender, words) = (Arc::new(sender), region.words());
        let sink = |worker: u32| -> SharedSink {
            let (producer, _) = region.engine_ends(worker);
            let (words, sender) = (words.clone(), sender.clone());
            Arc::new(Mutex::new(WorkerRing { producer, words, sender, number: 0, usable: true }))
        };
        let sinks = (0..workers as u32).map(sink).collect();
        Ok(Self { memory, bell, sinks })
    }

    pub(super) fn bytes(&self) -> u64 {
        self.memory.len_bytes() as u64
    }

    pub(super) fn sink(&self, worker: usize) -> SharedSink {
        self.sinks[worker].clone()
    }

    /// The descriptors for the application: the region, and where it is woken up.
    pub(super) fn files(&self) -> std::io::Result<Vec<OwnedFd>> {
        let files = [self.memory.fd(), self.bell.as_fd()];
        files.into_iter().map(|file| file.try_clone_to_owned()).collect()
    }
}

/// The ring of one worker.
struct WorkerRing {
    producer: Producer<MappedMemory>,
    words: Words<MappedMemory>,
    sender: Arc<WakeSender>,
    number: u64,
    /// The application has written no impossible count.
    usable: bool,
}

impl Sink for WorkerRing {
    fn put(&mut self, message: &[u8], request: &RequestId) -> bool {
        let tag = match request.origin {
            Origin::Datagram { ref peer, .. } => tag_of(peer),
            Origin::Client(_) => 0,
        };
        let head = Head { token: self.number, tag, kind: kind::MESSAGE, status: 0 };
        self.number += 1;
        let pushed =
            if self.usable { self.producer.push(head, message) } else { Err(LoanError::Full) };
        self.usable &= pushed != Err(LoanError::Corrupt);
        pushed.is_ok()
    }

    fn publish(&mut self) {
        if self.producer.publish() && self.words.accelerator_parked() {
            self.sender.wake();
        }
    }
}
