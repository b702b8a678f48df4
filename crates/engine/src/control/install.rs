//! How services are installed on a worker, changed and removed, while the others keep serving.
//!
//! A service has a *slot*: the index of its service share, the same on every worker. Slow work is done earlier by
//! another thread: a [`ServiceInstall`] contains the service share, its hand-over rings and its ports, all allocated
//! and open. Then the control side posts these [messages](crate::ControlMessage), each to every worker:
//!
//! | message | what a worker does |
//! |---|---|
//! | `Install` | takes the service share; starts blocks that run on its own core; new ports are not read yet |
//! | `Switch` | in one step: new ports are read, kept ones lead to the new service share, others are no longer read, replaced and removed service shares [leave](Leave) |
//! | `Expire` | drops the unanswered requests of a leaving service share as `drain_timeout` |
//! | `Release` | removes the service share, which has nothing outstanding |
//!
//! An engine starts in the same way, without services that leave. Every worker has completed a step before the next
//! one is posted, so a request that is handed over always finds its service share. When every worker has voted
//! ([`DrainBarrier`]), nothing of the leaving service is in flight on any of them. A changed service is a new one in
//! another slot. It takes over the ports, and also the connections if framing, order and replies are the same; its
//! counters stay.

use wire::nic::Nic;

use crate::base::accelerator::StartError;
use crate::base::links::ServiceLinks;
use crate::control::message::{Leave, Switch};
use crate::control::service_install::ServiceInstall;
use crate::endpoint::servers::Parts;
use crate::service::share::ServiceShare;
use crate::service::vote::{DrainVote, Leaving};
use crate::state::State;

impl<N: Nic> State<N> {
    /// Installs a service share; see the module documentation. After an error nothing has changed.
    pub(crate) fn install(&mut self, install: ServiceInstall<N::Port>) -> Result<(), StartError> {
        let ServiceInstall { slot, mut share, parts, terms, links, ports, scratch, awaited } =
            install;
        for drive in &mut share.accelerators {
            drive.blocks.start()?;
        }
        let Self { turn, endpoints, .. } = self;
        let mut taken = Vec::new();
        for (index, entry, port) in ports {
            if let Err(error) = turn.nic.add_port(index, port) {
                taken.into_iter().for_each(|(index, _)| turn.nic.close_port(index));
                return Err(error.into());
            }
            taken.push((index, entry));
        }
        for (index, entry) in taken {
            // Requests that arrive before the switch are not read, so they must not end the worker's sleep either.
            turn.nic.pause_port(index, true);
            endpoints.clients.place_port(index, entry);
        }
        endpoints.clients.udp.refresh_sources(turn);
        if turn.scratch.len() < scratch.len() {
            turn.outbound.reserve(scratch.len());
            turn.scratch = scratch;
        }
        self.endpoints.clients.tcp.place_service(slot.into(), terms);
        self.place(slot, share, parts, links);
        for (accelerator, drain_ns) in awaited {
            self.pause_from_switch(slot.into(), accelerator, drain_ns);
        }
        // Other workers read the credit when they switch; the next housekeeping would publish it too late for the
        // first requests.
        self.services.publish_credit_of(&self.turn, slot.into());
        Ok(())
    }

    /// Stores the service share, and what endpoints have of it, in its slot.
    fn place(&mut self, service: u16, mut share: ServiceShare, parts: Parts, links: ServiceLinks) {
        let Self { turn, services, endpoints, schedule, .. } = self;
        let slot = usize::from(service);
        endpoints.place(turn, service, parts);
        for (worker, link) in links.0.into_iter().enumerate() {
            let (link_in, link_out) = link.unzip();
            endpoints.clients.set_link::<N>(worker, slot, link_in);
            turn.outbound.replace(worker, slot, link_out);
        }
        let owner = turn.shared.tenants().named(&share.tenant);
        share.owner = Some(owner.clone());
        share.find_peers(&turn.shared);
        schedule.place(slot, owner);
        while services.len() <= slot {
            services.push(ServiceShare::vacant(turn.shared.workers()));
        }
        services[slot] = share;
    }

    /// Switches everything in one step, so that every request finds a complete service. See the module documentation.
    pub(crate) fn switch(&mut self, switch: &Switch) {
        for leave in &switch.leave {
            self.end_pauses(leave.slot.into(), None);
        }
        let Self { turn, services, endpoints, idle, .. } = self;
        endpoints.clients.udp.refresh_sources(turn);
        services.read_credit(turn);
        idle.set_polling(switch.polling);
        endpoints.set_limits::<N>(&switch.limits);
        turn.slow_client_ns = switch.limits.slow_client_ms * 1_000_000;
        for (index, port) in endpoints.clients.ports_mut() {
            port.switch_on(turn, services, index);
        }
        for index in &switch.stop {
            if let Some(port) = endpoints.clients.port_mut(*index) {
                port.stop(turn, usize::from(*index));
            }
        }
        for (index, slot, socket) in &switch.lead {
            if let Some(port) = endpoints.clients.port_mut(*index) {
                (port.service, port.socket) = (*slot, *socket);
                // Connections may wait for which the previous version had no block.
                port.ready |= socket.is_some();
            }
        }
        for Leave { slot, successor, shm_successor, departing, barrier } in &switch.leave {
            let vote = DrainVote::new(barrier.clone());
            services[usize::from(*slot)].leaving = Some(Leaving { vote, expired: false });
            if let Some(successor) = successor {
                endpoints.move_to(turn, services, *slot, *successor);
            }
            if let Some(successor) = shm_successor {
                endpoints.clients.move_processes::<N>(*slot, *successor, departing);
            }
            endpoints.leave(turn, services, Some(*slot));
        }
        (0..self.services.len()).for_each(|slot| self.begin_pauses(slot));
        self.turn.busy();
    }
}
