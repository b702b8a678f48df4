//! The engine's choice between bundles and single messages: [the rule](crate::service::bundle::run), and the measurement of what it needs.
//!
//! The time that one more message in a bundle takes is not known from the times of single messages: a block fetches and answers a bundle
//! as a whole, and a busy worker sees every reply at the end of a turn. It is measured by a *trial*: a burst is sent such that one
//! single message, then one bundle of [`TRIAL`] messages or more, reach idle mqueues. Both leave in the same turn, so what the worker adds
//! to their times is the same, and the difference is that of the other messages of the bundle, as far as it matters to the worker.
//! The estimate is the mean of the last [`SAMPLES`] trials without the shortest and the longest.
//!
//! Trials are rare: one in [`OFTEN_NS`] until there are enough and as long as bundles pay, and otherwise one in [`SELDOM_NS`], then in
//! twice that and so on up to [`SELDOM_MAX_NS`]; from [`SELDOM_NS`] again when bursts have doubled. So a slow kernel gets few bundles that
//! delay their messages, and one that becomes slow loses them after a few trials. A trial whose bundle is not answered in
//! [`PATIENCE_NS`] counts as slow. An estimate without new samples is valid for [`VALID_NS`].

use crate::service::bundle::run::{Burst, TRIP_NS};

/// Messages of the shortest burst with a trial.
const BURST: u32 = 32;
/// Messages of the shortest bundle of a trial.
const TRIAL: u32 = 16;
/// Trials that count, and how many are enough for an estimate.
const SAMPLES: usize = 5;
const ENOUGH: usize = 3;
/// Times between trials.
const OFTEN_NS: u64 = 1_000_000;
const SELDOM_NS: u64 = 10_000_000;
const SELDOM_MAX_NS: u64 = 1_000_000_000;
/// … and at least this many times as long as the bundle of the last one took.
const TIMES_BUNDLE: u64 = 32;
/// How long a trial waits for its bundle.
const PATIENCE_NS: u64 = 100_000_000;
/// How long an estimate is valid.
const VALID_NS: u64 = 3_000_000_000;
/// No mqueue.
const NONE: u32 = u32::MAX;

/// A trial.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    /// None is in progress.
    Idle,
    /// The next single message is the one of the trial.
    Single,
    /// The next bundle is.
    Bundle,
    /// Both have left.
    Sent,
}

/// See the module documentation.
#[derive(Debug)]
pub(crate) struct BundleChoice {
    stage: Stage,
    start_ns: u64,
    /// The mqueues of the trial, as long as they have not answered.
    single: u32,
    bundle: u32,
    /// Requests in front of each, and its own, that are not answered.
    single_left: u32,
    bundle_left: u32,
    /// Messages of the bundle.
    count: u32,
    /// How long they took.
    single_ns: Option<u64>,
    bundle_ns: Option<u64>,
    /// Messages of the longest bundle of the burst apart from the trial.
    run: u32,
    /// Blocks run on other processors than the worker's.
    off_thread: bool,
    samples: [u32; SAMPLES],
    /// Samples so far.
    taken: usize,
    sampled_ns: u64,
    interval_ns: u64,
    /// Messages of the largest burst with a trial.
    messages: u32,
}

impl BundleChoice {
    pub(crate) fn new() -> Self {
        Self {
            stage: Stage::Idle,
            start_ns: 0,
            single: NONE,
            bundle: NONE,
            single_left: 0,
            bundle_left: 0,
            count: 0,
            single_ns: None,
            bundle_ns: None,
            run: 0,
            off_thread: false,
            samples: [0; SAMPLES],
            taken: 0,
            sampled_ns: 0,
            interval_ns: 0,
            messages: 0,
        }
    }

    /// Chooses the length of the longest bundle of a burst, 0 if there is none, and returns whether a trial begins: then one
    /// message has to go as a single one first.
    pub(crate) fn begin(&mut self, burst: &Burst, now_ns: u64) -> (u32, bool) {
        let message_ns = self.message_ns(now_ns);
        self.run = burst.bundle_run(message_ns);
        if burst.messages < BURST || burst.is_answered_at_once() {
            return (self.run, false);
        }
        if burst.messages >= self.messages.saturating_mul(2) {
            self.interval_ns = self.interval_ns.min(SELDOM_NS);
        }
        if now_ns.saturating_sub(self.start_ns) < self.interval_ns {
            return (self.run, false);
        }
        if self.stage == Stage::Sent {
            if now_ns - self.start_ns < PATIENCE_NS {
                return (self.run, false);
            }
            if self.single_ns.is_some() {
                self.take_sample(u32::MAX, now_ns);
            }
        }
        self.interval_ns = match message_ns.map(|message_ns| burst.fast_run(message_ns)) {
            Some(0) if !mutants::on("try_bundles_always") => {
                (self.interval_ns * 2).clamp(SELDOM_NS, SELDOM_MAX_NS)
            }
            _ => OFTEN_NS,
        };
        (self.stage, self.start_ns) = (Stage::Single, now_ns);
        self.messages = self.messages.max(burst.messages);
        (self.single, self.bundle) = (NONE, NONE);
        (self.single_ns, self.bundle_ns) = (None, None);
        self.off_thread = burst.off_thread;
        (self.run.max(TRIAL), true)
    }

    /// A single message has been written that may be the one of a trial, to an mqueue that had `waiting` requests. Returns how long
    /// the bundles behind it are, if that changes.
    pub(crate) fn single_sent(&mut self, mqueue: u32, waiting: u32, now_ns: u64) -> Option<u32> {
        if self.stage != Stage::Single {
            return None;
        }
        if now_ns == self.start_ns {
            (self.stage, self.single, self.single_left) = (Stage::Bundle, mqueue, waiting + 1);
            return None;
        }
        self.stage = Stage::Idle;
        Some(self.run)
    }

    /// The same for a bundle of `count` messages.
    #[inline]
    pub(crate) fn bundle_sent(
        &mut self,
        (mqueue, count): (u32, u32),
        waiting: u32,
        now_ns: u64,
    ) -> Option<u32> {
        if self.stage != Stage::Bundle {
            return None;
        }
        // Behind at least as many others as the single message: a kernel never seems faster than it is.
        let is_behind = waiting + 1 >= self.single_left || mutants::on("flatter_bundles");
        let is_behind = is_behind && mqueue != self.single;
        if is_behind && count >= TRIAL && now_ns == self.start_ns {
            (self.stage, self.bundle) = (Stage::Sent, mqueue);
            (self.count, self.bundle_left) = (count, waiting + count);
        } else {
            (self.stage, self.single) = (Stage::Idle, NONE);
        }
        Some(self.run)
    }

    /// An mqueue has answered this many requests.
    #[inline]
    pub(crate) fn answered(&mut self, mqueue: u32, count: u64, now_ns: u64) {
        if mqueue == self.single || mqueue == self.bundle {
            self.trial_answered(mqueue, count, now_ns);
        }
    }

    #[cold]
    fn trial_answered(&mut self, mqueue: u32, count: u64, now_ns: u64) {
        let took_ns = now_ns.saturating_sub(self.start_ns);
        let count = count.try_into().unwrap_or(u32::MAX);
        if mqueue == self.single {
            self.single_left = self.single_left.saturating_sub(count);
            if self.single_left == 0 {
                (self.single, self.single_ns) = (NONE, Some(took_ns));
            }
        } else {
            self.bundle_left = self.bundle_left.saturating_sub(count);
            if self.bundle_left == 0 {
                (self.bundle, self.bundle_ns) = (NONE, Some(took_ns));
            }
        }
        if let (Some(single_ns), Some(bundle_ns)) = (self.single_ns, self.bundle_ns) {
            let trip_ns = if self.off_thread { TRIP_NS } else { 0 };
            let more_ns = bundle_ns.saturating_sub(single_ns + trip_ns);
            let sample_ns = more_ns / u64::from(self.count - 1);
            self.take_sample(sample_ns.try_into().unwrap_or(u32::MAX), now_ns);
            self.stage = Stage::Idle;
            self.interval_ns = self.interval_ns.max(bundle_ns.saturating_mul(TIMES_BUNDLE));
        }
    }

    fn take_sample(&mut self, sample_ns: u32, now_ns: u64) {
        self.samples[self.taken % SAMPLES] = sample_ns;
        // Only its remainder matters once all places are taken.
        self.taken = if self.taken + 1 == 2 * SAMPLES { SAMPLES } else { self.taken + 1 };
        self.sampled_ns = now_ns;
    }

    /// The time for one more message in a bundle, if known.
    fn message_ns(&mut self, now_ns: u64) -> Option<u64> {
        if now_ns.saturating_sub(self.sampled_ns) > VALID_NS {
            self.taken = 0;
        }
        let count = self.taken.min(SAMPLES);
        if count < ENOUGH {
            return None;
        }
        let samples = &self.samples[..count];
        let (mut sum, mut least, mut most) = (0, u64::MAX, 0);
        for sample in samples.iter().map(|sample| u64::from(*sample)) {
            (sum, least, most) = (sum + sample, least.min(sample), most.max(sample));
        }
        Some((sum - least - most) / (count as u64 - 2))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::service::bundle::run::HANDLED_NS;

    const BURST_OF_64: Burst = Burst {
        messages: 64,
        unanswered: 0,
        mqueues: 240,
        off_thread: true,
        in_turn: false,
        run: 16,
        handled_ns: HANDLED_NS,
    };

    /// A trial at `now_ns`, whose single message takes 5 us and whose bundle of 16 messages so much longer. Returns what was chosen for
    /// the others; `None`: there is no trial.
    fn try_once(choice: &mut BundleChoice, now_ns: u64, more_ns: u64) -> Option<u32> {
        let (first, is_trial) = choice.begin(&BURST_OF_64, now_ns);
        if !is_trial {
            return None;
        }
        assert_eq!(first, choice.run.max(TRIAL));
        assert_eq!(choice.single_sent(3, 0, now_ns), None);
        let run = choice.bundle_sent((4, 16), 0, now_ns);
        assert_eq!(choice.bundle_sent((5, 16), 0, now_ns), None);
        choice.answered(5, 16, now_ns + 1);
        choice.answered(3, 1, now_ns + 5_000);
        choice.answered(4, 15, now_ns + 6_000);
        choice.answered(4, 1, now_ns + 5_000 + TRIP_NS + more_ns);
        run
    }

    #[test]
    fn the_estimate_is_the_mean_without_the_shortest_and_the_longest() {
        let mut choice = BundleChoice::new();
        let mut now_ns = 1;
        for (sample_ns, estimate_ns) in [
            (400, None),
            (100, None),
            (200, Some(200)),
            (300, Some(250)),
            (9_000_000, Some(300)),
            // In place of the first.
            (0, Some(200)),
            (0, Some((200 + 300) / 3)),
        ] {
            // Trials that take long are followed by longer times without any.
            now_ns += 8_000 * MS;
            choice.sampled_ns = now_ns;
            assert!(try_once(&mut choice, now_ns, 15 * sample_ns).is_some(), "{choice:?}");
            assert_eq!(choice.message_ns(now_ns), estimate_ns, "{choice:?}");
        }
        assert!(choice.message_ns(choice.sampled_ns + VALID_NS).is_some());
        assert_eq!(choice.message_ns(choice.sampled_ns + VALID_NS + 1), None);
        assert_eq!(choice.message_ns(choice.sampled_ns), None, "it is forgotten");
    }

    const MS: u64 = 1_000_000;

    #[test]
    fn trials_get_rare_where_bundles_do_not_pay() {
        let trials = |more_ns| {
            let mut choice = BundleChoice::new();
            let times = (1..2_000).filter(|ms| try_once(&mut choice, ms * MS, more_ns).is_some());
            times.collect::<Vec<_>>()
        };
        let often = trials(0);
        assert_eq!(often, (1..2_000).collect::<Vec<_>>());
        let seldom = trials(15 * 25_000);
        assert!((8..20).contains(&seldom.len()), "{seldom:?}");
        let gaps: Vec<_> = seldom.windows(2).map(|pair| pair[1] - pair[0]).collect();
        assert!(gaps.is_sorted() && gaps.last() > Some(&300), "{gaps:?}");
        // A larger burst is worth a trial earlier.
        let mut choice = BundleChoice::new();
        (1..2_000).for_each(|ms| _ = try_once(&mut choice, ms * MS, 15 * 25_000));
        let larger = Burst { messages: 128, ..BURST_OF_64 };
        assert!(!choice.begin(&BURST_OF_64, 2_000 * MS).1 && choice.begin(&larger, 2_000 * MS).1);
    }

    #[test]
    fn no_trial_where_it_says_nothing() {
        let mut choice = BundleChoice::new();
        let few = Burst { messages: BURST - 1, ..BURST_OF_64 };
        let at_once = Burst { off_thread: false, in_turn: true, ..BURST_OF_64 };
        assert!(!choice.begin(&few, 1).1 && !choice.begin(&at_once, 1).1);
        type Spoil = fn(&mut BundleChoice, u64) -> Option<u32>;
        let spoiled: [(&str, Spoil); 5] = [
            ("the single message goes in another turn", |c, now_ns| {
                c.single_sent(3, 0, now_ns + 1)
            }),
            ("the bundle does", |c, now_ns| {
                c.single_sent(3, 0, now_ns);
                c.bundle_sent((4, 16), 0, now_ns + 1)
            }),
            ("the bundle is short", |c, now_ns| {
                c.single_sent(3, 0, now_ns);
                c.bundle_sent((4, 15), 0, now_ns)
            }),
            ("both go to one mqueue", |c, now_ns| {
                c.single_sent(3, 0, now_ns);
                c.bundle_sent((3, 16), 1, now_ns)
            }),
            ("the single message waits behind others", |c, now_ns| {
                c.single_sent(3, 5, now_ns);
                c.bundle_sent((4, 16), 4, now_ns)
            }),
        ];
        for (number, (what, spoil)) in (1..).zip(spoiled) {
            let now_ns = number * 20 * MS;
            assert!(choice.begin(&BURST_OF_64, now_ns).1, "{what}");
            assert_eq!(spoil(&mut choice, now_ns), Some(0), "{what}");
            (3..=4).for_each(|mqueue| choice.answered(mqueue, 99, now_ns + 9_000));
            assert_eq!((choice.stage, choice.taken), (Stage::Idle, 0), "{what}");
        }
    }

    #[test]
    fn a_bundle_that_is_not_answered_counts_as_slow() {
        let mut choice = BundleChoice::new();
        for (number, single) in [(1, true), (2, true), (3, false), (4, true)] {
            let now_ns = number * 2 * PATIENCE_NS;
            assert!(choice.begin(&BURST_OF_64, now_ns).1);
            choice.single_sent(3, 2, now_ns);
            assert_eq!(choice.bundle_sent((4, 16), 2, now_ns), Some(0));
            // Behind two others.
            choice.answered(3, 2 + u64::from(single), now_ns + 9_000);
            choice.answered(4, 17, now_ns + 9_000);
            assert!(!choice.begin(&BURST_OF_64, now_ns + PATIENCE_NS - 1).1);
        }
        assert_eq!(choice.taken, 2);
        assert!(choice.begin(&BURST_OF_64, 10 * PATIENCE_NS).1);
        assert_eq!(choice.message_ns(10 * PATIENCE_NS), Some(u32::MAX.into()));
    }
}
