//! Serval's engine: the worker's turn and all steps of a message on it.
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
mod peer_addresses;
mod schedule;
mod service;
mod shared;
pub mod stages;
pub mod tenants;
pub mod topology;
pub mod transfers;
mod turn;
mod worker;

pub use control::message::{ControlMessage, Detached, Leave, MessageOf, RuntimeEvent, Switch};
pub use control::pause::PAUSE_NS;
pub use control::service_install::ServiceInstall;
pub use control::vote::DrainBarrier;
pub use endpoint::shm::{ShmClient, ShmPeer};
pub use fabric::{Accepted, Fabric};
pub use service::chain::{ChainPlace, ChainReply, ChainRequest};
pub use service::ends::{Attachment, BlockEnds, MqueueEnds, SocketEnds, take_pools};
pub use worker::Worker;
