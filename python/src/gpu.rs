//! Arrays in the memory of a GPU, such as tensors of torch: slots of pinned memory for each GPU, and an array that is lent for a call.

use std::sync::Mutex;
use std::time::Duration;

use accel::cuda::{CudaError, Gpu, LentError, Ready, StagedArray, gpu_at};
use collective::staged::{CopyFailed, Direction, PIECE_BYTES, SLOTS};
use collective::{CollectiveError, Staging};
use pyo3::prelude::*;
use transfer::command::accelerator;

use crate::lock;

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

impl GpuArray {
    fn ready(&self) -> Ready {
        match (self.event, self.stream) {
            (Some(event), _) => Ready::Event(event),
            (None, Some(stream)) => Ready::Stream(stream),
            (None, None) => Ready::Now,
        }
    }
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
        // SAFETY: `owner` keeps the memory until this function has returned, and is leaked if copies may still use it then. The
        // documentation forbids any other use meanwhile, and asks for a stream and an event that exist.
        #[allow(unsafe_code)]
        unsafe { slots.lend(array.address, array.bytes, array.ready()) }.map_err(refused)?;
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

/// Slots of arrays that were lent to transfers, for the next ones.
static SPARE: Mutex<Vec<(Kind, StagedArray)>> = Mutex::new(Vec::new());
/// The number of a GPU, and the size of slots.
type Kind = (u32, usize);
/// As many are kept.
const SPARE_MAX: usize = 2 * LANES_MAX;
/// Lanes of a transfer at most, and the length of the shortest array that has several.
const LANES_MAX: usize = 8;
const LANES_FROM: usize = 8 << 20;

/// An array of the program that a transfer uses, until this is dropped: one lane of it.
pub(crate) struct Lent {
    /// None while it is dropped.
    slots: Option<StagedArray>,
    kind: Kind,
    /// Keeps the memory allocated.
    owner: Option<Py<PyAny>>,
}

/// Lends an array to a transfer, with up to `most` lanes and slots of this size; `None`: a good one. The error is one sentence.
pub(crate) fn lent(
    py: Python<'_>,
    array: &GpuArray,
    most: usize,
    slot_bytes: Option<usize>,
) -> Result<Vec<Lent>, String> {
    let gpu = gpu_at(array.address, None).map_err(|error| error.to_string())?;
    let lanes = if array.bytes < LANES_FROM { 1 } else { most.clamp(1, LANES_MAX) };
    let good = || accelerator::good_slot_bytes(array.bytes, lanes);
    let kind = (gpu, slot_bytes.unwrap_or_else(good));
    let lane = |_| {
        let mut spare = lock(&SPARE);
        let kept = spare.iter().position(|(of, _)| *of == kind).map(|at| spare.swap_remove(at).1);
        drop(spare);
        let slots = match kept {
            Some(slots) => slots,
            None => Gpu::open_for_copies(gpu, None)
                .and_then(|gpu| StagedArray::slots(gpu, accelerator::SLOTS, kind.1))?,
        };
        let mut lane = Lent { slots: Some(slots), kind, owner: Some(array.owner.clone_ref(py)) };
        // SAFETY: `owner` keeps the memory until the copies have ended, or is leaked. The documentation forbids any other use
        // meanwhile, and asks for a stream and an event that exist.
        #[allow(unsafe_code)]
        unsafe { lane.slots().lend(array.address, array.bytes, array.ready()) }?;
        Ok(lane)
    };
    let lanes: Result<_, LentError> = (0..lanes).map(lane).collect();
    lanes.map_err(|error| error.to_string())
}

impl Lent {
    fn slots(&mut self) -> &mut StagedArray {
        self.slots.as_mut().expect("only drop takes them")
    }
}

impl Drop for Lent {
    fn drop(&mut self) {
        let Some(mut slots) = self.slots.take() else { return };
        if !slots.take_back(COPIES_END_WITHIN) {
            std::mem::forget((slots, self.owner.take()));
            return;
        }
        let mut spare = lock(&SPARE);
        if spare.len() < SPARE_MAX {
            spare.push((self.kind, slots));
        }
    }
}

impl Staging for Lent {
    fn bytes(&self) -> usize {
        self.slots.as_ref().map_or(0, Staging::bytes)
    }

    fn slot_bytes(&self) -> usize {
        self.kind.1
    }

    fn begin(
        &mut self,
        direction: Direction,
        slot: usize,
        range: std::ops::Range<usize>,
    ) -> Result<(), CopyFailed> {
        self.slots().begin(direction, slot, range)
    }

    fn is_done(&mut self, slot: usize) -> Result<bool, CopyFailed> {
        self.slots().is_done(slot)
    }

    fn slot(&mut self, slot: usize) -> &mut [u8] {
        self.slots().slot(slot)
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
