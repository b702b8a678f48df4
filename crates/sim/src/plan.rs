//! The plan of a seed: a topology, peers, and faults.

mod links;
mod sockets;

use std::net::{IpAddr, SocketAddr};

use engine::topology::{
    Accelerator, AcceleratorKind, Backend as BackendSpec, Bundles, CpuPlacement, Dispatch,
    EngineSettings, Limits, Listen, Polling, Replies, Rings, STACK_KIB, Service, Sockets, Topology,
};
use wire::DropReason;
use wire::framing::{Delimits, Framing};
use wire::nic::{PortIndex, Transport};

use crate::backend::{Backend, BackendBehaviour};
use crate::behaviour::Behaviour;
use crate::client::{DatagramClient, RequestMix};
use crate::conn::client_address;
use crate::message::{key_range, match_id, reply_filler_max};
use crate::net::{Faults, LinkFaults};
use crate::rng::Rng;
use crate::shm_client::{ModelShmClient, ShmBehaviour};
use crate::socket_peer::{EchoServer, SocketLoad};
use crate::stream_client::{Endings, StreamBehaviour, StreamClient};
use crate::world::Setup;
use crate::world::change::Keeps;
use crate::world::generations::Restart;

const US: u64 = 1_000;
const MS: u64 = 1_000_000;

/// Everything about a run that is decided before it starts.
#[derive(Debug)]
pub struct Plan {
    /// The engine and its accelerators.
    pub setup: Setup,
    /// Faults of the network.
    pub faults: Faults,
    /// The backends.
    pub backends: Vec<Backend>,
    /// Clients over UDP.
    pub datagram_clients: Vec<DatagramClient>,
    /// Clients over TCP.
    pub stream_clients: Vec<StreamClient>,
    /// Clients over shared memory.
    pub memory_clients: Vec<ModelShmClient>,
    /// Clients of blocks' sockets.
    pub socket_loads: Vec<SocketLoad>,
    /// Servers to which blocks connect.
    pub socket_servers: Vec<EchoServer>,
    /// Randomness of these servers.
    pub socket_rng: Rng,
    /// Randomness of the faults of links.
    pub link_rng: Rng,
    /// The first unused client number.
    pub next_id: u32,
    /// Turns under load.
    pub turns: u32,
    /// Shortest and longest time between two turns, in nanoseconds.
    pub stride_ns: (u64, u64),
    /// Control messages about what has left, per thousand turns.
    pub late_messages: u32,
    /// One turn in this many comes much later.
    pub pause_one_in: u64,
    /// The turn under load after which the drain begins; `None`: when all is quiet.
    pub drain_at: Option<u32>,
    /// The drain does not wait for clients that a reload in progress disconnects.
    pub drain_cuts_reload: bool,
    /// Services that are replaced under load.
    pub reloads: Vec<Reload>,
    /// Accelerators that restart under load.
    pub restarts: Vec<Restart>,
    /// Before a drain that is not early, everything must serve again.
    pub probe: bool,
    /// The probe does not wait until workers know the others' credit: for a test that shows why it waits.
    pub hasty_probe: bool,
    /// How long the drain may take, in nanoseconds.
    pub drain_ns: u64,
    /// For each service, whether its accelerators and backends are sound.
    pub sound: Vec<bool>,
    /// Randomness of the run itself.
    pub rng: Rng,
}

/// A service that is replaced by another version of itself, with other queues.
#[derive(Clone, Copy, Debug)]
pub struct Reload {
    /// The service.
    pub service: usize,
    /// The first turn under load after which it may happen.
    pub turn: u32,
    /// Slots of the new version's mqueues.
    pub slots: u32,
    /// What moves over.
    pub keeps: Keeps,
    /// Time limit for the old version to answer its requests, in nanoseconds.
    pub drain_ns: u64,
    /// It has begun.
    pub begun: bool,
}

impl Plan {
    /// The plan of a seed.
    pub fn of_seed(seed: u64) -> Self {
        let mut rng = Rng::new(seed);
        let mut services = Vec::new();
        let mut behaviours = Vec::new();
        let mut backend_behaviours = Vec::new();
        let mut accelerators = Vec::new();
        let count = rng.between(1, 3) as usize;
        // At most one service has faults, so that there is one that must not be affected.
        let faulty = rng.chance(700).then(|| rng.below(count as u64) as usize);
        for index in 0..count {
            let is_faulty = faulty == Some(index);
            let mut service = service(&mut rng, index, &mut accelerators, is_faulty);
            // A generator of its own, so that other runs do not change.
            let mut sizes = Rng::new(!seed.wrapping_add(index as u64));
            if service.accelerators.len() > 1 && sizes.chance(400) {
                service.share_out();
                let shares = service.shares.iter_mut();
                shares.for_each(|share| share.mqueues = sizes.between(1, 6) as u32);
            }
            let these = draw_backend_behaviour(&mut rng, is_faulty);
            let swap = if is_faulty { sizes.pick(&[0, 0, 20, 300]) } else { 0 };
            backend_behaviours.push(BackendBehaviour { swap, ..these });
            for backend in &mut service.backends {
                if sizes.chance(400) {
                    backend.matching = match_id(backend.framing);
                }
                if sizes.chance(200) {
                    (backend.sockets, backend.connections) = (Sockets::PerRequest, 1);
                }
            }
            let mut bundles = Rng::named(seed, "bundles");
            bundles = (0..index).fold(bundles, |mut rng, _| rng.fork());
            service.bundles = bundles.pick(&[Bundles::Never, Bundles::Auto, Bundles::Always]);
            let forge = if is_faulty { bundles.pick(&[0, 0, 20, 300]) } else { 0 };
            let these = behaviour(&mut rng, is_faulty, &service);
            behaviours.push(Behaviour { bundle_forge: forge, ..these });
            services.push(service);
        }
        let topology = Topology {
            engine: EngineSettings {
                workers: rng.between(1, 4) as usize,
                polling: rng.pick(&[Polling::Spin, Polling::Adaptive, Polling::Block]),
                ..EngineSettings::default()
            },
            limits: limits(seed),
            accelerators,
            services,
            tenants: Vec::new(),
        };
        let setup = Setup {
            transfers: Vec::new(),
            honest_backends: backend_behaviours
                .iter()
                .zip(&topology.services)
                .map(is_honest)
                .collect(),
            behaviours,
            // Sequences of granule rings wrap at 2^32.
            ring_start: rng.pick(&[0, 0, (1 << 32) - 40, (1 << 31) - 3, 1 << 62]),
            seed: rng.draw(),
            links: Vec::new(),
            topology,
        };
        let backends = backends(&mut rng, &setup, &backend_behaviours);
        let turns = rng.between(1500, 4000) as u32;
        let setup_seed = setup.seed;
        let mut plan = Self {
            faults: faults(&mut rng),
            backends,
            datagram_clients: Vec::new(),
            stream_clients: Vec::new(),
            memory_clients: Vec::new(),
            socket_loads: Vec::new(),
            socket_servers: Vec::new(),
            socket_rng: Rng::named(seed, "servers of sockets"),
            link_rng: Rng::named(seed, "links"),
            next_id: 1,
            turns,
            stride_ns: rng.pick(&[(0, 3 * US), (0, 30 * US), (5 * US, 300 * US)]),
            late_messages: [0, 20, 300][(setup_seed % 3) as usize],
            pause_one_in: rng.pick(&[50, 400, u64::MAX]),
            drain_at: rng.chance(300).then(|| rng.below(turns.into()) as u32),
            drain_cuts_reload: setup_seed % 2 == 0,
            reloads: Vec::new(),
            restarts: Vec::new(),
            probe: rng.chance(500),
            hasty_probe: false,
            drain_ns: rng.pick(&[0, 5 * MS, 3000 * MS]),
            sound: (0..count).map(|s| faulty != Some(s)).collect(),
            setup,
            rng: rng.fork(),
        };
        plan.add_sockets(seed);
        plan.add_links(seed);
        plan.add_clients(&mut rng);
        plan.add_memory_clients(&mut rng);
        if rng.chance(300) {
            plan.add_reloads(&mut rng);
        }
        if let Some(faulty) = faulty.filter(|_| rng.chance(500)) {
            plan.add_restarts(&mut rng, faulty);
        }
        plan.add_holds();
        plan
    }

    fn add_clients(&mut self, rng: &mut Rng) {
        let services = self.setup.topology.services.iter().enumerate();
        let ports: Vec<_> = services
            .flat_map(|(service, spec)| spec.ports().map(move |port| (service, port)))
            .collect();
        for (port, (service, (listen, socket))) in ports.into_iter().enumerate() {
            if socket.is_some() {
                continue;
            }
            for _ in 0..rng.between(1, 5) {
                let request_mix = self.request_mix(rng, service, listen.transport);
                let rng = rng.fork();
                match listen.transport {
                    Transport::Udp => {
                        self.add_datagram_client(port as u16, listen, request_mix, rng)
                    }
                    Transport::Tcp => self.add_stream_client(port as u16, request_mix, rng),
                }
            }
        }
    }

    fn add_memory_clients(&mut self, rng: &mut Rng) {
        for service in 0..self.setup.topology.services.len() {
            if self.setup.topology.services[service].memory_ports.is_empty() {
                continue;
            }
            for _ in 0..rng.between(1, 3) {
                // A slot holds one message, as in datagrams.
                let request_mix = self.request_mix(rng, service, Transport::Udp);
                let request_mix = RequestMix { too_long: 0, junk: 0, ..request_mix };
                let rng = rng.fork();
                self.add_memory_client(service, request_mix, rng);
            }
        }
    }

    /// Services are replaced.
    fn add_reloads(&mut self, rng: &mut Rng) {
        // A generator of its own, so that other runs do not change.
        let mut own = Rng::new(!self.setup.seed);
        for _ in 0..rng.between(1, 2) {
            let service = rng.below(self.setup.topology.services.len() as u64) as usize;
            let reload = Reload {
                service,
                turn: rng.below(self.turns.into()) as u32,
                slots: rng.pick(&[1, 2, 8, 64]),
                keeps: Keeps {
                    connections: rng.chance(700),
                    memory_clients: own.chance(700),
                    memory_ports: own.chance(500),
                },
                drain_ns: rng.pick(&[0, 5 * MS, 3000 * MS]),
                begun: false,
            };
            self.reloads.push(reload);
        }
    }

    /// The accelerators of a service restart, one after the other or overlapping.
    fn add_restarts(&mut self, rng: &mut Rng, service: usize) {
        let mut libraries = Rng::named(self.setup.seed, "libraries");
        let accelerators = self.setup.topology.services[service].accelerators.len();
        for accelerator in 0..accelerators {
            let behaviour = self.setup.behaviours[service];
            let sound = Behaviour { replay: behaviour.replay, ..behaviour.sound() };
            self.restarts.push(Restart {
                service,
                accelerator,
                turn: rng.below(self.turns.into()) as u32,
                reason: match rng.below(1000) {
                    0..300 => DropReason::AcceleratorStalled,
                    300..500 => DropReason::Reconfiguring,
                    _ => DropReason::AcceleratorLost,
                },
                gaps_ns: (rng.pick(&[0, 100 * US, 20 * MS]), rng.pick(&[0, 100 * US, 5 * MS])),
                next: Behaviour {
                    single_messages: libraries.chance(300),
                    ..rng.pick(&[sound, behaviour])
                },
                hold_ns: None,
                overdue: false,
                due: None,
            });
        }
    }

    /// Generations end as planned, of a service that may be sound: it must not be affected.
    fn add_holds(&mut self) {
        // A generator of its own, so that other runs do not change.
        let mut own = Rng::new(self.setup.seed ^ 0x401d);
        for planned in &mut self.restarts {
            if planned.reason == DropReason::Reconfiguring && own.chance(500) {
                planned.hold_ns = Some(own.pick(&[0, 5 * MS, 3000 * MS]));
            }
        }
        if !own.chance(300) {
            return;
        }
        let service = own.below(self.sound.len() as u64) as usize;
        for accelerator in 0..self.setup.topology.services[service].accelerators.len() {
            if self.restarts.iter().any(|r| (r.service, r.accelerator) == (service, accelerator)) {
                continue;
            }
            self.restarts.push(Restart {
                service,
                accelerator,
                turn: own.below(self.turns.into()) as u32,
                reason: DropReason::Reconfiguring,
                gaps_ns: (own.pick(&[0, 100 * US, 20 * MS]), own.pick(&[0, 100 * US, 5 * MS])),
                next: self.setup.behaviours[service],
                // Unanswered backend requests take until their time-out.
                hold_ns: Some(3000 * MS),
                overdue: false,
                due: None,
            });
        }
    }

    fn add_memory_client(&mut self, service: usize, request_mix: RequestMix, mut rng: Rng) {
        let behaviour = ShmBehaviour {
            depth: rng.pick(&[1, 4, 64, 1024]),
            burst: rng.pick(&[1, 4, 100]),
            pause_ns: rng.pick(&[(0, 20 * US), (5 * US, 200 * US), (MS, 5 * MS)]),
            deaf: rng.chance(200),
            leave: rng.pick(&[0, 0, 20]),
            bad_kind: rng.pick(&[0, 0, 0, 20]),
            scribble_after: rng.chance(200).then(|| rng.below(40) as u32),
        };
        let mut client = ModelShmClient::new(service, request_mix, behaviour, rng.fork());
        client = client.of_service(&self.setup.topology.services[service]);
        client.judged = !self.setup.behaviours[service].corrupts();
        client.ring_start = self.setup.ring_start;
        client.connections = rng.between(1, 3) as u32;
        client.requests = rng.between(1, 200) as u32;
        client.next_ns = rng.below(2 * MS);
        self.memory_clients.push(client);
    }

    fn request_mix(&self, rng: &mut Rng, service: usize, transport: Transport) -> RequestMix {
        let spec = &self.setup.topology.services[service];
        let udp = transport == Transport::Udp;
        let most = reply_filler_max(spec.framing, spec.max_reply_bytes as usize).unwrap_or(0);
        RequestMix {
            framing: spec.framing,
            max_message_bytes: spec.max_message_bytes as usize,
            reply_filler_max: most,
            keys: rng.pick(&[1, 4, 1000]),
            backend: if spec.backends.is_empty() { 0 } else { rng.pick(&[0, 300, 1000]) },
            drops: rng.pick(&[0, 0, 50]),
            unframable: if udp { 0 } else { rng.pick(&[0, 0, 30]) },
            too_long: if udp { rng.pick(&[0, 0, 50]) } else { 0 },
            junk: if udp { rng.pick(&[0, 0, 50]) } else { 0 },
            silent: if udp { 0 } else { rng.pick(&[0, 200]) },
            heavy: rng.pick(&[100, 100, 1000]),
        }
    }

    fn add_datagram_client(
        &mut self,
        port: PortIndex,
        listen: Listen,
        request_mix: RequestMix,
        mut rng: Rng,
    ) {
        let id = self.next_id;
        self.next_id += 1;
        let local = match listen.address.ip() {
            ip if ip.is_unspecified() => IpAddr::from([10, 0, 0, rng.between(1, 3) as u8]),
            ip => ip,
        };
        // A generator of its own, so that other runs do not change.
        let mut own = Rng::new(self.setup.seed ^ u64::from(id));
        let mut peer = client_address(id);
        if own.chance(100) {
            // Each client has an id of its own, and there are few.
            peer.set_port(1 + (id % 1000) as u16);
        }
        let forges = own.pick(&[0, 0, 50]);
        let alike_chance = own.pick(&[0, 300, 1000]);
        let left = rng.between(20, 200) as u32;
        let burst = rng.pick(&[1, 4, 64]);
        self.datagram_clients.push(DatagramClient {
            id,
            service: self.service_of(port),
            port,
            peer,
            local,
            request_mix,
            left,
            burst: burst.max(if alike_chance == 1000 { 64 } else { 1 }),
            pause_ns: rng.pick(&[(0, 10 * US), (20 * US, 2 * MS)]),
            next_ns: rng.below(MS),
            rng,
            sequence: 0,
            received: 0,
            forges,
            alike_chance,
            alike: None,
        });
    }

    fn add_stream_client(&mut self, port: PortIndex, request_mix: RequestMix, mut rng: Rng) {
        let service = self.service_of(port);
        let spec = &self.setup.topology.services[service];
        let behaviour = StreamBehaviour {
            pipeline: rng.pick(&[1, 3, 16, 100]),
            write_max: rng.pick(&[1, 7, 100, 1500, 100_000]),
            read_max: rng.pick(&[0, 1, 50, 4096, 100_000, 100_000]),
            pause_ns: rng.pick(&[(0, 20 * US), (5 * US, 200 * US), (MS, 10 * MS)]),
            bogus: rng.pick(&[0, 0, 50]),
            endings: if rng.chance(500) { Endings::ALL } else { Endings::GENTLE },
        };
        let mut client = StreamClient::new(service, port, request_mix, behaviour, rng.fork());
        client.ordered = spec.ordered;
        client.replies = spec.replies == Replies::One;
        client.judged = !self.setup.behaviours[service].corrupts();
        client.connections = rng.between(1, 6) as u32;
        client.requests = rng.between(0, 60) as u32;
        client.next_ns = rng.below(2 * MS);
        self.stream_clients.push(client);
    }

    /// How many clients there are.
    pub fn client_count(&self) -> usize {
        let messages = self.datagram_clients.len() + self.stream_clients.len();
        messages + self.memory_clients.len() + self.socket_loads.len()
    }

    /// Keeps only these clients, by index: those over UDP, over TCP, over shared memory, of sockets.
    pub fn keep_clients(&mut self, kept: &[usize]) {
        let mut place = 0..;
        let mut keep = || kept.contains(&place.next().expect("endless"));
        self.datagram_clients.retain(|_| keep());
        self.stream_clients.retain(|_| keep());
        self.memory_clients.retain(|_| keep());
        self.socket_loads.retain(|_| keep());
    }

    /// The maximum number of requests of any client.
    pub fn requests_max(&self) -> u32 {
        let datagrams = self.datagram_clients.iter().map(|c| c.left);
        let streams = self.stream_clients.iter().map(|c| c.requests);
        let memory = self.memory_clients.iter().map(|c| c.requests);
        let sockets = self.socket_loads.iter().map(|load| load.left);
        datagrams.chain(streams).chain(memory).chain(sockets).max().unwrap_or(0)
    }

    /// Limits every client to `most` requests.
    pub fn limit_requests(&mut self, most: u32) {
        self.datagram_clients.iter_mut().for_each(|c| c.left = c.left.min(most));
        self.stream_clients.iter_mut().for_each(|c| c.requests = c.requests.min(most));
        self.memory_clients.iter_mut().for_each(|c| c.requests = c.requests.min(most));
        self.socket_loads.iter_mut().for_each(|load| load.left = load.left.min(most));
    }

    fn service_of(&self, port: PortIndex) -> usize {
        let (service, _) = self.setup.topology.ports().nth(port as usize).expect("it has clients");
        service
    }
}

/// A generator for each limit, so that a new limit leaves the plans of all seeds otherwise as they are.
fn limits(seed: u64) -> Limits {
    let limit = |name: &str| Rng::named(seed, &format!("limits.{name}"));
    Limits {
        connections: limit("connections").pick(&[2, 16, 200]),
        pipelined: limit("pipelined").pick(&[1, 2, 8, 64, 1000]),
        idle_ms: limit("idle_ms").pick(&[30, 60_000]),
        slow_client_ms: limit("slow_client_ms").pick(&[20, 500]),
        udp_reply_ratio: limit("udp_reply_ratio").pick(&[None, Some(0), Some(3)]),
        udp_privileged_sources: limit("udp_privileged_sources").pick(&[
            None,
            Some(true),
            Some(false),
        ]),
        early_reply_bytes: limit("early_reply_bytes").pick(&[0, 300, 64 << 20]),
        in_place_bytes: limit("in_place_bytes").pick(&[100, 500, 8192]),
        ..Limits::default()
    }
}

fn faults(rng: &mut Rng) -> Faults {
    let mut rate = |rates: &[u32]| rng.pick(rates);
    Faults {
        lose: rate(&[0, 10, 200]),
        duplicate: rate(&[0, 10, 200]),
        corrupt: rate(&[0, 0, 20]),
        truncate: rate(&[0, 0, 20]),
        refuse_send: rate(&[0, 0, 20]),
        full_send: rate(&[0, 50, 900]),
        short_read: rate(&[0, 100, 900]),
        short_write: rate(&[0, 100, 900]),
        spurious: rate(&[0, 20]),
        late_event: rate(&[0, 100, 500]),
        exhausted: rate(&[0, 0, 50]),
        reset_destroys: rate(&[0, 500, 1000]),
        delay_ns: rng.pick(&[(0, 0), (5 * US, 50 * US), (10 * US, 2 * MS)]),
        socket_datagrams: rng.pick(&[4, 50, 10_000]),
        pipe_bytes: rng.pick(&[50, 2000, 1 << 20]),
        link: LinkFaults::default(),
    }
}

fn framing(rng: &mut Rng) -> Framing {
    let all = Framing::all(100).map(|framing| (framing.to_string(), framing));
    // The largest grammar, twice as often.
    rng.pick_named(all.chain([("memcached, again".to_owned(), Framing::Memcached)]))
}

fn service(
    rng: &mut Rng,
    index: usize,
    accelerators: &mut Vec<Accelerator>,
    faulty: bool,
) -> Service {
    let framing = framing(rng);
    let mut listen = Vec::new();
    let kinds: &[Transport] = match rng.below(4) {
        0 => &[Transport::Udp],
        1 => &[Transport::Tcp],
        2 => &[Transport::Udp, Transport::Tcp],
        _ => &[Transport::Tcp, Transport::Udp, Transport::Udp],
    };
    let ips: [IpAddr; 4] =
        [[127, 0, 0, 1].into(), [0, 0, 0, 0].into(), [192, 0, 2, 1].into(), [127, 0, 0, 2].into()];
    for (number, transport) in kinds.iter().enumerate() {
        let port = (9000 + 10 * index + number) as u16;
        let address = SocketAddr::new(rng.pick(&ips), port);
        listen.push(Listen { transport: *transport, address });
    }
    let mut service = Service::new(&format!("service{index}"), listen, "model");
    service.framing = framing;
    service.accelerators.clear();
    for _ in 0..rng.between(1, 2) {
        service.accelerators.push(accelerators.len());
        let placement = CpuPlacement::Worker;
        let name = format!("accelerator{}", accelerators.len());
        accelerators.push(Accelerator {
            name,
            kind: AcceleratorKind::Cpu { placement, stack_kib: STACK_KIB },
        });
    }
    if rng.chance(350) {
        service.memory_ports.push(format!("/run/{index}").into());
    }
    service.mqueues = rng.between(1, 6) as u32;
    service.slots = rng.pick(&[1, 2, 8, 64]);
    // Above 1.5 KiB there are arenas, of the minimum size, to be full sometimes.
    service.arena_bytes = 1;
    service.max_message_bytes = rng.pick(&[200, 777, 1500, 3000]);
    service.max_reply_bytes = rng.pick(&[200, 777, 1500, 3000]);
    if framing == Framing::Raw {
        // Its kernels return what they get.
        service.max_reply_bytes = service.max_message_bytes;
    }
    service.rings = rng.pick(&[Rings::Auto, Rings::Doorbell, Rings::Granule, Rings::Granule8]);
    service.replies = if rng.chance(150) { Replies::None } else { Replies::One };
    service.ordered = framing == Framing::Raw || rng.chance(700);
    service.dispatch = rng.pick(&[
        Dispatch::RoundRobin,
        Dispatch::LeastLoaded,
        Dispatch::FlowHash,
        Dispatch::KeyHash(key_range(framing)),
    ]);
    if framing == Framing::Raw && matches!(service.dispatch, Dispatch::KeyHash(_)) {
        // Pieces of a raw stream have no keys.
        service.dispatch = Dispatch::RoundRobin;
    }
    service.request_timeout_ms = if faulty { rng.pick(&[5, 50, 3000]) } else { 1000 };
    service.queue_us_max = rng.pick(&[0, 0, 500, 5000]);
    if rng.chance(if faulty { 700 } else { 300 }) {
        service.backends.push(backend(rng, index));
    }
    service
}

fn backend(rng: &mut Rng, index: usize) -> BackendSpec {
    let transport = rng.pick(&[Transport::Tcp, Transport::Tcp, Transport::Udp]);
    // The end of an answer must be recognisable.
    let all = Framing::all(64).filter(|framing| framing.delimits() != Delimits::Nothing);
    let framing = rng.pick_named(all.map(|framing| (framing.to_string(), framing)));
    let address = SocketAddr::from(([203, 0, 113, 1 + index as u8], 11_211));
    let mut backend = BackendSpec::new("store", transport, address, framing);
    backend.connections = rng.between(1, 3) as u32;
    backend.in_flight = rng.pick(&[1, 4, 64]);
    backend.timeout_ms = rng.pick(&[1, 20, 100]);
    backend.max_message_bytes = rng.pick(&[300, 2048]);
    backend
}

fn draw_backend_behaviour(rng: &mut Rng, faulty: bool) -> BackendBehaviour {
    let sound = BackendBehaviour {
        delay_ns: rng.pick(&[(0, 0), (10 * US, 900 * US)]),
        ..BackendBehaviour::SOUND
    };
    if !faulty {
        return sound;
    }
    let mut rate = |rates: &[u32]| rng.pick(rates);
    BackendBehaviour {
        late: rate(&[0, 50, 300]),
        hang: rate(&[0, 20]),
        close: rate(&[0, 20, 200]),
        cut: rate(&[0, 0, 20, 200]),
        garbage: rate(&[0, 0, 20, 300]),
        unasked: rate(&[0, 0, 20, 300]),
        too_long: rate(&[0, 0, 20, 300]),
        change_reachability: rate(&[0, 1, 20]),
        late_ns: rng.pick(&[2 * MS, 150 * MS, 1500 * MS]),
        ..sound
    }
}

/// Whether a service's backends answer correctly, or wrong answers arrive at a closed socket.
fn is_honest((backend_behaviour, service): (&BackendBehaviour, &Service)) -> bool {
    let alone = service.backends.iter().all(|backend| backend.sockets == Sockets::PerRequest);
    BackendBehaviour {
        unasked: if alone { 0 } else { backend_behaviour.unasked },
        ..*backend_behaviour
    }
    .is_honest()
}

fn behaviour(rng: &mut Rng, faulty: bool, service: &Service) -> Behaviour {
    let sound = Behaviour {
        remote: rng.chance(500),
        delay_ns: rng.pick(&[(0, 0), (US, 20 * US), (50 * US, 200 * US)]),
        overlap: rng.pick(&[0, 3, 100]),
        spurious: rng.pick(&[0, 100]),
        ..Behaviour::default()
    };
    if !faulty {
        return sound;
    }
    let only_block = rng.chance(500).then(|| rng.below(service.mqueues.into()) as u32);
    let mut after = |per_mille: u32| rng.chance(per_mille).then(|| rng.below(60));
    let (stall_after, die_after, scribble_after) = (after(250), after(150), after(250));
    let mut rate = || rng.pick(&[0, 0, 20, 300]);
    Behaviour {
        twice: rate(),
        late: rate(),
        swallow: rate(),
        reject: rate(),
        bad_length: rate(),
        too_long: rate(),
        forge: rate(),
        steal: rate(),
        bad_kind: rate(),
        bad_header: rate(),
        unwanted: rate(),
        late_ns: rng.pick(&[10 * MS, 200 * MS]),
        replay: rng.pick(&[0, 300]),
        wide: rng.chance(300),
        only_block,
        stall_after,
        die_after,
        scribble_after,
        ..sound
    }
}

fn backends(rng: &mut Rng, setup: &Setup, backend_behaviour: &[BackendBehaviour]) -> Vec<Backend> {
    let mut backends = Vec::new();
    let services = setup.topology.services.iter().zip(backend_behaviour).zip(&setup.behaviours);
    for ((service, backend_behaviour), behaviour) in services {
        for spec in &service.backends {
            let mut backend = Backend::new(backends.len(), spec, *backend_behaviour, rng.fork());
            if behaviour.corrupts() {
                backend.tolerate_garbage();
            }
            backends.push(backend);
        }
    }
    backends
}
