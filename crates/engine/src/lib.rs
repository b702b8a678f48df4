//! Serval's engine: the worker's turn and everything a message meets on it.
#![forbid(unsafe_code)]

pub mod accelerator;
mod admit;
mod control;
mod depart;
mod endpoint;
pub mod metrics;
mod service;
pub mod stages;
pub mod topology;
mod worker;

pub use control::generation::LifeNews;
pub use control::install::{
    Farewell, Leave, Remains, Seat, Switch, WorkerLinks, WorkerParts, worker_links,
};
pub use control::pause::HOLD_NS;
pub use endpoint::peer::Fabric;
pub use endpoint::shm::{MemoryClient, MemoryPeer};
pub use service::share::{Attachment, BlockEnds};
pub use worker::Worker;
