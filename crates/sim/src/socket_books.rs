//! The books of the bytes of blocks' sockets.

use sockets::Books;
use wire::nic::Nic;

use crate::nic::SimSocket;
use crate::shared::lock;
use crate::world::World;

impl<N: Nic<Socket = SimSocket, Port = ()>> World<N> {
    /// The books of bytes of the sockets of a service.
    pub(crate) fn check_sockets(&self, service: usize) {
        if self.topology.services[service].sockets.is_empty() {
            return;
        }
        let behaviour = self.setup.behaviours[service];
        let judged = behaviour.sockets.scribble == 0 && !behaviour.corrupts();
        let bytes = self.socket_bytes(service);
        lock(&self.net).ledger.audit_sockets(service, bytes, judged);
    }

    /// Bytes of the sockets of a service, to blocks and from them: the engine's books, and the bytes in rings.
    pub fn socket_bytes(&self, service: usize) -> [(Books, u64); 2] {
        let counted = self.services[service].snapshot();
        let received = Books {
            taken: counted.socket_received_bytes,
            delivered: counted.socket_read_bytes,
            dropped: counted.socket_unread_bytes,
        };
        let sent = Books {
            taken: counted.socket_written_bytes,
            delivered: counted.socket_sent_bytes,
            dropped: counted.socket_unsent_bytes,
        };
        let mut all = [(received, 0), (sent, 0)];
        for worker in &self.workers {
            for slot in &self.slots[service] {
                let of_slot = worker.socket_bytes_of((*slot).into());
                for ((books, in_rings), (more, in_more)) in all.iter_mut().zip(of_slot) {
                    *books += more;
                    *in_rings += in_more;
                }
            }
        }
        all
    }

    /// What a service has of connections of blocks, if anything.
    pub fn open_sockets(&self, service: usize) -> Option<String> {
        let counted = self.services[service].snapshot();
        let (opened, closed) = (counted.sockets_opened, counted.sockets_closed);
        let bytes = self.socket_bytes(service);
        let in_rings: u64 = bytes.iter().map(|(_, in_rings)| in_rings).sum();
        (opened != closed || in_rings > 0)
            .then(|| format!("sockets opened {opened}, closed {closed}, {in_rings} bytes in rings"))
    }
}
