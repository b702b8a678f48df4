//! `serval demo scale`: the kernel of the documentation.

use engine::topology::Service;
use serde_json::json;
use std::fmt::Write as _;
use wire::framing::Framing;

use super::bench::Comparison;
use super::{DemoError, HostCentric, Report, Stage, accounts};
use crate::screen::Tone;
use bench::client::Stream;
use bench::client::workload::Vectors;

const NUMBERS: usize = Vectors::NUMBERS;

pub(super) fn run(stage: &Stage<'_>) -> Result<Report, DemoError> {
    let framing = Framing::Fixed(4 * NUMBERS as u32);
    let mut service = Service::new("scale", Vec::new(), "scale");
    service.framing = framing;
    service.mqueues = stage.options.mqueues.unwrap_or(4);
    let other = HostCentric::start(&service, stage.options.workers, stage.cores.map(|c| c.server))?;
    let (server, udp, tcp) = stage.serve(service)?;
    let stream = Stream { connections: 4, ..Stream::new(framing) };
    let comparison =
        Comparison::with_host_centric((udp, tcp), stream, other.address(), stage.options.workers);
    let verdict = stage.compare(&comparison, || Box::new(Vectors::new(NUMBERS)))?;

    let screen = &stage.options.screen;
    let title = format!("{NUMBERS} numbers times 3, by a kernel of nine lines");
    let mut text = format!("{}\n\n", screen.paint(Tone::Bold, &title));
    let _ = writeln!(text, "{}\n{}", verdict.table(screen), stage.caption(&verdict));
    let _ = writeln!(text, "  {}", accounts(&server));
    let report = server.shutdown();
    if !report.is_clean() {
        return Err(DemoError::Wrong("the server did not end cleanly".to_owned()));
    }
    let json = json!({ "demo": "scale", "comparison": verdict.json() });
    let chart = verdict.chart("Numbers times 3: latency of a vector", stage);
    Ok(Report { text, json, chart: Some(chart), failure: None })
}
