//! Transfers that kernels ask for: kernels that send anything, executors that refuse, fail, lie and forget, blocks and generations that end, and engines that
//! drain and stop. Each command is answered once or lost with its block, and nothing is left behind.

use std::sync::{Arc, Mutex};

use crate::scene::{Scene, request, script};
use engine::topology::{Backend, FileAccess, FileSpec};
use mqueue::abi::transfer_status as status;
use sim::behaviour::Behaviour;
use sim::message::{Ask, Body};
use sim::rng::Rng;
use sim::shared::lock;
use sim::transfers::{TransferBehaviour, TransferBooks, TransferSetup};
use wire::DropReason;
use wire::framing::Framing;
use wire::nic::Transport;

const SEEDS: u64 = 120;
/// The port of the other service.
const OTHER: u16 = 2;

type Books = Arc<Mutex<TransferBooks>>;

struct Play {
    scene: Scene,
    /// Of the service under test, and of another one, whose kernels and executors are sound.
    books: [Books; 2],
    rng: Rng,
    asked: u32,
}

impl Play {
    fn new(seed: u64, transfers: TransferBehaviour, blocks: Behaviour) -> Self {
        Self::with_limit(seed, transfers, blocks, 30_000)
    }

    fn with_limit(
        seed: u64,
        transfers: TransferBehaviour,
        blocks: Behaviour,
        timeout_ms: u64,
    ) -> Self {
        let mut rng = Rng::new(seed);
        let mut script = script(Framing::LengthU16);
        script.setup.seed = seed;
        script.setup.topology.engine.workers = 1 + seed as usize % 2;
        let service = script.service();
        service.mqueues = rng.between(1, 3) as u32;
        service.slots = 64;
        let mut disk = Backend::transfers("disk", 1 << 16);
        disk.in_flight = rng.between(1, 4) as u32;
        disk.timeout_ms = timeout_ms;
        service.backends.push(disk);
        if seed % 3 == 0 {
            // It has rings too, which no block uses.
            let nowhere = std::net::SocketAddr::from(([203, 0, 113, 8], 8));
            let server = Backend::new("db", Transport::Udp, nowhere, Framing::LengthU16);
            service.backends.push(server);
        }
        service.files = vec![
            FileSpec::file("/model", FileAccess::Read),
            FileSpec::file("/log", FileAccess::Write),
            FileSpec::connection(std::net::SocketAddr::from(([203, 0, 113, 9], 9))),
        ];
        script.another_service(Transport::Udp);
        script.setup.behaviours[1].overlap = 3;
        *script.behaviour() = blocks;
        let sound = TransferBehaviour { takes_ns: (0, 200_000), ..TransferBehaviour::default() };
        let setups = [transfers, sound]
            .map(|behaviour| TransferSetup { behaviour, books: Books::default() });
        let books = setups.each_ref().map(|setup| setup.books.clone());
        script.setup.transfers = setups.to_vec();
        Self { scene: script.play(), books, rng, asked: 0 }
    }

    /// Clients of both services ask, and everything is checked at each step.
    fn ask(&mut self, times: u32) {
        for _ in 0..times {
            self.asked += 1;
            let body = Body { ask: Ask::Backend, ..request(self.asked) };
            let workers = self.scene.world.workers.len() as u64;
            for (service, port) in [(0, crate::scene::UDP), (1, OTHER)] {
                let worker = self.rng.below(workers) as usize;
                self.scene.ask_service_at(service, worker, port, body);
            }
            let rounds = self.rng.below(12) as usize;
            self.scene.run(rounds);
            self.check();
        }
    }

    fn check(&self) {
        for books in &self.books {
            let books = lock(books);
            assert_eq!(books.wrong, None);
            assert!(books.ended + books.cancelled <= books.started, "{books:?}");
            assert!(books.answered() <= books.asked, "{books:?}");
        }
    }

    /// Until nothing is in flight at the other service; it has lost nothing.
    fn settle(&mut self) {
        for _ in 0..300 {
            self.scene.wait_ms(1);
            if self.scene.world.in_flight(1) == 0 {
                break;
            }
        }
        self.check();
        let counted = self.scene.world.metrics.service(1);
        assert_eq!((counted.dropped_requests(), self.scene.world.in_flight(1)), (0, 0));
        assert_eq!(counted.replied, u64::from(self.asked));
        assert_eq!(counted.backend_sent, counted.backend_answered);
        let books = lock(&self.books[1]);
        assert_eq!((books.started, books.ended), (books.asked, books.asked), "{books:?}");
        assert_eq!(books.answers.get(&status::OK), Some(&books.asked), "{books:?}");
    }

    /// The engine ends; whatever is in flight then is cancelled, and no executor is left.
    fn end(mut self) -> TransferBooks {
        self.scene.world.begin_drain();
        self.scene.run(5);
        self.scene.world.finish();
        self.scene.world.check_finished().unwrap();
        self.check();
        let books = self.books.clone();
        drop(self);
        let [of_service, other] = books.map(|books| lock(&books).clone());
        for books in [&of_service, &other] {
            assert_eq!(books.executors, 0, "{books:?}");
            assert_eq!(books.started, books.ended + books.cancelled, "{books:?}");
        }
        of_service
    }

    fn executors(&self) -> u64 {
        lock(&self.books[0]).executors
    }
}

/// Adds up what the seeds did: a fault that never occurred was not tested.
#[derive(Debug, Default)]
struct Sum(TransferBooks);

impl Sum {
    fn add(&mut self, books: &TransferBooks) {
        let sum = &mut self.0;
        sum.started += books.started;
        sum.ended += books.ended;
        sum.cancelled += books.cancelled;
        sum.refused += books.refused;
        sum.lies += books.lies;
        sum.wild += books.wild;
        for (status, count) in &books.answers {
            *sum.answers.entry(*status).or_default() += count;
        }
    }

    fn check(&self, wanted: &[u32]) {
        for status in wanted {
            assert!(self.0.answers.contains_key(status), "no answer has status {status}: {self:?}");
        }
    }
}

/// Kernels that ask anything, executors that do everything but hang: each command has one answer.
fn unruly(rng: &mut Rng) -> TransferBehaviour {
    TransferBehaviour {
        takes_ns: (0, rng.between(1, 600_000)),
        refuse: rng.pick(&[0, 100, 400]),
        fail: rng.pick(&[0, 200]),
        repeat: rng.pick(&[0, 300]),
        unknown: rng.pick(&[0, 300]),
        hang: 0,
        twice: 200,
        forge: 500,
        garble: 100,
    }
}

#[test]
fn every_command_is_answered_once_whatever_kernels_and_executors_do() {
    let mut sum = Sum::default();
    for seed in 0..SEEDS {
        let mut rng = Rng::new(!seed);
        let remote = rng.chance(300);
        let delay_ns = if remote { (0, 30_000) } else { (0, 0) };
        let blocks = Behaviour { remote, delay_ns, overlap: 3, ..Behaviour::default() };
        let mut play = Play::new(seed, unruly(&mut rng), blocks);
        play.ask(40);
        play.settle();
        for _ in 0..100 {
            play.scene.wait_ms(1);
        }
        let counted = play.scene.world.metrics.service(0);
        {
            let books = lock(&play.books[0]);
            assert_eq!(books.asked, books.answered(), "seed {seed}: {books:?}");
            assert_eq!(books.started, books.ended, "seed {seed}: {books:?}");
            assert_eq!(
                (counted.backend_sent, counted.backend_answered),
                (books.asked, books.asked)
            );
        }
        // Every request was answered by its block.
        let lost = counted.dropped_requests();
        assert_eq!((counted.replied, lost), (u64::from(play.asked), 0), "seed {seed}");
        let books = play.end();
        assert_eq!(books.cancelled, 0, "seed {seed}: {books:?}");
        sum.add(&books);
    }
    sum.check(&[
        status::OK,
        status::BAD_COMMAND,
        status::NOT_ALLOWED,
        status::RANGE,
        status::EXHAUSTED,
        status::FAILED,
        status::TIMEOUT,
    ]);
    assert!(sum.0.lies > 100 && sum.0.refused > 100 && sum.0.wild > 1000, "{sum:?}");
}

#[test]
fn a_block_that_ends_takes_its_transfers_with_it() {
    let mut sum = Sum::default();
    let mut ends = 0;
    for seed in 0..SEEDS {
        let mut rng = Rng::new(!seed);
        let transfers = TransferBehaviour { hang: 300, ..unruly(&mut rng) };
        let after = Some(rng.between(1, 25));
        let blocks = match seed % 3 {
            0 => Behaviour { die_after: after, ..Behaviour::default() },
            1 => Behaviour { stall_after: after, ..Behaviour::default() },
            _ => Behaviour { scribble_after: after, ..Behaviour::default() },
        };
        let mut play = Play::new(seed, transfers, Behaviour { overlap: 6, ..blocks });
        let made = play.executors();
        play.ask(40);
        play.settle();
        if seed % 3 == 0 {
            // Without a word from the executor: what it has for blocks that have ended is cancelled at once.
            let dead = play.scene.world.metrics.service(0).dropped(DropReason::MqueueDead);
            let left = play.executors();
            assert!(left <= made && (dead == 0 || left < made), "seed {seed}: {left} of {made}");
            ends += made - left;
        }
        sum.add(&play.end());
    }
    assert!(ends > SEEDS / 6 && sum.0.cancelled > SEEDS, "{ends} {sum:?}");
}

#[test]
fn a_generation_ends_with_its_transfers_and_the_next_one_has_its_own() {
    let mut sum = Sum::default();
    for seed in 0..SEEDS {
        let mut rng = Rng::new(!seed);
        let transfers = TransferBehaviour { hang: 200, ..unruly(&mut rng) };
        let blocks = Behaviour { overlap: 4, ..Behaviour::default() };
        let mut play = Play::new(seed, transfers, blocks);
        let made = play.executors();
        for _ in 0..3 {
            play.ask(10);
            play.scene.world.lose_runtime(0, 0, DropReason::AcceleratorLost);
            let rounds = play.rng.below(6) as usize;
            play.scene.run(rounds);
            play.scene.world.replace_rings(0, 0, blocks);
            play.scene.run(3);
            play.scene.world.resume_blocks(0, 0);
            play.scene.run(3);
            assert_eq!(play.executors(), made, "seed {seed}");
        }
        play.ask(10);
        play.settle();
        sum.add(&play.end());
    }
    assert!(sum.0.cancelled > SEEDS, "{sum:?}");
}

#[test]
fn an_engine_that_drains_or_stops_cancels_what_does_not_end() {
    let mut sum = Sum::default();
    for seed in 0..SEEDS {
        let mut rng = Rng::new(!seed);
        let hang = rng.pick(&[0, 300, 1000]);
        let transfers = TransferBehaviour { hang, ..unruly(&mut rng) };
        let mut play = Play::new(seed, transfers, Behaviour { overlap: 4, ..Behaviour::default() });
        play.ask(15);
        let workers = play.scene.world.workers.len();
        // Workers learn of it one after the other, while clients go on.
        for worker in 0..workers {
            play.scene.world.drain_worker(worker);
            let rounds = play.rng.below(30) as usize;
            play.scene.run(rounds);
            play.check();
        }
        sum.add(&play.end());
    }
    assert!(sum.0.cancelled > SEEDS, "{sum:?}");
}

/// Transfers that never end hold their places; a command that finds none is answered when its time is over.
#[test]
fn commands_that_wait_too_long_are_answered() {
    let mut expired = 0;
    for seed in 0..SEEDS {
        let mut rng = Rng::new(!seed);
        let transfers = TransferBehaviour { hang: 1000, ..unruly(&mut rng) };
        let blocks = Behaviour { overlap: 40, ..Behaviour::default() };
        let mut play = Play::with_limit(seed, transfers, blocks, 5);
        play.ask(20);
        play.settle();
        for _ in 0..300 {
            play.scene.wait_ms(1);
        }
        play.check();
        let books = lock(&play.books[0]).clone();
        assert_eq!(books.ended, 0, "seed {seed}: {books:?}");
        assert_eq!(books.asked - books.answered(), books.started, "seed {seed}: {books:?}");
        expired += books.expired;
        let ended = play.end();
        assert_eq!(ended.cancelled, ended.started, "seed {seed}: {ended:?}");
    }
    assert!(expired > SEEDS, "{expired}");
}
