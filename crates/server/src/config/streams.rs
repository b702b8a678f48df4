//! What a service sets for its TCP connections.

use engine::topology::{Limits, Service};

use super::reader::{Report, Section, integer_of};

/// The range of `idle_s`, here and in `[limits]`.
pub(super) const IDLE_S: std::ops::RangeInclusive<u64> = 1..=86_400;

/// `idle_s`: the service's own time-out of silent connections, and of the flows of a proxy.
pub(super) fn read_idle(
    report: &mut Report<'_>,
    section: &mut Section<'_>,
    service: &mut Service,
    limits: &Limits,
) {
    let entry = section.entry("idle_s");
    let given = entry.and_then(|entry| integer_of(report, "idle_s", &entry.node, &IDLE_S));
    service.idle_ms = given.map(|seconds| seconds * 1000);
    let shown = service.idle_ms.unwrap_or(limits.idle_ms) / 1000;
    section.record(report, "idle_s", shown);
}
