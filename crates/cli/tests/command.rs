//! The `serval` command as scripts and people use it: output, exit codes, signals.

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpStream, UdpSocket};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value as Json;

const PATIENCE: Duration = Duration::from_secs(60);

fn serval() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_serval"));
    command.env_remove("SERVAL_LOG").stdin(Stdio::null());
    command
}

fn run(arguments: &[&str]) -> Output {
    serval().args(arguments).output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

/// Standard output of a run that has to succeed.
fn output(arguments: &[&str]) -> String {
    let done = run(arguments);
    assert_eq!(done.status.code(), Some(0), "{arguments:?}: {}", text(&done.stderr));
    text(&done.stdout)
}

fn json(arguments: &[&str]) -> Json {
    serde_json::from_str(&output(arguments)).unwrap()
}

/// A folder that goes away.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Self {
        let path =
            std::env::temp_dir().join(format!("serval-command-{name}-{}", std::process::id()));
        fs::create_dir_all(&path).unwrap();
        Self(path)
    }

    fn file(&self, name: &str, content: &str) -> String {
        let path = self.0.join(name);
        fs::write(&path, content).unwrap();
        path.to_str().unwrap().to_owned()
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

const ECHO: &str = "schema = 1\n[engine]\nmetrics = \"127.0.0.1:0\"\n[[service]]\nname = \"echo\"\n\
                    listen = \"udp://127.0.0.1:0\"\naccelerator = \"acc0\"\nkernel = \"echo\"\n";

/// A running `serval serve`; killed if a test fails.
struct Serving {
    child: Child,
    ready: String,
}

impl Serving {
    fn start(arguments: &[&str]) -> Self {
        let mut child = serval()
            .arg("serve")
            .args(arguments)
            .env("SERVAL_ENGINE_CONTROL", "off")
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut ready = String::new();
        let mut lines = BufReader::new(child.stdout.take().unwrap());
        lines.read_line(&mut ready).unwrap();
        child.stdout = Some(lines.into_inner());
        Self { child, ready }
    }

    /// The address after `scheme` in the ready line.
    fn address(&self, scheme: &str) -> String {
        let start =
            self.ready.find(scheme).unwrap_or_else(|| panic!("{}", self.ready)) + scheme.len();
        let end = self.ready[start..].find([' ', ';', '/', '\n', '"']).unwrap();
        self.ready[start..start + end].to_owned()
    }

    fn signal(&self, name: &str) {
        let pid = self.child.id().to_string();
        assert!(Command::new("kill").args([name, &pid]).status().unwrap().success());
    }

    /// Exit code, the rest of standard output, and standard error.
    fn end(mut self) -> (Option<i32>, String, String) {
        let deadline = Instant::now() + PATIENCE;
        let status = loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                break status;
            }
            assert!(Instant::now() < deadline, "the server does not end");
            std::thread::sleep(Duration::from_millis(5));
        };
        let (mut out, mut err) = (String::new(), String::new());
        self.child.stdout.take().unwrap().read_to_string(&mut out).unwrap();
        self.child.stderr.take().unwrap().read_to_string(&mut err).unwrap();
        (status.code(), out, err)
    }
}

impl Drop for Serving {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn ask(address: &str, message: &[u8]) -> Vec<u8> {
    let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
    socket.connect(address).unwrap();
    socket.set_read_timeout(Some(PATIENCE)).unwrap();
    socket.send(message).unwrap();
    let mut reply = [0; 2048];
    let len = socket.recv(&mut reply).unwrap();
    reply[..len].to_vec()
}

fn get(address: &str, path: &str) -> String {
    let mut stream = TcpStream::connect(address).unwrap();
    write!(stream, "GET {path} HTTP/1.1\r\n\r\n").unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    answer
}

#[test]
fn help_has_examples_and_mistakes_exit_with_2() {
    let help = output(&["--help"]);
    for part in ["Examples:", "Exit codes:", "check-config", "doctor", "NO_COLOR"] {
        assert!(help.contains(part), "{part} is not in\n{help}");
    }
    for verb in ["serve", "demo", "check-config", "doctor"] {
        assert!(output(&[verb, "--help"]).contains("Examples:"), "{verb}");
    }
    assert!(output(&["kernel", "build", "--help"]).contains("SERVAL_KERNEL"));
    for wrong in [
        &["sevre"][..],
        &[],
        &["serve"],
        &["demo", "nothing"],
        &["demo", "--workers", "0"],
        &["doctor", "--log", "loud"],
    ] {
        assert_eq!(run(wrong).status.code(), Some(2), "{wrong:?}");
    }
}

#[test]
fn tables_are_printed_as_text_and_as_json() {
    assert!(output(&["version"]).starts_with("serval "));
    assert_eq!(json(&["version", "--json"])["version"], env!("CARGO_PKG_VERSION"));
    let reasons = json(&["drop-reasons", "--json"]);
    assert_eq!(reasons.as_array().unwrap().len(), wire::DropReason::COUNT);
    assert!(
        reasons.as_array().unwrap().iter().all(|r| r["meaning"].as_str().unwrap().ends_with('.'))
    );
    let table = output(&["drop-reasons"]);
    assert!(table.contains("socket_overflow") && table.contains("received ="), "{table}");
    let kernels = json(&["--json", "kernel", "list"]);
    let names: Vec<&str> =
        kernels.as_array().unwrap().iter().map(|k| k["name"].as_str().unwrap()).collect();
    let mut sorted = names.clone();
    sorted.sort_unstable();
    assert_eq!(sorted, accel::Kernel::builtins(), "the table knows exactly the built-in kernels");
}

#[test]
fn no_colours_reach_a_pipe() {
    for arguments in [&["doctor"][..], &["drop-reasons"], &["kernel", "list"], &["--help"]] {
        assert!(!output(arguments).contains('\u{1b}'), "{arguments:?}");
    }
}

#[test]
fn check_config_shows_the_effective_values() {
    let folder = Folder::new("check");
    let file = folder.file("a.toml", ECHO);
    let shown = output(&["check-config", &file, "--set", "service.echo.slots=128"]);
    for part in ["engine", "service.echo", "flag", "regions", "4 mqueues x (RX 128 slots x 1024 B"]
    {
        assert!(shown.contains(part), "{part} is not in\n{shown}");
    }
    let mut command = serval();
    command.args(["check-config", &file, "--json"]).env("SERVAL_ENGINE_WORKERS", "2");
    let value: Json = serde_json::from_slice(&command.output().unwrap().stdout).unwrap();
    assert_eq!(value["settings"]["engine"]["workers"], 2);
    assert_eq!(value["origins"]["engine.workers"], "environment");
    assert_eq!(value["settings"]["service"]["echo"]["kernel"], "echo");
    assert!(value["regions"][0]["bytes"].as_u64().unwrap() > 4 * 2 * 64 * 1024);
}

#[test]
fn a_wrong_file_exits_with_2_and_shows_the_line() {
    let folder = Folder::new("wrong");
    let file = folder.file(
        "a.toml",
        &ECHO.replace("\"echo\"\n", "\"ecoh\"\n").replace("name = \"ecoh\"", "name = \"echo\""),
    );
    for verb in ["serve", "check-config", "doctor"] {
        let done = run(&[verb, &file]);
        assert_eq!(done.status.code(), Some(2), "{verb}");
        let told = text(&done.stderr);
        assert!(told.contains(":8:10") && told.contains("did you mean \"echo\"?"), "{told}");
        assert!(done.stdout.is_empty());
    }
    let done = run(&["check-config", "--json", &file]);
    let value: Json = serde_json::from_slice(&done.stdout).unwrap();
    assert_eq!((done.status.code(), &value["problems"][0]["line"]), (Some(2), &Json::from(8)));
    assert_eq!(run(&["serve", "/no/such/file.toml"]).status.code(), Some(2));
}

#[test]
fn doctor_shows_this_machine_and_the_path_of_a_service() {
    let folder = Folder::new("doctor");
    let file = folder.file("a.toml", ECHO);
    let shown = output(&["doctor", &file]);
    for part in
        ["cores", "kernel-build", "available", "udp://127.0.0.1:0 -> 1 worker", "echo on acc0"]
    {
        assert!(shown.contains(part), "{part} is not in\n{shown}");
    }
    let value = json(&["doctor", &file, "--json"]);
    let capabilities = value["capabilities"].as_array().unwrap();
    for capability in capabilities {
        let state = capability["state"].as_str().unwrap();
        assert!(["available", "degraded", "off"].contains(&state));
    }
    assert_eq!(value["services"][0]["service"], "echo");
}

/// Both processes go through every test and no edge is violated. The controls need two cores at the same
/// time, which a busy machine may not give at the first attempt.
#[test]
fn litmus_tests_hold_and_their_controls_fail() {
    let mut rounds = 20_000;
    for attempt in 1.. {
        let done = run(&["doctor", "--litmus", "--json", "--rounds", &rounds.to_string()]);
        let shown = text(&done.stdout);
        // A failure adds a second value with its message.
        let first = serde_json::Deserializer::from_str(&shown).into_iter().next();
        let value: Json = first.unwrap_or_else(|| panic!("{}", text(&done.stderr))).unwrap();
        let rows = value["litmus"].as_array().unwrap_or_else(|| panic!("{shown}"));
        let (mut held, mut blind) = (0, 0);
        for row in rows {
            assert!(row["rounds"].as_u64().unwrap() > 0, "{row}");
            let (violations, control) = (&row["violations"], row["control"] == true);
            match row["verdict"].as_str().unwrap() {
                "holds" if !control && *violations == 0 => held += 1,
                "allowed, and seen" | "allowed, not seen here" if !control => {}
                "seen, as it must be" if control && row["weak"] != 0 => {}
                "BLIND" if control => blind += 1,
                _ => panic!("{row}"),
            }
        }
        let controls = rows.iter().filter(|row| row["control"] == true).count();
        assert!(held >= 10 && controls >= 3, "{held} edges, {controls} controls: {shown}");
        assert_eq!(done.status.code(), Some(i32::from(blind > 0)), "{shown}");
        if blind == 0 {
            return;
        }
        if std::thread::available_parallelism().is_ok_and(|cores| cores.get() == 1) {
            println!("SKIPPED: the controls of the litmus tests need two cores");
            return;
        }
        assert!(attempt < 6, "{blind} controls show nothing: {shown}");
        rounds *= 4;
    }
}

#[test]
fn a_service_is_ready_serves_and_drains() {
    let folder = Folder::new("serve");
    let serving = Serving::start(&[&folder.file("a.toml", ECHO)]);
    assert!(serving.ready.starts_with("ready: echo udp://127.0.0.1:"), "{}", serving.ready);
    let (udp, metrics) = (serving.address("udp://"), serving.address("http://"));
    assert_eq!(ask(&udp, b"hello"), b"hello");
    assert!(get(&metrics, "/readyz").starts_with("HTTP/1.1 200"));
    let deadline = Instant::now() + PATIENCE;
    while !get(&metrics, "/metrics").contains("serval_replies_total{service=\"echo\"} 1\n") {
        assert!(Instant::now() < deadline, "{}", get(&metrics, "/metrics"));
    }
    // SIGHUP is not a reason to end.
    serving.signal("-HUP");
    assert_eq!(ask(&udp, b"again"), b"again");
    serving.signal("-TERM");
    let (code, out, err) = serving.end();
    assert_eq!((code, out.as_str()), (Some(0), ""), "{err}");
    assert!(err.contains("draining") && err.contains("received=2"), "{err}");
}

#[test]
fn serve_prints_json_events() {
    let folder = Folder::new("json");
    let serving = Serving::start(&["--json", "--log", "off", &folder.file("a.toml", ECHO)]);
    let ready: Json = serde_json::from_str(&serving.ready).unwrap();
    assert_eq!(ready["event"], "ready");
    let address = serving.address("udp://");
    assert_eq!(ask(&address, b"x"), b"x");
    serving.signal("-INT");
    let (code, out, err) = serving.end();
    let stopped: Json = serde_json::from_str(&out).unwrap();
    assert_eq!((code, err.as_str()), (Some(0), ""));
    assert_eq!(stopped["services"][0]["received"], 1);
    assert_eq!(stopped["services"][0]["drops"], serde_json::json!({}));
    assert_eq!(stopped["clean"], true);
    assert_eq!(stopped["messages"], 1);
    let number = |value: &Json| value.as_u64().unwrap();
    assert!(number(&stopped["busy_ns"]) > 0 && number(&stopped["cpu_ns"]) > 0, "{stopped}");
    let worker = &stopped["workers"][0];
    assert_eq!(worker["busy_ns"], stopped["busy_ns"]);
    assert!(number(&worker["busy_turns"]) < number(&worker["turns"]), "{stopped}");
    // An idle worker sleeps, and reports it.
    assert!(number(&worker["sleeps"]) > 0 && number(&worker["sleep_ns"]) > 0, "{stopped}");
}

#[test]
fn top_shows_a_running_server() {
    let folder = Folder::new("top");
    let serving = Serving::start(&[&folder.file("a.toml", ECHO)]);
    let (udp, metrics) = (serving.address("udp://"), serving.address("http://"));
    let watch = |more: &[&str]| {
        let mut command = serval();
        command.args(["top", &metrics, "--interval", "0.2"]).args(more);
        let mut watching = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        while watching.try_wait().unwrap().is_none() {
            assert_eq!(ask(&udp, b"again"), b"again");
        }
        let done = watching.wait_with_output().unwrap();
        assert_eq!(done.status.code(), Some(0), "{}", text(&done.stderr));
        text(&done.stdout)
    };
    // On a busy machine the client may not have run between the two reads.
    let look = || serde_json::from_str::<Json>(&watch(&["--json"])).unwrap();
    let replied = |seen: &Json| seen["services"][0]["replied"].as_f64().unwrap();
    let mut looks = std::iter::repeat_with(look).take(10);
    let seen = looks.find(|seen| replied(seen) > 0.0).expect("one that sees replies");
    let service = &seen["services"][0];
    assert_eq!((&service["name"], &seen["ready"]), (&Json::from("echo"), &Json::from(true)));
    assert!(service["stages"]["total"]["p50"].as_f64().unwrap() > 0.0, "{seen}");
    let worker = &seen["workers"][0];
    let share = |state: &str| worker[state].as_f64().unwrap();
    assert!((share("busy") + share("idle") + share("asleep") - 1.0).abs() < 1e-6, "{seen}");
    let shown = watch(&["--once"]);
    assert!(shown.contains("echo") && shown.contains("accelerator"), "{shown}");
}

#[test]
fn top_reports_missing_servers() {
    // At an address of its own, which no other program takes meanwhile.
    let free = std::net::TcpListener::bind("127.0.0.99:0").unwrap();
    let address = free.local_addr().unwrap().to_string();
    drop(free);
    let done = run(&["top", &address, "--once"]);
    let told = text(&done.stderr);
    assert_eq!((done.status.code(), told.lines().count()), (Some(1), 1), "{told}");
    assert!(told.contains(&address) && told.contains("engine.metrics"), "{told}");
    let folder = Folder::new("topless");
    let file =
        folder.file("a.toml", &ECHO.replace("metrics = \"127.0.0.1:0\"", "control = \"off\""));
    for wrong in [&["top", &file, "--once"][..], &["top", "nothing"], &["top", &address]] {
        assert_eq!(run(wrong).status.code(), Some(2), "{wrong:?}");
    }
}

#[test]
fn a_tap_records_network_traffic() {
    let folder = Folder::new("tap");
    let both = "listen = [\"udp://127.0.0.1:0\", \"tcp://127.0.0.1:0\"]\nframing = \"line\"";
    let file = folder.file("a.toml", &ECHO.replace("listen = \"udp://127.0.0.1:0\"", both));
    let pcap = folder.0.join("traffic.pcap");
    let tap = pcap.to_str().unwrap();
    let serving = Serving::start(&["--json", "--log", "off", &file, "--tap", tap]);
    assert_eq!(ask(&serving.address("udp://"), b"hello"), b"hello");
    let mut stream = TcpStream::connect(serving.address("tcp://")).unwrap();
    stream.write_all(b"good day\r\n").unwrap();
    let mut reply = [0; 10];
    stream.read_exact(&mut reply).unwrap();
    assert_eq!(&reply, b"good day\r\n");
    serving.signal("-TERM");
    let (code, out, err) = serving.end();
    assert_eq!(code, Some(0), "{err}");
    let stopped: Json = serde_json::from_str(&out).unwrap();
    // Two datagrams, three segments of a handshake, two with a line each, at least one of the end.
    assert!(stopped["tap"]["packets"].as_u64().unwrap() >= 8, "{stopped}");
    assert_eq!(stopped["tap"]["dropped"], 0);
    let recorded = fs::read(&pcap).unwrap();
    let count = |part: &[u8]| recorded.windows(part.len()).filter(|w| *w == part).count();
    assert_eq!((count(b"hello"), count(b"good day\r\n")), (2, 2));
    // Where tcpdump is installed, it agrees that all is well with every packet.
    if let Ok(read) = Command::new("tcpdump").args(["-nvvr", tap]).output() {
        let told = text(&read.stdout);
        assert!(read.status.success() && told.matches("udp sum ok").count() == 2, "{told}");
        assert!(told.contains("(correct)") && !told.contains("incorrect"), "{told}");
    }
    let denied = run(&["serve", &file, "--tap", "/no/such/folder/a.pcap"]);
    assert_eq!(denied.status.code(), Some(1));
    assert!(text(&denied.stderr).contains("a.pcap cannot be written"), "{}", text(&denied.stderr));
    assert_eq!(run(&["serve", &file, "--tap-snap", "128"]).status.code(), Some(2));
}

/// How a server ends that gets SIGTERM while a request is with its kernel: its exit code and log.
fn ends_with_a_request(name: &str, timeout_ms: u32, drain_ms: u32) -> (Option<i32>, String) {
    let folder = Folder::new(name);
    let kernel = "kernel = \"delay\"\nparams = { microseconds = 60e6 }";
    let slow =
        ECHO.replace("kernel = \"echo\"", &format!("{kernel}\nrequest_timeout_ms = {timeout_ms}"));
    let file = folder.file("a.toml", &slow);
    let serving = Serving::start(&[&file, "--set", &format!("engine.drain_ms={drain_ms}")]);
    let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
    socket.send_to(b"hello", serving.address("udp://")).unwrap();
    let metrics = serving.address("http://");
    let deadline = Instant::now() + PATIENCE;
    while !get(&metrics, "/metrics")
        .contains("serval_requests_received_total{service=\"echo\"} 1\n")
    {
        assert!(Instant::now() < deadline, "the request does not arrive");
    }
    serving.signal("-TERM");
    let (code, _, err) = serving.end();
    (code, err)
}

#[test]
fn unanswered_requests_exit_with_3() {
    let (code, err) = ends_with_a_request("unfinished", 120_000, 50);
    assert_eq!(code, Some(3), "{err}");
    assert!(err.contains("not answered within engine.drain_ms"), "{err}");
}

#[test]
fn a_request_that_times_out_during_a_drain_exits_with_3() {
    // On a busy machine the request may time out before the drain begins; then the exit code is 0, and it is tried again.
    let mut ended = (0..5).map(|_| ends_with_a_request("timed-out", 3000, 60_000));
    let (code, err) = ended.find(|(code, _)| *code != Some(0)).expect("five tries");
    assert_eq!(code, Some(3), "{err}");
    assert!(err.contains("echo; dropped during the run: request_timeout 1"), "{err}");
}

#[test]
fn a_second_signal_ends_the_draining() {
    let folder = Folder::new("second");
    let slow = "kernel = \"delay\"\nparams = { microseconds = 60e6 }\nrequest_timeout_ms = 120000";
    let file = folder.file("a.toml", &ECHO.replace("kernel = \"echo\"", slow));
    let serving = Serving::start(&[&file, "--set", "engine.drain_ms=120000"]);
    let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
    socket.send_to(b"hello", serving.address("udp://")).unwrap();
    let metrics = serving.address("http://");
    let until = |path: &str, part: &str| {
        let deadline = Instant::now() + PATIENCE;
        while !get(&metrics, path).contains(part) {
            assert!(Instant::now() < deadline, "{part} does not appear");
        }
    };
    until("/metrics", "serval_requests_received_total{service=\"echo\"} 1\n");
    serving.signal("-TERM");
    // The endpoint answers while the service drains, and reports it.
    until("/readyz", "HTTP/1.1 503");
    serving.signal("-TERM");
    let (code, _, err) = serving.end();
    assert_eq!(code, Some(3), "{err}");
    assert!(err.contains("the drain ends now"), "{err}");
    assert!(err.contains("drain_timeout 1"), "{err}");
}

#[test]
fn a_second_signal_is_no_failure_if_nothing_is_outstanding() {
    let far = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let upstream = far.local_addr().unwrap();
    let folder = Folder::new("second-clean");
    // Its open connections keep the server draining, and are no requests.
    let relay = format!(
        "schema = 1\n[engine]\nmetrics = \"127.0.0.1:0\"\n[[service]]\nname = \"relay\"\n\
         listen = \"tcp://127.0.0.1:0\"\nframing = \"raw\"\nupstream = \"{upstream}\"\n"
    );
    let file = folder.file("a.toml", &relay);
    let serving = Serving::start(&[&file, "--set", "engine.drain_ms=600000"]);
    let _client = TcpStream::connect(serving.address("tcp://")).unwrap();
    let _server = far.accept().unwrap();
    serving.signal("-TERM");
    let metrics = serving.address("http://");
    let deadline = Instant::now() + PATIENCE;
    while !get(&metrics, "/readyz").contains("HTTP/1.1 503") {
        assert!(Instant::now() < deadline, "the server does not drain");
    }
    serving.signal("-TERM");
    let (code, _, err) = serving.end();
    assert_eq!(code, Some(0), "{err}");
    assert!(err.contains("the drain ends now"), "{err}");
}

#[test]
fn signals_in_a_row_end_an_idle_server_in_order() {
    let folder = Folder::new("row");
    let file = folder.file("a.toml", ECHO);
    for _ in 0..3 {
        let serving = Serving::start(&[&file]);
        assert_eq!(ask(&serving.address("udp://"), b"x"), b"x");
        let pid = serving.child.id();
        // As `timeout` of GNU coreutils does.
        let twice = format!("kill -TERM {pid}; kill -TERM {pid}");
        assert!(Command::new("sh").args(["-c", &twice]).status().unwrap().success());
        let (code, _, err) = serving.end();
        assert_eq!(code, Some(0), "{err}");
    }
}

#[test]
fn connections_of_kernels_are_in_top_and_in_the_last_line() {
    let folder = Folder::new("sockets");
    let streams = "schema = 1\n[engine]\nmetrics = \"127.0.0.1:0\"\n[[service]]\nname = \"streams\"\n\
                   kernel = \"stream_echo\"\n[[service.socket]]\nname = \"clients\"\nlisten = \"tcp://127.0.0.1:0\"\n";
    let serving = Serving::start(&["--json", &folder.file("a.toml", streams)]);
    let mut client = TcpStream::connect(serving.address("tcp://")).unwrap();
    client.write_all(b"good day").unwrap();
    client.read_exact(&mut [0; 8]).unwrap();
    let top = ["top", &serving.address("http://"), "--interval", "0.1"];
    let sample = json(&[&top[..], &["--json"]].concat());
    let of_service = &sample["sockets"][0];
    assert_eq!((&of_service["service"], &of_service["open"]), (&"streams".into(), &1.0.into()));
    assert!(output(&[&top[..], &["--once"]].concat()).contains("sockets of"));
    drop(client);
    serving.signal("-TERM");
    let (code, out, err) = serving.end();
    assert_eq!(code, Some(0), "{err}");
    assert!(err.contains("; sockets: 1 connections, 8 bytes from peers, 8 to peers"), "{err}");
    let stopped: Json = serde_json::from_str(&out).unwrap();
    let sockets = &stopped["services"][0]["sockets"];
    for (figure, value) in [("opened", 1), ("received_bytes", 8), ("sent_bytes", 8)] {
        assert_eq!(sockets[figure], value, "{stopped}");
    }
}

#[test]
fn a_small_arena_is_reported_once_at_the_start() {
    let folder = Folder::new("cramped");
    let long = "max_message_bytes = 60000\nmax_reply_bytes = 60000\n";
    let serving = Serving::start(&[&folder.file("a.toml", &format!("{ECHO}{long}"))]);
    let address = serving.address("udp://");
    assert_eq!(ask(&address, b"still served"), b"still served");
    serving.signal("-TERM");
    let (code, _, log) = serving.end();
    assert_eq!(code, Some(0), "{log}");
    assert_eq!(log.matches("room for 4 requests of 60000 bytes").count(), 1, "{log}");
    assert_eq!(log.matches("arena_bytes").count(), 1, "{log}");
}

#[test]
fn a_port_in_use_exits_with_1_and_is_named() {
    let taken = UdpSocket::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    let folder = Folder::new("taken");
    let file =
        folder.file("a.toml", &ECHO.replace("127.0.0.1:0\"\nacc", &format!("{address}\"\nacc")));
    let done = run(&["serve", &file]);
    assert_eq!(done.status.code(), Some(1));
    assert!(text(&done.stderr).contains(&address), "{}", text(&done.stderr));
}

#[test]
fn a_custom_kernel_is_built_listed_and_served() {
    let folder = Folder::new("kernel");
    let source = folder.file(
        "twice.cpp",
        "#include <serval/kernel.h>\n\
         SERVAL_KERNEL(twice) (serval::Block& block, serval::Mqueue& q) {\n\
             while (auto msg = q.recv(block)) {\n\
                 auto reply = q.reply(block, msg, 2 * msg.len());\n\
                 for (unsigned i = block.rank(); i < 2 * msg.len(); i += block.size())\n\
                     reply.as<char>()[i] = msg.as<const char>()[i % msg.len()];\n\
                 q.send(block, reply);\n\
             }\n\
         }\n",
    );
    let built = json(&["kernel", "build", &source, "--json"]);
    assert_eq!(built["kernels"], serde_json::json!(["twice"]));
    let library = folder.0.join("twice.so");
    assert_eq!(output(&["kernel", "list", library.to_str().unwrap()]), "twice\n");
    // Paths are relative to the configuration file.
    for kernel in ["twice.so", "./twice.so:twice"] {
        let file = folder
            .file("a.toml", &ECHO.replace("kernel = \"echo\"", &format!("kernel = \"{kernel}\"")));
        let serving = Serving::start(&[&file]);
        assert_eq!(ask(&serving.address("udp://"), b"ab"), b"abab");
        serving.signal("-TERM");
        assert_eq!(serving.end().0, Some(0));
    }
    let broken = folder.file("broken.cpp", "this is not C++\n");
    let done = run(&["kernel", "build", &broken]);
    assert_eq!(done.status.code(), Some(1));
    assert!(text(&done.stderr).contains("broken.cpp"), "{}", text(&done.stderr));
    assert_eq!(run(&["kernel", "build", &source, "-o", &source]).status.code(), Some(2));
}

#[test]
fn the_examples_configurations_are_accepted() {
    let examples = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples");
    let file = examples.join("01_echo/service.toml");
    let shown = output(&["check-config", file.to_str().unwrap()]);
    assert!(shown.contains("service.echo"), "{shown}");
}

#[test]
fn missing_resources_of_this_machine_are_refused_by_name() {
    let folder = Folder::new("not-here");
    let file = folder.file("echo.toml", ECHO);
    let cores = "engine.cores=[4095]";
    let refused = run(&["serve", &file, "--set", cores]);
    assert_eq!(refused.status.code(), Some(2));
    let why = "engine.cores names core 4095, which cannot be used here";
    let said = text(&refused.stderr);
    assert!(said.contains(why), "{said}");
    // A file is also checked where it does not serve.
    let shown = output(&["check-config", &file, "--set", cores]);
    assert!(shown.contains(why) && shown.contains("would refuse here"), "{shown}");
    let missing = folder.0.join("missing");
    let control = format!("engine.control={}", missing.join("x.sock").display());
    let refused = run(&["serve", &file, "--set", &control]);
    assert_eq!(refused.status.code(), Some(1));
    let said = text(&refused.stderr);
    assert!(said.contains("engine.control: cannot listen at "), "{said}");
    assert!(said.contains(&format!("the folder {missing:?} does not exist")), "{said}");
}

/// `check-config` on a file that needs a secret: its exit code and what it says, with the secret readable for its owner, for others, and not there.
fn secrets_checked(name: &str, secret: &str, config: &str) -> [(Option<i32>, String); 3] {
    let folder = Folder::new(name);
    let path = folder.file("secret", secret);
    fs::write(folder.0.join("data"), "").unwrap();
    let file = folder.file("a.toml", &format!("schema = 1\n{config}").replace("SECRET", &path));
    let check = || {
        let done = run(&["check-config", &file]);
        (done.status.code(), text(&done.stdout) + &text(&done.stderr))
    };
    let with_mode = |mode| {
        fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
        check()
    };
    let [private, open] = [0o600, 0o644].map(with_mode);
    fs::remove_file(&path).unwrap();
    [private, open, check()]
}

#[test]
fn secrets_that_others_can_read_are_refused_as_serve_refuses_them() {
    let hex = "0123456789abcdef".repeat(4);
    let link = "[[accelerator]]\nname = \"far\"\nkind = \"remote\"\naddress = \"tcp://127.0.0.1:1\"\n\
                secret_file = \"SECRET\"\n[[service]]\nname = \"a\"\nlisten = \"udp://127.0.0.1:0\"\n\
                kernel = \"echo\"\naccelerator = \"far\"\n";
    let file = "[[service]]\nname = \"a\"\nlisten = \"udp://127.0.0.1:0\"\nkernel = \"echo\"\n\
                [[service.backend]]\nname = \"disk\"\nconnect = \"transfer\"\n\
                [[service.file]]\nname = \"data\"\npath = \"data\"\nkey = \"SECRET\"\n[transfer]\n";
    for (name, config) in [("secret-link", link), ("secret-file", file)] {
        let [private, open, missing] = secrets_checked(name, &hex, config);
        assert_eq!(private.0, Some(0), "{}", private.1);
        assert!(!private.1.contains("would refuse here: the"), "{}", private.1);
        assert_eq!(open.0, Some(2), "{}", open.1);
        assert!(open.1.contains("can be read by other users: run chmod 600"), "{}", open.1);
        assert_eq!(missing.0, Some(0), "it may be on another machine: {}", missing.1);
        assert!(missing.1.contains("would refuse here: the"), "{}", missing.1);
    }
    // A secret that is too short is refused as well.
    let [short, ..] = secrets_checked("secret-short", "short", link);
    assert_eq!(short.0, Some(2), "{}", short.1);
    // `serve` runs with a file of keys that others can read, and both say so.
    let keys = format!("a {}\n", "A".repeat(64));
    let function = "[[service]]\nname = \"a\"\nlisten = \"udp://127.0.0.1:0\"\nkernel = \"echo\"\n\
                    [[service.function]]\nname = \"auth\"\nfunction = \"coap-auth\"\nparams = { keys = \"SECRET\" }\n";
    let [private, open, _] = secrets_checked("secret-keys", &keys, function);
    assert_eq!((private.0, open.0), (Some(0), Some(0)), "{}{}", private.1, open.1);
    let warned = |shown: &str| shown.contains("can be read by other users: run chmod 600");
    assert!(!warned(&private.1) && warned(&open.1), "{}{}", private.1, open.1);
}

#[test]
fn zeros_are_shown_with_their_meaning() {
    let folder = Folder::new("zeros");
    let file = folder.file("echo.toml", ECHO);
    let shown = output(&["check-config", &file]);
    for words in ["auto (3 off loopback, else unlimited)", "0 (off)", "0 (auto)"] {
        assert!(shown.contains(words), "{words}: {shown}");
    }
    assert!(
        output(&["check-config", &file, "--set", "limits.udp_reply_ratio=0"])
            .contains("0 (unlimited)")
    );
}
