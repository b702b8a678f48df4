//! The configuration: a TOML file, environment variables and flags are turned into a [`Topology`].
//!
//! Precedence: defaults < file < environment < flags. Variables are `SERVAL_ENGINE_KEY` and
//! `SERVAL_LIMITS_KEY`, for the keys of `[engine]` and `[limits]`; a flag `--set PATH=VALUE` reaches
//! every key, with accelerators, services and backends named by their names:
//! `engine.workers=2`, `service.digits.slots=128`, `service.digits.backend.db.timeout_ms=50`.
//! Values have the syntax of the file; strings may be written without quotes.
//!
//! Nothing is guessed and nothing is ignored: an unknown key, a wrong type, a value out of range and contradictory
//! keys are rejected. All problems are reported at once, each with its place in the text and the fix. (An unknown
//! variable is only reported in [`Config::warnings`]: container platforms create variables from service names.)
//!
//! The file is parsed with the `toml` crate into a tree whose values know their places. Values are then read by typed
//! accessors instead of serde: serde stops at the first error, cannot suggest the nearest key, and loses the origin
//! of a value, which `serval check-config` shows.

mod accelerator;
mod address;
mod diagnostic;
mod fields;
mod file;
mod function;
mod kernel;
mod keys;
mod peer;
mod proxy;
mod reader;
mod reference;
mod sections;
mod service;
mod show;
mod socket;
mod streams;
mod tables;
mod tenant;
mod tree;
mod words;

use std::any::Any;
use std::borrow::Cow;
use std::io::Read as _;
use std::net::SocketAddr;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use engine::topology::{AcceleratorKind, CpuPlacement, Launch, Service, Topology};
use runtime::kernel_file::Target;
use sys::private_file::open_regular;
use transfer::ServiceLimits;
use wire::framing::Framing;

use diagnostic::{Problem, Source};
use reader::Report;

use crate::tenants::memory_problems;

pub use address::{memory_url, unix_url, url};
pub use diagnostic::{ConfigError, Origin, ProblemEntry};
pub use kernel::{BUILTINS, Builtin};
pub(crate) use keys::{differences, set_tenant_value, tenant_values};
pub use reader::Setting;
pub use reference::tables as reference_tables;
pub use show::RegionUse;
pub use show::bytes_for_people;
pub(crate) use show::param_json;
pub use streams::from_hex;
pub(crate) use tenant::is_tenant_name;
pub(crate) use words::nearest;

/// Largest configuration file, in bytes.
pub const FILE_BYTES_MAX: u64 = 1 << 20;

/// Overrides of the file: variables and flags.
#[derive(Clone, Debug, Default)]
pub struct Overrides {
    /// Environment variables; those that do not start with `SERVAL_ENGINE_` or `SERVAL_LIMITS_` are ignored.
    pub environment: Vec<(String, String)>,
    /// `KEY=VALUE` of every `--set`.
    pub sets: Vec<String>,
    /// Also opens the kernel files, so that problems with them are reported in their places with all others.
    pub inspect: Option<Inspect>,
}

/// Opens the kernel file at a path, for a GPU or for host cores, and finds the kernel of this name, or the only one.
/// The error is one sentence, followed by a colon and the fix. The opened file is added to the last argument, which
/// exists until the whole configuration is read: services with the same file share one trial run.
pub type Inspect = fn(
    path: &Path,
    name: Option<&str>,
    target: Target,
    opened: &mut Vec<Arc<dyn Any>>,
) -> Result<(), String>;

impl Overrides {
    /// This process's environment, and flags. Variables that are not UTF-8 are ignored.
    pub fn from_environment(sets: Vec<String>) -> Self {
        let text = |(name, value): (std::ffi::OsString, std::ffi::OsString)| {
            Some((name.into_string().ok()?, value.into_string().ok()?))
        };
        let mut environment: Vec<_> = std::env::vars_os().filter_map(text).collect();
        environment.sort();
        Self { environment, sets, inspect: None }
    }
}

/// The location of the control socket.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum ControlSocket {
    /// In the folder where `serval top` and `serval reload` look for it.
    #[default]
    Auto,
    /// There is no control socket.
    Off,
    /// At this path.
    At(PathBuf),
}

/// The socket of the transfer engine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TransferSettings {
    /// Where it listens.
    pub socket: PathBuf,
    /// What its callers may use.
    pub limits: ServiceLimits,
}

/// A valid configuration.
#[derive(Clone, Debug)]
pub struct Config {
    /// Services, accelerators, workers and limits; [`Topology::check`] has passed.
    pub topology: Topology,
    /// Address of `/metrics`, if it is served.
    pub metrics: Option<SocketAddr>,
    /// The location of the control socket.
    pub control: ControlSocket,
    /// Where programs ask for transfers, if anywhere.
    pub transfer: Option<TransferSettings>,
    /// The effective value and origin of every key, in the order of the documentation.
    pub settings: Vec<Setting>,
    /// Warnings about valid values.
    pub warnings: Vec<String>,
}

impl Config {
    /// Reads a file.
    pub fn load(path: &Path, overrides: &Overrides) -> Result<Self, ConfigError> {
        let name = path.display().to_string();
        let text = read_file(path).map_err(|what| unreadable(&name, what))?;
        let base = path.parent().unwrap_or(Path::new(""));
        Self::parse(&name, &text, base, overrides)
    }

    /// Reads a text. `name` stands for the file in errors; kernel paths are relative to `base`.
    pub fn parse(
        name: &str,
        text: &str,
        base: &Path,
        overrides: &Overrides,
    ) -> Result<Self, ConfigError> {
        let file = Source { name: name.to_owned(), text: text.to_owned(), origin: Origin::File };
        let mut sources = vec![file];
        let mut problems = Vec::new();
        let mut root = match tree::parse(&sources, 0) {
            Ok(root) => root,
            Err(problems) => return Err(ConfigError::new(sources, problems)),
        };
        let mut warnings = Vec::new();
        for over in tree::overrides(overrides, &mut sources, &mut problems) {
            if !keep(&over, &sources, &mut warnings) {
                continue;
            }
            if let Err(problem) = tree::apply(&mut root, &sources, &over) {
                problems.push(problem);
            }
        }
        let inspect = overrides.inspect;
        let mut report = Report {
            sources: &sources,
            problems,
            settings: Vec::new(),
            inspect,
            opened: Vec::new(),
        };
        let (topology, options, places) = sections::read(&mut report, &root, base);
        let Report { mut problems, mut settings, .. } = report;
        in_order(&mut settings);
        let mut found = topology.problems();
        found.extend(memory_problems(&topology));
        let found = found.iter().filter(|error| places.is_original(error));
        problems.extend(found.map(|error| sections::place_topology_error(&places, error)));
        if !problems.is_empty() {
            return Err(ConfigError::new(sources, problems));
        }
        let (metrics, control, transfer) = (options.metrics, options.control, options.transfer);
        warnings.extend(exposure_warning(&topology, metrics));
        warnings.extend(topology.services.iter().flat_map(arena_warnings));
        warnings.extend(topology.services.iter().filter_map(service::short_reply));
        warnings.extend(topology.services.iter().flat_map(service::unmatched_backends));
        warnings.extend(exposed_keys(&topology));
        Ok(Self { topology, metrics, control, transfer, settings, warnings })
    }
}

impl Config {
    /// Checks the configured cores against the usable ones. The error is one sentence; a warning about more workers
    /// than usable cores is added to [`Self::warnings`].
    pub fn use_cores(
        &mut self,
        allowed: &[usize],
        is_usable: impl Fn(usize) -> bool,
    ) -> Result<(), String> {
        let engine = &self.topology.engine;
        let of_accelerators = self.topology.accelerators.iter().filter_map(|accelerator| {
            let (AcceleratorKind::Cpu { placement: CpuPlacement::Threads { cores, .. }, .. }
            | AcceleratorKind::Process { launch: Launch::Engine { cores, .. }, .. }) =
                &accelerator.kind
            else {
                return None;
            };
            Some((format!("accelerator.{}.cores", accelerator.name), cores))
        });
        let of_engine = std::iter::once(("engine.cores".to_owned(), &engine.cores));
        for (key, cores) in of_engine.chain(of_accelerators) {
            let usable = |core: usize| allowed.contains(&core) || is_usable(core);
            if let Some(core) = cores.iter().find(|core| !usable(**core)) {
                let list = allowed.iter().map(usize::to_string).collect::<Vec<_>>().join(", ");
                return Err(format!(
                    "{key} names core {core}, which cannot be used here: this process has the cores {list}"
                ));
            }
        }
        let usable = allowed.len().max(engine.cores.len());
        if engine.workers > usable {
            self.warnings.push(format!(
                "engine.workers = {}, but only {} of the machine's cores can be used here: workers that share a \
                 core are slower than one alone",
                engine.workers, usable
            ));
        }
        Ok(())
    }

    /// The paths of all sockets that the engine listens on, with their keys.
    pub fn sockets(&self) -> impl Iterator<Item = (String, &Path)> {
        let control = match &self.control {
            ControlSocket::At(path) => Some(("engine.control".to_owned(), path.as_path())),
            ControlSocket::Auto | ControlSocket::Off => None,
        };
        let control = control.into_iter();
        let attach = self.topology.accelerators.iter().filter_map(|accelerator| {
            let AcceleratorKind::Process { launch: Launch::External { attach }, .. } =
                &accelerator.kind
            else {
                return None;
            };
            Some((format!("accelerator.{}.attach", accelerator.name), attach.as_path()))
        });
        let listen = self.topology.memory_ports().map(|(service, path)| {
            (format!("service.{}.listen", self.topology.services[service].name), path)
        });
        let transfer = self.transfer.as_ref();
        let transfer = transfer.map(|of| ("transfer.socket".to_owned(), of.socket.as_path()));
        let sockets = self.topology.unix_ports().map(|(service, path)| {
            (format!("service.{}.socket", self.topology.services[service].name), path)
        });
        control.chain(transfer).chain(attach).chain(listen).chain(sockets)
    }
}

impl ConfigError {
    fn new(sources: Vec<Source>, mut problems: Vec<Problem>) -> Self {
        problems.sort_by_key(|p| p.span.map_or((0, 0), |span| (span.source, span.start)));
        Self { sources, problems }
    }
}

/// Sorts the settings by table, in the order of the file, and by key in the order of the documentation.
fn in_order(settings: &mut [Setting]) {
    let mut sections: Vec<String> = Vec::new();
    for setting in &*settings {
        if !sections.contains(&setting.section) {
            sections.push(setting.section.clone());
        }
    }
    settings.sort_by_cached_key(|setting| {
        let section = sections.iter().position(|section| *section == setting.section);
        (section, keys::place_of(&setting.section, &setting.key))
    });
}

/// Whether a variable names a key; other variables are ignored with a warning.
fn keep(over: &tree::Override, sources: &[Source], warnings: &mut Vec<String>) -> bool {
    let source = &sources[over.path_span.source];
    if source.origin != Origin::Environment {
        return true;
    }
    let [section, key] = over.path.as_slice() else { return true };
    let keys = keys::keys_of(section);
    if keys.contains(&key.as_str()) {
        return true;
    }
    let variable = &source.text[over.path_span.start..over.path_span.end];
    let hint = match nearest(key, keys.iter().copied()) {
        Some(near) => format!("; did you mean {section}.{near}"),
        None => String::new(),
    };
    warnings.push(format!("the variable {variable} names no key and is ignored{hint}"));
    false
}

/// The warning about listening on addresses that other machines can reach.
fn exposure_warning(topology: &Topology, metrics: Option<SocketAddr>) -> Option<String> {
    let mut beyond: Vec<String> = topology
        .ports()
        .filter(|(_, listen)| !listen.address.ip().is_loopback())
        .map(|(_, listen)| url(listen.transport, listen.address))
        .collect();
    let metrics = metrics.filter(|address| !address.ip().is_loopback());
    beyond.extend(metrics.map(|address| format!("http://{address}")));
    (!beyond.is_empty()).then(|| {
        let ports = beyond.join(", ");
        format!("{ports} can be reached from other machines; nothing is encrypted or authenticated")
    })
}

/// The warnings about files with keys of functions that other users can read.
fn exposed_keys(topology: &Topology) -> Vec<String> {
    let chains = topology.services.iter().flat_map(|service| {
        let backends = service.backends.iter().map(|backend| &backend.functions);
        std::iter::once(&service.functions).chain(backends)
    });
    let mut files: Vec<_> = chains.flatten().filter_map(builtins::secret_file).collect();
    files.sort_unstable();
    files.dedup();
    let is_exposed = |file: &&Cow<'_, str>| {
        std::fs::metadata(&***file).is_ok_and(|found| found.mode() & 0o077 != 0)
    };
    let warning =
        |file| format!("the file of keys {file:?} can be read by other users: run chmod 600 on it");
    files.iter().filter(is_exposed).map(warning).collect()
}

/// The warning about arenas with room for fewer messages than there are slots. If all messages have the maximum
/// length, or the arena was configured, the warning states the consequence; otherwise there is one conditional
/// warning for the service, because messages of maximum length may be rare. A proxy has no arenas.
fn arena_warnings(service: &Service) -> Vec<String> {
    if service.upstream.is_some() {
        return Vec::new();
    }
    let (name, slots, chosen) = (&service.name, service.slots, service.arena_bytes > 0);
    let (mut sentences, mut perhaps, mut arena) = (Vec::new(), Vec::new(), 0);
    let longest = service.max_message_bytes;
    if let Some((fit, whole)) = service.short_arena(longest) {
        let requests = format!("{fit} requests of {longest} bytes");
        if chosen || service.framing == Framing::Fixed(longest) {
            sentences.push(format!(
                "service {name:?}: the arena of each mqueue has room for {requests}, and more in flight are dropped as no_credit \
                 although there are {slots} slots; write arena_bytes = {whole}, or fewer slots"
            ));
        } else {
            perhaps.push(requests);
            arena = whole;
        }
    }
    for backend in &service.backends {
        let longest = backend.max_message_bytes;
        let Some((fit, whole)) = service.short_arena(longest) else { continue };
        if chosen {
            sentences.push(format!(
                "service {name:?}, backend {:?}: the arena of each mqueue has room for {fit} answers of {longest} bytes, and \
                 requests beyond wait although there are {slots} slots; write arena_bytes = {whole}, or a smaller max_message_bytes",
                backend.name
            ));
        } else {
            perhaps.push(format!("{fit} answers of {longest} bytes of backend {:?}", backend.name));
            arena = arena.max(whole);
        }
    }
    if !perhaps.is_empty() {
        let messages = perhaps.join(" and ");
        sentences.push(format!(
            "service {name:?}: by itself the arena of each mqueue has room for {messages} although there are {slots} slots; \
             unless messages that long are rare, write arena_bytes = {arena}, or fewer slots"
        ));
    }
    sentences
}

fn read_file(path: &Path) -> Result<String, String> {
    let shown = path.display();
    let cannot = |error: std::io::Error| format!("cannot read {shown}: {error}");
    let (file, _) = open_regular(path).map_err(|error| format!("cannot read {shown}: {error}"))?;
    let mut bytes = Vec::new();
    file.take(FILE_BYTES_MAX + 1).read_to_end(&mut bytes).map_err(cannot)?;
    if bytes.len() as u64 > FILE_BYTES_MAX {
        return Err(format!("{shown} is longer than 1 MiB: not a configuration file"));
    }
    String::from_utf8(bytes).map_err(|error| {
        let line =
            error.as_bytes()[..error.utf8_error().valid_up_to()].split(|b| *b == b'\n').count();
        format!("{shown} is not UTF-8 text: line {line}")
    })
}

fn unreadable(name: &str, what: String) -> ConfigError {
    let source = Source { name: name.to_owned(), text: String::new(), origin: Origin::File };
    let label = "name a TOML file; `serval check-config --help` shows one".to_owned();
    ConfigError::new(vec![source], vec![Problem { span: None, what, label, help: None }])
}

#[cfg(test)]
mod tests {
    use super::*;

    const SMALL: &str = "schema = 1\n[[service]]\nname = \"a\"\nlisten = \"udp://127.0.0.1:9000\"\nkernel = \"echo\"\n";

    fn parse(
        text: &str,
        environment: &[(&str, &str)],
        sets: &[&str],
    ) -> Result<Config, ConfigError> {
        let pair = |(name, value): &(&str, &str)| ((*name).to_owned(), (*value).to_owned());
        let overrides = Overrides {
            environment: environment.iter().map(pair).collect(),
            sets: sets.iter().map(|s| (*s).to_owned()).collect(),
            inspect: None,
        };
        Config::parse("a.toml", text, Path::new(""), &overrides)
    }

    fn origin(config: &Config, section: &str, key: &str) -> Origin {
        let found = config.settings.iter().find(|s| s.section == section && s.key == key);
        found.unwrap_or_else(|| panic!("no {section}.{key}")).origin
    }

    #[test]
    fn the_smallest_file_serves_on_an_implicit_accelerator() {
        let config = parse(SMALL, &[], &[]).unwrap();
        assert_eq!(config.topology.accelerators[0].name, "acc0");
        assert_eq!(config.topology.services[0].mqueues, 4);
        assert_eq!(origin(&config, "service.a", "mqueues"), Origin::Default);
        assert_eq!(origin(&config, "service.a", "kernel"), Origin::File);
        assert!(config.warnings.is_empty());
    }

    #[test]
    fn later_layers_win() {
        let text = format!("{SMALL}[engine]\nworkers = 2\n");
        let workers = |environment: &[(&str, &str)], sets: &[&str]| {
            let config = parse(&text, environment, sets).unwrap();
            (config.topology.engine.workers, origin(&config, "engine", "workers"))
        };
        let variable = [("SERVAL_ENGINE_WORKERS", "3")];
        assert_eq!(workers(&[], &[]), (2, Origin::File));
        assert_eq!(workers(&variable, &[]), (3, Origin::Environment));
        assert_eq!(workers(&variable, &["engine.workers=4"]), (4, Origin::Flag));
        assert_eq!(
            workers(&variable, &["engine.workers=4", "engine.workers = 5"]),
            (5, Origin::Flag)
        );
    }

    #[test]
    fn every_table_can_be_overridden_by_name() {
        let text = format!(
            "{SMALL}[[service.backend]]\nname = \"db\"\nconnect = \"tcp://127.0.0.1:1\"\n[[accelerator]]\nname = \"acc0\"\n"
        ) .replace("kernel", "accelerator = \"acc0\"\nkernel");
        let sets = [
            "limits.connections=7",
            "accelerator.acc0.placement=threads",
            "accelerator.acc0.threads=2",
            "service.a.listen=[\"tcp://[::1]:1\"]",
            "service.a.backend.db.timeout_ms=9",
            "service.a.kernel=delay",
            "service.a.params.microseconds=20",
            "engine.metrics=127.0.0.1:9464",
            "engine.cores=[1]",
        ];
        let config = parse(&text, &[("SERVAL_ENGINE_POLLING", "block")], &sets).unwrap();
        let service = &config.topology.services[0];
        assert_eq!(config.topology.limits.connections, 7);
        assert_eq!(service.listen[0].address, "[::1]:1".parse().unwrap());
        assert_eq!(service.backends[0].timeout_ms, 9);
        assert_eq!(service.params, [("microseconds".to_owned(), 20.0.into())]);
        assert_eq!(config.metrics, Some("127.0.0.1:9464".parse().unwrap()));
        assert_eq!(config.topology.engine.cores, [1]);
        assert_eq!(config.topology.engine.polling, engine::topology::Polling::Block);
    }

    #[test]
    fn missing_cores_are_refused_and_too_many_workers_reported() {
        let on = |sets: &[&str]| {
            let mut config = parse(SMALL, &[], sets).unwrap();
            config.use_cores(&[0, 1], |core| core == 2).map(|()| config.warnings)
        };
        assert_eq!(on(&["engine.workers=2", "engine.cores=[1, 0]"]), Ok(vec![]));
        let elsewhere = on(&["engine.workers=3", "engine.cores=[0, 1, 2]"]);
        assert_eq!(elsewhere, Ok(vec![]), "usable cores outside the affinity mask");
        let refused = on(&["engine.cores=[7]"]).unwrap_err();
        assert!(refused.contains("engine.cores names core 7"), "{refused}");
        assert!(refused.ends_with("the cores 0, 1"), "{refused}");
        let text = SMALL.replace("kernel", "accelerator = \"host\"\nkernel")
            + "[[accelerator]]\nname = \"host\"\ncores = [5]\n";
        for kind in ["accelerator.host.placement=threads", "accelerator.host.kind=process"] {
            let mut config = parse(&text, &[], &[kind]).unwrap();
            let refused = config.use_cores(&[0, 1], |_| false).unwrap_err();
            assert!(refused.starts_with("accelerator.host.cores names core 5"), "{refused}");
        }
        let many = on(&["engine.workers=3"]).unwrap();
        assert!(
            many.len() == 1 && many[0].starts_with("engine.workers = 3, but only 2 of"),
            "{many:?}"
        );
    }

    #[test]
    fn every_socket_has_its_key() {
        let text = SMALL
            .replace("udp://127.0.0.1:9000", "shm:///run/a/port")
            .replace("kernel", "accelerator = \"own\"\nkernel")
            + "[[accelerator]]\nname = \"own\"\nkind = \"process\"\nlaunch = \"external\"\nattach = \"/run/b/own\"\n";
        let config = parse(&text, &[], &["engine.control=/run/c/control"]).unwrap();
        let sockets: Vec<_> =
            config.sockets().map(|(key, path)| (key, path.display().to_string())).collect();
        let expected = [
            ("engine.control", "/run/c/control"),
            ("accelerator.own.attach", "/run/b/own"),
            ("service.a.listen", "/run/a/port"),
        ];
        assert_eq!(sockets, expected.map(|(key, path)| (key.to_owned(), path.to_owned())));
    }

    #[test]
    fn values_are_accepted_as_they_are_shown() {
        let config = parse(SMALL, &[], &["engine.metrics=none", "engine.control=none"]).unwrap();
        assert_eq!((config.metrics, config.control), (None, ControlSocket::Off));
        let config = parse(SMALL, &[], &["engine.metrics=", "engine.control="]).unwrap();
        assert_eq!((config.metrics, config.control), (None, ControlSocket::Off));
        let config = parse(SMALL, &[], &["engine.control=auto"]).unwrap();
        assert_eq!(config.control, ControlSocket::Auto);
        assert_eq!(parse(SMALL, &[], &[]).unwrap().control, ControlSocket::Auto);
    }

    #[test]
    fn only_external_programs_have_kernels_of_any_name() {
        let text =
            SMALL.replace("kernel = \"echo\"", "accelerator = \"own\"\nkernel = \"reverse\"");
        let own = |launch: &str| {
            format!("{text}[[accelerator]]\nname = \"own\"\nkind = \"process\"\n{launch}")
        };
        let external = "launch = \"external\"\nattach = \"/run/own\"\n";
        let config = parse(&own(external), &[], &[]).unwrap();
        assert_eq!(config.topology.services[0].kernel, "reverse");
        let on_a_gpu = own(external).replace("kind = \"process\"", "kind = \"cuda\"");
        assert_eq!(parse(&on_a_gpu, &[], &[]).unwrap().topology.services[0].kernel, "reverse");
        let refused = parse(&own(""), &[], &[]).unwrap_err().to_string();
        assert!(refused.contains("no built-in kernel is called \"reverse\""), "{refused}");
        let list = own(external).replace("= \"own\"\nkernel", "= [\"own\", \"host\"]\nkernel")
            + "[[accelerator]]\nname = \"host\"\n";
        let refused = parse(&list, &[], &[]).unwrap_err().to_string();
        assert!(refused.contains("no built-in kernel is called \"reverse\""), "{refused}");
        let each = list.replace("\"reverse\"", "[\"reverse\", \"echo\"]");
        assert!(parse(&each, &[], &[]).is_ok());
    }

    #[test]
    fn unknown_variables_are_only_reported() {
        let variables = [
            ("SERVAL_ENGINE_WORKRS", "2"),
            ("SERVAL_LIMITS_SERVICE_HOST", "10.0.0.1"),
            ("SERVAL_LOG", "debug"),
            ("SERVAL_PORT", "tcp://10.0.0.1:80"),
        ];
        let config = parse(SMALL, &variables, &[]).unwrap();
        assert_eq!(config.warnings.len(), 2);
        assert!(
            config.warnings[0].contains("did you mean engine.workers"),
            "{:?}",
            config.warnings
        );
    }

    #[test]
    fn arenas_with_less_room_than_slots_are_reported() {
        let warnings = |sets: &[&str]| parse(SMALL, &[], sets).unwrap().warnings;
        let long = "service.a.max_message_bytes=2000";
        assert!(warnings(&[long]).is_empty(), "the default arena has room for every slot");
        let short = warnings(&[long, "service.a.arena_bytes=1"]);
        assert_eq!(short.len(), 1, "{short:?}");
        assert!(short[0].contains("room for 4 requests of 2000 bytes"), "{short:?}");
        let (_, right) = short[0].split_once("write arena_bytes = ").unwrap();
        let right = format!("service.a.arena_bytes={}", right.split(',').next().unwrap());
        assert!(warnings(&[long, &right]).is_empty(), "{right}");
        // If the arena is the default, and messages of maximum length may be rare, the warning is conditional.
        let longer = "service.a.max_message_bytes=60000";
        let perhaps = warnings(&[longer]);
        assert!(perhaps.len() == 1 && perhaps[0].contains("unless"), "{perhaps:?}");
        assert!(perhaps[0].contains("room for 4 requests of 60000 bytes although there are 64"));
        let (_, right) = perhaps[0].split_once("write arena_bytes = ").unwrap();
        let right = format!("service.a.arena_bytes={}", right.split(',').next().unwrap());
        assert!(warnings(&[longer, &right]).is_empty(), "{right}");
        assert!(warnings(&[longer, "service.a.slots=4"]).is_empty());
        let fixed = warnings(&[longer, "service.a.framing=fixed:60000"]);
        assert!(fixed.len() == 1 && fixed[0].contains("room for 4 requests"), "{fixed:?}");
        assert!(fixed[0].contains("are dropped as no_credit"), "{fixed:?}");
        let text = format!(
            "{SMALL}arena_bytes = 8192\n[[service.backend]]\nname = \"db\"\nconnect = \"tcp://127.0.0.1:1\"\nframing = \"memcached\"\n"
        );
        let backend = parse(&text, &[], &[]).unwrap().warnings;
        assert!(
            backend[0].contains("backend \"db\"") && backend[0].contains("4 answers of 2048"),
            "{backend:?}"
        );
        // One warning for the service and its backends, with the arena that the longest message needs.
        let both = parse(&text, &[], &["service.a.arena_bytes=0", longer, "service.a.slots=256"]);
        let both = both.unwrap().warnings;
        let parts = [
            "4 requests of 60000 bytes and 128 answers of 2048 bytes of backend \"db\"",
            "256 slots",
        ];
        assert!(both.len() == 1 && parts.iter().all(|part| both[0].contains(part)), "{both:?}");
        let right =
            both[0].split_once("write arena_bytes = ").unwrap().1.split(',').next().unwrap();
        let right = format!("service.a.arena_bytes={right}");
        let raised = ["limits.region_mib=1024", longer, "service.a.slots=256", &right];
        assert!(parse(&text, &[], &raised).unwrap().warnings.is_empty(), "{right}");
    }

    #[test]
    fn backends_whose_answers_have_only_their_order_are_reported() {
        let warnings = |more: &str| {
            let text = format!("{SMALL}[[service.backend]]\nname = \"db\"\n{more}\n");
            parse(&text, &[], &[]).unwrap().warnings
        };
        for connect in ["connect = \"tcp://127.0.0.1:1\"", "connect = \"udp://127.0.0.1:1\""] {
            let found = warnings(connect);
            assert!(
                found.len() == 1 && found[0].contains("backend \"db\": without `match`"),
                "{found:?}"
            );
            let with_id = "framing = \"length:u16\"\nmatch = \"id:0:4\"";
            for right in [with_id, "sockets = \"per-request\"", "framing = \"memcached\""] {
                assert!(warnings(&format!("{connect}\n{right}")).is_empty(), "{right}");
            }
        }
        assert!(warnings("connect = \"transfer\"").is_empty());
    }

    #[test]
    fn replies_are_as_long_as_requests_and_shorter_limits_are_reported() {
        let set = |sets: &[&str]| {
            let config = parse(SMALL, &[], sets).unwrap();
            (config.topology.services[0].max_reply_bytes, config.warnings)
        };
        let long = "service.a.max_message_bytes=8192";
        assert_eq!(set(&[]), (1024, vec![]));
        assert_eq!(set(&[long, "service.a.slots=8"]).0, 8192);
        assert_eq!(set(&["service.a.max_message_bytes=100"]), (100, vec![]));
        let short = "service.a.max_reply_bytes=512";
        let (bytes, warnings) = set(&[short]);
        assert!(bytes == 512 && warnings.len() == 1, "{warnings:?}");
        assert!(warnings[0].contains("the kernel \"echo\" answers a request with as many bytes"));
        assert!(warnings[0].ends_with("write max_reply_bytes = 1024"), "{warnings:?}");
        assert_eq!(set(&[short, "service.a.replies=none"]).1, Vec::<String>::new());
        let digits = ["service.a.kernel=lenet", "service.a.max_reply_bytes=44"];
        assert_eq!(set(&digits).1, Vec::<String>::new(), "it declares the length of its replies");
        // A datagram cannot be longer.
        let datagrams = set(&["service.a.max_message_bytes=100000", "service.a.slots=1"]);
        assert_eq!(datagrams.0, 65_507);
        assert!(datagrams.1[0].contains("write max_message_bytes = 65507"), "{datagrams:?}");
        let streams = "service.a.listen=tcp://127.0.0.1:9000";
        let streams = set(&["service.a.max_message_bytes=100000", "service.a.slots=1", streams]);
        assert_eq!(streams, (100_000, vec![]));
        // The reply length of a custom kernel is unknown.
        let own = SMALL.replace("echo", "src/lib.rs");
        let base = Path::new(env!("CARGO_MANIFEST_DIR"));
        let sets = Overrides { sets: vec![short.to_owned()], ..Overrides::default() };
        let config = Config::parse("a.toml", &own, base, &sets).unwrap();
        assert!(config.warnings[0].contains("if it does, write max_reply_bytes = 1024"));
    }

    /// A fault in a custom kernel ends no other service.
    #[test]
    fn a_kernel_file_without_an_accelerator_runs_in_its_own_process() {
        let base = Path::new(env!("CARGO_MANIFEST_DIR"));
        let accelerators = |text: &str, sets: &[&str]| {
            let sets = sets.iter().map(|set| (*set).to_owned()).collect();
            let overrides = Overrides { sets, ..Overrides::default() };
            Config::parse("a.toml", text, base, &overrides).map(|config| {
                let shown =
                    config.settings.iter().find(|s| s.key == "accelerator").unwrap().clone();
                let topology = config.topology;
                let of = |at: &usize| topology.accelerators[*at].clone();
                let used: Vec<_> = topology.services[0].accelerators.iter().map(of).collect();
                assert_eq!(used.len(), 1);
                (
                    used[0].name.clone(),
                    matches!(used[0].kind, AcceleratorKind::Process { .. }),
                    topology.accelerators.len(),
                    shown.value,
                )
            })
        };
        let own = SMALL.replace("echo", "src/lib.rs");
        let host = |name: &str| format!("{own}[[accelerator]]\nname = \"{name}\"\n");
        assert_eq!(accelerators(&own, &[]).unwrap(), ("process".into(), true, 2, "process".into()));
        let list = own.replace("\"src/lib.rs\"", "[\"src/lib.rs\"]");
        assert_eq!(
            accelerators(&list, &[]).unwrap(),
            ("process".into(), true, 2, "process".into())
        );
        // Several kernels need several accelerators, which must be named.
        let several = own.replace("\"src/lib.rs\"", "[\"src/lib.rs\", \"src/config.rs\"]");
        let refused = accelerators(&several, &[]).unwrap_err().to_string();
        assert!(refused.contains("`kernel` lists 2 for 1 accelerator"), "{refused}");
        // The shown value is accepted, and so is the engine's own core.
        let named = accelerators(&own, &["service.a.accelerator=process"]).unwrap();
        assert_eq!((named.0, named.1), ("process".into(), true));
        let named = accelerators(&own, &["service.a.accelerator=acc0"]).unwrap();
        assert_eq!((named.0, named.1, named.2), ("acc0".into(), false, 1));
        assert_eq!(accelerators(SMALL, &[]).unwrap(), ("acc0".into(), false, 1, "acc0".into()));
        // Together with accelerators of the file, with any names.
        assert_eq!(accelerators(&host("host"), &[]).unwrap().0, "process");
        let other = accelerators(&host("process"), &[]).unwrap();
        assert_eq!((other.0, other.1), ("process0".into(), true));
        let other = accelerators(&host("process"), &["service.a.accelerator=process"]).unwrap();
        assert_eq!((other.0, other.1), ("process".into(), false), "the declared one");
        let refused = accelerators(&host("host").replace("src/lib.rs", "echo"), &[]).unwrap_err();
        assert!(
            refused.to_string().contains("accelerator"),
            "a built-in kernel needs an accelerator: {refused}"
        );
    }

    #[test]
    fn listening_off_loopback_is_reported_and_the_ratio_left_to_the_engine() {
        let text = SMALL.replace("127.0.0.1", "0.0.0.0");
        let config = parse(&text, &[], &[]).unwrap();
        assert_eq!(config.topology.limits.udp_reply_ratio, None);
        assert!(config.warnings[0].contains("other machines"));
        let metrics = parse(SMALL, &[], &["engine.metrics=0.0.0.0:9464"]).unwrap();
        assert!(metrics.warnings[0].starts_with("http://0.0.0.0:9464 can be reached"));
        let config = parse(&text, &[], &["limits.udp_reply_ratio=0"]).unwrap();
        assert_eq!(config.topology.limits.udp_reply_ratio, Some(0));
    }

    #[test]
    fn exactly_the_documented_keys_are_read() {
        let text =
            format!("{SMALL}[[service.backend]]\nname = \"db\"\nconnect = \"tcp://127.0.0.1:1\"\n");
        let config = parse(&text, &[], &[]).unwrap();
        for (section, table) in [("engine", "[engine]"), ("limits", "[limits]")] {
            let read: Vec<&str> = config
                .settings
                .iter()
                .filter(|s| s.section == section)
                .map(|s| s.key.as_str())
                .collect();
            let mut known = keys::keys_of(section);
            let mut sorted = read.clone();
            known.sort_unstable();
            sorted.sort_unstable();
            assert_eq!(sorted, known, "{table}");
        }
    }

    #[test]
    fn a_reported_entry_has_numbers() {
        let error = parse(&SMALL.replace("echo", "eco"), &[], &[]).unwrap_err();
        let entries = error.entries();
        assert_eq!((entries[0].line, entries[0].column), (5, 10));
        assert_eq!(entries[0].right, "did you mean \"echo\"?");
    }

    proptest::proptest! {
        #[test]
        fn no_text_panics(text in "\\PC{0,200}|(\\[?\\[?(engine|service|limits|schema)\\]?\\]?[= \n]{0,3}[0-9\"\\[{]{0,4}){0,8}") {
            if let Err(error) = parse(&text, &[("SERVAL_ENGINE_WORKERS", &text)], &[&text]) {
                assert!(!error.to_string().is_empty());
            }
        }

        #[test]
        fn no_mutation_of_a_good_file_panics(at in 0usize..200, byte in 0u8..128, cut in 0usize..40) {
            let mut bytes = format!("{SMALL}[engine]\nworkers = 2\ncores = [0, 1]\n").into_bytes();
            let at = at % bytes.len();
            bytes[at] = byte;
            let end = (at + cut).min(bytes.len());
            bytes.drain(at + 1..end.max(at + 1));
            if let Err(error) = parse(&String::from_utf8(bytes).unwrap(), &[], &[]) {
                assert!(error.to_string().starts_with("error: "));
            }
        }
    }
}
