//! Idle connections of a service that drains: they end, so that no drain waits for them.
//!
//! A connection has no messages, so the engine cannot know whether its block owes the peer an answer. It therefore closes none itself.
//! When a connection is *idle*, its block gets `DRAINING` where it receives, as it gets `CLOSED` when the peer ends its direction: it may
//! still send an answer, closes the connection, and what it has sent is delivered. A block that ignores this keeps its connection until
//! `engine.drain_ms` is over.
//!
//! A connection is idle when nothing of it is on the way (no byte in its rings, in a transfer, or in the socket, which is read once more
//! after the drain began) and nothing was for a while: [`QUIET_NS`] if the side that answers spoke last, [`OWED_NS`] if it may owe
//! an answer. A connection that the block opened is judged only when the block has no accepted ones and the service no requests in flight, since
//! these may need it. What a peer sends after that is a new request, and is dropped.

use sockets::State;
use wire::nic::Nic;

use super::{Connection, KernelSockets};
use crate::base::keys::SlotId;
use crate::base::turn::Turn;
use crate::service::services::Services;

/// A connection whose last request was answered is idle after this long.
pub(super) const QUIET_NS: u64 = 100_000_000;
/// A connection on which the asking side spoke last is idle after this long.
const OWED_NS: u64 = 1_000_000_000;

/// Where the last bytes of a connection came from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Spoke {
    /// There were none.
    None,
    Peer,
    Block,
}

/// How far the end of an idle connection has got, since its service drains.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Departure {
    None,
    /// Its socket is read once more, for bytes that came before the drain.
    Looks,
    /// Its block gets no more bytes, and knows it.
    Told,
}

impl Connection {
    /// For how long it must be silent to be idle. `is_needed`: it is one of the block's own, and others may need it.
    fn idle_after_ns(&self, is_needed: bool) -> u64 {
        let asks = if self.is_accepted { Spoke::Peer } else { Spoke::Block };
        match (self.is_accepted || !is_needed, self.spoke == asks) {
            (false, _) => u64::MAX,
            (true, true) => OWED_NS,
            (true, false) => QUIET_NS,
        }
    }
}

impl KernelSockets {
    /// Whether connections of a block must end: its worker or its service stops, or its accelerator restarts.
    pub(super) fn drains_sockets<N: Nic>(
        &self,
        turn: &Turn<N>,
        services: &Services,
        service: u16,
        block: u32,
    ) -> bool {
        let sockets = self.by_slot.get(usize::from(service)).and_then(Option::as_ref);
        let is_closed = sockets.is_some_and(|sockets| sockets.closed);
        turn.draining || is_closed || services[usize::from(service)].is_block_paused(block)
    }

    /// Once a millisecond, for an open connection of a service that drains.
    pub(super) fn dismiss_if_idle<N: Nic>(
        &mut self,
        turn: &mut Turn<N>,
        services: &Services,
        id: SlotId,
    ) {
        let now_ns = turn.now_ns;
        let has_requests = services[usize::from(id.service)].in_flight() > 0;
        let Some(sockets) = self.of(id.service) else { return };
        let block = &mut sockets.blocks[id.block as usize];
        let is_needed = has_requests || block.serves_peers();
        let connection = &block.connections[usize::from(id.slot)];
        let silent_ns = now_ns.saturating_sub(connection.active_ns);
        if connection.departure == Departure::Told
            || connection.received_all
            || silent_ns < connection.idle_after_ns(is_needed)
        {
            return;
        }
        match block.sockets.has_bytes(id.slot.into()) {
            Ok(false) => {}
            Ok(true) => return,
            Err(_) => return self.break_block(turn, id.service, id.block),
        }
        let connection = &mut block.connections[usize::from(id.slot)];
        if connection.departure == Departure::None {
            (connection.departure, connection.readable) = (Departure::Looks, true);
            return self.list_to_read(id);
        }
        if connection.readable || connection.listed_to_read {
            return;
        }
        connection.departure = Departure::Told;
        block.sockets.dismiss(id.slot.into());
        sockets.note_written(id.block);
    }
}

impl super::BlockShare {
    /// Whether it has a connection that it accepted.
    fn serves_peers(&self) -> bool {
        let is_served = |slot: u32| {
            let state = self.sockets.slots()[slot as usize].state();
            matches!(state, State::Open | State::Closing)
                && self.connections[slot as usize].is_accepted
        };
        self.sockets.leased().any(is_served)
    }
}
