//! nginx and vsftpd, unmodified, serve files through a transfer engine: the library for LD_PRELOAD replaces their sendfile.
//! Contents are compared, clients leave in the middle, and the engine's counters show that it did the work.

use std::fs;
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::LazyLock;
use std::thread;
use std::time::{Duration, Instant};

use sys::local::LocalListener;
use transfer::{Service, ServiceLimits};

const PATIENCE: Duration = Duration::from_secs(60);

/// The library: built once.
static LIBRARY: LazyLock<PathBuf> = LazyLock::new(|| {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("transfer-preload");
    let output = Command::new("make")
        .args(["--no-print-directory", "-C"])
        .arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("../../transfer"))
        .arg("all")
        .arg(format!("BUILD={}", folder.display()))
        .output()
        .expect("make has to be installed");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    folder.join("libserval_transfer_preload.so")
});

/// An engine, and a server that uses it, in a folder that goes away.
struct Setup {
    service: Service,
    folder: PathBuf,
    server: Option<Child>,
}

impl Setup {
    fn new(name: &str) -> Self {
        let name = format!("serval-transfer-{name}-{}", std::process::id());
        let folder = std::env::temp_dir().join(name);
        let _ = fs::remove_dir_all(&folder);
        fs::create_dir_all(folder.join("files")).unwrap();
        let listener = LocalListener::bind(&folder.join("engine")).unwrap();
        let service = Service::start(listener, ServiceLimits::default()).unwrap();
        Self { service, folder, server: None }
    }

    fn file(&self, name: &str, bytes: usize) -> Vec<u8> {
        let content: Vec<u8> =
            (0..bytes).map(|at| (at.wrapping_mul(2_654_435_761) >> 13) as u8).collect();
        fs::write(self.folder.join("files").join(name), &content).unwrap();
        content
    }

    fn start(&mut self, command: &mut Command, address: SocketAddr) {
        let log = fs::File::create(self.folder.join("log")).unwrap();
        command
            .env("LD_PRELOAD", LIBRARY.as_path())
            .env("SERVAL_TRANSFER_SOCKET", self.folder.join("engine"))
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

fn free_address() -> SocketAddr {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap()
}

fn get(address: SocketAddr, path: &str) -> TcpStream {
    let mut socket = TcpStream::connect(address).unwrap();
    socket.set_read_timeout(Some(PATIENCE)).unwrap();
    write!(socket, "GET {path} HTTP/1.1\r\nHost: test\r\nConnection: close\r\n\r\n").unwrap();
    socket
}

/// The body of an answer.
fn body(mut socket: TcpStream) -> Vec<u8> {
    let mut answer = Vec::new();
    socket.read_to_end(&mut answer).unwrap();
    assert!(answer.starts_with(b"HTTP/1.1 200 "));
    let end = answer.windows(4).position(|part| part == b"\r\n\r\n").unwrap();
    answer.split_off(end + 4)
}

#[test]
fn nginx_serves_through_the_engine() {
    let mut setup = Setup::new("nginx");
    let address = free_address();
    let folder = setup.folder.display().to_string();
    let config = format!(
        "daemon off; master_process off; pid {folder}/pid; error_log stderr; worker_processes 1;
         events {{ worker_connections 64; }}
         http {{
             access_log off; sendfile on; tcp_nopush on; root {folder}/files;
             client_body_temp_path {folder}/1; proxy_temp_path {folder}/2; fastcgi_temp_path {folder}/3;
             uwsgi_temp_path {folder}/4; scgi_temp_path {folder}/5;
             server {{ listen {address}; }}
         }}"
    );
    fs::write(setup.folder.join("nginx.conf"), config).unwrap();
    let (large, small) = (setup.file("large", 20 << 20), setup.file("small", 1000));
    let path = setup.folder.join("nginx.conf");
    setup.start(Command::new("nginx").arg("-p").arg(&setup.folder).arg("-c").arg(path), address);
    assert!(body(get(address, "/small")) == small);
    assert_eq!(setup.service.counters().started(), 0, "small files are sent by libc");
    // Clients that read slowly, that leave in the middle, and that come at the same time.
    let slow = get(address, "/large");
    thread::sleep(Duration::from_millis(20));
    for _ in 0..5 {
        let mut leaves = get(address, "/large");
        leaves.read_exact(&mut [0; 100_000]).unwrap();
    }
    let readers: Vec<_> =
        (0..4).map(|_| thread::spawn(move || body(get(address, "/large")))).collect();
    for reader in readers {
        assert!(reader.join().unwrap() == large);
    }
    assert!(body(slow) == large);
    let counters = setup.service.counters();
    assert!(counters.written() >= 5 * large.len() as u64, "{}", counters.written());
    // The engine has gone: libc does the rest.
    let Setup { server, .. } = &mut setup;
    assert!(server.as_mut().unwrap().try_wait().unwrap().is_none());
    let listener = LocalListener::bind(&setup.folder.join("other")).unwrap();
    setup.service = Service::start(listener, ServiceLimits::default()).unwrap();
    assert!(body(get(address, "/large")) == large);
    assert_eq!(setup.service.counters().started(), 0);
    let log = fs::read_to_string(setup.folder.join("log")).unwrap();
    assert_eq!(log.matches("serval: transfers are done by libc").count(), 1, "{log}");
}

/// A control connection of FTP.
struct Ftp(BufReader<TcpStream>);

impl Ftp {
    fn connect(address: SocketAddr) -> Self {
        let socket = TcpStream::connect(address).unwrap();
        socket.set_read_timeout(Some(PATIENCE)).unwrap();
        let mut ftp = Self(BufReader::new(socket));
        ftp.expect("220");
        ftp.tell("USER anonymous", "331");
        ftp.tell("PASS test", "230");
        ftp.tell("TYPE I", "200");
        ftp
    }

    fn expect(&mut self, code: &str) -> String {
        let mut line = String::new();
        self.0.read_line(&mut line).unwrap();
        assert!(line.starts_with(code), "{line}");
        line
    }

    fn tell(&mut self, command: &str, code: &str) -> String {
        write!(self.0.get_mut(), "{command}\r\n").unwrap();
        self.expect(code)
    }

    /// Starts to retrieve a file.
    fn retrieve(&mut self, name: &str) -> TcpStream {
        let line = self.tell("EPSV", "229");
        let port = line.split('|').nth(3).unwrap().parse().unwrap();
        let data = TcpStream::connect(SocketAddr::from(([127, 0, 0, 1], port))).unwrap();
        data.set_read_timeout(Some(PATIENCE)).unwrap();
        self.tell(&format!("RETR {name}"), "150");
        data
    }
}

#[test]
fn vsftpd_serves_through_the_engine() {
    let mut setup = Setup::new("vsftpd");
    let address = free_address();
    let large = setup.file("large", 20 << 20);
    // vsftpd refuses a writable root.
    let files = setup.folder.join("files");
    fs::set_permissions(&files, fs::Permissions::from_mode(0o555)).unwrap();
    // The sandbox allows no new sockets; without it one process of this user serves a connection.
    let config = format!(
        "listen=YES\nlisten_address=127.0.0.1\nlisten_port={}\nbackground=NO\nrun_as_launching_user=YES\nseccomp_sandbox=NO\n\
         anonymous_enable=YES\nanon_root={}\nlocal_enable=NO\nwrite_enable=NO\nxferlog_enable=NO\n\
         connect_from_port_20=NO\npasv_enable=YES\nuse_localtime=YES\n",
        address.port(),
        files.display()
    );
    let path = setup.folder.join("vsftpd.conf");
    fs::write(&path, config).unwrap();
    setup.start(Command::new("vsftpd").arg(path), address);
    let mut ftp = Ftp::connect(address);
    let mut got = Vec::new();
    ftp.retrieve("large").read_to_end(&mut got).unwrap();
    ftp.expect("226");
    assert!(got == large);
    // A client that leaves in the middle; the next one is served by another process.
    let mut leaves = Ftp::connect(address);
    leaves.retrieve("large").read_exact(&mut [0; 100_000]).unwrap();
    leaves.expect("426");
    drop(leaves);
    let mut got = Vec::new();
    Ftp::connect(address).retrieve("large").read_to_end(&mut got).unwrap();
    assert!(got == large);
    let counters = setup.service.counters();
    assert!(counters.written() >= 2 * large.len() as u64, "{}", counters.written());
}
