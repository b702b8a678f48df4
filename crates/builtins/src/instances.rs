//! What every built-in function says about itself besides what it does: how instances are made, and their memory.

use std::sync::Arc;

use onpath::{Function, Spec};

/// Makes the instances of one attached function, which may share something.
pub type Instances = Arc<dyn Fn() -> Box<dyn Function> + Send + Sync>;

/// Instances that share nothing.
pub(crate) fn alone<F: Function + Default + 'static>() -> Instances {
    Arc::new(|| Box::new(F::default()))
}

/// Memory of a function that counts against its tenant's, in bytes. What is the same for every function, some kilobytes, does not.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Memory {
    /// That of each worker.
    pub(crate) of_worker: u64,
    /// What all workers share.
    pub(crate) of_all: u64,
}

impl Memory {
    pub(crate) const NONE: Self = Self { of_worker: 0, of_all: 0 };

    pub(crate) fn of_worker(bytes: u64) -> Self {
        Self { of_worker: bytes, of_all: 0 }
    }

    pub(crate) fn of_all(bytes: u64) -> Self {
        Self { of_worker: 0, of_all: bytes }
    }
}

/// Of functions that keep some counters and nothing else.
pub(crate) fn no_memory(_: &Spec) -> Memory {
    Memory::NONE
}

/// The bytes of a message that a function looks at: `length` bytes from `offset` on, or all from there on if `length` is 0. `None`: the message
/// is too short to have them.
pub(crate) fn range(message: &[u8], offset: usize, length: usize) -> Option<&[u8]> {
    let rest = message.get(offset..)?;
    if length == 0 { Some(rest) } else { rest.get(..length) }
}
