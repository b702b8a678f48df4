//! `serval demo allreduce`: groups of 2 to 8 ranks sum vectors over TCP and shared memory; every element is compared with a serial calculation,
//! and all ranks have to get the same bits.

use std::fs;
use std::net::{SocketAddr, TcpListener};
use std::os::unix::fs::DirBuilderExt as _;
use std::path::PathBuf;
use std::thread;
use std::time::Duration;

use ::bench::units::span;
use collective::{CollectiveError, Element, Group, Member};
use serde_json::json;
use server::config::bytes_for_people;

use super::{DemoError, Report, Stage};
use crate::allreduce::{self, Array, Outcome, Plan};
use crate::screen::{Table, Tone};

/// Longest that a call may take, on a busy machine.
const LIMIT: Duration = Duration::from_secs(60);
/// The groups: ranks, bytes, calls, and calls with `--quick` (0: not then).
const GROUPS: [(usize, usize, usize, usize); 7] = [
    (2, 64, 5000, 100),
    (2, 1 << 20, 100, 1),
    (3, 4_000, 500, 20),
    (4, 64, 1000, 20),
    (4, 1 << 20, 40, 1),
    (7, 100_000, 40, 4),
    (8, 2 << 20, 10, 0),
];

pub(super) fn run(stage: &Stage<'_>) -> Result<Report, DemoError> {
    let kinds = [(false, Element::Float32), (true, Element::Float32), (true, Element::Int32)];
    let bar = stage.progress("summing", kinds.len() * GROUPS.len());
    let names = ["ranks", "over", "type", ">bytes", ">p50", ">p99", ">checked", ">wrong"];
    let (mut table, mut rows) = (Table::new(&names), Vec::new());
    let (mut checked, mut wrong) = (0, 0);
    for (ranks, bytes, calls, quick_calls) in GROUPS {
        for (is_shared, element) in kinds {
            stage.check_interrupted()?;
            let rounds = if stage.options.quick { quick_calls } else { calls };
            if rounds == 0 {
                continue;
            }
            let corrupt = stage.options.corrupt && ranks == 2 && bytes > 64;
            let plan = Plan { element, bytes, rounds, corrupt };
            let outcomes = group(ranks, is_shared, plan)
                .map_err(|error| DemoError::Wrong(error.to_string()))?;
            let is_identical = outcomes.iter().all(|other| other.digest == outcomes[0].digest);
            let sum = |part: fn(&Outcome) -> u64| outcomes.iter().map(part).sum::<u64>();
            // Whether the ranks are equal is one more check.
            let row_checked = sum(|outcome| outcome.checked) + 1;
            let row_wrong = sum(|outcome| outcome.wrong) + u64::from(!is_identical);
            let [p50, p99] = [0.5, 0.99].map(|share| {
                outcomes.iter().map(|outcome| outcome.quantile(share)).max().unwrap_or_default()
            });
            let shown = [p50, p99].map(|time| span(time.as_nanos() as f64));
            let transport = if is_shared { "shm" } else { "tcp" };
            let cells = [
                ranks.to_string(),
                transport.to_owned(),
                element.name().to_owned(),
                bytes_for_people(bytes as u64),
            ];
            let counts = [row_checked.to_string(), row_wrong.to_string()];
            table.row(cells.into_iter().chain(shown).chain(counts));
            rows.push(json!({
                "ranks": ranks, "transport": transport, "type": element.name(), "bytes": bytes, "rounds": rounds,
                "p50_us": p50.as_secs_f64() * 1e6, "p99_us": p99.as_secs_f64() * 1e6,
                "identical": is_identical, "sha256": outcomes[0].digest, "checked": row_checked, "wrong": row_wrong,
            }));
            checked += row_checked;
            wrong += row_wrong;
            bar.inc(1);
        }
    }
    bar.finish_and_clear();
    let screen = &stage.options.screen;
    let text = format!(
        "{}\n\n{}\n  Ranks are threads of this process, connected over loopback TCP or shared memory (shm). {checked} elements were compared\n  \
         with a serial calculation, {wrong} were wrong. All ranks of a group must get the same bits.\n",
        screen.paint(Tone::Bold, "All-reduce: every rank gets the sum over all ranks"),
        table.render(screen),
    );
    let json = json!({ "demo": "allreduce", "rows": rows, "checked": checked, "wrong": wrong });
    let failure = (wrong > 0).then(|| format!("{wrong} of {checked} elements are wrong"));
    Ok(Report { text, json, chart: None, failure })
}

/// All ranks of one group, a thread each.
fn group(ranks: usize, is_shared: bool, plan: Plan) -> Result<Vec<Outcome>, CollectiveError> {
    let failed = |error: std::io::Error| CollectiveError::Forming {
        name: "demo".to_owned(),
        why: error.to_string(),
    };
    let bind = |_| TcpListener::bind("127.0.0.1:0");
    let listeners: Vec<TcpListener> =
        (0..ranks).map(bind).collect::<Result<_, _>>().map_err(failed)?;
    let addresses: Vec<SocketAddr> =
        listeners.iter().map(TcpListener::local_addr).collect::<Result<_, _>>().map_err(failed)?;
    let folder = Folder::new().map_err(failed)?;
    thread::scope(|scope| {
        let start = |(rank, listener): (usize, TcpListener)| {
            let (addresses, folder) = (&addresses, &folder.0);
            scope.spawn(move || {
                let member = Member { name: "demo".to_owned(), ranks, rank };
                let plan = Plan { corrupt: plan.corrupt && rank == 0, ..plan };
                if is_shared {
                    measure(Group::connect_shared(&member, folder, LIMIT)?, &plan)
                } else {
                    measure(Group::connect(&member, &listener, addresses, LIMIT)?, &plan)
                }
            })
        };
        let threads: Vec<_> = listeners.into_iter().enumerate().map(start).collect();
        threads.into_iter().map(|thread| thread.join().expect("it does not panic")).collect()
    })
}

fn measure(mut group: Group, plan: &Plan) -> Result<Outcome, CollectiveError> {
    allreduce::run(&mut group, plan, &mut Array::on_host(plan.bytes))
}

/// A folder in which ranks find each other; it is removed.
struct Folder(PathBuf);

impl Folder {
    fn new() -> std::io::Result<Self> {
        let name = format!("serval-demo-allreduce-{}", std::process::id());
        let path = std::env::temp_dir().join(name);
        fs::DirBuilder::new().mode(0o700).create(&path)?;
        Ok(Self(path))
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        // What cannot be removed stays in the folder for temporary files.
        let _ = fs::remove_dir_all(&self.0);
    }
}
