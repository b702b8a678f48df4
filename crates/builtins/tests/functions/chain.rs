//! Chains of functions, and the built-in ones.

use std::cell::Cell;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use builtins::{Passthrough, Threshold};
use onpath::{
    Arranged, Chain, Command, CommandError, Counters, Direction, Failure, Function, Link, Merge,
    Messages, OnFailure, Outcome, Policy, RequestId, Sink, Step, Trace, Verdict,
};
use proptest::prelude::*;
use wire::DropReason;

/// Does what a closure does.
struct Does<F>(F);

impl<F> Function for Does<F>
where
    F: FnMut(Direction, &mut Messages) -> Result<(), Failure> + Send,
{
    fn decide(&mut self, direction: Direction, messages: &mut Messages) -> Result<(), Failure> {
        self.0(direction, messages)
    }
}

fn link(
    id: u64,
    function: impl Function + 'static,
    on_failure: OnFailure,
) -> (Link, Arc<Counters>) {
    link_within(id, function, Policy { on_failure, deadline_ns: 1000 })
}

fn link_within(
    id: u64,
    function: impl Function + 'static,
    policy: Policy,
) -> (Link, Arc<Counters>) {
    let counters = Arc::<Counters>::default();
    (Link::new(id, Box::new(function), policy, Arc::clone(&counters)), counters)
}

fn threshold(offset: u32, low: u32, high: u32) -> Threshold {
    let mut threshold = Threshold::default();
    for (register, value) in [(6, offset), (7, low), (8, high)] {
        threshold.write(register, value.into()).unwrap();
    }
    threshold
}

fn batch(messages: &[&[u8]]) -> Messages {
    let mut batch = Messages::new(64, 64);
    messages.iter().for_each(|message| batch.push(message));
    batch
}

fn appends(letter: u8) -> impl Function {
    Does(move |_, messages: &mut Messages| {
        for index in 0..messages.len() {
            let mut bytes = messages.bytes(index).to_vec();
            bytes.push(letter);
            messages.rewrite(index, &bytes);
        }
        Ok(())
    })
}

#[test]
fn requests_meet_functions_in_order_and_replies_in_the_opposite_one() {
    let (a, _) = link(0, appends(b'a'), OnFailure::Open);
    let (b, counters) = link(1, appends(b'b'), OnFailure::Open);
    let mut chain = Chain::new(vec![a, b]);
    let mut requests = batch(&[b"x", b"y"]);
    chain.decide(Direction::Requests, &mut requests, &|| 0);
    assert_eq!((requests.bytes(0), requests.bytes(1)), (&b"xab"[..], &b"yab"[..]));
    assert_eq!((requests.shown_len(0), requests.outcome(0)), (1, Outcome::Pass));
    let mut replies = batch(&[b"z"]);
    chain.decide(Direction::Replies, &mut replies, &|| 0);
    assert_eq!(replies.bytes(0), b"zba");
    assert_eq!((counters.messages.value(), counters.batches.value()), (3, 2));
    assert_eq!((counters.rewritten.value(), counters.passed.value()), (3, 3));
    assert_eq!(counters.bytes.value(), 2 + 2 + 1);
}

#[test]
fn later_functions_do_not_see_what_an_earlier_one_has_ended() {
    let ends = Does(|_, messages: &mut Messages| {
        messages.drop(0, DropReason::TooShort);
        messages.reply(1, b"reply");
        messages.steer(2, 7);
        Ok(())
    });
    let (a, counters) = link(0, ends, OnFailure::Open);
    let (b, after) = link(1, appends(b'b'), OnFailure::Open);
    let mut messages = batch(&[b"0", b"1", b"2", b"3"]);
    Chain::new(vec![a, b]).decide(Direction::Requests, &mut messages, &|| 0);
    let outcomes: Vec<_> = (0..4).map(|i| (messages.outcome(i), messages.bytes(i))).collect();
    let expected: [(Outcome, &[u8]); 4] = [
        (Outcome::Drop(DropReason::TooShort), b"0"),
        (Outcome::Reply, b"reply"),
        (Outcome::Steer(7), b"2b"),
        (Outcome::Pass, b"3b"),
    ];
    assert_eq!(outcomes, expected);
    assert_eq!((after.messages.value(), after.passed.value()), (2, 2));
    let counted = (counters.dropped.value(), counters.replied.value(), counters.steered.value());
    assert_eq!((counted, counters.passed.value()), ((1, 1, 1), 2));
}

#[test]
fn what_finds_no_room_is_dropped_for_a_reason() {
    let floods = Does(|_, messages: &mut Messages| {
        messages.reply(0, &[0; 65]);
        for index in 1..messages.len() {
            messages.reply(index, &[1; 64]);
        }
        Ok(())
    });
    let (a, _) = link(0, floods, OnFailure::Open);
    let mut messages = Messages::new(64, 64);
    while messages.has_room(64) {
        messages.push(&[2; 64]);
    }
    assert_eq!(messages.len(), onpath::MESSAGES_MAX);
    Chain::new(vec![a]).decide(Direction::Requests, &mut messages, &|| 0);
    assert_eq!(messages.outcome(0), Outcome::Drop(DropReason::ReplyTooLong));
    assert_eq!(messages.outcome(1), Outcome::Reply);
    assert_eq!(messages.bytes(1), [1; 64]);
    // The memory of a batch is bounded: a function that writes again and again does not get more.
    let greedy = Does(|_, messages: &mut Messages| {
        for _ in 0..1 << 20 {
            messages.rewrite(0, &[3; 64]);
        }
        Ok(())
    });
    let mut messages = batch(&[b"x"]);
    let (a, _) = link(0, greedy, OnFailure::Open);
    Chain::new(vec![a]).decide(Direction::Requests, &mut messages, &|| 0);
    assert_eq!(messages.outcome(0), Outcome::Drop(DropReason::ReplyMemory));
}

/// Decides about messages before it fails with those that begin with `b`, by panics or otherwise.
fn fails_with_b(panics: bool) -> impl Function {
    Does(move |_, messages: &mut Messages| {
        for index in 0..messages.len() {
            if !messages.is_open(index) {
                continue;
            }
            match messages.bytes(index)[0] {
                b'b' if panics => panic!("as the test wants"),
                b'b' => return Err(Failure("as the test wants".into())),
                b'd' => messages.drop(index, DropReason::FunctionDrop),
                b'r' => messages.reply(index, b"reply"),
                _ => {
                    let bytes = [messages.bytes(index), b"+"].concat();
                    messages.rewrite(index, &bytes);
                }
            }
        }
        Ok(())
    })
}

#[test]
fn a_message_that_makes_a_function_fail_is_the_only_one_that_is_lost() {
    for (on_failure, panics) in [(OnFailure::Open, true), (OnFailure::Closed, false)] {
        let (a, counters) = link(0, fails_with_b(panics), on_failure);
        let (last, after) = link(1, Passthrough, OnFailure::Open);
        let mut chain = Chain::new(vec![a, last]);
        let mut messages = batch(&[b"x", b"d", b"b", b"r", b"y", b"b", b"z"]);
        chain.decide(Direction::Requests, &mut messages, &|| 0);
        let found: Vec<_> =
            (0..7).map(|index| (messages.outcome(index), messages.bytes(index))).collect();
        let bad = match on_failure {
            OnFailure::Open => Outcome::Pass,
            OnFailure::Closed => Outcome::Drop(DropReason::FunctionFailed),
        };
        let dropped = Outcome::Drop(DropReason::FunctionDrop);
        let expected: [(Outcome, &[u8]); 7] = [
            (Outcome::Pass, b"x+"),
            (dropped, b"d"),
            (bad, b"b"),
            (Outcome::Reply, b"reply"),
            (Outcome::Pass, b"y+"),
            (bad, b"b"),
            (Outcome::Pass, b"z+"),
        ];
        assert_eq!(found, expected);
        let counted = (counters.dropped.value(), counters.replied.value(), counters.passed.value());
        assert_eq!((counted, counters.rewritten.value()), ((1, 1, 3), 3));
        assert_eq!((counters.failures.value(), counters.restarts.value()), (3, 3));
        let fell_back = (counters.failed_open.value(), counters.failed_closed.value());
        let open = on_failure == OnFailure::Open;
        assert_eq!(fell_back, if open { (2, 0) } else { (0, 2) });
        assert_eq!(after.messages.value(), if open { 5 } else { 3 });
        let mut messages = batch(&[b"x"]);
        chain.decide(Direction::Requests, &mut messages, &|| 0);
        assert_eq!((messages.bytes(0), counters.restarts.value()), (&b"x+"[..], 3));
    }
}

#[test]
fn failures_take_a_part_of_the_time_of_a_worker_only() {
    let now = Cell::new(0);
    // A failing call takes 2 ms, and others no time.
    let (took, takes) = std::sync::mpsc::channel();
    let fails = Does(move |_, messages: &mut Messages| {
        let bad = (0..messages.len()).any(|i| messages.is_open(i) && messages.bytes(i) == b"bad");
        took.send(if bad { 2 * MS } else { 0 }).unwrap();
        if bad { Err(Failure("as the test wants".into())) } else { Ok(()) }
    });
    let policy = Policy { on_failure: OnFailure::Closed, deadline_ns: 3 * MS };
    let (a, counters) = link_within(0, fails, policy);
    let mut chain = Chain::new(vec![a]);
    let clock = || {
        now.set(now.get() + takes.try_iter().sum::<u64>());
        now.get()
    };
    let mut asked = |message: &[u8], at_ns: u64| {
        now.set(at_ns.max(now.get()));
        let mut messages = batch(&[message]);
        chain.decide(Direction::Requests, &mut messages, &clock);
        messages.outcome(0) == Outcome::Pass
    };
    // 10 ms are free.
    for _ in 0..4 {
        assert!(!asked(b"bad", 0));
        assert!(asked(b"good", 0), "it is restarted at once");
    }
    assert!(!asked(b"bad", 0));
    let (failures, begin_ns) = (counters.failures.value(), now.get());
    assert_eq!(failures, 5);
    assert!(!asked(b"good", begin_ns + 10 * MS), "it has taken too long");
    // Messages that make it fail come all the time: that takes a sixteenth of it, and the function goes on in between.
    let (mut failed, mut passed) = (0, 0);
    while now.get() < begin_ns + 10_000 * MS {
        let (at, before) = (now.get(), counters.failures.value());
        asked(b"bad", at + MS / 2);
        failed += counters.failures.value() - before;
        passed += u64::from(asked(b"good", now.get() + MS / 2));
    }
    let (failed_ns, most_ns) = (failed * (2 * MS + MS / 4), 10_000 * MS / 16 + 10 * MS);
    assert!((most_ns / 2..most_ns).contains(&failed_ns), "{failed_ns}");
    assert!(passed >= failed / 2, "{passed} {failed}");
}

const MS: u64 = 1_000_000;

/// A chain with functions whose calls take time, as the first byte of a message says: `l` is one with which the function does not end before its deadline, a digit so many
/// milliseconds.
struct Timed {
    chain: Chain,
    now: Arc<AtomicU64>,
}

impl Timed {
    /// Each function has a deadline of 1 ms and, if there is one, a share.
    fn new(shares: &[Option<u32>]) -> (Self, Vec<Arc<Counters>>) {
        // As late as the clock of a machine that has run for long.
        let now = Arc::new(AtomicU64::new(3_600_000 * MS));
        let function = |_: &Option<u32>| {
            let now = now.clone();
            Does(move |_, messages: &mut Messages| {
                for index in (0..messages.len()).filter(|index| messages.is_open(*index)) {
                    match messages.bytes(index)[0] {
                        b'l' => {
                            now.fetch_add(2 * MS, Ordering::Relaxed);
                            return Err(Failure("it exceeded its deadline".into()));
                        }
                        digit => _ = now.fetch_add(u64::from(digit - b'0') * MS, Ordering::Relaxed),
                    }
                }
                Ok(())
            })
        };
        let policy = Policy { on_failure: OnFailure::Closed, deadline_ns: MS };
        let links = shares.iter().map(|share| {
            let (link, counters) = link_within(0, function(share), policy);
            (link.with_share(*share), counters)
        });
        let (links, counters) = links.unzip();
        (Self { chain: Chain::new(links), now }, counters)
    }

    fn now_ms(&self) -> u64 {
        self.now.load(Ordering::Relaxed) / MS
    }

    fn wait_until(&self, ms: u64) {
        self.now.fetch_max(ms * MS, Ordering::Relaxed);
    }

    /// How many of these messages pass.
    fn pass(&mut self, messages: &[&[u8]]) -> usize {
        let mut messages = batch(messages);
        let now = self.now.clone();
        self.chain.decide(Direction::Requests, &mut messages, &|| now.load(Ordering::Relaxed));
        (0..messages.len()).filter(|index| messages.outcome(*index) == Outcome::Pass).count()
    }
}

#[test]
fn a_message_with_which_a_function_does_not_end_costs_others_a_deadline_a_second() {
    // One in two seconds, among others: nothing else is lost.
    let (mut timed, counters) = Timed::new(&[None]);
    let begin_ms = timed.now_ms();
    for second in (0..200).step_by(2) {
        timed.wait_until(begin_ms + 1000 * second);
        assert_eq!(timed.pass(&[b"0", b"l", b"0"]), 2);
        for part in 1..20 {
            timed.wait_until(begin_ms + 1000 * second + 100 * part);
            assert_eq!(timed.pass(&[b"0", b"0"]), 2, "in second {second}");
        }
    }
    // That of its batch, and its own.
    assert_eq!((counters[0].failures.value(), counters[0].time_ns.value()), (200, 400 * MS));
    // As many as come: it takes no more of the worker.
    let (mut timed, counters) = Timed::new(&[None]);
    let begin_ms = timed.now_ms();
    let mut passed = 0;
    while timed.now_ms() < begin_ms + 100_000 {
        timed.wait_until(timed.now_ms() + 1);
        passed += timed.pass(&[b"l"]) + timed.pass(&[b"0"]);
    }
    let failures = counters[0].failures.value();
    assert!((99..=105).contains(&failures), "{failures} in 100 s");
    assert_eq!(counters[0].time_ns.value(), 2 * MS * failures);
    assert!(passed < 10, "meanwhile it is not called: {passed}");
    let why = counters[0].last_failure();
    assert_eq!(why, "it exceeded its deadline");
}

#[test]
fn a_function_over_its_share_is_suspended_with_a_reason() {
    let (mut timed, counters) = Timed::new(&[Some(50)]);
    let begin_ms = timed.now_ms();
    let mut suspended_at = Vec::new();
    // Calls of 3 ms, with 1 ms in between.
    while timed.now_ms() < begin_ms + 100_000 {
        let before = counters[0].suspensions.value();
        timed.pass(&[b"3"]);
        if counters[0].suspensions.value() > before {
            suspended_at.push(timed.now_ms() - begin_ms);
            let why = counters[0].last_failure();
            assert!(why.contains("may take 50 % (engine.user_function_percent)"), "{why}");
            assert!(why.starts_with("suspended for "), "{why}");
        }
        timed.wait_until(timed.now_ms() + 1);
    }
    // After half a second of calls, then for 1, 2, 4 s and so on.
    let pauses: Vec<u64> = suspended_at.windows(2).map(|at| (at[1] - at[0]) / 1000).collect();
    assert_eq!(pauses, [1, 2, 4, 8, 16, 32], "{suspended_at:?}");
    assert!(suspended_at[0] <= 1100, "{suspended_at:?}");
    let time_ms = counters[0].time_ns.value() / MS;
    assert!(time_ms < 7 * 510, "{time_ms} ms of 100 s");
    assert!(counters[0].failed_closed.value() > 50_000);
    assert_eq!(counters[0].restarts.value(), 0, "it keeps what it has");
}

#[test]
fn a_function_within_its_share_is_never_suspended_and_one_that_was_is_forgiven() {
    // 9 of 20 ms, for two functions together; and 3 of 4 for one of the operator.
    let (mut timed, counters) = Timed::new(&[Some(50), Some(50)]);
    let (mut other, of_operator) = Timed::new(&[None]);
    let begin_ms = timed.now_ms();
    for round in 0..1000 {
        assert_eq!(timed.pass(&[b"4"]) + other.pass(&[b"9"]), 2);
        timed.wait_until(begin_ms + 20 * round);
        other.wait_until(begin_ms + 12 * round);
    }
    let suspended = [&counters[0], &counters[1], &of_operator[0]].map(|c| c.suspensions.value());
    assert_eq!(suspended, [0, 0, 0]);
    // Together they take too much.
    while timed.pass(&[b"6"]) == 1 {
        timed.wait_until(timed.now_ms() + 1);
    }
    assert_eq!(counters[0].suspensions.value() + counters[1].suspensions.value(), 1);
    // After some seconds within the share the next time is a second again.
    timed.wait_until(timed.now_ms() + 10_000);
    for _ in 0..400 {
        timed.pass(&[b"1"]);
        timed.wait_until(timed.now_ms() + 10);
    }
    while timed.pass(&[b"6"]) == 1 {
        timed.wait_until(timed.now_ms() + 1);
    }
    for counters in &counters {
        let why = counters.last_failure();
        assert!(why.is_empty() || why.starts_with("suspended for 1 s"), "{why}");
    }
    assert_eq!(counters[0].suspensions.value() + counters[1].suspensions.value(), 2);
}

/// Fails always, and so does its restart.
struct Broken;

impl Function for Broken {
    fn decide(&mut self, _: Direction, _: &mut Messages) -> Result<(), Failure> {
        Err(Failure("as the test wants".into()))
    }

    fn restart(&mut self) -> Result<bool, Failure> {
        Err(Failure("as the test wants".into()))
    }
}

#[test]
fn a_restart_that_fails_is_tried_again_after_twice_as_long() {
    let (a, counters) = link(0, Broken, OnFailure::Open);
    let mut chain = Chain::new(vec![a]);
    let mut tries = Vec::new();
    for at_ms in 0..2000 {
        let before = counters.failures.value();
        chain.decide(Direction::Requests, &mut batch(&[b"x"]), &|| at_ms * MS);
        if counters.failures.value() > before {
            tries.push(at_ms);
        }
    }
    assert_eq!(tries, [0, 1, 11, 31, 71, 151, 311, 631, 1271]);
    assert_eq!((counters.batches.value(), counters.failed_open.value()), (1, 2000));
}

#[test]
fn a_call_that_takes_longer_than_the_deadline_is_counted() {
    let (a, counters) = link(0, Passthrough, OnFailure::Open);
    let mut chain = Chain::new(vec![a]);
    for took_ns in [1000, 1001] {
        let now = Cell::new(0);
        chain.decide(Direction::Requests, &mut batch(&[b"x"]), &|| now.replace(took_ns));
    }
    assert_eq!((counters.overruns.value(), counters.time_ns.value()), (1, 2001));
}

#[test]
fn functions_that_stay_in_a_chain_keep_their_state() {
    let threshold = || threshold(0, 0, u32::MAX);
    let (a, _) = link(1, threshold(), OnFailure::Open);
    let mut chain = Chain::new(vec![a]);
    chain.decide(Direction::Requests, &mut batch(&[&[0, 0, 0, 5]]), &|| 0);
    let (b, _) = link(2, threshold(), OnFailure::Open);
    assert!(chain.arrange(vec![Arranged::New(b), Arranged::Kept(1), Arranged::Kept(9)]).is_empty());
    assert_eq!(chain.command(1, Command::Read).unwrap().values[3], 5);
    assert_eq!(chain.command(2, Command::Read).unwrap().values[3], 0);
    assert_eq!(chain.arrange(vec![Arranged::Kept(2)]).len(), 1);
    assert_eq!(chain.command(1, Command::Read), Err(CommandError::Gone));
}

#[test]
fn registers_are_read_reset_and_written() {
    let (a, _) = link(1, threshold(1, 10, 20), OnFailure::Open);
    let mut chain = Chain::new(vec![a]);
    let mut messages = batch(&[b"", &[9, 0, 0, 0, 9], &[9, 0, 0, 0, 20], &[9, 1, 0, 0, 0]]);
    chain.decide(Direction::Requests, &mut messages, &|| 0);
    let outcomes: Vec<_> = (0..4).map(|index| messages.outcome(index)).collect();
    let dropped = Outcome::Drop(DropReason::FunctionDrop);
    let short = Outcome::Drop(DropReason::TooShort);
    assert_eq!(outcomes, [short, dropped, Outcome::Pass, dropped]);
    let sum = 9 + 20 + (1 << 24);
    assert_eq!(
        chain.command(1, Command::Read).map(|read| read.values),
        Ok(vec![9, 1 << 24, 3, sum, 2, 1, 1, 10, 20])
    );
    let write = |register, value| Command::Write { register, value };
    assert_eq!(chain.command(1, write(8, 1 << 24)).unwrap().values[8], 1 << 24);
    assert_eq!(chain.command(1, write(3, 0)), Err(CommandError::NoSetting));
    assert_eq!(chain.command(1, write(99, 0)), Err(CommandError::NoSetting));
    assert!(matches!(chain.command(1, write(7, 1 << 32)), Err(CommandError::Refused(_))));
    let reset = chain.command(1, Command::Reset).unwrap();
    assert_eq!(reset.values, [u32::MAX.into(), 0, 0, 0, 0, 0, 1, 10, 1 << 24]);
    assert_eq!((Merge::Min.merge(3, 2), Merge::Max.merge(3, 2), Merge::Sum.merge(3, 2)), (2, 3, 5));
}

proptest! {
    /// Whatever functions do, each message has one outcome and the counters add up.
    #[test]
    fn every_message_is_accounted_for(
        decisions in prop::collection::vec(prop::collection::vec(0..6u8, 0..20), 1..4),
        count in 0..20usize,
    ) {
        let mut links = Vec::new();
        let mut all = Vec::new();
        for (id, decisions) in (0..).zip(decisions) {
            let does = Does(move |_, messages: &mut Messages| {
                for index in 0..messages.len() {
                    match decisions.get(index) {
                        Some(0) => messages.drop(index, DropReason::BadMessage),
                        Some(1) => messages.reply(index, b"r"),
                        Some(2) => messages.steer(index, 3),
                        Some(3) => messages.rewrite(index, b"w"),
                        Some(4) => return Err(Failure(String::new())),
                        _ => {}
                    }
                }
                Ok(())
            });
            let on_failure = if id % 2 == 0 { OnFailure::Open } else { OnFailure::Closed };
            let (link, counters) = link(id, does, on_failure);
            links.push(link);
            all.push(counters);
        }
        let mut chain = Chain::new(links);
        for _ in 0..2 {
            let mut messages = batch(&vec![&b"m"[..]; count]);
            chain.decide(Direction::Requests, &mut messages, &|| 0);
            let open = (0..count).filter(|index| messages.is_open(*index)).count();
            prop_assert_eq!(open, messages.open());
        }
        let mut arrived = 2 * count as u64;
        for counters in all {
            prop_assert_eq!(counters.messages.value(), arrived);
            let ended = counters.dropped.value()
                + counters.replied.value()
                + counters.failed_closed.value();
            let passed = counters.passed.value() + counters.failed_open.value();
            prop_assert_eq!(ended + passed, arrived);
            arrived = passed;
        }
    }
}

/// A ring with this much room, and how often it was made visible.
#[derive(Default)]
struct Room {
    room: usize,
    put: Vec<Vec<u8>>,
    published: usize,
}

impl Sink for Room {
    fn put(&mut self, message: &[u8], _: &RequestId) -> bool {
        let fits = self.put.len() < self.room;
        self.put.extend(fits.then(|| message.to_vec()));
        fits
    }

    fn publish(&mut self) {
        self.published += 1;
    }
}

#[test]
fn requests_are_delivered_once_in_order_as_long_as_there_is_room() {
    let sink = Arc::new(Mutex::new(Room { room: 3, ..Room::default() }));
    let delivers = Does(|_, messages: &mut Messages| {
        messages.rewrite(0, b"rewritten");
        for index in 0..messages.len() {
            if messages.bytes(index) != b"pass" {
                messages.deliver(index);
                messages.deliver(index);
                messages.drop(index, DropReason::FunctionDrop);
            }
        }
        Ok(())
    });
    let (delivers, counters) = link(0, delivers, OnFailure::Open);
    let (sees, after) = link(1, Passthrough, OnFailure::Open);
    let mut chain = Chain::new(vec![delivers.with_sink(Some(sink.clone())), sees]);
    let mut requests = batch(&[b"a", b"b", b"pass", b"c", b"d", b"e"]);
    chain.decide(Direction::Requests, &mut requests, &|| 0);
    let outcomes: Vec<_> = (0..6).map(|index| requests.outcome(index)).collect();
    let full = Outcome::Drop(DropReason::RingFull);
    use Outcome::{Deliver, Pass};
    assert_eq!(outcomes, [Deliver, Deliver, Pass, Deliver, full, full]);
    let found = sink.lock().unwrap();
    assert_eq!(
        (&found.put[..], found.published),
        (&[b"rewritten".to_vec(), b"b".into(), b"c".into()][..], 1)
    );
    drop(found);
    assert_eq!((counters.delivered.value(), counters.ring_full.value()), (3, 2));
    assert_eq!((counters.passed.value(), after.messages.value()), (1, 1));
    // A reply that it delivers passes, and nothing is put anywhere.
    let mut replies = batch(&[b"a"]);
    chain.decide(Direction::Replies, &mut replies, &|| 0);
    assert_eq!(sink.lock().unwrap().put.len(), 3);
}

#[test]
fn nothing_of_a_call_that_fails_is_delivered() {
    let sink = Arc::new(Mutex::new(Room { room: 9, ..Room::default() }));
    let mut calls = 0;
    let fails = Does(move |_, messages: &mut Messages| {
        calls += 1;
        (0..messages.len()).for_each(|index| messages.deliver(index));
        if calls == 1 { Err(Failure("as the test wants".into())) } else { Ok(()) }
    });
    let (fails, counters) = link(0, fails, OnFailure::Open);
    let mut chain = Chain::new(vec![fails.with_sink(Some(sink.clone()))]);
    let mut requests = batch(&[b"a", b"b"]);
    chain.decide(Direction::Requests, &mut requests, &|| 0);
    // After the failure each of them is shown alone.
    assert_eq!(sink.lock().unwrap().put, [b"a", b"b"]);
    assert_eq!((counters.failures.value(), counters.delivered.value()), (1, 2));
}

#[test]
fn a_trace_has_the_functions_that_the_next_messages_meet_and_what_they_decide() {
    let (appends, _) = link(7, appends(b'!'), OnFailure::Open);
    let decides = Does(|direction, messages: &mut Messages| {
        for index in 0..messages.len() {
            match messages.bytes(index)[0] {
                b'd' => messages.drop(index, DropReason::FunctionDrop),
                b'r' => messages.reply(index, b"reply"),
                b's' => messages.steer(index, 3),
                b'x' if direction == Direction::Requests => messages.deliver(index),
                _ => {}
            }
        }
        Ok(())
    });
    let (decides, _) = link(8, decides, OnFailure::Open);
    let (last, _) = link(9, Passthrough, OnFailure::Open);
    let mut chain = Chain::new(vec![appends, decides, last]);
    let recorded = Arc::new(AtomicUsize::new(0));
    let traced = Trace::new(7, Arc::clone(&recorded));
    assert!(chain.set_trace(Some(Box::new(traced))).is_none());
    let now = Cell::new(1000);
    let clock = || {
        now.set(now.get() + 10);
        now.get()
    };
    chain.decide(Direction::Requests, &mut batch(&[b"d", b"r", b"s", b"x", b"p"]), &clock);
    assert_eq!(recorded.load(Ordering::Relaxed), 5);
    chain.decide(Direction::Replies, &mut batch(&[b"p", b"d", b"p"]), &clock);
    assert_eq!(recorded.load(Ordering::Relaxed), 7);
    // It is complete: later messages are not in it.
    chain.decide(Direction::Requests, &mut batch(&[b"p"]), &clock);
    let entries = chain.set_trace(None).unwrap().into_entries();
    assert!(chain.set_trace(None).is_none());
    let shown: Vec<(u32, Vec<_>)> = entries
        .iter()
        .map(|entry| {
            let step = |step: &Step| (step.link, step.verdict, step.batch);
            (entry.bytes, entry.steps.iter().map(step).collect())
        })
        .collect();
    use Verdict::{Deliver, Drop, Pass, Reply, Rewrite, Steer};
    let full = Drop(DropReason::RingFull);
    assert_ne!(full, Deliver);
    let dropped = Drop(DropReason::FunctionDrop);
    assert_eq!(
        shown,
        [
            (1, vec![(7, Rewrite, 5), (8, dropped, 5)]),
            (1, vec![(7, Rewrite, 5), (8, Reply, 5)]),
            (1, vec![(7, Rewrite, 5), (8, Steer(3), 5), (9, Pass, 2)]),
            (1, vec![(7, Rewrite, 5), (8, full, 5)]),
            (1, vec![(7, Rewrite, 5), (8, Pass, 5), (9, Pass, 2)]),
            (1, vec![(9, Pass, 3), (8, Pass, 3), (7, Rewrite, 2)]),
            (1, vec![(9, Pass, 3), (8, dropped, 3)]),
        ]
    );
    assert!(entries.iter().flat_map(|entry| &entry.steps).all(|step| step.took_ns > 0));
    assert!(entries.windows(2).all(|pair| pair[0].at_ns <= pair[1].at_ns));
}

/// Fails once, and is not ready for a while then.
struct Reloads {
    fails: bool,
    ready: Arc<AtomicUsize>,
}

impl Function for Reloads {
    fn decide(&mut self, _: Direction, messages: &mut Messages) -> Result<(), Failure> {
        if std::mem::take(&mut self.fails) {
            return Err(Failure("as the test wants".into()));
        }
        (0..messages.len()).for_each(|index| messages.rewrite(index, b"works"));
        Ok(())
    }

    fn restart(&mut self) -> Result<bool, Failure> {
        Ok(self.ready.load(Ordering::Relaxed) > 0)
    }
}

#[test]
fn while_a_function_is_reloaded_its_policy_decides_about_messages_and_then_it_works_again() {
    for on_failure in [OnFailure::Open, OnFailure::Closed] {
        let ready = Arc::new(AtomicUsize::new(0));
        let (reloads, counters) =
            link(0, Reloads { fails: true, ready: ready.clone() }, on_failure);
        let mut chain = Chain::new(vec![reloads]);
        let expected = match on_failure {
            OnFailure::Open => Outcome::Pass,
            OnFailure::Closed => Outcome::Drop(DropReason::FunctionFailed),
        };
        for round in 1..=5 {
            let mut requests = batch(&[b"a", b"b"]);
            // Much later each time: it is not back-off that it waits for.
            chain.decide(Direction::Requests, &mut requests, &|| round * 60_000_000_000);
            assert_eq!([0, 1].map(|index| requests.outcome(index)), [expected; 2], "{round}");
            assert_eq!(requests.bytes(0), b"a");
        }
        let met = match on_failure {
            OnFailure::Open => (10, 0),
            OnFailure::Closed => (0, 10),
        };
        assert_eq!((counters.failed_open.value(), counters.failed_closed.value()), met);
        assert_eq!((counters.failures.value(), counters.restarts.value()), (1, 0));
        ready.store(1, Ordering::Relaxed);
        let mut requests = batch(&[b"a"]);
        chain.decide(Direction::Requests, &mut requests, &|| 600_000_000_000);
        assert_eq!((requests.bytes(0), requests.outcome(0)), (&b"works"[..], Outcome::Pass));
        assert_eq!(counters.restarts.value(), 1);
    }
}
