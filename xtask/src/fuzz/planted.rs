//! Checks that the fuzz targets find bugs: `cargo xtask fuzz --planted`.
//!
//! The sources are copied, one bug is planted in the code under each target, and every target must find its
//! bug within a time limit, from the committed corpus. A target that fails this proves nothing when it finds nothing.
//! A plant is a text that occurs exactly once in a file, and its replacement.

use std::fs;
use std::path::Path;
use std::time::Instant;

use super::{build, copy, libfuzzer, targets};
use crate::Findings;
use crate::files::{self, root};
use crate::side_by_side::{all_sound, cores};

/// A bug for one target.
struct Plant {
    target: &'static str,
    bug: &'static str,
    file: &'static str,
    right: &'static str,
    wrong: &'static str,
}

const PLANTS: &[Plant] = &[
    Plant {
        target: "attach",
        bug: "a message may continue after its end",
        file: "crates/wire/src/attach.rs",
        right: "if self.0.is_empty() { Ok(message) }",
        wrong: "if self.0.len() < 8 { Ok(message) }",
    },
    Plant {
        target: "coap",
        bug: "the token of a CoAP message may be cut off",
        file: "crates/builtins/src/coap_auth/message.rs",
        right: "rest.split_at_checked(token_bytes)?",
        wrong: "rest.split_at(token_bytes)",
    },
    Plant {
        target: "collective",
        bug: "the number of a transfer is not compared",
        file: "crates/collective/src/call.rs",
        right: "let ours = self.header(part, receive.range.len());",
        wrong: "let ours = self.header(theirs.part, receive.range.len());",
    },
    Plant {
        target: "config",
        bug: "columns count from 3",
        file: "crates/server/src/config/diagnostic.rs",
        right: "let column = before.chars().count() + 1;",
        wrong: "let column = before.chars().count() + 3;",
    },
    Plant {
        target: "control",
        bug: "an answer may contain the control character DEL",
        file: "crates/server/src/control/protocol.rs",
        right: "c.is_control() && !(",
        wrong: "c.is_ascii_control() && c != '\u{7f}' && !(",
    },
    Plant {
        target: "expand",
        bug: "expansions have no limit",
        file: "crates/transfer/src/stages/compress.rs",
        right: "if self.made > self.limits.bytes ||",
        wrong: "if",
    },
    Plant {
        target: "framing_request",
        bug: "a command may be twice as long as the maximum",
        file: "crates/wire/src/framing/memcached/request.rs",
        right: "if end > max {",
        wrong: "if end > 2 * max {",
    },
    Plant {
        target: "framing_response",
        bug: "a value may be a byte longer than the maximum",
        file: "crates/wire/src/framing/memcached/response.rs",
        right: "if end > max {",
        wrong: "if end > max + 1 {",
    },
    Plant {
        target: "function",
        bug: "a module may write a byte behind its memory",
        file: "crates/onpath/src/wasm/descriptor.rs",
        right: "end > memory_bytes)",
        wrong: "end > memory_bytes + 1)",
    },
    Plant {
        target: "handshake",
        bug: "a message may be four bytes short",
        file: "crates/wire/src/handshake.rs",
        right: "bytes.len() >= least",
        wrong: "bytes.len() + 4 >= least",
    },
    Plant {
        target: "link",
        bug: "a reserved byte of a frame may have any value",
        file: "crates/wire/src/link.rs",
        right: "if zero != 0 || (code",
        wrong: "if (code",
    },
    Plant {
        target: "memcached_cache",
        bug: "a hit ends without its last byte",
        file: "crates/builtins/src/memcached_cache/answer.rs",
        right: "out.extend_from_slice(END);",
        wrong: "out.extend_from_slice(b\"END\\r\\0\");",
    },
    Plant {
        target: "metrics_request",
        bug: "a fragment is kept in the path",
        file: "crates/server/src/exporter/http.rs",
        right: "target.split(['?', '#'])",
        wrong: "target.split(['?'])",
    },
    Plant {
        target: "region",
        bug: "only the first slot is checked to be inside the region",
        file: "crates/mqueue/src/region/directory.rs",
        right: "inside(entry.slots_offset, slots_bytes(entry))",
        wrong: "inside(entry.slots_offset, u64::from(entry.slot_stride))",
    },
    Plant {
        target: "ring",
        bug: "a payload may be 64 bytes longer than its slot",
        file: "crates/mqueue/src/ring/consumer.rs",
        right: "u64::from(header.len) <= self.inline_max;",
        wrong: "u64::from(header.len) <= self.inline_max + 64;",
    },
    Plant {
        target: "sockets",
        bug: "a socket that is free can be closed",
        file: "crates/sockets/src/block.rs",
        right: "matches!(slot.state, State::Open | State::Dead)",
        wrong: "matches!(slot.state, State::Open | State::Dead | State::Free)",
    },
    Plant {
        target: "sealed",
        bug: "the bytes of a stream that were taken are counted without those of its header",
        file: "crates/transfer/src/stages/seal.rs",
        right: "ran.taken += take;\n                ran.done = last",
        wrong: "ran.taken = take;\n                ran.done = last",
    },
    Plant {
        target: "transfer",
        bug: "reserved bytes of a request may have any value",
        file: "crates/transfer/src/service/message.rs",
        right: "rest.reserved(2)?;\n    if more >= FILES_MAX",
        wrong: "rest.bytes(2)?;\n    if more >= FILES_MAX",
    },
    Plant {
        target: "worker",
        bug: "a batch of requests counts as one",
        file: "crates/engine/src/admit.rs",
        right: "false => share.count_received(messages),",
        wrong: "false => share.count_received(u64::from(messages > 0)),",
    },
];

/// Time limit for a target to find its bug, in seconds, for a busy machine.
const SECONDS_MAX: u32 = 120;

/// Plants every bug and runs the targets; returns one line per target.
pub(super) fn find_all() -> Result<Vec<String>, Findings> {
    let targets = targets()?;
    let bare = |target: &&String| PLANTS.iter().all(|plant| plant.target != **target);
    let bare: Vec<&String> = targets.iter().filter(bare).collect();
    if !bare.is_empty() {
        let fix = "add one to xtask/src/fuzz/planted.rs";
        return Err(vec![format!("no bug is planted for {bare:?}: {fix}")]);
    }
    let folder = root().join("target/planted");
    plant(&folder)?;
    // The build starts in the usual folder to share dependencies, and is then moved away.
    let binaries = folder.join("programs");
    copy(&targets, &build(&folder, "target/fuzz")?, &binaries)?;
    all_sound(cores(), targets, |target| must_find(&folder, &binaries, &target))
}

/// Copies the sources, with the bugs. Unchanged files are not rewritten, so that they are not rebuilt.
fn plant(folder: &Path) -> Result<(), Findings> {
    let mut findings = Findings::new();
    for file in files::all() {
        let mut text = file.text;
        for plant in PLANTS.iter().filter(|plant| plant.file == file.path) {
            match text.matches(plant.right).count() {
                1 => text = text.replace(plant.right, plant.wrong),
                count => findings.push(format!(
                    "{}: `{}` occurs {count} times instead of once: {} needs another bug",
                    plant.file, plant.right, plant.target
                )),
            }
        }
        let path = folder.join(&file.path);
        if fs::read_to_string(&path).is_ok_and(|old| old == text) {
            continue;
        }
        let parent = path.parent().expect("a path inside the folder");
        let written = fs::create_dir_all(parent).and_then(|()| fs::write(&path, text));
        findings.extend(written.err().map(|error| format!("{}: {error}", path.display())));
    }
    if findings.is_empty() { Ok(()) } else { Err(findings) }
}

fn must_find(folder: &Path, binaries: &Path, target: &str) -> Result<String, String> {
    // From the committed corpus alone: inputs from earlier runs would make it easy.
    let corpus = root().join("fuzz/corpus").join(target);
    let mut command = libfuzzer(folder, binaries, target, "planted-");
    command.arg(format!("-max_total_time={SECONDS_MAX}")).arg(corpus).arg("-seed=1");
    let start = Instant::now();
    let output = command.output().map_err(|error| format!("{target}: {error}"))?;
    let text = String::from_utf8_lossy(&output.stderr);
    let seconds = start.elapsed().as_secs();
    let bug = PLANTS.iter().find(|plant| plant.target == target).map_or("", |plant| plant.bug);
    if output.status.success() || !text.contains("panicked at") {
        return Err(format!("{target} did not find the bug in {seconds} s: {bug}"));
    }
    Ok(format!("{target:18} found the bug in {seconds:3} s: {bug}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Planting takes an hour; that the sources have moved on is found at once.
    #[test]
    fn every_plant_has_its_place() {
        let is_lost = |plant: &&Plant| {
            let text = fs::read_to_string(root().join(plant.file)).unwrap_or_default();
            text.matches(plant.right).count() != 1
        };
        let lost = PLANTS.iter().filter(is_lost);
        let lost: Vec<_> = lost.map(|plant| (plant.target, plant.file, plant.right)).collect();
        assert!(lost.is_empty(), "{lost:#?}");
    }
}
