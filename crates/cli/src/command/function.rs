//! `serval fn`: functions on the path of a running server's messages.

mod behind;
mod directory;
mod project;

use std::path::{Path, PathBuf};
use std::time::Duration;

use builtins::file_param;
use clap::{Args, Subcommand, ValueEnum};
use onpath::dictionary::{KIB_MAX, KIB_MIN};
use onpath::spec::{DEADLINE_US, DEADLINE_US_MAX, DICTIONARY_KIB, MEMORY_MIB, MEMORY_MIB_MAX};
use onpath::{OnFailure, Param, Spec};
use serde_json::{Map, Value as Json, json};
use server::control::client::FunctionClient;
use server::control::discovery;
use server::{Place, RegisterAction, Replacement, Target};

use super::Failure;
use crate::screen::{Screen, Table, print};
use crate::sdk;

pub(super) const HELP: &str = "\
A function sees the requests of a service before they go to the accelerator, and the replies before
they go to clients. It is part of the program (passthrough, threshold) or a WebAssembly module.

attach SERVICE NAME FUNCTION makes a function that ends when it is detached; a function with its
name is replaced. create NAME FUNCTION makes one that exists until destroy, costs no worker
anything while it is not attached, and belongs to the user who made it. No change loses a message.
A reload of the configuration keeps what was attached. Without --server the one server that this
user runs is asked. new, build, test, bench, keygen, sign, verify and install need no server.

Examples:
  serval fn new mine && cd mine && serval fn test && serval fn bench
  serval fn attach digits mine .
  serval fn list
  serval fn attach digits limits threshold --param offset=0 --param high=100
  serval fn attach digits mine ./mine.wasm --on-failure open --before limits
  serval fn command digits limits read
  serval fn command digits limits set high=200
  serval fn replace digits mine ./mine.wasm
  serval fn counters
  serval fn trace digits 10
  serval fn detach digits limits
  serval fn create limits threshold && serval fn attach digits limits
  serval fn detach digits limits && serval fn destroy limits

Exit codes: 0 done, 1 the server does not answer or refuses; the sentence says why.";

#[derive(Args, Debug)]
pub(super) struct At {
    /// Path of the server's control socket [default: that of the one server this user runs]
    #[arg(long, value_name = "PATH")]
    server: Option<PathBuf>,
}

/// What a function is.
#[derive(Args, Debug)]
struct Made {
    /// A parameter, such as high=100; may be repeated
    #[arg(long = "param", value_name = "NAME=VALUE", value_parser = param)]
    params: Vec<(String, Param)>,

    /// What becomes of messages while the function does not work [default: closed]
    #[arg(long, value_enum)]
    on_failure: Option<FailurePolicy>,

    /// How long a call for one batch may take, in microseconds [default: 50000]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=DEADLINE_US_MAX))]
    deadline_us: Option<u64>,

    /// Memory of each instance of a module, in MiB [default: 4]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=i64::from(MEMORY_MIB_MAX)))]
    memory_mib: Option<u32>,

    /// The dictionary of the tenant that a module uses: functions that name the same one share it [default: none]
    #[arg(long, value_name = "NAME")]
    dictionary: Option<String>,

    /// The size of that dictionary, in KiB [default: 64]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(i64::from(KIB_MIN)..=i64::from(KIB_MAX)))]
    dictionary_kib: Option<u32>,
}

#[derive(Args, Debug)]
pub(super) struct Create {
    /// Its name
    name: String,

    /// A built-in function, or the path of a WebAssembly module, which ends in .wasm
    function: String,

    #[command(flatten)]
    made: Made,

    #[command(flatten)]
    at: At,
}

#[derive(Args, Debug)]
pub(super) struct Attach {
    /// The service
    service: String,

    /// The function's name in the chain of the service
    name: String,

    /// A built-in function, the path of a WebAssembly module, which ends in .wasm, or the folder of a project, which is
    /// built [default: the function that was created with this name]
    function: Option<String>,

    #[command(flatten)]
    made: Made,

    /// Place in the chain, from 0 [default: that of the function it replaces, or the end]
    #[arg(long, value_name = "N")]
    place: Option<u32>,

    /// Place it before the function with this name
    #[arg(long, value_name = "NAME", conflicts_with = "place")]
    before: Option<String>,

    /// Place it behind the function with this name
    #[arg(long, value_name = "NAME", conflicts_with_all = ["place", "before"])]
    after: Option<String>,

    #[command(flatten)]
    at: At,
}

#[derive(Args, Debug)]
pub(super) struct Replace {
    /// The service
    service: String,

    /// The function's name in the chain of the service
    name: String,

    /// Other code: a built-in function, or the path of a module, whose file is read again [default: the code stays]
    function: Option<String>,

    #[command(flatten)]
    made: Made,

    #[command(flatten)]
    at: At,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum FailurePolicy {
    /// They pass
    Open,
    /// They are dropped as function_failed
    Closed,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(super) enum Action {
    /// Print all registers
    Read,
    /// Give registers that are no settings their first values
    Reset,
    /// Write a setting
    Set,
}

#[derive(Debug, Subcommand)]
pub(super) enum Verb {
    /// Make a project: a folder with a manifest, a source and test messages
    #[command(after_help = project::NEW_HELP)]
    New(project::New),

    /// Compile the module of a project, and check that it can be a function
    #[command(after_help = project::BUILD_HELP)]
    Build(project::Folder),

    /// Run a module on test messages, or on the datagrams of a pcap file, without a server
    #[command(after_help = project::TEST_HELP)]
    Test(Box<project::Test>),

    /// Measure the time that a module needs for a message, without a server
    #[command(after_help = project::BENCH_HELP)]
    Bench(Box<project::Bench>),

    /// Make a key that signs modules
    #[command(after_help = directory::KEYGEN_HELP)]
    Keygen(directory::Keygen),

    /// Sign a module: writes MODULE.sig
    #[command(after_help = directory::SIGN_HELP)]
    Sign(directory::Sign),

    /// Check the manifest and the signature of a module
    #[command(after_help = directory::VERIFY_HELP)]
    Verify(directory::Verify),

    /// Put a module into the directory of functions
    #[command(after_help = directory::INSTALL_HELP)]
    Install(directory::Install),

    /// List the functions of all services, or those of the directory of functions
    #[command(after_help = directory::LIST_HELP)]
    List(directory::List),

    /// Create a function, which is attached to nothing
    #[command(
        after_help = "It exists until destroy, and belongs to the user who creates it. Its id is printed.\n\nExamples:\n  serval fn create limits threshold --param high=100"
    )]
    Create(Box<Create>),

    /// Attach a function to a service, or replace the one with its name
    #[command(
        after_help = "With FUNCTION a function is made that ends when it is detached. Without it the function that was\ncreated with this name is attached.\n\nExamples:\n  serval fn attach digits limits threshold --param offset=0 --param high=100\n  serval fn attach digits limits"
    )]
    Attach(Box<Attach>),

    /// Give a function other code, other parameters or another policy
    #[command(
        after_help = "With --param these are all its parameters; others have their defaults. Parameters and --on-failure\nalone are written into its instances, which keep their registers. Other code, and the other options,\nmake new instances: registers and counters begin again, and settings that were set stay if the new\ncode has them.\n\nExamples:\n  serval fn replace digits limits --param high=100\n  serval fn replace digits mine ./mine.wasm"
    )]
    Replace(Box<Replace>),

    /// Detach a function from a service; one that was created stays
    #[command(after_help = "Examples:\n  serval fn detach digits limits")]
    Detach {
        /// The service
        service: String,
        /// The function's name
        name: String,
        #[command(flatten)]
        at: At,
    },

    /// Show what the next messages of a service meet: functions, verdicts, time
    #[command(
        after_help = "Requests and replies count. The contents of messages are not shown. A message that\nis shown to functions in a batch has the time of the call for the whole batch.\n\nExamples:\n  serval fn trace digits 10\n  serval fn trace digits 100 --seconds 5 --json"
    )]
    Trace {
        /// The service
        service: String,
        /// How many messages
        #[arg(default_value_t = 10, value_parser = clap::value_parser!(u32).range(1..=onpath::TRACED_MAX as i64))]
        count: u32,
        /// Wait at most this long for them
        #[arg(long, value_name = "N", default_value_t = 10, value_parser = clap::value_parser!(u64).range(0..=3600))]
        seconds: u64,
        #[command(flatten)]
        at: At,
    },

    /// Destroy a function that was created and is not attached
    #[command(
        after_help = "Examples:\n  serval fn destroy limits\n  serval fn destroy --id 1876543210987521"
    )]
    Destroy {
        /// The function's name
        #[arg(required_unless_present = "id", conflicts_with = "id")]
        name: Option<String>,
        /// Its id instead, which `list --json` shows
        #[arg(long, value_name = "N")]
        id: Option<u64>,
        #[command(flatten)]
        at: At,
    },

    /// Read, reset or set registers of a function, on all workers
    #[command(after_help = "Examples:\n  serval fn command digits limits set high=200")]
    Command {
        /// The service
        service: String,
        /// The function's name
        name: String,
        /// What to do
        #[arg(value_enum, default_value_t = Action::Read)]
        action: Action,
        /// With `set`: the setting and its value, such as high=100
        #[arg(value_parser = setting, required_if_eq("action", "set"))]
        setting: Option<(String, u64)>,
        #[command(flatten)]
        at: At,
    },

    /// Write the state of a function, such as a sketch, to a file: that of all workers, merged
    #[command(after_help = "Examples:\n  serval fn state digits visitors visitors.hll")]
    State {
        /// The service
        service: String,
        /// The function's name
        name: String,
        /// The file
        file: PathBuf,
        #[command(flatten)]
        at: At,
    },

    /// Run an unmodified server behind a proxy: the address at which the proxy listens is the server's own
    #[command(
        after_help = "CONFIG is the configuration of the engine, in which SERVICE has `upstream`. PROGRAM binds the\naddress at which the service listens, as always; in its place it gets that of `upstream`, and sees\nthe one that it asked for. So neither its configuration nor its clients change. It must be linked\ndynamically.\n\nExamples:\n  serval fn run dns serval.toml -- dnsmasq --no-daemon --port 5353"
    )]
    Run(Box<behind::Run>),

    /// Print what the functions have done: messages, verdicts, failures, time
    #[command(after_help = "Examples:\n  serval fn counters")]
    Counters(At),
}

fn setting(text: &str) -> Result<(String, u64), String> {
    let (name, value) = text.split_once('=').ok_or("must be SETTING=VALUE, such as high=100")?;
    let value = value.parse().map_err(|_| format!("{value:?} is no integer of at least 0"))?;
    Ok((name.to_owned(), value))
}

fn param(text: &str) -> Result<(String, Param), String> {
    let (name, value) = text.split_once('=').ok_or("must be NAME=VALUE, such as high=100")?;
    let integer = value.parse().map(Param::Integer);
    Ok((name.to_owned(), integer.unwrap_or_else(|_| Param::Text(value.to_owned()))))
}

pub(super) fn run(screen: &Screen, verb: &Verb) -> Result<(), Failure> {
    match verb {
        Verb::New(new) => new.run(screen)?,
        Verb::Build(folder) => folder.run(screen)?,
        Verb::Test(test) => test.run(screen)?,
        Verb::Bench(bench) => bench.run(screen)?,
        Verb::Keygen(keygen) => keygen.run(screen)?,
        Verb::Sign(sign) => sign.run(screen)?,
        Verb::Verify(verify) => verify.run(screen)?,
        Verb::Install(install) => install.run(screen)?,
        Verb::List(of) if of.installed => of.run(screen)?,
        Verb::List(of) => show(screen, &of.at.connect()?.list()?, list),
        Verb::Run(run) => return run.run(),
        Verb::Counters(at) => show(screen, &at.connect()?.list()?, counters),
        Verb::Create(create) => {
            let id = create
                .at
                .connect()?
                .create(&create.made.spec(&create.name, &create.function)?, false)?;
            let answer = json!({ "result": "created", "id": id });
            show(screen, &answer, |_, _| format!("{}: created, id {id}\n", create.name));
        }
        Verb::Attach(attach) => {
            let answer = attach.run()?;
            show(screen, &answer, |_, answer| result(answer, &attach.service, &attach.name));
        }
        Verb::Replace(replace) => {
            let note = replace.at.connect()?.replace(
                &named(&replace.service, &replace.name),
                &replace.made.replacement(replace.function.as_deref())?,
            )?;
            let answer = json!({ "result": "replaced", "note": note });
            show(screen, &answer, |_, answer| result(answer, &replace.service, &replace.name));
        }
        Verb::Detach { service, name, at } => {
            let note = at.connect()?.detach(&named(service, name))?;
            let answer = json!({ "result": "detached", "note": note });
            show(screen, &answer, |_, answer| result(answer, service, name));
        }
        Verb::Trace { service, count, seconds, at } => {
            let patience = Duration::from_secs(*seconds);
            let answer = at.connect()?.trace(service, *count, patience)?;
            show(screen, &answer, trace);
        }
        Verb::Destroy { name, id, at } => {
            let client = at.connect()?;
            let id = match (id, name) {
                (Some(id), _) => *id,
                (None, name) => created(&client, name.as_deref().unwrap_or_default())?,
            };
            client.destroy(id)?;
            show(screen, &json!({ "result": "destroyed" }), |_, _| "destroyed\n".to_owned());
        }
        Verb::State { service, name, file, at } => {
            let state = at.connect()?.state(&named(service, name))?;
            std::fs::write(file, &state).map_err(|error| {
                Failure::Run(format!("{} cannot be written: {error}", file.display()))
            })?;
            let shown = json!({ "result": "written", "bytes": state.len() });
            show(screen, &shown, |_, _| format!("{} bytes written\n", state.len()));
        }
        Verb::Command { service, name, action, setting, at } => {
            let action = match (action, setting) {
                (Action::Set, Some((register, value))) => {
                    RegisterAction::Write(register.clone(), *value)
                }
                (_, Some(_)) => {
                    return Err(Failure::Usage("a setting goes with `set` only".to_owned()));
                }
                (Action::Reset, _) => RegisterAction::Reset,
                _ => RegisterAction::Read,
            };
            let values = at.connect()?.command(&named(service, name), &action)?;
            let values: Map<String, Json> =
                values.into_iter().map(|(name, value)| (name, value.into())).collect();
            show(screen, &json!({ "result": "done", "registers": values }), registers);
        }
    }
    Ok(())
}

fn named(service: &str, name: &str) -> Target {
    Target::Named { service: service.to_owned(), name: name.to_owned() }
}

/// The id of the function that was created with this name.
fn created(client: &FunctionClient, name: &str) -> Result<u64, Failure> {
    let answer = client.list()?;
    let found = functions(&answer).iter().filter(|f| f["origin"] == "created" && f["name"] == name);
    let ids: Vec<u64> = found.filter_map(|function| function["id"].as_u64()).collect();
    match ids.as_slice() {
        [id] => Ok(*id),
        [] => Err(Failure::Run(format!(
            "no function {name:?} was created: `serval fn list` shows those that there are"
        ))),
        _ => Err(Failure::Run(format!(
            "several users have created a function {name:?}: name one by its id, which `serval fn list --json` shows"
        ))),
    }
}

impl At {
    pub(super) fn connect(&self) -> Result<FunctionClient, Failure> {
        let path = match &self.server {
            Some(path) => path.clone(),
            None => discovery::find_one(None)?,
        };
        Ok(FunctionClient::connect(&path)?)
    }
}

impl Attach {
    fn run(&self) -> Result<Json, Failure> {
        let place = match (self.place, &self.before, &self.after) {
            (Some(at), _, _) => Place::At(at as usize),
            (None, Some(name), _) => Place::Before(name.clone()),
            (None, None, Some(name)) => Place::After(name.clone()),
            (None, None, None) => Place::Default,
        };
        let client = self.at.connect()?;
        if let Some(function) = &self.function {
            let spec = self.made.spec(&self.name, function)?;
            let attached = client.attach_new(&self.service, &spec, &place)?;
            let result = if attached.replaced { "replaced" } else { "attached" };
            return Ok(json!({ "result": result, "id": attached.id }));
        }
        if self.made.is_given() {
            let why = "parameters and other options of a function go with FUNCTION, or with create";
            return Err(Failure::Usage(why.to_owned()));
        }
        let id = created(&client, &self.name)?;
        client.attach(id, &self.service, &place)?;
        Ok(json!({ "result": "attached", "id": id }))
    }
}

impl Made {
    fn is_given(&self) -> bool {
        let Self { params, on_failure, deadline_us, memory_mib, dictionary, dictionary_kib } = self;
        let given = [
            !params.is_empty(),
            on_failure.is_some(),
            deadline_us.is_some(),
            memory_mib.is_some(),
            dictionary.is_some(),
            dictionary_kib.is_some(),
        ];
        given.contains(&true)
    }

    fn spec(&self, name: &str, function: &str) -> Result<Spec, Failure> {
        let mut spec = Spec::new(name, function);
        spec.params.clone_from(&self.params);
        let file = file_param(&spec);
        if Path::new(function).is_dir() {
            let (module, _) = sdk::module_of(Path::new(function)).map_err(Failure::Run)?;
            spec.function = module.to_string_lossy().into_owned();
        }
        if spec.is_module() && spec.pin().is_none() {
            spec.function = absolute(&spec.function)?;
        }
        for (_, path) in spec.params.iter_mut().filter(|(name, _)| Some(&**name) == file) {
            if let Param::Text(path) = path {
                *path = absolute(path)?;
            }
        }
        spec.on_failure = self.on_failure.unwrap_or(FailurePolicy::Closed).into();
        spec.deadline_us = self.deadline_us.unwrap_or(DEADLINE_US);
        spec.memory_mib = self.memory_mib.unwrap_or(MEMORY_MIB);
        spec.dictionary.clone_from(&self.dictionary);
        spec.dictionary_kib = self.dictionary_kib.unwrap_or(DICTIONARY_KIB);
        Ok(spec)
    }

    fn replacement(&self, function: Option<&str>) -> Result<Replacement, Failure> {
        if function.is_none() && !self.is_given() {
            let why = "nothing is replaced: give FUNCTION, --param, --on-failure, --deadline-us, --memory-mib, --dictionary or \
                       --dictionary-kib";
            return Err(Failure::Usage(why.to_owned()));
        }
        // Without a function it is not known which parameter is a file.
        let spec = self.spec("", function.unwrap_or_default())?;
        Ok(Replacement {
            function: function.map(|_| spec.function),
            params: (!self.params.is_empty()).then_some(spec.params),
            on_failure: self.on_failure.map(OnFailure::from),
            deadline_us: self.deadline_us,
            memory_mib: self.memory_mib,
            dictionary: self.dictionary.clone(),
            dictionary_kib: self.dictionary_kib,
        })
    }
}

fn absolute(path: &str) -> Result<String, Failure> {
    let path = std::path::absolute(path).map_err(Failure::run)?;
    Ok(path.to_string_lossy().into_owned())
}

impl From<FailurePolicy> for OnFailure {
    fn from(policy: FailurePolicy) -> Self {
        match policy {
            FailurePolicy::Open => Self::Open,
            FailurePolicy::Closed => Self::Closed,
        }
    }
}

pub(super) fn show(screen: &Screen, answer: &Json, text: impl FnOnce(&Screen, &Json) -> String) {
    print(&if screen.json { format!("{answer}\n") } else { text(screen, answer) });
}

fn result(answer: &Json, service: &str, name: &str) -> String {
    let done = text(&answer["result"]);
    let note = answer["note"].as_str().map(|note| format!(" ({note})")).unwrap_or_default();
    format!("{name} of service {service}: {done}{note}\n")
}

fn functions(answer: &Json) -> &[Json] {
    answer["functions"].as_array().map_or(&[], Vec::as_slice)
}

fn text(value: &Json) -> String {
    value.as_str().unwrap_or_default().to_owned()
}

fn list(screen: &Screen, answer: &Json) -> String {
    let functions = functions(answer);
    if functions.is_empty() {
        return "no function is attached\n".to_owned();
    }
    let mut table = Table::new(&[
        "service",
        "name",
        "function",
        "made by",
        "on failure",
        ">deadline",
        ">failures",
    ]);
    for function in functions {
        let made = match function["origin"].as_str() {
            Some("created") => format!("create, user {}", function["user"]),
            Some("attached") => format!("attach, user {}", function["user"]),
            _ => "file".to_owned(),
        };
        table.row([
            function["service"].as_str().unwrap_or("(none)").to_owned(),
            text(&function["name"]),
            text(&function["function"]),
            made,
            text(&function["on_failure"]),
            format!("{} us", function["deadline_us"]),
            function["counters"]["failures"].to_string(),
        ]);
    }
    let mut out = table.render(screen);
    for function in functions.iter().filter(|f| f["last_failure"] != "") {
        let (service, name) = (text(&function["service"]), text(&function["name"]));
        let why = text(&function["last_failure"]);
        // A sentence of its own.
        let verb = if why.starts_with("suspended ") { "was" } else { "failed last because" };
        out.push_str(&format!("{name} of service {service} {verb} {why}\n"));
    }
    out
}

fn trace(screen: &Screen, answer: &Json) -> String {
    let messages = answer["messages"].as_array().map_or(&[][..], Vec::as_slice);
    if messages.is_empty() {
        return "no message came\n".to_owned();
    }
    let first_ns = messages[0]["at_ns"].as_u64().unwrap_or_default();
    let columns =
        [">us", "worker", "direction", ">bytes", "function", "verdict", ">batch", ">call"];
    let mut table = Table::new(&columns);
    for message in messages {
        let at_ns = message["at_ns"].as_u64().unwrap_or_default();
        let mut begin = [
            (at_ns.saturating_sub(first_ns) / 1000).to_string(),
            message["worker"].to_string(),
            text(&message["direction"]),
            message["bytes"].to_string(),
        ];
        for step in message["steps"].as_array().into_iter().flatten() {
            let argument = &step["argument"];
            let more = argument.as_str().map_or_else(|| argument.to_string(), str::to_owned);
            let verdict = match argument {
                Json::Null => text(&step["verdict"]),
                _ => format!("{} {more}", text(&step["verdict"])),
            };
            let took = format!("{} ns", step["took_ns"]);
            let [us, worker, direction, bytes] = std::mem::take(&mut begin);
            let (function, batch) = (text(&step["function"]), step["batch"].to_string());
            table.row([us, worker, direction, bytes, function, verdict, batch, took]);
        }
    }
    table.render(screen)
}

fn counters(screen: &Screen, answer: &Json) -> String {
    let attached = || functions(answer).iter().filter(|function| !function["service"].is_null());
    if attached().next().is_none() {
        return "no function is attached\n".to_owned();
    }
    let mut table = Table::new(&["service", "name", "counter", ">value"]);
    for function in attached() {
        let (service, name) = (text(&function["service"]), text(&function["name"]));
        let counters = function["counters"].as_object();
        for (counter, value) in counters.into_iter().flatten() {
            table.row([service.clone(), name.clone(), counter.clone(), value.to_string()]);
        }
    }
    table.render(screen)
}

fn registers(screen: &Screen, answer: &Json) -> String {
    let registers = answer["registers"].as_object();
    if registers.is_none_or(serde_json::Map::is_empty) {
        return "the function has no registers\n".to_owned();
    }
    let mut table = Table::new(&["register", ">value"]);
    for (name, value) in registers.into_iter().flatten() {
        table.row([name.clone(), value.to_string()]);
    }
    table.render(screen)
}
