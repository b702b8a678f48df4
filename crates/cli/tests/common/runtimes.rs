//! Accelerators of kind `process` in tests: configurations, loads with checks, and fake runtimes.

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::io::{Read as _, Write as _};
use std::net::SocketAddr;
use std::os::fd::{AsFd as _, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use engine::topology::{Accelerator, AcceleratorKind, DeviceSpec, Launch, Service};
use mqueue::abi::{ABI_VERSION, kind};
use mqueue::{Consumer, Head, MappedMemory, Producer, Region};
use server::Server;
use sys::SharedMemory;
use sys::local::LocalSocket;
use sys::readiness::wait_readable;
use wire::DropReason;
use wire::attach::{FromEngine, FromRuntime, Hello, MESSAGE_BYTES_MAX, Offer, Ready};

use super::*;

/// A path that no other test uses.
pub(crate) fn path(name: &str) -> PathBuf {
    std::env::temp_dir().join(format!("serval-attach-{}-{name}", std::process::id()))
}

/// A service on UDP and TCP whose kernel runs on `accelerator`. The time-out of its requests is that of the tests,
/// unless `more` says otherwise.
pub(crate) fn service(name: &str, accelerator: &str, kernel: &str, more: &str) -> String {
    let patience =
        if more.contains("request_timeout_ms") { "" } else { "request_timeout_ms = 60000\n" };
    format!(
        "[[service]]\nname = \"{name}\"\nlisten = [\"udp://127.0.0.1:0\", \"tcp://127.0.0.1:0\"]\n\
         framing = \"length:u16\"\naccelerator = \"{accelerator}\"\nkernel = \"{kernel}\"\n{patience}{more}\n"
    )
}

pub(crate) fn process(name: &str, more: &str) -> String {
    format!("[[accelerator]]\nname = \"{name}\"\nkind = \"process\"\n{more}\n")
}

pub(crate) fn external(name: &str, at: &Path, more: &str) -> String {
    process(name, &format!("launch = \"external\"\nattach = \"{}\"\n{more}", at.display()))
}

/// The only runtime that an engine has started.
pub(crate) fn runtime_of(served: &Served) -> u32 {
    let mut found = Vec::new();
    eventually("there is one runtime", || {
        found = children(served.process.0.id());
        found.len() == 1
    });
    found[0]
}

pub(crate) fn life(served: &Served, what: &str, service: &str, accelerator: &str) -> u64 {
    let labels = format!("{{service=\"{service}\",accelerator=\"{accelerator}\"}}");
    served.metric(&format!("serval_accelerator_{what}{labels}"))
}

/// Every request that was received has its outcome.
pub(crate) fn balances(served: &Served, service: &str) {
    let metric = |name: &str| served.metric(&format!("serval_{name}{{service=\"{service}\"}}"));
    eventually("the accounts balance", || {
        let lost: u64 = DropReason::ALL
            .iter()
            .filter(|reason| reason.scope() == wire::DropScope::Request)
            .map(|reason| served.dropped(service, *reason))
            .sum();
        metric("outstanding_requests") == 0
            && metric("requests_received_total") == metric("replies_total") + lost
    });
}

pub(crate) fn framed(payload: &[u8]) -> Vec<u8> {
    [&(payload.len() as u16).to_be_bytes()[..], payload].concat()
}

/// The results of a client under load.
#[derive(Default)]
struct Seen {
    answered: AtomicU64,
    wrong: AtomicU64,
    closed: AtomicU64,
}

/// Sends numbered datagrams until stopped; each answer must match one of them, once.
fn datagram_load(server: SocketAddr, stop: &AtomicBool, seen: &Seen) {
    let client = udp_client(server);
    client.set_read_timeout(Some(Duration::from_millis(1))).unwrap();
    let mut waiting = BTreeSet::new();
    let mut number = 0_u64;
    while !stop.load(Ordering::Relaxed) {
        for _ in 0..8 {
            number += 1;
            waiting.insert(number);
            client.send(&number.to_le_bytes()).unwrap();
        }
        let mut reply = [0; 100];
        while let Ok(len) = client.recv(&mut reply) {
            let right =
                reply[..len].try_into().is_ok_and(|n| waiting.remove(&u64::from_le_bytes(n)));
            let counter = if right { &seen.answered } else { &seen.wrong };
            counter.fetch_add(1, Ordering::Relaxed);
        }
    }
}

/// Keeps a few requests in flight on connections: each connection is answered in order until it ends.
fn stream_load(server: SocketAddr, stop: &AtomicBool, seen: &Seen) {
    let mut number = 0_u64;
    while !stop.load(Ordering::Relaxed) {
        // The port is open, independent of runtimes.
        let mut stream = tcp_client(server);
        let first = number;
        while !stop.load(Ordering::Relaxed) {
            let batch: Vec<u8> = (0..4).flat_map(|i| framed(&(number + i).to_le_bytes())).collect();
            let mut reply = vec![0; batch.len()];
            if stream.write_all(&batch).is_err() {
                break;
            }
            match stream.read_exact(&mut reply) {
                Ok(()) if reply == batch => seen.answered.fetch_add(4, Ordering::Relaxed),
                Ok(()) => seen.wrong.fetch_add(1, Ordering::Relaxed),
                Err(_) => break,
            };
            number += 4;
        }
        number = first.max(number) + 1000;
        seen.closed.fetch_add(1, Ordering::Relaxed);
        thread::sleep(Duration::from_millis(1));
    }
}

/// Runs `disturb` under load on both transports; the ports stay open, no answer is wrong, the counters agree.
pub(crate) fn under_load(served: &Served, service: &str, disturb: impl FnOnce()) {
    let (udp, tcp) = (served.services[0][0], served.services[0][1]);
    let (stop, seen) = (AtomicBool::new(false), Seen::default());
    thread::scope(|scope| {
        scope.spawn(|| datagram_load(udp, &stop, &seen));
        scope.spawn(|| stream_load(tcp, &stop, &seen));
        let _stop = Stop(&stop);
        eventually("the load flows", || seen.answered.load(Ordering::Relaxed) > 100);
        disturb();
        let before = seen.answered.load(Ordering::Relaxed);
        eventually("the load flows again", || seen.answered.load(Ordering::Relaxed) > before + 100);
    });
    assert_eq!(seen.wrong.load(Ordering::Relaxed), 0, "answers are right or missing");
    balances(served, service);
}

/// `delay`: requests stay in the runtime for long enough to be lost with it.
pub(crate) const SLOW: &str = "params = { microseconds = 3000 }\n";

/// How long an engine waits for a hello.
const HELLO_PATIENCE: Duration = Duration::from_secs(5);

/// A fake runtime, run by this test.
pub(crate) struct Fake {
    socket: LocalSocket,
    /// Just before it connected: the engine's time-out did not start earlier.
    since: Instant,
    /// Messages received without a result, to explain a failure.
    troubles: RefCell<Vec<String>>,
}

/// What an engine offered to a [`Fake`].
pub(crate) struct Place {
    pub(crate) offer: Offer,
    pub(crate) region: SharedMemoryRegion,
    _bell: OwnedFd,
}

pub(crate) struct SharedMemoryRegion {
    pub(crate) memory: MappedMemory,
    rings: Vec<(Consumer<MappedMemory>, Producer<MappedMemory>)>,
}

impl Fake {
    pub(crate) fn connect(at: &Path) -> Self {
        let mut found = None;
        // Many connections at once have to wait until they are accepted.
        eventually("the engine listens", || {
            let since = Instant::now();
            found = LocalSocket::connect(at).ok().map(|socket| (socket, since));
            found.is_some()
        });
        let (socket, since) = found.unwrap();
        Self { socket, since, troubles: RefCell::default() }
    }

    /// A fake runtime with a slot, and how often it was rejected because the previous one had just ended.
    pub(crate) fn come(at: &Path) -> (Self, Place, u32) {
        let mut found = None;
        let mut refused = 0;
        eventually("there is a place", || {
            let fake = Self::connect(at);
            fake.hello();
            let silent = fake.since.elapsed();
            match fake.hear() {
                Some((FromEngine::Offer(offer), files)) => {
                    found = Some((fake, Place::of(offer, files), refused));
                    return true;
                }
                Some((FromEngine::Refuse(why), _)) if why.contains("has just ended") => {
                    refused += 1;
                }
                // This thread was suspended before its hello, and was rejected.
                None if silent >= HELLO_PATIENCE => {}
                other => {
                    let why = fake.troubles.borrow();
                    panic!(
                        "a place, or a refusal for now, not {other:?} ({silent:?} silent, {why:?})"
                    )
                }
            }
            false
        });
        found.unwrap()
    }

    pub(crate) fn hello(&self) {
        let hello = Hello {
            abi_version: ABI_VERSION,
            process: std::process::id(),
            kind: "test".into(),
            service: String::new(),
            kernel: String::new(),
        };
        self.say(&FromRuntime::Hello(hello).encode());
    }

    pub(crate) fn say(&self, bytes: &[u8]) {
        // A hostile runtime ignores that the engine has closed the connection.
        if let Err(error) = self.socket.send(bytes, &[]) {
            self.troubles.borrow_mut().push(format!("saying: {error}"));
        }
    }

    /// The engine's next message; `None` when it has closed the connection.
    pub(crate) fn hear(&self) -> Option<(FromEngine, Vec<OwnedFd>)> {
        let deadline = Instant::now() + PATIENCE;
        let mut bytes = [0; MESSAGE_BYTES_MAX];
        loop {
            match self.socket.receive_descriptors(&mut bytes) {
                Ok(Some((0, _))) => return self.heard_nothing("the end"),
                Err(error) => return self.heard_nothing(&error.to_string()),
                Ok(Some((len, files))) => {
                    return Some((FromEngine::decode(&bytes[..len]).unwrap(), files));
                }
                Ok(None) => assert!(Instant::now() < deadline, "the engine says nothing"),
            }
            wait_readable(&[self.socket.as_fd()], Some(Duration::from_millis(100)));
        }
    }

    fn heard_nothing<T>(&self, why: &str) -> Option<T> {
        self.troubles.borrow_mut().push(format!("hearing: {why}"));
        None
    }

    pub(crate) fn refusal(&self) -> String {
        match self.hear() {
            Some((FromEngine::Refuse(why), _)) => why,
            other => panic!("a refusal, not {other:?}"),
        }
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.hear().is_none()
    }

    /// Reports that the blocks run.
    pub(crate) fn ready(&self, place: &Place) {
        let Offer { generation, blocks, .. } = place.offer;
        self.say(&FromRuntime::Ready(Ready { generation, blocks }).encode());
    }

    /// Takes a slot, and reports that the blocks run.
    pub(crate) fn serve(at: &Path) -> (Self, Place) {
        let (fake, place, _) = Self::come(at);
        fake.ready(&place);
        (fake, place)
    }
}

impl Place {
    pub(crate) fn of(offer: Offer, files: Vec<OwnedFd>) -> Self {
        let [region, wake_fd]: [OwnedFd; 2] = files.try_into().unwrap();
        let shared = SharedMemory::open(region, offer.region_bytes as usize, false).unwrap();
        let memory = MappedMemory::new(Arc::new(shared));
        let mut region = Region::join(memory.clone()).unwrap();
        let rings = (0..region.block_count()).map(|block| region.accelerator_ends(block)).collect();
        Self { offer, region: SharedMemoryRegion { memory, rings }, _bell: wake_fd }
    }
}

impl SharedMemoryRegion {
    /// The next request of any block: the block and the token.
    pub(crate) fn request(&mut self) -> (usize, u64) {
        let mut found = None;
        eventually("a request comes", || {
            for (block, (rx, _)) in self.rings.iter_mut().enumerate() {
                if let Ok(Some(header)) = rx.peek() {
                    rx.advance();
                    rx.release();
                    found = Some((block, header.token));
                    return true;
                }
            }
            false
        });
        found.unwrap()
    }

    pub(crate) fn reply(&mut self, block: usize, token: u64, payload: &[u8]) {
        let head = Head { token, tag: 0, kind: kind::MESSAGE, status: 0 };
        let tx = &mut self.rings[block].1;
        // An unread ring becomes full.
        let _ = tx.push(head, payload);
        tx.publish();
    }
}

/// An engine in this process with one service whose runtimes attach at `at`.
pub(crate) fn engine_at(at: &Path, heartbeat_ms: u64, change: impl FnOnce(&mut Service)) -> Server {
    let mut service = Service::new("echo", vec![udp()], "echo");
    service.request_timeout_ms = 60_000;
    change(&mut service);
    let mut topology = topology(vec![service]);
    let launch = Launch::External { attach: at.to_owned() };
    let kind = AcceleratorKind::Process { launch, heartbeat_ms, device: DeviceSpec::host() };
    topology.accelerators = vec![Accelerator { name: "out".into(), kind }];
    start(topology)
}

pub(crate) fn is_up(server: &Server) -> bool {
    server.metrics().runtimes()[0].is_up()
}
