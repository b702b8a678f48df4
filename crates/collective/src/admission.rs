//! The listening side of a rank while its group forms: higher ranks connect, and so may anything else.
//!
//! Each one that is closed is counted by its reason; [`sys::accept_queue`] says how they are bounded.

use std::fmt;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

use sys::accept_queue::{AcceptQueue, Candidate, Left};
use sys::memory::SharedMemory;
use sys::readiness::wait_readable;

use crate::control::{Socket as _, is_nothing};
use crate::frame::{HELLO_BYTES, Hello, Welcome};
use crate::network::{Joined, Member, Network};

/// Connections that have not sent their hello.
const PENDING_MAX: usize = 128;
/// How long a connection may take for its hello.
const HELLO_LIMIT: Duration = Duration::from_secs(5);

/// Connections at the listener of a rank that were closed because they are not of its group.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ClosedConnections {
    /// Newer ones got their places before they had sent a hello.
    pub displaced: u64,
    /// They sent no hello in time.
    pub silent: u64,
    /// They sent something else than a hello, or ended.
    pub garbage: u64,
    /// They were of another group, version, user or place in the group.
    pub refused: u64,
}

impl fmt::Display for ClosedConnections {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { displaced, silent, garbage, refused } = self;
        write!(
            to,
            "other connections to this rank: {refused} refused, {garbage} with something else than a hello, {silent} without one in \
             time, {displaced} closed for newer ones"
        )
    }
}

/// Accepts the higher ranks. Connections that are not of the group affect none of it.
pub(crate) struct Acceptor<'a, N: Network> {
    member: &'a Member,
    network: &'a N,
    pending: AcceptQueue<Pending<'a, N>>,
    /// By rank, from the one above this one, and by purpose.
    joined: Vec<Vec<Option<Joined<N>>>>,
    closed: ClosedConnections,
}

/// A connection whose hello is not complete.
struct Pending<'a, N: Network> {
    network: &'a N,
    socket: N::Socket,
    region: Option<SharedMemory>,
    hello: [u8; HELLO_BYTES],
    got: usize,
}

impl<N: Network> AsFd for Pending<'_, N> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl<N: Network> Candidate for Pending<'_, N> {
    fn read(&mut self) -> bool {
        match self.network.receive(&self.socket, &mut self.hello[self.got..]) {
            Ok((0, _)) => true,
            Ok((got, region)) => {
                self.got += got;
                self.region = self.region.take().or(region);
                self.got == HELLO_BYTES
            }
            Err(error) => !is_nothing(&error),
        }
    }
}

impl<'a, N: Network> Acceptor<'a, N> {
    pub(crate) fn new(member: &'a Member, network: &'a N) -> Self {
        let none = |_| N::PURPOSES.iter().map(|_| None).collect();
        let joined = (member.rank + 1..member.ranks).map(none).collect();
        let pending = AcceptQueue::new(PENDING_MAX, HELLO_LIMIT);
        Self { member, network, pending, joined, closed: ClosedConnections::default() }
    }

    /// The higher ranks that have not made all their connections.
    pub(crate) fn missing(&self) -> Vec<usize> {
        let is_missing = |joined: &Vec<Option<_>>| joined.iter().any(Option::is_none);
        let ranks = self.member.rank + 1..;
        ranks
            .zip(&self.joined)
            .filter(|(_, joined)| is_missing(joined))
            .map(|(rank, _)| rank)
            .collect()
    }

    /// The connections that were closed so far.
    pub(crate) fn closed(&self) -> ClosedConnections {
        self.closed
    }

    /// The connections of the higher ranks, when none is missing.
    pub(crate) fn into_joined(self) -> Vec<Vec<Joined<N>>> {
        self.joined.into_iter().map(|joined| joined.into_iter().flatten().collect()).collect()
    }

    /// Waits until there is something to do, until `other` is readable, or for `limit`, and does it.
    pub(crate) fn serve(&mut self, other: Option<BorrowedFd<'_>>, limit: Duration) {
        let mut files: Vec<BorrowedFd<'_>> = vec![self.network.listener()];
        files.extend(self.pending.descriptors());
        files.extend(other);
        let ready = wait_readable(&files, Some(limit));
        let now = Instant::now();
        let mut left = self.pending.poll(&ready[1..], now);
        if ready[0] {
            self.accept(now, &mut left);
        }
        self.take(left);
    }

    /// Answers the connections that have left the queue, or counts why they are closed.
    fn take(&mut self, left: Vec<(Pending<'a, N>, Left)>) {
        for (pending, why) in left {
            match why {
                Left::Ended if pending.got == HELLO_BYTES => self.answer(pending),
                Left::Ended => self.closed.garbage += 1,
                Left::Late => self.closed.silent += 1,
                Left::Displaced => self.closed.displaced += 1,
            }
        }
    }

    fn accept(&mut self, now: Instant, left: &mut Vec<(Pending<'a, N>, Left)>) {
        let (network, closed) = (self.network, &mut self.closed);
        let accept = || {
            let socket = match network.accept() {
                Ok(socket) => socket,
                Err(error) => {
                    match error.kind() {
                        io::ErrorKind::PermissionDenied => closed.refused += 1,
                        io::ErrorKind::ConnectionAborted => closed.garbage += 1,
                        _ if is_nothing(&error) => {}
                        _ => return Err(error),
                    }
                    return Ok(None);
                }
            };
            let hello = [0; HELLO_BYTES];
            Ok(Some(Pending { network, socket, region: None, hello, got: 0 }))
        };
        // Without a free descriptor the connection stays in the listener's queue.
        let _ = self.pending.accept(now, accept, left);
    }

    fn answer(&mut self, pending: Pending<'_, N>) {
        let hello = match Hello::decode(&pending.hello) {
            Ok(hello) => hello,
            Err(Some(refusal)) => {
                self.closed.refused += 1;
                // The first bytes of a connection fit into its buffer, and a peer that has gone needs no answer.
                let _ = pending.socket.send(&refusal.encode());
                return;
            }
            Err(None) => {
                self.closed.garbage += 1;
                return;
            }
        };
        let purpose = N::PURPOSES.iter().position(|purpose| *purpose == hello.purpose);
        let (Some(purpose), true) = (purpose, N::HAS_REGION == pending.region.is_some()) else {
            // A group over shared memory has no connections for data, and one over TCP no regions.
            self.closed.garbage += 1;
            return;
        };
        let mut welcome = self.member.judge(&hello);
        if welcome == Welcome::Accepted {
            // A hello's sender is above its destination.
            let place = &mut self.joined[usize::from(hello.from) - self.member.rank - 1][purpose];
            if place.is_none() || mutants::on("admit_rank_twice") {
                match pending.socket.send(&welcome.encode()) {
                    Ok(()) => *place = Some((pending.socket, pending.region)),
                    Err(_) => self.closed.garbage += 1,
                }
                return;
            }
            welcome = Welcome::Twice;
        }
        self.closed.refused += 1;
        let _ = pending.socket.send(&welcome.encode());
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read as _, Write as _};
    use std::net::{TcpListener, TcpStream};

    use super::*;
    use crate::frame::Purpose;

    /// The listener of a rank.
    struct Listener(TcpListener);

    impl Network for Listener {
        type Socket = TcpStream;
        const PURPOSES: &'static [Purpose] = &[Purpose::Control];
        const HAS_REGION: bool = false;

        fn place(&self, _: usize) -> String {
            unreachable!("it has no lower rank")
        }

        fn dial(&self, _: usize, _: Duration) -> io::Result<TcpStream> {
            unreachable!("it has no lower rank")
        }

        fn listener(&self) -> BorrowedFd<'_> {
            self.0.as_fd()
        }

        fn accept(&self) -> io::Result<TcpStream> {
            let (socket, _) = self.0.accept()?;
            socket.set_nonblocking(true)?;
            Ok(socket)
        }

        fn region(&self) -> io::Result<Option<SharedMemory>> {
            Ok(None)
        }

        fn introduce(&self, _: &TcpStream, _: &[u8], _: Option<BorrowedFd<'_>>) -> io::Result<()> {
            unreachable!("it has no lower rank")
        }

        fn receive(
            &self,
            socket: &TcpStream,
            into: &mut [u8],
        ) -> io::Result<(usize, Option<SharedMemory>)> {
            Ok((crate::control::Socket::receive(socket, into)?, None))
        }
    }

    #[test]
    fn connections_without_a_hello_are_counted_and_keep_no_rank_out() {
        let listener = Listener(TcpListener::bind("127.0.0.1:0").unwrap());
        listener.0.set_nonblocking(true).unwrap();
        let member = Member { name: "test".to_owned(), ranks: 2, rank: 0 };
        let mut acceptor = Acceptor::new(&member, &listener);
        // One says nothing, one only a part.
        let connect = |said: &[u8]| {
            let mut stream = TcpStream::connect(listener.0.local_addr().unwrap()).unwrap();
            stream.write_all(said).unwrap();
            stream
        };
        let mut others = [connect(b""), connect(b"servalcg")];
        // On a machine that suspends this thread for long, the first one has already left.
        while acceptor.pending.len() as u64 + acceptor.closed().silent < 2 {
            acceptor.serve(None, Duration::from_secs(60));
        }
        let left = acceptor.pending.poll(&[], Instant::now() + HELLO_LIMIT);
        acceptor.take(left);
        assert_eq!((acceptor.pending.len(), acceptor.closed().silent), (0, 2));
        for other in &mut others {
            // An end, or a reset because a part of what it said was not read.
            assert!(other.read(&mut [0]).map_or(true, |count| count == 0));
        }
        // The rank that is missing joins.
        let hello =
            Hello { purpose: Purpose::Control, ranks: 2, from: 1, to: 0, name: "test".to_owned() };
        let _rank = connect(&hello.encode());
        while !acceptor.missing().is_empty() {
            acceptor.serve(None, Duration::from_secs(60));
        }
    }

    #[test]
    fn an_error_says_what_else_connected() {
        let closed = ClosedConnections { displaced: 4, silent: 3, garbage: 2, refused: 1 };
        assert_eq!(
            closed.to_string(),
            "other connections to this rank: 1 refused, 2 with something else than a hello, 3 without one in time, 4 closed for newer ones"
        );
    }
}
