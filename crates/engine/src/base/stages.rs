//! Stages of a request's latency: four stages, measured on a sample of messages.
//!
//! | stage | from | to |
//! |---|---|---|
//! | receive | start of the turn that received it | it is published in the RX ring |
//! | queue | published | the accelerator took it: its slot is released |
//! | accelerator | taken | its reply is seen in the TX ring |
//! | send | seen | taken by the host kernel, or by the hand-over ring to its connection's worker |
//!
//! A time stamp on every message would cost more than most messages do. So a few are *sampled*: at most one of an
//! mqueue and `SAMPLED_MAX` of a service share at a time, chosen by count with random gaps, because the first message
//! of a batch waits less than the others. The gaps adapt so that about one message in `SAMPLE_INTERVAL_NS` is
//! sampled: all of them in a quiet service, one in hundreds in a busy one. Other messages cost a decrement.
//!
//! The engine is not notified of the release of a slot: while a message is sampled, it checks the slot before and
//! after it drives the blocks. A release happens between two checks and counts as the earlier one, so that
//! computation of a block inside the turn is the accelerator's time. Messages that end without a reply (dropped,
//! timed out, consumed) are in no histogram; in a service without replies a message ends with its release and has the
//! first two stages only. For each sampled message the stages add up to the total exactly.

use mqueue::count::Counter;

/// Upper bounds of the buckets in nanoseconds: 1-2-5 from 1 us to 10 s, and two below. One more bucket has no bound.
pub const BOUNDS_NS: [u64; 24] = [
    250,
    500,
    1_000,
    2_000,
    5_000,
    10_000,
    20_000,
    50_000,
    100_000,
    200_000,
    500_000,
    1_000_000,
    2_000_000,
    5_000_000,
    10_000_000,
    20_000_000,
    50_000_000,
    100_000_000,
    200_000_000,
    500_000_000,
    1_000_000_000,
    2_000_000_000,
    5_000_000_000,
    10_000_000_000,
];

/// A stage of a request. See the module documentation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// From the network into the RX ring.
    Receive,
    /// In the RX ring.
    Queue,
    /// In the accelerator.
    Accelerator,
    /// From the TX ring to the network.
    Send,
}

impl Stage {
    /// Every stage, in the order in which a request passes them.
    pub const ALL: [Self; 4] = [Self::Receive, Self::Queue, Self::Accelerator, Self::Send];

    /// Its name in metrics.
    pub fn name(self) -> &'static str {
        match self {
            Self::Receive => "receive",
            Self::Queue => "queue",
            Self::Accelerator => "accelerator",
            Self::Send => "send",
        }
    }
}

/// A single-writer histogram of durations.
#[derive(Debug, Default)]
pub(crate) struct Histogram {
    counts: [Counter; BOUNDS_NS.len() + 1],
    sum_ns: Counter,
}

impl Histogram {
    pub(crate) fn record(&self, ns: u64) {
        self.counts[BOUNDS_NS.partition_point(|bound| *bound < ns)].one();
        self.sum_ns.add(ns);
    }
}

/// The content of a histogram at one time.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HistogramSnapshot {
    /// Durations by bucket: not more than the bound of the same index in [`BOUNDS_NS`] and more than
    /// the one before; the last bucket has no bound.
    pub counts: [u64; BOUNDS_NS.len() + 1],
    /// Sum of all durations in nanoseconds.
    pub sum_ns: u64,
}

impl HistogramSnapshot {
    /// Number of recorded durations.
    pub fn count(&self) -> u64 {
        self.counts.iter().sum()
    }

    fn add(&mut self, histogram: &Histogram) {
        for (sum, counter) in self.counts.iter_mut().zip(&histogram.counts) {
            *sum += counter.value();
        }
        self.sum_ns += histogram.sum_ns.value();
    }
}

/// What one worker observes of one service besides its counters.
#[derive(Debug, Default)]
#[repr(align(128))]
pub struct Observations {
    pub(crate) stages: [Histogram; Stage::ALL.len()],
    pub(crate) total: Histogram,
    /// Its mqueues, the requests in flight on all of them, and on the one that has most; updated by housekeeping
    /// (gauges).
    pub(crate) mqueues: Counter,
    pub(crate) depth: Counter,
    pub(crate) depth_max: Counter,
    /// 1 while the service is paused (gauge).
    pub(crate) paused: Counter,
}

/// The same, summed over workers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ObservationSnapshot {
    /// By [`Stage`].
    pub stages: [HistogramSnapshot; Stage::ALL.len()],
    /// The total.
    pub total: HistogramSnapshot,
    /// Mqueues of the service.
    pub mqueues: u64,
    /// Requests in flight on them at the last update.
    pub depth: u64,
    /// Requests in flight on the one that had most.
    pub depth_max: u64,
    /// Workers on which the service is paused.
    pub paused: u64,
}

impl ObservationSnapshot {
    /// Adds one worker's observations.
    pub(crate) fn add(&mut self, observed: &Observations) {
        for (sum, histogram) in self.stages.iter_mut().zip(&observed.stages) {
            sum.add(histogram);
        }
        self.total.add(&observed.total);
        self.mqueues += observed.mqueues.value();
        self.depth += observed.depth.value();
        self.depth_max = self.depth_max.max(observed.depth_max.value());
        self.paused += observed.paused.value();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_hold_durations_up_to_their_bounds() {
        let histogram = Histogram::default();
        for ns in [0, 250, 251, 1_000, 10_000_000_000, 10_000_000_001, u64::MAX / 4] {
            histogram.record(ns);
        }
        let mut snapshot = HistogramSnapshot::default();
        snapshot.add(&histogram);
        let at = |bound| snapshot.counts[BOUNDS_NS.iter().position(|b| *b == bound).unwrap()];
        assert_eq!((at(250), at(500), at(1_000), at(10_000_000_000)), (2, 1, 1, 1));
        assert_eq!((snapshot.counts[BOUNDS_NS.len()], snapshot.count()), (2, 7));
        assert!(BOUNDS_NS.is_sorted());
    }
}
