//! The words that publish earlier stores, and both halves of PARK, between two threads in real memory: on
//! this processor, on another architecture under qemu, and under Miri, which returns older values that the
//! memory model still allows. `stress.rs` covers the rings; loom covers every interleaving of both.

use std::sync::atomic::{
    AtomicBool, AtomicU64, Ordering::AcqRel, Ordering::Acquire, Ordering::Relaxed,
};
use std::time::{Duration, Instant};

use mqueue::abi::kind;
use mqueue::memory::{Memory, Ordering};
use mqueue::{
    Doorbells, Head, HeapMapping, JoinError, Listener, MappedMemory, MqueuePlan, ParkWord, Region,
    RegionPlan, RingPlan, Words, abi,
};

/// Repetitions of each check.
const ROUNDS: u64 = if cfg!(miri) { 12 } else { 20_000 };
/// Number of races between a sleeper and a waker.
const MEETINGS: u64 = if cfg!(miri) { 12 } else { 20_000 };

fn plan(generation: u64) -> RegionPlan {
    let ring = RingPlan { protocol: abi::protocol::DOORBELL, message_bytes_max: 8, arena_bytes: 0 };
    let mqueues = vec![MqueuePlan { depth: 4, rx: ring, tx: ring }];
    RegionPlan::of_blocks(1, &mqueues, generation)
}

fn region() -> Region<MappedMemory> {
    let bytes = plan(1).bytes().unwrap() as usize;
    Region::format(HeapMapping::memory(bytes), &plan(1)).unwrap()
}

/// One thread stores a number and then publishes it; a reader that sees the published number must see the stored one.
fn publishes(
    publish: impl Fn(&Words<MappedMemory>, &MappedMemory, u64) + Sync,
    look: impl Fn(&Words<MappedMemory>, &MappedMemory) -> (u64, u64),
) {
    let (words, other) = (region().words(), HeapMapping::memory(128));
    let (done, looks) = (AtomicBool::new(false), AtomicU64::new(0));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for n in 1..=ROUNDS {
                publish(&words, &other, n);
                if n % 8 == 0 {
                    std::thread::yield_now();
                }
                // The reader may start late, but not after the end.
                while n == ROUNDS / 2 && looks.load(Relaxed) == 0 {
                    std::thread::yield_now();
                }
            }
            done.store(true, Relaxed);
        });
        let mut last = 0;
        while !done.load(Relaxed) {
            let (published, found) = look(&words, &other);
            assert!(found >= published, "{published} was published, {found} found");
            assert!(published >= last, "back in time");
            last = published;
            looks.fetch_add(1, Relaxed);
        }
    });
    assert!(looks.load(Relaxed) > 0, "the reader never ran");
    assert_eq!(
        look(&words, &other),
        (ROUNDS, ROUNDS),
        "the reader reads other words than are written"
    );
}

fn number(other: &MappedMemory) -> u64 {
    other.load(0, Ordering::Relaxed)
}

fn set_number(other: &MappedMemory, n: u64) {
    other.store(0, n, Ordering::Relaxed);
}

#[test]
fn stop_request_publishes() {
    publishes(
        |words, other, n| (set_number(other, n), words.set_stop(n)).1,
        |words, other| (words.stop(), number(other)),
    );
}

#[test]
fn heartbeats_publish() {
    publishes(
        |words, other, n| (set_number(other, n), words.set_engine_heartbeat(n)).1,
        |words, other| (words.engine_heartbeat(), number(other)),
    );
    publishes(
        |words, other, n| (set_number(other, n), words.set_accelerator_heartbeat(n)).1,
        |words, other| (words.accelerator_heartbeat(), number(other)),
    );
}

#[test]
fn states_have_their_reasons() {
    publishes(
        |words, _, n| (words.set_accelerator_reason(n), words.set_accelerator_state(n)).1,
        |words, _| (words.accelerator_state(), words.accelerator_reason()),
    );
    publishes(
        |words, _, n| words.set_block(0, n, n),
        |words, _| {
            let block = words.block(0);
            (block.state, block.reason)
        },
    );
}

#[test]
fn a_region_is_joined_whole_or_not() {
    for generation in 1..=ROUNDS.min(500) {
        let plan = plan(generation);
        let memory = HeapMapping::memory(plan.bytes().unwrap() as usize);
        std::thread::scope(|scope| {
            scope.spawn(|| Region::format(memory.clone(), &plan).unwrap());
            loop {
                match Region::join(memory.clone()) {
                    Ok(region) => break assert_eq!(region.generation(), generation),
                    Err(error) => assert_eq!(error, JoinError::Magic(0)),
                }
                std::thread::yield_now();
            }
        });
    }
}

#[test]
fn a_doorbell_publishes_its_heads() {
    let mut engine = region();
    let mut accelerator = Region::join(engine.memory().clone()).unwrap();
    let (mut producer, _) = engine.engine_ends(0);
    let (mut consumer, _) = accelerator.accelerator_ends(0);
    let (bells, words) = (Doorbells::new(1), engine.words());
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for n in 0..ROUNDS {
                let head = Head { token: n, kind: kind::MESSAGE, ..Head::default() };
                while producer.push(head, &[]).is_err() {
                    std::thread::yield_now();
                }
                producer.publish();
                bells.ring(0);
            }
            done.store(true, Ordering::Release);
        });
        // The listener reads the ring only after a doorbell: a lost message stays lost.
        let (mut listener, mut moved) = (Listener::new(&[0], |_| 0), Vec::new());
        let mut next = 0;
        loop {
            let finished = done.load(Ordering::Acquire);
            listener.collect(&bells, |mqueue| words.rx_head(mqueue), &mut moved);
            if moved.pop().is_some() {
                while let Some(header) = consumer.peek().unwrap() {
                    assert_eq!(header.token, next);
                    consumer.advance();
                    next += 1;
                }
                consumer.release();
            } else if finished {
                break assert_eq!(next, ROUNDS, "a message was left behind");
            } else {
                // A full ring waits for messages that have not been signalled to the listener yet.
                std::thread::yield_now();
            }
        }
    });
}

/// Where two threads meet, over and over. They leave within nanoseconds of each other where both have a
/// core; a thread that waits for the host kernel to wake it would be late for what comes next.
#[derive(Default)]
struct Meeting(AtomicU64);

impl Meeting {
    fn meet(&self) {
        let arrived = self.0.fetch_add(1, AcqRel) + 1;
        let all = arrived.next_multiple_of(2);
        for spins in 0_u64.. {
            if self.0.load(Acquire) >= all {
                break;
            }
            if cfg!(miri) || spins > 1000 {
                std::thread::yield_now();
            }
            std::hint::spin_loop();
        }
        // The last one to arrive knows first: it gives the other a head start, a longer one each time.
        for step in 0..if arrived == all { arrived / 4 % 256 } else { 0 } {
            std::hint::black_box(step);
        }
    }
}

/// A sleeper and a waker store one word each and read the other's, repeatedly; returns how often both missed
/// the other's store.
fn both_missed(set: impl Fn(bool), sleeps: impl Fn() -> bool + Sync) -> u64 {
    let (meeting, woke) = (Meeting::default(), AtomicBool::new(false));
    let work = HeapMapping::memory(128);
    let mut missed = 0;
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for n in 1..=MEETINGS {
                meeting.meet();
                set_number(&work, n);
                woke.store(sleeps(), Relaxed);
                meeting.meet();
            }
        });
        for n in 1..=MEETINGS {
            meeting.meet();
            set(true);
            let saw = number(&work) == n;
            meeting.meet();
            missed += u64::from(!saw && !woke.load(Relaxed));
            set(false);
        }
    });
    missed
}

#[test]
fn sleepers_and_wakers_never_both_miss() {
    let parked = ParkWord::default();
    assert_eq!(both_missed(|sleeps| parked.set(sleeps), || parked.sleeps()), 0, "asleep with work");
    let words = region().words();
    let missed = both_missed(|sleeps| words.set_parked(sleeps), || words.parked());
    assert_eq!(missed, 0, "the engine is asleep with work");
    let missed =
        both_missed(|sleeps| words.set_accelerator_parked(sleeps), || words.accelerator_parked());
    assert_eq!(missed, 0, "the accelerator is asleep with work");
    // The same without the fences: if that never fails either, this machine proves nothing here.
    let word = HeapMapping::memory(8);
    let once = || both_missed(|sleeps| set_number(&word, sleeps.into()), || number(&word) != 0);
    // On a busy machine both threads rarely run at the same time: many tries, until other work ends.
    let (start, patience) = (Instant::now(), Duration::from_secs(if cfg!(miri) { 0 } else { 30 }));
    let missed = loop {
        match once() {
            0 if start.elapsed() < patience => {}
            missed => break missed,
        }
    };
    match missed {
        0 => println!("SKIPPED: on this machine both never miss without the fences either"),
        _ => println!("{missed} of {MEETINGS} rounds end asleep without the fences"),
    }
}
