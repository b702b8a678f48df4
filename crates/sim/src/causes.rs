//! Which losses a plan can cause. Any other loss is an error of the engine, and a violation.

use engine::metrics::ServiceSnapshot;
use engine::topology::{Dispatch, Limits, Replies, Service};
use wire::DropReason;
use wire::framing::Framing;
use wire::nic::Transport;

use crate::client::RequestMix;
use crate::plan::Plan;
use crate::shm_client::ShmBehaviour;
use crate::stream_client::StreamClient;
use crate::world::change::Keeps;
use crate::world::generations::Restart;

const MS: u64 = 1_000_000;

impl Plan {
    fn request_mixes(&self, service: usize) -> impl Iterator<Item = &RequestMix> {
        let datagrams = self.datagram_clients.iter().filter(move |c| c.service == service);
        let streams = self.streams(service).map(|c| &c.request_mix);
        let memory = self.memory_clients.iter().filter(move |c| c.service == service);
        datagrams.map(|c| &c.request_mix).chain(streams).chain(memory.map(|c| &c.request_mix))
    }

    /// Whether the service is replaced by another version.
    pub fn is_reloaded(&self, service: usize) -> bool {
        self.reloads.iter().any(|reload| reload.service == service)
    }

    /// Whether shared-memory clients of a service leave or are disconnected, and whether they scribble.
    fn memory_faults(&self, service: usize) -> (bool, bool) {
        let of_service = self.memory_clients.iter().filter(move |c| c.service == service);
        let hostile = |m: &ShmBehaviour| m.bad_kind > 0 || m.scribble_after.is_some();
        let faults = of_service.map(|c| (c.behaviour.leave > 0, hostile(&c.behaviour)));
        faults.fold((false, false), |(l, h), (left, hostile)| (l | left | hostile, h | hostile))
    }

    fn streams(&self, service: usize) -> impl Iterator<Item = &StreamClient> {
        self.stream_clients.iter().filter(move |c| c.service == service)
    }

    /// The first loss without a cause, before any drain.
    pub fn impossible(
        &self,
        service: usize,
        counted: &ServiceSnapshot,
        now_ns: u64,
    ) -> Option<DropReason> {
        let scene = Scene { plan: self, service, now_ns };
        let lost = |reason: &&DropReason| counted.dropped(**reason) > 0;
        let caused =
            |reason: &DropReason| CAUSES.iter().any(|(r, cause)| r == reason && cause(&scene));
        let first = DropReason::ALL.iter().filter(lost).find(|reason| !caused(reason)).copied();
        // A client is gone because it left, or because the engine closed its connection for a reason.
        let gone = counted.dropped(DropReason::ClientGone);
        let reasons = counted.dropped_requests() - gone + counted.dropped(DropReason::BadFraming);
        let left = self.memory_faults(service).0
            || self.is_reloaded(service)
            || self.streams(service).any(|c| c.behaviour.endings.are_rough());
        first.or((gone > 0 && reasons == 0 && !left).then_some(DropReason::ClientGone))
    }
}

/// One service of a plan at a time, before any drain.
struct Scene<'a> {
    plan: &'a Plan,
    service: usize,
    now_ns: u64,
}

/// Whether a service may have lost something for a reason so far.
type Cause = fn(&Scene<'_>) -> bool;

/// The drop reasons that a random plan can cause, each with the plans that do. A run in which another reason occurs is
/// a violation, and a campaign in which one of these never occurs has a gap ([`crate::campaign::Totals::unreached`]).
const CAUSES: &[(DropReason, Cause)] = {
    use DropReason as R;
    &[
        (R::SocketOverflow, |s| s.plan.faults.socket_datagrams < 10_000),
        (R::Truncated, |s| s.plan.faults.truncate > 0),
        (R::PrivilegedSource, |s| s.plan.datagram_clients.iter().any(|c| c.peer.port() < 1024)),
        (R::LoopedSource, |s| s.plan.datagram_clients.iter().any(|c| c.forges > 0)),
        (R::BadFraming, |s| s.is_rough() || s.is_bogus() || s.is_hostile()),
        (R::ConnectionLimit, |s| {
            s.streams() && (s.plan.faults.exhausted > 0 || s.limits().connections < 200)
        }),
        (R::IdleTimeout, |s| s.streams() && s.now_ns >= s.limits().idle_ms * MS),
        (R::TooLong, |s| s.is_rough() || s.likes(|t| t.too_long)),
        (R::TooShort, |s| {
            matches!(s.spec().dispatch, Dispatch::KeyHash(_))
                && (s.is_hostile() || s.likes(|t| t.junk))
        }),
        // Streams wait for credit.
        (R::NoCredit, |s| s.datagrams()),
        (R::HandoverFull, |s| s.datagrams() && s.workers() > 1),
        (R::NoAccelerator, |s| s.is_faulty() || s.ends_for(R::AcceleratorLost)),
        (R::AcceleratorLost, |s| s.ends_for(R::AcceleratorLost)),
        (R::AcceleratorStalled, |s| s.ends_for(R::AcceleratorStalled)),
        (R::Reconfiguring, |s| s.ends_for(R::Reconfiguring) && s.ends_unheld()),
        (R::QueueTime, |s| s.spec().queue_us_max > 0),
        // Even a sound backend may be unreachable for a while, and requests queue behind it.
        (R::RequestTimeout, |s| s.is_faulty() || s.backends() || s.is_crowded()),
        (R::StaleToken, |s| s.is_faulty() || s.backends() || s.is_reloaded() || s.is_crowded()),
        (R::DrainTimeout, |s| s.is_reloaded()),
        (R::Draining, |s| s.leaves_clients()),
        (R::BadLength, |s| s.drops()),
        (R::KernelDrop, |s| s.drops()),
        (R::ConsumedDrop, |s| s.drops() && s.wants_no_replies()),
        (R::ReplyTooLong, |s| s.is_faulty()),
        (R::ReplyRatio, |s| s.datagrams() && s.has_reply_ratio()),
        (R::ReplyUnframable, |s| {
            s.likes(|t| t.unframable) || s.plan.setup.behaviours[s.service].corrupts()
        }),
        (R::ClientGone, |s| s.streams() || s.plan.memory_faults(s.service).0),
        // A client that reads at all makes room within 500 ms.
        (R::SlowClient, |s| s.is_deaf() || s.streams() && s.limits().slow_client_ms < 500),
        (R::ReplyMemory, |s| {
            s.is_hostile() || s.streams() && s.limits().early_reply_bytes < 1 << 20
        }),
        (R::SendFailed, |s| s.plan.faults.refuse_send > 0 || s.plan.faults.full_send > 0),
        (R::MqueueDead, |s| s.is_faulty()),
        (R::BadMessage, |s| s.is_faulty()),
        (R::UnwantedReply, |s| s.is_faulty() && s.wants_no_replies()),
        (R::BackendLate, |s| s.backends()),
        (R::BackendProtocol, |s| s.is_faulty() && s.backends()),
        (R::BackendUnasked, |s| s.is_faulty() && s.backends() || s.has_late_datagrams()),
        (R::BackendTooLong, |s| s.is_faulty() && s.backends()),
        (R::BackendMismatch, |s| s.is_faulty() && s.backends() || s.has_late_datagrams()),
    ]
};

/// The reasons that no random plan causes; tests with a scene of their own provoke them.
#[cfg(test)]
const NOT_IN_PLANS: &[DropReason] = &[
    DropReason::TenantRate,
    DropReason::TenantOutstanding,
    DropReason::TenantConnections,
    DropReason::FunctionDrop,
    DropReason::FunctionFailed,
    DropReason::RingFull,
    DropReason::BackendFunction,
    DropReason::UpstreamRefused,
    DropReason::UpstreamFlows,
];

/// Whether any plan can cause a loss for this reason.
pub(crate) fn is_ever_caused(reason: DropReason) -> bool {
    CAUSES.iter().any(|(caused, _)| *caused == reason)
}

impl Scene<'_> {
    fn spec(&self) -> &Service {
        &self.plan.setup.topology.services[self.service]
    }

    fn limits(&self) -> &Limits {
        &self.plan.setup.topology.limits
    }

    fn workers(&self) -> usize {
        self.plan.setup.topology.engine.workers
    }

    fn datagrams(&self) -> bool {
        self.plan.datagram_clients.iter().any(|c| c.service == self.service)
    }

    fn streams(&self) -> bool {
        self.plan.streams(self.service).next().is_some()
    }

    fn is_rough(&self) -> bool {
        self.plan.streams(self.service).any(|c| c.behaviour.endings.are_rough())
    }

    fn is_bogus(&self) -> bool {
        self.plan.streams(self.service).any(|c| c.behaviour.bogus > 0)
    }

    /// Whether a client reads nothing.
    fn is_deaf(&self) -> bool {
        self.plan.streams(self.service).any(|c| c.behaviour.read_max == 0)
    }

    fn likes(&self, rate: fn(&RequestMix) -> u32) -> bool {
        self.plan.request_mixes(self.service).any(|request_mix| rate(request_mix) > 0)
    }

    fn is_hostile(&self) -> bool {
        self.plan.memory_faults(self.service).1
    }

    fn is_faulty(&self) -> bool {
        !self.plan.sound[self.service]
    }

    fn is_reloaded(&self) -> bool {
        self.plan.is_reloaded(self.service)
    }

    /// Whether a new version leaves connections, clients' rings or ports unread.
    fn leaves_clients(&self) -> bool {
        let mut reloads = self.plan.reloads.iter().filter(|reload| reload.service == self.service);
        reloads.any(|reload| {
            let Keeps { connections, memory_clients, memory_ports } = reload.keeps;
            !(connections && memory_clients && memory_ports)
        })
    }

    fn ends_for(&self, reason: DropReason) -> bool {
        self.plan.restarts.iter().any(|r| r.service == self.service && r.reason == reason)
    }

    /// A service that is paused first has no requests in the generation that ends.
    fn ends_unheld(&self) -> bool {
        let unheld = |r: &Restart| r.hold_ns.is_none() || r.overdue;
        self.plan.restarts.iter().any(|r| r.service == self.service && unheld(r))
    }

    fn backends(&self) -> bool {
        !self.spec().backends.is_empty()
    }

    /// Late datagrams for a request arrive with the next one, and are recognised as late.
    fn has_late_datagrams(&self) -> bool {
        self.spec().backends.iter().any(|backend| {
            let matched = backend.matching.is_some() || backend.framing == Framing::Memcached;
            matched && backend.transport == Transport::Udp
        })
    }

    fn drops(&self) -> bool {
        let corrupt = self.plan.faults.corrupt > 0 && self.datagrams();
        let asked = self.likes(|t| t.drops) || self.likes(|t| t.junk);
        asked || corrupt || self.is_hostile() || self.is_faulty()
    }

    fn wants_no_replies(&self) -> bool {
        self.spec().replies == Replies::None
    }

    fn has_reply_ratio(&self) -> bool {
        self.spec().listen.iter().any(|l| {
            let default = if l.address.ip().is_loopback() { 0 } else { 3 };
            l.transport == Transport::Udp && self.limits().udp_reply_ratio.unwrap_or(default) > 0
        })
    }

    /// Requests of streams and shared-memory clients for one mqueue of another worker wait in the hand-over ring, and
    /// while turns are milliseconds apart hundreds of requests wait longer than their time-out.
    fn is_crowded(&self) -> bool {
        let spec = self.spec();
        self.workers() > 1
            && (self.streams() || !spec.memory_ports.is_empty())
            && matches!(spec.dispatch, Dispatch::FlowHash | Dispatch::KeyHash(_))
            && self.now_ns >= spec.request_timeout_ms * MS
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_reason_has_a_cause_or_is_known_to_have_none() {
        for reason in DropReason::ALL {
            let causes = CAUSES.iter().filter(|(caused, _)| caused == reason).count();
            let none = NOT_IN_PLANS.iter().filter(|other| *other == reason).count();
            let name = reason.name();
            assert_eq!(causes + none, 1, "{name} must be either in CAUSES or in NOT_IN_PLANS");
        }
    }
}
