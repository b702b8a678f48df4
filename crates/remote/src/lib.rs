//! Links to accelerators on another machine: the rings of a region are mirrored over an authenticated, encrypted TCP
//! connection.
//!
//! [`connect`] and [`Greeter`] make a [`Channel`] on the two sides, if both know the same [`Secret`]. A [`Mirror`] copies
//! messages between the rings of a region on its side and the channel. `runtime` has the ends: the `remote` kind of
//! accelerator on the engine's machine, and what runs the blocks on the other one. The simulator runs mirrors over pipes of its own.
//!
//! ```text
//! worker -- region -- mirror ==== TCP ==== mirror -- region -- blocks
//! ```
//!
//! The engine keeps all decisions: tokens, credit, generations and heartbeats are those of every runtime. The protocol
//! is [`wire::link`].

#![forbid(unsafe_code)]

mod channel;
mod greet;
mod handshake;
mod mirror;
mod region;
mod secret;

pub use channel::Channel;
pub use greet::{Greeted, Greeter, LinkFailure, connect, is_address};
pub use handshake::HandshakeError;
pub use mirror::{Broken, Control, Ends, Mirror, Moved, Side};
pub use region::{NotMirrored, accelerator_side, engine_side, format_accelerator_side};
pub use secret::{Secret, SecretError, digest_of};
