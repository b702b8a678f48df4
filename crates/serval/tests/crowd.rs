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

/// The server's last words about a service are what its clients know.
fn assert_books_agree(service: &Json, books: Books) {
    let of = |name: &str| service[name].as_u64().unwrap();
    let counted = |reason: DropReason| service["drops"][reason.name()].as_u64().unwrap_or(0);
    let (outside, inside) = losses(counted);
    let context = format!("{service}\n{books:?}");
    assert_eq!(of("received") + outside, books.sent, "{context}");
    assert_eq!(of("replied"), books.answered, "{context}");
    assert_eq!(of("received"), of("replied") + inside, "{context}");
    assert_eq!(outside + inside, books.lost, "{context}");
}

#[test]
fn two_thousand_clients_are_answered_and_the_books_agree() {
    let served = Served::start("crowd", "workers = 2", &config(""));
    let mut udp = Crowd::connect(served.services[0][0], Transport::Udp, 1000, 2);
    let mut tcp = Crowd::connect(served.services[1][0], Transport::Tcp, 1000, 4);
    udp.ask();
    tcp.ask();
    let until = Instant::now() + duration();
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
    // A reply that was given up may still be on its way; what is lost has a reason on the server.
    let mut counted = (0, 0);
    eventually("every lost datagram has a reason", || {
        udp.turn();
        counted = losses(|reason| served.dropped("udp", reason));
        counted.0 + counted.1 == udp.books().lost
    });
    let (of_datagrams, of_streams) = (udp.books(), tcp.books());
    udp.leave();
    tcp.leave();
    let (code, last) = served.finish();
    assert_eq!(code, 0);
    assert_eq!(last["clean"], true, "{last}");
    assert_books_agree(&last["services"][0], of_datagrams);
    assert_books_agree(&last["services"][1], of_streams);
    assert_eq!(of_streams.lost, 0);
    assert!(of_datagrams.answered >= 1000 && of_streams.answered >= 1000);
    println!("datagrams {of_datagrams:?}, streams {of_streams:?}");
}
