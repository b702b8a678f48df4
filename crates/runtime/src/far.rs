//! The other machine's end of a link: listens, and runs the blocks of each engine that is authenticated.
//!
//! Each link has a thread, which is all that its [`Device`] needs: it makes a region like the engine's, starts the blocks
//! in it, and mirrors its rings (`crates/remote`). The engine's end is `kinds/remote.rs`. The engine knows the secret, and
//! may run any built-in kernel; a kernel in a file only if this side names a file with the same content. The copy whose
//! digest was compared is the one that runs: the file itself may change meanwhile.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::ScopedJoinHandle;
use std::time::{Duration, Instant};

use mqueue::MappedMemory;
use mqueue::abi::{reason, state, stop};
use remote::{Broken, Channel, Control, Ends, Greeted, Greeter, Mirror, Side};
use sys::readiness::{WakeFd, wait_readable};
use sys::{PrivateFile, RegionOptions, SharedMemory};
use wire::attach::{Bye, FromEngine, FromRuntime, Offer, Ready};
use wire::link::{DIGEST_BYTES, Frame, Shape};

use crate::kernel_file::FILE_BYTES_MAX;
use crate::kinds::remote::{PENDING_SLEEP, SPIN};
use crate::{ANSWER_TIMEOUT, CHECK_INTERVAL, Device, End, Failure, Job, RuntimeError, kernel_file};

/// Largest region that an engine may ask for.
const REGION_BYTES_MAX: u64 = 1 << 30;
/// Links that are served at the same time, unless the device is for one process only.
const LINKS_MAX: usize = 16;
/// Time for the other side to read the reason of an end.
const CLOSE_MAX: Duration = Duration::from_millis(200);
/// How long blocks have to end when this process stops.
const STOP_MAX: Duration = Duration::from_secs(1);
/// While blocks work, the mirror yields its core between two polls for this time without a message, ...
const AWAKE: Duration = Duration::from_millis(1);
/// ... then it sleeps this long between two polls: blocks do not wake it.
const WORK_SLEEP: Duration = Duration::from_micros(50);
/// Longest sleep without work.
const SLEEP_MAX: Duration = Duration::from_millis(10);

/// The SHA-256 digest of a kernel's file.
type Digest = [u8; DIGEST_BYTES];
/// The kernel to run; if it is in a file, with the copy of the file whose digest is the engine's.
type Agreed = (String, Option<Arc<PrivateFile>>);

/// What a listener serves.
pub struct Terms<'a> {
    /// The kernels that engines may run here; none: all built-in ones. One in a file is the same one where the contents of
    /// both sides' files are the same, whatever their paths are.
    pub kernels: Vec<String>,
    /// Makes what runs the blocks of one link. The error is one sentence.
    pub device: &'a (dyn Fn() -> Result<Box<dyn Device>, String> + Sync),
    /// The device is for one link at a time.
    pub exclusive: bool,
    /// Ends after the first generation.
    pub once: bool,
    /// A block may work on one message for this long: blocks of a link that has broken are waited for.
    pub hang: Duration,
}

/// Serves links until `cancel` is set or, with `once`, a generation has ended. Fails when blocks could not be ended, after which
/// this process must not serve again.
pub fn listen(
    mut greeter: Greeter,
    terms: &Terms<'_>,
    cancel: &AtomicBool,
) -> Result<End, RuntimeError> {
    let links_max = if terms.exclusive { 1 } else { LINKS_MAX };
    // Also ends the links when one of them must not go on.
    let ending = AtomicBool::new(false);
    let is_over = || cancel.load(Ordering::Relaxed) || ending.load(Ordering::Relaxed);
    let mut refused = Refused::default();
    std::thread::scope(|scope| {
        let mut links: Vec<ScopedJoinHandle<'_, Result<End, RuntimeError>>> = Vec::new();
        let mut refusing: Vec<ScopedJoinHandle<'_, ()>> = Vec::new();
        let mut result = Ok(End::Stopped);
        while !is_over() {
            for greeted in greeter.advance(Duration::from_millis(100)) {
                match greeted {
                    Greeted::Refused(from, error) => refused.log(from, &error.to_string()),
                    Greeted::Link(channel, from) if links.len() < links_max => {
                        tracing::info!(%from, "an engine is linked");
                        let is_over = &is_over;
                        links.push(scope.spawn(move || serve(channel, terms, is_over)));
                    }
                    Greeted::Link(channel, from) => {
                        let text = format!("it serves {links_max} links already");
                        refused.log(from, &text);
                        // Others do not wait until this one has read why. One of too many only sees the end of its connection.
                        refusing.retain(|thread| !thread.is_finished());
                        if refusing.len() < LINKS_MAX {
                            let mirror = Mirror::new(channel, Side::Accelerator);
                            refusing
                                .push(scope.spawn(move || close(mirror, reason::REFUSED, text)));
                        }
                    }
                }
            }
            for link in links.extract_if(.., |link| link.is_finished()) {
                let ended = link.join().unwrap_or_else(|_| {
                    let text = "the thread of a link has failed".to_owned();
                    Err(RuntimeError::Blocks(Failure { reason: reason::CONTRACT, text }))
                });
                match &ended {
                    Ok(end) => tracing::info!("a link ended: {end}"),
                    Err(error) => tracing::error!("{error}"),
                }
                if terms.once || ended.is_err() {
                    ending.store(true, Ordering::Relaxed);
                    result = ended;
                }
            }
        }
        for link in links {
            let ended = link.join();
            if let (Ok(Err(error)), true) = (ended, result.is_ok()) {
                result = Err(error);
            }
        }
        result
    })
}

/// Peers that were refused: the first is logged, then those whose number is a power of two.
#[derive(Default)]
struct Refused(u64);

impl Refused {
    fn log(&mut self, from: std::net::SocketAddr, error: &str) {
        self.0 += 1;
        if self.0.is_power_of_two() {
            tracing::warn!(%from, refused = self.0, "a peer was refused: {error}");
        }
    }
}

fn refused(error: impl std::fmt::Display) -> Failure {
    Failure { reason: reason::REFUSED, text: error.to_string() }
}

/// The other side gets the reason if it can still be reached.
fn lost(text: String) -> End {
    let text = format!("the link is lost: {text}");
    End::Failed(Failure { reason: reason::LINK_LOST, text })
}

/// Ends a link with a reason.
fn close(mut mirror: Mirror, reason: u64, text: String) {
    mirror.send(&Frame::Attach(&FromRuntime::Bye(Bye { reason, text }).encode()));
    mirror.close(CLOSE_MAX);
}

/// Serves one generation. `Err`: the blocks could not be ended.
fn serve(
    channel: Channel,
    terms: &Terms<'_>,
    is_over: &dyn Fn() -> bool,
) -> Result<End, RuntimeError> {
    let mut mirror = Mirror::new(channel, Side::Accelerator);
    let (job, ends) = match receive_offer(&mut mirror, is_over)
        .and_then(|(offer, shape, digest)| prepare(offer, &shape, &terms.kernels, digest))
    {
        Ok(prepared) => prepared,
        Err(failure) => {
            close(mirror, failure.reason, failure.text.clone());
            return Ok(End::Failed(failure));
        }
    };
    let mut device = match (terms.device)() {
        Ok(device) => device,
        Err(text) => {
            close(mirror, reason::REFUSED, text.clone());
            return Ok(End::Failed(refused(text)));
        }
    };
    let jobs = [job];
    if let Err(failure) = device.start(&jobs) {
        close(mirror, failure.reason, failure.text.clone());
        return match device.stop(Duration::ZERO) {
            Ok(()) => Ok(End::Failed(failure)),
            Err(stuck) => Err(RuntimeError::Blocks(stuck)),
        };
    }
    let [job] = &jobs;
    job.words.set_accelerator_state(state::READY);
    mirror.install(ends);
    let ready = Ready { generation: job.generation, blocks: job.blocks };
    mirror.send(&Frame::Attach(&FromRuntime::Ready(ready).encode()));
    tracing::info!(
        service = job.service,
        accelerator = job.accelerator,
        generation = job.generation,
        "serving"
    );
    let mut serving = Serving { mirror, job, device: &mut *device, outstanding: 0 };
    let end = serving.run(is_over);
    let Serving { mirror, .. } = serving;
    job.words.set_stop(stop::NOW);
    job.wake_fd.wake();
    let (reason, text) = match &end {
        End::Stopped => (reason::STOPPED, String::new()),
        End::EngineLost => (reason::ENGINE_LOST, String::new()),
        End::Failed(failure) => (failure.reason, failure.text.clone()),
    };
    close(mirror, reason, text);
    // Only a block that hangs ends this process, and with it the links of other engines.
    let patience = if is_over() { STOP_MAX } else { terms.hang.max(STOP_MAX) };
    device.stop(patience).map_err(RuntimeError::Blocks)?;
    Ok(end)
}

/// Waits for the engine's offer.
fn receive_offer(
    mirror: &mut Mirror,
    is_over: &dyn Fn() -> bool,
) -> Result<(Offer, Shape, Option<Digest>), Failure> {
    let deadline = Instant::now() + ANSWER_TIMEOUT;
    let (mut offer, mut shape, mut digest) = (None, None, None);
    loop {
        let now = Instant::now();
        let turn = mirror.turn(now, &mut |control| match control {
            Control::Attach(bytes) => match FromEngine::decode(bytes) {
                Ok(FromEngine::Offer(offered)) if offer.is_none() => {
                    offer = Some(offered);
                    Ok(())
                }
                Ok(_) => Err("the engine sent no offer".to_owned()),
                Err(error) => Err(error.to_string()),
            },
            Control::Shape(sent) if shape.is_none() => {
                shape = Some(sent);
                Ok(())
            }
            Control::Kernel(sent) if digest.is_none() && offer.is_none() => {
                digest = Some(sent);
                Ok(())
            }
            other => Err(format!("the engine sent {other} before its offer")),
        });
        turn.map_err(refused)?;
        if let (Some(_), Some(_)) = (&offer, &shape) {
            return Ok((offer.take().expect("checked"), shape.take().expect("checked"), digest));
        }
        if now >= deadline || is_over() {
            return Err(refused("the engine sent no offer in time"));
        }
        let pause = if mirror.is_pending() { PENDING_SLEEP } else { Duration::from_millis(50) };
        wait_readable(&[mirror.as_fd()], Some(pause));
    }
}

/// The kernel that this side runs for an offer of `offered`, one of those that it may run.
fn agreed_kernel_of(
    offered: &str,
    kernels: &[String],
    digest: Option<Digest>,
) -> Result<Agreed, Failure> {
    match kernels {
        [] => agreed_kernel(offered, "", digest),
        [own] => agreed_kernel(offered, own, digest),
        several => {
            let agreed = several.iter().find_map(|own| agreed_kernel(offered, own, digest).ok());
            agreed.ok_or_else(|| {
                let own = several.iter().map(|own| format!("{own:?}")).collect::<Vec<_>>();
                refused(format!("this side runs the kernels {}, not {offered:?}", own.join(", ")))
            })
        }
    }
}

/// The same; `own` is the only one that it may run, if there is one.
fn agreed_kernel(offered: &str, own: &str, digest: Option<Digest>) -> Result<Agreed, Failure> {
    let file = kernel_file::named(offered);
    if own.is_empty() {
        return match file {
            None => Ok((offered.to_owned(), None)),
            Some(_) => Err(refused(format!(
                "{offered:?} is a file: start this side with --kernel FILE, of a file with the same content"
            ))),
        };
    }
    let (Some((_, name)), Some((path, own_name))) = (file, kernel_file::named(own)) else {
        let same = (offered == own).then(|| (own.to_owned(), None));
        return same
            .ok_or_else(|| refused(format!("this side runs the kernel {own:?}, not {offered:?}")));
    };
    let digest = digest.ok_or_else(|| {
        refused(format!("the engine has sent no digest of the kernel's file {offered:?}"))
    })?;
    let copy = PrivateFile::copy(path, FILE_BYTES_MAX)
        .map_err(|error| refused(format!("the kernel {own:?} of this side: {error}")))?;
    let here = remote::digest_of(copy.bytes());
    if here != digest {
        let [here, there] = [here, digest].map(|digest| short(&digest));
        return Err(refused(format!(
            "this side runs the kernel {own:?} (SHA-256 {here}…), not {offered:?} (SHA-256 {there}…): copy the file \
             of one machine to the other"
        )));
    }
    let kernel = match (name, own_name) {
        (Some(name), Some(own_name)) if name != own_name => {
            return Err(refused(format!(
                "this side runs the kernel {own_name:?} of the file, not {name:?}"
            )));
        }
        (Some(name), None) => format!("{own}:{name}"),
        _ => own.to_owned(),
    };
    Ok((kernel, Some(Arc::new(copy))))
}

/// The first digits of a digest.
fn short(digest: &Digest) -> String {
    digest[..6].iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Makes the region of an offer, and takes the engine's ends of its mqueues.
fn prepare(
    offer: Offer,
    shape: &Shape,
    kernels: &[String],
    digest: Option<Digest>,
) -> Result<(Job, Vec<Ends>), Failure> {
    let (kernel, file) = agreed_kernel_of(&offer.kernel, kernels, digest)?;
    let file = file.filter(|_| !mutants::on("read_digested_file_again"));
    if shape.blocks != offer.blocks {
        return Err(refused("the engine's offer and its shape differ"));
    }
    let plan = remote::accelerator_side(shape, offer.generation);
    let bytes = plan.bytes().map_err(refused)?;
    if bytes > REGION_BYTES_MAX {
        let (mib, most) = (bytes >> 20, REGION_BYTES_MAX >> 20);
        return Err(refused(format!(
            "a region of {mib} MiB is more than the {most} MiB of a link"
        )));
    }
    let name = format!("serval:{}:{}:{}", offer.service, offer.accelerator, offer.generation);
    let memory = SharedMemory::create(&name, bytes as usize, &RegionOptions::default());
    let memory = Arc::new(memory.map_err(refused)?);
    let formatted = remote::format_accelerator_side(MappedMemory::new(memory.clone()), &plan);
    let (region, ends) = formatted.map_err(refused)?;
    let job = Job {
        words: region.words(),
        memory,
        wake_fd: Arc::new(WakeFd::new().map_err(refused)?),
        blocks: offer.blocks,
        service: offer.service,
        accelerator: offer.accelerator,
        kernel,
        file,
        file_is_tried: false,
        params: offer.params,
        generation: offer.generation,
        heartbeat: Duration::from_millis(u64::from(offer.heartbeat_ms.max(1))),
    };
    Ok((job, ends))
}

/// A generation that has started.
struct Serving<'a> {
    mirror: Mirror,
    job: &'a Job,
    device: &'a mut dyn Device,
    /// Messages that the blocks got minus those that they sent.
    outstanding: i64,
}

impl Serving<'_> {
    fn run(&mut self, is_over: &dyn Fn() -> bool) -> End {
        let words = &self.job.words;
        let start = Instant::now();
        let (mut moved_at, mut checked_at) = (start, start);
        // The last heartbeat that was not sent back, and when the blocks got one.
        let (mut echo, mut beat_at) = (None, None);
        while !is_over() {
            let now = Instant::now();
            let mut asked = None;
            // The blocks' own limit for an engine without a heartbeat may be shorter than that of the link: this side decides when the
            // engine is lost, so it beats for the engine as long as the link lives.
            if beat_at.is_none_or(|at| now - at >= CHECK_INTERVAL) {
                beat_at = Some(now);
                words.set_engine_heartbeat(words.engine_heartbeat().wrapping_add(1));
            }
            let turn = self.mirror.turn(now, &mut |control| match control {
                Control::Beat(beat) => {
                    echo = Some(beat);
                    Ok(())
                }
                Control::Stop(word) if [stop::DRAIN, stop::NOW].contains(&word.into()) => {
                    asked = Some(u64::from(word));
                    Ok(())
                }
                other => Err(format!("the engine sent {other} while blocks run")),
            });
            if echo.is_some_and(|beat| self.mirror.send_beat(beat)) {
                echo = None;
            }
            if let Some(word) = asked {
                words.set_stop(word);
                self.job.wake_fd.wake();
            }
            let checked = turn.and_then(|moved| {
                self.mirror.check(now, self.job.heartbeat)?;
                Ok(moved)
            });
            let moved = match checked {
                Ok(moved) => moved,
                Err(Broken::Rings) => {
                    let text = Broken::Rings.to_string();
                    return End::Failed(Failure { reason: reason::RING_CORRUPT, text });
                }
                Err(Broken::Link(text)) => {
                    if words.stop() == stop::NOW {
                        return End::Stopped;
                    }
                    return lost(text);
                }
            };
            // EDGE PARK (waker half)
            if moved.received > 0 && words.accelerator_parked() {
                self.job.wake_fd.wake();
            }
            self.outstanding += moved.received as i64 - moved.sent as i64;
            self.outstanding = self.outstanding.max(0);
            let stopping = words.stop() != stop::RUN;
            if stopping || now - checked_at >= CHECK_INTERVAL / 5 {
                checked_at = now;
                if let Err(failure) = self.device.health() {
                    return End::Failed(failure);
                }
                // Read before the rings: the blocks send nothing after their end.
                let over = stopping && self.device.ended();
                if over && !self.mirror.has_messages() && !self.mirror.is_blocked() {
                    return End::Stopped;
                }
            }
            if moved.is_nothing() {
                self.idle(now - moved_at, stopping);
            } else {
                moved_at = now;
            }
        }
        End::Stopped
    }

    /// After `idle` without a message: spins, then yields the core, then sleeps. Blocks do not wake the mirror.
    fn idle(&self, idle: Duration, stopping: bool) {
        if idle < SPIN {
            return std::hint::spin_loop();
        }
        let working = self.outstanding > 0;
        if idle < AWAKE && (working || idle < crate::kinds::remote::AWAKE) {
            return std::thread::yield_now();
        }
        let limit = if working {
            WORK_SLEEP
        } else if stopping || self.mirror.is_pending() {
            PENDING_SLEEP
        } else {
            SLEEP_MAX
        };
        wait_readable(&[self.mirror.as_fd()], Some(limit));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernels_in_files_are_the_same_if_their_contents_are() {
        let folder = std::env::temp_dir().join(format!("serval-far-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let own = folder.join("own.so");
        std::fs::write(&own, "a kernel").unwrap();
        let own = own.to_str().unwrap();
        let (same, other) = (remote::digest_of(b"a kernel"), remote::digest_of(b"another"));
        let agreed = |offered: &str, own: &str, digest| {
            let agreed = agreed_kernel(offered, own, digest).map_err(|failure| failure.text);
            agreed.map(|(kernel, file)| {
                (kernel, file.map(|file| String::from_utf8(file.bytes().to_vec()).unwrap()))
            })
        };
        let of_file = |kernel: &str| Ok((kernel.to_owned(), Some("a kernel".to_owned())));
        let built_in = |kernel: &str| Ok((kernel.to_owned(), None));
        // The engine's path is not that of this machine.
        assert_eq!(agreed("/elsewhere/a.so", own, Some(same)), of_file(own));
        assert_eq!(agreed("/elsewhere/a.so:sum", own, Some(same)), of_file(&format!("{own}:sum")));
        let named = format!("{own}:sum");
        assert_eq!(agreed("/elsewhere/a.so", &named, Some(same)), of_file(&named));
        let refused = |offered: &str, own: &str, digest| agreed(offered, own, digest).unwrap_err();
        assert!(refused("/elsewhere/a.so:mean", &named, Some(same)).contains("not \"mean\""));
        // The same path with another content.
        assert!(refused(own, own, Some(other)).contains("copy the file of one machine"));
        let gone = folder.join("gone.so");
        let gone = gone.to_str().unwrap();
        assert!(refused(gone, gone, Some(same)).contains("the kernel"));
        // Of an engine that gives no digest, whatever the paths are.
        assert!(refused(own, own, None).contains("no digest"));
        assert!(refused("/elsewhere/a.so", own, None).contains("no digest"));
        // Built-in kernels have names.
        assert_eq!(agreed("echo", "", None), built_in("echo"));
        assert_eq!(agreed("echo", "echo", None), built_in("echo"));
        assert!(refused("echo", own, None).contains("this side runs the kernel"));
        std::fs::remove_dir_all(folder).unwrap();
    }
}
