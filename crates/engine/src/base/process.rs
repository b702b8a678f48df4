//! A process of this machine that is a client, through rings in shared memory.

use mqueue::{Consumer, MappedMemory, Producer, Words};

/// A shared-memory client that is passed to its worker.
pub struct ShmClient {
    /// The control side's id for it, never used twice.
    pub id: u64,
    /// Index of its service.
    pub service: u16,
    /// Slots of each of its two rings.
    pub depth: u32,
    /// The engine's end of its RX ring.
    pub replies: Producer<MappedMemory>,
    /// The engine's end of its TX ring.
    pub requests: Consumer<MappedMemory>,
    /// The words of its region.
    pub words: Words<MappedMemory>,
    /// Access to its process.
    pub peer: Box<dyn ShmPeer>,
}

/// What a worker can do to a client besides writing into its ring. Dropping it closes the client's connection.
pub trait ShmPeer: Send {
    /// Wakes the client, which has announced that it sleeps.
    fn wake(&self);
}
