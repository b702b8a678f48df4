//! What the thread does with seats, without the thread.

use super::*;
use engine::topology::{Accelerator, EngineSettings, Limits};
use mqueue::abi::ABI_VERSION;
use wire::attach::Hello;

/// The accelerator `own` of the service `s`, whose runtimes the engine starts or lets attach.
fn topology(launch: Launch) -> Topology {
    let kind = AcceleratorKind::Process { launch, heartbeat_ms: 1000, gpu: None };
    Topology {
        engine: EngineSettings::default(),
        limits: Limits::default(),
        accelerators: vec![Accelerator { name: "own".into(), kind }],
        services: vec![Service::new("s", Vec::new(), "echo")],
    }
}

fn desk() -> Desk {
    Desk {
        lobby: Lobby::new(MESSAGE_BYTES_MAX),
        seats: BTreeMap::new(),
        seated: 0,
        users: Vec::new(),
        fabric: Fabric::new(vec![Box::new(|| ())], 4),
        heart: Heart::start().unwrap().into(),
        call: Arc::new(Call {
            bell: Bell::new().unwrap(),
            draining: AtomicBool::new(false),
            stop: AtomicBool::new(false),
            orders: Mutex::default(),
        }),
        leaving: Vec::new(),
        dying: Vec::new(),
        processes: 0,
        moves: Vec::new(),
        drain: Duration::ZERO,
    }
}

/// `desk` gets a seat for the service in `slot`.
fn seat(desk: &mut Desk, topology: &Topology, slot: u16) {
    let post = Post {
        slot,
        place: 0,
        service: topology.services[0].clone(),
        accelerator: topology.accelerators[0].clone(),
        workers: 1,
        told: Arc::new(AcceleratorLives::new("s", "own")),
    };
    let (start, _) = SeatStart::make(post, &desk.heart).unwrap();
    order(desk, Order::Seat(vec![(start, mpsc::channel().0)], false));
}

fn order(desk: &mut Desk, order: Order) {
    desk.call.orders.lock().unwrap().push(order);
    desk.obey();
}

fn change_doors(desk: &mut Desk, topology: &Topology, leaving: Vec<u16>) {
    let (names, new) = (Vec::new(), AttachDoors::default());
    let drain = Duration::ZERO;
    order(desk, Order::ChangeDoors { names, new, users: users(topology), leaving, drain });
}

#[test]
fn a_seat_without_a_next_life_starts_none_after_its_pause() {
    let launch =
        Launch::Engine { program: Some("/bin/false".into()), threads: 1, cores: Vec::new() };
    let topology = topology(launch);
    let mut desk = desk();
    seat(&mut desk, &topology, 0);
    assert!(desk.seats[&1].next_try.is_some(), "its first is to be started");
    change_doors(&mut desk, &topology, vec![0]);
    desk.look_after_all();
    assert_eq!(desk.processes, 0);
}

#[test]
fn a_runtime_that_comes_in_the_middle_of_a_change_is_told_so() {
    let topology = topology(Launch::External { attach: "own".into() });
    let mut desk = desk();
    let hello = |service: &str| Hello {
        abi_version: ABI_VERSION,
        process: 1,
        kind: "cpu".into(),
        service: service.into(),
        kernel: String::new(),
    };
    seat(&mut desk, &topology, 0);
    change_doors(&mut desk, &topology, Vec::new());
    assert_eq!(desk.choose("own", &hello("")), Ok(1));
    assert!(desk.choose("own", &hello("t")).is_err() && !desk.changes("own", &hello("t")));
    change_doors(&mut desk, &topology, vec![0]);
    for service in ["", "s"] {
        assert!(desk.choose("own", &hello(service)).is_err());
        assert!(desk.changes("own", &hello(service)), "its next version comes");
    }
    seat(&mut desk, &topology, 1);
    assert_eq!(desk.choose("own", &hello("s")), Ok(2));
    assert!(!desk.changes("own", &hello("s")));
    // Its last one leaves, and no other is to come.
    desk.users.clear();
    assert!(!desk.changes("own", &hello("s")));
}

#[test]
fn who_has_not_told_in_time_is_named() {
    let (tell, first) = mpsc::channel();
    for name in ["a", "b", "c"] {
        tell.send(First::Awaited(name.into())).unwrap();
    }
    tell.send(First::Told("b".into(), Ok(()))).unwrap();
    let awaited = Awaited { first, patience: Duration::from_millis(100) };
    let reasons = awaited.wait(&mut || false).unwrap_err().reasons();
    let names: Vec<_> = reasons.iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!(names, ["a", "c"]);
    assert!(reasons[0].1.contains("no sign of life"), "{reasons:?}");
}

#[test]
fn who_comes_waits_for_as_long_as_others_may_be_held() {
    let runtimes = Runtimes { call: desk().call, thread: None };
    let drain = Duration::from_secs(600);
    let awaited = runtimes.seat_each(vec![Vec::new()], drain);
    assert!(awaited[0].patience >= drain + START_PATIENCE);
}

#[test]
fn a_seat_that_has_gone_since_it_spoke_is_not_heard() {
    let launch =
        Launch::Engine { program: Some("/bin/false".into()), threads: 1, cores: Vec::new() };
    let mut desk = desk();
    seat(&mut desk, &topology(launch), 0);
    desk.remove(1);
    desk.hear(1);
}
