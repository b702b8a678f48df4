//! Serval: a software SmartNIC for accelerators.
//!
//! A *kernel*, a C++ function that answers messages, becomes a network server. Clients speak ordinary
//! UDP or TCP; the engine puts each request into a message queue in memory that the kernel polls, and
//! sends what the kernel puts into the other queue back to whoever asked. No host application code runs
//! for a request. Kernels run on host cores today (`cpu`); other accelerators attach to the same
//! queues.
//!
//! This crate is what programs depend on, and the `serval` command:
//!
//! * [`config`]: the TOML file, the environment and flags, with every mistake shown in its place;
//! * [`server`]: starts an engine from a topology, drains and stops it;
//! * [`runtime`]: being an accelerator in a process of one's own, which attaches to an engine;
//! * [`kernel_file`]: kernel files, copied and checked before they run;
//! * [`exporter`]: `/metrics`, `/healthz`, `/readyz`;
//! * [`top`]: what a running server does, from two looks at its metrics;
//! * [`client`]: a client that measures and checks; [`mod@bench`]: measurements with it, and whether to
//!   believe them; [`compare`]: two servers side by side, and the table of record;
//! * [`doctor`]: what the machine can do, and which way a service's messages go; [`litmus`]: whether
//!   its memory keeps the order that rings rely on;
//! * [`demo`]: what `serval demo` shows; [`command`], [`screen`] and [`plot`]: the command line itself.
//!
//! # Example
//!
//! A service from a configuration, asked by a client:
//!
//! ```
//! use serval::client::{self, Echo, Load};
//! use serval::config::{Config, Overrides};
//! use serval::server::Server;
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let text = r#"
//!     schema = 1
//!     [[service]]
//!     name = "echo"
//!     listen = "udp://127.0.0.1:0"      # the host kernel chooses a port
//!     accelerator = "acc0"
//!     kernel = "echo"
//! "#;
//! let config = Config::parse("example", text, "".as_ref(), &Overrides::default())?;
//! let server = Server::start(config.topology)?;
//! let (_, listen) = server.addresses()[0];
//!
//! let load = Load { window: 8, requests: 1000, ..Load::default() };
//! let outcome = client::udp(listen.address, &load, &mut Echo::new(64))?;
//! assert!(outcome.is_perfect());
//!
//! assert_eq!(server.metrics().service(0).replied, 1000);
//! assert!(server.shutdown().is_clean());
//! # Ok(())
//! # }
//! ```
//!
//! The same from a shell, with a kernel of one's own:
//!
//! ```text
//! serval kernel build mine.cpp
//! serval check-config service.toml
//! serval serve service.toml
//! ```
#![forbid(unsafe_code)]

pub mod bench;
pub mod client;
pub mod command;
pub mod compare;
pub mod config;
pub mod demo;
pub mod doctor;
pub mod exporter;
pub mod kernel_file;
pub mod litmus;
mod log;
pub mod plot;
pub mod runtime;
pub mod screen;
pub mod server;
pub mod top;
