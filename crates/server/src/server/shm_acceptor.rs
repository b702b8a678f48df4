//! The control side of shared-memory ports: one thread that listens, shakes hands and notices who is
//! gone. Requests never pass here; see `engine/src/endpoint/shm.rs`.
//!
//! A client is let in if it is a process of the same user (or of root), speaks the same versions, and
//! there is room for its connection and its region. What it maps is a region of its own, so it can
//! reach nobody else's messages; its wake-up descriptor is only in its worker's epoll set. A
//! client says one thing, its hello, and then nothing: whatever arrives later on its socket ends the
//! connection, as does its end. When the worker lets go of a client the connection is shut down, which
//! this thread sees like any other end.
//!
//! *Ports come and go with services.* The thread holds still while the workers switch ([`ShmAcceptor::pause`]), so that
//! everybody who was let in is known to be one who stays or one who goes. Whoever goes reads in its region that
//! nothing more is taken from it, gets its outcomes, and is told why.

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
use sys::local::{LocalError, LocalListener, LocalSocket, WakeFd, WakeSender, wait_readable};
use sys::{RegionOptions, SharedMemory, Waker};
use wire::handshake::{Answer, DEPTH_DEFAULT, HELLO_BYTES, Hello, Terms};

use super::ServerFabric;
use super::handshake_queue::{HandshakePeer, HandshakeQueue, check_user};

/// How often to look whether a worker has let go of a region.
const POLL_INTERVAL: Duration = Duration::from_millis(10);
/// How long the thread may take until it holds still: it may be making a region.
const PAUSE_TIMEOUT: Duration = Duration::from_secs(30);

/// Ports that come, open; nobody is let in before [`PausedAcceptor::resume`].
#[derive(Default)]
pub(super) struct NewPorts(Vec<(Arc<Path>, LocalListener)>);

impl NewPorts {
    /// Those of `wanted` that `running` does not have.
    pub(super) fn open(wanted: &Topology, running: Option<&Topology>) -> Result<Self, LocalError> {
        let known = |path: &Path| running.is_some_and(|r| r.memory_ports().any(|p| p.1 == path));
        let new = wanted.memory_ports().map(|(_, path)| path).filter(|path| !known(path));
        let bind = |path: &Path| Ok((path.into(), LocalListener::bind(path)?));
        Ok(Self(new.map(bind).collect::<Result<_, _>>()?))
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

/// What a port leads to.
pub(super) struct MemoryPort {
    pub(super) path: Arc<Path>,
    /// Slot of its service.
    pub(super) slot: u16,
    pub(super) service: Arc<Service>,
}

/// Clients that must go.
pub(super) struct Eviction {
    /// Those of the service in this slot …
    pub(super) slot: u16,
    /// … that came by this port; `None`: all of them.
    pub(super) path: Option<PathBuf>,
    /// What they are told when they have all their outcomes.
    pub(super) why: String,
}

/// How ports change.
struct Change {
    ports: Vec<MemoryPort>,
    new: NewPorts,
    limits: Limits,
}

/// The thread is to hold still, and to go on with a change if one comes.
struct PauseRequest {
    evictions: Vec<Eviction>,
    /// Takes the clients that go.
    paused: Sender<Vec<DepartingClient>>,
    change: Receiver<Change>,
}

/// A client that goes if the change comes.
struct DepartingClient {
    slot: u16,
    id: u64,
    /// Where its worker finds …
    why: Arc<OnceLock<String>>,
    /// … this.
    text: String,
}

/// While this is there nobody comes in or is seen off.
pub(super) struct PausedAcceptor {
    departing: Vec<(u16, u64)>,
    change: Sender<Change>,
}

impl PausedAcceptor {
    /// The clients of a slot that go, by id.
    pub(super) fn departing(&self, slot: u16) -> Vec<u64> {
        self.departing.iter().filter(|(of, _)| *of == slot).map(|(_, id)| *id).collect()
    }

    /// These are all ports from now on; `new` ones open, and those that are not named close.
    pub(super) fn resume(self, ports: Vec<MemoryPort>, new: NewPorts, limits: Limits) {
        // It is there for as long as its doorman.
        let _ = self.change.send(Change { ports, new, limits });
    }
}

/// What the thread is told.
struct Shared {
    wake_fd: WakeFd,
    draining: AtomicBool,
    stop: AtomicBool,
    pause_requests: Mutex<Vec<PauseRequest>>,
}

/// Runs until it is dropped; then the workers' clients must be closed.
pub(super) struct ShmAcceptor {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

impl ShmAcceptor {
    /// Starts the thread; it has no ports. `wakers` are the workers', in order.
    pub(super) fn start(
        limits: Limits,
        fabric: Arc<ServerFabric>,
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

    /// Makes the thread hold still until what is returned is used or dropped; whoever is `departing` will be told why
    /// by its worker. `None`: it did not come to that in time.
    pub(super) fn pause(&self, evictions: Vec<Eviction>) -> Option<PausedAcceptor> {
        let (paused, pause_requests) = mpsc::channel();
        let (tell, change) = mpsc::channel();
        let request = PauseRequest { evictions, paused, change };
        self.shared.pause_requests.lock().unwrap_or_else(PoisonError::into_inner).push(request);
        self.shared.wake_fd.wake();
        let departing = pause_requests.recv_timeout(PAUSE_TIMEOUT).ok()?;
        // Told here and not by the thread: it may come to this when nobody waits for it any more.
        let tell_why = |client: DepartingClient| {
            // Whoever was told something before goes for that.
            let _ = client.why.set(client.text);
            (client.slot, client.id)
        };
        Some(PausedAcceptor {
            departing: departing.into_iter().map(tell_why).collect(),
            change: tell,
        })
    }

    /// Nobody is let in any more, and the sockets' files go.
    pub(super) fn stop_listening(&self) {
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

/// A client that was let in.
struct AcceptedClient {
    id: u64,
    slot: u16,
    /// The port by which it came.
    path: Arc<Path>,
    /// What it is told at its end, if the engine goes on.
    why: Arc<OnceLock<String>>,
    worker: u16,
    socket: Arc<LocalSocket>,
    /// Ends the worker's sleeps.
    engine_wake_fd: WakeFd,
    /// Held here so that the worker never drops the last reference: unmapping takes long.
    memory: Arc<SharedMemory>,
}

/// The worker's way to a client.
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
            // If it does not listen it has gone already.
            let _ = self.socket.send(&Answer::Refused(why.clone()).encode(), &[]);
        }
        self.socket.shut_down();
    }
}

/// The thread's state.
struct AcceptorState {
    /// Doors are ports.
    handshakes: HandshakeQueue<Arc<Path>>,
    ports: Vec<MemoryPort>,
    limits: Limits,
    fabric: Arc<ServerFabric>,
    wakers: Vec<Waker>,
    shared: Arc<Shared>,
    clients: Vec<AcceptedClient>,
    /// Regions of clients that were seen off, until their workers have let go of them.
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

    /// While somebody wants it: nobody comes in, nobody is seen off. Then the ports may be others.
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
            // It may have lost its patience; then no change comes.
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
        // Unmaps those that nobody else holds any more.
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
        // From the back, so that what is removed moves nobody who is still to be looked at.
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
                // If it does not listen to the answer it has gone already.
                let _ = socket.send(&Answer::Refused(why).encode(), &[]);
            }
        }
    }

    /// Lets a client in, or says why not.
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
        let own = |error: std::io::Error| format!("the engine is short of descriptors: {error}");
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
        // The worker first: it serves whatever the client does as soon as it has its answer.
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

    /// A client has gone, said something it must not, or was closed by its worker.
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
    fn nobody_is_told_of_a_change_that_was_given_up() {
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
