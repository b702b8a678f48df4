//! A client over shared memory: requests and replies are exchanged through rings, without system calls.
//!
//! [`Client::connect`] connects to the engine at the port's path and maps its own region, in which it has the role of
//! the accelerator (see `engine/src/endpoint/shm.rs`). A request has a *tag*, any 64-bit number, which is returned
//! with its outcome; outcomes come in any order. At most [`Client::depth`] requests are in flight at a time, so that
//! every outcome has a slot.
//!
//! Sending has two steps, so that one store publishes any number of requests: [`Client::try_send`] writes,
//! [`Client::publish`] publishes. [`Client::send`] and [`Client::receive`] wait: first spinning, then asleep until
//! the engine rings.
//!
//! ```no_run
//! use std::time::Duration;
//! use bench::client::shm::{Client, Options};
//!
//! let mut client = Client::connect("/run/digits".as_ref(), &Options::default())?;
//! client.send(7, b"hello", Duration::from_secs(1))?;
//! let mut reply = vec![0; client.reply_bytes_max()];
//! if let Some(answer) = client.receive(&mut reply, Duration::from_secs(1))? {
//!     assert_eq!((answer.tag, &reply[..answer.len]), (7, &b"hello"[..]));
//! }
//! # Ok::<(), bench::client::shm::ShmError>(())
//! ```

pub(super) mod load;

use std::io;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use mqueue::abi::{ABI_VERSION, kind, stop};
use mqueue::{Consumer, Head, LoanError, MappedMemory, Producer, Region, RingError, Words};
use sys::SharedMemory;
use sys::local::LocalSocket;
use sys::readiness::{WakeFd, wait_readable};
use wire::handshake::{
    ANSWER_BYTES_MAX, Answer, DESCRIPTORS, HandshakeError, Hello, Terms, VERSION,
};
use wire::{DropReason, ReportedReason};

/// Largest region that is mapped, in bytes: an engine needs far less.
const REGION_BYTES_MAX: usize = 4 << 30;
/// How long a wait spins before it sleeps.
const SPIN: Duration = Duration::from_micros(50);
/// Checks between two yields of the core.
const SPINS_PER_YIELD: u32 = 256;
/// Longest sleep: a client that waits for a slot of the request ring is not woken, and checks at this interval.
const SLEEP_MAX: Duration = Duration::from_micros(100);
/// Prefetch distance in messages: slots are fetched from the engine's cache.
const AHEAD: u64 = 8;
/// Slots that are read before they are returned, as a fraction of the ring.
const RELEASE_PARTS: u32 = 8;

/// How to connect.
#[derive(Clone, Debug)]
pub struct Options {
    /// Slots of each ring, which is also the maximum number of requests in flight; rounded up to a power of two, in
    /// [1, 16384]. The engine gives fewer if messages are long. 0: the engine's default, 1024.
    pub depth: u32,
    /// Time limit of the handshake.
    pub timeout: Duration,
}

impl Default for Options {
    fn default() -> Self {
        Self { depth: 0, timeout: Duration::from_secs(5) }
    }
}

/// Errors of a client.
#[derive(Debug, thiserror::Error)]
pub enum ShmError {
    /// No server listens at the path.
    #[error("no server listens at {path:?}: {source}; is the server running?")]
    Connect {
        /// The path.
        path: PathBuf,
        /// The host kernel's answer.
        source: io::Error,
    },
    /// The engine refused the connection, with a reason.
    #[error("the engine refuses the connection: {0}")]
    Refused(String),
    /// The peer is not an engine, or has another version.
    #[error(transparent)]
    Handshake(#[from] HandshakeError),
    /// The engine did not answer in time.
    #[error("the engine did not answer the handshake within {0:?}")]
    Silent(Duration),
    /// The received region cannot be mapped or used.
    #[error("the region that the engine passed cannot be used: {0}")]
    Region(String),
    /// The ring has no free slot, or `depth` requests are in flight: receive first.
    #[error("no room for another request until an outcome is received")]
    Full,
    /// The request is longer than the service accepts.
    #[error("the request has {bytes} bytes, the service takes at most {most}")]
    TooLong {
        /// Its length.
        bytes: usize,
        /// The maximum.
        most: usize,
    },
    /// The reply does not fit; it stays in the ring.
    #[error("the reply has {bytes} bytes, the buffer {room}")]
    Buffer {
        /// Length of the reply.
        bytes: usize,
        /// Length of the buffer.
        room: usize,
    },
    /// The engine ended the connection with a reason, for instance that the service has changed: a new connection may
    /// be possible.
    #[error("the engine has ended the connection: {0}")]
    Ended(String),
    /// The engine has ended, closed the connection, or drains and takes no more requests.
    #[error("the engine has closed the connection")]
    Closed,
    /// The engine wrote impossible ring words: the connection cannot be used any more.
    #[error("the rings hold impossible words: connect again")]
    Corrupt,
}

/// The outcome of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reply {
    /// The tag it was sent with.
    pub tag: u64,
    /// Bytes of the reply; 0 when it was lost.
    pub len: usize,
    /// Why there is no reply, if so.
    pub lost: Option<ReportedReason>,
}

/// One connection. See the module's text.
pub struct Client {
    requests: Producer<MappedMemory>,
    replies: Consumer<MappedMemory>,
    words: Words<MappedMemory>,
    socket: LocalSocket,
    engine_wake_fd: WakeFd,
    own_wake_fd: WakeFd,
    terms: Terms,
    /// Requests without an outcome (services that answer).
    in_flight: u32,
    /// Tags of the requests in the ring, by slot.
    tags: Box<[u64]>,
    ended: bool,
    /// After the end: the first request that the engine did not take and that was not reported to the caller.
    untaken: u64,
    /// Outcomes that were read and whose slots were not returned yet.
    unreleased: u32,
    unpublished: bool,
}

impl Client {
    /// Connects to the engine at `path`, that of a `shm://` port.
    pub fn connect(path: &Path, options: &Options) -> Result<Self, ShmError> {
        let deadline = Instant::now() + options.timeout;
        let socket = connect(path, deadline)?;
        let hello = Hello { version: VERSION, abi_version: ABI_VERSION, depth: options.depth };
        let broken = |source| ShmError::Connect { path: path.to_owned(), source };
        socket.send(&hello.encode(), &[]).map_err(broken)?;
        let mut answer = [0; ANSWER_BYTES_MAX];
        let (len, descriptors) = loop {
            if let Some(got) = socket.receive_descriptors(&mut answer).map_err(broken)? {
                break got;
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(ShmError::Silent(options.timeout));
            }
            wait_readable(&[socket.as_fd()], Some(left));
        };
        if len == 0 {
            return Err(ShmError::Closed);
        }
        let terms = match Answer::decode(&answer[..len])? {
            Answer::Accepted(terms) => terms,
            Answer::Refused(why) => return Err(ShmError::Refused(why)),
        };
        let descriptors: Result<[_; DESCRIPTORS], _> = descriptors.try_into();
        let Ok([region, engine_wake_fd, own_wake_fd]) = descriptors else {
            return Err(HandshakeError::Foreign.into());
        };
        let unusable = |error: String| ShmError::Region(error);
        let memory = SharedMemory::open(region, REGION_BYTES_MAX, false)
            .map_err(|e| unusable(e.to_string()))?;
        let mut region = Region::join(MappedMemory::new(Arc::new(memory)))
            .map_err(|e| unusable(e.to_string()))?;
        let fits = region.entries().iter().all(|entry| entry.depth == terms.depth);
        if !fits || region.entries().len() != 2 {
            return Err(ShmError::Region("it does not match the handshake".into()));
        }
        let (replies, requests) = region.accelerator_ends(0);
        Ok(Self {
            requests,
            replies,
            words: region.words(),
            socket,
            engine_wake_fd: WakeFd::received(engine_wake_fd),
            own_wake_fd: WakeFd::received(own_wake_fd),
            terms,
            in_flight: 0,
            tags: vec![0; terms.depth as usize].into_boxed_slice(),
            ended: false,
            untaken: 0,
            unreleased: 0,
            unpublished: false,
        })
    }

    /// Maximum number of requests in flight.
    pub fn depth(&self) -> usize {
        self.terms.depth as usize
    }

    /// Longest request in bytes.
    pub fn request_bytes_max(&self) -> usize {
        self.terms.request_bytes_max as usize
    }

    /// Longest reply in bytes.
    pub fn reply_bytes_max(&self) -> usize {
        self.terms.reply_bytes_max as usize
    }

    /// Whether requests have outcomes; a service with `replies = "none"` sends nothing.
    pub fn answers(&self) -> bool {
        self.terms.answers
    }

    /// Requests whose outcome has not been received.
    pub fn in_flight(&self) -> usize {
        self.in_flight as usize
    }

    /// Writes a request into the ring; [`Self::publish`] must follow.
    #[inline]
    pub fn try_send(&mut self, tag: u64, request: &[u8]) -> Result<(), ShmError> {
        if self.ended {
            return Err(ShmError::Closed);
        }
        if self.in_flight == self.terms.depth {
            return Err(ShmError::Full);
        }
        let head = Head { token: 0, tag, kind: kind::MESSAGE, status: 0 };
        let slot = self.requests.committed() % self.tags.len() as u64;
        self.requests.prefetch(AHEAD, request.len() as u64);
        match self.requests.push(head, request) {
            Ok(()) => {
                self.tags[slot as usize] = tag;
                self.unpublished = true;
                self.in_flight += u32::from(self.terms.answers);
                Ok(())
            }
            Err(LoanError::Full) => Err(ShmError::Full),
            Err(LoanError::TooLong) => {
                Err(ShmError::TooLong { bytes: request.len(), most: self.request_bytes_max() })
            }
            Err(LoanError::Corrupt) => Err(ShmError::Corrupt),
        }
    }

    /// Publishes everything that was sent, and wakes the engine if it sleeps.
    #[inline]
    pub fn publish(&mut self) {
        if std::mem::take(&mut self.unpublished) {
            self.requests.publish();
            if self.words.parked() {
                self.engine_wake_fd.wake();
            }
        }
    }

    /// The next outcome, if there is one; a reply's bytes are copied to the front of `into`.
    #[inline]
    pub fn try_receive(&mut self, into: &mut [u8]) -> Result<Option<Reply>, ShmError> {
        let header = match self.replies.peek() {
            Ok(Some(header)) => header,
            Ok(None) => {
                self.give_back();
                return Ok(None);
            }
            Err(RingError::BadHeader | RingError::Corrupt) => return Err(ShmError::Corrupt),
        };
        let len = header.len as usize;
        let room = into.len();
        let Some(payload) = into.get_mut(..len) else {
            return Err(ShmError::Buffer { bytes: len, room });
        };
        self.replies.prefetch(AHEAD, header.len.into());
        let arrived = self.replies.copy_out(&header, payload);
        debug_assert!(arrived, "doorbell rings hold whole messages");
        self.replies.advance();
        self.in_flight = self.in_flight.saturating_sub(1);
        self.unreleased += 1;
        if self.unreleased * RELEASE_PARTS > self.terms.depth {
            self.give_back();
        }
        let lost = match header.kind {
            kind::MESSAGE => None,
            _ => Some(ReportedReason::from_code(header.status)),
        };
        Ok(Some(Reply { tag: header.tag, len, lost }))
    }

    /// Returns the slots of outcomes that were read.
    #[inline]
    fn give_back(&mut self) {
        if self.unreleased > 0 {
            self.replies.release();
            self.unreleased = 0;
        }
    }

    /// Sends one request and publishes it, waiting for room if necessary. Returns [`ShmError::Full`] if there was
    /// none in time; if `depth` requests are in flight, only receiving makes room, and it does not wait.
    pub fn send(&mut self, tag: u64, request: &[u8], timeout: Duration) -> Result<(), ShmError> {
        let deadline = Instant::now() + timeout;
        loop {
            match self.try_send(tag, request) {
                Ok(()) => {
                    self.publish();
                    return Ok(());
                }
                Err(ShmError::Full) if self.in_flight < self.terms.depth => {}
                Err(error) => return Err(error),
            }
            self.publish();
            if self.is_closed() {
                return Err(self.end());
            }
            if self.words.stop() != stop::RUN {
                return Err(ShmError::Closed);
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(ShmError::Full);
            }
            std::thread::sleep(SLEEP_MAX.min(left));
        }
    }

    /// The next outcome, waiting for it; `None` if none arrived in time. When the engine has ended the connection,
    /// requests that it did not take are returned as lost for [`DropReason::Draining`] before the error; the engine
    /// has not counted them.
    pub fn receive(
        &mut self,
        into: &mut [u8],
        timeout: Duration,
    ) -> Result<Option<Reply>, ShmError> {
        self.publish();
        if let Some(reply) = self.try_receive(into)? {
            return Ok(Some(reply));
        }
        let began = Instant::now();
        let deadline = began + timeout;
        while began.elapsed() < SPIN.min(timeout) {
            for _ in 0..SPINS_PER_YIELD {
                if let Some(reply) = self.try_receive(into)? {
                    return Ok(Some(reply));
                }
                std::hint::spin_loop();
            }
            std::thread::yield_now();
        }
        loop {
            self.words.set_accelerator_parked(true);
            let found = self.try_receive(into);
            let left = deadline.saturating_duration_since(Instant::now());
            let mut ended = false;
            // Even with no time to wait, the end of the engine is reported.
            if matches!(found, Ok(None)) {
                let files = [self.own_wake_fd.as_fd(), self.socket.as_fd()];
                let ready = wait_readable(&files, Some(left));
                self.own_wake_fd.clear();
                ended = ready[1];
            }
            self.words.set_accelerator_parked(false);
            if let Some(reply) = found? {
                return Ok(Some(reply));
            }
            // Outcomes that were written before the end are returned before the error.
            match self.try_receive(into)? {
                Some(reply) => return Ok(Some(reply)),
                None if ended => return self.after_the_end(),
                None if left.is_zero() => return Ok(None),
                None => {}
            }
        }
    }

    /// The requests that the engine has not taken and never will, one by one; then the error.
    fn after_the_end(&mut self) -> Result<Option<Reply>, ShmError> {
        self.ended = true;
        if self.terms.answers && self.in_flight > 0 && self.requests.credit().is_ok() {
            let next = self.untaken.max(self.requests.released());
            if next < self.requests.committed() {
                self.untaken = next + 1;
                self.in_flight -= 1;
                let tag = self.tags[(next % self.tags.len() as u64) as usize];
                let lost = Some(DropReason::Draining.into());
                return Ok(Some(Reply { tag, len: 0, lost }));
            }
        }
        Err(self.end())
    }

    /// The end of the connection, with the engine's reason if it sent one. The reason is returned once.
    fn end(&self) -> ShmError {
        let mut said = [0; ANSWER_BYTES_MAX];
        match self.socket.receive(&mut said) {
            Ok(Some(len)) => match Answer::decode(&said[..len]) {
                Ok(Answer::Refused(why)) => ShmError::Ended(why),
                _ => ShmError::Closed,
            },
            _ => ShmError::Closed,
        }
    }

    /// Whether the engine has ended the connection: one system call. Outcomes that were written before can still be
    /// received.
    pub fn is_closed(&self) -> bool {
        wait_readable(&[self.socket.as_fd()], Some(Duration::ZERO))[0]
    }
}

/// A full backlog is a temporary error of the host kernel.
fn connect(path: &Path, deadline: Instant) -> Result<LocalSocket, ShmError> {
    loop {
        match LocalSocket::connect(path) {
            Ok(socket) => return Ok(socket),
            Err(error)
                if error.kind() == io::ErrorKind::WouldBlock && Instant::now() < deadline =>
            {
                std::thread::sleep(Duration::from_millis(1));
            }
            Err(source) => return Err(ShmError::Connect { path: path.to_owned(), source }),
        }
    }
}
