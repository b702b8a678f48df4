//! An array in a GPU's memory, and pinned host memory through which its pieces pass: what a collective or a transfer over a GPU's memory needs.
//!
//! Copies are the copy engines' work, on a stream for each slot: pieces go out and in at the same time, and no code runs on the GPU. So
//! they go on while blocks of a service, in another process, occupy it.
//!
//! The array is this module's own, or memory of the program that calls ([`StagedArray::lend`]), such as a tensor of torch. That program
//! has threads with contexts of their own, so every function leaves the current context as it was.

use std::alloc::{self, Layout};
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::Arc;
use std::time::{Duration, Instant};

use mqueue::staging::{CopyFailed, Direction, Staging};

use super::driver::{Bound, DeviceAddress, Driver, Stream};
use super::lent::{LentError, check_lent};
use super::{CudaError, Gpu};

/// Alignment of pinned memory: a page.
const PAGE_BYTES: usize = 4096;
/// Copies that have not ended this long after the array was dropped keep its memory.
const DROP_TIMEOUT: Duration = Duration::from_secs(2);
/// Pause between two looks at a copy that is waited for.
const PAUSE: Duration = Duration::from_micros(20);

/// An array in a GPU's memory with slots of pinned host memory.
pub struct StagedArray {
    /// None after its release.
    gpu: Option<Arc<Gpu>>,
    driver: &'static Driver,
    array: Array,
    pinned: Option<Pinned>,
    slot_bytes: usize,
    slots: Vec<Slot>,
}

/// The memory that is copied.
enum Array {
    None,
    Own(Arc<Allocation>),
    Lent(DeviceAddress, usize),
}

impl Array {
    /// Its address and its size.
    fn range(&self) -> (DeviceAddress, usize) {
        match self {
            Self::None => (0, 0),
            Self::Own(allocation) => (allocation.address, allocation.bytes),
            Self::Lent(address, bytes) => (*address, *bytes),
        }
    }
}

/// Memory of a GPU, freed with this.
struct Allocation {
    gpu: Arc<Gpu>,
    address: DeviceAddress,
    bytes: usize,
}

impl Allocation {
    fn new(gpu: Arc<Gpu>, bytes: usize) -> Result<Self, CudaError> {
        let _bound = gpu.driver.bind_for_now(gpu.context)?;
        let address = gpu.driver.allocate(bytes.max(1))?;
        Ok(Self { gpu, address, bytes })
    }
}

impl Drop for Allocation {
    fn drop(&mut self) {
        if let Ok(_bound) = self.gpu.driver.bind_for_now(self.gpu.context) {
            self.gpu.driver.free(self.address);
        }
    }
}

struct Slot {
    stream: Stream,
    /// A copy was started, and not seen to have ended.
    is_busy: bool,
}

/// When the content of memory that is lent is complete.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ready {
    /// It is.
    Now,
    /// After what this stream has been given so far; 1 and 2 are the default streams.
    Stream(usize),
    /// When this event has occurred.
    Event(usize),
}

impl StagedArray {
    /// An array of `bytes` on the GPU, with undefined content, and `slots` slots of `slot_bytes` each.
    pub fn new(gpu: Gpu, bytes: usize, slots: usize, slot_bytes: usize) -> Result<Self, CudaError> {
        let gpu = Arc::new(gpu);
        let array = Array::Own(Arc::new(Allocation::new(gpu.clone(), bytes)?));
        Self::over(gpu, array, slots, slot_bytes)
    }

    /// The same array several times, each with slots and streams of its own.
    pub fn lanes(
        gpu: Gpu,
        bytes: usize,
        lanes: usize,
        slots: usize,
        slot_bytes: usize,
    ) -> Result<Vec<Self>, CudaError> {
        let gpu = Arc::new(gpu);
        let array = Arc::new(Allocation::new(gpu.clone(), bytes)?);
        let lane = |_| Self::over(gpu.clone(), Array::Own(array.clone()), slots, slot_bytes);
        (0..lanes).map(lane).collect()
    }

    /// Slots for memory that [`Self::lend`] names.
    pub fn slots(gpu: Gpu, slots: usize, slot_bytes: usize) -> Result<Self, CudaError> {
        Self::over(Arc::new(gpu), Array::None, slots, slot_bytes)
    }

    fn over(
        gpu: Arc<Gpu>,
        array: Array,
        slots: usize,
        slot_bytes: usize,
    ) -> Result<Self, CudaError> {
        assert!(slots > 0 && slot_bytes > 0, "it needs slots");
        let driver = gpu.driver;
        let (gpu, slots_of) = (Some(gpu), Vec::with_capacity(slots));
        let mut staged = Self { gpu, driver, array, pinned: None, slot_bytes, slots: slots_of };
        let _bound = staged.bind()?;
        staged.pinned = Some(Pinned::new(driver, slots * slot_bytes)?);
        for _ in 0..slots {
            staged.slots.push(Slot { stream: driver.stream()?, is_busy: false });
        }
        Ok(staged)
    }

    /// Makes the GPU's context current for now. Callers may be on any thread.
    fn bind(&self) -> Result<Bound, CudaError> {
        self.driver.bind_for_now(self.gpu().context)
    }

    fn gpu(&self) -> &Gpu {
        self.gpu.as_ref().expect("it is released by drop only")
    }

    /// Makes `bytes` of memory at `address` the array, until [`Self::take_back`]: memory of this GPU that the calling program has allocated
    /// in the primary context, all of it in one allocation. Copies begin when it is `ready`.
    ///
    /// # Safety
    ///
    /// The memory stays allocated until [`Self::take_back`] has returned true, and nothing else uses it until then. The stream or
    /// event exists.
    pub unsafe fn lend(
        &mut self,
        address: u64,
        bytes: usize,
        ready: Ready,
    ) -> Result<(), LentError> {
        assert!(matches!(self.array, Array::None), "it has an array");
        let _bound = self.bind()?;
        check_lent(self.gpu(), address, bytes)?;
        let event = match ready {
            Ready::Now => None,
            // SAFETY: it exists by the caller's promise.
            Ready::Stream(stream) => Some(unsafe { self.driver.event_after(stream) }?),
            Ready::Event(event) => Some(event),
        };
        let mut awaited = Ok(());
        if let Some(event) = event {
            // SAFETY: as above.
            let wait = |slot: &Slot| unsafe { self.driver.await_event(slot.stream, event) };
            awaited = self.slots.iter().try_for_each(wait);
            if ready != Ready::Event(event) {
                self.driver.destroy_event(event);
            }
        }
        awaited?;
        self.array = Array::Lent(address, bytes);
        Ok(())
    }

    /// Ends what [`Self::lend`] began, and waits for copies in progress. False if they have failed, or have not ended in time: then they may
    /// go on to use the memory as long as the process runs, and this array has to be leaked with it.
    #[must_use]
    pub fn take_back(&mut self, within: Duration) -> bool {
        let is_done = self.are_done(within);
        if is_done {
            self.array = Array::None;
        }
        is_done
    }

    /// Starts a copy between `range` of the array and the beginning of a slot. Does not wait. Panics if the range is outside of the array or
    /// longer than a slot, or a copy of the slot is in progress.
    fn start(
        &mut self,
        direction: Direction,
        slot: usize,
        range: Range<usize>,
    ) -> Result<(), CudaError> {
        let bytes = range.len();
        let (base, size) = self.array.range();
        assert!(range.end <= size && bytes <= self.slot_bytes, "the copy is out of range");
        let _bound = self.bind()?;
        let near = self.slot_memory(slot);
        let far = base + range.start as u64;
        let Slot { stream, is_busy } = &mut self.slots[slot];
        assert!(!*is_busy, "a copy of the slot is in progress");
        *is_busy = true;
        // SAFETY: both ranges have `bytes`, as was checked, and stay allocated and registered until the stream has been seen to be
        // done. Until then `slot` does not return the slot's memory.
        unsafe {
            match direction {
                Direction::Out => self.driver.begin_copy_out(*stream, near, far, bytes),
                Direction::In => self.driver.begin_copy_in(*stream, far, near, bytes),
            }
        }
    }

    fn look(&mut self, slot: usize) -> Result<bool, CudaError> {
        if self.slots[slot].is_busy {
            let _bound = self.bind()?;
            self.slots[slot].is_busy = !self.driver.is_copied(self.slots[slot].stream)?;
        }
        Ok(!self.slots[slot].is_busy)
    }

    /// Waits until no copy is in progress. False if one has failed or does not end in time.
    fn are_done(&mut self, within: Duration) -> bool {
        let deadline = Instant::now() + within;
        (0..self.slots.len()).all(|slot| {
            loop {
                match self.look(slot) {
                    Ok(true) => return true,
                    Ok(false) if Instant::now() < deadline => std::thread::sleep(PAUSE),
                    _ => return false,
                }
            }
        })
    }

    fn slot_memory(&self, slot: usize) -> *mut u8 {
        assert!(slot < self.slots.len());
        let pinned = self.pinned.as_ref().expect("it was allocated");
        pinned.base.as_ptr().wrapping_add(slot * self.slot_bytes)
    }

    /// Fills the array with `data`, which has its size. Waits for the copies.
    pub fn write(&mut self, data: &[u8]) -> Result<(), CudaError> {
        assert_eq!(data.len(), self.bytes());
        for (range, piece) in self.pieces().zip(data.chunks(self.slot_bytes)) {
            self.wait()?;
            self.slot(0)[..piece.len()].copy_from_slice(piece);
            self.start(Direction::In, 0, range)?;
        }
        self.wait()
    }

    /// Copies the array to `data`, which has its size. Waits for the copies.
    pub fn read(&mut self, data: &mut [u8]) -> Result<(), CudaError> {
        assert_eq!(data.len(), self.bytes());
        for (range, piece) in self.pieces().zip(data.chunks_mut(self.slot_bytes)) {
            self.wait()?;
            self.start(Direction::Out, 0, range)?;
            self.wait()?;
            piece.copy_from_slice(&self.slot(0)[..piece.len()]);
        }
        Ok(())
    }

    fn pieces(&self) -> impl Iterator<Item = Range<usize>> + use<> {
        let (bytes, step) = (self.bytes(), self.slot_bytes);
        (0..bytes).step_by(step).map(move |at| at..bytes.min(at + step))
    }

    /// Waits for the first slot.
    fn wait(&mut self) -> Result<(), CudaError> {
        while !self.look(0)? {
            std::thread::sleep(PAUSE);
        }
        Ok(())
    }
}

impl Staging for StagedArray {
    fn bytes(&self) -> usize {
        self.array.range().1
    }

    fn slot_bytes(&self) -> usize {
        self.slot_bytes
    }

    /// Panics if the range is outside of the array or longer than a slot, or a copy of the slot is in progress.
    fn begin(
        &mut self,
        direction: Direction,
        slot: usize,
        range: Range<usize>,
    ) -> Result<(), CopyFailed> {
        self.start(direction, slot, range).map_err(|error| CopyFailed(error.to_string()))
    }

    fn is_done(&mut self, slot: usize) -> Result<bool, CopyFailed> {
        self.look(slot).map_err(|error| CopyFailed(error.to_string()))
    }

    /// Panics if a copy of it is in progress.
    fn slot(&mut self, slot: usize) -> &mut [u8] {
        assert!(!self.slots[slot].is_busy, "a copy of the slot is in progress");
        let memory = self.slot_memory(slot);
        // SAFETY: the slot's part of initialised memory, which nothing else accesses: no copy is in progress, and none can be started
        // while `self` is borrowed.
        unsafe { std::slice::from_raw_parts_mut(memory, self.slot_bytes) }
    }
}

impl Drop for StagedArray {
    fn drop(&mut self) {
        let bound = if self.are_done(DROP_TIMEOUT) { self.bind().ok() } else { None };
        let Some(bound) = bound else {
            // A copy may still use all of it.
            std::mem::forget(self.pinned.take());
            std::mem::forget(self.gpu.take());
            std::mem::forget(std::mem::replace(&mut self.array, Array::None));
            return;
        };
        for slot in &self.slots {
            self.driver.destroy_stream(slot.stream);
        }
        drop(self.pinned.take());
        drop(bound);
        self.array = Array::None;
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

// SAFETY: it owns the memory, and the driver's functions can be called on every thread.
unsafe impl Send for Pinned {}

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
