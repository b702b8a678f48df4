//! How the blocks of a model accelerator behave.

use crate::socket_block::SocketBehaviour;

/// Behaviour of blocks. Rates are per mille of the messages.
#[derive(Clone, Copy, Debug, Default)]
pub struct Behaviour {
    /// Runs between the worker's turns, not inside them.
    pub remote: bool,
    /// Their library takes no bundles; of generations that start later than the engine.
    pub single_messages: bool,
    /// Shortest and longest time an answer takes, in nanoseconds.
    pub delay_ns: (u64, u64),
    /// Messages a block works on at once, besides the first.
    pub overlap: usize,
    /// Only this block has the faults below; the others are sound.
    pub only_block: Option<u32>,
    /// Answers twice.
    pub twice: u32,
    /// Answers this much later, ...
    pub late: u32,
    /// ... in nanoseconds.
    pub late_ns: u64,
    /// Never answers.
    pub swallow: u32,
    /// Drops with `REJECTED`.
    pub reject: u32,
    /// Drops with `BAD_LENGTH`.
    pub bad_length: u32,
    /// Drops because its reply is too long.
    pub too_long: u32,
    /// Also answers a token that was never issued.
    pub forge: u32,
    /// Also answers a token of another mqueue.
    pub steal: u32,
    /// Also writes an impossible completion of a bundle.
    pub bundle_forge: u32,
    /// Also writes a message of an unknown kind.
    pub bad_kind: u32,
    /// Also writes a message with an impossible header.
    pub bad_header: u32,
    /// Replies although the service has no replies.
    pub unwanted: u32,
    /// Stops permanently with the message after this many.
    pub stall_after: Option<u64>,
    /// Ends with the message after this many.
    pub die_after: Option<u64>,
    /// Only writes random words over its rings from the message after this many.
    pub scribble_after: Option<u64>,
    /// Writes anywhere in the region, not only in its own rings.
    pub wide: bool,
    /// Also answers a token of the previous generation, if there was one.
    pub replay: u32,
    /// Reports mqueues as touched that are not.
    pub spurious: u32,
    /// What they do with their sockets.
    pub sockets: SocketBehaviour,
    /// Always requests the longest answer from backends, instead of sometimes.
    pub long_questions: bool,
}

impl Behaviour {
    /// The same blocks without faults.
    pub fn sound(&self) -> Self {
        let Self { remote, single_messages, delay_ns, overlap, spurious, .. } = *self;
        let sockets = SocketBehaviour { idle: self.sockets.idle, ..SocketBehaviour::default() };
        Self { remote, single_messages, delay_ns, overlap, spurious, sockets, ..Self::default() }
    }

    /// Whether each request is answered or dropped at some time.
    pub(crate) fn ends_all(&self) -> bool {
        self.swallow == 0
            && self.stall_after.is_none()
            && self.die_after.is_none()
            && self.scribble_after.is_none()
    }

    /// Whether replies may carry any content.
    pub fn corrupts(&self) -> bool {
        self.scribble_after.is_some()
    }

    /// Whether correct blocks may find arbitrary data in their rings.
    pub(crate) fn is_wide(&self) -> bool {
        self.wide && self.corrupts()
    }
}
