//! The `process` accelerator from both sides, in one process: the test is the engine's worker.

mod common;

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use accel::process::{HostBlocks, HostOptions, RemoteBlocks, RemoteLink};
use accel::sleepers::{Sleeper, Sleepers};
use accel::{AccelError, Kernel};
use common::{Engine, Shape, build, params, payload, texts};
use engine::accelerator::Blocks;
use engine::topology::ParamValue;
use mqueue::abi::{reason, stop};

const MISBEHAVE: &str = "device/tests/misbehave.cpp";
/// Far longer than any test takes: only for loops that would otherwise never end when a test fails.
const PATIENCE: Duration = Duration::from_secs(60);

/// A wake-up within one process.
#[derive(Default)]
struct WakeUp {
    pending: Mutex<u64>,
    woken: Condvar,
    total: AtomicU64,
}

impl WakeUp {
    fn wake(&self) {
        self.total.fetch_add(1, Ordering::Relaxed);
        *self.pending.lock().unwrap() += 1;
        self.woken.notify_all();
    }

    fn sleep(&self, limit: Duration) {
        let pending = self.pending.lock().unwrap();
        let waited = self.woken.wait_timeout_while(pending, limit, |pending| *pending == 0);
        *waited.unwrap().0 = 0;
    }
}

fn host(
    engine: &Engine,
    kernel: &Arc<Kernel>,
    given: &[(&str, f64)],
    threads: usize,
    hung_after: Duration,
) -> Result<(HostBlocks, RemoteBlocks, Arc<WakeUp>), AccelError> {
    host_with(engine, kernel, &params(given), threads, hung_after)
}

fn host_with(
    engine: &Engine,
    kernel: &Arc<Kernel>,
    params: &[(String, ParamValue)],
    threads: usize,
    hung_after: Duration,
) -> Result<(HostBlocks, RemoteBlocks, Arc<WakeUp>), AccelError> {
    let wake_up = Arc::<WakeUp>::default();
    let woken = wake_up.clone();
    let link = RemoteLink::new({
        let wake_up = wake_up.clone();
        move || wake_up.wake()
    });
    let sleep = Box::new(move |limit| wake_up.sleep(limit));
    let options = HostOptions {
        service: "s".into(),
        threads,
        cores: Vec::new(),
        stack_bytes: 64 << 10,
        spin: Duration::from_micros(50),
        sleep,
        hung_after,
    };
    let host = HostBlocks::start(&engine.memory, kernel, params, options)?;
    // One mqueue each.
    let mqueues = engine.all_blocks().into();
    Ok((host, RemoteBlocks::new(engine.words.clone(), mqueues, link), woken))
}

fn eventually(what: &str, mut condition: impl FnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !condition() {
        assert!(Instant::now() < deadline, "not in time: {what}");
        thread::sleep(Duration::from_millis(1));
    }
}

/// Sends one message to each of `mqueues` and takes the echoes.
fn echoes(engine: &mut Engine, blocks: &mut RemoteBlocks, mqueues: &[u32], round: u64) {
    for &mqueue in mqueues {
        engine.push(mqueue, round, &payload(mqueue, round, 40)).unwrap();
    }
    let (mut rang, mut missing) = (mqueues, mqueues.to_vec());
    eventually("every echo", || {
        let mut touched = Vec::new();
        blocks.drive(0, rang, &mut touched);
        rang = &[];
        for mqueue in touched {
            while let Some(got) = engine.pop(mqueue) {
                assert_eq!((got.token, got.payload), (round, payload(mqueue, round, 40)));
                missing.retain(|other| *other != mqueue);
            }
        }
        missing.is_empty()
    });
}

#[test]
fn texts_reach_the_kernels_of_a_process() {
    let mut engine = Engine::new(&Shape { blocks: 3, ..Shape::default() });
    let kernel = build("device/tests/param_text.cpp", "param_text");
    let (given, expected) = texts();
    let (host, mut blocks, _) = host_with(&engine, &kernel, &given, 2, PATIENCE).unwrap();
    for mqueue in 0..3 {
        engine.push(mqueue, 1, b"").unwrap();
        let mut rang = &[mqueue][..];
        eventually("the reply", || {
            blocks.drive(0, rang, &mut Vec::new());
            rang = &[];
            engine.pop(mqueue).is_some_and(|got| {
                assert_eq!(got.payload, expected);
                true
            })
        });
    }
    engine.words.set_stop(stop::DRAIN);
    assert!({ host }.stop(PATIENCE).is_empty());
}

#[test]
fn threads_that_sleep_are_woken_for_every_message() {
    for threads in [1, 3] {
        let mut engine = Engine::new(&Shape { blocks: 12, ..Shape::default() });
        let echo = Kernel::builtin("echo").unwrap();
        let hung_after = Duration::from_secs(60);
        let (mut host, mut blocks, wake_up) =
            host(&engine, &echo, &[], threads, hung_after).unwrap();
        let words = engine.words.clone();
        let rounds = 100;
        for round in 1..=rounds {
            eventually("they sleep", || words.accelerator_parked());
            let mqueues: Vec<u32> = (0..12).filter(|m| u64::from(*m) % 4 <= round % 4).collect();
            echoes(&mut engine, &mut blocks, &mqueues, round);
            host.health().unwrap();
        }
        // Every round started while a thread slept, which may have woken up by itself in that moment, but rarely.
        assert!(
            10 * wake_up.total.load(Ordering::Relaxed) >= 9 * rounds,
            "the threads were not woken"
        );
        words.set_stop(stop::DRAIN);
        assert!(host.stop(PATIENCE).is_empty());
    }
}

/// Ends threads also after a failure.
struct StopOnDrop<'a>(&'a mqueue::Words<mqueue::MappedMemory>, &'a WakeUp, &'a Sleepers);

impl Drop for StopOnDrop<'_> {
    fn drop(&mut self) {
        self.0.set_stop(stop::NOW);
        // The one that listens needs the engine's wake-up, and then the next one.
        eventually("all end", || {
            self.2.wake_all();
            self.1.wake();
            !self.0.accelerator_parked()
        });
    }
}

/// Threads sleep, each for the messages of its mqueue; what a thread sends to the channel is that it has work.
#[test]
fn a_wake_up_wakes_only_the_thread_that_has_messages() {
    const THREADS: u32 = 16;
    let mut engine = Engine::new(&Shape { blocks: THREADS, depth: 256, ..Shape::default() });
    let wake_up = Arc::<WakeUp>::default();
    let woken = wake_up.clone();
    let sleep = Box::new(move |limit| woken.sleep(limit));
    let sleepers = Sleepers::new(engine.words.clone(), sleep);
    let (report, reports) = std::sync::mpsc::channel();
    let words = engine.words.clone();
    // A thread looks for work when it goes to sleep and when it is woken.
    let looks = AtomicU64::new(0);
    thread::scope(|scope| {
        for number in 0..THREADS {
            let (sleepers, words, looks, report) = (&sleepers, &words, &looks, report.clone());
            scope.spawn(move || {
                let (sleeper, mut seen) = (Sleeper::new([number]), [(number, 0)]);
                while words.stop() == stop::RUN {
                    let has_work = || {
                        looks.fetch_add(1, Ordering::Relaxed);
                        words.rx_head(number) != seen[0].1 || words.stop() != stop::RUN
                    };
                    sleepers.sleep_as(&sleeper, &seen, PATIENCE, has_work);
                    seen[0].1 = words.rx_head(number);
                    report.send((number, seen[0].1)).unwrap();
                }
            });
        }
        let _stop = StopOnDrop(&words, &wake_up, &sleepers);
        // Long runs for one thread, and changes between threads: the one that listens is among both.
        let _stop = StopOnDrop(&words, &wake_up, &sleepers);
        // Long runs for one thread, and changes between threads: the one that listens is among both. The rings have room for all.
        let rounds = 160;
        for round in 0..rounds {
            let number = if round % 8 < 4 { 1 } else { round as u32 % THREADS };
            eventually("one sleeps", || words.accelerator_parked());
            engine.push(number, round, b"wake up").unwrap();
            if words.accelerator_parked() {
                wake_up.wake();
            }
            let found = reports.recv_timeout(PATIENCE).expect("it is woken");
            assert_eq!(found, (number, words.rx_head(number)));
        }
        // Those of the thread that listens, of the one that has work, and of the next one that listens.
        let looks = looks.load(Ordering::Relaxed);
        assert!(looks < 8 * rounds + 2 * u64::from(THREADS), "{looks} looks: others were woken");
    });
}

#[test]
fn a_drain_answers_what_was_received() {
    let mut engine = Engine::new(&Shape { blocks: 2, ..Shape::default() });
    let echo = Kernel::builtin("echo").unwrap();
    let (host, _, _) = host(&engine, &echo, &[], 2, PATIENCE).unwrap();
    for n in 0..8 {
        engine.push(0, n, &payload(0, n, 9)).unwrap();
    }
    engine.words.set_stop(stop::DRAIN);
    assert!(host.stop(PATIENCE).is_empty());
    for n in 0..8 {
        assert_eq!(engine.pop(0).expect("its echo").token, n);
    }
}

#[test]
fn a_drain_that_begins_when_the_threads_do_is_not_missed() {
    let echo = Kernel::builtin("echo").unwrap();
    for _ in 0..60 {
        let engine = Engine::new(&Shape { blocks: 2, ..Shape::default() });
        let (host, _, _) = host(&engine, &echo, &[], 2, PATIENCE).unwrap();
        engine.words.set_stop(stop::DRAIN);
        eventually("blocks without work end", || host.ended());
    }
}

#[test]
fn a_stop_before_the_first_wait_is_no_failure() {
    let echo = Kernel::builtin("echo").unwrap();
    for how in [stop::DRAIN, stop::NOW] {
        let engine = Engine::new(&Shape { blocks: 4, ..Shape::default() });
        engine.words.set_stop(how);
        let (mut host, _, _) = host(&engine, &echo, &[], 2, PATIENCE).unwrap();
        eventually("blocks end", || host.ended());
        host.health().unwrap();
    }
}

#[test]
fn an_orderly_stop_never_looks_like_a_failure() {
    let echo = Kernel::builtin("echo").unwrap();
    for _ in 0..60 {
        let engine = Engine::new(&Shape { blocks: 2, ..Shape::default() });
        let (mut host, _, _) = host(&engine, &echo, &[], 2, PATIENCE).unwrap();
        let words = engine.words.clone();
        thread::scope(|scope| {
            scope.spawn(move || words.set_stop(stop::DRAIN));
            eventually("blocks end", || {
                host.health().unwrap();
                host.ended()
            });
        });
    }
}

#[test]
fn a_block_that_returns_or_hangs_is_reported() {
    let kernel = build(MISBEHAVE, "misbehave");
    for (mode, why) in [(8.0, reason::RETURNED), (9.0, reason::HUNG)] {
        let mut engine = Engine::new(&Shape { blocks: 4, ..Shape::default() });
        let given = [("mode", mode), ("after", 0.0)];
        let hung_after = Duration::from_millis(50);
        let (mut host, mut blocks, _) = host(&engine, &kernel, &given, 2, hung_after).unwrap();
        assert_eq!(host.health(), Ok(()));
        engine.push(3, 1, b"go").unwrap();
        blocks.drive(0, &[3], &mut Vec::new());
        eventually("it is reported", || host.health().is_err_and(|(reason, _)| reason == why));
        // A block that can end may take its time.
        let (limit, left) = match why {
            reason::HUNG => (Duration::from_secs(2), vec![2, 3]),
            _ => (PATIENCE, vec![]),
        };
        assert_eq!(host.stop(limit), left);
    }
}

#[test]
fn a_thread_whose_blocks_all_compute_does_not_hang() {
    let (count, each) = (60, 60_000.0);
    let mut engine = Engine::new(&Shape { blocks: count, ..Shape::default() });
    let spin = Kernel::builtin("spin").unwrap();
    // All of them together compute for longer.
    let hung_after = Duration::from_secs(3);
    let given = [("microseconds", each)];
    let (mut host, mut blocks, _) = host(&engine, &spin, &given, 1, hung_after).unwrap();
    let mut missing: Vec<u32> = (0..count).collect();
    for &mqueue in &missing {
        engine.push(mqueue, 1, b"compute").unwrap();
    }
    blocks.drive(0, &missing, &mut Vec::new());
    eventually("every reply", || {
        assert_eq!(host.health(), Ok(()));
        missing.retain(|mqueue| engine.pop(*mqueue).is_none());
        missing.is_empty()
    });
    engine.words.set_stop(stop::DRAIN);
    assert!(host.stop(PATIENCE).is_empty());
}

#[test]
fn threads_are_as_many_as_blocks_at_most() {
    let engine = Engine::new(&Shape { blocks: 2, ..Shape::default() });
    let echo = Kernel::builtin("echo").unwrap();
    for threads in [0, 3] {
        let refused = host(&engine, &echo, &[], threads, PATIENCE).err();
        assert!(matches!(refused, Some(AccelError::Range { what: "threads", .. })), "{threads}");
    }
}
