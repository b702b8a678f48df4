//! The control side of shared-memory ports: one thread that listens, performs handshakes and detects clients that
//! have gone. Requests do not pass through it; see `engine/src/endpoint/shm.rs`.
//!
//! A client is accepted if its process has the same user as the engine (or root), it speaks the same versions, and
//! there is room for its connection and its region. It maps its own region only, so it cannot reach messages of
//! others; its wake-up descriptor is only in its worker's epoll set. A client sends one message, its hello. Anything
//! it sends later ends the connection, as does closing it. When the worker detaches a client it shuts the connection
//! down, which this thread handles like any other end.
//!
//! *Ports change with services.* The thread pauses while the workers switch ([`ShmAcceptor::pause`]), so that for
//! every accepted client it is known whether it stays or departs. A departing client reads in its region that no more
//! requests are taken, gets its outcomes, and reads the reason.

use std::os::fd::{AsFd, BorrowedFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use engine::topology::{Limits, Replies, Service, Topology};
use engine::{ControlMessage, ShmClient, ShmPeer};
use mqueue::abi::ABI_VERSION;
use mqueue::{MappedMemory, Region};
use sys::local::{LocalError, LocalListener, LocalSocket};
use sys::readiness::{WakeFd, WakeSender, wait_readable};
use sys::{RegionOptions, SharedMemory, Waker};
use wire::handshake::{Answer, DEPTH_DEFAULT, HELLO_BYTES, Hello, Terms};

use crate::base::engine::Engine;
use crate::base::error::ServerError;
use crate::base::handshake_queue::{HandshakePeer, HandshakeQueue, check_user};
use worker::WorkerFabric;

/// How often to check whether a worker has released a region.
const POLL_INTERVAL: Duration = Duration::from_millis(10);
/// How long the thread may take to pause: it may be creating a region.
const PAUSE_TIMEOUT: Duration = Duration::from_secs(30);

/// New ports, listening; no client is accepted before [`PausedAcceptor::resume`].
#[derive(Default)]
pub(crate) struct NewPorts(Vec<(Arc<Path>, LocalListener)>);

impl NewPorts {
    /// The ports of `wanted` that `running` does not have.
    pub(crate) fn open(wanted: &Topology, running: Option<&Topology>) -> Result<Self, LocalError> {
        let known = |path: &Path| running.is_some_and(|r| r.memory_ports().any(|p| p.1 == path));
        let new = wanted.memory_ports().map(|(_, path)| path).filter(|path| !known(path));
        let bind = |path: &Path| Ok((path.into(), LocalListener::bind(path)?));
        Ok(Self(new.map(bind).collect::<Result<_, _>>()?))
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

/// A port and its service.
pub(crate) struct MemoryPort {
    pub(crate) path: Arc<Path>,
    /// Slot of its service.
    pub(crate) slot: u16,
    pub(crate) service: Arc<Service>,
}

impl MemoryPort {
    /// Those of the current services.
    pub(crate) fn all(engine: &Engine) -> Vec<Self> {
        let mut ports = Vec::new();
        for (service, service_slot) in engine.services() {
            let of = Arc::new(service.clone());
            ports.extend(service.memory_ports.iter().map(|path| Self {
                path: path.as_path().into(),
                slot: service_slot.slot,
                service: of.clone(),
            }));
        }
        ports
    }
}

/// Clients that must depart.
pub(crate) struct Eviction {
    /// Clients of the service in this slot …
    pub(crate) slot: u16,
    /// … that connected to this port; `None`: all of them.
    pub(crate) path: Option<PathBuf>,
    /// The reason that they get after all their outcomes.
    pub(crate) why: String,
}

/// The new set of ports.
struct Change {
    ports: Vec<MemoryPort>,
    new: NewPorts,
    limits: Limits,
}

/// Asks the thread to pause until a change comes or is given up.
struct PauseRequest {
    evictions: Vec<Eviction>,
    /// Receives the clients that will depart.
    paused: Sender<Vec<DepartingClient>>,
    change: Receiver<Change>,
}

/// A client that departs if the change comes.
struct DepartingClient {
    slot: u16,
    id: u64,
    /// Where its worker reads the reason.
    why: Arc<OnceLock<String>>,
    /// The reason.
    text: String,
}

/// While this exists, no client is accepted or disconnected.
pub(crate) struct PausedAcceptor {
    departing: Vec<(u16, u64)>,
    change: Sender<Change>,
}

impl PausedAcceptor {
    /// The departing clients of a slot, by id.
    pub(crate) fn departing(&self, slot: u16) -> Vec<u64> {
        self.departing.iter().filter(|(of, _)| *of == slot).map(|(_, id)| *id).collect()
    }

    /// Sets the ports: `new` ones open, those that are not listed close.
    pub(crate) fn resume(self, ports: Vec<MemoryPort>, new: NewPorts, limits: Limits) {
        // The receiver exists as long as the thread does.
        let _ = self.change.send(Change { ports, new, limits });
    }
}

/// Shared by the server and the thread.
struct Shared {
    wake_fd: WakeFd,
    draining: AtomicBool,
    stop: AtomicBool,
    pause_requests: Mutex<Vec<PauseRequest>>,
}

/// The shared-memory ports of a server.
pub(crate) struct MemoryPorts {
    /// Started with the first port.
    acceptor: Option<ShmAcceptor>,
    /// Of the workers, in order.
    wakers: Vec<Waker>,
}

impl MemoryPorts {
    /// None yet. `wakers` are the workers', in order.
    pub(crate) fn new(wakers: Vec<Waker>) -> Self {
        Self { acceptor: None, wakers }
    }

    /// Whether there was never a port.
    pub(crate) fn is_unused(&self) -> bool {
        self.acceptor.is_none()
    }

    /// What accepts clients.
    pub(crate) fn acceptor(&mut self, engine: &Engine) -> Result<&ShmAcceptor, ServerError> {
        if self.acceptor.is_none() {
            let limits = engine.topology.limits.clone();
            let started = ShmAcceptor::start(limits, engine.fabric.clone(), self.wakers.clone());
            self.acceptor = Some(started.map_err(ServerError::no_thread("memory-ports"))?);
        }
        Ok(self.acceptor.as_ref().expect("it is started above"))
    }

    /// Stops accepting clients and removes the files of the sockets.
    pub(crate) fn stop_listening(&self) {
        if let Some(acceptor) = &self.acceptor {
            acceptor.stop_listening();
        }
    }
}

/// Runs until it is dropped; after that the workers' clients must be closed.
pub(crate) struct ShmAcceptor {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

impl ShmAcceptor {
    /// Starts the thread; it has no ports. `wakers` are the workers', in order.
    fn start(
        limits: Limits,
        fabric: Arc<WorkerFabric>,
        wakers: Vec<Waker>,
    ) -> std::io::Result<Self> {
        let shared = Arc::new(Shared {
            wake_fd: WakeFd::new()?,
            draining: AtomicBool::new(false),
            stop: AtomicBool::new(false),
            pause_requests: Mutex::default(),
        });
        let mut state = AcceptorState {
            handshakes: HandshakeQueue::new(HELLO_BYTES),
            ports: Vec::new(),
            limits,
            fabric,
            wakers,
            shared: shared.clone(),
            clients: Vec::new(),
            retired: Vec::new(),
            ids: 0,
        };
        let builder = std::thread::Builder::new().name("serval-memory-ports".into());
        let thread = builder.spawn(move || state.run())?;
        Ok(Self { shared, thread: Some(thread) })
    }

    /// Pauses the thread until the returned value is used or dropped; the workers tell evicted clients the reason.
    /// `None`: the thread did not pause in time.
    pub(crate) fn pause(&self, evictions: Vec<Eviction>) -> Option<PausedAcceptor> {
        let (paused, pause_requests) = mpsc::channel();
        let (tell, change) = mpsc::channel();
        let request = PauseRequest { evictions, paused, change };
        self.shared.pause_requests.lock().unwrap_or_else(PoisonError::into_inner).push(request);
        self.shared.wake_fd.wake();
        let departing = pause_requests.recv_timeout(PAUSE_TIMEOUT).ok()?;
        // Set here and not by the thread: the thread may get here when the caller has given up.
        let tell_why = |client: DepartingClient| {
            // A client that already has a reason keeps it.
            let _ = client.why.set(client.text);
            (client.slot, client.id)
        };
        Some(PausedAcceptor {
            departing: departing.into_iter().map(tell_why).collect(),
            change: tell,
        })
    }

    fn stop_listening(&self) {
        self.shared.draining.store(true, Ordering::Relaxed);
        self.shared.wake_fd.wake();
    }
}

impl Drop for ShmAcceptor {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Relaxed);
        self.shared.wake_fd.wake();
        if let Some(thread) = self.thread.take() {
            // It does not panic; if it did, there is nothing left to do for it.
            let _ = thread.join();
        }
    }
}

/// A client that was accepted.
struct AcceptedClient {
    id: u64,
    slot: u16,
    /// The port it connected to.
    path: Arc<Path>,
    /// The reason sent at its end, if the engine keeps running.
    why: Arc<OnceLock<String>>,
    worker: u16,
    socket: Arc<LocalSocket>,
    /// Wakes the worker.
    engine_wake_fd: WakeFd,
    /// Kept here so that the worker never drops the last reference: unmapping takes long.
    memory: Arc<SharedMemory>,
}

/// The worker's connection to a client.
struct Peer {
    why: Arc<OnceLock<String>>,
    socket: Arc<LocalSocket>,
    wake_fd: WakeSender,
}

impl ShmPeer for Peer {
    fn wake(&self) {
        self.wake_fd.wake();
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        if let Some(why) = self.why.get() {
            // If the client does not read the answer, it has already closed the connection.
            let _ = self.socket.send(&Answer::Refused(why.clone()).encode(), &[]);
        }
        self.socket.shut_down();
    }
}

/// The thread's state.
struct AcceptorState {
    /// Listeners are identified by their ports.
    handshakes: HandshakeQueue<Arc<Path>>,
    ports: Vec<MemoryPort>,
    limits: Limits,
    fabric: Arc<WorkerFabric>,
    wakers: Vec<Waker>,
    shared: Arc<Shared>,
    clients: Vec<AcceptedClient>,
    /// Regions of disconnected clients, until their workers have released them.
    retired: Vec<Arc<SharedMemory>>,
    ids: u64,
}

impl AcceptorState {
    fn run(&mut self) {
        while !self.shared.stop.load(Ordering::Relaxed) {
            if self.shared.draining.load(Ordering::Relaxed) {
                self.handshakes.close();
            }
            self.serve_pauses();
            self.wait_and_dispatch();
        }
    }

    /// Pauses as long as a request asks for it, then takes over the new set of ports, if one comes.
    fn serve_pauses(&mut self) {
        let pause_requests = std::mem::take(
            &mut *self.shared.pause_requests.lock().unwrap_or_else(PoisonError::into_inner),
        );
        for PauseRequest { evictions, paused, change } in pause_requests {
            let mut departing = Vec::new();
            for Eviction { slot, path, why } in evictions {
                let departs = |client: &&AcceptedClient| {
                    client.slot == slot && path.as_deref().is_none_or(|path| *client.path == *path)
                };
                departing.extend(self.clients.iter().filter(departs).map(|client| {
                    DepartingClient {
                        slot,
                        id: client.id,
                        why: client.why.clone(),
                        text: why.clone(),
                    }
                }));
            }
            // The caller may have given up; then no change comes.
            let _ = paused.send(departing);
            let Ok(Change { ports, new, limits }) = change.recv() else { continue };
            let name = |path: &Path| Some(ports.iter().find(|p| *p.path == *path)?.path.clone());
            self.handshakes.set_listeners(name, new.0);
            for client in &mut self.clients {
                if client.why.get().is_none()
                    && let Some(port) = ports.iter().find(|port| port.path == client.path)
                {
                    client.slot = port.slot;
                }
            }
            (self.ports, self.limits) = (ports, limits);
        }
    }

    fn wait_and_dispatch(&mut self) {
        // Unmaps the regions that no worker uses any more.
        self.retired.retain(|memory| Arc::strong_count(memory) > 1);
        let mut descriptors: Vec<BorrowedFd<'_>> = vec![self.shared.wake_fd.as_fd()];
        descriptors.extend(self.clients.iter().map(|g| g.socket.as_fd()));
        descriptors.extend(self.handshakes.descriptors());
        let now = Instant::now();
        let timeout =
            self.handshakes.next_deadline().map(|until| until.saturating_duration_since(now));
        let pause = (!self.retired.is_empty()).then_some(POLL_INTERVAL);
        let ready = wait_readable(&descriptors, timeout.into_iter().chain(pause).min());
        let (wake_fd, rest) = ready.split_at(1);
        let (clients, handshakes) = rest.split_at(self.clients.len());
        if wake_fd[0] {
            self.shared.wake_fd.clear();
        }
        // Backwards, so that a removal does not move entries that are still to be checked.
        for index in (0..clients.len()).rev().filter(|i| clients[*i]) {
            self.disconnect(index);
        }
        for HandshakePeer { listener_key, socket, hello } in self.handshakes.poll(handshakes) {
            if hello.is_empty() {
                continue;
            }
            let socket = Arc::new(socket);
            if let Err(why) = self.accept(&listener_key, &socket, &hello) {
                tracing::warn!(why, "a shared-memory client is refused");
                // If the client does not read the answer, it has already closed the connection.
                let _ = socket.send(&Answer::Refused(why).encode(), &[]);
            }
        }
    }

    /// Accepts a client, or returns why not.
    fn accept(
        &mut self,
        path: &Arc<Path>,
        socket: &Arc<LocalSocket>,
        hello: &[u8],
    ) -> Result<(), String> {
        check_user(socket)?;
        let hello = Hello::decode(hello).map_err(|e| e.to_string())?;
        if hello.abi_version != ABI_VERSION {
            return Err(format!(
                "the engine speaks region ABI {ABI_VERSION}, the client {}: use matching builds",
                hello.abi_version
            ));
        }
        let limits = &self.limits;
        if self.fabric.connections() >= limits.connections as usize {
            let most = limits.connections;
            return Err(format!("{most} connections are open: raise limits.connections"));
        }
        let port = self.ports.iter().find(|port| port.path == *path);
        let (slot, service) = match port {
            Some(port) => (port.slot, port.service.clone()),
            None => return Err("this port has just been closed".into()),
        };
        let wish = if hello.depth == 0 { DEPTH_DEFAULT } else { hello.depth };
        let plan = service.client_region_plan(wish);
        let bytes = plan.bytes().map_err(|e| e.to_string())?;
        let regions = self.clients.iter().map(|g| &g.memory).chain(&self.retired);
        let taken: u64 = regions.map(|memory| memory.len_bytes() as u64).sum();
        let most_mib = limits.region_mib;
        if taken + bytes > most_mib << 20 {
            return Err(format!(
                "a region of {} MiB more than fills the {most_mib} MiB that all shared-memory clients \
                 may use: ask for fewer slots, or raise limits.region_mib",
                bytes.div_ceil(1 << 20)
            ));
        }
        self.ids += 1;
        let name = format!("serval:{}:client:{}", service.name, self.ids);
        let region = SharedMemory::create(&name, bytes as usize, &RegionOptions::default());
        let memory = Arc::new(region.map_err(|e| e.to_string())?);
        let mapped = MappedMemory::new(memory.clone());
        let mut region = Region::format(mapped, &plan).map_err(|e| e.to_string())?;
        let own = |error: std::io::Error| format!("the engine has no free descriptors: {error}");
        let engine_wake_fd = WakeFd::new().map_err(own)?;
        let (wake_sender, client_wake_fd) = WakeSender::new().map_err(own)?;
        let socket = socket.clone();
        let worker = self.fabric.assign_shm_client();
        self.wakers[usize::from(worker)].listen_to(&engine_wake_fd).map_err(|error| {
            self.fabric.release_shm_client(worker);
            own(error)
        })?;
        let depth = plan.rings[0].depth;
        let terms = Terms {
            depth,
            request_bytes_max: service.max_message_bytes,
            reply_bytes_max: service.max_reply_bytes,
            answers: service.replies == Replies::One,
        };
        let (replies, requests) = region.engine_ends(0);
        let words = region.words();
        let why = Arc::new(OnceLock::new());
        // The worker first: a client may send as soon as it has its answer.
        let client = ShmClient {
            id: self.ids,
            service: slot,
            depth,
            replies,
            requests,
            words,
            peer: Box::new(Peer { why: why.clone(), socket: socket.clone(), wake_fd: wake_sender }),
        };
        self.fabric.post(worker, ControlMessage::ShmAttached(Box::new(client)));
        let descriptors = [memory.fd(), engine_wake_fd.as_fd(), client_wake_fd.as_fd()];
        let sent = socket.send(&Answer::Accepted(terms).encode(), &descriptors);
        let (id, path) = (self.ids, path.clone());
        self.clients.push(AcceptedClient {
            id,
            slot,
            path,
            why,
            worker,
            socket,
            engine_wake_fd,
            memory,
        });
        if let Err(error) = sent {
            tracing::warn!(%error, client = self.ids, "a shared-memory client did not get its region");
            self.disconnect(self.clients.len() - 1);
        }
        Ok(())
    }

    /// Disconnects a client that has gone, broke the protocol, or was closed by its worker.
    fn disconnect(&mut self, index: usize) {
        let client = self.clients.swap_remove(index);
        self.wakers[usize::from(client.worker)].forget(&client.engine_wake_fd);
        client.socket.shut_down();
        self.fabric.post(client.worker, ControlMessage::ShmGone(client.id));
        self.retired.push(client.memory);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_client_is_notified_of_a_cancelled_change() {
        let shared = Arc::new(Shared {
            wake_fd: WakeFd::new().unwrap(),
            draining: AtomicBool::new(false),
            stop: AtomicBool::new(false),
            pause_requests: Mutex::default(),
        });
        let memory = SharedMemory::create("test", 4096, &RegionOptions::default()).unwrap();
        let why = Arc::new(OnceLock::new());
        let client = AcceptedClient {
            id: 1,
            slot: 0,
            path: Path::new("port").into(),
            why: why.clone(),
            worker: 0,
            socket: Arc::new(LocalSocket::pair().unwrap().0),
            engine_wake_fd: WakeFd::new().unwrap(),
            memory: Arc::new(memory),
        };
        let mut state = AcceptorState {
            handshakes: HandshakeQueue::new(HELLO_BYTES),
            ports: Vec::new(),
            limits: Limits::default(),
            fabric: engine::Fabric::new(Vec::new(), 1),
            wakers: Vec::new(),
            shared: shared.clone(),
            clients: vec![client],
            retired: Vec::new(),
            ids: 1,
        };
        let evictions = vec![Eviction { slot: 0, path: None, why: "it changes".into() }];
        let (paused, _) = mpsc::channel();
        let (_, change) = mpsc::channel();
        shared.pause_requests.lock().unwrap().push(PauseRequest { evictions, paused, change });
        state.serve_pauses();
        assert_eq!(why.get(), None);
    }
}
