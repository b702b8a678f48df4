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
//! * [`command::pipeline`]: [`Source`], whose methods build a [`Command`]; wrong orders of stages do not compile.
//! * [`stages::seal`]: AES-256-GCM in records and AES-256-CTR, sealing and opening; the format and its nonces.
//! * [`stages::compress`]: gzip and Zstandard, with limits for what comes out.
//! * [`stages::search`]: a text, or lines that match an expression.
//! * [`command::accelerator`]: memory of an accelerator as a source or a sink.
//! * [`stages::kernel`]: a kernel of an accelerator as a stage.
//! * `chain`: the stages of a transfer at work, chunk by chunk.
//! * [`run::apart`]: what threads do of a transfer while others go on with it.
//! * [`run::flow`]: the steps of one transfer over [`Devices`], without threads or a clock.
//! * [`engine::scoreboard`]: the entries and the two queues; which step is next.
//! * [`engine`]: [`Engine`], the threads that execute steps; `held` has their descriptors,
//!   and `reaper` closes them, because `close` can block.
//! * `plan`: what a transfer does, and its parts; `parts`: a transfer whose parts are done at the same time.
//! * [`NewFile`]: a sink that is whole, or absent. [`Outcomes`]: ends that an eventfd counts.
//! * [`service`], [`service::client`], [`service::message`]: an engine for other processes, which pass descriptors to it.
//! * `users`: the processes in which the system calls of other users' transfers are made.
//! * `small`: short transfers that the calling thread does itself.
//!
//! A chunk (512 KiB, or 256 KiB from a file to a socket) stays in a core's cache while all stages of it run.

#![forbid(unsafe_code)]

pub mod command;
pub mod engine;
pub mod run;
pub mod service;
pub mod stages;

pub use command::accelerator::AcceleratorMemory;
pub use command::error::TransferError;
pub use command::pipeline::{Command, FileRange, HEAD_MAX, Place, Source};
pub use command::stage::{
    Cipher, DigestKind, DigestValue, Key, STAGES_MAX, StageKind, StageSpec, check_order,
};
pub use engine::counters::{Counters, DeviceLoad};
pub use engine::outcomes::Outcomes;
pub use engine::scoreboard::Activity;
pub use engine::tenants::{Account, TenantCounters, TenantShare};
pub use engine::{DeviceQueue, Engine, Limits, Outcome, Submitted, Transfer};
pub use run::flow::{Device, Devices, Report, StageReport};
pub use run::new_file::{Existing, Namer, NewFile};
pub use run::small::{SMALL_BYTES_MAX, Small};
pub use run::users::{UserProgram, serve_user};
pub use service::client::{Client, ClientError, Ended};
pub use service::message::RemoteError;
pub use service::{Service, ServiceLimits};
pub use stages::chain::Ran;
pub use stages::compress::{Compression, ExpandLimits, Format};
pub use stages::kernel::{Kernel, KernelSource};
pub use stages::search::{Found, SearchKind, SearchSpec};
