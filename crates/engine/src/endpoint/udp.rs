//! UDP ports: datagrams in, a batch from every port with some, and replies out, a batch for every port.
//!
//! Replies to clients with more requests in flight may wait for a while, so that more of them are sent as one GSO
//! batch.

mod answers;
mod bundles;

use std::net::{IpAddr, SocketAddr};

use wire::DropReason;
use wire::admission::{flow_hash, reply_allowed};
use wire::framing::Expects;
use wire::framing::memcached::is_request;
use wire::nic::{
    Datagram, Nic, PortIndex, RxBatch, Train, Transport, TxBatch, TxItem, UDP_PAYLOAD_MAX,
};
use wire::session::{Origin, Token};

use crate::admit::servers::Servers;
use crate::admit::{Admitted, Batch, Waits};
use crate::base::arrival::Arrival;
use crate::base::topology::Limits;
use crate::base::turn::Turn;
use crate::depart::run::{Next, Run};
use crate::endpoint::Endpoint;
use crate::endpoint::port::Port;
use crate::endpoint::sources::{Sources, lowest_source};
use crate::schedule::{Kind, Schedule};
use crate::service::bundle::messages::Datagrams;
use crate::service::bundle::received::Expected;
use crate::service::bundle::table::NoBundle;
use crate::service::chain::{Hooks, NoHooks};
use crate::service::services::Services;

/// Maximum number of items and bytes that wait for one `send`.
const TX_ITEMS: usize = 1024;
const TX_BYTES: usize = 1 << 20;
/// Datagrams that a chain is shown together at most: what is kept of them until they are answered stays in the processor's cache.
const SHOWN_MAX: usize = 256;
/// If the socket of a UDP port takes nothing for this long, the waiting replies are dropped.
const SEND_TIMEOUT_NS: u64 = 100_000_000;

/// Number of waiting replies from which replies may be deferred, and the maximum time; see [`UdpPort::may_defer`].
const DEFER_FROM: usize = 32;
const DEFER_NS: u64 = 200_000;
/// If fewer than this many deferrable replies were added behind the deferred ones, the GSO batches do not get longer.
const DEFER_MORE: usize = 16;

/// Whether `send` would send nothing: the first `kept` of the waiting items are deferred, and all replies behind
/// them may be deferred as well. Then GSO batches need not be built again.
fn nothing_to_send(waiting: &[TxItem], kept: usize) -> bool {
    let datagrams = |new: &[TxItem]| new.iter().map(|d| usize::from(d.count)).sum::<usize>();
    let stays = |new: &[TxItem]| datagrams(new) < DEFER_MORE && new.iter().all(|d| d.more);
    kept > 0 && waiting.get(kept..).is_some_and(stays)
}

/// A bundle from whose buffer replies leave.
#[derive(Debug)]
pub(super) struct Leaving {
    service: u16,
    mqueue: u32,
    token: Token,
}

/// One UDP port.
pub(crate) struct UdpPort {
    port: Port,
    /// Largest reply / request ratio; 0 unlimited.
    reply_ratio: u32,
    /// Datagrams from lower source ports are dropped.
    lowest_source: u16,
    tx: TxBatch,
    /// Time since which the host kernel takes no datagram; 0 when it does.
    full_since_ns: u64,
    /// Time since which replies are deferred; 0 when none is.
    kept_since_ns: u64,
    /// Number of deferred items after the last send: they are the first in `tx`.
    kept: usize,
    /// Bundles from whose buffers replies leave in place.
    leaving: Vec<Leaving>,
    /// The last turn in which the host kernel had no room: no further send is tried in that turn.
    refused_in: u64,
    /// While tenants share the worker.
    window: Window,
}

/// How many receive buffers a port should fill at a time so that they have a given number of datagrams: with GRO a buffer has up to a
/// hundred, and a batch of them would be a long wait for other tenants.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Window {
    buffers: u32,
}

impl Window {
    const FIRST: Self = Self { buffers: 1 };

    /// After a batch of `datagrams`, where `most` were wanted at most.
    fn adapt(&mut self, datagrams: usize, most: u32) {
        let (datagrams, most) = (datagrams as u64, u64::from(most));
        let buffers = u64::from(self.buffers);
        let next = if datagrams > most {
            buffers * most / datagrams
        } else if datagrams >= buffers && 2 * datagrams <= most {
            // As many datagrams in each buffer again.
            2 * buffers
        } else {
            buffers
        };
        self.buffers = next.clamp(1, most.max(1)) as u32;
    }
}

impl UdpPort {
    pub(crate) fn new(port: Port, limits: &Limits) -> Self {
        let (items, bytes) = if port.is_vacant() { (0, 0) } else { (TX_ITEMS, TX_BYTES) };
        Self {
            reply_ratio: reply_ratio(limits, port.on_loopback()),
            lowest_source: lowest_source(limits, port.on_loopback()),
            port,
            tx: TxBatch::new(items, bytes),
            full_since_ns: 0,
            kept_since_ns: 0,
            kept: 0,
            leaving: Vec::with_capacity(items),
            refused_in: u64::MAX,
            window: Window::FIRST,
        }
    }

    /// A vacant place, or the place of another kind of port.
    fn vacant() -> Self {
        Self::new(Port::vacant(Transport::Udp), &Limits::default())
    }

    /// Whether replies to clients with more requests in flight may be deferred: many replies wait, and the worker has
    /// work, so the next turn starts at once and may bring more. They are sent by the first turn that finds nothing
    /// to do, or that ends [`DEFER_NS`] after the first of them was deferred, or begins a drain.
    fn may_defer<N: Nic>(&self, turn: &Turn<N>) -> bool {
        if !turn.worked || turn.draining || self.tx.waiting_datagrams() < DEFER_FROM {
            return false;
        }
        // Without deferred replies, all of them became ready in this turn. The clock is read, since this turn and the
        // next one may be long.
        let since_ns = if self.kept_since_ns == 0 { turn.now_ns } else { self.kept_since_ns };
        let recent = turn.clock_ns().saturating_sub(since_ns) < DEFER_NS;
        recent || mutants::on("keep_for_ever")
    }

    fn send<N: Nic>(
        &mut self,
        turn: &mut Turn<N>,
        services: &mut Services,
        index: PortIndex,
        may_defer: bool,
    ) {
        let (now_ns, number) = (turn.now_ns, turn.counters.turns.value());
        if self.refused_in == number {
            return;
        }
        let by = index + u16::from(mutants::on("answer_from_another_port"));
        self.tx.set_may_defer(may_defer);
        let outcome = turn.nic.send(by, &mut self.tx);
        self.end_loans(services);
        let unsent = self.tx.waiting().len() - outcome.kept;
        self.kept = if unsent == 0 { outcome.kept } else { 0 };
        if unsent > 0 {
            self.refused_in = number;
        }
        if self.tx.is_empty() {
            self.kept_since_ns = 0;
        } else if outcome.kept > 0 && self.kept_since_ns == 0 {
            self.kept_since_ns = now_ns.max(1);
        }
        let share = &services[usize::from(self.port.service)];
        share.count_replied(outcome.sent as u64);
        share.count_lost(DropReason::SendFailed, outcome.refused as u64);
        if self.tx.is_empty() || outcome.sent > 0 {
            self.full_since_ns = 0;
        } else if unsent == 0 {
            // Nothing was tried.
        } else if self.full_since_ns == 0 {
            self.full_since_ns = now_ns.max(1);
        } else if now_ns - self.full_since_ns > SEND_TIMEOUT_NS {
            share.count_lost(DropReason::SendFailed, self.drop_waiting());
            self.full_since_ns = 0;
        }
    }

    /// Makes room for a reply that cannot be appended to the batch.
    #[inline(never)]
    fn make_room<N: Nic>(
        &mut self,
        turn: &mut Turn<N>,
        services: &mut Services,
        index: PortIndex,
        request_len: u32,
        len: usize,
    ) -> NoRoom {
        if len > UDP_PAYLOAD_MAX {
            return NoRoom::Never(DropReason::ReplyTooLong);
        }
        if !reply_allowed(request_len as usize, len, self.reply_ratio) {
            return NoRoom::Never(DropReason::ReplyRatio);
        }
        if self.tx.room_for(len) {
            return NoRoom::Made;
        }
        // Deferrable replies stay, if there is room without sending them.
        for may_defer in [self.may_defer(turn), false] {
            self.send(turn, services, index, may_defer);
            self.tx.compact();
            if self.tx.room_for(len) {
                return NoRoom::Made;
            }
        }
        NoRoom::Still
    }

    /// Sends a reply that is not in a ring, for a datagram whose request is no longer in flight. Returns how many bytes of
    /// requests it uses up where replies are limited by them.
    fn answer<N: Nic>(
        &mut self,
        turn: &mut Turn<N>,
        services: &mut Services,
        index: PortIndex,
        to: (SocketAddr, Option<IpAddr>, u32),
        reply: &[u8],
    ) -> u64 {
        let (peer, local, request_len) = to;
        let len = reply.len();
        let share = &services[usize::from(self.port.service)];
        if !share.is_answered(Expects::Reply) {
            share.count_consumed(1);
            return 0;
        }
        let lost = match self.make_room(turn, services, index, request_len, len) {
            NoRoom::Made => {
                self.tx.push(peer, local, len, |bytes| bytes.copy_from_slice(reply));
                services[usize::from(self.port.service)].count_replied_bytes(len as u64);
                return len.div_ceil(self.reply_ratio.max(1) as usize) as u64;
            }
            NoRoom::Never(reason) => reason,
            NoRoom::Still => DropReason::SendFailed,
        };
        services[usize::from(self.port.service)].count_lost(lost, 1);
        0
    }

    /// Takes in the datagrams that the chain has been shown.
    fn admit_shown<N: Nic, H: Hooks>(
        &mut self,
        turn: &mut Turn<N>,
        services: &mut Services,
        servers: &mut impl Servers<N>,
        batch: &mut Batch<H>,
    ) {
        batch.decide(turn);
        let (mut index, shown) = (0, batch.shown());
        loop {
            index = self.answer_shown(services, batch, index);
            if index == shown {
                break;
            }
            let (admitted, arrival) =
                batch.admit_shown(turn, services, servers, index, Waits::Nowhere);
            if admitted == Admitted::Answered
                && let Origin::Datagram { port, peer, local } = arrival.origin
            {
                let to = (peer, local, batch.shown_len(index) as u32);
                self.answer(turn, services, port, to, batch.reply());
            }
            index += 1;
        }
        batch.clear();
    }

    /// Drops the waiting replies; returns their number.
    fn drop_waiting(&mut self) -> u64 {
        let waiting = self.tx.waiting_datagrams();
        self.tx.advance(waiting);
        self.kept = 0;
        waiting as u64
    }
}

fn reply_ratio(limits: &Limits, on_loopback: bool) -> u32 {
    limits.udp_reply_ratio.unwrap_or(if on_loopback { 0 } else { 3 })
}

/// Why a reply cannot be appended to its port's batch.
enum NoRoom {
    /// It can never be appended.
    Never(DropReason),
    /// It can be appended now.
    Made,
    /// It can be appended later.
    Still,
}

/// The UDP ports of one worker.
pub(crate) struct UdpPorts {
    /// By port index; indices of other ports are vacant.
    ports: Vec<UdpPort>,
    sources: Sources,
    rx: RxBatch,
    /// By port index.
    expected: Vec<Expected>,
    /// See [`Limits::in_place_bytes`].
    in_place_bytes: usize,
}

impl Arrival {
    /// Whether it describes a datagram of the same port.
    #[inline]
    fn is_from(&self, datagram: &Datagram) -> bool {
        matches!(&self.origin, Origin::Datagram { peer, local, .. }
            if *peer == datagram.peer && *local == datagram.local)
    }
}

impl UdpPorts {
    pub(crate) fn new(rx: RxBatch, limits: &Limits) -> Self {
        Self {
            ports: Vec::new(),
            sources: Sources::new(Vec::new(), [].into()),
            rx,
            expected: Vec::new(),
            in_place_bytes: limits.in_place_bytes,
        }
    }

    /// A port reported an arrival.
    pub(crate) fn set_ready(&mut self, index: PortIndex) {
        self.ports[usize::from(index)].port.ready = true;
    }

    /// Adds a port.
    pub(crate) fn place(&mut self, index: PortIndex, port: UdpPort) {
        self.make_room_for(index);
        self.ports[usize::from(index)] = port;
    }

    /// Makes room for a port with this index.
    pub(crate) fn make_room_for(&mut self, index: PortIndex) {
        while self.ports.len() <= usize::from(index) {
            self.ports.push(UdpPort::vacant());
            self.expected.push(Expected::default());
        }
    }

    /// The ports.
    pub(crate) fn ports_mut(&mut self) -> impl Iterator<Item = (usize, &mut Port)> {
        let ports = self.ports.iter_mut().map(|udp| &mut udp.port).enumerate();
        ports.filter(|(_, port)| !port.is_vacant())
    }

    /// Sets the limits.
    pub(crate) fn set_limits(&mut self, limits: &Limits) {
        self.in_place_bytes = limits.in_place_bytes;
        for udp in &mut self.ports {
            udp.reply_ratio = reply_ratio(limits, udp.port.on_loopback());
            udp.lowest_source = lowest_source(limits, udp.port.on_loopback());
        }
    }

    /// Updates the sources after a change of the ports or of this machine's addresses.
    pub(crate) fn refresh_sources<N: Nic>(&mut self, turn: &Turn<N>) {
        let udp = self.ports.iter().map(|udp| &udp.port).filter(|port| !port.is_vacant());
        let own = udp.map(|port| port.address).collect();
        self.sources = Sources::new(own, turn.shared.local_addresses());
    }

    /// Closes the ports of a service, which are returned: freeing their memory takes long.
    pub(crate) fn close_ports<N: Nic>(&mut self, turn: &mut Turn<N>, service: u16) -> Vec<UdpPort> {
        let of_service = self.ports.iter_mut().enumerate();
        let of_service = of_service.filter(|(_, udp)| udp.port.is_of(service));
        let close = |(index, udp): (usize, &mut UdpPort)| {
            turn.nic.close_port(index as PortIndex);
            std::mem::replace(udp, UdpPort::vacant())
        };
        of_service.map(close).collect()
    }

    /// Sends a reply that is not in a ring, for datagrams of this many bytes whose request is no longer in flight. Returns how many
    /// bytes of requests it uses up where replies are limited by them.
    pub(crate) fn answer<N: Nic>(
        &mut self,
        turn: &mut Turn<N>,
        services: &mut Services,
        origin: &Origin,
        request_len: u32,
        reply: &[u8],
    ) -> u64 {
        let Origin::Datagram { port, peer, local } = *origin else { return 0 };
        let udp = &mut self.ports[usize::from(port)];
        udp.answer(turn, services, port, (peer, local, request_len), reply)
    }

    /// The receive buffers, for another endpoint while no port is read; [`Self::put_rx`] returns them.
    pub(crate) fn take_rx(&mut self) -> RxBatch {
        std::mem::replace(&mut self.rx, RxBatch::new(0, 0))
    }

    pub(crate) fn put_rx(&mut self, rx: RxBatch) {
        self.rx = rx;
    }

    /// Drops the waiting replies to the clients of a service; they are counted for this reason.
    pub(crate) fn drop_waiting(
        &mut self,
        services: &mut Services,
        service: u16,
        reason: DropReason,
    ) {
        for udp in self.ports.iter_mut().filter(|udp| udp.port.is_of(service)) {
            let waiting = udp.drop_waiting();
            udp.end_loans(services);
            services[usize::from(service)].count_lost(reason, waiting);
        }
    }

    /// Whether the host kernel took everything for a client.
    pub(crate) fn has_sent(&self, origin: &Origin) -> bool {
        let Origin::Datagram { port, peer, local } = origin else { return true };
        let waiting = self.ports[usize::from(*port)].tx.waiting();
        !waiting.iter().any(|d| d.peer == *peer && d.local == *local)
    }

    /// The flow of a datagram, if the service's dispatch needs it.
    fn flow_of(services: &Services, service: usize, port: &Port, peer: SocketAddr) -> u64 {
        match services[service].dispatcher.needs_flow() {
            true => flow_hash(peer, port.address.port()),
            false => 0,
        }
    }

    /// A batch of about `most` datagrams.
    #[cold]
    fn receive_window<N: Nic>(
        &mut self,
        turn: &mut Turn<N>,
        services: &mut Services,
        servers: &mut impl Servers<N>,
        schedule: &mut Schedule,
        index: usize,
        most: u32,
    ) {
        self.rx.most_buffers = self.ports[index].window.buffers;
        self.receive_batch(turn, services, servers, schedule, index);
        self.ports[index].window.adapt(self.rx.items.len(), most);
    }

    fn receive_batch<N: Nic>(
        &mut self,
        turn: &mut Turn<N>,
        services: &mut Services,
        servers: &mut impl Servers<N>,
        schedule: &mut Schedule,
        index: usize,
    ) {
        if turn.draining && !mutants::on("serve_after_drain") {
            return;
        }
        let port = &mut self.ports[index].port;
        let service = usize::from(port.service);
        let share = &mut services[service];
        // A chain looks at every message.
        let lends = self.expected[index].any() && share.chain.is_none();
        if lends {
            share.lend(&mut self.rx, self.expected[index]);
        }
        port.ready = turn.nic.recv(index as PortIndex, &mut self.rx);
        let share = &mut services[service];
        share.count_lost(DropReason::SocketOverflow, self.rx.overflowed.into());
        let datagrams = self.rx.items.len();
        turn.worked |= datagrams > 0;
        let mut brought = Expected::default();
        let has_bundles = share.begin_burst(datagrams, turn.now_ns);
        // What is dropped for a limit of the tenant is not shown to a chain, which may deliver it.
        let is_shown = !share.is_shed() || mutants::on("show_what_is_shed");
        match share.chain.take_if(|_| is_shown) {
            None if has_bundles => {
                brought = self.admit_trains(turn, services, servers, schedule, index)
            }
            None => {
                self.rx.copy_from_lent(0..datagrams);
                self.admit_batch(turn, services, servers, schedule, index, NoHooks);
            }
            Some(chain) => self.admit_batch(turn, services, servers, schedule, index, chain),
        }
        self.expected[index] = self.expected[index].after(datagrams, brought);
        if lends {
            services[service].end_loan(&mut self.rx);
        }
    }

    fn admit_batch<N: Nic, H: Hooks>(
        &mut self,
        turn: &mut Turn<N>,
        services: &mut Services,
        servers: &mut impl Servers<N>,
        schedule: &mut Schedule,
        index: usize,
        hooks: H,
    ) {
        let Self { ports, sources, rx, .. } = self;
        let mut sender = Sender::of_port(&ports[index], index, sources);
        let service = sender.service;
        let checks = services[service].checks_datagrams();
        let mut batch = Batch::of_clients(service, hooks);
        for datagram in &rx.items {
            let Some(arrival) = sender.arrival_or_lost(turn, services, datagram) else { continue };
            let mut payload = rx.payload(datagram);
            if checks && !is_request(payload) {
                services[service].count_lost(DropReason::BadFraming, 1);
                // Its tenant has cost the worker these bytes.
                batch.skip(payload.len() as u64);
                continue;
            }
            if H::ATTACHED {
                if batch.shown() == SHOWN_MAX || !batch.show(arrival, payload) {
                    ports[index].admit_shown(turn, services, servers, &mut batch);
                    batch.show(arrival, payload);
                }
                continue;
            }
            // What is lost is counted, and its client hears nothing.
            batch.admit(turn, services, servers, arrival, &mut payload, Waits::Nowhere);
        }
        if H::ATTACHED {
            ports[index].admit_shown(turn, services, servers, &mut batch);
        }
        batch.end(services, schedule, Kind::Udp);
    }

    /// The same without a chain, for messages some of which may go as bundles. Returns what the next receive call is likely to
    /// bring.
    // A function of its own: the loop over single messages is faster without bundles.
    #[inline(never)]
    fn admit_trains<N: Nic>(
        &mut self,
        turn: &mut Turn<N>,
        services: &mut Services,
        servers: &mut impl Servers<N>,
        schedule: &mut Schedule,
        index: usize,
    ) -> Expected {
        let Self { ports, sources, rx, .. } = self;
        let mut sender = Sender::of_port(&ports[index], index, sources);
        let service = sender.service;
        let mut batch = Batch::of_clients(service, NoHooks);
        let from = services[service].bundles_from();
        let mut expected = Expected::default();
        let in_place_bytes = self.in_place_bytes;
        // Those in front of `at` are done, and between it and `end` there is no train that goes as bundles.
        let (mut at, mut end) = (0, 0);
        loop {
            let next = rx.next_train(end, from);
            let singles = at..next.map_or(rx.items.len(), |train| train.first);
            rx.copy_from_lent(singles.clone());
            for datagram in &rx.items[singles] {
                sender.admit_single(turn, services, servers, &mut batch, rx, datagram);
            }
            let Some(mut train) = next else { break };
            expected.add(rx, train, in_place_bytes);
            (at, end) = (train.first, train.first + train.count);
            // Where its sender is refused, each datagram is.
            while train.count >= from
                && let Ok(arrival) = sender.arrival(turn, services, &rx.items[at])
            {
                let datagrams = Datagrams { rx, train };
                if rx.is_in_place(&rx.items[at]) {
                    match batch.admit_in_place(services, arrival, &datagrams) {
                        Ok(count) => at += count,
                        // The rest is tried again as a copy.
                        Err(_) => rx.copy_from_lent(at..end),
                    }
                } else {
                    match batch.admit_bundle(services, arrival, &datagrams) {
                        Ok(count) => at += count,
                        Err(NoBundle::SingleFirst) => {
                            sender.admit_single(
                                turn,
                                services,
                                servers,
                                &mut batch,
                                rx,
                                &rx.items[at],
                            );
                            at += 1;
                        }
                        Err(NoBundle::Singles) => break,
                    }
                }
                train = Train { first: at, count: end - at, ..train };
            }
        }
        batch.end(services, schedule, Kind::Udp);
        expected
    }
}

/// The sender of datagrams of one port. Consecutive ones often come from one client: its fields are reused.
struct Sender<'a> {
    index: PortIndex,
    port: Port,
    service: usize,
    lowest_source: u16,
    sources: &'a Sources,
    arrival: Option<Arrival>,
}

impl<'a> Sender<'a> {
    fn of_port(udp: &UdpPort, index: usize, sources: &'a Sources) -> Self {
        let UdpPort { port, lowest_source, .. } = *udp;
        let (index, service) = (index as PortIndex, usize::from(port.service));
        Self { index, port, service, lowest_source, sources, arrival: None }
    }

    /// What is to be known about a datagram; `Err` if its sender is refused.
    #[inline(always)]
    fn arrival<N: Nic>(
        &mut self,
        turn: &Turn<N>,
        services: &Services,
        datagram: &Datagram,
    ) -> Result<&Arrival, DropReason> {
        let Self { index, port, service, lowest_source, sources, arrival } = self;
        if arrival.as_ref().is_some_and(|arrival| arrival.is_from(datagram)) {
            return Ok(arrival.as_ref().expect("it is known"));
        }
        let (peer, local) = (datagram.peer, datagram.local);
        if let Some(reason) = sources.refuse(peer, local, *lowest_source) {
            return Err(reason);
        }
        Ok(arrival.insert(Arrival {
            origin: Origin::Datagram { port: *index, peer, local },
            number: 0,
            expects: Expects::Reply,
            received_ns: turn.now_ns,
            flow: UdpPorts::flow_of(services, *service, port, peer),
            target: None,
        }))
    }

    /// The same; a datagram that is lost is counted.
    #[inline(always)]
    fn arrival_or_lost<N: Nic>(
        &mut self,
        turn: &mut Turn<N>,
        services: &mut Services,
        datagram: &Datagram,
    ) -> Option<&Arrival> {
        let service = self.service;
        let arrival = match datagram.truncated {
            true => Err(DropReason::Truncated),
            false => self.arrival(turn, services, datagram),
        };
        arrival.map_err(|reason| services[service].count_lost(reason, 1)).ok()
    }

    /// Admits a datagram. If it is lost, that is counted, and its client hears nothing.
    #[inline(always)]
    fn admit_single<N: Nic>(
        &mut self,
        turn: &mut Turn<N>,
        services: &mut Services,
        servers: &mut impl Servers<N>,
        batch: &mut Batch<NoHooks>,
        rx: &RxBatch,
        datagram: &Datagram,
    ) {
        if let Some(arrival) = self.arrival_or_lost(turn, services, datagram) {
            batch.admit(
                turn,
                services,
                servers,
                arrival,
                &mut rx.payload(datagram),
                Waits::Nowhere,
            );
        }
    }
}

impl<N: Nic> Endpoint<N> for UdpPorts {
    /// One batch from every port that may have datagrams; in each round another one is the first.
    // Always inline: a message then costs a few instructions less.
    #[inline(always)]
    fn receive(
        &mut self,
        turn: &mut Turn<N>,
        services: &mut Services,
        servers: &mut impl Servers<N>,
        schedule: &mut Schedule,
    ) {
        let count = self.ports.len();
        let first = schedule.round() % count.max(1);
        let most = schedule.batch_messages();
        self.rx.most_buffers = most;
        for index in (first..count).chain(0..first) {
            let port = &mut self.ports[index].port;
            if port.is_readable() && schedule.allows(port.service, Kind::Udp) {
                port.ready = false;
                if most == u32::MAX {
                    self.receive_batch(turn, services, servers, schedule, index);
                } else {
                    self.receive_window(turn, services, servers, schedule, index, most);
                }
            }
        }
    }

    // Always inline: most replies take this path.
    #[inline(always)]
    fn deliver(&mut self, turn: &mut Turn<N>, services: &mut Services, run: &mut Run) -> Next {
        loop {
            let (token, len) = (run.token(), run.header.len as usize);
            let share = &mut services[run.service];
            let request = share.sessions.found(token);
            let Origin::Datagram { port, peer, local } = &request.origin else {
                return Next::Reply;
            };
            let udp = &mut self.ports[usize::from(*port)];
            let allowed =
                reply_allowed(request.len as usize, len, udp.reply_ratio) || mutants::on("amplify");
            if len <= UDP_PAYLOAD_MAX && allowed && udp.tx.room_for(len) {
                let ring = &share.mqueues[run.mqueue as usize].tx;
                let copy = |bytes: &mut [u8]| ring.copy_out(&run.header, bytes);
                if !udp.tx.push_if(*peer, *local, len, copy) {
                    return run.block(share);
                }
                if share.sessions.has_others(token) {
                    udp.tx.more_follows();
                }
                share.end_answered(token, run.mqueue);
                share.count_replied_bytes(len as u64);
                run.advance(share);
            } else {
                let (port, request) = (*port, *request);
                match self.ports[usize::from(port)].make_room(
                    turn,
                    services,
                    port,
                    request.len,
                    len,
                ) {
                    NoRoom::Made => continue,
                    NoRoom::Still => return run.block(&mut services[run.service]),
                    NoRoom::Never(reason) => {
                        let share = &mut services[run.service];
                        share.end_request(token, &request, false);
                        share.count_dropped_request(reason);
                        run.advance(share);
                    }
                }
            }
            match run.next(turn, services) {
                Next::Reply => {}
                next => return next,
            }
        }
    }

    fn flush(
        &mut self,
        turn: &mut Turn<N>,
        services: &mut Services,
        _: &mut impl Servers<N>,
        may_defer: bool,
    ) {
        for (index, udp) in (0..).zip(&mut self.ports) {
            if udp.tx.is_empty() {
                continue;
            }
            let may_defer = may_defer && udp.may_defer(turn);
            if !(may_defer && nothing_to_send(udp.tx.waiting(), udp.kept)) {
                udp.send(turn, services, index, may_defer);
            }
        }
    }

    fn pause(&mut self, turn: &mut Turn<N>, service: u16, paused: bool) {
        for (index, port) in self.ports_mut().filter(|(_, port)| port.is_of(service)) {
            port.pause(turn, index, paused);
        }
    }

    fn outstanding(&self, service: u16) -> u64 {
        let ports = self.ports.iter().filter(|udp| udp.port.is_of(service));
        ports.map(|udp| udp.tx.waiting_datagrams() as u64).sum()
    }

    fn wake_at(&self, _: u64, _: &Services) -> u64 {
        let now = self.ports.iter().any(|udp| udp.port.is_readable() || !udp.tx.is_empty());
        if now { 0 } else { u64::MAX }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_window_follows_the_datagrams_of_a_buffer() {
        let after = |batches: &[usize]| {
            let mut window = Window::FIRST;
            batches.iter().for_each(|datagrams| window.adapt(*datagrams, 16));
            window.buffers
        };
        // Single datagrams: as many buffers as datagrams are wanted.
        assert_eq!([&[1][..], &[1, 2], &[1, 2, 4, 8, 16]].map(after), [2, 4, 16]);
        assert_eq!(after(&[1, 2, 4, 8, 16, 16, 16]), 16);
        // Then each buffer has 64: one at a time, at once.
        assert_eq!(after(&[1, 2, 4, 8, 16, 16 * 64]), 1);
        assert_eq!(after(&[64, 64, 64]), 1);
        // Four in each; and a port with few datagrams stays as it is.
        assert_eq!(after(&[4, 8, 16, 16]), 4);
        assert_eq!(after(&[1, 2, 0, 1, 0]), 4);
    }

    #[test]
    fn gso_batches_are_built_again_for_replies_that_must_be_sent_and_for_many() {
        let departure = |more| {
            let peer = ([127, 0, 0, 1], 9).into();
            TxItem { peer, local: None, offset: 0, len: 8, count: 1, more, lent_at: None }
        };
        let mut waiting = vec![departure(true); 40];
        assert!(!nothing_to_send(&waiting, 0), "no batch has been built yet");
        assert!(nothing_to_send(&waiting, 40));
        waiting.extend(vec![departure(true); DEFER_MORE - 1]);
        assert!(nothing_to_send(&waiting, 40));
        waiting.push(departure(true));
        assert!(!nothing_to_send(&waiting, 40), "a GSO batch may now be long");
        assert!(!nothing_to_send(&[&waiting[..41], &[departure(false)]].concat(), 40));
        assert!(!nothing_to_send(&waiting[..39], 40), "the deferred ones were dropped");
    }
}
