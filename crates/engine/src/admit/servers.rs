//! What serves clients without mqueues: the upstream servers of proxies, and the sockets of blocks.

use wire::DropReason;
use wire::nic::{Nic, PortIndex, StreamKey};
use wire::session::{Origin, ReplyTo};

use crate::base::arrival::{Arrival, Message, Refusal};
use crate::base::turn::Turn;
use crate::service::services::Services;

/// Whether a client's connection to a proxy of byte streams can be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Relayed {
    /// Yes.
    Ready,
    /// Not before the server has taken what waits for it.
    Waits,
    /// The server refuses the connection.
    Refused,
}

/// See the module documentation. By default there are none.
#[expect(unused_variables, reason = "the names are the documentation")]
pub(crate) trait Servers<N: Nic> {
    /// Whether it has the server of a service.
    fn serves(&self, service: usize) -> bool {
        false
    }

    /// Submits a request to the upstream server of its service.
    fn submit(
        &mut self,
        turn: &mut Turn<N>,
        services: &mut Services,
        service: usize,
        arrival: &Arrival,
        message: &mut impl Message,
    ) -> Result<(), Refusal> {
        Err(Refusal::Drop(DropReason::NoAccelerator))
    }

    /// Bytes of requests of a flow that no reply was charged to, if the service has flows.
    fn unspent(&mut self, service: usize, origin: &Origin) -> Option<u32> {
        None
    }

    /// A reply of this many bytes was charged to a flow.
    fn spend(&mut self, service: usize, origin: &Origin, bytes: u64) {}

    /// Whether a client is not read because too much waits for the server.
    fn holds_client(&mut self, service: usize, client: StreamKey) -> bool {
        false
    }

    /// Whether a client that sends nothing more has requests that its connection to the upstream
    /// server has not finished. If so, the client's connection is listed again when there are none.
    fn delays_close(&mut self, service: usize, client: StreamKey) -> bool {
        false
    }

    /// A client's connection has ended: its requests in flight have no recipient.
    fn close_stream(
        &mut self,
        turn: &mut Turn<N>,
        services: &mut Services,
        service: usize,
        client: StreamKey,
    ) {
    }

    /// Before a client's connection is read: it has one to the server.
    fn begin_relay(
        &mut self,
        turn: &mut Turn<N>,
        services: &mut Services,
        service: usize,
        client: &ReplyTo,
    ) -> Relayed {
        Relayed::Refused
    }

    /// Passes a chunk of a client on, which is counted as received. What the server's host does not
    /// take waits. Returns why it is lost.
    fn relay_to_server(
        &mut self,
        turn: &mut Turn<N>,
        services: &mut Services,
        service: usize,
        client: StreamKey,
        chunk: &[u8],
    ) -> Option<DropReason> {
        Some(DropReason::UpstreamRefused)
    }

    /// A client sends nothing more.
    fn end_relay_input(&mut self, turn: &mut Turn<N>, service: usize, client: StreamKey) {}

    /// Everything that waited for a client has been written to it. Returns whether both connections
    /// have ended.
    fn relay_taken(&mut self, turn: &mut Turn<N>, service: usize, client: StreamKey) -> bool {
        false
    }

    /// Whether a client's connection, and the one to the server, have ended as they should.
    fn is_relay_finished(&mut self, service: usize, client: StreamKey) -> bool {
        false
    }

    /// Connections may wait at a listener of blocks: accepts as many as blocks wait for. Returns
    /// whether more may wait for which there are blocks.
    fn accept(
        &mut self,
        turn: &mut Turn<N>,
        services: &Services,
        service: u16,
        port: PortIndex,
        socket: u16,
    ) -> bool {
        false
    }
}

/// There are none.
pub(crate) struct NoServers;

impl<N: Nic> Servers<N> for NoServers {}
