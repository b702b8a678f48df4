//! What a worker does when a turn finds no work: spin, yield its core, or sleep.

use crate::base::topology::Polling;

/// How long an adaptive worker spins before it sleeps: about the cost of two wake-ups, so that spinning never costs
/// another thread on the same core more than sleeping would cost the client.
const SPIN_NS: u64 = 50_000;
/// How long it spins before it yields its core between two turns.
const YIELD_NS: u64 = 8_000;
/// A worker that gets its core back later than this shares it with another busy thread.
const CONTENDED_NS: u64 = 50_000;
/// How long a contended core is assumed to stay contended.
const CONTENDED_MEMORY_NS: u64 = 100_000_000;

/// See the module documentation.
pub(crate) struct Idle {
    polling: Polling,
    /// The worker slept after the last turn.
    slept: bool,
    /// Start of the last turn that found work.
    since_ns: u64,
    contended_until_ns: u64,
}

impl Idle {
    /// Longest sleep.
    pub(crate) const SLEEP_NS_MAX: u64 = 100_000_000;

    pub(crate) fn new(polling: Polling) -> Self {
        Self { polling, slept: false, since_ns: 0, contended_until_ns: 0 }
    }

    pub(crate) fn set_polling(&mut self, polling: Polling) {
        self.polling = polling;
    }

    /// A turn found work.
    #[inline]
    pub(crate) fn set_worked(&mut self, now_ns: u64) {
        self.since_ns = now_ns;
    }

    pub(crate) fn set_slept(&mut self) {
        self.slept = true;
    }

    /// A turn starts: returns whether the worker slept before it.
    #[inline]
    pub(crate) fn take_slept(&mut self) -> bool {
        std::mem::take(&mut self.slept)
    }

    /// Whether the worker may sleep; `worked` says whether its last turn found work.
    pub(crate) fn may_sleep(&self, now_ns: u64, worked: bool) -> bool {
        match self.polling {
            Polling::Spin => false,
            Polling::Block => !worked,
            Polling::Adaptive => {
                let spun = now_ns.saturating_sub(self.since_ns) > SPIN_NS;
                !worked && (spun || now_ns < self.contended_until_ns)
            }
        }
    }

    pub(crate) fn should_yield(&self, now_ns: u64, worked: bool) -> bool {
        self.polling != Polling::Spin && !worked && now_ns.saturating_sub(self.since_ns) > YIELD_NS
    }

    /// On a contended core a sleeping worker is scheduled sooner than a spinning one: the host kernel prefers a
    /// thread that has just been woken, and lets a spinning one wait for its time slice. So for a while the worker
    /// sleeps as soon as it has no work.
    pub(crate) fn yielded_core(&mut self, from_ns: u64, until_ns: u64) {
        if until_ns.saturating_sub(from_ns) > CONTENDED_NS {
            self.contended_until_ns = until_ns + CONTENDED_MEMORY_NS;
        }
    }
}
