//! Accelerators of kind `process`: runtimes in separate processes that are killed, suspended, refused, and hostile,
//! with a real engine.

mod common;

use std::fs;
use std::io::{Read as _, Write as _};
use std::net::TcpListener;
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::atomic::AtomicBool;
use std::thread;
use std::time::Duration;

use common::offers::{Offers, arrival, at_a_false_engine};
use common::runtimes::*;
use common::*;
use mqueue::abi::{ABI_VERSION, kind, reason, ring_kind, stop};
use mqueue::{Head, MappedMemory, Memory as _, Region, Words};
use runtime::{self, AttachRequest, Device, End, Failure, HostDevice, Job, RuntimeError};
use sys::local::LocalListener;
use wire::DropReason;
use wire::attach::{Bye, FromEngine, FromRuntime, Hello, MESSAGE_BYTES_MAX, Ready, VERSION};

#[test]
fn kernels_answer_right_and_their_process_sees_its_own_region_only() {
    let image = "max_message_bytes = 784\n";
    let config = process("apart", "threads = 2")
        + "[[accelerator]]\nname = \"inside\"\n"
        + &service("digits", "apart", "lenet", image)
        + &service("echo", "apart", "echo", "")
        + &service("check", "inside", "lenet", image);
    let served = Served::start("attach-answers", "workers = 2", &config);
    let client = |service: usize| udp_client(served.services[service][0]);
    let (digits, echo, check) = (client(0), client(1), client(2));
    for salt in 0..40 {
        let picture = pattern(784, salt * 977);
        assert_eq!(ask(&digits, &picture), ask(&check, &picture), "picture {salt}");
        let message = pattern(1 + salt * 20, salt);
        assert_eq!(ask(&echo, &message), message);
    }
    let mut stream = tcp_client(served.services[1][1]);
    for salt in 0..40 {
        let message = framed(&pattern(1 + salt, salt));
        assert_eq!(exchange(&mut stream, &message, message.len()), message);
    }
    let runtimes = children(served.process.0.id());
    assert_eq!(runtimes.len(), 2, "one for each service");
    let mut seen = Vec::new();
    for runtime in runtimes {
        let maps = fs::read_to_string(format!("/proc/{runtime}/maps")).unwrap();
        let mut regions: Vec<&str> = maps
            .lines()
            .filter_map(|line| line.split_once("memfd:").map(|(_, name)| name))
            // Other mappings belong to the process itself.
            .filter(|name| name.starts_with("serval:"))
            .collect();
        regions.dedup();
        assert_eq!(regions.len(), 1, "its own region and no other: {regions:?}");
        seen.push(regions[0].to_owned());
    }
    seen.sort();
    let expected = ["serval:digits:apart:1 (deleted)", "serval:echo:apart:1 (deleted)"];
    assert_eq!(seen, expected);
    assert_eq!(served.drain(), 0);
}

/// Every generation is probed once: a few bytes are copied to the accelerator's memory and back.
#[test]
fn the_copy_agent_of_every_generation_answers() {
    let config = process("apart", "") + &service("echo", "apart", "echo", "");
    let served = Served::start("attach-copies", "", &config);
    let answers = || life(&served, "copy_agent", "echo", "apart") == 1;
    eventually("the first life's copy agent answers", answers);
    signal(runtime_of(&served), "KILL");
    eventually("the next life begins", || life(&served, "generation", "echo", "apart") == 2);
    eventually("its copy agent answers", answers);
    // Every probe copies 256 bytes there and back; of the first generation nothing is in flight.
    let bytes = |what: &str| life(&served, &format!("copy_{what}"), "echo", "apart");
    let taken = bytes("taken_bytes_total");
    assert_eq!((taken, bytes("outstanding_bytes")), (1024, 0));
    assert_eq!(taken, bytes("delivered_bytes_total") + bytes("dropped_bytes_total"));
    assert_eq!(ask(&udp_client(served.services[0][0]), b"beside"), b"beside");
    assert_eq!(served.drain(), 0);
}

#[test]
fn a_runtime_killed_under_load_loses_its_requests_in_flight() {
    let config = process("apart", "") + &service("slow", "apart", "delay", SLOW);
    let served = Served::start("attach-killed", "", &config);
    under_load(&served, "slow", || {
        for round in 1..=3 {
            let runtime = runtime_of(&served);
            signal(runtime, "KILL");
            eventually("the next life begins", || {
                life(&served, "up", "slow", "apart") == 1
                    && life(&served, "generation", "slow", "apart") == round + 1
            });
        }
    });
    assert_eq!(life(&served, "restarts_total", "slow", "apart"), 3);
    // provokes: accelerator_lost
    assert!(served.dropped("slow", DropReason::AcceleratorLost) > 0);
    // provokes: no_accelerator
    assert!(served.dropped("slow", DropReason::NoAccelerator) > 0);
    assert_eq!(served.dropped("slow", DropReason::RequestTimeout), 0);
    assert_eq!(served.drain(), 0);
}

#[test]
fn a_suspended_runtime_is_replaced_under_load() {
    let config = process("apart", "heartbeat_ms = 400") + &service("slow", "apart", "delay", SLOW);
    let served = Served::start("attach-stalled", "", &config);
    under_load(&served, "slow", || {
        // The time limit is short, so a generation may have been lost before.
        let runtime = runtime_of(&served);
        let before = life(&served, "generation", "slow", "apart");
        signal(runtime, "STOP");
        eventually("the next life begins", || {
            life(&served, "up", "slow", "apart") == 1
                && life(&served, "generation", "slow", "apart") > before
        });
        // It was killed, since it could not react.
        eventually("the old one is gone", || !children(served.process.0.id()).contains(&runtime));
    });
    // provokes: accelerator_stalled
    assert!(served.dropped("slow", DropReason::AcceleratorStalled) > 0);
    assert_eq!(served.drain(), 0);
}

#[test]
fn backend_answers_for_an_old_generation_do_not_reach_the_next() {
    let database = TcpListener::bind("127.0.0.1:0").unwrap();
    let config = process("apart", "")
        + &format!(
            "[[service]]\nname = \"faces\"\nlisten = \"udp://127.0.0.1:0\"\n\
             accelerator = \"apart\"\nkernel = \"faces\"\nmqueues = 1\n\
             max_message_bytes = 1036\nrequest_timeout_ms = 60000\n\
             [[service.backend]]\nname = \"db\"\nconnect = \"tcp://{}\"\n\
             framing = \"memcached\"\ntimeout_ms = 60000\n",
            database.local_addr().unwrap()
        );
    let served = Served::start("attach-backend", "", &config);
    let client = udp_client(served.services[0][0]);
    client.send(&faces::request(1, 1)).unwrap();
    let (mut stream, _) = database.accept().unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    let mut query = [0; "mg face: k v\r\n".len() + 24];
    stream.read_exact(&mut query).unwrap();
    signal(runtime_of(&served), "KILL");
    eventually("the next life begins", || {
        life(&served, "up", "faces", "apart") == 1
            && life(&served, "generation", "faces", "apart") == 2
    });
    client.send(&faces::request(2, 2)).unwrap();
    stream.read_exact(&mut query).unwrap();
    // The picture is missing for the first question, and stored before the second one.
    let key = std::str::from_utf8(&query[3..query.len() - " k v\r\n".len()]).unwrap();
    let mut answers = format!("EN\r\nVA 1024 k{key}\r\n").into_bytes();
    answers.extend(faces::picture(2));
    answers.extend(b"\r\n");
    stream.write_all(&answers).unwrap();
    let mut reply = [0; 100];
    let len = client.recv(&mut reply).expect("a reply in time");
    assert_eq!(faces::verdict(&reply[..len]).0, faces::MATCH);
    assert_eq!(served.dropped("faces", DropReason::BackendLate), 1);
    balances(&served, "faces");
    assert_eq!(served.drain(), 0);
}

/// Kernels that break their contract end their runtime, and the next one serves.
#[test]
fn a_kernel_that_breaks_its_contract_is_replaced() {
    let kernel = build_kernel("device/tests/misbehave.cpp");
    // After three messages of a block: it returns; it writes random values to its TX head; it overruns the ring.
    for mode in [8, 6, 12] {
        let params = format!(
            "mqueues = 1\nslots = 8\nrequest_timeout_ms = 500\nparams = {{ mode = {mode}, after = 3 }}\n"
        );
        let config = process("apart", "") + &service("wild", "apart", &kernel, &params);
        let served = Served::start(&format!("attach-wild-{mode}"), "", &config);
        let client = udp_client(served.services[0][0]);
        for round in 0..3 {
            let salt = 10 * mode + round;
            answers_again(served.services[0][0], salt);
            client.set_read_timeout(Some(Duration::from_millis(10))).unwrap();
            eventually("its life ends", || {
                client.send(&pattern(30, salt)).unwrap();
                let _ = client.recv(&mut [0; 100]);
                life(&served, "restarts_total", "wild", "apart") > round as u64
            });
        }
        balances(&served, "wild");
        drop(served);
    }
}

#[test]
fn only_the_engines_user_and_root_are_accepted() {
    const UNPRIVILEGED: u32 = 65_534;
    if sys::process::user() != 0 {
        eprintln!("SKIPPED: only root can change its user");
        return;
    }
    let at = path("users");
    let server = engine_at(&at, 60_000, |_| {});
    let mut command = Command::new(env!("CARGO_BIN_EXE_serval"));
    command.arg("attach").arg(&at).uid(UNPRIVILEGED).gid(UNPRIVILEGED);
    // The host kernel refuses: this is reported, and not retried endlessly.
    if let Ok(output) = command.output() {
        let text = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{text}");
        assert!(
            text.contains("belongs to user 0: run this as the engine's user or as root"),
            "{text}"
        );
    }
    // Now the connection succeeds.
    fs::set_permissions(&at, std::os::unix::fs::PermissionsExt::from_mode(0o666)).unwrap();
    let output = match command.arg("--once").output() {
        Ok(output) => output,
        Err(error) => {
            eprintln!("SKIPPED: an unprivileged user cannot run the program: {error}");
            return;
        }
    };
    let text = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{text}");
    assert!(text.contains("processes of user 0 and root, not of user 65534"), "{text}");
    assert!(!is_up(&server));
}

#[test]
fn a_runtime_attaches_to_engines_of_its_own_user_and_of_root() {
    const UNPRIVILEGED: u32 = 65_534;
    if sys::process::user() != 0 {
        eprintln!("SKIPPED: only root can change its user");
        return;
    }
    let (at, file) = (path("stranger"), path("stranger.toml"));
    let config = format!("schema = 1\n[engine]\ncontrol = \"\"\n{}", external("out", &at, ""))
        + &service("echo", "out", "echo", "");
    fs::write(&file, config).unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_serval"));
    command.arg("serve").arg(&file).uid(UNPRIVILEGED).gid(UNPRIVILEGED).stderr(Stdio::null());
    let mut engine = match command.stdout(Stdio::piped()).spawn() {
        Ok(engine) => Peer(engine),
        Err(error) => {
            eprintln!("SKIPPED: an unprivileged user cannot run the program: {error}");
            return;
        }
    };
    let mut ready = [0; 6];
    engine.0.stdout.take().unwrap().read_exact(&mut ready).expect("it gets ready");
    let mut device = HostDevice::new(1, Vec::new());
    // Not retried, even without --once.
    let cancel = AtomicBool::new(false);
    let found = runtime::attach(&at, &AttachRequest::default(), &mut device, false, &cancel);
    let text = found.expect_err("it is a stranger's").to_string();
    assert!(text.contains("is of user 65534: a runtime of user 0"), "{text}");
    engine.stop();
    // It was killed and could not.
    fs::remove_file(&at).unwrap();
    fs::remove_file(&file).unwrap();
}

/// `serval attach` in a process of its own.
fn attach(at: &Path, more: &[&str]) -> Peer {
    let mut command = Command::new(env!("CARGO_BIN_EXE_serval"));
    command.arg("attach").arg(at).args(more).stdout(Stdio::null()).stderr(Stdio::null());
    Peer::start(&mut command, "cargo builds it")
}

#[test]
fn an_external_runtime_attaches_is_suspended_ends_and_attaches_again() {
    let at = path("external");
    let config = external("out", &at, "heartbeat_ms = 400") + &service("echo", "out", "echo", "");
    let served = Served::start("attach-external", "", &config);
    let client = udp_client(served.services[0][0]);
    client.send(b"no runtime").unwrap();
    eventually("the request is dropped", || served.dropped("echo", DropReason::NoAccelerator) == 1);
    let mut runtime = attach(&at, &[]);
    answers_again(served.services[0][0], 1);
    // On a busy machine a generation may end without this test: generations are compared, not counted.
    let generation = || life(&served, "generation", "echo", "out");
    let first = generation();

    // It resumes after its generation has ended, and attaches for another one.
    runtime.suspend();
    eventually("it is lost", || life(&served, "up", "echo", "out") == 0);
    runtime.signal("CONT");
    eventually("it is back", || generation() > first);
    answers_again(served.services[0][0], 2);

    runtime.stop();
    eventually("it is gone", || life(&served, "up", "echo", "out") == 0);
    let before = generation();
    let _next = attach(&at, &["--service", "echo", "--kernel", "echo"]);
    answers_again(served.services[0][0], 3);
    assert!(generation() > before);
    balances(&served, "echo");
    assert_eq!(served.drain(), 0);
    assert!(!at.exists(), "the socket's file goes with the engine");
}

#[test]
fn runtimes_end_with_their_engine_or_wait_for_the_next() {
    let at = path("orphans");
    let config = process("apart", "")
        + &external("out", &at, "")
        + &service("echo", "apart", "echo", "")
        + &service("far", "out", "echo", "");
    let mut served = Served::start("attach-orphans", "", &config);
    let launched = runtime_of(&served);
    let mut once = attach(&at, &["--once"]);
    eventually("it serves", || life(&served, "up", "far", "out") == 1);
    served.process.stop();
    eventually("the launched one ends", || {
        !Path::new(&format!("/proc/{launched}/maps")).exists() || {
            fs::read_to_string(format!("/proc/{launched}/stat")).is_ok_and(|s| s.contains(") Z "))
        }
    });
    let mut code = None;
    eventually("the other one ends", || {
        code = once.0.try_wait().unwrap();
        code.is_some()
    });
    assert_eq!(code.unwrap().code(), Some(1), "with --once an engine that goes is an error");

    // Without --once a runtime survives its engine.
    let _patient = attach(&at, &[]);
    let next = Served::start("attach-orphans-next", "", &config);
    answers_again(next.services[1][0], 1);
    assert_eq!(next.drain(), 0);
}

#[test]
fn answers_of_an_old_generation_are_dropped() {
    let at = path("generations");
    let server = engine_at(&at, 60_000, |_| {});
    let client = udp_client(address(&server, 0));
    let (first, mut old) = Fake::serve(&at);
    eventually("it serves", || is_up(&server));
    client.send(b"first").unwrap();
    let (block, old_token) = old.region.request();
    drop(first);
    eventually("the request is lost", || dropped(&server, 0, DropReason::AcceleratorLost) == 1);

    let (_second, mut new) = Fake::serve(&at);
    assert_eq!((old.offer.generation, new.offer.generation), (1, 2));
    eventually("it serves", || is_up(&server));
    client.send(b"second").unwrap();
    let (new_block, token) = new.region.request();
    assert_ne!(old_token, token, "no life reuses a token of another");
    // The old runtime still writes into its region, with its own token and with the new one's.
    for _ in 0..100 {
        old.region.reply(block, old_token, b"late");
        old.region.reply(new_block, token, b"forged");
    }
    // An old token in the new region is invalid.
    new.region.reply(new_block, old_token, b"stale");
    eventually("it is stale", || dropped(&server, 0, DropReason::StaleToken) == 1);
    new.region.reply(new_block, token, b"right");
    let mut reply = [0; 100];
    let len = client.recv(&mut reply).unwrap();
    assert_eq!(&reply[..len], b"right");
    client.set_read_timeout(Some(Duration::from_millis(200))).unwrap();
    assert!(client.recv(&mut reply).is_err(), "and nothing else comes");
    assert_eq!(dropped(&server, 0, DropReason::StaleToken), 1);
    assert_accounts(&server);
}

#[test]
fn a_runtime_that_breaks_the_protocol_is_rejected_and_the_next_one_serves() {
    let at = path("hostile");
    let server = engine_at(&at, 60_000, |_| {});
    let refused = |bytes: &[u8], why: &str| {
        let fake = Fake::connect(&at);
        fake.say(bytes);
        let text = fake.refusal();
        assert!(text.contains(why), "{text:?} says {why:?}");
        assert!(fake.is_closed());
    };
    refused(b"GET / HTTP/1.1\r\n\r\n", "does not speak Serval's attach protocol");
    let hello = |change: fn(&mut Hello)| {
        let mut hello = Hello {
            abi_version: ABI_VERSION,
            process: 1,
            kind: "test".into(),
            service: String::new(),
            kernel: String::new(),
        };
        change(&mut hello);
        FromRuntime::Hello(hello).encode()
    };
    let mut other = hello(|_| {});
    other[8] = VERSION as u8 + 1;
    refused(&other, "use matching builds");
    refused(&hello(|h| h.abi_version += 1), "use matching builds");
    refused(&hello(|h| h.service = "digits".into()), "no service \"digits\": it has echo");
    refused(&hello(|h| h.kernel = "lenet".into()), "kernel \"lenet\": they run echo");
    refused(&FromRuntime::Ready(Ready { generation: 1, blocks: 4 }).encode(), "must be a hello");
    refused(&[&hello(|_| {})[..], b"x"].concat(), "it is too long");
    refused(&vec![b'x'; MESSAGE_BYTES_MAX], "attach protocol");

    // Runtimes that disconnect at every step, and silent ones.
    let silent = Fake::connect(&at);
    for _ in 0..200 {
        drop(Fake::connect(&at));
    }
    let wrongs: [(&str, Vec<u8>); 6] = [
        ("protocol", FromRuntime::Ready(Ready { generation: 999, blocks: 4 }).encode()),
        ("protocol", hello(|_| {})),
        ("protocol", b"nonsense".to_vec()),
        ("refused", FromRuntime::Bye(Bye { reason: reason::REFUSED, text: "no".into() }).encode()),
        ("unknown", FromRuntime::Bye(Bye { reason: u64::MAX, text: String::new() }).encode()),
        ("lost", Vec::new()),
    ];
    let mut waited = 0;
    for (generation, (word, bytes)) in (1..).zip(wrongs) {
        let (fake, place, refused) = Fake::come(&at);
        waited += refused;
        assert_eq!(place.offer.generation, generation, "each offer is of a new life");
        if bytes.is_empty() {
            drop(fake);
        } else {
            fake.say(&bytes);
            assert!(fake.is_closed());
        }
        eventually("the seat is free", || server.metrics().runtimes()[0].ended() == generation);
        assert_eq!(server.metrics().runtimes()[0].last_end(), word);
    }
    assert!(waited > 0, "every life was followed by the next one at once");
    assert!(silent.is_closed(), "a silent runtime is rejected");

    // A runtime slot is for one runtime, which keeps it.
    let (fake, _place) = Fake::serve(&at);
    eventually("it serves", || is_up(&server));
    refused(&hello(|_| {}), "has a runtime for each of its services");
    fake.say(&hello(|_| {}));
    assert!(fake.is_closed(), "saying hello twice ends a life");

    let cancel = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            let request = AttachRequest::default();
            runtime::attach(&at, &request, &mut HostDevice::new(1, Vec::new()), false, &cancel)
        });
        let _stop = Stop(&cancel);
        answers_again(address(&server, 0), 1);
    });
    assert_accounts(&server);
}

#[test]
fn garbage_in_a_region_ends_only_that_generation() {
    let at = path("garbage");
    let server = engine_at(&at, 60_000, |service| service.slots = 8);
    let client = udp_client(address(&server, 0));
    let mut random = Random::new(7);
    for round in 0..6 {
        let (fake, place) = Fake::serve(&at);
        eventually("it serves", || is_up(&server));
        for salt in 0..20 {
            client.send(&pattern(20, salt)).unwrap();
        }
        // Everything but the header, which is not read again: words, directory, rings, slots.
        let memory = &place.region.memory;
        let words = memory.len_bytes() as usize / 8;
        for _ in 0..20_000 {
            let at = 8 * (16 + random.below(words - 16)) as u64;
            memory.store(at, random.next(), mqueue::memory::Ordering::Relaxed);
        }
        eventually("its life ends", || !is_up(&server));
        let lives = server.metrics().runtimes();
        let life = &lives[0];
        assert_eq!(life.ended(), round + 1);
        let known = ["ring_corrupt", "unknown", "stopped", "returned", "hung"];
        assert!(known.contains(&life.last_end()) || life.last_end() == "contract broken");
        assert!(fake.is_closed());
    }
    let mut runtime = attach(&at, &[]);
    answers_again(address(&server, 0), 9);
    runtime.stop();
    eventually("it is gone", || !is_up(&server));
    assert_accounts(&server);
}

/// Only the supervisor reads these rings, in its probe of the copy agent.
#[test]
fn impossible_words_in_a_command_ring_end_that_generation() {
    let at = path("command-ring");
    let server = engine_at(&at, 60_000, |_| {});
    let (fake, place, _) = Fake::come(&at);
    let memory = &place.region.memory;
    let region = Region::join(memory.clone()).unwrap();
    let rings = region.entries().iter().filter(|ring| ring.kind == ring_kind::COMPLETIONS);
    for ring in rings {
        for at in (ring.offset..ring.offset + ring.bytes).step_by(8) {
            memory.store(at, u64::MAX, mqueue::memory::Ordering::Relaxed);
        }
    }
    fake.ready(&place);
    eventually("its generation ends", || server.metrics().runtimes()[0].ended() == 1);
    assert_eq!(server.metrics().runtimes()[0].last_end(), "ring_corrupt");
    assert!(fake.is_closed());
    assert_accounts(&server);
}

#[test]
fn invalid_offers_are_reported_in_one_sentence() {
    let at = path("false-engine");
    let listener = LocalListener::bind(&at).unwrap();
    let offers = Offers::new();
    let mut cases = offers.cases();
    let unknown = offers.offer("nothing", 0);
    cases.push(("no kernel `nothing` is built in", unknown, offers.good()));
    for (why, message, descriptors) in cases {
        let found = at_a_false_engine(&listener, &message, &descriptors, || {
            let cancel = AtomicBool::new(false);
            let mut device = HostDevice::new(1, Vec::new());
            runtime::attach(&at, &AttachRequest::default(), &mut device, true, &cancel)
        });
        let error = found.expect_err("a faulty engine is refused").to_string();
        assert!(error.contains(why), "{error:?} says {why:?}");
        assert!(!error.contains('\n'), "one sentence: {error:?}");
    }
    drop(listener);
    let cancel = AtomicBool::new(false);
    let mut device = HostDevice::new(1, Vec::new());
    let missing = runtime::attach(&at, &AttachRequest::default(), &mut device, true, &cancel);
    assert!(matches!(missing, Err(RuntimeError::Connect { .. })));
}

/// A host device whose blocks must be asked to stop before they are waited for.
struct Told {
    device: HostDevice,
    words: Vec<Words<MappedMemory>>,
}

impl Device for Told {
    fn kind(&self) -> &str {
        self.device.kind()
    }

    fn start(&mut self, jobs: &[Job]) -> Result<(), Failure> {
        self.words = jobs.iter().map(|job| job.words.clone()).collect();
        self.device.start(jobs)
    }

    fn health(&mut self) -> Result<(), Failure> {
        self.device.health()
    }

    fn ended(&mut self) -> bool {
        self.device.ended()
    }

    fn stop(&mut self, patience: Duration) -> Result<(), Failure> {
        let told: Vec<u64> = self.words.iter().map(Words::stop).collect();
        assert_eq!(told, [stop::NOW]);
        self.device.stop(patience)
    }
}

/// The result of a generation that is asked to stop, with this drain time, together with its offer.
fn stopped_at_once(name: &str, offers: &Offers, offer: &[u8], drain_ms: u32) -> End {
    let at = path(name);
    let listener = LocalListener::bind(&at).unwrap();
    thread::scope(|scope| {
        let runtime = scope.spawn(|| {
            let cancel = AtomicBool::new(false);
            let mut device = Told { device: HostDevice::new(2, Vec::new()), words: Vec::new() };
            runtime::attach(&at, &AttachRequest::default(), &mut device, true, &cancel)
        });
        let socket = arrival(&listener);
        socket.send(offer, &offers.good()).unwrap();
        socket.send(&FromEngine::Stop { drain_ms }.encode(), &[]).unwrap();
        runtime.join().unwrap().expect("a stop is no failure")
    })
}

#[test]
fn an_engine_that_stops_while_blocks_start_ends_the_generation_in_order() {
    for word in [stop::DRAIN, stop::NOW] {
        let offers = Offers::new();
        let region = Region::join(MappedMemory::new(offers.good.clone())).unwrap();
        region.words().set_stop(word);
        let offer = offers.offer("echo", 0);
        let end = stopped_at_once(&format!("early-{word}"), &offers, &offer, 60_000);
        assert_eq!(end, End::Stopped);
    }
}

#[test]
fn a_drain_ends_at_its_time_limit() {
    let offers = Offers::new();
    let mut region = Region::join(MappedMemory::new(offers.good.clone())).unwrap();
    let (mut requests, _replies) = region.engine_ends(0);
    let head = Head { tag: 1, kind: kind::MESSAGE, ..Head::default() };
    requests.push(head, b"for an hour").unwrap();
    requests.publish();
    region.words().set_stop(stop::DRAIN);
    let offer = offers.offer_with("delay", 0, vec![("microseconds".into(), 3.6e9.into())]);
    // Its block would take an hour if it were not stopped.
    assert_eq!(stopped_at_once("overdue", &offers, &offer, 100), End::Stopped);
}

#[test]
fn a_runtime_stopped_while_it_waits_for_an_offer_ends_in_order() {
    let at = path("no-offer");
    let listener = LocalListener::bind(&at).unwrap();
    let cancel = AtomicBool::new(false);
    thread::scope(|scope| {
        let runtime = scope.spawn(|| {
            let mut device = HostDevice::new(1, Vec::new());
            runtime::attach(&at, &AttachRequest::default(), &mut device, false, &cancel)
        });
        let _socket = arrival(&listener);
        cancel.store(true, std::sync::atomic::Ordering::Relaxed);
        assert_eq!(runtime.join().unwrap().unwrap(), End::Stopped);
    });
}
