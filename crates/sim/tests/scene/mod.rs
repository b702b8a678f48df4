//! A scripted setup for tests: one service, a perfect network, clients under the test's control.
#![allow(dead_code)] // Each test file uses a part.

use std::net::SocketAddr;

use engine::topology::{
    Accelerator, AcceleratorKind, Backend as BackendSpec, CpuPlacement, EngineSettings, Limits,
    Listen, STACK_KIB, Service, Topology,
};
use sim::ConnId;
use sim::backend::{Backend, BackendBehaviour};
use sim::behaviour::Behaviour;
use sim::client_address;
use sim::message::{Ask, Body, Flavor, request_payload, request_wire};
use sim::net::{Faults, PeerRead};
use sim::nic::SimNic;
use sim::rng::Rng;
use sim::shared::lock;
use sim::world::{Setup, World};
use wire::DropReason;
use wire::framing::Framing;
use wire::nic::Transport;

pub(crate) const MS: u64 = 1_000_000;
/// Port 0 of every scene.
pub(crate) const UDP: u16 = 0;
/// Port 1 of every scene.
pub(crate) const TCP: u16 = 1;

/// The start of a scene; change what the test is about.
pub(crate) struct Script {
    pub(crate) setup: Setup,
    pub(crate) backend_behaviour: BackendBehaviour,
    /// The server behind a proxy.
    upstream: Option<BackendSpec>,
}

/// One service with port 0 over UDP and port 1 over TCP, one mqueue of four slots.
pub(crate) fn script(framing: Framing) -> Script {
    let listen =
        |transport, port| Listen { transport, address: SocketAddr::from(([127, 0, 0, 1], port)) };
    let ports = vec![listen(Transport::Udp, 9000), listen(Transport::Tcp, 9000)];
    let mut service = Service::new("service", ports, "model");
    service.framing = framing;
    service.mqueues = 1;
    service.slots = 4;
    let kind = AcceleratorKind::Cpu { placement: CpuPlacement::Worker, stack_kib: STACK_KIB };
    let topology = Topology {
        engine: EngineSettings::default(),
        limits: Limits::default(),
        accelerators: vec![Accelerator { name: "accelerator".into(), kind }],
        services: vec![service],
        tenants: Vec::new(),
    };
    let backend_behaviour = BackendBehaviour::SOUND;
    Script { setup: Setup::sound(topology), backend_behaviour, upstream: None }
}

impl Script {
    pub(crate) fn service(&mut self) -> &mut Service {
        &mut self.setup.topology.services[0]
    }

    pub(crate) fn limits(&mut self) -> &mut Limits {
        &mut self.setup.topology.limits
    }

    pub(crate) fn behaviour(&mut self) -> &mut Behaviour {
        &mut self.setup.behaviours[0]
    }

    /// Gives the service one backend.
    pub(crate) fn backend(&mut self, transport: Transport) -> &mut BackendSpec {
        let address = SocketAddr::from(([203, 0, 113, 1], 11_211));
        let backend = BackendSpec::new("store", transport, address, Framing::LengthU16);
        self.service().backends.push(backend);
        &mut self.service().backends[0]
    }

    /// Makes the service a proxy in front of a server, which answers as blocks would.
    pub(crate) fn upstream(&mut self, transport: Transport) {
        let address = SocketAddr::from(([203, 0, 113, 1], 11_211));
        let Service { listen, framing, .. } = self.service().clone();
        let sizes = Service::new("", Vec::new(), "");
        *self.service() = Service {
            framing,
            max_message_bytes: sizes.max_message_bytes,
            max_reply_bytes: 2048,
            ..Service::proxy("service", listen, address)
        };
        self.upstream = Some(BackendSpec::new("upstream", transport, address, framing));
    }

    /// Another service, equal to the first one as it is now, with sound blocks, behind port 2.
    pub(crate) fn another_service(&mut self, transport: Transport) {
        let mut other = self.service().clone();
        other.name = "other".into();
        other.listen = vec![Listen { transport, address: ([127, 0, 0, 1], 9001).into() }];
        self.setup.topology.services.push(other);
        self.setup.behaviours.push(Behaviour::default());
        self.setup.honest_backends.push(true);
    }

    pub(crate) fn play(self) -> Scene {
        let mut servers = self.setup.topology.services[0].backends.iter();
        let spec = servers.find(|spec| !spec.does_transfers()).cloned().or(self.upstream);
        let backend = spec.map(|spec| Backend::new(0, &spec, self.backend_behaviour, Rng::new(2)));
        let framing = self.setup.topology.services[0].framing;
        let world = World::build(&self.setup, |nic| nic);
        Scene { world, backend, framing, clients: 0 }
    }
}

pub(crate) struct Scene {
    pub(crate) world: World<SimNic>,
    pub(crate) backend: Option<Backend>,
    framing: Framing,
    clients: u32,
}

/// A request with a short reply.
pub(crate) fn request(sequence: u32) -> Body {
    Body { client: 0, sequence, key: 0, ask: Ask::Answer, want: 8, filler: 0 }
}

impl Scene {
    /// All workers turn `rounds` times, 10 us apart, and everything is checked each time.
    pub(crate) fn run(&mut self, rounds: usize) {
        self.run_apart(rounds, 10_000);
    }

    /// All workers turn once, after this time.
    pub(crate) fn run_one(&mut self, by_ns: u64) {
        self.run_apart(1, by_ns);
    }

    /// All workers turn for `ms` milliseconds, 100 us apart.
    pub(crate) fn wait_ms(&mut self, ms: usize) {
        self.run_apart(10 * ms, 100_000);
    }

    fn run_apart(&mut self, rounds: usize, by_ns: u64) {
        for _ in 0..rounds {
            if let Some(backend) = &mut self.backend {
                backend.step(&mut lock(&self.world.net));
            }
            self.world.run(1, by_ns);
        }
    }

    pub(crate) fn faults(&self, faults: Faults) {
        lock(&self.world.net).set_faults(faults);
    }

    pub(crate) fn dropped(&self, reason: DropReason) -> u64 {
        self.world.dropped(0, reason)
    }

    pub(crate) fn replied(&self) -> u64 {
        self.world.metrics.service(0).replied
    }

    /// The client whose socket `worker` of several gets.
    pub(crate) fn client_of(&mut self, worker: usize, port: u16) -> SocketAddr {
        loop {
            self.clients += 1;
            let peer = client_address(self.clients);
            if lock(&self.world.net).worker_of(peer, port) == worker {
                return peer;
            }
        }
    }

    /// A new client sends a datagram with this payload.
    pub(crate) fn datagram(&mut self, payload: &[u8]) -> SocketAddr {
        let peer = self.client_of(0, UDP);
        let local = [127, 0, 0, 1].into();
        lock(&self.world.net).send_datagram(peer, UDP, local, payload);
        peer
    }

    /// A new client of `worker` asks over UDP at a port.
    pub(crate) fn ask_at(&mut self, worker: usize, port: u16, body: Body) -> SocketAddr {
        self.ask_service_at(0, worker, port, body)
    }

    /// The same at a port of this service.
    pub(crate) fn ask_service_at(
        &mut self,
        service: usize,
        worker: usize,
        port: u16,
        body: Body,
    ) -> SocketAddr {
        let peer = self.client_of(worker, port);
        let body = Body { client: self.clients, ..body };
        let payload = request_payload(self.framing, &body, Flavor::Plain);
        let mut net = lock(&self.world.net);
        let local = [127, 0, 0, 1].into();
        let route = net.route(peer, port, local);
        net.ledger.ask(service, body, Some(route));
        net.send_datagram(peer, port, local, &payload);
        peer
    }

    /// A new client of `worker` asks over UDP.
    pub(crate) fn ask_from(&mut self, worker: usize, body: Body) -> SocketAddr {
        self.ask_at(worker, UDP, body)
    }

    /// A new client asks over UDP.
    pub(crate) fn ask(&mut self, body: Body) -> SocketAddr {
        self.ask_from(0, body)
    }

    /// A new client asks `times` times over UDP, before any reply.
    pub(crate) fn ask_often(&mut self, times: u32, body: Body) {
        let peer = self.client_of(0, UDP);
        let local = [127, 0, 0, 1].into();
        for sequence in 0..times {
            let body = Body { client: self.clients, sequence, ..body };
            let payload = request_payload(self.framing, &body, Flavor::Plain);
            let mut net = lock(&self.world.net);
            let route = net.route(peer, UDP, local);
            net.ledger.ask(0, body, Some(route));
            net.send_datagram(peer, UDP, local, &payload);
        }
    }

    /// As many new clients ask over UDP.
    pub(crate) fn ask_times(&mut self, times: u32, body: Body) {
        for _ in 0..times {
            self.ask(body);
        }
    }

    /// A new client of `worker` connects.
    pub(crate) fn connect_to(&mut self, worker: usize) -> Caller {
        let peer = self.client_of(worker, TCP);
        let conn = lock(&self.world.net).connect(peer, TCP);
        Caller { conn, id: self.clients }
    }

    pub(crate) fn connect(&mut self) -> Caller {
        self.connect_to(0)
    }

    /// A client writes bytes to its connection.
    pub(crate) fn say(&mut self, caller: Caller, bytes: &[u8]) {
        let count = lock(&self.world.net).peer_write(caller.conn, bytes);
        assert_eq!(count, bytes.len(), "the pipe is too small for the scene");
    }

    /// A client asks over its connection.
    pub(crate) fn call(&mut self, caller: Caller, body: Body) -> Body {
        self.call_as(caller, body, Flavor::Plain)
    }

    pub(crate) fn call_as(&mut self, caller: Caller, body: Body, flavor: Flavor) -> Body {
        let body = Body { client: caller.id, ..body };
        lock(&self.world.net).ledger.ask(0, body, None);
        let wire = request_wire(self.framing, &request_payload(self.framing, &body, flavor));
        self.say(caller, &wire);
        body
    }

    /// What a client finds when it reads everything there is.
    pub(crate) fn hear(&mut self, caller: Caller) -> Vec<u8> {
        let mut heard = Vec::new();
        while let PeerRead::Bytes(bytes) = self.read(caller) {
            heard.extend(bytes);
        }
        heard
    }

    pub(crate) fn read(&mut self, caller: Caller) -> PeerRead {
        lock(&self.world.net).peer_read(caller.conn, usize::MAX)
    }
}

/// A client with a connection.
#[derive(Clone, Copy)]
pub(crate) struct Caller {
    pub(crate) conn: ConnId,
    pub(crate) id: u32,
}
