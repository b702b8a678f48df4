//! A mixed load for a configurable time (`make soak MINUTES=60`): datagrams, streams, shared memory,
//! connections that come and go, garbage. Every reply is checked, every loss has a reason, no descriptor
//! and no thread is left behind, and memory does not grow. Without `SERVAL_SOAK_MINUTES` it is a look of
//! a few seconds, which is too short to say anything about memory.

mod common;

use std::io::{Read, Write};
use std::net::Shutdown;
use std::time::{Duration, Instant};

use bench::client::shm::{Client, Options};
use common::crowd::Crowd;
use common::*;
use serde_json::json;
use wire::DropReason;
use wire::nic::Transport;

/// A round of every kind of load and a sample take this long, at least.
const ROUND: Duration = Duration::from_secs(1);
/// How long the crowds ask in each round.
const ASKING: Duration = Duration::from_millis(150);
/// Fewer rounds show no trend.
const ROUNDS_OF_A_TREND: usize = 60;
/// What the resident memory may differ by between the second and the last quarter: pages that the
/// allocator had not touched before, not a leak, which never stops.
const GROWTH_BYTES_MAX: u64 = 2 << 20;

fn config(path: &str) -> String {
    let service = |name: &str, listen: &str, framing: &str| {
        format!(
            "[[service]]\nname = \"{name}\"\nlisten = [{listen}]\nframing = \"{framing}\"\n\
             kernel = \"echo\"\nmqueues = 8\nslots = 64\n"
        )
    };
    let (udp, tcp) = ("\"udp://127.0.0.1:0\"", "\"tcp://127.0.0.1:0\"");
    [
        service("udp", udp, "raw"),
        service("tcp", tcp, "length:u16"),
        service("noise", &format!("{udp}, {tcp}"), "line"),
        service("memory", &format!("\"shm://{path}\""), "raw"),
    ]
    .concat()
}

/// Clients of shared memory: one that stays, one for each round.
fn exchange_in_memory(client: &mut Client, round: usize, answered: &mut u64) {
    let mut reply = vec![0; client.reply_bytes_max()];
    for burst in 0..20 {
        let salt = |tag: u64| (tag as usize) + 31 * burst + 7 * round;
        for tag in 0..32 {
            client.try_send(tag, &pattern(1 + salt(tag) % 500, salt(tag))).unwrap();
        }
        client.publish();
        for _ in 0..32 {
            let answer = client.receive(&mut reply, PATIENCE).unwrap().expect("an answer in time");
            let expected = pattern(1 + salt(answer.tag) % 500, salt(answer.tag));
            assert_eq!((answer.lost, &reply[..answer.len]), (None, &expected[..]));
            *answered += 1;
        }
    }
}

/// Connections that come and go and say nothing, nonsense, half of something or all of it.
fn make_noise(served: &Served, random: &mut Random) {
    let (udp, tcp) = (served.services[2][0], served.services[2][1]);
    let socket = udp_client(udp);
    for n in 0..20 {
        let len = 1 + random.below(1500);
        // The replies are not read.
        let _ = socket.send(&random.bytes(len));
        let mut stream = tcp_client(tcp);
        match n % 4 {
            0 => {}
            1 => drop(stream.write_all(&random.bytes(len))),
            2 => {
                stream.write_all(b"half a li").unwrap();
                stream.shutdown(Shutdown::Write).unwrap();
                assert_eq!(stream.read(&mut [0]).unwrap(), 0);
            }
            _ => assert_eq!(exchange(&mut stream, b"a line\r\n", 8), b"a line\r\n"),
        }
    }
}

/// The middle one of the values of a part of the samples, in eighths of all of them.
fn median(samples: &[Usage], eighths: std::ops::Range<usize>, of: fn(&Usage) -> u64) -> u64 {
    let part = eighths.start * samples.len() / 8..eighths.end * samples.len() / 8;
    let mut values: Vec<u64> = samples[part].iter().map(of).collect();
    values.sort_unstable();
    values[values.len() / 2]
}

#[test]
fn a_mixed_load_leaves_the_server_as_it_was() {
    let minutes = std::env::var("SERVAL_SOAK_MINUTES").ok();
    let minutes: Option<f64> =
        minutes.map(|text| text.parse().expect("SERVAL_SOAK_MINUTES: a number"));
    let time = minutes.map_or(Duration::from_secs(4), |m| Duration::from_secs_f64(60.0 * m));
    let path = std::env::temp_dir().join(format!("serval-soak-{}", std::process::id()));
    let path = path.to_str().unwrap();
    // On a machine with much else to do one client may not have its turn for longer than the default.
    let engine = "workers = 2\n[limits]\nidle_s = 3600";
    let served = Served::start("soak", engine, &config(path));
    let before = served.usage();
    let mut crowds = [
        Crowd::connect(served.services[0][0], Transport::Udp, 50, 2),
        Crowd::connect(served.services[1][0], Transport::Tcp, 50, 4),
    ];
    let options = Options { depth: 64, timeout: PATIENCE };
    let mut stays = Client::connect(path.as_ref(), &options).unwrap();
    let mut random = Random::new(4);
    let mut samples = Vec::new();
    let mut in_memory = 0;
    let start = Instant::now();
    while start.elapsed() < time {
        let until = Instant::now() + ROUND;
        let quiet = Instant::now() + ASKING;
        crowds.iter_mut().for_each(Crowd::ask);
        while Instant::now() < quiet {
            crowds.iter_mut().for_each(Crowd::turn);
        }
        crowds.iter_mut().for_each(Crowd::stop_asking);
        eventually("every request is answered or given up", || {
            crowds.iter_mut().for_each(Crowd::turn);
            crowds.iter().all(Crowd::is_settled)
        });
        exchange_in_memory(&mut stays, samples.len(), &mut in_memory);
        let mut comes = Client::connect(path.as_ref(), &options).unwrap();
        exchange_in_memory(&mut comes, samples.len(), &mut in_memory);
        drop(comes);
        make_noise(&served, &mut random);
        samples.push(served.usage());
        std::thread::sleep(until.saturating_duration_since(Instant::now()));
    }
    let [udp, tcp] = &crowds;
    let (udp, tcp) = (udp.books(), tcp.books());
    drop(stays);
    crowds.into_iter().for_each(Crowd::leave);
    // Fewer than at first is no leak: at the start a thread may still have a file of /proc open, or end.
    let deadline = Instant::now() + PATIENCE;
    loop {
        let now = served.usage();
        if now.descriptors <= before.descriptors && now.threads <= before.threads {
            break;
        }
        assert!(Instant::now() < deadline, "left behind: {now:?}, before {before:?}");
        std::thread::sleep(Duration::from_millis(10));
    }
    let noise = served.dropped("noise", DropReason::TooLong);
    let (code, last) = served.finish();
    let resident = |eighths| median(&samples, eighths, |usage| usage.resident_bytes);
    let (second, fourth) = (resident(2..4), resident(6..8));
    let descriptors = [2..4, 6..8].map(|part| median(&samples, part, |usage| usage.descriptors));
    let threads = [2..4, 6..8].map(|part| median(&samples, part, |usage| usage.threads));
    let summary = json!({
        "event": "soak", "seconds": start.elapsed().as_secs(), "samples": samples.len(),
        "answered": { "udp": udp.answered, "tcp": tcp.answered, "memory": in_memory },
        "lost": { "udp": udp.lost, "tcp": tcp.lost }, "noise_too_long": noise,
        "resident_bytes": { "second_quarter": second, "last_quarter": fourth },
        "resident_growth_bytes_max": GROWTH_BYTES_MAX,
        "descriptors": descriptors, "threads": threads, "server": last,
    });
    println!("{summary}");
    assert_eq!((code, last["clean"].as_bool()), (0, Some(true)));
    for (service, answered) in [udp.answered, tcp.answered].into_iter().enumerate() {
        assert_eq!(last["services"][service]["replied"], answered, "{summary}");
    }
    assert_eq!(last["services"][3]["replied"], in_memory);
    assert_eq!(tcp.lost, 0);
    if samples.len() >= ROUNDS_OF_A_TREND {
        assert!(fourth <= second + GROWTH_BYTES_MAX, "memory grows: {summary}");
        assert_eq!(descriptors[0], descriptors[1], "{summary}");
        assert_eq!(threads[0], threads[1], "{summary}");
    }
}
