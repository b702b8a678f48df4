//! Servers and machines that spoil a measurement: a run in which something was wrong is not trusted.

use std::io::{Read as _, Write as _};
use std::net::TcpListener;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Instant;

use bench::client::workload::{Custom, Expect};
use wire::framing::{ParseState, Parsed};

use super::*;

/// What is wrong with an answer.
#[derive(Clone, Copy)]
enum Spoil {
    Value,
    /// The block of data does not end where it should.
    Ending,
    /// Additional bytes follow that are not an answer.
    Beyond,
}

/// A TCP server on a thread of its own that cuts what it reads into messages: `answer` is given each.
struct FakeTcp {
    target: Target,
    stop: Arc<AtomicBool>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl FakeTcp {
    fn start(framing: Framing, mut answer: impl FnMut(&[u8]) -> Vec<u8> + Send + 'static) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        listener.set_nonblocking(true).unwrap();
        let target = Target::Tcp(listener.local_addr().unwrap());
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = stop.clone();
        let thread = std::thread::spawn(move || {
            let mut streams = Vec::new();
            while !stopped.load(Ordering::Relaxed) {
                if let Ok((stream, _)) = listener.accept() {
                    stream.set_nonblocking(true).unwrap();
                    streams.push((stream, Vec::new(), ParseState::default()));
                }
                for (stream, read, state) in &mut streams {
                    let mut bytes = [0; 65_536];
                    let count = stream.read(&mut bytes).unwrap_or(0);
                    read.extend_from_slice(&bytes[..count]);
                    while let Ok(Parsed::Message { consumed, .. }) =
                        framing.parse_request(state, read, 1 << 20)
                    {
                        let reply = answer(&read[..consumed]);
                        read.drain(..consumed);
                        // The client may have closed; what does not fit at once is lost, as it may be.
                        let _ = stream.write(&reply);
                    }
                }
                std::thread::sleep(Duration::from_micros(200));
            }
        });
        Self { target, stop, thread: Some(thread) }
    }

    fn memcached(answer: impl FnMut(&[u8]) -> Vec<u8> + Send + 'static) -> Self {
        Self::start(Framing::Memcached, answer)
    }

    /// A memcached that is right until it has been asked `gets` times.
    fn liar(gets: u64) -> Self {
        Self::spoiling(gets, Spoil::Value)
    }

    fn spoiling(gets: u64, spoil: Spoil) -> Self {
        let mut store = std::collections::HashMap::new();
        let mut asked = 0;
        Self::memcached(move |request| {
            let line = request.split(|byte| *byte == b'\r').next().unwrap();
            let key = line.split(|byte| *byte == b' ').nth(1).unwrap().to_vec();
            let data = &request[line.len() + 2..];
            if line.starts_with(b"set ") {
                store.insert(key, data.to_vec());
                return b"STORED\r\n".to_vec();
            }
            asked += 1;
            let mut value: Vec<u8> = store[&key].clone();
            let (len, mut end) = (value.len() - 2, &b"END\r\n"[..]);
            match spoil {
                _ if asked <= gets => {}
                Spoil::Value => value[5] ^= 1,
                Spoil::Ending => value[len] = b'x',
                Spoil::Beyond => end = b"END\r\nVALUE of nothing\r\n",
            }
            let head = format!("VALUE {} 0 {len}\r\n", String::from_utf8_lossy(&key));
            [head.as_bytes(), &value, end].concat()
        })
    }

    fn run(&self) -> Result<Report, BenchError> {
        bench::run(&plan(&self.target, memcached_work("memcached:100:100"), 4))
    }
}

impl Drop for FakeTcp {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.take().unwrap().join().unwrap();
    }
}

/// A run; again if the machine was so busy that answers came too late.
fn in_time(fake: &FakeTcp) -> Result<Report, BenchError> {
    let deadline = Instant::now() + PATIENCE;
    loop {
        let result = fake.run();
        let late = matches!(result, Err(BenchError::Unstored { .. }));
        if !late || Instant::now() >= deadline {
            return result;
        }
    }
}

#[test]
fn a_server_that_is_not_memcached_is_refused_and_wrong_values_are_detected() {
    type Answer = fn(&[u8]) -> Vec<u8>;
    let answers: [Answer; 4] = [
        |_| b"HTTP/1.1 400 Bad Request\r\n\r\n".to_vec(),
        |_| b"ERROR\r\n".to_vec(),
        |request| request.to_vec(),
        // It forgets everything.
        |request| if request[0] == b's' { b"STORED\r\n".to_vec() } else { b"END\r\n".to_vec() },
    ];
    let strangers = answers.map(FakeTcp::memcached).into_iter().chain([FakeTcp::liar(0)]);
    for (number, stranger) in strangers.enumerate() {
        let error = in_time(&stranger).expect_err("it is no memcached");
        assert!(matches!(error, BenchError::NotMemcached { .. }), "{number}: {error}");
        assert!(error.to_string().contains("is it a memcached"), "{error}");
    }
    for spoil in [Spoil::Value, Spoil::Ending, Spoil::Beyond] {
        let report = in_time(&FakeTcp::spoiling(20, spoil)).unwrap();
        assert!(matches!(report.void(), Some(Void::Wrong(1.., _))), "{report:?}");
    }
    // Without an answer nothing says what it is.
    let error = FakeTcp::memcached(|_| Vec::new()).run().expect_err("it stores nothing");
    assert!(matches!(error, BenchError::Unstored { .. }), "{error}");
    // An address of its own: another test may get the port of 127.0.0.1 meanwhile.
    let closed = TcpListener::bind("127.0.0.99:0").unwrap().local_addr().unwrap();
    let closed = bench::run(&plan(&Target::Tcp(closed), memcached_work("memcached"), 4));
    assert!(matches!(closed, Err(BenchError::Unreachable(_))), "{closed:?}");
}

#[test]
fn a_slow_memcached_is_not_reported_as_another_server() {
    let mut sets = 0;
    // The fifth set is never answered.
    let slow = FakeTcp::memcached(move |_| {
        sets += 1;
        if sets == 5 { Vec::new() } else { b"STORED\r\n".to_vec() }
    });
    let error = slow.run().expect_err("not all is stored");
    assert!(matches!(error, BenchError::Unstored { .. }), "{error}");
    let plan = plan(&slow.target, memcached_work("memcached:100:100"), 4);
    plan.cancel.store(true, Ordering::Relaxed);
    assert_eq!(bench::run(&plan).unwrap().void(), Some(&Void::Interrupted));
}

/// A UDP server on a thread of its own: `answer` is given each request and its number.
struct Fake {
    target: Target,
    stop: Arc<AtomicBool>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Fake {
    fn start(mut answer: impl FnMut(u64, &[u8]) -> Vec<Vec<u8>> + Send + 'static) -> Self {
        let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
        socket.set_read_timeout(Some(Duration::from_millis(10))).unwrap();
        let target = Target::Udp(socket.local_addr().unwrap());
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = stop.clone();
        let thread = std::thread::spawn(move || {
            let (mut buffer, mut n) = ([0; 4096], 0);
            while !stopped.load(Ordering::Relaxed) {
                let Ok((len, peer)) = socket.recv_from(&mut buffer) else { continue };
                for reply in answer(n, &buffer[..len]) {
                    // The client may have closed the socket it asked from.
                    let _ = socket.send_to(&reply, peer);
                }
                n += 1;
            }
        });
        Self { target, stop, thread: Some(thread) }
    }

    fn report(&self, change: impl FnOnce(&mut Plan)) -> Report {
        let mut plan = plan(&self.target, Work::Echo { bytes: 32 }, 4);
        plan.timeout = Some(Duration::from_millis(50));
        change(&mut plan);
        bench::run(&plan).unwrap()
    }
}

impl Drop for Fake {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.take().unwrap().join().unwrap();
    }
}

fn burst(plan: &mut Plan) {
    plan.class = Some(Class::T2);
}

#[test]
fn one_wrong_reply_spoils_a_run() {
    for change in [|_: &mut Plan| (), burst] {
        let fake = Fake::start(|n, request| {
            let mut reply = request.to_vec();
            reply[20] ^= u8::from(n == 50);
            vec![reply]
        });
        let report = fake.report(change);
        assert_eq!(report.void(), Some(&Void::Wrong(1, "")), "{report:?}");
        assert_eq!(report.to_json()["trusted"], false);
    }
}

#[test]
fn repeated_replies_are_noticed_and_are_not_taken_for_others() {
    for change in [|_: &mut Plan| (), burst] {
        let fake =
            Fake::start(|n, request| vec![request.to_vec(); if n % 10 == 9 { 2 } else { 1 }]);
        let report = fake.report(change);
        assert!(matches!(report.void(), Some(Void::Duplicated(1..))), "{report:?}");
        assert_eq!(report.wrong, 0, "{report:?}");
    }
}

#[test]
fn a_server_that_ends_makes_the_run_void() {
    for change in [|_: &mut Plan| (), burst] {
        let fake = Fake::start(|n, request| if n < 40 { vec![request.to_vec()] } else { vec![] });
        let report = fake.report(change);
        assert!(matches!(report.void(), Some(Void::Silent(..))), "{report:?}");
    }
}

#[test]
fn losses_make_a_closed_loop_void_and_are_counted_in_an_open_one() {
    let open = |plan: &mut Plan| plan.mode = Mode::Open { rate: 2000.0 };
    for (closed, change) in [(true, (|_| ()) as fn(&mut Plan)), (true, burst), (false, open)] {
        let fake =
            Fake::start(|n, request| if n % 50 == 7 { vec![] } else { vec![request.to_vec()] });
        let report = fake.report(change);
        assert!(report.lost > 0 && report.wrong == 0 && report.duplicated == 0, "{report:?}");
        // (Where the machine gives the server no turn at the end, it looks as if it had ended.)
        let told = match report.void() {
            Some(Void::Lost(lost)) => Some(*lost),
            Some(Void::Silent(_, _, lost)) if closed => Some(*lost),
            _ => None,
        };
        assert_eq!(told, closed.then_some(report.lost), "{report:?}");
    }
}

#[test]
fn late_replies_are_neither_wrong_nor_repeated() {
    // Every tenth answer comes two time-outs later.
    let held = Arc::new(AtomicU64::new(0));
    let count = held.clone();
    let mut waiting = Vec::new();
    let fake = Fake::start(move |n, request| {
        if n % 10 == 9 {
            waiting.push((Instant::now(), request.to_vec()));
            count.fetch_add(1, Ordering::Relaxed);
            return vec![];
        }
        let (ripe, rest) = std::mem::take(&mut waiting)
            .into_iter()
            .partition::<Vec<_>, _>(|(at, _)| at.elapsed() > Duration::from_millis(100));
        waiting = rest;
        ripe.into_iter().map(|(_, reply)| reply).chain([request.to_vec()]).collect()
    });
    let report = fake.report(|plan| {
        burst(plan);
        plan.connections = Some(1);
    });
    assert!(held.load(Ordering::Relaxed) > 0 && report.late > 0, "{report:?}");
    assert_eq!((report.wrong, report.duplicated), (0, 0), "{report:?}");
}

#[test]
fn an_unusable_core_makes_the_run_void() {
    let fake = Fake::start(|_, request| vec![request.to_vec()]);
    let report = fake.report(|plan| plan.cores = vec![1023]);
    assert!(matches!(report.void(), Some(Void::NotPinned { core: 1023, .. })), "{report:?}");
    assert_eq!((report.sent, report.rate), (0, 0.0));
}

#[test]
fn an_interrupted_run_is_void() {
    let fake = Fake::start(|_, request| vec![request.to_vec()]);
    let report = fake.report(|plan| {
        plan.duration = Duration::from_secs(3600);
        let cancel = plan.cancel.clone();
        std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(200));
            cancel.store(true, Ordering::Relaxed);
        });
    });
    assert_eq!(report.void(), Some(&Void::Interrupted));
}

#[test]
fn a_rate_that_cannot_be_sent_makes_the_run_void() {
    // One answer a millisecond, in turn: at most a thousand a second, and arrivals pile up.
    let fake = Fake::start(|_, request| {
        std::thread::sleep(Duration::from_millis(1));
        vec![request.to_vec()]
    });
    let report = fake.report(|plan| {
        plan.mode = Mode::Open { rate: 1e6 };
        // What the host kernel had no room for is lost, and waited for as long as this.
        plan.timeout = Some(Duration::from_secs(2));
        plan.duration = Duration::from_millis(300);
    });
    let told = matches!(report.void(), Some(Void::Unsent(..) | Void::Few(_)));
    assert!(told, "{report:?}");
}

#[test]
fn an_untrusted_run_shows_its_numbers_marked_and_fails() {
    let fake = Fake::start(|n, request| vec![request.to_vec(); if n > 10 { 2 } else { 1 }]);
    let target = fake.target.to_string();
    let plot = std::env::temp_dir().join(format!("serval-untrusted-{}.svg", std::process::id()));
    let arguments = [&target, "--window", "1", "--plot", plot.to_str().unwrap()];
    let output = command("500ms", &arguments);
    assert_eq!(output.status.code(), Some(1));
    let (out, err) = (String::from_utf8_lossy(&output.stdout).into_owned(), stderr(&output));
    assert!(out.contains("/s") && out.contains("NOT TRUSTED, 1 in flight: "), "{out}");
    assert!(err.contains("1 in flight is not trusted") && err.contains("were duplicates"), "{err}");
    assert_eq!(err.trim_end().lines().count(), 1, "{err}");
    let svg = std::fs::read_to_string(&plot).unwrap();
    std::fs::remove_file(&plot).unwrap();
    assert!(svg.contains("class=\"m0\"") && svg.contains("NOT TRUSTED"), "{svg}");

    let output = command("500ms", &[&target, "--window", "1", "--json"]);
    assert_eq!(output.status.code(), Some(1));
    let json: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let run = &json["runs"][0];
    assert_eq!(run["trusted"], false, "{json}");
    assert!(run["rate"].as_f64().unwrap() > 0.0, "{json}");
    assert!(run["reasons"][0]["reason"].as_str().unwrap().contains("were duplicates"), "{json}");
    // No option accepts it, not even the one that `command` gives.
    assert!(run["reasons"][0]["accepted_by"].is_null(), "{json}");
}

/// Equal replies to equal requests cannot be told apart, but they can be counted.
#[test]
fn duplicate_or_changed_replies_to_a_custom_message_are_detected() {
    let twice = Fake::start(|n, request| vec![request.to_vec(); if n == 30 { 2 } else { 1 }]);
    let changed = Fake::start(|n, request| match n {
        30 => vec![b"wrong".to_vec()],
        _ => vec![request.to_vec()],
    });
    let silent = Fake::start(|_, _| vec![]);
    let own = |fake: &Fake| {
        let target = fake.target.to_string();
        command("500ms", &[&target, "--payload-hex", "616263", "--expect", "echo", "--window", "2"])
    };
    for (fake, told) in [(&twice, "were duplicates"), (&changed, "replies were wrong")] {
        let output = own(fake);
        assert_eq!(output.status.code(), Some(1));
        assert!(stderr(&output).contains(told), "{}", stderr(&output));
    }
    assert!(stderr(&own(&silent)).contains("does not answer the payload"));
}

/// The same on a connection, whose requests the second reply shifts.
#[test]
fn a_duplicate_reply_on_a_connection_is_detected_although_all_are_equal() {
    let mut count = 0;
    let fake = FakeTcp::start(Framing::LengthU16, move |request| {
        count += 1;
        request.repeat(if count == 30 { 2 } else { 1 })
    });
    let custom = Custom { payload: b"abc".to_vec(), expect: Expect::Echo };
    let report = bench::run(&plan(&fake.target, Work::Custom(Arc::new(custom)), 2)).unwrap();
    assert!(matches!(report.void(), Some(Void::Duplicated(1..))), "{report:?}");
}

#[test]
fn a_client_without_its_core_reports_it() {
    // As many busy threads as it takes to have every core, wherever the client goes.
    let stop = Arc::new(AtomicBool::new(false));
    let busy: Vec<_> = (0..4 * std::thread::available_parallelism().unwrap().get())
        .map(|_| {
            let stop = stop.clone();
            std::thread::spawn(move || while !stop.load(Ordering::Relaxed) {})
        })
        .collect();
    let fake = Fake::start(|_, request| vec![request.to_vec()]);
    let report = fake.report(|plan| {
        plan.stolen_max = 0.05;
        plan.timeout = Some(PATIENCE);
        plan.duration = Duration::from_secs(1);
    });
    stop.store(true, Ordering::Relaxed);
    busy.into_iter().for_each(|thread| thread.join().unwrap());
    assert!(matches!(report.void(), Some(Void::Stolen(_))), "{report:?}");
    assert!(report.has_numbers() && !report.is_trusted(), "{report:?}");
    let option = report.void().unwrap().accepted_by().unwrap();
    let percent: f64 = option.strip_prefix("--stolen-max ").unwrap().parse().unwrap();
    assert!(percent / 100.0 > report.stolen.min(0.99), "{option}: {report:?}");
}
