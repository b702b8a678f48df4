//! Accelerators behind links in a run: which they are, the faults of their links, and new generations after a break.

use wire::DropReason;
use wire::nic::Nic;

use crate::behaviour::Behaviour;
use crate::fault::Fault;
use crate::generations::Restart;
use crate::link::AcceleratorLink;
use crate::net::{LinkFaults, lock};
use crate::nic::SimSocket;
use crate::plan::Plan;
use crate::rng::Rng;
use crate::run::Run;
use crate::world::{Setup, World};

const US: u64 = 1_000;
const MS: u64 = 1_000_000;

/// The link of an accelerator's generation that serves, or served last.
pub(crate) struct Linked {
    pub(crate) service: usize,
    pub(crate) slot: u16,
    /// Its index in the service's list.
    pub(crate) accelerator: usize,
    pub(crate) link: AcceleratorLink,
}

impl Linked {
    /// The links of a service's accelerators.
    pub(crate) fn of(
        service: usize,
        slot: u16,
        links: Vec<(usize, AcceleratorLink)>,
    ) -> impl Iterator<Item = Self> {
        links.into_iter().map(move |(accelerator, link)| Self { service, slot, accelerator, link })
    }
}

impl Setup {
    /// The behaviour of the blocks of an accelerator: behind a link they run between the turns.
    pub(crate) fn placed(
        &self,
        behaviour: Behaviour,
        service: usize,
        accelerator: usize,
    ) -> Behaviour {
        let remote = behaviour.remote || self.links.contains(&(service, accelerator));
        Behaviour { remote, ..behaviour }
    }
}

impl Plan {
    /// Some accelerators are on another machine: none with sockets, which do not cross a link, and none that scribbles, because
    /// its own machine ends it.
    pub(crate) fn add_links(&mut self, seed: u64) {
        if cfg!(target_family = "wasm") {
            return;
        }
        for (service, spec) in self.setup.topology.services.iter().enumerate() {
            let mut own = Rng::named(seed, &format!("links of {service}"));
            let crosses = spec.sockets.is_empty() && !self.setup.behaviours[service].corrupts();
            if !crosses || !own.chance(400) {
                continue;
            }
            let places = (0..spec.accelerators.len()).filter(|_| own.chance(700));
            self.setup.links.extend(places.map(|place| (service, place)));
        }
        let mut own = Rng::named(seed, "faults of links");
        self.faults.link = LinkFaults {
            short: own.pick(&[0, 100, 900]),
            stall: own.pick(&[0, 5, 50]),
            cut: own.pick(&[0, 1, 5]),
            damage: own.pick(&[0, 0, 2]),
            silence: own.pick(&[0, 0, 2]),
            delay_ns: own.pick(&[(0, 0), (5 * US, 50 * US), (10 * US, MS)]),
            pipe_bytes: own.pick(&[8 << 10, 64 << 10, 1 << 20]),
            heartbeat_ns: own.pick(&[50 * MS, 200 * MS]),
        };
        self.link_rng = own.fork();
    }
}

impl<N: Nic<Socket = SimSocket, Port = ()>> World<N> {
    pub(crate) fn advance_links(&mut self, now_ns: u64) {
        let serving = self.links.iter_mut().map(|linked| &mut linked.link);
        serving.chain(&mut self.retired_links).for_each(|link| link.advance(now_ns, &self.net));
    }

    /// The link of an accelerator's next generation. What serves no longer may go on, in a region that is not read.
    // There are no links on wasm32.
    #[cfg_attr(target_family = "wasm", allow(unreachable_code, unused_variables))]
    pub(crate) fn replace_link(
        &mut self,
        service: usize,
        accelerator: usize,
        next: Option<AcceleratorLink>,
    ) {
        let Some(next) = next else { return };
        let slot = *self.slots[service].last().expect("every service of a plan runs");
        let is_its = |of: &&mut Linked| {
            (of.service, of.slot, of.accelerator) == (service, slot, accelerator)
        };
        let linked = self.links.iter_mut().find(is_its).expect("it had a link");
        let old = std::mem::replace(&mut linked.link, next);
        if old.fails().is_none() {
            self.retired_links.push(old);
        }
    }

    /// Whether a fault is ending the link of an accelerator.
    pub(crate) fn link_fails(&self, service: usize, accelerator: usize) -> bool {
        let its =
            self.links.iter().filter(|of| (of.service, of.accelerator) == (service, accelerator));
        its.map(|linked| &linked.link).any(|link| link.fails().is_some())
    }

    /// Whether a fault is ending any link.
    pub(crate) fn any_link_fails(&self) -> bool {
        self.links.iter().any(|linked| linked.link.fails().is_some())
    }

    /// All messages over links have arrived and all slots were returned, but for those of blocks that have stopped.
    pub(crate) fn check_links(&self) -> Result<(), String> {
        for Linked { service, accelerator, link, .. } in &self.links {
            let behaviour = &self.setup.behaviours[*service];
            let stops = behaviour.stall_after.is_some() || behaviour.die_after.is_some();
            if !stops && !link.is_settled() {
                return Err(format!(
                    "all is quiet, but the link of accelerator {accelerator} of service {service} is not"
                ));
            }
        }
        Ok(())
    }
}

impl<N: Nic<Socket = SimSocket, Port = ()>> Run<N> {
    /// Faults of links, while no other change of their services is in progress.
    pub(crate) fn spoil_links(&mut self) {
        let Self { plan, world, .. } = self;
        if !world.is_changed() {
            return;
        }
        let Plan { link_rng: rng, restarts, faults, .. } = plan;
        let LinkFaults { stall, cut, damage, silence, .. } = faults.link;
        for Linked { service, accelerator, link, .. } in &mut world.links {
            let restarts = restarts.iter().any(|r| r.is_of(*service, *accelerator));
            if link.fails().is_some() || restarts {
                continue;
            }
            let mut counts = lock(&world.net);
            if rng.chance(stall) && link.stall() {
                counts.fault_counts.one(Fault::LinkStall);
            }
            let ends =
                [(Fault::LinkCut, cut), (Fault::LinkDamage, damage), (Fault::LinkSilence, silence)];
            if let Some((fault, _)) = ends.into_iter().find(|(_, rate)| rng.chance(*rate)) {
                link.fail(fault);
                counts.fault_counts.one(fault);
            }
        }
    }

    /// A link that broke is a lost accelerator, which gets a new generation.
    pub(crate) fn reconnect(&mut self) {
        let Self { plan, world, .. } = self;
        if !world.is_changed() {
            return;
        }
        let broken = |of: &&Linked| of.link.is_broken();
        let seats = world.links.iter().filter(broken).map(|of| (of.service, of.accelerator));
        for (service, accelerator) in seats.collect::<Vec<_>>() {
            if plan.restarts.iter().any(|r| r.is_of(service, accelerator)) {
                continue;
            }
            let rng = &mut plan.link_rng;
            let mut restart = Restart {
                service,
                accelerator,
                turn: 0,
                reason: DropReason::AcceleratorLost,
                gaps_ns: (rng.pick(&[0, 100 * US, 20 * MS]), rng.pick(&[0, 100 * US, 5 * MS])),
                next: plan.setup.behaviours[service],
                hold_ns: None,
                overdue: false,
                due: None,
            };
            restart.due = Some(restart.lose_runtime(world));
            plan.restarts.push(restart);
        }
    }
}
