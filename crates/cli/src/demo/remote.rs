//! `serval demo remote`: LeNet on the engine's core, in a process of its own, and on a remote accelerator over an authenticated TCP link,
//! and one service that spans both sides of the link. Every answer is compared with that of the engine's core.

use std::net::{SocketAddr, UdpSocket};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use ::bench::client::workload::{Digit, Digits};
use ::bench::units::span;
use ::remote::{Greeter, Secret};
use engine::topology::{
    Accelerator, AcceleratorKind, CpuPlacement, DeviceSpec, EngineSettings, HEARTBEAT_MS, Launch,
    Limits, Listen, STACK_KIB, Service, Topology,
};
use runtime::far::{self, Terms};
use runtime::{HostDevice, kinds};
use serde_json::json;
use server::Server;
use wire::framing::Framing;
use wire::nic::Transport;

use super::{DemoError, Report, Stage};
use crate::screen::{Table, Tone};

/// Time for the link to come up, and for a reply.
const PATIENCE: Duration = Duration::from_secs(20);
/// Requests in flight at the service that spans both sides.
const WINDOW: usize = 8;

fn failed(what: &str) -> impl FnOnce(std::io::Error) -> DemoError {
    let what = what.to_owned();
    move |error| DemoError::Io { what, error }
}

pub(super) fn run(stage: &Stage<'_>) -> Result<Report, DemoError> {
    let secret = SecretFile::new().map_err(failed("write a secret"))?;
    let wrong = |error: &dyn std::fmt::Display| DemoError::Wrong(error.to_string());
    let known = Secret::read(&secret.0).map_err(|error| wrong(&error))?;
    let greeter = Greeter::bind("tcp://127.0.0.1:0", known).map_err(|error| wrong(&error))?;
    let address = greeter.local_address().map_err(failed("listen"))?;
    let over = AtomicBool::new(false);
    thread::scope(|scope| {
        let over = &over;
        // The other machine: threads of this process, which share only the connection with the engine.
        let far = scope.spawn(move || {
            let device = || Ok(Box::new(HostDevice::new(1, Vec::new())) as _);
            let terms = Terms {
                kernels: Vec::new(),
                device: &device,
                exclusive: false,
                once: false,
                hang: PATIENCE,
            };
            far::listen(greeter, &terms, over)
        });
        let report = show(stage, address, &secret);
        over.store(true, Ordering::Relaxed);
        let ended = far.join().expect("it does not panic");
        ended.map_err(|error| wrong(&error))?;
        report
    })
}

/// A service, its accelerators, and what to call it.
const SERVICES: [(&str, &[usize], &str); 4] = [
    ("engine", &[0], "the engine's core"),
    ("process", &[1], "a process of its own"),
    ("remote", &[2], "remote, over TCP"),
    ("both", &[0, 2], "the engine's core and remote"),
];

/// The engine, with a service on every side of the link.
fn start(stage: &Stage<'_>, far: SocketAddr, secret: &SecretFile) -> Result<Server, DemoError> {
    let launched = |device: DeviceSpec, threads| AcceleratorKind::Process {
        launch: Launch::Engine { program: None, threads, cores: Vec::new(), stack_kib: STACK_KIB },
        heartbeat_ms: HEARTBEAT_MS,
        device,
    };
    let given = [
        ("address".to_owned(), format!("tcp://{far}")),
        ("secret_file".to_owned(), secret.0.display().to_string()),
    ];
    let remote = kinds::device_spec("remote", &given).map_err(DemoError::Wrong)?;
    let inside = AcceleratorKind::Cpu { placement: CpuPlacement::Worker, stack_kib: STACK_KIB };
    let kinds = [inside, launched(DeviceSpec::host(), 1), launched(remote, 0)];
    let accelerators = ["near", "apart", "far"].into_iter().zip(kinds);
    let service = |(name, on, _): (&str, &[usize], &str)| {
        let listen =
            Listen { transport: Transport::Udp, address: SocketAddr::from(([127, 0, 0, 1], 0)) };
        Service {
            framing: Framing::Fixed(Digits::PICTURE_BYTES as u32),
            accelerators: on.to_vec(),
            mqueues: stage.options.mqueues.unwrap_or(2),
            // Every request is answered, even if the core is busy for a while.
            request_timeout_ms: PATIENCE.as_millis() as u64,
            ..Service::new(name, vec![listen], "lenet")
        }
    };
    let topology = Topology {
        engine: EngineSettings { workers: stage.options.workers, ..EngineSettings::default() },
        limits: Limits::default(),
        accelerators: accelerators
            .map(|(name, kind)| Accelerator { name: name.to_owned(), kind })
            .collect(),
        services: SERVICES.into_iter().map(service).collect(),
        tenants: Vec::new(),
    };
    let server = Server::start(topology)?;
    let deadline = Instant::now() + PATIENCE;
    while !server.metrics().runtimes().iter().all(|runtime| runtime.is_up()) {
        stage.check_interrupted()?;
        if Instant::now() > deadline {
            return Err(DemoError::Wrong("the link to the remote accelerator is not up".into()));
        }
        thread::sleep(Duration::from_millis(5));
    }
    Ok(server)
}

/// What a service answered.
struct Answers {
    /// By digit.
    replies: Vec<Vec<u8>>,
    /// One request at a time, sorted.
    times: Vec<Duration>,
}

impl Answers {
    fn quantile(&self, share: f64) -> Duration {
        self.times[((self.times.len() - 1) as f64 * share) as usize]
    }
}

/// Sends every digit `rounds` times, with `window` requests in flight.
fn read(
    stage: &Stage<'_>,
    address: SocketAddr,
    digits: &[Digit<'_>],
    rounds: usize,
    window: usize,
) -> Result<Answers, DemoError> {
    let mut sockets = Vec::new();
    for _ in 0..window {
        let socket = UdpSocket::bind("127.0.0.1:0").map_err(failed("bind a socket"))?;
        socket.connect(address).map_err(failed("connect a socket"))?;
        socket.set_read_timeout(Some(PATIENCE)).map_err(failed("set a time-out"))?;
        sockets.push(socket);
    }
    let (mut replies, mut times) = (vec![Vec::new(); digits.len()], Vec::new());
    let mut reply = [0; 2 * Digits::REPLY_BYTES];
    for round in 0..rounds {
        // A socket has one request in flight, so its reply needs no number.
        for first in (0..digits.len()).step_by(window) {
            stage.check_interrupted()?;
            let batch = first..digits.len().min(first + window);
            let start = Instant::now();
            for (socket, digit) in sockets.iter().zip(&digits[batch.clone()]) {
                socket.send(digit.picture).map_err(failed("send a digit"))?;
            }
            for (socket, digit) in sockets.iter().zip(batch) {
                let len = socket.recv(&mut reply).map_err(failed("receive a reply"))?;
                times.push(start.elapsed());
                if round == 0 {
                    replies[digit] = reply[..len].to_vec();
                } else if replies[digit] != reply[..len] {
                    // Differs from what is expected in the comparison, too.
                    replies[digit].clear();
                }
            }
        }
    }
    times.sort_unstable();
    Ok(Answers { replies, times })
}

fn show(stage: &Stage<'_>, far: SocketAddr, secret: &SecretFile) -> Result<Report, DemoError> {
    let all = Digit::held_out();
    let digits = if stage.options.quick { &all[..100] } else { &all[..] };
    let rounds = if stage.options.quick { 1 } else { 10 };
    let server = start(stage, far, secret)?;
    let addresses: Vec<SocketAddr> =
        server.addresses().iter().map(|(_, listen)| listen.address).collect();
    let bar = stage.progress("reading held-out digits", SERVICES.len());
    let mut answers = Vec::new();
    for ((name, ..), address) in SERVICES.iter().zip(addresses) {
        let window = if *name == "both" { WINDOW } else { 1 };
        answers.push(read(stage, address, digits, rounds, window)?);
        bar.inc(1);
    }
    bar.finish_and_clear();
    if stage.options.corrupt {
        answers[2].replies[0][0] ^= 1;
    }
    let names = ["kernel on", ">in flight", ">p50", ">p99", ">added p50", ">checked", ">wrong"];
    let (mut table, mut rows) = (Table::new(&names), Vec::new());
    let right = answers[0].replies.clone();
    let at = answers[1].quantile(0.5).as_secs_f64();
    let (mut checked, mut wrong) = (0, 0);
    for ((name, _, title), found) in SERVICES.iter().zip(&answers) {
        let row_wrong = found.replies.iter().zip(&right).filter(|(a, b)| a != b).count();
        let (p50, p99) = (found.quantile(0.5).as_secs_f64(), found.quantile(0.99).as_secs_f64());
        let window = if *name == "both" { WINDOW } else { 1 };
        let added = (*name == "remote").then_some(p50 - at);
        let shown = |time: f64| span(time * 1e9);
        table.row([
            (*title).to_owned(),
            window.to_string(),
            shown(p50),
            shown(p99),
            added.map_or("-".to_owned(), |added| format!("{:.1} us", added * 1e6)),
            found.replies.len().to_string(),
            row_wrong.to_string(),
        ]);
        rows.push(json!({
            "service": name, "in_flight": window, "p50_us": p50 * 1e6, "p99_us": p99 * 1e6,
            "added_p50_us": added.map(|added| added * 1e6), "checked": found.replies.len(), "wrong": row_wrong,
        }));
        checked += found.replies.len();
        wrong += row_wrong;
    }
    if !server.shutdown().is_clean() {
        return Err(DemoError::Wrong("the server did not end cleanly".to_owned()));
    }
    let screen = &stage.options.screen;
    let text = format!(
        "{}\n\n{}\n  The remote accelerator is reached over loopback TCP; link and engine share only that connection. What the link adds is\n  \
         compared with a process of its own. {checked} answers were compared with those of the engine's core, {wrong} were wrong.\n",
        screen.paint(Tone::Bold, "LeNet-5 on local and remote accelerators"),
        table.render(screen),
    );
    let json = json!({ "demo": "remote", "rows": rows, "checked": checked, "wrong": wrong });
    let failure = (wrong > 0).then(|| format!("{wrong} of {checked} answers are wrong"));
    Ok(Report { text, json, chart: None, failure })
}

/// A file with a fresh secret; it is removed.
struct SecretFile(PathBuf);

impl SecretFile {
    fn new() -> std::io::Result<Self> {
        use std::io::Write as _;
        use std::os::unix::fs::OpenOptionsExt as _;
        let name = format!("serval-demo-remote-{}.secret", std::process::id());
        let path = std::env::temp_dir().join(name);
        let mut options = std::fs::OpenOptions::new();
        let mut file = options.write(true).create_new(true).mode(0o600).open(&path)?;
        let made = Self(path);
        writeln!(file, "{}", Secret::random()?)?;
        Ok(made)
    }
}

impl Drop for SecretFile {
    fn drop(&mut self) {
        // What cannot be removed stays in the folder for temporary files.
        let _ = std::fs::remove_file(&self.0);
    }
}
