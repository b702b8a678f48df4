//! `serval fn new`, `build`, `test` and `bench`: functions of one's own, without a server.

use std::fmt::Write as _;
use std::fs;
use std::path::PathBuf;
use std::time::Duration;

use builtins::builtin;
use clap::Args;
use onpath::spec::{DEADLINE_US_MAX, MEMORY_MIB, MEMORY_MIB_MAX};
use onpath::{Direction, MESSAGES_MAX, Param, Spec};
use serde_json::json;

use super::{Failure, param};
use crate::screen::{Screen, Table};
use crate::sdk::bench::{Measured, measure};
use crate::sdk::script::{self, Harness, Step, Verdict, quote};
use crate::sdk::{self, Language, Project, packets};

pub(super) const NEW_HELP: &str = "\
The folder's name is that of the function. The project answers `ping` and drops long requests:
change function.c (or .cpp, .rs), messages.txt and function.toml.

Examples:
  serval fn new mine
  serval fn new mine --language rust";

pub(super) const BUILD_HELP: &str = "\
The module is NAME.wasm in the folder, and contains the manifest. C and C++ need clang and wasm-ld
(apt install clang lld), Rust the library of wasm32-unknown-unknown; CLANG, CLANGXX and RUSTC name
other compilers.

Examples:
  serval fn build
  serval fn build mine";

pub(super) const TEST_HELP: &str = "\
A line of the test messages is a message with what becomes of it, or a command:

  request \"ping\"         reply \"pong\"
  request hex:00000009   drop             also: pass, rewrite BYTES, steer N, deliver
  reply \"hello\"          pass
  set high 5                              a setting
  read count 3                            a register, and its value
  reset
  batch                                   what follows is another batch

They run twice: in batches, and one by one. With --pcap the datagrams of a file are requests, with
--port those to that port, and those from it are replies; --write makes test messages of them.

Examples:
  serval fn test
  serval fn test mine.wasm --messages messages.txt --param high=5
  serval fn test mine.wasm --pcap traffic.pcap --port 9000 --write messages.txt

Exit codes: 0 as expected, 1 not as expected, or the function failed.";

pub(super) const BENCH_HELP: &str = "\
The messages are those of the project's messages.txt, of --messages, or different ones of one
length (--bytes). The time is that of a call divided by its messages, in the best tenth of the
measurement; the rate is that of one core, with the copy of the messages into their batch. Instead
of a module, the name of a built-in function without a file can be given, with --bytes.

Examples:
  serval fn bench
  serval fn bench mine.wasm --bytes 64 --batch 32 --native threshold
  serval fn bench threshold --bytes 64 --json";

#[derive(Args, Debug)]
pub(crate) struct New {
    /// The folder
    folder: PathBuf,

    /// The language of the source
    #[arg(long, value_enum, default_value_t = Language::C)]
    language: Language,
}

#[derive(Args, Debug)]
pub(crate) struct Folder {
    /// The folder of the project
    #[arg(default_value = ".")]
    folder: PathBuf,
}

/// A module for tests.
#[derive(Args, Debug)]
struct Module {
    /// A module, or the folder of a project, which is built
    #[arg(default_value = ".")]
    module: PathBuf,

    /// The test messages [default: messages.txt beside the module]
    #[arg(long, value_name = "FILE")]
    messages: Option<PathBuf>,

    /// A parameter, such as high=100; may be repeated
    #[arg(long = "param", value_name = "NAME=VALUE", value_parser = param)]
    params: Vec<(String, Param)>,

    /// Memory of the instance, in MiB
    #[arg(long, value_name = "N", default_value_t = MEMORY_MIB, value_parser = clap::value_parser!(u32).range(1..=i64::from(MEMORY_MIB_MAX)))]
    memory_mib: u32,
}

#[derive(Args, Debug)]
pub(crate) struct Test {
    #[command(flatten)]
    module: Module,

    /// Use the datagrams of a pcap file
    #[arg(long, value_name = "FILE", conflicts_with = "messages")]
    pcap: Option<PathBuf>,

    /// With --pcap: the port of the service
    #[arg(long, value_name = "N", requires = "pcap")]
    port: Option<u16>,

    /// With --pcap: write test messages with what became of them
    #[arg(long, value_name = "FILE", requires = "pcap")]
    write: Option<PathBuf>,
}

#[derive(Args, Debug)]
pub(crate) struct Bench {
    #[command(flatten)]
    module: Module,

    /// Messages of this length instead of test messages, in bytes
    #[arg(long, value_name = "N", conflicts_with = "messages", value_parser = clap::value_parser!(u64).range(0..=65_536))]
    bytes: Option<u64>,

    /// Messages of a call
    #[arg(long, value_name = "N", default_value_t = 32, value_parser = clap::value_parser!(u64).range(1..=MESSAGES_MAX as u64))]
    batch: u64,

    /// How long to measure, in milliseconds
    #[arg(long, value_name = "N", default_value_t = 1000, value_parser = clap::value_parser!(u64).range(10..=600_000))]
    milliseconds: u64,

    /// Measure this built-in function as well, with the same parameters
    #[arg(long, value_name = "NAME")]
    native: Option<String>,
}

impl New {
    pub(super) fn run(&self, screen: &Screen) -> Result<(), Failure> {
        let files = sdk::make(&self.folder, self.language).map_err(Failure::Run)?;
        let folder = self.folder.display().to_string();
        screen.show(
            || format!("{folder}: {}\nnext: cd {folder} && serval fn test\n", files.join(", ")),
            || json!({ "folder": folder, "files": files }),
        );
        Ok(())
    }
}

impl Folder {
    pub(super) fn run(&self, screen: &Screen) -> Result<(), Failure> {
        let project = Project::open(&self.folder).map_err(Failure::Run)?;
        let bytes = project.build().map_err(Failure::Run)?;
        let (module, version) = (project.module().display().to_string(), &project.manifest.version);
        let (len, state) = (bytes.len(), project.manifest.state.to_string());
        screen.show(
            || format!("{module}: version {version}, {len} bytes, state {state}\n"),
            || json!({ "module": module, "version": version, "bytes": len, "state": state }),
        );
        Ok(())
    }
}

impl Module {
    /// The function with its module.
    fn open(&self) -> Result<(Spec, Vec<u8>, PathBuf), Failure> {
        let (path, bytes) = sdk::module_of(&self.module).map_err(Failure::Run)?;
        let spec = self.spec(&path.to_string_lossy());
        if !spec.is_module() {
            let why = format!("{} is no module: its name ends in .wasm", path.display());
            return Err(Failure::Run(why));
        }
        let messages = self.messages(&path);
        Ok((spec, bytes, messages))
    }

    /// The function `function`, as the command line wants it.
    fn spec(&self, function: &str) -> Spec {
        let mut spec = Spec::new("test", function);
        spec.params.clone_from(&self.params);
        spec.memory_mib = self.memory_mib;
        // Tests are about what a function does; the machine may be busy.
        spec.deadline_us = DEADLINE_US_MAX;
        spec
    }

    /// The file of test messages of the module at `path`.
    fn messages(&self, path: &std::path::Path) -> PathBuf {
        self.messages.clone().unwrap_or_else(|| path.with_file_name(sdk::MESSAGES))
    }
}

fn read_script(path: &std::path::Path) -> Result<script::Script, Failure> {
    let text = fs::read_to_string(path)
        .map_err(|error| Failure::Run(format!("{} cannot be read: {error}", path.display())))?;
    script::parse(&text).map_err(|why| Failure::Run(format!("{}, {why}", path.display())))
}

impl Test {
    pub(super) fn run(&self, screen: &Screen) -> Result<(), Failure> {
        let (spec, bytes, messages) = self.module.open()?;
        if let Some(pcap) = &self.pcap {
            return self.run_packets(
                screen,
                pcap,
                Harness::new(&spec, &bytes).map_err(Failure::Run)?,
            );
        }
        let script = read_script(&messages)?;
        let count = script.iter().filter(|(_, step)| matches!(step, Step::Message(..))).count();
        let mut shown = String::new();
        let mut differences = Vec::new();
        for alone in [false, true] {
            let mut harness = Harness::new(&spec, &bytes).map_err(Failure::Run)?;
            let found = harness.run(&script, alone);
            let found =
                found.map_err(|why| Failure::Run(format!("{}, {why}", messages.display())))?;
            let how = if alone { "one by one" } else { "in batches" };
            for difference in &found {
                let script::Difference { line, expected, found } = difference;
                let _ = writeln!(shown, "line {line}, {how}: expected {expected}, found {found}");
                differences.push(
                    json!({ "line": line, "alone": alone, "expected": expected, "found": found }),
                );
            }
        }
        let failed = differences.len();
        if failed == 0 {
            let _ = writeln!(shown, "{count} messages, in batches and one by one: as expected");
        }
        screen.show(|| shown, || json!({ "messages": count, "differences": differences }));
        match failed {
            0 => Ok(()),
            _ => {
                Err(Failure::Unproven(format!("{failed} differences from {}", messages.display())))
            }
        }
    }

    fn run_packets(
        &self,
        screen: &Screen,
        pcap: &std::path::Path,
        mut harness: Harness,
    ) -> Result<(), Failure> {
        let wrong = |why: String| Failure::Run(format!("{}: {why}", pcap.display()));
        let len = fs::metadata(pcap).map_err(|error| wrong(error.to_string()))?.len();
        if len > packets::FILE_BYTES_MAX {
            let most = packets::FILE_BYTES_MAX >> 20;
            return Err(wrong(format!("it has more than {most} MiB: cut it with `editcap -c`")));
        }
        let file = fs::read(pcap).map_err(|error| wrong(error.to_string()))?;
        let (datagrams, mut others) = packets::datagrams(&file).map_err(wrong)?;
        let mut written = format!("# Made from the datagrams of {}.\n", pcap.display());
        let mut tally = std::collections::BTreeMap::<(&str, &str), u64>::new();
        for datagram in &datagrams {
            let direction = match self.port {
                Some(port) if datagram.to == port => Direction::Requests,
                Some(port) if datagram.from == port => Direction::Replies,
                Some(_) => {
                    others += 1;
                    continue;
                }
                None => Direction::Requests,
            };
            let verdicts = harness.decide(direction, &[datagram.payload]).map_err(wrong)?;
            let verdict = verdicts.into_iter().next().unwrap_or(Verdict::Pass);
            let way = if direction == Direction::Requests { "request" } else { "reply" };
            let text = verdict.text();
            let _ = writeln!(written, "{way} {} {text}", quote(datagram.payload));
            let name = match verdict {
                Verdict::Pass => "pass",
                Verdict::Drop => "drop",
                Verdict::Reply(_) => "reply",
                Verdict::Rewrite(_) => "rewrite",
                Verdict::Steer(_) => "steer",
                Verdict::Deliver => "deliver",
            };
            *tally.entry((way, name)).or_default() += 1;
        }
        if let Some(path) = &self.write {
            fs::write(path, written).map_err(|error| {
                Failure::Run(format!("{} cannot be written: {error}", path.display()))
            })?;
        }
        let rows: Vec<_> = tally.iter().map(|((way, name), count)| json!({ "direction": way, "verdict": name, "messages": count })).collect();
        screen.show(
            || {
                let mut table = Table::new(&["direction", "verdict", ">messages"]);
                for ((way, name), count) in &tally {
                    table.row([(*way).to_owned(), (*name).to_owned(), count.to_string()]);
                }
                format!("{}{others} other packets\n", table.render(screen))
            },
            || json!({ "verdicts": rows, "others": others }),
        );
        Ok(())
    }
}

impl Bench {
    pub(super) fn run(&self, screen: &Screen) -> Result<(), Failure> {
        let is_native = self.module.module.to_str().is_some_and(is_measurable);
        let (spec, bytes, path) = if is_native && !self.module.module.exists() {
            let name = self.module.module.to_string_lossy();
            (self.module.spec(&name), Vec::new(), self.module.messages(&self.module.module))
        } else {
            self.module.open()?
        };
        let messages = match self.bytes {
            Some(bytes) => different(bytes as usize),
            None => requests(read_script(&path)?),
        };
        if messages.is_empty() {
            let why = format!("{} has no request: write one, or use --bytes", path.display());
            return Err(Failure::Run(why));
        }
        let patience = Duration::from_millis(self.milliseconds);
        let run = |spec: &Spec, bytes: &[u8]| {
            measure(spec, bytes, &messages, self.batch as usize, patience).map_err(Failure::Run)
        };
        let mut rows = vec![(spec.function.clone(), run(&spec, &bytes)?)];
        if let Some(native) = &self.native {
            if !is_measurable(native) {
                let why = format!("there is no built-in function {native:?} without a file");
                return Err(Failure::Usage(why));
            }
            let native = Spec { function: native.clone(), ..spec.clone() };
            rows.push((native.function.clone(), run(&native, &[])?));
        }
        screen.show(
            || table(screen, &rows),
            || {
                let functions = rows.iter().map(row).collect::<Vec<_>>();
                // The figures of the first one, for `serval compare`.
                let Measured { ns, path_ns, failures, .. } = &rows[0].1;
                json!({
                    "batch": self.batch, "ns": ns, "path_ns": path_ns, "rate": 1e9 / path_ns,
                    "failures": failures, "functions": functions,
                })
            },
        );
        Ok(())
    }
}

/// Whether it is a built-in function that needs no file.
fn is_measurable(name: &str) -> bool {
    builtin(name).is_some_and(|found| found.file.is_none())
}

/// Messages of one length, each with other bytes.
fn different(bytes: usize) -> Vec<Vec<u8>> {
    let mut word = 1_u64;
    let mut next = || {
        word = word.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(1);
        (word >> 56) as u8
    };
    (0..MESSAGES_MAX).map(|_| (0..bytes).map(|_| next()).collect()).collect()
}

/// The requests of test messages.
fn requests(script: script::Script) -> Vec<Vec<u8>> {
    let of = |(_, step)| match step {
        Step::Message(Direction::Requests, bytes, _) => Some(bytes),
        _ => None,
    };
    script.into_iter().filter_map(of).collect()
}

fn row((function, measured): &(String, Measured)) -> serde_json::Value {
    let Measured { messages, ns, path_ns, failures, last_failure } = measured;
    json!({ "function": function, "messages": messages, "ns": ns, "path_ns": path_ns, "failures": failures, "last_failure": last_failure })
}

fn table(screen: &Screen, rows: &[(String, Measured)]) -> String {
    let mut table = Table::new(&[
        "function",
        ">ns a message",
        ">with its copy",
        ">M/s",
        ">messages",
        ">failures",
    ]);
    for (function, measured) in rows {
        table.row([
            function.clone(),
            format!("{:.1}", measured.ns),
            format!("{:.1}", measured.path_ns),
            format!("{:.2}", 1e3 / measured.path_ns),
            measured.messages.to_string(),
            measured.failures.to_string(),
        ]);
    }
    let mut text = table.render(screen);
    if let [(_, module), (_, native)] = rows {
        let _ = writeln!(
            text,
            "the module needs {:.2} times the time of the built-in function",
            module.ns / native.ns
        );
    }
    for (function, measured) in rows.iter().filter(|(_, measured)| measured.failures > 0) {
        let _ = writeln!(text, "{function} failed last because {}", measured.last_failure);
    }
    text
}
