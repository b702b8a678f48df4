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
//!    block has [others](BUNDLES_QUEUED) to work on while the replies travel.
//! 4. Kernels that are fast for the size of the burst: of n messages in bundles of k, with p the time of a kernel for one
//!    message, the last reply leaves about n·[`BUNDLE_NS`]/k + k·p later than with free bundles for free kernels; the best k is
//!    √(n·[`BUNDLE_NS`]/p). It is chosen if that and [`TRIP_NS`] are less than what bundles save, n·[`SAVED_NS`]. Slow kernels,
//!    and small bursts, never meet this.
//!
//! The longer of 3 and 4 is chosen. Where kernels have not been timed yet, only 3 counts. One message in flight, or a few for many
//! idle mqueues, are thus single messages; bursts for busy or fast blocks are bundles. The cost is that of a few divisions per burst.

use mqueue::abi::BUNDLE_MAX;

/// Messages of the shortest bundle, and of the shortest burst with bundles.
pub(crate) const SHORTEST: u32 = 4;
/// Messages of the longest bundle for blocks that work side by side: what a longer one saves is small.
const LONGEST: u32 = 32;
/// Bundles that each block has in its queue if all are busy.
const BUNDLES_QUEUED: u32 = 3;
/// What a message in a bundle saves the engine…
const SAVED_NS: u64 = 50;
/// … and what a bundle costs it.
const BUNDLE_NS: u64 = 200;
/// The second trip over a bus.
const TRIP_NS: u64 = 2_000;

/// What the choice depends on.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Burst {
    /// Messages that the receive call brought.
    pub(crate) messages: u32,
    /// Requests in flight on the worker's mqueues of the service.
    pub(crate) unanswered: u32,
    /// Mqueues that a message may go to.
    pub(crate) mqueues: u32,
    /// Blocks run on other processors than the worker's.
    pub(crate) off_thread: bool,
    /// Requests were last answered in the turn of their arrival.
    pub(crate) in_turn: bool,
    /// The time of a kernel for one message, or an upper bound, if known.
    pub(crate) pace_ns: Option<u64>,
}

impl Burst {
    /// Messages of the longest bundle of this burst; 0: all go as single messages.
    pub(crate) fn bundle_run(&self) -> u32 {
        if self.messages < SHORTEST {
            return 0;
        }
        if self.in_turn && !self.off_thread {
            return BUNDLE_MAX;
        }
        let run = self.busy_run().max(self.fast_run()).min(LONGEST);
        if run < SHORTEST { 0 } else { run }
    }

    fn busy_run(&self) -> u32 {
        let waiting = self.unanswered.saturating_add(self.messages);
        waiting / self.mqueues.saturating_mul(BUNDLES_QUEUED).max(1)
    }

    fn fast_run(&self) -> u32 {
        let Some(pace_ns) = self.pace_ns else { return 0 };
        let messages = u64::from(self.messages);
        let bundles_ns = messages * BUNDLE_NS;
        let best = (bundles_ns / pace_ns.max(1)).isqrt().clamp(1, LONGEST.into());
        let trip_ns = if self.off_thread { TRIP_NS } else { 0 };
        let cost_ns = best.saturating_mul(pace_ns).saturating_add(bundles_ns / best + trip_ns);
        if cost_ns < messages * SAVED_NS { best as u32 } else { 0 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Of mqueues beyond a bus.
    fn run(messages: u32, unanswered: u32, mqueues: u32, pace_ns: Option<u64>) -> u32 {
        let burst =
            Burst { messages, unanswered, mqueues, off_thread: true, in_turn: false, pace_ns };
        burst.bundle_run()
    }

    #[test]
    fn few_messages_for_idle_mqueues_are_single() {
        for pace_ns in [None, Some(100), Some(2_000), Some(300_000)] {
            for messages in [0, 1, 3, 8, 32] {
                assert_eq!(run(messages, 0, 240, pace_ns), 0, "{messages} {pace_ns:?}");
            }
        }
        // Also those that find others in flight.
        assert_eq!(run(1, 100_000, 1, Some(100)), 0);
        assert_eq!(run(64, 64, 240, Some(2_000)), 0);
    }

    #[test]
    fn a_slow_kernel_gets_bundles_where_every_block_is_busy() {
        // The kernel of LeNet: eight messages for idle blocks run side by side.
        for pace_ns in [25_000, 300_000] {
            assert_eq!(run(8, 0, 240, Some(pace_ns)), 0);
            assert_eq!(run(256, 0, 240, Some(pace_ns)), 0);
            assert_eq!(run(64, 240, 240, Some(pace_ns)), 0);
            // A third of what each has: no block waits for the next bundle.
            assert_eq!(run(64, 4032, 240, Some(pace_ns)), 5);
            assert_eq!(run(64, 4032, 28, Some(pace_ns)), LONGEST);
        }
        // The same without a time.
        assert_eq!(run(64, 4032, 240, None), 5);
        assert_eq!(run(64, 0, 1, None), 21);
    }

    #[test]
    fn a_fast_kernel_gets_bundles_from_a_burst_that_is_worth_it() {
        assert_eq!(run(64, 0, 240, Some(300)), 0);
        assert_eq!(run(256, 0, 240, Some(300)), 13);
        assert_eq!(run(256, 0, 240, Some(2_000)), 0);
        assert_eq!(run(1024, 0, 240, Some(2_000)), 10);
        assert_eq!(run(4096, 0, 240, Some(2_000)), 20);
        assert_eq!(run(4096, 0, 240, Some(10_000)), 9);
        assert_eq!(run(4096, 0, 240, Some(100)), LONGEST);
        assert_eq!(run(4096, 0, 240, Some(25_000)), 5, "and 4096 take the blocks 430 us");
        assert_eq!(run(4096, 0, 1 << 20, Some(300_000)), 0);
        // Bundles never get shorter for a faster kernel, or a larger burst.
        for messages in (8..4096).step_by(8) {
            for pace_ns in (0..50_000).step_by(500) {
                let runs =
                    [(messages, pace_ns + 500), (messages, pace_ns), (messages + 8, pace_ns)]
                        .map(|(messages, pace_ns)| run(messages, 0, 240, Some(pace_ns)));
                assert!(runs.is_sorted(), "{messages} {pace_ns} {runs:?}");
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
            pace_ns: None,
        };
        assert_eq!(burst.bundle_run(), BUNDLE_MAX);
        assert_eq!(Burst { messages: 3, ..burst }.bundle_run(), 0);
        // They ask backends, one request each at a time.
        let waits = Burst { in_turn: false, pace_ns: Some(80_000), ..burst };
        assert_eq!(waits.bundle_run(), 0);
        assert_eq!(Burst { off_thread: true, ..burst }.bundle_run(), 0);
    }
}
