//! The two ends of a connection until both sides are authenticated.
//!
//! The accelerator's side listens, so strangers reach it: until a peer has proved that it knows the secret it gets one
//! small buffer, a few seconds, and one of [`PENDING_MAX`] places, and the oldest peer loses its place to a new one.

use std::io::{self, ErrorKind, Read as _, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream, ToSocketAddrs as _};
use std::os::fd::AsFd as _;
use std::time::{Duration, Instant};

use sys::local::wait_readable;

use crate::channel::Channel;
use crate::handshake::{Handshake, HandshakeError, INPUT_BYTES_MAX};
use crate::secret::Secret;

/// Connections that are not authenticated yet.
const PENDING_MAX: usize = 64;
/// Time for a handshake.
const HANDSHAKE_MAX: Duration = Duration::from_secs(5);
/// Connections accepted in one call.
const ACCEPT_MAX: usize = 64;

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
    /// The oldest first.
    pending: Vec<Pending>,
}

struct Pending {
    stream: TcpStream,
    from: SocketAddr,
    handshake: Handshake,
    input: Vec<u8>,
    until: Instant,
}

impl Greeter {
    /// Listens at `tcp://HOST:PORT`.
    pub fn bind(address: &str, secret: Secret) -> Result<Self, LinkFailure> {
        let name =
            host_and_port(address).ok_or_else(|| LinkFailure::Address(address.to_owned()))?;
        let failed = |source| LinkFailure::Connect { address: address.to_owned(), source };
        let listener = TcpListener::bind(name).map_err(failed)?;
        listener.set_nonblocking(true).map_err(failed)?;
        Ok(Self { listener, secret, pending: Vec::new() })
    }

    /// Where it listens.
    pub fn local_address(&self) -> io::Result<SocketAddr> {
        self.listener.local_addr()
    }

    /// Waits for at most `limit`, and returns what became of the connections that are no longer pending.
    pub fn advance(&mut self, limit: Duration) -> Vec<Greeted> {
        let now = Instant::now();
        let due = self.pending.first().map(|oldest| oldest.until.saturating_duration_since(now));
        let mut files = vec![self.listener.as_fd()];
        files.extend(self.pending.iter().map(|pending| pending.stream.as_fd()));
        let ready = wait_readable(&files, Some(due.map_or(limit, |due| due.min(limit))));
        let mut done = Vec::new();
        let mut ready_of_pending = ready[1..].iter();
        let now = Instant::now();
        self.pending = std::mem::take(&mut self.pending)
            .into_iter()
            .filter_map(|pending| {
                let ready = *ready_of_pending.next().expect("one for each");
                pending.advance(ready, now, &mut done)
            })
            .collect();
        if ready[0] {
            self.accept(&mut done);
        }
        done
    }

    fn accept(&mut self, done: &mut Vec<Greeted>) {
        for _ in 0..ACCEPT_MAX {
            let (stream, from) = match self.listener.accept() {
                Ok(accepted) => accepted,
                Err(error) if error.kind() == ErrorKind::WouldBlock => return,
                Err(_) => {
                    // Such as no free descriptors: the connection stays in the queue.
                    std::thread::sleep(Duration::from_millis(10));
                    return;
                }
            };
            if self.pending.len() == PENDING_MAX {
                let Pending { from, .. } = self.pending.remove(0);
                let text = "others connected before it sent its proof";
                done.push(Greeted::Refused(from, io::Error::other(text).into()));
            }
            let until = Instant::now() + HANDSHAKE_MAX;
            let prepared = stream.set_nonblocking(true).and_then(|()| stream.set_nodelay(true));
            match prepared.and_then(|()| Handshake::accelerator(&self.secret)) {
                Ok(handshake) => {
                    let input = Vec::new();
                    self.pending.push(Pending { stream, from, handshake, input, until });
                }
                Err(error) => done.push(Greeted::Refused(from, error.into())),
            }
        }
    }
}

impl Pending {
    /// `None`: it is over, and `done` has the result.
    fn advance(mut self, ready: bool, now: Instant, done: &mut Vec<Greeted>) -> Option<Self> {
        let result = if ready {
            self.read()
        } else if now >= self.until {
            let text = "it did not send its proof in time";
            Err(io::Error::new(ErrorKind::TimedOut, text).into())
        } else {
            Ok(None)
        };
        match result {
            Ok(None) => Some(self),
            Ok(Some(keys)) => {
                done.push(match Channel::new(self.stream, keys) {
                    Ok(channel) => Greeted::Link(channel, self.from),
                    Err(error) => Greeted::Refused(self.from, error.into()),
                });
                None
            }
            Err(error) => {
                done.push(Greeted::Refused(self.from, error));
                None
            }
        }
    }

    fn read(&mut self) -> Result<Option<crate::channel::Keys>, HandshakeError> {
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
            Ok(Some(_)) if !self.input.is_empty() => Err(HandshakeError::Order),
            Ok(None) if self.input.len() > INPUT_BYTES_MAX => Err(HandshakeError::Order),
            result => result,
        }
    }
}
