//! Replies of bundles: those of one completion are one item of the port's send batch, and leave from the pool without a copy if they are
//! long enough.
//!
//! The accelerator can write the pool while its replies leave. It can change only what the bytes of its own replies are: where they
//! lie, how long they are and where they go is known from the engine's memory. A buffer stays in use until the send call has returned;
//! what the host kernel did not take is copied then.

use std::net::{IpAddr, SocketAddr};

use wire::admission::reply_allowed;
use wire::nic::{Nic, UDP_PAYLOAD_MAX};
use wire::session::{Origin, Token};

use crate::base::turn::Turn;
use crate::endpoint::udp::{Leaving, NoRoom, UdpPort, UdpPorts};
use crate::service::bundle::table::Completion;
use crate::service::services::Services;
use crate::service::share::ServiceShare;

/// From how many bytes on the replies of a completion are not copied.
const IN_PLACE_BYTES: usize = 1024;

impl UdpPort {
    /// Appends replies that leave from byte `at` of a bundle's buffer. False if they have to be copied. The service is that of
    /// the bundle: after a reload, another one may own the port.
    fn leave_in_place(
        &mut self,
        (service, share): (usize, &mut ServiceShare),
        (token, mqueue, at): (Token, u32, u32),
        to: (SocketAddr, Option<IpAddr>),
        shape: (usize, usize),
        more: bool,
    ) -> bool {
        let Some((memory, at)) = share.place_in_pool(token, mqueue, at) else { return false };
        if self.leaving.len() == self.leaving.capacity()
            || !self.tx.push_lent(to, shape, more, memory, at)
        {
            return false;
        }
        share.sessions.hold_bundle(token);
        self.leaving.push(Leaving { service: service as u16, mqueue, token });
        true
    }

    /// Replies that were to leave from pools have left, or are copied: the buffers are not in use any more.
    #[inline]
    pub(super) fn end_loans(&mut self, services: &mut Services) {
        if self.leaving.is_empty() {
            return;
        }
        self.tx.detach();
        for Leaving { service, mqueue, token } in self.leaving.drain(..) {
            services[usize::from(service)].release_bundle(token, mqueue);
        }
    }
}

impl UdpPorts {
    /// A pool of a service of this worker ends: no reply may leave from it any more.
    pub(crate) fn forget_pools(&mut self, services: &mut Services) {
        self.rx.forget_lent();
        for udp in &mut self.ports {
            udp.end_loans(services);
            udp.tx.forget_lent();
        }
    }

    /// Delivers the replies of a completion as far as there is room, in one piece where they lie without gaps. Returns the
    /// messages that have an outcome.
    pub(crate) fn deliver_bundle<N: Nic>(
        &mut self,
        turn: &mut Turn<N>,
        services: &mut Services,
        service: usize,
        mqueue: u32,
        completion: &Completion,
    ) -> u64 {
        let Completion { token, replies, messages, .. } = completion;
        let share = &services[service];
        let Some(bundle) = share.sessions.find_bundle(*token, mqueue) else { return *messages };
        let requests = *bundle.requests();
        let Origin::Datagram { port, peer, local } = requests.origin else { return *messages };
        let more = share.sessions.has_others_than(bundle, *messages);
        let len = replies.len() as usize;
        let mut decided = 0;
        while decided != *messages {
            let left = messages & !decided;
            let first = left.trailing_zeros();
            let request_len = requests.len_of(first);
            let udp = &mut self.ports[usize::from(port)];
            let allowed = reply_allowed(request_len as usize, len, udp.reply_ratio)
                || mutants::on("amplify_bundle");
            let room =
                if len <= UDP_PAYLOAD_MAX && allowed { udp.tx.room_for_many(len) } else { 0 };
            if room == 0 {
                match udp.make_room(turn, services, port, request_len, len) {
                    NoRoom::Made => {}
                    NoRoom::Still => break,
                    NoRoom::Never(reason) => {
                        let share = &mut services[service];
                        share.end_messages(*token, mqueue, 1 << first);
                        share.count_dropped_request(reason);
                        decided |= 1 << first;
                    }
                }
                continue;
            }
            // The last request may be shorter, so its reply too.
            let alike = (left >> first).trailing_ones();
            let last = alike > 1 && first + alike == requests.count;
            let alike = alike - u32::from(last && requests.last_len != requests.len);
            let count = alike.min(room as u32);
            let place = completion.place_of(first);
            let at = completion.at(place);
            let share = &mut services[service];
            let (to, shape) = ((peer, local), (len, count as usize));
            let no_gaps = len == 0 || count == 1 || replies.stride() as usize == len;
            let in_place = no_gaps && len * count as usize >= IN_PLACE_BYTES;
            if !in_place
                || !udp.leave_in_place((service, share), (*token, mqueue, at), to, shape, more)
            {
                udp.tx.push_many(to, shape, more, |bytes| {
                    if no_gaps {
                        return share.read_replies(*token, mqueue, at, bytes);
                    }
                    for (place, bytes) in (place..).zip(bytes.chunks_exact_mut(len)) {
                        share.read_replies(*token, mqueue, completion.at(place), bytes);
                    }
                });
            }
            let these = (u64::MAX >> (64 - count)) << first;
            share.end_messages(*token, mqueue, these);
            share.count_replied_bytes(u64::from(count) * len as u64);
            decided |= these;
        }
        decided
    }
}
