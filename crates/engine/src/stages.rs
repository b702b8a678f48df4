//! Where the time of a request goes: four stages, measured on a sample of messages.
//!
//! | stage | from | to |
//! |---|---|---|
//! | receive | the turn that received it began | it is published in the RX ring |
//! | queue | published | the accelerator took it: its slot is released |
//! | accelerator | taken | its reply is seen in the TX ring |
//! | send | seen | the host kernel took it, or the hand-over ring to its connection's worker |
//!
//! A stamp on every message would cost more than most messages do. So a few are *sampled*: at most one
//! of an mqueue and `FOLLOWED_MAX` of a service share at a time, chosen by count with random gaps, because the
//! first message of a batch waits less than the others. The gaps adapt so that about one message in
//! `FOLLOW_NS` is sampled: all of them in a quiet service, one in hundreds in a busy one. Other
//! messages pay for a count-down.
//!
//! Nobody tells the engine when a slot is released: it looks before and after it drives the blocks,
//! while somebody is sampled. A release lies between two looks and counts as the earlier one, so that
//! what a block computes inside the turn is the accelerator's time. Messages that end without a reply
//! (dropped, timed out, consumed) are in no histogram; in a service without replies a message ends
//! with its release and has the first two stages only. For each sampled message the stages add up
//! to the total exactly.

use std::sync::Arc;

use wire::session::{Origin, Token};

use crate::metrics::Counter;
use crate::service::share::ServiceShare;
use crate::topology::Replies;

/// Messages of a service share that are sampled at the same time.
const FOLLOWED_MAX: usize = 8;
/// Time between two messages that begin to be sampled, roughly, in a busy service share.
const FOLLOW_NS: u64 = 50_000;
/// Longest mean gap between two sampled messages.
const GAP_MAX: u32 = 1 << 16;

/// Upper bounds of the buckets in nanoseconds: 1-2-5 from 1 us to 10 s, and two below. One more bucket
/// holds what took longer.
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

/// Part of a request's way. See the module's text.
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
    /// Every stage, in the order of a request's way.
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
struct Histogram {
    counts: [Counter; BOUNDS_NS.len() + 1],
    sum_ns: Counter,
}

impl Histogram {
    fn record(&self, ns: u64) {
        self.counts[BOUNDS_NS.partition_point(|bound| *bound < ns)].one();
        self.sum_ns.add(ns);
    }
}

/// What a histogram held when it was looked at.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HistogramSnapshot {
    /// Durations by bucket: not more than the bound of the same index in [`BOUNDS_NS`] and more than
    /// the one before; the last bucket has no bound.
    pub counts: [u64; BOUNDS_NS.len() + 1],
    /// Sum of all durations in nanoseconds.
    pub sum_ns: u64,
}

impl HistogramSnapshot {
    /// Durations recorded.
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
    stages: [Histogram; Stage::ALL.len()],
    total: Histogram,
    /// Its mqueues, the requests under way on all of them, and on the one that has most; looked at by
    /// the housekeeping (gauges).
    mqueues: Counter,
    depth: Counter,
    depth_max: Counter,
    /// 1 while the service is paused (gauge).
    held: Counter,
}

/// The same, summed over workers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ObservationSnapshot {
    /// By [`Stage`].
    pub stages: [HistogramSnapshot; Stage::ALL.len()],
    /// The whole way.
    pub total: HistogramSnapshot,
    /// Mqueues of the service.
    pub mqueues: u64,
    /// Requests under way on them a moment ago.
    pub depth: u64,
    /// Requests under way on the one that had most.
    pub depth_max: u64,
    /// Workers that hold the service: nothing of it is taken in.
    pub held: u64,
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
        self.held += observed.held.value();
    }
}

/// A message that is sampled; a time of 0 has not come yet.
#[derive(Debug)]
struct Followed {
    mqueue: u32,
    token: Token,
    /// Its number in the RX ring, from 0.
    position: u64,
    received_ns: u64,
    published_ns: u64,
    /// The last look at which its slot was not released.
    waiting_ns: u64,
    taken_ns: u64,
    seen_ns: u64,
    /// Where its reply goes, and which it is; known when it is seen.
    origin: Option<(Origin, u64)>,
}

/// Which messages of a service share are sampled.
#[derive(Debug)]
pub(crate) struct Sampler {
    /// Messages until the next one is sampled.
    countdown: u32,
    gap: u32,
    began_ns: u64,
    random: u32,
    sampled: Vec<Followed>,
    observed: Arc<Observations>,
}

impl Sampler {
    pub(crate) fn new(observed: Arc<Observations>) -> Self {
        let sampled = Vec::with_capacity(FOLLOWED_MAX);
        Self { countdown: 1, gap: 1, began_ns: 0, random: 0x9e37_79b9, sampled, observed }
    }

    /// One more message was accepted; whether it is one to follow.
    #[inline]
    pub(crate) fn is_due(&mut self) -> bool {
        self.countdown -= 1;
        self.countdown == 0
    }

    /// How many messages to let pass: from 1 to twice the mean, less one.
    fn draw_gap(&mut self, now_ns: u64) {
        let since_ns = now_ns.saturating_sub(self.began_ns);
        self.began_ns = now_ns;
        if since_ns < FOLLOW_NS {
            self.gap = (self.gap * 2).min(GAP_MAX);
        } else if since_ns > 4 * FOLLOW_NS {
            self.gap = (self.gap / 2).max(1);
        }
        // Xorshift (Marsaglia, 2003): no quality is needed, only no relation to batches.
        self.random ^= self.random << 13;
        self.random ^= self.random >> 17;
        self.random ^= self.random << 5;
        self.countdown = 1 + self.random % (2 * self.gap - 1);
    }
}

impl Followed {
    /// Records a message that ended at `sent_ns`, or with its release.
    fn record(&self, observed: &Observations, sent_ns: Option<u64>) {
        let published_ns = self.published_ns.max(self.received_ns);
        let taken_ns = self.taken_ns.max(published_ns);
        observed.stages[Stage::Receive as usize].record(published_ns - self.received_ns);
        observed.stages[Stage::Queue as usize].record(taken_ns - published_ns);
        let mut end_ns = taken_ns;
        if let Some(sent_ns) = sent_ns {
            let seen_ns = self.seen_ns.max(taken_ns);
            end_ns = sent_ns.max(seen_ns);
            observed.stages[Stage::Accelerator as usize].record(seen_ns - taken_ns);
            observed.stages[Stage::Send as usize].record(end_ns - seen_ns);
        }
        observed.total.record(end_ns - self.received_ns);
    }
}

/// In [`crate::service::mqueues::ServerMqueue::sampled`]: nobody. No token has this index, nor the next: tables are smaller.
pub(crate) const NO_TOKEN: Token = Token(u64::MAX - 1);
/// The same for somebody of a service without replies, who has no token.
const WITHOUT_TOKEN: Token = Token(u64::MAX);

impl ServiceShare {
    /// Follows the message that was just committed to an mqueue, if there is room for one more.
    #[cold]
    pub(crate) fn sample(&mut self, mqueue: u32, token: Option<Token>, received_ns: u64) {
        let sampler = &mut self.sampler;
        sampler.draw_gap(received_ns);
        let entry = &mut self.mqueues[mqueue as usize];
        if entry.sampled != NO_TOKEN || sampler.sampled.len() == FOLLOWED_MAX {
            return;
        }
        let token = token.unwrap_or(WITHOUT_TOKEN);
        entry.sampled = token;
        sampler.sampled.push(Followed {
            mqueue,
            token,
            position: entry.rx.committed() - 1,
            received_ns,
            published_ns: 0,
            waiting_ns: 0,
            taken_ns: 0,
            seen_ns: 0,
            origin: None,
        });
    }

    /// Once in a while: how deep the queues are.
    pub(crate) fn observe_depth(&self) {
        let observed = &self.sampler.observed;
        observed.mqueues.set(self.mqueues.len() as u64);
        observed.depth.set(self.outstanding_by_mqueue().map(u64::from).sum());
        observed.depth_max.set(self.outstanding_by_mqueue().max().unwrap_or(0).into());
    }

    pub(crate) fn observe_pause(&self) {
        self.sampler.observed.held.set(self.is_paused().into());
    }

    /// Whether [`Self::look`] has anything to look for.
    #[inline]
    pub(crate) fn awaits_release(&self) -> bool {
        self.sampler.sampled.iter().any(|f| f.taken_ns == 0)
    }

    /// Looks whether the slots of sampled messages are released. The first look at a message comes
    /// just before it is published.
    pub(crate) fn look(&mut self, now_ns: u64) {
        let Self { sampler, mqueues, replies, .. } = self;
        let Sampler { sampled, observed, .. } = sampler;
        sampled.retain_mut(|message| {
            if message.taken_ns != 0 {
                return true;
            }
            let mqueue = &mut mqueues[message.mqueue as usize];
            if message.published_ns == 0 {
                message.published_ns = now_ns;
                message.waiting_ns = now_ns;
                return true;
            }
            // A word that is impossible is found, and judged, where the ring is used.
            if mqueue.rx.credit().is_err() || mqueue.rx.released() <= message.position {
                message.waiting_ns = now_ns;
                return true;
            }
            message.taken_ns = message.waiting_ns.max(1);
            if *replies == Replies::None {
                message.record(observed, None);
                mqueue.sampled = NO_TOKEN;
                return false;
            }
            true
        });
    }

    /// The reply of a sampled message is in the TX ring, and about to be forwarded.
    #[cold]
    pub(crate) fn note_reply(&mut self, mqueue: u32, token: Token, now_ns: u64) {
        let Some(request) = self.sessions.find(token, mqueue) else { return };
        let origin = (request.origin, request.number);
        let mut sampled = self.sampler.sampled.iter_mut();
        let Some(message) = sampled.find(|f| f.mqueue == mqueue) else { return };
        if message.seen_ns == 0 {
            message.seen_ns = now_ns.max(1);
            message.origin = Some(origin);
        }
        if message.taken_ns == 0 {
            message.taken_ns = message.waiting_ns.max(1);
        }
    }

    /// Nobody of an mqueue is sampled any longer.
    pub(crate) fn unfollow(&mut self, mqueue: u32) {
        self.mqueues[mqueue as usize].sampled = NO_TOKEN;
        self.sampler.sampled.retain(|f| f.mqueue != mqueue);
    }

    /// Messages that are sampled now.
    #[inline]
    pub(crate) fn sampled_count(&self) -> usize {
        self.sampler.sampled.len()
    }

    /// Whose reply a sampled message had, once that is forwarded.
    pub(crate) fn sampled_origin(&self, index: usize) -> Option<(Origin, u64)> {
        let Followed { mqueue, token, origin, .. } = self.sampler.sampled[index];
        // A token that lives belongs to a reply that found no room and is still in its ring.
        origin.filter(|_| self.sessions.find(token, mqueue).is_none())
    }

    /// Whether the reply of a sampled message has left; `None`: its client is gone.
    #[cold]
    pub(crate) fn note_sent(&mut self, index: usize, sent: Option<bool>, now_ns: u64) {
        let message = &self.sampler.sampled[index];
        if sent == Some(true) {
            message.record(&self.sampler.observed, Some(now_ns));
        }
        if sent != Some(false) {
            self.unfollow(message.mqueue);
        }
    }

    /// Gives up sampled messages that have ended without a reply.
    pub(crate) fn unsample_ended(&mut self) {
        let Self { sampler, mqueues, loads, sessions, replies, .. } = self;
        sampler.sampled.retain(|&Followed { mqueue, token, seen_ns, .. }| {
            let under_way = match replies {
                Replies::One => seen_ns != 0 || sessions.find(token, mqueue).is_some(),
                Replies::None => true,
            };
            let stays = under_way && loads[mqueue as usize].alive;
            if !stays {
                mqueues[mqueue as usize].sampled = NO_TOKEN;
            }
            stays
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_hold_what_is_not_longer_than_their_bounds() {
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

    #[test]
    fn nobody_is_no_request_of_any_generation() {
        // The first token of a table whose generations have come round.
        let mut sessions = wire::session::Sessions::new(1, 0);
        let token = sessions.issue(wire::session::Request {
            origin: Origin::Client(wire::session::ReplyTo {
                endpoint: wire::session::EndpointKind::Tcp,
                worker: 0,
                key: 0,
                generation: 0,
            }),
            number: 0,
            mqueue: 0,
            len: 0,
            received_ns: 0,
            expects: wire::framing::Expects::Reply,
        });
        assert!(token.is_some_and(|token| token != NO_TOKEN && token != WITHOUT_TOKEN));
    }

    #[test]
    fn a_quiet_lane_follows_every_message_and_a_busy_one_few_of_a_batch() {
        let mut sampler = Sampler::new(Arc::default());
        for message in 1..100 {
            assert!(sampler.is_due());
            sampler.draw_gap(message * 1_000_000);
        }
        // Ten batches of a hundred messages in each FOLLOW_NS.
        let mut by_place = [0u32; 100];
        for batch in 0..100_000 {
            for count in &mut by_place {
                if sampler.is_due() {
                    *count += 1;
                    sampler.draw_gap(1_000_000_000 + batch * FOLLOW_NS / 10);
                }
            }
        }
        let sampled: u32 = by_place.iter().sum();
        assert!((2_000..20_000).contains(&sampled), "{sampled}");
        let fair = sampled / 100;
        assert!(by_place.iter().all(|n| (fair / 3..fair * 3).contains(n)), "{by_place:?}");
    }
}
