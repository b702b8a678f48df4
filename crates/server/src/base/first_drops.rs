//! Drops that an operator would look for in vain: the first one of a service is logged, by the watchdog's thread and not by a worker.

use std::collections::BTreeSet;

use engine::metrics::Metrics;
use wire::DropReason;

/// The services, among those that run, whose first drop has been reported.
#[derive(Debug, Default)]
pub(crate) struct FirstDrops(BTreeSet<String>);

impl FirstDrops {
    /// Reports services that have dropped replies as `reply_ratio` for the first time: their clients get no answer, and the default of
    /// the key depends on where a port listens.
    pub(crate) fn report(&mut self, metrics: &Metrics) {
        let services = metrics.services();
        self.0.retain(|name| services.iter().any(|service| service.name() == name));
        for service in services.iter() {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_service_that_is_gone_is_forgotten() {
        let metrics = Metrics::new(1, ["a".to_owned(), "b".to_owned()]);
        for service in metrics.services().iter() {
            service.of_worker(0).0.drop_one(DropReason::ReplyRatio);
        }
        let mut drops = FirstDrops::default();
        drops.report(&metrics);
        assert_eq!(drops.0.len(), 2);
        let one = metrics.services()[..1].into();
        metrics.set_running(one, Default::default(), Default::default());
        drops.report(&metrics);
        assert_eq!(drops.0, BTreeSet::from(["a".to_owned()]));
    }
}
