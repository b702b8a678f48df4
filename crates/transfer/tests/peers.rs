//! nginx, vsftpd and proftpd, unmodified, serve files through a transfer engine: the library for LD_PRELOAD replaces their sendfile.
//! Contents are compared, clients leave in the middle, and the engine's counters show that it did the work.

#[path = "common/preloaded.rs"]
mod preloaded;

use std::fs;
use std::io::Read as _;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::path::Path;
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use preloaded::{Ftp, PATIENCE, Setup, body, free_address, get, over_http2};
use sys::local::LocalListener;
use transfer::{Service, ServiceLimits};

/// A configuration of nginx that serves the files of a setup with `sendfile`; with these settings, listening so.
fn nginx(setup: &Setup, settings: &str, listen: &str) -> String {
    let folder = setup.folder.display();
    format!(
        "daemon off; master_process off; pid {folder}/pid; error_log stderr; worker_processes 1;
         events {{ worker_connections 64; }}
         http {{
             access_log off; sendfile on; {settings} root {folder}/files;
             client_body_temp_path {folder}/1; proxy_temp_path {folder}/2; fastcgi_temp_path {folder}/3;
             uwsgi_temp_path {folder}/4; scgi_temp_path {folder}/5;
             server {{ listen {listen}; }}
         }}"
    )
}

#[test]
fn nginx_serves_through_the_engine() {
    let mut setup = Setup::new("nginx");
    let address = free_address();
    let config = nginx(&setup, "tcp_nopush on;", &format!("{address}"));
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
    // A call that a busy engine answers late is libc's.
    assert!(counters.written() >= large.len() as u64, "{}", counters.written());
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

/// Several streams share a connection: pieces of files go out between headers of frames of others.
#[test]
fn nginx_serves_http2_through_the_engine() {
    let mut setup = Setup::new("nginx-http2");
    let address = free_address();
    let config = nginx(&setup, "tcp_nopush on; http2_chunk_size 16k;", &format!("{address} http2"));
    fs::write(setup.folder.join("nginx.conf"), config).unwrap();
    let contents = [setup.file("large", 5_000_003), setup.file("other", 3_000_001)];
    let small = setup.file("small", 1000);
    // A frame has 16 KiB at most, so calls are shorter than those that go to an engine by default.
    let program = fs::canonicalize("/usr/sbin/nginx").unwrap();
    let settings = setup.folder.join("transfer.toml");
    let text = format!(
        "[[program]]\npath = \"{}\"\nengine = \"{}/engine\"\nmin_bytes = 2000\nnonblocking = true\n",
        program.display(),
        setup.folder.display()
    );
    fs::write(&settings, text).unwrap();
    fs::set_permissions(&settings, fs::Permissions::from_mode(0o600)).unwrap();
    let mut command = Command::new("env");
    command.args(["-u", "SERVAL_TRANSFER_SOCKET", "nginx", "-p"]).arg(&setup.folder);
    command.arg("-c").arg(setup.folder.join("nginx.conf"));
    setup.start(command.env("SERVAL_TRANSFER_CONFIG", &settings), address);
    let base = format!("http://{address}");
    let plain = ["--http2-prior-knowledge"];
    // One that leaves in the middle.
    let part = setup.folder.join("part");
    let mut leaves = Command::new("curl");
    leaves.args(["--silent", "--limit-rate", "100k", "--output"]).arg(&part).args(plain);
    let mut leaves = leaves.arg(format!("{base}/large")).stdin(Stdio::null()).spawn().unwrap();
    let deadline = Instant::now() + PATIENCE;
    while fs::metadata(&part).map_or(0, |found| found.len()) == 0 {
        assert!(Instant::now() < deadline, "nothing arrives");
        thread::sleep(Duration::from_millis(5));
    }
    let paths = ["/large", "/other", "/small", "/large", "/other", "/large"];
    let got = over_http2(&setup.folder, &base, &paths, &plain);
    leaves.kill().unwrap();
    leaves.wait().unwrap();
    for (path, got) in paths.iter().zip(got) {
        let expected = match *path {
            "/large" => &contents[0],
            "/other" => &contents[1],
            _ => &small,
        };
        assert!(got == *expected, "{path}: {} bytes of {}", got.len(), expected.len());
    }
    let counters = setup.service.counters();
    assert!(counters.written() >= contents[0].len() as u64, "{}", counters.written());
    let log = fs::read_to_string(setup.folder.join("log")).unwrap();
    assert!(!log.contains("serval: transfers are done by libc"), "{log}");
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
    let mut ftp = Ftp::connect(address, "anonymous");
    let mut got = Vec::new();
    ftp.retrieve("large").read_to_end(&mut got).unwrap();
    ftp.expect("226");
    assert!(got == large);
    // A client that leaves in the middle; the next one is served by another process.
    let mut leaves = Ftp::connect(address, "anonymous");
    leaves.retrieve("large").read_exact(&mut [0; 100_000]).unwrap();
    leaves.expect("426");
    drop(leaves);
    let mut got = Vec::new();
    Ftp::connect(address, "anonymous").retrieve("large").read_to_end(&mut got).unwrap();
    assert!(got == large);
    let counters = setup.service.counters();
    assert!(counters.written() >= 2 * large.len() as u64, "{}", counters.written());
}

#[test]
fn proftpd_serves_through_the_engine() {
    let mut setup = Setup::new("proftpd");
    let address = free_address();
    let large = setup.file("large", 20 << 20);
    let folder = setup.folder.display().to_string();
    // A user of the password file that has this process's user.
    let owner = fs::metadata(&setup.folder).unwrap();
    let password = Command::new("openssl").args(["passwd", "-1", "test"]).output().unwrap();
    let password = String::from_utf8(password.stdout).unwrap();
    let (user, group) = (owner.uid(), owner.gid());
    let name = |option| {
        let output = Command::new("id").arg(option).output().unwrap();
        String::from_utf8(output.stdout).unwrap().trim().to_owned()
    };
    let line = format!("test:{}:{user}:{group}::{folder}/files:/bin/sh\n", password.trim());
    fs::write(setup.folder.join("users"), line).unwrap();
    fs::set_permissions(setup.folder.join("users"), fs::Permissions::from_mode(0o600)).unwrap();
    let config = format!(
        "ServerType standalone\nServerName test\nPort {}\nDefaultAddress 127.0.0.1\nSocketBindTight on\nUseIPv6 off\n\
         AuthOrder mod_auth_file.c\nAuthUserFile {folder}/users\nRequireValidShell off\nRootLogin on\nWtmpLog off\n\
         UseReverseDNS off\nPidFile {folder}/pid\nScoreboardFile {folder}/scoreboard\nDelayEngine off\n\
         TransferLog NONE\nUseSendfile on\nUseFtpUsers off\nUser {}\nGroup {}\n",
        address.port(),
        name("-un"),
        name("-gn")
    );
    let path = setup.folder.join("proftpd.conf");
    fs::write(&path, config).unwrap();
    let program = Path::new(env!("CARGO_MANIFEST_DIR"));
    let program = program.join("../../target/packages/proftpd/usr/sbin/proftpd");
    setup.start(Command::new(program).arg("-n").arg("-c").arg(path), address);
    let mut ftp = Ftp::connect(address, "test");
    for _ in 0..2 {
        let mut got = Vec::new();
        ftp.retrieve("large").read_to_end(&mut got).unwrap();
        ftp.expect("226");
        assert!(got == large);
    }
    // From a place on.
    ftp.tell("REST 1000001", "350");
    let mut got = Vec::new();
    ftp.retrieve("large").read_to_end(&mut got).unwrap();
    ftp.expect("226");
    assert!(got == large[1_000_001..]);
    // A client that leaves in the middle.
    let mut leaves = Ftp::connect(address, "test");
    leaves.retrieve("large").read_exact(&mut [0; 100_000]).unwrap();
    leaves.expect("426");
    drop(leaves);
    let mut got = Vec::new();
    Ftp::connect(address, "test").retrieve("large").read_to_end(&mut got).unwrap();
    assert!(got == large);
    let counters = setup.service.counters();
    assert!(counters.written() >= 4 * large.len() as u64 - 1_000_001, "{}", counters.written());
}
