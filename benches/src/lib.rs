//! Microbenchmarks: the cost of single operations of the data path, without a network and without other threads.
//!
//! `make microbench` runs them. This file has the workloads; `ring.rs`, `framing.rs` and `dispatch.rs` measure
//! them. A workload counts and sums its input and output, and the benchmark compares the two at the
//! end: a run that lost or damaged a message prints no figure.
#![forbid(unsafe_code)]

use mqueue::abi::kind;
use mqueue::{
    Consumer, Head, HeapMapping, MappedMemory, MqueuePlan, Producer, Region, RegionPlan, RingPlan,
};
use wire::framing::{Framing, ParseState, Parsed};

/// Slots of the rings: enough for the largest batch, few enough to fit the L1 cache.
const DEPTH: u32 = 128;

/// Both ends of one ring on one thread.
pub struct Ring {
    producer: Producer<MappedMemory>,
    consumer: Consumer<MappedMemory>,
    payload: Vec<u8>,
    received: Vec<u8>,
    sent: u64,
    /// Sums of the numbers in the messages written and read.
    sums: (u64, u64),
}

impl Ring {
    /// A ring of one of [`mqueue::abi::protocol`] for messages of `bytes` bytes, at least 8.
    pub fn new(protocol: u8, bytes: usize) -> Self {
        let ring = RingPlan { protocol, message_bytes_max: bytes as u32, arena_bytes: 0 };
        let mqueues = vec![MqueuePlan { depth: DEPTH, rx: ring, tx: ring }];
        let plan = RegionPlan::of_blocks(1, &mqueues, 1);
        let memory = HeapMapping::memory(plan.bytes().expect("a sound plan") as usize);
        let mut engine = Region::format(memory.clone(), &plan).expect("enough memory");
        let mut accelerator = Region::join(memory).expect("just formatted");
        Self {
            producer: engine.engine_ends(0).0,
            consumer: accelerator.accelerator_ends(0).0,
            payload: vec![0x5a; bytes],
            received: vec![0; bytes],
            sent: 0,
            sums: (0, 0),
        }
    }

    /// Writes and publishes `batch` messages, then reads and releases them.
    #[inline]
    pub fn pass(&mut self, batch: u64) {
        for _ in 0..batch {
            self.payload[..8].copy_from_slice(&self.sent.to_le_bytes());
            let head = Head { token: self.sent, tag: 0, kind: kind::MESSAGE, status: 0 };
            self.producer.push(head, &self.payload).expect("room for a batch");
            self.sums.0 = self.sums.0.wrapping_add(2 * self.sent);
            self.sent += 1;
        }
        self.producer.publish();
        while let Some(header) = self.consumer.peek().expect("an honest peer") {
            let payload = &mut self.received[..header.len as usize];
            assert!(self.consumer.copy_out(&header, payload), "a message arrives complete");
            let number = payload.first_chunk().expect("at least 8 bytes");
            let number = u64::from_le_bytes(*number);
            self.sums.1 = self.sums.1.wrapping_add(number).wrapping_add(header.token);
            self.consumer.advance();
        }
        self.consumer.release();
    }

    /// Panics unless every message written was read unchanged.
    pub fn check(&self) {
        assert_eq!(self.consumer.consumed(), self.sent, "messages read and written");
        assert_eq!(self.sums.0, self.sums.1, "sums of messages read and written");
        // A filter on the command line may have skipped this workload.
        if self.sent > 0 {
            assert_eq!(self.received, self.payload, "the last message, completely");
        }
    }
}

/// A connection's receive buffer, full of requests: [`Pipeline::new`] checks that they can be parsed.
pub struct Pipeline {
    framing: Framing,
    buffer: Vec<u8>,
    payload: Vec<u8>,
    requests: usize,
}

impl Pipeline {
    /// `requests` requests with this payload, one after the other.
    pub fn new(framing: Framing, payload: &[u8], requests: usize) -> Self {
        let mut buffer = Vec::new();
        for _ in 0..requests {
            framing.encode_request(payload, &mut buffer).expect("a request of this framing");
        }
        let pipeline = Self { framing, buffer, payload: payload.to_vec(), requests };
        let mut found = 0;
        pipeline.parse(|message| {
            assert_eq!(message, payload, "{framing}");
            found += 1;
        });
        assert_eq!(found, requests, "{framing}: messages parsed and written");
        pipeline
    }

    /// Parses the buffer, one message after the other.
    #[inline]
    pub fn parse(&self, mut take: impl FnMut(&[u8])) {
        let mut at = 0;
        while at < self.buffer.len() {
            let mut state = ParseState::default();
            let rest = &self.buffer[at..];
            match self.framing.parse_request(&mut state, rest, self.payload.len()) {
                Ok(Parsed::Message { consumed, start, end, .. }) => {
                    take(&rest[start..end]);
                    at += consumed;
                }
                other => panic!("{} at byte {at}: {other:?}", self.framing),
            }
        }
    }

    /// Requests in the buffer.
    pub fn requests(&self) -> usize {
        self.requests
    }
}
