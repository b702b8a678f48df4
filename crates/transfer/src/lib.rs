//! Transfers: one command moves bytes from a source through stages to a sink, and the thread that asks for it
//! touches none of them.
//!
//! ```text
//! file, memory, socket -> [open] -> [expand] -> [compress] -> [seal] -> file, memory, socket
//! ```
//!
//! Digests are computed of plain bytes, at any place between an opening and a seal. The commands are those of DCS (Ahn et al., MICRO 2015) and DCS-ctrl (Kwon et al., ISCA 2018): `sendfile`,
//! `encrypted_sendfile` and `recvfile`, on a scoreboard of entries over independent queues for files and for
//! sockets.
//!
//! * [`pipeline`]: [`Source`], whose methods build a [`Command`]; wrong orders of stages do not compile.
//! * [`seal`]: AES-256-GCM in records and AES-256-CTR, sealing and opening; the format and its nonces.
//! * [`compress`]: gzip and Zstandard, with limits for what comes out.
//! * [`search`]: a text, or lines that match an expression.
//! * [`accelerator`]: memory of an accelerator as a source or a sink.
//! * [`kernel`]: a kernel of an accelerator as a stage.
//! * `chain`: the stages of a transfer at work, chunk by chunk.
//! * [`apart`]: what threads do of a transfer while others go on with it.
//! * [`flow`]: the steps of one transfer over [`Devices`], without threads or a clock.
//! * [`scoreboard`]: the entries and the two queues; which step is next.
//! * [`engine`]: [`Engine`], the threads that execute steps; `held` has their descriptors,
//!   and `reaper` closes them, because `close` can block.
//! * `plan`: what a transfer does, and its parts; `parts`: a transfer whose parts are done at the same time.
//! * [`NewFile`]: a sink that is whole, or absent. [`Outcomes`]: ends that an eventfd counts.
//! * [`service`], [`client`], [`message`]: an engine for other processes, which pass descriptors to it.
//! * `users`: the processes in which the system calls of other users' transfers are made.
//! * `small`: short transfers that the calling thread does itself.
//!
//! A chunk (512 KiB, or 256 KiB from a file to a socket) stays in a core's cache while all stages of it run.

#![forbid(unsafe_code)]

pub mod accelerator;
pub mod apart;
mod buffer;
mod chain;
pub mod client;
pub mod compress;
mod counters;
pub mod engine;
mod error;
mod fair_share;
pub mod flow;
mod held;
pub mod kernel;
mod memory;
pub mod message;
mod new_file;
mod outcomes;
mod parts;
pub mod pipeline;
mod plan;
mod reaper;
mod report;
pub mod scoreboard;
pub mod seal;
pub mod search;
pub mod service;
mod small;
mod stage;
mod tenants;
mod users;

pub use accelerator::AcceleratorMemory;
pub use chain::Ran;
pub use client::{Client, ClientError, Ended};
pub use compress::{Compression, ExpandLimits, Format};
pub use counters::{Counters, DeviceLoad};
pub use engine::{DeviceQueue, Engine, Limits, Outcome, Submitted, Transfer};
pub use error::TransferError;
pub use flow::{Device, Devices, Report, StageReport};
pub use kernel::{Kernel, KernelSource};
pub use message::RemoteError;
pub use new_file::{Existing, Namer, NewFile};
pub use outcomes::Outcomes;
pub use pipeline::{Command, FileRange, HEAD_MAX, Place, Source};
pub use scoreboard::Activity;
pub use search::{Found, SearchKind, SearchSpec};
pub use service::{Service, ServiceLimits};
pub use small::{SMALL_BYTES_MAX, Small};
pub use stage::{
    Cipher, DigestKind, DigestValue, Key, STAGES_MAX, StageKind, StageSpec, check_order,
};
pub use tenants::{Account, TenantCounters, TenantShare};
pub use users::{UserProgram, serve_user};
