//! `serval kernel build` and `serval kernel list`.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use accel::compile::{BuildError, BuildOptions, Target, build_kernel};
use accel::{AccelError, KernelError};
use clap::{Args, Subcommand};
use serde_json::{Value as Json, json};

use super::Failure;
use crate::screen::{Screen, Table, Tone};
use runtime::kernel_file::{self, KernelFile, Limits};
use server::config::BUILTINS;
use server::log;

const BUILD_HELP: &str = "\
A kernel is a C++ function that answers messages:

  #include <serval/kernel.h>
  SERVAL_KERNEL(twice) (serval::Block& block, serval::Mqueue& q) {
      while (auto msg = q.recv(block)) {
          auto reply = q.reply(block, msg, 2 * msg.len());
          if (reply)  // false: longer than max_reply_bytes
              for (unsigned i = block.rank(); i < 2 * msg.len(); i += block.size())
                  reply.as<char>()[i] = msg.as<const char>()[i % msg.len()];
          q.send(block, reply);
      }
  }

Examples:
  serval kernel build twice.cpp                     makes twice.so
  serval kernel build twice.cpp -o /opt/k/twice.so --native
  then, in the configuration: kernel = \"./twice.so\"; it runs in a separate process

  serval kernel build twice.cu                      makes twice.fatbin, for GPUs
  serval kernel build twice.cpp --gpu sm_90         for one GPU architecture, from the same source
  serval kernel build twice.cu --compiler nvrtc     with CUDA's compiler as a library
  then: kernel = \"./twice.fatbin\", on an accelerator of kind \"cuda\"

The headers are part of serval. A compiler is taken from --compiler, $CXX, or c++, g++, clang++; for
GPUs from --compiler, $NVCC, nvcc on the PATH or in /usr/local/cuda, else the library NVRTC, which
needs no toolkit:
  python3 -m venv cuda && . cuda/bin/activate
  pip install nvidia-cuda-nvrtc nvidia-cuda-cccl nvidia-nvfatbin
It has no access to headers of the host, but to stdint.h, stddef.h, string.h, math.h, limits.h,
stdio.h, assert.h and the headers of libcu++. `serval doctor` shows which compiler would be used.

Exit codes:
  0  built
  1  there is no compiler, or it refuses the source and what it says is shown
  2  the command line is wrong";

pub(super) const HELP: &str = "\
Examples:
  serval kernel list                  the kernels that need no file, and their params
  serval kernel build mine.cpp        makes mine.so, for kernel = \"./mine.so\"";

const LIST_HELP: &str = "\
Examples:
  serval kernel list                  the built-in kernels
  serval kernel list ./mine.so        the kernels of a library
  serval kernel list --json";

#[derive(Debug, Subcommand)]
pub(super) enum Verb {
    /// Compile a kernel for cpu accelerators or for GPUs
    #[command(after_help = BUILD_HELP)]
    Build(Build),

    /// List the built-in kernels, or the kernels of a library
    #[command(after_help = LIST_HELP)]
    List {
        /// A compiled kernel library; it is loaded in a separate process, which runs its constructors
        #[arg(value_name = "LIBRARY")]
        library: Option<PathBuf>,
    },

    /// The process of a trial: loads the library that is its standard input
    #[command(hide = true, after_help = "Examples:\n  serval kernel try ./mine.so")]
    Try {
        /// Name of the library for messages
        #[arg(value_name = "LIBRARY")]
        library: PathBuf,
    },
}

#[derive(Args, Debug)]
pub(super) struct Build {
    /// The kernel's source
    #[arg(value_name = "FILE.cpp|FILE.cu")]
    source: PathBuf,

    /// The file to write: a library for cpu accelerators, a .fatbin for GPUs, a .cubin for one architecture [default:
    /// the source's name with .so, or .fatbin for a .cu and with --gpu]
    #[arg(short, long, value_name = "OUT")]
    output: Option<PathBuf>,

    /// A GPU architecture to compile for, such as sm_90; may be repeated [default for GPUs: sm_80, sm_90, sm_100]
    #[arg(long = "gpu", value_name = "ARCH", value_delimiter = ',')]
    gpus: Vec<String>,

    /// The compiler, with arguments; for GPUs also `nvrtc`, or the path of a libnvrtc.so
    #[arg(long, value_name = "COMMAND")]
    compiler: Option<String>,

    /// A folder with additional headers; may be repeated
    #[arg(short = 'I', long = "include", value_name = "DIR")]
    include: Vec<PathBuf>,

    /// Compile for this machine's processor only
    #[arg(long, conflicts_with = "gpus")]
    native: bool,

    /// Additional arguments for the compiler, after --
    #[arg(last = true, value_name = "ARGUMENTS")]
    arguments: Vec<std::ffi::OsString>,
}

pub(super) fn run(screen: &Screen, verb: &Verb) -> Result<(), Failure> {
    match verb {
        Verb::Build(build) => run_build(screen, build),
        Verb::List { library: Some(library) } => list_library(screen, library),
        Verb::Try { library } => {
            kernel_file::answer(library);
            Ok(())
        }
        Verb::List { library: None } => {
            list_builtins(screen);
            Ok(())
        }
    }
}

fn run_build(screen: &Screen, build: &Build) -> Result<(), Failure> {
    let ends_in = |path: &Path, ending: &str| path.extension().is_some_and(|e| e == ending);
    let output = build.output.clone().unwrap_or_else(|| {
        let on_gpu = !build.gpus.is_empty() || ends_in(&build.source, "cu");
        build.source.with_extension(if on_gpu { "fatbin" } else { "so" })
    });
    let on_gpu = ends_in(&output, "fatbin") || ends_in(&output, "cubin");
    if output == build.source {
        let what = format!("{} would be overwritten: give another --output", output.display());
        return Err(Failure::Usage(what));
    }
    if !on_gpu && !build.gpus.is_empty() {
        let what = format!("code for GPUs is a .fatbin or .cubin, not {}", output.display());
        return Err(Failure::Usage(what));
    }
    if on_gpu && build.native {
        return Err(Failure::Usage("--native is for cpu kernels: name a --gpu instead".into()));
    }
    let options = BuildOptions {
        target: if on_gpu { Target::Cuda(build.gpus.clone()) } else { Target::Cpu },
        compiler: build.compiler.clone(),
        include: build.include.clone(),
        native: build.native,
        arguments: build.arguments.clone(),
        list: Some(list_kernels),
    };
    let built = build_kernel(&build.source, &output, &options).map_err(|error| match error {
        BuildError::OneGpu | BuildError::NoArchitecture { .. } => Failure::Usage(error.to_string()),
        error => Failure::Run(sentence(&error)),
    })?;
    if !built.warnings.is_empty() {
        log::say(built.warnings.trim_end());
    }
    let shown = output.display().to_string();
    let path = if shown.contains('/') { shown } else { format!("./{shown}") };
    // Without a name, the only kernel of a library is used, or the kernel of a fatbin that has the name of the file.
    let named = |name: &String| match built.kernels.as_slice() {
        [_] if !on_gpu || output.file_stem().is_some_and(|stem| stem == name.as_str()) => {
            path.clone()
        }
        _ => format!("{path}:{name}"),
    };
    let accelerator = if on_gpu { ", on an accelerator of kind \"cuda\"" } else { "" };
    screen.show(
        || {
            let mut text = format!("built {path}\n");
            for name in &built.kernels {
                text.push_str(&format!(
                    "  kernel = \"{}\"    # {name}{accelerator}\n",
                    named(name)
                ));
            }
            text
        },
        || json!({ "library": output, "kernels": built.kernels, "command": built.command }),
    );
    Ok(())
}

/// Why the kernel was not built; if it could not be written, with the option for another path.
fn sentence(error: &BuildError) -> String {
    match error {
        BuildError::Io { error: io, .. }
            if matches!(io.kind(), ErrorKind::PermissionDenied | ErrorKind::ReadOnlyFilesystem) =>
        {
            format!("{error}; give a writable path with -o")
        }
        error => error.to_string(),
    }
}

/// The kernels of a library, which is loaded in a process of its own: its constructors may crash, or not end.
fn list_kernels(path: &Path) -> Result<Vec<String>, KernelError> {
    let file = KernelFile::open(path, kernel_file::Target::Host).map_err(|error| match error {
        AccelError::Kernel(error) => error,
        other => KernelError::Trial(other.to_string()),
    })?;
    Ok(file.tried(&Limits::default(), &mut || false)?.unwrap_or_default().to_vec())
}

fn list_library(screen: &Screen, path: &Path) -> Result<(), Failure> {
    let names = list_kernels(path).map_err(Failure::run)?;
    screen.show(|| names.iter().map(|name| format!("{name}\n")).collect(), || json!(names));
    Ok(())
}

fn list_builtins(screen: &Screen) {
    screen.show(
        || {
            let mut table = Table::new(&["kernel", "what it does", "params"]);
            for builtin in BUILTINS {
                let params =
                    builtin.params.iter().map(|(name, meaning)| format!("{name}: {meaning}"));
                table.toned([
                    (Tone::Bold, builtin.name.to_owned()),
                    (Tone::Plain, builtin.summary.to_owned()),
                    (Tone::Dim, params.collect::<Vec<_>>().join("; ")),
                ]);
            }
            table.render(screen)
        },
        || {
            let entry = |builtin: &server::config::Builtin| {
                let params: serde_json::Map<String, Json> = builtin
                    .params
                    .iter()
                    .map(|(name, meaning)| ((*name).to_owned(), (*meaning).into()))
                    .collect();
                json!({
                    "name": builtin.name,
                    "summary": builtin.summary,
                    "params": params,
                    "request_bytes": builtin.request_bytes,
                    "reply_bytes": builtin.reply_bytes,
                    "backends": builtin.backends,
                })
            };
            Json::Array(BUILTINS.iter().map(entry).collect())
        },
    );
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unwritable_folder_is_reported_with_the_option_for_another() {
        let failed = |kind: ErrorKind| {
            sentence(&BuildError::Io { what: "write a.so".into(), error: kind.into() })
        };
        for kind in [ErrorKind::PermissionDenied, ErrorKind::ReadOnlyFilesystem] {
            assert!(failed(kind).ends_with("with -o"), "{}", failed(kind));
        }
        assert!(!failed(ErrorKind::StorageFull).contains("-o"));
    }
}
