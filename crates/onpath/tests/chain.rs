//! Chains of functions, and the built-in ones.

use std::cell::Cell;
use std::sync::Arc;

use onpath::builtin::{Passthrough, Threshold};
use onpath::{
    Arranged, Chain, Command, CommandError, Counters, Direction, Failure, Function, Link, Merge,
    Messages, OnFailure, Outcome, Policy,
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
    let counters = Arc::<Counters>::default();
    let policy = Policy { on_failure, deadline_ns: 1000 };
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

#[test]
fn a_failure_concerns_its_batch_and_the_time_of_its_back_off() {
    for (on_failure, panics) in [(OnFailure::Open, true), (OnFailure::Closed, false)] {
        let fails = Does(move |_, messages: &mut Messages| {
            assert!(!(panics && messages.bytes(0) == b"bad"), "as the test wants");
            let failed = messages.bytes(0) == b"bad";
            if failed { Err(Failure("as the test wants".into())) } else { Ok(()) }
        });
        let (a, counters) = link(0, fails, on_failure);
        let mut chain = Chain::new(vec![a]);
        let mut asked = |message: &[u8], at_ms: u64| {
            let mut messages = batch(&[message]);
            chain.decide(Direction::Requests, &mut messages, &|| at_ms * 1_000_000);
            messages.outcome(0) == Outcome::Pass
        };
        let open = on_failure == OnFailure::Open;
        assert!(asked(b"good", 0));
        assert_eq!(asked(b"bad", 1), open);
        assert_eq!(asked(b"good", 10), open, "for 10 ms");
        assert!(asked(b"good", 11));
        assert_eq!(asked(b"bad", 12), open);
        assert_eq!(asked(b"good", 31), open, "for 20 ms");
        assert!(asked(b"good", 32));
        // After 10 s without a failure the back-off is short again.
        assert_eq!(asked(b"bad", 10_032), open);
        assert!(asked(b"good", 10_042));
        assert_eq!((counters.failures.value(), counters.restarts.value()), (3, 3));
        let fell_back = (counters.failed_open.value(), counters.failed_closed.value());
        assert_eq!(fell_back, if open { (5, 0) } else { (0, 5) });
        assert_eq!(counters.passed.value(), 4);
    }
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
    assert_eq!(chain.command(1, Command::Read).unwrap()[3], 5);
    assert_eq!(chain.command(2, Command::Read).unwrap()[3], 0);
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
    assert_eq!(chain.command(1, Command::Read), Ok(vec![9, 1 << 24, 3, sum, 2, 1, 1, 10, 20]));
    let write = |register, value| Command::Write { register, value };
    assert_eq!(chain.command(1, write(8, 1 << 24)).unwrap()[8], 1 << 24);
    assert_eq!(chain.command(1, write(3, 0)), Err(CommandError::NoSetting));
    assert_eq!(chain.command(1, write(99, 0)), Err(CommandError::NoSetting));
    assert!(matches!(chain.command(1, write(7, 1 << 32)), Err(CommandError::Refused(_))));
    let reset = chain.command(1, Command::Reset).unwrap();
    assert_eq!(reset, [u32::MAX.into(), 0, 0, 0, 0, 0, 1, 10, 1 << 24]);
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
