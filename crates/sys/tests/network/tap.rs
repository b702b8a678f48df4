//! A tap records the traffic in a file that other programs can read.

use std::io::{Read as _, Write as _};
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::path::PathBuf;
use std::time::Instant;

use sys::tap::{SNAP_BYTES_MAX, Tap, TapFile, TapOptions, TapReport};
use sys::{PortSpec, SocketNic};
use wire::nic::{Close, Event, Nic, Read, TxBatch, Written};

use crate::support::{PATIENCE, open, pattern, rx, tcp, udp, udp_client};

/// A file that is removed on drop.
struct Scratch(PathBuf);

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

fn tapped(
    name: &str,
    ports: &[PortSpec],
    change: impl FnOnce(&mut TapOptions),
) -> (TapFile, Tap<SocketNic>, Vec<SocketAddr>, Scratch) {
    let path = std::env::temp_dir().join(format!("serval-tap-{name}-{}.pcap", std::process::id()));
    let mut options =
        TapOptions { path: path.clone(), snap_bytes: SNAP_BYTES_MAX, limit_bytes: 1 << 30 };
    change(&mut options);
    let file = TapFile::create(&options).unwrap();
    let (nic, addresses) = open(ports);
    let tap = file.attach(nic, addresses.clone());
    (file, tap, addresses, Scratch(path))
}

/// One parsed record.
#[derive(Debug, PartialEq, Eq)]
struct Packet {
    source: SocketAddr,
    target: SocketAddr,
    /// TCP: flags, sequence number, acknowledged number.
    tcp: Option<(u8, u32, u32)>,
    payload: Vec<u8>,
    cut: bool,
}

fn word(bytes: &[u8], at: usize) -> u32 {
    u32::from_ne_bytes(bytes[at..at + 4].try_into().unwrap())
}

fn big(bytes: &[u8], at: usize) -> usize {
    usize::from(u16::from_be_bytes([bytes[at], bytes[at + 1]]))
}

/// Checks the Internet checksum over all parts, which include the checksum field.
fn assert_sum(parts: &[&[u8]]) {
    let all: Vec<u8> = parts.concat();
    let pairs = all.chunks(2).map(|w| u32::from(w[0]) << 8 | w.get(1).map_or(0, |b| u32::from(*b)));
    let mut sum = pairs.map(u64::from).sum::<u64>();
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    assert_eq!(sum, 0xffff, "a checksum is wrong");
}

fn packet(bytes: &[u8], cut: bool) -> Packet {
    let (source, target, protocol, ip_bytes): (IpAddr, IpAddr, u8, usize) = match bytes[0] >> 4 {
        4 => {
            assert_sum(&[&bytes[..20]]);
            assert!(cut || big(bytes, 2) == bytes.len());
            let ip = |at: usize| <[u8; 4]>::try_from(&bytes[at..at + 4]).unwrap().into();
            (ip(12), ip(16), bytes[9], 20)
        }
        6 => {
            assert!(cut || big(bytes, 4) + 40 == bytes.len());
            let ip = |at: usize| <[u8; 16]>::try_from(&bytes[at..at + 16]).unwrap().into();
            (ip(8), ip(24), bytes[6], 40)
        }
        other => panic!("IP version {other}"),
    };
    let rest = &bytes[ip_bytes..];
    let header = if protocol == 17 { 8 } else { 20 };
    if !cut {
        let addresses = if ip_bytes == 20 { &bytes[12..20] } else { &bytes[8..40] };
        let len = u16::try_from(rest.len()).unwrap().to_be_bytes();
        assert_sum(&[addresses, &[0, protocol], &len, rest]);
    }
    let tcp = (protocol == 6).then(|| {
        let number = |at: usize| u32::from_be_bytes(rest[at..at + 4].try_into().unwrap());
        (rest[13], number(4), number(8))
    });
    Packet {
        source: SocketAddr::new(source, big(rest, 0) as u16),
        target: SocketAddr::new(target, big(rest, 2) as u16),
        tcp,
        payload: rest[header..].to_vec(),
        cut,
    }
}

fn packets(file: &Scratch, report: &TapReport) -> Vec<Packet> {
    let bytes = std::fs::read(&file.0).unwrap();
    assert_eq!(bytes.len() as u64, report.bytes);
    assert_eq!((word(&bytes, 0), word(&bytes, 20)), (0xa1b2_3c4d, 101));
    let (mut at, mut found, mut last) = (24, Vec::new(), (0, 0));
    while at < bytes.len() {
        let time = (word(&bytes, at), word(&bytes, at + 4));
        assert!(time >= last && time.1 < 1_000_000_000);
        last = time;
        let (kept, whole) = (word(&bytes, at + 8) as usize, word(&bytes, at + 12) as usize);
        found.push(packet(&bytes[at + 16..][..kept], kept < whole));
        at += 16 + kept;
    }
    assert_eq!(found.len() as u64, report.packets);
    found
}

/// Echoes datagrams until `count` have been answered.
fn echo(tap: &mut Tap<SocketNic>, count: usize) {
    let (mut rx, mut tx) = (rx(), TxBatch::new(1024, 1 << 20));
    let (mut answered, mut events) = (0, Vec::new());
    let began = Instant::now();
    while answered < count {
        assert!(began.elapsed() < PATIENCE);
        tap.poll(1_000_000, &mut events);
        tap.recv(0, &mut rx);
        for datagram in &rx.items {
            let payload = rx.payload(datagram);
            tx.push(datagram.peer, datagram.local, payload.len(), |b| b.copy_from_slice(payload));
        }
        answered += tap.send(0, &mut tx).sent;
    }
}

#[test]
fn datagrams_are_recorded_both_ways() {
    for address in ["127.0.0.1:0", "[::1]:0"] {
        let (file, mut tap, addresses, scratch) = tapped("udp", &[udp(address)], |_| {});
        let client = udp_client(addresses[0]);
        let sizes = [0, 1, 2, 101, 1472, 40_000];
        for (index, size) in sizes.into_iter().enumerate() {
            client.send(&pattern(size, index)).unwrap();
            echo(&mut tap, 1);
        }
        drop(tap);
        let report = file.finish();
        assert_eq!((report.dropped, report.error.as_ref()), (0, None));
        let found = packets(&scratch, &report);
        assert_eq!(found.len(), 2 * sizes.len());
        for (index, pair) in found.chunks(2).enumerate() {
            let peer = client.local_addr().unwrap();
            assert_eq!((pair[0].source, pair[0].target), (peer, addresses[0]));
            assert_eq!((pair[1].source, pair[1].target), (addresses[0], peer));
            let expected = pattern(sizes[index], index);
            assert!(pair.iter().all(|p| p.payload == expected && p.tcp.is_none()));
        }
    }
}

#[test]
fn a_connection_is_recorded_from_handshake_to_end() {
    let (file, mut tap, addresses, scratch) = tapped("tcp", &[tcp("127.0.0.1:0")], |_| {});
    let mut client = TcpStream::connect(addresses[0]).unwrap();
    let (socket, _) = loop {
        if let Some(accepted) = tap.accept(0) {
            break accepted;
        }
    };
    tap.adopt(socket, 3).unwrap();
    let sent = pattern(100_000, 1);
    let writer = {
        let (mut client, sent) = (client.try_clone().unwrap(), sent.clone());
        std::thread::spawn(move || client.write_all(&sent).unwrap())
    };
    let (mut got, mut buffer, mut events) = (Vec::new(), vec![0; 70_000], Vec::new());
    while got.len() < sent.len() {
        tap.poll(1_000_000, &mut events);
        while let Read::Bytes(len) = tap.read(3, &mut buffer) {
            got.extend_from_slice(&buffer[..len]);
        }
    }
    writer.join().unwrap();
    assert_eq!(tap.write(3, b"enough"), Written::Bytes(6));
    let peer = client.local_addr().unwrap();
    let mut reply = [0; 6];
    client.read_exact(&mut reply).unwrap();
    tap.close(3, Close::Graceful);
    drop(tap);
    let report = file.finish();
    let found = packets(&scratch, &report);
    let flags: Vec<u8> = found.iter().map(|p| p.tcp.unwrap().0).collect();
    assert_eq!(&flags[..3], [0x02, 0x12, 0x10], "SYN, SYN and ACK, ACK");
    assert_eq!(flags[flags.len() - 2..], [0x18, 0x11], "PSH and ACK, FIN and ACK");
    // Sequence numbers are contiguous on each side, and acknowledge what the other side sent.
    let (mut next, mut streams) = ([0u32; 2], [Vec::new(), Vec::new()]);
    for p in &found {
        let side = usize::from(p.source == addresses[0]);
        assert_eq!(
            if side == 0 { (p.source, p.target) } else { (p.target, p.source) },
            (peer, addresses[0])
        );
        let (flags, sequence, acknowledged) = p.tcp.unwrap();
        assert_eq!(sequence, next[side]);
        assert_eq!(acknowledged, if flags == 0x02 { 0 } else { next[1 - side] });
        next[side] += p.payload.len() as u32 + u32::from(flags & 0x03 != 0);
        streams[side].extend_from_slice(&p.payload);
    }
    assert!(streams[0] == sent && streams[1] == b"enough");
}

#[test]
fn a_connection_to_a_backend_is_recorded_too() {
    let backend = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let (file, mut tap, _, scratch) = tapped("backend", &[], |_| {});
    let to = backend.local_addr().unwrap();
    tap.connect(to, wire::nic::Transport::Tcp, 7).unwrap();
    let mut events = Vec::new();
    while !events.contains(&Event::Writable(7)) {
        tap.poll(1_000_000, &mut events);
    }
    assert_eq!(tap.write(7, b"get a"), Written::Bytes(5));
    tap.close(7, Close::Reset);
    drop(tap);
    let found = packets(&scratch, &file.finish());
    let told: Vec<_> = found.iter().map(|p| (p.tcp.unwrap().0, p.payload.as_slice())).collect();
    let expected: [(u8, &[u8]); 5] =
        [(0x02, b""), (0x12, b""), (0x10, b""), (0x18, b"get a"), (0x14, b"")];
    assert_eq!(told, expected);
    assert!(found.iter().all(|p| p.source == to || p.target == to));
}

#[test]
fn what_does_not_fit_is_cut_or_counted() {
    let ports = [udp("127.0.0.1:0")];
    let (file, mut tap, addresses, scratch) = tapped("cut", &ports, |o| o.snap_bytes = 64);
    let client = udp_client(addresses[0]);
    client.send(&pattern(1000, 5)).unwrap();
    echo(&mut tap, 1);
    drop(tap);
    let found = packets(&scratch, &file.finish());
    assert_eq!(found.len(), 2);
    assert!(found.iter().all(|p| p.cut && p.payload == pattern(1000, 5)[..36]), "{found:?}");

    let (file, mut tap, addresses, scratch) =
        tapped("limit", &ports, |o| o.limit_bytes = 600 << 10);
    let client = udp_client(addresses[0]);
    let seen = 2 * 40;
    for index in 0..40 {
        client.send(&pattern(30_000, index)).unwrap();
        echo(&mut tap, 1);
    }
    let dropped = tap.counters().tap_dropped;
    drop(tap);
    let report = file.finish();
    assert_eq!(report.packets + report.dropped, seen);
    assert!(report.packets > 0 && report.dropped >= dropped && report.dropped > 0, "{report:?}");
    assert!(report.bytes <= 600 << 10 && packets(&scratch, &report).len() as u64 == report.packets);
}
