//! The account of a service's requests on one worker: what came in, and how each ended.
//!
//! `received = replied + consumed + drops of requests + outstanding` holds at any moment.

use wire::DropReason;
use wire::framing::Expects;
use wire::session::{Request, Token};

use crate::service::share::ServiceShare;
use crate::topology::Replies;

impl ServiceShare {
    /// Whether the client of a request hears what became of it.
    pub(crate) fn is_answered(&self, expects: Expects) -> bool {
        expects != Expects::Nothing && self.replies != Replies::None
    }

    /// Requests were received.
    #[inline]
    pub(crate) fn count_received(&self, requests: u64) {
        self.counters.received.add(requests);
    }

    /// Payload bytes of requests that were received.
    #[inline]
    pub(crate) fn count_received_bytes(&self, bytes: u64) {
        self.counters.received_bytes.add(bytes);
    }

    /// The clients have replies: the host kernel took them, or they are in a client's ring.
    #[inline]
    pub(crate) fn count_replied(&self, replies: u64) {
        self.counters.replied.add(replies);
    }

    /// Payload bytes of replies.
    #[inline]
    pub(crate) fn count_replied_bytes(&self, bytes: u64) {
        self.counters.replied_bytes.add(bytes);
    }

    /// Requests ended without a reply, as the service or the client wanted.
    #[inline]
    pub(crate) fn count_consumed(&self, requests: u64) {
        self.counters.consumed.add(requests);
    }

    /// Messages were lost.
    #[inline]
    pub(crate) fn count_lost(&self, reason: DropReason, messages: u64) {
        self.counters.drop_many(reason, messages);
    }

    /// A request that was given up is counted, for this reason.
    pub(crate) fn count_dropped_request(&self, reason: DropReason) {
        if !mutants::on("lose_drop") || reason != DropReason::RequestTimeout {
            self.counters.drop_one(reason);
        }
    }

    /// The reply to a request has gone where it goes: its token, which [`wire::session::Sessions::find`] has just shown,
    /// dies.
    #[inline(always)]
    pub(crate) fn end_answered(&mut self, token: Token, mqueue: u32) {
        self.sessions.end_found(token);
        self.ended(mqueue);
    }

    /// Ends a request that is under way; its reply is no longer sampled if it never comes.
    pub(crate) fn end_request(&mut self, token: Token, request: &Request, answered: bool) {
        let ended = self.sessions.end(token, request.mqueue);
        debug_assert!(ended.is_some());
        self.ended(request.mqueue);
        if !answered && self.mqueues[request.mqueue as usize].sampled == token {
            self.unfollow(request.mqueue);
        }
    }
}
