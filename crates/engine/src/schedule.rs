//! Whose requests are taken next: tenants share a worker, services share their tenant's part, endpoints share their
//! service's part.
//!
//! Each tenant, each service and each endpoint of a service has a *deficit*: what it may still spend in this round
//! (deficit round robin, Shreedhar and Varghese 1995). The cost of received and gathered messages, and of the bytes of kernels'
//! connections in both directions, is charged to all three. One with no deficit left is skipped in the turn; its requests wait in their sockets and rings. A new round
//! begins when all that have a *backlog* have spent theirs. In a turn, those that were skipped or took at least a
//! full batch have a backlog: one that took less had no more, one that took nothing may be idle or wait for credit.
//! So a tenant with little load is served at once and does not delay others; its unused part goes to the others.
//!
//! A receive call takes a whole batch, so a deficit may become negative: the tenant pays for that in later rounds. An
//! idle tenant keeps the deficit of one round and accumulates no more.
//!
//! With one tenant nothing is charged and everything is allowed: [`Schedule::allows`] is one branch.

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
/// Minimum cost of a full batch: an endpoint that stops at its limit has taken this many messages.
const FULL_BATCH: i64 = 64 * MESSAGE_COST;
/// Deficit per round: many full batches of short messages, a few of long ones.
const QUANTUM: i64 = 256 << 10;

/// The deficit of one tenant, service or endpoint.
#[derive(Clone, Copy, Debug)]
struct Deficit {
    left: i64,
    /// Its cost since the current turn began.
    taken: i64,
    /// It was skipped since the current turn began.
    skipped: bool,
}

impl Deficit {
    const FRESH: Self = Self { left: QUANTUM, taken: 0, skipped: false };

    fn is_backlogged(&self) -> bool {
        self.skipped || self.taken >= FULL_BATCH
    }
}

/// Tenants, services or endpoints that share a part.
#[derive(Debug, Default)]
struct Sharers(Vec<Deficit>);

impl Sharers {
    /// Makes room for one with this number.
    fn make_room_for(&mut self, number: usize) {
        self.0.resize(self.0.len().max(number + 1), Deficit::FRESH);
    }

    fn reset(&mut self, number: usize) {
        self.0[number] = Deficit::FRESH;
    }

    /// Whether this one has deficit left; otherwise it is skipped.
    fn ask(&mut self, number: usize) -> bool {
        let sharer = &mut self.0[number];
        sharer.skipped |= sharer.left <= 0;
        sharer.left > 0
    }

    fn charge(&mut self, number: usize, cost: i64) {
        let sharer = &mut self.0[number];
        sharer.left = sharer.left.saturating_sub(cost);
        sharer.taken = sharer.taken.saturating_add(cost);
    }

    /// A turn begins: starts as many rounds as needed until one with a backlog has deficit left; one round if none
    /// has a backlog, since all got what they asked for.
    fn begin_turn(&mut self) {
        let backlogged = self.0.iter().filter(|sharer| sharer.is_backlogged());
        let most = backlogged.map(|sharer| sharer.left).max().unwrap_or(0);
        let rounds = if most > 0 { 0 } else { 1 - most / QUANTUM };
        for sharer in &mut self.0 {
            let left = sharer.left.saturating_add(rounds * QUANTUM).min(QUANTUM);
            *sharer = Deficit { left, ..Deficit::FRESH };
        }
    }
}

/// One service of a worker.
#[derive(Debug, Default)]
struct Entry {
    tenant: usize,
    endpoints: Sharers,
}

/// See the module documentation.
#[derive(Debug, Default)]
pub(crate) struct Schedule {
    /// There is at most one tenant.
    is_plain: bool,
    turns: u64,
    /// Names of tenants and the number of services of each; a place without services is free.
    names: Vec<(Box<str>, usize)>,
    tenants: Sharers,
    /// Services that share their tenant's part: by tenant, then by slot.
    services: Vec<Sharers>,
    /// By slot.
    entries: Vec<Option<Entry>>,
}

impl Schedule {
    pub(crate) fn new() -> Self {
        Self { is_plain: true, ..Self::default() }
    }

    /// Adds a service of this tenant.
    pub(crate) fn place(&mut self, service: usize, tenant: &str) {
        self.remove(service);
        let known = self.names.iter().position(|(name, count)| &**name == tenant && *count > 0);
        let free = || self.names.iter().position(|(_, count)| *count == 0);
        let number = known.or_else(free).unwrap_or(self.names.len());
        if number == self.names.len() {
            self.names.push((tenant.into(), 0));
            self.services.push(Sharers::default());
        }
        if self.names[number].1 == 0 {
            self.names[number].0 = tenant.into();
            self.tenants.make_room_for(number);
            self.tenants.reset(number);
        }
        self.names[number].1 += 1;
        self.services[number].make_room_for(service);
        self.services[number].reset(service);
        let mut endpoints = Sharers::default();
        endpoints.make_room_for(Kind::COUNT - 1);
        if self.entries.len() <= service {
            self.entries.resize_with(service + 1, || None);
        }
        self.entries[service] = Some(Entry { tenant: number, endpoints });
        self.count_tenants();
    }

    /// Removes a service.
    pub(crate) fn remove(&mut self, service: usize) {
        if let Some(entry) = self.entries.get_mut(service).and_then(Option::take) {
            self.names[entry.tenant].1 -= 1;
            self.count_tenants();
        }
    }

    fn count_tenants(&mut self) {
        self.is_plain = self.names.iter().filter(|(_, count)| *count > 0).count() <= 1;
    }

    /// A turn begins.
    pub(crate) fn begin_turn(&mut self) {
        self.turns += 1;
        if !self.is_plain {
            self.begin_shared_turn();
        }
    }

    #[cold]
    fn begin_shared_turn(&mut self) {
        self.tenants.begin_turn();
        self.services.iter_mut().for_each(Sharers::begin_turn);
        self.entries.iter_mut().flatten().for_each(|entry| entry.endpoints.begin_turn());
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

    /// Whether requests of a service are taken from an endpoint that has some.
    #[inline(always)]
    pub(crate) fn allows(&mut self, service: u16, from: Kind) -> bool {
        self.is_plain || self.has_left(service.into(), from)
    }

    #[cold]
    fn has_left(&mut self, service: usize, from: Kind) -> bool {
        let Some(Some(entry)) = self.entries.get_mut(service) else { return true };
        // Every level without deficit notes it, so that all of them refill in the same turn.
        let endpoint = entry.endpoints.ask(from as usize);
        let of_tenant = self.services[entry.tenant].ask(service);
        self.tenants.ask(entry.tenant) && of_tenant && endpoint
    }

    /// Charges requests of a service that were taken from an endpoint.
    #[inline(always)]
    pub(crate) fn charge(&mut self, service: usize, from: Kind, messages: u64, bytes: u64) {
        if !self.is_plain {
            self.charge_shared(service, Some(from), messages, bytes);
        }
    }

    /// Whether there are several tenants.
    #[inline(always)]
    pub(crate) fn is_shared(&self) -> bool {
        !self.is_plain
    }

    /// Charges replies of a service that were gathered.
    pub(crate) fn charge_replies(&mut self, service: usize, messages: u64) {
        self.charge_shared(service, None, messages, 0);
    }

    #[cold]
    fn charge_shared(&mut self, service: usize, from: Option<Kind>, messages: u64, bytes: u64) {
        let Some(Some(entry)) = self.entries.get_mut(service) else { return };
        let cost = messages as i64 * MESSAGE_COST + bytes as i64;
        self.tenants.charge(entry.tenant, cost);
        self.services[entry.tenant].charge(service, cost);
        if let Some(from) = from {
            entry.endpoints.charge(from as usize, cost);
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

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
    fn play(schedule: &mut Schedule, floods: &[Flood], turns: usize) -> Vec<i64> {
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
            let mut schedule = Schedule::new();
            schedule.place(0, "one");
            schedule.place(1, "other");
            let charged = play(&mut schedule, &[one, other], 2000);
            let apart = (charged[0] - charged[1]).abs();
            // The cost of one batch, and one round.
            prop_assert!(apart <= QUANTUM + cost(&one) + cost(&other), "{charged:?}");
        }

        #[test]
        fn a_tenant_with_many_services_gets_one_part(floods in prop::collection::vec(flood(), 2..8)) {
            let mut schedule = Schedule::new();
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
        fn a_tenant_with_little_load_delays_no_other(noisy in flood(), little in 0u64..64) {
            let mut schedule = Schedule::new();
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
            let mut schedule = Schedule::new();
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
        let mut schedule = Schedule::new();
        schedule.place(0, "default");
        schedule.place(1, "default");
        let flood = |schedule: &mut Schedule| {
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
        schedule.remove(2);
        for _ in 0..10 {
            assert_eq!(flood(&mut schedule), [true, true]);
        }
    }
}
