//! Upstream servers: what a proxy's requests go to instead of mqueues.
//!
//! A service with `upstream` has no kernel. Its requests pass admission as all do (`admit.rs`: counted, shown to the chain of
//! functions) and leave through a socket to the upstream server that the client has to itself; what the server answers passes
//! departure (`depart.rs`: shown to the chain, counted) and goes to the client, from the address to which the client sent. Everything
//! belongs to the worker that received the request: nothing is handed over.
//!
//! *Datagrams.* Each client flow has a connected socket: see [`flows`], which bounds them and says which one is closed for a new one.
//! A flow that is idle for `limits.idle_s` is closed. The requests of a turn are collected and sent by flow, one call for each
//! (`sendmmsg`, GSO); a socket that epoll reports is read with one call (`recvmmsg`, GRO), so an idle flow costs nothing, and the
//! worker sleeps while the server works.
//!
//! *The books.* A request is in flight from admission to the first of these:
//!
//! | what happens | the request | the datagram |
//! |---|---|---|
//! | the server sends a datagram on the flow's socket | the oldest of the flow is replied to | goes to the client |
//! | nothing comes for `request_timeout_ms` (and at most a quarter more) | `request_timeout` | |
//! | the server's host reports that nothing listens (ICMP) | those of the flow in flight: `upstream_refused` | |
//! | the flow is closed for a new one | `upstream_flows` | |
//! | the socket takes no more | `send_failed` | |
//! | a datagram comes and nothing of the flow is in flight | | dropped: `backend_late` if a request had timed out, else `backend_unasked` |
//!
//! After a refusal the flow keeps its socket, and its next request tries again: datagrams need no back-off, since each costs what
//! it cost its client.
//!
//! A datagram's source may be forged. What a source can be sent is limited for the flow as a whole: the bytes of all answers are at
//! most `limits.udp_reply_ratio` times those of all requests.

mod answers;
mod flows;

use std::net::SocketAddr;

use wire::DropReason;
use wire::nic::{Close, Event, Nic, NicError, Transport, TxBatch, TxDatagram};
use wire::session::Origin;

use self::flows::Flows;
use crate::endpoint::stream_keys::StreamOwner;
use crate::service::arrival::{Arrival, Message, Refusal};
use crate::service::share::ServiceShare;
use crate::topology::{Limits, Service};
use crate::turn::Turn;

/// Datagrams and bytes that are collected before they are sent.
const TX_ITEMS: usize = 1024;
const TX_BYTES: usize = 1 << 20;

/// One worker's sockets to the upstream server of one service.
pub(crate) struct Upstream {
    address: SocketAddr,
    flows: Flows,
}

impl Upstream {
    /// Of a service that has one.
    pub(crate) fn new(service: &Service) -> Option<Box<Self>> {
        let address = service.upstream?;
        let flows = Flows::new(service.upstream_flows, service.request_timeout_ms * 1_000_000);
        Some(Box::new(Self { address, flows }))
    }

    /// The most client flows it has.
    pub(crate) fn flows_max(&self) -> u32 {
        self.flows.max()
    }

    /// Requests in flight.
    pub(crate) fn in_flight(&self) -> u64 {
        self.flows.in_flight()
    }

    /// When there is something to do without an event; `u64::MAX` never. Flows that are idle can wait for the longest sleep.
    pub(crate) fn wake_at(&self) -> u64 {
        self.flows.wake_at()
    }
}

/// A request that waits for [`Turn::send_upstream`].
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Destination {
    service: u16,
    flow: u32,
    /// Its place in the batch.
    place: u32,
}

/// What all proxies of a worker share.
pub(crate) struct UpstreamBatch {
    /// Requests that this turn received, and where each goes.
    tx: TxBatch,
    to: Vec<Destination>,
    sorted: Vec<TxDatagram>,
    /// Services and flows whose sockets may be read, and memory for the next list.
    ready: Vec<(u16, u32)>,
    spare: Vec<(u16, u32)>,
    idle_ns: u64,
}

impl UpstreamBatch {
    /// For a worker without proxies.
    pub(crate) fn new() -> Self {
        Self {
            tx: TxBatch::new(0, 0),
            to: Vec::new(),
            sorted: Vec::new(),
            ready: Vec::new(),
            spare: Vec::new(),
            idle_ns: u64::MAX,
        }
    }

    /// A proxy comes, with at most this many flows.
    pub(crate) fn reserve(&mut self, flows: u32) {
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

    /// Whether a socket may be read.
    #[inline]
    pub(crate) fn is_ready(&self) -> bool {
        !self.ready.is_empty()
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

impl<N: Nic> Turn<N> {
    /// Collects a request for the upstream server of its service.
    // Not inline: services with kernels do not come here.
    #[inline(never)]
    pub(crate) fn submit_upstream(
        &mut self,
        service: usize,
        arrival: &Arrival,
        message: &mut impl Message,
    ) -> Result<(), Refusal> {
        let payload = message.bytes();
        if !self.upstream.tx.room_for(payload.len()) {
            self.send_upstream();
            if !self.upstream.tx.room_for(payload.len()) {
                return Err(Refusal::Drop(DropReason::TooLong));
            }
        }
        let flow = self.flow_of(service, &arrival.origin).map_err(Refusal::Drop)?;
        let Self { services, upstream, now_ns, .. } = self;
        let share = &mut services[service];
        let Some(Upstream { flows, address }) = share.upstream.as_deref_mut() else {
            return Err(Refusal::Drop(DropReason::NoAccelerator));
        };
        let expired = flows.ask(flow, 1, payload.len() as u64, *now_ns);
        let place = upstream.to.len() as u32;
        upstream.to.push(Destination { service: service as u16, flow, place });
        upstream.tx.push(*address, None, payload.len(), |bytes| bytes.copy_from_slice(payload));
        share.count_lost(DropReason::RequestTimeout, expired.into());
        share.counters.accepted.one();
        Ok(())
    }

    /// The flow of a client; it gets one if it has none.
    fn flow_of(&mut self, service: usize, origin: &Origin) -> Result<u32, DropReason> {
        let share = &mut self.services[service];
        let Some(Upstream { flows, address }) = share.upstream.as_deref_mut() else {
            return Err(DropReason::NoAccelerator);
        };
        if let Some(flow) = flows.find(origin) {
            return Ok(flow);
        }
        let address = *address;
        if let Err(closed) = flows.room() {
            let Some(closed) = closed else { return Err(DropReason::UpstreamFlows) };
            // Requests of it may have been collected.
            self.send_upstream();
            self.close_flow(service, closed, DropReason::UpstreamFlows);
            self.services[service].counters.upstream_flows_evicted.one();
        }
        let Self { services, nic, stream_keys, now_ns, .. } = self;
        let share = &mut services[service];
        let Some(upstream) = share.upstream.as_deref_mut() else {
            return Err(DropReason::NoAccelerator);
        };
        let flow = upstream.flows.next();
        let key = stream_keys.issue(StreamOwner::Flow { service: service as u16, flow });
        if let Err(error) = nic.connect(address, Transport::Udp, key) {
            stream_keys.free(key);
            return Err(match error {
                NicError::Exhausted => DropReason::UpstreamFlows,
                NicError::Refused(_) => DropReason::UpstreamRefused,
            });
        }
        share.counters.upstream_flows_opened.one();
        Ok(upstream.flows.open(*origin, key, *now_ns))
    }

    /// Closes a flow; its requests in flight are dropped for this reason.
    fn close_flow(&mut self, service: usize, flow: u32, reason: DropReason) {
        let Self { services, nic, stream_keys, .. } = self;
        let share = &mut services[service];
        let closed = share.upstream.as_deref_mut().and_then(|u| u.flows.close(flow));
        let Some((key, in_flight)) = closed else { return };
        nic.close(key, Close::Reset);
        stream_keys.free(key);
        share.counters.upstream_flows_closed.one();
        share.count_lost(reason, in_flight.into());
    }

    /// Sends what was collected: one call for each flow.
    pub(crate) fn send_upstream(&mut self) {
        if self.upstream.to.is_empty() {
            return;
        }
        self.upstream.sort();
        let Self { services, nic, upstream, .. } = self;
        let UpstreamBatch { tx, to, .. } = upstream;
        for run in to.chunk_by(|a, b| (a.service, a.flow) == (b.service, b.flow)) {
            let Destination { service, flow, .. } = run[0];
            let share = &mut services[usize::from(service)];
            let flows = share.upstream.as_deref_mut().map(|upstream| &mut upstream.flows);
            let Some((flows, key)) = flows.and_then(|f| f.get(flow).map(|f| f.key).map(|k| (f, k)))
            else {
                tx.advance(run.len());
                continue;
            };
            let waiting = tx.waiting().len();
            let outcome = nic.write_datagrams(key, tx, run.len());
            let left = run.len() - (waiting - tx.waiting().len());
            tx.advance(left);
            let lost = (left + outcome.refused) as u32;
            let mut refused = 0;
            if outcome.bounced {
                refused = flows.give_up(flow, run.len() as u32);
            }
            flows.withdraw(flow, lost);
            share.count_lost(DropReason::UpstreamRefused, refused.into());
            share.count_lost(DropReason::SendFailed, lost.into());
        }
        to.clear();
    }

    /// Something happened on the socket of a flow.
    pub(crate) fn flow_event(&mut self, event: Event, service: u16, flow: u32) {
        let Self { services, upstream, .. } = self;
        let share = services.get_mut(usize::from(service));
        let entry = share.and_then(|share| share.upstream.as_deref_mut()?.flows.get(flow));
        let Some(entry) = entry else { return };
        entry.bounced |= matches!(event, Event::Failed(_));
        if !std::mem::replace(&mut entry.is_ready, true) {
            upstream.ready.push((service, flow));
        }
    }

    /// The host of the upstream server refuses what a flow has sent: none of it will be answered.
    fn refuse_flow(&mut self, service: usize, flow: u32) {
        let share = &mut self.services[service];
        let Some(upstream) = share.upstream.as_deref_mut() else { return };
        let refused = upstream.flows.give_up(flow, 0);
        share.count_lost(DropReason::UpstreamRefused, refused.into());
    }

    /// Bytes of the requests of a flow that no answer has been charged to.
    fn unspent(&mut self, service: usize, flow: u32) -> u32 {
        let upstream = self.services[service].upstream.as_deref_mut();
        let entry = upstream.and_then(|upstream| upstream.flows.get(flow));
        entry.map_or(0, |entry| u32::try_from(entry.unspent).unwrap_or(u32::MAX))
    }

    /// Charges an answer to the requests of a flow.
    fn spend(&mut self, service: usize, flow: u32, bytes: u64) {
        let upstream = self.services[service].upstream.as_deref_mut();
        if let Some(entry) = upstream.and_then(|upstream| upstream.flows.get(flow)) {
            entry.unspent = entry.unspent.saturating_sub(bytes);
        }
    }

    /// Once a millisecond: requests that have timed out, and flows that are idle.
    pub(crate) fn expire_upstream(&mut self, service: usize) {
        let (now_ns, idle_ns) = (self.now_ns, self.upstream.idle_ns);
        let share = &mut self.services[service];
        let Some(upstream) = share.upstream.as_deref_mut() else { return };
        let expired = upstream.flows.expire(now_ns);
        share.count_lost(DropReason::RequestTimeout, expired);
        let Some(before_ns) = now_ns.checked_sub(idle_ns) else { return };
        while let Some(flow) = self.idle_flow(service, before_ns) {
            self.close_flow(service, flow, DropReason::IdleTimeout);
        }
    }

    fn idle_flow(&mut self, service: usize, before_ns: u64) -> Option<u32> {
        self.services[service].upstream.as_deref_mut()?.flows.idle_since(before_ns)
    }

    /// Gives up what is in flight to the upstream server of a service.
    pub(crate) fn drop_upstream_requests(&mut self, service: usize, reason: DropReason) {
        let share = &mut self.services[service];
        let Some(upstream) = share.upstream.as_deref_mut() else { return };
        let given_up = upstream.flows.give_up_all();
        share.count_lost(reason, given_up);
    }

    /// The service is gone: closes its sockets.
    pub(crate) fn close_upstream(&mut self, share: &mut ServiceShare) {
        let Self { nic, stream_keys, .. } = self;
        let Some(upstream) = share.upstream.as_deref_mut() else { return };
        while let Some(flow) = upstream.flows.any() {
            let Some((key, _)) = upstream.flows.close(flow) else { return };
            nic.close(key, Close::Reset);
            stream_keys.free(key);
            share.counters.upstream_flows_closed.one();
        }
    }
}
