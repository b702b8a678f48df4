//! The stored result of a row: everything needed to publish it, to examine it, and to measure it again.

use std::io;
use std::path::{Path, PathBuf};

use serde::Serialize;
use serde_json::Value as Json;

use super::calibration::State;
use super::machine::Machine;
use super::pairs::{Figures, Pair, Pairs};
use super::show::{self, Shown, Style};
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
            must: style.threshold(row.must),
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
        }
    }

    /// The record as JSON.
    pub fn json(&self) -> Json {
        serde_json::to_value(self).expect("numbers, texts and lists")
    }

    /// Writes the record to `FOLDER/NAME.json`, through a temporary file: a reader never sees a partial one.
    pub fn write(&self, folder: &Path) -> io::Result<PathBuf> {
        std::fs::create_dir_all(folder)?;
        let path = folder.join(format!("{}.json", self.name));
        let beside = path.with_extension("json.new");
        std::fs::write(&beside, format!("{:#}\n", self.json()))?;
        std::fs::rename(&beside, &path)?;
        Ok(path)
    }
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
