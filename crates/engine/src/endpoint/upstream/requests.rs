//! Requests to upstream servers: the flows that they go through, and the end of those that are not answered.

use wire::DropReason;
use wire::framing::{Framing, UdpHeader};
use wire::nic::{Close, Event, Nic, NicError, Transport};
use wire::session::Origin;

use super::flows::Flow;
use super::{Destination, Upstream, UpstreamBatch, Upstreams, of};
use crate::base::arrival::{Arrival, Message, Refusal};
use crate::base::keys::StreamOwner;
use crate::base::turn::Turn;
use crate::service::services::Services;

impl Upstreams {
    /// Collects a request for the upstream server of its service.
    // Not inline: services with kernels do not come here.
    #[inline(never)]
    pub(crate) fn submit_upstream<N: Nic>(
        &mut self,
        turn: &mut Turn<N>,
        services: &mut Services,
        service: usize,
        arrival: &Arrival,
        message: &mut impl Message,
    ) -> Result<(), Refusal> {
        let received_len = message.received_len() as u64;
        let payload = message.bytes();
        if let Origin::Client(client) = &arrival.origin {
            return self.submit_to_stream(turn, services, service, arrival, client, payload);
        }
        let upstream = of(&mut self.by_slot, service);
        let header = upstream.and_then(|upstream| upstream.datagram_header(&arrival.origin));
        let header = header.as_deref().unwrap_or_default();
        let len = header.len() + payload.len();
        if !self.batch.tx.room_for(len) {
            self.send_datagrams(turn);
            if !self.batch.tx.room_for(len) {
                return Err(Refusal::Drop(DropReason::TooLong));
            }
        }
        let flow = self.flow_of(turn, services, service, &arrival.origin).map_err(Refusal::Drop)?;
        let Self { by_slot, batch: upstream } = self;
        let Turn { now_ns, .. } = turn;
        let share = &mut services[service];
        let Some(Upstream { flows, address, .. }) = of(by_slot, service) else {
            return Err(Refusal::Drop(DropReason::NoAccelerator));
        };
        let expired = flows.ask(flow, 1, received_len, *now_ns);
        if share.framing == Framing::Memcached
            && let Some((header, _)) = UdpHeader::split(payload)
        {
            flows.ask_with_id(flow, header.id);
        }
        let place = upstream.to.len() as u32;
        upstream.to.push(Destination { service: service as u16, flow, place });
        upstream.tx.push(*address, None, len, |bytes| {
            let (first, rest) = bytes.split_at_mut(header.len());
            first.copy_from_slice(header);
            rest.copy_from_slice(payload);
        });
        share.count_lost(DropReason::RequestTimeout, expired.into());
        share.counters.accepted.one();
        Ok(())
    }

    /// The flow of a client; it gets one if it has none.
    fn flow_of<N: Nic>(
        &mut self,
        turn: &mut Turn<N>,
        services: &mut Services,
        service: usize,
        origin: &Origin,
    ) -> Result<u32, DropReason> {
        let Some(Upstream { flows, address, .. }) = of(&mut self.by_slot, service) else {
            return Err(DropReason::NoAccelerator);
        };
        if let Some(flow) = flows.find(origin) {
            return Ok(flow);
        }
        let (address, victim) = (*address, flows.room().err());
        if victim == Some(None) || !self.batch.may_open(turn.now_ns) {
            return Err(DropReason::UpstreamFlows);
        }
        let Some(flow) = victim.flatten().or_else(|| flows.next()) else {
            return Err(DropReason::UpstreamFlows);
        };
        let key = turn.stream_keys.issue(StreamOwner::Flow { service: service as u16, flow });
        if let Err(error) = turn.nic.connect(address, Transport::Udp, key) {
            turn.stream_keys.free(key);
            return Err(match error {
                NicError::Exhausted => DropReason::UpstreamFlows,
                NicError::Refused(_) => DropReason::UpstreamRefused,
            });
        }
        if let Some(Some(victim)) = victim {
            self.evict_flow(turn, services, service, victim);
        }
        let Turn { now_ns, .. } = turn;
        let share = &mut services[service];
        share.counters.upstream_flows_opened.one();
        let Some(upstream) = of(&mut self.by_slot, service) else {
            return Err(DropReason::NoAccelerator);
        };
        Ok(upstream.flows.open(*origin, key, *now_ns))
    }

    /// Closes a flow for a new one.
    fn evict_flow<N: Nic>(
        &mut self,
        turn: &mut Turn<N>,
        services: &mut Services,
        service: usize,
        flow: u32,
    ) {
        let now_ns = turn.now_ns;
        let upstream = of(&mut self.by_slot, service);
        if upstream.is_some_and(|upstream| upstream.flows.was_asked(flow, now_ns)) {
            // Requests of it may have been collected.
            self.send_datagrams(turn);
        }
        self.close_flow(turn, services, service, flow, DropReason::UpstreamFlows);
        services[service].counters.upstream_flows_evicted.one();
    }

    /// Closes a flow; its requests in flight are dropped for this reason.
    fn close_flow<N: Nic>(
        &mut self,
        turn: &mut Turn<N>,
        services: &mut Services,
        service: usize,
        flow: u32,
        reason: DropReason,
    ) {
        let Self { by_slot, batch: upstream } = self;
        let Turn { nic, stream_keys, now_ns, .. } = turn;
        let share = &mut services[service];
        let closed = of(by_slot, service).and_then(|u| u.flows.close(flow, *now_ns));
        let Some(closed) = closed else { return };
        nic.close(closed.key, closed.how);
        stream_keys.free(closed.key);
        share.counters.upstream_flows_closed.one();
        upstream.end_later(service, reason, closed.in_flight.into());
    }

    /// Sends the requests that this turn has collected.
    pub(super) fn send<N: Nic>(&mut self, turn: &mut Turn<N>, services: &mut Services) {
        self.send_datagrams(turn);
        self.write_streams(turn, services);
        // Their batches have ended.
        for (service, reason, requests) in self.batch.ends.drain(..) {
            services[usize::from(service)].count_lost(reason, requests);
        }
    }

    /// One call for each flow.
    fn send_datagrams<N: Nic>(&mut self, turn: &mut Turn<N>) {
        if self.batch.to.is_empty() {
            return;
        }
        self.batch.sort();
        let Self { by_slot, batch: upstream } = self;
        let Turn { nic, .. } = turn;
        let UpstreamBatch { tx, to, ends, .. } = upstream;
        for run in to.chunk_by(|a, b| (a.service, a.flow) == (b.service, b.flow)) {
            let Destination { service, flow, .. } = run[0];
            let flows = of(by_slot, service.into()).map(|upstream| &mut upstream.flows);
            let Some((flows, key)) = flows.and_then(|f| f.get(flow).map(|f| f.key).map(|k| (f, k)))
            else {
                tx.advance(run.len());
                continue;
            };
            let waiting = tx.waiting().len();
            let outcome = nic.write_datagrams(key, tx, run.len());
            let left = run.len() - (waiting - tx.waiting().len());
            tx.advance(left);
            let lost = (left + outcome.refused) as u32;
            let mut refused = 0;
            if outcome.bounced {
                refused = flows.give_up(flow, run.len() as u32);
            }
            flows.withdraw(flow, lost);
            let mut end = |reason, requests: u32| {
                if requests > 0 {
                    ends.push((service, reason, requests.into()));
                }
            };
            end(DropReason::UpstreamRefused, refused);
            end(DropReason::SendFailed, lost);
        }
        to.clear();
    }

    /// Something happened on the socket of a flow.
    pub(super) fn flow_event(&mut self, event: Event, service: u16, flow: u32) {
        let Self { by_slot, batch: upstream } = self;
        let entry = of(by_slot, service.into()).and_then(|upstream| upstream.flows.get(flow));
        let Some(entry) = entry else { return };
        entry.bounced |= matches!(event, Event::Failed(_));
        if !std::mem::replace(&mut entry.is_ready, true) {
            upstream.ready.push((service, flow));
        }
    }

    /// The host of the upstream server refuses what a flow has sent: none of it will be answered.
    pub(super) fn refuse_flow(&mut self, services: &mut Services, service: usize, flow: u32) {
        let share = &mut services[service];
        let Some(upstream) = of(&mut self.by_slot, service) else { return };
        let refused = upstream.flows.give_up(flow, 0);
        share.count_lost(DropReason::UpstreamRefused, refused.into());
    }

    /// The flow of a client's datagrams.
    pub(super) fn flow_at(&mut self, service: usize, origin: &Origin) -> Option<&mut Flow> {
        let flows = &mut of(&mut self.by_slot, service)?.flows;
        let flow = flows.find(origin)?;
        flows.get(flow)
    }

    /// Once a millisecond: requests that have timed out, and flows that are idle.
    pub(super) fn expire_flows<N: Nic>(
        &mut self,
        turn: &mut Turn<N>,
        services: &mut Services,
        service: usize,
    ) {
        let now_ns = turn.now_ns;
        let share = &mut services[service];
        let Some(upstream) = of(&mut self.by_slot, service) else { return };
        let expired = upstream.flows.expire(now_ns);
        let idle_ns = upstream.idle_ns.unwrap_or(self.batch.idle_ns);
        share.count_lost(DropReason::RequestTimeout, expired);
        let Some(before_ns) = now_ns.checked_sub(idle_ns) else { return };
        while let Some(flow) = self.idle_flow(service, before_ns) {
            self.close_flow(turn, services, service, flow, DropReason::IdleTimeout);
        }
    }

    fn idle_flow(&mut self, service: usize, before_ns: u64) -> Option<u32> {
        of(&mut self.by_slot, service)?.flows.idle_since(before_ns)
    }

    /// Gives up what is in flight on the flows of a service.
    pub(super) fn drop_flow_requests(
        &mut self,
        services: &mut Services,
        service: usize,
        reason: DropReason,
    ) {
        let share = &mut services[service];
        let Some(upstream) = of(&mut self.by_slot, service) else { return };
        let given_up = upstream.flows.give_up_all();
        share.count_lost(reason, given_up);
    }

    /// The service is gone: closes its sockets.
    pub(super) fn close<N: Nic>(&mut self, turn: &mut Turn<N>, service: u16) {
        let Self { by_slot, batch } = self;
        let Turn { nic, stream_keys, now_ns, .. } = turn;
        let Some(upstream) = of(by_slot, service.into()) else { return };
        while let Some(flow) = upstream.flows.any() {
            let Some(closed) = upstream.flows.close(flow, *now_ns) else { return };
            nic.close(closed.key, closed.how);
            stream_keys.free(closed.key);
            upstream.counters.upstream_flows_closed.one();
        }
        for client in upstream.streams.clients() {
            if let Some(stream) = upstream.streams.remove(client) {
                batch.streams -= 1;
                nic.close(stream.key, Close::Reset);
                stream_keys.free(stream.key);
            }
        }
    }
}
