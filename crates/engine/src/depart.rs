//! Departure: moves replies from TX rings to endpoints, and ends requests without a reply. Replies that find no room
//! stay in their ring.

pub(crate) mod bundles;
pub(crate) mod run;

use mqueue::abi::{self, SlotHeader, status};
use onpath::{Direction, Outcome};
use wire::DropReason;
use wire::framing::Expects;
use wire::nic::Nic;
use wire::session::{EndpointKind, Origin, Request, Token};

use self::bundles::DepartBundles;
use self::run::{Next, Run};
use crate::admit::servers::Servers;
use crate::base::arrival::Awaited;
use crate::base::topology::Replies;
use crate::base::turn::Turn;
use crate::service::bundle::table::Completion;
use crate::service::chain::ShownReply;
use crate::service::services::Services;
use crate::service::share::ServiceShare;

/// Where replies go, and the outcomes of requests.
pub(crate) trait Destinations<N: Nic> {
    /// Delivers the replies of a run, from the next one. Returns the message behind them.
    fn deliver(&mut self, turn: &mut Turn<N>, services: &mut Services, run: &mut Run) -> Next;

    /// Gives one request of a client with a key its outcome: a reply that is not in a ring, or the
    /// reason of its loss.
    fn settle(
        &mut self,
        turn: &mut Turn<N>,
        services: &mut Services,
        service: usize,
        request: &Awaited,
        outcome: Result<&[u8], DropReason>,
    );

    /// Sends a reply to a datagram of this many bytes.
    fn answer_datagram(
        &mut self,
        turn: &mut Turn<N>,
        services: &mut Services,
        servers: &mut impl Servers<N>,
        to: (usize, &Origin),
        request_len: u32,
        reply: &[u8],
    );

    /// Delivers the replies of a bundle's completion to its client, as far as there is room. Returns
    /// the messages that have an outcome.
    fn deliver_together(
        &mut self,
        turn: &mut Turn<N>,
        services: &mut Services,
        mqueue: (usize, u32),
        completion: &Completion,
        origin: &Origin,
    ) -> u64;
}

impl<N: Nic, D: Destinations<N>> Depart<N> for D {}

/// The ends of requests.
pub(crate) trait Depart<N: Nic>: Destinations<N> + Sized {
    /// Delivers the messages that the head of a server mqueue's TX ring shows, or blocks at the first reply without
    /// room. See [`Run`].
    fn gather_replies(
        &mut self,
        turn: &mut Turn<N>,
        services: &mut Services,
        servers: &mut impl Servers<N>,
        service: usize,
        mqueue: u32,
        shown: u64,
    ) {
        let share = &services[service];
        if !share.loads[mqueue as usize].alive {
            return;
        }
        let mut run = Run::begin(share, service, mqueue, shown);
        if share.chain.is_some() {
            return self.gather_through_chain(turn, services, servers, run);
        }
        let mut next = run.next(turn, services);
        loop {
            next = match next {
                Next::Reply => self.deliver(turn, services, &mut run),
                Next::Other => self.deliver_other(turn, services, servers, &mut run),
                Next::End => break,
            };
        }
        turn.worked |= run.end(&mut services[service], turn.now_ns);
    }

    /// Handles a message that is no reply to a single request in flight. Returns the one behind it.
    // Cold, which the bundles are not: single replies then take fewer instructions.
    #[cold]
    #[inline(never)]
    fn deliver_other(
        &mut self,
        turn: &mut Turn<N>,
        services: &mut Services,
        servers: &mut impl Servers<N>,
        run: &mut Run,
    ) -> Next {
        if run.header.kind == abi::kind::BUNDLE {
            return self.deliver_bundle(turn, services, servers, run);
        }
        self.end_without_reply(turn, services, run.service, run.mqueue, &run.header);
        run.advance(&mut services[run.service]);
        run.next_after_others(turn, services)
    }

    /// The same where a chain of functions sees the replies first: those of a turn together, in [`Self::deliver_shown`].
    #[cold]
    #[inline(never)]
    fn gather_through_chain(
        &mut self,
        turn: &mut Turn<N>,
        services: &mut Services,
        servers: &mut impl Servers<N>,
        mut run: Run,
    ) {
        let service = run.service;
        let mut next = run.next_after_others(turn, services);
        loop {
            next = match next {
                Next::Reply => {
                    let len = run.header.len as usize;
                    let chain = services[service].chain.as_mut();
                    if chain.is_some_and(|chain| !chain.has_room(len)) {
                        self.deliver_shown(turn, services, servers, service);
                    }
                    show_reply(&mut services[service], &mut run);
                    run.next_after_others(turn, services)
                }
                Next::Other => self.deliver_other(turn, services, servers, &mut run),
                Next::End => break,
            };
        }
        turn.worked |= run.end(&mut services[service], turn.now_ns);
    }

    /// The chain decides about the replies that it has been shown, and those that it lets pass are delivered. It sees each once:
    /// what becomes of it then does not stay in its ring.
    #[inline(never)]
    fn deliver_shown(
        &mut self,
        turn: &mut Turn<N>,
        services: &mut Services,
        servers: &mut impl Servers<N>,
        service: usize,
    ) {
        let share = &mut services[service];
        let Some(mut chain) = share.chain.take_if(|chain| chain.shown_replies() > 0) else {
            return;
        };
        let max_reply_bytes = share.max_reply_bytes;
        chain.decide(Direction::Replies, &|| turn.clock_ns());
        for index in 0..chain.shown_replies() {
            let ShownReply { request, sampled } = chain.shown_reply(index);
            let reply = chain.messages().bytes(index);
            let lost = match chain.messages().outcome(index) {
                Outcome::Drop(reason) => Some(reason),
                _ if reply.len() > max_reply_bytes => Some(DropReason::ReplyTooLong),
                _ => None,
            };
            let Request { origin, number, expects, .. } = request;
            match (origin, lost) {
                (_, Some(reason)) => {
                    if sampled {
                        services[service].stop_sampling(request.mqueue);
                    }
                    self.drop_request(turn, services, service, &request, reason);
                }
                (Origin::Client(to), None) => {
                    let request = Awaited { to, number, expects };
                    self.settle(turn, services, service, &request, Ok(reply));
                }
                (Origin::Datagram { .. }, None) => {
                    let to = (service, &origin);
                    self.answer_datagram(turn, services, servers, to, request.len, reply);
                }
            }
        }
        chain.clear_replies();
        services[service].chain = Some(chain);
    }

    /// Ends a request for a TX message that is not a reply, or a reply that has no recipient.
    #[inline(never)]
    fn end_without_reply(
        &mut self,
        turn: &mut Turn<N>,
        services: &mut Services,
        service: usize,
        mqueue: u32,
        header: &SlotHeader,
    ) {
        let share = &mut services[service];
        let token = Token(header.token);
        if header.kind != abi::kind::MESSAGE && header.kind != abi::kind::DROP {
            return share.count_lost(DropReason::BadMessage, 1);
        }
        let dropped = header.kind == abi::kind::DROP;
        if share.replies == Replies::None {
            if dropped && header.status == status::OK {
                return;
            }
            let reason = if dropped { DropReason::ConsumedDrop } else { DropReason::UnwantedReply };
            return share.count_lost(reason, 1);
        }
        if dropped && token.is_of_bundle() {
            return self.drop_of_bundle(turn, services, service, mqueue, (token, header.status));
        }
        let Some(request) = share.sessions.find(token, mqueue).copied() else {
            return share.count_lost(DropReason::StaleToken, 1);
        };
        if dropped && header.status == status::OK && may_be_silent(&request.origin) {
            return self.consume(turn, services, service, token, &request);
        }
        share.end_request(token, &request, false);
        if !dropped && request.expects == Expects::Nothing {
            return share.count_consumed(1);
        }
        let reason = if dropped { reason_of(header.status) } else { DropReason::ReplyTooLong };
        self.drop_request(turn, services, service, &request, reason);
    }

    /// The kernel has completed the request and sends no reply.
    fn consume(
        &mut self,
        turn: &mut Turn<N>,
        services: &mut Services,
        service: usize,
        token: Token,
        request: &Request,
    ) {
        let settles =
            matches!(request.origin, Origin::Client(_) if request.expects != Expects::Nothing);
        services[service].end_request(token, request, settles);
        self.complete_silently(turn, services, service, request);
    }

    /// A request has ended, was completed, and gets no reply.
    fn complete_silently(
        &mut self,
        turn: &mut Turn<N>,
        services: &mut Services,
        service: usize,
        request: &Request,
    ) {
        let Request { origin, number, expects, .. } = *request;
        match origin {
            Origin::Client(to) if expects != Expects::Nothing => {
                // Completes the place in the order of replies, on the worker that has the client.
                let request = Awaited { to, number, expects: Expects::ReplyOrNothing };
                self.settle(turn, services, service, &request, Ok(&[]));
            }
            _ => services[service].count_consumed(1),
        }
    }

    /// Counts a request that ends without a reply, and reports that to its client.
    fn drop_request(
        &mut self,
        turn: &mut Turn<N>,
        services: &mut Services,
        service: usize,
        request: &Request,
        reason: DropReason,
    ) {
        let share = &services[service];
        let Request { origin, number, expects, .. } = *request;
        share.count_dropped_request(reason);
        if let Origin::Client(to) = origin
            && share.is_answered(expects)
        {
            self.settle(turn, services, service, &Awaited { to, number, expects }, Err(reason));
        }
    }

    /// Drops requests that have been in flight for too long.
    fn expire_requests(&mut self, turn: &mut Turn<N>, services: &mut Services, service: usize) {
        let before_ns = turn.now_ns.saturating_sub(services[service].timeout_ns);
        while let Some(request) = services[service].sessions.expire(before_ns) {
            if !mutants::on("leak_credit") {
                services[service].ended(request.mqueue);
            }
            self.drop_request(turn, services, service, &request, DropReason::RequestTimeout);
        }
    }

    /// Drops every request of a service that is in flight, regardless of its age.
    fn drop_requests(
        &mut self,
        turn: &mut Turn<N>,
        services: &mut Services,
        service: usize,
        reason: DropReason,
    ) {
        while let Some(request) = services[service].sessions.expire(u64::MAX) {
            services[service].ended(request.mqueue);
            self.drop_request(turn, services, service, &request, reason);
        }
        let share = &mut services[service];
        if share.replies == Replies::None {
            for mqueue in 0..share.mqueues.len() as u32 {
                let unread = share.drop_unread(mqueue);
                share.count_lost(reason, unread);
            }
        }
    }

    /// After [`crate::service::share::ServiceShare::mark_dead`]: requests in flight on mqueues that are not alive end
    /// with `reason`. These are the requests of the mqueues just marked; the others have none.
    fn end_requests_of_dead_mqueues(
        &mut self,
        turn: &mut Turn<N>,
        services: &mut Services,
        service: usize,
        reason: DropReason,
    ) {
        let mut pass = services[service].sessions.pass();
        while let Some(request) = services[service].end_next_of_dead(&mut pass) {
            self.drop_request(turn, services, service, &request, reason);
        }
        let share = &mut services[service];
        for mqueue in 0..share.mqueues.len() as u32 {
            if share.loads[mqueue as usize].alive {
                continue;
            }
            let unread = share.drop_unread(mqueue);
            if share.replies == Replies::None {
                share.count_lost(reason, unread);
            }
        }
    }
}

/// Takes a reply out of its ring, ends its request, and adds it to those that the chain sees together. There is room for it.
fn show_reply(share: &mut ServiceShare, run: &mut Run) {
    let token = run.token();
    let request = *share.sessions.found(token);
    let entry = &share.mqueues[run.mqueue as usize];
    let reply = ShownReply { request, sampled: entry.sampled == token };
    let copy = |bytes: &mut [u8]| entry.tx.copy_out(&run.header, bytes);
    let chain = share.chain.as_mut().expect("the caller looked");
    if !chain.show_reply(reply, run.header.len as usize, copy) {
        // It has not arrived as a whole.
        run.block(share);
        return;
    }
    share.end_request(token, &request, true);
    run.advance(share);
}

/// Why a kernel ends a request without a reply.
fn reason_of(how: u8) -> DropReason {
    match how {
        status::BAD_LENGTH => DropReason::BadLength,
        status::TOO_LONG => DropReason::ReplyTooLong,
        _ => DropReason::KernelDrop,
    }
}

/// Whether a kernel may end a request of this client without an outcome. Each request of a shared-memory client gets
/// an outcome, also one that was dropped.
fn may_be_silent(origin: &Origin) -> bool {
    !matches!(origin, Origin::Client(to) if to.endpoint == EndpointKind::Shm)
}
