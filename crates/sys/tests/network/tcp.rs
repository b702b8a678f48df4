//! TCP connections, accepted and made, and UDP streams to backends.

use std::io::{ErrorKind, Read as _, Write as _};
use std::net::{TcpListener, TcpStream, UdpSocket};
use std::os::fd::AsRawFd;
use std::thread;

use wire::nic::{Close, Event, Nic, NicError, Read, Transport, Written};

use crate::support::{PATIENCE, accept_as, open, pattern, poll_for, poll_until, tcp, udp, until};

fn client(to: std::net::SocketAddr) -> TcpStream {
    let client = TcpStream::connect(to).unwrap();
    client.set_read_timeout(Some(PATIENCE)).unwrap();
    client
}

#[test]
fn accepts_echoes_and_closes() {
    let (mut nic, addresses) = open(&[tcp("127.0.0.1:0"), tcp("[::1]:0")]);
    for (port, address) in addresses.iter().enumerate() {
        let port = port as u16;
        let key = 7 + u32::from(port);
        let mut client = client(*address);
        poll_for(&mut nic, Event::Connections(port));
        assert_eq!(accept_as(&mut nic, port, key), client.local_addr().unwrap());
        assert!(nic.accept(port).is_none());
        let mut buffer = [0; 64];
        assert_eq!(nic.read(key, &mut buffer), Read::Empty);
        client.write_all(b"question").unwrap();
        poll_for(&mut nic, Event::Readable(key));
        assert_eq!(nic.read(key, &mut buffer), Read::Bytes(8));
        assert_eq!(nic.write(key, b"answer"), Written::Bytes(6));
        nic.close(key, Close::Graceful);
        let mut answer = String::new();
        client.read_to_string(&mut answer).unwrap();
        assert_eq!(answer, "answer");
        assert_eq!(nic.read(key, &mut buffer), Read::Broken, "the key is free");
        assert_eq!(nic.write(key, b"x"), Written::Broken);
        nic.close(key, Close::Graceful);
    }
}

/// A transfer may hold a descriptor of a stream for a while after its end: the peer finds out at once, and what happens to the former
/// stream is no event of the next one with its key.
#[test]
fn the_end_of_a_lent_stream_waits_for_no_other_descriptor() {
    let (mut nic, addresses) = open(&[tcp("127.0.0.1:0")]);
    let mut buffer = [0; 64];
    for how in [Close::Graceful, Close::Reset] {
        let mut first = client(addresses[0]);
        poll_for(&mut nic, Event::Connections(0));
        accept_as(&mut nic, 0, 3);
        let other = nic.lend(3).expect("a descriptor is free");
        assert_eq!(nic.write(3, b"all"), Written::Bytes(3));
        let mut found = [0; 3];
        first.read_exact(&mut found).unwrap();
        nic.close(3, how);
        let end = first.read(&mut found);
        match how {
            Close::Graceful => assert_eq!(end.unwrap(), 0),
            _ => assert_eq!(end.unwrap_err().kind(), ErrorKind::ConnectionReset),
        }
        let mut next = client(addresses[0]);
        poll_for(&mut nic, Event::Connections(0));
        accept_as(&mut nic, 0, 3);
        drop(first);
        next.write_all(b"hello").unwrap();
        poll_for(&mut nic, Event::Readable(3));
        assert_eq!(nic.read(3, &mut buffer), Read::Bytes(5));
        let mut events = Vec::new();
        for _ in 0..3 {
            nic.poll(0, &mut events);
            assert_eq!(events, [], "{how:?}");
        }
        drop(other);
        nic.close(3, Close::Graceful);
    }
}

#[test]
fn a_client_that_does_not_read_fills_the_connection_and_gets_everything_later() {
    let (mut nic, addresses) = open(&[tcp("127.0.0.1:0")]);
    let mut client = client(addresses[0]);
    accept_as(&mut nic, 0, 0);
    let payload = pattern(32 << 20, 3);
    let mut written = 0;
    let mut fulls = 0;
    let mut events = Vec::new();
    loop {
        match nic.write(0, &payload[written..]) {
            Written::Bytes(len) => written += len,
            Written::Full => break,
            Written::Broken => panic!("the client is alive"),
        }
        assert!(written < payload.len(), "32 MiB exceed any socket buffer");
    }
    nic.poll(0, &mut events);
    assert!(!events.contains(&Event::Writable(0)), "the client has not read yet");
    let expected = payload.clone();
    let reader = thread::spawn(move || {
        let mut got = Vec::new();
        client.read_to_end(&mut got).unwrap();
        assert!(got == expected);
    });
    while written < payload.len() {
        match nic.write(0, &payload[written..]) {
            Written::Bytes(len) => written += len,
            Written::Full => {
                fulls += 1;
                poll_for(&mut nic, Event::Writable(0));
            }
            Written::Broken => panic!("the client is alive"),
        }
    }
    assert!(fulls > 0);
    nic.close(0, Close::Graceful);
    reader.join().unwrap();
}

#[test]
fn what_a_peer_sent_before_closing_is_read_before_closed() {
    let (mut nic, addresses) = open(&[tcp("127.0.0.1:0")]);
    let mut client = client(addresses[0]);
    accept_as(&mut nic, 0, 5);
    client.write_all(&pattern(1000, 1)).unwrap();
    drop(client);
    let (mut got, mut chunk) = (Vec::new(), [0; 300]);
    poll_for(&mut nic, Event::Readable(5));
    let end = until(|| match nic.read(5, &mut chunk) {
        Read::Bytes(len) => {
            got.extend_from_slice(&chunk[..len]);
            None
        }
        Read::Empty => None,
        end => Some(end),
    });
    assert_eq!((end, got), (Read::Closed, pattern(1000, 1)));
}

fn reset(stream: TcpStream) {
    let linger = libc::linger { l_onoff: 1, l_linger: 0 };
    // SAFETY: the pointer and length describe `linger`, which outlives the call.
    let ret = unsafe {
        libc::setsockopt(
            stream.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_LINGER,
            (&raw const linger).cast(),
            size_of_val(&linger) as u32,
        )
    };
    assert_eq!(ret, 0);
}

#[test]
fn a_reset_by_the_peer_is_reported_and_reads_as_broken() {
    let (mut nic, addresses) = open(&[tcp("127.0.0.1:0")]);
    let client = client(addresses[0]);
    accept_as(&mut nic, 0, 3);
    reset(client);
    poll_for(&mut nic, Event::Failed(3));
    assert_eq!(nic.read(3, &mut [0; 8]), Read::Broken);
    assert_eq!(nic.write(3, b"x"), Written::Broken);
    nic.close(3, Close::Graceful);
}

#[test]
fn the_end_of_a_stream_is_reported_after_a_short_read() {
    let (mut nic, addresses) = open(&[tcp("127.0.0.1:0"), udp("127.0.0.1:0")]);
    for how in [Close::Graceful, Close::Reset] {
        let mut client = client(addresses[0]);
        accept_as(&mut nic, 0, 3);
        client.write_all(b"last words").unwrap();
        if how == Close::Reset {
            reset(client);
        } else {
            drop(client);
        }
        // Both the bytes and the end have arrived before the first poll: a single edge.
        poll_for(&mut nic, Event::Readable(3));
        let mut buffer = [0; 64];
        assert_eq!(nic.read(3, &mut buffer), Read::Bytes(10));
        poll_for(&mut nic, Event::Readable(3));
        let end = if how == Close::Reset { Read::Broken } else { Read::Closed };
        assert_eq!(nic.read(3, &mut buffer), end);
        nic.close(3, Close::Graceful);
        let mut events = Vec::new();
        nic.poll(0, &mut events);
        assert!(!events.contains(&Event::Readable(3)), "{events:?}");
    }
}

#[test]
fn an_owed_event_does_not_pass_to_the_next_stream_of_a_key() {
    let (mut nic, addresses) = open(&[tcp("127.0.0.1:0")]);
    let mut client = client(addresses[0]);
    accept_as(&mut nic, 0, 3);
    client.write_all(b"x").unwrap();
    drop(client);
    poll_for(&mut nic, Event::Readable(3));
    assert_eq!(nic.read(3, &mut [0; 8]), Read::Bytes(1));
    nic.close(3, Close::Graceful);
    let _next = TcpStream::connect(addresses[0]).unwrap();
    accept_as(&mut nic, 0, 3);
    let mut events = Vec::new();
    nic.poll(0, &mut events);
    assert!(!events.contains(&Event::Readable(3)), "{events:?}");
}

#[test]
fn closing_by_reset_is_seen_as_one() {
    let (mut nic, addresses) = open(&[tcp("127.0.0.1:0")]);
    let mut client = client(addresses[0]);
    accept_as(&mut nic, 0, 3);
    nic.close(3, Close::Reset);
    let error = client.read(&mut [0; 8]).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::ConnectionReset);
}

#[test]
fn a_graceful_close_with_unread_input_does_not_destroy_the_reply() {
    let (mut nic, addresses) = open(&[tcp("127.0.0.1:0")]);
    let mut client = client(addresses[0]);
    accept_as(&mut nic, 0, 3);
    client.write_all(&pattern(100_000, 0)).unwrap();
    poll_for(&mut nic, Event::Readable(3));
    assert_eq!(nic.write(3, b"too long"), Written::Bytes(8));
    nic.close(3, Close::Graceful);
    let mut answer = String::new();
    client.read_to_string(&mut answer).unwrap();
    assert_eq!(answer, "too long");
}

#[test]
fn connects_to_a_backend() {
    let backend = TcpListener::bind("127.0.0.1:0").unwrap();
    let (mut nic, _) = open(&[]);
    nic.connect(backend.local_addr().unwrap(), Transport::Tcp, 1).unwrap();
    let (mut peer, _) = backend.accept().unwrap();
    poll_for(&mut nic, Event::Writable(1));
    assert_eq!(nic.write(1, b"ping"), Written::Bytes(4));
    let mut buffer = [0; 8];
    peer.read_exact(&mut buffer[..4]).unwrap();
    peer.write_all(b"pong!").unwrap();
    poll_for(&mut nic, Event::Readable(1));
    assert_eq!(nic.read(1, &mut buffer), Read::Bytes(5));
    assert_eq!(&buffer[..5], b"pong!");
}

#[test]
fn a_refused_connection_fails_and_its_key_can_be_used_again() {
    let backend = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = backend.local_addr().unwrap();
    drop(backend);
    let (mut nic, _) = open(&[]);
    for _ in 0..3 {
        nic.connect(address, Transport::Tcp, 3).unwrap();
        let event = poll_until(&mut nic, |event| {
            matches!(event, Event::Failed(3) | Event::Writable(3)).then_some(event)
        });
        assert_eq!(event, Event::Failed(3));
        nic.close(3, Close::Graceful);
    }
    let backend = TcpListener::bind(address).unwrap();
    nic.connect(address, Transport::Tcp, 3).unwrap();
    poll_for(&mut nic, Event::Writable(3));
    drop(backend);
}

#[test]
fn a_udp_stream_carries_one_datagram_a_call() {
    let backend = UdpSocket::bind("127.0.0.1:0").unwrap();
    let (mut nic, _) = open(&[]);
    nic.connect(backend.local_addr().unwrap(), Transport::Udp, 2).unwrap();
    let mut buffer = vec![0; 65_536];
    for (seed, len) in [5, 0, 1472, 65_507].into_iter().enumerate() {
        assert_eq!(nic.write(2, &pattern(len, seed)), Written::Bytes(len));
        let (got, from) = backend.recv_from(&mut buffer).unwrap();
        assert_eq!(buffer[..got], pattern(len, seed));
        backend.send_to(&buffer[..got], from).unwrap();
        backend.send_to(b"second", from).unwrap();
        poll_for(&mut nic, Event::Readable(2));
        assert_eq!(nic.read(2, &mut buffer), Read::Bytes(len));
        assert_eq!(buffer[..len], pattern(len, seed));
        assert_eq!(until(|| Some(nic.read(2, &mut buffer))), Read::Bytes(6));
        assert_eq!(nic.read(2, &mut buffer), Read::Empty);
    }
}

#[test]
fn a_udp_backend_that_is_not_there_breaks_the_stream() {
    let backend = UdpSocket::bind("127.0.0.1:0").unwrap();
    let address = backend.local_addr().unwrap();
    drop(backend);
    let (mut nic, _) = open(&[]);
    nic.connect(address, Transport::Udp, 2).unwrap();
    assert_eq!(nic.write(2, b"anybody?"), Written::Bytes(8));
    let mut events = Vec::new();
    until(|| {
        nic.poll(1_000_000, &mut events);
        events.contains(&Event::Failed(2)).then_some(())
    });
    assert_eq!(nic.read(2, &mut [0; 64]), Read::Broken);
}

#[test]
fn keys_are_checked() {
    let (mut nic, addresses) = open(&[tcp("127.0.0.1:0")]);
    let _clients: Vec<_> = (0..3).map(|_| client(addresses[0])).collect();
    accept_as(&mut nic, 0, (1 << 20) - 1);
    for key in [(1 << 20) - 1, 1 << 20, u32::MAX] {
        let (socket, _) = until(|| nic.accept(0));
        let error = nic.adopt(socket, key).unwrap_err();
        assert!(matches!(error, NicError::Refused(_)), "{error}");
        let error = nic.connect(addresses[0], Transport::Tcp, key).unwrap_err();
        assert!(matches!(error, NicError::Refused(_)), "{error}");
        if key == u32::MAX {
            break;
        }
        drop(client(addresses[0]));
    }
}

#[test]
fn a_connection_accepted_by_one_worker_can_live_at_another() {
    let (mut first, addresses) = open(&[tcp("127.0.0.1:0")]);
    let mut second = first.sibling().unwrap();
    let mut clients = Vec::new();
    let (socket, _) = until(|| {
        clients.push(client(addresses[0]));
        first.accept(0).or_else(|| second.accept(0))
    });
    let waker = second.waker();
    let worker = thread::spawn(move || {
        second.adopt(socket, 11).unwrap();
        poll_for(&mut second, Event::Readable(11));
        let mut buffer = [0; 16];
        assert_eq!(second.read(11, &mut buffer), Read::Bytes(5));
        assert_eq!(second.write(11, b"moved"), Written::Bytes(5));
        second
    });
    let client = clients.last_mut().unwrap();
    client.write_all(b"hello").unwrap();
    let mut buffer = [0; 5];
    client.read_exact(&mut buffer).unwrap();
    assert_eq!(&buffer, b"moved");
    waker.wake();
    worker.join().unwrap();
}
