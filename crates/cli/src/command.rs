//! The `serval` command: arguments, exit codes, and one module for each verb.

mod allreduce;
mod ask;
mod attach;
mod bench;
mod bytes;
mod check;
mod compare;
mod demo;
mod doctor;
mod function;
mod kernel;
mod pages;
mod reload;
mod serve;
mod tables;
mod tenant;
mod top;
mod transfer;

use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use clap::{Args, Parser, Subcommand, ValueEnum};
use serde_json::json;
use sys::signal::{Signal, Signals};
use tracing_subscriber::filter::LevelFilter;

use crate::screen::{Screen, colours_wanted, print};
/// Records name the sources of the program that measured.
pub use ::bench::compare::machine::set_built_from;
use runtime::kernel_file::set_trial_program;
use server::config::ConfigError;
use server::control::{ConfigSource, ControlError};
use server::log;
use server::machine::MachineError;

const EXAMPLES: &str = "\
Examples:
  serval demo                          see it work: a digit reader over UDP and TCP
  serval check-config service.toml     check a configuration and show its values
  serval serve service.toml            run a server until SIGTERM or Ctrl-C
  serval ask udp://127.0.0.1:9000 hi   send one message, print the reply
  serval bench udp://127.0.0.1:9000    measure a server and check every reply
  serval doctor service.toml           what this machine supports, and how a service would run
  serval top                           watch a running server
  serval fn list                       list functions on the path of messages
  serval kernel build mine.cpp         compile your own kernel
  serval attach /run/serval/acc0       run a service's kernels in this process

Exit codes:
  0  success
  1  something failed while running
  2  the configuration or the command line is wrong
  3  requests were left unanswered when the service ended, or a kernel hung

Everything takes --json. Colours appear on terminals only; NO_COLOR turns them off.";

/// How long a server waits at its end until its last log lines are written.
const LOG_TIMEOUT: Duration = Duration::from_millis(500);

/// A software SmartNIC for accelerators: kernels on a GPU or on host cores become network services.
#[derive(Debug, Parser)]
#[command(name = "serval", version, after_help = EXAMPLES, arg_required_else_help = true)]
pub struct Arguments {
    /// Write JSON instead of text to standard output
    #[arg(long, global = true)]
    json: bool,

    /// What to log to standard error
    #[arg(long, global = true, value_name = "LEVEL", env = "SERVAL_LOG", ignore_case = true)]
    log: Option<LogLevel>,

    #[command(subcommand)]
    verb: Verb,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum LogLevel {
    Off,
    Error,
    Warn,
    Info,
    Debug,
    Trace,
}

#[derive(Debug, Subcommand)]
enum Verb {
    /// Run the services of a configuration file
    #[command(after_help = serve::HELP)]
    Serve(serve::Options),

    /// Attach to a running engine and run a service's kernels in this process
    #[command(after_help = attach::HELP)]
    Attach(attach::Options),

    /// Show Serval at work on this machine, in less than a minute
    #[command(after_help = demo::HELP)]
    Demo(demo::Options),

    /// Send one message to a server and print the reply
    #[command(after_help = ask::HELP)]
    Ask(Box<ask::Options>),

    /// Measure the request rate and the latency of a server
    #[command(after_help = bench::HELP)]
    Bench(Box<bench::Options>),

    /// Measure two servers side by side, or every row of a suite
    #[command(after_help = compare::HELP)]
    Compare(Box<compare::Options>),

    /// Check a configuration file and show its effective values
    #[command(name = "check-config", after_help = check::HELP)]
    CheckConfig(File),

    /// Make a running server read its configuration again
    #[command(after_help = reload::HELP)]
    Reload(reload::Options),

    /// Show what this machine supports, and how to improve it
    #[command(after_help = doctor::HELP)]
    Doctor(doctor::Options),

    /// Watch a running server
    #[command(after_help = top::HELP)]
    Top(top::Options),

    /// Move bytes between files and sockets, with digests, encryption, compression and search on the way
    #[command(after_help = transfer::HELP)]
    Transfer(transfer::Options),

    /// Sum vectors over ranks on one or several machines, measure and check it
    #[command(after_help = allreduce::HELP)]
    Allreduce(allreduce::Options),

    /// Compile kernels and list the available ones
    #[command(subcommand, arg_required_else_help = true, after_help = kernel::HELP)]
    Kernel(kernel::Verb),

    /// Attach functions to the path of a running server's messages
    #[command(name = "fn", subcommand, arg_required_else_help = true, after_help = function::HELP)]
    Function(function::Verb),

    /// Show and change the tenants of a running server
    #[command(subcommand, arg_required_else_help = true, after_help = tenant::HELP)]
    Tenant(tenant::Verb),

    /// Explain every reason for which a message can be dropped
    #[command(name = "drop-reasons", after_help = tables::DROP_REASONS_HELP)]
    DropReasons,

    /// Make the system calls of a user's transfers, for the engine that started this process
    #[command(name = "transfer-calls", hide = true)]
    TransferCalls,

    /// Write the manual's pages
    #[command(after_help = pages::MAN_HELP)]
    Man(pages::ManOptions),

    /// Print a completion script for a shell
    #[command(after_help = pages::COMPLETIONS_HELP)]
    Completions(pages::CompletionsOptions),

    /// Show the version
    #[command(after_help = tables::VERSION_HELP)]
    Version,
}

impl Verb {
    /// Whether it runs for long, with its log monitored.
    fn is_monitored(&self) -> bool {
        match self {
            Self::Serve(_) => true,
            Self::Attach(options) => options.is_monitored(),
            _ => false,
        }
    }

    /// Time limit for writing its last log lines: a server has to end in time, even if its log is not read.
    fn log_patience(&self) -> Duration {
        match self {
            Self::Serve(_) | Self::Attach(_) => LOG_TIMEOUT,
            _ => Duration::from_secs(60),
        }
    }
}

/// A configuration file and its overrides.
#[derive(Args, Clone, Debug)]
struct File {
    /// The configuration file (TOML)
    #[arg(value_name = "FILE")]
    path: PathBuf,

    #[command(flatten)]
    overrides: Sets,
}

#[derive(Args, Clone, Debug)]
struct Sets {
    /// Set one key, such as engine.workers=2 or service.NAME.slots=128; may be repeated
    #[arg(long = "set", value_name = "KEY=VALUE")]
    sets: Vec<String>,
}

impl File {
    fn source(&self) -> ConfigSource {
        ConfigSource { path: self.path.clone(), sets: self.overrides.sets.clone() }
    }
}

/// Why a verb failed.
enum Failure {
    /// The configuration is invalid.
    Config(ConfigError),
    /// The command line is invalid.
    Usage(String),
    /// A failure; one sentence.
    Run(String),
    /// A running server refused a change; the reason in its words.
    Refused(String),
    /// A claim was not proven; the result has been shown, one sentence about it.
    Unproven(String),
    /// The service ended with unanswered requests or a hung kernel, which has been reported.
    Unfinished,
}

impl From<ConfigError> for Failure {
    fn from(error: ConfigError) -> Self {
        Self::Config(error)
    }
}

impl From<MachineError> for Failure {
    fn from(error: MachineError) -> Self {
        Self::Usage(error.to_string())
    }
}

impl From<ControlError> for Failure {
    fn from(error: ControlError) -> Self {
        match error {
            ControlError::Config(error) => Self::Config(error),
            ControlError::Machine(error) => error.into(),
            ControlError::Ambiguous(text) => Self::Usage(text),
            ControlError::Failed(text) => Self::Run(text),
        }
    }
}

impl Failure {
    fn run(error: impl std::fmt::Display) -> Self {
        Self::Run(error.to_string())
    }

    fn code(&self) -> u8 {
        match self {
            Self::Run(_) | Self::Unproven(_) => 1,
            Self::Config(_) | Self::Usage(_) | Self::Refused(_) => 2,
            Self::Unfinished => 3,
        }
    }

    fn report(&self, screen: &Screen) {
        use std::io::IsTerminal as _;
        let (text, value) = match self {
            Self::Config(error) => {
                let colour = std::io::stderr().is_terminal() && colours_wanted();
                (error.render(colour), error.json())
            }
            Self::Usage(message) | Self::Run(message) => {
                (format!("error: {message}"), json!({ "error": message }))
            }
            Self::Unproven(message) | Self::Refused(message) => {
                log::say(message);
                return;
            }
            Self::Unfinished => return,
        };
        if screen.json {
            print(&format!("{value}\n"));
        }
        log::say(&text);
    }
}

/// Runs the command of this process.
pub fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let screen = Screen::new(arguments.json);
    sys::signal::ignore_file_size_signal();
    if matches!(arguments.verb, Verb::TransferCalls) {
        // Its engine sees why it ends by the end of the connection.
        return ExitCode::from(u8::from(transfer_calls().is_err()));
    }
    // Before the log starts a thread.
    let entered = match &arguments.verb {
        Verb::Attach(options) => options.enter_namespaces(),
        _ => Ok(()),
    };
    start_log(arguments.log, arguments.verb.is_monitored());
    // This link starts the running program even if its file has been replaced.
    set_trial_program("/proc/self/exe".into());
    let result = entered.and_then(|()| run(&screen, &arguments.verb));
    let code = match &result {
        Ok(()) => 0,
        Err(failure) => {
            failure.report(&screen);
            failure.code()
        }
    };
    log::flush(arguments.verb.log_patience());
    if matches!(result, Err(Failure::Unfinished)) {
        // A thread may still be inside a kernel, so destructors of its library must not run at the end.
        sys::process::exit_now(code.into());
    }
    ExitCode::from(code)
}

fn transfer_calls() -> std::io::Result<()> {
    ::transfer::serve_user()
}

fn run(screen: &Screen, verb: &Verb) -> Result<(), Failure> {
    match verb {
        Verb::Serve(options) => serve::run(screen, options),
        Verb::Attach(options) => attach::run(options),
        Verb::Demo(options) => demo::run(screen, options),
        Verb::Compare(options) => compare::run(screen, options),
        Verb::Ask(options) => ask::run(screen, options),
        Verb::Bench(options) => bench::run(screen, options),
        Verb::CheckConfig(file) => check::run(screen, file),
        Verb::Reload(options) => reload::run(screen, options),
        Verb::Doctor(options) => doctor::run(screen, options),
        Verb::Top(options) => top::run(screen, options),
        Verb::Transfer(options) => transfer::run(screen, options),
        Verb::Allreduce(options) => allreduce::run(screen, options),
        Verb::Kernel(verb) => kernel::run(screen, verb),
        Verb::Function(verb) => function::run(screen, verb),
        Verb::Tenant(verb) => tenant::run(screen, verb),
        Verb::DropReasons => {
            tables::drop_reasons(screen);
            Ok(())
        }
        Verb::Man(options) => pages::man(screen, options),
        Verb::Completions(options) => {
            pages::completions(options);
            Ok(())
        }
        Verb::TransferCalls => unreachable!("it has ended"),
        Verb::Version => {
            tables::version(screen);
            Ok(())
        }
    }
}

/// The first signal ends a verb in order, so that everything it started is stopped too.
fn cancel_on_signal(cancel: Arc<AtomicBool>) -> std::io::Result<()> {
    let mut signals = Signals::install()?;
    std::thread::Builder::new().name("serval-signals".into()).spawn(move || {
        while let Ok(signal) = signals.wait(None) {
            if matches!(signal, Some(Signal::Terminate | Signal::Interrupt)) {
                cancel.store(true, Ordering::Relaxed);
            }
        }
    })?;
    Ok(())
}

fn start_log(level: Option<LogLevel>, serves: bool) {
    use std::io::IsTerminal as _;
    let filter = match level {
        Some(LogLevel::Off) => LevelFilter::OFF,
        Some(LogLevel::Error) => LevelFilter::ERROR,
        Some(LogLevel::Warn) => LevelFilter::WARN,
        Some(LogLevel::Info) => LevelFilter::INFO,
        Some(LogLevel::Debug) => LevelFilter::DEBUG,
        Some(LogLevel::Trace) => LevelFilter::TRACE,
        None if serves => LevelFilter::INFO,
        None => LevelFilter::WARN,
    };
    let colour = std::io::stderr().is_terminal() && colours_wanted();
    log::start();
    tracing_subscriber::fmt()
        .with_writer(log::writer)
        // The library would report a failed write to standard error itself, and block there.
        .log_internal_errors(false)
        .with_max_level(filter)
        .with_ansi(colour)
        .with_target(false)
        .init();
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory as _;

    #[test]
    fn the_arguments_are_consistent() {
        Arguments::command().debug_assert();
    }

    /// A command and all its subcommands.
    fn all(command: &clap::Command) -> Vec<clap::Command> {
        let below = command.get_subcommands().flat_map(all);
        std::iter::once(command.clone()).chain(below).collect()
    }

    #[test]
    fn no_line_of_a_help_text_is_wrapped_again() {
        for command in all(&Arguments::command()) {
            let name = command.get_name().to_owned();
            let written = command.get_after_help().map(ToString::to_string).unwrap_or_default();
            let shown = command.term_width(100).render_long_help().to_string();
            // Line ends are not visible in the output.
            let lines = |text: &str| text.lines().map(str::trim_end).collect::<Vec<_>>().join("\n");
            let whole = lines(&shown).contains(&lines(&written));
            assert!(whole, "{name}: {shown}");
        }
    }

    #[test]
    fn every_verb_has_an_example() {
        let is_shown = |command: &clap::Command| !command.is_hide_set();
        for command in all(&Arguments::command()).into_iter().filter(is_shown) {
            let written = command.get_after_help().map(ToString::to_string).unwrap_or_default();
            assert!(written.contains("Examples:\n  serval "), "{}", command.get_name());
        }
    }

    #[test]
    fn every_verb_has_a_description() {
        for verb in Arguments::command().get_subcommands() {
            let about = verb.get_about().map(ToString::to_string).unwrap_or_default();
            assert!(about.len() > 10, "{} has no text", verb.get_name());
        }
    }
}
