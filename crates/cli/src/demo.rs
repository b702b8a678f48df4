//! `serval demo`: clients and a server in this process, in less than a minute.
//!
//! | demo    | content                                                                             |
//! |---------|-------------------------------------------------------------------------------------|
//! | `lenet` | a neural network behind a port: accuracy over UDP and TCP; then its kernel on a GPU |
//! |         | against the CPU, or without a GPU against a host-centric server                     |
//! | `echo`  | hundreds of mqueues on one core                                                     |
//! | `scale` | the kernel of the documentation                                                     |
//! | `faces` | a kernel that sends requests to memcached                                           |
//! | `transfer` | a file through a transfer engine, checked; a file service beside a loop            |
//! | `functions` | functions on the path of messages, attached and replaced under load             |
//! | `cache` | a cache in front of an unmodified memcached                                 |
//! | `auth`  | CoAP authentication in front of a Node.js server, beside a flood of forged requests |
//! | `chain` | authentication, the faces kernel, and a cache between it and memcached          |
//! | `remote` | one kernel on local and remote accelerators                                        |
//! | `allreduce` | groups of ranks sum vectors over TCP and shared memory                         |
//! | `sockets` | kernels with connections of their own: matrix products, echoed streams           |
//! | `tenants` | six tenants share an engine, and one floods it                                |
//!
//! A demo checks every reply and fails if one is wrong. Its numbers are an illustration, not a benchmark: client and
//! servers share the machine's cores, and rounds are short.

mod allreduce;
mod auth;
mod baseline;
mod bench;
mod cache;
mod chain;
mod coap;
mod costs;
mod echo;
mod faces;
mod functions;
mod lenet;
mod other_load;
mod remote;
mod scale;
mod sockets;
mod spoiled;
mod tenants;
mod transfer;

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

use crate::screen::{Screen, Tone};
use ::bench::client::{ClientError, Outcome, Workload};
use ::bench::plot::Chart;
use other_load::OtherLoad;
use runtime::kinds;
use server::{Server, ServerError};

pub use baseline::HostCentric;
use spoiled::Spoiled;

/// The demo.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Name {
    /// Reads handwritten digits with a neural network (LeNet-5)
    Lenet,
    /// Verifies faces against pictures in memcached
    Faces,
    /// Answers messages with themselves, through hundreds of mqueues
    Echo,
    /// Multiplies vectors of numbers by 3
    Scale,
    /// Moves a file through all stages of transfers, and serves it beside a loop
    Transfer,
    /// Functions on the path of messages, replaced while clients are served
    Functions,
    /// Caches the values of an unmodified memcached
    Cache,
    /// Authenticates CoAP requests for an unmodified server, beside a flood of forged ones
    Auth,
    /// Authentication, a kernel, and a cache between the kernel and memcached
    Chain,
    /// Sums vectors over groups of ranks
    Allreduce,
    /// Kernels with connections of their own: matrix products, streams
    Sockets,
    /// Reads digits on local and remote accelerators
    Remote,
    /// Six tenants share an engine, and one floods it
    Tenants,
}

/// Options of a demo.
#[derive(Clone, Debug)]
pub struct Options {
    /// Workers of the engine.
    pub workers: usize,
    /// Mqueues; `None`: depends on the demo.
    pub mqueues: Option<u32>,
    /// Shorter and fewer rounds.
    pub quick: bool,
    /// `faces`: a file of pictures instead of the built-in ones.
    pub pictures: Option<std::path::PathBuf>,
    /// The GPU for demos with a kernel for one, or the reason, in one sentence, why none is used.
    pub gpu: Result<DemoGpu, String>,
    /// Spoil one byte of what arrives, so that the checks must find it.
    pub corrupt: bool,
    /// The output.
    pub screen: Screen,
    /// Ends the demo early when set.
    pub cancel: Arc<AtomicBool>,
}

/// A GPU that a demo may use. Its runtime is a second process of this program.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DemoGpu {
    /// Its number, from 0, after CUDA_VISIBLE_DEVICES.
    pub index: u32,
    /// Its name.
    pub name: String,
    /// A fatbin with the built-in kernels' names, instead of those that are part of this program.
    pub kernels: Option<std::path::PathBuf>,
}

impl DemoGpu {
    /// The accelerator, and `service` changed to run on it.
    fn place(&self, service: Service) -> (AcceleratorKind, Service) {
        let launch =
            Launch::Engine { program: None, threads: 0, cores: Vec::new(), stack_kib: STACK_KIB };
        let index = ("gpu".to_owned(), self.index.to_string());
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

/// The result of a demo.
#[derive(Clone, Debug)]
pub struct Report {
    /// As text.
    pub text: String,
    /// As JSON.
    pub json: Json,
    /// As a chart, if the demo has one.
    pub chart: Option<Chart>,
    /// What was wrong, in one sentence: the demo has failed although it has a report.
    pub failure: Option<String>,
}

/// What Serval is for, before the figures.
const PURPOSE: &str = "\
Serval makes an accelerator a network server. Clients send UDP or TCP to a port; an engine puts each request
into a message queue in shared memory; a kernel on a GPU or on host cores answers it there. No host application
code runs for a request.";

impl Report {
    /// With the purpose of Serval at the beginning, and a warning if other programs disturbed the demo.
    fn with_frame(mut self, screen: &Screen, disturbance: Option<String>) -> Self {
        self.text = format!("{PURPOSE}\n\n{}", self.text);
        if let Some(why) = disturbance {
            let warning = format!("  The times and rates mean nothing: {why}.");
            self.text =
                format!("{}\n{}\n", self.text.trim_end(), screen.paint(Tone::Yellow, &warning));
            self.json["disturbed"] = why.clone().into();
            self.chart.iter_mut().for_each(|chart| chart.warning = Some(why.clone()));
        }
        self
    }
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
    /// There is no database.
    #[error(transparent)]
    Memcached(#[from] MemcachedError),
    /// A kernel is unusable.
    #[error(transparent)]
    Accelerator(#[from] accel::AccelError),
    /// Replies were wrong or missing.
    #[error("{0}")]
    Wrong(String),
    /// A program or file that the demo needs is missing; the text says how to get it.
    #[error("{0}")]
    Missing(String),
    /// A call to the host kernel failed.
    #[error("cannot {what}: {error}")]
    Io {
        /// The attempted call.
        what: String,
        /// The host kernel's error.
        error: std::io::Error,
    },
    /// A signal was received.
    #[error("interrupted")]
    Interrupted,
}

/// Runs a demo on its own thread, because it may be pinned to a core, which must not affect the caller.
pub fn run(name: Name, options: &Options) -> Result<Report, DemoError> {
    // These have threads of their own, which would all run on the core of their creator.
    let pinned = !matches!(name, Name::Transfer | Name::Allreduce | Name::Remote | Name::Tenants);
    let cores = pinned.then(|| Cores::choose(options.workers)).flatten();
    let stage = Stage { options, cores, spoils: AtomicBool::new(options.corrupt) };
    let play = || {
        if let Some(cores) = stage.cores {
            // Without pinning the numbers are worse, but not wrong.
            let _ = sys::affinity::pin_current_thread(cores.client);
        }
        match name {
            Name::Lenet => lenet::run(&stage),
            Name::Faces => faces::run(&stage),
            Name::Echo => echo::run(&stage),
            Name::Scale => scale::run(&stage),
            Name::Transfer => transfer::run(&stage),
            Name::Functions => functions::run(&stage),
            Name::Cache => cache::run(&stage),
            Name::Auth => auth::run(&stage),
            Name::Chain => chain::run(&stage),
            Name::Allreduce => allreduce::run(&stage),
            Name::Sockets => sockets::run(&stage),
            Name::Remote => remote::run(&stage),
            Name::Tenants => tenants::run(&stage),
        }
    };
    let other_load = OtherLoad::begin();
    let played = std::thread::scope(|scope| scope.spawn(play).join());
    let played = played.unwrap_or_else(|panic| std::panic::resume_unwind(panic));
    Ok(played?.with_frame(&options.screen, other_load.disturbance()))
}

/// One core for the servers and one for everything else, to resemble two machines. Only for servers with one worker,
/// and if there are two cores.
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

/// State that the demos share.
struct Stage<'o> {
    options: &'o Options,
    cores: Option<Cores>,
    /// Of the demos that use [`Stage::spoiled`]: the next reply is to be changed.
    spoils: AtomicBool,
}

impl Stage<'_> {
    /// A progress bar on standard error; hidden if that is not a terminal.
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

    /// Fails if a signal was received.
    fn check_interrupted(&self) -> Result<(), DemoError> {
        if self.options.cancel.load(Ordering::Relaxed) {
            return Err(DemoError::Interrupted);
        }
        Ok(())
    }

    /// Starts a server with one service, whose kernel runs on its workers, on free loopback ports: UDP, then TCP.
    fn serve(&self, service: Service) -> Result<Served, DemoError> {
        let kind = AcceleratorKind::Cpu { placement: CpuPlacement::Worker, stack_kib: STACK_KIB };
        self.serve_on(kind, service)
    }

    /// The same with the kernel on any accelerator.
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
            // A proxy has none.
            accelerators: match service.upstream {
                Some(_) => Vec::new(),
                None => vec![Accelerator { name: "acc0".to_owned(), kind }],
            },
            services: vec![service],
            tenants: Vec::new(),
        };
        let server = Server::start(topology)?;
        let at: Vec<SocketAddr> = server.addresses().iter().map(|(_, l)| l.address).collect();
        Ok((server, at[0], at[1]))
    }

    /// The workload, of which one reply is changed if that was asked for: the first one of the whole demo.
    fn spoiled<'w>(&'w self, workload: &'w mut dyn Workload) -> Spoiled<'w> {
        Spoiled { inner: workload, is_due: &self.spoils }
    }

    /// The placement, for captions.
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

/// Fails unless every request had its correct reply.
fn check_complete(what: &str, outcome: &Outcome) -> Result<(), DemoError> {
    if outcome.is_perfect() {
        return Ok(());
    }
    let Outcome { sent, replied, wrong, lost, .. } = outcome;
    Err(DemoError::Wrong(format!(
        "{what}: of {sent} requests {replied} were answered right, {wrong} wrong, {lost} not at all"
    )))
}

/// The counters of the only service, once nothing is in flight.
fn accounts(server: &Server) -> String {
    let s = server.metrics().service(0);
    format!(
        "{} requests received = {} replied + {} dropped + {} in flight",
        s.received,
        s.replied,
        s.dropped_requests(),
        s.outstanding()
    )
}
