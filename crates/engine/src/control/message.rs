//! The messages in a worker's [mailbox](super::mailbox).

use std::sync::Arc;
use std::sync::mpsc::Sender;

use wire::DropReason;
use wire::nic::{Nic, PortIndex};

use crate::base::accelerator::StartError;
use crate::base::fabric::Accepted;
use crate::base::links::ServiceLinks;
use crate::base::process::ShmClient;
use crate::base::topology::{Limits, Polling};
use crate::control::service_install::ServiceInstall;
use crate::endpoint::servers::Parts;
use crate::endpoint::udp::UdpPort;
use crate::service::chain::{ChainPlace, ChainReply, ChainRequest};
use crate::service::ends::Attachment;
use crate::service::share::ServiceShare;
use crate::service::vote::DrainBarrier;

/// A request to a worker. `S` is the [`Nic::Socket`] and `P` the [`Nic::Port`] of its network.
pub enum ControlMessage<S, P> {
    /// Install a service share, which is not switched on yet. After an error nothing has changed.
    Install(Box<ServiceInstall<P>>, Sender<Result<(), StartError>>),
    /// Switch to another set of services, in one step.
    Switch(Arc<Switch>, Sender<()>),
    /// The drain time of the leaving service in this slot is over.
    Expire(u16),
    /// Remove the service in this slot.
    Release(u16, Sender<Detached>),
    /// An event of an accelerator whose blocks run on other threads or in another process.
    Runtime(RuntimeEvent),
    /// A shared-memory client of this worker attached.
    ShmAttached(Box<ShmClient>),
    /// The shared-memory client with this id is gone.
    ShmGone(u64),
    /// About the functions of a chain.
    Chain(ChainPlace, ChainRequest, Sender<ChainReply>),
    /// A connection that another worker accepted for this one.
    Connection(Accepted<S>),
    /// Accept no new requests; answer the accepted ones.
    Drain,
    /// Run no further turn.
    Stop,
}

/// The messages of a worker that uses network `N`.
pub type MessageOf<N> = ControlMessage<<N as Nic>::Socket, <N as Nic>::Port>;

/// What happened to one accelerator of one service: `service` is its slot, `accelerator` the index in the service's list.
pub enum RuntimeEvent {
    /// The blocks run and take requests.
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
    /// The rings of the next generation, for the same blocks.
    RingsReplaced {
        /// The service.
        service: u16,
        /// The accelerator.
        accelerator: u16,
        /// This worker's share of it; [`crate::base::accelerator::Blocks::present`] is not called.
        attachment: Attachment,
    },
    /// A planned change is about to end this generation: the service is paused until the next one starts, see
    /// `control/pause.rs`.
    Paused {
        /// The service.
        service: u16,
        /// The accelerator.
        accelerator: u16,
        /// Time limit for accepted requests, in nanoseconds; the generation ends by then.
        drain_ns: u64,
        /// Where the workers vote that all accepted requests are answered.
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
    /// Ports that stay open; from now on they belong to the service in this slot.
    pub lead: Vec<(PortIndex, u16, Option<u16>)>,
    /// Ports that are no longer read; they are closed when their service is released.
    pub stop: Vec<PortIndex>,
    /// The new limits. Open connections keep their window; `connections` does not change.
    pub limits: Limits,
    /// What an idle worker does.
    pub polling: Polling,
}

impl Switch {
    /// A switch that changes nothing.
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
    /// Where the workers vote that nothing of the service is outstanding.
    pub barrier: DrainBarrier,
}

/// What a worker has removed. It is dropped on another thread, because freeing the memory takes long.
#[derive(Default)]
pub struct Detached {
    pub(super) _share: Option<ServiceShare>,
    pub(super) _parts: Option<Parts>,
    pub(super) _links: Option<ServiceLinks>,
    pub(super) _ports: Vec<UdpPort>,
}
