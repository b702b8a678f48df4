//! Lives: how an accelerator whose blocks run elsewhere goes and comes back while the ports stay open.
//!
//! A lane always has the rings of one life of each of its accelerators: of the one that runs, or of the next one. The
//! control side, outside the workers, notices that a runtime is gone, makes the next life's region and
//! lets a runtime have it; what that means to a worker comes as [`LifeNews`] through
//! [`crate::Fabric::tell_life`], between two turns:
//!
//! ```text
//!   absent ── Began ──▶ serving ── Ended ──▶ absent (old rings) ── Next ──▶ absent (new rings) ── Began ──▶ …
//! ```
//!
//! *What ends with a life.* Replies that were published before the news are still forwarded, as far as
//! there is room where they go at that moment (a socket, the link to another worker); every other request
//! under way ends for the reason given. Its token dies with it, so whoever writes into the old
//! region, however late, reaches nobody: nobody reads those rings, and in the new ones an old token is
//! stale. What its blocks asked of backends keeps its place in line and is thrown away when it comes.
//!
//! *A life that ends as planned* need not take anything along: its service is held before, see `control/pause.rs`.
//!
//! *Memory.* A worker drops its hold on the old region when it takes the next one. Whoever made a region
//! holds it for longer than that, so that nothing is unmapped inside a turn.

use wire::DropReason;
use wire::nic::Nic;

use crate::control::install::Farewell;
use crate::endpoint::peer::ControlMail;
use crate::service::share::Attachment;
use crate::topology::Replies;
use crate::worker::Worker;

/// What the control side tells a worker about one accelerator of one service, by their places in the
/// topology: the service's number, and the accelerator's in the service's list.
pub enum LifeNews {
    /// The blocks run: requests may come.
    Began {
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
    /// The rings of the next life, of the same blocks.
    Next {
        /// The service.
        service: u16,
        /// The accelerator.
        accelerator: u16,
        /// This worker's share; [`crate::accelerator::Blocks::present`] is not asked.
        attachment: Attachment,
    },
    /// A planned change is about to end this life: the service is held until the next one begins, see `control/pause.rs`.
    Held {
        /// The service.
        service: u16,
        /// The accelerator.
        accelerator: u16,
        /// How long what was accepted may take, in nanoseconds; the life ends by then.
        drain_ns: u64,
        /// Where the workers tell that all of it has been answered.
        farewell: Farewell,
    },
    /// This life goes on after all: the hold ends.
    Freed {
        /// The service.
        service: u16,
        /// The accelerator.
        accelerator: u16,
    },
}

impl<N: Nic> Worker<N> {
    /// Does what the control side asks for.
    pub(crate) fn collect_control_mail(&mut self) {
        for mail in self.fabric.collect_control_mail(self.index) {
            match mail {
                ControlMail::Joined(client) => self.adopt_memory_client(*client),
                ControlMail::Left(id) => self.dismiss_memory_client(id),
                ControlMail::Life(news) => self.live(*news),
            }
        }
    }

    fn live(&mut self, news: LifeNews) {
        self.busy();
        let (LifeNews::Began { service, accelerator }
        | LifeNews::Next { service, accelerator, .. }
        | LifeNews::Held { service, accelerator, .. }
        | LifeNews::Freed { service, accelerator }
        | LifeNews::Ended { service, accelerator, .. }) = &news;
        let lane = &self.lanes[usize::from(*service)];
        if usize::from(*accelerator) >= lane.drives.len() {
            // The service has left; see `control/install.rs`.
            return;
        }
        match news {
            LifeNews::Began { service, accelerator } => {
                self.lanes[usize::from(service)].revive(accelerator.into());
                self.end_holds(service.into(), Some(accelerator));
            }
            LifeNews::Held { service, accelerator, drain_ns, farewell } => {
                self.hold(service.into(), accelerator, drain_ns, farewell);
            }
            LifeNews::Freed { service, accelerator } => {
                self.end_holds(service.into(), Some(accelerator));
            }
            LifeNews::Next { service, accelerator, attachment } => {
                self.lanes[usize::from(service)].renew(accelerator.into(), attachment);
            }
            LifeNews::Ended { service, accelerator, reason } => {
                self.end_life(service.into(), accelerator.into(), reason);
            }
        }
    }

    fn end_life(&mut self, lane: usize, accelerator: usize, reason: DropReason) {
        let mqueues = self.lanes[lane].mqueues_of(accelerator);
        for mqueue in mqueues.clone() {
            // What had been answered is answered, also what its head does not show: nobody moves that any more.
            self.gather_replies(lane, mqueue, u64::MAX);
        }
        if self.lanes[lane].replies == Replies::None {
            self.lanes[lane].count_consumed(self.now_ns);
        }
        if !mutants::on("outlive_generation") {
            for mqueue in mqueues {
                self.lanes[lane].kill(mqueue);
            }
            self.end_requests_of_the_dead(lane, reason);
        }
        let Self { lanes, nic, now_ns, .. } = self;
        lanes[lane].retire(accelerator, nic);
        lanes[lane].await_next_life(accelerator as u16, *now_ns);
        if reason == DropReason::Reconfiguring {
            // The next life comes as soon as it can, with others or without.
            lanes[lane].dispatcher.set_absent_reason(reason);
        }
    }
}
