//! A client that measures: keeps a window of requests in flight, checks every reply, and counts.
//!
//! One thread, ordinary non-blocking kernel sockets, closed loop: a new request leaves when a reply
//! has come (or was given up). It looks for replies in a loop and yields its core while there are
//! none, so that it adds little to the latency it measures and still shares a small machine.
//!
//! * [`udp`]: one connected socket for every request in flight, since a datagram carries nothing that
//!   says which request it answers. A request without an answer in time counts as lost, and its socket
//!   is replaced, so that a late answer cannot be taken for the next one's.
//! * [`tcp`]: connections with requests pipelined on them; replies come in order. A connection whose
//!   oldest request is not answered in time is replaced, and everything in flight on it is lost.
//! * [`shm()`]: a shared-memory port of an engine on this machine, without a network; [`mod@shm`] is the
//!   client itself, for programs.
//!
//! ```no_run
//! use serval::client::{self, Echo, Load};
//!
//! let load = Load { window: 16, requests: 100_000, ..Load::default() };
//! let outcome = client::udp("127.0.0.1:9000".parse()?, &load, &mut Echo::new(64))?;
//! println!("{:.0}/s, p50 {:.1} us", outcome.rate(), outcome.quantile_us(0.5));
//! assert_eq!(outcome.wrong, 0);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

pub mod shm;
mod tcp;
mod udp;

use std::fmt;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use hdrhistogram::Histogram;
use sys::time::monotonic_ns;
use wire::framing::Framing;

/// Most requests in flight.
pub const WINDOW_MAX: usize = 4096;

/// How much to ask, and for how long.
#[derive(Clone, Debug)]
pub struct Load {
    /// Requests in flight, in [1, [`WINDOW_MAX`]]. On TCP: of all connections together.
    pub window: usize,
    /// Requests to send in all.
    pub requests: u64,
    /// No new request leaves after this long.
    pub duration: Duration,
    /// A request without a reply for this long is lost.
    pub timeout: Duration,
    /// Longest reply that is understood, in bytes.
    pub reply_bytes_max: usize,
    /// Ends the run early when set, for instance by a signal.
    pub cancel: Arc<AtomicBool>,
}

impl Default for Load {
    fn default() -> Self {
        Self {
            window: 1,
            requests: u64::MAX,
            duration: Duration::from_secs(3600),
            timeout: Duration::from_secs(1),
            reply_bytes_max: 65_536,
            cancel: Arc::default(),
        }
    }
}

/// What is asked, and what the right answer is.
pub trait Workload {
    /// Writes request number `index` into `into`, which is empty. The same index gives the same
    /// request: it may be asked for again when the host kernel had no room.
    fn request(&mut self, index: u64, into: &mut Vec<u8>);

    /// Whether `reply` is the right answer to request number `index`.
    fn accepts(&mut self, index: u64, reply: &[u8]) -> bool;
}

/// Messages that come back unchanged; every one is different.
#[derive(Clone, Debug)]
pub struct Echo {
    len_bytes: usize,
    expected: Vec<u8>,
}

impl Echo {
    /// Messages of this length.
    pub fn new(len_bytes: usize) -> Self {
        Self { len_bytes, expected: Vec::with_capacity(len_bytes) }
    }

    fn fill(&self, index: u64, into: &mut Vec<u8>) {
        let mut word = index;
        while into.len() < self.len_bytes {
            let bytes = word.to_le_bytes();
            into.extend_from_slice(&bytes[..bytes.len().min(self.len_bytes - into.len())]);
            word = word.wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(17) ^ index;
        }
    }
}

impl Workload for Echo {
    fn request(&mut self, index: u64, into: &mut Vec<u8>) {
        self.fill(index, into);
    }

    fn accepts(&mut self, index: u64, reply: &[u8]) -> bool {
        let mut expected = std::mem::take(&mut self.expected);
        expected.clear();
        self.fill(index, &mut expected);
        let right = reply == expected.as_slice();
        self.expected = expected;
        right
    }
}

/// What came of a run. `sent = replied + wrong + lost`.
#[derive(Clone)]
pub struct Outcome {
    /// Requests sent.
    pub sent: u64,
    /// Right replies.
    pub replied: u64,
    /// Replies that were not the right ones.
    pub wrong: u64,
    /// Requests without a reply in time.
    pub lost: u64,
    /// Sockets or connections that had to be replaced.
    pub reconnects: u64,
    /// From the first request to the last reply.
    pub elapsed: Duration,
    /// Nanoseconds from send to reply, of right replies.
    pub latency: Histogram<u64>,
}

impl fmt::Debug for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Outcome")
            .field("sent", &self.sent)
            .field("replied", &self.replied)
            .field("wrong", &self.wrong)
            .field("lost", &self.lost)
            .field("reconnects", &self.reconnects)
            .field("elapsed", &self.elapsed)
            .field("p50_us", &self.quantile_us(0.5))
            .finish_non_exhaustive()
    }
}

impl Outcome {
    /// Right replies per second.
    pub fn rate(&self) -> f64 {
        self.replied as f64 / self.elapsed.as_secs_f64().max(1e-9)
    }

    /// A quantile of the latency in microseconds; 0.5 is the median.
    pub fn quantile_us(&self, quantile: f64) -> f64 {
        self.latency.value_at_quantile(quantile) as f64 / 1000.0
    }

    /// Whether every request got its right reply.
    pub fn is_perfect(&self) -> bool {
        self.sent > 0 && self.replied == self.sent
    }
}

/// Why a run could not be made.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// The window is outside its range.
    #[error("the window is {0}, must be in [1, {WINDOW_MAX}]")]
    Window(usize),
    /// More connections than requests in flight, or none.
    #[error("{0} connections cannot share a window of {1}: use 1 to {1} connections")]
    Connections(usize, usize),
    /// Sockets cannot be had.
    #[error("cannot open a socket to {0}: {1}")]
    Socket(SocketAddr, String),
    /// The workload wrote a request that the framing cannot carry.
    #[error("the framing {0} cannot carry a request of {1} bytes: {2}")]
    Unframable(Framing, usize, wire::framing::FramingError),
    /// Nothing listens there.
    #[error("{0} refuses connections: is the server running?")]
    Refused(SocketAddr),
    /// A shared-memory port cannot be used.
    #[error(transparent)]
    Shm(#[from] shm::ShmError),
    /// The service answers nothing, so there is nothing to check.
    #[error("the service at {0:?} has replies = \"none\": a load needs replies to count")]
    NoReplies(PathBuf),
    /// The engine went away during the run.
    #[error("the engine at {0:?} ended the connection during the run")]
    Ended(PathBuf),
}

/// Runs a load against a UDP port.
pub fn udp(
    address: SocketAddr,
    load: &Load,
    workload: &mut dyn Workload,
) -> Result<Outcome, ClientError> {
    udp::Run::new(address, load, workload)?.run()
}

/// Runs a load against a shared-memory port. A window that is larger than the rings the engine gives
/// (long messages) is as large as they are.
pub fn shm(path: &Path, load: &Load, workload: &mut dyn Workload) -> Result<Outcome, ClientError> {
    shm::load::Run::new(path, load, workload)?.run()
}

/// How a TCP service is spoken to.
#[derive(Clone, Copy, Debug)]
pub struct Stream {
    /// Connections to open; the window is spread over them.
    pub connections: usize,
    /// Framing of requests.
    pub framing: Framing,
    /// Framing of replies, where it differs: `raw` and `fixed` services write replies as the kernel
    /// produced them, so replies of M bytes are `fixed:M` whatever the requests are.
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

/// How many empty looks before the core is offered to others.
const EMPTY_LOOKS: u32 = 32;
/// Nanoseconds between two searches for lost requests.
const SEARCH_NS: u64 = 1_000_000;
/// How long a refused or replaced socket rests, in nanoseconds.
const REST_NS: u64 = 5_000_000;

/// The counting that both transports share.
struct Tally {
    outcome: Outcome,
    began_ns: u64,
    last_ns: u64,
    stop_ns: u64,
    requests: u64,
    timeout_ns: u64,
    search_ns: u64,
    cancel: Arc<AtomicBool>,
    looks: u32,
}

impl Tally {
    fn new(load: &Load) -> Result<Self, ClientError> {
        if load.window == 0 || load.window > WINDOW_MAX {
            return Err(ClientError::Window(load.window));
        }
        let began_ns = monotonic_ns();
        let ns = |duration: Duration| u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX);
        let latency = Histogram::new_with_bounds(1, 3_600_000_000_000, 3).expect("valid bounds");
        Ok(Self {
            outcome: Outcome {
                sent: 0,
                replied: 0,
                wrong: 0,
                lost: 0,
                reconnects: 0,
                elapsed: Duration::ZERO,
                latency,
            },
            began_ns,
            last_ns: began_ns,
            stop_ns: began_ns.saturating_add(ns(load.duration)),
            requests: load.requests,
            timeout_ns: ns(load.timeout).max(1),
            search_ns: began_ns,
            cancel: load.cancel.clone(),
            looks: 0,
        })
    }

    /// The number of the next request, if there is to be one.
    fn next(&mut self, now_ns: u64) -> Option<u64> {
        if self.outcome.sent >= self.requests || now_ns >= self.stop_ns {
            return None;
        }
        self.outcome.sent += 1;
        Some(self.outcome.sent - 1)
    }

    fn reply(&mut self, right: bool, sent_ns: u64, now_ns: u64) {
        self.last_ns = now_ns;
        if right {
            self.outcome.replied += 1;
            self.outcome.latency.saturating_record(now_ns.saturating_sub(sent_ns));
        } else {
            self.outcome.wrong += 1;
        }
    }

    /// Requests that wait for a reply.
    fn waiting(&self) -> u64 {
        let done = self.outcome.replied + self.outcome.wrong + self.outcome.lost;
        self.outcome.sent - done
    }

    fn is_over(&mut self, now_ns: u64) -> bool {
        if self.cancel.load(Ordering::Relaxed) {
            self.outcome.lost += self.waiting();
            return true;
        }
        self.waiting() == 0 && (self.outcome.sent >= self.requests || now_ns >= self.stop_ns)
    }

    /// Whether it is time to look for lost requests.
    fn search_is_due(&mut self, now_ns: u64) -> bool {
        let due = now_ns >= self.search_ns;
        if due {
            self.search_ns = now_ns + SEARCH_NS;
        }
        due
    }

    /// Between two looks: others may want the core.
    fn idle(&mut self, found: bool) {
        self.looks = if found { 0 } else { self.looks + 1 };
        if self.looks > EMPTY_LOOKS {
            std::thread::yield_now();
        }
    }

    fn finish(mut self) -> Outcome {
        self.outcome.elapsed = Duration::from_nanos(self.last_ns - self.began_ns);
        self.outcome
    }
}
