//! Backends: client mqueues and their connections to backend servers.
//!
//! A block sends requests through a client mqueue's TX ring and gets exactly one answer for each in its RX ring, with
//! the request's tag and a status: ok, or the error. The engine takes a request only when the RX ring has room for
//! the longest answer; other requests stay in their ring.
//!
//! Streams (TCP) are in `backend/stream.rs`, datagrams in `backend/datagram.rs`. Both match an answer to its request
//! by order, and also compare the two where the protocol allows it:
//!
//! | backend | an answer belongs to |
//! |---|---|
//! | framing `memcached`, TCP | the oldest request, if command and key fit |
//! | framing `memcached`, UDP | the request with the id in the frame header, if command and key fit |
//! | `match = "id:OFFSET:LENGTH"`, TCP | the oldest request, if the id is the same |
//! | `match = "id:OFFSET:LENGTH"`, UDP | the request in flight with the same id |
//! | others, TCP | the oldest request |
//! | others, UDP | the one request in flight |
//!
//! Functions may be on the path between kernels and a backend (`backend/path.rs`).
//!
//! With `sockets = "per-request"` every request has its own socket, so no answer to another request can arrive on it.

mod datagram;
mod endpoint;
mod path;
mod stream;

use std::net::SocketAddr;
use std::ops::Range;
use std::sync::Arc;

use mqueue::abi::{self, status};
use mqueue::{Consumer, Head, LoanError, MappedMemory, Producer, RingError, Role};
use onpath::{Arranged, Chain, Direction, End, Link};
use wire::DropReason;
use wire::framing::{Framing, FramingError};
use wire::matching::MatchId;
use wire::nic::{Nic, StreamKey, Transport};

use self::datagram::DatagramSocket;
pub(crate) use self::endpoint::KernelBackends;
use self::path::{BackendPath, Decided, Gathered, Waiting};
use self::stream::BackendConnection;
use crate::base::metrics::ServiceCounters;
use crate::base::topology::{Backend, Service, Sockets};
use crate::service::ends::{MqueueEnds, OtherEnds};

/// Key before the service is installed, which issues the keys.
const NO_KEY: StreamKey = StreamKey::MAX;

/// One client mqueue of this worker.
pub(crate) struct ClientMqueue {
    /// Number of the block's server mqueue in the service share.
    pub(crate) server: u32,
    pub(crate) backend: u16,
    /// Its number in the region.
    pub(crate) region_mqueue: u32,
    rx: Producer<MappedMemory>,
    tx: Consumer<MappedMemory>,
    rx_pending: bool,
    alive: bool,
    /// Requests taken whose answer is not in the RX ring yet.
    in_flight: u32,
    /// Time since which the request at the head of the TX ring cannot be taken; 0 when it can.
    blocked_since_ns: u64,
    /// Listed for another try in the next turn.
    pub(crate) is_listed: bool,
    pub(crate) key: StreamKey,
    datagram: DatagramSocket,
    /// How often the block of this mqueue has ended, and how many requests it has shown.
    generation: u32,
    shown: u64,
    waiting: Waiting,
}

impl ClientMqueue {
    pub(crate) fn new(server: u32, backend: u16, ends: MqueueEnds) -> Self {
        Self {
            server,
            backend,
            region_mqueue: ends.mqueue,
            rx: ends.rx,
            tx: ends.tx,
            rx_pending: false,
            alive: true,
            in_flight: 0,
            blocked_since_ns: 0,
            is_listed: false,
            key: NO_KEY,
            datagram: DatagramSocket::default(),
            generation: 0,
            shown: 0,
            waiting: Waiting::default(),
        }
    }

    /// Installs the rings of the accelerator's next generation; nothing of the last one is outstanding.
    pub(crate) fn replace_rings(&mut self, ends: MqueueEnds) {
        self.region_mqueue = ends.mqueue;
        (self.rx, self.tx) = (ends.rx, ends.tx);
        (self.rx_pending, self.alive) = (false, true);
        (self.in_flight, self.blocked_since_ns) = (0, 0);
        self.waiting.is_one = false;
    }

    /// Whether its first request cannot be taken and has been waiting for longer than `timeout_ns`.
    fn is_overdue(&self, now_ns: u64, timeout_ns: u64) -> bool {
        self.blocked_since_ns != 0 && now_ns.saturating_sub(self.blocked_since_ns) > timeout_ns
    }

    /// Marks the RX ring as rung; returns whether it was marked already.
    pub(crate) fn rx_pending(&mut self) -> bool {
        std::mem::replace(&mut self.rx_pending, true)
    }

    pub(crate) fn publish(&mut self) {
        self.rx.publish();
        self.rx_pending = false;
    }
}

/// The connections of one backend on this worker.
pub(crate) struct BackendPool {
    address: SocketAddr,
    transport: Transport,
    framing: Framing,
    matching: Option<MatchId>,
    /// Every request has its own socket.
    per_request: bool,
    timeout_ns: u64,
    in_flight_max: usize,
    max_message_bytes: usize,
    pub(crate) connections: Vec<BackendConnection>,
    dirty: Vec<u16>,
    /// Datagram sockets that are open.
    sockets: usize,
    /// A datagram under assembly.
    datagram: Vec<u8>,
    /// The functions between it and kernels, if there are any.
    path: Option<Box<BackendPath>>,
}

impl BackendPool {
    pub(crate) fn new(backend: &Backend) -> Self {
        let per_request = backend.sockets == Sockets::PerRequest;
        let (count, places) = match (backend.transport, per_request) {
            _ if backend.does_transfers() => (0, 0),
            (Transport::Udp, _) => (0, 0),
            (Transport::Tcp, false) => (backend.connections, backend.in_flight),
            (Transport::Tcp, true) => (backend.in_flight, 1),
        };
        Self {
            address: backend.address,
            transport: backend.transport,
            framing: backend.framing,
            matching: backend.matching,
            per_request,
            timeout_ns: backend.timeout_ms * 1_000_000,
            in_flight_max: backend.in_flight as usize,
            max_message_bytes: backend.max_message_bytes as usize,
            connections: (0..count).map(|_| BackendConnection::new(places as usize)).collect(),
            dirty: Vec::with_capacity(count as usize),
            sockets: 0,
            datagram: Vec::new(),
            path: None,
        }
    }

    /// The id of a message, for backends with ids; `None` if the message is too short.
    fn id_of(&self, message: &[u8]) -> Option<u64> {
        self.matching.map_or(Some(0), |id| id.of(message))
    }
}

/// The client mqueues of one service on one worker, and their backends.
pub(crate) struct Backends {
    worker: u16,
    counters: Arc<ServiceCounters>,
    pub(crate) clients: Vec<ClientMqueue>,
    pub(crate) pools: Vec<BackendPool>,
    /// Numbers of the backends, which each block has a client mqueue for.
    numbers: Box<[u16]>,
    /// Client mqueues whose TX ring could not be emptied this turn, and those of the last turn.
    blocked: Vec<u32>,
    retried: Vec<u32>,
    /// Client mqueues whose RX ring got answers: their blocks must be rung.
    rung: Vec<u32>,
    /// Client mqueues whose block wrote impossible ring words.
    corrupt: Vec<u32>,
}

impl Backends {
    /// Of a service that has some.
    pub(crate) fn new(
        worker: u16,
        service: &Service,
        ends: &mut [OtherEnds],
        counters: &Arc<ServiceCounters>,
    ) -> Option<Box<Self>> {
        let numbers = service.backends.iter().zip(0..).filter(|(of, _)| !of.does_transfers());
        let numbers: Box<[u16]> = numbers.map(|(_, number)| number).collect();
        if numbers.is_empty() {
            return None;
        }
        let mut clients = Vec::new();
        for of in ends {
            for (backend, ends) in numbers.iter().zip(of.take_clients(&numbers)) {
                clients.push(ClientMqueue::new(of.server, *backend, ends));
            }
        }
        Some(Box::new(Self {
            worker,
            counters: counters.clone(),
            pools: service.backends.iter().map(BackendPool::new).collect(),
            numbers,
            blocked: Vec::with_capacity(clients.len()),
            retried: Vec::with_capacity(clients.len()),
            rung: Vec::with_capacity(clients.len()),
            corrupt: Vec::new(),
            clients,
        }))
    }

    /// The client mqueue that has a role of a block.
    fn client_of(&self, role: Role, block: u32) -> Option<u32> {
        let Role::Client(backend) = role else { return None };
        let at = self.numbers.iter().position(|number| u32::from(*number) == backend)?;
        Some(block * self.numbers.len() as u32 + at as u32)
    }

    /// The client mqueues of these blocks.
    fn clients_of(&self, blocks: &Range<u32>) -> Range<u32> {
        let count = self.numbers.len() as u32;
        blocks.start * count..blocks.end * count
    }

    /// Installs the rings of the accelerator's next generation.
    fn replace_rings(&mut self, ends: &mut [OtherEnds]) {
        for of in ends {
            let first = of.server as usize * self.numbers.len();
            for (at, ends) in (first..).zip(of.take_clients(&self.numbers)) {
                self.clients[at].replace_rings(ends);
            }
        }
    }

    /// The blocked client mqueues become the retried ones; the list of blocked ones is empty again.
    pub(crate) fn take_blocked(&mut self) {
        std::mem::swap(&mut self.blocked, &mut self.retried);
        self.blocked.clear();
        // Another one is first each turn, since the first may use up all free places.
        if !self.retried.is_empty() {
            self.retried.rotate_left(1);
        }
        for client in &self.retried {
            self.clients[*client as usize].is_listed = false;
        }
    }

    /// Whether a client mqueue could not be emptied, or a block must be rung.
    pub(crate) fn has_work(&self) -> bool {
        !self.blocked.is_empty() || !self.rung.is_empty()
    }

    /// Whether blocks must be rung.
    #[inline]
    pub(crate) fn has_rung(&self) -> bool {
        !self.rung.is_empty()
    }

    /// Publishes answers: calls `ring` with the server mqueue and the mqueue of each block that got
    /// some.
    fn publish(&mut self, mut ring: impl FnMut(u32, u32)) {
        for client in self.rung.drain(..) {
            let client = &mut self.clients[client as usize];
            client.publish();
            ring(client.server, client.region_mqueue);
        }
    }

    /// The server mqueues of blocks that wrote impossible words into the rings of a client mqueue.
    pub(crate) fn take_corrupt(&mut self) -> impl Iterator<Item = u32> + '_ {
        let Self { corrupt, clients, .. } = self;
        corrupt.drain(..).map(|client| clients[client as usize].server)
    }

    /// The keys of all sockets.
    pub(crate) fn keys(&self) -> impl Iterator<Item = StreamKey> + '_ {
        let connections = self.pools.iter().flat_map(|pool| &pool.connections);
        let connections = connections.map(|connection| connection.key);
        self.clients.iter().map(|client| client.key).chain(connections)
    }

    /// Gives the path to a backend these functions, in this order; returns those that it no longer has.
    pub(crate) fn arrange_path(&mut self, backend: u16, order: Vec<Arranged>) -> Vec<Link> {
        let Some(pool) = self.pools.get_mut(usize::from(backend)) else {
            return Chain::default().arrange(order);
        };
        let bytes = pool.max_message_bytes;
        let path = pool.path.get_or_insert_with(|| Box::new(BackendPath::new(self.worker, bytes)));
        let former = path.arrange(order);
        if path.chain().is_empty() {
            pool.path = None;
        }
        former
    }

    /// The chain on the path to a backend.
    pub(crate) fn chain_of(&mut self, backend: u16) -> Option<&mut Chain> {
        let path = self.pools.get_mut(usize::from(backend))?.path.as_mut()?;
        Some(path.chain())
    }

    /// Time that functions have taken since the last call.
    pub(crate) fn take_function_ns(&mut self) -> u64 {
        let paths = self.pools.iter_mut().filter_map(|pool| pool.path.as_mut());
        paths.map(|path| path.chain().take_spent_ns()).sum()
    }

    /// Takes the requests that a block wrote into a client mqueue's TX ring.
    pub(crate) fn take_backend_requests<N: Nic>(
        &mut self,
        nic: &mut N,
        client: u32,
        (now_ns, clock): (u64, &dyn Fn() -> u64),
        scratch: &mut [u8],
    ) {
        loop {
            let entry = &mut self.clients[client as usize];
            if !entry.alive {
                return;
            }
            let header = match entry.tx.peek() {
                Ok(Some(header)) => header,
                Ok(None) => break,
                Err(RingError::BadHeader) => {
                    self.counters.drop_one(DropReason::BadMessage);
                    entry.tx.advance();
                    continue;
                }
                Err(RingError::Corrupt) => return self.corrupt_client(client),
            };
            if header.kind != abi::kind::MESSAGE {
                self.counters.drop_one(DropReason::BadMessage);
                entry.tx.advance();
                continue;
            }
            let Ok(room) = entry.rx.room() else { return self.corrupt_client(client) };
            let backend = entry.backend as usize;
            let pool = &self.pools[backend];
            let overdue = entry.is_overdue(now_ns, pool.timeout_ns);
            // Requests that wait for a place are tried every turn: nothing is copied for that. Functions may answer one that has no place.
            let is_full = pool.is_full_for(&entry.datagram) || pool.is_full();
            let waits = is_full && !overdue;
            let shows = pool.path.is_some() && !entry.waiting.is_one;
            let payload = &mut scratch[..header.len as usize];
            let copies = !entry.waiting.is_one;
            if waits && !shows
                || room <= entry.in_flight
                || copies && !shows && !entry.tx.copy_out(&header, payload)
            {
                return self.block_client(client, now_ns);
            }
            if shows {
                // It ends, or waits: it is looked at again.
                match self.gather_request(client, clock) {
                    Gathering::Done => self.show_requests(backend, clock),
                    Gathering::Later => return self.block_client(client, now_ns),
                    Gathering::TooLong => {
                        self.take_decision(client, header.tag, &Decided::Dropped);
                        self.clients[client as usize].tx.advance();
                    }
                }
                continue;
            }
            let taken = if copies {
                self.send_or_fail(nic, client, header.tag, payload, now_ns, overdue)
            } else {
                self.send_waiting(nic, client, header.tag, now_ns, overdue)
            };
            if !taken {
                return self.block_client(client, now_ns);
            }
            let entry = &mut self.clients[client as usize];
            entry.blocked_since_ns = 0;
            entry.tx.advance();
        }
        self.clients[client as usize].tx.release();
    }

    /// Whether functions are on the path to a backend.
    pub(crate) fn has_paths(&self) -> bool {
        self.pools.iter().any(|pool| pool.path.is_some())
    }

    /// The request at the head of a client mqueue's TX ring joins the batch of its backend's functions. What is no request is left there, and one
    /// without room for its answer.
    pub(crate) fn gather_request(&mut self, client: u32, clock: &dyn Fn() -> u64) -> Gathering {
        let entry = &mut self.clients[client as usize];
        let backend = entry.backend as usize;
        if !entry.alive || entry.waiting.is_one || entry.waiting.is_gathered {
            return Gathering::Later;
        }
        let (Ok(Some(header)), Ok(room)) = (entry.tx.peek(), entry.rx.room()) else {
            return Gathering::Later;
        };
        if header.kind != abi::kind::MESSAGE || room <= entry.in_flight {
            return Gathering::Later;
        }
        let len = header.len as usize;
        if self.pools[backend].path.as_ref().is_some_and(|path| !path.has_room(len)) {
            self.show_requests(backend, clock);
        }
        let entry = &mut self.clients[client as usize];
        let Some(path) = &mut self.pools[backend].path else { return Gathering::Later };
        if !path.has_room(len) {
            return Gathering::TooLong;
        }
        let number = entry.shown + 1;
        let message = Gathered { client: (client, entry.generation), number, tag: header.tag };
        if !path.gather(message, len, |into| entry.tx.copy_out(&header, into)) {
            return Gathering::Later;
        }
        entry.shown = number;
        entry.waiting.is_gathered = true;
        Gathering::Done
    }

    /// Shows the requests that were gathered, for all backends.
    pub(crate) fn show_gathered(&mut self, clock: &dyn Fn() -> u64) {
        (0..self.pools.len()).for_each(|backend| self.show_requests(backend, clock));
    }

    /// Shows the requests that were gathered for a backend. Each of them either ends, or is the one of its mqueue that waits.
    fn show_requests(&mut self, backend: usize, clock: &dyn Fn() -> u64) {
        let Some(mut path) = self.pools[backend].path.take() else { return };
        for at in 0..path.show(Direction::Requests, clock) {
            let (message, decided) = path.decided(Direction::Requests, at);
            let client = message.client.0;
            self.clients[client as usize].waiting.is_gathered = false;
            if self.take_decision(client, message.tag, &decided) {
                let entry = &mut self.clients[client as usize];
                entry.blocked_since_ns = 0;
                entry.tx.advance();
                path.decided_alone(message.client, message.number);
            }
        }
        path.clear();
        self.pools[backend].path = Some(path);
    }

    /// What functions have decided about a request. Whether that is its end; otherwise it is the one that waits.
    fn take_decision(&mut self, client: u32, tag: u64, decided: &Decided<'_>) -> bool {
        let entry = &mut self.clients[client as usize];
        let (status, answer) = match *decided {
            Decided::Passed(bytes) => {
                entry.waiting.is_one = true;
                entry.waiting.bytes.clear();
                entry.waiting.bytes.extend_from_slice(bytes);
                return false;
            }
            Decided::Answered(bytes) => (status::OK, bytes),
            Decided::Dropped => {
                self.counters.drop_one(DropReason::BackendFunction);
                (status::REFUSED, &b""[..])
            }
        };
        entry.in_flight += 1;
        self.answer(client, tag, status, answer);
        true
    }

    /// Sends the request that functions have let pass, as they have left it. Whether it was taken.
    fn send_waiting<N: Nic>(
        &mut self,
        nic: &mut N,
        client: u32,
        tag: u64,
        now_ns: u64,
        overdue: bool,
    ) -> bool {
        let entry = &mut self.clients[client as usize];
        let payload = std::mem::take(&mut entry.waiting.bytes);
        let taken = self.send_or_fail(nic, client, tag, &payload, now_ns, overdue);
        let entry = &mut self.clients[client as usize];
        entry.waiting.bytes = payload;
        entry.waiting.is_one &= !taken;
        taken
    }

    /// Sends a request, or answers it with the reason why that fails. False: it has no place yet.
    fn send_or_fail<N: Nic>(
        &mut self,
        nic: &mut N,
        client: u32,
        tag: u64,
        payload: &[u8],
        now_ns: u64,
        overdue: bool,
    ) -> bool {
        let status = match self.send_to_backend(nic, client, tag, payload, now_ns) {
            Sending::Sent => {
                self.counters.backend_sent.one();
                return true;
            }
            Sending::Failed(status) => status,
            Sending::Busy if overdue => {
                self.counters.backend_timeouts.one();
                status::TIMEOUT
            }
            Sending::Busy => return false,
        };
        let number = self.clients[client as usize].shown;
        self.tell_ended(client, number, End::Unsent);
        self.clients[client as usize].in_flight += 1;
        self.answer(client, tag, status, &[]);
        true
    }

    /// No answer to a request will be shown to functions.
    fn tell_ended(&mut self, client: u32, number: u64, end: End) {
        let entry = &self.clients[client as usize];
        if let Some(path) = &mut self.pools[entry.backend as usize].path {
            path.ended((client, entry.generation), number, end);
        }
    }

    /// The answer of a backend to a request: functions see it first, with those that [`Self::show_answers`] shows.
    fn gather_answer(
        &mut self,
        (client, number, tag): (u32, u64, u64),
        payload: &[u8],
        clock: &dyn Fn() -> u64,
    ) {
        let entry = &self.clients[client as usize];
        let (of, backend) = ((client, entry.generation), entry.backend as usize);
        if self.pools[backend].path.as_ref().is_some_and(|path| !path.has_room(payload.len())) {
            self.show_answers(backend, clock);
        }
        let Some(path) = &mut self.pools[backend].path else {
            return self.answer(client, tag, status::OK, payload);
        };
        if !path.has_room(payload.len()) {
            self.counters.drop_one(DropReason::BackendFunction);
            return self.answer(client, tag, status::PROTOCOL, &[]);
        }
        path.gather(Gathered { client: of, number, tag }, payload.len(), |into| {
            into.copy_from_slice(payload);
            true
        });
    }

    /// Shows the answers that were gathered from a backend, and delivers them.
    fn show_answers(&mut self, backend: usize, clock: &dyn Fn() -> u64) {
        let Some(mut path) = self.pools[backend].path.take() else { return };
        for at in 0..path.show(Direction::Replies, clock) {
            let (message, decided) = path.decided(Direction::Replies, at);
            let client = message.client.0;
            match decided {
                Decided::Passed(bytes) | Decided::Answered(bytes) => {
                    self.answer(client, message.tag, status::OK, bytes);
                }
                Decided::Dropped => {
                    self.counters.drop_one(DropReason::BackendFunction);
                    self.answer(client, message.tag, status::PROTOCOL, &[]);
                }
            }
        }
        path.clear();
        self.pools[backend].path = Some(path);
    }

    /// A request was sent, and is answered with this status.
    fn fail_sent(&mut self, (client, number, tag): (u32, u64, u64), status: u8) {
        self.tell_ended(client, number, End::Unknown);
        self.answer(client, tag, status, &[]);
    }

    /// The block wrote impossible ring words. Its server mqueue is closed too: the worker's housekeeping ends the
    /// requests there.
    fn corrupt_client(&mut self, client: u32) {
        self.clients[client as usize].alive = false;
        self.corrupt.push(client);
    }

    fn block_client(&mut self, client: u32, now_ns: u64) {
        let entry = &mut self.clients[client as usize];
        if entry.blocked_since_ns == 0 {
            entry.blocked_since_ns = now_ns.max(1);
        }
        entry.tx.release();
        if !std::mem::replace(&mut entry.is_listed, true) {
            self.blocked.push(client);
        }
    }

    fn send_to_backend<N: Nic>(
        &mut self,
        nic: &mut N,
        client: u32,
        tag: u64,
        payload: &[u8],
        now_ns: u64,
    ) -> Sending {
        let entry = &mut self.clients[client as usize];
        let pool = &mut self.pools[entry.backend as usize];
        let Some(id) = pool.id_of(payload) else { return Sending::Failed(status::PROTOCOL) };
        let number = entry.shown;
        let sent = match pool.transport {
            Transport::Udp => pool.send_datagram(nic, entry, (tag, number, id), payload, now_ns),
            Transport::Tcp => pool.send_on_stream(nic, (client, number, tag), id, payload, now_ns),
        };
        if matches!(sent, Sending::Sent) {
            entry.in_flight += 1;
        }
        sent
    }

    /// Puts the answer to a request into its client mqueue's RX ring.
    fn answer(&mut self, client: u32, tag: u64, status: u8, payload: &[u8]) {
        let entry = &mut self.clients[client as usize];
        entry.in_flight -= 1;
        if !entry.alive {
            return;
        }
        let head = Head { token: 0, tag, kind: abi::kind::MESSAGE, status };
        let mut pushed = entry.rx.push(head, payload);
        if pushed == Err(LoanError::TooLong) {
            self.counters.drop_one(DropReason::BackendTooLong);
            // The block is rung as well: it waits for exactly one answer.
            pushed = entry.rx.push(Head { status: status::TOO_LONG, ..head }, &[]);
        }
        // There is room for every answer, unless the block has broken the ring.
        if pushed.is_err() {
            return self.corrupt_client(client);
        }
        self.counters.backend_answered.one();
        if !self.clients[client as usize].rx_pending() {
            self.rung.push(client);
        }
    }

    /// The blocks of these client mqueues have ended: answers to their requests keep their places and are discarded.
    pub(crate) fn drop_backend_requests<N: Nic>(&mut self, nic: &mut N, clients: Range<u32>) {
        self.rung.retain(|client| !clients.contains(client));
        self.corrupt.retain(|client| !clients.contains(client));
        for number in clients.clone() {
            let entry = &mut self.clients[number as usize];
            entry.alive = false;
            entry.in_flight = 0;
            entry.waiting.is_one = false;
            let pool = &mut self.pools[entry.backend as usize];
            pool.close_datagrams(nic, entry);
            if let Some(path) = &mut pool.path {
                path.gone((number, entry.generation));
            }
            entry.generation = entry.generation.wrapping_add(1);
        }
        let connections = self.pools.iter_mut().flat_map(|pool| &mut pool.connections);
        connections.for_each(|connection| connection.drop_outstanding(&clients));
    }

    /// Times out requests and connection attempts.
    pub(crate) fn expire_backends<N: Nic>(&mut self, nic: &mut N, now_ns: u64) {
        for path in self.pools.iter_mut().filter_map(|pool| pool.path.as_mut()) {
            path.tick(now_ns);
        }
        self.expire_streams(nic, now_ns);
        self.expire_datagrams(nic, now_ns);
    }

    /// Whether requests of blocks to backends are not answered, or not even taken. Requests of ended blocks do not
    /// count.
    pub(crate) fn waits(&self, is_alive: impl Fn(u32) -> bool) -> bool {
        let waits = |c: &ClientMqueue| c.in_flight > 0 || c.is_listed;
        self.clients.iter().any(|c| waits(c) && is_alive(c.server))
    }

    /// Requests to backends without an answer.
    pub(crate) fn is_busy(&self) -> bool {
        self.clients.iter().any(|c| c.in_flight > 0)
    }
}

/// The status of a request that its framing refused.
fn refusal(error: FramingError) -> Sending {
    let too_long = error == FramingError::TooLong;
    Sending::Failed(if too_long { status::TOO_LONG } else { status::PROTOCOL })
}

/// Whether a request has joined a batch.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Gathering {
    Done,
    /// There is none that can be taken now.
    Later,
    /// No batch has room for it.
    TooLong,
}

/// The result of sending a request to a backend.
enum Sending {
    Sent,
    /// Answer with this status.
    Failed(u8),
    /// Later: all connections are full.
    Busy,
}
