//! The shares of all services on one worker, by slot.

use std::ops::{Deref, DerefMut};

use wire::nic::Nic;

use crate::base::turn::Turn;
use crate::service::share::ServiceShare;

/// See the module documentation.
#[derive(Default)]
pub(crate) struct Services {
    shares: Vec<ServiceShare>,
    /// Functions of all services may have been called since replies were last gathered; of proxies,
    /// only a tick and their messages call some.
    pub(crate) ticked: bool,
}

impl Deref for Services {
    type Target = Vec<ServiceShare>;

    #[inline(always)]
    fn deref(&self) -> &Vec<ServiceShare> {
        &self.shares
    }
}

impl DerefMut for Services {
    #[inline(always)]
    fn deref_mut(&mut self) -> &mut Vec<ServiceShare> {
        &mut self.shares
    }
}

impl Services {
    /// Publishes every RX ring that got messages, and runs or wakes the blocks.
    // Always inline: there is one caller, and it runs every turn.
    #[inline(always)]
    pub(crate) fn drive<N: Nic>(&mut self, turn: &mut Turn<N>) {
        let Turn { clock, now_ns, worked, .. } = turn;
        for share in self.iter_mut().filter(|share| !share.is_proxy()) {
            *worked |= share.accelerators.iter().any(|d| !d.rx_pending.is_empty());
            // The clock is read only while a message is sampled, see `stages.rs`.
            let clock_ns = || clock.as_ref().map_or(*now_ns, |clock| clock());
            if share.awaits_release() {
                share.check_releases(clock_ns());
                share.drive(*now_ns);
                share.check_releases(clock_ns());
            } else {
                share.drive(*now_ns);
            }
        }
    }

    /// Publishes to the other workers how many requests this one still takes for a service.
    pub(crate) fn publish_credit_of<N: Nic>(&self, turn: &Turn<N>, service: usize) {
        turn.shared.publish_credit(turn.index, service as u16, self[service].free_credit());
    }

    /// The same for all services.
    pub(crate) fn publish_credit<N: Nic>(&self, turn: &Turn<N>) {
        (0..self.len()).for_each(|service| self.publish_credit_of(turn, service));
    }

    /// Reads how many requests the others still take.
    pub(crate) fn read_credit<N: Nic>(&mut self, turn: &Turn<N>) {
        for (number, share) in self.iter_mut().enumerate() {
            for worker in (0..turn.shared.workers()).filter(|w| *w != turn.index as usize) {
                share.other_credit[worker] = turn.shared.credit_of(worker, number);
            }
        }
    }

    /// Updates the gauge after a block began to hang, or a service with such blocks was removed.
    pub(crate) fn count_hung_blocks<N: Nic>(&self, turn: &Turn<N>) {
        turn.counters.hung_blocks.set(self.iter().map(|share| share.hung_blocks).sum());
    }
}
