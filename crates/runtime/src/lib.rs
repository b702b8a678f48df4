//! For programs with an accelerator: attach to an engine and run a service's kernels.
//!
//! [`attach`] connects to the path of an accelerator with `launch = "external"`, serves one generation after the
//! other, and reconnects when the engine restarts. [`serve`] serves one generation on an existing connection. Both
//! speak [`wire::attach`], check everything that the engine sends, write a heartbeat into the region, monitor the
//! engine's, and end the blocks in every case: when the engine asks for it, when the engine is lost, when a block
//! ends, and on `cancel`.
//!
//! A [`Device`] says how blocks run: [`HostDevice`] runs `cpu` kernels on threads of this process, [`GpuDevice`] runs
//! CUDA kernels on a GPU; [`kinds`] has all kinds of a configuration. A program with an accelerator of its own
//! implements the trait and needs no other crate but `mqueue`: see `examples/own_accelerator.rs` of this crate. (For
//! C++ there is the library in `lib/src/attach/`.)
//!
//! The process maps its region and no other memory of the engine, so its kernels can damage only this service on this
//! accelerator. Services that use the same exclusive device share a process and its generation.

#![forbid(unsafe_code)]

pub mod custom_ring;
pub mod far;
mod heartbeat;
pub mod host_call;
pub mod kernel_file;
pub mod kinds;

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

pub use accel::sleepers::Sleepers;
pub use heartbeat::HeartbeatMonitor;
pub use kinds::{GpuDevice, HostDevice};
use mqueue::abi::{ABI_VERSION, BlockWords, feature, reason, state, stop};
use mqueue::{MappedMemory, Region, Words};
use sys::local::LocalSocket;
use sys::readiness::{WakeFd, wait_readable};
use sys::{PrivateFile, SharedMemory};
pub use wire::attach::ParamValue;
use wire::attach::{
    Bye, DESCRIPTORS, FromEngine, FromRuntime, Hello, MESSAGE_BYTES_MAX, Offer, Ready,
};

use kernel_file::FILE_BYTES_MAX;

// The attach protocol and the region have the same limits of parameters.
const _: () = {
    use mqueue::abi;
    assert!(wire::attach::PARAMS_MAX == abi::PARAMS_MAX as usize);
    assert!(wire::attach::PARAM_TEXT_BYTES_MAX == abi::PARAM_TEXT_BYTES_MAX as usize);
    assert!(wire::attach::PARAM_TEXT == abi::PARAM_TEXT);
};

/// How long the engine may take to answer.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);
/// The engine is lost after this time without a heartbeat; kernels use the same limit.
const ENGINE_LOST: Duration = Duration::from_secs(5);
/// A block that does not return from its turn for this long hangs, unless a device says otherwise.
const HUNG_AFTER: Duration = Duration::from_secs(10);
/// Maximum time between two checks.
const CHECK_INTERVAL: Duration = Duration::from_millis(250);
/// Back-off before the first retry of a runtime whose engine is not there; it doubles …
const RETRY_MIN: Duration = Duration::from_millis(100);
/// … up to this.
const RETRY_MAX: Duration = Duration::from_secs(2);

/// Why a runtime does not serve. The message is one sentence for the operator.
#[derive(Debug, thiserror::Error)]
pub enum RuntimeError {
    /// No engine listens.
    #[error("no engine listens at {path:?}: {source}")]
    Connect {
        /// The path.
        path: std::path::PathBuf,
        /// What the host kernel said.
        source: io::Error,
    },
    /// The engine belongs to another user.
    #[error(
        "the engine at {path:?} is of user {theirs}: a runtime of user {own} loads the kernels that an engine of \
         its own user or of root names"
    )]
    ForeignEngine {
        /// The path.
        path: std::path::PathBuf,
        /// The engine's user.
        theirs: u32,
        /// This process's.
        own: u32,
    },
    /// The engine refused.
    #[error("the engine refuses: {0}")]
    Refused(String),
    /// The engine closed the connection, or was silent for too long.
    #[error("the engine is gone: {0}")]
    Gone(String),
    /// A message of the engine is invalid.
    #[error("the engine's offer cannot be used: {0}")]
    Offer(String),
    /// The blocks did not start, or ended.
    #[error("{0}")]
    Blocks(Failure),
}

/// Why blocks cannot go on.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{text}")]
pub struct Failure {
    /// One of [`mqueue::abi::reason`].
    pub reason: u64,
    /// One sentence.
    pub text: String,
}

/// One service that a device is to run.
pub struct Job {
    /// The region; it stays mapped as long as this is held.
    pub memory: Arc<SharedMemory>,
    /// The region's words. [`Words::set_accelerator_heartbeat`] and [`Words::set_accelerator_state`] are called for
    /// the device; it must not call them.
    pub words: Words<MappedMemory>,
    /// Signalled by the engine after it published something while [`Words::accelerator_parked`] says that the runtime
    /// sleeps, and when the blocks are to end.
    pub wake_fd: Arc<WakeFd>,
    /// The number of blocks of the region; all of them are to run.
    pub blocks: u32,
    /// The service.
    pub service: String,
    /// The accelerator.
    pub accelerator: String,
    /// The kernel as the configuration names it: a built-in name, or a path.
    pub kernel: String,
    /// The content of the file when it was checked, if the kernel is a path and the engine started this process or is on another
    /// machine. The file itself may have changed since: a device loads this copy.
    pub file: Option<Arc<PrivateFile>>,
    /// The engine has loaded this copy in a process of its own already.
    pub file_is_tried: bool,
    /// The kernel's parameters.
    pub params: Vec<(String, ParamValue)>,
    /// The generation of the region.
    pub generation: u64,
    /// The engine ends a runtime that gives no heartbeat for this time.
    pub heartbeat: Duration,
}

impl Job {
    /// Where the threads of a device that have nothing to do sleep until the engine has published requests, or the blocks
    /// are to end. One for all threads of the job.
    pub fn sleepers(&self) -> Sleepers {
        Sleepers::new(self.words.clone(), self.wait())
    }

    /// Waits for a wake-up of the engine, at most for the time given, and clears it.
    pub(crate) fn wait(&self) -> Box<dyn Fn(Duration) + Send + Sync> {
        let wake_fd = self.wake_fd.clone();
        Box::new(move |limit| {
            wait_readable(&[wake_fd.as_fd()], Some(limit));
            wake_fd.clear();
        })
    }
}

/// How blocks run. Every call comes from the same thread. Blocks read requests with [`mqueue::Consumer`], wait for them
/// with [`Job::sleepers`], and answer each request once: with a reply, or with kind [`DROP`](mqueue::abi::kind::DROP) and a
/// [`status`](mqueue::abi::status), [`TOO_LONG`](mqueue::abi::status::TOO_LONG) if the reply is longer than the service allows
/// ([`LoanError::TooLong`](mqueue::LoanError)).
pub trait Device {
    /// What the blocks run on, one word.
    fn kind(&self) -> &str;

    /// Whether its blocks take bundles: those of the device library do. If not, each request comes as a message of its own.
    fn takes_bundles(&self) -> bool {
        false
    }

    /// Starts the blocks of all regions; each has reached its first receive when this returns. Called once for each
    /// generation, and not again before [`Self::stop`]. There is one job, except for kinds with an [exclusive
    /// key](kinds::Kind::exclusive_key): there the engine starts one runtime for several services.
    fn start(&mut self, jobs: &[Job]) -> Result<(), Failure>;

    /// Whether all blocks serve. Called several times a second; must not wait.
    fn health(&mut self) -> Result<(), Failure>;

    /// Whether every block has ended, because the stop word asked for it. Must not wait.
    fn ended(&mut self) -> bool;

    /// Ends the blocks, within `timeout` if they end by themselves, else at once, and releases the regions. The stop
    /// word has been set before, unless something failed. `Err`: not all of them could be ended, and this process
    /// must not serve again.
    fn stop(&mut self, timeout: Duration) -> Result<(), Failure>;
}

/// Which services a runtime accepts.
#[derive(Clone, Debug, Default)]
pub struct AttachRequest {
    /// The service whose kernels to run; empty: any that needs a runtime.
    pub service: String,
    /// The only kernel that this runtime has; empty: any.
    pub kernel: String,
}

/// How a generation ended that had started.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum End {
    /// The engine, or `cancel`, asked for it.
    Stopped,
    /// The engine is lost.
    EngineLost,
    /// The blocks could not go on.
    Failed(Failure),
}

impl std::fmt::Display for End {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Stopped => f.write_str("its blocks were to end"),
            Self::EngineLost => f.write_str("the engine is gone"),
            Self::Failed(failure) => failure.fmt(f),
        }
    }
}

/// Attaches at `path` and serves, again and again, until `cancel` is set or `once` a generation has ended. Waits for
/// an engine that is not there, or ends; with `once` that is an error.
pub fn attach(
    path: &Path,
    request: &AttachRequest,
    device: &mut dyn Device,
    once: bool,
    cancel: &AtomicBool,
) -> Result<End, RuntimeError> {
    let mut retry = RETRY_MIN;
    let mut failures = Failures::default();
    loop {
        let result = connect(path).and_then(|socket| serve(&socket, request, device, cancel));
        let cancelled = cancel.load(Ordering::Relaxed);
        if cancelled && result.as_ref().is_err_and(|e| !matches!(e, RuntimeError::Blocks(_))) {
            return Ok(End::Stopped);
        }
        if once || cancelled {
            return result;
        }
        match result {
            Ok(End::Failed(failure)) => tracing::error!("{failure}; attaching again"),
            Ok(end) => {
                failures = Failures::default();
                tracing::info!("a life ended: {end}; attaching again");
                retry = RETRY_MIN;
            }
            // Errors that need the operator are not retried.
            Err(
                error @ (RuntimeError::Blocks(_)
                | RuntimeError::Offer(_)
                | RuntimeError::ForeignEngine { .. }),
            ) => return Err(error),
            Err(error) => failures.log(path, request, &error.to_string()),
        }
        let until = Instant::now() + retry;
        while Instant::now() < until && !cancel.load(Ordering::Relaxed) {
            std::thread::sleep(Duration::from_millis(20));
        }
        if cancel.load(Ordering::Relaxed) {
            return Ok(End::Stopped);
        }
        retry = (2 * retry).min(RETRY_MAX);
    }
}

/// Failed tries since the last generation. The first one is logged, then those whose number is a power of two, and
/// any with another reason.
#[derive(Default)]
struct Failures {
    count: u64,
    last: String,
}

impl Failures {
    /// Whether to log this failure.
    fn count(&mut self, error: &str) -> bool {
        if self.last != error {
            *self = Self { count: 0, last: error.to_owned() };
        }
        self.count += 1;
        self.count.is_power_of_two()
    }

    fn log(&mut self, path: &Path, request: &AttachRequest, error: &str) {
        if !self.count(error) {
            return;
        }
        let (service, kernel) = (request.service.as_str(), request.kernel.as_str());
        let tries = self.count;
        let path = path.display();
        tracing::warn!(%path, service, kernel, tries, "{error}; trying again");
    }
}

/// Connects to the engine at `path`. This process loads code from paths that the engine names, so the engine must
/// have this process's rights already.
fn connect(path: &Path) -> Result<LocalSocket, RuntimeError> {
    let failed = |source| RuntimeError::Connect { path: path.to_owned(), source };
    let socket = LocalSocket::connect(path).map_err(failed)?;
    let (theirs, own) = (socket.peer().map_err(failed)?.user, sys::process::user());
    if theirs == own || theirs == 0 {
        return Ok(socket);
    }
    Err(RuntimeError::ForeignEngine { path: path.to_owned(), theirs, own })
}

/// Serves one generation on a connection to an engine that may name kernels.
pub fn serve(
    socket: &LocalSocket,
    request: &AttachRequest,
    device: &mut dyn Device,
    cancel: &AtomicBool,
) -> Result<End, RuntimeError> {
    let hello = Hello {
        abi_version: ABI_VERSION,
        process: std::process::id(),
        kind: device.kind().to_owned(),
        service: request.service.clone(),
        kernel: request.kernel.clone(),
    };
    say(socket, &FromRuntime::Hello(hello))?;
    let (jobs, heartbeat) = match receive_offers(socket, cancel) {
        Err(_) if cancel.load(Ordering::Relaxed) => return Ok(End::Stopped),
        offered => offered?,
    };
    if let Err(failure) = device.start(&jobs) {
        let Failure { reason, text } = failure.clone();
        // The engine may be gone already.
        let _ = say(socket, &FromRuntime::Bye(Bye { reason, text }));
        let _ = device.stop(Duration::ZERO);
        return Err(RuntimeError::Blocks(failure));
    }
    for job in &jobs {
        let features = if device.takes_bundles() { feature::BUNDLES } else { 0 };
        job.words.set_accelerator_features(features);
        job.words.set_accelerator_state(state::READY);
    }
    let engine = HeartbeatMonitor::new(ENGINE_LOST, jobs[0].words.engine_heartbeat());
    let mut running = Running { socket, jobs: &jobs, device, beats: 0, engine };
    let end = running.run(heartbeat, cancel);
    running.close(&end)?;
    Ok(end)
}

fn say(socket: &LocalSocket, message: &FromRuntime) -> Result<(), RuntimeError> {
    socket.send(&message.encode(), &[]).map_err(|error| RuntimeError::Gone(error.to_string()))
}

/// Waits for the engine's offers, at least one; their regions are mapped and checked when this returns, with the time
/// after which a runtime without a heartbeat is lost. Fails soon after `cancel` is set.
fn receive_offers(
    socket: &LocalSocket,
    cancel: &AtomicBool,
) -> Result<(Vec<Job>, Duration), RuntimeError> {
    let deadline = Instant::now() + ANSWER_TIMEOUT;
    let (mut jobs, mut count, mut heartbeat) = (Vec::new(), 1, Duration::MAX);
    while jobs.len() < count {
        match receive_answer(socket, deadline, cancel)? {
            (FromEngine::Offer(offer), descriptors) => {
                let (job, beat) = open(offer, descriptors)?;
                heartbeat = heartbeat.min(beat);
                jobs.push(job);
            }
            (FromEngine::Together(many), _) if jobs.is_empty() && count == 1 => {
                count = many as usize
            }
            (FromEngine::Together(_), _) => {
                return Err(RuntimeError::Offer("its number changes".into()));
            }
            (FromEngine::Refuse(why), _) => return Err(RuntimeError::Refused(why)),
            (FromEngine::Stop { .. }, _) => {
                return Err(RuntimeError::Gone("it is stopping".into()));
            }
        }
    }
    Ok((jobs, heartbeat))
}

/// The engine's next message, with its descriptors.
fn receive_answer(
    socket: &LocalSocket,
    deadline: Instant,
    cancel: &AtomicBool,
) -> Result<(FromEngine, Vec<OwnedFd>), RuntimeError> {
    let mut bytes = [0; MESSAGE_BYTES_MAX + 1];
    let (len, descriptors) = loop {
        let gone = |error: io::Error| RuntimeError::Gone(error.to_string());
        if let Some(received) = socket.receive_descriptors(&mut bytes).map_err(gone)? {
            break received;
        }
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            let seconds = ANSWER_TIMEOUT.as_secs();
            return Err(RuntimeError::Gone(format!("it gave no answer for {seconds} s")));
        }
        if cancel.load(Ordering::Relaxed) {
            return Err(RuntimeError::Gone("it was not waited for".into()));
        }
        wait_readable(&[socket.as_fd()], Some(left.min(CHECK_INTERVAL)));
    };
    if len == 0 {
        return Err(RuntimeError::Gone("it closed the connection".into()));
    }
    let message = FromEngine::decode(&bytes[..len]);
    let message = message.map_err(|error| RuntimeError::Offer(error.to_string()))?;
    Ok((message, descriptors))
}

/// Maps the region of an offer and checks that it matches the offer.
fn open(offer: Offer, descriptors: Vec<OwnedFd>) -> Result<(Job, Duration), RuntimeError> {
    let wrong = |error: &dyn std::fmt::Display| RuntimeError::Offer(error.to_string());
    let mut descriptors = descriptors.into_iter();
    let (Some(region), Some(wake_fd)) = (descriptors.next(), descriptors.next()) else {
        return Err(wrong(&format!("it came without the {DESCRIPTORS} descriptors")));
    };
    let file = descriptors.next().map(|file| PrivateFile::received(file, FILE_BYTES_MAX));
    let file = file.transpose().map_err(|error| wrong(&format!("its kernel file: {error}")))?;
    let most = usize::try_from(offer.region_bytes).map_err(|e| wrong(&e))?;
    let memory = Arc::new(SharedMemory::open(region, most, false).map_err(|e| wrong(&e))?);
    let joined = Region::join(MappedMemory::new(memory.clone())).map_err(|e| wrong(&e))?;
    let region = (joined.generation(), joined.block_count());
    if region != (offer.generation, offer.blocks) && !mutants::on("serve_another_life") {
        return Err(wrong(&"the region is of another life"));
    }
    let heartbeat = Duration::from_millis(u64::from(offer.heartbeat_ms.max(1)));
    let job = Job {
        words: joined.words(),
        memory,
        wake_fd: Arc::new(WakeFd::received(wake_fd)),
        blocks: offer.blocks,
        service: offer.service,
        accelerator: offer.accelerator,
        kernel: offer.kernel,
        file: file.map(Arc::new),
        file_is_tried: true,
        params: offer.params,
        generation: offer.generation,
        heartbeat,
    };
    Ok((job, heartbeat))
}

/// A generation that has started.
struct Running<'a> {
    socket: &'a LocalSocket,
    /// At least one.
    jobs: &'a [Job],
    device: &'a mut dyn Device,
    beats: u64,
    engine: HeartbeatMonitor,
}

impl Running<'_> {
    fn run(&mut self, heartbeat: Duration, cancel: &AtomicBool) -> End {
        let blocks = self.jobs.iter().map(|job| job.blocks).sum();
        let ready = Ready { generation: self.jobs[0].generation, blocks };
        self.beat();
        if say(self.socket, &FromRuntime::Ready(ready)).is_err() {
            return self.without_engine();
        }
        for Job { service, accelerator, generation, .. } in self.jobs {
            tracing::info!(service, accelerator, generation, "serving");
        }
        // Late once is not lost.
        let pause = (heartbeat / 4).min(CHECK_INTERVAL);
        // Until when the blocks may take to end.
        let mut draining: Option<Instant> = None;
        loop {
            let heard = wait_readable(&[self.socket.as_fd()], Some(pause));
            self.beat();
            if heard[0] {
                match self.hear() {
                    Heard::Nothing => {}
                    Heard::Stop(timeout) => {
                        draining.get_or_insert(Instant::now() + timeout);
                    }
                    Heard::End => return self.without_engine(),
                }
            }
            if let Err(failure) = self.device.health() {
                return End::Failed(failure);
            }
            if self.engine.lost(self.jobs[0].words.engine_heartbeat()) {
                return self.without_engine();
            }
            let over = draining.is_some_and(|until| Instant::now() >= until || self.device.ended());
            if over || cancel.load(Ordering::Relaxed) {
                return End::Stopped;
            }
        }
    }

    /// The engine has ended the connection. It does so when it finds that a block has ended, perhaps before this process does.
    fn without_engine(&mut self) -> End {
        if let Err(failure) = self.device.health() {
            return End::Failed(failure);
        }
        for Job { words, blocks, .. } in self.jobs {
            let failed = (0..*blocks).find_map(|block| {
                let BlockWords { state, reason, .. } = words.block(block);
                let is_orderly = [reason::STOPPED, reason::ENGINE_LOST].contains(&reason);
                (state == state::ENDED && !is_orderly).then_some((block, reason))
            });
            if let Some((block, reason)) = failed {
                return End::Failed(Failure { reason, text: reason::of_block(block, reason) });
            }
        }
        End::EngineLost
    }

    fn beat(&mut self) {
        self.beats += 1;
        self.jobs.iter().for_each(|job| job.words.set_accelerator_heartbeat(self.beats));
    }

    fn hear(&self) -> Heard {
        let mut bytes = [0; MESSAGE_BYTES_MAX + 1];
        match self.socket.receive(&mut bytes) {
            Ok(None) => Heard::Nothing,
            Ok(Some(len)) => match FromEngine::decode(&bytes[..len]) {
                Ok(FromEngine::Stop { drain_ms }) => {
                    Heard::Stop(Duration::from_millis(drain_ms.into()))
                }
                _ => Heard::End,
            },
            Err(_) => Heard::End,
        }
    }

    /// Ends the blocks and sends a bye; the status page has the reason.
    fn close(self, end: &End) -> Result<(), RuntimeError> {
        let (reason, text) = match end {
            End::Stopped => (reason::STOPPED, String::new()),
            End::EngineLost => (reason::ENGINE_LOST, String::new()),
            End::Failed(failure) => (failure.reason, failure.text.clone()),
        };
        // The bye that follows discards everything of this generation; a drain in progress has had its time.
        self.jobs.iter().for_each(|job| job.words.set_stop(stop::NOW));
        let bye = FromRuntime::Bye(Bye { reason, text });
        let failed = matches!(end, End::Failed(_));
        if failed {
            // Before the blocks are waited for: requests in flight with them are lost in any case.
            let _ = say(self.socket, &bye);
        }
        let stopped = self.device.stop(Duration::from_secs(1));
        for job in self.jobs {
            job.words.set_accelerator_reason(reason);
            job.words.set_accelerator_state(state::ENDED);
        }
        if !failed {
            let _ = say(self.socket, &bye);
        }
        stopped.map_err(RuntimeError::Blocks)
    }
}

enum Heard {
    Nothing,
    Stop(Duration),
    End,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failure_that_repeats_is_told_ever_more_rarely_and_another_one_at_once() {
        let mut failures = Failures::default();
        let last = |failures: &mut Failures, error, tries| {
            (1..=tries).filter(|_| failures.count(error)).count()
        };
        assert_eq!(last(&mut failures, "no engine", 1000), 10);
        assert_eq!(last(&mut failures, "refused", 1), 1);
        assert_eq!(last(&mut failures, "no engine", 3), 2);
    }
}
