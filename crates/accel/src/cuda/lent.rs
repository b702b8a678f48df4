//! Memory of a GPU that the calling program has allocated, and lends for copies. An address is only a number: it is checked against what
//! the driver knows, so that a wrong one is an error and no copy into other memory.

use std::path::Path;

use super::driver::{Driver, PointerAttribute};
use super::{CudaError, Gpu};

/// The driver's number for memory of a GPU.
const DEVICE_MEMORY: u64 = 2;

/// Why memory cannot be lent.
#[derive(Debug, thiserror::Error)]
pub enum LentError {
    /// No memory is allocated there.
    #[error(
        "address {0:#x} is no memory of a GPU: it was freed, or this process never allocated it; give an array that exists"
    )]
    Unknown(u64),
    /// It is not the memory of one GPU.
    #[error(
        "address {address:#x} is {kind}, not the own memory of a GPU: give an array that was allocated there, or one in host memory \
         through Python's buffer protocol"
    )]
    Kind {
        /// The address.
        address: u64,
        /// What it is.
        kind: &'static str,
    },
    /// The memory is on another GPU.
    #[error(
        "address {address:#x} is memory of GPU {found}, not of GPU {expected}: give an array on that one"
    )]
    OtherGpu {
        /// The address.
        address: u64,
        /// Its GPU.
        found: u64,
        /// The GPU that was expected.
        expected: u32,
    },
    /// The memory belongs to another context.
    #[error(
        "address {0:#x} belongs to another context than the primary one of its GPU: allocate the array with the CUDA runtime, \
         as torch and CuPy do"
    )]
    OtherContext(u64),
    /// The array is longer than its allocation.
    #[error(
        "the array has the addresses {:#x} to {:#x}, and the allocation there ends at {end:#x}: its shape or its address is wrong, or it \
         lies in several allocations (expandable segments of torch); give one that lies in a single allocation",
        .address, .address.saturating_add(*.bytes as u64)
    )]
    Beyond {
        /// The array's address.
        address: u64,
        /// Its length.
        bytes: usize,
        /// The end of the allocation at the array's address.
        end: u64,
    },
    /// The driver reported an error.
    #[error(transparent)]
    Cuda(#[from] CudaError),
}

/// The number of the GPU in whose memory an address is, by the driver at `library` or the machine's own. The address may be anything.
pub fn gpu_at(address: u64, library: Option<&Path>) -> Result<u32, LentError> {
    let driver = Driver::load(library)?;
    // First, because managed memory has either type.
    if driver.pointer_attribute(address, PointerAttribute::IsManaged)?.is_some_and(|is| is != 0) {
        return Err(LentError::Kind { address, kind: "managed memory" });
    }
    match driver.pointer_attribute(address, PointerAttribute::MemoryType)? {
        None => return Err(LentError::Unknown(address)),
        Some(DEVICE_MEMORY) => {}
        Some(_) => return Err(LentError::Kind { address, kind: "host memory" }),
    }
    let ordinal = driver.pointer_attribute(address, PointerAttribute::DeviceOrdinal)?;
    let ordinal = ordinal.and_then(|ordinal| u32::try_from(ordinal).ok());
    ordinal.ok_or(LentError::Unknown(address))
}

/// Checks that `bytes` at `address` are one allocation's of this GPU, whose context is current.
pub(super) fn check_lent(gpu: &Gpu, address: u64, bytes: usize) -> Result<(), LentError> {
    let (driver, expected) = (gpu.driver, gpu.found().index);
    let found = driver.pointer_attribute(address, PointerAttribute::DeviceOrdinal)?;
    let found = found.ok_or(LentError::Unknown(address))?;
    if found != u64::from(expected) {
        return Err(LentError::OtherGpu { address, found, expected });
    }
    // Memory that is mapped (cuMemMap), or of a pool, belongs to no context.
    let context = driver.pointer_attribute(address, PointerAttribute::Context)?.unwrap_or(0);
    if context != 0 && context != gpu.context as u64 {
        return Err(LentError::OtherContext(address));
    }
    let (base, size) = driver.allocation_at(address)?.ok_or(LentError::Unknown(address))?;
    let end = base.saturating_add(size as u64);
    let is_inside =
        address >= base && address.checked_add(bytes as u64).is_some_and(|to| to <= end);
    is_inside.then_some(()).ok_or(LentError::Beyond { address, bytes, end })
}
