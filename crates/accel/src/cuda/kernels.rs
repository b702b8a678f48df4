//! CUDA kernels by name: those built into this program, and those of a file.
//!
//! The built-in ones are fatbins with code for several generations of GPUs, from the sources of the `cpu`
//! accelerator's kernels, one fatbin per kernel: with all of them in one image a hop through `echo` took 0.15 us longer
//! (H200). `make cuda-kernels` builds them with nvcc; a build without them lacks only these kernels, and reports
//! that when one is requested.

use std::borrow::Cow;
use std::ffi::CString;
use std::path::Path;

use mqueue::abi::ABI_VERSION;

use super::CudaError;
use crate::Kernel;
use crate::elf::{is_cubin, is_elf, number};
use crate::kernel::split;

/// Names and fatbins; empty in a build without nvcc.
const BUILT_IN: &[(&str, &[u8])] = include!(concat!(env!("OUT_DIR"), "/cuda_kernels.rs"));

/// Maximum number of backends of a block that is a warp: SERVAL_WARP_BACKENDS_MAX of the device library.
pub(super) const WARP_BACKENDS_MAX: u32 = 2;

/// Whether this program has CUDA kernels.
pub fn built_in() -> bool {
    !BUILT_IN.is_empty()
}

/// Whether the built-in kernels have code for GPUs of this compute capability, or PTX that the driver translates
/// for them.
pub fn built_in_for(capability: (u32, u32)) -> bool {
    built_in() && BUILT_IN.iter().all(|(_, fatbin)| has_code_for(fatbin, capability))
}

/// The same for a fatbin. Code runs on its own generation of GPUs from its own version on, PTX on every later one.
fn has_code_for(fatbin: &[u8], (major, minor): (u32, u32)) -> bool {
    const PTX: u64 = 1;
    const CODE: u64 = 2;
    let wanted = u64::from(10 * major + minor);
    let mut at = number(fatbin, 6, 2).unwrap_or(0);
    while let (Some(kind), Some(head_bytes), Some(bytes), Some(of)) = (
        number(fatbin, at, 2),
        number(fatbin, at + 4, 4),
        number(fatbin, at + 8, 8),
        number(fatbin, at + 28, 4),
    ) {
        let same_generation = of / 10 == wanted / 10;
        if of <= wanted && (kind == PTX || (kind == CODE && same_generation)) {
            return true;
        }
        // No entry is without a header, so this ends.
        at = match at.checked_add(head_bytes.max(1)).and_then(|at| at.checked_add(bytes)) {
            Some(next) if next < fatbin.len() as u64 => next,
            _ => return false,
        };
    }
    false
}

/// A kernel's image before it is loaded on a GPU.
pub(super) struct Image {
    pub(super) bytes: Cow<'static, [u8]>,
    /// The kernel's name.
    pub(super) name: String,
    /// The image's name in messages.
    pub(super) called: String,
}

impl Image {
    /// A kernel as named in a configuration: a built-in name, or the path of a fatbin or cubin
    /// (anything with a `/` or such an extension), followed by `:NAME` unless the kernel has the file's name.
    pub(super) fn find(kernel: &str) -> Result<Self, CudaError> {
        let is_path = ["/", ".fatbin", ".cubin"].iter().any(|mark| kernel.contains(mark));
        if is_path { Self::open(kernel) } else { Self::builtin(kernel) }
    }

    fn builtin(name: &str) -> Result<Self, CudaError> {
        // The names are those of the cpu accelerator, which has the same sources.
        let known = Kernel::builtins();
        if !known.iter().any(|known| known == name) {
            return Err(CudaError::NoBuiltin { name: name.to_owned(), known: known.join(", ") });
        }
        let (_, fatbin) =
            BUILT_IN.iter().find(|(built, _)| *built == name).ok_or(CudaError::NotBuiltIn)?;
        let called = "this program".to_owned();
        Ok(Self { bytes: Cow::Borrowed(fatbin), name: name.to_owned(), called })
    }

    fn open(path_and_name: &str) -> Result<Self, CudaError> {
        let path = split(path_and_name).0.to_owned();
        match std::fs::read(&path) {
            Ok(bytes) => Self::read(path_and_name, bytes),
            Err(error) => Err(CudaError::NoFile { path, error }),
        }
    }

    /// A kernel of a file with this content, `PATH` or `PATH:NAME`.
    pub(super) fn read(path_and_name: &str, bytes: Vec<u8>) -> Result<Self, CudaError> {
        let (path, name) = split(path_and_name);
        let stem = || path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        let name = name.map_or_else(stem, str::to_owned);
        check_image(&bytes, path)?;
        Ok(Self { bytes: Cow::Owned(bytes), name, called: path.display().to_string() })
    }

    /// The entry's symbol.
    pub(super) fn symbol(&self) -> Result<CString, CudaError> {
        CString::new(format!("serval_kernel_{}", self.name)).map_err(|_| self.no_kernel())
    }

    /// The symbol that marks a kernel whose warps are blocks.
    pub(super) fn mark_of_warps(&self) -> Result<CString, CudaError> {
        CString::new(format!("serval_warps_{}", self.name)).map_err(|_| self.no_kernel())
    }

    /// The symbol that marks a kernel built for this program's region ABI.
    pub(super) fn mark_of_abi(&self) -> Result<CString, CudaError> {
        CString::new(format!("serval_abi_{ABI_VERSION}_{}", self.name))
            .map_err(|_| self.no_kernel())
    }

    pub(super) fn other_abi(&self) -> CudaError {
        CudaError::OtherAbi { name: self.name.clone(), image: self.called.clone() }
    }

    pub(super) fn no_kernel(&self) -> CudaError {
        CudaError::NoKernel { name: self.name.clone(), image: self.called.clone() }
    }

    /// Default number of threads per block: enough for the work of one message, and few
    /// if there is none, because every thread takes part in every wait.
    pub(super) fn threads(&self) -> u32 {
        match self.name.as_str() {
            "echo" | "sockperf" | "delay" | "spin" => 32,
            "lenet" | "faces" | "matmul" => 256,
            _ => 128,
        }
    }
}

/// Built-in kernels whose blocks are warps (`SERVAL_WARP_KERNEL`).
const WARP_BUILTINS: &[&str] = &["scale"];

/// Sockets of a block of a built-in kernel: SERVAL_SOCKET_SLOTS_MAX of the device library.
pub(super) const SOCKETS_MAX: u32 = 16;

/// Blocks of the kernel `matmul`, each of which has memory of the GPU: MATMUL_BLOCKS of its source.
pub(super) const MATMUL_BLOCKS_MAX: u32 = 64;

/// What a service asks of a kernel.
#[derive(Clone, Copy, Debug, Default)]
pub struct Demands {
    /// Backends.
    pub backends: u32,
    /// Blocks on one accelerator.
    pub blocks: u32,
    /// Sockets of each block.
    pub sockets: u32,
}

/// Whether a built-in kernel can serve this. What files contain, only a GPU tells.
pub fn check_builtin(name: &str, demands: Demands) -> Result<(), CudaError> {
    let Demands { backends, blocks, sockets } = demands;
    let kernel = || name.to_owned();
    if WARP_BUILTINS.contains(&name) && backends > WARP_BACKENDS_MAX {
        return Err(CudaError::WarpBackends { kernel: kernel(), backends });
    }
    if ["matmul", "stream_echo"].contains(&name) && sockets > SOCKETS_MAX {
        return Err(CudaError::Sockets { kernel: kernel(), sockets });
    }
    if name == "matmul" && blocks > MATMUL_BLOCKS_MAX {
        return Err(CudaError::Blocks { kernel: kernel(), blocks });
    }
    Ok(())
}

/// Whether the content of the file at `path` is a complete fatbin or cubin, according to its headers.
pub fn check_image(bytes: &[u8], path: &Path) -> Result<(), CudaError> {
    let path = path.to_owned();
    if is_image(bytes) { Ok(()) } else { Err(CudaError::NoImage { path }) }
}

/// Whether these bytes are a complete fatbin or cubin, according to their headers. The driver reads as far as those say.
fn is_image(bytes: &[u8]) -> bool {
    const FATBIN: u64 = 0xba55_ed50;
    match number(bytes, 0, 4) {
        // Magic, version and header size in 2 bytes each, then the size of the rest.
        Some(FATBIN) => match (number(bytes, 6, 2), number(bytes, 8, 8)) {
            (Some(header), Some(body)) => {
                header.checked_add(body).is_some_and(|end| end <= bytes.len() as u64)
            }
            _ => false,
        },
        _ => is_elf(bytes) && is_cubin(bytes),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::compile::{BuildOptions, Target, build_kernel};

    #[test]
    fn the_built_in_kernels_of_warps_are_those_that_the_sources_mark() {
        let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../device/kernels");
        for name in Kernel::builtins() {
            let source = std::fs::read_to_string(sources.join(format!("{name}.cpp"))).unwrap();
            let marked = source.contains(&format!("SERVAL_WARP_KERNEL({name})"));
            assert_eq!(WARP_BUILTINS.contains(&name.as_str()), marked, "{name}");
            let with = |backends| Demands { backends, ..Demands::default() };
            assert_eq!(
                check_builtin(&name, with(WARP_BACKENDS_MAX + 1)).is_err(),
                marked,
                "{name}"
            );
            check_builtin(&name, with(WARP_BACKENDS_MAX)).unwrap();
        }
    }

    #[test]
    fn the_built_in_kernels_with_sockets_have_limits_on_a_gpu() {
        let device = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../device");
        let read = |file: &str| std::fs::read_to_string(device.join(file)).unwrap();
        let slots = format!("SERVAL_SOCKET_SLOTS_MAX (SERVAL_CUDA ? {SOCKETS_MAX} : ");
        assert!(read("include/serval/sockets.h").contains(&slots));
        let blocks = format!("MATMUL_BLOCKS = {MATMUL_BLOCKS_MAX};");
        assert!(read("kernels/matmul.cpp").contains(&blocks));
        for name in Kernel::builtins() {
            let source = read(&format!("kernels/{name}.cpp"));
            let marked = source.contains(&format!("SERVAL_SOCKET_KERNEL({name})"));
            let most = Demands { backends: 0, blocks: MATMUL_BLOCKS_MAX, sockets: SOCKETS_MAX };
            check_builtin(&name, most).unwrap();
            let sockets = Demands { sockets: SOCKETS_MAX + 1, ..most };
            assert_eq!(check_builtin(&name, sockets).is_err(), marked, "{name}");
            let blocks = Demands { blocks: MATMUL_BLOCKS_MAX + 1, ..most };
            assert_eq!(check_builtin(&name, blocks).is_err(), name == "matmul", "{name}");
        }
    }

    #[test]
    fn blocks_that_are_warps_have_as_many_backends_as_the_device_library_gives_them() {
        let header =
            Path::new(env!("CARGO_MANIFEST_DIR")).join("../../device/include/serval/kernel.h");
        let define = format!("#define SERVAL_WARP_BACKENDS_MAX {WARP_BACKENDS_MAX}");
        assert!(std::fs::read_to_string(header).unwrap().lines().any(|line| line == define));
    }

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
    fn a_built_in_kernel_is_found_or_reported_missing() {
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

    /// The library that `make -C device nvrtc` fetches.
    fn nvrtc() -> Option<String> {
        let fetched = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../.cache/nvrtc-venv/lib");
        let pythons = std::fs::read_dir(fetched).into_iter().flatten().flatten();
        let library = "site-packages/nvidia/cu13/lib/libnvrtc.so.13";
        let mut libraries = pythons.map(|python| python.path().join(library));
        Some(libraries.find(|library| library.is_file())?.display().to_string())
    }

    // xtask: ci
    #[test]
    fn an_image_of_nvrtc_has_the_kernels_for_every_gpu() {
        let Some(compiler) = nvrtc() else {
            println!("SKIPPED: no NVRTC; `make -C device nvrtc` fetches it");
            return;
        };
        let folder = tempfile::tempdir().unwrap();
        let build = |source: &str, output: &str, gpus: &[&str]| {
            let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(source);
            let output = folder.path().join(output);
            let gpus = gpus.iter().map(|gpu| (*gpu).to_owned()).collect();
            let options = BuildOptions {
                target: Target::Cuda(gpus),
                compiler: Some(compiler.clone()),
                ..BuildOptions::default()
            };
            let built = build_kernel(&source, &output, &options).unwrap();
            assert_eq!(built.warnings, "");
            (built.kernels, Image::find(output.to_str().unwrap()).unwrap().bytes)
        };
        let has = |image: &[u8], function: &str| {
            let section = format!("\0.text.serval_{function}\0");
            image.windows(section.len()).any(|bytes| bytes == section.as_bytes())
        };
        let (kernels, fatbin) = build("device/kernels/scale.cpp", "k.fatbin", &["sm_80", "sm_90"]);
        assert_eq!(kernels, ["scale"]);
        for capability in [(8, 0), (8, 9), (9, 0), (10, 0), (12, 0)] {
            assert!(has_code_for(&fatbin, capability), "{capability:?}");
        }
        assert!(!has_code_for(&fatbin, (7, 5)) && !has(&fatbin, "kernel_echo"));
        let mark = format!("abi_{ABI_VERSION}_scale");
        for function in ["kernel_scale", "warps_scale", &mark] {
            assert!(has(&fatbin, function), "{function}");
        }
        // All built-in kernels, and the headers of C and C++ that they use.
        let (kernels, cubin) = build("device/kernels/builtin.cpp", "all.cubin", &["sm_90"]);
        assert_eq!(kernels, Kernel::builtins());
        let mark = format!("abi_{ABI_VERSION}");
        for kernel in &kernels {
            assert!(["kernel", &mark].iter().all(|of| has(&cubin, &format!("{of}_{kernel}"))));
        }
        let everything = "crates/accel/tests/kernels/every_header.cpp";
        assert_eq!(build(everything, "headers.cubin", &["sm_90"]).0, ["headers"]);
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

    #[test]
    fn the_gpus_of_a_fatbin_are_recognised() {
        let entry = |kind: u16, of: u32| {
            let mut entry = kind.to_le_bytes().to_vec();
            entry.extend([1, 1]);
            entry.extend(64u32.to_le_bytes());
            entry.extend(8u64.to_le_bytes());
            entry.extend([0; 12]);
            entry.extend(of.to_le_bytes());
            entry.extend([0; 64 - 32 + 8]);
            entry
        };
        let fatbin = |entries: &[Vec<u8>]| {
            let body = entries.concat();
            let mut fatbin = 0xba55_ed50u32.to_le_bytes().to_vec();
            fatbin.extend(0x0010_0001u32.to_le_bytes());
            fatbin.extend((body.len() as u64).to_le_bytes());
            fatbin.extend(body);
            fatbin
        };
        let both = fatbin(&[entry(2, 80), entry(2, 90), entry(1, 100)]);
        for has in [(8, 0), (8, 9), (9, 0), (10, 0), (10, 3), (12, 0)] {
            assert!(has_code_for(&both, has), "{has:?}");
        }
        let code = fatbin(&[entry(2, 86), entry(2, 90)]);
        for lacks in [(7, 5), (8, 0), (10, 0)] {
            assert!(!has_code_for(&code, lacks), "{lacks:?}");
        }
        assert!(!has_code_for(&both, (7, 0)) && !has_code_for(&[], (9, 0)));
        for len in 0..both.len() {
            has_code_for(&both[..len], (7, 0));
        }
        // Lengths that point nowhere or far away terminate.
        for lengths in [0, 0xff] {
            let mut wild = both.clone();
            wild[16 + 4..16 + 16].fill(lengths);
            has_code_for(&wild, (7, 0));
        }
    }

    /// A cubin of one section with 32 bytes, one without bytes in the file, and one segment.
    fn cubin() -> Vec<u8> {
        let mut cubin = vec![0; 64 + 32 + 2 * 64 + 56];
        let mut set = |at: usize, field: &[u8]| cubin[at..at + field.len()].copy_from_slice(field);
        set(0, b"\x7fELF\x02\x01\x01");
        // The tables: first segments, then sections.
        set(0x20, &(64 + 32 + 2 * 64_u64).to_le_bytes());
        set(0x28, &(64 + 32_u64).to_le_bytes());
        [56, 1, 64, 2].iter().zip(0..).for_each(|(n, at)| set(0x36 + 2 * at, &[*n]));
        let (section, empty, segment) = (64 + 32, 64 + 32 + 64, 64 + 32 + 128);
        set(section + 4, &[1]);
        set(empty + 4, &[8]);
        set(empty + 0x20, &u64::MAX.to_le_bytes());
        for (start, len) in [(section + 0x18, section + 0x20), (segment + 8, segment + 0x20)] {
            set(start, &[64]);
            set(len, &[32]);
        }
        cubin
    }

    #[test]
    fn a_cubin_ends_inside_its_file_wherever_its_headers_point() {
        assert!(is_image(&cubin()));
        for len in 0..cubin().len() {
            assert!(!is_image(&cubin()[..len]), "{len} bytes");
        }
        let (section, segment) = (64 + 32, 64 + 32 + 128);
        // The offsets of the tables, their counts, and the ranges of the section and the segment.
        let starts = [0x20, 0x28, section + 0x18, section + 0x20, segment + 8, segment + 0x20];
        for at in starts {
            for wrong in [cubin().len() as u64, u64::MAX] {
                let mut cubin = cubin();
                cubin[at..at + 8].copy_from_slice(&wrong.to_le_bytes());
                assert!(!is_image(&cubin), "{wrong} at {at:#x}");
            }
        }
        for at in [0x38, 0x3c] {
            let mut cubin = cubin();
            cubin[at] += 1;
            assert!(!is_image(&cubin), "one more at {at:#x}");
        }
    }
}
