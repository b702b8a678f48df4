//! Serval's sans-IO wire layer: what messages look like on the network, without any network.
//!
//! * [`nic`]: the network as a trait, with batches.
//! * [`drop_reason`]: every way in which a message can be lost.
//! * [`framing`]: where one message ends and the next begins on a byte stream.
//! * [`attach`]: how an accelerator runtime and an engine meet.
//! * [`handshake`]: how a shared-memory client and an engine meet.
//! * [`matching`]: the id by which an answer of a backend is recognised.
//! * [`session`]: tokens, the engine's names for requests under way.
//! * [`admission`]: reply size guard, flow and key hashes.
#![forbid(unsafe_code)]

pub mod admission;
pub mod attach;
pub mod drop_reason;
pub mod framing;
pub mod handshake;
pub mod matching;
pub mod nic;
pub mod session;

pub use drop_reason::{DropReason, DropScope, ReportedReason};
