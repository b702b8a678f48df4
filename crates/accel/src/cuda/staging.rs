//! An array in a GPU's memory, and pinned host memory through which its pieces pass: what a collective over a GPU's memory needs.
//!
//! Copies are the copy engines' work, on a stream for each slot: pieces go out and in at the same time, and no code runs on the GPU. So
//! they go on while blocks of a service, in another process, occupy it.

use std::alloc::{self, Layout};
use std::ops::Range;
use std::ptr::NonNull;
use std::time::{Duration, Instant};

use super::driver::{DeviceAddress, Driver, Stream};
use super::{CudaError, Gpu};

/// Alignment of pinned memory: a page.
const PAGE_BYTES: usize = 4096;
/// Copies that have not ended this long after the array was dropped keep its memory.
const DROP_TIMEOUT: Duration = Duration::from_secs(2);
/// Pause between two looks at a copy that is waited for.
const PAUSE: Duration = Duration::from_micros(20);

/// The direction of a copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Transfer {
    /// From the GPU's memory to the slot.
    Out,
    /// From the slot to the GPU's memory.
    In,
}

/// An array in a GPU's memory with slots of pinned host memory.
pub struct StagedArray {
    /// None after its release.
    gpu: Option<Gpu>,
    driver: &'static Driver,
    array: Option<DeviceAddress>,
    bytes: usize,
    pinned: Option<Pinned>,
    slot_bytes: usize,
    slots: Vec<Slot>,
}

struct Slot {
    stream: Stream,
    /// A copy was started, and not seen to have ended.
    is_busy: bool,
}

impl StagedArray {
    /// An array of `bytes` on the GPU, with undefined content, and `slots` slots of `slot_bytes` each.
    pub fn new(gpu: Gpu, bytes: usize, slots: usize, slot_bytes: usize) -> Result<Self, CudaError> {
        assert!(slots > 0 && slot_bytes > 0, "it needs slots");
        let driver = gpu.driver;
        let gpu = Some(gpu);
        let slots_of = Vec::with_capacity(slots);
        let mut staged =
            Self { gpu, driver, array: None, bytes, pinned: None, slot_bytes, slots: slots_of };
        staged.bind()?;
        staged.array = Some(driver.allocate(bytes.max(1))?);
        staged.pinned = Some(Pinned::new(driver, slots * slot_bytes)?);
        for _ in 0..slots {
            staged.slots.push(Slot { stream: driver.stream()?, is_busy: false });
        }
        Ok(staged)
    }

    /// Makes the GPU's context current. Callers may be on any thread.
    fn bind(&self) -> Result<(), CudaError> {
        let gpu = self.gpu.as_ref().expect("it is released by drop only");
        self.driver.bind(gpu.context)
    }

    /// Size of the array.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Size of a slot.
    pub fn slot_bytes(&self) -> usize {
        self.slot_bytes
    }

    /// Starts a copy between `range` of the array and the beginning of a slot. Does not wait. Panics if the range is outside of the array or
    /// longer than a slot, or a copy of the slot is in progress.
    pub fn begin(
        &mut self,
        transfer: Transfer,
        slot: usize,
        range: Range<usize>,
    ) -> Result<(), CudaError> {
        let bytes = range.len();
        assert!(range.end <= self.bytes && bytes <= self.slot_bytes, "the copy is out of range");
        self.bind()?;
        let near = self.slot_memory(slot);
        let far = self.array.expect("it was allocated") + range.start as u64;
        let Slot { stream, is_busy } = &mut self.slots[slot];
        assert!(!*is_busy, "a copy of the slot is in progress");
        *is_busy = true;
        // SAFETY: both ranges have `bytes`, as was checked, and stay allocated and registered until the stream has been seen to be
        // done. Until then `slot` does not return the slot's memory.
        unsafe {
            match transfer {
                Transfer::Out => self.driver.begin_copy_out(*stream, near, far, bytes),
                Transfer::In => self.driver.begin_copy_in(*stream, far, near, bytes),
            }
        }
    }

    /// Whether no copy of the slot is in progress. Does not wait.
    pub fn is_done(&mut self, slot: usize) -> Result<bool, CudaError> {
        if self.slots[slot].is_busy {
            self.bind()?;
            self.slots[slot].is_busy = !self.driver.is_copied(self.slots[slot].stream)?;
        }
        Ok(!self.slots[slot].is_busy)
    }

    /// The bytes of a slot. Panics if a copy of it is in progress.
    pub fn slot(&mut self, slot: usize) -> &mut [u8] {
        assert!(!self.slots[slot].is_busy, "a copy of the slot is in progress");
        let memory = self.slot_memory(slot);
        // SAFETY: the slot's part of initialised memory, which nothing else accesses: no copy is in progress, and none can be started
        // while `self` is borrowed.
        unsafe { std::slice::from_raw_parts_mut(memory, self.slot_bytes) }
    }

    fn slot_memory(&self, slot: usize) -> *mut u8 {
        assert!(slot < self.slots.len());
        let pinned = self.pinned.as_ref().expect("it was allocated");
        pinned.base.as_ptr().wrapping_add(slot * self.slot_bytes)
    }

    /// Fills the array with `data`, which has its size. Waits for the copies.
    pub fn write(&mut self, data: &[u8]) -> Result<(), CudaError> {
        assert_eq!(data.len(), self.bytes);
        for (range, piece) in self.pieces().zip(data.chunks(self.slot_bytes)) {
            self.wait()?;
            self.slot(0)[..piece.len()].copy_from_slice(piece);
            self.begin(Transfer::In, 0, range)?;
        }
        self.wait()
    }

    /// Copies the array to `data`, which has its size. Waits for the copies.
    pub fn read(&mut self, data: &mut [u8]) -> Result<(), CudaError> {
        assert_eq!(data.len(), self.bytes);
        for (range, piece) in self.pieces().zip(data.chunks_mut(self.slot_bytes)) {
            self.wait()?;
            self.begin(Transfer::Out, 0, range)?;
            self.wait()?;
            piece.copy_from_slice(&self.slot(0)[..piece.len()]);
        }
        Ok(())
    }

    fn pieces(&self) -> impl Iterator<Item = Range<usize>> + use<> {
        let (bytes, step) = (self.bytes, self.slot_bytes);
        (0..bytes).step_by(step).map(move |at| at..bytes.min(at + step))
    }

    /// Waits for the first slot.
    fn wait(&mut self) -> Result<(), CudaError> {
        while !self.is_done(0)? {
            std::thread::sleep(PAUSE);
        }
        Ok(())
    }
}

impl Drop for StagedArray {
    fn drop(&mut self) {
        let deadline = Instant::now() + DROP_TIMEOUT;
        let are_done = (0..self.slots.len()).all(|slot| {
            loop {
                match self.is_done(slot) {
                    Ok(true) => return true,
                    Ok(false) if Instant::now() < deadline => std::thread::sleep(PAUSE),
                    _ => return false,
                }
            }
        });
        if !are_done || self.bind().is_err() {
            // A copy may still use all of it.
            std::mem::forget(self.pinned.take());
            std::mem::forget(self.gpu.take());
            return;
        }
        for slot in &self.slots {
            self.driver.destroy_stream(slot.stream);
        }
        drop(self.pinned.take());
        if let Some(array) = self.array {
            self.driver.free(array);
        }
        // The context goes last.
        drop(self.gpu.take());
    }
}

/// Host memory that the copy engines can access.
struct Pinned {
    driver: &'static Driver,
    base: NonNull<u8>,
    layout: Layout,
}

impl Pinned {
    fn new(driver: &'static Driver, bytes: usize) -> Result<Self, CudaError> {
        let layout = Layout::from_size_align(bytes.next_multiple_of(PAGE_BYTES), PAGE_BYTES);
        let layout = layout.expect("slots are far smaller than the address space");
        // SAFETY: its size is at least a page.
        let base = unsafe { alloc::alloc_zeroed(layout) };
        let Some(base) = NonNull::new(base) else { alloc::handle_alloc_error(layout) };
        // SAFETY: the memory is freed after it was unregistered.
        match unsafe { driver.register(base.as_ptr(), layout.size()) } {
            Ok(_) => Ok(Self { driver, base, layout }),
            Err(error) => {
                // SAFETY: allocated with this layout; it was not registered.
                unsafe { alloc::dealloc(base.as_ptr(), layout) };
                Err(error)
            }
        }
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        self.driver.unregister(self.base.as_ptr());
        // SAFETY: allocated with this layout; nothing uses it any more.
        unsafe { alloc::dealloc(self.base.as_ptr(), self.layout) };
    }
}
