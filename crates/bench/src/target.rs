//! The server that is measured.

use std::fmt;
use std::net::{SocketAddr, ToSocketAddrs as _};
use std::path::PathBuf;
use std::str::FromStr;

/// Longest message that a service can have.
pub const MESSAGE_BYTES_MAX: usize = 8 << 20;

/// The server: `udp://HOST:PORT`, `tcp://HOST:PORT` or `shm:///PATH`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Target {
    /// Datagrams.
    Udp(SocketAddr),
    /// A byte stream with a framing.
    Tcp(SocketAddr),
    /// A shared-memory port.
    Shm(PathBuf),
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Udp(address) => write!(f, "udp://{address}"),
            Self::Tcp(address) => write!(f, "tcp://{address}"),
            Self::Shm(path) => write!(f, "shm://{}", path.display()),
        }
    }
}

impl FromStr for Target {
    type Err = TargetError;

    /// A host name is resolved; its first address is used.
    fn from_str(text: &str) -> Result<Self, TargetError> {
        let wrong = || TargetError(text.to_owned());
        let (scheme, address) = text.split_once("://").ok_or_else(wrong)?;
        if scheme == "shm" {
            let path = PathBuf::from(address);
            return if path.is_absolute() { Ok(Self::Shm(path)) } else { Err(wrong()) };
        }
        let address = match address.parse() {
            Ok(address) => address,
            Err(_) => {
                address.to_socket_addrs().ok().and_then(|mut a| a.next()).ok_or_else(wrong)?
            }
        };
        match scheme {
            _ if address.port() == 0 => Err(wrong()),
            "udp" => Ok(Self::Udp(address)),
            "tcp" => Ok(Self::Tcp(address)),
            _ => Err(wrong()),
        }
    }
}

/// A text that names no server.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "`{0}` is not a server: write udp://HOST:PORT, tcp://HOST:PORT or shm:///PATH, as `serval serve` prints them"
)]
pub struct TargetError(String);
