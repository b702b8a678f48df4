//! Sends one request and waits for its reply, without load or measurement.

use std::io::{self, ErrorKind, Read as _, Write as _};
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, TcpStream, UdpSocket};
use std::path::Path;
use std::time::{Duration, Instant};

use wire::framing::{Delimits, Framing, FramingError, ParseState, Parsed};

use super::shm::{Client, Options, ShmError};
use crate::target::{MESSAGE_BYTES_MAX, Target};

/// Longest reply that is taken.
const REPLY_BYTES_MAX: usize = MESSAGE_BYTES_MAX;
/// A reply without a delimiter (`raw`, `fixed:N`) ends when nothing has arrived for this long.
const QUIET: Duration = Duration::from_millis(50);

/// Options of a request.
#[derive(Clone, Copy, Debug)]
pub struct How {
    /// TCP: the service's framing.
    pub framing: Framing,
    /// TCP with `raw` or `fixed:N`: length of the reply in bytes. `None`: it ends when nothing more arrives.
    pub reply_bytes: Option<usize>,
    /// Time limit of the whole exchange.
    pub timeout: Duration,
}

/// Why there is no reply.
#[derive(Debug, thiserror::Error)]
pub enum AskError {
    /// No server listens there.
    #[error("{0} refuses the message: is a server running there?")]
    Refused(Target),
    /// No reply in time.
    #[error("no reply from {0} within {1:?}{2}")]
    Silent(Target, Duration, &'static str),
    /// The connection ended before the reply.
    #[error(
        "{0} closed the connection before a whole reply had come ({1} bytes had): does the message suit the service and its framing (--framing)?"
    )]
    Closed(Target, usize),
    /// The reply does not follow the framing.
    #[error(
        "the answer of {0} is not a reply of framing {1}: {2}; give the service's own with --framing"
    )]
    Framing(Target, Framing, FramingError),
    /// The framing cannot carry the message.
    #[error("framing {0} cannot carry this message of {1} bytes: {2}")]
    Unframable(Framing, usize, FramingError),
    /// The service took the request and dropped it.
    #[error("the service dropped the request: {0} (`serval drop-reasons` explains it)")]
    Dropped(&'static str),
    /// The service has `replies = "none"`.
    #[error("the service at {0} sends no replies (replies = \"none\")")]
    NoReplies(Target),
    /// An error of the shared-memory client.
    #[error(transparent)]
    Shm(#[from] ShmError),
    /// A call to the host kernel failed.
    #[error("cannot ask {0}: {1}")]
    Failed(Target, io::Error),
}

const NO_SERVER: &str = ": does a server run there, and does its kernel answer this message?";
const STREAM: &str =
    ": does its kernel answer this message, and is the framing (--framing) the service's own?";

/// Sends one message and waits for the reply.
pub fn ask(target: &Target, message: &[u8], how: &How) -> Result<Vec<u8>, AskError> {
    let deadline = Instant::now() + how.timeout;
    match target {
        Target::Udp(address) => udp(*address, message, deadline),
        Target::Tcp(address) => tcp(*address, message, how, deadline),
        Target::Shm(path) => shm(path, message, how.timeout),
    }
    .map_err(|trouble| match trouble {
        AskFailure::Ask(error) => error,
        AskFailure::Io(error) => match error.kind() {
            ErrorKind::ConnectionRefused => AskError::Refused(target.clone()),
            ErrorKind::WouldBlock | ErrorKind::TimedOut => {
                let hint = if matches!(target, Target::Tcp(_)) { STREAM } else { NO_SERVER };
                AskError::Silent(target.clone(), how.timeout, hint)
            }
            ErrorKind::ConnectionReset | ErrorKind::BrokenPipe => {
                AskError::Closed(target.clone(), 0)
            }
            _ => AskError::Failed(target.clone(), error),
        },
    })
}

/// An error that names its target, or one without a target.
enum AskFailure {
    Ask(AskError),
    Io(io::Error),
}

impl From<io::Error> for AskFailure {
    fn from(error: io::Error) -> Self {
        Self::Io(error)
    }
}

impl From<AskError> for AskFailure {
    fn from(error: AskError) -> Self {
        Self::Ask(error)
    }
}

/// The remaining time; a socket time-out of 0 would mean none.
fn left(deadline: Instant) -> Result<Duration, io::Error> {
    let left = deadline.saturating_duration_since(Instant::now());
    if left.is_zero() { Err(ErrorKind::TimedOut.into()) } else { Ok(left) }
}

fn udp(address: SocketAddr, message: &[u8], deadline: Instant) -> Result<Vec<u8>, AskFailure> {
    let any: SocketAddr = match address {
        SocketAddr::V4(_) => (Ipv4Addr::UNSPECIFIED, 0).into(),
        SocketAddr::V6(_) => (Ipv6Addr::UNSPECIFIED, 0).into(),
    };
    let socket = UdpSocket::bind(any)?;
    socket.connect(address)?;
    socket.send(message)?;
    let mut reply = vec![0; 1 << 16];
    loop {
        socket.set_read_timeout(Some(left(deadline)?))?;
        match socket.recv(&mut reply) {
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            received => {
                reply.truncate(received?);
                return Ok(reply);
            }
        }
    }
}

fn tcp(
    address: SocketAddr,
    message: &[u8],
    how: &How,
    deadline: Instant,
) -> Result<Vec<u8>, AskFailure> {
    let mut framed = Vec::new();
    let encoded = how.framing.encode_request(message, &mut framed);
    encoded.map_err(|error| AskError::Unframable(how.framing, message.len(), error))?;
    let mut stream = TcpStream::connect_timeout(&address, left(deadline)?)?;
    stream.set_write_timeout(Some(left(deadline)?))?;
    stream.write_all(&framed)?;
    let has_end = how.framing.delimits() == Delimits::Both;
    let (mut read, mut state) = (Vec::new(), ParseState::default());
    let mut chunk = vec![0; 64 << 10];
    loop {
        let open_end = !has_end && how.reply_bytes.is_none() && !read.is_empty();
        let wait = left(deadline)?;
        stream.set_read_timeout(Some(if open_end { wait.min(QUIET) } else { wait }))?;
        let len = match stream.read(&mut chunk) {
            Err(error) if error.kind() == ErrorKind::Interrupted => continue,
            Err(error) if open_end && is_timeout(&error) => return Ok(read),
            Ok(0) if open_end => return Ok(read),
            Ok(0) => return Err(AskError::Closed(Target::Tcp(address), read.len()).into()),
            taken => taken?,
        };
        read.extend_from_slice(&chunk[..len]);
        if has_end {
            match how.framing.parse_response(&mut state, &read, REPLY_BYTES_MAX) {
                Ok(Parsed::Message { start, end, .. }) => return Ok(read[start..end].to_vec()),
                Ok(_) => {}
                Err(error) => {
                    return Err(AskError::Framing(Target::Tcp(address), how.framing, error).into());
                }
            }
        } else if read.len() >= how.reply_bytes.unwrap_or(REPLY_BYTES_MAX) {
            read.truncate(how.reply_bytes.unwrap_or(REPLY_BYTES_MAX));
            return Ok(read);
        }
    }
}

fn is_timeout(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut)
}

fn shm(path: &Path, message: &[u8], timeout: Duration) -> Result<Vec<u8>, AskFailure> {
    let shm = |error| AskFailure::Ask(AskError::Shm(error));
    let target = || Target::Shm(path.to_owned());
    let mut client = Client::connect(path, &Options { depth: 1, timeout }).map_err(shm)?;
    client.send(0, message, timeout).map_err(shm)?;
    if !client.answers() {
        return Err(AskError::NoReplies(target()).into());
    }
    let mut reply = vec![0; client.reply_bytes_max()];
    match client.receive(&mut reply, timeout).map_err(shm)? {
        None => Err(AskError::Silent(target(), timeout, NO_SERVER).into()),
        Some(outcome) => match outcome.lost {
            Some(reason) => Err(AskError::Dropped(reason.name()).into()),
            None => {
                reply.truncate(outcome.len);
                Ok(reply)
            }
        },
    }
}
