//! A plan: how to change from the running topology to another one, or why that is not possible.
//!
//! Services are identified by their names. One that is equal in both, including its accelerators and the content of
//! its kernel files, is not touched. One that differs is replaced: its successor takes over the ports that both
//! listen on, and the connections if both delimit, order and answer messages in the same way. A plan is made before
//! any step, and rejected as a whole.

use std::fmt;
use std::path::Path;

use engine::topology::{Accelerator, Backend, EngineSettings, Listen, Service, Topology};

pub use super::entries::EntryChange;
use super::entries::entries;
use crate::config::differences;

/// What a change does with one service.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ServiceAction {
    /// Nothing.
    Unchanged,
    /// It starts.
    Added,
    /// Another version replaces it.
    Changed {
        /// Its TCP connections stay open; otherwise they are closed after their replies.
        keeps_connections: bool,
        /// Its shared-memory clients stay connected if their ports stay; otherwise they are disconnected.
        keeps_memory_clients: bool,
    },
    /// It is removed.
    Removed,
}

/// A setting that cannot change while the engine runs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// The key, or the service.
    pub what: String,
    /// Why not, and the fix.
    pub why: String,
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.what, self.why)
    }
}

/// See the module documentation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Plan {
    /// Every service by name: those of the new topology in its order, then those that are removed.
    pub(crate) services: Vec<(String, ServiceAction)>,
    /// Keys of `[engine]` and `[limits]` whose values change, and `accelerator` if the list changes.
    pub(crate) settings: Vec<&'static str>,
    /// What changes in lists.
    pub(crate) entries: Vec<EntryChange>,
}

impl Plan {
    /// The plan from `running` to `wanted`; both pass [`Topology::check`]. Services in `rebuilt` have a kernel file
    /// with new content and change even if their configuration is equal.
    pub(crate) fn new(
        running: &Topology,
        wanted: &Topology,
        rebuilt: &[&str],
    ) -> Result<Self, Vec<Refusal>> {
        let mut refusals = Vec::new();
        let settings = settings(running, wanted, &mut refusals);
        let mut services = Vec::new();
        for service in &wanted.services {
            let before = named(running, &service.name);
            let rebuilt = rebuilt.contains(&service.name.as_str());
            services
                .push((service.name.clone(), action(running, before, wanted, service, rebuilt)));
        }
        let gone = running.services.iter().filter(|s| named(wanted, &s.name).is_none());
        services.extend(gone.map(|service| (service.name.clone(), ServiceAction::Removed)));
        for (name, _) in services.iter().filter(|(_, action)| *action != ServiceAction::Unchanged) {
            let service = named(wanted, name);
            let refused = |s| taken(running, wanted, s).or_else(|| overlaps(running, wanted, s));
            refusals.extend(service.and_then(|s| refused(s).or_else(|| changes_use(running, s))));
        }
        refusals.dedup();
        let entries = entries(running, wanted);
        if refusals.is_empty() { Ok(Self { services, settings, entries }) } else { Err(refusals) }
    }

    /// Whether there is nothing to do.
    pub(crate) fn is_empty(&self) -> bool {
        self.settings.is_empty()
            && self.services.iter().all(|(_, f)| *f == ServiceAction::Unchanged)
    }
}

fn named<'t>(topology: &'t Topology, name: &str) -> Option<&'t Service> {
    topology.services.iter().find(|service| service.name == name)
}

fn accelerators<'t>(
    topology: &'t Topology,
    service: &'t Service,
) -> impl Iterator<Item = &'t Accelerator> {
    service.accelerators.iter().map(|index| &topology.accelerators[*index])
}

fn action(
    running: &Topology,
    before: Option<&Service>,
    wanted: &Topology,
    service: &Service,
    rebuilt: bool,
) -> ServiceAction {
    let Some(before) = before else { return ServiceAction::Added };
    // Accelerators are compared by value; their indices may differ.
    // Functions, and who may attach some, change while the service runs.
    let backends = before.backends.iter().enumerate().map(|(at, backend)| {
        let functions = service.backends.get(at).map(|wanted| wanted.functions.clone());
        Backend { functions: functions.unwrap_or_default(), ..backend.clone() }
    });
    let renumbered = Service {
        backends: backends.collect(),
        accelerators: service.accelerators.clone(),
        functions: service.functions.clone(),
        function_users: service.function_users.clone(),
        ..before.clone()
    };
    let same =
        renumbered == *service && accelerators(running, before).eq(accelerators(wanted, service));
    if same && !rebuilt {
        return ServiceAction::Unchanged;
    }
    // No connection of one tenant becomes one of another.
    let alike = |s: &Service| {
        (s.framing, s.ordered, s.replies, (s.upstream, s.proxy_protocol), s.tenant.clone())
    };
    // Everything that the layout of a client's region depends on.
    let shape = |s: &Service| (s.max_message_bytes, s.max_reply_bytes, s.replies, s.tenant.clone());
    ServiceAction::Changed {
        keeps_connections: alike(before) == alike(service),
        keeps_memory_clients: shape(before) == shape(service),
    }
}

/// Keys that change; those that cannot are rejected.
fn settings(
    running: &Topology,
    wanted: &Topology,
    refusals: &mut Vec<Refusal>,
) -> Vec<&'static str> {
    let mut refuse = |same: bool, what: &str, why: &str| {
        if !same {
            let why = format!("cannot change while the engine runs ({why}): restart to apply it");
            refusals.push(Refusal { what: what.to_owned(), why });
        }
    };
    let (old, new) = (&running.engine, &wanted.engine);
    refuse(
        old.workers == new.workers,
        "engine.workers",
        "every worker is a thread with sockets of its own",
    );
    refuse(old.cores == new.cores, "engine.cores", "workers are pinned when they start");
    let directory =
        |e: &EngineSettings| (e.functions.clone(), e.function_keys.clone(), e.unsigned_functions);
    let why = "functions that run were found in it";
    refuse(directory(old) == directory(new), "the directory of functions", why);
    let (from, to) = (&running.limits, &wanted.limits);
    let why = "connection tables are allocated at the start";
    refuse(from.connections == to.connections, "limits.connections", why);
    for service in &running.services {
        let tenant = &service.tenant;
        if wanted.has_services_of(tenant) {
            let same = running.confinement_of(tenant) == wanted.confinement_of(tenant);
            let what = format!("netns, user or namespaces of tenant {tenant:?}");
            refuse(same, &what, "its ports and processes are in them");
        }
    }
    // Those with their own message above are rejected.
    let refused = ["engine.workers", "engine.unsigned_functions", "limits.connections"];
    let fields = [differences(old, new), differences(from, to)].concat();
    let live = [
        ("limits.udp_reply_ratio", from.udp_reply_ratio == to.udp_reply_ratio),
        ("limits.udp_privileged_sources", from.udp_privileged_sources == to.udp_privileged_sources),
    ];
    let fields = fields.into_iter().filter(|key| !refused.contains(key)).map(|key| (key, false));
    let live = fields.chain(live);
    let among = |all: &[Accelerator], a: &Accelerator| all.contains(a);
    let same = running.accelerators.len() == wanted.accelerators.len()
        && wanted.accelerators.iter().all(|a| among(&running.accelerators, a));
    let tenants = running.tenants == wanted.tenants;
    let live = live.chain([("accelerator", same), ("tenant", tenants)]);
    live.filter(|(_, same)| !same).map(|(key, _)| key).collect()
}

/// Whether another service uses an address or a path that this one wants. The other one needs it until its last reply
/// has been sent.
fn taken(running: &Topology, wanted: &Topology, service: &Service) -> Option<Refusal> {
    let netns = |of: &Topology, service: &Service| of.confinement_of(&service.tenant).netns;
    let near = |other: &&Service| netns(running, other) == netns(wanted, service);
    let others = || running.services.iter().filter(|other| other.name != service.name);
    let sockets = service.ports().map(|(listen, _)| listen).filter(|l| l.address.port() != 0);
    let sockets = sockets.filter_map(|listen| {
        let mut near = others().filter(near);
        let holder = near.find(|other| other.ports().any(|(held, _)| held == listen))?;
        Some((holder, crate::config::url(listen.transport, listen.address)))
    });
    let memory = |of: &Service, path: &Path| of.memory_ports.iter().any(|held| held == path);
    let unix = |of: &Service, path: &Path| of.unix_ports().any(|(held, _)| held == path);
    // A path also cannot change its kind, in its own service either.
    let paths = service.memory_ports.iter().filter_map(|path| {
        let mut held = running.services.iter();
        let holder =
            held.find(|of| unix(of, path) || memory(of, path) && of.name != service.name)?;
        Some((holder, crate::config::memory_url(path)))
    });
    let unix_paths = service.unix_ports().filter_map(|(path, _)| {
        let mut held = running.services.iter();
        let holder =
            held.find(|of| memory(of, path) || unix(of, path) && of.name != service.name)?;
        Some((holder, crate::config::unix_url(path)))
    });
    let (holder, url) = sockets.chain(paths).chain(unix_paths).next()?;
    Some(Refusal {
        what: format!("service {:?}", service.name),
        why: format!(
            "cannot listen on {url} in the same step in which service {:?} gives it up: remove it there, \
             reload, then add it here",
            holder.name
        ),
    })
}

/// Whether an address that the service wants cannot be bound while another one is in use, also by its own previous
/// version.
fn overlaps(running: &Topology, wanted: &Topology, service: &Service) -> Option<Refusal> {
    let netns = |of: &Topology, service: &Service| of.confinement_of(&service.tenant).netns;
    let near = |other: &&Service| netns(running, other) == netns(wanted, service);

    let before = named(running, &service.name);
    let had = |listen: &Listen| before.is_some_and(|b| b.ports().any(|(held, _)| held == *listen));
    let new = service.ports().map(|(listen, _)| listen).filter(|listen| !had(listen));
    let held = |listen: &Listen| {
        let near = running.services.iter().filter(near);
        let mut all = near.flat_map(|s| s.ports().map(move |(l, _)| (s, l)));
        all.find(|(_, held)| held != listen && held.collides(listen))
    };
    let (listen, (holder, held)) = new.filter_map(|l| Some((l, held(&l)?))).next()?;
    let url = |listen: Listen| crate::config::url(listen.transport, listen.address);
    let why = format!(
        "cannot listen on {} in the same step in which service {:?} gives up {}, which has that port: remove it \
         there, reload, then add this here; or restart",
        url(listen),
        holder.name,
        url(held)
    );
    Some(Refusal { what: format!("service {:?}", service.name), why })
}

/// Whether an address of a service changes from `listen` to `[[service.socket]]`, or back: workers share a listener of the one and have
/// their own of the other, so it cannot be taken over.
fn changes_use(running: &Topology, service: &Service) -> Option<Refusal> {
    let before = named(running, &service.name)?;
    let was = |listen: Listen| before.ports().find(|(held, _)| *held == listen);
    let changes = |(listen, socket): &(Listen, Option<u16>)| {
        listen.address.port() != 0
            && was(*listen).is_some_and(|w| w.1.is_some() != socket.is_some())
    };
    let (listen, socket) = service.ports().find(changes)?;
    let (old, new) = match socket {
        Some(_) => ("listen", "[[service.socket]]"),
        None => ("[[service.socket]]", "listen"),
    };
    let url = crate::config::url(listen.transport, listen.address);
    let why = format!(
        "cannot use {url} as {new} in the same step in which it gives it up as {old}: remove it there, reload, then add it here; or \
         restart"
    );
    Some(Refusal { what: format!("service {:?}", service.name), why })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use wire::framing::Framing;
    use wire::nic::Transport;

    use super::*;
    use engine::topology::{
        AcceleratorKind, CpuPlacement, EngineSettings, Limits, STACK_KIB, SocketAt, SocketSpec,
        Tenant,
    };
    use onpath::Spec;

    fn listen(port: u16) -> Listen {
        Listen { transport: Transport::Udp, address: ([127, 0, 0, 1], port).into() }
    }

    fn topology(services: Vec<Service>) -> Topology {
        let kind = AcceleratorKind::Cpu { placement: CpuPlacement::Worker, stack_kib: STACK_KIB };
        Topology {
            engine: EngineSettings::default(),
            limits: Limits::default(),
            accelerators: vec![Accelerator { name: "acc0".into(), kind }],
            services,
            tenants: Vec::new(),
        }
    }

    fn two() -> Topology {
        topology(vec![
            Service::new("a", vec![listen(9000)], "echo"),
            Service::new("b", vec![listen(9001)], "echo"),
        ])
    }

    fn refused(wanted: &Topology) -> String {
        let refusals = Plan::new(&two(), wanted, &[]).unwrap_err();
        refusals.iter().map(|r| format!("{r}\n")).collect()
    }

    #[test]
    fn every_service_has_its_action() {
        let mut wanted = two();
        wanted.services[1].slots = 8;
        wanted.services.push(Service::new("c", vec![listen(9002)], "echo"));
        wanted.services.remove(0);
        wanted.limits.idle_ms = 1000;
        let plan = Plan::new(&two(), &wanted, &[]).unwrap();
        let actions: Vec<_> =
            plan.services.iter().map(|(name, action)| (name.as_str(), *action)).collect();
        let changed =
            ServiceAction::Changed { keeps_connections: true, keeps_memory_clients: true };
        assert_eq!(
            actions,
            [("b", changed), ("c", ServiceAction::Added), ("a", ServiceAction::Removed)]
        );
        assert_eq!(plan.settings, ["limits.idle_s"]);
        assert!(!plan.is_empty());
    }

    #[test]
    fn a_service_whose_kernel_file_was_rebuilt_changes_and_keeps_its_clients() {
        let plan = Plan::new(&two(), &two(), &["b"]).unwrap();
        let changed =
            ServiceAction::Changed { keeps_connections: true, keeps_memory_clients: true };
        assert_eq!(plan.services, [("a".into(), ServiceAction::Unchanged), ("b".into(), changed)]);
        assert!(!plan.is_empty() && plan.settings.is_empty());
    }

    #[test]
    fn another_framing_order_or_number_of_replies_closes_connections() {
        let changes: [fn(&mut Service); 3] = [
            |s| s.framing = Framing::Line,
            |s| s.ordered = false,
            |s| s.replies = engine::topology::Replies::None,
        ];
        for change in changes {
            let mut wanted = two();
            change(&mut wanted.services[0]);
            let plan = Plan::new(&two(), &wanted, &[]).unwrap();
            let action = plan.services[0].1;
            assert!(
                matches!(action, ServiceAction::Changed { keeps_connections: false, .. }),
                "{action:?}"
            );
        }
    }

    #[test]
    fn a_service_changes_with_its_accelerator_and_not_with_its_number() {
        let mut wanted = two();
        let placement = CpuPlacement::Threads { threads: 1, cores: Vec::new() };
        wanted.accelerators[0].kind = AcceleratorKind::Cpu { placement, stack_kib: STACK_KIB };
        let plan = Plan::new(&two(), &wanted, &[]).unwrap();
        assert!(
            plan.services.iter().all(|(_, action)| matches!(action, ServiceAction::Changed { .. }))
        );
        let mut wanted = two();
        let other = Accelerator { name: "other".into(), ..wanted.accelerators[0].clone() };
        wanted.accelerators.insert(0, other);
        wanted.services.iter_mut().for_each(|service| service.accelerators = vec![1]);
        let plan = Plan::new(&two(), &wanted, &[]).unwrap();
        assert!(plan.services.iter().all(|(_, action)| *action == ServiceAction::Unchanged));
        assert_eq!(plan.settings, ["accelerator"], "the list has changed");
        let [entry] = &plan.entries[..] else { panic!("{:?}", plan.entries) };
        assert_eq!((&*entry.what, entry.action), ("accelerator other", "added"));
    }

    #[test]
    fn entries_of_lists_come_change_and_go() {
        let with = |names: &[(&str, u64)], tenant: &str| {
            let mut topology = two();
            let function = |(name, high): &(&str, u64)| Spec {
                params: vec![("high".into(), (*high).into())],
                ..Spec::new(name, "threshold")
            };
            topology.services[0].functions = names.iter().map(function).collect();
            topology.tenants = vec![Tenant::new(tenant)];
            topology
        };
        let (old, new) = (with(&[("a", 1), ("b", 1)], "x"), with(&[("b", 2), ("c", 1)], "y"));
        let plan = Plan::new(&old, &new, &[]).unwrap();
        let entries: Vec<_> = plan.entries.iter().map(|e| (e.what.as_str(), e.action)).collect();
        assert_eq!(
            entries,
            [
                ("tenant y", "added"),
                ("tenant x", "removed"),
                ("function b of service a", "changed"),
                ("function c of service a", "added"),
                ("function a of service a", "removed"),
            ]
        );
    }

    #[test]
    fn settings_that_cannot_change_are_refused_with_the_reason() {
        let mut wanted = two();
        wanted.engine.workers = 2;
        wanted.limits.connections = 1;
        let text = refused(&wanted);
        assert!(text.contains("engine.workers cannot change while the engine runs"), "{text}");
        assert!(text.contains("limits.connections cannot change"), "{text}");
    }

    #[test]
    fn clients_of_shared_memory_stay_where_their_regions_fit() {
        type Change = (fn(&mut Service), bool);
        let changes: [Change; 5] = [
            (|s| s.slots = 8, true),
            (|s| s.framing = Framing::Line, true),
            (|s| s.max_message_bytes += 1, false),
            (|s| s.max_reply_bytes += 1, false),
            (|s| s.replies = engine::topology::Replies::None, false),
        ];
        for (change, stay) in changes {
            let mut wanted = two();
            change(&mut wanted.services[0]);
            let ServiceAction::Changed { keeps_memory_clients, .. } =
                Plan::new(&two(), &wanted, &[]).unwrap().services[0].1
            else {
                panic!("it changes")
            };
            assert_eq!(keeps_memory_clients, stay, "{:?}", wanted.services[0]);
        }
    }

    #[test]
    fn an_address_does_not_move_between_services_in_one_step() {
        let mut wanted = two();
        wanted.services[0].name = "renamed".into();
        let text = refused(&wanted);
        assert!(text.contains("udp://127.0.0.1:9000") && text.contains("service \"a\""), "{text}");
        let mut running = two();
        running.services[0].memory_ports.push("/run/x".into());
        let mut wanted = two();
        wanted.services[1].memory_ports.push("/run/x".into());
        let refusals = Plan::new(&running, &wanted, &[]).unwrap_err();
        assert!(refusals[0].to_string().contains("shm:///run/x"), "{refusals:?}");
    }

    #[test]
    fn an_address_and_the_unspecified_address_of_one_port_do_not_swap_in_one_step() {
        let at =
            |address: &str| Listen { transport: Transport::Udp, address: address.parse().unwrap() };
        let running = |address: &str| {
            let b = Service::new("b", vec![listen(9001)], "echo");
            topology(vec![Service::new("a", vec![at(address)], "echo"), b])
        };
        let moves = [
            ("0.0.0.0:9000", "127.0.0.1:9000"),
            ("127.0.0.1:9000", "0.0.0.0:9000"),
            ("[::]:9000", "[::1]:9000"),
        ];
        for (from, to) in moves {
            let said = |wanted: &Topology| {
                let refusals = Plan::new(&running(from), wanted, &[]).unwrap_err();
                assert_eq!(refusals.len(), 1, "{refusals:?}");
                refusals[0].to_string()
            };
            let text = said(&running(to));
            assert!(
                text.contains(&format!(
                    "service \"a\" cannot listen on udp://{to} in the same step"
                )) && text.contains(&format!("service \"a\" gives up udp://{from}"))
                    && text.contains("or restart"),
                "{text}"
            );
            // It moves to another service, and the first one is removed.
            let mut wanted = running(to);
            wanted.services[0].name = "renamed".into();
            assert!(said(&wanted).contains("service \"a\" gives up"), "{from} {to}");
        }
        let tcp = Listen { transport: Transport::Tcp, ..at("127.0.0.1:9000") };
        for free in [at("127.0.0.1:9002"), at("[::1]:9000"), at("[::]:9000"), tcp] {
            let mut wanted = running("0.0.0.0:9000");
            wanted.services[0].listen = vec![free];
            assert!(Plan::new(&running("0.0.0.0:9000"), &wanted, &[]).is_ok(), "{free:?}");
        }
        // Two addresses of the host, and a port that the host kernel chooses.
        let mut wanted = running("127.0.0.2:9000");
        assert!(Plan::new(&running("127.0.0.1:9000"), &wanted, &[]).is_ok());
        wanted.services[0].listen = vec![at("127.0.0.1:0")];
        assert!(Plan::new(&running("0.0.0.0:0"), &wanted, &[]).is_ok());
        // Ports that stay are not opened.
        let mut wanted = running("0.0.0.0:9000");
        wanted.services[0].slots = 8;
        assert!(Plan::new(&running("0.0.0.0:9000"), &wanted, &[]).is_ok());
    }

    #[test]
    fn an_address_does_not_become_one_of_sockets_in_one_step_nor_back() {
        let tcp =
            |port| Listen { transport: Transport::Tcp, address: ([127, 0, 0, 1], port).into() };
        let messages = |port| Service::new("a", vec![tcp(port)], "echo");
        let sockets = |port| {
            let mut service = Service::new("a", Vec::new(), "echo");
            service.sockets = vec![SocketSpec::listen(([127, 0, 0, 1], port))];
            service
        };
        let said = |from: Service, to: Service| {
            let planned = Plan::new(&topology(vec![from]), &topology(vec![to]), &[]);
            planned.err().map_or(String::new(), |refusals| refusals[0].to_string())
        };
        let text = said(messages(9000), sockets(9000));
        let begin = "service \"a\" cannot use tcp://127.0.0.1:9000 as ";
        assert!(text.starts_with(&format!("{begin}[[service.socket]] ")), "{text}");
        assert!(text.contains("gives it up as listen: remove it there"), "{text}");
        let text = said(sockets(9000), messages(9000));
        assert!(text.starts_with(&format!("{begin}listen ")), "{text}");
        // Another service, another port, a port of the host kernel's choice.
        let other = Service { name: "b".into(), ..sockets(9000) };
        assert!(said(messages(9000), other).contains("service \"a\" gives it up"));
        assert_eq!(said(messages(9000), sockets(9001)), "");
        assert_eq!(said(messages(0), sockets(0)), "");
    }

    #[test]
    fn a_path_does_not_change_its_kind_or_service_in_one_step() {
        let memory = |name: &str| {
            let mut service = Service::new(name, vec![listen(9000)], "echo");
            service.memory_ports.push("/run/x".into());
            service
        };
        let unix = |name: &str| {
            let mut service = Service::new(name, vec![listen(9000)], "echo");
            service.sockets = vec![SocketSpec::listen(SocketAt::Unix("/run/x".into()))];
            service
        };
        let refused = |from: Service, to: Service| {
            let planned = Plan::new(&topology(vec![from]), &topology(vec![to]), &[]);
            planned.err().map_or(String::new(), |refusals| refusals[0].to_string())
        };
        assert!(refused(memory("a"), unix("a")).contains("unix:///run/x"));
        assert!(refused(unix("a"), memory("a")).contains("shm:///run/x"));
        let moved = Service { listen: Vec::new(), ..unix("b") };
        assert!(refused(unix("a"), moved).contains("unix:///run/x"));
        assert_eq!(refused(unix("a"), Service { slots: 8, ..unix("a") }), "");
    }

    fn any_service() -> impl Strategy<Value = Service> {
        (0..6u16, 0..3u32, prop::bool::ANY, 0..3u64).prop_map(|(name, slots, ordered, wait)| {
            // The port follows from the name, so that services differ only in what may change.
            let mut service = Service::new(&format!("s{name}"), vec![listen(9000 + name)], "echo");
            service.slots = 1 << slots;
            service.ordered = ordered;
            service.queue_us_max = wait;
            service
        })
    }

    fn any_topology() -> impl Strategy<Value = Topology> {
        prop::collection::vec(any_service(), 0..6).prop_map(|mut services| {
            services.sort_by(|a, b| a.name.cmp(&b.name));
            services.dedup_by(|a, b| a.name == b.name);
            topology(services)
        })
    }

    proptest! {
        /// Applying a plan gives exactly the wanted topology.
        #[test]
        fn applying_a_plan_gives_the_wanted_topology(running in any_topology(), wanted in any_topology()) {
            let plan = Plan::new(&running, &wanted, &[]).unwrap();
            let mut reached: Vec<Service> = Vec::new();
            for (name, action) in &plan.services {
                let (old, new) = (named(&running, name), named(&wanted, name));
                prop_assert_eq!(*action == ServiceAction::Added, old.is_none());
                prop_assert_eq!(*action == ServiceAction::Removed, new.is_none());
                match action {
                    ServiceAction::Unchanged => reached.push(old.unwrap().clone()),
                    ServiceAction::Added => reached.push(new.unwrap().clone()),
                    ServiceAction::Changed { keeps_connections, .. } => {
                        prop_assert_ne!(old.unwrap(), new.unwrap());
                        prop_assert_eq!(*keeps_connections, old.unwrap().ordered == new.unwrap().ordered);
                        reached.push(new.unwrap().clone());
                    }
                    ServiceAction::Removed => {}
                }
            }
            prop_assert_eq!(&reached, &wanted.services);
            prop_assert_eq!(plan.is_empty(), running.services == wanted.services);
            let back = Plan::new(&wanted, &running, &[]).unwrap();
            prop_assert_eq!(back.is_empty(), plan.is_empty());
        }
    }
}
