//! Applies the messages in a worker's [mailbox](super::mailbox).

use wire::nic::Nic;

use crate::base::fabric::Fabric;
use crate::control::message::{ControlMessage, MessageOf};
use crate::state::State;

/// Messages that a worker takes in one turn.
const MESSAGES_PER_TURN: usize = 32;

impl<N: Nic> State<N> {
    /// Applies the messages in the mailbox.
    #[inline]
    pub(crate) fn drain_mailbox(&mut self, fabric: &Fabric<MessageOf<N>>) {
        if fabric.mailbox(self.turn.index).len() > 0 {
            self.apply_messages(fabric);
        }
    }

    #[cold]
    fn apply_messages(&mut self, fabric: &Fabric<MessageOf<N>>) {
        // The rest is taken in the next turn, which starts at once.
        self.turn.busy();
        for _ in 0..MESSAGES_PER_TURN {
            let Some(message) = fabric.mailbox(self.turn.index).take() else { return };
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
                let _ = reply.send(self.endpoints.ask_chain(
                    &self.turn,
                    &mut self.services,
                    place,
                    request,
                ));
            }
            ControlMessage::Runtime(event) => self.apply_runtime_event(event),
            ControlMessage::ShmAttached(client) => {
                self.endpoints.clients.attach(&mut self.turn, &mut self.services, *client);
            }
            ControlMessage::ShmGone(id) => {
                self.endpoints.clients.detach(&mut self.turn, &mut self.services, id)
            }
            ControlMessage::Connection(accepted) => {
                self.endpoints.clients.tcp.adopt(&mut self.turn, &mut self.services, accepted);
            }
            ControlMessage::Drain => self.begin_drain(),
            ControlMessage::Stop => self.stopped = true,
        }
    }
}
