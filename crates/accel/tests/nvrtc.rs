//! Building kernels for GPUs with the compiler library: the calls, and the errors if something is
//! missing. `kernels/fake_nvrtc.cpp` replaces the library; `src/cuda/kernels.rs` tests the output of the real one.

mod common;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use accel::compile::{
    BuildError, BuildOptions, Built, NvrtcError, Target, build_kernel, cuda_compiler,
};
use common::kernel_source;

/// CUDA as installed: `lib/libnvrtc.so.99`, `lib/libnvfatbin.so.99` and libcu++.
struct Cuda(tempfile::TempDir);

impl Cuda {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        for part in ["lib", "include/cuda/std"] {
            fs::create_dir_all(folder.path().join(part)).unwrap();
        }
        let cuda = Self(folder);
        cuda.compile("99, 0");
        fs::copy(cuda.library(), cuda.path("lib/libnvfatbin.so.99")).unwrap();
        for header in ["include/cuda/atomic", "include/cuda/std/array"] {
            fs::write(cuda.path(header), "").unwrap();
        }
        cuda
    }

    /// Compiles the library with this version.
    fn compile(&self, version: &str) {
        let built = Command::new("c++")
            .args(["-std=c++17", "-shared", "-fPIC", &format!("-DVERSION={version}"), "-o"])
            .args([&self.library(), &kernel_source("fake_nvrtc.cpp")])
            .status();
        assert!(built.expect("a C++ compiler").success());
    }

    fn path(&self, part: &str) -> PathBuf {
        self.0.path().canonicalize().unwrap().join(part)
    }

    fn library(&self) -> PathBuf {
        self.path("lib/libnvrtc.so.99")
    }

    /// Builds a source with this text, and returns the output as text.
    fn build(
        &self,
        text: &str,
        output: &str,
        gpus: &[&str],
    ) -> Result<(Built, String), BuildError> {
        self.build_with(&self.library().display().to_string(), text, output, gpus)
    }

    /// The same where the compiler is named like this.
    fn build_with(
        &self,
        compiler: &str,
        text: &str,
        output: &str,
        gpus: &[&str],
    ) -> Result<(Built, String), BuildError> {
        let (source, output) = (self.path("k.cu"), self.path(output));
        fs::write(&source, text).unwrap();
        let options = BuildOptions {
            target: Target::Cuda(gpus.iter().map(|gpu| (*gpu).to_owned()).collect()),
            compiler: Some(compiler.to_owned()),
            include: vec!["/other's".into()],
            arguments: vec!["-last".into()],
            ..BuildOptions::default()
        };
        let built = build_kernel(&source, &output, &options)?;
        Ok((built, fs::read_to_string(output).unwrap()))
    }
}

fn sentence(result: Result<(Built, String), BuildError>) -> String {
    result.unwrap_err().to_string()
}

#[test]
fn a_source_becomes_a_fatbin_for_all_gpus_or_a_cubin_for_one() {
    let cuda = Cuda::new();
    let (built, text) = cuda.build("warn", "k.fatbin", &["sm_80", "sm_90a"]).unwrap();
    assert_eq!(built.kernels, ["a", "b"]);
    assert_eq!(built.warnings, "a warning", "once, though there are two compilations");
    assert!(built.command.starts_with("NVRTC 99.0, /"), "{}", built.command);
    let parts: Vec<&str> = text.split("; ").collect();
    assert_eq!(parts.len(), 4, "{text}");
    assert_eq!((parts[0], parts[3]), ("fatbin", "PTX 90a ends"));
    assert!(parts[1].starts_with("80 ") && parts[1].contains("code -arch=sm_80 -std=c++17 "));
    assert!(parts[2].starts_with("90a ") && parts[2].contains("code -arch=sm_90a "), "{text}");
    // Headers of the device library, those of the source, those that were named, CUDA's; then what else was asked.
    let source = cuda.path("k.cu");
    let [own, named, libcu] =
        [source.parent().unwrap(), "/other's".as_ref(), &cuda.path("include")]
            .map(|folder| parts[1].find(&format!("-I{} ", folder.display())));
    assert!(own.is_some() && own < named && named < libcu, "{text}");
    assert!(parts[1].ends_with(" -last"), "{text}");

    let (built, text) = cuda.build("", "k.cubin", &["sm_90"]).unwrap();
    assert!(text.starts_with("code -arch=sm_90 ") && built.warnings.is_empty(), "{text}");
    for gpus in [&["sm_80", "sm_90"][..], &[]] {
        let refused = cuda.build("", "k.cubin", gpus);
        assert!(matches!(refused, Err(BuildError::OneGpu)), "{gpus:?}");
    }
}

#[test]
fn a_library_is_named_with_arguments_and_with_spaces_in_its_path() {
    let cuda = Cuda::new();
    let compiler = format!("{}  -lineinfo -G", cuda.library().display());
    let (_, text) = cuda.build_with(&compiler, "", "k.cubin", &["sm_90"]).unwrap();
    assert!(text.ends_with(" -lineinfo -G -last"), "{text}");

    fs::rename(cuda.path("lib"), cuda.path("my lib")).unwrap();
    let compiler = cuda.path("my lib/libnvrtc.so.99").display().to_string();
    let (built, _) = cuda.build_with(&compiler, "", "k.cubin", &["sm_90"]).unwrap();
    assert!(built.command.contains("/my lib/"), "{}", built.command);
}

#[test]
fn a_library_that_is_too_old_is_refused() {
    let cuda = Cuda::new();
    cuda.compile("12, 7");
    let text = sentence(cuda.build("", "k.cubin", &["sm_90"]));
    assert!(text.ends_with("is NVRTC 12.7: use the one of CUDA 12.8 or later"), "{text}");
    // Another one, because a library that was loaded stays.
    let cuda = Cuda::new();
    cuda.compile("12, 8");
    cuda.build("", "k.cubin", &["sm_90"]).unwrap();
}

#[test]
fn missing_parts_are_found_among_pythons_packages() {
    // Runs this test again, in an environment where CUDA's folder has no libcu++ and no libnvfatbin.
    const AGAIN: &str = "SERVAL_TEST_AGAIN";
    if std::env::var_os(AGAIN).is_some() {
        let (compiler, lacks) = cuda_compiler().unwrap();
        println!("\n{compiler} lacks {lacks:?}");
        return;
    }
    let cuda = Cuda::new();
    let package = cuda.path("lib/python3.11/site-packages/nvidia/cu13");
    for folder in [package.join("lib"), package.join("include/cccl/cuda"), cuda.path("home/lib64")]
    {
        fs::create_dir_all(folder).unwrap();
    }
    let packer = |number: u32| package.join(format!("lib/libnvfatbin.so.{number}"));
    fs::rename(cuda.path("include/cuda/atomic"), package.join("include/cccl/cuda/atomic")).unwrap();
    fs::rename(cuda.path("lib/libnvfatbin.so.99"), packer(98)).unwrap();
    let home = cuda.path("home/lib64");
    fs::rename(cuda.library(), home.join("libnvrtc.so.99")).unwrap();
    let found = || {
        let mut test = Command::new(std::env::current_exe().unwrap());
        test.args(["--nocapture", "found_among_pythons_packages"]).env(AGAIN, "1");
        test.env_remove("NVCC").env_remove("CUDA_PATH").env("CUDA_HOME", cuda.path("home"));
        test.env("PATH", &home).env("HOME", &home).env("VIRTUAL_ENV", cuda.path(""));
        let done = test.output().unwrap();
        String::from_utf8(done.stdout).unwrap()
    };
    let text = found();
    if !text.contains(&home.display().to_string()) {
        println!("SKIPPED: this machine has a compiler for GPUs: {text}");
        return;
    }
    assert!(text.contains("NVRTC 99.0") && text.contains("lacks Some(NoPacker"), "{text}");
    // Another that lacks nothing.
    cuda.compile("98, 0");
    fs::rename(cuda.library(), package.join("lib/libnvrtc.so.98")).unwrap();
    let text = found();
    assert!(text.contains("NVRTC 98.0") && text.contains("lacks None"), "{text}");
    fs::rename(packer(98), packer(99)).unwrap();
    let text = found();
    assert!(text.contains("NVRTC 99.0") && text.contains("lacks None"), "{text}");
}

#[test]
fn a_rejected_source_is_reported_with_the_log() {
    let cuda = Cuda::new();
    let refused = cuda.build("refuse", "k.fatbin", &["sm_80", "sm_90"]);
    assert!(
        matches!(&refused, Err(BuildError::Refused { output, .. }) if output == "error: refused")
    );
    let text = sentence(refused);
    assert!(text.contains("k.cu:\nerror: refused\nIt was run as: NVRTC 99.0"), "{text}");
    assert!(!cuda.path("k.fatbin").exists());
    let text = sentence(cuda.build("refuse header", "k.fatbin", &["sm_80"]));
    assert!(text.contains("\"x.h\"\nNVRTC does not see the host's headers"), "{text}");
    let text = sentence(cuda.build("none", "k.fatbin", &["sm_80"]));
    assert!(text.contains("has no kernel: define one with SERVAL_KERNEL(name)"), "{text}");
    let text = sentence(cuda.build("a\0b", "k.fatbin", &["sm_80"]));
    assert!(text.contains("k.cu:\nit contains a zero byte"), "{text}");
    // Those by default, of which this version lacks one.
    let text = sentence(cuda.build("", "k.fatbin", &[]));
    assert!(text.contains("NVRTC 99.0 does not support sm_100, only sm_80, sm_90"), "{text}");
}

#[test]
fn a_missing_part_is_reported_with_its_package() {
    let cuda = Cuda::new();
    fs::remove_file(cuda.path("lib/libnvfatbin.so.99")).unwrap();
    let text = sentence(cuda.build("", "k.fatbin", &["sm_90"]));
    assert!(text.contains("`pip install nvidia-nvfatbin`") && text.contains(".cubin"), "{text}");
    cuda.build("", "k.cubin", &["sm_90"]).unwrap();

    fs::remove_file(cuda.path("include/cuda/atomic")).unwrap();
    match cuda.build("", "k.cubin", &["sm_90"]) {
        Ok((_, text)) => {
            let mut folders = text.split(' ').filter_map(|option| option.strip_prefix("-I"));
            let found = folders.find(|folder| Path::new(folder).join("cuda/atomic").exists());
            println!("SKIPPED in part: this machine has libcu++ in {}", found.expect("libcu++"));
        }
        refused => {
            let text = sentence(refused);
            assert!(text.contains("`pip install nvidia-cuda-cccl`"), "{text}");
            assert!(text.contains(&cuda.path("include").display().to_string()), "{text}");
        }
    }

    // Another one, because a library that was loaded stays.
    let cuda = Cuda::new();
    fs::remove_file(cuda.library()).unwrap();
    let gone = cuda.build("", "k.cubin", &["sm_90"]);
    assert!(matches!(&gone, Err(BuildError::Nvrtc(NvrtcError::NotLoaded { .. }))));
    assert!(sentence(gone).contains("`pip install nvidia-cuda-nvrtc`"));
    // A library that is something else.
    let source = cuda.path("empty.cpp");
    fs::write(&source, "").unwrap();
    let mut other = Command::new("c++");
    other.args(["-shared", "-fPIC", "-o"]).args([cuda.library(), source]);
    assert!(other.status().unwrap().success());
    let text = sentence(cuda.build("", "k.cubin", &["sm_90"]));
    assert!(text.contains("has no `nvrtcVersion`: use the one of CUDA 12.8 or later"), "{text}");
}

#[test]
fn without_any_compiler_the_error_names_packages() {
    match cuda_compiler() {
        _ if std::env::var_os("NVCC").is_some() => println!("SKIPPED: $NVCC names a compiler"),
        Ok((compiler, _)) => println!("SKIPPED: this machine has {compiler}"),
        Err(error) => {
            let text = error.to_string();
            assert!(text.contains("tried nvcc, ") && text.contains("libnvrtc.so.13"), "{text}");
            assert!(text.contains("pip install nvidia-cuda-nvrtc "), "{text}");
        }
    }
}
