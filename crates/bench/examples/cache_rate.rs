//! Hits a second of the function `memcached-cache` on one core, without a network: `cargo run --release -p serval-bench --example cache_rate`.
//!
//! A client on one core sends gets of 16-byte keys through a ring, and a server on another reads as many as there are, shows them to the
//! cache in one call, and sends the answers of 16-byte values back through a ring. Every answer is compared. The second figure is that
//! of the server's part alone, without rings: the copy of the requests into a batch, and the call. Nothing is forwarded to a memcached,
//! also no sampled hit.
//!
//! With `--json [SERVER_CORE [CLIENT_CORE]]` it prints `{"rate":...,"alone":...}`, for the table of benchmarks.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use builtins::Code;
use mqueue::abi::{kind, protocol};
use mqueue::{
    Consumer, Head, HeapMapping, LoanError, MappedMemory, MqueuePlan, Producer, Region, RegionPlan,
    RingPlan,
};
use onpath::{
    Chain, Counters, Direction, Link, Messages, Notice, OnFailure, Outcome, Policy, RequestId,
    Sizes, Spec,
};
use wire::session::{EndpointKind, Origin, ReplyTo};

const KEYS: u64 = 10_000;
const MESSAGE_BYTES: usize = 64;
const DEPTH: u32 = 4096;
const IN_FLIGHT: u64 = 1024;
const BATCH: usize = 256;
/// Messages whose slots are fetched from the other core's cache ahead of their use.
const AHEAD: u64 = 8;
const SLICES: usize = 11;
const SLICE: Duration = Duration::from_millis(100);

type Out = Producer<MappedMemory>;
type In = Consumer<MappedMemory>;

/// A key's answer and request, which all keys have of the same length: a client reads three lines of its processor's cache for both.
#[repr(align(64))]
struct Pair {
    answer: [u8; ANSWER_BYTES],
    request: [u8; REQUEST_BYTES],
}

const REQUEST_BYTES: usize = b"get serval:123456789\r\n".len();
const ANSWER_BYTES: usize = b"VALUE serval:123456789 0 16\r\n0123456789abcdef\r\nEND\r\n".len();

/// The requests and answers of all keys.
struct Table(Vec<Pair>);

impl Table {
    fn new() -> Self {
        let entry = |key: u64| {
            let value = format!("{:016x}", key.wrapping_mul(0x9e37_79b9_7f4a_7c15));
            let request = format!("get serval:{key:09}\r\n");
            let answer = format!("VALUE serval:{key:09} 0 16\r\n{value}\r\nEND\r\n");
            let exact = "all have one length";
            Pair {
                answer: answer.into_bytes().try_into().expect(exact),
                request: request.into_bytes().try_into().expect(exact),
            }
        };
        Self((0..KEYS).map(entry).collect())
    }

    /// Those of request number `index`, with a key that looks random.
    fn of(&self, index: u64) -> (&[u8], &[u8]) {
        let random = index.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32;
        let Pair { request, answer } = &self.0[((random * KEYS) >> 32) as usize];
        (request, answer)
    }
}

/// The cache with its batch.
struct Server {
    chain: Chain,
    messages: Messages,
    began: Instant,
    next: u64,
}

impl Server {
    /// With all values.
    fn new(table: &Table) -> Self {
        let mut spec = Spec::new("hot", "memcached-cache");
        let params = [("memory_mib", 64), ("grace_ms", 1), ("sample", 0), ("age_ms", 0)];
        spec.params = params.map(|(name, value)| (name.into(), value.into())).into();
        let code = Code::open(&spec, &[]).expect("it is built in");
        let sizes = Sizes { message_bytes: 1024, reply_bytes: 1024 };
        let function = code.instance(&spec, sizes).expect("there is memory");
        let policy = Policy { on_failure: OnFailure::Closed, deadline_ns: u64::MAX / 8 };
        let chain = Chain::new(vec![Link::new(1, function, policy, Arc::<Counters>::default())]);
        let (messages, began) = (Messages::new(1024, 1024), Instant::now());
        let mut server = Self { chain, messages, began, next: 0 };
        for _ in 0..2 {
            server.chain.notify(&Notice::Tick { now_ns: server.now_ns() });
            std::thread::sleep(Duration::from_millis(5));
        }
        for Pair { request, answer } in &table.0 {
            server.fill(request, answer);
        }
        server
    }

    fn now_ns(&self) -> u64 {
        self.began.elapsed().as_nanos() as u64
    }

    fn request(&mut self) -> RequestId {
        self.next += 1;
        let (endpoint, worker, key, generation) = (EndpointKind::Tcp, 0, 0, 1);
        let client = ReplyTo { endpoint, worker, key, generation };
        RequestId { origin: Origin::Client(client), number: self.next }
    }

    fn decide(&mut self, direction: Direction) {
        let began = self.began;
        self.chain.decide(direction, &mut self.messages, &|| began.elapsed().as_nanos() as u64);
    }

    /// A miss, and the answer of a memcached.
    fn fill(&mut self, request: &[u8], answer: &[u8]) {
        let id = self.request();
        self.messages.clear();
        self.messages.push_of(&id, request);
        self.decide(Direction::Requests);
        assert_eq!(self.messages.outcome(0), Outcome::Pass, "a miss");
        let question = std::str::from_utf8(self.messages.bytes(0)).expect("a question");
        let mark = question.trim_end().rsplit(' ').next().expect("a mark").to_owned();
        // The value is between the first line and the last.
        let value = answer.split(|byte| *byte == b'\n').nth(1).expect("a value");
        let head = format!("VA 16 f0 c1 t-1 {mark}\r\n");
        self.messages.clear();
        self.messages.push_of(&id, &[head.as_bytes(), value, b"\n"].concat());
        self.decide(Direction::Replies);
        assert_eq!(self.messages.bytes(0), answer);
    }

    /// Answers what is in the ring, up to a batch. Returns how many messages that were.
    fn turn(&mut self, rx: &mut In, tx: &mut Out, tokens: &mut Vec<u64>) -> usize {
        self.messages.clear();
        tokens.clear();
        while tokens.len() < BATCH
            && let Some(header) = rx.peek().expect("an honest peer")
        {
            let id = self.request();
            let whole = self
                .messages
                .push_with(&id, header.len as usize, |into| rx.copy_out(&header, into));
            assert!(whole, "a whole message");
            rx.prefetch(AHEAD, MESSAGE_BYTES as u64);
            tokens.push(header.token);
            rx.advance();
        }
        rx.release();
        if tokens.is_empty() {
            return 0;
        }
        self.decide(Direction::Requests);
        for (at, token) in tokens.iter().enumerate() {
            assert_eq!(self.messages.outcome(at), Outcome::Reply, "a hit");
            let head = Head { token: *token, tag: 0, kind: kind::MESSAGE, status: 0 };
            // The window of the client is shorter than the ring.
            tx.push(head, self.messages.bytes(at)).expect("room");
            tx.prefetch(AHEAD, MESSAGE_BYTES as u64);
        }
        tx.publish();
        tokens.len()
    }
}

/// The ends of two rings between a client and a server.
fn rings() -> ((Out, In), (In, Out)) {
    let ring = RingPlan {
        protocol: protocol::DOORBELL,
        message_bytes_max: MESSAGE_BYTES as u32,
        arena_bytes: 0,
    };
    let mqueues = vec![MqueuePlan { depth: DEPTH, rx: ring, tx: ring }];
    let plan = RegionPlan::of_blocks(1, &mqueues, 1);
    let memory = HeapMapping::memory(plan.bytes().expect("a good plan") as usize);
    let mut client = Region::format(memory.clone(), &plan).expect("enough memory");
    let mut server = Region::join(memory).expect("just formatted");
    (client.engine_ends(0), server.accelerator_ends(0))
}

fn pin(core: usize) {
    if let Err(error) = sys::affinity::pin_current_thread(core) {
        eprintln!("cache_rate: cannot run on core {core}: {error}");
    }
}

/// Sends requests and compares answers until `stop` is set, and it has all answers. Counts them in `received`.
fn client(table: &Table, (mut tx, mut rx): (Out, In), stop: &AtomicBool, received: &AtomicU64) {
    let (mut sent, mut answered) = (0, 0);
    let mut bytes = [0; MESSAGE_BYTES];
    while answered < sent || !stop.load(Ordering::Relaxed) {
        let open = !stop.load(Ordering::Relaxed);
        while open && sent - answered < IN_FLIGHT {
            let head = Head { token: sent, tag: 0, kind: kind::MESSAGE, status: 0 };
            match tx.push(head, table.of(sent).0) {
                Ok(()) => sent += 1,
                Err(LoanError::Full) => break,
                Err(error) => panic!("{error}"),
            }
            if sent % 64 == 0 {
                tx.publish();
            }
        }
        tx.publish();
        let before = answered;
        while let Some(header) = rx.peek().expect("an honest peer") {
            let answer = &mut bytes[..header.len as usize];
            assert!(rx.copy_out(&header, answer) && header.token == answered, "answer {answered}");
            rx.prefetch(AHEAD, MESSAGE_BYTES as u64);
            assert!(answer == table.of(answered).1, "answer {answered}: {answer:?}");
            rx.advance();
            answered += 1;
        }
        rx.release();
        if answered == before {
            std::hint::spin_loop();
        }
        received.store(answered, Ordering::Relaxed);
    }
}

/// Says that the client has ended, also by a panic.
struct Done<'a>(&'a AtomicBool);

impl Drop for Done<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Answers a second through rings, of each slice.
fn through_rings(table: &Table, server: &mut Server, cores: (usize, usize)) -> Vec<f64> {
    let (client_ends, (mut rx, mut tx)) = rings();
    let (stop, done, received) =
        (AtomicBool::new(false), AtomicBool::new(false), AtomicU64::new(0));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let _done = Done(&done);
            pin(cores.1);
            client(table, client_ends, &stop, &received);
        });
        scope.spawn(|| {
            pin(cores.0);
            let mut tokens = Vec::with_capacity(BATCH);
            while !done.load(Ordering::Relaxed) {
                if server.turn(&mut rx, &mut tx, &mut tokens) == 0 {
                    std::hint::spin_loop();
                }
            }
        });
        let slice = || {
            let (before, began) = (received.load(Ordering::Relaxed), Instant::now());
            std::thread::sleep(SLICE);
            (received.load(Ordering::Relaxed) - before) as f64 / began.elapsed().as_secs_f64()
        };
        // The first one is warm-up.
        let all: Vec<f64> = std::iter::repeat_with(slice).take(SLICES + 1).skip(1).collect();
        stop.store(true, Ordering::Relaxed);
        all
    })
}

/// Answers a second of the server's part alone, of each slice.
fn alone(table: &Table, server: &mut Server, core: usize) -> Vec<f64> {
    let mut index = 0;
    let mut slice = || {
        let (before, began) = (index, Instant::now());
        while began.elapsed() < SLICE {
            server.messages.clear();
            for at in 0..BATCH as u64 {
                let id = server.request();
                server.messages.push_of(&id, table.of(index + at).0);
            }
            server.decide(Direction::Requests);
            for at in 0..BATCH {
                let answer = server.messages.bytes(at);
                assert!(answer == table.of(index + at as u64).1, "{answer:?}");
            }
            index += BATCH as u64;
        }
        (index - before) as f64 / began.elapsed().as_secs_f64()
    };
    std::thread::scope(|scope| {
        let measured = scope.spawn(move || {
            pin(core);
            std::iter::repeat_with(&mut slice).take(SLICES + 1).skip(1).collect()
        });
        measured.join().expect("the thread")
    })
}

fn median(mut all: Vec<f64>) -> f64 {
    all.sort_unstable_by(f64::total_cmp);
    all[all.len() / 2]
}

fn main() {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let is_json = words.first().is_some_and(|word| word == "--json");
    let mut cores = words.iter().skip(is_json.into()).map(|word| word.parse().expect("a core"));
    let server_core = cores.next().unwrap_or(0);
    let cores = (server_core, cores.next().unwrap_or(usize::from(server_core == 0)));
    let table = Table::new();
    let mut server = Server::new(&table);
    let alone = median(alone(&table, &mut server, cores.0));
    let rate = median(through_rings(&table, &mut server, cores));
    if is_json {
        println!("{{\"rate\":{rate:.0},\"alone\":{alone:.0}}}");
    } else {
        println!("gets of 16-byte values, {KEYS} keys, answered from the cache, cores {cores:?}");
        println!("through rings {:.2} M/s, the cache alone {:.2} M/s", rate / 1e6, alone / 1e6);
    }
}
