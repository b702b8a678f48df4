//! Compiles the built-in kernels and lists the device library's headers, so that an installed
//! program can build kernels without a checkout.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::{env, fs};

fn main() {
    let manifest = PathBuf::from(env::var_os("CARGO_MANIFEST_DIR").expect("cargo sets it"));
    let device = manifest.join("../../device");
    for watched in ["include", "kernels", "models"] {
        println!("cargo:rerun-if-changed={}", device.join(watched).display());
    }
    compile_kernels(&device);
    list_headers(&device.join("include/serval"));
}

/// One translation unit that includes every built-in kernel: their registrations, which are static
/// constructors, come along with the list function that Rust calls.
fn compile_kernels(device: &Path) {
    cc::Build::new()
        .cpp(true)
        .std("c++17")
        .opt_level(3)
        .flag("-fno-exceptions")
        .flag("-fno-rtti")
        .flag("-fvisibility=hidden")
        .flag("-fstack-clash-protection")
        .include(device.join("include"))
        .include(device)
        .file(device.join("kernels/builtin.cpp"))
        .cpp_link_stdlib(None)
        .compile("serval_kernels");
}

/// Writes `headers.rs`: `&[(name, text)]` of every header, the text by `include_str!`.
fn list_headers(directory: &Path) {
    let mut headers: Vec<PathBuf> = fs::read_dir(directory)
        .expect("device/include/serval is part of the source")
        .map(|entry| entry.expect("a readable directory").path())
        .filter(|path| path.extension().is_some_and(|extension| extension == "h"))
        .collect();
    headers.sort();
    let mut list = String::from("&[\n");
    for path in headers {
        let path = path.canonicalize().expect("it was just listed");
        let name = path.file_name().expect("a file").to_string_lossy().into_owned();
        let _ = writeln!(list, "    ({name:?}, include_str!({:?})),", path.display().to_string());
    }
    list.push_str("]\n");
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets it"));
    fs::write(out.join("headers.rs"), list).expect("OUT_DIR is writable");
}
