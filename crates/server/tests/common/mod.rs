//! What the integration tests share: a server on free loopback ports, and clients that check.
#![allow(dead_code, unused_imports, reason = "each test binary uses a part")]

pub(crate) mod change;
pub(crate) mod crowd;
pub(crate) mod faces;
pub(crate) mod network;
mod receive;

use std::fs::File;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use engine::topology::{
    Accelerator, AcceleratorKind, CpuPlacement, EngineSettings, Limits, Listen, STACK_KIB, Service,
    Topology,
};
pub(crate) use receive::receive;
use server::Server;
use wire::DropReason;
use wire::framing::Framing;
use wire::nic::Transport;

/// Longest that anything in a test may take.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

pub(crate) fn udp() -> Listen {
    Listen { transport: Transport::Udp, address: ([127, 0, 0, 1], 0).into() }
}

pub(crate) fn tcp() -> Listen {
    Listen { transport: Transport::Tcp, address: ([127, 0, 0, 1], 0).into() }
}

/// One `cpu` accelerator on the workers' own cores.
pub(crate) fn topology(services: Vec<Service>) -> Topology {
    topology_on(CpuPlacement::Worker, services)
}

/// Requests wait for as long as any test does where the services leave that open: a kernel whose thread has no core for
/// a second loses none.
pub(crate) fn topology_on(placement: CpuPlacement, mut services: Vec<Service>) -> Topology {
    let usual = Service::new("", Vec::new(), "").request_timeout_ms;
    for service in services.iter_mut().filter(|service| service.request_timeout_ms == usual) {
        service.request_timeout_ms = 60_000;
    }
    let kind = AcceleratorKind::Cpu { placement, stack_kib: STACK_KIB };
    // The machine may be busy: a user's function may take as long as one of the operator.
    let engine = EngineSettings {
        user_deadline_us: onpath::spec::DEADLINE_US_MAX,
        user_function_percent: 100,
        ..EngineSettings::default()
    };
    Topology {
        engine,
        limits: Limits::default(),
        accelerators: vec![Accelerator { name: "acc0".into(), kind }],
        services,
        tenants: Vec::new(),
    }
}

pub(crate) fn start(topology: Topology) -> Server {
    Server::start(topology).expect("the server starts")
}

/// The address of the `n`-th listener of the whole topology.
pub(crate) fn address(server: &Server, n: usize) -> SocketAddr {
    server.addresses()[n].1.address
}

pub(crate) fn udp_client(server: SocketAddr) -> UdpSocket {
    let any: SocketAddr =
        if server.is_ipv4() { ([127, 0, 0, 1], 0).into() } else { "[::1]:0".parse().unwrap() };
    let socket = UdpSocket::bind(any).unwrap();
    socket.connect(server).unwrap();
    socket.set_read_timeout(Some(PATIENCE)).unwrap();
    socket
}

/// Sends one datagram and returns the reply. The socket is connected, so a reply from any other
/// address or port than the one asked would never arrive.
pub(crate) fn ask(socket: &UdpSocket, message: &[u8]) -> Vec<u8> {
    socket.send(message).unwrap();
    let mut reply = vec![0; 65_536];
    let len = receive(socket, &mut reply).expect("a reply in time");
    reply.truncate(len);
    reply
}

pub(crate) fn tcp_client(server: SocketAddr) -> TcpStream {
    let stream = TcpStream::connect(server).unwrap();
    stream.set_nodelay(true).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    stream.set_write_timeout(Some(PATIENCE)).unwrap();
    stream
}

pub(crate) fn exchange(stream: &mut TcpStream, request: &[u8], reply_bytes: usize) -> Vec<u8> {
    stream.write_all(request).unwrap();
    let mut reply = vec![0; reply_bytes];
    stream.read_exact(&mut reply).expect("a reply in time");
    reply
}

/// Waits until `condition` holds.
pub(crate) fn eventually(what: &str, mut condition: impl FnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !condition() {
        assert!(Instant::now() < deadline, "not in time: {what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

pub(crate) fn dropped(server: &Server, service: usize, reason: DropReason) -> u64 {
    server.metrics().service(service).dropped(reason)
}

/// Once nothing is in flight, the accounting identity is exact: every received request was replied
/// to, consumed or dropped for a reason. Every client has stopped asking: a server that is asked
/// all the time need never be seen quiet.
pub(crate) fn assert_accounts(server: &Server) {
    eventually("the server becomes quiet", || {
        server.metrics().workers().map(|w| w.outstanding.value()).sum::<u64>() == 0
    });
    for service in 0..server.topology().services.len() {
        eventually("the accounts balance", || {
            let s = server.metrics().service(service);
            s.received == s.replied + s.consumed + s.dropped_requests()
                && s.handed_out == s.handed_in
                && s.replies_handed_out == s.replies_handed_in
        });
    }
}

/// Bytes that differ from one (length, salt) to the next.
pub(crate) fn pattern(len: usize, salt: usize) -> Vec<u8> {
    (0..len).map(|i| (i * 31 + salt * 7 + (i >> 8)) as u8).collect()
}

/// A request as a client of this framing sends it, and the reply of `echo` (of the `store` test kernel
/// for memcached) as it comes back. `salt` makes them differ.
pub(crate) fn well_framed(framing: Framing, salt: usize) -> (Vec<u8>, Vec<u8>) {
    let payload = match framing {
        Framing::Fixed(bytes) => pattern(bytes as usize, salt),
        Framing::Line | Framing::LineCrLf => format!("line {salt}").into_bytes(),
        Framing::Memcached => {
            return (format!("get key{salt}\r\n").into_bytes(), b"END\r\n".to_vec());
        }
        Framing::Sockperf => {
            let len = 14 + salt % 200;
            let mut message = pattern(len, salt);
            // From a client, wants a reply.
            message[8..10].copy_from_slice(&3_u16.to_be_bytes());
            message[10..14].copy_from_slice(&(len as u32).to_be_bytes());
            message
        }
        _ => framing.sample_request(&pattern(1 + salt % 300, salt)),
    };
    let (mut request, mut reply) = (Vec::new(), Vec::new());
    framing.encode_request(&payload, &mut request).unwrap();
    framing.encode_reply(&payload, &mut reply).unwrap();
    (request, reply)
}

/// Numbers that look random and are the same in every run (xorshift64*).
pub(crate) struct Random(u64);

impl Random {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    /// In [0, bound).
    pub(crate) fn below(&mut self, bound: usize) -> usize {
        (self.next() >> 16) as usize % bound
    }

    pub(crate) fn bytes(&mut self, len: usize) -> Vec<u8> {
        (0..len).map(|_| (self.next() >> 32) as u8).collect()
    }
}

/// Tests that count what the whole process holds (descriptors, memory) run one at a time.
pub(crate) fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Compiles a kernel library of this repository with the flags of the built-in kernels, once in each
/// process. `source` is relative to the repository.
pub(crate) fn build_kernel(source: &str) -> String {
    static BUILT: Mutex<Vec<PathBuf>> = Mutex::new(Vec::new());
    let mut built = BUILT.lock().unwrap_or_else(PoisonError::into_inner);
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let stem = Path::new(source).file_stem().unwrap().to_str().unwrap();
    let library = folder.join(format!("{stem}.so"));
    if !built.contains(&library) {
        // Another test program may be about to load it: the new one takes its place in one step.
        let fresh = folder.join(format!("{stem}-{}.so", std::process::id()));
        let compiler = std::env::var("CXX").unwrap_or_else(|_| "c++".into());
        let output = Command::new(&compiler)
            .args(["-std=c++17", "-O3", "-fPIC", "-shared", "-fno-exceptions", "-fno-rtti"])
            .args(["-fvisibility=hidden", "-fstack-clash-protection", "-o"])
            .arg(&fresh)
            .arg("-I")
            .arg(root.join("device/include"))
            .arg("-I")
            .arg(root.join("device"))
            .arg(root.join(source))
            .output()
            .unwrap_or_else(|error| panic!("{compiler} does not start ({error}): install g++"));
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        std::fs::rename(&fresh, &library).unwrap();
        built.push(library.clone());
    }
    library.to_str().unwrap().to_owned()
}

/// A process that ends with the test, however the test ends.
pub(crate) struct Peer(pub(crate) Child);

impl Peer {
    pub(crate) fn start(command: &mut Command, how_to_get_it: &str) -> Self {
        let started = command.stdin(Stdio::null()).spawn();
        Self(started.unwrap_or_else(|error| panic!("{error}: {how_to_get_it}")))
    }

    /// Suspends the process; returns when every thread of it stands still.
    pub(crate) fn suspend(&self) {
        self.signal("STOP");
        let tasks = format!("/proc/{}/task", self.0.id());
        let stands = |task: std::io::Result<std::fs::DirEntry>| {
            let stat = std::fs::read_to_string(task.unwrap().path().join("stat")).unwrap();
            // (A thread under a tracer stands so in a small letter.)
            stat.rsplit_once(") ").unwrap().1.starts_with(['T', 't'])
        };
        eventually("the process stops", || std::fs::read_dir(&tasks).unwrap().all(stands));
    }

    /// Sends a signal by name, such as `CONT`, to this process alone.
    pub(crate) fn signal(&self, name: &str) {
        let process = self.0.id().to_string();
        let done = Command::new("kill").args(["-s", name, &process]).status().unwrap();
        assert!(done.success(), "kill -s {name} {process}");
    }

    pub(crate) fn stop(&mut self) {
        // Gone already is as good; SIGKILL also ends a stopped process.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        self.stop();
    }
}

/// A free port of 127.0.0.1, on UDP and on TCP, for what has to know its port before it listens. It lies outside the range
/// that the host kernel gives out by itself, so only another call of this function could take it, and a lock keeps those of
/// all processes off it until this one has ended.
pub(crate) fn free_port() -> u16 {
    static CALLS: AtomicU32 = AtomicU32::new(0);
    /// Locked files; the locks end with the process.
    static TAKEN: Mutex<Vec<File>> = Mutex::new(Vec::new());
    let range = std::fs::read_to_string("/proc/sys/net/ipv4/ip_local_port_range").unwrap();
    let first_ephemeral: u32 = range.split_whitespace().next().unwrap().parse().unwrap();
    let (first, end) = (2048, first_ephemeral.max(4096));
    let start = std::process::id().wrapping_mul(7919);
    let folder = std::env::temp_dir().join(format!("serval-test-ports-{}", sys::process::user()));
    std::fs::create_dir_all(&folder).unwrap();
    for _ in 0..1000 {
        let call = CALLS.fetch_add(1, Ordering::Relaxed);
        let port = (first + start.wrapping_add(call) % (end - first)) as u16;
        let mut options = File::options();
        options.create(true).truncate(false).write(true);
        let lock = options.open(folder.join(port.to_string())).unwrap();
        let address = ("127.0.0.1", port);
        if lock.try_lock().is_ok()
            && UdpSocket::bind(address).is_ok()
            && TcpListener::bind(address).is_ok()
        {
            TAKEN.lock().unwrap_or_else(PoisonError::into_inner).push(lock);
            return port;
        }
    }
    panic!("no free port below {end}");
}

/// What a process uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Usage {
    pub(crate) resident_bytes: u64,
    pub(crate) descriptors: u64,
    pub(crate) threads: u64,
    pub(crate) cpu_ticks: u64,
}

impl Usage {
    pub(crate) fn of(process: u32) -> Self {
        let status = std::fs::read_to_string(format!("/proc/{process}/status")).unwrap();
        let field = |name: &str| -> u64 {
            let line = status.lines().find_map(|line| line.strip_prefix(name)).unwrap();
            line.split_whitespace().next().unwrap().parse().unwrap()
        };
        let stat = std::fs::read_to_string(format!("/proc/{process}/stat")).unwrap();
        // Behind the program's name, which may hold spaces; proc(5) counts the fields from 1.
        let fields: Vec<&str> = stat.rsplit_once(") ").unwrap().1.split(' ').collect();
        let ticks = |number: usize| fields[number - 3].parse::<u64>().unwrap();
        Self {
            resident_bytes: field("VmRSS:") << 10,
            descriptors: std::fs::read_dir(format!("/proc/{process}/fd")).unwrap().count() as u64,
            threads: field("Threads:"),
            cpu_ticks: ticks(14) + ticks(15),
        }
    }
}

/// The page of a metrics endpoint.
pub(crate) fn page(metrics: SocketAddr) -> String {
    let mut stream = tcp_client(metrics);
    stream.write_all(b"GET /metrics HTTP/1.1\r\nHost: test\r\n\r\n").unwrap();
    let mut page = String::new();
    stream.read_to_string(&mut page).unwrap();
    page
}

/// The processes that `parent` started and that still run.
pub(crate) fn children(parent: u32) -> Vec<u32> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir("/proc").unwrap().flatten() {
        let Ok(process) = entry.file_name().to_string_lossy().parse() else { continue };
        let Ok(stat) = std::fs::read_to_string(entry.path().join("stat")) else { continue };
        let Some((_, rest)) = stat.rsplit_once(") ") else { continue };
        let mut fields = rest.split(' ');
        let (state, of) = (fields.next().unwrap(), fields.next().unwrap());
        if of == parent.to_string() && state != "Z" {
            found.push(process);
        }
    }
    found
}

pub(crate) fn signal(process: u32, name: &str) {
    let done = Command::new("kill").args(["-s", name, &process.to_string()]).status().unwrap();
    assert!(done.success(), "kill -s {name} {process}");
}

/// Asks until the last question has its answer; earlier ones may have theirs late, and nothing else comes. The socket
/// belongs to this call; later datagrams are dropped.
pub(crate) fn answers_again(server: SocketAddr, salt: usize) {
    let client = udp_client(server);
    client.set_read_timeout(Some(Duration::from_millis(100))).unwrap();
    let mut asked = Vec::new();
    eventually("the service answers again", || {
        let request = pattern(40, salt * 1000 + asked.len());
        client.send(&request).unwrap();
        asked.push(request);
        let mut reply = [0; 100];
        while let Ok(len) = client.recv(&mut reply) {
            let of = asked.iter().position(|request| reply[..len] == *request);
            if of.expect("the answer to a question of this call") == asked.len() - 1 {
                return true;
            }
        }
        false
    });
}

/// Stops the threads of a scope also when the test fails.
pub(crate) struct Stop<'a>(pub(crate) &'a AtomicBool);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}
