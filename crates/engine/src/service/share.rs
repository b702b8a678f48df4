//! A service share: one worker's share of one service, with its mqueues, tokens, dispatcher and counters.

mod bundles;
mod credit;
mod drain;
mod generation;
mod in_place;
mod notices;
mod path;
mod requests;
mod stages;

use std::ops::Range;
use std::sync::Arc;

use mqueue::{Head, LoanError, MappedMemory, Pool, abi};
use wire::DropReason;
use wire::framing::Framing;
use wire::nic::SharedBytes;
use wire::session::{Pass, Request, Sessions, Token};

use crate::base::accelerator::Blocks;
use crate::base::arrival::{Arrival, Message, Refusal};
use crate::base::metrics::ServiceCounters;
use crate::base::stages::Observations;
use crate::base::tenants::TenantState;
use crate::base::topology::{Replies, Service};
use crate::service::bundle::pool_memory::memory_of;
use crate::service::bundle::table::{ShareBundles, buffers_of};
use crate::service::chain::{Attached, Notices};
use crate::service::dispatch::{Dispatcher, Owner};
use crate::service::ends::{Attachment, OtherEnds, ShareMqueue, share_mqueues};
use crate::service::mqueues::{Load, NOT_FULL, ServerMqueue, Still, alive, write_ahead};
use crate::service::sampler::{NO_TOKEN, Sampler};
use crate::service::vote::{Leaving, Pause};

/// Number of heads of TX rings that are read in one go.
pub(crate) const HEADS_READ: usize = 32;

/// Bytes of a reply that are prefetched.
const SHORT_BYTES: u64 = 64;

/// The driver of one accelerator's blocks, and what it reported.
pub(crate) struct AcceleratorShare {
    pub(crate) blocks: Box<dyn Blocks>,
    /// Region mqueues whose RX ring got messages since the last drive.
    pub(crate) rx_pending: Vec<u32>,
    /// Region mqueues whose TX ring may hold messages.
    pub(crate) tx_pending: Vec<u32>,
    /// By mqueue of the region.
    share_mqueues: Box<[ShareMqueue]>,
    /// ServiceShare number of the attachment's first server mqueue.
    pub(crate) first: u32,
    /// Memory for bundles, if they can go through the rings.
    pub(super) pool: Option<Box<Pool<MappedMemory>>>,
    /// The same memory, as the network uses it.
    pub(super) pool_memory: Option<Arc<dyn SharedBytes>>,
}

/// See the module documentation.
pub(crate) struct ServiceShare {
    /// Name of the service, for log lines.
    pub(crate) name: Box<str>,
    /// Its tenant.
    pub(crate) tenant: Box<str>,
    /// What its tenant may use; none in a vacant slot.
    pub(crate) owner: Option<Arc<TenantState>>,
    /// The kernel of each attachment, for log lines.
    pub(crate) kernels: Box<[Box<str>]>,
    /// Blocks that hang on accelerator threads.
    pub(crate) hung_blocks: u64,
    pub(crate) framing: Framing,
    pub(crate) replies: Replies,
    pub(crate) ordered: bool,
    pub(crate) max_message_bytes: usize,
    /// Requests this long or longer are not taken: too long, or all while its tenant is over a limit.
    pub(crate) takes_below: usize,
    /// The limit of its tenant for which it takes no requests.
    shed: Option<DropReason>,
    /// Its tenant's messages in flight have a limit, so that each message is asked about.
    is_counted: bool,
    pub(crate) max_reply_bytes: usize,
    pub(crate) timeout_ns: u64,
    queue_ns_max: u64,
    pub(super) slots: u32,
    pub(crate) counters: Arc<ServiceCounters>,
    pub(crate) sampler: Sampler,
    pub(crate) sessions: Sessions,
    pub(super) bundles: ShareBundles,
    pub(crate) dispatcher: Dispatcher,
    pub(crate) mqueues: Vec<ServerMqueue>,
    /// By mqueue.
    pub(crate) loads: Vec<Load>,
    /// How many of them are alive.
    pub(super) alive: u32,
    /// Those of them that stand still.
    pub(super) still: Still,
    /// Services without replies: messages that kernels have not released, over all mqueues.
    pub(super) unread: u32,
    pub(crate) accelerators: Vec<AcceleratorShare>,
    /// A proxy, which has an upstream server instead of mqueues.
    is_proxy: bool,
    /// A proxy that passes the bytes of TCP connections on, without messages in them.
    relays_streams: bool,
    /// Server mqueues that are full this turn.
    full: Vec<u32>,
    /// Server mqueues whose TX ring could not be emptied, since the destination has no room.
    pub(crate) blocked: Vec<u32>,
    /// The blocked server mqueues of last turn, see [`Self::take_blocked`].
    pub(crate) retried: Vec<u32>,
    /// Credit that the other workers published, less what was handed to them since; hints.
    pub(crate) other_credit: Vec<u32>,
    /// The service is about to leave and gets no new requests.
    pub(crate) leaving: Option<Leaving>,
    /// Functions on the path of its messages; moved out while a batch is in progress.
    pub(crate) chain: Option<Box<Attached>>,
    pub(crate) notices: Notices,
    /// Why it takes no new requests at present: an accelerator of it restarts.
    pub(crate) pauses: Vec<Pause>,
}

impl ServiceShare {
    /// The share of one of `workers` workers. The ends of rings that are not the share's are added to
    /// `others`.
    pub(crate) fn new(
        service: &Service,
        (worker, workers): (u32, u32),
        attachments: Vec<Attachment>,
        others: &mut Vec<OtherEnds>,
        (counters, observed): (Arc<ServiceCounters>, Arc<Observations>),
    ) -> Self {
        let queue_ns_max = service.queue_us_max * 1000;
        let mut mqueues = Vec::new();
        let mut accelerators = Vec::new();
        let mut loads = Vec::new();
        let mut buffers = 0;
        for (number, attachment) in attachments.into_iter().enumerate() {
            let present = attachment.blocks.present();
            let load = if present { Load::default() } else { Load::absent() };
            loads.extend(attachment.ends.iter().map(|_| load));
            let write_ahead = write_ahead(&*attachment.blocks);
            buffers += buffers_of(attachment.pool.as_deref());
            accelerators.push(AcceleratorShare {
                blocks: attachment.blocks,
                rx_pending: Vec::with_capacity(
                    attachment.ends.len() * (2 + service.backends.len()),
                ),
                tx_pending: Vec::with_capacity(
                    attachment.ends.len() * (2 + service.backends.len()),
                ),
                share_mqueues: share_mqueues(&attachment.ends, mqueues.len() as u32),
                first: mqueues.len() as u32,
                pool_memory: memory_of(attachment.pool.as_deref()),
                pool: attachment.pool,
            });
            for ends in attachment.ends {
                let server = mqueues.len() as u32;
                others.push(OtherEnds::new(server, ends.clients, ends.sockets));
                let waits = if queue_ns_max > 0 { service.slots as usize } else { 0 };
                mqueues.push(ServerMqueue {
                    attachment: number as u16,
                    block: ends.block,
                    region_mqueue: ends.server.mqueue,
                    tx_corrupt: false,
                    is_blocked: false,
                    write_ahead,
                    consumed: ends.server.rx.released(),
                    rx: ends.server.rx,
                    tx: ends.server.tx,
                    arrivals: vec![0; waits].into_boxed_slice(),
                    sampled: NO_TOKEN,
                    completed: 0,
                    gathered_ns: 0,
                    left: 0,
                });
            }
        }
        let owner = Owner {
            workers,
            blocks: (0..service.accelerators.len())
                .map(|place| service.mqueues_on(place))
                .collect(),
        };
        let off_thread = accelerators.iter().any(|drive| drive.blocks.runs_off_thread());
        let capacity = mqueues.len() as u32 * service.slots;
        let kernels = (0..service.accelerators.len()).map(|place| service.kernel_on(place).into());
        Self {
            name: service.name.as_str().into(),
            tenant: service.tenant.as_str().into(),
            owner: None,
            kernels: kernels.collect(),
            hung_blocks: 0,
            framing: service.framing,
            replies: service.replies,
            ordered: service.ordered,
            max_message_bytes: service.max_message_bytes as usize,
            takes_below: service.max_message_bytes as usize + 1,
            shed: None,
            is_counted: false,
            max_reply_bytes: service.max_reply_bytes as usize,
            timeout_ns: service.request_timeout_ms * 1_000_000,
            queue_ns_max,
            slots: service.slots,
            counters,
            sampler: Sampler::new(observed),
            sessions: Sessions::new(capacity, 1).with_bundles(buffers, 1),
            bundles: ShareBundles::new(service, buffers, off_thread),
            dispatcher: Dispatcher::new(service.dispatch, owner, worker),
            alive: alive(&loads),
            still: Still::default(),
            unread: 0,
            loads,
            full: Vec::with_capacity(mqueues.len()),
            blocked: Vec::with_capacity(mqueues.len()),
            retried: Vec::with_capacity(mqueues.len()),
            mqueues,
            accelerators,
            is_proxy: service.upstream.is_some(),
            relays_streams: service.relays_streams(),
            other_credit: vec![0; workers as usize],
            leaving: None,
            chain: None,
            notices: Notices::default(),
            pauses: Vec::new(),
        }
    }

    /// A client of it is gone.
    pub(crate) fn end_connection(&self) {
        if let Some(owner) = &self.owner {
            owner.end_connection();
        }
    }

    /// Takes no requests for this reason, or takes them again.
    pub(crate) fn set_shed(&mut self, reason: Option<DropReason>) {
        self.takes_below =
            if reason.is_some() || self.is_counted { 0 } else { self.max_message_bytes + 1 };
        self.shed = reason;
    }

    /// Asks about each message, or no longer. Such messages do not travel as bundles.
    pub(crate) fn set_counted(&mut self, is_counted: bool) {
        self.is_counted = is_counted;
        self.set_shed(self.shed);
    }

    /// Whether it takes no requests of clients because of a limit of its tenant.
    pub(crate) fn is_shed(&self) -> bool {
        self.shed.is_some()
    }

    /// Whether requests in rings wait, for a reason that ends without an event of theirs.
    pub(crate) fn is_held(&self) -> bool {
        self.is_paused() || self.is_shed()
    }

    /// Why a request of this length that is not below [`Self::takes_below`] is refused. Limits of the tenant do not hold for one that
    /// another worker has received: it was counted there.
    #[cold]
    pub(crate) fn takes_not(
        &mut self,
        worker: u16,
        len: usize,
        handed_over: bool,
    ) -> Option<Refusal> {
        if len > self.max_message_bytes {
            return Some(Refusal::Drop(DropReason::TooLong));
        }
        if handed_over && !mutants::on("tenant_limits_twice") {
            return None;
        }
        let owner = self.owner.as_ref().filter(|_| self.is_counted && self.shed.is_none());
        if owner.is_some_and(|owner| !owner.take_room(worker)) {
            // Until the next turn.
            self.set_shed(Some(DropReason::TenantOutstanding));
        }
        self.shed.map(Refusal::Retry)
    }

    /// The blocked mqueues become the retried ones; the list of blocked ones is empty again.
    pub(crate) fn take_blocked(&mut self) {
        std::mem::swap(&mut self.blocked, &mut self.retried);
        self.blocked.clear();
        for mqueue in &self.retried {
            self.mqueues[*mqueue as usize].is_blocked = false;
        }
    }

    /// Whether it has a server instead of mqueues: then it has no blocks, no backends and no rings.
    #[inline]
    pub(crate) fn is_proxy(&self) -> bool {
        self.is_proxy
    }

    /// Whether it passes the bytes of TCP connections on to its upstream server, without messages in
    /// them.
    #[inline]
    pub(crate) fn relays_streams(&self) -> bool {
        self.relays_streams
    }

    /// A vacant slot.
    pub(crate) fn vacant(workers: usize) -> Self {
        let vacant = Service { mqueues: 0, slots: 0, ..Service::new("", Vec::new(), "") };
        let workers = (0, workers as u32);
        Self::new(&vacant, workers, Vec::new(), &mut Vec::new(), Default::default())
    }

    /// Writes a request into an mqueue's RX ring. The caller counts the result.
    // Always inline: the arrival's fields then stay in registers.
    #[inline(always)]
    pub(crate) fn accept(
        &mut self,
        number: u32,
        arrival: &Arrival,
        message: &mut impl Message,
    ) -> Result<(), DropReason> {
        let len = message.len();
        let mqueue = &mut self.mqueues[number as usize];
        let mut token = Token(0);
        if self.replies == Replies::One {
            let request = Request {
                origin: arrival.origin,
                number: arrival.number,
                mqueue: number,
                len: message.received_len() as u32,
                received_ns: arrival.received_ns,
                expects: arrival.expects,
            };
            token = self.sessions.issue(request).ok_or(DropReason::NoCredit)?;
        }
        let head =
            Head { token: token.0, tag: 0, kind: abi::kind::MESSAGE, status: abi::status::OK };
        if let Err(error) = message.push(&mut mqueue.rx, head) {
            return Err(self.refused(number, token, len, error));
        }
        let load = &mut self.loads[number as usize];
        committed(mqueue, load, &mut self.accelerators, arrival.received_ns, 1, len as u64);
        self.unread += u32::from(self.replies == Replies::None);
        self.counters.accepted.one();
        if self.sampler.is_due() {
            let token = (self.replies == Replies::One).then_some(token);
            self.sample(number, token, arrival.received_ns);
        }
        Ok(())
    }

    /// The RX ring did not accept a request.
    #[cold]
    pub(super) fn refused(
        &mut self,
        number: u32,
        token: Token,
        len: usize,
        error: LoanError,
    ) -> DropReason {
        if self.replies == Replies::One {
            self.sessions.end(token, number);
        }
        if error == LoanError::Full {
            // Only the arena may lack room for a long message; short messages do not need it.
            let inline = len <= abi::INLINE_BYTES_MAX as usize;
            let from = if inline { 0 } else { len as u32 };
            let load = &mut self.loads[number as usize];
            if load.full_from == NOT_FULL {
                self.full.push(number);
            }
            load.full_from = load.full_from.min(from);
        }
        match error {
            LoanError::Full => DropReason::NoCredit,
            LoanError::TooLong => DropReason::TooLong,
            LoanError::Corrupt => DropReason::MqueueDead,
        }
    }

    /// The meaning of a refusal of a message of `len` bytes by [`Self::accept`]; `None` if another mqueue may take
    /// it, since this one turned out to have no room, and its credit now reflects that.
    #[cold]
    pub(crate) fn refusal(
        &mut self,
        mqueue: u32,
        len: usize,
        reason: DropReason,
    ) -> Option<Refusal> {
        match reason {
            DropReason::NoCredit if self.loads[mqueue as usize].is_full_for(len) => None,
            DropReason::NoCredit => Some(Refusal::Retry(reason)),
            _ => {
                let corrupt = reason == DropReason::MqueueDead;
                self.mqueues[mqueue as usize].tx_corrupt |= corrupt;
                Some(Refusal::Drop(reason))
            }
        }
    }

    /// A request of `mqueue` has ended.
    #[inline]
    pub(crate) fn ended(&mut self, mqueue: u32) {
        self.loads[mqueue as usize].outstanding -= 1;
    }

    /// Requests in flight on an mqueue.
    #[inline]
    pub(crate) fn outstanding_on(&self, mqueue: u32) -> u32 {
        self.loads[mqueue as usize].outstanding
    }

    /// Replies of `mqueue` have been gathered, which had `before` requests then: reports the speed of its kernel to
    /// the dispatcher. An mqueue that did not answer all its requests the last time has been busy since.
    #[inline]
    pub(crate) fn gathered(&mut self, mqueue: u32, before: u32, now_ns: u64) {
        let outstanding = self.outstanding_on(mqueue);
        let entry = &mut self.mqueues[mqueue as usize];
        let count = before.saturating_sub(outstanding);
        if count > 0 {
            let took_ns = now_ns.saturating_sub(entry.gathered_ns);
            self.dispatcher.answered(count.into(), took_ns, count < entry.left);
            self.bundles.choice.answered(mqueue, count.into(), now_ns);
            (entry.gathered_ns, entry.left) = (now_ns, outstanding);
            let load = &mut self.loads[mqueue as usize];
            if load.late {
                // Housekeeping finds overdue mqueues; the end of that state must not wait for housekeeping, or too
                // many requests are shed until then.
                load.late = entry.is_late(now_ns, self.queue_ns_max);
            }
        }
    }

    /// Publishes every RX ring that got messages and runs or wakes the blocks.
    pub(crate) fn drive(&mut self, now_ns: u64) {
        for mqueue in self.full.drain(..) {
            self.loads[mqueue as usize].full_from = NOT_FULL;
        }
        for drive in &mut self.accelerators {
            for region_mqueue in &drive.rx_pending {
                match drive.share_mqueues[*region_mqueue as usize] {
                    ShareMqueue::Server(mqueue) => {
                        self.mqueues[mqueue as usize].rx.publish();
                        self.loads[mqueue as usize].rx_pending = false;
                    }
                    // Their endpoints have published them.
                    ShareMqueue::Other(..) | ShareMqueue::Foreign => {}
                }
            }
            drive.tx_pending.clear();
            drive.blocks.drive(now_ns, &drive.rx_pending, &mut drive.tx_pending);
            drive.rx_pending.clear();
        }
    }

    /// An endpoint has published messages to a block, whose accelerator is driven next.
    pub(crate) fn ring(&mut self, server: u32, region_mqueue: u32) {
        let attachment = self.mqueues[server as usize].attachment;
        self.accelerators[usize::from(attachment)].rx_pending.push(region_mqueue);
    }

    /// Whether blocks run while this worker does something else, or sleeps.
    pub(crate) fn runs_off_thread(&self) -> bool {
        self.accelerators.iter().any(|drive| drive.blocks.runs_off_thread())
    }

    /// Number of messages that the head of a server mqueue's TX ring shows; limited, since the accelerator may be
    /// hostile.
    #[inline]
    pub(crate) fn shown(&self, mqueue: u32) -> u64 {
        self.mqueues[mqueue as usize].tx.hint()
    }

    /// The same for the next [`HEADS_READ`] mqueues that [`Self::drive`] found touched. Heads are adjacent, and an
    /// accelerator that writes one of a line takes the whole line away: reading them one by one between messages
    /// would make each a cache miss.
    #[inline]
    pub(crate) fn read_heads(&self, drive: usize, first: usize) -> [u64; HEADS_READ] {
        let mut shown = [0; HEADS_READ];
        let count = self.accelerators[drive].tx_pending.len();
        for (index, shown) in (first..count).zip(&mut shown) {
            if let ShareMqueue::Server(mqueue) = self.tx_pending(drive, index) {
                *shown = self.shown(mqueue);
            }
        }
        shown
    }

    /// Starts to prefetch short replies that another processor has written, a few mqueues ahead.
    #[inline]
    pub(crate) fn fetch_ahead(&self, drive: usize, index: usize) {
        const AHEAD: usize = 8;
        let AcceleratorShare { tx_pending, blocks, .. } = &self.accelerators[drive];
        if !blocks.runs_off_thread() {
            return;
        }
        let from = if index == 0 { 1 } else { index + AHEAD };
        for ahead in from..tx_pending.len().min(index + AHEAD + 1) {
            if let ShareMqueue::Server(mqueue) = self.tx_pending(drive, ahead) {
                self.fetch(mqueue, 0);
            }
        }
    }

    /// The same for the replies behind the first of an mqueue that shows `shown`. Returns the distance in messages at
    /// which [`Self::fetch`] prefetches the next ones.
    pub(crate) fn fetch_more(&self, mqueue: u32, shown: u64) -> u64 {
        const AHEAD: u64 = 8;
        let entry = &self.mqueues[mqueue as usize];
        if !self.accelerators[usize::from(entry.attachment)].blocks.runs_off_thread() {
            return u64::MAX;
        }
        for ahead in 1..shown.min(AHEAD) {
            self.fetch(mqueue, ahead);
        }
        AHEAD
    }

    /// Prefetches the reply that is `ahead` messages further.
    // Not inline: it would slow down replies that are in the local cache.
    #[inline(never)]
    pub(crate) fn fetch(&self, mqueue: u32, ahead: u64) {
        self.mqueues[mqueue as usize].tx.prefetch_at(ahead, SHORT_BYTES);
    }

    /// The mqueue at this index of those whose TX ring may hold messages.
    #[inline]
    pub(crate) fn tx_pending(&self, drive: usize, index: usize) -> ShareMqueue {
        let drive = &self.accelerators[drive];
        let mqueue = drive.tx_pending[index] as usize;
        drive.share_mqueues.get(mqueue).copied().unwrap_or(ShareMqueue::Foreign)
    }

    /// Services without replies: counts the messages that kernels released since the last call.
    pub(crate) fn count_released(&mut self, now_ns: u64) {
        for (number, mqueue) in self.mqueues.iter_mut().enumerate() {
            let load = &mut self.loads[number];
            if load.outstanding == 0 || !load.alive {
                continue;
            }
            if mqueue.rx.credit().is_err() {
                // This word is not checked anywhere else: a full ring takes no more requests.
                mqueue.tx_corrupt = true;
                continue;
            }
            let released = mqueue.rx.released();
            // Negative while the kernel reads messages that were dropped unread.
            let new = released.saturating_sub(mqueue.consumed);
            mqueue.consumed += new;
            load.outstanding -= new as u32;
            self.unread -= new as u32;
            self.counters.consumed.add(new);
            if load.late {
                load.late = mqueue.is_late(now_ns, self.queue_ns_max);
            }
        }
    }

    /// Finds the mqueues that stand still.
    pub(crate) fn find_still(&mut self, now_ns: u64) {
        let since_ns = self.mqueues.iter().map(|mqueue| mqueue.gathered_ns);
        self.still = Still::count(since_ns, &self.loads, now_ns);
    }

    /// Finds the mqueues whose oldest unread message has waited longer than the service allows.
    pub(crate) fn find_overdue(&mut self, now_ns: u64) {
        if self.queue_ns_max == 0 {
            return;
        }
        let alive = self.mqueues.iter_mut().zip(&mut self.loads).filter(|(_, load)| load.alive);
        for (mqueue, load) in alive {
            load.late = mqueue.is_late(now_ns, self.queue_ns_max);
        }
    }

    /// The drop reason when no mqueue took a request.
    pub(crate) fn shed_reason(&self, reason: DropReason) -> DropReason {
        let late = self.queue_ns_max > 0 && self.loads.iter().any(|load| load.late);
        if reason == DropReason::NoCredit && late { DropReason::QueueTime } else { reason }
    }

    /// An mqueue can no longer be used. The caller ends its requests.
    pub(crate) fn mark_dead(&mut self, mqueue: u32) -> bool {
        let was = std::mem::replace(&mut self.loads[mqueue as usize].alive, false);
        self.count_living();
        was
    }

    /// Ends the next request of a pass whose mqueue is dead.
    pub(crate) fn end_next_of_dead(&mut self, pass: &mut Pass) -> Option<Request> {
        let Self { sessions, loads, .. } = self;
        sessions.end_next(pass, |mqueue| !loads[mqueue as usize].alive)
    }

    /// The mqueues of one accelerator.
    pub(crate) fn mqueues_of(&self, accelerator: usize) -> Range<u32> {
        let next = self.accelerators.get(accelerator + 1).map(|drive| drive.first);
        self.accelerators[accelerator].first..next.unwrap_or(self.mqueues.len() as u32)
    }

    fn count_living(&mut self) {
        self.alive = alive(&self.loads);
        if self.replies == Replies::None {
            self.unread = self.outstanding_by_mqueue().sum();
        }
    }

    /// Whether its drain time is over.
    pub(crate) fn is_expired(&self) -> bool {
        self.leaving.as_ref().is_some_and(|leaving| leaving.expired)
    }

    /// Drops the requests of a reply-less service's mqueue that its kernel has not read; if it reads them later, that
    /// is not counted.
    pub(crate) fn drop_unread(&mut self, mqueue: u32) -> u64 {
        let entry = &mut self.mqueues[mqueue as usize];
        entry.consumed = entry.rx.committed();
        let unread = std::mem::take(&mut self.loads[mqueue as usize].outstanding);
        self.unread -= if self.replies == Replies::None { unread } else { 0 };
        u64::from(unread)
    }

    /// When the worker must run again without an event; `poll_ns` for sources that do not wake it; 0 at once.
    pub(crate) fn wake_at(&self, now_ns: u64, poll_ns: u64) -> u64 {
        let in_flight = self.in_flight() > 0 && !mutants::on("sleep_on_requests");
        let blocked = !self.blocked.is_empty();
        if in_flight || blocked || self.accelerators.iter().any(|d| !d.rx_pending.is_empty()) {
            return 0;
        }
        let looks_again = self.is_leaving_busy() || self.is_paused();
        let again_ns = if looks_again { now_ns + poll_ns } else { u64::MAX };
        let blocks = self.accelerators.iter().map(|drive| drive.blocks.wake_at());
        blocks.fold(again_ns, u64::min)
    }

    /// Requests in flight on its mqueues.
    pub(crate) fn in_flight(&self) -> u64 {
        match self.replies {
            Replies::One => self.sessions.live().into(),
            Replies::None => self.outstanding_by_mqueue().map(u64::from).sum(),
        }
    }

    /// Requests in flight on each mqueue.
    pub(crate) fn outstanding_by_mqueue(&self) -> impl Iterator<Item = u32> + '_ {
        self.loads.iter().map(|load| load.outstanding)
    }

    /// Number of requests that this service share's mqueues still take, over all of them.
    pub(crate) fn free_credit(&self) -> u32 {
        let alive = self.loads.iter().filter(|load| load.alive);
        alive.map(|load| self.slots.saturating_sub(load.outstanding)).sum()
    }
}

/// `requests` requests were committed to an mqueue's RX ring, in one slot with a payload of `len` bytes.
// Always inline, as `accept` is, and of parts of the share: the caller has looked up the mqueue.
#[inline(always)]
pub(super) fn committed(
    mqueue: &mut ServerMqueue,
    load: &mut Load,
    accelerators: &mut [AcceleratorShare],
    received_ns: u64,
    requests: u32,
    len: u64,
) {
    mqueue.rx.prefetch(mqueue.write_ahead, len);
    if !mqueue.arrivals.is_empty() {
        let slot = (mqueue.rx.committed() - 1) % mqueue.arrivals.len() as u64;
        mqueue.arrivals[slot as usize] = received_ns;
    }
    if load.outstanding == 0 {
        (mqueue.gathered_ns, mqueue.left) = (received_ns, 0);
    }
    load.outstanding += requests;
    if !load.rx_pending {
        load.rx_pending = true;
        let drive = &mut accelerators[mqueue.attachment as usize];
        drive.rx_pending.push(mqueue.region_mqueue);
    }
}
