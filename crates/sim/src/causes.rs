//! Which losses a plan can cause. Any other is the engine's own doing, and a violation.

use engine::metrics::ServiceSnapshot;
use engine::topology::{Dispatch, Replies};
use wire::DropReason;
use wire::framing::Framing;
use wire::nic::Transport;

use crate::change::Keeps;
use crate::client::Taste;
use crate::lives::Rebirth;
use crate::memory_client::MemoryManner;
use crate::plan::Plan;
use crate::stream_client::StreamClient;

const MS: u64 = 1_000_000;

impl Plan {
    fn tastes(&self, service: usize) -> impl Iterator<Item = &Taste> {
        let datagrams = self.datagram_clients.iter().filter(move |c| c.service == service);
        let streams = self.streams(service).map(|c| &c.taste);
        let memory = self.memory_clients.iter().filter(move |c| c.service == service);
        datagrams.map(|c| &c.taste).chain(streams).chain(memory.map(|c| &c.taste))
    }

    /// Whether another version of the service takes its place.
    pub fn is_reloaded(&self, service: usize) -> bool {
        self.reloads.iter().any(|reload| reload.service == service)
    }

    /// Whether shared-memory clients of a service leave or are thrown out, and whether they scribble.
    fn memory_faults(&self, service: usize) -> (bool, bool) {
        let of_service = self.memory_clients.iter().filter(move |c| c.service == service);
        let hostile = |m: &MemoryManner| m.bad_kind > 0 || m.scribble_after.is_some();
        let faults = of_service.map(|c| (c.manner.leave > 0, hostile(&c.manner)));
        faults.fold((false, false), |(l, h), (left, hostile)| (l | left | hostile, h | hostile))
    }

    fn streams(&self, service: usize) -> impl Iterator<Item = &StreamClient> {
        self.stream_clients.iter().filter(move |c| c.service == service)
    }

    /// Reasons for which a service may have lost something by `now_ns`, before any drain.
    pub fn possible(&self, service: usize, now_ns: u64) -> Vec<DropReason> {
        use DropReason as R;
        let Self { faults, setup, .. } = self;
        let spec = &setup.topology.services[service];
        let limits = &setup.topology.limits;
        let datagrams = self.datagram_clients.iter().any(|c| c.service == service);
        let streams = self.streams(service).next().is_some();
        let rough = self.streams(service).any(|c| c.manner.fates.are_rough());
        let bogus = self.streams(service).any(|c| c.manner.bogus > 0);
        let deaf = self.streams(service).any(|c| c.manner.read_max == 0);
        let taste = |rate: fn(&Taste) -> u32| self.tastes(service).any(|t| rate(t) > 0);
        let (left, hostile) = self.memory_faults(service);
        let ends_for =
            |reason| self.rebirths.iter().any(|r| r.service == service && r.reason == reason);
        // A service that is held before has nothing with the life that ends.
        let unheld = |r: &Rebirth| r.service == service && (r.hold_ns.is_none() || r.overdue);
        let reloaded = self.is_reloaded(service);
        let mut reloads = self.reloads.iter().filter(|reload| reload.service == service);
        let wicked = !self.sound[service];
        let backends = !spec.backends.is_empty();
        // Datagrams that are late for a request meet the next one, which tells them apart.
        let late_datagrams = spec.backends.iter().any(|backend| {
            let matched = backend.matching.is_some() || backend.framing == Framing::Memcached;
            matched && backend.transport == Transport::Udp
        });
        let corrupt = faults.corrupt > 0 && datagrams;
        let drops = taste(|t| t.drops) || taste(|t| t.junk) || corrupt || hostile || wicked;
        let none = spec.replies == Replies::None;
        let ratio = |l: &engine::topology::Listen| {
            let default = if l.address.ip().is_loopback() { 0 } else { 3 };
            l.transport == Transport::Udp && limits.udp_reply_ratio.unwrap_or(default) > 0
        };
        let key = matches!(spec.dispatch, Dispatch::KeyHash(_));
        // What streams and memory clients ask of one mqueue of another worker waits between the two, and
        // while turns are milliseconds apart hundreds of requests wait longer than their time.
        let crowded = setup.topology.engine.workers > 1
            && (streams || !spec.memory_ports.is_empty())
            && matches!(spec.dispatch, Dispatch::FlowHash | Dispatch::KeyHash(_))
            && now_ns >= spec.request_timeout_ms * MS;
        let table = [
            (R::SocketOverflow, faults.socket_datagrams < 10_000),
            (R::Truncated, faults.truncate > 0),
            (R::PrivilegedSource, self.datagram_clients.iter().any(|c| c.peer.port() < 1024)),
            (R::LoopedSource, self.datagram_clients.iter().any(|c| c.forges > 0)),
            (R::BadFraming, rough || bogus || hostile),
            (R::ConnectionLimit, streams && (faults.exhausted > 0 || limits.connections < 200)),
            (R::IdleTimeout, streams && now_ns >= limits.idle_ms * MS),
            (R::TooLong, rough || taste(|t| t.too_long)),
            (R::TooShort, key && (hostile || taste(|t| t.junk))),
            // Streams wait for credit.
            (R::NoCredit, datagrams),
            (R::HandoverFull, datagrams && setup.topology.engine.workers > 1),
            (R::NoAccelerator, wicked),
            (R::AcceleratorLost, ends_for(R::AcceleratorLost)),
            (R::AcceleratorStalled, ends_for(R::AcceleratorStalled)),
            (R::Reconfiguring, ends_for(R::Reconfiguring) && self.rebirths.iter().any(unheld)),
            (R::QueueTime, spec.queue_us_max > 0),
            // Even a sound backend may be out of reach for a while, and requests queue behind it.
            (R::RequestTimeout, wicked || backends || crowded),
            (R::StaleToken, wicked || backends || reloaded || crowded),
            (R::DrainTimeout, reloaded),
            // Connections that do not move over are read no further.
            // Nor are rings of clients whose port goes.
            (
                R::Draining,
                reloads.any(|reload| {
                    let Keeps { connections, memory_clients, memory_ports } = reload.keeps;
                    !(connections && memory_clients && memory_ports)
                }),
            ),
            (R::BadLength, drops),
            (R::KernelDrop, drops),
            (R::ConsumedDrop, drops && none),
            (R::ReplyTooLong, wicked),
            (R::ReplyRatio, datagrams && spec.listen.iter().any(ratio)),
            (R::ReplyUnframable, taste(|t| t.unframable) || setup.behaviours[service].corrupts()),
            (R::ClientGone, streams || left),
            // A client that reads at all makes room within 500 ms.
            (R::SlowClient, deaf || streams && limits.slow_client_ms < 500),
            (R::ReplyMemory, hostile || streams && limits.early_reply_bytes < 1 << 20),
            (R::SendFailed, faults.refuse_send > 0 || faults.full_send > 0),
            (R::MqueueDead, wicked),
            (R::BadMessage, wicked),
            (R::UnwantedReply, wicked && none),
            (R::BackendLate, backends),
            (R::BackendProtocol, wicked && backends),
            (R::BackendUnasked, wicked && backends || late_datagrams),
            (R::BackendTooLong, wicked && backends),
            (R::BackendMismatch, wicked && backends || late_datagrams),
        ];
        table.into_iter().filter(|(_, possible)| *possible).map(|(reason, _)| reason).collect()
    }

    /// The first loss without a cause, before any drain.
    pub fn impossible(
        &self,
        service: usize,
        counted: &ServiceSnapshot,
        now_ns: u64,
    ) -> Option<DropReason> {
        let possible = self.possible(service, now_ns);
        let lost = |reason: &&DropReason| counted.dropped(**reason) > 0;
        let causeless = |reason: &&DropReason| !possible.contains(*reason);
        let first = DropReason::ALL.iter().filter(lost).find(causeless).copied();
        // A client is gone because it left, or because the engine closed on it for a reason.
        let gone = counted.dropped(DropReason::ClientGone);
        let reasons = counted.dropped_requests() - gone + counted.dropped(DropReason::BadFraming);
        let left = self.memory_faults(service).0
            || self.is_reloaded(service)
            || self.streams(service).any(|c| c.manner.fates.are_rough());
        first.or((gone > 0 && reasons == 0 && !left).then_some(DropReason::ClientGone))
    }
}
