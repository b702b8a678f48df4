//! Whose requests are taken next: tenants share a worker, services share what their tenant has, endpoints what their service has.
//!
//! Each tenant, each service and each endpoint of a service has a *deficit*: what it may still cost in this round (deficit round
//! robin, Shreedhar and Varghese 1995). What a receive call brought and what was gathered is charged to all three. Who has used
//! its deficit up is passed over in the turn; its requests wait in their sockets and rings. When all that asked are used up, a new
//! round begins. So as long as one of two tenants asks for little it gets all of it, and what it leaves is the other's.
//!
//! A receive call takes a whole batch, so a deficit may become negative: the tenant pays for that in later rounds. Who asks
//! for nothing keeps the deficit of one round and collects no more.
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
/// What one round is worth: two full batches of short datagrams.
const QUANTUM: i64 = 256 << 10;

/// One that gets a share.
#[derive(Clone, Copy, Debug)]
struct Deficit {
    left: i64,
    /// It asked since the last turn began.
    asked: bool,
}

/// Those that share something.
#[derive(Debug, Default)]
struct Sharers(Vec<Deficit>);

impl Sharers {
    /// From now on there is one with this number.
    fn make_room_for(&mut self, number: usize) {
        let fresh = Deficit { left: QUANTUM, asked: false };
        self.0.resize(self.0.len().max(number + 1), fresh);
    }

    fn reset(&mut self, number: usize) {
        self.0[number] = Deficit { left: QUANTUM, asked: false };
    }

    /// Whether this one, which asks, has something left.
    fn ask(&mut self, number: usize) -> bool {
        let sharer = &mut self.0[number];
        sharer.asked = true;
        sharer.left > 0
    }

    fn charge(&mut self, number: usize, cost: i64) {
        let left = &mut self.0[number].left;
        *left = left.saturating_sub(cost);
    }

    /// A turn begins: as many rounds as it takes until one of those that asked has something left.
    fn begin_turn(&mut self) {
        let asked = self.0.iter().filter(|sharer| sharer.asked);
        let most = asked.map(|sharer| sharer.left).max().unwrap_or(1);
        let rounds = if most > 0 { 0 } else { 1 - most / QUANTUM };
        for sharer in &mut self.0 {
            sharer.left = sharer.left.saturating_add(rounds * QUANTUM).min(QUANTUM);
            sharer.asked = false;
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
        // All three note that it asked.
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
