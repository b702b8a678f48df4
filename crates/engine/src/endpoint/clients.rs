//! The endpoints of one worker that have clients.

use wire::DropReason;
use wire::nic::{Nic, PortIndex, RxBatch, Transport};
use wire::session::{EndpointKind, Origin};

use crate::admit::servers::Servers;
use crate::base::arrival::Awaited;
use crate::base::links::LinkIn;
use crate::base::process::ShmClient;
use crate::base::topology::Limits;
use crate::base::turn::Turn;
use crate::depart::Destinations;
use crate::depart::run::{Next, Run};
use crate::endpoint::port::Port;
use crate::endpoint::tcp::TcpConnections;
use crate::endpoint::udp::{UdpPort, UdpPorts};
use crate::endpoint::{ClientEndpoint, Endpoint, HandedBack};
use crate::schedule::Schedule;
use crate::service::bundle::table::Completion;
use crate::service::services::Services;

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

/// Declares [`Clients`] for a table of endpoints beside UDP and TCP.
macro_rules! declare {
    ($( $at:literal $name:ident : $type:ident ; )*) => {
        /// See the module documentation.
        pub(crate) struct Clients {
            pub(crate) udp: UdpPorts,
            pub(crate) tcp: TcpConnections,
            $( $name: crate::endpoint::$name::$type, )*
        }

        impl Clients {
            pub(crate) fn new<N: Nic>(rx: RxBatch, workers: usize, limits: &Limits) -> Self {
                Self {
                    udp: UdpPorts::new(rx, limits),
                    tcp: TcpConnections::new(limits),
                    $( $name: ClientEndpoint::<N>::new(workers), )*
                }
            }

            /// Receives from all endpoints. The first one gets the credit that is left, so each
            /// endpoint is the first in one of four turns: a flood at one endpoint does not starve
            /// the others.
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
                        1 => self.udp.receive(turn, services, servers, schedule),
                        3 => self.tcp.receive(turn, services, servers, schedule),
                        $( $at => self.$name.receive(turn, services, servers, schedule), )*
                        _ => {}
                    }
                }
                $( if ClientEndpoint::<N>::has_answers(&self.$name) {
                    let udp = &mut self.udp;
                    ClientEndpoint::<N>::take_answers(&mut self.$name, &mut |origin, len, bytes| {
                        _ = udp.answer(turn, services, origin, len, bytes);
                    });
                } )*
            }

            /// Takes the replies that other workers hand back to clients of this one.
            pub(crate) fn take_replies<N: Nic>(
                &mut self,
                turn: &mut Turn<N>,
                services: &mut Services,
            ) {
                $( if ClientEndpoint::<N>::has_returned(&self.$name) {
                    // It settles no request of its own.
                    let mut from = std::mem::take(&mut self.$name);
                    from.take_replies(turn, services, |turn, services, back| {
                        let HandedBack { service, request, outcome } = back;
                        self.settle(turn, services, service, &request, outcome);
                    });
                    self.$name = from;
                } )*
            }

            #[inline(always)]
            fn deliver_to_client<N: Nic>(
                &mut self,
                turn: &mut Turn<N>,
                services: &mut Services,
                run: &mut Run,
            ) -> Next {
                let origin = services[run.service].sessions.found(run.token()).origin;
                let Origin::Client(to) = origin else { return Next::Reply };
                if to.worker == turn.index && to.endpoint == EndpointKind::Tcp {
                    return self.tcp.deliver(turn, services, run);
                }
                $( if ClientEndpoint::<N>::has_client(&self.$name, &to, turn.index) {
                    return self.$name.deliver(turn, services, run);
                } )*
                Next::Reply
            }

            /// Sends what the turn produced: datagrams (with `may_defer`, some may wait), stream
            /// bytes, replies in rings, messages for other workers.
            // Always inline, as `receive` is.
            #[inline(always)]
            pub(crate) fn flush<N: Nic>(
                &mut self,
                turn: &mut Turn<N>,
                services: &mut Services,
                servers: &mut impl Servers<N>,
                may_defer: bool,
            ) {
                self.udp.flush(turn, services, servers, may_defer);
                self.tcp.flush(turn, services, servers, may_defer);
                $( self.$name.flush(turn, services, servers, may_defer); )*
            }

            /// Pauses or resumes receiving from the clients of a service.
            pub(crate) fn pause<N: Nic>(&mut self, turn: &mut Turn<N>, service: u16, paused: bool) {
                self.udp.pause(turn, service, paused);
                self.tcp.pause(turn, service, paused);
                $( self.$name.pause(turn, service, paused); )*
            }

            /// Stops receiving from the clients of a service, or of all.
            pub(crate) fn leave<N: Nic>(
                &mut self,
                turn: &mut Turn<N>,
                services: &mut Services,
                servers: &mut impl Servers<N>,
                service: Option<u16>,
            ) {
                self.udp.leave(turn, services, servers, service);
                self.tcp.leave(turn, services, servers, service);
                $( self.$name.leave(turn, services, servers, service); )*
            }

            /// Replies of a service that have not been sent.
            pub(crate) fn outstanding<N: Nic>(&self, service: u16) -> u64 {
                Endpoint::<N>::outstanding(&self.udp, service)
                    + Endpoint::<N>::outstanding(&self.tcp, service)
                    $( + Endpoint::<N>::outstanding(&self.$name, service) )*
            }

            /// When there is something to do without an event: 0 at once, `u64::MAX` never.
            pub(crate) fn wake_at<N: Nic>(&self, now_ns: u64, services: &Services) -> u64 {
                Endpoint::<N>::wake_at(&self.udp, now_ns, services)
                    .min(Endpoint::<N>::wake_at(&self.tcp, now_ns, services))
                    $( .min(Endpoint::<N>::wake_at(&self.$name, now_ns, services)) )*
            }

            /// Clients with connections, processes among them.
            pub(crate) fn connections<N: Nic>(&self) -> usize {
                self.tcp.open_count() + self.processes::<N>()
            }

            /// Clients that are processes.
            pub(crate) fn processes<N: Nic>(&self) -> usize {
                0 $( + ClientEndpoint::<N>::connections(&self.$name) )*
            }

            /// The same of a service.
            pub(crate) fn processes_of<N: Nic>(&self, service: u16) -> usize {
                0 $( + ClientEndpoint::<N>::of_service(&self.$name, service) )*
            }

            /// The worker is about to sleep, or is awake again: processes wake it in between.
            pub(crate) fn set_parked<N: Nic>(&mut self, parked: bool) {
                $( ClientEndpoint::<N>::set_parked(&self.$name, parked); )*
            }

            /// Whether rings of processes or of other workers seem to have messages.
            pub(crate) fn is_hinted<N: Nic>(&self, services: &Services) -> bool {
                false $( || ClientEndpoint::<N>::is_hinted(&self.$name, services) )*
            }

            /// Whether rings between workers seem to have messages for a service.
            pub(crate) fn is_hinted_for<N: Nic>(&self, service: u16) -> bool {
                false $( || ClientEndpoint::<N>::is_hinted_for(&self.$name, service) )*
            }

            /// A process attached.
            pub(crate) fn attach<N: Nic>(
                &mut self,
                turn: &mut Turn<N>,
                services: &mut Services,
                client: ShmClient,
            ) {
                let mut client = Some(client);
                $( self.$name.attach(turn, services, &mut client); )*
                // Dropping it closes the process's connection.
                drop(client);
            }

            /// The process with this id is gone.
            pub(crate) fn detach<N: Nic>(
                &mut self,
                turn: &mut Turn<N>,
                services: &mut Services,
                id: u64,
            ) {
                $( self.$name.detach(turn, services, id); )*
            }

            /// The processes of a service go on with its successor, but for the departing ones.
            pub(crate) fn move_processes<N: Nic>(&mut self, from: u16, to: u16, departing: &[u64]) {
                $( ClientEndpoint::<N>::move_processes(&mut self.$name, from, to, departing); )*
            }

            /// Closes the clients of a leaving service that have nothing outstanding.
            pub(crate) fn close_leaving<N: Nic>(
                &mut self,
                turn: &mut Turn<N>,
                services: &mut Services,
                service: u16,
            ) {
                $( self.$name.close_leaving(turn, services, service); )*
            }

            /// Closes all processes, with their outcomes.
            pub(crate) fn close_all<N: Nic>(
                &mut self,
                turn: &mut Turn<N>,
                services: &mut Services,
            ) {
                $( ClientEndpoint::<N>::close_all(&mut self.$name, turn, services); )*
            }

            /// The end of a drain: drops messages that were not taken.
            pub(crate) fn discard<N: Nic>(&mut self, turn: &mut Turn<N>, services: &mut Services) {
                $( self.$name.discard(turn, services); )*
            }

            /// Sets or removes the link of a service from one worker. Returns the former one.
            pub(crate) fn set_link<N: Nic>(
                &mut self,
                worker: usize,
                service: usize,
                mut link: Option<LinkIn>,
            ) -> Option<LinkIn> {
                let mut former = None;
                $( former = former.or(
                    ClientEndpoint::<N>::set_link(&mut self.$name, worker, service, &mut link),
                ); )*
                former
            }
        }

        impl<N: Nic> Destinations<N> for Clients {
            // Always inline: every reply takes this path.
            #[inline(always)]
            fn deliver(
                &mut self,
                turn: &mut Turn<N>,
                services: &mut Services,
                run: &mut Run,
            ) -> Next {
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
                let to = &request.to;
                if to.worker == turn.index && to.endpoint == EndpointKind::Tcp {
                    return self.tcp.settle(turn, services, service, request, outcome);
                }
                $( if ClientEndpoint::<N>::has_client(&self.$name, to, turn.index) {
                    return self.$name.settle(turn, services, service, request, outcome);
                } )*
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
                if to.worker == turn.index && to.endpoint == EndpointKind::Tcp {
                    return self.tcp.deliver_bundle(turn, services, service, mqueue, completion);
                }
                let share = &mut services[service];
                $( if ClientEndpoint::<N>::has_client(&self.$name, to, turn.index) {
                    return ClientEndpoint::<N>::deliver_bundle(
                        &mut self.$name, share, mqueue, completion, to,
                    );
                } )*
                0
            }
        }
    };
}

client_endpoints!(declare);

impl Clients {
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
