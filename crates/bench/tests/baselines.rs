//! The programs that Serval is compared with: each answers every message correctly, prints its totals when it ends,
//! and refuses unknown flags. A baseline with wrong or missing answers would be easy to beat.
// xtask: ci

mod common;

use std::io::{BufRead as _, BufReader, Read as _};
use std::net::{SocketAddr, UdpSocket};
use std::path::{Path, PathBuf};
use std::process::{ChildStdout, Command, Output, Stdio};
use std::sync::OnceLock;

use bench::client::{self, Echo, Load, Stream, Workload};
use bench::function::KernelFunction;
use common::faces::*;
use common::*;
use engine::topology::{Backend, Service};
use serde_json::Value as Json;
use wire::framing::Framing;
use wire::nic::Transport;

/// The folder of the programs, built by the first test that needs it.
fn folder() -> &'static Path {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    BUILT.get_or_init(|| {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("baselines");
        let mut make = Command::new("make");
        make.arg("-C").arg(root.join("benches/baselines"));
        let built = make.arg(format!("BUILD={}", folder.display())).output();
        let built = built.unwrap_or_else(|error| panic!("{error}: install make"));
        assert!(built.status.success(), "{}", String::from_utf8_lossy(&built.stderr));
        folder
    })
}

/// A server under measurement.
struct Baseline {
    process: Peer,
    output: BufReader<ChildStdout>,
    address: SocketAddr,
    what: String,
}

impl Baseline {
    fn start(line: &str) -> Self {
        let mut words = line.split(' ');
        let mut command = Command::new(folder().join(words.next().unwrap()));
        command.args(words).stdout(Stdio::piped());
        let mut process = Peer::start(&mut command, "the Makefile builds it");
        let mut output = BufReader::new(process.0.stdout.take().unwrap());
        let mut ready = String::new();
        output.read_line(&mut ready).unwrap();
        assert!(ready.starts_with("ready"), "{line}: {ready:?}");
        let (scheme, address) = ready.trim_end().rsplit_once("://").unwrap();
        assert!(scheme.ends_with(if line.contains("--tcp") { " tcp" } else { " udp" }), "{ready}");
        Self { process, output, address: address.parse().unwrap(), what: line.to_owned() }
    }

    /// Ends it; its totals must contain at least `replies`.
    fn end(mut self, replies: u64) {
        self.process.signal("TERM");
        let mut rest = String::new();
        self.output.read_to_string(&mut rest).unwrap();
        let status = self.process.0.wait().unwrap();
        assert_eq!(status.code(), Some(0), "{}", self.what);
        let account: Json = serde_json::from_str(rest.lines().last().unwrap()).unwrap();
        let figure = |name: &str| account[name].as_u64().unwrap();
        assert!(figure("messages") >= replies, "{}: {account}, not {replies}", self.what);
        assert!(figure("busy_ns") > 0 && figure("cpu_ns") > 0, "{}: {account}", self.what);
    }
}

/// Sends requests over UDP, one at a time and many at once.
fn answers_udp(line: &str, messages: &mut dyn Workload) {
    let server = Baseline::start(line);
    let mut replies = 0;
    for window in [1, 64] {
        let load = Load { window, requests: 300, timeout: PATIENCE, ..Load::default() };
        let outcome = client::udp(server.address, &load, messages).unwrap();
        assert!(outcome.is_perfect(), "{line}: {outcome:?}");
        replies += outcome.replied;
    }
    server.end(replies);
}

fn answers_tcp(line: &str, request_bytes: u32, reply_bytes: u32, messages: &mut dyn Workload) {
    let server = Baseline::start(line);
    let load = Load { window: 64, requests: 2000, timeout: PATIENCE, ..Load::default() };
    let stream = Stream {
        connections: 3,
        framing: Framing::Fixed(request_bytes),
        reply_framing: Framing::Fixed(reply_bytes),
    };
    let outcome = client::tcp(server.address, &stream, &load, messages).unwrap();
    assert!(outcome.is_perfect(), "{line}: {outcome:?}");
    server.end(outcome.replied);
}

/// Messages, and the answers of Serval's kernel with that name.
struct AsTheKernel {
    function: KernelFunction,
    messages: Vec<Vec<u8>>,
    expected: Vec<u8>,
}

impl AsTheKernel {
    fn new(kernel: &str, messages: Vec<Vec<u8>>) -> Self {
        let function = KernelFunction::open(kernel, &[], 2048, 2048).unwrap();
        Self { function, messages, expected: Vec::new() }
    }

    fn digits() -> Self {
        let file = include_bytes!("../../../device/models/digits_heldout.bin");
        let pictures = file[12..].chunks_exact(785).map(|record| record[1..].to_vec());
        Self::new("lenet", pictures.collect())
    }

    fn numbers() -> Self {
        let vector = |n: usize| (0..n * 7).flat_map(move |i| ((i * n) as f32 - 3.5).to_le_bytes());
        Self::new("scale", (1..50).map(|n| vector(n).collect()).collect())
    }
}

impl Workload for AsTheKernel {
    fn request(&mut self, index: u64, into: &mut Vec<u8>) {
        into.extend_from_slice(&self.messages[index as usize % self.messages.len()]);
    }

    fn accepts(&mut self, index: u64, reply: &[u8]) -> bool {
        let message = &self.messages[index as usize % self.messages.len()];
        self.function.call(message, &mut self.expected).unwrap();
        reply == self.expected
    }
}

const ECHO_FORMS: &[&str] =
    &["", " --gso", " --blocking", " --batch 3", " --core 0,0,0", " --blocking --gso --batch 5"];
const HOST_CENTRIC_FORMS: &[&str] =
    &["", " --pinning same", " --workers 3 --batch 5", " --workers 2 --gso", " --spin"];

#[test]
fn every_form_of_echo_returns_the_message() {
    for form in ECHO_FORMS {
        answers_udp(&format!("echo{form}"), &mut Echo::new(64));
    }
    answers_udp("echo --max-bytes 60000", &mut Echo::new(60_000));
    for form in ["", " --blocking"] {
        answers_tcp(&format!("echo --tcp --frame 100{form}"), 100, 100, &mut Echo::new(100));
    }
    // So long that a socket does not accept all replies at once.
    answers_tcp("echo --tcp --frame 65536", 65_536, 65_536, &mut Echo::new(65_536));
}

#[test]
fn every_form_of_the_host_centric_server_returns_the_message() {
    for form in HOST_CENTRIC_FORMS {
        answers_udp(&format!("host_centric{form}"), &mut Echo::new(64));
    }
    if std::thread::available_parallelism().unwrap().get() > 1 {
        answers_udp("host_centric --pinning cross", &mut Echo::new(64));
    }
}

#[test]
fn functions_answer_as_the_kernels() {
    for server in ["echo", "echo --gso", "host_centric --workers 2", "host_centric --gso"] {
        answers_udp(&format!("{server} --handler lenet"), &mut AsTheKernel::digits());
        answers_udp(&format!("{server} --handler scale"), &mut AsTheKernel::numbers());
        answers_udp(&format!("{server} --handler spin:20"), &mut Echo::new(80));
    }
    answers_tcp("echo --tcp --handler lenet", 784, 44, &mut AsTheKernel::digits());
}

#[test]
fn wrong_messages_get_no_reply_and_delay_no_others() {
    for line in
        ["echo --handler lenet", "echo --handler lenet --gso", "host_centric --handler lenet"]
    {
        let server = Baseline::start(line);
        let client = udp_client(server.address);
        for bytes in [0, 1, 783, 785, 2048, 2049, 4000] {
            client.send(&vec![0; bytes]).unwrap();
        }
        assert_eq!(ask(&client, &[0; 784]).len(), 44, "{line}");
        server.end(1);
    }
    let server = Baseline::start("echo --handler sockperf");
    let client = udp_client(server.address);
    let (request, _) = well_framed(Framing::Sockperf, 5);
    let mut expected = request.clone();
    expected[9] &= !1;
    let mut warm_up = request.clone();
    warm_up[9] |= 4;
    client.send(&warm_up).unwrap();
    client.send(&request[..15]).unwrap();
    assert_eq!(ask(&client, &request), expected);
    server.end(1);
}

/// The answer of Serval's own service to the same request.
fn serval_says(memcached: &Memcached) -> impl FnMut(&[u8]) -> Vec<u8> {
    let backend = Backend::new("db", Transport::Tcp, memcached.address(), Framing::Memcached);
    let service = Service {
        max_message_bytes: 2048,
        request_timeout_ms: 15_000,
        backends: vec![Backend { timeout_ms: 15_000, ..backend }],
        ..Service::new("faces", vec![udp()], "faces")
    };
    let server = start(topology(vec![service]));
    let client = udp_client(address(&server, 0));
    move |question| {
        assert_eq!(server.addresses().len(), 1);
        ask(&client, question)
    }
}

const FACES_FORMS: &[&str] = &[
    "--mode sync",
    "--mode sync --threads 5",
    "--mode async",
    "--mode async --wait spin --gso",
    "--mode async --wait yield --keys 1 --connections 3",
    "--mode async --keys 64 --connections 2",
];

fn start_faces(form: &str, memcached: &Memcached, timeout_ms: u32) -> Baseline {
    let database = memcached.address();
    Baseline::start(&format!("faces {form} --memcached {database} --timeout-ms {timeout_ms}"))
}

#[test]
fn faces_are_verified_as_by_the_kernel() {
    let memcached = Memcached::start();
    memcached.fill();
    let mut serval = serval_says(&memcached);
    let mut answers = Vec::new();
    for n in 0..LABELS {
        for (label_of, picture_of) in [(n, n), (n, (n + 1) % LABELS), (UNKNOWN_LABEL + n, n)] {
            let question = request(label_of, picture_of);
            let answer = serval(&question);
            answers.push((question, answer));
        }
    }
    let verdicts = |kind| answers.iter().filter(|(_, answer)| verdict(answer).0 == kind).count();
    assert_eq!([MATCH, NO_MATCH, UNKNOWN].map(verdicts), [LABELS; 3]);
    for form in FACES_FORMS {
        let server = start_faces(form, &memcached, 15_000);
        // A socket for each question, so that replies in any order can be matched.
        let clients: Vec<UdpSocket> = answers.iter().map(|_| udp_client(server.address)).collect();
        for _ in 0..3 {
            for (client, (question, _)) in clients.iter().zip(&answers) {
                client.send(&question[..question.len() - 1]).unwrap();
                client.send(question).unwrap();
            }
            for (client, (_, answer)) in clients.iter().zip(&answers) {
                let mut reply = [0; 64];
                let bytes = client.recv(&mut reply).expect("a reply in time");
                assert_eq!(&reply[..bytes], answer, "{form}");
            }
        }
        server.end(3 * answers.len() as u64);
    }
}

#[test]
fn a_stopped_or_killed_database_is_reported_and_reconnected() {
    for form in ["--mode sync", "--mode async", "--mode async --wait spin --connections 2"] {
        let mut memcached = Memcached::start();
        memcached.fill();
        let server = start_faces(form, &memcached, 300);
        let client = udp_client(server.address);
        assert_eq!(ask_until_available(&client, 1, 1), MATCH);
        memcached.process.suspend();
        assert_eq!(ask_faces(&client, 1, 1), UNAVAILABLE, "{form}");
        memcached.process.signal("CONT");
        assert_eq!(ask_until_available(&client, 1, 2), NO_MATCH, "{form}");
        memcached.process.stop();
        assert_eq!(ask_faces(&client, 1, 1), UNAVAILABLE, "{form}");
        memcached = Memcached::start_on(memcached.port).expect("the port is still free");
        assert_eq!(ask_until_available(&client, 1, 1), UNKNOWN, "{form}");
        memcached.fill();
        assert_eq!(ask_until_available(&client, 1, 1), MATCH, "{form}");
        server.end(6);
    }
}

fn run(line: &str) -> Output {
    let mut words = line.split(' ');
    let mut command = Command::new(folder().join(words.next().unwrap()));
    command.args(words).stdin(Stdio::null()).output().unwrap()
}

#[test]
fn bare_loops_print_their_rate() {
    for function in ["lenet", "faces", "echo"] {
        let done = run(&format!("bare --function {function} --seconds 1"));
        assert!(done.status.success());
        let said: Json = serde_json::from_slice(&done.stdout).unwrap();
        assert_eq!(said["function"], function);
        let (rate, ns) = (said["rate"].as_f64().unwrap(), said["ns_per_call"].as_f64().unwrap());
        assert!(rate > 0.0 && (rate * ns / 1e9 - 1.0).abs() < 0.1, "{said}");
    }
}

#[test]
fn health_is_judged_by_the_rate() {
    let done = run("echo --health");
    let said: Json = serde_json::from_slice(&done.stdout).unwrap();
    let fit = said["rate"].as_f64().unwrap() >= said["least"].as_f64().unwrap();
    assert_eq!(said["fit"], fit, "{said}");
    assert_eq!(done.status.code(), Some(if fit { 0 } else { 1 }));
}

#[test]
fn wrong_flags_are_refused() {
    let wrong = [
        "echo --unknown",
        "echo --batch",
        "echo --batch 0",
        "echo --batch many",
        "echo --handler nothing",
        "echo --handler spin:x",
        "echo --listen localhost:1",
        "echo --listen 127.0.0.1",
        "echo --listen 127.0.0.1:70000",
        "echo --tcp --gso",
        "echo --tcp --core 0,1",
        "neighbour --size 0",
        "host_centric --pinning elsewhere",
        "host_centric --pinning same --spin",
        "host_centric --cores 0",
        "host_centric --workers 0",
        "faces --mode both",
        "faces --mode sync --connections 2",
        "faces --memcached nowhere",
        "bare --function sqrt",
        "bare --seconds 0",
    ];
    for line in wrong {
        let done = run(line);
        assert_eq!(done.status.code(), Some(2), "{line}");
        assert!(done.stdout.is_empty(), "{line}");
        assert_eq!(String::from_utf8_lossy(&done.stderr).trim_end().lines().count(), 1, "{line}");
    }
    for program in ["echo", "host_centric", "faces", "bare", "neighbour"] {
        let done = run(&format!("{program} --help"));
        assert!(done.status.success());
        assert!(String::from_utf8_lossy(&done.stdout).starts_with(&format!("usage: {program}")));
    }
}
