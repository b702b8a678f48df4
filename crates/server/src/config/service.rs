//! `[[service]]` and `[[service.backend]]`.

use std::path::{Path, PathBuf};

use engine::topology::{
    AcceleratorKind, Backend, Dispatch, EngineSettings, Launch, Limits, Listen, ParamValue,
    Replies, Rings, Service, Sockets, Tenant,
};
use mqueue::abi::BACKENDS_MAX;
use mqueue::abi::{
    BLOCKS_MAX, INLINE_BYTES_MAX, MESSAGE_BYTES_MAX, PARAM_TEXT_BYTES_MAX, PARAMS_MAX,
};
use onpath::Sizes;
use runtime::kinds;
use wire::admission::KeyRange;
use wire::framing::Framing;
use wire::matching::MatchId;
use wire::nic::{Transport, UDP_PAYLOAD_MAX};

use super::accelerator::accelerator_indices;
use super::address;
use super::diagnostic::Problem;
use super::fields::{read_fields, read_some};
use super::file::{self, read_files};
use super::function::{read_functions, read_users};
use super::kernel::{self, BUILTINS, Builtin, Kernel};
use super::peer::read_peer_address;
use super::proxy;
use super::reader::{Places, Report, Section, integer_of, text_of, wrong_type};
use super::socket::read_sockets;
use super::streams::{read_error_reply, read_idle};
use super::tables::{named_section, tables, without};
use super::tenant::{check_isolated, read_tenant};
use super::tree::{Entry, Node, Table, Value};
use super::words::nearest;

/// What a service may refer to.
pub(super) struct Context<'a> {
    /// Folder that kernel paths are relative to.
    pub(super) base: &'a Path,
    /// The engine that runs the services.
    pub(super) engine: &'a EngineSettings,
    /// Its limits, which a service may replace.
    pub(super) limits: &'a Limits,
    /// Names of the accelerators. The last one is not in the file: it is for kernel files without `accelerator`.
    pub(super) accelerators: &'a [String],
    /// Their kinds. Kernels of external programs may have any name.
    pub(super) kinds: Vec<AcceleratorKind>,
    /// Whether the file defines none: then there is an implicit one, for built-in kernels.
    pub(super) implicit: bool,
    /// The tenants of the file.
    pub(super) tenants: &'a [Tenant],
}

/// Maximum length of a parameter's name in bytes; its field in a region ends with a zero byte.
const PARAM_NAME_BYTES_MAX: usize = 23;
/// Default number of mqueues on an accelerator.
const MQUEUES: u64 = 4;

/// Reads one service with its backends.
pub(super) fn read(
    report: &mut Report<'_>,
    table: &Table,
    index: usize,
    context: &Context<'_>,
    taken: &mut Vec<String>,
) -> (Service, (Places, Vec<Places>)) {
    let (mut section, name) = named_section(report, table, "service", "service", index, taken);
    let at = &mut section;
    let mut service = Service::new(&name, Vec::new(), "");
    (service.listen, service.memory_ports) = read_listen(report, at);
    service.framing = read_framing(report, at);
    if at.entry("upstream").is_some() {
        let mut service = proxy::read(report, at, service, context.tenants);
        read_idle(report, at, &mut service, context.limits);
        read_error_reply(report, at, &mut service);
        let engine = (context.engine, service.hands_over_for_functions());
        service.functions =
            read_functions(report, at, context.base, service.message_sizes(), engine);
        service.function_users = read_users(report, at, "function_users");
        return (service, (section.finish(report), Vec::new()));
    }
    without(report, at, proxy::OF_PROXIES, "a kernel", "write `upstream` instead of `kernel`");
    service.accelerators = accelerator_indices(report, at, context.accelerators, context.implicit);
    let count = match table.entry("accelerator").map(|entry| &entry.node.value) {
        Some(Value::Array(items)) => items.len(),
        _ => 1,
    };
    let kinds: Vec<_> = service.accelerators.iter().map(|at| &context.kinds[*at]).collect();
    let (kernels, kernel) = read_kernels(report, at, context.base, &kinds, count);
    service.params = read_params(report, at, kernel);
    let mqueues = read_mqueues(report, at, count);
    read_some(report, at, &mut service, |key| !proxy::OF_PROXIES.contains(&key));
    service.max_reply_bytes = read_reply_bytes(report, at, &service);
    read_idle(report, at, &mut service, context.limits);
    read_error_reply(report, at, &mut service);
    check_rings(report, at, &service);
    service.dispatch = read_dispatch(report, at, &service);
    service.tenant = read_tenant(report, at, context.tenants);
    check_isolated(report, at, &service.tenant, &kinds);
    service.mqueues = mqueues[0];
    kernels[0].clone_into(&mut service.kernel);
    if mqueues.len().max(kernels.len()) > 1 {
        service.share_out();
        for (place, share) in service.shares.iter_mut().enumerate() {
            share.mqueues = mqueues[place % mqueues.len()];
            share.kernel.clone_from(&kernels[place % kernels.len()]);
        }
    }
    let backend_tables = tables(report, at.entry("backend"), "[[service.backend]]");
    check_backend_count(report, at, &backend_tables, kernel);
    let mut backend_names = Vec::new();
    let mut backend_places = Vec::new();
    for (sub, table) in backend_tables.into_iter().enumerate().take(BACKENDS_MAX as usize) {
        let (backend, places) =
            read_backend(report, table, (sub, &at.path), context, &mut backend_names);
        service.backends.push(backend);
        backend_places.push(places);
    }
    if let Some(builtin) = kernel {
        check_messages(report, at, &service, builtin);
    }
    let engine = (context.engine, service.hands_over_for_functions());
    service.functions = read_functions(report, at, context.base, service.message_sizes(), engine);
    read_peer_address(report, at, &mut service, kernel);
    service.function_users = read_users(report, at, "function_users");
    service.sockets = read_sockets(report, at);
    service.files = read_files(report, at, context.base);
    check_sockets(report, at, &service, kernel);
    check_kinds(report, at, &service, &kinds);
    (service, (section.finish(report), backend_places))
}

fn read_listen(report: &mut Report<'_>, section: &mut Section<'_>) -> (Vec<Listen>, Vec<PathBuf>) {
    let Some(entry) = section.entry("listen") else {
        // The blocks may have ports of their own.
        if section.entry("socket").is_some() {
            return Default::default();
        }
        section.missing(report, "listen", "[\"udp://127.0.0.1:9000\"]");
        return Default::default();
    };
    let items = match &entry.node.value {
        Value::Array(items) => items.as_slice(),
        _ => std::slice::from_ref(&entry.node),
    };
    let (mut listens, mut paths) = (Vec::new(), Vec::new());
    for item in items {
        let example = "\"udp://127.0.0.1:9000\", or a list of such";
        let Some((text, span)) = text_of(report, "listen", item, example) else { continue };
        let read = match address::memory_port(&text) {
            Some(path) => path.map(|path| paths.push(path)),
            None => address::listen(&text)
                .map(|(transport, address)| listens.push(Listen { transport, address })),
        };
        if let Err(wrong) = read {
            report.problem(Problem::new(span, wrong.what, wrong.right));
        }
    }
    if items.is_empty() {
        let right = "give at least one, such as \"udp://127.0.0.1:9000\"";
        report.problem(Problem::new(entry.node.span, "`listen` names no address", right));
    }
    let shown = listens.iter().map(|l| address::url(l.transport, l.address));
    let shown = shown.chain(paths.iter().map(|path| address::memory_url(path)));
    section.record(report, "listen", shown.collect::<Vec<String>>());
    (listens, paths)
}

fn read_framing(report: &mut Report<'_>, section: &mut Section<'_>) -> Framing {
    let given = section.text(report, "framing", "\"raw\", \"fixed:784\", \"length:u32\", ...");
    let framing = given.and_then(|(text, span)| {
        text.parse::<Framing>()
            .map_err(|error| {
                let message = error.to_string();
                let (what, right) = message.split_once(": write ").unwrap_or((&message, "another"));
                report.problem(Problem::new(span, what, format!("write {right}")));
            })
            .ok()
    });
    let framing = framing.unwrap_or(Framing::Raw);
    section.record(report, "framing", framing.to_string());
    framing
}

/// The values of a key that may differ between a service's `count` accelerators: one for all of them, or a list with
/// one for each.
fn of_accelerators<'t>(
    report: &mut Report<'_>,
    key: &str,
    entry: &'t Entry,
    count: usize,
) -> &'t [Node] {
    let Value::Array(items) = &entry.node.value else { return std::slice::from_ref(&entry.node) };
    if items.len() != count {
        let plural = if count == 1 { "" } else { "s" };
        let what = format!("`{key}` lists {} for {count} accelerator{plural}", items.len());
        let right = "list one for each accelerator, in their order, or give one for all of them";
        report.problem(Problem::new(entry.node.span, what, right));
    }
    items
}

/// The kernel of each accelerator, or one for all of them; and the built-in one among them, if there is one. `kinds`
/// are those of the accelerators.
fn read_kernels(
    report: &mut Report<'_>,
    section: &mut Section<'_>,
    base: &Path,
    kinds: &[&AcceleratorKind],
    count: usize,
) -> (Vec<String>, Option<&'static Builtin>) {
    let (mut kernels, mut names, mut known) = (Vec::new(), Vec::new(), None);
    match section.entry("kernel") {
        None => section.missing(report, "kernel", "\"echo\""),
        Some(entry) => {
            let nodes = of_accelerators(report, "kernel", entry, count);
            for (place, node) in nodes.iter().enumerate() {
                let text = text_of(report, "kernel", node, "\"echo\", or a path");
                let Some((name, span)) = text else { continue };
                let kinds = match nodes.len() {
                    1 => kinds,
                    _ => kinds.get(place..=place).unwrap_or_default(),
                };
                let any_name = !kinds.is_empty() && kinds.iter().all(|kind| is_external(kind));
                match kernel::find(&name, base, any_name) {
                    Ok(Kernel::Builtin(builtin)) => {
                        known = known.or(Some(builtin));
                        kernels.push(name.clone());
                    }
                    Ok(Kernel::Foreign) => kernels.push(name.clone()),
                    Ok(Kernel::Library(path, kernel)) => {
                        let checked = report.inspect.map(|open| {
                            let name = kernel.as_deref();
                            kernel::inspect(open, &path, name, kinds, &mut report.opened)
                        });
                        if let Some(Err((what, right))) = checked {
                            report.problem(Problem::new(span, what, right));
                        }
                        kernels.push(library(&path, kernel));
                    }
                    Err((what, right)) => report.problem(Problem::new(span, what, right)),
                }
                names.push(name);
            }
        }
    }
    match names.as_slice() {
        [] => {}
        [name] => section.record(report, "kernel", name.clone()),
        names => section.record(report, "kernel", names.to_vec()),
    }
    if kernels.is_empty() {
        kernels.push(String::new());
    }
    (kernels, known)
}

/// Each kind of accelerator is asked whether it can run the service.
fn check_kinds(
    report: &mut Report<'_>,
    section: &Section<'_>,
    service: &Service,
    kinds: &[&AcceleratorKind],
) {
    for (place, kind) in kinds.iter().enumerate() {
        let AcceleratorKind::Process { launch: Launch::Engine { .. }, device, .. } = kind else {
            continue;
        };
        let kernel = service.shares.get(place).map_or(&service.kernel, |share| &share.kernel);
        let checked = kinds::find(device.kind).map(|kind| kind.check(service, kernel));
        if let Some(Err((what, right))) = checked {
            report.problem(Problem::new(section.place("kernel"), what, right));
            return;
        }
    }
}

/// Whether its kernels run in an external program.
fn is_external(kind: &AcceleratorKind) -> bool {
    matches!(kind, AcceleratorKind::Process { launch: Launch::External { .. }, .. })
}

/// A kernel of a library, in the notation of a topology.
fn library(path: &Path, kernel: Option<String>) -> String {
    let mut name = path.to_string_lossy().into_owned();
    // A bare file name would be taken for the name of a built-in kernel.
    if !name.contains('/') {
        name.insert_str(0, "./");
    }
    if let Some(kernel) = kernel {
        name.push(':');
        name.push_str(&kernel);
    }
    name
}

/// The mqueues on each accelerator, or one number for all of them.
fn read_mqueues(report: &mut Report<'_>, section: &mut Section<'_>, count: usize) -> Vec<u32> {
    let range = 1..=BLOCKS_MAX.into();
    let mqueues: Vec<u64> = match section.entry("mqueues") {
        None => vec![MQUEUES],
        Some(entry) => of_accelerators(report, "mqueues", entry, count)
            .iter()
            .filter_map(|node| integer_of(report, "mqueues", node, &range))
            .collect(),
    };
    let mqueues = if mqueues.is_empty() { vec![MQUEUES] } else { mqueues };
    match mqueues.as_slice() {
        [one] => section.record(report, "mqueues", *one),
        all => section.record(report, "mqueues", all.to_vec()),
    }
    mqueues.into_iter().map(|mqueues| mqueues as u32).collect()
}

fn read_params(
    report: &mut Report<'_>,
    section: &mut Section<'_>,
    kernel: Option<&Builtin>,
) -> Vec<(String, ParamValue)> {
    let mut params = Vec::new();
    let mut shown = serde_json::Map::new();
    if let Some(entry) = section.entry("params") {
        let Value::Table(table) = &entry.node.value else {
            wrong_type(report, "params", &entry.node, "a table such as { microseconds = 20 }");
            return params;
        };
        if table.entries.len() > PARAMS_MAX as usize {
            let what = format!("`params` has {} parameters", table.entries.len());
            report.problem(Problem::new(entry.key_span, what, format!("at most {PARAMS_MAX}")));
        }
        for param in &table.entries {
            let Some(value) = read_param(report, param, kernel) else { continue };
            let json = match &value {
                ParamValue::Number(number) => (*number).into(),
                ParamValue::Text(text) => text.clone().into(),
            };
            shown.insert(param.key.clone(), json);
            params.push((param.key.clone(), value));
        }
    }
    section.record(report, "params", shown);
    params
}

fn read_param(
    report: &mut Report<'_>,
    param: &Entry,
    kernel: Option<&Builtin>,
) -> Option<ParamValue> {
    let key = &param.key;
    if key.is_empty() || key.len() > PARAM_NAME_BYTES_MAX || key.contains('\0') {
        let right = format!("1 to {PARAM_NAME_BYTES_MAX} bytes");
        report.problem(Problem::new(
            param.key_span,
            format!("`{key}` cannot be a parameter"),
            right,
        ));
    }
    if let Some(builtin) = kernel
        && !builtin.params.iter().any(|(name, _)| name == key)
    {
        let names: Vec<&str> = builtin.params.iter().map(|(name, _)| *name).collect();
        let right = match (nearest(key, names.iter().copied()), names.is_empty()) {
            (Some(near), _) => format!("did you mean `{near}`?"),
            (None, true) => "it has none".to_owned(),
            (None, false) => format!("it has {}", names.join(", ")),
        };
        let what = format!("the kernel \"{}\" has no parameter `{key}`", builtin.name);
        report.problem(Problem::new(param.key_span, what, right));
    }
    let number = match &param.node.value {
        Value::Integer(Some(value)) => *value as f64,
        Value::Float(value) if value.is_finite() => *value,
        Value::Boolean(value) => f64::from(u8::from(*value)),
        Value::String(text) if kernel.is_none() => return read_text_param(report, param, text),
        _ => {
            let wanted = match kernel {
                Some(_) => "a finite number, or true or false",
                None => "a finite number, true or false, or a text",
            };
            wrong_type(report, key, &param.node, wanted);
            return None;
        }
    };
    Some(ParamValue::Number(number))
}

/// A text for a kernel that is not built in: those have numbers only.
fn read_text_param(report: &mut Report<'_>, param: &Entry, text: &str) -> Option<ParamValue> {
    let most = PARAM_TEXT_BYTES_MAX as usize;
    if text.len() > most || text.contains('\0') {
        let what = format!("`{}` cannot be a text of {} bytes", param.key, text.len());
        let what =
            if text.len() > most { what } else { format!("`{}` has a zero byte", param.key) };
        let right = format!("must be at most {most} bytes, none of them zero");
        report.problem(Problem::new(param.node.span, what, right));
        return None;
    }
    Some(ParamValue::Text(text.to_owned()))
}

fn read_reply_bytes(report: &mut Report<'_>, section: &mut Section<'_>, service: &Service) -> u32 {
    // A reply is often as long as its request.
    let udp = service.listen.iter().any(|listen| listen.transport == Transport::Udp);
    let carried = if udp { UDP_PAYLOAD_MAX as u32 } else { u32::MAX };
    // With `rings = "granule…"` at least one direction has granule rings, whose messages are stored in the slot.
    let rings = section.peek("rings");
    let granules = matches!(rings, Some(Value::String(rings)) if rings.starts_with("granule"));
    let carried = if granules { carried.min(INLINE_BYTES_MAX) } else { carried };
    let usual = service.max_message_bytes.min(carried).into();
    section.integer(report, "max_reply_bytes", 1..=MESSAGE_BYTES_MAX.into(), usual) as u32
}

/// The warning about a kernel whose replies are as long as their requests, if the longest cannot be sent.
pub(super) fn short_reply(service: &Service) -> Option<String> {
    let (request, reply) = (service.max_message_bytes, service.max_reply_bytes);
    if reply >= request || service.replies == Replies::None || service.upstream.is_some() {
        return None;
    }
    let kernels = [&service.kernel].into_iter().chain(service.shares.iter().map(|s| &s.kernel));
    let mut unknown = false;
    for name in kernels {
        match BUILTINS.iter().find(|builtin| builtin.name == name) {
            Some(builtin) if builtin.reply_bytes.is_none() => {
                return Some(format!(
                    "service {:?}: the kernel {name:?} answers a request with as many bytes, and replies of more than max_reply_bytes = \
                     {reply} are dropped as reply_too_long; write {}",
                    service.name,
                    remedy(service)
                ));
            }
            Some(_) => {}
            None => unknown = true,
        }
    }
    unknown.then(|| {
        format!(
            "service {:?}: requests have up to {request} bytes and replies up to {reply}: where the kernel answers with as many bytes as \
             it was sent, longer replies are dropped as reply_too_long; if it does, write {}",
            service.name,
            remedy(service)
        )
    })
}

/// Sizes with which a reply as long as its request is always possible.
fn remedy(service: &Service) -> String {
    let udp = service.listen.iter().any(|listen| listen.transport == Transport::Udp);
    match service.max_message_bytes {
        long if udp && long as usize > UDP_PAYLOAD_MAX => {
            format!(
                "max_message_bytes = {UDP_PAYLOAD_MAX}, which is what a datagram carries, or listen at tcp:// only"
            )
        }
        long => format!("max_reply_bytes = {long}"),
    }
}

fn read_dispatch(
    report: &mut Report<'_>,
    section: &mut Section<'_>,
    service: &Service,
) -> Dispatch {
    let policies = [
        ("round-robin", Some(Dispatch::RoundRobin)),
        ("least-loaded", Some(Dispatch::LeastLoaded)),
        ("flow-hash", Some(Dispatch::FlowHash)),
        ("key-hash", None),
    ];
    let policy = section.choice(report, "dispatch", &policies, "round-robin");
    let key = section.text(report, "key", "\"OFFSET:LENGTH\"");
    match (policy, key) {
        (Some(policy), None) => policy,
        (Some(policy), Some((_, span))) => {
            let what = "`key` is not valid without dispatch = \"key-hash\"";
            report.problem(Problem::new(span, what, "remove it, or write dispatch = \"key-hash\""));
            policy
        }
        (None, None) => {
            let what = "dispatch = \"key-hash\" needs the position of the key";
            let right = "add key = \"OFFSET:LENGTH\", in bytes, such as \"0:12\"";
            report.problem(Problem::new(section.place("dispatch"), what, right));
            Dispatch::RoundRobin
        }
        (None, Some((text, span))) => {
            let max = service.max_message_bytes as usize;
            let range = text.parse::<KeyRange>().and_then(|range| range.check(max).map(|()| range));
            match range {
                Ok(range) => {
                    section.record(report, "key", text);
                    Dispatch::KeyHash(range)
                }
                Err(error) => {
                    let message = error.to_string();
                    let (what, right) = message.split_once(": ").unwrap_or((&message, "another"));
                    report.problem(Problem::new(span, what, right));
                    Dispatch::RoundRobin
                }
            }
        }
    }
}

fn check_rings(report: &mut Report<'_>, section: &Section<'_>, service: &Service) {
    let shortest = service.max_message_bytes.min(service.max_reply_bytes);
    if matches!(service.rings, Rings::Granule | Rings::Granule8) && shortest > INLINE_BYTES_MAX {
        let what = format!("granule rings carry messages of at most {INLINE_BYTES_MAX} bytes");
        let right = "must be \"auto\" or \"doorbell\" with messages and replies this long";
        report.problem(Problem::new(section.place("rings"), what, right));
    }
}

fn check_backend_count(
    report: &mut Report<'_>,
    section: &Section<'_>,
    tables: &[&Table],
    kernel: Option<&Builtin>,
) {
    if tables.len() > BACKENDS_MAX as usize {
        let what = format!("{} has {} backends", section.title, tables.len());
        let right = format!("at most {BACKENDS_MAX}");
        report.problem(Problem::new(section.place("backend"), what, right));
    }
    if let Some(builtin) = kernel
        && (tables.len() as u32) < builtin.backends
    {
        let what =
            format!("the kernel \"{}\" needs a backend, and the service has none", builtin.name);
        let right = "add [[service.backend]] with name and connect below this service";
        report.problem(Problem::new(section.place("kernel"), what, right));
    }
}

/// Rejects a service whose built-in kernel has no use for its sockets, or needs some.
fn check_sockets(
    report: &mut Report<'_>,
    section: &Section<'_>,
    service: &Service,
    kernel: Option<&Builtin>,
) {
    let Some(builtin) = kernel else { return };
    let listens = service.sockets.iter().any(|socket| socket.listens());
    let name = builtin.name;
    if builtin.sockets > 0 && !listens {
        let what =
            format!("the kernel \"{name}\" needs a socket to listen at, and the service has none");
        let right = "add [[service.socket]] with name and listen below this service";
        report.problem(Problem::new(section.place("kernel"), what, right));
    }
    if builtin.sockets == 0 && !service.sockets.is_empty() {
        let what = format!("the kernel \"{name}\" has no sockets, and the service has some");
        let right = "remove [[service.socket]], or choose a kernel with sockets";
        report.problem(Problem::new(section.place("kernel"), what, right));
    }
    if builtin.sockets > 0 && !(service.listen.is_empty() && service.memory_ports.is_empty()) {
        let what = format!(
            "the kernel \"{name}\" answers no messages, and the service has ports for them"
        );
        let right = "remove `listen`";
        report.problem(Problem::new(section.place("listen"), what, right));
    }
}

/// Rejects a service whose messages the kernel would all drop.
fn check_messages(
    report: &mut Report<'_>,
    section: &Section<'_>,
    service: &Service,
    builtin: &Builtin,
) {
    let name = builtin.name;
    if let Some(bytes) = builtin.request_bytes {
        if service.max_message_bytes < bytes {
            let what = format!(
                "the kernel \"{name}\" takes messages of {bytes} bytes, max_message_bytes is {}",
                service.max_message_bytes
            );
            let right = format!("write max_message_bytes = {bytes}");
            report.problem(Problem::new(section.place("max_message_bytes"), what, right));
        }
        if let Framing::Fixed(size) = service.framing
            && size != bytes
        {
            let what =
                format!("the kernel \"{name}\" takes messages of {bytes} bytes, not of {size}");
            let right = format!("write \"fixed:{bytes}\"");
            report.problem(Problem::new(section.place("framing"), what, right));
        }
    }
    if let Some(bytes) = builtin.reply_bytes
        && service.max_reply_bytes < bytes
    {
        let what = format!(
            "the kernel \"{name}\" replies with {bytes} bytes, max_reply_bytes is {}",
            service.max_reply_bytes
        );
        let right = format!("write max_reply_bytes = {bytes}");
        report.problem(Problem::new(section.place("max_reply_bytes"), what, right));
    }
}

/// The warnings about backends whose answers nothing but their order assigns to requests.
pub(super) fn unmatched_backends(service: &Service) -> Vec<String> {
    let is_unmatched = |backend: &&Backend| {
        let is_server = backend.memory_bytes == 0 && backend.sockets == Sockets::Persistent;
        is_server && backend.matching.is_none() && backend.framing != Framing::Memcached
    };
    let warning = |backend: &Backend| {
        format!(
            "service {:?}, backend {:?}: without `match` an answer that comes twice, late or in another order goes to the wrong request; write \
             match = \"id:OFFSET:LENGTH\" if its messages have an id, or sockets = \"per-request\"",
            service.name, backend.name
        )
    };
    service.backends.iter().filter(is_unmatched).map(warning).collect()
}

fn read_backend(
    report: &mut Report<'_>,
    table: &Table,
    (index, service_path): (usize, &str),
    Context { base, engine, .. }: &Context<'_>,
    taken: &mut Vec<String>,
) -> (Backend, Places) {
    let path = format!("{service_path}.backend");
    let (mut section, name) = named_section(report, table, "backend", &path, index, taken);
    if file::does_transfers(&mut section) {
        let backend = file::read_backend(report, &mut section, &name);
        return (backend, section.finish(report));
    }
    let connect = read_connect(report, &mut section);
    let (transport, address) =
        connect.unwrap_or((Transport::Tcp, (std::net::Ipv4Addr::LOCALHOST, 1).into()));
    let framing = read_framing(report, &mut section);
    let mut backend = Backend::new(&name, transport, address, framing);
    let at = &mut section;
    read_fields(report, at, &mut backend);
    backend.matching = read_match(report, at);
    if backend.sockets == Sockets::PerRequest && at.entry("connections").is_some() {
        let what = "`connections` is not valid with sockets = \"per-request\"";
        let right = "remove it; `in_flight` limits the sockets";
        report.problem(Problem::new(at.place("connections"), what, right));
    }
    if at.entry("memory_bytes").is_some() {
        let what = "`memory_bytes` is not valid for a server";
        let right = "remove it, or write connect = \"transfer\"";
        report.problem(Problem::new(at.place("memory_bytes"), what, right));
    }
    let longest = backend.max_message_bytes as usize;
    let sizes = Sizes { message_bytes: longest, reply_bytes: longest };
    backend.functions = read_functions(report, at, base, sizes, (engine, false));
    (backend, section.finish(report))
}

fn read_match(report: &mut Report<'_>, section: &mut Section<'_>) -> Option<MatchId> {
    let (text, span) = section.text(report, "match", "\"id:OFFSET:LENGTH\"")?;
    match text.parse() {
        Ok(id) => {
            section.record(report, "match", text);
            Some(id)
        }
        Err(error) => {
            let message = error.to_string();
            let (what, right) = message.split_once(": ").unwrap_or((&message, "another"));
            report.problem(Problem::new(span, what, right));
            None
        }
    }
}

fn read_connect(
    report: &mut Report<'_>,
    section: &mut Section<'_>,
) -> Option<(Transport, std::net::SocketAddr)> {
    let example = "\"tcp://127.0.0.1:11211\"";
    let Some(entry) = section.entry("connect") else {
        section.missing(report, "connect", example);
        return None;
    };
    let (text, span) = text_of(report, "connect", &entry.node, example)?;
    section.record(report, "connect", text.clone());
    match address::connect(&text) {
        Ok(found) => Some(found),
        Err(wrong) => {
            report.problem(Problem::new(span, wrong.what, wrong.right));
            None
        }
    }
}
