//! An accelerator of one's own in Rust: `cargo run --example own_accelerator -- PATH`, where PATH is `attach` of an
//! accelerator with `launch = "external"`. Every block is a thread that answers messages with their bytes in reverse
//! order. (`examples/03_own_accelerator` has a configuration for it, and the same in C++.)

use std::sync::atomic::AtomicBool;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use mqueue::abi::{kind, reason, stop};
use mqueue::{Consumer, Head, MappedMemory, Producer, Region, Words};
use runtime::{self, AttachRequest, Device, Failure, Job};

/// Runs a block as a thread.
#[derive(Default)]
pub(crate) struct Reverser {
    blocks: Vec<JoinHandle<()>>,
    words: Option<Words<MappedMemory>>,
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
        for block in 0..job.blocks {
            let &[mqueue] = region.mqueues_of(block) else {
                return Err(refused("this accelerator asks no backends".to_owned()));
            };
            let (rx, tx) = region.accelerator_ends(mqueue);
            let words = job.words.clone();
            self.blocks.push(thread::spawn(move || serve(&words, rx, tx)));
        }
        self.words = Some(job.words.clone());
        Ok(())
    }

    fn health(&mut self) -> Result<(), Failure> {
        let ended = self.blocks.iter().any(|block| block.is_finished());
        // Looked at last: blocks end after they were asked to.
        let asked = self.words.as_ref().is_some_and(|words| words.stop() != stop::RUN);
        if asked || !ended {
            return Ok(());
        }
        Err(Failure { reason: reason::RING_CORRUPT, text: "a block found its ring corrupt".into() })
    }

    fn ended(&mut self) -> bool {
        self.blocks.iter().all(JoinHandle::is_finished)
    }

    fn stop(&mut self, timeout: Duration) -> Result<(), Failure> {
        let Some(words) = self.words.take() else { return Ok(()) };
        let deadline = Instant::now() + timeout;
        while !self.ended() && Instant::now() < deadline {
            thread::sleep(Duration::from_millis(1));
        }
        words.set_stop(stop::NOW);
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
                thread::sleep(Duration::from_micros(50));
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
        // There is always room for a reply of a length that the service allows.
        if tx.push(head, &message).is_err() {
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
