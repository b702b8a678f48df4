//! Differential fuzzing: the same generated commands go straight to a memcached, through a proxy to another, and through a proxy
//! with the cache to a third. Replies and the final contents must be equal.
//!
//! Commands are generated from a seed; many are then damaged. `SERVAL_MEMCACHED_SEEDS` (a number, or `FROM..TO`) says which seeds
//! run, `SERVAL_MEMCACHED_SECONDS` after how long no further one begins; `cargo xtask ci memcached` runs many. A failure prints its
//! seed and what was sent.
//!
//! Left out is what is documented to differ ([`is_odd`]): numbers that memcached reads by accident, commands that the proxy does not
//! know, and what depends on the time.

mod common;

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream, UdpSocket};
use std::ops::Range;
use std::time::{Duration, Instant};

use common::faces::Memcached;
use common::*;
use engine::topology::{Service, Topology};
use onpath::Spec;
use server::Server;
use wire::framing::memcached::{Command, is_request};
use wire::framing::{Expects, Framing, ParseState, Parsed, UdpHeader};

/// Seeds of an ordinary run.
const SEEDS: Range<u64> = 0..12;
/// The longest message of the proxies.
const MESSAGE_BYTES_MAX: usize = 1 << 20;

/// A memcached, and where clients find it.
struct Side {
    name: &'static str,
    memcached: Memcached,
    proxy: Option<Server>,
}

impl Side {
    fn new(name: &'static str, functions: Option<Vec<Spec>>) -> Self {
        // These threads hold items for a moment; what `decr` then leaves of a value, and of its marks, depends on that.
        let memcached = Memcached::start_with(&["-o", "no_lru_maintainer,no_lru_crawler"]);
        let proxy = functions.map(|functions| {
            let service = Service {
                framing: Framing::Memcached,
                functions,
                request_timeout_ms: 60_000,
                ..Service::proxy("proxy", vec![tcp(), udp()], memcached.address())
            };
            start(Topology { accelerators: Vec::new(), ..topology(vec![service]) })
        });
        Self { name, memcached, proxy }
    }

    /// The cache answers reads over UDP that memcached has not answered for `grace_ms` with nothing.
    fn all(grace_ms: u64) -> [Self; 3] {
        let mut cache = Spec::new("hot", "memcached-cache");
        cache.deadline_us = onpath::spec::DEADLINE_US_MAX;
        cache.params = [("grace_ms", grace_ms), ("sample", 0), ("absent_ms", 60_000)]
            .map(|(k, v)| (k.into(), v.into()))
            .to_vec();
        [
            Self::new("memcached alone", None),
            Self::new("through the proxy", Some(Vec::new())),
            Self::new("through the cache", Some(vec![cache])),
        ]
    }

    fn waits_until_it_serves(&self) {
        let mut stream = tcp_client(self.tcp());
        let proxy = self.proxy.as_ref().expect("it has the cache");
        eventually("the cache serves", || {
            assert_eq!(exchange(&mut stream, b"get none\r\n", 5), b"END\r\n");
            let read = proxy.functions.read(&proxy.engine, "proxy", "hot").unwrap();
            read.iter().any(|(name, count)| name == "absences" && *count > 0)
        });
    }

    fn tcp(&self) -> SocketAddr {
        self.proxy.as_ref().map_or(self.memcached.address(), |proxy| address(proxy, 0))
    }

    fn udp(&self) -> SocketAddr {
        self.proxy.as_ref().map_or(self.memcached.address(), |proxy| address(proxy, 1))
    }
}

// --- what is sent ---

fn one<T: Copy>(random: &mut Random, of: &[T]) -> T {
    of[random.below(of.len())]
}

fn encoded(key: &[u8]) -> String {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut text = String::new();
    for group in key.chunks(3) {
        let bits = group.iter().fold(0u32, |bits, byte| bits << 8 | u32::from(*byte))
            << (8 * (3 - group.len()));
        for place in 0..4 {
            let digit = DIGITS[(bits >> (18 - 6 * place)) as usize & 63];
            text.push(if place > group.len() { '=' } else { digit.into() });
        }
    }
    text
}

const KEYS: &[&str] =
    &["a", "b", "c", "num", "foo", "noreply", "k\x01y", "\u{e9}t\u{e9}", "0", "get"];
const MARKS: &[&str] = &["v", "k", "f", "c", "t", "s", "h", "l", "q", "u", "O12", "Oab", "P", "Lx"];

fn value(random: &mut Random) -> String {
    match random.below(8) {
        0 => String::new(),
        1 => "17".into(),
        2 => "delete a\r\nget b\r\n".into(),
        3 => "END\r\n".into(),
        4 => "x".repeat(random.below(3000)),
        5 => "set b 0 0 2\r\nhi".into(),
        _ => format!("{}", random.below(1000)),
    }
}

/// A command that memcached takes, as text.
fn command(random: &mut Random) -> Vec<u8> {
    let key = one(random, KEYS);
    let noreply = one(random, &["", "", "", " noreply"]);
    let time = one(random, &["0", "0", "-1", "5000"]);
    let number = random.below(60);
    let end = one(random, &["\r\n", "\r\n", "\r\n", "\n"]);
    let data = value(random);
    let len = data.len();
    let mut base64 = encoded(key.as_bytes());
    let is_meta = random.below(10) >= 6;
    let mut flags = String::new();
    for _ in 0..random.below(4) {
        write!(flags, " {}", one(random, MARKS)).unwrap();
    }
    if random.below(3) == 0 {
        flags += " b";
    } else {
        base64 = key.to_owned();
    }
    let change = match random.below(8) {
        0 => format!(" T{time}"),
        1 => format!(" C{number}"),
        2 => " I".into(),
        3 => " N5000".into(),
        // Less than what items live: which is less never depends on the second.
        4 => " R4500".into(),
        _ => String::new(),
    };
    let text = if is_meta {
        match random.below(8) {
            0..3 => {
                let mode = one(random, &["", " MS", " ME", " MA", " MP", " MR", " F7"]);
                format!("ms {base64} {len}{flags}{change}{mode}{end}{data}\r\n")
            }
            3..5 => format!("mg {base64} v{flags}{change}{end}"),
            5 => format!("md {base64}{flags}{change}{end}"),
            6 => {
                let mode = one(random, &["", " MI", " MD", " M+", " D5", " J9"]);
                format!("ma {base64}{flags}{change}{mode}{end}")
            }
            _ => one(random, &["mn\r\n", "me a\r\n", "me Zm9v b\r\n", "me foo\r\n"]).to_owned(),
        }
    } else {
        match random.below(14) {
            0..3 => {
                let name = one(random, &["set", "set", "add", "replace", "append", "prepend"]);
                format!("{name} {key} {number} {time} {len}{noreply}{end}{data}\r\n")
            }
            3 => format!("cas {key} 0 {time} {len} {number}{noreply}{end}{data}\r\n"),
            4..7 => format!("get {key}{end}"),
            7 => format!("gets {key} {}{end}", one(random, KEYS)),
            8 => format!("{} {time} {key}{end}", one(random, &["gat", "gats"])),
            9 => format!("delete {key}{}{noreply}{end}", one(random, &["", "", " 0"])),
            10 => format!("{} {key} {number}{noreply}{end}", one(random, &["incr", "decr"])),
            11 => format!("touch {key} {time}{noreply}{end}"),
            12 => format!("flush_all{}{noreply}{end}", one(random, &["", " 0", " -1"])),
            _ => one(random, &["version\r\n", "verbosity 0\r\n", "mn\r\n", "\r\n", "bogus\r\n"])
                .into(),
        }
    };
    text.into_bytes()
}

/// What a damaged command gets, or loses.
const PIECES: &[&str] = &[
    " ",
    "  ",
    " noreply",
    "noreply",
    " 0",
    " 1",
    " -1",
    " x",
    "x",
    "\r",
    "\t",
    "-",
    "+",
    "\0",
    "\r\n",
    "\n",
    " q",
    " k",
    " b",
    " v",
    " Z",
    " M",
    " MX",
    " Tx",
    " F",
    " Cx",
    " O123456789012345678901234567890123",
    " 99999999999",
    "4294967296",
    " get ",
    "HTTP/1.1",
    "set ",
    "ms ",
    "quit\r\n",
    "\u{ff}",
];

fn damaged(random: &mut Random, command: Vec<u8>) -> Vec<u8> {
    let mut bytes = command;
    for _ in 0..1 + random.below(2) {
        let line = bytes.iter().position(|byte| *byte == b'\n').unwrap_or(bytes.len());
        let places = if random.below(4) > 0 { line + 1 } else { bytes.len() + 1 };
        let at = random.below(places);
        match random.below(7) {
            0 => {
                let piece = one(random, PIECES).as_bytes();
                bytes.splice(at..at, piece.iter().copied());
            }
            1 if at < bytes.len() => _ = bytes.remove(at),
            2 if at < bytes.len() => bytes[at] = (random.next() >> 40) as u8,
            3 => {
                // A word is lost, or repeated.
                let end = bytes[at..]
                    .iter()
                    .position(|byte| *byte == b' ')
                    .map_or(line.max(at), |n| at + n + 1);
                let word = bytes[at..end.min(bytes.len())].to_vec();
                if random.below(2) == 0 {
                    bytes.drain(at..at + word.len());
                } else {
                    bytes.splice(at..at, word);
                }
            }
            4 => {
                let long = "k".repeat(one(random, &[250, 251, 300]));
                bytes.splice(at..at, long.into_bytes());
            }
            5 => {
                let piece = one(random, PIECES).as_bytes();
                let end = line.saturating_sub(1).min(bytes.len());
                bytes.splice(end..end, piece.iter().copied());
            }
            _ => {
                let many = " f".repeat(random.below(25));
                bytes.splice(at..at, many.into_bytes());
            }
        }
    }
    bytes
}

/// Whether it is documented that the proxy treats a command line otherwise than memcached, or its effect depends on the time.
fn is_odd(line: &[u8]) -> bool {
    let words: Vec<&[u8]> =
        line.split(|byte| *byte == b' ').filter(|word| !word.is_empty()).collect();
    let Some(name) = words.first() else { return false };
    let odd_number = |word: &[u8]| {
        let digits = word.iter().filter(|byte| byte.is_ascii_digit()).count();
        let has = |wanted: &[u8]| word.iter().any(|byte| wanted.contains(byte));
        let is_minus_zero =
            word.first() == Some(&b'-') && digits > 0 && word[1..].iter().all(|b| *b == b'0');
        digits >= 10 || digits > 0 && has(b"+\t\r\x0b\x0c") || is_minus_zero
    };
    // Seconds that pass during a test.
    let soon = |word: &[u8]| {
        let number = std::str::from_utf8(word).ok().and_then(|word| word.parse::<i64>().ok());
        number.is_some_and(|number| (1..4000).contains(&number))
    };
    let is_unknown = |name: &[u8]| {
        let unknown = [
            "bget",
            "slabs",
            "shutdown",
            "lru",
            "lru_crawler",
            "watch",
            "cache_memlimit",
            "extstore",
            "stats",
        ];
        unknown.iter().any(|unknown| name == unknown.as_bytes())
    };
    let time = match *name {
        b"set" | b"add" | b"replace" | b"append" | b"prepend" | b"cas" => words.get(3),
        b"touch" => words.get(2),
        b"gat" | b"gats" | b"flush_all" => words.get(1),
        _ => None,
    };
    let is_meta = matches!(*name, b"mg" | b"ms" | b"md" | b"ma" | b"me");
    let is_long = |word: &&[u8]| word.len() > 250;
    let bytes = if *name == b"ms" { words.get(2) } else { words.get(4) };
    line.contains(&0)
        || line.len() > 2000
        || is_unknown(name)
        || words.iter().any(|word| odd_number(word) || is_meta && odd_number(&word[1..]))
        || time.is_some_and(|word| soon(word))
        || is_meta && words.iter().any(|word| b"TNR".contains(&word[0]) && soon(&word[1..]))
        || is_meta && words.iter().any(|word| word[0] == b'O' && word.len() > 32)
        // Flags that newer versions know.
        || is_meta && words.iter().skip(2).any(|word| b"Ex".contains(&word[0]))
        // Keys in front of the one that is too long are touched.
        || name.starts_with(b"gat") && words.iter().any(is_long)
        || bytes.is_some_and(|word| word.len() > 5)
}

/// A stream, and where it has to be divided.
#[derive(Default)]
struct Script {
    parts: Vec<Vec<u8>>,
    /// The last one ends the connection.
    ends: bool,
}

/// What is sent for a seed: whole commands, whatever the damage has made of them.
fn script(seed: u64) -> Script {
    let mut random = Random::new(seed);
    let mut stream = Vec::new();
    for _ in 0..20 + random.below(60) {
        let command = command(&mut random);
        stream.extend(if random.below(3) == 0 { damaged(&mut random, command) } else { command });
    }
    let mut script = Script::default();
    let (mut state, mut from, mut begin, mut odd) = (ParseState::default(), 0, 0, Vec::new());
    loop {
        let rest = &stream[from..];
        let parsed = Framing::Memcached.parse_request(&mut state, rest, MESSAGE_BYTES_MAX);
        let line = rest.split(|byte| *byte == b'\n').next().unwrap_or_default();
        let line = line.strip_suffix(b"\r").unwrap_or(line).to_vec();
        let (consumed, is_skipped) = match parsed {
            Ok(Parsed::Incomplete { .. }) if rest.is_empty() && state == ParseState::default() => {
                break;
            }
            // It is completed, by bytes of which no more are needed.
            Ok(Parsed::Incomplete { more: 1 }) => {
                stream.push(b'\n');
                continue;
            }
            Ok(Parsed::Incomplete { more }) => {
                stream.extend(std::iter::repeat_n(b'y', more));
                continue;
            }
            Ok(Parsed::Message { consumed, .. } | Parsed::Refused { consumed, .. }) => {
                (consumed, false)
            }
            Ok(Parsed::Skipped { consumed }) => (consumed, true),
            Ok(Parsed::Quit { consumed }) => {
                script.ends = true;
                odd.push(from..from);
                // memcached forgets answers that it has not sent yet.
                script.parts.push(cut(&stream[begin..from], begin, &mut odd));
                script.parts.push(stream[from..from + consumed].to_vec());
                return script;
            }
            Err(_) => {
                script.parts.push(cut(&stream[begin..from], begin, &mut odd));
                return script;
            }
        };
        if !is_skipped && is_odd(&line) {
            // With the data block that belongs to it.
            let skips =
                matches!(parsed, Ok(Parsed::Refused { .. })) && state != ParseState::default();
            odd.push(from..from + consumed);
            if skips {
                let mut more = from + consumed;
                loop {
                    match Framing::Memcached.parse_request(
                        &mut state,
                        &stream[more..],
                        MESSAGE_BYTES_MAX,
                    ) {
                        Ok(Parsed::Skipped { consumed }) => more += consumed,
                        Ok(Parsed::Incomplete { .. }) if state != ParseState::default() => {
                            stream.extend_from_slice(&[b'y'; 4096]);
                            if stream.len() > 8 << 20 {
                                stream.truncate(from);
                                script.parts.push(cut(&stream[begin..from], begin, &mut odd));
                                return script;
                            }
                        }
                        _ => break,
                    }
                    if state == ParseState::default() {
                        break;
                    }
                }
                odd.push(from + consumed..more);
                from = more;
                continue;
            }
        } else if !is_skipped
            && line.trim_ascii_start().starts_with(b"get")
            && matches!(parsed, Ok(Parsed::Refused { .. }))
        {
            // The same: it forgets the answers before an error to a retrieval command.
            script.parts.push(cut(&stream[begin..from], begin, &mut odd));
            begin = from;
        }
        from += consumed;
    }
    script.parts.push(cut(&stream[begin..], begin, &mut odd));
    script
}

/// A part of the stream without what is odd.
fn cut(part: &[u8], begin: usize, odd: &mut Vec<Range<usize>>) -> Vec<u8> {
    let mut kept = Vec::new();
    let mut from = begin;
    for range in odd.drain(..) {
        kept.extend_from_slice(&part[from - begin..range.start.max(from) - begin]);
        from = range.end.max(from);
    }
    kept.extend_from_slice(&part[(from - begin).min(part.len())..]);
    kept
}

// --- what comes back ---

/// Sends a script over TCP; everything that comes back.
fn talk(to: SocketAddr, script: &Script) -> Vec<u8> {
    let mut stream = tcp_client(to);
    let mut said = Vec::new();
    let mut buffer = vec![0; 1 << 16];
    let mut hear = |stream: &mut TcpStream, said: &mut Vec<u8>| {
        let count = stream.read(&mut buffer).expect("an answer in time");
        said.extend_from_slice(&buffer[..count]);
        count > 0
    };
    for (index, part) in script.parts.iter().enumerate() {
        let is_last = index + 1 == script.parts.len();
        stream.write_all(part).expect("it is read");
        let before = said.len();
        if !(is_last && script.ends) {
            stream
                .write_all(if is_last { b"mn\r\nquit\r\n" } else { b"mn\r\n" })
                .expect("it is read");
        }
        if !is_last {
            while !said[before..].ends_with(b"MN\r\n") && hear(&mut stream, &mut said) {}
        }
    }
    while hear(&mut stream, &mut said) {}
    said
}

/// Answers, one by one, without what depends on the time and on who has asked before.
fn answers(said: &[u8]) -> Vec<String> {
    let (mut all, mut from) = (Vec::new(), 0);
    let mut state = ParseState::default();
    while from < said.len() {
        match Framing::Memcached.parse_response(&mut state, &said[from..], 1 << 24) {
            Ok(Parsed::Message { consumed, .. }) => {
                all.push(masked(&said[from..from + consumed]));
                from += consumed;
            }
            _ => {
                all.push(format!("no answer: {}", said[from..].escape_ascii()));
                break;
            }
        }
    }
    all
}

fn masked(answer: &[u8]) -> String {
    let line = answer.iter().position(|byte| *byte == b'\n').map_or(answer.len(), |at| at + 1);
    let (first, rest) = answer.split_at(line);
    if !first.starts_with(b"VA ") && !first.starts_with(b"HD") && !first.starts_with(b"ME ") {
        return answer.escape_ascii().to_string();
    }
    let mask = |word: &[u8]| match word {
        [b't' | b'l' | b'h', value @ ..] if value.first().is_some_and(u8::is_ascii_digit) => {
            format!("{}#", char::from(word[0]))
        }
        _ => {
            let text = word.escape_ascii().to_string();
            let name = text.split('=').next().unwrap_or_default();
            if matches!(name, "exp" | "la" | "fetch") { format!("{name}=#") } else { text }
        }
    };
    let words: Vec<String> = first.split(|byte| *byte == b' ').map(mask).collect();
    format!("{} {}", words.join(" "), rest.escape_ascii())
}

/// All that a memcached has of the keys that these commands ask for.
fn contents(memcached: &Memcached, asked: &BTreeSet<Vec<u8>>) -> Vec<String> {
    let parts = vec![asked.iter().flatten().copied().collect()];
    answers(&talk(memcached.address(), &Script { parts, ends: false }))
}

/// Commands that ask for every key that a script may store: each of its words, and what it stands for in base64.
fn questions(parts: &[Vec<u8>]) -> BTreeSet<Vec<u8>> {
    let words = parts.iter().flat_map(|part| part.split(|byte| b" \r\n".contains(byte)));
    let words = words.chain(KEYS.iter().map(|key| key.as_bytes()));
    let mut questions = BTreeSet::new();
    for word in words {
        for flags in [&b" k v f c t s\r\n"[..], b" b k v f c t s\r\n"] {
            let question = [b"mg ", word, flags].concat();
            if Command::of_message(&question).is_some_and(|command| command.key == word) {
                questions.insert(question);
            }
        }
    }
    questions
}

fn assert_equal(
    what: &str,
    seed: u64,
    script: &Script,
    expected: &[String],
    side: &Side,
    found: &[String],
) {
    if expected == found {
        return;
    }
    let at = expected.iter().zip(found).take_while(|(a, b)| a == b).count();
    let sent: Vec<String> =
        script.parts.iter().map(|part| part.escape_ascii().to_string()).collect();
    panic!(
        "seed {seed}, {what} {}: answer {at} is {:?} and not {:?}; sent:\n{}",
        side.name,
        found.get(at),
        expected.get(at),
        shortened(&sent.join("\n---\n").replace("\\n", "\\n\n")),
    );
}

/// Without long runs of one character.
fn shortened(text: &str) -> String {
    let mut short = String::new();
    let mut rest = text;
    while let Some(first) = rest.chars().next() {
        let run = rest.len() - rest.trim_start_matches(first).len();
        let count = run / first.len_utf8();
        match count {
            0..30 => short.push_str(&rest[..run]),
            _ => write!(short, "{first}{{{count}}}").unwrap(),
        }
        rest = &rest[run..];
    }
    short
}

// --- the runs ---

fn seeds() -> (Range<u64>, Duration) {
    let number = |name: &str| std::env::var(name).ok();
    let seconds = number("SERVAL_MEMCACHED_SECONDS").and_then(|text| text.parse().ok());
    let time = Duration::from_secs(seconds.unwrap_or(600));
    let seeds = number("SERVAL_MEMCACHED_SEEDS").map_or(SEEDS, |text| {
        let (from, to) = text.split_once("..").unwrap_or(("0", &text));
        from.parse().expect("a seed")..to.parse().expect("a seed")
    });
    (seeds, time)
}

#[test]
fn memcached_answers_the_same_over_tcp_whatever_is_sent() {
    let sides = Side::all(1);
    let (seeds, time) = seeds();
    let start = Instant::now();
    let mut run = 0;
    for seed in seeds {
        if start.elapsed() > time {
            break;
        }
        let script = script(seed);
        let expected = answers(&talk(sides[0].tcp(), &script));
        let asked = questions(&script.parts);
        let stored = contents(&sides[0].memcached, &asked);
        for side in &sides[1..] {
            let found = answers(&talk(side.tcp(), &script));
            assert_equal("over TCP", seed, &script, &expected, side, &found);
            let found = contents(&side.memcached, &asked);
            assert_equal("contents", seed, &script, &stored, side, &found);
        }
        run += 1;
    }
    println!("{run} scripts over TCP in {:?}", start.elapsed());
    sides.iter().filter_map(|side| side.proxy.as_ref()).for_each(assert_accounts);
}

/// Sends a datagram with this id; the content of its answer, which has one or several.
fn ask_datagram((side, client): (&Side, &UdpSocket), id: u16, body: &[u8]) -> Vec<u8> {
    client.send(&[&UdpHeader::request(id).bytes()[..], body].concat()).unwrap();
    let mut pieces: Vec<(u16, Vec<u8>)> = Vec::new();
    let mut whole = Vec::new();
    let mut buffer = vec![0; 1 << 16];
    loop {
        let received = client.recv(&mut buffer);
        let len = received.unwrap_or_else(|error| {
            panic!("{} does not answer datagram {id} {}: {error}", side.name, body.escape_ascii())
        });
        let (header, piece) = UdpHeader::split_answer(&buffer[..len]).expect("it has a frame");
        if header.id != id {
            continue;
        }
        pieces.push((header.sequence, piece.to_vec()));
        if pieces.len() < usize::from(header.total) {
            continue;
        }
        pieces.sort();
        whole.extend(pieces.drain(..).flat_map(|(_, piece)| piece));
        let parsed = Framing::Memcached.parse_response(&mut ParseState::default(), &whole, 1 << 24);
        if !matches!(parsed, Ok(Parsed::Incomplete { .. })) {
            return whole;
        }
    }
}

/// Commands of a seed as datagrams: those that are requests, and others, which only a proxy gets.
fn datagrams(seed: u64) -> Vec<Vec<u8>> {
    let mut random = Random::new(!seed);
    let mut all = Vec::new();
    for _ in 0..30 {
        let command = command(&mut random);
        let body = if random.below(3) == 0 { damaged(&mut random, command) } else { command };
        let line = body.split(|byte| *byte == b'\n').next().unwrap_or_default();
        if !is_odd(line.strip_suffix(b"\r").unwrap_or(line)) {
            all.push(body);
        }
    }
    all
}

/// Sends the datagrams of a seed and compares.
fn compare_datagrams(sides: &[Side], seed: u64) {
    let script = Script { parts: datagrams(seed), ends: false };
    let asked = questions(&script.parts);
    let mut expected = (Vec::new(), Vec::new());
    for side in sides {
        let client = udp_client(side.udp());
        let mut heard = Vec::new();
        for (id, body) in (1..).zip(&script.parts) {
            let framed = [&UdpHeader::request(id).bytes()[..], body].concat();
            let expects = Command::of_message(body).map(|command| command.expects);
            match expects.filter(|_| is_request(&framed)) {
                // What is no request does not reach memcached, and is not answered.
                None if side.proxy.is_some() => _ = client.send(&framed).unwrap(),
                None => {}
                Some(Expects::Reply) => {
                    heard.push(masked(&ask_datagram((side, &client), id, body)));
                }
                Some(Expects::Nothing | Expects::ReplyOrNothing) => {
                    client.send(&framed).unwrap();
                    // It has done it when it has answered the next one.
                    heard.push(masked(&ask_datagram((side, &client), id + 1000, b"mn\r\n")));
                }
            }
        }
        let stored = contents(&side.memcached, &asked);
        if side.proxy.is_none() {
            expected = (heard, stored);
        } else {
            assert_equal("over UDP", seed, &script, &expected.0, side, &heard);
            assert_equal("contents", seed, &script, &expected.1, side, &stored);
        }
    }
}

#[test]
fn memcached_answers_the_same_over_udp_whatever_is_sent() {
    // Commands that are not answered keep their places in the cache for the grace period, and there are 4096 places.
    const SEEDS_OF_CACHE: usize = 120;
    let (seeds, time) = seeds();
    let start = Instant::now();
    let seeds: Vec<u64> = seeds.collect();
    for seeds in seeds.chunks(SEEDS_OF_CACHE) {
        if start.elapsed() > time {
            break;
        }
        let sides = Side::all(5000);
        sides[2].waits_until_it_serves();
        seeds.iter().for_each(|seed| compare_datagrams(&sides, *seed));
    }
    println!("datagrams in {:?}", start.elapsed());
}
