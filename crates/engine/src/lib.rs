//! Serval's engine: the worker's turn and all steps of a message on it.
#![forbid(unsafe_code)]

mod admit;
mod base;
mod control;
mod depart;
mod endpoint;
mod housekeeping;
mod schedule;
mod service;
mod state;
mod worker;

pub use base::fabric::{Accepted, Fabric};
pub use base::process::{ShmClient, ShmPeer};
pub use base::{accelerator, commands, metrics, stages, tenants, topology, transfers};
pub use control::message::{ControlMessage, Detached, Leave, MessageOf, RuntimeEvent, Switch};
pub use control::service_install::ServiceInstall;
pub use service::chain::{ChainPlace, ChainReply, ChainRequest};
pub use service::ends::{Attachment, BlockEnds, MqueueEnds, SocketEnds, take_pools};
pub use service::vote::{DrainBarrier, PAUSE_NS};
pub use worker::Worker;
