//! The server that Serval is compared with: host-centric, as services are usually written.
//!
//! One network thread receives datagrams and puts them on a queue; worker threads wait on it, call the kernel and
//! send the reply. Every request is passed from one thread to another, which is the minimum cost of an accelerator
//! behind a host application. The kernel is the same compiled code that Serval runs.

use std::collections::VecDeque;
use std::io;
use std::net::{SocketAddr, UdpSocket};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, mpsc};
use std::thread::JoinHandle;
use std::time::Duration;

use accel::AccelError;
use engine::topology::Service;

use super::DemoError;
use bench::function::KernelFunction;

/// Maximum length of the queue; further requests are dropped.
const QUEUE_MAX: usize = 4096;
/// Interval at which threads check whether they are to end.
const CHECK_INTERVAL: Duration = Duration::from_millis(20);

/// A request and its sender.
type Job = (Vec<u8>, SocketAddr);

#[derive(Default)]
struct Shared {
    queue: Mutex<VecDeque<Job>>,
    /// A request was put on the queue, or the server ends.
    arrived: Condvar,
    stop: AtomicBool,
    dropped: AtomicU64,
}

/// A thread-pool UDP server around a kernel; ends when dropped.
pub struct HostCentric {
    address: SocketAddr,
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
}

impl HostCentric {
    /// Serves `service` (kernel, parameters, sizes) on a free loopback UDP port. All its threads run on `core`, if
    /// given: with both on one core a single client has the shortest latency, since the data that they share is in
    /// that core's cache.
    pub fn start(
        service: &Service,
        workers: usize,
        core: Option<usize>,
    ) -> Result<Self, DemoError> {
        let failed = |what: &str| {
            let what = what.to_owned();
            move |error: io::Error| DemoError::Io { what, error }
        };
        let socket = UdpSocket::bind("127.0.0.1:0").map_err(failed("open a UDP port"))?;
        socket.set_read_timeout(Some(CHECK_INTERVAL)).map_err(failed("set a socket's timeout"))?;
        let address = socket.local_addr().map_err(failed("ask for a socket's address"))?;
        let socket = Arc::new(socket);
        let mut server = Self { address, shared: Arc::default(), threads: Vec::new() };
        let (opened, openings) = mpsc::channel();
        for index in 0..workers {
            let (shared, socket) = (server.shared.clone(), socket.clone());
            let (service, opened) = (service.clone(), opened.clone());
            let work = move || serve_queue(&shared, &socket, &service, &opened);
            server.spawn(format!("host-worker-{index}"), core, work)?;
        }
        drop(opened);
        for _ in 0..workers {
            openings.recv().unwrap_or(Ok(()))?;
        }
        let shared = server.shared.clone();
        let most = service.max_message_bytes as usize;
        let work = move || receive(&shared, &socket, most);
        server.spawn("host-network".to_owned(), core, work)?;
        Ok(server)
    }

    /// The listening address.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Requests that were dropped: the queue was full or the kernel did not answer.
    pub fn dropped(&self) -> u64 {
        self.shared.dropped.load(Ordering::Relaxed)
    }

    fn spawn(
        &mut self,
        name: String,
        core: Option<usize>,
        run: impl FnOnce() + Send + 'static,
    ) -> Result<(), DemoError> {
        let thread = std::thread::Builder::new().name(name).spawn(move || {
            // Failing to pin is not an error, as for the worker it is compared with.
            let _ = core.map(sys::affinity::pin_current_thread);
            run();
        });
        let thread =
            thread.map_err(|error| DemoError::Io { what: "start a thread".into(), error })?;
        self.threads.push(thread);
        Ok(())
    }
}

impl Drop for HostCentric {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Relaxed);
        self.shared.arrived.notify_all();
        for thread in self.threads.drain(..) {
            // A worker that panicked has reported it on standard error.
            let _ = thread.join();
        }
    }
}

/// The network thread.
fn receive(shared: &Shared, socket: &UdpSocket, most: usize) {
    let mut buffer = vec![0; most + 1];
    while !shared.stop.load(Ordering::Relaxed) {
        let Ok((len, peer)) = socket.recv_from(&mut buffer) else { continue };
        let mut queue = shared.queue.lock().expect("no worker panics with the queue");
        if len > most || queue.len() >= QUEUE_MAX {
            shared.dropped.fetch_add(1, Ordering::Relaxed);
            continue;
        }
        queue.push_back((buffer[..len].to_vec(), peer));
        drop(queue);
        shared.arrived.notify_one();
    }
}

/// A worker thread. The kernel is opened here, since it is bound to its thread.
fn serve_queue(
    shared: &Shared,
    socket: &UdpSocket,
    service: &Service,
    opened: &mpsc::Sender<Result<(), AccelError>>,
) {
    let (message, reply) = (service.max_message_bytes, service.max_reply_bytes);
    let function = KernelFunction::open(&service.kernel, &service.params, message, reply);
    let mut function = match function {
        Ok(function) => function,
        Err(error) => {
            let _ = opened.send(Err(error));
            return;
        }
    };
    let _ = opened.send(Ok(()));
    let mut reply = Vec::new();
    while let Some((message, peer)) = next(shared) {
        let answered = function.call(&message, &mut reply).is_ok();
        if !answered || socket.send_to(&reply, peer).is_err() {
            shared.dropped.fetch_add(1, Ordering::Relaxed);
        }
    }
}

/// Waits for a request; `None` when the server ends.
fn next(shared: &Shared) -> Option<Job> {
    let mut queue = shared.queue.lock().expect("no worker panics with the queue");
    while !shared.stop.load(Ordering::Relaxed) {
        if let Some(job) = queue.pop_front() {
            return Some(job);
        }
        let waited = shared.arrived.wait_timeout(queue, CHECK_INTERVAL);
        queue = waited.expect("no worker panics with the queue").0;
    }
    None
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;
    use bench::client::{self, Echo, Load};

    #[test]
    fn it_serves_a_kernel_and_ends() {
        for workers in [1, 3] {
            let service = Service::new("a", Vec::new(), "echo");
            let server = HostCentric::start(&service, workers, None).unwrap();
            let timeout = Duration::from_secs(10);
            let load = Load { window: 16, requests: 500, timeout, ..Load::default() };
            let outcome = client::udp(server.address(), &load, &mut Echo::new(100)).unwrap();
            assert!(outcome.is_perfect(), "{outcome:?}");
            assert_eq!(server.dropped(), 0);
        }
    }

    #[test]
    fn requests_without_an_answer_are_counted() {
        let service = Service::new("a", Vec::new(), "scale");
        let server = HostCentric::start(&service, 1, None).unwrap();
        let load = Load { requests: 3, timeout: Duration::from_millis(100), ..Load::default() };
        let outcome = client::udp(server.address(), &load, &mut Echo::new(3)).unwrap();
        assert_eq!(outcome.lost, 3);
        // A worker may process the last request after the client has timed out.
        let deadline = Instant::now() + Duration::from_secs(20);
        while server.dropped() < 3 && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(1));
        }
        assert_eq!(server.dropped(), 3);
    }

    #[test]
    fn an_unknown_kernel_is_reported() {
        let service = Service::new("a", Vec::new(), "nonsense");
        let error = HostCentric::start(&service, 1, None).err().expect("there is no such kernel");
        assert!(error.to_string().contains("nonsense"), "{error}");
    }
}
