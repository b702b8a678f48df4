//! Litmus tests of the ordering edges, between two processes on this machine's processor.
//!
//! The models that loom explores say what the language allows; these tests say what the processor, the
//! compiler and the host's shared memory really do. Two processes map one region, meet before every
//! round or run past each other, and look for outcomes that an edge of ORDERING.md forbids.
//!
//! * *Message passing through rings*: every protocol, both directions, short rings, so that slots are
//!   reused all the time (`PUBLISH` and `RELEASE` of RX and TX; `HANDOVER` is the same code).
//! * *Units*: whether a granule is ever seen half old, half new.
//! * *Words*: what a beat, a state, the wish to stop, a doorbell's count or a region's magic number vouches for
//!   (`HEARTBEAT`, `STATE`, `STOP`, `DOORBELL`, `FORMAT`).
//! * *Store buffering*: sleeper and waker of `PARK`. Of both sides at least one must see the other.
//!
//! A test that cannot fail shows nothing, so there are *controls*: the same harness on code that is
//! wrong on purpose. Each of them must show its wrong outcome, or the run is void. (On a machine with one
//! core it always is: store buffering needs two.)

mod edges;
mod pair;

use std::os::fd::OwnedFd;
use std::process::Command;
use std::time::Duration;

pub use pair::LitmusError;

/// Rounds of a test if nobody says otherwise.
pub const ROUNDS_DEFAULT: u64 = 1_000_000;

/// A test ends after this long for each [`ROUNDS_DEFAULT`] rounds, however few it has had.
const TEST_TIME: Duration = Duration::from_secs(3);

/// How long a test of so many rounds may take; between both processes nothing but the rounds is told.
fn time_for(rounds: u64) -> Duration {
    TEST_TIME.mul_f64((rounds as f64 / ROUNDS_DEFAULT as f64).max(1.0))
}

/// What the outcome that a test looks for means.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Expect {
    /// An edge forbids it.
    Never,
    /// Nothing forbids it, and some processors show it.
    Allowed,
    /// A control: it must be seen, or the harness sees nothing.
    Seen,
}

/// What became of one test.
#[derive(Clone, Copy, Debug)]
pub struct Row {
    /// The edges, or what is wrong on purpose.
    pub name: &'static str,
    /// The shape and the outcome looked for.
    pub what: &'static str,
    /// What that outcome means.
    pub expect: Expect,
    /// How often it could have been seen.
    pub rounds: u64,
    /// How often it was.
    pub seen: u64,
}

impl Row {
    /// Whether the row is as it must be.
    pub fn is_good(&self) -> bool {
        match self.expect {
            Expect::Never => self.seen == 0 && self.rounds > 0,
            Expect::Allowed => self.rounds > 0,
            Expect::Seen => self.seen > 0,
        }
    }

    /// The row's verdict in a word or two.
    pub fn verdict(&self) -> &'static str {
        match (self.expect, self.is_good()) {
            _ if self.rounds == 0 => "never ran",
            (Expect::Never, true) => "holds",
            (Expect::Never, false) => "VIOLATED",
            (Expect::Allowed, _) if self.seen > 0 => "allowed, and seen",
            (Expect::Allowed, _) => "allowed, not seen here",
            (Expect::Seen, true) => "seen, as it must be",
            (Expect::Seen, false) => "BLIND",
        }
    }
}

/// Runs every test for `rounds` rounds, at most three seconds each for a million of them. `peer` is a command that calls
/// [`peer`] with its standard input.
pub fn run(rounds: u64, peer: Command) -> Result<Vec<Row>, LitmusError> {
    let mut pair = pair::Pair::start(peer)?;
    let mut rows = Vec::new();
    for test in edges::TESTS {
        let (rounds, seen) = pair.run(rounds, test.run)?;
        let edges::Test { name, what, expect, .. } = *test;
        rows.push(Row { name, what, expect, rounds, seen });
    }
    pair.finish()?;
    Ok(rows)
}

/// The other process: `region` is what [`run`] gave it as its standard input.
pub fn peer(region: OwnedFd) -> Result<(), LitmusError> {
    let mut side = pair::second(region)?;
    for test in edges::TESTS {
        side.run(test.run)?;
    }
    Ok(())
}
