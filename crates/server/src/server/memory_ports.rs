//! The control side of shared-memory ports: one thread that listens, shakes hands and notices who is
//! gone. Requests never pass here; see `engine/src/endpoint/shm.rs`.
//!
//! A client is let in if it is a process of the same user (or of root), speaks the same versions, and
//! there is room for its connection and its region. What it maps is a region of its own, so it can
//! reach nobody else's messages; the bell it rings is in its worker's epoll set and nowhere else. A
//! client says one thing, its hello, and then nothing: whatever arrives later on its socket ends the
//! connection, as does its end. When the worker lets go of a client the connection is shut down, which
//! this thread sees like any other end.
//!
//! *Ports come and go with services.* The thread holds still while the workers switch ([`Doorman::hold`]), so that
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
use sys::local::{Bell, BellPull, LocalError, LocalListener, LocalSocket, wait_readable};
use sys::{RegionOptions, SharedMemory, Waker};
use wire::handshake::{Answer, DEPTH_DEFAULT, HELLO_BYTES, Hello, Terms};

use super::ServerFabric;
use super::lobby::{Arrived, Lobby, check_user};

/// How often to look whether a worker has let go of a region.
const LEAVING_PAUSE: Duration = Duration::from_millis(10);
/// How long the thread may take until it holds still: it may be making a region.
const HELD_IN: Duration = Duration::from_secs(30);

/// Ports that come, open; nobody is let in before [`Held::go_on`].
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
pub(super) struct Going {
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
struct Hold {
    going: Vec<Going>,
    /// Takes the clients that go.
    held: Sender<Vec<Goer>>,
    change: Receiver<Change>,
}

/// A client that goes if the change comes.
struct Goer {
    slot: u16,
    id: u64,
    /// Where its worker finds …
    why: Arc<OnceLock<String>>,
    /// … this.
    text: String,
}

/// While this is there nobody comes in or is seen off.
pub(super) struct Held {
    going: Vec<(u16, u64)>,
    change: Sender<Change>,
}

impl Held {
    /// The clients of a slot that go, by id.
    pub(super) fn going(&self, slot: u16) -> Vec<u64> {
        self.going.iter().filter(|(of, _)| *of == slot).map(|(_, id)| *id).collect()
    }

    /// These are all ports from now on; `new` ones open, and those that are not named close.
    pub(super) fn go_on(self, ports: Vec<MemoryPort>, new: NewPorts, limits: Limits) {
        // It is there for as long as its doorman.
        let _ = self.change.send(Change { ports, new, limits });
    }
}

/// What the thread is told.
struct Call {
    bell: Bell,
    draining: AtomicBool,
    stop: AtomicBool,
    holds: Mutex<Vec<Hold>>,
}

/// Runs until it is dropped; then the workers' clients must be closed.
pub(super) struct Doorman {
    call: Arc<Call>,
    thread: Option<JoinHandle<()>>,
}

impl Doorman {
    /// Starts the thread; it has no ports. `wakers` are the workers', in order.
    pub(super) fn start(
        limits: Limits,
        fabric: Arc<ServerFabric>,
        wakers: Vec<Waker>,
    ) -> std::io::Result<Self> {
        let call = Arc::new(Call {
            bell: Bell::new()?,
            draining: AtomicBool::new(false),
            stop: AtomicBool::new(false),
            holds: Mutex::default(),
        });
        let mut desk = Desk {
            lobby: Lobby::new(HELLO_BYTES),
            ports: Vec::new(),
            limits,
            fabric,
            wakers,
            call: call.clone(),
            guests: Vec::new(),
            leaving: Vec::new(),
            ids: 0,
        };
        let builder = std::thread::Builder::new().name("serval-memory-ports".into());
        let thread = builder.spawn(move || desk.run())?;
        Ok(Self { call, thread: Some(thread) })
    }

    /// Makes the thread hold still until what is returned is used or dropped; whoever is `going` will be told why
    /// by its worker. `None`: it did not come to that in time.
    pub(super) fn hold(&self, going: Vec<Going>) -> Option<Held> {
        let (held, holds) = mpsc::channel();
        let (tell, change) = mpsc::channel();
        let hold = Hold { going, held, change };
        self.call.holds.lock().unwrap_or_else(PoisonError::into_inner).push(hold);
        self.call.bell.ring();
        let going = holds.recv_timeout(HELD_IN).ok()?;
        // Told here and not by the thread: it may come to this when nobody waits for it any more.
        let tell_why = |goer: Goer| {
            // Whoever was told something before goes for that.
            let _ = goer.why.set(goer.text);
            (goer.slot, goer.id)
        };
        Some(Held { going: going.into_iter().map(tell_why).collect(), change: tell })
    }

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
    slot: u16,
    /// The port by which it came.
    path: Arc<Path>,
    /// What it is told at its end, if the engine goes on.
    why: Arc<OnceLock<String>>,
    worker: u16,
    socket: Arc<LocalSocket>,
    /// Ends the worker's sleeps.
    engine_bell: Bell,
    /// Held here so that the worker never drops the last reference: unmapping takes long.
    memory: Arc<SharedMemory>,
}

/// The worker's way to a client.
struct Peer {
    why: Arc<OnceLock<String>>,
    socket: Arc<LocalSocket>,
    bell: BellPull,
}

impl ShmPeer for Peer {
    fn wake(&self) {
        self.bell.ring();
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
struct Desk {
    /// Doors are ports.
    lobby: Lobby<Arc<Path>>,
    ports: Vec<MemoryPort>,
    limits: Limits,
    fabric: Arc<ServerFabric>,
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
            self.hold_still();
            self.wait_and_see();
        }
    }

    /// While somebody wants it: nobody comes in, nobody is seen off. Then the ports may be others.
    fn hold_still(&mut self) {
        let holds =
            std::mem::take(&mut *self.call.holds.lock().unwrap_or_else(PoisonError::into_inner));
        for Hold { going, held, change } in holds {
            let mut goers = Vec::new();
            for Going { slot, path, why } in going {
                let goes = |guest: &&Guest| {
                    guest.slot == slot && path.as_deref().is_none_or(|path| *guest.path == *path)
                };
                goers.extend(self.guests.iter().filter(goes).map(|guest| Goer {
                    slot,
                    id: guest.id,
                    why: guest.why.clone(),
                    text: why.clone(),
                }));
            }
            // It may have lost its patience; then no change comes.
            let _ = held.send(goers);
            let Ok(Change { ports, new, limits }) = change.recv() else { continue };
            let name = |path: &Path| Some(ports.iter().find(|p| *p.path == *path)?.path.clone());
            self.lobby.change_doors(name, new.0);
            for guest in &mut self.guests {
                if guest.why.get().is_none()
                    && let Some(port) = ports.iter().find(|port| port.path == guest.path)
                {
                    guest.slot = port.slot;
                }
            }
            (self.ports, self.limits) = (ports, limits);
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
            if let Err(why) = self.admit(&door, &socket, &hello) {
                tracing::warn!(why, "a shared-memory client is refused");
                // If it does not listen to the answer it has gone already.
                let _ = socket.send(&Answer::Refused(why).encode(), &[]);
            }
        }
    }

    /// Lets a client in, or says why not.
    fn admit(
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
        let worker = self.fabric.assign_shm_client();
        self.wakers[usize::from(worker)].listen_to(&engine_bell).map_err(|error| {
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
            peer: Box::new(Peer { why: why.clone(), socket: socket.clone(), bell: bell_pull }),
        };
        self.fabric.post(worker, ControlMessage::ShmAttached(Box::new(client)));
        let descriptors = [memory.fd(), engine_bell.as_fd(), client_bell.as_fd()];
        let sent = socket.send(&Answer::Accepted(terms).encode(), &descriptors);
        let (id, path) = (self.ids, path.clone());
        self.guests.push(Guest { id, slot, path, why, worker, socket, engine_bell, memory });
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
        self.fabric.post(guest.worker, ControlMessage::ShmGone(guest.id));
        self.leaving.push(guest.memory);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nobody_is_told_of_a_change_that_was_given_up() {
        let call = Arc::new(Call {
            bell: Bell::new().unwrap(),
            draining: AtomicBool::new(false),
            stop: AtomicBool::new(false),
            holds: Mutex::default(),
        });
        let memory = SharedMemory::create("test", 4096, &RegionOptions::default()).unwrap();
        let why = Arc::new(OnceLock::new());
        let guest = Guest {
            id: 1,
            slot: 0,
            path: Path::new("port").into(),
            why: why.clone(),
            worker: 0,
            socket: Arc::new(LocalSocket::pair().unwrap().0),
            engine_bell: Bell::new().unwrap(),
            memory: Arc::new(memory),
        };
        let mut desk = Desk {
            lobby: Lobby::new(HELLO_BYTES),
            ports: Vec::new(),
            limits: Limits::default(),
            fabric: engine::Fabric::new(Vec::new(), 1),
            wakers: Vec::new(),
            call: call.clone(),
            guests: vec![guest],
            leaving: Vec::new(),
            ids: 1,
        };
        let going = vec![Going { slot: 0, path: None, why: "it changes".into() }];
        let (held, _) = mpsc::channel();
        let (_, change) = mpsc::channel();
        call.holds.lock().unwrap().push(Hold { going, held, change });
        desk.hold_still();
        assert_eq!(why.get(), None);
    }
}
