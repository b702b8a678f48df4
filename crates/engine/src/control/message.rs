//! What the messages in a worker's [mailbox](super::mailbox) ask for.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::mpsc::Sender;

use wire::nic::{Nic, PortIndex};

use crate::accelerator::StartError;
use crate::control::drain::Detached;
use crate::control::generation::RuntimeEvent;
use crate::control::install::{ServiceInstall, Switch};
use crate::endpoint::shm::ShmClient;
use crate::service::chain::Chain;
use crate::worker::Worker;

/// Messages that a worker takes in one turn.
const MESSAGES_PER_TURN: usize = 32;

/// What a worker is asked to do. `S` is the [`Nic::Socket`] and `P` the [`Nic::Port`] of its network.
pub enum ControlMessage<S, P> {
    /// Take a service's share, which is not switched on yet. With an error nothing has changed.
    Install(Box<ServiceInstall<P>>, Sender<Result<(), StartError>>),
    /// Change over to other services, all at once.
    Switch(Arc<Switch>, Sender<()>),
    /// The time of the leaving service in this slot is over.
    Expire(u16),
    /// Let go of the service in this slot.
    Release(u16, Sender<Detached>),
    /// About an accelerator whose blocks run elsewhere.
    Runtime(RuntimeEvent),
    /// A shared-memory client of this worker attached.
    ShmAttached(Box<ShmClient>),
    /// The shared-memory client with this id is gone.
    ShmGone(u64),
    /// Attach a chain of functions to the service in this slot, or detach the one it has, which is sent back.
    Chain(u16, Option<Box<dyn Chain>>, Sender<Option<Box<dyn Chain>>>),
    /// A connection that another worker accepted for this one.
    Connection(Accepted<S>),
    /// Accept nothing new; answer what was accepted.
    Drain,
    /// Take no further turn.
    Stop,
}

/// The messages of a worker over the network `N`.
pub type MessageOf<N> = ControlMessage<<N as Nic>::Socket, <N as Nic>::Port>;

/// An accepted connection on its way to its worker.
pub struct Accepted<S> {
    pub(crate) port: PortIndex,
    pub(crate) socket: S,
    pub(crate) peer: SocketAddr,
}

impl<N: Nic> Worker<N> {
    /// Does what messages ask for.
    #[inline]
    pub(crate) fn drain_mailbox(&mut self) {
        if self.turn.fabric.mailbox(self.turn.index).len() > 0 {
            self.apply_messages();
        }
    }

    #[cold]
    fn apply_messages(&mut self) {
        // The next turn takes the rest, and comes at once.
        self.turn.busy();
        for _ in 0..MESSAGES_PER_TURN {
            let Some(message) = self.turn.fabric.mailbox(self.turn.index).take() else { return };
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
            ControlMessage::Chain(slot, chain, reply) => {
                let _ = reply.send(self.turn.replace_chain(slot, chain));
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
        self.turn.fabric.mailbox(self.turn.index).close();
    }
}
