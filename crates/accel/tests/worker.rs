//! Blocks on the worker's thread, with the test as the engine.

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use accel::cpu::{Clock, Options, WorkerBlocks};
use accel::{AccelError, Kernel};
use common::{Engine, Got, Shape, build, params, payload, texts};
use engine::accelerator::Blocks;
use mqueue::abi::{kind, protocol, reason, state, status, stop};
use mqueue::{Head, Memory};

const FAULTY: &str = "crates/accel/tests/kernels/faulty.cpp";
const MISBEHAVE: &str = "device/tests/misbehave.cpp";

fn start(engine: &Engine, kernel: &str, given: &[(&str, f64)], options: &Options) -> WorkerBlocks {
    let kernel = Kernel::builtin(kernel).unwrap();
    let (memory, blocks) = (engine.memory.clone(), engine.all_blocks());
    WorkerBlocks::start(memory, kernel, &params(given), &blocks, options).unwrap()
}

fn start_built(engine: &Engine, source: &str, name: &str, options: &Options) -> WorkerBlocks {
    let (memory, blocks) = (engine.memory.clone(), engine.all_blocks());
    WorkerBlocks::start(memory, build(source, name), &[], &blocks, options).unwrap()
}

/// Sends `rounds` bursts to every mqueue and checks every reply, in order.
fn echo_everywhere(shape: &Shape, burst: u64, rounds: u64) {
    let mut engine = Engine::new(shape);
    let mut blocks = start(&engine, "echo", &[], &Options::default());
    let (mut rang, mut touched, mut replies) = (Vec::new(), Vec::new(), 0);
    for round in 0..rounds {
        rang.clear();
        for mqueue in 0..shape.blocks {
            for n in round * burst..(round + 1) * burst {
                let len = (n as usize * 7 + mqueue as usize) % (shape.bytes_max as usize + 1);
                engine.push(mqueue, n, &payload(mqueue, n, len)).unwrap();
            }
            rang.push(mqueue);
        }
        let mut next = vec![round * burst; shape.blocks as usize];
        while next.iter().any(|&n| n < (round + 1) * burst) {
            touched.clear();
            blocks.drive(round, &rang, &mut touched);
            rang.clear();
            let mut progress = false;
            for &mqueue in &touched {
                while let Some(got) = engine.pop(mqueue) {
                    let n = std::mem::replace(&mut next[mqueue as usize], got.token + 1);
                    assert_eq!((got.token, got.kind), (n, kind::MESSAGE));
                    let len = (n as usize * 7 + mqueue as usize) % (shape.bytes_max as usize + 1);
                    assert_eq!(got.payload, payload(mqueue, n, len), "mqueue {mqueue} message {n}");
                    (progress, replies) = (true, replies + 1);
                }
            }
            assert!(progress, "a drive with work to do must make progress");
        }
    }
    assert_eq!(replies, rounds * burst * u64::from(shape.blocks));
    let status = engine.words.block(shape.blocks - 1);
    assert_eq!((status.received, status.sent, status.dropped), (rounds * burst, rounds * burst, 0));
}

#[test]
fn echo_over_every_protocol_and_number_of_blocks() {
    for protocol in [protocol::DOORBELL, protocol::GRANULE8, protocol::GRANULE16] {
        for blocks in [1, 28, 240] {
            echo_everywhere(&Shape { blocks, protocol, ..Shape::default() }, 5, 20);
        }
    }
}

#[test]
fn echo_of_messages_in_arenas() {
    echo_everywhere(&Shape { blocks: 3, bytes_max: 70_000, ..Shape::default() }, 3, 40);
}

/// A clock that the test sets, and that advances by `step` with every read.
fn custom_clock(step: u64) -> (Arc<AtomicU64>, Options) {
    let time = Arc::new(AtomicU64::new(0));
    let clock = Arc::clone(&time);
    let clock = Clock::Custom(Arc::new(move || clock.fetch_add(step, Ordering::Relaxed)));
    (time, Options { clock, ..Options::default() })
}

fn drive(blocks: &mut WorkerBlocks, now: u64, rang: &[u32]) -> Vec<u32> {
    let mut touched = Vec::new();
    blocks.drive(now, rang, &mut touched);
    touched
}

fn ended(blocks: &mut WorkerBlocks) -> Vec<(u32, u64)> {
    let mut ended = Vec::new();
    blocks.ended(&mut ended);
    ended.sort_unstable();
    ended
}

/// Every message in an mqueue's TX ring.
fn pop_all(engine: &mut Engine, mqueue: u32) -> Vec<Got> {
    std::iter::from_fn(|| engine.pop(mqueue)).collect()
}

#[test]
fn sequences_wrap_inside_granule_rings() {
    for protocol in [protocol::GRANULE8, protocol::GRANULE16] {
        let start = (1 << 32) - 8 * 65_536 - 30;
        echo_everywhere(&Shape { blocks: 2, protocol, start, ..Shape::default() }, 8, 20);
        echo_everywhere(
            &Shape { blocks: 2, protocol, start: (1 << 32) - 30, ..Shape::default() },
            8,
            20,
        );
    }
}

#[test]
fn scale_multiplies_and_drops_what_is_no_number() {
    let mut engine = Engine::new(&Shape::default());
    let mut blocks = start(&engine, "scale", &[], &Options::default());
    let numbers = [1.5f32, -2.0, 0.25].map(f32::to_le_bytes).concat();
    engine.push(0, 1, &numbers).unwrap();
    engine.push(0, 2, &numbers[..7]).unwrap();
    assert_eq!(drive(&mut blocks, 0, &[0]), [0]);
    let got = pop_all(&mut engine, 0);
    assert_eq!(got[0].payload, [4.5f32, -6.0, 0.75].map(f32::to_le_bytes).concat());
    assert_eq!((got[1].token, got[1].kind, got[1].status), (2, kind::DROP, status::BAD_LENGTH));
    assert_eq!(engine.words.block(0).dropped, 1);
}

#[test]
fn delays_of_240_blocks_overlap() {
    let shape = Shape { blocks: 240, ..Shape::default() };
    let mut engine = Engine::new(&shape);
    let (time, options) = custom_clock(0);
    let mut blocks = start(&engine, "delay", &[("microseconds", 1000.0)], &options);
    let all: Vec<u32> = (0..240).collect();
    for &mqueue in &all {
        engine.push(mqueue, 7, b"x").unwrap();
    }
    assert_eq!(drive(&mut blocks, 0, &all), []);
    assert_eq!(blocks.wake_at(), 1_000_000);
    time.store(999_999, Ordering::Relaxed);
    assert_eq!(drive(&mut blocks, 999_999, &[]), []);
    time.store(1_000_000, Ordering::Relaxed);
    let mut touched = drive(&mut blocks, 1_000_000, &[]);
    touched.sort_unstable();
    assert_eq!(touched, all, "all end together");
    assert!(all.iter().all(|&mqueue| engine.pop(mqueue).is_some()));
    assert_eq!(blocks.wake_at(), u64::MAX);
}

#[test]
fn delays_end_in_the_order_of_their_deadlines() {
    let mut engine = Engine::new(&Shape { blocks: 100, ..Shape::default() });
    let (time, options) = custom_clock(0);
    let mut blocks = start(&engine, "delay", &[("microseconds", 1000.0)], &options);
    let order: Vec<u32> = (0..100).map(|i| i * 37 % 100).collect();
    for (i, &mqueue) in order.iter().enumerate() {
        time.store(i as u64 * 10, Ordering::Relaxed);
        engine.push(mqueue, 0, b"").unwrap();
        assert_eq!(drive(&mut blocks, i as u64 * 10, &[mqueue]), []);
    }
    let mut finished = Vec::new();
    while blocks.wake_at() != u64::MAX {
        let now = blocks.wake_at();
        time.store(now, Ordering::Relaxed);
        assert_eq!(now, 1_000_000 + finished.len() as u64 * 10);
        finished.extend(drive(&mut blocks, now, &[]));
    }
    assert_eq!(finished, order);
}

#[test]
fn spin_computes_until_its_time_has_passed() {
    let mut engine = Engine::new(&Shape::default());
    let (time, options) = custom_clock(100);
    let mut blocks = start(&engine, "spin", &[("microseconds", 50.0)], &options);
    engine.push(0, 1, b"abc").unwrap();
    let before = time.load(Ordering::Relaxed);
    assert_eq!(drive(&mut blocks, before, &[0]), [0]);
    assert!(time.load(Ordering::Relaxed) >= before + 50_000, "it did not yield the thread");
    assert_eq!(engine.pop(0).unwrap().payload, b"abc");
}

#[test]
fn a_drain_answers_what_is_there_and_ends() {
    let mut engine = Engine::new(&Shape { blocks: 28, ..Shape::default() });
    let mut blocks = start(&engine, "echo", &[], &Options::default());
    for mqueue in 0..28 {
        for n in 0..u64::from(mqueue % 5) {
            engine.push(mqueue, n, b"waiting").unwrap();
        }
    }
    engine.words.set_stop(stop::DRAIN);
    drive(&mut blocks, 0, &[]);
    for mqueue in 0..28 {
        assert_eq!(pop_all(&mut engine, mqueue).len(), mqueue as usize % 5);
        let words = engine.words.block(mqueue);
        assert_eq!((words.state, words.reason), (state::ENDED, reason::STOPPED));
    }
    assert_eq!(blocks.running(), 0);
    let all: Vec<_> = (0..28).map(|block| (block, reason::STOPPED)).collect();
    assert_eq!(ended(&mut blocks), all);
    assert_eq!(ended(&mut blocks), [], "reported once");
    assert_eq!(drive(&mut blocks, 0, &[0, 27]), [], "nothing is left to run");
}

#[test]
fn a_stop_ends_blocks_with_messages_waiting_and_blocks_that_sleep() {
    let mut engine = Engine::new(&Shape { blocks: 4, ..Shape::default() });
    let (_, options) = custom_clock(0);
    let mut blocks = start(&engine, "delay", &[("microseconds", 1000.0)], &options);
    engine.push(1, 0, b"").unwrap();
    drive(&mut blocks, 0, &[1]);
    assert_eq!(blocks.wake_at(), 1_000_000);
    engine.push(0, 0, b"").unwrap();
    engine.words.set_stop(stop::NOW);
    assert_eq!(drive(&mut blocks, 0, &[0]), [1], "the sleep ends and its message is answered");
    assert_eq!(engine.pop(0), None, "what waited is not");
    assert_eq!(ended(&mut blocks), [0, 1, 2, 3].map(|block| (block, reason::STOPPED)));
}

#[test]
fn a_busy_block_lets_others_go_first_after_its_budget() {
    let mut engine = Engine::new(&Shape { blocks: 2, depth: 32, ..Shape::default() });
    let options = Options { budget: 4, ..Options::default() };
    let mut blocks = start(&engine, "echo", &[], &options);
    for n in 0..20 {
        engine.push(0, n, b"many").unwrap();
    }
    engine.push(1, 0, b"one").unwrap();
    assert_eq!(drive(&mut blocks, 0, &[0, 1]), [0, 1]);
    assert_eq!(pop_all(&mut engine, 1).len(), 1);
    let mut drives = 1;
    let mut answered = pop_all(&mut engine, 0).len();
    while answered < 20 {
        assert_eq!(blocks.wake_at(), 0, "there is more to do");
        assert_eq!(drive(&mut blocks, 0, &[]), [0]);
        let more = pop_all(&mut engine, 0).len();
        assert!((1..=4).contains(&more), "{more} in one turn");
        (answered, drives) = (answered + more, drives + 1);
    }
    assert!((5..=6).contains(&drives), "{drives}");
    drive(&mut blocks, 0, &[]);
    assert_eq!(blocks.wake_at(), u64::MAX);
}

#[test]
fn a_block_without_tx_credit_goes_on_when_there_is_some() {
    let mut engine = Engine::new(&Shape { blocks: 2, depth: 4, ..Shape::default() });
    let mut blocks = start(&engine, "echo", &[], &Options::default());
    for n in 0..8 {
        engine.push(0, n, &[n as u8]).unwrap();
        drive(&mut blocks, 0, &[0]);
    }
    assert_eq!(blocks.wake_at(), 0, "it waits for credit");
    assert_eq!(drive(&mut blocks, 0, &[]), [], "no credit yet");
    engine.push(1, 9, b"other").unwrap();
    assert_eq!(drive(&mut blocks, 0, &[1]), [1], "others are served meanwhile");
    for n in 0..4 {
        assert_eq!(engine.pop(0).unwrap().token, n);
    }
    assert_eq!(drive(&mut blocks, 0, &[]), [0]);
    let tokens: Vec<u64> = pop_all(&mut engine, 0).iter().map(|got| got.token).collect();
    assert_eq!(tokens, [4, 5, 6, 7]);
    drive(&mut blocks, 0, &[]);
    assert_eq!(blocks.wake_at(), u64::MAX);
}

#[test]
fn a_backend_is_asked_before_the_first_request_and_only_its_ring_wakes_the_block() {
    let shape = Shape { blocks: 2, backends: 1, ..Shape::default() };
    let mut engine = Engine::new(&shape);
    let mut blocks = start_built(&engine, FAULTY, "ask_first", &Options::default());
    assert_eq!(blocks.wake_at(), 0, "messages sent during the start are not reported yet");
    assert_eq!(drive(&mut blocks, 0, &[]), [1, 3]);
    for mqueue in [1, 3] {
        let query = engine.pop(mqueue).unwrap();
        assert_eq!((query.payload.as_slice(), query.tag), (&b"hello"[..], 77));
    }
    engine.push(2, 5, b"request").unwrap();
    assert_eq!(drive(&mut blocks, 0, &[2]), [], "the block waits for its backend");
    assert_eq!(engine.words.block(1).received, 0);
    let head = Head { tag: 77, kind: kind::MESSAGE, ..Head::default() };
    engine.ends[3].0.push(head, b"W").unwrap();
    engine.ends[3].0.publish();
    assert_eq!(drive(&mut blocks, 0, &[3]), [2], "and then finds the request by itself");
    assert_eq!(engine.pop(2).unwrap().payload, b"W");
}

#[test]
fn a_block_that_returns_is_reported_and_its_mqueue_is_not_served() {
    let mut engine = Engine::new(&Shape { blocks: 3, ..Shape::default() });
    let kernel = build(MISBEHAVE, "misbehave");
    let params = params(&[("mode", 8.0), ("after", 1.0)]);
    let memory = engine.memory.clone();
    let mut blocks =
        WorkerBlocks::start(memory, kernel, &params, &[0, 1, 2], &Options::default()).unwrap();
    for n in 0..2 {
        engine.push(1, n, b"echoed once").unwrap();
    }
    assert_eq!(drive(&mut blocks, 0, &[1]), [1]);
    assert_eq!(pop_all(&mut engine, 1).len(), 1);
    assert_eq!(ended(&mut blocks), [(1, reason::RETURNED)]);
    engine.push(1, 3, b"too late").unwrap();
    engine.push(2, 3, b"in time").unwrap();
    assert_eq!(drive(&mut blocks, 0, &[1, 2]), [2]);
    assert_eq!(blocks.running(), 2);
}

#[test]
fn a_block_that_writes_garbage_hurts_only_itself() {
    // All modes except the one that hangs.
    for mode in (1..=13).filter(|&mode| mode != 9) {
        let mut engine = Engine::new(&Shape { blocks: 2, ..Shape::default() });
        let memory = engine.memory.clone();
        let kernel = build(MISBEHAVE, "misbehave");
        let bad = params(&[("mode", f64::from(mode))]);
        let options = Options::default();
        let mut bad = WorkerBlocks::start(memory.clone(), kernel, &bad, &[0], &options).unwrap();
        let echo = Kernel::builtin("echo").unwrap();
        let mut good = WorkerBlocks::start(memory, echo, &[], &[1], &options).unwrap();
        for n in 0..8 {
            // If the tail was overwritten, the ring is unusable.
            let _ = engine.push(0, n, b"garbage, please");
            drive(&mut bad, n, &[0]);
            engine.push(1, n, b"echo").unwrap();
            assert_eq!(drive(&mut good, n, &[1]), [1]);
            assert_eq!(engine.pop(1).unwrap().token, n, "mode {mode}");
        }
    }
}

#[test]
fn a_kernel_reads_texts_and_numbers() {
    let (given, expected) = texts();
    for (params, expected) in [(given, expected), (Vec::new(), b"-0".to_vec())] {
        let mut engine = Engine::new(&Shape { blocks: 2, ..Shape::default() });
        let (memory, kernel) = (engine.memory.clone(), build(FAULTY, "param_text"));
        let options = Options::default();
        let mut blocks = WorkerBlocks::start(memory, kernel, &params, &[0, 1], &options).unwrap();
        engine.push(1, 5, b"").unwrap();
        assert_eq!(drive(&mut blocks, 0, &[1]), [1]);
        assert_eq!(engine.pop(1).unwrap().payload, expected);
    }
    // A number is no text, and a text is no number.
    let mut engine = Engine::new(&Shape::default());
    let (memory, kernel) = (engine.memory.clone(), build(FAULTY, "param_text"));
    let number = params(&[("text", 1.0)]);
    let mut blocks =
        WorkerBlocks::start(memory, kernel, &number, &[0], &Options::default()).unwrap();
    engine.push(0, 5, b"").unwrap();
    assert_eq!(drive(&mut blocks, 0, &[0]), [0]);
    assert_eq!(engine.pop(0).unwrap().payload, b"-0");
}

#[test]
fn a_write_past_the_staging_memory_ends_the_block_alone() {
    let mut engine = Engine::new(&Shape { blocks: 3, ..Shape::default() });
    let mut blocks = start_built(&engine, FAULTY, "overrun", &Options::default());
    for mqueue in 0..3 {
        let first = if mqueue == 1 { b'!' } else { b'.' };
        engine.push(mqueue, 0, &[first; 256]).unwrap();
    }
    drive(&mut blocks, 0, &[0, 1, 2]);
    assert_eq!(ended(&mut blocks), [(1, reason::CONTRACT)]);
    assert_eq!(engine.words.block(1).reason, reason::CONTRACT);
    assert_eq!(blocks.running(), 2);
    assert_eq!(engine.pop(2).unwrap().payload[0], b'.');
    engine.push(1, 1, b"?").unwrap();
    engine.push(2, 1, b"?").unwrap();
    assert_eq!(drive(&mut blocks, 0, &[1, 2]), [2]);
}

/// A kernel that fills in whatever length a client requests, without checking whether that is too long.
#[test]
fn a_reply_that_is_too_long_is_a_drop_however_long_it_is() {
    let mut engine = Engine::new(&Shape { blocks: 2, ..Shape::default() });
    let mut blocks = start_built(&engine, FAULTY, "as_asked", &Options::default());
    let asks = |len: u32, mark: u32| [len.to_le_bytes(), mark.to_le_bytes()].concat();
    let lengths = [257, 513, 4 << 10, 1 << 20, 1 << 28, u32::MAX - 20_000, u32::MAX - 3, u32::MAX];
    for (n, len) in (0..).zip(lengths) {
        engine.push(0, n, &asks(len, 0x005e_c2e7)).unwrap();
        assert_eq!(drive(&mut blocks, n, &[0]), [0]);
        let got = engine.pop(0).unwrap();
        assert_eq!((got.token, got.kind, got.status), (n, kind::DROP, status::TOO_LONG), "{len}");
        assert!(got.payload.is_empty());
        // The data written there is in no reply, of this block or another.
        for mqueue in [0, 1] {
            engine.push(mqueue, 1000 + n, &asks(256, 7)).unwrap();
            drive(&mut blocks, n, &[mqueue]);
            let got = engine.pop(mqueue).unwrap();
            let mut expected = vec![0; 256];
            (expected[0], expected[252]) = (7, 7);
            assert_eq!((got.kind, got.payload), (kind::MESSAGE, expected));
        }
    }
    assert_eq!((ended(&mut blocks), blocks.running()), (vec![], 2));
    assert_eq!(engine.words.block(0).dropped, lengths.len() as u64);
}

/// Kernels may write to the whole of 4 GiB of addresses, backed by little memory.
#[test]
fn replies_that_are_too_long_take_little_memory() {
    let mut engine = Engine::new(&Shape::default());
    let mut blocks = start_built(&engine, FAULTY, "as_asked", &Options::default());
    engine.push(0, 1, &[u32::MAX.to_le_bytes(), [1; 4]].concat()).unwrap();
    drive(&mut blocks, 0, &[0]);
    assert_eq!(engine.pop(0).unwrap().status, status::TOO_LONG);
    let maps = std::fs::read_to_string("/proc/self/smaps").unwrap();
    let mut sizes = (0, 0);
    let mut inside = false;
    for line in maps.lines() {
        let mut words = line.split_whitespace();
        match (words.next().unwrap_or(""), words.next().and_then(|kib| kib.parse::<u64>().ok())) {
            ("Size:", Some(kib)) if inside => sizes.0 += kib << 10,
            // Each page once, however often it is mapped.
            ("Pss:", Some(kib)) if inside => sizes.1 += kib << 10,
            (first, _) if !first.ends_with(':') => inside = line.contains("/dev/zero"),
            _ => {}
        }
    }
    assert!(sizes.0 > 1 << 32, "{sizes:?}");
    assert!(sizes.1 <= 32 << 20, "{sizes:?}");
}

#[test]
fn blocks_that_ignore_the_stop_are_left_behind() {
    let engine = Engine::new(&Shape { blocks: 2, ..Shape::default() });
    let blocks = start_built(&engine, FAULTY, "stubborn", &Options::default());
    drop(blocks);
    assert_eq!(engine.words.stop(), stop::NOW);
    assert_eq!(engine.words.block(0).state, state::READY, "it never ended");
}

#[test]
fn dropping_the_blocks_stops_them() {
    let mut engine = Engine::new(&Shape { blocks: 2, ..Shape::default() });
    let blocks = start(&engine, "echo", &[], &Options::default());
    engine.push(0, 0, b"unanswered").unwrap();
    drop(blocks);
    assert_eq!(engine.pop(0), None);
    assert_eq!(engine.words.block(1).reason, reason::STOPPED);
}

#[test]
fn kernels_that_do_not_get_to_their_first_receive_fail_the_start() {
    let engine = Engine::new(&Shape { blocks: 2, ..Shape::default() });
    let memory = engine.memory.clone();
    let kernel = build(FAULTY, "early");
    let error = WorkerBlocks::start(memory, kernel, &[], &[0, 1], &Options::default());
    let text = error.err().unwrap().to_string();
    assert!(text.contains("`early`") && text.contains("returned"), "{text}");

    // A TX ring with an arena must be empty when a block starts.
    let engine = Engine::new(&Shape { blocks: 2, bytes_max: 5000, ..Shape::default() });
    let head = mqueue::Region::join(engine.memory.clone()).unwrap().entries()[3].head_offset;
    engine.memory.store(head, 1, std::sync::atomic::Ordering::Relaxed);
    let echo = Kernel::builtin("echo").unwrap();
    let memory = engine.memory.clone();
    let error = WorkerBlocks::start(memory, echo, &[], &[0, 1], &Options::default()).err().unwrap();
    assert!(matches!(error, AccelError::Refused { block: 1, .. }), "{error}");
}

#[test]
fn wrong_blocks_options_and_regions_are_refused() {
    let engine = Engine::new(&Shape { blocks: 2, ..Shape::default() });
    let echo = || Kernel::builtin("echo").unwrap();
    let start = |blocks: &[u32], options: &Options| {
        WorkerBlocks::start(engine.memory.clone(), echo(), &[], blocks, options).err().unwrap()
    };
    let options = Options::default();
    for (blocks, expected) in [([0, 2], "block 2 is not in the region"), ([1, 1], "given twice")] {
        let error = start(&blocks, &options).to_string();
        assert!(error.contains(expected), "{error}");
    }
    let small = Options { stack_bytes: 1000, ..Options::default() };
    assert!(matches!(start(&[0], &small), AccelError::Range { what: "stack_bytes", .. }));
    let memory = mqueue::HeapMapping::memory(4096);
    let error = WorkerBlocks::start(memory, echo(), &[], &[0], &options).err().unwrap();
    assert!(matches!(error, AccelError::Region(mqueue::JoinError::Magic(0))));
}

#[test]
fn blocks_do_not_change_threads() {
    let engine = Engine::new(&Shape::default());
    let mut blocks = start(&engine, "echo", &[], &Options::default());
    let driven = std::thread::spawn(move || blocks.drive(0, &[], &mut Vec::new())).join();
    assert!(driven.is_err(), "another thread must not drive");
}

#[test]
fn a_kernel_may_use_most_of_its_stack() {
    let mut engine = Engine::new(&Shape { blocks: 40, ..Shape::default() });
    let mut blocks = start_built(&engine, FAULTY, "deep_stack", &Options::default());
    let all: Vec<u32> = (0..40).collect();
    for &mqueue in &all {
        engine.push(mqueue, 0, &[mqueue as u8]).unwrap();
    }
    assert_eq!(drive(&mut blocks, 0, &all), all);
    assert!(all.iter().all(|&mqueue| engine.pop(mqueue).unwrap().payload == [mqueue as u8]));
}
