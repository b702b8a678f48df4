//! Detects a thread that is stuck in a block.

/// A watcher's state about a thread.
///
/// Silence is added up in steps of limited length, so that a watcher that was stopped itself (a debugger, a
/// suspended machine) does not count its own absence as the thread's.
#[derive(Default)]
pub(crate) struct Watch {
    /// Time of the next check.
    next: u64,
    last: u64,
    progress: u64,
    silent_ns: u64,
}

impl Watch {
    /// Whether a check is due; earlier ones do no harm.
    #[inline]
    pub(crate) fn is_due(&self, now_ns: u64) -> bool {
        now_ns >= self.next
    }

    /// Checks whether the thread hangs: it is inside its blocks (`busy`) and its number of resumes
    /// (`progress`) did not change for `hung_after_ns`.
    #[cold]
    pub(crate) fn look(
        &mut self,
        now_ns: u64,
        hung_after_ns: u64,
        busy: bool,
        progress: u64,
    ) -> bool {
        let interval = hung_after_ns / 8;
        if !busy || progress != self.progress {
            self.silent_ns = 0;
        } else {
            self.silent_ns += (now_ns - self.last.min(now_ns)).min(2 * interval);
        }
        self.progress = progress;
        self.last = now_ns;
        self.next = now_ns + interval;
        self.silent_ns >= hung_after_ns
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_silence_inside_blocks_counts() {
        let mut watch = Watch::default();
        // Busy without end, but every check finds progress.
        assert!((1..100).all(|n| !watch.look(n * 10, 80, true, n)));
        // Not inside its blocks, however long.
        assert!((100..200).all(|n| !watch.look(n * 10, 80, false, 100)));
        // One long absence of the watcher does not count.
        assert!(!watch.look(1_000_000, 80, true, 100));
        assert!(!watch.look(1_000_040, 80, true, 100));
        assert!(!watch.look(1_000_060, 80, true, 100));
        assert!(!watch.look(1_000_079, 80, true, 100));
        assert!(watch.look(1_000_080, 80, true, 100));
    }
}
