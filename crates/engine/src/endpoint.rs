//! Where messages come from and where replies go, one file each, with its own state.
//!
//! | endpoint | clients |
//! |---|---|
//! | `udp.rs` | datagrams |
//! | `tcp.rs` | TCP connections |
//! | `shm.rs` | processes of this machine, through rings |
//! | `peer.rs` | the other workers: requests for mqueues of this one, replies for clients of theirs |
//! | `backend.rs` | what kernels ask, and not a client: see there |
//!
//! [`set::Endpoints`] holds one of each and is all that the worker knows of them.

pub(crate) mod backend;
pub(crate) mod peer;
pub(crate) mod port;
pub(crate) mod run;
pub(crate) mod set;
pub(crate) mod shm;
pub(crate) mod sources;
pub(crate) mod stream_keys;
pub(crate) mod tcp;
pub(crate) mod udp;

use wire::DropReason;
use wire::nic::Nic;

use self::run::{Next, Run};
use crate::schedule::Schedule;
use crate::service::arrival::Awaited;
use crate::turn::Turn;

/// A source of requests and a sink of replies.
pub(crate) trait Endpoint<N: Nic> {
    /// Takes requests in, as far as the schedule lets each service have its turn.
    fn receive(&mut self, turn: &mut Turn<N>, schedule: &mut Schedule);

    /// Delivers replies of one TX ring, from the one that is [next](Run::next), as long as they are for clients of this endpoint.
    /// Returns what comes next.
    fn deliver(&mut self, turn: &mut Turn<N>, run: &mut Run) -> Next;

    /// Gives one request its outcome: a reply that is not in a ring, or why there is none. The request is no longer under way;
    /// a loss has been counted.
    fn settle(
        &mut self,
        turn: &mut Turn<N>,
        service: usize,
        request: &Awaited,
        outcome: Result<&[u8], DropReason>,
    );

    /// Sends what the turn produced. With `patient` some may stay for more.
    fn flush(&mut self, turn: &mut Turn<N>, patient: bool);

    /// The clients of a service are no longer heard, or are again.
    fn pause(&mut self, turn: &mut Turn<N>, service: u16, paused: bool);

    /// Nothing new is taken from the clients of a service, or of all.
    fn leave(&mut self, turn: &mut Turn<N>, service: Option<u16>);

    /// Replies of a service that have not left.
    fn outstanding(&self, service: u16) -> u64;

    /// When there is something to do without an event: 0 at once, `u64::MAX` never.
    fn wake_at(&self, now_ns: u64) -> u64;
}
