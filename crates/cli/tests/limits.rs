//! Exhausted resources: descriptors, time for slow and silent clients, connections. The server reports it once, keeps
//! serving its clients, and recovers after the attack.

mod common;

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use bench::client::shm::{Client, Options};
use common::*;
use engine::topology::{Listen, Service};
use sys::local::LocalSocket;
use sys::{PortSpec, SocketNic, SocketOptions};
use wire::DropReason;
use wire::framing::Framing;
use wire::nic::{Nic, RxBatch, Transport, TxBatch};

const FRAMING: Framing = Framing::Fixed(32);

fn config(limits: &str) -> String {
    format!(
        "[limits]\n{limits}\n[[service]]\nname = \"echo\"\nkernel = \"echo\"\n\
         framing = \"fixed:32\"\nlisten = [\"tcp://127.0.0.1:0\", \"udp://127.0.0.1:0\"]\n"
    )
}

fn is_served(stream: &mut TcpStream, salt: usize) {
    let (request, reply) = well_framed(FRAMING, salt);
    assert_eq!(exchange(stream, &request, reply.len()), reply);
}

/// A client next to an attack, which must be answered without exception until it is stopped.
struct Bystander {
    stop: Arc<AtomicBool>,
    answered: Arc<AtomicU64>,
    threads: Vec<std::thread::JoinHandle<()>>,
}

impl Bystander {
    fn start(tcp: SocketAddr, udp: SocketAddr) -> Self {
        let (stop, answered) = (Arc::<AtomicBool>::default(), Arc::<AtomicU64>::default());
        let (mut stream, socket) = (tcp_client(tcp), udp_client(udp));
        let client = |mut exchange: Box<dyn FnMut(usize) + Send>| {
            let (stop, answered) = (stop.clone(), answered.clone());
            std::thread::spawn(move || {
                for salt in 0.. {
                    if stop.load(Ordering::Relaxed) {
                        return;
                    }
                    exchange(salt);
                    answered.fetch_add(1, Ordering::Relaxed);
                    std::thread::sleep(Duration::from_millis(1));
                }
            })
        };
        let threads = vec![
            client(Box::new(move |salt| is_served(&mut stream, salt))),
            client(Box::new(move |salt| {
                let (request, reply) = well_framed(FRAMING, salt);
                assert_eq!(ask(&socket, &request), reply);
            })),
        ];
        Self { stop, answered, threads }
    }

    fn stop(self) -> u64 {
        self.stop.store(true, Ordering::Relaxed);
        for thread in self.threads {
            thread.join().expect("every request of the bystander is answered");
        }
        self.answered.load(Ordering::Relaxed)
    }
}

/// Sets the soft limit of a running process.
fn limit_descriptors(process: u32, soft: u64) {
    let limit = format!("--nofile={soft}:");
    let done = Command::new("prlimit").args(["--pid", &process.to_string(), &limit]).status();
    assert!(done.expect("prlimit of util-linux").success(), "prlimit {limit}");
}

fn shed(served: &Served) -> u64 {
    served.metric("serval_worker_shed_connections_total{worker=\"0\"}")
}

#[test]
fn a_server_without_descriptors_keeps_serving_and_recovers() {
    let path = std::env::temp_dir().join(format!("serval-exhausted-{}", std::process::id()));
    let door = format!("[\"shm://{}\", \"tcp", path.display());
    let served = Served::start("exhausted", "", &config("idle_s = 600").replace("[\"tcp", &door));
    let (tcp, udp) = (served.services[0][0], served.services[0][1]);
    let bystander = Bystander::start(tcp, udp);
    let mut kept: Vec<TcpStream> = (0..20).map(|_| tcp_client(tcp)).collect();
    kept.iter_mut().enumerate().for_each(|(n, stream)| is_served(stream, n));
    let process = served.process.0.id();
    // Room for the metrics endpoint's client and two more.
    let limit = served.usage().descriptors + 3;
    let phase = Instant::now();
    limit_descriptors(process, limit);
    let before = served.usage().cpu_ticks;
    let mut refused = 0;
    // The metrics endpoint and the shared-memory port are on the control side, which has no descriptors either.
    let fill: Vec<TcpStream> = (0..10).map(|_| tcp_client(tcp)).collect();
    let knock = Options { depth: 4, timeout: Duration::from_millis(200) };
    for _ in 0..5 {
        assert!(Client::connect(&path, &knock).is_err(), "no descriptor for a region");
    }
    drop(fill);
    for round in 0..3 {
        let outside: Vec<TcpStream> = (0..100).map(|_| tcp_client(tcp)).collect();
        for mut stream in outside {
            let (request, reply) = well_framed(FRAMING, round);
            // A reset may arrive before or after the client's data.
            let sent = stream.write_all(&request).is_ok();
            let mut received = vec![0; reply.len()];
            refused += u64::from(!(sent && stream.read_exact(&mut received).is_ok()));
        }
        kept.iter_mut().enumerate().for_each(|(n, stream)| is_served(stream, round + n));
    }
    assert!(refused >= 3 * 90, "only {refused} of 300 were turned away");
    let ticks = served.usage().cpu_ticks - before;
    limit_descriptors(process, limit + 500);
    eventually("the connections turned away are counted", || shed(&served) >= refused);
    println!("{refused} turned away in {ticks} ticks, {} shed", shed(&served));
    let said = served.log().matches("no descriptor is free").count();
    // Once in ten seconds.
    let often = || 1 + phase.elapsed().as_secs() as usize / 10;
    assert!((1..=often().max(3)).contains(&said), "said {said} times:\n{}", served.log());
    // Everything works again, also for new clients.
    let mut in_memory = Client::connect(&path, &Options { timeout: PATIENCE, ..knock }).unwrap();
    in_memory.send(1, b"a message of thirty-two bytes...", PATIENCE).unwrap();
    let mut reply = [0; 2000];
    let answer = in_memory.receive(&mut reply, PATIENCE).unwrap().expect("an answer in time");
    assert_eq!(&reply[..answer.len], b"a message of thirty-two bytes...");
    let knocked = served.log().matches("a connection cannot be accepted").count();
    assert!(knocked <= often(), "said {knocked} times:\n{}", served.log());
    for n in 0..50 {
        is_served(&mut tcp_client(tcp), n);
    }
    assert!(bystander.stop() > 0);
    drop(kept);
    assert_eq!(served.finish().0, 0);
}

/// A file that is removed at the end of a test.
struct Left(PathBuf);

impl Drop for Left {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

#[test]
fn a_listener_without_a_descriptor_does_not_spin() {
    let control = std::env::temp_dir().join(format!("serval-idle-{}", std::process::id()));
    // An engine that ends in order removes it; one that is killed by a failed test does not.
    let _left = Left(control.clone());
    let environment = [("SERVAL_ENGINE_CONTROL", &*control)];
    let config = config("idle_s = 600");
    let served = Served::start_with("exhausted-idle", "polling = \"block\"", &config, &environment);
    let tcp = served.services[0][0];
    let mut kept = tcp_client(tcp);
    is_served(&mut kept, 1);
    let turns = || served.metric("serval_worker_turns_total{worker=\"0\"}");
    let (since, before, ticks) = (Instant::now(), turns(), served.usage().cpu_ticks);
    // Below the number of open descriptors: the reserve does not help, and clients wait in the backlog.
    limit_descriptors(served.process.0.id(), 3);
    let waiting: Vec<TcpStream> = (0..20).map(|_| tcp_client(tcp)).collect();
    let knocking = LocalSocket::connect(&control).unwrap();
    is_served(&mut kept, 2);
    std::thread::sleep(Duration::from_secs(2));
    is_served(&mut kept, 3);
    // The control socket must not spin either: a spinning thread takes all of a core, or its share of one.
    let (used, passed) = (served.usage().cpu_ticks - ticks, since.elapsed().as_millis() as u64);
    assert!(used * 10 < passed / 4, "{used} ticks in {passed} ms");
    drop(knocking);
    limit_descriptors(served.process.0.id(), 1000);
    // The backlog is checked once per millisecond; spinning would check a hundred times as often, even on a busy
    // machine.
    let (ms, made) = (since.elapsed().as_millis() as u64, turns() - before);
    println!("{made} turns in {ms} ms");
    assert!(made < 10 * ms, "{made} turns in {ms} ms");
    // Waiting clients are served now, except those for which the reserve was used.
    let (request, reply) = well_framed(FRAMING, 4);
    let answered = |mut stream: TcpStream| {
        let mut received = vec![0; reply.len()];
        let sent = stream.write_all(&request).is_ok();
        sent && stream.read_exact(&mut received).is_ok() && received == reply
    };
    let served_late = waiting.into_iter().map(answered).filter(|answered| *answered).count();
    assert!(served_late >= 15, "{served_late} of 20");
    drop(kept);
    assert_eq!(served.finish().0, 0);
}

#[test]
fn too_many_connections_are_refused_and_the_default_is_lowered() {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let serve_with = |limit: u32, name: &str, config: String| {
        let file = folder.join(format!("{name}.toml"));
        std::fs::write(&file, format!("schema = 1\n{config}")).unwrap();
        let mut command = Command::new("sh");
        command.args(["-c", &format!("ulimit -n {limit}; exec \"$0\" serve \"$1\"")]);
        command.arg(env!("CARGO_BIN_EXE_serval")).arg(&file).env("SERVAL_ENGINE_CONTROL", "off");
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    };
    let serve = |name: &str, config: String| serve_with(400, name, config);
    // What has no room at all is not told to ask for nothing.
    let refused =
        serve_with(60, "no-room", config("connections = 5000")).wait_with_output().unwrap();
    let text = String::from_utf8_lossy(&refused.stderr);
    assert_eq!(refused.status.code(), Some(2), "{text}");
    assert!(text.contains("60 descriptors") && !text.contains("or less"), "{text}");
    let refused = serve("too-many-asked", config("connections = 5000")).wait_with_output().unwrap();
    let text = String::from_utf8_lossy(&refused.stderr);
    assert_eq!(refused.status.code(), Some(2), "{text}");
    for part in ["limits.connections = 5000", "400 descriptors", "LimitNOFILE", "or less"] {
        assert!(text.contains(part), "{part:?} is missing: {text}");
    }
    // Enough for connections over TCP, but not if any of them may use shared memory.
    let door = folder.join("too-many-in-memory");
    let door = format!("[\"shm://{}\", \"tcp", door.display());
    let in_memory = config("connections = 200").replace("[\"tcp", &door);
    let mut refused = serve("too-many-in-memory", in_memory);
    let started = refused.stdout.as_mut().unwrap().read_exact(&mut [0; 6]).is_ok();
    if started {
        refused.kill().unwrap();
    }
    let refused = refused.wait_with_output().unwrap();
    let text = String::from_utf8_lossy(&refused.stderr);
    assert_eq!(refused.status.code(), Some(2), "{text}");
    assert!(text.contains("4 for a connection"), "{text}");
    let mut given_way = Peer(serve("too-many-default", config("")));
    let mut ready = [0; 6];
    given_way.0.stdout.as_mut().unwrap().read_exact(&mut ready).unwrap();
    assert_eq!(&ready, b"ready:");
    given_way.signal("TERM");
    let mut log = String::new();
    given_way.0.stderr.as_mut().unwrap().read_to_string(&mut log).unwrap();
    let said =
        log.lines().find(|line| line.contains("limits.connections is lower than its default"));
    let said = said.unwrap_or_else(|| panic!("{log}"));
    assert!(said.contains(" INFO ") && said.contains("`ulimit -n "), "{said}");
}

/// GSO batches of datagrams of both families: the ratio applies to each datagram, invalid ones are not answered, and
/// the default depends on who can reach the port.
#[test]
fn no_datagram_of_a_gso_batch_is_amplified_in_either_family() {
    let store = format!("{}:store", build_kernel("crates/server/tests/kernels/relay.cpp"));
    for (any, client) in [("0.0.0.0:0", "127.0.0.1:0"), ("[::]:0", "[::1]:0")] {
        for beyond in [true, false] {
            let address = if beyond { any } else { client }.parse().unwrap();
            let listen = Listen { transport: Transport::Udp, address };
            let server = start(topology(vec![Service::new("store", vec![listen], &store)]));
            let port = PortSpec { transport: Transport::Udp, address: client.parse().unwrap() };
            let mut nic = SocketNic::open(&[port], SocketOptions::default()).unwrap();
            let mut to = nic.local_addresses()[0];
            to.set_port(server.addresses()[0].1.address.port());
            let mut train = TxBatch::new(64, 4096);
            // 24 bytes for 7, 5 bytes for 7, none for a rejection; in one GSO batch.
            let requests = [b"version", b"get key", b"delete "];
            for request in requests.iter().cycle().take(60) {
                train.push(to, None, request.len(), |bytes| bytes.copy_from_slice(*request));
            }
            assert_eq!(nic.send(0, &mut train).sent, 60);
            let (mut long, mut short) = (0, 0);
            let wanted = if beyond { (0, 20) } else { (20, 20) };
            let mut replies = RxBatch::new(64, 65_536 + 1088);
            eventually("what may be answered is", || {
                nic.recv(0, &mut replies);
                for reply in &replies.items {
                    match replies.payload(reply) {
                        b"END\r\n" => short += 1,
                        b"VERSION of the kernel's\r\n" => long += 1,
                        other => panic!("{}", String::from_utf8_lossy(other)),
                    }
                }
                (long, short) == wanted
            });
            assert_accounts(&server);
            // provokes: reply_ratio
            let refused = dropped(&server, 0, DropReason::ReplyRatio);
            assert_eq!((refused, dropped(&server, 0, DropReason::KernelDrop)), (20 - long, 20));
            nic.recv(0, &mut replies);
            assert!(replies.items.is_empty(), "more than was allowed came back");
        }
    }
}

/// The first reply that is too long is logged with the key, and no other one.
#[test]
fn the_first_reply_that_is_too_long_for_its_request_is_logged() {
    let store = format!("{}:store", build_kernel("crates/server/tests/kernels/relay.cpp"));
    let service = |name: &str| {
        format!(
            "[[service]]\nname = \"{name}\"\nlisten = \"udp://127.0.0.1:0\"\nkernel = {store:?}\n"
        )
    };
    let config = format!("[limits]\nudp_reply_ratio = 3\n{}{}", service("long"), service("short"));
    let served = Served::start("reply-ratio", "", &config);
    let [long, short] = [0, 1].map(|service| udp_client(served.services[service][0]));
    // 5 bytes for 7, which is no drop, and 24 bytes for 7.
    assert_eq!(ask(&short, b"get key"), b"END\r\n");
    let line = "service \"long\" dropped a reply over UDP as reply_ratio";
    eventually("the drop is logged", || {
        long.send(b"version").unwrap();
        served.log().contains(line)
    });
    let before = served.dropped("long", DropReason::ReplyRatio);
    eventually("others are dropped", || {
        long.send(b"version").unwrap();
        served.dropped("long", DropReason::ReplyRatio) > before + 5
    });
    // The thread that logs looks at both services again and again.
    std::thread::sleep(Duration::from_millis(300));
    let log = served.log();
    assert_eq!(log.matches("as reply_ratio").count(), 1, "{log}");
    assert!(log.contains("limits.udp_reply_ratio"), "{log}");
    assert_eq!(served.drain(), 0);
}

/// Connections that end in all possible ways leave no resources.
#[test]
fn connections_that_end_in_any_way_leave_nothing() {
    let long = std::env::var_os("SERVAL_LONG").is_some();
    let cycles = if long { 20_000 } else { 4000 };
    // The time-out also applies to the bystander, which may have to wait for a core.
    let patience = "idle_s = 5\nslow_client_ms = 4000";
    let served = Served::start("churn", "workers = 2", &config(patience));
    let (tcp, udp) = (served.services[0][0], served.services[0][1]);
    let (request, _) = well_framed(FRAMING, 3);
    let cycle = |n: usize, silent: &mut Vec<TcpStream>| {
        let mut stream = tcp_client(tcp);
        match n % 5 {
            // No data.
            0 => {}
            // Half a message.
            1 => stream.write_all(&request[..1 + n % 31]).unwrap(),
            // A reply left unread: closing resets.
            2 => {
                stream.write_all(&request).unwrap();
                assert!(stream.peek(&mut [0]).unwrap() > 0);
            }
            3 => {
                is_served(&mut stream, n);
                stream.shutdown(Shutdown::Write).unwrap();
                assert_eq!(stream.read(&mut [0]).unwrap(), 0);
            }
            // Closed without notice: the server notices nothing until its time-out.
            _ if n % 100 == 4 => silent.push(stream),
            _ => is_served(&mut stream, n),
        }
    };
    let all_closed = || {
        let total =
            |what| served.metric(&format!("serval_connections_{what}_total{{service=\"echo\"}}"));
        eventually("all are closed", || total("accepted") == total("closed"));
    };
    let mut silent = Vec::new();
    for n in 0..cycles / 4 {
        cycle(n, &mut silent);
    }
    all_closed();
    let before = served.usage();
    let bystander = Bystander::start(tcp, udp);
    for n in 0..cycles {
        cycle(n, &mut silent);
    }
    for stream in &mut silent {
        assert_eq!(stream.read(&mut [0]).unwrap_or(0), 0, "a silent connection stays open");
    }
    assert!(bystander.stop() > 100);
    all_closed();
    let after = served.usage();
    assert_eq!((after.descriptors, after.threads), (before.descriptors, before.threads));
    let grown = after.resident_bytes.saturating_sub(before.resident_bytes);
    assert!(grown < 4 << 20, "{} KiB more after {cycles} connections", grown >> 10);
    println!("{cycles} connections: {} KiB more", grown >> 10);
    assert_eq!(served.finish().0, 0);
}
