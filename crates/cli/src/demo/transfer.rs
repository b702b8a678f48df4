//! `serval demo transfer`: a real file goes through a transfer engine in every way, and other implementations check what arrives. Then
//! it is served to clients, encrypted, by the engine and by the loop that it stands for.

mod file_service;
mod independent;
mod ways;

use std::fs::{self, File};
use std::io::Read as _;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use engine::topology::{
    Accelerator, AcceleratorKind, CpuPlacement, EngineSettings, Limits, STACK_KIB,
    Service as KernelService, Topology,
};
use serde_json::{Value as Json, json};
use server::Server;
use server::config::bytes_for_people;
use sha2::{Digest as _, Sha256};
use sys::local::LocalListener;
use transfer::{Engine, Service, ServiceLimits};

use super::{DemoError, Report, Stage};
use crate::kernel_stage;
use crate::screen::{Table, Tone};
use file_service::{CLIENTS, FileService, SERVERS};
use ways::{Checks, Ran, Runner};

/// The file: this program, which is large enough and on every machine.
const FILE: &str = "/proc/self/exe";
/// Bytes of it that are used at most, and with `--quick`.
const BYTES_MAX: usize = 32 << 20;
const QUICK_BYTES_MAX: usize = 4 << 20;
/// How often each server of files serves, and with `--quick`.
const ROUNDS: usize = 5;
const QUICK_ROUNDS: usize = 1;
/// Longest that a transfer may take.
const LIMIT: Duration = Duration::from_secs(60);
/// Longest reply of the kernel, and what comes before the bytes of a message to it.
const PIECE_BYTES: u32 = 16 << 10;
const PIECE_HEADER_BYTES: u32 = 48;

fn io(what: &str) -> impl FnOnce(std::io::Error) -> DemoError + use<> {
    let what = what.to_owned();
    move |error| DemoError::Io { what, error }
}

pub(super) fn run(stage: &Stage<'_>) -> Result<Report, DemoError> {
    let folder = Folder::new().map_err(io("make a folder for the engine's socket"))?;
    let limit = if stage.options.quick { QUICK_BYTES_MAX } else { BYTES_MAX };
    let mut content = Vec::new();
    let file = File::open(FILE).map_err(io("open this program's file"))?;
    (&file).take(limit as u64).read_to_end(&mut content).map_err(io("read this program's file"))?;
    let socket = folder.0.join("engine");
    let listener =
        LocalListener::bind(&socket).map_err(|error| DemoError::Wrong(error.to_string()))?;
    // As many threads as the loop has with the most clients, if there are as many cores; two at least, as by default.
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let most = CLIENTS[CLIENTS.len() - 1];
    let limits = ServiceLimits { threads: cores.clamp(2, most) as u32, ..ServiceLimits::default() };
    let engine = Engine::start(limits.of_engine()).map_err(io("start a transfer engine"))?;
    let engine = Arc::new(engine);
    let service = Service::with_engine(listener, limits, engine.clone())
        .map_err(io("start a transfer engine for other programs"))?;

    let key: [u8; 32] = Sha256::digest(content.len().to_le_bytes()).into();
    let runner = Runner { engine: &engine, folder: &folder.0, content: &content, key };
    let (ways, rows, mut total) = run_ways(stage, &runner)?;
    let mut files = FileService::new(&socket, &content, key);
    serve_all(stage, &mut files)?;
    total.join(files.checks);
    total.add(service.in_flight() == 0);

    let screen = &stage.options.screen;
    let title = format!(
        "{} of this program's file through a transfer engine",
        bytes_for_people(content.len() as u64)
    );
    let text = format!(
        "{}\n\n{}\n  Each way is one command; the thread that asked for it touched none of the bytes. Loopback TCP; {}.\n\n\
         {}\n\n{}\n  The loop is the simple one: read, AES-256-GCM by the engine's library, write, with one buffer and a thread for each client.\n  \
         The engine has {} threads. CPU time is that of everything but the clients.\n\n  \
         {} blocks, digests, counts and lengths were checked with other implementations than the engine's, {} were wrong.\n",
        screen.paint(Tone::Bold, &title),
        ways.render(screen),
        stage.cores(),
        screen.paint(Tone::Bold, "The file, encrypted, to clients"),
        files.table().render(screen),
        limits.threads,
        total.checked,
        total.wrong
    );
    let json: Json = json!({
        "demo": "transfer", "file_bytes": content.len(), "rows": rows,
        "file_service": files.json(), "engine_threads": limits.threads,
        "checked": total.checked, "wrong": total.wrong,
    });
    let failure = (total.wrong > 0)
        .then(|| format!("{} of {} checks found wrong bytes", total.wrong, total.checked));
    Ok(Report { text, json, chart: Some(files.chart(&stage.cores(), limits.threads)), failure })
}

/// A transfer of each kind.
fn run_ways(
    stage: &Stage<'_>,
    runner: &Runner<'_>,
) -> Result<(Table, Vec<Json>, Checks), DemoError> {
    let port = runner.folder.join("aes");
    let kernel = serve_kernel(port.clone())?;
    let ways = ways::all(runner.key, kernel_stage::behind(port));
    let bar = stage.progress("transferring", ways.len());
    let mut table = Table::new(&["", ">bytes", ">rate", ">checked", ">wrong"]);
    let (mut rows, mut total) = (Vec::new(), Checks::default());
    for way in &ways {
        stage.check_interrupted()?;
        let ran = runner.run(way, stage.options.corrupt);
        let Ran { checks, moved, took } = ran.map_err(io(&format!("transfer: {}", way.name)))?;
        let rate = moved.read as f64 / took.as_secs_f64();
        table.row([
            way.name.to_owned(),
            bytes_for_people(moved.read),
            format!("{}/s", bytes_for_people(rate as u64)),
            checks.checked.to_string(),
            checks.wrong.to_string(),
        ]);
        let stages = moved.stages.iter().map(|stage| {
            json!({
                "stage": stage.kind.name(), "bytes": stage.bytes, "made": stage.made,
                "digest": stage.digest.map(|digest| digest.to_string()),
                "found": stage.found.as_ref().map(|found| found.count),
            })
        });
        rows.push(json!({
            "way": way.name, "read_bytes": moved.read, "written_bytes": moved.written,
            "bytes_per_second": rate, "stages": stages.collect::<Vec<_>>(),
            "checked": checks.checked, "wrong": checks.wrong,
        }));
        total.join(checks);
        bar.inc(1);
    }
    bar.finish_and_clear();
    if !kernel.shutdown().is_clean() {
        return Err(DemoError::Wrong("the kernel's server did not end cleanly".to_owned()));
    }
    Ok((table, rows, total))
}

/// A server whose kernel encrypts with AES-256-CTR, behind a port in shared memory.
fn serve_kernel(port: PathBuf) -> Result<Server, DemoError> {
    let mut service = KernelService::new("aes", Vec::new(), "aes256_ctr");
    service.memory_ports = vec![port];
    service.max_message_bytes = PIECE_BYTES + PIECE_HEADER_BYTES;
    service.max_reply_bytes = PIECE_BYTES;
    let kind = AcceleratorKind::Cpu { placement: CpuPlacement::Worker, stack_kib: STACK_KIB };
    Ok(Server::start(Topology {
        engine: EngineSettings::default(),
        limits: Limits::default(),
        accelerators: vec![Accelerator { name: "acc0".to_owned(), kind }],
        services: vec![service],
        tenants: Vec::new(),
    })?)
}

/// Every server of files serves clients, in turns.
fn serve_all(stage: &Stage<'_>, files: &mut FileService<'_>) -> Result<(), DemoError> {
    let rounds = if stage.options.quick { QUICK_ROUNDS } else { ROUNDS };
    let bar = stage.progress("serving", rounds * CLIENTS.len() * SERVERS.len());
    for round in 0..rounds {
        for clients in CLIENTS {
            // None of them is always the first.
            let mut servers = SERVERS;
            servers.rotate_left(round % SERVERS.len());
            for server in servers {
                stage.check_interrupted()?;
                files.serve(server, clients).map_err(io("serve the file"))?;
                bar.inc(1);
            }
        }
    }
    bar.finish_and_clear();
    Ok(())
}

/// A folder that is removed.
struct Folder(PathBuf);

impl Folder {
    fn new() -> std::io::Result<Self> {
        let path =
            std::env::temp_dir().join(format!("serval-demo-transfer-{}", std::process::id()));
        fs::create_dir(&path)?;
        Ok(Self(path))
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        // What cannot be removed stays in the folder for temporary files.
        let _ = fs::remove_dir_all(&self.0);
    }
}
