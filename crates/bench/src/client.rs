//! A measuring client: keeps requests in flight, checks every reply, and counts.
//!
//! It has one thread. In a *closed loop* a new request is sent when a reply has arrived (or was given up), so that a
//! window of requests is always in flight. In an *open loop* requests arrive by a Poisson process, independent of the
//! server, and their latency counts from the arrival, not from the time of sending. The client polls the sockets in a
//! loop, which adds the least latency; unless it has its own core ([`Load::spin`]) it yields the core while there is
//! nothing to do.
//!
//! * [`udp`]: one connected socket for every request in flight, since a datagram does not identify its request. A
//!   request without an answer in time counts as lost, and its socket is replaced, so that a late answer cannot be
//!   taken for the next one's.
//! * [`burst`]: a few sockets with many requests in flight on each, in GSO batches where the host kernel supports
//!   them. Replies are matched by an identity in their payload.
//! * [`tcp`]: connections with requests pipelined on them; replies come in order. A connection whose
//!   oldest request is not answered in time is replaced, and everything in flight on it is lost.
//! * [`shm()`]: a shared-memory port of an engine on this machine, without a network; [`mod@shm`] is the
//!   client itself, for programs.
//!
//! [`mod@ask`] sends one message and waits for its reply.
//!
//! [`workload`] contains the workloads. The [crate] builds measurements on it that report when they are not valid.
//!
//! ```no_run
//! use bench::client::{self, Echo, Load};
//!
//! let load = Load { window: 16, requests: 100_000, ..Load::default() };
//! let outcome = client::udp("127.0.0.1:9000".parse()?, &load, &mut Echo::new(64))?;
//! println!("{:.0}/s, p50 {:.1} us", outcome.rate(), outcome.quantile_us(0.5));
//! assert_eq!(outcome.wrong, 0);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod arrivals;
pub mod ask;
mod burst;
pub mod shm;
mod tally;
mod tcp;
mod udp;
pub mod workload;

use std::fmt;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use hdrhistogram::Histogram;
use wire::framing::Framing;

use tally::Tally;
pub use workload::{Echo, Workload};

/// Shortest part of a run that has a 99th percentile of its own; it is longer if it has fewer replies than
/// [`SLICE_REPLIES`].
pub const SLICE: Duration = Duration::from_millis(50);
/// Fewest replies of a slice.
pub const SLICE_REPLIES: u64 = 1000;
/// Maximum number of requests in flight with a socket for each, or on connections.
pub const WINDOW_MAX: usize = 4096;
/// Maximum number of requests in flight with many on a socket ([`burst`]).
pub const BURST_WINDOW_MAX: usize = 1 << 16;

/// Number, rate and duration of requests.
#[derive(Clone, Debug)]
pub struct Load {
    /// Requests in flight, from 1. On TCP: of all connections together. In an open loop: the maximum; arrivals beyond
    /// it wait, which counts in their latency.
    pub window: usize,
    /// Total number of requests to send.
    pub requests: u64,
    /// When requests are sent.
    pub pace: Pace,
    /// Closed loop of [`burst`]: exactly this many are sent together; `None`: as many as there is room for.
    pub train: Option<usize>,
    /// Warm-up at the start, not measured.
    pub warmup: Duration,
    /// The measured time. Afterwards no new request is sent; in an open loop those that arrived before and still wait
    /// are, for as long as a time-out.
    pub duration: Duration,
    /// A request without a reply for this long is lost.
    pub timeout: Duration,
    /// Longest reply that is accepted, in bytes.
    pub reply_bytes_max: usize,
    /// Never yields the core: for a thread with its own core.
    pub spin: bool,
    /// Ends the run early when set, for instance by a signal.
    pub cancel: Arc<AtomicBool>,
}

impl Default for Load {
    fn default() -> Self {
        Self {
            window: 1,
            requests: u64::MAX,
            pace: Pace::Closed,
            train: None,
            warmup: Duration::ZERO,
            duration: Duration::from_secs(3600),
            timeout: Duration::from_secs(1),
            reply_bytes_max: 65_536,
            spin: false,
            cancel: Arc::default(),
        }
    }
}

/// When requests are sent.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Pace {
    /// When there is room in the window.
    Closed,
    /// At random times, independent of the server: a Poisson process.
    Open {
        /// Mean number of requests per second.
        rate: f64,
        /// The same seed gives the same arrivals.
        seed: u64,
        /// Requests that arrive at the same time, from 1.
        batch: usize,
    },
}

/// The result of a run. `sent = replied + wrong + lost`, unless a reply to [`burst`] was too damaged to identify its
/// request (then `wrong` counts it and `lost` its request). With a warm-up, counting starts after it, including
/// requests that are in flight then.
#[derive(Clone)]
pub struct Outcome {
    /// Requests sent.
    pub sent: u64,
    /// Correct replies.
    pub replied: u64,
    /// Wrong replies; also those of the warm-up.
    pub wrong: u64,
    /// Requests without a reply in time.
    pub lost: u64,
    /// Replies to requests that had theirs already; also those of the warm-up.
    pub duplicated: u64,
    /// Correct replies to requests that had been given up.
    pub late: u64,
    /// Results of gets; also those of the warm-up. Filled in by the owner of the workload.
    pub lookups: workload::Lookups,
    /// Open loop: arrivals for which the window had no room until the end and a time-out more.
    pub unsent: u64,
    /// Sockets or connections that had to be replaced.
    pub reconnects: u64,
    /// The measured part. Where a number of requests ends the run: until the last reply.
    pub elapsed: Duration,
    /// From the last reply to the end of the measured part.
    pub silence: Duration,
    /// Correct replies that came in the measured part.
    pub measured: u64,
    /// Nanoseconds from send to reply of correct replies: in a closed loop those in the measured part. In an open loop from
    /// the arrival, for arrivals in the measured part: also for those whose reply comes after it, which are the slowest.
    pub latency: Histogram<u64>,
    /// Of an open loop: the 99th percentile of each slice of the measured part ([`SLICE`]).
    pub slices_p99_ns: Vec<u64>,
    /// Total time that requests spent in flight in the measured part, added when they ended.
    pub in_flight_ns: u64,
    /// The part of that time that belongs to lost requests.
    pub lost_ns: u64,
    /// The same computed differently: the number of requests in flight, integrated over time.
    pub waiting_ns: u128,
    /// Time of the client's loop in turns that found work.
    pub busy: Duration,
    /// Time in long turns in which the thread did not run: other threads had the core.
    pub stolen: Duration,
    /// CPU time of the client's thread during [`Self::cpu_period`].
    pub cpu: Duration,
    /// From the begin of the measured part to the end of the run.
    pub cpu_period: Duration,
}

impl fmt::Debug for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Outcome")
            .field("sent", &self.sent)
            .field("replied", &self.replied)
            .field("wrong", &self.wrong)
            .field("lost", &self.lost)
            .field("duplicated", &self.duplicated)
            .field("late", &self.late)
            .field("unsent", &self.unsent)
            .field("reconnects", &self.reconnects)
            .field("elapsed", &self.elapsed)
            .field("p50_us", &self.quantile_us(0.5))
            .finish_non_exhaustive()
    }
}

impl Outcome {
    pub(crate) fn new(latency: Histogram<u64>) -> Self {
        Self {
            sent: 0,
            replied: 0,
            wrong: 0,
            lost: 0,
            duplicated: 0,
            late: 0,
            lookups: workload::Lookups::default(),
            unsent: 0,
            reconnects: 0,
            elapsed: Duration::ZERO,
            silence: Duration::ZERO,
            measured: 0,
            latency,
            slices_p99_ns: Vec::new(),
            in_flight_ns: 0,
            lost_ns: 0,
            waiting_ns: 0,
            busy: Duration::ZERO,
            stolen: Duration::ZERO,
            cpu: Duration::ZERO,
            cpu_period: Duration::ZERO,
        }
    }

    /// Adds the results of another client that ran at the same time.
    pub(crate) fn add(&mut self, other: &Self) {
        self.sent += other.sent;
        self.replied += other.replied;
        self.wrong += other.wrong;
        self.lost += other.lost;
        self.duplicated += other.duplicated;
        self.late += other.late;
        self.lookups.add(other.lookups);
        self.unsent += other.unsent;
        self.reconnects += other.reconnects;
        self.elapsed = self.elapsed.max(other.elapsed);
        // Lists every field, so that a new one cannot be forgotten.
        self.silence = self.silence.max(other.silence);
        self.measured += other.measured;
        self.latency.add(&other.latency).expect("all histograms have the same bounds");
        self.slices_p99_ns.extend_from_slice(&other.slices_p99_ns);
        self.in_flight_ns += other.in_flight_ns;
        self.lost_ns += other.lost_ns;
        self.waiting_ns += other.waiting_ns;
        self.busy += other.busy;
        self.stolen += other.stolen;
        self.cpu += other.cpu;
        self.cpu_period = self.cpu_period.max(other.cpu_period);
    }

    /// Correct replies per second of the measured part.
    pub fn rate(&self) -> f64 {
        self.measured as f64 / self.elapsed.as_secs_f64().max(1e-9)
    }

    /// The median of the slices' 99th percentiles; `None` if no slice had enough replies. A percentile of the whole run
    /// is that of its worst moments: one pause of the machine of a hundredth of the run decides it.
    pub fn slice_p99_ns(&self) -> Option<u64> {
        let mut slices = self.slices_p99_ns.clone();
        slices.sort_unstable();
        slices.get(slices.len() / 2).copied()
    }

    /// A quantile of the latency in microseconds; 0.5 is the median.
    pub fn quantile_us(&self, quantile: f64) -> f64 {
        self.latency.value_at_quantile(quantile) as f64 / 1000.0
    }

    /// Whether every request got its correct reply, once.
    pub fn is_perfect(&self) -> bool {
        self.sent > 0 && self.replied == self.sent && self.duplicated == 0
    }
}

/// An empty histogram of latencies in nanoseconds: up to an hour, to a thousandth.
pub fn latencies() -> Histogram<u64> {
    Histogram::new_with_bounds(1, 3_600_000_000_000, 3).expect("valid bounds")
}

/// The latency distribution for a chart: shares of the replies, and the corresponding latencies in microseconds, as
/// far as there are enough replies.
pub fn distribution_us(latency: &Histogram<u64>) -> Vec<(f64, f64)> {
    let shares = [
        0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.98, 0.99, 0.995, 0.998, 0.999, 0.9995, 0.9998,
        0.9999, 0.99999,
    ];
    // Quantiles of only a few replies are random.
    let shown = shares.into_iter().filter(|share| (1.0 - share) * latency.len() as f64 >= 5.0);
    shown.map(|share| (share, latency.value_at_quantile(share) as f64 / 1e3)).collect()
}

/// Why a run was not possible.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// The window is outside its range.
    #[error("the window is {0}, must be in [1, {1}]")]
    Window(usize, usize),
    /// The rate of an open loop is invalid.
    #[error("the rate is {0}, must be a positive number of requests a second")]
    Rate(f64),
    /// More connections than requests in flight, or none.
    #[error("{0} connections cannot share a window of {1}: use 1 to {1} connections")]
    Connections(usize, usize),
    /// Sockets cannot be opened.
    #[error("cannot open a socket to {0}: {1}")]
    Socket(SocketAddr, String),
    /// The host kernel does not send the request.
    #[error("cannot send {1} bytes to {0}: {2}")]
    Send(SocketAddr, usize, std::io::Error),
    /// The workload wrote a request that the framing cannot carry.
    #[error("the framing {0} cannot carry a request of {1} bytes: {2}")]
    Unframable(Framing, usize, wire::framing::FramingError),
    /// No server listens there.
    #[error("{0} refuses connections: is the server running?")]
    Refused(SocketAddr),
    /// A shared-memory port cannot be used.
    #[error(transparent)]
    Shm(#[from] shm::ShmError),
    /// A closed loop with a larger window than the rings have slots.
    #[error(
        "the window is {0}, but the rings of {1:?} hold {2} requests: use a window of at most {2}"
    )]
    Depth(usize, PathBuf, usize),
    /// The service sends no replies, so there is nothing to check.
    #[error("the service at {0:?} has replies = \"none\": a load needs replies to count")]
    NoReplies(PathBuf),
    /// The engine ended during the run.
    #[error("the engine at {0:?} ended the connection during the run")]
    Ended(PathBuf),
}

/// Runs a load against a UDP port with a socket for every request in flight.
pub fn udp(
    address: SocketAddr,
    load: &Load,
    workload: &mut dyn Workload,
) -> Result<Outcome, ClientError> {
    udp::Run::new(address, load, workload)?.run()
}

/// How datagrams share sockets.
#[derive(Clone, Copy, Debug)]
pub struct Burst {
    /// Sockets; the window is divided among them. A service with several workers assigns some of them to each worker,
    /// a service with `dispatch = "flow-hash"` to each mqueue.
    pub sockets: usize,
    /// Send and receive GSO/GRO batches of datagrams, not only many datagrams per call.
    pub offload: bool,
}

/// Runs a load against a UDP port with many requests in flight on each socket.
///
/// Replies are matched by [`Workload::identify`]. Where that is not possible they are matched in the order of
/// requests on each socket, which needs a server that keeps the order of a flow: one worker and one mqueue, or
/// `dispatch = "flow-hash"` with a kernel that answers in order.
pub fn burst(
    address: SocketAddr,
    burst: &Burst,
    load: &Load,
    workload: &mut dyn Workload,
) -> Result<Outcome, ClientError> {
    burst::Run::new(address, burst, load, workload)?.run()
}

/// Runs a load against a shared-memory port. If the engine's rings are smaller than the window (long messages), the
/// window is as large as the rings.
pub fn shm(path: &Path, load: &Load, workload: &mut dyn Workload) -> Result<Outcome, ClientError> {
    shm::load::Run::new(path, load, workload)?.run()
}

/// The protocol of a TCP service.
#[derive(Clone, Copy, Debug)]
pub struct Stream {
    /// Connections to open; the window is divided among them.
    pub connections: usize,
    /// Framing of requests.
    pub framing: Framing,
    /// Framing of replies, if different: `raw` and `fixed` services send replies as the kernel produced them, so
    /// replies of M bytes are `fixed:M` for any requests.
    pub reply_framing: Framing,
}

impl Stream {
    /// One connection with the same framing in both directions.
    pub fn new(framing: Framing) -> Self {
        Self { connections: 1, framing, reply_framing: framing }
    }
}

/// Runs a load against a TCP port.
pub fn tcp(
    address: SocketAddr,
    stream: &Stream,
    load: &Load,
    workload: &mut dyn Workload,
) -> Result<Outcome, ClientError> {
    tcp::Run::new(address, stream, load, workload)?.run()
}

/// How long a refused socket or a replaced connection waits, in nanoseconds.
const RETRY_DELAY_NS: u64 = 5_000_000;
