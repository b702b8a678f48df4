//! Compiles the built-in kernels and embeds the device library's headers, so that an installed
//! program can build kernels without the source tree.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::{env, fs};

fn main() {
    let manifest = PathBuf::from(env::var_os("CARGO_MANIFEST_DIR").expect("cargo sets it"));
    // A link to the folder of the repository, so that a packaged crate has the files as well.
    let device = manifest.join("device");
    for watched in ["include", "kernels", "models"] {
        println!("cargo:rerun-if-changed={}", device.join(watched).display());
    }
    compile_kernels(&device);
    list_headers(&device.join("include/serval"));
    embed_cuda_kernels(&device);
}

/// One translation unit that includes every built-in kernel: their registrations, which are static
/// constructors, are linked together with the list function that Rust calls.
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

/// Writes `cuda_kernels.rs`: `&[(name, image)]` of the built-in kernels, from the fatbins of `make cuda-kernels`;
/// an empty list if one is missing or older than a source. A build never needs nvcc.
fn embed_cuda_kernels(device: &Path) {
    let folder = device.join("cuda");
    println!("cargo:rerun-if-changed={}", folder.display());
    let changed = |path: &Path| fs::metadata(path).and_then(|found| found.modified()).ok();
    let sources = ["include/serval", "kernels", "models"].map(|folder| device.join(folder));
    let newest = (sources.iter().flat_map(|folder| fs::read_dir(folder).into_iter().flatten()))
        .filter_map(|entry| entry.ok().map(|entry| entry.path()))
        .filter(|path| {
            path.extension().is_some_and(|kind| ["h", "cpp", "inc"].iter().any(|k| kind == *k))
        })
        .filter_map(|path| changed(&path))
        .max();
    let fatbin = |name: &String| folder.join(format!("{name}.fatbin"));
    let names = builtin_names(device);
    let made: Vec<&String> = names.iter().filter(|name| fatbin(name).exists()).collect();
    let current = made.len() == names.len() && made.iter().all(|n| changed(&fatbin(n)) >= newest);
    // The former location of all of them.
    let former = folder.join("kernels.fatbin").exists();
    if !current && (former || !made.is_empty()) {
        println!(
            "cargo:warning=CUDA kernels are missing or older than their sources, and all are left out: run `make cuda-kernels`"
        );
    }
    let mut list = String::from("&[\n");
    for name in names.iter().filter(|_| current) {
        let path = fatbin(name).canonicalize().expect("it exists").display().to_string();
        let _ = writeln!(list, "    ({name:?}, include_bytes!({path:?})),");
    }
    list.push_str("]\n");
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets it"));
    fs::write(out.join("cuda_kernels.rs"), list).expect("OUT_DIR is writable");
}

/// The kernels that `builtin.cpp` includes.
fn builtin_names(device: &Path) -> Vec<String> {
    let all = fs::read_to_string(device.join("kernels/builtin.cpp")).expect("part of the source");
    let name =
        |line: &str| Some(line.strip_prefix("#include \"")?.strip_suffix(".cpp\"")?.to_owned());
    all.lines().filter_map(name).collect()
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
