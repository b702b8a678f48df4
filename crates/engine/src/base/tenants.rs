//! The tenants of an engine: their weights and limits, which can change at any time, and what they use.
//!
//! Workers read weights and limits as plain words when something has changed, and write what they use into cells
//! of their own. A rate is shared by all workers: each has charged what it took to a *theoretical arrival time* (generic
//! cell rate algorithm, ITU-T I.371), with one atomic operation per batch and only where there is a limit.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use mqueue::count::{Counter, EndCounter};
use wire::DropReason;

use crate::base::topology::Tenant;

const S: u64 = 1_000_000_000;

/// The longest time in which a tenant may take nothing because of what it has taken before.
const DEBT_NS_MAX: u64 = 60 * S;

/// What one worker writes about one tenant.
#[derive(Debug, Default)]
#[repr(align(64))]
struct Cell {
    outstanding: Counter,
    /// Messages that it has handed over to other workers, and those that it has taken over: the difference over all workers is on the way.
    handed_out: Counter,
    taken_over: EndCounter,
    /// Messages that the worker may still take in this turn, if there is a limit on those in flight.
    room: Counter,
    /// What it was charged, in bytes; see `schedule.rs`.
    charged: Counter,
    /// Function time, in nanoseconds.
    function_ns: Counter,
    /// Turns in which it had to wait for others.
    skipped: Counter,
    /// Turns in which a limit kept it from taking messages.
    limited: Counter,
}

/// A rate, and how much of it has been used.
#[derive(Debug, Default)]
struct Rate {
    per_s: AtomicU64,
    /// When all that was charged would have been used at this rate.
    due_ns: AtomicU64,
    /// It has changed since: nothing is due for what was taken at the former rate.
    is_new: AtomicBool,
}

impl Rate {
    fn set(&self, per_s: u64) {
        if self.per_s.swap(per_s, Ordering::Relaxed) != per_s && !mutants::on("keep_rate_debt") {
            self.is_new.store(true, Ordering::Relaxed);
        }
    }

    /// The first use of a new rate.
    fn begin(&self, now_ns: u64, burst_ns: u64) {
        if self.is_new.load(Ordering::Relaxed) && self.is_new.swap(false, Ordering::Relaxed) {
            self.due_ns.fetch_min(now_ns.saturating_add(burst_ns), Ordering::Relaxed);
        }
    }

    /// When it is below the rate again; at most `now_ns` if it is.
    fn below_ns(&self, now_ns: u64, burst_ns: u64) -> u64 {
        if self.per_s.load(Ordering::Relaxed) == 0 {
            return 0;
        }
        self.begin(now_ns, burst_ns);
        self.due_ns.load(Ordering::Relaxed).saturating_sub(burst_ns)
    }

    fn charge(&self, now_ns: u64, burst_ns: u64, amount: u64) {
        let per_s = self.per_s.load(Ordering::Relaxed);
        if per_s == 0 || amount == 0 {
            return;
        }
        self.begin(now_ns, burst_ns);
        let cost_ns = (u128::from(amount) * u128::from(S)).div_ceil(u128::from(per_s));
        let cost_ns = u64::try_from(cost_ns).unwrap_or(u64::MAX);
        let most_ns = now_ns.saturating_add(burst_ns).saturating_add(DEBT_NS_MAX);
        // What was not used in the past is gone, but for a burst.
        let least_ns = if mutants::on("rate_saves_up") { 0 } else { now_ns };
        let charge = |due_ns: u64| Some(due_ns.max(least_ns).saturating_add(cost_ns).min(most_ns));
        let _ = self.due_ns.fetch_update(Ordering::Relaxed, Ordering::Relaxed, charge);
    }
}

/// One tenant, as workers see it.
#[derive(Debug)]
pub struct TenantState {
    /// Its number, which no other tenant ever gets.
    pub id: u64,
    /// Its name.
    pub name: Box<str>,
    weight: AtomicU64,
    burst_ns: AtomicU64,
    messages: Rate,
    bytes: Rate,
    outstanding_max: AtomicU64,
    connections_max: AtomicU64,
    connections: AtomicU64,
    refused_connections: AtomicU64,
    cells: Box<[Cell]>,
}

/// What a tenant has used.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TenantUse {
    /// Messages in flight, as of each worker's last turn with a limit on them.
    pub outstanding: u64,
    /// Open TCP connections and clients over shared memory.
    pub connections: u64,
    /// Those refused because it has as many as it may.
    pub refused_connections: u64,
    /// What it was charged while it shared workers with others or had a limit: bytes, 64 for each message, and one for two
    /// nanoseconds of functions.
    pub charged: u64,
    /// Time of its functions, counted as `charged` is, in nanoseconds.
    pub function_ns: u64,
    /// Turns of workers in which it waited for others.
    pub skipped: u64,
    /// Turns of workers in which a limit kept it from taking messages.
    pub limited: u64,
}

impl TenantState {
    fn new(id: u64, of: &Tenant, workers: usize) -> Self {
        let state = Self {
            id,
            name: of.name.as_str().into(),
            weight: AtomicU64::default(),
            burst_ns: AtomicU64::default(),
            messages: Rate::default(),
            bytes: Rate::default(),
            outstanding_max: AtomicU64::default(),
            connections_max: AtomicU64::default(),
            connections: AtomicU64::default(),
            refused_connections: AtomicU64::default(),
            cells: (0..workers).map(|_| Cell::default()).collect(),
        };
        state.set(of);
        state
    }

    fn set(&self, of: &Tenant) {
        let Tenant { weight, messages_per_s, bytes_per_s, burst_ms, outstanding, .. } = *of;
        self.weight.store(weight.max(1).into(), Ordering::Relaxed);
        self.messages.set(messages_per_s);
        self.bytes.set(bytes_per_s);
        self.burst_ns.store(burst_ms.saturating_mul(1_000_000), Ordering::Relaxed);
        self.outstanding_max.store(outstanding, Ordering::Relaxed);
        self.connections_max.store(of.connections, Ordering::Relaxed);
    }

    pub(crate) fn weight(&self) -> i64 {
        self.weight.load(Ordering::Relaxed) as i64
    }

    /// Whether messages have a limit, so that a worker must ask [`Self::refuses`].
    pub(crate) fn has_limits(&self) -> bool {
        let limits = [&self.messages.per_s, &self.bytes.per_s, &self.outstanding_max];
        limits.into_iter().any(|limit| limit.load(Ordering::Relaxed) > 0)
    }

    /// Why it may take no message at present, and until when; that is not known of messages in flight. `outstanding` is what the asking
    /// worker has in flight for it.
    pub(crate) fn refuses(
        &self,
        worker: u16,
        outstanding: u64,
        now_ns: u64,
    ) -> Option<(DropReason, u64)> {
        let cell = &self.cells[usize::from(worker)];
        cell.outstanding.set(outstanding);
        let burst_ns = self.burst_ns.load(Ordering::Relaxed);
        let most = self.outstanding_max.load(Ordering::Relaxed);
        let below_ns = |rate: &Rate| rate.below_ns(now_ns, burst_ns);
        // Workers that ask at the same moment divide what is left.
        let left = most.saturating_sub(if most > 0 { self.outstanding() } else { 0 });
        cell.room.set(left.div_ceil(self.cells.len() as u64));
        // The rates come first: some of what is taken waits for them and for no other limit.
        let until_ns = below_ns(&self.messages).max(below_ns(&self.bytes));
        let refused = if until_ns > now_ns {
            Some((DropReason::TenantRate, until_ns))
        } else {
            (most > 0 && left == 0).then_some((DropReason::TenantOutstanding, now_ns))
        };
        cell.limited.add(u64::from(refused.is_some()));
        refused.filter(|_| !mutants::on("tenant_without_limits"))
    }

    /// What a worker had in flight when it asked.
    pub(crate) fn reported(&self, worker: u16) -> u64 {
        self.cells[usize::from(worker)].outstanding.value()
    }

    /// Whether messages in flight have a limit, so that a worker must ask [`Self::take_room`] for each.
    pub(crate) fn limits_outstanding(&self) -> bool {
        self.outstanding_max.load(Ordering::Relaxed) > 0
    }

    /// Whether the worker may take one more message in this turn; it is counted.
    pub(crate) fn take_room(&self, worker: u16) -> bool {
        let room = &self.cells[usize::from(worker)].room;
        let left = room.value();
        room.set(left.saturating_sub(1));
        left > 0 || mutants::on("tenant_turn_overshoots")
    }

    /// A worker hands a message over to another one: it is in flight from then on.
    pub(crate) fn count_handed_out(&self, worker: u16) {
        if !mutants::on("tenant_handover_unseen") {
            self.cells[usize::from(worker)].handed_out.one();
        }
    }

    /// A worker has taken a message over, and asks about its tenant in the next turn.
    pub(crate) fn count_taken_over(&self, worker: u16) {
        if !mutants::on("tenant_handover_unseen") {
            let cell = &self.cells[usize::from(worker)];
            cell.outstanding.add(u64::from(self.limits_outstanding()));
            cell.taken_over.one();
        }
    }

    /// Counts messages that it has taken against its rates.
    pub(crate) fn charge_rates(&self, now_ns: u64, messages: u64, bytes: u64) {
        let burst_ns = self.burst_ns.load(Ordering::Relaxed);
        self.messages.charge(now_ns, burst_ns, messages);
        self.bytes.charge(now_ns, burst_ns, bytes);
    }

    /// Counts what a worker charged to it.
    pub(crate) fn count_charged(&self, worker: u16, cost: u64, function_ns: u64) {
        let cell = &self.cells[usize::from(worker)];
        cell.charged.add(cost);
        cell.function_ns.add(function_ns);
    }

    /// Counts a turn in which it waited for others.
    pub(crate) fn count_skipped(&self, worker: u16) {
        self.cells[usize::from(worker)].skipped.add(1);
    }

    /// A client connected to it, over TCP or shared memory; false if it has as many as it may, which is counted.
    pub(crate) fn take_connection(&self) -> bool {
        let most = self.connections_max.load(Ordering::Relaxed);
        let take = |open: u64| (most == 0 || open < most).then_some(open + 1);
        let took = self.connections.fetch_update(Ordering::Relaxed, Ordering::Relaxed, take);
        if took.is_err() {
            self.refused_connections.fetch_add(1, Ordering::Relaxed);
        }
        took.is_ok()
    }

    /// Such a connection is closed.
    pub(crate) fn end_connection(&self) {
        self.connections.fetch_sub(1, Ordering::Relaxed);
    }

    fn outstanding(&self) -> u64 {
        let sum = |of: fn(&Cell) -> &Counter| -> u64 {
            self.cells.iter().map(|cell| of(cell).value()).sum()
        };
        // As edge BOOKS has it: what was taken over was handed out before, and is in flight where it was taken over. Read in this order
        // the difference is not too small.
        let taken_over: u64 = self.cells.iter().map(|cell| cell.taken_over.value()).sum();
        let on_the_way = sum(|cell| &cell.handed_out).saturating_sub(taken_over);
        sum(|cell| &cell.outstanding) + on_the_way
    }

    /// What it has used.
    pub fn used(&self) -> TenantUse {
        let sum = |of: fn(&Cell) -> &Counter| self.cells.iter().map(|cell| of(cell).value()).sum();
        TenantUse {
            outstanding: self.outstanding(),
            connections: self.connections.load(Ordering::Relaxed),
            refused_connections: self.refused_connections.load(Ordering::Relaxed),
            charged: sum(|cell| &cell.charged),
            function_ns: sum(|cell| &cell.function_ns),
            skipped: sum(|cell| &cell.skipped),
            limited: sum(|cell| &cell.limited),
        }
    }
}

#[derive(Debug, Default)]
struct Registry {
    last_id: u64,
    states: Vec<Arc<TenantState>>,
}

/// See the module documentation.
#[derive(Debug, Default)]
pub struct Tenants {
    workers: usize,
    registry: Mutex<Registry>,
    changes: AtomicU64,
}

impl Tenants {
    pub(crate) fn new(workers: usize) -> Self {
        Self { workers, ..Self::default() }
    }

    fn registry(&self) -> MutexGuard<'_, Registry> {
        self.registry.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// How often weights or limits have changed.
    #[inline]
    pub(crate) fn changes(&self) -> u64 {
        self.changes.load(Ordering::Acquire)
    }

    /// Sets the weights and limits of these tenants. Others stay without limits if `owns` says that they own services, and are forgotten
    /// otherwise: one that comes back gets another number.
    pub fn set(&self, tenants: &[Tenant], owns: impl Fn(&str) -> bool) {
        let mut registry = self.registry();
        let Registry { last_id, states } = &mut *registry;
        for tenant in tenants {
            match states.iter().find(|state| *state.name == *tenant.name) {
                Some(state) => state.set(tenant),
                None => {
                    *last_id += 1;
                    states.push(Arc::new(TenantState::new(*last_id, tenant, self.workers)));
                }
            }
        }
        states.retain(|state| {
            let listed = tenants.iter().any(|tenant| *tenant.name == *state.name);
            if !listed {
                state.set(&Tenant::new(&state.name));
            }
            listed || owns(&state.name)
        });
        self.changes.fetch_add(1, Ordering::Release);
    }

    /// The state of the tenant of this name; one without limits if it is not known.
    pub fn named(&self, name: &str) -> Arc<TenantState> {
        let mut registry = self.registry();
        if let Some(state) = registry.states.iter().find(|state| &*state.name == name) {
            return state.clone();
        }
        registry.last_id += 1;
        let state = TenantState::new(registry.last_id, &Tenant::new(name), self.workers);
        registry.states.push(Arc::new(state));
        registry.states[registry.states.len() - 1].clone()
    }

    /// All tenants, by number.
    pub fn all(&self) -> Vec<Arc<TenantState>> {
        self.registry().states.clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tenant(name: &str) -> Tenant {
        Tenant::new(name)
    }

    #[test]
    fn numbers_are_never_used_again() {
        let tenants = Tenants::new(1);
        let names = ["a", "b", "c"];
        let mut seen = Vec::new();
        for round in 0..50 {
            tenants.set(&[tenant(names[round % 3])], |_| false);
            let all = tenants.all();
            assert_eq!(all.len(), 1, "the others are forgotten");
            seen.push(all[0].id);
        }
        assert!(seen.is_sorted_by(|one, next| one < next), "{seen:?}");
        let held = tenants.named("held");
        tenants.set(&[], |name| name == "held");
        assert_eq!(tenants.named("held").id, held.id, "it owns services");
        tenants.set(&[], |_| false);
        assert!(tenants.named("held").id > held.id, "though there is still a reference");
    }

    #[test]
    fn a_rate_is_kept_in_the_long_run_and_a_burst_may_be_used_at_once() {
        let tenants = Tenants::new(2);
        tenants.set(&[Tenant { messages_per_s: 1000, burst_ms: 100, ..tenant("a") }], |_| false);
        let state = tenants.named("a");
        let mut taken = 0;
        // Two workers that take batches of three as fast as they may, for 10 s.
        for now_us in (0..10_000_000).step_by(50) {
            let (worker, now_ns) = ((now_us / 50 % 2) as u16, now_us * 1000);
            if state.refuses(worker, 0, now_ns).is_none() {
                state.charge_rates(now_ns, 3, 300);
                taken += 3;
                assert!(taken <= 100 + now_us / 1000 + 6, "{taken} after {now_us} us");
            }
        }
        assert!((10_090..=10_106).contains(&taken), "{taken}: 100 at once, then 1000 a second");
        assert!(state.used().limited > 0);
    }

    /// The clock of a machine is late when an engine starts, and tenants are idle for long.
    #[test]
    fn a_new_or_idle_tenant_has_a_burst_and_no_more() {
        for (burst_ms, begin_ns) in [(0, S), (100, 3600 * S), (1000, 1_000_000 * S)] {
            let tenants = Tenants::new(1);
            let limits =
                Tenant { messages_per_s: 1000, bytes_per_s: 100_000, burst_ms, ..tenant("a") };
            tenants.set(&[limits], |_| false);
            let state = tenants.named("a");
            let mut now_ns = begin_ns;
            for idle_ns in [0, S, 86_400 * S] {
                now_ns += idle_ns + 2 * burst_ms * 1_000_000;
                let taken = (0..10_000).take_while(|_| {
                    let below = state.refuses(0, 0, now_ns).is_none();
                    state.charge_rates(now_ns, u64::from(below), 100 * u64::from(below));
                    below
                });
                assert_eq!(taken.count() as u64, burst_ms + 1, "after {idle_ns} ns at {begin_ns}");
                now_ns += (burst_ms + 1) * 1_000_000;
            }
        }
    }

    #[test]
    fn bytes_and_messages_in_flight_have_limits_of_their_own_over_all_workers() {
        let tenants = Tenants::new(2);
        tenants.set(&[Tenant { bytes_per_s: 1000, outstanding: 10, ..tenant("a") }], |_| false);
        let state = tenants.named("a");
        assert_eq!(state.refuses(0, 9, 0), None);
        assert_eq!([0, 1].map(|_| state.take_room(0)), [true, false], "10 are one more than 9");
        assert_eq!(state.refuses(1, 1, 0), Some((DropReason::TenantOutstanding, 0)));
        assert_eq!(state.refuses(1, 0, 0), None);
        state.charge_rates(0, 1, 101);
        assert_eq!(state.refuses(0, 0, 0), Some((DropReason::TenantRate, 1_000_000)));
        assert_eq!(state.refuses(0, 0, 1_000_000), None, "1 ms is one byte");
        // What one worker has handed over and another one has not taken is in flight.
        let handed = tenants.named("a");
        (0..9).for_each(|_| handed.count_handed_out(0));
        assert_eq!(handed.used().outstanding, 9);
        (0..4).for_each(|_| handed.count_taken_over(1));
        assert_eq!(handed.used().outstanding, 9, "the other one has some of them");
        assert!(handed.refuses(1, 3, 1_000_000).is_none(), "one of them has ended");
        assert_eq!(handed.used().outstanding, 8);
        (0..5).for_each(|_| handed.count_taken_over(1));
        assert!(handed.refuses(1, 0, 1_000_000).is_none());
        assert_eq!(handed.used().outstanding, 0);
        state.charge_rates(0, 1, u64::MAX);
        let over = Some((DropReason::TenantRate, DEBT_NS_MAX));
        assert_eq!(state.refuses(0, 0, DEBT_NS_MAX - 1), over, "no overflow");
        assert_eq!(state.refuses(0, 0, DEBT_NS_MAX), None, "a debt has a limit");
        tenants.set(&[tenant("a")], |_| false);
        assert_eq!(state.refuses(0, 1 << 40, 0), None, "limits can be removed");
    }

    #[test]
    fn a_change_of_the_rate_ends_what_is_due_for_the_former_one() {
        let tenants = Tenants::new(1);
        let with = |messages_per_s| Tenant { messages_per_s, burst_ms: 10, ..tenant("a") };
        tenants.set(&[with(1)], |_| false);
        let state = tenants.named("a");
        state.charge_rates(S, 30, 0);
        let over = |now_ns| state.refuses(0, 0, now_ns).is_some();
        assert!(over(S) && over(2 * S));
        tenants.set(&[with(1)], |_| false);
        assert!(over(2 * S), "it has not changed");
        tenants.set(&[with(1000)], |_| false);
        assert!(!over(2 * S));
        state.charge_rates(2 * S, 1, 0);
        assert!(over(2 * S) && !over(2 * S + 1_000_000), "the burst is used up");
    }

    #[test]
    fn connections_have_a_limit() {
        let tenants = Tenants::new(1);
        tenants.set(&[Tenant { connections: 2, ..tenant("a") }], |_| false);
        let state = tenants.named("a");
        assert_eq!([0, 1, 2].map(|_| state.take_connection()), [true, true, false]);
        state.end_connection();
        assert!(state.take_connection());
        let used = state.used();
        assert_eq!((used.connections, used.refused_connections), (2, 1));
    }
}
