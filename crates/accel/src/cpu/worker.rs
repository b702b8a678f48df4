//! Placement `worker`: blocks run on the engine worker's own thread, inside `drive`.
//!
//! The hop costs two coroutine switches and no cache line ever crosses a core; a kernel that computes
//! for long keeps its worker from the network meanwhile.

use std::mem::ManuallyDrop;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use engine::accelerator::{Blocks, StartError};
use mqueue::MappedMemory;

use super::Options;
use super::scheduler::{Observer, Scheduler};
use crate::{AccelError, Kernel};

/// The thread of blocks that have not started.
const NO_THREAD: usize = 0;

/// Blocks of a `cpu` accelerator on a worker's thread: the one that started them.
pub struct WorkerBlocks {
    scheduler: ManuallyDrop<Scheduler>,
    thread: usize,
}

/// A name for the calling thread, cheaper than its id.
#[inline]
fn this_thread() -> usize {
    thread_local!(static MARK: u8 = const { 0 });
    MARK.with(|mark| std::ptr::from_ref(mark).addr())
}

impl WorkerBlocks {
    /// Makes everything that `blocks` of the region need. They start with [`Blocks::start`], on the thread
    /// that drives them.
    ///
    /// Dropping it stops the blocks at once: the region's stop word becomes
    /// [`NOW`](mqueue::abi::stop::NOW).
    pub fn prepare(
        region: MappedMemory,
        kernel: Arc<Kernel>,
        params: &[(String, f64)],
        blocks: &[u32],
        options: &Options,
    ) -> Result<Self, AccelError> {
        let scheduler = Scheduler::prepare(region, kernel, params, blocks, options)?;
        Ok(Self { scheduler: ManuallyDrop::new(scheduler), thread: NO_THREAD })
    }

    /// As [`Self::prepare`], and starts them: each has run up to its first wait when this returns.
    pub fn start(
        region: MappedMemory,
        kernel: Arc<Kernel>,
        params: &[(String, f64)],
        blocks: &[u32],
        options: &Options,
    ) -> Result<Self, AccelError> {
        let mut prepared = Self::prepare(region, kernel, params, blocks, options)?;
        prepared.begin()?;
        Ok(prepared)
    }

    fn begin(&mut self) -> Result<(), AccelError> {
        self.thread = this_thread();
        self.scheduler.begin()
    }

    /// As [`Blocks::drive`] for an owner that looks at the TX rings otherwise: counts every resume in `progress`, so
    /// that whoever watches the thread can tell a long turn from a block that does not come back.
    #[inline]
    pub(crate) fn drive_counted(&mut self, now_ns: u64, rang: &[u32], progress: &AtomicU64) {
        assert_eq!(self.thread, this_thread(), "blocks never change threads");
        self.scheduler.run(now_ns, rang, &mut Counted(progress));
    }

    /// Whether there is a stop word that the blocks have not seen yet.
    #[inline]
    pub(crate) fn stop_changed(&self) -> bool {
        self.scheduler.stop_changed()
    }

    /// Blocks that have not ended.
    pub fn running(&self) -> usize {
        self.scheduler.running()
    }
}

/// Counts resumes; one thread adds to it.
struct Counted<'a>(&'a AtomicU64);

impl Observer for Counted<'_> {
    #[inline]
    fn resuming(&mut self, _block: u32) {
        self.0.store(self.0.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
    }

    #[inline]
    fn touched(&mut self, _mqueue: u32) {}
}

impl Blocks for WorkerBlocks {
    fn start(&mut self) -> Result<(), StartError> {
        Ok(self.begin()?)
    }

    #[inline]
    fn drive(&mut self, now_ns: u64, rang: &[u32], touched: &mut Vec<u32>) {
        assert_eq!(self.thread, this_thread(), "blocks never change threads");
        self.scheduler.run(now_ns, rang, touched);
    }

    #[inline]
    fn wake_at(&self) -> u64 {
        self.scheduler.due_at()
    }

    #[inline]
    fn ended(&mut self, into: &mut Vec<(u32, u64)>) {
        into.append(self.scheduler.ended());
    }
}

impl Drop for WorkerBlocks {
    fn drop(&mut self) {
        if self.thread == this_thread() || self.running() == 0 {
            // SAFETY: not used afterwards.
            unsafe { ManuallyDrop::drop(&mut self.scheduler) };
        } else {
            tracing::warn!(
                blocks = self.running(),
                "blocks were dropped on another thread: leaked"
            );
        }
    }
}
