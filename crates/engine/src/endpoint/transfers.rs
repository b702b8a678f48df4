//! Transfers of kernels: blocks ask for bytes to be moved between files, peers, their memory and
//! their sockets (`crate::base::transfers`).
//!
//! A block writes commands into a ring of its own and gets exactly one answer for each, with the tag
//! of the command. A command that is malformed or not allowed is answered at once, others when the
//! transfer has ended. At most `in_flight` transfers of a block are executed at a time; further
//! commands wait in its ring. What a block that has ended had asked for is cancelled.
//!
//! A sink may be a socket of the block: the transfer then borrows its connection
//! (`endpoint/sockets/lend.rs`), behind everything that the block wrote to it before the command.

mod rings;

use std::ops::Range;
use std::sync::Arc;

use mqueue::Role;
use mqueue::abi::transfer_status;
use wire::nic::Nic;

pub(crate) use self::rings::ServiceTransfers;
use self::rings::{Asked, Stage};
use crate::admit::servers::Servers;
use crate::base::keys::SlotId;
use crate::base::metrics::ServiceCounters;
use crate::base::topology::{POLL_NS, Service};
use crate::base::turn::Turn;
use crate::endpoint::sockets::{KernelSockets, LoanState};
use crate::endpoint::{Endpoint, PerService, replace};
use crate::schedule::Schedule;
use crate::service::ends::OtherEnds;
use crate::service::services::Services;
use crate::service::share::ServiceShare;

/// The transfers of all services of a worker.
#[derive(Default)]
pub(crate) struct KernelTransfers {
    /// Of services with transfers.
    by_slot: Vec<Option<Box<ServiceTransfers>>>,
}

impl KernelTransfers {
    fn of(&mut self, service: usize) -> Option<&mut ServiceTransfers> {
        self.by_slot.get_mut(service)?.as_deref_mut()
    }

    /// Takes commands that come before what blocks have written to their sockets, and lends
    /// connections.
    pub(crate) fn borrow<N: Nic>(&mut self, turn: &mut Turn<N>, sockets: &mut KernelSockets) {
        if self.by_slot.is_empty() {
            return;
        }
        if !mutants::on("overtake_command") {
            sockets.note_written();
            let mut at = 0;
            while let Some((service, block)) = sockets.writing(at) {
                if let Some(transfers) = self.of(service.into()) {
                    transfers.take_of_block(block, turn.now_ns);
                }
                at += 1;
            }
        }
        for (service, transfers) in (0..).zip(&mut self.by_slot) {
            if let Some(transfers) = transfers {
                for ring in 0..transfers.rings.len() {
                    lend_to(transfers, ring, turn, (service, sockets));
                }
            }
        }
    }
}

/// Lends connections to the commands of a ring, and takes them back.
fn lend_to<N: Nic>(
    transfers: &mut ServiceTransfers,
    ring: usize,
    turn: &mut Turn<N>,
    (service, sockets): (u16, &mut KernelSockets),
) {
    let block = transfers.rings[ring].server;
    sockets.set_unread(service, block, transfers.unread(ring, turn.now_ns));
    if !transfers.rings[ring].uses_sockets {
        return;
    }
    let mut at = 0;
    while let Some(asked) = transfers.rings[ring].asked.get(at) {
        let Asked { number, stage, .. } = *asked;
        let Some((id, lease, position)) = asked.socket(service, block) else {
            at += 1;
            continue;
        };
        let refused = match stage {
            Stage::Asked => match sockets.lend(turn, id, lease, (position, number)) {
                Ok(()) => {
                    transfers.rings[ring].asked[at].stage = Stage::Waits;
                    None
                }
                Err(status) => Some(status),
            },
            Stage::Late => {
                // What the block has sent behind it must not go out.
                sockets.break_loan(turn, id, lease);
                Some(transfer_status::TIMEOUT)
            }
            Stage::Waits => wait_for_loan(transfers, (ring, at), turn, (id, lease), sockets),
            Stage::Runs => None,
            Stage::Ended { is_done } => {
                match is_done {
                    true => sockets.give_back(turn, id, (lease, number)),
                    false => sockets.break_loan(turn, id, lease),
                }
                transfers.rings[ring].asked.remove(at);
                continue;
            }
        };
        match refused {
            Some(status) => transfers.refuse(ring, at, status),
            None => at += 1,
        }
    }
    let ring = &mut transfers.rings[ring];
    ring.uses_sockets = ring.asked.iter().any(Asked::has_socket);
}

/// A transfer that waits for its connection: begins it if that is ready. Returns why it never will.
fn wait_for_loan<N: Nic>(
    transfers: &mut ServiceTransfers,
    (ring, at): (usize, usize),
    turn: &mut Turn<N>,
    (id, lease): (SlotId, u32),
    sockets: &mut KernelSockets,
) -> Option<u32> {
    match sockets.loan(id, lease, transfers.rings[ring].asked[at].number) {
        LoanState::Gone => Some(transfer_status::CLOSED),
        LoanState::Ready => {
            let lent = sockets.begin_loan(turn, id);
            if lent.is_some_and(|lent| transfers.start(ring, at, Some(lent))) {
                return None;
            }
            sockets.break_loan(turn, id, lease);
            Some(transfer_status::EXHAUSTED)
        }
        LoanState::Waits { first_since_ns: Some(since_ns) }
            if turn.now_ns.saturating_sub(since_ns) >= transfers.timeout_ns(ring) =>
        {
            sockets.break_loan(turn, id, lease);
            Some(transfer_status::TIMEOUT)
        }
        LoanState::Waits { .. } | LoanState::Lent => None,
    }
}

impl PerService for KernelTransfers {
    type Part = Option<Box<ServiceTransfers>>;

    fn prepare(
        service: &Service,
        _: u16,
        ends: &mut [OtherEnds],
        counters: &Arc<ServiceCounters>,
    ) -> Self::Part {
        ServiceTransfers::new(service, ends, counters)
    }

    fn place<N: Nic>(&mut self, _: &mut Turn<N>, service: u16, part: Self::Part) -> Self::Part {
        replace(&mut self.by_slot, service, part)
    }

    fn remove<N: Nic>(&mut self, _: &mut Turn<N>, service: u16) -> Self::Part {
        replace(&mut self.by_slot, service, None)
    }
}

impl<N: Nic> Servers<N> for KernelTransfers {}

impl<N: Nic> Endpoint<N> for KernelTransfers {
    fn replace_rings(&mut self, service: usize, ends: &mut [OtherEnds]) {
        if let Some(transfers) = self.of(service) {
            transfers.replace_rings(ends);
        }
    }

    /// Answers commands whose transfers have ended, and publishes the answers.
    fn before_drive(&mut self, turn: &mut Turn<N>, services: &mut Services, _: &mut Schedule) {
        let _ = turn;
        for (transfers, share) in self.by_slot.iter_mut().zip(&mut services[..]) {
            if let Some(transfers) = transfers {
                transfers.end_transfers();
                transfers.publish(|server, region_mqueue| share.ring(server, region_mqueue));
            }
        }
    }

    fn gather(&mut self, turn: &mut Turn<N>, _: &mut Services, service: usize) {
        if let Some(transfers) = self.of(service) {
            transfers.take_again(turn.now_ns);
        }
    }

    fn take(
        &mut self,
        turn: &mut Turn<N>,
        _: &mut Services,
        service: usize,
        (role, block): (Role, u32),
    ) {
        if let Some(transfers) = self.of(service)
            && let Some(ring) = transfers.ring_of(role, block)
        {
            transfers.take_commands(ring, turn.now_ns);
        }
    }

    fn end_blocks(&mut self, _: &mut Turn<N>, service: usize, blocks: Range<u32>, _: bool) {
        if let Some(transfers) = self.of(service) {
            transfers.end_blocks(&blocks);
        }
    }

    fn note_corrupt(&mut self, share: &mut ServiceShare, service: usize) {
        if let Some(transfers) = self.of(service) {
            for server in transfers.corrupt.drain(..) {
                share.mqueues[server as usize].tx_corrupt = true;
            }
        }
    }

    fn asks(&self, share: &ServiceShare, service: usize) -> bool {
        let transfers = self.by_slot.get(service).and_then(Option::as_ref);
        transfers.is_some_and(|of| of.asks(|server| share.loads[server as usize].alive))
    }

    fn wake_at(&self, now_ns: u64, services: &Services) -> u64 {
        let of = self.by_slot.iter().zip(&services[..]).filter_map(|(transfers, share)| {
            let transfers = transfers.as_deref()?;
            Some(match transfers.has_work() {
                true => 0,
                false if transfers.is_busy() || share.runs_off_thread() => now_ns + POLL_NS,
                false => u64::MAX,
            })
        });
        of.min().unwrap_or(u64::MAX)
    }
}
