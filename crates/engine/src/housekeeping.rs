//! A worker's work once a millisecond: time-outs, dead mqueues, credit hints, idle clients.

use wire::DropReason;
use wire::nic::Nic;

use crate::base::turn::Turn;
use crate::depart::Depart;
use crate::endpoint::set::Endpoints;
use crate::service::services::Services;
use crate::service::share::ServiceShare;

/// Interval of housekeeping.
const TICK_NS: u64 = 1_000_000;
/// Interval of log lines about connections that were shed.
const SHED_REPORT_NS: u64 = 10_000_000_000;

/// State of housekeeping.
#[derive(Default)]
pub(crate) struct Housekeeping {
    next_tick_ns: u64,
    /// Time before which shed connections are not reported again.
    shed_report_ns: u64,
    /// Blocks that ended, and the reasons.
    ended: Vec<(u32, u64)>,
    /// Whether a block of this worker hangs or has hung.
    hung: bool,
}

impl Housekeeping {
    /// Whether it is time; sets the next time.
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

    /// Housekeeping of requests, backends, mqueues and links to other workers.
    pub(crate) fn run<N: Nic>(
        &mut self,
        turn: &mut Turn<N>,
        services: &mut Services,
        endpoints: &mut Endpoints,
    ) {
        turn.outbound.retry_losses();
        for service in 0..services.len() {
            endpoints.expire(turn, services, service);
            let share = &mut services[service];
            share.tell_tick(turn.now_ns);
            share.find_overdue(turn.now_ns);
            share.find_still(turn.now_ns);
            share.unsample_ended();
            if share.leaving.is_none() {
                share.observe_depth();
            }
            endpoints.servers.note_corrupt::<N>(share, service);
            if self.mark_dead_mqueues(turn, services, service) {
                let Endpoints { clients, servers } = &mut *endpoints;
                servers.end_dead_blocks(turn, &services[service], service);
                let reason = DropReason::MqueueDead;
                clients.end_requests_of_dead_mqueues(turn, services, service, reason);
            }
        }
        if turn.shared.workers() > 1 {
            services.publish_credit(turn);
            services.read_credit(turn);
        }
    }

    /// Housekeeping of connections and gauges.
    pub(crate) fn check_clients<N: Nic>(
        &mut self,
        turn: &mut Turn<N>,
        services: &mut Services,
        endpoints: &mut Endpoints,
    ) {
        let Endpoints { clients, servers } = endpoints;
        clients.tcp.sweep(turn, services, servers);
        let connections = clients.connections::<N>();
        turn.counters.connections.set(connections as u64);
        self.read_nic_counters(turn);
    }

    /// Marks the mqueues of blocks that ended or hang, and of those that wrote impossible words, as dead. Returns
    /// whether there are any.
    fn mark_dead_mqueues<N: Nic>(
        &mut self,
        turn: &mut Turn<N>,
        services: &mut Services,
        service: usize,
    ) -> bool {
        let mut died = false;
        let draining = turn.draining;
        let share = &mut services[service];
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
            services.count_hung_blocks(turn);
        }
        let share = &mut services[service];
        for mqueue in 0..share.mqueues.len() {
            let entry = &share.mqueues[mqueue];
            if share.loads[mqueue].alive && entry.tx_corrupt {
                tracing::error!(
                    service = &*share.name,
                    block = entry.block,
                    "an accelerator wrote impossible ring words; the mqueue is dead"
                );
                let (drive, block) = (usize::from(entry.attachment), entry.block);
                share.accelerators[drive].blocks.disable_block(block);
                died |= share.mark_dead(mqueue as u32);
            }
        }
        died
    }

    /// Reads the network's own counters, and sometimes reports that it rejected clients.
    fn read_nic_counters<N: Nic>(&mut self, turn: &Turn<N>) {
        let below = turn.nic.counters();
        let shed = below.shed_connections - turn.counters.shed_connections.value();
        turn.counters.set_nic_counters(&below);
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

/// A block ended or hangs: its mqueue is dead. Returns whether it was alive before.
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
    // A block that was stopped: another worker has released the service already.
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
