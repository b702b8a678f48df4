//! What all workers of an engine share: who sleeps, who has credit, who gets a new connection, and each worker's mailbox.
//!
//! Only the credit hints and the wake-up of a sleeping worker are on the way of a message, and only with several workers.

use std::net::IpAddr;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use mqueue::ParkWord;

use crate::control::mailbox::Mailbox;

/// See the module's text. `M` is what the mailboxes carry: [`ControlMessage`](crate::ControlMessage).
pub struct Fabric<M> {
    workers: Box<[WorkerCell<M>]>,
    /// Requests each worker still takes, by service: hints for hand-over.
    credit: Box<[AtomicU32]>,
    services: usize,
    /// Draining workers that have nothing outstanding.
    settled: AtomicUsize,
    /// Of this machine.
    addresses: Mutex<Arc<[IpAddr]>>,
}

struct WorkerCell<M> {
    parked: ParkWord,
    wake: Box<dyn Fn() + Send + Sync>,
    connections: AtomicUsize,
    mailbox: Mailbox<M>,
}

impl<M> Fabric<M> {
    /// `wakers[w]` ends the sleep of worker `w`. There are never more than `services` slots of services.
    pub fn new(wakers: Vec<Box<dyn Fn() + Send + Sync>>, services: usize) -> Arc<Self> {
        let credit = (0..wakers.len() * services).map(|_| AtomicU32::new(0)).collect();
        let cell = |wake| WorkerCell {
            parked: ParkWord::default(),
            wake,
            connections: AtomicUsize::new(0),
            mailbox: Mailbox::default(),
        };
        let workers = wakers.into_iter().map(cell).collect();
        Arc::new(Self {
            workers,
            credit,
            services,
            settled: AtomicUsize::new(0),
            addresses: Mutex::default(),
        })
    }

    /// Number of workers.
    pub fn workers(&self) -> usize {
        self.workers.len()
    }

    /// How many slots of services there can be.
    pub fn services_max(&self) -> usize {
        self.services
    }

    /// Posts a message to a worker, and wakes it. A worker that has ended drops it: its sender learns that from the
    /// message's reply channel, which closes.
    pub fn post(&self, worker: u16, message: M) {
        let cell = &self.workers[usize::from(worker)];
        cell.mailbox.post(message);
        (cell.wake)();
    }

    /// Posts a message of its own to every worker.
    pub fn post_to_all(&self, mut message: impl FnMut(usize) -> M) {
        for worker in 0..self.workers() {
            self.post(worker as u16, message(worker));
        }
    }

    /// Posts a message from one worker to another, which is woken only if it sleeps.
    pub(crate) fn post_from_worker(&self, to: u16, message: M) {
        self.workers[usize::from(to)].mailbox.post(message);
        self.wake(to);
    }

    /// The mailbox of a worker.
    #[inline]
    pub(crate) fn mailbox(&self, worker: u16) -> &Mailbox<M> {
        &self.workers[usize::from(worker)].mailbox
    }

    /// A worker is about to sleep: from here on others wake it. It must look for work once more
    /// before it sleeps.
    pub(crate) fn fall_asleep(&self, worker: u16) {
        self.workers[worker as usize].parked.set(true);
    }

    pub(crate) fn awake(&self, worker: u16) {
        self.workers[worker as usize].parked.set(false);
    }

    /// After publishing something for a worker: ends its sleep if it sleeps.
    pub(crate) fn wake(&self, worker: u16) {
        let cell = &self.workers[worker as usize];
        if cell.parked.sleeps() && !mutants::on("miss_wakeup") {
            (cell.wake)();
        }
    }

    /// Ends every worker's sleep.
    pub fn wake_all(&self) {
        for cell in &self.workers {
            (cell.wake)();
        }
    }

    /// Shows the other workers how many requests a worker still takes for a service.
    pub(crate) fn publish_credit(&self, worker: u16, service: u16, credit: u32) {
        let cell = &self.credit[worker as usize * self.services + service as usize];
        if cell.load(Ordering::Relaxed) != credit {
            cell.store(credit, Ordering::Relaxed);
        }
    }

    /// What a worker last [published](Self::publish_credit).
    pub(crate) fn credit_of(&self, worker: usize, service: usize) -> u32 {
        self.credit[worker * self.services + service].load(Ordering::Relaxed)
    }

    /// Open connections of the whole engine, shared-memory clients among them.
    pub fn connections(&self) -> usize {
        self.workers.iter().map(|s| s.connections.load(Ordering::Relaxed)).sum()
    }

    /// The worker with the fewest connections, `own` if it is among them; the connection is counted.
    pub(crate) fn assign_connection(&self, own: u16) -> u16 {
        let count = |w: usize| self.workers[w].connections.load(Ordering::Relaxed);
        let least = (0..self.workers()).min_by_key(|w| (count(*w), *w != own as usize));
        let worker = least.unwrap_or(own as usize);
        self.workers[worker].connections.fetch_add(1, Ordering::Relaxed);
        worker as u16
    }

    /// A connection of `worker` ended.
    pub(crate) fn release_connection(&self, worker: u16) {
        self.workers[worker as usize].connections.fetch_sub(1, Ordering::Relaxed);
    }

    /// The worker that gets a new shared-memory client: the one with the fewest connections. The client is counted as
    /// one. It is posted as [`ShmAttached`](crate::ControlMessage::ShmAttached), or [released](Self::release_shm_client).
    pub fn assign_shm_client(&self) -> u16 {
        self.assign_connection(0)
    }

    /// A shared-memory client that was assigned to a worker does not come.
    pub fn release_shm_client(&self, worker: u16) {
        self.release_connection(worker);
    }

    /// Sets the addresses of this machine. Workers read them at each [`Switch`](crate::Switch).
    pub fn set_local_addresses(&self, addresses: Vec<IpAddr>) {
        *self.addresses.lock().expect("no code panics while it holds this lock") = addresses.into();
    }

    /// What was last set with [`Self::set_local_addresses`].
    pub(crate) fn local_addresses(&self) -> Arc<[IpAddr]> {
        self.addresses.lock().expect("no code panics while it holds this lock").clone()
    }

    /// A draining worker has (`true`) or no longer has nothing left to answer.
    pub(crate) fn settle(&self, settled: bool) {
        if settled {
            self.settled.fetch_add(1, Ordering::Relaxed);
        } else {
            self.settled.fetch_sub(1, Ordering::Relaxed);
        }
    }

    /// Whether every draining worker has nothing left to answer.
    pub fn all_settled(&self) -> bool {
        self.settled.load(Ordering::Relaxed) == self.workers()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sleeper_is_woken_and_nobody_else() {
        let woken = Arc::new(AtomicUsize::new(0));
        let waker = |by: usize| {
            let woken = woken.clone();
            Box::new(move || _ = woken.fetch_add(by, Ordering::Relaxed)) as Box<_>
        };
        let fabric: Arc<Fabric<()>> = Fabric::new(vec![waker(1), waker(100)], 1);
        fabric.fall_asleep(1);
        fabric.wake(0);
        assert_eq!(woken.load(Ordering::Relaxed), 0, "it is awake");
        fabric.wake(1);
        assert_eq!(woken.load(Ordering::Relaxed), 100);
        fabric.post_from_worker(1, ());
        assert_eq!(woken.load(Ordering::Relaxed), 200, "a connection is news too");
        fabric.awake(1);
        fabric.wake(1);
        assert_eq!(woken.load(Ordering::Relaxed), 200, "it looks before it sleeps again");
    }
}
