//! Answers of functions to datagrams: what a cache answers leaves without a step for each message that others need.

use wire::admission::reply_allowed;
use wire::framing::Expects;
use wire::nic::UDP_PAYLOAD_MAX;
use wire::session::Origin;

use super::UdpPort;
use crate::admit::Batch;
use crate::service::chain::Hooks;
use crate::service::services::Services;

impl UdpPort {
    /// Appends the answers to datagrams that the chain was shown, from `index` on, up to the first datagram with another outcome or
    /// whose answer needs more than a place in the batch that is sent. Returns the index of that one.
    pub(super) fn answer_shown<H: Hooks>(
        &mut self,
        services: &mut Services,
        batch: &mut Batch<H>,
        index: usize,
    ) -> usize {
        let share = &services[usize::from(self.port.service)];
        if !share.is_answered(Expects::Reply) {
            return index;
        }
        let most = share.max_reply_bytes.min(UDP_PAYLOAD_MAX);
        let (mut next, mut replied_bytes) = (index, 0);
        while let Some((Origin::Datagram { peer, local, .. }, received, reply)) = batch.answer(next)
        {
            let len = reply.len();
            let allowed = reply_allowed(received, len, self.reply_ratio);
            if len > most || !allowed || !self.tx.room_for(len) {
                break;
            }
            self.tx.push_alike(peer, local, reply);
            batch.set_answered(next, received);
            replied_bytes += len as u64;
            next += 1;
        }
        if next > index {
            // Nothing was sent meanwhile: no snapshot shows more ends than requests.
            batch.count_now(services);
            services[usize::from(self.port.service)].count_replied_bytes(replied_bytes);
        }
        next
    }
}
