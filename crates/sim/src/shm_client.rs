//! Model clients of shared-memory ports: each has a region of its own, sends requests through one ring,
//! reads outcomes from the other, and may overwrite any word of it.
//!
//! The promises to a correct client, checked as outcomes arrive:
//!
//! * every request that the engine took has exactly one outcome: the one correct reply, or the reason
//!   why there is none (unless a drain ends before everything is answered: the end of the connection then
//!   covers requests at another worker);
//! * its connection lasts until it leaves, a change disconnects it or the engine ends;
//! * it may leave its outcomes unread as long as it likes: none is lost because of that.
//!
//! A client that scribbles has no promises; its actions must not affect others.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use engine::topology::{Replies, Service};
use engine::{ControlMessage, Fabric, ShmClient, ShmPeer};
use mqueue::abi::kind;
use mqueue::memory::Ordering as Order;
use mqueue::{Consumer, Head, HeapMapping, MappedMemory, Memory, Producer, Region};
use wire::DropReason;
use wire::framing::Framing;

use crate::client::RequestMix;
use crate::fault::Fault;
use crate::message::{Body, Flavor, decode_reply, request_payload};
use crate::net::Network;
use crate::nic::Message;
use crate::rng::Rng;

/// Behaviour of a client.
#[derive(Clone, Copy, Debug)]
pub struct ShmBehaviour {
    /// Number of slots it requests.
    pub depth: u32,
    /// Maximum number of requests published at once.
    pub burst: u32,
    /// Shortest and longest time between two steps.
    pub pause_ns: (u64, u64),
    /// Reads no outcomes under load.
    pub deaf: bool,
    /// Rate per mille of the steps in which it leaves.
    pub leave: u32,
    /// Rate per mille of the steps in which it writes a slot of an unknown kind.
    pub bad_kind: u32,
    /// Overwrites words of its region from this request on.
    pub scribble_after: Option<u32>,
}

/// A request without an outcome.
#[derive(Debug)]
struct Open {
    body: Body,
    /// Its number in the ring.
    number: u64,
}

/// A client's connection.
struct Connection {
    /// Its number among the clients of the run.
    id: u32,
    worker: u16,
    requests: Producer<MappedMemory>,
    replies: Consumer<MappedMemory>,
    memory: MappedMemory,
    bytes: u64,
    /// The worker has released it.
    closed: Arc<AtomicBool>,
    left: u32,
    sequence: u32,
    open: BTreeMap<u64, Open>,
    /// It has written invalid data.
    hostile: bool,
    /// Slots of each ring.
    depth: u32,
}

/// The engine's handle to a client.
struct Peer(Arc<AtomicBool>);

impl ShmPeer for Peer {
    /// Clients poll by themselves.
    fn wake(&self) {}
}

impl Drop for Peer {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// A client over shared memory. See the module's text.
pub struct ModelShmClient {
    /// The service it talks to.
    pub service: usize,
    /// Its request mix.
    pub request_mix: RequestMix,
    /// Its behaviour.
    pub behaviour: ShmBehaviour,
    /// Whether the service replies.
    pub replies: bool,
    /// Whether the content of replies is checked.
    pub judged: bool,
    /// Connections still to open.
    pub connections: u32,
    /// Requests per connection.
    pub requests: u32,
    /// Time of its next action.
    pub next_ns: u64,
    /// Its randomness.
    pub rng: Rng,
    /// First count of its rings.
    pub ring_start: u64,
    /// Correct replies received.
    pub received: u64,
    hushed: bool,
    connection: Option<Connection>,
}

impl std::fmt::Debug for ModelShmClient {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { service, request_mix, behaviour, connections, requests, .. } = self;
        write!(
            f,
            "ModelShmClient {{ {service} {request_mix:?} {behaviour:?} {connections} x {requests} }}"
        )
    }
}

impl ModelShmClient {
    /// A client that has not connected yet.
    pub fn new(service: usize, request_mix: RequestMix, behaviour: ShmBehaviour, rng: Rng) -> Self {
        Self {
            service,
            request_mix,
            behaviour,
            replies: true,
            judged: true,
            connections: 1,
            requests: 10,
            next_ns: 0,
            rng,
            ring_start: 0,
            received: 0,
            hushed: false,
            connection: None,
        }
    }

    /// Time of the client's next action.
    pub fn due_ns(&self) -> u64 {
        if self.connection.is_some() || self.connections > 0 { self.next_ns } else { u64::MAX }
    }

    /// Stops requests and faults; from now on outcomes are read.
    pub fn stop_requests(&mut self) {
        self.connections = 0;
        self.hushed = true;
        if let Some(connection) = &mut self.connection {
            connection.left = 0;
        }
    }

    /// Outstanding outcomes: of all requests, or of those the engine took.
    pub fn owed(&mut self, taken_only: bool) -> usize {
        let replies = self.replies;
        let connection =
            self.connection.as_mut().filter(|connection| replies && !connection.hostile);
        let Some(connection) = connection else { return 0 };
        let taken = match connection.requests.credit() {
            Ok(_) if taken_only => connection.requests.released(),
            _ => u64::MAX,
        };
        connection.open.values().filter(|open| open.number < taken).count()
    }

    /// Acts if it is time.
    pub fn step(
        &mut self,
        net: &mut Network,
        reachability: (&Fabric<Message>, &Service, u32, Option<u16>),
        next_id: &mut u32,
    ) {
        if self.next_ns > net.now_ns() || self.due_ns() == u64::MAX {
            return;
        }
        let (low, high) = self.behaviour.pause_ns;
        self.next_ns = net.now_ns() + self.rng.between(low, high);
        let Some(mut connection) = self.connection.take() else {
            return self.connect(net, reachability, next_id);
        };
        if connection.closed.load(Ordering::Relaxed) {
            return self.part(net, &mut connection);
        }
        if self.hushed || !self.behaviour.deaf {
            self.read(net, &mut connection);
        }
        self.ask(net, &mut connection);
        if self.hushed || self.misbehave(net, &mut connection, reachability.0) {
            self.connection = Some(connection);
        }
    }

    fn connect(
        &mut self,
        net: &mut Network,
        (fabric, spec, limit, slot): (&Fabric<Message>, &Service, u32, Option<u16>),
        next_id: &mut u32,
    ) {
        let Some(slot) = slot else { return };
        self.connections -= 1;
        if net.ending || fabric.connections() >= limit as usize {
            return;
        }
        let id = *next_id;
        *next_id += 1;
        net.memory_clients.insert(id, self.service);
        let plan = spec.client_region_plan(self.behaviour.depth);
        let plan = plan.starting_at(self.ring_start);
        let bytes = plan.bytes().expect("a region of a client is small");
        let memory = HeapMapping::memory(bytes as usize);
        let mut near = Region::format(memory.clone(), &plan).expect("memory of the planned size");
        let (replies, requests) = near.engine_ends(0);
        let mut far = Region::join(memory.clone()).expect("just formatted");
        let (own_replies, own_requests) = far.accelerator_ends(0);
        let closed = Arc::new(AtomicBool::new(false));
        let worker = fabric.assign_shm_client();
        net.trace.note(net.now_ns(), "map", &[id.into(), self.service as u64, worker.into()]);
        let client = ShmClient {
            id: id.into(),
            service: slot,
            depth: plan.rings[0].depth,
            replies,
            requests,
            words: near.words(),
            peer: Box::new(Peer(closed.clone())),
        };
        fabric.post(worker, ControlMessage::ShmAttached(Box::new(client)));
        if self.behaviour.deaf {
            net.fault_counts.one(Fault::MemoryDeaf);
        }
        self.connection = Some(Connection {
            id,
            worker,
            requests: own_requests,
            replies: own_replies,
            memory,
            bytes,
            closed,
            left: self.requests,
            sequence: 0,
            open: BTreeMap::new(),
            hostile: false,
            depth: plan.rings[0].depth,
        });
    }

    fn ask(&mut self, net: &mut Network, connection: &mut Connection) {
        let burst = self.rng.below(u64::from(self.behaviour.burst) + 1).min(connection.left.into());
        // Requests of one length can go as bundles.
        let is_alike = self.rng.chance(500);
        let mut alike = None;
        for _ in 0..burst {
            let (mut body, _) =
                self.request_mix.request(&mut self.rng, connection.id, connection.sequence);
            if is_alike {
                (body.filler, body.want) = *alike.get_or_insert((body.filler, body.want));
            }
            let payload = request_payload(self.request_mix.framing, &body, Flavor::Plain);
            let tag = u64::from(connection.sequence) << 8 | 7;
            let head = Head { token: 0, tag, kind: kind::MESSAGE, status: 0 };
            let number = connection.requests.committed();
            if connection.requests.push(head, &payload).is_err() {
                // Full, or corrupted by itself.
                break;
            }
            connection.left -= 1;
            connection.sequence += 1;
            net.ledger.ask(self.service, body, None);
            connection.open.insert(tag, Open { body, number });
        }
        connection.requests.publish();
        if connection.sequence > 0 {
            net.trace.note(
                net.now_ns(),
                "put",
                &[connection.id.into(), connection.sequence.into()],
            );
        }
    }

    /// Reads the available outcomes.
    fn read(&mut self, net: &mut Network, connection: &mut Connection) {
        while let Ok(Some(header)) = connection.replies.peek() {
            let mut payload = vec![0; header.len as usize];
            if !connection.replies.copy_out(&header, &mut payload) {
                break;
            }
            connection.replies.advance();
            connection.replies.release();
            if connection.hostile {
                continue;
            }
            net.trace.note(net.now_ns(), "got", &[connection.id.into(), header.tag]);
            let outcome = match header.kind {
                kind::MESSAGE => Ok(&payload[..]),
                _ => Err(header.status),
            };
            if let Err(wrong) = self.settle(connection, header.tag, outcome) {
                let (id, service) = (connection.id, self.service);
                net.ledger.violate(|| format!("memory client {id} of service {service}: {wrong}"));
            }
        }
    }

    fn settle(
        &mut self,
        connection: &mut Connection,
        tag: u64,
        outcome: Result<&[u8], u8>,
    ) -> Result<(), String> {
        let open = connection.open.remove(&tag);
        let open =
            open.filter(|_| self.replies).ok_or_else(|| format!("nothing is owed to {tag}"))?;
        let reply = match outcome {
            Ok(reply) => reply,
            Err(status) => {
                let known = DropReason::from_code(status);
                return known.map(|_| ()).ok_or_else(|| format!("{status} is no reason"));
            }
        };
        self.received += 1;
        let (found, right) = match self.request_mix.framing {
            Framing::Raw => (Body::of_request(reply), open.body),
            framing => (decode_reply(framing, reply), open.body.reply()),
        };
        match found == Some(right) || !self.judged {
            true => Ok(()),
            false => Err(format!("{found:?} answers {:?}", open.body)),
        }
    }

    /// Outside a change, all clients that a change disconnected have gone.
    pub(crate) fn check_sent_away(&self, net: &mut Network) {
        let Some(connection) = &self.connection else { return };
        let gone =
            !net.sent_away.contains(&connection.id) || connection.closed.load(Ordering::Relaxed);
        net.ledger
            .must(gone, || format!("memory client {} stays after its port went", connection.id));
    }

    /// The engine released it.
    fn part(&mut self, net: &mut Network, connection: &mut Connection) {
        net.memory_clients.remove(&connection.id);
        if connection.hostile {
            return;
        }
        let before = connection.open.len();
        self.read(net, connection);
        let read = before - connection.open.len();
        let (ending, cut_off) = (net.ending || net.sent_away.contains(&connection.id), net.cut_off);
        let (id, owed) = (connection.id, connection.open.len());
        net.ledger.must(ending, || format!("memory client {id} was closed without a reason"));
        // Requests that were not taken have no outcome.
        let taken = connection.requests.credit().map_or(0, |_| connection.requests.released());
        let lost = connection.open.values().filter(|open| open.number < taken).count();
        // Requests that were not taken had no room for their outcomes.
        let full = read == connection.depth as usize;
        net.ledger.must(owed == lost || full || cut_off || !self.replies, || {
            format!(
                "memory client {id} ends with {owed} requests open, {read} were read at the end"
            )
        });
        net.ledger.must(lost == 0 || cut_off || !self.replies, || {
            format!("memory client {id} ends with {owed} requests open, {lost} of them taken")
        });
    }

    /// Misbehaves; false if it is gone afterwards.
    fn misbehave(
        &mut self,
        net: &mut Network,
        connection: &mut Connection,
        fabric: &Fabric<Message>,
    ) -> bool {
        if net.fault_counts.occurs(&mut self.rng, Fault::MemoryLeave, self.behaviour.leave) {
            fabric.post(connection.worker, ControlMessage::ShmGone(connection.id.into()));
            net.memory_clients.remove(&connection.id);
            return false;
        }
        if net.fault_counts.occurs(&mut self.rng, Fault::MemoryKind, self.behaviour.bad_kind) {
            self.turn_hostile(net, connection);
            let kind = self.rng.pick(&[0, 2, 9, 255]);
            let head = Head { token: self.rng.draw(), tag: self.rng.draw(), kind, status: 0 };
            // Without room it has not written anything invalid yet, but it may.
            let _ = connection.requests.push(head, b"nonsense");
            connection.requests.publish();
        }
        if self.behaviour.scribble_after.is_some_and(|after| connection.sequence > after) {
            self.turn_hostile(net, connection);
            net.fault_counts.one(Fault::MemoryScribble);
            for _ in 0..self.rng.below(6) {
                let at = 8 * self.rng.below(connection.bytes / 8);
                let old = connection.memory.load(at, Order::Relaxed);
                let new = match self.rng.below(3) {
                    0 => self.rng.draw(),
                    1 => old.wrapping_add(self.rng.between(1, 3)),
                    _ => old ^ 1 << self.rng.below(64),
                };
                connection.memory.store(at, new, Order::Relaxed);
            }
        }
        true
    }

    fn turn_hostile(&self, net: &mut Network, connection: &mut Connection) {
        connection.hostile = true;
        net.ledger.outlaw(self.service, connection.id);
    }

    /// Whether the engine has released it, or it has left.
    pub fn is_gone(&self) -> bool {
        self.connection.as_ref().is_none_or(|connection| connection.closed.load(Ordering::Relaxed))
    }

    /// The client's process ends.
    pub fn leave(&mut self, fabric: &Fabric<Message>) {
        self.connections = 0;
        if let Some(connection) = self.connection.take() {
            fabric.post(connection.worker, ControlMessage::ShmGone(connection.id.into()));
        }
    }

    /// Sets whether the service replies.
    pub fn of_service(mut self, spec: &Service) -> Self {
        self.replies = spec.replies == Replies::One;
        self
    }
}
