//! A transfer as its caller describes it: source, stages, sink.
//!
//! The order of stages is part of the type, so a wrong one does not compile. Only the source can precede an opening, and only the sink
//! can follow a seal. Bytes are expanded once at most, then compressed once at most; digests are computed anywhere between,
//! and a search comes before the compression:
//!
//! ```
//! # use std::fs::File;
//! # use transfer::{DigestKind, ExpandLimits, Format, Key, Source};
//! # let (file, key) = (File::open("/proc/self/exe").unwrap(), Key::new([0; 32]));
//! # let (socket, _peer) = std::os::unix::net::UnixStream::pair().unwrap();
//! let command = Source::file(file, 0, None).digest(DigestKind::Sha256).seal(key).socket(socket);
//! # let (socket, key) = (_peer, Key::new([0; 32]));
//! # let file = File::open("/proc/self/exe").unwrap();
//! let source = Source::socket(socket, None).open(key);
//! let expanded = source.expand(Format::Gzip, ExpandLimits::default()).digest(DigestKind::Md5);
//! let command = expanded.compress(Format::Zstd).digest(DigestKind::Crc32c).file(file, 0);
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
//! # use transfer::{ExpandLimits, Format, Source};
//! # let file = std::fs::File::open("/proc/self/exe").unwrap();
//! # let (socket, _peer) = std::os::unix::net::UnixStream::pair().unwrap();
//! let command = Source::socket(socket, None).compress(Format::Gzip).expand(Format::Gzip, ExpandLimits::default()).file(file, 0);
//! ```
//!
//! ```compile_fail
//! # use transfer::{DigestKind, Key, Source};
//! # let file = std::fs::File::open("/proc/self/exe").unwrap();
//! # let (socket, _peer) = std::os::unix::net::UnixStream::pair().unwrap();
//! let command = Source::socket(socket, None).digest(DigestKind::Md5).open(Key::new([0; 32])).file(file, 0);
//! ```

use std::marker::PhantomData;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::time::Duration;

use sys::descriptors::describe;

use crate::command::accelerator::AcceleratorMemory;
use crate::command::compression::{Compression, ExpandLimits, Format};
use crate::command::device::Device;
use crate::command::kernel::KernelSource;
use crate::command::key::Key;
use crate::command::limits::{CONTEXT_BYTES, HEAD_MAX, STALL_DEFAULT};
use crate::command::stage::{Cipher, DigestKind, SearchSpec, StageSpec};

/// What happens when a socket takes or has nothing for the moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WhenBlocked {
    /// The transfer waits.
    Wait,
    /// It ends without an error and reports what it did, as a system call on a non-blocking socket does. Only without
    /// stages and between a file and a socket: a digest, a sealed stream or what one socket has given cannot be continued by another command.
    Return,
}

/// A source or a sink.
#[derive(Debug)]
pub enum Place {
    /// A regular file or shared memory (`memfd_create`, `shm_open`), from this byte on.
    File(OwnedFd, u64),
    /// A connected stream socket.
    Socket(OwnedFd),
    /// Memory of an accelerator, from this byte on.
    Accelerator(AcceleratorMemory, u64),
}

impl Place {
    /// Its kind.
    pub fn device(&self) -> Device {
        match self {
            Self::File(..) => Device::File,
            Self::Socket(_) => Device::Socket,
            Self::Accelerator(..) => Device::Accelerator,
        }
    }

    /// The first byte; 0 of a socket.
    pub fn offset(&self) -> u64 {
        match self {
            Self::File(_, offset) | Self::Accelerator(_, offset) => *offset,
            Self::Socket(_) => 0,
        }
    }

    /// Its descriptor, if it is a file or a socket.
    pub fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        match self {
            Self::File(descriptor, _) | Self::Socket(descriptor) => Some(descriptor.as_fd()),
            Self::Accelerator(..) => None,
        }
    }
}

/// A part of a file or of shared memory.
#[derive(Debug)]
pub struct FileRange {
    /// Its descriptor.
    pub file: OwnedFd,
    /// The first byte.
    pub offset: u64,
    /// Length; `None`: to the end that the file has when the transfer starts.
    pub bytes: Option<u64>,
}

/// One transfer. Built by [`Source`].
#[derive(Debug)]
pub struct Command {
    pub(crate) source: Place,
    /// Files that follow the source, which is a file.
    pub(crate) more: Vec<FileRange>,
    /// What has been received from the source, a socket, before.
    pub(crate) head: Vec<u8>,
    pub(crate) sink: Place,
    /// Length of the range; `None`: to the end of the file, or of the stream.
    pub(crate) bytes: Option<u64>,
    pub(crate) stages: Vec<StageSpec>,
    pub(crate) stall: Duration,
    pub(crate) deadline: Option<Duration>,
    pub(crate) when_blocked: WhenBlocked,
    pub(crate) sync: bool,
}

impl Command {
    /// Device and inode of its sink, if that is a socket: the same for every descriptor of the socket.
    pub fn sink_socket(&self) -> Option<(u64, u64)> {
        let Place::Socket(socket) = &self.sink else { return None };
        describe(socket.as_fd()).ok().map(|socket| socket.identity)
    }

    /// How long it may take.
    pub(crate) fn time_limits(&self) -> TimeLimits {
        let ns = |limit: Duration| u64::try_from(limit.as_nanos()).unwrap_or(u64::MAX);
        TimeLimits { stall_ns: ns(self.stall), deadline_ns: self.deadline.map(ns) }
    }

    /// Why the bytes that were received before the command cannot be part of it, if they cannot.
    pub(crate) fn check_head(&self) -> Result<(), String> {
        match self.head.len() {
            0 => Ok(()),
            _ if self.source.device() != Device::Socket => {
                Err("only a socket can have bytes that were received before".to_owned())
            }
            _ if self.when_blocked == WhenBlocked::Return => {
                Err("after bytes that were received before, a transfer waits for its sockets"
                    .to_owned())
            }
            len if len > HEAD_MAX => {
                Err(format!("{len} bytes were received before, and {HEAD_MAX} is the limit"))
            }
            _ => Ok(()),
        }
    }

    /// Of stages whose order is known only when the program runs. [`crate::Engine::submit`] refuses a wrong one.
    pub fn new(source: Place, bytes: Option<u64>, stages: Vec<StageSpec>, sink: Place) -> Self {
        Self {
            source,
            more: Vec::new(),
            head: Vec::new(),
            sink,
            bytes,
            stages,
            stall: STALL_DEFAULT,
            deadline: None,
            when_blocked: WhenBlocked::Wait,
            sync: false,
        }
    }

    /// Succeeds when what a file has got is on its disk. Without effect on a socket.
    pub fn sync(mut self) -> Self {
        self.sync = self.sink.device() == Device::File;
        self
    }

    /// With files that follow the source in the stream, if that is a file; see [`Source::files`].
    pub fn followed_by(mut self, more: Vec<FileRange>) -> Self {
        if self.source.device() == Device::File {
            self.more = more;
        }
        self
    }

    /// After bytes that its caller has received from the source, a socket, before: they go first through the stages and to the sink, as a
    /// program needs that reads the headers of a request with a buffer. At most [`HEAD_MAX`]; they do not count as read from the source.
    pub fn after(mut self, head: Vec<u8>) -> Self {
        self.head = head;
        self
    }

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

    /// Whether it waits for the socket. A command with stages, or that is not between a file and a socket, waits always.
    pub fn when_blocked(mut self, when_blocked: WhenBlocked) -> Self {
        let devices = [self.source.device(), self.sink.device()];
        let plain = [[Device::File, Device::Socket], [Device::Socket, Device::File]];
        if self.stages.is_empty() && plain.contains(&devices) {
            self.when_blocked = when_blocked;
        }
        self
    }
}

/// How long a transfer may take, in nanoseconds.
#[derive(Clone, Copy, Debug)]
pub struct TimeLimits {
    /// Without progress.
    pub stall_ns: u64,
    /// In all.
    pub deadline_ns: Option<u64>,
}

impl Default for TimeLimits {
    fn default() -> Self {
        Self { stall_ns: STALL_DEFAULT.as_nanos() as u64, deadline_ns: None }
    }
}

/// The bytes as the source has them.
#[derive(Debug)]
pub enum Raw {}
/// Bytes that went through a digest, a search or an opening.
#[derive(Debug)]
pub enum Plain {}
/// The bytes have been expanded.
#[derive(Debug)]
pub enum Expanded {}
/// A kernel has made these bytes.
#[derive(Debug)]
pub enum Processed {}
/// The bytes are compressed.
#[derive(Debug)]
pub enum Compressed {}
/// The bytes are encrypted.
#[derive(Debug)]
pub enum Sealed {}

/// Where a transfer begins.
#[derive(Debug)]
pub enum Source {}

impl Source {
    /// `bytes` of a file or of shared memory from `offset`, or all from there to the end that it has when the transfer starts.
    pub fn file(file: impl Into<OwnedFd>, offset: u64, bytes: Option<u64>) -> Pipeline<Raw> {
        let source = Place::File(file.into(), offset);
        Pipeline { source, more: Vec::new(), bytes, stages: Vec::new(), state: PhantomData }
    }

    /// One file after the other, as one stream. At most `FILES_MAX`.
    pub fn files(first: FileRange, more: Vec<FileRange>) -> Pipeline<Raw> {
        Pipeline { more, ..Self::file(first.file, first.offset, first.bytes) }
    }

    /// `bytes` of an accelerator's memory from `offset`, or all from there to its end.
    pub fn accelerator(
        memory: AcceleratorMemory,
        offset: u64,
        bytes: Option<u64>,
    ) -> Pipeline<Raw> {
        let source = Place::Accelerator(memory, offset);
        Pipeline { source, more: Vec::new(), bytes, stages: Vec::new(), state: PhantomData }
    }

    /// `bytes` from a stream socket, or all until its peer ends the stream.
    pub fn socket(socket: impl Into<OwnedFd>, bytes: Option<u64>) -> Pipeline<Raw> {
        let source = Place::Socket(socket.into());
        Pipeline { source, more: Vec::new(), bytes, stages: Vec::new(), state: PhantomData }
    }
}

/// A transfer without its sink, so far. `State` says what its bytes are: [`Raw`], [`Plain`], [`Expanded`], [`Processed`],
/// [`Compressed`] or [`Sealed`].
#[derive(Debug)]
pub struct Pipeline<State> {
    pub(crate) source: Place,
    pub(crate) more: Vec<FileRange>,
    pub(crate) bytes: Option<u64>,
    pub(crate) stages: Vec<StageSpec>,
    state: PhantomData<State>,
}

/// A state in which a digest or a seal can follow.
pub trait Unsealed {
    /// The state after a digest or a search.
    type Digested;
}
impl Unsealed for Raw {
    type Digested = Plain;
}
impl Unsealed for Plain {
    type Digested = Self;
}
impl Unsealed for Expanded {
    type Digested = Self;
}
impl Unsealed for Processed {
    type Digested = Self;
}
impl Unsealed for Compressed {
    type Digested = Self;
}

/// A state in which a compression can follow.
pub trait Compressible {}
impl Compressible for Raw {}
impl Compressible for Plain {}
impl Compressible for Expanded {}
impl Compressible for Processed {}

/// A state in which a kernel can follow.
pub trait Processable {}
impl Processable for Raw {}
impl Processable for Plain {}
impl Processable for Expanded {}

/// A state in which an expansion can follow.
pub trait Expandable {}
impl Expandable for Raw {}
impl Expandable for Plain {}

impl Pipeline<Raw> {
    /// Decrypts a stream that was sealed with AES-256-GCM; see [`crate::stages::seal`]. Nothing of a record that does not verify goes on.
    pub fn open(self, key: Key) -> Pipeline<Plain> {
        self.open_with(Cipher::Aes256Gcm, key)
    }

    /// Decrypts a stream that was sealed with this cipher.
    pub fn open_with(self, cipher: Cipher, key: Key) -> Pipeline<Plain> {
        self.then(StageSpec::Open(cipher, key))
    }
}

impl<State: Unsealed> Pipeline<State> {
    /// Computes a digest of the bytes as they are at this place.
    pub fn digest(self, kind: DigestKind) -> Pipeline<State::Digested> {
        self.then(StageSpec::Digest(kind))
    }

    /// Encrypts the bytes with AES-256-GCM; see [`crate::stages::seal`].
    pub fn seal(self, key: Key) -> Pipeline<Sealed> {
        self.seal_with(Cipher::Aes256Gcm, key)
    }

    /// Encrypts the bytes with AES-256-CTR by a kernel such as `aes256_ctr`; see [`crate::stages::kernel`].
    pub fn seal_on(self, kernel: KernelSource, key: Key) -> Pipeline<Sealed> {
        self.then(StageSpec::SealOn(kernel, key))
    }

    /// Encrypts the bytes with this cipher.
    pub fn seal_with(self, cipher: Cipher, key: Key) -> Pipeline<Sealed> {
        self.then(StageSpec::Seal(cipher, key))
    }
}

impl<State: Expandable> Pipeline<State> {
    /// Expands compressed data, up to these limits; see [`crate::stages::compress`].
    pub fn expand(self, format: Format, limits: ExpandLimits) -> Pipeline<Expanded> {
        self.then(StageSpec::Expand(format, limits))
    }
}

impl<State: Processable> Pipeline<State> {
    /// Gives the bytes to a kernel, piece by piece, with this context; see [`crate::stages::kernel`].
    pub fn kernel(self, kernel: KernelSource, context: [u8; CONTEXT_BYTES]) -> Pipeline<Processed> {
        self.then(StageSpec::Kernel(kernel, context))
    }
}

impl<State: Compressible + Unsealed> Pipeline<State> {
    /// Looks for a text or for lines; see [`crate::stages::search`].
    pub fn search(self, search: SearchSpec) -> Pipeline<State::Digested> {
        self.then(StageSpec::Search(search))
    }

    /// Compresses the bytes: a [`Format`], or a [`Compression`] with a level.
    pub fn compress(self, how: impl Into<Compression>) -> Pipeline<Compressed> {
        self.then(StageSpec::Compress(how.into()))
    }
}

impl<State> Pipeline<State> {
    fn then<Next>(mut self, stage: StageSpec) -> Pipeline<Next> {
        self.stages.push(stage);
        let Self { source, more, bytes, stages, .. } = self;
        Pipeline { source, more, bytes, stages, state: PhantomData }
    }

    /// Sends the bytes through a stream socket.
    pub fn socket(self, socket: impl Into<OwnedFd>) -> Command {
        self.sink(Place::Socket(socket.into()))
    }

    /// Writes the bytes to a file or to shared memory, from `offset` on.
    pub fn file(self, file: impl Into<OwnedFd>, offset: u64) -> Command {
        self.sink(Place::File(file.into(), offset))
    }

    /// Copies the bytes to an accelerator's memory, from `offset` on.
    pub fn accelerator(self, memory: AcceleratorMemory, offset: u64) -> Command {
        self.sink(Place::Accelerator(memory, offset))
    }

    fn sink(self, sink: Place) -> Command {
        Command { more: self.more, ..Command::new(self.source, self.bytes, self.stages, sink) }
    }
}
