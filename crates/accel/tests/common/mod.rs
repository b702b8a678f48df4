//! The test acts as the engine: it formats a region on the heap, holds the engine's ends of every ring
//! and counts replies.
#![allow(dead_code, reason = "every test file uses its own part")]

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use accel::Kernel;
use accel::compile::{BuildOptions, build_kernel};
use engine::commands::{
    AddressCopy, COMMANDS_IN_FLIGHT, Command, CommandRings, Commands, Outcome, SubmitError,
};
use engine::topology::ParamValue;
use mqueue::abi::{kind, protocol};
use mqueue::command::{BufferRange, Copy, Direction};
use mqueue::{
    Consumer, HeapMapping, MappedMemory, Memory, MqueuePlan, Producer, Region, RegionPlan,
    RingPlan, Words,
};
use mqueue::{Head, LoanError};

pub(crate) struct Shape {
    pub(crate) blocks: u32,
    pub(crate) backends: u32,
    pub(crate) protocol: u8,
    pub(crate) depth: u32,
    pub(crate) bytes_max: u32,
    pub(crate) start: u64,
    /// 0: no command rings.
    pub(crate) staging_bytes: u64,
}

impl Default for Shape {
    fn default() -> Self {
        Self {
            blocks: 1,
            backends: 0,
            protocol: protocol::DOORBELL,
            depth: 8,
            bytes_max: 256,
            start: 0,
            staging_bytes: 0,
        }
    }
}

/// A message received by the engine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Got {
    pub(crate) token: u64,
    pub(crate) tag: u64,
    pub(crate) kind: u8,
    pub(crate) status: u8,
    pub(crate) payload: Vec<u8>,
}

pub(crate) struct Engine {
    pub(crate) memory: MappedMemory,
    pub(crate) words: Words<MappedMemory>,
    /// By mqueue: the producer of RX, the consumer of TX.
    pub(crate) ends: Vec<(Producer<MappedMemory>, Consumer<MappedMemory>)>,
    pub(crate) commands: CommandRings,
    /// Where the staging of the command rings begins.
    pub(crate) staging: u64,
}

impl Engine {
    pub(crate) fn new(shape: &Shape) -> Self {
        let ring = match shape.protocol {
            protocol::DOORBELL => RingPlan::doorbell(shape.bytes_max, 0),
            protocol => RingPlan { protocol, message_bytes_max: shape.bytes_max, arena_bytes: 0 },
        };
        let mqueue = MqueuePlan { depth: shape.depth, rx: ring, tx: ring };
        let mqueues = vec![mqueue; 1 + shape.backends as usize];
        let mut plan = RegionPlan::of_blocks(shape.blocks, &mqueues, 1).starting_at(shape.start);
        if shape.staging_bytes > 0 {
            plan = plan.with_commands(COMMANDS_IN_FLIGHT, shape.staging_bytes);
        }
        let memory = HeapMapping::memory(plan.bytes().unwrap() as usize);
        let mut region = Region::format(memory.clone(), &plan).unwrap();
        let words = region.words();
        let count = shape.blocks * (1 + shape.backends);
        let ends = (0..count).map(|mqueue| region.engine_ends(mqueue)).collect();
        let staging = if shape.staging_bytes > 0 { region.staging(0).0 } else { 0 };
        Self { memory, words, ends, commands: CommandRings::take(&mut region), staging }
    }

    pub(crate) fn all_blocks(&self) -> Vec<u32> {
        (0..Region::join(self.memory.clone()).unwrap().block_count()).collect()
    }

    /// Has bytes copied, and waits until that has ended, as the engine never would.
    pub(crate) fn copy(&mut self, copy: Copy) -> Outcome {
        self.execute(&Command::Copy(copy))
    }

    fn execute(&mut self, command: &Command) -> Outcome {
        let begin = Instant::now();
        let now_ns = || begin.elapsed().as_nanos() as u64;
        let number = self.commands.submit(0, command, 60_000_000_000).unwrap();
        let mut done = Vec::new();
        while done.is_empty() {
            self.commands.poll(now_ns(), &mut done, 1);
            // Blocks that see no beat for seconds take the engine for lost.
            self.words.set_engine_heartbeat(self.words.engine_heartbeat() + 1);
            std::thread::sleep(Duration::from_micros(20));
        }
        assert_eq!((done.len(), done[0].number), (1, number));
        done[0].outcome
    }

    /// Copies to the accelerator's buffer and back, and what is outside of it.
    pub(crate) fn copies_work(&mut self, buffer_bytes: u64) {
        let (to, from) = (Direction::ToBuffer, Direction::FromBuffer);
        let copy = |direction, staging_offset, buffer_offset, bytes| Copy {
            direction,
            staging_offset,
            buffer: 0,
            buffer_offset,
            bytes,
        };
        for n in 0..5u64 {
            let sent = payload(1, n, 512);
            self.memory.copy_in(self.staging, &sent);
            self.memory.copy_in(self.staging + 512, &[0; 512]);
            let at = (buffer_bytes - 512) / 4 / 8 * 8 * n.min(4);
            assert_eq!(self.copy(copy(to, 0, at, 512)), Outcome::Done);
            assert_eq!(self.copy(copy(from, 512, at, 512)), Outcome::Done);
            let mut back = vec![0; 512];
            self.memory.copy_out(self.staging + 512, &mut back);
            assert!(back == sent, "copy {n}");
        }
        self.copies_by_address_work(buffer_bytes);
        let sound = copy(to, 0, 0, 512);
        for bad in [
            Copy { buffer: 1, ..sound },
            Copy { buffer: u32::MAX, ..sound },
            Copy { bytes: 0, ..sound },
            Copy { bytes: 12, ..sound },
            Copy { bytes: 1032, ..sound },
            Copy { bytes: !7, ..sound },
            Copy { staging_offset: 520, ..sound },
            Copy { staging_offset: 4, ..sound },
            Copy { staging_offset: !7, ..sound },
            Copy { buffer_offset: buffer_bytes - 504, ..sound },
            Copy { buffer_offset: !511, ..sound },
        ] {
            for direction in [to, from] {
                assert_eq!(self.copy(Copy { direction, ..bad }), Outcome::Range, "{bad:?}");
            }
        }
        assert_eq!(self.copy(sound), Outcome::Done);
    }

    /// The runtime describes its buffer, and the same copies name its addresses.
    fn copies_by_address_work(&mut self, buffer_bytes: u64) {
        assert_eq!(self.execute(&Command::Describe(1)), Outcome::Range);
        assert_eq!(self.execute(&Command::Describe(0)), Outcome::Done);
        let BufferRange { address, bytes } = self.commands.buffer(0, 0).expect("it was described");
        assert_eq!(bytes, buffer_bytes);
        let sent = payload(2, 0, 512);
        self.memory.copy_in(self.staging, &sent);
        self.memory.copy_in(self.staging + 512, &[0; 512]);
        for (direction, staging_offset) in [(Direction::ToBuffer, 0), (Direction::FromBuffer, 512)]
        {
            let address = address + bytes - 512;
            let copy = AddressCopy { direction, staging_offset, address, bytes: 512 };
            assert_eq!(self.execute(&Command::CopyAt(copy)), Outcome::Done);
            for address in [address - bytes, address + 8, address + 512, u64::MAX - 7, 0] {
                let command = Command::CopyAt(AddressCopy { address, ..copy });
                let refused = self.commands.submit(0, &command, u64::MAX);
                assert!(
                    matches!(refused, Err(SubmitError::Refused(_))),
                    "{address:#x} {refused:?}"
                );
            }
        }
        let mut back = vec![0; 512];
        self.memory.copy_out(self.staging + 512, &mut back);
        assert!(back == sent, "the last bytes of the buffer");
    }

    pub(crate) fn push(
        &mut self,
        mqueue: u32,
        token: u64,
        payload: &[u8],
    ) -> Result<(), LoanError> {
        let head = Head { token, kind: kind::MESSAGE, ..Head::default() };
        let rx = &mut self.ends[mqueue as usize].0;
        rx.push(head, payload)?;
        rx.publish();
        Ok(())
    }

    /// The next message of an mqueue's TX ring, once all of it has arrived; its slot is released.
    pub(crate) fn pop(&mut self, mqueue: u32) -> Option<Got> {
        let tx = &mut self.ends[mqueue as usize].1;
        let header = tx.peek().expect("the block writes sound headers")?;
        let mut payload = vec![0; header.len as usize];
        if !tx.copy_out(&header, &mut payload) {
            // Units are not ordered: a header may be visible before the rest.
            return None;
        }
        tx.advance();
        tx.release();
        let mqueue::abi::SlotHeader { token, tag, kind, status, .. } = header;
        Some(Got { token, tag, kind, status, payload })
    }
}

/// A source of a test kernel in `tests/kernels`.
pub(crate) fn kernel_source(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/kernels").join(name)
}

/// A kernel of `source` (a path in the repository), built once for all tests of the program.
pub(crate) fn build(source: &str, name: &str) -> Arc<Kernel> {
    static BUILT: Mutex<Option<(tempfile::TempDir, Vec<String>)>> = Mutex::new(None);
    let mut built = BUILT.lock().unwrap_or_else(PoisonError::into_inner);
    let (folder, sources) = built.get_or_insert_with(|| (tempfile::tempdir().unwrap(), Vec::new()));
    let number = sources.iter().position(|known| known == source);
    let library = |number: usize| folder.path().join(format!("{number}.so"));
    let library = library(number.unwrap_or_else(|| {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(source);
        build_kernel(&path, &library(sources.len()), &BuildOptions::default()).unwrap();
        sources.push(source.to_owned());
        sources.len() - 1
    }));
    Kernel::open(&format!("{}:{name}", library.display())).unwrap()
}

/// Parameters as in a configuration.
pub(crate) fn params(params: &[(&str, f64)]) -> Vec<(String, ParamValue)> {
    params.iter().map(|(name, value)| ((*name).to_owned(), (*value).into())).collect()
}

/// Parameters for the kernel `param_text`, and its reply: a text of the greatest length, and a number between two texts.
pub(crate) fn texts() -> (Vec<(String, ParamValue)>, Vec<u8>) {
    let text = "ö".repeat(127) + "!";
    let params = [("other", "x".into()), ("n", 7.0.into()), ("text", text.as_str().into())];
    let params = params.map(|(name, value)| (name.to_owned(), value));
    (params.into(), [text.as_bytes(), b"7"].concat())
}

/// A payload that depends on mqueue, number and length.
pub(crate) fn payload(mqueue: u32, n: u64, len: usize) -> Vec<u8> {
    let seed = u64::from(mqueue).wrapping_mul(0x9e37_79b9) ^ n.wrapping_mul(0xff51_afd7_ed55_8ccd);
    (0..len).map(|i| (seed.rotate_left(i as u32 % 64) as usize + i) as u8).collect()
}
