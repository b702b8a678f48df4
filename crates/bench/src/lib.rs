//! Measurements: a load against a server, and a report that says whether it is valid.
//!
//! # Client classes
//!
//! The cost of a client limits what can be measured with it, so results of different classes are never compared.
//!
//! | class | client | example |
//! |---|---|---|
//! | T0 | ordinary kernel sockets, a socket or a connection place for every request in flight | any client |
//! | T2 | [`crate::client::burst`]: batches of equal datagrams through kernel sockets (GSO, GRO) | a client that batches |
//! | T3 | [`client::shm()`]: a ring in shared memory | a tenant on the same machine; network cards that write to memory |
//!
//! # When a run is void
//!
//! A run that cannot be trusted has reasons ([`Report::reasons`]), and its numbers are marked wherever they are
//! shown. A run is [`Void`] if a reply was wrong or duplicated, if a closed loop lost requests, if the server stopped
//! answering, if the client could not use its core, if an open loop could not send its rate, and if the run
//! contradicts Little's law (J. Little, "A Proof for the Queuing Formula L = λW", 1961): requests in flight = rate x
//! mean latency. The client knows the left side (in a closed loop it is the window) and has measured the right side;
//! if it miscounts its window or its clock, the two differ.
//!
//! ```no_run
//! use bench::{Mode, Plan};
//!
//! let mut plan = Plan::new("udp://127.0.0.1:9000".parse()?);
//! plan.mode = Mode::Closed { window: 64 };
//! let report = bench::run(&plan)?;
//! match report.void() {
//!     None => println!("{:.0}/s, p99 {} ns", report.rate, report.latency.p99_ns),
//!     Some(void) => println!("void: {void}"),
//! }
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

//!
//! # A server and a client in one program
//!
//! A service from a configuration, and a client:
//!
//! ```
//! use bench::client::{self, Echo, Load};
//! use server::config::{Config, Overrides};
//! use server::Server;
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let text = r#"
//!     schema = 1
//!     [[service]]
//!     name = "echo"
//!     listen = "udp://127.0.0.1:0"      # the host kernel chooses a port
//!     accelerator = "acc0"
//!     kernel = "echo"
//! "#;
//! let config = Config::parse("example", text, "".as_ref(), &Overrides::default())?;
//! let server = Server::start(config.topology)?;
//! let (_, listen) = server.addresses()[0];
//!
//! let load = Load { window: 8, requests: 1000, ..Load::default() };
//! let outcome = client::udp(listen.address, &load, &mut Echo::new(64))?;
//! assert!(outcome.is_perfect());
//!
//! assert_eq!(server.metrics().service(0).replied, 1000);
//! assert!(server.shutdown().is_clean());
//! # Ok(())
//! # }
//! ```
//!
//! Other modules
//!
//! * [`client`]: the client; [`compare`]: two servers side by side, and the table of record;
//! * [`litmus`]: tests whether the memory of this machine keeps the order that rings rely on;
//! * [`function`]: a kernel as a function, to compute correct replies; [`memcached`]: a database for tests and demos;
//! * [`plot`], [`units`]: figures for humans.
#![forbid(unsafe_code)]

pub mod client;
pub mod compare;
pub mod function;
pub mod litmus;
pub mod memcached;
mod observer;
mod plan;
pub mod plot;
mod report;
mod target;
pub mod units;

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use wire::framing::Framing;
use wire::nic::UDP_PAYLOAD_MAX;

use client::shm::ShmError;
use client::workload::Memcached;
use client::{Burst, ClientError, Load, Outcome, Pace, Stream, WINDOW_MAX, Workload};

pub(crate) use observer::cpu_seconds;
pub use plan::{Class, Mode, Plan, PlanError, Work};
pub use report::{Bottleneck, Latency, Report, ServerCost, Void};
pub use target::{MESSAGE_BYTES_MAX, Target, TargetError};

use observer::Observer;
use plan::Material;

/// Number of requests that check whether the server answers.
const CALLS: u64 = 3;
/// Time limit of that check.
const CALL_TIME: Duration = Duration::from_secs(4);
/// Time limit for storing the values of a workload.
const STORE_TIME: Duration = Duration::from_secs(60);
/// The same for each of them.
const STORE_KEY_TIME: Duration = Duration::from_micros(100);
/// Requests in flight meanwhile.
const STORE_WINDOW: usize = 16;
/// Maximum number of requests in flight in an open loop with a socket for each.
const OPEN_SOCKETS: usize = 1024;
/// Seed of arrivals: every run of a rate has the same ones.
const SEED: u64 = 0x5e7a1;

/// Why there is no report.
#[derive(Debug, thiserror::Error)]
pub enum BenchError {
    /// The plan contradicts itself.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// No server answered before the run.
    #[error("nothing answers at {0}: is the server running there?")]
    Unreachable(String),
    /// The server answered before the run, but not like the workload's kernel.
    #[error(
        "{target} does not answer `{work}` as it should: does its service run that kernel{}?",
        framing.as_ref().map_or(String::new(), |framing| format!(
            ", with framing = \"{framing}\" (what was tried; give the service's own with --framing)"
        ))
    )]
    Stranger {
        /// The server.
        target: String,
        /// The workload.
        work: String,
        /// The framing, if it matters.
        framing: Option<Framing>,
    },
    /// The user's own message was answered, but not as expected.
    #[error(
        "{target} does not answer the payload as --expect says: `serval ask {target}` with the same payload shows its answer"
    )]
    Unexpected {
        /// The server.
        target: String,
    },
    /// The user's own message was not answered.
    #[error(
        "{0} does not answer the payload: does a server run there, and does its kernel answer such a message?"
    )]
    Unanswered(String),
    /// The server does not store values, or returns different ones.
    #[error(
        "{target} does not store the values of `{work}` and give them back: is it a memcached (1.6 or later) that takes values this long?"
    )]
    NotMemcached {
        /// The server.
        target: String,
        /// The workload.
        work: String,
    },
    /// Not all values were stored in time; no answer was wrong.
    #[error(
        "{target} did not store the {keys} values of `{work}` in time: is it a memcached, and is it far away or busy?"
    )]
    Unstored {
        /// The server.
        target: String,
        /// Number of values.
        keys: u64,
        /// The workload.
        work: String,
    },
    /// The client cannot run.
    #[error(transparent)]
    Client(#[from] ClientError),
    /// The server's costs cannot be read.
    #[error("{0}")]
    Observe(String),
    /// A requirement of the workload is missing.
    #[error("cannot prepare the workload: {0}")]
    Material(String),
}

/// The kind of client.
#[derive(Clone, Debug)]
enum Client {
    Udp(SocketAddr),
    Burst(SocketAddr, Burst),
    Tcp(SocketAddr, Stream),
    Shm(PathBuf),
}

/// A plan with all defaults applied.
struct Prepared<'p> {
    plan: &'p Plan,
    client: Client,
    load: Load,
}

/// Runs the measurement. Takes warm-up and duration, and at most the time-out in addition.
pub fn run(plan: &Plan) -> Result<Report, BenchError> {
    run_watched(plan, &mut |_| ())
}

/// The same; `watch` is called some times per second with the elapsed share of the time.
pub fn run_watched(plan: &Plan, watch: &mut dyn FnMut(f64)) -> Result<Report, BenchError> {
    plan.check()?;
    let prepared = Prepared::new(plan)?;
    let material = Material::new(&plan.work).map_err(BenchError::Material)?;
    let stored = material.stores().map_or(Ok(()), |stores| prepared.store(stores));
    let called = stored.and_then(|()| prepared.call(&mut *material.workload()));
    if plan.cancel.load(Ordering::Relaxed) {
        // Missing values or answers are then not the server's fault.
        return Ok(Report::nothing(plan, Void::Interrupted));
    }
    called?;
    let mut observer = Observer::new(plan)?;
    std::thread::scope(|scope| {
        let clients: Vec<_> = (0..plan.clients())
            .map(|number| {
                let (prepared, material) = (&prepared, &material);
                scope.spawn(move || prepared.run_client(number, material))
            })
            .collect();
        let began = Instant::now();
        while !clients.iter().all(|client| client.is_finished()) {
            let whole = (plan.warmup + plan.duration).as_secs_f64();
            watch((began.elapsed().as_secs_f64() / whole.max(1e-9)).min(1.0));
            observer.look(began.elapsed());
            std::thread::sleep(observer.pause(began.elapsed()));
        }
        let joined = clients
            .into_iter()
            .map(|client| client.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)));
        let together = joined.reduce(|all, one| {
            let (mut all, one) = (all?, one?);
            all.add(&one);
            Ok(all)
        });
        match together.expect("there is a client") {
            Ok(outcome) => {
                let window = prepared.full_window();
                Ok(Report::new(plan, window, &outcome, observer.cost()))
            }
            Err(Ended::Void(void)) => Ok(Report::nothing(plan, void)),
            // It answered a moment ago.
            Err(Ended::Error(ClientError::Refused(_) | ClientError::Ended(_))) => {
                Ok(Report::nothing(plan, Void::Gone))
            }
            Err(Ended::Error(ClientError::Shm(ShmError::Closed | ShmError::Ended(_)))) => {
                Ok(Report::nothing(plan, Void::Gone))
            }
            Err(Ended::Error(error)) => Err(error.into()),
        }
    })
}

/// How a client ended without an outcome.
enum Ended {
    Void(Void),
    Error(ClientError),
}

impl<'p> Prepared<'p> {
    fn new(plan: &'p Plan) -> Result<Self, BenchError> {
        let has_identity = plan.work.has_identity();
        let client = match &plan.target {
            Target::Shm(path) => Client::Shm(path.clone()),
            Target::Tcp(address) => {
                let window = plan.window().unwrap_or(WINDOW_MAX);
                let stream = Stream {
                    connections: plan.connections.unwrap_or_else(|| window.min(4)),
                    framing: plan.framing(),
                    reply_framing: plan.reply_framing(),
                };
                Client::Tcp(*address, stream)
            }
            Target::Udp(address) => {
                let shared = Burst { sockets: plan.sockets(), offload: plan.class() == Class::T2 };
                let own_socket = plan.class() == Class::T0
                    && match plan.window() {
                        Some(window) => plan.connections.is_none_or(|n| n == window),
                        None => !has_identity,
                    };
                if own_socket { Client::Udp(*address) } else { Client::Burst(*address, shared) }
            }
        };
        let window_max = match client {
            Client::Udp(_) => OPEN_SOCKETS,
            Client::Tcp(..) | Client::Shm(_) => WINDOW_MAX,
            Client::Burst(..) => client::BURST_WINDOW_MAX,
        };
        let (window, pace) = match plan.mode {
            Mode::Closed { window } => (window, Pace::Closed),
            Mode::Open { rate } => (window_max, Pace::Open { rate, seed: SEED, batch: plan.batch }),
        };
        let closed = matches!(plan.mode, Mode::Closed { .. });
        let load = Load {
            window,
            pace,
            train: (closed && plan.batch > 1).then_some(plan.batch),
            warmup: plan.warmup,
            duration: plan.duration,
            timeout: plan.timeout(),
            reply_bytes_max: reply_bytes_max(plan),
            spin: !plan.cores.is_empty(),
            cancel: plan.cancel.clone(),
            ..Load::default()
        };
        Ok(Self { plan, client, load })
    }

    /// Runs one of the clients: its part of the load, on its core.
    fn run_client(&self, number: usize, material: &Material) -> Result<Outcome, Ended> {
        if let Some(&core) = self.plan.cores.get(number)
            && let Err(error) = sys::affinity::pin_current_thread(core)
        {
            return Err(Ended::Void(Void::NotPinned { core, why: error.to_string() }));
        }
        let clients = self.plan.clients();
        let share = |whole: usize| whole / clients + usize::from(number < whole % clients);
        let mut load = Load { window: share(self.load.window), ..self.load.clone() };
        if let Pace::Open { rate, seed, .. } = &mut load.pace {
            *rate /= clients as f64;
            *seed += number as u64;
        }
        let mut client = self.client.clone();
        match &mut client {
            Client::Burst(_, burst) => burst.sockets = share(burst.sockets).max(1),
            Client::Tcp(_, stream) => stream.connections = share(stream.connections).max(1),
            Client::Udp(_) | Client::Shm(_) => {}
        }
        // Some workloads are bound to the thread that created them.
        let mut workload = material.workload();
        let outcome = client.run(&load, &mut *workload).map_err(Ended::Error)?;
        Ok(Outcome { lookups: workload.lookups(), ..outcome })
    }

    /// Stores the values of the workload, and checks that they were. Over UDP it reads them once: a cache in front of the memcached knows them
    /// then. Otherwise all of the first requests go to the memcached, whose host drops datagrams of a large window.
    fn store(&self, workload: Memcached<'_>) -> Result<(), BenchError> {
        let keys = workload.stored();
        if keys == 0 {
            return Ok(());
        }
        let time =
            STORE_TIME + STORE_KEY_TIME.saturating_mul(u32::try_from(keys).unwrap_or(u32::MAX));
        let (mut stores, is_framed) = (workload.clone().stores(), workload.is_framed());
        let load = Load {
            pace: Pace::Closed,
            train: None,
            warmup: Duration::ZERO,
            timeout: CALL_TIME / 4,
            spin: false,
            ..self.load.clone()
        };
        let client = self.client.on_one_connection();
        // A server that is not a memcached is detected at once.
        for (requests, window, duration) in [(CALLS, 1, CALL_TIME), (keys, STORE_WINDOW, time)] {
            let load = Load { requests: requests.min(keys), window, duration, ..load.clone() };
            match client.run(&load, &mut stores) {
                Err(ClientError::Refused(_)) => return Err(self.unreachable()),
                Err(error) => return Err(error.into()),
                Ok(stored) if stored.replied == load.requests => {}
                // It answered too late or not at all, but not wrongly.
                Ok(stored) if stored.wrong + stored.duplicated == 0 => {
                    return Err(self.unstored(keys));
                }
                Ok(_) => return Err(self.unexpected_answer()),
            }
        }
        if is_framed {
            // The run judges the answers.
            let (window, duration) = (STORE_WINDOW, time);
            client
                .run(&Load { requests: keys, window, duration, ..load }, &mut workload.reads())?;
        }
        Ok(())
    }

    fn unstored(&self, keys: u64) -> BenchError {
        let (target, work) = (self.plan.target.to_string(), self.plan.work.to_string());
        BenchError::Unstored { target, keys, work }
    }

    /// The server answers, but not like the workload's server.
    fn unexpected_answer(&self) -> BenchError {
        let (target, work) = (self.plan.target.to_string(), self.plan.work.to_string());
        match &self.plan.work {
            work if work.is_memcached() => {
                BenchError::NotMemcached { target, work: work.to_string() }
            }
            Work::Custom(_) => BenchError::Unexpected { target },
            _ => {
                let framing = self.is_tcp().then(|| self.plan.framing());
                BenchError::Stranger { target, work, framing }
            }
        }
    }

    fn unreachable(&self) -> BenchError {
        BenchError::Unreachable(self.plan.target.to_string())
    }

    /// Sends a few requests, one after the other, to check whether the server answers correctly.
    fn call(&self, workload: &mut dyn Workload) -> Result<(), BenchError> {
        let load = Load {
            window: 1,
            pace: Pace::Closed,
            warmup: Duration::ZERO,
            requests: CALLS,
            duration: CALL_TIME,
            timeout: CALL_TIME / 4,
            spin: false,
            ..self.load.clone()
        };
        let all_stored = self.plan.work.key_space().is_none();
        let called = self.client.on_one_connection().run(&load, workload);
        match called {
            Err(ClientError::Refused(_)) => Err(self.unreachable()),
            Err(error) => Err(error.into()),
            // Everything was stored a moment ago.
            Ok(_) if all_stored && workload.lookups().hit_ratio() == Some(0.0) => {
                Err(self.unexpected_answer())
            }
            Ok(outcome) if outcome.replied > 0 && outcome.wrong == 0 => Ok(()),
            Ok(outcome) if outcome.wrong > 0 => Err(self.unexpected_answer()),
            Ok(_) if matches!(self.plan.work, Work::Custom(_)) => {
                Err(BenchError::Unanswered(self.plan.target.to_string()))
            }
            // A byte stream that is accepted but not answered has the wrong framing.
            Ok(outcome) if self.is_tcp() && outcome.lost > 0 => Err(self.unexpected_answer()),
            Ok(_) => Err(self.unreachable()),
        }
    }

    /// Requests that are in flight at any time. Clients that share sockets wait for a full batch or for the turns of
    /// other sockets and fill the window less, as do clients that compare the values of many answers before they send
    /// again; a ring may be shorter than the window, and an open loop has what has arrived.
    fn full_window(&self) -> Option<usize> {
        let compares = matches!(self.plan.work, Work::Memcached { .. } | Work::FacesDatabase);
        let full = matches!(self.client, Client::Udp(_) | Client::Tcp(..)) && !compares;
        self.plan.window().filter(|_| full)
    }

    fn is_tcp(&self) -> bool {
        matches!(self.client, Client::Tcp(..))
    }
}

/// Maximum length of a reply for the client.
fn reply_bytes_max(plan: &Plan) -> usize {
    let bytes = plan.work.reply_bytes().max(2048);
    match plan.target {
        Target::Udp(_) => bytes.min(UDP_PAYLOAD_MAX),
        _ => bytes,
    }
}

impl Client {
    /// The same for a few requests before the run.
    fn on_one_connection(&self) -> Self {
        match self {
            Self::Tcp(address, stream) => Self::Tcp(*address, Stream { connections: 1, ..*stream }),
            Self::Burst(address, _) => Self::Udp(*address),
            client => client.clone(),
        }
    }

    fn run(&self, load: &Load, workload: &mut dyn Workload) -> Result<Outcome, ClientError> {
        match self {
            Self::Udp(address) => client::udp(*address, load, workload),
            Self::Burst(address, burst) => client::burst(*address, burst, load, workload),
            Self::Tcp(address, stream) => client::tcp(*address, stream, load, workload),
            Self::Shm(path) => client::shm(path, load, workload),
        }
    }
}
