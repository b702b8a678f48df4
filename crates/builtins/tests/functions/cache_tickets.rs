//! The function `memcached-cache`: what it knows of requests in progress, among other functions and datagrams in any order.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use onpath::{
    Arranged, Counters, Direction, End, Failure, Function, Link, Messages, Notice, OnFailure,
    Outcome, Policy, RequestId,
};
use wire::DropReason;
use wire::framing::UdpHeader;
use wire::session::{EndpointKind, Origin, ReplyTo};

use crate::cache::{Caches, mark};

/// A function that drops everything while it is told to.
struct Drops(Arc<AtomicBool>);

impl Function for Drops {
    fn decide(&mut self, _: Direction, messages: &mut Messages) -> Result<(), Failure> {
        if self.0.load(Ordering::Relaxed) {
            messages.drop(0, DropReason::FunctionDrop);
        }
        Ok(())
    }
}

/// A cache between two other functions, and one client, which numbers its requests.
struct Alone {
    caches: Caches,
    drops: Arc<AtomicBool>,
}

impl Alone {
    /// It is attached, and the grace period of 100 ms is over.
    fn new() -> Self {
        let mut caches = Caches::new(1, &[("sample", 0)]);
        let drops = Arc::<AtomicBool>::default();
        let other = |id| {
            let policy = Policy { on_failure: OnFailure::Open, deadline_ns: u64::MAX / 8 };
            let function = Box::new(Drops(drops.clone()));
            Arranged::New(Link::new(id, function, policy, Arc::<Counters>::default()))
        };
        let cache = caches.waiting[0].take().unwrap();
        caches.chains[0].arrange(vec![other(2), Arranged::New(cache), other(3)]);
        caches.pass_ms(1);
        caches.pass_ms(101);
        Self { caches, drops }
    }

    /// Shows it a message, which the functions before it may drop.
    fn show(
        &mut self,
        direction: Direction,
        number: u64,
        text: &str,
        is_open: bool,
    ) -> (Outcome, String) {
        self.drops.store(!is_open, Ordering::Relaxed);
        let request = RequestId { origin: Origin::Client(Self::client()), number };
        let other = ReplyTo { key: 8, ..Self::client() };
        let Caches { chains, messages, now_ns, .. } = &mut self.caches;
        messages.clear();
        messages.push_of(&request, text.as_bytes());
        // A function is not called for a batch of which nothing is left.
        let beside = if direction == Direction::Requests { "version\r\n" } else { "VERSION 1\r\n" };
        messages.push_of(&RequestId { origin: Origin::Client(other), number }, beside.as_bytes());
        chains[0].decide(direction, messages, &|| *now_ns);
        (messages.outcome(0), String::from_utf8(messages.bytes(0).to_vec()).unwrap())
    }

    fn notify(&mut self, notice: &Notice) {
        self.caches.chains[0].notify(notice);
    }

    fn ask(&mut self, number: u64, text: &str) -> (Outcome, String) {
        self.show(Direction::Requests, number, text, true)
    }

    fn client() -> ReplyTo {
        ReplyTo { endpoint: EndpointKind::Tcp, worker: 1, key: 7, generation: 1 }
    }

    /// The server answers a question with this value.
    fn fill(&mut self, number: u64, question: &str, is_open: bool) {
        let answer = format!("VA 5 f0 c9 t-1 {}\r\nhello\r\n", mark(question).unwrap());
        self.show(Direction::Replies, number, &answer, is_open);
    }

    /// Whether a key is served at once when it has been asked for.
    fn serves(&mut self, number: u64, key: &str) -> bool {
        let get = format!("get {key}\r\n");
        let (outcome, question) = self.ask(number, &get);
        if outcome == Outcome::Pass {
            self.fill(number, &question, true);
        }
        self.ask(number + 1, &get).0 == Outcome::Reply
    }
}

#[test]
fn a_message_that_waits_and_is_shown_again_has_one_ticket() {
    let mut alone = Alone::new();
    assert!(alone.serves(1, "a"));
    // Until the connection to the server has room it is shown again and again.
    for _ in 0..3 {
        assert_eq!(alone.ask(3, "set a 0 0 1\r\nx\r\n").0, Outcome::Pass);
    }
    assert!(!alone.serves(4, "a"));
    alone.show(Direction::Replies, 3, "STORED\r\n", true);
    assert!(alone.serves(6, "a"), "the write has been answered");
    // The first question is the one that was forwarded, or none was.
    let (_, question) = alone.ask(8, "get b\r\n");
    assert!(mark(&question).is_some());
    for _ in 0..3 {
        assert_eq!(alone.ask(8, "get b\r\n"), (Outcome::Pass, "get b\r\n".to_owned()));
    }
}

#[test]
fn what_another_function_has_dropped_is_not_kept() {
    let mut alone = Alone::new();
    for (number, is_open) in [(1, false), (3, true)] {
        let (_, question) = alone.ask(number, "get a\r\n");
        alone.fill(number, &question, is_open);
        let hits = alone.ask(number + 1, "get a\r\n").0 == Outcome::Reply;
        assert_eq!(hits, is_open, "{number}");
        // (The request was forwarded as it is, or was answered.)
        alone.show(Direction::Replies, number + 1, "END\r\n", true);
    }
}

#[test]
fn the_grace_period_of_a_lost_write_begins_once() {
    let mut alone = Alone::new();
    assert!(alone.serves(1, "a"));
    alone.ask(3, "set a 0 0 1\r\nx\r\n");
    let request = RequestId { origin: Origin::Client(Alone::client()), number: 3 };
    // Its time-out, then the end of its connection.
    alone.notify(&Notice::Ended { request, end: End::Unknown });
    alone.caches.pass_ms(60);
    let now_ns = alone.caches.now_ns;
    alone.notify(&Notice::Gone { client: Alone::client(), now_ns });
    alone.caches.pass_ms(39);
    assert!(!alone.serves(4, "a"));
    alone.caches.pass_ms(2);
    assert!(alone.serves(6, "a"), "100 ms after it was lost");
}

#[test]
fn an_answer_of_several_datagrams_whose_identifier_was_used_again_is_not_delivered() {
    let mut caches = Caches::attached(1, &[]);
    let origin = Origin::Datagram { port: 0, peer: ([127, 0, 0, 1], 9).into(), local: None };
    let request = RequestId { origin, number: 0 };
    let framed = |sequence, total, text: &str| {
        [&UdpHeader { id: 5, sequence, total }.bytes()[..], text.as_bytes()].concat()
    };
    let (_, question) = caches.decide(0, Direction::Requests, &request, &framed(0, 1, "get a\r\n"));
    let question = String::from_utf8(question[8..].to_vec()).unwrap();
    let (_, other) = caches.decide(0, Direction::Requests, &request, &framed(0, 1, "get b\r\n"));
    assert_eq!(other[8..], *b"get b\r\n", "it has no ticket");
    let first = format!("VA 6 f3 c9 t-1 {}\r\nab", mark(&question).unwrap());
    // Nobody can tell which of the two its second datagram belongs to.
    let (outcome, _) = caches.decide(0, Direction::Replies, &request, &framed(0, 2, &first));
    assert_eq!(outcome, Outcome::Drop(DropReason::FunctionDrop));
}

/// Whatever the network does with the datagrams of an answer: the client never sees a part of a question of the cache's own.
#[test]
fn datagrams_in_any_order_show_no_mark() {
    let origin = Origin::Datagram { port: 0, peer: ([127, 0, 0, 1], 9).into(), local: None };
    let request = RequestId { origin, number: 0 };
    let mut state = 7u64;
    let mut below = |bound: usize| {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as usize % bound
    };
    for round in 0..300 {
        let mut caches = Caches::attached(1, &[("sample", 0)]);
        let mut waiting: Vec<Vec<u8>> = Vec::new();
        for _ in 0..40 {
            let id = below(3) as u16;
            let framed = |sequence, total, text: &str| {
                [&UdpHeader { id, sequence, total }.bytes()[..], text.as_bytes()].concat()
            };
            match below(8) {
                0..3 => {
                    let text = ["get a\r\n", "get b\r\n", "gets a\r\n", "mg a v\r\n"][below(4)];
                    let (outcome, sent) =
                        caches.decide(0, Direction::Requests, &request, &framed(0, 1, text));
                    if outcome != Outcome::Pass {
                        continue;
                    }
                    let sent = String::from_utf8(sent[8..].to_vec()).unwrap();
                    let answer = match mark(&sent).filter(|mark| mark.starts_with('O')) {
                        Some(mark) => format!("VA 6 f3 c9 t-1 {mark}\r\nabcdef\r\n"),
                        None => "VALUE a 3 6\r\nabcdef\r\nEND\r\n".to_owned(),
                    };
                    let total = 1 + below(3);
                    let part = answer.len().div_ceil(total).max(48).min(answer.len());
                    let parts: Vec<&[u8]> = answer.as_bytes().chunks(part).collect();
                    let total = parts.len() as u16;
                    waiting.extend((0..).zip(&parts).map(|(n, part)| {
                        [&UdpHeader { id, sequence: n, total }.bytes()[..], part].concat()
                    }));
                }
                3 => {
                    let delete = framed(0, 1, "delete a\r\n");
                    caches.decide(0, Direction::Requests, &request, &delete);
                    waiting.push(framed(0, 1, "DELETED\r\n"));
                }
                4 => caches.pass_ms([1, 60, 101][below(3)]),
                _ if !waiting.is_empty() => {
                    let at = below(waiting.len());
                    let datagram = match below(4) {
                        0 => waiting[at].clone(),
                        _ => waiting.swap_remove(at),
                    };
                    let (outcome, shown) =
                        caches.decide(0, Direction::Replies, &request, &datagram);
                    let text = String::from_utf8_lossy(&shown);
                    assert!(
                        outcome != Outcome::Pass || !text.contains(" c9 t-1 O"),
                        "{round}: {text}"
                    );
                }
                _ => {}
            }
        }
    }
}
