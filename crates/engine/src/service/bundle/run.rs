//! How many messages travel in one bundle where the engine chooses, for each burst: the messages that one receive call brought.
//!
//! A bundle saves time of the engine: messages share one choice of an mqueue, one slot and one completion. It can cost time on
//! the way: its first reply waits for its last, its block works while others may have nothing to do, and a block beyond a bus fetches it in
//! two trips instead of one. So:
//!
//! 1. Fewer than [`SHORTEST`] messages, or bundles that would be shorter: single messages, in slots of the ring.
//! 2. Blocks on the worker's own thread that answer in the turn of the arrival: they do not work side by side, and every reply
//!    leaves at the end of the turn. Bundles are as long as they can be.
//! 3. Blocks that are all busy: each would get its even share of what is unanswered anyway. A bundle is part of that share, so that its
//!    block has [others](BUNDLES_QUEUED) to work on while the replies travel. Mqueues that stand still count neither as busy nor as idle.
//! 4. Kernels that are fast for the size of the burst: of n messages in bundles of k, with p the time that one more message in a
//!    bundle takes ([measured](crate::service::bundle::choice)), the last reply leaves about n·[`BUNDLE_NS`]/k + k·p later than with
//!    free bundles for free kernels; the best k is √(n·[`BUNDLE_NS`]/p). It is chosen if that and [`TRIP_NS`] are less than what
//!    bundles save, n·[`SAVED_NS`] or n·[`SAVED_FAR_NS`]. If that is several bundles for each mqueue, they are longer, and one for each.
//!    Slow kernels, and small bursts, never meet this.
//! 5. An engine that has other work until a bundle is answered: k·p and its trips may take half as long again as the engine needs for
//!    the unanswered messages, at most as many as the burst has. What a message takes it is [measured](Handled).
//! 6. Messages that would go to one mqueue as a run of single ones, as far as k·p is below [`RUN_NS`].
//!
//! 5 and 6 hold for blocks off the worker's thread. The longest of 3 to 6 is chosen, rounded to a power of two: batches of clients often
//! have such a number of messages, and then no short bundle is left. Until p is measured, only 3 counts. One message in flight, or a few
//! for many idle mqueues, are thus single messages; bursts for busy or fast blocks are bundles. The cost is that of a few divisions per
//! burst. `tests.rs` compares the choice with bundles and single messages alone, in a model.

use mqueue::abi::BUNDLE_MAX;

/// Messages of the shortest bundle, and of the shortest burst with bundles.
pub(crate) const SHORTEST: u32 = 4;
/// Messages of the longest bundle for blocks that work side by side: what a longer one saves is small.
const LONGEST: u32 = 32;
/// Bundles that each block has in its queue if all are busy.
const BUNDLES_QUEUED: u32 = 3;
/// What a message in a bundle saves the engine…
const SAVED_NS: u64 = 50;
/// … if another processor reads and writes the slots of single messages, …
const SAVED_FAR_NS: u64 = 150;
/// … and what a bundle costs it.
const BUNDLE_NS: u64 = 200;
/// The second trip over a bus.
pub(in crate::service) const TRIP_NS: u64 = 2_000;
/// A run of single messages that becomes a bundle takes no longer than this.
const RUN_NS: u64 = 50_000;
/// The time that the engine takes for a message, until it is measured, and the longest that counts: a worker that takes longer also waits
/// for messages.
pub(in crate::service) const HANDLED_NS: u64 = 200;
const HANDLED_NS_MAX: u64 = 1_000;

/// What the choice depends on.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Burst {
    /// Messages that the receive call brought.
    pub(crate) messages: u32,
    /// Requests in flight on the worker's mqueues of the service that do not stand still.
    pub(crate) unanswered: u32,
    /// Mqueues that a message may go to, of those that do not stand still.
    pub(crate) mqueues: u32,
    /// Blocks run on other processors than the worker's.
    pub(crate) off_thread: bool,
    /// Requests were last answered in the turn of their arrival.
    pub(crate) in_turn: bool,
    /// Consecutive single messages that would go to one mqueue.
    pub(crate) run: u32,
    /// The time that the engine takes for a message, request and reply.
    pub(crate) handled_ns: u64,
}

/// The time that a busy engine takes for a message, all of its work included: from a burst to that of a later turn, divided by the messages
/// of the first.
pub(in crate::service) struct Handled {
    began_ns: u64,
    messages: u32,
    each_ns: u64,
}

impl Handled {
    pub(in crate::service) fn new() -> Self {
        Self { began_ns: 0, messages: 0, each_ns: HANDLED_NS }
    }

    /// A burst of this many messages begins. Returns the mean of the times.
    pub(in crate::service) fn begin(&mut self, messages: u32, now_ns: u64) -> u64 {
        let passed_ns = now_ns.saturating_sub(self.began_ns);
        if passed_ns > 0 {
            let sample_ns = passed_ns / u64::from(self.messages.max(1));
            if sample_ns <= HANDLED_NS_MAX {
                self.each_ns = (7 * self.each_ns + sample_ns) / 8;
            }
            (self.began_ns, self.messages) = (now_ns, 0);
        }
        self.messages = self.messages.saturating_add(messages);
        self.each_ns
    }
}

impl Burst {
    /// Whether blocks answer before the engine does anything else.
    pub(in crate::service) fn is_answered_at_once(&self) -> bool {
        self.in_turn && !self.off_thread
    }

    /// Messages of the longest bundle of this burst, with the time for one more message in a bundle, if known; 0: all go as single
    /// messages.
    pub(crate) fn bundle_run(&self, message_ns: Option<u64>) -> u32 {
        if self.messages < SHORTEST {
            return 0;
        }
        if self.is_answered_at_once() {
            return BUNDLE_MAX;
        }
        let fast = message_ns.map_or(0, |message_ns| self.fast_run(message_ns));
        fast.max(floor_length(self.busy_run().into()))
    }

    fn busy_run(&self) -> u32 {
        let waiting = self.unanswered.saturating_add(self.messages);
        waiting / self.mqueues.saturating_mul(BUNDLES_QUEUED).max(1)
    }

    /// The same, for the speed of the kernel alone.
    pub(in crate::service) fn fast_run(&self, message_ns: u64) -> u32 {
        let (saved_ns, trip_ns) = match self.off_thread {
            true => (SAVED_FAR_NS, TRIP_NS),
            false => (SAVED_NS, 0),
        };
        let (message_ns, messages) = (message_ns.max(1), u64::from(self.messages));
        let bundles_ns = messages * BUNDLE_NS;
        // To the nearest power of two, in terms of the square.
        let square = bundles_ns / message_ns;
        let best = floor_length((2 * square).isqrt()).max(SHORTEST);
        let cost_ns = u64::from(best).saturating_mul(message_ns);
        let cost_ns = cost_ns.saturating_add(bundles_ns / u64::from(best) + trip_ns);
        let each = self.messages.div_ceil(self.mqueues.max(1));
        let best = match cost_ns < messages * saved_ns {
            true => best.max(floor_length(each.into())),
            false => 0,
        };
        if !self.off_thread {
            return best;
        }
        let others_ns = u64::from(self.unanswered.min(self.messages)) * self.handled_ns * 3 / 2;
        let hidden = floor_length(others_ns.saturating_sub(2 * trip_ns) / message_ns);
        let runs = floor_length(u64::from(self.run).min(RUN_NS / message_ns));
        best.max(hidden).max(runs)
    }
}

/// The longest bundle of at most `run` messages.
fn floor_length(run: u64) -> u32 {
    let run = run.min(LONGEST.into()) as u32;
    if run < SHORTEST { 0 } else { 1 << run.ilog2() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_busy_engine_is_timed_by_its_bursts() {
        let mut handled = Handled::new();
        assert_eq!(handled.begin(100, 5_000_000), HANDLED_NS);
        // Two bursts in each turn.
        for turn in 1..100 {
            handled.begin(60, 5_000_000 + turn * 35_000);
            handled.begin(40, 5_000_000 + turn * 35_000);
        }
        let busy_ns = handled.begin(60, 5_000_000 + 100 * 35_000);
        assert!((340..=350).contains(&busy_ns), "{busy_ns}");
        // An idle one is not.
        for turn in 1..100 {
            assert_eq!(handled.begin(8, 10_000_000 + turn * 50_000), busy_ns);
        }
    }

    /// Of mqueues beyond a bus, where single messages do not go in runs.
    fn run(messages: u32, unanswered: u32, mqueues: u32, message_ns: Option<u64>) -> u32 {
        let (off_thread, in_turn, run) = (true, false, 1);
        let handled_ns = HANDLED_NS;
        let burst = Burst { messages, unanswered, mqueues, off_thread, in_turn, run, handled_ns };
        burst.bundle_run(message_ns)
    }

    #[test]
    fn few_messages_for_idle_mqueues_are_single() {
        for message_ns in [None, Some(0), Some(100), Some(2_000), Some(300_000)] {
            for messages in [0, 1, 3, 8, 12] {
                assert_eq!(run(messages, 0, 240, message_ns), 0, "{messages} {message_ns:?}");
            }
        }
        // Also those that find others in flight.
        assert_eq!(run(1, 100_000, 1, Some(100)), 0);
        assert_eq!(run(16, 64, 240, Some(2_000)), 0);
    }

    #[test]
    fn a_slow_kernel_gets_bundles_where_every_block_is_busy() {
        // The kernel of LeNet: eight messages for idle blocks run side by side.
        for message_ns in [25_000, 300_000] {
            assert_eq!(run(8, 0, 240, Some(message_ns)), 0);
            assert_eq!(run(256, 0, 240, Some(message_ns)), 0);
            assert_eq!(run(64, 240, 240, Some(message_ns)), 0);
            // A third of what each has: no block waits for the next bundle.
            assert_eq!(run(64, 4032, 240, Some(message_ns)), 4);
            assert_eq!(run(64, 4032, 28, Some(message_ns)), LONGEST);
        }
        // The same without a time.
        assert_eq!(run(64, 4032, 240, None), 4);
        assert_eq!(run(64, 0, 1, None), 16);
    }

    #[test]
    fn a_fast_kernel_gets_bundles_from_a_burst_that_is_worth_it() {
        assert_eq!(run(16, 0, 240, Some(330)), 0);
        assert_eq!(run(64, 0, 240, Some(330)), 8);
        assert_eq!(run(256, 0, 240, Some(330)), 16);
        assert_eq!(run(4096, 0, 240, Some(330)), LONGEST);
        assert_eq!(run(64, 0, 240, Some(2_000)), 0);
        assert_eq!(run(256, 0, 240, Some(2_000)), 4);
        assert_eq!(run(4096, 0, 240, Some(25_000)), 16, "one for each");
        assert_eq!(run(4096, 0, 1 << 20, Some(300_000)), 0);
        // More than one for each mqueue are longer ones.
        assert_eq!(run(64, 0, 4, Some(1_000)), 16);
        // The engine has other work.
        assert_eq!(run(64, 4032, 240, Some(330)), 32);
        assert_eq!(run(1024, 1024, 240, Some(10_000)), 16);
        // What would be a run of single messages, as far as it does not take long.
        let burst = Burst {
            messages: 64,
            unanswered: 0,
            mqueues: 240,
            off_thread: true,
            in_turn: false,
            run: 16,
            handled_ns: HANDLED_NS,
        };
        let runs = [1_000, 3_000, 6_000, 12_000, 13_000].map(|ns| burst.bundle_run(Some(ns)));
        assert_eq!(runs, [16, 16, 8, 4, 0]);
        // Bundles never get shorter for a faster kernel, or a larger burst.
        for messages in (8..4096).step_by(8) {
            for message_ns in (0..50_000).step_by(500) {
                let longer = [
                    (messages, message_ns + 500),
                    (messages, message_ns),
                    (messages + 8, message_ns),
                ]
                .map(|(messages, message_ns)| run(messages, 0, 240, Some(message_ns)));
                assert!(longer.is_sorted(), "{messages} {message_ns} {longer:?}");
            }
        }
        assert_eq!(run(u32::MAX, u32::MAX, u32::MAX, Some(u64::MAX)), 0);
    }

    #[test]
    fn blocks_on_the_own_thread_get_all_they_can_answer_in_the_turn() {
        let burst = Burst {
            messages: 8,
            unanswered: 0,
            mqueues: 28,
            off_thread: false,
            in_turn: true,
            run: 1,
            handled_ns: HANDLED_NS,
        };
        assert_eq!(burst.bundle_run(None), BUNDLE_MAX);
        assert_eq!(Burst { messages: 3, ..burst }.bundle_run(None), 0);
        // They ask backends, one request each at a time.
        let waits = Burst { in_turn: false, ..burst };
        assert_eq!(waits.bundle_run(Some(80_000)), 0);
        assert_eq!(Burst { off_thread: true, ..burst }.bundle_run(None), 0);
    }
}
