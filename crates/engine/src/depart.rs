//! Departure: moves replies from TX rings to endpoints, and ends requests without a reply. Replies that find no room
//! stay in their ring.

pub(crate) mod bundles;

use mqueue::abi::{self, SlotHeader, status};
use onpath::{Direction, Outcome};
use wire::DropReason;
use wire::framing::Expects;
use wire::nic::Nic;
use wire::session::{EndpointKind, Origin, Request, Token};

use crate::base::arrival::Awaited;
use crate::base::topology::Replies;
use crate::endpoint::run::{Next, Run};
use crate::endpoint::set::Endpoints;
use crate::schedule::Schedule;
use crate::service::chain::ShownReply;
use crate::service::ends::ShareMqueue;
use crate::service::share::{HEADS_READ, ServiceShare};
use crate::turn::Turn;

impl Endpoints {
    /// Empties the TX rings of a service that may hold messages: those the blocks touched, and those left over from
    /// the last turn.
    // Always inline: there is one caller, and it runs every turn.
    #[inline(always)]
    pub(crate) fn gather<N: Nic>(
        &mut self,
        turn: &mut Turn<N>,
        schedule: &mut Schedule,
        service: usize,
    ) {
        let before = schedule.is_shared().then(|| turn.services[service].in_flight());
        turn.services[service].take_blocked();
        for index in 0..turn.services[service].retried.len() {
            let mqueue = turn.services[service].retried[index];
            let shown = turn.services[service].shown(mqueue);
            self.gather_replies(turn, service, mqueue, shown);
        }
        gather_backend_requests(turn, service);
        for index in 0..turn.services[service].backends.retried().len() {
            let client = turn.services[service].backends.retried()[index];
            take_backend_requests(turn, service, client);
        }
        for drive in 0..turn.services[service].accelerators.len() {
            let count = turn.services[service].accelerators[drive].tx_pending.len();
            for first in (0..count).step_by(HEADS_READ) {
                let shown = turn.services[service].read_heads(drive, first);
                for (index, shown) in (first..count).zip(shown) {
                    let share = &turn.services[service];
                    share.fetch_ahead(drive, index);
                    match share.tx_pending(drive, index) {
                        ShareMqueue::Server(mqueue) => {
                            self.gather_replies(turn, service, mqueue, shown);
                        }
                        ShareMqueue::Client(client) => take_backend_requests(turn, service, client),
                        ShareMqueue::Sockets(block) => turn.take_socket_commands(service, block),
                        ShareMqueue::Foreign => {}
                    }
                }
            }
        }
        if turn.services[service].chain.is_some() {
            self.deliver_shown(turn, service);
        }
        let share = &mut turn.services[service];
        if share.replies == Replies::None {
            share.count_released(turn.now_ns);
        }
        // Taken in any case: nothing is charged later for the time before.
        let charges = before.is_some() || !mutants::on("charge_former_time");
        let function_ns = if charges { share.take_function_ns() } else { 0 };
        if let Some(before) = before {
            let ended = before.saturating_sub(share.in_flight());
            schedule.charge_replies(service, ended, function_ns);
        }
    }

    /// Delivers the messages that the head of a server mqueue's TX ring shows, or blocks at the first reply without
    /// room. See [`Run`].
    pub(crate) fn gather_replies<N: Nic>(
        &mut self,
        turn: &mut Turn<N>,
        service: usize,
        mqueue: u32,
        shown: u64,
    ) {
        let share = &turn.services[service];
        if !share.loads[mqueue as usize].alive {
            return;
        }
        let mut run = Run::begin(share, service, mqueue, shown);
        if share.chain.is_some() {
            return self.gather_through_chain(turn, run);
        }
        let mut next = run.next(turn);
        loop {
            next = match next {
                Next::Reply => self.deliver(turn, &mut run),
                Next::Other => self.deliver_other(turn, &mut run),
                Next::End => break,
            };
        }
        turn.worked |= run.end(&mut turn.services[service], turn.now_ns);
    }

    /// Handles a message that is no reply to a single request in flight. Returns the one behind it.
    // Cold, which the bundles are not: single replies then take fewer instructions.
    #[cold]
    #[inline(never)]
    fn deliver_other<N: Nic>(&mut self, turn: &mut Turn<N>, run: &mut Run) -> Next {
        if run.header.kind == abi::kind::BUNDLE {
            return self.deliver_bundle(turn, run);
        }
        self.end_without_reply(turn, run.service, run.mqueue, &run.header);
        run.advance(&mut turn.services[run.service]);
        run.next_after_others(turn)
    }

    /// The same where a chain of functions sees the replies first: those of a turn together, in [`Self::deliver_shown`].
    #[cold]
    #[inline(never)]
    fn gather_through_chain<N: Nic>(&mut self, turn: &mut Turn<N>, mut run: Run) {
        let service = run.service;
        let mut next = run.next_after_others(turn);
        loop {
            next = match next {
                Next::Reply => {
                    let len = run.header.len as usize;
                    let chain = turn.services[service].chain.as_mut();
                    if chain.is_some_and(|chain| !chain.has_room(len)) {
                        self.deliver_shown(turn, service);
                    }
                    show_reply(&mut turn.services[service], &mut run);
                    run.next_after_others(turn)
                }
                Next::Other => self.deliver_other(turn, &mut run),
                Next::End => break,
            };
        }
        turn.worked |= run.end(&mut turn.services[service], turn.now_ns);
    }

    /// The chain decides about the replies that it has been shown, and those that it lets pass are delivered. It sees each once:
    /// what becomes of it then does not stay in its ring.
    #[inline(never)]
    pub(crate) fn deliver_shown<N: Nic>(&mut self, turn: &mut Turn<N>, service: usize) {
        let share = &mut turn.services[service];
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
                        turn.services[service].stop_sampling(request.mqueue);
                    }
                    self.drop_request(turn, service, &request, reason);
                }
                (Origin::Client(to), None) => {
                    let request = Awaited { to, number, expects };
                    self.settle(turn, service, &request, Ok(reply));
                }
                (Origin::Datagram { .. }, None) => {
                    self.answer_datagram(turn, service, &origin, request.len, reply);
                }
            }
        }
        chain.clear_replies();
        turn.services[service].chain = Some(chain);
    }

    /// Ends a request for a TX message that is not a reply, or a reply that has no recipient.
    #[inline(never)]
    fn end_without_reply<N: Nic>(
        &mut self,
        turn: &mut Turn<N>,
        service: usize,
        mqueue: u32,
        header: &SlotHeader,
    ) {
        let share = &mut turn.services[service];
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
            return self.drop_of_bundle(turn, service, mqueue, (token, header.status));
        }
        let Some(request) = share.sessions.find(token, mqueue).copied() else {
            return share.count_lost(DropReason::StaleToken, 1);
        };
        if dropped && header.status == status::OK && may_be_silent(&request.origin) {
            return self.consume(turn, service, token, &request);
        }
        share.end_request(token, &request, false);
        if !dropped && request.expects == Expects::Nothing {
            return share.count_consumed(1);
        }
        let reason = if dropped { reason_of(header.status) } else { DropReason::ReplyTooLong };
        self.drop_request(turn, service, &request, reason);
    }

    /// The kernel has completed the request and sends no reply.
    fn consume<N: Nic>(
        &mut self,
        turn: &mut Turn<N>,
        service: usize,
        token: Token,
        request: &Request,
    ) {
        let settles =
            matches!(request.origin, Origin::Client(_) if request.expects != Expects::Nothing);
        turn.services[service].end_request(token, request, settles);
        self.complete_silently(turn, service, request);
    }

    /// A request has ended, was completed, and gets no reply.
    fn complete_silently<N: Nic>(&mut self, turn: &mut Turn<N>, service: usize, request: &Request) {
        let Request { origin, number, expects, .. } = *request;
        match origin {
            Origin::Client(to) if expects != Expects::Nothing => {
                // Completes the place in the order of replies, on the worker that has the client.
                let request = Awaited { to, number, expects: Expects::ReplyOrNothing };
                self.settle(turn, service, &request, Ok(&[]));
            }
            _ => turn.services[service].count_consumed(1),
        }
    }

    /// Counts a request that ends without a reply, and reports that to its client.
    pub(crate) fn drop_request<N: Nic>(
        &mut self,
        turn: &mut Turn<N>,
        service: usize,
        request: &Request,
        reason: DropReason,
    ) {
        let share = &turn.services[service];
        let Request { origin, number, expects, .. } = *request;
        share.count_dropped_request(reason);
        if let Origin::Client(to) = origin
            && share.is_answered(expects)
        {
            self.settle(turn, service, &Awaited { to, number, expects }, Err(reason));
        }
    }

    /// Drops requests that have been in flight for too long.
    pub(crate) fn expire_requests<N: Nic>(&mut self, turn: &mut Turn<N>, service: usize) {
        let before_ns = turn.now_ns.saturating_sub(turn.services[service].timeout_ns);
        while let Some(request) = turn.services[service].sessions.expire(before_ns) {
            if !mutants::on("leak_credit") {
                turn.services[service].ended(request.mqueue);
            }
            self.drop_request(turn, service, &request, DropReason::RequestTimeout);
        }
    }

    /// Drops every request of a service that is in flight, regardless of its age.
    pub(crate) fn drop_requests<N: Nic>(
        &mut self,
        turn: &mut Turn<N>,
        service: usize,
        reason: DropReason,
    ) {
        while let Some(request) = turn.services[service].sessions.expire(u64::MAX) {
            turn.services[service].ended(request.mqueue);
            self.drop_request(turn, service, &request, reason);
        }
        let share = &mut turn.services[service];
        if share.replies == Replies::None {
            for mqueue in 0..share.mqueues.len() as u32 {
                let unread = share.drop_unread(mqueue);
                share.count_lost(reason, unread);
            }
        }
    }

    /// After [`crate::service::share::ServiceShare::mark_dead`]: requests in flight on mqueues that are not alive end
    /// with `reason`. These are the requests of the mqueues just marked; the others have none.
    pub(crate) fn end_requests_of_dead_mqueues<N: Nic>(
        &mut self,
        turn: &mut Turn<N>,
        service: usize,
        reason: DropReason,
    ) {
        let mut pass = turn.services[service].sessions.pass();
        while let Some(request) = turn.services[service].end_next_of_dead(&mut pass) {
            self.drop_request(turn, service, &request, reason);
        }
        let share = &mut turn.services[service];
        for mqueue in 0..share.mqueues.len() as u32 {
            if share.loads[mqueue as usize].alive {
                continue;
            }
            let unread = share.drop_unread(mqueue);
            if share.replies == Replies::None {
                share.count_lost(reason, unread);
            }
            // For an absent accelerator this was done before, and the clients may already be those of the next
            // generation.
            if !share.loads[mqueue as usize].absent {
                share.drop_backend_requests_of(mqueue..mqueue + 1, &mut turn.nic);
            }
        }
    }

    /// After the flush: notes which sampled replies the host kernel took.
    pub(crate) fn note_sent<N: Nic>(&mut self, turn: &mut Turn<N>, service: usize) {
        for index in (0..turn.services[service].sampled_count()).rev() {
            let Some((origin, number)) = turn.services[service].sampled_origin(index) else {
                continue;
            };
            let sent = self.has_sent(turn.index, &origin, number);
            let now_ns = if sent == Some(true) { turn.clock_ns() } else { turn.now_ns };
            turn.services[service].note_sent(index, sent, now_ns);
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

/// Shows the first request of each client mqueue to the functions of its backend, all at a time.
fn gather_backend_requests<N: Nic>(turn: &mut Turn<N>, service: usize) {
    let Turn { services, now_ns, clock, .. } = turn;
    let share = &mut services[service];
    if !share.backends.has_paths() {
        return;
    }
    let clock_ns = || clock.as_ref().map_or(*now_ns, |clock| clock());
    for index in 0..share.backends.retried().len() {
        let client = share.backends.retried()[index];
        share.backends.gather_request(client, &clock_ns);
    }
    for drive in 0..share.accelerators.len() {
        for index in 0..share.accelerators[drive].tx_pending.len() {
            if let ShareMqueue::Client(client) = share.tx_pending(drive, index) {
                share.backends.gather_request(client, &clock_ns);
            }
        }
    }
    share.backends.show_gathered(&clock_ns);
}

pub(crate) fn take_backend_requests<N: Nic>(turn: &mut Turn<N>, service: usize, client: u32) {
    let Turn { services, nic, now_ns, clock, scratch, .. } = turn;
    let clock_ns = || clock.as_ref().map_or(*now_ns, |clock| clock());
    services[service].backends.take_backend_requests(nic, client, (*now_ns, &clock_ns), scratch);
    turn.take_socket_transfers(service as u16);
}
