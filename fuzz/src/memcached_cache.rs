//! The cache in front of memcached: whatever clients and the server send, hits are well-formed answers with what the server said last.

use std::cell::Cell;
use std::collections::VecDeque;
use std::sync::Arc;

use builtins::Code;
use onpath::{Chain, Counters, Direction, Link, Messages, OnFailure, Outcome, Policy};
use onpath::{Notice, RequestId, Sizes, Spec};
use wire::framing::{Framing, ParseState, Parsed, UDP_HEADER_BYTES, UdpHeader};
use wire::session::{EndpointKind, Origin, ReplyTo};

const BYTES_MAX: usize = 4096;

/// Records of a kind, a length and a message: requests and replies of two clients, one over TCP and one over UDP. In replies `@` stands for
/// the mark of the cache's last question.
pub fn messages(input: &[u8]) {
    let mut spec = Spec::new("hot", "memcached-cache");
    spec.params = [("memory_mib", 1), ("grace_ms", 1), ("sample", 3)]
        .map(|(name, value)| (name.to_owned(), value.into()))
        .to_vec();
    let sizes = Sizes { message_bytes: BYTES_MAX, reply_bytes: BYTES_MAX };
    let code = Code::open(&spec, &[]).expect("it is built in");
    let function = code.instance(&spec, sizes).expect("its parameters are right");
    let policy = Policy { on_failure: OnFailure::Closed, deadline_ns: u64::MAX / 8 };
    let counters = Arc::<Counters>::default();
    let mut chain = Chain::new(vec![Link::new(1, function, policy, Arc::clone(&counters))]);
    let mut batch = Messages::new(BYTES_MAX, BYTES_MAX);
    let now = Cell::new(1_000_000_000);
    let client = ReplyTo { endpoint: EndpointKind::Tcp, worker: 0, key: 0, generation: 1 };
    let datagrams = Origin::Datagram { port: 0, peer: ([127, 0, 0, 1], 7).into(), local: None };
    let mut asked = 0;
    let mut forwarded = VecDeque::new();
    let mut mark = Vec::new();
    let mut rest = input;
    while let [kind, len, tail @ ..] = rest {
        let (message, tail) = tail.split_at(tail.len().min(usize::from(*len) * 4));
        rest = tail;
        let over_udp = kind & 1 == 1;
        let direction = if kind & 2 == 0 { Direction::Requests } else { Direction::Replies };
        now.set(now.get() + u64::from(kind >> 4) * 100_000);
        if kind & 8 == 8 {
            let now_ns = now.get();
            chain.notify(&Notice::Gone { client, now_ns });
            forwarded.clear();
            chain.notify(&Notice::Tick { now_ns });
            continue;
        }
        let number = match (over_udp, direction) {
            (true, _) => 0,
            (false, Direction::Requests) => {
                asked += 1;
                asked
            }
            (false, Direction::Replies) => forwarded.pop_front().unwrap_or(u64::MAX),
        };
        let origin = if over_udp { datagrams } else { Origin::Client(client) };
        let request = RequestId { origin, number };
        let message = match direction {
            Direction::Requests => message.to_vec(),
            Direction::Replies => message.iter().fold(Vec::new(), |mut text, byte| {
                text.extend_from_slice(if *byte == b'@' {
                    &mark
                } else {
                    std::slice::from_ref(byte)
                });
                text
            }),
        };
        batch.clear();
        batch.push_of(&request, &message);
        chain.decide(direction, &mut batch, &|| now.get());
        assert_eq!(counters.failures.value(), 0, "{}", counters.last_failure());
        let decided = batch.bytes(0);
        let skip = if over_udp { UDP_HEADER_BYTES } else { 0 };
        match batch.outcome(0) {
            Outcome::Reply => {
                assert!(direction == Direction::Requests);
                let max = decided.len();
                let reply = &decided[skip..];
                let parsed =
                    Framing::Memcached.parse_response(&mut ParseState::default(), reply, max);
                let is_whole = matches!(parsed, Ok(Parsed::Message { consumed, .. }) if consumed == reply.len());
                assert!(is_whole, "{reply:?} answers {message:?}");
                assert!(reply.starts_with(b"VALUE ") && reply.ends_with(b"\r\nEND\r\n"));
            }
            // What is forwarded is one command, and stays one.
            Outcome::Pass if direction == Direction::Requests => {
                let command = &decided[skip..];
                let max = decided.len();
                let parsed =
                    Framing::Memcached.parse_request(&mut ParseState::default(), command, max);
                let is_whole = matches!(parsed, Ok(Parsed::Message { consumed, .. }) if consumed == command.len());
                assert!(is_whole, "{message:?} is forwarded as {command:?}");
                if batch.is_written(0) {
                    let word = command.split(|byte| *byte == b' ').next_back().unwrap_or_default();
                    mark = word.trim_ascii_end().to_vec();
                }
                if !over_udp {
                    forwarded.push_back(number);
                }
                if over_udp {
                    assert!(UdpHeader::split(decided).is_some_and(|(header, _)| header.total == 1));
                }
            }
            Outcome::Pass | Outcome::Drop(_) => {}
            Outcome::Steer(_) | Outcome::Deliver => panic!("there are no mqueues, and no rings"),
        }
    }
}
