//! Answers of upstream servers: read in batches, shown to the chain, delivered to clients.

use wire::DropReason;
use wire::framing::{Expects, Framing, UdpHeader};
use wire::nic::{Event, Nic, RxBatch};
use wire::session::{Origin, Request};

use super::flows::Ends;
use super::{Upstreams, of};
use crate::base::arrival::Awaited;
use crate::base::turn::Turn;
use crate::depart::{Depart, Destinations};
use crate::endpoint::clients::Clients;
use crate::schedule::Schedule;
use crate::service::chain::ShownReply;
use crate::service::services::Services;

impl Upstreams {
    /// Sends what this turn has collected for upstream servers, and takes what they have answered.
    // Not inline: a worker without proxies does not come here.
    #[inline(never)]
    pub(crate) fn exchange_all<N: Nic>(
        &mut self,
        turn: &mut Turn<N>,
        services: &mut Services,
        clients: &mut Clients,
        schedule: &mut Schedule,
    ) {
        self.send(turn, services);
        self.resume_streams(clients);
        if self.batch.has_some() {
            self.gather_datagrams(turn, services, clients, schedule);
            self.gather_streams(turn, services, clients, schedule);
        }
    }

    /// Reads each socket of a flow that may have datagrams, once.
    fn gather_datagrams<N: Nic>(
        &mut self,
        turn: &mut Turn<N>,
        services: &mut Services,
        clients: &mut Clients,
        schedule: &mut Schedule,
    ) {
        // The messages of the last receive call have been admitted: its buffers are used again while they are in the cache.
        let mut rx = clients.udp.take_rx();
        let ready = self.batch.take_ready();
        for (service, flow) in ready.iter().copied() {
            let slot = usize::from(service);
            let upstream = of(&mut self.by_slot, slot);
            let Some(entry) = upstream.and_then(|upstream| upstream.flows.get(flow)) else {
                continue;
            };
            if !std::mem::take(&mut entry.is_ready) {
                // The flow was closed, and its number belongs to another one.
                continue;
            }
            let (key, origin) = (entry.key, entry.origin);
            let mut bounced = std::mem::take(&mut entry.bounced);
            let read = turn.nic.read_datagrams(key, &mut rx);
            bounced |= read.bounced;
            turn.busy();
            let ended = self.take_answers(turn, services, clients, slot, (flow, &origin), &rx);
            if schedule.is_shared() {
                schedule.charge_replies(slot, ended, 0);
            }
            if bounced {
                self.refuse_flow(services, slot, flow);
            }
            if read.more {
                self.flow_event(Event::Readable(key), service, flow);
            }
        }
        for (service, _) in ready.iter().copied() {
            clients.deliver_shown(turn, services, self, service.into());
        }
        self.batch.give_back(ready);
        clients.udp.put_rx(rx);
    }

    /// Takes the answers that one read brought. Returns how many requests they ended.
    fn take_answers<N: Nic>(
        &mut self,
        turn: &mut Turn<N>,
        services: &mut Services,
        clients: &mut Clients,
        service: usize,
        (flow, origin): (u32, &Origin),
        rx: &RxBatch,
    ) -> u64 {
        let now_ns = turn.now_ns;
        let mut ended = 0;
        for datagram in &rx.items {
            let share = &mut services[service];
            let Some(upstream) = of(&mut self.by_slot, service) else { return ended };
            let payload = rx.payload(datagram);
            let frame = match share.framing {
                Framing::Memcached => UdpHeader::split_answer(payload),
                _ => None,
            };
            let ends = match frame {
                Some((header, body)) => upstream.flows.answer_in_part(flow, header, body, now_ns),
                None => upstream.flows.answer(flow, now_ns),
            };
            if ends == Ends::Further {
                // In the books it is a request with a reply of its own.
                share.count_received(1);
            }
            match ends {
                Ends::Late => share.count_lost(DropReason::BackendLate, 1),
                Ends::Nothing => share.count_lost(DropReason::BackendUnasked, 1),
                Ends::Request | Ends::Further => {
                    ended += 1;
                    let request = Request {
                        origin: *origin,
                        number: 0,
                        mqueue: 0,
                        len: 0,
                        received_ns: now_ns,
                        expects: Expects::Reply,
                    };
                    self.take_answer(turn, services, clients, service, &request, payload);
                }
            }
        }
        ended
    }

    /// Delivers an answer that has ended a request, or shows it to the chain.
    pub(super) fn take_answer<N: Nic>(
        &mut self,
        turn: &mut Turn<N>,
        services: &mut Services,
        clients: &mut Clients,
        service: usize,
        request: &Request,
        answer: &[u8],
    ) {
        let share = &mut services[service];
        if answer.len() > share.max_reply_bytes {
            share.tell_done(request.origin, request.number);
            return clients.drop_request(
                turn,
                services,
                service,
                request,
                DropReason::ReplyTooLong,
            );
        }
        let Some(chain) = share.chain.as_mut() else {
            let Request { origin, number, expects, .. } = *request;
            return match origin {
                Origin::Client(to) => {
                    let awaited = Awaited { to, number, expects };
                    clients.settle(turn, services, service, &awaited, Ok(answer));
                }
                Origin::Datagram { .. } => {
                    clients.answer_datagram(turn, services, self, (service, &origin), 0, answer)
                }
            };
        };
        if !chain.has_room(answer.len()) {
            clients.deliver_shown(turn, services, self, service);
        }
        if let Some(chain) = services[service].chain.as_mut() {
            chain.show_reply(
                ShownReply { request: *request, sampled: false },
                answer.len(),
                |bytes| {
                    bytes.copy_from_slice(answer);
                    true
                },
            );
        }
    }
}
