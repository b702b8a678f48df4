//! Doorbells between a worker and an accelerator thread: which mqueues to look at.
//!
//! The head words of rings say what is new, but to look at all of 240 of them costs more than the hop
//! itself. So the side that publishes also counts up a word for the group of [`GROUP`] mqueues, and the
//! other side looks at heads of a group only when its count has moved. Counts stand densely: 240 mqueues
//! take four cache lines. Each word has one writer and is only loaded and stored.
//!
//! EDGE DOORBELL: heads published before [`Doorbells::ring`] are visible to a [`Listener`] that sees the
//! count (release store, acquire load).

use std::sync::atomic::{AtomicU64, Ordering};

/// Mqueues that share a count: as many as have their head words on one cache line.
const GROUP: usize = 8;
/// Counts on the two lines that processors fetch together.
const COUNTS: usize = 16;

#[repr(align(128))]
#[derive(Default)]
struct Lines([AtomicU64; COUNTS]);

/// Counts of one direction of a worker and a thread. One side rings, the other listens.
pub(super) struct Doorbells {
    lines: Box<[Lines]>,
}

impl Doorbells {
    pub(super) fn new(mqueues: usize) -> Self {
        let lines = mqueues.div_ceil(GROUP * COUNTS).max(1);
        Self { lines: (0..lines).map(|_| Lines::default()).collect() }
    }

    #[inline]
    fn count(&self, group: usize) -> &AtomicU64 {
        &self.lines[group / COUNTS].0[group % COUNTS]
    }

    /// The mqueue in this place of the list was published to.
    #[inline]
    pub(super) fn ring(&self, place: u32) {
        let count = self.count(place as usize / GROUP);
        // EDGE DOORBELL (release half)
        count.store(count.load(Ordering::Relaxed) + 1, Ordering::Release);
    }
}

/// What the listening side knows.
pub(super) struct Listener {
    /// The mqueues in the order of their places.
    mqueues: Box<[u32]>,
    heads: Box<[u64]>,
    counts: Box<[u64]>,
}

impl Listener {
    /// `head` tells the head words as they stand.
    pub(super) fn new(mqueues: &[u32], head: impl Fn(u32) -> u64) -> Self {
        Self {
            mqueues: mqueues.into(),
            heads: mqueues.iter().map(|&mqueue| head(mqueue)).collect(),
            counts: vec![0; mqueues.len().div_ceil(GROUP)].into_boxed_slice(),
        }
    }

    /// Appends the mqueues whose head has moved since the last call. `head` must load with acquire
    /// order: a head is remembered, so one that ran ahead of its message would lose it.
    #[inline]
    pub(super) fn collect(
        &mut self,
        bells: &Doorbells,
        head: impl Fn(u32) -> u64,
        into: &mut Vec<u32>,
    ) {
        for (group, seen) in self.counts.iter_mut().enumerate() {
            // EDGE DOORBELL (acquire half)
            let count = bells.count(group).load(Ordering::Acquire);
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

    /// Whether a count has moved since [`Self::collect`].
    pub(super) fn rung(&self, bells: &Doorbells) -> bool {
        let moved =
            |(group, seen): (usize, &u64)| bells.count(group).load(Ordering::Acquire) != *seen;
        self.counts.iter().enumerate().any(moved)
    }
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
