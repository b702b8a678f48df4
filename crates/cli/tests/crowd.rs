//! Clients by the thousand: every reply is checked, what is accepted is answered, what is lost has a
//! reason, and what clients leave open costs little.

mod common;

use std::time::{Duration, Instant};

use common::crowd::{Books, Crowd};
use common::*;
use serde_json::Value as Json;
use wire::DropReason;
use wire::nic::Transport;

/// A minute with `SERVAL_LONG=1`, else a look.
fn duration() -> Duration {
    Duration::from_secs(if std::env::var_os("SERVAL_LONG").is_some() { 60 } else { 5 })
}

/// Two services that answer with what they are asked, one for each transport.
fn config(limits: &str) -> String {
    let service = |transport: &str, more: &str| {
        format!(
            "[[service]]\nname = \"{transport}\"\nlisten = \"{transport}://127.0.0.1:0\"\n\
             framing = \"length:u16\"\nkernel = \"echo\"\nmqueues = 32\n{more}\n"
        )
    };
    // Fewer places than 1 000 TCP clients have requests in flight: they have to wait.
    let (datagrams, streams) = (service("udp", "slots = 64"), service("tcp", "slots = 16"));
    format!("[limits]\n{limits}\n{datagrams}{streams}")
}

/// Lost by the host kernel before the service, lost in the service: as the server counts them.
fn losses(counted: impl Fn(DropReason) -> u64) -> (u64, u64) {
    let request = |reason: &&DropReason| reason.scope() == wire::DropScope::Request;
    let inside = DropReason::ALL.iter().filter(request).map(|reason| counted(*reason)).sum();
    (counted(DropReason::SocketOverflow), inside)
}

/// Packets that the host kernel has thrown away before any socket, as a flood over loopback makes it do
/// (net.core.netdev_max_backlog): no socket knows of them, so no server does.
fn lost_before_sockets() -> u64 {
    let stat = std::fs::read_to_string("/proc/net/softnet_stat").unwrap_or_default();
    let dropped = |line: &str| u64::from_str_radix(line.split_whitespace().nth(1)?, 16).ok();
    stat.lines().filter_map(dropped).sum()
}

/// The server's last words about a service are what its clients know, but for `unseen` datagrams that no socket saw.
fn assert_counters_agree(service: &Json, books: Books, unseen: u64) {
    let of = |name: &str| service[name].as_u64().unwrap();
    let counted = |reason: DropReason| service["drops"][reason.name()].as_u64().unwrap_or(0);
    let (outside, inside) = losses(counted);
    let context = format!("{service}\n{books:?}");
    assert_eq!(of("received") + outside + unseen, books.sent, "{context}");
    assert_eq!(of("replied"), books.answered, "{context}");
    assert_eq!(of("received"), of("replied") + inside, "{context}");
    assert_eq!(outside + inside + unseen, books.lost, "{context}");
}

/// Clients of both services ask for a while, then leave; what they and the server know must agree.
fn crowds_of(served: Served, clients: usize, time: Duration) -> [Books; 2] {
    let before_sockets = lost_before_sockets();
    let mut udp = Crowd::connect(served.services[0][0], Transport::Udp, clients, 2);
    let mut tcp = Crowd::connect(served.services[1][0], Transport::Tcp, clients, 4);
    udp.ask();
    tcp.ask();
    let until = Instant::now() + time;
    while Instant::now() < until {
        udp.turn();
        tcp.turn();
    }
    udp.stop_asking();
    tcp.stop_asking();
    eventually("every request is answered or given up", || {
        udp.turn();
        tcp.turn();
        udp.is_settled() && tcp.is_settled()
    });
    // A reply that timed out may still be in flight; lost requests have a reason on the server.
    let (mut before, mut changed) = (None, Instant::now());
    eventually("every lost datagram has a reason", || {
        udp.turn();
        let (outside, inside) = losses(|reason| served.dropped("udp", reason));
        let lost = udp.books().lost;
        if before.replace((outside, inside, lost)) != Some((outside, inside, lost)) {
            println!("{outside} lost outside, {inside} inside, clients miss {lost}");
            changed = Instant::now();
        }
        // Only when the number no longer changes; it includes packets of other programs, so it is a maximum.
        let final_word = changed.elapsed() > Duration::from_secs(5);
        let unseen = if final_word { lost_before_sockets() - before_sockets } else { 0 };
        (outside + inside..=outside + inside + unseen).contains(&lost)
    });
    let (of_datagrams, of_streams) = (udp.books(), tcp.books());
    println!("datagrams {of_datagrams:?}, streams {of_streams:?}");
    udp.leave();
    tcp.leave();
    let (code, last) = served.finish();
    assert_eq!(code, 0);
    assert_eq!(last["clean"], true, "{last}");
    let (outside, inside, lost) = before.expect("looked at least once");
    assert_counters_agree(&last["services"][0], of_datagrams, lost - outside - inside);
    assert_counters_agree(&last["services"][1], of_streams, 0);
    assert_eq!(of_streams.lost, 0);
    let wanted = clients as u64;
    assert!(of_datagrams.answered >= wanted && of_streams.answered >= wanted);
    [of_datagrams, of_streams]
}

#[test]
fn two_thousand_clients_are_answered_and_the_counters_agree() {
    crowds_of(Served::start("crowd", "workers = 2", &config("")), 1000, duration());
}

/// More datagrams than there are places: what is lost, the server knows to one.
#[test]
fn the_counters_agree_when_much_is_lost() {
    let slow = config("").replace(
        "kernel = \"echo\"\nmqueues = 32\nslots = 64",
        "kernel = \"delay\"\nparams = { microseconds = 2000 }\nmqueues = 4\nslots = 8",
    );
    let served = Served::start("crowd-lossy", "workers = 2", &slow);
    let [datagrams, _] = crowds_of(served, 100, Duration::from_secs(1));
    assert!(datagrams.lost > 0, "{datagrams:?}");
}

/// What an idle connection may cost the server: docs/operations.md, Limits.
const IDLE_BYTES_MAX: u64 = 1024;
const IDLE: usize = 10_000;

#[test]
fn ten_thousand_idle_connections_cost_little_and_disturb_nobody() {
    let limit = sys::process::raise_descriptor_limit().unwrap();
    if limit < IDLE as u64 + 500 {
        println!("SKIPPED: {limit} descriptors, for {IDLE} connections (raise `ulimit -Hn`)");
        return;
    }
    let long = std::env::var_os("SERVAL_LONG").is_some();
    // In the short form nothing may be closed however slow the machine is.
    let limits = format!("connections = {}\nidle_s = {}", IDLE + 200, if long { 60 } else { 3600 });
    let served = Served::start("idle", "workers = 2", &config(&limits));
    let tcp = served.services[1][0];
    let mut busy = Crowd::connect(tcp, Transport::Tcp, 10, 4);
    busy.ask();
    let bystanders_are_answered = |busy: &mut Crowd| {
        let wanted = busy.books().answered + 1000;
        eventually("bystanders are answered", || {
            busy.turn();
            busy.books().answered > wanted
        });
    };
    bystanders_are_answered(&mut busy);
    let accepted = || served.metric("serval_connections_accepted_total{service=\"tcp\"}");
    let before = (served.usage().resident_bytes, accepted());
    let mut idle = Crowd::connect(tcp, Transport::Tcp, IDLE, 1);
    eventually("all are accepted", || accepted() == before.1 + IDLE as u64);
    bystanders_are_answered(&mut busy);
    let each = |now: u64| now.saturating_sub(before.0) / IDLE as u64;
    let fresh = each(served.usage().resident_bytes);
    // Each says something once, then nothing any more.
    idle.ask();
    idle.stop_asking();
    eventually("each is answered", || {
        idle.turn();
        idle.is_settled()
    });
    bystanders_are_answered(&mut busy);
    let used = each(served.usage().resident_bytes);
    println!("an idle connection costs {fresh} bytes, {used} after a request");
    assert!(fresh.max(used) <= IDLE_BYTES_MAX, "{fresh} bytes, {used} after a request");
    if long {
        let deadline = Instant::now() + Duration::from_secs(300);
        while served.dropped("tcp", DropReason::IdleTimeout) < IDLE as u64 {
            assert!(Instant::now() < deadline, "idle connections stay open");
            busy.turn();
        }
    }
    busy.stop_asking();
    eventually("the last replies come", || {
        busy.turn();
        busy.is_settled()
    });
    idle.leave();
    busy.leave();
    assert_eq!(served.finish().0, 0);
}
