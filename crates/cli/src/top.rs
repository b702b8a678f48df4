//! `serval top`: the current activity of a running server, from two samples of its `/metrics`.
//!
//! Counters become rates, histograms become quantiles of the time between the samples. All values are metrics that
//! Prometheus also reads ([`server::exporter`]); the server only answers scrapes.

mod view;

use std::time::Duration;

use serde_json::{Value as Json, json};
use server::exporter::page::Page;

pub use view::{Grid, draw};

/// How the services are ordered.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Sort {
    /// As in the configuration.
    #[default]
    Configured,
    /// Most replies first.
    Replied,
    /// Most drops first.
    Dropped,
}

impl Sort {
    /// The next order.
    pub fn next(self) -> Self {
        match self {
            Self::Configured => Self::Replied,
            Self::Replied => Self::Dropped,
            Self::Dropped => Self::Configured,
        }
    }

    /// Its name on the screen.
    pub fn name(self) -> &'static str {
        match self {
            Self::Configured => "configured",
            Self::Replied => "replied",
            Self::Dropped => "dropped",
        }
    }
}

/// Time in one stage, of the requests that were sampled between two reads of the page.
#[derive(Clone, Debug, PartialEq)]
pub struct StageTimes {
    /// `receive`, `queue`, `accelerator`, `send`, or `total`.
    pub stage: String,
    /// Number of sampled requests.
    pub count: u64,
    /// Median, in seconds; `None` without samples.
    pub p50: Option<f64>,
    /// 99th percentile, in seconds.
    pub p99: Option<f64>,
}

/// Activity of a service between two reads.
#[derive(Clone, Debug, PartialEq)]
pub struct ServiceSample {
    /// Its name.
    pub name: String,
    /// Requests received per second.
    pub received: f64,
    /// Replies per second.
    pub replied: f64,
    /// Messages lost per second, by reason; only reasons with losses.
    pub drops: Vec<(String, f64)>,
    /// Requests in flight at the second read.
    pub outstanding: f64,
    /// Requests in flight on an mqueue: mean and maximum.
    pub depth: (f64, f64),
    /// It is paused: requests wait until its runtime has restarted.
    pub paused: bool,
    /// The stages of a request, and the total.
    pub stages: Vec<StageTimes>,
}

impl ServiceSample {
    /// Messages lost per second.
    pub fn dropped(&self) -> f64 {
        // Not `sum`, which starts at -0.
        self.drops.iter().fold(0.0, |sum, (_, rate)| sum + rate)
    }
}

/// Activity of a function on the path of a service's messages between two reads.
#[derive(Clone, Debug, PartialEq)]
pub struct FunctionSample {
    /// The service.
    pub service: String,
    /// The function's name.
    pub function: String,
    /// Messages per second that it decided about, or that met it while it was failing.
    pub messages: f64,
    /// Messages per second that it dropped, or that were dropped because it was failing.
    pub dropped: f64,
    /// Calls per second that failed.
    pub failures: f64,
    /// Time in calls for each message, in seconds; `None` without messages.
    pub time: Option<f64>,
}

/// Connections of the kernels of one service ([`Sample::sockets`]). Rates are per second.
#[derive(Clone, Debug, PartialEq)]
pub struct SocketSample {
    /// The service.
    pub service: String,
    /// Open connections at the second read.
    pub open: f64,
    /// Connections accepted, and made by kernels.
    pub opened: f64,
    /// Connections that ended.
    pub closed: f64,
    /// Bytes from peers, …
    pub received: f64,
    /// … and to peers.
    pub sent: f64,
}

/// Time of a worker between two reads, by state; the shares add up to 1 while it runs.
#[derive(Clone, Debug, PartialEq)]
pub struct WorkerSample {
    /// Its number.
    pub worker: String,
    /// Share of turns that found work.
    pub busy: f64,
    /// Share awake without work.
    pub idle: f64,
    /// Share asleep.
    pub asleep: f64,
    /// Turns per second.
    pub turns: f64,
    /// Open connections at the second read.
    pub connections: f64,
}

/// Activity of one tenant. Rates are per second.
#[derive(Clone, Debug, PartialEq)]
pub struct TenantSample {
    /// Its name.
    pub tenant: String,
    /// Requests of its services.
    pub received: f64,
    /// Their replies.
    pub replied: f64,
    /// Requests that were dropped, …
    pub dropped: f64,
    /// … and of them, those beyond a limit of the tenant.
    pub shed: f64,
    /// Requests in flight.
    pub outstanding: f64,
    /// Turns of workers in which it waited, for others or for a limit of its own.
    pub waited: f64,
}

/// Activity of one kind of device in transfers.
#[derive(Clone, Debug, PartialEq)]
pub struct TransferSample {
    /// `file`, `socket` or `accelerator`.
    pub device: String,
    /// Transfers whose next step waits for it.
    pub queued: f64,
    /// Steps that run.
    pub running: f64,
    /// Bytes of the chunks of both.
    pub bytes_in_flight: f64,
    /// Bytes per second taken from such sources, …
    pub taken: f64,
    /// … and given to such sinks.
    pub given: f64,
}

/// Activity of a server between two reads.
#[derive(Clone, Debug, PartialEq)]
pub struct Sample {
    /// The time between the reads, in seconds.
    pub seconds: f64,
    /// Whether clients should connect.
    pub ready: bool,
    /// The services.
    pub services: Vec<ServiceSample>,
    /// The functions on the path of their messages.
    pub functions: Vec<FunctionSample>,
    /// The connections of kernels, of services that have had some.
    pub sockets: Vec<SocketSample>,
    /// The tenants; none if there is only the operator.
    pub tenants: Vec<TenantSample>,
    /// The devices of transfers; none if the server does no transfers.
    pub transfers: Vec<TransferSample>,
    /// Services of which a removed version did not end.
    pub left_behind: Vec<String>,
    /// Services with a kernel on a worker's core that does not return: their workers serve nothing.
    pub stalled: Vec<String>,
    /// The workers.
    pub workers: Vec<WorkerSample>,
}

impl Sample {
    /// Compares two pages, `time` apart. A counter that decreased was restarted; it counts as unchanged.
    pub fn between(before: &Page, after: &Page, time: Duration) -> Self {
        let seconds = time.as_secs_f64().max(1e-9);
        let change = Change { before, after, seconds };
        Self {
            seconds,
            ready: after.value("serval_ready", &[]) == Some(1.0),
            services: after
                .labels("serval_outstanding_requests", "service")
                .map(|name| change.service(name))
                .collect(),
            functions: change.functions(),
            sockets: change.sockets(),
            tenants: change.tenants(),
            transfers: change.transfers(),
            left_behind: after
                .labels("serval_service_left_behind", "service")
                .map(str::to_owned)
                .collect(),
            stalled: after.labels("serval_worker_stalled", "service").map(str::to_owned).collect(),
            workers: after
                .labels("serval_worker_connections", "worker")
                .map(|worker| change.worker(worker))
                .collect(),
        }
    }

    /// Orders the services.
    pub fn sort(&mut self, sort: Sort) {
        match sort {
            Sort::Configured => {}
            Sort::Replied => self.services.sort_by(|a, b| b.replied.total_cmp(&a.replied)),
            Sort::Dropped => self.services.sort_by(|a, b| b.dropped().total_cmp(&a.dropped())),
        }
    }

    /// All values, as JSON. Rates are per second, times in seconds.
    pub fn to_json(&self) -> Json {
        let stage = |s: &StageTimes| {
            (s.stage.clone(), json!({ "count": s.count, "p50": s.p50, "p99": s.p99 }))
        };
        let service = |s: &ServiceSample| {
            let drops: serde_json::Map<_, _> =
                s.drops.iter().map(|(reason, rate)| (reason.clone(), json!(rate))).collect();
            let stages: serde_json::Map<_, _> = s.stages.iter().map(stage).collect();
            json!({
                "name": s.name, "received": s.received, "replied": s.replied,
                "dropped": s.dropped(), "drops": drops, "outstanding": s.outstanding,
                "depth_mean": s.depth.0, "depth_max": s.depth.1, "paused": s.paused, "stages": stages,
            })
        };
        let function = |f: &FunctionSample| {
            json!({
                "service": f.service, "function": f.function, "messages": f.messages, "dropped": f.dropped,
                "failures": f.failures, "time": f.time,
            })
        };
        let socket = |s: &SocketSample| {
            json!({
                "service": s.service, "open": s.open, "opened": s.opened, "closed": s.closed,
                "received_bytes": s.received, "sent_bytes": s.sent,
            })
        };
        let tenant = |t: &TenantSample| {
            json!({
                "tenant": t.tenant, "received": t.received, "replied": t.replied, "dropped": t.dropped,
                "shed": t.shed, "outstanding": t.outstanding, "waited": t.waited,
            })
        };
        let transfer = |t: &TransferSample| {
            json!({
                "device": t.device, "queued": t.queued, "running": t.running,
                "bytes_in_flight": t.bytes_in_flight, "source_bytes": t.taken, "sink_bytes": t.given,
            })
        };
        let worker = |w: &WorkerSample| {
            json!({
                "worker": w.worker, "busy": w.busy, "idle": w.idle, "asleep": w.asleep,
                "turns": w.turns, "connections": w.connections,
            })
        };
        json!({
            "seconds": self.seconds, "ready": self.ready, "left_behind": self.left_behind,
            "stalled": self.stalled,
            "services": self.services.iter().map(service).collect::<Vec<_>>(),
            "functions": self.functions.iter().map(function).collect::<Vec<_>>(),
            "sockets": self.sockets.iter().map(socket).collect::<Vec<_>>(),
            "tenants": self.tenants.iter().map(tenant).collect::<Vec<_>>(),
            "transfers": self.transfers.iter().map(transfer).collect::<Vec<_>>(),
            "workers": self.workers.iter().map(worker).collect::<Vec<_>>(),
        })
    }
}

/// Two pages.
struct Change<'a> {
    before: &'a Page,
    after: &'a Page,
    seconds: f64,
}

impl Change<'_> {
    fn difference(&self, name: &str, labels: &[(&str, &str)]) -> f64 {
        let before = self.before.value(name, labels).unwrap_or(0.0);
        (self.after.value(name, labels).unwrap_or(0.0) - before).max(0.0)
    }

    fn rate(&self, name: &str, labels: &[(&str, &str)]) -> f64 {
        self.difference(name, labels) / self.seconds
    }

    fn service(&self, name: &str) -> ServiceSample {
        let of = [("service", name)];
        let gauge = |metric| self.after.value(metric, &of).unwrap_or(0.0);
        let reasons = self.after.labels("serval_dropped_total", "reason");
        let drops = reasons.map(|reason| {
            let labels = [("service", name), ("reason", reason)];
            (reason.to_owned(), self.rate("serval_dropped_total", &labels))
        });
        let stages = self.after.labels("serval_stage_duration_seconds_count", "stage");
        let mut times: Vec<StageTimes> = stages
            .map(|stage| {
                let labels = [("service", name), ("stage", stage)];
                self.times("serval_stage_duration_seconds_bucket", &labels, stage)
            })
            .collect();
        times.push(self.times("serval_request_duration_seconds_bucket", &of, "total"));
        ServiceSample {
            name: name.to_owned(),
            received: self.rate("serval_requests_received_total", &of),
            replied: self.rate("serval_replies_total", &of),
            drops: drops.filter(|(_, rate)| *rate > 0.0).collect(),
            outstanding: gauge("serval_outstanding_requests"),
            depth: (gauge("serval_mqueue_depth_mean"), gauge("serval_mqueue_depth_max")),
            paused: gauge("serval_service_paused") > 0.0,
            stages: times,
        }
    }

    fn functions(&self) -> Vec<FunctionSample> {
        const MESSAGES: &str = "serval_function_messages_total";
        let mut functions = Vec::new();
        for service in self.after.labels(MESSAGES, "service") {
            for function in self.after.labels(MESSAGES, "function") {
                let of = [("service", service), ("function", function)];
                if self.after.value(MESSAGES, &of).is_none() {
                    continue;
                }
                let rate = |name: &str| self.rate(&format!("serval_function_{name}_total"), &of);
                let messages = rate("messages");
                let time = (messages > 0.0).then(|| rate("time_seconds") / messages);
                functions.push(FunctionSample {
                    service: service.to_owned(),
                    function: function.to_owned(),
                    messages,
                    dropped: rate("dropped") + rate("failed_closed"),
                    failures: rate("failures"),
                    time,
                });
            }
        }
        functions
    }

    fn sockets(&self) -> Vec<SocketSample> {
        let of_service = |service: &str| {
            let of = [("service", service)];
            let total = |metric: &str| self.after.value(metric, &of).unwrap_or(0.0);
            let opened = total("serval_sockets_opened_total");
            (opened > 0.0).then(|| SocketSample {
                service: service.to_owned(),
                open: (opened - total("serval_sockets_closed_total")).max(0.0),
                opened: self.rate("serval_sockets_opened_total", &of),
                closed: self.rate("serval_sockets_closed_total", &of),
                received: self.rate("serval_socket_received_bytes_total", &of),
                sent: self.rate("serval_socket_sent_bytes_total", &of),
            })
        };
        self.after.labels("serval_sockets_opened_total", "service").filter_map(of_service).collect()
    }

    fn transfers(&self) -> Vec<TransferSample> {
        let device = |name: &str| {
            let of = [("device", name)];
            let now = |metric: &str| self.after.value(metric, &of).unwrap_or(0.0);
            TransferSample {
                device: name.to_owned(),
                queued: now("serval_transfers_queued"),
                running: now("serval_transfers_running"),
                bytes_in_flight: now("serval_transfer_bytes_in_flight"),
                taken: self.rate("serval_transfers_source_bytes_total", &of),
                given: self.rate("serval_transfers_sink_bytes_total", &of),
            }
        };
        self.after.labels("serval_transfer_bytes_in_flight", "device").map(device).collect()
    }

    fn tenants(&self) -> Vec<TenantSample> {
        let tenant = |name: &str| {
            let of = [("tenant", name)];
            let rate = |metric: &str| self.rate(&format!("serval_tenant_{metric}_total"), &of);
            TenantSample {
                tenant: name.to_owned(),
                received: rate("requests"),
                replied: rate("replies"),
                dropped: rate("dropped_requests"),
                shed: rate("shed_requests"),
                outstanding: self
                    .after
                    .value("serval_tenant_outstanding_requests", &of)
                    .unwrap_or(0.0),
                waited: rate("skipped_turns") + rate("limited_turns"),
            }
        };
        self.after.labels("serval_tenant_requests_total", "tenant").map(tenant).collect()
    }

    fn times(&self, buckets: &str, labels: &[(&str, &str)], stage: &str) -> StageTimes {
        // Cumulative counts by upper bound, in seconds.
        let mut counts: Vec<(f64, f64)> = Vec::new();
        for bound in self.after.labels(buckets, "le") {
            let labels = [labels, &[("le", bound)]].concat();
            let seconds =
                if bound == "+Inf" { f64::INFINITY } else { bound.parse().unwrap_or(0.0) };
            counts.push((seconds, self.difference(buckets, &labels)));
        }
        let quantile = |q| quantile(&counts, q);
        let count = counts.last().map_or(0.0, |(_, count)| *count) as u64;
        StageTimes { stage: stage.to_owned(), count, p50: quantile(0.5), p99: quantile(0.99) }
    }

    fn worker(&self, worker: &str) -> WorkerSample {
        let share = |state| {
            self.rate("serval_worker_time_seconds_total", &[("worker", worker), ("state", state)])
        };
        let (busy, idle, asleep) = (share("busy"), share("idle"), share("asleep"));
        // A turn's time is counted when the next one starts: the sum may differ from the elapsed time.
        let whole = (busy + idle + asleep).max(1e-9);
        let of = [("worker", worker)];
        WorkerSample {
            worker: worker.to_owned(),
            busy: busy / whole,
            idle: idle / whole,
            asleep: asleep / whole,
            turns: self.rate("serval_worker_turns_total", &of),
            connections: self.after.value("serval_worker_connections", &of).unwrap_or(0.0),
        }
    }
}

/// The quantile of a histogram of cumulative counts, with values evenly distributed inside a bucket (like Prometheus'
/// `histogram_quantile`). Values above the last bound count as that bound.
fn quantile(counts: &[(f64, f64)], q: f64) -> Option<f64> {
    let whole = counts.last()?.1;
    if whole <= 0.0 {
        return None;
    }
    let rank = q * whole;
    let (mut low, mut below) = (0.0, 0.0);
    for &(bound, count) in counts {
        if count >= rank && count > below {
            if bound.is_infinite() {
                return Some(low);
            }
            return Some(low + (bound - low) * (rank - below) / (count - below));
        }
        if bound.is_finite() {
            low = bound;
        }
        below = count;
    }
    Some(low)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A page of one service and one worker after `n` seconds at 100 requests a second.
    pub(super) fn page(n: u64) -> Page {
        let mut text = format!(
            "# TYPE serval_ready gauge\nserval_ready 1\n\
             serval_outstanding_requests{{service=\"digits\"}} 3\n\
             serval_requests_received_total{{service=\"digits\"}} {}\n\
             serval_replies_total{{service=\"digits\"}} {}\n\
             serval_dropped_total{{service=\"digits\",reason=\"no_credit\",scope=\"request\"}} {}\n\
             serval_dropped_total{{service=\"digits\",reason=\"too_long\",scope=\"request\"}} 7\n\
             serval_mqueue_depth_mean{{service=\"digits\"}} 1.5\n\
             serval_mqueue_depth_max{{service=\"digits\"}} 3.0\n\
             serval_service_paused{{service=\"digits\"}} 2.0\n\
             serval_service_left_behind{{service=\"gone\"}} 1\n\
             serval_function_messages_total{{service=\"digits\",function=\"limits\"}} {}\n\
             serval_function_dropped_total{{service=\"digits\",function=\"limits\"}} {}\n\
             serval_function_failed_closed_total{{service=\"digits\",function=\"limits\"}} {}\n\
             serval_function_failures_total{{service=\"digits\",function=\"limits\"}} {}\n\
             serval_function_time_seconds_total{{service=\"digits\",function=\"limits\"}} {}\n\
             serval_sockets_opened_total{{service=\"digits\"}} {}\n\
             serval_sockets_closed_total{{service=\"digits\"}} {}\n\
             serval_socket_received_bytes_total{{service=\"digits\"}} {}\n\
             serval_socket_sent_bytes_total{{service=\"digits\"}} {}\n\
             serval_sockets_opened_total{{service=\"none\"}} 0\n\
             serval_tenant_requests_total{{tenant=\"shop\"}} 0\n\
             serval_tenant_skipped_turns_total{{tenant=\"shop\"}} {n}\n\
             serval_tenant_limited_turns_total{{tenant=\"shop\"}} {}\n\
             serval_worker_connections{{worker=\"0\"}} 9\n\
             serval_worker_turns_total{{worker=\"0\"}} {}\n",
            100 * n,
            90 * n,
            10 * n,
            200 * n,
            20 * n,
            5 * n,
            n,
            0.001 * n as f64,
            3 * n,
            2 * n,
            7000 * n,
            5000 * n,
            4 * n,
            1000 * n
        );
        for (state, share) in [("busy", 0.5), ("idle", 0.25), ("asleep", 0.25)] {
            let seconds = share * n as f64;
            text += &format!(
                "serval_worker_time_seconds_total{{worker=\"0\",state=\"{state}\"}} {seconds}\n"
            );
        }
        for stage in ["receive", "queue"] {
            let labels = format!("service=\"digits\",stage=\"{stage}\"");
            text += &format!("serval_stage_duration_seconds_count{{{labels}}} {}\n", 10 * n);
            for (bound, count) in [("0.001", 0), ("0.002", 5 * n), ("+Inf", 10 * n)] {
                text += &format!(
                    "serval_stage_duration_seconds_bucket{{le=\"{bound}\",{labels}}} {count}\n"
                );
            }
        }
        Page::parse(&text)
    }

    #[test]
    fn two_pages_make_rates_shares_and_quantiles() {
        let sample = Sample::between(&page(10), &page(14), Duration::from_secs(4));
        assert!(sample.ready);
        let service = &sample.services[0];
        assert_eq!(
            (service.name.as_str(), service.received, service.replied),
            ("digits", 100.0, 90.0)
        );
        assert_eq!(service.drops, [("no_credit".to_owned(), 10.0)], "too_long did not grow");
        assert_eq!((service.outstanding, service.depth), (3.0, (1.5, 3.0)));
        assert!(service.paused);
        assert_eq!(sample.left_behind, ["gone"]);
        let [function] = &sample.functions[..] else { panic!("{:?}", sample.functions) };
        assert_eq!((&*function.service, &*function.function), ("digits", "limits"));
        assert_eq!((function.messages, function.dropped, function.failures), (200.0, 25.0, 1.0));
        assert!((function.time.unwrap() - 5e-6).abs() < 1e-9);
        let queue = &service.stages[1];
        assert_eq!((queue.stage.as_str(), queue.count), ("queue", 40));
        assert_eq!((queue.p50, queue.p99), (Some(0.002), Some(0.002)));
        assert_eq!(service.stages[2].p50, None, "no request was sampled up to this stage");
        let [socket] = &sample.sockets[..] else { panic!("{:?}", sample.sockets) };
        assert_eq!((&*socket.service, socket.open, socket.opened), ("digits", 14.0, 3.0));
        assert_eq!((socket.closed, socket.received, socket.sent), (2.0, 7000.0, 5000.0));
        assert_eq!(sample.to_json()["sockets"][0]["received_bytes"], 7000.0);
        assert_eq!(sample.tenants[0].waited, 5.0, "for others, and for its limits");
        let worker = &sample.workers[0];
        assert_eq!((worker.busy, worker.idle, worker.asleep), (0.5, 0.25, 0.25));
        assert_eq!((worker.turns, worker.connections), (1000.0, 9.0));
    }

    #[test]
    fn no_losses_are_zero() {
        let sample = Sample::between(&page(10), &page(10), Duration::from_secs(1));
        assert!(sample.services[0].drops.is_empty());
        assert_eq!(sample.to_json()["services"][0]["dropped"].to_string(), "0.0");
    }

    #[test]
    fn a_restarted_server_has_no_negative_rates() {
        let sample = Sample::between(&page(10), &page(1), Duration::from_secs(1));
        assert_eq!((sample.services[0].received, sample.workers[0].busy), (0.0, 0.0));
    }

    #[test]
    fn quantiles_lie_inside_their_buckets() {
        let counts = [(1.0, 0.0), (2.0, 10.0), (5.0, 10.0), (f64::INFINITY, 20.0)];
        assert_eq!(quantile(&counts, 0.25), Some(1.5));
        assert_eq!(quantile(&counts, 0.5), Some(2.0));
        assert_eq!(quantile(&counts, 0.99), Some(5.0), "beyond the last bound");
        assert_eq!(quantile(&[(1.0, 0.0), (f64::INFINITY, 0.0)], 0.5), None);
        assert_eq!(quantile(&[], 0.5), None);
    }

    #[test]
    fn services_are_sorted_by_the_chosen_order() {
        let mut sample = Sample::between(&page(0), &page(1), Duration::from_secs(1));
        let other = ServiceSample {
            name: "other".into(),
            replied: 1e6,
            drops: vec![],
            ..sample.services[0].clone()
        };
        sample.services.push(other);
        let first = |sample: &Sample| sample.services[0].name.clone();
        sample.sort(Sort::Configured.next());
        assert_eq!(first(&sample), "other");
        sample.sort(Sort::Replied.next());
        assert_eq!(first(&sample), "digits");
        assert_eq!(Sort::Dropped.next(), Sort::Configured);
    }
}
