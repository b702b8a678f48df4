//! `serval demo sockets`: two kernels with connections of their own. `matmul` multiplies matrices, `stream_echo` sends streams back; plain TCP
//! clients compare every number and every byte with what they calculate themselves.

use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::thread;
use std::time::{Duration, Instant};

use ::bench::units::span;
use engine::topology::{
    Accelerator, AcceleratorKind, CpuPlacement, EngineSettings, Limits, STACK_KIB, Service,
    SocketSpec, Topology,
};
use serde_json::{Value as Json, json};
use server::Server;
use server::config::bytes_for_people;

use super::{DemoError, Report, Stage};
use crate::screen::{Table, Tone};

/// Longest that a client waits for bytes, on a busy machine.
const PATIENCE: Duration = Duration::from_secs(60);
/// Products: rows of the matrices, requests of each client, and with `--quick`.
const PRODUCTS: [(usize, usize, usize); 4] =
    [(32, 400, 20), (64, 200, 10), (128, 50, 3), (256, 10, 1)];
/// Clients that ask at the same time.
const CLIENTS: usize = 4;
/// Exchanges of 64 bytes, and bytes of a long stream, and both with `--quick`.
const EXCHANGES: [usize; 2] = [5000, 200];
const STREAM_BYTES: [usize; 2] = [64 << 20, 1 << 20];

/// What one client saw.
#[derive(Default)]
struct Seen {
    checked: u64,
    wrong: u64,
    times: Vec<Duration>,
}

impl Seen {
    fn add(&mut self, other: Self) {
        self.checked += other.checked;
        self.wrong += other.wrong;
        self.times.extend(other.times);
    }

    fn quantile(&mut self, share: f64) -> Duration {
        self.times.sort_unstable();
        let at = (share * (self.times.len().saturating_sub(1)) as f64).round() as usize;
        self.times.get(at).copied().unwrap_or_default()
    }
}

pub(super) fn run(stage: &Stage<'_>) -> Result<Report, DemoError> {
    let (server, [products, echo]) = serve(stage)?;
    let quick = usize::from(stage.options.quick);
    let bar = stage.progress("multiplying and echoing", PRODUCTS.len() + 2);
    let names = ["kernel", "what", ">clients", ">p50", ">p99", ">rate", ">checked", ">wrong"];
    let (mut table, mut rows) = (Table::new(&names), Vec::new());
    let (mut checked, mut wrong) = (0, 0);
    let mut add = |kernel: &str, what: String, clients: usize, rate: String, mut seen: Seen| {
        let [p50, p99] = [0.5, 0.99].map(|share| seen.quantile(share));
        let times = [p50, p99].map(|time| span(time.as_nanos() as f64));
        let counts = [rate.clone(), seen.checked.to_string(), seen.wrong.to_string()];
        let first = [kernel.to_owned(), what.clone(), clients.to_string()];
        table.row(first.into_iter().chain(times).chain(counts));
        rows.push(json!({
            "kernel": kernel, "what": what, "clients": clients, "p50_us": p50.as_secs_f64() * 1e6,
            "p99_us": p99.as_secs_f64() * 1e6, "rate": rate, "checked": seen.checked, "wrong": seen.wrong,
        }));
        checked += seen.checked;
        wrong += seen.wrong;
    };
    for (at, (n, requests, quick_requests)) in PRODUCTS.into_iter().enumerate() {
        stage.check_interrupted()?;
        let requests = if quick == 1 { quick_requests } else { requests };
        let began = Instant::now();
        let corrupt = stage.options.corrupt && at == 0;
        let seen = clients(|client| multiply(products, n, requests, corrupt && client == 0))?;
        let rate = (CLIENTS * requests) as f64 / began.elapsed().as_secs_f64();
        add("matmul", format!("{n} x {n}"), CLIENTS, format!("{rate:.0}/s"), seen);
        bar.inc(1);
    }
    stage.check_interrupted()?;
    let began = Instant::now();
    let seen = exchange(echo, EXCHANGES[quick]).map_err(failed)?;
    let rate = EXCHANGES[quick] as f64 / began.elapsed().as_secs_f64();
    add("stream_echo", "64 B and back".to_owned(), 1, format!("{rate:.0}/s"), seen);
    bar.inc(1);
    let began = Instant::now();
    let seen = clients(|client| stream(echo, client, STREAM_BYTES[quick]))?;
    let rate = (CLIENTS * STREAM_BYTES[quick]) as f64 / began.elapsed().as_secs_f64();
    let what = format!("stream of {}", bytes_for_people(STREAM_BYTES[quick] as u64));
    add("stream_echo", what, CLIENTS, format!("{}/s", bytes_for_people(rate as u64)), seen);
    bar.finish_and_clear();
    let (books, balance) = books(&server)?;
    let screen = &stage.options.screen;
    let text = format!(
        "{}\n\n{}\n  {}\n  {checked} numbers and bytes were compared with what the clients calculated, {wrong} were wrong.\n  {books}\n",
        screen.paint(Tone::Bold, "Kernels with connections of their own: plain TCP clients, no code of a host application"),
        table.render(screen),
        stage.cores(),
    );
    let json = json!({ "demo": "sockets", "rows": rows, "sockets": balance, "checked": checked, "wrong": wrong });
    let failure = (wrong > 0).then(|| format!("{wrong} of {checked} numbers and bytes are wrong"));
    Ok(Report { text, json, chart: None, failure })
}

/// A server with both kernels on its workers, and where they listen.
fn serve(stage: &Stage<'_>) -> Result<(Server, [SocketAddr; 2]), DemoError> {
    let service = |kernel: &str, mqueues: u32| {
        let mut service = Service::new(kernel, Vec::new(), kernel);
        service.sockets = vec![SocketSpec::listen(([127, 0, 0, 1], 0))];
        service.mqueues = stage.options.mqueues.unwrap_or(mqueues);
        (service.sockets_per_block, service.socket_bytes) = (8, 256 << 10);
        service
    };
    let kind = AcceleratorKind::Cpu { placement: CpuPlacement::Worker, stack_kib: STACK_KIB };
    let topology = Topology {
        engine: EngineSettings {
            workers: stage.options.workers,
            cores: stage.cores.iter().map(|cores| cores.server).collect(),
            ..EngineSettings::default()
        },
        limits: Limits::default(),
        accelerators: vec![Accelerator { name: "acc0".to_owned(), kind }],
        services: vec![service("matmul", 4), service("stream_echo", 4)],
        tenants: Vec::new(),
    };
    let server = Server::start(topology)?;
    let at: Vec<SocketAddr> = server.addresses().iter().map(|(_, l)| l.address).collect();
    Ok((server, [at[0], at[1]]))
}

fn failed(error: io::Error) -> DemoError {
    DemoError::Io { what: "use a connection to a kernel".to_owned(), error }
}

/// Runs [`CLIENTS`] clients at the same time, and adds up what they saw.
fn clients(client: impl Fn(usize) -> io::Result<Seen> + Sync) -> Result<Seen, DemoError> {
    let client = &client;
    let seen: Vec<io::Result<Seen>> = thread::scope(|scope| {
        let start = |number| scope.spawn(move || client(number));
        let threads: Vec<_> = (0..CLIENTS).map(start).collect();
        threads.into_iter().map(|thread| thread.join().expect("it does not panic")).collect()
    });
    let mut sum = Seen::default();
    for seen in seen {
        sum.add(seen.map_err(failed)?);
    }
    Ok(sum)
}

fn connect(to: SocketAddr) -> io::Result<TcpStream> {
    let stream = TcpStream::connect_timeout(&to, PATIENCE)?;
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    Ok(stream)
}

/// Asks for products of whole numbers, whose sums are exact, and compares every element. With `corrupt` a bit of the first answer is flipped.
fn multiply(to: SocketAddr, n: usize, requests: usize, corrupt: bool) -> io::Result<Seen> {
    let mut stream = connect(to)?;
    let (mut seen, mut answer) = (Seen::default(), vec![0; 4 * n * n]);
    for request in 0..requests {
        let number = |at: usize, modulus: usize| ((at + request) % modulus) as f32 - 2.0;
        let a: Vec<f32> = (0..n * n).map(|at| number(at, 7)).collect();
        let b: Vec<f32> = (0..n * n).map(|at| number(at, 5)).collect();
        let mut bytes = (n as u32).to_le_bytes().to_vec();
        bytes.extend(a.iter().chain(&b).flat_map(|number| number.to_le_bytes()));
        let began = Instant::now();
        stream.write_all(&bytes)?;
        stream.read_exact(&mut answer)?;
        seen.times.push(began.elapsed());
        if corrupt && request == 0 {
            answer[3] ^= 0x40;
        }
        let (numbers, _) = answer.as_chunks::<4>();
        let wanted = product(&a, &b, n);
        seen.checked += (n * n) as u64;
        let wrong =
            numbers.iter().zip(wanted).filter(|(got, want)| f32::from_le_bytes(**got) != *want);
        seen.wrong += wrong.count() as u64;
    }
    Ok(seen)
}

fn product(a: &[f32], b: &[f32], n: usize) -> Vec<f32> {
    let mut c = vec![0.0; n * n];
    for (row, to) in a.chunks_exact(n).zip(c.chunks_exact_mut(n)) {
        for (factor, from) in row.iter().zip(b.chunks_exact(n)) {
            to.iter_mut().zip(from).for_each(|(to, from)| *to += factor * from);
        }
    }
    c
}

/// Sends 64 bytes and waits until they are back, many times.
fn exchange(to: SocketAddr, rounds: usize) -> io::Result<Seen> {
    let mut stream = connect(to)?;
    let (mut seen, mut back) = (Seen::default(), [0; 64]);
    for round in 0..rounds {
        let bytes: [u8; 64] = std::array::from_fn(|at| (at * 3 + round) as u8);
        let began = Instant::now();
        stream.write_all(&bytes)?;
        stream.read_exact(&mut back)?;
        seen.times.push(began.elapsed());
        seen.checked += 64;
        seen.wrong += bytes.iter().zip(back).filter(|(sent, got)| *sent != got).count() as u64;
    }
    Ok(seen)
}

/// Sends a long stream while it comes back, and compares every byte.
fn stream(to: SocketAddr, client: usize, bytes: usize) -> io::Result<Seen> {
    let stream = connect(to)?;
    let mut reader = stream.try_clone()?;
    let byte = move |at: usize| (at * 131 + at / 255 + client) as u8;
    let began = Instant::now();
    let sender = thread::spawn(move || -> io::Result<()> {
        let mut stream = stream;
        for from in (0..bytes).step_by(1 << 16) {
            let piece: Vec<u8> = (from..(from + (1 << 16)).min(bytes)).map(byte).collect();
            stream.write_all(&piece)?;
        }
        stream.shutdown(std::net::Shutdown::Write)
    });
    let (mut seen, mut piece, mut at) = (Seen::default(), vec![0; 1 << 16], 0);
    loop {
        let count = reader.read(&mut piece)?;
        if count == 0 {
            break;
        }
        seen.wrong +=
            piece[..count].iter().zip(at..).filter(|(got, at)| **got != byte(*at)).count() as u64;
        at += count;
    }
    sender.join().expect("it does not panic")?;
    seen.checked = bytes as u64;
    seen.wrong += bytes.abs_diff(at) as u64;
    seen.times.push(began.elapsed());
    Ok(seen)
}

/// The books of all sockets, once they are closed, as text and as JSON.
fn books(server: &Server) -> Result<(String, Json), DemoError> {
    let deadline = Instant::now() + PATIENCE;
    loop {
        let both = [0, 1].map(|service| server.metrics().service(service));
        let sum =
            |of: fn(&engine::metrics::ServiceSnapshot) -> u64| both.iter().map(of).sum::<u64>();
        let (opened, closed) = (sum(|s| s.sockets_opened), sum(|s| s.sockets_closed));
        let (received, read) = (sum(|s| s.socket_received_bytes), sum(|s| s.socket_read_bytes));
        let (written, sent) = (sum(|s| s.socket_written_bytes), sum(|s| s.socket_sent_bytes));
        let dropped = sum(|s| s.socket_unread_bytes + s.socket_unsent_bytes);
        if opened == closed && received + written == read + sent + dropped {
            let text = format!(
                "{opened} sockets; {received} bytes received = {read} read by kernels, {written} written by kernels = {sent} sent; {dropped} dropped"
            );
            let json = json!({
                "opened": opened, "received_bytes": received, "read_bytes": read, "written_bytes": written, "sent_bytes": sent,
                "dropped_bytes": dropped,
            });
            return Ok((text, json));
        }
        if Instant::now() > deadline {
            let why = format!(
                "{opened} sockets were opened and {closed} closed; {received} bytes received, {read} read, {written} written, {sent} sent, {dropped} dropped"
            );
            return Err(DemoError::Wrong(format!(
                "the books of the sockets do not balance: {why}"
            )));
        }
        thread::sleep(Duration::from_millis(1));
    }
}
