//! Serval's engine: the worker's turn and everything a message meets on it.
#![forbid(unsafe_code)]

pub mod accelerator;
mod backend;
mod connection;
mod datagrams;
mod dispatch;
mod egress;
mod handover;
mod hold;
mod ingress;
mod lane;
mod lives;
mod memory_port;
pub mod metrics;
mod seating;
mod sources;
pub mod stages;
pub mod topology;
mod worker;

pub use handover::Fabric;
pub use hold::HOLD_NS;
pub use lane::{Attachment, BlockEnds};
pub use lives::LifeNews;
pub use memory_port::{MemoryClient, MemoryPeer};
pub use seating::{Farewell, Leave, Remains, Seat, Switch, WorkerLinks, WorkerParts, worker_links};
pub use worker::Worker;
