//! The C client library (`lib/src/burst`, `lib/src/shm`): programs in C against the real server, and against engines that are
//! none. Every program runs as it is shipped and with the address and undefined behaviour sanitizers.

mod common;

use std::io::{BufRead, BufReader};
use std::mem::offset_of;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Arc, LazyLock};
use std::thread::JoinHandle;
use std::time::Instant;

use bench::client::shm::{Client, Options};
use common::change::change;
use common::*;
use engine::topology::Service;
use mqueue::abi::{RegionHeader, RingEntry, SlotHeader, kind};
use mqueue::memory::Ordering;
use mqueue::{Head, MappedMemory, Memory, MqueuePlan, Producer, Region, RegionPlan, RingPlan};
use sys::local::{LocalListener, LocalSocket};
use sys::readiness::{WakeFd, wait_readable};
use sys::{RegionOptions, SharedMemory};
use wire::handshake::{Answer, HELLO_BYTES, Hello, Terms};
use wire::{DropReason, ReportedReason};

/// Where the programs are: built once.
static PROGRAMS: LazyLock<PathBuf> = LazyLock::new(|| {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("client");
    make("lib", &["client", "client-tests"], &folder);
    make("examples/02_c_client", &["all"], &folder);
    folder
});

fn make(source: &str, targets: &[&str], build: &Path) {
    let output = Command::new("make")
        .args(["--no-print-directory", "-C"])
        .arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(source))
        .args(targets)
        .arg(format!("BUILD={}", build.display()))
        .output()
        .expect("make has to be installed");
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    assert!(output.status.success(), "{}{}", text(&output.stdout), text(&output.stderr));
}

const PLAIN: &str = "";
const SANITIZED: &str = ".san";

fn program(name: &str, variant: &str) -> Command {
    Command::new(PROGRAMS.join(format!("{name}{variant}")))
}

/// What a program that ends well has printed.
fn output(name: &str, variant: &str, arguments: &[&str]) -> String {
    let output = program(name, variant).args(arguments).output().unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    let (said, complained) = (text(output.stdout), text(output.stderr));
    assert!(output.status.success(), "{name}{variant} {arguments:?}: {said}{complained}");
    assert_eq!(complained, "", "{name}{variant} {arguments:?}");
    said
}

/// A path that no other test uses.
fn port(name: &str) -> PathBuf {
    std::env::temp_dir().join(format!("serval-c-client-{}-{name}", std::process::id()))
}

fn shm_echo(path: &Path) -> Service {
    let mut service = Service::new("echo", Vec::new(), "echo");
    service.memory_ports = vec![path.to_owned()];
    service
}

#[test]
fn every_message_over_shared_memory_is_echoed_unchanged() {
    let path = port("load");
    let mut service = shm_echo(&path);
    service.max_message_bytes = 60_000;
    service.max_reply_bytes = 60_000;
    let server = start(topology(vec![service]));
    let url = path.to_str().unwrap();
    let loads = [
        (PLAIN, "1000000", "200", "256"),
        (PLAIN, "5000", "60000", "16"),
        (SANITIZED, "50000", "1500", "64"),
        (SANITIZED, "2000", "60000", "1"),
    ];
    for (variant, messages, bytes, window) in loads {
        let said = output("shm_test", variant, &["load", url, messages, bytes, window]);
        assert_eq!(said, format!("{messages} right\n"));
    }
    assert_accounts(&server);
    assert_eq!(server.metrics().service(0).replied, 1_057_000);
    for variant in [PLAIN, SANITIZED] {
        assert_eq!(output("shm_test", variant, &["limits", url]), "limits right\n");
    }
    assert!(server.shutdown().is_clean());
}

#[test]
fn every_datagram_of_a_burst_is_echoed_unchanged() {
    let mut service = Service::new("echo", vec![udp()], "echo");
    service.max_message_bytes = 8192;
    service.max_reply_bytes = 8192;
    let server = start(topology(vec![service]));
    let address = &format!("udp://{}", address(&server, 0));
    let loads = [
        (PLAIN, "1000000", "64", "256", "offload"),
        (PLAIN, "100000", "64", "64", "plain"),
        (PLAIN, "10000", "1472", "64", "offload"),
        (SANITIZED, "50000", "100", "128", "offload"),
        (SANITIZED, "10000", "100", "16", "plain"),
    ];
    for (variant, messages, bytes, window, path) in loads {
        let arguments = ["load", address, messages, bytes, window, path];
        let said = output("burst_test", variant, &arguments);
        assert!(said.starts_with(&format!("{messages} right, ")), "{arguments:?}: {said}");
    }
    let closed = &format!("127.0.0.1:{}", free_port());
    for variant in [PLAIN, SANITIZED] {
        assert_eq!(output("burst_test", variant, &["portions", address]), "portions right\n");
        assert_eq!(output("burst_test", variant, &["limits", address, closed]), "limits right\n");
    }
    assert_accounts(&server);
    assert!(server.metrics().service(0).replied >= 1_170_000);
    assert!(server.shutdown().is_clean());
}

#[test]
fn the_example_works_as_documented() {
    let path = port("example");
    let mut service = shm_echo(&path);
    service.listen = vec![udp()];
    let server = start(topology(vec![service]));
    let said = output("shm", PLAIN, &[path.to_str().unwrap(), "10000"]);
    assert!(said.starts_with("10000 replies, 0 lost, "), "{said}");
    let said = output("burst", PLAIN, &[&format!("udp://{}", address(&server, 0)), "100"]);
    assert!(said.contains(" ns each, sent with "), "{said}");
    assert!(server.shutdown().is_clean());
}

#[test]
fn the_end_of_the_engine_is_reported_in_bounded_time() {
    let cases = [
        (PLAIN, "sleep", "KILL"),
        (PLAIN, "spin", "KILL"),
        (SANITIZED, "sleep", "KILL"),
        (SANITIZED, "spin", "TERM"),
    ];
    for (variant, way, signal) in cases {
        let path = port(&format!("end-{way}-{signal}{variant}"));
        let file = path.with_extension("toml");
        let text = format!(
            "schema = 1\n[engine]\ncontrol = \"\"\n[[service]]\nname = \"echo\"\n\
             listen = [\"shm://{}\"]\nkernel = \"echo\"\n",
            path.display()
        );
        std::fs::write(&file, text).unwrap();
        let mut serve = Command::new(env!("CARGO_BIN_EXE_serval"));
        serve.arg("serve").arg(&file).stdout(Stdio::piped()).stderr(Stdio::null());
        let mut server = Peer::start(&mut serve, "cargo builds it");
        assert!(first_line(&mut server).1.starts_with("ready"));

        let mut client = program("shm_test", variant);
        client.args(["until-closed", path.to_str().unwrap(), way]).stdout(Stdio::piped());
        let mut client = Peer::start(&mut client, "the test builds it");
        let (mut said, line) = first_line(&mut client);
        assert_eq!(line, "serving\n");
        server.signal(signal);
        let signalled = Instant::now();
        let mut line = String::new();
        said.read_line(&mut line).unwrap();
        assert_eq!(
            line,
            "closed: the engine has closed the connection without a reason; is it draining?\n"
        );
        assert!(client.0.wait().unwrap().success());
        assert!(signalled.elapsed() < PATIENCE, "it took {:?}", signalled.elapsed());
        server.stop();
        std::fs::remove_file(file).unwrap();
        // A killed server leaves the socket's file.
        let _ = std::fs::remove_file(path);
    }
}

#[test]
fn a_disconnected_client_gets_the_engines_reason() {
    for (variant, way) in [(PLAIN, "spin"), (PLAIN, "sleep"), (SANITIZED, "sleep")] {
        let path = port(&format!("reason-{way}{variant}"));
        let mut server = start(topology(vec![shm_echo(&path)]));
        let mut client = program("shm_test", variant);
        client.args(["until-closed", path.to_str().unwrap(), way]).stdout(Stdio::piped());
        let mut client = Peer::start(&mut client, "the test builds it");
        let (mut said, line) = first_line(&mut client);
        assert_eq!(line, "serving\n");
        let mut services = server.topology().services.clone();
        services[0].max_message_bytes /= 2;
        change(&mut server, services);
        let mut line = String::new();
        said.read_line(&mut line).unwrap();
        let reason = line.strip_prefix("closed: the engine has ended the connection: ");
        assert!(
            reason.is_some_and(|reason| reason.contains("now has another message format")),
            "{line}"
        );
        assert!(client.0.wait().unwrap().success());
        assert!(server.shutdown().is_clean());
    }
}

#[test]
fn requests_in_the_ring_of_a_removed_port_have_outcomes() {
    for variant in [PLAIN, SANITIZED] {
        let path = port(&format!("goes{variant}"));
        let slow = Service {
            kernel: "delay".into(),
            params: vec![("microseconds".into(), 100_000.0.into())],
            mqueues: 1,
            slots: 1,
            ..shm_echo(&path)
        };
        let mut server = start(topology(vec![Service::new("stays", vec![udp()], "echo"), slow]));
        let metrics = server.metrics().services()[1].clone();
        let mut client = program("shm_test", variant);
        client.args(["port-goes", path.to_str().unwrap()]).stdout(Stdio::piped());
        let mut client = Peer::start(&mut client, "the test builds it");
        let (mut said, line) = first_line(&mut client);
        assert_eq!(line, "sent\n");
        eventually("one is taken", || metrics.snapshot().received > 0);
        let mut services = server.topology().services.clone();
        services.pop();
        change(&mut server, services);
        let mut line = String::new();
        said.read_line(&mut line).unwrap();
        let counted = metrics.snapshot();
        let refused = counted.dropped(DropReason::Draining);
        assert_eq!(counted.received, 100, "{counted:?}");
        assert_eq!(counted.replied + refused, 100, "{counted:?}");
        // Nor were those that it never saw.
        assert_eq!(line, format!("{} answered, {} refused\n", counted.replied, refused + 5));
        assert!(client.0.wait().unwrap().success());
        assert!(server.shutdown().is_clean());
    }
}

/// The first line that a process prints, and where the others will come from.
fn first_line(process: &mut Peer) -> (impl BufRead + use<>, String) {
    let mut output = BufReader::new(process.0.stdout.take().unwrap());
    let mut line = String::new();
    output.read_line(&mut line).unwrap();
    (output, line)
}

/// How an attempt to connect ends.
fn attempt(path: &Path, patience_ms: &str) -> String {
    let arguments = ["attempt", path.to_str().unwrap(), patience_ms];
    let said = output("shm_test", SANITIZED, &arguments);
    assert_eq!(said, output("shm_test", PLAIN, &arguments));
    said
}

#[test]
fn a_failed_connection_is_reported_with_its_reason() {
    let missing = port("missing");
    let said = attempt(&missing, "1000");
    assert!(said.starts_with("17: ") && said.contains("is the server running?"), "{said}");

    let no_socket = port("no-socket");
    std::fs::write(&no_socket, "").unwrap();
    let said = attempt(&no_socket, "1000");
    std::fs::remove_file(&no_socket).unwrap();
    assert!(said.starts_with("17: "), "{said}");

    let path = port("limit");
    let mut topology = topology(vec![shm_echo(&path)]);
    topology.limits.connections = 1;
    let server = start(topology);
    let held = Client::connect(&path, &Options::default()).unwrap();
    let said = attempt(&path, "5000");
    assert!(said.starts_with("19: the engine refuses the connection: "), "{said}");
    assert!(said.contains("limits.connections"), "{said}");
    drop(held);
    // Not with a sanitizer: its look for leaks needs rights that a process loses with its user.
    let said = output("shm_test", PLAIN, &["attempt-as-other-user", path.to_str().unwrap()]);
    assert!(said.starts_with("18: ") && said.contains("run as the user of the engine"), "{said}");
    assert!(server.shutdown().is_clean());
}

/// Listens, reads one hello and leaves the rest to `act`; then waits for the client to go.
fn impostor(path: &Path, act: impl FnOnce(&LocalSocket) + Send + 'static) -> JoinHandle<()> {
    // Building the client takes longer than this engine waits for it.
    LazyLock::force(&PROGRAMS);
    let listener = LocalListener::bind(path).unwrap();
    std::thread::spawn(move || {
        wait_readable(&[listener.as_fd()], Some(PATIENCE));
        let socket = listener.accept().unwrap().expect("a client");
        wait_readable(&[socket.as_fd()], Some(PATIENCE));
        let mut hello = [0; HELLO_BYTES + 1];
        let len = socket.receive(&mut hello).unwrap().expect("its hello");
        Hello::decode(&hello[..len]).expect("of this version");
        act(&socket);
        wait_readable(&[socket.as_fd()], Some(PATIENCE));
    })
}

const DEPTH: u32 = 4;
const BYTES_MAX: u32 = 2048;

fn welcome() -> Answer {
    Answer::Accepted(Terms {
        depth: DEPTH,
        request_bytes_max: BYTES_MAX,
        reply_bytes_max: BYTES_MAX,
        answers: true,
    })
}

/// A region as an engine would make it, with rings of `depth` slots.
fn region(depth: u32) -> (Arc<SharedMemory>, Region<MappedMemory>) {
    let ring = RingPlan::doorbell(BYTES_MAX, 0);
    let mqueues = vec![MqueuePlan { depth, rx: ring, tx: ring }];
    let plan = RegionPlan::of_blocks(1, &mqueues, 1);
    let bytes = plan.bytes().unwrap() as usize;
    let memory = Arc::new(SharedMemory::create("test", bytes, &RegionOptions::default()).unwrap());
    let region = Region::format(MappedMemory::new(memory.clone()), &plan).unwrap();
    (memory, region)
}

/// Sends an answer that accepts, with this region; returns the client's wake-up descriptor.
fn let_in(socket: &LocalSocket, region: BorrowedFd<'_>) -> WakeFd {
    let [engine, client] = [WakeFd::new().unwrap(), WakeFd::new().unwrap()];
    socket.send(&welcome().encode(), &[region, engine.as_fd(), client.as_fd()]).unwrap();
    client
}

#[test]
fn invalid_engines_are_distinguished() {
    type Act = fn(&LocalSocket);
    let cases: [(&str, Act, &str, &str); 11] = [
        (
            "garbage",
            |s| s.send(b"HTTP/1.1 400 Bad Request", &[]).unwrap(),
            "20: ",
            "does not speak",
        ),
        ("short", |s| s.send(&welcome().encode()[..31], &[]).unwrap(), "20: ", "does not speak"),
        ("bare", |s| s.send(&welcome().encode(), &[]).unwrap(), "20: ", "does not speak"),
        (
            "version",
            |s| {
                let mut answer = welcome().encode();
                answer[8] = 9;
                s.send(&answer, &[]).unwrap();
            },
            "20: ",
            "speaks version 9",
        ),
        (
            "refusal",
            |s| s.send(&Answer::Refused("not you".into()).encode(), &[]).unwrap(),
            "19: ",
            "not you",
        ),
        ("silence", |_| {}, "21: ", "within 300 ms"),
        ("end", |s| s.shut_down(), "25: ", "without an answer"),
        (
            "file",
            |s| {
                let path = port("file-content");
                std::fs::write(&path, [0; 65_536]).unwrap();
                let file: OwnedFd = std::fs::File::open(&path).unwrap().into();
                std::fs::remove_file(&path).unwrap();
                let_in(s, file.as_fd());
            },
            "22: ",
            "not sealed",
        ),
        (
            "zeros",
            |s| {
                let zeros = SharedMemory::create("zeros", 65_536, &RegionOptions::default());
                let_in(s, zeros.unwrap().fd());
            },
            "22: ",
            "header",
        ),
        (
            "depth",
            |s| {
                let_in(s, region(2 * DEPTH).0.fd());
            },
            "22: ",
            "agreed on",
        ),
        (
            "directory",
            |s| {
                let (memory, region) = region(DEPTH);
                // A depth that is no power of two.
                let at = directory(region.memory()) + offset_of!(RingEntry, depth) as u64;
                let word = region.memory().load(at, Ordering::Relaxed);
                region.memory().store(at, word - 1, Ordering::Relaxed);
                let_in(s, memory.fd());
            },
            "22: ",
            "directory",
        ),
    ];
    for (name, act, number, text) in cases {
        let path = port(name);
        for variant in [PLAIN, SANITIZED] {
            let engine = impostor(&path, act);
            let patience = if name == "silence" { "300" } else { "20000" };
            let said = output("shm_test", variant, &["attempt", path.to_str().unwrap(), patience]);
            assert!(said.starts_with(number) && said.contains(text), "{name}: {said}");
            engine.join().unwrap();
        }
    }
}

/// What a client says that is let in, asks, and finds what `act` writes into its ring of outcomes.
fn outcome(
    name: &str,
    act: fn(&mut Producer<MappedMemory>, &MappedMemory, &LocalSocket),
) -> String {
    let path = port(name);
    let mut said = [PLAIN, SANITIZED].map(|variant| {
        let engine = impostor(&path, move |socket| {
            let (memory, mut region) = region(DEPTH);
            let (mut outcomes, mut requests) = region.engine_ends(0);
            let wake_fd = let_in(socket, memory.fd());
            eventually("a request comes", || {
                requests.peek().unwrap().is_some_and(|request| request.len == 5)
            });
            act(&mut outcomes, region.memory(), socket);
            wake_fd.wake();
        });
        let said = output("shm_test", variant, &["one", path.to_str().unwrap()]);
        engine.join().unwrap();
        said
    });
    assert_eq!(said[0], said[1], "{name}");
    std::mem::take(&mut said[0])
}

fn head(kind: u8, status: u8) -> Head {
    Head { token: 0, tag: 7, kind, status }
}

/// A word of the region's header.
fn header_word(memory: &MappedMemory, field: usize) -> u64 {
    memory.load(field as u64, Ordering::Relaxed)
}

/// Where the description of the RX ring begins.
fn directory(memory: &MappedMemory) -> u64 {
    header_word(memory, offset_of!(RegionHeader, directory_offset))
}

/// The RX ring's head word.
fn store_head(memory: &MappedMemory, head: u64) {
    let at = header_word(memory, offset_of!(RegionHeader, rx_heads_offset));
    memory.store(at, head, Ordering::Release);
}

/// Changes the length in the first slot of the RX ring.
fn store_length(memory: &MappedMemory, len: u32) {
    let at = directory(memory) + offset_of!(RingEntry, slots_offset) as u64;
    let slot = memory.load(at, Ordering::Relaxed);
    let at = slot + offset_of!(SlotHeader, len) as u64;
    let word = memory.load(at, Ordering::Relaxed);
    memory.store(at, word >> 32 << 32 | u64::from(len), Ordering::Relaxed);
}

#[test]
fn outcomes_are_checked_before_use() {
    let said = outcome("reply", |outcomes, _, _| {
        outcomes.push(head(kind::MESSAGE, 0), b"good").unwrap();
        outcomes.publish();
    });
    assert_eq!(said, "0: tag 7, 4 bytes, lost 0: -\n");

    let said = outcome("lost", |outcomes, _, _| {
        outcomes.push(head(kind::DROP, DropReason::NoCredit.code()), b"").unwrap();
        outcomes.publish();
    });
    assert_eq!(said, "0: tag 7, 0 bytes, lost 1: no_credit\n");

    let said = outcome("new-reason", |outcomes, _, _| {
        outcomes.push(head(kind::DROP, u8::MAX), b"").unwrap();
        outcomes.publish();
    });
    assert_eq!(said, "0: tag 7, 0 bytes, lost 1: other\n", "of an engine that is newer");

    let said = outcome("last-words", |outcomes, _, socket| {
        outcomes.push(head(kind::MESSAGE, 0), b"bye").unwrap();
        outcomes.publish();
        socket.shut_down();
    });
    assert_eq!(
        said, "0: tag 7, 3 bytes, lost 0: -\n",
        "what was written before the end is received"
    );

    let said = outcome("no-words", |_, _, socket| socket.shut_down());
    assert_eq!(said, "0: tag 7, 0 bytes, lost 1: draining\n", "it was not taken");

    let said = outcome("far-head", |_, memory, _| {
        store_head(memory, u64::from(DEPTH) + 1);
    });
    assert!(said.starts_with("26: "), "{said}");

    let said = outcome("no-kind", |_, memory, _| {
        store_head(memory, 1);
    });
    assert!(said.starts_with("26: "), "a slot of zeros is no message: {said}");

    let said = outcome("too-long", |outcomes, memory, _| {
        outcomes.push(head(kind::MESSAGE, 0), b"x").unwrap();
        store_length(memory, BYTES_MAX + 1);
        outcomes.publish();
    });
    assert!(said.starts_with("26: "), "{said}");
}

#[test]
fn the_rust_client_reads_a_new_reason_as_another_one() {
    let path = port("new-reason-rust");
    let engine = impostor(&path, |socket| {
        let (memory, mut region) = region(DEPTH);
        let (mut outcomes, _) = region.engine_ends(0);
        let wake_fd = let_in(socket, memory.fd());
        outcomes.push(head(kind::DROP, u8::MAX), b"").unwrap();
        outcomes.publish();
        wake_fd.wake();
    });
    let mut client = Client::connect(&path, &Options::default()).unwrap();
    let reply = client.receive(&mut [0; 8], PATIENCE).unwrap().expect("an outcome");
    assert_eq!((reply.tag, reply.lost), (7, Some(ReportedReason::Other(u8::MAX))));
    drop(client);
    engine.join().unwrap();
}

/// The lines of the example's page, in a folder of the test's.
#[test]
fn a_program_against_an_installed_library_starts() {
    if Command::new("pkg-config").arg("--version").output().is_err() {
        eprintln!("SKIPPED: pkg-config is not installed");
        return;
    }
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let page = std::fs::read_to_string(root.join("examples/02_c_client/README.md")).unwrap();
    let (_, elsewhere) = page.split_once("## Use it elsewhere").unwrap();
    let lines = elsewhere.split("```").nth(1).unwrap().trim_start_matches("sh");
    // The first installs, from the example's folder; the last asks a server, and here only says what it wants.
    let lines = lines.replace(
        "../../lib",
        &format!("{} BUILD={}", root.join("lib").display(), PROGRAMS.display()),
    );
    let lines = lines.replace("./shm /tmp/serval-echo.sock", "./shm");
    let home = Path::new(env!("CARGO_TARGET_TMPDIR")).join("elsewhere");
    std::fs::create_dir_all(&home).unwrap();
    std::fs::copy(root.join("examples/02_c_client/shm.c"), home.join("shm.c")).unwrap();
    let mut shell = Command::new("sh");
    shell.args(["-ec", &lines]).current_dir(&home).env("HOME", &home).env_remove("LD_LIBRARY_PATH");
    let done = shell.output().unwrap();
    let said = String::from_utf8_lossy(&done.stderr);
    assert_eq!(done.status.code(), Some(2), "{said}");
    assert!(said.contains("usage: ./shm PATH"), "{said}");
    // With the library inside.
    let inside = elsewhere.split('`').find(|part| part.ends_with("libserval_client.a"));
    let mut shell = Command::new("sh");
    shell
        .args(["-ec", &format!("{}; ./shm", inside.unwrap())])
        .current_dir(&home)
        .env("HOME", &home);
    let done = shell.output().unwrap();
    assert_eq!(done.status.code(), Some(2), "{}", String::from_utf8_lossy(&done.stderr));
    std::fs::remove_dir_all(&home).unwrap();
}

#[test]
fn the_example_reports_an_address_without_a_server() {
    let closed = format!("127.0.0.1:{}", free_port());
    let refused = program("burst", PLAIN).arg(format!("udp://{closed}")).output().unwrap();
    let said = String::from_utf8_lossy(&refused.stderr);
    assert_eq!(refused.status.code(), Some(1), "{said}");
    assert!(said.ends_with(&format!(": no server listens at udp://{closed}\n")), "{said}");
}
