//! A file that goes to a file in parts at the same time: the stream is one stream, and counts end at the first byte that was not written.

mod common;

use std::fs::{self, File};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};

use transfer::{Command, DigestKind, Engine, Key, Limits, Outcome, Source, StageKind};

const KEY: [u8; 32] = [5; 32];
/// A transfer has a part for each of these, and more than one from twice as many on.
const PART: usize = 4 << 20;
/// Plain bytes of a chunk.
const CHUNK: usize = 8 * 65_520;

struct Folder(PathBuf);

impl Folder {
    fn new() -> Self {
        static FOLDERS: AtomicUsize = AtomicUsize::new(0);
        let number = FOLDERS.fetch_add(1, Ordering::Relaxed);
        let name = format!("serval-transfer-parts-{}-{number}", std::process::id());
        let path = PathBuf::from("/dev/shm").join(name);
        fs::create_dir_all(&path).unwrap();
        Self(path)
    }

    fn file(&self, name: &str) -> File {
        let mut options = File::options();
        options.read(true).write(true).create(true).truncate(false);
        options.open(self.0.join(name)).unwrap()
    }

    fn source(&self, content: &[u8]) -> File {
        fs::write(self.0.join("source"), content).unwrap();
        self.file("source")
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn content(bytes: usize) -> Vec<u8> {
    (0..bytes).map(|at| (at * 13 + at / 249 + at / 65_521) as u8).collect()
}

fn engine(threads: u32) -> Engine {
    Engine::start(Limits { threads, ..Limits::default() }).unwrap()
}

fn run(engine: &Engine, command: Command) -> Outcome {
    engine.submit(command).unwrap().wait()
}

#[test]
fn parts_make_one_stream() {
    let folder = Folder::new();
    for (threads, bytes) in [
        (2, 2 * PART),
        (3, 3 * PART - 1),
        (3, 3 * PART + 1),
        // The last part has one byte, and one record.
        (2, 17 * CHUNK + 1),
        (2, 16 * CHUNK),
        (4, 24 * CHUNK + 65_520),
        (1, 2 * PART),
    ] {
        let plain = content(bytes + 100);
        let (source, sink) = (folder.source(&plain), folder.file("sink"));
        sink.set_len(0).unwrap();
        let range = Source::file(source, 100, None).seal(Key::new(KEY));
        let outcome = run(&engine(threads), range.file(sink, 7));
        assert_eq!(outcome.result, Ok(()));
        let sealed = fs::read(folder.0.join("sink")).unwrap().split_off(7);
        let counts = (outcome.report.read as usize, outcome.report.written as usize);
        assert_eq!(counts, (bytes, sealed.len()));
        let [stage] = &outcome.report.stages[..] else { panic!("{:?}", outcome.report.stages) };
        assert_eq!((stage.bytes, stage.made), (outcome.report.read, outcome.report.written));
        assert!(stage.finished && matches!(stage.kind, StageKind::Seal(_)));
        let opened = common::open(&KEY, &sealed).expect("one whole stream");
        assert!(opened == plain[100..], "{threads} threads, {bytes} bytes");
    }
}

#[test]
fn a_file_that_is_shortened_ends_all_parts_with_an_exact_count() {
    let folder = Folder::new();
    let plain = content(4 * PART);
    for end in [0, PART + 1, 3 * PART] {
        let sink = folder.file("sink");
        sink.set_len(0).unwrap();
        let source = folder.source(&plain);
        let range = Source::file(source, 0, Some(4 * PART as u64)).seal(Key::new(KEY));
        // It is as long as the range says when the transfer is asked for, or not: that makes no difference.
        folder.file("source").set_len(end as u64).unwrap();
        let outcome = run(&engine(4), range.file(sink, 0));
        assert_eq!(outcome.result.unwrap_err().name(), "file_ended");
        // What was counted is the begin of a stream: whole records.
        let written = outcome.report.written as usize;
        let records = end / 65_520;
        assert_eq!(outcome.report.read as usize, records * 65_520);
        assert_eq!(written, if records == 0 { 0 } else { 48 + records * 65_536 });
        let stream = fs::read(folder.0.join("sink")).unwrap();
        assert!(common::open_begin(&KEY, &stream[..written]) == plain[..records * 65_520]);
    }
}

#[test]
fn crc32c_is_that_of_all_parts_and_of_none_if_one_fails() {
    let folder = Folder::new();
    for (threads, bytes) in [(2, 2 * PART), (3, 3 * PART + 1), (2, 17 * CHUNK + 1), (1, 2 * PART)] {
        let plain = content(bytes + 100);
        let crc = crc32c::crc32c(&plain[100..]).to_be_bytes();
        let source = || Source::file(folder.source(&plain), 100, None).digest(DigestKind::Crc32c);
        let sink = || {
            let sink = folder.file("sink");
            sink.set_len(0).unwrap();
            sink
        };
        let engine = engine(threads);
        let counts = |outcome: &Outcome| {
            assert_eq!(outcome.result, Ok(()));
            assert_eq!(outcome.report.digest().unwrap().bytes(), crc);
            let stages = outcome.report.stages.iter();
            stages.map(|stage| (stage.bytes as usize, stage.finished)).collect::<Vec<_>>()
        };
        let sealed = run(&engine, source().seal(Key::new(KEY)).file(sink(), 0));
        assert_eq!(counts(&sealed), [(bytes, true); 2]);
        let stream = fs::read(folder.0.join("sink")).unwrap();
        assert!(common::open(&KEY, &stream).unwrap() == plain[100..]);
        let copied = run(&engine, source().digest(DigestKind::Crc32c).file(sink(), 0));
        assert_eq!(counts(&copied), [(bytes, true); 2]);
        assert!(fs::read(folder.0.join("sink")).unwrap() == plain[100..]);
        let null = || File::options().write(true).open("/dev/null").unwrap();
        assert_eq!(counts(&run(&engine, source().file(null(), 0))), [(bytes, true)]);
        // The whole range is asked for, and the file ends before it, in the last part.
        let source = Source::file(folder.file("source"), 0, Some(bytes as u64 + 101));
        let failed = run(&engine, source.digest(DigestKind::Crc32c).file(sink(), 0));
        assert_eq!(failed.result.unwrap_err().name(), "file_ended");
        assert_eq!(failed.report.written as usize, plain.len());
        let [stage] = &failed.report.stages[..] else { panic!("{:?}", failed.report.stages) };
        assert_eq!((stage.finished, stage.digest), (false, None));
    }
}

#[test]
fn other_digests_need_the_bytes_in_their_order() {
    let folder = Folder::new();
    let (engine, plain) = (engine(2), content(2 * PART));
    for kind in DigestKind::ALL {
        // CRC32C of another stage changes nothing.
        let source = Source::file(folder.source(&plain), 0, None).digest(kind);
        let source = source.digest(DigestKind::Crc32c).seal(Key::new(KEY));
        let outcome = run(&engine, source.file(folder.file("sink"), 0));
        assert_eq!(outcome.result, Ok(()));
        let expected = common::digest_of(kind, &plain);
        assert_eq!(outcome.report.digest().unwrap().bytes(), expected);
    }
}

#[test]
fn another_transfer_keeps_its_thread() {
    let folder = Folder::new();
    let (engine, plain) = (engine(2), content(2 * PART));
    folder.source(&plain);
    // Beside a transfer that waits for its peer.
    let (ours, theirs) = UnixStream::pair().unwrap();
    let waits = engine.submit(Source::socket(ours, None).file(folder.file("other"), 0)).unwrap();
    let source = Source::file(folder.file("source"), 0, None).seal(Key::new(KEY));
    assert_eq!(run(&engine, source.file(folder.file("sink"), 0)).result, Ok(()));
    let sealed = fs::read(folder.0.join("sink")).unwrap();
    assert!(common::open(&KEY, &sealed).unwrap() == plain);
    drop(theirs);
    assert_eq!(waits.wait().result, Ok(()));
}
