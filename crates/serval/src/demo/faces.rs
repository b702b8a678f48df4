//! `serval demo faces`: a kernel that asks a database by itself.
//!
//! memcached holds a picture of each person. A client sends a label and another picture; the kernel
//! fetches the stored one through its client mqueue and compares. What comes out is a table of what was
//! asked and what was answered. How good the method is with real faces is not claimed.

use std::fmt::Write as _;
use std::fs;
use std::time::Duration;

use engine::topology::{Backend, Service};
use serde_json::{Value as Json, json};
use wire::framing::Framing;
use wire::nic::Transport;

use super::bench::per_second;
use super::memcached::Memcached;
use super::{DemoError, Report, Stage, accounts, perfect};
use crate::client::{self, Load, Workload};
use crate::screen::{Table, Tone};

/// Labelled pictures: magic, u32 LE count, u32 LE length of a note, the note, then for each person a
/// 12-byte label, the stored picture and a second one (device/models/README.md).
const BUILT_IN: &[u8] = include_bytes!("../../../../device/models/faces_demo.bin");
const MAGIC: &[u8] = b"SVFACES1";
const LABEL_BYTES: usize = 12;
const PICTURE_BYTES: usize = 1024;
const REQUEST_BYTES: usize = LABEL_BYTES + PICTURE_BYTES;
/// As the face verification services of the papers.
const MQUEUES: u32 = 28;
/// Largest file of pictures that is read.
const FILE_BYTES_MAX: u64 = 256 << 20;

struct Person<'a> {
    label: &'a [u8],
    stored: &'a [u8],
    second: &'a [u8],
}

struct Pictures<'a> {
    note: String,
    people: Vec<Person<'a>>,
}

/// Reads a file of pictures; `None` when it is none.
fn parse(file: &[u8]) -> Option<Pictures<'_>> {
    let rest = file.strip_prefix(MAGIC)?;
    let (count, rest) = rest.split_first_chunk::<4>()?;
    let (note_len, rest) = rest.split_first_chunk::<4>()?;
    let (note, rest) = rest.split_at_checked(u32::from_le_bytes(*note_len) as usize)?;
    let records = rest.chunks_exact(LABEL_BYTES + 2 * PICTURE_BYTES);
    let count = u32::from_le_bytes(*count) as usize;
    if count < 2 || records.len() != count || !records.remainder().is_empty() {
        return None;
    }
    let people = records.map(|record| {
        let (label, pictures) = record.split_at(LABEL_BYTES);
        let (stored, second) = pictures.split_at(PICTURE_BYTES);
        Person { label, stored, second }
    });
    let mut note = String::from_utf8_lossy(note).into_owned();
    note.retain(|c| !c.is_control() || c == '\n');
    Some(Pictures { note, people: people.collect() })
}

/// What is asked about whom.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Question {
    /// The second picture of the same person.
    Same,
    /// The second picture of somebody else.
    Other,
    /// A label that the database does not know.
    Unknown,
}

const QUESTIONS: [(Question, &str); 3] = [
    (Question::Same, "same face, with noise"),
    (Question::Other, "another face"),
    (Question::Unknown, "unknown label"),
];
const VERDICTS: [&str; 4] = ["no match", "match", "unknown label", "no database"];

/// Asks every question about every person, again and again.
struct Asking<'a> {
    people: &'a [Person<'a>],
    /// Answers by question and verdict.
    counts: [[u64; 4]; 3],
}

impl<'a> Asking<'a> {
    fn new(people: &'a [Person<'a>]) -> Self {
        Self { people, counts: [[0; 4]; 3] }
    }

    /// Number of different requests.
    fn different(&self) -> u64 {
        (QUESTIONS.len() * self.people.len()) as u64
    }

    fn question(&self, index: u64) -> (usize, usize) {
        let index = (index % self.different()) as usize;
        (index % QUESTIONS.len(), index / QUESTIONS.len())
    }
}

impl Workload for Asking<'_> {
    fn request(&mut self, index: u64, into: &mut Vec<u8>) {
        let (question, person) = self.question(index);
        let somebody_else = &self.people[(person + 1) % self.people.len()];
        let person = &self.people[person];
        into.extend_from_slice(person.label);
        match QUESTIONS[question].0 {
            Question::Same => into.extend_from_slice(person.second),
            Question::Other => into.extend_from_slice(somebody_else.second),
            Question::Unknown => {
                into.iter_mut().for_each(|byte| *byte = !*byte);
                into.extend_from_slice(person.second);
            }
        }
    }

    fn accepts(&mut self, index: u64, reply: &[u8]) -> bool {
        let Ok(bytes) = <[u8; 8]>::try_from(reply) else { return false };
        let (question, _) = self.question(index);
        let verdict = u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]) as usize;
        let distance = f32::from_le_bytes([bytes[4], bytes[5], bytes[6], bytes[7]]);
        if verdict >= VERDICTS.len() || !(0.0..=2048.0).contains(&distance) {
            return false;
        }
        self.counts[question][verdict] += 1;
        // Whether two pictures match is the method's affair; who is unknown is not.
        match QUESTIONS[question].0 {
            Question::Same | Question::Other => verdict < 2,
            Question::Unknown => verdict == 2,
        }
    }
}

/// What came out, besides the answers.
struct Figures {
    people: usize,
    mqueues: u32,
    window: usize,
    rate: f64,
    p50_us: f64,
}

pub(super) fn run(stage: &Stage<'_>) -> Result<Report, DemoError> {
    let file = read_pictures(stage)?;
    let pictures = parse(&file).ok_or_else(|| {
        let make = "make one with tools/train/make_faces.py";
        DemoError::Missing(format!("the file is not one of pictures: {make}"))
    })?;
    let memcached = Memcached::start()?;
    let hex = |label: &[u8]| label.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
    let entry = |person: &Person<'_>| format!("face:{}", hex(person.label));
    let entries = pictures.people.iter().map(|person| (entry(person), person.stored));
    let people = memcached.store(entries)?;
    let service = service(stage, &memcached);
    let mqueues = service.mqueues;
    let (server, udp, _) = stage.serve(service)?;

    let mut asking = Asking::new(&pictures.people);
    let load = Load {
        window: mqueues.min(64) as usize,
        requests: asking.different(),
        timeout: Duration::from_secs(10),
        cancel: stage.options.cancel.clone(),
        ..Load::default()
    };
    let bar = stage.progress("verifying faces", 3);
    let outcome = client::udp(udp, &load, &mut asking)?;
    stage.go_on()?;
    perfect("faces", &outcome)?;
    bar.inc(1);
    let mut again = Asking::new(&pictures.people);
    let one = stage.measure(udp, None, 1, &mut again)?;
    bar.inc(1);
    let many = stage.measure(udp, None, load.window, &mut again)?;
    bar.finish_and_clear();

    let accounts = accounts(&server);
    if !server.shutdown().is_clean() {
        return Err(DemoError::Wrong("the server did not end cleanly".to_owned()));
    }
    let (rate, p50_us) = (many.rate(), one.quantile_us(0.5));
    let figures = Figures { people, mqueues, window: load.window, rate, p50_us };
    let mut text = text(stage, &pictures, &asking, &figures);
    let _ = writeln!(text, "  {accounts}");
    Ok(Report { text, json: as_json(&pictures, &asking, &figures) })
}

fn service(stage: &Stage<'_>, memcached: &Memcached) -> Service {
    let mut service = Service::new("faces", Vec::new(), "faces");
    service.max_message_bytes = REQUEST_BYTES as u32;
    service.framing = Framing::Fixed(REQUEST_BYTES as u32);
    service.mqueues = stage.options.mqueues.unwrap_or(MQUEUES);
    let mut backend = Backend::new("db", Transport::Tcp, memcached.address(), Framing::Memcached);
    // The machine may be busy with other things; a demo is no place for tight limits.
    backend.timeout_ms = 2000;
    service.backends = vec![backend];
    service.request_timeout_ms = 5000;
    service
}

fn text(
    stage: &Stage<'_>,
    pictures: &Pictures<'_>,
    asking: &Asking<'_>,
    figures: &Figures,
) -> String {
    let screen = &stage.options.screen;
    let mut table = Table::new(&["asked", ">match", ">no match", ">unknown label"]);
    for ((_, name), counts) in QUESTIONS.iter().zip(&asking.counts) {
        table.row([*name, &counts[1].to_string(), &counts[0].to_string(), &counts[2].to_string()]);
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

fn as_json(pictures: &Pictures<'_>, asking: &Asking<'_>, figures: &Figures) -> Json {
    let answers = QUESTIONS.iter().zip(&asking.counts).map(|((_, name), counts)| {
        let [no_match, matches, unknown, _] = counts;
        json!({ "asked": name, "match": matches, "no_match": no_match, "unknown": unknown })
    });
    json!({
        "demo": "faces", "people": figures.people, "pictures": pictures.note,
        "answers": answers.collect::<Vec<_>>(),
        "rate": figures.rate, "p50_us": figures.p50_us,
    })
}

fn read_pictures(stage: &Stage<'_>) -> Result<Vec<u8>, DemoError> {
    let Some(path) = &stage.options.pictures else { return Ok(BUILT_IN.to_vec()) };
    let failed = |error| DemoError::Io { what: format!("read {}", path.display()), error };
    let bytes = fs::metadata(path).map_err(failed)?.len();
    if bytes > FILE_BYTES_MAX {
        let what =
            format!("{} has {bytes} bytes, at most {FILE_BYTES_MAX} are read", path.display());
        return Err(DemoError::Missing(what));
    }
    fs::read(path).map_err(failed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_built_in_pictures_are_whole_and_damaged_files_are_refused() {
        let pictures = parse(BUILT_IN).unwrap();
        assert!(
            pictures.people.len() >= 10 && pictures.note.contains("ynthetic"),
            "{}",
            pictures.note
        );
        for cut in [0, 5, 9, 13, 20, BUILT_IN.len() - 1] {
            assert!(parse(&BUILT_IN[..cut]).is_none(), "{cut}");
        }
    }

    #[test]
    fn questions_are_asked_in_turn_and_answers_checked() {
        let pictures = parse(BUILT_IN).unwrap();
        let mut asking = Asking::new(&pictures.people);
        let mut requests = Vec::new();
        for index in 0..asking.different() {
            let mut request = Vec::new();
            asking.request(index, &mut request);
            assert_eq!(request.len(), REQUEST_BYTES);
            requests.push(request);
        }
        assert_eq!(requests[0][..12], requests[1][..12]);
        assert_ne!(requests[0][12..], requests[1][12..]);
        assert_ne!(requests[0][..12], requests[2][..12]);
        let reply =
            |verdict: u32, distance: f32| [verdict.to_le_bytes(), distance.to_le_bytes()].concat();
        assert!(asking.accepts(0, &reply(1, 10.0)));
        assert!(asking.accepts(0, &reply(0, 2000.0)));
        assert!(asking.accepts(2, &reply(2, 0.0)));
        assert!(!asking.accepts(2, &reply(1, 0.0)));
        assert!(!asking.accepts(0, &reply(3, 0.0)));
        assert!(!asking.accepts(0, &reply(4, 0.0)));
        assert!(!asking.accepts(0, &reply(1, f32::NAN)));
        assert!(!asking.accepts(0, b"short"));
        assert_eq!(asking.counts[0], [1, 1, 0, 1]);
    }
}
