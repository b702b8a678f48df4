//! Deadlines of blocks: an indexed binary heap with at most one entry per block.
//!
//! A block's entry is never later than the block's deadline, but may be earlier: a block that waits
//! again with a later deadline keeps its entry, and its real deadline is found
//! when the entry expires. So a wait costs nothing unless its deadline is the block's earliest, and
//! nothing is allocated after the start.

/// Not in the heap.
const OUT: u32 = u32::MAX;

pub(super) struct Timers {
    /// (time, block), a binary heap with the earliest first.
    heap: Vec<(u64, u32)>,
    /// Position of a block's entry in the heap.
    place: Box<[u32]>,
}

impl Timers {
    /// For blocks in [0, `blocks`).
    pub(super) fn new(blocks: usize) -> Self {
        Self { heap: Vec::with_capacity(blocks), place: vec![OUT; blocks].into_boxed_slice() }
    }

    /// Ensures that the block's entry expires at `time` at the latest.
    #[inline]
    pub(super) fn arm(&mut self, block: u32, time: u64) {
        match self.place[block as usize] {
            OUT => {
                self.heap.push((time, block));
                self.sift_up(self.heap.len() - 1);
            }
            at if self.heap[at as usize].0 > time => {
                self.heap[at as usize].0 = time;
                self.sift_up(at as usize);
            }
            _ => {}
        }
    }

    /// The earliest entry's time.
    #[inline]
    pub(super) fn earliest(&self) -> Option<u64> {
        self.heap.first().map(|(time, _)| *time)
    }

    /// Removes a block whose entry is not later than `now`.
    #[inline]
    pub(super) fn expired(&mut self, now: u64) -> Option<u32> {
        let &(time, block) = self.heap.first()?;
        if time > now {
            return None;
        }
        self.place[block as usize] = OUT;
        let last = self.heap.pop().expect("not empty");
        if !self.heap.is_empty() {
            self.heap[0] = last;
            self.sift_down();
        }
        Some(block)
    }

    fn sift_up(&mut self, mut at: usize) {
        let entry = self.heap[at];
        while at > 0 {
            let parent = (at - 1) / 2;
            if self.heap[parent].0 <= entry.0 {
                break;
            }
            self.put(at, self.heap[parent]);
            at = parent;
        }
        self.put(at, entry);
    }

    fn sift_down(&mut self) {
        let entry = self.heap[0];
        let mut at = 0;
        loop {
            let mut child = 2 * at + 1;
            if child >= self.heap.len() {
                break;
            }
            if child + 1 < self.heap.len() && self.heap[child + 1].0 < self.heap[child].0 {
                child += 1;
            }
            if entry.0 <= self.heap[child].0 {
                break;
            }
            self.put(at, self.heap[child]);
            at = child;
        }
        self.put(at, entry);
    }

    #[inline]
    fn put(&mut self, at: usize, entry: (u64, u32)) {
        self.heap[at] = entry;
        self.place[entry.1 as usize] = at as u32;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_come_up_in_order_of_their_earliest_time() {
        let mut timers = Timers::new(200);
        let mut earliest = [u64::MAX; 200];
        let mut random = 1u64;
        for _ in 0..1000 {
            random = random.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            let (block, time) = ((random >> 33) % 200, (random >> 40) % 10_000);
            timers.arm(block as u32, time);
            let known = &mut earliest[block as usize];
            *known = time.min(*known);
        }
        assert_eq!(timers.earliest(), earliest.iter().min().copied());
        for now in 0..10_000 {
            while let Some(block) = timers.expired(now) {
                assert_eq!(std::mem::replace(&mut earliest[block as usize], u64::MAX), now);
            }
        }
        assert_eq!(timers.earliest(), None);
        assert!(earliest.iter().all(|&time| time == u64::MAX));
    }

    #[test]
    fn a_later_deadline_leaves_the_entry() {
        let mut timers = Timers::new(1);
        timers.arm(0, 5);
        timers.arm(0, 9);
        assert_eq!((timers.earliest(), timers.expired(4)), (Some(5), None));
        assert_eq!((timers.expired(5), timers.expired(9)), (Some(0), None));
    }
}
