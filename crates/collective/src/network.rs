//! The members of a group, and how they reach each other.

use std::io;
use std::os::fd::BorrowedFd;
use std::time::Duration;

use sys::memory::SharedMemory;

use crate::control::Socket;
use crate::error::CollectiveError;
use crate::frame::{Hello, NAME_BYTES_MAX, Purpose, Welcome};
use crate::schedule::RANKS_MAX;

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

    pub(crate) fn hello(&self, to: usize, purpose: Purpose) -> Hello {
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
