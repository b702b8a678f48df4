//! Serval's message queues in shared memory.
//!
//! A *region* is one shared memory that holds formatted *rings*; an *mqueue* is an RX ring and a TX
//! ring that join the engine to one block of an accelerator. This crate knows no operating system
//! and no accelerator: memory enters through [`Mapping`].
//!
//! * [`abi`]: the layout, source of the generated C header.
//! * [`memory`]: shared memory as atomic words.
//! * [`ring`]: producer and consumer (`granule.rs` has the protocol of that name).
//! * [`region`]: format, join, take rings, status words.
//! * [`Doorbells`], [`ParkWord`]: which mqueues have news, and who sleeps.
//! * [`count`]: counters that other threads read.

pub mod abi;
mod bell;
pub mod count;
mod granule;
pub mod memory;
pub mod region;
pub mod ring;

pub use bell::{Doorbells, Listener, ParkWord};
pub use memory::{HeapMapping, MappedMemory, Mapping, Memory};
pub use region::{
    JoinError, MqueuePlan, PlanError, Region, RegionPlan, RingPlan, RingSpec, Role, Words,
};
pub use ring::{Consumer, Head, Loan, LoanError, Producer, RingError};
