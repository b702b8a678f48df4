//! All endpoints of one worker, and the steps of a turn over them.

use std::ops::Range;
use std::sync::Arc;

use onpath::{Arranged, Chain, CommandError, Link};
use wire::DropReason;
use wire::nic::{Close, Event, Nic, PortIndex, RxBatch, StreamKey};
use wire::session::{Origin, ReplyTo};

use crate::admit::servers::{NoServers, Relayed, Servers};
use crate::base::arrival::{Arrival, Message, Refusal};
use crate::base::keys::StreamOwner;
use crate::base::metrics::ServiceCounters;
use crate::base::topology::{Limits, Replies, Service};
use crate::base::turn::Turn;
use crate::depart::Depart;
use crate::endpoint::backend::{Backends, KernelBackends};
use crate::endpoint::clients::Clients;
use crate::endpoint::sockets::{KernelSockets, Sockets};
use crate::endpoint::transfers::{KernelTransfers, ServiceTransfers};
use crate::endpoint::upstream::{Upstream, Upstreams};
use crate::endpoint::{Endpoint, PerService};
use crate::schedule::Schedule;
use crate::service::chain::{ChainPlace, ChainReply, ChainRequest};
use crate::service::ends::{OtherEnds, ShareMqueue};
use crate::service::services::Services;
use crate::service::share::{HEADS_READ, ServiceShare};

/// See the module documentation.
pub(crate) struct Endpoints {
    pub(crate) clients: Clients,
    pub(crate) servers: ServerSide,
}

/// The endpoints without clients: what services and their blocks use.
#[derive(Default)]
pub(crate) struct ServerSide {
    transfers: KernelTransfers,
    backends: KernelBackends,
    upstreams: Upstreams,
    pub(crate) sockets: KernelSockets,
}

/// What these endpoints have of one service.
pub(crate) struct Parts {
    transfers: Option<Box<ServiceTransfers>>,
    backends: Option<Box<Backends>>,
    upstream: Option<Box<Upstream>>,
    sockets: Option<Box<Sockets>>,
}

impl Parts {
    /// Of one worker. Each endpoint takes its rings out of `ends`.
    pub(crate) fn new(
        service: &Service,
        worker: u16,
        mut ends: Vec<OtherEnds>,
        counters: &Arc<ServiceCounters>,
    ) -> Self {
        Self {
            transfers: ServiceTransfers::new(service, &mut ends, counters),
            backends: Backends::new(worker, service, &mut ends, counters),
            upstream: Upstream::new(service, counters),
            sockets: Sockets::new(service, &mut ends, counters),
        }
    }

    /// Gives the path to a backend these functions.
    pub(crate) fn set_path(&mut self, backend: u16, functions: Vec<Arranged>) {
        if let Some(backends) = &mut self.backends {
            backends.arrange_path(backend, functions);
        }
    }
}

/// Calls the same method on each endpoint without clients.
macro_rules! each {
    ($self:ident . $call:ident ( $($argument:expr),* )) => {
        $self.transfers.$call($($argument),*);
        $self.backends.$call($($argument),*);
        $self.upstreams.$call($($argument),*);
        $self.sockets.$call($($argument),*);
    };
}

/// Folds the results of a method of each endpoint without clients.
macro_rules! fold {
    ($self:ident . $call:ident ( $($argument:expr),* ) $fold:expr) => {{
        let first = Endpoint::<N>::$call(&$self.transfers, $($argument),*);
        let next = $fold(first, Endpoint::<N>::$call(&$self.backends, $($argument),*));
        let next = $fold(next, Endpoint::<N>::$call(&$self.upstreams, $($argument),*));
        $fold(next, Endpoint::<N>::$call(&$self.sockets, $($argument),*))
    }};
}

impl ServerSide {
    fn event<N: Nic>(&mut self, turn: &mut Turn<N>, event: Event, owner: StreamOwner) {
        each!(self.event(turn, event, owner));
    }

    fn take_function_ns<N: Nic>(&mut self, service: usize) -> u64 {
        Endpoint::<N>::take_function_ns(&mut self.backends, service)
    }

    /// Blocks of a service have ended, or their generation has. `are_lost`: the accelerator is.
    pub(crate) fn end_blocks<N: Nic>(
        &mut self,
        turn: &mut Turn<N>,
        service: usize,
        blocks: Range<u32>,
        are_lost: bool,
    ) {
        each!(self.end_blocks(turn, service, blocks.clone(), are_lost));
    }

    /// The same for the blocks of a service whose mqueues are dead.
    pub(crate) fn end_dead_blocks<N: Nic>(
        &mut self,
        turn: &mut Turn<N>,
        share: &ServiceShare,
        service: usize,
    ) {
        for (block, load) in (0..).zip(&share.loads) {
            // For an absent accelerator this was done before, and the rings may already be those of
            // the next generation.
            if !load.alive && !load.absent {
                self.end_blocks(turn, service, block..block + 1, false);
            }
        }
    }

    /// The blocks get the rings of the next generation.
    pub(crate) fn replace_rings<N: Nic>(&mut self, service: usize, ends: &mut [OtherEnds]) {
        Endpoint::<N>::replace_rings(&mut self.transfers, service, ends);
        Endpoint::<N>::replace_rings(&mut self.backends, service, ends);
        Endpoint::<N>::replace_rings(&mut self.sockets, service, ends);
    }

    /// Marks the server mqueues of blocks that wrote impossible words into other rings as corrupt.
    pub(crate) fn note_corrupt<N: Nic>(&mut self, share: &mut ServiceShare, service: usize) {
        Endpoint::<N>::note_corrupt(&mut self.transfers, share, service);
        Endpoint::<N>::note_corrupt(&mut self.backends, share, service);
    }

    /// Whether requests of blocks are not answered, or not even taken.
    pub(crate) fn asks<N: Nic>(&self, share: &ServiceShare, service: usize) -> bool {
        fold!(self.asks(share, service) | one, other | one || other)
    }

    /// Whether these blocks have connections.
    pub(crate) fn is_connected<N: Nic>(&self, service: u16, blocks: &Range<u32>) -> bool {
        fold!(self.is_connected(service, blocks) | one, other | one || other)
    }

    /// Requests of a service in flight without an mqueue.
    pub(crate) fn outstanding<N: Nic>(&self, service: u16) -> u64 {
        fold!(self.outstanding(service) | one, other | one + other)
    }

    fn wake_at<N: Nic>(&self, now_ns: u64, services: &Services) -> u64 {
        fold!(self.wake_at(now_ns, services) u64::min)
    }
}

impl Endpoints {
    pub(crate) fn new(rx: RxBatch, workers: usize, limits: &Limits) -> Self {
        let servers = ServerSide::default();
        Self { clients: Clients::new(rx, workers, limits), servers }
    }

    /// Something happened on the network.
    pub(crate) fn event<N: Nic>(
        &mut self,
        turn: &mut Turn<N>,
        services: &mut Services,
        event: Event,
    ) {
        let Self { clients, servers } = self;
        let key = match event {
            Event::Datagrams(port) => return clients.udp.set_ready(port),
            Event::Connections(port) => return clients.tcp.set_ready(port),
            Event::Readable(key) | Event::Writable(key) | Event::Failed(key) => key,
        };
        match (turn.stream_keys.owner(key), event) {
            (StreamOwner::Connection, Event::Readable(_)) => clients.tcp.readable(key),
            (StreamOwner::Connection, Event::Writable(_)) => clients.tcp.writable(key),
            (StreamOwner::Connection, _) => {
                clients.tcp.close_connection(turn, services, servers, key, Close::Reset);
            }
            (owner, event) => servers.event(turn, event, owner),
        }
    }

    /// Receives from clients and other workers.
    // Always inline: there is one caller, and it runs every turn.
    #[inline(always)]
    pub(crate) fn receive<N: Nic>(
        &mut self,
        turn: &mut Turn<N>,
        services: &mut Services,
        schedule: &mut Schedule,
    ) {
        self.clients.take_replies(turn, services);
        self.clients.receive(turn, services, &mut self.servers, schedule);
    }

    /// Before the blocks are driven.
    #[inline(always)]
    pub(crate) fn before_drive<N: Nic>(
        &mut self,
        turn: &mut Turn<N>,
        services: &mut Services,
        schedule: &mut Schedule,
    ) {
        let Self { servers, .. } = self;
        each!(servers.before_drive(turn, services, schedule));
    }

    /// Empties the rings that may hold messages of blocks: those that the blocks touched, and those
    /// left over from the last turn.
    // Always inline: there is one caller, and it runs every turn.
    #[inline(always)]
    pub(crate) fn gather_all<N: Nic>(
        &mut self,
        turn: &mut Turn<N>,
        services: &mut Services,
        schedule: &mut Schedule,
    ) {
        let all = std::mem::take(&mut services.ticked) || !schedule.is_shared();
        for service in 0..services.len() {
            if all || !services[service].is_proxy() {
                self.gather(turn, services, schedule, service);
            }
        }
    }

    #[inline(always)]
    fn gather<N: Nic>(
        &mut self,
        turn: &mut Turn<N>,
        services: &mut Services,
        schedule: &mut Schedule,
        service: usize,
    ) {
        let Self { clients, servers } = self;
        let before = schedule.is_shared().then(|| services[service].in_flight());
        services[service].take_blocked();
        for index in 0..services[service].retried.len() {
            let mqueue = services[service].retried[index];
            let shown = services[service].shown(mqueue);
            clients.gather_replies(turn, services, servers, service, mqueue, shown);
        }
        each!(servers.gather(turn, services, service));
        for drive in 0..services[service].accelerators.len() {
            let count = services[service].accelerators[drive].tx_pending.len();
            for first in (0..count).step_by(HEADS_READ) {
                let shown = services[service].read_heads(drive, first);
                for (index, shown) in (first..count).zip(shown) {
                    let share = &services[service];
                    share.fetch_ahead(drive, index);
                    match share.tx_pending(drive, index) {
                        ShareMqueue::Server(mqueue) => {
                            clients.gather_replies(turn, services, servers, service, mqueue, shown);
                        }
                        ShareMqueue::Other(role, block) => {
                            each!(servers.take(turn, services, service, (role, block)));
                        }
                        ShareMqueue::Foreign => {}
                    }
                }
            }
        }
        if services[service].chain.is_some() {
            clients.deliver_shown(turn, services, servers, service);
        }
        let share = &mut services[service];
        if share.replies == Replies::None {
            share.count_released(turn.now_ns);
        }
        // Taken in any case: nothing is charged later for the time before.
        let charges = before.is_some() || !mutants::on("charge_former_time");
        let mut function_ns = 0;
        if charges {
            function_ns = share.take_function_ns() + servers.take_function_ns::<N>(service);
        }
        if let Some(before) = before {
            let ended = before.saturating_sub(share.in_flight());
            schedule.charge_replies(service, ended, function_ns);
        }
    }

    /// Exchanges bytes with servers and peers.
    #[inline(always)]
    pub(crate) fn exchange<N: Nic>(
        &mut self,
        turn: &mut Turn<N>,
        services: &mut Services,
        schedule: &mut Schedule,
    ) {
        let Self { clients, servers } = self;
        let ServerSide { transfers, sockets, .. } = servers;
        transfers.borrow(turn, sockets);
        each!(servers.exchange(turn, services, schedule, clients));
    }

    /// Sends what the turn produced. With `may_defer`, some replies may wait for more.
    #[inline(always)]
    pub(crate) fn flush<N: Nic>(
        &mut self,
        turn: &mut Turn<N>,
        services: &mut Services,
        may_defer: bool,
    ) {
        let Self { clients, servers } = self;
        clients.flush(turn, services, servers, may_defer);
        each!(servers.flush(turn, services, &mut NoServers, may_defer));
    }

    /// Once a millisecond: time limits of a service.
    pub(crate) fn expire<N: Nic>(
        &mut self,
        turn: &mut Turn<N>,
        services: &mut Services,
        service: usize,
    ) {
        let Self { clients, servers } = self;
        clients.expire_requests(turn, services, service);
        each!(servers.expire(turn, services, clients, service));
    }

    /// A service comes.
    pub(crate) fn place<N: Nic>(&mut self, turn: &mut Turn<N>, service: u16, parts: Parts) {
        let Parts { transfers, backends, upstream, sockets } = parts;
        let Self { servers, .. } = self;
        servers.transfers.place(turn, service, transfers);
        servers.backends.place(turn, service, backends);
        servers.upstreams.place(turn, service, upstream);
        servers.sockets.place(turn, service, sockets);
    }

    /// A service goes; returns what another thread should free.
    pub(crate) fn remove<N: Nic>(&mut self, turn: &mut Turn<N>, service: u16) -> Parts {
        self.release(turn, service);
        let Self { servers, .. } = self;
        Parts {
            transfers: servers.transfers.remove(turn, service),
            backends: servers.backends.remove(turn, service),
            upstream: servers.upstreams.remove(turn, service),
            sockets: servers.sockets.remove(turn, service),
        }
    }

    /// A service ends: what is in its rings is dropped.
    pub(crate) fn release<N: Nic>(&mut self, turn: &mut Turn<N>, service: u16) {
        let Self { servers, .. } = self;
        each!(servers.release(turn, service));
    }

    /// The connections of a service that leaves go on with its successor.
    pub(crate) fn move_to<N: Nic>(
        &mut self,
        turn: &mut Turn<N>,
        services: &Services,
        from: u16,
        to: u16,
    ) {
        let Self { clients, servers } = self;
        clients.tcp.move_to(from, to);
        each!(servers.move_to(turn, services, from, to));
    }

    /// Stops receiving from the clients of a service, or of all.
    pub(crate) fn leave<N: Nic>(
        &mut self,
        turn: &mut Turn<N>,
        services: &mut Services,
        service: Option<u16>,
    ) {
        let Self { clients, servers } = self;
        clients.leave(turn, services, servers, service);
        each!(servers.leave(turn, services, &mut NoServers, service));
    }

    /// Drops everything of a service that is in flight on this worker, for this reason.
    pub(crate) fn drop_outstanding<N: Nic>(
        &mut self,
        turn: &mut Turn<N>,
        services: &mut Services,
        service: usize,
        reason: DropReason,
    ) {
        let Self { clients, servers } = self;
        clients.drop_requests(turn, services, service, reason);
        each!(servers.drop_requests(turn, services, clients, service, reason));
        self.flush(turn, services, false);
        let Self { clients, servers } = self;
        clients.tcp.close_all(turn, services, servers, service as u16, reason);
        clients.udp.drop_waiting(services, service as u16, reason);
    }

    /// Sets the limits.
    pub(crate) fn set_limits(&mut self, limits: &Limits) {
        self.clients.set_limits(limits);
        self.servers.upstreams.set_limits(limits);
    }

    /// Requests of a service in flight without an mqueue, and replies that have not been sent.
    pub(crate) fn outstanding<N: Nic>(&self, service: u16) -> u64 {
        self.clients.outstanding::<N>(service) + self.servers.outstanding::<N>(service)
    }

    /// When there is something to do without an event: 0 at once, `u64::MAX` never.
    pub(crate) fn wake_at<N: Nic>(&self, now_ns: u64, services: &Services) -> u64 {
        let servers_ns = self.servers.wake_at::<N>(now_ns, services);
        self.clients.wake_at::<N>(now_ns, services).min(servers_ns)
    }

    /// Does what is asked of a chain. If its service has left nothing is attached.
    pub(crate) fn ask_chain<N: Nic>(
        &mut self,
        turn: &Turn<N>,
        services: &mut Services,
        place: ChainPlace,
        request: ChainRequest,
    ) -> ChainReply {
        let slot = usize::from(place.slot);
        let share = services.get_mut(slot).filter(|share| !share.is_vacant());
        let backends = &mut self.servers.backends;
        match request {
            ChainRequest::Arrange(mut order) => {
                let mut former: Vec<Link> = Vec::new();
                match (share, place.backend) {
                    (Some(share), None) => {
                        former = share.arrange_chain(std::mem::take(&mut order));
                        share.find_peers(&turn.shared);
                    }
                    (Some(_), Some(backend)) => {
                        former = Endpoint::<N>::arrange_path(backends, slot, backend, &mut order);
                    }
                    (None, _) => {}
                }
                if !order.is_empty() {
                    former = Chain::default().arrange(order);
                }
                ChainReply::Arranged(former)
            }
            ChainRequest::Command(id, command) => {
                let chain = chain_of::<N>(backends, share, &place);
                let done = chain.map(|chain| chain.command(id, command));
                ChainReply::Command(done.unwrap_or(Err(CommandError::Gone)))
            }
            ChainRequest::Trace(trace) => {
                let chain = chain_of::<N>(backends, share, &place);
                ChainReply::Traced(chain.and_then(|chain| chain.set_trace(trace)))
            }
        }
    }
}

/// The service's chain, or the one on the path to a backend.
fn chain_of<'a, N: Nic>(
    backends: &'a mut KernelBackends,
    share: Option<&'a mut ServiceShare>,
    place: &ChainPlace,
) -> Option<&'a mut Chain> {
    match place.backend {
        None => share?.chain.as_mut().map(|attached| attached.chain()),
        Some(backend) => {
            share?;
            Endpoint::<N>::chain_of(backends, place.slot.into(), backend)
        }
    }
}

impl<N: Nic> Servers<N> for ServerSide {
    fn submit(
        &mut self,
        turn: &mut Turn<N>,
        services: &mut Services,
        service: usize,
        arrival: &Arrival,
        message: &mut impl Message,
    ) -> Result<(), Refusal> {
        self.upstreams.submit(turn, services, service, arrival, message)
    }

    fn unspent(&mut self, service: usize, origin: &Origin) -> Option<u32> {
        Servers::<N>::unspent(&mut self.upstreams, service, origin)
    }

    fn spend(&mut self, service: usize, origin: &Origin, bytes: u64) {
        Servers::<N>::spend(&mut self.upstreams, service, origin, bytes);
    }

    fn holds_client(&mut self, service: usize, client: StreamKey) -> bool {
        Servers::<N>::holds_client(&mut self.upstreams, service, client)
    }

    fn delays_close(&mut self, service: usize, client: StreamKey) -> bool {
        Servers::<N>::delays_close(&mut self.upstreams, service, client)
    }

    fn close_stream(
        &mut self,
        turn: &mut Turn<N>,
        services: &mut Services,
        service: usize,
        client: StreamKey,
    ) {
        Servers::close_stream(&mut self.upstreams, turn, services, service, client);
    }

    fn begin_relay(
        &mut self,
        turn: &mut Turn<N>,
        services: &mut Services,
        service: usize,
        client: &ReplyTo,
    ) -> Relayed {
        Servers::begin_relay(&mut self.upstreams, turn, services, service, client)
    }

    fn relay_to_server(
        &mut self,
        turn: &mut Turn<N>,
        services: &mut Services,
        service: usize,
        client: StreamKey,
        chunk: &[u8],
    ) -> Option<DropReason> {
        Servers::relay_to_server(&mut self.upstreams, turn, services, service, client, chunk)
    }

    fn end_relay_input(&mut self, turn: &mut Turn<N>, service: usize, client: StreamKey) {
        Servers::end_relay_input(&mut self.upstreams, turn, service, client);
    }

    fn relay_taken(&mut self, turn: &mut Turn<N>, service: usize, client: StreamKey) -> bool {
        Servers::relay_taken(&mut self.upstreams, turn, service, client)
    }

    fn is_relay_finished(&mut self, service: usize, client: StreamKey) -> bool {
        Servers::<N>::is_relay_finished(&mut self.upstreams, service, client)
    }

    fn accept(
        &mut self,
        turn: &mut Turn<N>,
        services: &Services,
        service: u16,
        port: PortIndex,
        socket: u16,
    ) -> bool {
        Servers::accept(&mut self.sockets, turn, services, service, port, socket)
    }
}
