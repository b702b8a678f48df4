//! Links in a run: their faults, and new generations after a break.

use wire::DropReason;
use wire::nic::Nic;

use super::Run;
use crate::fault::Fault;
use crate::net::LinkFaults;
use crate::nic::SimSocket;
use crate::plan::Plan;
use crate::shared::lock;
use crate::world::generations::Restart;
use crate::world::linked::Linked;

const US: u64 = 1_000;
const MS: u64 = 1_000_000;

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
