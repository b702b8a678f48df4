//! The context of a turn: the network, the clock, the links to the other workers, scratch space and
//! counters.
//!
//! Endpoints own the sources and destinations of messages; each borrows the turn while it works, and
//! does not access the others.

use std::sync::Arc;

use wire::nic::Nic;

use crate::base::fabric::Accepted;
use crate::base::keys::StreamKeys;
use crate::base::links::{ENVELOPE_BYTES, Outbound};
use crate::base::metrics::WorkerCounters;
use crate::base::shared::Shared;
use crate::base::topology::{Limits, Service};

/// Passes a connection that was accepted here to another worker.
pub(crate) type HandConnection<N> = Box<dyn Fn(u16, Accepted<<N as Nic>::Socket>) + Send>;

/// See the module documentation.
pub(crate) struct Turn<N: Nic> {
    /// Number of this worker.
    pub(crate) index: u16,
    pub(crate) nic: N,
    /// When the turn began.
    pub(crate) now_ns: u64,
    pub(crate) clock: Option<Box<dyn Fn() -> u64 + Send>>,
    pub(crate) outbound: Outbound,
    pub(crate) stream_keys: StreamKeys,
    /// `limits.slow_client_ms` in nanoseconds.
    pub(crate) slow_client_ns: u64,
    pub(crate) shared: Arc<Shared>,
    /// Hands a connection to another worker.
    pub(crate) hand_connection: HandConnection<N>,
    pub(crate) counters: Arc<WorkerCounters>,
    /// Scratch space, large enough for one read, one datagram, or one message of any ring.
    pub(crate) scratch: Vec<u8>,
    /// Nothing new is accepted.
    pub(crate) draining: bool,
    /// The turn found work: the worker stays awake.
    pub(crate) worked: bool,
    /// This worker has reported that it has answered everything.
    settled: bool,
}

impl<N: Nic> Turn<N> {
    /// The scratch space has room for a worker without services.
    pub(crate) fn new(
        index: u16,
        nic: N,
        shared: Arc<Shared>,
        hand_connection: HandConnection<N>,
        counters: Arc<WorkerCounters>,
        connections_max: u32,
    ) -> Self {
        let scratch_bytes = scratch_bytes([]);
        Self {
            index,
            nic,
            now_ns: 0,
            clock: None,
            outbound: Outbound::new(shared.workers(), scratch_bytes),
            stream_keys: StreamKeys::new(connections_max),
            slow_client_ns: Limits::default().slow_client_ms * 1_000_000,
            shared,
            hand_connection,
            counters,
            scratch: vec![0; scratch_bytes],
            draining: false,
            worked: false,
            settled: false,
        }
    }

    pub(crate) fn set_clock(&mut self, clock: Box<dyn Fn() -> u64 + Send>) {
        self.clock = Some(clock);
    }

    /// The current time; the turn's start time without a clock.
    pub(crate) fn clock_ns(&self) -> u64 {
        self.clock.as_ref().map_or(self.now_ns, |clock| clock())
    }

    /// The turn found work: the worker stays awake.
    pub(crate) fn busy(&mut self) {
        self.worked = true;
    }

    /// A worker that takes over a message becomes unsettled before it returns the ring's slot, and
    /// a worker settles only when its slots have been returned: so while a message is passed
    /// between two workers, one of them is unsettled.
    pub(crate) fn set_settled(&mut self, settled: bool) {
        if std::mem::replace(&mut self.settled, settled) != settled {
            self.shared.settle(settled);
        }
    }
}

/// Scratch space, large enough for one read, one datagram, or one message of any ring.
pub(crate) fn scratch_bytes<'a>(services: impl IntoIterator<Item = &'a Service>) -> usize {
    let of_service = |s: &Service| {
        let backends = s.backends.iter().map(|b| b.max_message_bytes).max().unwrap_or(0);
        s.max_message_bytes.max(s.max_reply_bytes).max(backends)
    };
    let longest = services.into_iter().map(of_service).max().unwrap_or(0) as usize;
    (longest + ENVELOPE_BYTES).max(wire::nic::UDP_PAYLOAD_MAX).max(256 << 10)
}
