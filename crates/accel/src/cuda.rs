//! The `cuda` accelerator: blocks as persistent blocks of a kernel on an NVIDIA GPU.
//!
//! A service is one launch: one CUDA block for each block of its region. The blocks poll their mqueues in
//! host memory over the bus until the stop word, or the loss of the engine's heartbeat, ends them; no host code runs
//! per message. At the start this module registers the region with the GPU, loads
//! the kernel, allocates staging memory, checks that all blocks are resident together
//! ([`occupancy`]), and launches. Afterwards it only checks the status words and the stream at
//! intervals: an allocation, a free or a synchronisation would wait for blocks that do
//! not end. Resources that cannot be freed because blocks still run are left to the end of the process, which
//! ends the blocks too.
//!
//! This belongs in a process of its own, an accelerator runtime that got the region by its descriptor.
//! The engine never loads a GPU driver.
//!
//! Kernels have the same sources as those of the `cpu` accelerator, built by nvcc or NVRTC (`kernels.rs`). They are
//! trusted within their process: a kernel that faults takes down its own runtime, never the
//! engine.

mod block_memory;
mod copier;
mod driver;
mod gpu;
mod kernels;
mod lent;
pub mod occupancy;
mod staging;
mod watch;

use std::borrow::Cow;
use std::path::PathBuf;

use driver::REGISTER;
pub use gpu::{CudaAccelerator, Ended, FoundGpu, Gpu, Options, Service, survey};
pub use kernels::{Demands, built_in, built_in_for, check_builtin, check_image};
use kernels::{MATMUL_BLOCKS_MAX, SOCKETS_MAX, WARP_BACKENDS_MAX};
pub use lent::{LentError, gpu_at};
use mqueue::abi::ABI_VERSION;

use crate::elf::loader_message;
pub use staging::{Ready, StagedArray};

/// The driver's error code for a GPU that another process uses exclusively.
const UNAVAILABLE: i32 = 46;

/// Why a GPU cannot be used, or has failed.
#[derive(Debug, thiserror::Error)]
pub enum CudaError {
    /// The driver cannot be loaded.
    #[error(
        "the GPU driver {path} cannot be loaded ({}): install the NVIDIA driver, or give the \
         container its GPUs (`--gpus all`)",
        loader_message(.error)
    )]
    NoDriver {
        /// The library asked for.
        path: PathBuf,
        /// The dynamic loader's error.
        error: libloading::Error,
    },
    /// The driver lacks a required function.
    #[error("the GPU driver {path} has no `{symbol}`: install a driver of CUDA 12 or later")]
    OldDriver {
        /// The driver's library.
        path: PathBuf,
        /// The missing function.
        symbol: &'static str,
    },
    /// No GPU has this number.
    #[error("there is no GPU {index}: this process sees {count}, numbered from 0")]
    NoGpu {
        /// The number asked for.
        index: u32,
        /// The number of GPUs.
        count: u32,
    },
    /// The GPU cannot poll host memory, or is of a generation without 16-byte accesses.
    #[error("GPU {index} ({name}) {what}")]
    Unfit {
        /// Its number.
        index: u32,
        /// Its name.
        name: String,
        /// What it lacks, and the remedy.
        what: String,
    },
    /// This program was built without nvcc.
    #[error(
        "CUDA kernels are not built into this program: run `make cuda-kernels` and build it again, or \
         name a fatbin file as the kernel"
    )]
    NotBuiltIn,
    /// No built-in kernel has this name.
    #[error(
        "no CUDA kernel `{name}` is built in: use one of {known}, or the path of a fatbin file"
    )]
    NoBuiltin {
        /// The name asked for.
        name: String,
        /// The available names.
        known: String,
    },
    /// The kernel's file cannot be read.
    #[error("CUDA kernels {path} cannot be read ({error}): check the path")]
    NoFile {
        /// The path asked for.
        path: PathBuf,
        /// The error of the host kernel.
        error: std::io::Error,
    },
    /// The file contains no kernels for a GPU.
    #[error(
        "{path} is not a fatbin or cubin: build the source for GPUs, `serval kernel build --gpu sm_90`"
    )]
    NoImage {
        /// The file.
        path: PathBuf,
    },
    /// The file has no kernel of this name.
    #[error(
        "{image} has no kernel `{name}`: define it with SERVAL_KERNEL({name}), or give FILE:NAME"
    )]
    NoKernel {
        /// The name asked for.
        name: String,
        /// The file searched.
        image: String,
    },
    /// The kernel reads its arguments and the region in another layout.
    #[error(
        "kernel `{name}` of {image} was built for another region ABI than version {ABI_VERSION} of this program: run \
         `serval kernel build` again"
    )]
    OtherAbi {
        /// The kernel's name.
        name: String,
        /// Its file.
        image: String,
    },
    /// The service has more backends than a block that is a warp can serve.
    #[error(
        "each block of kernel `{kernel}` is a warp, which serves at most {WARP_BACKENDS_MAX} backends, and the service \
         has {backends}: give it fewer, or a kernel with SERVAL_KERNEL instead of SERVAL_WARP_KERNEL"
    )]
    WarpBackends {
        /// The kernel's name.
        kernel: String,
        /// Backends of the service.
        backends: u32,
    },
    /// The service's blocks have more sockets than the kernel has state for.
    #[error(
        "each block of kernel `{kernel}` has at most {SOCKETS_MAX} sockets on a GPU, and the service has sockets_per_block = \
         {sockets}: lower it"
    )]
    Sockets {
        /// The kernel's name.
        kernel: String,
        /// Sockets of each block.
        sockets: u32,
    },
    /// The service has more blocks than the kernel has memory for.
    #[error(
        "kernel `{kernel}` has memory for {MATMUL_BLOCKS_MAX} blocks on a GPU, and the service has mqueues = {blocks}: lower it"
    )]
    Blocks {
        /// The kernel's name.
        kernel: String,
        /// Blocks of the service.
        blocks: u32,
    },
    /// A block would never become resident.
    #[error("{0}")]
    NotResident(String),
    /// The driver reported an error, or a kernel failed.
    #[error("cannot {what}: {name}, {meaning}{}", advice(.what, *.code, .bus_id.as_deref()))]
    Driver {
        /// The operation.
        what: &'static str,
        /// The GPU's PCI bus id, if the remedy needs it.
        bus_id: Option<String>,
        /// The driver's error code.
        code: i32,
        /// Its name.
        name: String,
        /// Its description.
        meaning: String,
    },
}

impl CudaError {
    /// Whether the kernel caused it. All other errors that the driver reports for accepted work are failures of the GPU
    /// or of the driver itself.
    pub fn is_of_the_kernel(&self) -> bool {
        matches!(self, Self::Driver { code, .. } if of_the_kernel(*code))
    }

    /// Adds the GPU's PCI bus id, which the remedy may need.
    fn of_gpu(self, of: &str) -> Self {
        match self {
            Self::Driver { what, code, name, meaning, .. } => {
                Self::Driver { what, bus_id: Some(of.to_owned()), code, name, meaning }
            }
            other => other,
        }
    }
}

/// The folder of an MPS daemon, through which programs share GPUs, if there is one.
pub fn mps_folder() -> Option<PathBuf> {
    let folder = std::env::var_os("CUDA_MPS_PIPE_DIRECTORY");
    let folder = folder.map_or_else(|| "/tmp/nvidia-mps".into(), PathBuf::from);
    folder.join("control").exists().then_some(folder)
}

/// An illegal address, an assertion, and the codes from an invalid stack to a failed launch.
fn of_the_kernel(code: i32) -> bool {
    matches!(code, 700 | 710 | 714..=719)
}

/// The remedy for an error of the driver, if there is one.
fn advice(what: &str, code: i32, bus_id: Option<&str>) -> Cow<'static, str> {
    if code == UNAVAILABLE {
        // The driver's numbers may differ from nvidia-smi's, and without `-i` it means every GPU.
        let gpu = bus_id.map(|bus_id| format!("-i {bus_id} ")).unwrap_or_default();
        let share = format!("`nvidia-smi {gpu}-c DEFAULT` lets programs share it");
        return format!("; another process has the GPU to itself: end it, or {share}").into();
    }
    let advice = match code {
        // Host memory is short, not the GPU's.
        2 if what == REGISTER => {
            "; the host cannot pin that much memory: free some of it, raise `ulimit -l` if it is limited, or give the \
             service fewer mqueues or shorter messages"
        }
        2 => "; free memory on the GPU, or give the service fewer mqueues or shorter messages",
        100 | 101 => "; check CUDA_VISIBLE_DEVICES, and give a container its GPUs (`--gpus all`)",
        209 | 218 | 222 => {
            "; build the kernels for this GPU and with a toolkit that the driver supports"
        }
        214 | 215 => "; the GPU's memory failed: run `nvidia-smi -q -d ECC`",
        code if of_the_kernel(code) => {
            "; the kernel caused it: run it under compute-sanitizer. The GPU is free again when this \
             process has ended"
        }
        702 => "; the GPU drives a display and terminates long kernels: use another one",
        803 | 804 => "; the driver was updated while it ran: load its new kernel module, or reboot",
        _ => "",
    };
    advice.into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_of_the_driver_is_one_sentence_with_what_to_do() {
        let error_at = |what, code, name: &str, meaning: &str| CudaError::Driver {
            what,
            bus_id: None,
            code,
            name: name.to_owned(),
            meaning: meaning.to_owned(),
        };
        let error =
            |code, name: &str, meaning: &str| error_at("allocate GPU memory", code, name, meaning);
        assert_eq!(
            error(2, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory").to_string(),
            "cannot allocate GPU memory: CUDA_ERROR_OUT_OF_MEMORY, out of memory; free memory on the \
             GPU, or give the service fewer mqueues or shorter messages"
        );
        let unpinned =
            error_at(REGISTER, 2, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory").to_string();
        assert!(unpinned.contains("the host") && !unpinned.contains("on the GPU"), "{unpinned}");
        let plain = error(1, "CUDA_ERROR_INVALID_VALUE", "invalid argument").to_string();
        assert!(plain.ends_with("invalid argument"), "{plain}");
        for code in [2, 46, 100, 101, 209, 700, 719, 803] {
            assert!(advice("", code, None).starts_with("; "), "{code}");
        }
        for (code, kernel) in [
            (700, true),
            (710, true),
            (714, true),
            (719, true),
            (214, false),
            (702, false),
            (999, false),
        ] {
            assert_eq!(error(code, "", "").is_of_the_kernel(), kernel, "{code}");
        }
        let taken = |bus_id| advice("take the GPU", UNAVAILABLE, bus_id);
        assert!(taken(Some("0000:65:00.0")).contains("`nvidia-smi -i 0000:65:00.0 -c DEFAULT`"));
        assert!(taken(None).contains("`nvidia-smi -c DEFAULT`"), "without a known GPU");
    }

    #[test]
    fn a_missing_driver_is_a_clear_error() {
        let error = survey(Some("libno-such-driver.so".as_ref())).unwrap_err();
        assert!(matches!(error, CudaError::NoDriver { .. }), "{error}");
        let sentence = error.to_string();
        assert!(sentence.contains("install the NVIDIA driver"), "{sentence}");
        assert!(sentence.contains("cannot open shared object file"), "{sentence}");
        // A library that is not a driver: the C library has none of the functions.
        let error = survey(Some("libc.so.6".as_ref())).unwrap_err();
        assert!(matches!(error, CudaError::OldDriver { symbol: "cuInit", .. }), "{error}");
    }
}
