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

pub(crate) mod backend;
pub(crate) mod clients;
mod held;
pub(crate) mod peer;
mod pipeline;
pub(crate) mod port;
pub(crate) mod set;
pub(crate) mod shm;
pub(crate) mod sockets;
pub(crate) mod sources;
pub(crate) mod tcp;
pub(crate) mod transfers;
pub(crate) mod udp;
pub(crate) mod upstream;

use std::ops::Range;

use mqueue::Role;
use onpath::{Arranged, Chain, Link};
use wire::DropReason;
use wire::nic::{Event, Nic};

use self::clients::Clients;
use crate::admit::servers::Servers;
use crate::base::arrival::Awaited;
use crate::base::keys::StreamOwner;
use crate::base::turn::Turn;
use crate::depart::run::{Next, Run};
use crate::schedule::Schedule;
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

    /// When there is something to do without an event: 0 at once, `u64::MAX` never.
    fn wake_at(&self, now_ns: u64, services: &Services) -> u64 {
        u64::MAX
    }
}

/// An endpoint with state of its own for each service, which another thread prepares.
pub(crate) trait PerService<N: Nic>: Endpoint<N> {
    /// The state of a service.
    type Part: Send + 'static;

    /// A service comes; returns what was in its slot.
    fn place(&mut self, turn: &mut Turn<N>, service: u16, part: Self::Part) -> Self::Part;

    /// A service goes; returns its state, which another thread frees.
    fn remove(&mut self, turn: &mut Turn<N>, service: u16) -> Self::Part;
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
