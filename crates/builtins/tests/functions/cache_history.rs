//! What clients of a `memcached-cache` see, in a world where everything is delayed, lost and reordered by a seed.
//!
//! Several workers have an instance each. Clients with connections and with datagrams ask, a model of memcached 1.6.18 does what it
//! is sent, in any order that its connections allow, and answers arrive late, or never. The model knows every state that each key had, in order. A
//! state is *known* from when a client hears that its write was done, or reads it, or, for the ends of values, from when their time is
//! over. No answer may show a state before one that was known when its request was sent.

use std::cell::Cell;
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::net::Ipv4Addr;
use std::sync::Arc;

use builtins::Code;
use onpath::{
    Chain, Counters, Direction, End, Link, Messages, Notice, OnFailure, Outcome, Param, Policy,
    RequestId, Sizes, Spec,
};
use wire::framing::UdpHeader;
use wire::session::{EndpointKind, Origin, ReplyTo};

const MS: u64 = 1_000_000;
const SECOND: u64 = 1_000_000_000;
const GRACE_MS: u64 = 400;
const KEYS: usize = 4;
const WORKERS: usize = 3;
const SEEDS: u64 = 60;
/// Values that are longer are too large for the server.
const VALUE_MAX: usize = 40;

struct Rng(u64);

impl Rng {
    fn draw(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, bound: u64) -> u64 {
        self.draw() % bound
    }

    fn one_in(&mut self, n: u64) -> bool {
        self.below(n) == 0
    }
}

/// A value of the model server.
#[derive(Clone)]
struct Item {
    value: Vec<u8>,
    cas: u64,
    /// In the server's seconds; 0: never.
    expires_s: u64,
}

/// The model server, and all states of each key.
#[derive(Default)]
struct Server {
    items: HashMap<usize, Item>,
    states: [Vec<Option<Vec<u8>>>; KEYS],
    /// Of each key, the last state that somebody knows.
    known: [usize; KEYS],
    cas: u64,
    flushes_s: Vec<u64>,
}

fn key_text(key: usize) -> String {
    format!("key{key}")
}

/// Four letters in base64 for `key` and one for the number.
fn key_base64(key: usize) -> String {
    format!("a2V5{}==", ["MA", "MQ", "Mg", "Mw"][key])
}

fn key_of(text: &str) -> usize {
    (0..KEYS).find(|key| key_text(*key) == text || key_base64(*key) == text).expect("a key")
}

/// The server's clock has whole seconds, which begin anywhere.
fn second(now_ns: u64) -> u64 {
    (now_ns + 370 * MS) / SECOND + 1000
}

impl Server {
    fn set_state(&mut self, key: usize, item: Option<Item>) -> usize {
        self.states[key].push(item.as_ref().map(|item| item.value.clone()));
        match item {
            Some(item) => _ = self.items.insert(key, item),
            None => _ = self.items.remove(&key),
        }
        self.states[key].len()
    }

    /// Time passes: values end, and everybody knows.
    fn pass_time(&mut self, now_ns: u64) {
        let now_s = second(now_ns);
        let flushed = self.flushes_s.iter().any(|at| *at <= now_s);
        self.flushes_s.retain(|at| *at > now_s);
        for key in 0..KEYS {
            let over = |item: &Item| flushed || item.expires_s != 0 && item.expires_s <= now_s;
            if self.items.get(&key).is_some_and(over) {
                self.known[key] = self.set_state(key, None);
            }
        }
    }

    fn expires(&self, now_ns: u64, exptime: &str) -> u64 {
        match exptime.parse::<i64>().expect("a time") {
            0 => 0,
            time if time < 0 => 1,
            time => second(now_ns) + time as u64,
        }
    }

    /// Does one command, which has come whole. Returns the answer, and the states of keys that it made.
    fn serve(&mut self, now_ns: u64, command: &[u8]) -> (String, Vec<(usize, usize)>) {
        self.pass_time(now_ns);
        let text = std::str::from_utf8(command).expect("text");
        let (line, data) = text.split_once("\r\n").expect("a line");
        let words: Vec<&str> = line.split(' ').filter(|word| !word.is_empty()).collect();
        let value = |item: &Item| String::from_utf8(item.value.clone()).unwrap();
        let state = |key: usize, state: usize| vec![(key, state)];
        match words[0] {
            "get" | "gets" => (self.values(&words[1..], words[0] == "gets"), Vec::new()),
            "gat" => {
                let key = key_of(words[2]);
                let expires_s = self.expires(now_ns, words[1]);
                let found = self.items.get(&key).cloned();
                let answer = self.values(&words[2..], false);
                let made = found.map(|item| self.set_state(key, Some(Item { expires_s, ..item })));
                self.pass_time(now_ns);
                (answer, made.map_or(Vec::new(), |made| state(key, made)))
            }
            "mg" => {
                let key = key_of(words[1]);
                let mark = words.iter().find(|word| word.starts_with('O'));
                let mark = mark.map_or(String::new(), |mark| format!(" {mark}"));
                let answer = match self.items.get(&key) {
                    None => format!("EN{mark}\r\n"),
                    Some(item) if words.contains(&"t") => {
                        let left = match item.expires_s {
                            0 => "-1".to_owned(),
                            at => (at - second(now_ns)).to_string(),
                        };
                        let (len, cas, value) = (item.value.len(), item.cas, value(item));
                        format!("VA {len} f0 c{cas} t{left}{mark}\r\n{value}\r\n")
                    }
                    Some(item) => format!("VA {}{mark}\r\n{}\r\n", item.value.len(), value(item)),
                };
                (answer, Vec::new())
            }
            "set" | "append" => {
                let key = key_of(words[1]);
                let data = data.strip_suffix("\r\n").expect("a data block");
                if data.len() > VALUE_MAX {
                    // A set that fails removes the former value.
                    let made = self.items.contains_key(&key).then(|| self.set_state(key, None));
                    let made = made.map_or(Vec::new(), |made| state(key, made));
                    return ("SERVER_ERROR object too large for cache\r\n".to_owned(), made);
                }
                self.cas += 1;
                let cas = self.cas;
                let item = match (words[0], self.items.get(&key)) {
                    ("append", None) => return ("NOT_STORED\r\n".to_owned(), Vec::new()),
                    ("append", Some(item)) => {
                        let value = [&item.value[..], data.as_bytes()].concat();
                        Item { value, cas, expires_s: item.expires_s }
                    }
                    _ => {
                        let expires_s = self.expires(now_ns, words[3]);
                        Item { value: data.into(), cas, expires_s }
                    }
                };
                let made = self.set_state(key, Some(item));
                self.pass_time(now_ns);
                ("STORED\r\n".to_owned(), state(key, made))
            }
            "ms" => {
                let key = key_of(words[1]);
                self.cas += 1;
                let value = data.strip_suffix("\r\n").expect("a data block").into();
                let item = Item { value, cas: self.cas, expires_s: 0 };
                let made = self.set_state(key, Some(item));
                let quiet = words.contains(&"q");
                (if quiet { "" } else { "HD\r\n" }.to_owned(), state(key, made))
            }
            "delete" => {
                let key = key_of(words[1]);
                match self.items.contains_key(&key) {
                    true => ("DELETED\r\n".to_owned(), state(key, self.set_state(key, None))),
                    false => ("NOT_FOUND\r\n".to_owned(), Vec::new()),
                }
            }
            "touch" => {
                let key = key_of(words[1]);
                let expires_s = self.expires(now_ns, words[2]);
                match self.items.get(&key).cloned() {
                    None => ("NOT_FOUND\r\n".to_owned(), Vec::new()),
                    Some(item) => {
                        let made = self.set_state(key, Some(Item { expires_s, ..item }));
                        self.pass_time(now_ns);
                        ("TOUCHED\r\n".to_owned(), state(key, made))
                    }
                }
            }
            "flush_all" => {
                let delay = words.get(1).and_then(|word| word.parse::<u64>().ok()).unwrap_or(0);
                if delay > 1 {
                    self.flushes_s.push(second(now_ns) + delay - 1);
                    return ("OK\r\n".to_owned(), Vec::new());
                }
                let there: Vec<usize> = self.items.keys().copied().collect();
                let made = there.into_iter().map(|key| (key, self.set_state(key, None))).collect();
                ("OK\r\n".to_owned(), made)
            }
            other => panic!("the model does not know {other}"),
        }
    }

    fn values(&self, keys: &[&str], cas: bool) -> String {
        let mut answer = String::new();
        for text in keys {
            if let Some(item) = self.items.get(&key_of(text)) {
                let number = if cas { format!(" {}", item.cas) } else { String::new() };
                let value = String::from_utf8(item.value.clone()).unwrap();
                answer += &format!("VALUE {text} 0 {}{number}\r\n{value}\r\n", item.value.len());
            }
        }
        answer + "END\r\n"
    }
}

/// What a client has asked.
#[derive(Clone, Debug)]
struct Asked {
    what: String,
    /// Keys that the answer shows.
    reads: Vec<usize>,
    /// What was known of every key when it asked.
    known: [usize; KEYS],
    /// It gets no answer.
    silent: bool,
    /// The client's identifier of a datagram.
    id: u16,
}

/// A request that was forwarded, or its answer.
#[derive(Clone, Debug)]
struct Sent {
    request: RequestId,
    asked: Asked,
    /// Without a frame.
    bytes: Vec<u8>,
    made: Vec<(usize, usize)>,
    /// Its client has given up.
    late: bool,
    /// Of a request that its connection has lost: done until then, or never.
    until_ns: u64,
}

/// A connection, or all datagrams of a client.
struct Client {
    worker: usize,
    origin: Origin,
    next: u64,
    /// Sent and not done; done and not answered.
    requests: VecDeque<Sent>,
    answers: VecDeque<Sent>,
}

impl Client {
    fn is_stream(&self) -> bool {
        matches!(self.origin, Origin::Client(_))
    }
}

struct World {
    rng: Rng,
    /// Requests of nobody, which fill batches.
    others: u64,
    now_ns: u64,
    chains: Vec<Chain>,
    messages: Messages,
    server: Server,
    clients: Vec<Client>,
    /// Of connections that were lost.
    orphans: Vec<Sent>,
    connections: u32,
    values: u64,
    seen: BTreeMap<&'static str, u64>,
}

fn sizes() -> Sizes {
    Sizes { message_bytes: 4096, reply_bytes: 4096 }
}

impl World {
    fn new(seed: u64) -> Self {
        let mut spec = Spec::new("hot", "memcached-cache");
        let params = [("memory_mib", 1), ("grace_ms", GRACE_MS), ("sample", 7), ("age_ms", 0)];
        spec.params = params.map(|(name, value)| (name.to_owned(), Param::Integer(value))).to_vec();
        // Every other world keeps what is not there.
        let absent_ms = if seed % 2 == 0 { 0 } else { 10_000 };
        spec.params.push(("absent_ms".to_owned(), Param::Integer(absent_ms)));
        let code = Code::open(&spec, &[]).unwrap();
        let policy = Policy { on_failure: OnFailure::Open, deadline_ns: u64::MAX / 8 };
        let link = |_| {
            let function = code.instance(&spec, sizes()).unwrap();
            Link::new(1, function, policy, Arc::<Counters>::default())
        };
        let links: Vec<Link> = (0..WORKERS).map(link).collect();
        let mut world = Self {
            rng: Rng(seed),
            others: 0,
            now_ns: SECOND,
            chains: links.into_iter().map(|link| Chain::new(vec![link])).collect(),
            messages: Messages::new(4096, 4096),
            server: Server::default(),
            clients: Vec::new(),
            orphans: Vec::new(),
            connections: 0,
            values: 0,
            seen: BTreeMap::new(),
        };
        for number in 0..8 {
            let client = if number < 5 { world.connect() } else { world.datagrams(number) };
            world.clients.push(client);
        }
        world
    }

    fn connect(&mut self) -> Client {
        self.connections += 1;
        let worker = self.rng.below(WORKERS as u64) as usize;
        let (endpoint, generation) = (EndpointKind::Tcp, self.connections);
        let key = self.rng.below(8) as u32;
        let to = ReplyTo { endpoint, worker: worker as u16, key, generation };
        self.client(worker, Origin::Client(to))
    }

    fn datagrams(&mut self, number: u16) -> Client {
        let worker = self.rng.below(WORKERS as u64) as usize;
        let peer = (Ipv4Addr::LOCALHOST, 1000 + number).into();
        self.client(worker, Origin::Datagram { port: 0, peer, local: None })
    }

    fn client(&self, worker: usize, origin: Origin) -> Client {
        let (requests, answers) = (VecDeque::new(), VecDeque::new());
        Client { worker, origin, next: 0, requests, answers }
    }

    fn count(&mut self, what: &'static str) {
        *self.seen.entry(what).or_default() += 1;
    }

    /// The client asks something.
    fn ask(&mut self, at: usize) {
        let key = self.rng.below(KEYS as u64) as usize;
        let name = key_text(key);
        let is_stream = self.clients[at].is_stream();
        self.values += 1;
        let value = format!("v{:06}", self.values);
        let silent = self.rng.one_in(4);
        let noreply = if silent { " noreply" } else { "" };
        let time = ["0", "0", "0", "1", "2", "3", "-1"][self.rng.below(7) as usize];
        let mut reads = Vec::new();
        let mut is_silent = silent;
        let kind = if is_stream { 100 } else { 72 };
        let what = match if self.rng.one_in(2) { 0 } else { self.rng.below(kind) } {
            0..60 => {
                (is_silent, reads) = (false, vec![key]);
                format!("{} {name}\r\n", if self.rng.one_in(5) { "gets" } else { "get" })
            }
            60..68 if is_stream => {
                let count = if self.rng.one_in(4) { KEYS } else { 2 };
                (is_silent, reads) = (false, (0..count).map(|at| (key + at) % KEYS).collect());
                let texts: Vec<String> = reads.iter().map(|key| key_text(*key)).collect();
                format!("get {}\r\n", texts.join(" "))
            }
            60..70 => {
                (is_silent, reads) = (false, vec![key]);
                format!("mg {name} v\r\n")
            }
            70..82 => format!("set {name} 0 {time} {}{noreply}\r\n{value}\r\n", value.len()),
            82..85 => {
                let long = "x".repeat(VALUE_MAX + 1);
                format!("set {name} 0 0 {}{noreply}\r\n{long}\r\n", long.len())
            }
            85..88 => format!("append {name} 0 0 1{noreply}\r\n+\r\n"),
            88..91 => format!("delete {name}{noreply}\r\n"),
            91..93 => format!("touch {name} {time}{noreply}\r\n"),
            93..95 => {
                (is_silent, reads) = (false, vec![key]);
                format!("gat {time} {name}\r\n")
            }
            95..=98 => {
                let quiet = if silent { " q" } else { "" };
                format!("ms {} {} b{quiet}\r\n{value}\r\n", key_base64(key), value.len())
            }
            _ if !self.rng.one_in(8) => {
                (is_silent, reads) = (false, vec![key]);
                format!("get {name}\r\n")
            }
            _ if self.rng.one_in(3) => format!("flush_all{noreply}\r\n"),
            _ => format!("flush_all {}{noreply}\r\n", 1 + self.rng.below(4)),
        };
        let number = self.clients[at].next;
        self.clients[at].next += 1;
        // Identifiers are sometimes used again while their answer may come.
        let id = if self.rng.one_in(6) { 7 } else { number as u16 };
        let asked = Asked { what, reads, known: self.server.known, silent: is_silent, id };
        self.request(at, number, asked);
    }

    fn request(&mut self, at: usize, number: u64, asked: Asked) {
        let (origin, worker) = (self.clients[at].origin, self.clients[at].worker);
        let is_stream = self.clients[at].is_stream();
        let request = RequestId { origin, number: if is_stream { number } else { 0 } };
        let frame = UdpHeader::request(asked.id).bytes();
        let message = match is_stream {
            true => asked.what.clone().into_bytes(),
            false => [&frame, asked.what.as_bytes()].concat(),
        };
        let bytes = self.decide(worker, Direction::Requests, &request, &message);
        let skip = if is_stream { 0 } else { frame.len() };
        match bytes {
            (Outcome::Reply, reply) => {
                let absent = matches!(&reply[skip..], b"END\r\n" | b"EN\r\n");
                let many = asked.reads.len() > 1;
                self.count(if many {
                    "hits of many"
                } else if absent {
                    "absences"
                } else {
                    "hits"
                });
                self.hear(&asked, &reply[skip..], &[]);
            }
            (Outcome::Pass, bytes) => {
                let bytes = bytes[skip..].to_vec();
                let (made, late, until_ns) = (Vec::new(), false, self.now_ns + self.patience_ns());
                let sent = Sent { request, asked, bytes, made, late, until_ns };
                if !is_stream && self.rng.one_in(12) {
                    return self.count("datagrams lost");
                }
                self.clients[at].requests.push_back(sent);
            }
            (outcome, _) => panic!("{asked:?}: {outcome:?}"),
        }
    }

    fn decide(
        &mut self,
        worker: usize,
        direction: Direction,
        request: &RequestId,
        message: &[u8],
    ) -> (Outcome, Vec<u8>) {
        self.messages.clear();
        // Batches are prepared, and single requests are not.
        let (before, behind) = match direction {
            Direction::Requests if self.rng.one_in(2) => (self.rng.below(5), self.rng.below(9)),
            Direction::Requests | Direction::Replies => (0, 0),
        };
        let (endpoint, generation) = (EndpointKind::Tcp, 1);
        let to = ReplyTo { endpoint, worker: worker as u16, key: u32::MAX, generation };
        let mut others = |messages: &mut Messages, count| {
            for _ in 0..count {
                self.others += 1;
                let id = RequestId { origin: Origin::Client(to), number: self.others };
                messages.push_of(&id, b"version\r\n");
            }
        };
        others(&mut self.messages, before);
        self.messages.push_of(request, message);
        others(&mut self.messages, behind);
        let now = Cell::new(self.now_ns);
        self.chains[worker].decide(direction, &mut self.messages, &|| now.get());
        let at = before as usize;
        (self.messages.outcome(at), self.messages.bytes(at).to_vec())
    }

    /// How long the server takes at most for what is not answered.
    fn patience_ns(&mut self) -> u64 {
        self.rng.below(GRACE_MS * 9 / 10) * MS
    }

    /// The server does the next request of a client.
    fn serve(&mut self, at: usize) {
        let client = &mut self.clients[at];
        let count = client.requests.len() as u64;
        if count == 0 {
            return;
        }
        // Datagrams are done in any order.
        let next = if client.is_stream() { 0 } else { self.rng.below(count) as usize };
        self.serve_one(at, next);
    }

    fn serve_one(&mut self, at: usize, next: usize) {
        let client = &mut self.clients[at];
        let mut sent = client.requests.remove(next).unwrap();
        let is_stream = client.is_stream();
        let (answer, made) = self.server.serve(self.now_ns, &sent.bytes);
        (sent.bytes, sent.made) = (answer.into_bytes(), made);
        if !is_stream && (sent.asked.silent || self.rng.one_in(12)) {
            return self.count("answers lost");
        }
        self.clients[at].answers.push_back(sent);
    }

    /// The next answer for a client arrives.
    fn answer(&mut self, at: usize) {
        let client = &mut self.clients[at];
        let count = client.answers.len() as u64;
        if count == 0 {
            return;
        }
        let is_stream = client.is_stream();
        let next = if is_stream { 0 } else { self.rng.below(count) as usize };
        let (sent, worker) = (client.answers.remove(next).unwrap(), client.worker);
        if is_stream && (sent.asked.silent || sent.late) {
            // The fence behind it, or an answer that comes too late.
            self.count(if sent.late { "late answers" } else { "fences" });
            let notice = Notice::Ended { request: sent.request, end: End::Done };
            self.chains[worker].notify(&notice);
            if !sent.late {
                self.hear(&sent.asked, b"", &sent.made);
            }
            return;
        }
        let frame = UdpHeader::request(sent.asked.id).bytes();
        let (message, skip) = match is_stream {
            true => (sent.bytes.clone(), 0),
            false => ([&frame, &sent.bytes[..]].concat(), frame.len()),
        };
        let (outcome, bytes) = self.decide(worker, Direction::Replies, &sent.request, &message);
        if let Outcome::Drop(_) = outcome {
            // It has forgotten what it asked.
            assert!(!is_stream, "{sent:?}");
            return self.count("forgotten");
        }
        assert_eq!(outcome, Outcome::Pass, "{sent:?}");
        self.hear(&sent.asked, &bytes[skip..], &sent.made);
    }

    /// A client gets an answer: what it shows is not older than what was known, and is known from now on.
    fn hear(&mut self, asked: &Asked, answer: &[u8], made: &[(usize, usize)]) {
        let text = std::str::from_utf8(answer).expect("text");
        let shown = shown(asked, text);
        let Server { states, known, .. } = &mut self.server;
        for (key, value) in shown {
            let is_value = |state: usize| {
                let of = if state == 0 { None } else { states[key][state - 1].as_deref() };
                of == value.as_deref().map(str::as_bytes)
            };
            let first = (asked.known[key]..=states[key].len()).find(|state| is_value(*state));
            let Some(first) = first else {
                panic!(
                    "{:?} of key {key} is answered with {value:?}, which was overwritten: {:?} from state {} on",
                    asked.what, states[key], asked.known[key]
                );
            };
            known[key] = known[key].max(first);
        }
        for (key, state) in made {
            known[*key] = known[*key].max(*state);
        }
    }

    /// Requests on a connection take too long; their answers are not shown.
    fn time_out(&mut self, at: usize) {
        if self.clients[at].is_stream() {
            let Client { requests, answers, .. } = &mut self.clients[at];
            requests.iter_mut().chain(answers).for_each(|sent| sent.late = true);
        }
    }

    /// A connection breaks. The server may still do what it was sent.
    fn lose(&mut self, at: usize) {
        if !self.clients[at].is_stream() {
            return;
        }
        let new = self.connect();
        let lost = std::mem::replace(&mut self.clients[at], new);
        let Origin::Client(client) = lost.origin else { return };
        self.chains[lost.worker].notify(&Notice::Gone { client, now_ns: self.now_ns });
        for mut sent in lost.requests {
            if self.rng.one_in(2) {
                sent.until_ns = self.now_ns + self.patience_ns();
                self.orphans.push(sent);
            }
        }
    }

    fn pass_time(&mut self, ns: u64) {
        let end_ns = self.now_ns + ns;
        for at in 0..self.clients.len() {
            let is_due = |sent: &Sent| sent.until_ns <= end_ns;
            while !self.clients[at].is_stream()
                && let Some(due) = self.clients[at].requests.iter().position(is_due)
            {
                self.serve_one(at, due);
            }
        }
        // What lost connections have left is done in time.
        while let Some(next) =
            (0..self.orphans.len()).min_by_key(|orphan| self.orphans[*orphan].until_ns)
            && self.orphans[next].until_ns <= end_ns
        {
            let orphan = self.orphans.remove(next);
            self.tick(orphan.until_ns.max(self.now_ns));
            self.server.serve(self.now_ns, &orphan.bytes);
            self.count("orphans");
        }
        self.tick(end_ns);
    }

    /// Datagrams are done, or lost, within the grace period.
    fn tick(&mut self, now_ns: u64) {
        self.now_ns = now_ns;
        self.server.pass_time(now_ns);
        for chain in &mut self.chains {
            chain.notify(&Notice::Tick { now_ns });
        }
    }

    fn step(&mut self) {
        let at = self.rng.below(self.clients.len() as u64) as usize;
        match self.rng.below(1000) {
            0..250 => self.ask(at),
            250..600 => self.serve(at),
            600..950 => self.answer(at),
            950..990 => {
                let ns = self.rng.below(20 * MS);
                self.pass_time(ns);
            }
            990..995 => {
                let ns = self.rng.below(1200 * MS);
                self.pass_time(ns);
            }
            995..998 => self.time_out(at),
            _ => self.lose(at),
        }
    }
}

/// The keys that an answer shows, with their values.
fn shown(asked: &Asked, text: &str) -> Vec<(usize, Option<String>)> {
    if asked.reads.is_empty() || text.starts_with("SERVER_ERROR") {
        return Vec::new();
    }
    let mut shown: Vec<(usize, Option<String>)> =
        asked.reads.iter().map(|key| (*key, None)).collect();
    let mut lines = text.split("\r\n");
    while let Some(line) = lines.next() {
        let words: Vec<&str> = line.split(' ').collect();
        let key = match words[0] {
            "VALUE" => key_of(words[1]),
            "VA" => asked.reads[0],
            "END" | "EN" | "" => continue,
            other => panic!("{asked:?} is answered with {other:?}"),
        };
        let cas = asked.what.starts_with("gets ");
        assert_eq!(words.len(), if words[0] == "VA" { 2 } else { 4 + usize::from(cas) }, "{text}");
        let value = lines.next().expect("a value").to_owned();
        let place = shown.iter_mut().find(|(asked, _)| *asked == key);
        place.unwrap_or_else(|| panic!("{asked:?} is answered with {text:?}")).1 = Some(value);
    }
    let end = if asked.what.starts_with("mg") { "\r\n" } else { "END\r\n" };
    assert!(text.ends_with(end), "{asked:?}: {text:?}");
    shown
}

#[test]
fn nothing_that_was_overwritten_is_served() {
    let mut seen: BTreeMap<&'static str, u64> = BTreeMap::new();
    for seed in 0..SEEDS {
        let mut world = World::new(seed);
        for _ in 0..6000 {
            world.step();
        }
        for (what, count) in world.seen {
            *seen.entry(what).or_default() += count;
        }
    }
    for what in [
        "hits",
        "hits of many",
        "absences",
        "fences",
        "late answers",
        "orphans",
        "datagrams lost",
        "answers lost",
    ] {
        assert!(seen.get(what).is_some_and(|count| *count > 20), "{what}: {seen:?}");
    }
}
