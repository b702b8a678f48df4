//! The test acts as the engine: it formats a region on the heap, holds the engine's ends of every ring
//! and counts replies.
#![allow(dead_code, reason = "every test file uses its own part")]

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use accel::Kernel;
use accel::compile::{BuildOptions, build_kernel};
use mqueue::abi::{kind, protocol};
use mqueue::{
    Consumer, HeapMapping, MappedMemory, MqueuePlan, Producer, Region, RegionPlan, RingPlan, Words,
};
use mqueue::{Head, LoanError};

pub(crate) struct Shape {
    pub(crate) blocks: u32,
    pub(crate) backends: u32,
    pub(crate) protocol: u8,
    pub(crate) depth: u32,
    pub(crate) bytes_max: u32,
    pub(crate) start: u64,
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
}

impl Engine {
    pub(crate) fn new(shape: &Shape) -> Self {
        let ring = match shape.protocol {
            protocol::DOORBELL => RingPlan::doorbell(shape.bytes_max, 0),
            protocol => RingPlan { protocol, message_bytes_max: shape.bytes_max, arena_bytes: 0 },
        };
        let mqueue = MqueuePlan { depth: shape.depth, rx: ring, tx: ring };
        let mqueues = vec![mqueue; 1 + shape.backends as usize];
        let plan = RegionPlan::of_blocks(shape.blocks, &mqueues, 1).starting_at(shape.start);
        let memory = HeapMapping::memory(plan.bytes().unwrap() as usize);
        let mut region = Region::format(memory.clone(), &plan).unwrap();
        let words = region.words();
        let count = shape.blocks * (1 + shape.backends);
        let ends = (0..count).map(|mqueue| region.engine_ends(mqueue)).collect();
        Self { memory, words, ends }
    }

    pub(crate) fn all_blocks(&self) -> Vec<u32> {
        (0..Region::join(self.memory.clone()).unwrap().block_count()).collect()
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
pub(crate) fn params(params: &[(&str, f64)]) -> Vec<(String, f64)> {
    params.iter().map(|(name, value)| ((*name).to_owned(), *value)).collect()
}

/// A payload that depends on mqueue, number and length.
pub(crate) fn payload(mqueue: u32, n: u64, len: usize) -> Vec<u8> {
    let seed = u64::from(mqueue).wrapping_mul(0x9e37_79b9) ^ n.wrapping_mul(0xff51_afd7_ed55_8ccd);
    (0..len).map(|i| (seed.rotate_left(i as u32 % 64) as usize + i) as u8).collect()
}
