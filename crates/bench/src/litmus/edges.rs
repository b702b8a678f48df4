//! The tests. Each function runs on both sides; differences are in an `if`.

use mqueue::memory::{Memory, Ordering, unit16_is_atomic};
use mqueue::{
    Consumer, Doorbells, Head, JoinError, Listener, LoanError, MappedMemory, Producer, Region,
    RingError, abi,
};

use super::Expect::{self, Allowed, Never, Seen};
use super::pair::{
    ACCELERATOR_PARK, ARENA, ARENA_MESSAGE_BYTES_MAX, Counts, DOORBELL, ENGINE_PARK, GRANULE8,
    GRANULE16, Limit, LitmusError, MESSAGE_BYTES_MAX, RUNG, Run, STOP, Side, Wait, Word,
    small_plan,
};

/// A test as in the table.
pub(super) struct Test {
    pub(super) name: &'static str,
    pub(super) what: &'static str,
    pub(super) expect: Expect,
    pub(super) run: Run,
}

const fn test(name: &'static str, what: &'static str, expect: Expect, run: Run) -> Test {
    Test { name, what, expect, run }
}

const RINGS: &str = "RX_PUBLISH RX_RELEASE TX_PUBLISH TX_RELEASE";

/// Every test, in the order in which both processes run them.
pub(super) const TESTS: &[Test] = &[
    test(RINGS, "doorbell ring: a wrong message", Never, |s, l| ring(s, l, DOORBELL)),
    test(RINGS, "doorbell ring with an arena: a wrong message", Never, |s, l| ring(s, l, ARENA)),
    test(RINGS, "granule8 ring: a wrong message", Never, |s, l| ring(s, l, GRANULE8)),
    test(RINGS, "granule16 ring (else granule8): a wrong message", Never, |s, l| {
        ring(s, l, GRANULE16)
    }),
    test("unit of 8 bytes", "a unit half old, half new", Never, unit8),
    test("unit of 16 bytes", "a unit half old, half new (else 8 bytes)", Never, unit16),
    test("STOP", "a stop word before the messages it follows", Never, stop),
    test("HEARTBEAT", "a heartbeat before earlier stores", Never, heartbeat),
    test("STATE", "a state before its reason", Never, state),
    test("FORMAT", "a magic number before its directory", Never, format),
    test("DOORBELL", "a count before the head it points at", Never, doorbell),
    test("PARK", "the engine sleeps, neither sees the other", Never, |s, l| park(s, l, true)),
    test("PARK", "the accelerator sleeps, neither sees the other", Never, |s, l| park(s, l, false)),
    test("store buffering, fenced", "neither store is seen", Never, |s, l| {
        store_buffering(s, l, true)
    }),
    test("message passing, relaxed", "a flag before its data", Allowed, |s, l| {
        message_passing(s, l, false)
    }),
    test("control: store buffering, no fence", "neither store is seen", Seen, |s, l| {
        store_buffering(s, l, false)
    }),
    test("control: flag stored first", "a flag before its data", Seen, |s, l| {
        message_passing(s, l, true)
    }),
    test("control: unit of two stores", "a unit half old, half new", Seen, halves),
];

/// Messages both ways through an mqueue: the second process checks each and sends it back, the first checks the
/// result. Lengths, tags and contents are derived from the message's number.
fn ring(side: &mut Side, limit: Limit, mqueue: u32) -> Result<Counts, LitmusError> {
    let max = match mqueue {
        ARENA => ARENA_MESSAGE_BYTES_MAX,
        _ => MESSAGE_BYTES_MAX,
    } as usize;
    let mut seen = 0;
    let mut received = Vec::new();
    let mut message = Vec::new();
    let mut wait = Wait::default();
    if !side.first {
        let (mut requests, mut replies) = side.region.accelerator_ends(mqueue);
        let mut n = 0;
        loop {
            if !take(&mut requests, n, max, &mut received, &mut seen)? {
                if side.load(Word::Enough, Ordering::Acquire) != 0 {
                    return Ok((n, seen));
                }
                wait.a_moment()?;
                continue;
            }
            // The received one, not the expected one.
            let head = Head { tag: n, kind: abi::kind::MESSAGE, ..Head::default() };
            while !offer(&mut replies, head, &received)? {
                wait.a_moment()?;
            }
            wait = Wait::default();
            n += 1;
        }
    }
    let (mut requests, mut replies) = side.region.engine_ends(mqueue);
    let (mut sent, mut back) = (0, 0);
    loop {
        let more = limit.continues(sent);
        if !more && sent == back {
            side.store(Word::Enough, 1, Ordering::Release);
            return Ok((back, seen));
        }
        let mut idle = true;
        if more {
            message.resize(length(sent, max), 0);
            fill(sent, &mut message);
            let head = Head { tag: sent, kind: abi::kind::MESSAGE, ..Head::default() };
            if offer(&mut requests, head, &message)? {
                sent += 1;
                idle = false;
            }
        }
        while take(&mut replies, back, max, &mut received, &mut seen)? {
            back += 1;
            idle = false;
        }
        if idle {
            wait.a_moment()?;
        } else {
            wait = Wait::default();
        }
    }
}

/// Takes message `n` if it is available, and compares all of it.
fn take(
    ring: &mut Consumer<MappedMemory>,
    n: u64,
    max: usize,
    received: &mut Vec<u8>,
    seen: &mut u64,
) -> Result<bool, LitmusError> {
    let header = match ring.peek() {
        Ok(Some(header)) => header,
        Ok(None) => return Ok(false),
        Err(RingError::Corrupt) => return Err(LitmusError::Ring("an impossible head")),
        Err(RingError::BadHeader) => return Err(LitmusError::Ring("an impossible header")),
    };
    received.resize(header.len as usize, 0);
    if !ring.copy_out(&header, received) {
        return Ok(false);
    }
    ring.advance();
    ring.release();
    let right = header.tag == n && received.len() == length(n, max) && is_filled(n, received);
    *seen += u64::from(!right);
    Ok(true)
}

fn offer(
    ring: &mut Producer<MappedMemory>,
    head: Head,
    message: &[u8],
) -> Result<bool, LitmusError> {
    match ring.push(head, message) {
        Ok(()) => {
            ring.publish();
            Ok(true)
        }
        Err(LoanError::Full) => Ok(false),
        Err(LoanError::TooLong) => Err(LitmusError::Ring("a message that is too long")),
        Err(LoanError::Corrupt) => Err(LitmusError::Ring("an impossible tail")),
    }
}

fn length(n: u64, max: usize) -> usize {
    let mixed = n.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32;
    let longest = if mixed % 16 == 0 { max } else { max.min(64) };
    (mixed >> 8) as usize % (longest + 1)
}

fn byte(n: u64, i: usize) -> u8 {
    n.wrapping_mul(131).wrapping_add(7 * i as u64) as u8
}

fn fill(n: u64, message: &mut [u8]) {
    for (i, to) in message.iter_mut().enumerate() {
        *to = byte(n, i);
    }
}

fn is_filled(n: u64, message: &[u8]) -> bool {
    message.iter().enumerate().all(|(i, found)| *found == byte(n, i))
}

/// One side writes increasing numbers, the other reads until it has seen enough different ones. `look` returns the
/// number it read and whether it was the outcome looked for.
fn stream(
    side: &mut Side,
    limit: Limit,
    writes: bool,
    mut write: impl FnMut(&Side, u64) -> bool,
    mut look: impl FnMut(&Side) -> Result<(u64, bool), LitmusError>,
) -> Result<Counts, LitmusError> {
    if writes {
        let (mut n, mut turns) = (1, 0_u64);
        while side.load(Word::Enough, Ordering::Relaxed) == 0 {
            turns += 1;
            // The reader may have ended.
            if turns % 1024 == 0 && limit.is_late() {
                break;
            }
            if write(side, n) {
                n += 1;
            } else {
                std::thread::yield_now();
            }
            side.jitter();
        }
        return Ok((0, 0));
    }
    let (mut rounds, mut seen, mut last, mut looks) = (0, 0, 0, 0_u64);
    while rounds < limit.rounds {
        looks += 1;
        if looks % 1024 == 0 && limit.is_late() {
            break;
        }
        let (n, found) = look(side)?;
        // A decreasing number is wrong in every test.
        seen += u64::from(found || n < last);
        rounds += u64::from(n != last);
        last = n;
    }
    side.store(Word::Enough, 1, Ordering::Relaxed);
    Ok((rounds, seen))
}

fn unit8(side: &mut Side, limit: Limit) -> Result<Counts, LitmusError> {
    let at = side.at(Word::X);
    let writes = side.first;
    stream(
        side,
        limit,
        writes,
        |side, n| {
            side.memory.store_unit(at, [n as u32], n as u32);
            true
        },
        |side| {
            let ([word], sequence) = side.memory.load_unit::<1>(at);
            Ok((sequence.into(), word != sequence))
        },
    )
}

fn unit16(side: &mut Side, limit: Limit) -> Result<Counts, LitmusError> {
    if !unit16_is_atomic() {
        return unit8(side, limit);
    }
    let at = side.at(Word::X);
    let writes = side.first;
    stream(
        side,
        limit,
        writes,
        |side, n| {
            side.memory.store_unit(at, [n as u32; 3], n as u32);
            true
        },
        |side| {
            let (words, sequence) = side.memory.load_unit::<3>(at);
            Ok((sequence.into(), words != [sequence; 3]))
        },
    )
}

/// What a unit must not be: two stores, two loads.
fn halves(side: &mut Side, limit: Limit) -> Result<Counts, LitmusError> {
    let at = side.at(Word::X);
    let writes = side.first;
    stream(
        side,
        limit,
        writes,
        |side, n| {
            side.memory.store(at, n, Ordering::Relaxed);
            side.memory.store(at + 8, n, Ordering::Relaxed);
            true
        },
        |side| {
            let [low, high] = side.memory.load_words::<2>(at);
            Ok((low, low != high))
        },
    )
}

fn heartbeat(side: &mut Side, limit: Limit) -> Result<Counts, LitmusError> {
    let writes = side.first;
    stream(
        side,
        limit,
        writes,
        |side, n| {
            side.store(Word::X, n, Ordering::Relaxed);
            side.words.set_engine_heartbeat(n);
            true
        },
        |side| {
            let beat = side.words.engine_heartbeat();
            Ok((beat, side.load(Word::X, Ordering::Relaxed) < beat))
        },
    )
}

/// Here the accelerator's side writes.
fn state(side: &mut Side, limit: Limit) -> Result<Counts, LitmusError> {
    let writes = !side.first;
    stream(
        side,
        limit,
        writes,
        |side, n| {
            side.words.set_block(0, n, n);
            true
        },
        |side| {
            let block = side.words.block(0);
            Ok((block.state, block.reason < block.state))
        },
    )
}

/// The first process formats a region repeatedly, the other one joins it as soon as there is a magic number.
fn format(side: &mut Side, limit: Limit) -> Result<Counts, LitmusError> {
    let window = side.window();
    let bytes = small_plan(1).bytes().map_err(|e| LitmusError::Region(e.to_string()))?;
    let act = |side: &Side, round| {
        let plan = small_plan(round);
        if side.first {
            let formatted = Region::format(window.clone(), &plan);
            // The verdict is that of the other side alone.
            return formatted.map(|_| false).map_err(|e| LitmusError::Region(e.to_string()));
        }
        for _ in 0..JOINS_MAX {
            match Region::join(window.clone()) {
                Err(JoinError::Magic(0)) => std::hint::spin_loop(),
                joined => return Ok(joined.is_ok_and(|region| region.generation() == round)),
            }
        }
        Ok(true)
    };
    let tidy = |side: &Side| {
        if side.first {
            for at in (0..bytes).step_by(8) {
                window.store(at, 0, Ordering::Relaxed);
            }
        }
        Ok(())
    };
    lockstep(side, limit, act, tidy)
}

/// How often a region that is being formatted is joined.
const JOINS_MAX: u32 = 1000;

/// A listener that sees a count must see the head it points at.
fn doorbell(side: &mut Side, limit: Limit) -> Result<Counts, LitmusError> {
    let window = side.window();
    let bells = Doorbells::over(window.clone());
    let (mut producer, mut consumer) = ends(side, RUNG);
    if side.first {
        // Left by another test.
        window.store(0, 0, Ordering::Relaxed);
    }
    side.meet()?;
    let write = |_: &Side, _| {
        let head = Head { kind: abi::kind::MESSAGE, ..Head::default() };
        let sent = matches!(offer(&mut producer, head, &[]), Ok(true));
        if sent {
            bells.ring(0);
        }
        sent
    };
    let mut listener = Listener::new(&[RUNG], |_| 0);
    let (known, mut moved) = (std::cell::Cell::new(0), Vec::new());
    let look = |side: &Side| {
        let rings = window.load(0, Ordering::Relaxed);
        let head = |mqueue| {
            known.set(side.words.rx_head(mqueue));
            known.get()
        };
        listener.collect(&bells, head, &mut moved);
        moved.clear();
        while consumer.peek().map_err(|_| LitmusError::Ring("an impossible head"))?.is_some() {
            consumer.advance();
        }
        consumer.release();
        Ok((rings, known.get() < rings))
    };
    stream(side, limit, side.first, write, look)
}

/// A block that has seen the stop word, and then an empty ring, must have seen every message.
fn stop(side: &mut Side, limit: Limit) -> Result<Counts, LitmusError> {
    let writes = side.first;
    let mqueue = STOP;
    if writes {
        let (mut requests, _) = side.region.engine_ends(mqueue);
        let write = move |side: &Side, n| {
            let head = Head { kind: abi::kind::MESSAGE, ..Head::default() };
            let sent = matches!(offer(&mut requests, head, &[]), Ok(true));
            if sent {
                side.words.set_stop(n);
            }
            sent
        };
        return stream(side, limit, true, write, |_| Ok((0, false)));
    }
    let (mut requests, _) = side.region.accelerator_ends(mqueue);
    let look = move |side: &Side| {
        let wish = side.words.stop();
        while requests.peek().map_err(|_| LitmusError::Ring("an impossible head"))?.is_some() {
            requests.advance();
        }
        requests.release();
        Ok((wish, requests.consumed() < wish))
    };
    stream(side, limit, false, |_, _| true, look)
}

/// Relaxed throughout; `flag_first` also stores in the wrong order, which is visible on every processor.
fn message_passing(side: &mut Side, limit: Limit, flag_first: bool) -> Result<Counts, LitmusError> {
    let writes = side.first;
    let order = if flag_first { [Word::Y, Word::X] } else { [Word::X, Word::Y] };
    stream(
        side,
        limit,
        writes,
        |side, n| {
            order.into_iter().for_each(|word| side.store(word, n, Ordering::Relaxed));
            true
        },
        |side| {
            let flag = side.load(Word::Y, Ordering::Relaxed);
            Ok((flag, side.load(Word::X, Ordering::Relaxed) < flag))
        },
    )
}

/// Rounds in which each side stores and then reads the other's store. `act` returns whether this side saw the other;
/// the outcome looked for is that neither did.
fn lockstep(
    side: &mut Side,
    limit: Limit,
    mut act: impl FnMut(&Side, u64) -> Result<bool, LitmusError>,
    mut tidy: impl FnMut(&Side) -> Result<(), LitmusError>,
) -> Result<Counts, LitmusError> {
    let (mut rounds, mut seen) = (0, 0);
    while side.next_round(limit, rounds)? {
        rounds += 1;
        side.jitter();
        let saw = act(side, rounds)?;
        if !side.first {
            side.store(Word::Result, saw.into(), Ordering::Relaxed);
        }
        side.meet()?;
        let theirs = side.load(Word::Result, Ordering::Relaxed) != 0;
        seen += u64::from(side.first && !saw && !theirs);
        tidy(side)?;
    }
    Ok((rounds, seen))
}

fn store_buffering(side: &mut Side, limit: Limit, fenced: bool) -> Result<Counts, LitmusError> {
    let (own, other) = if side.first { (Word::X, Word::Y) } else { (Word::Y, Word::X) };
    let act = |side: &Side, round| {
        side.store(own, round, Ordering::Relaxed);
        if fenced {
            side.memory.fence();
        }
        Ok(side.load(other, Ordering::Relaxed) == round)
    };
    lockstep(side, limit, act, |_| Ok(()))
}

/// A sleeper sets its flag and reads its ring; a waker publishes and reads the flag.
fn park(side: &mut Side, limit: Limit, engine_sleeps: bool) -> Result<Counts, LitmusError> {
    let mqueue = if engine_sleeps { ENGINE_PARK } else { ACCELERATOR_PARK };
    let (producer, consumer) = ends(side, mqueue);
    if side.first == engine_sleeps {
        let consumer = std::cell::RefCell::new(consumer);
        let park = |side: &Side, parked| match engine_sleeps {
            true => side.words.set_parked(parked),
            false => side.words.set_accelerator_parked(parked),
        };
        let act = |side: &Side, _| {
            park(side, true);
            let head = match engine_sleeps {
                true => side.words.tx_head(mqueue),
                false => side.words.rx_head(mqueue),
            };
            Ok(head > consumer.borrow().consumed())
        };
        let tidy = |side: &Side| {
            park(side, false);
            let mut consumer = consumer.borrow_mut();
            match consumer.peek() {
                Ok(Some(_)) => consumer.advance(),
                _ => return Err(LitmusError::Ring("a published message is not there")),
            }
            consumer.release();
            Ok(())
        };
        return lockstep(side, limit, act, tidy);
    }
    let mut producer = producer;
    let act = |side: &Side, _| {
        let head = Head { kind: abi::kind::MESSAGE, ..Head::default() };
        if !offer(&mut producer, head, &[])? {
            return Err(LitmusError::Ring("a ring that was emptied is full"));
        }
        Ok(match engine_sleeps {
            true => side.words.parked(),
            false => side.words.accelerator_parked(),
        })
    };
    lockstep(side, limit, act, |_| Ok(()))
}

/// This side's ends of an mqueue.
fn ends(side: &mut Side, mqueue: u32) -> (Producer<MappedMemory>, Consumer<MappedMemory>) {
    if side.first {
        side.region.engine_ends(mqueue)
    } else {
        let (consumer, producer) = side.region.accelerator_ends(mqueue);
        (producer, consumer)
    }
}
