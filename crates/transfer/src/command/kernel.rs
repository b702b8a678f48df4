//! A kernel of an accelerator as its caller names it; [`crate::stages::kernel`] has the messages.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

/// A connection to a kernel. Numbers of messages come back with their replies.
pub trait Kernel: Send {
    /// Longest message, and longest reply.
    fn bytes_max(&self) -> (usize, usize);

    /// Messages that may be in flight.
    fn depth(&self) -> usize;

    /// Sends a message. False if there is no room at the moment. Must not wait.
    fn send(&mut self, number: u64, message: &[u8]) -> Result<bool, String>;

    /// Copies the next reply to the front of `into`, which has room for the longest one, and returns its number and length. Waits for
    /// it up to `wait`.
    fn receive(&mut self, into: &mut [u8], wait: Duration) -> Result<Option<(u64, usize)>, String>;
}

/// Opens a connection for one transfer; the error is one sentence.
type Open = dyn Fn() -> Result<Box<dyn Kernel>, String> + Send + Sync;

/// A kernel that transfers can use: each opens a connection of its own when it starts.
#[derive(Clone)]
pub struct KernelSource(Arc<Open>);

impl KernelSource {
    /// `open` may wait: it is called by the thread that submits a transfer.
    pub fn new(open: impl Fn() -> Result<Box<dyn Kernel>, String> + Send + Sync + 'static) -> Self {
        Self(Arc::new(open))
    }

    /// Opens a connection.
    pub(crate) fn open(&self) -> Result<Box<dyn Kernel>, String> {
        (self.0)()
    }
}

impl fmt::Debug for KernelSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("KernelSource")
    }
}

/// The same source, not one like it.
impl PartialEq for KernelSource {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl Eq for KernelSource {}
