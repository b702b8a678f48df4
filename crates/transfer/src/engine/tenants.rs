//! The tenants of an engine: whose transfers wait for one another, and what each has had.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::command::report::{Done, Outcome};
use crate::engine::scoreboard::Share;

/// A tenant of the server, as far as transfers are concerned.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TenantShare {
    /// Its name.
    pub name: String,
    /// Its part of the threads and of the memory for which others wait too, relative to theirs.
    pub weight: u32,
    /// Users, by number, whose programs may ask for transfers.
    pub users: Vec<u32>,
}

/// What a tenant has had.
#[derive(Debug, Default)]
pub struct TenantCounters {
    in_flight: AtomicU64,
    held: AtomicU64,
    started: AtomicU64,
    read: AtomicU64,
    written: AtomicU64,
}

impl TenantCounters {
    /// Transfers in flight.
    pub fn in_flight(&self) -> u64 {
        self.in_flight.load(Ordering::Relaxed)
    }

    /// Memory that they hold at most.
    pub fn held(&self) -> u64 {
        self.held.load(Ordering::Relaxed)
    }

    /// Transfers that were started.
    pub fn started(&self) -> u64 {
        self.started.load(Ordering::Relaxed)
    }

    /// Bytes taken from sources by those that have ended.
    pub fn read(&self) -> u64 {
        self.read.load(Ordering::Relaxed)
    }

    /// Bytes that their sinks got.
    pub fn written(&self) -> u64 {
        self.written.load(Ordering::Relaxed)
    }

    fn start(&self, held: u64) {
        self.in_flight.fetch_add(1, Ordering::Relaxed);
        self.started.fetch_add(1, Ordering::Relaxed);
        self.held.fetch_add(held, Ordering::Relaxed);
    }

    fn end(&self, held: u64, outcome: &Outcome) {
        self.read.fetch_add(outcome.report.read, Ordering::Relaxed);
        self.written.fetch_add(outcome.report.written, Ordering::Relaxed);
        self.held.fetch_sub(held, Ordering::Relaxed);
        self.in_flight.fetch_sub(1, Ordering::Relaxed);
    }
}

/// A tenant that asks for transfers.
#[derive(Clone, Debug)]
pub struct Account {
    pub(crate) share: Share,
    pub(crate) counters: Arc<TenantCounters>,
}

impl Account {
    /// Counts a transfer that has started and may hold that much memory.
    pub(crate) fn count_start(account: Option<&Self>, memory: u64) {
        if let Some(account) = account {
            account.counters.start(memory);
        }
    }

    /// `done`, which counts the end of that transfer first.
    pub(crate) fn count_end(account: Option<&Self>, memory: u64, done: Done) -> Done {
        let Some(counters) = account.map(|account| account.counters.clone()) else { return done };
        Box::new(move |outcome| {
            counters.end(memory, &outcome);
            done(outcome);
        })
    }
}

/// All tenants that were ever known. Their numbers are places in the list, from 1: 0 is for callers without a tenant.
#[derive(Debug, Default)]
pub(crate) struct Tenants {
    known: Mutex<Vec<(TenantShare, Arc<TenantCounters>)>>,
}

impl Tenants {
    fn known(&self) -> MutexGuard<'_, Vec<(TenantShare, Arc<TenantCounters>)>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The tenants that there are now. Others keep their counters.
    pub(crate) fn set(&self, tenants: Vec<TenantShare>) {
        let mut known = self.known();
        known.iter_mut().for_each(|(tenant, _)| tenant.users.clear());
        for tenant in tenants {
            match known.iter_mut().find(|(of, _)| of.name == tenant.name) {
                Some((of, _)) => *of = tenant,
                None => known.push((tenant, Arc::default())),
            }
        }
    }

    /// The account of a tenant, which is new with weight 1 if it is not known.
    pub(crate) fn named(&self, name: &str) -> Account {
        let mut known = self.known();
        let place = known.iter().position(|(of, _)| of.name == name).unwrap_or_else(|| {
            let (name, users) = (name.to_owned(), Vec::new());
            known.push((TenantShare { name, weight: 1, users }, Arc::default()));
            known.len() - 1
        });
        account(&known, place)
    }

    /// The account of the tenant that has this user; the first one if several have.
    pub(crate) fn of_user(&self, user: u32) -> Option<Account> {
        let known = self.known();
        let place = known.iter().position(|(of, _)| of.users.contains(&user))?;
        Some(account(&known, place))
    }

    /// Every tenant that has asked for a transfer, with what it has had.
    pub(crate) fn counters(&self) -> Vec<(String, Arc<TenantCounters>)> {
        let known = self.known();
        let used = known.iter().filter(|(_, counters)| counters.started() > 0);
        used.map(|(of, counters)| (of.name.clone(), counters.clone())).collect()
    }
}

fn account(known: &[(TenantShare, Arc<TenantCounters>)], place: usize) -> Account {
    let (of, counters) = &known[place];
    let share = Share { tenant: place as u32 + 1, weight: of.weight };
    Account { share, counters: counters.clone() }
}
