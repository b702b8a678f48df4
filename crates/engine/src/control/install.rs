//! How services come to a worker, change and leave it, while the others keep serving.
//!
//! A service has a *slot*: the index of its service share, the same on every worker. What takes long happens before and on
//! another thread: a [`ServiceInstall`] brings the service share, its hand-over rings and its ports, all of it allocated and
//! open. Then the control side posts these [messages](crate::ControlMessage), each to every worker:
//!
//! | message | what a worker does |
//! |---|---|
//! | `Install` | takes the service share; starts blocks that run on its own core; new ports are not read yet |
//! | `Switch` | in one step: new ports are read, kept ones lead to the new service share, others are no longer read, replaced and removed service shares [leave](Leave) |
//! | `Expire` | drops what a leaving service share has not answered in time, as `drain_timeout` |
//! | `Release` | gives up the service share, which has nothing left |
//!
//! The start of an engine is the same, without services that leave. A step has been taken by every worker before the next one is
//! posted, so a request that is handed over always finds its service share. When every worker has voted
//! ([`DrainBarrier`]), nothing of the leaving service is in flight on any of them. A changed service is a new one in another
//! slot that takes over ports, and connections if framing, order and replies are the same; its counters stay.

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
    /// Accelerators for which the service is paused, and the drain time of their last generation, in nanoseconds.
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

    /// Its accelerators start when those of the service's former version have ended: requests that arrive before that are
    /// dropped as `reconfiguring`.
    pub fn set_reconfiguring(&mut self) {
        self.share.dispatcher.set_absent_reason(DropReason::Reconfiguring);
    }

    /// The service is paused from the switch until this accelerator's first generation starts. The last generation of the
    /// former version ends within `drain_ns`. See `control/pause.rs`.
    pub fn pause(&mut self, accelerator: u16, drain_ns: u64) {
        self.awaited.push((accelerator, drain_ns));
    }

    /// Adds an open port under an index that no other port has. `address` is where it listens.
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

/// What [`ControlMessage::Switch`](crate::ControlMessage::Switch) changes.
#[derive(Clone, Debug)]
pub struct Switch {
    /// Services that leave.
    pub leave: Vec<Leave>,
    /// Ports that stay and lead to the service in this slot from now on.
    pub lead: Vec<(PortIndex, u16)>,
    /// Ports that are no longer read; they are closed when their service is released.
    pub stop: Vec<PortIndex>,
    /// The new limits. Open connections keep their window; `connections` does not change.
    pub limits: Limits,
    /// What an idle worker does.
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
    /// The slot whose service takes over its connections. Without one they are closed after their replies.
    pub successor: Option<u16>,
    /// The slot whose service takes over its shared-memory clients; the regions must have the same layout.
    pub shm_successor: Option<u16>,
    /// Shared-memory clients, by id, that the successor does not take over, because their port is removed.
    pub departing: Vec<u64>,
    /// Where the workers vote that they have nothing left.
    pub barrier: DrainBarrier,
}

impl<N: Nic> Worker<N> {
    /// Takes a service share; see the module's text. With an error nothing has changed.
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
        // Other workers read it when they switch; the next housekeeping would publish it too late for the first requests.
        self.turn.publish_credit_of(slot.into());
        Ok(())
    }

    /// Issues the keys of the service share's streams and puts it into its slot.
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

    /// Changes everything in one step, so that no request finds half a service. See the module's text.
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
