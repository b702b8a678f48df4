//! What the thread does with seats, without the thread.

use super::*;
use engine::topology::{Accelerator, DeviceSpec, EngineSettings, Limits, STACK_KIB};
use mqueue::abi::ABI_VERSION;
use sys::local::LocalSocket;
use wire::attach::Hello;

/// The accelerator `own` of the service `s`, whose runtimes the engine starts or lets attach.
fn topology(launch: Launch) -> Topology {
    on_gpu(launch, None)
}

fn on_gpu(launch: Launch, gpu: Option<u64>) -> Topology {
    let device = match gpu {
        Some(gpu) => runtime::kinds::device_spec("cuda", &[("gpu".to_owned(), gpu)]).unwrap(),
        None => DeviceSpec::host(),
    };
    let kind = AcceleratorKind::Process { launch, heartbeat_ms: 1000, device };
    Topology {
        engine: EngineSettings::default(),
        limits: Limits::default(),
        accelerators: vec![Accelerator { name: "own".into(), kind }],
        services: vec![Service::new("s", Vec::new(), "echo")],
    }
}

/// The engine starts this program, which says nothing.
fn started(program: &str) -> Launch {
    Launch::Engine {
        program: Some(program.into()),
        threads: 1,
        cores: Vec::new(),
        stack_kib: STACK_KIB,
    }
}

fn desk() -> Desk {
    Desk {
        lobby: Lobby::new(MESSAGE_BYTES_MAX),
        seats: BTreeMap::new(),
        seated: 0,
        users: Vec::new(),
        fabric: engine::Fabric::new(vec![Box::new(|| ())], 4),
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
        file: None,
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
    let topology = topology(started("/bin/false"));
    let mut desk = desk();
    seat(&mut desk, &topology, 0);
    assert!(desk.seats[&1].next_try.is_some(), "its first is to be started");
    change_doors(&mut desk, &topology, vec![0]);
    desk.look_after_all();
    assert_eq!(desk.processes, 0);
}

#[test]
fn pauses_grow_up_to_a_limit_and_begin_anew_after_a_life_that_lasted() {
    let seconds = Duration::from_secs;
    let outside = Launch::External { attach: "own".into() };
    for (launch, longest) in [(started("/bin/false"), seconds(5)), (outside, seconds(1))] {
        let mut desk = desk();
        seat(&mut desk, &topology(launch), 0);
        let seat = desk.seat(1);
        let mut expected = Duration::from_millis(100);
        for _ in 0..10 {
            assert_eq!(seat.pause(seconds(9), false), expected);
            expected = (2 * expected).min(longest);
        }
        assert_eq!(expected, longest);
        // A planned end is none of those.
        assert_eq!(seat.pause(seconds(9), true), Duration::from_millis(100));
        assert_eq!(seat.pause(seconds(9), false), longest);
        assert_eq!(seat.pause(seconds(10), false), Duration::from_millis(100));
        assert_eq!(seat.pause(seconds(9), false), Duration::from_millis(200));
    }
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
fn each_that_has_failed_is_named_with_its_own_reason() {
    let reasons = |tell: Sender<First>, first, patience| {
        for name in ["a", "b", "c"] {
            tell.send(First::Awaited(name.into())).unwrap();
        }
        tell.send(First::Told("a".into(), Err("x".into()))).unwrap();
        tell.send(First::Told("b".into(), Err("y".into()))).unwrap();
        (Awaited { first, patience }, tell)
    };
    let pair = |name: &str, why: &str| (name.to_owned(), why.to_owned());
    let (tell, first) = mpsc::channel();
    let (awaited, tell) = reasons(tell, first, START_PATIENCE);
    tell.send(First::Told("c".into(), Ok(()))).unwrap();
    drop(tell);
    let all = awaited.wait(&mut || false).unwrap_err().reasons();
    assert_eq!(all, [pair("a", "x"), pair("b", "y")]);
    // One that is still on its way is not waited for as long as if none had failed.
    let (tell, first) = mpsc::channel();
    let (awaited, tell) = reasons(tell, first, 1000 * START_PATIENCE);
    let all = awaited.wait(&mut || false).unwrap_err().reasons();
    assert_eq!(all, [pair("a", "x"), pair("b", "y"), pair("c", STILL_STARTING)]);
    drop(tell);
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
    let mut desk = desk();
    seat(&mut desk, &topology(started("/bin/false")), 0);
    desk.remove(1);
    desk.hear(1);
}

/// Two services on a GPU whose blocks are about to run in one process.
fn starting_together(desk: &mut Desk) {
    desk.processes += 1;
    let (socket, _) = LocalSocket::pair().unwrap();
    let (socket, until) = (Arc::new(socket), Instant::now() + START_PATIENCE);
    for id in 1..=2 {
        let process = desk.processes;
        let seat = desk.seat(id);
        seat.process = process;
        seat.state = State::Starting { socket: socket.clone(), until };
    }
}

fn alone(desk: &Desk) -> [bool; 2] {
    [1, 2].map(|id| desk.seats[&id].alone)
}

fn lost() -> Ending {
    Ending::lost("lost", "its process was ended by signal 9 (SIGKILL)")
}

#[test]
fn who_was_refused_together_is_alone_until_one_of_them_comes_or_leaves() {
    let topology = on_gpu(started("/bin/false"), Some(0));
    let mut desk = desk();
    (0..2).for_each(|slot| seat(&mut desk, &topology, slot));
    change_doors(&mut desk, &topology, Vec::new());
    starting_together(&mut desk);
    desk.end(1, Ending::told("refused", "they do not all fit".into()));
    assert_eq!(alone(&desk), [true; 2]);
    // A change of something else.
    change_doors(&mut desk, &topology, Vec::new());
    seat(&mut desk, &on_gpu(started("/bin/false"), Some(1)), 2);
    change_doors(&mut desk, &topology, Vec::new());
    assert_eq!(alone(&desk), [true; 2]);
    // A third one comes on the same GPU, and its coming is not certain; it goes again without having come.
    seat(&mut desk, &topology, 3);
    assert_eq!(alone(&desk), [true; 2]);
    order(&mut desk, Order::Leave(3, mpsc::channel().0));
    assert_eq!(alone(&desk), [true; 2]);
    assert!(desk.moves.is_empty(), "those who stay are left in peace");
    // It comes.
    seat(&mut desk, &topology, 3);
    change_doors(&mut desk, &topology, Vec::new());
    assert_eq!(alone(&desk), [false; 2]);
    starting_together(&mut desk);
    desk.end(1, Ending::told("refused", "they do not all fit".into()));
    // It leaves.
    change_doors(&mut desk, &topology, vec![3]);
    assert_eq!(alone(&desk), [true; 2]);
    order(&mut desk, Order::Leave(3, mpsc::channel().0));
    assert_eq!(alone(&desk), [false; 2]);
}

#[test]
fn who_was_lost_together_is_tried_together_once_more() {
    let topology = on_gpu(started("/bin/false"), Some(0));
    let mut desk = desk();
    (0..2).for_each(|slot| seat(&mut desk, &topology, slot));
    change_doors(&mut desk, &topology, Vec::new());
    starting_together(&mut desk);
    desk.end(1, lost());
    assert_eq!(alone(&desk), [false; 2]);
    starting_together(&mut desk);
    // They serve, so what happened before counts no longer.
    [1, 2].into_iter().for_each(|id| desk.begin_one(id));
    desk.end(1, lost());
    starting_together(&mut desk);
    desk.end(1, lost());
    assert_eq!(alone(&desk), [false; 2]);
    starting_together(&mut desk);
    desk.end(1, lost());
    assert_eq!(alone(&desk), [true; 2]);
}

#[test]
fn a_goodbye_ends_everybody_once_whatever_was_planned() {
    let topology = on_gpu(started("/bin/false"), Some(0));
    let mut desk = desk();
    (0..2).for_each(|slot| seat(&mut desk, &topology, slot));
    change_doors(&mut desk, &topology, Vec::new());
    starting_together(&mut desk);
    [1, 2].into_iter().for_each(|id| desk.begin_one(id));
    desk.moves.push(Move::Leave(0, mpsc::channel().0));
    desk.say_goodbye();
    assert!(desk.seats.is_empty(), "one of them was started anew");
}

fn sleeper() -> Child {
    std::process::Command::new("sleep").arg("60").spawn().unwrap()
}

#[test]
fn a_gpu_is_not_free_before_the_process_that_was_killed_is_gone() {
    let mut desk = desk();
    let here = on_gpu(started("/bin/false"), Some(0));
    seat(&mut desk, &here, 0);
    seat(&mut desk, &on_gpu(started("/bin/false"), Some(1)), 1);
    seat(&mut desk, &topology(started("/bin/false")), 2);
    let held = |desk: &Desk| [1, 2, 3].map(|id| desk.device_is_held(id));
    change_doors(&mut desk, &here, Vec::new());
    starting_together(&mut desk);
    desk.seat(2).process = 0;
    desk.begin_one(1);
    desk.seat(1).child = Some(sleeper());
    desk.end(1, Ending::reconfigured("it is to share its process with a service that came"));
    // Whether it has ended already nobody has looked yet.
    assert_eq!(held(&desk), [true, false, false]);
    desk.dying[0].until = Instant::now();
    assert_eq!(held(&desk), [false; 3], "it is waited for without an end");
    desk.dying[0].until += GOODBYE_PATIENCE;
    assert!(desk.device_is_held(1));
    desk.dying[0].child.wait().unwrap();
    desk.look_after_all();
    assert_eq!(held(&desk), [false; 3]);
}

#[test]
fn a_process_that_does_not_end_is_waited_for_with_an_end() {
    let mut children = vec![sleeper(), sleeper()];
    children[0].kill().unwrap();
    let stat = format!("/proc/{}/stat", children[0].id());
    while !std::fs::read_to_string(&stat).unwrap().contains(") Z ") {
        std::thread::sleep(Duration::from_millis(1));
    }
    let (stays, begin) = (children[1].id(), Instant::now());
    await_ends(&mut children, Duration::from_millis(500));
    assert!(begin.elapsed() >= Duration::from_millis(500), "{:?}", begin.elapsed());
    assert_eq!(children.iter().map(Child::id).collect::<Vec<_>>(), [stays]);
    children[0].kill().unwrap();
    await_ends(&mut children, Duration::from_secs(60));
    assert!(children.is_empty() && begin.elapsed() < Duration::from_secs(30));
}
