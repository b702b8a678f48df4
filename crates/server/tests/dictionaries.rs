//! Dictionaries of functions: shared by those that name them, kept when modules are replaced, cleared when nothing uses them.

mod common;

use common::change::{change, service};
use common::*;
use engine::topology::{Tenant, Topology};
use onpath::Spec;
use server::{Caller, Place, Server};

/// A module that stores each request that it does not know yet and lets it pass, and answers others with this byte before the stored value.
fn module(mark: u8) -> Vec<u8> {
    let text = format!(
        r#"(module
        (import "serval" "dictionary_get" (func $get (param i32 i32 i32 i32) (result i32)))
        (import "serval" "dictionary_set" (func $set (param i32 i32 i32 i32) (result i32)))
        (memory (export "memory") 1)
        (func (export "serval_abi") (result i32) (i32.const 65537))
        (func (export "serval_requests") (param $m i32) (param $n i32) (param $s i32) (param $b i32) (result i32)
            (local $key i32) (local $len i32) (local $found i32)
            (loop $next
                (if (local.get $n) (then
                    (local.set $key (i32.load (local.get $m)))
                    (local.set $len (i32.load offset=4 (local.get $m)))
                    (local.set $found
                        (call $get (local.get $key) (local.get $len) (i32.add (local.get $s) (i32.const 1)) (i32.const 64)))
                    (if (i32.lt_s (local.get $found) (i32.const 0))
                        (then (drop (call $set (local.get $key) (local.get $len) (local.get $key) (local.get $len))))
                        (else
                            (i32.store8 (local.get $s) (i32.const {mark}))
                            (i32.store offset=8 (local.get $m) (i32.const 2))
                            (i32.store offset=16 (local.get $m) (local.get $s))
                            (i32.store offset=20 (local.get $m) (i32.add (local.get $found) (i32.const 1)))
                            (local.set $s (i32.add (local.get $s) (i32.const 65)))))
                    (local.set $m (i32.add (local.get $m) (i32.const 24)))
                    (local.set $n (i32.sub (local.get $n) (i32.const 1)))
                    (br $next))))
            (i32.const 0)))"#
    );
    wat::parse_str(text).unwrap()
}

fn spec(dictionary: Option<&str>) -> Spec {
    let mut spec = Spec::new("f", "/f.wasm");
    spec.deadline_us = onpath::spec::DEADLINE_US_MAX;
    spec.dictionary = dictionary.map(str::to_owned);
    spec
}

fn attach(server: &mut Server, service: &str, spec: &Spec, mark: u8) -> Result<(), String> {
    let attached = server.functions.attach_new(
        &server.engine,
        Caller::engine(),
        service,
        spec,
        Some(module(mark)),
        &Place::Default,
    );
    attached.map(drop).map_err(|error| error.to_string())
}

fn asked(server: &Server, port: usize, request: &[u8]) -> Vec<u8> {
    ask(&udp_client(address(server, port)), request)
}

fn used(server: &Server) -> Vec<(u64, u64)> {
    let functions = server.metrics().functions();
    functions.iter().filter_map(|of| Some(of.dictionary()?.used())).collect()
}

#[test]
fn a_dictionary_outlives_the_modules_that_use_it() {
    let mut services: Vec<_> =
        ["a", "b", "c"].map(|name| service(name, vec![udp()], "echo")).into();
    services[2].tenant = "other".into();
    let tenants = vec![Tenant::new("other")];
    let mut topology = Topology { tenants, ..topology(services) };
    topology.engine.workers = 2;
    let mut server = start(topology);
    let refused = attach(&mut server, "a", &spec(None), b'1').unwrap_err();
    assert!(refused.contains("it uses a dictionary and has none: name one"), "{refused}");

    attach(&mut server, "a", &spec(Some("d")), b'1').unwrap();
    // Whichever worker receives it.
    for _ in 0..8 {
        for request in [&b"key"[..], b"other"] {
            let answer = asked(&server, 0, request);
            assert!(answer == request || answer[1..] == *request, "{answer:?}");
        }
    }
    assert_eq!(asked(&server, 0, b"key"), b"1key");
    assert_eq!(used(&server), [(2, 16)]);

    // Other code under the same name, which names none.
    attach(&mut server, "a", &spec(None), b'2').unwrap();
    assert_eq!(asked(&server, 0, b"key"), b"2key");
    // Another service of the tenant shares it, one of another tenant has its own.
    attach(&mut server, "b", &spec(Some("d")), b'3').unwrap();
    assert_eq!(asked(&server, 1, b"key"), b"3key");
    attach(&mut server, "c", &spec(Some("d")), b'4').unwrap();
    assert_eq!(asked(&server, 2, b"key"), b"key", "it is not there");
    assert_eq!(asked(&server, 2, b"key"), b"4key");
    assert_eq!(used(&server), [(2, 16), (2, 16), (1, 6)]);

    // A reload that changes the service.
    let mut services = server.topology().services.clone();
    services[0].slots *= 2;
    change(&mut server, services);
    assert_eq!(asked(&server, 0, b"key"), b"2key");
    // When nothing uses it any more, it is gone.
    for service in ["a", "b"] {
        server.functions.detach_named(&server.engine, service, "f").unwrap();
    }
    attach(&mut server, "a", &spec(Some("d")), b'5').unwrap();
    assert_eq!(asked(&server, 0, b"key"), b"key");
    assert!(server.shutdown().is_clean());
}

#[test]
fn a_dictionary_counts_as_memory_of_the_tenant() {
    let mut of = service("a", vec![udp()], "echo");
    of.tenant = "small".into();
    let bytes = topology(vec![of.clone()]).region_bytes_of("small");
    let mut tenant = Tenant::new("small");
    // The region, and the memory of three instances of 4 MiB.
    tenant.memory_mib = bytes.div_ceil(1 << 20) + 13;
    let mut server = start(Topology { tenants: vec![tenant], ..topology(vec![of]) });
    let mut large = spec(Some("d"));
    large.dictionary_kib = 4 << 10;
    let refused = attach(&mut server, "a", &large, b'1').unwrap_err();
    assert!(refused.contains("small") && refused.contains("memory_mib"), "{refused}");
    attach(&mut server, "a", &spec(Some("d")), b'1').unwrap();
    assert!(server.shutdown().is_clean());
}

/// A user who may attach functions does not see what the operator's functions of the same tenant know.
#[test]
fn users_have_dictionaries_of_their_own() {
    let user = |more: u32| Caller { user: Caller::engine().user + more, connection: Some(1) };
    let mut services: Vec<_> =
        ["a", "b", "c"].map(|name| service(name, vec![udp()], "echo")).into();
    services.iter_mut().for_each(|of| of.tenant = "shared".into());
    let tenant = Tenant { users: vec![user(1).user], ..Tenant::new("shared") };
    let mut server = start(Topology { tenants: vec![tenant], ..topology(services) });
    let attach_as = |server: &mut Server, caller, service: &str, mark| {
        let module = Some(module(mark));
        server
            .functions
            .attach_new(&server.engine, caller, service, &spec(Some("d")), module, &Place::Default)
            .unwrap();
    };
    attach_as(&mut server, Caller::engine(), "a", b'1');
    attach_as(&mut server, user(1), "b", b'2');
    assert_eq!(asked(&server, 0, b"key"), b"key");
    assert_eq!(asked(&server, 0, b"key"), b"1key");
    assert_eq!(asked(&server, 1, b"key"), b"key", "it is not there for the user");
    // Another function of that user finds what its first one has stored.
    attach_as(&mut server, user(1), "c", b'3');
    assert_eq!(asked(&server, 2, b"key"), b"3key");
    assert!(server.shutdown().is_clean());
}
