//! `serval demo echo`: many mqueues, each with its own block, on one core.

use engine::topology::Service;
use serde_json::json;
use std::fmt::Write as _;
use wire::framing::Framing;

use super::{DemoError, Report, Stage, accounts};
use crate::screen::{Table, Tone};
use bench::client::{Echo, Stream};
use bench::plot::{self, Chart, Line};
use bench::units::per_second;

const LEN_BYTES: usize = 64;
const WINDOWS: [usize; 4] = [1, 16, 64, 240];

pub(super) fn run(stage: &Stage<'_>) -> Result<Report, DemoError> {
    let mut service = Service::new("echo", Vec::new(), "echo");
    service.framing = Framing::LengthU16;
    service.mqueues = stage.options.mqueues.unwrap_or(240);
    let mqueues = service.mqueues;
    let (server, udp, tcp) = stage.serve(service)?;
    let bar = stage.progress("sending messages", 2 * WINDOWS.len());
    let mut table = Table::new(&["", ">in flight", ">rate", ">p50", ">p99"]);
    let mut rows = Vec::new();
    let mut lines: Vec<Line> = Vec::new();
    for (name, address) in [("UDP", udp), ("TCP", tcp)] {
        let line = |what| Line { name: format!("{name} {what}"), points: Vec::new() };
        let mut latencies = [line("p50"), line("p99")];
        for window in WINDOWS {
            let stream = Stream { connections: window.min(8), ..Stream::new(Framing::LengthU16) };
            let stream = (name == "TCP").then_some(&stream);
            let outcome = stage.measure(address, stream, window, &mut Echo::new(LEN_BYTES))?;
            let (p50, p99) = (outcome.quantile_us(0.5), outcome.quantile_us(0.99));
            let us = |value: f64| format!("{value:.1} us");
            let cells = [window.to_string(), per_second(outcome.rate()), us(p50), us(p99)];
            table.row([name.to_owned()].into_iter().chain(cells));
            for (line, us) in latencies.iter_mut().zip([p50, p99]) {
                line.points.push((outcome.rate(), us));
            }
            rows.push(json!({
                "transport": name, "window": window, "rate": outcome.rate(), "p50_us": p50, "p99_us": p99,
            }));
            bar.inc(1);
        }
        lines.extend(latencies);
    }
    bar.finish_and_clear();
    let busy = server.busy_blocks(0);
    if busy == 0 {
        return Err(DemoError::Wrong("no block has received anything".to_owned()));
    }

    let screen = &stage.options.screen;
    let workers = stage.options.workers;
    let plural = if workers == 1 { "" } else { "s" };
    let title = format!("{LEN_BYTES}-byte echo over {mqueues} mqueues");
    let mut text = format!("{}\n\n{}\n", screen.paint(Tone::Bold, &title), table.render(screen));
    let _ = writeln!(
        text,
        "  {busy} of {mqueues} blocks received requests, all on {workers} worker{plural}."
    );
    let _ = writeln!(
        text,
        "  Client: one thread with ordinary kernel sockets on loopback (class T0); {}.\n  \
         Every reply was checked.\n",
        stage.cores()
    );
    let _ = writeln!(text, "  {}", accounts(&server));
    let report = server.shutdown();
    if !report.is_clean() {
        return Err(DemoError::Wrong("the server did not end cleanly".to_owned()));
    }
    let json = json!({ "demo": "echo", "mqueues": mqueues, "busy_blocks": busy, "rows": rows });
    let chart = Chart {
        title: format!("{title}: latency over rate"),
        caption: format!("{WINDOWS:?} in flight, client class T0, loopback; {}.", stage.cores()),
        warning: None,
        x: plot::rates(),
        y: plot::latencies(),
        lines,
    };
    Ok(Report { text, json, chart: Some(chart), failure: None })
}
