//! `[[accelerator]]`, and the accelerators that services name.

use std::path::PathBuf;

use engine::topology::{
    Accelerator, AcceleratorKind, Bundles, CpuPlacement, DeviceSpec, HANG_MS, HANG_MS_MAX,
    HANG_MS_MIN, HEARTBEAT_MS, HEARTBEAT_MS_MAX, HEARTBEAT_MS_MIN, Launch, Rings, STACK_KIB,
    STACK_KIB_MAX, STACK_KIB_MIN, Service,
};
use runtime::kinds::{self, KINDS, Kind};
use sys::local::PATH_BYTES_MAX;

use super::diagnostic::Problem;
use super::kernel;
use super::reader::{Report, Section, integer_of, text_of, wrong_type};
use super::tables::{named_section, without};
use super::tree::{Table, Value};
use super::words::nearest;

/// The accelerators; without any in the file there is one on host cores. Also returns the `hang_ms` of each, if
/// configured.
pub(super) fn read_accelerators(
    report: &mut Report<'_>,
    tables: &[&Table],
) -> Vec<(Accelerator, Option<u64>)> {
    if tables.is_empty() {
        let kind = AcceleratorKind::Cpu { placement: CpuPlacement::Worker, stack_kib: STACK_KIB };
        return vec![(Accelerator { name: "acc0".to_owned(), kind }, None)];
    }
    let mut taken = Vec::new();
    let read = |(index, table): (usize, &&Table)| {
        let (mut section, name) =
            named_section(report, table, "accelerator", "accelerator", index, &mut taken);
        let kind = read_kind(report, &mut section);
        let hang_ms = read_hang_ms(report, &mut section, &kind);
        section.finish(report);
        (Accelerator { name, kind }, hang_ms)
    };
    tables.iter().enumerate().map(read).collect()
}

/// The accelerator of kernel files without `accelerator`: a separate process, so that a fault ends no other service.
pub(super) fn implicit_process(declared: &[Accelerator]) -> Accelerator {
    let is_free = |name: &String| declared.iter().all(|accelerator| accelerator.name != *name);
    let names = std::iter::once("process".to_owned()).chain((0..).map(|n| format!("process{n}")));
    let name = names.into_iter().find(is_free).expect("there are more names than accelerators");
    let launch =
        Launch::Engine { program: None, threads: 0, cores: Vec::new(), stack_kib: STACK_KIB };
    let device = DeviceSpec::host();
    let kind = AcceleratorKind::Process { launch, heartbeat_ms: HEARTBEAT_MS, device };
    Accelerator { name, kind }
}

/// Resolves `rings = "auto"` on each accelerator, as its kind specifies.
pub(super) fn choose_rings(service: &mut Service, accelerators: &[Accelerator]) {
    let rings_on = |index: &usize| match &accelerators[*index].kind {
        AcceleratorKind::Process { device, .. } => kinds::default_rings(device),
        AcceleratorKind::Cpu { .. } => Rings::Auto,
    };
    let rings: Vec<Rings> = service.accelerators.iter().map(rings_on).collect();
    service.bundles = match service.rings {
        Rings::Auto => Bundles::Auto,
        Rings::Bundle => Bundles::Always,
        Rings::Doorbell | Rings::Granule | Rings::Granule8 => Bundles::Never,
    };
    let given = !matches!(service.rings, Rings::Auto | Rings::Bundle);
    if given || rings.iter().all(|rings| *rings == Rings::Auto) {
        return;
    }
    if service.shares.is_empty() && rings.iter().all(|other| *other == rings[0]) {
        service.rings = rings[0];
        return;
    }
    service.share_out();
    for (share, rings) in service.shares.iter_mut().zip(rings) {
        share.rings = rings;
    }
}

fn read_kind(report: &mut Report<'_>, section: &mut Section<'_>) -> AcceleratorKind {
    let mut names: Vec<_> = KINDS.iter().map(|kind| (kind.name(), Some(*kind))).collect();
    names.sort_by_key(|(name, _)| *name);
    let kind = section.choice(report, "kind", &names, "cpu");
    let launches = [("engine", true), ("external", false)];
    let launched = section.choice(report, "launch", &launches, "engine");
    if let Some(kind) = kind.filter(|kind| !kind.flags().in_engine) {
        return read_process(report, section, kind, launched);
    }
    if !launched && kind.is_some() {
        report.problem(Problem::new(
            section.place("launch"),
            "a cpu accelerator runs inside the engine and cannot attach",
            "must be \"engine\", or write kind = \"process\"",
        ));
    }
    let placement = read_placement(report, section);
    let keys = ["attach", "heartbeat_ms"];
    without(report, section, &keys, "kind = \"cpu\"", "write kind = \"process\"");
    let stack_kib = read_stack_kib(report, section);
    AcceleratorKind::Cpu { placement, stack_kib }
}

/// Kinds whose kernels run in a runtime: who starts it, its heartbeat limit, and the processor.
fn read_process(
    report: &mut Report<'_>,
    section: &mut Section<'_>,
    kind: &dyn Kind,
    launched: bool,
) -> AcceleratorKind {
    let (name, flags) = (kind.name(), kind.flags());
    let with = format!("kind = \"{name}\"");
    without(report, section, &["placement"], &with, "write kind = \"cpu\"");
    for other in KINDS.iter().filter(|other| other.name() != name) {
        let texts: Vec<&str> = other.texts().iter().map(|key| key.name).collect();
        without(report, section, &texts, &with, &format!("write kind = \"{}\"", other.name()));
        let own = |key: &&kinds::Key| {
            let common = flags.host_threads && key.name == "threads";
            !common && kind.keys().iter().all(|own| own.name != key.name)
        };
        for key in other.keys().iter().filter(own) {
            let instead = format!("write kind = \"{}\"", other.name());
            without(report, section, &[key.name], &with, &instead);
        }
    }
    let external = "launch = \"external\"";
    let mut settings = Vec::new();
    for key in kind.keys() {
        let value = if launched {
            read_own_key(report, section, key)
        } else {
            let instead = format!("give it to the runtime: serval attach PATH {}", key.flag);
            without(report, section, &[key.name], external, &instead);
            key.default
        };
        settings.push((key.name, value));
    }
    let mut texts = Vec::new();
    for key in kind.texts() {
        let value = if launched {
            read_own_text(report, section, key)
        } else {
            let instead =
                format!("give it to the runtime: serval attach PATH --option {}=...", key.name);
            without(report, section, &[key.name], external, &instead);
            String::new()
        };
        texts.push((key.name, value));
    }
    let bundles = kinds::takes_bundles(name);
    let device = DeviceSpec { kind: name, bundles, settings, texts };
    let range = HEARTBEAT_MS_MIN..=HEARTBEAT_MS_MAX;
    let heartbeat_ms = section.integer(report, "heartbeat_ms", range, HEARTBEAT_MS);
    let host = "write kind = \"process\"";
    if !flags.host_threads {
        without(report, section, &["cores"], &with, host);
    }
    if !flags.stack_kib {
        without(report, section, &["stack_kib"], &with, host);
    }
    let launch = if launched {
        let (threads, cores) =
            if flags.host_threads { read_threads(report, section) } else { (0, Vec::new()) };
        let stack_kib = if flags.stack_kib { read_stack_kib(report, section) } else { STACK_KIB };
        without(report, section, &["attach"], "launch = \"engine\"", "write launch = \"external\"");
        Launch::Engine { program: None, threads, cores, stack_kib }
    } else {
        if flags.host_threads {
            let instead = "give them to the runtime: serval attach PATH --threads N";
            without(report, section, &["threads", "cores"], external, instead);
        }
        if flags.stack_kib {
            let instead = "give it to the runtime: serval attach PATH --stack-kib N";
            without(report, section, &["stack_kib"], external, instead);
        }
        Launch::External { attach: read_attach(report, section) }
    };
    AcceleratorKind::Process { launch, heartbeat_ms, device }
}

/// Reads a key that is specific to this kind.
fn read_own_key(report: &mut Report<'_>, section: &mut Section<'_>, key: &kinds::Key) -> u64 {
    let value = section.integer(report, key.name, key.range.clone(), key.default);
    if let Err((what, right)) = key.check(value) {
        report.problem(Problem::new(section.place(key.name), what, right));
    }
    value
}

/// Reads a text that is specific to this kind, and required.
fn read_own_text(
    report: &mut Report<'_>,
    section: &mut Section<'_>,
    key: &kinds::TextKey,
) -> String {
    let example = format!("{:?}", key.example);
    let Some((text, span)) = section.text(report, key.name, &example) else {
        if section.place(key.name) == section.header() {
            section.missing(report, key.name, &example);
        }
        return String::new();
    };
    if let Err((what, right)) = key.check(&text) {
        report.problem(Problem::new(span, what, right));
    }
    section.record(report, key.name, text.clone());
    text
}

/// Stack of each block on host cores.
fn read_stack_kib(report: &mut Report<'_>, section: &mut Section<'_>) -> usize {
    section.integer(report, "stack_kib", STACK_KIB_MIN..=STACK_KIB_MAX, STACK_KIB as u64) as usize
}

/// Where external runtimes attach.
fn read_attach(report: &mut Report<'_>, section: &mut Section<'_>) -> PathBuf {
    let example = "\"/run/serval/acc0\"";
    let Some((path, span)) = section.text(report, "attach", example) else {
        if section.place("attach") == section.header() {
            section.missing(report, "attach", example);
        }
        return PathBuf::new();
    };
    if !path.starts_with('/') || path.len() > PATH_BYTES_MAX || path.contains('\0') {
        let what = format!("\"{path}\" cannot be a socket's path");
        let right =
            format!("an absolute path of at most {PATH_BYTES_MAX} bytes, such as {example}");
        report.problem(Problem::new(span, what, right));
    }
    section.record(report, "attach", path.clone());
    PathBuf::from(path)
}

fn read_placement(report: &mut Report<'_>, section: &mut Section<'_>) -> CpuPlacement {
    let threads_too =
        section.choice(report, "placement", &[("worker", false), ("threads", true)], "worker");
    if threads_too {
        let (threads, cores) = read_threads(report, section);
        return CpuPlacement::Threads { threads, cores };
    }
    let what = "placement = \"worker\"";
    without(report, section, &["threads"], what, "write placement = \"threads\" with threads");
    without(report, section, &["cores"], what, "write placement = \"threads\" with cores");
    CpuPlacement::Worker
}

/// Reads the number of threads that share blocks, 0 if it is not given, and their cores.
fn read_threads(report: &mut Report<'_>, section: &mut Section<'_>) -> (usize, Vec<usize>) {
    let threads = section.integer(report, "threads", 0..=1024, 0) as usize;
    let cores = read_cores(report, section);
    if !cores.is_empty() && cores.len() < threads {
        report.problem(Problem::new(
            section.place("cores"),
            format!("`cores` lists {} cores for {threads} threads", cores.len()),
            "name one core each",
        ));
    }
    (threads, cores)
}

/// `cores = "auto" | [0, 1]`. Empty: not pinned.
pub(super) fn read_cores(report: &mut Report<'_>, section: &mut Section<'_>) -> Vec<usize> {
    let mut cores: Vec<usize> = Vec::new();
    if let Some(entry) = section.entry("cores") {
        match &entry.node.value {
            Value::Array(items) => {
                for item in items {
                    let Some(core) = integer_of(report, "cores", item, &(0..=4095)) else {
                        continue;
                    };
                    if cores.contains(&(core as usize)) {
                        let what = format!("`cores` names core {core} twice");
                        report.problem(Problem::new(
                            item.span,
                            what,
                            "one worker or thread a core",
                        ));
                        break;
                    }
                    cores.push(core as usize);
                }
            }
            Value::String(word) if word == "auto" => {}
            Value::String(word) => report.problem(Problem::new(
                entry.node.span,
                format!("`cores` cannot be \"{word}\""),
                "must be \"auto\" or a list of cores such as [0, 1]",
            )),
            _ => wrong_type(report, "cores", &entry.node, "\"auto\" or a list such as [0, 1]"),
        }
    }
    let value: serde_json::Value =
        if cores.is_empty() { "auto".into() } else { cores.clone().into() };
    section.record(report, "cores", value);
    cores
}

/// The time limit for one message of a block, where it is supervised.
fn read_hang_ms(
    report: &mut Report<'_>,
    section: &mut Section<'_>,
    kind: &AcceleratorKind,
) -> Option<u64> {
    match kind {
        AcceleratorKind::Cpu { placement: CpuPlacement::Worker, .. } => {
            let instead = "write placement = \"threads\" or kind = \"process\"";
            without(report, section, &["hang_ms"], "placement = \"worker\"", instead);
            None
        }
        AcceleratorKind::Process { launch: Launch::External { .. }, .. } => {
            let instead = "give it to the runtime: serval attach PATH --hang-ms N";
            without(report, section, &["hang_ms"], "launch = \"external\"", instead);
            None
        }
        AcceleratorKind::Process { device, .. } if kinds::is_elsewhere(device) => {
            let instead = "give it to the other machine's runtime: serval attach --hang-ms N";
            let with = format!("kind = \"{}\"", device.kind);
            without(report, section, &["hang_ms"], &with, instead);
            None
        }
        _ => {
            let given = section.entry("hang_ms").is_some();
            let hang_ms = section.integer(report, "hang_ms", HANG_MS_MIN..=HANG_MS_MAX, HANG_MS);
            given.then_some(hang_ms)
        }
    }
}

/// Finds the accelerators a service names.
pub(super) fn accelerator_indices(
    report: &mut Report<'_>,
    section: &mut Section<'_>,
    names: &[String],
    implicit: bool,
) -> Vec<usize> {
    let Some(entry) = section.entry("accelerator") else {
        let is_file = |value: &Value| matches!(value, Value::String(name) if kernel::is_file(name));
        let runs_files = match section.peek("kernel") {
            // A longer list is reported here, as for one accelerator.
            Some(Value::Array(items)) => {
                !items.is_empty() && items.iter().all(|item| is_file(&item.value))
            }
            Some(kernel) => is_file(kernel),
            None => false,
        };
        if runs_files {
            let process = names.len() - 1;
            section.record(report, "accelerator", names[process].clone());
            return vec![process];
        }
        if !implicit {
            section.missing(report, "accelerator", &format!("\"{}\"", names[0]));
        }
        section.record(report, "accelerator", names[0].clone());
        return vec![0];
    };
    let items = match &entry.node.value {
        Value::Array(items) => items.as_slice(),
        _ => std::slice::from_ref(&entry.node),
    };
    let mut indices: Vec<usize> = Vec::new();
    for item in items {
        let Some((name, span)) = text_of(report, "accelerator", item, "\"acc0\" or a list") else {
            continue;
        };
        match names.iter().position(|known| *known == name) {
            Some(index) if indices.contains(&index) => {
                let what = format!("`accelerator` names \"{name}\" twice");
                report.problem(Problem::new(span, what, "name each once"));
            }
            Some(index) => indices.push(index),
            None => {
                let what = format!("no accelerator is called \"{name}\"");
                let declared = &names[..names.len() - 1];
                let right = match nearest(&name, declared.iter().map(String::as_str)) {
                    Some(near) => format!("did you mean \"{near}\"?"),
                    None => format!(
                        "add [[accelerator]] name = \"{name}\", or use {}",
                        declared.join(", ")
                    ),
                };
                report.problem(Problem::new(span, what, right));
            }
        }
    }
    if items.is_empty() {
        let what = "`accelerator` names none";
        report.problem(Problem::new(entry.node.span, what, "give at least one"));
    }
    let shown: Vec<&str> = indices.iter().map(|index| names[*index].as_str()).collect();
    section.record(report, "accelerator", shown);
    if indices.is_empty() { vec![0] } else { indices }
}
