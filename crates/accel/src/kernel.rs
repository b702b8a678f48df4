//! Kernels by name: those built in, and those of kernel libraries.
//!
//! A *kernel library* is a shared library that `serval kernel build` made from a source with
//! `SERVAL_KERNEL(name)`. It exports two C functions (`device/include/serval/entry.h`):
//! `uint32_t serval_kernel_abi_version()` and `const serval_kernel_entry* serval_kernel_list()`. The
//! built-in kernels are such a library linked into this program.
//!
//! Kernels of the `cpu` accelerator are trusted code: loading a library runs it. What is checked here
//! protects from mistakes, not from malice.

use std::ffi::{CStr, c_char};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};
use mqueue::abi::{ABI_VERSION, BlockArgs, KernelEntry};

/// What a block runs.
pub(crate) type Entry = unsafe extern "C" fn(*const BlockArgs);

type AbiVersionFn = unsafe extern "C" fn() -> u32;
type ListFn = unsafe extern "C" fn() -> *const KernelEntry;

/// Most kernels of one library; a longer list is taken for a damaged one.
const KERNELS_MAX: usize = 1024;

unsafe extern "C" {
    fn serval_kernel_abi_version() -> u32;
    fn serval_kernel_list() -> *const KernelEntry;
}

/// Why a kernel could not be found.
#[derive(Debug, thiserror::Error)]
pub enum KernelError {
    /// No built-in kernel has this name.
    #[error(
        "no kernel `{name}` is built in: use one of {known}, or give the path of a kernel library"
    )]
    NoBuiltin {
        /// The name asked for.
        name: String,
        /// The names there are.
        known: String,
    },
    /// The library's file is not there.
    #[error(
        "kernel library {path} cannot be read ({error}): check the path, or build it with `serval kernel build`"
    )]
    NoFile {
        /// The path asked for.
        path: PathBuf,
        /// What the host kernel said.
        error: std::io::Error,
    },
    /// The file holds kernels for GPUs.
    #[error(
        "{path} holds kernels for NVIDIA GPUs, and this accelerator is none: give the service one of kind \
         \"cuda\", or build the source with `serval kernel build -o FILE.so`"
    )]
    ForGpus {
        /// The file.
        path: PathBuf,
    },
    /// The file is not a shared library of this machine, or needs symbols that are not there.
    #[error("kernel library {path} cannot be loaded: {error}")]
    Load {
        /// The library.
        path: PathBuf,
        /// What the dynamic loader said.
        error: libloading::Error,
    },
    /// The file is a shared library, but not of kernels.
    #[error(
        "{path} is no kernel library (it lacks `{symbol}`): build it with `serval kernel build`"
    )]
    NoSymbol {
        /// The library.
        path: PathBuf,
        /// What it lacks.
        symbol: &'static str,
    },
    /// The library was built against another layout of regions.
    #[error(
        "kernel library {path} was built for ABI {found}, this engine speaks {ABI_VERSION}: rebuild it with `serval kernel build`"
    )]
    Version {
        /// The library.
        path: PathBuf,
        /// Its version.
        found: u32,
    },
    /// The library has no kernel of this name, or several and none was named.
    #[error("kernel library {path} {what}: give {path}:NAME with NAME one of {known}")]
    NoKernel {
        /// The library.
        path: PathBuf,
        /// What is wrong.
        what: String,
        /// The names there are.
        known: String,
    },
    /// The library has no kernel at all.
    #[error("kernel library {path} has no kernel: define one with SERVAL_KERNEL(name)")]
    Empty {
        /// The library.
        path: PathBuf,
    },
}

/// A kernel of the `cpu` accelerator, ready to be started. Its library stays loaded as long as it lives.
pub struct Kernel {
    name: String,
    entry: Entry,
    _library: Option<Arc<KernelLibrary>>,
}

impl std::fmt::Debug for Kernel {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Kernel").field("name", &self.name).finish_non_exhaustive()
    }
}

impl Kernel {
    /// A kernel as a configuration names it: a built-in name, or the path of a library (anything
    /// with a `/` or `.so`), followed by `:NAME` when the library has several.
    pub fn find(kernel: &str) -> Result<Arc<Self>, KernelError> {
        if kernel.contains('/') || kernel.contains(".so") {
            Self::open(kernel)
        } else {
            Self::builtin(kernel)
        }
    }

    /// The built-in kernel of this name.
    pub fn builtin(name: &str) -> Result<Arc<Self>, KernelError> {
        let found = builtin_list().into_iter().find(|(known, _)| known == name);
        match found {
            Some((name, entry)) => Ok(Arc::new(Self { name, entry, _library: None })),
            None => Err(KernelError::NoBuiltin {
                name: name.to_owned(),
                known: Self::builtins().join(", "),
            }),
        }
    }

    /// Names of the built-in kernels, in alphabetical order.
    pub fn builtins() -> Vec<String> {
        builtin_list().into_iter().map(|(name, _)| name).collect()
    }

    /// A kernel of a library: `PATH` when it has one kernel, else `PATH:NAME`.
    pub fn open(path_and_name: &str) -> Result<Arc<Self>, KernelError> {
        let (path, name) = match path_and_name.rsplit_once(':') {
            Some((path, name)) if !name.contains('/') => (path, Some(name)),
            _ => (path_and_name, None),
        };
        Arc::new(KernelLibrary::open(Path::new(path))?).kernel(name)
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.name
    }

    pub(crate) fn entry(&self) -> Entry {
        self.entry
    }
}

/// A loaded kernel library.
pub struct KernelLibrary {
    path: PathBuf,
    kernels: Vec<(String, Entry)>,
    _library: Library,
}

impl KernelLibrary {
    /// Loads a library and reads its list of kernels. The library's static constructors run.
    pub fn open(path: &Path) -> Result<Self, KernelError> {
        // An absolute path: the dynamic loader must not search elsewhere.
        let absolute = path
            .canonicalize()
            .map_err(|error| KernelError::NoFile { path: path.to_owned(), error })?;
        let path = path.to_owned();
        if path.extension().is_some_and(|ending| ending == "fatbin" || ending == "cubin") {
            return Err(KernelError::ForGpus { path });
        }
        // Bound now: a symbol that is nowhere must not end the process in the middle of a message.
        // SAFETY: loading runs the library's constructors: cpu kernels are trusted code, as the
        // module's text says.
        let library = match unsafe { Library::open(Some(&absolute), RTLD_NOW | RTLD_LOCAL) } {
            Ok(library) => library,
            Err(error) => return Err(KernelError::Load { path, error }),
        };
        let symbol = "serval_kernel_abi_version";
        // SAFETY: a symbol of this name is the function of entry.h; its type never changes, so that
        // libraries of any version can be asked.
        let found = match unsafe { library.get::<AbiVersionFn>(symbol) } {
            // SAFETY: it takes nothing and returns a constant.
            Ok(version) => unsafe { version() },
            Err(_) => return Err(KernelError::NoSymbol { path, symbol }),
        };
        if found != ABI_VERSION {
            return Err(KernelError::Version { path, found });
        }
        let symbol = "serval_kernel_list";
        // SAFETY: as above, for this version of the interface.
        let list = match unsafe { library.get::<ListFn>(symbol) } {
            // SAFETY: it returns the list that the constructors have built.
            Ok(list) => unsafe { list() },
            Err(_) => return Err(KernelError::NoSymbol { path, symbol }),
        };
        // SAFETY: the list of a library of this version, which stays loaded with `Self`.
        let kernels = unsafe { read_list(list) };
        Ok(Self { path, kernels, _library: library })
    }

    /// Names of its kernels, in alphabetical order.
    pub fn names(&self) -> Vec<&str> {
        self.kernels.iter().map(|(name, _)| name.as_str()).collect()
    }

    /// The kernel of this name; without one, its only kernel.
    pub fn kernel(self: &Arc<Self>, name: Option<&str>) -> Result<Arc<Kernel>, KernelError> {
        let path = || self.path.clone();
        let found = match name {
            Some(name) => self.kernels.iter().find(|(known, _)| known == name),
            None if self.kernels.len() == 1 => self.kernels.first(),
            None => None,
        };
        if let Some((name, entry)) = found {
            let library = Some(Arc::clone(self));
            return Ok(Arc::new(Kernel { name: name.clone(), entry: *entry, _library: library }));
        }
        if self.kernels.is_empty() {
            return Err(KernelError::Empty { path: path() });
        }
        let what = match name {
            Some(name) => format!("has no kernel `{name}`"),
            None => format!("has {} kernels", self.kernels.len()),
        };
        Err(KernelError::NoKernel { path: path(), what, known: self.names().join(", ") })
    }
}

fn builtin_list() -> Vec<(String, Entry)> {
    // SAFETY: both functions are linked in from kernels/builtin.cpp, take nothing and return
    // constants; the list's entries live as long as the program.
    unsafe {
        assert_eq!(
            serval_kernel_abi_version(),
            ABI_VERSION,
            "the kernels were built with this crate"
        );
        read_list(serval_kernel_list())
    }
}

/// # Safety
///
/// `entry` is null or a list of entries as `SERVAL_KERNEL` makes them: names are zero terminated,
/// entries are functions that take block arguments; all stay as long as the result is used.
unsafe fn read_list(mut entry: *const KernelEntry) -> Vec<(String, Entry)> {
    let mut kernels = Vec::new();
    while !entry.is_null() && kernels.len() < KERNELS_MAX {
        // SAFETY: an entry of the list.
        let KernelEntry { name, entry: function, next, .. } = unsafe { entry.read() };
        if name != 0 && function != 0 {
            // SAFETY: zero terminated, by the caller's word.
            let name = unsafe { CStr::from_ptr(name as *const c_char) };
            // SAFETY: a function of this type, by the caller's word, and not null.
            let function = unsafe { std::mem::transmute::<usize, Entry>(function as usize) };
            kernels.push((name.to_string_lossy().into_owned(), function));
        }
        entry = next as *const KernelEntry;
    }
    kernels.sort_by(|a, b| a.0.cmp(&b.0));
    kernels
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn built_in_kernels_are_found_by_name() {
        let names = Kernel::builtins();
        for name in ["echo", "scale", "spin", "delay", "sockperf", "lenet", "faces"] {
            assert!(names.iter().any(|known| known == name), "{name} is missing in {names:?}");
            assert_eq!(Kernel::find(name).unwrap().name(), name);
        }
        let error = Kernel::builtin("nonsense").unwrap_err().to_string();
        assert!(error.contains("`nonsense`") && error.contains("echo, faces"), "{error}");
    }

    #[test]
    fn a_path_that_is_no_library_is_refused_with_the_reason() {
        let missing = Kernel::find("./no/such/library.so:echo").unwrap_err();
        assert!(matches!(missing, KernelError::NoFile { .. }));
        let text = tempfile::Builder::new().suffix(".so").tempfile().unwrap();
        std::fs::write(text.path(), "not an ELF file").unwrap();
        let wrong = Kernel::open(text.path().to_str().unwrap()).unwrap_err();
        assert!(matches!(wrong, KernelError::Load { .. }), "{wrong}");
    }
}
