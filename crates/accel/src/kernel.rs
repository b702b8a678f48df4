//! Kernels by name: those built in, and those of kernel libraries.
//!
//! A *kernel library* is a shared library that `serval kernel build` made from a source with
//! `SERVAL_KERNEL(name)`. It exports two C functions (`device/include/serval/entry.h`):
//! `uint32_t serval_kernel_abi_version()` and `const serval_kernel_entry* serval_kernel_list()`. The
//! built-in kernels are such a library linked into this program.
//!
//! Kernels of the `cpu` accelerator are trusted code: loading a library runs it. The checks here
//! protect from mistakes, not from malice. [`KernelLibrary::open`] maps the file at a path, which must not change
//! afterwards. [`KernelLibrary::load`] maps a descriptor, which may be of a sealed copy: a server uses the latter,
//! after loading the copy once in a process that may crash.

use std::ffi::{CStr, c_char, c_int};
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};
use mqueue::abi::{ABI_VERSION, BlockArgs, KernelEntry};

use crate::elf::{self, loader_message};

/// The function of a block.
pub(crate) type Entry = unsafe extern "C" fn(*const BlockArgs);

type AbiVersionFn = unsafe extern "C" fn() -> u32;
type ListFn = unsafe extern "C" fn() -> *const KernelEntry;

/// Maximum number of kernels of a library; a longer list counts as damaged.
const KERNELS_MAX: usize = 1024;
/// Maximum number of loaded libraries under the name of a descriptor that a load skips.
const NAMES_MAX: usize = 64;
/// Queries whether a library is loaded, without loading it.
const RTLD_NOLOAD: c_int = libc::RTLD_NOLOAD;

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
        /// The available names.
        known: String,
    },
    /// The library's file cannot be read.
    #[error(
        "kernel library {path} cannot be read ({error}): check the path, or build it with `serval kernel build`"
    )]
    NoFile {
        /// The path asked for.
        path: PathBuf,
        /// The error of the host kernel.
        error: std::io::Error,
    },
    /// The file contains kernels for GPUs.
    #[error(
        "{path} contains kernels for NVIDIA GPUs, which cannot run on a CPU accelerator: use an accelerator of kind \
         \"cuda\", or build the source with `serval kernel build -o FILE.so`"
    )]
    ForGpus {
        /// The file.
        path: PathBuf,
    },
    /// The file is not a complete shared library for this machine.
    #[error(
        "kernel library {path} cannot be loaded: it {why}; build it with `serval kernel build`"
    )]
    Damaged {
        /// The library.
        path: PathBuf,
        /// The defect, as the end of a sentence that starts with "it".
        why: String,
    },
    /// The dynamic loader rejects it, for example because symbols are undefined.
    #[error("kernel library {path} cannot be loaded: {why}")]
    Load {
        /// The library.
        path: PathBuf,
        /// The dynamic loader's error.
        why: String,
    },
    /// It was loaded in a separate process first, which reported an error or ended.
    #[error("{0}")]
    Trial(String),
    /// The check in a separate process was cancelled.
    #[error("the check of the kernel in a separate process was cancelled")]
    Abandoned,
    /// The file is a shared library, but not of kernels.
    #[error(
        "{path} is not a kernel library (it lacks `{symbol}`): build it with `serval kernel build`"
    )]
    NoSymbol {
        /// The library.
        path: PathBuf,
        /// The missing symbol.
        symbol: &'static str,
    },
    /// The library was built for another region layout.
    #[error(
        "kernel library {path} was built for ABI {found}, this engine uses ABI {ABI_VERSION}: rebuild it with `serval kernel build`"
    )]
    Version {
        /// The library.
        path: PathBuf,
        /// Its version.
        found: u32,
    },
    /// The library has no kernel of this name, or several and no name was given.
    #[error("kernel library {path} {what}: give {path}:NAME with NAME one of {known}")]
    NoKernel {
        /// The library.
        path: PathBuf,
        /// The problem.
        what: String,
        /// The available names.
        known: String,
    },
    /// The library has no kernel at all.
    #[error("kernel library {path} has no kernel: define one with SERVAL_KERNEL(name)")]
    Empty {
        /// The library.
        path: PathBuf,
    },
}

/// A kernel of the `cpu` accelerator, ready to be started. It keeps its library loaded.
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
    /// A kernel as named in a configuration: a built-in name, or the path of a library (anything
    /// with a `/` or `.so`), followed by `:NAME` if the library has several.
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

    /// A kernel of a library: `PATH` if it has one kernel, else `PATH:NAME`.
    pub fn open(path_and_name: &str) -> Result<Arc<Self>, KernelError> {
        let (path, name) = split(path_and_name);
        Arc::new(KernelLibrary::open(path)?).kernel(name)
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.name
    }

    pub(crate) fn entry(&self) -> Entry {
        self.entry
    }
}

/// Opens a library by `name`. Errors refer to it as `path`.
fn open_now(name: &Path, shown: &Path, path: &Path) -> Result<Library, KernelError> {
    // RTLD_NOW: an undefined symbol must not end the process in the middle of a message.
    // SAFETY: loading runs the library's constructors: cpu kernels are trusted code, see the module's text.
    let opened = unsafe { Library::open(Some(name), RTLD_NOW | RTLD_LOCAL) };
    opened.map_err(|error| {
        let shown = format!("{}: ", shown.display());
        let why = loader_message(&error);
        let why = why.strip_prefix(shown.as_str()).unwrap_or(&why).to_owned();
        KernelError::Load { path: path.to_owned(), why }
    })
}

/// `PATH` or `PATH:NAME`: a file, and the name of one of its kernels.
pub fn split(path_and_name: &str) -> (&Path, Option<&str>) {
    match path_and_name.rsplit_once(':') {
        Some((path, name)) if !name.contains('/') => (Path::new(path), Some(name)),
        _ => (Path::new(path_and_name), None),
    }
}

/// A loaded kernel library.
pub struct KernelLibrary {
    path: PathBuf,
    kernels: Vec<(String, Entry)>,
    _library: Library,
}

impl KernelLibrary {
    /// Loads the library at a path and reads its list of kernels. The library's static constructors run.
    pub fn open(path: &Path) -> Result<Self, KernelError> {
        let no_file = |error| KernelError::NoFile { path: path.to_owned(), error };
        // An absolute path: the dynamic loader must not search elsewhere.
        let absolute = path.canonicalize().map_err(no_file)?;
        Self::check(&std::fs::read(&absolute).map_err(no_file)?, path)?;
        let library = open_now(&absolute, path, path)?;
        Self::of(library, path)
    }

    /// Whether the content of the file at `path` is a complete shared library for this machine, according to its headers.
    pub fn check(bytes: &[u8], path: &Path) -> Result<(), KernelError> {
        let path = path.to_owned();
        if path.extension().is_some_and(|ending| ending == "fatbin" || ending == "cubin") {
            return Err(KernelError::ForGpus { path });
        }
        elf::check_library(bytes).map_err(|why| KernelError::Damaged { path, why })
    }

    /// Loads the library that `file` is open on and reads its list of kernels; `path` is its name in messages. The
    /// library's static constructors run. Two files are two libraries, even with the same name.
    pub fn load(file: OwnedFd, path: &Path) -> Result<Self, KernelError> {
        // The dynamic loader identifies libraries by the names they were opened by, and then by device and inode. One that
        // cannot be unloaded keeps its name, while the descriptor's number is reused for the next file.
        let mut held = Vec::new();
        let mut file = file;
        for _ in 0..NAMES_MAX {
            let name = PathBuf::from(format!("/proc/self/fd/{}", file.as_raw_fd()));
            let flags = RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD;
            // SAFETY: with this flag nothing is loaded and no constructor runs.
            if unsafe { Library::open(Some(&name), flags) }.is_err() {
                return Self::of(open_now(&name, &name, path)?, path);
            }
            let again = file.try_clone();
            held.push(file);
            file = again.map_err(|error| KernelError::NoFile { path: path.to_owned(), error })?;
        }
        let why = format!(
            "{NAMES_MAX} libraries that cannot be unloaded have the names of its descriptor"
        );
        Err(KernelError::Load { path: path.to_owned(), why })
    }

    /// A loaded library.
    fn of(library: Library, path: &Path) -> Result<Self, KernelError> {
        let path = path.to_owned();
        let symbol = "serval_kernel_abi_version";
        // SAFETY: a symbol of this name is the function of entry.h; its type never changes, so that
        // libraries of any version can be queried.
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
            // SAFETY: it returns the list built by the constructors.
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
        let (name, entry) = &self.kernels[choose(&self.path, &self.names(), name)?];
        let library = Some(Arc::clone(self));
        Ok(Arc::new(Kernel { name: name.clone(), entry: *entry, _library: library }))
    }
}

/// The index in `known`, the kernels of the library at `path`, of the one called `name`; without a name, of the only kernel.
pub fn choose(path: &Path, known: &[&str], name: Option<&str>) -> Result<usize, KernelError> {
    let found = match name {
        Some(name) => known.iter().position(|known| *known == name),
        None => (known.len() == 1).then_some(0),
    };
    if let Some(found) = found {
        return Ok(found);
    }
    let path = path.to_owned();
    if known.is_empty() {
        return Err(KernelError::Empty { path });
    }
    let what = match name {
        Some(name) => format!("has no kernel `{name}`"),
        None => format!("has {} kernels", known.len()),
    };
    Err(KernelError::NoKernel { path, what, known: known.join(", ") })
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
/// `entry` is null or a list of entries made by `SERVAL_KERNEL`: names are zero terminated,
/// entries are functions that take block arguments; all live as long as the result is used.
unsafe fn read_list(mut entry: *const KernelEntry) -> Vec<(String, Entry)> {
    let mut kernels = Vec::new();
    while !entry.is_null() && kernels.len() < KERNELS_MAX {
        // SAFETY: an entry of the list.
        let KernelEntry { name, entry: function, next, .. } = unsafe { entry.read() };
        if name != 0 && function != 0 {
            // SAFETY: zero terminated, by the caller's promise.
            let name = unsafe { CStr::from_ptr(name as *const c_char) };
            // SAFETY: a function of this type, by the caller's promise, and not null.
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
        for name in [
            "aes256_ctr",
            "echo",
            "scale",
            "spin",
            "delay",
            "sockperf",
            "lenet",
            "faces",
            "matmul",
            "stream_echo",
        ] {
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
        assert!(matches!(wrong, KernelError::Damaged { .. }), "{wrong}");
    }
}
