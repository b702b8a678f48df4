//! The engine's counters as metrics.
//!
//! Naming: `serval_`, the counted item, the unit last, `_total` on counters (the encoder adds it). Labels are
//! bounded: `service` and `reason` come from the configuration and the program, never from clients. Every reason
//! exists from the start, at 0, so that a rate over it is defined.

use std::collections::BTreeSet;
use std::fmt::Error;
use std::sync::Arc;

use engine::commands::Refused;
use engine::metrics::{
    FunctionMetrics, Metrics, RuntimeMetrics, ServiceSnapshot, TenantMetrics, WorkerCounters,
};
use engine::stages::{BOUNDS_NS, HistogramSnapshot, ObservationSnapshot, Stage};
use engine::tenants::TenantUse;
use onpath::Snapshot;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric, MetricEncoder, NoLabelSet};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::registry::Registry;
use sockets::End;
use transfer::{Counters, DeviceLoad};
use wire::DropReason;

use super::{Health, RELOAD_RESULTS};
use crate::REFUSED;

/// Everything on the `/metrics` page.
pub(super) fn registry(metrics: Metrics, health: Arc<Health>) -> Registry {
    let mut registry = Registry::default();
    registry.register_collector(Box::new(Engine { metrics, health }));
    registry
}

#[derive(Debug)]
struct Engine {
    metrics: Metrics,
    health: Arc<Health>,
}

/// A metric's name for a field of [`engine::metrics::ServiceSnapshot`]. Other fields use their own names.
fn service_metric(field: &str) -> &str {
    match field {
        "received" => "requests_received",
        "accepted" => "requests_accepted",
        "bundled" => "requests_bundled",
        "in_place" => "requests_in_place",
        "handed_out" => "requests_handed_out",
        "handed_in" => "requests_handed_in",
        "replied" => "replies",
        "backend_sent" => "backend_requests",
        "backend_answered" => "backend_answers",
        other => other,
    }
}

/// A counter of [`WorkerCounters`]: name, help, value.
type WorkerMetric = (&'static str, &'static str, fn(&WorkerCounters) -> u64);

const WORKER_COUNTERS: &[WorkerMetric] = &[
    ("turns", "Turns", |w| w.turns.value()),
    ("busy_turns", "Turns that found work", |w| w.busy_turns.value()),
    ("sleeps", "Times the worker went to sleep", |w| w.sleeps.value()),
    ("shed_connections", "Connections reset at once for lack of a descriptor", |w| {
        w.shed_connections.value()
    }),
    ("segmentation_fallbacks", "GSO batches that the host kernel refused", |w| {
        w.segmentation_fallbacks.value()
    }),
    ("epoll_calls", "Checks of the epoll set", |w| w.epoll_calls.value()),
    ("tap_dropped_packets", "Packets the tap could not store", |w| w.tap_dropped.value()),
];
/// A part of a worker's time: name, nanoseconds.
type WorkerState = (&'static str, fn(&WorkerCounters) -> u64);

/// The states of a worker; their times add up to its running time.
const WORKER_STATES: &[WorkerState] = &[
    ("busy", |w| w.busy_ns.value()),
    ("idle", |w| w.idle_ns.value()),
    ("asleep", |w| w.sleep_ns.value()),
];
/// A metric of an accelerator whose blocks run in runtimes: name, help, kind, value.
type RuntimeMetric = (&'static str, &'static str, MetricType, fn(&RuntimeMetrics) -> u64);

const RUNTIME_METRICS: &[RuntimeMetric] = &[
    ("up", "1 while a runtime serves", MetricType::Gauge, |l| l.is_up().into()),
    (
        "copy_agent",
        "1 while a runtime serves that has copied bytes to its accelerator's memory and back",
        MetricType::Gauge,
        |l| l.has_copy_agent().into(),
    ),
    ("generation", "The generation that serves, or served last", MetricType::Gauge, |l| {
        l.generation()
    }),
    ("restarts", "Runtimes that ended and were replaced", MetricType::Counter, |l| l.ended()),
    (
        "copy_taken_bytes",
        "Bytes of copies that were requested from copy agents: the sum of those that were delivered, dropped and are outstanding",
        MetricType::Counter,
        |l| l.copies.bytes().taken,
    ),
    ("copy_delivered_bytes", "Bytes of copies that were done", MetricType::Counter, |l| {
        l.copies.bytes().delivered
    }),
    (
        "copy_dropped_bytes",
        "Bytes of copies that were not done: refused, failed, late, or lost with their runtime",
        MetricType::Counter,
        |l| l.copies.bytes().dropped,
    ),
    ("copy_outstanding_bytes", "Bytes of copies in flight", MetricType::Gauge, |l| {
        l.copies.bytes().outstanding
    }),
];
const WORKER_GAUGES: &[WorkerMetric] = &[
    ("connections", "Open TCP connections", |w| w.connections.value()),
    ("outstanding_requests", "Requests in flight on the worker", |w| w.outstanding.value()),
];

impl Collector for Engine {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), Error> {
        let services = self.services();
        self.encode_services(&mut encoder, &services)?;
        encode_drops(&mut encoder, &services)?;
        encode_socket_ends(&mut encoder, &services)?;
        self.encode_observations(&mut encoder)?;
        self.encode_workers(&mut encoder)?;
        self.encode_runtimes(&mut encoder)?;
        self.encode_functions(&mut encoder)?;
        encode_tenants(&mut encoder, &self.metrics.tenants())?;
        let help = "1: a version of the service that left did not end; what it keeps is free after a \
                    restart, or a reload once its kernel is back";
        let name = "serval_service_left_behind";
        let mut family = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
        let left_behind = self.metrics.left_behind();
        for service in left_behind.iter().collect::<BTreeSet<_>>() {
            ConstGauge::new(1i64)
                .encode(family.encode_family(&[("service", service.as_str())])?)?;
        }
        if let Some(transfers) = self.health.transfers() {
            encode_transfers(&mut encoder, transfers)?;
        }
        let ready = ConstGauge::new(i64::from(self.health.is_ready()));
        let help = "1 while clients should connect";
        ready.encode(encoder.encode_descriptor(
            "serval_ready",
            help,
            None,
            MetricType::Gauge,
        )?)?;
        let help = "1 while this kernel blocks a worker, which then serves nothing";
        let name = "serval_worker_stalled";
        let mut family = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
        for stall in self.health.stalls().iter().filter(|stall| stall.hung_blocks == 0) {
            let worker = stall.worker.to_string();
            let labels = [
                ("worker", worker.as_str()),
                ("service", &stall.service),
                ("kernel", &stall.kernel),
            ];
            ConstGauge::new(1i64).encode(family.encode_family(&labels)?)?;
        }
        let help = "Reloads of the configuration, by result";
        let mut reloads =
            encoder.encode_descriptor("serval_reloads", help, None, MetricType::Counter)?;
        for (result, count) in RELOAD_RESULTS.iter().zip(self.health.reloads()) {
            ConstCounter::new(count).encode(reloads.encode_family(&[("result", *result)])?)?;
        }
        let help = "Generation of the configuration: 1 at the start, one more with every change";
        let name = "serval_config_generation";
        let generation = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
        ConstGauge::new(self.health.generation() as i64).encode(generation)?;
        let help = "Log lines that could not be written to standard error";
        let name = "serval_log_lines_dropped";
        let dropped = encoder.encode_descriptor(name, help, None, MetricType::Counter)?;
        ConstCounter::new(crate::log::dropped()).encode(dropped)?;
        let help = "Version of the server";
        let mut build =
            encoder.encode_descriptor("serval_build_info", help, None, MetricType::Gauge)?;
        let labels = [("version", env!("CARGO_PKG_VERSION"))];
        ConstGauge::new(1i64).encode(build.encode_family(&labels)?)
    }
}

type OfService = (String, engine::metrics::ServiceSnapshot);

impl Engine {
    /// One snapshot for the whole page, so that its numbers are consistent.
    fn services(&self) -> Vec<OfService> {
        let services = self.metrics.services();
        services.iter().map(|s| (s.name().to_owned(), s.snapshot())).collect()
    }

    fn encode_services(
        &self,
        encoder: &mut DescriptorEncoder<'_>,
        services: &[OfService],
    ) -> Result<(), Error> {
        let named: Vec<_> = services.iter().map(|(name, s)| (name.as_str(), s.named())).collect();
        let fields = named.first().map_or(0, |(_, fields)| fields.len());
        for field in 0..fields {
            let (id, help, _) = named[0].1[field];
            let name = format!("serval_{}", service_metric(id));
            let mut family =
                encoder.encode_descriptor(&name, plain(help), None, MetricType::Counter)?;
            for (service, values) in &named {
                let labels = [("service", *service)];
                let value = family.encode_family(&labels)?;
                ConstCounter::new(values[field].2).encode(value)?;
            }
        }
        let help = "Requests that were received and have not ended yet";
        let name = "serval_outstanding_requests";
        let mut family = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
        for (service, snapshot) in services {
            let labels = [("service", service.as_str())];
            let value = family.encode_family(&labels)?;
            ConstGauge::new(snapshot.outstanding() as i64).encode(value)?;
        }
        Ok(())
    }

    /// Durations of stages, and queue depths.
    fn encode_observations(&self, encoder: &mut DescriptorEncoder<'_>) -> Result<(), Error> {
        let running = self.metrics.services();
        let services: Vec<_> = running.iter().map(|s| (s.name(), s.observed())).collect();
        let help = "Time of a request in each stage, for a sample of requests";
        let name = "serval_stage_duration_seconds";
        let mut family = encoder.encode_descriptor(name, help, None, MetricType::Histogram)?;
        for (service, observed) in &services {
            for stage in Stage::ALL {
                let labels = [("service", *service), ("stage", stage.name())];
                let histogram = &observed.stages[stage as usize];
                Durations(histogram).encode(family.encode_family(&labels)?)?;
            }
        }
        let help =
            "Time from the reception of a request to the sending of its reply, for the same sample";
        let name = "serval_request_duration_seconds";
        let mut family = encoder.encode_descriptor(name, help, None, MetricType::Histogram)?;
        for (service, observed) in &services {
            let labels = [("service", *service)];
            Durations(&observed.total).encode(family.encode_family(&labels)?)?;
        }
        let mut gauge = |name, help, value_of: fn(&ObservationSnapshot) -> f64| {
            let mut family = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
            for (service, observed) in &services {
                let labels = [("service", *service)];
                ConstGauge::new(value_of(observed)).encode(family.encode_family(&labels)?)?;
            }
            Ok(())
        };
        let help =
            "Workers on which the service is paused: requests wait until its runtime has restarted";
        gauge("serval_service_paused", help, |o| o.paused as f64)?;
        gauge("serval_mqueues", "Mqueues of the service", |o| o.mqueues as f64)?;
        let help = "Requests in flight on an mqueue, on average";
        gauge("serval_mqueue_depth_mean", help, |o| o.depth as f64 / o.mqueues.max(1) as f64)?;
        let help = "Requests in flight on the mqueue with the most";
        gauge("serval_mqueue_depth_max", help, |o| o.depth_max as f64)
    }

    /// Accelerators whose blocks run in other processes.
    fn encode_runtimes(&self, encoder: &mut DescriptorEncoder<'_>) -> Result<(), Error> {
        let runtimes = self.metrics.runtimes();
        for (name, help, kind, value_of) in RUNTIME_METRICS {
            let name = format!("serval_accelerator_{name}");
            let mut family = encoder.encode_descriptor(&name, help, None, *kind)?;
            for life in runtimes.iter() {
                let labels = [("service", &*life.service), ("accelerator", &*life.accelerator)];
                let value = family.encode_family(&labels)?;
                match kind {
                    MetricType::Counter => ConstCounter::new(value_of(life)).encode(value)?,
                    _ => ConstGauge::new(value_of(life) as i64).encode(value)?,
                }
            }
        }
        let help = "Copies by address that were refused before anything was copied, by reason";
        let name = "serval_accelerator_refused_copies";
        let mut family = encoder.encode_descriptor(name, help, None, MetricType::Counter)?;
        for (life, why) in
            runtimes.iter().flat_map(|life| Refused::all().map(move |why| (life, why)))
        {
            let labels = [
                ("service", &*life.service),
                ("accelerator", &*life.accelerator),
                ("reason", why.name()),
            ];
            ConstCounter::new(life.copies.refused(why)).encode(family.encode_family(&labels)?)?;
        }
        let help = "Last round trip to the machine of a remote accelerator";
        let name = "serval_accelerator_round_trip_seconds";
        let mut family = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
        for life in runtimes.iter().filter(|life| life.is_up() && life.round_trip_ns() > 0) {
            let labels = [("service", &*life.service), ("accelerator", &*life.accelerator)];
            let value = seconds(life.round_trip_ns());
            ConstGauge::new(value).encode(family.encode_family(&labels)?)?;
        }
        let help = "Why the last runtime ended, as a label";
        let name = "serval_accelerator_last_end";
        let mut family = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
        for life in runtimes.iter().filter(|life| !life.last_end().is_empty()) {
            let labels = [
                ("service", &*life.service),
                ("accelerator", &*life.accelerator),
                ("reason", life.last_end()),
            ];
            ConstGauge::new(1i64).encode(family.encode_family(&labels)?)?;
        }
        Ok(())
    }

    /// Dictionaries of functions.
    fn encode_dictionaries(
        encoder: &mut DescriptorEncoder<'_>,
        functions: &[Arc<FunctionMetrics>],
    ) -> Result<(), Error> {
        let of_functions = functions.iter().filter_map(|of| Some((of, of.dictionary()?)));
        let found: Vec<_> =
            of_functions.map(|(of, found)| (of, found.used(), found.refused())).collect();
        let helps = [
            ("entries", "Entries of the dictionary that a function uses"),
            ("bytes", "Bytes of the keys and values of the dictionary that a function uses"),
        ];
        for (at, (what, help)) in helps.into_iter().enumerate() {
            let name = format!("serval_function_dictionary_{what}");
            let mut family = encoder.encode_descriptor(&name, help, None, MetricType::Gauge)?;
            for (function, used, _) in &found {
                let labels = [("service", &*function.service), ("function", &*function.name)];
                let value = [used.0, used.1][at];
                ConstGauge::new(value).encode(family.encode_family(&labels)?)?;
            }
        }
        let help = "Values that the dictionary that a function uses has refused: it was full, or they were too long";
        let name = "serval_function_dictionary_refused";
        let mut family = encoder.encode_descriptor(name, help, None, MetricType::Counter)?;
        for (function, _, refused) in &found {
            let labels = [("service", &*function.service), ("function", &*function.name)];
            ConstCounter::new(*refused).encode(family.encode_family(&labels)?)?;
        }
        Ok(())
    }

    /// Functions on the path of services.
    fn encode_functions(&self, encoder: &mut DescriptorEncoder<'_>) -> Result<(), Error> {
        let functions = self.metrics.functions();
        let counted: Vec<_> = functions.iter().map(|f| (f, f.snapshot().named())).collect();
        for (field, (id, help, _)) in Snapshot::default().named().into_iter().enumerate() {
            let is_time = id == "time_ns";
            let name = if is_time { "time_seconds" } else { id };
            let help = if is_time { "Time in calls" } else { plain(help) };
            let name = format!("serval_function_{name}");
            let mut family = encoder.encode_descriptor(&name, help, None, MetricType::Counter)?;
            for (function, values) in &counted {
                let labels = [("service", &*function.service), ("function", &*function.name)];
                let family = family.encode_family(&labels)?;
                let value = values[field].2;
                match is_time {
                    true => ConstCounter::new(seconds(value)).encode(family)?,
                    false => ConstCounter::new(value).encode(family)?,
                }
            }
        }
        let samples: Vec<_> = functions.iter().map(|f| (f, f.sample())).collect();
        let help = "Registers of a function, which it defines itself: counters, limits and settings, merged over all workers, as of one to two \
                    seconds ago";
        let name = "serval_function_register";
        let mut family = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
        for (function, sample) in &samples {
            for (register, value) in sample.iter().flat_map(|sample| &sample.registers) {
                let labels = [
                    ("service", &*function.service),
                    ("function", &*function.name),
                    ("register", &**register),
                ];
                ConstGauge::new(*value).encode(family.encode_family(&labels)?)?;
            }
        }
        let help = "Length of the state of a function, on all workers together";
        let name = "serval_function_state_bytes";
        let mut family = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
        for (function, sample) in &samples {
            let Some(sample) = sample else { continue };
            let labels = [("service", &*function.service), ("function", &*function.name)];
            ConstGauge::new(sample.state_bytes).encode(family.encode_family(&labels)?)?;
        }
        Self::encode_dictionaries(encoder, &functions)?;
        let Some(requests) = self.health.functions() else { return Ok(()) };
        let help = "Functions that could not be used: their file was not read or is no module (load), or an instance did not start or did not \
                    take its parameters (init)";
        let name = "serval_function_load_errors";
        let mut family = encoder.encode_descriptor(name, help, None, MetricType::Counter)?;
        for (stage, count) in [("load", requests.load_errors()), ("init", requests.init_errors())] {
            ConstCounter::new(count).encode(family.encode_family(&[("stage", stage)])?)?;
        }
        let help = "Requests about functions that were refused: there is no such function or service, or it is not the caller's; it has too \
                    many; the request is for the operator";
        let name = "serval_function_requests_refused";
        let mut family = encoder.encode_descriptor(name, help, None, MetricType::Counter)?;
        for ((_, reason), count) in REFUSED.iter().zip(requests.refused()) {
            ConstCounter::new(count).encode(family.encode_family(&[("reason", *reason)])?)?;
        }
        Ok(())
    }

    fn encode_workers(&self, encoder: &mut DescriptorEncoder<'_>) -> Result<(), Error> {
        let kinds = [(WORKER_COUNTERS, MetricType::Counter), (WORKER_GAUGES, MetricType::Gauge)];
        for (table, kind) in kinds {
            for (name, help, value_of) in table {
                let name = format!("serval_worker_{name}");
                let mut family = encoder.encode_descriptor(&name, help, None, kind)?;
                for (index, worker) in self.metrics.workers().enumerate() {
                    let labels = [("worker", index.to_string())];
                    let value = family.encode_family(&labels)?;
                    match kind {
                        MetricType::Counter => ConstCounter::new(value_of(worker)).encode(value)?,
                        _ => ConstGauge::new(value_of(worker) as i64).encode(value)?,
                    }
                }
            }
        }
        let help = "Time of the worker by state; idle is awake without work";
        let name = "serval_worker_time_seconds";
        let mut family = encoder.encode_descriptor(name, help, None, MetricType::Counter)?;
        for (index, worker) in self.metrics.workers().enumerate() {
            for (state, ns_of) in WORKER_STATES {
                let labels = [("worker", index.to_string()), ("state", (*state).to_owned())];
                let seconds = ConstCounter::new(seconds(ns_of(worker)));
                seconds.encode(family.encode_family(&labels)?)?;
            }
        }
        Ok(())
    }
}

/// A histogram in the form that the encoder needs.
struct Durations<'a>(&'a HistogramSnapshot);

impl EncodeMetric for Durations<'_> {
    fn encode(&self, mut encoder: MetricEncoder<'_>) -> Result<(), Error> {
        let bounds = BOUNDS_NS.iter().map(|ns| seconds(*ns)).chain([f64::INFINITY]);
        let buckets: Vec<(f64, u64)> = bounds.zip(self.0.counts).collect();
        let (sum, count) = (seconds(self.0.sum_ns), self.0.count());
        encoder.encode_histogram::<NoLabelSet>(sum, count, &buckets, None)
    }

    fn metric_type(&self) -> MetricType {
        MetricType::Histogram
    }
}

fn seconds(ns: u64) -> f64 {
    ns as f64 / 1e9
}

fn encode_drops(encoder: &mut DescriptorEncoder<'_>, services: &[OfService]) -> Result<(), Error> {
    let help = "Messages lost, by reason; those of scope request count as ends of requests";
    let mut family =
        encoder.encode_descriptor("serval_dropped", help, None, MetricType::Counter)?;
    for (service, snapshot) in services {
        for reason in DropReason::ALL {
            let labels = [
                ("service", service.as_str()),
                ("reason", reason.name()),
                ("scope", reason.scope().name()),
            ];
            let value = family.encode_family(&labels)?;
            ConstCounter::new(snapshot.dropped(*reason)).encode(value)?;
        }
    }
    Ok(())
}

/// The tenants with labels of their own; all others together have the label `other`.
const TENANT_LABELS: usize = 256;
/// Counters of a tenant: name, help, value of what it used, and of its services.
type TenantMetric = (&'static str, &'static str, fn(&TenantUse, &ServiceSnapshot) -> u64);

const TENANT_COUNTERS: &[TenantMetric] = &[
    ("requests", "Requests of its services", |_, s| s.received),
    ("replies", "Replies of its services", |_, s| s.replied),
    ("dropped_requests", "Requests of its services that were dropped", |_, s| s.dropped_requests()),
    ("shed_requests", "Of them, those beyond a limit of the tenant", |_, s| {
        s.dropped(DropReason::TenantRate) + s.dropped(DropReason::TenantOutstanding)
    }),
    ("refused_connections", "Connections beyond its quota", |used, _| used.refused_connections),
    ("charged_bytes", "What it was charged for its share of the workers", |used, _| used.charged),
    ("skipped_turns", "Turns of workers in which it waited for others", |used, _| used.skipped),
    ("limited_turns", "Turns of workers in which it was over a limit", |used, _| used.limited),
];
const TENANT_GAUGES: &[TenantMetric] = &[
    ("connections", "Open TCP connections of the tenant", |used, _| used.connections),
    ("outstanding_requests", "Requests in flight of its services", |_, s| s.outstanding()),
];

fn encode_tenants(
    encoder: &mut DescriptorEncoder<'_>,
    tenants: &[TenantMetrics],
) -> Result<(), Error> {
    if tenants.is_empty() {
        return Ok(());
    }
    let counted = |of: &TenantMetrics| {
        let services: Vec<ServiceSnapshot> = of.services.iter().map(|s| s.snapshot()).collect();
        (of.state.used(), services)
    };
    let counted: Vec<_> = tenants.iter().map(counted).collect();
    let kinds = [(TENANT_COUNTERS, MetricType::Counter), (TENANT_GAUGES, MetricType::Gauge)];
    for (metrics, kind) in kinds {
        for (name, help, value) in metrics {
            let name = format!("serval_tenant_{name}");
            let mut family = encoder.encode_descriptor(&name, help, None, kind)?;
            // What the tenant itself used comes once, besides the sum over its services.
            let value = |(used, services): &(TenantUse, Vec<ServiceSnapshot>)| {
                let own = value(used, &ServiceSnapshot::default());
                let none = TenantUse::default();
                own + services.iter().map(|s| value(&none, s)).sum::<u64>()
            };
            let mut put = |label: &str, value: u64| {
                let labels = [("tenant", label)];
                let family = family.encode_family(&labels)?;
                match kind {
                    MetricType::Counter => ConstCounter::new(value).encode(family),
                    _ => ConstGauge::new(value as i64).encode(family),
                }
            };
            for (of, counted) in tenants.iter().zip(&counted).take(TENANT_LABELS) {
                put(&of.state.name, value(counted))?;
            }
            if tenants.len() > TENANT_LABELS {
                put("other", counted[TENANT_LABELS..].iter().map(value).sum())?;
            }
        }
    }
    Ok(())
}

fn encode_socket_ends(
    encoder: &mut DescriptorEncoder<'_>,
    services: &[OfService],
) -> Result<(), Error> {
    let help = "Connections of kernels' sockets, and attempts to connect, that ended, by reason";
    let name = "serval_socket_ends";
    let mut family = encoder.encode_descriptor(name, help, None, MetricType::Counter)?;
    let of_sockets = services.iter().filter(|(_, s)| s.sockets_opened + s.socket_ends() > 0);
    for (service, snapshot) in of_sockets {
        for end in End::ALL {
            let labels = [("service", service.as_str()), ("reason", end.name())];
            let value = family.encode_family(&labels)?;
            ConstCounter::new(snapshot.socket_ends[end as usize]).encode(value)?;
        }
    }
    Ok(())
}

fn encode_transfers(
    encoder: &mut DescriptorEncoder<'_>,
    transfers: &Counters,
) -> Result<(), Error> {
    // Ended ones first: a transfer that ends meanwhile is counted in flight, not as ended twice.
    let failed: Vec<_> = transfers.failed().collect();
    let succeeded = transfers.succeeded();
    let counters: [(&str, &str, u64); 6] = [
        ("started", "Transfers that were asked for", transfers.started()),
        ("succeeded", "Transfers that moved their whole range", succeeded),
        ("read_bytes", "Bytes that ended transfers took from their sources", transfers.read()),
        ("written_bytes", "Bytes that the sinks of ended transfers got", transfers.written()),
        (
            "digest_passes",
            "Passes of MD5 and SHA-256 over chunks of one or several transfers",
            transfers.digest_passes(),
        ),
        (
            "digest_chunks",
            "Chunks that these passes took; by the passes: how many went together",
            transfers.digest_chunks(),
        ),
    ];
    for (name, help, value) in counters {
        let name = format!("serval_transfers_{name}");
        let family = encoder.encode_descriptor(&name, help, None, MetricType::Counter)?;
        ConstCounter::new(value).encode(family)?;
    }
    let help = "Transfers that were refused or ended early, by reason (transfer.md)";
    let name = "serval_transfers_failed";
    let mut family = encoder.encode_descriptor(name, help, None, MetricType::Counter)?;
    let ended: u64 = succeeded + failed.iter().map(|(_, count)| count).sum::<u64>();
    for (reason, count) in failed {
        ConstCounter::new(count).encode(family.encode_family(&[("reason", reason)])?)?;
    }
    let name = "serval_transfers_queued";
    let help = "Transfers whose next step waits for a thread, by the device of the step; digest: of several transfers at a time";
    let mut family = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
    let of_devices = transfers.queued().map(|(device, count)| (device.name(), count));
    for (device, count) in of_devices.chain([("digest", transfers.queued_for_digests())]) {
        ConstGauge::new(count as i64).encode(family.encode_family(&[("device", device)])?)?;
    }
    encode_devices(encoder, transfers)?;
    encode_tenants_of_transfers(encoder, transfers)?;
    let in_flight = ConstGauge::new(transfers.started().saturating_sub(ended) as i64);
    let (name, help) = ("serval_transfers_in_flight", "Transfers in flight");
    in_flight.encode(encoder.encode_descriptor(name, help, None, MetricType::Gauge)?)
}

/// What each kind of device does for transfers.
fn encode_devices(encoder: &mut DescriptorEncoder<'_>, transfers: &Counters) -> Result<(), Error> {
    type Value = fn(&DeviceLoad) -> u64;
    let gauges: [(&str, &str, Value); 2] = [
        (
            "serval_transfer_bytes_in_flight",
            "Bytes of the chunks whose step waits for a thread or runs, by the device of the step",
            |load| load.bytes_in_flight,
        ),
        ("serval_transfers_running", "Steps that run, by the device of the step", |load| {
            load.running
        }),
    ];
    for (name, help, value) in gauges {
        let mut family = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
        for load in transfers.devices() {
            let device = [("device", load.device.name())];
            ConstGauge::new(value(&load) as i64).encode(family.encode_family(&device)?)?;
        }
    }
    let counters: [(&str, &str, Value); 2] = [
        (
            "serval_transfers_source_bytes",
            "Bytes taken from sources as they move, by the kind of device",
            |load| load.taken,
        ),
        (
            "serval_transfers_sink_bytes",
            "Bytes that sinks got as they move, by the kind of device",
            |load| load.given,
        ),
    ];
    for (name, help, value) in counters {
        let mut family = encoder.encode_descriptor(name, help, None, MetricType::Counter)?;
        for load in transfers.devices() {
            let device = [("device", load.device.name())];
            ConstCounter::new(value(&load)).encode(family.encode_family(&device)?)?;
        }
    }
    Ok(())
}

/// What the transfers of each tenant have had.
fn encode_tenants_of_transfers(
    encoder: &mut DescriptorEncoder<'_>,
    transfers: &Counters,
) -> Result<(), Error> {
    let tenants = transfers.tenants();
    let (name, help) = ("serval_tenant_transfers", "Transfers that a tenant has started");
    let mut family = encoder.encode_descriptor(name, help, None, MetricType::Counter)?;
    for (tenant, of) in &tenants {
        let tenant = [("tenant", tenant.as_str())];
        ConstCounter::new(of.started()).encode(family.encode_family(&tenant)?)?;
    }
    let name = "serval_tenant_transfer_bytes";
    let help = "Bytes that the sinks of its ended transfers got";
    let mut family = encoder.encode_descriptor(name, help, None, MetricType::Counter)?;
    for (tenant, of) in &tenants {
        let tenant = [("tenant", tenant.as_str())];
        ConstCounter::new(of.written()).encode(family.encode_family(&tenant)?)?;
    }
    let name = "serval_tenant_transfer_memory_bytes";
    let help = "Memory that its transfers in flight hold at most";
    let mut family = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
    for (tenant, of) in &tenants {
        let tenant = [("tenant", tenant.as_str())];
        ConstGauge::new(of.held() as i64).encode(family.encode_family(&tenant)?)?;
    }
    Ok(())
}

/// The encoder adds the final full stop of the help itself.
fn plain(help: &str) -> &str {
    help.trim_end_matches('.')
}

#[cfg(test)]
mod tests {
    use super::*;

    fn page(services: &[&str]) -> String {
        let metrics = Metrics::new(2, services.iter().map(|s| (*s).to_owned()));
        let (worker, counters) = metrics.of_worker(1);
        worker.turns.add(7);
        worker.idle_ns.add(1_500_000_000);
        if let Some((counters, _)) = counters.first() {
            counters.received.add(5);
            counters.replied.add(2);
            counters.drop_many(DropReason::NoCredit, 1);
            counters.drop_many(DropReason::SocketOverflow, 3);
        }
        let mut text = String::new();
        let registry = registry(metrics, Arc::default());
        prometheus_client::encoding::text::encode(&mut text, &registry).unwrap();
        text
    }

    #[test]
    fn counters_have_their_names_labels_and_values() {
        let text = page(&["digits", "echo"]);
        for line in [
            "serval_requests_received_total{service=\"digits\"} 5",
            "serval_requests_received_total{service=\"echo\"} 0",
            "serval_replies_total{service=\"digits\"} 2",
            "serval_consumed_total{service=\"digits\"} 0",
            "serval_dropped_total{service=\"digits\",reason=\"no_credit\",scope=\"request\"} 1",
            "serval_dropped_total{service=\"digits\",reason=\"socket_overflow\",scope=\"intake\"} 3",
            "serval_outstanding_requests{service=\"digits\"} 2",
            "serval_worker_turns_total{worker=\"1\"} 7",
            "serval_worker_connections{worker=\"0\"} 0",
            "serval_worker_time_seconds_total{worker=\"1\",state=\"idle\"} 1.5",
            "serval_worker_shed_connections_total{worker=\"0\"} 0",
            "serval_stage_duration_seconds_count{service=\"echo\",stage=\"queue\"} 0",
            "serval_request_duration_seconds_bucket{le=\"0.000001\",service=\"digits\"} 0",
            "serval_request_duration_seconds_bucket{le=\"+Inf\",service=\"digits\"} 0",
            "serval_mqueue_depth_max{service=\"echo\"} 0.0",
            "serval_ready 0",
        ] {
            assert!(text.lines().any(|l| l == line), "{line} is not in\n{text}");
        }
        assert!(text.ends_with("# EOF\n"));
    }

    #[test]
    fn the_page_follows_the_naming_rules() {
        let text = page(&["digits"]);
        let mut counters = 0;
        for line in text.lines().filter(|l| !l.starts_with('#')) {
            let name = line.split(['{', ' ']).next().unwrap();
            assert!(name.starts_with("serval_"), "{line}");
            assert!(
                name.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'_')
            );
            counters += usize::from(name.ends_with("_total"));
        }
        assert!(counters > DropReason::COUNT);
        for help in text.lines().filter(|l| l.starts_with("# HELP")) {
            assert!(!help.contains("..") && !help.contains('`') && !help.contains('['), "{help}");
        }
        let types: Vec<&str> = text.lines().filter(|l| l.starts_with("# TYPE")).collect();
        let mut unique = types.clone();
        unique.sort_unstable();
        unique.dedup();
        assert_eq!(types.len(), unique.len());
    }

    #[test]
    fn an_engine_without_services_has_a_page_too() {
        assert!(page(&[]).contains("serval_worker_turns_total"));
    }
}
