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

use sockets::End;
use wire::DropReason;
use wire::nic::Nic;

use crate::base::topology::Replies;
use crate::control::message::RuntimeEvent;
use crate::turn::Turn;
use crate::worker::Worker;

impl<N: Nic> Worker<N> {
    pub(crate) fn apply_runtime_event(&mut self, event: RuntimeEvent) {
        let (RuntimeEvent::Started { service, accelerator }
        | RuntimeEvent::RingsReplaced { service, accelerator, .. }
        | RuntimeEvent::Paused { service, accelerator, .. }
        | RuntimeEvent::Resumed { service, accelerator }
        | RuntimeEvent::Ended { service, accelerator, .. }) = &event;
        let share = self.turn.services.get(usize::from(*service));
        if share.is_none_or(|share| usize::from(*accelerator) >= share.accelerators.len()) {
            // The service has left.
            return;
        }
        match event {
            RuntimeEvent::Started { service, accelerator } => {
                self.turn.services[usize::from(service)].mark_present(accelerator.into());
                self.end_pauses(service.into(), Some(accelerator));
            }
            RuntimeEvent::Paused { service, accelerator, drain_ns, barrier } => {
                self.pause(service.into(), accelerator, drain_ns, barrier);
            }
            RuntimeEvent::Resumed { service, accelerator } => {
                self.end_pauses(service.into(), Some(accelerator));
            }
            RuntimeEvent::RingsReplaced { service, accelerator, attachment } => {
                self.turn.services[usize::from(service)]
                    .replace_rings(accelerator.into(), attachment);
            }
            RuntimeEvent::Ended { service, accelerator, reason } => {
                self.end_generation(service.into(), accelerator.into(), reason);
            }
        }
    }

    fn end_generation(&mut self, service: usize, accelerator: usize, reason: DropReason) {
        let Self { turn, endpoints, .. } = self;
        let mqueues = turn.services[service].mqueues_of(accelerator);
        for mqueue in mqueues.clone() {
            // Forward every published reply, also those behind the head that was read: the head does not move any
            // more.
            endpoints.gather_replies(turn, service, mqueue, u64::MAX);
        }
        endpoints.deliver_shown(turn, service);
        let share = &mut turn.services[service];
        if share.replies == Replies::None {
            share.count_released(turn.now_ns);
        }
        if !mutants::on("outlive_generation") {
            for mqueue in mqueues {
                share.mark_dead(mqueue);
            }
            endpoints.end_requests_of_dead_mqueues(turn, service, reason);
        }
        endpoints.udp.forget_pools(turn);
        let blocks = turn.services[service].mqueues_of(accelerator);
        turn.end_sockets(service as u16, blocks, End::AcceleratorLost, true);
        let Turn { services, nic, now_ns, .. } = turn;
        services[service].detach_accelerator(accelerator, nic);
        services[service].await_next_generation(accelerator as u16, *now_ns);
        if reason == DropReason::Reconfiguring {
            // The next generation starts as soon as possible.
            services[service].dispatcher.set_absent_reason(reason);
        }
    }
}
