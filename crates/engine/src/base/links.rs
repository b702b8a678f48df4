//! Hand-over: requests and replies that are passed from one worker to another.
//!
//! For each service, every pair of workers is connected by two small regions of private memory, one for each
//! direction of requests. The rings and their ordering edges are those of [`mqueue`], used worker to worker (edge
//! HANDOVER). A region's RX ring carries requests from worker A to worker B, its TX ring carries B's replies to them
//! back to A. Requests and replies have separate rings because a request may have to wait at the head of its ring for
//! credit, while a reply can always be taken: with a shared ring, two workers could deadlock. Services have separate
//! rings for the same reason: a request for a service whose accelerator is stuck would delay all others.
//!
//! A message is its origin (64 bytes) followed by the payload. Datagrams are answered by the worker
//! that owns the mqueue, from its own socket on the same port; only replies to connections and to
//! shared-memory clients travel back.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use mqueue::{
    Consumer, Head, HeapMapping, LoanError, MappedMemory, MqueuePlan, Producer, Region, RegionPlan,
    RingPlan, abi,
};
use wire::DropReason;
use wire::framing::Expects;
use wire::nic::PortIndex;
use wire::session::{EndpointKind, Origin, ReplyTo};

use crate::base::arrival::{ANY, Awaited};
use crate::base::topology::Service;

/// Slots of a hand-over ring.
const DEPTH: u32 = 256;
/// Bytes in front of the payload.
pub(crate) const ENVELOPE_BYTES: usize = 64;

/// The header of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Envelope {
    pub(crate) service: u16,
    /// The mqueue (local number at the receiver), or [`ANY`].
    pub(crate) mqueue: u32,
    pub(crate) expects: Expects,
    pub(crate) origin: Origin,
    /// See [`wire::session::Request::number`].
    pub(crate) number: u64,
    /// How many bytes the client sent; of requests only.
    pub(crate) received_len: u32,
}

impl Envelope {
    /// The envelope of a request whose client belongs to another worker.
    pub(crate) fn of_client(service: usize, request: &Awaited) -> Self {
        let Awaited { to, number, expects } = *request;
        let (service, origin) = (service as u16, Origin::Client(to));
        Self { service, mqueue: ANY, expects, origin, number, received_len: 0 }
    }

    /// The request, if its client has a key.
    pub(crate) fn awaited(&self) -> Option<Awaited> {
        let Origin::Client(to) = self.origin else { return None };
        Some(Awaited { to, number: self.number, expects: self.expects })
    }

    pub(crate) fn encode(&self) -> [u8; ENVELOPE_BYTES] {
        let mut bytes = [0; ENVELOPE_BYTES];
        bytes[1] = match self.expects {
            Expects::Reply => 0,
            Expects::Nothing => 1,
            Expects::ReplyOrNothing => 2,
        };
        bytes[2..4].copy_from_slice(&self.service.to_le_bytes());
        bytes[4..8].copy_from_slice(&self.mqueue.to_le_bytes());
        bytes[8..16].copy_from_slice(&self.number.to_le_bytes());
        bytes[60..64].copy_from_slice(&self.received_len.to_le_bytes());
        match self.origin {
            Origin::Datagram { port, peer, local } => {
                bytes[16..18].copy_from_slice(&port.to_le_bytes());
                put_ip(&mut bytes[18..35], Some(peer.ip()));
                bytes[36..38].copy_from_slice(&peer.port().to_le_bytes());
                if let SocketAddr::V6(peer) = peer {
                    bytes[38..42].copy_from_slice(&peer.scope_id().to_le_bytes());
                }
                put_ip(&mut bytes[42..59], local);
            }
            Origin::Client(ReplyTo { endpoint, worker, key, generation }) => {
                bytes[0] = match endpoint {
                    EndpointKind::Tcp => 1,
                    EndpointKind::Shm => 2,
                };
                bytes[16..18].copy_from_slice(&worker.to_le_bytes());
                bytes[20..24].copy_from_slice(&key.to_le_bytes());
                bytes[24..28].copy_from_slice(&generation.to_le_bytes());
            }
        }
        bytes
    }

    pub(crate) fn decode(bytes: &[u8; ENVELOPE_BYTES]) -> Self {
        let u16_at = |at: usize| u16::from_le_bytes([bytes[at], bytes[at + 1]]);
        let u32_at = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().expect("4"));
        let u64_at = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().expect("8"));
        let origin = match bytes[0] {
            0 => {
                let ip = take_ip(&bytes[18..35]).unwrap_or(IpAddr::V4(Ipv4Addr::UNSPECIFIED));
                let mut peer = SocketAddr::new(ip, u16_at(36));
                if let SocketAddr::V6(peer) = &mut peer {
                    peer.set_scope_id(u32_at(38));
                }
                let port: PortIndex = u16_at(16);
                Origin::Datagram { port, peer, local: take_ip(&bytes[42..59]) }
            }
            endpoint => Origin::Client(ReplyTo {
                endpoint: if endpoint == 1 { EndpointKind::Tcp } else { EndpointKind::Shm },
                worker: u16_at(16),
                key: u32_at(20),
                generation: u32_at(24),
            }),
        };
        let expects = match bytes[1] {
            0 => Expects::Reply,
            1 => Expects::Nothing,
            _ => Expects::ReplyOrNothing,
        };
        let (number, received_len) = (u64_at(8), u32_at(60));
        Self { service: u16_at(2), mqueue: u32_at(4), expects, origin, number, received_len }
    }
}

/// An address in 17 bytes: family (0 none, 4, 6), then the octets.
fn put_ip(bytes: &mut [u8], ip: Option<IpAddr>) {
    match ip {
        None => bytes[0] = 0,
        Some(IpAddr::V4(ip)) => {
            bytes[0] = 4;
            bytes[1..5].copy_from_slice(&ip.octets());
        }
        Some(IpAddr::V6(ip)) => {
            bytes[0] = 6;
            bytes[1..17].copy_from_slice(&ip.octets());
        }
    }
}

fn take_ip(bytes: &[u8]) -> Option<IpAddr> {
    match bytes[0] {
        4 => Some(Ipv4Addr::from(<[u8; 4]>::try_from(&bytes[1..5]).expect("4")).into()),
        6 => Some(Ipv6Addr::from(<[u8; 16]>::try_from(&bytes[1..17]).expect("16")).into()),
        _ => None,
    }
}

/// The receiving end of the link from another worker, for one service.
pub(crate) struct LinkIn {
    pub(crate) requests: Consumer<MappedMemory>,
    pub(crate) replies: Consumer<MappedMemory>,
    /// Time before which a long request that found no credit is not copied again.
    pub(crate) retry_ns: u64,
}

impl LinkIn {
    /// Whether messages seem to wait.
    pub(crate) fn is_hinted(&self) -> bool {
        self.requests.hinted() || self.replies.hinted()
    }

    /// Returns the slots of the messages that were taken.
    pub(crate) fn release(&mut self) {
        self.replies.release();
        self.requests.release();
    }
}

/// The sending end of the link to another worker, for one service.
pub(crate) struct LinkOut {
    requests: Producer<MappedMemory>,
    replies: Producer<MappedMemory>,
    /// Whether a message was committed and not yet published.
    unpublished: bool,
}

impl LinkOut {
    /// Whether every message that was handed over has been taken.
    fn is_empty(&mut self) -> bool {
        let taken = |ring: &mut Producer<MappedMemory>| {
            ring.credit().is_ok() && ring.released() == ring.committed()
        };
        taken(&mut self.requests) && taken(&mut self.replies)
    }

    /// Publishes the messages to the other worker; returns whether there were any.
    fn publish(&mut self) -> bool {
        self.requests.publish();
        self.replies.publish();
        std::mem::take(&mut self.unpublished)
    }
}

/// Number of losses that can wait for room before their list grows.
const PENDING_LOSSES: usize = 256;

/// The links from this worker to the others.
pub(crate) struct Outbound {
    /// By worker and service; none to itself.
    links: Vec<Vec<Option<LinkOut>>>,
    /// Workers and services of those with unpublished messages.
    unpublished: Vec<(u16, u16)>,
    /// Losses that found no room: the request, and the reason.
    losses: Vec<(u16, Envelope, DropReason)>,
    /// Buffer for an envelope and its payload.
    scratch: Vec<u8>,
}

impl Outbound {
    pub(crate) fn new(workers: usize, scratch_bytes: usize) -> Self {
        Self {
            links: (0..workers).map(|_| Vec::new()).collect(),
            unpublished: Vec::new(),
            losses: Vec::with_capacity(PENDING_LOSSES),
            scratch: Vec::with_capacity(scratch_bytes),
        }
    }

    /// Sets the maximum length of payloads.
    pub(crate) fn reserve(&mut self, scratch_bytes: usize) {
        self.scratch = Vec::with_capacity(scratch_bytes);
    }

    /// Sets or removes the links of one service to one worker.
    pub(crate) fn replace(
        &mut self,
        worker: usize,
        service: usize,
        link: Option<LinkOut>,
    ) -> Option<LinkOut> {
        let before = replace(&mut self.links[worker], service, link);
        let links: usize = self.links.iter().map(Vec::len).sum();
        self.unpublished.reserve(links.saturating_sub(self.unpublished.len()));
        before
    }

    /// Hands a request over. `Full` leaves everything unchanged.
    pub(crate) fn request(
        &mut self,
        worker: u16,
        envelope: &Envelope,
        received_ns: u64,
        payload: &[u8],
    ) -> Result<(), LoanError> {
        let head = Head { tag: received_ns, kind: abi::kind::MESSAGE, ..Head::default() };
        let mut scratch = std::mem::take(&mut self.scratch);
        let pushed = match link_of(&mut self.links, worker, envelope.service) {
            Some(link) => {
                let mut pushed = push(&mut link.requests, head, envelope, payload, &mut scratch);
                if mutants::on("hand_over_twice") && pushed.is_ok() {
                    pushed = push(&mut link.requests, head, envelope, payload, &mut scratch);
                }
                if pushed.is_ok() && !std::mem::replace(&mut link.unpublished, true) {
                    self.unpublished.push((worker, envelope.service));
                }
                pushed
            }
            None => Err(LoanError::Full),
        };
        self.scratch = scratch;
        pushed
    }

    /// Hands back a reply (`Ok`) or the reason of its loss (`Err`). `Full` leaves everything unchanged.
    pub(crate) fn reply(
        &mut self,
        worker: u16,
        envelope: &Envelope,
        outcome: Result<&[u8], DropReason>,
    ) -> Result<(), LoanError> {
        let (kind, status) = match outcome {
            Ok(_) => (abi::kind::MESSAGE, 0),
            Err(reason) => (abi::kind::DROP, reason.code()),
        };
        let head = Head { kind, status, ..Head::default() };
        let mut scratch = std::mem::take(&mut self.scratch);
        let pushed = match link_of(&mut self.links, worker, envelope.service) {
            Some(link) => {
                let payload = outcome.unwrap_or(&[]);
                let pushed = push(&mut link.replies, head, envelope, payload, &mut scratch);
                if pushed.is_ok() && !std::mem::replace(&mut link.unpublished, true) {
                    self.unpublished.push((worker, envelope.service));
                }
                pushed
            }
            None => Err(LoanError::Full),
        };
        self.scratch = scratch;
        pushed
    }

    /// A request of another worker's client was lost, and counted: that worker is notified, now or when there is
    /// room.
    pub(crate) fn report_loss(&mut self, worker: u16, envelope: Envelope, reason: DropReason) {
        if self.reply(worker, &envelope, Err(reason)).is_err() {
            self.losses.push((worker, envelope, reason));
        }
    }

    /// Reports the losses that found no room, as far as there is room now.
    pub(crate) fn retry_losses(&mut self) {
        let mut losses = std::mem::take(&mut self.losses);
        losses.retain(|(worker, envelope, reason)| {
            link_of(&mut self.links, *worker, envelope.service).is_some()
                && self.reply(*worker, envelope, Err(*reason)).is_err()
        });
        self.losses = losses;
    }

    /// Whether losses wait for room.
    pub(crate) fn has_losses(&self) -> bool {
        !self.losses.is_empty()
    }

    /// Whether a message of a service (or of any) has not reached its worker.
    pub(crate) fn has_unsent(&mut self, service: Option<u16>) -> bool {
        let of_it = |name: usize| service.is_none_or(|of| usize::from(of) == name);
        let waits = |(name, link): (usize, &mut Option<LinkOut>)| {
            of_it(name) && link.as_mut().is_some_and(|link| !link.is_empty())
        };
        self.losses.iter().any(|(_, envelope, _)| of_it(envelope.service.into()))
            || self.links.iter_mut().any(|links| links.iter_mut().enumerate().any(waits))
    }

    /// Publishes the messages for the other workers.
    #[inline]
    pub(crate) fn publish(&mut self, wake: impl Fn(u16)) {
        for (worker, service) in self.unpublished.drain(..) {
            if link_of(&mut self.links, worker, service).is_some_and(LinkOut::publish) {
                wake(worker);
            }
        }
    }
}

fn link_of(links: &mut [Vec<Option<LinkOut>>], worker: u16, service: u16) -> Option<&mut LinkOut> {
    links[usize::from(worker)].get_mut(usize::from(service))?.as_mut()
}

/// Sets a link and returns the previous one.
pub(crate) fn replace<T>(links: &mut Vec<Option<T>>, at: usize, link: Option<T>) -> Option<T> {
    while links.len() <= at {
        links.push(None);
    }
    std::mem::replace(&mut links[at], link)
}

fn push(
    ring: &mut Producer<MappedMemory>,
    head: Head,
    envelope: &Envelope,
    payload: &[u8],
    scratch: &mut Vec<u8>,
) -> Result<(), LoanError> {
    scratch.clear();
    scratch.extend_from_slice(&envelope.encode());
    scratch.extend_from_slice(payload);
    ring.push(head, scratch)
}

/// One worker's links to every worker for one service; none to itself.
pub(crate) struct ServiceLinks(pub(crate) Vec<Option<(LinkIn, LinkOut)>>);

/// Connects `workers` workers for one service; one element per worker. Nothing of a proxy is handed over.
pub(crate) fn links(workers: usize, service: &Service) -> Vec<ServiceLinks> {
    // Requests from a to b, and b's replies to them, have a region of their own.
    let mut near = BTreeMap::new();
    let mut far = BTreeMap::new();
    for (a, b) in pairs(if service.upstream.is_some() { 0 } else { workers }) {
        let (from_a, at_b) = region(service);
        near.insert((a, b), from_a);
        far.insert((b, a), at_b);
    }
    let mut link = |a, b| {
        let (requests_out, replies_in) = near.remove(&(a, b))?;
        let (requests_in, replies_out) = far.remove(&(a, b))?;
        Some((
            LinkIn { requests: requests_in, replies: replies_in, retry_ns: 0 },
            LinkOut { requests: requests_out, replies: replies_out, unpublished: false },
        ))
    };
    (0..workers).map(|a| ServiceLinks((0..workers).map(|b| link(a, b)).collect())).collect()
}

/// The requesting worker's ends of one direction: it produces requests and consumes replies.
type Near = (Producer<MappedMemory>, Consumer<MappedMemory>);
/// The answering worker's ends.
type Far = (Consumer<MappedMemory>, Producer<MappedMemory>);

/// One direction of a service's requests.
fn region(service: &Service) -> (Near, Far) {
    // A payload near the ABI's maximum has no room for an envelope: where the route is remote, such a
    // request is dropped as too long.
    let ring = |payload: u32| {
        let longest = payload as usize + ENVELOPE_BYTES;
        RingPlan::doorbell(longest.min(abi::MESSAGE_BYTES_MAX as usize) as u32, 0)
    };
    let mqueue = MqueuePlan {
        depth: DEPTH,
        rx: ring(service.max_message_bytes),
        tx: ring(service.max_reply_bytes),
    };
    let plan = RegionPlan::of_blocks(1, &[mqueue], 1);
    let bytes = plan.bytes().expect("a plan within limits") as usize;
    let memory = HeapMapping::memory(bytes);
    let mut near = Region::format(memory.clone(), &plan).expect("memory of the planned size");
    let mut far = Region::join(memory).expect("just formatted");
    (near.engine_ends(0), far.accelerator_ends(0))
}

fn pairs(workers: usize) -> impl Iterator<Item = (usize, usize)> {
    (0..workers).flat_map(move |a| (0..workers).filter(move |b| *b != a).map(move |b| (a, b)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn envelopes_round_trip() {
        let peers = ["127.0.0.1:80", "[::1]:65535", "[fe80::1%7]:9"];
        let locals = [None, Some("10.1.2.3".parse().unwrap()), Some("::2".parse().unwrap())];
        let client = |endpoint, worker, key, generation| {
            Origin::Client(ReplyTo { endpoint, worker, key, generation })
        };
        let mut origins = vec![client(EndpointKind::Tcp, 3, 77, u32::MAX)];
        origins.push(client(EndpointKind::Shm, 65_535, 5, 1));
        for peer in peers {
            for local in locals {
                origins.push(Origin::Datagram { port: 513, peer: peer.parse().unwrap(), local });
            }
        }
        for origin in origins {
            for expects in [Expects::Reply, Expects::Nothing, Expects::ReplyOrNothing] {
                let number = u64::MAX - 1;
                let envelope = Envelope {
                    service: 259,
                    mqueue: ANY,
                    expects,
                    origin,
                    number,
                    received_len: 70_000,
                };
                assert_eq!(Envelope::decode(&envelope.encode()), envelope);
            }
        }
    }
}
