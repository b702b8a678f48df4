//! State that knows no endpoint, no share of a service and no step of a turn: everything else is
//! built on it.
//!
//! | file | content |
//! |---|---|
//! | `topology` | the checked configuration |
//! | `metrics`, `stages` | counters; latency samples |
//! | `tenants` | limits and use of tenants |
//! | `fabric`, `shared`, `mailbox` | what workers share: mailboxes, wake-ups, credit |
//! | `links`, `peer_addresses` | hand-over rings; where connections come from |
//! | `arrival`, `keys` | an incoming message; who owns a stream of the network |
//! | `process` | a client that is a process of this machine |
//! | `accelerator` | the blocks of an accelerator, as a worker drives them |
//! | `commands`, `transfers` | what accelerators may ask for |
//! | `turn` | the context of a turn: the network, the clock, scratch space, counters |
//! | `idle` | when a worker sleeps |

pub mod accelerator;
pub(crate) mod arrival;
pub mod commands;
pub(crate) mod fabric;
pub(crate) mod idle;
pub(crate) mod keys;
pub(crate) mod links;
pub(crate) mod mailbox;
pub mod metrics;
pub(crate) mod peer_addresses;
pub(crate) mod process;
pub(crate) mod shared;
pub mod stages;
pub mod tenants;
pub mod topology;
pub mod transfers;
pub(crate) mod turn;
