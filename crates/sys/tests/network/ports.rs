//! Claiming, sharing and releasing ports.

use std::collections::HashSet;
use std::io::Read as _;
use std::net::{TcpListener, TcpStream, UdpSocket};

use sys::{OpenError, PortSpec, SocketNic, SocketOptions};
use wire::nic::{Close, Event, Nic, TxBatch};

use crate::support::{
    PATIENCE, accept_as, echo_once, open, pattern, retry, rx, tcp, udp, udp_client, until,
};

fn refusal(port: PortSpec) -> OpenError {
    SocketNic::open(&[port], SocketOptions::default()).err().expect("the port should be refused")
}

#[test]
fn an_address_in_use_is_refused_by_name() {
    let udp_holder = UdpSocket::bind("127.0.0.1:0").unwrap();
    let tcp_holder = TcpListener::bind("[::1]:0").unwrap();
    // An engine of the same user, with SO_REUSEPORT set, is refused as well.
    let (_engine, held) = open(&[udp("0.0.0.0:0"), tcp("127.0.0.1:0")]);
    for port in [
        udp(&udp_holder.local_addr().unwrap().to_string()),
        udp(&format!("0.0.0.0:{}", udp_holder.local_addr().unwrap().port())),
        tcp(&tcp_holder.local_addr().unwrap().to_string()),
        udp(&held[0].to_string()),
        udp(&format!("127.0.0.1:{}", held[0].port())),
        tcp(&held[1].to_string()),
    ] {
        let error = refusal(port);
        assert!(matches!(error, OpenError::AddressInUse { .. }), "{error}");
        assert!(error.to_string().starts_with(&port.to_string()), "{error}");
    }
}

#[test]
fn an_address_of_another_host_is_refused() {
    for port in [udp("203.0.113.7:9000"), tcp("203.0.113.7:9000")] {
        let error = refusal(port);
        assert!(matches!(error, OpenError::NoSuchAddress { .. }), "{error}");
    }
}

#[test]
fn families_and_transports_share_a_port_number() {
    // Another program may take the number between choosing and using it.
    retry(|| {
        let (nic, addresses) = open(&[udp("0.0.0.0:0")]);
        let number = addresses[0].port();
        drop(nic);
        let ports = [
            udp(&format!("0.0.0.0:{number}")),
            udp(&format!("[::]:{number}")),
            tcp(&format!("0.0.0.0:{number}")),
            tcp(&format!("[::]:{number}")),
        ];
        let nic = SocketNic::open(&ports, SocketOptions::default())?;
        assert_eq!(nic.local_addresses(), ports.map(|port| port.address));
        Ok(())
    });
}

#[test]
fn workers_share_ports_and_every_flow_meets_one_of_them() {
    let (first, addresses) = open(&[udp("127.0.0.1:0"), tcp("127.0.0.1:0")]);
    let mut nics = [first.sibling().unwrap(), first.sibling().unwrap(), first];
    assert!(nics.iter().all(|nic| nic.local_addresses() == addresses));
    let (mut rx, mut tx) = (rx(), TxBatch::new(64, 1 << 20));
    let clients: Vec<_> = (0..60).map(|_| udp_client(addresses[0])).collect();
    for (seed, socket) in clients.iter().enumerate() {
        socket.send(&pattern(30, seed)).unwrap();
    }
    let mut served = [0; 3];
    until(|| {
        for (nic, served) in nics.iter_mut().zip(&mut served) {
            *served += echo_once(nic, 0, &mut rx, &mut tx);
        }
        (served.iter().sum::<usize>() == 60).then_some(())
    });
    assert!(served.iter().all(|&count| count > 0), "{served:?}");
    for (seed, socket) in clients.iter().enumerate() {
        let mut got = [0; 64];
        let len = socket.recv(&mut got).unwrap();
        assert_eq!(got[..len], pattern(30, seed));
    }
    let streams: Vec<_> = (0..60).map(|_| TcpStream::connect(addresses[1]).unwrap()).collect();
    let mut peers = HashSet::new();
    let mut accepted = [0; 3];
    until(|| {
        for (nic, accepted) in nics.iter_mut().zip(&mut accepted) {
            while let Some((_, peer)) = nic.accept(1) {
                peers.insert(peer);
                *accepted += 1;
            }
        }
        (peers.len() == streams.len()).then_some(())
    });
    assert!(accepted.iter().all(|&count| count > 0), "{accepted:?}");
}

#[test]
fn a_port_is_free_again_after_its_connections_ended_here() {
    retry(|| {
        let (mut nic, addresses) = open(&[tcp("127.0.0.1:0")]);
        let mut client = TcpStream::connect(addresses[0]).unwrap();
        accept_as(&mut nic, 0, 1);
        // The side that closes first keeps the TIME_WAIT state.
        nic.close(1, Close::Graceful);
        assert_eq!(client.read(&mut [0; 8]).unwrap(), 0);
        drop((client, nic));
        let again = [tcp(&addresses[0].to_string())];
        let nic = SocketNic::open(&again, SocketOptions::default())?;
        assert_eq!(nic.local_addresses(), addresses);
        Ok(())
    });
}

#[test]
fn after_stop_listening_nothing_comes_in_but_replies_leave() {
    let (mut nic, addresses) = open(&[udp("127.0.0.1:0"), tcp("127.0.0.1:0")]);
    let (mut rx, mut tx) = (rx(), TxBatch::new(64, 1 << 20));
    let socket = udp_client(addresses[0]);
    socket.send(b"served").unwrap();
    until(|| {
        nic.recv(0, &mut rx);
        (!rx.items.is_empty()).then_some(())
    });
    let asked = rx.items[0];
    let mut client = TcpStream::connect(addresses[1]).unwrap();
    accept_as(&mut nic, 1, 1);

    nic.stop_listening();
    socket.send(b"too late").unwrap();
    let mut events = Vec::new();
    for sleep_ns in [0, 1000, 1_000_000] {
        nic.poll(sleep_ns, &mut events);
        assert!(!events.contains(&Event::Datagrams(0)), "{events:?}");
    }
    assert!(!nic.recv(0, &mut rx));
    assert!(rx.items.is_empty());
    assert!(TcpStream::connect(addresses[1]).is_err());
    assert!(nic.accept(1).is_none());

    tx.push(asked.peer, asked.local, 5, |into| into.copy_from_slice(b"reply"));
    assert_eq!(nic.send(0, &mut tx).sent, 1);
    let mut got = [0; 16];
    assert_eq!(socket.recv(&mut got).unwrap(), 5);
    nic.write(1, b"bye");
    nic.close(1, Close::Graceful);
    let mut text = String::new();
    client.set_read_timeout(Some(PATIENCE)).unwrap();
    client.read_to_string(&mut text).unwrap();
    assert_eq!(text, "bye");
}

#[test]
fn unknown_ports_are_ignored() {
    let (mut nic, addresses) = open(&[udp("127.0.0.1:0")]);
    let mut tx = TxBatch::new(4, 1000);
    tx.push(addresses[0], None, 1, |_| {});
    assert_eq!(nic.send(9, &mut tx).sent, 0);
    assert!(!nic.recv(9, &mut rx()));
    assert!(nic.accept(0).is_none() && nic.accept(9).is_none());
    assert!(nic.effective_buffers(9).is_none());
    assert!(nic.effective_buffers(0).is_some_and(|(receive, send)| receive > 0 && send > 0));
}
