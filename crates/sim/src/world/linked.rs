//! Accelerators behind links in a world.

use wire::nic::Nic;

use super::{Setup, World};
use crate::behaviour::Behaviour;
use crate::link::AcceleratorLink;
use crate::nic::SimSocket;

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
