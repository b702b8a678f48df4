//! Whose requests are taken next: tenants share a worker, services share what their tenant has, endpoints what their service has.
//!
//! Each tenant, each service and each endpoint of a service has a *deficit*: what it may still cost in this round (deficit round
//! robin, Shreedhar and Varghese 1995). What a receive call brought and what was gathered is charged to all three. Who has used
//! its deficit up is passed over in the turn; its requests wait in their sockets and rings. A new round begins when all that have
//! a *backlog* have used theirs up. Backlogged in a turn is one that was passed over, or that took at least a full batch: one that
//! took less had no more, one that took nothing may be idle or wait for credit. So a tenant with little load gets all of it at
//! once and holds nobody up; what it leaves is the other's.
//!
//! A receive call takes a whole batch, so a deficit may become negative: the tenant pays for that in later rounds. An idle one
//! keeps the deficit of one round and collects no more.
//!
//! With one tenant nothing is charged and everything is allowed: [`Schedule::allows`] is one branch.

/// A source of requests, as one service sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Udp,
    Tcp,
    Shm,
    Peer,
}

impl Kind {
    const COUNT: usize = 4;
}

/// What a message costs, in bytes that would cost as much.
const MESSAGE_COST: i64 = 64;
/// The least that a full batch costs: an endpoint that stops at its limit has taken as many messages.
const FULL_BATCH: i64 = 64 * MESSAGE_COST;
/// What one round is worth: many full batches of short messages, a few of long ones.
const QUANTUM: i64 = 256 << 10;

/// One that gets a share.
#[derive(Clone, Copy, Debug)]
struct Deficit {
    left: i64,
    /// What it cost since the last turn began.
    taken: i64,
    /// It was passed over since the last turn began.
    passed_over: bool,
}

impl Deficit {
    const FRESH: Self = Self { left: QUANTUM, taken: 0, passed_over: false };

    fn is_backlogged(&self) -> bool {
        self.passed_over || self.taken >= FULL_BATCH
    }
}

/// Those that share something.
#[derive(Debug, Default)]
struct Sharers(Vec<Deficit>);

impl Sharers {
    /// From now on there is one with this number.
    fn make_room_for(&mut self, number: usize) {
        self.0.resize(self.0.len().max(number + 1), Deficit::FRESH);
    }

    fn reset(&mut self, number: usize) {
        self.0[number] = Deficit::FRESH;
    }

    /// Whether this one has something left; otherwise it is passed over.
    fn ask(&mut self, number: usize) -> bool {
        let sharer = &mut self.0[number];
        sharer.passed_over |= sharer.left <= 0;
        sharer.left > 0
    }

    fn charge(&mut self, number: usize, cost: i64) {
        let sharer = &mut self.0[number];
        sharer.left = sharer.left.saturating_sub(cost);
        sharer.taken = sharer.taken.saturating_add(cost);
    }

    /// A turn begins: as many rounds as it takes until one of those with a backlog has something left; one round if none has a
    /// backlog, since all got what they asked for.
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

/// See the module's text.
#[derive(Debug, Default)]
pub(crate) struct Schedule {
    /// There is one tenant, or none.
    is_plain: bool,
    turns: u64,
    /// Names of tenants and how many services each has; a place without services is free.
    names: Vec<(Box<str>, usize)>,
    tenants: Sharers,
    /// Services share what their tenant has: by tenant, then by slot.
    services: Vec<Sharers>,
    /// By slot.
    entries: Vec<Option<Entry>>,
}

impl Schedule {
    pub(crate) fn new() -> Self {
        Self { is_plain: true, ..Self::default() }
    }

    /// A service comes, which this tenant owns.
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

    /// A service is gone.
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

    /// Whose turn it is to be the first of the endpoints.
    pub(crate) fn first_endpoint(&self) -> usize {
        (self.turns % Kind::COUNT as u64) as usize
    }

    /// Whether each endpoint has been the first since the last time.
    pub(crate) fn is_new_round(&self) -> bool {
        self.first_endpoint() == 0
    }

    /// Counts up once each endpoint has been the first: in each round another port, connection, client or worker is the first
    /// of its endpoint, for who comes first gets the credit that is left.
    pub(crate) fn round(&self) -> usize {
        (self.turns / Kind::COUNT as u64) as usize
    }

    /// Whether requests of a service are taken from an endpoint that has some.
    #[inline(always)]
    pub(crate) fn allows(&mut self, service: u16, from: Kind) -> bool {
        self.is_plain || self.has_left(service.into(), from)
    }

    #[cold]
    fn has_left(&mut self, service: usize, from: Kind) -> bool {
        let Some(Some(entry)) = self.entries.get_mut(service) else { return true };
        // Every level that has used up its deficit notes it, so that all of them refill in the same turn.
        let endpoint = entry.endpoints.ask(from as usize);
        let of_tenant = self.services[entry.tenant].ask(service);
        self.tenants.ask(entry.tenant) && of_tenant && endpoint
    }

    /// Requests of a service were taken from an endpoint.
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

    /// Replies of a service were gathered.
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
        let from = prop_oneof![Just(Kind::Udp), Just(Kind::Tcp), Just(Kind::Shm), Just(Kind::Peer)];
        (64u64..1024, 0u64..1500, from).prop_map(|(messages, bytes, from)| Flood {
            messages,
            bytes: messages * bytes,
            from,
        })
    }

    fn cost(flood: &Flood) -> i64 {
        flood.messages as i64 * MESSAGE_COST + flood.bytes as i64
    }

    /// Plays turns in which every service that floods is offered; what each was charged.
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
            assert!(served, "a turn with work serves some of it");
        }
        charged
    }

    proptest! {
        #[test]
        fn two_tenants_that_flood_get_the_same(one in flood(), other in flood()) {
            let mut schedule = Schedule::new();
            schedule.place(0, "one");
            schedule.place(1, "other");
            let charged = play(&mut schedule, &[one, other], 2000);
            let apart = (charged[0] - charged[1]).abs();
            // What one batch and one round are worth.
            prop_assert!(apart <= QUANTUM + cost(&one) + cost(&other), "{charged:?}");
        }

        #[test]
        fn a_tenant_with_many_services_gets_no_more(floods in prop::collection::vec(flood(), 2..8)) {
            let mut schedule = Schedule::new();
            for service in 0..floods.len() {
                schedule.place(service, if service == 0 { "one" } else { "many" });
            }
            let charged = play(&mut schedule, &floods, 3000);
            let many: i64 = charged[1..].iter().sum();
            let batches: i64 = floods.iter().map(cost).sum();
            prop_assert!(many - charged[0] <= 2 * QUANTUM + batches, "{charged:?}");
        }

        /// Idle sockets are reported as ready by a worker that does not sleep: their tenant asks in every turn. It may also ask
        /// for what finds no credit.
        #[test]
        fn a_tenant_with_little_load_holds_nobody_up(noisy in flood(), little in 0u64..64) {
            let mut schedule = Schedule::new();
            schedule.place(0, "noisy");
            schedule.place(1, "little");
            schedule.place(2, "idle");
            let mut passed_over = 0;
            for turn in 0..2000 {
                schedule.begin_turn();
                let allowed = schedule.allows(0, noisy.from);
                if allowed {
                    schedule.charge(0, noisy.from, noisy.messages, noisy.bytes);
                }
                prop_assert!(schedule.allows(1, Kind::Udp), "in turn {}", turn);
                schedule.charge(1, Kind::Udp, little, 0);
                prop_assert!(schedule.allows(2, Kind::Udp), "in turn {}", turn);
                passed_over = if allowed { 0 } else { passed_over + 1 };
                prop_assert!(passed_over <= 1, "in turn {}", turn);
            }
        }

        #[test]
        fn a_quiet_tenant_is_served_at_once(noisy in flood(), every in 1usize..50) {
            let mut schedule = Schedule::new();
            schedule.place(0, "noisy");
            schedule.place(1, "quiet");
            for turn in 0..2000 {
                schedule.begin_turn();
                if schedule.allows(0, noisy.from) {
                    schedule.charge(0, noisy.from, noisy.messages, noisy.bytes);
                }
                if turn % every == 0 {
                    // Less than a round's worth in the time in which the other one uses up several.
                    prop_assert!(schedule.allows(1, Kind::Udp), "in turn {turn}");
                    schedule.charge(1, Kind::Udp, 1, 64);
                }
            }
        }
    }

    #[test]
    fn one_tenant_is_never_held_back_and_another_one_changes_that_only_while_it_is_there() {
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
        assert!(
            !schedule.allows(0, Kind::Udp),
            "it has used up what it has, and the other has not"
        );
        // The other one asks again and takes nothing: it has no backlog.
        schedule.begin_turn();
        assert!(schedule.allows(2, Kind::Udp));
        schedule.begin_turn();
        assert!(schedule.allows(0, Kind::Udp), "an idle tenant holds nobody up");
        schedule.remove(2);
        for _ in 0..10 {
            assert_eq!(flood(&mut schedule), [true, true]);
        }
    }
}
