//! Stream sockets of accelerators: the engine's side of the sockets of one block.
//!
//! A kernel that is a network server in its own right uses sockets instead of requests (GPUnet, OSDI 2014): it accepts and opens
//! connections, and receives and sends bytes. The connections are ordinary ones of the host kernel, and the engine moves their bytes
//! between them and memory that the block polls. This crate has everything about that which is not a connection:
//!
//! - *Slots.* A block has a fixed number of sockets, each a *slot* with two stream rings (`mqueue::byte_ring`), so nothing is allocated while
//!   it serves. A slot is leased: [`BlockSockets::lease`] gives it a new generation and zeroes its rings, and it is free again when the
//!   block has closed it *and* the engine has sent what was left. A command with an old generation has no effect but a count.
//! - *Commands* of the block (accept, connect, close, notify), and the completions and events it gets: messages in the rings of the block's
//!   socket mqueue. Everything in them is checked here; what is wrong costs the block that wrote it a status, and has no other effect.
//! - *Notifications.* Bytes need no commands. The block notifies the engine after it has written bytes, or has read half a ring; the engine
//!   sends an event after it has written bytes, or has read half a ring. At most one event for each slot is unread; if another one is due
//!   then, the engine owes it.
//! - *Books.* In each direction, bytes taken = delivered + dropped + outstanding ([`Books`]).
//!
//! No I/O and no clock: `engine/src/endpoint/sockets.rs` has the connections.

#![forbid(unsafe_code)]

mod block;
mod command;
mod slot;

pub use block::BlockSockets;
pub use command::{Command, End};
pub use slot::{Books, Direction, Slot, State};
