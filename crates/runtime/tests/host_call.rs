//! Host calls against a test that acts as the engine: batches, answers, ends, and rings with impossible words.

use std::slice::from_ref;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread;
use std::time::{Duration, Instant};

use mqueue::abi::{kind, protocol, reason, status, stop};
use mqueue::{
    Consumer, Head, MappedMemory, Memory as _, MqueuePlan, Producer, Region, RegionPlan, RingPlan,
    Words,
};
use runtime::host_call::{Caller, Closed, HostCallDevice, Limits, NoReply, host_call};
use runtime::{Device, Job};
use sys::readiness::WakeSender;
use sys::{RegionOptions, SharedMemory};

/// Longer than a test takes: it only ends loops of a test that fails.
const PATIENCE: Duration = Duration::from_secs(60);
const LONG: Duration = Duration::from_secs(3600);
const LIMITS: Limits = Limits { batch: 4, delay: LONG, idle: LONG, call: LONG };

struct Engine {
    memory: MappedMemory,
    words: Words<MappedMemory>,
    ends: Vec<(Producer<MappedMemory>, Consumer<MappedMemory>)>,
    wake: WakeSender,
    job: Job,
}

impl Engine {
    fn new(blocks: u32, protocol: u8) -> Self {
        let ring = match protocol {
            protocol::DOORBELL => RingPlan::doorbell(64, 0),
            protocol => RingPlan { protocol, message_bytes_max: 64, arena_bytes: 0 },
        };
        let plan = RegionPlan::of_blocks(blocks, &[MqueuePlan { depth: 8, rx: ring, tx: ring }], 1);
        let bytes = plan.bytes().unwrap() as usize;
        let memory = SharedMemory::create("host-call", bytes, &RegionOptions::default());
        let memory = Arc::new(memory.unwrap());
        let mapped = MappedMemory::new(memory.clone());
        let mut region = Region::format(mapped.clone(), &plan).unwrap();
        let ends = (0..blocks).map(|mqueue| region.engine_ends(mqueue)).collect();
        let (wake, wake_fd) = WakeSender::new().unwrap();
        let job = Job {
            memory,
            words: region.words(),
            wake_fd: Arc::new(wake_fd),
            blocks,
            service: "s".to_owned(),
            accelerator: "a".to_owned(),
            kernel: "k".to_owned(),
            file: None,
            file_is_tried: false,
            params: Vec::new(),
            generation: 1,
            heartbeat: std::time::Duration::from_secs(2),
        };
        Self { memory: mapped, words: region.words(), ends, wake, job }
    }

    fn send(&mut self, mqueue: usize, token: u64, payload: &[u8]) {
        let head = Head { token, tag: 0, kind: kind::MESSAGE, status: 0 };
        let (rx, _) = &mut self.ends[mqueue];
        rx.push(head, payload).unwrap();
        rx.publish();
        if self.words.accelerator_parked() {
            self.wake.wake();
        }
    }

    /// Token, kind, status and payload of everything that was answered.
    fn answers(&mut self) -> Vec<(u64, u8, u8, Vec<u8>)> {
        let mut answers = Vec::new();
        for (_, tx) in &mut self.ends {
            while let Some(header) = tx.peek().unwrap() {
                let mut payload = vec![0; header.len as usize];
                assert!(tx.copy_out(&header, &mut payload));
                answers.push((header.token, header.kind, header.status, payload));
                tx.advance();
            }
            tx.release();
        }
        answers
    }
}

fn start(engine: &Engine, limits: Limits) -> (HostCallDevice, Caller) {
    let (mut device, caller) = host_call("test", limits).unwrap();
    device.start(from_ref(&engine.job)).unwrap();
    (device, caller)
}

fn take(caller: &mut Caller) -> Vec<Vec<u8>> {
    let mut messages = Vec::new();
    let count = caller.take(|message| {
        messages.push(message.to_vec());
        None
    });
    assert_eq!(count, messages.len());
    messages
}

fn eventually(what: &str, mut condition: impl FnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !condition() {
        assert!(Instant::now() < deadline, "not in time: {what}");
        thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn batches_are_taken_from_all_mqueues_and_answered_together() {
    for protocol in [protocol::DOORBELL, protocol::GRANULE8] {
        let mut engine = Engine::new(3, protocol);
        let (_device, mut caller) = start(&engine, Limits { batch: 6, ..LIMITS });
        for n in 0..6 {
            engine.send(n % 3, n as u64, &[n as u8; 5]);
        }
        assert_eq!(caller.wait(), Some(Closed::Full));
        let messages = take(&mut caller);
        assert_eq!(messages.len(), 6);
        assert_eq!(caller.reply_bytes_max(5), 64);
        assert_eq!(caller.reply_bytes_max(6), 0, "there is no such message");
        for (index, message) in messages.iter().enumerate().take(4) {
            caller.reply(index, &message[..2]);
            caller.reply(index, b"a second answer");
        }
        caller.end_message(4, NoReply::Consumed);
        caller.reply(99, b"no such message");
        if protocol == protocol::DOORBELL {
            assert_eq!(engine.answers(), [], "nothing before the call is over");
        }
        // The sixth one has no answer.
        caller.handle().close();
        assert_eq!(caller.wait(), None);
        let answers = engine.answers();
        let mut tokens: Vec<u64> = answers.iter().map(|answer| answer.0).collect();
        tokens.sort_unstable();
        assert_eq!(tokens, [0, 1, 2, 3, 4, 5]);
        let replies = answers.iter().filter(|answer| answer.1 == kind::MESSAGE);
        assert!(replies.clone().all(|(token, .., payload)| *payload == [*token as u8; 2]));
        let mut ends: Vec<u8> =
            answers.iter().filter(|a| a.1 == kind::DROP).map(|answer| answer.2).collect();
        ends.sort_unstable();
        assert_eq!((replies.count(), ends), (4, vec![status::OK, status::REJECTED]));
    }
}

#[test]
fn a_batch_closes_late_or_idle_and_a_sleeping_caller_is_woken() {
    let cases = [
        (Limits { delay: Duration::ZERO, ..LIMITS }, Closed::Delay),
        (Limits { idle: Duration::from_micros(1), ..LIMITS }, Closed::Idle),
    ];
    for (limits, why) in cases {
        let mut engine = Engine::new(1, protocol::DOORBELL);
        let (_device, mut caller) = start(&engine, limits);
        let waiting = thread::spawn(move || {
            let closed = caller.wait();
            (take(&mut caller), closed)
        });
        eventually("the caller sleeps", || engine.words.accelerator_parked());
        engine.send(0, 1, b"wake up");
        assert_eq!(waiting.join().unwrap(), (vec![b"wake up".to_vec()], Some(why)));
    }
}

#[test]
fn messages_of_the_wrong_length_are_dropped_alone() {
    let mut engine = Engine::new(1, protocol::DOORBELL);
    let (_device, mut caller) = start(&engine, Limits { delay: Duration::ZERO, ..LIMITS });
    engine.send(0, 1, b"long");
    engine.send(0, 2, b"x");
    assert!(caller.wait().is_some());
    assert_eq!(caller.take(|m| (m.len() != 1).then_some(NoReply::BadLength)), 1);
    caller.reply(0, b"y");
    caller.handle().close();
    caller.wait();
    let expected = [
        (1, kind::DROP, status::BAD_LENGTH, vec![]),
        (2, kind::MESSAGE, status::OK, b"y".to_vec()),
    ];
    assert_eq!(engine.answers(), expected);
}

#[test]
fn a_drain_answers_what_waits_and_then_ends() {
    let mut engine = Engine::new(1, protocol::DOORBELL);
    let (mut device, mut caller) = start(&engine, LIMITS);
    let handle = caller.handle();
    engine.send(0, 1, b"last");
    engine.words.set_stop(stop::DRAIN);
    assert!(!device.ended());
    let waiting = thread::spawn(move || {
        assert_eq!(caller.wait(), Some(Closed::Idle));
        assert_eq!(take(&mut caller), [b"last"]);
        caller.reply(0, b"done");
        caller.wait()
    });
    eventually("the generation ends", || device.ended());
    assert_eq!(engine.answers(), [(1, kind::MESSAGE, status::OK, b"done".to_vec())]);
    assert_eq!(device.stop(PATIENCE), Ok(()));
    // The caller waits for the next generation.
    let next = Engine::new(1, protocol::DOORBELL);
    device.start(from_ref(&next.job)).unwrap();
    next.words.set_stop(stop::NOW);
    assert_eq!(device.stop(PATIENCE), Ok(()));
    assert!(!waiting.is_finished());
    handle.close();
    assert_eq!(waiting.join().unwrap(), None);
}

#[test]
fn a_call_that_does_not_return_ends_the_generation_and_delays_the_next() {
    let mut engine = Engine::new(1, protocol::DOORBELL);
    let limits = Limits { delay: Duration::ZERO, call: Duration::from_millis(1), ..LIMITS };
    let (mut device, mut caller) = start(&engine, limits);
    engine.send(0, 1, b"hang");
    caller.wait();
    take(&mut caller);
    eventually("the call is overdue", || {
        device.health().is_err_and(|failure| failure.reason == reason::HUNG)
    });
    assert!(device.health().is_err());
    let handle = caller.handle();
    assert_eq!(handle.counters().overdue.load(Ordering::Relaxed), 1, "it is counted once");
    engine.words.set_stop(stop::NOW);
    assert_eq!(device.stop(Duration::ZERO).unwrap_err().reason, reason::HUNG);
    let next = Engine::new(1, protocol::DOORBELL);
    let refused = device.start(from_ref(&next.job)).unwrap_err();
    assert_eq!(refused.reason, reason::HUNG);
    let returned = thread::spawn(move || {
        caller.reply(0, b"too late");
        caller.wait()
    });
    assert!(device.wait_until_free(PATIENCE));
    assert_eq!(device.start(from_ref(&next.job)), Ok(()));
    assert_eq!(device.health(), Ok(()));
    handle.close();
    assert_eq!(returned.join().unwrap(), None);
}

#[test]
fn a_call_for_a_part_of_a_batch_has_a_time_limit_of_its_own() {
    let mut engine = Engine::new(1, protocol::DOORBELL);
    let limits = Limits { batch: 2, call: Duration::from_millis(1), ..LIMITS };
    let (mut device, mut caller) = start(&engine, limits);
    engine.send(0, 1, b"first");
    engine.send(0, 2, b"second");
    assert_eq!(caller.wait(), Some(Closed::Full));
    assert_eq!(take(&mut caller).len(), 2);
    let handle = caller.handle();
    let overdue = || handle.counters().overdue.load(Ordering::Relaxed);
    for calls in 1..=2 {
        eventually("the call is overdue", || device.health().is_err());
        assert_eq!(overdue(), calls);
        caller.reply(calls as usize - 1, b"done");
        assert!(caller.call_again());
        let answers: Vec<u64> = engine.answers().iter().map(|answer| answer.0).collect();
        assert_eq!(answers, [calls], "it is published before the next call");
    }
    engine.words.set_stop(stop::NOW);
    assert!(!caller.call_again());
    engine.words.set_stop(stop::DRAIN);
    assert!(caller.call_again(), "a drain answers what was received");
    handle.close();
    assert!(!caller.call_again());
}

#[test]
fn impossible_words_end_the_generation() {
    for head in [10, u64::MAX, 1 << 40] {
        let mut engine = Engine::new(1, protocol::DOORBELL);
        let (mut device, mut caller) = start(&engine, Limits { delay: Duration::ZERO, ..LIMITS });
        engine.send(0, 1, b"x");
        let region = Region::join(engine.memory.clone()).unwrap();
        let head_offset = region.rings_of(0)[0].head_offset;
        engine.memory.store(head_offset, head, Ordering::Release);
        assert!(caller.wait().is_some());
        assert_eq!(take(&mut caller), Vec::<Vec<u8>>::new());
        let failure = device.health().unwrap_err();
        assert_eq!(failure.reason, reason::RING_CORRUPT, "{failure}");
        let handle = caller.handle();
        let waiting = thread::spawn(move || caller.wait());
        assert_eq!(device.stop(PATIENCE), Ok(()));
        handle.close();
        assert_eq!(waiting.join().unwrap(), None);
    }
}

#[test]
fn several_services_are_refused() {
    let (mut device, _caller) = host_call("test", LIMITS).unwrap();
    assert_eq!(device.start(&[]).unwrap_err().reason, reason::REFUSED);
}
