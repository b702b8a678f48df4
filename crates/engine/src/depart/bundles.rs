//! Departure of bundles: one completion in a TX ring answers many requests of one client.

use mqueue::abi::status;
use wire::DropReason;
use wire::nic::Nic;
use wire::session::{Origin, Request, Token};

use super::Depart;
use super::run::{Next, Run};
use crate::admit::servers::Servers;
use crate::base::arrival::Awaited;
use crate::base::turn::Turn;
use crate::service::bundle::table::Completion;
use crate::service::chain::ShownReply;
use crate::service::services::Services;

impl<N: Nic, D: Depart<N>> DepartBundles<N> for D {}

/// The ends of bundles.
pub(crate) trait DepartBundles<N: Nic>: Depart<N> {
    /// Delivers the replies of the completion that is next in a run, as far as there is room. Returns the message
    /// behind it.
    #[inline(never)]
    fn deliver_bundle(
        &mut self,
        turn: &mut Turn<N>,
        services: &mut Services,
        servers: &mut impl Servers<N>,
        run: &mut Run,
    ) -> Next {
        let (service, mqueue) = (run.service, run.mqueue);
        let share = &mut services[service];
        let reply = match share.mqueues[mqueue as usize].tx.bundle_reply(&run.header) {
            // It has not arrived as a whole.
            Ok(None) => return run.block(share),
            Ok(Some(reply)) => Some(reply),
            Err(_) => None,
        };
        match reply.map(|reply| share.completion(run.token(), mqueue, &reply)) {
            Some(Ok(completion)) => {
                let decided =
                    self.deliver_completion(turn, services, servers, service, mqueue, &completion);
                let share = &mut services[service];
                share.mqueues[mqueue as usize].completed |= decided;
                if decided != completion.messages {
                    return run.block(share);
                }
            }
            Some(Err((reason, messages))) => share.count_lost(reason, messages),
            None => share.count_lost(DropReason::BadMessage, 1),
        }
        let share = &mut services[service];
        share.mqueues[mqueue as usize].completed = 0;
        run.advance(share);
        run.next_after_others(turn, services)
    }

    /// Returns the messages that have an outcome; for the others there is no room.
    fn deliver_completion(
        &mut self,
        turn: &mut Turn<N>,
        services: &mut Services,
        servers: &mut impl Servers<N>,
        service: usize,
        mqueue: u32,
        completion: &Completion,
    ) -> u64 {
        let share = &services[service];
        if completion.messages == 0 {
            return 0;
        }
        if share.chain.is_some() {
            self.show_completion(turn, services, servers, service, mqueue, completion);
            return completion.messages;
        }
        let Some(bundle) = share.sessions.find_bundle(completion.token, mqueue) else {
            return completion.messages;
        };
        let origin = bundle.requests().origin;
        let of = (service, mqueue);
        let decided = self.deliver_together(turn, services, of, completion, &origin);
        if matches!(origin, Origin::Datagram { .. }) {
            return decided;
        }
        let messages = completion.messages & !decided;
        if messages != 0 {
            self.deliver_singly(
                turn,
                services,
                service,
                mqueue,
                &Completion { messages, ..*completion },
            );
        }
        completion.messages
    }

    /// Delivers the replies of a completion one by one to a client that has a key.
    #[cold]
    fn deliver_singly(
        &mut self,
        turn: &mut Turn<N>,
        services: &mut Services,
        service: usize,
        mqueue: u32,
        completion: &Completion,
    ) {
        let mut scratch = std::mem::take(&mut turn.scratch);
        let reply = &mut scratch[..completion.replies.len() as usize];
        let mut left = completion.messages;
        while left != 0 {
            let message = left.trailing_zeros();
            left &= left - 1;
            let share = &mut services[service];
            let found = share.sessions.find_message(completion.token, mqueue, message);
            let Some(Request { origin: Origin::Client(to), number, expects, .. }) = found else {
                break;
            };
            let at = completion.at(completion.place_of(message));
            share.read_replies(completion.token, mqueue, at, reply);
            share.end_messages(completion.token, mqueue, 1 << message);
            self.settle(turn, services, service, &Awaited { to, number, expects }, Ok(reply));
        }
        turn.scratch = scratch;
    }

    /// The chain sees the replies of bundles that came before it was attached.
    #[cold]
    fn show_completion(
        &mut self,
        turn: &mut Turn<N>,
        services: &mut Services,
        servers: &mut impl Servers<N>,
        service: usize,
        mqueue: u32,
        completion: &Completion,
    ) {
        let len = completion.replies.len() as usize;
        let mut left = completion.messages;
        while left != 0 {
            let message = left.trailing_zeros();
            left &= left - 1;
            let chain = services[service].chain.as_ref();
            if chain.is_some_and(|chain| !chain.has_room(len)) {
                self.deliver_shown(turn, services, servers, service);
            }
            let share = &mut services[service];
            let Some(request) = share.sessions.find_message(completion.token, mqueue, message)
            else {
                return;
            };
            let Some(mut chain) = share.chain.take() else { return };
            let at = completion.at(completion.place_of(message));
            let copy = |bytes: &mut [u8]| {
                share.read_replies(completion.token, mqueue, at, bytes);
                true
            };
            chain.show_reply(ShownReply { request, sampled: false }, len, copy);
            share.chain = Some(chain);
            share.end_messages(completion.token, mqueue, 1 << message);
        }
    }

    /// A block ends a message of a bundle without a reply.
    fn drop_of_bundle(
        &mut self,
        turn: &mut Turn<N>,
        services: &mut Services,
        service: usize,
        mqueue: u32,
        (token, how): (Token, u8),
    ) {
        let share = &mut services[service];
        let request = share.sessions.find_message(token, mqueue, token.message());
        let awaited = share.end_messages(token, mqueue, 1 << token.message());
        match request.filter(|_| awaited != 0) {
            None => share.count_lost(DropReason::StaleToken, 1),
            Some(request) if how == status::OK && super::may_be_silent(&request.origin) => {
                self.complete_silently(turn, services, service, &request);
            }
            Some(request) => {
                self.drop_request(turn, services, service, &request, super::reason_of(how));
            }
        }
    }
}
