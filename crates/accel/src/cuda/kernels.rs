//! CUDA kernels by name: those built into this program, and those of a file.
//!
//! The built-in ones are one fatbin with code for several generations of GPUs, from the sources of the
//! `cpu` accelerator's kernels. `make cuda-kernels` builds it with nvcc; a build without it is complete
//! but for these kernels, and says so when one is asked for.

use std::borrow::Cow;
use std::ffi::CString;
use std::path::Path;

use super::CudaError;
use crate::Kernel;

/// The fatbin, empty in a build without nvcc.
const BUILT_IN: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/kernels.fatbin"));

/// Whether this program has CUDA kernels.
pub fn built_in() -> bool {
    !BUILT_IN.is_empty()
}

/// Where a kernel is, before a GPU has seen it.
pub(super) struct Image {
    pub(super) bytes: Cow<'static, [u8]>,
    /// The kernel's name.
    pub(super) name: String,
    /// What the image is called in messages.
    pub(super) called: String,
}

impl Image {
    /// A kernel as a configuration names it: a built-in name, or the path of a fatbin or cubin
    /// (anything with a `/` or such an ending), followed by `:NAME` unless the kernel is called like the file.
    pub(super) fn find(kernel: &str) -> Result<Self, CudaError> {
        let is_path = ["/", ".fatbin", ".cubin"].iter().any(|mark| kernel.contains(mark));
        if is_path { Self::open(kernel) } else { Self::builtin(kernel) }
    }

    fn builtin(name: &str) -> Result<Self, CudaError> {
        // The same sources: the names are those of the cpu accelerator.
        let known = Kernel::builtins();
        if !known.iter().any(|known| known == name) {
            return Err(CudaError::NoBuiltin { name: name.to_owned(), known: known.join(", ") });
        }
        if !built_in() {
            return Err(CudaError::NotBuiltIn);
        }
        let called = "this program".to_owned();
        Ok(Self { bytes: Cow::Borrowed(BUILT_IN), name: name.to_owned(), called })
    }

    fn open(path_and_name: &str) -> Result<Self, CudaError> {
        let (path, name) = match path_and_name.rsplit_once(':') {
            Some((path, name)) if !name.contains('/') => (Path::new(path), name.to_owned()),
            _ => {
                let path = Path::new(path_and_name);
                let stem = path.file_stem().unwrap_or_default();
                (path, stem.to_string_lossy().into_owned())
            }
        };
        let path = path.to_owned();
        let bytes = match std::fs::read(&path) {
            Ok(bytes) => bytes,
            Err(error) => return Err(CudaError::NoFile { path, error }),
        };
        if !is_image(&bytes) {
            return Err(CudaError::NoImage { path });
        }
        Ok(Self { bytes: Cow::Owned(bytes), name, called: path.display().to_string() })
    }

    /// The entry's symbol.
    pub(super) fn symbol(&self) -> Result<CString, CudaError> {
        CString::new(format!("serval_kernel_{}", self.name)).map_err(|_| self.no_kernel())
    }

    pub(super) fn no_kernel(&self) -> CudaError {
        CudaError::NoKernel { name: self.name.clone(), image: self.called.clone() }
    }

    /// Threads of a block where the service does not say: enough for the work of one message, and few
    /// where there is none, because every thread takes part in every wait.
    pub(super) fn threads(&self) -> u32 {
        match self.name.as_str() {
            "echo" | "sockperf" | "delay" | "spin" => 32,
            "lenet" | "faces" => 256,
            _ => 128,
        }
    }
}

/// Whether these bytes are a whole fatbin or cubin, by their headers. The driver reads as far as those say.
fn is_image(bytes: &[u8]) -> bool {
    const FATBIN: u32 = 0xba55_ed50;
    const ELF: u32 = u32::from_le_bytes(*b"\x7fELF");
    let u32_at =
        |at: usize| bytes.get(at..at + 4).map(|b| u32::from_le_bytes(b.try_into().unwrap()));
    let u64_at =
        |at: usize| bytes.get(at..at + 8).map(|b| u64::from_le_bytes(b.try_into().unwrap()));
    match u32_at(0) {
        // Magic, version and header size in 2 bytes each, then the size of what follows.
        Some(FATBIN) => match (u32_at(4), u64_at(8)) {
            (Some(header), Some(body)) => u64::from(header >> 16)
                .checked_add(body)
                .is_some_and(|end| end <= bytes.len() as u64),
            _ => false,
        },
        // The tables of sections and segments end inside the file.
        Some(ELF) => u64_at(0x28).is_some_and(|sections| sections < bytes.len() as u64),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error(kernel: &str) -> CudaError {
        Image::find(kernel).err().expect("no such kernel")
    }

    #[test]
    fn a_kernel_that_is_not_there_is_refused_with_the_reason() {
        assert!(matches!(error("nonsense"), CudaError::NoBuiltin { .. }));
        assert!(error("nonsense").to_string().contains("echo, faces"));
        assert!(matches!(error("./no/such.fatbin"), CudaError::NoFile { .. }));
        let text = tempfile::Builder::new().suffix(".fatbin").tempfile().unwrap();
        std::fs::write(text.path(), "not a fatbin").unwrap();
        assert!(matches!(error(text.path().to_str().unwrap()), CudaError::NoImage { .. }));
    }

    #[test]
    fn a_built_in_kernel_is_found_or_the_build_is_told() {
        match Image::find("echo") {
            Ok(image) => {
                assert!(built_in() && is_image(&image.bytes));
                assert_eq!(image.symbol().unwrap().to_str(), Ok("serval_kernel_echo"));
            }
            Err(error) => {
                assert!(!built_in());
                assert!(error.to_string().contains("make cuda-kernels"), "{error}");
            }
        }
    }

    #[test]
    fn an_image_that_ends_early_is_not_given_to_the_driver() {
        let mut fatbin = 0xba55_ed50u32.to_le_bytes().to_vec();
        fatbin.extend(0x0010_0001u32.to_le_bytes());
        fatbin.extend(64u64.to_le_bytes());
        fatbin.extend([0; 64]);
        assert!(is_image(&fatbin));
        for len in 0..fatbin.len() {
            assert!(!is_image(&fatbin[..len]), "{len} bytes");
        }
        assert!(!is_image(b"\x7fELF"));
    }
}
