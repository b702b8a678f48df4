//! `kill -9` of a caller and of an engine in the middle of a transfer: a file that a [`NewFile`] makes is whole or absent.

use std::fs;
use std::io::{Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use sys::local::LocalListener;
use transfer::service::message::Answer;
use transfer::{Client, ClientError, Existing, NewFile, Service, ServiceLimits, Source};

const PATIENCE: Duration = Duration::from_secs(60);
/// What the peer sends before the kill; the transfer waits for as much again.
const HALF: usize = 700_000;
/// Names the folder to a process that this test starts.
const FOLDER: &str = "SERVAL_TRANSFER_KILL_FOLDER";
const PEER: &str = "SERVAL_TRANSFER_KILL_PEER";

struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir()
            .join(format!("serval-transfer-kill-{name}-{}", std::process::id()));
        fs::create_dir_all(path.join("files")).unwrap();
        Self(path)
    }

    fn names(&self) -> Vec<String> {
        let names = fs::read_dir(self.0.join("files")).unwrap();
        names.map(|name| name.unwrap().file_name().into_string().unwrap()).collect()
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn service(folder: &Path) -> Service {
    let listener = LocalListener::bind(&folder.join("engine")).unwrap();
    Service::start(listener, ServiceLimits::default()).unwrap()
}

/// This program as another process that runs one of the functions below.
fn start(role: &str, folder: &Folder, peer: Option<String>) -> Child {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", role, "--ignored", "--nocapture"]).env(FOLDER, &folder.0);
    command.envs(peer.map(|address| (PEER, address)));
    command.stdin(Stdio::piped()).stdout(Stdio::null()).spawn().unwrap()
}

/// Waits with patience.
fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !is_so() {
        assert!(Instant::now() < deadline, "{what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn receive(folder: &Path, socket: impl Into<std::os::fd::OwnedFd>) -> (Client, NewFile, u64) {
    let mut client = Client::connect(&folder.join("engine")).unwrap();
    let new = NewFile::create(&folder.join("files/copy")).unwrap();
    let source = Source::socket(socket, Some(2 * HALF as u64));
    let id = client.submit(source.file(new.file().unwrap(), 0).sync()).unwrap();
    (client, new, id)
}

/// Not a test of its own: the caller that is killed.
#[test]
#[ignore = "started by the tests of this program"]
fn caller() {
    let Ok(folder) = std::env::var(FOLDER) else { return };
    let socket = TcpStream::connect(std::env::var(PEER).unwrap()).unwrap();
    let (mut client, new, _) = receive(folder.as_ref(), socket);
    let answer = client.next(PATIENCE).unwrap();
    if matches!(answer, Some(Answer::Ended { result: Ok(()), .. })) {
        new.commit(Existing::Keep, true).unwrap();
    }
}

/// Not a test of its own: the engine that is killed.
#[test]
#[ignore = "started by the tests of this program"]
fn engine() {
    let Ok(folder) = std::env::var(FOLDER) else { return };
    let _service = service(folder.as_ref());
    let _ = std::io::stdin().read(&mut [0]);
}

#[test]
fn a_caller_that_is_killed_leaves_no_file() {
    let folder = Folder::new("caller");
    let service = service(&folder.0);
    for killed in [true, false] {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let mut caller = start("caller", &folder, Some(address));
        let mut peer = listener.accept().unwrap().0;
        peer.write_all(&[7; HALF]).unwrap();
        until("the engine has the transfer", || service.in_flight() == 1);
        assert_eq!(folder.names(), Vec::<String>::new(), "half of it has no name");
        if killed {
            caller.kill().unwrap();
        } else {
            peer.write_all(&[7; HALF]).unwrap();
        }
        caller.wait().unwrap();
        until("the transfer ends", || service.in_flight() == 0);
        if killed {
            assert_eq!(folder.names(), Vec::<String>::new());
        } else {
            assert_eq!(folder.names(), ["copy"]);
            assert!(fs::read(folder.0.join("files/copy")).unwrap() == [7; 2 * HALF]);
        }
    }
}

#[test]
fn an_engine_that_is_killed_leaves_no_file() {
    let folder = Folder::new("engine");
    let mut engine = start("engine", &folder, None);
    let path = folder.0.join("engine");
    until("the engine listens", || Client::connect(&path).is_ok());
    let (mut ours, theirs) = UnixStream::pair().unwrap();
    ours.set_write_timeout(Some(PATIENCE)).unwrap();
    let (mut client, new, id) = receive(&folder.0, theirs);
    ours.write_all(&[7; HALF]).unwrap();
    loop {
        client.ask_progress(id).unwrap();
        match client.next(PATIENCE).unwrap() {
            Some(Answer::Progress { written, .. }) if written == HALF as u64 => break,
            Some(Answer::Progress { .. }) => std::thread::sleep(Duration::from_millis(1)),
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(new.file().unwrap().metadata().unwrap().len(), HALF as u64);
    engine.kill().unwrap();
    engine.wait().unwrap();
    let ended = client.next(PATIENCE);
    assert!(matches!(ended, Err(ClientError::Closed)), "{ended:?}");
    drop(new);
    assert_eq!(folder.names(), Vec::<String>::new());
    assert_eq!(ours.read(&mut [0]).unwrap_or(0), 0, "the peer sees the end");
}
