//! Accelerator runtimes: they set an accelerator up, run its kernels and stop them.
//!
//! * [`kernel`]: kernels by name, built in or from a library; [`compile`] builds such libraries.
//! * [`params`]: the parameters of a service's kernel.
//! * [`cpu`]: blocks as coroutines on the engine's workers or on threads of their own.
//! * [`cuda`]: blocks on an NVIDIA GPU, for a runtime in a process of its own.
//! * [`process`]: blocks in a process of their own; both sides.
//!
//! Each kind of accelerator is one module. Those inside the engine's process implement
//! [`engine::accelerator::Blocks`]; everything else goes through the region.

pub mod compile;
pub mod copy;
pub mod cpu;
mod crash;
pub mod cuda;
mod elf;
pub mod kernel;
pub mod params;
pub mod process;
pub mod sleepers;
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
    /// A parameter cannot be passed to a kernel.
    #[error(transparent)]
    Param(#[from] ParamError),
    /// A GPU cannot be used.
    #[error(transparent)]
    Cuda(#[from] CudaError),
    /// The memory is not a valid region.
    #[error(transparent)]
    Region(#[from] mqueue::JoinError),
    /// A block index is not in the region, or occurs twice.
    #[error("block {block} {what}: give each of the region's {count} blocks to one runner")]
    Block {
        /// The block.
        block: u32,
        /// The problem.
        what: &'static str,
        /// Blocks of the region.
        count: u32,
    },
    /// An option is outside its range.
    #[error("{what} is {value}, must be in [{min}, {max}]")]
    Range {
        /// The option.
        what: &'static str,
        /// Its value.
        value: u64,
        /// Smallest allowed.
        min: u64,
        /// Largest allowed.
        max: u64,
    },
    /// The kernel checked the region and its parameters and does not support them.
    #[error(
        "kernel `{kernel}` refuses block {block}: its library does not match this region, rebuild it \
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
        /// The reason in the block's status words.
        reason: &'static str,
    },
    /// A block did not get to its first wait.
    #[error("kernel `{kernel}` did not reach its first receive within {seconds} s")]
    Silent {
        /// The kernel's name.
        kernel: String,
        /// The time limit.
        seconds: u64,
    },
    /// Blocks of several services, or some of one, did not reach their first wait.
    #[error("not all blocks reached their first receive within {seconds} s: {blocks}")]
    Absent {
        /// These blocks.
        blocks: String,
        /// The time limit.
        seconds: u64,
    },
    /// The host kernel could not provide a thread or a stack.
    #[error("cannot {what}: {error}")]
    Os {
        /// The operation.
        what: &'static str,
        /// The error of the host kernel.
        error: std::io::Error,
    },
}
