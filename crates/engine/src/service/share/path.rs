//! The functions on the paths of a service's messages.

use std::sync::Arc;

use onpath::{Arranged, Link};
use wire::framing::Framing;

use crate::base::shared::Shared;
use crate::base::topology::CHUNK_BYTES;
use crate::service::chain::Attached;
use crate::service::share::ServiceShare;

impl ServiceShare {
    /// Gives the service's chain these functions, in this order; returns those that it no longer has.
    pub(crate) fn arrange_chain(&mut self, order: Vec<Arranged>) -> Vec<Link> {
        let chunk = if self.relays_streams() { CHUNK_BYTES } else { 0 };
        let is_proxy = self.is_proxy();
        let attached = self.chain.get_or_insert_with(|| {
            let (message, reply) = (self.max_message_bytes, self.max_reply_bytes);
            Box::new(Attached::new(chunk.max(message), chunk.max(reply)))
        });
        let former = attached.chain().arrange(order);
        // A proxy has no mqueues: each worker has its sockets.
        let mut owners = self.dispatcher.owners();
        if is_proxy {
            owners = (0..self.other_credit.len() as u16).collect();
        }
        attached.set_owners(owners, self.dispatcher.worker());
        self.notices.wanted = attached.chain().wants_notices();
        if attached.chain().is_empty() {
            self.chain = None;
        }
        former
    }

    /// Its functions find the addresses of connected clients there. Those between kernels and backends see no clients.
    pub(crate) fn find_peers(&mut self, shared: &Arc<Shared>) {
        if let Some(attached) = &mut self.chain {
            attached.set_peers(shared.clone());
        }
    }

    /// Whether datagrams have to be requests of the framing: memcached, behind a proxy, takes what is not one for several.
    #[inline]
    pub(crate) fn checks_datagrams(&self) -> bool {
        let is_checked = self.framing == Framing::Memcached && self.is_proxy();
        is_checked && !mutants::on("pass_any_datagram")
    }

    /// Time that its functions have taken since the last call.
    pub(crate) fn take_function_ns(&mut self) -> u64 {
        self.chain.as_mut().map_or(0, |attached| attached.chain().take_spent_ns())
    }
}
