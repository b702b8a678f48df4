//! Building kernel libraries: what `serval kernel build FILE.cpp` does.
//!
//! The device library's headers are part of this program and are written to a temporary folder for the
//! compiler, so that a kernel always matches the engine it was built with and no checkout is needed.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, fs, io};

use crate::kernel::{KernelError, KernelLibrary};

/// The device library's headers: name and text.
pub const HEADERS: &[(&str, &str)] = include!(concat!(env!("OUT_DIR"), "/headers.rs"));

/// What every kernel is compiled with: no exceptions, because a block's frames are left by returning
/// only; every page of a large frame touched, because a stack has one guard page.
const FLAGS: &[&str] = &[
    "-x",
    "c++",
    "-std=c++17",
    "-O3",
    "-fPIC",
    "-shared",
    "-fvisibility=hidden",
    "-fno-exceptions",
    "-fno-rtti",
    "-fstack-clash-protection",
    "-Wl,-z,defs",
];

/// Compilers that are tried in this order.
const COMPILERS: &[&str] = &["c++", "g++", "clang++"];

/// How a kernel library is built.
#[derive(Clone, Debug, Default)]
pub struct BuildOptions {
    /// The C++ compiler, with arguments; otherwise $CXX, `c++`, `g++` or `clang++`, whichever is found
    /// first.
    pub compiler: Option<String>,
    /// Folders that are searched for headers besides the device library's.
    pub include: Vec<PathBuf>,
    /// Compile for this machine's processor only (`-march=native`).
    pub native: bool,
    /// Further arguments to the compiler, last.
    pub arguments: Vec<OsString>,
}

/// What was built.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Built {
    /// The compiler and its arguments, as run.
    pub command: String,
    /// The library's kernels.
    pub kernels: Vec<String>,
    /// The compiler's warnings, verbatim; usually empty.
    pub warnings: String,
}

/// Why a kernel library was not built.
#[derive(Debug, thiserror::Error)]
pub enum BuildError {
    /// No C++ compiler.
    #[error("no C++ compiler found (tried {tried}): install g++ or clang++, or set CXX")]
    NoCompiler {
        /// What was looked for.
        tried: String,
    },
    /// The source is not there.
    #[error("kernel source {path} cannot be read: {error}")]
    Source {
        /// The source.
        path: PathBuf,
        /// What the host kernel said.
        error: io::Error,
    },
    /// A file could not be written or the compiler not be started.
    #[error("cannot {what}: {error}")]
    Io {
        /// What was tried.
        what: String,
        /// What the host kernel said.
        error: io::Error,
    },
    /// The compiler refused the source.
    #[error("{compiler} refuses {source_file}:\n{output}")]
    Refused {
        /// The compiler.
        compiler: String,
        /// The source.
        source_file: PathBuf,
        /// Everything the compiler wrote.
        output: String,
    },
    /// It was compiled, but cannot be used.
    #[error("{source_file} was compiled, but {error}")]
    Unusable {
        /// The source.
        source_file: PathBuf,
        /// Why.
        error: KernelError,
    },
}

/// Compiles `source`, a C++ file with at least one `SERVAL_KERNEL`, to the kernel library `output`. The
/// library appears complete or not at all; one that is in use stays as it was for its users.
pub fn build_kernel(
    source: &Path,
    output: &Path,
    options: &BuildOptions,
) -> Result<Built, BuildError> {
    if let Err(error) = fs::File::open(source) {
        return Err(BuildError::Source { path: source.to_owned(), error });
    }
    let compiler = find_compiler(options.compiler.as_deref())?;
    let io = |what: String| move |error| BuildError::Io { what, error };
    let headers = tempfile::tempdir().map_err(io("make a temporary folder".into()))?;
    write_headers(headers.path()).map_err(io("write the device library's headers".into()))?;
    let folder = output.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let library = tempfile::Builder::new()
        .prefix(".kernel-")
        .suffix(".so")
        .tempfile_in(folder)
        .map_err(io(format!("write to {}", folder.display())))?
        .into_temp_path();

    let mut command = Command::new(&compiler[0]);
    command.args(&compiler[1..]).args(FLAGS);
    if options.native {
        command.arg("-march=native");
    }
    command.arg("-I").arg(headers.path());
    for folder in &options.include {
        command.arg("-I").arg(folder);
    }
    command.arg("-o").arg(&*library).arg(source).args(&options.arguments);
    let text = format!("{command:?}");
    let ran = command.output().map_err(io(format!("start {}", compiler[0])))?;
    let said = [ran.stdout, ran.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned());
    let said = said.concat();
    if !ran.status.success() {
        let (compiler, source_file) = (compiler[0].clone(), source.to_owned());
        return Err(BuildError::Refused { compiler, source_file, output: said });
    }
    let kernels = check(&library, output)
        .map_err(|error| BuildError::Unusable { source_file: source.to_owned(), error })?;
    make_executable(&library).map_err(io(format!("finish {}", output.display())))?;
    library.persist(output).map_err(|e| BuildError::Io {
        what: format!("write {}", output.display()),
        error: e.error,
    })?;
    Ok(Built { command: text, kernels, warnings: said })
}

/// Loads the library and returns the names of its kernels.
fn check(path: &Path, output: &Path) -> Result<Vec<String>, KernelError> {
    let library = KernelLibrary::open(path)?;
    let kernels: Vec<String> = library.names().into_iter().map(str::to_owned).collect();
    if kernels.is_empty() {
        return Err(KernelError::Empty { path: output.to_owned() });
    }
    Ok(kernels)
}

/// Temporary files are private; a library is for everyone who may read its folder.
fn make_executable(path: &Path) -> io::Result<()> {
    use std::os::unix::fs::PermissionsExt;
    fs::set_permissions(path, fs::Permissions::from_mode(0o755))
}

fn write_headers(folder: &Path) -> io::Result<()> {
    let folder = folder.join("serval");
    fs::create_dir(&folder)?;
    HEADERS.iter().try_for_each(|(name, text)| fs::write(folder.join(name), text))
}

/// The compiler's program and first arguments.
fn find_compiler(given: Option<&str>) -> Result<Vec<String>, BuildError> {
    let words = |line: &str| line.split_whitespace().map(str::to_owned).collect::<Vec<_>>();
    let named = given.map(str::to_owned).or_else(|| env::var("CXX").ok());
    let named = named.map(|line| words(&line)).filter(|words| !words.is_empty());
    let candidates = match &named {
        Some(words) => vec![words.clone()],
        None => COMPILERS.iter().map(|name| words(name)).collect(),
    };
    let tried = || candidates.iter().map(|words| words.join(" ")).collect::<Vec<_>>().join(", ");
    match candidates.iter().find(|words| is_program(&words[0])) {
        Some(words) => Ok(words.clone()),
        None => Err(BuildError::NoCompiler { tried: tried() }),
    }
}

fn is_program(name: &str) -> bool {
    if name.contains('/') {
        return Path::new(name).is_file();
    }
    let path = env::var_os("PATH").unwrap_or_default();
    env::split_paths(&path).any(|folder| folder.join(name).is_file())
}
