//! `serval demo`: real clients against a real server in this process, in less than a minute.
//!
//! | demo    | what it shows                                                                          |
//! |---------|----------------------------------------------------------------------------------------|
//! | `lenet` | a neural network behind a port: accuracy over UDP and TCP; with a GPU what its kernel   |
//! |         | is worth against the CPU's, without one what leaving out the hand-over between threads |
//! |         | is worth against a host-centric server with the same kernel                            |
//! | `echo`  | hundreds of mqueues on one core                                                         |
//! | `scale` | the kernel of the documentation                                                        |
//! | `faces` | a kernel that asks memcached by itself                                                 |
//!
//! A demo checks every reply and fails when one is wrong. Numbers are for looking at, not for quoting:
//! client and servers share the machine's cores, and rounds are short.

mod baseline;
mod bench;
mod echo;
mod faces;
mod lenet;
mod parties;
mod scale;

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use ::bench::memcached::MemcachedError;
use engine::topology::{
    Accelerator, AcceleratorKind, CpuPlacement, EngineSettings, HEARTBEAT_MS, Launch, Limits,
    Listen, STACK_KIB, Service, Topology,
};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use serde_json::Value as Json;
use wire::nic::Transport;

use crate::screen::Screen;
use ::bench::client::{ClientError, Outcome};
use ::bench::plot::Chart;
use runtime::kinds;
use server::{Server, ServerError};

pub use baseline::HostCentric;

/// Which demo.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Name {
    /// Reads handwritten digits with a neural network (LeNet-5)
    Lenet,
    /// Verifies faces against pictures in memcached
    Faces,
    /// Sends messages back, through hundreds of mqueues
    Echo,
    /// Multiplies vectors of numbers by 3
    Scale,
}

/// How a demo runs.
#[derive(Clone, Debug)]
pub struct Options {
    /// Workers of the engine.
    pub workers: usize,
    /// Mqueues; `None`: what suits the demo.
    pub mqueues: Option<u32>,
    /// Shorter and fewer rounds.
    pub quick: bool,
    /// `faces`: a file of pictures instead of the built-in ones.
    pub pictures: Option<std::path::PathBuf>,
    /// The GPU for the demos that have a kernel for one, or in one sentence why none is used.
    pub gpu: Result<DemoGpu, String>,
    /// How to write.
    pub screen: Screen,
    /// Ends the demo early when set.
    pub cancel: Arc<AtomicBool>,
}

/// A GPU that a demo may use. Its runtime is this program, started once more.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DemoGpu {
    /// Its number, from 0, as CUDA_VISIBLE_DEVICES leaves it.
    pub index: u32,
    /// What it is called.
    pub name: String,
    /// A fatbin with the built-in kernels' names, instead of those that are part of this program.
    pub kernels: Option<std::path::PathBuf>,
}

impl DemoGpu {
    /// The accelerator, and `service` as it runs there.
    fn place(&self, service: Service) -> (AcceleratorKind, Service) {
        let launch =
            Launch::Engine { program: None, threads: 0, cores: Vec::new(), stack_kib: STACK_KIB };
        let index = ("gpu".to_owned(), self.index.into());
        let device = kinds::device_spec("cuda", &[index]).expect("a GPU that was found");
        let rings = kinds::default_rings(&device);
        let kind = AcceleratorKind::Process { launch, heartbeat_ms: HEARTBEAT_MS, device };
        let kernel = match &self.kernels {
            Some(file) => format!("{}:{}", file.display(), service.kernel),
            None => service.kernel.clone(),
        };
        (kind, Service { kernel, rings, ..service })
    }
}

/// What a demo found.
#[derive(Clone, Debug)]
pub struct Report {
    /// For people.
    pub text: String,
    /// For programs.
    pub json: Json,
    /// For a picture.
    pub chart: Chart,
}

/// Why a demo failed.
#[derive(Debug, thiserror::Error)]
pub enum DemoError {
    /// The server did not start.
    #[error(transparent)]
    Server(#[from] ServerError),
    /// The client cannot run.
    #[error(transparent)]
    Client(#[from] ClientError),
    /// There is no database to ask.
    #[error(transparent)]
    Memcached(#[from] MemcachedError),
    /// A kernel cannot be used.
    #[error(transparent)]
    Accelerator(#[from] accel::AccelError),
    /// Replies were wrong or missing.
    #[error("{0}")]
    Wrong(String),
    /// A program or file that the demo needs is not there; the text says how to get it.
    #[error("{0}")]
    Missing(String),
    /// The host kernel refused something.
    #[error("cannot {what}: {error}")]
    Io {
        /// What was tried.
        what: String,
        /// What the host kernel said.
        error: std::io::Error,
    },
    /// A signal came.
    #[error("interrupted")]
    Interrupted,
}

/// Runs a demo, on a thread of its own: it may be pinned to a core, which its caller must not notice.
pub fn run(name: Name, options: &Options) -> Result<Report, DemoError> {
    let stage = Stage { options, cores: Cores::choose(options.workers) };
    let play = || {
        if let Some(cores) = stage.cores {
            // Not pinned is slower to look at, not wrong.
            let _ = sys::affinity::pin_current_thread(cores.client);
        }
        match name {
            Name::Lenet => lenet::run(&stage),
            Name::Faces => faces::run(&stage),
            Name::Echo => echo::run(&stage),
            Name::Scale => scale::run(&stage),
        }
    };
    let played = std::thread::scope(|scope| scope.spawn(play).join());
    played.unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}

/// A core for the servers, one for everybody else: what two machines would be. Servers of one worker
/// only, and where there are two cores.
#[derive(Clone, Copy, Debug)]
struct Cores {
    server: usize,
    client: usize,
}

impl Cores {
    fn choose(workers: usize) -> Option<Self> {
        let allowed = sys::affinity::allowed_cores().ok()?;
        match (workers, allowed.as_slice()) {
            (1, [server, .., client]) => Some(Self { server: *server, client: *client }),
            _ => None,
        }
    }
}

/// A server of a demo, and its UDP and TCP ports.
type Served = (Server, SocketAddr, SocketAddr);

/// What the demos share.
struct Stage<'o> {
    options: &'o Options,
    cores: Option<Cores>,
}

impl Stage<'_> {
    /// A progress bar on standard error; nothing where that is no terminal.
    fn progress(&self, what: &'static str, steps: usize) -> ProgressBar {
        let target = if self.options.screen.json {
            ProgressDrawTarget::hidden()
        } else {
            ProgressDrawTarget::stderr()
        };
        let bar = ProgressBar::with_draw_target(Some(steps as u64), target);
        let style = ProgressStyle::with_template("  {msg:<34} [{bar:30}] {pos}/{len}");
        bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()).progress_chars("=> "));
        bar.set_message(what);
        bar
    }

    /// Fails once a signal has come.
    fn go_on(&self) -> Result<(), DemoError> {
        if self.options.cancel.load(Ordering::Relaxed) {
            return Err(DemoError::Interrupted);
        }
        Ok(())
    }

    /// Starts a server with one service, whose kernel runs inside its workers, on free loopback ports: UDP,
    /// then TCP.
    fn serve(&self, service: Service) -> Result<Served, DemoError> {
        let kind = AcceleratorKind::Cpu { placement: CpuPlacement::Worker, stack_kib: STACK_KIB };
        self.serve_on(kind, service)
    }

    /// The same with the kernel anywhere.
    fn serve_on(&self, kind: AcceleratorKind, service: Service) -> Result<Served, DemoError> {
        let loopback: SocketAddr = ([127, 0, 0, 1], 0).into();
        let listen = |transport| Listen { transport, address: loopback };
        let service =
            Service { listen: vec![listen(Transport::Udp), listen(Transport::Tcp)], ..service };
        let topology = Topology {
            engine: EngineSettings {
                workers: self.options.workers,
                cores: self.cores.iter().map(|c| c.server).collect(),
                ..EngineSettings::default()
            },
            limits: Limits::default(),
            accelerators: vec![Accelerator { name: "acc0".to_owned(), kind }],
            services: vec![service],
        };
        let server = Server::start(topology)?;
        let at: Vec<SocketAddr> = server.addresses().iter().map(|(_, l)| l.address).collect();
        Ok((server, at[0], at[1]))
    }

    /// Who runs where, for captions.
    fn cores(&self) -> String {
        match (self.cores, std::thread::available_parallelism()) {
            (Some(Cores { server, client }), _) => {
                format!("servers on core {server}, everything else on core {client}")
            }
            (None, Ok(cores)) => format!("client and servers share {cores} cores"),
            (None, Err(_)) => "client and servers share the machine's cores".to_owned(),
        }
    }
}

/// Every request has to have had its right reply.
fn perfect(what: &str, outcome: &Outcome) -> Result<(), DemoError> {
    if outcome.is_perfect() {
        return Ok(());
    }
    let Outcome { sent, replied, wrong, lost, .. } = outcome;
    Err(DemoError::Wrong(format!(
        "{what}: of {sent} requests {replied} were answered right, {wrong} wrong, {lost} not at all"
    )))
}

/// The accounts of the only service, once it is quiet.
fn accounts(server: &Server) -> String {
    let s = server.metrics().service(0);
    format!(
        "{} requests received = {} replied + {} dropped + {} under way",
        s.received,
        s.replied,
        s.dropped_requests(),
        s.outstanding()
    )
}
