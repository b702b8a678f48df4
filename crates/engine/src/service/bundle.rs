//! Bundles: runs of messages of one client that travel as one.
//!
//! | file | content |
//! |---|---|
//! | `messages.rs` | messages that can go as one bundle |
//! | `run.rs` | the rule: whether a burst goes as bundles, and how many messages in one |
//! | `choice.rs` | the cost of one more message in a bundle, measured by rare trials |
//! | `table.rs` | the bundles in flight, with their buffers |
//! | `received.rs` | buffers that datagrams were received in |
//! | `pool_memory.rs` | the pool as the network uses it |
//!
//! `share/bundles.rs` and `share/in_place.rs` send bundles to mqueues and take their completions.

pub(crate) mod choice;
pub(crate) mod messages;
pub(crate) mod pool_memory;
pub(crate) mod received;
pub(crate) mod run;
pub(crate) mod table;
#[cfg(test)]
mod tests;
