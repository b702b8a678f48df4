//! What runs a Serval engine.
//!
//! * [`config`]: the TOML file, the environment and flags, with every mistake shown in its place;
//! * [`Server`]: starts an engine from a topology, changes, drains and stops it;
//! * [`control`]: the control socket, and reloads of the configuration;
//! * [`machine`]: whether this machine has what a configuration asks for;
//! * [`exporter`]: `/metrics`, `/healthz`, `/readyz`;
//! * [`log`]: the lines of a server, which serves whatever becomes of its outputs.
#![forbid(unsafe_code)]

pub mod config;
pub mod control;
pub mod exporter;
pub mod log;
pub mod machine;
mod server;

pub use server::{
    ChangeError, ChangeReport, Refusal, Server, ServerError, ServiceAction, ServiceChange,
    ShutdownReport, Stall, Stalls,
};
