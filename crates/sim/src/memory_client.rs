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

use crate::client::Taste;
use crate::fault::Fault;
use crate::message::{Body, Flavor, decode_reply, request_payload};
use crate::net::Network;
use crate::rng::Rng;
use crate::world::Message;

/// Behaviour of a client.
#[derive(Clone, Copy, Debug)]
pub struct MemoryManner {
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
struct Life {
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
    pub taste: Taste,
    /// Its behaviour.
    pub manner: MemoryManner,
    /// Whether the service replies.
    pub replies: bool,
    /// Whether the content of replies is checked.
    pub judged: bool,
    /// Connections still to open.
    pub lives: u32,
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
    life: Option<Life>,
}

impl std::fmt::Debug for ModelShmClient {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { service, taste, manner, lives, requests, .. } = self;
        write!(f, "ModelShmClient {{ {service} {taste:?} {manner:?} {lives} x {requests} }}")
    }
}

impl ModelShmClient {
    /// A client that has not connected yet.
    pub fn new(service: usize, taste: Taste, manner: MemoryManner, rng: Rng) -> Self {
        Self {
            service,
            taste,
            manner,
            replies: true,
            judged: true,
            lives: 1,
            requests: 10,
            next_ns: 0,
            rng,
            ring_start: 0,
            received: 0,
            hushed: false,
            life: None,
        }
    }

    /// Time of the client's next action.
    pub fn due_ns(&self) -> u64 {
        if self.life.is_some() || self.lives > 0 { self.next_ns } else { u64::MAX }
    }

    /// Stops requests and faults; from now on outcomes are read.
    pub fn hush(&mut self) {
        self.lives = 0;
        self.hushed = true;
        if let Some(life) = &mut self.life {
            life.left = 0;
        }
    }

    /// Outstanding outcomes: of all requests, or of those the engine took.
    pub fn owed(&mut self, taken_only: bool) -> usize {
        let replies = self.replies;
        let life = self.life.as_mut().filter(|life| replies && !life.hostile);
        let Some(life) = life else { return 0 };
        let taken = match life.requests.credit() {
            Ok(_) if taken_only => life.requests.released(),
            _ => u64::MAX,
        };
        life.open.values().filter(|open| open.number < taken).count()
    }

    /// Acts if it is time.
    pub fn step(
        &mut self,
        net: &mut Network,
        door: (&Fabric<Message>, &Service, u32, Option<u16>),
        next_id: &mut u32,
    ) {
        if self.next_ns > net.now_ns() || self.due_ns() == u64::MAX {
            return;
        }
        let (low, high) = self.manner.pause_ns;
        self.next_ns = net.now_ns() + self.rng.between(low, high);
        let Some(mut life) = self.life.take() else {
            return self.connect(net, door, next_id);
        };
        if life.closed.load(Ordering::Relaxed) {
            return self.part(net, &mut life);
        }
        if self.hushed || !self.manner.deaf {
            self.read(net, &mut life);
        }
        self.ask(net, &mut life);
        if self.hushed || self.misbehave(net, &mut life, door.0) {
            self.life = Some(life);
        }
    }

    fn connect(
        &mut self,
        net: &mut Network,
        (fabric, spec, limit, slot): (&Fabric<Message>, &Service, u32, Option<u16>),
        next_id: &mut u32,
    ) {
        let Some(slot) = slot else { return };
        self.lives -= 1;
        if net.ending || fabric.connections() >= limit as usize {
            return;
        }
        let id = *next_id;
        *next_id += 1;
        net.memory_clients.insert(id, self.service);
        let plan = spec.client_region_plan(self.manner.depth);
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
        if self.manner.deaf {
            net.struck.one(Fault::MemoryDeaf);
        }
        self.life = Some(Life {
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

    fn ask(&mut self, net: &mut Network, life: &mut Life) {
        let burst = self.rng.below(u64::from(self.manner.burst) + 1).min(life.left.into());
        for _ in 0..burst {
            let (body, _) = self.taste.request(&mut self.rng, life.id, life.sequence);
            let payload = request_payload(self.taste.framing, &body, Flavor::Plain);
            let tag = u64::from(life.sequence) << 8 | 7;
            let head = Head { token: 0, tag, kind: kind::MESSAGE, status: 0 };
            let number = life.requests.committed();
            if life.requests.push(head, &payload).is_err() {
                // Full, or corrupted by itself.
                break;
            }
            life.left -= 1;
            life.sequence += 1;
            net.ledger.ask(self.service, body, None);
            life.open.insert(tag, Open { body, number });
        }
        life.requests.publish();
        if life.sequence > 0 {
            net.trace.note(net.now_ns(), "put", &[life.id.into(), life.sequence.into()]);
        }
    }

    /// Reads the available outcomes.
    fn read(&mut self, net: &mut Network, life: &mut Life) {
        while let Ok(Some(header)) = life.replies.peek() {
            let mut payload = vec![0; header.len as usize];
            if !life.replies.copy_out(&header, &mut payload) {
                break;
            }
            life.replies.advance();
            life.replies.release();
            if life.hostile {
                continue;
            }
            net.trace.note(net.now_ns(), "got", &[life.id.into(), header.tag]);
            let outcome = match header.kind {
                kind::MESSAGE => Ok(&payload[..]),
                _ => Err(header.status),
            };
            if let Err(wrong) = self.settle(life, header.tag, outcome) {
                let (id, service) = (life.id, self.service);
                net.ledger.violate(|| format!("memory client {id} of service {service}: {wrong}"));
            }
        }
    }

    fn settle(
        &mut self,
        life: &mut Life,
        tag: u64,
        outcome: Result<&[u8], u8>,
    ) -> Result<(), String> {
        let open = life.open.remove(&tag);
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
        let (found, right) = match self.taste.framing {
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
        let Some(life) = &self.life else { return };
        let gone = !net.sent_away.contains(&life.id) || life.closed.load(Ordering::Relaxed);
        net.ledger.must(gone, || format!("memory client {} stays after its port went", life.id));
    }

    /// The engine released it.
    fn part(&mut self, net: &mut Network, life: &mut Life) {
        net.memory_clients.remove(&life.id);
        if life.hostile {
            return;
        }
        let before = life.open.len();
        self.read(net, life);
        let read = before - life.open.len();
        let (ending, cut_off) = (net.ending || net.sent_away.contains(&life.id), net.cut_off);
        let (id, owed) = (life.id, life.open.len());
        net.ledger.must(ending, || format!("memory client {id} was closed without a reason"));
        // Requests that were not taken have no outcome.
        let taken = life.requests.credit().map_or(0, |_| life.requests.released());
        let lost = life.open.values().filter(|open| open.number < taken).count();
        // Requests that were not taken had no room for their outcomes.
        let full = read == life.depth as usize;
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
    fn misbehave(&mut self, net: &mut Network, life: &mut Life, fabric: &Fabric<Message>) -> bool {
        if net.struck.strikes(&mut self.rng, Fault::MemoryLeave, self.manner.leave) {
            fabric.post(life.worker, ControlMessage::ShmGone(life.id.into()));
            net.memory_clients.remove(&life.id);
            return false;
        }
        if net.struck.strikes(&mut self.rng, Fault::MemoryKind, self.manner.bad_kind) {
            self.turn_hostile(net, life);
            let kind = self.rng.pick(&[0, 2, 9, 255]);
            let head = Head { token: self.rng.draw(), tag: self.rng.draw(), kind, status: 0 };
            // Without room it has not written anything invalid yet, but it may.
            let _ = life.requests.push(head, b"nonsense");
            life.requests.publish();
        }
        if self.manner.scribble_after.is_some_and(|after| life.sequence > after) {
            self.turn_hostile(net, life);
            net.struck.one(Fault::MemoryScribble);
            for _ in 0..self.rng.below(6) {
                let at = 8 * self.rng.below(life.bytes / 8);
                let old = life.memory.load(at, Order::Relaxed);
                let new = match self.rng.below(3) {
                    0 => self.rng.draw(),
                    1 => old.wrapping_add(self.rng.between(1, 3)),
                    _ => old ^ 1 << self.rng.below(64),
                };
                life.memory.store(at, new, Order::Relaxed);
            }
        }
        true
    }

    fn turn_hostile(&self, net: &mut Network, life: &mut Life) {
        life.hostile = true;
        net.ledger.outlaw(self.service, life.id);
    }

    /// Whether the engine has released it, or it has left.
    pub fn is_gone(&self) -> bool {
        self.life.as_ref().is_none_or(|life| life.closed.load(Ordering::Relaxed))
    }

    /// The client's process ends.
    pub fn leave(&mut self, fabric: &Fabric<Message>) {
        self.lives = 0;
        if let Some(life) = self.life.take() {
            fabric.post(life.worker, ControlMessage::ShmGone(life.id.into()));
        }
    }

    /// Sets whether the service replies.
    pub fn of_service(mut self, spec: &Service) -> Self {
        self.replies = spec.replies == Replies::One;
        self
    }
}
