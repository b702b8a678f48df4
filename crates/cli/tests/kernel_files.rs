//! Kernel files that are rebuilt, damaged or crash while a server runs.

mod common;

use std::fs;
use std::net::{IpAddr, SocketAddr};
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use accel::KernelError;
use common::running::{Running, table};
use common::*;
use runtime::kernel_file::{KernelFile, Limits, Target, set_trial_program};
use wire::DropReason;

/// A folder that no other test uses.
fn folder(name: &str) -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("kernel-files-{name}"));
    let _ = fs::remove_dir_all(&folder);
    fs::create_dir_all(&folder).unwrap();
    folder
}

/// Compiles a shared library.
fn compile(folder: &Path, name: &str, source: &str) -> Vec<u8> {
    let (input, output) = (folder.join(name).with_extension("cpp"), folder.join(name));
    fs::write(&input, source).unwrap();
    let include = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../device/include");
    let mut compiler = Command::new(std::env::var("CXX").unwrap_or_else(|_| "c++".into()));
    compiler.args(["-std=c++17", "-shared", "-fPIC", "-fno-exceptions", "-fno-rtti", "-I"]);
    compiler.arg(include).arg("-o").arg(&output).arg(&input);
    assert!(compiler.status().expect("a C++ compiler").success());
    let library = fs::read(&output).unwrap();
    fs::remove_file(&output).unwrap();
    library
}

/// A library whose kernel answers every message with its version, and one of another version.
fn versions(folder: &Path) -> [Vec<u8>; 2] {
    let first = compile(
        folder,
        "versions.so",
        r#"#include <serval/kernel.h>
volatile const char version[] = "version-A";
SERVAL_KERNEL(versions) (serval::Block& block, serval::Mqueue& q) {
    while (auto msg = q.recv(block)) {
        auto reply = q.reply(block, msg, 9);
        if (reply.len() == 9)
            for (unsigned i = 0; i < 9; i++) reply.as<char>()[i] = version[i];
        q.send(block, reply);
    }
}
"#,
    );
    let at = first.windows(9).position(|bytes| bytes == b"version-A").unwrap();
    let mut second = first.clone();
    second[at + 8] = b'B';
    [first, second]
}

/// What kernels print is in the log, in whichever process they run, and standard output has the engine's lines only.
#[test]
fn what_a_kernel_prints_is_on_standard_error() {
    let folder = folder("prints");
    let library = compile(
        &folder,
        "prints.so",
        r#"#include <serval/kernel.h>
#include <cstdio>
SERVAL_KERNEL(prints) (serval::Block& block, serval::Mqueue& q) {
    while (auto msg = q.recv(block)) {
        printf("the kernel got %u bytes\n", static_cast<unsigned>(msg.len()));
        auto reply = q.reply(block, msg, 1);
        if (reply.len() == 1) reply.as<char>()[0] = 'x';
        q.send(block, reply);
    }
}
"#,
    );
    let path = folder.join("kernel.so");
    fs::write(&path, &library).unwrap();
    for (kind, more, tenant) in [
        ("cpu", "placement = \"worker\"", ""),
        ("cpu", "", ""),
        ("process", "", ""),
        // Isolated: it may make few system calls.
        ("process", "", "tenant = \"t\"\n[[tenant]]\nname = \"t\""),
    ] {
        let accelerator = format!("[[accelerator]]\nname = \"own\"\nkind = \"{kind}\"\n{more}\n");
        let config = format!(
            "{accelerator}[[service]]\nname = \"p\"\nlisten = \"udp://127.0.0.1:0\"\naccelerator = \"own\"\nkernel = {path:?}\n{tenant}\n"
        );
        let served =
            Served::start(&format!("prints-{kind}-{}-{}", more.len(), tenant.len()), "", &config);
        assert_eq!(ask(&udp_client(served.services[0][0]), b"12345"), b"x");
        // Not only when it ends.
        let line = "the kernel got 5 bytes\n";
        eventually("it is in the log", || served.log().contains(line));
        // The last line, and nothing else, follows the first one.
        let (code, _) = served.finish();
        assert_eq!(code, 0, "{kind} {more}");
    }
}

/// A kernel of a process that returns is named as the reason.
#[test]
fn a_kernel_that_returns_is_named() {
    let folder = folder("returns");
    let library = compile(
        &folder,
        "returns.so",
        r#"#include <serval/kernel.h>
SERVAL_KERNEL(returns) (serval::Block& block, serval::Mqueue& q) {
    if (auto msg = q.recv(block)) q.drop(block, msg, serval::BAD_LENGTH);
}
"#,
    );
    let path = folder.join("kernel.so");
    fs::write(&path, &library).unwrap();
    let config = format!(
        "[[accelerator]]\nname = \"own\"\nkind = \"process\"\n[[service]]\nname = \"r\"\nlisten = \"udp://127.0.0.1:0\"\n\
         accelerator = \"own\"\nkernel = {path:?}\nmqueues = 1\n"
    );
    let served = Served::start("returns", "", &config);
    let client = udp_client(served.services[0][0]);
    eventually("it returned several times", || {
        client.send(b"return").unwrap();
        served.metric("serval_accelerator_restarts_total{service=\"r\",accelerator=\"own\"}") > 2
    });
    let log = served.log();
    assert!(log.contains("a runtime ended: the kernel of block 0 returned"), "{log}");
    assert!(!log.contains("the engine has ended"), "{log}");
}

/// Numbers and texts of `params` reach a kernel wherever it runs.
#[test]
fn a_kernel_gets_the_parameters_of_its_service() {
    let library = build_kernel("device/tests/param_text.cpp");
    let text = "ü".repeat(127) + "!";
    let accelerators = "[[accelerator]]\nname = \"worker\"\n\
                        [[accelerator]]\nname = \"threads\"\nplacement = \"threads\"\n\
                        [[accelerator]]\nname = \"apart\"\nkind = \"process\"\n";
    let service = |accelerator: &str| {
        format!(
            "[[service]]\nname = \"{accelerator}\"\nlisten = \"udp://127.0.0.1:0\"\naccelerator = \"{accelerator}\"\n\
             kernel = \"{library}:param_text\"\nparams = {{ text = \"{text}\", n = 3 }}\n"
        )
    };
    let services = ["worker", "threads", "apart"].map(service).concat();
    let served = Served::start("kernel-params", "", &format!("{accelerators}{services}"));
    for addresses in &served.services {
        let client = udp_client(addresses[0]);
        client.send(b"?").unwrap();
        let mut reply = [0; 512];
        let len = client.recv(&mut reply).unwrap();
        assert_eq!(reply[..len], [text.as_bytes(), b"3"].concat());
    }
    assert_eq!(served.drain(), 0);
}

/// A kernel sees the address of its client, whichever worker has the connection.
#[test]
fn a_kernel_sees_where_requests_come_from() {
    let library = build_kernel("device/tests/peer_address.cpp");
    let accelerators = "[[accelerator]]\nname = \"worker\"\n\
                        [[accelerator]]\nname = \"apart\"\nkind = \"process\"\n";
    let service = |accelerator: &str| {
        format!(
            "[[service]]\nname = \"{accelerator}\"\nlisten = [\"udp://127.0.0.1:0\", \"tcp://127.0.0.1:0\", \"udp://[::1]:0\"]\n\
             accelerator = \"{accelerator}\"\nkernel = \"{library}:peer_address\"\npeer_address = true\n\
             max_message_bytes = 1000\nmax_reply_bytes = 1020\n"
        )
    };
    let services = ["worker", "apart"].map(service).concat();
    let served = Served::start("kernel-peers", "workers = 2", &format!("{accelerators}{services}"));
    let expected = |own: SocketAddr, request: &[u8]| {
        let mut peer = [0; 20];
        match own.ip() {
            IpAddr::V4(ip) => peer[..4].copy_from_slice(&ip.octets()),
            IpAddr::V6(ip) => peer[..16].copy_from_slice(&ip.octets()),
        }
        peer[16..18].copy_from_slice(&own.port().to_le_bytes());
        peer[18] = if own.is_ipv4() { 4 } else { 6 };
        [&peer, request].concat()
    };
    for addresses in &served.services {
        for at in [addresses[0], addresses[2]] {
            for len in [0, 5, 968] {
                let client = udp_client(at);
                let request = pattern(len, 1);
                assert_eq!(
                    ask(&client, &request),
                    expected(client.local_addr().unwrap(), &request)
                );
            }
        }
        // Connections are on both workers, and their requests go to mqueues of both.
        let mut streams: Vec<_> = (0..4).map(|_| tcp_client(addresses[1])).collect();
        for round in 0..4 {
            for stream in &mut streams {
                let request = pattern(40, round);
                let expected = expected(stream.local_addr().unwrap(), &request);
                assert_eq!(exchange(stream, &request, expected.len()), expected);
            }
        }
    }
    // What is too long with the address.
    udp_client(served.services[0][0]).send(&pattern(969, 1)).unwrap();
    eventually("it is dropped", || served.dropped("worker", DropReason::TooLong) == 1);
    assert_eq!(served.drain(), 0);
}

/// A library whose constructor does this.
fn with_constructor(folder: &Path, name: &str, body: &str) -> Vec<u8> {
    let source = format!("__attribute__((constructor)) static void begin() {{ {body} }}\n");
    compile(folder, name, &source)
}

const CRASH: &str = "*(volatile int*)0 = 0;";
const LOOP: &str = "for (volatile int i = 0;; i++) {}";

/// A server of `kind` whose kernel file is damaged and rebuilt.
fn damage_and_rebuild(kind: &str, damage: impl Fn(&Running, u16)) {
    let folder = folder(kind);
    let [first, second] = versions(&folder);
    let path = folder.join("kernel.so");
    fs::write(&path, &first).unwrap();
    let port = free_port();
    let accelerator = format!("[[accelerator]]\nname = \"acc0\"\nkind = \"{kind}\"\n");
    let service = table("k", port, path.to_str().unwrap(), "accelerator = \"acc0\"");
    let running = Running::start(&format!("kernel-{kind}"), &format!("{accelerator}{service}"));
    let client = udp_client(([127, 0, 0, 1], port).into());
    assert_eq!(ask(&client, b"which?"), b"version-A");
    let crash = with_constructor(&folder, "crash.so", CRASH);
    for (content, why) in [
        (&first[..first.len() / 2], "is truncated"),
        (&b"text"[..], "is not an ELF file"),
        (&crash, "crashes while it is loaded: SIGSEGV"),
    ] {
        // In place: what runs would see it if it were mapped.
        fs::write(&path, content).unwrap();
        let (code, output, _) = running.reload();
        assert!(code == 1 || code == 2, "{code}: {output}");
        assert!(output.contains(why), "{why}: {output}");
        assert_eq!(ask(&client, b"which?"), b"version-A");
    }
    damage(&running, port);
    fs::write(&path, &second).unwrap();
    let (code, output, log) = running.reload();
    assert_eq!(code, 0, "{output}{log}");
    assert!(output.contains("\"fate\":\"changed\""), "{output}");
    let told = format!("kernel {} changed: service k restarts with it", path.display());
    assert!(running.log().contains(&told), "{}", running.log());
    assert_eq!(ask(&client, b"which?"), b"version-B");
    // The same content is the same kernel, whenever it was written.
    fs::write(&path, &second).unwrap();
    let (code, output, _) = running.reload();
    assert!(code == 0 && output.contains("\"result\":\"unchanged\""), "{output}");
    assert_eq!(running.end(), 0);
}

#[test]
fn a_kernel_file_of_the_engine_is_damaged_and_rebuilt_while_it_serves() {
    let _alone = alone();
    damage_and_rebuild("cpu", |_, _| {});
}

#[test]
fn a_kernel_file_of_a_process_is_damaged_and_rebuilt_while_it_serves() {
    let _alone = alone();
    damage_and_rebuild("process", |running, port| {
        // The next life runs what the engine has checked, not what is in the file now.
        let runtimes = children(running.process.0.id());
        assert_eq!(runtimes.len(), 1, "{runtimes:?}");
        signal(runtimes[0], "KILL");
        let client = udp_client(([127, 0, 0, 1], port).into());
        client.set_read_timeout(Some(Duration::from_millis(100))).unwrap();
        eventually("the next life answers", || {
            client.send(b"which?").unwrap();
            let mut reply = [0; 64];
            client.recv(&mut reply).is_ok_and(|len| &reply[..len] == b"version-A")
        });
    });
}

#[test]
fn a_start_names_what_is_wrong_with_a_kernel_file() {
    let folder = folder("start");
    let path = folder.join("kernel.so");
    let crash = with_constructor(&folder, "crash.so", CRASH);
    let missing = compile(&folder, "missing.so", "extern void nowhere(); void f() { nowhere(); }");
    let file = folder.join("kernel.toml");
    for (content, why) in
        [(&crash, "crashes while it is loaded: SIGSEGV"), (&missing, "undefined symbol: ")]
    {
        fs::write(&path, content).unwrap();
        let service = table("k", free_port(), path.to_str().unwrap(), "");
        fs::write(&file, format!("schema = 1\n{service}")).unwrap();
        let output = Command::new(env!("CARGO_BIN_EXE_serval")).arg("serve").arg(&file).output();
        let output = output.unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(said.contains(why) && said.contains("kernel.so"), "{why}: {said}");
        assert!(matches!(output.status.code(), Some(1 | 2)), "{said}");
    }
}

/// `serval kernel build` loads what it has built in a process of its own.
#[test]
fn a_kernel_whose_constructor_crashes_is_refused_when_it_is_built() {
    let folder = folder("build");
    let kernel = "SERVAL_KERNEL(mine) (serval::Block&, serval::Mqueue&) {}\n";
    let build = |name: &str, constructor: &str| {
        let source = format!(
            "#include <serval/kernel.h>\n{kernel}__attribute__((constructor)) static void begin() {{ {constructor} }}\n"
        );
        fs::write(folder.join(name), source).unwrap();
        let mut command = Command::new(env!("CARGO_BIN_EXE_serval"));
        let output = command.args(["kernel", "build", name]).current_dir(&folder).output();
        let output = output.unwrap();
        let text = [output.stdout.as_slice(), &output.stderr].concat();
        (output.status.code(), String::from_utf8(text).unwrap())
    };
    // Optimised, so not the crash of other tests.
    let (code, text) = build("crash.cpp", "__builtin_trap();");
    assert_eq!(code, Some(1), "{text}");
    let why = "crash.cpp was compiled, but ";
    assert!(text.contains(why) && text.contains("crashes while it is loaded: SIGILL"), "{text}");
    assert!(!folder.join("crash.so").exists());
    // The compiler would read its arguments from a file with such a name.
    let (code, text) = build("@mine.cpp", "");
    assert!(code == Some(0) && text.contains("built ./@mine.so"), "{code:?} {text}");
    assert!(folder.join("@mine.so").exists());
}

#[test]
fn a_constructor_that_does_not_end_is_given_up_after_a_limit() {
    set_trial_program(env!("CARGO_BIN_EXE_serval").into());
    let folder = folder("limits");
    let error = |name: &str, body: &str, limits: Limits| {
        let path = folder.join(name);
        let library = with_constructor(&folder, name, body);
        fs::write(&path, library).unwrap();
        let file = KernelFile::open(&path, Target::Host).unwrap();
        let error = file.tried(&limits, &mut || false).unwrap_err();
        assert!(matches!(error, KernelError::Trial(_)));
        error.to_string()
    };
    let patient = Duration::from_secs(60);
    let computes = error("loop.so", LOOP, Limits { cpu_seconds: 1, time: patient });
    assert!(
        computes.contains("loop.so computes for more than 1 s while it is loaded"),
        "{computes}"
    );

    let body = "unsigned sleep(unsigned) __asm__(\"sleep\"); sleep(100);";
    let waits = error("sleep.so", body, Limits { cpu_seconds: 60, time: Duration::from_secs(1) });
    assert!(waits.contains("sleep.so takes more than 1 s while it is loaded"), "{waits}");
}

/// Numbers of the processes that have this on their command line.
fn with_argument(argument: &Path) -> Vec<String> {
    let processes = fs::read_dir("/proc").unwrap().filter_map(|entry| {
        let entry = entry.unwrap();
        let line = fs::read(entry.path().join("cmdline")).ok()?;
        let mut arguments = line.split(|byte| *byte == 0);
        let has = arguments.any(|found| found == argument.as_os_str().as_bytes());
        has.then(|| entry.file_name().into_string().unwrap())
    });
    processes.collect()
}

#[test]
fn a_process_that_a_constructor_starts_ends_with_the_trial() {
    set_trial_program(env!("CARGO_BIN_EXE_serval").into());
    let folder = folder("forks");
    let path = folder.join("forks.so");
    let body = format!(
        "int fork(void) __asm__(\"fork\"); unsigned sleep(unsigned) __asm__(\"sleep\"); \
         if (fork() == 0) for (int i = 0; i < 300; i++) sleep(1); {CRASH}"
    );
    fs::write(&path, with_constructor(&folder, "forks.so", &body)).unwrap();
    let file = KernelFile::open(&path, Target::Host).unwrap();
    let error = file.tried(&Limits::default(), &mut || false).unwrap_err().to_string();
    assert!(error.contains("crashes while it is loaded: SIGSEGV"), "{error}");
    eventually("the constructor's process has ended", || with_argument(&path).is_empty());
}

#[test]
fn check_config_tries_a_file_of_several_services_once() {
    let folder = folder("once");
    let trials = folder.join("trials");
    let body = format!(
        "int open(const char*, int, ...) __asm__(\"open\"); \
         long write(int, const void*, unsigned long) __asm__(\"write\"); \
         write(open(\"{}\", 02001), \"x\", 1);",
        trials.display()
    );
    fs::write(&trials, "").unwrap();
    let source = format!(
        "#include <serval/kernel.h>\nSERVAL_KERNEL(once) (serval::Block& block, serval::Mqueue& q) {{\n\
         while (auto msg = q.recv(block)) q.drop(block, msg, serval::OK);\n}}\n\
         __attribute__((constructor)) static void begin() {{ {body} }}\n"
    );
    fs::write(folder.join("once.so"), compile(&folder, "once.so", &source)).unwrap();
    let service = |name: &str| table(name, free_port(), "./once.so", "");
    let file = folder.join("once.toml");
    let text = ["a", "b", "c"].map(service).concat();
    fs::write(&file, format!("schema = 1\n{text}")).unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_serval"));
    let output = command.arg("check-config").arg(&file).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}");
    assert_eq!(fs::read_to_string(&trials).unwrap(), "x", "{said}");
}

#[test]
fn check_config_opens_kernel_files_and_names_every_problem() {
    let folder = folder("check");
    let crash = with_constructor(&folder, "crash.so", CRASH);
    fs::write(folder.join("crash.so"), crash).unwrap();
    fs::write(folder.join("cut.so"), &versions(&folder)[0][..500]).unwrap();
    fs::write(folder.join("good.so"), &versions(&folder)[0]).unwrap();
    fs::write(folder.join("gpu.fatbin"), "x").unwrap();
    let service = |name: &str, kernel: &str, more: &str| table(name, free_port(), kernel, more);
    let gpu = "accelerator = \"gpu0\"";
    let cpu = "accelerator = \"acc0\"";
    let text = [
        "schema = 1\n[engine]\ncontrol = \"/nonexistent/folder/control\"\n".to_owned(),
        "[[accelerator]]\nname = \"gpu0\"\nkind = \"cuda\"\n".to_owned(),
        "[[accelerator]]\nname = \"acc0\"\n".to_owned(),
        service("crash", "./crash.so", cpu),
        service("cut", "./cut.so", cpu),
        service("other", "./good.so:other", cpu),
        service("wrong", "./gpu.fatbin", cpu),
        service("image", "./good.so", gpu),
        service("good", "./good.so", cpu),
    ];
    let file = folder.join("check.toml");
    let check = |text: &str| {
        fs::write(&file, text).unwrap();
        let mut command = Command::new(env!("CARGO_BIN_EXE_serval"));
        let output = command.arg("check-config").arg(&file).output().unwrap();
        let said = [output.stdout, output.stderr].concat();
        (output.status.code(), String::from_utf8(said).unwrap())
    };
    let (code, said) = check(&text.concat());
    assert_eq!(code, Some(2), "{said}");
    for part in [
        "crash.so crashes while it is loaded",
        "SIGSEGV",
        "cut.so cannot be loaded",
        "it is truncated",
        "has no kernel `other`",
        "one of versions",
        "gpu.fatbin contains kernels for NVIDIA GPUs",
        "good.so is not a fatbin or cubin",
    ] {
        assert!(said.contains(part), "{part:?} is missing: {said}");
    }
    assert_eq!(said.matches("error: ").count(), 5, "{said}");
    // What only this machine lacks is a warning.
    let (code, said) = check(&[&text[..3], &text[8..]].concat().concat());
    assert_eq!(code, Some(0), "{said}");
    assert!(said.contains("would refuse here: engine.control"), "{said}");
}

/// A kernel whose replies wait until three messages are with it at the same time; the message "hang" gets none and never ends.
const MEET: &str = r#"#include <serval/kernel.h>
#include <unistd.h>
static int inside;
SERVAL_KERNEL(meet)(serval::Block& block, serval::Mqueue& q) {
    while (auto msg = q.recv(block)) {
        while (msg.len() == 4) pause();
        __atomic_add_fetch(&inside, 1, __ATOMIC_SEQ_CST);
        while (__atomic_load_n(&inside, __ATOMIC_SEQ_CST) < 3) usleep(1000);
        auto reply = q.reply(block, msg, 3);
        if (reply.len() == 3)
            for (unsigned i = 0; i < 3; i++) reply.as<char>()[i] = "met"[i];
        q.send(block, reply);
    }
}
"#;

#[test]
fn a_request_that_waits_holds_up_its_own_mqueue_only() {
    let folder = folder("meet");
    let path = folder.join("meet.so");
    fs::write(&path, compile(&folder, "meet.so", MEET)).unwrap();
    let accelerator =
        |keys| format!("[[accelerator]]\nname = \"given\"\nhang_ms = 3600000\n{keys}\n");
    for (name, accelerator, on) in [
        ("own", String::new(), ""),
        ("process", accelerator("kind = \"process\""), "accelerator = \"given\"\n"),
        ("threads", accelerator("placement = \"threads\""), "accelerator = \"given\"\n"),
    ] {
        // Four mqueues, by default; a request each, in turn.
        let service = format!(
            "{accelerator}[[service]]\nname = \"meet\"\nlisten = \"udp://127.0.0.1:0\"\n\
             request_timeout_ms = 3600000\nkernel = \"{}\"\n{on}",
            path.display()
        );
        let served = Served::start(&format!("kernel-meet-{name}"), "", &service);
        let clients: Vec<_> = (0..4).map(|_| udp_client(served.services[0][0])).collect();
        clients[0].send(b"hang").unwrap();
        for client in &clients[1..] {
            client.send(b"meets").unwrap();
        }
        for client in &clients[1..] {
            let mut reply = [0; 64];
            let len = client.recv(&mut reply).expect("a thread for each mqueue");
            assert_eq!(&reply[..len], b"met", "{name}");
        }
    }
}
