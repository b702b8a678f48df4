//! Transfers to sockets of blocks: blocks that echo send some pieces by transfers, and what peers get is in order whatever executors, networks, peers
//! and blocks do.

use crate::scene::{MS, Scene, Script, script};
use engine::topology::{Backend, FileAccess, FileSpec, SocketSpec};
use mqueue::abi::transfer_status as status;
use sim::net::Faults;
use sim::rng::Rng;
use sim::shared::lock;
use sim::socket_block::SocketBehaviour;
use sim::socket_peer::{Ending, Found, SocketClient};
use sim::transfers::{TransferBehaviour, TransferBooks, TransferSetup};
use wire::framing::Framing;

/// The listener of blocks.
const PORT: u16 = 2;
const SEEDS: u64 = 120;

/// Blocks that echo.
fn echo(seed: u64, transfers: TransferBehaviour, sockets: SocketBehaviour) -> Script {
    let mut script = script(Framing::LengthU16);
    script.setup.seed = seed;
    script.setup.topology.engine.workers = 1 + seed as usize % 2;
    let remote = seed % 3 == 1;
    let delay_ns = if remote { (0, 30_000) } else { (0, 0) };
    *script.behaviour() =
        sim::behaviour::Behaviour { remote, delay_ns, sockets, ..Default::default() };
    let service = script.service();
    service.mqueues = 1 + seed as u32 % 3;
    service.slots = 64;
    service.sockets_per_block = 3;
    service.socket_bytes = 4096;
    service.sockets.push(SocketSpec::listen(([127, 0, 0, 1], 9100)));
    let mut disk = Backend::transfers("disk", 1 << 16);
    disk.in_flight = 1 + seed as u32 % 4;
    service.backends.push(disk);
    service.files = vec![FileSpec::file("/data", FileAccess::Read)];
    script.setup.transfers =
        vec![TransferSetup { behaviour: transfers, ..TransferSetup::default() }];
    script
}

struct Play {
    scene: Scene,
    clients: Vec<SocketClient>,
    books: std::sync::Arc<std::sync::Mutex<TransferBooks>>,
    rng: Rng,
}

impl Play {
    fn new(script: Script, seed: u64) -> Self {
        let books = script.setup.transfers[0].books.clone();
        Self { scene: script.play(), clients: Vec::new(), books, rng: Rng::new(!seed) }
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
            self.scene.run(1);
            assert_eq!(lock(&self.books).wrong, None);
        }
    }

    fn run_to_the_end(&mut self) {
        for _ in 0..400 {
            if self.clients.iter().all(|client| client.found().is_some()) {
                break;
            }
            self.run(50);
        }
        let stuck = self.clients.iter().filter(|client| client.found().is_none()).count();
        assert_eq!(stuck, 0, "clients that wait without an end");
        self.scene.wait_ms(5);
    }

    fn found(&self, what: Found) -> usize {
        self.clients.iter().filter(|client| client.found() == Some(what)).count()
    }

    /// Every connection has ended, no slot is leased, no byte is left, and every command has its answer.
    fn check_all_over(&mut self) {
        for _ in 0..300 {
            let books = lock(&self.books);
            let is_over = books.answered() == books.asked;
            drop(books);
            if is_over {
                break;
            }
            self.scene.wait_ms(1);
        }
        let world = &self.scene.world;
        let counted = world.metrics.service(0);
        assert_eq!(counted.sockets_opened, counted.sockets_closed);
        let leases: usize = world.models.iter().map(|model| lock(model).leases()).sum();
        assert_eq!(leases, 0, "blocks have connections");
        for (books, in_rings) in world.socket_bytes(0) {
            assert_eq!((books.outstanding(), in_rings), (0, 0));
        }
        let books = lock(&self.books);
        assert_eq!(books.answered(), books.asked, "{books:?}");
        assert_eq!(books.started, books.ended, "{books:?}");
    }
}

#[test]
fn pieces_by_transfers_come_back_in_order() {
    let mut sent = 0;
    for seed in 0..SEEDS {
        let transfers =
            TransferBehaviour { takes_ns: (0, 300_000), ..TransferBehaviour::default() };
        let sockets = SocketBehaviour { transfer: 300, ..SocketBehaviour::default() };
        let mut play = Play::new(echo(seed, transfers, sockets), seed);
        for _ in 0..12 {
            let total = play.rng.between(1, 40_000);
            play.connect(total, Ending::Orderly);
            play.run(3);
        }
        play.run_to_the_end();
        let ends = play.scene.world.metrics.service(0).socket_ends;
        assert_eq!(play.found(Found::All), 12, "seed {seed}: {ends:?} {:?}", lock(&play.books));
        play.check_all_over();
        let books = lock(&play.books);
        assert_eq!(books.answers.get(&status::OK), Some(&books.asked), "seed {seed}: {books:?}");
        sent += books.started;
    }
    assert!(sent > 20 * SEEDS, "{sent}");
}

/// All pieces of these blocks go by transfers, one at a time.
fn one_at_a_time(seed: u64, takes_ns: u64) -> Script {
    let transfers =
        TransferBehaviour { takes_ns: (takes_ns, takes_ns), ..TransferBehaviour::default() };
    let sockets = SocketBehaviour { transfer: 1000, ..SocketBehaviour::default() };
    let mut script = echo(seed, transfers, sockets);
    script.setup.topology.engine.workers = 1;
    script.service().mqueues = 1;
    script.service().backends[0].in_flight = 1;
    script
}

/// A command waits because another transfer runs for longer than `idle_ms`: the connection that it is for has no bytes meanwhile, and is not idle.
#[test]
fn a_connection_for_which_a_command_waits_is_not_idle() {
    for seed in 0..12 {
        let mut script = one_at_a_time(seed, 10 * MS);
        script.service().sockets[0].idle_ms = 3;
        let mut play = Play::new(script, seed);
        (0..3).for_each(|_| play.connect(1000, Ending::Idle(1)));
        play.run(5000);
        let received: Vec<_> = play.clients.iter().map(SocketClient::received).collect();
        assert_eq!(received, [1; 3], "seed {seed}");
        // Then they are.
        play.run_to_the_end();
        let ends = play.scene.world.metrics.service(0).socket_ends;
        assert_eq!(ends[sockets::End::Idle as usize], 3, "seed {seed}: {ends:?}");
        play.check_all_over();
    }
}

/// Transfers in flight need all places for answers, so a command whose time is over cannot even be refused: its block is not to blame, and
/// its connection, which is closed already, is not slow.
#[test]
fn a_connection_is_held_while_transfers_in_flight_leave_no_room() {
    for seed in 0..12 {
        let mut script = one_at_a_time(seed, 30 * MS);
        script.limits().slow_client_ms = 3;
        let service = script.service();
        (service.slots, service.sockets_per_block) = (4, 6);
        (service.backends[0].in_flight, service.backends[0].timeout_ms) = (4, 5);
        let mut play = Play::new(script, seed);
        (0..5).for_each(|_| play.connect(1, Ending::Orderly));
        play.run_to_the_end();
        let ends = play.scene.world.metrics.service(0).socket_ends;
        assert_eq!(play.found(Found::All), 5, "seed {seed}: {ends:?} {:?}", lock(&play.books));
        play.check_all_over();
    }
}

/// Everything goes wrong for a while, then nothing does: no peer gets bytes in another order, or takes a part for the whole.
#[test]
fn whatever_fails_no_peer_gets_another_order() {
    let mut found = [0; 3];
    let mut answers = std::collections::BTreeMap::new();
    for seed in 0..SEEDS {
        let transfers = TransferBehaviour {
            takes_ns: (0, if seed % 2 == 0 { 4_000_000 } else { 300_000 }),
            refuse: 50,
            fail: 50,
            repeat: 100,
            unknown: 100,
            ..TransferBehaviour::default()
        };
        let sockets =
            SocketBehaviour { transfer: 300, idle: 200, reset: 5, ..SocketBehaviour::default() };
        let mut script = echo(seed, transfers, sockets);
        script.limits().slow_client_ms = 3;
        // Of some seeds, commands wait in their rings until their time is over.
        if seed % 2 == 0 {
            script.service().backends[0].timeout_ms = 1;
        }
        let mut play = Play::new(script, seed);
        play.scene.faults(Faults {
            short_read: 200,
            short_write: 200,
            spurious: 50,
            late_event: 200,
            exhausted: 20,
            reset_destroys: 500,
            delay_ns: (0, MS / 5),
            pipe_bytes: 3000,
            ..Faults::default()
        });
        for _ in 0..25 {
            let total = play.rng.between(1, 30_000);
            let after = play.rng.below(total);
            let ending = match play.rng.below(6) {
                0 => Ending::Close(after),
                1 => Ending::Reset(after),
                2 => Ending::Deaf(after),
                _ => Ending::Orderly,
            };
            play.connect(total, ending);
            let rounds = play.rng.below(40);
            play.run(rounds as usize);
        }
        play.scene.faults(Faults::default());
        play.run(2000);
        play.clients.iter_mut().for_each(SocketClient::recover);
        play.run_to_the_end();
        play.check_all_over();
        for (sum, what) in found.iter_mut().zip([Found::All, Found::Reset, Found::Left]) {
            *sum += play.found(what);
        }
        for (status, count) in &lock(&play.books).answers {
            *answers.entry(*status).or_insert(0) += count;
        }
    }
    assert!(found.iter().all(|count| *count > 50), "{found:?}");
    for status in [status::OK, status::CLOSED, status::EXHAUSTED, status::FAILED, status::TIMEOUT] {
        assert!(answers.get(&status).is_some_and(|count| *count > 10), "{status}: {answers:?}");
    }
}
