//! The stages of sampled messages of one service share, see [`crate::base::stages`].

use wire::session::{Origin, Token};

use crate::base::topology::Replies;
use crate::service::sampler::{NO_TOKEN, SAMPLED_MAX, Sample, Sampler, WITHOUT_TOKEN};
use crate::service::share::ServiceShare;

impl ServiceShare {
    /// Samples the message that was just committed to an mqueue, if there is room for one more.
    #[cold]
    pub(crate) fn sample(&mut self, mqueue: u32, token: Option<Token>, received_ns: u64) {
        let sampler = &mut self.sampler;
        sampler.draw_gap(received_ns);
        let waiting = self.loads[mqueue as usize].outstanding - 1;
        let run = self.bundles.choice.single_sent(mqueue, waiting, received_ns);
        if run.is_some() {
            self.dispatcher.bundle(run);
        }
        let entry = &mut self.mqueues[mqueue as usize];
        if entry.sampled != NO_TOKEN || sampler.sampled.len() == SAMPLED_MAX {
            return;
        }
        let token = token.unwrap_or(WITHOUT_TOKEN);
        entry.sampled = token;
        sampler.sampled.push(Sample {
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

    /// Updates the gauges of queue depths.
    pub(crate) fn observe_depth(&self) {
        let observed = &self.sampler.observed;
        observed.mqueues.set(self.mqueues.len() as u64);
        observed.depth.set(self.outstanding_by_mqueue().map(u64::from).sum());
        observed.depth_max.set(self.outstanding_by_mqueue().max().unwrap_or(0).into());
    }

    pub(crate) fn observe_pause(&self) {
        self.sampler.observed.paused.set(self.is_paused().into());
    }

    /// Whether [`Self::look`] has anything to check.
    #[inline]
    pub(crate) fn awaits_release(&self) -> bool {
        self.sampler.sampled.iter().any(|f| f.taken_ns == 0)
    }

    /// Checks whether the slots of sampled messages are released. The first check of a message comes just before it
    /// is published.
    pub(crate) fn check_releases(&mut self, now_ns: u64) {
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
            // An impossible word is found, and handled, where the ring is used.
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

    /// Stops sampling the messages of an mqueue.
    pub(crate) fn stop_sampling(&mut self, mqueue: u32) {
        self.mqueues[mqueue as usize].sampled = NO_TOKEN;
        self.sampler.sampled.retain(|f| f.mqueue != mqueue);
    }

    /// Number of messages that are sampled now.
    #[inline]
    pub(crate) fn sampled_count(&self) -> usize {
        self.sampler.sampled.len()
    }

    /// The destination of a sampled message's reply, once that is forwarded.
    pub(crate) fn sampled_origin(&self, index: usize) -> Option<(Origin, u64)> {
        let Sample { mqueue, token, origin, .. } = self.sampler.sampled[index];
        // A live token belongs to a reply that found no room and is still in its ring.
        origin.filter(|_| self.sessions.find(token, mqueue).is_none())
    }

    /// Whether the reply of a sampled message has been sent; `None`: its client is gone.
    #[cold]
    pub(crate) fn note_sent(&mut self, index: usize, sent: Option<bool>, now_ns: u64) {
        let message = &self.sampler.sampled[index];
        if sent == Some(true) {
            message.record(&self.sampler.observed, Some(now_ns));
        }
        if sent != Some(false) {
            self.stop_sampling(message.mqueue);
        }
    }

    /// Stops sampling messages that have ended without a reply.
    pub(crate) fn unsample_ended(&mut self) {
        let Self { sampler, mqueues, loads, sessions, replies, .. } = self;
        sampler.sampled.retain(|&Sample { mqueue, token, seen_ns, .. }| {
            let in_flight = match replies {
                Replies::One => seen_ns != 0 || sessions.find(token, mqueue).is_some(),
                Replies::None => true,
            };
            let stays = in_flight && loads[mqueue as usize].alive;
            if !stays {
                mqueues[mqueue as usize].sampled = NO_TOKEN;
            }
            stays
        });
    }
}
