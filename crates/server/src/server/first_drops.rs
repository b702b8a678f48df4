//! Drops that an operator would look for in vain: the first one of a service is logged, by the watchdog's thread and not by a worker.

use std::collections::BTreeSet;

use engine::metrics::Metrics;
use wire::DropReason;

/// The services whose first drop has been reported.
#[derive(Debug, Default)]
pub(super) struct FirstDrops(BTreeSet<String>);

impl FirstDrops {
    /// Reports services that have dropped replies as `reply_ratio` for the first time: their clients get no answer, and the default of
    /// the key depends on where a port listens.
    pub(super) fn report(&mut self, metrics: &Metrics) {
        for service in metrics.services().iter() {
            let is_new = !self.0.contains(service.name())
                && service.snapshot().dropped(DropReason::ReplyRatio) > 0;
            if is_new {
                tracing::warn!("{}", text(service.name()));
                self.0.insert(service.name().to_owned());
            }
        }
    }
}

fn text(service: &str) -> String {
    format!(
        "service {service:?} dropped a reply over UDP as reply_ratio: it has more than limits.udp_reply_ratio times the bytes \
         of its request (3 off loopback by default, because the source of a datagram can be forged); where clients are \
         trusted, raise the key, or set it to 0. Further drops are only counted"
    )
}
