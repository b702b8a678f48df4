//! Generations of accelerators that end at a bad moment, or fail to start: with several workers, without replies,
//! during a drain, and the time-outs of silent peers.

mod common;

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::sync::atomic::AtomicBool;
use std::thread;
use std::time::{Duration, Instant};

use common::runtimes::*;
use common::*;
use engine::topology::{
    Accelerator, AcceleratorKind, DeviceSpec, Launch, Replies, STACK_KIB, Service,
};
use runtime::{self, AttachRequest, HostDevice};
use server::Server;
use sys::local::LocalListener;
use wire::DropReason;

#[test]
fn several_workers_lose_a_runtimes_requests_and_keep_serving() {
    let config = process("apart", "threads = 2")
        + &service("slow", "apart", "delay", &format!("mqueues = 6\n{SLOW}"));
    let served = Served::start("lives-workers", "workers = 3", &config);
    under_load(&served, "slow", || {
        for round in 1..=3 {
            signal(runtime_of(&served), "KILL");
            eventually("the next life begins", || {
                life(&served, "up", "slow", "apart") == 1
                    && life(&served, "generation", "slow", "apart") == round + 1
            });
        }
    });
    assert!(served.dropped("slow", DropReason::AcceleratorLost) > 0);
    assert_eq!(served.dropped("slow", DropReason::RequestTimeout), 0);
    assert_eq!(served.drain(), 0);
}

#[test]
fn requests_without_replies_are_consumed_or_lost_with_their_generation() {
    let at = path("none");
    let server = engine_at(&at, 60_000, |service| {
        service.mqueues = 1;
        service.replies = Replies::None;
    });
    let client = udp_client(address(&server, 0));
    let counted = || server.metrics().service(0);
    for round in 1..=2 {
        let (runtime, mut place) = Fake::serve(&at);
        eventually("it serves", || is_up(&server));
        (0..5).for_each(|n| assert_eq!(client.send(&pattern(20, n)).unwrap(), 20));
        (0..3).for_each(|_| _ = place.region.request());
        eventually("all are with it", || counted().accepted == 5 * round);
        drop(runtime);
        eventually("its life ends", || !is_up(&server));
        // The workers get the event a turn later.
        eventually("three were taken and two lost", || {
            let lost = dropped(&server, 0, DropReason::AcceleratorLost);
            (counted().consumed, lost) == (3 * round, 2 * round)
        });
    }
    assert_accounts(&server);
    assert_eq!(counted().replied, 0);
    assert!(server.shutdown().is_clean());
}

#[test]
fn a_drain_ends_at_any_stage_of_a_restart() {
    let config = process("apart", "") + &service("slow", "apart", "delay", SLOW);
    // The runtime has ended unnoticed, its generation has ended, the next one starts.
    for (moment, milliseconds) in [0, 20, 120, 300].into_iter().enumerate() {
        let served = Served::start(&format!("lives-drain-{moment}"), "workers = 2", &config);
        let client = udp_client(served.services[0][0]);
        for number in 0..50_u64 {
            client.send(&number.to_le_bytes()).unwrap();
        }
        signal(runtime_of(&served), "KILL");
        thread::sleep(Duration::from_millis(milliseconds));
        let before = Instant::now();
        let (code, last) = served.finish();
        // Requests that were lost with the runtime have a reason: there is nothing left that a drain could not
        // answer.
        assert_eq!(code, 0, "after {milliseconds} ms: {last}");
        assert!(before.elapsed() < PATIENCE);
    }
}

/// These time-outs are tens of seconds: all of them are tested at the same time.
#[test]
fn silent_peers_time_out() {
    thread::scope(|scope| {
        let trials = [
            scope.spawn(a_runtime_never_gets_ready),
            scope.spawn(a_process_never_says_hello),
            scope.spawn(an_engine_never_answers),
        ];
        for trial in trials {
            trial.join().unwrap();
        }
    });
}

/// A runtime takes a slot and does not start: the next one gets the slot.
fn a_runtime_never_gets_ready() {
    let at = path("never-ready");
    let server = engine_at(&at, 60_000, |_| {});
    let (silent, ..) = Fake::come(&at);
    let lives = server.metrics().runtimes();
    assert_eq!(lives[0].ended(), 0, "it may take its time");
    in_the_end("its patience ends", || lives[0].ended() == 1);
    assert_eq!(lives[0].last_end(), "silent");
    assert!(silent.is_closed());
    let (_next, place) = Fake::serve(&at);
    assert_eq!(place.offer.generation, 2);
    eventually("the next one serves", || is_up(&server));
}

/// A process that the engine starts and that is not a runtime is an error of the start.
fn a_process_never_says_hello() {
    let program = path("mute");
    fs::write(&program, "#!/bin/sh\nexec sleep 300\n").unwrap();
    fs::set_permissions(&program, fs::Permissions::from_mode(0o700)).unwrap();
    let mut topology = topology(vec![Service::new("echo", vec![udp()], "echo")]);
    let launch = Launch::Engine {
        program: Some(program.clone()),
        threads: 0,
        cores: Vec::new(),
        stack_kib: STACK_KIB,
    };
    let kind = AcceleratorKind::Process { launch, heartbeat_ms: 1000, device: DeviceSpec::host() };
    topology.accelerators = vec![Accelerator { name: "mute".into(), kind }];
    let error = Server::start(topology).err().expect("the start fails").to_string();
    assert!(error.contains("sent no hello within"), "{error}");
    let left = children(std::process::id()).into_iter().filter(|process| {
        let line = fs::read_to_string(format!("/proc/{process}/cmdline")).unwrap_or_default();
        line.starts_with("sleep")
    });
    assert_eq!(left.count(), 0, "its process is not left behind");
    fs::remove_file(program).unwrap();
}

/// A runtime disconnects from an engine that does not answer its hello.
fn an_engine_never_answers() {
    let at = path("mute-engine");
    let _listener = LocalListener::bind(&at).unwrap();
    let cancel = AtomicBool::new(false);
    let mut device = HostDevice::new(1, Vec::new());
    let error = runtime::attach(&at, &AttachRequest::default(), &mut device, true, &cancel);
    let error = error.expect_err("a silent engine is given up").to_string();
    assert!(error.contains("gave no answer for"), "{error}");
}

fn in_the_end(what: &str, condition: impl Fn() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(90);
    while !condition() {
        assert!(Instant::now() < deadline, "not in time: {what}");
        thread::sleep(Duration::from_millis(20));
    }
}
