//! The counting that all transports share: when requests leave, what became of them, and how the
//! client itself spent its time.
//!
//! A run has a warm-up, a measured part and an end in which nothing is sent and replies are awaited.
//! Latencies and the rate are those of replies that came in the measured part. Counts are of requests
//! that were in flight in it or sent in it; wrong and repeated replies count from the first request
//! on, because a server that answers wrongly while it warms up answers wrongly.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use hdrhistogram::Histogram;
use sys::time::monotonic_ns;

use super::arrivals::Arrivals;
use super::{ClientError, Load, Outcome, Pace, latencies};

/// How many empty looks before the core is offered to others.
const EMPTY_LOOKS: u32 = 32;
/// Nanoseconds between two searches for lost requests.
const SEARCH_NS: u64 = 1_000_000;
/// A turn of the client's loop takes microseconds; one this long was interrupted by somebody else.
const STOLEN_NS: u64 = 1_000_000;

fn ns(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
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
    /// Warm-up is over.
    measuring: bool,
    /// CPU time of this thread when the measured part began.
    cpu_ns: u64,
    /// When the turn before this one ended.
    turned_ns: u64,
    /// Up to when `waiting` has been added up.
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
            measuring: false,
            cpu_ns: 0,
            turned_ns: 0,
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

    /// Everything is set up: time runs from here.
    pub(super) fn begin(&mut self, load: &Load) {
        let now_ns = monotonic_ns();
        self.began_ns = now_ns.saturating_add(ns(load.warmup));
        self.stop_ns = self.began_ns.saturating_add(ns(load.duration));
        self.last_ns = now_ns;
        self.turned_ns = now_ns;
        self.summed_ns = now_ns;
        if let Pace::Open { rate, seed } = load.pace {
            self.arrivals = Some(Arrivals::new(rate, seed, now_ns));
        }
        if load.warmup.is_zero() {
            self.measure(now_ns);
        }
    }

    /// The warm-up is over. What is in flight counts, what is done does not.
    fn measure(&mut self, now_ns: u64) {
        self.measuring = true;
        self.began_ns = now_ns;
        self.last_ns = now_ns;
        self.summed_ns = now_ns;
        self.cpu_ns = sys::time::thread_cpu_ns();
        let wrong = self.outcome.wrong;
        let mut latency =
            std::mem::replace(&mut self.outcome.latency, Histogram::new(1).expect("1 digit"));
        latency.reset();
        self.outcome = Outcome {
            sent: self.waiting + wrong,
            wrong,
            duplicated: self.outcome.duplicated,
            ..Outcome::new(latency)
        };
    }

    /// Whether another request may leave now: its number, and the time from which its latency counts.
    #[inline]
    pub(super) fn next(&mut self, now_ns: u64) -> Option<(u64, u64)> {
        if self.asked >= self.requests || now_ns >= self.stop_ns || self.waiting >= self.window {
            return None;
        }
        let due_ns = match &mut self.arrivals {
            None => now_ns,
            Some(arrivals) => arrivals.due(now_ns)?,
        };
        self.sum_up(now_ns);
        // It has been waiting since its arrival.
        self.outcome.waiting_ns += u128::from(self.measured_ns(due_ns, now_ns));
        self.asked += 1;
        self.waiting += 1;
        self.outcome.sent += 1;
        Some((self.asked - 1, due_ns))
    }

    /// Adds up the requests in flight over time, until just before their number changes.
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

    /// The part of a time that lies in the measured part.
    #[inline]
    fn measured_ns(&self, from_ns: u64, to_ns: u64) -> u64 {
        to_ns.min(self.stop_ns).saturating_sub(from_ns.max(self.began_ns))
    }

    /// A request got a reply. `due_ns` is what [`Self::next`] said.
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
        if now_ns < self.stop_ns {
            self.outcome.latency.saturating_record(took_ns);
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

    /// Whether a request due then has waited for too long.
    #[inline]
    pub(super) fn is_late(&self, due_ns: u64, now_ns: u64) -> bool {
        now_ns.saturating_sub(due_ns) > self.timeout_ns
    }

    /// How long a request may wait.
    pub(super) fn timeout_ns(&self) -> u64 {
        self.timeout_ns
    }

    /// Ends a turn of the loop; `found` says whether it did anything. True when the run is over.
    #[inline]
    pub(super) fn turn(&mut self, found: bool, now_ns: u64) -> bool {
        let took_ns = now_ns.saturating_sub(self.turned_ns);
        // The last turn, too, as far as it lies in the measured part: there somebody else's time looks like the
        // server's silence.
        let measured = Duration::from_nanos(self.measured_ns(self.turned_ns, now_ns));
        self.turned_ns = now_ns;
        if !self.measuring {
            if now_ns >= self.began_ns {
                self.measure(now_ns);
            }
        } else if took_ns >= STOLEN_NS {
            self.outcome.stolen += measured;
        } else if found {
            self.outcome.busy += measured;
        }
        self.is_over(now_ns)
    }

    fn is_over(&self, now_ns: u64) -> bool {
        let all_asked = self.asked >= self.requests || now_ns >= self.stop_ns;
        (all_asked && self.waiting == 0) || self.cancel.load(Ordering::Relaxed)
    }

    /// Whether it is time to look for lost requests.
    #[inline]
    pub(super) fn search_is_due(&mut self, now_ns: u64) -> bool {
        let due = now_ns >= self.search_ns;
        if due {
            self.search_ns = now_ns + SEARCH_NS;
        }
        due
    }

    /// Between two looks: others may want the core.
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
            // Cancelled, or all requests were sent, while warming up: nothing was measured.
            self.measure(now_ns);
        }
        let outcome = &mut self.outcome;
        outcome.lost += self.waiting;
        outcome.cpu = Duration::from_nanos(sys::time::thread_cpu_ns().saturating_sub(self.cpu_ns));
        outcome.cpu_period = Duration::from_nanos(now_ns - self.began_ns);
        let by_time = self.asked < self.requests && now_ns >= self.stop_ns;
        let end_ns = if by_time { self.stop_ns } else { self.last_ns.min(self.stop_ns) };
        outcome.elapsed = Duration::from_nanos(end_ns.saturating_sub(self.began_ns));
        outcome.silence = Duration::from_nanos(end_ns.saturating_sub(self.last_ns));
        if let Some(arrivals) = self.arrivals
            && self.asked < self.requests
        {
            outcome.unsent = arrivals.overdue(end_ns);
        }
        self.outcome
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_core_that_is_lost_at_the_end_is_told_as_one_in_between() {
        let load = Load { duration: Duration::from_millis(400), ..Load::default() };
        let mut tally = Tally::new(&load, 1).unwrap();
        tally.begin(&load);
        let busy = STOLEN_NS / 2;
        assert!(!tally.turn(true, tally.began_ns + busy));
        assert!(!tally.turn(true, tally.began_ns + busy + 3 * STOLEN_NS));
        assert_eq!(tally.outcome.stolen.as_nanos(), 3 * u128::from(STOLEN_NS));
        assert!(tally.turn(true, tally.stop_ns + 70 * STOLEN_NS));
        let rest = load.duration - Duration::from_nanos(busy);
        assert_eq!((tally.outcome.busy, tally.outcome.stolen), (Duration::from_nanos(busy), rest));
    }
}
