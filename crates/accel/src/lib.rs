//! Accelerator runtimes: what sets an accelerator up, runs its kernels and stops them.
//!
//! * [`kernel`]: kernels by name, built in or from a library; [`compile`] builds such libraries.
//! * [`params`]: what a service gives its kernel.
//! * [`cpu`]: blocks as coroutines on the engine's workers or on threads of their own.
//! * [`cuda`]: blocks on an NVIDIA GPU, for a runtime in a process of its own.
//! * [`process`]: blocks in a process of their own, seen from both sides.
//!
//! Each kind of accelerator is one module. Those inside the engine's process give it
//! [`engine::accelerator::Blocks`]; all else goes through the region.

pub mod compile;
pub mod cpu;
mod crash;
pub mod cuda;
mod elf;
pub mod kernel;
pub mod params;
pub mod process;
mod table;

pub use cuda::CudaError;
pub use kernel::{Kernel, KernelError};
pub use mqueue::abi::reason::name as reason_name;
pub use params::ParamError;

/// Why an accelerator could not be started.
#[derive(Debug, thiserror::Error)]
pub enum AccelError {
    /// The kernel could not be found or loaded.
    #[error(transparent)]
    Kernel(#[from] KernelError),
    /// A parameter is outside what a kernel can be given.
    #[error(transparent)]
    Param(#[from] ParamError),
    /// A GPU cannot be used.
    #[error(transparent)]
    Cuda(#[from] CudaError),
    /// The memory is no usable region.
    #[error(transparent)]
    Region(#[from] mqueue::JoinError),
    /// A block index is not one of the region, or comes twice.
    #[error("block {block} {what}: give each of the region's {count} blocks to one runner")]
    Block {
        /// The block.
        block: u32,
        /// What is wrong with it.
        what: &'static str,
        /// Blocks of the region.
        count: u32,
    },
    /// An option is outside its range.
    #[error("{what} is {value}, must be in [{min}, {max}]")]
    Range {
        /// Which option.
        what: &'static str,
        /// What it is.
        value: u64,
        /// Smallest allowed.
        min: u64,
        /// Largest allowed.
        max: u64,
    },
    /// The kernel looked at the region and its parameters and does not serve them.
    #[error(
        "kernel `{kernel}` refuses block {block}: its library does not suit this region, rebuild it \
         with `serval kernel build`"
    )]
    Refused {
        /// The kernel's name.
        kernel: String,
        /// The block.
        block: u32,
    },
    /// The kernel returned before it waited for a message.
    #[error("kernel `{kernel}` ended block {block} before its first receive ({reason})")]
    Returned {
        /// The kernel's name.
        kernel: String,
        /// The block.
        block: u32,
        /// What the block left in its status words.
        reason: &'static str,
    },
    /// A block did not get to its first wait.
    #[error("kernel `{kernel}` did not come to its first receive within {seconds} s")]
    Silent {
        /// The kernel's name.
        kernel: String,
        /// How long it was waited for.
        seconds: u64,
    },
    /// Blocks of several services, or some of one, did not get to their first wait.
    #[error("not all blocks came to their first receive within {seconds} s: {blocks}")]
    Absent {
        /// Which did not.
        blocks: String,
        /// How long they were waited for.
        seconds: u64,
    },
    /// A thread or a stack could not be had from the host kernel.
    #[error("cannot {what}: {error}")]
    Os {
        /// What was tried.
        what: &'static str,
        /// What the host kernel said.
        error: std::io::Error,
    },
}
