//! Connects the workers of an engine: their [shared state](Shared), and each worker's mailbox.

use std::net::SocketAddr;
use std::ops::Deref;
use std::sync::Arc;

use wire::nic::PortIndex;

use crate::base::mailbox::Mailbox;
use crate::base::shared::Shared;

/// See the module documentation. `M` is the type of the mailboxes' messages:
/// [`ControlMessage`](crate::ControlMessage).
pub struct Fabric<M> {
    shared: Arc<Shared>,
    mailboxes: Box<[Mailbox<M>]>,
}

/// An accepted connection in flight to its worker.
pub struct Accepted<S> {
    pub(crate) port: PortIndex,
    pub(crate) socket: S,
    pub(crate) peer: SocketAddr,
}

impl<M> Deref for Fabric<M> {
    type Target = Shared;

    fn deref(&self) -> &Shared {
        &self.shared
    }
}

impl<M> Fabric<M> {
    /// `wakers[w]` ends the sleep of worker `w`. There are at most `services` slots of services.
    pub fn new(wakers: Vec<Box<dyn Fn() + Send + Sync>>, services: usize) -> Arc<Self> {
        let mailboxes = wakers.iter().map(|_| Mailbox::default()).collect();
        Arc::new(Self { shared: Arc::new(Shared::new(wakers, services)), mailboxes })
    }

    /// The state that the workers share.
    pub(crate) fn shared(&self) -> &Arc<Shared> {
        &self.shared
    }

    /// Posts a message to a worker, and wakes it. A worker that has ended drops the message: its sender notices that
    /// the message's reply channel closes.
    pub fn post(&self, worker: u16, message: M) {
        self.mailbox(worker).post(message);
        self.shared.wake_always(worker);
    }

    /// Posts one message to every worker; `message` creates each.
    pub fn post_to_all(&self, mut message: impl FnMut(usize) -> M) {
        for worker in 0..self.workers() {
            self.post(worker as u16, message(worker));
        }
    }

    /// Posts a message from one worker to another, which is woken only if it sleeps.
    pub(crate) fn post_from_worker(&self, to: u16, message: M) {
        self.mailbox(to).post(message);
        self.shared.wake(to);
    }

    /// The mailbox of a worker.
    #[inline]
    pub(crate) fn mailbox(&self, worker: u16) -> &Mailbox<M> {
        &self.mailboxes[usize::from(worker)]
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    #[test]
    fn only_a_sleeping_worker_is_woken() {
        let woken = Arc::new(AtomicUsize::new(0));
        let waker = |by: usize| {
            let woken = woken.clone();
            Box::new(move || _ = woken.fetch_add(by, Ordering::Relaxed)) as Box<_>
        };
        let fabric: Arc<Fabric<()>> = Fabric::new(vec![waker(1), waker(100)], 1);
        fabric.set_asleep(1);
        fabric.wake(0);
        assert_eq!(woken.load(Ordering::Relaxed), 0, "it is awake");
        fabric.wake(1);
        assert_eq!(woken.load(Ordering::Relaxed), 100);
        fabric.post_from_worker(1, ());
        assert_eq!(woken.load(Ordering::Relaxed), 200, "a connection wakes it too");
        fabric.set_awake(1);
        fabric.wake(1);
        assert_eq!(woken.load(Ordering::Relaxed), 200, "it checks before it sleeps again");
    }
}
