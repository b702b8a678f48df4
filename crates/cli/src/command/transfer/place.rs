//! Sources and sinks as the command line names them.

use std::io::{self, ErrorKind};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream, ToSocketAddrs as _};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use serde_json::json;
use sys::local::connect_stream;
use sys::readiness::wait_readable;

use super::TICK;
use crate::command::Failure;
use crate::screen::Screen;

/// A source or a sink.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Place {
    File(PathBuf),
    Connect(String),
    Listen(SocketAddr),
    ConnectUnix(PathBuf),
    ListenUnix(PathBuf),
    /// A sink that drops everything.
    Discard,
}

impl FromStr for Place {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let path = |path: &str| match path {
            "" => Err("the path of the socket is missing, as in unix:///run/backup".to_owned()),
            path => Ok(PathBuf::from(path)),
        };
        match text.split_once("://") {
            None => Ok(Self::File(text.into())),
            Some(("tcp", address)) => Ok(Self::Connect(address.to_owned())),
            Some(("listen", address)) => address.parse().map(Self::Listen).map_err(|_| {
                "the address has to be an IP address with a port, such as listen://127.0.0.1:9000"
                    .to_owned()
            }),
            Some(("unix", socket)) => path(socket).map(Self::ConnectUnix),
            Some(("unix-listen", socket)) => path(socket).map(Self::ListenUnix),
            Some(("discard", "")) => Ok(Self::Discard),
            Some((scheme, _)) => Err(format!(
                "{scheme}:// is not tcp://, listen://, unix://, unix-listen:// or discard://"
            )),
        }
    }
}

/// A connection.
pub(super) enum Opened {
    Tcp(TcpStream),
    Unix(UnixStream),
}

impl Opened {
    /// Another descriptor of it.
    pub(super) fn try_clone(&self) -> io::Result<OwnedFd> {
        self.as_fd().try_clone_to_owned()
    }

    /// The peer reads the end of the stream. It may have closed by then.
    pub(super) fn end(&self) {
        let _ = match self {
            Self::Tcp(socket) => socket.shutdown(Shutdown::Write),
            Self::Unix(socket) => socket.shutdown(Shutdown::Write),
        };
    }
}

impl AsFd for Opened {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Tcp(socket) => socket.as_fd(),
            Self::Unix(socket) => socket.as_fd(),
        }
    }
}

impl From<Opened> for OwnedFd {
    fn from(opened: Opened) -> Self {
        match opened {
            Opened::Tcp(socket) => socket.into(),
            Opened::Unix(socket) => socket.into(),
        }
    }
}

impl Place {
    /// The connection of a place that is not a file.
    pub(super) fn open(
        &self,
        screen: &Screen,
        patience: Duration,
        cancel: &AtomicBool,
    ) -> Result<Opened, Failure> {
        match self {
            Self::Connect(address) => connect(address, patience).map(Opened::Tcp),
            Self::ConnectUnix(path) => connect_unix(path, patience, cancel).map(Opened::Unix),
            Self::Listen(address) => listen(screen, *address, patience, cancel).map(Opened::Tcp),
            Self::ListenUnix(path) => listen_unix(screen, path, patience, cancel).map(Opened::Unix),
            Self::File(_) | Self::Discard => unreachable!("a file is opened by its own code"),
        }
    }
}

fn connect(address: &str, patience: Duration) -> Result<TcpStream, Failure> {
    let failed = |why: String| Failure::Run(format!("cannot connect to tcp://{address}: {why}"));
    let found = address.to_socket_addrs().map_err(|error| failed(error.to_string()))?;
    let mut why = "the name has no address".to_owned();
    for address in found {
        match TcpStream::connect_timeout(&address, patience) {
            Ok(socket) => return Ok(socket),
            Err(error) => why = error.to_string(),
        }
    }
    Err(failed(why))
}

/// The same to a Unix socket. A peer that accepts nothing keeps its queue full.
fn connect_unix(
    path: &Path,
    patience: Duration,
    cancel: &AtomicBool,
) -> Result<UnixStream, Failure> {
    let failed =
        |why: String| Failure::Run(format!("cannot connect to unix://{}: {why}", path.display()));
    let deadline = Instant::now() + patience;
    loop {
        match connect_stream(path).map(UnixStream::from) {
            Ok(socket) => {
                socket.set_nonblocking(false).map_err(|error| failed(error.to_string()))?;
                return Ok(socket);
            }
            Err(error) if error.kind() == ErrorKind::WouldBlock => {}
            Err(error) => return Err(failed(error.to_string())),
        }
        if Instant::now() >= deadline {
            let seconds = patience.as_secs_f64();
            return Err(failed(format!("its queue of connections was full for {seconds} s")));
        }
        if cancel.load(Ordering::Relaxed) {
            return Err(Failure::Run("interrupted".to_owned()));
        }
        std::thread::sleep(TICK);
    }
}

/// Accepts one connection.
fn listen(
    screen: &Screen,
    address: SocketAddr,
    patience: Duration,
    cancel: &AtomicBool,
) -> Result<TcpStream, Failure> {
    let failed = |error| Failure::Run(format!("cannot listen at {address}: {error}"));
    let listener = TcpListener::bind(address).map_err(failed)?;
    listener.set_nonblocking(true).map_err(failed)?;
    let at = listener.local_addr().map_err(failed)?.to_string();
    show(screen, &at);
    accept(&at, listener.as_fd(), || listener.accept().map(|(socket, _)| socket), patience, cancel)
}

/// The same at a path, which has to be free and is free again afterwards.
fn listen_unix(
    screen: &Screen,
    path: &Path,
    patience: Duration,
    cancel: &AtomicBool,
) -> Result<UnixStream, Failure> {
    let at = path.display().to_string();
    let failed = |error: io::Error| {
        let hint = match error.kind() {
            ErrorKind::AddrInUse => " (remove it if no program uses it)",
            _ => "",
        };
        Failure::Run(format!("cannot listen at {at}: {error}{hint}"))
    };
    let listener = UnixListener::bind(path).map_err(failed)?;
    let accepted = listener.set_nonblocking(true).map_err(failed).and_then(|()| {
        show(screen, &at);
        let next = || listener.accept().map(|(socket, _)| socket);
        accept(&at, listener.as_fd(), next, patience, cancel)
    });
    let _ = std::fs::remove_file(path);
    accepted
}

fn show(screen: &Screen, at: &str) {
    screen
        .show(|| format!("listening at {at}\n"), || json!({ "event": "listening", "address": at }));
}

fn accept<Socket>(
    at: &str,
    listener: BorrowedFd<'_>,
    mut next: impl FnMut() -> io::Result<Socket>,
    patience: Duration,
    cancel: &AtomicBool,
) -> Result<Socket, Failure> {
    let deadline = Instant::now() + patience;
    loop {
        match next() {
            Ok(socket) => return Ok(socket),
            Err(error) if error.kind() == ErrorKind::WouldBlock => {}
            Err(error) => return Err(Failure::Run(format!("cannot listen at {at}: {error}"))),
        }
        if Instant::now() >= deadline {
            let seconds = patience.as_secs_f64();
            return Err(Failure::Run(format!("no peer connected to {at} within {seconds} s")));
        }
        if cancel.load(Ordering::Relaxed) {
            return Err(Failure::Run("interrupted".to_owned()));
        }
        wait_readable(&[listener], Some(TICK));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_unix_peer_that_accepts_nothing_is_given_up() {
        let folder = std::env::temp_dir().join(format!("serval-place-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let path = folder.join("peer");
        let _listener = UnixListener::bind(&path).unwrap();
        // The queue is full when a connection has no room.
        let mut waiting = Vec::new();
        while let Ok(socket) = connect_stream(&path) {
            waiting.push(socket);
        }
        let (cancelled, goes_on) = (AtomicBool::new(true), AtomicBool::new(false));
        let why = |patience, cancel| match connect_unix(&path, patience, cancel) {
            Err(Failure::Run(why)) => why,
            other => panic!("it is not given up: {}", other.is_ok()),
        };
        assert_eq!(why(Duration::from_secs(3600), &cancelled), "interrupted");
        let full = why(Duration::from_millis(1), &goes_on);
        assert!(full.ends_with("its queue of connections was full for 0.001 s"), "{full}");
        let missing = connect_unix(&folder.join("none"), Duration::ZERO, &goes_on);
        assert!(matches!(missing, Err(Failure::Run(why)) if why.contains("No such file")));
        std::fs::remove_dir_all(&folder).unwrap();
    }

    #[test]
    fn places_are_files_or_addresses() {
        let place = |text: &str| text.parse::<Place>();
        assert_eq!(place("a/b"), Ok(Place::File("a/b".into())));
        assert_eq!(place("tcp://host:1"), Ok(Place::Connect("host:1".to_owned())));
        assert_eq!(place("listen://[::1]:0"), Ok(Place::Listen("[::1]:0".parse().unwrap())));
        assert_eq!(place("unix:///a/b"), Ok(Place::ConnectUnix("/a/b".into())));
        assert_eq!(place("unix-listen://b"), Ok(Place::ListenUnix("b".into())));
        assert_eq!(place("discard://"), Ok(Place::Discard));
        assert!(place("listen://host:1").unwrap_err().contains("an IP address"));
        assert!(place("unix://").unwrap_err().contains("the path of the socket is missing"));
        let others = "is not tcp://, listen://, unix://, unix-listen:// or discard://";
        assert_eq!(place("udp://host:1"), Err(format!("udp:// {others}")));
        assert_eq!(place("discard://x"), Err(format!("discard:// {others}")));
    }
}
