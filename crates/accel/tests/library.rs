//! Building kernel libraries and loading them.

mod common;

use std::os::fd::{AsRawFd as _, FromRawFd as _, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::Command;

use accel::compile::{BuildError, BuildOptions, HEADERS, build_kernel};
use accel::kernel::KernelLibrary;
use accel::{Kernel, KernelError};
use common::kernel_source;

/// Builds a shared library without any of the checks.
fn compile_unchecked(source: &str, folder: &Path) -> PathBuf {
    let output = folder.join(source).with_extension("so");
    let include = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../device/include");
    let status = Command::new("c++")
        .args(["-shared", "-fPIC", "-I"])
        .arg(include)
        .arg("-o")
        .arg(&output)
        .arg(kernel_source(source))
        .status()
        .expect("a C++ compiler");
    assert!(status.success());
    output
}

fn open(path: &Path, name: &str) -> Result<String, KernelError> {
    Kernel::open(&format!("{}{name}", path.display())).map(|kernel| kernel.name().to_owned())
}

#[test]
fn a_built_library_has_its_kernels() {
    let folder = tempfile::tempdir().unwrap();
    let output = folder.path().join("faulty.so");
    let built =
        build_kernel(&kernel_source("faulty.cpp"), &output, &BuildOptions::default()).unwrap();
    assert_eq!(
        built.kernels,
        ["as_asked", "ask_first", "deep_stack", "early", "overrun", "param_text", "stubborn"]
    );
    assert_eq!(built.warnings, "");
    assert_eq!(open(&output, ":early").unwrap(), "early");
    let error = open(&output, "").unwrap_err().to_string();
    assert!(error.contains("has 7 kernels") && error.contains("ask_first, deep_stack"), "{error}");
    let error = open(&output, ":nonsense").unwrap_err();
    assert!(matches!(&error, KernelError::NoKernel { what, .. } if what.contains("nonsense")));
    let files: Vec<_> = std::fs::read_dir(folder.path()).unwrap().collect();
    assert_eq!(files.len(), 1, "nothing temporary is left behind");
}

#[test]
fn the_only_kernel_of_a_library_needs_no_name() {
    let folder = tempfile::tempdir().unwrap();
    let source = folder.path().join("one.cpp");
    let text = "#include <serval/kernel.h>\nSERVAL_KERNEL(one) (serval::Block& b, serval::Mqueue& q) { while (q.recv(b)) {} }\n";
    std::fs::write(&source, text).unwrap();
    let output = folder.path().join("one.so");
    let options = BuildOptions { native: true, ..BuildOptions::default() };
    build_kernel(&source, &output, &options).unwrap();
    assert_eq!(open(&output, "").unwrap(), "one");
    assert!(HEADERS.iter().any(|(name, _)| *name == "kernel.h"));
}

#[test]
fn compiler_errors_come_back_verbatim_and_leave_no_library() {
    let folder = tempfile::tempdir().unwrap();
    let (source, output) = (folder.path().join("wrong.cpp"), folder.path().join("wrong.so"));
    std::fs::write(&source, "int main( { return this_is_wrong; }\n").unwrap();
    let error = build_kernel(&source, &output, &BuildOptions::default()).unwrap_err();
    assert!(matches!(&error, BuildError::Refused { .. }));
    let text = error.to_string();
    assert!(
        text.lines().next().unwrap().contains("wrong.cpp") && text.contains("error:"),
        "{text}"
    );
    std::fs::write(&source, "int nothing;\n").unwrap();
    let error = build_kernel(&source, &output, &BuildOptions::default()).unwrap_err();
    assert!(matches!(error, BuildError::Unusable { .. }), "{error}");
    assert!(!output.exists());
    let missing = build_kernel(Path::new("no/such.cpp"), &output, &BuildOptions::default());
    assert!(matches!(missing.unwrap_err(), BuildError::Source { .. }));
    let options =
        BuildOptions { compiler: Some("no-such-compiler -x".into()), ..Default::default() };
    let none = build_kernel(&source, &output, &options).unwrap_err().to_string();
    assert!(none.contains("no-such-compiler") && none.contains("install"), "{none}");
}

#[test]
fn libraries_that_do_not_fit_are_refused_with_the_fix() {
    let folder = tempfile::tempdir().unwrap();
    let old = compile_unchecked("other_abi.cpp", folder.path());
    let error = open(&old, ":echo").unwrap_err();
    assert!(matches!(error, KernelError::Version { found: 99, .. }));
    let text = error.to_string();
    assert!(
        text.contains("was built for ABI 99") && text.contains("serval kernel build"),
        "{text}"
    );
    let half = compile_unchecked("no_list.cpp", folder.path());
    let error = open(&half, "").unwrap_err();
    assert!(matches!(error, KernelError::NoSymbol { symbol: "serval_kernel_list", .. }), "{error}");
}

/// Compiles a kernel library whose kernel is called `name`.
fn build(folder: &Path, name: &str) -> Vec<u8> {
    let source = folder.join("source.cpp");
    let text = format!(
        "#include <serval/kernel.h>\nSERVAL_KERNEL({name}) (serval::Block& b, serval::Mqueue& q) {{ while (q.recv(b)) {{}} }}\n"
    );
    std::fs::write(&source, text).unwrap();
    let output = folder.join("output.so");
    build_kernel(&source, &output, &BuildOptions::default()).unwrap();
    std::fs::read(&output).unwrap()
}

#[test]
fn two_files_are_two_libraries_whatever_they_are_called() {
    let folder = tempfile::tempdir().unwrap();
    let path = Path::new("kernel.so");
    let load = |bytes: &[u8]| {
        let mut file = tempfile::tempfile_in(folder.path()).unwrap();
        std::io::Write::write_all(&mut file, bytes).unwrap();
        // A number that no other test of this program has, so that all of them are loaded by the same name.
        // SAFETY: no pointers; the descriptor is new and has no other owner.
        let file = unsafe {
            let raw = libc::fcntl(file.as_raw_fd(), libc::F_DUPFD_CLOEXEC, 900);
            assert_eq!(raw, 900, "{}", std::io::Error::last_os_error());
            OwnedFd::from_raw_fd(raw)
        };
        KernelLibrary::load(file, path).unwrap()
    };
    let builds = [build(folder.path(), "first"), build(folder.path(), "second")];
    let first = load(&builds[0]);
    let second = load(&builds[1]);
    assert_eq!((first.names(), second.names()), (vec!["first"], vec!["second"]));
    drop(first);
    assert_eq!(load(&builds[0]).names(), ["first"]);
    assert_eq!(second.names(), ["second"]);
    let cut = KernelLibrary::check(&builds[0][..builds[0].len() / 2], path).unwrap_err();
    assert!(cut.to_string().contains("kernel.so cannot be loaded: it is truncated"), "{cut}");
}
