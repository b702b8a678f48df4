//! State that all workers of an engine share: who sleeps, who has credit, who has how many connections.
//!
//! Only the credit hints and the wake-up of a sleeping worker are on the message path, and only with several workers.

use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use mqueue::ParkWord;
use onpath::Peers;
use wire::session::{EndpointKind, ReplyTo};

use crate::base::peer_addresses::PeerAddresses;
use crate::base::tenants::Tenants;

/// See the module documentation.
pub struct Shared {
    workers: Box<[WorkerCell]>,
    /// Number of requests each worker still takes, by service: hints for hand-over.
    credit: Box<[AtomicU32]>,
    services: usize,
    /// Draining workers that have nothing outstanding.
    settled: AtomicUsize,
    /// Addresses of this machine.
    addresses: Mutex<Arc<[IpAddr]>>,
    tenants: Tenants,
}

struct WorkerCell {
    parked: ParkWord,
    wake: Box<dyn Fn() + Send + Sync>,
    connections: AtomicUsize,
    peers: PeerAddresses,
    /// Its thread has ended, possibly in a panic: it gets no more work.
    ended: AtomicBool,
}

impl WorkerCell {
    fn connections(&self) -> usize {
        self.connections.load(Ordering::Relaxed)
    }

    fn has_ended(&self) -> bool {
        self.ended.load(Ordering::Relaxed)
    }
}

impl Shared {
    /// `wakers[w]` ends the sleep of worker `w`. There are at most `services` slots of services.
    pub(crate) fn new(wakers: Vec<Box<dyn Fn() + Send + Sync>>, services: usize) -> Self {
        let credit = (0..wakers.len() * services).map(|_| AtomicU32::new(0)).collect();
        let cell = |wake| WorkerCell {
            parked: ParkWord::default(),
            wake,
            connections: AtomicUsize::new(0),
            peers: PeerAddresses::default(),
            ended: AtomicBool::new(false),
        };
        Self {
            tenants: Tenants::new(wakers.len()),
            workers: wakers.into_iter().map(cell).collect(),
            credit,
            services,
            settled: AtomicUsize::new(0),
            addresses: Mutex::default(),
        }
    }

    /// The tenants of the services.
    pub fn tenants(&self) -> &Tenants {
        &self.tenants
    }

    /// Ends a worker's sleep, without checking whether it sleeps.
    pub(crate) fn wake_always(&self, worker: u16) {
        (self.workers[usize::from(worker)].wake)();
    }

    /// Number of workers.
    pub fn workers(&self) -> usize {
        self.workers.len()
    }

    /// Maximum number of slots of services.
    pub fn services_max(&self) -> usize {
        self.services
    }

    /// A worker is about to sleep: from now on others wake it. It must check for work once more before it sleeps.
    pub(crate) fn set_asleep(&self, worker: u16) {
        self.workers[worker as usize].parked.set(true);
    }

    pub(crate) fn set_awake(&self, worker: u16) {
        self.workers[worker as usize].parked.set(false);
    }

    /// After publishing a message for a worker: ends its sleep if it sleeps.
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

    /// Publishes to the other workers how many requests a worker still takes for a service.
    pub(crate) fn publish_credit(&self, worker: u16, service: u16, credit: u32) {
        let cell = &self.credit[worker as usize * self.services + service as usize];
        if cell.load(Ordering::Relaxed) != credit {
            cell.store(credit, Ordering::Relaxed);
        }
    }

    /// The value that a worker last [published](Self::publish_credit).
    pub(crate) fn credit_of(&self, worker: usize, service: usize) -> u32 {
        self.credit[worker * self.services + service].load(Ordering::Relaxed)
    }

    /// A worker has ended: it shows no credit, and gets no connections. Its own ones no longer count.
    pub(crate) fn end_worker(&self, worker: u16) {
        self.workers[usize::from(worker)].ended.store(true, Ordering::Relaxed);
        (0..self.services).for_each(|service| self.publish_credit(worker, service as u16, 0));
    }

    /// Open connections of the whole engine, shared-memory clients among them.
    pub fn connections(&self) -> usize {
        self.workers.iter().filter(|w| !w.has_ended()).map(WorkerCell::connections).sum()
    }

    /// The worker with the fewest connections, `own` if it is one of them; the connection is counted.
    pub(crate) fn assign_connection(&self, own: u16) -> u16 {
        let serving = (0..self.workers()).filter(|w| !self.workers[*w].has_ended());
        let least = serving.min_by_key(|w| (self.workers[*w].connections(), *w != own as usize));
        let worker = least.unwrap_or(own as usize);
        self.workers[worker].connections.fetch_add(1, Ordering::Relaxed);
        worker as u16
    }

    /// The addresses of the clients that are connected to a worker, if it exists.
    pub(crate) fn addresses_of(&self, worker: u16) -> Option<&PeerAddresses> {
        self.workers.get(usize::from(worker)).map(|worker| &worker.peers)
    }

    /// A connection of `worker` ended.
    pub(crate) fn release_connection(&self, worker: u16) {
        self.workers[worker as usize].connections.fetch_sub(1, Ordering::Relaxed);
    }

    /// The worker that gets a new shared-memory client: the one with the fewest connections. The client is counted as
    /// a connection. It is posted as [`ShmAttached`](crate::ControlMessage::ShmAttached), or
    /// [released](Self::release_shm_client).
    pub fn assign_shm_client(&self) -> u16 {
        self.assign_connection(0)
    }

    /// A shared-memory client that was assigned to a worker will not attach.
    pub fn release_shm_client(&self, worker: u16) {
        self.release_connection(worker);
    }

    /// Sets the addresses of this machine. Workers read them at each [`Switch`](crate::Switch).
    pub fn set_local_addresses(&self, addresses: Vec<IpAddr>) {
        *self.addresses.lock().expect("no code panics while it holds this lock") = addresses.into();
    }

    /// The addresses last set with [`Self::set_local_addresses`].
    pub(crate) fn local_addresses(&self) -> Arc<[IpAddr]> {
        self.addresses.lock().expect("no code panics while it holds this lock").clone()
    }

    /// Sets whether a draining worker has answered everything.
    pub(crate) fn settle(&self, settled: bool) {
        if settled {
            self.settled.fetch_add(1, Ordering::Relaxed);
        } else {
            self.settled.fetch_sub(1, Ordering::Relaxed);
        }
    }

    /// Whether all draining workers have answered everything.
    pub fn all_settled(&self) -> bool {
        self.settled.load(Ordering::Relaxed) == self.workers()
    }
}

impl Peers for Shared {
    fn peer(&self, client: &ReplyTo) -> Option<SocketAddr> {
        if client.endpoint != EndpointKind::Tcp {
            return None;
        }
        self.addresses_of(client.worker)?.get(client.key, client.generation)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_ended_worker_gets_no_work() {
        let wakers = (0..2).map(|_| Box::new(|| ()) as Box<dyn Fn() + Send + Sync>).collect();
        let shared = Shared::new(wakers, 2);
        assert_eq!([shared.assign_connection(0), shared.assign_connection(0)], [0, 1]);
        (0..2).for_each(|service| shared.publish_credit(1, service, 9));
        shared.end_worker(1);
        assert_eq!((0..2).map(|service| shared.credit_of(1, service)).sum::<u32>(), 0);
        assert_eq!(shared.connections(), 1, "those of the ended worker are closed");
        assert_eq!([shared.assign_connection(0), shared.assign_shm_client()], [0, 0]);
    }
}
