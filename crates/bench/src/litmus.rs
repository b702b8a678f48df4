//! Litmus tests of the ordering edges, between two processes on this machine's processor.
//!
//! The loom models check the rules of the language; these tests check the processor, the compiler and the host's
//! shared memory. Two processes map one region, synchronize before every round or run independently, and look for
//! outcomes that an edge of ORDERING.md forbids.
//!
//! * *Message passing through rings*: every protocol, both directions, short rings, so that slots are
//!   reused all the time (`PUBLISH` and `RELEASE` of RX and TX; `HANDOVER` is the same code).
//! * *Units*: whether a granule is ever read half old, half new.
//! * *Words*: the guarantees of a heartbeat, a state, a stop word, a doorbell's count and a region's magic number
//!   (`HEARTBEAT`, `STATE`, `STOP`, `DOORBELL`, `FORMAT`).
//! * *Store buffering*: sleeper and waker of `PARK`. At least one side must see the other.
//!
//! A test that cannot fail shows nothing, so there are *controls*: the same harness with deliberately wrong code.
//! Each of them must show its forbidden outcome, or the run is void. (On a machine with one core it always is: store
//! buffering needs two.)

mod edges;
mod pair;

use std::os::fd::OwnedFd;
use std::process::Command;
use std::time::Duration;

pub use pair::LitmusError;

/// Default number of rounds of a test.
pub const ROUNDS_DEFAULT: u64 = 1_000_000;

/// Maximum time of a test for each [`ROUNDS_DEFAULT`] rounds.
const TEST_TIME: Duration = Duration::from_secs(3);

/// Maximum time of a test with this many rounds; the processes exchange only the number of rounds.
fn time_for(rounds: u64) -> Duration {
    TEST_TIME.mul_f64((rounds as f64 / ROUNDS_DEFAULT as f64).max(1.0))
}

/// The meaning of the outcome that a test looks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Expect {
    /// An edge forbids it.
    Never,
    /// Nothing forbids it, and some processors show it.
    Allowed,
    /// A control: it must be seen, or the harness detects nothing.
    Seen,
}

/// The result of one test.
#[derive(Clone, Copy, Debug)]
pub struct Row {
    /// The edges, or the deliberate error.
    pub name: &'static str,
    /// The test and the outcome looked for.
    pub what: &'static str,
    /// Meaning of that outcome.
    pub expect: Expect,
    /// Number of rounds in which it could have been seen.
    pub rounds: u64,
    /// Number of rounds in which it was.
    pub seen: u64,
}

impl Row {
    /// Whether the result is as required.
    pub fn is_good(&self) -> bool {
        match self.expect {
            Expect::Never => self.seen == 0 && self.rounds > 0,
            Expect::Allowed => self.rounds > 0,
            Expect::Seen => self.seen > 0,
        }
    }

    /// The verdict in a word or two.
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

/// Runs every test for `rounds` rounds, at most three seconds each per million rounds. `peer` is a command that calls
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

/// The other process: `region` was passed by [`run`] as its standard input.
pub fn peer(region: OwnedFd) -> Result<(), LitmusError> {
    let mut side = pair::second(region)?;
    for test in edges::TESTS {
        side.run(test.run)?;
    }
    Ok(())
}
