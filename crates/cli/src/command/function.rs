//! `serval fn`: functions on the path of a running server's messages.

use std::os::fd::AsFd as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use clap::{Args, Subcommand, ValueEnum};
use onpath::library::{DEADLINE_US, DEADLINE_US_MAX, MEMORY_MIB, MEMORY_MIB_MAX};
use onpath::{OnFailure, Param, Spec};
use serde_json::Value as Json;
use server::control::discovery;
use server::control::protocol::{
    ANSWER_BYTES_MAX, FunctionRequest, RegisterAction, Request, read_answer,
};
use sys::local::wait_readable;

use super::Failure;
use crate::screen::{Screen, Table, print};

pub(super) const HELP: &str = "\
A function sees the requests of a service before they go to the accelerator, and the replies before
they go to clients. It is part of the program (passthrough, threshold) or a WebAssembly module.
Attaching a function under the name of one that is attached replaces it; no message is lost.
Without --server the one server that this user runs is asked through its control socket.

Examples:
  serval fn list
  serval fn attach digits limits threshold --param offset=0 --param high=100
  serval fn attach digits limits ./mine.wasm --on-failure open
  serval fn command digits limits read
  serval fn command digits limits set high=200
  serval fn counters
  serval fn detach digits limits

Exit codes: 0 done, 1 the server does not answer or refuses; the sentence says why.";

/// How long an answer may take: a module is compiled, and a worker may be inside a kernel.
const PATIENCE: Duration = Duration::from_secs(90);

#[derive(Args, Debug)]
pub(super) struct At {
    /// Path of the server's control socket [default: that of the one server this user runs]
    #[arg(long, value_name = "PATH")]
    server: Option<PathBuf>,
}

#[derive(Args, Debug)]
pub(super) struct Attach {
    /// The service
    service: String,

    /// The function's name in the chain of the service
    name: String,

    /// A built-in function, or the path of a WebAssembly module, which ends in .wasm
    function: String,

    /// A parameter, such as high=100; may be repeated
    #[arg(long = "param", value_name = "NAME=VALUE", value_parser = param)]
    params: Vec<(String, Param)>,

    /// What becomes of messages while the function does not work
    #[arg(long, value_enum, default_value_t = FailurePolicy::Closed)]
    on_failure: FailurePolicy,

    /// How long a call for one batch may take, in microseconds
    #[arg(long, value_name = "N", default_value_t = DEADLINE_US, value_parser = clap::value_parser!(u64).range(1..=DEADLINE_US_MAX))]
    deadline_us: u64,

    /// Memory of each instance of a module, in MiB
    #[arg(long, value_name = "N", default_value_t = MEMORY_MIB, value_parser = clap::value_parser!(u32).range(1..=i64::from(MEMORY_MIB_MAX)))]
    memory_mib: u32,

    /// Place in the chain, from 0 [default: that of the function it replaces, or the end]
    #[arg(long, value_name = "N")]
    place: Option<usize>,

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
    /// List the functions of all services
    #[command(after_help = "Examples:\n  serval fn list")]
    List(At),

    /// Attach a function to a service, or replace the one with its name
    #[command(
        after_help = "Examples:\n  serval fn attach digits limits threshold --param offset=0 --param high=100"
    )]
    Attach(Box<Attach>),

    /// Detach a function from a service
    #[command(after_help = "Examples:\n  serval fn detach digits limits")]
    Detach {
        /// The service
        service: String,
        /// The function's name
        name: String,
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
        Verb::List(at) => {
            show(screen, &ask(at, FunctionRequest::List)?, list);
        }
        Verb::Counters(at) => {
            show(screen, &ask(at, FunctionRequest::List)?, counters);
        }
        Verb::Attach(attach) => {
            let spec = spec(attach)?;
            let (service, place) = (attach.service.clone(), attach.place);
            let answer = ask(&attach.at, FunctionRequest::Attach { service, spec, place })?;
            show(screen, &answer, |_, answer| result(answer, &attach.service, &attach.name));
        }
        Verb::Detach { service, name, at } => {
            let request = FunctionRequest::Detach { service: service.clone(), name: name.clone() };
            let answer = ask(at, request)?;
            show(screen, &answer, |_, answer| result(answer, service, name));
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
            let (service, name) = (service.clone(), name.clone());
            let answer = ask(at, FunctionRequest::Registers { service, name, action })?;
            show(screen, &answer, registers);
        }
    }
    Ok(())
}

fn spec(attach: &Attach) -> Result<Spec, Failure> {
    let mut spec = Spec::new(&attach.name, &attach.function);
    if spec.is_module() {
        let path = std::path::absolute(&attach.function).map_err(Failure::run)?;
        spec.function = path.to_string_lossy().into_owned();
    }
    spec.params.clone_from(&attach.params);
    let file = spec.file_param();
    for (_, path) in spec.params.iter_mut().filter(|(name, _)| Some(&**name) == file) {
        if let Param::Text(path) = path {
            let whole = std::path::absolute(&*path).map_err(Failure::run)?;
            *path = whole.to_string_lossy().into_owned();
        }
    }
    spec.on_failure = match attach.on_failure {
        FailurePolicy::Open => OnFailure::Open,
        FailurePolicy::Closed => OnFailure::Closed,
    };
    (spec.deadline_us, spec.memory_mib) = (attach.deadline_us, attach.memory_mib);
    Ok(spec)
}

/// Sends a request and waits for its answer.
fn ask(at: &At, request: FunctionRequest) -> Result<Json, Failure> {
    let path = match &at.server {
        Some(path) => path.clone(),
        None => discovery::find_one(None)?,
    };
    let answer = answer_of(&path, request)?;
    match answer["error"].as_str() {
        Some(why) => Err(Failure::Run(why.to_owned())),
        None => Ok(answer),
    }
}

fn answer_of(path: &Path, request: FunctionRequest) -> Result<Json, Failure> {
    let shown = path.display();
    let failed = |error| Failure::Run(format!("no server answers at {shown}: {error}"));
    let deadline = Instant::now() + PATIENCE;
    let socket = discovery::connect(path, deadline).map_err(failed)?;
    let line = Request::Functions(request).line();
    socket.send(line.as_bytes(), &[]).map_err(failed)?;
    let mut bytes = vec![0; ANSWER_BYTES_MAX];
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        wait_readable(&[socket.as_fd()], Some(left));
        match socket.receive(&mut bytes).map_err(failed)? {
            None if left.is_zero() => {
                return Err(Failure::Run(format!("the server at {shown} does not answer")));
            }
            None => {}
            Some(0) => return Err(Failure::Run(format!("the server at {shown} ended"))),
            Some(len) => return read_answer(&bytes[..len]).map_err(Failure::Run),
        }
    }
}

fn show(screen: &Screen, answer: &Json, text: impl FnOnce(&Screen, &Json) -> String) {
    print(&if screen.json { format!("{answer}\n") } else { text(screen, answer) });
}

fn result(answer: &Json, service: &str, name: &str) -> String {
    let done = answer["result"].as_str().unwrap_or_default();
    format!("{name} of service {service}: {done}\n")
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
    let mut table =
        Table::new(&["service", "name", "function", "on failure", ">deadline", ">failures"]);
    for function in functions {
        table.row([
            text(&function["service"]),
            text(&function["name"]),
            text(&function["function"]),
            text(&function["on_failure"]),
            format!("{} us", function["deadline_us"]),
            function["counters"]["failures"].to_string(),
        ]);
    }
    let mut out = table.render(screen);
    for function in functions.iter().filter(|f| f["last_failure"] != "") {
        let (service, name) = (text(&function["service"]), text(&function["name"]));
        let why = text(&function["last_failure"]);
        out.push_str(&format!("{name} of service {service} failed last because {why}\n"));
    }
    out
}

fn counters(screen: &Screen, answer: &Json) -> String {
    let functions = functions(answer);
    if functions.is_empty() {
        return "no function is attached\n".to_owned();
    }
    let mut table = Table::new(&["service", "name", "counter", ">value"]);
    for function in functions {
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
