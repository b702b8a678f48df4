//! Words that publish earlier writes: STOP, HEARTBEAT, STATE (also before a region is freed), FORMAT.

use loom::thread;
use mqueue::abi::{protocol, reason, state, stop};
use mqueue::memory::{Memory, Ordering};
use mqueue::{JoinError, Region};

use super::*;

/// A block that sees DRAIN and then an empty ring has seen every message.
fn drain(protocol: u8, weak: Weak) -> impl Fn() + Sync + Send {
    let plan = plan(protocol, DEPTH, 8, 0);
    let kinds = move |places: &Places, weak| {
        let mut kinds = doorbell_words(places, weak);
        kinds.atomic.push(word(STOP_OFFSET));
        if protocol != protocol::DOORBELL {
            kinds.atomic.append(&mut kinds.owned);
        }
        kinds
    };
    with_ends(
        plan,
        kinds,
        move |_| weak,
        |engine, mut producer, mut consumer| {
            let words = engine.words();
            let writer = thread::spawn(move || {
                push(&mut producer, 0, 8);
                producer.publish();
                engine.words().set_stop(stop::DRAIN);
            });
            let mut received = 0;
            for _ in 0..3 {
                let draining = words.stop() == stop::DRAIN;
                if read(&mut consumer, received, 8) {
                    received += 1;
                } else if draining {
                    assert_eq!(received, 1, "a message was missed");
                    break;
                } else {
                    thread::yield_now();
                }
            }
            writer.join().unwrap();
        },
    )
}

#[derive(Clone, Copy, PartialEq)]
enum Beats {
    Engine,
    Accelerator,
}

/// A reader of a heartbeat sees everything the other side did before it.
fn heartbeat(who: Beats, weak: Weak) -> impl Fn() + Sync + Send {
    let plan = plan(protocol::DOORBELL, DEPTH, 8, 0);
    let words = [ACCELERATOR_STATE, ACCELERATOR_HEARTBEAT, STOP_OFFSET, ENGINE_HEARTBEAT];
    let kinds = Kinds { atomic: words.map(word).to_vec(), owned: vec![] };
    move || {
        let memory = LoomMemory::new(plan.bytes().unwrap(), &kinds, weak);
        let region = Region::format(memory, &plan).unwrap();
        let words = region.words();
        let beating = thread::spawn(move || {
            let words = region.words();
            if who == Beats::Engine {
                words.set_stop(stop::DRAIN);
                words.set_engine_heartbeat(1);
            } else {
                words.set_accelerator_state(state::READY);
                words.set_accelerator_heartbeat(1);
            }
        });
        let (beat, before) = match who {
            Beats::Engine => (words.engine_heartbeat(), words.stop() == stop::DRAIN),
            Beats::Accelerator => {
                (words.accelerator_heartbeat(), words.accelerator_state() == state::READY)
            }
        };
        assert!(beat == 0 || before, "a heartbeat before the writes it publishes");
        beating.join().unwrap();
    }
}

/// A reader that sees ENDED sees the reason.
fn ended(weak: Weak) -> impl Fn() + Sync + Send {
    let plan = plan(protocol::DOORBELL, DEPTH, 8, 0);
    let both = [ACCELERATOR_STATE, BLOCK_STATE];
    let atomic = both.into_iter().flat_map(|at| [word(at), word(at + 8)]).collect();
    let kinds = Kinds { atomic, owned: vec![] };
    move || {
        let memory = LoomMemory::new(plan.bytes().unwrap(), &kinds, weak);
        let region = Region::format(memory, &plan).unwrap();
        let words = region.words();
        let block = thread::spawn(move || {
            region.words().set_block(0, state::ENDED, reason::CONTRACT);
            region.words().set_accelerator_reason(reason::RETURNED);
            region.words().set_accelerator_state(state::ENDED);
        });
        if words.accelerator_state() == state::ENDED {
            assert_eq!(words.accelerator_reason(), reason::RETURNED, "ended without a reason");
        }
        let line = words.block(0);
        if line.state == state::ENDED {
            assert_eq!(line.reason, reason::CONTRACT, "ended without a reason");
        }
        block.join().unwrap();
    }
}

/// A reader that sees the magic number sees the complete directory.
fn format(weak: Weak) -> impl Fn() + Sync + Send {
    let plan = plan(protocol::DOORBELL, DEPTH, 8, 0);
    let places = places(&plan);
    let directory = places.directory..places.directory + 2 * 128;
    let kinds = Kinds { atomic: vec![word(0)], owned: vec![8..128, directory] };
    move || {
        let memory = LoomMemory::new(places.len_bytes, &kinds, weak);
        let joiner = memory.clone();
        let joining = thread::spawn(move || match Region::join(joiner) {
            Ok(region) => assert_eq!(region.entries()[0].depth, DEPTH),
            Err(error) => assert_eq!(error, JoinError::Magic(0)),
        });
        Region::format(memory, &plan).unwrap();
        joining.join().unwrap();
    }
}

/// A generation ends: a reader that sees the block's ENDED finds its last reply and final counts, and may free
/// the region's memory, which counts as an access to all of it.
fn retire(weak: Weak) -> impl Fn() + Sync + Send {
    let plan = plan(protocol::DOORBELL, DEPTH, 8, 0);
    let places = places(&plan);
    let kinds = Kinds {
        atomic: [places.tx_head, places.tx_tail, BLOCK_STATE, BLOCK_SENT].map(word).to_vec(),
        owned: vec![places.slots.clone(), places.tx_slots.clone()],
    };
    move || {
        let memory = LoomMemory::new(places.len_bytes, &kinds, weak);
        let mut engine = Region::format(memory.clone(), &plan).unwrap();
        let mut accelerator = Region::join(memory.clone()).unwrap();
        let (mut requests, mut replies) = engine.engine_ends(0);
        let (mut consumer, mut producer) = accelerator.accelerator_ends(0);
        push(&mut requests, 0, 8);
        requests.publish();
        let counts = memory.clone();
        let block = thread::spawn(move || {
            // DRAIN was seen: pending messages are answered, then the block ends.
            assert!(read(&mut consumer, 0, 8));
            consumer.release();
            push(&mut producer, 0, 8);
            producer.publish();
            counts.store(BLOCK_SENT, 1, Ordering::Relaxed);
            accelerator.words().set_block(0, state::ENDED, reason::STOPPED);
        });
        if engine.words().block_state(0) == state::ENDED {
            assert_eq!(engine.words().block(0).sent, 1, "final counts");
            assert!(read(&mut replies, 0, 8), "the last reply was missed");
            for at in places.slots.clone().chain(places.tx_slots.clone()).step_by(8) {
                memory.store(at, 0, Ordering::Relaxed);
            }
        }
        block.join().unwrap();
    }
}

holds! {
    stop_drains: drain(protocol::DOORBELL, Weak::Nothing);
    stop_drains_granule: drain(protocol::GRANULE8, Weak::Nothing);
    heartbeat_publishes: heartbeat(Beats::Accelerator, Weak::Nothing);
    engine_heartbeat_publishes: heartbeat(Beats::Engine, Weak::Nothing);
    ended_has_a_reason: ended(Weak::Nothing);
    ended_gives_the_region_back: retire(Weak::Nothing);
    join_after_format: format(Weak::Nothing);
}

fails! {
    stop_without_release: drain(protocol::DOORBELL, Weak::Release(STOP_OFFSET)), "was missed";
    stop_without_acquire: drain(protocol::DOORBELL, Weak::Acquire(STOP_OFFSET)), "was missed";
    stop_without_release_granule: drain(protocol::GRANULE8, Weak::Release(STOP_OFFSET)), "was missed";
    stop_without_acquire_granule: drain(protocol::GRANULE8, Weak::Acquire(STOP_OFFSET)), "was missed";
    heartbeat_without_release: heartbeat(Beats::Accelerator, Weak::Release(ACCELERATOR_HEARTBEAT)), "before the writes it publishes";
    heartbeat_without_acquire: heartbeat(Beats::Accelerator, Weak::Acquire(ACCELERATOR_HEARTBEAT)), "before the writes it publishes";
    engine_heartbeat_without_release: heartbeat(Beats::Engine, Weak::Release(ENGINE_HEARTBEAT)), "before the writes it publishes";
    engine_heartbeat_without_acquire: heartbeat(Beats::Engine, Weak::Acquire(ENGINE_HEARTBEAT)), "before the writes it publishes";
    state_without_release: ended(Weak::Release(ACCELERATOR_STATE)), "without a reason";
    state_without_acquire: ended(Weak::Acquire(ACCELERATOR_STATE)), "without a reason";
    block_state_without_release: ended(Weak::Release(BLOCK_STATE)), "without a reason";
    block_state_without_acquire: ended(Weak::Acquire(BLOCK_STATE)), "without a reason";
    retire_without_release: retire(Weak::Release(BLOCK_STATE)), "final counts";
    retire_without_acquire: retire(Weak::Acquire(BLOCK_STATE)), "final counts";
    format_without_release: format(Weak::Release(0)), "Causality violation";
    format_without_acquire: format(Weak::Acquire(0)), "Causality violation";
}
