//! What the integration tests share: the parts of the server and the clients, and `serval` in processes of its own.
#![allow(dead_code, unused_imports, reason = "each test binary uses a part")]

pub(crate) mod fake_gpu;
#[path = "../../../bench/tests/common/mod.rs"]
mod of_bench;
pub(crate) mod offers;
pub(crate) mod remote;
pub(crate) mod running;
pub(crate) mod runtimes;

use std::io::{BufRead, BufReader, Read};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{ChildStdout, Command, Stdio};

pub(crate) use of_bench::*;
use serde_json::Value as Json;
use wire::DropReason;

/// `serval serve --json` in a process of its own, ready for clients.
pub(crate) struct Served {
    pub(crate) process: Peer,
    /// By service: its addresses, in the order of the configuration; paths of shared memory left out.
    pub(crate) services: Vec<Vec<SocketAddr>>,
    pub(crate) metrics: SocketAddr,
    output: BufReader<ChildStdout>,
    log: PathBuf,
}

impl Served {
    /// `name` is unique among the tests; `config` comes behind the schema and the
    /// `[engine]` table with its metrics endpoint.
    pub(crate) fn start(name: &str, engine: &str, config: &str) -> Self {
        Self::start_with(name, engine, config, &[])
    }

    /// The same with environment variables added.
    pub(crate) fn start_with(
        name: &str,
        engine: &str,
        config: &str,
        environment: &[(&str, &Path)],
    ) -> Self {
        let mut command = Command::new(env!("CARGO_BIN_EXE_serval"));
        command.envs(environment.iter().copied());
        Self::start_by(command, name, engine, config)
    }

    /// The same by a command that `serve` and its arguments are added to.
    pub(crate) fn start_by(mut command: Command, name: &str, engine: &str, config: &str) -> Self {
        let file = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("{name}.toml"));
        let text = format!(
            "schema = 1\n[engine]\nmetrics = \"127.0.0.1:0\"\ncontrol = \"\"\n{engine}\n{config}"
        );
        std::fs::write(&file, text).unwrap();
        let log = file.with_extension("log");
        let errors = std::fs::File::create(&log).unwrap();
        command.args(["serve", "--json"]).arg(&file).stdout(Stdio::piped()).stderr(errors);
        let mut process = Peer::start(&mut command, "cargo builds it");
        let mut line = String::new();
        let mut output = BufReader::new(process.0.stdout.take().unwrap());
        output.read_line(&mut line).unwrap();
        let ready: Json = serde_json::from_str(&line).unwrap_or_else(|_| {
            panic!("not ready: {line:?}\n{}", std::fs::read_to_string(&log).unwrap_or_default())
        });
        let address = |url: &Json| {
            let authority = url.as_str()?.split_once("://")?.1;
            authority.split('/').next()?.parse().ok()
        };
        let listens = |service: &Json| {
            service["listen"].as_array().unwrap().iter().filter_map(address).collect()
        };
        let services = ready["services"].as_array().unwrap().iter().map(listens).collect();
        let metrics = address(&ready["metrics"]).expect("the configuration asks for it");
        Self { process, services, metrics, output, log }
    }

    /// What it has logged so far.
    pub(crate) fn log(&self) -> String {
        std::fs::read_to_string(&self.log).unwrap()
    }

    /// What the host kernel knows about the process.
    pub(crate) fn usage(&self) -> Usage {
        Usage::of(self.process.0.id())
    }

    /// The value of a metric as it stands on the page, such as
    /// `serval_requests_received_total{service="echo"}`.
    pub(crate) fn metric(&self, name: &str) -> u64 {
        let page = page(self.metrics);
        let value = page.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
        value.unwrap_or_else(|| panic!("no {name} in\n{page}")).parse().unwrap()
    }

    /// The drops of one reason, whatever labels there are besides.
    pub(crate) fn dropped(&self, service: &str, reason: DropReason) -> u64 {
        let (page, reason) = (page(self.metrics), reason.name());
        let of = |line: &&str| {
            line.contains("drop")
                && line.contains(&format!("service=\"{service}\""))
                && line.contains(&format!("reason=\"{reason}\""))
        };
        let line = page.lines().find(of).unwrap_or_else(|| panic!("no {reason} in\n{page}"));
        line.rsplit_once(' ').unwrap().1.parse().unwrap()
    }

    /// Asks the process to drain; its exit code.
    pub(crate) fn drain(self) -> i32 {
        self.finish().0
    }

    /// Asks the process to drain; its exit code and its last words.
    pub(crate) fn finish(mut self) -> (i32, Json) {
        self.process.signal("TERM");
        let mut code = None;
        eventually("the process ends", || {
            code = self.process.0.try_wait().unwrap();
            code.is_some()
        });
        let mut last = String::new();
        self.output.read_to_string(&mut last).unwrap();
        let last = serde_json::from_str(&last).unwrap_or_else(|e| panic!("{e}: {last:?}"));
        (code.unwrap().code().expect("an exit code, not a signal"), last)
    }
}
