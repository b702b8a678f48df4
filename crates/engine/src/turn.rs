//! State that every step of a turn uses: the network, the clock, the services, and the links to the other workers.
//!
//! Endpoints own the sources and destinations of messages; each borrows the turn while it works, and does not access
//! the others.

use std::sync::Arc;

use onpath::{Chain, CommandError};
use wire::nic::{Event, Nic};

use crate::base::fabric::Accepted;
use crate::base::keys::StreamKeys;
use crate::base::links::ENVELOPE_BYTES;
use crate::base::links::Outbound;
use crate::base::metrics::WorkerCounters;
use crate::base::shared::Shared;
use crate::base::topology::{Limits, Service};
use crate::endpoint::sockets::SocketLists;
use crate::endpoint::upstream::UpstreamBatch;
use crate::service::chain::{ChainPlace, ChainReply, ChainRequest};
use crate::service::share::ServiceShare;

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
    /// By slot.
    pub(crate) services: Vec<ServiceShare>,
    pub(crate) outbound: Outbound,
    pub(crate) stream_keys: StreamKeys,
    /// Of services that are proxies.
    pub(crate) upstream: UpstreamBatch,
    /// Of services with sockets.
    pub(crate) socket_lists: SocketLists,
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
    /// Functions of all services may have been called since replies were last gathered; of proxies, only this and their messages call some.
    pub(crate) ticked: bool,
    /// This worker has reported that it has answered everything.
    settled: bool,
}

impl<N: Nic> Turn<N> {
    pub(crate) fn new(
        index: u16,
        nic: N,
        shared: Arc<Shared>,
        hand_connection: HandConnection<N>,
        counters: Arc<WorkerCounters>,
        stream_keys: StreamKeys,
        scratch_bytes: usize,
    ) -> Self {
        Self {
            index,
            nic,
            now_ns: 0,
            clock: None,
            services: Vec::new(),
            outbound: Outbound::new(shared.workers(), scratch_bytes),
            stream_keys,
            upstream: UpstreamBatch::new(),
            socket_lists: SocketLists::default(),
            slow_client_ns: Limits::default().slow_client_ms * 1_000_000,
            shared,
            hand_connection,
            counters,
            scratch: vec![0; scratch_bytes],
            draining: false,
            worked: false,
            ticked: false,
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

    /// A worker that takes over a message becomes unsettled before it returns the ring's slot, and a worker settles
    /// only when its slots have been returned: so while a message is passed between two workers, one of them is
    /// unsettled.
    pub(crate) fn set_settled(&mut self, settled: bool) {
        if std::mem::replace(&mut self.settled, settled) != settled {
            self.shared.settle(settled);
        }
    }

    /// Publishes every RX ring that got messages, and runs or wakes the blocks.
    // Always inline: there is one caller, and it runs every turn.
    #[inline(always)]
    pub(crate) fn drive(&mut self) {
        let Self { services, clock, now_ns, worked, .. } = self;
        for share in services.iter_mut().filter(|share| !share.is_proxy()) {
            if share.backends.has_transfers() {
                share.backends.end_transfers();
            }
            if share.backends.has_rung() {
                share.ring_clients();
            }
            if share.sockets.as_ref().is_some_and(|sockets| sockets.has_rung()) {
                share.ring_sockets();
            }
            *worked |= share.accelerators.iter().any(|d| !d.rx_pending.is_empty());
            // The clock is read only while a message is sampled, see `stages.rs`.
            let clock_ns = || clock.as_ref().map_or(*now_ns, |clock| clock());
            if share.awaits_release() {
                share.check_releases(clock_ns());
                share.drive(*now_ns);
                share.check_releases(clock_ns());
            } else {
                share.drive(*now_ns);
            }
        }
    }

    /// Publishes to the other workers how many requests this one still takes for a service.
    pub(crate) fn publish_credit_of(&self, service: usize) {
        let credit = self.services[service].free_credit();
        self.shared.publish_credit(self.index, service as u16, credit);
    }

    /// The same for all services.
    pub(crate) fn publish_credit(&self) {
        (0..self.services.len()).for_each(|service| self.publish_credit_of(service));
    }

    /// Reads how many requests the others still take.
    pub(crate) fn read_credit(&mut self) {
        for (number, share) in self.services.iter_mut().enumerate() {
            for worker in (0..self.shared.workers()).filter(|w| *w != self.index as usize) {
                share.other_credit[worker] = self.shared.credit_of(worker, number);
            }
        }
    }

    /// Updates the gauge after a block began to hang, or a service with such blocks was removed.
    pub(crate) fn count_hung_blocks(&self) {
        self.counters.hung_blocks.set(self.services.iter().map(|share| share.hung_blocks).sum());
    }

    /// Does what is asked of a chain. If its service has left nothing is attached.
    pub(crate) fn ask_chain(&mut self, place: ChainPlace, request: ChainRequest) -> ChainReply {
        let share = self.services.get_mut(usize::from(place.slot));
        let share = share.filter(|share| !share.is_vacant());
        match request {
            ChainRequest::Arrange(order) => ChainReply::Arranged(match share {
                Some(share) => {
                    let former = share.arrange_chain(place.backend, order);
                    share.find_peers(&self.shared);
                    former
                }
                None => Chain::default().arrange(order),
            }),
            ChainRequest::Command(id, command) => {
                let chain = share.and_then(|share| share.chain_of(place.backend));
                let done = chain.map(|chain| chain.command(id, command));
                ChainReply::Command(done.unwrap_or(Err(CommandError::Gone)))
            }
            ChainRequest::Trace(trace) => {
                let chain = share.and_then(|share| share.chain_of(place.backend));
                ChainReply::Traced(chain.and_then(|chain| chain.set_trace(trace)))
            }
        }
    }

    /// An event of a TCP connection to a backend.
    pub(crate) fn backend_event(
        &mut self,
        event: Event,
        service: usize,
        (pool, number): (usize, usize),
    ) {
        let Self { services, nic, now_ns, clock, scratch, worked, .. } = self;
        let share = &mut services[service];
        let clock_ns = || clock.as_ref().map_or(*now_ns, |clock| clock());
        match event {
            Event::Readable(_) => {
                let time = (*now_ns, &clock_ns as &dyn Fn() -> u64);
                share.backends.read_backend(nic, pool, number, time, scratch);
                *worked = true;
            }
            Event::Writable(_) => share.backends.backend_writable(pool, number),
            _ => {
                share.backends.fail_backend(nic, pool, number, mqueue::abi::status::CLOSED, *now_ns)
            }
        }
    }

    /// An event of a client mqueue's UDP socket.
    pub(crate) fn datagram_backend_event(&mut self, event: Event, service: usize, client: u32) {
        let Self { services, nic, now_ns, clock, scratch, worked, .. } = self;
        let share = &mut services[service];
        let clock_ns = || clock.as_ref().map_or(*now_ns, |clock| clock());
        match event {
            Event::Readable(_) => {
                share.backends.read_datagram_backend(nic, client, &clock_ns, scratch);
                *worked = true;
            }
            Event::Writable(_) => {}
            _ => share.backends.fail_datagram_backend(nic, client),
        }
    }

    /// Writes the pending output of connections to backends.
    pub(crate) fn flush_backends(&mut self) {
        let Self { services, nic, now_ns, .. } = self;
        for share in services.iter_mut().filter(|share| !share.is_proxy()) {
            share.backends.flush_backends(nic, *now_ns);
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
