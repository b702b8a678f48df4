//! Requests to upstream servers: the flows that they go through, and the end of those that are not answered.

use wire::DropReason;
use wire::framing::{Framing, UdpHeader};
use wire::nic::{Close, Event, Nic, NicError, Transport};
use wire::session::Origin;

use super::{Destination, Upstream, UpstreamBatch};
use crate::base::arrival::{Arrival, Message, Refusal};
use crate::base::keys::StreamOwner;
use crate::service::share::ServiceShare;
use crate::turn::Turn;

impl<N: Nic> Turn<N> {
    /// Collects a request for the upstream server of its service.
    // Not inline: services with kernels do not come here.
    #[inline(never)]
    pub(crate) fn submit_upstream(
        &mut self,
        service: usize,
        arrival: &Arrival,
        message: &mut impl Message,
    ) -> Result<(), Refusal> {
        let received_len = message.received_len() as u64;
        let payload = message.bytes();
        if let Origin::Client(client) = &arrival.origin {
            return self.submit_to_stream(service, arrival, client, payload);
        }
        let upstream = self.services[service].upstream.as_deref();
        let header = upstream.and_then(|upstream| upstream.datagram_header(&arrival.origin));
        let header = header.as_deref().unwrap_or_default();
        let len = header.len() + payload.len();
        if !self.upstream.tx.room_for(len) {
            self.send_datagrams();
            if !self.upstream.tx.room_for(len) {
                return Err(Refusal::Drop(DropReason::TooLong));
            }
        }
        let flow = self.flow_of(service, &arrival.origin).map_err(Refusal::Drop)?;
        let Self { services, upstream, now_ns, .. } = self;
        let share = &mut services[service];
        let Some(Upstream { flows, address, .. }) = share.upstream.as_deref_mut() else {
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
    fn flow_of(&mut self, service: usize, origin: &Origin) -> Result<u32, DropReason> {
        let share = &mut self.services[service];
        let Some(Upstream { flows, address, .. }) = share.upstream.as_deref_mut() else {
            return Err(DropReason::NoAccelerator);
        };
        if let Some(flow) = flows.find(origin) {
            return Ok(flow);
        }
        let (address, victim) = (*address, flows.room().err());
        if victim == Some(None) || !self.upstream.may_open(self.now_ns) {
            return Err(DropReason::UpstreamFlows);
        }
        let Some(flow) = victim.flatten().or_else(|| flows.next()) else {
            return Err(DropReason::UpstreamFlows);
        };
        let key = self.stream_keys.issue(StreamOwner::Flow { service: service as u16, flow });
        if let Err(error) = self.nic.connect(address, Transport::Udp, key) {
            self.stream_keys.free(key);
            return Err(match error {
                NicError::Exhausted => DropReason::UpstreamFlows,
                NicError::Refused(_) => DropReason::UpstreamRefused,
            });
        }
        if let Some(Some(victim)) = victim {
            self.evict_flow(service, victim);
        }
        let Self { services, now_ns, .. } = self;
        let share = &mut services[service];
        share.counters.upstream_flows_opened.one();
        let Some(upstream) = share.upstream.as_deref_mut() else {
            return Err(DropReason::NoAccelerator);
        };
        Ok(upstream.flows.open(*origin, key, *now_ns))
    }

    /// Closes a flow for a new one.
    fn evict_flow(&mut self, service: usize, flow: u32) {
        let now_ns = self.now_ns;
        let upstream = self.services[service].upstream.as_deref_mut();
        if upstream.is_some_and(|upstream| upstream.flows.was_asked(flow, now_ns)) {
            // Requests of it may have been collected.
            self.send_datagrams();
        }
        self.close_flow(service, flow, DropReason::UpstreamFlows);
        self.services[service].counters.upstream_flows_evicted.one();
    }

    /// Closes a flow; its requests in flight are dropped for this reason.
    fn close_flow(&mut self, service: usize, flow: u32, reason: DropReason) {
        let Self { services, nic, stream_keys, upstream, now_ns, .. } = self;
        let share = &mut services[service];
        let closed = share.upstream.as_deref_mut().and_then(|u| u.flows.close(flow, *now_ns));
        let Some(closed) = closed else { return };
        nic.close(closed.key, closed.how);
        stream_keys.free(closed.key);
        share.counters.upstream_flows_closed.one();
        upstream.end_later(service, reason, closed.in_flight.into());
    }

    /// Sends the requests that this turn has collected.
    pub(super) fn send_upstream(&mut self) {
        self.send_datagrams();
        self.write_streams();
        // Their batches have ended.
        let Self { services, upstream, .. } = self;
        for (service, reason, requests) in upstream.ends.drain(..) {
            services[usize::from(service)].count_lost(reason, requests);
        }
    }

    /// One call for each flow.
    fn send_datagrams(&mut self) {
        if self.upstream.to.is_empty() {
            return;
        }
        self.upstream.sort();
        let Self { services, nic, upstream, .. } = self;
        let UpstreamBatch { tx, to, ends, .. } = upstream;
        for run in to.chunk_by(|a, b| (a.service, a.flow) == (b.service, b.flow)) {
            let Destination { service, flow, .. } = run[0];
            let share = &mut services[usize::from(service)];
            let flows = share.upstream.as_deref_mut().map(|upstream| &mut upstream.flows);
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
    pub(crate) fn flow_event(&mut self, event: Event, service: u16, flow: u32) {
        let Self { services, upstream, .. } = self;
        let share = services.get_mut(usize::from(service));
        let entry = share.and_then(|share| share.upstream.as_deref_mut()?.flows.get(flow));
        let Some(entry) = entry else { return };
        entry.bounced |= matches!(event, Event::Failed(_));
        if !std::mem::replace(&mut entry.is_ready, true) {
            upstream.ready.push((service, flow));
        }
    }

    /// The host of the upstream server refuses what a flow has sent: none of it will be answered.
    pub(super) fn refuse_flow(&mut self, service: usize, flow: u32) {
        let share = &mut self.services[service];
        let Some(upstream) = share.upstream.as_deref_mut() else { return };
        let refused = upstream.flows.give_up(flow, 0);
        share.count_lost(DropReason::UpstreamRefused, refused.into());
    }

    /// Bytes of the requests of a flow that no answer has been charged to.
    pub(super) fn unspent(&mut self, service: usize, flow: u32) -> u32 {
        let upstream = self.services[service].upstream.as_deref_mut();
        let entry = upstream.and_then(|upstream| upstream.flows.get(flow));
        entry.map_or(0, |entry| u32::try_from(entry.unspent).unwrap_or(u32::MAX))
    }

    /// Charges an answer to the requests of a flow.
    pub(super) fn spend(&mut self, service: usize, flow: u32, bytes: u64) {
        let upstream = self.services[service].upstream.as_deref_mut();
        if let Some(entry) = upstream.and_then(|upstream| upstream.flows.get(flow)) {
            entry.unspent = entry.unspent.saturating_sub(bytes);
        }
    }

    /// Once a millisecond: requests that have timed out, and flows that are idle.
    pub(super) fn expire_flows(&mut self, service: usize) {
        let now_ns = self.now_ns;
        let share = &mut self.services[service];
        let Some(upstream) = share.upstream.as_deref_mut() else { return };
        let expired = upstream.flows.expire(now_ns);
        let idle_ns = upstream.idle_ns.unwrap_or(self.upstream.idle_ns);
        share.count_lost(DropReason::RequestTimeout, expired);
        let Some(before_ns) = now_ns.checked_sub(idle_ns) else { return };
        while let Some(flow) = self.idle_flow(service, before_ns) {
            self.close_flow(service, flow, DropReason::IdleTimeout);
        }
    }

    fn idle_flow(&mut self, service: usize, before_ns: u64) -> Option<u32> {
        self.services[service].upstream.as_deref_mut()?.flows.idle_since(before_ns)
    }

    /// Gives up what is in flight on the flows of a service.
    pub(super) fn drop_flow_requests(&mut self, service: usize, reason: DropReason) {
        let share = &mut self.services[service];
        let Some(upstream) = share.upstream.as_deref_mut() else { return };
        let given_up = upstream.flows.give_up_all();
        share.count_lost(reason, given_up);
    }

    /// The service is gone: closes its sockets.
    pub(crate) fn close_upstream(&mut self, share: &mut ServiceShare) {
        let Self { nic, stream_keys, upstream: batch, now_ns, .. } = self;
        let Some(upstream) = share.upstream.as_deref_mut() else { return };
        while let Some(flow) = upstream.flows.any() {
            let Some(closed) = upstream.flows.close(flow, *now_ns) else { return };
            nic.close(closed.key, closed.how);
            stream_keys.free(closed.key);
            share.counters.upstream_flows_closed.one();
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
