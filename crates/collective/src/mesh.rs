//! How ranks find each other: every rank listens, connects to all lower ranks and accepts all higher ones. Both sides check
//! version, name, number of ranks and rank before a connection is part of the group.

use std::io;
use std::os::fd::AsFd as _;
use std::time::{Duration, Instant};

use sys::memory::SharedMemory;

use crate::admission::{Acceptor, ClosedConnections};
use crate::control::{Socket as _, is_nothing};
use crate::error::CollectiveError;
use crate::frame::{Purpose, WELCOME_BYTES, Welcome};
use crate::group::INTERRUPT_PAUSE;
use crate::network::{Joined, Member, Network};

/// Time between two attempts to connect to a rank that does not listen yet.
const RETRY_PAUSE: Duration = Duration::from_millis(10);
/// The longest attempt to connect. Between two attempts the caller is asked whether to go on.
const DIAL_MAX: Duration = Duration::from_secs(1);

/// How long forming may take, and what ends it before.
pub(crate) struct FormingLimits<'a> {
    rank: usize,
    deadline: Instant,
    /// True: the caller does not want to wait any longer.
    interrupt: &'a mut dyn FnMut() -> bool,
    /// When it was asked last.
    asked: Instant,
}

impl<'a> FormingLimits<'a> {
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
    pub(crate) closed: ClosedConnections,
}

/// Connects this rank with all others. Higher ranks, and connections that are not of the group, are answered all the time.
pub(crate) fn form<N: Network>(
    member: &Member,
    network: &N,
    mut limits: FormingLimits<'_>,
) -> Result<Formed<N>, CollectiveError> {
    let mut acceptor = Acceptor::new(member, network);
    let formed = meet(member, network, &mut acceptor, &mut limits);
    let closed = acceptor.closed();
    match formed {
        Ok(mut joined) => {
            joined.push(None);
            joined.extend(acceptor.into_joined().into_iter().map(Some));
            Ok(Formed { joined, closed })
        }
        Err(CollectiveError::Forming { name, why }) if closed != ClosedConnections::default() => {
            Err(CollectiveError::Forming { name, why: format!("{why} ({closed})") })
        }
        Err(error) => Err(error),
    }
}

/// The connections to the lower ranks; those of the higher ones are in the acceptor.
fn meet<N: Network>(
    member: &Member,
    network: &N,
    acceptor: &mut Acceptor<'_, N>,
    limits: &mut FormingLimits<'_>,
) -> Result<Vec<Option<Vec<Joined<N>>>>, CollectiveError> {
    let mut lower = Vec::with_capacity(member.ranks);
    for peer in 0..member.rank {
        let mut joined = Vec::with_capacity(N::PURPOSES.len());
        for purpose in N::PURPOSES {
            joined.push(connect(member, network, peer, *purpose, acceptor, limits)?);
        }
        lower.push(Some(joined));
    }
    while !acceptor.missing().is_empty() {
        let left = limits.left();
        acceptor.serve(None, left.min(INTERRUPT_PAUSE));
        limits.check()?;
        let missing = acceptor.missing();
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
    acceptor: &mut Acceptor<'_, N>,
    limits: &mut FormingLimits<'_>,
) -> Result<Joined<N>, CollectiveError> {
    let there = || format!("rank {peer} at {}", network.place(peer));
    loop {
        let why = match introduce(member, network, peer, purpose, acceptor, limits) {
            Ok((joined, Welcome::Accepted)) => return Ok(joined),
            Ok((_, refusal)) => return Err(member.failed(refused(member, &there(), refusal))),
            Err(AttemptError::Failed(error)) => error,
            Err(AttemptError::Over(error)) => return Err(error),
        };
        limits.check()?;
        if limits.left() < RETRY_PAUSE {
            return Err(member.failed(format!("{} does not answer: {why}", there())));
        }
        let again = Instant::now() + RETRY_PAUSE;
        while let Some(left) = again.checked_duration_since(Instant::now()) {
            acceptor.serve(None, left);
        }
    }
}

/// Why an attempt to connect had no answer.
enum AttemptError {
    /// Another one may have.
    Failed(io::Error),
    /// There is to be no other one.
    Over(CollectiveError),
}

impl From<io::Error> for AttemptError {
    fn from(error: io::Error) -> Self {
        Self::Failed(error)
    }
}

fn introduce<N: Network>(
    member: &Member,
    network: &N,
    peer: usize,
    purpose: Purpose,
    acceptor: &mut Acceptor<'_, N>,
    limits: &mut FormingLimits<'_>,
) -> Result<(Joined<N>, Welcome), AttemptError> {
    let region = network.region()?;
    let socket = network.dial(peer, limits.left().min(DIAL_MAX))?;
    let hello = member.hello(peer, purpose).encode();
    network.introduce(&socket, &hello, region.as_ref().map(SharedMemory::fd))?;
    let (mut answer, mut got) = ([0; WELCOME_BYTES], 0);
    while got < WELCOME_BYTES {
        let limit = limits.left();
        if limit.is_zero() {
            return Err(AttemptError::Failed(io::ErrorKind::TimedOut.into()));
        }
        acceptor.serve(Some(socket.as_fd()), limit.min(INTERRUPT_PAUSE));
        limits.check().map_err(AttemptError::Over)?;
        match socket.receive(&mut answer[got..]) {
            Ok(0) => return Err(AttemptError::Failed(io::ErrorKind::UnexpectedEof.into())),
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
