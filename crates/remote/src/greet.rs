//! The two ends of a connection until both sides are authenticated.
//!
//! The accelerator's side listens, so anything may connect: until a peer has proved that it knows the secret it gets one
//! small buffer, a few seconds, and one of [`PENDING_MAX`] places ([`sys::accept_queue`]). When there is none for a new
//! peer, one of the network with the most places loses its own: of those that have sent nothing, else of all, the oldest.

use std::io::{self, ErrorKind, Read as _, Write as _};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream, ToSocketAddrs as _};
use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

use sys::accept_queue::{AcceptQueue, Candidate, Left};
use sys::readiness::wait_readable;

use crate::channel::Channel;
use crate::handshake::{Handshake, HandshakeError, INPUT_BYTES_MAX, Keys};
use crate::secret::Secret;

/// Connections that are not authenticated yet.
const PENDING_MAX: usize = 128;
/// Time for a handshake.
const HANDSHAKE_MAX: Duration = Duration::from_secs(5);

/// Why there is no link. The message is one sentence.
#[derive(Debug, thiserror::Error)]
pub enum LinkFailure {
    /// No address.
    #[error("{0:?} is not an address of a link: write tcp://HOST:PORT")]
    Address(String),
    /// No connection.
    #[error("no accelerator listens at {address}: {source}")]
    Connect {
        /// The address.
        address: String,
        /// What the host said.
        source: io::Error,
    },
    /// No handshake.
    #[error("no link to {address}: {source}")]
    Handshake {
        /// The address.
        address: String,
        /// Why.
        source: HandshakeError,
    },
}

/// `HOST:PORT` of `tcp://HOST:PORT`.
fn host_and_port(address: &str) -> Option<&str> {
    let rest = address.strip_prefix("tcp://")?;
    let (host, port) = rest.rsplit_once(':')?;
    (!host.is_empty() && port.parse::<u16>().is_ok()).then_some(rest)
}

/// Whether this is the address of a link: `tcp://HOST:PORT`.
pub fn is_address(address: &str) -> bool {
    host_and_port(address).is_some()
}

/// Connects to the accelerator's side at `tcp://HOST:PORT` and authenticates it, within `limit`.
pub fn connect(address: &str, secret: &Secret, limit: Duration) -> Result<Channel, LinkFailure> {
    let deadline = Instant::now() + limit;
    let failed = |source| LinkFailure::Connect { address: address.to_owned(), source };
    let name = host_and_port(address).ok_or_else(|| LinkFailure::Address(address.to_owned()))?;
    let mut last = io::Error::new(ErrorKind::NotFound, "its name has no address");
    for found in name.to_socket_addrs().map_err(failed)? {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            break;
        }
        match TcpStream::connect_timeout(&found, left) {
            Ok(stream) => {
                return greet(stream, secret, deadline).map_err(|source| LinkFailure::Handshake {
                    address: address.to_owned(),
                    source,
                });
            }
            Err(error) => last = error,
        }
    }
    Err(failed(last))
}

/// The engine's side of a handshake.
fn greet(
    mut stream: TcpStream,
    secret: &Secret,
    deadline: Instant,
) -> Result<Channel, HandshakeError> {
    stream.set_nodelay(true)?;
    let (mut input, mut output) = (Vec::new(), Vec::new());
    let mut handshake = Handshake::engine(secret, &mut output)?;
    let mut bytes = [0; INPUT_BYTES_MAX];
    loop {
        stream.write_all(&output)?;
        output.clear();
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(io::Error::new(ErrorKind::TimedOut, "it does not answer").into());
        }
        stream.set_read_timeout(Some(left))?;
        match stream.read(&mut bytes) {
            Ok(0) => {
                let text = "it closed the connection";
                return Err(io::Error::new(ErrorKind::ConnectionReset, text).into());
            }
            Ok(count) => input.extend_from_slice(&bytes[..count]),
            Err(error) if error.kind() == ErrorKind::WouldBlock => {
                return Err(io::Error::new(ErrorKind::TimedOut, "it does not answer").into());
            }
            Err(error) if error.kind() == ErrorKind::Interrupted => continue,
            Err(error) => return Err(error.into()),
        }
        match handshake.advance(&mut input, &mut output) {
            Ok(None) if input.len() <= INPUT_BYTES_MAX => {}
            Ok(Some(keys)) if input.is_empty() => return Ok(Channel::new(stream, keys)?),
            Ok(_) => return Err(HandshakeError::Order),
            Err(error) => {
                let _ = stream.write_all(&output);
                return Err(error);
            }
        }
    }
}

/// What became of a connection.
pub enum Greeted {
    /// A peer that knows the secret.
    Link(Channel, SocketAddr),
    /// A peer that does not, or something else went wrong.
    Refused(SocketAddr, HandshakeError),
}

/// The accelerator's side: listens and authenticates peers.
pub struct Greeter {
    listener: TcpListener,
    secret: Secret,
    pending: AcceptQueue<Pending>,
}

struct Pending {
    stream: TcpStream,
    from: SocketAddr,
    handshake: Handshake,
    input: Vec<u8>,
    /// The result of the handshake, when it has ended.
    result: Option<Result<Keys, HandshakeError>>,
}

impl AsFd for Pending {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }
}

impl Candidate for Pending {
    fn read(&mut self) -> bool {
        self.result = self.advance().transpose();
        self.result.is_some()
    }

    fn displaced(candidates: &[&Self]) -> Option<usize> {
        let peers = candidates.iter();
        let peers = peers.map(|peer| (peer.from.ip(), peer.handshake.is_silent()));
        Some(loser(&peers.collect::<Vec<_>>()))
    }
}

impl Greeter {
    /// Listens at `tcp://HOST:PORT`.
    pub fn bind(address: &str, secret: Secret) -> Result<Self, LinkFailure> {
        let name =
            host_and_port(address).ok_or_else(|| LinkFailure::Address(address.to_owned()))?;
        let failed = |source| LinkFailure::Connect { address: address.to_owned(), source };
        let listener = TcpListener::bind(name).map_err(failed)?;
        listener.set_nonblocking(true).map_err(failed)?;
        Ok(Self { listener, secret, pending: AcceptQueue::new(PENDING_MAX, HANDSHAKE_MAX) })
    }

    /// Where it listens.
    pub fn local_address(&self) -> io::Result<SocketAddr> {
        self.listener.local_addr()
    }

    /// Waits for at most `limit`, and returns what became of the connections that are no longer pending.
    pub fn advance(&mut self, limit: Duration) -> Vec<Greeted> {
        let now = Instant::now();
        let due = self.pending.next_deadline().map(|due| due.saturating_duration_since(now));
        let mut files = vec![self.listener.as_fd()];
        files.extend(self.pending.descriptors());
        let ready = wait_readable(&files, Some(due.map_or(limit, |due| due.min(limit))));
        let now = Instant::now();
        let mut left = self.pending.poll(&ready[1..], now);
        let mut done = Vec::new();
        if ready[0] {
            self.accept(now, &mut left, &mut done);
        }
        done.extend(left.into_iter().map(|(pending, why)| pending.end(why)));
        done
    }

    fn accept(&mut self, now: Instant, left: &mut Vec<(Pending, Left)>, done: &mut Vec<Greeted>) {
        let (listener, secret) = (&self.listener, &self.secret);
        let accept = || {
            let (stream, from) = match listener.accept() {
                Ok(accepted) => accepted,
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(None),
                Err(error) => return Err(error),
            };
            if let Err(error) = stream.set_nonblocking(true).and_then(|()| stream.set_nodelay(true))
            {
                done.push(Greeted::Refused(from, error.into()));
                return Ok(None);
            }
            let (input, handshake) = (Vec::new(), Handshake::accelerator(secret));
            Ok(Some(Pending { stream, from, handshake, input, result: None }))
        };
        // Without a free descriptor the connection stays in the listener's queue.
        let _ = self.pending.accept(now, accept, left);
    }
}

/// The peer that loses its place, among peers that came in this order: where each is, and whether it has sent nothing.
fn loser(peers: &[(IpAddr, bool)]) -> usize {
    let networks: Vec<IpAddr> = peers.iter().map(|(at, _)| network(*at)).collect();
    let places = |at: usize| networks.iter().filter(|other| **other == networks[at]).count();
    let rank = |at: usize| (places(at), peers[at].1);
    // The last one of equals is the maximum: the oldest.
    (0..peers.len()).rev().max_by_key(|at| rank(*at)).unwrap_or(0)
}

/// What one host can easily have all addresses of.
fn network(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(address) => {
            let [a, b, c, d, ..] = address.segments();
            IpAddr::from([a, b, c, d, 0, 0, 0, 0])
        }
        address => address,
    }
}

impl Pending {
    /// What became of it.
    fn end(self, why: Left) -> Greeted {
        let refused = |kind, text| Greeted::Refused(self.from, io::Error::new(kind, text).into());
        match (why, self.result) {
            (Left::Ended, Some(Ok(keys))) => match Channel::new(self.stream, keys) {
                Ok(channel) => Greeted::Link(channel, self.from),
                Err(error) => Greeted::Refused(self.from, error.into()),
            },
            (Left::Ended, Some(Err(error))) => Greeted::Refused(self.from, error),
            (Left::Displaced, _) => {
                refused(ErrorKind::Other, "others connected before it sent its proof")
            }
            (Left::Late | Left::Ended, _) => {
                refused(ErrorKind::TimedOut, "it did not send its proof in time")
            }
        }
    }

    /// Reads what has arrived. `None`: the handshake goes on.
    fn advance(&mut self) -> Result<Option<Keys>, HandshakeError> {
        let mut bytes = [0; INPUT_BYTES_MAX];
        match self.stream.read(&mut bytes) {
            Ok(0) => {
                let text = "it closed the connection before its proof";
                return Err(io::Error::new(ErrorKind::ConnectionReset, text).into());
            }
            Ok(count) => self.input.extend_from_slice(&bytes[..count]),
            Err(error)
                if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) =>
            {
                return Ok(None);
            }
            Err(error) => return Err(error.into()),
        }
        let mut output = Vec::new();
        let result = self.handshake.advance(&mut self.input, &mut output);
        // A fresh connection has room for a few hundred bytes; a peer for which it has not is ended.
        self.stream.write_all(&output)?;
        match result {
            Ok(Some(_)) if !self.input.is_empty() && !mutants::on("lose_early_bytes") => {
                Err(HandshakeError::Order)
            }
            Ok(None) if self.input.len() > INPUT_BYTES_MAX => Err(HandshakeError::Order),
            result => result,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
    use std::thread;

    use super::*;

    const PATIENCE: Duration = Duration::from_secs(60);

    #[test]
    fn the_network_with_most_places_loses_its_silent_then_its_oldest_peers() {
        let (many, few) = (IpAddr::from([10, 0, 0, 1]), IpAddr::from([10, 0, 0, 2]));
        assert_eq!(loser(&[(few, true), (many, false), (many, true), (many, true)]), 2);
        assert_eq!(loser(&[(few, true), (many, false), (many, false)]), 1);
        assert_eq!(loser(&[(few, false), (many, false)]), 0);
        let of = |d, h| IpAddr::from([0x2001, 0xdb8, 0, d, 0, 0, 0, h]);
        assert_eq!(loser(&[(of(1, 1), true), (of(2, 1), false), (of(2, 2), false)]), 1);
        let mapped = IpAddr::from([0, 0, 0, 0, 0, 0xffff, 0x0a00, 0x0001]);
        assert_eq!(loser(&[(few, true), (mapped, false), (many, false)]), 1);
    }

    #[test]
    fn a_peer_without_a_proof_loses_its_place_after_its_time() {
        let secret = Secret::of(b"a secret of the tests, of at least 32 bytes");
        let mut greeter = Greeter::bind("tcp://127.0.0.1:0", secret).unwrap();
        let mut peer = TcpStream::connect(greeter.local_address().unwrap()).unwrap();
        while greeter.pending.is_empty() {
            greeter.advance(PATIENCE);
        }
        let until = greeter.pending.next_deadline().unwrap();
        assert!(greeter.pending.poll(&[], until - Duration::from_nanos(1)).is_empty());
        let mut left = greeter.pending.poll(&[], until);
        let (pending, why) = left.pop().expect("its time is over");
        assert!(matches!(pending.end(why), Greeted::Refused(_, HandshakeError::Host(_))));
        assert_eq!(peer.read(&mut [0]).unwrap(), 0, "its connection has ended");
    }

    /// Nothing that was sent before the keys were there is part of the link.
    #[test]
    fn bytes_behind_a_proof_end_the_connection() {
        let secret = Secret::of(b"a secret of the tests, of at least 32 bytes");
        let mut greeter = Greeter::bind("tcp://127.0.0.1:0", secret.clone()).unwrap();
        let mut peer = TcpStream::connect(greeter.local_address().unwrap()).unwrap();
        let (mut input, mut output) = (Vec::new(), Vec::new());
        let mut handshake = Handshake::engine(&secret, &mut output).unwrap();
        peer.write_all(&output).unwrap();
        output.clear();
        while !wait_readable(&[peer.as_fd()], Some(Duration::ZERO))[0] {
            assert!(greeter.advance(Duration::from_millis(20)).is_empty());
        }
        while output.is_empty() {
            let mut bytes = [0; INPUT_BYTES_MAX];
            let count = peer.read(&mut bytes).unwrap();
            input.extend_from_slice(&bytes[..count]);
            assert!(handshake.advance(&mut input, &mut output).unwrap().is_none());
        }
        output.push(0);
        peer.write_all(&output).unwrap();
        let greeted = loop {
            if let Some(greeted) = greeter.advance(PATIENCE).pop() {
                break greeted;
            }
        };
        assert!(matches!(greeted, Greeted::Refused(_, HandshakeError::Order)));
    }

    /// Engines connect while `flood` makes connections whose first bytes are these.
    fn link_under_flood(first: &'static [u8]) {
        let secret = Secret::of(b"a secret of the tests, of at least 32 bytes");
        let mut greeter = Greeter::bind("tcp://127.0.0.1:0", secret.clone()).unwrap();
        let at = greeter.local_address().unwrap();
        let (over, flooded) = (AtomicBool::new(false), AtomicUsize::new(0));
        thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| {
                    let mut held = std::collections::VecDeque::new();
                    while !over.load(Ordering::Relaxed) {
                        // Connections that are lost make room for others.
                        let limit = Duration::from_millis(200);
                        let Ok(mut stream) = TcpStream::connect_timeout(&at, limit) else {
                            continue;
                        };
                        let _ = stream.write_all(first);
                        held.push_back(stream);
                        if held.len() > PENDING_MAX {
                            held.pop_front();
                        }
                        flooded.fetch_add(1, Ordering::Relaxed);
                    }
                });
            }
            let engine = scope.spawn(|| {
                let deadline = Instant::now() + PATIENCE;
                while flooded.load(Ordering::Relaxed) < 2 * PENDING_MAX {
                    assert!(Instant::now() < deadline, "there is no flood");
                    thread::sleep(Duration::from_millis(1));
                }
                // As the supervisor of an engine does.
                let address = format!("tcp://{at}");
                for _ in 0..5 {
                    while let Err(error) = connect(&address, &secret, PATIENCE) {
                        assert!(Instant::now() < deadline, "{error}");
                    }
                }
            });
            let (mut links, mut refused) = (0, 0);
            while !engine.is_finished() {
                for greeted in greeter.advance(Duration::from_millis(20)) {
                    match greeted {
                        Greeted::Link(..) => links += 1,
                        Greeted::Refused(..) => refused += 1,
                    }
                }
                assert!(greeter.pending.len() <= PENDING_MAX);
            }
            over.store(true, Ordering::Relaxed);
            engine.join().unwrap();
            assert!(links >= 5 && refused > 0, "{links} links, {refused} refused");
        });
    }

    #[test]
    fn engines_are_linked_during_a_flood_of_silent_connections() {
        link_under_flood(b"");
    }

    #[test]
    fn engines_are_linked_during_a_flood_of_hellos() {
        static HELLO: std::sync::OnceLock<Vec<u8>> = std::sync::OnceLock::new();
        let secret = Secret::of(b"another secret of the tests, of 32 bytes");
        let hello = HELLO.get_or_init(|| {
            let mut hello = Vec::new();
            Handshake::engine(&secret, &mut hello).unwrap();
            hello
        });
        link_under_flood(hello);
    }
}
