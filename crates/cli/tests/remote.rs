//! Accelerators of kind `remote`: the runtime is a process on the other side of a TCP connection, which is cut, frozen and
//! damaged, and strangers connect to it.

mod common;

use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use ::remote::{Control, Greeter, Mirror, Secret, Side, connect};
use common::remote::*;
use common::runtimes::{SLOW, balances, framed, life, service, under_load};
use common::*;
use mqueue::abi::kind;
use mqueue::{Consumer, Head, MappedMemory, Producer, Region};
use runtime::far::{self, Terms};
use runtime::{Device, Failure, Job};
use wire::DropReason;
use wire::attach::{FromEngine, Offer};
use wire::link::{Frame, Greeting, MqueueShape, RingShape, Shape};

/// Why the last runtime ended.
fn last_end(served: &Served, service: &str, accelerator: &str) -> String {
    let page = page(served.metrics);
    let of = format!(
        "serval_accelerator_last_end{{service=\"{service}\",accelerator=\"{accelerator}\",reason=\""
    );
    let line = page.lines().find_map(|line| line.strip_prefix(&of));
    line.and_then(|rest| rest.split('"').next()).unwrap_or_default().to_owned()
}

fn is_up(served: &Served, service: &str) -> bool {
    life(served, "up", service, "far") == 1
}

#[test]
fn one_service_spans_local_and_remote_accelerators() {
    let secret = secret_file("remote-spans", SECRET);
    let far = Far::start(&secret, &["--threads", "2"]);
    let image = "max_message_bytes = 784\nmqueues = 2\n";
    let both = service("digits", "near", "lenet", image)
        .replace("accelerator = \"near\"", "accelerator = [\"near\", \"far\"]");
    let config = "[[accelerator]]\nname = \"near\"\n".to_owned()
        + &accelerator("far", far.address, &secret, "")
        + &both
        + &service("only", "far", "lenet", image)
        + &service("check", "near", "lenet", image)
        + &service("long", "far", "echo", "max_message_bytes = 60000\nmqueues = 1\nslots = 8\n");
    let served = Served::start("remote-spans", "workers = 2", &config);
    for service in ["digits", "only", "long"] {
        eventually("the link is up", || is_up(&served, service));
    }
    let client = |service: usize| udp_client(served.services[service][0]);
    let (digits, only, check) = (client(0), client(1), client(2));
    for salt in 0..40 {
        let picture = pattern(784, salt * 977);
        let right = ask(&check, &picture);
        assert_eq!(ask(&digits, &picture), right, "picture {salt}");
        assert_eq!(ask(&only, &picture), right, "picture {salt}");
    }
    // More than there are slots, of lengths with and without the arena: rings and arenas wrap.
    let mut stream = tcp_client(served.services[3][1]);
    for round in 0..20 {
        let lengths = [60_000, 1, 1536, 1537, 30_000, 59_999, 0, 45_000, 8, 20_000];
        let messages: Vec<_> = lengths.iter().map(|len| pattern(*len, round)).collect();
        let all: Vec<u8> = messages.iter().flat_map(|message| framed(message)).collect();
        let reader = stream.try_clone().unwrap();
        let writer = std::thread::spawn({
            let all = all.clone();
            let mut stream = reader;
            move || stream.write_all(&all).unwrap()
        });
        let mut replies = vec![0; all.len()];
        stream.read_exact(&mut replies).expect("the replies in time");
        writer.join().unwrap();
        assert!(replies == all, "round {round}");
    }
    let round_trip = "serval_accelerator_round_trip_seconds{service=\"only\",accelerator=\"far\"} ";
    eventually("the round trip is shown", || page(served.metrics).contains(round_trip));
    for service in ["digits", "only", "long"] {
        balances(&served, service);
        assert_eq!(served.dropped(service, DropReason::RequestTimeout), 0);
    }
    assert_eq!(served.drain(), 0);
}

#[test]
fn a_link_that_breaks_is_a_lost_accelerator_and_comes_back() {
    let secret = secret_file("remote-breaks", SECRET);
    let far = Far::start(&secret, &[]);
    let relay = Relay::to(far.address);
    let config = accelerator("far", relay.address, &secret, "heartbeat_ms = 1000")
        + &service("slow", "far", "delay", SLOW);
    let served = Served::start("remote-breaks", "", &config);
    eventually("the link is up", || is_up(&served, "slow"));
    under_load(&served, "slow", || {
        let back = |what: &str, before: u64| {
            eventually(what, || {
                is_up(&served, "slow") && life(&served, "generation", "slow", "far") > before
            });
            assert_eq!(last_end(&served, "slow", "far"), "link_lost", "{what}");
        };
        let generation = || life(&served, "generation", "slow", "far");
        let before = generation();
        relay.cut();
        back("after a cut", before);
        let before = generation();
        relay.spoil_after(5_000);
        back("after a damaged byte", before);
        let before = generation();
        relay.cut_after(5_007);
        back("after a cut within a record", before);
        let before = generation();
        relay.freeze(true);
        eventually("silence is a loss", || !is_up(&served, "slow"));
        relay.freeze(false);
        back("after a silence", before);
    });
    // provokes: accelerator_lost
    assert!(served.dropped("slow", DropReason::AcceleratorLost) > 0);
    assert_eq!(served.dropped("slow", DropReason::RequestTimeout), 0);
    assert_eq!(served.drain(), 0);
}

#[test]
fn a_service_starts_without_its_remote_accelerator_and_survives_its_end() {
    let secret = secret_file("remote-absent", SECRET);
    let other = secret_file("remote-absent-other", "another secret, which is also long enough");
    let stranger = Far::start(&other, &[]);
    let relay = Relay::to(stranger.address);
    let config = "[[accelerator]]\nname = \"near\"\n".to_owned()
        + &accelerator("far", relay.address, &secret, "")
        + &service("echo", "near", "echo", "mqueues = 1")
            .replace("accelerator = \"near\"", "accelerator = [\"near\", \"far\"]");
    let served = Served::start("remote-absent", "", &config);
    let client = udp_client(served.services[0][0]);
    let answers = |rounds: usize| {
        for salt in 0..rounds {
            let message = pattern(1 + salt % 1000, salt);
            assert_eq!(ask(&client, &message), message);
        }
    };
    // The other machine has another secret.
    eventually("the link is refused", || last_end(&served, "echo", "far") == "link_lost");
    assert!(!is_up(&served, "echo"));
    eventually("the reason is logged", || served.log().contains("does not know the secret"));
    answers(50);
    drop(stranger);
    let far = Far::start(&secret, &["--threads", "1"]);
    relay.turn_to(far.address);
    eventually("the link is up", || is_up(&served, "echo"));
    answers(50);
    far.process.signal("KILL");
    eventually("the link is lost", || !is_up(&served, "echo"));
    eventually("it answers", || {
        client.send(b"near").unwrap();
        let mut reply = [0; 16];
        client.set_read_timeout(Some(Duration::from_millis(100))).unwrap();
        client.recv(&mut reply).is_ok()
    });
    // The runtime is stopped in order.
    let mut far = Far::start(&secret, &[]);
    relay.turn_to(far.address);
    eventually("the next link is up", || is_up(&served, "echo"));
    far.process.signal("TERM");
    let mut code = None;
    eventually("the runtime ends", || {
        code = far.process.0.try_wait().unwrap();
        code.is_some()
    });
    assert_eq!(code.unwrap().code(), Some(0));
    eventually("the link is lost", || !is_up(&served, "echo"));
    eventually("the reason is logged", || {
        served.log().contains("the runtime on the other machine was stopped")
    });
    assert_eq!(served.drain(), 0);
}

#[test]
fn strangers_at_the_listener_disturb_nobody() {
    let secret = secret_file("remote-strangers", SECRET);
    let far = Far::start(&secret, &[]);
    let connect = || {
        let stream = TcpStream::connect(far.address).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        stream
    };
    // What a stranger gets: at most one greeting, then the end.
    let said = |bytes: &[u8]| {
        let mut stream = connect();
        stream.write_all(bytes).unwrap();
        let mut heard = Vec::new();
        // A connection that is reset had unread bytes.
        let _ = stream.read_to_end(&mut heard);
        heard
    };
    // More than may be pending, and all of them silent or in the middle of a greeting.
    let half = &Greeting::Hello([1; 32], [2; 32]).encode()[..20];
    let silent: Vec<_> = (0..150).map(|_| connect()).collect();
    let halves: Vec<_> = (0..150)
        .map(|_| {
            let mut stream = connect();
            let _ = stream.write_all(half);
            stream
        })
        .collect();
    let refusal = |bytes: &[u8]| match Greeting::decode(&said(bytes)) {
        Ok(Some((Greeting::Refuse(why), _))) => why,
        other => panic!("{other:?}"),
    };
    assert!(refusal(b"GET / HTTP/1.1\r\n\r\n").contains("does not speak"));
    let mut other_version = Greeting::Hello([1; 32], [2; 32]).encode();
    other_version[8] = 77;
    assert!(refusal(&other_version).contains("version 77"));
    assert!(refusal(&Greeting::Proof([0; 32]).encode()).contains("out of order"));
    let hello_and_forged =
        [Greeting::Hello([1; 32], [9; 32]).encode(), Greeting::Proof([3; 32]).encode()];
    let heard = said(&hello_and_forged.concat());
    let (challenge, len) = Greeting::decode(&heard).unwrap().unwrap();
    assert!(matches!(challenge, Greeting::Challenge(..)));
    let refused = Greeting::decode(&heard[len..]).unwrap().unwrap().0;
    assert!(matches!(refused, Greeting::Refuse(why) if why.contains("secret")));
    let config = accelerator("far", far.address, &secret, "") + &service("echo", "far", "echo", "");
    let served = Served::start("remote-strangers", "", &config);
    eventually("the link is up", || is_up(&served, "echo"));
    let client = udp_client(served.services[0][0]);
    assert_eq!(ask(&client, b"among strangers"), b"among strangers");
    drop((silent, halves));
    assert_eq!(served.drain(), 0);
}

/// Blocks that answer each request with a forged token, a message of no kind, the right reply, and the same again.
#[derive(Default)]
struct Forgers {
    over: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
}

impl Device for Forgers {
    fn kind(&self) -> &str {
        "forgers"
    }

    fn start(&mut self, jobs: &[Job]) -> Result<(), Failure> {
        let mut region = Region::join(MappedMemory::new(jobs[0].memory.clone())).unwrap();
        for block in 0..jobs[0].blocks {
            let (rx, tx) = region.accelerator_ends(region.mqueues_of(block)[0]);
            let over = self.over.clone();
            self.threads.push(thread::spawn(move || forge(rx, tx, &over)));
        }
        Ok(())
    }

    fn health(&mut self) -> Result<(), Failure> {
        Ok(())
    }

    fn ended(&mut self) -> bool {
        true
    }

    fn stop(&mut self, _: Duration) -> Result<(), Failure> {
        self.over.store(true, Ordering::Relaxed);
        self.threads.drain(..).for_each(|thread| thread.join().unwrap());
        Ok(())
    }
}

fn forge(mut rx: Consumer<MappedMemory>, mut tx: Producer<MappedMemory>, over: &AtomicBool) {
    let mut payload = vec![0; 2048];
    while !over.load(Ordering::Relaxed) {
        let Ok(Some(header)) = rx.peek() else {
            thread::sleep(Duration::from_micros(100));
            continue;
        };
        let payload = &mut payload[..header.len as usize];
        assert!(rx.copy_out(&header, payload));
        rx.advance();
        rx.release();
        let wrong: Vec<u8> = payload.iter().map(|byte| !byte).collect();
        let messages = [
            (header.token ^ 1 << 40, kind::MESSAGE, &wrong[..]),
            (header.token, 7, &wrong[..]),
            (header.token, kind::MESSAGE, &*payload),
            (header.token, kind::MESSAGE, &wrong[..]),
        ];
        for (token, kind, payload) in messages {
            let head = Head { token, tag: 0, kind, status: 0 };
            while tx.push(head, payload).is_err() && !over.load(Ordering::Relaxed) {
                thread::sleep(Duration::from_micros(100));
            }
        }
        tx.publish();
    }
}

#[test]
fn a_remote_accelerator_that_forges_tokens_reaches_no_client() {
    let secret = secret_file("remote-forges", SECRET);
    let known = Secret::read(&secret).unwrap();
    let greeter = Greeter::bind("tcp://127.0.0.1:0", known).unwrap();
    let config = accelerator("far", greeter.local_address().unwrap(), &secret, "")
        + &service("echo", "far", "echo", "");
    let over = AtomicBool::new(false);
    let device = || Ok(Box::<Forgers>::default() as _);
    let terms = Terms {
        kernels: Vec::new(),
        device: &device,
        exclusive: false,
        once: false,
        hang: PATIENCE,
    };
    thread::scope(|scope| {
        let (over, terms) = (&over, &terms);
        scope.spawn(move || far::listen(greeter, terms, over));
        let over = SetAtEnd(over);
        let served = Served::start("remote-forges", "", &config);
        eventually("the link is up", || is_up(&served, "echo"));
        let client = udp_client(served.services[0][0]);
        for salt in 0..300 {
            let message = pattern(1 + salt, salt);
            assert_eq!(ask(&client, &message), message);
        }
        // provokes: stale_token
        eventually("forged and used tokens are counted", || {
            served.dropped("echo", DropReason::StaleToken) == 600
        });
        // provokes: bad_message
        assert_eq!(served.dropped("echo", DropReason::BadMessage), 300);
        balances(&served, "echo");
        assert_eq!(served.drain(), 0);
        drop(over);
    });
}

/// Sets a flag however the scope ends, so that threads that wait for it end.
struct SetAtEnd<'a>(&'a AtomicBool);

impl Drop for SetAtEnd<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Links that come and go.
const ROUNDS: usize = 200;

#[test]
fn links_that_come_and_go_leave_nothing() {
    let secret = secret_file("remote-rounds", SECRET);
    let known = Secret::read(&secret).unwrap();
    let far = Far::start(&secret, &[]);
    let (at, process) = (format!("tcp://{}", far.address), far.process.0.id());
    let held = || {
        let count =
            |what: &str| std::fs::read_dir(format!("/proc/{process}/{what}")).unwrap().count();
        (count("fd"), count("task"))
    };
    let ring = RingShape { protocol: 1, message_bytes_max: 64, arena_bytes: 0 };
    let shape = Shape { blocks: 2, mqueues: vec![MqueueShape { depth: 8, rings: [ring; 2] }] };
    let offer = FromEngine::Offer(Offer {
        generation: 1,
        region_bytes: 1 << 20,
        blocks: 2,
        heartbeat_ms: 10_000,
        service: "s".to_owned(),
        accelerator: "a".to_owned(),
        kernel: "echo".to_owned(),
        params: Vec::new(),
    });
    let before = held();
    for round in 0..ROUNDS {
        // A stranger, a link that ends before its offer is complete, and one whose blocks run.
        drop(TcpStream::connect(far.address).unwrap());
        let mut mirror = Mirror::new(connect(&at, &known, PATIENCE).unwrap(), Side::Engine);
        mirror.send(&Frame::Attach(&offer.encode()));
        if round % 2 == 0 {
            mirror.send(&Frame::Shape(shape.clone()));
        }
        let mut answered = round % 2 == 1;
        let mut turn = || {
            let mut control = |control: Control<'_>| {
                answered |= matches!(control, Control::Attach(_));
                Ok(())
            };
            mirror.turn(Instant::now(), &mut control).unwrap();
            answered
        };
        eventually("the blocks are ready, or it was refused", &mut turn);
    }
    eventually("nothing is left", || held() == before);
}

/// Both machines have the kernel, under different paths; another kernel is refused.
#[test]
fn a_kernel_in_a_file_is_known_by_its_content() {
    let secret = secret_file("remote-file", SECRET);
    let kernel = build_kernel("device/kernels/echo.cpp");
    let folder = std::path::Path::new(env!("CARGO_TARGET_TMPDIR")).join("remote-kernel-file");
    std::fs::create_dir_all(&folder).unwrap();
    let copy = folder.join("elsewhere.so");
    std::fs::copy(&kernel, &copy).unwrap();
    for (own, is_same) in [(copy, true), (build_kernel("device/kernels/scale.cpp").into(), false)] {
        let far = Far::start(&secret, &["--kernel", own.to_str().unwrap()]);
        let config = accelerator("far", far.address, &secret, "")
            + &service("file", "far", &kernel, "mqueues = 1\n");
        let served = Served::start(&format!("remote-file-{is_same}"), "", &config);
        if is_same {
            eventually("the link is up", || is_up(&served, "file"));
            let client = udp_client(served.services[0][0]);
            assert_eq!(ask(&client, b"a message"), b"a message");
        } else {
            let why = "copy the file of one machine to the other";
            eventually("the reason is in the log", || served.log().contains(why));
            assert!(!is_up(&served, "file"));
        }
        assert_eq!(served.drain(), 0);
    }
}

/// One runtime serves built-in kernels and several files, each for the services that name it.
#[test]
fn a_runtime_serves_several_kernels() {
    let secret = secret_file("remote-several", SECRET);
    let files = ["device/tests/param_text.cpp", "device/tests/misbehave.cpp"].map(build_kernel);
    let [texts, other] = &files;
    let far = Far::start(&secret, &["--kernel", "scale", "--kernel", texts, "--kernel", other]);
    let config = accelerator("far", far.address, &secret, "")
        + &service("scale", "far", "scale", "mqueues = 1\n")
        + &service("texts", "far", texts, "mqueues = 1\nparams = { text = \"far\", n = 4 }\n")
        + &service("echo", "far", "echo", "mqueues = 1\n");
    let served = Served::start("remote-several", "", &config);
    eventually("the links are up", || is_up(&served, "scale") && is_up(&served, "texts"));
    let ask =
        |service: usize, request: &[u8]| ask(&udp_client(served.services[service][0]), request);
    assert_eq!(ask(0, &2.0_f32.to_le_bytes()), 6.0_f32.to_le_bytes());
    assert_eq!(ask(1, b"?"), b"far4");
    // A kernel that is not among them.
    eventually("the reason is in the log", || served.log().contains("this side runs the kernels"));
    assert!(!is_up(&served, "echo"));
    drop(far);
    assert_eq!(served.drain(), 0);
}

#[test]
fn a_runtime_that_attaches_has_one_kernel() {
    let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_serval"));
    let done = command.args(["attach", "/nowhere", "--kernel", "echo", "--kernel", "scale"]);
    let done = done.output().unwrap();
    let said = String::from_utf8_lossy(&done.stderr);
    assert!(done.status.code() == Some(2) && said.contains("runs one kernel"), "{said}");
}
