//! The `cpu` accelerator: blocks as stackful coroutines on host threads.
//!
//! A block is a C++ function that does not return while it serves. Each has a stack of its own
//! (`stack.rs`) and yields the thread by calling `wait`, with what it waits for:
//!
//! | waits for | is resumed |
//! |---|---|
//! | `RX`, `BACKEND` | when its server or client mqueue was signalled, or at the deadline |
//! | `TIME` | at the deadline |
//! | `TX` | in every run: released credit is not signalled |
//! | `BUDGET` | in the next run: it only yields to others |
//!
//! and all of them when the stop word changes. A *run* of the scheduler (`scheduler.rs`) resumes every
//! block that is due once, so the cost of a run depends on the work, not on the number of waiting blocks. A block
//! stays on the thread that first ran it.
//!
//! Two placements share the scheduler: [`WorkerBlocks`] run on the engine worker's own thread inside
//! `drive`; [`ThreadBlocks`] run on threads of the accelerator.
//!
//! Kernels are trusted code, but errors are detected: a write past the staging memory (a canary after
//! each block's), an early return, a thread that hangs. A block that does not end by itself
//! is never resumed again and its memory is leaked: C++ frames without exceptions cannot be
//! unwound from outside.

mod scheduler;
mod stack;
mod staging;
mod threads;
mod timers;
mod watch;
mod worker;

use std::sync::Arc;
use std::time::Duration;

pub use threads::{CpuAccelerator, ThreadBlocks};
pub(crate) use watch::Watch;
pub use worker::{NOT_RESUMING, Resuming, ResumingWord, WorkerBlocks};

use crate::AccelError;

/// The clock for kernels: monotonic nanoseconds. It must be the engine's clock.
#[derive(Clone, Default)]
pub enum Clock {
    /// The host kernel's `CLOCK_MONOTONIC`.
    #[default]
    Monotonic,
    /// Any other, such as a simulator's. A kernel that computes until a given time ends only if
    /// each call advances the clock.
    Custom(Arc<dyn Fn() -> u64 + Send + Sync>),
}

impl Clock {
    /// The time now.
    pub fn now(&self) -> u64 {
        match self {
            Self::Custom(now) => now(),
            Self::Monotonic => {
                let mut t = libc::timespec { tv_sec: 0, tv_nsec: 0 };
                // SAFETY: writes the time to `t`; this clock always exists.
                unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &mut t) };
                t.tv_sec as u64 * 1_000_000_000 + t.tv_nsec as u64
            }
        }
    }
}

/// How blocks are run.
#[derive(Clone)]
pub struct Options {
    /// The service's name in messages.
    pub service: String,
    /// Stack of each block in bytes, in [16 KiB, 64 MiB]; only used pages become resident.
    pub stack_bytes: usize,
    /// Messages a block may handle before it yields to the next block; 0 for no limit.
    pub budget: u64,
    /// The clock for kernels.
    pub clock: Clock,
    /// Threads only: a block that did not yield for this long is reported hung. Must be longer
    /// than any message takes.
    pub hung_after: Duration,
    /// Threads only: how long a thread polls before it sleeps. A thread without a core of its
    /// own should sleep immediately (zero).
    pub spin: Duration,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            service: String::new(),
            stack_bytes: 64 << 10,
            budget: 64,
            clock: Clock::default(),
            hung_after: Duration::from_secs(2),
            spin: Duration::from_micros(50),
        }
    }
}

impl Options {
    fn check(&self) -> Result<(), AccelError> {
        let range = |what, value: u64, min, max| {
            if (min..=max).contains(&value) {
                Ok(())
            } else {
                Err(AccelError::Range { what, value, min, max })
            }
        };
        range("stack_bytes", self.stack_bytes as u64, 16 << 10, 64 << 20)?;
        range("hung_after (ms)", self.hung_after.as_millis() as u64, 1, 3_600_000)
    }
}

/// A service whose number of threads is not configured gets at least this many, if it has as many blocks, also on a machine
/// with fewer cores: kernels that wait, for a disk or another server, use no core meanwhile.
const THREADS_MIN: usize = 4;

/// Number of threads for `blocks` blocks, at least 1: `asked`, if it is not 0. Otherwise each block has a thread, because nothing else runs on
/// a thread while a block works on a message; but there are no more threads than cores, and at least `THREADS_MIN`. Threads that are pinned have one of
/// `cores` each.
pub fn thread_count(asked: usize, blocks: usize, cores: &[usize]) -> usize {
    let usable = || std::thread::available_parallelism().map_or(1, usize::from);
    match (asked, cores) {
        (0, []) => blocks.min(usable().max(THREADS_MIN)),
        (0, cores) => blocks.min(cores.len()),
        (asked, _) => asked,
    }
    .max(1)
}

/// Binds the calling thread to a core.
pub(crate) fn pin(core: usize) -> Result<(), AccelError> {
    if core >= libc::CPU_SETSIZE as usize {
        let max = libc::CPU_SETSIZE as u64 - 1;
        return Err(AccelError::Range { what: "core", value: core as u64, min: 0, max });
    }
    // SAFETY: all zeros is the empty set, and `core` is inside it.
    let set = unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        libc::CPU_SET(core, &mut set);
        set
    };
    // SAFETY: the set is of the size given; 0 names the calling thread.
    match unsafe { libc::sched_setaffinity(0, size_of_val(&set), &set) } {
        0 => Ok(()),
        _ => Err(AccelError::Os {
            what: "bind an accelerator thread to its core",
            error: std::io::Error::last_os_error(),
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_get_a_thread_each_up_to_the_cores() {
        let usable = std::thread::available_parallelism().unwrap().get().max(THREADS_MIN);
        for (asked, blocks, cores, threads) in [
            (0, 1, &[][..], 1),
            (0, THREADS_MIN, &[], THREADS_MIN),
            (0, 4096, &[], usable),
            (0, 4, &[0, 1], 2),
            (0, 1, &[0, 1], 1),
            (0, 0, &[], 1),
            (1, 4, &[], 1),
            (1, 4, &[0, 1], 1),
            (8, 4, &[], 8),
        ] {
            let given = format!("{asked} threads, {blocks} blocks, cores {cores:?}");
            assert_eq!(thread_count(asked, blocks, cores), threads, "{given}");
        }
    }
}
