//! `[[service.socket]]`: what the blocks of a service may listen at and connect to with stream sockets.

use engine::topology::{SOCKET_SPECS_MAX, SocketSpec};

use super::address;
use super::diagnostic::Problem;
use super::reader::{Report, Section};
use super::tables::{list_of_service, one_of};

/// A day.
const IDLE_MS_MAX: u64 = 86_400_000;

/// Why no `udp://`, and the fix.
const DATAGRAMS: (&str, &str) = (
    "a stream socket of a kernel cannot use udp://",
    "write tcp:// or unix://; datagrams are messages, which need no socket: `listen` of the service",
);

/// Reads the sockets of a service.
pub(super) fn read_sockets(report: &mut Report<'_>, section: &mut Section<'_>) -> Vec<SocketSpec> {
    list_of_service(report, section, "socket", SOCKET_SPECS_MAX, read_socket)
}

/// Reads one socket: `listen` or `connect`.
fn read_socket(report: &mut Report<'_>, section: &mut Section<'_>) -> Option<SocketSpec> {
    let right = "give one: `listen` for connections that arrive, `connect` for a peer";
    let key = one_of(report, section, ["listen", "connect"], right)?;
    let listens = key == "listen";
    let (text, span) = section.text(report, key, "\"tcp://127.0.0.1:7000\"")?;
    section.record(report, key, text.clone());
    let read = address::stream(&text, listens, DATAGRAMS);
    let idle_ms = section.integer(report, "idle_ms", 0..=IDLE_MS_MAX, 0);
    match read {
        Ok(at) if listens => Some(SocketSpec { idle_ms, ..SocketSpec::listen(at) }),
        Ok(at) => Some(SocketSpec { idle_ms, ..SocketSpec::connect(at) }),
        Err(wrong) => {
            report.problem(Problem::new(span, wrong.what, wrong.right));
            None
        }
    }
}
