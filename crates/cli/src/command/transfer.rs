//! `serval transfer SOURCE SINK`.

mod list;
mod place;
mod sink;

use std::fs::File;
use std::os::fd::AsFd as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use clap::{Args, Subcommand};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use mqueue::codes;
use place::Place;
use serde_json::json;
use sink::Sink;
use sys::descriptors::reset_on_close;
use sys::private_file::open_regular;
use transfer::service::message::Answer;
use transfer::{
    Cipher, Client, Command, Compression, DigestKind, Engine, ExpandLimits, FileRange, Format, Key,
    Limits, SearchKind, SearchSpec, StageSpec, check_order,
};

use super::bench::time;
use super::{Failure, cancel_on_signal};
use crate::kernel_stage;
use crate::screen::Screen;
use server::config::bytes_for_people;

pub(super) const HELP: &str = "\
SOURCE and SINK are files or connections. tcp://HOST:PORT and unix://PATH connect;
listen://IP:PORT and unix-listen://PATH accept one connection (port 0: a free one, which is
printed). As SINK, discard:// drops the bytes. The bytes go through the stages
in one pass: --open decrypts what SOURCE has, --expand expands it, --digest prints a digest of
the plain bytes (give it again for another one), --find and --grep search them, --compress
compresses and --seal encrypts what SINK gets. --open and --seal use AES-256-GCM, or the
cipher of --cipher (docs/transfer.md has the formats). KEYFILE holds 32 bytes, or 64
hexadecimal digits; only its owner may have access to it. A file as SINK is created, or
replaced when all bytes have arrived; what arrived of a transfer that failed is in SINK.part.

Examples:
  serval transfer listen://0.0.0.0:9000 copy.iso --digest sha256
  serval transfer image.iso tcp://backup:9000 --digest sha256
  (umask 077; head -c 32 /dev/urandom >key); serval transfer image.iso tcp://backup:9000 --seal key
  serval transfer listen://0.0.0.0:9000 copy.iso --open key
  serval transfer image.iso tcp://backup:9000 --offset 4096 --bytes 1048576 --json
  serval transfer image.iso tcp://backup:9000 --engine /run/serval/transfer
  serval transfer image.iso discard:// --digest md5 --digest sha256
  serval transfer image.iso sealed --seal key --cipher aes-256-ctr --seal-on shm:///run/aes
  serval transfer ls --engine /run/serval/transfer

Exit codes: 0 all bytes were transferred, 1 not all (the numbers are printed), 2 the command line
is wrong.";

/// How often the progress bar moves, and signals are looked at.
const TICK: Duration = Duration::from_millis(50);
/// How long an engine may not answer.
const ENGINE_SILENCE_MAX: Duration = Duration::from_secs(10);

#[derive(Args, Debug)]
#[command(args_conflicts_with_subcommands = true, subcommand_negates_reqs = true)]
pub(super) struct Options {
    #[command(subcommand)]
    verb: Option<Verb>,

    /// Where the bytes come from: a file, or a connection as below
    #[arg(value_name = "SOURCE", required = true)]
    source: Option<Place>,

    /// Where they go: a file, a connection as below, or discard://
    #[arg(value_name = "SINK", required = true)]
    sink: Option<Place>,

    /// A further file that follows SOURCE in the stream, whole (up to 7 times)
    #[arg(long, value_name = "FILE")]
    then: Vec<PathBuf>,

    /// Decrypt what the source has with the key of this file; nothing of a record that does not verify goes on
    #[arg(long, value_name = "KEYFILE")]
    open: Option<PathBuf>,

    /// Expand what the source has: gzip or zstd
    #[arg(long, value_name = "FORMAT", value_parser = format)]
    expand: Option<Format>,

    /// Bytes that --expand may make at most
    #[arg(long, value_name = "N", default_value_t = ExpandLimits::default().bytes, requires = "expand")]
    expand_bytes: u64,

    /// Bytes that --expand may make for each byte that it takes, once it has made a MiB
    #[arg(long, value_name = "N", default_value_t = ExpandLimits::default().ratio, requires = "expand")]
    expand_ratio: u32,

    /// Count how often a text occurs in the plain bytes
    #[arg(long, value_name = "TEXT")]
    find: Option<String>,

    /// Count the lines of the plain bytes that match a regular expression, in linear time
    #[arg(long, value_name = "EXPRESSION")]
    grep: Option<String>,

    /// Print the offsets of the first N that --find or --grep find
    #[arg(long, value_name = "N", default_value_t = 0)]
    matches: u16,

    /// Give the plain bytes to a service, piece by piece: the URL of its port
    #[arg(long, value_name = "URL", value_parser = shared_memory, conflicts_with = "engine")]
    kernel: Option<PathBuf>,

    /// Compress what the sink gets: gzip or zstd, with a level from 1 to 9 as in zstd:9
    #[arg(long, value_name = "FORMAT")]
    compress: Option<Compression>,

    #[arg(long, value_name = "KIND", value_parser = digest, help = digest_help())]
    digest: Vec<DigestKind>,

    /// Encrypt what the sink gets with the key of this file
    #[arg(long, value_name = "KEYFILE")]
    seal: Option<PathBuf>,

    /// Let a service with the kernel aes256_ctr encrypt: the URL of its port
    #[arg(long, value_name = "URL", value_parser = shared_memory, requires = "seal", conflicts_with = "engine")]
    seal_on: Option<PathBuf>,

    /// The cipher of --open and --seal: aes-256-gcm, or aes-256-ctr, which notices no change
    #[arg(long, value_name = "CIPHER", default_value = "aes-256-gcm", value_parser = cipher)]
    cipher: Cipher,

    /// The first byte of the range in the file that is the source, or else in the one that is the sink
    #[arg(long, value_name = "BYTE", default_value_t = 0)]
    offset: u64,

    /// Length of the range [default: to the end of the file or of the stream]
    #[arg(long, value_name = "N")]
    bytes: Option<u64>,

    /// Succeed when the sink, a file, and its name are on the disk
    #[arg(long)]
    sync: bool,

    /// Let the engine at this socket do it (transfer.socket of a running server), instead of this process
    #[arg(long, value_name = "SOCKET")]
    engine: Option<PathBuf>,

    /// How long nothing may move, and how long connecting may take
    #[arg(long, value_name = "TIME", default_value = "30s", value_parser = time)]
    stall: Duration,
}

#[derive(Subcommand, Debug)]
enum Verb {
    /// List the transfers in flight of an engine
    #[command(after_help = "Examples:\n  serval transfer ls --engine /run/serval/transfer")]
    Ls(list::Options),
}

fn digest(text: &str) -> Result<DigestKind, String> {
    DigestKind::named(text).ok_or_else(|| format!("must be {}", codes::digest::TABLE.one_of()))
}

fn digest_help() -> String {
    format!("Print a digest of the plain bytes: {}", codes::digest::TABLE.one_of())
}

fn cipher(text: &str) -> Result<Cipher, String> {
    Cipher::named(text).ok_or_else(|| format!("must be {}", codes::cipher::TABLE.one_of()))
}

fn shared_memory(text: &str) -> Result<PathBuf, String> {
    let path = text.strip_prefix("shm://").filter(|path| path.starts_with('/'));
    path.map(PathBuf::from)
        .ok_or_else(|| "must be shm:///PATH, as `serval serve` prints it".to_owned())
}

fn format(text: &str) -> Result<Format, String> {
    Format::named(text).ok_or_else(|| format!("must be {}", codes::format::TABLE.one_of()))
}

pub(super) fn run(screen: &Screen, options: &Options) -> Result<(), Failure> {
    if let Some(Verb::Ls(options)) = &options.verb {
        return list::run(screen, options);
    }
    let (Some(source_place), Some(sink_place)) = (&options.source, &options.sink) else {
        return Err(Failure::Usage("a transfer has a SOURCE and a SINK".to_owned()));
    };
    let stages = stages(options)?;
    let measure = Measure::of(&stages);
    let cancel = Arc::new(AtomicBool::new(false));
    cancel_on_signal(cancel.clone()).map_err(Failure::run)?;
    let mut expected = options.bytes;
    let mut source_file = None;
    if let Place::File(path) = source_place {
        let (file, found) = open_regular(path)
            .map_err(|error| Failure::Run(format!("cannot read {}: {error}", path.display())))?;
        // Files of /proc have content and no length.
        let rest = (found.len() > 0).then(|| found.len().saturating_sub(options.offset));
        expected = expected.or(rest);
        source_file = Some(file);
    }
    let further = further_files(options, &mut expected)?;
    let sink_offset = if source_file.is_some() { 0 } else { options.offset };
    let mut kept = None;
    if let Place::File(path) = sink_place {
        kept = Some(Sink::open(path, sink_offset)?);
    }
    let open = |place: &Place| place.open(screen, options.stall, &cancel);
    let source = match source_file {
        Some(file) => transfer::Place::File(file.into(), options.offset),
        None if *source_place == Place::Discard => {
            return Err(Failure::Usage("discard:// can only be the SINK".to_owned()));
        }
        None => transfer::Place::Socket(open(source_place)?.into()),
    };
    let mut socket = None;
    let sink = match &kept {
        Some(sink) => transfer::Place::File(sink.file()?.into(), sink_offset),
        None if *sink_place == Place::Discard => {
            let null = File::options().write(true).open("/dev/null").map_err(Failure::run)?;
            transfer::Place::File(null.into(), 0)
        }
        None => {
            let opened = open(sink_place)?;
            // If this program ends before all is sent, the peer gets a reset and not the end of a stream.
            if !mutants::on("end_in_order_after_failure") {
                reset_on_close(opened.as_fd(), true).map_err(Failure::run)?;
            }
            let copy = opened.try_clone().map_err(Failure::run)?;
            socket = Some(opened);
            transfer::Place::Socket(copy)
        }
    };
    let command = Command::new(source, options.bytes, stages, sink).followed_by(further);
    let began = Instant::now();
    let command = command.stall(options.stall);
    let command = if options.sync { command.sync() } else { command };
    let bar = progress_bar(screen, expected);
    let outcome = match &options.engine {
        Some(path) => execute_elsewhere(path, command, (&bar, measure), &cancel)?,
        None => execute_here(command, (&bar, measure), &cancel)?,
    };
    bar.finish_and_clear();
    if let Some(why) = &outcome.why {
        return Err(failed(why, &outcome.report, kept.as_ref()));
    }
    if let Some(socket) = socket {
        reset_on_close(socket.as_fd(), false).map_err(Failure::run)?;
        // The peer reads the end of the stream. It may have closed by now.
        socket.end();
    }
    kept.map_or(Ok(()), |sink| sink.finish(options.sync))?;
    report(screen, &outcome.report, began.elapsed());
    Ok(())
}

/// The files of --then. Adds their lengths to the expected one.
fn further_files(options: &Options, expected: &mut Option<u64>) -> Result<Vec<FileRange>, Failure> {
    if !options.then.is_empty() && !matches!(options.source, Some(Place::File(_))) {
        return Err(Failure::Usage("--then follows a file: SOURCE has to be one".to_owned()));
    }
    let open = |path: &PathBuf| {
        let (file, found) = open_regular(path)
            .map_err(|error| Failure::Run(format!("cannot read {}: {error}", path.display())))?;
        *expected = expected.map(|bytes| bytes + found.len());
        Ok(FileRange { file: file.into(), offset: 0, bytes: None })
    };
    options.then.iter().map(open).collect()
}

/// The stages in the one order that makes sense.
fn stages(options: &Options) -> Result<Vec<StageSpec>, Failure> {
    let (open, seal) = (options.open.as_deref(), options.seal.as_deref());
    let [open, seal] = [open.map(read_key).transpose()?, seal.map(read_key).transpose()?];
    let open = open.map(|key| StageSpec::Open(options.cipher, key));
    let seal_on = options.seal_on.clone().map(kernel_stage::behind);
    if seal_on.is_some() && options.cipher != Cipher::Aes256Ctr {
        let why = "--seal-on makes a stream of aes-256-ctr: give --cipher aes-256-ctr as well";
        return Err(Failure::Usage(why.to_owned()));
    }
    let seal = seal.map(|key| match seal_on {
        Some(kernel) => StageSpec::SealOn(kernel, key),
        None => StageSpec::Seal(options.cipher, key),
    });
    let limits = ExpandLimits { bytes: options.expand_bytes, ratio: options.expand_ratio };
    let expand = options.expand.map(|format| StageSpec::Expand(format, limits));
    let digests = options.digest.iter().copied().map(StageSpec::Digest);
    let kernel =
        options.kernel.clone().map(|path| StageSpec::Kernel(kernel_stage::behind(path), [0; 32]));
    let compress = options.compress.map(StageSpec::Compress);
    let search = |kind, pattern: &String| {
        let pattern = pattern.clone().into_bytes();
        StageSpec::Search(SearchSpec { kind, pattern, offsets: options.matches })
    };
    let find = options.find.iter().map(|text| search(SearchKind::Text, text));
    let grep = options.grep.iter().map(|expression| search(SearchKind::Lines, expression));
    let plain = open.into_iter().chain(expand).chain(digests).chain(find).chain(grep);
    let stages: Vec<StageSpec> = plain.chain(kernel).chain(compress).chain(seal).collect();
    check_order(&stages).map_err(Failure::Usage)?;
    Ok(stages)
}

/// How a transfer ended, here or in another process.
struct Ended {
    /// Why it ended early.
    why: Option<String>,
    report: transfer::Report,
}

/// What the progress bar shows. Its whole length is that of the source.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Measure {
    /// Bytes that the sink has.
    Written,
    /// Bytes that were read, because others are written.
    Read,
}

impl Measure {
    fn of(stages: &[StageSpec]) -> Self {
        let observes =
            |stage: &StageSpec| matches!(stage, StageSpec::Digest(_) | StageSpec::Search(_));
        if stages.iter().all(observes) { Self::Written } else { Self::Read }
    }

    fn position(self, read: u64, written: u64) -> u64 {
        match self {
            Self::Written => written,
            Self::Read => read,
        }
    }
}

/// A progress bar on a terminal.
fn progress_bar(screen: &Screen, expected: Option<u64>) -> ProgressBar {
    let target =
        if screen.json { ProgressDrawTarget::hidden() } else { ProgressDrawTarget::stderr() };
    let bar = ProgressBar::with_draw_target(expected, target);
    let template = match expected {
        Some(_) => "  [{bar:30}] {bytes}/{total_bytes} {bytes_per_sec} {eta}",
        None => "  {spinner} {bytes} {bytes_per_sec}",
    };
    let style = ProgressStyle::with_template(template);
    bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()).progress_chars("=> "));
    bar
}

/// Runs the command on an engine of this process.
fn execute_here(
    command: Command,
    (bar, measure): (&ProgressBar, Measure),
    cancel: &AtomicBool,
) -> Result<Ended, Failure> {
    let engine = Engine::start(Limits::default()).map_err(Failure::run)?;
    let transfer = engine.submit(command).map_err(Failure::run)?;
    loop {
        if let Some(outcome) = transfer.wait_for(TICK) {
            let why = outcome.result.err().map(|error| error.to_string());
            return Ok(Ended { why, report: outcome.report });
        }
        let progress = transfer.progress();
        bar.set_position(measure.position(progress.read(), progress.written()));
        if cancel.load(Ordering::Relaxed) {
            transfer.cancel();
        }
    }
}

/// Runs it on the engine of a server.
fn execute_elsewhere(
    path: &Path,
    command: Command,
    (bar, measure): (&ProgressBar, Measure),
    cancel: &AtomicBool,
) -> Result<Ended, Failure> {
    let mut client = Client::connect(path).map_err(Failure::run)?;
    let id = client.submit(command).map_err(Failure::run)?;
    let mut last_answer = Instant::now();
    loop {
        match client.next(TICK).map_err(Failure::run)? {
            Some(Answer::Ended { result, report, .. }) => {
                return Ok(Ended { why: result.err().map(|error| error.text), report });
            }
            Some(Answer::Progress { read, written, .. }) => {
                bar.set_position(measure.position(read, written));
                last_answer = Instant::now();
            }
            Some(Answer::List { .. }) => {}
            None if last_answer.elapsed() > ENGINE_SILENCE_MAX => {
                return Err(Failure::Run(format!(
                    "the transfer engine at {} does not answer",
                    path.display()
                )));
            }
            None if cancel.load(Ordering::Relaxed) => client.cancel(id).map_err(Failure::run)?,
            None => client.ask_progress(id).map_err(Failure::run)?,
        }
    }
}

fn failed(why: &str, report: &transfer::Report, sink: Option<&Sink>) -> Failure {
    let (read, written) = (report.read, report.written);
    let mut text =
        format!("{why}; {read} bytes were read from the source, {written} reached the sink");
    if let Some(part) = sink.and_then(Sink::left) {
        text.push_str(&format!(" and are in {}", part.display()));
    }
    Failure::Run(text)
}

fn report(screen: &Screen, report: &transfer::Report, took: Duration) {
    let seconds = took.as_secs_f64();
    let rate = report.written as f64 / seconds.max(1e-9);
    let digests: Vec<_> = report.stages.iter().filter_map(|stage| stage.digest).collect();
    let digests = || digests.iter().map(|digest| (digest.kind().name(), digest.to_string()));
    let found = || {
        let stages = report.stages.iter();
        stages.filter_map(|stage| Some((stage.kind.name(), stage.found.as_ref()?)))
    };
    screen.show(
        || {
            let moved = bytes_for_people(report.written);
            let rate = bytes_for_people(rate as u64);
            let mut text = format!("{} bytes ({moved}) in {seconds:.2} s, {rate}/s\n", report.written);
            for (kind, value) in digests() {
                text.push_str(&format!("{kind} {value}\n"));
            }
            for (name, found) in found() {
                text.push_str(&format!("{name} {}\n", found.count));
                found.offsets.iter().for_each(|at| text.push_str(&format!("  at byte {at}\n")));
            }
            text
        },
        || {
            let stage = |stage: &transfer::StageReport| {
                let mut shown = json!({
                    "name": stage.kind.name(), "bytes": stage.bytes, "made_bytes": stage.made,
                });
                if let Some(found) = &stage.found {
                    shown["count"] = found.count.into();
                    shown["offsets"] = found.offsets.clone().into();
                }
                shown
            };
            json!({
                "read_bytes": report.read, "written_bytes": report.written, "seconds": seconds,
                "bytes_per_second": rate, 
                "digest": digests().next().map(|(kind, value)| json!({ "kind": kind, "value": value })),
                "digests": digests().map(|(kind, value)| json!({ "kind": kind, "value": value })).collect::<Vec<_>>(),
                "stages": report.stages.iter().map(stage).collect::<Vec<_>>(),
            })
        },
    );
}

/// A key file, which no other user may have access to.
pub(super) fn read_key(path: &Path) -> Result<Key, Failure> {
    let unusable = |why: String| Failure::Usage(format!("the key file {} {why}", path.display()));
    let (file, found) =
        open_regular(path).map_err(|error| unusable(format!("cannot be read: {error}")))?;
    if found.mode() & 0o077 != 0 && !mutants::on("use_open_key") {
        return Err(unusable("can be read by other users: run chmod 600 on it".to_owned()));
    }
    let key = Key::read(file).map_err(|error| unusable(format!("cannot be read: {error}")))?;
    let wrong = || unusable("has to contain 32 bytes, or 64 hexadecimal digits".to_owned());
    key.ok_or_else(wrong)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_progress_bar_ends_with_the_source() {
        let digest = StageSpec::Digest(DigestKind::Md5);
        let seal = StageSpec::Seal(Cipher::Aes256Gcm, Key::new([0; 32]));
        let compress = StageSpec::Compress(Format::Zstd.into());
        for (stages, expected) in [
            (vec![], 7),
            (vec![digest.clone()], 7),
            (vec![digest.clone(), compress], 10),
            (vec![StageSpec::Expand(Format::Gzip, ExpandLimits::default()), digest], 10),
            (vec![seal], 10),
        ] {
            assert_eq!(Measure::of(&stages).position(10, 7), expected, "{stages:?}");
        }
    }
}
