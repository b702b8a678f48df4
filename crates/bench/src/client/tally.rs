//! Counting shared by all transports: when requests are sent, their results, and the time of the client itself.
//!
//! A run has a warm-up, a measured part, and an end in which replies are awaited, and in an open loop what has arrived
//! before is sent. The rate is that of replies in the measured part; latencies are those of the same replies, and in an
//! open loop those of the arrivals in the measured part, whenever their replies come. Counts are of requests that were in flight or
//! sent in it; wrong and repeated replies count from the first request on, because a server that answers wrongly
//! during its warm-up answers wrongly.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use hdrhistogram::Histogram;
use sys::time::{monotonic_ns, thread_cpu_ns};

use super::arrivals::Arrivals;
use super::{ClientError, Load, Outcome, Pace, SLICE, SLICE_REPLIES, latencies};

/// Number of turns without work before the core is yielded.
const EMPTY_LOOKS: u32 = 32;
/// Nanoseconds between two searches for lost requests.
const SEARCH_NS: u64 = 1_000_000;
/// Most turns of the client's loop take microseconds. During a turn this long, another thread may have had the core:
/// the thread's CPU time shows it. (Hundreds of replies that arrive together also make a turn this long.)
const LONG_NS: u64 = 1_000_000;

/// Most slices that are kept.
const SLICES_MAX: u64 = 10_000;

fn ns(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

/// The latencies of a part of the run.
struct Slice {
    latency: Histogram<u64>,
    end_ns: u64,
}

impl Slice {
    /// Its precision is that of a percentile of a thousand replies.
    fn new() -> Self {
        let latency = Histogram::new_with_bounds(1, 3_600_000_000_000, 2).expect("valid bounds");
        Self { latency, end_ns: 0 }
    }

    fn begin(&mut self, now_ns: u64) {
        self.latency.reset();
        self.end_ns = now_ns.saturating_add(ns(SLICE));
    }

    /// Adds a latency. Returns the 99th percentile of a slice that it ends.
    fn record(&mut self, took_ns: u64, now_ns: u64) -> Option<u64> {
        self.latency.saturating_record(took_ns);
        if now_ns < self.end_ns || self.latency.len() < SLICE_REPLIES {
            return None;
        }
        let p99_ns = self.latency.value_at_quantile(0.99);
        self.begin(now_ns);
        Some(p99_ns)
    }
}

pub(super) struct Tally {
    pub(super) outcome: Outcome,
    arrivals: Option<Arrivals>,
    /// Requests sent, warm-up included; also the number of the next one.
    asked: u64,
    /// Requests that wait for a reply.
    waiting: u64,
    began_ns: u64,
    last_ns: u64,
    stop_ns: u64,
    slice: Slice,
    /// Warm-up is over.
    measuring: bool,
    /// CPU time of this thread when the measured part began.
    cpu_ns: u64,
    /// End of the turn before this one.
    turned_ns: u64,
    /// The last reading of the thread's CPU time: its time and value.
    looked: (u64, u64),
    /// Time up to which `waiting` has been added up.
    summed_ns: u64,
    window: u64,
    requests: u64,
    timeout_ns: u64,
    search_ns: u64,
    cancel: Arc<AtomicBool>,
    spin: bool,
    looks: u32,
}

impl Tally {
    /// Nothing is due before [`Self::begin`].
    pub(super) fn new(load: &Load, window_max: usize) -> Result<Self, ClientError> {
        if load.window == 0 || load.window > window_max {
            return Err(ClientError::Window(load.window, window_max));
        }
        if let Pace::Open { rate, .. } = load.pace
            && !(rate.is_finite() && rate > 0.0)
        {
            return Err(ClientError::Rate(rate));
        }
        Ok(Self {
            outcome: Outcome::new(latencies()),
            arrivals: None,
            asked: 0,
            waiting: 0,
            began_ns: 0,
            last_ns: 0,
            stop_ns: 0,
            slice: Slice::new(),
            measuring: false,
            cpu_ns: 0,
            turned_ns: 0,
            looked: (0, 0),
            summed_ns: 0,
            window: load.window as u64,
            requests: load.requests,
            timeout_ns: ns(load.timeout).max(1),
            search_ns: 0,
            cancel: load.cancel.clone(),
            spin: load.spin,
            looks: 0,
        })
    }

    /// Everything is set up: the run starts now.
    pub(super) fn begin(&mut self, load: &Load) {
        let now_ns = monotonic_ns();
        self.began_ns = now_ns.saturating_add(ns(load.warmup));
        self.stop_ns = self.began_ns.saturating_add(ns(load.duration));
        self.last_ns = now_ns;
        self.turned_ns = now_ns;
        self.looked = (now_ns, thread_cpu_ns());
        self.summed_ns = now_ns;
        if let Pace::Open { rate, seed, batch } = load.pace {
            self.arrivals = Some(Arrivals::new(rate, batch, seed, now_ns));
        }
        if load.warmup.is_zero() {
            self.measure(now_ns);
        }
    }

    /// The warm-up is over. Requests in flight count, finished ones do not.
    fn measure(&mut self, now_ns: u64) {
        self.measuring = true;
        self.began_ns = now_ns;
        self.last_ns = now_ns;
        self.summed_ns = now_ns;
        self.slice.begin(now_ns);
        self.cpu_ns = thread_cpu_ns();
        let wrong = self.outcome.wrong;
        let mut latency =
            std::mem::replace(&mut self.outcome.latency, Histogram::new(1).expect("1 digit"));
        latency.reset();
        let slices = self.stop_ns.saturating_sub(now_ns) / ns(SLICE) + 1;
        self.outcome = Outcome {
            // Nothing is allocated while requests are in flight; a run without an end has few slices that matter.
            slices_p99_ns: Vec::with_capacity(slices.min(SLICES_MAX) as usize),
            sent: self.waiting + wrong,
            wrong,
            duplicated: self.outcome.duplicated,
            ..Outcome::new(latency)
        };
    }

    /// Whether another request may be sent now: its number, and the time from which its latency counts.
    #[inline]
    pub(super) fn next(&mut self, now_ns: u64) -> Option<(u64, u64)> {
        if self.asked >= self.requests || self.waiting >= self.window {
            return None;
        }
        let due_ns = match &mut self.arrivals {
            None if now_ns >= self.stop_ns => return None,
            None => now_ns,
            Some(_) if now_ns >= self.stop_ns.saturating_add(self.timeout_ns) => return None,
            // What arrived before the end is sent after it: those that had to wait are the slowest.
            Some(arrivals) => arrivals.due(now_ns.min(self.stop_ns.saturating_sub(1)))?,
        };
        self.sum_up(now_ns);
        // It has been waiting since its arrival.
        self.outcome.waiting_ns += u128::from(self.measured_ns(due_ns, now_ns));
        self.asked += 1;
        self.waiting += 1;
        self.outcome.sent += 1;
        Some((self.asked - 1, due_ns))
    }

    /// Adds the time of the requests in flight, before their number changes.
    #[inline]
    fn sum_up(&mut self, now_ns: u64) {
        if now_ns <= self.summed_ns {
            return;
        }
        let until_ns = now_ns.min(self.stop_ns);
        let passed_ns = until_ns.saturating_sub(self.summed_ns);
        self.outcome.waiting_ns += u128::from(passed_ns) * u128::from(self.waiting);
        self.summed_ns = now_ns;
    }

    /// The part of a period that lies in the measured part.
    #[inline]
    fn measured_ns(&self, from_ns: u64, to_ns: u64) -> u64 {
        to_ns.min(self.stop_ns).saturating_sub(from_ns.max(self.began_ns))
    }

    /// A request got a reply. `due_ns` was returned by [`Self::next`].
    #[inline]
    pub(super) fn reply(&mut self, right: bool, due_ns: u64, now_ns: u64) {
        self.sum_up(now_ns);
        self.waiting -= 1;
        self.outcome.in_flight_ns += self.measured_ns(due_ns, now_ns);
        let took_ns = now_ns.saturating_sub(due_ns);
        self.last_ns = now_ns;
        if !right {
            self.outcome.wrong += 1;
            return;
        }
        self.outcome.replied += 1;
        let is_in_time = now_ns < self.stop_ns;
        self.outcome.measured += u64::from(is_in_time && self.measuring);
        let counts = match self.arrivals {
            None => is_in_time,
            Some(_) => due_ns >= self.began_ns,
        };
        if counts {
            self.outcome.latency.saturating_record(took_ns);
            // A closed loop has no use for them, and a client in shared memory no time.
            if self.arrivals.is_some()
                && let Some(p99_ns) = self.slice.record(took_ns, now_ns)
                && self.outcome.slices_p99_ns.len() < self.outcome.slices_p99_ns.capacity()
            {
                self.outcome.slices_p99_ns.push(p99_ns);
            }
        }
    }

    /// A request will not get a reply any more.
    pub(super) fn lose(&mut self, due_ns: u64, now_ns: u64) {
        self.sum_up(now_ns);
        self.waiting -= 1;
        self.outcome.lost += 1;
        let took_ns = self.measured_ns(due_ns, now_ns);
        self.outcome.in_flight_ns += took_ns;
        self.outcome.lost_ns += took_ns;
    }

    /// Whether a request due at that time has timed out.
    #[inline]
    pub(super) fn is_late(&self, due_ns: u64, now_ns: u64) -> bool {
        now_ns.saturating_sub(due_ns) > self.timeout_ns
    }

    /// Time-out of a request.
    pub(super) fn timeout_ns(&self) -> u64 {
        self.timeout_ns
    }

    /// Ends a turn of the loop; `found` says whether it had work. Returns true when the run is over.
    #[inline]
    pub(super) fn turn(&mut self, found: bool, now_ns: u64) -> bool {
        self.turn_with(found, now_ns, thread_cpu_ns)
    }

    #[inline]
    fn turn_with(&mut self, found: bool, now_ns: u64, cpu_clock: impl FnOnce() -> u64) -> bool {
        // Also the last turn, as far as it lies in the measured part: there, time of other threads would look like
        // silence of the server.
        let measured_ns = self.measured_ns(self.turned_ns, now_ns);
        let took_ns = now_ns.saturating_sub(self.turned_ns);
        self.turned_ns = now_ns;
        let missing_ns = self.read_cpu_time(now_ns, cpu_clock);
        if !self.measuring {
            if now_ns >= self.began_ns {
                self.measure(now_ns);
            }
            return self.is_over(now_ns);
        }
        let stolen_ns = if took_ns < LONG_NS { 0 } else { missing_ns.min(measured_ns) };
        self.outcome.stolen += Duration::from_nanos(stolen_ns);
        if found {
            self.outcome.busy += Duration::from_nanos(measured_ns - stolen_ns);
        }
        self.is_over(now_ns)
    }

    /// The time since the last reading in which the thread did not run. (If the host kernel does not know that a
    /// hypervisor had the core, it counts that time as the thread's.) A reading is a system call: there is one per
    /// millisecond, and one after every long turn, so that time is attributed to the right turn within a millisecond.
    #[inline]
    fn read_cpu_time(&mut self, now_ns: u64, cpu_clock: impl FnOnce() -> u64) -> u64 {
        let (then_ns, before_ns) = self.looked;
        let passed_ns = now_ns.saturating_sub(then_ns);
        if passed_ns < LONG_NS {
            return 0;
        }
        let cpu_ns = cpu_clock();
        self.looked = (now_ns, cpu_ns);
        passed_ns.saturating_sub(cpu_ns.saturating_sub(before_ns))
    }

    fn is_over(&self, now_ns: u64) -> bool {
        let waits = |arrivals: &Arrivals| {
            now_ns < self.stop_ns.saturating_add(self.timeout_ns)
                && arrivals.is_due(self.stop_ns.saturating_sub(1))
        };
        let all_asked = self.asked >= self.requests
            || now_ns >= self.stop_ns && !self.arrivals.as_ref().is_some_and(waits);
        (all_asked && self.waiting == 0) || self.cancel.load(Ordering::Relaxed)
    }

    /// Whether it is time to search for lost requests.
    #[inline]
    pub(super) fn search_is_due(&mut self, now_ns: u64) -> bool {
        let due = now_ns >= self.search_ns;
        if due {
            self.search_ns = now_ns + SEARCH_NS;
        }
        due
    }

    /// After a turn without work: other threads may need the core.
    #[inline]
    pub(super) fn idle(&mut self, found: bool) {
        self.looks = if found { 0 } else { self.looks + 1 };
        if self.looks > EMPTY_LOOKS {
            if self.spin {
                std::hint::spin_loop();
            } else {
                std::thread::yield_now();
            }
        }
    }

    pub(super) fn finish(mut self) -> Outcome {
        let now_ns = monotonic_ns();
        if !self.measuring {
            // Cancelled, or all requests were sent, during the warm-up: nothing was measured.
            self.measure(now_ns);
        }
        let outcome = &mut self.outcome;
        outcome.lost += self.waiting;
        outcome.cpu = Duration::from_nanos(thread_cpu_ns().saturating_sub(self.cpu_ns));
        outcome.cpu_period = Duration::from_nanos(now_ns - self.began_ns);
        let by_time = self.asked < self.requests && now_ns >= self.stop_ns;
        let end_ns = if by_time { self.stop_ns } else { self.last_ns.min(self.stop_ns) };
        outcome.elapsed = Duration::from_nanos(end_ns.saturating_sub(self.began_ns));
        outcome.silence = Duration::from_nanos(end_ns.saturating_sub(self.last_ns));
        if let Some(arrivals) = self.arrivals
            && self.asked < self.requests
        {
            outcome.unsent = arrivals.overdue(end_ns.saturating_sub(1));
        }
        self.outcome
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A run that has begun, and its start time.
    fn tally() -> (Tally, u64) {
        let load = Load { duration: Duration::from_millis(400), ..Load::default() };
        let mut tally = Tally::new(&load, 1).unwrap();
        tally.begin(&load);
        let began_ns = tally.began_ns;
        tally.looked = (began_ns, 0);
        (tally, began_ns)
    }

    /// An open loop of 1000 requests a second, one in flight.
    fn open(warmup: Duration) -> Tally {
        open_for(warmup, Duration::from_millis(100))
    }

    fn open_for(warmup: Duration, duration: Duration) -> Tally {
        let pace = Pace::Open { rate: 1e3, seed: 7, batch: 1 };
        let timeout = Duration::from_secs(1);
        let load = Load { pace, warmup, duration, timeout, ..Load::default() };
        let mut tally = Tally::new(&load, 1).unwrap();
        tally.begin(&load);
        tally
    }

    #[test]
    fn what_arrived_before_the_end_is_sent_and_counted_after_it() {
        let mut tally = open(Duration::ZERO);
        let (began_ns, stop_ns) = (tally.began_ns, tally.stop_ns);
        // The server answers the first request at the end only: all others wait for it in the client.
        let mut now_ns = stop_ns - 1;
        let mut arrived = 0;
        while let Some((_, due_ns)) = tally.next(now_ns) {
            assert!((began_ns..stop_ns).contains(&due_ns));
            assert!(!tally.is_over(now_ns));
            now_ns += 1_000_000;
            tally.reply(true, due_ns, now_ns);
            arrived += 1;
        }
        assert!(tally.is_over(now_ns) && arrived > 70, "{arrived}");
        let outcome = tally.finish();
        assert_eq!((outcome.sent, outcome.latency.len(), outcome.unsent), (arrived, arrived, 0));
        // None of the replies came in the measured part.
        assert_eq!(outcome.measured, 0);
        let middle = outcome.latency.value_at_quantile(0.5);
        assert!(middle > 50_000_000, "latencies count from the arrival: {middle}");
    }

    #[test]
    fn what_cannot_be_sent_for_a_time_out_is_unsent() {
        let mut tally = open(Duration::ZERO);
        let stop_ns = tally.stop_ns;
        let (_, due_ns) = tally.next(stop_ns - 1).unwrap();
        assert!(!tally.is_over(stop_ns));
        let late_ns = stop_ns + tally.timeout_ns;
        tally.lose(due_ns, late_ns);
        assert!(tally.is_over(late_ns) && tally.next(late_ns).is_none());
    }

    #[test]
    fn arrivals_of_the_warm_up_have_no_latency() {
        let mut tally = open(Duration::from_millis(10));
        let began_ns = tally.began_ns;
        let (_, due_ns) = tally.next(began_ns - 1).unwrap();
        tally.turn_with(true, began_ns, || 0);
        tally.reply(true, due_ns, began_ns + 1);
        assert_eq!((tally.outcome.measured, tally.outcome.latency.len()), (1, 0));
    }

    #[test]
    fn a_pause_changes_the_percentile_of_its_slice_only() {
        let mut tally = open_for(Duration::ZERO, Duration::from_secs(10));
        let mut now_ns = tally.began_ns;
        for slice in 0..9 {
            for reply in 0..SLICE_REPLIES {
                // A twentieth of the replies in one slice of nine is late.
                let late = slice == 4 && reply % 20 == 0;
                let took_ns = 50_000 + if late { ns(SLICE) } else { 0 };
                now_ns += ns(SLICE) / SLICE_REPLIES + 1;
                tally.waiting += 1;
                tally.reply(true, (now_ns - took_ns).max(tally.began_ns), now_ns);
            }
        }
        assert_eq!(tally.outcome.slices_p99_ns.len(), 9);
        let usual = tally.outcome.slice_p99_ns().unwrap();
        assert!((50_000..51_000).contains(&usual), "{:?}", tally.outcome.slices_p99_ns);
        assert!(tally.outcome.slices_p99_ns[4] > ns(SLICE));
    }

    #[test]
    fn a_lost_core_at_the_end_is_reported_like_one_in_between() {
        let (mut tally, began_ns) = tally();
        let busy = LONG_NS / 2;
        assert!(!tally.turn_with(true, began_ns + busy, || unreachable!("a short turn")));
        assert!(!tally.turn_with(true, began_ns + busy + 3 * LONG_NS, || busy));
        assert_eq!(tally.outcome.stolen.as_nanos(), 3 * u128::from(LONG_NS));
        assert!(tally.turn_with(true, tally.stop_ns + 70 * LONG_NS, || busy));
        let rest = Duration::from_millis(400) - Duration::from_nanos(busy);
        assert_eq!((tally.outcome.busy, tally.outcome.stolen), (Duration::from_nanos(busy), rest));
    }

    #[test]
    fn only_the_time_without_the_core_of_a_long_turn_is_stolen() {
        let (mut tally, began_ns) = tally();
        assert!(!tally.turn_with(true, began_ns + 3 * LONG_NS, || 3 * LONG_NS));
        let own = Duration::from_nanos(3 * LONG_NS);
        assert_eq!((tally.outcome.busy, tally.outcome.stolen), (own, Duration::ZERO));
        assert!(!tally.turn_with(true, began_ns + 8 * LONG_NS, || 4 * LONG_NS));
        let (busy, stolen) = (Duration::from_nanos(4 * LONG_NS), Duration::from_nanos(4 * LONG_NS));
        assert_eq!((tally.outcome.busy, tally.outcome.stolen), (busy, stolen));
        // A client that sleeps in its turns is not kept from its core.
        for look in 1..10 {
            tally.turn_with(false, began_ns + 8 * LONG_NS + look * LONG_NS / 2, || 4 * LONG_NS);
        }
        assert_eq!((tally.outcome.busy, tally.outcome.stolen), (busy, stolen));
    }

    #[test]
    fn a_busy_turn_is_not_stolen_time_and_a_sleep_is() {
        let load = Load { duration: Duration::from_secs(60), ..Load::default() };
        let mut tally = Tally::new(&load, 1).unwrap();
        let wall_ns = monotonic_ns();
        tally.begin(&load);
        let cpu_ns = thread_cpu_ns();
        while thread_cpu_ns() - cpu_ns < 5 * LONG_NS {}
        let own_ns = thread_cpu_ns() - cpu_ns;
        let now_ns = monotonic_ns();
        tally.turn(true, now_ns);
        // Other processes run on the machine of a test: their time is stolen, that of the turn is not. The wall time
        // includes `begin`, and the CPU time of the turn does not: the thread may lose its core between any two lines.
        let others_ns = (now_ns - wall_ns) - own_ns;
        assert!(
            tally.outcome.stolen <= Duration::from_nanos(others_ns),
            "{others_ns} {:?}",
            tally.outcome
        );
        assert!(tally.outcome.busy >= Duration::from_nanos(own_ns), "{own_ns} {:?}", tally.outcome);
        let before = tally.outcome.stolen;
        std::thread::sleep(Duration::from_millis(20));
        tally.turn(true, monotonic_ns());
        assert!(tally.outcome.stolen - before >= Duration::from_millis(15));
    }
}
