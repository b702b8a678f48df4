//! Collectives: operations that all ranks of a group call together.
//!
//! All-reduce (sum of float32 or int32), broadcast and barrier for up to 8 ranks. A call blocks the calling thread, which also
//! does the work; there is no thread of its own. The results of an all-reduce have the same bits on every rank and in every
//! run: the order of additions depends only on the number of ranks and the length.
//!
//! * [`schedule`]: which rank sends which range to which other rank, step by step; no I/O.
//! * [`frame`]: the format of everything that ranks send to each other.
//! * [`call`]: one call as a state machine over a [`Transport`], without threads or a clock.
//! * [`group`]: [`Group`], a rank's view of its group: calls, deadlines, and how failures end a group.
//! * [`staged`]: all-reduce over memory of an accelerator, in pieces that pass through host memory.
//! * [`network`]: the members of a group; [`mesh`]: how they connect; [`admission`]: the side that
//!   listens.
//! * [`tcp`], [`shared`]: the transports over TCP, and over shared memory for ranks of one machine.
//!
//! The algorithms are those of Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication Operations in MPICH"
//! (2005); the division of work, an engine next to the accelerator instead of a kernel on it, is FpgaNIC's off-path model
//! (USENIX ATC 2022).

#![forbid(unsafe_code)]

pub mod admission;
pub mod call;
mod control;
mod error;
pub mod frame;
pub mod group;
pub mod mesh;
pub mod network;
pub mod schedule;
pub mod shared;
pub mod staged;
pub mod tcp;
pub mod transport;

pub use admission::ClosedConnections;
pub use error::{CollectiveError, Loss, Reason};
pub use group::Group;
pub use network::Member;
pub use schedule::{Element, Operation, RANKS_MAX};
pub use staged::Staging;
pub use transport::Transport;
