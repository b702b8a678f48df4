//! What changes in lists of named entries besides the services: accelerators, tenants, functions on paths.

use engine::topology::{Service, Topology};
use onpath::Spec;

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
