//! Hand-over: requests and replies that cross from one worker to another.
//!
//! Every pair of workers is joined by two small regions of private memory for each service, one for
//! each direction of requests; the rings and their ordering edges are those of [`mqueue`], used worker to worker (edge
//! HANDOVER). A region's RX ring carries requests from worker A to worker B, its TX ring carries B's
//! replies to them back to A. Requests and replies have rings of their own because a request may have
//! to wait at the head of its ring for credit, while a reply can always be taken: if they shared one,
//! two workers could wait for each other for ever. Services have rings of their own for the same
//! reason: a request that waits for a service whose accelerator is stuck would hold up everybody's.
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
use wire::session::Origin;

use crate::topology::Service;

/// Slots of a hand-over ring.
const DEPTH: u32 = 256;
/// Bytes in front of the payload.
pub(crate) const ENVELOPE_BYTES: usize = 64;
/// "Any mqueue of the service": the target of a request that is bound to none.
pub(crate) const ANY: u32 = u32::MAX;

/// What travels beside the payload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Envelope {
    pub(crate) service: u16,
    /// The mqueue (number at the receiver), or [`ANY`].
    pub(crate) mqueue: u32,
    pub(crate) expects: Expects,
    pub(crate) origin: Origin,
    /// See [`wire::session::Request::number`].
    pub(crate) number: u64,
}

impl Envelope {
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
            Origin::Stream { worker, key, generation } => {
                bytes[0] = 1;
                bytes[16..18].copy_from_slice(&worker.to_le_bytes());
                bytes[20..24].copy_from_slice(&key.to_le_bytes());
                bytes[24..28].copy_from_slice(&generation.to_le_bytes());
            }
            Origin::Memory { worker, client, generation } => {
                bytes[0] = 2;
                bytes[16..18].copy_from_slice(&worker.to_le_bytes());
                bytes[20..24].copy_from_slice(&client.to_le_bytes());
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
            1 => Origin::Stream { worker: u16_at(16), key: u32_at(20), generation: u32_at(24) },
            _ => Origin::Memory { worker: u16_at(16), client: u32_at(20), generation: u32_at(24) },
        };
        let expects = match bytes[1] {
            0 => Expects::Reply,
            1 => Expects::Nothing,
            _ => Expects::ReplyOrNothing,
        };
        let number = u64_at(8);
        Self { service: u16_at(2), mqueue: u32_at(4), expects, origin, number }
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

/// One worker's ends of the rings it shares with another worker for one service.
pub(crate) struct Link {
    pub(crate) requests_out: Producer<MappedMemory>,
    pub(crate) requests_in: Consumer<MappedMemory>,
    pub(crate) replies_out: Producer<MappedMemory>,
    pub(crate) replies_in: Consumer<MappedMemory>,
    /// Something was committed and not yet published.
    unpublished: bool,
    /// A long request that found no credit is not copied again before this.
    pub(crate) retry_ns: u64,
}

impl Link {
    /// Hands a request over. `Full` leaves everything as it was.
    pub(crate) fn request(
        &mut self,
        envelope: &Envelope,
        received_ns: u64,
        payload: &[u8],
        scratch: &mut Vec<u8>,
    ) -> Result<(), LoanError> {
        let head = Head { tag: received_ns, kind: abi::kind::MESSAGE, ..Head::default() };
        push(&mut self.requests_out, head, envelope, payload, scratch)?;
        if mutants::on("hand_over_twice") {
            push(&mut self.requests_out, head, envelope, payload, scratch)?;
        }
        self.unpublished = true;
        Ok(())
    }

    /// Hands a reply (`Ok`) or the news that there will be none (`Err`) back.
    pub(crate) fn reply(
        &mut self,
        envelope: &Envelope,
        outcome: Result<&[u8], DropReason>,
        scratch: &mut Vec<u8>,
    ) -> Result<(), LoanError> {
        let (kind, status) = match outcome {
            Ok(_) => (abi::kind::MESSAGE, 0),
            Err(reason) => (abi::kind::DROP, reason.code()),
        };
        let head = Head { kind, status, ..Head::default() };
        push(&mut self.replies_out, head, envelope, outcome.unwrap_or(&[]), scratch)?;
        self.unpublished = true;
        Ok(())
    }

    /// Whether everything that was handed over, either way, has been taken.
    pub(crate) fn is_empty(&mut self) -> bool {
        let taken = |ring: &mut Producer<MappedMemory>| {
            ring.credit().is_ok() && ring.released() == ring.committed()
        };
        taken(&mut self.requests_out)
            && taken(&mut self.replies_out)
            && !self.requests_in.hinted()
            && !self.replies_in.hinted()
    }

    /// Shows the other worker what was handed over; whether there was anything.
    pub(crate) fn publish(&mut self) -> bool {
        self.requests_out.publish();
        self.replies_out.publish();
        std::mem::take(&mut self.unpublished)
    }
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
pub(crate) struct ServiceLinks(pub(crate) Vec<Option<Link>>);

/// Joins `workers` workers for one service; one element per worker.
pub(crate) fn links(workers: usize, service: &Service) -> Vec<ServiceLinks> {
    // Requests from a to b, and b's replies to them, have a region of their own.
    let mut near = BTreeMap::new();
    let mut far = BTreeMap::new();
    for (a, b) in pairs(workers) {
        let (from_a, at_b) = region(service);
        near.insert((a, b), from_a);
        far.insert((b, a), at_b);
    }
    let mut link = |a, b| {
        let (requests_out, replies_in) = near.remove(&(a, b))?;
        let (requests_in, replies_out) = far.remove(&(a, b))?;
        Some(Link {
            requests_out,
            requests_in,
            replies_out,
            replies_in,
            unpublished: false,
            retry_ns: 0,
        })
    };
    (0..workers).map(|a| ServiceLinks((0..workers).map(|b| link(a, b)).collect())).collect()
}

/// The asking worker's ends of one direction: it produces requests and consumes replies.
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
    fn envelopes_survive() {
        let peers = ["127.0.0.1:80", "[::1]:65535", "[fe80::1%7]:9"];
        let locals = [None, Some("10.1.2.3".parse().unwrap()), Some("::2".parse().unwrap())];
        let mut origins = vec![Origin::Stream { worker: 3, key: 77, generation: u32::MAX }];
        origins.push(Origin::Memory { worker: 65_535, client: 5, generation: 1 });
        for peer in peers {
            for local in locals {
                origins.push(Origin::Datagram { port: 513, peer: peer.parse().unwrap(), local });
            }
        }
        for origin in origins {
            for expects in [Expects::Reply, Expects::Nothing, Expects::ReplyOrNothing] {
                let number = u64::MAX - 1;
                let envelope = Envelope { service: 259, mqueue: ANY, expects, origin, number };
                assert_eq!(Envelope::decode(&envelope.encode()), envelope);
            }
        }
    }
}
