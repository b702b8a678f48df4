//! Transfers on real files and sockets: bytes, digests and sealed streams are what other implementations say; a
//! descriptor that is wrong, a peer that goes away, a disk that is full are errors that leave the others alone.

mod common;

use std::fs::{File, OpenOptions};
use std::io::{Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixDatagram, UnixStream};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use sha2::{Digest as _, Sha256};
use transfer::command::limits::CHUNK_BYTES;
use transfer::command::pipeline::WhenBlocked;
use transfer::{
    Cipher, Command, DigestKind, Engine, ExpandLimits, FileRange, Format, Key, Limits, Outcome,
    Place, SearchKind, SearchSpec, Source, StageKind, StageSpec, TransferError,
};

const KEY: [u8; 32] = [3; 32];

/// A folder that goes away.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Self {
        let path =
            std::env::temp_dir().join(format!("serval-transfer-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&path).unwrap();
        Self(path)
    }

    fn file(&self, name: &str, bytes: &[u8]) -> PathBuf {
        let path = self.0.join(name);
        std::fs::write(&path, bytes).unwrap();
        path
    }

    fn create(&self, name: &str) -> (PathBuf, File) {
        let path = self.0.join(name);
        let file =
            OpenOptions::new().read(true).write(true).create(true).truncate(true).open(&path);
        (path, file.unwrap())
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn open(path: &Path) -> File {
    File::open(path).unwrap()
}

fn engine() -> Engine {
    Engine::start(Limits::default()).unwrap()
}

fn bytes(len: usize) -> Vec<u8> {
    (0..len).map(|at| (at.wrapping_mul(2_654_435_761) >> 13) as u8).collect()
}

fn tcp() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let one = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    (one, listener.accept().unwrap().0)
}

/// Everything that arrives until the stream ends.
fn receive(mut socket: impl std::io::Read + Send + 'static) -> thread::JoinHandle<Vec<u8>> {
    thread::spawn(move || {
        let mut got = Vec::new();
        socket.read_to_end(&mut got).unwrap();
        got
    })
}

fn sha256(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect()
}

fn error(outcome: &Outcome) -> &TransferError {
    outcome.result.as_ref().unwrap_err()
}

#[test]
fn a_file_arrives_with_its_digest() {
    let (folder, engine) = (Folder::new("digest"), engine());
    for len in [0, 1, CHUNK_BYTES - 1, CHUNK_BYTES, 3 * CHUNK_BYTES + 77] {
        let content = bytes(len);
        let path = folder.file("source", &content);
        let (ours, theirs) = tcp();
        let received = receive(theirs);
        let command = Source::file(open(&path), 0, None).digest(DigestKind::Sha256).socket(ours);
        let outcome = engine.submit(command).unwrap().wait();
        assert_eq!(outcome.result, Ok(()));
        assert_eq!(outcome.report.written, len as u64);
        assert_eq!(outcome.report.digest().unwrap().to_string(), sha256(&content));
        assert!(received.join().unwrap() == content);
    }
}

#[test]
fn a_sealed_stream_opens_elsewhere_and_no_changed_one_does() {
    let (folder, engine) = (Folder::new("seal"), engine());
    let mut salts = Vec::new();
    for len in [0, 1, 65_519, 65_520, 65_521, 8 * 65_520, 17 * 65_520 + 5] {
        let content = bytes(len);
        let path = folder.file("source", &content);
        let (ours, theirs) = UnixStream::pair().unwrap();
        let received = receive(theirs);
        let source = Source::file(open(&path), 0, None).digest(DigestKind::Crc32c);
        let command = source.seal(Key::new(KEY)).socket(ours);
        let outcome = engine.submit(command).unwrap().wait();
        assert_eq!(outcome.result, Ok(()));
        let mut stream = received.join().unwrap();
        assert_eq!(outcome.report.written, stream.len() as u64);
        assert_eq!(outcome.report.read, len as u64);
        assert_eq!(common::open(&KEY, &stream), Some(content));
        assert_eq!(common::open(&[4; 32], &stream), None);
        assert_eq!(common::open(&KEY, &stream[..stream.len() - 1]), None);
        if len > 65_520 {
            let cut = 48 + 65_536;
            assert_eq!(common::open(&KEY, &stream[..cut]), None, "the end is authenticated");
        }
        salts.push(stream[16..48].to_vec());
        let at = stream.len() / 2;
        stream[at] ^= 1;
        assert_eq!(common::open(&KEY, &stream), None);
    }
    salts.sort();
    salts.dedup();
    assert_eq!(salts.len(), 7, "every stream has a salt of its own");
}

#[test]
fn a_sealed_stream_from_elsewhere_is_opened_to_a_file() {
    let (folder, engine) = (Folder::new("open"), engine());
    for len in [0, 1, 65_519, 65_520, 65_521, 8 * 65_520, 17 * 65_520 + 5] {
        let content = bytes(len);
        for (cipher, stream) in [
            (Cipher::Aes256Gcm, common::seal(&KEY, &content)),
            (Cipher::Aes256Ctr, common::seal_ctr(&KEY, &content)),
        ] {
            let (mut ours, theirs) = tcp();
            let sender = thread::spawn(move || {
                // Parts that end inside the header and inside records.
                for part in stream.chunks(31_337) {
                    ours.write_all(part).unwrap();
                }
                ours.write_all(&[]).unwrap();
                stream.len()
            });
            let (path, file) = folder.create("sink");
            let source = Source::socket(theirs, None).open_with(cipher, Key::new(KEY));
            let command = source.digest(DigestKind::Sha256).digest(DigestKind::Sha1).file(file, 0);
            let outcome = engine.submit(command).unwrap().wait();
            let sent = sender.join().unwrap();
            assert_eq!(outcome.result, Ok(()));
            assert_eq!((outcome.report.read, outcome.report.written), (sent as u64, len as u64));
            assert_eq!(outcome.report.digest().unwrap().to_string(), sha256(&content));
            let kinds: Vec<StageKind> =
                outcome.report.stages.iter().map(|stage| stage.kind).collect();
            let digests = [DigestKind::Sha256, DigestKind::Sha1].map(StageKind::Digest);
            assert_eq!(kinds, [StageKind::Open(cipher), digests[0], digests[1]]);
            assert!(std::fs::read(path).unwrap() == content);
        }
    }
}

#[test]
fn nothing_of_a_record_that_does_not_verify_leaves() {
    let (folder, engine) = (Folder::new("verify"), engine());
    let content = bytes(4 * 65_520 + 100);
    let stream = common::seal(&KEY, &content);
    let record = |n: usize| 48 + n * 65_536..(48 + (n + 1) * 65_536).min(stream.len());
    let open = |stream: &[u8], cipher, key| {
        let path = folder.file("sealed", stream);
        let (path, source) = (folder.0.join("sink"), open(&path));
        let (_, file) = folder.create("sink");
        let source = Source::file(source, 0, None).open_with(cipher, Key::new(key));
        let outcome = engine.submit(source.digest(DigestKind::Md5).file(file, 0)).unwrap().wait();
        let got = std::fs::read(path).unwrap();
        assert_eq!((outcome.report.written, outcome.report.digest()), (got.len() as u64, None));
        assert!(content.starts_with(&got), "only what verified");
        (outcome.result.unwrap_err(), got.len())
    };
    let gcm = |stream: &[u8]| open(stream, Cipher::Aes256Gcm, KEY);
    for at in 0..5 {
        let mut changed = stream.clone();
        changed[record(at).start] ^= 1;
        assert_eq!(gcm(&changed), (TransferError::NotVerified(at as u64), at * 65_520));
        changed = stream.clone();
        changed[record(at).end - 1] ^= 0x80;
        assert_eq!(gcm(&changed), (TransferError::NotVerified(at as u64), at * 65_520));
    }
    // Exchanged, repeated, dropped.
    let join = |order: &[usize]| {
        let records = order.iter().flat_map(|n| &stream[record(*n)]);
        [&stream[..48], &records.copied().collect::<Vec<u8>>()].concat()
    };
    assert_eq!(gcm(&join(&[0, 2, 1, 3, 4])), (TransferError::NotVerified(1), 65_520));
    assert_eq!(gcm(&join(&[0, 0, 1, 2, 3, 4])), (TransferError::NotVerified(1), 65_520));
    assert_eq!(gcm(&join(&[0, 1, 2, 4])), (TransferError::NotVerified(3), 3 * 65_520));
    // Cut off between records and inside one, and continued after its end.
    assert_eq!(gcm(&join(&[0, 1])), (TransferError::CutOff, 65_520));
    assert_eq!(gcm(&join(&[])), (TransferError::CutOff, 0));
    assert_eq!(gcm(&stream[..20]), (TransferError::CutOff, 0));
    assert_eq!(gcm(&[]), (TransferError::CutOff, 0));
    let (error, len) = gcm(&stream[..stream.len() - 1]);
    assert_eq!((error, len), (TransferError::NotVerified(4), 4 * 65_520));
    let (error, _) = gcm(&[&stream[..], &[0]].concat());
    assert_eq!(error, TransferError::NotVerified(4));
    // Something else, another key, and a cipher that would notice nothing.
    assert_eq!(gcm(&content), (TransferError::NotSealed, 0));
    let other = open(&stream, Cipher::Aes256Gcm, [4; 32]);
    assert_eq!(other, (TransferError::NotVerified(0), 0));
    let downgraded = common::seal_ctr(&KEY, &content);
    assert_eq!(gcm(&downgraded), (TransferError::NotSealed, 0));
    assert_eq!(open(&stream, Cipher::Aes256Ctr, KEY), (TransferError::NotSealed, 0));
}

#[test]
fn several_files_are_one_stream() {
    let (folder, engine) = (Folder::new("several"), engine());
    let range = |name: &str, len: usize, offset: u64, bytes: Option<u64>| {
        let file = open(&folder.file(name, &self::bytes(len))).into();
        FileRange { file, offset, bytes }
    };
    let more = || {
        vec![
            range("empty", 0, 0, None),
            range("b", 3 * CHUNK_BYTES, 7, Some(2 * CHUNK_BYTES as u64)),
            range("beyond", 10, 20, None),
            range("c", 99, 0, None),
        ]
    };
    let expected =
        [&bytes(70_000)[5..], &bytes(3 * CHUNK_BYTES)[7..7 + 2 * CHUNK_BYTES], &bytes(99)[..]]
            .concat();
    for sealed in [false, true] {
        let source = Source::files(range("a", 70_000, 5, None), more()).digest(DigestKind::Sha256);
        let (path, sink) = folder.create("sink");
        let command = match sealed {
            true => source.seal(Key::new(KEY)).file(sink, 0),
            false => source.file(sink, 0),
        };
        let outcome = engine.submit(command).unwrap().wait();
        assert_eq!(outcome.result, Ok(()));
        assert_eq!(outcome.report.digest().unwrap().to_string(), sha256(&expected));
        let got = std::fs::read(path).unwrap();
        assert!(if sealed { common::open(&KEY, &got).unwrap() } else { got } == expected);
    }
    // One that is shorter than its range ends the transfer there.
    let short = vec![range("short", 10, 0, Some(11)), range("c", 99, 0, None)];
    let source = Source::files(range("a", 1000, 0, None), short);
    let outcome = engine.submit(source.file(folder.create("sink").1, 0)).unwrap().wait();
    assert_eq!(error(&outcome), &TransferError::FileEnded { at: 1010, end: 1110 });
    assert_eq!(outcome.report.written, 1010);
    let (path, sink) = folder.create("sink");
    let again = FileRange { file: open(&path).into(), offset: 0, bytes: None };
    let same = Source::files(range("a", 1000, 0, None), vec![again]).file(sink, 0);
    assert_eq!(engine.submit(same).err(), Some(TransferError::SameFile));
    let beyond = vec![range("c", 99, 0, Some(u64::MAX))];
    let beyond = Source::files(range("a", 1, 0, None), beyond).file(folder.create("sink").1, 0);
    assert_eq!(engine.submit(beyond).err(), Some(TransferError::Range));
}

#[test]
fn compressed_data_is_expanded_within_limits() {
    let (folder, engine) = (Folder::new("expand"), engine());
    let content = bytes(2 * CHUNK_BYTES + 99);
    let zeros = vec![0; 16 << 20];
    for format in Format::ALL {
        let pass = |bytes: &[u8], limits: Option<ExpandLimits>| {
            let source = Source::file(open(&folder.file("source", bytes)), 0, None);
            let (path, sink) = folder.create("sink");
            let command = match limits {
                None => source.digest(DigestKind::Md5).compress(format).file(sink, 0),
                Some(limits) => source.expand(format, limits).digest(DigestKind::Md5).file(sink, 0),
            };
            let outcome = engine.submit(command).unwrap().wait();
            let made = std::fs::read(path).unwrap();
            assert_eq!(outcome.report.written, made.len() as u64);
            (outcome, made)
        };
        let unlimited = ExpandLimits { bytes: u64::MAX, ratio: u32::MAX };
        for plain in [&content, &zeros, &Vec::new()] {
            let (there, packed) = pass(plain, None);
            let (back, got) = pass(&packed, Some(unlimited));
            assert_eq!((&there.result, &back.result), (&Ok(()), &Ok(())));
            assert!(got == **plain && there.report.digest() == back.report.digest());
        }
        let (_, bomb) = pass(&zeros, None);
        for limits in [ExpandLimits::default(), ExpandLimits { bytes: 5 << 20, ratio: u32::MAX }] {
            let (outcome, got) = pass(&bomb, Some(limits));
            assert_eq!(error(&outcome), &TransferError::ExpandsTooMuch(format));
            assert!(got.len() <= 5 << 20, "{}", got.len());
        }
        let (outcome, _) = pass(&bomb[..bomb.len() - 1], Some(unlimited));
        assert_eq!(error(&outcome), &TransferError::Truncated(format));
        let (outcome, got) = pass(&content, Some(unlimited));
        assert_eq!((error(&outcome), got.len()), (&TransferError::Corrupt(format), 0));
    }
}

#[test]
fn a_search_finds_what_two_chunks_share() {
    let (folder, engine) = (Folder::new("search"), engine());
    let mut content = vec![b'.'; 2 * CHUNK_BYTES + 100];
    for at in [0, CHUNK_BYTES - 3, 2 * CHUNK_BYTES - 1, content.len() - 6] {
        content[at..at + 6].copy_from_slice(b"needle");
        if at > 0 {
            content[at - 1] = b'\n';
        }
    }
    let path = folder.file("source", &content);
    let search = |kind, pattern: &[u8]| {
        let search = SearchSpec { kind, pattern: pattern.to_vec(), offsets: 3 };
        let command = Source::file(open(&path), 0, None).search(search);
        engine.submit(command.file(folder.create("sink").1, 0))
    };
    for (kind, pattern) in [(SearchKind::Text, &b"needle"[..]), (SearchKind::Lines, b"^n[e]+dle")] {
        let mut outcome = search(kind, pattern).unwrap().wait();
        let found = outcome.report.stages.remove(0).found.unwrap();
        let first = [0, CHUNK_BYTES - 3, 2 * CHUNK_BYTES - 1].map(|at| at as u64);
        assert_eq!((outcome.result, found.count), (Ok(()), 4));
        assert_eq!(found.offsets, first);
    }
    let refused = search(SearchKind::Lines, b"a(").err().unwrap();
    assert_eq!(refused.to_string(), "the pattern cannot be used: unclosed group");
    let endless = folder.file("source", &vec![b'a'; 2 << 20]);
    assert_eq!(endless, path);
    let outcome = search(SearchKind::Lines, b"b").unwrap().wait();
    assert_eq!(error(&outcome), &TransferError::LineTooLong);
}

#[test]
fn every_source_reaches_every_sink() {
    let (folder, engine) = (Folder::new("every"), engine());
    let content = bytes(3 * CHUNK_BYTES + 77);
    let sealed = common::seal(&KEY, &content);
    let path = folder.file("source", &sealed);
    let memory = |name: &str| {
        let options = sys::RegionOptions::default();
        let memory = sys::SharedMemory::create(name, 4 << 20, &options).unwrap();
        File::from(memory.fd().try_clone_to_owned().unwrap())
    };
    for from in 0..3 {
        for to in 0..3 {
            let mut sender = None;
            let shared = memory("from");
            let source = match from {
                0 => Source::file(open(&path), 0, None),
                1 => {
                    let (mut ours, theirs) = tcp();
                    let stream = sealed.clone();
                    sender = Some(thread::spawn(move || ours.write_all(&stream).unwrap()));
                    Source::socket(theirs, None)
                }
                _ => {
                    use std::os::unix::fs::FileExt as _;
                    shared.write_all_at(&sealed, 1000).unwrap();
                    Source::file(shared, 1000, Some(sealed.len() as u64))
                }
            };
            // Opened with one key and sealed with another.
            let stages = source.open(Key::new(KEY)).digest(DigestKind::Sha256);
            let stages = stages.seal(Key::new([8; 32]));
            let mut received = None;
            let (sink, to_memory) = (folder.create("sink"), memory("to"));
            let command = match to {
                0 => stages.file(sink.1, 5),
                1 => {
                    let (ours, theirs) = UnixStream::pair().unwrap();
                    received = Some(receive(theirs));
                    stages.socket(ours)
                }
                _ => stages.file(to_memory.try_clone().unwrap(), 5),
            };
            let outcome = engine.submit(command).unwrap().wait();
            assert_eq!(outcome.result, Ok(()), "from {from} to {to}");
            assert_eq!(outcome.report.read, sealed.len() as u64);
            let written = outcome.report.written as usize;
            let got = match (to, received) {
                (_, Some(received)) => received.join().unwrap(),
                (0, _) => std::fs::read(sink.0).unwrap()[5..].to_vec(),
                _ => {
                    use std::os::unix::fs::FileExt as _;
                    let mut got = vec![0; written];
                    to_memory.read_exact_at(&mut got, 5).unwrap();
                    got
                }
            };
            assert_eq!(got.len(), written);
            assert!(common::open(&[8; 32], &got).as_ref() == Some(&content));
            assert_eq!(outcome.report.digest().unwrap().to_string(), sha256(&content));
            if let Some(sender) = sender {
                sender.join().unwrap();
            }
        }
    }
    // As it is, from one socket to the other, while both wait for each other's bytes.
    let (mut ours, near) = tcp();
    let (far, theirs) = UnixStream::pair().unwrap();
    let transfer = engine.submit(Source::socket(near, None).socket(far)).unwrap();
    let mut reader = theirs;
    for part in content.chunks(100_000) {
        ours.write_all(part).unwrap();
        let mut got = vec![0; part.len()];
        reader.read_exact(&mut got).unwrap();
        assert!(got == part);
    }
    drop(ours);
    assert_eq!(transfer.wait().result, Ok(()));
}

#[test]
fn a_range_goes_out_and_the_file_position_stays() {
    use std::io::Seek as _;
    let (folder, engine) = (Folder::new("range"), engine());
    let content = bytes(300_000);
    let mut file = open(&folder.file("source", &content));
    file.seek(std::io::SeekFrom::Start(5)).unwrap();
    let (ours, theirs) = UnixStream::pair().unwrap();
    let received = receive(theirs);
    let command = Source::file(file.try_clone().unwrap(), 1000, Some(200_000)).socket(ours);
    assert_eq!(engine.submit(command).unwrap().wait().result, Ok(()));
    assert!(received.join().unwrap() == content[1000..201_000]);
    assert_eq!(file.stream_position().unwrap(), 5);
}

#[test]
fn a_stream_becomes_a_file() {
    let (folder, engine) = (Folder::new("receive"), engine());
    let content = bytes(2 * CHUNK_BYTES + 4321);
    // To the end of the stream, and a part of it.
    for take in [None, Some(CHUNK_BYTES as u64 + 1)] {
        let (mut ours, theirs) = tcp();
        let sent = content.clone();
        let sender = thread::spawn(move || ours.write_all(&sent).map(|()| drop(ours)));
        let (path, file) = folder.create("sink");
        let kept = theirs.try_clone().unwrap();
        let command = Source::socket(theirs, take).digest(DigestKind::Md5).file(file, 10);
        let outcome = engine.submit(command).unwrap().wait();
        assert_eq!(outcome.result, Ok(()));
        let len = take.map_or(content.len(), |take| take as usize);
        let written = std::fs::read(path).unwrap();
        assert!(written[..10] == [0; 10] && written[10..] == content[..len]);
        assert_eq!(outcome.report.written, len as u64);
        let digest = md5::Md5::digest(&content[..len]);
        assert_eq!(outcome.report.digest().unwrap().bytes(), digest.as_slice());
        // What follows the part stays in the socket.
        let mut rest = Vec::new();
        (&kept).read_to_end(&mut rest).unwrap();
        assert!(rest == content[len..]);
        sender.join().unwrap().unwrap();
    }
}

#[test]
fn wrong_descriptors_are_refused_with_a_sentence() {
    let (folder, engine) = (Folder::new("wrong"), engine());
    let path = folder.file("source", b"content");
    let stream = || OwnedFd::from(UnixStream::pair().unwrap().0);
    let send = |file: OwnedFd, socket: OwnedFd| {
        engine.submit(Source::file(file, 0, None).socket(socket)).err().unwrap().to_string()
    };
    let receive = |socket: OwnedFd, file: OwnedFd| {
        engine.submit(Source::socket(socket, None).file(file, 0)).err().unwrap().to_string()
    };
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let stream_needed = "it has to be a connected stream socket (TCP or Unix)";
    let cases = [
        (send(open(&folder.0).into(), stream()), "the source is a folder: it has to be a file"),
        (
            send(open(Path::new("/dev/null")).into(), stream()),
            "the source is a device: it has to be a file",
        ),
        (send(stream(), stream()), "the source is a socket: it has to be a file"),
        (
            send(open(&path).into(), open(&path).into()),
            &format!("the sink is a file: {stream_needed}"),
        ),
        (
            send(open(&path).into(), UnixDatagram::unbound().unwrap().into()),
            &format!("the sink is a socket for messages: {stream_needed}"),
        ),
        (
            send(open(&path).into(), listener.into()),
            &format!("the sink is a socket without a peer: {stream_needed}"),
        ),
        (
            send(OpenOptions::new().write(true).open(&path).unwrap().into(), stream()),
            "the source was not opened for reading",
        ),
        (receive(stream(), open(&path).into()), "the sink was not opened for writing"),
        (
            receive(stream(), OpenOptions::new().append(true).open(&path).unwrap().into()),
            "the sink was opened with O_APPEND, which ignores offsets: open it without",
        ),
    ];
    for (got, expected) in cases {
        assert_eq!(got, expected);
    }
    let copy = Source::file(open(&path), 0, None);
    let same = OpenOptions::new().write(true).open(&path).unwrap();
    assert_eq!(engine.submit(copy.file(same, 0)).err(), Some(TransferError::SameFile));
    let key = || Key::new(KEY);
    let (source, sink) = (Place::File(open(&path).into(), 0), Place::Socket(stream()));
    let stages =
        vec![StageSpec::Seal(Cipher::Aes256Gcm, key()), StageSpec::Digest(DigestKind::Md5)];
    let order = engine.submit(Command::new(source, None, stages, sink)).err().unwrap();
    let expected = "the order of the stages is wrong: `md5` cannot follow `aes-256-gcm`: \
                    only the sink can follow a seal: move the other stage before it";
    assert_eq!(order.to_string(), expected);
    let range = engine.submit(Source::file(open(&path), u64::MAX, Some(2)).socket(stream()));
    assert_eq!(range.err().unwrap(), TransferError::Range);
    assert_eq!(engine.in_flight(), 0);
    let refused: u64 = engine.counters().failed().map(|(_, count)| count).sum();
    assert_eq!((refused, engine.counters().started()), (12, 12));
}

#[test]
fn a_file_opened_with_o_direct_is_refused() {
    use std::os::unix::fs::OpenOptionsExt as _;
    const O_DIRECT: i32 = if cfg!(target_arch = "aarch64") { 0o200_000 } else { 0o40_000 };
    let engine = engine();
    // The folder for temporary files may have a file system without O_DIRECT.
    let path = Path::new(env!("CARGO_TARGET_TMPDIR"))
        .join(format!("serval-transfer-direct-{}", std::process::id()));
    std::fs::write(&path, [1; 8192]).unwrap();
    let file = OpenOptions::new().read(true).custom_flags(O_DIRECT).open(&path);
    std::fs::remove_file(&path).unwrap();
    let command = Source::file(file.unwrap(), 0, None).socket(UnixStream::pair().unwrap().0);
    let error = engine.submit(command).err().unwrap();
    assert_eq!(error, TransferError::Direct { role: "source" });
}

#[test]
fn a_file_without_a_length_goes_out_to_its_end() {
    let engine = engine();
    let path = Path::new("/proc/version");
    assert_eq!(std::fs::metadata(path).unwrap().len(), 0);
    let content = std::fs::read(path).unwrap();
    for sealed in [false, true] {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let received = receive(theirs);
        let source = Source::file(open(path), 0, None).digest(DigestKind::Sha256);
        let command =
            if sealed { source.seal(Key::new(KEY)).socket(ours) } else { source.socket(ours) };
        let outcome = engine.submit(command).unwrap().wait();
        assert_eq!((outcome.result, outcome.report.read), (Ok(()), content.len() as u64));
        assert_eq!(outcome.report.digest().unwrap().to_string(), sha256(&content));
        let stream = received.join().unwrap();
        let plain = if sealed { common::open(&KEY, &stream).unwrap() } else { stream };
        assert!(plain == content);
    }
}

#[test]
fn one_transfer_at_a_time_sends_on_a_socket() {
    let (folder, engine) = (Folder::new("busy"), engine());
    let path = folder.file("source", &bytes(8 << 20));
    let (ours, theirs) = UnixStream::pair().unwrap();
    let command = |socket: &UnixStream| {
        Source::file(open(&path), 0, None).socket(socket.try_clone().unwrap())
    };
    let first = engine.submit(command(&ours)).unwrap();
    assert_eq!(engine.submit(command(&ours)).err(), Some(TransferError::Busy));
    // The other direction, and other sockets, are free.
    let (_, sink) = folder.create("sink");
    let other = Source::socket(ours.try_clone().unwrap(), None).file(sink, 0);
    let other = engine.submit(other).unwrap();
    first.cancel();
    assert_eq!(error(&first.wait()), &TransferError::Cancelled);
    other.cancel();
    assert_eq!(error(&other.wait()), &TransferError::Cancelled);
    let again = engine.submit(command(&ours)).unwrap();
    drop(theirs);
    assert!(matches!(error(&again.wait()), TransferError::Closed | TransferError::Reset));
}

#[test]
fn a_peer_that_goes_away_ends_only_its_transfer() {
    let (folder, engine) = (Folder::new("gone"), engine());
    let content = bytes(4 << 20);
    let path = folder.file("source", &content);
    let (ours, theirs) = tcp();
    let send = |socket: TcpStream| engine.submit(Source::file(open(&path), 0, None).socket(socket));
    let broken = send(ours).unwrap();
    let others: Vec<_> = (0..4)
        .map(|_| {
            let (ours, theirs) = tcp();
            (send(ours).unwrap(), receive(theirs))
        })
        .collect();
    // It reads a part, and closes with unread data: the host kernel sends a reset.
    let mut part = vec![0; 100_000];
    (&theirs).read_exact(&mut part).unwrap();
    drop(theirs);
    let outcome = broken.wait();
    assert!(matches!(error(&outcome), TransferError::Reset | TransferError::Closed));
    assert!(outcome.report.written >= 100_000 && outcome.report.written < content.len() as u64);
    for (transfer, received) in others {
        assert_eq!(transfer.wait().result, Ok(()));
        assert!(received.join().unwrap() == content);
    }
}

#[test]
fn a_peer_that_stops_reading_is_given_up() {
    let (folder, engine) = (Folder::new("stall"), engine());
    let path = folder.file("source", &bytes(4 << 20));
    let (ours, mut theirs) = UnixStream::pair().unwrap();
    let kept = ours.try_clone().unwrap();
    let command = Source::file(open(&path), 0, None).socket(ours);
    let stalled = engine.submit(command.stall(Duration::from_millis(50))).unwrap().wait();
    assert_eq!(error(&stalled), &TransferError::Stalled(50));
    // The count is what the peer can read.
    drop(kept);
    let mut got = Vec::new();
    theirs.read_to_end(&mut got).unwrap();
    assert_eq!(got.len() as u64, stalled.report.written);
    let (ours, _theirs) = UnixStream::pair().unwrap();
    let (_, sink) = folder.create("sink");
    let command = Source::socket(ours, None).file(sink, 0).deadline(Duration::from_millis(30));
    assert_eq!(error(&engine.submit(command).unwrap().wait()), &TransferError::Deadline(30));
}

#[test]
fn a_stalled_transfer_is_given_up_while_the_engine_is_busy() {
    let (folder, engine) = (Folder::new("busy-stall"), std::sync::Arc::new(engine()));
    let path = folder.file("source", &bytes(4 << 20));
    let stop = std::sync::atomic::AtomicBool::new(false);
    thread::scope(|scope| {
        // Two transfers at any time keep both threads at work.
        for _ in 0..2 {
            scope.spawn(|| {
                while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                    let (ours, theirs) = UnixStream::pair().unwrap();
                    let received = receive(theirs);
                    let command = Source::file(open(&path), 0, None).socket(ours);
                    assert_eq!(engine.submit(command).unwrap().wait().result, Ok(()));
                    received.join().unwrap();
                }
            });
        }
        let (ours, _theirs) = UnixStream::pair().unwrap();
        let command = Source::file(open(&path), 0, None).socket(ours);
        let stalled = engine.submit(command.stall(Duration::from_millis(50))).unwrap().wait();
        stop.store(true, std::sync::atomic::Ordering::Relaxed);
        assert_eq!(error(&stalled), &TransferError::Stalled(50));
    });
}

#[test]
fn a_file_that_is_shortened_ends_its_transfer() {
    let (folder, engine) = (Folder::new("shrinks"), engine());
    let path = folder.file("source", &bytes(8 << 20));
    let file = OpenOptions::new().read(true).write(true).open(&path).unwrap();
    let (ours, mut theirs) = UnixStream::pair().unwrap();
    let transfer =
        engine.submit(Source::file(file.try_clone().unwrap(), 0, None).socket(ours)).unwrap();
    // The engine has read two chunks at most, because the peer has read nothing.
    file.set_len(1 << 20).unwrap();
    let mut got = Vec::new();
    theirs.read_to_end(&mut got).unwrap();
    let outcome = transfer.wait();
    assert_eq!(error(&outcome), &TransferError::FileEnded { at: 1 << 20, end: 8 << 20 });
    assert_eq!((outcome.report.written, got.len()), (1 << 20, 1 << 20));
}

#[test]
fn a_full_disk_is_reported_with_what_the_file_got() {
    // A memfd that is sealed against growth is as full as a disk can be, and needs no root. /dev/full is no regular file.
    let engine = engine();
    let memory = sys::SharedMemory::create("full", 8192, &sys::RegionOptions::default()).unwrap();
    let file = memory.fd().try_clone_to_owned().unwrap();
    let (mut ours, theirs) = UnixStream::pair().unwrap();
    let sent = thread::spawn(move || {
        let _ = ours.write_all(&bytes(20_000));
    });
    let outcome = engine.submit(Source::socket(theirs, None).file(file, 0)).unwrap().wait();
    assert!(matches!(error(&outcome), TransferError::Host { what: "writing the file", .. }));
    assert!(outcome.report.written <= 8192 && outcome.report.read >= outcome.report.written);
    sent.join().unwrap();
}

#[test]
fn a_full_socket_can_end_a_transfer_with_a_short_count() {
    let (folder, engine) = (Folder::new("short"), engine());
    let content = bytes(4 << 20);
    let path = folder.file("source", &content);
    let (ours, mut theirs) = UnixStream::pair().unwrap();
    let mut sent = 0;
    let mut got = Vec::new();
    while sent < content.len() as u64 {
        let command = Source::file(open(&path), sent, None).socket(ours.try_clone().unwrap());
        let command = command.when_blocked(WhenBlocked::Return);
        let outcome = engine.submit(command).unwrap().wait();
        assert_eq!(outcome.result, Ok(()));
        sent += outcome.report.written;
        let mut part = vec![0; 50_000];
        let read = theirs.read(&mut part).unwrap();
        got.extend(&part[..read]);
    }
    drop(ours);
    theirs.read_to_end(&mut got).unwrap();
    assert!(got == content);
}

#[test]
fn a_full_scoreboard_refuses_and_a_stopped_engine_tells_everybody() {
    let folder = Folder::new("limits");
    let engine = Engine::start(Limits { in_flight: 2, ..Limits::default() }).unwrap();
    let path = folder.file("source", &bytes(4 << 20));
    let mut peers = Vec::new();
    let mut submit = || {
        let (ours, theirs) = UnixStream::pair().unwrap();
        peers.push(theirs);
        engine.submit(Source::file(open(&path), 0, None).socket(ours))
    };
    let (one, two) = (submit().unwrap(), submit().unwrap());
    assert_eq!(submit().err(), Some(TransferError::TooMany(2)));
    drop(engine);
    for transfer in [one, two] {
        let outcome = transfer.wait();
        assert!(matches!(error(&outcome), TransferError::Stopping | TransferError::Cancelled));
    }
}

#[test]
fn ten_thousand_rounds_leave_nothing_behind() {
    let (folder, engine) = (Folder::new("rounds"), engine());
    let path = folder.file("source", &bytes(1000));
    let (mut done, descriptors) = (0u64, || std::fs::read_dir("/proc/self/fd").unwrap().count());
    let mut before = None;
    for round in 0..10_000 {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let file = open(&path);
        let command = match round % 4 {
            0 => Source::file(file, 0, None).seal(Key::new(KEY)).socket(ours),
            1 => Source::file(file, 0, None).digest(DigestKind::Crc32c).socket(ours),
            // Waits for the peer until it is cancelled.
            2 => Source::socket(ours, None).file(folder.create("sink").1, 0),
            _ => Source::file(file, 0, Some(5000)).socket(ours),
        };
        let transfer = engine.submit(command).unwrap();
        if round % 4 == 2 {
            transfer.cancel();
        }
        done += u64::from(transfer.wait().result.is_ok());
        drop(theirs);
        if round == 100 {
            before = Some(descriptors());
        }
    }
    assert_eq!(done, 5000);
    assert_eq!(engine.in_flight(), 0);
    // Other tests of this process open descriptors, but not thousands.
    assert!(descriptors() < before.unwrap() + 500);
    let as_counted = engine.counters();
    assert_eq!((as_counted.started(), as_counted.succeeded()), (10_000, 5000));
}

#[test]
fn the_threads_of_many_callers_get_their_own_bytes() {
    let (folder, engine) = (Folder::new("many"), std::sync::Arc::new(engine()));
    thread::scope(|scope| {
        for caller in 0..6 {
            let (engine, folder) = (&engine, &folder);
            scope.spawn(move || {
                let content = bytes(700_000 + caller);
                let path = folder.file(&format!("source-{caller}"), &content);
                for _ in 0..5 {
                    let (ours, theirs) = tcp();
                    let received = receive(theirs);
                    let command = Source::file(open(&path), 0, None).seal(Key::new(KEY));
                    let transfer = engine.submit(command.socket(ours)).unwrap();
                    assert_eq!(transfer.wait().result, Ok(()));
                    let stream = received.join().unwrap();
                    assert!(common::open(&KEY, &stream) == Some(content.clone()));
                }
            });
        }
    });
    assert!(engine.in_flight() == 0 && engine.counters().written() > engine.counters().read());
}
