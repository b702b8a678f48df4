//! Transfers of other users than the engine's: who is admitted, with whose rights the system calls are made, and what becomes of transfers when the process that
//! makes them ends, stops or hangs. Root runs these tests; programs of user 65 534, and processes for it, are this program again.

use std::ffi::OsString;
use std::fs::{self, File, Permissions};
use std::io::{Read as _, Write as _};
use std::os::fd::OwnedFd;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt as _;
use std::path::PathBuf;
use std::process::{Child, Command as Process, Stdio};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use sys::local::LocalListener;
use transfer::service::message::Answer;
use transfer::{
    Client, ClientError, Command, DigestKind, Engine, FileRange, Key, RemoteError, Report, Service,
    ServiceLimits, Source, TenantShare, UserProgram,
};

const PATIENCE: Duration = Duration::from_secs(60);
/// Says what this program is, if it is not the test.
const ROLE: &str = "SERVAL_TEST_USERS_ROLE";
const FOLDER: &str = "SERVAL_TEST_USERS_FOLDER";
const USER: u32 = 65_534;
const OTHER_USER: u32 = 65_533;
const BYTES: usize = 3_000_001;

fn arguments(test: &str) -> Vec<OsString> {
    [test, "--exact", "--ignored", "--nocapture", "--quiet"].map(OsString::from).to_vec()
}

/// An engine with tenants, and a folder of each user, which go away.
struct Setup {
    service: Service,
    engine: Arc<Engine>,
    folder: PathBuf,
}

impl Setup {
    fn new(name: &str) -> Self {
        Self::with(name, true, ServiceLimits::default())
    }

    /// `has_processes`: those of other users than root.
    fn with(name: &str, has_processes: bool, limits: ServiceLimits) -> Self {
        let name = format!("serval-transfer-users-{name}-{}", std::process::id());
        let folder = std::env::temp_dir().join(name);
        fs::create_dir_all(&folder).unwrap();
        fs::set_permissions(&folder, Permissions::from_mode(0o755)).unwrap();
        for user in [USER, OTHER_USER] {
            let own = folder.join(user.to_string());
            fs::create_dir_all(&own).unwrap();
            std::os::unix::fs::chown(&own, Some(user), Some(user)).unwrap();
        }
        // This program where every user can execute it.
        let path = folder.join("program");
        fs::copy("/proc/self/exe", &path).unwrap();
        fs::set_permissions(&path, Permissions::from_mode(0o755)).unwrap();
        let environment =
            [(ROLE.into(), "process".into()), (FOLDER.into(), folder.clone().into())].to_vec();
        let arguments = arguments("the_process_of_a_user");
        let program = has_processes.then_some(UserProgram { path, arguments, environment });
        let engine = Arc::new(Engine::start(limits.of_engine()).unwrap());
        engine.set_tenants(vec![tenant("red", vec![USER]), tenant("blue", vec![OTHER_USER])]);
        let listener = LocalListener::bind(&folder.join("engine")).unwrap();
        // As the server does when tenants have users.
        fs::set_permissions(folder.join("engine"), Permissions::from_mode(0o666)).unwrap();
        let service = Service::with_users(listener, limits, engine.clone(), program).unwrap();
        Self { service, engine, folder }
    }

    /// A program of a user; it succeeds, or says why not.
    fn runs(&self, user: u32, role: &str) {
        finish(self.start(user, role));
    }

    fn start(&self, user: u32, role: &str) -> Child {
        let mut command = Process::new(self.program());
        command.args(arguments("a_program_of_a_user")).uid(user).gid(user);
        self.spawn(command, role)
    }

    fn program(&self) -> PathBuf {
        self.folder.join("program")
    }

    fn spawn(&self, mut command: Process, role: &str) -> Child {
        command.env(ROLE, role).env(FOLDER, &self.folder);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command.spawn().unwrap()
    }

    /// Whether this is the environment of a process that the engine has started: what it was given, and who it becomes.
    fn is_environment(&self, of_process: &[u8]) -> bool {
        let text = String::from_utf8_lossy(of_process);
        let (becomes, given): (Vec<&str>, Vec<&str>) =
            text.split_terminator('\0').partition(|of| of.starts_with("SERVAL_IDENTITY="));
        let expected = [format!("{FOLDER}={}", self.folder.display()), format!("{ROLE}=process")];
        becomes.len() == 1 && given == expected
    }

    /// The processes of this user that the engine has started.
    fn processes(&self, user: u32) -> Vec<u32> {
        let own = format!("PPid:\t{}\n", std::process::id());
        let uid = format!("Uid:\t{user}\t{user}\t{user}\t{user}\n");
        let all = fs::read_dir("/proc").unwrap().filter_map(|entry| {
            let number = entry.ok()?.file_name().to_str()?.parse::<u32>().ok()?;
            let status = fs::read_to_string(format!("/proc/{number}/status")).ok()?;
            let role = fs::read(format!("/proc/{number}/environ")).ok()?;
            let is_process = self.is_environment(&role);
            (status.contains(&own) && status.contains(&uid) && is_process).then_some(number)
        });
        all.collect()
    }

    fn failed(&self, reason: &str) -> u64 {
        self.service.counters().failed().find(|(name, _)| *name == reason).unwrap().1
    }

    /// A transfer of root succeeds.
    fn works(&self) {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let mut client = Client::connect(&self.folder.join("engine")).unwrap();
        let file = File::open(self.program()).unwrap();
        client.submit(Source::file(file, 0, Some(70_000)).socket(ours)).unwrap();
        let mut got = Vec::new();
        theirs.read_to_end(&mut got).unwrap();
        assert_eq!(got.len(), 70_000);
        assert_eq!(ended(&mut client).0, Ok(()));
    }
}

impl Drop for Setup {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.folder);
    }
}

fn is_root() -> bool {
    let is_root = sys::process::user() == 0;
    if !is_root {
        eprintln!("SKIPPED: only root can start programs of other users");
    }
    is_root
}

fn tenant(name: &str, users: Vec<u32>) -> TenantShare {
    TenantShare { name: name.to_owned(), weight: 1, users }
}

fn finish(child: Child) {
    let output = child.wait_with_output().unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let (said, complained) = (text(&output.stdout), text(&output.stderr));
    assert!(output.status.success() && said.contains("1 passed"), "{said}{complained}");
}

fn wait_until(what: &str, mut is: impl FnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !is() {
        assert!(Instant::now() < deadline, "{what}");
        thread::sleep(Duration::from_millis(5));
    }
}

fn ended(client: &mut Client) -> (Result<(), RemoteError>, Report) {
    match client.next(PATIENCE).unwrap().expect("an answer in time") {
        Answer::Ended { result, report, .. } => (result, report),
        other => panic!("{other:?}"),
    }
}

fn content() -> Vec<u8> {
    (0..BYTES).map(|at| (at.wrapping_mul(2_654_435_761) >> 13) as u8).collect()
}

#[test]
#[ignore = "the process of a user, which an engine of another test starts"]
fn the_process_of_a_user() {
    if std::env::var_os(ROLE).is_some() {
        // Its engine ends, or not: the tests see what it does.
        let _ = transfer::serve_user();
        sys::process::exit_now(0);
    }
}

/// What a program of a user does.
#[test]
#[ignore = "a program of a user, which another test starts"]
fn a_program_of_a_user() {
    let Some(role) = std::env::var_os(ROLE) else { return };
    let folder = PathBuf::from(std::env::var_os(FOLDER).unwrap());
    let own = folder.join(sys::process::user().to_string());
    let program = Program { engine: folder.join("engine"), own, folder };
    match role.to_str().unwrap() {
        "moves" => program.moves(),
        "shows itself" => program.shows_itself(),
        "writes too much" => program.writes_too_much(),
        "names files that lend rights" => program.names_files_that_lend_rights(),
        "names files of the kernel" => program.names_files_of_the_kernel(),
        "is a stranger" => program.is_refused("its own user, of root and of tenants' users"),
        "finds no processes" => program.is_refused("processes of its own user only"),
        "finds no root" => program.is_refused("only an engine of root serves users of tenants"),
        "loses its tenant" => program.loses_its_tenant(),
        "waits" => program.waits(),
        "is stopped" => program.is_stopped(),
        "lists" => program.lists(),
        "connects" => program.connects(),
        other => panic!("{other}"),
    }
}

/// A program of a user.
struct Program {
    engine: PathBuf,
    own: PathBuf,
    folder: PathBuf,
}

impl Program {
    fn client(&self) -> Client {
        Client::connect(&self.engine).unwrap()
    }

    fn file(&self, name: &str, bytes: &[u8]) -> File {
        fs::write(self.own.join(name), bytes).unwrap();
        File::options().read(true).write(true).open(self.own.join(name)).unwrap()
    }

    fn run(&self, command: Command) -> (Result<(), RemoteError>, Report) {
        let mut client = self.client();
        client.submit(command).unwrap();
        ended(&mut client)
    }

    /// Waits for the test.
    fn next_step(&self) {
        assert_eq!(std::io::stdin().read(&mut [0]).unwrap(), 1);
    }

    /// Lets the test go on.
    fn say(&self, word: &str) {
        println!("{word}");
        std::io::stdout().flush().unwrap();
    }

    fn moves(&self) {
        let content = content();
        let key = || Key::new([3; 32]);
        // A file to a socket, with stages.
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let reader = thread::spawn(move || {
            let mut got = Vec::new();
            theirs.read_to_end(&mut got).map(|_| got)
        });
        let source = Source::file(self.file("source", &content), 0, None);
        let (result, report) =
            self.run(source.digest(DigestKind::Sha256).digest(DigestKind::Crc32c).socket(ours));
        assert_eq!((result, report.written), (Ok(()), BYTES as u64));
        assert!(reader.join().unwrap().unwrap() == content);
        let digest = report.digest().unwrap();
        // A socket to a file, sealed and synced; then the file to a file, opened.
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let sent = content.clone();
        let writer = thread::spawn(move || theirs.write_all(&sent));
        let sink = self.file("sealed", &[]);
        let sealed = sink.try_clone().unwrap();
        let (result, _) = self.run(Source::socket(ours, None).seal(key()).file(sink, 0).sync());
        assert_eq!(result, Ok(()));
        writer.join().unwrap().unwrap();
        let source = Source::file(sealed, 0, None).open(key()).digest(DigestKind::Sha256);
        let (result, report) = self.run(source.file(self.file("opened", &[]), 5));
        assert_eq!((result, report.digest()), (Ok(()), Some(digest)));
        assert!(fs::read(self.own.join("opened")).unwrap()[5..] == content);
        // In parts, each by a thread of the engine.
        let large = content.repeat(7);
        let source = Source::file(self.file("large", &large), 3, None).digest(DigestKind::Crc32c);
        let (result, report) = self.run(source.file(self.file("copy", &[]), 0));
        assert_eq!((result, report.written), (Ok(()), large.len() as u64 - 3));
        assert!(fs::read(self.own.join("copy")).unwrap() == large[3..]);
        // Several files, and what drops all.
        let range = |name: &str, from: u64| FileRange {
            file: File::open(self.own.join(name)).unwrap().into(),
            offset: from,
            bytes: Some(1000),
        };
        let first = range("source", 0);
        let more = vec![range("large", 77), range("copy", 99)];
        let (result, _) = self.run(Source::files(first, more).file(self.file("joined", &[]), 0));
        assert_eq!(result, Ok(()));
        let joined = [&content[..1000], &large[77..1077], &large[102..1102]].concat();
        assert!(fs::read(self.own.join("joined")).unwrap() == joined);
        let null = File::options().write(true).open("/dev/null").unwrap();
        let source = Source::file(self.file("source", &content), 0, None);
        assert_eq!(self.run(source.file(null, 0)).1.written, BYTES as u64);
        // Errors are those of the call.
        let source = Source::file(self.file("source", &content), 0, Some(BYTES as u64 + 1));
        let (result, report) = self.run(source.file(self.file("short", &[]), 0));
        assert_eq!((result.unwrap_err().name(), report.written), ("file_ended", BYTES as u64));
        let (ours, theirs) = UnixStream::pair().unwrap();
        drop(theirs);
        let source = Source::file(self.file("source", &content), 0, None);
        assert_eq!(self.run(source.socket(ours)).0.unwrap_err().name(), "closed");
        let refused =
            Source::file(self.file("source", &[]), 0, None).file(self.file("source", &[]), 0);
        assert_eq!(self.run(refused).0.unwrap_err().name(), "same_file");
    }

    /// Sends to a program that asks the host kernel who sends.
    fn shows_itself(&self) {
        const RECEIVER: &str = "
import socket, struct
ours = socket.socket(fileno=0)
ours.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
print('asks', flush=True)
users, size = set(), 0
while True:
    data, control, _, _ = ours.recvmsg(65536, socket.CMSG_SPACE(12))
    if not data: break
    size += len(data)
    for level, kind, value in control:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_CREDENTIALS):
            users.add(struct.unpack('3i', value)[1:])
print(size, users)
";
        let (ours, theirs) = UnixStream::pair().unwrap();
        let mut receiver = Process::new("python3");
        receiver.args(["-c", RECEIVER]).stdin(Stdio::from(OwnedFd::from(theirs)));
        let mut receiver = receiver.stdout(Stdio::piped()).spawn().unwrap();
        let mut said = std::io::BufReader::new(receiver.stdout.take().unwrap());
        let mut line = String::new();
        std::io::BufRead::read_line(&mut said, &mut line).unwrap();
        assert_eq!(line, "asks\n");
        let source = Source::file(self.file("source", &content()), 0, None);
        assert_eq!(self.run(source.socket(ours)).0, Ok(()));
        let mut rest = String::new();
        said.read_to_string(&mut rest).unwrap();
        receiver.wait().unwrap();
        assert_eq!(rest, format!("{BYTES} {{({USER}, {USER})}}\n"));
    }

    /// Its limit of file lengths is 1 MiB.
    fn writes_too_much(&self) {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let sent = content();
        let writer = thread::spawn(move || _ = theirs.write_all(&sent));
        let sink = self.file("limited", &[]);
        let (result, report) = self.run(Source::socket(ours, None).file(sink, 0));
        assert_eq!((result.unwrap_err().name(), report.written), ("file_too_long", 1 << 20));
        assert_eq!(fs::metadata(self.own.join("limited")).unwrap().len(), 1 << 20);
        writer.join().unwrap();
    }

    fn names_files_that_lend_rights(&self) {
        for mode in [0o4755, 0o2755] {
            for is_sink in [true, false] {
                let file = self.file("lends", b"#!/bin/sh\n");
                file.set_permissions(Permissions::from_mode(mode)).unwrap();
                let other = self.file("other", b"bytes");
                let (result, _) = match is_sink {
                    true => self.run(Source::file(other, 0, None).file(file, 0)),
                    false => self.run(Source::file(file, 0, None).file(other, 0)),
                };
                let error = result.unwrap_err();
                assert_eq!(error.name(), "wrong_kind");
                assert!(error.text.contains("(set-user-ID or set-group-ID)"), "{error}");
                assert_eq!(fs::read(self.own.join("lends")).unwrap(), b"#!/bin/sh\n");
            }
        }
    }

    /// Root would see more there.
    fn names_files_of_the_kernel(&self) {
        let engine = fs::read_to_string(self.folder.join("number")).unwrap();
        for path in [format!("/proc/{engine}/stat"), "/sys/kernel/uevent_seqnum".to_owned()] {
            let source = Source::file(File::open(&path).unwrap(), 0, None);
            let (result, report) = self.run(source.file(self.file("shown", &[]), 0));
            let error = result.unwrap_err();
            assert_eq!((error.name(), report.written), ("wrong_kind", 0), "{path}: {error}");
            assert!(error.text.contains("interface of the host kernel"), "{error}");
            assert_eq!(fs::read(self.own.join("shown")).unwrap(), b"");
        }
        // Its own limit of scores is one that it may write.
        let sink = File::options().write(true).open("/proc/self/oom_score_adj").unwrap();
        let (result, _) =
            self.run(Source::file(self.file("score", b"1000"), 0, None).file(sink, 0));
        assert_eq!(result.unwrap_err().name(), "wrong_kind");
        assert_eq!(fs::read_to_string("/proc/self/oom_score_adj").unwrap().trim(), "0");
    }

    fn is_refused(&self, why: &str) {
        let mut client = self.client();
        loop {
            match client.next(Duration::from_secs(2)) {
                Err(ClientError::Refused(error)) => {
                    assert_eq!(error.name(), "not_admitted");
                    assert!(error.text.contains(why), "{error}");
                    return;
                }
                // One that is admitted is answered, and one that is refused too late to see why tries again.
                Ok(None) if client.ask_list().is_ok() => {}
                Ok(None) | Err(_) => client = self.client(),
                Ok(answer) => panic!("it is admitted: {answer:?}"),
            }
        }
    }

    fn loses_its_tenant(&self) {
        let mut client = self.client();
        let mut copy = || {
            let source = Source::file(self.file("source", b"bytes"), 0, None);
            client.submit(source.file(self.file("sink", &[]), 0)).unwrap();
            ended(&mut client).0
        };
        assert_eq!(copy(), Ok(()));
        self.say("has one");
        self.next_step();
        fs::write(self.own.join("sink"), b"").unwrap();
        let error = copy().unwrap_err();
        assert_eq!(error.name(), "not_admitted");
        assert_eq!(fs::read(self.own.join("sink")).unwrap(), b"", "nothing was copied");
        self.say("has none");
        self.next_step();
        assert_eq!(copy(), Ok(()));
    }

    /// Its process ends while a transfer waits for its peer.
    fn waits(&self) {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let mut client = self.client();
        client.submit(Source::socket(ours, None).file(self.file("sink", &[]), 0)).unwrap();
        theirs.write_all(&[7; 1000]).unwrap();
        wait_until("the bytes arrive", || {
            fs::metadata(self.own.join("sink")).unwrap().len() == 1000
        });
        self.say("waits");
        self.next_step();
        // The peer may not be there any more.
        let _ = theirs.write_all(&[7; 1000]);
        let (result, report) = ended(&mut client);
        let error = result.unwrap_err();
        assert_eq!((error.name(), report.written), ("user_process", 1000), "{error}");
        assert!(error.text.contains("process of user 65534"), "{error}");
        // The next one has a new process.
        self.moves();
    }

    /// Its process is stopped, as the user itself can do it, in a transfer to a socket and one to a file.
    fn is_stopped(&self) {
        let mut client = self.client();
        let mut peers = Vec::new();
        for to_file in [true, false] {
            let (from, mut theirs) = UnixStream::pair().unwrap();
            let (to, peer) = UnixStream::pair().unwrap();
            let source = Source::socket(from, None);
            let command = match to_file {
                true => source.file(self.file("sink", &[]), 0),
                false => source.socket(to),
            };
            client.submit(command.stall(Duration::from_secs(3))).unwrap();
            theirs.write_all(&[7; 1000]).unwrap();
            peers.push((theirs, peer));
        }
        let mut got = [0; 1000];
        peers[1].1.read_exact(&mut got).unwrap();
        wait_until("the bytes arrive", || {
            fs::metadata(self.own.join("sink")).unwrap().len() == 1000
        });
        self.say("waits");
        self.next_step();
        for (theirs, _) in &mut peers {
            theirs.write_all(&[8; 1000]).unwrap();
        }
        for _ in 0..2 {
            let error = ended(&mut client).0.unwrap_err();
            assert_eq!(error.name(), "stalled", "{error}");
        }
        self.say("was stopped");
        self.next_step();
        self.moves();
    }

    /// Has half of eight connections.
    fn connects(&self) {
        let mut clients = vec![self.client()];
        let refused = loop {
            let mut client = self.client();
            // The engine accepts after it has read requests: behind two answers it has accepted, or refused.
            for _ in 0..2 {
                clients[0].ask_list().unwrap();
                assert!(matches!(clients[0].next(PATIENCE), Ok(Some(Answer::List { .. }))));
            }
            match client.next(Duration::ZERO) {
                Ok(None) => clients.push(client),
                Err(ClientError::Refused(error)) => break error,
                other => panic!("{other:?}"),
            }
        };
        assert_eq!((refused.name(), clients.len()), ("too_many_clients", 4));
        self.say("is connected");
        self.next_step();
    }

    /// Sees its own transfers only.
    fn lists(&self) {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let mut client = self.client();
        let id = client.submit(Source::socket(ours, None).file(self.file("sink", &[]), 0)).unwrap();
        client.ask_progress(id).unwrap();
        assert!(matches!(client.next(PATIENCE), Ok(Some(Answer::Progress { .. }))));
        let mut other = self.client();
        other.ask_list().unwrap();
        let Answer::List { total, entries, queues } = other.next(PATIENCE).unwrap().unwrap() else {
            panic!("another answer")
        };
        assert_eq!((total, entries.len(), queues.len()), (1, 1, 0), "{entries:?} {queues:?}");
        assert_eq!((entries[0].id, entries[0].process), (id, std::process::id()));
        self.say("has listed");
        self.next_step();
        drop(theirs);
        assert_eq!(ended(&mut client).0, Ok(()));
    }
}

/// Reads a program's output until it says this.
fn says(child: &mut Child, word: &str) {
    let mut said = Vec::new();
    let output = child.stdout.as_mut().unwrap();
    while !said.ends_with(format!("{word}\n").as_bytes()) {
        let mut byte = [0];
        if output.read(&mut byte).unwrap() == 0 {
            let mut why = String::new();
            child.stderr.as_mut().unwrap().read_to_string(&mut why).unwrap();
            panic!("{}{why}", String::from_utf8_lossy(&said));
        }
        said.push(byte[0]);
    }
}

fn go_on(child: &mut Child) {
    child.stdin.as_mut().unwrap().write_all(&[1]).unwrap();
}

#[test]
fn users_of_tenants_are_admitted_and_nobody_else() {
    if !is_root() {
        return;
    }
    let setup = Setup::new("admitted");
    setup.runs(USER, "moves");
    setup.engine.set_tenants(vec![tenant("blue", vec![OTHER_USER])]);
    setup.runs(USER, "is a stranger");
    setup.runs(65_000, "is a stranger");
    setup.runs(OTHER_USER, "moves");
    assert_eq!(setup.failed("not_admitted"), 2);
    setup.works();
    // An engine without processes for users, and one that is not root.
    let setup = Setup::with("alone", false, ServiceLimits::default());
    setup.runs(USER, "finds no processes");
    setup.works();
}

#[test]
fn without_root_no_other_user_is_served() {
    if !is_root() {
        return;
    }
    let setup = Setup::new("not-root");
    fs::remove_file(setup.folder.join("engine")).unwrap();
    std::os::unix::fs::chown(&setup.folder, Some(OTHER_USER), Some(OTHER_USER)).unwrap();
    let mut command = Process::new(setup.program());
    command.args(arguments("an_engine_of_a_user")).uid(OTHER_USER).gid(OTHER_USER);
    let mut engine = setup.spawn(command, "engine");
    says(&mut engine, "serves");
    setup.runs(USER, "finds no root");
    go_on(&mut engine);
    finish(engine);
}

#[test]
#[ignore = "an engine that is not root's, which another test starts"]
fn an_engine_of_a_user() {
    let Some(folder) = std::env::var_os(FOLDER).map(PathBuf::from) else { return };
    let limits = ServiceLimits::default();
    let engine = Arc::new(Engine::start(limits.of_engine()).unwrap());
    engine.set_tenants(vec![tenant("red", vec![USER])]);
    let listener = LocalListener::bind(&folder.join("engine")).unwrap();
    fs::set_permissions(folder.join("engine"), Permissions::from_mode(0o666)).unwrap();
    let (path, arguments, environment) = ("/bin/false".into(), Vec::new(), Vec::new());
    let program = UserProgram { path, arguments, environment };
    let service = Service::with_users(listener, limits, engine, Some(program)).unwrap();
    println!("serves");
    std::io::stdout().flush().unwrap();
    assert_eq!(std::io::stdin().read(&mut [0]).unwrap(), 1);
    drop(service);
}

#[test]
fn a_user_that_loses_its_tenant_is_refused_on_the_connection_that_it_has() {
    if !is_root() {
        return;
    }
    let setup = Setup::new("lost");
    let mut program = setup.start(USER, "loses its tenant");
    says(&mut program, "has one");
    setup.engine.set_tenants(vec![tenant("blue", vec![OTHER_USER])]);
    go_on(&mut program);
    says(&mut program, "has none");
    setup.engine.set_tenants(vec![tenant("red", vec![USER])]);
    go_on(&mut program);
    finish(program);
}

#[test]
fn a_user_s_calls_are_made_with_the_user_s_rights() {
    if !is_root() {
        return;
    }
    let setup = Setup::new("rights");
    fs::write(setup.folder.join("number"), std::process::id().to_string()).unwrap();
    setup.runs(USER, "shows itself");
    let [process] = setup.processes(USER)[..] else { panic!("one process for one user") };
    let status = fs::read_to_string(format!("/proc/{process}/status")).unwrap();
    for line in [
        "Gid:\t65534\t65534\t65534\t65534\n",
        "CapInh:\t0000000000000000\n",
        "CapPrm:\t0000000000000000\n",
        "CapEff:\t0000000000000000\n",
        "CapAmb:\t0000000000000000\n",
        "NoNewPrivs:\t1\n",
    ] {
        assert!(status.contains(line), "{line}: {status}");
    }
    let groups = status.lines().find_map(|line| line.strip_prefix("Groups:")).unwrap();
    assert_eq!(groups.trim(), "", "those of the program");
    let environment = fs::read(format!("/proc/{process}/environ")).unwrap();
    assert!(setup.is_environment(&environment), "{}", String::from_utf8_lossy(&environment));
    // Its descriptors: standard ones, connections and memory, and none of the engine's.
    wait_until("descriptors are closed", || {
        let open = fs::read_dir(format!("/proc/{process}/fd")).unwrap();
        let links = open.filter_map(|entry| fs::read_link(entry.ok()?.path()).ok());
        let others = links.filter(|link| {
            let link = link.to_string_lossy();
            !["/dev/null", "socket:", "/memfd:serval:transfer"]
                .iter()
                .any(|of| link.starts_with(of))
        });
        let others: Vec<_> = others.collect();
        others.is_empty()
    });
    setup.runs(USER, "names files that lend rights");
    setup.runs(USER, "names files of the kernel");
    assert_eq!(setup.processes(USER), [process], "the same for the next programs");
}

#[test]
fn a_limit_of_file_lengths_is_that_of_the_program() {
    if !is_root() {
        return;
    }
    let setup = Setup::new("limit");
    let mut command = Process::new("prlimit");
    command.args(["--fsize=1048576", "setpriv"]);
    command.args(["--reuid=65534", "--regid=65534", "--clear-groups"]);
    command.arg(setup.program()).args(arguments("a_program_of_a_user"));
    let limited = setup.spawn(command, "writes too much");
    finish(limited);
    // A program without the limit has another process.
    setup.runs(USER, "moves");
    assert_eq!(setup.processes(USER).len(), 2);
}

#[test]
fn groups_are_those_of_the_program() {
    if !is_root() {
        return;
    }
    let setup = Setup::new("groups");
    let mut command = Process::new("setpriv");
    command.args(["--reuid=65534", "--regid=65000", "--groups=65001,65002"]);
    command.arg(setup.program()).args(arguments("a_program_of_a_user"));
    finish(setup.spawn(command, "moves"));
    let [process] = setup.processes(USER)[..] else { panic!("one process for one user") };
    let status = fs::read_to_string(format!("/proc/{process}/status")).unwrap();
    assert!(status.contains("Gid:\t65000\t65000\t65000\t65000\n"), "{status}");
    assert!(status.contains("Groups:\t65001 65002"), "{status}");
}

#[test]
fn the_end_of_a_process_ends_its_transfers_with_the_reason() {
    if !is_root() {
        return;
    }
    let setup = Setup::new("killed");
    let mut program = setup.start(USER, "waits");
    says(&mut program, "waits");
    let [process] = setup.processes(USER)[..] else { panic!("one process for one user") };
    kill(process, "-KILL");
    wait_until("it ends", || setup.processes(USER).is_empty());
    go_on(&mut program);
    finish(program);
    assert_eq!(setup.failed("user_process"), 1);
    assert_eq!(setup.service.in_flight(), 0);
    setup.works();
}

#[test]
fn a_process_that_its_user_stops_holds_up_nobody_else() {
    if !is_root() {
        return;
    }
    let setup = Setup::new("stopped");
    let mut program = setup.start(USER, "is stopped");
    says(&mut program, "waits");
    let [process] = setup.processes(USER)[..] else { panic!("one process for one user") };
    kill(process, "-STOP");
    go_on(&mut program);
    // More steps hang than there are threads, and none of them is of a file.
    for _ in 0..10 {
        setup.works();
    }
    says(&mut program, "was stopped");
    // No caller waits for what it would do.
    wait_until("it is ended", || !setup.processes(USER).contains(&process));
    go_on(&mut program);
    finish(program);
}

#[test]
fn a_user_lists_its_own_transfers() {
    if !is_root() {
        return;
    }
    let setup = Setup::new("lists");
    let mut other = setup.start(OTHER_USER, "lists");
    says(&mut other, "has listed");
    let mut client = Client::connect(&setup.folder.join("engine")).unwrap();
    let (ours, _theirs) = UnixStream::pair().unwrap();
    let sink = File::create(setup.folder.join("root")).unwrap();
    client.submit(Source::socket(ours, None).file(sink, 0)).unwrap();
    let mut program = setup.start(USER, "lists");
    says(&mut program, "has listed");
    // Root sees all.
    client.ask_list().unwrap();
    let Answer::List { total, entries, queues } = client.next(PATIENCE).unwrap().unwrap() else {
        panic!("another answer")
    };
    assert_eq!((total, entries.len()), (3, 3));
    assert!(!queues.is_empty());
    go_on(&mut program);
    go_on(&mut other);
    finish(program);
    finish(other);
}

#[test]
fn a_user_leaves_connections_to_others() {
    if !is_root() {
        return;
    }
    let limits = ServiceLimits { clients: 8, ..ServiceLimits::default() };
    let setup = Setup::with("connects", true, limits);
    let mut program = setup.start(USER, "connects");
    says(&mut program, "is connected");
    setup.works();
    setup.runs(OTHER_USER, "moves");
    go_on(&mut program);
    finish(program);
}

#[test]
fn processes_end_with_the_engine() {
    if !is_root() {
        return;
    }
    let setup = Setup::new("ends");
    setup.runs(USER, "moves");
    setup.runs(OTHER_USER, "moves");
    assert_eq!((setup.processes(USER).len(), setup.processes(OTHER_USER).len()), (1, 1));
    let mut program = setup.start(USER, "waits");
    says(&mut program, "waits");
    let process = setup.processes(USER)[0];
    let started = start_time(process);
    drop(setup);
    wait_until("they end", || start_time(process) != started);
    program.kill().unwrap();
    program.wait().unwrap();
}

/// When a process was started; `None`: there is none, or it has ended.
fn start_time(process: u32) -> Option<String> {
    let stat = fs::read_to_string(format!("/proc/{process}/stat")).ok()?;
    let fields: Vec<&str> = stat.rsplit(')').next()?.split_whitespace().collect();
    (fields[0] != "Z").then(|| fields[19].to_owned())
}

fn kill(process: u32, signal: &str) {
    assert!(Process::new("kill").args([signal, &process.to_string()]).status().unwrap().success());
}

#[test]
fn files_of_a_user_stay_the_user_s() {
    if !is_root() {
        return;
    }
    let setup = Setup::new("owner");
    setup.runs(USER, "moves");
    let own = setup.folder.join(USER.to_string());
    for name in ["sealed", "opened", "copy", "joined"] {
        assert_eq!(fs::metadata(own.join(name)).unwrap().uid(), USER);
    }
}
