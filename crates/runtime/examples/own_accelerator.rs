//! An accelerator of one's own in Rust: `cargo run --example own_accelerator -- PATH`, where PATH is `attach` of an
//! accelerator with `launch = "external"`. Every block is a thread that answers messages with their bytes in reverse
//! order. (`examples/03_own_accelerator` has a configuration for it, and the same in C++.)

use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use mqueue::abi::{kind, reason, status, stop};
use mqueue::{Consumer, Head, LoanError, MappedMemory, Producer, Region, Words};
use runtime::{self, AttachRequest, Device, Failure, Job, Sleepers};

/// A block that sleeps looks after this time even if nothing wakes it.
const SLEEP_MAX: Duration = Duration::from_millis(100);

/// Runs a block as a thread.
#[derive(Default)]
pub(crate) struct Reverser {
    blocks: Vec<JoinHandle<()>>,
    running: Option<(Words<MappedMemory>, Arc<Sleepers>)>,
}

impl Device for Reverser {
    fn kind(&self) -> &str {
        "reverser"
    }

    fn start(&mut self, jobs: &[Job]) -> Result<(), Failure> {
        let refused = |text: String| Failure { reason: reason::REFUSED, text };
        // Several come to runtimes for GPUs only.
        let [job] = jobs else { return Err(refused("one service at a time".to_owned())) };
        let region = Region::join(MappedMemory::new(job.memory.clone()));
        let mut region = region.map_err(|error| refused(error.to_string()))?;
        let sleepers = Arc::new(job.sleepers());
        for block in 0..job.blocks {
            let &[mqueue] = region.mqueues_of(block) else {
                return Err(refused("this accelerator asks no backends".to_owned()));
            };
            let (rx, tx) = region.accelerator_ends(mqueue);
            let (words, sleepers) = (job.words.clone(), sleepers.clone());
            self.blocks.push(thread::spawn(move || serve(&words, &sleepers, rx, tx)));
        }
        self.running = Some((job.words.clone(), sleepers));
        Ok(())
    }

    fn health(&mut self) -> Result<(), Failure> {
        let ended = self.blocks.iter().any(|block| block.is_finished());
        // Looked at last: blocks end after they were asked to.
        let asked = self.running.as_ref().is_some_and(|(words, _)| words.stop() != stop::RUN);
        if asked || !ended {
            return Ok(());
        }
        Err(Failure { reason: reason::RING_CORRUPT, text: "a block found its ring corrupt".into() })
    }

    fn ended(&mut self) -> bool {
        self.blocks.iter().all(JoinHandle::is_finished)
    }

    fn stop(&mut self, timeout: Duration) -> Result<(), Failure> {
        let Some((words, sleepers)) = self.running.take() else { return Ok(()) };
        let deadline = Instant::now() + timeout;
        while !self.ended() && Instant::now() < deadline {
            thread::sleep(Duration::from_millis(1));
        }
        words.set_stop(stop::NOW);
        sleepers.wake_all();
        for block in self.blocks.drain(..) {
            if block.join().is_err() {
                return Err(Failure { reason: reason::CONTRACT, text: "a block panicked".into() });
            }
        }
        Ok(())
    }
}

/// One block: until the engine drains and its ring is empty, or the end.
fn serve(
    words: &Words<MappedMemory>,
    sleepers: &Sleepers,
    mut rx: Consumer<MappedMemory>,
    mut tx: Producer<MappedMemory>,
) {
    let mut message = Vec::new();
    loop {
        // Before the ring: who then finds it empty has missed nothing.
        let asked = words.stop();
        if asked == stop::NOW {
            return;
        }
        let header = match rx.peek() {
            Ok(Some(header)) => header,
            Ok(None) if asked == stop::DRAIN => return,
            Ok(None) => {
                sleepers.sleep(SLEEP_MAX, || rx.hinted() || words.stop() != asked);
                continue;
            }
            Err(_) => return,
        };
        message.resize(header.len as usize, 0);
        if !rx.copy_out(&header, &mut message) {
            continue;
        }
        rx.advance();
        rx.release();
        message.reverse();
        let head = Head { token: header.token, tag: 0, kind: kind::MESSAGE, status: 0 };
        let drop = Head { kind: kind::DROP, status: status::TOO_LONG, ..head };
        // There is always room for a reply of a length that the service allows, and for a drop.
        let pushed = match tx.push(head, &message) {
            Err(LoanError::TooLong) => tx.push(drop, &[]),
            pushed => pushed,
        };
        if pushed.is_err() {
            return;
        }
        tx.publish();
    }
}

#[allow(dead_code, reason = "the test of this example has a main of its own")]
fn main() -> Result<(), Box<dyn std::error::Error>> {
    let path = std::env::args().nth(1).ok_or("usage: own_accelerator PATH")?;
    // Never set: a signal ends this program.
    let cancel = AtomicBool::new(false);
    runtime::attach(
        path.as_ref(),
        &AttachRequest::default(),
        &mut Reverser::default(),
        false,
        &cancel,
    )?;
    Ok(())
}
