//! Counters: one writer each (a worker), read by the exporter.
//!
//! A counter is an atomic that its worker loads, adds to and stores: no read-modify-write, no shared line on the data
//! path (`mqueue::count`). A snapshot sums the workers. It is not taken at one instant, but these relations hold:
//! each counter only grows, and `received >= replied + consumed + drops of scope Request` in every snapshot, even
//! while workers run. A worker counts a request as received before it counts its end or hands it over, and a snapshot
//! reads the ends of all workers before it reads what any of them received (edge BOOKS).

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

pub use mqueue::count::{Counter, EndCounter};
use onpath::dictionary::Dictionary;
use sockets::End;
use wire::DropReason;
use wire::nic::NicCounters;

use crate::base::commands::CopyCounters;
use crate::base::stages::{ObservationSnapshot, Observations};
use crate::base::tenants::TenantState;

macro_rules! counters {
    ($(#[doc = $sdoc:literal])+ $name:ident, $snapshot:ident {
        $( $(#[doc = $doc:literal])+ $field:ident, )+
    } ends {
        $( $(#[doc = $edoc:literal])+ $end:ident, )+
    }) => {
        $(#[doc = $sdoc])+
        #[derive(Debug)]
        #[repr(align(128))]
        pub struct $name {
            $( $(#[doc = $doc])+ pub $field: Counter, )+
            $( $(#[doc = $edoc])+ pub $end: EndCounter, )+
            /// Lost messages by [`DropReason`].
            pub drops: [EndCounter; DropReason::COUNT],
            /// Sockets of blocks whose connections have ended, by [`End`].
            pub socket_ends: [EndCounter; End::COUNT],
        }

        impl Default for $name {
            fn default() -> Self {
                let drops = std::array::from_fn(|_| EndCounter::default());
                let socket_ends = std::array::from_fn(|_| EndCounter::default());
                Self {
                    $( $field: Counter::default(), )+
                    $( $end: EndCounter::default(), )+
                    drops,
                    socket_ends,
                }
            }
        }

        /// Values of the counters of the same names, summed over workers.
        #[derive(Clone, Debug, PartialEq, Eq)]
        pub struct $snapshot {
            $( $(#[doc = $doc])+ pub $field: u64, )+
            $( $(#[doc = $edoc])+ pub $end: u64, )+
            /// Lost messages by [`DropReason`].
            pub drops: [u64; DropReason::COUNT],
            /// Sockets of blocks whose connections have ended, by [`End`].
            pub socket_ends: [u64; End::COUNT],
        }

        impl Default for $snapshot {
            fn default() -> Self {
                Self {
                    $( $field: 0, )+
                    $( $end: 0, )+
                    drops: [0; DropReason::COUNT],
                    socket_ends: [0; End::COUNT],
                }
            }
        }

        impl $snapshot {
            /// The sums of these workers' counters; reads the ends of all workers first, see the module
            /// documentation.
            pub fn of<'a>(workers: impl Iterator<Item = &'a $name> + Clone) -> Self {
                let mut sum = Self::default();
                if mutants::on("read_received_first") {
                    sum.add_received(workers.clone());
                    std::thread::yield_now();
                    sum.add_ends(workers);
                } else {
                    sum.add_ends(workers.clone());
                    sum.add_received(workers);
                }
                sum
            }

            fn add_ends<'a>(&mut self, workers: impl Iterator<Item = &'a $name>) {
                for counters in workers {
                    $( self.$end += counters.$end.value(); )+
                    for (sum, counter) in self.drops.iter_mut().zip(&counters.drops) {
                        *sum += counter.value();
                    }
                    for (sum, counter) in self.socket_ends.iter_mut().zip(&counters.socket_ends) {
                        *sum += counter.value();
                    }
                }
            }

            fn add_received<'a>(&mut self, workers: impl Iterator<Item = &'a $name>) {
                for counters in workers {
                    $( self.$field += counters.$field.value(); )+
                }
            }

            /// Every plain counter with its name and its documentation.
            pub fn named(&self) -> Vec<(&'static str, &'static str, u64)> {
                vec![
                    $( (stringify!($field), concat!($($doc),+).trim_ascii(), self.$field), )+
                    $( (stringify!($end), concat!($($edoc),+).trim_ascii(), self.$end), )+
                ]
            }
        }
    };
}

counters! {
    /// Counters of one worker for one service.
    ServiceCounters, ServiceSnapshot {
        /// Requests that entered the service.
        received,
        /// Requests written to RX rings.
        accepted,
        /// Bundles written to RX rings.
        bundles,
        /// Of the requests written to RX rings, those in bundles.
        bundled,
        /// Of the requests in bundles, those that the host kernel wrote into the pool.
        in_place,
        /// GSO batches of requests, or the rest of one, that went as single messages because the pool had no buffer.
        pool_dry,
        /// Requests handed to another worker's mqueue.
        handed_out,
        /// Requests taken over from another worker.
        handed_in,
        /// Replies handed back to the worker that owns the connection.
        replies_handed_out,
        /// Replies taken over from the worker that owns the mqueue.
        replies_handed_in,
        /// Payload bytes of requests.
        received_bytes,
        /// Payload bytes of replies.
        replied_bytes,
        /// Requests sent to backends.
        backend_sent,
        /// Answers delivered to client mqueues (every status).
        backend_answered,
        /// Backend answers with status timeout.
        backend_timeouts,
        /// Backend connections lost or refused.
        backend_failures,
        /// Client flows of a proxy over UDP that were opened.
        upstream_flows_opened,
        /// Client flows of a proxy over UDP that were closed.
        upstream_flows_closed,
        /// Client flows of a proxy over UDP that were closed to make room for others.
        upstream_flows_evicted,
        /// Connections accepted.
        connections_accepted,
        /// Sockets of blocks that were accepted or connected.
        sockets_opened,
        /// Of them, sockets whose connections have ended.
        sockets_closed,
        /// Commands of blocks about sockets that had no effect: of an unknown kind, or of a lease that is over.
        socket_bad_commands,
        /// Bytes that peers of sockets sent.
        socket_received_bytes,
        /// Of them, bytes that blocks have read.
        socket_read_bytes,
        /// Of them, bytes that blocks had not read when the socket ended.
        socket_unread_bytes,
        /// Bytes that blocks wrote into sockets.
        socket_written_bytes,
        /// Of them, bytes that the host kernel took.
        socket_sent_bytes,
        /// Of them, bytes that had not been sent when the socket ended.
        socket_unsent_bytes,
        /// Connections that were closed, for any reason.
        connections_closed,
    } ends {
        /// Replies that the host kernel took.
        replied,
        /// Requests consumed without a reply, as requested by the service or the client.
        consumed,
    }
}

impl ServiceSnapshot {
    /// Lost messages of one reason.
    pub fn dropped(&self, reason: DropReason) -> u64 {
        self.drops[reason as usize]
    }

    /// Requests that ended without a reply: the drops of scope Request.
    pub fn dropped_requests(&self) -> u64 {
        let of_requests = |r: &&DropReason| r.scope() == wire::DropScope::Request;
        DropReason::ALL.iter().filter(of_requests).map(|r| self.dropped(*r)).sum()
    }

    /// Connections of sockets, and attempts to connect, that ended.
    pub fn socket_ends(&self) -> u64 {
        self.socket_ends.iter().sum()
    }

    /// Requests that are in flight according to the accounting identity.
    pub fn outstanding(&self) -> u64 {
        let ended = self.replied + self.consumed + self.dropped_requests();
        debug_assert!(
            self.received >= ended,
            "a snapshot includes the reception of every ended request"
        );
        self.received.saturating_sub(ended)
    }
}

impl ServiceCounters {
    /// Bytes of sockets from peers: taken, delivered and dropped.
    pub(crate) fn of_received(&self) -> [&Counter; 3] {
        [&self.socket_received_bytes, &self.socket_read_bytes, &self.socket_unread_bytes]
    }

    /// The same for bytes to peers.
    pub(crate) fn of_sent(&self) -> [&Counter; 3] {
        [&self.socket_written_bytes, &self.socket_sent_bytes, &self.socket_unsent_bytes]
    }

    /// Counts lost messages.
    #[inline]
    pub fn drop_many(&self, reason: DropReason, n: u64) {
        self.drops[reason as usize].add(n);
    }

    /// Counts one lost message.
    #[inline]
    pub fn drop_one(&self, reason: DropReason) {
        self.drop_many(reason, 1);
    }
}

/// Counters of one worker about itself.
#[derive(Debug, Default)]
#[repr(align(128))]
pub struct WorkerCounters {
    /// Turns.
    pub turns: Counter,
    /// Turns that found work.
    pub busy_turns: Counter,
    /// Times the worker went to sleep.
    pub sleeps: Counter,
    /// Nanoseconds of turns that found work, up to the next turn.
    pub busy_ns: Counter,
    /// Nanoseconds of turns that found no work, up to the next turn, awake: spinning, or with the core yielded.
    pub idle_ns: Counter,
    /// Nanoseconds of turns after which the worker slept, up to the next turn.
    pub sleep_ns: Counter,
    /// Connections accepted and reset at once because no descriptor was free.
    pub shed_connections: Counter,
    /// GSO batches that the host kernel refused, whose datagrams were then sent one by one.
    pub segmentation_fallbacks: Counter,
    /// Checks of the epoll set.
    pub epoll_calls: Counter,
    /// Packets that a tap saw and could not store.
    pub tap_dropped: Counter,
    /// Open TCP connections (gauge).
    pub connections: Counter,
    /// Requests in flight on this worker: tokens, unsent replies, RX rings of reply-less services (gauge).
    pub outstanding: Counter,
    /// Blocks of this worker that hang on accelerator threads (gauge).
    pub hung_blocks: Counter,
}

impl WorkerCounters {
    /// Copies the counters of the worker's network.
    pub(crate) fn set_nic_counters(&self, below: &NicCounters) {
        self.shed_connections.set(below.shed_connections);
        self.segmentation_fallbacks.set(below.segmentation_fallbacks);
        self.epoll_calls.set(below.epoll_calls);
        self.tap_dropped.set(below.tap_dropped);
    }
}

/// Generations of one accelerator of one service, whose blocks run on other threads or in another process; written by
/// the control side.
#[derive(Debug, Default)]
pub struct RuntimeMetrics {
    /// The service.
    pub service: String,
    /// The accelerator.
    pub accelerator: String,
    /// Copies that the engine requested from the runtimes' copy agents.
    pub copies: Arc<CopyCounters>,
    ended: AtomicU64,
    round_trip_ns: AtomicU64,
    state: Mutex<RuntimeState>,
}

/// Versions of a service overlap for a while, so several generations may run.
#[derive(Debug, Default)]
struct RuntimeState {
    numbers: u64,
    serving: Vec<u64>,
    latest: u64,
    last_end: &'static str,
    /// The last generation whose copy agent has answered.
    copied: u64,
}

impl RuntimeMetrics {
    /// Metrics of this accelerator for this service; no generation runs.
    pub fn new(service: &str, accelerator: &str) -> Self {
        Self { service: service.into(), accelerator: accelerator.into(), ..Self::default() }
    }

    fn state(&self) -> MutexGuard<'_, RuntimeState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The number of the next generation. It is unique among all versions of the service.
    pub fn next_generation(&self) -> u64 {
        let mut state = self.state();
        state.numbers += 1;
        state.numbers
    }

    /// A generation started.
    pub fn begin(&self, generation: u64) {
        let mut state = self.state();
        state.serving.push(generation);
        state.latest = generation;
    }

    /// The copy agent of a generation has answered.
    pub fn copy_agent_answers(&self, generation: u64) {
        self.state().copied = generation;
    }

    /// Whether the copy agent of a generation that serves has answered.
    pub fn has_copy_agent(&self) -> bool {
        let state = self.state();
        state.serving.contains(&state.copied)
    }

    /// A generation ended, or failed to start. Others that serve stay up.
    pub fn end(&self, generation: u64, why: &'static str) {
        let mut state = self.state();
        state.serving.retain(|serving| *serving != generation);
        state.last_end = why;
        self.ended.fetch_add(1, Ordering::Relaxed);
    }

    /// Whether a generation serves.
    pub fn is_up(&self) -> bool {
        !self.state().serving.is_empty()
    }

    /// The running generation, the latest if there are several, or the last one that ran; 0 before the first.
    pub fn generation(&self) -> u64 {
        let state = self.state();
        state.serving.last().copied().unwrap_or(state.latest)
    }

    /// The last round trip to a remote accelerator in nanoseconds; 0: none was measured. The runtime reports it.
    pub fn round_trip_ns(&self) -> u64 {
        self.round_trip_ns.load(Ordering::Relaxed)
    }

    /// See [`Self::round_trip_ns`].
    pub fn set_round_trip_ns(&self, round_trip_ns: u64) {
        self.round_trip_ns.store(round_trip_ns, Ordering::Relaxed);
    }

    /// Generations that ended.
    pub fn ended(&self) -> u64 {
        self.ended.load(Ordering::Relaxed)
    }

    /// Why the last one ended, as one word; empty before that.
    pub fn last_end(&self) -> &'static str {
        self.state().last_end
    }
}

/// Counters of all workers for one service. A service that changes while the engine runs keeps its counters, as long
/// as its name stays.
#[derive(Debug)]
pub struct ServiceMetrics {
    name: String,
    workers: Box<[OfService]>,
}

/// Counters that one worker writes for one service.
type OfService = (Arc<ServiceCounters>, Arc<Observations>);

impl ServiceMetrics {
    /// Zeroed counters for `workers` workers.
    pub fn new(name: String, workers: usize) -> Self {
        Self { name, workers: (0..workers).map(|_| OfService::default()).collect() }
    }

    /// Name of the service.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The counters that `worker` writes.
    pub fn of_worker(&self, worker: usize) -> OfService {
        self.workers[worker].clone()
    }

    /// Snapshot of one worker's counters.
    pub fn counted_by(&self, worker: usize) -> ServiceSnapshot {
        ServiceSnapshot::of(std::iter::once(&*self.workers[worker].0))
    }

    /// Sums the counters over all workers.
    pub fn snapshot(&self) -> ServiceSnapshot {
        ServiceSnapshot::of(self.workers.iter().map(|(counters, _)| &**counters))
    }

    /// Sums the observations of all workers.
    pub fn observed(&self) -> ObservationSnapshot {
        let mut sum = ObservationSnapshot::default();
        for (_, observed) in &self.workers {
            sum.add(observed);
        }
        sum
    }
}

/// What the workers count for one function of a service's chain.
#[derive(Debug)]
pub struct FunctionMetrics {
    /// The service.
    pub service: String,
    /// The function's name in the chain.
    pub name: String,
    workers: Box<[Arc<onpath::Counters>]>,
    sampled: Mutex<Option<FunctionSample>>,
    dictionary: Mutex<Weak<Dictionary>>,
}

/// What a function of its own accord counts, as of a while ago.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FunctionSample {
    /// The names and values of its registers, merged over all workers.
    pub registers: Vec<(Box<str>, u64)>,
    /// The length of its state, on all workers together, in bytes.
    pub state_bytes: u64,
}

impl FunctionMetrics {
    /// Zeroed counters for `workers` workers.
    pub fn new(service: String, name: String, workers: usize) -> Self {
        let workers = (0..workers).map(|_| Arc::default()).collect();
        Self { service, name, workers, sampled: Mutex::default(), dictionary: Mutex::default() }
    }

    /// The function has this dictionary, or none.
    pub fn set_dictionary(&self, dictionary: Option<&Arc<Dictionary>>) {
        let mut kept = self.dictionary.lock().unwrap_or_else(PoisonError::into_inner);
        *kept = dictionary.map(Arc::downgrade).unwrap_or_default();
    }

    /// Its dictionary, if it has one.
    pub fn dictionary(&self) -> Option<Arc<Dictionary>> {
        self.dictionary.lock().unwrap_or_else(PoisonError::into_inner).upgrade()
    }

    /// What worker `worker` writes.
    pub fn of_worker(&self, worker: usize) -> Arc<onpath::Counters> {
        self.workers[worker].clone()
    }

    /// Sums the counters over all workers.
    pub fn snapshot(&self) -> onpath::Snapshot {
        let mut sum = onpath::Snapshot::default();
        self.workers.iter().for_each(|counters| sum.add(counters));
        sum
    }

    /// The last sample, if there is one.
    pub fn sample(&self) -> Option<FunctionSample> {
        self.sampled.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// There is a new sample.
    pub fn set_sample(&self, sample: FunctionSample) {
        *self.sampled.lock().unwrap_or_else(PoisonError::into_inner) = Some(sample);
    }

    /// Why a call failed, on the first worker on which one did; empty if none did.
    pub fn last_failure(&self) -> String {
        let of_workers = self.workers.iter().map(|counters| counters.last_failure());
        of_workers.into_iter().find(|why| !why.is_empty()).unwrap_or_default()
    }
}

/// A tenant, and the counters of its services.
#[derive(Debug)]
pub struct TenantMetrics {
    /// What it uses.
    pub state: Arc<TenantState>,
    /// Its services.
    pub services: Vec<Arc<ServiceMetrics>>,
}

/// All counters of an engine; cheap to clone.
#[derive(Clone, Debug)]
pub struct Metrics {
    workers: Arc<[Arc<WorkerCounters>]>,
    running: Arc<Mutex<Running>>,
}

/// The services that are shown; it changes with the topology.
#[derive(Clone, Debug, Default)]
struct Running {
    services: Arc<[Arc<ServiceMetrics>]>,
    runtimes: Arc<[Arc<RuntimeMetrics>]>,
    left_behind: Arc<[String]>,
    functions: Arc<[Arc<FunctionMetrics>]>,
    tenants: Arc<[TenantMetrics]>,
}

impl Metrics {
    /// Zeroed counters for `workers` workers and these services.
    pub fn new(workers: usize, services: impl IntoIterator<Item = String>) -> Self {
        let service = |name| Arc::new(ServiceMetrics::new(name, workers));
        Self {
            workers: (0..workers).map(|_| Arc::default()).collect(),
            running: Arc::new(Mutex::new(Running {
                services: services.into_iter().map(service).collect(),
                runtimes: Arc::default(),
                left_behind: Arc::default(),
                functions: Arc::default(),
                tenants: Arc::default(),
            })),
        }
    }

    fn running(&self) -> MutexGuard<'_, Running> {
        self.running.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The current services, in topology order.
    pub fn services(&self) -> Arc<[Arc<ServiceMetrics>]> {
        self.running().services.clone()
    }

    /// Accelerators whose blocks run on other threads or in other processes, by service.
    pub fn runtimes(&self) -> Arc<[Arc<RuntimeMetrics>]> {
        self.running().runtimes.clone()
    }

    /// Services of which a removed version did not end: once for each such version.
    pub fn left_behind(&self) -> Arc<[String]> {
        self.running().left_behind.clone()
    }

    /// Sets the current services, and their accelerators whose blocks run on other threads or in other processes.
    /// Others are no longer shown, except for the names of services of which a removed version did not end.
    pub fn set_running(
        &self,
        services: Arc<[Arc<ServiceMetrics>]>,
        runtimes: Arc<[Arc<RuntimeMetrics>]>,
        left_behind: Arc<[String]>,
    ) {
        let mut running = self.running();
        let functions = std::mem::take(&mut running.functions);
        let tenants = std::mem::take(&mut running.tenants);
        *running = Running { services, runtimes, left_behind, functions, tenants };
    }

    /// The functions on the path of services, by service.
    pub fn functions(&self) -> Arc<[Arc<FunctionMetrics>]> {
        self.running().functions.clone()
    }

    /// From now on these functions are attached.
    pub fn set_functions(&self, functions: Arc<[Arc<FunctionMetrics>]>) {
        self.running().functions = functions;
    }

    /// The tenants; none while there is only the operator.
    pub fn tenants(&self) -> Arc<[TenantMetrics]> {
        self.running().tenants.clone()
    }

    /// From now on there are these tenants.
    pub fn set_tenants(&self, tenants: Arc<[TenantMetrics]>) {
        self.running().tenants = tenants;
    }

    /// The counters that `worker` writes: its own, and two sets for each service.
    pub fn of_worker(&self, worker: usize) -> (Arc<WorkerCounters>, Vec<OfService>) {
        let services = self.services();
        (self.workers[worker].clone(), services.iter().map(|s| s.of_worker(worker)).collect())
    }

    /// The workers' own counters.
    pub fn workers(&self) -> impl ExactSizeIterator<Item = &WorkerCounters> {
        self.workers.iter().map(|w| &**w)
    }

    /// Sums a service's counters over all workers.
    pub fn service(&self, service: usize) -> ServiceSnapshot {
        self.services()[service].snapshot()
    }

    /// Sums the observations of a service over all workers.
    pub fn observed(&self, service: usize) -> ObservationSnapshot {
        self.services()[service].observed()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_generation_stays_up_when_another_one_ends() {
        let runtimes = RuntimeMetrics::new("s", "a");
        let [first, second, third] = [(); 3].map(|()| runtimes.next_generation());
        runtimes.begin(first);
        runtimes.begin(second);
        runtimes.end(first, "changed");
        assert_eq!((runtimes.is_up(), runtimes.generation()), (true, second));
        // The previous version may have had another one meanwhile.
        runtimes.begin(third);
        runtimes.end(third, "lost");
        assert_eq!((runtimes.is_up(), runtimes.generation()), (true, second));
        runtimes.end(second, "lost");
        assert_eq!((runtimes.is_up(), runtimes.ended(), runtimes.last_end()), (false, 3, "lost"));
    }
}
