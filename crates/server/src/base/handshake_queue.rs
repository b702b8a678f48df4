//! Local connections on the control side that have not identified themselves yet.
//!
//! A peer that connects to a listener must send one message, its hello, before a deadline. The queue then passes the
//! connection and the hello to its owner. [`sys::accept_queue`] says how peers that send nothing are bounded.

use std::os::fd::{AsFd, BorrowedFd};
use std::path::Path;
use std::time::{Duration, Instant};

use sys::accept_queue::{AcceptQueue, Candidate, Left};
use sys::local::{LocalListener, LocalSocket};

/// Maximum number of connections that have not sent their hello.
const PENDING_MAX: usize = 64;
/// How long a peer may take to send its hello, also if it is not scheduled for a while. A full queue rejects earlier.
const HELLO_TIMEOUT: Duration = Duration::from_secs(5);
/// Minimum time between two log lines about connections that cannot be accepted.
const REPORT_INTERVAL: Duration = Duration::from_secs(10);

/// Listeners, and the pending peers of each; `K` identifies a listener.
pub(crate) struct HandshakeQueue<K> {
    listeners: Vec<(K, LocalListener)>,
    pending: AcceptQueue<HandshakePeer<K>>,
    hello_bytes_max: usize,
    /// No log line about failed accepts before this time.
    next_report: Instant,
}

/// A peer that sent its hello, or closed its connection; while it is in the queue, one that has not.
pub(crate) struct HandshakePeer<K> {
    pub(crate) listener_key: K,
    pub(crate) socket: LocalSocket,
    /// The hello: one byte longer than the longest valid one if it was too long, empty if the peer closed the
    /// connection.
    pub(crate) hello: Vec<u8>,
}

impl<K> AsFd for HandshakePeer<K> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl<K> Candidate for HandshakePeer<K> {
    fn read(&mut self) -> bool {
        let len = match self.socket.receive(&mut self.hello) {
            Ok(None) => return false,
            Ok(Some(len)) => len,
            Err(_) => 0,
        };
        self.hello.truncate(len);
        true
    }
}

impl<K: Clone> HandshakeQueue<K> {
    /// Without listeners.
    pub(crate) fn new(hello_bytes_max: usize) -> Self {
        let pending = AcceptQueue::new(PENDING_MAX, HELLO_TIMEOUT);
        Self { listeners: Vec::new(), pending, hello_bytes_max, next_report: Instant::now() }
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
        let hello = vec![0; self.hello_bytes_max + 1];
        self.pending.push(HandshakePeer { listener_key, socket, hello }, deadline);
    }

    /// Descriptors to wait for; [`Self::poll`] takes the results in this order.
    pub(crate) fn descriptors(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        let listeners = self.listeners.iter().map(|(_, listener)| listener.as_fd());
        self.pending.descriptors().chain(listeners)
    }

    /// The earliest deadline of a pending peer.
    pub(crate) fn next_deadline(&self) -> Option<Instant> {
        self.pending.next_deadline()
    }

    /// Handles the descriptors that are `ready` (see [`Self::descriptors`]): returns peers that sent a hello or
    /// closed, and accepts new ones.
    pub(crate) fn poll(&mut self, ready: &[bool]) -> Vec<HandshakePeer<K>> {
        let (readable, accepting) = ready.split_at(self.pending.len());
        let now = Instant::now();
        let mut left = self.pending.poll(readable, now);
        for index in (0..accepting.len()).filter(|index| accepting[*index]) {
            self.accept(index, now, &mut left);
        }
        let arrived = left.into_iter().filter_map(|(peer, why)| match why {
            Left::Ended => Some(peer),
            Left::Late | Left::Displaced => {
                tracing::debug!("a peer that sent no hello is rejected");
                None
            }
        });
        arrived.collect()
    }

    fn accept(&mut self, index: usize, now: Instant, left: &mut Vec<(HandshakePeer<K>, Left)>) {
        let (listener_key, listener) = &self.listeners[index];
        let bytes = self.hello_bytes_max + 1;
        let accept = || {
            let (listener_key, hello) = (listener_key.clone(), vec![0; bytes]);
            let accepted = listener.accept()?;
            Ok(accepted.map(|socket| HandshakePeer { listener_key, socket, hello }))
        };
        if let Err(error) = self.pending.accept(now, accept, left)
            && now >= self.next_report
        {
            self.next_report = now + REPORT_INTERVAL;
            let path = listener.path().display();
            tracing::warn!(%error, %path, "a connection cannot be accepted; raise `ulimit -n`");
        }
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
        let mut left = Vec::new();
        queue.accept(0, Instant::now(), &mut left);
        let left: Vec<_> = left.iter().map(|(peer, why)| (&peer.hello[..1], *why)).collect();
        assert_eq!(left, [(&b"h"[..], Left::Ended), (&[0], Left::Displaced)]);
        assert_eq!(others[2].receive(&mut [0]).unwrap(), None, "the queue had room");
        assert_eq!(queue.pending.len(), PENDING_MAX);
    }
}
