//! Kernel files: private copies that are checked before anything runs them.
//!
//! A kernel file is copied when it is opened ([`PrivateFile`]); the copy is what is checked and what runs, so a rebuild
//! or a truncation at the same path touches nothing that runs. Headers and sizes are checked first. A library for host
//! cores is then loaded once in a process of its own, which may crash (`trial`), before it is loaded into this one.
//!
//! The process of a trial is `serval` itself, started again. A program that uses this crate as a library names an
//! executable of `serval` with [`set_trial_program`]; without one, libraries are loaded untried.
//!
//! A file that is opened again while it is still open elsewhere is the same [`KernelFile`] as long as its content is
//! the same: services share a library, as if they were linked with it, and a reload detects a rebuild.

mod trial;

use std::any::Any;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, Weak};

use accel::cuda::check_image;
use accel::kernel::{KernelLibrary, choose, split};
use accel::{AccelError, Kernel, KernelError};
use sys::{CopyError, PrivateFile};

pub use trial::{Limits, answer, set_trial_program};

/// Largest kernel file in bytes.
pub const FILE_BYTES_MAX: u64 = 1 << 30;

/// What a kernel file is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Target {
    /// Host cores: a shared library.
    Host,
    /// GPUs: a fatbin or cubin.
    Gpu,
}

/// A private copy of a kernel file whose headers are right.
#[derive(Debug)]
pub struct KernelFile {
    path: PathBuf,
    target: Target,
    copy: Arc<PrivateFile>,
    /// What a trial found: the kernels of the library.
    tried: OnceLock<Vec<String>>,
    loaded: Mutex<Weak<KernelLibrary>>,
}

/// All open files.
static OPEN: Mutex<Vec<Weak<KernelFile>>> = Mutex::new(Vec::new());

/// The file that a configured kernel names, if it is not a built-in one, and the name of the kernel in it.
pub fn named(kernel: &str) -> Option<(&Path, Option<&str>)> {
    let is_file = ["/", ".so", ".fatbin", ".cubin"].iter().any(|mark| kernel.contains(mark));
    is_file.then(|| split(kernel))
}

impl KernelFile {
    /// Copies the file at `path` and checks its headers.
    pub fn open(path: &Path, target: Target) -> Result<Arc<Self>, AccelError> {
        let copy =
            PrivateFile::copy(path, FILE_BYTES_MAX).map_err(|error| unreadable(path, error))?;
        Self::received(path, target, Arc::new(copy))
    }

    /// Takes a copy that another process may have made of the file at `path`, and checks its headers.
    pub(crate) fn received(
        path: &Path,
        target: Target,
        copy: Arc<PrivateFile>,
    ) -> Result<Arc<Self>, AccelError> {
        let mut open = OPEN.lock().unwrap_or_else(PoisonError::into_inner);
        open.retain(|file| file.strong_count() > 0);
        let same = |file: &Arc<Self>| {
            let is_same = file.copy.bytes() == copy.bytes() || mutants::on("keep_rebuilt_kernel");
            file.path == path && file.target == target && is_same
        };
        if let Some(file) = open.iter().filter_map(Weak::upgrade).find(same) {
            return Ok(file);
        }
        match target {
            Target::Host => KernelLibrary::check(copy.bytes(), path)?,
            Target::Gpu => check_image(copy.bytes(), path)?,
        }
        let (tried, loaded) = (OnceLock::new(), Mutex::default());
        let file = Arc::new(Self { path: path.to_owned(), target, copy, tried, loaded });
        open.push(Arc::downgrade(&file));
        Ok(file)
    }

    /// Its path when it was opened.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The copy.
    pub fn copy(&self) -> &PrivateFile {
        &self.copy
    }

    /// Loads a library in a process of its own, once, and checks that it has the kernel `name`, or only one. A file
    /// for GPUs passes, and so does a library if no program is known to try it. `cancelled` is called many times a
    /// second and ends the check when it returns true.
    pub fn check(
        &self,
        name: Option<&str>,
        cancelled: &mut dyn FnMut() -> bool,
    ) -> Result<(), KernelError> {
        if self.target == Target::Gpu {
            return Ok(());
        }
        let Some(names) = self.tried(&Limits::default(), cancelled)? else { return Ok(()) };
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        choose(&self.path, &names, name).map(drop)
    }

    /// The kernels of a library that was loaded in a process of its own; `None` where no program is known for it.
    /// `cancelled` as above.
    pub fn tried(
        &self,
        limits: &Limits,
        cancelled: &mut dyn FnMut() -> bool,
    ) -> Result<Option<&[String]>, KernelError> {
        if let Some(names) = self.tried.get() {
            return Ok(Some(names));
        }
        let Some(names) = trial::run(&self.path, &self.copy, limits, cancelled)? else {
            return Ok(None);
        };
        Ok(Some(self.tried.get_or_init(|| names)))
    }

    /// The kernel `name` of a library, or its only one, ready to run in this process; [`Self::check`] has passed, here or
    /// in the process that passed the copy.
    pub fn load(&self, name: Option<&str>) -> Result<Arc<Kernel>, KernelError> {
        let mut loaded = self.loaded.lock().unwrap_or_else(PoisonError::into_inner);
        let library = match loaded.upgrade() {
            Some(library) => library,
            None => {
                let file = std::os::fd::AsFd::as_fd(&self.copy).try_clone_to_owned();
                let file =
                    file.map_err(|error| KernelError::NoFile { path: self.path.clone(), error })?;
                let library = Arc::new(KernelLibrary::load(file, &self.path)?);
                *loaded = Arc::downgrade(&library);
                library
            }
        };
        library.kernel(name)
    }
}

fn unreadable(path: &Path, error: CopyError) -> KernelError {
    let error = match error {
        CopyError::Read(error) | CopyError::Memory(error) => error,
        other => std::io::Error::other(other.to_string()),
    };
    KernelError::NoFile { path: path.to_owned(), error }
}

/// A kernel for host cores as a configuration names it: built in, or of a file that is copied, checked and tried.
pub fn find(kernel: &str) -> Result<Arc<Kernel>, AccelError> {
    match named(kernel) {
        Some((path, name)) => {
            let file = KernelFile::open(path, Target::Host)?;
            file.check(name, &mut || false)?;
            Ok(file.load(name)?)
        }
        None => Ok(Kernel::builtin(kernel)?),
    }
}

/// Opens, checks and tries a kernel file, for `Overrides::inspect` of a configuration.
pub fn inspect(
    path: &Path,
    name: Option<&str>,
    target: Target,
    opened: &mut Vec<Arc<dyn Any>>,
) -> Result<(), String> {
    let file = KernelFile::open(path, target).map_err(|error| error.to_string())?;
    opened.push(file.clone());
    file.check(name, &mut || false).map_err(|error| error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Any library of this machine.
    fn library() -> Vec<u8> {
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        let mut paths = maps.lines().filter_map(|line| line.split_whitespace().nth(5));
        let path = paths.find(|path| path.contains("/libc.so")).expect("libc is mapped");
        std::fs::read(path).unwrap()
    }

    #[test]
    fn a_file_with_another_content_is_another_one() {
        let path = Path::new("/elsewhere/kernel.so");
        let open = |bytes: &[u8]| {
            let copy = Arc::new(PrivateFile::of("kernel", bytes).unwrap());
            KernelFile::received(path, Target::Host, copy).unwrap()
        };
        let mut bytes = library();
        let (first, same) = (open(&bytes), open(&bytes));
        assert!(Arc::ptr_eq(&first, &same));
        // As long, and of the same name.
        *bytes.last_mut().unwrap() ^= 1;
        let rebuilt = open(&bytes);
        assert!(!Arc::ptr_eq(&first, &rebuilt) && rebuilt.copy().bytes() == bytes);
    }
}
