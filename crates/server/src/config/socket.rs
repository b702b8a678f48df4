//! `[[service.socket]]`: what the blocks of a service may listen at and connect to with stream sockets.

use std::net::SocketAddr;

use engine::topology::{SOCKET_SPECS_MAX, SocketAt, SocketSpec};
use wire::nic::Transport;

use super::address::{self, Wrong};
use super::diagnostic::Problem;
use super::reader::{Report, Section};
use super::sections::{named_section, tables};
use super::tree::Table;

/// A day.
const IDLE_MS_MAX: u64 = 86_400_000;

/// Reads the sockets of a service.
pub(super) fn read_sockets(report: &mut Report<'_>, section: &mut Section<'_>) -> Vec<SocketSpec> {
    let found = tables(report, section.entry("socket"), "[[service.socket]]");
    if found.len() > SOCKET_SPECS_MAX {
        let what = format!("{} has {} sockets", section.title, found.len());
        let right = format!("at most {SOCKET_SPECS_MAX}");
        report.problem(Problem::new(section.place("socket"), what, right));
    }
    let path = format!("{}.socket", section.path);
    let mut taken = Vec::new();
    let read = |(index, table): (usize, &Table)| {
        let (mut section, _) = named_section(report, table, "socket", &path, index, &mut taken);
        let spec = read_socket(report, &mut section);
        section.finish(report);
        spec
    };
    found.into_iter().enumerate().take(SOCKET_SPECS_MAX).filter_map(read).collect()
}

/// Reads one socket: `listen` or `connect`.
fn read_socket(report: &mut Report<'_>, section: &mut Section<'_>) -> Option<SocketSpec> {
    let (listens, connects) =
        (section.entry("listen").is_some(), section.entry("connect").is_some());
    if listens == connects {
        let what = format!(
            "{} has {} `listen` {} `connect`",
            section.title,
            if listens { "both" } else { "neither" },
            if listens { "and" } else { "nor" },
        );
        let right = "give one: `listen` for connections that arrive, `connect` for a peer";
        report.problem(Problem::new(section.place("listen"), what, right));
        return None;
    }
    let key = if listens { "listen" } else { "connect" };
    let (text, span) = section.text(report, key, "\"tcp://127.0.0.1:7000\"")?;
    section.record(report, key, text.clone());
    let read = match address::unix_socket(&text) {
        Some(path) => path.map(SocketAt::Unix),
        None if listens => address::listen(&text).and_then(only_tcp),
        None => address::connect(&text).and_then(only_tcp),
    };
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

fn only_tcp((transport, address): (Transport, SocketAddr)) -> Result<SocketAt, Wrong> {
    match transport {
        Transport::Tcp => Ok(SocketAt::Tcp(address)),
        Transport::Udp => Err(Wrong {
            what: "a stream socket of a kernel cannot use udp://".to_owned(),
            right: "write tcp:// or unix://; datagrams are messages, which need no socket: `listen` of the service".to_owned(),
        }),
    }
}
