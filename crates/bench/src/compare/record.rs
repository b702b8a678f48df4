//! The stored result of a row: everything needed to publish it, to examine it, and to measure it again.

use std::io;
use std::path::{Path, PathBuf};

use serde::Serialize;
use serde_json::{Value as Json, json};

use super::calibration::State;
use super::machine::Machine;
use super::pairs::{Pair, Pairs};
use super::show::{self, Figures, Shown, Style};
use super::statistics::Summary;
use super::suite::{Row, SideSpec};
use super::verdict::{Better, Combine, Verdict};
use super::{Cores, Schedule};

/// Version of the format of [`Record`].
pub const SCHEMA: u32 = 1;

/// The result of a row.
#[derive(Clone, Debug, Serialize)]
pub struct Record {
    /// [`SCHEMA`].
    pub schema: u32,
    /// The row's name.
    pub name: String,
    /// What is measured.
    pub what: String,
    /// Class of the client.
    pub class: String,
    /// The figure that is compared.
    pub metric: String,
    /// How two figures became a value.
    pub combine: Combine,
    /// Which way the value improves.
    pub better: Better,
    /// The required value.
    pub must: Option<f64>,
    /// The target value.
    pub aim: Option<f64>,
    /// The largest allowed value, of a row that compares a server with itself.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub most: Option<f64>,
    /// The result of the measurements for `must`.
    pub verdict: Verdict,
    /// Whether they prove that the aim is met.
    pub meets_aim: Option<bool>,
    /// Why there is no verdict, or the row is void.
    pub reason: Option<String>,
    /// Summary of the pairs' values; `None` for a void row.
    pub value: Option<Summary>,
    /// All of that as texts.
    pub shown: Shown,
    /// The candidate.
    pub a: SideRecord,
    /// The baseline.
    pub b: Option<SideRecord>,
    /// Why pairs were discarded.
    pub discarded: Vec<String>,
    /// Every pair that counts, with all its figures.
    pub pairs: Vec<Pair>,
    /// Number of pairs and durations.
    pub schedule: Schedule,
    /// Cores of the sides and the client.
    pub cores: Cores,
    /// Distance of the cores: `near`, `far` or `one core`, or the number of pairs of each.
    pub state: String,
    /// The median round trip of a cache line between the cores in nanoseconds.
    pub ping_pong_ns: Option<f64>,
    /// Whether only pairs with unshared server cores count.
    pub whole: bool,
    /// Number of counted pairs without unshared server cores.
    pub slowed_pairs: usize,
    /// The machine and the source.
    pub machine: Machine,
    /// What bounds the value.
    pub bound: String,
    /// What the next step would be.
    pub next: String,
    /// The earlier measurements of the row, the latest first: sources, value and verdict of each.
    pub history: Vec<Json>,
}

/// One side of a record.
#[derive(Clone, Debug, Serialize)]
pub struct SideRecord {
    /// The side as in the suite: its command line, and its load if it has its own.
    #[serde(flatten)]
    pub spec: SideSpec,
    /// The medians of its figures.
    pub figures: Figures,
}

impl Record {
    pub(super) fn new(
        row: &Row,
        schedule: Schedule,
        cores: Cores,
        pairs: Pairs,
        verdict: Verdict,
        reason: Option<String>,
    ) -> Self {
        // A void row publishes only its reason; the pairs stay for an examination.
        let kept = if verdict == Verdict::Void { &[][..] } else { &pairs.kept[..] };
        let value = Summary::of(&kept.iter().map(|pair| pair.value).collect::<Vec<_>>());
        let claim = row.claim();
        let side = |spec: &SideSpec, figures: Vec<&Figures>| {
            let mut spec = spec.clone();
            spec.load = row.load_on(&spec).cloned().filter(|_| spec.program.is_none());
            SideRecord { spec, figures: medians(&figures) }
        };
        let a = side(&row.a, kept.iter().map(|pair| &pair.a).collect());
        let bs = || kept.iter().filter_map(|pair| pair.b.as_ref()).collect();
        let b = row.b.as_ref().map(|b| side(b, bs()));
        let style = Style { metric: &row.metric, combine: row.combine(), better: claim.better };
        let figures = |side: &SideRecord| {
            let main = side.spec.figure.as_ref().unwrap_or(&row.metric);
            show::figures(&side.figures, main)
        };
        let shown = Shown {
            must: style.range_of(row.must, row.most),
            aim: style.threshold(row.aim),
            value: value.as_ref().map(|value| style.summary(value)).unwrap_or_default(),
            range: value.as_ref().map(|value| style.range(value)).unwrap_or_default(),
            a: figures(&a),
            b: b.as_ref().map(figures).unwrap_or_default(),
        };
        let ping_pongs = pairs.kept.iter().filter_map(|pair| pair.before.ping_pong_ns);
        Self {
            schema: SCHEMA,
            name: row.name.clone(),
            what: row.what.clone(),
            class: row.class.clone(),
            metric: row.metric.clone(),
            combine: row.combine(),
            better: claim.better,
            must: row.must,
            aim: row.aim,
            most: row.most,
            verdict,
            meets_aim: value.as_ref().and_then(|value| claim.meets_aim(value)),
            reason,
            value,
            shown,
            a,
            b,
            state: states(&pairs.kept),
            ping_pong_ns: Summary::of(&ping_pongs.collect::<Vec<_>>()).map(|all| all.median),
            whole: row.whole,
            slowed_pairs: pairs.slowed(),
            discarded: pairs.discarded,
            pairs: pairs.kept,
            schedule,
            cores,
            machine: Machine::here(),
            bound: row.bound.clone(),
            next: row.next.clone(),
            history: Vec::new(),
        }
    }

    /// The record as JSON.
    pub fn json(&self) -> Json {
        serde_json::to_value(self).expect("numbers, texts and lists")
    }

    /// Writes the record to `FOLDER/NAME.json`, through a temporary file: a reader never sees a partial one.
    ///
    /// What the file had becomes the history of the new record, so that no measurement hides an earlier one. A void
    /// record does not replace a measurement, but is added to its history.
    pub fn write(&self, folder: &Path) -> io::Result<PathBuf> {
        std::fs::create_dir_all(folder)?;
        let path = folder.join(format!("{}.json", self.name));
        let record = match earlier(&path)? {
            Some(earlier) => self.after(earlier),
            None => self.json(),
        };
        let beside = path.with_extension("json.new");
        std::fs::write(&beside, format!("{record:#}\n"))?;
        std::fs::rename(&beside, &path)?;
        Ok(path)
    }

    /// The content of the row's file, which had `earlier`.
    fn after(&self, mut earlier: Json) -> Json {
        let mut record = self.json();
        let mut history = match earlier["history"].take() {
            Json::Array(history) => history,
            _ => Vec::new(),
        };
        let replaces = self.verdict != Verdict::Void || earlier["verdict"] == "void";
        history.insert(0, past(if replaces { &earlier } else { &record }));
        let latest = if replaces { &mut record } else { &mut earlier };
        latest["history"] = history.into();
        latest.take()
    }
}

/// The record in a file; `None` if there is no file.
fn earlier(path: &Path) -> io::Result<Option<Json>> {
    let text = match std::fs::read_to_string(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        text => text?,
    };
    let record: Json = serde_json::from_str(&text)?;
    match record.is_object() {
        true => Ok(Some(record)),
        false => Err(io::Error::new(io::ErrorKind::InvalidData, "the file there is no record")),
    }
}

/// What the history of a row keeps of a measurement: its sources, its value and its verdict.
fn past(record: &Json) -> Json {
    let (machine, shown) = (&record["machine"], &record["shown"]);
    json!({
        "date": machine["date"], "commit": machine["commit"], "tree": machine["tree"],
        "dirty": machine["dirty"], "cpu": machine["cpu"], "cores": machine["cores"],
        "value": record["value"], "shown": { "value": shown["value"], "must": shown["must"] },
        "must": record["must"], "verdict": record["verdict"], "reason": record["reason"],
    })
}

/// `near`, `far`, or the number of pairs of each.
fn states(pairs: &[Pair]) -> String {
    let states = [State::OneCore, State::Near, State::Far];
    let count = |state| pairs.iter().filter(|pair| pair.after.state() == state).count();
    let seen: Vec<_> =
        states.map(|state| (state, count(state))).into_iter().filter(|s| s.1 > 0).collect();
    match &seen[..] {
        [(state, _)] => state.to_string(),
        _ => seen.iter().map(|(state, n)| format!("{state} in {n}")).collect::<Vec<_>>().join(", "),
    }
}

/// The median of each figure that every measurement has.
fn medians(all: &[&Figures]) -> Figures {
    let Some(first) = all.first() else { return Figures::new() };
    let median = |name: &String| {
        let values: Option<Vec<f64>> =
            all.iter().map(|figures| figures.get(name).copied()).collect();
        Some((name.clone(), Summary::of(&values?)?.median))
    };
    first.keys().filter_map(median).collect()
}

#[cfg(test)]
mod tests {
    use super::super::suite::Suite;
    use super::*;

    /// A record of a row whose pairs all had this value.
    fn measured(value: f64, verdict: Verdict, must: f64) -> Record {
        let text = format!(
            "schema = 1\n[[row]]\nname = \"history\"\nwhat = \"w\"\nmust = {must}\n\
             load = {{ class = \"T0\", workload = \"echo:64\", window = 8 }}\na = {{ server = \"x\" }}\n"
        );
        let row = Suite::parse(&text).unwrap().rows.remove(0);
        let cores = Cores { server: vec![0], client: vec![1], other: Vec::new() };
        let mut record = Record::new(&row, Schedule::QUICK, cores, Pairs::default(), verdict, None);
        record.value = Summary::of(&[value; 7]).filter(|_| verdict != Verdict::Void);
        record
    }

    #[test]
    fn earlier_measurements_stay_in_the_file_of_their_row() {
        let name = format!("serval-history-{}", std::process::id());
        let folder = std::env::temp_dir().join(name);
        let write = |value, verdict| {
            let path = measured(value, verdict, 2.0).write(&folder).unwrap();
            serde_json::from_str::<Json>(&std::fs::read_to_string(path).unwrap()).unwrap()
        };
        let past = |record: &Json| -> Vec<(String, Json)> {
            let history = record["history"].as_array().unwrap();
            let entry = |past: &Json| {
                (past["verdict"].as_str().unwrap().to_owned(), past["value"]["median"].clone())
            };
            history.iter().map(entry).collect()
        };
        assert!(past(&write(1.0, Verdict::Fail)).is_empty());
        let passed = write(3.0, Verdict::Pass);
        assert_eq!((&passed["verdict"], &passed["value"]["median"]), (&json!("pass"), &json!(3.0)));
        assert_eq!(past(&passed), [("fail".to_owned(), json!(1.0))]);
        // A void measurement replaces no other.
        let void = write(0.0, Verdict::Void);
        assert_eq!(void["value"]["median"], 3.0);
        let failed = write(1.5, Verdict::Fail);
        assert_eq!(failed["value"]["median"], 1.5);
        let names = |all: Vec<(String, Json)>| -> Vec<String> {
            all.into_iter().map(|(verdict, _)| verdict).collect()
        };
        assert_eq!(names(past(&failed)), ["pass", "void", "fail"]);
        assert!(failed["history"][0]["history"].is_null(), "histories do not nest");
        // A file that is no record is not replaced.
        std::fs::write(folder.join("history.json"), "[]").unwrap();
        assert!(measured(1.0, Verdict::Pass, 2.0).write(&folder).is_err());
        assert_eq!(std::fs::read_to_string(folder.join("history.json")).unwrap(), "[]");
        std::fs::remove_dir_all(&folder).unwrap();
    }
}
