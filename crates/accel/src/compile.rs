//! Building kernels from one source: a library for the `cpu` accelerator with a C++ compiler, a fatbin for
//! the `cuda` accelerator with nvcc. What `serval kernel build FILE` does.
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

/// The same for nvcc, whose assembler tells the names of what it compiles.
const CUDA_FLAGS: &[&str] = &["-x", "cu", "-std=c++17", "-O3", "-fatbin", "-Xptxas", "-v"];

/// Compilers that are tried in this order.
const COMPILERS: &[&str] = &["c++", "g++", "clang++"];
const CUDA_COMPILERS: &[&str] = &["nvcc", "/usr/local/cuda/bin/nvcc"];

/// GPUs that a kernel is built for where nobody names one.
pub const GPUS_DEFAULT: &[&str] = &["sm_80", "sm_90", "sm_100"];

/// What a kernel is built for.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Target {
    /// The `cpu` accelerator: a shared library.
    #[default]
    Cpu,
    /// The `cuda` accelerator: a fatbin with code for GPUs of these architectures, such as `sm_90`, and for
    /// later ones than the last in a form that the driver translates. Empty: [`GPUS_DEFAULT`].
    Cuda(Vec<String>),
}

/// How a kernel is built.
#[derive(Clone, Debug, Default)]
pub struct BuildOptions {
    /// What for.
    pub target: Target,
    /// The compiler, with arguments; otherwise $CXX, `c++`, `g++` or `clang++`, whichever is found first. For
    /// GPUs $NVCC, `nvcc` or that of /usr/local/cuda.
    pub compiler: Option<String>,
    /// Folders that are searched for headers besides the device library's.
    pub include: Vec<PathBuf>,
    /// Compile for this machine's processor only (`-march=native`); not for GPUs.
    pub native: bool,
    /// Further arguments to the compiler, last.
    pub arguments: Vec<OsString>,
}

/// What was built.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Built {
    /// The compiler and its arguments, as run.
    pub command: String,
    /// The names of the kernels.
    pub kernels: Vec<String>,
    /// The compiler's warnings, verbatim; usually empty.
    pub warnings: String,
}

/// Why a kernel was not built.
#[derive(Debug, thiserror::Error)]
pub enum BuildError {
    /// No C++ compiler.
    #[error("no C++ compiler found (tried {tried}): install g++ or clang++, or set CXX")]
    NoCompiler {
        /// What was looked for.
        tried: String,
    },
    /// No nvcc.
    #[error(
        "no CUDA compiler found (tried {tried}): install the CUDA toolkit 12.8 or later, or set NVCC"
    )]
    NoNvcc {
        /// What was looked for.
        tried: String,
    },
    /// A GPU that is none.
    #[error(
        "`{name}` is no architecture of GPUs: name one like sm_90 (`serval doctor` shows this machine's)"
    )]
    NoArchitecture {
        /// What was given.
        name: String,
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
    #[error("the compiler refuses {source_file}:\n{output}\nIt was run as: {command}")]
    Refused {
        /// The compiler and its arguments.
        command: String,
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

/// Compiles `source`, a C++ or CUDA file with at least one `SERVAL_KERNEL`, to the kernel library or fatbin
/// `output`. It appears complete or not at all; one that is in use stays as it was for its users.
pub fn build_kernel(
    source: &Path,
    output: &Path,
    options: &BuildOptions,
) -> Result<Built, BuildError> {
    if let Err(error) = fs::File::open(source) {
        return Err(BuildError::Source { path: source.to_owned(), error });
    }
    let on_gpu = matches!(options.target, Target::Cuda(_));
    let compiler = find_compiler(options)?;
    let io = |what: String| move |error| BuildError::Io { what, error };
    let headers = tempfile::tempdir().map_err(io("make a temporary folder".into()))?;
    write_headers(headers.path()).map_err(io("write the device library's headers".into()))?;
    let folder = output.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let library = tempfile::Builder::new()
        .prefix(".kernel-")
        .suffix(if on_gpu { ".fatbin" } else { ".so" })
        .tempfile_in(folder)
        .map_err(io(format!("write to {}", folder.display())))?
        .into_temp_path();

    let mut command = Command::new(&compiler[0]);
    command.args(&compiler[1..]);
    match &options.target {
        Target::Cpu => {
            command.args(FLAGS).args(options.native.then_some("-march=native"));
        }
        Target::Cuda(gpus) => {
            command.args(CUDA_FLAGS).args(code_for(gpus)?);
        }
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
        let output = said.trim_end().to_owned();
        return Err(BuildError::Refused { command: text, source_file: source.to_owned(), output });
    }
    let unusable = |error| BuildError::Unusable { source_file: source.to_owned(), error };
    let (kernels, warnings) = if on_gpu {
        cuda_kernels(&said, output).map_err(unusable)?
    } else {
        (check(&library, output).map_err(unusable)?, said)
    };
    make_executable(&library).map_err(io(format!("finish {}", output.display())))?;
    library.persist(output).map_err(|e| BuildError::Io {
        what: format!("write {}", output.display()),
        error: e.error,
    })?;
    Ok(Built { command: text, kernels, warnings })
}

/// What asks nvcc for code that runs on these GPUs, and for what drivers translate for later ones.
fn code_for(gpus: &[String]) -> Result<Vec<String>, BuildError> {
    let mut gpus: Vec<&str> = gpus.iter().map(String::as_str).collect();
    if gpus.is_empty() {
        gpus = GPUS_DEFAULT.to_vec();
    }
    let last = gpus.len() - 1;
    let mut arguments = vec!["--threads".to_owned(), "0".to_owned()];
    for (at, gpu) in gpus.iter().enumerate() {
        let number = gpu.strip_prefix("sm_").filter(|number| is_architecture(number));
        let number =
            number.ok_or_else(|| BuildError::NoArchitecture { name: (*gpu).to_owned() })?;
        let code = if at == last { format!("[{gpu},compute_{number}]") } else { gpu.to_string() };
        arguments.extend(["-gencode".to_owned(), format!("arch=compute_{number},code={code}")]);
    }
    Ok(arguments)
}

/// Digits, and perhaps a letter for what only this generation has.
fn is_architecture(number: &str) -> bool {
    let digits = number.strip_suffix(['a', 'f']).unwrap_or(number);
    (2..=4).contains(&digits.len()) && digits.bytes().all(|byte| byte.is_ascii_digit())
}

/// The kernels that nvcc's assembler names, and what the compiler said besides.
fn cuda_kernels(said: &str, output: &Path) -> Result<(Vec<String>, String), KernelError> {
    // What it says of a function goes on in indented lines; those below a warning are its excerpt of the source.
    let mut telling = false;
    let (told, rest): (Vec<&str>, Vec<&str>) = said.lines().partition(|line| {
        telling = line.starts_with("ptxas info") || telling && line.starts_with("    ");
        telling
    });
    let entry = |line: &&str| {
        let (_, entry) = line.split_once("Compiling entry function 'serval_kernel_")?;
        Some(entry.split_once('\'')?.0.to_owned())
    };
    let mut kernels: Vec<String> = told.iter().filter_map(entry).collect();
    kernels.sort();
    kernels.dedup();
    if kernels.is_empty() {
        return Err(KernelError::Empty { path: output.to_owned() });
    }
    Ok((kernels, rest.join("\n")))
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
fn find_compiler(options: &BuildOptions) -> Result<Vec<String>, BuildError> {
    let on_gpu = options.target != Target::Cpu;
    let (variable, usual) = if on_gpu { ("NVCC", CUDA_COMPILERS) } else { ("CXX", COMPILERS) };
    let words = |line: &str| line.split_whitespace().map(str::to_owned).collect::<Vec<_>>();
    let named = options.compiler.clone().or_else(|| env::var(variable).ok());
    let named = named.map(|line| words(&line)).filter(|words| !words.is_empty());
    let candidates = match &named {
        Some(words) => vec![words.clone()],
        None => usual.iter().map(|name| words(name)).collect(),
    };
    let tried = || candidates.iter().map(|words| words.join(" ")).collect::<Vec<_>>().join(", ");
    match candidates.iter().find(|words| is_program(&words[0])) {
        Some(words) => Ok(words.clone()),
        None if on_gpu => Err(BuildError::NoNvcc { tried: tried() }),
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
