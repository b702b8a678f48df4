//! Accounting of a service's requests on one worker: received messages, and the end of each.
//!
//! `received = replied + consumed + drops of requests + outstanding` holds at any moment.

use wire::DropReason;
use wire::framing::Expects;
use wire::session::{Request, Token};

use crate::base::topology::Replies;
use crate::service::share::ServiceShare;

impl ServiceShare {
    /// Whether the client of a request gets its outcome.
    pub(crate) fn is_answered(&self, expects: Expects) -> bool {
        expects != Expects::Nothing && self.replies != Replies::None
    }

    /// Counts received requests.
    #[inline]
    pub(crate) fn count_received(&self, requests: u64) {
        self.counters.received.add(requests);
    }

    /// Counts payload bytes of received requests.
    #[inline]
    pub(crate) fn count_received_bytes(&self, bytes: u64) {
        self.counters.received_bytes.add(bytes);
    }

    /// Counts replies that the host kernel took, or that are in a client's ring.
    #[inline]
    pub(crate) fn count_replied(&self, replies: u64) {
        self.counters.replied.add(replies);
    }

    /// Counts payload bytes of replies.
    #[inline]
    pub(crate) fn count_replied_bytes(&self, bytes: u64) {
        self.counters.replied_bytes.add(bytes);
    }

    /// Counts requests that ended without a reply, as requested by the service or the client.
    #[inline]
    pub(crate) fn count_consumed(&self, requests: u64) {
        self.counters.consumed.add(requests);
    }

    /// Counts lost messages.
    #[inline]
    pub(crate) fn count_lost(&self, reason: DropReason, messages: u64) {
        self.counters.drop_many(reason, messages);
    }

    /// Counts a dropped request, for this reason.
    pub(crate) fn count_dropped_request(&self, reason: DropReason) {
        if !mutants::on("lose_drop") || reason != DropReason::RequestTimeout {
            self.counters.drop_one(reason);
        }
    }

    /// The reply to a request has been delivered: ends its token, which [`wire::session::Sessions::find`] has just
    /// returned.
    #[inline(always)]
    pub(crate) fn end_answered(&mut self, token: Token, mqueue: u32) {
        self.sessions.end_found(token);
        self.ended(mqueue);
    }

    /// Ends a request that is in flight; if it is sampled, its reply will not come.
    pub(crate) fn end_request(&mut self, token: Token, request: &Request, answered: bool) {
        let ended = self.sessions.end(token, request.mqueue);
        debug_assert!(ended.is_some());
        self.ended(request.mqueue);
        if !answered && self.mqueues[request.mqueue as usize].sampled == token {
            self.stop_sampling(request.mqueue);
        }
    }

    /// A request is in the ring to another worker.
    pub(crate) fn count_handed_out(&self, worker: u16) {
        self.counters.handed_out.one();
        if let Some(owner) = &self.owner {
            owner.count_handed_out(worker);
        }
    }

    /// A request was taken out of a ring to this worker.
    pub(crate) fn count_taken_over(&self, worker: u16) {
        if let Some(owner) = &self.owner {
            owner.count_taken_over(worker);
        }
    }

    /// Whether no chunk of a byte stream may be taken in this turn, because the tenant has as many messages in flight as it may.
    pub(crate) fn refuses_chunk(&mut self, worker: u16) -> bool {
        self.takes_below == 0 && self.takes_not(worker, 0, false).is_some()
    }
}
