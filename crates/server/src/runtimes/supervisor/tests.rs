//! The state of the supervisor's thread, tested without the thread.

use std::process::Child;

use super::slot::{EndCause, State};
use super::starts::STILL_STARTING;
use super::state::Regroup;
use super::state::wait_for_exits;
use super::*;
use engine::metrics::RuntimeMetrics;
use engine::topology::{Accelerator, DeviceSpec, EngineSettings, Limits, STACK_KIB};
use mqueue::abi::ABI_VERSION;
use sys::local::LocalSocket;
use wire::attach::Hello;

/// The accelerator `own` of the service `s`, whose runtimes are started by the engine or attach.
fn topology(launch: Launch) -> Topology {
    on_gpu(launch, None)
}

fn on_gpu(launch: Launch, gpu: Option<u64>) -> Topology {
    let device = match gpu {
        Some(gpu) => {
            runtime::kinds::device_spec("cuda", &[("gpu".to_owned(), gpu.to_string())]).unwrap()
        }
        None => DeviceSpec::host(),
    };
    let kind = AcceleratorKind::Process { launch, heartbeat_ms: 1000, device };
    Topology {
        engine: EngineSettings::default(),
        limits: Limits::default(),
        accelerators: vec![Accelerator { name: "own".into(), kind }],
        services: vec![Service::new("s", Vec::new(), "echo")],
        tenants: Vec::new(),
    }
}

/// The engine starts this program, which sends no message.
fn started(program: &str) -> Launch {
    Launch::Engine {
        program: Some(program.into()),
        threads: 1,
        cores: Vec::new(),
        stack_kib: STACK_KIB,
    }
}

fn state() -> SupervisorState {
    let shared = Shared::new().unwrap();
    let fabric = engine::Fabric::new(vec![Box::new(|| ())], 4);
    SupervisorState::new(fabric, HeartbeatWriter::start().unwrap().into(), shared.into())
}

/// Adds a runtime slot to `state`, for the service in `slot`.
fn runtime(state: &mut SupervisorState, topology: &Topology, slot: u16) {
    let spec = RuntimeSpec {
        slot,
        position: 0,
        service: topology.services[0].clone(),
        accelerator: topology.accelerators[0].clone(),
        workers: 1,
        file: None,
        metrics: Arc::new(RuntimeMetrics::new("s", "own")),
        confinement: engine::topology::Confinement::default(),
        transfers: None,
    };
    let (start, _) = PreparedRuntime::make(spec, &state.heartbeat_writer).unwrap();
    command(state, Command::Add(vec![(start, mpsc::channel().0)], false));
}

fn command(state: &mut SupervisorState, command: Command) {
    state.shared.commands.lock().unwrap().push(command);
    state.run_commands();
}

fn set_listeners(state: &mut SupervisorState, topology: &Topology, leaving: Vec<u16>) {
    let (names, new) = (Vec::new(), AttachListeners::default());
    let drain = Duration::ZERO;
    command(
        state,
        Command::SetListeners {
            names,
            new,
            service_accelerators: service_accelerators(topology),
            leaving,
            drain,
        },
    );
}

#[test]
fn a_runtime_slot_without_a_next_generation_starts_none_after_its_back_off() {
    let topology = topology(started("/bin/false"));
    let mut state = state();
    runtime(&mut state, &topology, 0);
    assert!(state.runtimes[&1].next_try.is_some(), "its first runtime is to be started");
    set_listeners(&mut state, &topology, vec![0]);
    state.check_all();
    assert_eq!(state.processes, 0);
}

#[test]
fn back_offs_grow_up_to_a_limit_and_are_reset_after_a_generation_that_lasted() {
    let seconds = Duration::from_secs;
    let outside = Launch::External { attach: "own".into() };
    for (launch, longest) in [(started("/bin/false"), seconds(5)), (outside, seconds(1))] {
        let mut state = state();
        runtime(&mut state, &topology(launch), 0);
        let runtime = state.runtime(1);
        let mut expected = Duration::from_millis(100);
        for _ in 0..10 {
            assert_eq!(runtime.next_back_off(seconds(9), false), expected);
            expected = (2 * expected).min(longest);
        }
        assert_eq!(expected, longest);
        // A planned end does not count.
        assert_eq!(runtime.next_back_off(seconds(9), true), Duration::from_millis(100));
        assert_eq!(runtime.next_back_off(seconds(9), false), longest);
        assert_eq!(runtime.next_back_off(seconds(10), false), Duration::from_millis(100));
        assert_eq!(runtime.next_back_off(seconds(9), false), Duration::from_millis(200));
    }
}

#[test]
fn a_runtime_that_attaches_during_a_change_is_asked_to_retry() {
    let topology = topology(Launch::External { attach: "own".into() });
    let mut state = state();
    let hello = |service: &str| Hello {
        abi_version: ABI_VERSION,
        process: 1,
        kind: "cpu".into(),
        service: service.into(),
        kernel: String::new(),
    };
    runtime(&mut state, &topology, 0);
    set_listeners(&mut state, &topology, Vec::new());
    assert_eq!(state.choose_slot("own", &hello(""), &[]), Ok(1));
    assert!(
        state.choose_slot("own", &hello("t"), &[]).is_err() && !state.changes("own", &hello("t"))
    );
    set_listeners(&mut state, &topology, vec![0]);
    for service in ["", "s"] {
        assert!(state.choose_slot("own", &hello(service), &[]).is_err());
        assert!(state.changes("own", &hello(service)), "its next version will be added");
    }
    runtime(&mut state, &topology, 1);
    assert_eq!(state.choose_slot("own", &hello("s"), &[]), Ok(2));
    assert!(!state.changes("own", &hello("s")));
    // The last one leaves, and there is no successor.
    state.service_accelerators.clear();
    assert!(!state.changes("own", &hello("s")));
}

/// A peer that names its kernel by a path that hangs waits alone; with too many of them further ones are asked to retry.
#[test]
fn a_path_that_hangs_stops_no_other_runtime() {
    static ANSWERS: AtomicBool = AtomicBool::new(false);
    let mut topology = topology(Launch::External { attach: "own".into() });
    topology.services[0].kernel = "kernels/own.so".into();
    let mut state = state();
    state.is_same_kernel = |configured, named| {
        let until = Instant::now() + Duration::from_secs(60);
        while !ANSWERS.load(Ordering::Relaxed) {
            assert!(Instant::now() < until, "the thread of the supervisor waits for a path");
            std::thread::sleep(Duration::from_millis(1));
        }
        (configured, named) == ("kernels/own.so", "/mnt/own.so")
    };
    runtime(&mut state, &topology, 0);
    set_listeners(&mut state, &topology, Vec::new());
    let come = |state: &mut SupervisorState, kernel: &str| {
        let (socket, peer) = LocalSocket::pair().unwrap();
        let (process, service) = (1, String::new());
        let (kind, kernel) = ("cpu".into(), kernel.to_owned());
        let hello = Hello { abi_version: ABI_VERSION, process, kind, service, kernel };
        let hello = wire::attach::FromRuntime::Hello(hello).encode();
        let listener_key = PeerOrigin::AttachPath("own".into());
        state.on_hello(HandshakePeer { listener_key, socket, hello });
        peer
    };
    let answer = |peer: &LocalSocket| {
        let mut bytes = [0; wire::attach::MESSAGE_BYTES_MAX];
        let len = peer.receive(&mut bytes).unwrap()?;
        Some(wire::attach::FromEngine::decode(&bytes[..len]).unwrap())
    };
    let waiting: Vec<_> = (0..LOOK_UPS_MAX)
        .map(|number| come(&mut state, if number == 0 { "/mnt/own.so" } else { "/mnt/other.so" }))
        .collect();
    let is_refused = |peer: &LocalSocket, why: &str| match answer(peer) {
        Some(wire::attach::FromEngine::Refuse(text)) => assert!(text.contains(why), "{text}"),
        other => panic!("{other:?}"),
    };
    is_refused(&come(&mut state, "/mnt/another.so"), "try again soon");
    // These need no look-up.
    is_refused(&come(&mut state, "builtin"), "they run kernels/own.so");
    assert!(waiting.iter().all(|peer| answer(peer).is_none()));
    let slot = state.runtime(1);
    assert!(matches!(slot.state, State::Vacant));
    ANSWERS.store(true, Ordering::Relaxed);
    let mut offered = false;
    while state.shared.look_ups.load(Ordering::Relaxed) > 0 || !offered {
        state.run_commands();
        offered = matches!(state.runtime(1).state, State::Starting { .. });
        std::thread::sleep(Duration::from_millis(1));
    }
    let first = answer(&waiting[0]);
    assert!(matches!(first, Some(wire::attach::FromEngine::Offer(_))), "{first:?}");
}

#[test]
fn a_runtime_that_does_not_report_in_time_is_named() {
    let (tell, first) = mpsc::channel();
    for name in ["a", "b", "c"] {
        tell.send(FirstStart::Pending(name.into())).unwrap();
    }
    tell.send(FirstStart::Result("b".into(), Ok(()))).unwrap();
    let awaited = PendingStarts { first, timeout: Duration::from_millis(100) };
    let reasons = awaited.wait(&mut || false).unwrap_err().reasons();
    let names: Vec<_> = reasons.iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!(names, ["a", "c"]);
    assert!(reasons[0].1.contains("did not respond"), "{reasons:?}");
}

#[test]
fn each_failed_runtime_is_named_with_its_own_reason() {
    let reasons = |tell: Sender<FirstStart>, first, timeout| {
        for name in ["a", "b", "c"] {
            tell.send(FirstStart::Pending(name.into())).unwrap();
        }
        tell.send(FirstStart::Result("a".into(), Err("x".into()))).unwrap();
        tell.send(FirstStart::Result("b".into(), Err("y".into()))).unwrap();
        (PendingStarts { first, timeout }, tell)
    };
    let pair = |name: &str, why: &str| (name.to_owned(), why.to_owned());
    let (tell, first) = mpsc::channel();
    let (awaited, tell) = reasons(tell, first, START_TIMEOUT);
    tell.send(FirstStart::Result("c".into(), Ok(()))).unwrap();
    drop(tell);
    let all = awaited.wait(&mut || false).unwrap_err().reasons();
    assert_eq!(all, [pair("a", "x"), pair("b", "y")]);
    // One that is still starting is not waited for as long as if none had failed.
    let (tell, first) = mpsc::channel();
    let (awaited, tell) = reasons(tell, first, 1000 * START_TIMEOUT);
    let all = awaited.wait(&mut || false).unwrap_err().reasons();
    assert_eq!(all, [pair("a", "x"), pair("b", "y"), pair("c", STILL_STARTING)]);
    drop(tell);
}

#[test]
fn a_new_runtime_waits_for_as_long_as_others_may_be_paused() {
    let runtimes = Supervisor { shared: state().shared, thread: None };
    let drain = Duration::from_secs(600);
    let awaited = runtimes.add_each(vec![Vec::new()], drain);
    assert!(awaited[0].timeout >= drain + START_TIMEOUT);
}

#[test]
fn messages_of_a_removed_runtime_slot_are_ignored() {
    let mut state = state();
    runtime(&mut state, &topology(started("/bin/false")), 0);
    state.remove(1);
    state.on_message(1);
}

/// Two services on a GPU whose blocks are about to run in one process.
fn starting_together(state: &mut SupervisorState) {
    state.processes += 1;
    let (socket, _) = LocalSocket::pair().unwrap();
    let (socket, until) = (Arc::new(socket), Instant::now() + START_TIMEOUT);
    for id in 1..=2 {
        let process = state.processes;
        let runtime = state.runtime(id);
        runtime.process = process;
        runtime.state = State::Starting { socket: socket.clone(), until };
    }
}

fn unshared(state: &SupervisorState) -> [bool; 2] {
    [1, 2].map(|id| state.runtimes[&id].unshared)
}

fn lost() -> EndCause {
    EndCause::lost("lost", "its process was ended by signal 9 (SIGKILL)")
}

#[test]
fn runtimes_refused_together_run_separately_until_one_is_added_or_removed() {
    let topology = on_gpu(started("/bin/false"), Some(0));
    let mut state = state();
    (0..2).for_each(|slot| runtime(&mut state, &topology, slot));
    set_listeners(&mut state, &topology, Vec::new());
    starting_together(&mut state);
    state.end_group(1, EndCause::reported("refused", "they do not all fit".into()));
    assert_eq!(unshared(&state), [true; 2]);
    // A change of another service.
    set_listeners(&mut state, &topology, Vec::new());
    runtime(&mut state, &on_gpu(started("/bin/false"), Some(1)), 2);
    set_listeners(&mut state, &topology, Vec::new());
    assert_eq!(unshared(&state), [true; 2]);
    // A third one is added on the same GPU, in a change that is not committed; then it is removed.
    runtime(&mut state, &topology, 3);
    assert_eq!(unshared(&state), [true; 2]);
    command(&mut state, Command::Remove(3, mpsc::channel().0));
    assert_eq!(unshared(&state), [true; 2]);
    assert!(state.regroups.is_empty(), "the others are not affected");
    // It is committed.
    runtime(&mut state, &topology, 3);
    set_listeners(&mut state, &topology, Vec::new());
    assert_eq!(unshared(&state), [false; 2]);
    starting_together(&mut state);
    state.end_group(1, EndCause::reported("refused", "they do not all fit".into()));
    // It is removed.
    set_listeners(&mut state, &topology, vec![3]);
    assert_eq!(unshared(&state), [true; 2]);
    command(&mut state, Command::Remove(3, mpsc::channel().0));
    assert_eq!(unshared(&state), [false; 2]);
}

#[test]
fn runtimes_lost_together_are_started_together_once_more() {
    let topology = on_gpu(started("/bin/false"), Some(0));
    let mut state = state();
    (0..2).for_each(|slot| runtime(&mut state, &topology, slot));
    set_listeners(&mut state, &topology, Vec::new());
    starting_together(&mut state);
    state.end_group(1, lost());
    assert_eq!(unshared(&state), [false; 2]);
    starting_together(&mut state);
    // They serve, so earlier failures count no longer.
    [1, 2].into_iter().for_each(|id| state.mark_serving(id));
    state.end_group(1, lost());
    starting_together(&mut state);
    state.end_group(1, lost());
    assert_eq!(unshared(&state), [false; 2]);
    starting_together(&mut state);
    state.end_group(1, lost());
    assert_eq!(unshared(&state), [true; 2]);
}

#[test]
fn shutdown_ends_every_runtime_once_despite_planned_changes() {
    let topology = on_gpu(started("/bin/false"), Some(0));
    let mut state = state();
    (0..2).for_each(|slot| runtime(&mut state, &topology, slot));
    set_listeners(&mut state, &topology, Vec::new());
    starting_together(&mut state);
    [1, 2].into_iter().for_each(|id| state.mark_serving(id));
    state.regroups.push(Regroup::Leave(0, mpsc::channel().0));
    state.shutdown();
    assert!(state.runtimes.is_empty(), "one of them was restarted");
}

fn sleeper() -> Child {
    std::process::Command::new("sleep").arg("60").spawn().unwrap()
}

#[test]
fn a_gpu_is_not_free_before_the_killed_process_has_ended() {
    let mut state = state();
    let here = on_gpu(started("/bin/false"), Some(0));
    runtime(&mut state, &here, 0);
    runtime(&mut state, &on_gpu(started("/bin/false"), Some(1)), 1);
    runtime(&mut state, &topology(started("/bin/false")), 2);
    let in_use = |state: &SupervisorState| [1, 2, 3].map(|id| state.device_is_in_use(id));
    set_listeners(&mut state, &here, Vec::new());
    starting_together(&mut state);
    state.runtime(2).process = 0;
    state.mark_serving(1);
    state.runtime(1).child = Some(sleeper());
    state.end_group(
        1,
        EndCause::reconfigured("it restarts to share its process with a new service"),
    );
    // It has not been checked yet whether the process has ended.
    assert_eq!(in_use(&state), [true, false, false]);
    state.killed[0].until = Instant::now();
    assert_eq!(in_use(&state), [false; 3], "the wait has no limit");
    state.killed[0].until += STOP_TIMEOUT;
    assert!(state.device_is_in_use(1));
    state.killed[0].child.wait().unwrap();
    state.check_all();
    assert_eq!(in_use(&state), [false; 3]);
}

#[test]
fn the_wait_for_a_process_that_does_not_end_is_limited() {
    let mut children = vec![sleeper(), sleeper()];
    children[0].kill().unwrap();
    let stat = format!("/proc/{}/stat", children[0].id());
    while !std::fs::read_to_string(&stat).unwrap().contains(") Z ") {
        std::thread::sleep(Duration::from_millis(1));
    }
    let (stays, begin) = (children[1].id(), Instant::now());
    wait_for_exits(&mut children, Duration::from_millis(500));
    assert!(begin.elapsed() >= Duration::from_millis(500), "{:?}", begin.elapsed());
    assert_eq!(children.iter().map(Child::id).collect::<Vec<_>>(), [stays]);
    children[0].kill().unwrap();
    wait_for_exits(&mut children, Duration::from_secs(60));
    assert!(children.is_empty() && begin.elapsed() < Duration::from_secs(30));
}
