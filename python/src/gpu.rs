//! Arrays in the memory of a GPU, such as tensors of torch: slots of pinned memory for each GPU, and an array that is lent for a call.

use std::time::Duration;

use accel::cuda::{CudaError, Gpu, LentError, Ready, StagedArray, gpu_at};
use collective::staged::{CopyFailed, Direction, PIECE_BYTES, SLOTS};
use collective::{CollectiveError, Staging};
use pyo3::prelude::*;

/// Copies in progress when a call has failed are waited for this long. Those of a GPU that works take milliseconds.
const COPIES_END_WITHIN: Duration = Duration::from_secs(5);

/// An array as Python describes it. All numbers may be wrong.
#[derive(FromPyObject)]
pub(crate) struct GpuArray {
    /// Keeps the memory allocated.
    owner: Py<PyAny>,
    address: u64,
    bytes: usize,
    /// A stream of the program; 1 and 2 are the default streams.
    stream: Option<usize>,
    /// An event of the program.
    event: Option<usize>,
}

/// The slots of a group, by the number of the GPU. They are made when a call first needs them.
#[derive(Default)]
pub(crate) struct Stages(Vec<(u32, StagedArray)>);

impl Stages {
    /// Makes a call on an array. Returns when no copy uses its memory, or never gives the memory back.
    pub(crate) fn call<R>(
        &mut self,
        array: &GpuArray,
        call: impl FnOnce(&mut dyn Staging) -> Result<R, CollectiveError>,
    ) -> Result<R, CollectiveError> {
        if array.bytes == 0 {
            return call(&mut Empty);
        }
        let refused = |error: LentError| CollectiveError::Argument(error.to_string());
        let gpu = gpu_at(array.address, None).map_err(refused)?;
        let at = self.slots_of(gpu).map_err(|error| refused(error.into()))?;
        let (_, slots) = &mut self.0[at];
        let ready = match (array.event, array.stream) {
            (Some(event), _) => Ready::Event(event),
            (None, Some(stream)) => Ready::Stream(stream),
            (None, None) => Ready::Now,
        };
        // SAFETY: `owner` keeps the memory until this function has returned, and is leaked if copies may still use it then. The
        // documentation forbids any other use meanwhile, and asks for a stream and an event that exist.
        #[allow(unsafe_code)]
        unsafe { slots.lend(array.address, array.bytes, ready) }.map_err(refused)?;
        let result = call(slots);
        if !slots.take_back(COPIES_END_WITHIN) {
            std::mem::forget(self.0.swap_remove(at));
            Python::attach(|py| std::mem::forget(array.owner.clone_ref(py)));
        }
        result
    }

    fn slots_of(&mut self, gpu: u32) -> Result<usize, CudaError> {
        if let Some(at) = self.0.iter().position(|(number, _)| *number == gpu) {
            return Ok(at);
        }
        let slots = StagedArray::slots(Gpu::open_for_copies(gpu, None)?, SLOTS, PIECE_BYTES)?;
        self.0.push((gpu, slots));
        Ok(self.0.len() - 1)
    }

    /// In a fork, where the driver does not work.
    pub(crate) fn forget(&mut self) {
        std::mem::forget(std::mem::take(&mut self.0));
    }
}

/// An array without elements, which may be anywhere.
struct Empty;

impl Staging for Empty {
    fn bytes(&self) -> usize {
        0
    }

    fn slot_bytes(&self) -> usize {
        PIECE_BYTES
    }

    fn begin(
        &mut self,
        _: Direction,
        _: usize,
        _: std::ops::Range<usize>,
    ) -> Result<(), CopyFailed> {
        Ok(())
    }

    fn is_done(&mut self, _: usize) -> Result<bool, CopyFailed> {
        Ok(true)
    }

    fn slot(&mut self, _: usize) -> &mut [u8] {
        &mut []
    }
}
