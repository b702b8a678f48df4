//! Serval's deterministic simulator.
//!
//! The engine is written so that time, randomness, the network and the accelerators come in from
//! outside. Here they are models: a virtual clock, a network that loses, reorders and cuts
//! ([`net`], [`nic`]), accelerators that answer late, twice, wrongly or not at all
//! ([`accelerator`]), clients and backends ([`client`], [`backend`]). The engine itself is the real
//! one: [`engine::Worker::turn`] is called by [`world`] instead of by a thread.
//!
//! One number, the seed, decides everything: which services there are, who talks to whom, what goes
//! wrong and who runs when ([`plan`]). [`run::simulate`] runs a seed and holds the engine to its
//! promises after every step: the accounting identity, replies to those who asked and nobody else, once,
//! in order, unchanged; credits returned; nothing left when it ends ([`ledger`], [`world`]). A seed
//! that fails, fails again.
#![forbid(unsafe_code)]

pub mod accelerator;
pub mod backend;
mod causes;
pub mod client;
mod conn;
pub mod ledger;
pub mod message;
pub mod net;
pub mod nic;
pub mod plan;
pub mod rng;
pub mod run;
pub mod stream_client;
pub mod trace;
pub mod world;

pub use conn::ConnId;
