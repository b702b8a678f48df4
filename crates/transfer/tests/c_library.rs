//! The C library (`lib/src/transfer`) and the library for LD_PRELOAD, by programs in C. The program of the library runs as it is shipped and with
//! the address and undefined behaviour sanitizers.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::LazyLock;
use std::time::Duration;

use sys::local::LocalListener;
use transfer::{Service, ServiceLimits};

/// Where the programs are: built once.
static PROGRAMS: LazyLock<PathBuf> = LazyLock::new(|| {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("transfer");
    let output = Command::new("make")
        .args(["--no-print-directory", "-C"])
        .arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("../../lib"))
        .args(["transfer", "transfer-tests"])
        .arg(format!("BUILD={}", folder.display()))
        .output()
        .expect("make has to be installed");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    folder
});

/// An engine in a folder that goes away.
struct Setup {
    service: Service,
    folder: PathBuf,
}

impl Setup {
    fn new(name: &str) -> Self {
        let name = format!("serval-transfer-c-{name}-{}", std::process::id());
        let folder = std::env::temp_dir().join(name);
        fs::create_dir_all(&folder).unwrap();
        let listener = LocalListener::bind(&folder.join("engine")).unwrap();
        Self { service: Service::start(listener, ServiceLimits::default()).unwrap(), folder }
    }

    fn socket(&self) -> PathBuf {
        self.folder.join("engine")
    }
}

impl Drop for Setup {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.folder);
    }
}

/// What a program has printed, on standard output and on standard error.
fn said(command: &mut Command) -> (String, String) {
    let output = command.output().unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    let (said, complained) = (text(output.stdout), text(output.stderr));
    assert!(output.status.success(), "{command:?}: {said}{complained}");
    (said, complained)
}

#[test]
fn a_program_in_c_transfers_files() {
    for variant in ["transfer_test", "transfer_test.san"] {
        let setup = Setup::new(variant);
        let mut program = Command::new(PROGRAMS.join(variant));
        let (said, complained) = said(program.arg(setup.socket()).arg(&setup.folder));
        assert_eq!((said.as_str(), complained.as_str()), ("ok\n", ""));
        assert!(setup.service.counters().succeeded() >= 4);
    }
    let mut program = Command::new(PROGRAMS.join("transfer_test"));
    let (said, _) = said(program.args(["/nowhere/engine", "/tmp"]));
    assert_eq!(said, "no engine: No such file or directory\n");
}

#[test]
fn sendfile_keeps_its_promises_through_the_preloaded_library() {
    let setup = Setup::new("preload");
    let run = |socket: Option<&Path>, preloaded: bool| {
        let mut program = Command::new(PROGRAMS.join("preload_test"));
        program.arg(&setup.folder).env_remove("SERVAL_TRANSFER_SOCKET");
        if preloaded {
            program.env("LD_PRELOAD", PROGRAMS.join("libserval_transfer_preload.so"));
        }
        program.env("SERVAL_TRANSFER_NONBLOCKING", "1");
        program.envs(socket.map(|path| ("SERVAL_TRANSFER_SOCKET", path)));
        said(&mut program)
    };
    // Without the library, without an engine, and with it.
    assert_eq!(run(None, false), ("ok\n".to_owned(), String::new()));
    let (said, warning) = run(Some(Path::new("/nowhere/engine")), true);
    let expected = "serval: transfers are done by libc: no engine answers (/nowhere/engine): No such file or directory\n";
    assert_eq!((said.as_str(), warning.as_str()), ("ok\n", expected), "one warning");
    assert_eq!(setup.service.counters().started(), 0);
    assert_eq!(run(Some(&setup.socket()), true), ("ok\n".to_owned(), String::new()));
    let counters = setup.service.counters();
    // Seven times the file, and the parts of a non-blocking socket.
    assert!(counters.succeeded() > 7, "{}", counters.succeeded());
    assert!(counters.written() >= 7 * 3_000_001);
    assert_eq!(setup.service.in_flight(), 0);
}

/// The handler's call comes when the outer call has its answer, which is not the handler's.
#[test]
fn a_signal_handler_sends_while_a_call_waits() {
    let setup = Setup::new("handler");
    let mut program = Command::new(PROGRAMS.join("preload_test"));
    program.arg(&setup.folder).arg("handler");
    program.env("LD_PRELOAD", PROGRAMS.join("libserval_transfer_preload.so"));
    program.env("SERVAL_TRANSFER_SOCKET", setup.socket());
    assert_eq!(said(&mut program), ("ok\n".to_owned(), String::new()));
    assert!(setup.service.counters().succeeded() >= 2);
}

#[test]
fn a_file_names_the_programs_that_use_an_engine() {
    assert_eq!(
        said(&mut Command::new(PROGRAMS.join("settings_test.san"))),
        ("ok\n".to_owned(), String::new())
    );
    let setup = Setup::new("settings");
    let file = setup.folder.join("transfer.toml");
    let program = fs::canonicalize(PROGRAMS.join("preload_test")).unwrap();
    let engine = setup.socket();
    let named = |program: &Path, more: &str| {
        let (program, engine) = (program.display(), engine.display());
        format!("[[program]]\npath = \"{program}\"\nengine = \"{engine}\"\n{more}")
    };
    // Returns what the engine has sent, and the warning.
    let run = |text: &str, mode: u32| {
        let _ = fs::remove_file(&file);
        fs::write(&file, text).unwrap();
        fs::set_permissions(&file, fs::Permissions::from_mode(mode)).unwrap();
        let before = setup.service.counters().written();
        let mut command = Command::new(&program);
        command.arg(&setup.folder).arg("once").env_remove("SERVAL_TRANSFER_SOCKET");
        command.env("LD_PRELOAD", PROGRAMS.join("libserval_transfer_preload.so"));
        let (said, warning) = said(command.env("SERVAL_TRANSFER_CONFIG", &file));
        assert_eq!(said, "ok\n");
        (setup.service.counters().written() - before, warning)
    };
    let bytes = 3_000_001;
    assert_eq!(run(&named(&program, ""), 0o600), (bytes, String::new()));
    let (written, warning) = run(&named(&program, "nonblocking = true\n"), 0o644);
    assert!(written > bytes && warning.is_empty(), "{written} {warning}");
    for silent in [
        named(&program, "min_bytes = 3000002\n"),
        named(Path::new("/usr/sbin/nginx"), ""),
        String::new(),
    ] {
        assert_eq!(run(&silent, 0o600), (0, String::new()), "{silent}");
    }
    // What cannot be used: libc sends, and one line says why.
    let warned =
        |why: &str| (0, format!("serval: transfers are done by libc: {}: {why}\n", file.display()));
    let expected = warned("line 4: nonblocking is true or false");
    assert_eq!(run(&named(&program, "nonblocking = 1\n"), 0o600), expected);
    let expected = warned("only root or this user may own and write it");
    assert_eq!(run(&named(&program, ""), 0o620), expected);
    assert_eq!(run(&"#".repeat(70_000), 0o600), warned("it is too long"));
    assert_eq!(run("\0", 0o600), warned("it has a zero byte"));
    let mut command = Command::new(&program);
    command.arg(&setup.folder).arg("once").env_remove("SERVAL_TRANSFER_SOCKET");
    command.env("LD_PRELOAD", PROGRAMS.join("libserval_transfer_preload.so"));
    let (said, warning) = said(command.env("SERVAL_TRANSFER_CONFIG", "/nowhere/file"));
    let expected = "serval: transfers are done by libc: /nowhere/file: No such file or directory\n";
    assert_eq!((said.as_str(), warning.as_str()), ("ok\n", expected));
    // Without a file the library does nothing, and prints nothing.
    if !Path::new("/etc/serval/transfer.toml").exists() {
        command.env_remove("SERVAL_TRANSFER_CONFIG");
        assert_eq!(self::said(&mut command), ("ok\n".to_owned(), String::new()));
    }
}

#[test]
fn the_end_of_a_program_ends_its_transfer_while_a_child_lives() {
    let setup = Setup::new("orphan");
    let mut program = Command::new(PROGRAMS.join("preload_test"));
    program.arg(&setup.folder).arg("orphan").stdin(Stdio::piped());
    program.env("LD_PRELOAD", PROGRAMS.join("libserval_transfer_preload.so"));
    program.env("SERVAL_TRANSFER_SOCKET", setup.socket());
    let mut program = program.spawn().unwrap();
    let counters = setup.service.counters();
    // The first one has ended when the child is forked.
    while counters.started() < 2 || setup.service.in_flight() == 0 {
        std::thread::sleep(Duration::from_millis(1));
    }
    program.kill().unwrap();
    let input = program.stdin.take();
    program.wait().unwrap();
    // Not because nothing has moved for 30 s.
    let failed = || counters.failed().filter(|(_, count)| *count > 0).collect::<Vec<_>>();
    while setup.service.in_flight() > 0 || failed().is_empty() {
        std::thread::sleep(Duration::from_millis(1));
    }
    let failed = failed();
    assert_eq!(failed, [("cancelled", 1)]);
    drop(input);
}
