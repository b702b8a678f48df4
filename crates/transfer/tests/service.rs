//! A transfer engine for other processes: callers pass descriptors, and a caller that breaks the protocol, leaves or reads nothing
//! costs only its own transfers.

use std::fs::{self, File};
use std::io::{self, Read as _, Write as _};
use std::os::fd::AsFd as _;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use sys::local::{LocalListener, LocalSocket};
use sys::readiness::{WakeFd, wait_readable};
use transfer::service::message::{
    ANSWER_BYTES_MAX, Answer, REQUEST_BYTES_MAX, Request, StartRequest,
};
use transfer::{
    Cipher, Client, ClientError, Command, DigestKind, Engine, ExpandLimits, FileRange, Format,
    HEAD_MAX, Key, Limits, Outcomes, Place, Service, ServiceLimits, Source, StageSpec,
};

const PATIENCE: Duration = Duration::from_secs(60);

/// An engine in a folder that goes away.
struct Setup {
    service: Service,
    folder: PathBuf,
}

impl Setup {
    fn new(name: &str, limits: ServiceLimits) -> Self {
        Self::with_engine(name, limits, Arc::new(Engine::start(limits.of_engine()).unwrap()))
    }

    /// Of an engine that this process uses as well.
    fn with_engine(name: &str, limits: ServiceLimits, engine: Arc<Engine>) -> Self {
        let name = format!("serval-transfer-service-{name}-{}", std::process::id());
        let folder = std::env::temp_dir().join(name);
        fs::create_dir_all(&folder).unwrap();
        let listener = LocalListener::bind(&folder.join("engine")).unwrap();
        Self { service: Service::with_engine(listener, limits, engine).unwrap(), folder }
    }

    fn client(&self) -> Client {
        Client::connect(&self.folder.join("engine")).unwrap()
    }

    /// A connection without the client's code.
    fn socket(&self) -> LocalSocket {
        LocalSocket::connect(&self.folder.join("engine")).unwrap()
    }

    fn file(&self, bytes: &[u8]) -> File {
        let path = self.folder.join("source");
        fs::write(&path, bytes).unwrap();
        File::open(path).unwrap()
    }

    fn sink(&self) -> File {
        File::create(self.folder.join("sink")).unwrap()
    }

    /// A whole transfer succeeds.
    fn works(&self) {
        let content = vec![42; 100_000];
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let reader = thread::spawn(move || {
            let mut got = Vec::new();
            theirs.read_to_end(&mut got).map(|_| got)
        });
        let mut client = self.client();
        let source = Source::file(self.file(&content), 0, None).digest(DigestKind::Md5);
        let id = client.submit(source.socket(ours)).unwrap();
        let Answer::Ended { id: ended, result, report } = answer(&mut client) else { panic!() };
        assert_eq!((ended, result), (id, Ok(())));
        assert_eq!((report.read, report.written), (100_000, 100_000));
        assert_eq!(report.digest().unwrap().kind(), DigestKind::Md5);
        assert!(reader.join().unwrap().unwrap() == content);
    }

    fn quiet(&self) {
        let deadline = std::time::Instant::now() + PATIENCE;
        while self.service.in_flight() > 0 {
            assert!(std::time::Instant::now() < deadline, "transfers stay in flight");
            thread::yield_now();
        }
    }

    fn failed(&self, reason: &str) -> u64 {
        self.service.counters().failed().find(|(name, _)| *name == reason).unwrap().1
    }
}

impl Drop for Setup {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.folder);
    }
}

fn answer(client: &mut Client) -> Answer {
    client.next(PATIENCE).unwrap().expect("an answer in time")
}

/// The next message on a bare connection; `None`: the engine has closed it.
fn message(socket: &LocalSocket) -> Option<Answer> {
    let mut bytes = [0; ANSWER_BYTES_MAX];
    loop {
        match socket.receive(&mut bytes) {
            Ok(Some(0)) | Err(_) => return None,
            Ok(Some(len)) => return Some(Answer::decode(&bytes[..len]).unwrap()),
            Ok(None) => assert!(wait_readable(&[socket.as_fd()], Some(PATIENCE))[0]),
        }
    }
}

fn name_of(answer: Option<Answer>) -> &'static str {
    match answer {
        Some(Answer::Ended { result: Err(error), .. }) => error.name(),
        other => panic!("{other:?}"),
    }
}

/// A request to receive, which lasts until its peer sends or leaves.
fn receive_request() -> StartRequest {
    let (socket, _peer) = UnixStream::pair().unwrap();
    StartRequest::of(&Source::socket(socket, None).file(File::open("/proc/self/exe").unwrap(), 0))
}

#[test]
fn a_caller_passes_descriptors_and_gets_the_outcome() {
    let setup = Setup::new("works", ServiceLimits::default());
    setup.works();
    let mode = fs::metadata(setup.folder.join("engine")).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    // The caller keeps its connection over many transfers, and learns how far one is.
    let mut client = setup.client();
    let (ours, mut theirs) = UnixStream::pair().unwrap();
    let id = client.submit(Source::socket(ours, None).file(setup.sink(), 0)).unwrap();
    theirs.write_all(&[1; 1000]).unwrap();
    loop {
        client.ask_progress(id).unwrap();
        if let Answer::Progress { id: of, written: 1000, .. } = answer(&mut client) {
            assert_eq!(of, id);
            break;
        }
    }
    client.cancel(id).unwrap();
    let Answer::Ended { result, report, .. } = answer(&mut client) else { panic!() };
    assert_eq!((result.unwrap_err().name(), report.written), ("cancelled", 1000));
    assert_eq!(setup.failed("cancelled"), 1);
    drop(theirs);
    setup.quiet();
}

/// A count that is read: what has been added since.
fn counted(eventfd: &WakeFd) -> u64 {
    let mut count = [0; 8];
    let mut file = File::from(eventfd.as_fd().try_clone_to_owned().unwrap());
    match file.read(&mut count) {
        Ok(_) => u64::from_ne_bytes(count),
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => 0,
        Err(error) => panic!("{error}"),
    }
}

#[test]
fn one_eventfd_counts_the_ends_of_several_connections_and_engines() {
    let setup = Setup::new("signal", ServiceLimits::default());
    let eventfd = WakeFd::new().unwrap();
    let (mut first, mut second) = (setup.client(), setup.client());
    first.signal(&eventfd).unwrap();
    second.signal(&eventfd).unwrap();
    let engine = Engine::start(Limits::default()).unwrap();
    let outcomes = Outcomes::new(eventfd.as_fd().try_clone_to_owned().unwrap()).unwrap();
    let (source, sink) = (setup.file(&[3; 5000]), setup.sink());
    let copy = || {
        let source = Source::file(source.try_clone().unwrap(), 0, None);
        source.file(sink.try_clone().unwrap(), 0)
    };
    // One that does not end, and its progress, count nothing.
    let (ours, mut theirs) = UnixStream::pair().unwrap();
    let waits = first.submit(Source::socket(ours, None).file(setup.sink(), 0)).unwrap();
    first.ask_progress(waits).unwrap();
    assert!(matches!(answer(&mut first), Answer::Progress { .. }));
    assert_eq!(counted(&eventfd), 0);
    let mut expected = 0;
    for number in 0..4 {
        first.submit(copy()).unwrap();
        second.submit(copy()).unwrap();
        outcomes.submit(&engine, number, copy()).unwrap();
        expected += 3;
    }
    // A refusal of a start is a result as well.
    second.submit(Source::file(source.try_clone().unwrap(), 0, None).socket(setup.sink())).unwrap();
    expected += 1;
    let mut seen = 0;
    while seen < expected {
        assert!(wait_readable(&[eventfd.as_fd()], Some(PATIENCE))[0], "{seen} of {expected}");
        seen += counted(&eventfd);
    }
    assert_eq!(seen, expected);
    // All of them are there without a wait.
    for (client, results) in [(&mut first, 4), (&mut second, 5)] {
        for _ in 0..results {
            let answer = client.next(Duration::ZERO).unwrap();
            assert!(matches!(answer, Some(Answer::Ended { .. })), "{answer:?}");
        }
        assert_eq!(client.next(Duration::ZERO).unwrap(), None);
    }
    let mut numbers: Vec<u64> = std::iter::from_fn(|| outcomes.next())
        .map(|(number, outcome)| {
            assert_eq!((outcome.result, outcome.report.written), (Ok(()), 5000));
            number
        })
        .collect();
    numbers.sort_unstable();
    assert_eq!(numbers, [0, 1, 2, 3]);
    // Another one takes its place.
    let other = WakeFd::new().unwrap();
    first.signal(&other).unwrap();
    // The engine reads one request after the other.
    first.ask_progress(waits).unwrap();
    assert!(matches!(answer(&mut first), Answer::Progress { .. }));
    theirs.write_all(&[1; 10]).unwrap();
    drop(theirs);
    assert!(wait_readable(&[other.as_fd()], Some(PATIENCE))[0]);
    assert_eq!((counted(&other), counted(&eventfd)), (1, 0));
    assert!(matches!(answer(&mut first), Answer::Ended { result: Ok(()), .. }));
    setup.quiet();
}

#[test]
fn what_cannot_count_is_refused() {
    let setup = Setup::new("no-signal", ServiceLimits::default());
    let mut client = setup.client();
    let (socket, other) = UnixStream::pair().unwrap();
    for wrong in [setup.file(&[]).as_fd(), socket.as_fd()] {
        assert!(matches!(client.signal(wrong), Err(ClientError::NoCounter)));
    }
    let file = setup.file(&[]).into();
    assert!(Outcomes::new(file).is_err());
    // The engine does not believe a client that says otherwise, and the connection stays open only for what it understands.
    let eventfd = WakeFd::new().unwrap();
    for descriptors in [vec![], vec![other.as_fd()], vec![eventfd.as_fd(), eventfd.as_fd()]] {
        let bare = setup.socket();
        bare.send(&Request::Signal.encode(), &descriptors).unwrap();
        assert_eq!(name_of(message(&bare)), "bad_request");
        assert_eq!(message(&bare), None);
    }
    assert_eq!(setup.failed("bad_request"), 3);
    assert_eq!(counted(&eventfd), 0);
    // The first client is not affected.
    client.signal(&eventfd).unwrap();
    client.submit(Source::file(setup.file(&[1]), 0, None).file(setup.sink(), 0)).unwrap();
    assert!(wait_readable(&[eventfd.as_fd()], Some(PATIENCE))[0]);
    setup.quiet();
}

#[test]
fn the_transfers_of_all_callers_are_listed() {
    let setup = Setup::new("list", ServiceLimits::default());
    let (mut one, mut two) = (setup.client(), setup.client());
    let list = |client: &mut Client| {
        client.ask_list().unwrap();
        match answer(client) {
            Answer::List { total, entries, queues } => (total, entries, queues),
            other => panic!("{other:?}"),
        }
    };
    assert_eq!(list(&mut two), (0, Vec::new(), Vec::new()));
    let (ours, mut theirs) = UnixStream::pair().unwrap();
    let source = Source::socket(ours, None).digest(DigestKind::Md5);
    let id = one.submit(source.file(setup.sink(), 0)).unwrap();
    theirs.write_all(&[1; 1000]).unwrap();
    let deadline = std::time::Instant::now() + PATIENCE;
    let (entry, queues) = loop {
        let (total, mut entries, queues) = list(&mut two);
        if let Some(entry) = entries
            .pop_if(|entry| (entry.written, entry.activity) == (1000, transfer::Activity::Waiting))
        {
            assert_eq!(total, 1);
            break (entry, queues);
        }
        assert!(std::time::Instant::now() < deadline);
        thread::yield_now();
    };
    assert_eq!((entry.id, entry.process, entry.read), (id, std::process::id(), 1000));
    assert_eq!((entry.source, entry.sink), (transfer::Device::Socket, transfer::Device::File));
    assert_eq!(entry.stages, [transfer::StageKind::Digest(DigestKind::Md5)]);
    // The files of one file system, and the sockets.
    let file_system = fs::metadata(&setup.folder).unwrap().dev();
    let [files, sockets] = &queues[..] else { panic!("{queues:?}") };
    assert_eq!((files.load.device, files.block), (transfer::Device::File, Some(file_system)));
    assert_eq!((files.load.taken, files.load.given, files.waiting), (0, 1000, 0));
    assert_eq!((sockets.load.device, sockets.block), (transfer::Device::Socket, None));
    assert_eq!((sockets.load.taken, sockets.load.given, sockets.waiting), (1000, 0, 1));
    assert_eq!(sockets.load.queued + sockets.load.running, 0, "it waits");
    drop(theirs);
    assert!(matches!(answer(&mut one), Answer::Ended { result: Ok(()), .. }));
    let (total, entries, queues) = list(&mut two);
    assert_eq!((total, entries), (0, Vec::new()));
    assert!(queues.iter().all(|queue| queue.waiting == 0 && queue.load.bytes_in_flight == 0));
}

/// Such as those that kernels of a server ask for.
#[test]
fn transfers_of_the_process_of_the_engine_are_listed_as_its_own() {
    let engine = Arc::new(Engine::start(Limits::default()).unwrap());
    let setup = Setup::with_engine("own", ServiceLimits::default(), engine.clone());
    let (mut client, mut waiting) = (setup.client(), Vec::new());
    let mut receive = || {
        let (ours, theirs) = UnixStream::pair().unwrap();
        waiting.push(theirs);
        Source::socket(ours, None).digest(DigestKind::Crc32c).file(setup.sink(), 0)
    };
    let id = client.submit(receive()).unwrap();
    let own = engine.submit(receive()).unwrap();
    let deadline = std::time::Instant::now() + PATIENCE;
    let mut listed = loop {
        client.ask_list().unwrap();
        match answer(&mut client) {
            Answer::List { total: 2, entries, .. } => break entries,
            _ => assert!(std::time::Instant::now() < deadline),
        }
    };
    listed.sort_by_key(|entry| entry.id);
    assert_eq!(listed.iter().map(|entry| entry.id).collect::<Vec<_>>(), [0, id]);
    for entry in listed {
        assert_eq!(entry.process, std::process::id());
        assert_eq!(entry.stages, [transfer::StageKind::Digest(DigestKind::Crc32c)]);
    }
    own.cancel();
    assert_eq!(own.wait().result, Err(transfer::TransferError::Cancelled));
    client.ask_list().unwrap();
    assert!(matches!(answer(&mut client), Answer::List { total: 1, .. }));
}

#[test]
fn several_files_pass_with_one_command() {
    let setup = Setup::new("several", ServiceLimits::default());
    let file = |name: usize| {
        let path = setup.folder.join(format!("part-{name}"));
        fs::write(&path, vec![name as u8; 1000 + name]).unwrap();
        FileRange { file: File::open(path).unwrap().into(), offset: 1, bytes: None }
    };
    let mut client = setup.client();
    let (ours, mut theirs) = UnixStream::pair().unwrap();
    let files = |count: usize| Source::files(file(0), (1..count).map(file).collect());
    let id = client.submit(files(8).socket(ours)).unwrap();
    let mut got = Vec::new();
    theirs.read_to_end(&mut got).unwrap();
    let expected: Vec<u8> = (0..8).flat_map(|name| vec![name as u8; 999 + name]).collect();
    let Answer::Ended { id: ended, result, .. } = answer(&mut client) else { panic!() };
    assert_eq!((ended, result), (id, Ok(())));
    assert!(got == expected);
    let many = client.submit(files(9).socket(theirs)).err().unwrap().to_string();
    assert!(many.ends_with("a source has at most 8 files"), "{many}");
}

#[test]
fn a_caller_that_leaves_takes_its_transfers_with_it() {
    let setup = Setup::new("leaves", ServiceLimits::default());
    let mut peers = Vec::new();
    for _ in 0..50 {
        let mut client = setup.client();
        for _ in 0..4 {
            let (ours, theirs) = UnixStream::pair().unwrap();
            client.submit(Source::socket(ours, None).file(setup.sink(), 0)).unwrap();
            peers.push(theirs);
        }
    }
    setup.quiet();
    // The engine's copies of the descriptors are closed: the peers see the end.
    for mut peer in peers {
        assert_eq!(peer.read(&mut [0]).unwrap_or(0), 0);
    }
    setup.works();
}

#[test]
fn messages_that_break_the_protocol_end_their_connection_only() {
    let setup = Setup::new("hostile", ServiceLimits::default());
    let mut client = setup.client();
    let (ours, theirs) = UnixStream::pair().unwrap();
    let innocent = client.submit(Source::socket(ours, None).file(setup.sink(), 0)).unwrap();
    let start = Request::Start { id: 1, start: receive_request() }.encode();
    let mut wrong_version = start.clone();
    wrong_version[3] = b'1';
    let mut wrong_kind = start.clone();
    wrong_kind[4] = 9;
    let long = [&start[..], &[0]].concat();
    let (file, (socket, _peer)) = (setup.sink(), UnixStream::pair().unwrap());
    for bytes in [&start[..10], &long, &wrong_version, &wrong_kind, &[7; 80]] {
        let bare = setup.socket();
        bare.send(bytes, &[socket.as_fd(), file.as_fd()]).unwrap();
        assert_eq!(name_of(message(&bare)), "bad_request");
        assert_eq!(message(&bare), None, "the connection is closed");
    }
    // Too few and too many descriptors are refused, and the connection stays.
    let bare = setup.socket();
    for descriptors in [&[][..], &[file.as_fd()], &[file.as_fd(); 3], &[file.as_fd(); 4]] {
        bare.send(&start, descriptors).unwrap();
        assert_eq!(name_of(message(&bare)), "bad_request");
    }
    bare.send(&start, &[file.as_fd(), socket.as_fd()]).unwrap();
    assert_eq!(name_of(message(&bare)), "wrong_kind");
    bare.send(&start, &[socket.as_fd(), file.as_fd()]).unwrap();
    bare.send(&start, &[socket.as_fd(), file.as_fd()]).unwrap();
    assert_eq!(name_of(message(&bare)), "bad_request");
    // Numbers without a transfer are ignored.
    bare.send(&Request::Cancel(99).encode(), &[]).unwrap();
    bare.send(&Request::Progress(99).encode(), &[]).unwrap();
    bare.send(&Request::Cancel(1).encode(), &[]).unwrap();
    assert_eq!(name_of(message(&bare)), "cancelled");
    setup.works();
    drop(theirs);
    let Answer::Ended { id, result, .. } = answer(&mut client) else { panic!() };
    assert_eq!((id, result), (innocent, Ok(())));
}

#[test]
fn limits_hold_for_each_caller_and_for_all() {
    let limits = ServiceLimits { in_flight: 1, per_client: 2, clients: 3, ..Default::default() };
    let setup = Setup::new("all", limits);
    let (ours, theirs) = UnixStream::pair().unwrap();
    let mut client = setup.client();
    client.submit(Source::socket(ours, None).file(setup.sink(), 0)).unwrap();
    let (ours, _theirs) = UnixStream::pair().unwrap();
    client.submit(Source::socket(ours, None).file(setup.sink(), 0)).unwrap();
    let Answer::Ended { result: Err(error), .. } = answer(&mut client) else { panic!() };
    let all = "1 transfers are in flight, which is the limit: wait until one has ended";
    assert_eq!(error.text, all);
    drop((theirs, setup));
    let limits = ServiceLimits { in_flight: 3, per_client: 2, clients: 3, ..Default::default() };
    let setup = Setup::new("limits", limits);
    let mut peers = Vec::new();
    let mut submit = |client: &mut Client| {
        let (ours, theirs) = UnixStream::pair().unwrap();
        peers.push(theirs);
        client.submit(Source::socket(ours, None).file(setup.sink(), 0)).unwrap()
    };
    let text = |answer: Answer| match answer {
        Answer::Ended { result: Err(error), .. } => error.text,
        other => panic!("{other:?}"),
    };
    let (mut one, mut two) = (setup.client(), setup.client());
    submit(&mut one);
    submit(&mut two);
    // Both connections are of one process.
    let own = "2 transfers are in flight, which is the limit: wait until one has ended";
    submit(&mut one);
    assert_eq!(text(answer(&mut one)), own);
    submit(&mut two);
    assert_eq!(text(answer(&mut two)), own);
    let _three = setup.client();
    let refused = setup.client().next(PATIENCE);
    let Err(ClientError::Refused(error)) = refused else { panic!("{refused:?}") };
    assert_eq!(error.name(), "too_many_clients");
    drop(one);
    let deadline = std::time::Instant::now() + PATIENCE;
    while setup.service.in_flight() > 1 {
        assert!(std::time::Instant::now() < deadline);
        thread::yield_now();
    }
    setup.works();
}

/// One process gets half of the memory, on all its connections, and again what it gives back.
#[test]
fn a_caller_leaves_memory_for_others() {
    let setup = Setup::new("share", ServiceLimits { memory_mib: 64, ..Default::default() });
    let mut clients = [setup.client(), setup.client()];
    let mut peers = Vec::new();
    // 10 MiB each: three leave as much as they have. Returns how many are in flight, and whether this one was refused.
    let mut submit = |client: &mut Client| {
        let ((from, ours), (to, theirs)) =
            (UnixStream::pair().unwrap(), UnixStream::pair().unwrap());
        peers.push((ours, theirs));
        let source = Source::socket(from, None);
        let command = source.expand(Format::Zstd, ExpandLimits::default()).socket(to);
        let id = client.submit(command).unwrap();
        client.ask_list().unwrap();
        let mut refused = false;
        loop {
            match answer(client) {
                Answer::Ended { id: ended, result: Err(error), .. } => {
                    assert_eq!((ended, error.name()), (id, "too_much_memory"));
                    refused = true;
                }
                Answer::List { total, .. } => return (id, total, refused),
                other => panic!("{other:?}"),
            }
        }
    };
    let (first, total, refused) = submit(&mut clients[0]);
    assert_eq!((total, refused), (1, false));
    for total in 2..=3 {
        let (_, now, refused) = submit(&mut clients[1]);
        assert_eq!((now, refused), (total, false));
    }
    for client in &mut clients {
        let (_, total, refused) = submit(client);
        assert_eq!((total, refused), (3, true));
    }
    clients[0].cancel(first).unwrap();
    let Answer::Ended { id, .. } = answer(&mut clients[0]) else { panic!() };
    assert_eq!(id, first);
    let (_, total, refused) = submit(&mut clients[1]);
    assert_eq!((total, refused), (3, false));
}

#[test]
fn a_caller_that_reads_later_is_slowed_down_and_gets_every_answer() {
    const REQUESTS: u64 = 3000;
    let setup = Setup::new("deaf", ServiceLimits::default());
    let bare = setup.socket();
    let (mut sent, mut answered) = (0, 0);
    // Each is answered at once. The caller sends as long as the engine reads, and reads as little as it has to.
    while sent < REQUESTS {
        let mut held_up = 0;
        while sent < REQUESTS && held_up < 3 {
            let id = sent + 1;
            match bare.send(&Request::Start { id, start: receive_request() }.encode(), &[]) {
                Ok(()) => (sent, held_up) = (id, 0),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    // Meanwhile the engine serves another one, and would have read on.
                    setup.works();
                    held_up += 1;
                }
                Err(error) => panic!("it is cut off after {sent} requests: {error}"),
            }
        }
        for _ in 0..100.min(sent - answered) {
            answered += 1;
            let Some(Answer::Ended { id, result: Err(error), .. }) = message(&bare) else {
                panic!("it is cut off after {answered} answers")
            };
            assert_eq!((id, error.name()), (answered, "bad_request"));
        }
    }
    while answered < sent {
        answered += 1;
        let Some(Answer::Ended { id, .. }) = message(&bare) else { panic!("it is cut off") };
        assert_eq!(id, answered);
    }
    assert_eq!(setup.failed("bad_request"), REQUESTS);
    setup.works();
}

/// Ends are counted when their answers can be read, also of a caller that reads late.
#[test]
fn answers_that_wait_are_counted_when_they_are_there() {
    const REQUESTS: u64 = 2000;
    let setup = Setup::new("late", ServiceLimits::default());
    let (mut client, eventfd) = (setup.client(), WakeFd::new().unwrap());
    client.signal(&eventfd).unwrap();
    let source = setup.file(&[1]);
    let (mut ended, mut count) = (0, 0);
    for _ in 0..REQUESTS {
        let copy = Source::file(source.try_clone().unwrap(), 0, None).file(setup.sink(), 0);
        let mut copy = Some(copy);
        while let Some(command) = copy.take() {
            match client.submit(command) {
                Ok(_) => {}
                Err(ClientError::Full(command)) => {
                    copy = Some(*command);
                    // It reads one answer when the engine reads no more.
                    assert!(matches!(answer(&mut client), Answer::Ended { .. }));
                    ended += 1;
                }
                Err(error) => panic!("{error}"),
            }
        }
        count += counted(&eventfd);
    }
    while ended < REQUESTS {
        assert!(matches!(answer(&mut client), Answer::Ended { .. }));
        ended += 1;
    }
    // The last one is counted right behind its answer.
    while count < REQUESTS {
        assert!(wait_readable(&[eventfd.as_fd()], Some(PATIENCE))[0], "{count} of {REQUESTS}");
        count += counted(&eventfd);
    }
    setup.quiet();
    assert_eq!(count + counted(&eventfd), REQUESTS);
}

#[test]
fn the_end_of_the_service_ends_its_transfers() {
    let setup = Setup::new("ends", ServiceLimits::default());
    let mut client = setup.client();
    let (ours, mut theirs) = UnixStream::pair().unwrap();
    client.submit(Source::socket(ours, None).file(setup.sink(), 0)).unwrap();
    theirs.write_all(&[1]).unwrap();
    let path = setup.folder.join("engine");
    drop(setup);
    // An answer, or the end of the connection.
    match client.next(PATIENCE) {
        Ok(Some(Answer::Ended { result: Err(error), .. })) => {
            assert!(matches!(error.name(), "cancelled" | "stopping"));
        }
        other => assert!(matches!(other, Err(ClientError::Closed)), "{other:?}"),
    }
    assert_eq!(theirs.read(&mut [0]).unwrap_or(0), 0);
    let error = Client::connect(&path).err().unwrap().to_string();
    assert!(error.starts_with("no transfer engine answers at"), "{error}");
}

#[test]
fn a_command_that_finds_no_room_comes_back() {
    let setup = Setup::new("room", ServiceLimits::default());
    let path = setup.folder.join("silent");
    let listener = LocalListener::bind(&path).unwrap();
    let mut client = Client::connect(&path).unwrap();
    let engine = listener.accept().unwrap().unwrap();
    while client.cancel(1).is_ok() {}
    let (ours, _theirs) = UnixStream::pair().unwrap();
    let submitted = client.submit(Source::socket(ours, None).file(setup.sink(), 0));
    let Err(ClientError::Full(command)) = submitted else { panic!("{submitted:?}") };
    while engine.receive(&mut [0; REQUEST_BYTES_MAX]).unwrap().is_some() {}
    assert_eq!(client.submit(*command).unwrap(), 1);
}

/// What a caller has received from a socket before goes first through all stages, once.
#[test]
fn bytes_that_were_received_before_come_first() {
    let setup = Setup::new("head", ServiceLimits::default());
    let content: Vec<u8> = (0..400_000u32).map(|at| (at % 251) as u8).collect();
    let key = || Key::new([7; 32]);
    let digests = [DigestKind::Md5, DigestKind::Crc32c].map(StageSpec::Digest).to_vec();
    let seal = vec![digests[0].clone(), StageSpec::Seal(Cipher::Aes256Gcm, key())];
    for (head, rest) in [(1, None), (100, Some(0)), (HEAD_MAX, Some(300_000)), (0, Some(7))] {
        let total = head + rest.unwrap_or(content.len() - head);
        for stages in [Vec::new(), digests.clone(), seal.clone()] {
            let (mut ours, theirs) = UnixStream::pair().unwrap();
            let sent = content[head..].to_vec();
            // Not all of it is received.
            let writer = thread::spawn(move || _ = ours.write_all(&sent));
            let (source, sink) =
                (Place::Socket(theirs.into()), Place::File(setup.sink().into(), 0));
            let command = Command::new(source, rest.map(|rest| rest as u64), stages.clone(), sink);
            let mut client = setup.client();
            client.submit(command.after(content[..head].to_vec())).unwrap();
            let Answer::Ended { result, report, .. } = answer(&mut client) else { panic!() };
            assert_eq!((result, report.read), (Ok(()), (total - head) as u64));
            writer.join().unwrap();
            if let Some(digest) = report.digest() {
                use md5::Digest as _;
                assert_eq!(digest.bytes(), md5::Md5::digest(&content[..total]).as_slice());
            }
            let opened = setup.folder.join("opened");
            let sealed = File::open(setup.folder.join("sink")).unwrap();
            let engine = Engine::start(Limits::default()).unwrap();
            let source = Source::file(sealed, 0, None);
            let command = match stages == seal {
                true => source.open(key()).file(File::create(&opened).unwrap(), 0),
                false => source.file(File::create(&opened).unwrap(), 0),
            };
            assert_eq!(engine.submit(command).unwrap().wait().result, Ok(()));
            assert!(fs::read(opened).unwrap() == content[..total], "{head} and {rest:?}");
        }
    }
    let refused = |command: Command, head: usize| {
        let mut client = setup.client();
        let error = client.submit(command.after(vec![1; head])).unwrap_err();
        assert!(matches!(error, ClientError::Order(_)));
        error.to_string()
    };
    let stream = || UnixStream::pair().unwrap().0;
    let file = Source::file(setup.file(b"content"), 0, None).socket(stream());
    assert!(refused(file, 1).ends_with("only a socket can have bytes that were received before"));
    let long = Source::socket(stream(), None).file(setup.sink(), 0);
    assert!(
        refused(long, HEAD_MAX + 1)
            .ends_with("16385 bytes were received before, and 16384 is the limit")
    );
}

#[test]
fn the_null_device_drops_what_it_gets() {
    let setup = Setup::new("null", ServiceLimits::default());
    let null = File::options().write(true).open("/dev/null").unwrap();
    let mut client = setup.client();
    let source = Source::file(setup.file(&[5; 700_000]), 0, None).digest(DigestKind::Crc32c);
    client.submit(source.file(null, 0).sync()).unwrap();
    let Answer::Ended { result, report, .. } = answer(&mut client) else { panic!() };
    assert_eq!((result, report.written), (Ok(()), 700_000));
    let source = Source::file(File::open("/dev/null").unwrap(), 0, None);
    client.submit(source.socket(UnixStream::pair().unwrap().0)).unwrap();
    let Answer::Ended { result, .. } = answer(&mut client) else { panic!() };
    assert_eq!(result.unwrap_err().text, "the source is a device: it has to be a file");
}
