//! Exhale: from TX rings to clients, in bounded steps. What finds no room stays in its ring.

use mqueue::abi::{self, SlotHeader, status};
use mqueue::{LoanError, RingError};
use wire::DropReason;
use wire::admission::reply_allowed;
use wire::framing::Expects;
use wire::nic::{
    Close, Nic, PortIndex, StreamKey, Transport, TxDatagram, UDP_PAYLOAD_MAX, Written,
};
use wire::session::{Origin, Request, Token};

use crate::endpoint::peer::{ANY, Envelope};
use crate::endpoint::ports::Port;
use crate::endpoint::tcp::connection::{Outcome, Reading};
use crate::topology::Replies;
use crate::worker::Worker;

/// A UDP port whose socket takes nothing for this long loses what waits.
const SEND_TIMEOUT_NS: u64 = 100_000_000;

/// From how many waiting replies on those stay whose clients are owed more, and after how long none does, see
/// [`Worker::may_keep`].
const DEFER_FROM: usize = 32;
const DEFER_NS: u64 = 200_000;
/// Behind replies that stay, fewer than this many that may stay too change nothing: they could not make a train long.
const DEFER_MORE: usize = 16;

/// Of replies that wait the first `kept` have stayed: whether all that came behind them may stay as well, so that trains need
/// not be put together anew.
fn nothing_to_send(waiting: &[TxDatagram], kept: usize) -> bool {
    let stays = |new: &[TxDatagram]| new.len() < DEFER_MORE && new.iter().all(|d| d.more);
    kept > 0 && waiting.get(kept..).is_some_and(stays)
}

/// What became of one TX message.
enum Forwarded {
    /// It is done with.
    Done,
    /// There is no room where it goes: it stays in the ring.
    Blocked,
    /// There was no room, now there is.
    Again,
}

impl<N: Nic> Worker<N> {
    /// Reads what the head of a server mqueue's TX ring has shown, or blocks at the first reply without room; where the
    /// head does not tell the truth, looking ends where nothing is. It does not look for more: behind the last message
    /// lies a line that nobody has used for a lap, and what comes meanwhile moves the head and is met next turn.
    /// With `u64::MAX` all that is there is read, a lap at most: no slot is given back before the end.
    pub(crate) fn gather_replies(&mut self, share: usize, mqueue: u32, mut shown: u64) {
        if !self.services[share].loads[mqueue as usize].alive {
            return;
        }
        let ahead =
            if shown > 1 { self.services[share].fetch_more(mqueue, shown) } else { u64::MAX };
        let before = self.services[share].outstanding_on(mqueue);
        while shown > 0 {
            if shown > ahead {
                self.services[share].fetch(mqueue, ahead);
            }
            let entry = &mut self.services[share].mqueues[mqueue as usize];
            match entry.tx.peek() {
                Ok(Some(header)) => match self.forward(share, mqueue, &header) {
                    Forwarded::Done => self.services[share].mqueues[mqueue as usize].tx.advance(),
                    Forwarded::Again => continue,
                    Forwarded::Blocked => {
                        let share = &mut self.services[share];
                        let entry = &mut share.mqueues[mqueue as usize];
                        if !std::mem::replace(&mut entry.is_blocked, true) {
                            share.blocked.push(mqueue);
                        }
                        break;
                    }
                },
                Ok(None) => break,
                Err(RingError::BadHeader) => {
                    entry.tx.advance();
                    self.services[share].counters.drop_one(DropReason::BadMessage);
                }
                Err(RingError::Corrupt) => {
                    entry.tx_corrupt = true;
                    return;
                }
            }
            shown -= 1;
        }
        let entry = &mut self.services[share];
        self.work |= entry.mqueues[mqueue as usize].tx.release();
        entry.gathered(mqueue, before, self.now_ns);
    }

    /// The forwarder: what a TX message is and where it goes. This is the way of most replies: to whoever
    /// sent a datagram, or to a memory client of this worker, with one copy.
    // Always inline: it is called in one place, once for each reply.
    #[inline(always)]
    fn forward(&mut self, share: usize, mqueue: u32, header: &SlotHeader) -> Forwarded {
        let token = Token(header.token);
        if self.services[share].mqueues[mqueue as usize].sampled == token {
            self.followed_reply(share, mqueue, token);
        }
        let entry = &mut self.services[share];
        let len = header.len as usize;
        if header.kind == abi::kind::MESSAGE
            && let Some(request) = entry.sessions.find(token, mqueue)
            && request.expects != Expects::Nothing
            && len <= entry.max_reply_bytes
        {
            let ring = &entry.mqueues[mqueue as usize].tx;
            match &request.origin {
                Origin::Datagram { port, peer, local } if len <= UDP_PAYLOAD_MAX => {
                    let port = &mut self.ports[*port as usize];
                    let allowed = reply_allowed(request.len as usize, len, port.reply_ratio);
                    let allowed = allowed || mutants::on("amplify");
                    if allowed && port.tx.room_for(len) {
                        let copy = |bytes: &mut [u8]| ring.copy_out(header, bytes);
                        if !port.tx.push_if(*peer, *local, len, copy) {
                            return Forwarded::Blocked;
                        }
                        if entry.sessions.has_others(token) {
                            port.tx.more_follows();
                        }
                        entry.sessions.end_found(token);
                        entry.ended(mqueue);
                        entry.counters.replied_bytes.add(len as u64);
                        return Forwarded::Done;
                    }
                }
                Origin::Memory { worker, client, generation }
                    if *worker == self.index
                        && self.memory.relay(
                            (*client, *generation, request.number),
                            ring,
                            header,
                        ) =>
                {
                    entry.sessions.end_found(token);
                    entry.ended(mqueue);
                    entry.counters.replied.one();
                    entry.counters.replied_bytes.add(len as u64);
                    return Forwarded::Done;
                }
                _ => {}
            }
        }
        self.forward_other(share, mqueue, header)
    }

    /// Everything else that a TX message may be.
    #[inline(never)]
    fn forward_other(&mut self, share: usize, mqueue: u32, header: &SlotHeader) -> Forwarded {
        let entry = &mut self.services[share];
        let token = Token(header.token);
        if header.kind != abi::kind::MESSAGE && header.kind != abi::kind::DROP {
            entry.counters.drop_one(DropReason::BadMessage);
            return Forwarded::Done;
        }
        let dropped = header.kind == abi::kind::DROP;
        if entry.replies == Replies::None {
            if dropped && header.status == status::OK {
                return Forwarded::Done;
            }
            let reason = if dropped { DropReason::ConsumedDrop } else { DropReason::UnwantedReply };
            entry.counters.drop_one(reason);
            return Forwarded::Done;
        }
        let Some(request) = entry.sessions.find(token, mqueue).copied() else {
            entry.counters.drop_one(DropReason::StaleToken);
            return Forwarded::Done;
        };
        if dropped
            && header.status == status::OK
            && !matches!(request.origin, Origin::Memory { .. })
        {
            return self.consume(share, token, &request);
        }
        if dropped {
            let reason = match header.status {
                status::BAD_LENGTH => DropReason::BadLength,
                status::TOO_LONG => DropReason::ReplyTooLong,
                _ => DropReason::KernelDrop,
            };
            return self.end_lost(share, token, &request, reason);
        }
        if request.expects == Expects::Nothing {
            self.end_silently(share, token, &request);
            self.services[share].counters.consumed.one();
            return Forwarded::Done;
        }
        let len = header.len as usize;
        if len > entry.max_reply_bytes {
            return self.end_lost(share, token, &request, DropReason::ReplyTooLong);
        }
        if let Origin::Datagram { port, .. } = request.origin {
            return self.make_room(share, port, token, &request, len);
        }
        let mut scratch = std::mem::take(&mut self.scratch);
        let payload = &mut scratch[..len];
        let arrived = self.services[share].mqueues[mqueue as usize].tx.copy_out(header, payload);
        let forwarded =
            if arrived { self.reply(share, token, &request, payload) } else { Forwarded::Blocked };
        self.scratch = scratch;
        forwarded
    }

    /// A reply that cannot be sent as a datagram now, or never.
    fn make_room(
        &mut self,
        share: usize,
        port: PortIndex,
        token: Token,
        request: &Request,
        len: usize,
    ) -> Forwarded {
        if len > UDP_PAYLOAD_MAX {
            return self.end_lost(share, token, request, DropReason::ReplyTooLong);
        }
        if !reply_allowed(request.len as usize, len, self.ports[port as usize].reply_ratio) {
            return self.end_lost(share, token, request, DropReason::ReplyRatio);
        }
        // What may stay does, if there is room without it.
        for patient in [self.may_defer(port.into()), false] {
            self.send_datagrams(port, patient);
            let tx = &mut self.ports[port as usize].tx;
            tx.compact();
            if tx.room_for(len) {
                return Forwarded::Again;
            }
        }
        Forwarded::Blocked
    }

    /// The kernel has completed the request and sends no reply. (A shared-memory client gets an outcome that says that its
    /// request was dropped: each of its requests has an outcome.)
    fn consume(&mut self, share: usize, token: Token, request: &Request) -> Forwarded {
        if request.expects != Expects::Nothing && matches!(request.origin, Origin::Stream { .. }) {
            // The place in the order of replies is done, on whatever worker it is.
            let request = Request { expects: Expects::ReplyOrNothing, ..*request };
            return self.reply(share, token, &request, &[]);
        }
        self.end_silently(share, token, request);
        self.services[share].counters.consumed.one();
        Forwarded::Done
    }

    fn end(&mut self, share: usize, token: Token, request: &Request) {
        let ended = self.services[share].sessions.end(token, request.mqueue);
        debug_assert!(ended.is_some());
        self.services[share].ended(request.mqueue);
    }

    /// Ends a request that gets no reply.
    fn end_silently(&mut self, share: usize, token: Token, request: &Request) {
        self.end(share, token, request);
        if self.services[share].mqueues[request.mqueue as usize].sampled == token {
            self.services[share].unfollow(request.mqueue);
        }
    }

    fn end_lost(
        &mut self,
        share: usize,
        token: Token,
        request: &Request,
        reason: DropReason,
    ) -> Forwarded {
        self.end_silently(share, token, request);
        self.drop_request(share, &request.origin, request.number, request.expects, reason);
        Forwarded::Done
    }

    fn reply(
        &mut self,
        share: usize,
        token: Token,
        request: &Request,
        payload: &[u8],
    ) -> Forwarded {
        match request.origin {
            Origin::Datagram { .. } => unreachable!("forward() knows them"),
            Origin::Stream { worker, .. } | Origin::Memory { worker, .. }
                if worker == self.index =>
            {
                self.end(share, token, request);
                self.deliver(share, &request.origin, request.number, request.expects, payload);
            }
            Origin::Stream { worker, .. } | Origin::Memory { worker, .. } => {
                let envelope = Envelope {
                    service: share as u16,
                    mqueue: ANY,
                    expects: request.expects,
                    origin: request.origin,
                    number: request.number,
                };
                let Some(link) = &mut self.links[worker as usize][share] else {
                    return Forwarded::Blocked;
                };
                match link.reply(&envelope, Ok(payload), &mut self.envelope) {
                    Ok(()) => {
                        self.end(share, token, request);
                        self.services[share].counters.replies_handed_out.one();
                    }
                    Err(LoanError::Full) => return Forwarded::Blocked,
                    Err(_) => {
                        return self.end_lost(share, token, request, DropReason::ReplyTooLong);
                    }
                }
            }
        }
        Forwarded::Done
    }

    /// A reply for a connection or memory client of this worker; its request's token is gone.
    #[inline]
    pub(crate) fn deliver(
        &mut self,
        share: usize,
        origin: &Origin,
        number: u64,
        expects: Expects,
        payload: &[u8],
    ) {
        match origin {
            Origin::Stream { .. } => {
                self.deliver_to_stream(share, origin, number, expects, payload)
            }
            Origin::Memory { .. } => self.deliver_to_shm(share, origin, number, Ok(payload)),
            Origin::Datagram { .. } => {}
        }
    }

    fn deliver_to_stream(
        &mut self,
        share: usize,
        origin: &Origin,
        number: u64,
        expects: Expects,
        payload: &[u8],
    ) {
        let Origin::Stream { key, generation, .. } = *origin else { return };
        let framing = self.services[share].framing;
        let Some(connection) = self.connections.in_life(key, generation).filter(|c| !c.closing)
        else {
            return self.services[share].counters.drop_one(DropReason::ClientGone);
        };
        let framing = framing.as_client_writes(connection.crlf);
        if expects == Expects::ReplyOrNothing && payload.is_empty() {
            // The kernel chose silence: nothing goes on the wire, the place in the order is done.
            self.services[share].counters.consumed.one();
            return self.settle(key, number, Outcome::Nothing);
        }
        if connection.is_due(number) {
            let len = payload.len() as u32;
            let encode = |out: &mut Vec<u8>| framing.encode_reply(payload, out);
            let Self { connections, pool, .. } = self;
            let replied = connections.change(key, |c| c.reply_now(len, pool, encode));
            if replied.is_some_and(|r| r.is_err()) {
                self.services[share].counters.drop_one(DropReason::ReplyUnframable);
                return self.settle_lost(
                    share,
                    origin,
                    number,
                    expects,
                    DropReason::ReplyUnframable,
                );
            }
            return self.settled(key, share);
        }
        if self.connections.early_bytes + payload.len() > self.early_bytes_max {
            self.services[share].counters.drop_one(DropReason::ReplyMemory);
            return self.settle_lost(share, origin, number, expects, DropReason::ReplyMemory);
        }
        let mut encoded = self.pool.take();
        if framing.encode_reply(payload, &mut encoded).is_err() {
            self.pool.give(encoded);
            self.services[share].counters.drop_one(DropReason::ReplyUnframable);
            return self.settle_lost(share, origin, number, expects, DropReason::ReplyUnframable);
        }
        self.settle(key, number, Outcome::Reply { encoded, payload: payload.len() as u32 });
    }

    /// Counts a request that ends without a reply, and tells its connection.
    pub(crate) fn drop_request(
        &mut self,
        share: usize,
        origin: &Origin,
        number: u64,
        expects: Expects,
        reason: DropReason,
    ) {
        if !mutants::on("lose_drop") || reason != DropReason::RequestTimeout {
            self.services[share].counters.drop_one(reason);
        }
        if expects == Expects::Nothing || self.services[share].replies == Replies::None {
            return;
        }
        match *origin {
            Origin::Datagram { .. } => {}
            Origin::Stream { worker, .. } | Origin::Memory { worker, .. }
                if worker == self.index =>
            {
                self.settle_lost(share, origin, number, expects, reason);
            }
            Origin::Stream { worker, .. } | Origin::Memory { worker, .. } => {
                let envelope = Envelope {
                    service: share as u16,
                    mqueue: ANY,
                    expects,
                    origin: *origin,
                    number,
                };
                let told = self.links[worker as usize][share]
                    .as_mut()
                    .is_some_and(|l| l.reply(&envelope, Err(reason), &mut self.envelope).is_ok());
                if !told {
                    self.pending_losses.push((worker, envelope, reason));
                }
            }
        }
    }

    /// Sends the news of lost requests to the workers that own their connections, as far as there
    /// is room.
    pub(crate) fn retry_losses(&mut self) {
        let Self { pending_losses, links, envelope: scratch, .. } = self;
        pending_losses.retain(|(worker, envelope, reason)| {
            match &mut links[*worker as usize][envelope.service as usize] {
                Some(link) => link.reply(envelope, Err(*reason), scratch).is_err(),
                None => false,
            }
        });
    }

    /// Tells a connection or memory client of this worker that a request of it was lost (and counted).
    pub(crate) fn settle_lost(
        &mut self,
        share: usize,
        origin: &Origin,
        number: u64,
        expects: Expects,
        reason: DropReason,
    ) {
        if let Origin::Memory { .. } = origin {
            return self.deliver_to_shm(share, origin, number, Err(reason));
        }
        let Origin::Stream { key, generation, .. } = *origin else { return };
        let kernel_choice = matches!(reason, DropReason::KernelDrop | DropReason::BadLength);
        let outcome = if expects == Expects::ReplyOrNothing && kernel_choice {
            Outcome::Nothing
        } else {
            self.outcome_of_loss(share, reason)
        };
        if self.connections.in_life(key, generation).is_some_and(|c| !c.closing) {
            self.settle(key, number, outcome);
        }
    }

    /// Records an outcome on a connection of this worker.
    pub(crate) fn settle(&mut self, key: StreamKey, sequence: u64, outcome: Outcome) {
        let Some(connection) = self.connections.at(key) else { return };
        let service = connection.service as usize;
        let Self { connections, pool, .. } = self;
        connections.change(key, |c| c.settle(sequence, outcome, pool));
        self.settled(key, service);
    }

    /// After an outcome: the connection may have bytes to write, a free place, or an end.
    fn settled(&mut self, key: StreamKey, share: usize) {
        let connection = self.connections.at(key).expect("the caller looked");
        let lost = connection.take_lost();
        self.services[share].counters.drop_many(DropReason::ClientGone, lost);
        self.list_to_write(key);
    }

    /// Sends what the turn produced: datagrams (if `patient` some may stay), stream bytes, backend requests, handed-over
    /// messages.
    pub(crate) fn flush(&mut self, patient: bool) {
        for port in 0..self.ports.len() {
            if self.ports[port].transport == Transport::Udp && !self.ports[port].tx.is_empty() {
                let patient = patient && self.may_defer(port);
                let Port { tx, kept, .. } = &self.ports[port];
                if !(patient && nothing_to_send(tx.waiting(), *kept)) {
                    self.send_datagrams(port as u16, patient);
                }
            }
        }
        let listed = self.to_write.len();
        for index in 0..listed {
            // Which may list the connection again, behind the others.
            self.write_stream(self.to_write[index]);
        }
        self.to_write.drain(..listed);
        self.memory.publish();
        for share in 0..self.services.len() {
            let Self { services, nic, now_ns, .. } = self;
            services[share].flush_backends(nic, *now_ns);
        }
        for worker in 0..self.links.len() {
            let mut published = false;
            for link in self.links[worker].iter_mut().flatten() {
                published |= link.publish();
            }
            if published {
                self.fabric.wake(worker as u16);
            }
        }
    }

    /// Whether replies whose clients are owed more may wait for those: many are there, and the worker has work, so the next
    /// turn comes at once and may bring them. They leave with the first turn that finds nothing to do, or that ends [`KEEP_NS`]
    /// after the first of them was kept, or begins a drain.
    fn may_defer(&self, port: usize) -> bool {
        let port = &self.ports[port];
        if !self.work || self.draining || port.tx.waiting().len() < DEFER_FROM {
            return false;
        }
        // Of what none was kept yet all became ready in this turn. A clock is read, for a turn may be long, and the next
        // one too.
        let since_ns = if port.kept_since_ns == 0 { self.now_ns } else { port.kept_since_ns };
        let recent = self.stage_ns().saturating_sub(since_ns) < DEFER_NS;
        recent || mutants::on("keep_for_ever")
    }

    fn send_datagrams(&mut self, port: u16, patient: bool) {
        let (now_ns, turn) = (self.now_ns, self.counters.turns.value());
        let Self { nic, ports, services, .. } = self;
        let entry = &mut ports[port as usize];
        if entry.refused_in == turn {
            return;
        }
        let by = port + u16::from(mutants::on("answer_from_another_port"));
        entry.tx.set_patient(patient);
        let outcome = nic.send(by, &mut entry.tx);
        let unsent = entry.tx.waiting().len() - outcome.kept;
        entry.kept = if unsent == 0 { outcome.kept } else { 0 };
        if unsent > 0 {
            entry.refused_in = turn;
        }
        if entry.tx.is_empty() {
            entry.kept_since_ns = 0;
        } else if outcome.kept > 0 && entry.kept_since_ns == 0 {
            entry.kept_since_ns = now_ns.max(1);
        }
        let counters = &services[entry.service as usize].counters;
        counters.replied.add(outcome.sent as u64);
        counters.drop_many(DropReason::SendFailed, outcome.refused as u64);
        if entry.tx.is_empty() || outcome.sent > 0 {
            entry.full_since_ns = 0;
        } else if unsent == 0 {
            // Nothing was tried.
        } else if entry.full_since_ns == 0 {
            entry.full_since_ns = now_ns.max(1);
        } else if now_ns - entry.full_since_ns > SEND_TIMEOUT_NS {
            let waiting = entry.tx.waiting().len();
            counters.drop_many(DropReason::SendFailed, waiting as u64);
            entry.tx.advance(waiting);
            entry.full_since_ns = 0;
        }
    }

    fn write_stream(&mut self, key: StreamKey) {
        let Some(connection) = self.connections.at(key) else { return };
        connection.dirty = false;
        let service = connection.service as usize;
        let unsent = connection.unsent();
        if !unsent.is_empty() || connection.owed_replies() > 0 {
            // A reply may have no bytes at all (`raw`, `fixed`): it is sent by coming to its turn.
            let nothing = unsent.is_empty();
            match if nothing { Written::Bytes(0) } else { self.nic.write(key, unsent) } {
                Written::Bytes(count) => {
                    let partial = count < unsent.len();
                    connection.blocked_since_ns = if partial { self.now_ns.max(1) } else { 0 };
                    connection.last_message_ns = self.now_ns;
                    let Self { connections, pool, .. } = self;
                    let sent = connections.change(key, |c| c.sent(count, pool)).unwrap_or_default();
                    let counters = &self.services[service].counters;
                    counters.replied.add(sent.replies);
                    counters.replied_bytes.add(sent.payload);
                    if count > 0 && partial {
                        // The host kernel may take the rest at once; a Full next turn ends this.
                        self.list_to_write(key);
                    }
                }
                Written::Full => {
                    if connection.blocked_since_ns == 0 {
                        connection.blocked_since_ns = self.now_ns.max(1);
                    }
                }
                Written::Broken => return self.close_connection(key, Close::Reset),
            }
        }
        self.close_if_done(key);
        // A place may have become free for a message that waits.
        if self.connections.at(key).is_some_and(|c| c.reading == Reading::Stalled) {
            self.list_to_read(key);
        }
    }

    /// Closes a connection whose client has nothing more to say and is owed nothing.
    pub(crate) fn close_if_done(&mut self, key: StreamKey) {
        let Some(connection) = self.connections.at(key) else { return };
        let flushed = connection.unsent().is_empty() || mutants::on("close_unflushed");
        let ended = connection.reading == Reading::Ended && connection.unsettled() == 0;
        if flushed && (connection.closing || ended) {
            self.close_connection(key, Close::Graceful);
        }
    }

    /// Closes a connection; replies that were ready are lost as `client_gone`. Requests still under
    /// way end when their replies come and find nobody.
    pub(crate) fn close_connection(&mut self, key: StreamKey, how: Close) {
        self.end_connection(key, how, DropReason::ClientGone);
    }

    /// Closes a connection whose waiting replies are lost for `reason`.
    pub(crate) fn end_connection(&mut self, key: StreamKey, how: Close, reason: DropReason) {
        let Some(connection) = self.connections.at(key) else { return };
        let service = connection.service as usize;
        let how = if connection.unsent().is_empty() { how } else { Close::Reset };
        let lost = self.connections.close(key, &mut self.pool);
        self.nic.close(key, how);
        self.fabric.release_connection(self.index);
        let counters = &self.services[service].counters;
        counters.connections_closed.one();
        counters.drop_many(reason, lost);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn trains_are_put_together_anew_for_who_is_owed_no_more_and_for_many() {
        let departure = |more| {
            let peer = ([127, 0, 0, 1], 9).into();
            TxDatagram { peer, local: None, offset: 0, len: 8, more }
        };
        let mut waiting = vec![departure(true); 40];
        assert!(!nothing_to_send(&waiting, 0), "nobody has looked yet");
        assert!(nothing_to_send(&waiting, 40));
        waiting.extend(vec![departure(true); DEFER_MORE - 1]);
        assert!(nothing_to_send(&waiting, 40));
        waiting.push(departure(true));
        assert!(!nothing_to_send(&waiting, 40), "a train may be long now");
        assert!(!nothing_to_send(&[&waiting[..41], &[departure(false)]].concat(), 40));
        assert!(!nothing_to_send(&waiting[..39], 40), "those that stayed have gone");
    }
}
