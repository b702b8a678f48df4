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

mod base;
mod change;
pub mod config;
pub mod control;
pub mod directory;
pub mod exporter;
mod functions;
pub mod log;
pub mod machine;
mod runtimes;
mod server;
mod shm_acceptor;
mod shutdown;
pub mod tenants;
#[cfg(test)]
mod tests;
mod transfers;

pub use base::caller::Caller;
pub use base::engine::Engine;
pub use base::error::ServerError;
pub use base::watchdog::{Stall, Stalls};
pub use change::plan::{EntryChange, Refusal, ServiceAction};
pub use change::{ChangeError, ChangeReport, ServiceChange};
pub use functions::{
    Attachment, FunctionCounters, FunctionError, FunctionView, Functions, Origin, Place, REFUSED,
    Refused, RegisterAction, Registers, Replacement, Target, TracedMessage,
};
pub(crate) use functions::{Beneficiary, CompiledModule, Uncompiled};
pub use server::Server;
pub use shutdown::ShutdownReport;
pub use tenants::{TenantError, TenantView};
