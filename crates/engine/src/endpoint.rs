//! Where messages come from and where replies go: one file per kind of endpoint, each with its own state.
//!
//! | endpoint | content |
//! |---|---|
//! | `udp.rs` | datagrams of clients |
//! | `tcp.rs` | TCP connections of clients |
//! | `shm.rs` | clients that are processes of this machine, through rings |
//! | `peer.rs` | the other workers: requests for mqueues of this one, replies for clients of theirs |
//! | `backend.rs` | requests of kernels to servers |
//! | `upstream.rs` | the servers behind proxies |
//! | `sockets.rs` | the peers of kernels that have connections of their own |
//! | `transfers.rs` | transfers that kernels ask for |
//!
//! [`set::Endpoints`] holds one of each and is the worker's interface to them.

#[macro_use]
mod table;

pub(crate) mod backend;
pub(crate) mod clients;
mod held;
pub(crate) mod peer;
mod pipeline;
pub(crate) mod port;
pub(crate) mod servers;
pub(crate) mod set;
pub(crate) mod shm;
pub(crate) mod sockets;
pub(crate) mod sources;
pub(crate) mod tcp;
pub(crate) mod transfers;
pub(crate) mod udp;
pub(crate) mod upstream;

use std::ops::Range;
use std::sync::Arc;

use ::sockets::Books;
use mqueue::Role;
use onpath::{Arranged, Chain, Link};
use wire::DropReason;
use wire::nic::{Event, Nic};
use wire::session::{Origin, ReplyTo};

use self::clients::Clients;
use crate::admit::servers::Servers;
use crate::base::arrival::Awaited;
use crate::base::keys::StreamOwner;
use crate::base::links::LinkIn;
use crate::base::metrics::ServiceCounters;
use crate::base::process::ShmClient;
use crate::base::topology::{Limits, Service};
use crate::base::turn::Turn;
use crate::depart::run::{Next, Run};
use crate::schedule::Schedule;
use crate::service::bundle::table::Completion;
use crate::service::ends::OtherEnds;
use crate::service::services::Services;
use crate::service::share::ServiceShare;

/// A source and a sink of messages. The steps of a turn come in the order of the methods; by default
/// an endpoint does nothing in them.
#[expect(unused_variables, reason = "the names are the documentation")]
pub(crate) trait Endpoint<N: Nic> {
    /// Something happened on a stream of an endpoint.
    fn event(&mut self, turn: &mut Turn<N>, event: Event, owner: StreamOwner) {}

    /// Receives requests, as far as the schedule allows for each service.
    fn receive(
        &mut self,
        turn: &mut Turn<N>,
        services: &mut Services,
        servers: &mut impl Servers<N>,
        schedule: &mut Schedule,
    ) {
    }

    /// Before the blocks are driven: publishes what they were sent.
    fn before_drive(
        &mut self,
        turn: &mut Turn<N>,
        services: &mut Services,
        schedule: &mut Schedule,
    ) {
    }

    /// Before the rings of a service are emptied: those that were left over in the last turn.
    fn gather(&mut self, turn: &mut Turn<N>, services: &mut Services, service: usize) {}

    /// A ring with this role of a block may hold messages to the engine.
    fn take(
        &mut self,
        turn: &mut Turn<N>,
        services: &mut Services,
        service: usize,
        ring: (Role, u32),
    ) {
    }

    /// Delivers replies of one TX ring, from the [next](Run::next) one, as long as they are for
    /// clients of this endpoint. Returns the message behind them.
    fn deliver(&mut self, turn: &mut Turn<N>, services: &mut Services, run: &mut Run) -> Next {
        Next::Reply
    }

    /// Gives one request its outcome: a reply that is not in a ring, or the reason of its loss. The
    /// request is no longer in flight; a loss has been counted.
    fn settle(
        &mut self,
        turn: &mut Turn<N>,
        services: &mut Services,
        service: usize,
        request: &Awaited,
        outcome: Result<&[u8], DropReason>,
    ) {
    }

    /// After the rings were emptied: exchanges bytes with servers and peers, and passes what they
    /// answer on to clients.
    fn exchange(
        &mut self,
        turn: &mut Turn<N>,
        services: &mut Services,
        schedule: &mut Schedule,
        clients: &mut Clients,
    ) {
    }

    /// Sends what the turn produced. With `may_defer`, some replies may wait for more.
    fn flush(
        &mut self,
        turn: &mut Turn<N>,
        services: &mut Services,
        servers: &mut impl Servers<N>,
        may_defer: bool,
    ) {
    }

    /// Once a millisecond: time limits of a service.
    fn expire(
        &mut self,
        turn: &mut Turn<N>,
        services: &mut Services,
        clients: &mut Clients,
        service: usize,
    ) {
    }

    /// Marks the server mqueues of blocks that wrote impossible words into other rings as corrupt.
    fn note_corrupt(&mut self, share: &mut ServiceShare, service: usize) {}

    /// Blocks of a service have ended, or their generation has. `are_lost`: the accelerator is.
    fn end_blocks(
        &mut self,
        turn: &mut Turn<N>,
        service: usize,
        blocks: Range<u32>,
        are_lost: bool,
    ) {
    }

    /// The blocks get the rings of the next generation; each endpoint takes its own out of `ends`.
    fn replace_rings(&mut self, service: usize, ends: &mut [OtherEnds]) {}

    /// Pauses or resumes receiving from the clients of a service.
    fn pause(&mut self, turn: &mut Turn<N>, service: u16, paused: bool) {}

    /// The connections of a service that leaves go on with its successor, if it takes them over.
    fn move_to(&mut self, turn: &mut Turn<N>, services: &Services, from: u16, to: u16) {}

    /// Stops receiving from the clients of a service, or of all.
    fn leave(
        &mut self,
        turn: &mut Turn<N>,
        services: &mut Services,
        servers: &mut impl Servers<N>,
        service: Option<u16>,
    ) {
    }

    /// Drops what is in flight of a service, for this reason.
    fn drop_requests(
        &mut self,
        turn: &mut Turn<N>,
        services: &mut Services,
        clients: &mut Clients,
        service: usize,
        reason: DropReason,
    ) {
    }

    /// A service ends: what is in its rings is dropped.
    fn release(&mut self, turn: &mut Turn<N>, service: u16) {}

    /// Gives the functions on the path to a backend this order, which is taken if there is such a
    /// path; returns those that it no longer has.
    fn arrange_path(
        &mut self,
        service: usize,
        backend: u16,
        order: &mut Vec<Arranged>,
    ) -> Vec<Link> {
        Vec::new()
    }

    /// The functions on the path to a backend.
    fn chain_of(&mut self, service: usize, backend: u16) -> Option<&mut Chain> {
        None
    }

    /// Time that the functions of a service have taken here since the last call.
    fn take_function_ns(&mut self, service: usize) -> u64 {
        0
    }

    /// Requests of a service in flight, and replies that have not been sent.
    fn outstanding(&self, service: u16) -> u64 {
        0
    }

    /// Whether requests of blocks are not answered, or not even taken. Those of ended blocks do not
    /// count.
    fn asks(&self, share: &ServiceShare, service: usize) -> bool {
        false
    }

    /// Whether these blocks have connections. Those of a generation that has ended are closed.
    fn is_connected(&self, service: u16, blocks: &Range<u32>) -> bool {
        false
    }

    /// Sets the limits of the engine.
    fn set_limits(&mut self, limits: &Limits) {}

    /// Bytes of the streams of a service's blocks, to blocks and from them: the books as far as they
    /// are not in its counters yet, and the bytes in rings.
    fn stream_bytes(&self, service: u16) -> Option<[(Books, u64); 2]> {
        None
    }

    /// When there is something to do without an event: 0 at once, `u64::MAX` never.
    fn wake_at(&self, now_ns: u64, services: &Services) -> u64 {
        u64::MAX
    }
}

/// A reply, or the reason of its loss, for a client of this worker.
pub(crate) struct HandedBack<'a> {
    pub(crate) service: usize,
    pub(crate) request: Awaited,
    pub(crate) outcome: Result<&'a [u8], DropReason>,
}

/// An endpoint with clients whose addresses are not in the token table: processes, and other workers.
#[expect(unused_variables, reason = "the names are the documentation")]
pub(crate) trait ClientEndpoint<N: Nic>: Endpoint<N> {
    /// One without clients, of an engine with this many workers.
    fn new(workers: usize) -> Self;

    /// Whether a client is one of its own. `worker` is this one.
    fn has_client(&self, to: &ReplyTo, worker: u16) -> bool;

    /// Delivers the replies of a completion to a client, as far as there is room. Returns the
    /// messages that have an outcome.
    fn deliver_bundle(
        &mut self,
        share: &mut ServiceShare,
        mqueue: u32,
        completion: &Completion,
        to: &ReplyTo,
    ) -> u64 {
        0
    }

    /// Whether there may be replies to [take](Self::take_replies).
    fn has_returned(&self) -> bool {
        false
    }

    /// Takes replies for clients of other endpoints, and delivers them with `settle`.
    fn take_replies(
        &mut self,
        turn: &mut Turn<N>,
        services: &mut Services,
        settle: impl FnMut(&mut Turn<N>, &mut Services, HandedBack<'_>),
    ) {
    }

    /// Whether there are answers to [take](Self::take_answers).
    fn has_answers(&self) -> bool {
        false
    }

    /// Takes answers of functions to datagrams: origin and length of each request, and the answer.
    fn take_answers(&mut self, answer: &mut dyn FnMut(&Origin, u32, &[u8])) {}

    /// Clients, and those of a service.
    fn connections(&self) -> usize {
        0
    }

    fn of_service(&self, service: u16) -> usize {
        0
    }

    /// The worker is about to sleep, or is awake again: clients wake it in between.
    fn set_parked(&self, parked: bool) {}

    /// Whether rings of clients seem to have messages.
    fn is_hinted(&self, services: &Services) -> bool {
        false
    }

    /// Whether rings between workers seem to have messages for a service.
    fn is_hinted_for(&self, service: u16) -> bool {
        false
    }

    /// A process attached.
    fn attach(
        &mut self,
        turn: &mut Turn<N>,
        services: &mut Services,
        client: &mut Option<ShmClient>,
    ) {
    }

    /// The process with this id is gone.
    fn detach(&mut self, turn: &mut Turn<N>, services: &mut Services, id: u64) {}

    /// The processes of a service go on with its successor, but for the departing ones.
    fn move_processes(&mut self, from: u16, to: u16, departing: &[u64]) {}

    /// Closes the clients of a leaving service that have nothing outstanding.
    fn close_leaving(&mut self, turn: &mut Turn<N>, services: &mut Services, service: u16) {}

    /// Closes all clients, with their outcomes.
    fn close_all(&mut self, turn: &mut Turn<N>, services: &mut Services) {}

    /// The end of a drain: drops messages that were not taken.
    fn discard(&mut self, turn: &mut Turn<N>, services: &mut Services) {}

    /// Sets or removes the link of a service from one worker, if the endpoint has links.
    fn set_link(
        &mut self,
        worker: usize,
        service: usize,
        link: &mut Option<LinkIn>,
    ) -> Option<LinkIn> {
        None
    }
}

/// An endpoint with state of its own for each service, which another thread prepares.
pub(crate) trait PerService {
    /// The state of a service.
    type Part: Send + 'static;

    /// The state of a service on one worker. The endpoint takes its rings out of `ends`.
    fn prepare(
        service: &Service,
        worker: u16,
        ends: &mut [OtherEnds],
        counters: &Arc<ServiceCounters>,
    ) -> Self::Part;

    /// Gives the path to a backend these functions, which are taken if there is such a path.
    fn set_path(_: &mut Self::Part, _backend: u16, _functions: &mut Vec<Arranged>) {}

    /// A service comes; returns what was in its slot.
    fn place<N: Nic>(&mut self, turn: &mut Turn<N>, service: u16, part: Self::Part) -> Self::Part;

    /// A service goes; returns its state, which another thread frees.
    fn remove<N: Nic>(&mut self, turn: &mut Turn<N>, service: u16) -> Self::Part;
}

/// Replaces the entry of a slot.
fn replace<T>(by_slot: &mut Vec<Option<T>>, service: u16, part: Option<T>) -> Option<T> {
    let slot = usize::from(service);
    if by_slot.len() <= slot {
        part.as_ref()?;
        by_slot.resize_with(slot + 1, || None);
    }
    std::mem::replace(&mut by_slot[slot], part)
}
