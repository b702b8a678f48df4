//! Where messages come from and where replies go: one file per kind of endpoint, each with its own state.
//!
//! | endpoint | clients |
//! |---|---|
//! | `udp.rs` | datagrams |
//! | `tcp.rs` | TCP connections |
//! | `shm.rs` | processes of this machine, through rings |
//! | `peer.rs` | the other workers: requests for mqueues of this one, replies for clients of theirs |
//! | `backend.rs` | requests of kernels: see there |
//! | `upstream.rs` | none: the servers behind proxies |
//! | `sockets.rs` | none: the peers of kernels that have connections of their own |
//!
//! [`set::Endpoints`] holds one of each and is the worker's interface to them.

pub(crate) mod backend;
mod held;
pub(crate) mod peer;
mod pipeline;
pub(crate) mod port;
pub(crate) mod run;
pub(crate) mod set;
pub(crate) mod shm;
pub(crate) mod sockets;
pub(crate) mod sources;
pub(crate) mod tcp;
pub(crate) mod udp;
pub(crate) mod upstream;

use wire::DropReason;
use wire::nic::Nic;

use self::run::{Next, Run};
use crate::base::arrival::Awaited;
use crate::schedule::Schedule;
use crate::turn::Turn;

/// A source of requests and a sink of replies.
pub(crate) trait Endpoint<N: Nic> {
    /// Receives requests, as far as the schedule allows for each service.
    fn receive(&mut self, turn: &mut Turn<N>, schedule: &mut Schedule);

    /// Delivers replies of one TX ring, from the [next](Run::next) one, as long as they are for clients of this
    /// endpoint. Returns the message behind them.
    fn deliver(&mut self, turn: &mut Turn<N>, run: &mut Run) -> Next;

    /// Gives one request its outcome: a reply that is not in a ring, or the reason of its loss. The request is no
    /// longer in flight; a loss has been counted.
    fn settle(
        &mut self,
        turn: &mut Turn<N>,
        service: usize,
        request: &Awaited,
        outcome: Result<&[u8], DropReason>,
    );

    /// Sends what the turn produced. With `may_defer`, some replies may wait for more.
    fn flush(&mut self, turn: &mut Turn<N>, may_defer: bool);

    /// Pauses or resumes receiving from the clients of a service.
    fn pause(&mut self, turn: &mut Turn<N>, service: u16, paused: bool);

    /// Stops receiving from the clients of a service, or of all.
    fn leave(&mut self, turn: &mut Turn<N>, service: Option<u16>);

    /// Replies of a service that have not been sent.
    fn outstanding(&self, service: u16) -> u64;

    /// When there is something to do without an event: 0 at once, `u64::MAX` never.
    fn wake_at(&self, now_ns: u64) -> u64;
}
