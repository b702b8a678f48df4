//! Small transfers of [`Client::run`]: the calling thread does them itself, as an engine would.

mod common;

use std::fs::{self, File};
use std::io::{Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use sys::local::LocalListener;
use transfer::service::message::Answer;
use transfer::{
    Client, Command, DigestKind, Key, SMALL_BYTES_MAX, Service, ServiceLimits, Small, Source,
    TransferError,
};

const PATIENCE: Duration = Duration::from_secs(60);
const KEY: [u8; 32] = [9; 32];
const RECORD_PLAIN: usize = 65_520;

struct Setup {
    service: Service,
    client: Client,
    folder: PathBuf,
}

impl Setup {
    /// In memory, whose file system is local everywhere.
    fn new() -> Self {
        static SETUPS: AtomicUsize = AtomicUsize::new(0);
        let number = SETUPS.fetch_add(1, Ordering::Relaxed);
        let name = format!("serval-transfer-small-{}-{number}", std::process::id());
        let folder = PathBuf::from("/dev/shm").join(name);
        fs::create_dir_all(&folder).unwrap();
        let listener = LocalListener::bind(&folder.join("engine")).unwrap();
        let service = Service::start(listener, ServiceLimits::default()).unwrap();
        let client = Client::connect(&folder.join("engine")).unwrap();
        Self { service, client, folder }
    }

    fn file(&self, content: &[u8]) -> File {
        fs::write(self.folder.join("source"), content).unwrap();
        File::open(self.folder.join("source")).unwrap()
    }

    /// Transfers that the engine has begun.
    fn of_engine(&self) -> u64 {
        self.service.counters().started()
    }
}

impl Drop for Setup {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.folder);
    }
}

fn content(bytes: usize) -> Vec<u8> {
    (0..bytes).map(|at| (at * 7 + at / 251) as u8).collect()
}

fn tcp() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let to = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    (to, listener.accept().unwrap().0)
}

/// What arrives; the sender's descriptors have been closed.
fn all(mut from: impl std::io::Read) -> Vec<u8> {
    let mut got = Vec::new();
    from.read_to_end(&mut got).unwrap();
    got
}

#[test]
fn a_small_file_is_sealed_and_sent_without_the_engine() {
    let mut setup = Setup::new();
    for bytes in [1, 4096, RECORD_PLAIN - 1, RECORD_PLAIN, SMALL_BYTES_MAX as usize] {
        let plain = content(bytes);
        let (to, from) = UnixStream::pair().unwrap();
        let reader = std::thread::spawn(move || all(from));
        let source = Source::file(setup.file(&plain), 0, Some(bytes as u64));
        let sealed = source.digest(DigestKind::Sha256).seal(Key::new(KEY));
        // The caller keeps the socket, or gives it away.
        let ended = match bytes % 2 {
            0 => setup.client.send(sealed, &to).unwrap(),
            _ => setup.client.run(sealed.socket(to.try_clone().unwrap())).unwrap(),
        };
        drop(to);
        assert_eq!(ended.result, Ok(()));
        let sealed = reader.join().unwrap();
        let counts = (ended.report.read, ended.report.written);
        assert_eq!(counts, (bytes as u64, sealed.len() as u64));
        assert_eq!(common::open(&KEY, &sealed), Some(plain.clone()), "{bytes} bytes");
        use sha2::Digest as _;
        let digest = sha2::Sha256::digest(&plain);
        assert_eq!(ended.report.digest().unwrap().bytes(), digest.as_slice());
    }
    assert_eq!(setup.of_engine(), 0);
}

#[test]
fn what_is_longer_or_may_wait_for_another_program_goes_to_the_engine() {
    let mut setup = Setup::new();
    let send = |setup: &mut Setup, file: File, bytes: Option<u64>, expected: &[u8]| {
        let (to, from) = tcp();
        let reader = std::thread::spawn(move || all(from));
        let ended = setup.client.send(Source::file(file, 0, bytes), &to).unwrap();
        assert_eq!(ended.result, Ok(()));
        drop(to);
        assert!(reader.join().unwrap() == expected);
    };
    let long = content(SMALL_BYTES_MAX as usize + 1);
    let file = setup.file(&long);
    send(&mut setup, file, None, &long);
    assert_eq!(setup.of_engine(), 1);
    // A part of it is small.
    let file = setup.file(&long);
    send(&mut setup, file, Some(10), &long[..10]);
    assert_eq!(setup.of_engine(), 1);
    // What the host kernel makes up at each read.
    let version = fs::read("/proc/version").unwrap();
    send(&mut setup, File::open("/proc/version").unwrap(), None, &version);
    assert_eq!(setup.of_engine(), 2);
    // Another transfer of the connection is in flight: it could use the same socket.
    let (ours, mut theirs) = UnixStream::pair().unwrap();
    let sink = File::create(setup.folder.join("sink")).unwrap();
    let first = setup.client.submit(Source::socket(ours, Some(3)).file(sink, 0)).unwrap();
    let file = setup.file(b"small");
    send(&mut setup, file, None, b"small");
    assert_eq!(setup.of_engine(), 4);
    theirs.write_all(b"abc").unwrap();
    let file = setup.file(b"small");
    send(&mut setup, file, None, b"small");
    // Its answer is kept, whenever it came.
    match setup.client.next(PATIENCE).unwrap() {
        Some(Answer::Ended { id, result, .. }) => assert_eq!((id, result), (first, Ok(()))),
        other => panic!("{other:?}"),
    }
    let before = setup.of_engine();
    let file = setup.file(b"small");
    send(&mut setup, file, None, b"small");
    assert_eq!(setup.of_engine(), before);
}

/// A socket whose peer reads nothing, with the bytes that it has taken.
fn full() -> (UnixStream, UnixStream, usize) {
    let (to, from) = UnixStream::pair().unwrap();
    to.set_nonblocking(true).unwrap();
    let mut filled = 0;
    while let Ok(put) = (&to).write(&[0; 4096]) {
        filled += put;
    }
    (to, from, filled)
}

#[test]
fn a_small_transfer_waits_for_room_and_its_limits_end_it() {
    let mut setup = Setup::new();
    let plain = content(60_000);
    let command = |setup: &Setup, to: UnixStream| -> Command {
        Source::file(setup.file(&plain), 0, None).seal(Key::new(KEY)).socket(to)
    };
    // The peer reads once the sender waits.
    let (to, mut from, filled) = full();
    let reader = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(20));
        from.read_exact(&mut vec![0; filled]).unwrap();
        all(from)
    });
    let command_of_full = command(&setup, to);
    assert_eq!(setup.client.run(command_of_full).unwrap().result, Ok(()));
    assert!(common::open(&KEY, &reader.join().unwrap()).unwrap() == plain);
    for (limit, name) in [("stall", "stalled"), ("deadline", "deadline")] {
        let (to, from, filled) = full();
        let limited = command(&setup, to);
        let limited = match limit {
            "stall" => limited.stall(Duration::from_millis(50)),
            _ => limited.deadline(Duration::from_millis(50)),
        };
        let began = Instant::now();
        let ended = setup.client.run(limited).unwrap();
        assert!(began.elapsed() >= Duration::from_millis(50));
        assert_eq!(ended.result.unwrap_err().name(), name);
        assert_eq!((ended.report.read, ended.report.written), (60_000, 0));
        // The sender's descriptor is closed.
        assert_eq!(all(from).len(), filled);
    }
    assert_eq!(setup.of_engine(), 0);
}

#[test]
fn a_small_transfer_fails_for_the_reasons_of_an_engine() {
    let mut setup = Setup::new();
    let name = |setup: &mut Setup, command: Command| {
        setup.client.run(command).unwrap().result.unwrap_err().name()
    };
    let (to, _from) = UnixStream::pair().unwrap();
    let file = setup.file(b"small");
    let short = Source::file(file, 0, Some(10)).socket(to);
    assert_eq!(name(&mut setup, short), "file_ended");
    assert_eq!(setup.of_engine(), 0);
    // The engine says what it is about a descriptor, as long as nothing has left.
    let (to, from) = UnixStream::pair().unwrap();
    drop(from);
    let file = setup.file(b"small");
    assert_eq!(name(&mut setup, Source::file(file, 0, None).socket(to)), "closed");
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let file = setup.file(b"small");
    let listening: std::os::fd::OwnedFd = listener.into();
    assert_eq!(name(&mut setup, Source::file(file, 0, None).socket(listening)), "wrong_kind");
    let (to, _from) = UnixStream::pair().unwrap();
    let unreadable = File::options().append(true).open(setup.folder.join("source")).unwrap();
    assert_eq!(name(&mut setup, Source::file(unreadable, 0, Some(1)).socket(to)), "access");
    let (file, folder) = (setup.file(b"small"), File::open(&setup.folder).unwrap());
    assert_eq!(name(&mut setup, Source::file(file, 0, None).socket(folder)), "wrong_kind");
}

#[test]
fn a_small_transfer_ends_when_its_caller_gives_up() {
    let setup = Setup::new();
    let (to, from, filled) = full();
    let asked = AtomicUsize::new(0);
    let command = Source::file(setup.file(&content(60_000)), 0, None).socket(to);
    // It has waited once before the second question.
    let interrupted = || asked.fetch_add(1, Ordering::Relaxed) > 0;
    let ended = Small::default().run(&command, &interrupted).unwrap();
    assert_eq!(ended.result, Err(TransferError::Cancelled));
    assert_eq!((ended.report.read, ended.report.written), (60_000, 0));
    drop(command);
    assert_eq!(all(from).len(), filled);
    // What is not small is left to the caller.
    let (to, _from) = UnixStream::pair().unwrap();
    let file = setup.file(&content(SMALL_BYTES_MAX as usize + 1));
    let command = Source::file(file, 0, None).socket(to);
    assert!(Small::default().run(&command, &|| true).is_none());
}
