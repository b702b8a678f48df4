//! What functions hear of besides messages.
//!
//! A chain is moved out of its service while a batch is in progress. It hears of what happens meanwhile with the next notice, at most
//! a millisecond later.

use onpath::{End, Notice, RequestId};
use wire::session::{Origin, ReplyTo};

use crate::service::share::ServiceShare;

impl ServiceShare {
    /// Tells the functions that want to know.
    // Not inline: most services have no such function.
    #[inline(never)]
    fn tell(&mut self, notice: Notice) {
        let Some(chain) = self.chain.as_deref_mut() else {
            return self.notices.missed.push(notice);
        };
        for missed in self.notices.missed.drain(..) {
            chain.chain().notify(&missed);
        }
        chain.chain().notify(&notice);
    }

    /// A millisecond is over.
    #[inline]
    pub(crate) fn tell_tick(&mut self, now_ns: u64) {
        if self.notices.wanted {
            self.tell(Notice::Tick { now_ns });
        }
    }

    /// The upstream server has done a request to which no reply is shown.
    #[inline]
    pub(crate) fn tell_done(&mut self, origin: Origin, number: u64) {
        if self.notices.wanted {
            self.tell(Notice::Ended { request: RequestId { origin, number }, end: End::Done });
        }
    }

    /// A client's connection has ended, or the one to the upstream server that it has to itself.
    #[inline]
    pub(crate) fn tell_gone(&mut self, client: ReplyTo, now_ns: u64) {
        if self.notices.wanted {
            self.tell(Notice::Gone { client, now_ns });
        }
    }
}
