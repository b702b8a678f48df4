//! How services come to a worker, change and leave it, while the others go on.
//!
//! A service has a *slot*: the place of its service share, the same on every worker. What takes long is done
//! elsewhere and before: a [`ServiceInstall`] brings the service share, its hand-over rings and its ports, all of it
//! allocated and open. The control side then takes these steps, each between two turns of every worker:
//!
//! | step | what a worker does |
//! |---|---|
//! | [`Worker::seat`] | takes the service share; starts blocks that run on its own core; new ports are not read yet |
//! | [`Worker::switch`] | at once: new ports are read, kept ones lead to the new service share, old ones are no longer read, old service shares [leave](Leave) |
//! | [`Worker::expire`] | what a leaving service share has not answered in time is dropped as `drain_timeout` |
//! | [`Worker::release`] | lets go of the service share, which has nothing left |
//!
//! A step is taken on every worker before the next one begins, so a request that is handed over always
//! finds the service share it is for. When every worker has settled, and that can only be seen in one place
//! ([`DrainBarrier`]), nothing of the leaving service is under way anywhere. A changed service is a new one in
//! another slot that takes over ports, and connections if they understand each other; its counters stay.

use std::net::SocketAddr;

use wire::DropReason;
use wire::nic::{Nic, PortIndex, Transport};

use crate::accelerator::StartError;
use crate::control::drain::{DrainBarrier, DrainVote, Leaving};
use crate::endpoint::peer::links::{ENVELOPE_BYTES, ServiceLinks, links};
use crate::endpoint::port::Port;
use crate::endpoint::set::NewPort;
use crate::endpoint::stream_keys::StreamOwner;
use crate::metrics::ServiceMetrics;
use crate::service::ends::Attachment;
use crate::service::share::ServiceShare;
use crate::topology::{Limits, Polling, Service};
use crate::worker::Worker;

/// One worker's share of a service that comes; see the module's text.
pub struct ServiceInstall<P> {
    slot: u16,
    share: ServiceShare,
    links: ServiceLinks,
    ports: Vec<(PortIndex, NewPort, P)>,
    scratch: Vec<u8>,
    /// Accelerators that are waited for, and how long those of the former version may take to end, in nanoseconds.
    awaited: Vec<(u16, u64)>,
}

impl<P> ServiceInstall<P> {
    /// The shares of all workers, in order, in `slot`. `attachments` are theirs; their blocks start when
    /// the worker installs the share. Ports follow with [`Self::add_port`].
    pub fn for_workers(
        slot: u16,
        service: &Service,
        metrics: &ServiceMetrics,
        attachments: Vec<Vec<Attachment>>,
    ) -> Vec<Self> {
        let workers = attachments.len();
        let parts = attachments.into_iter().zip(links(workers, service)).enumerate();
        let install = |(worker, (attachments, links))| Self {
            slot,
            share: ServiceShare::new(
                service,
                worker as u32,
                workers as u32,
                attachments,
                metrics.of_worker(worker),
            ),
            links,
            ports: Vec::new(),
            scratch: vec![0; scratch_bytes([service])],
            awaited: Vec::new(),
        };
        parts.map(install).collect()
    }

    /// Its accelerators come when those of the service's former version are gone: what arrives before that is
    /// dropped as `reconfiguring`.
    pub fn set_reconfiguring(&mut self) {
        self.share.dispatcher.set_absent_reason(DropReason::Reconfiguring);
    }

    /// The service is paused from the switch until this accelerator's first generation begins: that of the former version ends
    /// within `drain_ns`. See `control/pause.rs`.
    pub fn pause(&mut self, accelerator: u16, drain_ns: u64) {
        self.awaited.push((accelerator, drain_ns));
    }

    /// Brings an open port, which gets an index that no other port has. `address` is where it listens.
    pub fn add_port(
        &mut self,
        index: PortIndex,
        (transport, address): (Transport, SocketAddr),
        limits: &Limits,
        port: P,
    ) {
        let entry = NewPort::new(Port::new_paused(self.slot, transport, address), limits);
        self.ports.push((index, entry, port));
    }
}

/// What [`Worker::switch`] changes.
#[derive(Clone, Debug)]
pub struct Switch {
    /// Services that leave.
    pub leave: Vec<Leave>,
    /// Ports that stay and lead to the service in this slot from now on.
    pub lead: Vec<(PortIndex, u16)>,
    /// Ports that are no longer read; they go when their service is released.
    pub stop: Vec<PortIndex>,
    /// Limits from now on. Connections that are open keep their window; the number of connections
    /// stays what it is.
    pub limits: Limits,
    /// What a worker without work does from now on.
    pub polling: Polling,
}

impl Switch {
    /// Nothing leaves and no port leads elsewhere.
    pub fn new(limits: Limits, polling: Polling) -> Self {
        Self { leave: Vec::new(), lead: Vec::new(), stop: Vec::new(), limits, polling }
    }
}

/// A service that leaves.
#[derive(Clone, Debug)]
pub struct Leave {
    /// Its slot.
    pub slot: u16,
    /// The slot whose service takes over the connections of its clients, which notice nothing. Without
    /// one they are closed after their replies.
    pub successor: Option<u16>,
    /// The same for its shared-memory clients, whose regions must be as the successor's service wants them.
    pub shm_successor: Option<u16>,
    /// Shared-memory clients, by their ids, that the successor does not take over: their port goes.
    pub departing: Vec<u64>,
    /// Where the workers tell that they have settled.
    pub barrier: DrainBarrier,
}

impl<N: Nic> Worker<N> {
    /// Takes a service's share; see the module's text. With an error nothing has changed.
    pub(crate) fn install(&mut self, install: ServiceInstall<N::Port>) -> Result<(), StartError> {
        let ServiceInstall { slot, mut share, links, ports, scratch, awaited } = install;
        for drive in &mut share.accelerators {
            drive.blocks.start()?;
        }
        let Self { turn, endpoints, .. } = self;
        let mut taken = Vec::new();
        for (index, entry, port) in ports {
            if let Err(error) = turn.nic.add_port(index, port) {
                taken.into_iter().for_each(|(index, _)| turn.nic.close_port(index));
                return Err(error.into());
            }
            taken.push((index, entry));
        }
        for (index, entry) in taken {
            endpoints.place_port(index, entry);
        }
        endpoints.udp.refresh_sources(turn);
        if turn.scratch.len() < scratch.len() {
            turn.outbound.reserve(scratch.len());
            turn.scratch = scratch;
        }
        self.place(slot.into(), share, links);
        for (accelerator, drain_ns) in awaited {
            self.pause_from_switch(slot.into(), accelerator, drain_ns);
        }
        // The others look when they switch: what the next housekeeping tells would come too late for the first requests.
        self.turn.publish_credit_of(slot.into());
        Ok(())
    }

    /// Names the service share's streams and puts it into its slot.
    fn place(&mut self, slot: usize, mut share: ServiceShare, links: ServiceLinks) {
        let Self { turn, endpoints, schedule, stream_keys, .. } = self;
        let service = slot as u16;
        for (client, entry) in share.clients.iter_mut().enumerate() {
            let client = client as u32;
            entry.key = stream_keys.issue(StreamOwner::Mqueue { service, client });
        }
        for (pool, entry) in share.backends.iter_mut().enumerate() {
            for (number, connection) in entry.connections.iter_mut().enumerate() {
                let (pool, number) = (pool as u16, number as u16);
                connection.key = stream_keys.issue(StreamOwner::Backend { service, pool, number });
            }
        }
        for (worker, link) in links.0.into_iter().enumerate() {
            let (link_in, link_out) = link.unzip();
            endpoints.peers.replace(worker, slot, link_in);
            turn.outbound.replace(worker, slot, link_out);
        }
        endpoints.tcp.make_room_for_service(slot);
        schedule.place(slot, &share.tenant);
        while turn.services.len() <= slot {
            turn.services.push(ServiceShare::vacant(turn.fabric.workers()));
        }
        turn.services[slot] = share;
    }

    /// Everything at once, so that no request meets a service that is half there. See the module's text.
    pub(crate) fn switch(&mut self, switch: &Switch) {
        for leave in &switch.leave {
            self.end_pauses(leave.slot.into(), None);
        }
        let Self { turn, endpoints, idle, .. } = self;
        endpoints.udp.refresh_sources(turn);
        turn.read_credit();
        idle.set_polling(switch.polling);
        endpoints.set_limits(&switch.limits);
        for (_, port) in endpoints.ports_mut() {
            port.switch_on(turn);
        }
        for index in &switch.stop {
            if let Some(port) = endpoints.port_mut(*index) {
                port.stop(turn, usize::from(*index));
            }
        }
        for (index, slot) in &switch.lead {
            if let Some(port) = endpoints.port_mut(*index) {
                port.service = *slot;
            }
        }
        for Leave { slot, successor, shm_successor, departing, barrier } in &switch.leave {
            let vote = DrainVote::new(barrier.clone());
            turn.services[usize::from(*slot)].leaving = Some(Leaving { vote, expired: false });
            if let Some(successor) = successor {
                endpoints.tcp.move_to(*slot, *successor);
            }
            if let Some(successor) = shm_successor {
                endpoints.shm.move_to(*slot, *successor, departing);
            }
            endpoints.leave(turn, Some(*slot));
        }
        (0..self.turn.services.len()).for_each(|slot| self.begin_pauses(slot));
        self.turn.busy();
    }
}

/// Scratch space: one read, one datagram, one message of any ring.
pub(crate) fn scratch_bytes<'a>(services: impl IntoIterator<Item = &'a Service>) -> usize {
    let of_service = |s: &Service| {
        let backends = s.backends.iter().map(|b| b.max_message_bytes).max().unwrap_or(0);
        s.max_message_bytes.max(s.max_reply_bytes).max(backends)
    };
    let longest = services.into_iter().map(of_service).max().unwrap_or(0) as usize;
    (longest + ENVELOPE_BYTES).max(wire::nic::UDP_PAYLOAD_MAX).max(256 << 10)
}
