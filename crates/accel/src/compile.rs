//! Building kernels from source: a library for the `cpu` accelerator with a C++ compiler, a fatbin for
//! the `cuda` accelerator with nvcc, or with NVRTC if there is no nvcc. The implementation of `serval kernel build FILE`.
//!
//! The device library's headers are embedded in this program and written to a temporary folder for the
//! compiler, so that a kernel always matches the engine and no source tree is needed.

mod nvrtc;
mod toolkit;

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, fs, io};

use self::nvrtc::Nvrtc;
pub use self::nvrtc::NvrtcError;
use crate::kernel::{KernelError, KernelLibrary};

/// The device library's headers: name and text.
pub const HEADERS: &[(&str, &str)] = include!(concat!(env!("OUT_DIR"), "/headers.rs"));

/// Flags for every kernel: no exceptions, because a block's frames are left only by returning;
/// every page of a large frame is touched, because a stack has one guard page.
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

/// The same for nvcc, whose assembler lists the entry functions.
const CUDA_FLAGS: &[&str] = &["-x", "cu", "-std=c++17", "-O3", "-Xptxas", "-v"];

/// Compilers, tried in this order.
const COMPILERS: &[&str] = &["c++", "g++", "clang++"];
const CUDA_COMPILERS: &[&str] = &["nvcc", "/usr/local/cuda/bin/nvcc"];

/// The name that selects NVRTC instead of a compiler program; the path of its library does too.
const NVRTC: &str = "nvrtc";

/// GPUs that a kernel is built for by default.
pub const GPUS_DEFAULT: &[&str] = &["sm_80", "sm_90", "sm_100"];

/// The accelerator a kernel is built for.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Target {
    /// The `cpu` accelerator: a shared library.
    #[default]
    Cpu,
    /// The `cuda` accelerator: a fatbin with code for GPUs of these architectures, such as `sm_90`, and PTX for
    /// GPUs later than the last one, which the driver translates. Empty: [`GPUS_DEFAULT`]. If the output file ends in
    /// `.cubin`: only code for a single one.
    Cuda(Vec<String>),
}

/// Options of a build.
#[derive(Clone, Debug, Default)]
pub struct BuildOptions {
    /// The accelerator.
    pub target: Target,
    /// The compiler, with arguments; by default $CXX, or the first of `c++`, `g++` and `clang++`. For
    /// GPUs $NVCC, `nvcc` or that of /usr/local/cuda, otherwise the library NVRTC; `nvrtc` or the path of a
    /// libnvrtc selects NVRTC explicitly.
    pub compiler: Option<String>,
    /// Header search folders besides the device library's.
    pub include: Vec<PathBuf>,
    /// Compile for this machine's processor only (`-march=native`); not for GPUs.
    pub native: bool,
    /// Further arguments to the compiler, last.
    pub arguments: Vec<OsString>,
    /// Finds the kernels of a library for the `cpu` accelerator; by default it is loaded into this process, where its constructors may do anything. A program
    /// that builds what it does not know has it loaded elsewhere.
    pub list: Option<List>,
}

/// Lists the kernels of the library with this path.
pub type List = fn(&Path) -> Result<Vec<String>, KernelError>;

/// Those of a library that is loaded into this process.
fn list_here(library: &Path) -> Result<Vec<String>, KernelError> {
    let library = KernelLibrary::open(library)?;
    Ok(library.names().into_iter().map(str::to_owned).collect())
}

/// The result of a build.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Built {
    /// The compiler and its arguments, as run.
    pub command: String,
    /// The names of the kernels.
    pub kernels: Vec<String>,
    /// The compiler's warnings, verbatim; usually empty.
    pub warnings: String,
}

/// How to get a CUDA compiler.
pub const CUDA_REMEDY: &str = "`pip install nvidia-cuda-nvrtc nvidia-cuda-cccl nvidia-nvfatbin` (13.0 or later; in an \
    active virtual environment) brings a small one, the CUDA toolkit 12.8 or later nvcc; or set NVCC";

/// Why a kernel was not built.
#[derive(Debug, thiserror::Error)]
pub enum BuildError {
    /// No C++ compiler.
    #[error("no C++ compiler found (tried {tried}): install g++ or clang++, or set CXX")]
    NoCompiler {
        /// The compilers tried.
        tried: String,
    },
    /// Neither nvcc nor NVRTC.
    #[error("no CUDA compiler found (tried {tried}): {}", CUDA_REMEDY)]
    NoCudaCompiler {
        /// The compilers tried.
        tried: String,
    },
    /// NVRTC cannot be used.
    #[error(transparent)]
    Nvrtc(#[from] NvrtcError),
    /// A cubin for several GPUs, or for the default ones.
    #[error("a .cubin has code for one GPU: name one with --gpu, or write a .fatbin")]
    OneGpu,
    /// An invalid GPU architecture.
    #[error(
        "`{name}` is not a GPU architecture: use one like sm_90 (`serval doctor` shows this machine's)"
    )]
    NoArchitecture {
        /// The name given.
        name: String,
    },
    /// The source cannot be read.
    #[error("kernel source {path} cannot be read: {error}")]
    Source {
        /// The source.
        path: PathBuf,
        /// The error of the host kernel.
        error: io::Error,
    },
    /// A file could not be written or the compiler not be started.
    #[error("cannot {what}: {error}")]
    Io {
        /// The operation.
        what: String,
        /// The error of the host kernel.
        error: io::Error,
    },
    /// The compiler rejected the source.
    #[error("the compiler rejected {source_file}:\n{output}\nIt was run as: {command}")]
    Refused {
        /// The compiler and its arguments.
        command: String,
        /// The source.
        source_file: PathBuf,
        /// The compiler's output.
        output: String,
    },
    /// The result cannot be used.
    #[error("{source_file} was compiled, but {error}")]
    Unusable {
        /// The source.
        source_file: PathBuf,
        /// The reason.
        error: KernelError,
    },
}

/// Compiles `source`, a C++ or CUDA file with at least one `SERVAL_KERNEL`, to the kernel library or fatbin
/// `output`. The file is replaced atomically; processes that use an older one keep it.
pub fn build_kernel(
    source: &Path,
    output: &Path,
    options: &BuildOptions,
) -> Result<Built, BuildError> {
    if let Err(error) = fs::File::open(source) {
        return Err(BuildError::Source { path: source.to_owned(), error });
    }
    let compiler = find_compiler(options)?;
    let io = |what: String| move |error| BuildError::Io { what, error };
    let headers = tempfile::tempdir().map_err(io("make a temporary folder".into()))?;
    write_headers(headers.path()).map_err(io("write the device library's headers".into()))?;
    let folder = output.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let library = tempfile::Builder::new()
        .prefix(".kernel-")
        .suffix(
            &output
                .extension()
                .map_or(OsString::new(), |e| [".".as_ref(), e].into_iter().collect()),
        )
        .tempfile_in(folder)
        .map_err(io(format!("write to {}", folder.display())))?
        .into_temp_path();
    let job = Job { source, output, headers: headers.path(), library: &library, options };
    let built = match &compiler {
        Compiler::Program(words) => job.run(words)?,
        Compiler::Nvrtc(nvrtc, first) => job.run_nvrtc(nvrtc, first)?,
    };
    if built.kernels.is_empty() {
        return Err(job.unusable(KernelError::Empty { path: output.to_owned() }));
    }
    make_executable(&library).map_err(io(format!("finish {}", output.display())))?;
    library.persist(output).map_err(|e| BuildError::Io {
        what: format!("write {}", output.display()),
        error: e.error,
    })?;
    Ok(built)
}

/// One kernel's build.
struct Job<'a> {
    source: &'a Path,
    output: &'a Path,
    /// The folder with the device library.
    headers: &'a Path,
    /// The temporary file that is renamed to `output`.
    library: &'a Path,
    options: &'a BuildOptions,
}

impl Job<'_> {
    fn is_cubin(&self) -> bool {
        self.output.extension().is_some_and(|extension| extension == "cubin")
    }

    fn unusable(&self, error: KernelError) -> BuildError {
        BuildError::Unusable { source_file: self.source.to_owned(), error }
    }

    fn refused(&self, command: String, output: &str) -> BuildError {
        let output = output.trim_end().to_owned();
        BuildError::Refused { command, source_file: self.source.to_owned(), output }
    }

    /// Runs a compiler program.
    fn run(&self, compiler: &[String]) -> Result<Built, BuildError> {
        let Self { source, library, options, .. } = self;
        let mut command = Command::new(&compiler[0]);
        command.args(&compiler[1..]);
        match &options.target {
            Target::Cpu => {
                command.args(FLAGS).args(options.native.then_some("-march=native"));
            }
            Target::Cuda(gpus) => {
                command.args(CUDA_FLAGS).args(self.code_for(gpus)?);
            }
        }
        command.arg("-I").arg(self.headers);
        for folder in &options.include {
            command.arg("-I").arg(folder);
        }
        // With "./" before it, a name is neither an option nor a file of options.
        command.arg("-o").arg(library).arg(Path::new(".").join(source)).args(&options.arguments);
        let text = format!("{command:?}");
        let io = |error| BuildError::Io { what: format!("start {}", compiler[0]), error };
        let ran = command.output().map_err(io)?;
        let said = [ran.stdout, ran.stderr].map(|b| String::from_utf8_lossy(&b).into_owned());
        let said = said.concat();
        if !ran.status.success() {
            return Err(self.refused(text, &said));
        }
        let (kernels, warnings) = match options.target {
            Target::Cuda(_) => cuda_kernels(&said),
            Target::Cpu => {
                let list = options.list.unwrap_or(list_here);
                (list(library).map_err(|error| self.unusable(error))?, said)
            }
        };
        Ok(Built { command: text, kernels, warnings })
    }

    /// Runs the compiler library, with these arguments before the others.
    fn run_nvrtc(&self, nvrtc: &Nvrtc, first: &[String]) -> Result<Built, BuildError> {
        let Target::Cuda(gpus) = &self.options.target else {
            unreachable!("it was selected for GPUs")
        };
        let gpus = self.numbers(gpus)?;
        // A source's own folder comes first, as with every compiler.
        let own = self.source.parent().map(|folder| Path::new(".").join(folder));
        let given: Vec<PathBuf> = own.into_iter().chain(self.options.include.clone()).collect();
        let cuda = nvrtc.header_folders(&given)?;
        nvrtc::write_headers(self.headers, &[given.clone(), cuda.clone()].concat()).map_err(
            |error| BuildError::Io { what: "write headers for NVRTC".to_owned(), error },
        )?;
        let folders =
            [self.headers].into_iter().chain(given.iter().chain(&cuda).map(PathBuf::as_path));
        let first = first.iter().map(OsString::from);
        let arguments: Vec<_> = first.chain(self.options.arguments.iter().cloned()).collect();
        let options = nvrtc::options(folders, &arguments)?;
        let command = format!("{} with {options:?} for sm_{}", nvrtc.name(), gpus.join(", sm_"));
        let image = match nvrtc.build(self.source, (&gpus, self.is_cubin()), &options) {
            Err(NvrtcError::Refused(mut log)) => {
                if log.contains("open source file") {
                    log += "\nNVRTC does not see the host's headers (`serval kernel build --help` lists those it has): \
                            leave the others out with `#ifndef __CUDACC_RTC__`, or build with nvcc";
                }
                return Err(self.refused(command, &log));
            }
            other => other?,
        };
        fs::write(self.library, image.bytes).map_err(|error| BuildError::Io {
            what: format!("write {}", self.output.display()),
            error,
        })?;
        Ok(Built { command, kernels: image.kernels, warnings: image.warnings })
    }

    /// nvcc's arguments for code for these GPUs, and PTX for later ones.
    fn code_for(&self, gpus: &[String]) -> Result<Vec<String>, BuildError> {
        let numbers = self.numbers(gpus)?;
        let last = numbers.len() - 1;
        let form = if self.is_cubin() { "-cubin" } else { "-fatbin" };
        let mut arguments = [form, "--threads", "0"].map(str::to_owned).to_vec();
        for (at, number) in numbers.iter().enumerate() {
            let code = if at == last && !self.is_cubin() {
                format!("[sm_{number},compute_{number}]")
            } else {
                format!("sm_{number}")
            };
            arguments.extend(["-gencode".to_owned(), format!("arch=compute_{number},code={code}")]);
        }
        Ok(arguments)
    }

    /// The architecture numbers of the GPUs, at least one.
    fn numbers(&self, gpus: &[String]) -> Result<Vec<String>, BuildError> {
        let mut named: Vec<&str> = gpus.iter().map(String::as_str).collect();
        if self.is_cubin() && named.len() != 1 {
            return Err(BuildError::OneGpu);
        }
        if named.is_empty() {
            named = GPUS_DEFAULT.to_vec();
        }
        let number = |gpu: &str| {
            let number = gpu.strip_prefix("sm_").filter(|number| is_architecture(number));
            let number = number.map(str::to_owned);
            number.ok_or_else(|| BuildError::NoArchitecture { name: gpu.to_owned() })
        };
        named.into_iter().map(number).collect()
    }
}

/// Digits, optionally followed by a letter for architecture-specific features.
fn is_architecture(number: &str) -> bool {
    let digits = number.strip_suffix(['a', 'f']).unwrap_or(number);
    (2..=4).contains(&digits.len()) && digits.bytes().all(|byte| byte.is_ascii_digit())
}

/// The kernels that nvcc's assembler lists, and the rest of the output.
fn cuda_kernels(said: &str) -> (Vec<String>, String) {
    // The report about a function continues in indented lines; indented lines after a warning are an excerpt of the source.
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
    (kernels, rest.join("\n"))
}

/// Temporary files are private; a library must be readable by all users of its folder.
fn make_executable(path: &Path) -> io::Result<()> {
    use std::os::unix::fs::PermissionsExt;
    fs::set_permissions(path, fs::Permissions::from_mode(0o755))
}

fn write_headers(folder: &Path) -> io::Result<()> {
    let folder = folder.join("serval");
    fs::create_dir(&folder)?;
    HEADERS.iter().try_for_each(|(name, text)| fs::write(folder.join(name), text))
}

/// A compiler.
enum Compiler {
    /// A program and its first arguments.
    Program(Vec<String>),
    /// The library, and its first arguments.
    Nvrtc(Nvrtc, Vec<String>),
}

/// The name of this machine's compiler for GPUs, and what it lacks.
pub fn cuda_compiler() -> Result<(String, Option<NvrtcError>), BuildError> {
    let options = BuildOptions { target: Target::Cuda(Vec::new()), ..BuildOptions::default() };
    Ok(match find_compiler(&options)? {
        Compiler::Program(words) => (words.join(" "), None),
        Compiler::Nvrtc(nvrtc, _) => (nvrtc.name(), nvrtc.check().err()),
    })
}

fn find_compiler(options: &BuildOptions) -> Result<Compiler, BuildError> {
    let on_gpu = options.target != Target::Cpu;
    let (variable, usual) = if on_gpu { ("NVCC", CUDA_COMPILERS) } else { ("CXX", COMPILERS) };
    // A file's path is one word, even if it contains spaces.
    let words = |line: &str| match Path::new(line).is_file() {
        true => vec![line.to_owned()],
        false => line.split_whitespace().map(str::to_owned).collect::<Vec<_>>(),
    };
    let named = options.compiler.clone().or_else(|| env::var(variable).ok());
    let named = named.map(|line| words(&line)).filter(|words| !words.is_empty());
    let library = named.as_ref().map(|words| Path::new(&words[0])).filter(|_| on_gpu);
    let arguments = named.iter().flat_map(|words| words[1..].to_vec()).collect();
    if let Some(library) = library.filter(|path| is_nvrtc(path)) {
        return Ok(Compiler::Nvrtc(Nvrtc::open(library)?, arguments));
    }
    let by_name = library == Some(Path::new(NVRTC));
    let candidates = match &named {
        _ if by_name => Vec::new(),
        Some(words) => vec![words.clone()],
        None => usual.iter().map(|name| words(name)).collect(),
    };
    if let Some(words) = candidates.iter().find(|words| is_program(&words[0])) {
        return Ok(Compiler::Program(words.clone()));
    }
    let mut tried: Vec<String> = candidates.iter().map(|words| words.join(" ")).collect();
    if !on_gpu {
        return Err(BuildError::NoCompiler { tried: tried.join(", ") });
    }
    if by_name || named.is_none() {
        if let Some(nvrtc) = Nvrtc::find() {
            return Ok(Compiler::Nvrtc(nvrtc, arguments));
        }
        tried.extend(nvrtc::LIBRARIES.iter().map(|library| (*library).to_owned()));
    }
    Err(BuildError::NoCudaCompiler { tried: tried.join(", ") })
}

/// Whether this is the path of NVRTC's library.
fn is_nvrtc(path: &Path) -> bool {
    path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("libnvrtc"))
}

fn is_program(name: &str) -> bool {
    if name.contains('/') {
        return Path::new(name).is_file();
    }
    let path = env::var_os("PATH").unwrap_or_default();
    env::split_paths(&path).any(|folder| folder.join(name).is_file())
}
