//! Locates CUDA's libraries and headers for a compiler without a driver program.
//!
//! There are three kinds of installations: the toolkit (`/usr/local/cuda`, `$CUDA_HOME`), Debian's packages, and Python's
//! (`pip install nvidia-cuda-nvrtc`: `nvidia/cu13/lib`; for CUDA 12 a folder per package, `nvidia/cuda_nvrtc/lib`).

use std::path::{Path, PathBuf};
use std::{env, fs};

/// Library folders outside the dynamic linker's search path, best first.
pub(super) fn library_folders() -> Vec<PathBuf> {
    let mut folders: Vec<PathBuf> = homes().iter().map(|home| home.join("lib64")).collect();
    folders.extend(packages().map(|package| package.join("lib")));
    folders.push("/usr/local/cuda/lib64".into());
    folders
}

/// The library of this name with the highest number after `.so.`, such as `libnvrtc.so.13`, if it is at least `from`.
pub(super) fn newest(folder: &Path, name: &str, from: u32) -> Option<PathBuf> {
    let prefix = format!("{name}.so.");
    let numbered = entries(folder).filter_map(|path| {
        let number = path.file_name()?.to_str()?.strip_prefix(&prefix)?.parse::<u32>().ok()?;
        Some((number, path))
    });
    numbered.max().filter(|(number, _)| *number >= from).map(|(_, path)| path)
}

/// Folders that may hold a library that belongs to one in `folder`.
pub(super) fn beside(folder: &Path) -> Vec<PathBuf> {
    // Python's packages for CUDA 12 have a folder each.
    vec![folder.to_owned(), folder.join("../../nvfatbin/lib")]
}

/// Folders that may hold the headers of a library in `folder`, best first.
pub(super) fn header_folders(folder: &Path) -> Vec<PathBuf> {
    let mut roots = vec![
        folder.join("../include"),
        folder.join("../../cuda_cccl/include"),
        folder.join("../../cuda_runtime/include"),
    ];
    roots.extend(homes().iter().map(|home| home.join("include")));
    roots.extend(["/usr/local/cuda/include", "/usr/include"].map(PathBuf::from));
    with_libcu(roots.into_iter())
}

/// Header folders among Python's packages, which may be installed although the library came from elsewhere.
pub(super) fn package_header_folders() -> Vec<PathBuf> {
    with_libcu(packages().map(|package| package.join("include")))
}

/// The existing ones. CUDA 13 has libcu++ in a folder of its own.
fn with_libcu(roots: impl Iterator<Item = PathBuf>) -> Vec<PathBuf> {
    let all = roots.flat_map(|root| [root.join("cccl"), root]);
    all.filter_map(|folder| folder.canonicalize().ok()).collect()
}

fn homes() -> Vec<PathBuf> {
    ["CUDA_HOME", "CUDA_PATH"].iter().filter_map(env::var_os).map(PathBuf::from).collect()
}

/// The folders of CUDA's packages for Python.
fn packages() -> impl Iterator<Item = PathBuf> {
    python_packages().into_iter().flat_map(|packages| entries(&packages.join("nvidia")))
}

/// The packages of the active virtual environment, of the Python on the PATH, and of user and machine.
fn python_packages() -> Vec<PathBuf> {
    let path = env::var_os("PATH").unwrap_or_default();
    let on_path = env::split_paths(&path).find(|folder| folder.join("python3").is_file());
    let prefixes = [
        env::var_os("VIRTUAL_ENV").map(PathBuf::from),
        on_path.and_then(|folder| folder.parent().map(Path::to_owned)),
        env::var_os("HOME").map(|home| Path::new(&home).join(".local")),
        Some("/usr/local".into()),
    ];
    let libraries = prefixes.into_iter().flatten().map(|prefix| prefix.join("lib"));
    let pythons = libraries.flat_map(|library| entries(&library)).filter(|path| {
        path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("python3"))
    });
    pythons.flat_map(|python| ["site-packages", "dist-packages"].map(|p| python.join(p))).collect()
}

/// The entries of a folder, sorted; none if it cannot be read.
fn entries(folder: &Path) -> impl Iterator<Item = PathBuf> + use<> {
    let found = fs::read_dir(folder).into_iter().flatten().flatten();
    let mut paths: Vec<PathBuf> = found.map(|entry| entry.path()).collect();
    paths.sort();
    paths.into_iter()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_newest_of_several_libraries_is_taken() {
        let folder = tempfile::tempdir().unwrap();
        for name in ["libnvrtc.so.9", "libnvrtc.so.13", "libnvrtc.so.13.0.88", "libnvrtc.so.x"] {
            fs::write(folder.path().join(name), "").unwrap();
        }
        fs::write(folder.path().join("libnvrtc-builtins.so.99"), "").unwrap();
        let newest = |name, from| newest(folder.path(), name, from);
        assert_eq!(newest("libnvrtc", 12), Some(folder.path().join("libnvrtc.so.13")));
        assert_eq!(newest("libnvrtc", 14), None);
        assert_eq!(newest("libnvfatbin", 0), None);
    }

    #[test]
    fn headers_are_found_beside_the_library_in_both_forms_of_the_packages() {
        let root = tempfile::tempdir().unwrap();
        let root = root.path().canonicalize().unwrap();
        for folder in ["cu13/lib", "cu13/include/cccl", "cuda_nvrtc/lib", "cuda_cccl/include"] {
            fs::create_dir_all(root.join(folder)).unwrap();
        }
        let found = header_folders(&root.join("cu13/lib"));
        assert_eq!(found[..2], [root.join("cu13/include/cccl"), root.join("cu13/include")]);
        assert_eq!(header_folders(&root.join("cuda_nvrtc/lib"))[0], root.join("cuda_cccl/include"));
    }
}
