//! Tenants of a real engine: what their users may do, how they change while it runs, and an attacker among them. The users are those that connections
//! would have: the tests need no second user of the machine.

mod common;

use std::path::Path;

use common::change::{Askers, never, service};
use common::network::Network;
use common::*;
use engine::topology::{Service, Tenant, Topology};
use onpath::Spec;
use server::{Caller, Place, RegisterAction, Replacement, Server, Target, TenantError};
use wire::DropReason;

/// Users of the tenants `a` and `b`.
fn users() -> [Caller; 2] {
    [1, 2].map(|more| Caller { user: Caller::engine().user + more, connection: Some(more.into()) })
}

fn tenants() -> Vec<Tenant> {
    let named =
        |name: &str, caller: Caller| Tenant { users: vec![caller.user], ..Tenant::new(name) };
    let [a, b] = users();
    vec![named("a", a), named("b", b)]
}

fn services() -> Vec<Service> {
    ["a", "b"]
        .map(|tenant| {
            let mut of = service(&format!("of-{tenant}"), vec![udp(), tcp()], "echo");
            of.tenant = tenant.to_owned();
            of
        })
        .into()
}

fn engine() -> Server {
    start(Topology { tenants: tenants(), ..topology(services()) })
}

fn wasm() -> Vec<u8> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../functions/threshold.wasm");
    std::fs::read(path).unwrap()
}

fn spec(name: &str, function: &str) -> Spec {
    let mut spec = Spec::new(name, function);
    spec.deadline_us = onpath::spec::DEADLINE_US_MAX;
    spec
}

fn named(service: &str, name: &str) -> Target {
    Target::Named { service: service.into(), name: name.into() }
}

fn names(server: &Server, caller: Caller) -> Vec<String> {
    server::tenants::list(&server.engine, caller).into_iter().map(|of| of.tenant.name).collect()
}

#[test]
fn users_of_a_tenant_reach_its_services_and_no_others() {
    let _alone = alone();
    let mut server = engine();
    let [a, b] = users();
    let plain = spec("f", "passthrough");
    server.functions.attach_new(&server.engine, a, "of-a", &plain, None, &Place::Default).unwrap();
    let foreign = server
        .functions
        .attach_new(&server.engine, b, "of-a", &plain, None, &Place::Default)
        .unwrap_err();
    assert!(foreign.to_string().contains("of-b"), "it names b's own only: {foreign}");
    assert!(!foreign.to_string().contains(", of-a"), "{foreign}");
    assert!(server.functions.detach(&server.engine, b, &named("of-a", "f")).is_err());
    let id =
        server.functions.create(&server.engine, a, &spec("g", "passthrough"), None, false).unwrap();
    assert!(server.functions.destroy(&server.engine, b, id).is_err());
    assert!(
        server.functions.attach_created(&server.engine, b, id, "of-b", &Place::Default).is_err()
    );
    assert_eq!(server.functions.list(&server.engine, b).len(), 0);
    assert_eq!(names(&server, a), ["a"]);
    assert_eq!(names(&server, Caller::engine()), ["a", "b"]);
    // A reload keeps what a user of the tenant has attached.
    let mut services = server.topology().services.clone();
    services[0].slots *= 2;
    let wanted = Topology { services, ..server.topology().clone() };
    server.change(wanted, &never).unwrap();
    assert_eq!(server.functions.list(&server.engine, a).len(), 2, "f is attached, and g is not");
    // A user loses what its tenant loses.
    let mut without = tenants().remove(0);
    without.users.clear();
    server.put_tenant(Caller::engine(), without, false).unwrap();
    assert!(
        server
            .functions
            .attach_new(&server.engine, a, "of-a", &spec("h", "passthrough"), None, &Place::Default)
            .is_err()
    );
}

#[test]
fn tenants_are_added_changed_and_removed_while_services_answer() {
    let _alone = alone();
    let mut server = engine();
    let operator = Caller::engine();
    let [a, _] = users();
    let askers = Askers::start(address(&server, 0), address(&server, 1));
    eventually("clients are answered", || server.metrics().service(0).replied > 20);
    assert!(matches!(
        server.put_tenant(a, Tenant::new("c"), true),
        Err(TenantError::NotOperator(user)) if user == a.user
    ));
    assert!(matches!(server.remove_tenant(a, "b"), Err(TenantError::NotOperator(_))));
    let mut seen = Vec::new();
    for round in 0..20 {
        server.put_tenant(operator, Tenant::new("c"), true).unwrap();
        let all = server::tenants::list(&server.engine, operator);
        let id = all.iter().find(|of| of.tenant.name == "c").unwrap().id;
        assert!(!seen.contains(&id), "numbers are never used again");
        seen.push(id);
        let taken = server.put_tenant(operator, Tenant::new("c"), true);
        assert!(matches!(taken, Err(TenantError::Taken(_))));
        let weight = Tenant { weight: 1 + round, ..tenants().remove(0) };
        server.put_tenant(operator, weight, false).unwrap();
        server.remove_tenant(operator, "c").unwrap();
    }
    assert!(matches!(server.remove_tenant(operator, "c"), Err(TenantError::Unknown(_))));
    let owns = server.remove_tenant(operator, "a").unwrap_err().to_string();
    assert!(owns.contains("owns of-a"), "{owns}");
    let few = Tenant { mqueues: 1, ..tenants().remove(0) };
    let few = server.put_tenant(operator, few, false).unwrap_err().to_string();
    assert!(few.contains("mqueues") && few.contains("fewer"), "{few}");
    assert!(matches!(server.remove_tenant(operator, "default"), Err(TenantError::Default)));
    let count = askers.finish();
    assert!(count > 0, "every request was answered");
    assert_eq!(server.metrics().service(0).dropped_requests(), 0);
}

/// A limit that is set at run time holds from then on, is counted, and ends when it is removed.
#[test]
fn a_limit_can_be_set_while_a_service_runs() {
    let _alone = alone();
    let mut server = engine();
    let operator = Caller::engine();
    let client = udp_client(address(&server, 0));
    let send = |count: usize| (0..count).for_each(|_| _ = client.send(b"x").unwrap());
    let dropped = |server: &Server| server.metrics().service(0).dropped(DropReason::TenantRate);
    let slow = Tenant { messages_per_s: 1, burst_ms: 1, ..tenants().remove(0) };
    server.put_tenant(operator, slow, false).unwrap();
    eventually("more than a message a second is shed", || {
        send(10);
        dropped(&server) > 20
    });
    let shown = server::tenants::list(&server.engine, operator);
    let of_a = shown.iter().find(|of| of.tenant.name == "a").unwrap();
    assert!(of_a.used.limited > 0, "{of_a:?}");
    server.put_tenant(operator, tenants().remove(0), false).unwrap();
    let replied = server.metrics().service(0).replied;
    eventually("everything is answered again", || {
        send(10);
        server.metrics().service(0).replied > replied + 20
    });
    assert_eq!(server.metrics().service(1).dropped_requests(), 0, "the other one notices nothing");
}

/// The clock of the machine is late, and the tenant has taken nothing before.
#[test]
fn a_tenant_that_was_idle_has_no_more_than_its_rate() {
    let _alone = alone();
    let slow = Tenant { messages_per_s: 1, burst_ms: 1, ..tenants().remove(0) };
    let begin = std::time::Instant::now();
    let server = start(Topology { tenants: vec![slow], ..topology(services()) });
    let client = udp_client(address(&server, 0));
    let ended = |server: &Server| {
        let counted = server.metrics().service(0);
        counted.replied + counted.dropped(DropReason::TenantRate)
    };
    // One by one: all that come in a turn may be taken at once.
    for number in 1..=40 {
        client.send(b"x").unwrap();
        eventually("it is answered or shed", || ended(&server) == number);
    }
    let replied = server.metrics().service(0).replied;
    let most = 2 + begin.elapsed().as_secs();
    assert!(replied <= most, "{replied} in a time for {most}");
}

/// One tenant's user makes every call, with guessed ids and names, and creates and destroys in between. Whatever it does, the functions of the other tenant,
/// the operator's, the tenants and the replies to other clients stay as they are.
#[test]
fn an_attacking_tenant_reaches_nothing_of_others() {
    let _alone = alone();
    let mut server = engine();
    let [attacker, victim] = users();
    let operator = Caller::engine();
    let services = ["of-a", "of-b", "nothing"];
    let functions = ["f", "mine", "keep"];
    let tenants_named = ["a", "b", "default", "new"];
    // The victim's functions, and one of the operator on the attacker's own service.
    let kept = server
        .functions
        .create(&server.engine, victim, &spec("kept", "passthrough"), None, false)
        .unwrap();
    server
        .functions
        .attach_new(
            &server.engine,
            victim,
            "of-b",
            &spec("f", "passthrough"),
            None,
            &Place::Default,
        )
        .unwrap();
    server
        .functions
        .attach_new(
            &server.engine,
            operator,
            "of-a",
            &spec("keep", "passthrough"),
            None,
            &Place::Default,
        )
        .unwrap();
    let askers = Askers::start(address(&server, 2), address(&server, 3));
    eventually("clients are answered", || server.metrics().service(1).replied > 20);
    let of = |server: &Server, caller| -> Vec<_> {
        let functions = server.functions.list(&server.engine, caller).into_iter();
        functions.map(|f| (f.id, f.service, f.spec)).collect()
    };
    let fixed = |server: &Server| {
        let own: Vec<u64> =
            server.functions.list(&server.engine, attacker).iter().map(|f| f.id).collect();
        let mut all = of(server, operator);
        all.retain(|f| !own.contains(&f.0));
        (of(server, victim), all, server.topology().tenants.clone())
    };
    let before = fixed(&server);
    let (mut refused, mut done) = (0, 0);
    let mut random = Random::new(24);
    for step in 0..1500 {
        let id = match random.below(3) {
            0 => random.next(),
            1 => u64::MAX,
            _ => random.below(40) as u64,
        };
        let own = server.functions.list(&server.engine, attacker).first().map(|f| f.id);
        let id = own.filter(|_| random.below(2) == 0).unwrap_or(id);
        let (target, service) = (Target::Id(id), services[random.below(3)]);
        let (name, tenant) = (functions[random.below(3)], tenants_named[random.below(4)]);
        let by_name = named(service, name);
        let call = random.below(15);
        let succeeded = match call {
            0 => server
                .functions
                .create(&server.engine, attacker, &spec("mine", "passthrough"), None, true)
                .is_ok(),
            1 if random.below(10) == 0 => {
                let module = spec("other", "a.wasm");
                server
                    .functions
                    .create(&server.engine, attacker, &module, Some(wasm()), false)
                    .is_ok()
            }
            1 => server
                .functions
                .attach_created(&server.engine, attacker, id, "of-b", &Place::At(0))
                .is_ok(),
            2 => server
                .functions
                .attach_created(&server.engine, attacker, id, service, &Place::At(0))
                .is_ok(),
            3 => {
                let (spec, place) = (spec(name, "passthrough"), Place::Before("f".into()));
                server
                    .functions
                    .attach_new(&server.engine, attacker, service, &spec, None, &place)
                    .is_ok()
            }
            4 => {
                let by = Replacement { deadline_us: Some(1), ..Replacement::default() };
                let target = if step % 2 == 0 { target } else { by_name };
                server.functions.replace(&server.engine, attacker, &target, &by, None).is_ok()
            }
            5 => server.functions.detach(&server.engine, attacker, &target).is_ok(),
            6 => server.functions.detach(&server.engine, attacker, &by_name).is_ok(),
            7 => server.functions.destroy(&server.engine, attacker, id).is_ok(),
            8 => server
                .functions
                .registers(&server.engine, attacker, &target, &RegisterAction::Reset)
                .is_ok(),
            9 => {
                let (entries, bytes) = (random.next() as u32 >> random.below(33).min(31), 64);
                server.functions.make_ring(&server.engine, attacker, id, entries, bytes).is_ok()
            }
            10 => server.functions.state(&server.engine, attacker, &by_name).is_ok(),
            11 => server
                .functions
                .begin_trace(&server.engine, attacker, service, random.below(4))
                .is_ok(),
            12 => server.functions.end_connection(&server.engine, 1) > 0,
            13 => {
                let wanted =
                    Tenant { weight: 1000, users: vec![attacker.user], ..Tenant::new(tenant) };
                let put = server.put_tenant(attacker, wanted, tenant == "new");
                assert!(matches!(put, Err(TenantError::NotOperator(_))), "{put:?}");
                false
            }
            _ => {
                let removed = server.remove_tenant(attacker, tenant);
                assert!(matches!(removed, Err(TenantError::NotOperator(_))), "{removed:?}");
                false
            }
        };
        (done, refused) = (done + u64::from(succeeded), refused + u64::from(!succeeded));
        assert_eq!(fixed(&server), before, "after call {call} with {id} {service} {name}");
    }
    assert!(refused > 500 && done > 50, "{refused} refused, {done} done");
    let counted: u64 = server.functions.counters().refused().iter().sum();
    assert!(counted > 200, "{counted} are counted");
    assert!(
        server.functions.destroy(&server.engine, victim, kept).is_ok(),
        "the victim's own is as it was"
    );
    assert!(askers.finish() > 0, "every request of the victim's clients was answered");
    assert_eq!(server.metrics().service(1).dropped_requests(), 0);
}

/// Users that a tenant loses lose what they have at its services, and their rings.
#[test]
fn what_users_have_ends_when_their_tenant_loses_them() {
    let _alone = alone();
    let mut server = engine();
    let operator = Caller::engine();
    let [a, b] = users();
    let passthrough = |name: &str| spec(name, "passthrough");
    server
        .functions
        .attach_new(&server.engine, a, "of-a", &passthrough("own"), None, &Place::Default)
        .unwrap();
    server
        .functions
        .attach_new(&server.engine, b, "of-b", &passthrough("other"), None, &Place::Default)
        .unwrap();
    server
        .functions
        .attach_new(&server.engine, operator, "of-a", &passthrough("of-all"), None, &Place::Default)
        .unwrap();
    let [attached, detached] = ["attached", "detached"].map(|name| {
        let id =
            server.functions.create(&server.engine, a, &passthrough(name), None, false).unwrap();
        server.functions.make_ring(&server.engine, a, id, 8, 64).unwrap();
        id
    });
    server.functions.attach_created(&server.engine, a, attached, "of-a", &Place::Default).unwrap();
    // Another change of the tenant ends nothing.
    let heavier = Tenant { weight: 2, ..tenants().remove(0) };
    assert_eq!(server.put_tenant(operator, heavier, false).unwrap(), 0);
    let mut without = tenants().remove(0);
    without.users.clear();
    // Two are detached, and both that were created are destroyed.
    assert_eq!(server.put_tenant(operator, without, false).unwrap(), 4);
    assert_eq!(server.functions.list(&server.engine, a).len(), 0);
    assert!(server.functions.destroy(&server.engine, operator, detached).is_err(), "it is gone");
    let mut left: Vec<String> = server
        .functions
        .list(&server.engine, operator)
        .into_iter()
        .map(|view| view.spec.name)
        .collect();
    left.sort();
    assert_eq!(left, ["of-all", "other"]);
    // UDP ports; those between are of TCP.
    for at in [0, 2] {
        assert_eq!(ask(&udp_client(address(&server, at)), b"still"), b"still");
    }
}

/// Regions, modules and rings count together.
#[test]
fn the_memory_of_a_tenant_has_one_limit() {
    let _alone = alone();
    let mut server = engine();
    let [a, _] = users();
    let regions = server.topology().region_bytes_of("a").div_ceil(1 << 20);
    // A module has three instances on the worker.
    let limited = Tenant { memory_mib: regions + 22, ..tenants().remove(0) };
    server.put_tenant(Caller::engine(), limited, false).unwrap();
    let module = |name: &str, memory_mib: u32| Spec { memory_mib, ..spec(name, "threshold.wasm") };
    let attach = |server: &mut Server, name: &str, memory_mib: u32| {
        let spec = module(name, memory_mib);
        server
            .functions
            .attach_new(&server.engine, a, "of-a", &spec, Some(wasm()), &Place::Default)
            .map(drop)
    };
    let refused = attach(&mut server, "large", 8).unwrap_err().to_string();
    assert!(refused.contains("may use") && refused.contains("memory_mib"), "{refused}");
    attach(&mut server, "first", 5).unwrap();
    attach(&mut server, "second", 4).unwrap_err();
    attach(&mut server, "second", 2).unwrap();
    let larger = Replacement { memory_mib: Some(5), ..Replacement::default() };
    let second = named("of-a", "second");
    server.functions.replace(&server.engine, a, &second, &larger, None).unwrap_err();
    // A ring of 2 MiB finds no room, and a small one does.
    let id = server
        .functions
        .create(&server.engine, a, &spec("rings", "passthrough"), None, false)
        .unwrap();
    assert!(server.functions.make_ring(&server.engine, a, id, 512, 4096).is_err());
    server.functions.make_ring(&server.engine, a, id, 8, 64).unwrap();
    server.functions.detach(&server.engine, a, &named("of-a", "first")).unwrap();
    server.functions.make_ring(&server.engine, a, id, 512, 4096).unwrap();
    server.functions.replace(&server.engine, a, &second, &larger, None).unwrap();
    assert_eq!(ask(&udp_client(address(&server, 0)), &[0; 18]), [0; 18]);
}

/// What built-in functions take counts as well, also when a setting that a command writes makes them larger, and comes back.
#[test]
fn the_memory_of_built_in_functions_counts() {
    let _alone = alone();
    let mut server = engine();
    let [a, _] = users();
    let regions = server.topology().region_bytes_of("a").div_ceil(1 << 20);
    let limited = Tenant { memory_mib: regions + 63, ..tenants().remove(0) };
    server.put_tenant(Caller::engine(), limited, false).unwrap();
    let sketch = |width: u64, depth: u64| {
        let mut spec = spec("counts", "count-min");
        spec.params = vec![("width".into(), width.into()), ("depth".into(), depth.into())];
        spec
    };
    let attach = |server: &mut Server, spec: &Spec| {
        server
            .functions
            .attach_new(&server.engine, a, "of-a", spec, None, &Place::Default)
            .map(drop)
    };
    // 64 MiB of counters, and the list.
    let refused = attach(&mut server, &sketch(1 << 20, 8)).unwrap_err().to_string();
    assert!(refused.contains("may use") && refused.contains("memory_mib"), "{refused}");
    attach(&mut server, &sketch(1 << 19, 8)).unwrap();
    let counts = named("of-a", "counts");
    let write = |server: &mut Server, setting: &str, value: u64| {
        server
            .functions
            .registers(
                &server.engine,
                a,
                &counts,
                &RegisterAction::Write(setting.to_owned(), value),
            )
            .map(drop)
    };
    let refused = write(&mut server, "width", 1 << 20).unwrap_err().to_string();
    assert!(refused.contains("may use"), "{refused}");
    write(&mut server, "depth", 4).unwrap();
    write(&mut server, "width", 1 << 20).unwrap();
    let larger = Replacement { params: Some(sketch(1 << 20, 8).params), ..Replacement::default() };
    assert!(server.functions.replace(&server.engine, a, &counts, &larger, None).is_err());
    // The other 32 MiB are left, and all of it once the sketch is gone.
    let cache = |mib: u64| {
        let mut spec = spec("cache", "memcached-cache");
        spec.params = vec![("memory_mib".into(), mib.into())];
        spec
    };
    assert!(attach(&mut server, &cache(31)).is_err());
    server.functions.detach(&server.engine, a, &counts).unwrap();
    attach(&mut server, &cache(31)).unwrap();
    assert!(attach(&mut server, &sketch(1 << 20, 4)).is_err());
}

/// The code of a module counts, and comes back.
#[test]
fn the_code_of_a_module_counts() {
    let _alone = alone();
    let mut server = engine();
    let [a, _] = users();
    let regions = server.topology().region_bytes_of("a").div_ceil(1 << 20);
    // The instances take 12 MiB.
    let limited = Tenant { memory_mib: regions + 13, ..tenants().remove(0) };
    server.put_tenant(Caller::engine(), limited, false).unwrap();
    let module = |bytes: usize| {
        let text = format!(
            r#"(module (memory (export "memory") 24) (data (i32.const 0) "{}")
                (func (export "serval_abi") (result i32) (i32.const 1))
                (func (export "serval_requests") (param i32 i32 i32 i32) (result i32) (i32.const 0)))"#,
            "x".repeat(bytes)
        );
        wat::parse_str(text).unwrap()
    };
    let mut spec = spec("f", "/f.wasm");
    spec.memory_mib = 4;
    let attach = |server: &mut Server, bytes: usize| {
        let module = Some(module(bytes));
        server
            .functions
            .attach_new(&server.engine, a, "of-a", &spec, module, &Place::Default)
            .map(drop)
    };
    let refused = attach(&mut server, 1_400_000).unwrap_err().to_string();
    assert!(refused.contains("may use"), "{refused}");
    for _ in 0..3 {
        attach(&mut server, 200_000).unwrap();
        server.functions.detach(&server.engine, a, &named("of-a", "f")).unwrap();
    }
}

/// Ports of a tenant are in its network namespace, with addresses that another tenant has outside.
#[test]
fn ports_are_opened_in_the_network_namespace_of_their_tenant() {
    let _alone = alone();
    let Some(network) = Network::new() else {
        println!("SKIPPED: network namespaces are refused here (unshare --net), or there is no ip");
        return;
    };
    let path = network.path();
    let mut tenants = tenants();
    tenants[1].confinement.netns = Some(path.clone());
    let mut all = services();
    // A port that is free in the new namespace, where nothing else is, and taken outside.
    let taken = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
    let there = taken.local_addr().unwrap();
    for listen in &mut all[1].listen {
        listen.address = there;
    }
    let topology = Topology { tenants, ..topology(all) };
    let mut server = start(topology.clone());
    assert_eq!(address(&server, 2), there);
    let client = sys::netns::within(&path, || udp_client(there)).unwrap();
    assert_eq!(ask(&client, b"inside"), b"inside");
    assert_eq!(ask(&udp_client(address(&server, 0)), b"outside"), b"outside");
    assert_eq!(server.metrics().service(1).replied, 1);
    // The namespace cannot change under the ports.
    let mut elsewhere = topology;
    elsewhere.tenants[1].confinement.netns = None;
    let why = server.change(elsewhere.clone(), &never).unwrap_err().to_string();
    assert!(why.contains("netns") && why.contains("restart"), "{why}");
    // One that is not there is named.
    drop(server);
    elsewhere.tenants[1].confinement.netns = Some("/run/netns/not-there".into());
    let why = Server::start(elsewhere).err().expect("it is refused").to_string();
    assert!(why.contains("not-there") && why.contains("ip netns add"), "{why}");
    assert_eq!(why.lines().count(), 1);
}
