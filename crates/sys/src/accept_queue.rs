//! Connections that have been accepted and have not completed their handshake.
//!
//! A peer that connects may say nothing, too little, or send one byte at a time, and there may be many of
//! them. So each connection is read as its bytes arrive, has one deadline for its whole handshake, and takes
//! one of a bounded number of places. When there is none left for a new connection, an earlier one is
//! displaced: refusing the new one would let silent peers keep out all others. A connection is read once
//! more before its time is over or it is displaced: the thread may have been suspended meanwhile.
//! Connections that the process made itself ([`AcceptQueue::push`]) make no room for descriptors of others.
//!
//! Pure but for the reads of its connections and a pause when the process has no descriptor left: time is an
//! argument.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

/// Connections that are accepted in a row: few, so that those that wait are read meanwhile.
const ACCEPTED_MAX: usize = 16;
/// Pause before the next attempt to accept after an error that no displaced connection mends.
const EXHAUSTED_PAUSE: Duration = Duration::from_millis(20);

/// A connection that has not completed its handshake.
pub trait Candidate: AsFd {
    /// Reads what has arrived. True: the handshake has ended, with success or not. Must not wait.
    fn read(&mut self) -> bool;

    /// The one of these that is displaced when there is no place left; they are in the order in which
    /// they came. `None`: the one with the earliest deadline.
    fn displaced(candidates: &[&Self]) -> Option<usize> {
        let _ = candidates;
        None
    }
}

/// Why a connection has left the queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Left {
    /// Its handshake has ended; see [`Candidate::read`].
    Ended,
    /// Its time was over.
    Late,
    /// Another connection got its place, or the process needed its descriptor.
    Displaced,
}

struct Waiting<C> {
    candidate: C,
    deadline: Instant,
    /// It came through [`AcceptQueue::accept`], and so may lose its place.
    was_accepted: bool,
}

/// See the module's text.
pub struct AcceptQueue<C> {
    /// In the order in which they came.
    waiting: Vec<Waiting<C>>,
    places: usize,
    limit: Duration,
}

impl<C: Candidate> AcceptQueue<C> {
    /// Room for `places` connections, each of which has `limit` for its handshake.
    pub fn new(places: usize, limit: Duration) -> Self {
        assert!(places > 0, "there is a place");
        Self { waiting: Vec::new(), places, limit }
    }

    /// Connections in the queue.
    pub fn len(&self) -> usize {
        self.waiting.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    /// Closes all connections.
    pub fn clear(&mut self) {
        self.waiting.clear();
    }

    /// The descriptors of the connections; [`Self::poll`] takes what is ready in this order.
    pub fn descriptors(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.waiting.iter().map(|waiting| waiting.candidate.as_fd())
    }

    /// When the time of a connection is over next.
    pub fn next_deadline(&self) -> Option<Instant> {
        self.waiting.iter().map(|waiting| waiting.deadline).min()
    }

    /// Adds a connection that was not accepted here, with a deadline of its own.
    pub fn push(&mut self, candidate: C, deadline: Instant) {
        self.waiting.push(Waiting { candidate, deadline, was_accepted: false });
    }

    /// Reads the connections that are `ready` and those whose time is over; returns those that leave.
    pub fn poll(&mut self, ready: &[bool], now: Instant) -> Vec<(C, Left)> {
        let mut left = Vec::new();
        let mut ready = ready.iter();
        let stays = |mut waiting: Waiting<C>| {
            let is_late = now >= waiting.deadline && !mutants::on("keep_silent_connections");
            let is_ready = ready.next().is_some_and(|ready| *ready);
            if (is_ready || is_late) && waiting.candidate.read() {
                left.push((waiting.candidate, Left::Ended));
            } else if is_late {
                left.push((waiting.candidate, Left::Late));
            } else {
                return Some(waiting);
            }
            None
        };
        self.waiting = std::mem::take(&mut self.waiting).into_iter().filter_map(stays).collect();
        left
    }

    /// Accepts connections, a bounded number, until `accept` has none (`Ok(None)`); adds those that leave
    /// to `left`. A connection whose handshake has arrived with it never takes a place.
    ///
    /// An error of `accept` is returned. If it means that the process or the machine has no descriptor
    /// or memory left, a connection that was accepted here is displaced. Otherwise the thread pauses for
    /// a moment, as for other errors, which may come back at once.
    pub fn accept(
        &mut self,
        now: Instant,
        mut accept: impl FnMut() -> io::Result<Option<C>>,
        left: &mut Vec<(C, Left)>,
    ) -> io::Result<()> {
        for _ in 0..ACCEPTED_MAX {
            let mut candidate = match accept() {
                Ok(Some(candidate)) => candidate,
                Ok(None) => return Ok(()),
                Err(error) => {
                    match is_exhaustion(&error) && self.waiting.iter().any(|of| of.was_accepted) {
                        true => left.push(self.displace(|waiting| waiting.was_accepted)),
                        false => std::thread::sleep(EXHAUSTED_PAUSE),
                    }
                    return Err(error);
                }
            };
            if candidate.read() {
                left.push((candidate, Left::Ended));
                continue;
            }
            if self.waiting.len() >= self.places {
                left.push(self.displace(|_| true));
            }
            let deadline = now + self.limit;
            self.waiting.push(Waiting { candidate, deadline, was_accepted: true });
        }
        Ok(())
    }

    /// One of those that `may` lose their place, of which there is one.
    fn displace(&mut self, may: impl Fn(&Waiting<C>) -> bool) -> (C, Left) {
        let (places, candidates): (Vec<usize>, Vec<&C>) = (self.waiting.iter().enumerate())
            .filter(|(_, waiting)| may(waiting))
            .map(|(at, waiting)| (at, &waiting.candidate))
            .unzip();
        let earliest = || places.iter().copied().min_by_key(|at| self.waiting[*at].deadline);
        let at = C::displaced(&candidates).map(|at| places[at]).or_else(earliest);
        let mut candidate = self.waiting.remove(at.expect("one waits")).candidate;
        let why = if candidate.read() { Left::Ended } else { Left::Displaced };
        (candidate, why)
    }
}

/// Whether a descriptor that is closed can help.
fn is_exhaustion(error: &io::Error) -> bool {
    let codes = [libc::EMFILE, libc::ENFILE, libc::ENOBUFS, libc::ENOMEM];
    error.raw_os_error().is_some_and(|code| codes.contains(&code))
}

#[cfg(test)]
mod tests {
    use std::io::{Read as _, Write as _};
    use std::net::{TcpListener, TcpStream};

    use super::*;
    use crate::readiness::wait_readable;

    const HELLO: &[u8; 8] = b"a hello!";
    const LIMIT: Duration = Duration::from_secs(5);

    /// A peer that has to send [`HELLO`].
    struct Peer {
        stream: TcpStream,
        got: Vec<u8>,
    }

    impl AsFd for Peer {
        fn as_fd(&self) -> BorrowedFd<'_> {
            self.stream.as_fd()
        }
    }

    impl Candidate for Peer {
        fn read(&mut self) -> bool {
            let mut bytes = [0; HELLO.len()];
            match self.stream.read(&mut bytes[self.got.len()..]) {
                Ok(0) => true,
                Ok(count) => {
                    self.got.extend(&bytes[self.got.len()..][..count]);
                    self.got.len() == HELLO.len()
                }
                Err(error) => error.kind() != io::ErrorKind::WouldBlock,
            }
        }
    }

    struct Setup {
        listener: TcpListener,
        queue: AcceptQueue<Peer>,
    }

    impl Setup {
        fn new(places: usize) -> Self {
            let listener = TcpListener::bind("127.0.0.1:0").unwrap();
            listener.set_nonblocking(true).unwrap();
            Self { listener, queue: AcceptQueue::new(places, LIMIT) }
        }

        fn connect(&self) -> TcpStream {
            TcpStream::connect(self.listener.local_addr().unwrap()).unwrap()
        }

        /// Accepts all that have connected.
        fn accept(&mut self, now: Instant) -> Vec<(Peer, Left)> {
            let mut left = Vec::new();
            let accept = || match self.listener.accept() {
                Ok((stream, _)) => {
                    stream.set_nonblocking(true)?;
                    Ok(Some(Peer { stream, got: Vec::new() }))
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(None),
                Err(error) => Err(error),
            };
            self.queue.accept(now, accept, &mut left).unwrap();
            left
        }

        /// Waits until a connection is readable, and reads.
        fn poll(&mut self, now: Instant) -> Vec<(Peer, Left)> {
            let files: Vec<_> = self.queue.descriptors().collect();
            let ready = wait_readable(&files, Some(Duration::from_secs(60)));
            self.queue.poll(&ready, now)
        }
    }

    fn reasons(left: &[(Peer, Left)]) -> Vec<Left> {
        left.iter().map(|(_, why)| *why).collect()
    }

    #[test]
    fn a_peer_that_says_nothing_leaves_after_its_time_and_not_before() {
        let mut setup = Setup::new(8);
        let now = Instant::now();
        let mut silent = setup.connect();
        assert!(setup.accept(now).is_empty());
        assert_eq!((setup.queue.len(), setup.queue.next_deadline()), (1, Some(now + LIMIT)));
        assert!(setup.queue.poll(&[false], now + LIMIT - Duration::from_nanos(1)).is_empty());
        let left = setup.queue.poll(&[false], now + LIMIT);
        assert_eq!(reasons(&left), [Left::Late]);
        drop(left);
        assert_eq!(silent.read(&mut [0]).unwrap(), 0, "its connection is closed");
        assert!(setup.queue.is_empty() && setup.queue.next_deadline().is_none());
    }

    #[test]
    fn one_byte_at_a_time_does_not_extend_the_time() {
        let mut setup = Setup::new(8);
        let now = Instant::now();
        let (mut slow, mut good) = (setup.connect(), setup.connect());
        while setup.queue.len() < 2 {
            setup.accept(now);
        }
        for (at, byte) in HELLO[..6].iter().enumerate() {
            slow.write_all(&[*byte]).unwrap();
            assert!(setup.poll(now + LIMIT / 8 * at as u32).is_empty());
        }
        good.write_all(HELLO).unwrap();
        let left = setup.poll(now + LIMIT / 8 * 7);
        assert_eq!(reasons(&left), [Left::Ended], "it delays no other");
        assert_eq!(left[0].0.got, HELLO);
        assert_eq!(reasons(&setup.queue.poll(&[false], now + LIMIT)), [Left::Late]);
    }

    #[test]
    fn a_hello_that_came_while_the_thread_was_suspended_is_read() {
        let mut setup = Setup::new(8);
        let now = Instant::now();
        let mut peer = setup.connect();
        setup.accept(now);
        peer.write_all(HELLO).unwrap();
        // The wait reported nothing before the thread was suspended.
        wait_readable(&[setup.queue.descriptors().next().unwrap()], None);
        assert_eq!(reasons(&setup.queue.poll(&[false], now + 2 * LIMIT)), [Left::Ended]);
    }

    #[test]
    fn the_oldest_of_too_many_is_displaced_unless_its_hello_is_here() {
        let mut setup = Setup::new(4);
        let now = Instant::now();
        let mut peers: Vec<TcpStream> = Vec::new();
        for at in 0..4 {
            peers.push(setup.connect());
            setup.accept(now + Duration::from_millis(at));
        }
        assert_eq!(setup.queue.len(), 4);
        peers[0].write_all(HELLO).unwrap();
        wait_readable(&[setup.queue.descriptors().next().unwrap()], None);
        let later = |at: u64| now + Duration::from_millis(at);
        peers.push(setup.connect());
        assert_eq!(reasons(&setup.accept(later(4))), [Left::Ended], "the queue loses no hello");
        for at in 5..105 {
            peers.push(setup.connect());
            assert_eq!(reasons(&setup.accept(later(at))), [Left::Displaced]);
            assert_eq!(setup.queue.len(), 4);
        }
        assert_eq!(peers[1].read(&mut [0]).unwrap(), 0, "it waited for longest");
        // Those that came last are still here.
        let last = peers.last_mut().unwrap();
        last.write_all(HELLO).unwrap();
        assert_eq!(reasons(&setup.poll(now)), [Left::Ended]);
    }

    #[test]
    fn peers_that_end_or_bring_their_hello_along_take_no_place() {
        let mut setup = Setup::new(1);
        let now = Instant::now();
        let mut silent = setup.connect();
        setup.accept(now);
        let mut good = setup.connect();
        good.write_all(HELLO).unwrap();
        let mut left = Vec::new();
        while left.is_empty() {
            left = setup.accept(now);
        }
        assert_eq!(left.pop().unwrap().0.got, HELLO);
        silent.shutdown(std::net::Shutdown::Both).unwrap();
        assert_eq!(reasons(&setup.poll(now)), [Left::Ended]);
        assert!(silent.read(&mut [0]).is_ok() && setup.queue.is_empty());
    }

    #[test]
    fn only_accepted_connections_make_room_for_descriptors_and_only_if_these_are_lacking() {
        let mut setup = Setup::new(8);
        let now = Instant::now();
        let mut peers = vec![setup.connect()];
        while setup.queue.is_empty() {
            setup.accept(now);
        }
        peers.push(setup.connect());
        let (stream, _) = loop {
            if let Ok(accepted) = setup.listener.accept() {
                break accepted;
            }
        };
        stream.set_nonblocking(true).unwrap();
        let own = stream.peer_addr().unwrap();
        setup.queue.push(Peer { stream, got: Vec::new() }, now);
        let mut left = Vec::new();
        let mut fail = |queue: &mut AcceptQueue<Peer>, code| {
            let error = || Err(io::Error::from_raw_os_error(code));
            assert!(queue.accept(now, error, &mut left).is_err());
            std::mem::take(&mut left)
        };
        assert!(fail(&mut setup.queue, libc::EPERM).is_empty(), "no descriptor is lacking");
        assert_eq!(reasons(&fail(&mut setup.queue, libc::EMFILE)), [Left::Displaced]);
        assert!(fail(&mut setup.queue, libc::EMFILE).is_empty(), "the other one stays");
        assert_eq!(setup.queue.waiting[0].candidate.stream.peer_addr().unwrap(), own);
    }

    #[test]
    fn without_a_free_descriptor_a_connection_is_displaced() {
        let mut setup = Setup::new(8);
        let now = Instant::now();
        let _peers = [setup.connect(), setup.connect()];
        while setup.queue.len() < 2 {
            setup.accept(now);
        }
        let full = || Err(io::Error::from_raw_os_error(libc::EMFILE));
        let mut left = Vec::new();
        assert!(setup.queue.accept(now, full, &mut left).is_err());
        assert_eq!((reasons(&left), setup.queue.len()), (vec![Left::Displaced], 1));
    }
}
