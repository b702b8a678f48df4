//! `metrics = "127.0.0.1:9464"`: HTTP endpoints for Prometheus and orchestrators.
//!
//! | path       | answer                                                                        |
//! |------------|-------------------------------------------------------------------------------|
//! | `/metrics` | every counter, OpenMetrics text                                               |
//! | `/healthz` | 200 while the process runs                                                    |
//! | `/readyz`  | 200 when every port is open and every block runs; 503 before, in draining, and while a worker is stalled |
//!
//! One thread serves everything and only reads the workers' counters. Clients are not trusted: the limits are
//! [`CONNECTIONS_MAX`] connections, [`REQUEST_BYTES_MAX`] bytes and [`REQUEST_MS`] milliseconds per request, and one
//! request per connection. When all connections are in use, the one that has been sending its request for longest is
//! closed: deliberately slow clients cannot block others. The endpoint shows no payloads and changes nothing, but it
//! should stay on loopback: it has no authentication.

mod collect;
mod http;
pub mod page;

use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread::JoinHandle;

use crate::{FunctionCounters, Stall, Stalls};
use engine::metrics::Metrics;
use sys::socket_nic::OpenError;
use sys::time::monotonic_ns;
use sys::{PortSpec, SocketNic, SocketOptions, Waker};
use transfer::Counters;
use wire::nic::{Close, Event, Nic, Read, Transport, Written};

pub use http::REQUEST_BYTES_MAX;

/// Maximum number of connections.
pub const CONNECTIONS_MAX: usize = 64;
/// Time limit for a complete request, in milliseconds.
pub const REQUEST_MS: u64 = 5_000;
/// Time limit for reading a response, in milliseconds.
pub const RESPONSE_MS: u64 = 5_000;
/// How long a client with a too long or invalid request may take to read the error, in milliseconds.
const LINGER_MS: u64 = 500;
/// Maximum number of further bytes that are read from such a client.
const LINGER_BYTES_MAX: usize = 256 << 10;

/// Whether the server is ready for clients; shared with the exporter.
#[derive(Debug, Default)]
pub struct Health {
    ready: AtomicBool,
    draining: AtomicBool,
    /// By [`RELOAD_RESULTS`].
    reloads: [AtomicU64; RELOAD_RESULTS.len()],
    stalls: OnceLock<Arc<Stalls>>,
    transfers: OnceLock<Arc<Counters>>,
    functions: OnceLock<Arc<FunctionCounters>>,
}

/// Results of a reload.
pub const RELOAD_RESULTS: [&str; 4] = ["changed", "unchanged", "refused", "failed"];

impl Health {
    /// Every port is open and every block runs.
    pub fn set_ready(&self) {
        self.ready.store(true, Ordering::Relaxed);
    }

    /// The server accepts no new requests.
    pub fn set_draining(&self) {
        self.draining.store(true, Ordering::Relaxed);
    }

    /// The configuration was read again, with one of [`RELOAD_RESULTS`].
    pub fn count_reload(&self, result: &str) {
        if let Some(index) = RELOAD_RESULTS.iter().position(|name| *name == result) {
            self.reloads[index].fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Number of reloads, by [`RELOAD_RESULTS`].
    pub fn reloads(&self) -> [u64; RELOAD_RESULTS.len()] {
        self.reloads.each_ref().map(|count| count.load(Ordering::Relaxed))
    }

    /// Generation of the configuration: 1 at the start, one more with every change.
    pub fn generation(&self) -> u64 {
        1 + self.reloads()[0]
    }

    /// From now on, stalled workers make the server not ready.
    pub fn watch(&self, stalls: Arc<Stalls>) {
        // There is one server; the first one is kept.
        let _ = self.stalls.set(stalls);
    }

    /// From now on these transfers are shown.
    pub fn watch_transfers(&self, counters: Arc<Counters>) {
        // There is one transfer engine; the first stays.
        let _ = self.transfers.set(counters);
    }

    /// The counters of transfers, if the server has a transfer engine.
    pub fn transfers(&self) -> Option<&Counters> {
        self.transfers.get().map(Arc::as_ref)
    }

    /// From now on these counters of requests about functions are shown.
    pub fn watch_functions(&self, counters: Arc<FunctionCounters>) {
        // There is one server; the first one is kept.
        let _ = self.functions.set(counters);
    }

    /// The counters of requests about functions.
    pub fn functions(&self) -> Option<&FunctionCounters> {
        self.functions.get().map(Arc::as_ref)
    }

    /// Stalled workers.
    pub fn stalls(&self) -> Vec<Stall> {
        self.stalls.get().map_or(Vec::new(), |stalls| stalls.list())
    }

    /// Whether clients should connect.
    pub fn is_ready(&self) -> bool {
        self.why_not_ready().is_none()
    }

    /// Why clients should not connect, if so.
    pub fn why_not_ready(&self) -> Option<String> {
        if !self.ready.load(Ordering::Relaxed) {
            return Some("starting".to_owned());
        }
        if self.draining.load(Ordering::Relaxed) {
            return Some("draining".to_owned());
        }
        let stalls = self.stalls();
        let reasons: Vec<_> = stalls.iter().map(Stall::reason).collect();
        (!reasons.is_empty()).then(|| reasons.join("; "))
    }
}

/// Why the exporter did not start.
#[derive(Debug, thiserror::Error)]
pub enum ExporterError {
    /// It cannot listen on the address.
    #[error("engine.metrics: {0}")]
    Open(#[from] OpenError),
    /// A thread cannot be started.
    #[error("engine.metrics: a thread cannot be started: {0}")]
    Thread(std::io::Error),
}

/// A running endpoint; ends when dropped.
pub struct Exporter {
    address: SocketAddr,
    waker: Waker,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Exporter {
    /// Listens on `address` (with port 0 the host kernel chooses) and answers from its own thread.
    pub fn start(
        address: SocketAddr,
        metrics: Metrics,
        health: Arc<Health>,
    ) -> Result<Self, ExporterError> {
        let port = PortSpec { transport: Transport::Tcp, address };
        let nic =
            SocketNic::open(&[port], SocketOptions { backlog: 128, ..SocketOptions::default() })?;
        let address = nic.local_addresses()[0];
        let waker = nic.waker();
        let stop = Arc::new(AtomicBool::new(false));
        let mut endpoint = Endpoint {
            nic,
            connections: (0..CONNECTIONS_MAX).map(|_| None).collect(),
            pages: Pages::new(metrics, health),
            stop: stop.clone(),
        };
        let thread = std::thread::Builder::new()
            .name("serval-metrics".into())
            .spawn(move || endpoint.run())
            .map_err(ExporterError::Thread)?;
        Ok(Self { address, waker, stop, thread: Some(thread) })
    }

    /// The listening address.
    pub fn address(&self) -> SocketAddr {
        self.address
    }
}

impl Drop for Exporter {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        self.waker.wake();
        if let Some(thread) = self.thread.take() {
            // A panic of the exporter must not end the server.
            let _ = thread.join();
        }
    }
}

/// The sources of the pages.
pub(crate) struct Pages {
    metrics: prometheus_client::registry::Registry,
    health: Arc<Health>,
}

impl Pages {
    pub(crate) fn new(metrics: Metrics, health: Arc<Health>) -> Self {
        Self { metrics: collect::registry(metrics, health.clone()), health }
    }

    /// Every counter, OpenMetrics text.
    pub(crate) fn metrics(&self) -> Option<String> {
        let mut text = String::new();
        prometheus_client::encoding::text::encode(&mut text, &self.metrics).ok()?;
        Some(text)
    }

    fn answer(&self, request: &Result<http::Request, http::Refusal>) -> Vec<u8> {
        let request = match request {
            Ok(request) => request,
            Err(refusal) => {
                return http::response(refusal.status(), http::TEXT, refusal.reason(), false);
            }
        };
        let (status, kind, body) = match request.path.as_str() {
            "/metrics" => match self.metrics() {
                Some(text) => (200, http::OPEN_METRICS, text),
                None => (500, http::TEXT, "the counters cannot be written\n".to_owned()),
            },
            "/healthz" => (200, http::TEXT, "ok\n".to_owned()),
            "/readyz" => match self.health.why_not_ready() {
                None => (200, http::TEXT, "ready\n".to_owned()),
                Some(why) => (503, http::TEXT, format!("not ready: {why}\n")),
            },
            _ => (404, http::TEXT, "not found: try /metrics, /healthz or /readyz\n".to_owned()),
        };
        http::response(status, kind, &body, request.head_only)
    }
}

enum Phase {
    /// Its request is being read.
    Asking,
    /// Its response is being written.
    Answering,
    /// It sent more than was read; a reset would discard the response.
    Lingering,
}

struct Connection {
    phase: Phase,
    since_ns: u64,
    input: Vec<u8>,
    output: Vec<u8>,
    written: usize,
    discarded: usize,
    /// The input was not a valid request: the rest must be read and discarded.
    refused: bool,
}

impl Connection {
    fn deadline_ns(&self) -> u64 {
        let ms = match self.phase {
            Phase::Asking => REQUEST_MS,
            Phase::Answering => RESPONSE_MS,
            Phase::Lingering => LINGER_MS,
        };
        self.since_ns + ms * 1_000_000
    }
}

/// The thread's state.
struct Endpoint {
    nic: SocketNic,
    connections: Vec<Option<Connection>>,
    pages: Pages,
    stop: Arc<AtomicBool>,
}

impl Endpoint {
    fn run(&mut self) {
        let mut events = Vec::new();
        while !self.stop.load(Ordering::Relaxed) {
            self.nic.poll(self.sleep_ns(), &mut events);
            let now_ns = monotonic_ns();
            for event in &events {
                match *event {
                    Event::Connections(_) => self.accept(now_ns),
                    Event::Readable(key) => self.read(key as usize, now_ns),
                    Event::Writable(key) => self.write(key as usize, now_ns),
                    Event::Failed(key) => self.close(key as usize, Close::Reset),
                    Event::Datagrams(_) => {}
                }
            }
            self.expire(now_ns);
        }
    }

    /// Time until the next deadline; a second without one.
    fn sleep_ns(&self) -> u64 {
        let next = self.connections.iter().flatten().map(Connection::deadline_ns).min();
        next.map_or(1_000_000_000, |at| at.saturating_sub(monotonic_ns()).max(1_000_000))
    }

    fn accept(&mut self, now_ns: u64) {
        while let Some((socket, _)) = self.nic.accept(0) {
            let key = self.free_key();
            if self.nic.adopt(socket, key as u32).is_ok() {
                self.connections[key] = Some(Connection {
                    phase: Phase::Asking,
                    since_ns: now_ns,
                    input: Vec::new(),
                    output: Vec::new(),
                    written: 0,
                    discarded: 0,
                    refused: false,
                });
                // Data may have arrived with the connection.
                self.read(key, now_ns);
            }
        }
    }

    /// A free slot; if there is none, that of the connection that has been sending its request (or reading the
    /// response) for longest.
    fn free_key(&mut self) -> usize {
        if let Some(free) = self.connections.iter().position(Option::is_none) {
            return free;
        }
        let age = |(index, connection): (usize, &Option<Connection>)| {
            let connection = connection.as_ref()?;
            Some((matches!(connection.phase, Phase::Answering), connection.since_ns, index))
        };
        let oldest = self.connections.iter().enumerate().filter_map(age).min();
        let (_, _, key) = oldest.expect("no slot is free");
        self.close(key, Close::Reset);
        key
    }

    fn read(&mut self, key: usize, now_ns: u64) {
        let mut chunk = [0; 4096];
        loop {
            let Some(connection) = &mut self.connections[key] else { return };
            match self.nic.read(key as u32, &mut chunk) {
                Read::Bytes(len) if matches!(connection.phase, Phase::Asking) => {
                    connection.input.extend_from_slice(&chunk[..len]);
                    let Some(request) = http::parse(&connection.input) else { continue };
                    connection.output = self.pages.answer(&request);
                    connection.refused = request.is_err();
                    connection.phase = Phase::Answering;
                    connection.since_ns = now_ns;
                    self.write(key, now_ns);
                }
                Read::Bytes(len) => {
                    connection.discarded += len;
                    if connection.discarded > LINGER_BYTES_MAX {
                        return self.close(key, Close::Reset);
                    }
                }
                Read::Empty => return,
                // Half closed after a complete request: it still waits for its response.
                Read::Closed if matches!(connection.phase, Phase::Answering) => return,
                Read::Closed => return self.close(key, Close::Graceful),
                Read::Broken => return self.close(key, Close::Reset),
            }
        }
    }

    fn write(&mut self, key: usize, now_ns: u64) {
        let Some(connection) = &mut self.connections[key] else { return };
        if !matches!(connection.phase, Phase::Answering) {
            return;
        }
        while connection.written < connection.output.len() {
            match self.nic.write(key as u32, &connection.output[connection.written..]) {
                Written::Bytes(len) => connection.written += len,
                Written::Full => return,
                Written::Broken => return self.close(key, Close::Reset),
            }
        }
        if connection.refused {
            connection.phase = Phase::Lingering;
            connection.since_ns = now_ns;
        } else {
            self.close(key, Close::Graceful);
        }
    }

    fn expire(&mut self, now_ns: u64) {
        for key in 0..self.connections.len() {
            let Some(connection) = &self.connections[key] else { continue };
            if now_ns >= connection.deadline_ns() {
                let how = match connection.phase {
                    Phase::Lingering => Close::Graceful,
                    Phase::Asking | Phase::Answering => Close::Reset,
                };
                self.close(key, how);
            }
        }
    }

    fn close(&mut self, key: usize, how: Close) {
        if self.connections[key].take().is_some() {
            self.nic.close(key as u32, how);
        }
    }
}
