//! A file that another program overwrites while it is sealed, sent and digested: each byte is read once, so what arrives opens, and its digest is the
//! one that is reported, whichever bytes were read.

mod common;
#[path = "common/folder.rs"]
mod folder;

use std::fs::{self, File};
use std::io::Read as _;
use std::os::unix::fs::FileExt as _;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;

use folder::Folder;
use transfer::{Cipher, Command, DigestKind, Engine, Key, Limits, Place, Report, StageSpec};

const KEY: [u8; 32] = [5; 32];
/// Of a file that is sent, many times as long as what a transfer holds.
const SENT: usize = 4 << 20;
/// Of one that is done in parts.
const IN_PARTS: usize = 9 << 20;

/// Both contents of the file: a byte is either of them.
fn contents(bytes: usize) -> [Vec<u8>; 2] {
    [7u8, 8].map(|salt| (0..bytes).map(|at| (at * 13 + at / 249) as u8 ^ salt << 4).collect())
}

fn create(folder: &Folder, name: &str) -> File {
    let mut options = File::options();
    options.read(true).write(true).create(true).truncate(true);
    options.open(folder.join(name)).unwrap()
}

/// Checks what has arrived against what was reported, and where its bytes come from.
fn check(cipher: Cipher, stream: &[u8], report: &Report, contents: &[Vec<u8>; 2]) -> Vec<u8> {
    let plain = match cipher {
        Cipher::Aes256Gcm => common::open(&KEY, stream).expect("every record opens"),
        Cipher::Aes256Ctr => common::open_ctr(&KEY, stream).expect("it has its header"),
    };
    assert_eq!((plain.len(), report.written as usize), (contents[0].len(), stream.len()));
    let others = plain.iter().zip(&contents[0]).zip(&contents[1]);
    let other = others.clone().position(|((got, one), two)| got != one && got != two);
    assert_eq!(other, None, "a byte that the file has never had");
    let digests = report.stages.iter().filter_map(|stage| stage.digest);
    for reported in digests {
        let expected = common::digest_of(reported.kind(), &plain);
        assert_eq!(reported.bytes(), expected, "{}", reported.kind().name());
    }
    plain
}

/// Digests that go chunk by chunk, those that several transfers share, and both ciphers.
fn cases() -> Vec<(Cipher, Vec<StageSpec>)> {
    let mut cases = Vec::new();
    for cipher in Cipher::ALL {
        for digests in [
            vec![],
            vec![DigestKind::Crc32c],
            vec![DigestKind::Md5],
            vec![DigestKind::Crc32c, DigestKind::Sha256],
        ] {
            let mut stages: Vec<StageSpec> = digests.into_iter().map(StageSpec::Digest).collect();
            stages.push(StageSpec::Seal(cipher, Key::new(KEY)));
            cases.push((cipher, stages));
        }
    }
    cases
}

#[test]
fn a_file_that_is_replaced_in_the_middle_is_sent_as_it_was_read() {
    let folder = Folder::new("replaced");
    let contents = contents(SENT);
    let engine = Engine::start(Limits::default()).unwrap();
    for (cipher, stages) in cases() {
        let file = create(&folder, "source");
        file.write_all_at(&contents[0], 0).unwrap();
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let (source, sink) =
            (Place::File(file.try_clone().unwrap().into(), 0), Place::Socket(ours.into()));
        let transfer = engine.submit(Command::new(source, None, stages, sink)).unwrap();
        // The socket is full when the transfer has sent a small part: the peer reads on when all of the file is another one.
        let mut stream = vec![0; 1000];
        theirs.read_exact(&mut stream).unwrap();
        file.write_all_at(&contents[1], 0).unwrap();
        theirs.read_to_end(&mut stream).unwrap();
        let outcome = transfer.wait();
        assert_eq!(outcome.result, Ok(()));
        let plain = check(cipher, &stream, &outcome.report, &contents);
        assert_eq!(plain[..900], contents[0][..900]);
        assert!(plain[SENT / 2..] == contents[1][SENT / 2..], "the rest was read afterwards");
    }
}

#[test]
fn a_file_that_is_overwritten_all_the_time_is_sealed_as_it_was_read() {
    let folder = Folder::new("overwritten");
    let contents = Arc::new(contents(IN_PARTS));
    let engine = Engine::start(Limits { threads: 2, ..Limits::default() }).unwrap();
    let file = create(&folder, "source");
    file.write_all_at(&contents[0], 0).unwrap();
    let (ends, written) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
    let writer = {
        let (file, contents) = (file.try_clone().unwrap(), contents.clone());
        let (ends, written) = (ends.clone(), written.clone());
        thread::spawn(move || {
            let mut state = 1u64;
            while !ends.load(Ordering::Relaxed) {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                let at = (state >> 33) as usize % (IN_PARTS - 10_000);
                let part = at..at + 10_000;
                let content = &contents[(state >> 63) as usize][part];
                file.write_all_at(content, at as u64).unwrap();
                written.fetch_add(1, Ordering::Relaxed);
                thread::yield_now();
            }
        })
    };
    let run = || {
        for (cipher, stages) in cases() {
            let before = written.load(Ordering::Relaxed);
            let outcome = loop {
                let source = Place::File(file.try_clone().unwrap().into(), 0);
                // To a file: in parts at the same time, if its stages allow that.
                let sink = Place::File(create(&folder, "sink").into(), 0);
                let command = Command::new(source, None, stages.clone(), sink);
                let outcome = engine.submit(command).unwrap().wait();
                if written.load(Ordering::Relaxed) > before {
                    break outcome;
                }
            };
            assert_eq!(outcome.result, Ok(()));
            let stream = fs::read(folder.0.join("sink")).unwrap();
            check(cipher, &stream, &outcome.report, &contents);
        }
    };
    let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(run));
    ends.store(true, Ordering::Relaxed);
    writer.join().unwrap();
    result.unwrap_or_else(|why| std::panic::resume_unwind(why));
}
