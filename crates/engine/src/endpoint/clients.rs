//! The endpoints of one worker that have clients.

use wire::DropReason;
use wire::nic::{Nic, PortIndex, RxBatch, Transport};
use wire::session::{EndpointKind, Origin};

use crate::admit::servers::Servers;
use crate::base::arrival::Awaited;
use crate::base::topology::Limits;
use crate::base::turn::Turn;
use crate::depart::Destinations;
use crate::depart::run::{Next, Run};
use crate::endpoint::Endpoint;
use crate::endpoint::peer::Peers;
use crate::endpoint::port::Port;
use crate::endpoint::shm::ShmClients;
use crate::endpoint::tcp::TcpConnections;
use crate::endpoint::udp::{UdpPort, UdpPorts};
use crate::schedule::Schedule;
use crate::service::bundle::table::Completion;
use crate::service::services::Services;

/// See the module documentation.
pub(crate) struct Clients {
    pub(crate) udp: UdpPorts,
    pub(crate) tcp: TcpConnections,
    pub(crate) shm: ShmClients,
    pub(crate) peers: Peers,
}

/// A port in flight to its worker.
pub(crate) enum NewPort {
    Udp(Box<UdpPort>),
    Tcp(Port),
}

impl NewPort {
    pub(crate) fn new(port: Port, limits: &Limits) -> Self {
        match port.transport {
            Transport::Udp => Self::Udp(Box::new(UdpPort::new(port, limits))),
            Transport::Tcp => Self::Tcp(port),
        }
    }
}

/// Calls the same method on each endpoint.
macro_rules! each {
    ($self:ident . $call:ident ( $($argument:expr),* )) => {
        $self.udp.$call($($argument),*);
        $self.tcp.$call($($argument),*);
        $self.shm.$call($($argument),*);
        $self.peers.$call($($argument),*);
    };
}

impl Clients {
    pub(crate) fn new(rx: RxBatch, workers: usize, limits: &Limits) -> Self {
        Self {
            udp: UdpPorts::new(rx, limits),
            tcp: TcpConnections::new(limits),
            shm: ShmClients::default(),
            peers: Peers::new(workers),
        }
    }

    /// Receives from all endpoints. The first one gets the credit that is left, so each endpoint is
    /// the first in one of four turns: a flood at one endpoint does not starve the others.
    // Always inline: there is one caller, and it runs every turn.
    #[inline(always)]
    pub(crate) fn receive<N: Nic>(
        &mut self,
        turn: &mut Turn<N>,
        services: &mut Services,
        servers: &mut impl Servers<N>,
        schedule: &mut Schedule,
    ) {
        const COUNT: usize = 4;
        let first = schedule.first_endpoint();
        for endpoint in (first..COUNT).chain(0..first) {
            match endpoint {
                0 => self.peers.receive(turn, services, servers, schedule),
                1 => self.udp.receive(turn, services, servers, schedule),
                2 => self.shm.receive(turn, services, servers, schedule),
                _ => self.tcp.receive(turn, services, servers, schedule),
            }
        }
        if self.peers.has_answers() {
            self.answer_for_peers(turn, services);
        }
    }

    /// Sends the answers of functions to datagrams that other workers have received.
    #[cold]
    fn answer_for_peers<N: Nic>(&mut self, turn: &mut Turn<N>, services: &mut Services) {
        let Self { udp, peers, .. } = self;
        peers.take_answers(|origin, len, bytes| _ = udp.answer(turn, services, origin, len, bytes));
    }

    #[inline(always)]
    fn deliver_to_client<N: Nic>(
        &mut self,
        turn: &mut Turn<N>,
        services: &mut Services,
        run: &mut Run,
    ) -> Next {
        match services[run.service].sessions.found(run.token()).origin {
            Origin::Datagram { .. } => Next::Reply,
            Origin::Client(to) if to.worker != turn.index => {
                self.peers.deliver(turn, services, run)
            }
            Origin::Client(to) => match to.endpoint {
                EndpointKind::Tcp => self.tcp.deliver(turn, services, run),
                EndpointKind::Shm => self.shm.deliver(turn, services, run),
            },
        }
    }

    /// Takes the replies that other workers hand back to clients of this one.
    pub(crate) fn take_replies<N: Nic>(&mut self, turn: &mut Turn<N>, services: &mut Services) {
        let Self { tcp, shm, peers, .. } = self;
        peers.take_replies(turn, services, |turn, services, back| {
            let (service, request, outcome) = (back.service, &back.request, back.outcome);
            match request.to.endpoint {
                EndpointKind::Tcp => tcp.settle(turn, services, service, request, outcome),
                EndpointKind::Shm => shm.settle(turn, services, service, request, outcome),
            }
        });
    }

    /// Sends what the turn produced: datagrams (with `may_defer`, some may wait), stream bytes,
    /// replies in rings, messages for other workers.
    // Always inline, as `receive` is.
    #[inline(always)]
    pub(crate) fn flush<N: Nic>(
        &mut self,
        turn: &mut Turn<N>,
        services: &mut Services,
        servers: &mut impl Servers<N>,
        may_defer: bool,
    ) {
        each!(self.flush(turn, services, servers, may_defer));
    }

    /// Pauses or resumes receiving from the clients of a service.
    pub(crate) fn pause<N: Nic>(&mut self, turn: &mut Turn<N>, service: u16, paused: bool) {
        each!(self.pause(turn, service, paused));
    }

    /// Stops receiving from the clients of a service, or of all.
    pub(crate) fn leave<N: Nic>(
        &mut self,
        turn: &mut Turn<N>,
        services: &mut Services,
        servers: &mut impl Servers<N>,
        service: Option<u16>,
    ) {
        each!(self.leave(turn, services, servers, service));
    }

    /// Replies of a service that have not been sent.
    pub(crate) fn outstanding<N: Nic>(&self, service: u16) -> u64 {
        Endpoint::<N>::outstanding(&self.udp, service)
            + Endpoint::<N>::outstanding(&self.tcp, service)
            + Endpoint::<N>::outstanding(&self.shm, service)
            + Endpoint::<N>::outstanding(&self.peers, service)
    }

    /// When there is something to do without an event: 0 at once, `u64::MAX` never.
    pub(crate) fn wake_at<N: Nic>(&self, now_ns: u64, services: &Services) -> u64 {
        Endpoint::<N>::wake_at(&self.udp, now_ns, services)
            .min(Endpoint::<N>::wake_at(&self.tcp, now_ns, services))
            .min(Endpoint::<N>::wake_at(&self.shm, now_ns, services))
            .min(Endpoint::<N>::wake_at(&self.peers, now_ns, services))
    }

    /// Whether a reply has been sent: `None` if its client is gone.
    fn has_sent(&mut self, worker: u16, origin: &Origin, number: u64) -> Option<bool> {
        match origin {
            Origin::Datagram { .. } => Some(self.udp.has_sent(origin)),
            Origin::Client(to) if to.worker == worker && to.endpoint == EndpointKind::Tcp => {
                self.tcp.has_sent(to, number)
            }
            Origin::Client(_) => Some(true),
        }
    }

    /// After the flush: notes which sampled replies the host kernel took.
    pub(crate) fn note_sent<N: Nic>(
        &mut self,
        turn: &mut Turn<N>,
        services: &mut Services,
        service: usize,
    ) {
        for index in (0..services[service].sampled_count()).rev() {
            let Some((origin, number)) = services[service].sampled_origin(index) else {
                continue;
            };
            let sent = self.has_sent(turn.index, &origin, number);
            let now_ns = if sent == Some(true) { turn.clock_ns() } else { turn.now_ns };
            services[service].note_sent(index, sent, now_ns);
        }
    }

    /// Whether no process and no other worker wakes this one.
    pub(crate) fn sleeps_alone(&self) -> bool {
        self.shm.is_empty()
    }

    /// The worker is about to sleep, or is awake again: processes wake it in between.
    pub(crate) fn set_parked(&mut self, parked: bool) {
        self.shm.set_parked(parked);
    }

    /// Whether rings of processes or of other workers seem to have messages.
    pub(crate) fn is_hinted(&mut self, services: &Services) -> bool {
        self.peers.is_hinted() || self.shm.hinted(|of| services[usize::from(of)].is_held())
    }

    /// Adds a port. Each endpoint has a place for every index.
    pub(crate) fn place_port(&mut self, index: PortIndex, port: NewPort) {
        self.udp.make_room_for(index);
        self.tcp.make_room_for(index);
        match port {
            NewPort::Udp(port) => self.udp.place(index, *port),
            NewPort::Tcp(port) => self.tcp.place(index, port),
        }
    }

    /// Every port with its index.
    pub(crate) fn ports_mut(&mut self) -> impl Iterator<Item = (usize, &mut Port)> {
        self.udp.ports_mut().chain(self.tcp.listeners_mut())
    }

    /// The port with this index, if it exists.
    pub(crate) fn port_mut(&mut self, index: PortIndex) -> Option<&mut Port> {
        self.ports_mut().find(|(at, _)| *at == usize::from(index)).map(|(_, port)| port)
    }

    /// Closes the ports of a service; returns what another thread should free, since that takes
    /// long.
    pub(crate) fn close_ports<N: Nic>(&mut self, turn: &mut Turn<N>, service: u16) -> Vec<UdpPort> {
        let ports = self.udp.close_ports(turn, service);
        self.tcp.close_ports(turn, service);
        self.udp.refresh_sources(turn);
        ports
    }

    /// Sets the limits.
    pub(crate) fn set_limits(&mut self, limits: &Limits) {
        self.udp.set_limits(limits);
        self.tcp.set_limits(limits);
    }
}

impl<N: Nic> Destinations<N> for Clients {
    // Always inline: every reply takes this path.
    #[inline(always)]
    fn deliver(&mut self, turn: &mut Turn<N>, services: &mut Services, run: &mut Run) -> Next {
        // Datagrams are handled first: their request contains the address.
        match self.udp.deliver(turn, services, run) {
            Next::Reply => self.deliver_to_client(turn, services, run),
            next => next,
        }
    }

    fn settle(
        &mut self,
        turn: &mut Turn<N>,
        services: &mut Services,
        service: usize,
        request: &Awaited,
        outcome: Result<&[u8], DropReason>,
    ) {
        if request.to.worker != turn.index {
            return self.peers.settle(turn, services, service, request, outcome);
        }
        match request.to.endpoint {
            EndpointKind::Tcp => self.tcp.settle(turn, services, service, request, outcome),
            EndpointKind::Shm => self.shm.settle(turn, services, service, request, outcome),
        }
    }

    fn answer_datagram(
        &mut self,
        turn: &mut Turn<N>,
        services: &mut Services,
        servers: &mut impl Servers<N>,
        (service, origin): (usize, &Origin),
        request_len: u32,
        reply: &[u8],
    ) {
        // A proxy limits the replies of a flow by all its requests.
        let Some(unspent) = servers.unspent(service, origin) else {
            self.udp.answer(turn, services, origin, request_len, reply);
            return;
        };
        let cost = self.udp.answer(turn, services, origin, unspent, reply);
        servers.spend(service, origin, cost);
    }

    fn deliver_together(
        &mut self,
        turn: &mut Turn<N>,
        services: &mut Services,
        (service, mqueue): (usize, u32),
        completion: &Completion,
        origin: &Origin,
    ) -> u64 {
        let Origin::Client(to) = origin else {
            return self.udp.deliver_bundle(turn, services, service, mqueue, completion);
        };
        match to.endpoint {
            EndpointKind::Shm if to.worker == turn.index => {
                self.shm.deliver_bundle(&mut services[service], mqueue, completion, to)
            }
            EndpointKind::Tcp if to.worker == turn.index => {
                self.tcp.deliver_bundle(turn, services, service, mqueue, completion)
            }
            _ => 0,
        }
    }
}
