//! All endpoints of one worker, and the steps of a turn over them.

use onpath::{Chain, CommandError, Link};
use wire::DropReason;
use wire::nic::{Close, Event, Nic, RxBatch};

use crate::base::keys::StreamOwner;
use crate::base::topology::{Limits, Replies};
use crate::base::turn::Turn;
use crate::depart::Depart;
use crate::endpoint::clients::Clients;
use crate::endpoint::servers::{Parts, ServerSide};
use crate::schedule::Schedule;
use crate::service::chain::{ChainPlace, ChainReply, ChainRequest};
use crate::service::ends::ShareMqueue;
use crate::service::services::Services;
use crate::service::share::{HEADS_READ, ServiceShare};

/// See the module documentation.
pub(crate) struct Endpoints {
    pub(crate) clients: Clients,
    pub(crate) servers: ServerSide,
}

impl Endpoints {
    pub(crate) fn new<N: Nic>(rx: RxBatch, workers: usize, limits: &Limits) -> Self {
        let servers = ServerSide::default();
        Self { clients: Clients::new::<N>(rx, workers, limits), servers }
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
        servers.before_drive(turn, services, schedule);
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
        servers.gather(turn, services, service);
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
                            servers.take(turn, services, service, (role, block));
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
        servers.exchange(turn, services, schedule, clients);
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
        servers.flush(turn, services, may_defer);
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
        servers.expire(turn, services, clients, service);
    }

    /// A service comes.
    pub(crate) fn place<N: Nic>(&mut self, turn: &mut Turn<N>, service: u16, parts: Parts) {
        // A vacant slot has nothing.
        drop(self.servers.place(turn, service, parts));
    }

    /// A service goes; returns what another thread should free.
    pub(crate) fn remove<N: Nic>(&mut self, turn: &mut Turn<N>, service: u16) -> Parts {
        self.release(turn, service);
        self.servers.remove(turn, service)
    }

    /// A service ends: what is in its rings is dropped.
    pub(crate) fn release<N: Nic>(&mut self, turn: &mut Turn<N>, service: u16) {
        let Self { servers, .. } = self;
        servers.release(turn, service);
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
        servers.move_to(turn, services, from, to);
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
        servers.leave(turn, services, service);
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
        servers.drop_requests(turn, services, clients, service, reason);
        self.flush(turn, services, false);
        let Self { clients, servers } = self;
        clients.tcp.close_all(turn, services, servers, service as u16, reason);
        clients.udp.drop_waiting(services, service as u16, reason);
    }

    /// Sets the limits.
    pub(crate) fn set_limits<N: Nic>(&mut self, limits: &Limits) {
        self.clients.set_limits(limits);
        self.servers.set_limits::<N>(limits);
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
        let servers = &mut self.servers;
        match request {
            ChainRequest::Arrange(mut order) => {
                let mut former: Vec<Link> = Vec::new();
                match (share, place.backend) {
                    (Some(share), None) => {
                        former = share.arrange_chain(std::mem::take(&mut order));
                        share.find_peers(&turn.shared);
                    }
                    (Some(_), Some(backend)) => {
                        former = servers.arrange_path::<N>(slot, backend, &mut order);
                    }
                    (None, _) => {}
                }
                if !order.is_empty() {
                    former = Chain::default().arrange(order);
                }
                ChainReply::Arranged(former)
            }
            ChainRequest::Command(id, command) => {
                let chain = chain_of::<N>(servers, share, &place);
                let done = chain.map(|chain| chain.command(id, command));
                ChainReply::Command(done.unwrap_or(Err(CommandError::Gone)))
            }
            ChainRequest::Trace(trace) => {
                let chain = chain_of::<N>(servers, share, &place);
                ChainReply::Traced(chain.and_then(|chain| chain.set_trace(trace)))
            }
        }
    }
}

/// The service's chain, or the one on the path to a backend.
fn chain_of<'a, N: Nic>(
    servers: &'a mut ServerSide,
    share: Option<&'a mut ServiceShare>,
    place: &ChainPlace,
) -> Option<&'a mut Chain> {
    match place.backend {
        None => share?.chain.as_mut().map(|attached| attached.chain()),
        Some(backend) => {
            share?;
            servers.chain_of::<N>(place.slot.into(), backend)
        }
    }
}
