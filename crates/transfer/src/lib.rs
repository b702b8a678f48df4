//! Transfers: one command moves bytes from a source through stages to a sink, and the thread that asks
//! for it touches none of them.
//!
//! ```text
//! file, memory, socket -> [open] -> [expand] -> [compress] -> [seal] -> file, memory, socket
//! ```
//!
//! Digests are computed of plain bytes, at any place between an opening and a seal. The commands are
//! those of DCS (Ahn et al., MICRO 2015) and DCS-ctrl (Kwon et al., ISCA 2018): `sendfile`,
//! `encrypted_sendfile` and `recvfile`, on a scoreboard of entries over independent queues for files
//! and for sockets.
//!
//! One noun for each state of a transfer: a [`Command`] is what a caller asks for, a `Plan` what the
//! checks make of it, a `Flow` the plan at work, step by step, a `Job` a flow with its place in the
//! scoreboard and what its end needs. The caller has a [`TransferHandle`], or a [`Transfer`], which
//! can be waited for. A long transfer is cut into `Parts`, each of which is a job.
//!
//! Each room stands on those before it:
//!
//! * [`command`]: [`Source`], whose methods build a [`Command`], wrong orders of stages do not
//!   compile; stages, keys and accelerator memory as the caller names them; devices, limits, errors
//!   and reports.
//! * [`stages`]: digests, search, opening, expansion, compression, kernels and seals at work, and the
//!   chain of them that takes a transfer's chunks.
//! * [`run`]: one transfer at work over [`Devices`], without threads or a clock; its descriptors;
//!   where the system calls of other users' transfers are made; short transfers that the calling
//!   thread does itself; [`NewFile`], a sink that is whole or absent.
//! * [`engine`]: [`Engine`], the threads that execute steps; the scoreboard that says which step is
//!   next; what tenants share; [`Outcomes`], ends that an eventfd counts.
//! * [`service`]: an engine for other processes, which pass descriptors to it, and its client.
//!
//! A chunk (512 KiB, or 256 KiB from a file to a socket) stays in a core's cache while all stages of
//! it run.

#![forbid(unsafe_code)]

pub mod command;
pub mod engine;
pub mod run;
pub mod service;
pub mod stages;

pub use command::accelerator::AcceleratorMemory;
pub use command::compression::{Compression, ExpandLimits, Format};
pub use command::device::{Device, Devices};
pub use command::error::TransferError;
pub use command::kernel::{Kernel, KernelSource};
pub use command::key::Key;
pub use command::limits::{HEAD_MAX, STAGES_MAX};
pub use command::pipeline::{Command, FileRange, Place, Source};
pub use command::report::{Outcome, Report, StageReport};
pub use command::stage::{
    Cipher, DigestKind, DigestValue, Found, SearchKind, SearchSpec, StageKind, StageSpec,
    check_order,
};
pub use engine::counters::{Counters, DeviceLoad};
pub use engine::outcomes::Outcomes;
pub use engine::scoreboard::Activity;
pub use engine::tenants::{Account, TenantCounters, TenantShare};
pub use engine::{DeviceQueue, Engine, Limits, Transfer, TransferHandle};
pub use run::new_file::{Existing, Namer, NewFile};
pub use run::small::{SMALL_BYTES_MAX, Small};
pub use run::user_process::{UserProgram, serve_user};
pub use service::client::{Client, ClientError, Ended};
pub use service::message::RemoteError;
pub use service::{Service, ServiceLimits};
pub use stages::Ran;
