//! What a worker does once a millisecond: time-outs, dead mqueues, credit hints, idle clients.

use wire::DropReason;
use wire::nic::Nic;

use crate::endpoint::set::Endpoints;
use crate::service::share::ServiceShare;
use crate::turn::Turn;

/// Housekeeping happens once in this time.
const TICK_NS: u64 = 1_000_000;
/// Between two log lines about connections that were shed.
const SHED_REPORT_NS: u64 = 10_000_000_000;

/// What housekeeping remembers.
#[derive(Default)]
pub(crate) struct Housekeeping {
    next_tick_ns: u64,
    /// Before this it says no more about connections that were shed.
    shed_report_ns: u64,
    /// Blocks that ended, and why.
    ended: Vec<(u32, u64)>,
    /// A block of this worker hangs or has hung.
    hung: bool,
}

impl Housekeeping {
    /// Whether it is time; then the next time is set.
    #[inline]
    pub(crate) fn is_due(&mut self, now_ns: u64) -> bool {
        let is_due = now_ns >= self.next_tick_ns;
        if is_due {
            self.next_tick_ns = now_ns + TICK_NS;
        }
        is_due
    }

    pub(crate) fn hung(&self) -> bool {
        self.hung
    }

    /// What is about requests, backends, mqueues and the other workers.
    pub(crate) fn run<N: Nic>(&mut self, turn: &mut Turn<N>, endpoints: &mut Endpoints) {
        turn.outbound.retry_losses();
        for service in 0..turn.services.len() {
            endpoints.expire_requests(turn, service);
            let Turn { services, nic, now_ns, .. } = turn;
            let share = &mut services[service];
            share.backends.expire_backends(nic, *now_ns);
            share.look_for_late(*now_ns);
            share.unsample_ended();
            if share.leaving.is_none() {
                share.observe_depth();
            }
            if self.mark_dead_mqueues(turn, service) {
                endpoints.end_requests_of_dead_mqueues(turn, service, DropReason::MqueueDead);
            }
        }
        if turn.shared.workers() > 1 {
            turn.publish_credit();
            turn.read_credit();
        }
    }

    /// What is about connections, and the gauges.
    pub(crate) fn look_at_clients<N: Nic>(
        &mut self,
        turn: &mut Turn<N>,
        endpoints: &mut Endpoints,
    ) {
        endpoints.tcp.sweep(turn);
        let connections = endpoints.tcp.open_count() + endpoints.shm.len();
        turn.counters.connections.set(connections as u64);
        self.count_below(turn);
    }

    /// Marks the mqueues of blocks that ended or hang, and of those that wrote impossible words, as dead. Whether there are any.
    fn mark_dead_mqueues<N: Nic>(&mut self, turn: &mut Turn<N>, service: usize) -> bool {
        let mut died = false;
        let draining = turn.draining;
        let share = &mut turn.services[service];
        let mut hangs = false;
        for drive in 0..share.accelerators.len() {
            share.accelerators[drive].blocks.ended(&mut self.ended);
            for (block, reason) in self.ended.drain(..) {
                if reason == mqueue::abi::reason::HUNG {
                    hangs = true;
                    share.hung_blocks += 1;
                }
                died |= end_block(share, drive, block, reason, draining);
            }
        }
        if hangs {
            self.hung = true;
            turn.count_hung_blocks();
        }
        let share = &mut turn.services[service];
        share.note_corrupt_clients();
        for mqueue in 0..share.mqueues.len() {
            let entry = &share.mqueues[mqueue];
            if share.loads[mqueue].alive && entry.tx_corrupt {
                tracing::error!(
                    service = &*share.name,
                    block = entry.block,
                    "an accelerator wrote impossible ring words; the mqueue is dead"
                );
                let (drive, block) = (usize::from(entry.attachment), entry.block);
                share.accelerators[drive].blocks.condemn(block);
                died |= share.mark_dead(mqueue as u32);
            }
        }
        died
    }

    /// Takes over what the network counts itself, and says now and then that it turned clients away.
    fn count_below<N: Nic>(&mut self, turn: &Turn<N>) {
        let below = turn.nic.counters();
        let shed = below.shed_connections - turn.counters.shed_connections.value();
        turn.counters.set_below(&below);
        if shed > 0 && turn.now_ns >= self.shed_report_ns {
            self.shed_report_ns = turn.now_ns + SHED_REPORT_NS;
            tracing::warn!(
                shed = below.shed_connections,
                "no descriptor is free, so connections are reset: raise `ulimit -n` or lower \
                 limits.connections"
            );
        }
    }
}

/// A block ended or hangs: its mqueue is dead. Whether it was not before.
fn end_block(
    share: &mut ServiceShare,
    drive: usize,
    block: u32,
    reason: u64,
    draining: bool,
) -> bool {
    let of_block = |m: &crate::service::mqueues::ServerMqueue| {
        usize::from(m.attachment) == drive && m.block == block
    };
    let found = share.mqueues.iter().position(of_block);
    let orderly = draining && reason == mqueue::abi::reason::STOPPED;
    let (Some(mqueue), false) = (found, orderly) else { return false };
    // One that was stopped: another worker has let go of the service already.
    if reason != mqueue::abi::reason::STOPPED {
        tracing::error!(
            service = &*share.name,
            kernel = share.kernels.get(drive).map(|name| &**name),
            block,
            reason = mqueue::abi::reason::name(reason),
            "a block ended; its mqueue is dead"
        );
    }
    share.mark_dead(mqueue as u32)
}
