//! The function `memcached-cache`, message by message.

use std::cell::Cell;
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use builtins::Code;
use onpath::{
    Arranged, Chain, Command, Counters, Direction, Function, Link, Messages, Notice, OnFailure,
    Outcome, Policy, RequestId, Sizes, Spec,
};
use wire::DropReason;
use wire::framing::UdpHeader;
use wire::session::{EndpointKind, Origin, ReplyTo};

const MS: u64 = 1_000_000;
const SECOND: u64 = 1000 * MS;

/// The caches of several workers, and one client of each.
pub(crate) struct Caches {
    code: Code,
    spec: Spec,
    pub(crate) chains: Vec<Chain>,
    pub(crate) waiting: Vec<Option<Link>>,
    pub(crate) messages: Messages,
    pub(crate) now_ns: u64,
    asked: u64,
}

impl Caches {
    /// None is attached.
    pub(crate) fn new(workers: usize, params: &[(&str, u64)]) -> Self {
        let mut spec = Spec::new("hot", "memcached-cache");
        spec.params = vec![("memory_mib".into(), 1.into()), ("grace_ms".into(), 100.into())];
        spec.params.extend(params.iter().map(|(name, value)| ((*name).into(), (*value).into())));
        let code = Code::open(&spec, &[]).unwrap();
        let mut caches = Self {
            code,
            spec,
            chains: (0..workers).map(|_| Chain::default()).collect(),
            waiting: Vec::new(),
            messages: Messages::new(4096, 4096),
            now_ns: SECOND,
            asked: 0,
        };
        caches.waiting = (0..workers).map(|_| Some(caches.link())).collect();
        caches
    }

    fn link(&self) -> Link {
        let sizes = Sizes { message_bytes: 4096, reply_bytes: 4096 };
        let function = self.code.instance(&self.spec, sizes).unwrap();
        let policy = Policy { on_failure: OnFailure::Open, deadline_ns: u64::MAX / 8 };
        Link::new(1, function, policy, Arc::<Counters>::default())
    }

    fn attach(&mut self, worker: usize) {
        let link = self.waiting[worker].take().expect("it is not attached");
        self.chains[worker].arrange(vec![Arranged::New(link)]);
    }

    /// All are attached, and the grace period is over.
    pub(crate) fn attached(workers: usize, params: &[(&str, u64)]) -> Self {
        let mut caches = Self::new(workers, params);
        (0..workers).for_each(|worker| caches.attach(worker));
        caches.pass_ms(1);
        caches.pass_ms(101);
        caches
    }

    pub(crate) fn pass_ms(&mut self, ms: u64) {
        self.now_ns += ms * MS;
        let now_ns = self.now_ns;
        self.chains.iter_mut().for_each(|chain| chain.notify(&Notice::Tick { now_ns }));
    }

    pub(crate) fn decide(
        &mut self,
        worker: usize,
        direction: Direction,
        request: &RequestId,
        message: &[u8],
    ) -> (Outcome, Vec<u8>) {
        self.messages.clear();
        self.messages.push_of(request, message);
        let now = Cell::new(self.now_ns);
        self.chains[worker].decide(direction, &mut self.messages, &|| now.get());
        (self.messages.outcome(0), self.messages.bytes(0).to_vec())
    }

    fn stream(&mut self, worker: usize) -> RequestId {
        self.asked += 1;
        let (endpoint, generation) = (EndpointKind::Tcp, 1);
        let to = ReplyTo { endpoint, worker: worker as u16, key: 0, generation };
        RequestId { origin: Origin::Client(to), number: self.asked }
    }

    /// A request over TCP; what is forwarded, or the answer.
    fn ask(&mut self, worker: usize, text: &str) -> (RequestId, Outcome, String) {
        let request = self.stream(worker);
        let (outcome, bytes) = self.decide(worker, Direction::Requests, &request, text.as_bytes());
        (request, outcome, String::from_utf8(bytes).unwrap())
    }

    fn answer(&mut self, worker: usize, request: &RequestId, text: &str) -> String {
        let (outcome, bytes) = self.decide(worker, Direction::Replies, request, text.as_bytes());
        assert_eq!(outcome, Outcome::Pass, "{text:?}");
        String::from_utf8(bytes).unwrap()
    }

    /// Whether the key is served.
    fn hits(&mut self, worker: usize, key: &str) -> bool {
        let (request, outcome, question) = self.ask(worker, &format!("get {key}\r\n"));
        if outcome == Outcome::Reply {
            return true;
        }
        // The server knows the key.
        let answer = match mark(&question) {
            Some(mark) => format!("VA 5 f0 c9 t-1 {mark}\r\nhello\r\n"),
            None => format!("VALUE {key} 0 5\r\nhello\r\nEND\r\n"),
        };
        let shown = self.answer(worker, &request, &answer);
        assert_eq!(shown, format!("VALUE {key} 0 5\r\nhello\r\nEND\r\n"));
        false
    }

    /// The place of a register.
    fn register(&self, name: &str) -> usize {
        let sizes = Sizes { message_bytes: 1, reply_bytes: 1 };
        let code = Code::open(&self.spec, &[]).unwrap();
        let registers = code.instance(&self.spec, sizes).unwrap().registers().to_vec();
        registers.iter().position(|register| &*register.name == name).unwrap()
    }

    fn counted(&mut self, worker: usize, register: &str) -> u64 {
        let values = self.chains[worker].command(1, Command::Read).unwrap().values;
        values[self.register(register)]
    }
}

/// The mark of a question of the cache.
pub(crate) fn mark(question: &str) -> Option<&str> {
    question.starts_with("mg ").then(|| question.trim_end().rsplit(' ').next().unwrap())
}

#[test]
fn nothing_is_served_while_a_worker_does_not_see_its_messages() {
    let mut caches = Caches::new(2, &[("sample", 0)]);
    caches.attach(0);
    for _ in 0..5 {
        caches.pass_ms(200);
        assert!(!caches.hits(0, "a"), "the other worker has none");
    }
    caches.attach(1);
    caches.pass_ms(1);
    assert!(!caches.hits(0, "a"));
    caches.pass_ms(99);
    assert!(!caches.hits(0, "a"), "what passed the other worker may be in progress");
    caches.pass_ms(2);
    assert!(!caches.hits(0, "a") && caches.hits(0, "a") && !caches.hits(1, "a"));
    assert!(caches.hits(1, "a"), "each worker has its own values");
    drop(caches.chains[1].arrange(Vec::new()));
    assert!(!caches.hits(0, "a") && !caches.hits(0, "a"));
}

#[test]
fn values_are_served_for_their_time_and_one_hit_in_some_is_forwarded() {
    let mut caches = Caches::attached(1, &[("age_ms", 500), ("sample", 0)]);
    assert!(!caches.hits(0, "a"));
    caches.pass_ms(499);
    assert!(caches.hits(0, "a"));
    caches.pass_ms(1);
    assert!(!caches.hits(0, "a"), "it is too old");
    let mut caches = Caches::attached(1, &[("age_ms", 0), ("sample", 4)]);
    assert!(!caches.hits(0, "a"));
    let hits: Vec<bool> = (0..8).map(|_| caches.hits(0, "a")).collect();
    assert_eq!(hits.iter().filter(|hit| **hit).count(), 6, "{hits:?}");
    assert_eq!((caches.counted(0, "hits"), caches.counted(0, "sampled")), (6, 2));
    let mut caches = Caches::attached(1, &[("age_ms", 0), ("sample", 0)]);
    for (left, lives_ms) in [("1", 0), ("2", 999), ("4", 2999)] {
        let (request, _, question) = caches.ask(0, &format!("get t{left}\r\n"));
        let answer = format!("VA 1 f0 c9 t{left} {}\r\nx\r\n", mark(&question).unwrap());
        caches.answer(0, &request, &answer);
        caches.pass_ms(lives_ms);
        let hit = caches.ask(0, &format!("get t{left}\r\n")).1 == Outcome::Reply;
        assert_eq!(hit, lives_ms > 0, "{left} s are left");
        caches.pass_ms(1);
        assert_eq!(caches.ask(0, &format!("get t{left}\r\n")).1, Outcome::Pass);
    }
}

#[test]
fn several_keys_are_answered_if_all_are_known() {
    let mut caches = Caches::attached(2, &[("sample", 0), ("absent_ms", 60_000)]);
    let asks = |caches: &mut Caches, line: &str| {
        let (_, outcome, text) = caches.ask(0, line);
        (outcome == Outcome::Reply, text)
    };
    let passes = |line: &str| (false, line.to_owned());
    assert!(!caches.hits(0, "a"));
    assert_eq!(asks(&mut caches, "get a b\r\n"), passes("get a b\r\n"), "b is not known");
    assert!(!caches.hits(0, "b"));
    let value = |key: &str, number: &str| format!("VALUE {key} 0 5{number}\r\nhello\r\n");
    let both = value("a", "") + &value("b", "") + "END\r\n";
    assert_eq!(asks(&mut caches, "get a  b \r\n"), (true, both));
    let twice = value("b", " 9") + &value("b", " 9") + "END\r\n";
    assert_eq!(asks(&mut caches, "gets b b\r\n"), (true, twice));
    let (request, _, question) = caches.ask(0, "get c\r\n");
    caches.answer(0, &request, &format!("EN {}\r\n", mark(&question).unwrap()));
    let first = value("a", "") + "END\r\n";
    assert_eq!(asks(&mut caches, "get c a\r\n"), (true, first), "c is not there");
    assert_eq!(asks(&mut caches, "get c c\r\n"), (true, "END\r\n".to_owned()));
    // A write of one of them, by another worker.
    let (write, ..) = caches.ask(1, "delete b\r\n");
    assert_eq!(asks(&mut caches, "get a b\r\n"), passes("get a b\r\n"));
    caches.answer(1, &write, "DELETED\r\n");
    assert_eq!(asks(&mut caches, "get a b\r\n"), passes("get a b\r\n"));
    // A write of the same connection.
    let (write, ..) = caches.ask(0, "set d 0 0 1\r\nx\r\n");
    assert_eq!(asks(&mut caches, "get a a\r\n"), passes("get a a\r\n"));
    caches.answer(0, &write, "STORED\r\n");
    assert!(asks(&mut caches, "get a a\r\n").0);
    // What does not fit an answer is forwarded.
    let many = format!("get{}\r\n", " a".repeat(300));
    assert_eq!(asks(&mut caches, &many), passes(&many));
}

#[test]
fn that_a_key_is_not_there_is_served_until_it_is_written_or_for_its_time() {
    let mut caches = Caches::attached(2, &[("sample", 0), ("absent_ms", 500)]);
    let misses = |caches: &mut Caches, form: &str, end: &str| {
        let (request, outcome, question) = caches.ask(0, form);
        if outcome == Outcome::Reply {
            assert_eq!(question, end);
            return false;
        }
        let answer = format!("EN {}\r\n", mark(&question).unwrap());
        assert_eq!(caches.answer(0, &request, &answer), end);
        true
    };
    assert!(misses(&mut caches, "get a\r\n", "END\r\n"));
    assert!(!misses(&mut caches, "get a\r\n", "END\r\n"));
    assert!(!misses(&mut caches, "gets a\r\n", "END\r\n"));
    assert!(!misses(&mut caches, "mg a v\r\n", "EN\r\n"));
    // Versions of memcached differ in what they answer to this.
    assert_eq!(caches.ask(0, "mg a k v\r\n").1, Outcome::Pass);
    caches.pass_ms(500);
    assert!(misses(&mut caches, "get a\r\n", "END\r\n"), "it is too old");
    assert!(!misses(&mut caches, "get a\r\n", "END\r\n"));
    let (write, ..) = caches.ask(1, "add a 0 0 5\r\nhello\r\n");
    assert!(misses(&mut caches, "get a\r\n", "END\r\n"), "it may be there");
    assert!(misses(&mut caches, "get a\r\n", "END\r\n"), "nothing is kept meanwhile");
    caches.answer(1, &write, "STORED\r\n");
    assert!(!caches.hits(0, "a") && caches.hits(0, "a"));
    assert_eq!((caches.counted(0, "absences"), caches.counted(0, "hits")), (4, 1));
    let mut caches = Caches::attached(1, &[("sample", 0)]);
    assert!(misses(&mut caches, "get a\r\n", "END\r\n"));
    assert!(misses(&mut caches, "get a\r\n", "END\r\n"), "not by default");
}

#[test]
fn a_connection_sees_what_it_writes() {
    let mut caches = Caches::attached(2, &[("sample", 0)]);
    assert!(!caches.hits(0, "a") && !caches.hits(1, "a"));
    let (write, ..) = caches.ask(0, "set b 0 0 1\r\nx\r\n");
    // Its client is still writing, though another key; another client reads meanwhile.
    assert_eq!(caches.ask(0, "get a\r\n").1, Outcome::Pass);
    assert!(caches.hits(1, "a"));
    assert_eq!(caches.answer(0, &write, "STORED\r\n"), "STORED\r\n");
    assert!(caches.hits(0, "a"));
    assert_eq!(caches.counted(0, "ordered"), 1);
}

#[test]
fn stale_keys_end_questions_because_they_would_take_the_place_of_a_client() {
    let mut caches = Caches::attached(1, &[]);
    assert!(mark(&caches.ask(0, "get a\r\n").2).is_some());
    let (request, outcome, command) = caches.ask(0, "md b I T30\r\n");
    assert_eq!((outcome, &*command), (Outcome::Pass, "md b I T30\r\n"));
    caches.answer(0, &request, "HD\r\n");
    assert_eq!(caches.ask(0, "get c\r\n").2, "get c\r\n");
}

#[test]
fn requests_of_a_batch_are_decided_in_their_order() {
    let mut caches = Caches::attached(1, &[("sample", 0)]);
    for key in ["a", "b", "longer-than-eight-bytes"] {
        assert!(!caches.hits(0, key));
    }
    let (endpoint, generation) = (EndpointKind::Tcp, 1);
    let to = ReplyTo { endpoint, worker: 0, key: 7, generation };
    let other = RequestId { origin: Origin::Client(to), number: 1 };
    let peer = ([127, 0, 0, 1], 9).into();
    let datagram = RequestId { origin: Origin::Datagram { port: 0, peer, local: None }, number: 0 };
    let framed = |id: u16, total: u16, text: &str| {
        [&UdpHeader { id, sequence: 0, total }.bytes()[..], text.as_bytes()].concat()
    };
    let short = framed(5, 1, "")[..5].to_vec();
    let value = |key: &str| format!("VALUE {key} 0 5\r\nhello\r\nEND\r\n").into_bytes();
    let [a, b, long] = ["a", "b", "longer-than-eight-bytes"].map(value);
    let text = |text: &str| text.as_bytes().to_vec();
    // A request; and its answer, if it has one from the cache.
    type Expected = Result<Vec<u8>, Outcome>;
    let batch: Vec<(RequestId, Vec<u8>, Expected)> = vec![
        (caches.stream(0), text("get a\r\n"), Ok(a.clone())),
        (caches.stream(0), text("get longer-than-eight-bytes\r\n"), Ok(long)),
        (caches.stream(0), text("get  a\r\n"), Ok(a.clone())),
        (caches.stream(0), text("gets a\r\n"), Ok(text("VALUE a 0 5 9\r\nhello\r\nEND\r\n"))),
        (datagram, framed(5, 1, "get a\r\n"), Ok([&framed(5, 1, "")[..], &a].concat())),
        (datagram, framed(5, 2, "get a\r\n"), Err(Outcome::Drop(DropReason::FunctionDrop))),
        (datagram, short, Err(Outcome::Drop(DropReason::FunctionDrop))),
        (caches.stream(0), text("mg a v\r\n"), Ok(text("VA 5\r\nhello\r\n"))),
        // From here on the key may be another one.
        (other, text("set a 0 0 1\r\nx\r\n"), Err(Outcome::Pass)),
        (caches.stream(0), text("get a\r\n"), Err(Outcome::Pass)),
        (datagram, framed(6, 1, "get a\r\n"), Err(Outcome::Pass)),
        (caches.stream(0), text("get b\r\n"), Ok(b)),
        (caches.stream(0), text("get unknown\r\n"), Err(Outcome::Pass)),
        (caches.stream(0), text("bogus\r\n"), Err(Outcome::Drop(DropReason::FunctionDrop))),
    ];
    caches.messages.clear();
    batch.iter().for_each(|(id, request, _)| caches.messages.push_of(id, request));
    let now_ns = caches.now_ns;
    caches.chains[0].decide(Direction::Requests, &mut caches.messages, &|| now_ns);
    for (at, (_, request, expected)) in batch.iter().enumerate() {
        let shown = String::from_utf8_lossy(request);
        match expected {
            Ok(answer) => {
                assert_eq!(caches.messages.outcome(at), Outcome::Reply, "{at}: {shown}");
                assert_eq!(caches.messages.bytes(at), answer, "{at}: {shown}");
            }
            Err(outcome) => assert_eq!(caches.messages.outcome(at), *outcome, "{at}: {shown}"),
        }
    }
    // What is forwarded of a read is the question for its key.
    let question =
        |at: usize, skip: usize| String::from_utf8_lossy(&caches.messages.bytes(at)[skip..]);
    for (at, skip, key) in [(9, 0, "a"), (10, 8, "a"), (12, 0, "unknown")] {
        let question = question(at, skip);
        assert!(question.starts_with(&format!("mg {key} v f c t O")), "{question}");
    }
}

#[test]
fn an_answer_in_several_datagrams_gets_its_form_in_the_first_and_the_last() {
    let mut caches = Caches::attached(1, &[]);
    let peer = ([127, 0, 0, 1], 9).into();
    let origin = Origin::Datagram { port: 0, peer, local: None };
    let request = RequestId { origin, number: 0 };
    let frame = |sequence, total| UdpHeader { id: 5, sequence, total }.bytes();
    let message = [&frame(0, 1)[..], b"get a\r\n"].concat();
    let (_, question) = caches.decide(0, Direction::Requests, &request, &message);
    let question = String::from_utf8(question[8..].to_vec()).unwrap();
    let first = format!("VA 6 f3 c9 t-1 {}\r\nab", mark(&question).unwrap());
    let pieces =
        [(0, &*first, "VALUE a 3 6\r\nab"), (2, "\r\n", "\r\nEND\r\n"), (1, "cdef", "cdef")];
    for (sequence, piece, expected) in pieces {
        let message = [&frame(sequence, 3)[..], piece.as_bytes()].concat();
        let (outcome, shown) = caches.decide(0, Direction::Replies, &request, &message);
        assert_eq!(outcome, Outcome::Pass);
        assert_eq!(shown, [&frame(sequence, 3)[..], expected.as_bytes()].concat());
    }
}

#[test]
fn datagrams_that_write_can_be_refused_and_settings_have_limits() {
    let mut caches = Caches::attached(1, &[("udp_writes", 0)]);
    let peer = ([127, 0, 0, 1], 9).into();
    let origin = Origin::Datagram { port: 0, peer, local: None };
    let request = RequestId { origin, number: 0 };
    let message = [&UdpHeader::request(1).bytes()[..], b"delete a\r\n"].concat();
    let (outcome, _) = caches.decide(0, Direction::Requests, &request, &message);
    assert!(matches!(outcome, Outcome::Drop(_)));
    assert_eq!((caches.counted(0, "refused"), caches.counted(0, "writes")), (1, 0));
    let mut write = |name: &str, value| {
        let register = caches.register(name);
        caches.chains[0].command(1, Command::Write { register, value }).is_ok()
    };
    assert!(write("udp_writes", 1) && !write("udp_writes", 2));
    assert!(write("grace_ms", 5) && !write("grace_ms", 0));
    assert!(!write("memory_mib", 2), "its memory is in use");
}

#[test]
fn an_instance_that_was_restarted_keeps_values_again() {
    // It has not begun, it serves, it is no longer attached: a restart leaves no write pending that does not end.
    for notices in [&[][..], &[Notice::Attached][..], &[Notice::Attached, Notice::Detached][..]] {
        let mut caches = Caches::new(2, &[("sample", 0)]);
        let sizes = Sizes { message_bytes: 4096, reply_bytes: 4096 };
        // An instance of the same cache as the others.
        let mut function = caches.code.instance(&caches.spec, sizes).unwrap();
        function.notice(&Notice::Tick { now_ns: caches.now_ns });
        for notice in notices {
            function.notice(notice);
            function.notice(&Notice::Tick { now_ns: caches.now_ns });
        }
        for _ in 0..3 {
            assert!(function.restart().unwrap());
        }
        (0..2).for_each(|worker| caches.attach(worker));
        caches.pass_ms(1);
        for _ in 0..3 {
            caches.pass_ms(200);
            assert!(!caches.hits(0, "a"), "the restarted one does not see its messages");
        }
        function.notice(&Notice::Tick { now_ns: caches.now_ns });
        caches.pass_ms(101);
        assert!(!caches.hits(0, "a") && caches.hits(0, "a"));
        drop(function);
        caches.pass_ms(101);
        assert!(!caches.hits(0, "a") && !caches.hits(0, "a"), "it ended without a detachment");
    }
}

#[test]
fn datagrams_without_answers_take_no_tickets_from_connections() {
    let mut caches = Caches::attached(1, &[("grace_ms", 600_000)]);
    let origin = Origin::Datagram { port: 0, peer: ([127, 0, 0, 1], 9).into(), local: None };
    let request = RequestId { origin, number: 0 };
    let send = |caches: &mut Caches, id: u16, text: &str| {
        let message = [&UdpHeader::request(id).bytes()[..], text.as_bytes()].concat();
        caches.decide(0, Direction::Requests, &request, &message)
    };
    let mut reads = 0;
    for id in 0..8192 {
        let (outcome, message) = send(&mut caches, id, &format!("get k{id}\r\n"));
        assert_eq!(outcome, Outcome::Pass, "without a ticket it is forwarded as it is");
        reads += usize::from(message[8..].starts_with(b"mg "));
    }
    assert_eq!(reads, 2048);
    assert!(mark(&caches.ask(0, "get a\r\n").2).is_some(), "a connection's read has a ticket");
    let mut writes = 0;
    for id in 8192..u16::MAX {
        writes += usize::from(send(&mut caches, id, "delete k\r\n").0 == Outcome::Pass);
    }
    assert_eq!(writes, 2048);
    for key in 0..2048 {
        let (_, outcome, _) = caches.ask(0, &format!("delete c{key}\r\n"));
        assert_eq!(outcome, Outcome::Pass, "a connection's write {key}");
    }
    // Those that are answered make room.
    let answer = [&UdpHeader::request(9000).bytes()[..], b"DELETED\r\n"].concat();
    assert_eq!(caches.decide(0, Direction::Replies, &request, &answer).0, Outcome::Pass);
    assert_eq!(send(&mut caches, 9000, "delete k\r\n").0, Outcome::Pass);
    assert_ne!(send(&mut caches, 9001, "delete k\r\n").0, Outcome::Pass);
}

#[test]
fn a_write_of_a_live_connection_is_pending_after_a_restart() {
    let sizes = Sizes { message_bytes: 4096, reply_bytes: 4096 };
    // How the write ends: by its answer, by that to a later request, with the connection, or by neither.
    for end in 0..4 {
        let mut caches = Caches::attached(1, &[("sample", 0)]);
        let mut function = caches.code.instance(&caches.spec, sizes).unwrap();
        let tick = |function: &mut dyn Function, now_ns| function.notice(&Notice::Tick { now_ns });
        let show = |function: &mut dyn Function, direction, number, text: &str| {
            let mut messages = Messages::new(4096, 4096);
            let client = ReplyTo { endpoint: EndpointKind::Tcp, worker: 1, key: 7, generation: 1 };
            let request = RequestId { origin: Origin::Client(client), number };
            messages.push_of(&request, text.as_bytes());
            function.decide(direction, &mut messages).unwrap();
            client
        };
        function.notice(&Notice::Attached);
        tick(&mut *function, caches.now_ns);
        let client = show(&mut *function, Direction::Requests, 1, "set a 0 0 1\r\nx\r\n");
        show(&mut *function, Direction::Requests, 2, "version\r\n");
        assert!(function.restart().unwrap());
        tick(&mut *function, caches.now_ns);
        // The server may take its time: the connection lives.
        for _ in 0..3 {
            caches.pass_ms(60_000);
            tick(&mut *function, caches.now_ns);
            assert!(!caches.hits(0, "a") && !caches.hits(0, "a"), "it may still be done");
            assert!(!caches.hits(0, "z") && caches.hits(0, "z"), "another key");
        }
        match end {
            0 => _ = show(&mut *function, Direction::Replies, 1, "STORED\r\n"),
            1 => _ = show(&mut *function, Direction::Replies, 2, "VERSION 1.6\r\n"),
            2 => function.notice(&Notice::Gone { client, now_ns: caches.now_ns }),
            _ => caches.pass_ms(10 * 3_600_000),
        }
        caches.pass_ms(99);
        tick(&mut *function, caches.now_ns);
        assert!(!caches.hits(0, "a"));
        assert_eq!(caches.hits(0, "a"), end != 2, "{end}: the grace period of a lost connection");
        caches.pass_ms(2);
        tick(&mut *function, caches.now_ns);
        let _ = caches.hits(0, "a");
        assert!(caches.hits(0, "a"), "{end}");
    }
}

#[test]
fn a_write_that_passed_unseen_makes_entries_invalid_when_it_is_answered() {
    let mut caches = Caches::attached(1, &[("sample", 0)]);
    assert!(!caches.hits(0, "a") && caches.hits(0, "a"));
    // It was shown to no function.
    let unseen = caches.stream(0);
    for (answer, is_valid) in [("VERSION 1.6\r\n", true), ("STORED\r\n", false)] {
        caches.answer(0, &unseen, answer);
        caches.pass_ms(1);
        assert_eq!(caches.hits(0, "a"), is_valid, "{answer:?}");
    }
}

#[test]
fn memory_has_a_limit() {
    let mut spec = Spec::new("hot", "memcached-cache");
    spec.params = vec![("memory_mib".into(), 4097.into())];
    let code = Code::open(&spec, &[]).unwrap();
    let sizes = Sizes { message_bytes: 4096, reply_bytes: 4096 };
    let why = code.instance(&spec, sizes).err().unwrap().to_string();
    assert!(why.contains("memory_mib is between 1 and 4096"), "{why}");
}

/// Keys by a Zipf law with this exponent, the same for the same seed.
struct Zipf {
    sums: Vec<f64>,
    state: u64,
}

impl Zipf {
    fn new(keys: usize, exponent: f64, seed: u64) -> Self {
        let mut sum = 0.0;
        let weight = |key| (key as f64).powf(-exponent);
        let sums = (1..=keys).map(|key| {
            sum += weight(key);
            sum
        });
        Self { sums: sums.collect(), state: seed }
    }

    fn next(&mut self) -> usize {
        // splitmix64
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut bits = (self.state ^ self.state >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        bits = (bits ^ bits >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        let part = ((bits ^ bits >> 31) >> 11) as f64 / (1u64 << 53) as f64;
        let wanted = part * self.sums.last().expect("there are keys");
        self.sums.partition_point(|sum| *sum <= wanted).min(self.sums.len() - 1)
    }
}

/// The least recently used key makes room.
#[derive(Default)]
struct Lru {
    places: HashMap<usize, u64>,
    by_use: BTreeMap<u64, usize>,
    uses: u64,
}

impl Lru {
    fn hits(&mut self, key: usize, room: usize) -> bool {
        self.uses += 1;
        let before = self.places.insert(key, self.uses);
        before.map(|before| self.by_use.remove(&before));
        self.by_use.insert(self.uses, key);
        if self.places.len() > room {
            let (_, oldest) = self.by_use.pop_first().expect("there are keys");
            self.places.remove(&oldest);
        }
        before.is_some()
    }
}

#[test]
fn a_zipf_load_hits_more_often_than_with_lru_of_the_same_size() {
    const KEYS_OF_ENTRY: usize = 16;
    const WARM: usize = 50_000;
    const ASKED: usize = 100_000;
    for seed in 1..=2 {
        let mut caches = Caches::attached(1, &[("sample", 0), ("age_ms", 0)]);
        // As many keys as leave no entry free.
        for key in 0..8000 {
            caches.hits(0, &format!("full{key}"));
        }
        let entries = caches.counted(0, "entries") as usize;
        assert!(caches.counted(0, "evictions") > 0 && entries > 1000, "{entries}");
        let mut zipf = Zipf::new(KEYS_OF_ENTRY * entries, 0.9, seed);
        let (mut lru, mut ours, mut of_lru) = (Lru::default(), 0, 0);
        for round in 0..WARM + ASKED {
            let key = zipf.next();
            let hit = (caches.hits(0, &key.to_string()), lru.hits(key, entries));
            if round >= WARM {
                (ours, of_lru) = (ours + usize::from(hit.0), of_lru + usize::from(hit.1));
            }
        }
        let ratio = ours as f64 / of_lru as f64;
        println!(
            "zipf 0.9, 1 key in 16, {entries} entries: {:.1} % hits, LRU {:.1} %, ratio {ratio:.3}",
            100.0 * ours as f64 / ASKED as f64,
            100.0 * of_lru as f64 / ASKED as f64,
        );
        assert!(ratio >= 1.0, "{ratio}");
    }
}
