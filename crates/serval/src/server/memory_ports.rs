//! The control side of shared-memory ports: one thread that listens, shakes hands and notices who is
//! gone. Requests never pass here; see `engine/src/memory_port.rs`.
//!
//! A client is let in if it is a process of the same user (or of root), speaks the same versions, and
//! there is room for its connection and its region. What it maps is a region of its own, so it can
//! reach nobody else's messages; the bell it rings is in its worker's epoll set and nowhere else. A
//! client says one thing, its hello, and then nothing: whatever arrives later on its socket ends the
//! connection, as does its end. When the worker lets go of a client the connection is shut down, which
//! this thread sees like any other end.

use std::os::fd::{AsFd, BorrowedFd};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use engine::topology::{Replies, Topology};
use engine::{Fabric, MemoryClient, MemoryPeer};
use mqueue::abi::ABI_VERSION;
use mqueue::{MappedMemory, Region};
use sys::local::{Bell, BellPull, LocalError, LocalListener, LocalSocket, wait_readable};
use sys::socket_nic::AcceptedSocket;
use sys::{RegionOptions, SharedMemory, Waker};
use wire::handshake::{Answer, DEPTH_DEFAULT, HELLO_BYTES, Hello, Terms};

use super::lobby::{Arrived, Lobby, check_user};

/// How often to look whether a worker has let go of a region.
const LEAVING_PAUSE: Duration = Duration::from_millis(10);
/// The ports of a topology, open; nobody is let in before [`MemoryPorts::serve`].
pub(super) struct MemoryPorts {
    /// With the index of the service.
    listeners: Vec<(usize, LocalListener)>,
}

impl MemoryPorts {
    pub(super) fn open(topology: &Topology) -> Result<Self, LocalError> {
        let bind = |(service, path): (usize, &Path)| Ok((service, LocalListener::bind(path)?));
        Ok(Self { listeners: topology.memory_ports().map(bind).collect::<Result<_, _>>()? })
    }

    /// Starts the thread; `None` when there are no ports. `wakers` are the workers', in order.
    pub(super) fn serve(
        self,
        topology: Arc<Topology>,
        fabric: Arc<Fabric<AcceptedSocket>>,
        wakers: Vec<Waker>,
    ) -> std::io::Result<Option<Doorman>> {
        if self.listeners.is_empty() {
            return Ok(None);
        }
        let call = Arc::new(Call {
            bell: Bell::new()?,
            draining: AtomicBool::new(false),
            stop: AtomicBool::new(false),
        });
        let mut lobby = Lobby::new(HELLO_BYTES);
        lobby.change_doors(|_| None, self.listeners);
        let mut desk = Desk {
            lobby,
            topology,
            fabric,
            wakers,
            call: call.clone(),
            guests: Vec::new(),
            leaving: Vec::new(),
            ids: 0,
        };
        let builder = std::thread::Builder::new().name("serval-memory-ports".into());
        let thread = builder.spawn(move || desk.run())?;
        Ok(Some(Doorman { call, thread: Some(thread) }))
    }
}

/// What the thread is told.
struct Call {
    bell: Bell,
    draining: AtomicBool,
    stop: AtomicBool,
}

/// Runs until it is dropped; then the workers' clients must be closed.
pub(super) struct Doorman {
    call: Arc<Call>,
    thread: Option<JoinHandle<()>>,
}

impl Doorman {
    /// Nobody is let in any more, and the sockets' files go.
    pub(super) fn stop_listening(&self) {
        self.call.draining.store(true, Ordering::Relaxed);
        self.call.bell.ring();
    }
}

impl Drop for Doorman {
    fn drop(&mut self) {
        self.call.stop.store(true, Ordering::Relaxed);
        self.call.bell.ring();
        if let Some(thread) = self.thread.take() {
            // It does not panic; if it did, there is nothing left to do for it.
            let _ = thread.join();
        }
    }
}

/// A client that was let in.
struct Guest {
    id: u64,
    worker: u16,
    socket: Arc<LocalSocket>,
    /// Ends the worker's sleeps.
    engine_bell: Bell,
    /// Held here so that the worker never drops the last reference: unmapping takes long.
    memory: Arc<SharedMemory>,
}

/// The worker's way to a client.
struct Peer {
    socket: Arc<LocalSocket>,
    bell: BellPull,
}

impl MemoryPeer for Peer {
    fn wake(&self) {
        self.bell.ring();
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        self.socket.shut_down();
    }
}

/// The thread's state.
struct Desk {
    /// Doors are services.
    lobby: Lobby<usize>,
    topology: Arc<Topology>,
    fabric: Arc<Fabric<AcceptedSocket>>,
    wakers: Vec<Waker>,
    call: Arc<Call>,
    guests: Vec<Guest>,
    /// Regions of clients that were seen off, until their workers have let go of them.
    leaving: Vec<Arc<SharedMemory>>,
    ids: u64,
}

impl Desk {
    fn run(&mut self) {
        while !self.call.stop.load(Ordering::Relaxed) {
            if self.call.draining.load(Ordering::Relaxed) {
                self.lobby.close();
            }
            self.wait_and_see();
        }
    }

    fn wait_and_see(&mut self) {
        // Unmaps those that nobody else holds any more.
        self.leaving.retain(|memory| Arc::strong_count(memory) > 1);
        let mut files: Vec<BorrowedFd<'_>> = vec![self.call.bell.as_fd()];
        files.extend(self.guests.iter().map(|g| g.socket.as_fd()));
        files.extend(self.lobby.files());
        let now = Instant::now();
        let patience = self.lobby.until().map(|until| until.saturating_duration_since(now));
        let pause = (!self.leaving.is_empty()).then_some(LEAVING_PAUSE);
        let ready = wait_readable(&files, patience.into_iter().chain(pause).min());
        let (bell, rest) = ready.split_at(1);
        let (guests, lobby) = rest.split_at(self.guests.len());
        if bell[0] {
            self.call.bell.silence();
        }
        // From the back, so that what is removed moves nobody who is still to be looked at.
        for index in (0..guests.len()).rev().filter(|i| guests[*i]) {
            self.see_off(index);
        }
        for Arrived { door, socket, hello } in self.lobby.look(lobby) {
            if hello.is_empty() {
                continue;
            }
            let socket = Arc::new(socket);
            if let Err(why) = self.admit(door, &socket, &hello) {
                tracing::warn!(why, "a shared-memory client is refused");
                // If it does not listen to the answer it has gone already.
                let _ = socket.send(&Answer::Refused(why).encode(), &[]);
            }
        }
    }

    /// Lets a client in, or says why not.
    fn admit(
        &mut self,
        service_index: usize,
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
        let topology = self.topology.clone();
        let limits = &topology.limits;
        if self.fabric.connections() >= limits.connections as usize {
            let most = limits.connections;
            return Err(format!("{most} connections are open: raise limits.connections"));
        }
        let service = &topology.services[service_index];
        let wish = if hello.depth == 0 { DEPTH_DEFAULT } else { hello.depth };
        let plan = service.client_region_plan(wish);
        let bytes = plan.bytes().map_err(|e| e.to_string())?;
        let regions = self.guests.iter().map(|g| &g.memory).chain(&self.leaving);
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
        let engine_bell = Bell::new().map_err(own)?;
        let (bell_pull, client_bell) = BellPull::new().map_err(own)?;
        let socket = socket.clone();
        let worker = self.fabric.seat_memory_client();
        self.wakers[usize::from(worker)].listen_to(&engine_bell).map_err(|error| {
            self.fabric.unseat_memory_client(worker);
            own(error)
        })?;
        let depth = plan.mqueues[0].depth;
        let terms = Terms {
            depth,
            request_bytes_max: service.max_message_bytes,
            reply_bytes_max: service.max_reply_bytes,
            answers: service.replies == Replies::One,
        };
        let (replies, requests) = region.engine_ends(0);
        let words = region.words();
        // The worker first: it serves whatever the client does as soon as it has its answer.
        self.fabric.admit(
            worker,
            MemoryClient {
                id: self.ids,
                service: service_index as u16,
                depth,
                replies,
                requests,
                words,
                peer: Box::new(Peer { socket: socket.clone(), bell: bell_pull }),
            },
        );
        let descriptors = [memory.fd(), engine_bell.as_fd(), client_bell.as_fd()];
        let sent = socket.send(&Answer::Accepted(terms).encode(), &descriptors);
        self.guests.push(Guest { id: self.ids, worker, socket, engine_bell, memory });
        if let Err(error) = sent {
            tracing::warn!(%error, client = self.ids, "a shared-memory client did not get its region");
            self.see_off(self.guests.len() - 1);
        }
        Ok(())
    }

    /// A client has gone, said something it must not, or was closed by its worker.
    fn see_off(&mut self, index: usize) {
        let guest = self.guests.swap_remove(index);
        self.wakers[usize::from(guest.worker)].forget(&guest.engine_bell);
        guest.socket.shut_down();
        self.fabric.dismiss(guest.worker, guest.id);
        self.leaving.push(guest.memory);
    }
}
