//! The files and peers that transfers of a service's kernels may use.

use std::fs::{File, OpenOptions};
use std::io::{Error, ErrorKind};
use std::net::TcpStream;
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt as _;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use engine::topology::{FileAccess, FileAt, FileSpec, SocketAt};
use engine::transfers::{TransferOrder, TransferPlace};
use sys::local::connect_stream;
use transfer::Key;

/// How long an attempt to connect takes at most.
const CONNECT_MAX: Duration = Duration::from_secs(5);
/// How often an attempt looks whether its block is gone, and whether the peer's queue has room.
const TICK: Duration = Duration::from_millis(20);

/// All of a service, in the order of the configuration.
pub(crate) struct OpenFiles {
    files: Vec<(OpenFile, Option<Key>)>,
}

pub(super) enum OpenFile {
    File(File),
    /// With the number of its submitter.
    Peer(usize, Peer),
}

/// An address to which each transfer connects.
pub(super) struct Peer(SocketAt);

pub(super) enum PeerError {
    Refused,
    TimedOut,
}

impl OpenFiles {
    /// Opens the files; why not in one sentence.
    pub(super) fn open(specs: &[FileSpec]) -> Result<Self, String> {
        let mut peers = 0;
        let mut files = Vec::new();
        for spec in specs {
            let file = match &spec.at {
                FileAt::File { path, access } => {
                    let shown = path.display();
                    let file = open_file(path, *access);
                    OpenFile::File(file.map_err(|why| format!("the file {shown} {why}"))?)
                }
                FileAt::Connection(at) => {
                    peers += 1;
                    OpenFile::Peer(peers, Peer(at.clone()))
                }
            };
            let key = spec.key.as_ref().map(|path| read_key(path));
            files.push((file, key.transpose()?));
        }
        Ok(Self { files })
    }

    /// The number of peers.
    pub(super) fn peers(&self) -> usize {
        self.files.iter().filter(|(file, _)| matches!(file, OpenFile::Peer(..))).count()
    }

    pub(super) fn of(&self, file: u16) -> &OpenFile {
        &self.files[usize::from(file)].0
    }

    /// The submitter of an order: that of its peer, if it has one.
    pub(super) fn submitter(&self, order: &TransferOrder) -> usize {
        let of = |at: TransferPlace| match at {
            TransferPlace::Connection { file } => match self.of(file) {
                OpenFile::Peer(submitter, _) => Some(*submitter),
                OpenFile::File(_) => None,
            },
            _ => None,
        };
        of(order.sink).or(of(order.source)).unwrap_or(0)
    }

    pub(super) fn key(&self, at: TransferPlace) -> Option<Key> {
        match at {
            TransferPlace::Memory { .. } | TransferPlace::Socket { .. } => None,
            TransferPlace::File { file, .. } | TransferPlace::Connection { file } => {
                self.files[usize::from(file)].1.clone()
            }
        }
    }
}

fn open_file(path: &std::path::Path, access: FileAccess) -> Result<File, String> {
    let mut options = OpenOptions::new();
    options.read(true).write(access != FileAccess::Read);
    options.create(access == FileAccess::Create);
    let file = options.open(path).map_err(|error| format!("cannot be opened: {error}"))?;
    let is_file = file.metadata().is_ok_and(|metadata| metadata.is_file());
    is_file.then_some(file).ok_or_else(|| "is not a regular file".to_owned())
}

/// Reads the key of a file or a peer. The error is one sentence.
pub(crate) fn read_key(path: &std::path::Path) -> Result<Key, String> {
    let unusable = |why: String| format!("the key file {} {why}", path.display());
    let file = File::open(path).map_err(|error| unusable(format!("cannot be opened: {error}")))?;
    if file.metadata().is_ok_and(|found| found.mode() & 0o077 != 0) {
        return Err(unusable("can be read by other users: run chmod 600 on it".to_owned()));
    }
    let key = Key::read(file).map_err(|error| unusable(format!("cannot be read: {error}")))?;
    let wrong = || unusable("has to have 32 bytes, or 64 hexadecimal digits".to_owned());
    key.ok_or_else(wrong)
}

impl Peer {
    /// A connection, unless the block is gone or the time is over.
    pub(super) fn connect(
        &self,
        limit: Duration,
        is_gone: &AtomicBool,
    ) -> Result<OwnedFd, PeerError> {
        let limit = limit.min(CONNECT_MAX);
        match &self.0 {
            SocketAt::Tcp(address) => match TcpStream::connect_timeout(address, limit) {
                Ok(socket) => Ok(socket.into()),
                Err(error) if error.kind() == ErrorKind::TimedOut => Err(PeerError::TimedOut),
                Err(_) => Err(PeerError::Refused),
            },
            SocketAt::Unix(path) => {
                let deadline = Instant::now() + limit;
                loop {
                    match connect_stream(path) {
                        Ok(socket) => return Ok(socket),
                        Err(error) if is_full(&error) => {}
                        Err(_) => return Err(PeerError::Refused),
                    }
                    if Instant::now() >= deadline || is_gone.load(Ordering::Relaxed) {
                        return Err(PeerError::TimedOut);
                    }
                    std::thread::sleep(TICK);
                }
            }
        }
    }
}

/// The peer's queue of connections is full.
fn is_full(error: &Error) -> bool {
    error.kind() == ErrorKind::WouldBlock
}
