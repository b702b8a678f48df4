//! Placement `worker`: blocks run on the engine worker's own thread, inside `drive`.
//!
//! The hop costs two coroutine switches and no cache line ever moves between cores; but a kernel that computes
//! for long keeps its worker from the network.

use std::mem::ManuallyDrop;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use engine::accelerator::{Blocks, StartError};
use engine::topology::ParamValue;
use mqueue::MappedMemory;

use super::Options;
use super::scheduler::{Observer, Scheduler};
use crate::{AccelError, Kernel};

/// The value of [`Resuming`]'s word while no block is resumed.
pub const NOT_RESUMING: u64 = 0;

/// The word in which a worker shows which block it resumes. It has cache lines of its own: workers write theirs at
/// every resume, and must not slow down each other.
#[derive(Debug, Default)]
#[repr(align(128))]
pub struct ResumingWord(AtomicU64);

impl ResumingWord {
    /// Its value: see [`Resuming::parts`], or [`NOT_RESUMING`].
    pub fn load(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

const _: () = assert!(NOT_RESUMING == 0, "the default of a word");

/// Where a worker shows which block it resumes, for a thread that watches it: one word for all blocks of a worker.
#[derive(Clone)]
pub struct Resuming {
    word: Arc<ResumingWord>,
    tag: u32,
}

impl Resuming {
    /// Blocks show themselves in `word` with `tag`, which is not 0.
    pub fn new(word: Arc<ResumingWord>, tag: u32) -> Self {
        assert_ne!(tag, 0, "0 means that no block is resumed");
        Self { word, tag }
    }

    /// Tag and block of a word's value; tag 0 if no block is resumed.
    pub fn parts(shown: u64) -> (u32, u32) {
        ((shown >> 32) as u32, shown as u32)
    }

    #[inline]
    fn set(&self, block: u32) {
        self.word.0.store(u64::from(self.tag) << 32 | u64::from(block), Ordering::Relaxed);
    }

    #[inline]
    fn clear(&self) {
        self.word.0.store(NOT_RESUMING, Ordering::Relaxed);
    }
}

/// The thread of blocks that have not started.
const NO_THREAD: usize = 0;

/// Blocks of a `cpu` accelerator on a worker's thread: the one that started them.
pub struct WorkerBlocks {
    scheduler: ManuallyDrop<Scheduler>,
    thread: usize,
    resuming: Resuming,
}

/// An identifier of the calling thread, cheaper than its id.
#[inline]
fn this_thread() -> usize {
    thread_local!(static MARK: u8 = const { 0 });
    MARK.with(|mark| std::ptr::from_ref(mark).addr())
}

impl WorkerBlocks {
    /// Allocates everything for `blocks` of the region. They start with [`Blocks::start`], on the thread
    /// that drives them.
    ///
    /// Dropping it stops the blocks immediately: the region's stop word becomes
    /// [`NOW`](mqueue::abi::stop::NOW).
    pub fn prepare(
        region: MappedMemory,
        kernel: Arc<Kernel>,
        params: &[(String, ParamValue)],
        blocks: &[u32],
        options: &Options,
    ) -> Result<Self, AccelError> {
        let scheduler = Scheduler::prepare(region, kernel, params, blocks, options)?;
        // Without a watcher.
        let resuming = Resuming::new(Arc::default(), 1);
        Ok(Self { scheduler: ManuallyDrop::new(scheduler), thread: NO_THREAD, resuming })
    }

    /// Shows each block that is resumed from now on.
    pub fn show(&mut self, resuming: Resuming) {
        self.resuming = resuming;
    }

    /// Like [`Self::prepare`], and starts them: on return each has run up to its first wait.
    pub fn start(
        region: MappedMemory,
        kernel: Arc<Kernel>,
        params: &[(String, ParamValue)],
        blocks: &[u32],
        options: &Options,
    ) -> Result<Self, AccelError> {
        let mut prepared = Self::prepare(region, kernel, params, blocks, options)?;
        prepared.begin()?;
        Ok(prepared)
    }

    fn begin(&mut self) -> Result<(), AccelError> {
        self.thread = this_thread();
        let begun = self.scheduler.begin_observed(|block| self.resuming.set(block));
        self.resuming.clear();
        begun
    }

    /// Like [`Blocks::drive`], for an owner that polls the TX rings itself: counts every resume in `progress`, so
    /// that a watcher can tell a long turn from a block that hangs.
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

/// Shows each resume and collects the mqueues.
struct Shown<'a> {
    resuming: &'a Resuming,
    touched: &'a mut Vec<u32>,
    /// Whether a block was resumed.
    any: bool,
}

impl Observer for Shown<'_> {
    #[inline]
    fn resuming(&mut self, block: u32) {
        self.resuming.set(block);
        self.any = true;
    }

    #[inline]
    fn touched(&mut self, mqueue: u32) {
        self.touched.push(mqueue);
    }
}

// Called through a table: compiled here, where messages are optimised for, not in the crate that makes the table.
impl Blocks for WorkerBlocks {
    #[inline(never)]
    fn start(&mut self) -> Result<(), StartError> {
        Ok(self.begin()?)
    }

    #[inline(never)]
    fn drive(&mut self, now_ns: u64, rang: &[u32], touched: &mut Vec<u32>) {
        assert_eq!(self.thread, this_thread(), "blocks never change threads");
        let mut shown = Shown { resuming: &self.resuming, touched, any: false };
        self.scheduler.run(now_ns, rang, &mut shown);
        if shown.any {
            self.resuming.clear();
        }
    }

    #[inline(never)]
    fn wake_at(&self) -> u64 {
        self.scheduler.due_at()
    }

    #[inline(never)]
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
