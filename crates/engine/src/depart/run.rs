//! A run: the messages that one TX ring shows, read in order.

use mqueue::RingError;
use mqueue::abi::{self, SlotHeader};
use wire::DropReason;
use wire::framing::Expects;
use wire::nic::Nic;
use wire::session::Token;

use crate::base::turn::Turn;
use crate::service::services::Services;
use crate::service::share::ServiceShare;

/// The kind of the next message of a run, see [`Run::header`].
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Next {
    /// A reply whose request is in flight.
    Reply,
    /// Another message, such as a completion of a bundle, or a reply without a recipient.
    Other,
    /// The end: no message is left, or the destination has no room.
    End,
}

/// Header of a run before its first message.
const NO_MESSAGE: SlotHeader =
    SlotHeader { token: 0, tag: 0, arena_offset: 0, len: 0, kind: 0, status: 0, flags: 0 };

/// The messages of one server mqueue's TX ring.
///
/// It reads as many messages as the head of the ring showed when the run began; if the head is wrong, the run ends at
/// the first missing message. It does not read the head again: the line behind the last message has not been touched
/// for a whole lap, and later messages move the head and are read in the next turn.
pub(crate) struct Run {
    pub(crate) service: usize,
    pub(crate) mqueue: u32,
    /// The result of [`Self::next`].
    pub(crate) header: SlotHeader,
    /// Number of messages that are left.
    left: u64,
    /// Prefetch distance in messages.
    ahead: u64,
    /// Requests in flight when the run began.
    before: u32,
    /// Whether the accelerator wrote impossible ring words.
    is_corrupt: bool,
}

impl Run {
    /// The token of the message that [`Self::next`] has found.
    #[inline(always)]
    pub(crate) fn token(&self) -> Token {
        Token(self.header.token)
    }

    /// With `shown` of `u64::MAX` all available messages are read, a lap at most; then no slot is returned before the
    /// end.
    #[inline]
    pub(crate) fn begin(share: &ServiceShare, service: usize, mqueue: u32, shown: u64) -> Self {
        let ahead = if shown > 1 { share.fetch_more(mqueue, shown) } else { u64::MAX };
        let before = share.outstanding_on(mqueue);
        Self { service, mqueue, header: NO_MESSAGE, left: shown, ahead, before, is_corrupt: false }
    }

    /// Parses the next message, which stays in its ring until [`Self::advance`].
    // Always inline: every reply takes this path.
    #[inline(always)]
    pub(crate) fn next<N: Nic>(&mut self, turn: &mut Turn<N>, services: &mut Services) -> Next {
        while self.left > 0 {
            let share = &mut services[self.service];
            if self.left > self.ahead {
                share.fetch(self.mqueue, self.ahead);
            }
            let entry = &mut share.mqueues[self.mqueue as usize];
            match entry.tx.peek() {
                Ok(Some(header)) => {
                    self.header = header;
                    let token = self.token();
                    if entry.sampled == token {
                        let now_ns = turn.clock_ns();
                        services[self.service].note_reply(self.mqueue, token, now_ns);
                    }
                    let share = &services[self.service];
                    if header.kind == abi::kind::MESSAGE
                        && let Some(request) = share.sessions.find(token, self.mqueue)
                        && request.expects != Expects::Nothing
                        && header.len as usize <= share.max_reply_bytes
                    {
                        return Next::Reply;
                    }
                    return Next::Other;
                }
                Ok(None) => break,
                Err(RingError::BadHeader) => {
                    self.advance(share);
                    share.count_lost(DropReason::BadMessage, 1);
                }
                Err(RingError::Corrupt) => {
                    entry.tx_corrupt = true;
                    self.is_corrupt = true;
                    break;
                }
            }
        }
        Next::End
    }

    /// The same for the less frequent cases.
    #[inline(never)]
    pub(crate) fn next_after_others<N: Nic>(
        &mut self,
        turn: &mut Turn<N>,
        services: &mut Services,
    ) -> Next {
        self.next(turn, services)
    }

    /// The current message is finished.
    #[inline(always)]
    pub(crate) fn advance(&mut self, share: &mut ServiceShare) {
        share.mqueues[self.mqueue as usize].tx.advance();
        self.left -= 1;
    }

    /// Copies the reply out of its ring. `None` if it has not arrived completely.
    pub(crate) fn copy_out<'a>(
        &self,
        share: &ServiceShare,
        into: &'a mut [u8],
    ) -> Option<&'a [u8]> {
        let payload = &mut into[..self.header.len as usize];
        let ring = &share.mqueues[self.mqueue as usize].tx;
        ring.copy_out(&self.header, payload).then_some(payload)
    }

    /// The destination has no room: the reply and those behind it stay in their ring.
    #[cold]
    pub(crate) fn block(&mut self, share: &mut ServiceShare) -> Next {
        let entry = &mut share.mqueues[self.mqueue as usize];
        if !std::mem::replace(&mut entry.is_blocked, true) {
            share.blocked.push(self.mqueue);
        }
        self.left = 0;
        Next::End
    }

    /// Returns the slots of the messages that were read. Returns whether there were any.
    #[inline]
    pub(crate) fn end(self, share: &mut ServiceShare, now_ns: u64) -> bool {
        if self.is_corrupt {
            return false;
        }
        let released = share.mqueues[self.mqueue as usize].tx.release();
        share.gathered(self.mqueue, self.before, now_ns);
        released
    }
}
