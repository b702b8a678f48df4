//! The ends of a ring under attack: every memory access they make is checked.
//! Shared by the hostile-peer tests and the fuzz targets.

use std::ops::Range;
use std::sync::{Arc, Mutex};

use mqueue::abi::SlotHeader;
use mqueue::memory::{Memory, Ordering};
use mqueue::{
    Consumer, HeapMapping, JoinError, LoanError, MappedMemory, Producer, Region, RingError, Words,
};

use super::{Choose, head, payload, plan, shapes};

/// The ranges that one end of a ring may access.
#[derive(Clone, Default)]
struct Fence {
    reads: Vec<Range<u64>>,
    writes: Vec<Range<u64>>,
}

/// Memory that panics when an access leaves the fence, once there is one.
#[derive(Clone)]
pub(crate) struct Fenced {
    memory: MappedMemory,
    fence: Arc<Mutex<Option<Fence>>>,
}

impl Fenced {
    pub(crate) fn new(memory: MappedMemory) -> Self {
        Self { memory, fence: Arc::default() }
    }

    /// From now on only these ranges may be accessed.
    pub(crate) fn allow(&self, reads: Vec<Range<u64>>, writes: Vec<Range<u64>>) {
        *self.fence.lock().unwrap() = Some(Fence { reads, writes });
    }

    fn check(&self, at: u64, bytes: u64, write: bool) {
        let fence = self.fence.lock().unwrap();
        let Some(fence) = &*fence else { return };
        let ranges = if write { &fence.writes } else { &fence.reads };
        let inside = ranges.iter().any(|range| range.start <= at && at + bytes <= range.end);
        assert!(inside, "{} of {bytes} bytes at {at}", if write { "store" } else { "load" });
    }
}

impl Memory for Fenced {
    fn len_bytes(&self) -> u64 {
        self.memory.len_bytes()
    }
    fn load(&self, at: u64, order: Ordering) -> u64 {
        self.check(at, 8, false);
        self.memory.load(at, order)
    }
    fn store(&self, at: u64, value: u64, order: Ordering) {
        self.check(at, 8, true);
        self.memory.store(at, value, order);
    }
    fn has_unit16(&self) -> bool {
        self.memory.has_unit16()
    }
    fn load_unit<const WORDS: usize>(&self, at: u64) -> ([u32; WORDS], u32) {
        self.check(at, 4 * WORDS as u64 + 4, false);
        self.memory.load_unit(at)
    }
    fn store_unit<const WORDS: usize>(&self, at: u64, data: [u32; WORDS], sequence: u32) {
        self.check(at, 4 * WORDS as u64 + 4, true);
        self.memory.store_unit(at, data, sequence);
    }
}

/// One end of the RX ring on fenced memory; the attacker has the other end.
pub(crate) struct Victims {
    pub(crate) memory: MappedMemory,
    pub(crate) producer: Producer<Fenced>,
    pub(crate) consumer: Consumer<Fenced>,
    /// Rings of every protocol that are not attacked, to which messages are copied.
    onward: Vec<(Producer<Fenced>, Consumer<Fenced>)>,
    /// The most sensitive offsets: head, tail, the first words of every slot.
    targets: Vec<u64>,
    message_bytes_max: usize,
}

fn onward() -> Vec<(Producer<Fenced>, Consumer<Fenced>)> {
    let ring = |shape| {
        let plan = plan(shape, 1, 0);
        let memory = Fenced::new(HeapMapping::memory(plan.bytes().unwrap() as usize));
        let mut engine = Region::format(memory.clone(), &plan).unwrap();
        let mut accelerator = Region::join(memory).unwrap();
        (engine.engine_ends(0).0, accelerator.accelerator_ends(0).0)
    };
    shapes().into_iter().filter(|shape| shape.arena_bytes == 0).map(ring).collect()
}

/// Fences both ends of the RX ring of a joined region.
pub(crate) fn victims(memory: &MappedMemory) -> Result<Victims, JoinError> {
    let (near, far) = (Fenced::new(memory.clone()), Fenced::new(memory.clone()));
    let mut engine = Region::join(near.clone())?;
    let mut accelerator = Region::join(far.clone())?;
    let entry = *engine.rings_of(0)[0];
    let (producer, _) = engine.engine_ends(0);
    let (consumer, _) = accelerator.accelerator_ends(0);

    let word = |at: u64| at..at + 8;
    let slot_bytes = u64::from(entry.depth) * u64::from(entry.slot_stride);
    let slots = entry.slots_offset..entry.slots_offset + slot_bytes;
    let mut body = vec![slots.clone()];
    if entry.arena_bytes > 0 {
        body.push(entry.arena_offset..entry.arena_offset + entry.arena_bytes);
    }
    let with = |at: u64| body.iter().cloned().chain([word(at)]).collect();
    near.allow(vec![word(entry.tail_offset)], with(entry.head_offset));
    far.allow(with(entry.head_offset), vec![word(entry.tail_offset)]);

    let first_words = slots.step_by(entry.slot_stride as usize).flat_map(|slot| {
        [slot, slot + 8, slot + 16, slot + 24, slot + 32, slot + 40].map(|at| at & !7)
    });
    let ends = [entry.head_offset, entry.tail_offset];
    Ok(Victims {
        memory: memory.clone(),
        producer,
        consumer,
        onward: onward(),
        targets: ends.into_iter().cycle().take(8).chain(first_words).collect(),
        message_bytes_max: entry.message_bytes_max as usize,
    })
}

impl Victims {
    /// The attacker writes one word: often a sensitive one, sometimes any.
    pub(crate) fn scribble(&self, numbers: &mut impl Choose) {
        let at = if numbers.below(4) > 0 {
            self.targets[numbers.below(self.targets.len() as u64) as usize]
        } else {
            8 * numbers.below(self.memory.len_bytes() / 8)
        };
        let near = self.memory.load(at, Ordering::Relaxed);
        let mut value = numbers.hostile(near);
        if numbers.below(3) == 0 {
            // Only the low half: the other half, for example a granule's sequence, stays valid.
            value = near & !0xffff_ffff | value & 0xffff_ffff;
        }
        self.memory.store(at, value, Ordering::Relaxed);
    }

    /// Restores the counts, so that the ring is not dead for the rest of the test.
    pub(crate) fn restore(&self) {
        let tail = self.consumer.consumed().max(self.producer.released());
        self.memory.store(self.targets[0], self.producer.committed().max(tail), Ordering::Relaxed);
        self.memory.store(self.targets[1], tail, Ordering::Relaxed);
    }

    /// Copies a message into another ring, as the engine does: it arrives there complete, whatever its content, or not at all.
    fn hand_on(&mut self, header: &SlotHeader, numbers: &mut impl Choose, seen: &mut Seen) -> bool {
        let ring = numbers.below(self.onward.len() as u64) as usize;
        let (to, from) = &mut self.onward[ring];
        let head = head(numbers.next());
        to.credit().unwrap();
        if !to.push_from(head, &self.consumer, header) {
            return false;
        }
        to.publish();
        let copied = from.peek().unwrap().expect("published");
        let sent = (head.token, head.tag, head.kind, header.len);
        assert_eq!((copied.token, copied.tag, copied.kind, copied.len), sent);
        assert!(from.copy_out(&copied, &mut vec![0; header.len as usize]));
        from.advance();
        from.release();
        seen.handed_on += 1;
        true
    }

    /// One operation of either end; every result except a panic is acceptable, and some are counted.
    pub(crate) fn step(&mut self, numbers: &mut impl Choose, seen: &mut Seen) {
        match numbers.below(8) {
            0..3 => {
                let len = numbers.below(self.message_bytes_max as u64 + 2) as usize;
                let n = numbers.next();
                match self.producer.push(head(n), &payload(n, len)) {
                    Ok(()) => seen.pushed += 1,
                    Err(LoanError::Corrupt) => seen.corrupt += 1,
                    Err(LoanError::TooLong) => assert!(len > self.message_bytes_max),
                    Err(LoanError::Full) => {}
                }
            }
            3 => {
                self.producer.publish();
            }
            4 => match self.producer.credit() {
                Ok(_) => {}
                Err(error) => assert_eq!(error, RingError::Corrupt),
            },
            5..7 => match self.consumer.peek() {
                Ok(Some(header)) => {
                    assert!(header.len as usize <= self.message_bytes_max);
                    assert_ne!(header.kind, 0);
                    // The header is a copy: it stays valid whatever happens to the ring.
                    self.scribble(numbers);
                    let arrived = match numbers.below(2) {
                        0 => {
                            let mut received = vec![0; header.len as usize];
                            self.consumer.copy_out(&header, &mut received)
                        }
                        _ => self.hand_on(&header, numbers, seen),
                    };
                    if arrived || numbers.below(2) == 0 {
                        self.consumer.advance();
                        seen.read += 1;
                    }
                }
                Ok(None) => {}
                Err(RingError::BadHeader) => {
                    seen.bad += 1;
                    self.consumer.advance();
                }
                Err(RingError::Corrupt) => seen.corrupt += 1,
            },
            _ => {
                self.consumer.release();
                let _ = self.consumer.hinted();
            }
        }
    }
}

/// Counts of results, so that a test that never gets anywhere fails.
#[derive(Debug, Default)]
pub(crate) struct Seen {
    pub(crate) pushed: u64,
    pub(crate) read: u64,
    /// Of those, copied directly into another ring.
    pub(crate) handed_on: u64,
    pub(crate) bad: u64,
    pub(crate) corrupt: u64,
}

/// Every word of a region, written and read.
pub(crate) fn use_words(words: &Result<Words<MappedMemory>, JoinError>, numbers: &mut impl Choose) {
    let Ok(words) = words else { return };
    words.set_stop(numbers.next());
    words.set_engine_heartbeat(numbers.next());
    words.set_parked(numbers.below(2) == 0);
    words.set_accelerator_parked(numbers.below(2) == 0);
    let _ = (words.stop(), words.engine_heartbeat(), words.parked());
    let _ = words.accelerator_parked();
    let _ = (words.accelerator_state(), words.accelerator_reason(), words.accelerator_heartbeat());
    let _ = (words.block(0), words.block_state(0), words.rx_head(0), words.tx_head(0));
    words.set_block(0, numbers.next(), numbers.next());
}
