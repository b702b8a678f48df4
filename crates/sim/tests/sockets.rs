//! Sockets of blocks: connections that end in every way, blocks that break every rule, and the books of bytes at every step.

mod scene;

use engine::topology::SocketSpec;
use scene::{MS, Scene, Script, script};
use sim::net::{Faults, lock};
use sim::rng::Rng;
use sim::socket_block::SocketBehaviour;
use sim::socket_peer::{EchoServer, Ending, Found, SocketClient};
use wire::DropReason;
use wire::framing::Framing;

/// The listener of blocks.
const PORT: u16 = 2;

/// Services whose blocks echo, or with `relay` pass bytes on to a server that does.
fn sockets(seed: u64, relay: bool) -> Script {
    let mut script = script(Framing::LengthU16);
    script.setup.seed = seed;
    script.setup.topology.engine.workers = 1 + seed as usize % 2;
    let remote = seed % 3 == 1;
    let delay_ns = if remote { (0, 30_000) } else { (0, 0) };
    *script.behaviour() = sim::accelerator::Behaviour { remote, delay_ns, ..Default::default() };
    let service = script.service();
    service.mqueues = 1 + seed as u32 % 3;
    service.sockets_per_block = if relay { 4 } else { 3 };
    service.socket_bytes = 4096;
    service.sockets.push(SocketSpec::Listen(([127, 0, 0, 1], 9100).into()));
    if relay {
        service.sockets.push(SocketSpec::Connect(([203, 0, 113, 7], 7).into()));
    }
    script
}

/// A scene with peers.
struct Play {
    scene: Scene,
    clients: Vec<SocketClient>,
    server: EchoServer,
    rng: Rng,
}

impl Play {
    fn new(script: Script, seed: u64) -> Self {
        let server = EchoServer::new(0);
        Self { scene: script.play(), clients: Vec::new(), server, rng: Rng::new(!seed) }
    }

    fn connect(&mut self, total: u64, ending: Ending) {
        let workers = self.scene.world.workers.len() as u64;
        let peer = self.scene.client_of(self.rng.below(workers) as usize, PORT);
        let net = &mut lock(&self.scene.world.net);
        self.clients.push(SocketClient::connect(net, (peer, PORT), total, ending));
    }

    fn run(&mut self, rounds: usize) {
        for _ in 0..rounds {
            let net = self.scene.world.net.clone();
            for client in &mut self.clients {
                client.step(&mut lock(&net), &mut self.rng);
            }
            if self.scene.world.topology().services[0].sockets.len() > 1 {
                self.server.step(&mut lock(&net), &mut self.rng);
            }
            self.scene.run(1);
        }
    }

    /// Runs until every client has ended.
    fn run_to_the_end(&mut self) {
        for _ in 0..400 {
            if self.clients.iter().all(|client| client.found().is_some()) {
                break;
            }
            self.run(50);
        }
        let stuck = self.clients.iter().filter(|client| client.found().is_none()).count();
        if stuck > 0 {
            let world = &self.scene.world;
            eprintln!("{:?}", self.clients);
            eprintln!("{:?}", world.socket_bytes(0));
            eprintln!("{:?}", world.metrics.service(0));
            for m in &world.models {
                eprintln!("{}", lock(m).leases());
            }
        }
        assert_eq!(stuck, 0, "clients wait for ever");
        // What is left of connections that were reset has limits of time.
        self.scene.wait_ms(5);
    }

    fn found(&self, what: Found) -> usize {
        self.clients.iter().filter(|client| client.found() == Some(what)).count()
    }

    /// Every connection has ended, no slot is leased, and no byte is left.
    fn check_all_over(&self) {
        let world = &self.scene.world;
        let counted = world.metrics.service(0);
        assert_eq!(counted.sockets_opened, counted.sockets_closed);
        let leases: usize = world.models.iter().map(|model| lock(model).leases()).sum();
        assert_eq!(leases, 0, "blocks have connections");
        for (books, in_rings) in world.socket_bytes(0) {
            assert_eq!((books.outstanding(), in_rings), (0, 0));
        }
    }
}

fn seeds() -> std::ops::Range<u64> {
    0..12
}

#[test]
fn every_byte_comes_back() {
    for (seed, relay) in seeds().flat_map(|seed| [(seed, false), (seed, true)]) {
        let mut play = Play::new(sockets(seed, relay), seed);
        // More than there are slots: some wait for others to end.
        for _ in 0..15 {
            let total = play.rng.between(1, 40_000);
            play.connect(total, Ending::Orderly);
            play.run(3);
        }
        play.run_to_the_end();
        assert_eq!(play.found(Found::All), 15, "seed {seed}, relay: {relay}");
        play.check_all_over();
        let sent: u64 = play.clients.iter().map(|client| client.received()).sum();
        let [(received, _), (_, _)] = play.scene.world.socket_bytes(0);
        let ways = if relay { 2 } else { 1 };
        assert_eq!((received.taken, received.dropped), (ways * sent, 0));
        assert_eq!(play.scene.world.metrics.service(0).sockets_opened, 15 * ways);
        assert_eq!(play.scene.world.metrics.service(0).socket_bad_commands, 0);
    }
}
