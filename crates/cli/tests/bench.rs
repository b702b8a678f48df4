//! The measuring harness against a real server.

mod common;
#[path = "bench/trust.rs"]
mod trust;

use std::net::UdpSocket;
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};
use std::time::Duration;

use bench::{self, BenchError, Class, Mode, Plan, Report, Target, Void, Work};
use engine::topology::{Backend, Service};
use server::Server;
use wire::DropReason;
use wire::framing::Framing;
use wire::nic::Transport;

use common::faces::Memcached;
use common::{PATIENCE, Served, address, assert_accounts, start, tcp, topology, udp};

/// A path that no other test uses.
fn memory_port(work: &Work) -> PathBuf {
    std::env::temp_dir().join(format!("serval-bench-{}-{}", std::process::id(), kernel(work)))
}

fn kernel(work: &Work) -> String {
    work.to_string().split([':', '-']).next().unwrap().to_owned()
}

/// A service of `work` with a UDP and a TCP port.
fn serve(work: Work) -> Server {
    serve_at(&work, &[])
}

/// The same, and in shared memory.
fn serve_at(work: &Work, paths: &[PathBuf]) -> Server {
    let mut service = Service::new("a", vec![udp(), tcp()], &kernel(work));
    service.memory_ports = paths.to_vec();
    service.framing = match work {
        Work::Echo { .. } => Framing::LengthU16,
        Work::Sockperf { .. } => Framing::Sockperf,
        _ => Framing::Fixed(work.request_bytes() as u32),
    };
    start(topology(vec![service]))
}

fn plan(target: &Target, work: Work, window: usize) -> Plan {
    Plan {
        work,
        mode: Mode::Closed { window },
        warmup: Duration::from_millis(50),
        duration: Duration::from_millis(400),
        timeout: Some(PATIENCE),
        // What a busy machine does to a run is no fault of it.
        stolen_max: 1.0,
        ..Plan::new(target.clone())
    }
}

/// Whether the time per reply for which a part of the window was unused is less than the client's own work: between a reply and the next request
/// it may handle all others of the window.
fn is_its_own(report: &Report) -> bool {
    let Mode::Closed { window } = report.mode else { return false };
    let unused = (window as f64 - report.in_flight) * 1e9 / report.rate;
    (0.0..=window as f64 * report.client_busy_ns_per_message).contains(&unused)
}

fn sound(report: &Report) {
    // A client that had no core for long, or no time left, sends late, leaves part of its window unused and gets few
    // replies.
    let busy = |share: f64| report.stolen > share;
    let excused = match report.void() {
        None | Some(Void::Few(_)) => true,
        Some(Void::Unsent(share, _)) => busy(0.02_f64.min(share / 2.0)),
        // This client is not optimised: what it does between a reply and the next request counts, too.
        Some(Void::Little(..)) => busy(0.02) || report.client_busy > 0.8 || is_its_own(report),
        _ => false,
    };
    assert!(excused, "{report:?}");
    assert_eq!((report.wrong, report.duplicated, report.lost), (0, 0, 0), "{report:?}");
    assert!(report.replied > 0 && report.sent == report.replied, "{report:?}");
    let l = &report.latency;
    assert!(l.p50_ns <= l.p90_ns && l.p90_ns <= l.p99_ns && l.p999_ns <= l.max_ns, "{report:?}");
    if report.void().is_none() {
        assert!((0.9..=1.1).contains(&report.little), "{report:?}");
        assert!(report.client_busy > 0.0 && report.client_busy <= 1.0, "{report:?}");
    }
}

#[test]
fn every_class_and_mode_measures_a_real_server() {
    for work in [
        Work::Echo { bytes: 64 },
        Work::Sockperf { bytes: 100 },
        Work::Scale { numbers: 16 },
        Work::Lenet,
        Work::NumberedLenet,
    ] {
        let path = memory_port(&work);
        let server = serve_at(&work, std::slice::from_ref(&path));
        let (udp, tcp) = (Target::Udp(address(&server, 0)), Target::Tcp(address(&server, 1)));
        let shm = Target::Shm(path);
        for target in [&udp, &tcp, &shm] {
            for window in [1, 16] {
                sound(&bench::run(&plan(target, work.clone(), window)).unwrap());
            }
            let open = Plan { mode: Mode::Open { rate: 2000.0 }, ..plan(target, work.clone(), 1) };
            sound(&bench::run(&open).unwrap());
        }
        let burst = Plan { class: Some(Class::T2), ..plan(&udp, work.clone(), 64) };
        if work.has_identity() {
            sound(&bench::run(&burst).unwrap());
            let shared = Plan { connections: Some(3), ..plan(&udp, work, 64) };
            sound(&bench::run(&shared).unwrap());
        }
    }
}

/// Clients on several cores share one load: every request is in flight once.
#[test]
fn several_clients_share_the_load() {
    let work = Work::Echo { bytes: 64 };
    let path = std::env::temp_dir().join(format!("serval-bench-{}-shared", std::process::id()));
    let server = serve_at(&work, std::slice::from_ref(&path));
    let allowed = sys::affinity::allowed_cores().unwrap();
    let cores = vec![allowed[0], *allowed.last().unwrap(), allowed[0]];
    let (udp, tcp) = (Target::Udp(address(&server, 0)), Target::Tcp(address(&server, 1)));
    for target in [udp.clone(), tcp, Target::Shm(path)] {
        let shared = Plan { cores: cores.clone(), ..plan(&target, work.clone(), 8) };
        let report = bench::run(&shared).unwrap();
        sound(&report);
        assert!(report.in_flight <= 8.5, "{report:?}");
    }
    let shared = Plan { cores: cores.clone(), ..plan(&udp, work, 8) };
    let burst = Plan { class: Some(Class::T2), ..shared.clone() };
    sound(&bench::run(&burst).unwrap());
    let open = Plan { mode: Mode::Open { rate: 900.0 }, ..shared.clone() };
    let report = bench::run(&open).unwrap();
    // 360 arrivals are expected; three clients that ask all of it each would be 1080.
    assert!(report.sent < 700, "{report:?}");
}

#[test]
fn bursts_without_identity_need_the_order_kept() {
    let mut service = Service::new("a", vec![udp()], "lenet");
    service.framing = Framing::Fixed(784);
    // One mqueue keeps the order of all flows.
    service.mqueues = 1;
    let server = start(topology(vec![service]));
    let target = Target::Udp(address(&server, 0));
    let burst = Plan { class: Some(Class::T2), ..plan(&target, Work::Lenet, 32) };
    sound(&bench::run(&burst).unwrap());
}

/// Every reply was right, whatever else a busy machine did to the run.
fn right(report: &Report) {
    assert_eq!((report.wrong, report.duplicated, report.lost), (0, 0, 0), "{report:?}");
    assert!(report.replied > 0 && report.sent == report.replied, "{report:?}");
}

fn memcached_work(text: &str) -> Work {
    text.parse().unwrap()
}

#[test]
fn a_memcached_is_measured_and_every_value_compared() {
    let memcached = Memcached::start();
    let target = Target::Tcp(memcached.address());
    for (text, ratio) in
        [("memcached:100:80", 0.99), ("memcached:0:50", 0.99), ("faces-database", 0.6)]
    {
        let closed = |window| plan(&target, memcached_work(text), window);
        let open = Plan { mode: Mode::Open { rate: 2000.0 }, ..closed(1) };
        let several = Plan { connections: Some(8), ..closed(64) };
        for plan in [closed(1), closed(16), several, open] {
            let report = bench::run(&plan).unwrap();
            right(&report);
            assert!(report.hit_ratio.unwrap() > ratio, "{text}: {report:?}");
            // Of the faces one of three is unknown.
            assert!(ratio > 0.9 || report.hit_ratio.unwrap() < 0.74, "{text}: {report:?}");
        }
    }
    let sets = bench::run(&plan(&target, memcached_work("memcached:10:0"), 4)).unwrap();
    assert_eq!(sets.hit_ratio, None);
}

/// Longer than what lies in a slot.
const LONG_BYTES: usize = 2000;
const _: () = assert!(LONG_BYTES > mqueue::abi::INLINE_BYTES_MAX as usize);

/// A service of faces, its memcached, which knows them, and how many requests have room.
fn faces() -> (Memcached, Server, usize) {
    let memcached = Memcached::start();
    let database = Target::Tcp(memcached.address());
    right(&bench::run(&plan(&database, Work::FacesDatabase, 16)).unwrap());
    let backend = Backend::new("db", Transport::Tcp, memcached.address(), Framing::Memcached);
    let service = Service {
        mqueues: 4,
        slots: 8,
        max_message_bytes: 1036,
        request_timeout_ms: 15_000,
        backends: vec![Backend { timeout_ms: 10_000, ..backend }],
        ..Service::new("faces", vec![udp()], "faces")
    };
    let server = start(topology(vec![service]));
    (memcached, server, 4 * 8)
}

/// A service whose messages are longer than a slot, and how many requests have room if the arena does not say otherwise.
fn long_messages(arena_bytes: u64) -> (Server, usize) {
    let service = Service {
        mqueues: 4,
        slots: 8,
        arena_bytes,
        max_message_bytes: LONG_BYTES as u32,
        max_reply_bytes: LONG_BYTES as u32,
        params: vec![("microseconds".into(), 1000.0.into())],
        request_timeout_ms: 15_000,
        ..Service::new("long", vec![udp()], "delay")
    };
    (start(topology(vec![service])), 4 * 8)
}

/// All that a service lost, but for one reason.
fn lost_otherwise(server: &Server, reason: DropReason) -> u64 {
    let counted = server.metrics().service(0);
    counted.drops.iter().sum::<u64>() - counted.dropped(reason)
}

#[test]
fn a_window_that_fits_the_slots_loses_nothing_although_messages_are_longer_than_a_slot() {
    let (_memcached, faces, room) = faces();
    let (long, long_room) = long_messages(0);
    let echo = Work::Echo { bytes: LONG_BYTES };
    for (server, work, window) in [(faces, Work::Faces, room), (long, echo, long_room)] {
        let target = Target::Udp(address(&server, 0));
        let report = bench::run(&plan(&target, work, window)).unwrap();
        right(&report);
        assert_accounts(&server);
        assert_eq!(server.metrics().service(0).drops.iter().sum::<u64>(), 0);
    }
}

#[test]
fn requests_without_room_are_lost_on_arrival_only() {
    // Slots for half of them; then slots for all, but an arena for half of them.
    let (_memcached, faces, room) = faces();
    let (long, long_room) = long_messages(1);
    let echo = Work::Echo { bytes: LONG_BYTES };
    for (server, work, window) in [(faces, Work::Faces, 2 * room), (long, echo, long_room)] {
        let target = Target::Udp(address(&server, 0));
        let timeout = Some(Duration::from_millis(300));
        let crowded = Plan { timeout, ..plan(&target, work, window) };
        let report = bench::run(&crowded).unwrap();
        // No verdict says that the database was not there.
        assert_eq!((report.wrong, report.duplicated), (0, 0), "{report:?}");
        assert_accounts(&server);
        assert!(server.metrics().service(0).dropped(DropReason::NoCredit) > 0, "{report:?}");
        assert_eq!(
            lost_otherwise(&server, DropReason::NoCredit),
            0,
            "{:?}",
            server.metrics().service(0)
        );
    }
}

#[test]
fn a_missing_server_is_reported_in_one_sentence() {
    // An address of its own: another test may get the port of 127.0.0.1 meanwhile.
    let free = UdpSocket::bind("127.0.0.99:0").unwrap().local_addr().unwrap();
    for target in [Target::Udp(free), Target::Tcp(free)] {
        let error = bench::run(&plan(&target, Work::Echo { bytes: 64 }, 4)).unwrap_err();
        assert!(matches!(error, BenchError::Unreachable(_)), "{error}");
        assert!(error.to_string().contains(&format!("{target}: is the server running")), "{error}");
    }
}

#[test]
fn a_different_kernel_is_detected_before_the_run() {
    let server = serve(Work::Scale { numbers: 16 });
    for at in [Target::Udp(address(&server, 0)), Target::Tcp(address(&server, 1))] {
        let echo =
            Plan { framing: Some(Framing::Fixed(64)), ..plan(&at, Work::Echo { bytes: 64 }, 1) };
        let error = bench::run(&echo).unwrap_err();
        assert!(matches!(error, BenchError::Stranger { .. }), "{error}");
        let says = error.to_string().contains("framing = \"fixed:64\" (what was tried; give");
        assert_eq!(says, matches!(at, Target::Tcp(_)), "{error}");
    }
}

#[test]
fn the_servers_costs_are_read_from_outside() {
    let service =
        "[[service]]\nname = \"echo\"\nlisten = \"udp://127.0.0.1:0\"\nkernel = \"echo\"\n";
    let served = Served::start("bench_cost", "", service);
    let plan = Plan {
        server_pid: Some(served.process.0.id()),
        duration: Duration::from_millis(600),
        ..plan(&Target::Udp(served.services[0][0]), Work::Echo { bytes: 64 }, 8)
    };
    let report = bench::run(&plan).unwrap();
    sound(&report);
    let cost = report.server_cpu_ns_per_message().expect("it was asked for");
    assert!(cost > 0.0 && report.client_cpu_ns_per_message > 0.0, "{report:?}");
    let missing = Plan { server_pid: Some(u32::MAX), ..plan };
    assert!(matches!(bench::run(&missing), Err(BenchError::Observe(_))));
}

/// `serval bench`, in runs of a fraction of a second that a busy machine does not spoil.
fn command(duration: &str, arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_serval"));
    command
        .args(["bench", "--warmup", "50ms", "--duration", duration, "--stolen-max", "100"])
        .args(arguments);
    command.stdin(Stdio::null()).output().unwrap()
}

/// The same, again and for longer where the machine gave one of both sides no turn for long.
fn undisturbed(arguments: &[&str]) -> Output {
    let mut output = command("500ms", arguments);
    for duration in ["500ms", "500ms", "1s", "2s", "4s", "8s"] {
        let void = stderr(&output);
        let causes =
            ["could not be sent", "Little's law", "too few for percentiles", "nothing in the last"];
        if !causes.iter().any(|cause| void.contains(cause)) {
            break;
        }
        output = command(duration, arguments);
    }
    output
}

fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

#[test]
fn the_command_shows_a_table_a_document_and_a_plot() {
    let server = serve(Work::Echo { bytes: 64 });
    let target = Target::Udp(address(&server, 0)).to_string();
    let plot = std::env::temp_dir().join(format!("serval-bench-{}.svg", std::process::id()));
    let path = plot.to_str().unwrap();

    let shown = undisturbed(&[&target, "--window", "1,8", "--plot", path]);
    assert!(shown.status.success(), "{}", stderr(&shown));
    let text = String::from_utf8(shown.stdout).unwrap();
    for part in ["echo:64 at udp://", "class T0", "in flight", "p99.9", "/s", path] {
        assert!(text.contains(part), "{part} is not in\n{text}");
    }
    let svg = std::fs::read_to_string(&plot).unwrap();
    for part in
        ["<svg", "replies a second", ">latency</text>", ">p99</text>", "1 in flight, 8 in flight"]
    {
        assert!(svg.contains(part), "{part} is not in\n{svg}");
    }
    std::fs::remove_file(&plot).unwrap();

    let told = undisturbed(&[&target, "--rate", "1k", "--timeout", "20s", "--json"]);
    assert!(told.status.success(), "{}", stderr(&told));
    let json: serde_json::Value = serde_json::from_slice(&told.stdout).unwrap();
    assert!(json["machine"]["cores"].as_u64().unwrap() >= 1 && json["version"].is_string());
    let run = &json["runs"][0];
    assert_eq!((&run["mode"], &run["asked"]["rate"]), (&"open".into(), &1000.0.into()), "{json}");
    assert!(run["rate"].as_f64().unwrap() > 0.0 && run["void"].is_null(), "{json}");
    assert_eq!(run["sent"], run["replied"], "{json}");
}

#[test]
fn the_document_names_no_commit_of_the_current_folder() {
    let server = serve(Work::Echo { bytes: 64 });
    let target = Target::Udp(address(&server, 0)).to_string();
    let folder = std::env::temp_dir().join(format!("serval-bench-commit-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let git = |arguments: &[&str]| {
        let mut git = Command::new("git");
        git.current_dir(&folder).args(["-c", "user.name=a", "-c", "user.email=a@b"]);
        git.args(arguments).output().unwrap()
    };
    git(&["init", "--quiet"]);
    git(&["commit", "--quiet", "--allow-empty", "-m", "another program"]);
    let head = String::from_utf8(git(&["rev-parse", "HEAD"]).stdout).unwrap();
    assert_eq!(head.trim().len(), 40, "{head}");
    let mut command = Command::new(env!("CARGO_BIN_EXE_serval"));
    command.args([
        "bench",
        &target,
        "--window",
        "1",
        "--warmup",
        "0",
        "--duration",
        "50ms",
        "--json",
    ]);
    let output = command.current_dir(&folder).output().unwrap();
    std::fs::remove_dir_all(&folder).unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(text.contains("\"machine\"") && !text.contains(head.trim()), "{text}");
}

/// `serval bench` with a message of its own.
fn custom(target: &Target, arguments: &[&str]) -> Output {
    let target = target.to_string();
    undisturbed(&[&[target.as_str(), "--window", "1,4"], arguments].concat())
}

#[test]
fn a_custom_message_is_sent_and_its_reply_compared() {
    let folder = std::env::temp_dir().join(format!("serval-bench-own-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let (payload, other) = (folder.join("payload"), folder.join("other"));
    std::fs::write(&payload, "a message of ones own").unwrap();
    std::fs::write(&other, "something else").unwrap();
    let (payload, other) = (payload.to_str().unwrap(), other.to_str().unwrap());
    let work = Work::Echo { bytes: 64 };
    let path = folder.join("port");
    let server = serve_at(&work, std::slice::from_ref(&path));
    let (udp, tcp) = (Target::Udp(address(&server, 0)), Target::Tcp(address(&server, 1)));
    for target in [&udp, &tcp, &Target::Shm(path)] {
        let expects =
            [&["--expect", payload][..], &[], &["--expect", "echo"], &["--expect", "any:21"]];
        for expect in &expects[..if *target == udp { 4 } else { 1 }] {
            let output = custom(target, &[&["--payload", payload], *expect].concat());
            let text = String::from_utf8_lossy(&output.stdout).into_owned();
            assert!(output.status.success(), "{target} {expect:?}: {}", stderr(&output));
            assert!(text.contains("a payload of 21 bytes at "), "{text}");
            let counted = expect.is_empty() || expect[1] == "any:21";
            assert_eq!(text.contains("not compared"), counted, "{text}");
        }
        let hex = ["--payload-hex", "00ff10", "--expect-hex", "0x00 ff:10"];
        assert!(custom(target, &hex).status.success());
        for wrong in [["--expect", other], ["--expect-hex", "61"], ["--expect", "any:20"]] {
            let output = custom(target, &[&["--payload", payload], &wrong[..]].concat());
            assert_eq!(output.status.code(), Some(1), "{}", stderr(&output));
            assert!(stderr(&output).contains("as --expect says"), "{}", stderr(&output));
        }
    }
    for (arguments, part) in [
        (&["--payload", "/there/is/no/file"][..], "/there/is/no/file"),
        (&["--payload", payload, "--expect", "any:x"], "any:BYTES"),
        (&["--payload-hex", "abc"], "pairs of hexadecimal digits"),
        (&["--expect", "echo"], "--payload"),
        (&["--payload", payload, "--workload", "lenet"], "cannot be used with"),
        (&["--payload", payload, "--framing", "raw"], "--expect any:BYTES"),
    ] {
        let output = custom(&tcp, arguments);
        assert_eq!(output.status.code(), Some(2), "{arguments:?}: {}", stderr(&output));
        assert!(stderr(&output).contains(part), "{arguments:?}: {}", stderr(&output));
    }
    std::fs::remove_dir_all(&folder).unwrap();
}

#[test]
fn wrong_command_lines_are_reported_in_one_sentence() {
    for (arguments, part) in [
        (&["udp://127.0.0.1:9", "--window", "5000"][..], "must be in [1, 4096]"),
        (&["tcp://127.0.0.1:9", "--class", "T2"], "udp:// server"),
        (&["http://127.0.0.1:9"], "udp://HOST:PORT"),
        (&["udp://127.0.0.1:9", "--workload", "chess"], "echo:BYTES"),
        (&["udp://127.0.0.1:9", "--rate", "fast"], "1.5M"),
        (&["udp://127.0.0.1:9", "--rate", "1k", "--window", "1"], "cannot be used with"),
        (&["udp://127.0.0.1:9", "--framing", "morse"], "length:u16"),
    ] {
        let output = command("500ms", arguments);
        assert_eq!(output.status.code(), Some(2), "{arguments:?}: {}", stderr(&output));
        assert!(stderr(&output).contains(part), "{arguments:?}: {}", stderr(&output));
    }
}

#[test]
fn the_servers_metrics_give_its_busy_time() {
    let service =
        "[[service]]\nname = \"echo\"\nlisten = \"udp://127.0.0.1:0\"\nkernel = \"echo\"\n";
    let served = Served::start("bench_metrics", "", service);
    let plan = Plan {
        metrics: Some(format!("http://{}/metrics", served.metrics)),
        server_pid: Some(served.process.0.id()),
        duration: Duration::from_millis(600),
        ..plan(&Target::Udp(served.services[0][0]), Work::Echo { bytes: 64 }, 8)
    };
    let report = bench::run(&plan).unwrap();
    sound(&report);
    let busy = report.server_busy_ns_per_message().expect("it was asked for");
    let used = report.server_cpu_ns_per_message().expect("it was asked for");
    assert!(busy > 0.0 && used > 0.0, "{report:?}");
    let other = Plan { metrics: Some("http://127.0.0.1:1/metrics".to_owned()), ..plan };
    assert!(matches!(bench::run(&other), Err(BenchError::Observe(_))));
}
