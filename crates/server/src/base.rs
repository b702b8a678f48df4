//! What every part of a running server stands on: the engine with the slots of its services, the threads of its workers and what
//! watches them, callers, errors, and the queue of connections that have not identified themselves.

pub(crate) mod caller;
pub(crate) mod engine;
pub(crate) mod error;
mod first_drops;
pub(crate) mod handshake_queue;
mod local_addresses;
pub(crate) mod slots;
pub(crate) mod watchdog;
pub(crate) mod workers;
