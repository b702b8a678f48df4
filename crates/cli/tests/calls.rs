//! What a worker asks of the host kernel on the way of messages, as strace(1) sees it: one call for all that is
//! there, and never to wait for a lock.

mod common;

use std::collections::BTreeMap;
use std::fs;
use std::io::{Read as _, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use common::*;

/// Messages that wait for the worker at the beginning of each round.
const DATAGRAMS: usize = 48;
const CONNECTIONS: usize = 3;
const REQUESTS: usize = 8;
/// Of a request on a connection, with its length before it.
const REQUEST_BYTES: usize = 52;
/// What a round brings on all connections.
const BYTES: usize = CONNECTIONS * REQUESTS * REQUEST_BYTES;
const ROUNDS: usize = 20;

/// What a worker may call while it serves; `futex`, which waits for a lock, is not among it.
const CALLS: &[&str] =
    &["epoll_wait", "ppoll", "restart_syscall", "recvmmsg", "sendmmsg", "recvfrom", "sendto"];

/// A call as strace writes it down.
#[derive(Debug)]
struct Call {
    name: String,
    /// The descriptor, where the first argument is one.
    file: Option<u32>,
    /// What came back; `None` for an error.
    result: Option<u32>,
}

impl Call {
    /// `None` for lines about signals.
    fn read(line: &str) -> Option<Self> {
        let (name, arguments) = line.split_once('(')?;
        if !name.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_') {
            return None;
        }
        // (An error is -1, a call that was broken off has a question mark: neither begins with a digit.)
        let digits =
            |text: &str| text.split(|c: char| !c.is_ascii_digit()).next()?.parse::<u32>().ok();
        let result = line.rsplit_once(" = ").and_then(|(_, result)| digits(result));
        Some(Self { name: name.to_owned(), file: digits(arguments), result })
    }
}

/// A thread under strace.
struct Trace {
    strace: Peer,
    file: PathBuf,
}

impl Trace {
    /// `None` where strace is not installed or may not trace, having said so.
    fn start(thread: u32) -> Option<Self> {
        let file = Path::new(env!("CARGO_TARGET_TMPDIR")).join("calls.strace");
        let _ = fs::remove_file(&file);
        let mut command = Command::new("strace");
        command.args(["-s", "0", "-p", &thread.to_string(), "-o"]).arg(&file);
        let Ok(mut strace) = command.stdin(Stdio::null()).stderr(Stdio::piped()).spawn() else {
            println!("SKIPPED: no strace here; `make setup-test` installs it");
            return None;
        };
        let mut errors = strace.stderr.take().unwrap();
        let mut said = Vec::new();
        let mut byte = [0];
        // It says on one line that it is attached, or why not.
        while errors.read(&mut byte).unwrap() > 0 && byte[0] != b'\n' {
            said.push(byte[0]);
        }
        let said = String::from_utf8_lossy(&said).into_owned();
        if !said.contains("attached") {
            println!("SKIPPED: strace may not trace here: {said}");
            return None;
        }
        Some(Self { strace: Peer(strace), file })
    }

    /// Lets go of the thread; what was written down.
    fn finish(mut self) -> String {
        self.strace.signal("INT");
        eventually("strace ends", || self.strace.0.try_wait().unwrap().is_some());
        fs::read_to_string(&self.file).unwrap()
    }
}

fn worker_thread(process: u32) -> u32 {
    let tasks = fs::read_dir(format!("/proc/{process}/task")).unwrap();
    let worker = tasks
        .map(|task| task.unwrap().path())
        .find(|task| fs::read_to_string(task.join("comm")).unwrap().trim() == "serval-worker-0");
    worker.unwrap().file_name().unwrap().to_str().unwrap().parse().unwrap()
}

#[test]
fn a_worker_makes_one_call_for_all_waiting_messages() {
    let service = |name: &str, listen: &str, framing: &str| {
        format!(
            "[[service]]\nname = \"{name}\"\nlisten = [\"{listen}://127.0.0.1:0\"]\n\
             framing = \"{framing}\"\nkernel = \"echo\"\nmqueues = 8\nslots = 64\n"
        )
    };
    let config = service("udp", "udp", "raw") + &service("tcp", "tcp", "length:u16");
    let served = Served::start("calls", "workers = 1", &config);
    let client = udp_client(served.services[0][0]);
    let mut streams: Vec<_> = (0..CONNECTIONS).map(|_| tcp_client(served.services[1][0])).collect();
    let mut exchange_all = |round: usize, ready: &dyn Fn()| {
        let datagram = |n: usize| pattern(100 + n, round);
        (0..DATAGRAMS).for_each(|n| assert!(client.send(&datagram(n)).unwrap() > 0));
        let message = |n: usize| {
            let body = pattern(REQUEST_BYTES - 2, round + n);
            [&(body.len() as u16).to_be_bytes()[..], &body].concat()
        };
        let batch: Vec<u8> = (0..REQUESTS).flat_map(message).collect();
        streams.iter_mut().for_each(|stream| stream.write_all(&batch).unwrap());
        ready();
        let mut lengths: Vec<usize> =
            (0..DATAGRAMS).map(|_| client.recv(&mut [0; 1000]).unwrap()).collect();
        lengths.sort_unstable();
        assert_eq!(lengths, (100..100 + DATAGRAMS).collect::<Vec<_>>(), "every one is answered");
        for stream in &mut streams {
            let mut replies = vec![0; batch.len()];
            stream.read_exact(&mut replies).unwrap();
            assert_eq!(replies, batch);
        }
    };
    exchange_all(0, &|| {});
    let process = &served.process;
    let Some(trace) = Trace::start(worker_thread(process.0.id())) else { return };
    for round in 1..=ROUNDS {
        process.suspend();
        exchange_all(round, &|| process.signal("CONT"));
    }
    let text = trace.finish();
    let rounds = divide(&text);
    assert_eq!(rounds.len(), ROUNDS, "{text}");
    let once = rounds.iter().filter(|calls| asks_once(calls, &text)).count();
    // Now and then a turn leaves replies to the next one.
    assert!(2 * once > ROUNDS, "{once} rounds of {ROUNDS} sent everything at once:\n{text}");
    assert_eq!(served.drain(), 0);
}

/// A round has begun when the worker waits after what the one before sent, which had received all that is its own:
/// the client sends when it has every answer. (What strace says of the stops in between does not tell: a thread that
/// continues before strace gets the event of its stop is not reported as stopped.)
fn divide(text: &str) -> Vec<Vec<Call>> {
    let mut rounds = vec![Vec::new()];
    let (mut datagrams, mut bytes) = (0, 0);
    for call in text.lines().filter_map(Call::read) {
        let count = call.result.unwrap_or(0) as usize;
        if call.name.starts_with("recv") && count > 0 && datagrams >= DATAGRAMS && bytes >= BYTES {
            (datagrams, bytes) = (0, 0);
            let sends = |call: &Call| call.name.starts_with("send");
            let round: &mut Vec<Call> = rounds.last_mut().expect("there is one");
            let sent = round.iter().rposition(sends).map_or(0, |last| last + 1);
            let waited = round.split_off(sent);
            rounds.push(waited);
        }
        match &*call.name {
            "recvmmsg" => datagrams += count,
            "recvfrom" => bytes += count,
            _ => {}
        }
        rounds.last_mut().expect("there is one").push(call);
    }
    rounds
}

/// What a round received was read in one call for each port and connection, and sent in two at most;
/// returns whether it was sent in one.
fn asks_once(calls: &[Call], text: &str) -> bool {
    let mut moved: BTreeMap<(&str, Option<u32>), usize> = BTreeMap::new();
    for call in calls {
        assert!(CALLS.contains(&&*call.name), "{call:?} has no place on the way:\n{text}");
        if call.result > Some(0) {
            let file = call.file.filter(|_| call.name != "ppoll");
            *moved.entry((&call.name, file)).or_default() += 1;
        }
    }
    let of = |name: &str| -> Vec<usize> {
        moved.iter().filter(|(key, _)| key.0 == name).map(|(_, count)| *count).collect()
    };
    assert_eq!(of("recvmmsg"), [1], "one receive for the port:\n{text}");
    assert_eq!(of("recvfrom"), [1; CONNECTIONS], "one read for each connection:\n{text}");
    let readiness = [of("epoll_wait"), of("ppoll")].concat();
    assert!(readiness.iter().all(|count| *count <= 2), "{readiness:?} for readiness:\n{text}");
    let (datagrams, streams) = (of("sendmmsg"), of("sendto"));
    assert_eq!((datagrams.len(), streams.len()), (1, CONNECTIONS), "{text}");
    let sent = [datagrams, streams].concat();
    assert!(sent.iter().all(|count| *count <= 2), "{sent:?} to send:\n{text}");
    sent.iter().all(|count| *count == 1)
}

#[test]
fn a_round_begins_when_the_one_before_has_received_and_sent_everything() {
    let text = "recvmmsg(8, [...], 64, MSG_DONTWAIT, NULL) = 40\n\
                sendmmsg(8, [...], 40, MSG_DONTWAIT) = 40\n\
                epoll_wait(5, [...], 256, 0) = 2\n\
                recvmmsg(8, [...], 64, MSG_DONTWAIT, NULL) = 8\n\
                recvfrom(16, \"\"..., 16384, 0, NULL, NULL) = 1248\n\
                sendto(16, \"\"..., 1248, MSG_NOSIGNAL, NULL, 0) = 1248\n\
                ppoll([...], 2, {...}, NULL, 8) = ? ERESTARTNOHAND (To be restarted if no handler)\n\
                --- stopped by SIGSTOP ---\n\
                epoll_wait(5, [...], 256, 0) = 3\n\
                recvmmsg(8, 0x55f5, 64, MSG_DONTWAIT, NULL) = -1 EAGAIN (Resource temporarily unavailable)\n\
                recvfrom(16, \"\"..., 16384, 0, NULL, NULL) = 1248\n\
                recvmmsg(8, [...], 64, MSG_DONTWAIT, NULL) = 48\n\
                epoll_wait(5, [], 256, 0) = 0\n";
    let results = |round: &Vec<Call>| round.iter().map(|call| call.result).collect();
    let rounds: Vec<Vec<Option<u32>>> = divide(text).iter().map(results).collect();
    let first = [40, 40, 2, 8, 1248, 1248].map(Some).to_vec();
    assert_eq!(rounds, [first, vec![None, Some(3), None, Some(1248), Some(48), Some(0)]]);
}
