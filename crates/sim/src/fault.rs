//! The kinds of faults, each with a name, so that a run can leave one out and count how
//! often each occurred. The table in the crate's text lists where each is injected and which check detects it.

use std::collections::BTreeSet;
use std::fmt::{Display, Formatter};
use std::str::FromStr;

use crate::rng::Rng;

macro_rules! faults {
    ($( $(#[doc = $doc:literal])+ $variant:ident = $name:literal; )+) => {
        /// One kind of fault.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
        #[repr(u8)]
        pub enum Fault { $( $(#[doc = $doc])+ $variant, )+ }

        impl Fault {
            /// Every kind, in declaration order; `fault as usize` indexes it.
            pub const ALL: &'static [Self] = &[ $( Self::$variant, )+ ];

            /// Its name on the command line and in reports.
            pub const fn name(self) -> &'static str {
                match self { $( Self::$variant => $name, )+ }
            }
        }
    };
}

faults! {
    /// A datagram is lost.
    Lose = "lose";
    /// A datagram arrives twice.
    Duplicate = "duplicate";
    /// A datagram overtakes another one.
    Reorder = "reorder";
    /// A bit of a datagram to the engine changes.
    Corrupt = "corrupt";
    /// A datagram arrives truncated.
    Truncate = "truncate";
    /// A datagram's source is forged: it is a UDP port of the server.
    OwnSource = "own-source";
    /// A datagram arrives at a full receive buffer.
    SocketFull = "socket-full";
    /// The host kernel refuses to send a datagram.
    RefuseSend = "refuse-send";
    /// The host kernel has no room for a datagram now.
    FullSend = "full-send";
    /// A read returns less than available, down to one byte.
    ShortRead = "short-read";
    /// A write takes less than it could, down to nothing.
    ShortWrite = "short-write";
    /// A stream's buffer holds less than a message.
    SmallPipe = "small-pipe";
    /// A reset destroys data that had arrived before it.
    ResetDestroys = "reset-destroys";
    /// An event without a cause.
    Spurious = "spurious";
    /// An event is reported late.
    LateEvent = "late-event";
    /// No descriptor is free.
    Exhausted = "exhausted";
    /// A datagram that is not a valid message.
    Junk = "junk";
    /// A request longer than the service takes.
    LongRequest = "long-request";
    /// A request for a reply that the framing cannot carry.
    Unframable = "unframable";
    /// A client writes and reads single bytes.
    Bytewise = "bytewise";
    /// A client never reads.
    Deaf = "deaf";
    /// A client sends a command that its protocol refuses.
    Bogus = "bogus";
    /// A client closes its sending side and keeps reading.
    HalfClose = "half-close";
    /// A client resets its connection while requests are in flight.
    Reset = "reset";
    /// A client closes everything while requests are in flight.
    Vanish = "vanish";
    /// A client breaks the framing.
    Nonsense = "nonsense";
    /// A client closes its side inside a request.
    Cut = "cut";
    /// A block answers twice.
    Twice = "twice";
    /// A block answers late.
    Late = "late";
    /// A block never answers a message.
    Swallow = "swallow";
    /// A block drops what it should answer.
    Reject = "reject";
    /// A block answers a token that was never issued.
    Forge = "forge";
    /// A block answers a token of another mqueue.
    Steal = "steal";
    /// A block completes a bundle with memory, messages or tokens that are not its own.
    BundleForge = "bundle-forge";
    /// A block writes a message of an unknown kind.
    BadKind = "bad-kind";
    /// A block writes a message with an invalid length, offset or flag.
    BadHeader = "bad-header";
    /// A block replies although the service has no replies.
    Unwanted = "unwanted";
    /// A block stops reading permanently.
    Stall = "stall";
    /// A block ends.
    Die = "die";
    /// A block overwrites words of its rings.
    Scribble = "scribble";
    /// An accelerator's runtime ends and restarts with a new region.
    Restart = "restart";
    /// A service is paused until the planned end of an accelerator generation.
    Hold = "hold";
    /// A block answers a token of the accelerator's previous generation.
    Replay = "replay";
    /// A block overwrites any words of its accelerator's region, including those of other blocks.
    WideScribble = "wide-scribble";
    /// A block is reported to have new messages, and has none.
    FalseAlarm = "false-alarm";
    /// A block sends a command for its sockets that names anything.
    SocketForge = "socket-forge";
    /// A block overwrites a word of a stream ring.
    SocketScribble = "socket-scribble";
    /// A block resets a connection.
    SocketReset = "socket-reset";
    /// A block closes a connection before its peer has sent everything.
    SocketClose = "socket-close";
    /// A block gives up a command.
    SocketCancel = "socket-cancel";
    /// A peer of a block closes or resets its connection early.
    SocketLeave = "socket-leave";
    /// A peer of a block stops reading.
    SocketDeaf = "socket-deaf";
    /// A server to which blocks connect refuses connections, ignores them, or is unreachable.
    SocketDoor = "socket-reachability";
    /// A read or a write of a link moves less than it could.
    LinkShort = "link-short";
    /// Nothing arrives over a link for a while.
    LinkStall = "link-stall";
    /// The connection of a link is cut.
    LinkCut = "link-cut";
    /// A bit of what a link carries changes.
    LinkDamage = "link-damage";
    /// Nothing arrives over a link any more.
    LinkSilence = "link-silence";
    /// A backend answers after the time-out.
    BackendLate = "backend-late";
    /// A backend never answers again.
    BackendHang = "backend-hang";
    /// A backend closes or resets instead of answering.
    BackendClose = "backend-close";
    /// A backend closes the connection inside an answer.
    BackendCut = "backend-cut";
    /// A backend answers with data that is not an answer.
    BackendGarbage = "backend-garbage";
    /// A backend answers twice.
    BackendUnasked = "backend-unasked";
    /// A backend sends its answer to another request.
    BackendSwap = "backend-swap";
    /// A backend answers with more than fits.
    BackendLong = "backend-long";
    /// A backend refuses connections, ignores them, or is unreachable.
    BackendDoor = "backend-reachability";
    /// A shared-memory client does not read its outcomes.
    MemoryDeaf = "memory-deaf";
    /// A shared-memory client's process ends while requests are in flight.
    MemoryLeave = "memory-leave";
    /// A shared-memory client writes a message of an unknown kind.
    MemoryKind = "memory-kind";
    /// A shared-memory client overwrites any words of its region.
    MemoryScribble = "memory-scribble";
    /// A service is replaced by another version of it.
    Reload = "reload";
    /// A worker gets a control message about something that has left or never was there.
    LateMessage = "late-message";
    /// The workers do not run for milliseconds.
    Pause = "pause";
    /// The drain begins under load.
    EarlyDrain = "early-drain";
    /// The engine drains before clients disconnected by a reload have left.
    CutReload = "cut-reload";
    /// The counts of the rings are about to pass a power of two that matters.
    RingWrap = "ring-wrap";
}

impl FromStr for Fault {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        let found = Self::ALL.iter().find(|fault| fault.name() == name).copied();
        found.ok_or_else(|| format!("unknown fault {name:?}; --faults lists them"))
    }
}

/// A set of faults. On the command line: their names, separated by commas.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FaultSet(pub BTreeSet<Fault>);

impl FaultSet {
    /// Every kind but these.
    pub fn others(&self) -> Self {
        Self(Fault::ALL.iter().filter(|fault| !self.0.contains(fault)).copied().collect())
    }
}

impl FromStr for FaultSet {
    type Err = String;

    fn from_str(names: &str) -> Result<Self, String> {
        let names = names.split(',').filter(|name| !name.is_empty());
        names.map(str::parse).collect::<Result<_, _>>().map(Self)
    }
}

impl Display for FaultSet {
    fn fmt(&self, f: &mut Formatter<'_>) -> std::fmt::Result {
        let names: Vec<_> = self.0.iter().map(|fault| fault.name()).collect();
        f.write_str(&names.join(","))
    }
}

/// How often each kind of fault occurred.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FaultCounts([u64; Fault::ALL.len()]);

impl Default for FaultCounts {
    fn default() -> Self {
        Self([0; Fault::ALL.len()])
    }
}

impl FaultCounts {
    /// Counts one.
    pub fn one(&mut self, fault: Fault) {
        self.many(fault, 1);
    }

    /// Counts several.
    pub fn many(&mut self, fault: Fault, count: u64) {
        self.0[fault as usize] += count;
    }

    /// Whether a fault with a rate of `per_mille` occurs now; counts it.
    pub fn occurs(&mut self, rng: &mut Rng, fault: Fault, per_mille: u32) -> bool {
        let occurs = rng.chance(per_mille);
        self.0[fault as usize] += u64::from(occurs);
        occurs
    }

    /// How often `fault` occurred.
    pub fn count(&self, fault: Fault) -> u64 {
        self.0[fault as usize]
    }

    /// Adds the counts of another run.
    pub fn add(&mut self, other: &Self) {
        for (sum, count) in self.0.iter_mut().zip(other.0) {
            *sum += count;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sets_are_written_as_they_are_read() {
        let all: FaultSet = FaultSet::default().others();
        assert_eq!(all.to_string().parse(), Ok(all.clone()));
        assert_eq!(all.others(), FaultSet::default());
        assert_eq!("".parse(), Ok(FaultSet::default()));
        assert!("lose,loose".parse::<FaultSet>().unwrap_err().contains("loose"));
    }

    #[test]
    fn the_table_in_the_crates_text_has_every_fault_once() {
        let text = include_str!("lib.rs");
        for fault in Fault::ALL {
            let row = format!("//! | `{}` |", fault.name());
            assert_eq!(text.matches(&row).count(), 1, "{row}");
        }
    }
}
