//! Shared by the tests of this crate: regions of one mqueue, and messages with known content.
#![allow(dead_code, reason = "each test binary uses its own part of this module")]

pub(crate) mod victims;

use mqueue::abi::{kind, protocol};
use mqueue::{
    Consumer, Head, HeapMapping, MappedMemory, MqueuePlan, Producer, Region, RegionPlan, RingPlan,
};

/// One protocol with its limits, small enough that every limit is reached often.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Shape {
    pub(crate) name: &'static str,
    pub(crate) protocol: u8,
    pub(crate) message_bytes_max: u32,
    pub(crate) arena_bytes: u64,
}

/// Every protocol that this machine (or interpreter) supports; `doorbell` also with arenas, a roomy one and one
/// that holds a single longest message.
pub(crate) fn shapes() -> Vec<Shape> {
    let shape = |name, protocol, message_bytes_max, arena_bytes| Shape {
        name,
        protocol,
        message_bytes_max,
        arena_bytes,
    };
    let mut shapes = vec![
        shape("doorbell", protocol::DOORBELL, 61, 0),
        shape("doorbell, arena", protocol::DOORBELL, 2012, 5504),
        shape("doorbell, tight arena", protocol::DOORBELL, 2012, 2016),
        shape("granule8", protocol::GRANULE8, 61, 0),
    ];
    if mqueue::memory::unit16_is_atomic() {
        shapes.push(shape("granule16", protocol::GRANULE16, 61, 0));
    }
    shapes
}

/// A region of one mqueue whose two rings have the same shape.
pub(crate) fn plan(shape: Shape, depth: u32, start: u64) -> RegionPlan {
    let Shape { protocol, message_bytes_max, arena_bytes, .. } = shape;
    let ring = RingPlan { protocol, message_bytes_max, arena_bytes };
    let mqueues = vec![MqueuePlan { depth, rx: ring, tx: ring }];
    RegionPlan::of_blocks(1, &mqueues, 1).starting_at(start)
}

/// A formatted region and the two ends of its RX ring.
pub(crate) struct Ring {
    pub(crate) memory: MappedMemory,
    pub(crate) engine: Region<MappedMemory>,
    pub(crate) accelerator: Region<MappedMemory>,
    pub(crate) producer: Producer<MappedMemory>,
    pub(crate) consumer: Consumer<MappedMemory>,
}

pub(crate) fn ring(shape: Shape, depth: u32, start: u64) -> Ring {
    let plan = plan(shape, depth, start);
    let memory = HeapMapping::memory(plan.bytes().unwrap() as usize);
    let mut engine = Region::format(memory.clone(), &plan).unwrap();
    let mut accelerator = Region::join(memory.clone()).unwrap();
    let (producer, _) = engine.engine_ends(0);
    let (consumer, _) = accelerator.accelerator_ends(0);
    Ring { memory, engine, accelerator, producer, consumer }
}

/// The head of message `n`: every field differs from message to message.
pub(crate) fn head(n: u64) -> Head {
    let mixed = n.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    Head {
        token: mixed,
        tag: !n,
        kind: if n % 3 == 0 { kind::DROP } else { kind::MESSAGE },
        status: mixed as u8,
    }
}

/// The payload of message `n`.
pub(crate) fn fill(n: u64, payload: &mut [u8]) {
    for (i, byte) in payload.iter_mut().enumerate() {
        *byte = (n.wrapping_mul(131) as usize).wrapping_add(7 * i + i / 256) as u8;
    }
}

/// The payload of message `n` as a vector.
pub(crate) fn payload(n: u64, len: usize) -> Vec<u8> {
    let mut payload = vec![0; len];
    fill(n, &mut payload);
    payload
}

/// The source of a test's decisions.
pub(crate) trait Choose {
    /// Any number.
    fn next(&mut self) -> u64;

    /// A number below `end`.
    fn below(&mut self, end: u64) -> u64 {
        self.next() % end
    }

    /// Numbers that a hostile peer would try: extremes, neighbours of `near`, small, arbitrary.
    fn hostile(&mut self, near: u64) -> u64 {
        match self.below(8) {
            0 => 0,
            1 => u64::MAX - self.below(3),
            2 => near.wrapping_add(self.below(5)).wrapping_sub(2),
            3 => near.wrapping_add(self.below(40)),
            4 => 1 << self.below(64),
            5 => near ^ (1 << self.below(64)),
            6 => self.below(4096),
            _ => self.next(),
        }
    }
}

/// A small generator of arbitrary numbers (xorshift), reproducible from its seed.
pub(crate) struct Numbers(pub(crate) u64);

impl Choose for Numbers {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }
}
