//! Functions on the path of messages.
//!
//! A [`Chain`] of [`Function`]s belongs to a service on one worker. The engine shows it the requests of a receive call before they are
//! dispatched, and replies before they are delivered, each as one batch ([`Messages`]). A function decides about each message: it
//! passes, is rewritten, dropped, answered, or steered to an mqueue. Requests meet the functions in the order of the chain, replies
//! in the opposite order.
//!
//! Nothing here does I/O, allocates or locks while messages pass; time is an argument.
#![deny(unsafe_code)]

mod chain;
pub mod dictionary;
mod function;
mod messages;
#[cfg(any(feature = "compile", feature = "wasm"))]
pub mod module_limits;
#[cfg(any(feature = "compile", feature = "wasm"))]
pub mod module_settings;
pub mod spec;
mod state;
mod trace;
#[cfg(feature = "wasm")]
pub mod wasm;

pub use chain::{Arranged, Chain, Counters, Link, Policy, SharedSink, Sink, Snapshot};
pub use function::{
    Command, CommandError, Direction, End, Failure, Function, Merge, Notice, Reading, Register,
};
pub use messages::{MESSAGES_MAX, Messages, Outcome, Peers, RequestId, SHOWN_BYTES_MIN, Tally};
pub use spec::{OnFailure, Param, Sizes, Spec};
pub use state::{Key, Owner, StateKind};
pub use trace::{Step, TRACED_MAX, Trace, Traced, Verdict};
