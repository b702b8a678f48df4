//! A server whose log cannot be written: standard error on a full disk, on a closed pipe, and on a full pipe without a reader.
//! Lines are dropped and counted; service, probes and shutdown work as usual.

mod common;

use std::fs::{File, OpenOptions};
use std::io::{BufRead, BufReader, ErrorKind, Read, Write};
use std::net::SocketAddr;
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::process::{ChildStdout, Command, Stdio};

use common::*;
use serde_json::Value as Json;

/// O_NONBLOCK of Linux.
const NONBLOCKING: i32 = 0o4000;

/// `serval serve` with the given standard error, ready for clients.
struct Quiet {
    process: Peer,
    output: BufReader<ChildStdout>,
    config: PathBuf,
    services: Vec<SocketAddr>,
    metrics: SocketAddr,
}

impl Quiet {
    /// One service that echoes and one whose blocks return after a message; both on the workers' cores.
    fn start(name: &str, arguments: &[&str], errors: impl Into<Stdio>) -> Self {
        let config = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("log-{name}.toml"));
        let library = build_kernel("device/tests/misbehave.cpp");
        let text = format!(
            "schema = 1\n[engine]\nmetrics = \"127.0.0.1:0\"\ncontrol = \"\"\n[[accelerator]]\nname = \"acc0\"\nkind = \"cpu\"\n\
             [[service]]\nname = \"echo\"\nlisten = [\"udp://127.0.0.1:0\"]\naccelerator = \"acc0\"\nkernel = \"echo\"\n\
             [[service]]\nname = \"returns\"\nlisten = [\"udp://127.0.0.1:0\"]\naccelerator = \"acc0\"\nkernel = \"{library}:misbehave\"\n\
             params = {{ mode = 8, after = 0 }}\n"
        );
        std::fs::write(&config, text).unwrap();
        let mut command = Command::new(env!("CARGO_BIN_EXE_serval"));
        command.args(["serve", "--json"]).args(arguments).arg(&config);
        command.stdout(Stdio::piped()).stderr(errors);
        let mut process = Peer::start(&mut command, "cargo builds it");
        let mut output = BufReader::new(process.0.stdout.take().unwrap());
        let mut line = String::new();
        output.read_line(&mut line).unwrap();
        let ready: Json = serde_json::from_str(&line).expect("it becomes ready");
        let address = |url: &Json| -> SocketAddr {
            let authority = url.as_str().unwrap().split_once("://").unwrap().1;
            authority.split('/').next().unwrap().parse().unwrap()
        };
        let services = ready["services"].as_array().unwrap();
        let services = services.iter().map(|service| address(&service["listen"][0])).collect();
        Self { metrics: address(&ready["metrics"]), services, config, output, process }
    }

    fn metric(&self, name: &str) -> u64 {
        let page = page(self.metrics);
        let value = page.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
        value.unwrap_or_else(|| panic!("no {name} in\n{page}")).parse().unwrap()
    }

    /// Makes every thread log: the worker, whose block returns, and the one that reads the configuration again.
    fn make_it_log(&self) {
        assert_eq!(ask(&udp_client(self.services[0]), b"before"), b"before");
        udp_client(self.services[1]).send(b"return").unwrap();
        let dead = "serval_dropped_total{service=\"returns\"";
        eventually("the block has returned", || {
            udp_client(self.services[1]).send(b"again").unwrap();
            let page = page(self.metrics);
            page.lines().any(|line| {
                line.starts_with(dead) && line.contains("mqueue_dead") && !line.ends_with(" 0")
            })
        });
        std::fs::write(&self.config, "not a configuration").unwrap();
        self.process.signal("HUP");
        let refused = "serval_reloads_total{result=\"refused\"}";
        eventually("the reload is refused", || self.metric(refused) == 1);
    }

    fn is_well(&self) {
        assert_eq!(ask(&udp_client(self.services[0]), b"after"), b"after");
        let mut stream = tcp_client(self.metrics);
        stream.write_all(b"GET /readyz HTTP/1.1\r\nHost: test\r\n\r\n").unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    }

    /// Ends it; its last words.
    fn end(mut self) -> Json {
        self.process.signal("TERM");
        let mut code = None;
        eventually("the process ends", || {
            code = self.process.0.try_wait().unwrap();
            code.is_some()
        });
        assert_eq!(code.unwrap().code(), Some(0));
        let mut last = String::new();
        self.output.read_to_string(&mut last).unwrap();
        serde_json::from_str(&last).expect("its last words")
    }
}

#[test]
fn a_log_on_a_full_disk_only_loses_lines() {
    let full = OpenOptions::new().write(true).open("/dev/full").unwrap();
    let server = Quiet::start("full-disk", &[], full);
    server.make_it_log();
    server.is_well();
    let dropped = "serval_log_lines_dropped_total";
    eventually("lines are dropped", || server.metric(dropped) >= 2);
    let last = server.end();
    assert!(last["log_lines_dropped"].as_u64().unwrap() >= 2, "{last}");
}

#[test]
fn a_log_on_a_closed_pipe_only_loses_lines() {
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let server = Quiet::start("closed-pipe", &[], writer);
    server.make_it_log();
    server.is_well();
    eventually("lines are dropped", || server.metric("serval_log_lines_dropped_total") >= 2);
    server.end();
}

#[test]
fn a_log_on_an_unread_full_pipe_blocks_nothing() {
    let (_reader, writer) = std::io::pipe().unwrap();
    fill(writer.as_raw_fd());
    // Enough lines that its queue runs over as well, if turns of a worker are not to wait for it.
    let server = Quiet::start("full-pipe", &["--log", "trace"], writer);
    server.make_it_log();
    server.is_well();
    server.end();
}

#[test]
fn a_full_standard_output_stops_neither_service_nor_end() {
    let (_reader, writer) = std::io::pipe().unwrap();
    fill(writer.as_raw_fd());
    let port = free_port();
    let config = Path::new(env!("CARGO_TARGET_TMPDIR")).join("log-full-output.toml");
    let text = format!(
        "schema = 1\n[engine]\ncontrol = \"\"\n[[accelerator]]\nname = \"acc0\"\nkind = \"cpu\"\n\
         [[service]]\nname = \"echo\"\nlisten = [\"udp://127.0.0.1:{port}\"]\naccelerator = \"acc0\"\nkernel = \"echo\"\n"
    );
    std::fs::write(&config, text).unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_serval"));
    command.arg("serve").arg(&config).stdout(writer).stderr(Stdio::null());
    let mut process = Peer::start(&mut command, "cargo builds it");
    answers_again(([127, 0, 0, 1], port).into(), 1);
    process.signal("TERM");
    let mut code = None;
    eventually("the process ends", || {
        code = process.0.try_wait().unwrap();
        code.is_some()
    });
    assert_eq!(code.unwrap().code(), Some(0));
}

/// Fills a pipe through a description of its own, so that the pipe itself stays as it is.
fn fill(pipe: i32) {
    let mut own = OpenOptions::new();
    own.write(true).custom_flags(NONBLOCKING);
    let mut own: File = own.open(format!("/proc/self/fd/{pipe}")).unwrap();
    let error = loop {
        if let Err(error) = own.write_all(b"x") {
            break error;
        }
    };
    assert_eq!(error.kind(), ErrorKind::WouldBlock);
}

#[test]
fn a_tap_at_the_file_size_limit_reports_it() {
    let config = Path::new(env!("CARGO_TARGET_TMPDIR")).join("log-tap.toml");
    let text = "schema = 1\n[engine]\nmetrics = \"127.0.0.1:0\"\ncontrol = \"\"\n[[accelerator]]\nname = \"acc0\"\nkind = \"cpu\"\n\
                [[service]]\nname = \"echo\"\nlisten = [\"udp://127.0.0.1:0\"]\naccelerator = \"acc0\"\nkernel = \"echo\"\nmax_message_bytes = 1400\nrings = \"doorbell\"\n";
    std::fs::write(&config, text).unwrap();
    let tap = config.with_extension("pcap");
    // Regions of shared memory are files for this limit as well; with pools for bundles they are larger.
    const LIMIT: u64 = 1 << 20;
    let mut command = Command::new("prlimit");
    command.args([
        &format!("--fsize={LIMIT}"),
        env!("CARGO_BIN_EXE_serval"),
        "serve",
        "--json",
        "--tap",
    ]);
    command.arg(&tap).arg(&config).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut process = Peer::start(&mut command, "cargo builds it");
    let mut output = BufReader::new(process.0.stdout.take().unwrap());
    let mut line = String::new();
    output.read_line(&mut line).unwrap();
    let ready: Json = serde_json::from_str(&line).expect("it becomes ready");
    let url = ready["services"][0]["listen"][0].as_str().unwrap();
    let address: SocketAddr = url.split_once("://").unwrap().1.parse().unwrap();
    let client = udp_client(address);
    // On a busy machine the tap leaves packets out: until the file has come to the limit, and somewhat longer.
    let mut salt = 0;
    let mut ask_some = || {
        for _ in 0..200 {
            let message = pattern(1000, salt);
            assert_eq!(ask(&client, &message), message);
            salt += 1;
        }
    };
    eventually("the file is as long as it may be", || {
        ask_some();
        std::fs::metadata(&tap).is_ok_and(|file| file.len() >= LIMIT - 65_536)
    });
    for _ in 0..5 {
        ask_some();
    }
    process.signal("TERM");
    let mut last = String::new();
    output.read_to_string(&mut last).unwrap();
    assert_eq!(process.0.wait().unwrap().code(), Some(0));
    let last: Json = serde_json::from_str(&last).expect("its last words");
    let error = last["tap"]["error"].as_str().unwrap();
    assert!(error.contains("limit of a file's size"), "{error}");
    assert!(last["tap"]["dropped"].as_u64().unwrap() > 0, "{last}");
}
