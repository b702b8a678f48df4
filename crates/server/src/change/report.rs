//! The result of a change.

use std::path::PathBuf;

use engine::topology::{Service, Topology};
use onpath::Spec;

use super::DepartureOutcome;
use crate::change::plan::{Plan, ServiceAction};

/// The result of a change.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChangeReport {
    /// Every service of the new topology in its order, then the removed ones.
    pub services: Vec<ServiceChange>,
    /// Keys of `[engine]` and `[limits]` with another value, and those of lists that have changed, such as `accelerator`.
    pub settings: Vec<&'static str>,
    /// What has changed in these lists.
    pub entries: Vec<EntryChange>,
}

/// An accelerator, a tenant or a function on a path that is in one of two configurations, or differs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EntryChange {
    /// The key of its list.
    pub key: &'static str,
    /// The entry, such as `accelerator gpu0`.
    pub what: String,
    /// `added`, `changed` or `removed`.
    pub action: &'static str,
}

/// The result for one service.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServiceChange {
    /// Its name.
    pub name: String,
    /// What was done.
    pub action: ServiceAction,
    /// Requests of the removed version that were not answered within `drain_ms`.
    pub unanswered: u64,
    /// A part of the removed version did not end and is left behind, or is still ending.
    pub left_behind: bool,
    /// Why a runtime that could start only after the change does not serve. The start is tried again.
    pub not_started: Option<String>,
    /// The kernel file, if its content has changed since the service started.
    pub rebuilt: Option<PathBuf>,
}

impl ChangeReport {
    /// Whether nothing had to be changed.
    pub fn is_empty(&self) -> bool {
        self.settings.is_empty()
            && self.services.iter().all(|s| s.action == ServiceAction::Unchanged)
    }
}

pub(super) fn report(
    plan: Plan,
    outcomes: &[DepartureOutcome],
    rebuilt: &[(String, PathBuf)],
) -> ChangeReport {
    let service = |(name, action): (String, ServiceAction)| {
        let outcome = outcomes.iter().find(|outcome| outcome.name == name);
        let rebuilt = rebuilt.iter().find(|(of, _)| *of == name);
        ServiceChange {
            action,
            rebuilt: rebuilt.map(|(_, file)| file.clone()),
            unanswered: outcome.map_or(0, |o| o.unanswered),
            left_behind: outcome.is_some_and(|o| o.left_behind),
            not_started: outcome.and_then(|o| o.not_started.clone()),
            name,
        }
    };
    let services = plan.services.into_iter().map(service).collect();
    ChangeReport { services, settings: plan.settings, entries: plan.entries }
}

/// What changes in lists of named entries besides the services.
pub(crate) fn entries(running: &Topology, wanted: &Topology) -> Vec<EntryChange> {
    let accelerators = of_list(
        ("accelerator", "accelerator", ""),
        [&running.accelerators, &wanted.accelerators],
        |accelerator| &accelerator.name,
    );
    let tenants =
        of_list(("tenant", "tenant", ""), [&running.tenants, &wanted.tenants], |tenant| {
            &tenant.name
        });
    let functions = wanted.services.iter().flat_map(|service| {
        let before = running.services.iter().find(|before| before.name == service.name);
        before.map_or_else(Vec::new, |before| functions(before, service))
    });
    accelerators.into_iter().chain(tenants).chain(functions).collect()
}

/// The functions of one service, and of its backends.
fn functions(before: &Service, after: &Service) -> Vec<EntryChange> {
    let of = |chains: [&Vec<Spec>; 2], owner: &str| {
        of_list(("service.function", "function", owner), chains, |spec| &spec.name)
    };
    let service = format!(" of service {}", after.name);
    let mut found = of([&before.functions, &after.functions], &service);
    for (old, new) in before.backends.iter().zip(&after.backends) {
        let owner = format!(" of backend {}{service}", new.name);
        found.extend(of([&old.functions, &new.functions], &owner));
    }
    found
}

/// The entries of a list that came, changed or went; `title` is its key, and the words before and behind a name.
fn of_list<T: PartialEq>(
    (key, kind, owner): (&'static str, &str, &str),
    [running, wanted]: [&Vec<T>; 2],
    name: impl Fn(&T) -> &String,
) -> Vec<EntryChange> {
    let find = |list: &'_ [T], of: &T| list.iter().position(|entry| name(entry) == name(of));
    let entry =
        |of: &T, action| EntryChange { key, what: format!("{kind} {}{owner}", name(of)), action };
    let kept = wanted.iter().filter_map(|new| match find(running, new) {
        None => Some(entry(new, "added")),
        Some(at) if running[at] != *new => Some(entry(new, "changed")),
        Some(_) => None,
    });
    let gone = running.iter().filter(|old| find(wanted, old).is_none());
    kept.chain(gone.map(|old| entry(old, "removed"))).collect()
}
