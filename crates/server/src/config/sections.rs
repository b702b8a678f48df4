//! The tables of the configuration file, read in order into a [`Topology`].
//!
//! Ranges and words are checked where they are read, relations between keys at the end of a table, and everything
//! that depends on several tables in [`Topology::check`]; all errors point into the text.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use engine::topology::{EngineSettings, HANG_MS, Limits, Topology, TopologyError};
use sys::local::PATH_BYTES_MAX;
use transfer::ServiceLimits;

use super::accelerator::{choose_rings, implicit_process, read_accelerators, read_cores};
use super::diagnostic::{Problem, Span};
use super::fields::read_fields;
use super::reader::{Places, Report, Section, boolean_of, integer_of, wrong_type};
use super::tables::{sub_table, tables};
use super::tree::{Table, Value};
use super::{ControlSocket, TransferSettings, address, function, service, tenant};

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
    let (tenants, of_tenants) = tenant::read_tenants(report, &tenant_tables);
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
    let context = service::Context {
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
        let (mut service, of_service) = service::read(report, table, index, &context, &mut taken);
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
    function::read_directory(report, &mut section, base, &mut settings);
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
