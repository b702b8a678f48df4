//! `serval drop-reasons` and `serval version`.

use ::bench::compare::machine::built_from;
use serde_json::{Value as Json, json};
use wire::DropReason;

use crate::screen::{Screen, Table, Tone};

pub(super) const DROP_REASONS_HELP: &str = "\
Examples:
  serval drop-reasons
  serval drop-reasons --json
  curl -s http://127.0.0.1:9464/metrics | grep serval_dropped_total    what a server has lost";

pub(super) const VERSION_HELP: &str = "\
Examples:
  serval version
  serval version --json    with the version of the region ABI, which runtimes have to share, and
                           the sources of this build";

pub(super) fn drop_reasons(screen: &Screen) {
    screen.show(
        || {
            let mut table = Table::new(&["reason", "scope", "meaning"]);
            for reason in DropReason::ALL {
                table.toned([
                    (Tone::Plain, reason.name().to_owned()),
                    (Tone::Dim, reason.scope().name().to_owned()),
                    (Tone::Plain, reason.describe().to_owned()),
                ]);
            }
            let legend = "\n  \
                Every reason is a counter: serval_dropped_total{service, reason, scope}.\n  \
                Scope request is part of the accounts that hold at any instant:\n  \
                received = replied + consumed + dropped requests + outstanding. Scope intake was lost\n  \
                before it was a request, reply and backend are messages that end no request.\n";
            table.render(screen) + legend
        },
        || {
            let entry = |reason: &DropReason| {
                json!({
                    "reason": reason.name(),
                    "scope": reason.scope().name(),
                    "meaning": reason.describe(),
                })
            };
            Json::Array(DropReason::ALL.iter().map(entry).collect())
        },
    );
}

pub(super) fn version(screen: &Screen) {
    let version = env!("CARGO_PKG_VERSION");
    let abi = mqueue::abi::ABI_VERSION;
    let (system, processor) = (std::env::consts::OS, std::env::consts::ARCH);
    let (commit, dirty, tree) = built_from();
    screen.show(
        || {
            let short = commit.get(..12).unwrap_or(&commit);
            let built = match (commit.is_empty(), dirty) {
                (true, _) => String::new(),
                (_, true) => format!(", built from {short} with changes"),
                (_, false) => format!(", built from {short}"),
            };
            format!("serval {version} (region ABI {abi}, {system} {processor}{built})\n")
        },
        || {
            json!({
                "version": version, "abi": abi, "system": system, "processor": processor,
                "commit": commit, "dirty": dirty, "tree": tree,
            })
        },
    );
}
