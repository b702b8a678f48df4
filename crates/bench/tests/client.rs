//! The measuring client against servers that misbehave in known ways.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, UdpSocket};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use bench::client::{self, Burst, ClientError, Echo, Load, Stream, Workload};
use wire::framing::Framing;

/// A UDP server on its own thread that sends the result of `answer` for the n-th datagram.
struct UdpServer {
    address: SocketAddr,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl UdpServer {
    fn start(mut answer: impl FnMut(u64, &[u8]) -> Vec<Vec<u8>> + Send + 'static) -> Self {
        let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
        socket.set_read_timeout(Some(Duration::from_millis(20))).unwrap();
        let address = socket.local_addr().unwrap();
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = stop.clone();
        let thread = std::thread::spawn(move || {
            let mut buffer = [0; 65_536];
            let mut n = 0;
            while !stopped.load(Ordering::Relaxed) {
                let Ok((len, peer)) = socket.recv_from(&mut buffer) else { continue };
                for reply in answer(n, &buffer[..len]) {
                    socket.send_to(&reply, peer).unwrap();
                }
                n += 1;
            }
        });
        Self { address, stop, thread: Some(thread) }
    }
}

impl Drop for UdpServer {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.take().unwrap().join().unwrap();
    }
}

fn load(window: usize, requests: u64) -> Load {
    Load { window, requests, timeout: Duration::from_secs(20), ..Load::default() }
}

/// A TCP server that runs `serve` for each connection on its own thread.
fn tcp_server(serve: impl Fn(usize, std::net::TcpStream) + Send + Sync + 'static) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let serve = Arc::new(serve);
    std::thread::spawn(move || {
        for (n, stream) in listener.incoming().enumerate() {
            let (serve, stream) = (serve.clone(), stream.unwrap());
            // Without it every small write waits for the client's delayed acknowledgement.
            stream.set_nodelay(true).unwrap();
            std::thread::spawn(move || serve(n, stream));
        }
    });
    address
}

/// Echoes, `most` bytes at a time.
fn echo(mut stream: std::net::TcpStream, most: usize) {
    let mut buffer = vec![0; most];
    while let Ok(len @ 1..) = stream.read(&mut buffer) {
        if stream.write_all(&buffer[..len]).is_err() {
            break;
        }
    }
}

#[test]
fn every_datagram_is_asked_once_and_checked() {
    let server = UdpServer::start(|_, request| vec![request.to_vec()]);
    for (window, len) in [(1, 64), (16, 0), (64, 1400)] {
        let outcome =
            client::udp(server.address, &load(window, 2000), &mut Echo::new(len)).unwrap();
        assert!(outcome.is_perfect(), "{outcome:?}");
        assert_eq!((outcome.sent, outcome.latency.len()), (2000, 2000));
        assert!(outcome.rate() > 0.0 && outcome.quantile_us(0.5) <= outcome.quantile_us(0.99));
    }
}

#[test]
fn lost_datagrams_are_counted_and_the_run_continues() {
    let server =
        UdpServer::start(|n, request| if n % 10 == 3 { vec![] } else { vec![request.to_vec()] });
    let brief = Load { timeout: Duration::from_millis(500), ..load(8, 100) };
    let outcome = client::udp(server.address, &brief, &mut Echo::new(32)).unwrap();
    assert_eq!((outcome.sent, outcome.wrong), (100, 0), "{outcome:?}");
    // On a busy machine others may be late.
    assert!(outcome.lost >= 10 && outcome.lost + outcome.replied == 100, "{outcome:?}");
}

#[test]
fn a_late_reply_is_not_taken_for_the_next_one() {
    // Every answer is sent when the next request arrives: with one request in flight it is always late.
    let mut held: Option<Vec<u8>> = None;
    let server =
        UdpServer::start(move |_, request| held.replace(request.to_vec()).into_iter().collect());
    let short = Load { timeout: Duration::from_millis(30), ..load(1, 10) };
    let outcome = client::udp(server.address, &short, &mut Echo::new(32)).unwrap();
    // It is sent to the client's old socket, which has been replaced by then.
    assert_eq!((outcome.replied, outcome.lost + outcome.wrong), (0, 10), "{outcome:?}");
}

/// The server answers the first eight requests when the client has given them up, `times` times each.
fn answered_late(len_bytes: usize, times: usize) -> client::Outcome {
    const TIMEOUT: Duration = Duration::from_millis(200);
    let mut held = Vec::new();
    let server = UdpServer::start(move |n, request| match n {
        0..7 => {
            held.push(request.to_vec());
            vec![]
        }
        7 => {
            held.push(request.to_vec());
            std::thread::sleep(TIMEOUT * 3 / 2);
            held.iter().flat_map(|reply| vec![reply.clone(); times]).collect()
        }
        _ => vec![request.to_vec()],
    });
    let short = Load { timeout: TIMEOUT, ..load(8, 24) };
    let burst = Burst { sockets: 1, offload: false };
    client::burst(server.address, &burst, &short, &mut Echo::new(len_bytes)).unwrap()
}

#[test]
fn replies_to_requests_that_were_given_up_are_late_and_no_duplicates() {
    // With and without the number of the request.
    for len_bytes in [32, 4] {
        let outcome = answered_late(len_bytes, 1);
        assert!(outcome.lost >= 8 && outcome.late >= 8, "{len_bytes} {outcome:?}");
        assert_eq!((outcome.sent, outcome.duplicated), (24, 0), "{len_bytes} {outcome:?}");
        // On a busy machine others may be late.
        assert!(outcome.replied > 0 || outcome.lost > 8, "{len_bytes} {outcome:?}");
    }
    let twice = answered_late(32, 2);
    assert!(twice.late >= 8 && twice.duplicated >= 8, "{twice:?}");
}

#[test]
fn wrong_and_duplicate_replies_are_distinguished() {
    let server = UdpServer::start(|n, request| match n % 4 {
        0 => vec![b"nonsense".to_vec()],
        1 => vec![[request, b"x"].concat()],
        _ => vec![request.to_vec()],
    });
    let outcome = client::udp(server.address, &load(1, 100), &mut Echo::new(32)).unwrap();
    assert_eq!((outcome.wrong, outcome.replied, outcome.lost), (50, 50, 0), "{outcome:?}");
}

#[test]
fn a_closed_port_loses_everything_and_the_run_ends() {
    // A socket connected to itself occupies the port and refuses the client.
    let closed = UdpSocket::bind("127.0.0.1:0").unwrap();
    let free = closed.local_addr().unwrap();
    closed.connect(free).unwrap();
    let outcome = client::udp(free, &load(4, 20), &mut Echo::new(32)).unwrap();
    assert_eq!((outcome.sent, outcome.replied), (20, 0), "{outcome:?}");
    assert_eq!(outcome.lost, 20);
    // A separate address: another test may get the port of 127.0.0.1 meanwhile.
    let free = TcpListener::bind("127.0.0.99:0").unwrap().local_addr().unwrap();
    let refused =
        client::tcp(free, &Stream::new(Framing::LengthU32), &load(4, 20), &mut Echo::new(32));
    assert!(matches!(refused, Err(ClientError::Refused(_))), "{refused:?}");
}

#[test]
fn the_time_limit_and_the_cancel_flag_end_a_run() {
    let server = UdpServer::start(|_, request| vec![request.to_vec()]);
    let brief = Load { duration: Duration::from_millis(50), ..load(4, u64::MAX) };
    let outcome = client::udp(server.address, &brief, &mut Echo::new(32)).unwrap();
    assert!(outcome.is_perfect(), "{outcome:?}");
    let cancelled = load(4, u64::MAX);
    cancelled.cancel.store(true, Ordering::Relaxed);
    let outcome = client::udp(server.address, &cancelled, &mut Echo::new(32)).unwrap();
    assert_eq!(outcome.sent, outcome.replied + outcome.wrong + outcome.lost);
}

#[test]
fn pipelined_streams_are_cut_into_replies_wherever_reads_end() {
    let framings = [Framing::LengthU16, Framing::LengthU32, Framing::Fixed(48)];
    for most in [1, 7, 65_536] {
        let address = tcp_server(move |_, stream| echo(stream, most));
        for framing in framings {
            for connections in [1, 3] {
                let stream = Stream { connections, ..Stream::new(framing) };
                let outcome =
                    client::tcp(address, &stream, &load(12, 500), &mut Echo::new(48)).unwrap();
                assert!(outcome.is_perfect(), "{framing} {most}: {outcome:?}");
            }
        }
    }
}

#[test]
fn replies_may_have_another_framing_than_requests() {
    /// Requests of ten bytes, replies of two.
    struct Ends;
    impl Workload for Ends {
        fn request(&mut self, index: u64, into: &mut Vec<u8>) {
            into.extend_from_slice(&[index as u8; 10]);
        }
        fn accepts(&mut self, index: u64, reply: &[u8]) -> bool {
            reply == [index as u8; 2]
        }
    }
    let address = tcp_server(|_, mut stream| {
        let mut request = [0; 10];
        while stream.read_exact(&mut request).is_ok() {
            stream.write_all(&request[..2]).unwrap();
        }
    });
    let stream =
        Stream { connections: 2, framing: Framing::Fixed(10), reply_framing: Framing::Fixed(2) };
    let outcome = client::tcp(address, &stream, &load(8, 300), &mut Ends).unwrap();
    assert!(outcome.is_perfect(), "{outcome:?}");
}

#[test]
fn large_messages_do_not_deadlock() {
    let address = tcp_server(|_, stream| echo(stream, 65_536));
    let large = Load { reply_bytes_max: 1 << 20, timeout: Duration::from_secs(20), ..load(16, 40) };
    let stream = Stream::new(Framing::LengthU32);
    let outcome = client::tcp(address, &stream, &large, &mut Echo::new(1 << 20)).unwrap();
    assert!(outcome.is_perfect(), "{outcome:?}");
}

#[test]
fn a_closed_connection_is_replaced_and_its_requests_are_lost() {
    // The first two connections end after some bytes, later ones stay open.
    let address = tcp_server(|n, mut stream| {
        if n < 2 {
            let mut some = [0; 100];
            let _ = stream.read_exact(&mut some);
        } else {
            echo(stream, 4096);
        }
    });
    let stream = Stream::new(Framing::LengthU32);
    let outcome = client::tcp(address, &stream, &load(8, 200), &mut Echo::new(60)).unwrap();
    assert_eq!((outcome.sent, outcome.wrong), (200, 0), "{outcome:?}");
    assert_eq!((outcome.lost, outcome.replied), (16, 184), "{outcome:?}");
    assert_eq!(outcome.reconnects, 2);
}

#[test]
fn a_silent_connection_is_given_up() {
    let address = tcp_server(|_, mut stream| {
        let mut away = [0; 4096];
        while let Ok(1..) = stream.read(&mut away) {}
    });
    let short = Load { timeout: Duration::from_millis(50), ..load(4, 8) };
    let outcome =
        client::tcp(address, &Stream::new(Framing::LengthU32), &short, &mut Echo::new(8)).unwrap();
    assert_eq!((outcome.lost, outcome.replied), (8, 0), "{outcome:?}");
}

#[test]
fn impossible_loads_are_refused() {
    let at: SocketAddr = "127.0.0.1:9".parse().unwrap();
    let asks = &mut Echo::new(8);
    let window = client::udp(at, &load(0, 1), asks).unwrap_err().to_string();
    assert!(window.contains("must be in [1, 4096]"), "{window}");
    let stream = Stream { connections: 3, ..Stream::new(Framing::Raw) };
    let connections = client::tcp(at, &stream, &load(2, 1), asks).unwrap_err().to_string();
    assert!(connections.contains("3 connections cannot share a window of 2"), "{connections}");
    let address = tcp_server(|_, stream| echo(stream, 4096));
    let fixed = Stream::new(Framing::Fixed(10));
    let unframable = client::tcp(address, &fixed, &load(1, 1), asks).unwrap_err().to_string();
    assert!(unframable.contains("fixed:10") && unframable.contains("8 bytes"), "{unframable}");
}
