//! Clients on real sockets against a real server: addresses, sizes, framings, order, workers.

mod common;

use std::collections::HashSet;
use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, UdpSocket};
use std::time::Duration;

use common::*;
use engine::topology::{CpuPlacement, Dispatch, Listen, Polling, Rings, Service};
use wire::DropReason;
use wire::framing::{Delimits, Framing};
use wire::nic::{Transport, UDP_PAYLOAD_MAX};

fn echo(name: &str, listen: Vec<Listen>) -> Service {
    Service::new(name, listen, "echo")
}

#[test]
fn every_datagram_size_comes_back_through_every_ring_protocol() {
    for rings in [Rings::Doorbell, Rings::Granule, Rings::Granule8] {
        let server = start(topology(vec![Service { rings, ..echo("echo", vec![udp()]) }]));
        let client = udp_client(address(&server, 0));
        for len in (0..=1024).step_by(13).chain([1, 7, 8, 9, 11, 12, 13, 1023, 1024]) {
            let message = pattern(len, len);
            assert_eq!(ask(&client, &message), message, "{rings:?} {len}");
        }
        assert_accounts(&server);
        assert!(server.shutdown().is_clean());
    }
}

#[test]
fn the_largest_datagram_comes_back() {
    let max = UDP_PAYLOAD_MAX as u32;
    let service =
        Service { max_message_bytes: max, max_reply_bytes: max, ..echo("echo", vec![udp()]) };
    let server = start(topology(vec![service]));
    let client = udp_client(address(&server, 0));
    for len in [1025, 1472, 1535, 1536, 1537, 9000, 65_000, UDP_PAYLOAD_MAX] {
        let message = pattern(len, len);
        assert_eq!(ask(&client, &message), message, "{len}");
    }
    assert_accounts(&server);
}

#[test]
fn a_datagram_over_the_maximum_is_dropped_with_its_reason() {
    // provokes: too_long
    let server = start(topology(vec![echo("echo", vec![udp()])]));
    let client = udp_client(address(&server, 0));
    client.send(&pattern(1025, 0)).unwrap();
    eventually("the drop is counted", || dropped(&server, 0, DropReason::TooLong) == 1);
    assert_eq!(ask(&client, b"next"), b"next");
    assert_accounts(&server);
}

#[test]
fn replies_leave_from_the_address_and_port_the_client_used() {
    // Lynx answered from another port than the one asked, which no connected client, firewall or
    // NAT accepts. The clients of these tests are connected sockets throughout; here the address
    // differs as well, because the port is bound to all of them.
    let any = Listen { transport: Transport::Udp, address: ([0, 0, 0, 0], 0).into() };
    let six = Listen { transport: Transport::Udp, address: "[::]:0".parse().unwrap() };
    let mut settings = topology(vec![echo("echo", vec![any, six])]);
    settings.engine.workers = 2;
    settings.limits.udp_reply_ratio = Some(0);
    let server = start(settings);
    for host in ["127.0.0.1", "127.0.0.2", "127.9.8.7"] {
        for round in 0..8 {
            let client = UdpSocket::bind("127.0.0.1:0").unwrap();
            client.connect((host, address(&server, 0).port())).unwrap();
            client.set_read_timeout(Some(PATIENCE)).unwrap();
            let message = pattern(100, round);
            assert_eq!(ask(&client, &message), message, "{host}");
        }
    }
    let client = UdpSocket::bind("[::1]:0").unwrap();
    client.connect(("::1", address(&server, 1).port())).unwrap();
    client.set_read_timeout(Some(PATIENCE)).unwrap();
    assert_eq!(ask(&client, b"six"), b"six");
    assert_accounts(&server);
}

#[test]
fn udp_and_tcp_share_a_port_number() {
    let address: SocketAddr = ([127, 0, 0, 1], free_port()).into();
    let both = [Transport::Udp, Transport::Tcp].map(|transport| Listen { transport, address });
    let server = start(topology(vec![echo("echo", both.to_vec())]));
    assert_eq!(ask(&udp_client(address), b"u"), b"u");
    assert_eq!(exchange(&mut tcp_client(address), b"t", 1), b"t");
    assert_accounts(&server);
}

/// A request as it goes on the wire and the echo as it comes back.
fn framed(framing: Framing, payload: &[u8]) -> (Vec<u8>, Vec<u8>) {
    let (mut request, mut reply) = (Vec::new(), Vec::new());
    framing.encode_request(payload, &mut request).unwrap();
    framing.encode_reply(payload, &mut reply).unwrap();
    (request, reply)
}

#[test]
fn every_framing_carries_pipelined_messages_in_order() {
    // Those whose messages have a length and may be any bytes, as `echo` answers them.
    let framings = Framing::all(64).filter(|framing| {
        framing.delimits() != Delimits::Nothing && *framing != Framing::Memcached
    });
    let message = |framing: Framing, i: usize| match framing {
        Framing::Line | Framing::LineCrLf => {
            format!("line {i} {}", "x".repeat(i % 900)).into_bytes()
        }
        Framing::Sockperf => {
            let len = 14 + i % 700;
            let mut message = pattern(len, i);
            // From a client, wants a reply.
            message[8..10].copy_from_slice(&3_u16.to_be_bytes());
            message[10..14].copy_from_slice(&(len as u32).to_be_bytes());
            message
        }
        Framing::LengthU32 => pattern(i * 41 % 1025, i),
        _ => framing.sample_request(&pattern(i * 37 % 1025, i)),
    };
    for framing in framings {
        for chunk in [1, 7, 64, 4096, 1 << 20] {
            let service = Service { framing, mqueues: 3, ..echo("echo", vec![tcp()]) };
            let server = start(topology(vec![service]));
            let mut stream = tcp_client(address(&server, 0));
            let count = if chunk == 1 { 40 } else { 400 };
            let (mut requests, mut replies) = (Vec::new(), Vec::new());
            for i in 0..count {
                let (request, reply) = framed(framing, &message(framing, i));
                requests.extend(request);
                replies.extend(reply);
            }
            let mut writer = stream.try_clone().unwrap();
            let sender = std::thread::spawn(move || {
                for part in requests.chunks(chunk) {
                    writer.write_all(part).unwrap();
                }
            });
            let mut received = vec![0; replies.len()];
            stream.read_exact(&mut received).unwrap();
            sender.join().unwrap();
            assert!(received == replies, "{framing} in chunks of {chunk}");
            assert_accounts(&server);
        }
    }
}

/// `line` answers every client as it writes; `line-crlf` answers all of them with CR LF.
#[test]
fn a_line_is_answered_with_the_line_end_of_its_client() {
    for framing in [Framing::Line, Framing::LineCrLf] {
        let service = Service { framing, ..echo("echo", vec![tcp()]) };
        let mut settings = topology(vec![service]);
        settings.engine.workers = 2;
        let server = start(settings);
        let mut ends =
            ["\n", "\r\n", "\n", "\r\n"].map(|end| (tcp_client(address(&server, 0)), end));
        for n in 0..20 {
            for (client, end) in &mut ends {
                let request: String = (0..n).map(|i| format!("{n} and {i}{end}")).collect();
                let expected = match framing {
                    Framing::Line => request.clone(),
                    _ => (0..n).map(|i| format!("{n} and {i}\r\n")).collect(),
                };
                client.write_all(request.as_bytes()).unwrap();
                let mut reply = vec![0; expected.len()];
                client.read_exact(&mut reply).unwrap();
                assert_eq!(String::from_utf8_lossy(&reply), expected, "{framing}");
            }
        }
        assert_accounts(&server);
        assert!(server.shutdown().is_clean());
    }
}

#[test]
fn replies_keep_request_order_although_kernels_answer_in_another() {
    // Four `delay` blocks answer at their own pace; short and long waits alternate by mqueue.
    for placement in [CpuPlacement::Worker, CpuPlacement::Threads { threads: 1, cores: Vec::new() }]
    {
        let service = Service {
            framing: Framing::LengthU16,
            mqueues: 4,
            params: vec![("microseconds".into(), 300.0.into())],
            ..Service::new("delay", vec![tcp()], "delay")
        };
        let mut settings = topology_on(placement, vec![service]);
        settings.engine.workers = 2;
        let server = start(settings);
        let mut stream = tcp_client(address(&server, 0));
        let (mut requests, mut replies) = (Vec::new(), Vec::new());
        for i in 0..200 {
            let (request, reply) = framed(Framing::LengthU16, &pattern(1 + i % 100, i));
            requests.extend(request);
            replies.extend(reply);
        }
        stream.write_all(&requests).unwrap();
        let mut received = vec![0; replies.len()];
        stream.read_exact(&mut received).unwrap();
        assert!(received == replies);
        assert_accounts(&server);
        assert!(server.shutdown().is_clean());
    }
}

#[test]
fn unordered_replies_all_come_back() {
    let service = Service {
        framing: Framing::Fixed(8),
        ordered: false,
        mqueues: 4,
        ..echo("echo", vec![tcp()])
    };
    let server = start(topology(vec![service]));
    let mut stream = tcp_client(address(&server, 0));
    let requests: Vec<u8> = (0..50_u64).flat_map(u64::to_le_bytes).collect();
    stream.write_all(&requests).unwrap();
    let mut received = vec![0; requests.len()];
    stream.read_exact(&mut received).unwrap();
    let numbers: HashSet<u64> =
        received.chunks(8).map(|c| u64::from_le_bytes(c.try_into().unwrap())).collect();
    assert_eq!(numbers, (0..50).collect());
    assert_accounts(&server);
}

#[test]
fn a_large_tcp_message_comes_back() {
    let max = 8 << 20;
    let service = Service {
        framing: Framing::LengthU32,
        max_message_bytes: max,
        max_reply_bytes: max,
        mqueues: 1,
        slots: 2,
        request_timeout_ms: 10_000,
        ..echo("echo", vec![tcp()])
    };
    let server = start(topology(vec![service]));
    let stream = tcp_client(address(&server, 0));
    for len in [1 << 10, 100_000, max as usize] {
        let (request, reply) = framed(Framing::LengthU32, &pattern(len, 5));
        let mut writer = stream.try_clone().unwrap();
        let sender = std::thread::spawn(move || writer.write_all(&request).unwrap());
        let mut received = vec![0; reply.len()];
        (&stream).read_exact(&mut received).unwrap();
        sender.join().unwrap();
        assert!(received == reply, "{len}");
    }
    assert_accounts(&server);
}

#[test]
fn a_half_closed_client_still_gets_its_replies() {
    let service = Service { framing: Framing::Fixed(16), ..echo("echo", vec![tcp()]) };
    let server = start(topology(vec![service]));
    let mut stream = tcp_client(address(&server, 0));
    let message = pattern(16 * 20, 1);
    stream.write_all(&message).unwrap();
    stream.shutdown(Shutdown::Write).unwrap();
    let mut received = Vec::new();
    stream.read_to_end(&mut received).unwrap();
    assert_eq!(received, message);
    assert_accounts(&server);
}

#[test]
fn a_stream_that_breaks_its_framing_is_closed_with_a_reason() {
    // provokes: bad_framing
    let service = Service { framing: Framing::Sockperf, ..echo("echo", vec![tcp()]) };
    let server = start(topology(vec![service]));
    let mut stream = tcp_client(address(&server, 0));
    stream.write_all(&[0; 14]).unwrap();
    let mut rest = Vec::new();
    stream.read_to_end(&mut rest).unwrap();
    assert!(rest.is_empty());
    eventually("counted", || dropped(&server, 0, DropReason::BadFraming) == 1);
    let service = Service { framing: Framing::LengthU32, ..echo("echo", vec![tcp()]) };
    let server = start(topology(vec![service]));
    let mut stream = tcp_client(address(&server, 0));
    stream.write_all(&u32::MAX.to_be_bytes()).unwrap();
    stream.read_to_end(&mut rest).unwrap();
    eventually("counted", || dropped(&server, 0, DropReason::TooLong) == 1);
    assert_accounts(&server);
}

#[test]
fn one_flow_uses_every_mqueue_of_four_workers() {
    let service = Service {
        mqueues: 8,
        slots: 4,
        params: vec![("microseconds".into(), 2000.0.into())],
        ..Service::new("delay", vec![udp(), tcp()], "delay")
    };
    let service = Service { framing: Framing::Fixed(8), ..service };
    let mut settings = topology(vec![service]);
    settings.engine.workers = 4;
    let server = start(settings);
    // One UDP socket is one flow: the host kernel gives all of it to one worker, which owns two of
    // the eight mqueues (8 requests). More than that in flight must cross to the others.
    let client = udp_client(address(&server, 0));
    client.set_read_timeout(Some(Duration::from_secs(1))).unwrap();
    let mut answered = HashSet::new();
    for round in 0..20_u64 {
        for i in 0..24 {
            client.send(&(round * 24 + i).to_le_bytes()).unwrap();
        }
        let mut reply = [0; 16];
        for _ in 0..24 {
            let Ok(8) = client.recv(&mut reply) else { break };
            answered.insert(u64::from_le_bytes(reply[..8].try_into().unwrap()));
        }
    }
    assert_accounts(&server);
    let snapshot = server.metrics().service(0);
    assert!(snapshot.handed_out > 0, "nothing crossed between workers");
    let no_credit = snapshot.dropped(DropReason::NoCredit);
    let full = snapshot.dropped(DropReason::HandoverFull);
    // A round whose replies took longer has left some behind.
    client.set_read_timeout(Some(Duration::from_millis(10))).unwrap();
    eventually("each has its outcome", || {
        let mut reply = [0; 16];
        while let Ok(8) = client.recv(&mut reply) {
            answered.insert(u64::from_le_bytes(reply[..8].try_into().unwrap()));
        }
        answered.len() as u64 + no_credit + full >= 480
    });
    assert_eq!(answered.len() as u64 + no_credit + full, 480, "{snapshot:?}");
    let busy = server.busy_blocks(0);
    assert_eq!(busy, 8, "blocks that received something");
    // The same over one TCP connection, where nothing may be lost.
    let mut stream = tcp_client(address(&server, 1));
    let requests: Vec<u8> = (0..300_u64).flat_map(u64::to_le_bytes).collect();
    let mut writer = stream.try_clone().unwrap();
    let sent = requests.clone();
    let sender = std::thread::spawn(move || writer.write_all(&sent).unwrap());
    let mut received = vec![0; requests.len()];
    stream.read_exact(&mut received).unwrap();
    sender.join().unwrap();
    assert!(received == requests);
    assert_accounts(&server);
    assert!(server.shutdown().is_clean());
}

#[test]
fn a_key_meets_the_same_mqueue_from_any_client() {
    // provokes: too_short
    let service = Service {
        mqueues: 6,
        dispatch: Dispatch::KeyHash("0:4".parse().unwrap()),
        framing: Framing::Fixed(32),
        ..echo("echo", vec![udp(), tcp()])
    };
    let mut settings = topology(vec![service]);
    settings.engine.workers = 3;
    let server = start(settings);
    for key in 0..12_u32 {
        let before = server.received_by_block(0);
        let mut message = pattern(32, key as usize);
        message[..4].copy_from_slice(&key.to_be_bytes());
        let asked = 6;
        for client in 0..asked / 2 {
            let reply = ask(&udp_client(address(&server, 0)), &message);
            assert_eq!(reply, message, "client {client}");
            let reply = exchange(&mut tcp_client(address(&server, 1)), &message, 32);
            assert_eq!(reply, message, "client {client}");
        }
        let after = server.received_by_block(0);
        let grown: Vec<u64> = after.iter().zip(&before).map(|(a, b)| a - b).collect();
        assert_eq!(grown.iter().filter(|n| **n > 0).count(), 1, "key {key}: {grown:?}");
        assert_eq!(grown.iter().sum::<u64>(), asked, "key {key}");
    }
    udp_client(address(&server, 0)).send(b"abc").unwrap();
    eventually("counted", || dropped(&server, 0, DropReason::TooShort) == 1);
    assert_accounts(&server);
}

#[test]
fn two_hundred_and_forty_mqueues_on_one_core() {
    for placement in [CpuPlacement::Worker, CpuPlacement::Threads { threads: 1, cores: Vec::new() }]
    {
        let service = Service { mqueues: 240, ..echo("echo", vec![udp()]) };
        let server = start(topology_on(placement, vec![service]));
        let client = udp_client(address(&server, 0));
        for i in 0..1000 {
            let message = pattern(64, i);
            assert_eq!(ask(&client, &message), message);
        }
        assert_eq!(server.busy_blocks(0), 240, "every mqueue was used");
        assert_accounts(&server);
        assert!(server.shutdown().is_clean());
    }
}

#[test]
fn services_do_not_share_anything_but_the_workers() {
    let scale = Service {
        framing: Framing::LengthU16,
        ..Service::new("scale", vec![udp(), tcp()], "scale")
    };
    let server = start(topology(vec![echo("echo", vec![udp()]), scale]));
    let numbers: Vec<u8> =
        [1.5_f32, -2.0, 0.0, 1e30].iter().flat_map(|f| f.to_le_bytes()).collect();
    let tripled: Vec<u8> =
        [4.5_f32, -6.0, 0.0, 3.0 * 1e30].iter().flat_map(|f| f.to_le_bytes()).collect();
    assert_eq!(ask(&udp_client(address(&server, 0)), &numbers), numbers);
    assert_eq!(ask(&udp_client(address(&server, 1)), &numbers), tripled);
    let (request, _) = framed(Framing::LengthU16, &numbers);
    let (_, reply) = framed(Framing::LengthU16, &tripled);
    assert_eq!(exchange(&mut tcp_client(address(&server, 2)), &request, reply.len()), reply);
    // provokes: bad_length
    udp_client(address(&server, 1)).send(b"abc").unwrap();
    eventually("counted", || dropped(&server, 1, DropReason::BadLength) == 1);
    assert_eq!(dropped(&server, 0, DropReason::BadLength), 0);
    assert_accounts(&server);
}

#[test]
fn draining_answers_everything_accepted() {
    let service = Service {
        mqueues: 4,
        slots: 64,
        framing: Framing::Fixed(8),
        params: vec![("microseconds".into(), 60_000.0.into())],
        request_timeout_ms: 60_000,
        ..Service::new("delay", vec![udp(), tcp()], "delay")
    };
    let mut topology = topology(vec![service]);
    topology.engine.drain_ms = 15_000;
    let server = start(topology);
    let client = udp_client(address(&server, 0));
    let mut stream = tcp_client(address(&server, 1));
    for i in 0..100_u64 {
        client.send(&i.to_le_bytes()).unwrap();
    }
    let requests: Vec<u8> = (0..40_u64).flat_map(u64::to_le_bytes).collect();
    stream.write_all(&requests).unwrap();
    let metrics = server.metrics();
    eventually("everything is accepted", || metrics.service(0).accepted == 140);
    assert!(metrics.service(0).replied < 140, "too fast to show anything");
    let report = server.shutdown();
    assert!(report.is_clean(), "{report:?}");
    assert_eq!(metrics.service(0).replied, 140);
    let mut received = vec![0; requests.len()];
    stream.read_exact(&mut received).unwrap();
    assert!(received == requests);
    assert_eq!(stream.read(&mut [0]).unwrap(), 0, "then the connection closes");
    let mut reply = [0; 8];
    for _ in 0..100 {
        receive(&client, &mut reply).unwrap();
    }
}

/// A worker that does not sleep looks at all its sockets in every turn, also at those of a tenant without clients.
#[test]
fn an_idle_tenant_delays_no_other() {
    let service = |name: &str, tenant: &str| Service {
        tenant: tenant.to_owned(),
        max_message_bytes: 1000,
        max_reply_bytes: 1000,
        ..Service::new(name, vec![udp(), tcp()], "echo")
    };
    let mut topology = topology(vec![service("busy", "one"), service("idle", "other")]);
    topology.engine.polling = Polling::Spin;
    let server = start(topology);
    let client = udp_client(address(&server, 0));
    // Several times what a tenant may take of one round.
    for n in 0..1500 {
        let message = pattern(1000, n);
        assert_eq!(ask(&client, &message), message);
    }
    let message = pattern(1000, 1);
    assert_eq!(ask(&udp_client(address(&server, 2)), &message), message);
    assert_accounts(&server);
}
