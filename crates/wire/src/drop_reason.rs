//! Drop reasons: why a message was lost, counted where it happens.
//!
//! Every request that enters a service ends in exactly one of three ways: it is *replied* to, it is
//! *consumed* (a service whose kernel never answers), or it is *dropped* for one of the request
//! reasons below. The accounting identity
//!
//! ```text
//! received = replied + consumed + Σ drops of scope Request + outstanding
//! ```
//!
//! therefore sums the request reasons alone. A message of an accelerator or a backend that ends no request (a second
//! reply, a reply without a recipient) is dropped with a reason of scope `Reply` or `Backend`; bytes lost before a
//! request was recognized have scope `Intake`.
//!
//! A reason has two numbers. Its *index* is its position in [`DropReason::ALL`] and exists inside one process only.
//! Its *code* is used by other programs in rings: it never changes and is never reused. Clients read an unknown code
//! as [`ReportedReason::Other`], so a new reason takes the next free code and needs no new version of any protocol.
//!
//! The table below lists every reason with all that depends on it; `crates/sim/src/causes.rs` says which reasons a random
//! plan of the simulator can cause. There is no other list. `cargo xtask gen-abi` writes the C client's names and the
//! table of docs/operations.md.

use crate::error_reply::ErrorReply;

/// The error reply to a client, if its protocol has error replies. There is none for messages that clients did not
/// send, nor for unrecognized ones.
macro_rules! error_reply {
    ($scope:ident $reply:ident) => {
        ErrorReply::$reply
    };
    (Request) => {
        compile_error!("a reason of scope Request names the error reply of its client")
    };
    ($scope:ident) => {
        ErrorReply::Failed
    };
}

/// `Variant = code, "name", Scope(ErrorReply), "what the operator should do about it";` below the documentation, which
/// describes the event. The error reply is that of the client of a lost request; see [`ErrorReply`].
macro_rules! drop_reasons {
    ($( $(#[doc = $doc:literal])+ $variant:ident = $code:literal, $name:literal, $scope:ident $(($reply:ident))?, $advice:literal; )+) => {
        /// One reason for which a message can be lost. See the module documentation for scopes and codes.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        #[repr(u8)]
        pub enum DropReason { $( $(#[doc = $doc])+ $variant, )+ }

        impl DropReason {
            /// Every reason, by index; `reason as usize` is the index.
            pub const ALL: &'static [Self] = &[ $( Self::$variant, )+ ];

            /// The number of the reason in other programs.
            pub const fn code(self) -> u8 {
                match self { $( Self::$variant => $code, )+ }
            }

            /// The reason with this code.
            pub const fn from_code(code: u8) -> Option<Self> {
                match code { $( $code => Some(Self::$variant), )+ _ => None }
            }

            /// The label used in metrics, logs and documents.
            pub const fn name(self) -> &'static str {
                match self { $( Self::$variant => $name, )+ }
            }

            /// The kind of message that the reason ends.
            pub const fn scope(self) -> DropScope {
                match self { $( Self::$variant => DropScope::$scope, )+ }
            }

            /// The error reply to the client of a lost request, if its protocol has error replies.
            pub const fn error_reply(self) -> ErrorReply {
                match self { $( Self::$variant => error_reply!($scope $($reply)?), )+ }
            }

            /// The event, in one sentence for the operator.
            pub const fn describe(self) -> &'static str {
                match self { $( Self::$variant => concat!($($doc),+).trim_ascii(), )+ }
            }

            /// What the operator should do about it, in Markdown; links are relative to `docs/`.
            pub const fn advice(self) -> &'static str {
                match self { $( Self::$variant => $advice, )+ }
            }
        }
    };
}

/// What is lost with a [`DropReason`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DropScope {
    /// Bytes lost before a request was recognized; not part of `received`.
    Intake,
    /// A received request ended without a reply; part of the accounting identity.
    Request,
    /// A message written by an accelerator that ends no request.
    Reply,
    /// A message in flight to or from a backend.
    Backend,
}

impl DropScope {
    /// The label used in metrics and documents.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Intake => "intake",
            Self::Request => "request",
            Self::Reply => "reply",
            Self::Backend => "backend",
        }
    }
}

drop_reasons! {
    /// The host kernel discarded datagrams because the socket buffer was full (SO_RXQ_OVFL).
    SocketOverflow = 0, "socket_overflow", Intake,
        "The engine does not read fast enough, or a burst is larger than the socket's buffer. \
         Look at `serval_worker_time_seconds_total`: busy workers need a higher `engine.workers` or \
         more efficient clients (UDP segmentation offload, `shm://`). Otherwise raise \
         `net.core.rmem_max` (`serval doctor`, `socket-buffers`).";
    /// The host kernel truncated the datagram: it was larger than any message may be.
    Truncated = 1, "truncated", Intake,
        "A client sends datagrams longer than any message. There is nothing to do on the server.";
    /// Bytes of a TCP stream that break the port's framing; the connection is closed, unless the
    /// framing can tell where the next message begins. Or a datagram to a proxy of memcached that is not exactly one command.
    BadFraming = 2, "bad_framing", Intake(BadCommand),
        "The client and `framing` do not agree, or a program that is not a client of this service \
         connects to the port. `--tap` records the traffic for Wireshark.";
    /// A connection was refused because `limits.connections` are open.
    ConnectionLimit = 3, "connection_limit", Intake,
        "Raise `limits.connections` (and the file descriptor limit), or look for clients that do \
         not close connections.";
    /// A connection was refused because its tenant has as many as its `connections` allows.
    TenantConnections = 45, "tenant_connections", Intake,
        "As for `connection_limit`; `serval tenant set` changes `connections`.";
    /// A connection was closed after `idle_s` without a complete message.
    IdleTimeout = 4, "idle_timeout", Intake,
        "Expected from clients that went away. Raise `idle_s`, of the service or of `[limits]`, for clients that are \
         silent for longer.";
    /// The source of the datagram is a UDP port of this server: an answer would be a request to itself.
    LoopedSource = 36, "looped_source", Intake,
        "Source addresses are forged. At the edge of the network, filter packets from outside \
         that carry your own addresses. Requests from one service to another go through \
         `[[service.backend]]`, which uses ports of its own.";
    /// The datagram's source port is below 1024, and `limits.udp_privileged_sources` does not allow
    /// that.
    PrivilegedSource = 37, "privileged_source", Intake,
        "Expected from forged sources. If clients use such ports (old DNS resolvers, NTP), set \
         `limits.udp_privileged_sources = true`.";

    /// The message is longer than the service's `max_message_bytes`.
    TooLong = 5, "too_long", Request(TooLong),
        "Raise `max_message_bytes`, or correct the client.";
    /// The message is shorter than the function or dispatch key needs.
    TooShort = 6, "too_short", Request(BadCommand),
        "The client sends less than the kernel or `key` needs: correct the client or `key`.";
    /// No mqueue of the service had credit: the accelerator is saturated.
    NoCredit = 7, "no_credit", Request(OutOfCapacity),
        "Requests arrive faster than the kernel answers them. Use more `mqueues` or `slots` for \
         bursts, another accelerator for a lasting load, and a larger `arena_bytes` if messages \
         are longer than 1.5 KiB (`serval check-config` warns).";
    /// No accelerator serves the mqueue (absent, detached or dead).
    NoAccelerator = 8, "no_accelerator", Request(OutOfCapacity),
        "No runtime is attached. `serval_accelerator_up` and `serval_accelerator_last_end` say \
         since when and why, the log says more. With `launch = \"external\"` start one: `serval \
         attach`.";
    /// The request waited in the queue longer than `queue_us_max`.
    QueueTime = 9, "queue_time", Request(OutOfCapacity),
        "As for `no_credit`: the accelerator cannot answer the load within `queue_us_max`.";
    /// The tenant has used up its `messages_per_s` or `bytes_per_s`.
    TenantRate = 43, "tenant_rate", Request(OutOfCapacity),
        "A tenant sends more than its share of the machine's owner allows: the limit works. Raise its rate or `burst_ms` \
         (`serval tenant set`) if it should send that much. Requests over TCP and `shm://` wait instead.";
    /// The tenant has as many messages in flight as its `outstanding` allows.
    TenantOutstanding = 44, "tenant_outstanding", Request(OutOfCapacity),
        "As for `tenant_rate`, or its kernels are slower than its clients. `serval tenant set` changes `outstanding`.";
    /// No reply within `request_timeout_ms`.
    RequestTimeout = 10, "request_timeout", Request(Timeout),
        "The kernel, or a backend that it asks, takes longer than `request_timeout_ms`. Look at \
         `serval_stage_duration_seconds` and `serval_backend_timeouts_total`.";
    /// The kernel dropped the message: its length is not one it accepts.
    BadLength = 11, "bad_length", Request(BadCommand),
        "The client sends a length that the kernel does not accept. Built-in kernels: \
         [configuration.md](configuration.md#built-in-kernels).";
    /// The kernel dropped the message for a reason of its own.
    KernelDrop = 12, "kernel_drop", Request(Failed),
        "The kernel's own decision; its documentation says when.";
    /// The kernel's reply is longer than `max_reply_bytes`, or than the transport can carry.
    ReplyTooLong = 13, "reply_too_long", Request(Failed),
        "Raise `max_reply_bytes` (by default `max_message_bytes`). Datagrams carry at most 65 507 \
         bytes: use TCP for longer replies.";
    /// The reply would exceed `udp_reply_ratio` times the request of an unverified UDP source.
    ReplyRatio = 14, "reply_ratio", Request(Failed),
        "Expected where a reply is much longer than its request. Use TCP, or raise \
         `limits.udp_reply_ratio` where the network is trusted.";
    /// The framing cannot carry the reply (a line ending inside a line, not a memcached response).
    ReplyUnframable = 15, "reply_unframable", Request(Failed),
        "The kernel's replies do not fit `framing`: correct one of them.";
    /// The client's connection was gone when its reply came or while the reply was being written.
    ClientGone = 16, "client_gone", Request(Failed),
        "Expected from clients that close before they have received their replies.";
    /// A client accepted no bytes for `limits.slow_client_ms`; its connection is closed.
    SlowClient = 17, "slow_client", Request(Failed),
        "A client does not read. Correct it, or raise `limits.slow_client_ms`.";
    /// The bounded memory for early replies of ordered connections is used up.
    ReplyMemory = 18, "reply_memory", Request(OutOfCapacity),
        "Many early replies wait for a slow one before them. Set `ordered = false` if clients can \
         tell replies apart, or lower `limits.pipelined`.";
    /// The host kernel refused to send the reply.
    SendFailed = 19, "send_failed", Request(Failed),
        "Often a missing route, a firewall, or a socket buffer that stays full. `--tap` shows \
         what was sent.";
    /// The mqueue was declared dead: its ring words are impossible, or its block ended early. Or a function steered the request to
    /// an mqueue that the service does not have; a proxy has none.
    MqueueDead = 20, "mqueue_dead", Request(Failed),
        "If `serval_function_steered_total` grows, correct the function. Otherwise the log names the service and the block. The mqueue stays dead until its runtime \
         restarts, or the engine if the kernel runs inside it (`cpu`). The cause is a bug of the kernel \
         (`contract`: see `kernel.h`) or of Serval: please report the latter.";
    /// The accelerator's runtime ended while the request was in flight on it.
    AcceleratorLost = 21, "accelerator_lost", Request(Failed),
        "The runtime's process ended. `serval_accelerator_last_end` and the log say why; the \
         engine starts the next one.";
    /// The accelerator's runtime sent no heartbeat for longer than `heartbeat_ms` while the request was in flight on
    /// it.
    AcceleratorStalled = 22, "accelerator_stalled", Request(Failed),
        "The process did not run: stopped, swapped out, or without a free core. Raise \
         `heartbeat_ms` where such pauses are normal.";
    /// The service has changed and its accelerator starts again.
    Reconfiguring = 23, "reconfiguring", Request(Failed),
        "Expected for a short time after a reload that changes the service. If it lasts, no new \
         runtime starts: the log says why.";
    /// The worker-to-worker ring was full.
    HandoverFull = 24, "handover_full", Request(OutOfCapacity),
        "A worker receives more requests for another worker's mqueues than that worker can \
         accept. Compare their `serval_worker_time_seconds_total`; spread clients over more \
         connections, or use fewer workers.";
    /// The service is draining: no new request is accepted.
    Draining = 25, "draining", Request(OutOfCapacity),
        "Expected while a server stops or a service is removed. Send clients elsewhere when \
         `/readyz` returns 503.";
    /// The drain period ended before the reply came.
    DrainTimeout = 26, "drain_timeout", Request(Failed),
        "Requests took longer than `engine.drain_ms`. Raise it, and the stop timeout of the \
         service manager.";
    /// A function on the path of the service's messages dropped it.
    FunctionDrop = 38, "function_drop", Request(Failed),
        "The function's own decision; its documentation says when.";
    /// A function on the path of the service's messages has failed, and its `on_failure` is `closed`.
    FunctionFailed = 39, "function_failed", Request(Failed),
        "The function returned an error, panicked or exceeded its deadline. It is restarted \
         automatically. With `on_failure = \"open\"` messages pass meanwhile.";
    /// A function delivered it to the ring of an application, which has no room, or the function has no ring.
    RingFull = 42, "ring_full", Request(OutOfCapacity),
        "The application reads its ring more slowly than messages arrive, or has ended: give the ring \
         more entries, or read it more often.";

    /// The upstream server of a proxy refused the connection or the datagram, or ended the connection before it had answered.
    UpstreamRefused = 40, "upstream_refused", Request(Failed),
        "No program listens at `upstream`, or it closes connections: start it, or correct the \
         address.";
    /// Every client flow of a proxy is in use, new clients come too fast, or no socket to the upstream server can be opened.
    UpstreamFlows = 41, "upstream_flows", Request(OutOfCapacity),
        "More clients ask at the same time than `upstream_flows` allows: raise it (and the file \
         descriptor limit). A flood of new sources, which may be forged, has the same effect, and the server that leaves most of \
         them unanswered.";

    /// The accelerator answered a token that is not, or no longer, outstanding on that mqueue.
    StaleToken = 27, "stale_token", Reply,
        "The accelerator answered twice, or too late (then `request_timeout` rises too: raise \
         `request_timeout_ms`). Otherwise a bug of the kernel.";
    /// A TX message has an impossible header (kind, length, arena offset).
    BadMessage = 28, "bad_message", Reply,
        "A bug of the kernel or its runtime; only its own mqueue is affected.";
    /// The kernel of a `replies = "none"` service sent a reply.
    UnwantedReply = 29, "unwanted_reply", Reply,
        "The kernel replies although the service says `replies = \"none\"`: change one of them.";
    /// The kernel of a `replies = "none"` service rejected a message that counts as consumed.
    ConsumedDrop = 30, "consumed_drop", Reply,
        "As for `kernel_drop`, in a service without replies.";

    /// A backend answered a request that had already timed out.
    BackendLate = 31, "backend_late", Backend,
        "The backend takes longer than `timeout_ms`: raise it, or reduce the load of the backend.";
    /// A backend sent bytes that its framing cannot parse; its connection is closed.
    BackendProtocol = 32, "backend_protocol", Backend,
        "The backend's `framing` is not the protocol that it speaks, or another program listens \
         there.";
    /// A backend sent a message that answers no request.
    BackendUnasked = 33, "backend_unasked", Backend,
        "The backend sends more messages than requests: a wrong `framing`, or a bug of the \
         backend.";
    /// A backend's answer is longer than the client mqueue can carry.
    BackendTooLong = 34, "backend_too_long", Backend,
        "Raise `max_message_bytes` of the backend.";
    /// A backend's answer does not fit the request that waits for it: another key, id or kind of
    /// answer.
    BackendMismatch = 35, "backend_mismatch", Backend,
        "TCP: the backend, or a proxy in front of it, answers twice, in another order or under \
         another key; the connection is closed and opened again. UDP: a duplicate or late answer, \
         which was dropped; raise `timeout_ms` if answers are late.";
    /// A function on the path to a backend dropped a request of a kernel, or the answer to one.
    BackendFunction = 46, "backend_function", Backend,
        "A function of `[[service.backend.function]]` refuses it, or failed: `serval fn counters` has the numbers.";
    // next: 47
}

impl DropReason {
    /// Number of reasons: the length of a table of counters.
    pub const COUNT: usize = Self::ALL.len();
}

/// A drop reason as reported by another program.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ReportedReason {
    /// A reason of this build.
    Known(DropReason),
    /// The code of a reason that this build does not know: the other program is newer.
    Other(u8),
}

impl ReportedReason {
    /// Decodes a code.
    pub const fn from_code(code: u8) -> Self {
        match DropReason::from_code(code) {
            Some(reason) => Self::Known(reason),
            None => Self::Other(code),
        }
    }

    /// The reason's name; `other` if it is unknown.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Known(reason) => reason.name(),
            Self::Other(_) => "other",
        }
    }
}

impl From<DropReason> for ReportedReason {
    fn from(reason: DropReason) -> Self {
        Self::Known(reason)
    }
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
            assert_ne!(a.name(), ReportedReason::Other(0).name());
        }
    }

    #[test]
    fn codes_are_stable_and_unique() {
        // Codes that clients in the field know.
        let fixed =
            [(0, "socket_overflow"), (7, "no_credit"), (25, "draining"), (37, "privileged_source")];
        for (code, name) in fixed {
            assert_eq!(DropReason::from_code(code).map(DropReason::name), Some(name));
        }
        let next = DropReason::ALL.iter().map(|reason| reason.code()).max().unwrap() + 1;
        let line = format!("\n    // next: {next}\n}}\n");
        assert!(
            include_str!("drop_reason.rs").contains(&line),
            "the table ends with `// next: {next}`"
        );
        for (i, reason) in DropReason::ALL.iter().enumerate() {
            // If two reasons have the same code, the second one is not returned.
            assert_eq!(DropReason::from_code(reason.code()), Some(*reason));
            assert_eq!(ReportedReason::from_code(reason.code()), ReportedReason::Known(*reason));
            let last = DropReason::ALL[..i].last();
            assert!(last.is_none_or(|last| last.scope() as u8 <= reason.scope() as u8), "by scope");
        }
    }

    #[test]
    fn an_unknown_code_is_another_reason() {
        assert_eq!(DropReason::from_code(u8::MAX), None);
        let other = ReportedReason::from_code(u8::MAX);
        assert_eq!((other, other.name()), (ReportedReason::Other(u8::MAX), "other"));
    }
}
