//! Services on accelerators that run in processes of their own are added, changed and removed while others are
//! asked all the time.

mod common;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use common::change::{Askers, change, change_under_load, message, never, service};
use common::*;
use engine::topology::{
    Accelerator, AcceleratorKind, DeviceSpec, Launch, STACK_KIB, Service, Topology,
};
use server::{Server, ServiceAction};
use wire::DropReason;

/// A path that no other test uses.
fn path(name: &str) -> PathBuf {
    std::env::temp_dir().join(format!("serval-reload-{}-{name}", std::process::id()))
}

fn launched(name: &str) -> Accelerator {
    let program = Some(env!("CARGO_BIN_EXE_serval").into());
    let launch = Launch::Engine { program, threads: 1, cores: Vec::new(), stack_kib: STACK_KIB };
    let kind =
        AcceleratorKind::Process { launch, heartbeat_ms: 20_000, device: DeviceSpec::host() };
    Accelerator { name: name.into(), kind }
}

fn external(name: &str, attach: PathBuf) -> Accelerator {
    let launch = Launch::External { attach };
    let kind =
        AcceleratorKind::Process { launch, heartbeat_ms: 20_000, device: DeviceSpec::host() };
    Accelerator { name: name.into(), kind }
}

/// `a` is on the workers' own cores.
fn with(accelerator: Accelerator, mut services: Vec<Service>) -> Topology {
    services.insert(0, service("a", vec![udp(), tcp()], "echo"));
    let mut topology = topology(services);
    topology.accelerators.push(accelerator);
    topology
}

/// A service on the second accelerator.
fn apart(name: &str) -> Service {
    let mut service = service(name, vec![udp(), tcp()], "echo");
    service.accelerators = vec![1];
    service
}

/// The processes of this test program that run a service's kernel.
fn runtimes_of(service: &str) -> Vec<u32> {
    let mut found = children(std::process::id());
    found.retain(|runtime| {
        let maps = fs::read_to_string(format!("/proc/{runtime}/maps")).unwrap_or_default();
        maps.contains(&format!("serval:{service}:apart:"))
    });
    found
}

#[test]
fn other_services_lose_nothing_while_runtimes_start_and_end() {
    let _alone = alone();
    // `other` is on the accelerator on which `b` is added, changed and removed.
    let server = start(with(launched("apart"), Vec::new()));
    change_under_load(server, 12, &[1]);
    assert_eq!(runtimes_of("b"), [0; 0], "a runtime is left behind");
}

#[test]
fn a_service_that_moves_between_processes_and_the_engine_does_not_affect_others() {
    let _alone = alone();
    let mut topology = with(launched("apart"), Vec::new());
    topology.engine.workers = 2;
    change_under_load(start(topology), 12, &[1, 0, 1]);
}

#[test]
fn a_service_whose_runtime_is_replaced_loses_nothing_itself() {
    let _alone = alone();
    let mut server = start(with(launched("apart"), vec![apart("other"), apart("b")]));
    let others = Askers::start(address(&server, 2), address(&server, 3));
    let own = Askers::start(address(&server, 4), address(&server, 5));
    let runtime = runtimes_of("other");
    for round in 0..5 {
        let mut services = server.topology().services.clone();
        services[2].mqueues = 1 + round % 3;
        services[2].slots = 32 << (round % 2);
        let before = runtimes_of("b");
        let actions = change(&mut server, services);
        assert_eq!(actions[1].1, ServiceAction::Unchanged);
        assert_eq!(
            actions[2].1,
            ServiceAction::Changed { keeps_connections: true, keeps_memory_clients: true }
        );
        let after = runtimes_of("b");
        assert_eq!(after.len(), 1, "one runtime");
        assert_ne!(before, after, "another one");
        own.go_on();
        others.go_on();
    }
    assert_eq!(runtimes_of("other"), runtime, "the runtime of the other service is the same");
    let lives = server.metrics().runtimes();
    let life = lives.iter().find(|life| life.service == "b").unwrap();
    assert_eq!((life.generation(), life.is_up(), life.last_end()), (6, true, "changed"));
    let answered = [others, own].map(Askers::finish);
    assert_accounts(&server);
    for (service, answered) in [1, 2].into_iter().zip(answered) {
        let counted = server.metrics().service(service);
        assert_eq!((counted.received, counted.replied), (answered, answered));
    }
    let a = server.topology().services[..1].to_vec();
    change(&mut server, a);
    assert_eq!(runtimes_of("b"), [0; 0], "it is gone when the change is done");
    assert_eq!(server.metrics().runtimes().len(), 0, "what left is not shown");
    assert!(server.shutdown().is_clean());
}

#[test]
fn a_runtime_that_does_not_start_changes_nothing() {
    let _alone = alone();
    let mut server = start(with(launched("apart"), vec![apart("b")]));
    let askers = Askers::start(address(&server, 2), address(&server, 3));
    // This program tries no libraries, so it is the runtime that finds out.
    let library = build_kernel("device/tests/misbehave.cpp");
    askers.go_on();
    let resources = (sys::process::open_descriptors(), change::threads());
    let good = server.topology().clone();
    let mut wanted = good.clone();
    wanted.services[1].kernel = format!("{library}:no_such_kernel");
    wanted.services.push(apart("c"));
    let error = server.change(wanted, &never).unwrap_err().to_string();
    assert!(error.contains("service \"b\": its runtime did not start"), "{error}");
    assert_eq!(server.topology().services, good.services);
    assert_eq!(runtimes_of("c"), [0; 0], "what had started is ended");
    askers.go_on();
    eventually("all of it is given back", || {
        (sys::process::open_descriptors(), change::threads()) == resources
    });
    let answered = askers.finish();
    assert_accounts(&server);
    assert_eq!(server.metrics().service(1).replied, answered);
    assert!(server.shutdown().is_clean());
}

/// `serval attach`, again and again.
fn attach(path: &Path) -> Peer {
    let mut command = Command::new(env!("CARGO_BIN_EXE_serval"));
    Peer::start(command.arg("attach").arg(path).stderr(Stdio::null()), "cargo builds it")
}

/// Asks without waiting for answers, until told to stop.
fn flood(server: std::net::SocketAddr, stop: &AtomicBool) {
    let client = udp_client(server);
    while !stop.load(Ordering::Relaxed) {
        client.send(&message(7)).unwrap();
        std::thread::sleep(Duration::from_micros(500));
    }
}

#[test]
fn external_runtimes_are_replaced_while_ports_stay_open() {
    let _alone = alone();
    let (first, second) = (path("first"), path("second"));
    // Room for what comes while a runtime has no core: only what comes meanwhile is to be lost.
    let b = Service { slots: 1024, ..apart("b") };
    let mut server = start(with(external("apart", first.clone()), vec![b]));
    let askers = Askers::start(address(&server, 0), address(&server, 1));
    let runtime = attach(&first);
    answers_again(address(&server, 2), 1);
    let (stop, flooded) = (AtomicBool::new(false), address(&server, 2));
    std::thread::scope(|scope| {
        scope.spawn(|| flood(flooded, &stop));
        let _stop = Stop(&stop);
        // Some may have come before the runtime.
        let early = server.metrics().service(1).dropped_requests();
        let before = server.metrics().service(1).replied;
        eventually("it is answered", || server.metrics().service(1).replied > before + 20);
        let mut services = server.topology().services.clone();
        services[1].slots = 2048;
        change(&mut server, services);
        // provokes: reconfiguring
        eventually("some came meanwhile", || dropped(&server, 1, DropReason::Reconfiguring) > 0);
        let before = server.metrics().service(1).replied;
        eventually("it is answered again", || server.metrics().service(1).replied > before + 20);
        let counted = server.metrics().service(1);
        let lost = counted.dropped(DropReason::Reconfiguring);
        assert_eq!(counted.dropped_requests() - early, lost, "for no other reason: {counted:?}");
        // No runtime attaches at the accelerator's next path.
        let mut wanted = server.topology().clone();
        wanted.accelerators[1] = external("apart", second.clone());
        let report = server.change(wanted, &never).unwrap();
        assert!(report.settings.contains(&"accelerator"), "{report:?}");
        assert!(!first.exists() && second.exists(), "the old door closes, the new one is open");
        drop(runtime);
        let _next = attach(&second);
        let before = server.metrics().service(1).replied;
        eventually("the next one answers", || server.metrics().service(1).replied > before + 20);
    });
    // Without the service no runtime is accepted, without the accelerator there is no listener.
    let mut wanted = server.topology().clone();
    wanted.services.truncate(1);
    server.change(wanted.clone(), &never).unwrap();
    assert!(second.exists());
    wanted.accelerators.truncate(1);
    let report = server.change(wanted, &never).unwrap();
    assert_eq!(report.settings, ["accelerator"]);
    eventually("the door closes", || !second.exists());
    let answered = askers.finish();
    assert_accounts(&server);
    let a = server.metrics().service(0);
    assert_eq!((a.received, a.replied, a.dropped_requests()), (answered, answered, 0));
    assert!(server.shutdown().is_clean());
}

/// Whatever is left of a runtime that does not end is made to.
#[test]
fn a_suspended_runtime_is_ended_with_its_service() {
    let _alone = alone();
    let mut server: Server = start(with(launched("apart"), vec![apart("b")]));
    answers_again(address(&server, 2), 1);
    let [runtime] = runtimes_of("b")[..] else { panic!("one runtime") };
    signal(runtime, "STOP");
    let a = server.topology().services[..1].to_vec();
    change(&mut server, a);
    assert_eq!(runtimes_of("b"), [0; 0], "SIGKILL ends a process that stands still");
    assert_eq!(ask(&udp_client(address(&server, 0)), &message(1)), message(1));
    assert!(server.shutdown().is_clean());
}
