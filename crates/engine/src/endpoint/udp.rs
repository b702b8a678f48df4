//! Datagrams in: a batch from every UDP port that has some.

use wire::DropReason;
use wire::framing::Expects;
use wire::nic::{Datagram, Nic, Transport};
use wire::session::Origin;

use crate::admit::{Arrival, Refusal};
use crate::worker::Worker;

impl Arrival {
    /// Whether it describes a datagram of the same port.
    #[inline]
    fn is_from(&self, datagram: &Datagram) -> bool {
        matches!(&self.origin, Origin::Datagram { peer, local, .. }
            if *peer == datagram.peer && *local == datagram.local)
    }
}

impl<N: Nic> Worker<N> {
    /// One batch from every UDP port that may have datagrams, connections from every TCP port; each round another one is
    /// the first.
    pub(crate) fn receive_datagrams(&mut self, round: usize) {
        let count = self.ports.len();
        let first = round % count.max(1);
        for port in (first..count).chain(0..first) {
            if self.ports[port].paused || !std::mem::take(&mut self.ports[port].ready) {
                continue;
            }
            match self.ports[port].transport {
                Transport::Udp => self.receive_batch(port as u16),
                Transport::Tcp => self.accept_connections(port as u16),
            }
        }
    }

    fn receive_batch(&mut self, port: u16) {
        if self.draining && !mutants::on("serve_after_drain") {
            return;
        }
        let mut batch = std::mem::replace(&mut self.rx, wire::nic::RxBatch::new(0, 0));
        let more = self.nic.recv(port, &mut batch);
        let service = self.ports[port as usize].service as usize;
        let lowest_source = self.ports[port as usize].lowest_source;
        self.ports[port as usize].ready = more;
        let share = &mut self.services[service];
        share.counters.drop_many(DropReason::SocketOverflow, batch.overflowed.into());
        share.dispatcher.burst(batch.items.len());
        self.work |= !batch.items.is_empty();
        let (mut received, mut received_bytes) = (0, 0);
        // Datagrams of one client often come in a row: what it is about them stays.
        let mut arrival: Option<Arrival> = None;
        for datagram in &batch.items {
            if datagram.truncated {
                self.services[service].counters.drop_one(DropReason::Truncated);
                continue;
            }
            let arrival = match &mut arrival {
                Some(arrival) if arrival.is_from(datagram) => arrival,
                other => {
                    let (peer, local) = (datagram.peer, datagram.local);
                    if let Some(reason) = self.sources.refuse(peer, local, lowest_source) {
                        self.services[service].counters.drop_one(reason);
                        continue;
                    }
                    let origin = Origin::Datagram { port, peer, local };
                    other.insert(Arrival {
                        origin,
                        number: 0,
                        expects: Expects::Reply,
                        received_ns: self.now_ns,
                        flow: self.flow_of(service, &origin),
                        target: None,
                    })
                }
            };
            let mut payload = batch.payload(datagram);
            received += 1;
            received_bytes += payload.len() as u64;
            if let Err(Refusal::Drop(reason) | Refusal::Retry(reason)) =
                self.submit(service, arrival, &mut payload)
                && !mutants::on("shed_silently")
            {
                // Nobody may see more drops than requests.
                let counters = &self.services[service].counters;
                if !mutants::on("count_received_last") {
                    counters.received.add(std::mem::take(&mut received));
                }
                counters.drop_one(reason);
            }
        }
        let counters = &self.services[service].counters;
        counters.received.add(received);
        counters.received_bytes.add(received_bytes);
        self.rx = batch;
    }
}
