//! Copies by the copy engines of a GPU, on a stream of their own, while blocks run on others.
//!
//! The staging is part of the region, which is registered with the driver, so a copy is DMA: starting one enqueues it on the stream, and a
//! stream query shows whether it has ended. Neither waits for the blocks. Buffer and stream are created before the blocks start.

use mqueue::command::{BufferRange, Copy, Direction};
use mqueue::{MappedMemory, Memory};

use super::CudaError;
use super::driver::{Context, DeviceAddress, Driver, Stream};
use crate::copy::{BUFFER_BYTES, Copier, CopyFailed};

/// Stream and buffer of a copier. Their owner releases them when the blocks have ended.
#[derive(Clone, Copy)]
pub(super) struct CopyResources {
    pub(super) stream: Stream,
    pub(super) buffer: DeviceAddress,
}

pub(super) struct StreamCopier {
    driver: &'static Driver,
    context: Context,
    resources: CopyResources,
    region: MappedMemory,
    /// The copying thread has made the context current.
    bound: bool,
}

impl StreamCopier {
    /// `region` is registered for as long as this is used.
    pub(super) fn new(
        driver: &'static Driver,
        context: Context,
        resources: CopyResources,
        region: MappedMemory,
    ) -> Self {
        Self { driver, context, resources, region, bound: false }
    }

    fn bind(&mut self) -> Result<(), CudaError> {
        if !self.bound {
            self.driver.bind(self.context)?;
            self.bound = true;
        }
        Ok(())
    }

    fn put(&mut self, copy: &Copy, staging_offset: u64) -> Result<(), CudaError> {
        self.bind()?;
        let CopyResources { stream, buffer } = self.resources;
        let near = (staging_offset + copy.staging_offset) as usize;
        let far = buffer + copy.buffer_offset;
        let bytes = copy.bytes as usize;
        assert!(near + bytes <= self.region.len_bytes() as usize, "the command was checked");
        // Only an address: the GPU accesses the memory.
        let near = self.region.base().wrapping_add(near);
        // SAFETY: the range lies in the region, which stays mapped and registered, and in the buffer, which has BUFFER_BYTES.
        unsafe {
            match copy.direction {
                Direction::ToBuffer => self.driver.begin_copy_in(stream, far, near, bytes),
                Direction::FromBuffer => self.driver.begin_copy_out(stream, near, far, bytes),
            }
        }
    }
}

impl Copier for StreamCopier {
    fn buffer(&self, buffer: u32) -> Option<BufferRange> {
        let range = BufferRange { address: self.resources.buffer, bytes: BUFFER_BYTES as u64 };
        (buffer == 0).then_some(range)
    }

    fn begin(&mut self, copy: &Copy, staging_offset: u64) -> Result<(), CopyFailed> {
        self.put(copy, staging_offset).map_err(failed)
    }

    fn is_done(&mut self) -> Result<bool, CopyFailed> {
        self.driver.is_copied(self.resources.stream).map_err(failed)
    }
}

fn failed(error: CudaError) -> CopyFailed {
    tracing::error!("the copy agent: {error}");
    CopyFailed
}
