//! Slots that a block has closed, as long as the peer may still send.
//!
//! A host kernel answers input that it can give to no one with a reset, and a reset can destroy what the peer has not read yet: the answer
//! itself, if a block answers early and closes. So input of a closing connection is read and dropped; when everything was sent, the peer
//! reads the end, and the connection is closed when the peer has ended its direction as well, or is quiet. One that goes on sending is reset after
//! `limits.slow_client_ms`. While the service drains, the silence before the end counts as well, and less of it is enough: a peer with
//! an idle connection does not notice the end before it uses the connection again.

use sockets::End;
use wire::nic::{Close, Nic, Read};

use super::{Connection, KernelSockets, drain};
use crate::base::keys::SlotId;
use crate::base::turn::Turn;
use crate::service::services::Services;

/// A peer that has sent nothing for this long after the end is not waited for.
const QUIET_NS: u64 = 1_000_000_000;
/// Bytes of one connection that are dropped in one turn, about: sound connections come first.
const DROPPED_BYTES: usize = 64 << 10;

impl Connection {
    /// Whether the peer of one that lingers is quiet.
    pub(super) fn is_quiet(&self, now_ns: u64, slow_client_ns: u64, drains: bool) -> bool {
        let quiet_ns = if drains { drain::QUIET_NS } else { QUIET_NS };
        self.lingers && now_ns.saturating_sub(self.active_ns) >= quiet_ns.min(slow_client_ns)
    }
}

impl KernelSockets {
    /// Everything that the block of a closing slot wrote was sent.
    pub(super) fn linger<N: Nic>(&mut self, turn: &mut Turn<N>, services: &Services, id: SlotId) {
        let drains = self.drains_sockets(turn, services, id.service, id.block);
        let Turn { nic, now_ns, slow_client_ns, .. } = turn;
        let Some(sockets) = self.of(id.service) else {
            return;
        };
        let share = &mut sockets.blocks[id.block as usize];
        let connection = &mut share.connections[usize::from(id.slot)];
        if connection.received_all || mutants::on("close_while_peer_sends") {
            return self.end_socket(turn, id, End::Closed, Close::Graceful, true);
        }
        if !std::mem::replace(&mut connection.shut, true) {
            nic.shutdown(connection.key);
        }
        if !std::mem::replace(&mut connection.lingers, true) {
            if !drains {
                connection.active_ns = *now_ns;
            }
            connection.deadline_ns = *now_ns + *slow_client_ns;
        }
    }

    /// Drops input of a closing slot; returns how many bytes.
    pub(super) fn drop_input<N: Nic>(&mut self, turn: &mut Turn<N>, id: SlotId) -> usize {
        let Turn { nic, now_ns, scratch, .. } = turn;
        let Some(sockets) = self.of(id.service) else {
            return 0;
        };
        let share = &mut sockets.blocks[id.block as usize];
        let connection = &mut share.connections[usize::from(id.slot)];
        if !connection.readable || connection.received_all {
            return 0;
        }
        let most = scratch.len().min(DROPPED_BYTES);
        let mut dropped = 0;
        match nic.read(connection.key, &mut scratch[..most]) {
            Read::Bytes(count) => {
                (connection.readable, dropped) = (count == most, count);
                connection.active_ns = *now_ns;
                share.sockets.drop_received(id.slot.into(), count);
            }
            Read::Empty => connection.readable = false,
            Read::Closed => (connection.readable, connection.received_all) = (false, true),
            Read::Broken => {
                self.end_socket(turn, id, End::ResetByPeer, Close::Reset, true);
                return 0;
            }
        }
        let (again, is_over) = (connection.readable, connection.lingers && connection.received_all);
        turn.busy();
        if is_over {
            self.end_socket(turn, id, End::Closed, Close::Graceful, true);
        } else if again {
            self.list_to_read(id);
        }
        dropped
    }
}
