//! Upstream servers: what a proxy's requests go to instead of mqueues.
//!
//! A service with `upstream` has no kernel. Its requests pass admission as all do (`admit.rs`: counted, shown to the chain of
//! functions) and leave through a socket to the upstream server that the client has to itself; what the server answers passes
//! departure (`depart.rs`: shown to the chain, counted) and goes to the client, from the address to which the client sent. Everything
//! belongs to the worker that received the request: nothing is handed over.
//!
//! *Datagrams.* Each client flow has a connected socket: see `flows.rs`, which bounds them and says which one is closed for a new one.
//! A flow that is idle for `idle_s` is closed. The requests of a turn are collected and sent by flow, one call for each
//! (`sendmmsg`, GSO); a socket that epoll reports is read with one call (`recvmmsg`, GRO), so an idle flow costs nothing, and the
//! worker sleeps while the server works.
//!
//! *Streams.* Each client connection has one to the server: see `streams.rs`. With `framing = "raw"` no messages are looked for in
//! their bytes: see `relay.rs`.
//!
//! *The books.* A request is in flight from admission to the first of these:
//!
//! | what happens | the request | the datagram |
//! |---|---|---|
//! | the server sends a datagram on the flow's socket | the oldest of the flow is replied to | goes to the client |
//! | nothing comes for `request_timeout_ms` (and at most a quarter more) | `request_timeout` | |
//! | the server's host reports that nothing listens (ICMP) | those of the flow in flight: `upstream_refused` | |
//! | the flow is closed for a new one, or none is opened | `upstream_flows` | |
//! | the socket takes no more | `send_failed` | |
//! | a datagram comes and nothing of the flow is in flight | | dropped: `backend_late` if a request had timed out, else `backend_unasked` |
//!
//! After a refusal the flow keeps its socket, and its next request tries again: datagrams need no back-off, since each costs what
//! it cost its client.
//!
//! *The client's address.* With `proxy_protocol` each connection to the server, and each datagram, begins with a header that has it
//! (`wire/src/proxy_protocol.rs`). Functions do not see the header.
//!
//! A datagram's source may be forged. What a source can be sent is limited for the flow as a whole: the bytes of all answers are at
//! most `limits.udp_reply_ratio` times those of all requests.

mod answers;
mod flows;
mod parts;
mod relay;
mod requests;
mod stream_requests;
mod streams;

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;

use wire::DropReason;
use wire::nic::{Event, Nic, StreamKey, Transport, TxBatch, TxItem};
use wire::proxy_protocol::{ProxyHeader, proxy_header};
use wire::session::{Origin, ReplyTo};

use self::flows::Flows;
use self::streams::{Stream, Streams};
use crate::admit::servers::{Relayed, Servers};
use crate::base::arrival::{Arrival, Message, Refusal};
use crate::base::keys::StreamOwner;
use crate::base::metrics::ServiceCounters;
use crate::base::topology::{Limits, POLL_NS, Service};
use crate::base::turn::Turn;
use crate::endpoint::clients::Clients;
use crate::endpoint::held::Held;
use crate::endpoint::{Endpoint, PerService, replace};
use crate::schedule::Schedule;
use crate::service::ends::OtherEnds;
use crate::service::services::Services;

/// Datagrams and bytes that are collected before they are sent.
const TX_ITEMS: usize = 1024;
const TX_BYTES: usize = 1 << 20;
/// A flow costs about ten system calls when it is opened and closed, and its source may be forged: one worker opens one in this
/// time, after at most [`OPENED_MAX`] at once. So a flood of new sources leaves it half of its time.
const OPEN_NS: u64 = 1_000_000 / 32;
const OPENED_MAX: u64 = 512;

/// One worker's sockets to the upstream server of one service.
pub(crate) struct Upstream {
    address: SocketAddr,
    /// What is sent begins with the client's address. Where clients send datagrams.
    header_with: Option<SocketAddr>,
    flows: Flows,
    streams: Streams,
    /// A flow is closed after this time without a datagram; `None`: after the limit of the engine.
    idle_ns: Option<u64>,
    counters: Arc<ServiceCounters>,
}

impl Upstream {
    /// Of a service that has one.
    pub(crate) fn new(service: &Service, counters: &Arc<ServiceCounters>) -> Option<Box<Self>> {
        let address = service.upstream?;
        let flows = Flows::new(service.upstream_flows, service.request_timeout_ms * 1_000_000);
        let mut listen = service.listen.iter();
        let at = listen.find(|listen| listen.transport == Transport::Udp);
        let at = at.map_or((Ipv4Addr::UNSPECIFIED, 0).into(), |listen| listen.address);
        let header_with = service.proxy_protocol.then_some(at);
        let streams = Streams::default();
        let idle_ns = service.idle_ms.map(|ms| ms * 1_000_000);
        let counters = counters.clone();
        Some(Box::new(Self { address, header_with, flows, streams, idle_ns, counters }))
    }

    /// The header before a client's datagram, if there is one.
    fn datagram_header(&self, origin: &Origin) -> Option<ProxyHeader> {
        let at = self.header_with?;
        let Origin::Datagram { peer, local, .. } = origin else { return None };
        let to = SocketAddr::new(local.unwrap_or(at.ip()), at.port());
        Some(proxy_header(Transport::Udp, *peer, to))
    }

    /// Requests in flight.
    pub(crate) fn in_flight(&self) -> u64 {
        self.flows.in_flight() + self.streams.in_flight()
    }

    /// When there is something to do without an event; `u64::MAX` never. Flows that are idle can wait for the longest sleep.
    pub(crate) fn wake_at(&self) -> u64 {
        self.flows.wake_at()
    }
}

/// A request that waits for [`Upstreams::send`].
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Destination {
    service: u16,
    flow: u32,
    /// Its place in the batch.
    place: u32,
}

/// What this turn has for all upstream servers.
struct UpstreamBatch {
    /// Requests that this turn received, and where each goes.
    tx: TxBatch,
    to: Vec<Destination>,
    sorted: Vec<TxItem>,
    /// Services and flows whose sockets may be read, and memory for the next list.
    ready: Vec<(u16, u32)>,
    spare: Vec<(u16, u32)>,
    /// Services, and clients with connections that have output, whose connections may be read, or whose clients have too much
    /// to read; and memory for the next list.
    to_write: Vec<(u16, u32)>,
    ready_streams: Vec<(u16, u32)>,
    waiting: Vec<(u16, u32)>,
    spare_streams: Vec<(u16, u32)>,
    /// Those that may be read, but whose tenants have to wait.
    held: Held,
    /// Connections of all services.
    streams: usize,
    /// Clients that may be read again.
    resumed: Vec<u32>,
    /// Drops that are counted when the batches are that the requests came in.
    ends: Vec<(u16, DropReason, u64)>,
    idle_ns: u64,
    /// The time for which flows have been opened.
    opened_until_ns: u64,
}

impl UpstreamBatch {
    /// For a worker without proxies.
    fn new() -> Self {
        Self {
            tx: TxBatch::new(0, 0),
            to: Vec::new(),
            sorted: Vec::new(),
            ready: Vec::new(),
            spare: Vec::new(),
            to_write: Vec::new(),
            ready_streams: Vec::new(),
            waiting: Vec::new(),
            spare_streams: Vec::new(),
            held: Held::default(),
            streams: 0,
            resumed: Vec::new(),
            ends: Vec::new(),
            idle_ns: u64::MAX,
            opened_until_ns: 0,
        }
    }

    /// A proxy comes, in this slot and with at most this many flows.
    pub(crate) fn reserve(&mut self, slot: usize, flows: u32) {
        self.held.make_room_for(slot);
        if self.sorted.capacity() == 0 {
            self.tx = TxBatch::new(TX_ITEMS, TX_BYTES);
            self.to.reserve(TX_ITEMS);
            self.sorted.reserve(TX_ITEMS);
        }
        // Each flow is listed once at most, and once more after it was closed and its number given to another.
        self.ready.reserve(2 * flows as usize);
        self.spare.reserve(2 * flows as usize);
    }

    pub(crate) fn set_limits(&mut self, limits: &Limits) {
        self.idle_ns = limits.idle_ms * 1_000_000;
    }

    /// Whether a flow may be opened now; if so, it is.
    fn may_open(&mut self, now_ns: u64) -> bool {
        let opened_ns = self.opened_until_ns.max(now_ns) + OPEN_NS;
        let may = opened_ns <= now_ns + OPENED_MAX * OPEN_NS;
        self.opened_until_ns = if may { opened_ns } else { self.opened_until_ns };
        may
    }

    /// Whether a socket may be read, unless its tenant has to wait.
    #[inline]
    fn has_some(&self) -> bool {
        let is_ready = !self.ready.is_empty() || !self.ready_streams.is_empty();
        is_ready || !self.resumed.is_empty() || !self.held.is_empty()
    }

    /// Whether the next turn may read one without an event.
    #[inline]
    pub(crate) fn is_ready(&self) -> bool {
        let is_ready = !self.ready.is_empty() || !self.ready_streams.is_empty();
        is_ready || !self.resumed.is_empty() || self.held.is_due()
    }

    /// Whether servers are not read because their clients have too much to read.
    #[inline]
    pub(crate) fn waits_for_clients(&self) -> bool {
        !self.waiting.is_empty()
    }

    /// A connection is opened. Each list has room for all of them, so nothing is allocated when many are busy at once.
    fn stream_opened(&mut self) {
        self.streams += 1;
        let count = self.streams;
        let lists = [
            &mut self.to_write,
            &mut self.ready_streams,
            &mut self.waiting,
            &mut self.spare_streams,
        ];
        for list in lists {
            list.reserve(count.saturating_sub(list.len()));
        }
        self.resumed.reserve(count.saturating_sub(self.resumed.len()));
    }

    fn list_stream(&mut self, service: u16, client: u32, stream: &mut Stream) {
        if !std::mem::replace(&mut stream.is_ready, true) {
            self.ready_streams.push((service, client));
        }
    }

    /// Requests end that may not be counted as received yet.
    fn end_later(&mut self, service: usize, reason: DropReason, requests: u64) {
        if requests > 0 {
            self.ends.push((service as u16, reason, requests));
        }
    }

    /// Services and flows whose sockets may be read.
    fn take_ready(&mut self) -> Vec<(u16, u32)> {
        std::mem::replace(&mut self.ready, std::mem::take(&mut self.spare))
    }

    /// The memory of a list of [`Self::take_ready`] is used again.
    fn give_back(&mut self, mut list: Vec<(u16, u32)>) {
        list.clear();
        self.spare = list;
    }

    /// Puts the requests of each flow behind each other, in their order.
    fn sort(&mut self) {
        let Self { tx, to, sorted, .. } = self;
        let flow = |d: &Destination| (d.service, d.flow);
        if to.is_sorted_by_key(flow) {
            return;
        }
        to.sort_unstable();
        sorted.clear();
        sorted.extend(to.iter().map(|destination| tx.waiting()[destination.place as usize]));
        tx.waiting_mut().copy_from_slice(sorted);
    }
}

/// The upstream servers of all services of a worker.
pub(crate) struct Upstreams {
    /// Of services that are proxies.
    by_slot: Vec<Option<Box<Upstream>>>,
    batch: UpstreamBatch,
}

fn of(by_slot: &mut [Option<Box<Upstream>>], service: usize) -> Option<&mut Upstream> {
    by_slot.get_mut(service)?.as_deref_mut()
}

impl Default for Upstreams {
    fn default() -> Self {
        Self { by_slot: Vec::new(), batch: UpstreamBatch::new() }
    }
}

impl PerService for Upstreams {
    type Part = Option<Box<Upstream>>;

    fn prepare(
        service: &Service,
        _: u16,
        _: &mut [OtherEnds],
        counters: &Arc<ServiceCounters>,
    ) -> Self::Part {
        Upstream::new(service, counters)
    }

    fn place<N: Nic>(&mut self, _: &mut Turn<N>, service: u16, part: Self::Part) -> Self::Part {
        if let Some(upstream) = &part {
            self.batch.reserve(service.into(), upstream.flows.max());
        }
        replace(&mut self.by_slot, service, part)
    }

    fn remove<N: Nic>(&mut self, turn: &mut Turn<N>, service: u16) -> Self::Part {
        self.close(turn, service);
        replace(&mut self.by_slot, service, None)
    }
}

impl<N: Nic> Servers<N> for Upstreams {
    fn serves(&self, service: usize) -> bool {
        self.by_slot.get(service).is_some_and(Option::is_some)
    }

    fn submit(
        &mut self,
        turn: &mut Turn<N>,
        services: &mut Services,
        service: usize,
        arrival: &Arrival,
        message: &mut impl Message,
    ) -> Result<(), Refusal> {
        self.submit_upstream(turn, services, service, arrival, message)
    }

    fn unspent(&mut self, service: usize, origin: &Origin) -> Option<u32> {
        self.flow_at(service, origin).map(|flow| u32::try_from(flow.unspent).unwrap_or(u32::MAX))
    }

    fn spend(&mut self, service: usize, origin: &Origin, bytes: u64) {
        if let Some(flow) = self.flow_at(service, origin) {
            flow.unspent = flow.unspent.saturating_sub(bytes);
        }
    }

    fn holds_client(&mut self, service: usize, client: StreamKey) -> bool {
        self.stream(service, client).is_some_and(|stream| stream.holds_client)
    }

    fn delays_close(&mut self, service: usize, client: StreamKey) -> bool {
        let Some(stream) = self.stream(service, client) else { return false };
        stream.delays_close = stream.is_pending();
        stream.delays_close
    }

    fn close_stream(
        &mut self,
        turn: &mut Turn<N>,
        services: &mut Services,
        service: usize,
        client: StreamKey,
    ) {
        let Some(stream) = self.take_stream(turn, services, service, client) else { return };
        services[service].count_lost(DropReason::ClientGone, stream.in_flight());
    }

    fn begin_relay(
        &mut self,
        turn: &mut Turn<N>,
        services: &mut Services,
        service: usize,
        client: &ReplyTo,
    ) -> Relayed {
        self.begin_relayed(turn, services, service, client)
    }

    fn relay_to_server(
        &mut self,
        turn: &mut Turn<N>,
        services: &mut Services,
        service: usize,
        client: StreamKey,
        chunk: &[u8],
    ) -> Option<DropReason> {
        self.pass_on(turn, services, service, client, chunk)
    }

    fn end_relay_input(&mut self, turn: &mut Turn<N>, service: usize, client: StreamKey) {
        self.end_input(turn, service, client);
    }

    fn relay_taken(&mut self, turn: &mut Turn<N>, service: usize, client: StreamKey) -> bool {
        self.taken_by_client(turn, service, client)
    }

    fn is_relay_finished(&mut self, service: usize, client: StreamKey) -> bool {
        self.stream(service, client).is_some_and(|stream| stream.is_finished())
    }
}

impl<N: Nic> Endpoint<N> for Upstreams {
    fn event(&mut self, _: &mut Turn<N>, event: Event, owner: StreamOwner) {
        match owner {
            StreamOwner::Flow { service, flow } => self.flow_event(event, service, flow),
            StreamOwner::Upstream { service, client } => self.stream_event(event, service, client),
            _ => {}
        }
    }

    /// Sends what this turn has collected, and takes what servers have answered.
    fn exchange(
        &mut self,
        turn: &mut Turn<N>,
        services: &mut Services,
        schedule: &mut Schedule,
        clients: &mut Clients,
    ) {
        if !self.by_slot.is_empty() {
            self.exchange_all(turn, services, clients, schedule);
        }
    }

    fn expire(
        &mut self,
        turn: &mut Turn<N>,
        services: &mut Services,
        clients: &mut Clients,
        service: usize,
    ) {
        self.expire_flows(turn, services, service);
        self.expire_streams(turn, services, clients, service);
    }

    fn drop_requests(
        &mut self,
        turn: &mut Turn<N>,
        services: &mut Services,
        clients: &mut Clients,
        service: usize,
        reason: DropReason,
    ) {
        self.drop_all(turn, services, clients, service, reason);
    }

    fn move_to(&mut self, turn: &mut Turn<N>, services: &Services, from: u16, to: u16) {
        self.move_relays(turn, services, from, to);
    }

    fn set_limits(&mut self, limits: &Limits) {
        self.batch.set_limits(limits);
    }

    fn outstanding(&self, service: u16) -> u64 {
        let upstream = self.by_slot.get(usize::from(service)).and_then(Option::as_ref);
        upstream.map_or(0, |upstream| upstream.in_flight())
    }

    fn wake_at(&self, now_ns: u64, _: &Services) -> u64 {
        if self.batch.is_ready() {
            return 0;
        }
        // A client that takes what waits for it ends no sleep of its own.
        let waits = self.batch.waits_for_clients();
        let again_ns = if waits { now_ns + POLL_NS } else { u64::MAX };
        // A server's answer is an event.
        let of = self.by_slot.iter().flatten().map(|upstream| upstream.wake_at());
        of.fold(again_ns, u64::min)
    }
}
