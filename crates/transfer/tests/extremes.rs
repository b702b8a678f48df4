//! Many transfers, large, sparse and growing files, and descriptors that their owner closes.

use std::fs::{File, OpenOptions};
use std::io::{Read as _, Seek as _, SeekFrom, Write as _};
use std::os::unix::fs::FileExt as _;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::mpsc;
use std::thread;

use sys::process::{raise_descriptor_limit, resident_bytes};
use transfer::{DigestKind, Engine, Limits, Source, TransferError};

/// A file without a name.
fn file() -> File {
    sys::descriptors::nameless(&std::env::temp_dir()).unwrap()
}

fn bytes(len: usize, seed: usize) -> Vec<u8> {
    (0..len).map(|at| ((at + seed).wrapping_mul(2_654_435_761) >> 13) as u8).collect()
}

/// As many transfers as the process may have descriptors for, up to ten thousand, wait for two threads. Each brings its bytes to its place,
/// and the memory is that of the few that run.
#[test]
fn ten_thousand_transfers_wait_for_two_threads() {
    const PIECE: usize = 3000;
    let descriptors = raise_descriptor_limit().unwrap() as usize;
    let count = 10_000.min(descriptors.saturating_sub(200) / 2);
    assert!(count >= 100, "{descriptors} descriptors are too few for this test");
    let (source, sink) = (file(), file());
    let content = bytes(count * PIECE, 0);
    source.write_all_at(&content, 0).unwrap();
    let limits = Limits { in_flight: count as u32, memory_mib: 1 << 20, ..Limits::default() };
    let engine = Engine::start(limits).unwrap();
    // It waits for its peer to the end.
    let before = resident_bytes();
    let (first, peer) = UnixStream::pair().unwrap();
    let (ended, ends) = mpsc::channel();
    let waits = engine.submit(Source::socket(first, Some(1)).file(sink.try_clone().unwrap(), 0));
    let waits = waits.unwrap();
    for at in 1..count {
        let offset = (at * PIECE) as u64;
        let from = Source::file(source.try_clone().unwrap(), offset, Some(PIECE as u64));
        let command = from.digest(DigestKind::Md5).file(sink.try_clone().unwrap(), offset);
        let ended = ended.clone();
        engine.submit_with(command, move |outcome| ended.send(outcome).unwrap()).unwrap();
    }
    for _ in 1..count {
        let outcome = ends.recv().unwrap();
        assert_eq!((outcome.result, outcome.report.written), (Ok(()), PIECE as u64));
    }
    let more = resident_bytes().saturating_sub(before);
    assert!(more < 512 << 20, "{more} bytes more than before");
    drop(peer);
    assert_eq!(waits.wait().result, Err(TransferError::Closed));
    let mut arrived = vec![0; content.len()];
    sink.read_exact_at(&mut arrived, 0).unwrap();
    assert!(arrived[PIECE..] == content[PIECE..]);
    assert_eq!((engine.in_flight(), engine.counters().succeeded()), (0, count as u64 - 1));
}

/// A range across 4 GiB of a file that is longer, with holes, to a place beyond 4 GiB of another one.
#[test]
fn ranges_beyond_four_gib_of_sparse_files_keep_their_bytes() {
    const BORDER: u64 = 4 << 30;
    let (source, sink) = (file(), file());
    let (low, high) = (bytes(300_000, 1), bytes(500_000, 2));
    source.set_len(BORDER + (1 << 30)).unwrap();
    source.write_all_at(&low, BORDER - low.len() as u64).unwrap();
    source.write_all_at(&high, BORDER + 1_000_000).unwrap();
    let engine = Engine::start(Limits::default()).unwrap();
    let (from, len) = (BORDER - low.len() as u64 - 70_000, 70_000 + low.len() + 1_600_000);
    let range = Source::file(source.try_clone().unwrap(), from, Some(len as u64));
    let command = range.digest(DigestKind::Sha256).file(sink.try_clone().unwrap(), BORDER + 5);
    let outcome = engine.submit(command).unwrap().wait();
    assert_eq!((outcome.result, outcome.report.written), (Ok(()), len as u64));
    let mut expected = vec![0; 70_000];
    expected.extend(&low);
    expected.resize(expected.len() + 1_000_000, 0);
    expected.extend(&high);
    expected.resize(len, 0);
    let mut arrived = vec![1; len];
    sink.read_exact_at(&mut arrived, BORDER + 5).unwrap();
    assert!(arrived == expected);
    assert_eq!(sink.metadata().unwrap().len(), BORDER + 5 + len as u64);
    use sha2::Digest as _;
    let hash = sha2::Sha256::digest(&expected);
    assert_eq!(outcome.report.stages[0].digest.unwrap().bytes(), hash.as_slice());
}

/// A file that grows while it is sent arrives with the length that it had at the start.
#[test]
fn a_file_that_grows_arrives_as_long_as_it_was() {
    let mut source = file();
    let content = bytes(6 << 20, 3);
    source.write_all(&content).unwrap();
    let (to, mut peer) = UnixStream::pair().unwrap();
    let engine = Engine::start(Limits::default()).unwrap();
    // The socket holds less than the file, so the transfer is in flight while the file grows.
    let sent = engine.submit(Source::file(source.try_clone().unwrap(), 0, None).socket(to));
    let sent = sent.unwrap();
    let mut first = [0];
    peer.read_exact(&mut first).unwrap();
    source.seek(SeekFrom::End(0)).unwrap();
    source.write_all(&bytes(3 << 20, 4)).unwrap();
    let mut arrived = first.to_vec();
    peer.read_to_end(&mut arrived).unwrap();
    assert!(arrived == content);
    assert_eq!(sent.wait().result, Ok(()));
}

/// The engine has descriptors of its own: what callers close, remove or protect afterwards does not matter.
#[test]
fn a_file_that_is_closed_removed_and_made_unreadable_arrives() {
    use std::os::unix::fs::PermissionsExt as _;
    let name = format!("serval-transfer-extremes-{}", std::process::id());
    let path: PathBuf = std::env::temp_dir().join(name);
    let content = bytes(6 << 20, 5);
    std::fs::write(&path, &content).unwrap();
    let source = OpenOptions::new().read(true).open(&path).unwrap();
    let (to, mut peer) = UnixStream::pair().unwrap();
    let engine = Engine::start(Limits::default()).unwrap();
    let copy = source.try_clone().unwrap();
    let sent = engine.submit(Source::file(copy, 0, None).digest(DigestKind::Md5).socket(to));
    let sent = sent.unwrap();
    drop(source);
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o000)).unwrap();
    std::fs::remove_file(&path).unwrap();
    let reader = thread::spawn(move || {
        let mut arrived = Vec::new();
        peer.read_to_end(&mut arrived).unwrap();
        arrived
    });
    assert_eq!(sent.wait().result, Ok(()));
    assert!(reader.join().unwrap() == content);
}
