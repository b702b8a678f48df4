//! The tables of the configuration file, read in order into a [`Topology`].
//!
//! Ranges and words are checked where they are read, relations between keys at the end of a table, and everything
//! that depends on several tables in [`Topology::check`]; all errors point into the text.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use engine::topology::{
    Accelerator, AcceleratorKind, Bundles, CpuPlacement, DeviceSpec, EngineSettings, HANG_MS,
    HANG_MS_MAX, HANG_MS_MIN, HEARTBEAT_MS, HEARTBEAT_MS_MAX, HEARTBEAT_MS_MIN, Launch, Limits,
    Rings, STACK_KIB, STACK_KIB_MAX, STACK_KIB_MIN, Service, Topology, TopologyError,
};
use mqueue::abi::BACKENDS_MAX;
use runtime::kinds::{self, KINDS, Kind};
use sys::local::PATH_BYTES_MAX;
use transfer::ServiceLimits;

use super::address;
use super::diagnostic::{Problem, Span};
use super::keys::{self as table, TABLES, read_fields};
use super::reader::{
    Places, Report, Section, boolean_of, integer_of, nearest, text_of, wrong_type,
};
use super::tree::{Entry, Table, Value};
use super::{ControlSocket, TransferSettings};

/// The table that has a key of this name.
pub(super) fn section_with(key: &str) -> Option<&'static str> {
    let has = |table: &&table::Table| table.keys.iter().any(|known| known.name == key);
    TABLES.iter().find(has).map(|table| table.header)
}

/// The keys of `engine` or `limits`, which environment variables can set.
pub(super) fn keys_of(section: &str) -> Vec<&'static str> {
    let header = format!("[{section}]");
    let found = TABLES.iter().find(|table| table.header == header);
    found.map_or(Vec::new(), |table| table.keys.iter().map(|key| key.name).collect())
}

/// The settings of `[engine]` that are not part of the topology.
#[derive(Clone, Debug, Default)]
pub(super) struct EngineOptions {
    pub(super) metrics: Option<SocketAddr>,
    pub(super) control: ControlSocket,
    pub(super) transfer: Option<TransferSettings>,
}

/// The places of everything that a [`TopologyError`] can name.
#[derive(Default)]
pub(super) struct AllPlaces {
    pub(super) engine: Option<Places>,
    pub(super) tenants: Vec<Places>,
    pub(super) services: Vec<(Places, Vec<Places>)>,
    /// Tables with problems (`engine`, `limits` or `accelerator`), on whose values services depend.
    pub(super) faulty: bool,
    /// The same for each service.
    pub(super) faulty_services: Vec<bool>,
}

impl AllPlaces {
    /// Whether a topology's problem is not a consequence of another one: values that were replaced by defaults would
    /// lead to secondary errors.
    pub(super) fn is_original(&self, error: &TopologyError) -> bool {
        let (table, index, _) = error.path;
        match table {
            "engine" => !self.faulty,
            "tenant" => !self.faulty && !self.faulty_services.contains(&true),
            // Problems of these fields do not depend on other tables.
            _ if error.field == "listen" => !self.faulty_services[index],
            _ => !self.faulty && !self.faulty_services[index],
        }
    }
}

/// Reads the whole document.
pub(super) fn read(
    report: &mut Report<'_>,
    root: &Table,
    base: &Path,
) -> (Topology, EngineOptions, AllPlaces) {
    let whole = Span { source: 0, start: 0, end: 0 };
    let mut top = Section::new("the file", "", Some(root), whole);
    read_schema(report, &mut top);
    let mut places = AllPlaces::default();
    let before = report.problems.len();
    let engine = sub_table(report, top.entry("engine"), "[engine]");
    let (engine, mut options) = read_engine(report, engine, whole, base, &mut places);
    let limits = sub_table(report, top.entry("limits"), "[limits]");
    let limits = read_limits(report, limits, whole);
    let transfer = sub_table(report, top.entry("transfer"), "[transfer]");
    let transfer = read_transfer(report, transfer, whole);
    options.transfer = transfer;
    let tenant_tables = tables(report, top.entry("tenant"), "[[tenant]]");
    let (tenants, of_tenants) = super::tenant::read_tenants(report, &tenant_tables);
    places.tenants = of_tenants;
    let accelerator_tables = tables(report, top.entry("accelerator"), "[[accelerator]]");
    let accelerators = read_accelerators(report, &accelerator_tables);
    let (accelerators, hang_ms): (Vec<_>, Vec<_>) = accelerators.into_iter().unzip();
    places.faulty = report.problems.len() > before;
    let service_tables = tables(report, top.entry("service"), "[[service]]");
    let asked = root.entry("service").is_some();
    top.finish(report);
    if service_tables.is_empty() && !asked && options.transfer.is_none() {
        report.problem(Problem::new(
            whole,
            "the file has no [[service]]",
            "add one with name, listen, accelerator and kernel, or [transfer] with `socket`",
        ));
    }
    let mut accelerators = accelerators;
    accelerators.push(implicit_process(&accelerators));
    let names: Vec<String> = accelerators.iter().map(|a| a.name.clone()).collect();
    let context = super::service::Context {
        base,
        engine: &engine,
        limits: &limits,
        accelerators: &names,
        kinds: accelerators.iter().map(|accelerator| accelerator.kind.clone()).collect(),
        implicit: accelerator_tables.is_empty(),
        tenants: &tenants,
    };
    let mut taken = Vec::new();
    let mut services = Vec::new();
    for (index, table) in service_tables.into_iter().enumerate() {
        let before = report.problems.len();
        let (mut service, of_service) =
            super::service::read(report, table, index, &context, &mut taken);
        choose_rings(&mut service, &accelerators);
        let given = |at: &usize| hang_ms.get(*at).copied().flatten();
        if service.accelerators.iter().any(|at| given(at).is_some()) {
            let of = |at: &usize| given(at).unwrap_or(HANG_MS.max(service.request_timeout_ms));
            service.hang_ms = service.accelerators.iter().map(of).collect();
        }
        services.push(service);
        places.services.push(of_service);
        places.faulty_services.push(report.problems.len() > before);
    }
    let last = accelerators.len() - 1;
    if !services.iter().any(|service| service.accelerators.contains(&last)) {
        accelerators.pop();
    }
    (Topology { engine, limits, accelerators, services, tenants }, options, places)
}

/// The accelerator of kernel files without `accelerator`: a separate process, so that a fault ends no other service.
fn implicit_process(declared: &[Accelerator]) -> Accelerator {
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
fn choose_rings(service: &mut Service, accelerators: &[Accelerator]) {
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

fn read_schema(report: &mut Report<'_>, top: &mut Section<'_>) {
    let Some(entry) = top.entry("schema") else {
        report.problem(Problem::new(
            top.header(),
            "the file has no `schema`",
            "write schema = 1 at the top of the file",
        ));
        return;
    };
    match &entry.node.value {
        Value::Integer(Some(1)) => {}
        Value::Integer(found) => {
            let found = found.map_or("this number".to_owned(), |n| n.to_string());
            report.problem(Problem::new(
                entry.node.span,
                format!("schema {found} is not known to this version of serval"),
                "must be 1",
            ));
        }
        _ => wrong_type(report, "schema", &entry.node, "the integer 1"),
    }
    top.record(report, "schema", 1);
}

fn read_engine(
    report: &mut Report<'_>,
    table: Option<&Table>,
    whole: Span,
    base: &Path,
    places: &mut AllPlaces,
) -> (EngineSettings, EngineOptions) {
    let mut section = Section::new("[engine]", "engine", table, whole);
    let mut settings = EngineSettings::default();
    read_fields(report, &mut section, &mut settings);
    settings.cores = read_cores(report, &mut section);
    let metrics = section.text(report, "metrics", "\"127.0.0.1:9464\"");
    // `check-config` shows the default as `none`.
    let given = |(text, _): &(String, Span)| !text.is_empty() && text != "none";
    let metrics = metrics.filter(given).and_then(|(text, span)| {
        let found = address::plain(&text);
        found.map_err(|e| report.problem(Problem::new(span, e.what, e.right))).ok()
    });
    section.record(report, "metrics", metrics.map(|m| m.to_string()).unwrap_or_default());
    let control = read_control(report, &mut section);
    super::function::read_directory(report, &mut section, base, &mut settings);
    places.engine = Some(section.finish(report));
    (settings, EngineOptions { metrics, control, transfer: None })
}

fn read_transfer(
    report: &mut Report<'_>,
    table: Option<&Table>,
    whole: Span,
) -> Option<TransferSettings> {
    let mut section = Section::new("[transfer]", "transfer", table, whole);
    let mut limits = ServiceLimits::default();
    read_fields(report, &mut section, &mut limits);
    let given = section.text(report, "socket", "\"/run/serval/transfer\" or \"off\"");
    let given = given.filter(|(text, _)| !matches!(text.as_str(), "" | "off" | "none"));
    let socket = given.map(|(path, span)| checked_socket(report, path, span));
    let shown = socket.as_ref().map_or("off".into(), |path| path.to_string_lossy());
    section.record(report, "socket", shown.into_owned());
    section.finish(report);
    socket.map(|socket| TransferSettings { socket, limits })
}

/// The path of a socket; a problem if it cannot be one.
fn checked_socket(report: &mut Report<'_>, path: String, span: Span) -> PathBuf {
    if !Path::new(&path).is_absolute() || path.len() > PATH_BYTES_MAX {
        let what = format!("\"{path}\" cannot be the path of a socket");
        let right = format!("\"off\", or an absolute path of at most {PATH_BYTES_MAX} bytes");
        report.problem(Problem::new(span, what, right));
    }
    path.into()
}

/// `control = "auto" | "off" | "/path"`; the empty string is `off`.
fn read_control(report: &mut Report<'_>, section: &mut Section<'_>) -> ControlSocket {
    let given = section.text(report, "control", "\"auto\", \"off\" or \"/run/serval.sock\"");
    let control = match given {
        None => ControlSocket::Auto,
        Some((text, _)) if text == "auto" => ControlSocket::Auto,
        Some((text, _)) if matches!(text.as_str(), "" | "off" | "none") => ControlSocket::Off,
        Some((path, span)) => ControlSocket::At(checked_socket(report, path, span)),
    };
    let shown = match &control {
        ControlSocket::Auto => "auto".into(),
        ControlSocket::Off => "off".into(),
        ControlSocket::At(path) => path.to_string_lossy(),
    };
    section.record(report, "control", shown.into_owned());
    control
}

/// `cores = "auto" | [0, 1]`. Empty: not pinned.
fn read_cores(report: &mut Report<'_>, section: &mut Section<'_>) -> Vec<usize> {
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

fn read_limits(report: &mut Report<'_>, table: Option<&Table>, whole: Span) -> Limits {
    let mut section = Section::new("[limits]", "limits", table, whole);
    let mut limits = Limits::default();
    read_fields(report, &mut section, &mut limits);
    let ratio = section
        .entry("udp_reply_ratio")
        .and_then(|entry| integer_of(report, "udp_reply_ratio", &entry.node, &(0..=65_507)));
    let shown =
        ratio.map_or("auto (3 off loopback, else unlimited)".into(), serde_json::Value::from);
    section.record(report, "udp_reply_ratio", shown);
    let privileged = section
        .entry("udp_privileged_sources")
        .and_then(|entry| boolean_of(report, "udp_privileged_sources", &entry.node));
    let shown = privileged.map_or("auto (on loopback only)".into(), serde_json::Value::from);
    section.record(report, "udp_privileged_sources", shown);
    section.finish(report);
    limits.udp_reply_ratio = ratio.map(|ratio| ratio as u32);
    limits.udp_privileged_sources = privileged;
    limits
}

/// The accelerators; without any in the file there is one on host cores. Also returns the `hang_ms` of each, if
/// configured.
fn read_accelerators(
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

/// Reports keys that are invalid with another key's value.
pub(super) fn without(
    report: &mut Report<'_>,
    section: &mut Section<'_>,
    keys: &[&'static str],
    with: &str,
    instead: &str,
) {
    for key in keys {
        // Reading makes the key known, so that it is not reported twice.
        if section.entry(key).is_some() {
            let what = format!("`{key}` is not valid with {with}");
            let right = format!("remove it, or {instead}");
            report.problem(Problem::new(section.place(key), what, right));
        }
    }
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

/// Starts reading one table of a list of named ones. Names are unique and short, since they become labels of metrics
/// and parts of paths.
pub(super) fn named_section<'t>(
    report: &mut Report<'_>,
    table: &'t Table,
    list: &str,
    path: &str,
    index: usize,
    taken: &mut Vec<String>,
) -> (Section<'t>, String) {
    let unnamed = format!("{list} number {}", index + 1);
    let mut section = Section::new(&unnamed, &format!("{path}.{index}"), Some(table), table.span);
    if table.entry("name").is_none() {
        section.missing(report, "name", &format!("\"{list}{index}\""));
    }
    let Some((name, span)) = section.text(report, "name", &format!("\"{list}{index}\"")) else {
        return (section, format!("{list}{index}"));
    };
    section.title = format!("{list} \"{name}\"");
    section.path = format!("{path}.{name}");
    let letter = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-');
    if name.is_empty() || name.len() > 64 || !name.chars().all(letter) {
        let what = format!("\"{name}\" cannot be a name");
        let right = "1 to 64 letters, digits, `_` and `-`";
        report.problem(Problem::new(span, what, right));
    } else if taken.contains(&name) {
        let what = format!("two {list}s are called \"{name}\"");
        report.problem(Problem::new(span, what, "give each its own name"));
    }
    taken.push(name.clone());
    (section, name)
}

/// The tables of `[[key]]`.
pub(super) fn tables<'t>(
    report: &mut Report<'_>,
    entry: Option<&'t Entry>,
    header: &str,
) -> Vec<&'t Table> {
    let Some(entry) = entry else { return Vec::new() };
    let mut found = Vec::new();
    match &entry.node.value {
        Value::Array(items) => {
            for item in items {
                match &item.value {
                    Value::Table(table) => found.push(table),
                    _ => wrong_type(report, &entry.key, item, &format!("a table: write {header}")),
                }
            }
        }
        _ => {
            let wanted = format!("a list of tables: write {header} with two brackets");
            wrong_type(report, &entry.key, &entry.node, &wanted);
        }
    }
    found
}

fn sub_table<'t>(
    report: &mut Report<'_>,
    entry: Option<&'t Entry>,
    header: &str,
) -> Option<&'t Table> {
    let entry = entry?;
    match &entry.node.value {
        Value::Table(table) => Some(table),
        _ => {
            wrong_type(report, &entry.key, &entry.node, &format!("a table: write {header}"));
            None
        }
    }
}

/// Finds the accelerators a service names.
pub(super) fn accelerator_indices(
    report: &mut Report<'_>,
    section: &mut Section<'_>,
    context: &super::service::Context<'_>,
) -> Vec<usize> {
    let names = context.accelerators;
    let Some(entry) = section.entry("accelerator") else {
        let is_file =
            |value: &Value| matches!(value, Value::String(name) if super::kernel::is_file(name));
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
        if !context.implicit {
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

/// Reports a topology's problem at its place in the text.
pub(super) fn place_topology_error(places: &AllPlaces, error: &TopologyError) -> Problem {
    let (table, index, sub) = error.path;
    let found = match (table, sub) {
        ("engine", _) => places.engine.as_ref(),
        ("tenant", _) => places.tenants.get(index),
        ("backend", Some(sub)) => places.services.get(index).and_then(|(_, b)| b.get(sub)),
        _ => places.services.get(index).map(|(service, _)| service),
    };
    let whole = Span { source: 0, start: 0, end: 0 };
    let span = found.map_or(whole, |p| p.values.get(error.field).copied().unwrap_or(p.header));
    // A backend has one maximum for both directions.
    let message = match table {
        "backend" => error.message.replace("max_reply_bytes", "max_message_bytes"),
        _ => error.message.clone(),
    };
    let about_value =
        ["is ", "must ", "lists ", "names "].iter().any(|verb| message.starts_with(verb));
    let whole_text =
        if about_value { format!("`{}` {message}", error.field) } else { message.clone() };
    let separators = ["; ", ", must ", ", but ", ": "];
    let cut = separators.iter().filter_map(|s| whole_text.find(s).map(|at| (at, s.len()))).min();
    let (what, right) = match cut {
        // "must" and "but" belong to the second part.
        Some((at, _)) if whole_text[at..].starts_with(", ") => {
            (&whole_text[..at], &whole_text[at + 2..])
        }
        Some((at, len)) => (&whole_text[..at], &whole_text[at + len..]),
        None if matches!(error.field, "listen" | "socket") => {
            (whole_text.as_str(), "choose another address or port")
        }
        None => (whole_text.as_str(), "change this"),
    };
    Problem::new(span, format!("{}: {what}", error.place), right)
}

/// Maximum number of backends of a service, as a range for its list.
pub(super) const BACKENDS: usize = BACKENDS_MAX as usize;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_know_their_table() {
        assert_eq!(section_with("workers"), Some("[engine]"));
        assert_eq!(section_with("connect"), Some("[[service.backend]]"));
        assert_eq!(section_with("nothing"), None);
    }
}
