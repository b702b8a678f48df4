//! Stream sockets of kernels: the connections of the host kernel, and the bytes between them and the blocks.
//!
//! A service with `[[service.socket]]` gives each of its blocks a fixed number of sockets. What a block may listen at and connect to is
//! listed there, and it names them by index: a kernel never gives an address. The rings, leases, commands and events of one block are in the
//! crate `sockets`; this file and those below it have the connections.
//!
//! | step of the turn | where |
//! |---|---|
//! | a connection waits at a listener, a block of this worker waits for one: accept, lease a slot | `sockets/open.rs` |
//! | commands of blocks, gathered like requests to backends | `sockets/commands.rs` |
//! | before the blocks are driven: each connection that may have bytes is read once, into its ring | `sockets/stream.rs` |
//! | after they were driven: what they wrote is sent, one write for each connection | `sockets/stream.rs` |
//! | once a millisecond: time limits | `sockets/open.rs` |
//! | connections to which transfers of blocks write | `sockets/lend.rs` |
//! | the end of connections | `sockets/end.rs`, `sockets/linger.rs`, `sockets/drain.rs` |
//!
//! *Back-pressure.* A connection whose ring is full is not read until the block notifies the engine that it has read half of it, so the peer's
//! window closes. A block that has filled its ring waits for an event, which comes when half of it was sent.
//!
//! *Listeners.* A connection is accepted only for a block that waits for one; others wait in the backlog of the host kernel. All workers
//! share one listening socket, so a connection goes to whichever worker has a block for it.
//!
//! *The end.* A generation, a service or a worker that ends resets the sockets that are left, each with an [`End`] that is counted. A service that
//! leaves gets no new connections; it leaves when its blocks have closed their sockets, or when `engine.drain_ms` is over. Its idle
//! connections are ended before that (`sockets/drain.rs`).

mod commands;
mod drain;
mod end;
mod lend;
mod linger;
mod open;
mod stream;

use std::ops::Range;
use std::sync::Arc;

use mqueue::MappedMemory;
use mqueue::Role;
use sockets::{BlockSockets, Books, Direction, End, State};
use wire::DropReason;
use wire::nic::{Close, Event, Nic, PortIndex, StreamKey};

use self::drain::{Departure, Spoke};
pub(crate) use self::lend::{LoanState, Unread};
use self::lend::{Loans, Noted};
use crate::admit::servers::Servers;
use crate::base::keys::{SlotId, StreamOwner};
use crate::base::metrics::ServiceCounters;
use crate::base::topology::{POLL_NS, Service, SocketAt, SocketSpec};
use crate::base::turn::Turn;
use crate::endpoint::clients::Clients;
use crate::endpoint::{Endpoint, PerService, replace};
use crate::schedule::Schedule;
use crate::service::ends::{OtherEnds, SocketEnds};
use crate::service::services::Services;

/// Key before the service is installed, which issues the keys.
const NO_KEY: StreamKey = StreamKey::MAX;
/// A worker looks for commands of blocks on other threads without sleeping for this long after it gave one bytes.
const AWAKE_NS: u64 = 1_000_000;

/// The connection of a slot.
pub(crate) struct Connection {
    pub(crate) key: StreamKey,
    /// It may have bytes to read.
    readable: bool,
    /// It may take bytes.
    writable: bool,
    /// The peer sends nothing more.
    received_all: bool,
    /// The peer knows that it gets nothing more.
    shut: bool,
    /// Of a slot that is closing: everything was sent, and the peer may still send.
    lingers: bool,
    listed_to_read: bool,
    listed_to_write: bool,
    /// What the books of the slot were when they were last counted: received, sent.
    counted: [Books; 2],
    /// Of an attempt, and of a slot that is closing: when it is given up.
    deadline_ns: u64,
    /// When bytes came or went last, or it was opened.
    active_ns: u64,
    /// It ends when no byte came or went for this long.
    idle_ns: u64,
    /// Transfers that write to it, and that will.
    loans: Loans,
    /// What its block had written when the worker looked last.
    noted: Option<Noted>,
    /// A Unix socket, which has no reset.
    is_local: bool,
    /// The peer has connected, not the block.
    is_accepted: bool,
    spoke: Spoke,
    departure: Departure,
}

/// The sockets of one block.
pub(crate) struct BlockShare {
    /// Number of the block's socket mqueue in its region.
    pub(crate) region_mqueue: u32,
    pub(crate) sockets: BlockSockets<MappedMemory>,
    pub(crate) connections: Vec<Connection>,
    rx_pending: bool,
    /// It is in the list of blocks with leased slots.
    listed: bool,
    /// The block does not run, or broke its rings.
    dead: bool,
    /// Commands for transfers to its connections.
    unread: Unread,
    /// Transfers borrow its connections.
    has_borrower: bool,
}

impl BlockShare {
    fn new(ends: SocketEnds, count: usize) -> Self {
        let SocketEnds { mqueue, streams } = ends;
        let connections = streams.iter().map(|_| Connection::new(NO_KEY)).collect();
        let sockets = BlockSockets::new(mqueue.rx, mqueue.tx, streams, count);
        let region_mqueue = mqueue.mqueue;
        Self {
            region_mqueue,
            sockets,
            connections,
            rx_pending: false,
            listed: false,
            dead: false,
            unread: Unread::None,
            has_borrower: false,
        }
    }

    /// Messages were published to the block.
    pub(crate) fn publish(&mut self) {
        self.sockets.publish();
        self.rx_pending = false;
    }
}

impl Connection {
    fn new(key: StreamKey) -> Self {
        Self {
            key,
            readable: false,
            writable: false,
            received_all: false,
            shut: false,
            lingers: false,
            listed_to_read: false,
            listed_to_write: false,
            counted: Default::default(),
            deadline_ns: u64::MAX,
            active_ns: 0,
            idle_ns: u64::MAX,
            loans: Loans::default(),
            noted: None,
            is_local: false,
            is_accepted: false,
            spoke: Spoke::None,
            departure: Departure::None,
        }
    }

    /// A new connection to or from this address, in the same slot. The slot may still be listed.
    fn begin(&mut self, at: &SocketSpec) {
        let Self { key, listed_to_read, listed_to_write, counted, .. } = *self;
        let idle_ns = if at.idle_ms == 0 { u64::MAX } else { at.idle_ms * 1_000_000 };
        let is_local = matches!(at.at, SocketAt::Unix(_));
        let is_accepted = at.listens();
        let fresh = Self { listed_to_read, listed_to_write, counted, ..Self::new(key) };
        *self = Self { idle_ns, is_local, is_accepted, ..fresh };
    }

    /// The connection exists.
    fn open(&mut self, now_ns: u64) {
        (self.readable, self.writable) = (true, true);
        (self.deadline_ns, self.active_ns) = (u64::MAX, now_ns);
    }

    /// Whether no byte came or went for too long.
    fn is_idle(&self, now_ns: u64) -> bool {
        self.loans.is_empty() && now_ns.saturating_sub(self.active_ns) >= self.idle_ns
    }
}

/// One worker's share of the sockets of one service.
pub(crate) struct Sockets {
    specs: Box<[SocketSpec]>,
    counters: Arc<ServiceCounters>,
    /// By server mqueue of the service share.
    pub(crate) blocks: Vec<BlockShare>,
    /// By socket: the listener's port, where connections wait that no block has asked for.
    waiting: Vec<Option<PortIndex>>,
    /// Blocks with leased slots, and some that had them since the last housekeeping.
    leasing: Vec<u32>,
    /// Blocks that were sent messages; their accelerators are driven next.
    rung: Vec<u32>,
    /// Blocks that are owed events.
    owed: Vec<u32>,
    /// Blocks with commands that were not taken.
    behind: Vec<u32>,
    /// The block that is asked first for the next connection.
    next_block: u32,
    /// No new connections: the service leaves.
    closed: bool,
    awake_until_ns: u64,
    attempt_ns: u64,
}

impl Sockets {
    /// Of a service that has sockets, with the ends of its blocks.
    pub(crate) fn new(
        service: &Service,
        ends: &mut [OtherEnds],
        counters: &Arc<ServiceCounters>,
    ) -> Option<Box<Self>> {
        if service.sockets.is_empty() {
            return None;
        }
        let specs: Box<[SocketSpec]> = service.sockets.clone().into();
        let ends = ends.iter_mut().filter_map(|ends| ends.sockets.take());
        let blocks: Vec<_> = ends.map(|ends| BlockShare::new(ends, specs.len())).collect();
        Some(Box::new(Self {
            waiting: vec![None; specs.len()],
            specs,
            counters: counters.clone(),
            leasing: Vec::with_capacity(blocks.len()),
            rung: Vec::with_capacity(blocks.len()),
            owed: Vec::with_capacity(blocks.len()),
            behind: Vec::with_capacity(blocks.len()),
            blocks,
            next_block: 0,
            closed: false,
            awake_until_ns: 0,
            attempt_ns: service.request_timeout_ms * 1_000_000,
        }))
    }

    /// Every slot's key, with its block and slot.
    pub(crate) fn keys_mut(&mut self) -> impl Iterator<Item = (u32, u16, &mut StreamKey)> {
        self.blocks.iter_mut().zip(0..).flat_map(|(block, number)| {
            let slots = block.connections.iter_mut().zip(0..);
            slots.map(move |(connection, slot)| (number, slot, &mut connection.key))
        })
    }

    /// The number of slots.
    pub(crate) fn slots(&self) -> usize {
        self.blocks.iter().map(|block| block.connections.len()).sum()
    }

    /// Whether blocks must be driven because of messages to them.
    #[inline]
    pub(crate) fn has_rung(&self) -> bool {
        !self.rung.is_empty()
    }

    /// Publishes what blocks were sent: calls `ring` with the number and the mqueue of each.
    fn publish(&mut self, mut ring: impl FnMut(u32, u32)) {
        for number in self.rung.drain(..) {
            let block = &mut self.blocks[number as usize];
            block.publish();
            ring(number, block.region_mqueue);
        }
    }

    /// After messages to a block were written: it is driven next.
    fn note_written(&mut self, number: u32) {
        let block = &mut self.blocks[number as usize];
        if block.sockets.owes() && !self.owed.contains(&number) {
            self.owed.push(number);
        }
        if block.sockets.take_written() && !std::mem::replace(&mut block.rx_pending, true) {
            self.rung.push(number);
        }
    }

    /// Sends the events that are owed.
    fn send_owed(&mut self) {
        for at in (0..self.owed.len()).rev() {
            let number = self.owed[at];
            self.blocks[number as usize].sockets.send_owed();
            if !self.blocks[number as usize].sockets.owes() {
                self.owed.swap_remove(at);
            }
            self.note_written(number);
        }
    }

    /// Leases a free slot of a block; `None` if there is none.
    fn lease(&mut self, number: u32, state: State) -> Option<u32> {
        let block = &mut self.blocks[number as usize];
        let slot = block.sockets.lease(state)?;
        if !std::mem::replace(&mut block.listed, true) {
            self.leasing.push(number);
        }
        Some(slot)
    }

    /// Whether there are connections, or attempts to connect.
    pub(crate) fn has_connections(&self) -> bool {
        self.has_connections_of(&(0..u32::MAX))
    }

    /// The same of these blocks.
    pub(crate) fn has_connections_of(&self, blocks: &Range<u32>) -> bool {
        self.leasing.iter().filter(|number| blocks.contains(number)).any(|number| {
            let sockets = &self.blocks[*number as usize].sockets;
            sockets.leased().any(|slot| sockets.slots()[slot as usize].state() != State::Dead)
        })
    }

    /// When the worker must look again without an event; 0 at once. `is_off_thread`: blocks may do something while it sleeps.
    pub(crate) fn wake_at(&self, now_ns: u64, poll_ns: u64, is_off_thread: bool) -> u64 {
        if self.has_rung() || (is_off_thread && now_ns < self.awake_until_ns) {
            return 0;
        }
        let looks = is_off_thread
            || !self.owed.is_empty()
            || !self.behind.is_empty()
            || self.has_connections();
        if looks { now_ns + poll_ns } else { u64::MAX }
    }

    /// No new connections from now on.
    pub(crate) fn close(&mut self) {
        self.closed = true;
    }

    /// The blocks have new rings; their sockets were [ended](KernelSockets::end_sockets) before.
    pub(crate) fn replace_rings(&mut self, number: u32, ends: SocketEnds) {
        let keys: Vec<_> = self.blocks[number as usize].connections.iter().map(|c| c.key).collect();
        let mut block = BlockShare::new(ends, self.specs.len());
        for (connection, key) in block.connections.iter_mut().zip(keys) {
            connection.key = key;
        }
        self.leasing.retain(|leasing| *leasing != number);
        self.rung.retain(|rung| *rung != number);
        self.owed.retain(|owed| *owed != number);
        self.behind.retain(|behind| *behind != number);
        self.blocks[number as usize] = block;
    }

    /// Of each direction, the books of bytes as far as they are not in the counters, and the bytes in rings.
    pub(crate) fn bytes(&self) -> [(Books, u64); 2] {
        [Direction::Receive, Direction::Send].map(|direction| {
            let (mut books, mut in_rings) = (Books::default(), 0);
            for block in &self.blocks {
                for (slot, connection) in block.sockets.slots().iter().zip(&block.connections) {
                    books += slot.books(direction).since(connection.counted[direction as usize]);
                    in_rings += slot.in_ring(direction);
                }
            }
            (books, in_rings)
        })
    }

    /// Adds what the books of a slot have gained since the last time to the counters.
    fn count_bytes(&mut self, number: u32, slot: u32) {
        let Self { blocks, counters, .. } = self;
        let block = &mut blocks[number as usize];
        let counted = &mut block.connections[slot as usize].counted;
        for direction in [Direction::Receive, Direction::Send] {
            let [taken, delivered, dropped] = match direction {
                Direction::Receive => counters.of_received(),
                Direction::Send => counters.of_sent(),
            };
            let books = block.sockets.slots()[slot as usize].books(direction);
            let gained = books.since(std::mem::replace(&mut counted[direction as usize], books));
            taken.add(gained.taken);
            delivered.add(gained.delivered);
            dropped.add(gained.dropped);
        }
    }
}

/// Slots and ports of all services with something to do.
#[derive(Default)]
struct Lists {
    to_read: Vec<SlotId>,
    to_write: Vec<SlotId>,
    /// Memory for the next lists.
    spare: Vec<SlotId>,
    /// Ports where connections may wait for which a block has asked now.
    ports: Vec<PortIndex>,
}

impl Lists {
    /// A service with this many slots comes.
    fn reserve(&mut self, slots: usize) {
        // Each slot is listed once at most.
        for list in [&mut self.to_read, &mut self.to_write, &mut self.spare] {
            list.reserve(slots + list.capacity().saturating_sub(list.len()));
        }
        self.ports.reserve(64);
    }

    /// Whether a connection may be read or written.
    fn is_ready(&self) -> bool {
        !self.to_read.is_empty() || !self.to_write.is_empty() || !self.ports.is_empty()
    }
}

/// The sockets of all services of a worker.
#[derive(Default)]
pub(crate) struct KernelSockets {
    /// Of services with sockets.
    by_slot: Vec<Option<Box<Sockets>>>,
    lists: Lists,
}

fn of(by_slot: &mut [Option<Box<Sockets>>], service: u16) -> Option<&mut Sockets> {
    by_slot.get_mut(usize::from(service))?.as_deref_mut()
}

impl KernelSockets {
    fn of(&mut self, service: u16) -> Option<&mut Sockets> {
        of(&mut self.by_slot, service)
    }

    fn share(&self, service: u16) -> Option<&Sockets> {
        self.by_slot.get(usize::from(service))?.as_deref()
    }

    /// The block of a slot.
    fn block_of(&mut self, id: SlotId) -> Option<&mut BlockShare> {
        self.of(id.service)?.blocks.get_mut(id.block as usize)
    }
}

impl PerService for KernelSockets {
    type Part = Option<Box<Sockets>>;

    fn prepare(
        service: &Service,
        _: u16,
        ends: &mut [OtherEnds],
        counters: &Arc<ServiceCounters>,
    ) -> Self::Part {
        Sockets::new(service, ends, counters)
    }

    fn place<N: Nic>(
        &mut self,
        turn: &mut Turn<N>,
        service: u16,
        mut part: Self::Part,
    ) -> Self::Part {
        if let Some(sockets) = &mut part {
            for (block, slot, key) in sockets.keys_mut() {
                let id = SlotId { service, slot, block };
                *key = turn.stream_keys.issue(StreamOwner::Socket(id));
            }
            self.lists.reserve(sockets.slots());
        }
        replace(&mut self.by_slot, service, part)
    }

    fn remove<N: Nic>(&mut self, turn: &mut Turn<N>, service: u16) -> Self::Part {
        let mut part = replace(&mut self.by_slot, service, None);
        for (.., key) in part.iter_mut().flat_map(|sockets| sockets.keys_mut()) {
            turn.nic.close(*key, Close::Reset);
            turn.stream_keys.free(*key);
        }
        part
    }
}

impl<N: Nic> Servers<N> for KernelSockets {
    fn accept(
        &mut self,
        turn: &mut Turn<N>,
        _: &Services,
        service: u16,
        port: PortIndex,
        socket: u16,
    ) -> bool {
        self.accept_sockets(turn, service, port, socket)
    }
}

impl<N: Nic> Endpoint<N> for KernelSockets {
    fn replace_rings(&mut self, service: usize, ends: &mut [OtherEnds]) {
        let Some(sockets) = self.of(service as u16) else { return };
        for OtherEnds { server, sockets: ends, .. } in ends {
            if let Some(ends) = ends.take() {
                sockets.replace_rings(*server, ends);
            }
        }
    }

    fn event(&mut self, turn: &mut Turn<N>, event: Event, owner: StreamOwner) {
        if let StreamOwner::Socket(id) = owner {
            self.socket_event(turn, event, id);
        }
    }

    /// Reads connections, and publishes what blocks were sent.
    fn before_drive(
        &mut self,
        turn: &mut Turn<N>,
        services: &mut Services,
        schedule: &mut Schedule,
    ) {
        if !self.lists.to_read.is_empty() {
            self.receive_sockets(turn, schedule);
        }
        for (sockets, share) in self.by_slot.iter_mut().zip(&mut services[..]) {
            if let Some(sockets) = sockets.as_deref_mut().filter(|sockets| sockets.has_rung()) {
                sockets.publish(|block, region_mqueue| share.ring(block, region_mqueue));
            }
        }
    }

    fn take(
        &mut self,
        turn: &mut Turn<N>,
        services: &mut Services,
        service: usize,
        (role, block): (Role, u32),
    ) {
        if role == Role::Sockets {
            self.take_commands(turn, services, service, block);
        }
    }

    /// Writes connections, and has listeners looked at for which a block has asked now.
    fn exchange(
        &mut self,
        turn: &mut Turn<N>,
        services: &mut Services,
        schedule: &mut Schedule,
        clients: &mut Clients,
    ) {
        if self.by_slot.is_empty() {
            return;
        }
        self.send_sockets(turn, services, schedule);
        while let Some(port) = self.lists.ports.pop() {
            clients.tcp.set_ready(port);
        }
    }

    fn leave(
        &mut self,
        _: &mut Turn<N>,
        _: &mut Services,
        _: &mut impl Servers<N>,
        service: Option<u16>,
    ) {
        if let Some(sockets) = service.and_then(|service| self.of(service)) {
            sockets.close();
        }
    }

    fn expire(
        &mut self,
        turn: &mut Turn<N>,
        services: &mut Services,
        _: &mut Clients,
        service: usize,
    ) {
        self.expire_sockets(turn, services, service as u16);
    }

    fn end_blocks(
        &mut self,
        turn: &mut Turn<N>,
        service: usize,
        blocks: Range<u32>,
        are_lost: bool,
    ) {
        let end = if are_lost { End::AcceleratorLost } else { End::BlockEnded };
        self.end_sockets(turn, service as u16, blocks, end, true);
    }

    fn drop_requests(
        &mut self,
        turn: &mut Turn<N>,
        _: &mut Services,
        _: &mut Clients,
        service: usize,
        _: DropReason,
    ) {
        self.end_sockets(turn, service as u16, 0..u32::MAX, End::DrainTimeout, false);
    }

    fn release(&mut self, turn: &mut Turn<N>, service: u16) {
        self.release_sockets(turn, service);
    }

    fn wake_at(&self, now_ns: u64, services: &Services) -> u64 {
        if self.lists.is_ready() {
            return 0;
        }
        let of = self.by_slot.iter().zip(&services[..]).filter_map(|(sockets, share)| {
            let sockets = sockets.as_deref()?;
            Some(sockets.wake_at(now_ns, POLL_NS, share.runs_off_thread()))
        });
        of.min().unwrap_or(u64::MAX)
    }

    fn stream_bytes(&self, service: u16) -> Option<[(Books, u64); 2]> {
        self.share(service).map(Sockets::bytes)
    }

    fn is_connected(&self, service: u16, blocks: &Range<u32>) -> bool {
        self.share(service).is_some_and(|sockets| sockets.has_connections_of(blocks))
    }
}
