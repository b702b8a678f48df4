//! Changes while a worker is inside a long kernel. Their time limits are shorter than usual.

use std::net::{SocketAddr, UdpSocket};
use std::time::{Duration, Instant};

use engine::topology::{
    Accelerator, AcceleratorKind, CpuPlacement, EngineSettings, Limits, Listen, STACK_KIB, Service,
};
use wire::nic::Transport;

use self::receive::{ask_again, receive};
use super::*;
use crate::base::engine::Timeouts;

#[path = "../../tests/common/receive.rs"]
mod receive;

const LONG: Duration = Duration::from_secs(20);

fn service(name: &str, kernel: &str) -> Service {
    let listen = Listen { transport: Transport::Udp, address: ([127, 0, 0, 1], 0).into() };
    Service::new(name, vec![listen], kernel)
}

fn client(server: &Server, service: usize) -> UdpSocket {
    let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
    socket.connect(server.addresses()[service].1.address).unwrap();
    socket.set_read_timeout(Some(LONG)).unwrap();
    socket
}

fn ask(server: &Server, service: usize) {
    let reply = ask_again(&client(server, service), b"are you there?", LONG);
    let reply = reply.unwrap_or_else(|error| {
        panic!("no reply ({error}): {:?}", server.metrics().service(service))
    });
    assert_eq!(reply.len(), 14);
}

/// A server with one worker that is inside the kernel of its second service for a while.
fn busy_worker() -> (Server, UdpSocket) {
    let mut slow = service("slow", "spin");
    slow.params = vec![("microseconds".into(), 2_000_000.0.into())];
    slow.request_timeout_ms = 60_000;
    let kind = AcceleratorKind::Cpu { placement: CpuPlacement::Worker, stack_kib: STACK_KIB };
    let topology = Topology {
        engine: EngineSettings { drain_ms: 10, ..EngineSettings::default() },
        limits: Limits::default(),
        accelerators: vec![Accelerator { name: "acc0".into(), kind }],
        services: vec![service("a", "echo"), slow],
        tenants: Vec::new(),
    };
    let mut server = Server::start(topology).unwrap();
    let short = Duration::from_millis(50);
    server.engine.timeouts = Timeouts { step: short, expiry: short };
    let client = client(&server, 1);
    client.send(b"takes long").unwrap();
    // The turn that counts it runs the kernel.
    let deadline = Instant::now() + LONG;
    while server.metrics().service(1).received == 0 {
        assert!(Instant::now() < deadline);
        std::thread::yield_now();
    }
    (server, client)
}

/// Adds another service, which must not get any of the leaked resources.
fn another_service_is_added(server: &mut Server) {
    server.engine.timeouts = Timeouts::default();
    let mut services = server.topology().services.clone();
    services.push(service("next", "echo"));
    let wanted = Topology { services, ..server.topology().clone() };
    let report = server.change(wanted, &|| false).unwrap();
    assert!(report.services.iter().all(|service| !service.left_behind), "{report:?}");
    let last = server.topology().services.len() - 1;
    ask(server, last);
    ask(server, 0);
    for service_slot in &server.engine.slots {
        let leaked = server.engine.leaked.iter().find(|leaked| leaked.slot == service_slot.slot);
        assert!(leaked.is_none(), "a leaked slot is reused");
        let mut kept = server.engine.leaked.iter().flat_map(|leaked| &leaked.ports);
        assert!(
            kept.all(|kept| service_slot.ports.iter().all(|(port, _)| port != kept)),
            "a leaked port is reused"
        );
    }
}

/// The kernel has returned: a change reclaims the leaked resources, which can be used again.
fn resources_are_reclaimed(server: &mut Server, address: SocketAddr) {
    let deadline = Instant::now() + LONG;
    let slots = server.topology().services[0].slots;
    for round in 0.. {
        let mut services = server.topology().services.clone();
        services[0].slots = slots << (round % 2);
        let wanted = Topology { services, ..server.topology().clone() };
        server.change(wanted, &|| false).unwrap();
        if server.engine.leaked.is_empty() {
            break;
        }
        assert!(Instant::now() < deadline, "it is not reclaimed");
    }
    assert_eq!(server.metrics().left_behind().len(), 0);
    let mut services = server.topology().services.clone();
    services.push(service("again", "echo"));
    services.last_mut().unwrap().listen[0].address = address;
    let wanted = Topology { services, ..server.topology().clone() };
    server.change(wanted, &|| false).unwrap();
    ask(server, server.topology().services.len() - 1);
}

#[test]
fn a_failed_install_on_a_busy_worker_is_reported_and_its_resources_are_not_reused() {
    let (mut server, slow) = busy_worker();
    let mut services = server.topology().services.clone();
    services.push(service("b", "echo"));
    let free = UdpSocket::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    services.last_mut().unwrap().listen[0].address = free;
    let wanted = Topology { services, ..server.topology().clone() };
    let error = server.change(wanted, &|| false).unwrap_err();
    assert!(matches!(error, ChangeError::Stuck(_)), "{error}");
    assert_eq!(server.topology().services.len(), 2, "nothing has changed");
    assert_eq!(*server.metrics().left_behind(), ["b".to_owned()]);
    assert_eq!(receive(&slow, &mut [0; 64]).expect("the kernel returns"), 10);
    let leaked = &server.engine.leaked[0];
    assert_eq!((server.engine.leaked.len(), leaked.ports.len()), (1, 1));
    another_service_is_added(&mut server);
    resources_are_reclaimed(&mut server, free);
}

#[test]
fn resources_of_a_removed_service_on_a_busy_worker_are_reported_and_not_reused() {
    let (mut server, slow) = busy_worker();
    let address = server.addresses()[1].1.address;
    let services = server.topology().services[..1].to_vec();
    let wanted = Topology { services, ..server.topology().clone() };
    let report = server.change(wanted, &|| false).unwrap();
    assert!(report.services[1].left_behind, "{report:?}");
    assert_eq!(*server.metrics().left_behind(), ["slow".to_owned()]);
    assert_eq!(server.metrics().services().len(), 1);
    assert_eq!((server.engine.leaked.len(), server.engine.leaked[0].ports.len()), (1, 1));
    another_service_is_added(&mut server);
    resources_are_reclaimed(&mut server, address);
    drop(slow);
}
