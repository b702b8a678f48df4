//! How ranks find each other: every rank listens, connects to all lower ranks and accepts all higher ones. Both sides check
//! version, name, number of ranks and rank before a connection is part of the group.

use std::io;
use std::os::fd::{AsFd as _, BorrowedFd};
use std::time::{Duration, Instant};

use sys::memory::SharedMemory;

use crate::control::{Socket, is_nothing};
use crate::error::CollectiveError;
use crate::frame::{Hello, NAME_BYTES_MAX, Purpose, WELCOME_BYTES, Welcome};
use crate::group::INTERRUPT_PAUSE;
use crate::reception::{Reception, Strays};
use crate::schedule::RANKS_MAX;

/// Time between two attempts to connect to a rank that does not listen yet.
pub(crate) const RETRY_PAUSE: Duration = Duration::from_millis(10);
/// The longest attempt to connect. Between two attempts the caller is asked whether to go on.
const DIAL_MAX: Duration = Duration::from_secs(1);

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
    pub(crate) fn judge(&self, hello: &Hello) -> Welcome {
        if hello.name != self.name && !mutants::on("admit_other_groups") {
            Welcome::OtherName
        } else if usize::from(hello.ranks) != self.ranks {
            Welcome::OtherRanks(self.ranks as u8)
        } else if usize::from(hello.to) != self.rank && !mutants::on("admit_other_ranks") {
            Welcome::OtherRank(self.rank as u8)
        } else {
            Welcome::Accepted
        }
    }
}

/// How ranks reach each other.
pub(crate) trait Network {
    /// A non-blocking connection.
    type Socket: Socket;
    /// What the connections of two ranks are for, in the order in which they are made.
    const PURPOSES: &'static [Purpose];
    /// Whether the rank that connects brings a region along.
    const HAS_REGION: bool;

    /// Where a rank listens, for people.
    fn place(&self, peer: usize) -> String;
    /// Connects to a rank.
    fn dial(&self, peer: usize, limit: Duration) -> io::Result<Self::Socket>;
    /// Readable when a connection waits.
    fn listener(&self) -> BorrowedFd<'_>;
    /// Accepts a connection that waits.
    fn accept(&self) -> io::Result<Self::Socket>;
    /// What the rank that connects brings along.
    fn region(&self) -> io::Result<Option<SharedMemory>>;
    /// Sends a hello, with what is brought along.
    fn introduce(
        &self,
        socket: &Self::Socket,
        hello: &[u8],
        region: Option<BorrowedFd<'_>>,
    ) -> io::Result<()>;
    /// Receives bytes of a hello, and what came along; 0 bytes are the end.
    fn receive(
        &self,
        socket: &Self::Socket,
        into: &mut [u8],
    ) -> io::Result<(usize, Option<SharedMemory>)>;
}

/// A connection that is part of the group, and the region that came with it.
pub(crate) type Joined<N> = (<N as Network>::Socket, Option<SharedMemory>);

/// How long forming may take, and what ends it before.
pub(crate) struct Patience<'a> {
    rank: usize,
    deadline: Instant,
    /// True: the caller does not want to wait any longer.
    interrupt: &'a mut dyn FnMut() -> bool,
    /// When it was asked last.
    asked: Instant,
}

impl<'a> Patience<'a> {
    pub(crate) fn new(
        member: &Member,
        limit: Duration,
        interrupt: &'a mut dyn FnMut() -> bool,
    ) -> Self {
        let now = Instant::now();
        Self { rank: member.rank, deadline: now + limit, interrupt, asked: now }
    }

    /// Time until the deadline.
    pub(crate) fn left(&self) -> Duration {
        self.deadline.saturating_duration_since(Instant::now())
    }

    /// An error if the caller does not want to wait any longer.
    pub(crate) fn check(&mut self) -> Result<(), CollectiveError> {
        let now = Instant::now();
        if now - self.asked < INTERRUPT_PAUSE {
            return Ok(());
        }
        self.asked = now;
        match (self.interrupt)() {
            true => Err(CollectiveError::Interrupted(self.rank)),
            false => Ok(()),
        }
    }
}

/// What forming has found.
pub(crate) struct Formed<N: Network> {
    /// By rank, the connections in the order of purposes; `None` for this rank itself.
    pub(crate) joined: Vec<Option<Vec<Joined<N>>>>,
    pub(crate) strays: Strays,
}

/// Connects this rank with all others. Higher ranks, and connections that are not of the group, are answered all the time.
pub(crate) fn form<N: Network>(
    member: &Member,
    network: &N,
    mut patience: Patience<'_>,
) -> Result<Formed<N>, CollectiveError> {
    let mut reception = Reception::new(member, network);
    let formed = meet(member, network, &mut reception, &mut patience);
    let strays = reception.strays();
    match formed {
        Ok(mut joined) => {
            joined.push(None);
            joined.extend(reception.into_joined().into_iter().map(Some));
            Ok(Formed { joined, strays })
        }
        Err(CollectiveError::Forming { name, why }) if strays != Strays::default() => {
            Err(CollectiveError::Forming { name, why: format!("{why} ({strays})") })
        }
        Err(error) => Err(error),
    }
}

/// The connections to the lower ranks; those of the higher ones are in the reception.
fn meet<N: Network>(
    member: &Member,
    network: &N,
    reception: &mut Reception<'_, N>,
    patience: &mut Patience<'_>,
) -> Result<Vec<Option<Vec<Joined<N>>>>, CollectiveError> {
    let mut lower = Vec::with_capacity(member.ranks);
    for peer in 0..member.rank {
        let mut joined = Vec::with_capacity(N::PURPOSES.len());
        for purpose in N::PURPOSES {
            joined.push(connect(member, network, peer, *purpose, reception, patience)?);
        }
        lower.push(Some(joined));
    }
    while !reception.missing().is_empty() {
        let left = patience.left();
        reception.serve(None, left.min(INTERRUPT_PAUSE));
        patience.check()?;
        let missing = reception.missing();
        if left.is_zero() && !missing.is_empty() {
            let missing: Vec<String> = missing.iter().map(ToString::to_string).collect();
            let why = format!("these ranks did not connect in time: {}", missing.join(", "));
            return Err(member.failed(why));
        }
    }
    Ok(lower)
}

/// Connects to a lower rank, which may start later.
fn connect<N: Network>(
    member: &Member,
    network: &N,
    peer: usize,
    purpose: Purpose,
    reception: &mut Reception<'_, N>,
    patience: &mut Patience<'_>,
) -> Result<Joined<N>, CollectiveError> {
    let there = || format!("rank {peer} at {}", network.place(peer));
    loop {
        let why = match introduce(member, network, peer, purpose, reception, patience) {
            Ok((joined, Welcome::Accepted)) => return Ok(joined),
            Ok((_, refusal)) => return Err(member.failed(refused(member, &there(), refusal))),
            Err(Vain::Failed(error)) => error,
            Err(Vain::Over(error)) => return Err(error),
        };
        patience.check()?;
        if patience.left() < RETRY_PAUSE {
            return Err(member.failed(format!("{} does not answer: {why}", there())));
        }
        let again = Instant::now() + RETRY_PAUSE;
        while let Some(left) = again.checked_duration_since(Instant::now()) {
            reception.serve(None, left);
        }
    }
}

/// Why an attempt to connect had no answer.
enum Vain {
    /// Another one may have.
    Failed(io::Error),
    /// There is to be no other one.
    Over(CollectiveError),
}

impl From<io::Error> for Vain {
    fn from(error: io::Error) -> Self {
        Self::Failed(error)
    }
}

fn introduce<N: Network>(
    member: &Member,
    network: &N,
    peer: usize,
    purpose: Purpose,
    reception: &mut Reception<'_, N>,
    patience: &mut Patience<'_>,
) -> Result<(Joined<N>, Welcome), Vain> {
    let region = network.region()?;
    let socket = network.dial(peer, patience.left().min(DIAL_MAX))?;
    let hello = member.hello(peer, purpose).encode();
    network.introduce(&socket, &hello, region.as_ref().map(SharedMemory::fd))?;
    let (mut answer, mut got) = ([0; WELCOME_BYTES], 0);
    while got < WELCOME_BYTES {
        let limit = patience.left();
        if limit.is_zero() {
            return Err(Vain::Failed(io::ErrorKind::TimedOut.into()));
        }
        reception.serve(Some(socket.as_fd()), limit.min(INTERRUPT_PAUSE));
        patience.check().map_err(Vain::Over)?;
        match socket.receive(&mut answer[got..]) {
            Ok(0) => return Err(Vain::Failed(io::ErrorKind::UnexpectedEof.into())),
            Ok(count) => got += count,
            Err(error) if is_nothing(&error) => {}
            Err(error) => return Err(error.into()),
        }
    }
    match Welcome::decode(&answer) {
        Some(welcome) => Ok(((socket, region), welcome)),
        None => Err(io::Error::other("something else than a rank listens there").into()),
    }
}

fn refused(member: &Member, there: &str, refusal: Welcome) -> String {
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
            format!("{there} is rank {rank}; all ranks need the same list of addresses")
        }
        Welcome::Twice => {
            format!(
                "{there} has accepted another process as rank {}; give each process its own rank",
                member.rank
            )
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_those_of_the_group_that_mean_this_rank_are_accepted() {
        let member = Member { name: "test".to_owned(), ranks: 3, rank: 1 };
        let good =
            Hello { purpose: Purpose::Data, ranks: 3, from: 2, to: 1, name: "test".to_owned() };
        assert_eq!(member.judge(&good), Welcome::Accepted);
        let judge = |other: Hello| member.judge(&other);
        let name = "tes".to_owned();
        assert_eq!(judge(Hello { name, ..good.clone() }), Welcome::OtherName);
        assert_eq!(judge(Hello { ranks: 4, ..good.clone() }), Welcome::OtherRanks(3));
        // It took the address of this rank for that of rank 0.
        assert_eq!(judge(Hello { to: 0, ..good.clone() }), Welcome::OtherRank(1));
        assert_eq!(judge(Hello { from: 1, to: 0, ..good }), Welcome::OtherRank(1));
    }
}
