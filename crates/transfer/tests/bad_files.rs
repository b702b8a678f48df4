//! Files that cannot take or give their bytes: a full file system, one that is read-only, the limit of `ulimit -f`, permissions that were
//! taken away, descriptors that their owner closes or shuts down, pipes and folders. Each transfer ends with its reason and an exact
//! count, and nothing half-written is under the final name.
//!
//! Tests that mount, or that have to lose root's rights, run again in namespaces of their own (`unshare`, of util-linux).

#[path = "common/folder.rs"]
mod folder;

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read as _, Write as _};
use std::os::fd::OwnedFd;
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::Command as Process;
use std::thread;
use std::time::{Duration, Instant};

use folder::Folder;
use sys::local::LocalListener;
use transfer::service::message::Answer;
use transfer::{
    Client, Engine, Existing, Limits, NewFile, Outcome, Service, ServiceLimits, Source,
};

/// Set in the program that runs in namespaces.
const INSIDE: &str = "SERVAL_TEST_BAD_FILES";
const PATIENCE: Duration = Duration::from_secs(60);
/// Bytes of the small file system, and of the limit of a file.
const ROOM: usize = 1 << 20;

/// Runs this test again under `command`. Returns whether this is that run: then the test goes on.
fn is_inside(test: &str, command: &[&str]) -> bool {
    if std::env::var_os(INSIDE).is_some() {
        return true;
    }
    let mut process = Process::new(command[0]);
    process.args(&command[1..]).arg(std::env::current_exe().unwrap());
    process.args([test, "--exact", "--nocapture"]).env(INSIDE, "1");
    let output = process.output().expect("util-linux has to be installed");
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(
        output.status.success() && said.contains("1 passed"),
        "{command:?} has to work here, in a user namespace where it needs one: {said}{}",
        String::from_utf8_lossy(&output.stderr)
    );
    false
}

fn protect(folder: &Folder, mode: u32) {
    fs::set_permissions(&folder.0, fs::Permissions::from_mode(mode)).unwrap();
}

/// Everything in a folder, also what is hidden.
fn names(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).unwrap();
    entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
}

fn bytes(len: usize) -> Vec<u8> {
    (0..len).map(|at| (at.wrapping_mul(2_654_435_761) >> 13) as u8).collect()
}

fn engine() -> Engine {
    Engine::start(Limits::default()).unwrap()
}

/// A socket on which these bytes arrive, if its peer reads them.
fn sends(content: Vec<u8>) -> OwnedFd {
    let (mut ours, theirs) = UnixStream::pair().unwrap();
    thread::spawn(move || {
        // Its reader may fail.
        let _ = ours.write_all(&content);
    });
    theirs.into()
}

fn reason(outcome: &Outcome) -> &'static str {
    outcome.result.as_ref().map_or_else(|error| error.name(), |()| "none")
}

/// What a stream of `content` leaves in a file that does not have room for it.
fn ends_short(engine: &Engine, content: &[u8], path: &Path, expected: &str) {
    let mut options = OpenOptions::new();
    let file = options.read(true).write(true).create(true).truncate(true).open(path).unwrap();
    let sink = file.try_clone().unwrap();
    let source = Source::socket(sends(content.to_vec()), None);
    let outcome = engine.submit(source.file(sink, 0)).unwrap().wait();
    assert_eq!(reason(&outcome), expected);
    let got = fs::read(path).unwrap();
    assert!(!got.is_empty() && got.len() <= ROOM, "{}", got.len());
    assert_eq!(outcome.report.written, got.len() as u64, "the count is what the file has");
    assert!(got == content[..got.len()]);
    fs::remove_file(path).unwrap();
}

/// A file without a name does not get one.
fn stays_absent(engine: &Engine, content: &[u8], folder: &Path, expected: &str) {
    let before = names(folder);
    let new = NewFile::create(&folder.join("copy")).unwrap();
    let source = Source::socket(sends(content.to_vec()), None);
    let outcome = engine.submit(source.file(new.file().unwrap(), 0).sync()).unwrap().wait();
    assert_eq!(reason(&outcome), expected);
    assert!(outcome.report.written <= ROOM as u64);
    drop(new);
    assert_eq!(names(folder), before);
    // The next one has the room again, when the engine has closed the file.
    let deadline = Instant::now() + PATIENCE;
    let new = loop {
        let new = NewFile::create(&folder.join("copy")).unwrap();
        let source = Source::socket(sends(content[..ROOM / 2].to_vec()), None);
        let outcome = engine.submit(source.file(new.file().unwrap(), 0).sync()).unwrap().wait();
        if outcome.result.is_ok() {
            break new;
        }
        assert!(reason(&outcome) == expected && Instant::now() < deadline, "{outcome:?}");
    };
    new.commit(Existing::Keep, true).unwrap();
    assert!(fs::read(folder.join("copy")).unwrap() == content[..ROOM / 2]);
    fs::remove_file(folder.join("copy")).unwrap();
}

fn mount(arguments: &[&str], folder: &Path) {
    let output = Process::new("mount").args(arguments).arg(folder).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

#[test]
fn a_full_file_system_ends_a_transfer_and_gets_its_room_back() {
    let test = "a_full_file_system_ends_a_transfer_and_gets_its_room_back";
    if !is_inside(test, &["unshare", "-Urm"]) {
        return;
    }
    let (folder, engine, content) = (Folder::new("full"), engine(), bytes(4 * ROOM));
    mount(&["-t", "tmpfs", "-o", "size=1m", "none"], &folder.0);
    ends_short(&engine, &content, &folder.join("sink"), "disk_full");
    stays_absent(&engine, &content, &folder.0, "disk_full");
    // From a file, in one call of the engine for each chunk.
    let source = Folder::new("full-source");
    fs::write(source.join("source"), &content).unwrap();
    let new = NewFile::create(&folder.join("copy")).unwrap();
    let from = Source::file(File::open(source.join("source")).unwrap(), 0, None);
    let outcome = engine.submit(from.file(new.file().unwrap(), 0)).unwrap().wait();
    assert_eq!(reason(&outcome), "disk_full");
    assert_eq!(outcome.report.written, new.file().unwrap().metadata().unwrap().len());
    drop(new);
    assert_eq!(names(&folder.0), [""; 0]);
    let counters = engine.counters();
    let mut failed = counters.failed().filter(|(name, _)| *name == "disk_full");
    assert!(failed.next().unwrap().1 >= 3);
    // So that the folder can be removed.
    let output = Process::new("umount").arg("-l").arg(&folder.0).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

#[test]
fn a_limit_of_file_lengths_ends_a_transfer() {
    let test = "a_limit_of_file_lengths_ends_a_transfer";
    if !is_inside(test, &["prlimit", "--fsize=1048576"]) {
        return;
    }
    // As the server: without this the host kernel ends the process.
    sys::signal::ignore_file_size_signal();
    let (folder, engine, content) = (Folder::new("limit"), engine(), bytes(4 * ROOM));
    ends_short(&engine, &content, &folder.join("sink"), "file_too_long");
    stays_absent(&engine, &content, &folder.0, "file_too_long");
}

#[test]
fn a_read_only_file_system_gives_and_does_not_take() {
    let test = "a_read_only_file_system_gives_and_does_not_take";
    if !is_inside(test, &["unshare", "-Urm"]) {
        return;
    }
    let (folder, engine, content) = (Folder::new("read-only"), engine(), bytes(ROOM / 2));
    mount(&["-t", "tmpfs", "-o", "size=1m", "none"], &folder.0);
    fs::write(folder.join("source"), &content).unwrap();
    mount(&["-o", "remount,ro"], &folder.0);
    let refused = NewFile::create(&folder.join("copy")).unwrap_err();
    assert_eq!(refused.kind(), io::ErrorKind::ReadOnlyFilesystem);
    let (to, mut peer) = UnixStream::pair().unwrap();
    let source = Source::file(File::open(folder.join("source")).unwrap(), 0, None);
    let sent = engine.submit(source.socket(to)).unwrap();
    let mut got = Vec::new();
    peer.read_to_end(&mut got).unwrap();
    assert_eq!(sent.wait().result, Ok(()));
    assert!(got == content);
    // What was opened for reading is no sink.
    let file = File::open(folder.join("source")).unwrap();
    let source = Source::socket(sends(content), None);
    assert_eq!(engine.submit(source.file(file, 0)).err().unwrap().name(), "access");
    assert_eq!(names(&folder.0), ["source"]);
    let output = Process::new("umount").arg("-l").arg(&folder.0).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

#[test]
fn permissions_are_those_of_the_moment_a_file_is_opened_and_named() {
    let test = "permissions_are_those_of_the_moment_a_file_is_opened_and_named";
    // A user namespace without a map: root's rights are gone, and the files stay one's own.
    if !is_inside(test, &["unshare", "-U"]) {
        return;
    }
    let (folder, engine, content) = (Folder::new("revoked"), engine(), bytes(ROOM));
    let path = folder.join("kept");
    fs::write(&path, &content).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o400)).unwrap();
    assert_eq!(File::options().write(true).open(&path).unwrap_err().raw_os_error(), Some(13));
    // A file that was opened before its permissions went is sent.
    let source = File::open(&path).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o000)).unwrap();
    assert_eq!(File::open(&path).unwrap_err().raw_os_error(), Some(13));
    let new = NewFile::create(&folder.join("copy")).unwrap();
    let copied = engine.submit(Source::file(source, 0, None).file(new.file().unwrap(), 0));
    assert_eq!(copied.unwrap().wait().result, Ok(()));
    // The folder takes no new name: the file stays absent, however it is to be named.
    protect(&folder, 0o555);
    let refused = new.commit(Existing::Keep, false).unwrap_err();
    assert_eq!(refused.kind(), io::ErrorKind::PermissionDenied);
    assert_eq!(names(&folder.0), ["kept"]);
    protect(&folder, 0o755);
    let new = NewFile::create(&path).unwrap();
    protect(&folder, 0o555);
    let refused = new.commit(Existing::Replace, false).unwrap_err();
    assert_eq!(refused.kind(), io::ErrorKind::PermissionDenied);
    let refused = NewFile::create(&folder.join("copy")).unwrap_err();
    assert_eq!(refused.kind(), io::ErrorKind::PermissionDenied);
    protect(&folder, 0o755);
    assert_eq!(names(&folder.0), ["kept"]);
    fs::set_permissions(&path, fs::Permissions::from_mode(0o400)).unwrap();
    assert!(fs::read(&path).unwrap() == content, "it was not replaced");
}

#[test]
fn an_owner_may_close_its_descriptors_and_shut_its_socket_down() {
    let (folder, engine, content) = (Folder::new("closed"), engine(), bytes(8 * ROOM));
    let path = folder.join("source");
    fs::write(&path, &content).unwrap();
    let source = || Source::file(File::open(&path).unwrap(), 0, None);
    // All descriptors of the owner are closed before the peer reads.
    let (ours, mut peer) = UnixStream::pair().unwrap();
    let sent = engine.submit(source().socket(ours.try_clone().unwrap())).unwrap();
    drop(ours);
    let mut got = Vec::new();
    peer.read_to_end(&mut got).unwrap();
    assert_eq!(sent.wait().result, Ok(()));
    assert!(got == content);
    // The owner ends the stream while the engine sends: what the peer gets is what was counted.
    let (ours, mut peer) = UnixStream::pair().unwrap();
    let sent = engine.submit(source().socket(ours.try_clone().unwrap())).unwrap();
    while sent.progress().written() == 0 {
        thread::yield_now();
    }
    ours.shutdown(std::net::Shutdown::Write).unwrap();
    let mut got = Vec::new();
    peer.read_to_end(&mut got).unwrap();
    let outcome = sent.wait();
    assert_eq!(reason(&outcome), "closed");
    assert_eq!(outcome.report.written, got.len() as u64);
    assert!(got.len() < content.len() && got == content[..got.len()]);
}

#[test]
fn what_is_no_file_is_refused_for_every_caller() {
    let folder = Folder::new("kinds");
    let listener = LocalListener::bind(&folder.join("engine")).unwrap();
    let service = Service::start(listener, ServiceLimits::default()).unwrap();
    let path = folder.join("file");
    fs::write(&path, bytes(1000)).unwrap();
    let fifo = folder.join("fifo");
    assert!(Process::new("mkfifo").arg(&fifo).status().unwrap().success());
    // Opened for both, so that opening does not wait.
    let fifo = || File::options().read(true).write(true).open(&fifo).unwrap();
    let (reader, writer) = io::pipe().unwrap();
    let stream = || OwnedFd::from(UnixStream::pair().unwrap().0);
    let file = || File::options().read(true).write(true).open(&path).unwrap();
    let commands = [
        Source::file(File::open(&folder.0).unwrap(), 0, None).socket(stream()),
        Source::file(fifo(), 0, None).socket(stream()),
        Source::file(OwnedFd::from(reader), 0, None).file(file(), 0),
        Source::file(File::open("/dev/zero").unwrap(), 0, None).socket(stream()),
        Source::socket(stream(), None).file(fifo(), 0),
        Source::socket(stream(), None).file(OwnedFd::from(writer), 0),
        Source::socket(stream(), None).file(File::open("/dev/full").unwrap(), 0),
        Source::file(file(), 0, None).socket(fifo()),
    ];
    let mut client = Client::connect(&folder.join("engine")).unwrap();
    let count = commands.len() as u64;
    for (index, command) in commands.into_iter().enumerate() {
        client.submit(command).unwrap();
        let answer = client.next(PATIENCE).unwrap();
        let Some(Answer::Ended { result: Err(error), report, .. }) = answer else {
            panic!("{index}: {answer:?}")
        };
        assert_eq!(error.name(), "wrong_kind", "{index}: {}", error.text);
        assert_eq!((report.read, report.written), (0, 0));
    }
    let refused = service.counters().failed().find(|(name, _)| *name == "wrong_kind");
    assert_eq!(refused, Some(("wrong_kind", count)));
    assert!(fs::read(&path).unwrap() == bytes(1000), "no sink was touched");
}
