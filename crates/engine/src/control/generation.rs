//! Generations: how an accelerator whose blocks run elsewhere goes and comes back while the ports stay open.
//!
//! A service share always has the rings of one generation of each of its accelerators: of the one that runs, or of the next one. The
//! control side, outside the workers, notices that a runtime is gone, makes the next generation's region and
//! lets a runtime have it; what that means to a worker comes as [`RuntimeEvent`] through
//! [`ControlMessage::Runtime`](crate::ControlMessage::Runtime):
//!
//! ```text
//!   absent ── Started ──▶ serving ── Ended ──▶ absent (old rings) ── RingsReplaced ──▶ absent (new rings) ── Started ──▶ …
//! ```
//!
//! *What ends with a generation.* Replies that were published before the news are still forwarded, as far as
//! there is room where they go at that moment (a socket, the link to another worker); every other request
//! under way ends for the reason given. Its token dies with it, so whoever writes into the old
//! region, however late, reaches nobody: nobody reads those rings, and in the new ones an old token is
//! stale. What its blocks asked of backends keeps its place in line and is thrown away when it comes.
//!
//! *A generation that ends as planned* need not take anything along: its service is paused before, see `control/pause.rs`.
//!
//! *Memory.* A worker drops its hold on the old region when it takes the next one. Whoever made a region
//! holds it for longer than that, so that nothing is unmapped inside a turn.

use wire::DropReason;
use wire::nic::Nic;

use crate::control::drain::DrainBarrier;
use crate::service::ends::Attachment;
use crate::topology::Replies;
use crate::turn::Turn;
use crate::worker::Worker;

/// What the control side tells a worker about one accelerator of one service, by their places in the
/// topology: the service's number, and the accelerator's in the service's list.
pub enum RuntimeEvent {
    /// The blocks run: requests may come.
    Started {
        /// The service.
        service: u16,
        /// The accelerator.
        accelerator: u16,
    },
    /// Nobody runs the blocks any more.
    Ended {
        /// The service.
        service: u16,
        /// The accelerator.
        accelerator: u16,
        /// Why requests that are with it are lost.
        reason: DropReason,
    },
    /// The rings of the next generation, of the same blocks.
    RingsReplaced {
        /// The service.
        service: u16,
        /// The accelerator.
        accelerator: u16,
        /// This worker's share; [`crate::accelerator::Blocks::present`] is not asked.
        attachment: Attachment,
    },
    /// A planned change is about to end this generation: the service is paused until the next one begins, see `control/pause.rs`.
    Paused {
        /// The service.
        service: u16,
        /// The accelerator.
        accelerator: u16,
        /// How long what was accepted may take, in nanoseconds; the generation ends by then.
        drain_ns: u64,
        /// Where the workers tell that all of it has been answered.
        barrier: DrainBarrier,
    },
    /// This generation goes on after all: the pause ends.
    Resumed {
        /// The service.
        service: u16,
        /// The accelerator.
        accelerator: u16,
    },
}

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
            // What had been answered is answered, also what its head does not show: nobody moves that any more.
            endpoints.gather_replies(turn, service, mqueue, u64::MAX);
        }
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
        let Turn { services, nic, now_ns, .. } = turn;
        services[service].detach_accelerator(accelerator, nic);
        services[service].await_next_generation(accelerator as u16, *now_ns);
        if reason == DropReason::Reconfiguring {
            // The next generation comes as soon as it can, with others or without.
            services[service].dispatcher.set_absent_reason(reason);
        }
    }
}
