//! `[[service.file]]`: what transfers of a service's kernels may use; and the backend that does them.

use std::path::Path;

use engine::topology::{
    Backend, FILE_SPECS_MAX, FileAccess, FileAt, FileSpec, MEMORY_BYTES_MAX, MEMORY_BYTES_MIN,
};

use super::address;
use super::diagnostic::Problem;
use super::reader::{Report, Section};
use super::tables::{list_of_service, one_of};
use super::tree::Value;

/// `connect` of the backend that does transfers.
const TRANSFER: &str = "transfer";
/// Default size of the memory of each block.
pub(super) const MEMORY_BYTES: u64 = 1 << 20;
/// Most transfers of a block at a time.
const IN_FLIGHT: std::ops::RangeInclusive<u64> = 1..=64;

/// Whether a backend does transfers, and is no server.
pub(super) fn does_transfers(section: &mut Section<'_>) -> bool {
    let text = section.entry("connect").map(|entry| &entry.node.value);
    matches!(text, Some(Value::String(text)) if text == TRANSFER)
}

/// Reads the backend that does transfers.
pub(super) fn read_backend(
    report: &mut Report<'_>,
    section: &mut Section<'_>,
    name: &str,
) -> Backend {
    // It was read before.
    if section.text(report, "connect", "\"transfer\"").is_some() {
        section.record(report, "connect", TRANSFER.to_owned());
    }
    let bytes = MEMORY_BYTES_MIN..=MEMORY_BYTES_MAX;
    let memory_bytes = section.integer(report, "memory_bytes", bytes, MEMORY_BYTES);
    let mut backend = Backend::transfers(name, memory_bytes);
    let in_flight = u64::from(backend.in_flight);
    backend.in_flight = section.integer(report, "in_flight", IN_FLIGHT, in_flight) as u32;
    backend.timeout_ms = section.integer(report, "timeout_ms", 1..=3_600_000, backend.timeout_ms);
    backend
}

/// Reads the files of a service, whose paths are relative to `base`.
pub(super) fn read_files(
    report: &mut Report<'_>,
    section: &mut Section<'_>,
    base: &Path,
) -> Vec<FileSpec> {
    let read =
        |report: &mut Report<'_>, section: &mut Section<'_>| read_file(report, section, base);
    list_of_service(report, section, "file", FILE_SPECS_MAX, read)
}

/// Reads one: `path` of a file, or `connect` to a peer.
fn read_file(report: &mut Report<'_>, section: &mut Section<'_>, base: &Path) -> Option<FileSpec> {
    let right = "give one: `path` of a file, `connect` for a peer to which transfers connect";
    let at = match one_of(report, section, ["path", "connect"], right)? {
        "path" => read_path(report, section, base),
        _ => read_peer(report, section),
    };
    let key = section.text(report, "key", "\"secret.key\"").map(|(text, _)| {
        section.record(report, "key", text.clone());
        base.join(text)
    });
    Some(FileSpec { at: at?, key })
}

fn read_path(report: &mut Report<'_>, section: &mut Section<'_>, base: &Path) -> Option<FileAt> {
    const ACCESS: [(&str, FileAccess); 3] =
        [("read", FileAccess::Read), ("write", FileAccess::Write), ("create", FileAccess::Create)];
    let (text, _) = section.text(report, "path", "\"model.bin\"")?;
    section.record(report, "path", text.clone());
    let access = section.choice(report, "access", &ACCESS, ACCESS[0].0);
    Some(FileAt::File { path: base.join(text), access })
}

fn read_peer(report: &mut Report<'_>, section: &mut Section<'_>) -> Option<FileAt> {
    let (text, span) = section.text(report, "connect", "\"tcp://127.0.0.1:7000\"")?;
    section.record(report, "connect", text.clone());
    let datagrams = ("a transfer cannot use udp://", "write tcp:// or unix://");
    match address::stream(&text, false, datagrams) {
        Ok(at) => Some(FileAt::Connection(at)),
        Err(wrong) => {
            report.problem(Problem::new(span, wrong.what, wrong.right));
            None
        }
    }
}
