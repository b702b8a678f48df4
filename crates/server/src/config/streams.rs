//! What a service sets for its TCP connections.

use engine::topology::{Limits, Service};

use super::diagnostic::Problem;
use super::keys::IDLE_S;
use super::reader::{Report, Section, integer_of};

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

/// `error_reply_hex`: the reply to a request that is refused or dropped. `check-config` shows none as `none`.
pub(super) fn read_error_reply(
    report: &mut Report<'_>,
    section: &mut Section<'_>,
    service: &mut Service,
) {
    let given = section.text(report, "error_reply_hex", "\"4552524f52\"");
    let given = given.filter(|(text, _)| !matches!(text.as_str(), "" | "none"));
    if let Some((text, span)) = given {
        match from_hex(&text) {
            Ok(bytes) if bytes.is_empty() => {
                let what = "`error_reply_hex` has no bytes";
                report.problem(Problem::new(span, what, "give 1 to 255, or remove it"));
            }
            Ok(bytes) => service.error_reply = bytes,
            Err(right) => {
                let what = "`error_reply_hex` is not bytes in hexadecimal digits";
                report.problem(Problem::new(span, what, right));
            }
        }
    }
    section.record(report, "error_reply_hex", to_hex(&service.error_reply));
}

fn to_hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Bytes in hexadecimal digits: `0a1b`, `0x0a 1b`, `0a:1b`. The error is the fix.
pub fn from_hex(text: &str) -> Result<Vec<u8>, &'static str> {
    let text = text.strip_prefix("0x").or(text.strip_prefix("0X")).unwrap_or(text);
    let digits = text.chars().filter(|c| !c.is_ascii_whitespace() && *c != ':');
    let digits: Option<Vec<u8>> = digits.map(|c| c.to_digit(16).map(|digit| digit as u8)).collect();
    let pairs = digits.as_deref().map(<[u8]>::as_chunks::<2>).filter(|(_, rest)| rest.is_empty());
    let (pairs, _) = pairs.ok_or("must be pairs of hexadecimal digits, such as 0a1b")?;
    Ok(pairs.iter().map(|[high, low]| high << 4 | low).collect())
}
