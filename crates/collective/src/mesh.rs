//! How ranks find each other: every rank listens, connects to all lower ranks and accepts all higher ones. Both sides check
//! version, name, number of ranks and rank before a connection is part of the group.

use std::io::{self, Read as _, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd as _, BorrowedFd};
use std::time::{Duration, Instant};

use sys::local::wait_readable;

use crate::error::CollectiveError;
use crate::frame::{HELLO_BYTES, Hello, NAME_BYTES_MAX, Purpose, WELCOME_BYTES, Welcome};
use crate::schedule::RANKS_MAX;

/// Connections that have not said who they are. The oldest one is closed for a new one.
const STRANGERS_MAX: usize = 32;
/// How long such a connection may stay.
const STRANGER_LIMIT: Duration = Duration::from_secs(5);
/// Time between two attempts to connect to a rank that does not listen yet.
const RETRY_PAUSE: Duration = Duration::from_millis(10);

/// Who a process is in a group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Member {
    /// The group's name, the same on all ranks: 1 to 64 bytes.
    pub name: String,
    /// Number of ranks.
    pub ranks: usize,
    /// This rank, from 0.
    pub rank: usize,
}

impl Member {
    pub(crate) fn failed(&self, why: impl Into<String>) -> CollectiveError {
        CollectiveError::Forming { name: self.name.clone(), why: why.into() }
    }

    pub(crate) fn check(&self) -> Result<(), CollectiveError> {
        let argument = |why: String| Err(CollectiveError::Argument(why));
        if !(1..=NAME_BYTES_MAX).contains(&self.name.len()) {
            return argument(format!("a group's name has 1 to {NAME_BYTES_MAX} bytes"));
        }
        if !(1..=RANKS_MAX).contains(&self.ranks) {
            return argument(format!("a group has 1 to {RANKS_MAX} ranks, not {}", self.ranks));
        }
        if self.rank >= self.ranks {
            return argument(format!("rank {} is not in 0..{}", self.rank, self.ranks));
        }
        Ok(())
    }

    fn hello(&self, to: usize, purpose: Purpose) -> Hello {
        let [ranks, from, to] = [self.ranks, self.rank, to].map(|number| number as u8);
        Hello { purpose, ranks, from, to, name: self.name.clone() }
    }

    /// The answer to a hello, apart from whether the rank is connected already.
    fn judge(&self, hello: &Hello) -> Welcome {
        if hello.name != self.name {
            Welcome::OtherName
        } else if usize::from(hello.ranks) != self.ranks {
            Welcome::OtherRanks(self.ranks as u8)
        } else if usize::from(hello.to) != self.rank {
            Welcome::OtherRank(self.rank as u8)
        } else {
            Welcome::Accepted
        }
    }
}

/// The connections to one other rank.
pub(crate) struct Pair {
    pub(crate) control: TcpStream,
    pub(crate) data: TcpStream,
}

/// Connects this rank with all others over TCP; the result has `None` for this rank itself.
pub(crate) fn form(
    member: &Member,
    listener: &TcpListener,
    addresses: &[SocketAddr],
    limit: Duration,
) -> Result<Vec<Option<Pair>>, CollectiveError> {
    member.check()?;
    if addresses.len() != member.ranks {
        let (ranks, given) = (member.ranks, addresses.len());
        return Err(CollectiveError::Argument(format!("{given} addresses for {ranks} ranks")));
    }
    let deadline = Instant::now() + limit;
    let mut pairs: Vec<Option<Pair>> = Vec::with_capacity(member.ranks);
    for (peer, address) in addresses.iter().enumerate().take(member.rank) {
        let control = connect(member, peer, *address, Purpose::Control, deadline)?;
        let data = connect(member, peer, *address, Purpose::Data, deadline)?;
        pairs.push(Some(Pair { control, data }));
    }
    pairs.push(None);
    let accepted = Reception::new(member, listener).accept(deadline)?;
    pairs.extend(accepted.into_iter().map(Some));
    for pair in pairs.iter().flatten() {
        for socket in [&pair.control, &pair.data] {
            let prepared = socket.set_nodelay(true).and_then(|()| socket.set_nonblocking(true));
            prepared.map_err(|error| member.failed(error.to_string()))?;
        }
    }
    Ok(pairs)
}

/// Connects to a lower rank, which may start later.
fn connect(
    member: &Member,
    peer: usize,
    address: SocketAddr,
    purpose: Purpose,
    deadline: Instant,
) -> Result<TcpStream, CollectiveError> {
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        let why = match introduce(member, peer, address, purpose, left) {
            Ok((socket, Welcome::Accepted)) => return Ok(socket),
            Ok((_, refusal)) => {
                return Err(member.failed(refused(member, peer, address, refusal)));
            }
            Err(error) => error,
        };
        if deadline.saturating_duration_since(Instant::now()) < RETRY_PAUSE {
            return Err(member.failed(format!("rank {peer} at {address} does not answer: {why}")));
        }
        std::thread::sleep(RETRY_PAUSE);
    }
}

fn introduce(
    member: &Member,
    peer: usize,
    address: SocketAddr,
    purpose: Purpose,
    left: Duration,
) -> io::Result<(TcpStream, Welcome)> {
    // Zero means no limit.
    let left = left.max(Duration::from_millis(1));
    let mut socket = TcpStream::connect_timeout(&address, left)?;
    socket.set_nodelay(true)?;
    socket.set_read_timeout(Some(left))?;
    socket.set_write_timeout(Some(left))?;
    socket.write_all(&member.hello(peer, purpose).encode())?;
    let mut answer = [0; WELCOME_BYTES];
    socket.read_exact(&mut answer)?;
    match Welcome::decode(&answer) {
        Some(welcome) => Ok((socket, welcome)),
        None => Err(io::Error::other("something else than a rank listens there")),
    }
}

fn refused(member: &Member, peer: usize, address: SocketAddr, refusal: Welcome) -> String {
    let there = format!("rank {peer} at {address}");
    match refusal {
        Welcome::Accepted => unreachable!("it is no refusal"),
        Welcome::OtherVersion(version) => {
            let own = crate::frame::VERSION;
            format!(
                "{there} has version {version} of the protocol, this rank version {own}; install the same release"
            )
        }
        Welcome::OtherName => {
            format!("{there} belongs to a group of another name; all ranks need the same name")
        }
        Welcome::OtherRanks(ranks) => {
            format!(
                "{there} belongs to a group of {ranks} ranks, this rank to one of {}",
                member.ranks
            )
        }
        Welcome::OtherRank(rank) => {
            format!(
                "{address} is rank {rank}, not rank {peer}; all ranks need the same list of addresses"
            )
        }
        Welcome::Twice => {
            format!(
                "{there} has accepted another process as rank {}; give each process its own rank",
                member.rank
            )
        }
    }
}

/// Accepts the higher ranks. Connections that are not of the group affect none of it.
struct Reception<'a> {
    member: &'a Member,
    listener: &'a TcpListener,
    strangers: Vec<Stranger>,
    /// By rank, from the one above this one.
    control: Vec<Option<TcpStream>>,
    data: Vec<Option<TcpStream>>,
}

/// A connection that has not said who it is.
struct Stranger {
    socket: TcpStream,
    since: Instant,
    hello: [u8; HELLO_BYTES],
    got: usize,
}

impl<'a> Reception<'a> {
    fn new(member: &'a Member, listener: &'a TcpListener) -> Self {
        let above = || (member.rank + 1..member.ranks).map(|_| None).collect();
        Self { member, listener, strangers: Vec::new(), control: above(), data: above() }
    }

    fn accept(mut self, deadline: Instant) -> Result<Vec<Pair>, CollectiveError> {
        let failed = |error: io::Error| self.member.failed(error.to_string());
        self.listener.set_nonblocking(true).map_err(failed)?;
        while self.control.iter().chain(&self.data).any(Option::is_none) {
            let now = Instant::now();
            if now >= deadline {
                let missing = (0..self.control.len())
                    .filter(|index| self.control[*index].is_none() || self.data[*index].is_none())
                    .map(|index| (self.member.rank + 1 + index).to_string());
                let missing: Vec<String> = missing.collect();
                let why = format!("these ranks did not connect in time: {}", missing.join(", "));
                return Err(self.member.failed(why));
            }
            self.strangers.retain(|stranger| now - stranger.since < STRANGER_LIMIT);
            let limit = (deadline - now).min(STRANGER_LIMIT);
            let mut files: Vec<BorrowedFd<'_>> = vec![self.listener.as_fd()];
            files.extend(self.strangers.iter().map(|stranger| stranger.socket.as_fd()));
            let ready = wait_readable(&files, Some(limit));
            // Backwards, so that a removal does not move entries that are still to be checked.
            for index in (0..self.strangers.len()).rev().filter(|index| ready[1 + index]) {
                self.listen_to(index);
            }
            if ready[0] {
                self.accept_one(now);
            }
        }
        let pairs = self.control.into_iter().flatten().zip(self.data.into_iter().flatten());
        Ok(pairs.map(|(control, data)| Pair { control, data }).collect())
    }

    fn accept_one(&mut self, now: Instant) {
        let accepted = self.listener.accept();
        let Ok((socket, _)) = accepted else {
            if accepted.is_err_and(|error| error.kind() != io::ErrorKind::WouldBlock) {
                // The process is out of descriptors, or the connection has ended.
                std::thread::sleep(RETRY_PAUSE);
            }
            return;
        };
        if socket.set_nonblocking(true).is_err() {
            return;
        }
        if self.strangers.len() == STRANGERS_MAX {
            self.strangers.remove(0);
        }
        self.strangers.push(Stranger { socket, since: now, hello: [0; HELLO_BYTES], got: 0 });
    }

    /// Reads what a stranger says; it stays one until its hello is complete.
    fn listen_to(&mut self, index: usize) {
        let stranger = &mut self.strangers[index];
        match stranger.socket.read(&mut stranger.hello[stranger.got..]) {
            Ok(0) => drop(self.strangers.remove(index)),
            Ok(got) => {
                stranger.got += got;
                if stranger.got == HELLO_BYTES {
                    let stranger = self.strangers.remove(index);
                    self.answer(stranger);
                }
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(_) => drop(self.strangers.remove(index)),
        }
    }

    fn answer(&mut self, stranger: Stranger) {
        let (welcome, place) = match Hello::decode(&stranger.hello) {
            Err(None) => return,
            Err(Some(refusal)) => (refusal, None),
            Ok(hello) => match self.member.judge(&hello) {
                Welcome::Accepted => {
                    let places = match hello.purpose {
                        Purpose::Control => &mut self.control,
                        Purpose::Data => &mut self.data,
                    };
                    // A hello's sender is above its destination.
                    let place = &mut places[usize::from(hello.from) - self.member.rank - 1];
                    match place {
                        None => (Welcome::Accepted, Some(place)),
                        Some(_) => (Welcome::Twice, None),
                    }
                }
                refusal => (refusal, None),
            },
        };
        let mut socket = stranger.socket;
        // The first bytes of a connection fit into its buffer.
        let answered = socket.write_all(&welcome.encode());
        if let (Ok(()), Some(place)) = (answered, place) {
            *place = Some(socket);
        }
    }
}
