//! `serval attach PATH`: an accelerator runtime for kernels on host threads or on a GPU.

use std::fs;
use std::io::ErrorKind;
use std::os::fd::AsFd as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use clap::Args;
use engine::topology::{
    DeviceSpec, HANG_MS, HANG_MS_MAX, HANG_MS_MIN, STACK_KIB, STACK_KIB_MAX, STACK_KIB_MIN,
};
use sys::isolation::Namespaces;
use sys::local::LocalSocket;
use sys::signal::Signals;

use super::{Failure, cancel_on_signal};
use remote::{Greeter, Secret};
use runtime::far::{self, Terms};
use runtime::kernel_file;
use runtime::kinds::{self, Kind};
use runtime::{self, AttachRequest, Device, End, RuntimeError};

pub(super) const HELP: &str = "\
PATH is `attach` of an accelerator with launch = \"external\". The
process maps only the region of one service. It takes any service of the accelerator that has no
runtime, or the one selected by --service or --kernel, and attaches again when its generation or the
engine ends. SIGTERM or Ctrl-C ends it: its requests in flight are dropped with a reason.

Examples:
  serval attach /run/serval/acc0
  serval attach /run/serval/acc0 --service digits --threads 4
  serval attach /run/serval/acc0 --once
  serval attach /run/serval/gpu0 --gpu 0
  serval attach --listen tcp://10.0.0.2:7000 --secret-file /etc/serval/link.secret
  serval attach --listen tcp://10.0.0.2:7000 --secret-file /etc/serval/link.secret \\
      --kernel lenet --kernel /opt/kernels/mine.so

With --listen it serves engines of other machines (docs/remote.md): any built-in kernel, or only
those of --kernel, which may be repeated: names, or files with the same content as the file of the
engine's configuration.

Exit codes: 0 ended in order, 1 no engine, refused, the engine ended (with --once), or a block
failed, 2 invalid command line, 3 a kernel hung.";

#[derive(Args, Debug)]
pub(super) struct Options {
    /// Path on which the engine listens for runtimes
    #[arg(value_name = "PATH", required_unless_present_any = ["inherited", "listen"])]
    path: Option<PathBuf>,

    /// Wait for engines on other machines, which name this address in an accelerator of kind "remote"
    #[arg(long, value_name = "tcp://HOST:PORT", requires = "secret_file",
          conflicts_with_all = ["path", "inherited", "service"])]
    listen: Option<String>,

    /// The secret that this machine and the engines' know: a file that only its owner can access
    #[arg(long, value_name = "FILE", requires = "listen")]
    secret_file: Option<PathBuf>,

    /// The service whose kernels run here
    #[arg(long, value_name = "NAME", default_value = "")]
    service: String,

    /// Accept only a service with this kernel: a built-in name, or the file of the configuration. With --listen it may be
    /// repeated: engines may run each of these kernels; a file is the same one if it has the same content
    #[arg(long = "kernel", value_name = "NAME|FILE")]
    kernels: Vec<String>,

    /// Threads that share the blocks [default: one for each block, up to the cores, but up to four on fewer cores];
    /// with --gpu, threads of each block, a multiple of 32 [default: depends on the kernel]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1024))]
    threads: Option<u32>,

    /// A block that works on one message for longer hangs, and the generation ends. Set it to at least the service's
    /// request_timeout_ms, which the runtime does not know
    #[arg(long, value_name = "MS", default_value_t = HANG_MS,
          value_parser = clap::value_parser!(u64).range(HANG_MS_MIN..=HANG_MS_MAX))]
    hang_ms: u64,

    /// Cores to pin the threads to
    #[arg(long, value_name = "CORE,...", value_delimiter = ',', conflicts_with = "gpu")]
    cores: Vec<usize>,

    /// Stack of each block in KiB
    #[arg(long, value_name = "KIB", default_value_t = STACK_KIB as u64, conflicts_with = "gpu",
          value_parser = clap::value_parser!(u64).range(STACK_KIB_MIN..=STACK_KIB_MAX))]
    stack_kib: u64,

    /// Run CUDA kernels on the NVIDIA GPU with this number, from 0: short for --kind cuda --option gpu=N
    #[arg(long, value_name = "N")]
    gpu: Option<u32>,

    /// The kind of accelerator, as in a configuration [default: process]
    #[arg(long, value_name = "KIND", conflicts_with = "gpu")]
    kind: Option<String>,

    /// A key that is specific to this kind of accelerator; may be repeated
    #[arg(long = "option", value_name = "KEY=VALUE", value_parser = option)]
    options: Vec<(String, String)>,

    /// End after the first generation
    #[arg(long)]
    once: bool,

    /// The engine started this process and is connected to its standard input
    #[arg(long, hide = true, conflicts_with_all = ["path", "once"])]
    inherited: bool,

    /// The kernels are those of a tenant: this process isolates itself before it takes any
    #[arg(long, hide = true, requires = "inherited")]
    isolated: bool,

    /// Namespaces that this process has of its own
    #[arg(long, hide = true, requires = "isolated", value_delimiter = ',')]
    namespaces: Vec<String>,
}

/// `KEY=VALUE`.
fn option(text: &str) -> Result<(String, String), String> {
    let (key, value) = text.split_once('=').ok_or("write KEY=VALUE, such as gpu=0")?;
    Ok((key.to_owned(), value.to_owned()))
}

impl Options {
    /// The kind of what runs the blocks, and its keys.
    fn spec(&self) -> Result<(&'static dyn Kind, DeviceSpec), String> {
        let name =
            self.kind.as_deref().unwrap_or(if self.gpu.is_some() { "cuda" } else { "process" });
        let mut given = self.options.clone();
        given.extend(self.gpu.map(|gpu| ("gpu".to_owned(), gpu.to_string())));
        let kind = kinds::find(name);
        // The meaning of `threads` depends on the kind.
        let has_threads =
            kind.is_some_and(|kind| kind.keys().iter().any(|key| key.name == "threads"));
        let threads = self.threads.filter(|_| has_threads);
        given.extend(threads.map(|n| ("threads".to_owned(), n.to_string())));
        let spec = kinds::device_spec(name, &given)?;
        Ok((kind.expect("it was found"), spec))
    }

    /// What runs the blocks. The error is one sentence.
    fn device(&self) -> Result<Box<dyn Device>, String> {
        let (kind, spec) = self.spec()?;
        let options = kinds::Options {
            threads: self.threads.unwrap_or(0) as usize,
            cores: self.cores.clone(),
            stack_kib: self.stack_kib as usize,
            hung_after: Duration::from_millis(self.hang_ms),
        };
        kind.device(&spec, options)
    }

    /// Serves engines of other machines.
    fn listen(&self, address: &str, cancel: &AtomicBool) -> Result<(), Failure> {
        let (kind, spec) = self.spec().map_err(Failure::Usage)?;
        // What is wrong with the options is reported now, and not to an engine.
        self.device().map_err(Failure::Usage)?;
        let file = self.secret_file.as_ref().expect("clap requires it");
        let secret = Secret::read(file).map_err(Failure::run)?;
        let greeter = Greeter::bind(address, secret).map_err(Failure::run)?;
        let at = greeter.local_address().map_err(Failure::run)?;
        println!("listening at tcp://{at}");
        let terms = Terms {
            kernels: self.kernels.clone(),
            device: &|| self.device(),
            exclusive: kind.exclusive_key(&spec).is_some(),
            once: self.once,
            hang: Duration::from_millis(self.hang_ms),
        };
        outcome(far::listen(greeter, &terms, cancel))
    }

    /// Moves this process into namespaces of its own. It has one thread at that time, and may be another process afterwards.
    pub(super) fn enter_namespaces(&self) -> Result<(), Failure> {
        let own = |name: &str| self.namespaces.iter().any(|namespace| namespace == name);
        if self.namespaces.is_empty() {
            return Ok(());
        }
        let own = Namespaces { pid: own("pid"), mount: own("mount"), ipc: own("ipc") };
        sys::isolation::enter_namespaces(own).map_err(|error| {
            Failure::Run(format!(
                "this process cannot have namespaces of its own: {error}; the host kernel needs user namespaces for this user \
                 (user.max_user_namespaces), and version 5.12 for \"mount\""
            ))
        })
    }

    /// An engine reports the end of the processes that it started.
    pub(super) fn is_monitored(&self) -> bool {
        !self.inherited
    }
}

/// An engine accepts processes of its own user and of root. For others its socket looks unused, and they would retry
/// endlessly.
fn may_connect(path: &Path) -> Result<(), Failure> {
    let own = sys::process::user();
    let who = match fs::symlink_metadata(path) {
        // If its owner has granted access to others, the engine itself reports whom it accepts.
        Ok(found) if own != 0 && found.uid() != own && is_closed_to_us(path) => {
            format!("the engine at {path:?} belongs to user {}", found.uid())
        }
        Err(error) if error.kind() == ErrorKind::PermissionDenied => {
            format!("{path:?} is in a folder that user {own} may not enter")
        }
        _ => return Ok(()),
    };
    Err(Failure::Run(format!("{who}: run this as the engine's user or as root")))
}

fn is_closed_to_us(path: &Path) -> bool {
    LocalSocket::connect(path).is_err_and(|error| error.kind() == ErrorKind::PermissionDenied)
}

pub(super) fn run(options: &Options) -> Result<(), Failure> {
    // Of kernels: the process may be killed.
    sys::process::print_lines();
    let cancel = Arc::new(AtomicBool::new(false));
    if let Some(address) = &options.listen {
        cancel_on_signal(cancel.clone()).map_err(Failure::run)?;
        return options.listen(address, &cancel);
    }
    if options.isolated {
        sys::isolation::isolate().map_err(|error| {
            Failure::Run(format!(
                "this process cannot be isolated: {error}; the host kernel needs seccomp filters"
            ))
        })?;
    }
    let mut device = options.device().map_err(Failure::Usage)?;
    let kernel = match options.kernels.as_slice() {
        [] => String::new(),
        [kernel] => absolute(kernel),
        _ => {
            let why = "a runtime that attaches runs one kernel: give --kernel once, or start one for each";
            return Err(Failure::Usage(why.to_owned()));
        }
    };
    let request = AttachRequest { service: options.service.clone(), kernel };
    outcome(match &options.path {
        Some(path) => {
            may_connect(path)?;
            cancel_on_signal(cancel.clone()).map_err(Failure::run)?;
            runtime::attach(path, &request, &mut *device, options.once, &cancel)
        }
        None => {
            // Signals to the engine's process group are handled by the engine: it ends this process in order, and the
            // host kernel ends it when the engine is killed.
            let _ignored = Signals::install().map_err(Failure::run)?;
            sys::process::end_with_parent().map_err(Failure::run)?;
            let input = std::io::stdin();
            let socket = input.as_fd().try_clone_to_owned().and_then(LocalSocket::inherited);
            let socket = socket.map_err(|error| {
                Failure::Usage(format!("standard input is not a connection to an engine: {error}"))
            })?;
            runtime::serve(&socket, &request, &mut *device, &cancel)
        }
    })
}

/// A kernel in a file, with its path for an engine whose working directory is another one.
fn absolute(kernel: &str) -> String {
    if kernel_file::named(kernel).is_none() {
        return kernel.to_owned();
    }
    let path = std::path::absolute(kernel);
    path.map_or_else(|_| kernel.to_owned(), |path| path.to_string_lossy().into_owned())
}

/// The exit code of an end.
fn outcome(end: Result<End, RuntimeError>) -> Result<(), Failure> {
    match end {
        Ok(End::Stopped) => Ok(()),
        Ok(End::EngineLost) => Err(Failure::Run("the engine has ended".into())),
        Ok(End::Failed(failure)) | Err(RuntimeError::Blocks(failure)) => {
            let hung = failure.reason == mqueue::abi::reason::HUNG;
            if hung {
                tracing::error!("{failure}");
                return Err(Failure::Unfinished);
            }
            Err(Failure::run(failure))
        }
        Err(error) => Err(Failure::run(error)),
    }
}
