//! `[[service]]` with `upstream`: a proxy.

use engine::topology::{PROXY_MESSAGE_BYTES, Service, Tenant};
use mqueue::abi::MESSAGE_BYTES_MAX;
use wire::framing::Framing;

use super::address;
use super::diagnostic::Problem;
use super::fields::read_some;
use super::reader::{Report, Section};
use super::tables::without;
use super::tenant::read_tenant;

/// Keys that describe a kernel, its mqueues and what it answers.
const OF_KERNELS: &[&str] = &[
    "accelerator",
    "kernel",
    "params",
    "mqueues",
    "slots",
    "arena_bytes",
    "replies",
    "ordered",
    "dispatch",
    "key",
    "queue_us_max",
    "rings",
    "backend",
    "socket",
    "file",
    "sockets_per_block",
    "socket_bytes",
    "peer_address",
];
/// Keys that go straight into a field of a service.
const FIELDS: &[&str] =
    &["max_message_bytes", "request_timeout_ms", "upstream_flows", "proxy_protocol"];

/// Keys that only a proxy has.
pub(super) const OF_PROXIES: &[&str] = &["upstream_flows", "proxy_protocol"];

/// Reads what is left of a service with an upstream server.
pub(super) fn read(
    report: &mut Report<'_>,
    section: &mut Section<'_>,
    service: Service,
    tenants: &[Tenant],
) -> Service {
    let example = "\"127.0.0.1:11211\"";
    let given = section.text(report, "upstream", example);
    let upstream = given.and_then(|(text, span)| {
        section.record(report, "upstream", text.clone());
        let found = address::upstream(&text);
        found.map_err(|wrong| report.problem(Problem::new(span, wrong.what, wrong.right))).ok()
    });
    without(report, section, OF_KERNELS, "`upstream`", "remove `upstream`");
    let placeholder = (std::net::Ipv4Addr::LOCALHOST, 1).into();
    let Service { name, listen, memory_ports, framing, .. } = service;
    let mut proxy = Service::proxy(&name, listen, upstream.unwrap_or(placeholder));
    if !memory_ports.is_empty() {
        let what = "a proxy has no shm:// ports";
        let right = "listen at udp:// and tcp://, which is how its server is asked";
        report.problem(Problem::new(section.place("listen"), what, right));
    }
    proxy.framing = framing;
    if framing == Framing::LengthU16 {
        proxy.max_message_bytes = PROXY_MESSAGE_BYTES.min(u16::MAX.into());
    }
    read_some(report, section, &mut proxy, |key| FIELDS.contains(&key));
    let usual = proxy.max_message_bytes.into();
    let range = 1..=MESSAGE_BYTES_MAX.into();
    proxy.max_reply_bytes = section.integer(report, "max_reply_bytes", range, usual) as u32;
    proxy.tenant = read_tenant(report, section, tenants);
    proxy
}
