//! Bundles of a service share: requests that one client sent at once and that go to a block as one
//! slot, in memory of the worker's pool.
//!
//! One choice of an mqueue, one entry of the table of requests, one copy and one slot serve a whole
//! bundle. What is true of a bundle is in the engine's memory: its client, its tokens, its buffer.
//! The accelerator can write all of the pool, and what it writes is copied first and belongs to no
//! other client.

use std::num::NonZero;
use std::sync::Arc;

use mqueue::abi::{Bundle, BundleReply, kind};
use mqueue::{Buffer, Head, LoanError, MappedMemory, Pool, Producer, ReplyArea};
use wire::DropReason;
use wire::framing::{Framing, FramingError};
use wire::nic::SharedBytes;
use wire::session::{BundleRequests, Token};

use crate::base::arrival::Arrival;
use crate::service::bundle::messages::Messages;
use crate::service::bundle::received::NOT_IN_PLACE;
use crate::service::bundle::run::Burst;
use crate::service::bundle::table::{
    BUFFER_BYTES_MAX, Completion, DESCRIPTOR_BYTES, LINE, NewBundle, NoBundle,
};
use crate::service::share::{ServiceShare, committed};

impl ServiceShare {
    /// Whether any requests go as bundles.
    #[inline]
    pub(crate) fn has_bundles(&self) -> bool {
        self.bundles.from != u32::MAX
    }

    /// Number of requests of one length from which on they go as bundles, in the burst that has [begun](Self::begin_burst).
    #[inline]
    pub(crate) fn bundles_from(&self) -> usize {
        if self.dispatcher.has_bundles() { self.bundles.from as usize } else { usize::MAX }
    }

    /// A burst of this many messages is about to be routed: chooses how they are spread. Returns whether some of them may go
    /// as bundles.
    // Not inline: the loop over single messages would take more instructions.
    #[inline(never)]
    pub(crate) fn begin_burst(&mut self, messages: usize, now_ns: u64) -> bool {
        self.dispatcher.burst(messages);
        if messages < self.bundles.from as usize {
            return false;
        }
        let run = if self.bundles.forced { None } else { Some(self.bundle_run(messages, now_ns)) };
        self.dispatcher.bundle(run);
        self.dispatcher.has_bundles()
    }

    /// See [`crate::service::bundle::choice`].
    fn bundle_run(&mut self, messages: usize, now_ns: u64) -> u32 {
        let moving = self.alive - self.still.mqueues.min(self.alive);
        let burst = Burst {
            messages: messages as u32,
            unanswered: self.sessions.live().saturating_sub(self.still.requests),
            mqueues: self.dispatcher.mqueues_of_flow(moving),
            off_thread: self.bundles.off_thread,
            in_turn: self.dispatcher.is_in_turn(),
            run: self.dispatcher.run(),
            handled_ns: self.bundles.handled.begin(messages as u32, now_ns),
        };
        let (run, is_trial) = self.bundles.choice.begin(&burst, now_ns);
        if is_trial {
            self.sampler.hasten();
            self.dispatcher.end_run();
        }
        run
    }

    /// Writes the first of these messages into an mqueue's RX ring, as one bundle. Returns how many; `Err` if they have to go as
    /// single messages. The caller counts them as received.
    pub(crate) fn accept_bundle(
        &mut self,
        arrival: &Arrival,
        messages: &impl Messages,
    ) -> Result<u32, NoBundle> {
        if self.sampler.is_next() {
            return Err(NoBundle::SingleFirst);
        }
        let (len, stride) = (messages.len_of(0), messages.stride() as usize);
        if len as usize >= self.takes_below {
            return Err(NoBundle::Singles);
        }
        let most = self.bundles.fit(BUFFER_BYTES_MAX, stride).min(messages.count());
        if most < 2 {
            return Err(NoBundle::Singles);
        }
        let Some((number, count)) = self.route_run(arrival.flow, most) else {
            return Err(NoBundle::Singles);
        };
        let attachment = usize::from(self.mqueues[number as usize].attachment);
        let Some(pool) = &mut self.accelerators[attachment].pool else {
            return Err(NoBundle::Singles);
        };
        let bytes = |count: u32| {
            let payload = (count as usize * stride).next_multiple_of(LINE);
            (payload, payload + count as usize * self.bundles.reply_stride)
        };
        // A pool without large buffers takes shorter bundles.
        let count = count.min(self.bundles.fit(pool.largest_free() as usize, stride));
        let (reply_at, needed) = bytes(count);
        let buffer = if count < 2 { None } else { pool.take(needed as u32) };
        let Some(buffer) = buffer else {
            self.counters.pool_dry.one();
            return Err(NoBundle::Singles);
        };
        messages.write(pool, &buffer, count);
        let numbers = messages.numbers().map(|numbers| &numbers[..count as usize]);
        let bundle = NewBundle {
            offset: buffer.offset(),
            stride: stride as u32,
            count,
            len,
            last_len: messages.len_of(count - 1),
            received_in: NOT_IN_PLACE,
        };
        self.push_bundle(arrival, number, &bundle, (buffer, reply_at as u32), numbers)
    }

    /// Writes a bundle into an mqueue's RX ring. The area for its replies is in `buffer`, from a byte on. Returns the number of
    /// messages.
    pub(super) fn push_bundle(
        &mut self,
        arrival: &Arrival,
        mqueue: u32,
        bundle: &NewBundle,
        (buffer, reply_at): (Buffer, u32),
        numbers: Option<&[u64]>,
    ) -> Result<u32, NoBundle> {
        let NewBundle { offset, stride, count, len, last_len, received_in } = *bundle;
        let requests = BundleRequests {
            origin: arrival.origin,
            number: arrival.number,
            mqueue,
            count,
            len,
            last_len,
            received_ns: arrival.received_ns,
            expects: arrival.expects,
            reply_at,
            reply_bytes: count * self.bundles.reply_stride as u32,
        };
        let Some(token) = self.sessions.issue_bundle(&requests) else {
            let attachment = usize::from(self.mqueues[mqueue as usize].attachment);
            if let Some(pool) = &mut self.accelerators[attachment].pool {
                pool.give_back(buffer);
            }
            return Err(NoBundle::Singles);
        };
        if let Some(numbers) = numbers {
            self.sessions.set_numbers(token, numbers);
        }
        let bundle = Bundle {
            offset,
            reply_offset: buffer.offset() + u64::from(reply_at),
            stride,
            count,
            len,
            last_len,
            reply_bytes: requests.reply_bytes,
            pad: 0,
        };
        self.bundles.keep(token, buffer, received_in);
        let entry = &mut self.mqueues[mqueue as usize];
        if let Err(error) = entry.rx.push_bundle(token.0, &bundle) {
            self.end_bundle(token, mqueue, u64::MAX);
            self.refused_bundle(mqueue, error);
            return Err(NoBundle::Singles);
        }
        let (load, len) = (&mut self.loads[mqueue as usize], DESCRIPTOR_BYTES as u64);
        let waiting = load.outstanding;
        let run = self.bundles.choice.bundle_sent((mqueue, count), waiting, arrival.received_ns);
        if run.is_some() {
            self.dispatcher.bundle(run);
        }
        committed(entry, load, &mut self.accelerators, arrival.received_ns, count, len);
        self.counters.accepted.add(count.into());
        self.counters.bundles.one();
        self.counters.bundled.add(count.into());
        self.sampler.pass(count);
        Ok(count)
    }

    /// The RX ring did not take a bundle.
    #[cold]
    fn refused_bundle(&mut self, number: u32, error: LoanError) {
        let reason = self.refused(number, Token(0), DESCRIPTOR_BYTES, error);
        if reason == DropReason::MqueueDead {
            self.mqueues[number as usize].tx_corrupt = true;
        }
    }

    /// The accelerator has ended messages of a bundle: a bit for each. Returns those that awaited an outcome.
    #[inline]
    pub(crate) fn end_bundle(&mut self, token: Token, mqueue: u32, messages: u64) -> u64 {
        let (awaited, returns) = self.sessions.end_of_bundle(token, mqueue, messages);
        if returns || mutants::on("return_buffer_early") {
            self.return_buffer(token, mqueue);
        }
        awaited
    }

    /// The buffer of a bundle is not in use any more.
    #[inline]
    fn return_buffer(&mut self, token: Token, mqueue: u32) {
        let attachment = usize::from(self.mqueues[mqueue as usize].attachment);
        let (buffer, received) = self.bundles.take(token);
        if let Some(pool) = &mut self.accelerators[attachment].pool {
            [buffer, received].into_iter().flatten().for_each(|buffer| pool.give_back(buffer));
        }
    }

    /// The region that replies leave from in place, and where byte `at` of a bundle's buffer is there.
    #[inline]
    pub(crate) fn place_in_pool(
        &self,
        token: Token,
        mqueue: u32,
        at: u32,
    ) -> Option<(&Arc<dyn SharedBytes>, NonZero<u64>)> {
        let attachment = usize::from(self.mqueues[mqueue as usize].attachment);
        let memory = self.accelerators[attachment].pool_memory.as_ref()?;
        let buffer = self.bundles.buffer(token)?;
        Some((memory, NonZero::new(buffer.offset() + u64::from(at))?))
    }

    /// Replies that left from a bundle's buffer, see [`wire::session::Sessions::hold_bundle`], have left.
    #[inline]
    pub(crate) fn release_bundle(&mut self, token: Token, mqueue: u32) {
        if self.sessions.release_bundle(token) {
            self.return_buffer(token, mqueue);
        }
    }

    /// The same, counted for the mqueue.
    #[inline]
    pub(crate) fn end_messages(&mut self, token: Token, mqueue: u32, messages: u64) -> u64 {
        let awaited = self.end_bundle(token, mqueue, messages);
        self.loads[mqueue as usize].outstanding -= awaited.count_ones();
        awaited
    }

    /// Checks the completion at the front of an mqueue's TX ring. Answers that no request awaits are counted here. `Err`: it is
    /// lost for this reason, with this number of messages.
    pub(crate) fn completion(
        &mut self,
        token: Token,
        mqueue: u32,
        reply: &BundleReply,
    ) -> Result<Completion, (DropReason, u64)> {
        // Of a completion that found too little room before, these messages are done.
        let answered = reply.answered & !self.mqueues[mqueue as usize].completed;
        let Some(bundle) = self.sessions.find_bundle(token, mqueue) else {
            return Err((DropReason::StaleToken, answered.count_ones().max(1).into()));
        };
        let (requests, live) = (bundle.requests(), bundle.live());
        let area_at = requests.reply_at;
        let buffer = self.bundles.buffer(token);
        let area = buffer.map(|buffer| ReplyArea {
            offset: buffer.offset() + u64::from(area_at),
            bytes: requests.reply_bytes,
        });
        let replies = area.and_then(|area| reply.check(area, self.max_reply_bytes as u32));
        let Some(replies) = replies.filter(|_| token.message() == 0) else {
            return Err((DropReason::BadMessage, 1));
        };
        let unawaited = answered & !live;
        if unawaited != 0 {
            self.count_lost(DropReason::StaleToken, unawaited.count_ones().into());
            self.mqueues[mqueue as usize].completed |= unawaited;
            // A late answer ends the message for the block.
            self.end_bundle(token, mqueue, unawaited);
        }
        Ok(Completion { token, replies, area_at, messages: answered & live })
    }

    /// Copies bytes out of a bundle's buffer. They may change meanwhile.
    #[inline]
    pub(crate) fn read_replies(&self, token: Token, mqueue: u32, at: u32, into: &mut [u8]) {
        let attachment = usize::from(self.mqueues[mqueue as usize].attachment);
        let buffer = self.bundles.buffer(token);
        if let (Some(buffer), Some(pool)) = (buffer, &self.accelerators[attachment].pool) {
            pool.read(buffer, at, into);
        }
    }

    /// Puts replies of a completion into a client's ring, from number `place` on, one for each tag. Returns how many: fewer if there are fewer free
    /// slots, none if they do not fit into slots.
    #[inline]
    pub(crate) fn push_replies(
        &self,
        (mqueue, completion, place): (u32, &Completion, u32),
        ring: &mut Producer<MappedMemory>,
        tags: &[u64],
    ) -> Result<u32, LoanError> {
        let attachment = usize::from(self.mqueues[mqueue as usize].attachment);
        let buffer = self.bundles.buffer(completion.token);
        let pool = self.accelerators[attachment].pool.as_ref();
        let Some((buffer, pool)) = buffer.zip(pool) else { return Ok(0) };
        let Completion { replies, .. } = completion;
        let head = Head { kind: kind::MESSAGE, ..Head::default() };
        let at = (completion.at(place), replies.stride(), replies.len());
        pool.push_to(ring, (head, tags), buffer, at)
    }

    /// Appends `count` replies of a completion, from number `place` on, as they go to a client over a stream. On an error nothing is appended.
    pub(crate) fn encode_replies(
        &self,
        (mqueue, completion, place): (u32, &Completion, u32),
        count: u32,
        framing: Framing,
        (out, scratch): (&mut Vec<u8>, &mut [u8]),
    ) -> Result<(), FramingError> {
        let (token, len) = (completion.token, completion.replies.len() as usize);
        let from = out.len();
        if framing.replies_are_plain()
            && (count == 1 || completion.replies.stride() as usize == len)
        {
            out.resize(from + count as usize * len, 0);
            self.read_replies(token, mqueue, completion.at(place), &mut out[from..]);
            return Ok(());
        }
        for place in place..place + count {
            let reply = &mut scratch[..len];
            self.read_replies(token, mqueue, completion.at(place), reply);
            if let Err(error) = framing.encode_reply(reply, out) {
                out.truncate(from);
                return Err(error);
            }
        }
        Ok(())
    }

    /// See [`crate::Worker::bundles_of`].
    pub(crate) fn bundles_in_use(&self) -> (u32, u32, u32) {
        let taken = |pool: &Pool<MappedMemory>| -> u32 {
            pool.buffers().iter().map(|(all, free)| all - free).sum()
        };
        let pools = self.accelerators.iter().filter_map(|accelerator| accelerator.pool.as_deref());
        (self.sessions.bundles(), pools.map(taken).sum(), self.bundles.received.in_use())
    }

    /// The generation of an accelerator has ended, and the requests of its mqueues have: its pool is gone.
    pub(crate) fn forget_bundles(&mut self, accelerator: usize) {
        let mqueues = self.mqueues_of(accelerator);
        let bundles = &mut self.bundles;
        self.sessions.forget_bundles(&mqueues, |bundle| bundles.forget(bundle));
        for mqueue in mqueues {
            self.mqueues[mqueue as usize].completed = 0;
        }
        let accelerator = &mut self.accelerators[accelerator];
        (accelerator.pool, accelerator.pool_memory) = (None, None);
    }
}
