//! After the faults have stopped and all is quiet, every service must serve again.
//!
//! The old clients leave; the accelerators of the faulty service start new generations, because a block
//! that is stuck or dead cannot recover otherwise; then a new client sends requests at one port after the other,
//! including requests for a backend, and must get its answers within bounded time.

use std::net::IpAddr;

use engine::topology::Replies;
use wire::DropReason;
use wire::framing::Framing;
use wire::nic::{Nic, PortIndex, Transport};

use crate::backend::BackendBehaviour;
use crate::client::{DatagramClient, RequestMix};
use crate::conn::client_address;
use crate::fault::Fault;
use crate::net::{Faults, Reachability};
use crate::nic::SimSocket;
use crate::plan::Plan;
use crate::run::Run;
use crate::shared::lock;
use crate::shm_client::{ModelShmClient, ShmBehaviour};
use crate::socket_peer::SocketLoad;
use crate::stream_client::{Endings, StreamBehaviour, StreamClient};

const MS: u64 = 1_000_000;
/// Time limit for the engine to notice that all clients left, and for the probes to be answered.
const PATIENCE_NS: u64 = 5_000 * MS;
/// Enough for the replies that a probe gets out of order.
const EARLY_BYTES: usize = 1 << 20;
/// Requests of a probe.
const REQUESTS: u32 = 3;

impl<N: Nic<Socket = SimSocket, Port = ()>> Run<N> {
    /// See the module's text.
    pub(crate) fn probe(&mut self) -> Result<(), String> {
        self.remove_all_faults();
        self.restart_faulty_services();
        // A connection that waits for credit is not read; whether its client is still there shows only then.
        self.until_left()?;
        let topology = self.plan.setup.topology.clone();
        let services = topology.services.iter().enumerate();
        let ports = services.flat_map(|(service, spec)| spec.ports().map(move |p| (service, p)));
        for (port, (service, (listen, socket))) in ports.enumerate() {
            let request_mix = self.plain_mix(service);
            let (port, ip) = (port as PortIndex, listen.address.ip());
            if socket.is_some() {
                self.probe_socket(service, port)?;
                continue;
            }
            match listen.transport {
                Transport::Udp => self.send_datagrams(service, port, ip, request_mix),
                // Pieces of a raw stream are requests of their own: out-of-order replies need room.
                Transport::Tcp
                    if request_mix.framing == Framing::Raw
                        && topology.limits.early_reply_bytes < EARLY_BYTES =>
                {
                    continue;
                }
                Transport::Tcp if topology.services[service].replies == Replies::None => {
                    self.connect(service, port, self.unpaced_mix(service));
                }
                Transport::Tcp => self.connect(service, port, request_mix),
            }
            self.until_served(service)?;
        }
        for (service, _) in topology.memory_ports() {
            self.map(service);
            self.until_served(service)?;
        }
        Ok(())
    }

    /// Waits until the only client has its answers, and dismisses it.
    fn until_served(&mut self, service: usize) -> Result<(), String> {
        let replies = self.plan.setup.topology.services[service].replies;
        // A client of a raw stream continues only when something returns.
        let raw = self.plan.setup.topology.services[service].framing == Framing::Raw;
        let wanted = self.served(service) + u64::from(if raw { 1 } else { REQUESTS });
        self.until(service, "does not serve a fresh request after the faults", |run| {
            let served = match replies {
                Replies::One => run.is_answered(),
                Replies::None => run.served(service) >= wanted,
            };
            served && run.world.check_quiet().is_ok()
        })?;
        self.dismiss_clients();
        self.until_left()
    }

    /// Waits until the old clients have left, their requests have ended, and every worker knows the others'
    /// credit.
    fn until_left(&mut self) -> Result<(), String> {
        self.until(0, "may have connections of clients that left", |run| {
            run.world.fabric.connections() == 0
        })?;
        // Their requests were read all the same, and may wait for an answer that a backend still owes:
        // behind those a new request finds no credit, or no time.
        self.until(0, "may not be done with what clients asked that left", |run| {
            run.world.check_quiet().is_ok()
        })?;
        if self.plan.hasty_probe {
            return Ok(());
        }
        // A worker's view of the others' credit is as old as its last housekeeping. One without
        // mqueues of its own sheds a request that arrives before it knows about restarted ones.
        let told_ns = self.world.now_ns() + 3 * MS;
        self.until(0, "has no time", |run| run.world.now_ns() >= told_ns)
    }

    fn served(&self, service: usize) -> u64 {
        self.world.metrics.service(service).consumed
    }

    fn dismiss_clients(&mut self) {
        let mut net = lock(&self.world.net);
        self.plan.stream_clients.iter_mut().for_each(|client| client.leave(&mut net));
        for client in &mut self.plan.memory_clients {
            client.leave(&self.world.fabric);
        }
        self.plan.socket_loads.iter_mut().for_each(|load| load.leave(&mut net));
        self.plan.socket_loads.clear();
        drop(net);
        self.plan.datagram_clients.clear();
        self.plan.stream_clients.clear();
        self.plan.memory_clients.clear();
    }

    /// A new client of a block gets its bytes back.
    fn probe_socket(&mut self, service: usize, port: PortIndex) -> Result<(), String> {
        let mut load = SocketLoad::new(service, port, self.rng.fork());
        load.left = 1;
        self.plan.socket_loads.push(load);
        self.until(
            service,
            "does not serve a new connection of a block after the faults",
            |run| run.plan.socket_loads.iter().all(|load| load.in_order() == 1),
        )?;
        self.plan.socket_loads.clear();
        Ok(())
    }

    fn remove_all_faults(&mut self) {
        let mut net = lock(&self.world.net);
        net.set_faults(Faults { delay_ns: (1000, 1000), ..Faults::default() });
        for backend in &mut self.plan.backends {
            backend.behaviour = BackendBehaviour::SOUND;
            net.set_reachability(backend.site, Reachability::Open { after_ns: 1000 });
        }
        for server in &mut self.plan.socket_servers {
            server.recover(&mut net);
        }
        drop(net);
        self.dismiss_clients();
    }

    /// The accelerators of faulty services start new generations.
    fn restart_faulty_services(&mut self) {
        for service in (0..self.plan.sound.len()).filter(|s| !self.plan.sound[*s]) {
            let sound = self.plan.setup.behaviours[service].sound();
            let accelerators = self.plan.setup.topology.services[service].accelerators.len();
            for accelerator in 0..accelerators {
                self.world.lose_runtime(service, accelerator, DropReason::AcceleratorLost);
                self.world.replace_rings(service, accelerator, sound);
                self.world.resume_blocks(service, accelerator);
            }
        }
    }

    fn plain_mix(&self, service: usize) -> RequestMix {
        let spec = &self.plan.setup.topology.services[service];
        RequestMix {
            framing: spec.framing,
            max_message_bytes: spec.max_message_bytes as usize,
            reply_filler_max: 0,
            keys: 100,
            // Reaching a backend again may take as long as its time-out.
            backend: if spec.backends.is_empty() || spec.request_timeout_ms < 1000 {
                0
            } else {
                500
            },
            drops: 0,
            unframable: 0,
            too_long: 0,
            junk: 0,
            silent: 0,
            heavy: 0,
        }
    }

    /// The request mix of a client that sends requests without waiting for each reply: behind a request that
    /// waits for a backend, the next ones may wait longer than the service allows.
    fn unpaced_mix(&self, service: usize) -> RequestMix {
        let request_mix = self.plain_mix(service);
        let sheds = self.plan.setup.topology.services[service].queue_us_max > 0;
        RequestMix { backend: if sheds { 0 } else { request_mix.backend }, ..request_mix }
    }

    fn send_datagrams(
        &mut self,
        service: usize,
        port: PortIndex,
        ip: IpAddr,
        request_mix: RequestMix,
    ) {
        let id = self.plan.next_id;
        self.plan.next_id += 1;
        self.plan.datagram_clients.push(DatagramClient {
            id,
            service,
            port,
            peer: client_address(id),
            local: if ip.is_unspecified() { [10, 0, 0, 1].into() } else { ip },
            // Datagrams are not paced, and reaching a backend again may take longer than the pause.
            request_mix: RequestMix { backend: 0, ..request_mix },
            left: REQUESTS,
            burst: 1,
            // One after the other: several at once may find no credit.
            pause_ns: (20 * MS, 20 * MS),
            next_ns: 0,
            rng: self.rng.fork(),
            sequence: 0,
            received: 0,
            forges: 0,
            alike_chance: 0,
            alike: None,
        });
    }

    fn connect(&mut self, service: usize, port: PortIndex, request_mix: RequestMix) {
        let spec = &self.plan.setup.topology.services[service];
        let behaviour = StreamBehaviour {
            pipeline: 1,
            write_max: 100_000,
            read_max: 100_000,
            pause_ns: (0, MS),
            bogus: 0,
            // No fault: where all were removed, none is left.
            endings: Endings::GENTLE.without(Fault::HalfClose),
        };
        let rng = self.rng.fork();
        let mut client = StreamClient::new(service, port, request_mix, behaviour, rng);
        client.ordered = spec.ordered;
        client.replies = spec.replies == Replies::One;
        client.requests = REQUESTS;
        self.plan.stream_clients.push(client);
    }

    fn map(&mut self, service: usize) {
        let behaviour = ShmBehaviour {
            depth: 4,
            burst: 1,
            pause_ns: (MS, MS),
            deaf: false,
            leave: 0,
            bad_kind: 0,
            scribble_after: None,
        };
        let request_mix = self.unpaced_mix(service);
        let client = ModelShmClient::new(service, request_mix, behaviour, self.rng.fork());
        let mut client = client.of_service(&self.plan.setup.topology.services[service]);
        client.requests = REQUESTS;
        self.plan.memory_clients.push(client);
    }

    /// Whether the client has its answers.
    fn is_answered(&self) -> bool {
        let Plan { datagram_clients, stream_clients, memory_clients, .. } = &self.plan;
        let all = u64::from(REQUESTS);
        datagram_clients.iter().all(|client| client.received == all)
            && stream_clients.iter().all(StreamClient::is_answered)
            && memory_clients.iter().all(|client| client.received == all)
    }

    /// Continues until a condition holds.
    fn until(
        &mut self,
        service: usize,
        otherwise: &str,
        mut holds: impl FnMut(&mut Self) -> bool,
    ) -> Result<(), String> {
        let end_ns = self.world.now_ns() + PATIENCE_NS;
        let mut moved = true;
        while !holds(self) {
            if self.world.now_ns() > end_ns {
                let (counted, sound) = (self.world.metrics.service(service), &self.plan.sound);
                return Err(format!(
                    "service {service} {otherwise} (sound: {sound:?}): {counted:?}"
                ));
            }
            // Steps short enough for the shortest time-out, also through idle time.
            let mut by_ns = self.rng.between(10_000, 100_000);
            if !moved {
                let models = self.world.models.iter().map(|m| lock(m).due_ns());
                let due_ns = models.fold(self.peers_due_ns(), u64::min);
                by_ns = due_ns.saturating_sub(self.world.now_ns()).clamp(by_ns, MS);
            }
            moved = self.round(by_ns)?;
        }
        Ok(())
    }
}
