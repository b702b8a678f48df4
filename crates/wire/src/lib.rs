//! Serval's sans-IO wire layer: formats and rules of messages on the network, without any network.
//!
//! * [`nic`]: the network as a trait, with batches.
//! * [`drop_reason`]: every way in which a message can be lost.
//! * [`framing`]: the boundaries of messages on a byte stream.
//! * [`attach`]: the protocol between an accelerator runtime and an engine.
//! * [`handshake`]: the protocol between a shared-memory client and an engine.
//! * [`link`]: the protocol between an engine and a runtime on another machine.
//! * [`matching`]: the id that matches an answer of a backend to its request.
//! * [`session`]: tokens, which identify requests in flight.
//! * [`admission`]: reply size guard, flow and key hashes.
#![forbid(unsafe_code)]

pub mod admission;
pub mod attach;
pub mod drop_reason;
pub mod error_reply;
mod find;
pub mod framing;
pub mod handshake;
pub mod link;
pub mod matching;
pub mod nic;
pub mod proxy_protocol;
pub mod session;

pub use drop_reason::{DropReason, DropScope, ReportedReason};
pub use find::find_byte;
