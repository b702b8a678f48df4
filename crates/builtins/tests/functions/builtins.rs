//! The built-in functions count-min, echo, generator and rate-limiter.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use builtins::sketch::OtherState;
use builtins::sketch::count_min::{CountMin, ITEM_BYTES_MAX, Settings};
use builtins::{Code, memory_on};
use onpath::{
    Chain, Counters, Direction, Function, Link, Messages, OnFailure, Outcome, Policy, Reading,
    RequestId, Sizes, Spec,
};
use proptest::prelude::*;
use wire::DropReason;
use wire::session::{EndpointKind, Origin, ReplyTo};

const SIZES: Sizes = Sizes { message_bytes: 4096, reply_bytes: 1024 };

fn spec(function: &str, params: &[(&str, onpath::Param)]) -> Spec {
    let mut spec = Spec::new("f", function);
    spec.params = params.iter().map(|(name, value)| ((*name).to_owned(), value.clone())).collect();
    spec
}

fn made(function: &str, params: &[(&str, onpath::Param)]) -> Box<dyn Function> {
    let spec = spec(function, params);
    Code::open(&spec, &[]).unwrap().instance(&spec, SIZES).unwrap()
}

fn refused(function: &str, params: &[(&str, onpath::Param)]) -> String {
    let spec = spec(function, params);
    Code::open(&spec, &[]).unwrap().instance(&spec, SIZES).err().expect("it is wrong").to_string()
}

fn batch(messages: &[&[u8]]) -> Messages {
    let mut batch = Messages::new(SIZES.message_bytes, SIZES.reply_bytes);
    messages.iter().for_each(|message| batch.push(message));
    batch
}

fn outcomes(messages: &Messages) -> Vec<Outcome> {
    (0..messages.len()).map(|index| messages.outcome(index)).collect()
}

fn value(function: &mut dyn Function, name: &str) -> u64 {
    let at = function.registers().iter().position(|register| &*register.name == name).unwrap();
    function.read().unwrap()[at]
}

#[test]
fn functions_with_a_sketch_or_a_table_state_their_memory() {
    let mib = |spec: &Spec, workers: usize| memory_on(spec, workers) >> 20;
    let largest = spec("count-min", &[("width", (1 << 20).into()), ("depth", 8.into())]);
    assert_eq!((mib(&largest, 1), mib(&largest, 16)), (64, 1024));
    for params in [
        vec![],
        vec![("width", 16.into())],
        largest.params.iter().map(|(n, v)| (&**n, v.clone())).collect(),
    ] {
        let stated = memory_on(&spec("count-min", &params), 1);
        let state = made("count-min", &params).state().unwrap().len() as u64;
        assert!(stated >= state - 64, "{params:?}: {stated} for a state of {state}");
    }
    for precision in [4u64, 14, 18] {
        let stated = memory_on(&spec("hyperloglog", &[("precision", precision.into())]), 3);
        assert_eq!(stated, 3 << precision);
    }
    // All workers share the buckets of clients.
    let by = |by: &str| spec("rate-limiter", &[("by", by.into())]);
    assert_eq!((memory_on(&by("client"), 8), memory_on(&by("service"), 8)), (1 << 20, 0));
    assert_eq!(memory_on(&spec("coap-auth", &[]), 8), 512 << 10);
    let cache = spec("memcached-cache", &[("memory_mib", 5.into())]);
    assert!((2 * 5 + 2..2 * 12).contains(&mib(&cache, 2)), "{}", mib(&cache, 2));
    // Whatever is written there.
    for function in ["count-min", "hyperloglog", "memcached-cache"] {
        let names = ["width", "depth", "top", "precision", "memory_mib"];
        let huge: Vec<_> = names.map(|name| (name, u64::MAX.into())).into();
        assert!(memory_on(&spec(function, &huge), 64) >= 1 << 18);
    }
    for function in ["deliver", "echo", "generator", "passthrough", "peer-address", "threshold"] {
        assert_eq!(memory_on(&spec(function, &[]), 64), 0);
    }
}

#[test]
fn echo_answers_with_the_same_bytes() {
    let mut echo = made("echo", &[]);
    let long = vec![7; SIZES.reply_bytes + 1];
    let mut messages = batch(&[b"", b"one", &long[1..], &long]);
    echo.decide(Direction::Requests, &mut messages).unwrap();
    let reply = Outcome::Reply;
    let too_long = Outcome::Drop(DropReason::ReplyTooLong);
    assert_eq!(outcomes(&messages), [reply, reply, reply, too_long]);
    assert_eq!((messages.bytes(0), messages.bytes(1)), (&b""[..], &b"one"[..]));
    let mut replies = batch(&[b"one"]);
    echo.decide(Direction::Replies, &mut replies).unwrap();
    assert_eq!(outcomes(&replies), [Outcome::Pass]);
    assert!(refused("echo", &[("a", 1.into())]).contains("has no parameter"));
}

#[test]
fn the_generator_answers_with_numbered_messages() {
    let params = [("length", 12.into()), ("byte", 7.into())];
    let mut generator = made("generator", &params);
    let mut messages = batch(&[b"", b"one"]);
    generator.decide(Direction::Requests, &mut messages).unwrap();
    assert_eq!(outcomes(&messages), [Outcome::Reply, Outcome::Reply]);
    assert_eq!(messages.bytes(1), [0, 0, 0, 0, 0, 0, 0, 1, 7, 7, 7, 7]);
    assert_eq!(value(&mut *generator, "generated"), 2);
    for (length, expected) in [(0, &[][..]), (3, &[0, 0, 2])] {
        let mut generator = made("generator", &[("length", length.into())]);
        let mut messages = batch(&[b"a", b"b", b"c"]);
        generator.decide(Direction::Requests, &mut messages).unwrap();
        assert_eq!(messages.bytes(2), expected);
    }
    // Longer than a reply of the service.
    let mut generator = made("generator", &[("length", 2048.into())]);
    let mut messages = batch(&[b"a"]);
    generator.decide(Direction::Requests, &mut messages).unwrap();
    assert_eq!(outcomes(&messages), [Outcome::Drop(DropReason::ReplyTooLong)]);
    assert!(refused("generator", &[("length", 2049.into())]).contains("at most 2048"));
}

/// Several workers, each with an instance of one function and a clock in common.
struct Workers {
    chains: Vec<Chain>,
    now_ns: Arc<AtomicU64>,
}

impl Workers {
    fn new(count: usize, params: &[(&str, onpath::Param)]) -> Self {
        let spec = spec("rate-limiter", params);
        let code = Code::open(&spec, &[]).unwrap();
        let policy = Policy { on_failure: OnFailure::Closed, deadline_ns: u64::MAX >> 8 };
        let link = |_| {
            let function = code.instance(&spec, SIZES).unwrap();
            Chain::new(vec![Link::new(1, function, policy, Arc::new(Counters::default()))])
        };
        Self { chains: (0..count).map(link).collect(), now_ns: Arc::new(AtomicU64::new(1 << 40)) }
    }

    /// How many of these requests pass, which arrive together.
    fn passed(&mut self, worker: usize, requests: &[(Origin, &[u8])]) -> usize {
        let mut messages = Messages::new(SIZES.message_bytes, SIZES.reply_bytes);
        for (origin, bytes) in requests {
            messages.push_of(&RequestId { origin: *origin, number: 0 }, bytes);
        }
        let now_ns = self.now_ns.clone();
        let clock = move || now_ns.load(Ordering::Relaxed);
        self.chains[worker].decide(Direction::Requests, &mut messages, &clock);
        outcomes(&messages).iter().filter(|outcome| **outcome == Outcome::Pass).count()
    }

    fn sleep(&self, ns: u64) {
        self.now_ns.fetch_add(ns, Ordering::Relaxed);
    }
}

fn from(address: &str) -> Origin {
    let peer: SocketAddr = address.parse().unwrap();
    Origin::Datagram { port: 0, peer, local: None }
}

const MS: u64 = 1_000_000;

#[test]
fn a_rate_is_that_of_all_workers_together() {
    let mut workers = Workers::new(2, &[("rate", 100.into()), ("burst", 10.into())]);
    let many = [(from("10.0.0.1:1"), &b"x"[..]); 8];
    assert_eq!((workers.passed(0, &many), workers.passed(1, &many)), (8, 2), "the burst");
    workers.sleep(9 * MS);
    assert_eq!(workers.passed(0, &many), 0);
    workers.sleep(MS);
    assert_eq!(workers.passed(0, &many), 1, "after 10 ms one more");
    // For a second, one request each 2 ms on either worker.
    let mut passed = 0;
    for turn in 0..500 {
        workers.sleep(2 * MS);
        passed += workers.passed(turn % 2, &many[..1]);
    }
    assert_eq!(passed, 100);
    // A long pause is worth a burst and no more.
    workers.sleep(3_600_000 * MS);
    assert_eq!((workers.passed(0, &many), workers.passed(0, &many)), (8, 2));
}

#[test]
fn each_client_has_the_rate() {
    let params = [("by", "client".into()), ("rate", 1.into()), ("burst", 3.into())];
    let mut workers = Workers::new(1, &params);
    let connection = |key| {
        Origin::Client(ReplyTo { endpoint: EndpointKind::Tcp, worker: 0, key, generation: 1 })
    };
    for origin in
        [from("10.0.0.1:1"), from("10.0.0.2:1"), from("[::1]:1"), connection(1), connection(2)]
    {
        assert_eq!(workers.passed(0, &[(origin, &b"x"[..]); 5]), 3, "{origin:?}");
    }
    assert_eq!(
        workers.passed(0, &[(from("10.0.0.1:2"), &b"x"[..]); 5]),
        0,
        "another port, one client"
    );
    // A host chooses the last 64 bits of its IPv6 address as it likes, and may have an IPv4 address within one.
    let five = |address: &str| [(from(address), &b"x"[..]); 5];
    assert_eq!(workers.passed(0, &five("[2001:db8:0:1:1:2:3:4]:1")), 3);
    assert_eq!(workers.passed(0, &five("[2001:db8:0:1:5:6:7:8]:1")), 0, "the same network");
    assert_eq!(workers.passed(0, &five("[2001:db8:0:2:1:2:3:4]:1")), 3, "another network");
    assert_eq!(workers.passed(0, &five("[::ffff:10.0.0.1]:1")), 0, "an address of IPv4");
    // A flood from 262 144 addresses: few of them find a bucket, and the others have one rate in common.
    let mut flooded = 0;
    for address in 0..1 << 18 {
        let ip = std::net::Ipv4Addr::from(0x0b00_0000 + address);
        let origin = from(&format!("{ip}:1"));
        flooded += workers.passed(0, &[(origin, &b"x"[..])]);
    }
    // At most one each of the 65 536 buckets, and the common one.
    assert!((50_000..=65_536 + 3).contains(&flooded), "{flooded}");
    workers.sleep(10_000 * MS);
    assert_eq!(
        workers.passed(0, &[(from("10.0.0.9:1"), &b"x"[..]); 5]),
        3,
        "places are free again"
    );
}

#[test]
fn each_value_of_a_range_has_the_rate() {
    let params = [
        ("by", "range".into()),
        ("rate", 1.into()),
        ("burst", 2.into()),
        ("offset", 1.into()),
        ("length", 2.into()),
    ];
    let mut workers = Workers::new(1, &params);
    let origin = from("10.0.0.1:1");
    let of = |bytes: &'static [u8]| [(origin, bytes); 3];
    assert_eq!(workers.passed(0, &of(b"1ab")), 2);
    assert_eq!(workers.passed(0, &of(b"2abc")), 0, "the same range");
    assert_eq!(workers.passed(0, &of(b"1cd")), 2);
    assert_eq!(workers.passed(0, &of(b"1c")), 0, "too short");
    assert_eq!(workers.passed(0, &of(b"")), 0, "empty");
    assert!(refused("rate-limiter", &[("by", "port".into())]).contains("it is \"service\""));
    assert!(refused("rate-limiter", &[("by", 7.into())]).contains("it is \"service\""));
    assert!(refused("rate-limiter", &[("rate", 0.into())]).contains("rate is from 1"));
    assert!(refused("rate-limiter", &[("burst", 0.into())]).contains("burst is from 1"));
    assert!(refused("rate-limiter", &[("rate", "1".into())]).contains("it is an integer"));
}

const SMALL: Settings = Settings { width: 64, depth: 4, top: 8, seed: 1 };

fn counted(settings: Settings, items: &[Vec<u8>]) -> CountMin {
    let mut sketch = CountMin::new(settings);
    items.iter().for_each(|item| _ = sketch.add(item));
    sketch
}

fn exact(items: &[Vec<u8>]) -> HashMap<&[u8], u64> {
    let mut counts = HashMap::new();
    items.iter().for_each(|item| *counts.entry(&item[..]).or_default() += 1);
    counts
}

fn items() -> impl Strategy<Value = Vec<Vec<u8>>> {
    let item = prop::collection::vec(0u8..4, 0..4);
    prop::collection::vec(item, 0..400)
}

/// Counters without the conservative rule.
fn plain(settings: Settings, items: &[Vec<u8>], item: &[u8]) -> u64 {
    // Each item alone shows which counters it has.
    let places = |item: &[u8]| {
        let alone = counted(Settings { top: 0, ..settings }, &[item.to_vec()]).state();
        let counters =
            alone[alone.len() - 8 * (settings.width * settings.depth) as usize..].to_vec();
        (0..counters.len() / 8).filter(|at| counters[at * 8] == 1).collect::<Vec<_>>()
    };
    let mut counters = HashMap::new();
    for item in items {
        places(item).into_iter().for_each(|at| *counters.entry(at).or_insert(0u64) += 1);
    }
    places(item).iter().map(|at| counters.get(at).copied().unwrap_or(0)).min().unwrap()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]
    #[test]
    fn a_count_is_never_too_small(items in items(), others in items()) {
        let mut sketch = counted(SMALL, &items);
        for (item, count) in exact(&items) {
            let estimate = sketch.estimate(item);
            prop_assert!(estimate >= count);
            prop_assert!(estimate <= plain(SMALL, &items, item));
        }
        // Merged: never too small for both.
        sketch.merge(&counted(SMALL, &others).state()).unwrap();
        let both = [items, others].concat();
        for (item, count) in exact(&both) {
            prop_assert!(sketch.estimate(item) >= count);
        }
        let top = sketch.top();
        prop_assert!(top.windows(2).all(|pair| pair[0].count >= pair[1].count));
        prop_assert!(top.iter().all(|item| item.count == sketch.estimate(item.bytes())));
        prop_assert_eq!(top.len(), exact(&both).len().min(8));
    }

    #[test]
    fn what_is_no_state_is_refused(
        bytes in prop::collection::vec(any::<u8>(), 0..80), at in 0usize..2500, to: u8, cut in 0usize..2500,
    ) {
        let state = counted(SMALL, &[b"a".to_vec(), b"bc".to_vec()]).state();
        let mut sketch = CountMin::new(SMALL);
        prop_assert_eq!(sketch.merge(&bytes), Err(OtherState));
        let mut changed = state.clone();
        let at = at % changed.len();
        changed[at] = to;
        // Counters and items may be anything; nothing else may.
        let _ = sketch.merge(&changed);
        prop_assert!(sketch.top().len() <= 8);
        prop_assert!(sketch.top().iter().all(|item| item.bytes().len() <= ITEM_BYTES_MAX));
        let cut = cut % state.len();
        prop_assert_eq!(sketch.merge(&state[..cut]), Err(OtherState));
    }
}

/// Zipf's distribution with exponent 1 over 5000 items, by inversion.
fn zipf(count: usize) -> Vec<Vec<u8>> {
    let harmonic: f64 = (1..=5000).map(|n| 1.0 / f64::from(n)).sum();
    let mut state = 1u64;
    let next = |_| {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let mut left = (state >> 11) as f64 / (1u64 << 53) as f64 * harmonic;
        let item = (1..5000u32).find(|n| {
            left -= 1.0 / f64::from(*n);
            left <= 0.0
        });
        format!("item {}", item.unwrap_or(5000)).into_bytes()
    };
    (0..count).map(next).collect()
}

#[test]
fn the_bound_holds_and_the_list_has_the_most_frequent_items() {
    let settings = Settings { width: 1024, depth: 4, top: 32, seed: 3 };
    let items = zipf(40_000);
    let counts = exact(&items);
    // Seen by three workers in turn, and by one.
    let mut parts = [(); 3].map(|()| CountMin::new(settings));
    items.iter().enumerate().for_each(|(n, item)| _ = parts[n % 3].add(item));
    let mut merged = CountMin::new(settings);
    parts.iter().for_each(|part| merged.merge(&part.state()).unwrap());
    for sketch in [&counted(settings, &items), &merged] {
        let bound = (std::f64::consts::E * items.len() as f64 / 1024.0) as u64;
        let beyond = counts.iter().filter(|(item, count)| sketch.estimate(item) > **count + bound);
        let allowed = (-4f64).exp() * counts.len() as f64;
        assert!((beyond.count() as f64) < allowed, "of {}", counts.len());
        let mut most: Vec<_> = counts.iter().collect();
        most.sort_by_key(|(item, count)| (std::cmp::Reverse(**count), **item));
        let top = sketch.top();
        for (item, count) in &most[..10] {
            let found = top.iter().find(|found| found.bytes() == **item);
            assert!(found.is_some_and(|found| found.count >= **count), "{item:?} {count}");
        }
    }
}

#[test]
fn the_function_counts_a_range_and_merges() {
    let params = [("offset", 1.into()), ("length", 2.into()), ("top", 3.into())];
    let spec = spec("count-min", &params);
    let code = Code::open(&spec, &[]).unwrap();
    let mut readings = Vec::new();
    let mut one = code.instance(&spec, SIZES).unwrap();
    for messages in [&[&b"xab"[..], b"yab", b"", b"1"][..], &[b"xcd", b"xab", b"xefg"]] {
        let mut function = code.instance(&spec, SIZES).unwrap();
        for function in [&mut function, &mut one] {
            let mut messages = batch(messages);
            function.decide(Direction::Requests, &mut messages).unwrap();
            assert!(outcomes(&messages).iter().all(|outcome| *outcome == Outcome::Pass));
            function.decide(Direction::Replies, &mut batch(&[b"xab"])).unwrap();
        }
        let state = function.state().unwrap();
        let values = function.read().unwrap();
        readings.push(Reading { values, state_bytes: state.len() as u64, state });
    }
    let registers = one.registers().to_vec();
    let make = || Ok(code.instance(&spec, SIZES).unwrap());
    let merged = Reading::merge(&registers, readings, make).unwrap();
    let of = |name: &str| merged.values[registers.iter().position(|r| &*r.name == name).unwrap()];
    assert_eq!((of("items"), of("short"), of("top"), of("length")), (5, 2, 3, 2));
    assert_eq!((of("count_1"), of("item_1")), (3, u64::from_be_bytes(*b"ab\0\0\0\0\0\0")));
    assert_eq!((of("count_2"), of("count_3"), of("count_4")), (1, 1, 0));
    assert_eq!((value(&mut *one, "count_1"), value(&mut *one, "items")), (3, 5));
    one.reset().unwrap();
    assert_eq!((value(&mut *one, "count_1"), value(&mut *one, "items")), (0, 0));
    for (param, wrong) in
        [("width", 100u64), ("width", 8), ("depth", 0), ("depth", 9), ("top", 257)]
    {
        assert!(refused("count-min", &[(param, wrong.into())]).contains(&format!("{param} is")));
    }
}

#[test]
fn peer_address_puts_the_client_in_front_of_requests() {
    let mut function = made("peer-address", &[]);
    let mut batch = Messages::new(300_000, 300_000);
    let peer = "[2001:db8::1]:513".parse().unwrap();
    let datagram = Origin::Datagram { port: 0, peer, local: None };
    batch.push_of(&RequestId { origin: datagram, number: 0 }, b"request");
    // Over shared memory, decided before, and one that has no room with the address.
    batch.push(b"");
    batch.push_decided(
        &RequestId { origin: datagram, number: 0 },
        b"kept",
        Outcome::Pass,
        4,
        false,
    );
    function.decide(Direction::Requests, &mut batch).unwrap();
    let mut head = [0; 32];
    head[..4].copy_from_slice(&[0x20, 1, 0x0d, 0xb8]);
    (head[15], head[16], head[17], head[18]) = (1, 1, 2, 6);
    assert_eq!(batch.bytes(0), [&head[..], b"request"].concat());
    assert_eq!((batch.bytes(1), batch.bytes(2)), (&[0; 32][..], &b"kept"[..]));
    assert_eq!(batch.shown_len(0), 7, "replies are limited by what the client sent");
    let mut batch = Messages::new(100, 100);
    batch.push(&[1; 68]);
    batch.push(&[1; 69]);
    function.decide(Direction::Requests, &mut batch).unwrap();
    assert_eq!((batch.bytes(0).len(), batch.outcome(0)), (100, Outcome::Pass));
    assert_eq!(batch.outcome(1), Outcome::Drop(DropReason::TooLong));
    // Replies go as they are.
    let mut batch = Messages::new(100, 100);
    batch.push(b"reply");
    function.decide(Direction::Replies, &mut batch).unwrap();
    assert_eq!(batch.bytes(0), b"reply");
}
