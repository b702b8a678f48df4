//! Whose requests are taken next: tenants share a worker, services share their tenant's part, endpoints share their
//! service's part.
//!
//! Each tenant, each service and each endpoint of a service has a *deficit*: what it may still spend in this round
//! (deficit round robin, Shreedhar and Varghese 1995). The cost of received and gathered messages, of the bytes of kernels'
//! connections in both directions, and of the time of functions is charged to all three. One with no deficit left is skipped in the turn;
//! its requests wait in their sockets and rings. A new round
//! begins when all that have a *backlog* have spent theirs. In a turn, those that were skipped or took at least a
//! full batch have a backlog: one that took less had no more, one that took nothing may be idle or wait for credit.
//! So a tenant with little load is served at once and does not delay others; its unused part goes to the others. If
//! none has a backlog, all got what they asked for, and everything starts again.
//!
//! What a tenant gets in a round is in proportion to its weight. A receive call takes a whole batch, so a deficit may become negative:
//! the tenant pays for that in later rounds. An idle tenant keeps the deficit of one round and accumulates no more.
//!
//! Tenants with limits ([`TenantState`]) are asked about once per turn. One that is over a limit takes no requests in that turn: its
//! datagrams are dropped with a reason, and requests over streams and rings wait.
//!
//! With one tenant without limits nothing is charged and everything is allowed: [`Schedule::allows`] is one branch. Otherwise a turn
//! costs time for those that were charged since the last one, and not for those that are idle.

use std::sync::Arc;

use crate::service::share::ServiceShare;
use crate::tenants::{TenantState, Tenants};

/// A kind of endpoint, as the source of a service's requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Udp,
    Tcp,
    Shm,
    Peer,
    /// Bytes of the connections of kernels, in both directions.
    Sockets,
}

impl Kind {
    const COUNT: usize = 5;
}

/// Endpoints that take turns in being the first; connections of kernels have their own place in a turn.
const IN_TURN: u64 = 4;

/// Cost of a message besides its bytes, in bytes.
const MESSAGE_COST: i64 = 64;
/// Messages of a full batch: an endpoint that stops at its limit has taken at least this many. …
const FULL_BATCH: u32 = 64;
/// … while several tenants have messages: each waits for a batch of every other one.
const SHARED_BATCH: u32 = 16;
/// For how many turns tenants count as having messages after one in which several were charged.
const SHARED_TURNS: u64 = 64;
/// Deficit per round of the tenant with the largest weight: many full batches of short messages, a few of long ones.
const QUANTUM: i64 = 256 << 10;
/// Nanoseconds of functions that cost as much as a byte: about what a worker spends on one.
const FUNCTION_NS: u64 = 2;

/// The deficit of one tenant, service or endpoint.
#[derive(Clone, Copy, Debug)]
struct Deficit {
    /// What it gets in a round, and keeps at most.
    quantum: i64,
    left: i64,
    /// Its cost since the current turn began.
    taken: i64,
    /// It was skipped since the current turn began.
    skipped: bool,
    /// It is in the list of those that are not as they were at first.
    listed: bool,
}

impl Deficit {
    const fn fresh(quantum: i64) -> Self {
        Self { quantum, left: quantum, taken: 0, skipped: false, listed: false }
    }

    fn is_backlogged(&self, full_batch: i64) -> bool {
        self.skipped || self.taken >= full_batch
    }

    /// The number of rounds after which it has deficit left.
    fn rounds_needed(&self) -> i64 {
        if self.left > 0 { 0 } else { 1 - self.left / self.quantum }
    }
}

/// Tenants, services or endpoints that share a part.
#[derive(Debug, Default)]
struct Sharers {
    all: Vec<Deficit>,
    /// Those that were charged and have not got everything back.
    charged: Vec<u32>,
}

impl Sharers {
    /// Makes room for one with this number.
    fn make_room_for(&mut self, number: usize) {
        let count = self.all.len().max(number + 1);
        self.all.resize(count, Deficit::fresh(QUANTUM));
        self.charged.reserve(count - self.charged.len());
    }

    fn reset(&mut self, number: usize) {
        let Deficit { quantum, listed, .. } = self.all[number];
        self.all[number] = Deficit { listed, ..Deficit::fresh(quantum) };
    }

    fn set_quantum(&mut self, number: usize, quantum: i64) {
        let sharer = &mut self.all[number];
        sharer.quantum = quantum;
        sharer.left = if sharer.listed { sharer.left.min(quantum) } else { quantum };
    }

    /// Whether this one has deficit left; otherwise it is skipped.
    fn ask(&mut self, number: usize) -> bool {
        let sharer = &mut self.all[number];
        sharer.skipped |= sharer.left <= 0;
        sharer.left > 0
    }

    fn charge(&mut self, number: usize, cost: i64) {
        let sharer = &mut self.all[number];
        sharer.left = sharer.left.saturating_sub(cost);
        sharer.taken = sharer.taken.saturating_add(cost);
        if !std::mem::replace(&mut sharer.listed, true) {
            self.charged.push(number as u32);
        }
    }

    /// Nothing is to be done when a turn begins.
    fn is_settled(&self) -> bool {
        self.charged.is_empty()
    }

    /// A turn begins: starts as many rounds as needed until one with a backlog has deficit left. If none has a backlog, all start
    /// again.
    fn begin_turn(&mut self, full_batch: i64) {
        let Self { all, charged } = self;
        let deficits = charged.iter().map(|number| &all[*number as usize]);
        let rounds =
            deficits.filter(|of| of.is_backlogged(full_batch)).map(Deficit::rounds_needed).min();
        charged.retain(|number| {
            let sharer = &mut all[*number as usize];
            let quantum = sharer.quantum;
            sharer.left = match rounds {
                Some(rounds) => {
                    let more = rounds.saturating_mul(quantum);
                    sharer.left.saturating_add(more).min(quantum)
                }
                None => quantum,
            };
            (sharer.taken, sharer.skipped) = (0, false);
            sharer.listed = sharer.left < quantum;
            sharer.listed
        });
    }
}

/// One service of a worker.
#[derive(Debug, Default)]
struct Entry {
    tenant: usize,
    endpoints: Sharers,
}

/// A tenant with services on this worker.
#[derive(Debug)]
struct Placed {
    state: Arc<TenantState>,
    /// How many services; a place without services is free.
    services: usize,
    /// It was skipped since the current turn began.
    skipped: bool,
    /// A limit keeps it from taking requests in this turn.
    shed: bool,
}

/// See the module documentation.
#[derive(Debug, Default)]
pub(crate) struct Schedule {
    worker: u16,
    /// There is at most one tenant, and it has no limits.
    is_plain: bool,
    turns: u64,
    now_ns: u64,
    /// Until this turn several tenants have messages.
    shared_until: u64,
    /// Messages that an endpoint takes of one port or client in this turn.
    batch: u32,
    /// The changes of weights and limits that it has seen.
    changes: u64,
    placed: Vec<Placed>,
    tenants: Sharers,
    /// Services that share their tenant's part: by tenant, then by slot.
    services: Vec<Sharers>,
    /// Tenants whose services are to be settled when a turn begins; each at most once.
    services_to_settle: Vec<u32>,
    /// By slot.
    entries: Vec<Option<Entry>>,
    /// Services whose endpoints are.
    entries_to_settle: Vec<u32>,
    /// Tenants with limits.
    limited: Vec<usize>,
    /// Services that take no requests because of the limits of last turn.
    shed: Vec<usize>,
}

impl Schedule {
    pub(crate) fn new(worker: u16) -> Self {
        Self { worker, is_plain: true, batch: u32::MAX, ..Self::default() }
    }

    /// Adds a service of this tenant.
    pub(crate) fn place(&mut self, service: usize, tenant: Arc<TenantState>) {
        self.remove(service);
        let known = self.placed.iter().position(|p| p.state.id == tenant.id && p.services > 0);
        let free = || self.placed.iter().position(|placed| placed.services == 0);
        let number = known.or_else(free).unwrap_or(self.placed.len());
        let placed = Placed { state: tenant, services: 0, skipped: false, shed: false };
        if number == self.placed.len() {
            self.placed.push(placed);
            self.services.push(Sharers::default());
            self.tenants.make_room_for(number);
            self.services_to_settle.reserve(number + 1);
        } else if known.is_none() {
            self.placed[number] = placed;
            self.tenants.reset(number);
        }
        self.placed[number].services += 1;
        self.services[number].make_room_for(service);
        self.services[number].reset(service);
        let mut endpoints = Sharers::default();
        endpoints.make_room_for(Kind::COUNT - 1);
        if self.entries.len() <= service {
            self.entries.resize_with(service + 1, || None);
        }
        self.entries_to_settle.retain(|listed| *listed as usize != service);
        self.entries_to_settle.reserve(service + 1);
        self.entries[service] = Some(Entry { tenant: number, endpoints });
        self.shed.reserve((service + 1).saturating_sub(self.shed.len()));
        self.read_settings();
    }

    /// Removes a service.
    pub(crate) fn remove(&mut self, service: usize) {
        if let Some(entry) = self.entries.get_mut(service).and_then(Option::take) {
            self.placed[entry.tenant].services -= 1;
            self.read_settings();
        }
    }

    /// Takes over the weights and limits of the tenants.
    fn read_settings(&mut self) {
        let present = || self.placed.iter().enumerate().filter(|(_, placed)| placed.services > 0);
        let weight = |placed: &Placed| match mutants::on("tenants_without_weights") {
            true => 1,
            false => placed.state.weight(),
        };
        let heaviest = present().map(|(_, placed)| weight(placed)).max().unwrap_or(1);
        self.limited.clear();
        for (number, placed) in present() {
            self.tenants.set_quantum(number, (QUANTUM * weight(placed) / heaviest).max(1));
            if placed.state.has_limits() {
                self.limited.push(number);
            }
        }
        self.is_plain = present().count() <= 1 && self.limited.is_empty() && self.shed.is_empty();
        if self.is_plain {
            self.batch = u32::MAX;
        }
    }

    /// A turn begins.
    #[inline]
    pub(crate) fn begin_turn(&mut self, now_ns: u64, all: &Tenants, shares: &mut [ServiceShare]) {
        self.turns += 1;
        if self.changes != all.changes() {
            self.changes = all.changes();
            self.read_settings();
        }
        if !self.is_plain {
            self.now_ns = now_ns;
            self.begin_shared_turn();
            if !self.limited.is_empty() || !self.shed.is_empty() {
                self.apply_limits(shares);
            }
        }
    }

    #[cold]
    fn begin_shared_turn(&mut self) {
        let Self { tenants, services, entries, placed, .. } = self;
        for number in &tenants.charged {
            let placed = &mut placed[*number as usize];
            if std::mem::take(&mut placed.skipped) {
                placed.state.count_skipped(self.worker);
            }
        }
        let served =
            tenants.charged.iter().filter(|number| tenants.all[**number as usize].taken > 0);
        if served.count() > 1 {
            self.shared_until = self.turns + SHARED_TURNS;
        }
        let full_batch = i64::from(FULL_BATCH.min(self.batch)) * MESSAGE_COST;
        self.batch = if self.turns < self.shared_until { SHARED_BATCH } else { u32::MAX };
        tenants.begin_turn(full_batch);
        self.services_to_settle.retain(|number| {
            let sharers = &mut services[*number as usize];
            sharers.begin_turn(full_batch);
            !sharers.is_settled()
        });
        self.entries_to_settle.retain(|service| {
            let Some(entry) = &mut entries[*service as usize] else { return false };
            entry.endpoints.begin_turn(full_batch);
            !entry.endpoints.is_settled()
        });
    }

    /// Finds the tenants that are over a limit; their services take no requests in this turn.
    #[cold]
    fn apply_limits(&mut self, shares: &mut [ServiceShare]) {
        for service in self.shed.drain(..) {
            if let Some(share) = shares.get_mut(service) {
                share.set_shed(None);
            }
        }
        self.placed.iter_mut().for_each(|placed| placed.shed = false);
        for tenant in &self.limited {
            let of_tenant = self.entries.iter().enumerate().filter_map(|(service, entry)| {
                entry.as_ref().filter(|entry| entry.tenant == *tenant).map(|_| service)
            });
            let in_flight = |service| shares.get(service).map_or(0, ServiceShare::in_flight);
            let outstanding = of_tenant.clone().map(in_flight).sum();
            let placed = &mut self.placed[*tenant];
            let reason = placed.state.refuses(self.worker, outstanding, self.now_ns);
            placed.shed = reason.is_some();
            if reason.is_some() {
                for service in of_tenant {
                    if let Some(share) = shares.get_mut(service) {
                        share.set_shed(reason);
                        self.shed.push(service);
                    }
                }
            }
        }
        if self.limited.is_empty() {
            self.read_settings();
        }
    }

    /// Index of the endpoint that is first in this turn.
    pub(crate) fn first_endpoint(&self) -> usize {
        (self.turns % IN_TURN) as usize
    }

    /// Whether each endpoint has been the first since the last call that returned true.
    pub(crate) fn is_new_round(&self) -> bool {
        self.first_endpoint() == 0
    }

    /// Incremented once each endpoint has been the first: in each round another port, connection, client or worker is
    /// the first of its endpoint, since the first one gets the credit that is left.
    pub(crate) fn round(&self) -> usize {
        (self.turns / IN_TURN) as usize
    }

    /// The most messages, or buffers with some, that an endpoint should take of one port or client in this turn.
    #[inline(always)]
    pub(crate) fn batch_messages(&self) -> u32 {
        if mutants::on("tenants_in_full_batches") { u32::MAX } else { self.batch }
    }

    /// Whether requests of a service are taken from an endpoint that has some.
    #[inline(always)]
    pub(crate) fn allows(&mut self, service: u16, from: Kind) -> bool {
        self.is_plain || self.has_left(service.into(), from)
    }

    #[cold]
    fn has_left(&mut self, service: usize, from: Kind) -> bool {
        let Some(Some(entry)) = self.entries.get_mut(service) else { return true };
        let placed = &mut self.placed[entry.tenant];
        if placed.shed && from == Kind::Sockets {
            return false;
        }
        // Every level without deficit notes it, so that all of them refill in the same turn.
        let endpoint = entry.endpoints.ask(from as usize);
        let of_tenant = self.services[entry.tenant].ask(service);
        let tenant = self.tenants.ask(entry.tenant);
        placed.skipped |= !tenant;
        tenant && of_tenant && endpoint
    }

    /// Charges requests of a service that were taken from an endpoint, and the time of its functions meanwhile.
    #[inline(always)]
    pub(crate) fn charge(&mut self, service: usize, from: Kind, taken: Taken) {
        if !self.is_plain {
            self.charge_shared(service, Some(from), taken);
        }
    }

    /// Whether there are several tenants, or one with limits.
    #[inline(always)]
    pub(crate) fn is_shared(&self) -> bool {
        !self.is_plain
    }

    /// Charges replies of a service that were gathered, and the time of its functions meanwhile.
    pub(crate) fn charge_replies(&mut self, service: usize, messages: u64, function_ns: u64) {
        self.charge_shared(service, None, Taken { messages, bytes: 0, function_ns });
    }

    #[cold]
    fn charge_shared(&mut self, service: usize, from: Option<Kind>, taken: Taken) {
        let Some(Some(entry)) = self.entries.get_mut(service) else { return };
        let Taken { messages, bytes, function_ns } = taken;
        let cost = messages
            .saturating_mul(MESSAGE_COST as u64)
            .saturating_add(bytes)
            .saturating_add(function_ns / FUNCTION_NS);
        if cost == 0 {
            return;
        }
        let placed = &self.placed[entry.tenant];
        placed.state.count_charged(self.worker, cost, function_ns);
        // Other workers have charged what they hand over. What is dropped for a limit does not count against it.
        if from.is_some_and(|from| from != Kind::Peer) && !placed.shed {
            placed.state.charge_rates(self.now_ns, messages, bytes);
        }
        let cost = i64::try_from(cost).unwrap_or(i64::MAX);
        self.tenants.charge(entry.tenant, cost);
        let services = &mut self.services[entry.tenant];
        if services.is_settled() {
            self.services_to_settle.push(entry.tenant as u32);
        }
        services.charge(service, cost);
        if let Some(from) = from {
            if entry.endpoints.is_settled() {
                self.entries_to_settle.push(service as u32);
            }
            entry.endpoints.charge(from as usize, cost);
        }
    }
}

/// What a service has taken of a worker.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Taken {
    pub(crate) messages: u64,
    pub(crate) bytes: u64,
    /// Time of its functions, in nanoseconds.
    pub(crate) function_ns: u64,
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::topology::{Tenant, WEIGHT_MAX};

    /// A schedule with the tenants of an engine.
    struct Play {
        schedule: Schedule,
        tenants: Tenants,
        now_ns: u64,
    }

    impl Play {
        fn new() -> Self {
            Self { schedule: Schedule::new(0), tenants: Tenants::new(1), now_ns: 0 }
        }

        fn place(&mut self, service: usize, tenant: &str) {
            self.schedule.place(service, self.tenants.named(tenant));
        }

        fn begin_turn(&mut self) {
            self.schedule.begin_turn(self.now_ns, &self.tenants, &mut []);
        }

        fn allows(&mut self, service: u16, from: Kind) -> bool {
            self.schedule.allows(service, from)
        }

        fn charge(&mut self, service: usize, from: Kind, messages: u64, bytes: u64) {
            self.schedule.charge(service, from, Taken { messages, bytes, function_ns: 0 });
        }
    }

    /// A service that always has full batches of this many messages, of this many bytes each, at some endpoints.
    #[derive(Clone, Copy, Debug)]
    struct Flood {
        messages: u64,
        bytes: u64,
        from: Kind,
    }

    fn flood() -> impl Strategy<Value = Flood> {
        let from = [Kind::Udp, Kind::Tcp, Kind::Shm, Kind::Peer, Kind::Sockets];
        let from = prop::sample::select(from.to_vec());
        (64u64..1024, 0u64..1500, from).prop_map(|(messages, bytes, from)| Flood {
            messages,
            bytes: messages * bytes,
            from,
        })
    }

    fn cost(flood: &Flood) -> i64 {
        flood.messages as i64 * MESSAGE_COST + flood.bytes as i64
    }

    /// Runs turns in which every flooding service has requests; returns what each was charged.
    fn play(schedule: &mut Play, floods: &[Flood], turns: usize) -> Vec<i64> {
        let mut charged = vec![0; floods.len()];
        for _ in 0..turns {
            schedule.begin_turn();
            let mut served = false;
            for (service, flood) in floods.iter().enumerate() {
                if schedule.allows(service as u16, flood.from) {
                    schedule.charge(service, flood.from, flood.messages, flood.bytes);
                    charged[service] += cost(flood);
                    served = true;
                }
            }
            assert!(served, "a turn with work takes some of it");
        }
        charged
    }

    proptest! {
        #[test]
        fn two_flooding_tenants_get_equal_parts(one in flood(), other in flood()) {
            let mut schedule = Play::new();
            schedule.place(0, "one");
            schedule.place(1, "other");
            let charged = play(&mut schedule, &[one, other], 2000);
            let apart = (charged[0] - charged[1]).abs();
            // The cost of one batch, and one round.
            prop_assert!(apart <= QUANTUM + cost(&one) + cost(&other), "{charged:?}");
        }

        #[test]
        fn a_tenant_with_many_services_gets_one_part(floods in prop::collection::vec(flood(), 2..8)) {
            let mut schedule = Play::new();
            for service in 0..floods.len() {
                schedule.place(service, if service == 0 { "one" } else { "many" });
            }
            let charged = play(&mut schedule, &floods, 3000);
            let many: i64 = charged[1..].iter().sum();
            let batches: i64 = floods.iter().map(cost).sum();
            prop_assert!(many - charged[0] <= 2 * QUANTUM + batches, "{charged:?}");
        }

        /// Idle sockets are reported as ready by a worker that does not sleep: their tenant asks in every turn. It
        /// may also ask for requests that find no credit.
        #[test]
        fn a_tenant_with_little_load_delays_no_other(noisy in flood(), little in 0u64..u64::from(SHARED_BATCH)) {
            let mut schedule = Play::new();
            schedule.place(0, "noisy");
            schedule.place(1, "little");
            schedule.place(2, "idle");
            let mut skipped = 0;
            for turn in 0..2000 {
                schedule.begin_turn();
                let allowed = schedule.allows(0, noisy.from);
                if allowed {
                    schedule.charge(0, noisy.from, noisy.messages, noisy.bytes);
                }
                prop_assert!(schedule.allows(1, Kind::Udp), "in turn {}", turn);
                schedule.charge(1, Kind::Udp, little, 0);
                prop_assert!(schedule.allows(2, Kind::Udp), "in turn {}", turn);
                skipped = if allowed { 0 } else { skipped + 1 };
                prop_assert!(skipped <= 1, "in turn {}", turn);
            }
        }

        #[test]
        fn a_tenant_with_little_load_is_served_at_once(noisy in flood(), every in 1usize..50) {
            let mut schedule = Play::new();
            schedule.place(0, "noisy");
            schedule.place(1, "quiet");
            for turn in 0..2000 {
                schedule.begin_turn();
                if schedule.allows(0, noisy.from) {
                    schedule.charge(0, noisy.from, noisy.messages, noisy.bytes);
                }
                if turn % every == 0 {
                    // Less than a round's cost in the time in which the other one uses up several rounds.
                    prop_assert!(schedule.allows(1, Kind::Udp), "in turn {turn}");
                    schedule.charge(1, Kind::Udp, 1, 64);
                }
            }
        }
    }

    #[test]
    fn a_single_tenant_is_never_limited_before_and_after_a_second_one() {
        let mut schedule = Play::new();
        schedule.place(0, "default");
        schedule.place(1, "default");
        let flood = |schedule: &mut Play| {
            schedule.begin_turn();
            let allowed = [0, 1].map(|service| schedule.allows(service, Kind::Udp));
            (0..2).for_each(|service| schedule.charge(service, Kind::Udp, 1 << 20, 1 << 30));
            allowed
        };
        for _ in 0..10 {
            assert_eq!(flood(&mut schedule), [true, true]);
        }
        schedule.place(2, "other");
        flood(&mut schedule);
        assert!(schedule.allows(2, Kind::Udp));
        schedule.charge(2, Kind::Udp, 64, 0);
        schedule.begin_turn();
        assert!(schedule.allows(2, Kind::Udp));
        assert!(!schedule.allows(0, Kind::Udp), "it has no deficit left, and the other has");
        // The other one asks again and takes nothing: it has no backlog.
        schedule.begin_turn();
        assert!(schedule.allows(2, Kind::Udp));
        schedule.begin_turn();
        assert!(schedule.allows(0, Kind::Udp), "an idle tenant delays no other");
        schedule.schedule.remove(2);
        for _ in 0..10 {
            assert_eq!(flood(&mut schedule), [true, true]);
        }
    }

    fn tenant(name: &str, weight: u32) -> Tenant {
        Tenant { weight, ..Tenant::new(name) }
    }

    proptest! {
        /// In proportion to their weights, whatever they send.
        #[test]
        fn flooding_tenants_get_parts_of_their_weights(
            floods in prop::collection::vec((flood(), 1u32..=WEIGHT_MAX), 2..7)
        ) {
            let mut play = Play::new();
            let names: Vec<String> = (0..floods.len()).map(|n| format!("t{n}")).collect();
            let of = |(name, (_, weight)): (&String, &(Flood, u32))| tenant(name, *weight);
            play.tenants.set(&names.iter().zip(&floods).map(of).collect::<Vec<_>>(), |_| false);
            for (service, name) in names.iter().enumerate() {
                play.place(service, name);
            }
            let (floods, weights): (Vec<_>, Vec<_>) = floods.into_iter().unzip();
            let charged = super::tests::play(&mut play, &floods, 4000);
            // What each got for its weight; it may be wrong by a batch and a round of each.
            let biggest = floods.iter().map(cost).max().unwrap_or(0) + 2 * QUANTUM;
            let parts: Vec<f64> =
                charged.iter().zip(&weights).map(|(got, w)| *got as f64 / f64::from(*w)).collect();
            let slack: Vec<f64> = weights.iter().map(|w| biggest as f64 / f64::from(*w)).collect();
            for (one, more) in parts.iter().zip(&slack) {
                for (other, also) in parts.iter().zip(&slack) {
                    prop_assert!((one - other).abs() <= more + also, "{charged:?} for {weights:?}");
                }
            }
        }

        /// The list of those to look at has each at most once, and what is not in it is as it was at first.
        #[test]
        fn only_charged_tenants_are_looked_at(
            steps in prop::collection::vec((0usize..40, 0u64..2000, any::<bool>()), 1..400)
        ) {
            let mut play = Play::new();
            (0..40).for_each(|service| play.place(service, &format!("t{}", service % 13)));
            for (service, messages, turns) in steps {
                if turns {
                    play.begin_turn();
                }
                if play.allows(service as u16, Kind::Udp) {
                    play.charge(service, Kind::Udp, messages, 0);
                }
                let Schedule { tenants, services, entries, .. } = &play.schedule;
                let endpoints = entries.iter().flatten().map(|entry| &entry.endpoints);
                for sharers in std::iter::once(tenants).chain(services).chain(endpoints) {
                    let mut listed = sharers.charged.clone();
                    listed.sort_unstable();
                    listed.dedup();
                    prop_assert_eq!(listed.len(), sharers.charged.len());
                    for (number, sharer) in (0..).zip(&sharers.all) {
                        prop_assert_eq!(sharer.listed, listed.contains(&number));
                        prop_assert!(sharer.listed || sharer.left == sharer.quantum);
                    }
                }
                let unsettled = |sharers: &Sharers| !sharers.is_settled();
                for (number, sharers) in (0..).zip(services) {
                    let listed = play.schedule.services_to_settle.contains(&number);
                    prop_assert_eq!(unsettled(sharers), listed);
                }
                for (number, entry) in (0..).zip(entries.iter().flatten()) {
                    let listed = play.schedule.entries_to_settle.contains(&number);
                    prop_assert_eq!(unsettled(&entry.endpoints), listed);
                }
            }
        }
    }

    /// A tenant of the smallest weight takes as much as it likes while others are idle.
    #[test]
    fn a_small_weight_costs_nothing_while_others_are_idle() {
        let mut play = Play::new();
        play.tenants.set(&[tenant("small", 1), tenant("large", WEIGHT_MAX)], |_| false);
        play.place(0, "small");
        play.place(1, "large");
        for messages in [1, 63, 64, 5000] {
            for turn in 0..100 {
                play.begin_turn();
                assert!(play.allows(0, Kind::Udp), "{messages} messages in turn {turn}");
                play.charge(0, Kind::Udp, messages, 0);
                assert!(play.allows(1, Kind::Udp));
            }
        }
    }

    #[test]
    fn functions_pay_for_their_time() {
        let mut play = Play::new();
        play.place(0, "slow");
        play.place(1, "fast");
        let mut got = [0, 0];
        for _ in 0..1000 {
            play.begin_turn();
            for (service, function_ns) in [(0, 100_000), (1, 0)] {
                if play.allows(service, Kind::Udp) {
                    let taken = Taken { messages: 64, bytes: 0, function_ns };
                    play.schedule.charge(service.into(), Kind::Udp, taken);
                    got[usize::from(service)] += 64;
                }
            }
        }
        // 64 messages cost 4096, and with 100 us of functions 54096.
        assert!(got[1] > 8 * got[0] && got[1] == 64_000, "{got:?}");
        assert_eq!(play.tenants.named("slow").used().function_ns, got[0] / 64 * 100_000);
        assert!(play.tenants.named("slow").used().skipped > 0);
        assert_eq!(play.tenants.named("fast").used().skipped, 0);
    }

    #[test]
    fn a_change_of_weights_counts_from_the_next_turn() {
        let mut play = Play::new();
        play.place(0, "one");
        play.place(1, "other");
        let flood = Flood { messages: 100, bytes: 0, from: Kind::Udp };
        let floods = [flood, flood];
        let before = super::tests::play(&mut play, &floods, 4000);
        assert!((before[0] - before[1]).abs() <= 2 * QUANTUM, "{before:?}");
        play.tenants.set(&[tenant("one", 3)], |_| true);
        let after = super::tests::play(&mut play, &floods, 4000);
        assert!((after[0] - 3 * after[1]).abs() <= 8 * QUANTUM, "{after:?}");
    }
}
