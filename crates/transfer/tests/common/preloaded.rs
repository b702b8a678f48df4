//! Programs that run with the library for LD_PRELOAD, an engine for them, and clients of HTTP and FTP.
// Not every test program uses all of it.
#![allow(dead_code)]

use std::fs;
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::LazyLock;
use std::thread;
use std::time::{Duration, Instant};

use sys::local::LocalListener;
use transfer::{Service, ServiceLimits};

pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

/// The library: built once.
pub(crate) static LIBRARY: LazyLock<PathBuf> = LazyLock::new(|| {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("transfer-preload");
    let output = Command::new("make")
        .args(["--no-print-directory", "-C"])
        .arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("../../lib"))
        .arg("transfer")
        .arg(format!("BUILD={}", folder.display()))
        .output()
        .expect("make has to be installed");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    folder.join("libserval_transfer_preload.so")
});

/// An engine, and a server that uses it, in a folder that goes away.
pub(crate) struct Setup {
    pub(crate) service: Service,
    pub(crate) folder: PathBuf,
    pub(crate) server: Option<Child>,
}

impl Setup {
    pub(crate) fn new(name: &str) -> Self {
        let name = format!("serval-transfer-{name}-{}", std::process::id());
        let folder = std::env::temp_dir().join(name);
        let _ = fs::remove_dir_all(&folder);
        fs::create_dir_all(folder.join("files")).unwrap();
        let listener = LocalListener::bind(&folder.join("engine")).unwrap();
        let service = Service::start(listener, ServiceLimits::default()).unwrap();
        Self { service, folder, server: None }
    }

    pub(crate) fn file(&self, name: &str, bytes: usize) -> Vec<u8> {
        let content: Vec<u8> =
            (0..bytes).map(|at| (at.wrapping_mul(2_654_435_761) >> 13) as u8).collect();
        fs::write(self.folder.join("files").join(name), &content).unwrap();
        content
    }

    pub(crate) fn start(&mut self, command: &mut Command, address: SocketAddr) {
        let log = fs::File::create(self.folder.join("log")).unwrap();
        command
            .env("LD_PRELOAD", LIBRARY.as_path())
            .env("SERVAL_TRANSFER_SOCKET", self.folder.join("engine"))
            .env("SERVAL_TRANSFER_NONBLOCKING", "1")
            .stdin(Stdio::null())
            .stdout(log.try_clone().unwrap())
            .stderr(log);
        // Debian installs servers where only root looks.
        command.env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin");
        self.server = Some(command.spawn().expect("`make setup-test` installs it"));
        let deadline = Instant::now() + PATIENCE;
        while TcpStream::connect(address).is_err() {
            let log = fs::read_to_string(self.folder.join("log")).unwrap();
            assert!(Instant::now() < deadline, "the server does not listen: {log}");
            thread::sleep(Duration::from_millis(10));
        }
    }
}

impl Drop for Setup {
    fn drop(&mut self) {
        if let Some(server) = &mut self.server {
            let _ = server.kill();
            let _ = server.wait();
        }
        let _ = fs::remove_dir_all(&self.folder);
    }
}

pub(crate) fn free_address() -> SocketAddr {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap()
}

pub(crate) fn get(address: SocketAddr, path: &str) -> TcpStream {
    let mut socket = TcpStream::connect(address).unwrap();
    socket.set_read_timeout(Some(PATIENCE)).unwrap();
    write!(socket, "GET {path} HTTP/1.1\r\nHost: test\r\nConnection: close\r\n\r\n").unwrap();
    socket
}

/// The body of an answer.
pub(crate) fn body(mut socket: TcpStream) -> Vec<u8> {
    let mut answer = Vec::new();
    socket.read_to_end(&mut answer).unwrap();
    assert!(answer.starts_with(b"HTTP/1.1 200 "));
    let end = answer.windows(4).position(|part| part == b"\r\n\r\n").unwrap();
    answer.split_off(end + 4)
}

/// Files that curl gets over HTTP/2, all on one connection at the same time, in the order of their paths. `more`: its further arguments.
pub(crate) fn over_http2(folder: &Path, base: &str, paths: &[&str], more: &[&str]) -> Vec<Vec<u8>> {
    let mut curl = Command::new("curl");
    curl.args(["--silent", "--show-error", "--fail", "--parallel", "--parallel-immediate"]);
    curl.args(["--write-out", "%{http_version}\n", "--max-time", "60"]).args(more);
    let to = |at: usize| folder.join(format!("got-{at}"));
    for (at, path) in paths.iter().enumerate() {
        curl.arg("--output").arg(to(at)).arg(format!("{base}{path}"));
    }
    let output = curl.output().expect("`make setup-test` installs it");
    let (said, complained) =
        (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{complained}");
    assert_eq!(said, "2\n".repeat(paths.len()), "another version of HTTP: {complained}");
    (0..paths.len()).map(|at| fs::read(to(at)).unwrap()).collect()
}

/// A control connection of FTP.
pub(crate) struct Ftp(BufReader<TcpStream>);

impl Ftp {
    pub(crate) fn connect(address: SocketAddr, user: &str) -> Self {
        let socket = TcpStream::connect(address).unwrap();
        socket.set_read_timeout(Some(PATIENCE)).unwrap();
        let mut ftp = Self(BufReader::new(socket));
        ftp.expect("220");
        ftp.tell(&format!("USER {user}"), "331");
        ftp.tell("PASS test", "230");
        ftp.tell("TYPE I", "200");
        ftp
    }

    pub(crate) fn expect(&mut self, code: &str) -> String {
        let mut line = String::new();
        self.0.read_line(&mut line).unwrap();
        assert!(line.starts_with(code), "{line}");
        line
    }

    pub(crate) fn tell(&mut self, command: &str, code: &str) -> String {
        write!(self.0.get_mut(), "{command}\r\n").unwrap();
        self.expect(code)
    }

    /// Starts to retrieve a file.
    pub(crate) fn retrieve(&mut self, name: &str) -> TcpStream {
        let line = self.tell("EPSV", "229");
        let port = line.split('|').nth(3).unwrap().parse().unwrap();
        let data = TcpStream::connect(SocketAddr::from(([127, 0, 0, 1], port))).unwrap();
        data.set_read_timeout(Some(PATIENCE)).unwrap();
        self.tell(&format!("RETR {name}"), "150");
        data
    }
}
