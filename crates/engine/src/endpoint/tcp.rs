//! TCP ports: connections of clients, their requests in and their replies out.
//!
//! | step | where |
//! |---|---|
//! | accept, adopt | `tcp/accept.rs` |
//! | read, parse, admit | `tcp/read.rs` |
//! | settle, write, close | `tcp/write.rs` |
//! | the same for bytes that go to an upstream server as they come | `tcp/relay.rs` |
//! | one connection: its bytes, and the order of its replies | `tcp/connection.rs` |
//! | what a service sets for its connections | `tcp/terms.rs` |

mod accept;
pub(crate) mod connection;
mod read;
mod relay;
pub(crate) mod terms;
mod write;

use wire::DropReason;
use wire::nic::{Close, Nic, PortIndex, StreamKey};
use wire::session::{EndpointKind, Origin, ReplyTo};

use self::connection::{Connections, Pool, Reading};
use self::terms::Terms;
use crate::admit::servers::Servers;
use crate::base::arrival::Awaited;
use crate::base::topology::Limits;
use crate::base::turn::Turn;
use crate::depart::run::{Next, Run};
use crate::endpoint::Endpoint;
use crate::endpoint::held::{Held, Waiter};
use crate::endpoint::port::Port;
use crate::schedule::Schedule;
use crate::service::services::Services;

/// Housekeeping checks one of this many parts of the connections at a time for time-outs: a busy worker, which does so
/// every millisecond, finds one within 64 ms, a sleeping one within 64 times [`SLEEP_NS_MAX`], 1.6 s. The documentation
/// of `idle_s` and `slow_client_ms` has this number.
const SWEEP_PARTS: usize = 64;
/// Maximum sleep of a worker with open connections: housekeeping finds their time-outs.
const SLEEP_NS_MAX: u64 = 25_000_000;

/// Connections of a worker for which there is room at the start, the default limit: those that come and go allocate nothing. The host
/// kernel gives the memory when it is used.
const ROOM: usize = 16_384;

/// Limits for connections.
#[derive(Clone, Copy, Debug)]
struct TcpLimits {
    connections: u32,
    pipelined: u32,
    idle_ns: u64,
    slow_client_ns: u64,
    early_bytes: usize,
}

impl TcpLimits {
    fn new(limits: &Limits) -> Self {
        Self {
            connections: limits.connections,
            pipelined: limits.pipelined,
            idle_ns: limits.idle_ms * 1_000_000,
            slow_client_ns: limits.slow_client_ms * 1_000_000,
            early_bytes: limits.early_reply_bytes,
        }
    }
}

/// The TCP ports and connections of one worker.
pub(crate) struct TcpConnections {
    /// By port index; indices of other ports are vacant.
    listeners: Vec<Port>,
    /// Whether one of them may be ready.
    is_accepting: bool,
    table: Connections,
    pool: Pool,
    limits: TcpLimits,
    /// By slot.
    terms: Vec<Terms>,
    /// Connections with data to read or parse, each once, and those with data to write.
    to_read: Vec<Waiter>,
    /// Connections that wait for their tenant's next part, or until it is below its limits.
    held: Held,
    to_write: Vec<StreamKey>,
    /// The next connection that housekeeping checks.
    sweep_at: usize,
}

impl TcpConnections {
    pub(crate) fn new(limits: &Limits) -> Self {
        let room = ROOM.min(limits.connections as usize);
        Self {
            listeners: Vec::new(),
            is_accepting: false,
            table: Connections::with_room(room),
            pool: Pool::new(),
            limits: TcpLimits::new(limits),
            terms: Vec::new(),
            // Each may be listed twice while it is written.
            to_read: Vec::with_capacity(room),
            held: Held::default(),
            to_write: Vec::with_capacity(2 * room),
            sweep_at: 0,
        }
    }

    /// Sets the limits. Open connections keep their window; the maximum number of connections does not change.
    pub(crate) fn set_limits(&mut self, limits: &Limits) {
        let connections = self.limits.connections;
        self.limits = TcpLimits { connections, ..TcpLimits::new(limits) };
    }

    /// A service comes, in this slot.
    pub(crate) fn place_service(&mut self, slot: usize, terms: Terms) {
        self.table.make_room_for(slot);
        self.held.make_room_for(slot);
        let count = self.terms.len().max(slot + 1);
        self.terms.resize_with(count, Terms::default);
        self.terms[slot] = terms;
    }

    /// Moves the connections of one service to another with the same protocol.
    pub(crate) fn move_to(&mut self, from: u16, to: u16) {
        self.release_held(from);
        self.table.move_to(from, to);
    }

    /// Open connections, and those of one service.
    pub(crate) fn open_count(&self) -> usize {
        self.table.open_count()
    }

    pub(crate) fn open_of(&self, service: u16) -> u32 {
        self.table.open_of(service)
    }

    /// A connection can be read.
    pub(crate) fn readable(&mut self, key: StreamKey) {
        if let Some(connection) = self.table.at(key) {
            connection.readable = true;
            self.list_to_read(key);
        }
    }

    /// A connection can be written.
    pub(crate) fn writable(&mut self, key: StreamKey) {
        self.list_to_write(key);
    }

    fn list_to_read(&mut self, key: StreamKey) {
        let Some(connection) = self.table.at(key) else { return };
        if !std::mem::replace(&mut connection.listed, true) {
            self.to_read.push((key, connection.generation));
        }
    }

    /// Connections of a service are looked at in the next turn, though its tenant may have to wait.
    fn release_held(&mut self, service: u16) {
        self.to_read.extend(self.held.take_all(service));
    }

    fn list_to_write(&mut self, key: StreamKey) {
        let Some(connection) = self.table.at(key) else { return };
        if !std::mem::replace(&mut connection.dirty, true) {
            self.to_write.push(key);
        }
    }

    /// Whether the replies to the requests of a client up to this one have been sent; `None` if the client is gone.
    pub(crate) fn has_sent(&mut self, to: &ReplyTo, number: u64) -> Option<bool> {
        let connection = self.table.in_generation(to.key, to.generation)?;
        Some(connection.has_sent(number))
    }

    /// Closes the connections of a service; replies due to them are lost for this reason.
    pub(crate) fn close_all<N: Nic>(
        &mut self,
        turn: &mut Turn<N>,
        services: &mut Services,
        servers: &mut impl Servers<N>,
        service: u16,
        reason: DropReason,
    ) {
        for key in 0..self.table.len() as StreamKey {
            if self.table.at(key).is_some_and(|connection| connection.service == service) {
                self.end_connection(turn, services, servers, key, Close::Graceful, reason);
            }
        }
    }

    /// Once a millisecond: checks a part of the connections for clients that are idle or do not read.
    pub(crate) fn sweep<N: Nic>(
        &mut self,
        turn: &mut Turn<N>,
        services: &mut Services,
        servers: &mut impl Servers<N>,
    ) {
        let TcpLimits { idle_ns, slow_client_ns, .. } = self.limits;
        for _ in 0..self.table.len().div_ceil(SWEEP_PARTS) {
            if self.sweep_at >= self.table.len() {
                self.sweep_at = 0;
            }
            let key = self.sweep_at as StreamKey;
            self.sweep_at += 1;
            let Some(connection) = self.table.at(key) else { continue };
            let share = &services[usize::from(connection.service)];
            let blocked_ns = connection.blocked_since_ns;
            let is_slow =
                blocked_ns != 0 && turn.now_ns.saturating_sub(blocked_ns) > slow_client_ns;
            let silent_ns = turn.now_ns.saturating_sub(connection.last_message_ns);
            let terms = &self.terms[usize::from(connection.service)];
            let idle_ns = terms.idle_ns.unwrap_or(idle_ns);
            if is_slow {
                self.end_connection(
                    turn,
                    services,
                    servers,
                    key,
                    Close::Reset,
                    DropReason::SlowClient,
                );
            } else if silent_ns > idle_ns
                && connection.unsettled() == 0
                && connection.reading != Reading::Stalled
                && !share.is_paused()
            {
                share.count_lost(DropReason::IdleTimeout, 1);
                self.close_connection(turn, services, servers, key, Close::Graceful);
            }
        }
    }
}

impl<N: Nic> Endpoint<N> for TcpConnections {
    /// New connections, and one read from every connection that may have data.
    #[inline]
    fn receive(
        &mut self,
        turn: &mut Turn<N>,
        services: &mut Services,
        servers: &mut impl Servers<N>,
        schedule: &mut Schedule,
    ) {
        if self.is_accepting {
            self.accept(turn, services, servers, schedule.round());
        }
        if !self.to_read.is_empty() || !self.held.is_empty() {
            self.read_connections(turn, services, servers, schedule);
        }
    }

    #[inline(never)]
    fn deliver(&mut self, turn: &mut Turn<N>, services: &mut Services, run: &mut Run) -> Next {
        loop {
            let request = *services[run.service].sessions.found(run.token());
            let Origin::Client(to) = request.origin else { return Next::Reply };
            if (to.endpoint, to.worker) != (EndpointKind::Tcp, turn.index) {
                return Next::Reply;
            }
            let mut scratch = std::mem::take(&mut turn.scratch);
            let share = &mut services[run.service];
            let payload = run.copy_out(share, &mut scratch);
            if let Some(payload) = payload {
                share.end_request(run.token(), &request, true);
                let awaited = Awaited { to, number: request.number, expects: request.expects };
                self.settle(turn, services, run.service, &awaited, Ok(payload));
            }
            let arrived = payload.is_some();
            turn.scratch = scratch;
            let share = &mut services[run.service];
            if !arrived {
                return run.block(share);
            }
            run.advance(share);
            match run.next_after_others(turn, services) {
                Next::Reply => {}
                next => return next,
            }
        }
    }

    fn settle(
        &mut self,
        _: &mut Turn<N>,
        services: &mut Services,
        service: usize,
        request: &Awaited,
        outcome: Result<&[u8], DropReason>,
    ) {
        match outcome {
            Ok(payload) => self.deliver_payload(services, service, request, payload),
            Err(reason) => self.deliver_loss(services, service, request, reason),
        }
    }

    #[inline]
    fn flush(
        &mut self,
        turn: &mut Turn<N>,
        services: &mut Services,
        servers: &mut impl Servers<N>,
        _: bool,
    ) {
        if self.to_write.is_empty() {
            return;
        }
        let listed = self.to_write.len();
        for index in 0..listed {
            // This may list the connection again, behind the others.
            self.write(turn, services, servers, self.to_write[index]);
        }
        self.to_write.drain(..listed);
    }

    fn pause(&mut self, turn: &mut Turn<N>, service: u16, paused: bool) {
        for (index, port) in self.listeners_mut().filter(|(_, port)| port.is_of(service)) {
            port.pause(turn, index, paused);
        }
        self.release_held(service);
        if paused {
            return;
        }
        for key in 0..self.table.len() as StreamKey {
            if self.table.at(key).is_some_and(|connection| connection.service == service) {
                // A client that was not read is not idle.
                self.table.change(key, |connection| connection.last_message_ns = turn.now_ns);
                self.list_to_read(key);
            }
        }
    }

    fn leave(
        &mut self,
        turn: &mut Turn<N>,
        services: &mut Services,
        servers: &mut impl Servers<N>,
        service: Option<u16>,
    ) {
        match service {
            Some(service) => self.release_held(service),
            None => (0..self.held.services()).for_each(|service| self.release_held(service)),
        }
        self.stop_reading(turn, services, servers, service);
    }

    fn outstanding(&self, service: u16) -> u64 {
        self.table.replies_waiting(service)
    }

    fn wake_at(&self, now_ns: u64, _: &Services) -> u64 {
        let listening = self.listeners.iter().any(Port::is_readable);
        if listening || !self.to_read.is_empty() || self.held.is_due() || !self.to_write.is_empty()
        {
            0
        } else if self.table.open_count() > 0 {
            now_ns + SLEEP_NS_MAX
        } else {
            u64::MAX
        }
    }
}

impl TcpConnections {
    /// A port reported an arrival.
    pub(crate) fn set_ready(&mut self, index: PortIndex) {
        self.listeners[usize::from(index)].ready = true;
        self.is_accepting = true;
    }
}
