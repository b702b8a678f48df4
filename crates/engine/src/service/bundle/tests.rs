//! A model of one worker, its clients and its blocks, in which the rule for bundles runs in a closed loop with a virtual clock: the rate of
//! the engine's own choice is compared with that of bundles and of single messages alone.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};

use crate::base::topology::Dispatch;
use crate::service::bundle::choice::BundleChoice;
use crate::service::bundle::run::{Burst, HANDLED_NS, SHORTEST};
use crate::service::dispatch::{Credit, Dispatcher, Owner, Route};

const SLOTS: u32 = 256;
/// Messages that a client sends at once, and how long it takes from their replies to the next ones.
const BATCH: u32 = 64;
const CLIENT_NS: u64 = 8_000;
/// Batches that a receive call brings at most.
const BATCHES: usize = 64;
/// A turn without messages.
const TURN_NS: u64 = 600;

/// Times of a kernel.
#[derive(Clone, Copy, Debug)]
struct Kernel {
    /// Both ways between engine and block.
    latency_ns: u64,
    /// The second trip that a bundle takes.
    trip_ns: u64,
    /// A single message.
    single_ns: u64,
    /// A message of a bundle.
    message_ns: u64,
}

impl Kernel {
    /// The time of a slot with this number of messages.
    fn slot_ns(&self, messages: u32) -> u64 {
        match messages {
            1 => self.single_ns,
            _ => self.single_ns + self.trip_ns + u64::from(messages - 1) * self.message_ns,
        }
    }
}

/// Times of the engine for request and reply.
#[derive(Clone, Copy, Debug)]
struct Engine {
    single_ns: u64,
    message_ns: u64,
    bundle_ns: u64,
    /// Blocks see a slot when it is written, not at the end of the turn.
    at_once: bool,
}

/// Beyond a bus, also with long messages, and on other threads of this machine.
const FAR: Engine = Engine { single_ns: 380, message_ns: 190, bundle_ns: 230, at_once: true };
const FAR_LONG: Engine = Engine { single_ns: 650, message_ns: 380, bundle_ns: 230, at_once: true };
const NEAR: Engine = Engine { single_ns: 190, message_ns: 110, bundle_ns: 200, at_once: false };

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mode {
    Singles,
    Bundles,
    Auto,
}

/// A slot in flight.
struct Slot {
    batch: usize,
    messages: u32,
    /// When its reply can be seen; 0: it is not published.
    answered_ns: u64,
}

#[derive(Default)]
struct Mqueue {
    slots: VecDeque<Slot>,
    outstanding: u32,
    free_ns: u64,
    gathered_ns: u64,
    left: u32,
}

struct Mqueues(Vec<Mqueue>);

impl Credit for Mqueues {
    fn count(&self) -> u32 {
        self.0.len() as u32
    }
    fn credit(&self, mqueue: u32) -> Option<u32> {
        Some(SLOTS - self.0[mqueue as usize].outstanding.min(SLOTS))
    }
    fn outstanding(&self, mqueue: u32) -> u32 {
        self.0[mqueue as usize].outstanding
    }
    fn share(&self) -> u32 {
        self.0.iter().map(|mqueue| mqueue.outstanding).sum::<u32>() / self.count() + 1
    }
    fn is_exhausted(&self) -> bool {
        false
    }
    fn other_with_most_credit(&self) -> Option<u32> {
        None
    }
}

struct Model {
    mode: Mode,
    kernel: Kernel,
    engine: Engine,
    dispatcher: Dispatcher,
    choice: BundleChoice,
    mqueues: Mqueues,
    /// Messages of each batch that are not answered.
    batches: Vec<u32>,
    batch: u32,
    /// When batches arrive.
    arrivals: BinaryHeap<Reverse<(u64, usize)>>,
    now_ns: u64,
    unanswered: u32,
    replies: u64,
    bundled: u64,
    random: u64,
    trials: u64,
}

impl Model {
    fn new(mode: Mode, kernel: Kernel, engine: Engine, mqueues: u32, in_flight: u32) -> Self {
        let owner = Owner { workers: 1, blocks: [mqueues].into() };
        let batch = in_flight.min(BATCH);
        let batches = (in_flight / batch) as usize;
        Self {
            mode,
            kernel,
            engine,
            dispatcher: Dispatcher::new(Dispatch::RoundRobin, owner, 0),
            choice: BundleChoice::new(),
            mqueues: Mqueues((0..mqueues).map(|_| Mqueue::default()).collect()),
            batches: vec![batch; batches],
            batch,
            arrivals: (0..batches).map(|batch| Reverse((batch as u64 * 300, batch))).collect(),
            now_ns: 0,
            unanswered: 0,
            replies: 0,
            bundled: 0,
            random: 1,
            trials: 0,
        }
    }

    fn push(&mut self, batch: usize, mqueue: u32, messages: u32, turn_ns: u64) {
        let Engine { single_ns, message_ns, bundle_ns, .. } = self.engine;
        let entry = &mut self.mqueues.0[mqueue as usize];
        let was_idle = entry.outstanding == 0;
        if was_idle {
            (entry.gathered_ns, entry.left) = (turn_ns, 0);
        }
        entry.outstanding += messages;
        entry.slots.push_back(Slot { batch, messages, answered_ns: 0 });
        let waiting = entry.outstanding - messages;
        self.unanswered += messages;
        self.now_ns += match messages {
            1 => single_ns / 2,
            _ => (bundle_ns + u64::from(messages) * message_ns) / 2,
        };
        if self.engine.at_once {
            self.publish(mqueue);
        }
        if messages == 1 {
            return;
        }
        self.bundled += u64::from(messages);
        let run = self.choice.bundle_sent((mqueue, messages), waiting, turn_ns);
        if run.is_some() {
            self.dispatcher.bundle(run);
        }
    }

    /// The messages of one batch, as `UdpPorts::admit_trains` takes them in.
    fn admit(&mut self, batch: usize, single_first: &mut bool, turn_ns: u64) {
        let mut left = self.batch;
        let from = if self.mode == Mode::Bundles { 2 } else { SHORTEST };
        while left > 0 {
            if left >= from && !*single_first {
                let run = self.dispatcher.route_run(0, left, &self.mqueues);
                if let Some((mqueue, count)) = run {
                    self.push(batch, mqueue, count, turn_ns);
                    left -= count;
                    continue;
                }
            }
            let Route::Local(mqueue) = self.dispatcher.route(&[], 0, &self.mqueues) else {
                panic!("no credit");
            };
            self.push(batch, mqueue, 1, turn_ns);
            left -= 1;
            if std::mem::take(single_first) {
                let waiting = self.mqueues.outstanding(mqueue) - 1;
                let run = self.choice.single_sent(mqueue, waiting, turn_ns);
                if run.is_some() {
                    self.dispatcher.bundle(run);
                }
            }
        }
    }

    fn receive(&mut self, turn_ns: u64) {
        let mut arrived = Vec::new();
        while arrived.len() < BATCHES
            && let Some(Reverse((at_ns, batch))) = self.arrivals.peek().copied()
            && at_ns <= turn_ns
        {
            self.arrivals.pop();
            arrived.push(batch);
        }
        let messages = arrived.len() as u32 * self.batch;
        self.dispatcher.burst(messages as usize);
        let mut single_first = false;
        if messages >= SHORTEST && self.mode == Mode::Bundles {
            self.dispatcher.bundle(None);
        } else if messages >= SHORTEST && self.mode == Mode::Auto {
            let burst = Burst {
                messages,
                unanswered: self.unanswered,
                mqueues: self.mqueues.count(),
                off_thread: true,
                in_turn: self.dispatcher.is_in_turn(),
                run: self.dispatcher.run(),
                handled_ns: HANDLED_NS,
            };
            let (run, is_trial) = self.choice.begin(&burst, turn_ns);
            self.dispatcher.bundle(Some(run));
            if is_trial {
                self.dispatcher.end_run();
                self.trials += 1;
            }
            single_first = is_trial;
        }
        for batch in arrived {
            self.admit(batch, &mut single_first, turn_ns);
        }
    }

    /// A block sees what was written.
    fn publish(&mut self, mqueue: u32) {
        let Mqueue { slots, free_ns, .. } = &mut self.mqueues.0[mqueue as usize];
        let waiting = slots.iter().rev().take_while(|slot| slot.answered_ns == 0).count();
        for slot in slots.range_mut(slots.len() - waiting..) {
            let begin_ns = (*free_ns).max(self.now_ns + self.kernel.latency_ns / 2);
            *free_ns = begin_ns + self.kernel.slot_ns(slot.messages);
            slot.answered_ns = *free_ns + self.kernel.latency_ns / 2;
        }
    }

    fn gather(&mut self, turn_ns: u64) {
        let Engine { single_ns, message_ns, bundle_ns, .. } = self.engine;
        for number in 0..self.mqueues.count() {
            let entry = &mut self.mqueues.0[number as usize];
            if entry.outstanding == 0 {
                continue;
            }
            let mut count = 0;
            while let Some(slot) = entry.slots.pop_front_if(|slot| slot.answered_ns <= self.now_ns)
            {
                count += slot.messages;
                self.now_ns += match slot.messages {
                    1 => single_ns / 2,
                    _ => (bundle_ns + u64::from(slot.messages) * message_ns) / 2,
                };
                let left = &mut self.batches[slot.batch];
                *left -= slot.messages;
                if *left == 0 {
                    *left = self.batch;
                    // A linear congruential generator.
                    self.random = self.random.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(1);
                    let arrival_ns = self.now_ns + CLIENT_NS + (self.random >> 33) % CLIENT_NS;
                    self.arrivals.push(Reverse((arrival_ns, slot.batch)));
                }
            }
            if count == 0 {
                continue;
            }
            entry.outstanding -= count;
            let took_ns = turn_ns - entry.gathered_ns;
            self.dispatcher.answered(count.into(), took_ns, count < entry.left);
            (entry.gathered_ns, entry.left) = (turn_ns, entry.outstanding);
            self.choice.answered(number, count.into(), turn_ns);
            self.unanswered -= count;
            self.replies += u64::from(count);
        }
    }

    fn turn(&mut self) {
        let turn_ns = self.now_ns;
        self.now_ns += TURN_NS;
        let before = (self.unanswered, self.replies);
        self.receive(turn_ns);
        if !self.engine.at_once {
            (0..self.mqueues.count()).for_each(|mqueue| self.publish(mqueue));
        }
        self.gather(turn_ns);
        if before == (self.unanswered, self.replies) {
            // Nothing happens before one of these.
            let arrives = self.arrivals.peek().map_or(u64::MAX, |Reverse((at_ns, _))| *at_ns);
            let slots = self.mqueues.0.iter().filter_map(|mqueue| mqueue.slots.front());
            let next_ns = slots.map(|slot| slot.answered_ns).fold(arrives, u64::min);
            let turns = next_ns.saturating_sub(self.now_ns).div_ceil(TURN_NS);
            self.now_ns += turns.saturating_sub(1) * TURN_NS;
        }
    }

    /// Replies per second, measured for some time.
    fn rate(&mut self, ns: u64) -> f64 {
        let (from_ns, before) = (self.now_ns, self.replies);
        while self.now_ns < from_ns + ns {
            self.turn();
        }
        (self.replies - before) as f64 * 1e9 / (self.now_ns - from_ns) as f64
    }
}

const MS: u64 = 1_000_000;

/// The rates of single messages, of bundles and of the engine's choice.
fn rates(kernel: Kernel, engine: Engine, mqueues: u32, in_flight: u32) -> [f64; 3] {
    [Mode::Singles, Mode::Bundles, Mode::Auto].map(|mode| {
        let mut model = Model::new(mode, kernel, engine, mqueues, in_flight);
        let ns = 10 * MS + 1_000 * kernel.single_ns;
        model.rate(ns);
        model.rate(ns)
    })
}

/// The choice reaches nearly the rate of the better of the two.
fn assert_good(kernels: &[Kernel], engine: Engine, mqueues: &[u32]) {
    for &kernel in kernels {
        for &mqueues in mqueues {
            for in_flight in [1, 64, 512, 4096].into_iter().filter(|n| *n < mqueues * SLOTS) {
                let rates = rates(kernel, engine, mqueues, in_flight);
                let [singles, bundles, auto] = rates.map(|rate| rate / 1e6);
                let known = format!("{kernel:?} {mqueues} mqueues, {in_flight} in flight");
                assert!(
                    auto >= 0.95 * singles.max(bundles),
                    "{known}: {singles:.2} {bundles:.2} {auto:.2} M/s"
                );
            }
        }
    }
}

/// Of a GPU: single messages and messages of a bundle.
fn far(single_ns: u64, message_ns: u64) -> Kernel {
    Kernel { latency_ns: 2_500, trip_ns: 1_000, single_ns, message_ns }
}

fn near(single_ns: u64, message_ns: u64) -> Kernel {
    Kernel { latency_ns: 600, trip_ns: 200, single_ns, message_ns }
}

/// Those of an echo, and of LeNet.
const ECHO: (u64, u64) = (2_200, 330);
const LENET: (u64, u64) = (25_000, 25_000);
const LENET_MANY: (u64, u64) = (300_000, 300_000);

#[test]
fn the_choice_is_as_good_as_the_better_of_bundles_and_single_messages() {
    let fast = [ECHO, (2_200, 1_000), (2_200, 2_200)];
    let slow = [(5_000, 5_000), (10_000, 10_000), LENET, LENET_MANY];
    for kernels in [&fast[..], &slow] {
        let kernels: Vec<_> = kernels.iter().map(|(single, more)| far(*single, *more)).collect();
        assert_good(&kernels, FAR, &[4, 28, 240]);
    }
}

#[test]
fn the_same_for_long_messages() {
    let kernels = [far(2_500, 800), far(5_000, 5_000), far(25_000, 25_000)];
    assert_good(&kernels, FAR_LONG, &[28, 240]);
}

#[test]
fn the_same_for_threads_of_this_machine() {
    let kernels = [near(60, 40), near(500, 500), near(5_000, 5_000), near(300_000, 300_000)];
    assert_good(&kernels, NEAR, &[4, 28, 240]);
}

#[test]
fn trials_cost_a_slow_kernel_little() {
    for (kernel, in_flight) in [(LENET, 64), (LENET, 240), (LENET_MANY, 64), (LENET_MANY, 240)] {
        let kernel = far(kernel.0, kernel.1);
        let [mut singles, mut auto] =
            [Mode::Singles, Mode::Auto].map(|mode| Model::new(mode, kernel, FAR, 240, in_flight));
        let [singles, rate] = [&mut singles, &mut auto].map(|model| model.rate(2_000 * MS));
        assert!(rate >= 0.97 * singles, "{kernel:?} {in_flight}: {rate} {singles}");
        assert!((3..100).contains(&auto.trials), "{}", auto.trials);
        // All bundles are those of trials.
        assert!(auto.bundled <= auto.trials * 16, "{}", auto.bundled);
    }
}

#[test]
fn a_kernel_that_becomes_slow_or_fast_is_noticed() {
    let fast = far(ECHO.0, ECHO.1);
    for slow in [LENET, LENET_MANY] {
        let slow = far(slow.0, slow.1);
        let mut model = Model::new(Mode::Auto, fast, FAR, 240, 64);
        model.rate(50 * MS);
        assert!(model.bundled > model.replies / 2);
        for (kernel, noticed_ns) in [(slow, 500 * MS), (fast, 4_000 * MS), (slow, 500 * MS)] {
            model.kernel = kernel;
            model.rate(noticed_ns);
            let rate = model.rate(300 * MS);
            let best = |mode| Model::new(mode, kernel, FAR, 240, 64).rate(300 * MS);
            let best = best(Mode::Singles).max(best(Mode::Bundles));
            assert!(rate >= 0.95 * best, "{kernel:?}: {rate} {best}");
        }
    }
}
