//! A transfer as its caller describes it: source, stages, sink.
//!
//! The order of stages is part of the type, so a wrong one does not compile. A digest is over plain bytes, so nothing
//! can follow [`FromFile::seal`] but the sink:
//!
//! ```
//! # use std::fs::File;
//! # use transfer::{DigestKind, Key, Source};
//! # let (file, key) = (File::open("/proc/self/exe").unwrap(), Key::new([0; 32]));
//! # let (socket, _peer) = std::os::unix::net::UnixStream::pair().unwrap();
//! let command = Source::file(file, 0, None).digest(DigestKind::Sha256).seal(key).socket(socket);
//! ```
//!
//! ```compile_fail
//! # use std::fs::File;
//! # use transfer::{DigestKind, Key, Source};
//! # let (file, key) = (File::open("/proc/self/exe").unwrap(), Key::new([0; 32]));
//! # let (socket, _peer) = std::os::unix::net::UnixStream::pair().unwrap();
//! let command = Source::file(file, 0, None).seal(key).digest(DigestKind::Sha256).socket(socket);
//! ```
//!
//! ```compile_fail
//! # use transfer::{Key, Source};
//! # let file = std::fs::File::open("/proc/self/exe").unwrap();
//! # let (socket, _peer) = std::os::unix::net::UnixStream::pair().unwrap();
//! let command = Source::socket(socket, None).seal(Key::new([0; 32])).file(file, 0);
//! ```

use std::marker::PhantomData;
use std::os::fd::OwnedFd;
use std::time::Duration;

use crate::stage::{DigestKind, Key};

/// How long nothing may move, unless the command says otherwise.
pub const STALL_DEFAULT: Duration = Duration::from_secs(30);

/// Where the bytes go.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Direction {
    /// From the file to the socket.
    Send,
    /// From the socket to the file.
    Receive,
}

/// What happens when the socket takes or has nothing for the moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WhenBlocked {
    /// The transfer waits.
    Wait,
    /// It ends without an error and reports what it did, as a system call on a non-blocking socket does. Only without
    /// stages: a digest or a sealed stream cannot be continued by another command.
    Return,
}

/// One transfer. Built by [`Source`].
#[derive(Debug)]
pub struct Command {
    pub(crate) direction: Direction,
    pub(crate) file: OwnedFd,
    pub(crate) socket: OwnedFd,
    /// The first byte of the range in the file.
    pub(crate) offset: u64,
    /// Length of the range; `None`: to the end of the file, or of the stream.
    pub(crate) bytes: Option<u64>,
    pub(crate) digest: Option<DigestKind>,
    pub(crate) seal: Option<Key>,
    pub(crate) stall: Duration,
    pub(crate) deadline: Option<Duration>,
    pub(crate) when_blocked: WhenBlocked,
}

impl Command {
    /// Ends it with [`crate::TransferError::Stalled`] if nothing moves for this long; 30 s by default.
    pub fn stall(mut self, limit: Duration) -> Self {
        self.stall = limit;
        self
    }

    /// Ends it with [`crate::TransferError::Deadline`] if it takes longer than this.
    pub fn deadline(mut self, limit: Duration) -> Self {
        self.deadline = Some(limit);
        self
    }

    /// Whether it waits for the socket. A command with stages waits always.
    pub fn when_blocked(mut self, when_blocked: WhenBlocked) -> Self {
        if self.digest.is_none() && self.seal.is_none() {
            self.when_blocked = when_blocked;
        }
        self
    }
}

/// No stage so far.
#[derive(Debug)]
pub enum Plain {}
/// A digest is computed.
#[derive(Debug)]
pub enum Digested {}
/// The bytes are encrypted.
#[derive(Debug)]
pub enum Sealed {}

/// Where a transfer begins.
#[derive(Debug)]
pub enum Source {}

impl Source {
    /// `bytes` of a file from `offset`, or all from there to the end that it has when the transfer starts.
    pub fn file(file: impl Into<OwnedFd>, offset: u64, bytes: Option<u64>) -> FromFile<Plain> {
        let (digest, seal) = (None, None);
        FromFile { file: file.into(), offset, bytes, digest, seal, stages: PhantomData }
    }

    /// `bytes` from a stream socket, or all until its peer ends the stream.
    pub fn socket(socket: impl Into<OwnedFd>, bytes: Option<u64>) -> FromSocket<Plain> {
        FromSocket { socket: socket.into(), bytes, digest: None, stages: PhantomData }
    }
}

/// A transfer from a file, so far.
#[derive(Debug)]
pub struct FromFile<Stages> {
    file: OwnedFd,
    offset: u64,
    bytes: Option<u64>,
    digest: Option<DigestKind>,
    seal: Option<Key>,
    stages: PhantomData<Stages>,
}

impl FromFile<Plain> {
    /// Computes a digest of the plain bytes.
    pub fn digest(self, kind: DigestKind) -> FromFile<Digested> {
        let Self { file, offset, bytes, seal, .. } = self;
        FromFile { file, offset, bytes, digest: Some(kind), seal, stages: PhantomData }
    }

    /// Encrypts the bytes; see [`crate::seal`].
    pub fn seal(self, key: Key) -> FromFile<Sealed> {
        sealed(self, key)
    }
}

impl FromFile<Digested> {
    /// Encrypts the bytes; see [`crate::seal`].
    pub fn seal(self, key: Key) -> FromFile<Sealed> {
        sealed(self, key)
    }
}

fn sealed<Stages>(from: FromFile<Stages>, key: Key) -> FromFile<Sealed> {
    let FromFile { file, offset, bytes, digest, .. } = from;
    FromFile { file, offset, bytes, digest, seal: Some(key), stages: PhantomData }
}

impl<Stages> FromFile<Stages> {
    /// Sends the bytes through a stream socket.
    pub fn socket(self, socket: impl Into<OwnedFd>) -> Command {
        let Self { file, offset, bytes, digest, seal, .. } = self;
        let direction = Direction::Send;
        command(direction, file, socket.into(), offset, bytes, digest, seal)
    }
}

/// A transfer from a socket, so far.
#[derive(Debug)]
pub struct FromSocket<Stages> {
    socket: OwnedFd,
    bytes: Option<u64>,
    digest: Option<DigestKind>,
    stages: PhantomData<Stages>,
}

impl FromSocket<Plain> {
    /// Computes a digest of the bytes.
    pub fn digest(self, kind: DigestKind) -> FromSocket<Digested> {
        let Self { socket, bytes, .. } = self;
        FromSocket { socket, bytes, digest: Some(kind), stages: PhantomData }
    }
}

impl<Stages> FromSocket<Stages> {
    /// Writes the bytes to a file, from `offset` on.
    pub fn file(self, file: impl Into<OwnedFd>, offset: u64) -> Command {
        let Self { socket, bytes, digest, .. } = self;
        let direction = Direction::Receive;
        command(direction, file.into(), socket, offset, bytes, digest, None)
    }
}

fn command(
    direction: Direction,
    file: OwnedFd,
    socket: OwnedFd,
    offset: u64,
    bytes: Option<u64>,
    digest: Option<DigestKind>,
    seal: Option<Key>,
) -> Command {
    Command {
        direction,
        file,
        socket,
        offset,
        bytes,
        digest,
        seal,
        stall: STALL_DEFAULT,
        deadline: None,
        when_blocked: WhenBlocked::Wait,
    }
}
