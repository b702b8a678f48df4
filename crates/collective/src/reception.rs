//! The listening side of a rank while its group forms: higher ranks connect, and so may anything else.
//!
//! Connections are accepted as they come, and each is read as its bytes arrive, so that one that says nothing, or something else, delays no
//! other. They are bounded in number and in time; each one that is closed is counted by its reason.

use std::fmt;
use std::io;
use std::os::fd::{AsFd as _, BorrowedFd};
use std::time::{Duration, Instant};

use sys::local::wait_readable;
use sys::memory::SharedMemory;

use crate::control::{Socket as _, is_nothing};
use crate::frame::{HELLO_BYTES, Hello, Welcome};
use crate::mesh::{Joined, Member, Network, RETRY_PAUSE};

/// Connections that have not said who they are. The oldest one is closed for a new one.
const STRANGERS_MAX: usize = 128;
/// How long such a connection may stay.
const STRANGER_LIMIT: Duration = Duration::from_secs(5);
/// Connections that are accepted in a row.
const ACCEPTED_MAX: usize = 64;

/// Connections at the listener of a rank that were closed because they are not of its group.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Strays {
    /// They made room for newer ones before they said who they are.
    pub crowded_out: u64,
    /// They did not say who they are in time.
    pub silent: u64,
    /// They sent something else than a hello, or ended.
    pub garbage: u64,
    /// They were of another group, version, user or place in the group.
    pub refused: u64,
}

impl fmt::Display for Strays {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { crowded_out, silent, garbage, refused } = self;
        write!(
            to,
            "other connections to this rank: {refused} refused, {garbage} with something else than a hello, {silent} without one in \
             time, {crowded_out} closed for newer ones"
        )
    }
}

/// Accepts the higher ranks. Connections that are not of the group affect none of it.
pub(crate) struct Reception<'a, N: Network> {
    member: &'a Member,
    network: &'a N,
    /// In the order in which they came.
    strangers: Vec<Stranger<N>>,
    /// By rank, from the one above this one, and by purpose.
    joined: Vec<Vec<Option<Joined<N>>>>,
    strays: Strays,
}

/// A connection that has not said who it is.
struct Stranger<N: Network> {
    socket: N::Socket,
    region: Option<SharedMemory>,
    since: Instant,
    hello: [u8; HELLO_BYTES],
    got: usize,
}

/// What came from a stranger.
enum Heard {
    /// Not enough yet.
    Nothing,
    /// A whole hello.
    Hello,
    /// Its end.
    End,
}

impl<'a, N: Network> Reception<'a, N> {
    pub(crate) fn new(member: &'a Member, network: &'a N) -> Self {
        let none = |_| N::PURPOSES.iter().map(|_| None).collect();
        let joined = (member.rank + 1..member.ranks).map(none).collect();
        Self { member, network, strangers: Vec::new(), joined, strays: Strays::default() }
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

    /// What was closed so far.
    pub(crate) fn strays(&self) -> Strays {
        self.strays
    }

    /// The connections of the higher ranks, when none is missing.
    pub(crate) fn into_joined(self) -> Vec<Vec<Joined<N>>> {
        self.joined.into_iter().map(|joined| joined.into_iter().flatten().collect()).collect()
    }

    /// Waits until there is something to do, until `other` is readable, or for `limit`, and does it.
    pub(crate) fn serve(&mut self, other: Option<BorrowedFd<'_>>, limit: Duration) {
        self.expire(Instant::now());
        let mut files: Vec<BorrowedFd<'_>> = vec![self.network.listener()];
        files.extend(self.strangers.iter().map(|stranger| stranger.socket.as_fd()));
        files.extend(other);
        let ready = wait_readable(&files, Some(limit));
        // Backwards, so that a removal does not move entries that are still to be checked.
        for index in (0..self.strangers.len()).rev().filter(|index| ready[1 + index]) {
            match self.strangers[index].listen(self.network) {
                Heard::Nothing => {}
                Heard::Hello => {
                    let stranger = self.strangers.remove(index);
                    self.answer(stranger);
                }
                Heard::End => {
                    self.strays.garbage += 1;
                    self.strangers.remove(index);
                }
            }
        }
        if ready[0] {
            self.accept();
        }
    }

    /// Closes the connections that have not said who they are in time.
    fn expire(&mut self, now: Instant) {
        if mutants::on("keep_silent_strangers") {
            return;
        }
        let before = self.strangers.len();
        let is_late = |since| now.saturating_duration_since(since) >= STRANGER_LIMIT;
        self.strangers.retain(|stranger| !is_late(stranger.since));
        self.strays.silent += (before - self.strangers.len()) as u64;
    }

    fn accept(&mut self) {
        for _ in 0..ACCEPTED_MAX {
            let socket = match self.network.accept() {
                Ok(socket) => socket,
                Err(error) if is_nothing(&error) => return,
                Err(error) => return self.cannot_accept(&error),
            };
            let (since, hello) = (Instant::now(), [0; HELLO_BYTES]);
            let mut stranger = Stranger { socket, region: None, since, hello, got: 0 };
            // A rank sends its hello at once.
            match stranger.listen(self.network) {
                Heard::Hello => self.answer(stranger),
                Heard::End => self.strays.garbage += 1,
                Heard::Nothing => {
                    if self.strangers.len() == STRANGERS_MAX {
                        self.crowd_out();
                    }
                    self.strangers.push(stranger);
                }
            }
        }
    }

    fn cannot_accept(&mut self, error: &io::Error) {
        match error.kind() {
            io::ErrorKind::PermissionDenied => self.strays.refused += 1,
            io::ErrorKind::ConnectionAborted => self.strays.garbage += 1,
            // The process is out of descriptors, of which strangers may have many.
            _ if !self.strangers.is_empty() => self.crowd_out(),
            _ => std::thread::sleep(RETRY_PAUSE),
        }
    }

    fn crowd_out(&mut self) {
        self.strays.crowded_out += 1;
        self.strangers.remove(0);
    }

    fn answer(&mut self, stranger: Stranger<N>) {
        let hello = match Hello::decode(&stranger.hello) {
            Ok(hello) => hello,
            Err(Some(refusal)) => {
                self.strays.refused += 1;
                // The first bytes of a connection fit into its buffer; a stranger that has gone needs no answer.
                let _ = stranger.socket.send(&refusal.encode());
                return;
            }
            Err(None) => {
                self.strays.garbage += 1;
                return;
            }
        };
        let purpose = N::PURPOSES.iter().position(|purpose| *purpose == hello.purpose);
        let (Some(purpose), true) = (purpose, N::HAS_REGION == stranger.region.is_some()) else {
            // A group over shared memory has no connections for data, and one over TCP no regions.
            self.strays.garbage += 1;
            return;
        };
        let mut welcome = self.member.judge(&hello);
        if welcome == Welcome::Accepted {
            // A hello's sender is above its destination.
            let place = &mut self.joined[usize::from(hello.from) - self.member.rank - 1][purpose];
            if place.is_none() || mutants::on("admit_rank_twice") {
                match stranger.socket.send(&welcome.encode()) {
                    Ok(()) => *place = Some((stranger.socket, stranger.region)),
                    Err(_) => self.strays.garbage += 1,
                }
                return;
            }
            welcome = Welcome::Twice;
        }
        self.strays.refused += 1;
        let _ = stranger.socket.send(&welcome.encode());
    }
}

impl<N: Network> Stranger<N> {
    /// Reads what it says; it stays a stranger until its hello is complete.
    fn listen(&mut self, network: &N) -> Heard {
        match network.receive(&self.socket, &mut self.hello[self.got..]) {
            Ok((0, _)) => Heard::End,
            Ok((got, region)) => {
                self.got += got;
                self.region = self.region.take().or(region);
                if self.got == HELLO_BYTES { Heard::Hello } else { Heard::Nothing }
            }
            Err(error) if is_nothing(&error) => Heard::Nothing,
            Err(_) => Heard::End,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read as _, Write as _};
    use std::net::{TcpListener, TcpStream};

    use super::*;
    use crate::frame::Purpose;

    /// A listener of a rank.
    struct Door(TcpListener);

    impl Network for Door {
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
    fn a_connection_that_does_not_say_who_it_is_is_closed_after_its_time() {
        let door = Door(TcpListener::bind("127.0.0.1:0").unwrap());
        door.0.set_nonblocking(true).unwrap();
        let member = Member { name: "test".to_owned(), ranks: 2, rank: 0 };
        let mut reception = Reception::new(&member, &door);
        // One says nothing, one only a part.
        let connect = |said: &[u8]| {
            let mut stranger = TcpStream::connect(door.0.local_addr().unwrap()).unwrap();
            stranger.write_all(said).unwrap();
            stranger
        };
        let mut strangers = [connect(b""), connect(b"servalcg")];
        while reception.strangers.len() < 2 {
            reception.serve(None, Duration::from_secs(60));
        }
        let last = reception.strangers.iter().map(|stranger| stranger.since).max().unwrap();
        let first = reception.strangers.iter().map(|stranger| stranger.since).min().unwrap();
        reception.expire(first + STRANGER_LIMIT - Duration::from_nanos(1));
        assert_eq!((reception.strangers.len(), reception.strays().silent), (2, 0));
        reception.expire(last + STRANGER_LIMIT);
        assert_eq!((reception.strangers.len(), reception.strays().silent), (0, 2));
        for stranger in &mut strangers {
            // An end, or a reset because a part of what it said was not read.
            assert!(stranger.read(&mut [0]).map_or(true, |count| count == 0));
        }
        // Its place is free: the rank that is missing joins.
        let hello =
            Hello { purpose: Purpose::Control, ranks: 2, from: 1, to: 0, name: "test".to_owned() };
        let _rank = connect(&hello.encode());
        while !reception.missing().is_empty() {
            reception.serve(None, Duration::from_secs(60));
        }
    }

    #[test]
    fn an_error_says_what_else_connected() {
        let strays = Strays { crowded_out: 4, silent: 3, garbage: 2, refused: 1 };
        assert_eq!(
            strays.to_string(),
            "other connections to this rank: 1 refused, 2 with something else than a hello, 3 without one in time, 4 closed for newer ones"
        );
    }
}
