//! Accelerators of kind `cuda` from end to end, on a machine without a GPU: the driver is one that runs blocks as
//! threads (`crates/accel/tests/kernels/fake_driver.cpp`), found the way the real one is.

mod common;

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use common::change::Askers;
use common::fake_gpu::driver_folder;
use common::talk::Talk;
use common::*;
use serde_json::Value as Json;
use wire::DropReason;

fn config(accelerator: &str, kernel: &str) -> String {
    format!(
        "[[accelerator]]\nname = \"gpu0\"\nkind = \"cuda\"\n{accelerator}\n\
         [[service]]\nname = \"a\"\nlisten = \"udp://127.0.0.1:0\"\naccelerator = \"gpu0\"\nmqueues = 6\n\
         max_message_bytes = 1000\nrequest_timeout_ms = 60000\nkernel = \"{kernel}\"\n"
    )
}

fn maps(process: u32) -> String {
    try_maps(process).expect("it runs")
}

fn try_maps(process: u32) -> Option<String> {
    fs::read_to_string(format!("/proc/{process}/maps")).ok()
}

/// Asks until the service answers.
fn await_answer(served: &Served) {
    let socket = udp_client(served.services[0][0]);
    socket.set_read_timeout(Some(Duration::from_millis(200))).unwrap();
    eventually("the service answers", || {
        socket.send(b"are you there?").unwrap();
        let mut reply = [0; 64];
        matches!(socket.recv(&mut reply), Ok(14))
    });
}

fn exchange_many(served: &Served) {
    let socket = udp_client(served.services[0][0]);
    for n in 0..200 {
        let message = pattern(1 + n * 5 % 1000, n);
        assert_eq!(ask(&socket, &message), message, "message {n}");
    }
}

#[test]
fn a_runtime_that_the_engine_starts_serves_on_the_gpu_and_the_engine_has_no_driver() {
    let (folder, kernel) = driver_folder();
    let environment = [("LD_LIBRARY_PATH", folder.as_path())];
    let served = Served::start_with("cuda-launched", "", &config("gpu = 0", &kernel), &environment);
    exchange_many(&served);
    let engine = maps(served.process.0.id());
    assert!(engine.contains("serval:a:"), "the region is mapped");
    assert!(!engine.contains("libcuda"), "the engine loaded the driver");
    assert_eq!(served.drain(), 0);
}

/// Ranks with data in the memory of a GPU, each a process with the driver of its own.
#[test]
fn ranks_sum_the_memory_of_a_gpu() {
    let (folder, _) = driver_folder();
    let run = |arguments: &[&str], folder: &Path| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_serval"));
        command.args(["allreduce", "--json", "--memory", "cuda", "--rounds", "2"]).args(arguments);
        let output = command.env("LD_LIBRARY_PATH", folder).output().unwrap();
        let report: Json = serde_json::from_slice(&output.stdout).unwrap_or_default();
        (output.status.code(), report, String::from_utf8(output.stderr).unwrap())
    };
    for arguments in [
        &["--bytes", "2500KiB"][..],
        &["--bytes", "1MiB", "--ranks", "3", "--type", "int32", "--transport", "shm"],
        &["--bytes", "64", "--gpu", "0"],
        &["--bytes", "0"],
    ] {
        let (code, report, said) = run(arguments, &folder);
        assert_eq!(code, Some(0), "{report} {said}");
        assert_eq!((&report["wrong"], &report["memory"]), (&Json::from(0), &Json::from("cuda")));
        assert_eq!(report["identical"], true);
    }
    let (code, _, said) = run(&["--gpu", "7"], &folder);
    assert!(code == Some(1) && said.contains("no GPU 7"), "{said}");
    let (code, _, said) = run(&[], Path::new("/nonexistent"));
    assert!(code == Some(1) && said.contains("the GPU driver"), "{said}");
}

#[test]
fn one_service_runs_on_a_gpu_and_on_host_cores_at_once() {
    let (folder, kernel) = driver_folder();
    let environment = [("LD_LIBRARY_PATH", folder.as_path())];
    let config = format!(
        "[[accelerator]]\nname = \"gpu0\"\nkind = \"cuda\"\n[[accelerator]]\nname = \"host\"\n\
         [[service]]\nname = \"a\"\nlisten = \"udp://127.0.0.1:0\"\naccelerator = [\"gpu0\", \"host\"]\n\
         mqueues = [6, 2]\nmax_message_bytes = 1000\nrequest_timeout_ms = 60000\nkernel = [\"{kernel}\", \"echo\"]\n"
    );
    let served = Served::start_with("cuda-and-cpu", "", &config, &environment);
    exchange_many(&served);
    let runtime = children(served.process.0.id())[0];
    signal(runtime, "KILL");
    let gpu = |what: &str| {
        let labels = "{service=\"a\",accelerator=\"gpu0\"}";
        served.metric(&format!("serval_accelerator_{what}{labels}"))
    };
    eventually("the engine has noticed", || gpu("restarts_total") == 1);
    exchange_many(&served);
    eventually("the GPU serves again", || (gpu("up"), gpu("generation")) == (1, 2));
    exchange_many(&served);
    assert_eq!(served.drain(), 0);
}

/// A second service on the GPU of [`config`].
fn second(kernel: &str, more: &str) -> String {
    format!(
        "[[service]]\nname = \"b\"\nlisten = \"udp://127.0.0.1:0\"\naccelerator = \"gpu0\"\n\
         request_timeout_ms = 60000\nkernel = \"{kernel}\"\n{more}\n"
    )
}

#[test]
fn services_on_one_gpu_share_a_process_and_its_generations() {
    let (folder, kernel) = driver_folder();
    let environment = [("LD_LIBRARY_PATH", folder.as_path())];
    let both = config("", &kernel) + &second(&kernel, "mqueues = 2");
    let served = Served::start_with("cuda-together", "", &both, &environment);
    let generations = || {
        ["a", "b"].map(|service| {
            let labels = format!("{{service=\"{service}\",accelerator=\"gpu0\"}}");
            let metric = |what: &str| served.metric(&format!("serval_accelerator_{what}{labels}"));
            metric("up") * metric("generation")
        })
    };
    for generation in 1..=3 {
        eventually("both serve", || generations() == [generation; 2]);
        exchange_many(&served);
        assert_eq!(ask(&udp_client(served.services[1][0]), b"b"), b"b");
        let runtimes = children(served.process.0.id());
        let [runtime] = runtimes[..] else { panic!("{runtimes:?}") };
        let mapped = maps(runtime);
        assert!(mapped.contains("serval:a:gpu0:") && mapped.contains("serval:b:gpu0:"), "{mapped}");
        if generation < 3 {
            signal(runtime, "KILL");
        }
    }
    assert!(!served.log().contains("share a GPU"), "{}", served.log());
    assert_eq!(served.drain(), 0);
}

#[test]
fn adding_or_removing_a_service_restarts_the_process_of_its_gpu() {
    let (folder, kernel) = driver_folder();
    let environment = [("LD_LIBRARY_PATH", folder.as_path())];
    let one = config("", &kernel);
    let both = one.clone() + &second(&kernel, "mqueues = 2");
    let served = Served::start_with("cuda-reload", "", &both, &environment);
    let file = Path::new(env!("CARGO_TARGET_TMPDIR")).join("cuda-reload.toml");
    let text = fs::read_to_string(&file).unwrap();
    let regions = || {
        let runtimes = children(served.process.0.id());
        let mapped: Vec<String> = runtimes.into_iter().filter_map(try_maps).collect();
        mapped.iter().map(|m| ["a", "b"].map(|s| m.contains(&format!("serval:{s}:")))).collect()
    };
    for round in 0..2 {
        fs::write(&file, text.replace(&both, &one)).unwrap();
        served.process.signal("HUP");
        eventually("the one that stays is alone", || {
            let regions: Vec<[bool; 2]> = regions();
            regions == [[true, false]]
        });
        await_answer(&served);
        exchange_many(&served);
        fs::write(&file, &text).unwrap();
        served.process.signal("HUP");
        let client = udp_client(served.services[0][0]);
        eventually("both are together", || {
            client.send(b"meanwhile").unwrap();
            served.metric("serval_reloads_total{result=\"changed\"}") == 2 * (round + 1)
        });
        // The reload has said that both serve.
        let regions: Vec<[bool; 2]> = regions();
        assert_eq!(regions, [[true, true]]);
        for service in ["a", "b"] {
            let labels = format!("{{service=\"{service}\",accelerator=\"gpu0\"}}");
            assert_eq!(served.metric(&format!("serval_accelerator_up{labels}")), 1, "{service}");
        }
        assert_eq!(served.dropped("a", DropReason::NoAccelerator), 0);
        exchange_many(&served);
        assert!(!served.log().contains("share a GPU"), "round {round}: {}", served.log());
    }
    assert_eq!(served.drain(), 0);
}

/// A service of 32 bytes a message with a port of every kind, on the GPU of [`config`].
fn everywhere(kernel: &str, door: &Path) -> String {
    format!(
        "[[accelerator]]\nname = \"gpu0\"\nkind = \"cuda\"\nheartbeat_ms = 20000\n\
         [[service]]\nname = \"a\"\nlisten = [\"udp://127.0.0.1:0\", \"tcp://127.0.0.1:0\", \"shm://{}\"]\n\
         accelerator = \"gpu0\"\nmqueues = 4\nframing = \"fixed:32\"\nrequest_timeout_ms = 60000\nkernel = \"{kernel}\"\n",
        door.display()
    )
}

#[test]
fn services_that_share_a_process_lose_nothing_when_one_is_added_changed_or_removed() {
    let (folder, kernel) = driver_folder();
    let environment = [("LD_LIBRARY_PATH", folder.as_path())];
    let door = std::env::temp_dir().join(format!("serval-cuda-hold-{}", std::process::id()));
    let alone = everywhere(&kernel, &door);
    for workers in 1..=2 {
        let (name, engine) = (format!("cuda-hold-{workers}"), format!("workers = {workers}"));
        let served = Served::start_with(&name, &engine, &alone, &environment);
        let file = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("{name}.toml"));
        let text = fs::read_to_string(&file).unwrap();
        let labels = "{service=\"a\",accelerator=\"gpu0\"}";
        let lives = || served.metric(&format!("serval_accelerator_generation{labels}"));
        let askers: Vec<_> =
            (0..3).map(|_| Askers::start(served.services[0][0], served.services[0][1])).collect();
        let (talk, stop) = (Talk::default(), AtomicBool::new(false));
        thread::scope(|scope| {
            let talking = scope.spawn(|| talk.run(&door, &stop));
            let _stop = Stop(&stop);
            let beside = ["mqueues = 2", "mqueues = 1", ""];
            for (round, more) in beside.into_iter().enumerate() {
                let before = lives();
                let with = if more.is_empty() { String::new() } else { second(&kernel, more) };
                fs::write(&file, format!("{text}\n{with}")).unwrap();
                served.process.signal("HUP");
                eventually("the reload is done", || {
                    served.metric("serval_reloads_total{result=\"changed\"}") == round as u64 + 1
                });
                assert!(lives() > before, "the process of both is a new one");
                askers.iter().for_each(Askers::go_on);
                talk.keeps_getting_answers();
                assert!(page(served.metrics).contains("serval_service_paused{service=\"a\"} 0"));
            }
            stop.store(true, Ordering::Relaxed);
            assert_eq!(talking.join().unwrap(), None);
        });
        let answered = talk.count() + askers.into_iter().map(Askers::finish).sum::<u64>();
        let counted = |what: &str| served.metric(&format!("serval_{what}_total{{service=\"a\"}}"));
        // A worker counts what it handed over when the other one may have answered it.
        let both = || (counted("requests_received"), counted("replies"));
        eventually("each is counted once", || both() >= (answered, answered));
        assert_eq!(both(), (answered, answered), "each once");
        assert_eq!(served.dropped("a", DropReason::Reconfiguring), 0);
        assert!(served.log().matches("paused: its runtime restarts").count() >= 3);
        assert_eq!(served.drain(), 0);
    }
}

#[test]
fn services_that_leave_a_gpu_answer_first() {
    let (folder, kernel) = driver_folder();
    let environment = [("LD_LIBRARY_PATH", folder.as_path())];
    let first = config("heartbeat_ms = 60000", &kernel);
    let both = first.clone() + &second(&kernel, "mqueues = 2");
    let engine = "drain_ms = 60000";
    let served = Served::start_with("cuda-leave", engine, &both, &environment);
    let file = Path::new(env!("CARGO_TARGET_TMPDIR")).join("cuda-leave.toml");
    let text = fs::read_to_string(&file).unwrap();
    let [runtime] = children(served.process.0.id())[..] else { panic!("one runtime") };
    let client = udp_client(served.services[1][0]);
    assert_eq!(ask(&client, b"before"), b"before");
    signal(runtime, "STOP");
    client.send(b"in flight").unwrap();
    let received = "serval_requests_received_total{service=\"b\"}";
    eventually("it has been accepted", || served.metric(received) == 2);
    // "a" and "b" go, "c" comes on the same GPU.
    fs::write(&file, text.replace(&both, &first.replace("name = \"a\"", "name = \"c\""))).unwrap();
    served.process.signal("HUP");
    eventually("the one that comes serves", || {
        served.log().matches("a runtime serves").count() == 3
    });
    // "a" has nothing left and is let go of; "b" has.
    std::thread::sleep(Duration::from_millis(300));
    signal(runtime, "CONT");
    let mut reply = [0; 64];
    assert_eq!(client.recv(&mut reply).expect("it is answered"), b"in flight".len());
    eventually("the reload is done", || {
        served.metric("serval_reloads_total{result=\"changed\"}") == 1
    });
    let [left] = children(served.process.0.id())[..] else { panic!("one runtime") };
    assert!(left != runtime && maps(left).contains("serval:c:"));
    assert_eq!(served.drain(), 0);
}

#[test]
fn a_failed_reload_does_not_affect_the_process_of_a_gpu() {
    let (folder, kernel) = driver_folder();
    let environment = [("LD_LIBRARY_PATH", folder.as_path())];
    let one = config("", &kernel);
    let served = Served::start_with("cuda-undone", "", &one, &environment);
    let file = Path::new(env!("CARGO_TARGET_TMPDIR")).join("cuda-undone.toml");
    let text = fs::read_to_string(&file).unwrap();
    let before = children(served.process.0.id());
    let late = build_kernel("crates/server/tests/kernels/ends_late.cpp");
    let more = format!(
        "{}\n[[accelerator]]\nname = \"other\"\nkind = \"process\"\n[[service]]\nname = \"z\"\n\
         listen = \"udp://127.0.0.1:0\"\naccelerator = \"other\"\nkernel = \"{late}\"\n",
        second(&kernel, "mqueues = 2")
    );
    fs::write(&file, text + &more).unwrap();
    served.process.signal("HUP");
    let client = udp_client(served.services[0][0]);
    eventually("the reload has failed", || {
        assert_eq!(ask(&client, b"meanwhile"), b"meanwhile");
        served.metric("serval_reloads_total{result=\"failed\"}") == 1
    });
    assert_eq!(served.log().matches("a runtime serves").count(), 2, "{}", served.log());
    exchange_many(&served);
    assert_eq!(children(served.process.0.id()), before);
    assert_eq!(served.drain(), 0);
}

#[test]
fn every_service_that_does_not_restart_after_a_reload_is_reported() {
    let (shared, kernel) = driver_folder();
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("fake-gpu-that-goes");
    fs::create_dir_all(&folder).unwrap();
    let driver = folder.join("libcuda.so.1");
    fs::copy(shared.join("libcuda.so.1"), &driver).unwrap();
    let environment = [("LD_LIBRARY_PATH", folder.as_path())];
    let service = |name: &str| {
        second(&kernel, "mqueues = 2").replace("name = \"b\"", &format!("name = \"{name}\""))
    };
    let (stay, goes) = (config("", &kernel) + &service("b") + &service("c"), service("d"));
    let served = Served::start_with("cuda-restart", "", &(stay.clone() + &goes), &environment);
    let file = Path::new(env!("CARGO_TARGET_TMPDIR")).join("cuda-restart.toml");
    let text = fs::read_to_string(&file).unwrap();
    exchange_many(&served);
    // The three that stay restart without the fourth, and find no driver.
    let away = folder.join("away");
    fs::rename(&driver, &away).unwrap();
    fs::write(&file, text.replace(&goes, "")).unwrap();
    served.process.signal("HUP");
    let client = udp_client(served.services[0][0]);
    eventually("the reload is done", || {
        client.send(b"meanwhile").unwrap();
        served.metric("serval_reloads_total{result=\"changed\"}") == 1
    });
    let log = served.log();
    for name in ["a", "b", "c"] {
        let said = format!("service {name}: unchanged; no runtime of it serves yet: ");
        let lines = log.lines().filter(|line| line.contains(&said));
        let lines: Vec<_> = lines.filter(|line| line.contains("ERROR")).collect();
        assert_eq!(lines.len(), 1, "{name}: {log}");
        assert!(!lines[0].contains("still starting"), "not its own reason: {log}");
    }
    assert!(!log.contains("service d: removed; "), "{log}");
    // They are tried again.
    fs::rename(&away, &driver).unwrap();
    await_answer(&served);
    exchange_many(&served);
    assert_eq!(served.drain(), 0);
}

#[test]
fn a_service_that_changes_on_a_gpu_waits_until_the_gpu_is_free() {
    let (folder, kernel) = driver_folder();
    let environment = [("LD_LIBRARY_PATH", folder.as_path())];
    let inside = "[[accelerator]]\nname = \"inside\"\n[[service]]\nname = \"other\"\nlisten = \"udp://127.0.0.1:0\"\n\
                  accelerator = \"inside\"\nkernel = \"echo\"\n";
    let before = config("", &kernel) + inside;
    let served = Served::start_with("cuda-change", "", &before, &environment);
    let file = Path::new(env!("CARGO_TARGET_TMPDIR")).join("cuda-change.toml");
    let text = fs::read_to_string(&file).unwrap();
    let other = udp_client(served.services[1][0]);
    exchange_many(&served);
    let [first] = children(served.process.0.id())[..] else { panic!("one runtime") };
    fs::write(&file, text.replace("mqueues = 6", "mqueues = 3")).unwrap();
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        let _stop = Stop(&stop);
        scope.spawn(|| {
            // What it asks meanwhile waits, and is answered by the old version or by the new one.
            let client = udp_client(served.services[0][0]);
            for n in 0.. {
                let message = pattern(1 + n % 1000, n);
                assert_eq!(ask(&client, &message), message, "message {n}");
                if stop.load(Ordering::Relaxed) {
                    break;
                }
            }
        });
        served.process.signal("HUP");
        eventually("the reload is done", || {
            // The other service answers all the time.
            assert_eq!(ask(&other, b"other"), b"other");
            served.metric("serval_reloads_total{result=\"changed\"}") == 1
        });
    });
    assert_eq!(served.dropped("a", DropReason::Reconfiguring), 0);
    assert_eq!(served.dropped("a", DropReason::NoAccelerator), 0);
    exchange_many(&served);
    let [second] = children(served.process.0.id())[..] else { panic!("one runtime") };
    assert_ne!(first, second);
    assert_eq!(served.drain(), 0);
}

#[test]
fn tenants_never_share_a_process_and_a_shared_gpu_is_reported() {
    let (folder, kernel) = driver_folder();
    let environment = [("LD_LIBRARY_PATH", folder.as_path())];
    let both = config("", &kernel) + &second(&kernel, "tenant = \"other\"");
    let served = Served::start_with("cuda-tenants", "", &both, &environment);
    exchange_many(&served);
    assert_eq!(ask(&udp_client(served.services[1][0]), b"b"), b"b");
    let runtimes = children(served.process.0.id());
    assert_eq!(runtimes.len(), 2);
    for runtime in runtimes {
        let mapped = maps(runtime);
        assert!(mapped.contains("serval:a:") != mapped.contains("serval:b:"), "{mapped}");
    }
    assert!(served.log().contains("share a GPU"), "{}", served.log());
    assert_eq!(served.drain(), 0);
}

#[test]
fn services_that_do_not_all_fit_on_a_gpu_are_refused_together() {
    let (folder, kernel) = driver_folder();
    // Each alone would be resident.
    let many = config("", &kernel).replace("mqueues = 6", "mqueues = 2");
    let file = Path::new(env!("CARGO_TARGET_TMPDIR")).join("cuda-crowded.toml");
    let text = format!("schema = 1\n{many}{}", second(&kernel, "mqueues = 2"));
    fs::write(&file, text).unwrap();
    let mut serve = Command::new(env!("CARGO_BIN_EXE_serval"));
    serve.arg("serve").arg(&file).env("LD_LIBRARY_PATH", &folder).env("FAKE_GPU", "small");
    let served = serve.output().unwrap();
    let said = String::from_utf8_lossy(&served.stderr).into_owned();
    assert_eq!(served.status.code(), Some(1), "{said}");
    assert!(said.contains("do not all fit"), "{said}");
    assert!(said.contains("2 blocks of `echo`"), "{said}");
}

#[test]
fn services_that_do_not_fit_together_are_reported_and_tried_again_when_one_changes() {
    let (folder, kernel) = driver_folder();
    let environment = [("LD_LIBRARY_PATH", folder.as_path()), ("FAKE_GPU", Path::new("small"))];
    let one = config("", &kernel).replace("mqueues = 6", "mqueues = 1");
    let served = Served::start_with("cuda-apart", "", &one, &environment);
    let file = Path::new(env!("CARGO_TARGET_TMPDIR")).join("cuda-apart.toml");
    let text = fs::read_to_string(&file).unwrap();
    let regions = || {
        let runtimes = children(served.process.0.id());
        let mapped: Vec<String> = runtimes.into_iter().filter_map(try_maps).collect();
        let of = |m: &String| ["a", "b"].map(|s| m.contains(&format!("serval:{s}:")));
        let mut regions: Vec<_> = mapped.iter().map(of).collect();
        regions.sort();
        regions
    };
    let up = || {
        ["a", "b"].map(|service| {
            let labels = format!("{{service=\"{service}\",accelerator=\"gpu0\"}}");
            served.metric(&format!("serval_accelerator_up{labels}"))
        })
    };
    // Each fits, with three blocks on two multiprocessors both do not.
    fs::write(&file, text.clone() + &second(&kernel, "mqueues = 2")).unwrap();
    served.process.signal("HUP");
    eventually("they were refused together", || served.log().contains("do not all fit"));
    eventually("each serves by itself", || {
        regions() == [[false, true], [true, false]] && up() == [1; 2]
    });
    assert!(served.log().contains("did not start together, share a GPU"), "{}", served.log());
    exchange_many(&served);
    fs::write(&file, text + &second(&kernel, "mqueues = 1")).unwrap();
    served.process.signal("HUP");
    eventually("both serve together", || regions() == [[true, true]] && up() == [1; 2]);
    exchange_many(&served);
    assert_eq!(served.drain(), 0);
}

#[test]
fn faults_of_a_kernel_and_of_the_gpu_have_different_reasons() {
    let (folder, kernel) = driver_folder();
    for (fault, reason, text) in [
        ("faulty", "contract", "CUDA_ERROR_ILLEGAL_ADDRESS"),
        ("ecc", "device_failed", "CUDA_ERROR_ECC_UNCORRECTABLE"),
    ] {
        let file = std::env::temp_dir().join(format!("serval-{reason}-{}", std::process::id()));
        let behaviour = format!("{fault} when {}", file.display());
        let environment =
            [("LD_LIBRARY_PATH", folder.as_path()), ("FAKE_GPU", Path::new(&behaviour))];
        let name = format!("cuda-{reason}");
        let served = Served::start_with(&name, "", &config("gpu = 0", &kernel), &environment);
        exchange_many(&served);
        assert!(!page(served.metrics).contains("serval_accelerator_last_end{"));
        fs::write(&file, "").unwrap();
        let last_end = format!("reason=\"{reason}\"");
        eventually("the fault is reported", || page(served.metrics).contains(&last_end));
        // The metric may change before the line is written.
        eventually("the log names the fault", || served.log().contains(text));
        await_answer(&served);
        exchange_many(&served);
        assert_eq!(served.drain(), 0);
    }
}

#[test]
fn a_runtime_warns_of_an_mps_daemon() {
    let (folder, kernel) = driver_folder();
    for there in [false, true] {
        let name = format!("cuda-mps-{there}");
        let pipes = Path::new(env!("CARGO_TARGET_TMPDIR")).join(&name);
        fs::create_dir_all(&pipes).unwrap();
        if there {
            fs::write(pipes.join("control"), "").unwrap();
        }
        let environment =
            [("LD_LIBRARY_PATH", folder.as_path()), ("CUDA_MPS_PIPE_DIRECTORY", pipes.as_path())];
        let served = Served::start_with(&name, "", &config("gpu = 0", &kernel), &environment);
        exchange_many(&served);
        assert_eq!(served.log().contains("an MPS daemon is there"), there, "{}", served.log());
        assert_eq!(served.drain(), 0);
    }
}

#[test]
fn a_runtime_that_attaches_is_killed_and_another_one_takes_over() {
    let (folder, kernel) = driver_folder();
    let socket = Path::new(env!("CARGO_TARGET_TMPDIR")).join("cuda-attach");
    let accelerator = format!("launch = \"external\"\nattach = \"{}\"", socket.display());
    let served = Served::start("cuda-external", "", &config(&accelerator, &kernel));
    let attach = || {
        let mut command = Command::new(env!("CARGO_BIN_EXE_serval"));
        command.arg("attach").arg(&socket).args(["--gpu", "0"]).stderr(Stdio::null());
        Peer::start(command.env("LD_LIBRARY_PATH", &folder), "cargo builds it")
    };
    let mut first = attach();
    await_answer(&served);
    assert!(maps(first.0.id()).contains("libcuda"), "the runtime has the driver");
    exchange_many(&served);
    first.stop();
    let second = attach();
    await_answer(&served);
    exchange_many(&served);
    assert!(!maps(served.process.0.id()).contains("libcuda"));
    assert_eq!(served.drain(), 0);
    drop(second);
}

#[test]
fn a_machine_without_a_gpu_is_reported_in_one_sentence() {
    let serval = || Command::new(env!("CARGO_BIN_EXE_serval"));
    let doctor = serval().args(["doctor", "--gpus"]).output().unwrap();
    let said = String::from_utf8_lossy(&doctor.stderr).into_owned();
    if doctor.status.success() {
        println!("SKIPPED: this machine has a GPU driver");
        return;
    }
    assert!(said.contains("libcuda.so.1 cannot be loaded"), "{said}");
    assert!(said.contains("install the NVIDIA driver"), "{said}");
    // What doctor shows besides needs none of it.
    assert!(serval().args(["doctor", "--json"]).output().unwrap().status.success());

    let (_, kernel) = driver_folder();
    let file = Path::new(env!("CARGO_TARGET_TMPDIR")).join("cuda-none.toml");
    fs::write(&file, format!("schema = 1\n{}", config("", &kernel))).unwrap();
    let served = serval().arg("serve").arg(&file).output().unwrap();
    let said = String::from_utf8_lossy(&served.stderr).into_owned();
    assert_eq!(served.status.code(), Some(1), "{said}");
    assert!(said.contains("libcuda.so.1 cannot be loaded"), "{said}");
}

#[test]
fn doctor_lists_the_gpus_that_the_driver_shows() {
    let (folder, _) = driver_folder();
    let mut doctor = Command::new(env!("CARGO_BIN_EXE_serval"));
    doctor.args(["doctor", "--gpus"]).env("LD_LIBRARY_PATH", &folder);
    let said = doctor.output().unwrap();
    let text = String::from_utf8_lossy(&said.stdout).into_owned();
    assert!(said.status.success(), "{text}");
    assert!(text.contains("GPU 0: fake GPU, 8 multiprocessors, 1 GiB, sm_90"), "{text}");
}

/// What doctor says about a capability where a driver behaves like this; `nvidia-smi` says `persistence`.
fn diagnosed(behaviour: &str, persistence: &str, name: &str) -> (String, String, String) {
    let (driver, _) = driver_folder();
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("doctor-{behaviour}-{name}"));
    fs::create_dir_all(&folder).unwrap();
    let smi = folder.join("nvidia-smi");
    fs::write(&smi, format!("#!/bin/sh\necho '{persistence}'\n")).unwrap();
    fs::set_permissions(&smi, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    let control = folder.join("control");
    let _ = fs::remove_file(&control);
    if behaviour == "shared" {
        fs::write(&control, "").unwrap();
    }
    let path = format!("{}:{}", folder.display(), std::env::var("PATH").unwrap_or_default());
    let mut doctor = Command::new(env!("CARGO_BIN_EXE_serval"));
    doctor.args(["doctor", "--json"]).env("LD_LIBRARY_PATH", driver).env("FAKE_GPU", behaviour);
    doctor.env("PATH", path).env("CUDA_MPS_PIPE_DIRECTORY", &folder);
    let said = doctor.output().unwrap();
    let report: Json = serde_json::from_slice(&said.stdout).unwrap();
    let all = report["capabilities"].as_array().unwrap();
    let found = all.iter().find(|capability| capability["name"] == name);
    let found = found.unwrap_or_else(|| panic!("no {name} in {report}"));
    let text = |key: &str| found[key].as_str().unwrap().to_owned();
    (text("state"), text("why"), text("remedy"))
}

#[test]
fn doctor_reports_problems_of_a_gpu_with_their_remedies() {
    let unfit = [
        ("prohibited", "compute mode PROHIBITED: `nvidia-smi -i 0000:65:00.0 -c DEFAULT`"),
        ("display", "drives a display"),
    ];
    for (behaviour, part) in unfit {
        let (state, why, remedy) = diagnosed(behaviour, "Enabled", "cuda");
        assert!(
            state == "off" && why.contains(part) && !remedy.is_empty(),
            "{state}: {why}: {remedy}"
        );
    }
    // One usable GPU is enough, and the problem of the other one is reported.
    let one = diagnosed("any", "Enabled", "cuda");
    let (state, why, remedy) = diagnosed("beside", "Enabled", "cuda");
    assert_eq!((&state, &remedy), (&one.0, &one.2), "{why}");
    let (first, second) = (why.find("GPU 0"), why.find("GPU 1").expect("it is reported"));
    assert!(first.is_some_and(|at| at < second), "{why}");
    assert!(why[second..].contains("drives a display"), "{why}");
    let (state, why, remedy) = diagnosed("exclusive", "Enabled", "cuda");
    assert!(state == "degraded" && why.contains("one accelerator and tenant"), "{state}: {why}");
    assert!(remedy.contains("`nvidia-smi -i 0000:65:00.0 -c DEFAULT`"), "{remedy}");
    let (state, why, _) = diagnosed("aged", "Enabled", "cuda");
    assert!(state == "degraded" && why.contains("sm_70"), "{state}: {why}");

    assert_eq!(diagnosed("any", "Enabled", "gpu-persistence").0, "available");
    let (state, _, remedy) = diagnosed("any", "Enabled\nDisabled", "gpu-persistence");
    assert!(state == "degraded" && remedy.contains("`nvidia-smi -pm 1`"), "{state}: {remedy}");
    let (state, why, _) = diagnosed("shared", "Enabled", "gpu-mps");
    assert!(
        state == "available" && why.contains("a kernel's fault ends them all"),
        "{state}: {why}"
    );
    let (state, _, remedy) = diagnosed("any", "Enabled", "gpu-mps");
    assert!(state == "off" && remedy.contains("nvidia-cuda-mps-control"), "{state}: {remedy}");
}
