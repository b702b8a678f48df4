//! Applies the messages in a worker's [mailbox](super::mailbox).

use wire::nic::Nic;

use crate::control::message::{ControlMessage, MessageOf};
use crate::worker::Worker;

/// Messages that a worker takes in one turn.
const MESSAGES_PER_TURN: usize = 32;

impl<N: Nic> Worker<N> {
    /// Applies the messages in the mailbox.
    #[inline]
    pub(crate) fn drain_mailbox(&mut self) {
        if self.fabric.mailbox(self.turn.index).len() > 0 {
            self.apply_messages();
        }
    }

    #[cold]
    fn apply_messages(&mut self) {
        // The rest is taken in the next turn, which starts at once.
        self.turn.busy();
        for _ in 0..MESSAGES_PER_TURN {
            let Some(message) = self.fabric.mailbox(self.turn.index).take() else { return };
            self.apply(message);
        }
    }

    fn apply(&mut self, message: MessageOf<N>) {
        // The sender of a message may have stopped waiting for the reply.
        match message {
            ControlMessage::Install(install, reply) => {
                let _ = reply.send(self.install(*install));
            }
            ControlMessage::Switch(switch, reply) => {
                self.switch(&switch);
                let _ = reply.send(());
            }
            ControlMessage::Expire(slot) => self.expire(slot),
            ControlMessage::Release(slot, reply) => {
                let _ = reply.send(self.release(slot));
            }
            ControlMessage::Chain(place, request, reply) => {
                let _ = reply.send(self.turn.ask_chain(place, request));
            }
            ControlMessage::Runtime(event) => self.apply_runtime_event(event),
            ControlMessage::ShmAttached(client) => {
                self.endpoints.shm.adopt(&mut self.turn, *client);
            }
            ControlMessage::ShmGone(id) => self.endpoints.shm.remove_client(&mut self.turn, id),
            ControlMessage::Connection(accepted) => {
                self.endpoints.tcp.adopt(&mut self.turn, accepted);
            }
            ControlMessage::Drain => self.begin_drain(),
            ControlMessage::Stop => self.stopped = true,
        }
    }
}

impl<N: Nic> Drop for Worker<N> {
    fn drop(&mut self) {
        // Also in a panic: the other workers keep running without this one.
        self.fabric.end_worker(self.turn.index);
        self.fabric.mailbox(self.turn.index).close();
    }
}
