//! The control side of `serval serve`: one thread owns the server and changes what it runs, another one serves the
//! control socket.
//!
//! `engine.control = "PATH"` is a Unix socket of type seqpacket with mode 0600: a message is a request and gets one
//! message as its answer. The default path is that of [`discovery`]. Requests ([`protocol`]) are JSON objects on one
//! line of at most [`REQUEST_BYTES_MAX`](protocol::REQUEST_BYTES_MAX) bytes: `{"command": "status"}`, `"reload"`, `"metrics"` and `"functions"`. A peer whose
//! user is neither the engine's nor root is rejected, unless a service names the user in `function_users`: then it may make requests about
//! functions only. At most `CONNECTIONS_MAX` connections are open, of which other users have at most `USER_CONNECTIONS_MAX`, each for
//! `FIRST_REQUEST_TIMEOUT` without a first request and `IDLE_TIMEOUT` without another one. One more closes the oldest
//! connection without a request, or else the one that has been idle for longest, so that silent peers cannot block
//! others. A connection with which functions end ([`Origin::Created`](crate::Origin::Created)) stays open and counts apart.
//!
//! While a reload runs, at most one other is queued. It reads the file when it starts, so it sees everything written
//! before it was requested, and all peers that requested it meanwhile get its outcome.
//!
//! Modules that a request or a reload needs are compiled before it is done, while the owner does others (`control/compiles.rs`).

pub mod client;
mod compiles;
pub mod discovery;
mod fields;
mod functions;
pub mod protocol;
mod reception;
pub mod tenants;

use std::os::fd::OwnedFd;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use serde_json::{Value as Json, json};
use sys::local::LocalListener;
use sys::readiness::WakeFd;

use self::compiles::{Compiles, Job};
use self::protocol::FunctionRequest;
use self::reception::{ControlServer, Status};
use self::tenants::TenantRequest;
use crate::config::{Config, ConfigError, ControlSocket, Overrides, memory_url, unix_url, url};
use crate::exporter::{Health, Pages};
use crate::machine::{MachineError, fit_connections};
use crate::{
    Beneficiary, Caller, ChangeError, CompiledModule, EntryChange, FunctionCounters, Server,
    ServiceAction, ServiceChange, ShutdownReport,
};

/// Requests to the thread that owns the server.
enum Task {
    Reload,
    /// The modules of the file that a reload has read are compiled.
    ReloadCompiled(Box<Config>, Outcome, Vec<CompiledModule>),
    /// About functions. Each connection has one request at a time.
    Functions(Box<FunctionTask>),
    /// The module that it needs is compiled.
    FunctionsCompiled(Box<FunctionTask>, Vec<CompiledModule>),
    /// About tenants.
    Tenants(Caller, TenantRequest, Outcome),
    /// A connection with which functions end has ended.
    Ended(u64),
    End,
    /// As `End`, without finishing.
    Abandon,
}

/// A request about functions, and who made it.
struct FunctionTask {
    caller: Caller,
    request: FunctionRequest,
    /// The content of a file that came with it.
    content: Option<Vec<u8>>,
    outcome: Outcome,
    /// Set when the connection has ended: then no client waits for the outcome.
    gone: Arc<AtomicBool>,
}

/// The outcome of a reload, for all that requested it, or of another request.
type Outcome = Arc<OnceLock<Told>>;

/// An answer, with the descriptors that go with it.
struct Told {
    answer: Json,
    files: Vec<OwnedFd>,
}

impl From<Json> for Told {
    fn from(answer: Json) -> Self {
        Self { answer, files: Vec::new() }
    }
}

/// The queue of the thread that owns the server; at most one reload waits in it.
struct Tasks {
    sender: Sender<Task>,
    waiting: Mutex<Option<Outcome>>,
}

impl Tasks {
    fn new() -> (Arc<Self>, Receiver<Task>) {
        let (sender, inbox) = mpsc::channel();
        (Arc::new(Self { sender, waiting: Mutex::new(None) }), inbox)
    }

    fn waiting(&self) -> MutexGuard<'_, Option<Outcome>> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Queues a reload, or joins the one that is queued.
    fn reload(&self) -> Outcome {
        let mut waiting = self.waiting();
        let outcome = waiting.get_or_insert_with(|| {
            // The owner is gone only when everything ends.
            let _ = self.sender.send(Task::Reload);
            Outcome::default()
        });
        outcome.clone()
    }

    /// Queues a request about functions.
    fn ask_functions(
        &self,
        caller: Caller,
        request: FunctionRequest,
        content: Option<Vec<u8>>,
        gone: Arc<AtomicBool>,
    ) -> Outcome {
        let outcome = Outcome::default();
        let task = FunctionTask { caller, request, content, outcome: outcome.clone(), gone };
        // The owner is gone only when everything ends.
        let _ = self.sender.send(Task::Functions(Box::new(task)));
        outcome
    }

    /// Queues a request about tenants.
    fn ask_tenants(&self, caller: Caller, request: TenantRequest) -> Outcome {
        let outcome = Outcome::default();
        // The owner is gone only when everything ends.
        let _ = self.sender.send(Task::Tenants(caller, request, outcome.clone()));
        outcome
    }

    /// The queued reload begins: later requests need another one.
    fn begin(&self) -> Outcome {
        self.waiting().take().unwrap_or_default()
    }

    fn end(&self) {
        let _ = self.sender.send(Task::End);
    }
}

/// What `status` shows, and who besides the operator may connect.
#[derive(Default)]
struct ShownServices {
    services: Vec<Json>,
    /// By user number.
    users: Vec<u32>,
}

/// What the owner does with the server at the end.
type Finish = Box<dyn FnOnce(Server) -> ShutdownReport + Send>;

/// Why the control side does not run, or a request failed.
#[derive(Debug, thiserror::Error)]
pub enum ControlError {
    /// The configuration is invalid.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// This machine lacks something that the configuration needs.
    #[error(transparent)]
    Machine(#[from] MachineError),
    /// Several servers match; the text lists them.
    #[error("{0}")]
    Ambiguous(String),
    /// A failure; one sentence.
    #[error("{0}")]
    Failed(String),
}

/// A configuration file and the values of `--set`, read again for every reload.
#[derive(Clone, Debug)]
pub struct ConfigSource {
    /// The file.
    pub path: PathBuf,
    /// `KEY=VALUE` each.
    pub sets: Vec<String>,
}

impl ConfigSource {
    /// Reads and checks the configuration.
    pub fn load(&self) -> Result<Config, ConfigError> {
        Config::load(&self.path, &Overrides::from_environment(self.sets.clone()))
    }

    /// The same; mistakes in kernel files are among the problems.
    pub fn inspect(&self) -> Result<Config, ConfigError> {
        let overrides = Overrides::from_environment(self.sets.clone());
        let inspect = Some(runtime::kernel_file::inspect as _);
        Config::load(&self.path, &Overrides { inspect, ..overrides })
    }
}

/// Handle of both threads.
pub struct Control {
    tasks: Arc<Tasks>,
    ending: Arc<AtomicBool>,
    owner: JoinHandle<Option<ShutdownReport>>,
    control_server: Option<(Arc<WakeFd>, JoinHandle<()>)>,
}

impl Control {
    /// Takes over the server. `source` is read again for every reload; `finish` stops the server at the end, on the
    /// thread that owns it.
    pub fn start(
        server: Server,
        config: Config,
        source: ConfigSource,
        health: Arc<Health>,
        finish: Finish,
    ) -> Result<Self, ControlError> {
        let (tasks, inbox) = Tasks::new();
        let ending = Arc::new(AtomicBool::new(false));
        let shown = Arc::new(Mutex::new(ShownServices::default()));
        let (metrics, socket) = (server.metrics(), config.control.clone());
        let functions = server.functions.counters();
        health.watch_functions(functions.clone());
        let file = source.path.canonicalize().unwrap_or_else(|_| source.path.clone());
        let owner = Owner {
            server,
            config,
            source,
            health: health.clone(),
            tasks: tasks.clone(),
            ending: ending.clone(),
            shown: shown.clone(),
            socket: Arc::default(),
            compiles: Compiles::new(tasks.sender.clone()),
            compiles_reload: false,
        };
        owner.show();
        let place = owner.socket.clone();
        let builder = std::thread::Builder::new().name("serval-control".into());
        let owner = builder.spawn(move || owner.run(&inbox).map(finish)).map_err(|error| {
            ControlError::Failed(format!("a thread cannot be started: {error}"))
        })?;
        let mut control = Self { tasks, ending, owner, control_server: None };
        let explicit = matches!(socket, ControlSocket::At(_));
        let path = match socket {
            ControlSocket::Off => return Ok(control),
            ControlSocket::At(path) => Ok(path),
            ControlSocket::Auto => discovery::own_path(),
        };
        let status = Status { metrics: metrics.clone(), health: health.clone(), shown, file };
        let pages = Pages::new(metrics, health);
        let opened = path.and_then(|path| {
            let users = status.has_users();
            let open = control.open(&path, status, pages, functions)?;
            // A reload that runs already sees either the path or the users that it had before.
            let _ = place.set(path.clone());
            admit_users(&path, users);
            Ok(open)
        });
        match opened {
            Ok(control_server) => control.control_server = Some(control_server),
            Err(why) if explicit => {
                let _ = control.tasks.sender.send(Task::Abandon);
                // This failure is reported; an error of the end would add nothing.
                let _ = control.end();
                return Err(ControlError::Failed(why));
            }
            Err(why) => tracing::warn!(
                "there is no control socket, so `serval top` and `serval reload` do not find this server: {why}; \
                 set engine.control to a path, or to \"off\""
            ),
        }
        Ok(control)
    }

    fn open(
        &self,
        path: &Path,
        status: Status,
        pages: Pages,
        functions: Arc<FunctionCounters>,
    ) -> Result<(Arc<WakeFd>, JoinHandle<()>), String> {
        let listener = LocalListener::bind(path).map_err(|error| error.to_string())?;
        let wake_fd = Arc::new(WakeFd::new().map_err(|error| error.to_string())?);
        let (ending, tasks) = (self.ending.clone(), self.tasks.clone());
        let connections = Vec::new();
        let mut control_server = ControlServer {
            listener,
            wake_fd: wake_fd.clone(),
            ending,
            tasks,
            status,
            pages,
            functions,
            connections,
            last_connection: 0,
        };
        let builder = std::thread::Builder::new().name("serval-reception".into());
        let thread = builder.spawn(move || control_server.run());
        let thread = thread.map_err(|error| format!("a thread cannot be started: {error}"))?;
        Ok((wake_fd, thread))
    }

    /// Requests a reload, unless one is queued already.
    pub fn reload(&self) {
        self.tasks.reload();
    }

    /// The owner finishes with the server; a reload in progress stops waiting.
    pub fn begin_end(&self) {
        self.ending.store(true, Ordering::Relaxed);
        self.tasks.end();
        if let Some((wake_fd, _)) = &self.control_server {
            wake_fd.wake();
        }
    }

    /// Whether [`Self::end`] returns at once.
    pub fn has_ended(&self) -> bool {
        let control_server = self.control_server.as_ref();
        self.owner.is_finished() && control_server.is_none_or(|(_, thread)| thread.is_finished())
    }

    /// Waits for both threads, after [`Self::begin_end`]; returns what `finish` returned.
    pub fn end(self) -> Result<ShutdownReport, ControlError> {
        if let Some((_, thread)) = self.control_server {
            // It does not panic; if it did, there is nothing left to do for it.
            let _ = thread.join();
        }
        let panicked = || ControlError::Failed("the thread that stops the server panicked".into());
        self.owner.join().ok().flatten().ok_or_else(panicked)
    }
}

/// How often functions are asked for their registers, for the page of metrics.
const SAMPLE_INTERVAL: Duration = Duration::from_secs(1);

/// The thread that owns the server.
struct Owner {
    server: Server,
    config: Config,
    source: ConfigSource,
    health: Arc<Health>,
    tasks: Arc<Tasks>,
    ending: Arc<AtomicBool>,
    shown: Arc<Mutex<ShownServices>>,
    /// The path of the control socket.
    socket: Arc<OnceLock<PathBuf>>,
    compiles: Compiles,
    /// A reload waits for the compiler: others wait for it.
    compiles_reload: bool,
}

impl Owner {
    /// Returns the server unless it is abandoned.
    fn run(mut self, inbox: &Receiver<Task>) -> Option<Server> {
        let mut sampled = Instant::now();
        loop {
            // Without a page of metrics there is no use for samples.
            let next = match self.config.metrics {
                None => inbox.recv().map_err(|_| RecvTimeoutError::Disconnected),
                Some(_) => inbox.recv_timeout(SAMPLE_INTERVAL.saturating_sub(sampled.elapsed())),
            };
            if self.config.metrics.is_some() && sampled.elapsed() >= SAMPLE_INTERVAL {
                self.server.functions.sample(&self.server.engine);
                sampled = Instant::now();
            }
            match next {
                Err(RecvTimeoutError::Timeout) => {}
                // It stays queued: the one that waits asks again.
                Ok(Task::Reload) if self.compiles_reload => {}
                Ok(Task::Reload) => self.begin_reload(),
                Ok(Task::ReloadCompiled(config, outcome, modules)) => {
                    self.compiles_reload = false;
                    self.server.functions.use_compiled(modules);
                    self.end_reload(Ok(*config), &outcome);
                    self.server.functions.use_compiled(Vec::new());
                    if self.tasks.waiting().is_some() {
                        self.begin_reload();
                    }
                }
                Ok(Task::Functions(task)) => {
                    if let Some(task) = self.compile_first(task) {
                        self.answer_functions(*task);
                    }
                }
                // Its connection may have ended just before: nothing would end with it any longer.
                Ok(Task::FunctionsCompiled(task, _)) if task.gone.load(Ordering::Relaxed) => {}
                Ok(Task::FunctionsCompiled(task, modules)) => {
                    self.server.functions.use_compiled(modules);
                    // What it changes may have another module meanwhile, which is then compiled first.
                    if let Some(task) = self.compile_first(task) {
                        self.answer_functions(*task);
                    }
                    self.server.functions.use_compiled(Vec::new());
                }
                Ok(Task::Tenants(caller, request, outcome)) => {
                    let answer = tenants::answer(&mut self.server, caller, &request);
                    let changes = request != TenantRequest::List;
                    audit(caller, request.verb(), request.name(), &answer.answer, changes);
                    self.show();
                    outcome.set(answer).ok().expect("it is set once");
                }
                Ok(Task::Ended(connection)) => {
                    let functions =
                        self.server.functions.end_connection(&self.server.engine, connection);
                    if functions > 0 {
                        tracing::info!(functions, "functions ended with their connection");
                    }
                }
                Ok(Task::End) => return Some(self.server),
                Ok(Task::Abandon) | Err(RecvTimeoutError::Disconnected) => return None,
            }
        }
    }

    /// Has the module compiled that a request needs; the request comes back with it. Returns the request if it needs none, or will be refused.
    fn compile_first(&mut self, task: Box<FunctionTask>) -> Option<Box<FunctionTask>> {
        let Some((module, service)) = functions::module(&self.server, &task) else {
            return Some(task);
        };
        let of =
            self.server.functions.beneficiary(&self.server.engine, task.caller, service.as_deref());
        let (gone, outcome) = (task.gone.clone(), task.outcome.clone());
        let (caller, verb) = (task.caller, task.request.verb());
        let then = Box::new(move |modules| Task::FunctionsCompiled(task, modules));
        if let Err(why) = self.compiles.submit(Job { of, modules: vec![module], gone, then }) {
            let answer = json!({ "error": why });
            audit(caller, verb, "", &answer, true);
            outcome.set(answer.into()).ok().expect("it is set once");
        }
        None
    }

    fn answer_functions(&mut self, task: FunctionTask) {
        let FunctionTask { caller, request, content, outcome, .. } = task;
        let answer = functions::answer(&mut self.server, caller, &request, content);
        let changes = request.is_audited(&answer.answer);
        audit(caller, request.verb(), "", &answer.answer, changes);
        outcome.set(answer).ok().expect("it is set once");
    }

    /// Reads the file again, and changes to it once its modules are compiled.
    fn begin_reload(&mut self) {
        let outcome = self.tasks.begin();
        if self.ending.load(Ordering::Relaxed) {
            return;
        }
        let config = match self.load() {
            Ok(config) => config,
            Err(why) => return self.end_reload(Err(why), &outcome),
        };
        let modules = self.server.functions.modules_of(&self.server.engine, &config.topology);
        if modules.is_empty() {
            return self.end_reload(Ok(config), &outcome);
        }
        let (of, gone, told) = (Beneficiary::Operator, Arc::default(), outcome.clone());
        let config = Box::new(config);
        let then = Box::new(move |modules| Task::ReloadCompiled(config, told, modules));
        match self.compiles.submit(Job { of, modules, gone, then }) {
            Ok(()) => self.compiles_reload = true,
            Err(why) => {
                self.end_reload(Err(json!({ "result": "failed", "message": why })), &outcome)
            }
        }
    }

    fn end_reload(&mut self, config: Result<Config, Json>, outcome: &Outcome) {
        if self.ending.load(Ordering::Relaxed) {
            return;
        }
        let reloaded = self.reload(config);
        outcome.set(reloaded.into()).ok().expect("it is set once");
    }

    /// Changes to what the file says, or returns why not.
    fn reload(&mut self, config: Result<Config, Json>) -> Json {
        let outcome = match config {
            Ok(config) => self.change(config),
            Err(outcome) => outcome,
        };
        let result = outcome["result"].as_str().unwrap_or("failed").to_owned();
        if let Some(counters) = self.server.transfer_counters() {
            self.health.watch_transfers(counters);
        }
        self.health.count_reload(&result);
        let generation = self.health.generation();
        if let Some(message) = outcome["message"].as_str() {
            let problems = outcome["problems"].as_array().map_or(&[][..], Vec::as_slice);
            // The full text has many lines and is in the outcome.
            let problems: Vec<String> = problems.iter().map(problem_line).collect();
            let why = if problems.is_empty() { message.to_owned() } else { problems.join("; ") };
            tracing::error!("the configuration is {result}, nothing has changed: {why}");
        } else {
            tracing::info!(generation, "the configuration was read again: {result}");
        }
        let mut outcome = outcome;
        outcome["generation"] = generation.into();
        outcome
    }

    fn load(&self) -> Result<Config, Json> {
        let mut config = self.source.load().map_err(|error| refusal(&error.into()))?;
        fit_connections(&mut config, Some(&self.config)).map_err(|error| refusal(&error.into()))?;
        let fixed = [
            ("engine.metrics", config.metrics == self.config.metrics),
            ("engine.control", config.control == self.config.control),
            ("transfer", config.transfer == self.config.transfer),
        ];
        for (key, same) in fixed {
            if !same {
                let why = "cannot change while the engine runs (it is opened at the start)";
                let message = format!("{key} {why}: restart to apply it");
                return Err(json!({ "result": "refused", "message": message }));
            }
        }
        for warning in &config.warnings {
            tracing::warn!("{warning}");
        }
        Ok(config)
    }

    fn change(&mut self, config: Config) -> Json {
        let ending = self.ending.clone();
        let give_up = move || ending.load(Ordering::Relaxed);
        let report = match self.server.change(config.topology.clone(), &give_up) {
            Ok(report) => report,
            Err(error) => {
                let refused = matches!(error, ChangeError::Refused(_));
                let result = if refused { "refused" } else { "failed" };
                return json!({ "result": result, "message": error.to_string() });
            }
        };
        self.config = config;
        self.show();
        let mut services = Vec::new();
        for service in &report.services {
            let action = action_name(service.action);
            let (name, unanswered) = (&service.name, service.unanswered);
            let problems_of = problems_of(service);
            for problem in &problems_of {
                tracing::error!(unanswered, "service {name}: {action}; {problem}");
            }
            match service.action {
                _ if !problems_of.is_empty() => {}
                ServiceAction::Unchanged => tracing::debug!("service {name}: {action}"),
                _ => tracing::info!(unanswered, "service {name}: {action}"),
            }
            services.push(json!({
                "name": name, "fate": action, "unanswered": unanswered,
                "left_behind": service.left_behind, "not_started": service.not_started,
                "rebuilt": service.rebuilt,
            }));
        }
        let result = if report.is_empty() { "unchanged" } else { "changed" };
        let entry = |entry: &EntryChange| {
            let EntryChange { key, what, action } = entry;
            json!({ "key": key, "what": what, "fate": action })
        };
        let entries: Vec<Json> = report.entries.iter().map(entry).collect();
        json!({
            "result": result, "services": services, "settings": report.settings, "entries": entries,
        })
    }

    /// Updates [`ShownServices`].
    fn show(&self) {
        let topology = self.server.topology();
        let mut listens: Vec<Vec<String>> = vec![Vec::new(); topology.services.len()];
        for (service, listen) in self.server.addresses() {
            listens[service].push(url(listen.transport, listen.address));
        }
        for (service, path) in topology.memory_ports() {
            listens[service].push(memory_url(path));
        }
        for (service, path) in topology.unix_ports() {
            listens[service].push(unix_url(path));
        }
        let services = topology.services.iter().zip(listens);
        let services = services.map(|(s, at)| json!({ "name": s.name, "listen": at })).collect();
        let of_services = topology.services.iter().flat_map(|s| &s.function_users);
        let of_tenants = topology.tenants.iter().flat_map(|tenant| &tenant.users);
        let users: Vec<u32> = of_services.chain(of_tenants).copied().collect();
        if let Some(path) = self.socket.get() {
            admit_users(path, !users.is_empty());
        }
        if let Some(transfer) = &self.config.transfer {
            let has_users = topology.tenants.iter().any(|tenant| !tenant.users.is_empty());
            admit_users(&transfer.socket, has_users);
        }
        let shown = ShownServices { services, users };
        *self.shown.lock().unwrap_or_else(PoisonError::into_inner) = shown;
    }
}

/// The audit line of a request that changes something, or was refused. No content, parameter or secret is in it.
fn audit(caller: Caller, request: &str, tenant: &str, answer: &Json, changes: bool) {
    let user = caller.user;
    match answer["error"].as_str() {
        Some(_) => tracing::warn!(user, tenant, "audit: {request} was refused"),
        None if changes => tracing::info!(user, tenant, "audit: {request} was done"),
        None => {}
    }
}

/// Lets processes of other users connect, or not. Each connection is checked when it is accepted.
fn admit_users(path: &Path, users: bool) {
    let mode = if users { 0o666 } else { 0o600 };
    if let Err(error) = std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)) {
        tracing::warn!("the mode of the socket {path:?} cannot be set: {error}");
    }
}

/// The problems of a service after a change. An unchanged service may have restarted too, because others changed.
fn problems_of(service: &ServiceChange) -> Vec<String> {
    let left_behind = service.left_behind.then(|| "its previous version hangs".to_owned());
    let not_started = service.not_started.as_ref();
    let not_started = not_started.map(|why| format!("no runtime of it serves yet: {why}"));
    left_behind.into_iter().chain(not_started).collect()
}

/// The name of an action.
fn action_name(action: ServiceAction) -> &'static str {
    match action {
        ServiceAction::Unchanged => "unchanged",
        ServiceAction::Added => "added",
        ServiceAction::Changed { keeps_connections: true, keeps_memory_clients: true } => "changed",
        ServiceAction::Changed { keeps_connections: false, keeps_memory_clients: true } => {
            "changed, connections closed"
        }
        ServiceAction::Changed { keeps_connections: true, .. } => {
            "changed, shared-memory clients disconnected"
        }
        ServiceAction::Changed { .. } => {
            "changed, connections closed, shared-memory clients disconnected"
        }
        ServiceAction::Removed => "removed",
    }
}

/// A problem of a configuration ([`ConfigError::json`]) in one line.
fn problem_line(problem: &Json) -> String {
    let text = |key: &str| problem[key].as_str().unwrap_or_default();
    let (source, what, right) = (text("source"), text("what"), text("right"));
    let place_in_file = match problem["line"].as_u64() {
        Some(line) if line > 0 => format!("{source}:{line}: "),
        _ if source.is_empty() => String::new(),
        _ => format!("{source}: "),
    };
    let right = if right.is_empty() { String::new() } else { format!(" ({right})") };
    format!("{place_in_file}{what}{right}")
}

/// The answer for an invalid configuration.
fn refusal(error: &ControlError) -> Json {
    let mut value = match error {
        ControlError::Config(error) => error.json(),
        _ => json!({}),
    };
    value["result"] = "refused".into();
    value["message"] = error.to_string().into();
    value
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_reload_is_queued_and_all_requesters_get_its_outcome() {
        let (tasks, inbox) = Tasks::new();
        let ask = || (0..1000).map(|_| tasks.reload()).collect::<Vec<_>>();
        let first = ask();
        assert_eq!(inbox.try_iter().count(), 1);
        let outcome = tasks.begin();
        let second = ask();
        assert_eq!(inbox.try_iter().count(), 1, "a queued reload may read a newer file");
        outcome.set(json!(1).into()).ok().unwrap();
        let answer = |outcome: &Outcome| outcome.get().map(|told| told.answer.clone());
        assert!(first.iter().all(|outcome| answer(outcome) == Some(json!(1))));
        assert!(second.iter().all(|outcome| outcome.get().is_none()));
    }

    #[test]
    fn the_log_has_one_line_per_problem_of_a_file() {
        let line = |problem| problem_line(&problem);
        let of = |line: u64, right: &str| json!({ "source": "a.toml", "line": line, "column": 1, "what": "unknown key `x`", "right": right });
        assert_eq!(
            line(of(3, "did you mean `y`?")),
            "a.toml:3: unknown key `x` (did you mean `y`?)"
        );
        assert_eq!(line(of(0, "")), "a.toml: unknown key `x`");
        assert_eq!(line(json!({ "what": "no services" })), "no services");
    }

    #[test]
    fn problems_of_a_service_are_reported_for_every_action() {
        let keeps = ServiceAction::Changed { keeps_connections: true, keeps_memory_clients: true };
        for action in
            [ServiceAction::Unchanged, ServiceAction::Added, keeps, ServiceAction::Removed]
        {
            let with = |left_behind: bool, not_started: Option<&str>| {
                let not_started = not_started.map(str::to_owned);
                let name = "a".into();
                let rebuilt = None;
                let unanswered = 0;
                problems_of(&ServiceChange {
                    name,
                    action,
                    unanswered,
                    left_behind,
                    not_started,
                    rebuilt,
                })
            };
            assert_eq!(with(false, None), [""; 0]);
            assert_eq!(with(true, None), ["its previous version hangs"]);
            assert_eq!(with(false, Some("no GPU")), ["no runtime of it serves yet: no GPU"]);
            assert_eq!(with(true, Some("no GPU")).len(), 2);
        }
    }
}
