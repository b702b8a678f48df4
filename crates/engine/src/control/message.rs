//! What the messages in a worker's [mailbox](super::mailbox) ask for.

use std::sync::Arc;
use std::sync::mpsc::Sender;

use wire::DropReason;
use wire::nic::{Nic, PortIndex};

use crate::accelerator::StartError;
use crate::control::service_install::ServiceInstall;
use crate::control::vote::DrainBarrier;
use crate::endpoint::peer::links::ServiceLinks;
use crate::endpoint::shm::ShmClient;
use crate::endpoint::udp::UdpPort;
use crate::fabric::Accepted;
use crate::service::chain::Chain;
use crate::service::ends::Attachment;
use crate::service::share::ServiceShare;
use crate::topology::{Limits, Polling};

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

/// What happened to one accelerator of one service: `service` is its slot, `accelerator` the index in the service's list.
pub enum RuntimeEvent {
    /// The blocks run: requests may come.
    Started {
        /// The service.
        service: u16,
        /// The accelerator.
        accelerator: u16,
    },
    /// The blocks do not run any more.
    Ended {
        /// The service.
        service: u16,
        /// The accelerator.
        accelerator: u16,
        /// Why its requests in flight are lost.
        reason: DropReason,
    },
    /// The rings of the next generation, of the same blocks.
    RingsReplaced {
        /// The service.
        service: u16,
        /// The accelerator.
        accelerator: u16,
        /// This worker's share; [`crate::accelerator::Blocks::present`] is not asked.
        attachment: Attachment,
    },
    /// A planned change is about to end this generation: the service is paused until the next one starts, see
    /// `control/pause.rs`.
    Paused {
        /// The service.
        service: u16,
        /// The accelerator.
        accelerator: u16,
        /// How long accepted requests may take, in nanoseconds; the generation ends by then.
        drain_ns: u64,
        /// Where the workers vote that all of them are answered.
        barrier: DrainBarrier,
    },
    /// This generation continues: the pause ends.
    Resumed {
        /// The service.
        service: u16,
        /// The accelerator.
        accelerator: u16,
    },
}

/// What [`ControlMessage::Switch`](crate::ControlMessage::Switch) changes.
#[derive(Clone, Debug)]
pub struct Switch {
    /// Services that leave.
    pub leave: Vec<Leave>,
    /// Ports that stay and lead to the service in this slot from now on.
    pub lead: Vec<(PortIndex, u16)>,
    /// Ports that are no longer read; they are closed when their service is released.
    pub stop: Vec<PortIndex>,
    /// The new limits. Open connections keep their window; `connections` does not change.
    pub limits: Limits,
    /// What an idle worker does.
    pub polling: Polling,
}

impl Switch {
    /// Nothing leaves and no port leads elsewhere.
    pub fn new(limits: Limits, polling: Polling) -> Self {
        Self { leave: Vec::new(), lead: Vec::new(), stop: Vec::new(), limits, polling }
    }
}

/// A service that leaves.
#[derive(Clone, Debug)]
pub struct Leave {
    /// Its slot.
    pub slot: u16,
    /// The slot whose service takes over its connections. Without one they are closed after their replies.
    pub successor: Option<u16>,
    /// The slot whose service takes over its shared-memory clients; the regions must have the same layout.
    pub shm_successor: Option<u16>,
    /// Shared-memory clients, by id, that the successor does not take over, because their port is removed.
    pub departing: Vec<u64>,
    /// Where the workers vote that they have nothing left.
    pub barrier: DrainBarrier,
}

/// What a worker gave up. It is dropped on another thread, because freeing the memory takes long.
#[derive(Default)]
pub struct Detached {
    pub(super) _share: Option<ServiceShare>,
    pub(super) _links: Option<ServiceLinks>,
    pub(super) _ports: Vec<UdpPort>,
}
