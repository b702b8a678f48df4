//! The dispatcher's view of a service share: which mqueues take how many requests.

use crate::base::arrival::ANY;
use crate::service::bundle::table::DESCRIPTOR_BYTES;
use crate::service::dispatch::{Credit, Dispatcher, Route};
use crate::service::mqueues::Load;
use crate::service::share::ServiceShare;

/// The dispatcher's view of a service share, without the dispatcher itself.
pub(crate) struct Credits<'a> {
    loads: &'a [Load],
    /// Requests in flight on the service share's mqueues, as far as they are known without reading each, and the
    /// number of mqueues that are alive.
    issued: u32,
    alive: u32,
    slots: u32,
    /// Bytes of the message to dispatch.
    len: usize,
    /// What the other workers still take; empty when a request may not be handed over again.
    other_credit: &'a [u32],
}

impl Credit for Credits<'_> {
    #[inline]
    fn count(&self) -> u32 {
        self.loads.len() as u32
    }

    #[inline(always)]
    fn credit(&self, mqueue: u32) -> Option<u32> {
        let load = &self.loads[mqueue as usize];
        if !load.alive {
            return None;
        }
        if load.late || load.is_full_for(self.len) {
            return Some(0);
        }
        Some(self.slots.saturating_sub(load.outstanding))
    }

    fn absent(&self, mqueue: u32) -> bool {
        self.loads[mqueue as usize].absent
    }

    #[inline]
    fn outstanding(&self, mqueue: u32) -> u32 {
        self.loads[mqueue as usize].outstanding
    }

    #[inline]
    fn share(&self) -> u32 {
        self.issued / self.alive.max(1) + 1
    }

    #[inline]
    fn is_exhausted(&self) -> bool {
        u64::from(self.issued) >= u64::from(self.alive) * u64::from(self.slots)
    }

    #[inline]
    fn other_with_most_credit(&self) -> Option<u32> {
        let others = self.other_credit.iter().enumerate().filter(|(_, credit)| **credit > 0);
        others.max_by_key(|(_, credit)| **credit).map(|(worker, _)| worker as u32)
    }
}

impl ServiceShare {
    /// Splits the service share into its dispatcher and the dispatcher's view.
    #[inline(always)]
    fn dispatch(&mut self, len: usize) -> (&mut Dispatcher, Credits<'_>) {
        let (loads, other_credit) = (&self.loads[..], &self.other_credit[..]);
        let (issued, alive) = (self.sessions.live() + self.unread, self.alive);
        let credits = Credits { loads, issued, alive, slots: self.slots, len, other_credit };
        (&mut self.dispatcher, credits)
    }

    /// See [`Dispatcher::continues_run`].
    #[inline(always)]
    pub(crate) fn continues_run(&mut self, len: usize) -> Option<u32> {
        let (dispatcher, credits) = self.dispatch(len);
        dispatcher.continues_run(&credits)
    }

    /// See [`Dispatcher::route_run`].
    pub(crate) fn route_run(&mut self, flow: u64, most: u32) -> Option<(u32, u32)> {
        let (dispatcher, credits) = self.dispatch(DESCRIPTOR_BYTES);
        dispatcher.route_run(flow, most, &credits)
    }

    /// The mqueue for a message of `len` bytes: `inspected` are its bytes if the dispatcher needs them, `flow` the
    /// hash of its flow, `target` that of [`Arrival::target`].
    pub(crate) fn route(
        &mut self,
        inspected: &[u8],
        len: usize,
        flow: u64,
        target: Option<u32>,
    ) -> Route {
        let (dispatcher, mut credits) = self.dispatch(len);
        match target {
            None => dispatcher.route(inspected, flow, &credits),
            Some(ANY) => {
                credits.other_credit = &[];
                dispatcher.route_here(&credits)
            }
            Some(mqueue) => dispatcher.check(mqueue, &credits),
        }
    }
}
