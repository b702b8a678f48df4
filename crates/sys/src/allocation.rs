//! For tests: a global allocator that reports allocations on threads that must not allocate.
//!
//! A test program installs [`Trap`] and [arms](set) it for some threads, identified by kernel thread
//! id, once they have warmed up. From then on every allocation and release on one of them is recorded as
//! an [`Offence`] with its stack. Nothing is aborted: [`lift`] disarms the trap and returns all of them.

use std::alloc::{GlobalAlloc, Layout, System};
use std::backtrace::Backtrace;
use std::cell::Cell;
use std::fs;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

/// Maximum number of watched threads.
const THREADS_MAX: usize = 16;
/// Offences recorded with their stacks; further ones are only counted. The limit is high because a test that
/// allows exceptions can only judge recorded stacks.
const STACKS_MAX: usize = 4096;

/// Kernel ids of the watched threads; 0 is an empty entry.
static WATCHED: [AtomicU32; THREADS_MAX] = [const { AtomicU32::new(0) }; THREADS_MAX];
static COUNT: AtomicU64 = AtomicU64::new(0);
static OFFENCES: Mutex<Vec<Offence>> = Mutex::new(Vec::new());

thread_local! {
    /// This thread's id, once looked up.
    static NUMBER: Cell<u32> = const { Cell::new(0) };
    /// Set while inside [`note`], which allocates itself.
    static NOTING: Cell<bool> = const { Cell::new(false) };
}

/// The allocator; `#[global_allocator] static TRAP: Trap = Trap;` installs it.
#[derive(Debug)]
pub struct Trap;

/// One allocation or release by a watched thread.
#[derive(Debug)]
pub struct Offence {
    /// `allocates`, `grows` or `frees`.
    pub what: &'static str,
    /// Size in bytes.
    pub bytes: usize,
    /// Call stack.
    pub stack: Backtrace,
}

// SAFETY: every call is forwarded to the system's allocator, unchanged.
unsafe impl GlobalAlloc for Trap {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        look("allocates", layout.size());
        // SAFETY: the caller's promises are the same.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        look("allocates", layout.size());
        // SAFETY: the caller's promises are the same.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, memory: *mut u8, layout: Layout, bytes: usize) -> *mut u8 {
        look("grows", bytes);
        // SAFETY: the caller's promises are the same.
        unsafe { System.realloc(memory, layout, bytes) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        look("frees", layout.size());
        // SAFETY: the caller's promises are the same.
        unsafe { System.dealloc(memory, layout) }
    }
}

#[inline]
fn look(what: &'static str, bytes: usize) {
    if WATCHED[0].load(Ordering::Relaxed) != 0 {
        note(what, bytes);
    }
}

#[cold]
fn note(what: &'static str, bytes: usize) {
    // Thread-local variables of an exiting thread are gone; it takes no turns any more.
    let Ok(false) = NOTING.try_with(|noting| noting.replace(true)) else { return };
    let number = NUMBER.get();
    let number = if number == 0 { thread_number() } else { number };
    NUMBER.set(number);
    if WATCHED.iter().any(|watched| watched.load(Ordering::Relaxed) == number) {
        COUNT.fetch_add(1, Ordering::Relaxed);
        let mut offences = OFFENCES.lock().unwrap_or_else(PoisonError::into_inner);
        if offences.len() < STACKS_MAX {
            offences.push(Offence { what, bytes, stack: Backtrace::force_capture() });
        }
    }
    NOTING.set(false);
}

fn thread_number() -> u32 {
    // SAFETY: no pointers; cannot fail.
    unsafe { libc::gettid() as u32 }
}

/// The threads of this process whose names begin with `prefix`.
pub fn threads_named(prefix: &str) -> Vec<u32> {
    let Ok(tasks) = fs::read_dir("/proc/self/task") else { return Vec::new() };
    let number = |task: fs::DirEntry| {
        let name = fs::read_to_string(task.path().join("comm")).ok()?;
        name.starts_with(prefix).then(|| task.file_name().to_str()?.parse().ok())?
    };
    tasks.flatten().filter_map(number).collect()
}

/// Starts watching these threads, and no others.
///
/// # Panics
/// For no thread, or more than 16.
pub fn set(threads: &[u32]) {
    assert!((1..=THREADS_MAX).contains(&threads.len()), "{} threads to watch", threads.len());
    // The first entry enables the check.
    for (watched, thread) in WATCHED.iter().zip(threads).rev() {
        watched.store(*thread, Ordering::Relaxed);
    }
}

/// Stops watching; returns the number of offences since [`set`], and the recorded ones.
pub fn lift() -> (u64, Vec<Offence>) {
    for watched in &WATCHED {
        watched.store(0, Ordering::Relaxed);
    }
    let offences = std::mem::take(&mut *OFFENCES.lock().unwrap_or_else(PoisonError::into_inner));
    (COUNT.swap(0, Ordering::Relaxed), offences)
}
