//! The array of a rank: in host memory, or in the memory of a GPU.

use accel::cuda::{CudaError, Gpu, StagedArray, survey};
use collective::staged::{PIECE_BYTES, SLOTS};
use collective::{CollectiveError, Element, Group};

/// An array that is summed.
pub enum Array {
    /// In host memory.
    Host(Vec<u8>),
    /// In the memory of a GPU.
    Gpu(Box<StagedArray>),
}

impl Array {
    /// An array in host memory.
    pub fn on_host(bytes: usize) -> Self {
        Self::Host(vec![0; bytes])
    }

    /// An array in the memory of the GPU of this number, otherwise of the rank's: the GPUs are given out in turn.
    pub fn on_gpu(number: Option<u32>, rank: usize, bytes: usize) -> Result<Self, CudaError> {
        let number = match number {
            Some(number) => number,
            None => rank as u32 % (survey(None)?.len() as u32).max(1),
        };
        let array = StagedArray::new(Gpu::open(number, None)?, bytes, SLOTS, PIECE_BYTES)?;
        Ok(Self::Gpu(Box::new(array)))
    }

    /// Replaces the array.
    pub(super) fn write(&mut self, rank: usize, input: &[u8]) -> Result<(), CollectiveError> {
        match self {
            Self::Host(array) => array.copy_from_slice(input),
            Self::Gpu(array) => array.write(input).map_err(|error| failed(rank, &error))?,
        }
        Ok(())
    }

    /// Copies the array to `into`.
    pub(super) fn read(&mut self, rank: usize, into: &mut [u8]) -> Result<(), CollectiveError> {
        match self {
            Self::Host(array) => into.copy_from_slice(array),
            Self::Gpu(array) => array.read(into).map_err(|error| failed(rank, &error))?,
        }
        Ok(())
    }

    pub(super) fn all_reduce(
        &mut self,
        group: &mut Group,
        element: Element,
    ) -> Result<(), CollectiveError> {
        match self {
            Self::Host(array) => group.all_reduce(element, array),
            Self::Gpu(array) => group.all_reduce_staged(element, &mut **array),
        }
    }
}

fn failed(rank: usize, error: &CudaError) -> CollectiveError {
    CollectiveError::Copy { rank, why: error.to_string() }
}
