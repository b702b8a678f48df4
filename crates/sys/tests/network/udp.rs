//! UDP ports.

use std::collections::HashMap;
use std::net::{SocketAddr, UdpSocket};
use std::os::fd::AsRawFd;

use proptest::prelude::*;
use sys::{SocketNic, SocketOptions};
use wire::nic::{Event, Nic, RxBatch, SendOutcome, TxBatch};

use crate::support::{echo_once, open, pattern, rx, udp, udp_client, until};

#[test]
fn echoes_every_size_on_both_families() {
    let (mut nic, addresses) = open(&[udp("127.0.0.1:0"), udp("[::1]:0")]);
    let (mut rx, mut tx) = (rx(), TxBatch::new(64, 1 << 20));
    for (port, address) in addresses.iter().enumerate() {
        let socket = udp_client(*address);
        for (seed, len) in [0, 1, 2, 783, 1472, 1473, 9000, 65_507].into_iter().enumerate() {
            let sent = pattern(len, seed);
            socket.send(&sent).unwrap();
            until(|| (echo_once(&mut nic, port as u16, &mut rx, &mut tx) > 0).then_some(()));
            assert!(tx.is_empty());
            assert!(rx.items[0].local.is_none(), "a bound port needs no source address");
            let mut got = vec![0; 70_000];
            let got_len = socket.recv(&mut got).unwrap();
            assert_eq!(got[..got_len], sent[..], "{len} bytes to {address}");
        }
    }
}

/// Sends `lens` from one NIC to another in one batch and returns what arrived, in order.
fn carry(lens: &[usize], send_offload: bool, receive_offload: bool) -> (SocketNic, Vec<Vec<u8>>) {
    let options = SocketOptions {
        segmentation_offload: send_offload,
        receive_offload,
        ..SocketOptions::default()
    };
    let mut from = SocketNic::open(&[udp("127.0.0.1:0")], options.clone()).unwrap();
    let mut to = SocketNic::open(&[udp("127.0.0.1:0")], options).unwrap();
    let (sender, receiver) = (from.local_addresses()[0], to.local_addresses()[0]);
    let mut tx = TxBatch::new(lens.len(), 4 << 20);
    let (mut rx, mut arrived) = (rx(), Vec::new());
    for (seed, &len) in lens.iter().enumerate() {
        tx.push(receiver, None, len, |into| into.copy_from_slice(&pattern(len, seed)));
    }
    let mut sent = 0;
    until(|| {
        let outcome = from.send(0, &mut tx);
        assert_eq!(outcome.refused, 0);
        sent += outcome.sent;
        assert_eq!(sent + tx.waiting().len(), lens.len());
        to.recv(0, &mut rx);
        assert_eq!(rx.overflowed, 0);
        for datagram in &rx.items {
            assert_eq!(datagram.peer, sender);
            assert!(!datagram.truncated);
            arrived.push(rx.payload(datagram).to_vec());
        }
        (arrived.len() >= lens.len()).then_some(())
    });
    (from, arrived)
}

#[test]
fn offload_in_every_combination_keeps_payload_and_order() {
    let mut lens = vec![64; 1000];
    lens.extend([1200; 100]);
    lens.extend([0, 0, 5, 5, 4, 5, 0, 65_507, 65_507, 1, 32_000, 32_000, 32_000, 3]);
    lens.extend([7; 129]);
    for (send_offload, receive_offload) in
        [(true, true), (true, false), (false, true), (false, false)]
    {
        let (nic, arrived) = carry(&lens, send_offload, receive_offload);
        for (seed, (got, &len)) in arrived.iter().zip(&lens).enumerate() {
            assert_eq!(got, &pattern(len, seed), "datagram {seed}");
        }
        assert_eq!(nic.counters().segmentation_fallbacks, 0, "loopback carries any batch");
    }
}

#[test]
fn a_batch_arrives_in_one_buffer() {
    let (mut from, _) = open(&[udp("127.0.0.1:0")]);
    let (mut to, addresses) = open(&[udp("127.0.0.1:0")]);
    let mut tx = TxBatch::new(64, 1 << 20);
    for seed in 0..64 {
        tx.push(addresses[0], None, 100, |into| into.copy_from_slice(&pattern(100, seed)));
    }
    assert_eq!(from.send(0, &mut tx), SendOutcome { sent: 64, ..SendOutcome::default() });
    let mut rx = rx();
    assert!(!to.recv(0, &mut rx), "one buffer of 64: nothing is left");
    assert_eq!(rx.items.len(), 64);
    let offsets: Vec<_> = rx.items.iter().map(|datagram| datagram.offset).collect();
    assert!(offsets.windows(2).all(|pair| pair[1] == pair[0] + 100), "all in one buffer");
}

/// Makes this socket send batches of datagrams of `bytes` each.
fn send_in_segments(socket: &UdpSocket, bytes: libc::c_int) {
    let len = size_of_val(&bytes) as libc::socklen_t;
    // SAFETY: the option is an int, which outlives the call.
    let ret = unsafe {
        let value = (&raw const bytes).cast();
        libc::setsockopt(socket.as_raw_fd(), libc::SOL_UDP, libc::UDP_SEGMENT, value, len)
    };
    assert_eq!(ret, 0, "{}", std::io::Error::last_os_error());
}

#[test]
fn the_longest_batches_grow_no_buffer_and_starve_no_port() {
    let (mut nic, addresses) = open(&[udp("127.0.0.1:0")]);
    let socket = udp_client(addresses[0]);
    send_in_segments(&socket, 1);
    for batch in 0..192 {
        if let Err(error) = socket.send(&[batch; 128]) {
            println!("SKIPPED: a batch of 128 datagrams: {error} (Linux before 6.9)");
            return;
        }
    }
    let mut rx = rx();
    let room = rx.items.capacity();
    // The first call does not know the batch length yet.
    assert!(nic.recv(0, &mut rx), "64 batches of 192");
    let mut bytes: Vec<u8> = Vec::new();
    loop {
        bytes.extend(rx.items.iter().map(|datagram| rx.payload(datagram)[0]));
        if bytes.len() == 192 * 128 {
            break;
        }
        assert!(nic.recv(0, &mut rx), "{} of 24576", bytes.len());
        assert_eq!(rx.items.len(), 1024);
    }
    assert_eq!(rx.items.capacity(), room);
    let expected: Vec<u8> = (0..192).flat_map(|batch| [batch; 128]).collect();
    assert_eq!(bytes, expected);
    // Single datagrams are received 64 at a time again.
    let single = udp_client(addresses[0]);
    for _ in 0..100 {
        single.send(&[1]).unwrap();
    }
    let mut take = |_| (nic.recv(0, &mut rx), rx.items.len());
    assert_eq!([0, 1, 2].map(&mut take), [(true, 8), (true, 64), (false, 28)]);
}

#[test]
fn held_back_datagrams_leave_in_order() {
    let (mut from, _) = open(&[udp("127.0.0.1:0")]);
    let mut clients: Vec<_> = (0..4).map(|_| open(&[udp("127.0.0.1:0")])).collect();
    let to: Vec<_> = clients.iter().map(|(_, addresses)| addresses[0]).collect();
    let mut tx = TxBatch::new(64, 1 << 20);
    let push = |tx: &mut TxBatch, client: usize, seed: usize, more: bool| {
        tx.push(to[client], None, 100, |into| into.copy_from_slice(&pattern(100, seed)));
        if more {
            tx.more_follows();
        }
    };
    let mut arrived = |client: usize| {
        let mut rx = rx();
        clients[client].0.recv(0, &mut rx);
        rx.items.iter().map(|datagram| rx.payload(datagram).to_vec()).collect::<Vec<_>>()
    };
    let patterns = |seeds: &mut dyn Iterator<Item = usize>| -> Vec<_> {
        seeds.map(|seed| pattern(100, seed)).collect()
    };
    // More replies follow to clients 0 and 1, to client 2 until its last datagram, never to client 3.
    for seed in 0..40 {
        push(&mut tx, seed % 4, seed, seed % 4 < 2 || seed % 4 == 2 && seed < 36);
    }
    tx.set_may_defer(true);
    assert_eq!(
        from.send(0, &mut tx),
        SendOutcome { sent: 20, refused: 0, kept: 20, bounced: false }
    );
    for client in 0..4 {
        let due = if client < 2 { Vec::new() } else { patterns(&mut (client..40).step_by(4)) };
        assert_eq!(arrived(client), due, "client {client}");
    }
    // The last reply takes the ones held back with it.
    push(&mut tx, 0, 40, false);
    assert_eq!(
        from.send(0, &mut tx),
        SendOutcome { sent: 11, refused: 0, kept: 10, bounced: false }
    );
    assert_eq!(arrived(0), patterns(&mut (0..=40).step_by(4)));
    assert_eq!(arrived(1), patterns(&mut std::iter::empty()));
    // A batch that is not patient sends everything.
    tx.set_may_defer(false);
    assert_eq!(
        from.send(0, &mut tx),
        SendOutcome { sent: 10, refused: 0, kept: 0, bounced: false }
    );
    assert_eq!(arrived(1), patterns(&mut (1..40).step_by(4)));
    assert!(tx.is_empty());
}

#[test]
fn interleaved_replies_arrive_in_one_buffer_per_client() {
    let (mut from, _) = open(&[udp("127.0.0.1:0")]);
    let mut clients: Vec<_> = (0..4).map(|_| open(&[udp("127.0.0.1:0")])).collect();
    let mut tx = TxBatch::new(64, 1 << 20);
    for seed in 0..64 {
        let to = clients[seed % 4].1[0];
        tx.push(to, None, 100, |into| into.copy_from_slice(&pattern(100, seed)));
    }
    assert_eq!(from.send(0, &mut tx), SendOutcome { sent: 64, ..SendOutcome::default() });
    let mut rx = rx();
    for (number, (client, _)) in clients.iter_mut().enumerate() {
        assert!(!client.recv(0, &mut rx), "one buffer of 16: nothing is left");
        let seeds = (number..64).step_by(4);
        let expected: Vec<_> = seeds.map(|seed| pattern(100, seed)).collect();
        let got: Vec<_> = rx.items.iter().map(|datagram| rx.payload(datagram).to_vec()).collect();
        assert_eq!(got, expected);
        let offsets: Vec<_> = rx.items.iter().map(|datagram| datagram.offset).collect();
        assert!(offsets.windows(2).all(|pair| pair[1] == pair[0] + 100), "all in one buffer");
    }
}

#[test]
fn a_wildcard_port_answers_from_the_address_the_client_used() {
    let (mut nic, addresses) = open(&[udp("0.0.0.0:0"), udp("[::]:0")]);
    let (mut rx, mut tx) = (rx(), TxBatch::new(64, 1 << 20));
    for (port, ip) in [(0, "127.0.0.2"), (0, "127.1.2.3"), (1, "::1")] {
        let target = SocketAddr::new(ip.parse().unwrap(), addresses[port as usize].port());
        // A connected socket drops answers from any other address.
        let socket = udp_client(target);
        for seed in 0..3 {
            socket.send(&pattern(40, seed)).unwrap();
        }
        let mut echoed = 0;
        until(|| {
            echoed += echo_once(&mut nic, port, &mut rx, &mut tx);
            assert!(rx.items.iter().all(|datagram| datagram.local == Some(target.ip())));
            (echoed == 3).then_some(())
        });
        for seed in 0..3 {
            let mut got = [0; 100];
            let len = socket.recv(&mut got).unwrap();
            assert_eq!(got[..len], pattern(40, seed));
        }
    }
}

#[test]
fn order_is_kept_per_peer() {
    let (mut nic, addresses) = open(&[udp("127.0.0.1:0")]);
    let clients: Vec<_> = (0..5).map(|_| udp_client(addresses[0])).collect();
    let (mut rx, mut tx) = (rx(), TxBatch::new(4096, 1 << 20));
    let mut next: HashMap<SocketAddr, u32> = HashMap::new();
    let mut got = 0;
    for round in 0..200u32 {
        for socket in &clients {
            socket.send(&round.to_le_bytes()).unwrap();
        }
        if round % 20 != 19 {
            continue;
        }
        until(|| {
            got += echo_once(&mut nic, 0, &mut rx, &mut tx) as u32;
            for datagram in &rx.items {
                let expected = next.entry(datagram.peer).or_default();
                assert_eq!(rx.payload(datagram), expected.to_le_bytes());
                *expected += 1;
            }
            (got == (round + 1) * 5).then_some(())
        });
    }
    for socket in &clients {
        for round in 0..200u32 {
            let mut bytes = [0; 8];
            assert_eq!(socket.recv(&mut bytes).unwrap(), 4);
            assert_eq!(bytes[..4], round.to_le_bytes());
        }
    }
}

#[test]
fn a_datagram_larger_than_its_buffer_is_marked() {
    let (mut nic, addresses) = open(&[udp("127.0.0.1:0")]);
    let socket = udp_client(addresses[0]);
    let mut small = RxBatch::new(64, 1024);
    for (len, truncated) in [(1024, false), (1025, true), (9000, true), (10, false)] {
        socket.send(&pattern(len, len)).unwrap();
        until(|| {
            nic.recv(0, &mut small);
            (!small.items.is_empty()).then_some(())
        });
        let datagram = small.items[0];
        assert_eq!(datagram.truncated, truncated, "{len} bytes");
        assert_eq!(small.payload(&datagram), &pattern(len, len)[..len.min(1024)]);
    }
}

#[test]
fn what_the_host_kernel_drops_is_counted() {
    // With one port it is asked in each poll, with three it is in the epoll set.
    for ports in [1, 3] {
        let options = SocketOptions { receive_buffer_bytes: 0, ..SocketOptions::default() };
        let mut nic = SocketNic::open(&vec![udp("127.0.0.1:0"); ports], options).unwrap();
        let socket = udp_client(nic.local_addresses()[0]);
        let (mut rx, mut events) = (rx(), Vec::new());
        let mut total = 0;
        for _ in 0..3 {
            for _ in 0..300 {
                socket.send(&[7; 100]).unwrap();
            }
            let (mut received, mut overflowed) = (0, 0);
            // No later datagram reports the last drops; they are found all the same.
            until(|| {
                nic.poll(0, &mut events);
                if events.contains(&Event::Datagrams(0)) {
                    nic.recv(0, &mut rx);
                    received += rx.items.len();
                    overflowed += rx.overflowed as usize;
                }
                (received + overflowed >= 300).then_some(())
            });
            assert_eq!(received + overflowed, 300);
            assert!(overflowed > 0, "the buffer should be too small for 300");
            total += overflowed;
        }
        assert!(total < 900);
    }
}

#[test]
fn refused_datagrams_are_counted_and_block_nothing() {
    let (mut nic, _) = open(&[udp("127.0.0.1:0")]);
    let reader = UdpSocket::bind("127.0.0.1:0").unwrap();
    let good = reader.local_addr().unwrap();
    let port_zero = SocketAddr::new(good.ip(), 0);
    let other_family: SocketAddr = "[::1]:9".parse().unwrap();
    let mut tx = TxBatch::new(64, 1 << 20);
    let mut push = |peer, local: Option<&str>, len| {
        tx.push(peer, local.map(|ip| ip.parse().unwrap()), len, |into| into.fill(len as u8));
    };
    push(port_zero, None, 10);
    push(good, None, 1);
    for _ in 0..5 {
        push(port_zero, None, 20);
    }
    push(other_family, None, 30);
    push(good, Some("127.0.0.9"), 2);
    push(good, Some("203.0.113.1"), 40);
    push(good, Some("::1"), 50);
    push(good, None, 3);
    push(good, None, 3);
    let outcome = nic.send(0, &mut tx);
    assert!(tx.is_empty());
    assert_eq!(outcome.sent + outcome.refused, 13);
    let mut got = Vec::new();
    reader.set_nonblocking(true).unwrap();
    let mut bytes = [0; 100];
    while let Ok((len, from)) = reader.recv_from(&mut bytes) {
        got.push(len);
        assert_eq!(from.ip().to_string(), if len == 2 { "127.0.0.9" } else { "127.0.0.1" });
    }
    // The host kernel may ignore a source address of another family.
    got.retain(|&len| len != 50);
    assert_eq!(got, [1, 2, 3, 3]);
    assert!(outcome.refused >= 8);
    assert_eq!(
        nic.counters().segmentation_fallbacks,
        0,
        "a bad peer does not disable segmentation"
    );
}

/// Lengths that form batches, break them and end them.
fn datagram_len() -> impl Strategy<Value = usize> {
    prop_oneof![Just(0), Just(64), 1usize..200, 1000usize..3000]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]

    /// Every datagram leaves once, in order per peer, and sent + refused equals the number given.
    #[test]
    fn no_datagram_is_lost_or_counted_twice(
        datagrams in prop::collection::vec((0usize..4, datagram_len()), 1..300),
        offload: bool,
    ) {
        let options = SocketOptions { segmentation_offload: offload, ..SocketOptions::default() };
        let mut nic = SocketNic::open(&[udp("127.0.0.1:0")], options).unwrap();
        let readers: Vec<_> = (0..3).map(|_| {
            let reader = UdpSocket::bind("127.0.0.1:0").unwrap();
            reader.set_nonblocking(true).unwrap();
            reader
        }).collect();
        let mut peers: Vec<_> = readers.iter().map(|reader| reader.local_addr().unwrap()).collect();
        peers.push("127.0.0.1:0".parse().unwrap());
        let mut tx = TxBatch::new(datagrams.len(), 2 << 20);
        let mut expected = vec![Vec::new(); 4];
        let mut arrived = vec![Vec::new(); 4];
        for (seed, &(peer, len)) in datagrams.iter().enumerate() {
            let payload = pattern(len, seed);
            tx.push(peers[peer], None, len, |into| into.copy_from_slice(&payload));
            expected[peer].push(payload);
        }
        let mut outcome = SendOutcome::default();
        let mut bytes = [0; 4096];
        while !tx.is_empty() {
            let step = nic.send(0, &mut tx);
            outcome.sent += step.sent;
            outcome.refused += step.refused;
            for (reader, arrived) in readers.iter().zip(&mut arrived) {
                while let Ok(len) = reader.recv(&mut bytes) {
                    arrived.push(bytes[..len].to_vec());
                }
            }
        }
        prop_assert_eq!(outcome.refused, expected[3].len());
        prop_assert_eq!(outcome.sent + outcome.refused, datagrams.len());
        expected[3].clear();
        // The readers' default buffers hold this much, so no datagram may be lost.
        prop_assert_eq!(arrived, expected);
    }
}
