//! The server: runs a Serval engine.
//!
//! * [`config`]: the TOML file, the environment and flags; every mistake is reported with its place;
//! * [`Server`]: starts an engine from a topology, changes, drains and stops it;
//! * [`control`]: the control socket, and reloads of the configuration;
//! * [`directory`]: signed modules that a configuration names by their digests;
//! * [`machine`]: checks that this machine has what a configuration needs;
//! * [`exporter`]: `/metrics`, `/healthz`, `/readyz`;
//! * [`log`]: log lines that never block the server, whatever happens to its outputs.
#![forbid(unsafe_code)]

pub mod config;
pub mod control;
pub mod directory;
pub mod exporter;
pub mod log;
pub mod machine;
mod server;

pub use server::{
    Attachment, Caller, ChangeError, ChangeReport, EntryChange, FunctionCounters, FunctionError,
    FunctionView, Origin, Place, REFUSED, Refusal, Refused, RegisterAction, Registers, Replacement,
    Server, ServerError, ServiceAction, ServiceChange, ShutdownReport, Stall, Stalls, Target,
    TenantError, TenantView, TracedMessage,
};
pub(crate) use server::{Beneficiary, CompiledModule, Uncompiled};
