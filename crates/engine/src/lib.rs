//! Serval's engine: the worker's turn and everything a message meets on it.
#![forbid(unsafe_code)]

pub mod accelerator;
mod admit;
pub mod commands;
mod control;
mod depart;
mod endpoint;
mod fabric;
mod housekeeping;
mod idle;
pub mod metrics;
mod schedule;
mod service;
pub mod stages;
pub mod topology;
mod turn;
mod worker;

pub use control::drain::{Detached, DrainBarrier};
pub use control::generation::RuntimeEvent;
pub use control::install::{Leave, ServiceInstall, Switch};
pub use control::message::{Accepted, ControlMessage, MessageOf};
pub use control::pause::PAUSE_NS;
pub use endpoint::shm::{ShmClient, ShmPeer};
pub use fabric::Fabric;
pub use service::chain::{Chain, Verdict};
pub use service::ends::{Attachment, BlockEnds, MqueueEnds};
pub use worker::Worker;
