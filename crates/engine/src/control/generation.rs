//! Generations: an accelerator whose blocks run in another process may end and restart while the ports stay open.
//!
//! A service share always has the rings of one generation of each of its accelerators: the running one, or the next
//! one. The control side notices that a runtime has ended, creates the region of the next generation and passes it to
//! a new runtime. A worker gets each step as a [`RuntimeEvent`], in a
//! [`ControlMessage::Runtime`](crate::ControlMessage::Runtime):
//!
//! ```text
//!   absent ── Started ──▶ serving ── Ended ──▶ absent (old rings) ── RingsReplaced ──▶ absent (new rings) ── Started ──▶ …
//! ```
//!
//! *What ends with a generation.* Replies that were published before the event are still forwarded if the destination
//! (a socket, the link to another worker) has room at that moment; every other request in flight ends with the given
//! reason. Its token becomes invalid. Later writes of the old process have no effect: the old region is not read any
//! more, and in the new one an old token is stale. Its requests to backends keep their places in the order of
//! answers, and the answers are discarded.
//!
//! *A planned end of a generation* loses no request: the service is paused before, see `control/pause.rs`.
//!
//! *Memory.* A worker drops its reference to the old region when it gets the next one. The thread that created the
//! region keeps its reference longer, so that no memory is unmapped inside a turn.

use wire::DropReason;
use wire::nic::Nic;

use crate::base::topology::Replies;
use crate::control::message::RuntimeEvent;
use crate::depart::Depart;
use crate::endpoint::set::Endpoints;
use crate::state::State;

impl<N: Nic> State<N> {
    pub(crate) fn apply_runtime_event(&mut self, event: RuntimeEvent) {
        let (RuntimeEvent::Started { service, accelerator }
        | RuntimeEvent::RingsReplaced { service, accelerator, .. }
        | RuntimeEvent::Paused { service, accelerator, .. }
        | RuntimeEvent::Resumed { service, accelerator }
        | RuntimeEvent::Ended { service, accelerator, .. }) = &event;
        let share = self.services.get(usize::from(*service));
        if share.is_none_or(|share| usize::from(*accelerator) >= share.accelerators.len()) {
            // The service has left.
            return;
        }
        match event {
            RuntimeEvent::Started { service, accelerator } => {
                self.services[usize::from(service)].mark_present(accelerator.into());
                self.end_pauses(service.into(), Some(accelerator));
            }
            RuntimeEvent::Paused { service, accelerator, drain_ns, barrier } => {
                self.pause(service.into(), accelerator, drain_ns, barrier);
            }
            RuntimeEvent::Resumed { service, accelerator } => {
                self.end_pauses(service.into(), Some(accelerator));
            }
            RuntimeEvent::RingsReplaced { service, accelerator, attachment } => {
                let slot = usize::from(service);
                let mut ends = self.services[slot].replace_rings(accelerator.into(), attachment);
                self.endpoints.servers.replace_rings::<N>(slot, &mut ends);
            }
            RuntimeEvent::Ended { service, accelerator, reason } => {
                self.end_generation(service.into(), accelerator.into(), reason);
            }
        }
    }

    fn end_generation(&mut self, service: usize, accelerator: usize, reason: DropReason) {
        let Self { turn, services, endpoints, .. } = self;
        let mqueues = services[service].mqueues_of(accelerator);
        let Endpoints { clients, servers } = endpoints;
        for mqueue in mqueues.clone() {
            // Forward every published reply, also those behind the head that was read: the head does
            // not move any more.
            clients.gather_replies(turn, services, servers, service, mqueue, u64::MAX);
        }
        clients.deliver_shown(turn, services, servers, service);
        let share = &mut services[service];
        if share.replies == Replies::None {
            share.count_released(turn.now_ns);
        }
        if !mutants::on("outlive_generation") {
            for mqueue in mqueues.clone() {
                share.mark_dead(mqueue);
            }
            clients.end_requests_of_dead_mqueues(turn, services, service, reason);
        }
        clients.udp.forget_pools(services);
        servers.end_blocks(turn, service, mqueues, true);
        services[service].detach_accelerator(accelerator);
        services[service].await_next_generation(accelerator as u16, turn.now_ns);
        if reason == DropReason::Reconfiguring {
            // The next generation starts as soon as possible.
            services[service].dispatcher.set_absent_reason(reason);
        }
    }
}
