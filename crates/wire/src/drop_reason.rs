//! Why a message was lost: one name for each way, counted where it happens.
//!
//! Every request that enters a service ends in exactly one of three ways: it is *replied* to, it is
//! *consumed* (a service whose kernel never answers), or it is *dropped* for one of the request
//! reasons below. The accounting identity
//!
//! ```text
//! received = replied + consumed + Σ drops of scope Request + outstanding
//! ```
//!
//! therefore sums the request reasons alone. A message that an accelerator or a backend wrote and
//! that ends no request (a second reply, a reply to nobody) is dropped with a reason of scope
//! `Reply` or `Backend`; bytes lost before a request was recognised have scope `Intake`.

macro_rules! drop_reasons {
    ($( $(#[doc = $doc:literal])+ $variant:ident = $name:literal, $scope:ident; )+) => {
        /// One reason for which a message can be lost. See the module's text for scopes.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        #[repr(u8)]
        pub enum DropReason { $( $(#[doc = $doc])+ $variant, )+ }

        impl DropReason {
            /// Every reason, in declaration order; `reason as usize` indexes it.
            pub const ALL: &'static [Self] = &[ $( Self::$variant, )+ ];

            /// The label used in metrics, logs and documents.
            pub const fn name(self) -> &'static str {
                match self { $( Self::$variant => $name, )+ }
            }

            /// What kind of message the reason ends.
            pub const fn scope(self) -> DropScope {
                match self { $( Self::$variant => DropScope::$scope, )+ }
            }

            /// One sentence for the operator.
            pub const fn describe(self) -> &'static str {
                match self { $( Self::$variant => concat!($($doc),+).trim_ascii(), )+ }
            }
        }
    };
}

/// What a [`DropReason`] ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DropScope {
    /// Lost before a request was recognised; not part of `received`.
    Intake,
    /// A received request ended without a reply; part of the accounting identity.
    Request,
    /// A message written by an accelerator that ends no request.
    Reply,
    /// A message on its way to or from a backend.
    Backend,
}

drop_reasons! {
    /// The host kernel discarded datagrams because the socket buffer was full (SO_RXQ_OVFL).
    SocketOverflow = "socket_overflow", Intake;
    /// The host kernel truncated the datagram: it was larger than any message may be.
    Truncated = "truncated", Intake;
    /// Bytes of a TCP stream that break the port's framing; the connection is closed, unless the
    /// framing can tell where the next message begins.
    BadFraming = "bad_framing", Intake;
    /// A connection was refused because `limits.connections` are open.
    ConnectionLimit = "connection_limit", Intake;
    /// A connection was closed after `limits.idle_s` without a complete message.
    IdleTimeout = "idle_timeout", Intake;

    /// The message is longer than the service's `max_message_bytes`.
    TooLong = "too_long", Request;
    /// The message is shorter than the function or dispatch key needs.
    TooShort = "too_short", Request;
    /// No mqueue of the service had credit: the accelerator is saturated.
    NoCredit = "no_credit", Request;
    /// No accelerator serves the mqueue (absent, detached or dead).
    NoAccelerator = "no_accelerator", Request;
    /// The request waited in the queue longer than `queue_us_max`.
    QueueTime = "queue_time", Request;
    /// No reply within `request_timeout_ms`.
    RequestTimeout = "request_timeout", Request;
    /// The kernel dropped the message: its length is not one it accepts.
    BadLength = "bad_length", Request;
    /// The kernel dropped the message for a reason of its own.
    KernelDrop = "kernel_drop", Request;
    /// The kernel's reply is longer than `max_reply_bytes`, or than the transport can carry.
    ReplyTooLong = "reply_too_long", Request;
    /// The reply would exceed `udp_reply_ratio` times the request of an unverified UDP source.
    ReplyRatio = "reply_ratio", Request;
    /// The framing cannot carry the reply (a line ending inside a line, not a memcached response).
    ReplyUnframable = "reply_unframable", Request;
    /// The client's connection was gone when its reply came or while the reply was being written.
    ClientGone = "client_gone", Request;
    /// A client accepted no bytes for `limits.slow_client_ms`; its connection is closed.
    SlowClient = "slow_client", Request;
    /// The bounded memory for early replies of ordered connections is used up.
    ReplyMemory = "reply_memory", Request;
    /// The host kernel refused to send the reply.
    SendFailed = "send_failed", Request;
    /// The mqueue was declared dead: its ring words are impossible, or its block ended early.
    MqueueDead = "mqueue_dead", Request;
    /// The accelerator's runtime ended while the request was with it.
    AcceleratorLost = "accelerator_lost", Request;
    /// The accelerator's runtime stood still for longer than `heartbeat_ms` while the request was with it.
    AcceleratorStalled = "accelerator_stalled", Request;
    /// The service has changed and its accelerator starts again.
    Reconfiguring = "reconfiguring", Request;
    /// The worker-to-worker ring was full.
    HandoverFull = "handover_full", Request;
    /// The service is draining: no new request is accepted.
    Draining = "draining", Request;
    /// The drain period ended before the reply came.
    DrainTimeout = "drain_timeout", Request;

    /// The accelerator answered a token that is not, or no longer, outstanding on that mqueue.
    StaleToken = "stale_token", Reply;
    /// A TX message has an impossible header (kind, length, arena offset).
    BadMessage = "bad_message", Reply;
    /// The kernel of a `replies = "none"` service sent a reply.
    UnwantedReply = "unwanted_reply", Reply;
    /// The kernel of a `replies = "none"` service rejected a message that counts as consumed.
    ConsumedDrop = "consumed_drop", Reply;

    /// A backend answered a request that had already timed out.
    BackendLate = "backend_late", Backend;
    /// A backend sent bytes that its framing cannot parse; its connection is closed.
    BackendProtocol = "backend_protocol", Backend;
    /// A backend sent a message that answers no request.
    BackendUnasked = "backend_unasked", Backend;
    /// A backend's answer is longer than the client mqueue can carry.
    BackendTooLong = "backend_too_long", Backend;
    /// A backend's answer does not fit the request that waits for it: another key, id or kind of answer.
    BackendMismatch = "backend_mismatch", Backend;

    // Shared-memory clients know reasons by number, so new ones stand at the end.
    /// The source of the datagram is a UDP port of this server: an answer would be a request to itself.
    LoopedSource = "looped_source", Intake;
    /// The datagram's source port is below 1024, and `limits.udp_privileged_sources` does not allow that.
    PrivilegedSource = "privileged_source", Intake;
}

impl DropReason {
    /// How many reasons exist: the length of a table of counters.
    pub const COUNT: usize = Self::ALL.len();
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_unique_and_snake_case() {
        for (i, a) in DropReason::ALL.iter().enumerate() {
            assert_eq!(*a as usize, i);
            assert!(a.name().bytes().all(|b| b.is_ascii_lowercase() || b == b'_'), "{}", a.name());
            assert!(DropReason::ALL[..i].iter().all(|b| b.name() != a.name()), "{}", a.name());
        }
    }
}
