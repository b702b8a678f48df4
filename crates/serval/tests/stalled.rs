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
        let library = build_kernel("crates/serval/tests/kernels/hold.cpp");
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
    let log = held.served.log();
    assert_eq!(log.matches(sentence).count(), 1, "{log}");
    assert!(log.contains("worker 0 goes on"), "{log}");
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
