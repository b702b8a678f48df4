//! A file service: clients get a file, encrypted, by a loop of read, AES-256-GCM and write, or by the engine.

use std::fs::File;
use std::io::{self, Read as _};
use std::iter;
use std::net::TcpStream;
use std::path::Path;
use std::sync::Barrier;
use std::thread;
use std::time::Instant;

use bench::plot::{Axis, Chart, Line, Scale, Unit};
use serde_json::{Value as Json, json};
use server::config::bytes_for_people;
use sys::time::{process_cpu_ns, thread_cpu_ns};
use transfer::service::message::Answer;
use transfer::{Client, Key, Source};

use super::independent::{Library, open, seal, sealed_bytes};
use super::ways::{Checks, pair};
use super::{FILE, LIMIT};
use crate::screen::Table;

/// Clients at a time.
pub(super) const CLIENTS: [usize; 3] = [1, 2, 4];

/// What serves them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Server {
    /// A thread for each client. Its AES-256-GCM is that of the engine.
    Loop,
    Engine,
}

pub(super) const SERVERS: [Server; 2] = [Server::Loop, Server::Engine];

impl Server {
    fn name(self) -> &'static str {
        match self {
            Self::Loop => "loop of read, seal, write",
            Self::Engine => "transfer engine",
        }
    }
}

/// One round: all clients get the file once.
#[derive(Clone, Copy, Debug)]
struct Round {
    /// Plain bytes of all clients in a second.
    rate: f64,
    /// Of everything but the clients, in seconds for 10^9 plain bytes.
    cpu_per_gb: f64,
}

/// The file and its clients.
pub(super) struct FileService<'s> {
    /// The engine's socket.
    pub(super) engine: &'s Path,
    pub(super) content: &'s [u8],
    pub(super) key: [u8; 32],
    pub(super) checks: Checks,
    rounds: Vec<(Server, usize, Round)>,
}

impl<'s> FileService<'s> {
    pub(super) fn new(engine: &'s Path, content: &'s [u8], key: [u8; 32]) -> Self {
        Self { engine, content, key, checks: Checks::default(), rounds: Vec::new() }
    }

    /// Serves as many clients, once.
    pub(super) fn serve(&mut self, server: Server, clients: usize) -> io::Result<()> {
        let pairs = (0..clients).map(|_| pair()).collect::<io::Result<Vec<_>>>()?;
        let (ours, theirs): (Vec<_>, Vec<_>) = pairs.into_iter().unzip();
        let sealed = sealed_bytes(self.content.len());
        // Nothing begins before all clients have their memory.
        let begin = Barrier::new(clients + 1);
        let (content, key) = (self.content, &self.key);
        let (round, checks) = thread::scope(|scope| {
            let begin = &begin;
            let receive = |from| scope.spawn(move || receive(from, sealed, begin));
            let receivers: Vec<_> = theirs.into_iter().map(receive).collect();
            begin.wait();
            let (began, cpu) = (Instant::now(), process_cpu_ns());
            let served = match server {
                Server::Loop => by_loops(key, content.len(), ours),
                Server::Engine => self.by_engine(ours),
            };
            let received: Vec<_> =
                receivers.into_iter().map(|of| of.join().expect("it does not panic")).collect();
            let (took, cpu) = (began.elapsed(), process_cpu_ns() - cpu);
            served?;
            let (mut of_clients, mut all) = (0, Vec::new());
            for received in received {
                let (got, cpu) = received?;
                of_clients += cpu;
                all.push(got);
            }
            // The first one by a library that none of them uses, which takes longer.
            let libraries = iter::once(Library::Rust).chain(iter::repeat(Library::AwsLc));
            let check = |(got, library): (Vec<u8>, Library)| {
                scope.spawn(move || {
                    let mut checks = Checks::default();
                    checks.compare(&open(library, key, &got), content);
                    checks
                })
            };
            let checking: Vec<_> = all.into_iter().zip(libraries).map(check).collect();
            let mut checks = Checks::default();
            checking.into_iter().for_each(|of| checks.join(of.join().expect("it does not panic")));
            let bytes = (content.len() * clients) as f64;
            let rate = bytes / took.as_secs_f64();
            let cpu_per_gb = cpu.saturating_sub(of_clients) as f64 / bytes;
            Ok::<_, io::Error>((Round { rate, cpu_per_gb }, checks))
        })?;
        self.checks.join(checks);
        self.rounds.push((server, clients, round));
        Ok(())
    }

    /// One command for each client; this thread waits for their ends.
    fn by_engine(&self, clients: Vec<TcpStream>) -> io::Result<()> {
        let mut engine = Client::connect(self.engine).map_err(io::Error::other)?;
        let in_flight = clients.len();
        for client in clients {
            let source = Source::file(File::open(FILE)?, 0, Some(self.content.len() as u64));
            let command = source.seal(Key::new(self.key)).socket(client);
            engine.submit(command).map_err(io::Error::other)?;
        }
        for _ in 0..in_flight {
            match engine.next(LIMIT).map_err(io::Error::other)? {
                Some(Answer::Ended { result, .. }) => result.map_err(io::Error::other)?,
                _ => return Err(io::ErrorKind::TimedOut.into()),
            }
        }
        Ok(())
    }

    /// The median round of a server with as many clients.
    fn median(&self, server: Server, clients: usize) -> Option<Round> {
        let rounds = self.rounds.iter().filter(|(of, n, _)| (*of, *n) == (server, clients));
        let mut rounds: Vec<Round> = rounds.map(|(.., round)| *round).collect();
        rounds.sort_by(|a, b| a.rate.total_cmp(&b.rate));
        rounds.get(rounds.len() / 2).copied()
    }

    fn medians(&self) -> impl Iterator<Item = (usize, Server, Round)> {
        let all = CLIENTS.into_iter().flat_map(|clients| SERVERS.map(|server| (clients, server)));
        all.filter_map(|(clients, server)| Some((clients, server, self.median(server, clients)?)))
    }

    pub(super) fn table(&self) -> Table {
        let mut table = Table::new(&["", ">clients", ">rate", ">CPU for a GB"]);
        for (clients, server, Round { rate, cpu_per_gb }) in self.medians() {
            table.row([
                server.name().to_owned(),
                clients.to_string(),
                format!("{}/s", bytes_for_people(rate as u64)),
                format!("{cpu_per_gb:.2} s"),
            ]);
        }
        table
    }

    pub(super) fn json(&self) -> Vec<Json> {
        let row = |(clients, server, round): (usize, Server, Round)| {
            json!({
                "server": server.name(), "clients": clients, "bytes_per_second": round.rate,
                "cpu_seconds_per_gb": round.cpu_per_gb,
            })
        };
        self.medians().map(row).collect()
    }

    /// The rate over the CPU time, a line for each server.
    pub(super) fn chart(&self, cores: &str, threads: u32) -> Chart {
        let axis =
            |label: &str| Axis { label: label.to_owned(), scale: Scale::Linear, unit: Unit::Plain };
        let line = |server: Server| {
            let rounds = CLIENTS.iter().filter_map(|clients| self.median(server, *clients));
            let points = rounds.map(|round| (round.cpu_per_gb, round.rate)).collect();
            Line { name: server.name().to_owned(), points }
        };
        Chart {
            title: "A file, encrypted, to 1, 2 and 4 clients: rate and CPU time".to_owned(),
            caption: format!(
                "AES-256-GCM, {} of a file in the page cache, loopback TCP; {cores}. Marks are clients, from 1 on; higher is \
                 faster, and further left is less CPU time. The loop is the simple one: read, seal, write with one buffer and a thread for \
                 each client. The engine has {threads} threads.",
                bytes_for_people(self.content.len() as u64)
            ),
            warning: None,
            x: axis("CPU seconds for 10^9 bytes, without the clients"),
            y: axis("bytes a second"),
            lines: SERVERS.map(line).to_vec(),
        }
    }
}

/// A thread for each client.
fn by_loops(key: &[u8; 32], bytes: usize, clients: Vec<TcpStream>) -> io::Result<()> {
    thread::scope(|scope| {
        let serve = |client: TcpStream| {
            scope.spawn(move || seal(Library::AwsLc, key, File::open(FILE)?, bytes, client))
        };
        let threads: Vec<_> = clients.into_iter().map(serve).collect();
        threads.into_iter().try_for_each(|thread| thread.join().expect("it does not panic"))
    })
}

/// What a client gets, and the CPU time that it takes for it.
fn receive(mut from: TcpStream, bytes: usize, begin: &Barrier) -> io::Result<(Vec<u8>, u64)> {
    // Written once, so that the memory is there.
    let mut got = vec![1; bytes];
    begin.wait();
    let before = thread_cpu_ns();
    from.read_exact(&mut got)?;
    let more = from.read(&mut [0])?;
    let cpu = thread_cpu_ns() - before;
    got.truncate(if more == 0 { bytes } else { 0 });
    Ok((got, cpu))
}
