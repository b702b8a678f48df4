//! Blocks on threads of the accelerator, with the test as the engine's workers.

mod common;

use std::sync::Arc;
use std::time::{Duration, Instant};

use accel::cpu::{Clock, CpuAccelerator, Options, ThreadBlocks};
use accel::{AccelError, Kernel};
use common::{Engine, Shape, build, params, payload};
use engine::accelerator::Blocks;
use mqueue::abi::{reason, state, stop};

const MISBEHAVE: &str = "device/tests/misbehave.cpp";
/// Far longer than any test takes: only for loops that would otherwise never end when a test fails.
const PATIENCE: Duration = Duration::from_secs(60);

fn start(
    engine: &Engine,
    kernel: &Arc<Kernel>,
    given: &[(&str, f64)],
    by_worker: &[Vec<u32>],
    threads: usize,
    options: &Options,
) -> (CpuAccelerator, Vec<ThreadBlocks>) {
    let memory = engine.memory.clone();
    ThreadBlocks::start(memory, kernel, &params(given), by_worker, threads, None, options).unwrap()
}

/// Monotonic nanoseconds: the engine's clock.
fn now() -> u64 {
    Clock::Monotonic.now()
}

/// Drives until `done`, popping what was touched.
fn drive_until(
    engine: &mut Engine,
    blocks: &mut ThreadBlocks,
    rang: &[u32],
    mut got: impl FnMut(u32, common::Got) -> bool,
) {
    let (mut touched, begin, mut rang) = (Vec::new(), Instant::now(), rang);
    loop {
        touched.clear();
        blocks.drive(now(), rang, &mut touched);
        rang = &[];
        for &mqueue in &touched {
            while let Some(message) = engine.pop(mqueue) {
                if got(mqueue, message) {
                    return;
                }
            }
        }
        assert!(begin.elapsed() < PATIENCE, "replies are missing");
        std::thread::yield_now();
    }
}

/// Ended blocks until there are `count` of them.
fn wait_ended(blocks: &mut ThreadBlocks, count: usize) -> Vec<(u32, u64)> {
    let (mut ended, begin) = (Vec::new(), Instant::now());
    while ended.len() < count {
        blocks.drive(now(), &[], &mut Vec::new());
        blocks.ended(&mut ended);
        assert!(begin.elapsed() < PATIENCE, "{ended:?}");
        std::thread::sleep(Duration::from_millis(1));
    }
    ended.sort_unstable();
    ended
}

#[test]
fn two_workers_share_three_threads() {
    for blocks in [1, 28, 240] {
        let mut engine = Engine::new(&Shape { blocks, ..Shape::default() });
        let by_worker: Vec<Vec<u32>> = (0..2)
            .map(|worker| (0..blocks).filter(|block| block % 2 == worker).collect())
            .collect();
        let threads = blocks.min(3) as usize;
        let echo = Kernel::builtin("echo").unwrap();
        let (accelerator, mut workers) =
            start(&engine, &echo, &[], &by_worker, threads, &Options::default());
        for round in 0..10 {
            for (worker, own) in workers.iter_mut().zip(&by_worker) {
                for &mqueue in own {
                    for n in 0..4 {
                        let n = 4 * round + n;
                        engine.push(mqueue, n, &payload(mqueue, n, 50)).unwrap();
                    }
                }
                let mut left = 4 * own.len();
                if left > 0 {
                    drive_until(&mut engine, worker, own, |mqueue, got| {
                        assert!(own.contains(&mqueue));
                        assert_eq!(got.payload, payload(mqueue, got.token, 50));
                        left -= 1;
                        left == 0
                    });
                }
            }
        }
        accelerator.stop(stop::DRAIN);
        for (worker, own) in workers.iter_mut().zip(&by_worker) {
            let expected: Vec<_> = own.iter().map(|&block| (block, reason::STOPPED)).collect();
            assert_eq!(wait_ended(worker, own.len()), expected);
        }
        assert_eq!(accelerator.join(PATIENCE), [], "every thread ended");
        let sent: u64 = (0..blocks).map(|block| engine.words.block(block).sent).sum();
        assert_eq!(sent, u64::from(blocks) * 40);
    }
}

#[test]
fn a_sleeping_thread_is_woken_for_every_message() {
    let mut engine = Engine::new(&Shape { blocks: 9, ..Shape::default() });
    let own: Vec<u32> = (0..9).collect();
    let options = Options { spin: Duration::ZERO, ..Options::default() };
    let echo = Kernel::builtin("echo").unwrap();
    let (_accelerator, mut workers) =
        start(&engine, &echo, &[], std::slice::from_ref(&own), 1, &options);
    let mut late = 0;
    for n in 0..500 {
        let (mqueue, begin) = ((n % 9) as u32, Instant::now());
        engine.push(mqueue, n, b"wake up").unwrap();
        drive_until(&mut engine, &mut workers[0], &[mqueue], |_, got| got.token == n);
        // A lost wake-up costs the thread's longest sleep of 250 ms, or the rest of it.
        late += u64::from(begin.elapsed() >= Duration::from_millis(200));
        assert!(late < 5 + n / 10, "{late} wake-ups of {} were lost", n + 1);
    }
}

#[test]
fn delays_end_while_the_thread_sleeps_between_them() {
    let mut engine = Engine::new(&Shape { blocks: 240, ..Shape::default() });
    let own: Vec<u32> = (0..240).collect();
    let delay = Kernel::builtin("delay").unwrap();
    let given = [("microseconds", 1000.0)];
    let options = Options::default();
    let (_accelerator, mut workers) =
        start(&engine, &delay, &given, std::slice::from_ref(&own), 1, &options);
    for &mqueue in &own {
        engine.push(mqueue, 0, b"").unwrap();
    }
    let (begin, mut left) = (now(), 240);
    drive_until(&mut engine, &mut workers[0], &own, |_, _| {
        left -= 1;
        left == 0
    });
    assert!(now() - begin >= 1_000_000, "none ended early");
}

#[test]
fn a_hung_block_is_reported_with_all_blocks_of_its_thread() {
    let mut engine = Engine::new(&Shape { blocks: 4, ..Shape::default() });
    let own: Vec<u32> = (0..4).collect();
    let options = Options { hung_after: Duration::from_secs(1), ..Options::default() };
    let kernel = build(MISBEHAVE, "misbehave");
    let given = [("mode", 9.0), ("after", 1.0)];
    let (accelerator, mut workers) =
        start(&engine, &kernel, &given, std::slice::from_ref(&own), 2, &options);
    for mqueue in [0, 3] {
        engine.push(mqueue, 0, b"echoed").unwrap();
        drive_until(&mut engine, &mut workers[0], &[mqueue], |_, _| true);
    }
    engine.push(0, 1, b"hangs").unwrap();
    workers[0].drive(now(), &[0], &mut Vec::new());
    assert_eq!(wait_ended(&mut workers[0], 2), [(0, reason::HUNG), (1, reason::HUNG)]);
    // The other thread keeps serving.
    engine.push(2, 0, b"echoed").unwrap();
    drive_until(&mut engine, &mut workers[0], &[2], |mqueue, _| mqueue == 2);
    accelerator.stop(stop::NOW);
    assert_eq!(wait_ended(&mut workers[0], 2), [2, 3].map(|block| (block, reason::STOPPED)));
    assert_eq!(accelerator.join(Duration::from_secs(2)), [0, 1], "its thread is abandoned");
}

#[test]
fn a_long_computation_is_not_taken_for_a_hang() {
    let mut engine = Engine::new(&Shape::default());
    let options = Options { hung_after: Duration::from_secs(20), ..Options::default() };
    let spin = Kernel::builtin("spin").unwrap();
    let given = [("microseconds", 300_000.0)];
    let (_accelerator, mut workers) = start(&engine, &spin, &given, &[vec![0]], 1, &options);
    engine.push(0, 1, b"long").unwrap();
    drive_until(&mut engine, &mut workers[0], &[0], |_, got| got.token == 1);
    let mut ended = Vec::new();
    workers[0].ended(&mut ended);
    assert_eq!(ended, []);
}

#[test]
fn blocks_end_when_the_engine_is_lost() {
    let engine = Engine::new(&Shape { blocks: 3, ..Shape::default() });
    // Time runs a thousand times faster for them than for the engine's heartbeat.
    let clock = Clock::Custom(Arc::new(|| now() * 1000));
    let options = Options { clock, spin: Duration::ZERO, ..Options::default() };
    let echo = Kernel::builtin("echo").unwrap();
    let (accelerator, mut workers) = start(&engine, &echo, &[], &[vec![0, 1, 2]], 1, &options);
    let lost = [0, 1, 2].map(|block| (block, reason::ENGINE_LOST));
    assert_eq!(wait_ended(&mut workers[0], 3), lost);
    assert_eq!(accelerator.join(PATIENCE), []);
}

#[test]
fn dropping_the_accelerator_stops_its_threads() {
    let engine = Engine::new(&Shape { blocks: 5, ..Shape::default() });
    let options = Options { spin: Duration::ZERO, ..Options::default() };
    let echo = Kernel::builtin("echo").unwrap();
    let by_worker = [vec![0, 1, 2], vec![3, 4]];
    let (accelerator, workers) = start(&engine, &echo, &[], &by_worker, 2, &options);
    assert_eq!((accelerator.running(), workers.len()), (2, 2));
    drop(accelerator);
    assert!((0..5).all(|block| engine.words.block(block).state == state::ENDED));
}

#[test]
fn starts_that_cannot_work_are_refused() {
    let try_start = |kernel: &str, by_worker: &[Vec<u32>], threads, cores: Option<&[usize]>| {
        let kernel = match kernel {
            "early" => build("crates/accel/tests/kernels/faulty.cpp", "early"),
            name => Kernel::builtin(name).unwrap(),
        };
        // A region of its own: after a refusal its blocks have a stop word, which permits an early return.
        let engine = Engine::new(&Shape { blocks: 2, ..Shape::default() });
        let memory = engine.memory.clone();
        let options = Options::default();
        ThreadBlocks::start(memory, &kernel, &[], by_worker, threads, cores, &options)
            .err()
            .unwrap()
    };
    let both = [vec![0], vec![1]];
    for threads in [0, 3] {
        let error = try_start("echo", &both, threads, None);
        assert!(matches!(error, AccelError::Range { what: "threads", max: 2, .. }), "{error}");
    }
    let error = try_start("echo", &[vec![0], vec![0]], 1, None);
    assert!(matches!(error, AccelError::Block { block: 0, .. }), "{error}");
    let error = try_start("echo", &both, 2, Some(&[1 << 20]));
    assert!(matches!(error, AccelError::Range { what: "core", .. }), "{error}");
    let error = try_start("early", &both, 2, None);
    assert!(matches!(error, AccelError::Returned { .. }), "{error}");
}
