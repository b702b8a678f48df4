//! Chooses the messages of a service that are sampled, see [`crate::base::stages`].

use std::sync::Arc;

use wire::session::{Origin, Token};

use crate::base::stages::{Observations, Stage};

/// Messages of a service share that are sampled at the same time.
pub(super) const SAMPLED_MAX: usize = 8;
/// Mean time between two messages that are sampled in a busy service share, roughly.
const SAMPLE_INTERVAL_NS: u64 = 50_000;
/// Longest mean gap between two sampled messages.
const GAP_MAX: u32 = 1 << 16;

/// A message that is sampled; a time of 0 is not known yet.
#[derive(Debug)]
pub(super) struct Sample {
    pub(super) mqueue: u32,
    pub(super) token: Token,
    /// Its number in the RX ring, from 0.
    pub(super) position: u64,
    pub(super) received_ns: u64,
    pub(super) published_ns: u64,
    /// The last check at which its slot was not released.
    pub(super) waiting_ns: u64,
    pub(super) taken_ns: u64,
    pub(super) seen_ns: u64,
    /// Destination and number of its reply; known when the reply is seen.
    pub(super) origin: Option<(Origin, u64)>,
}

/// Which messages of a service share are sampled.
#[derive(Debug)]
pub(crate) struct Sampler {
    /// Messages until the next one is sampled.
    countdown: u32,
    gap: u32,
    began_ns: u64,
    random: u32,
    pub(super) sampled: Vec<Sample>,
    pub(super) observed: Arc<Observations>,
}

impl Sampler {
    pub(crate) fn new(observed: Arc<Observations>) -> Self {
        let sampled = Vec::with_capacity(SAMPLED_MAX);
        Self { countdown: 1, gap: 1, began_ns: 0, random: 0x9e37_79b9, sampled, observed }
    }

    /// One more message was accepted; whether it is sampled.
    #[inline]
    pub(crate) fn is_due(&mut self) -> bool {
        self.countdown -= 1;
        self.countdown == 0
    }

    /// Whether the next message is sampled.
    #[inline]
    pub(super) fn is_next(&self) -> bool {
        self.countdown == 1
    }

    /// The next message is sampled.
    pub(super) fn hasten(&mut self) {
        self.countdown = 1;
    }

    /// `messages` messages were accepted without a look at them; one that is due is the next instead.
    #[inline]
    pub(super) fn pass(&mut self, messages: u32) {
        self.countdown -= messages.min(self.countdown - 1);
    }

    /// Number of messages to skip: from 1 to twice the mean, less one.
    pub(super) fn draw_gap(&mut self, now_ns: u64) {
        let since_ns = now_ns.saturating_sub(self.began_ns);
        self.began_ns = now_ns;
        if since_ns < SAMPLE_INTERVAL_NS {
            self.gap = (self.gap * 2).min(GAP_MAX);
        } else if since_ns > 4 * SAMPLE_INTERVAL_NS {
            self.gap = (self.gap / 2).max(1);
        }
        // Xorshift (Marsaglia, 2003): no quality is needed, only independence of batches.
        self.random ^= self.random << 13;
        self.random ^= self.random >> 17;
        self.random ^= self.random << 5;
        self.countdown = 1 + self.random % (2 * self.gap - 1);
    }
}

impl Sample {
    /// Records a message that ended at `sent_ns`, or with its release.
    pub(super) fn record(&self, observed: &Observations, sent_ns: Option<u64>) {
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

/// For [`crate::service::mqueues::ServerMqueue::sampled`]: none. No token has this index, nor the next: tables are
/// smaller.
pub(crate) const NO_TOKEN: Token = Token(u64::MAX - 1);
/// The same for a message of a service without replies, which has no token.
pub(super) const WITHOUT_TOKEN: Token = Token(u64::MAX);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_token_equals_no_request_of_any_generation() {
        // The first token of a table whose generation counters have wrapped.
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
    fn a_quiet_share_samples_every_message_and_a_busy_one_few_of_a_batch() {
        let mut sampler = Sampler::new(Arc::default());
        for message in 1..100 {
            assert!(sampler.is_due());
            sampler.draw_gap(message * 1_000_000);
        }
        // Ten batches of a hundred messages in each SAMPLE_INTERVAL_NS.
        let mut by_place = [0u32; 100];
        for batch in 0..100_000 {
            for count in &mut by_place {
                if sampler.is_due() {
                    *count += 1;
                    sampler.draw_gap(1_000_000_000 + batch * SAMPLE_INTERVAL_NS / 10);
                }
            }
        }
        let sampled: u32 = by_place.iter().sum();
        assert!((2_000..20_000).contains(&sampled), "{sampled}");
        let fair = sampled / 100;
        assert!(by_place.iter().all(|n| (fair / 3..fair * 3).contains(n)), "{by_place:?}");
    }
}
