//! `serval allreduce`.

use std::fs;
use std::io;
use std::net::{SocketAddr, TcpListener, ToSocketAddrs as _};
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::fs::DirBuilderExt as _;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use bench::units::span;
use clap::{Args, ValueEnum};
use collective::{CollectiveError, Element, Group, Member, RANKS_MAX};
use serde_json::{Value as Json, json};
use server::config::bytes_for_people;

use super::Failure;
use super::bench::time;
use crate::allreduce::{self, Array, Outcome, Plan};
use crate::screen::{Screen, Table};

pub(super) const HELP: &str = "\
An all-reduce replaces the data of every rank by the sum over all ranks. Without --rank the command
starts all ranks on this machine. With --rank it is one rank, and you start the others: over TCP,
also on other machines, --group has the address of each rank in order and is the same everywhere;
over shared memory --folder is an existing folder that is the same for all. Every result is
checked, and all ranks must get the same bits.

Examples:
  serval allreduce                                two processes, 1 MiB of float32 each
  serval allreduce --transport shm --bytes 64     latency of a short call over shared memory
  serval allreduce --ranks 8 --bytes 16MiB --type int32 --json
  serval allreduce --memory cuda --bytes 64MiB    data in the memory of GPUs
  serval allreduce --rank 0 --group host0:7000,host1:7000    on host0
  serval allreduce --rank 1 --group host0:7000,host1:7000    on host1
  serval allreduce --rank 0 --ranks 2 --folder /run/user/1000/sum    and rank 1 in the same way

Exit codes: 0 all results were right, 1 a result was wrong or a rank was lost, 2 the command line
is wrong.";

/// The longest data of a rank.
const BYTES_MAX: usize = 1 << 30;

#[derive(Args, Debug)]
pub(super) struct Options {
    /// Number of ranks
    #[arg(long, value_name = "N", default_value_t = 2, conflicts_with = "group", value_parser = ranks)]
    ranks: usize,

    /// How the ranks are connected, if this command starts all of them
    #[arg(long, value_name = "KIND", value_enum, default_value_t = Kind::Tcp, conflicts_with = "rank")]
    transport: Kind,

    /// Be this rank, from 0, and let others start the other ones
    #[arg(long, value_name = "R", requires = "place")]
    rank: Option<usize>,

    /// The addresses of all ranks, separated by commas
    #[arg(
        long,
        value_name = "HOST:PORT,...",
        requires = "rank",
        value_delimiter = ',',
        group = "place"
    )]
    group: Vec<String>,

    /// The folder in which the ranks find each other, for shared memory
    #[arg(long, value_name = "FOLDER", requires = "rank", group = "place")]
    folder: Option<PathBuf>,

    /// The name of the group, the same on all ranks
    #[arg(long, value_name = "NAME", default_value = "allreduce")]
    name: String,

    /// Bytes of each rank's data, with KiB or MiB for larger ones
    #[arg(long, value_name = "SIZE", default_value = "1MiB", value_parser = bytes)]
    bytes: usize,

    /// Where each rank's data is, the same on all ranks
    #[arg(long, value_name = "MEMORY", value_enum, default_value_t = Memory::Host)]
    memory: Memory,

    /// The number of the GPU of each rank that this command starts or is; by default rank R has GPU R, modulo their number
    #[arg(long, value_name = "N")]
    gpu: Option<u32>,

    /// The type of the elements
    #[arg(long = "type", value_name = "TYPE", value_enum, default_value_t = Type::Float32)]
    element: Type,

    /// Calls to measure
    #[arg(long, value_name = "N", default_value_t = 100, value_parser = clap::value_parser!(u32).range(1..=10_000_000))]
    rounds: u32,

    /// How long the ranks may take to find each other, and each call
    #[arg(long, value_name = "TIME", default_value = "10s", value_parser = time)]
    limit: Duration,

    /// The rank's listening socket is standard input
    #[arg(long, hide = true, requires = "group")]
    inherited: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Type {
    Float32,
    Int32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Memory {
    /// Host memory
    Host,
    /// The memory of a GPU. Copy engines move pieces of it to host memory and back; no code runs on the GPU
    Cuda,
}

impl Memory {
    fn name(self) -> &'static str {
        match self {
            Self::Host => "host",
            Self::Cuda => "cuda",
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Kind {
    /// TCP
    Tcp,
    /// Shared memory
    Shm,
}

impl Kind {
    fn name(self) -> &'static str {
        match self {
            Self::Tcp => "tcp",
            Self::Shm => "shm",
        }
    }
}

fn ranks(text: &str) -> Result<usize, String> {
    let parsed = text.parse().ok().filter(|ranks| (2..=RANKS_MAX).contains(ranks));
    parsed.ok_or_else(|| format!("must be in [2, {RANKS_MAX}]"))
}

fn bytes(text: &str) -> Result<usize, String> {
    let units = [("KiB", 10), ("MiB", 20), ("GiB", 30), ("", 0)];
    let split = units.iter().find_map(|(unit, shift)| Some((text.strip_suffix(unit)?, shift)));
    let (number, shift) = split.expect("every text ends in nothing");
    let bytes =
        number.trim_end().parse().ok().and_then(|count: usize| count.checked_mul(1 << shift));
    let bytes = bytes.filter(|bytes| *bytes <= BYTES_MAX && bytes % 4 == 0);
    bytes.ok_or_else(|| "must be a multiple of 4 up to 1GiB, such as 64, 4KiB or 1MiB".to_owned())
}

pub(super) fn run(screen: &Screen, options: &Options) -> Result<(), Failure> {
    if options.gpu.is_some() && options.memory != Memory::Cuda {
        return Err(Failure::Usage("--gpu needs --memory cuda".to_owned()));
    }
    match options.rank {
        Some(rank) => run_rank(screen, options, rank),
        None => run_all(screen, options),
    }
}

/// One rank of a group whose other ranks are started by others.
fn run_rank(screen: &Screen, options: &Options, rank: usize) -> Result<(), Failure> {
    let ranks = if options.folder.is_some() { options.ranks } else { options.group.len() };
    if !(2..=RANKS_MAX).contains(&ranks) || rank >= ranks {
        return Err(Failure::Usage(format!(
            "a group of {ranks} ranks has no rank {rank}: --group needs 2 to {RANKS_MAX} addresses, and --rank has to be below the number of ranks"
        )));
    }
    let member = Member { name: options.name.clone(), ranks, rank };
    let mut array = match options.memory {
        Memory::Host => Array::on_host(options.bytes),
        Memory::Cuda => Array::on_gpu(options.gpu, rank, options.bytes).map_err(Failure::run)?,
    };
    let outcome = match &options.folder {
        Some(folder) => {
            let group = Group::connect_shared(&member, folder, options.limit);
            measure(group, options, &mut array)
        }
        None => measure(connect(&member, options)?, options, &mut array),
    };
    let outcome = outcome.map_err(Failure::run)?;
    let (p50, p99) = (outcome.quantile(0.5), outcome.quantile(0.99));
    screen.show(
        || {
            format!(
                "rank {rank} of {}: {} elements checked, {} wrong; p50 {}, p99 {}\nsha256 {}\n",
                member.ranks,
                outcome.checked,
                outcome.wrong,
                span(p50.as_nanos() as f64),
                span(p99.as_nanos() as f64),
                outcome.digest
            )
        },
        || {
            json!({
                "rank": rank, "ranks": member.ranks, "memory": options.memory.name(), "bytes": options.bytes, "rounds": options.rounds,
                "checked": outcome.checked, "wrong": outcome.wrong, "sha256": outcome.digest,
                "p50_us": p50.as_secs_f64() * 1e6, "p99_us": p99.as_secs_f64() * 1e6,
            })
        },
    );
    proven(outcome.wrong, outcome.checked)
}

/// A group over TCP.
fn connect(member: &Member, options: &Options) -> Result<Result<Group, CollectiveError>, Failure> {
    let addresses: Vec<SocketAddr> =
        options.group.iter().map(|text| resolve(text)).collect::<Result<_, _>>()?;
    let listener = if options.inherited {
        let socket: OwnedFd =
            std::io::stdin().as_fd().try_clone_to_owned().map_err(Failure::run)?;
        TcpListener::from(socket)
    } else {
        let at = addresses[member.rank];
        TcpListener::bind(at)
            .map_err(|error| Failure::Run(format!("cannot listen at {at}: {error}")))?
    };
    Ok(Group::connect(member, &listener, &addresses, options.limit))
}

fn measure(
    group: Result<Group, CollectiveError>,
    options: &Options,
    array: &mut Array,
) -> Result<Outcome, CollectiveError> {
    let mut group = group?;
    group.set_limit(options.limit);
    allreduce::run(&mut group, &plan(options), array)
}

fn plan(options: &Options) -> Plan {
    let element = match options.element {
        Type::Float32 => Element::Float32,
        Type::Int32 => Element::Int32,
    };
    Plan { element, bytes: options.bytes, rounds: options.rounds as usize, corrupt: false }
}

fn proven(wrong: u64, checked: u64) -> Result<(), Failure> {
    match wrong {
        0 => Ok(()),
        _ => Err(Failure::Unproven(format!("error: {wrong} of {checked} elements are wrong"))),
    }
}

fn resolve(text: &str) -> Result<SocketAddr, Failure> {
    let found = text.to_socket_addrs();
    let failed = |why: String| {
        Failure::Usage(format!("--group: {text:?} is no address such as host:7000: {why}"))
    };
    let mut found = found.map_err(|error| failed(error.to_string()))?;
    found.next().ok_or_else(|| failed("the name has no address".to_owned()))
}

/// All ranks, as processes of this machine.
fn run_all(screen: &Screen, options: &Options) -> Result<(), Failure> {
    let mut children = Children { ranks: Vec::new(), folder: None };
    match options.transport {
        Kind::Tcp => start_over_tcp(options, &mut children),
        Kind::Shm => start_over_shm(options, &mut children),
    }
    .map_err(Failure::run)?;
    let mut rows = Vec::new();
    let mut failure = None;
    for child in children.ranks.drain(..) {
        let output = child.wait_with_output().map_err(Failure::run)?;
        let line: Json = serde_json::from_slice(&output.stdout).unwrap_or_default();
        match line["error"].as_str() {
            None if line["rank"].is_u64() => rows.push(line),
            None => {
                let rank = rows.len();
                failure.get_or_insert_with(|| format!("rank {rank} ended: {}", output.status));
            }
            // A rank that lost another one reports it; the one that was lost says more.
            Some(why) => drop(failure.get_or_insert_with(|| why.to_owned())),
        }
    }
    if let Some(why) = failure {
        return Err(Failure::Run(why));
    }
    report(screen, options, rows)
}

/// Each rank gets a listener, so that all addresses are known.
fn start_over_tcp(options: &Options, children: &mut Children) -> io::Result<()> {
    let bind = |_| TcpListener::bind("127.0.0.1:0");
    let listeners: Vec<TcpListener> = (0..options.ranks).map(bind).collect::<Result<_, _>>()?;
    let address = |listener: &TcpListener| listener.local_addr().map(|at| at.to_string());
    let addresses: Vec<String> = listeners.iter().map(address).collect::<Result<_, _>>()?;
    let group = addresses.join(",");
    for (rank, listener) in listeners.into_iter().enumerate() {
        let mut command = command(options, rank);
        command.args(["--inherited", "--group", &group]).stdin(OwnedFd::from(listener));
        children.ranks.push(command.spawn()?);
    }
    Ok(())
}

fn start_over_shm(options: &Options, children: &mut Children) -> io::Result<()> {
    let name = format!("serval-allreduce-{}", std::process::id());
    let folder = std::env::temp_dir().join(name);
    fs::DirBuilder::new().mode(0o700).create(&folder)?;
    children.folder = Some(folder.clone());
    for rank in 0..options.ranks {
        let mut command = command(options, rank);
        command.args(["--ranks", &options.ranks.to_string()]).arg("--folder").arg(&folder);
        children.ranks.push(command.stdin(Stdio::null()).spawn()?);
    }
    Ok(())
}

/// The command of one rank.
fn command(options: &Options, rank: usize) -> Command {
    let kind = options.element.to_possible_value().expect("no type is hidden");
    let mut command = Command::new("/proc/self/exe");
    command
        .args(["allreduce", "--json", "--rank", &rank.to_string()])
        .args(["--bytes", &options.bytes.to_string(), "--type", kind.get_name()])
        .args(["--rounds", &options.rounds.to_string(), "--name", &options.name])
        .args(["--limit", &options.limit.as_secs_f64().to_string()])
        .args(["--memory", options.memory.name()])
        .args(options.gpu.iter().map(|number| format!("--gpu={number}")))
        .stdout(Stdio::piped())
        .stderr(Stdio::null());
    command
}

/// Ranks that run; they are killed if this process does not wait for them.
struct Children {
    ranks: Vec<Child>,
    /// Where they find each other; it is removed.
    folder: Option<PathBuf>,
}

impl Drop for Children {
    fn drop(&mut self) {
        for child in &mut self.ranks {
            // Fails if it has ended.
            let _ = child.kill().and_then(|()| child.wait());
        }
        // What cannot be removed stays in the folder for temporary files.
        let _ = self.folder.take().map(fs::remove_dir_all);
    }
}

fn report(screen: &Screen, options: &Options, rows: Vec<Json>) -> Result<(), Failure> {
    let sum = |key: &str| rows.iter().filter_map(|row| row[key].as_u64()).sum::<u64>();
    let is_identical = rows.iter().all(|row| row["sha256"] == rows[0]["sha256"]);
    // Ranks that differ cannot all be right.
    let (checked, wrong) = (sum("checked"), sum("wrong") + u64::from(!is_identical));
    let slowest = |key: &str| rows.iter().filter_map(|row| row[key].as_f64()).fold(0.0, f64::max);
    let (p50, p99) = (slowest("p50_us"), slowest("p99_us"));
    let kind = plan(options).element.name();
    screen.show(
        || {
            let mut table = Table::new(&["rank", ">p50", ">p99", ">checked", ">wrong"]);
            for row in &rows {
                let us = |key: &str| span(row[key].as_f64().unwrap_or(0.0) * 1e3);
                let cells = ["rank", "checked", "wrong"].map(|key| row[key].to_string());
                let [rank, checked, wrong] = cells;
                table.row([rank, us("p50_us"), us("p99_us"), checked, wrong]);
            }
            format!(
                "all-reduce of {} of {kind}{}, {} processes over {}, {} rounds\n\n{}\n  All ranks have {} bits: sha256 {}\n",
                bytes_for_people(options.bytes as u64),
                if options.memory == Memory::Cuda { " in GPU memory" } else { "" },
                options.ranks,
                if options.transport == Kind::Tcp { "TCP" } else { "shared memory" },
                options.rounds,
                table.render(screen),
                if is_identical { "the same" } else { "DIFFERENT" },
                rows[0]["sha256"].as_str().unwrap_or("-"),
            )
        },
        || {
            json!({
                "ranks": options.ranks, "transport": options.transport.name(), "memory": options.memory.name(), "type": kind, "bytes": options.bytes, "rounds": options.rounds,
                "checked": checked, "wrong": wrong, "identical": is_identical, "sha256": rows[0]["sha256"],
                "p50_us": p50, "p99_us": p99, "by_rank": rows,
            })
        },
    );
    proven(wrong, checked)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_have_units() {
        assert_eq!(bytes("64"), Ok(64));
        assert_eq!(bytes("4KiB"), Ok(4096));
        assert_eq!(bytes("0"), Ok(0));
        for wrong in ["", "3", "2GiB", "KiB", "99999999999999999999MiB", "-4"] {
            assert!(bytes(wrong).is_err(), "{wrong}");
        }
    }
}
