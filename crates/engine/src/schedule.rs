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
//! the tenant pays for that in later rounds, up to [`DEBT_MAX`] or the last charge. An idle tenant keeps the deficit of one round and accumulates no more.
//!
//! While several tenants have messages, an endpoint takes a short batch of each port and client, and a tenant that was charged
//! [`TURN_COST`] in a turn waits for the next one.
//!
//! Tenants with limits ([`TenantState`]) are asked about once per turn, if they have messages. One that is over a limit takes no requests
//! in that turn: its datagrams are dropped with a reason, and requests over streams and rings wait.
//!
//! With one tenant without limits nothing is charged and everything is allowed: [`Schedule::allows`] is one branch. Otherwise a turn
//! costs time for those that were charged since the last one, and not for those that are idle.

use std::sync::Arc;

use wire::DropReason;

use crate::base::tenants::{TenantState, Tenants};
use crate::service::share::ServiceShare;

/// A kind of endpoint, as the source of a service's requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Udp,
    Tcp,
    Shm,
    Peer,
    /// Bytes of the connections of kernels, in both directions.
    Sockets,
    /// Chunks of servers, which proxies of byte streams pass on to clients.
    Servers,
}

impl Kind {
    const COUNT: usize = 6;

    /// Whether it waits for a limit with this reason to end. Messages in flight may end only after bytes of these kinds were moved, which are not in flight.
    fn waits_for(self, limit: DropReason) -> bool {
        let ends_some = matches!(self, Self::Sockets | Self::Servers);
        !ends_some
            || limit != DropReason::TenantOutstanding
            || mutants::on("servers_wait_for_clients")
    }
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
/// What a tenant is charged in a turn in which others may have messages before it waits for the next turn.
const TURN_COST: i64 = 16 << 10;
/// Deficit per round of the tenant with the largest weight: many full batches of short messages, a few of long ones.
const QUANTUM: i64 = 256 << 10;
/// The most that one may owe, several of the longest batches, unless what was charged last is more: a call of a function that takes long is paid for as a whole.
const DEBT_MAX: i64 = 32 * QUANTUM;
/// When a tenant is asked about again that has too many messages in flight, on other workers perhaps.
const AGAIN_NS: u64 = 1_000_000;
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

    /// Whether this one has deficit left and need not wait for another reason; otherwise it is skipped.
    fn ask(&mut self, number: usize, waits: bool) -> bool {
        let sharer = &mut self.all[number];
        let skipped = waits || sharer.left <= 0;
        sharer.skipped |= skipped;
        !skipped
    }

    fn charge(&mut self, number: usize, cost: i64) {
        let sharer = &mut self.all[number];
        let most =
            if mutants::on("debt_of_calls_forgiven") { DEBT_MAX } else { DEBT_MAX.max(cost) };
        let least = if mutants::on("debt_without_end") { i64::MIN } else { -most };
        // A debt that is there already stays.
        let least = least.min(sharer.left);
        sharer.left = sharer.left.saturating_sub(cost).max(least);
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
    /// The slots of its services; a place without services is free.
    services: Vec<usize>,
    /// It was skipped since the current turn began.
    skipped: bool,
    /// Its messages have a limit.
    is_limited: bool,
    /// It is asked about when the next turn begins.
    is_watched: bool,
    /// The limit that keeps it from taking requests in this turn.
    shed: Option<DropReason>,
    /// Its services ask about each message.
    is_counted: bool,
}

/// Requests in flight of a service that are in no mqueue.
type Elsewhere<'a> = &'a dyn Fn(usize) -> u64;

/// What this worker has in flight for a tenant.
fn in_flight_of(placed: &Placed, shares: &[ServiceShare], elsewhere: Elsewhere<'_>) -> u64 {
    let of =
        |slot: &usize| shares.get(*slot).map_or(0, |share| share.in_flight() + elsewhere(*slot));
    placed.services.iter().map(of).sum()
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
    /// There are tenants with limits.
    has_limits: bool,
    /// Those of them that have had messages since they were found below their limits with nothing in flight.
    watched: Vec<usize>,
    /// Services that take no requests because of the limits of last turn.
    shed: Vec<usize>,
    /// When one of their tenants may take requests again.
    shed_until_ns: u64,
}

impl Schedule {
    pub(crate) fn new(worker: u16) -> Self {
        Self { worker, is_plain: true, batch: u32::MAX, shed_until_ns: u64::MAX, ..Self::default() }
    }

    /// Adds a service of this tenant.
    pub(crate) fn place(&mut self, service: usize, tenant: Arc<TenantState>) {
        self.remove(service);
        let known =
            self.placed.iter().position(|p| p.state.id == tenant.id && !p.services.is_empty());
        let free = || self.placed.iter().position(|placed| placed.services.is_empty());
        let number = known.or_else(free).unwrap_or(self.placed.len());
        let placed = Placed {
            state: tenant,
            services: Vec::new(),
            skipped: false,
            is_limited: false,
            is_watched: false,
            shed: None,
            is_counted: false,
        };
        if number == self.placed.len() {
            self.placed.push(placed);
            self.services.push(Sharers::default());
            self.tenants.make_room_for(number);
            self.services_to_settle.reserve(number + 1);
        } else if known.is_none() {
            self.placed[number] = placed;
            self.tenants.reset(number);
        }
        self.placed[number].services.push(service);
        self.watched.reserve(self.placed.len().saturating_sub(self.watched.len()));
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
            self.placed[entry.tenant].services.retain(|of| *of != service);
            self.read_settings();
        }
    }

    /// Takes over the weights and limits of the tenants.
    fn read_settings(&mut self) {
        let is_present = |placed: &Placed| !placed.services.is_empty();
        let weight = |placed: &Placed| match mutants::on("tenants_without_weights") {
            true => 1,
            false => placed.state.weight(),
        };
        let present = self.placed.iter().filter(|placed| is_present(placed));
        let count = present.clone().count();
        let heaviest = present.map(weight).max().unwrap_or(1);
        self.has_limits = false;
        self.watched.clear();
        for (number, placed) in self.placed.iter_mut().enumerate() {
            placed.is_limited = is_present(placed) && placed.state.has_limits();
            placed.is_watched = placed.is_limited || placed.shed.is_some() || placed.is_counted;
            self.has_limits |= placed.is_limited;
            if placed.is_watched {
                self.watched.push(number);
            }
            if is_present(placed) {
                self.tenants.set_quantum(number, (QUANTUM * weight(placed) / heaviest).max(1));
            }
        }
        self.is_plain =
            count <= 1 && !self.has_limits && self.shed.is_empty() && self.watched.is_empty();
        if self.is_plain {
            self.batch = u32::MAX;
        }
    }

    /// A turn begins.
    #[inline]
    pub(crate) fn begin_turn(
        &mut self,
        now_ns: u64,
        all: &Tenants,
        shares: &mut [ServiceShare],
        elsewhere: Elsewhere<'_>,
    ) {
        self.turns += 1;
        if self.changes != all.changes() {
            self.changes = all.changes();
            self.read_settings();
        }
        if !self.is_plain {
            self.now_ns = now_ns;
            self.begin_shared_turn();
            if self.has_limits || !self.shed.is_empty() || !self.watched.is_empty() {
                self.apply_limits(shares, elsewhere);
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
    fn apply_limits(&mut self, shares: &mut [ServiceShare], elsewhere: Elsewhere<'_>) {
        for service in self.shed.drain(..) {
            if let Some(share) = shares.get_mut(service) {
                share.set_shed(None);
            }
        }
        self.shed_until_ns = u64::MAX;
        let Self { worker, now_ns, placed, watched, shed, shed_until_ns, .. } = self;
        watched.retain(|tenant| {
            let placed = &mut placed[*tenant];
            let outstanding = in_flight_of(placed, shares, elsewhere);
            let refused = placed.state.refuses(*worker, outstanding, *now_ns);
            placed.shed = refused.map(|(reason, _)| reason);
            let counts = placed.state.limits_outstanding();
            // A service that was full in the last turn may take messages again.
            let did_count = std::mem::replace(&mut placed.is_counted, counts);
            if counts || did_count {
                for service in &placed.services {
                    if let Some(share) = shares.get_mut(*service) {
                        share.set_shed(None);
                        share.set_counted(counts);
                    }
                }
            }
            if let Some((reason, until_ns)) = refused {
                let until_ns = if until_ns > *now_ns { until_ns } else { *now_ns + AGAIN_NS };
                *shed_until_ns = until_ns.min(*shed_until_ns);
                for service in &placed.services {
                    if let Some(share) = shares.get_mut(*service) {
                        share.set_shed(Some(reason));
                        shed.push(*service);
                    }
                }
            }
            placed.is_watched = placed.shed.is_some() || outstanding > 0;
            placed.is_watched
        });
        if !self.has_limits {
            self.read_settings();
        }
    }

    /// Whether the tenant of a service takes nothing of an endpoint before [`Self::wake_at`].
    pub(crate) fn is_shed(&self, service: u16, from: Kind) -> bool {
        let entry = self.entries.get(usize::from(service)).and_then(Option::as_ref);
        let shed = entry.and_then(|entry| self.placed[entry.tenant].shed);
        shed.is_some_and(|limit| from.waits_for(limit))
    }

    /// When a tenant that is over a limit may take requests again: at once, if some of those in flight have ended since the turn began.
    pub(crate) fn wake_at(&self, shares: &[ServiceShare], elsewhere: Elsewhere<'_>) -> u64 {
        if self.shed_until_ns == u64::MAX {
            return u64::MAX;
        }
        let has_room = |placed: &Placed| {
            let counted = placed.shed.is_some() && placed.state.limits_outstanding();
            counted && in_flight_of(placed, shares, elsewhere) < placed.state.reported(self.worker)
        };
        if self.placed.iter().any(has_room) { 0 } else { self.shed_until_ns }
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
        let waits = match mutants::on("read_what_is_shed") {
            true => from == Kind::Sockets,
            false => !matches!(from, Kind::Udp | Kind::Peer),
        };
        if waits && placed.shed.is_some_and(|limit| from.waits_for(limit)) {
            return false;
        }
        if placed.is_limited && !placed.is_watched {
            placed.is_watched = true;
            self.watched.push(entry.tenant);
            let over = placed.state.refuses(self.worker, 0, self.now_ns);
            let is_over = over.is_some_and(|(limit, _)| from.waits_for(limit));
            if is_over && from != Kind::Peer {
                return false;
            }
        }
        let spent = self.batch != u32::MAX
            && from != Kind::Sockets
            && self.tenants.all[entry.tenant].taken >= TURN_COST
            && !mutants::on("spend_a_round");
        let tenant = entry.tenant;
        if spent {
            // It is looked at when the next turn begins, since it has a backlog.
            self.charge_levels(service, Some(from), 0);
        }
        // Every level without deficit notes it, so that all of them refill in the same turn.
        let Some(Some(entry)) = self.entries.get_mut(service) else { return true };
        let endpoint = entry.endpoints.ask(from as usize, spent);
        let of_tenant = self.services[tenant].ask(service, spent);
        let of_all = self.tenants.ask(tenant, spent);
        self.placed[tenant].skipped |= !of_all;
        of_all && of_tenant && endpoint
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
        let Some(Some(entry)) = self.entries.get(service) else { return };
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
        let is_taken = |from: Kind| !placed.shed.is_some_and(|limit| from.waits_for(limit));
        if from.is_some_and(|from| from != Kind::Peer && is_taken(from)) {
            placed.state.charge_rates(self.now_ns, messages, bytes);
        }
        self.charge_levels(service, from, i64::try_from(cost).unwrap_or(i64::MAX));
    }

    /// Charges a tenant, its service and an endpoint of that.
    fn charge_levels(&mut self, service: usize, from: Option<Kind>, cost: i64) {
        let Some(Some(entry)) = self.entries.get_mut(service) else { return };
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
mod tests;
