//! The lobby: local connections on the control side that have not said who they are.
//!
//! Whoever connects to a door says one thing, its hello, within a time, and is then somebody's: the
//! lobby hands it over with what it said. Who says nothing is shown out; when too many wait, whoever is silent
//! longest makes room, because closing the door would keep out those who speak.

use std::os::fd::{AsFd, BorrowedFd};
use std::path::Path;
use std::time::{Duration, Instant};

use sys::local::{LocalListener, LocalSocket};

/// Connections that have not said hello yet.
const PENDING_MAX: usize = 64;
/// How long a connection may take to say hello: also one of a process that has no core for a while. A full lobby
/// waits for nobody.
const HELLO_TIMEOUT: Duration = Duration::from_secs(5);
/// How long to wait when the process has no descriptor left for whoever wants in.
const EXHAUSTED_PAUSE: Duration = Duration::from_millis(20);

/// Between two log lines about it.
const REPORT_INTERVAL: Duration = Duration::from_secs(10);

/// Doors, and who came in by which; `K` names a door.
pub(super) struct HandshakeQueue<K> {
    listeners: Vec<(K, LocalListener)>,
    pending: Vec<PendingPeer<K>>,
    hello_bytes_max: usize,
    /// Before this it says no more about whom it cannot let in.
    next_report: Instant,
}

struct PendingPeer<K> {
    listener_key: K,
    socket: LocalSocket,
    deadline: Instant,
}

/// Somebody who said hello, or left.
pub(super) struct HandshakePeer<K> {
    pub(super) listener_key: K,
    pub(super) socket: LocalSocket,
    /// What it said; a byte longer than any hello if it said more, empty if it left without a word.
    pub(super) hello: Vec<u8>,
}

impl<K: Clone> HandshakeQueue<K> {
    /// Without a door.
    pub(super) fn new(hello_bytes_max: usize) -> Self {
        let (listeners, pending) = (Vec::new(), Vec::new());
        Self { listeners, pending, hello_bytes_max, next_report: Instant::now() }
    }

    /// Nobody comes in any more, and the sockets' files go.
    pub(super) fn close(&mut self) {
        self.listeners.clear();
        self.pending.clear();
    }

    /// From now on these are the doors: `new` ones, and of those that are open whichever `name` names anew.
    pub(super) fn set_listeners(
        &mut self,
        name: impl Fn(&Path) -> Option<K>,
        new: Vec<(K, LocalListener)>,
    ) {
        let old = std::mem::take(&mut self.listeners).into_iter();
        let kept = old.filter_map(|(_, listener)| Some((name(listener.path())?, listener)));
        self.listeners = kept.chain(new).collect();
    }

    /// Lets somebody in who did not come by a listener, and may take until then for its hello.
    pub(super) fn add(&mut self, listener_key: K, socket: LocalSocket, deadline: Instant) {
        self.pending.push(PendingPeer { listener_key, socket, deadline });
    }

    /// What to wait for; [`Self::poll`] takes the answers in this order.
    pub(super) fn descriptors(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        let pending = self.pending.iter().map(|s| s.socket.as_fd());
        pending.chain(self.listeners.iter().map(|(_, listener)| listener.as_fd()))
    }

    /// When somebody's patience ends at the latest.
    pub(super) fn next_deadline(&self) -> Option<Instant> {
        self.pending.iter().map(|s| s.deadline).min()
    }

    /// Looks at who is `ready`, see [`Self::descriptors`]: returns those who said hello or left, and lets in those who came.
    pub(super) fn poll(&mut self, ready: &[bool]) -> Vec<HandshakePeer<K>> {
        let (readable, accepting) = ready.split_at(self.pending.len());
        let mut arrived = Vec::new();
        let now = Instant::now();
        // From the back, so that what is removed moves nobody who is still to be looked at.
        for index in (0..readable.len()).rev() {
            if now >= self.pending[index].deadline {
                arrived.extend(self.read_hello_or_reject(index));
            } else if readable[index] {
                arrived.extend(self.read_hello(index));
            }
        }
        for index in (0..accepting.len()).filter(|index| accepting[*index]) {
            arrived.extend(self.accept(index));
        }
        arrived
    }

    /// `None`: it has said nothing, and stays.
    fn read_hello(&mut self, index: usize) -> Option<HandshakePeer<K>> {
        let mut hello = vec![0; self.hello_bytes_max + 1];
        let len = match self.pending[index].socket.receive(&mut hello) {
            Ok(None) => return None,
            Ok(Some(len)) => len,
            Err(_) => 0,
        };
        let PendingPeer { listener_key, socket, .. } = self.pending.swap_remove(index);
        hello.truncate(len);
        Some(HandshakePeer { listener_key, socket, hello })
    }

    /// Somebody has to leave who may have said hello since it was last looked at, and then is met: this thread
    /// may have stood still meanwhile.
    fn read_hello_or_reject(&mut self, index: usize) -> Option<HandshakePeer<K>> {
        let arrived = self.read_hello(index);
        if arrived.is_none() {
            self.pending.swap_remove(index);
            tracing::debug!("who said nothing is shown out");
        }
        arrived
    }

    /// Lets somebody in; returns whoever had to make room and had said hello.
    fn accept(&mut self, index: usize) -> Option<HandshakePeer<K>> {
        let (listener_key, listener) = &self.listeners[index];
        let mut arrived = None;
        match listener.accept() {
            Ok(Some(socket)) => {
                let listener_key = listener_key.clone();
                if self.pending.len() >= PENDING_MAX {
                    let oldest = (0..self.pending.len()).min_by_key(|i| self.pending[*i].deadline);
                    arrived = self.read_hello_or_reject(oldest.expect("there are some"));
                }
                self.add(listener_key, socket, Instant::now() + HELLO_TIMEOUT);
            }
            Ok(None) => {}
            Err(error) => {
                if Instant::now() >= self.next_report {
                    self.next_report = Instant::now() + REPORT_INTERVAL;
                    let path = listener.path().display();
                    tracing::warn!(%error, %path, "nobody can be let in; raise `ulimit -n`");
                }
                std::thread::sleep(EXHAUSTED_PAUSE);
            }
        }
        arrived
    }
}

/// The engine serves processes of its own user and of root, as the host kernel vouches for them.
pub(super) fn check_user(socket: &LocalSocket) -> Result<(), String> {
    let peer = socket.peer().map_err(|error| error.to_string())?;
    let own = sys::process::user();
    if peer.user == own || peer.user == 0 {
        return Ok(());
    }
    let theirs = peer.user;
    Err(format!("the engine serves processes of user {own} and root, not of user {theirs}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_spoke_while_the_lobby_stood_still_is_heard_and_who_did_not_is_shown_out() {
        let mut queue: HandshakeQueue<()> = HandshakeQueue::new(10);
        let [spoke, silent] = [(); 2].map(|()| {
            let (ours, theirs) = LocalSocket::pair().unwrap();
            queue.add((), ours, Instant::now());
            theirs
        });
        spoke.send(b"hello", &[]).unwrap();
        // What was ready is of before.
        let arrived = queue.poll(&[false, false]);
        assert_eq!(arrived.iter().map(|a| &a.hello[..]).collect::<Vec<_>>(), [b"hello"]);
        assert_eq!(queue.descriptors().count(), 0);
        assert_eq!(silent.receive(&mut [0]).unwrap(), Some(0), "its connection has ended");
    }

    #[test]
    fn a_full_lobby_loses_nobody_who_spoke() {
        let path = std::env::temp_dir().join(format!("serval-lobby-{}", std::process::id()));
        let mut queue: HandshakeQueue<()> = HandshakeQueue::new(10);
        queue.set_listeners(|_| None, vec![((), LocalListener::bind(&path).unwrap())]);
        let mut others = Vec::new();
        for age in (0..PENDING_MAX as u64).rev() {
            let (ours, theirs) = LocalSocket::pair().unwrap();
            queue.add((), ours, Instant::now() - Duration::from_secs(age));
            others.push(theirs);
        }
        others[0].send(b"hello", &[]).unwrap();
        let _new = [(); 2].map(|()| LocalSocket::connect(&path).unwrap());
        assert_eq!(queue.accept(0).unwrap().hello, b"hello");
        assert_eq!(others[1].receive(&mut [0]).unwrap(), None, "there was room without it");
        assert!(queue.accept(0).is_none());
        assert_eq!(others[1].receive(&mut [0]).unwrap(), Some(0), "silent for longest");
        assert_eq!(queue.pending.len(), PENDING_MAX);
    }
}
