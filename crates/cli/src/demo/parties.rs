//! Client, server and database as three parties: what a request costs each of them.
//!
//! Serval is asked first, then the host servers of `benches/baselines` when they have been built beside
//! this program: one whose threads wait for the database, and one that never waits. All are asked by
//! the same client, ask the same memcached and run on the same core.

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
    ("host server, two threads that wait", "--mode sync"),
    ("host server, one that never waits", "--mode async --wait yield"),
];

/// What came of asking one server.
pub(super) struct Party {
    server: &'static str,
    pub(super) many: Outcome,
    /// CPU time a request, in microseconds: of the client, the server and memcached.
    cpu_us: [f64; 3],
}

/// What is asked, and whom the servers ask.
pub(super) struct Parties<'a> {
    pub(super) stage: &'a Stage<'a>,
    pub(super) memcached: &'a Memcached,
    pub(super) people: &'a [Person<'a>],
    pub(super) window: usize,
}

impl Parties<'_> {
    /// Asks Serval, whose threads are those of this process.
    pub(super) fn serval(&self, address: SocketAddr) -> Result<Party, DemoError> {
        self.ask("Serval", address, || process_cpu_ns() - thread_cpu_ns())
    }

    /// Asks the host servers, if they have been built.
    pub(super) fn host_servers(&self) -> Result<Vec<Party>, DemoError> {
        let Some(program) = built() else { return Ok(Vec::new()) };
        let mut parties = Vec::new();
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
            parties.push(self.ask(name, address, || cpu_ns_of(id))?);
            server.stop().map_err(failed)?;
        }
        Ok(parties)
    }

    fn ask(
        &self,
        server: &'static str,
        address: SocketAddr,
        server_cpu_ns: impl Fn() -> u64,
    ) -> Result<Party, DemoError> {
        let spent = || [thread_cpu_ns(), server_cpu_ns(), cpu_ns_of(self.memcached.id())];
        let (before, from_ns) = (spent(), monotonic_ns());
        let many = self.stage.measure(address, None, self.window, &mut Faces::new(self.people))?;
        let (after, passed_ns) = (spent(), monotonic_ns() - from_ns);
        // The share of a core that each had, and how many requests that was for. (The counters of the
        // client leave out its warm-up, so requests are taken from the rate.)
        let requests = many.rate() * passed_ns as f64 / 1e9;
        let cpu_us = |party: usize| after[party].saturating_sub(before[party]) as f64 / 1e3;
        Ok(Party { server, many, cpu_us: [0, 1, 2].map(|party| cpu_us(party) / requests) })
    }
}

/// The program of the host servers, where its Makefile puts it beside this one.
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

pub(super) fn text(parties: &[Party], screen: &Screen) -> String {
    let columns = ["", ">rate", ">client", ">server", ">memcached", ">us of CPU a request, all"];
    let mut table = Table::new(&columns);
    for party in parties {
        let [client, server, memcached] = party.cpu_us.map(|us| format!("{us:.1}"));
        let all = format!("{:.1}", party.cpu_us.iter().sum::<f64>());
        let rate = per_second(party.many.rate());
        table.row([party.server, &rate, &client, &server, &memcached, &all]);
    }
    let mut text = table.render(screen);
    if parties.len() == 1 {
        text += "\n  `make -C benches/baselines` builds the host servers to compare with.\n";
    }
    text
}

pub(super) fn as_json(parties: &[Party]) -> Json {
    let party = |party: &Party| {
        let [client, server, memcached] = party.cpu_us;
        json!({
            "server": party.server, "rate": party.many.rate(), "client_cpu_us": client,
            "server_cpu_us": server, "memcached_cpu_us": memcached,
            "cpu_us": client + server + memcached,
        })
    };
    parties.iter().map(party).collect()
}
