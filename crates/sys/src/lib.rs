//! Operating system bindings of Serval: with `mqueue` and `accel` the only place with unsafe code.
//!
//! * [`memory`]: shared regions (sealed memfd) and private guarded memory.
//! * [`private_file`]: sealed copies of files that other processes may rewrite.
//! * [`socket_nic`]: one worker's network over kernel sockets, in batches.
//! * [`local`]: Unix sockets that pass descriptors, and wake-ups between processes.
//! * [`descriptors`]: files and stream sockets of other programs, for transfers.
//! * [`digests`]: MD5 and SHA-256 of several streams at a time.
//! * [`slot`]: memory through which another process makes system calls on files and sockets for this one.
//! * [`isolation`]: what a process that runs foreign kernels may ask the host kernel for.
//! * [`tap`]: records the traffic of that network as a pcap file.
//! * [`probe`]: what this host supports, for `serval doctor`.
//! * `allocation` (feature `allocation-trap`): for tests, detects allocations on the data path.
//! * [`addresses`]: the addresses of this machine.
//! * [`affinity`], [`time`], [`process`], [`signal`]: threads, clock, limits,
//!   signals.
//!
//! The bindings call `libc` directly. The usual safe wrappers stop short of what the data path
//! needs: quinn-udp sends one buffer per call (no `sendmmsg`) and does not surface `SO_RXQ_OVFL`,
//! rustix has no `recvmmsg`, and with those two hand-written the remaining calls (`epoll`,
//! `accept4`, `memfd_create`) are one line each. Linux only.

#[cfg(not(target_os = "linux"))]
compile_error!("serval-sys needs Linux: memfd seals, epoll and recvmmsg");

pub mod accept_queue;
pub mod addresses;
pub mod affinity;
#[cfg(feature = "allocation-trap")]
pub mod allocation;
pub mod descriptors;
pub mod digests;
pub mod isolation;
pub mod local;
pub mod memory;
pub mod netns;
pub mod private_file;
pub mod probe;
pub mod process;
pub mod readiness;
pub mod signal;
pub mod slot;
pub mod socket_nic;
pub mod tap;
pub mod time;

mod os;

pub use memory::{MemoryError, PrivateMemory, RegionOptions, SharedMemory, SharedView};
pub use private_file::{CopyError, PrivateFile};
pub use socket_nic::{OpenError, OpenPort, PortSpec, SocketNic, SocketOptions, Waker};
