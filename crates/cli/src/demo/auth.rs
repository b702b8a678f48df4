//! `serval demo auth`: an unmodified CoAP server behind `coap-auth`, with ten forged requests for each legitimate one.

use std::fmt::Write as _;
use std::io::{BufRead as _, BufReader, Write as _};
use std::net::{SocketAddr, UdpSocket};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use bench::client::workload::coap;
use bench::client::{self, Load, Outcome, Pace, Workload};
use engine::topology::Service;
use serde_json::json;
use server::{FunctionError, Server};
use wire::framing::Framing;

use super::coap::KeyFile;
use super::{DemoError, Report, Stage, accounts};
use crate::screen::{Table, Tone};

/// examples/09_coap_auth: it answers each request with "done".
const SERVER: &[u8] = include_bytes!("coap_server.js");
const DONE: &[u8] = b"done";
/// Legitimate requests a second, and forged ones for each of them.
const RATE: f64 = 500.0;
const FORGED: u64 = 10;
const WINDOW: usize = 64;
const REQUESTS: u64 = 2000;
const QUICK_REQUESTS: u64 = 200;
/// A server that is this late has failed.
const PATIENCE: Duration = Duration::from_secs(20);

/// The CoAP server; it ends with this.
struct CoapServer {
    child: Child,
    address: SocketAddr,
}

impl CoapServer {
    fn start() -> Result<Self, DemoError> {
        let missing = |why: String| {
            DemoError::Missing(format!(
                "the demo needs Node.js for its server (apt install nodejs): {why}"
            ))
        };
        let mut command = Command::new("node");
        command.args(["-", "0"]).stdin(Stdio::piped()).stdout(Stdio::piped());
        let child = command.spawn().map_err(|error| missing(error.to_string()))?;
        let mut server = Self { child, address: ([127, 0, 0, 1], 0).into() };
        let stdin = server.child.stdin.take();
        let written = stdin.map(|mut stdin| stdin.write_all(SERVER));
        let mut line = String::new();
        let stdout = server.child.stdout.take();
        let read = stdout.map(|stdout| BufReader::new(stdout).read_line(&mut line));
        let port = line.trim().parse().ok().filter(|_| written.is_some() && read.is_some());
        let port = port.ok_or_else(|| missing("it did not start".to_owned()))?;
        server.address.set_port(port);
        Ok(server)
    }
}

impl Drop for CoapServer {
    fn drop(&mut self) {
        // It may have ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Legitimate requests. The first reply is spoiled if that is asked for.
struct Legitimate {
    spoil: bool,
}

impl Workload for Legitimate {
    fn request(&mut self, index: u64, into: &mut Vec<u8>) {
        coap::write_request(index, false, b"on", into);
    }

    fn accepts(&mut self, index: u64, reply: &[u8]) -> bool {
        let mut reply = reply.to_vec();
        if std::mem::take(&mut self.spoil) {
            reply.iter_mut().last().into_iter().for_each(|byte| *byte ^= 1);
        }
        coap::answers(index, coap::CONTENT, DONE, &reply)
    }

    fn has_identity(&self) -> bool {
        true
    }

    fn identify(&self, reply: &[u8]) -> Option<u64> {
        coap::number(reply)
    }
}

/// Sends forged requests at a rate until `stop` is set. Returns how many were sent.
fn flood(to: SocketAddr, rate: f64, stop: &AtomicBool) -> std::io::Result<u64> {
    let socket = UdpSocket::bind("127.0.0.1:0")?;
    socket.connect(to)?;
    let (begin, mut sent) = (Instant::now(), 0);
    let mut request = Vec::new();
    while !stop.load(Ordering::Relaxed) {
        let due = (begin.elapsed().as_secs_f64() * rate) as u64;
        while sent < due {
            request.clear();
            coap::write_request(sent, true, b"on", &mut request);
            // What finds no room is lost, as in a network.
            sent += u64::from(socket.send(&request).is_ok());
            if stop.load(Ordering::Relaxed) {
                break;
            }
        }
        thread::sleep(Duration::from_millis(1));
    }
    Ok(sent)
}

fn failed(error: FunctionError) -> DemoError {
    DemoError::Wrong(error.to_string())
}

fn register(server: &Server, name: &str) -> Result<u64, DemoError> {
    let registers = server.functions.read(&server.engine, "sensors", "auth").map_err(failed)?;
    Ok(registers.iter().find(|(of, _)| of == name).map_or(0, |(_, value)| *value))
}

/// Percent of the requests that were answered.
fn goodput(outcome: &Outcome) -> f64 {
    100.0 * outcome.replied as f64 / (outcome.sent + outcome.unsent).max(1) as f64
}

pub(super) fn run(stage: &Stage<'_>) -> Result<Report, DemoError> {
    let upstream = CoapServer::start()?;
    let keys = KeyFile::write()?;
    let mut service = Service::proxy("sensors", Vec::new(), upstream.address);
    // For the TCP port of every demo, which has no client here.
    service.framing = Framing::LengthU32;
    // Forged requests are dropped: an answer would make the flood twice as large.
    service.functions = vec![keys.function(&[])];
    let (server, udp, _) = stage.serve(service)?;
    let bar = stage.progress("asking beside a flood", 2);
    let ask = |spoil: bool| {
        let load = Load {
            window: WINDOW,
            pace: Pace::Open { rate: RATE, seed: 1, batch: 1 },
            requests: if stage.options.quick { QUICK_REQUESTS } else { REQUESTS },
            timeout: PATIENCE,
            cancel: stage.options.cancel.clone(),
            ..Load::default()
        };
        let outcome = client::udp(udp, &load, &mut Legitimate { spoil })?;
        stage.check_interrupted()?;
        Ok::<_, DemoError>(outcome)
    };
    let alone = ask(stage.options.corrupt)?;
    bar.inc(1);
    let stop = AtomicBool::new(false);
    let (beside, forged) = thread::scope(|scope| {
        let flood = scope.spawn(|| flood(udp, RATE * FORGED as f64, &stop));
        let asked = ask(false);
        stop.store(true, Ordering::Relaxed);
        (asked, flood.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
    });
    bar.finish_and_clear();
    let beside = beside?;
    let forged =
        forged.map_err(|error| DemoError::Io { what: "send forged requests".to_owned(), error })?;
    // Requests that the host kernel has taken are still in the port.
    let deadline = Instant::now() + PATIENCE;
    let mut before = u64::MAX;
    while before != server.metrics().service(0).received && Instant::now() < deadline {
        before = server.metrics().service(0).received;
        thread::sleep(Duration::from_millis(20));
    }
    let (passed, refused) = (register(&server, "passed")?, register(&server, "bad_signature")?);
    let accounts = accounts(&server);
    if !server.shutdown().is_clean() {
        return Err(DemoError::Wrong("the server did not end cleanly".to_owned()));
    }
    Ok(report(stage, (&alone, &beside), (forged, passed, refused), &accounts))
}

fn report(
    stage: &Stage<'_>,
    (alone, beside): (&Outcome, &Outcome),
    (forged, passed, refused): (u64, u64, u64),
    accounts: &str,
) -> Report {
    let screen = &stage.options.screen;
    let mut table = Table::new(&["legitimate requests", ">sent", ">answered", ">goodput", ">p50"]);
    let mut rows = Vec::new();
    let (mut checked, mut wrong) = (0, 0);
    for (name, outcome) in [("alone", alone), ("beside the flood", beside)] {
        let (share, p50) = (goodput(outcome), outcome.quantile_us(0.5));
        let Outcome { sent, replied, .. } = outcome;
        table.row([
            name.to_owned(),
            sent.to_string(),
            replied.to_string(),
            format!("{share:.1} %"),
            format!("{p50:.0} us"),
        ]);
        rows.push(json!({
            "load": name, "sent": sent, "replied": replied, "goodput_percent": share, "p50_us": p50,
        }));
        checked += outcome.replied + outcome.wrong;
        wrong += outcome.wrong + outcome.duplicated;
    }
    let legitimate = alone.sent + beside.sent;
    let title = "CoAP: a Node.js server behind coap-auth";
    let mut text = format!("{}\n\n{}\n", screen.paint(Tone::Bold, title), table.render(screen));
    let _ = writeln!(
        text,
        "  {forged} forged requests were sent, {refused} were refused, none reached the server.\n  {passed} requests \
         passed. {checked} answers were checked, {wrong} were wrong. {RATE} legitimate requests a second, {FORGED} forged \
         ones for\n  each; {}.\n\n  {accounts}",
        stage.cores()
    );
    let json = json!({
        "demo": "auth", "checked": checked, "wrong": wrong, "rows": rows,
        "forged_sent": forged, "forged_refused": refused, "passed": passed, "legitimate_sent": legitimate,
    });
    let failure = if wrong > 0 {
        Some(format!("{wrong} of the {checked} answers that were checked are wrong"))
    } else if passed > legitimate {
        Some(format!("{passed} requests passed, but only {legitimate} were legitimate"))
    } else if refused == 0 || refused > forged {
        Some(format!("{refused} of {forged} forged requests were refused"))
    } else {
        None
    };
    Report { text, json, chart: None, failure }
}
