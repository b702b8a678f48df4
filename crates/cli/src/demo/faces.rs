//! `serval demo faces`: a kernel that sends requests to a database.
//!
//! memcached holds a picture of each person. A client sends a label and another picture; the kernel fetches the
//! stored one through its client mqueue and compares. The result is a table of requests and answers, and a table of
//! the cost of a request for the client, the server and memcached, compared with host servers that do the same. No
//! claim is made about the method's quality on real faces.

use std::fmt::Write as _;
use std::fs;
use std::path::Path;
use std::time::Duration;

use engine::topology::{Backend, Service};
use serde_json::{Value as Json, json};
use wire::framing::Framing;
use wire::nic::Transport;

use super::costs::{self, Cost, CostMeasurement};
use super::{DemoError, Report, Stage, accounts, check_complete};
use crate::screen::{Table, Tone};
use bench::client::workload::{Faces, Pictures, Question};
use bench::client::{self, Load};
use bench::memcached::Memcached;
use bench::plot::{self, Chart, Line};
use bench::units::per_second;

/// As in the face verification services of the papers.
const MQUEUES: u32 = 28;
/// Largest file of pictures that is read.
const FILE_BYTES_MAX: u64 = 256 << 20;

const QUESTIONS: [(Question, &str); 3] = [
    (Question::Same, "same face, with noise"),
    (Question::Other, "another face"),
    (Question::Unknown, "unknown label"),
];

/// The results, besides the answers.
struct Figures {
    people: usize,
    mqueues: u32,
    window: usize,
    rate: f64,
    p50_us: f64,
}

pub(super) fn run(stage: &Stage<'_>) -> Result<Report, DemoError> {
    let file = stage.options.pictures.as_deref().map(read_pictures).transpose()?;
    let pictures = match &file {
        None => Pictures::built_in(),
        Some(file) => Pictures::parse(file).ok_or_else(|| {
            let make = "make one with tools/train/make_faces.py";
            DemoError::Missing(format!("the file is not one of pictures: {make}"))
        })?,
    };
    let memcached = Memcached::start()?;
    let entries = pictures.people.iter().map(|person| (person.database_key(), person.stored));
    let people = memcached.store(entries)?;
    let service = service(stage, &memcached);
    let mqueues = service.mqueues;
    let (server, udp, _) = stage.serve(service)?;

    let mut asking = Faces::new(&pictures.people);
    let load = Load {
        window: mqueues.min(64) as usize,
        requests: asking.different(),
        timeout: Duration::from_secs(10),
        cancel: stage.options.cancel.clone(),
        ..Load::default()
    };
    let bar = stage.progress("verifying faces", 4);
    let outcome = client::udp(udp, &load, &mut stage.spoiled(&mut asking))?;
    stage.check_interrupted()?;
    check_complete("faces", &outcome)?;
    bar.inc(1);
    let mut again = Faces::new(&pictures.people);
    let one = stage.measure(udp, None, 1, &mut again)?;
    bar.inc(1);
    let asked = CostMeasurement {
        stage,
        memcached: &memcached,
        people: &pictures.people,
        window: load.window,
    };
    let mut costs = vec![asked.serval(udp)?];
    bar.inc(1);

    let accounts = accounts(&server);
    if !server.shutdown().is_clean() {
        return Err(DemoError::Wrong("the server did not end cleanly".to_owned()));
    }
    costs.extend(asked.host_servers()?);
    bar.finish_and_clear();
    let many = &costs[0].many;
    let (rate, p50_us) = (many.rate(), one.quantile_us(0.5));
    let figures = Figures { people, mqueues, window: load.window, rate, p50_us };
    let mut text = text(stage, &pictures, &asking, &figures);
    let _ = writeln!(text, "{}\n  {accounts}", costs::text(&costs, &stage.options.screen));
    let line = |name: String, latency| Line { name, points: client::distribution_us(latency) };
    let chart = Chart {
        title: "Faces against pictures in memcached: latency of a verdict".to_owned(),
        caption: format!("Client class T0, loopback; {}.", stage.cores()),
        warning: None,
        x: plot::shares(),
        y: plot::latencies(),
        lines: vec![
            line("1 in flight".to_owned(), &one.latency),
            line(format!("{} in flight", load.window), &many.latency),
        ],
    };
    let json = as_json(&pictures, &asking, &figures, &costs);
    Ok(Report { text, json, chart: Some(chart), failure: None })
}

fn service(stage: &Stage<'_>, memcached: &Memcached) -> Service {
    let mut service = Service::new("faces", Vec::new(), "faces");
    service.max_message_bytes = Faces::REQUEST_BYTES as u32;
    service.framing = Framing::Fixed(Faces::REQUEST_BYTES as u32);
    service.mqueues = stage.options.mqueues.unwrap_or(MQUEUES);
    let mut backend = Backend::new("db", Transport::Tcp, memcached.address(), Framing::Memcached);
    // The machine may be busy; a demo needs no tight limits.
    backend.timeout_ms = 2000;
    service.backends = vec![backend];
    service.request_timeout_ms = 5000;
    service
}

fn text(
    stage: &Stage<'_>,
    pictures: &Pictures<'_>,
    asking: &Faces<'_>,
    figures: &Figures,
) -> String {
    let screen = &stage.options.screen;
    let mut table = Table::new(&["asked", ">match", ">no match", ">unknown label"]);
    for (question, name) in QUESTIONS {
        let counts = asking.answers(question);
        table.row([name, &counts[1].to_string(), &counts[0].to_string(), &counts[2].to_string()]);
    }
    let title = screen.paint(Tone::Bold, "Faces against pictures in memcached");
    let Figures { people, mqueues, window, rate, p50_us } = figures;
    let (rate, cores) = (per_second(*rate), stage.cores());
    let note = pictures.note.lines().next().unwrap_or_default();
    format!(
        "{title}\n\n{}\n  {rate} with {window} in flight, p50 {p50_us:.0} us with one; {mqueues} mqueues, one \
         question to memcached\n  for each request; {cores}.\n\n  \
         Pictures of {people} people. {note}\n  The table counts answers; it promises nothing about \
         other pictures.\n\n",
        table.render(screen)
    )
}

fn as_json(pictures: &Pictures<'_>, asking: &Faces<'_>, figures: &Figures, costs: &[Cost]) -> Json {
    let answers = QUESTIONS.map(|(question, name)| {
        let [no_match, matches, unknown, _] = asking.answers(question);
        json!({ "asked": name, "match": matches, "no_match": no_match, "unknown": unknown })
    });
    json!({
        "demo": "faces", "people": figures.people, "pictures": pictures.note,
        "answers": answers,
        "rate": figures.rate, "p50_us": figures.p50_us, "costs": costs::as_json(costs),
    })
}

fn read_pictures(path: &Path) -> Result<Vec<u8>, DemoError> {
    let failed = |error| DemoError::Io { what: format!("read {}", path.display()), error };
    let bytes = fs::metadata(path).map_err(failed)?.len();
    if bytes > FILE_BYTES_MAX {
        let what =
            format!("{} has {bytes} bytes, at most {FILE_BYTES_MAX} are read", path.display());
        return Err(DemoError::Missing(what));
    }
    fs::read(path).map_err(failed)
}
