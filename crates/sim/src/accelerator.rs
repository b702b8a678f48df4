//! The model accelerator: blocks that read real rings and answer, correctly or not.
//!
//! A [`Model`] holds the accelerator's ends of the mqueues of one worker's blocks in one region. It
//! runs inside [`Blocks::drive`] (blocks on the worker's core; only those whose mqueue was signalled or whose
//! deadline has passed, so that a missing signal is detected) or, as a *remote* accelerator, between the turns.
//! Its [`Behaviour`] determines how long answers take and which faults occur.

mod misbehaviour;

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use engine::accelerator::{Blocks, StartError};
use engine::topology::Replies;
use mqueue::abi::{self, PoolEntry, RingEntry, kind, status};
use mqueue::{Consumer, Head, MappedMemory, Producer, Words};
use wire::framing::Framing;

use crate::behaviour::Behaviour;
use crate::bundle_block::OpenBundles;
use crate::fault::Fault;
use crate::message::{
    Ask, Body, Flavor, answer_filler_max, decode_request, is_answer_to, request_payload,
};
use crate::net::SharedNetwork;
use crate::rng::Rng;
use crate::shared::lock;
use crate::socket_block::{SocketBlock, SocketShare};
use crate::transfers::{Commands, Disk, Piece};

/// The properties of the service that the model needs.
#[derive(Clone, Debug)]
pub struct Role {
    /// The service's index.
    pub service: usize,
    /// The accelerator's index in the service.
    pub accelerator: usize,
    /// Global number of the region's first block.
    pub first_mqueue: u32,
    /// Framing of the service.
    pub framing: Framing,
    /// Whether it replies.
    pub replies: Replies,
    /// Its backends.
    pub backends: Vec<BackendRole>,
    /// Its sockets: whether each listens.
    pub sockets: Vec<bool>,
}

/// A backend as its kernel knows it.
#[derive(Clone, Debug)]
pub struct BackendRole {
    /// How messages to it are delimited.
    pub framing: Framing,
    /// The longest message to or from it.
    pub max_message_bytes: usize,
    /// Whether kernels get only correct answers: it gives no others, or the engine filters them.
    pub honest: bool,
    /// It does transfers, and is no server.
    pub(crate) disk: Option<Disk>,
}

/// A bit of the tags of transfers to sockets.
const TO_SOCKET: u64 = 1 << 61;

/// The accelerator's ends of one block's mqueues.
pub struct BlockShare {
    /// Index in the region.
    pub block: u32,
    /// Its mqueues in the region: the server mqueue, then the client mqueues, then the socket mqueue.
    pub mqueues: Vec<u32>,
    /// Their rings: RX and TX of each.
    pub rings: Vec<RingEntry>,
    /// The server mqueue.
    pub server: (Consumer<MappedMemory>, Producer<MappedMemory>),
    /// The client mqueues.
    pub clients: Vec<(Consumer<MappedMemory>, Producer<MappedMemory>)>,
    /// The sockets, if it has any.
    pub sockets: Option<SocketShare>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Serving,
    Stalled,
    Scribbling,
    Dead,
}

#[derive(Debug)]
struct Work {
    token: u64,
    payload: Vec<u8>,
    due_ns: u64,
    /// Waits for the backend's answer to this tag.
    awaits: Option<u64>,
    asked_backend: bool,
}

struct Client {
    rx: Consumer<MappedMemory>,
    tx: Producer<MappedMemory>,
    next_tag: u64,
    /// Requests without an answer, by tag.
    open: BTreeMap<u64, Body>,
    /// Of one that does transfers.
    commands: Commands,
}

struct Block {
    index: u32,
    mqueues: Vec<u32>,
    rings: Vec<RingEntry>,
    rx: Consumer<MappedMemory>,
    tx: Producer<MappedMemory>,
    clients: Vec<Client>,
    sockets: Option<SocketBlock>,
    work: Vec<Work>,
    bundles: OpenBundles,
    taken: u64,
    phase: Phase,
    /// Signalled, or with work left.
    runnable: bool,
}

impl Block {
    /// Whether there is nothing to read, to answer or to publish.
    fn is_idle(&mut self) -> bool {
        self.work.is_empty()
            && !self.bundles.any_unpublished()
            && !self.rx.hinted()
            && !self.clients.iter_mut().any(|c| c.rx.hinted())
            && self.sockets.as_mut().is_none_or(SocketBlock::is_idle)
    }
}

/// Tokens seen in the RX rings of one worker's mqueues of a service: (global mqueue, token).
pub type SeenTokens = Arc<Mutex<Vec<(u32, u64)>>>;

/// See the module's text.
pub struct Model {
    role: Role,
    behaviour: Behaviour,
    blocks: Vec<Block>,
    memory: MappedMemory,
    entries: Vec<RingEntry>,
    pools: Vec<PoolEntry>,
    net: SharedNetwork,
    rng: Rng,
    tokens: SeenTokens,
    /// Tokens that the previous generation left unanswered, and those it saw.
    inherited: Vec<u64>,
    /// A new generation has replaced it.
    ghost: bool,
    touched: Vec<u32>,
    ended: Vec<(u32, u64)>,
    now_ns: u64,
}

impl Model {
    /// Blocks of one worker in a region of rings and pools inside `memory`.
    pub fn new(
        role: Role,
        behaviour: Behaviour,
        region: (MappedMemory, Vec<RingEntry>, Vec<PoolEntry>),
        shares: Vec<BlockShare>,
        world: (SharedNetwork, SeenTokens, Rng),
    ) -> Self {
        let client = |(rx, tx)| {
            let (open, commands) = (BTreeMap::new(), Commands::default());
            Client { rx, tx, next_tag: 1, open, commands }
        };
        let block = |share: BlockShare| Block {
            index: share.block,
            mqueues: share.mqueues,
            rings: share.rings,
            rx: share.server.0,
            tx: share.server.1,
            clients: share.clients.into_iter().map(client).collect(),
            runnable: false,
            sockets: share.sockets.map(|sockets| {
                SocketBlock::new(role.service, sockets, &role.sockets, behaviour.corrupts())
            }),
            work: Vec::new(),
            bundles: OpenBundles::default(),
            taken: 0,
            phase: Phase::Serving,
        };
        let blocks = shares.into_iter().map(block).collect();
        Self {
            role,
            behaviour,
            blocks,
            memory: region.0,
            entries: region.1,
            pools: if behaviour.single_messages { Vec::new() } else { region.2 },
            net: world.0,
            tokens: world.1,
            inherited: Vec::new(),
            ghost: false,
            rng: world.2,
            touched: Vec::new(),
            ended: Vec::new(),
            now_ns: 0,
        }
    }

    /// The model of the same blocks in the accelerator's next generation.
    pub fn next_generation(
        &mut self,
        behaviour: Behaviour,
        region: (MappedMemory, Vec<RingEntry>, Vec<PoolEntry>),
        shares: Vec<BlockShare>,
    ) -> Self {
        let world = (self.net.clone(), self.tokens.clone(), self.rng.fork());
        let mut next = Self::new(self.role.clone(), behaviour, region, shares, world);
        let mqueues = self.blocks.iter().map(|b| self.role.first_mqueue + b.index);
        let mqueues: Vec<u32> = mqueues.collect();
        let work = self.blocks.iter().flat_map(|b| b.work.iter().map(|w| w.token));
        let seen = lock(&self.tokens);
        let seen = seen.iter().filter(|(of, _)| mqueues.contains(of)).map(|(_, token)| *token);
        next.inherited = work.chain(seen).collect();
        next.start();
        next
    }

    /// Blocks with sockets have something to do from the start: they listen.
    fn start(&mut self) {
        self.blocks.iter_mut().for_each(|block| block.runnable |= block.sockets.is_some());
    }

    /// The accelerator's index in its service.
    pub fn accelerator(&self) -> usize {
        self.role.accelerator
    }

    /// Marks it as replaced: it is no longer driven and runs between the turns, in a region that is no longer read.
    pub fn retire(&mut self) {
        self.ghost = true;
    }

    /// Whether the blocks run between turns.
    pub fn is_remote(&self) -> bool {
        self.behaviour.remote || self.ghost
    }

    /// Changes the behaviour; blocks that stopped stay stopped.
    pub fn set_behaviour(&mut self, behaviour: Behaviour) {
        self.behaviour = behaviour;
    }

    /// Connections that its blocks have.
    pub fn leases(&self) -> usize {
        self.blocks.iter().filter_map(|b| b.sockets.as_ref()).map(SocketBlock::leases).sum()
    }

    /// Unfinished work of a serving block, for the end of a run. Unread messages count: a block that
    /// handles one message after the other is sometimes between two of them.
    pub fn unfinished(&mut self) -> Option<String> {
        let wide = self.behaviour.is_wide();
        let mut serving = self.blocks.iter_mut().filter(|b| b.phase == Phase::Serving && !wide);
        let unfinished = serving.find_map(|b| {
            let open = b.clients.iter().map(|c| c.open.len() + c.commands.open()).sum::<usize>();
            let (work, unread) = (b.work.len(), b.rx.hinted());
            (work + open > 0 || unread).then_some((b.index, work, open, unread))
        });
        unfinished.map(|(block, work, open, unread)| {
            let service = self.role.service;
            format!(
                "block {block} of service {service}: {work} messages, {open} backend questions, \
                 more unread: {unread},"
            )
        })
    }

    /// For each block, whether it stopped reading without reporting it.
    pub fn stopped(&self) -> Vec<bool> {
        let stopped = |b: &Block| {
            matches!(b.phase, Phase::Stalled | Phase::Scribbling) || self.behaviour.is_wide()
        };
        self.blocks.iter().map(stopped).collect()
    }

    /// When blocks on the worker's core want to be driven again.
    pub fn wake_ns(&self) -> u64 {
        if self.behaviour.remote { u64::MAX } else { self.due_ns() }
    }

    /// When the next answer is due.
    pub fn due_ns(&self) -> u64 {
        let due = |b: &Block| match b.phase {
            Phase::Serving if b.runnable => 0,
            Phase::Serving => b
                .work
                .iter()
                .filter(|w| w.awaits.is_none())
                .map(|w| w.due_ns)
                .min()
                .unwrap_or(u64::MAX),
            Phase::Scribbling => 0,
            Phase::Stalled | Phase::Dead => u64::MAX,
        };
        self.blocks.iter().map(due).min().unwrap_or(u64::MAX)
    }

    /// When blocks that run between turns have work.
    pub fn remote_due_ns(&self) -> u64 {
        if self.behaviour.remote { self.due_ns() } else { u64::MAX }
    }

    /// Runs the blocks.
    pub fn step(&mut self, now_ns: u64) {
        self.now_ns = now_ns;
        for number in 0..self.blocks.len() {
            let due = |w: &Work| w.awaits.is_none() && w.due_ns <= now_ns;
            let block = &self.blocks[number];
            if self.is_remote() || block.runnable || block.work.iter().any(due) {
                self.step_block(number);
            }
            if self.blocks[number].phase == Phase::Scribbling {
                self.scribble(number);
            }
        }
    }

    /// Whether `fault` occurs now.
    fn occurs(&mut self, fault: Fault, per_mille: u32) -> bool {
        let occurs = self.rng.chance(per_mille);
        if occurs {
            lock(&self.net).fault_counts.one(fault);
        }
        occurs
    }

    fn step_block(&mut self, number: usize) {
        if self.blocks[number].phase != Phase::Serving {
            return;
        }
        self.blocks[number].runnable = false;
        // If others overwrite its words, it has to poll more than its own signals.
        if self.blocks[number].is_idle() && !self.behaviour.is_wide() {
            return;
        }
        self.read_answers(number);
        let behaviour = self.behaviour_of(number).sockets;
        if let Some(sockets) = &mut self.blocks[number].sockets {
            sockets.step(&mut lock(&self.net), &mut self.rng, &behaviour);
        }
        self.ask_pieces(number);
        while self.read_message(number) {}
        if self.blocks[number].phase != Phase::Serving {
            return;
        }
        let mut at = 0;
        while at < self.blocks[number].work.len() {
            let work = &self.blocks[number].work[at];
            if work.awaits.is_some() || work.due_ns > self.now_ns {
                at += 1;
                continue;
            }
            let work = self.blocks[number].work.remove(at);
            if let Some(work) = self.act(number, work) {
                self.blocks[number].work.insert(at, work);
                at += 1;
            }
        }
        self.publish(number);
        // After some work is done, more may be readable.
        let block = &mut self.blocks[number];
        let more = block.rx.hinted() || block.sockets.as_mut().is_some_and(|s| !s.is_idle());
        block.runnable |= more && block.phase == Phase::Serving;
    }

    fn publish(&mut self, number: usize) {
        let wide = self.behaviour.is_wide();
        let block = &mut self.blocks[number];
        block.runnable |= !block.bundles.publish(&mut block.tx);
        let clients = block.clients.iter_mut().map(|client| client.tx.publish());
        let published = std::iter::once(block.tx.publish()).chain(clients);
        let published = published.chain(block.sockets.as_mut().map(SocketBlock::publish));
        for (published, mqueue) in published.zip(&block.mqueues) {
            if (published || wide) && !self.touched.contains(mqueue) {
                self.touched.push(*mqueue);
            }
        }
    }

    /// Takes one message, unless the block is busy enough.
    fn read_message(&mut self, number: usize) -> bool {
        let block = &mut self.blocks[number];
        if block.phase != Phase::Serving || block.work.len() > self.behaviour.overlap {
            return false;
        }
        let header = match block.rx.peek() {
            Ok(Some(header)) => header,
            Ok(None) => return false,
            Err(_) if self.behaviour.is_wide() => return false,
            Err(error) => {
                let text = format!("the engine broke an RX ring: {error}");
                lock(&self.net).ledger.violate(|| text);
                return false;
            }
        };
        let messages = if header.kind == kind::BUNDLE {
            let Ok(bundle) = block.rx.bundle(&header) else { return self.refuse_bundle() };
            let Some(bundle) = bundle else { return false };
            let longest = block.rings[0].message_bytes_max;
            let bundle = (header.token, bundle);
            let taken = block.bundles.take(&self.memory, bundle, &self.pools, longest);
            let Some(taken) = taken else { return self.refuse_bundle() };
            taken
        } else {
            let mut payload = vec![0; header.len as usize];
            if !block.rx.copy_out(&header, &mut payload) {
                return false;
            }
            vec![(header.token, payload)]
        };
        block.rx.advance();
        block.rx.release();
        block.taken += 1;
        let taken = block.taken;
        let behaviour = self.behaviour_of(number);
        let block = &mut self.blocks[number];
        let mqueue = self.role.first_mqueue + block.index;
        let over = |limit: Option<u64>| limit.is_some_and(|limit| taken > limit);
        let end = match () {
            () if over(behaviour.die_after) => {
                self.ended.push((block.index, abi::reason::RETURNED));
                Some((Phase::Dead, Fault::Die))
            }
            () if over(behaviour.stall_after) => Some((Phase::Stalled, Fault::Stall)),
            () if over(behaviour.scribble_after) => Some((Phase::Scribbling, Fault::Scribble)),
            () => None,
        };
        if let Some((phase, fault)) = end {
            block.phase = phase;
            lock(&self.net).fault_counts.one(fault);
        }
        for (token, payload) in messages {
            self.take_work(number, mqueue, &behaviour, token, payload);
        }
        true
    }

    /// The engine has sent a bundle that no library takes.
    fn refuse_bundle(&mut self) -> bool {
        let is_wide = self.behaviour.is_wide();
        lock(&self.net).ledger.must(is_wide, || "the engine sent an invalid bundle".to_owned());
        false
    }

    /// A block begins to work on a message.
    fn take_work(
        &mut self,
        number: usize,
        mqueue: u32,
        behaviour: &Behaviour,
        token: u64,
        payload: Vec<u8>,
    ) {
        let (low, high) = behaviour.delay_ns;
        let mut due_ns = self.now_ns + self.rng.between(low, high);
        if self.occurs(Fault::Late, behaviour.late) {
            due_ns += behaviour.late_ns;
        }
        let mut net = lock(&self.net);
        net.ledger.seen(self.role.service, mqueue, &payload);
        net.trace.note(self.now_ns, "recv", &[self.role.service as u64, mqueue.into()]);
        drop(net);
        let mut tokens = lock(&self.tokens);
        tokens.push((mqueue, token));
        if tokens.len() > 64 {
            tokens.remove(0);
        }
        let work = Work { token, payload, due_ns, awaits: None, asked_backend: false };
        self.blocks[number].work.push(work);
    }

    fn behaviour_of(&self, number: usize) -> Behaviour {
        let all = self.behaviour;
        match all.only_block {
            Some(only) if only != self.blocks[number].index => Behaviour {
                remote: all.remote,
                delay_ns: all.delay_ns,
                overlap: all.overlap,
                ..Behaviour::default()
            },
            _ => all,
        }
    }

    /// Handles a message; returns it if a ring is full or the backend has to be asked first.
    fn act(&mut self, number: usize, mut work: Work) -> Option<Work> {
        let behaviour = self.behaviour_of(number);
        if self.occurs(Fault::Swallow, behaviour.swallow) {
            return None;
        }
        let decoded = decode_request(self.role.framing, &work.payload);
        let ask = decoded.map_or(Ask::BadLength, |(body, _)| body.ask);
        if ask == Ask::Backend && !work.asked_backend && !self.blocks[number].clients.is_empty() {
            let (body, _) = decoded.expect("it asked");
            work.asked_backend = true;
            match self.ask_backend(number, &body) {
                Some(tag) => work.awaits = Some(tag),
                None => {
                    // No room: retry at the next opportunity.
                    work.asked_backend = false;
                    self.blocks[number].runnable = true;
                }
            }
            return Some(work);
        }
        let rejected = self.occurs(Fault::Reject, behaviour.reject);
        let bad_length = self.occurs(Fault::Reject, behaviour.bad_length);
        let too_long = self.occurs(Fault::Reject, behaviour.too_long);
        let raw = self.role.framing == Framing::Raw;
        let (kind, status) = match ask {
            _ if rejected => (kind::DROP, status::REJECTED),
            _ if bad_length => (kind::DROP, status::BAD_LENGTH),
            _ if too_long => (kind::DROP, status::TOO_LONG),
            Ask::Reject if !raw => (kind::DROP, status::REJECTED),
            Ask::BadLength if !raw => (kind::DROP, status::BAD_LENGTH),
            _ => (kind::MESSAGE, status::OK),
        };
        if self.role.replies == Replies::None && kind == kind::MESSAGE {
            if self.occurs(Fault::Unwanted, behaviour.unwanted) {
                self.push(number, work.token, kind, status, b"unwanted");
            }
            return None;
        }
        let reply = match decoded {
            _ if kind == kind::DROP => Vec::new(),
            _ if raw => work.payload.clone(),
            Some((body, flavor)) => self.reply(&body, flavor),
            None => Vec::new(),
        };
        if !self.push(number, work.token, kind, status, &reply) {
            self.blocks[number].runnable = true;
            return Some(work);
        }
        self.misbehave(number, &behaviour, work.token, &reply);
        None
    }

    fn reply(&mut self, body: &Body, flavor: Flavor) -> Vec<u8> {
        let framing = self.role.framing;
        if flavor == Flavor::Quiet && self.rng.chance(500) {
            return Vec::new();
        }
        let mut reply = crate::message::reply_payload(framing, &body.reply(), flavor);
        if body.ask == Ask::Unframable {
            match framing {
                Framing::Line | Framing::LineCrLf => reply[0] = b'\n',
                // A wrong length; data that is not a response.
                Framing::Sockperf => reply[13] ^= 1,
                Framing::Memcached => reply[0] = b'v',
                _ => {}
            }
        }
        reply
    }

    fn push(&mut self, number: usize, token: u64, kind: u8, status: u8, payload: &[u8]) -> bool {
        let block = &mut self.blocks[number];
        let Block { bundles, tx, .. } = &mut *block;
        let answered = bundles.answer(&self.memory, tx, (token, (kind, status)), payload);
        let pushed = answered
            .unwrap_or_else(|| tx.push(Head { token, tag: 0, kind, status }, payload).is_ok());
        let mqueue = self.role.first_mqueue + block.index;
        if pushed {
            let circumstances = [self.role.service as u64, mqueue.into(), kind.into()];
            lock(&self.net).trace.note(self.now_ns, "send", &circumstances);
        }
        pushed
    }

    fn publish_touch(&mut self, number: usize) {
        for mqueue in &self.blocks[number].mqueues {
            if !self.touched.contains(mqueue) {
                self.touched.push(*mqueue);
            }
        }
    }

    /// Sends a request to the block's first backend; returns its tag, or `None` if there is no room.
    fn ask_backend(&mut self, number: usize, body: &Body) -> Option<u64> {
        let role = &self.role.backends[0];
        if role.disk.is_some() {
            return self.ask_transfer(number, body);
        }
        let (filler, want) = match role.framing {
            // A fixed backend answers with the same number of bytes.
            Framing::Fixed(bytes) => [bytes - crate::message::BODY_BYTES_MIN as u32; 2].into(),
            framing => {
                let most = answer_filler_max(framing, role.max_message_bytes).unwrap_or(0) as u64;
                let long = self.behaviour.long_questions || self.rng.chance(300);
                let want = if long { most } else { most.min(16) };
                (0, want as u32)
            }
        };
        // Its number, and therefore its key, is unique.
        let key = lock(&self.net).number_question();
        let question = Body { ask: Ask::Answer, want, filler, key, ..*body };
        let payload = request_payload(role.framing, &question, Flavor::Plain);
        let client = &mut self.blocks[number].clients[0];
        let tag = client.next_tag;
        let head = Head { token: 0, tag, kind: kind::MESSAGE, status: status::OK };
        client.tx.push(head, &payload).ok()?;
        client.next_tag += 1;
        client.open.insert(tag, question);
        Some(tag)
    }

    /// Sends the command of a transfer, and others beside it; returns its tag, or `None` if there is no room.
    fn ask_transfer(&mut self, number: usize, body: &Body) -> Option<u64> {
        let disk = self.role.backends[0].disk.as_ref()?;
        let key = lock(&self.net).number_question();
        let right = Commands::right(disk, key, &mut self.rng);
        let client = &mut self.blocks[number].clients[0];
        let head = |tag| Head { token: 0, tag, kind: kind::MESSAGE, status: status::OK };
        let tag = client.next_tag;
        client.tx.push(head(tag), &right).ok()?;
        client.next_tag += 1;
        client.open.insert(tag, Body { key, ..*body });
        lock(&disk.setup.books).asked += 1;
        for (tag, message) in client.commands.extras(disk, &right, &mut self.rng) {
            if client.tx.push(head(tag), &message).is_ok() {
                client.commands.sent(disk, tag);
            }
        }
        Some(tag)
    }

    /// Sends the commands of transfers to sockets, as far as there is room.
    fn ask_pieces(&mut self, number: usize) {
        let Block { sockets: Some(sockets), clients, .. } = &mut self.blocks[number] else {
            return;
        };
        let Some(disk) = self.role.backends.first().and_then(|backend| backend.disk.as_ref())
        else {
            return;
        };
        while let Some(piece) = sockets.piece() {
            let key = lock(&self.net).number_question();
            let client = &mut clients[0];
            let tag = TO_SOCKET | client.next_tag;
            let head = Head { token: 0, tag, kind: kind::MESSAGE, status: status::OK };
            if client.tx.push(head, &piece.command(disk, key)).is_err() {
                lock(&disk.setup.books).asked -= 1;
                return;
            }
            client.next_tag += 1;
            sockets.asked(tag);
        }
    }

    /// Reads answers of backends.
    fn read_answers(&mut self, number: usize) {
        for backend in 0..self.blocks[number].clients.len() {
            loop {
                let client = &mut self.blocks[number].clients[backend];
                let Ok(Some(header)) = client.rx.peek() else { break };
                let mut payload = vec![0; header.len as usize];
                if !client.rx.copy_out(&header, &mut payload) {
                    break;
                }
                client.rx.advance();
                client.rx.release();
                self.take_answer(number, backend, &header, &payload);
            }
        }
    }

    fn take_answer(
        &mut self,
        number: usize,
        backend: usize,
        header: &abi::SlotHeader,
        payload: &[u8],
    ) {
        let role = &self.role.backends[backend];
        let block = &mut self.blocks[number];
        let tag = header.tag;
        if let (Some(disk), Some(sockets)) = (&role.disk, &mut block.sockets)
            && sockets.take_result(tag, || Piece::is_sent(disk, header, payload))
        {
            return;
        }
        let mut net = lock(&self.net);
        if let Some(disk) = &role.disk
            && block.clients[backend].commands.takes(disk, header, payload)
        {
            return;
        }
        let Some(question) = block.clients[backend].open.remove(&header.tag) else {
            if self.behaviour.is_wide() {
                return;
            }
            let tag = header.tag;
            return net.ledger.violate(|| format!("an answer to tag {tag}, which is not open"));
        };
        net.trace.note(self.now_ns, "answer", &[header.tag, header.status.into()]);
        let judged = header.status == status::OK && role.honest && !self.behaviour.is_wide();
        if let Some(disk) = &role.disk {
            Commands::judge(disk, question.key, header, payload);
        } else if judged && !is_answer_to(role.framing, &question, payload) {
            net.ledger
                .violate(|| format!("{question:?} is answered by a backend with {payload:02x?}"));
        }
        drop(net);
        let waits = block.work.iter_mut().find(|w| w.awaits == Some(header.tag));
        if let Some(work) = waits {
            work.awaits = None;
        }
    }
}

/// A [`Model`] driven by the worker.
pub struct ModelBlocks {
    /// The blocks.
    pub model: Arc<Mutex<Model>>,
    /// Behind a link: where the worker looks for replies, and its mqueues.
    pub heads: Option<(Words<MappedMemory>, Vec<u32>)>,
}

impl Blocks for ModelBlocks {
    fn start(&mut self) -> Result<(), StartError> {
        lock(&self.model).start();
        Ok(())
    }

    fn drive(&mut self, now_ns: u64, rang: &[u32], touched: &mut Vec<u32>) {
        let mut model = lock(&self.model);
        for mqueue in rang {
            let found = model.blocks.iter_mut().find(|b| b.mqueues.contains(mqueue));
            found.expect("the engine rings its own blocks").runnable = true;
        }
        if !model.behaviour.remote {
            model.step(now_ns);
        }
        if let Some((words, mqueues)) = &self.heads {
            // What they sent is not here before it has crossed the link.
            model.touched.clear();
            words.tx_waiting_among(mqueues, &mut model.touched);
        }
        // A spurious touch makes the engine read overwritten words, which it would not do otherwise.
        let muted = lock(&model.net).muted;
        let spurious = if muted { 0 } else { model.behaviour.spurious };
        for number in 0..model.blocks.len() {
            if model.occurs(Fault::FalseAlarm, spurious) {
                model.publish_touch(number);
            }
        }
        touched.append(&mut model.touched);
    }

    fn takes_bundles(&self) -> bool {
        !lock(&self.model).behaviour.single_messages
    }

    fn wake_at(&self) -> u64 {
        lock(&self.model).wake_ns()
    }

    fn ended(&mut self, into: &mut Vec<(u32, u64)>) {
        into.append(&mut lock(&self.model).ended);
    }
}
