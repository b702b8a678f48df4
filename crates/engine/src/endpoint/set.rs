//! The endpoints of one worker.

use wire::DropReason;
use wire::nic::{Nic, PortIndex, RxBatch, Transport};
use wire::session::{EndpointKind, Origin};

use crate::base::arrival::Awaited;
use crate::base::topology::Limits;
use crate::endpoint::Endpoint;
use crate::endpoint::peer::Peers;
use crate::endpoint::port::Port;
use crate::endpoint::run::{Next, Run};
use crate::endpoint::shm::ShmClients;
use crate::endpoint::tcp::TcpConnections;
use crate::endpoint::udp::{UdpPort, UdpPorts};
use crate::schedule::Schedule;
use crate::turn::Turn;

/// See the module documentation.
pub(crate) struct Endpoints {
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

impl Endpoints {
    pub(crate) fn new(rx: RxBatch, workers: usize, limits: &Limits) -> Self {
        Self {
            udp: UdpPorts::new(rx, limits),
            tcp: TcpConnections::new(limits),
            shm: ShmClients::default(),
            peers: Peers::new(workers),
        }
    }

    /// Receives from all endpoints. The first one gets the credit that is left, so each endpoint is the first in one
    /// of four turns: a flood at one endpoint does not starve the others.
    // Always inline: there is one caller, and it runs every turn.
    #[inline(always)]
    pub(crate) fn receive<N: Nic>(&mut self, turn: &mut Turn<N>, schedule: &mut Schedule) {
        const COUNT: usize = 4;
        let first = schedule.first_endpoint();
        for endpoint in (first..COUNT).chain(0..first) {
            match endpoint {
                0 => self.peers.receive(turn, schedule),
                1 => self.udp.receive(turn, schedule),
                2 => self.shm.receive(turn, schedule),
                _ => self.tcp.receive(turn, schedule),
            }
        }
        if self.peers.has_answers() {
            self.answer_for_peers(turn);
        }
    }

    /// Sends the answers of functions to datagrams that other workers have received.
    #[cold]
    fn answer_for_peers<N: Nic>(&mut self, turn: &mut Turn<N>) {
        let Self { udp, peers, .. } = self;
        peers.take_answers(|origin, len, bytes| _ = udp.answer(turn, origin, len, bytes));
    }

    /// Delivers the replies of a run, from the next one. Returns the message behind them.
    // Always inline: every reply takes this path.
    #[inline(always)]
    pub(crate) fn deliver<N: Nic>(&mut self, turn: &mut Turn<N>, run: &mut Run) -> Next {
        // Datagrams are handled first: their request contains the address.
        match self.udp.deliver(turn, run) {
            Next::Reply => self.deliver_to_client(turn, run),
            next => next,
        }
    }

    #[inline(always)]
    fn deliver_to_client<N: Nic>(&mut self, turn: &mut Turn<N>, run: &mut Run) -> Next {
        match turn.services[run.service].sessions.found(run.token()).origin {
            Origin::Datagram { .. } => Next::Reply,
            Origin::Client(to) if to.worker != turn.index => self.peers.deliver(turn, run),
            Origin::Client(to) => match to.endpoint {
                EndpointKind::Tcp => self.tcp.deliver(turn, run),
                EndpointKind::Shm => self.shm.deliver(turn, run),
            },
        }
    }

    /// Gives one request its outcome, see [`Endpoint::settle`].
    pub(crate) fn settle<N: Nic>(
        &mut self,
        turn: &mut Turn<N>,
        service: usize,
        request: &Awaited,
        outcome: Result<&[u8], DropReason>,
    ) {
        if request.to.worker != turn.index {
            return self.peers.settle(turn, service, request, outcome);
        }
        match request.to.endpoint {
            EndpointKind::Tcp => self.tcp.settle(turn, service, request, outcome),
            EndpointKind::Shm => self.shm.settle(turn, service, request, outcome),
        }
    }

    /// Takes the replies that other workers hand back to clients of this one.
    pub(crate) fn take_replies<N: Nic>(&mut self, turn: &mut Turn<N>) {
        let Self { tcp, shm, peers, .. } = self;
        peers.take_replies(turn, |turn, back| {
            let (service, request, outcome) = (back.service, &back.request, back.outcome);
            match request.to.endpoint {
                EndpointKind::Tcp => tcp.settle(turn, service, request, outcome),
                EndpointKind::Shm => shm.settle(turn, service, request, outcome),
            }
        });
    }

    /// Sends what the turn produced: datagrams (with `may_defer`, some may wait), stream bytes, replies in rings,
    /// messages for other workers.
    // Always inline, as `receive` is.
    #[inline(always)]
    pub(crate) fn flush<N: Nic>(&mut self, turn: &mut Turn<N>, may_defer: bool) {
        each!(self.flush(turn, may_defer));
    }

    /// Looks at listeners where connections may wait for which a block has asked now.
    pub(crate) fn listen_for_sockets<N: Nic>(&mut self, turn: &mut Turn<N>) {
        while let Some(port) = turn.socket_lists.take_port() {
            self.tcp.set_ready(port);
        }
    }

    /// Pauses or resumes receiving from the clients of a service.
    pub(crate) fn pause<N: Nic>(&mut self, turn: &mut Turn<N>, service: u16, paused: bool) {
        each!(self.pause(turn, service, paused));
    }

    /// Stops receiving from the clients of a service, or of all.
    pub(crate) fn leave<N: Nic>(&mut self, turn: &mut Turn<N>, service: Option<u16>) {
        each!(self.leave(turn, service));
    }

    /// Replies of a service that have not been sent.
    pub(crate) fn outstanding<N: Nic>(&self, service: u16) -> u64 {
        Endpoint::<N>::outstanding(&self.udp, service)
            + Endpoint::<N>::outstanding(&self.tcp, service)
            + Endpoint::<N>::outstanding(&self.shm, service)
            + Endpoint::<N>::outstanding(&self.peers, service)
    }

    /// When there is something to do without an event: 0 at once, `u64::MAX` never.
    pub(crate) fn wake_at<N: Nic>(&self, now_ns: u64) -> u64 {
        Endpoint::<N>::wake_at(&self.udp, now_ns)
            .min(Endpoint::<N>::wake_at(&self.tcp, now_ns))
            .min(Endpoint::<N>::wake_at(&self.shm, now_ns))
            .min(Endpoint::<N>::wake_at(&self.peers, now_ns))
    }

    /// Whether a reply has been sent: `None` if its client is gone.
    pub(crate) fn has_sent(&mut self, worker: u16, origin: &Origin, number: u64) -> Option<bool> {
        match origin {
            Origin::Datagram { .. } => Some(self.udp.has_sent(origin)),
            Origin::Client(to) if to.worker == worker && to.endpoint == EndpointKind::Tcp => {
                self.tcp.has_sent(to, number)
            }
            Origin::Client(_) => Some(true),
        }
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

    /// Closes the ports of a service; returns what another thread should free, since that takes long.
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
