//! What only faulty and hostile blocks write: forged answers, invalid headers, and words anywhere in their rings.

use mqueue::Memory;
use mqueue::abi::{self, RingEntry, kind, status};
use mqueue::memory::Ordering;

use super::{Block, Model};
use crate::behaviour::Behaviour;
use crate::fault::Fault;
use crate::shared::lock;

impl Model {
    /// Writes what no correct kernel writes, besides the reply to `token`.
    pub(super) fn misbehave(
        &mut self,
        number: usize,
        behaviour: &Behaviour,
        token: u64,
        reply: &[u8],
    ) {
        let message = kind::MESSAGE;
        if self.occurs(Fault::BundleForge, behaviour.bundle_forge) {
            let region_bytes = self.region_bytes();
            let Block { bundles, tx, .. } = &mut self.blocks[number];
            bundles.forge(tx, (token, region_bytes), &mut self.rng);
        }
        if self.occurs(Fault::Twice, behaviour.twice) {
            self.push(number, token, message, status::OK, reply);
        }
        if self.occurs(Fault::Forge, behaviour.forge) {
            // Generations start at 1 and never reach this value.
            let forged = self.rng.draw() | 1 << 63;
            self.push(number, forged, message, status::OK, reply);
        }
        if self.occurs(Fault::Steal, behaviour.steal) {
            let mqueue = self.role.first_mqueue + self.blocks[number].index;
            let stolen =
                lock(&self.tokens).iter().rev().find(|(of, _)| *of != mqueue).map(|(_, t)| *t);
            if let Some(stolen) = stolen {
                self.push(number, stolen, message, status::OK, reply);
            }
        }
        if !self.inherited.is_empty() && self.occurs(Fault::Replay, behaviour.replay) {
            let old = self.rng.pick(&self.inherited);
            self.push(number, old, message, status::OK, reply);
        }
        if self.occurs(Fault::BadKind, behaviour.bad_kind) {
            let kind = self.rng.between(3, 255) as u8;
            self.push(number, token, kind, status::OK, reply);
        }
        if self.occurs(Fault::BadHeader, behaviour.bad_header)
            && self.push(number, token, 0, 0, &[])
        {
            self.spoil_header(number);
        }
    }

    /// Gives the message just pushed (of kind 0) another kind of invalid header, if headers
    /// are contiguous.
    fn spoil_header(&mut self, number: usize) {
        let block = &self.blocks[number];
        let entry = block.rings[1];
        if entry.protocol != abi::protocol::DOORBELL {
            return;
        }
        let n = (block.tx.committed() - 1) % u64::from(entry.depth);
        let last_word = entry.slots_offset + n * u64::from(entry.slot_stride) + 24;
        let message = u64::from(kind::MESSAGE) << 32;
        let impossible = match self.rng.below(4) {
            0 => message | (u64::from(entry.message_bytes_max) + 1),
            1 => message | u64::from(u32::MAX),
            2 => message | 2 << 48,
            // In an arena that does not exist, or far beyond its end.
            _ => {
                self.memory.store(last_word - 8, entry.arena_bytes, Ordering::Relaxed);
                message | 1 | u64::from(abi::flags::ARENA) << 48
            }
        };
        self.memory.store(last_word, impossible, Ordering::Relaxed);
    }

    /// Overwrites a few words of the block's rings.
    pub(super) fn scribble(&mut self, number: usize) {
        for _ in 0..self.rng.below(4) {
            let rings = &self.blocks[number].rings;
            let entry = rings[self.rng.below(rings.len() as u64) as usize];
            let slots = u64::from(entry.depth) * u64::from(entry.slot_stride) / 8;
            let at = match self.rng.below(4) {
                _ if self.behaviour.wide && self.rng.chance(500) => {
                    lock(&self.net).fault_counts.one(Fault::WideScribble);
                    8 * self.rng.below(self.region_bytes() / 8)
                }
                _ if !self.pools.is_empty() && self.rng.chance(300) => {
                    let pool = self.rng.pick(&self.pools);
                    pool.offset + 8 * self.rng.below(pool.bytes / 8)
                }
                0 => entry.head_offset,
                1 => entry.tail_offset,
                2 if entry.arena_bytes > 0 => {
                    entry.arena_offset + 8 * self.rng.below(entry.arena_bytes / 8)
                }
                _ => entry.slots_offset + 8 * self.rng.below(slots),
            };
            let old = self.memory.load(at, Ordering::Relaxed);
            let new = match self.rng.below(4) {
                0 => self.rng.draw(),
                1 => old.wrapping_add(self.rng.between(1, 3)),
                2 => old ^ 1 << self.rng.below(64),
                _ => old.wrapping_sub(1),
            };
            self.memory.store(at, new, Ordering::Relaxed);
        }
        self.publish_touch(number);
    }

    fn region_bytes(&self) -> u64 {
        let end = |entry: &RingEntry| {
            let slots = entry.slots_offset + u64::from(entry.depth) * u64::from(entry.slot_stride);
            slots.max(entry.arena_offset + entry.arena_bytes)
        };
        self.entries.iter().map(end).max().expect("a region has rings")
    }
}
