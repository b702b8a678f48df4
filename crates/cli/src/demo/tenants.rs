//! `serval demo tenants`: six tenants share an engine; one floods it, and then gets a limit while everything runs.

use std::fmt::Write as _;
use std::io::ErrorKind;
use std::net::{SocketAddr, UdpSocket};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use bench::plot::{self, Chart, Line};
use bench::units::per_second;
use engine::topology::{
    Accelerator, AcceleratorKind, CpuPlacement, EngineSettings, Limits, Listen, STACK_KIB, Service,
    Tenant, Topology,
};
use serde_json::json;
use server::{Caller, Server};
use wire::DropReason;
use wire::nic::Transport;

use super::{DemoError, Report, Stage};
use crate::screen::{Table, Tone};

/// The first one floods.
const TENANTS: usize = 6;
const LEN_BYTES: usize = 64;
/// Time between two requests of a tenant that does not flood.
const PACE: Duration = Duration::from_millis(2);
/// Messages of the flood at a time, and the pause between them.
const BURST: usize = 128;
const PAUSE: Duration = Duration::from_micros(200);
/// Messages a second that the flood may send in the last part.
const LIMIT: u64 = 10_000;
const PATIENCE: Duration = Duration::from_secs(5);
const SHARES: [f64; 6] = [0.1, 0.5, 0.9, 0.95, 0.99, 0.995];

/// What a client has seen.
#[derive(Default)]
struct Seen {
    took_us: Vec<f64>,
    checked: u64,
    wrong: u64,
    lost: u64,
}

fn io(error: std::io::Error) -> DemoError {
    DemoError::Io { what: "ask over UDP".to_owned(), error }
}

fn socket(to: SocketAddr) -> Result<UdpSocket, DemoError> {
    let socket = UdpSocket::bind("127.0.0.1:0").map_err(io)?;
    socket.connect(to).map_err(io)?;
    Ok(socket)
}

/// A message that only this tenant sends.
fn message(tenant: usize, number: u64) -> [u8; LEN_BYTES] {
    let mut bytes = [tenant as u8; LEN_BYTES];
    bytes[..8].copy_from_slice(&number.to_be_bytes());
    bytes
}

/// Asks at a steady pace, one request at a time.
fn ask(to: SocketAddr, tenant: usize, time: Duration, spoil: bool) -> Result<Seen, DemoError> {
    let socket = socket(to)?;
    socket.set_read_timeout(Some(PATIENCE)).map_err(io)?;
    let (begin, mut seen, mut spoil) = (Instant::now(), Seen::default(), spoil);
    for number in 0.. {
        let due = PACE * number as u32;
        if due >= time {
            break;
        }
        std::thread::sleep(due.saturating_sub(begin.elapsed()));
        let (request, asked) = (message(tenant, number), Instant::now());
        socket.send(&request).map_err(io)?;
        let mut reply = [0; 2 * LEN_BYTES];
        seen.checked += 1;
        match socket.recv(&mut reply) {
            Ok(len) => {
                seen.took_us.push(asked.elapsed().as_secs_f64() * 1e6);
                if std::mem::take(&mut spoil) {
                    reply[LEN_BYTES - 1] ^= 1;
                }
                seen.wrong += u64::from(reply[..len] != request);
            }
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {
                seen.lost += 1;
            }
            Err(error) => return Err(io(error)),
        }
    }
    Ok(seen)
}

/// Sends without waiting for replies until `done`; those that come are checked.
fn flood(to: SocketAddr, done: &AtomicBool) -> Result<Seen, DemoError> {
    let socket = socket(to)?;
    socket.set_nonblocking(true).map_err(io)?;
    let (mut seen, mut number) = (Seen::default(), 0);
    let mut reply = [0; 2 * LEN_BYTES];
    while !done.load(Ordering::Relaxed) {
        for _ in 0..BURST {
            // A message that finds no room in the host kernel is not part of the flood.
            let _ = socket.send(&message(0, number));
            number += 1;
        }
        while let Ok(len) = socket.recv(&mut reply) {
            seen.checked += 1;
            seen.wrong += u64::from(len != LEN_BYTES || reply[8..len] != [0; LEN_BYTES - 8]);
        }
        std::thread::sleep(PAUSE);
    }
    Ok(seen)
}

/// One part of the demo: the five ask, beside a flood or not.
fn part(
    stage: &Stage<'_>,
    ports: &[SocketAddr],
    floods: bool,
    spoil: bool,
) -> Result<(Seen, Seen), DemoError> {
    let time = Duration::from_millis(if stage.options.quick { 400 } else { 4000 });
    let done = AtomicBool::new(false);
    let (others, flooded) = std::thread::scope(|scope| {
        let flooder = floods.then(|| scope.spawn(|| flood(ports[0], &done)));
        let ask = |tenant: usize| {
            scope.spawn(move || ask(ports[tenant], tenant, time, spoil && tenant == 1))
        };
        let askers: Vec<_> = (1..TENANTS).map(ask).collect();
        let seen: Vec<_> = askers.into_iter().map(|asker| asker.join()).collect();
        done.store(true, Ordering::Relaxed);
        (seen, flooder.map(|flooder| flooder.join()))
    });
    stage.check_interrupted()?;
    let panicked = |_| DemoError::Wrong("a client panicked".to_owned());
    let mut all = Seen::default();
    for seen in others {
        let seen = seen.map_err(panicked)??;
        all.took_us.extend(seen.took_us);
        all.checked += seen.checked;
        all.wrong += seen.wrong;
        all.lost += seen.lost;
    }
    all.took_us.sort_by(f64::total_cmp);
    let flooded =
        flooded.map_or(Ok(Ok(Seen::default())), |flooded| flooded).map_err(panicked)??;
    Ok((all, flooded))
}

fn quantile(sorted: &[f64], share: f64) -> f64 {
    let at = (sorted.len() as f64 * share) as usize;
    sorted.get(at.min(sorted.len().saturating_sub(1))).copied().unwrap_or(0.0)
}

fn topology(stage: &Stage<'_>) -> Topology {
    let name = |number: usize| match number {
        0 => "flood".to_owned(),
        number => format!("tenant{number}"),
    };
    let service = |number: usize| {
        let listen = Listen { transport: Transport::Udp, address: ([127, 0, 0, 1], 0).into() };
        let mut service = Service::new(&name(number), vec![listen], "echo");
        service.mqueues = stage.options.mqueues.unwrap_or(4);
        service.tenant = name(number);
        service
    };
    let kind = AcceleratorKind::Cpu { placement: CpuPlacement::Worker, stack_kib: STACK_KIB };
    Topology {
        engine: EngineSettings { workers: stage.options.workers, ..EngineSettings::default() },
        limits: Limits::default(),
        accelerators: vec![Accelerator { name: "acc0".to_owned(), kind }],
        services: (0..TENANTS).map(service).collect(),
        tenants: (0..TENANTS).map(|number| Tenant::new(&name(number))).collect(),
    }
}

pub(super) fn run(stage: &Stage<'_>) -> Result<Report, DemoError> {
    let mut server = Server::start(topology(stage))?;
    let ports: Vec<SocketAddr> = server.addresses().iter().map(|(_, l)| l.address).collect();
    let columns = [
        "part",
        ">p50 of five",
        ">p99 of five",
        ">flood: received",
        ">answered",
        ">over its limit",
    ];
    let mut table = Table::new(&columns);
    let (mut rows, mut lines) = (Vec::new(), Vec::new());
    let (mut checked, mut wrong, mut lost) = (0, 0, 0);
    let parts = [("five alone", false), ("beside a flood", true), ("the flood has a limit", true)];
    let bar = stage.progress("asking", parts.len());
    for (number, (name, floods)) in parts.into_iter().enumerate() {
        if number == 2 {
            let limited = Tenant { messages_per_s: LIMIT, ..Tenant::new("flood") };
            let set = server.put_tenant(Caller::engine(), limited, false);
            set.map_err(|error| DemoError::Wrong(error.to_string()))?;
        }
        let before = server.metrics().service(0);
        let begin = Instant::now();
        let (seen, flooded) = part(stage, &ports, floods, stage.options.corrupt && number == 1)?;
        let seconds = begin.elapsed().as_secs_f64();
        let after = server.metrics().service(0);
        let rate = |of: fn(&engine::metrics::ServiceSnapshot) -> u64| {
            (of(&after) - of(&before)) as f64 / seconds
        };
        let received = rate(|s| s.received);
        let replied = rate(|s| s.replied);
        let shed = rate(|s| s.dropped(DropReason::TenantRate));
        let (p50, p99) = (quantile(&seen.took_us, 0.5), quantile(&seen.took_us, 0.99));
        table.row([
            name.to_owned(),
            format!("{p50:.0} us"),
            format!("{p99:.0} us"),
            per_second(received),
            per_second(replied),
            per_second(shed),
        ]);
        rows.push(json!({
            "part": name, "p50_us": p50, "p99_us": p99, "asked": seen.checked,
            "flood_received": received, "flood_replied": replied, "flood_shed": shed,
        }));
        let points = SHARES.map(|share| (share, quantile(&seen.took_us, share))).to_vec();
        lines.push(Line { name: name.to_owned(), points });
        checked += seen.checked + flooded.checked;
        wrong += seen.wrong + flooded.wrong;
        lost += seen.lost;
        bar.inc(1);
    }
    bar.finish_and_clear();
    let screen = &stage.options.screen;
    let title = "Six tenants, of which one floods";
    let mut text = format!("{}\n\n{}\n", screen.paint(Tone::Bold, title), table.render(screen));
    let used = server::tenants::list(&server.engine, Caller::engine());
    let skipped = used.first().map_or(0, |of| of.used.skipped);
    let _ = writeln!(
        text,
        "  Five tenants ask 500 times a second each. The flood waited for others in {skipped} turns.\n  \
         {checked} replies were checked: {wrong} were wrong, {lost} of the five tenants' are missing.\n  Client: ordinary kernel sockets on \
         loopback (class T0); {}. The clients, the flood among them,\n  share these cores with the engine.",
        stage.cores()
    );
    if !server.shutdown().is_clean() {
        return Err(DemoError::Wrong("the server did not end cleanly".to_owned()));
    }
    let json = json!({
        "demo": "tenants", "checked": checked, "wrong": wrong, "lost": lost, "skipped": skipped, "rows": rows,
    });
    let chart = Chart {
        title: "Latency of five tenants, alone and beside a flood".to_owned(),
        caption: format!(
            "500 requests a second each over UDP, class T0, loopback; {}.",
            stage.cores()
        ),
        warning: None,
        x: plot::shares(),
        y: plot::latencies(),
        lines,
    };
    let failure = (wrong + lost > 0)
        .then(|| format!("{wrong} of the {checked} replies are wrong, {lost} are missing"));
    Ok(Report { text, json, chart: Some(chart), failure })
}
