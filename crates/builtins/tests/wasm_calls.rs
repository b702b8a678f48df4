//! WebAssembly modules ask for the time and for the addresses of clients.

use std::net::SocketAddr;
use std::sync::Arc;

use builtins::Code;
use onpath::{
    Arranged, Chain, Counters, Direction, Function, Link, Messages, OnFailure, Peers, Policy,
    RequestId, Sizes, Spec,
};
use wire::session::{EndpointKind, Origin, ReplyTo};

const SIZES: Sizes = Sizes { message_bytes: 256, reply_bytes: 256 };

/// A function that may take long, since the machine may be busy.
fn patient(function: &str) -> Spec {
    Spec { deadline_us: onpath::spec::DEADLINE_US_MAX, ..Spec::new("f", function) }
}

fn instance(module: &[u8]) -> Box<dyn Function> {
    let spec = patient("f.wasm");
    Code::open(&spec, module).unwrap().instance(&spec, SIZES).unwrap()
}

fn batch(messages: &[Vec<u8>]) -> Messages {
    let mut batch = Messages::new(SIZES.message_bytes, SIZES.reply_bytes);
    messages.iter().for_each(|message| batch.push(message));
    batch
}

/// A module that asks for the peer of the descriptor at `offset` of the first one, into `to`, and answers with that, what the call returned, and the
/// time.
fn asks_for_peer(offset: i64, to: &str) -> Vec<u8> {
    wat::parse_str(format!(
        r#"(module (import "serval" "peer" (func $peer (param i32 i32) (result i32)))
            (import "serval" "now" (func $now (result i64)))
            (memory (export "memory") 1)
            (func (export "serval_abi") (result i32) (i32.const {version}))
            (func (export "serval_requests") (param $m i32) (param $count i32) (param $s i32) (param i32) (result i32)
                (i32.store offset=20 (local.get $s)
                    (call $peer (i32.add (local.get $m) (i32.const {offset})) {to}))
                (i64.store offset=24 (local.get $s) (call $now))
                (i32.store offset=8 (local.get $m) (i32.const 3))
                (i32.store offset=16 (local.get $m) (local.get $s))
                (i32.store offset=20 (local.get $m) (i32.const 32))
                (i32.const 0)))"#,
        version = 1 | 2 << 16
    ))
    .unwrap()
}

/// Where a connection of the test comes from.
struct Known(ReplyTo, SocketAddr);

impl Peers for Known {
    fn peer(&self, client: &ReplyTo) -> Option<SocketAddr> {
        (*client == self.0).then_some(self.1)
    }
}

#[test]
fn modules_see_their_clients_and_the_time() {
    const NOW_NS: u64 = 0x0102_0304_0506_0708;
    let to = ReplyTo { endpoint: EndpointKind::Tcp, worker: 1, key: 6, generation: 3 };
    let address = |text: &str| text.parse::<SocketAddr>().unwrap();
    let connected = address("[2001:db8::7]:443");
    let datagram = |text: &str| Origin::Datagram { port: 0, peer: address(text), local: None };
    let gone = ReplyTo { generation: 5, ..to };
    let near = ReplyTo { endpoint: EndpointKind::Shm, ..to };
    let v6 = |text: &str| text.parse::<std::net::Ipv6Addr>().unwrap().octets().to_vec();
    let v4 = [&[192, 0, 2, 9][..], &[0; 12]].concat();
    let cases = [
        (datagram("192.0.2.9:5353"), v4, 5353_u16, 4_u16),
        (datagram("[fe80::1]:7"), v6("fe80::1"), 7, 6),
        (Origin::Client(to), v6("2001:db8::7"), 443, 6),
        (Origin::Client(gone), vec![0; 16], 0, 0),
        (Origin::Client(near), vec![0; 16], 0, 0),
    ];
    for (origin, bytes, port, family) in cases {
        let mut batch = Messages::new(SIZES.message_bytes, SIZES.reply_bytes);
        batch.set_peers(Arc::new(Known(to, connected)));
        batch.push_of(&RequestId { origin, number: 0 }, b"a message");
        let native = batch.peer(0);
        assert_eq!(native.map(|peer| peer.port()).unwrap_or_default(), port, "{origin:?}");
        let link = |function| {
            let policy = Policy { on_failure: OnFailure::Closed, deadline_ns: u64::MAX };
            Link::new(1, function, policy, Arc::<Counters>::default())
        };
        let mut chain = Chain::default();
        chain.arrange(vec![Arranged::New(link(instance(&asks_for_peer(0, "(local.get $s)"))))]);
        chain.decide(Direction::Requests, &mut batch, &|| NOW_NS);
        let family = family.to_le_bytes();
        let returned = u32::from(family[0]).to_le_bytes();
        let expected =
            [&bytes[..], &port.to_le_bytes(), &family, &returned, &NOW_NS.to_le_bytes()].concat();
        assert_eq!(batch.bytes(0), expected, "{origin:?}");
    }
}

#[test]
fn a_peer_is_that_of_a_message_and_is_written_inside_the_memory() {
    for (offset, to, why) in [
        (24, "(local.get $s)", "the peer of what is no message"),
        (8, "(local.get $s)", "the peer of what is no message"),
        (-24, "(local.get $s)", "the peer of what is no message"),
        (0, "(i32.const -4)", "outside of its memory"),
        (0, "(i32.sub (i32.mul (memory.size) (i32.const 65536)) (i32.const 19))", "outside of its"),
    ] {
        let mut function = instance(&asks_for_peer(offset, to));
        let mut batch = batch(&[vec![0; 8]]);
        let failed = function.decide(Direction::Requests, &mut batch).unwrap_err().to_string();
        assert!(failed.contains(why), "{offset} {to}: {failed}");
    }
    // Those of the call before are no messages of this one.
    let mut function = instance(&asks_for_peer(24, "(local.get $s)"));
    function.decide(Direction::Requests, &mut batch(&[vec![0; 8], vec![0; 8]])).unwrap();
    assert!(function.decide(Direction::Requests, &mut batch(&[vec![0; 8]])).is_err());
    for wrong in [
        r#"(import "serval" "now" (func (result i32)))"#,
        r#"(import "serval" "peer" (func (param i32) (result i32)))"#,
        r#"(import "serval" "clock" (func (result i64)))"#,
        r#"(import "env" "now" (func (result i64)))"#,
    ] {
        let parts = format!(r#"{wrong} (memory (export "memory") 1)"#);
        let module = wat::parse_str(format!("(module {parts})")).unwrap();
        let refused = Code::open(&patient("f.wasm"), &module).err().unwrap().to_string();
        assert!(refused.contains("imports nothing but serval.dictionary_get"), "{refused}");
        assert!(refused.contains("serval.now, serval.peer"), "{refused}");
    }
}
