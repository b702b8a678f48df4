//! A kernel on a worker's core that computes and does not come back: the worker serves nothing meanwhile. It is named, readiness
//! fails until it comes back, and the server ends in time.

mod common;

use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::process::Command;

use common::*;
use serde_json::Value as Json;

/// A service that echoes and one that holds its worker up while a file is there.
struct Held {
    served: Served,
    file: PathBuf,
}

impl Held {
    fn start(name: &str) -> Self {
        let file = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("{name}.hold"));
        let _ = std::fs::remove_file(&file);
        let library = build_kernel("crates/server/tests/kernels/hold.cpp");
        let service = |name: &str, kernel: &str| {
            format!(
                "[[service]]\nname = \"{name}\"\nlisten = [\"udp://127.0.0.1:0\"]\naccelerator = \"acc0\"\nkernel = \"{kernel}\"\n"
            )
        };
        let config = "[[accelerator]]\nname = \"acc0\"\nkind = \"cpu\"\n".to_owned()
            + &service("echo", "echo")
            + &service("holds", &format!("{library}:hold"));
        let environment = [("SERVAL_TEST_HOLD", file.as_path())];
        let served = Served::start_with(name, "drain_ms = 300", &config, &environment);
        Self { served, file }
    }

    /// From now on the worker is inside the kernel.
    fn hold(&self) {
        assert_eq!(ask(&udp_client(self.served.services[1][0]), b"x"), b"x");
        std::fs::write(&self.file, "").unwrap();
        udp_client(self.served.services[1][0]).send(b"held").unwrap();
    }

    fn release(&self) {
        std::fs::remove_file(&self.file).unwrap();
    }

    /// Status and body of `/readyz`.
    fn readiness(&self) -> (bool, String) {
        let mut stream = tcp_client(self.served.metrics);
        stream.write_all(b"GET /readyz HTTP/1.1\r\nHost: test\r\n\r\n").unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        let body = answer.split_once("\r\n\r\n").unwrap().1.to_owned();
        (answer.starts_with("HTTP/1.1 200"), body)
    }

    fn stalls(&self) -> String {
        let mut body = String::new();
        eventually("readiness fails", || {
            let (ready, text) = self.readiness();
            body = text;
            !ready
        });
        body
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.file);
    }
}

#[test]
fn a_kernel_that_does_not_return_is_named_and_readiness_fails_until_it_does() {
    let held = Held::start("stalled-and-back");
    assert_eq!(held.readiness(), (true, "ready\n".into()));
    held.hold();
    let why = held.stalls();
    let sentence = "kernel \"hold\" of service \"holds\" on accelerator \"acc0\" does not return";
    assert!(why.contains(sentence), "{why}");
    let page = page(held.served.metrics);
    let stalled = "serval_worker_stalled{worker=\"0\",service=\"holds\",kernel=\"";
    assert!(page.lines().any(|line| line.starts_with(stalled) && line.ends_with(" 1")), "{page}");
    let top = Command::new(env!("CARGO_BIN_EXE_serval"))
        .args(["top", "--json", "--interval", "0.1", &held.served.metrics.to_string()])
        .output()
        .unwrap();
    let sample: Json = serde_json::from_slice(&top.stdout).unwrap();
    assert_eq!(sample["stalled"][0], "holds", "{sample}");
    held.release();
    eventually("it is ready again", || held.readiness().0);
    answers_again(held.served.services[0][0], 1);
    assert!(!common::page(held.served.metrics).contains(stalled));
    eventually("the log reports it", || {
        held.served.log().contains("worker 0 is no longer stalled")
    });
    let log = held.served.log();
    assert_eq!(log.matches(sentence).count(), 1, "{log}");
}

#[test]
fn a_server_ends_in_time_although_a_kernel_does_not_return() {
    let mut held = Held::start("stalled-at-the-end");
    held.hold();
    held.stalls();
    held.served.process.signal("TERM");
    let mut code = None;
    eventually("the process ends", || {
        code = held.served.process.0.try_wait().unwrap();
        code.is_some()
    });
    assert_eq!(code.unwrap().code(), Some(3));
    let log = held.served.log();
    assert!(log.contains("worker 0 does not stop, its thread is left behind: kernel"), "{log}");
}

#[test]
fn a_server_ends_in_time_although_a_reload_waits_for_a_kernel_that_does_not_return() {
    let mut held = Held::start("stalled-in-a-reload");
    held.hold();
    held.stalls();
    let config = held.file.with_extension("toml");
    let text = std::fs::read_to_string(&config).unwrap();
    let more = "[[service]]\nname = \"more\"\nlisten = [\"udp://127.0.0.1:0\"]\naccelerator = \"acc0\"\nkernel = \"echo\"\n";
    std::fs::write(&config, text + more).unwrap();
    held.served.process.signal("HUP");
    held.served.process.signal("TERM");
    let mut code = None;
    eventually("the process ends", || {
        code = held.served.process.0.try_wait().unwrap();
        code.is_some()
    });
    assert_eq!(code.unwrap().code(), Some(3));
}

/// A program that cannot start more threads: `prlimit` only applies to unprivileged users, so root changes its user here.
#[test]
fn a_server_that_cannot_start_threads_drains_and_ends() {
    use std::os::unix::fs::PermissionsExt as _;
    use std::os::unix::process::CommandExt as _;
    let folder = std::env::temp_dir().join(format!("serval-no-thread-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    std::fs::set_permissions(&folder, std::fs::Permissions::from_mode(0o755)).unwrap();
    let (program, config) = (folder.join("serval"), folder.join("a.toml"));
    std::fs::copy(env!("CARGO_BIN_EXE_serval"), &program).unwrap();
    let service = |name: &str, accelerator: &str, rest: &str| {
        format!(
            "[[service]]\nname = \"{name}\"\nlisten = [\"udp://127.0.0.1:0\"]\naccelerator = \"{accelerator}\"\n{rest}\n"
        )
    };
    let text = "schema = 1\n[engine]\nmetrics = \"127.0.0.1:0\"\ncontrol = \"\"\n\
                [[accelerator]]\nname = \"core\"\nkind = \"cpu\"\n\
                [[accelerator]]\nname = \"threads\"\nkind = \"cpu\"\nplacement = \"threads\"\n"
        .to_owned()
        + &service(
            "slow",
            "core",
            "kernel = \"delay\"\nparams = { microseconds = 3e5 }\nrequest_timeout_ms = 60000",
        );
    std::fs::write(&config, &text).unwrap();
    let mut command = Command::new(&program);
    command.args(["serve", "--json"]).arg(&config).current_dir(&folder);
    command
        .stdout(std::process::Stdio::piped())
        .stderr(std::fs::File::create(folder.join("log")).unwrap());
    let mut limit = Command::new("prlimit");
    if sys::process::user() == 0 {
        command.uid(65_534).gid(65_534);
        limit.uid(65_534).gid(65_534);
    }
    let mut process = Peer::start(&mut command, "cargo builds it");
    let mut output = std::io::BufReader::new(process.0.stdout.take().unwrap());
    let mut line = String::new();
    std::io::BufRead::read_line(&mut output, &mut line).unwrap();
    let log = || std::fs::read_to_string(folder.join("log")).unwrap();
    let ready: Json = serde_json::from_str(&line).unwrap_or_default();
    assert_eq!(ready["event"], "ready", "{line}\n{}", log());
    let address = |url: &Json| -> std::net::SocketAddr {
        let authority = url.as_str().unwrap().split_once("://").unwrap().1;
        authority.split('/').next().unwrap().parse().unwrap()
    };
    let (slow, metrics) = (address(&ready["services"][0]["listen"][0]), address(&ready["metrics"]));
    let limited = limit
        .args(["--nproc=1:1", "--pid", &process.0.id().to_string()])
        .status()
        .expect("prlimit of util-linux");
    assert!(limited.success());
    // A reload that needs a thread is refused, and what runs goes on.
    std::fs::write(&config, text + &service("more", "threads", "kernel = \"echo\"")).unwrap();
    process.signal("HUP");
    eventually("the reload fails", || {
        page(metrics).contains("serval_reloads_total{result=\"failed\"} 1\n")
    });
    eventually("the log says why", || log().contains("start an accelerator thread"));
    // What was accepted before the end is answered during the drain.
    let client = udp_client(slow);
    client.send(b"in flight").unwrap();
    let received = "serval_requests_received_total{service=\"slow\"} 1\n";
    eventually("it is accepted", || page(metrics).contains(received));
    process.signal("TERM");
    let mut reply = [0; 64];
    let len = client.recv(&mut reply).expect("a reply in the drain");
    assert_eq!(&reply[..len], b"in flight");
    assert_eq!(process.0.wait().unwrap().code(), Some(0), "{}", log());
    std::fs::remove_dir_all(&folder).unwrap();
}

/// At 8605ced a kernel on accelerator threads was dead after two seconds, whatever its requests were given.
#[test]
fn a_kernel_on_threads_may_take_as_long_as_its_requests_and_hangs_after_hang_ms() {
    let file = Path::new(env!("CARGO_TARGET_TMPDIR")).join("hang-on-threads.hold");
    let _ = std::fs::remove_file(&file);
    let library = build_kernel("crates/server/tests/kernels/hold.cpp");
    let config = |name: &str, hang: &str, timeout: u64| {
        format!(
            "[[accelerator]]\nname = \"{name}\"\nkind = \"cpu\"\nplacement = \"threads\"\n{hang}\n[[service]]\nname = \"{name}\"\n\
             listen = [\"udp://127.0.0.1:0\"]\naccelerator = \"{name}\"\nkernel = \"{library}:hold\"\nmqueues = 1\nrequest_timeout_ms = {timeout}\n"
        )
    };
    let text = config("patient", "", 60_000) + &config("strict", "hang_ms = 500", 300);
    let environment = [("SERVAL_TEST_HOLD", file.as_path())];
    let mut served = Served::start_with("hang-on-threads", "", &text, &environment);
    let patient = udp_client(served.services[0][0]);
    assert_eq!(ask(&patient, b"x"), b"x");
    std::fs::write(&file, "").unwrap();
    patient.send(b"held").unwrap();
    udp_client(served.services[1][0]).send(b"held").unwrap();
    let dead = "a block ended; its mqueue is dead";
    eventually("the strict one hangs", || served.log().contains(dead));
    let log = served.log();
    let line = log.lines().find(|line| line.contains(dead)).unwrap();
    assert!(line.contains("service=\"strict\"") && line.contains("reason=\"hung\""), "{line}");
    eventually("readiness fails", || page(served.metrics).contains("serval_ready 0\n"));
    // Longer than any limit was before.
    std::thread::sleep(std::time::Duration::from_millis(2500));
    std::fs::remove_file(&file).unwrap();
    let mut reply = [0; 64];
    let len = patient.recv(&mut reply).expect("its reply");
    assert_eq!(&reply[..len], b"held");
    assert_eq!(served.log().matches(dead).count(), 1, "{}", served.log());
    served.process.stop();
}

/// At 8605ced the worker that let go of a service later logged `ERROR a block ended` for each of its blocks.
#[test]
fn a_service_that_is_removed_from_two_workers_leaves_no_error_in_the_log() {
    let service = |name: &str| {
        format!(
            "[[service]]\nname = \"{name}\"\nlisten = [\"udp://127.0.0.1:0\"]\naccelerator = \"acc0\"\nkernel = \"echo\"\n"
        )
    };
    let config =
        "[[accelerator]]\nname = \"acc0\"\nkind = \"cpu\"\n".to_owned() + &service("stays");
    let more: String = (0..8).map(|n| service(&format!("goes{n}"))).collect();
    let served = Served::start_with("removed", "workers = 2", &(config + &more), &[]);
    let file = Path::new(env!("CARGO_TARGET_TMPDIR")).join("removed.toml");
    let text = std::fs::read_to_string(&file).unwrap();
    std::fs::write(&file, text.strip_suffix(&more).unwrap()).unwrap();
    served.process.signal("HUP");
    let changed = "serval_reloads_total{result=\"changed\"} 1\n";
    eventually("the services are gone", || page(served.metrics).contains(changed));
    eventually("the log is written", || served.log().contains("was read again"));
    answers_again(served.services[0][0], 1);
    assert!(!served.log().contains("ERROR"), "{}", served.log());
}
