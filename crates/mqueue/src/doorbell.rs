//! Doorbells for groups of mqueues, and the sleep word of edge PARK.
//!
//! *Doorbells.* The head words of rings show what is new, but polling all of 240 of them costs more than
//! a hop between two threads. So the publishing side also increments a word for the group of [`GROUP`]
//! mqueues, and the other side reads the heads of a group only if its count has changed. Counts are
//! densely packed: 240 mqueues take four cache lines. Each word has one writer and is only loaded and stored.
//!
//! EDGE DOORBELL: heads published before [`Doorbells::ring`] are visible to a [`Listener`] that sees the
//! count (release store, acquire load).
//!
//! *Sleeping.* A thread that is about to sleep sets a word and checks its rings once more; a
//! publisher reads the word afterwards. Full fences on both sides ensure that at least one sees the other.
//!
//! Both are private to one process in the engine and the accelerator runtimes, and generic over
//! [`Memory`] like the rings, so that loom runs this very code.

use crate::memory::{HeapMapping, MappedMemory, Memory, Ordering};

/// Mqueues that share a count: as many as have their head words on one cache line.
const GROUP: usize = 8;

/// Counts of one direction between two threads. One side rings, the other listens.
pub struct Doorbells<M: Memory = MappedMemory> {
    memory: M,
}

impl Doorbells {
    /// Doorbells for this many mqueues, in memory of their own.
    pub fn new(mqueues: usize) -> Self {
        Self::over(HeapMapping::memory(8 * mqueues.div_ceil(GROUP)))
    }
}

impl<M: Memory> Doorbells<M> {
    /// Doorbells in `memory`, a word for each group of mqueues.
    pub fn over(memory: M) -> Self {
        Self { memory }
    }

    fn count(&self, group: usize, order: Ordering) -> u64 {
        self.memory.load(8 * group as u64, order)
    }

    /// Signals that the mqueue at this position of the list was published to.
    #[inline]
    pub fn ring(&self, place: u32) {
        let group = place as usize / GROUP;
        let count = self.count(group, Ordering::Relaxed).wrapping_add(1);
        // EDGE DOORBELL (release half)
        self.memory.store(8 * group as u64, count, Ordering::Release);
    }
}

/// State of the listening side.
pub struct Listener {
    /// The mqueues in the order of their positions.
    mqueues: Box<[u32]>,
    heads: Box<[u64]>,
    counts: Box<[u64]>,
}

impl Listener {
    /// `head` returns the current head words.
    pub fn new(mqueues: &[u32], head: impl Fn(u32) -> u64) -> Self {
        Self {
            mqueues: mqueues.into(),
            heads: mqueues.iter().map(|&mqueue| head(mqueue)).collect(),
            counts: vec![0; mqueues.len().div_ceil(GROUP)].into_boxed_slice(),
        }
    }

    /// Appends the mqueues whose head has moved since the last call. `head` must load with acquire
    /// order: a head is remembered, so one that ran ahead of its message would lose it.
    #[inline]
    pub fn collect<M: Memory>(
        &mut self,
        bells: &Doorbells<M>,
        head: impl Fn(u32) -> u64,
        into: &mut Vec<u32>,
    ) {
        for (group, seen) in self.counts.iter_mut().enumerate() {
            // EDGE DOORBELL (acquire half)
            let count = bells.count(group, Ordering::Acquire);
            if std::mem::replace(seen, count) == count {
                continue;
            }
            let places = group * GROUP..((group + 1) * GROUP).min(self.mqueues.len());
            for (&mqueue, known) in self.mqueues[places.clone()].iter().zip(&mut self.heads[places])
            {
                let head = head(mqueue);
                if std::mem::replace(known, head) != head {
                    into.push(mqueue);
                }
            }
        }
    }

    /// Whether a count has changed since [`Self::collect`].
    pub fn rung<M: Memory>(&self, bells: &Doorbells<M>) -> bool {
        let moved = |(group, seen): (usize, &u64)| bells.count(group, Ordering::Acquire) != *seen;
        self.counts.iter().enumerate().any(moved)
    }
}

/// A word in private memory that shows whether a thread of this process sleeps.
pub struct ParkWord<M: Memory = MappedMemory> {
    memory: M,
}

impl Default for ParkWord {
    fn default() -> Self {
        Self::over(HeapMapping::memory(8))
    }
}

impl<M: Memory> ParkWord<M> {
    /// The first word of `memory`.
    pub fn over(memory: M) -> Self {
        Self { memory }
    }

    /// Announces that the owner is about to sleep (or no longer is). After that it must check for work
    /// once more before it sleeps: either it sees the last message, or the publisher sees the word.
    #[inline]
    pub fn set(&self, sleeps: bool) {
        set_sleeping(&self.memory, 0, sleeps);
    }

    /// Whether the owner sleeps. Call this after publishing, and wake it if so.
    #[inline]
    pub fn sleeps(&self) -> bool {
        sleeping(&self.memory, 0)
    }
}

/// The sleeper's half, for the word at `at`.
#[inline]
pub(crate) fn set_sleeping<M: Memory>(memory: &M, at: u64, sleeping: bool) {
    memory.store(at, sleeping.into(), Ordering::Relaxed);
    if sleeping {
        // EDGE PARK (sleeper half): this fence and the waker's are totally ordered: either the sleeper's
        // second check sees the message, or the waker sees the word.
        memory.fence();
    }
}

/// The waker's half, for the word at `at`.
#[inline]
pub(crate) fn sleeping<M: Memory>(memory: &M, at: u64) -> bool {
    // EDGE PARK (waker half): see set_sleeping().
    memory.fence();
    memory.load(at, Ordering::Relaxed) != 0
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::RefCell;

    #[test]
    fn only_mqueues_that_moved_are_collected_and_only_once() {
        let mqueues: Vec<u32> = (0..300).map(|i| 3 * i).collect();
        let bells = Doorbells::new(mqueues.len());
        let heads = RefCell::new(vec![7u64; 900]);
        let head = |mqueue: u32| heads.borrow()[mqueue as usize];
        let mut listener = Listener::new(&mqueues, head);
        let mut found = Vec::new();
        listener.collect(&bells, head, &mut found);
        assert!(found.is_empty() && !listener.rung(&bells));
        for place in [0, 7, 8, 255, 299] {
            heads.borrow_mut()[3 * place as usize] += 1;
            bells.ring(place);
        }
        assert!(listener.rung(&bells));
        listener.collect(&bells, head, &mut found);
        assert_eq!(found, [0, 21, 24, 765, 897]);
        found.clear();
        bells.ring(4);
        listener.collect(&bells, head, &mut found);
        assert!(found.is_empty() && !listener.rung(&bells));
    }
}
