//! `kind = "remote"`: an accelerator on another machine. The process that the engine starts runs no blocks: a thread
//! mirrors the rings of its region over a link (`crates/remote`). The other end is [`crate::far`].

use std::os::fd::AsFd as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use engine::topology::{DeviceSpec, Service};
use mqueue::abi::{reason, stop};
use mqueue::{MappedMemory, Region};
use remote::{Broken, Control, Mirror, Secret, Side};
use sys::PrivateFile;
use sys::readiness::{WakeFd, wait_readable};
use wire::attach::{FromEngine, FromRuntime, Offer, Ready};
use wire::link::{Frame, Shape};

use super::{Flags, Kind, Options, TextKey};
use crate::kernel_file::{self, FILE_BYTES_MAX};
use crate::{Device, Failure, Job};

/// Time to connect and to authenticate.
const CONNECT_MAX: Duration = Duration::from_secs(5);
/// Time for the blocks on the other machine to start; the engine waits longer.
const START_MAX: Duration = Duration::from_secs(20);
/// Longest time between two heartbeats: a round trip that is measured less often says little.
const BEAT_PAUSE_MAX: Duration = Duration::from_secs(1);
/// An idle mirror polls without pauses for this time, ...
pub(crate) const SPIN: Duration = Duration::from_micros(20);
/// ... then yields its core between two polls until this time has passed, then sleeps ...
pub(crate) const AWAKE: Duration = Duration::from_micros(100);
/// ... for at most this time, ...
const SLEEP_MAX: Duration = Duration::from_millis(50);
/// ... or this if a ring or the connection may have room again without a wake-up.
pub(crate) const PENDING_SLEEP: Duration = Duration::from_micros(500);

pub(super) struct Remote;

const TEXTS: &[TextKey] = &[
    TextKey {
        name: "address",
        example: "tcp://10.0.0.2:7000",
        form: "tcp://HOST:PORT",
        is_valid: remote::is_address,
        what: "Where the runtime on the other machine listens: `serval attach --listen` (remote.md).",
    },
    TextKey {
        name: "secret_file",
        example: "/etc/serval/link.secret",
        form: "an absolute path",
        is_valid: |path| Path::new(path).is_absolute() && !path.contains('\0') && path.len() < 4096,
        what: "A file with the secret that both machines know. Only its owner may have access to it.",
    },
];

impl Kind for Remote {
    fn name(&self) -> &'static str {
        "remote"
    }

    fn summary(&self) -> &'static str {
        "an accelerator of another machine, over an authenticated TCP link (remote.md)"
    }

    fn flags(&self) -> Flags {
        Flags { elsewhere: true, ..Flags::default() }
    }

    fn texts(&self) -> &'static [TextKey] {
        TEXTS
    }

    fn check(&self, service: &Service, _kernel: &str) -> Result<(), (String, String)> {
        if service.sockets.is_empty() {
            return Ok(());
        }
        let what = format!("service {:?} has sockets, which do not cross a link", service.name);
        Err((what, "choose accelerators of this machine, or remove [[service.socket]]".to_owned()))
    }

    fn place(&self, device: &DeviceSpec) -> Option<String> {
        Some(format!("remote accelerator at {}", device.text("address")))
    }

    fn secret(&self, device: &DeviceSpec) -> Option<(PathBuf, Result<(), String>)> {
        let path = PathBuf::from(device.text("secret_file"));
        let read = Secret::read(&path).map(drop).map_err(|error| error.to_string());
        Some((path, read))
    }

    fn device(&self, device: &DeviceSpec, _: Options) -> Result<Box<dyn Device>, String> {
        Ok(Box::new(RemoteDevice {
            address: device.text("address").to_owned(),
            secret_file: device.text("secret_file").into(),
            running: None,
        }))
    }
}

/// The engine's end of a link.
struct RemoteDevice {
    address: String,
    secret_file: PathBuf,
    running: Option<Running>,
}

struct Running {
    shared: Arc<Shared>,
    thread: JoinHandle<()>,
}

/// Shared with the thread that mirrors.
struct Shared {
    /// The link is to be closed.
    close: AtomicBool,
    wake: WakeFd,
    /// `Ok`: the blocks have ended as the engine asked.
    ended: Mutex<Option<Result<(), Failure>>>,
}

impl Shared {
    fn ended(&self) -> MutexGuard<'_, Option<Result<(), Failure>>> {
        self.ended.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn refused(error: impl std::fmt::Display) -> Failure {
    Failure { reason: reason::REFUSED, text: error.to_string() }
}

fn lost(error: impl std::fmt::Display) -> Failure {
    Failure { reason: reason::LINK_LOST, text: error.to_string() }
}

impl Device for RemoteDevice {
    fn kind(&self) -> &str {
        "remote"
    }

    fn start(&mut self, jobs: &[Job]) -> Result<(), Failure> {
        let [job] = jobs else { return Err(refused("a link serves one service")) };
        let region = Region::join(MappedMemory::new(job.memory.clone()));
        let (shape, ends) = remote::engine_side(&mut region.map_err(refused)?).map_err(refused)?;
        let secret = Secret::read(&self.secret_file).map_err(refused)?;
        let channel = remote::connect(&self.address, &secret, CONNECT_MAX).map_err(lost)?;
        let mut mirror = Mirror::new(channel, Side::Engine);
        offer(&mut mirror, job, shape)?;
        mirror.install(ends);
        let shared = Arc::new(Shared {
            close: AtomicBool::new(false),
            wake: WakeFd::new().map_err(refused)?,
            ended: Mutex::default(),
        });
        let link = Link {
            mirror,
            shared: shared.clone(),
            words: job.words.clone(),
            wake_fd: job.wake_fd.clone(),
            heartbeat: job.heartbeat,
            asked: stop::RUN,
        };
        let builder = std::thread::Builder::new().name("link".to_owned());
        let thread = builder.spawn(move || link.run()).map_err(refused)?;
        self.running = Some(Running { shared, thread });
        Ok(())
    }

    fn health(&mut self) -> Result<(), Failure> {
        let Some(running) = &self.running else { return Ok(()) };
        match &*running.shared.ended() {
            Some(Err(failure)) => Err(failure.clone()),
            None if running.thread.is_finished() => Err(lost("the thread of the link has ended")),
            _ => Ok(()),
        }
    }

    fn ended(&mut self) -> bool {
        self.running.as_ref().is_none_or(|running| running.shared.ended().is_some())
    }

    fn stop(&mut self, timeout: Duration) -> Result<(), Failure> {
        let Some(Running { shared, thread }) = self.running.take() else { return Ok(()) };
        shared.close.store(true, Ordering::Relaxed);
        shared.wake.wake();
        let deadline = Instant::now() + timeout.max(Duration::from_millis(200));
        while !thread.is_finished() {
            if Instant::now() >= deadline {
                let text = "the thread of the link does not end".to_owned();
                return Err(Failure { reason: reason::HUNG, text });
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        // A thread that panicked has ended, too.
        let _ = thread.join();
        Ok(())
    }
}

/// Offers the job to the runtime on the other machine, and waits until its blocks run.
fn offer(mirror: &mut Mirror, job: &Job, shape: Shape) -> Result<(), Failure> {
    let offer = FromEngine::Offer(Offer {
        generation: job.generation,
        region_bytes: job.memory.len_bytes() as u64,
        blocks: job.blocks,
        heartbeat_ms: job.heartbeat.as_millis() as u32,
        service: job.service.clone(),
        accelerator: job.accelerator.clone(),
        kernel: job.kernel.clone(),
        params: job.params.clone(),
    });
    let file = match (&job.file, kernel_file::named(&job.kernel)) {
        (Some(file), _) => Some(file.clone()),
        // The engine did not start this process.
        (None, Some((path, _))) => {
            let copy = PrivateFile::copy(path, FILE_BYTES_MAX);
            Some(Arc::new(copy.map_err(|error| refused(format!("{path:?}: {error}")))?))
        }
        (None, None) => None,
    };
    if let Some(file) = file {
        mirror.send(&Frame::Kernel(remote::digest_of(file.bytes())));
    }
    mirror.send(&Frame::Attach(&offer.encode()));
    mirror.send(&Frame::Shape(shape));
    let deadline = Instant::now() + START_MAX;
    let mut answer = None;
    loop {
        let now = Instant::now();
        let turn = mirror.turn(now, &mut |control| match control {
            Control::Attach(bytes) => {
                answer = Some(FromRuntime::decode(bytes).map_err(|error| error.to_string())?);
                Ok(())
            }
            other => Err(format!("it sent {other} before its blocks were ready")),
        });
        match answer.take() {
            Some(FromRuntime::Ready(Ready { generation, blocks })) => {
                turn.map_err(lost)?;
                if (generation, blocks) != (job.generation, job.blocks) {
                    return Err(lost("the other side is ready for another region"));
                }
                return Ok(());
            }
            Some(FromRuntime::Bye(bye)) => {
                return Err(Failure { reason: bye.reason, text: bye.text });
            }
            Some(FromRuntime::Hello(_)) => return Err(lost("the other side sent a hello twice")),
            None => turn.map_err(lost)?,
        };
        if now >= deadline {
            let seconds = START_MAX.as_secs();
            return Err(lost(format!(
                "the blocks on the other machine took more than {seconds} s"
            )));
        }
        wait_readable(&[mirror.as_fd()], Some(Duration::from_millis(20)));
    }
}

/// The thread that mirrors.
struct Link {
    mirror: Mirror,
    shared: Arc<Shared>,
    words: mqueue::Words<MappedMemory>,
    /// Signalled by the engine.
    wake_fd: Arc<WakeFd>,
    /// The link is lost after this time without a byte, or if the other side reads nothing for so long.
    heartbeat: Duration,
    /// The stop word as it was sent.
    asked: u64,
}

impl Link {
    fn run(mut self) {
        let result = self.mirror();
        *self.shared.ended() = Some(result);
        self.mirror.send(&Frame::Stop(stop::NOW as u32));
        self.mirror.close(Duration::from_millis(100));
    }

    /// Until the blocks have ended, the link is lost, or it is to be closed.
    fn mirror(&mut self) -> Result<(), Failure> {
        let pause = (self.heartbeat / 4).min(BEAT_PAUSE_MAX);
        let start = Instant::now();
        let mut moved_at = start;
        // The first one is sent at once.
        let mut beat_at = None;
        while !self.shared.close.load(Ordering::Relaxed) {
            let now = Instant::now();
            let asked = self.words.stop();
            if asked != self.asked {
                self.asked = asked;
                self.mirror.send(&Frame::Stop(asked as u32));
            }
            if beat_at.is_none_or(|at| now - at >= pause) {
                beat_at = Some(now);
                self.mirror.send_beat((now - start).as_nanos() as u64);
            }
            let (mut bye, mut beat) = (None, None);
            let turn = self.mirror.turn(now, &mut |control| match control {
                Control::Attach(bytes) => match FromRuntime::decode(bytes) {
                    Ok(FromRuntime::Bye(said)) => {
                        bye = Some(said);
                        Ok(())
                    }
                    Ok(_) => Err("it sent a message that it may not send now".to_owned()),
                    Err(error) => Err(error.to_string()),
                },
                Control::Beat(sent_ns) => {
                    beat = Some(sent_ns);
                    Ok(())
                }
                Control::Shape(_) | Control::Stop(_) | Control::Kernel(_) => {
                    Err("it sent a message of an engine".to_owned())
                }
            });
            if let Some(sent_ns) = beat {
                let now_ns = start.elapsed().as_nanos() as u64;
                self.words.set_round_trip_ns(now_ns.saturating_sub(sent_ns).max(1));
            }
            if let Some(bye) = bye {
                return match bye.reason {
                    reason::STOPPED if asked != stop::RUN => Ok(()),
                    reason::STOPPED => Err(lost("the runtime on the other machine was stopped")),
                    _ => Err(Failure { reason: bye.reason, text: bye.text }),
                };
            }
            let checked = turn.and_then(|moved| {
                self.mirror.check(now, self.heartbeat)?;
                Ok(moved)
            });
            let moved = checked.map_err(|broken| match broken {
                Broken::Rings => Failure { reason: reason::RING_CORRUPT, text: broken.to_string() },
                Broken::Link(_) => lost(broken),
            })?;
            if moved.is_nothing() {
                self.idle(
                    now - moved_at,
                    pause.saturating_sub(beat_at.map_or(pause, |at| now - at)),
                );
            } else {
                moved_at = now;
            }
        }
        Ok(())
    }

    /// After `idle` without work: spins, then yields the core, then sleeps for at most `limit`.
    fn idle(&mut self, idle: Duration, limit: Duration) {
        if idle < SPIN {
            return std::hint::spin_loop();
        }
        if idle < AWAKE {
            return std::thread::yield_now();
        }
        let limit = if self.mirror.is_pending() { PENDING_SLEEP } else { limit.min(SLEEP_MAX) };
        // EDGE PARK (sleeper half)
        self.words.set_accelerator_parked(true);
        if !self.mirror.has_messages() && self.words.stop() == self.asked {
            let files = [self.wake_fd.as_fd(), self.shared.wake.as_fd(), self.mirror.as_fd()];
            wait_readable(&files, Some(limit));
            self.wake_fd.clear();
        }
        self.words.set_accelerator_parked(false);
    }
}
