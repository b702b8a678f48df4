//! Serval's message queues in shared memory.
//!
//! A *region* is shared memory with formatted *rings*; an *mqueue* is an RX ring and a TX
//! ring that connect the engine to one block of an accelerator. This crate is independent of operating systems
//! and accelerators: memory is provided through [`Mapping`].
//!
//! * [`abi`]: the layout, source of the generated C header.
//! * [`memory`]: shared memory as atomic words.
//! * [`ring`]: producer and consumer (`ring/granule.rs` has the protocol of that name).
//! * [`region`]: format, join, take rings, status words.
//! * [`bundle`], [`pool`]: runs of messages that travel as one slot, and their memory.
//! * [`command`]: commands of the engine to an accelerator runtime.
//! * [`staging`]: memory that the processor reaches only by copies.
//! * [`Doorbells`], [`ParkWord`]: which mqueues have new messages, and which threads sleep.
//! * [`ByteWriter`], [`ByteReader`]: a stream of bytes, in the region of a block with sockets, or between two processes without a region.
//! * [`count`]: counters that other threads read.

pub mod abi;
pub mod bundle;
mod byte_ring;
pub mod codes;
pub mod command;
pub mod count;
mod doorbell;
pub mod memory;
pub mod pool;
pub mod region;
pub mod ring;
pub mod staging;

pub use bundle::{BundleReplies, CheckedBundle, CheckedReplies, ReplyArea};
pub use byte_ring::{BrokenRing, ByteReader, ByteWriter, byte_ring_bytes};
pub use doorbell::{Doorbells, Listener, ParkWord};
pub use memory::{HeapMapping, MappedMemory, Mapping, Memory};
pub use pool::{Buffer, Pool};
pub use region::{
    JoinError, MqueuePlan, PlanError, PoolPlan, Region, RegionPlan, RingPlan, RingSpec, Role,
    StreamPlan, Words,
};
pub use ring::{Consumer, Head, Loan, LoanError, Producer, RingError};
