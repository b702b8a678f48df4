//! Runtimes that the engine starts itself, and that do not start, or not any more.

mod common;

use std::fs;
use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use common::*;
use engine::topology::{Accelerator, AcceleratorKind, DeviceSpec, Launch, STACK_KIB, Service};
use server::{Server, ServerError};
use wire::DropReason;

/// A path that no other test uses.
fn path(name: &str) -> PathBuf {
    std::env::temp_dir().join(format!("serval-launch-{}-{name}", std::process::id()))
}

/// One service whose runtimes the engine starts.
fn config(kernel: &str, more: &str) -> String {
    format!(
        "schema = 1\n[engine]\ncontrol = \"off\"\n[[accelerator]]\nname = \"apart\"\nkind = \"process\"\n{more}\n\
         [[service]]\nname = \"only\"\nlisten = \"udp://127.0.0.1:0\"\n\
         accelerator = \"apart\"\nkernel = \"{kernel}\"\n"
    )
}

/// A runtime that cannot start is an error of the engine's start; one that cannot any more is tried again,
/// and comes back when it can.
#[test]
fn a_crash_loop_is_reported_and_survived() {
    let flag = path("broken");
    let script = path("program.sh");
    let binary = env!("CARGO_BIN_EXE_serval");
    let text = format!("#!/bin/sh\n[ -e {} ] && exit 7\nexec {binary} \"$@\"\n", flag.display());
    fs::write(&script, text).unwrap();
    fs::set_permissions(&script, std::os::unix::fs::PermissionsExt::from_mode(0o700)).unwrap();
    let topology = || {
        let mut topology = topology(vec![Service::new("crash-loop", vec![udp()], "echo")]);
        let program = Some(script.clone());
        let launch =
            Launch::Engine { program, threads: 1, cores: Vec::new(), stack_kib: STACK_KIB };
        let kind =
            AcceleratorKind::Process { launch, heartbeat_ms: 10_000, device: DeviceSpec::host() };
        topology.accelerators = vec![Accelerator { name: "apart".into(), kind }];
        topology
    };
    fs::write(&flag, "").unwrap();
    // The wait for its exit status is short, and on a busy machine the process may end later.
    eventually("its exit code is reported", || {
        let Err(error) = Server::start(topology()) else { panic!("it cannot start") };
        assert!(matches!(error, ServerError::Runtime { .. }));
        let told = error.to_string();
        assert!(
            told.contains("its process ended with code 7") || told.contains("closed its"),
            "{told}"
        );
        told.contains("code 7")
    });

    fs::remove_file(&flag).unwrap();
    let server = start(topology());
    let client = udp_client(address(&server, 0));
    answers_again(address(&server, 0), 1);
    fs::write(&flag, "").unwrap();
    for runtime in children(std::process::id()) {
        // Other tests of this process start programs too, and each of those is a copy of it until it is replaced.
        let maps = fs::read_to_string(format!("/proc/{runtime}/maps")).unwrap_or_default();
        let command = fs::read_to_string(format!("/proc/{runtime}/cmdline")).unwrap_or_default();
        if maps.contains("serval:crash-loop:apart:") && command.contains("\0attach\0--inherited") {
            signal(runtime, "KILL");
        }
    }
    let metrics = server.metrics();
    let lives = metrics.runtimes();
    let life = &lives[0];
    eventually("it is tried again and again", || life.ended() >= 4);
    assert!(!life.is_up());
    client.send(b"nobody").unwrap();
    eventually("requests are dropped", || dropped(&server, 0, DropReason::NoAccelerator) > 0);
    fs::remove_file(&flag).unwrap();
    answers_again(address(&server, 0), 2);
    assert_accounts(&server);
    assert!(server.shutdown().is_clean());
    fs::remove_file(&script).unwrap();
}

#[test]
fn a_kernel_that_cannot_run_is_an_error_of_the_start() {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let file = folder.join("attach-no-kernel.toml");
    let library = folder.join("attach-no-kernel.so");
    fs::write(&library, "no library").unwrap();
    let config = config(library.to_str().unwrap(), "");
    fs::write(&file, config).unwrap();
    let output =
        Command::new(env!("CARGO_BIN_EXE_serval")).arg("serve").arg(&file).output().unwrap();
    let text = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{text}");
    assert!(text.contains("\"only\"") && text.contains("cannot be loaded"), "{text}");
}

/// An engine that is not ready yet is ended by this signal and reports it.
fn ends_unready(engine: &mut Peer, signal: &str) {
    engine.signal(signal);
    let said = ends(engine);
    assert!(said.contains("stopped before it was ready"), "{said}");
}

/// An engine ends because it cannot start; what it said.
fn ends(engine: &mut Peer) -> String {
    let mut code = None;
    eventually("the engine ends", || {
        code = engine.0.try_wait().unwrap();
        code.is_some()
    });
    let mut said = String::new();
    engine.0.stderr.take().unwrap().read_to_string(&mut said).unwrap();
    assert_eq!(code.unwrap().code(), Some(1), "{said}");
    said
}

/// The constructor of this kernel's library does not end.
#[test]
fn a_signal_ends_a_start_whose_runtime_takes_long() {
    let source = path("stuck.cpp");
    let text = "#include <unistd.h>\nstruct Stuck { Stuck() { for (;;) pause(); } } stuck;\n";
    fs::write(&source, text).unwrap();
    let library = build_kernel(source.to_str().unwrap());
    let file = path("stuck.toml");
    fs::write(&file, config(&library, "")).unwrap();
    for name in ["TERM", "INT"] {
        let mut command = Command::new(env!("CARGO_BIN_EXE_serval"));
        command.arg("serve").arg(&file).stderr(Stdio::piped());
        let mut engine = Peer::start(&mut command, "cargo builds it");
        let mut runtimes = Vec::new();
        eventually("a process loads it", || {
            runtimes = children(engine.0.id());
            !runtimes.is_empty()
        });
        ends_unready(&mut engine, name);
        for runtime in runtimes {
            assert!(!Path::new(&format!("/proc/{runtime}")).exists(), "the process is left behind");
        }
    }
    for made in [source, file] {
        fs::remove_file(made).unwrap();
    }
}

/// On the worker's own core, where nothing but the kernel could give up.
#[test]
fn a_signal_ends_a_start_whose_kernel_never_receives() {
    let source = path("deaf.cpp");
    let text = "#include <serval/kernel.h>\n#include <unistd.h>\n\
                SERVAL_KERNEL(deaf)(serval::Block&, serval::Mqueue&) { for (;;) pause(); }\n";
    fs::write(&source, text).unwrap();
    let library = build_kernel(source.to_str().unwrap());
    let file = path("deaf.toml");
    let service = format!(
        "schema = 1\n[[service]]\nname = \"deaf\"\nlisten = \"udp://127.0.0.1:0\"\naccelerator = \"acc0\"\nkernel = \"{}\"\n",
        library
    );
    fs::write(&file, service).unwrap();
    for name in ["TERM", "INT"] {
        let mut command = Command::new(env!("CARGO_BIN_EXE_serval"));
        command.arg("serve").arg(&file).stderr(Stdio::piped());
        let mut engine = Peer::start(&mut command, "cargo builds it");
        let tasks = format!("/proc/{}/task", engine.0.id());
        eventually("its worker starts", || {
            let of_worker = |task: fs::DirEntry| {
                let name = fs::read_to_string(task.path().join("comm"));
                name.is_ok_and(|name| name.trim() == "serval-worker-0")
            };
            fs::read_dir(&tasks).is_ok_and(|mut tasks| tasks.any(|task| task.is_ok_and(of_worker)))
        });
        ends_unready(&mut engine, name);
    }
    for made in [source, file] {
        fs::remove_file(made).unwrap();
    }
}

/// Otherwise the other worker would be waited for without a limit, and signals would not be handled.
#[test]
fn a_start_that_fails_on_one_worker_does_not_wait_for_a_kernel_on_another() {
    let source = path("half.cpp");
    let text = "#include <serval/kernel.h>\n#include <unistd.h>\n\
                SERVAL_KERNEL(half)(serval::Block& block, serval::Mqueue&) {\n\
                  while (block.index() != 0) pause();\n}\n";
    fs::write(&source, text).unwrap();
    let library = build_kernel(source.to_str().unwrap());
    let file = path("half.toml");
    let service = format!(
        "schema = 1\n[engine]\nworkers = 2\n[[service]]\nname = \"half\"\nlisten = \"udp://127.0.0.1:0\"\n\
         mqueues = 2\naccelerator = \"acc0\"\nkernel = \"{library}\"\n"
    );
    fs::write(&file, service).unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_serval"));
    command.arg("serve").arg(&file).stderr(Stdio::piped());
    let mut engine = Peer::start(&mut command, "cargo builds it");
    let said = ends(&mut engine);
    assert!(said.contains("service \"half\"") && !said.contains("before it was ready"), "{said}");
    for made in [source, file] {
        fs::remove_file(made).unwrap();
    }
}
