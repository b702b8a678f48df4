//! The `cuda` accelerator: blocks as persistent blocks of a kernel on an NVIDIA GPU.
//!
//! A service is one launch: one CUDA block for each block of its region. The blocks poll their mqueues in
//! host memory over the bus until the stop word, or the engine's silence, ends them; no host code runs
//! for a message. What this module does on the host, once: it registers the region with the GPU, loads
//! the kernel, allocates staging memory, checks that all blocks are resident together
//! ([`occupancy`]), launches. From then on it looks at the status words and at the stream now and
//! then, and touches nothing: an allocation, a free or a synchronisation would wait for blocks that do
//! not end. What cannot be given back because blocks still run is left to the end of the process, which
//! ends them too.
//!
//! This belongs into a process of its own, an accelerator runtime that got the region by its descriptor.
//! The engine never loads a GPU driver.
//!
//! Kernels are the same sources as those of the `cpu` accelerator, built by nvcc or NVRTC (`kernels.rs`). They are
//! trusted as far as their process goes: a kernel that faults takes down its own runtime, never the
//! engine.

mod driver;
mod gpu;
mod kernels;
pub mod occupancy;
mod watch;

use std::borrow::Cow;
use std::path::PathBuf;

use driver::REGISTER;
pub use gpu::{CudaAccelerator, Ended, FoundGpu, Gpu, Options, Service, survey};
use kernels::WARP_BACKENDS_MAX;
pub use kernels::{built_in, built_in_for, check_image};

/// The driver's number for a GPU that another process has.
const UNAVAILABLE: i32 = 46;

/// Why a GPU cannot be used, or can no longer.
#[derive(Debug, thiserror::Error)]
pub enum CudaError {
    /// There is no driver.
    #[error(
        "the GPU driver {path} cannot be loaded ({}): install the NVIDIA driver, or give the \
         container its GPUs (`--gpus all`)",
        cause(.error)
    )]
    NoDriver {
        /// The library asked for.
        path: PathBuf,
        /// What the dynamic loader said.
        error: libloading::Error,
    },
    /// The driver lacks a function that is needed.
    #[error("the GPU driver {path} has no `{symbol}`: install a driver of CUDA 12 or later")]
    OldDriver {
        /// The driver's library.
        path: PathBuf,
        /// What it lacks.
        symbol: &'static str,
    },
    /// No GPU has this number.
    #[error("there is no GPU {index}: this process sees {count}, numbered from 0")]
    NoGpu {
        /// The number asked for.
        index: u32,
        /// How many there are.
        count: u32,
    },
    /// The GPU cannot poll host memory, or is of a generation without 16-byte accesses.
    #[error("GPU {index} ({name}) {what}")]
    Unfit {
        /// Its number.
        index: u32,
        /// Its name.
        name: String,
        /// What it lacks, and what to do.
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
        /// The names there are.
        known: String,
    },
    /// The kernel's file cannot be read.
    #[error("CUDA kernels {path} cannot be read ({error}): check the path")]
    NoFile {
        /// The path asked for.
        path: PathBuf,
        /// What the host kernel said.
        error: std::io::Error,
    },
    /// The file holds no kernels for a GPU.
    #[error(
        "{path} is no fatbin or cubin: build the source for GPUs, `serval kernel build --gpu sm_90`"
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
        /// Where it was looked for.
        image: String,
    },
    /// The service has more backends than a block that is a warp.
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
    /// A block would wait for room for ever.
    #[error("{0}")]
    NotResident(String),
    /// The driver refused something, or a kernel failed.
    #[error("cannot {what}: {name}, {meaning}{}", advice(.what, *.code, .bus_id.as_deref()))]
    Driver {
        /// What was tried.
        what: &'static str,
        /// Where the GPU that was tried is on the PCI bus, if it takes that to say what to do.
        bus_id: Option<String>,
        /// The driver's number.
        code: i32,
        /// The driver's name for it.
        name: String,
        /// What the driver says about it.
        meaning: String,
    },
}

impl CudaError {
    /// Whether a kernel is to blame: it did what no kernel may. Everything else that the driver reports of work that it
    /// has taken on is the GPU's or its own.
    pub fn is_of_the_kernel(&self) -> bool {
        matches!(self, Self::Driver { code, .. } if of_the_kernel(*code))
    }

    /// What to do about it may need the GPU's place on the bus.
    fn of_gpu(self, of: &str) -> Self {
        match self {
            Self::Driver { what, code, name, meaning, .. } => {
                Self::Driver { what, bus_id: Some(of.to_owned()), code, name, meaning }
            }
            other => other,
        }
    }
}

/// Where programs share GPUs at the same time through an MPS daemon, if one is there.
pub fn mps_folder() -> Option<PathBuf> {
    let folder = std::env::var_os("CUDA_MPS_PIPE_DIRECTORY");
    let folder = folder.map_or_else(|| "/tmp/nvidia-mps".into(), PathBuf::from);
    folder.join("control").exists().then_some(folder)
}

/// What the dynamic loader really said.
pub(crate) fn cause(error: &libloading::Error) -> String {
    std::error::Error::source(error).map_or_else(|| error.to_string(), ToString::to_string)
}

/// An illegal address, an assertion, and from a bad stack to a failed launch.
fn of_the_kernel(code: i32) -> bool {
    matches!(code, 700 | 710 | 714..=719)
}

/// What to do about an error of the driver, where there is something to do.
fn advice(what: &str, code: i32, bus_id: Option<&str>) -> Cow<'static, str> {
    if code == UNAVAILABLE {
        // The driver's numbers need not be those of nvidia-smi, which without one means every GPU.
        let gpu = bus_id.map(|bus_id| format!("-i {bus_id} ")).unwrap_or_default();
        let share = format!("`nvidia-smi {gpu}-c DEFAULT` lets programs share it");
        return format!("; another process has the GPU to itself: end it, or {share}").into();
    }
    let advice = match code {
        // The memory that is short is not the GPU's.
        2 if what == REGISTER => {
            "; the host does not pin so much memory: free some of it, raise `ulimit -l` where it is limited, or give the \
             service fewer mqueues or shorter messages"
        }
        2 => "; free memory on the GPU, or give the service fewer mqueues or shorter messages",
        100 | 101 => "; look at CUDA_VISIBLE_DEVICES, and give a container its GPUs (`--gpus all`)",
        209 | 218 | 222 => "; build the kernels for this GPU and a toolkit that the driver serves",
        214 | 215 => "; the GPU's memory failed: look at `nvidia-smi -q -d ECC`",
        code if of_the_kernel(code) => {
            "; the kernel's fault: run it under compute-sanitizer. The GPU is free again when this \
             process has ended"
        }
        702 => "; the GPU drives a display and ends long kernels: use another one",
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
        assert!(taken(None).contains("`nvidia-smi -c DEFAULT`"), "where the GPU is not known");
    }

    #[test]
    fn a_machine_without_a_driver_is_told_so() {
        let error = survey(Some("libno-such-driver.so".as_ref())).unwrap_err();
        assert!(matches!(error, CudaError::NoDriver { .. }), "{error}");
        let sentence = error.to_string();
        assert!(sentence.contains("install the NVIDIA driver"), "{sentence}");
        assert!(sentence.contains("cannot open shared object file"), "{sentence}");
        // A library that is no driver: the C library has none of the functions.
        let error = survey(Some("libc.so.6".as_ref())).unwrap_err();
        assert!(matches!(error, CudaError::OldDriver { symbol: "cuInit", .. }), "{error}");
    }
}
