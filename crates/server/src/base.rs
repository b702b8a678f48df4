//! What every part of a running server stands on: its errors, the threads of its workers and what watches them, and the queue of
//! connections that have not identified themselves.

pub(crate) mod error;
pub(crate) mod first_drops;
pub(crate) mod handshake_queue;
pub(crate) mod watchdog;
pub(crate) mod workers;
