//! What a worker does that finds nothing to do: it looks again, offers its core, or sleeps.

use crate::topology::Polling;

/// How long an adaptive worker looks for work before it sleeps: about what two wake-ups cost, so that
/// spinning never costs a waiting neighbour on the same core more than sleeping would cost the client.
const SPIN_NS: u64 = 50_000;
/// How long it looks before it offers its core to others between two looks.
const YIELD_NS: u64 = 8_000;
/// A worker that gets its core back later than this has a busy neighbour on it.
const NEIGHBOUR_NS: u64 = 50_000;
/// For how long a busy neighbour is remembered.
const NEIGHBOUR_MEMORY_NS: u64 = 100_000_000;

/// See the module's text.
pub(crate) struct Idle {
    polling: Polling,
    /// It went to sleep after the last turn.
    slept: bool,
    /// When the last turn began that found something to do.
    since_ns: u64,
    neighbour_until_ns: u64,
}

impl Idle {
    /// Longest sleep.
    pub(crate) const SLEEP_NS_MAX: u64 = 100_000_000;

    pub(crate) fn new(polling: Polling) -> Self {
        Self { polling, slept: false, since_ns: 0, neighbour_until_ns: 0 }
    }

    pub(crate) fn set_polling(&mut self, polling: Polling) {
        self.polling = polling;
    }

    /// A turn found something to do.
    #[inline]
    pub(crate) fn has_worked(&mut self, now_ns: u64) {
        self.since_ns = now_ns;
    }

    pub(crate) fn falls_asleep(&mut self) {
        self.slept = true;
    }

    /// A turn begins: whether the worker slept before it.
    #[inline]
    pub(crate) fn wakes_up(&mut self) -> bool {
        std::mem::take(&mut self.slept)
    }

    /// Whether the worker may sleep; `worked` says whether its last turn found something to do.
    pub(crate) fn may_sleep(&self, now_ns: u64, worked: bool) -> bool {
        match self.polling {
            Polling::Spin => false,
            Polling::Block => !worked,
            Polling::Adaptive => {
                let spun = now_ns.saturating_sub(self.since_ns) > SPIN_NS;
                !worked && (spun || now_ns < self.neighbour_until_ns)
            }
        }
    }

    pub(crate) fn should_yield(&self, now_ns: u64, worked: bool) -> bool {
        self.polling != Polling::Spin && !worked && now_ns.saturating_sub(self.since_ns) > YIELD_NS
    }

    /// With a busy neighbour on the core a sleeping worker is served sooner than a spinning one: the host kernel lets a
    /// thread that is woken go first, and makes one that spins wait for its slice. For a while the worker sleeps as
    /// soon as it has nothing to do.
    pub(crate) fn offered_core(&mut self, from_ns: u64, until_ns: u64) {
        if until_ns.saturating_sub(from_ns) > NEIGHBOUR_NS {
            self.neighbour_until_ns = until_ns + NEIGHBOUR_MEMORY_NS;
        }
    }
}
