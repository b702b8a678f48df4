//! The backends of all services of a worker, as an endpoint of it.

use std::ops::Range;
use std::sync::Arc;

use mqueue::Role;
use mqueue::abi::status;
use onpath::{Arranged, Chain, Link};
use wire::nic::{Close, Event, Nic};

use super::Backends;
use crate::admit::servers::Servers;
use crate::base::keys::StreamOwner;
use crate::base::metrics::ServiceCounters;
use crate::base::topology::{POLL_NS, Service};
use crate::base::turn::Turn;
use crate::endpoint::clients::Clients;
use crate::endpoint::{Endpoint, PerService, replace};
use crate::schedule::Schedule;
use crate::service::ends::{OtherEnds, ShareMqueue};
use crate::service::services::Services;
use crate::service::share::ServiceShare;

/// The backends of all services of a worker.
#[derive(Default)]
pub(crate) struct KernelBackends {
    /// Of services with backends.
    by_slot: Vec<Option<Box<Backends>>>,
}

impl KernelBackends {
    fn of(&mut self, service: usize) -> Option<&mut Backends> {
        self.by_slot.get_mut(service)?.as_deref_mut()
    }
}

impl PerService for KernelBackends {
    type Part = Option<Box<Backends>>;

    fn prepare(
        service: &Service,
        worker: u16,
        ends: &mut [OtherEnds],
        counters: &Arc<ServiceCounters>,
    ) -> Self::Part {
        Backends::new(worker, service, ends, counters)
    }

    fn set_path(part: &mut Self::Part, backend: u16, functions: &mut Vec<Arranged>) {
        if let Some(backends) = part {
            backends.arrange_path(backend, std::mem::take(functions));
        }
    }

    fn place<N: Nic>(
        &mut self,
        turn: &mut Turn<N>,
        service: u16,
        mut part: Self::Part,
    ) -> Self::Part {
        if let Some(backends) = &mut part {
            for (client, entry) in (0..).zip(&mut backends.clients) {
                entry.key = turn.stream_keys.issue(StreamOwner::Mqueue { service, client });
            }
            for (pool, entry) in (0..).zip(&mut backends.pools) {
                for (number, connection) in (0..).zip(&mut entry.connections) {
                    let owner = StreamOwner::Backend { service, pool, number };
                    connection.key = turn.stream_keys.issue(owner);
                }
            }
        }
        replace(&mut self.by_slot, service, part)
    }

    fn remove<N: Nic>(&mut self, turn: &mut Turn<N>, service: u16) -> Self::Part {
        let part = replace(&mut self.by_slot, service, None);
        for key in part.iter().flat_map(|backends| backends.keys()) {
            turn.nic.close(key, Close::Reset);
            turn.stream_keys.free(key);
        }
        part
    }
}

impl<N: Nic> Servers<N> for KernelBackends {}

impl<N: Nic> Endpoint<N> for KernelBackends {
    fn replace_rings(&mut self, service: usize, ends: &mut [OtherEnds]) {
        if let Some(backends) = self.of(service) {
            backends.replace_rings(ends);
        }
    }

    fn event(&mut self, turn: &mut Turn<N>, event: Event, owner: StreamOwner) {
        match owner {
            StreamOwner::Backend { service, pool, number } => {
                if let Some(backends) = self.of(service.into()) {
                    backends.stream_event(turn, event, (pool.into(), number.into()));
                }
            }
            StreamOwner::Mqueue { service, client } => {
                if let Some(backends) = self.of(service.into()) {
                    backends.datagram_event(turn, event, client);
                }
            }
            _ => {}
        }
    }

    /// Publishes answers.
    fn before_drive(&mut self, _: &mut Turn<N>, services: &mut Services, _: &mut Schedule) {
        for (backends, share) in self.by_slot.iter_mut().zip(&mut services[..]) {
            if let Some(backends) = backends.as_deref_mut().filter(|backends| backends.has_rung()) {
                backends.publish(|server, region_mqueue| share.ring(server, region_mqueue));
            }
        }
    }

    /// Takes the requests that were left in their rings in the last turn.
    fn gather(&mut self, turn: &mut Turn<N>, services: &mut Services, service: usize) {
        let Some(backends) = self.of(service) else { return };
        backends.take_blocked();
        backends.show_first_requests(turn, &services[service]);
        for index in 0..backends.retried.len() {
            backends.take_requests(turn, backends.retried[index]);
        }
    }

    fn take(
        &mut self,
        turn: &mut Turn<N>,
        _: &mut Services,
        service: usize,
        (role, block): (Role, u32),
    ) {
        if let Some(backends) = self.of(service)
            && let Some(client) = backends.client_of(role, block)
        {
            backends.take_requests(turn, client);
        }
    }

    /// Writes the pending output of connections.
    fn flush(&mut self, turn: &mut Turn<N>, _: &mut Services, _: &mut impl Servers<N>, _: bool) {
        for backends in self.by_slot.iter_mut().flatten() {
            backends.flush_backends(&mut turn.nic, turn.now_ns);
        }
    }

    fn expire(&mut self, turn: &mut Turn<N>, _: &mut Services, _: &mut Clients, service: usize) {
        if let Some(backends) = self.of(service) {
            backends.expire_backends(&mut turn.nic, turn.now_ns);
        }
    }

    fn end_blocks(&mut self, turn: &mut Turn<N>, service: usize, blocks: Range<u32>, _: bool) {
        if let Some(backends) = self.of(service) {
            let clients = backends.clients_of(&blocks);
            backends.drop_backend_requests(&mut turn.nic, clients);
        }
    }

    fn note_corrupt(&mut self, share: &mut ServiceShare, service: usize) {
        if let Some(backends) = self.of(service) {
            for server in backends.take_corrupt() {
                share.mqueues[server as usize].tx_corrupt = true;
            }
        }
    }

    fn arrange_path(
        &mut self,
        service: usize,
        backend: u16,
        order: &mut Vec<Arranged>,
    ) -> Vec<Link> {
        self.of(service)
            .map_or_else(Vec::new, |backends| backends.arrange_path(backend, std::mem::take(order)))
    }

    fn chain_of(&mut self, service: usize, backend: u16) -> Option<&mut Chain> {
        self.of(service)?.chain_of(backend)
    }

    fn take_function_ns(&mut self, service: usize) -> u64 {
        self.of(service).map_or(0, Backends::take_function_ns)
    }

    fn asks(&self, share: &ServiceShare, service: usize) -> bool {
        let backends = self.by_slot.get(service).and_then(Option::as_ref);
        backends.is_some_and(|of| of.waits(|server| share.loads[server as usize].alive))
    }

    fn wake_at(&self, now_ns: u64, services: &Services) -> u64 {
        let of = self.by_slot.iter().zip(&services[..]).filter_map(|(backends, share)| {
            let backends = backends.as_deref()?;
            // A block on another thread may send a request when none is in flight.
            Some(match backends.has_work() {
                true => 0,
                false if backends.is_busy() || share.runs_off_thread() => now_ns + POLL_NS,
                false => u64::MAX,
            })
        });
        of.min().unwrap_or(u64::MAX)
    }
}

impl Backends {
    /// An event of a TCP connection.
    fn stream_event<N: Nic>(
        &mut self,
        turn: &mut Turn<N>,
        event: Event,
        (pool, number): (usize, usize),
    ) {
        let Turn { nic, now_ns, clock, scratch, worked, .. } = turn;
        let clock_ns = || clock.as_ref().map_or(*now_ns, |clock| clock());
        match event {
            Event::Readable(_) => {
                let time = (*now_ns, &clock_ns as &dyn Fn() -> u64);
                self.read_backend(nic, pool, number, time, scratch);
                *worked = true;
            }
            Event::Writable(_) => self.backend_writable(pool, number),
            _ => self.fail_backend(nic, pool, number, status::CLOSED, *now_ns),
        }
    }

    /// An event of a client mqueue's UDP socket.
    fn datagram_event<N: Nic>(&mut self, turn: &mut Turn<N>, event: Event, client: u32) {
        let Turn { nic, now_ns, clock, scratch, worked, .. } = turn;
        let clock_ns = || clock.as_ref().map_or(*now_ns, |clock| clock());
        match event {
            Event::Readable(_) => {
                self.read_datagram_backend(nic, client, &clock_ns, scratch);
                *worked = true;
            }
            Event::Writable(_) => {}
            _ => self.fail_datagram_backend(nic, client),
        }
    }

    /// Shows the first request of each client mqueue to the functions of its backend, all at a time.
    fn show_first_requests<N: Nic>(&mut self, turn: &Turn<N>, share: &ServiceShare) {
        if !self.has_paths() {
            return;
        }
        let clock_ns = || turn.clock_ns();
        for index in 0..self.retried.len() {
            self.gather_request(self.retried[index], &clock_ns);
        }
        for drive in 0..share.accelerators.len() {
            for index in 0..share.accelerators[drive].tx_pending.len() {
                if let ShareMqueue::Other(role, block) = share.tx_pending(drive, index)
                    && let Some(client) = self.client_of(role, block)
                {
                    self.gather_request(client, &clock_ns);
                }
            }
        }
        self.show_gathered(&clock_ns);
    }

    fn take_requests<N: Nic>(&mut self, turn: &mut Turn<N>, client: u32) {
        let Turn { nic, now_ns, clock, scratch, .. } = turn;
        let clock_ns = || clock.as_ref().map_or(*now_ns, |clock| clock());
        self.take_backend_requests(nic, client, (*now_ns, &clock_ns), scratch);
    }
}
