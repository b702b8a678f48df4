//! Local connections on the control side that have not identified themselves yet.
//!
//! A peer that connects to a listener must send one message, its hello, before a deadline. The queue then passes the
//! connection and the hello to its owner. A peer that sends nothing is rejected. If too many are pending, the oldest
//! one is rejected: closing the listener instead would keep out peers that do send.

use std::os::fd::{AsFd, BorrowedFd};
use std::path::Path;
use std::time::{Duration, Instant};

use sys::local::{LocalListener, LocalSocket};

/// Maximum number of connections that have not sent their hello.
const PENDING_MAX: usize = 64;
/// How long a peer may take to send its hello, also if it is not scheduled for a while. A full queue rejects earlier.
const HELLO_TIMEOUT: Duration = Duration::from_secs(5);
/// How long to wait before accepting again when the process has no free descriptor.
const EXHAUSTED_PAUSE: Duration = Duration::from_millis(20);

/// Minimum time between two log lines about that.
const REPORT_INTERVAL: Duration = Duration::from_secs(10);

/// Listeners, and the pending peers of each; `K` identifies a listener.
pub(crate) struct HandshakeQueue<K> {
    listeners: Vec<(K, LocalListener)>,
    pending: Vec<PendingPeer<K>>,
    hello_bytes_max: usize,
    /// No log line about failed accepts before this time.
    next_report: Instant,
}

struct PendingPeer<K> {
    listener_key: K,
    socket: LocalSocket,
    deadline: Instant,
}

/// A peer that sent its hello, or closed its connection.
pub(crate) struct HandshakePeer<K> {
    pub(crate) listener_key: K,
    pub(crate) socket: LocalSocket,
    /// The hello: one byte longer than the longest valid one if it was too long, empty if the peer closed the
    /// connection.
    pub(crate) hello: Vec<u8>,
}

impl<K: Clone> HandshakeQueue<K> {
    /// Without listeners.
    pub(crate) fn new(hello_bytes_max: usize) -> Self {
        let (listeners, pending) = (Vec::new(), Vec::new());
        Self { listeners, pending, hello_bytes_max, next_report: Instant::now() }
    }

    /// Closes all listeners, removes their files and drops pending peers.
    pub(crate) fn close(&mut self) {
        self.listeners.clear();
        self.pending.clear();
    }

    /// Replaces the listeners: adds `new`, and keeps those for which `name` returns a key.
    pub(crate) fn set_listeners(
        &mut self,
        name: impl Fn(&Path) -> Option<K>,
        new: Vec<(K, LocalListener)>,
    ) {
        let old = std::mem::take(&mut self.listeners).into_iter();
        let kept = old.filter_map(|(_, listener)| Some((name(listener.path())?, listener)));
        self.listeners = kept.chain(new).collect();
    }

    /// Adds a peer that did not come through a listener, with its own deadline for the hello.
    pub(crate) fn add(&mut self, listener_key: K, socket: LocalSocket, deadline: Instant) {
        self.pending.push(PendingPeer { listener_key, socket, deadline });
    }

    /// Descriptors to wait for; [`Self::poll`] takes the results in this order.
    pub(crate) fn descriptors(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        let pending = self.pending.iter().map(|s| s.socket.as_fd());
        pending.chain(self.listeners.iter().map(|(_, listener)| listener.as_fd()))
    }

    /// The earliest deadline of a pending peer.
    pub(crate) fn next_deadline(&self) -> Option<Instant> {
        self.pending.iter().map(|s| s.deadline).min()
    }

    /// Handles the descriptors that are `ready` (see [`Self::descriptors`]): returns peers that sent a hello or
    /// closed, and accepts new ones.
    pub(crate) fn poll(&mut self, ready: &[bool]) -> Vec<HandshakePeer<K>> {
        let (readable, accepting) = ready.split_at(self.pending.len());
        let mut arrived = Vec::new();
        let now = Instant::now();
        // Backwards, so that a removal does not move entries that are still to be checked.
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

    /// `None`: the peer has sent nothing yet and stays pending.
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

    /// Rejects a peer, unless its hello has arrived since the last check: this thread may have been suspended
    /// meanwhile.
    fn read_hello_or_reject(&mut self, index: usize) -> Option<HandshakePeer<K>> {
        let arrived = self.read_hello(index);
        if arrived.is_none() {
            self.pending.swap_remove(index);
            tracing::debug!("a peer that sent no hello is rejected");
        }
        arrived
    }

    /// Accepts one connection; returns the peer that was removed to make room, if its hello had arrived.
    fn accept(&mut self, index: usize) -> Option<HandshakePeer<K>> {
        let (listener_key, listener) = &self.listeners[index];
        let mut arrived = None;
        match listener.accept() {
            Ok(Some(socket)) => {
                let listener_key = listener_key.clone();
                if self.pending.len() >= PENDING_MAX {
                    let oldest = (0..self.pending.len()).min_by_key(|i| self.pending[*i].deadline);
                    arrived = self.read_hello_or_reject(oldest.expect("the queue is full"));
                }
                self.add(listener_key, socket, Instant::now() + HELLO_TIMEOUT);
            }
            Ok(None) => {}
            Err(error) => {
                if Instant::now() >= self.next_report {
                    self.next_report = Instant::now() + REPORT_INTERVAL;
                    let path = listener.path().display();
                    tracing::warn!(%error, %path, "a connection cannot be accepted; raise `ulimit -n`");
                }
                std::thread::sleep(EXHAUSTED_PAUSE);
            }
        }
        arrived
    }
}

/// Accepts processes of the engine's user and of root, according to the credentials that the host kernel reports.
pub(crate) fn check_user(socket: &LocalSocket) -> Result<(), String> {
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
    fn a_hello_sent_while_the_thread_was_suspended_is_read_and_a_silent_peer_rejected() {
        let mut queue: HandshakeQueue<()> = HandshakeQueue::new(10);
        let [spoke, silent] = [(); 2].map(|()| {
            let (ours, theirs) = LocalSocket::pair().unwrap();
            queue.add((), ours, Instant::now());
            theirs
        });
        spoke.send(b"hello", &[]).unwrap();
        // Both were reported as not ready before.
        let arrived = queue.poll(&[false, false]);
        assert_eq!(arrived.iter().map(|a| &a.hello[..]).collect::<Vec<_>>(), [b"hello"]);
        assert_eq!(queue.descriptors().count(), 0);
        assert_eq!(silent.receive(&mut [0]).unwrap(), Some(0), "its connection has ended");
    }

    #[test]
    fn a_full_queue_loses_no_hello() {
        let path = std::env::temp_dir().join(format!("serval-handshakes-{}", std::process::id()));
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
        assert_eq!(others[1].receive(&mut [0]).unwrap(), None, "the queue had room");
        assert!(queue.accept(0).is_none());
        assert_eq!(others[1].receive(&mut [0]).unwrap(), Some(0), "silent for longest");
        assert_eq!(queue.pending.len(), PENDING_MAX);
    }
}
