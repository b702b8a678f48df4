//! The dispatcher: chooses the mqueue of a request. It reads credits and changes nothing else.
//!
//! Every mqueue of a service has a *global* number, the same on every worker: those of its first accelerator in block
//! order, then those of the second, and so on. Worker `block % workers` owns a block's mqueue; within one worker a
//! service's mqueues are numbered again, consecutively, in global order ([`Owner`]).
//!
//! A worker prefers its own mqueues. The hash policies choose one mqueue, of any worker: a key always reaches the
//! same one. The other policies hand a request over only when all mqueues of the worker are out of credit.

use wire::DropReason;
use wire::admission::{bucket, key_hash};

use crate::base::topology::Dispatch;

/// Longest run of messages of one burst that go to one mqueue before the next mqueue is used.
const RUN_MAX: u32 = 32;
/// A burst of at least this many messages is spread over four mqueues or more, a smaller one over eight or more.
const BURST: usize = 64;
/// A run contains no more messages than a kernel answers in this time: behind a slow kernel they would wait while
/// other mqueues of the service are idle.
const RUN_NS: u64 = 50_000;
/// One over the weight of a new sample in the moving average.
const PACE_SAMPLES: u64 = 8;

/// The owners of a service's mqueues.
#[derive(Clone, Debug)]
pub(crate) struct Owner {
    pub(crate) workers: u32,
    /// Mqueues (blocks) on each accelerator.
    pub(crate) blocks: Box<[u32]>,
}

impl Owner {
    /// Mqueues of the service, over all accelerators and workers.
    pub(crate) fn total(&self) -> u32 {
        self.blocks.iter().sum()
    }

    /// Number of an accelerator's blocks that `worker` owns.
    fn share_of(&self, worker: u32, blocks: u32) -> u32 {
        (blocks + self.workers - 1 - worker) / self.workers
    }

    /// Owner and local number of a global mqueue.
    pub(crate) fn locate(&self, global: u32) -> (u32, u32) {
        let mut block = global;
        let before = |blocks: &&u32| {
            let beyond = block >= **blocks;
            block -= if beyond { **blocks } else { 0 };
            beyond
        };
        let before = self.blocks.iter().take_while(before).count();
        let worker = block % self.workers;
        let before = &self.blocks[..before];
        let first: u32 = before.iter().map(|blocks| self.share_of(worker, *blocks)).sum();
        (worker, first + block / self.workers)
    }
}

/// The destination of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Route {
    /// An mqueue of this worker (local number).
    Local(u32),
    /// Another worker, which chooses the mqueue.
    AnyOf { worker: u32 },
    /// One mqueue (local number there) of another worker.
    Remote { worker: u32, mqueue: u32 },
    /// None: no credit, or no live mqueue.
    Shed(DropReason),
}

/// The dispatcher's view of a service's mqueues.
pub(crate) trait Credit {
    /// Mqueues of this worker.
    fn count(&self) -> u32;
    /// Number of requests that the mqueue still takes; `None` when it is dead.
    fn credit(&self, mqueue: u32) -> Option<u32>;
    /// Whether a dead mqueue belongs to an absent accelerator.
    fn absent(&self, _mqueue: u32) -> bool {
        false
    }
    /// Requests in flight on it.
    fn outstanding(&self, mqueue: u32) -> u32;
    /// The fair share of requests in flight of an mqueue: one above the mean of the live ones. For services with
    /// replies.
    fn share(&self) -> u32;
    /// Whether no mqueue takes a request, as far as that is known without checking each.
    fn is_exhausted(&self) -> bool;
    /// The other worker that last published the most credit for this service, if any.
    fn other_with_most_credit(&self) -> Option<u32>;
}

/// Chooses mqueues for one service on one worker.
#[derive(Debug)]
pub(crate) struct Dispatcher {
    policy: Dispatch,
    owner: Owner,
    worker: u32,
    /// Round robin: the mqueue of the current run, and the rest of the run.
    cursor: u32,
    run_left: u32,
    run: u32,
    /// Messages of the longest bundle of this burst; below two: there is none.
    bundle_run: u32,
    /// The time of a kernel for one request, once known; one value for all accelerators of the service. See
    /// [`Self::answered`].
    pace_ns: Option<u64>,
    /// The longest run at that speed.
    run_max: u32,
    /// Requests were last answered in the turn of their arrival.
    in_turn: bool,
    /// The drop reason while no accelerator is present.
    absent: DropReason,
}

impl Dispatcher {
    pub(crate) fn new(policy: Dispatch, owner: Owner, worker: u32) -> Self {
        let absent = DropReason::NoAccelerator;
        Self {
            policy,
            owner,
            worker,
            cursor: 0,
            run_left: 1,
            run: 1,
            bundle_run: 0,
            pace_ns: None,
            run_max: RUN_MAX,
            in_turn: false,
            absent,
        }
    }

    /// Sets the drop reason while no accelerator is present.
    pub(crate) fn set_absent_reason(&mut self, reason: DropReason) {
        self.absent = reason;
    }

    /// A burst of this many messages is about to be routed: sets the length of runs. Small bursts are spread for
    /// latency, large ones go in runs, which keeps a resumed block busy for longer: the cost of resuming it, reading
    /// its rings and gathering its replies is paid once per run. Where kernels are so slow that this cost does not
    /// matter, there are no runs. Nor bundles, until [`Self::bundle`] has been called.
    pub(crate) fn burst(&mut self, messages: usize) {
        let mqueues = if messages < BURST { 8 } else { 4 };
        self.run = (messages as u32 / mqueues).clamp(1, RUN_MAX);
        self.bundle_run = 0;
    }

    /// Sets the length of the bundles of the burst; `None`: that of runs, at least two, however slow kernels are.
    pub(crate) fn bundle(&mut self, run: Option<u32>) {
        self.bundle_run = run.unwrap_or(self.run.max(2));
    }

    /// Whether messages of the burst may go as bundles.
    #[inline]
    pub(crate) fn has_bundles(&self) -> bool {
        self.bundle_run > 1
    }

    /// Messages of the longest bundle.
    #[inline]
    pub(crate) fn bundle_run(&self) -> u32 {
        self.bundle_run
    }

    /// Consecutive single messages of the burst that go to one mqueue.
    pub(crate) fn run(&self) -> u32 {
        self.run.min(self.run_max)
    }

    /// The next message does not continue a run.
    pub(crate) fn end_run(&mut self) {
        self.run_left = 0;
    }

    /// Whether requests were last answered in the turn of their arrival.
    pub(crate) fn is_in_turn(&self) -> bool {
        self.in_turn
    }

    /// Of this number of live mqueues, how many messages of one flow may go to.
    pub(crate) fn mqueues_of_flow(&self, alive: u32) -> u32 {
        if self.policy == Dispatch::FlowHash { 1 } else { alive }
    }

    /// An mqueue has answered `count` requests (not 0) in `took_ns`. `busy` says that it had requests all that time:
    /// then its kernel took that long. Otherwise the time includes idle time, so it is an upper bound. Requests that
    /// are answered in the turn of their arrival carry no timing information.
    #[inline]
    pub(crate) fn answered(&mut self, count: u64, took_ns: u64, busy: bool) {
        self.in_turn = took_ns == 0;
        if self.in_turn {
            return;
        }
        let sample_ns = took_ns / count;
        let pace_ns = match self.pace_ns {
            Some(pace_ns) if busy => (pace_ns * (PACE_SAMPLES - 1) + sample_ns) / PACE_SAMPLES,
            Some(pace_ns) => pace_ns.min(sample_ns),
            None if busy => sample_ns,
            None => return,
        };
        self.pace_ns = Some(pace_ns);
        let fit = RUN_NS.checked_div(pace_ns).unwrap_or(u64::MAX);
        self.run_max = fit.clamp(1, RUN_MAX.into()) as u32;
    }

    /// The worker that owns an mqueue of the service, and its local number there; `None` if there is no such mqueue.
    pub(crate) fn locate(&self, global: u32) -> Option<(u32, u32)> {
        (global < self.owner.total()).then(|| self.owner.locate(global))
    }

    /// This worker.
    pub(crate) fn worker(&self) -> u16 {
        self.worker as u16
    }

    /// The workers that own mqueues of the service, by number.
    pub(crate) fn owners(&self) -> Vec<u16> {
        let mut owners: Vec<_> =
            (0..self.owner.total()).map(|mqueue| self.owner.locate(mqueue).0 as u16).collect();
        owners.sort_unstable();
        owners.dedup();
        owners
    }

    /// Whether [`Self::route`] uses its `flow` argument.
    pub(crate) fn needs_flow(&self) -> bool {
        self.policy == Dispatch::FlowHash
    }

    /// Whether [`Self::route`] uses its `message` argument.
    #[inline]
    pub(crate) fn needs_key(&self) -> bool {
        matches!(self.policy, Dispatch::KeyHash(_))
    }

    /// Round robin: the mqueue of the current run, if it takes one more message. Other messages need [`Self::route`].
    // Always inline: most messages take this path, and the view of the mqueues then stays in registers.
    #[inline(always)]
    pub(crate) fn continues_run(&mut self, mqueues: &impl Credit) -> Option<u32> {
        let continues_run = self.policy == Dispatch::RoundRobin && self.run_goes_on(mqueues);
        continues_run.then_some(self.cursor)
    }

    /// The destination of this message. `flow` is the hash of its flow.
    pub(crate) fn route(&mut self, message: &[u8], flow: u64, mqueues: &impl Credit) -> Route {
        let hash = match self.policy {
            Dispatch::RoundRobin => {
                let continues_run = self.continues_run(mqueues);
                return continues_run.map_or_else(|| self.next_in_turn(mqueues), Route::Local);
            }
            Dispatch::LeastLoaded => return self.least_loaded(mqueues),
            Dispatch::FlowHash => flow,
            Dispatch::KeyHash(range) => match range.of(message) {
                Ok(key) => key_hash(key),
                Err(reason) => return Route::Shed(reason),
            },
        };
        let global = bucket(hash, self.owner.total());
        let (worker, mqueue) = self.owner.locate(global);
        if worker != self.worker {
            return Route::Remote { worker, mqueue };
        }
        self.check(mqueue, mqueues)
    }

    /// An mqueue of this worker for a bundle of messages of one flow, at most `most`, and how many, at least two. `None` if each message
    /// has to be routed.
    pub(crate) fn route_run(
        &mut self,
        flow: u64,
        most: u32,
        mqueues: &impl Credit,
    ) -> Option<(u32, u32)> {
        if self.needs_key() || !self.has_bundles() {
            return None;
        }
        // A bundle is a run of its own.
        self.run_left = 0;
        let Route::Local(mqueue) = self.route(&[], flow, mqueues) else { return None };
        let count = mqueues.credit(mqueue)?.min(self.bundle_run).min(most);
        self.run_left = if count < 2 { self.run_left + 1 } else { 0 };
        (count >= 2).then_some((mqueue, count))
    }

    /// Any mqueue of this worker, for a message that another worker handed over.
    pub(crate) fn route_here(&mut self, mqueues: &impl Credit) -> Route {
        if self.policy == Dispatch::LeastLoaded {
            self.least_loaded(mqueues)
        } else if self.run_goes_on(mqueues) {
            Route::Local(self.cursor)
        } else {
            self.next_in_turn(mqueues)
        }
    }

    /// One given mqueue of this worker.
    #[inline]
    pub(crate) fn check(&self, mqueue: u32, mqueues: &impl Credit) -> Route {
        match mqueues.credit(mqueue) {
            None if mqueues.absent(mqueue) => Route::Shed(self.absent),
            None => Route::Shed(DropReason::MqueueDead),
            Some(0) => Route::Shed(DropReason::NoCredit),
            Some(_) => Route::Local(mqueue),
        }
    }

    /// Round robin: whether the current run takes one more message.
    #[inline(always)]
    fn run_goes_on(&mut self, mqueues: &impl Credit) -> bool {
        let continues_run = self.run_left > 0
            && self.cursor < mqueues.count()
            && mqueues.credit(self.cursor).is_some_and(|c| c > 0);
        self.run_left -= u32::from(continues_run);
        continues_run
    }

    /// The next mqueue with credit, for a run. Where kernels are too slow for runs, mqueues above their fair share
    /// are skipped if others have credit: otherwise an mqueue that once got more requests, by a run or by answering
    /// late, would keep more for as long as its clients send a new request for each answer.
    fn next_in_turn(&mut self, mqueues: &impl Credit) -> Route {
        if mqueues.is_exhausted() {
            return self.other_worker(mqueues);
        }
        let count = mqueues.count();
        let share = if self.run_max == 1 { mqueues.share() } else { u32::MAX };
        let mut first = None;
        for step in 1..=count {
            let at = self.cursor + step;
            let mqueue = if at < count { at } else { at - count };
            if mqueues.credit(mqueue).is_some_and(|c| c > 0) {
                if mqueues.outstanding(mqueue) <= share {
                    first = Some(mqueue);
                    break;
                }
                first = first.or(Some(mqueue));
            }
        }
        let Some(mqueue) = first else { return self.other_worker(mqueues) };
        self.cursor = mqueue;
        self.run_left = self.run.min(self.run_max) - 1;
        Route::Local(mqueue)
    }

    /// The first of those with the fewest requests. Most mqueues are skipped by one comparison.
    fn least_loaded(&self, mqueues: &impl Credit) -> Route {
        if mqueues.is_exhausted() {
            return self.other_worker(mqueues);
        }
        let (mut least, mut found) = (u32::MAX, None);
        for mqueue in 0..mqueues.count() {
            let outstanding = mqueues.outstanding(mqueue);
            if outstanding < least && mqueues.credit(mqueue).is_some_and(|c| c > 0) {
                (least, found) = (outstanding, Some(mqueue));
                if outstanding == 0 {
                    break;
                }
            }
        }
        found.map_or_else(|| self.other_worker(mqueues), Route::Local)
    }

    fn other_worker(&self, mqueues: &impl Credit) -> Route {
        if let Some(worker) = mqueues.other_with_most_credit() {
            return Route::AnyOf { worker };
        }
        let alive = (0..mqueues.count()).any(|m| mqueues.credit(m).is_some());
        if alive || self.owner.workers > 1 && mqueues.count() == 0 {
            Route::Shed(DropReason::NoCredit)
        } else {
            Route::Shed(self.absent)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Table(Vec<Option<u32>>, Option<u32>);

    impl Credit for Table {
        fn count(&self) -> u32 {
            self.0.len() as u32
        }
        fn credit(&self, mqueue: u32) -> Option<u32> {
            self.0[mqueue as usize]
        }
        fn absent(&self, mqueue: u32) -> bool {
            mqueue == 3
        }
        fn outstanding(&self, mqueue: u32) -> u32 {
            10_u32.saturating_sub(self.0[mqueue as usize].unwrap_or(0))
        }
        fn share(&self) -> u32 {
            u32::MAX
        }
        fn is_exhausted(&self) -> bool {
            false
        }
        fn other_with_most_credit(&self) -> Option<u32> {
            self.1
        }
    }

    /// Credit and requests in flight of each.
    struct Paused(Vec<(Option<u32>, u32)>);

    impl Credit for Paused {
        fn count(&self) -> u32 {
            self.0.len() as u32
        }
        fn credit(&self, mqueue: u32) -> Option<u32> {
            self.0[mqueue as usize].0
        }
        fn outstanding(&self, mqueue: u32) -> u32 {
            self.0[mqueue as usize].1
        }
        fn share(&self) -> u32 {
            let alive = || self.0.iter().filter(|(credit, _)| credit.is_some());
            alive().map(|(_, paused)| paused).sum::<u32>() / alive().count().max(1) as u32 + 1
        }
        fn is_exhausted(&self) -> bool {
            let alive = self.0.iter().filter(|(credit, _)| credit.is_some());
            alive.clone().count() > 0 && alive.clone().all(|(credit, _)| *credit == Some(0))
        }
        fn other_with_most_credit(&self) -> Option<u32> {
            None
        }
    }

    fn flow(port: u16) -> u64 {
        wire::admission::flow_hash(([127, 0, 0, 1], port).into(), 9000)
    }

    fn dispatcher(policy: Dispatch, workers: u32, blocks: u32) -> Dispatcher {
        Dispatcher::new(policy, Owner { workers, blocks: [blocks].into() }, 0)
    }

    #[test]
    fn every_mqueue_has_one_owner_and_one_dense_number() {
        for workers in 1..6 {
            for blocks in 1..12 {
                let owner = Owner { workers, blocks: [blocks, 5, 13 - blocks].into() };
                let mut seen: Vec<Vec<u32>> = vec![Vec::new(); workers as usize];
                for global in 0..owner.total() {
                    let (worker, local) = owner.locate(global);
                    seen[worker as usize].push(local);
                }
                for (worker, locals) in seen.iter().enumerate() {
                    let shares = owner.blocks.iter().map(|b| owner.share_of(worker as u32, *b));
                    let expected: Vec<u32> = (0..shares.sum()).collect();
                    assert_eq!(*locals, expected, "{workers} {blocks}");
                }
            }
        }
    }

    #[test]
    fn round_robin_uses_all_mqueues_with_credit() {
        let mut d = dispatcher(Dispatch::RoundRobin, 1, 4);
        let table = Table(vec![Some(5), Some(0), None, Some(5)], None);
        let mut hits = [0; 4];
        for _ in 0..100 {
            match d.route(b"", flow(1), &table) {
                Route::Local(m) => hits[m as usize] += 1,
                other => panic!("{other:?}"),
            }
        }
        assert_eq!(hits, [50, 0, 0, 50]);
        let empty = Table(vec![Some(0); 4], None);
        assert_eq!(d.route(b"", flow(1), &empty), Route::Shed(DropReason::NoCredit));
        let dead = Table(vec![None; 4], None);
        assert_eq!(d.route(b"", flow(1), &dead), Route::Shed(DropReason::NoAccelerator));
        let other = Table(vec![Some(0); 4], Some(2));
        assert_eq!(d.route(b"", flow(1), &other), Route::AnyOf { worker: 2 });
    }

    #[test]
    fn a_steered_message_finds_its_mqueue_dead_or_absent() {
        let d = dispatcher(Dispatch::FlowHash, 1, 4);
        let table = Table(vec![Some(1), Some(0), None, None], None);
        assert_eq!(d.check(0, &table), Route::Local(0));
        assert_eq!(d.check(1, &table), Route::Shed(DropReason::NoCredit));
        assert_eq!(d.check(2, &table), Route::Shed(DropReason::MqueueDead));
        assert_eq!(d.check(3, &table), Route::Shed(DropReason::NoAccelerator));
    }

    #[test]
    fn runs_of_messages_have_credit_and_follow_one_another() {
        let mut d = dispatcher(Dispatch::RoundRobin, 1, 4);
        let table = Table(vec![Some(20), Some(3), None, Some(1)], None);
        d.burst(64);
        assert_eq!(d.route_run(flow(1), 64, &table), None, "a burst without bundles");
        d.bundle(Some(16));
        let mut hits = [0; 4];
        for _ in 0..400 {
            match d.route_run(flow(1), 64, &table) {
                Some((mqueue, count)) => {
                    assert!(
                        (2..=16).contains(&count) && count <= table.0[mqueue as usize].unwrap()
                    );
                    hits[mqueue as usize] += 1;
                }
                // The mqueue with credit for one message.
                None => assert_eq!(d.route(b"", flow(1), &table), Route::Local(d.cursor)),
            }
        }
        assert!(hits[0] > 5 && hits[1] > 5 && hits[2] + hits[3] == 0, "{hits:?}");
        // What is left of a run is no bundle.
        let table = Table(vec![Some(999); 4], None);
        (d.run_left, d.cursor) = (7, 2);
        assert_eq!(d.route_run(flow(1), 64, &table), Some((3, 16)));
        assert_eq!(d.route_run(flow(1), 64, &table), Some((0, 16)));
        assert_eq!(d.route_run(flow(1), 3, &table), Some((1, 3)));
        // Where bundles are forced, they are as long as runs, and also for a slow kernel.
        (0..100).for_each(|_| d.answered(2, 2 * 800_000, true));
        d.bundle(None);
        assert_eq!(d.route_run(flow(1), 64, &table), Some((2, 16)));
        d.burst(3);
        d.bundle(None);
        assert_eq!(d.route_run(flow(1), 3, &table), Some((3, 2)));
        let mut d = dispatcher(Dispatch::FlowHash, 1, 4);
        d.bundle(Some(50));
        let table = Table(vec![Some(50); 4], None);
        let Some((mqueue, 50)) = d.route_run(flow(1), 64, &table) else { panic!("{d:?}") };
        assert_eq!(d.route(b"", flow(1), &table), Route::Local(mqueue));
        let mut d = dispatcher(Dispatch::KeyHash("0:4".parse().unwrap()), 1, 4);
        d.bundle(Some(16));
        assert_eq!(d.route_run(flow(1), 64, &table), None);
        let mut d = dispatcher(Dispatch::LeastLoaded, 1, 4);
        d.bundle(Some(16));
        let table = Table(vec![Some(9), Some(50), Some(50), Some(9)], None);
        assert_eq!(d.route_run(flow(1), 64, &table), Some((1, 16)));
        let none = Table(vec![Some(0); 4], None);
        assert_eq!(d.route_run(flow(1), 64, &none), None);
    }

    #[test]
    fn a_large_burst_goes_in_runs() {
        let mut d = dispatcher(Dispatch::RoundRobin, 1, 4);
        let table = Table(vec![Some(999); 4], None);
        for (burst, changes) in [(7, 6), (32, 7), (64, 3), (256, 7)] {
            d.burst(burst);
            let route = |d: &mut Dispatcher| d.route(b"", flow(1), &table);
            let routes: Vec<_> = (0..burst).map(|_| route(&mut d)).collect();
            let found = routes.windows(2).filter(|w| w[0] != w[1]).count();
            // The first run may be the rest of an earlier one.
            assert!((changes..=changes + 1).contains(&found), "{burst}: {routes:?}");
        }
    }

    /// Number of mqueues that a burst of `messages` reaches.
    fn spread(d: &mut Dispatcher, messages: usize) -> usize {
        let table = Table(vec![Some(999); 64], None);
        d.burst(messages);
        let routes = (0..messages).map(|_| format!("{:?}", d.route(b"", flow(1), &table)));
        routes.collect::<std::collections::BTreeSet<_>>().len()
    }

    #[test]
    fn a_burst_for_a_slow_kernel_is_spread() {
        let mut d = dispatcher(Dispatch::RoundRobin, 1, 64);
        assert!(spread(&mut d, 64) <= 5, "the speed is not known yet");
        // The time of an idle mqueue is only an upper bound, and says nothing yet.
        d.answered(1, 900_000, false);
        assert!(spread(&mut d, 64) <= 5, "{d:?}");
        assert!(d.pace_ns.is_none() && !d.is_in_turn());
        // As fast as a GPU's echo: a run takes no longer than its limit.
        (0..100).for_each(|_| d.answered(8, 8 * 2000, true));
        assert!(spread(&mut d, 64) <= 5, "{d:?}");
        // A kernel that takes 20 us: runs of two, and the rest of the run before.
        (0..100).for_each(|_| d.answered(1, 20_000, true));
        assert!((32..=33).contains(&spread(&mut d, 64)), "{d:?}");
        // Slower than the limit of a run: each message goes to another mqueue, also single messages after a large
        // burst.
        (0..100).for_each(|_| d.answered(2, 2 * 800_000, true));
        spread(&mut d, 64);
        assert_eq!(spread(&mut d, 64), 64, "{d:?}");
        d.answered(1, 900_000, false);
        assert_eq!(spread(&mut d, 64), 64, "{d:?}");
        // The time of an idle mqueue is an upper bound, so the kernel is faster than assumed.
        d.answered(32, 32 * 1500, false);
        assert!(spread(&mut d, 64) <= 6, "{d:?}");
        // One interrupted kernel counts as one sample of many.
        d.answered(1, 100_000, true);
        assert!(spread(&mut d, 64) <= 33, "{d:?}");
        assert!(!d.is_in_turn());
        // Answers in the turn of their arrival carry no timing information.
        let before = d.pace_ns;
        d.answered(4, 0, true);
        d.answered(4, 0, false);
        assert_eq!(d.pace_ns, before);
        assert!(d.is_in_turn());
    }

    #[test]
    fn mqueues_above_their_share_are_skipped_where_kernels_are_slow() {
        let mut d = dispatcher(Dispatch::RoundRobin, 1, 4);
        let hits = |d: &mut Dispatcher, paused: &Paused| {
            d.burst(1);
            let mut hits = [0; 4];
            for _ in 0..12 {
                match d.route(b"", flow(1), paused) {
                    Route::Local(mqueue) => hits[mqueue as usize] += 1,
                    other => panic!("{other:?}"),
                }
            }
            hits
        };
        // The mean is four, so five are not above the share.
        let uneven = Paused([1, 9, 1, 5].map(|paused| (Some(9), paused)).to_vec());
        assert_eq!(hits(&mut d, &uneven), [3, 3, 3, 3]);
        d.answered(1, 300_000, true);
        assert_eq!(hits(&mut d, &uneven), [4, 0, 4, 4]);
        // Dead mqueues, which have no requests, do not lower the mean.
        let dead = Paused(vec![(None, 0), (None, 0), (Some(9), 20), (Some(9), 24)]);
        assert_eq!(hits(&mut d, &dead), [0, 0, 12, 0]);
        // If no other has credit, it is chosen nevertheless.
        let full = Paused(vec![(Some(0), 1), (None, 0), (Some(0), 1), (Some(9), 24)]);
        assert_eq!(hits(&mut d, &full), [0, 0, 0, 12]);
        let none = Paused(vec![(None, 0), (Some(0), 9), (None, 0), (None, 0)]);
        assert_eq!(d.route(b"", flow(1), &none), Route::Shed(DropReason::NoCredit));
    }

    #[test]
    fn least_loaded_chooses_the_fewest_requests() {
        let mut d = dispatcher(Dispatch::LeastLoaded, 1, 3);
        let table = Table(vec![Some(1), Some(9), Some(3)], None);
        assert_eq!(d.route(b"", flow(1), &table), Route::Local(1));
        // The first of equals, and none that is dead or has no credit.
        let table = Table(vec![None, Some(0), Some(9), Some(9)], None);
        assert_eq!(d.route(b"", flow(1), &table), Route::Local(2));
        let table = Table(vec![Some(3), Some(10), Some(10)], None);
        assert_eq!(d.route(b"", flow(1), &table), Route::Local(1));
        let table = Table(vec![None, Some(0)], Some(2));
        assert_eq!(d.route(b"", flow(1), &table), Route::AnyOf { worker: 2 });
    }

    #[test]
    fn a_key_reaches_the_same_mqueue_from_any_client_and_worker() {
        let policy = Dispatch::KeyHash("2:4".parse().unwrap());
        let owner = Owner { workers: 4, blocks: [6].into() };
        let mut used = std::collections::BTreeSet::new();
        for key in 0..200_u32 {
            let message = [&[0, 0][..], &key.to_le_bytes()].concat();
            let mut places = std::collections::BTreeSet::new();
            for worker in 0..4 {
                let table = Table(vec![Some(1); owner.share_of(worker, 6) as usize], None);
                let mut d = Dispatcher::new(policy, owner.clone(), worker);
                places.insert(match d.route(&message, flow(worker as u16), &table) {
                    Route::Local(mqueue) => (worker, mqueue),
                    Route::Remote { worker, mqueue } => (worker, mqueue),
                    other => panic!("{other:?}"),
                });
            }
            assert_eq!(places.len(), 1);
            used.extend(places);
        }
        assert_eq!(used.len(), 6, "every mqueue gets keys");
        let mut d = Dispatcher::new(policy, owner, 0);
        let table = Table(vec![Some(1); 2], None);
        assert_eq!(d.route(&[1, 2, 3], flow(1), &table), Route::Shed(DropReason::TooShort));
    }

    #[test]
    fn without_credit_requests_are_shed_without_checking_each_mqueue() {
        /// A service without credit that counts how often its mqueues are read.
        struct Spent(std::cell::Cell<u32>);

        impl Credit for Spent {
            fn count(&self) -> u32 {
                240
            }
            fn credit(&self, _: u32) -> Option<u32> {
                self.0.set(self.0.get() + 1);
                Some(0)
            }
            fn outstanding(&self, _: u32) -> u32 {
                self.0.set(self.0.get() + 1);
                64
            }
            fn share(&self) -> u32 {
                u32::MAX
            }
            fn is_exhausted(&self) -> bool {
                true
            }
            fn other_with_most_credit(&self) -> Option<u32> {
                None
            }
        }

        for policy in [Dispatch::RoundRobin, Dispatch::LeastLoaded] {
            let (mut d, mqueues) = (dispatcher(policy, 1, 240), Spent(Default::default()));
            for _ in 0..100 {
                assert_eq!(d.route(b"", 0, &mqueues), Route::Shed(DropReason::NoCredit));
            }
            assert!(mqueues.0.get() <= 200, "{} reads for 100 messages", mqueues.0.get());
        }
    }

    #[test]
    fn a_flow_keeps_its_mqueue() {
        let table = Table(vec![Some(1); 8], None);
        let mut d = dispatcher(Dispatch::FlowHash, 1, 8);
        let mut used = std::collections::BTreeSet::new();
        for port in 1..100 {
            let first = d.route(b"a", flow(port), &table);
            assert_eq!(d.route(b"b", flow(port), &table), first);
            used.insert(format!("{first:?}"));
        }
        assert_eq!(used.len(), 8);
    }
}
