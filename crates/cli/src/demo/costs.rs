//! Cost of a request for the client, the server and the database.
//!
//! Serval is measured first, then the host servers of `benches/baselines` if they have been built next to this
//! program: one whose threads wait for the database, and one that is asynchronous. All have the same client and the
//! same memcached and run on the same core.

use std::fs;
use std::net::SocketAddr;
use std::path::PathBuf;

use serde_json::{Value as Json, json};
use sys::time::{monotonic_ns, process_cpu_ns, thread_cpu_ns};

use super::{DemoError, Stage};
use crate::screen::{Screen, Table};
use bench::client::Outcome;
use bench::client::workload::{Faces, Person};
use bench::compare::server as rival;
use bench::memcached::Memcached;
use bench::units::per_second;

const HOST_SERVERS: [(&str, &str); 2] = [
    ("host server, two blocking threads", "--mode sync"),
    ("host server, asynchronous", "--mode async --wait yield"),
];

/// The result for one server.
pub(super) struct Cost {
    server: &'static str,
    pub(super) many: Outcome,
    /// CPU time per request in microseconds: of the client, the server and memcached.
    cpu_us: [f64; 3],
}

/// The workload, and the address of memcached.
pub(super) struct CostMeasurement<'a> {
    pub(super) stage: &'a Stage<'a>,
    pub(super) memcached: &'a Memcached,
    pub(super) people: &'a [Person<'a>],
    pub(super) window: usize,
}

impl CostMeasurement<'_> {
    /// Measures Serval, whose threads are those of this process.
    pub(super) fn serval(&self, address: SocketAddr) -> Result<Cost, DemoError> {
        self.ask("Serval", address, || process_cpu_ns() - thread_cpu_ns())
    }

    /// Measures the host servers, if they have been built.
    pub(super) fn host_servers(&self) -> Result<Vec<Cost>, DemoError> {
        let Some(program) = built() else { return Ok(Vec::new()) };
        let mut costs = Vec::new();
        for (name, flags) in HOST_SERVERS {
            let core = self.stage.cores.map(|cores| cores.server);
            let database = self.memcached.address();
            let command = format!("'{}' {flags} --memcached {database}", program.display());
            let failed = |error: rival::ServerError| DemoError::Missing(error.to_string());
            let server = rival::Server::start(&command, core.as_slice(), rival::START_MAX)
                .map_err(failed)?;
            let url = server.url("udp").map_err(failed)?;
            let address = url.trim_start_matches("udp://").parse();
            let address = address.map_err(|_| DemoError::Missing(format!("no address: {url}")))?;
            let id = server.id();
            costs.push(self.ask(name, address, || cpu_ns_of(id))?);
            server.stop().map_err(failed)?;
        }
        Ok(costs)
    }

    fn ask(
        &self,
        server: &'static str,
        address: SocketAddr,
        server_cpu_ns: impl Fn() -> u64,
    ) -> Result<Cost, DemoError> {
        let spent = || [thread_cpu_ns(), server_cpu_ns(), cpu_ns_of(self.memcached.id())];
        let (before, from_ns) = (spent(), monotonic_ns());
        let many = self.stage.measure(address, None, self.window, &mut Faces::new(self.people))?;
        let (after, passed_ns) = (spent(), monotonic_ns() - from_ns);
        // The share of a core that each used, and the number of requests in that time. (The client's counters exclude
        // its warm-up, so the number is computed from the rate.)
        let requests = many.rate() * passed_ns as f64 / 1e9;
        let cpu_us = |cost: usize| after[cost].saturating_sub(before[cost]) as f64 / 1e3;
        Ok(Cost { server, many, cpu_us: [0, 1, 2].map(|cost| cpu_us(cost) / requests) })
    }
}

/// The program of the host servers, where its Makefile puts it next to this one.
fn built() -> Option<PathBuf> {
    let program = std::env::current_exe().ok()?;
    let faces = program.parent()?.parent()?.join("baselines/faces");
    faces.is_file().then_some(faces)
}

/// CPU time of a process; 0 when it has ended.
fn cpu_ns_of(process: u32) -> u64 {
    let threads = fs::read_dir(format!("/proc/{process}/task")).into_iter().flatten().flatten();
    // "time on a core, time in its queue, slices", in nanoseconds.
    let times = threads.filter_map(|thread| {
        let times = fs::read_to_string(thread.path().join("schedstat")).ok()?;
        times.split(' ').next()?.parse::<u64>().ok()
    });
    times.sum()
}

pub(super) fn text(costs: &[Cost], screen: &Screen) -> String {
    let columns = ["", ">rate", ">client", ">server", ">memcached", ">us of CPU a request, all"];
    let mut table = Table::new(&columns);
    for cost in costs {
        let [client, server, memcached] = cost.cpu_us.map(|us| format!("{us:.1}"));
        let all = format!("{:.1}", cost.cpu_us.iter().sum::<f64>());
        let rate = per_second(cost.many.rate());
        table.row([cost.server, &rate, &client, &server, &memcached, &all]);
    }
    let mut text = table.render(screen);
    if costs.len() == 1 {
        text += "\n  `make -C benches/baselines` builds the host servers to compare with.\n";
    }
    text
}

pub(super) fn as_json(costs: &[Cost]) -> Json {
    let cost = |cost: &Cost| {
        let [client, server, memcached] = cost.cpu_us;
        json!({
            "server": cost.server, "rate": cost.many.rate(), "client_cpu_us": client,
            "server_cpu_us": server, "memcached_cpu_us": memcached,
            "cpu_us": client + server + memcached,
        })
    };
    costs.iter().map(cost).collect()
}
