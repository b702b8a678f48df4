//! A program's connection to a transfer engine in another process.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::Path;
use std::time::{Duration, Instant};

use sys::local::LocalSocket;
use sys::readiness::{is_counter, wait_readable};
use zeroize::Zeroize as _;

use crate::command::limits::FILES_MAX;
use crate::command::pipeline::{Command, Pipeline, Place, TimeLimits};
use crate::command::report::{Outcome, Report};
use crate::command::stage::{StageSpec, check_order};
use crate::run::small::{Piece, Small};
use crate::service::message::{
    ANSWER_BYTES_MAX, Answer, MessageError, RemoteError, Request, StartRequest,
};

/// How long connecting may take, and the time between two attempts.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
const CONNECT_PAUSE: Duration = Duration::from_millis(5);
/// How long an engine may be silent before it is asked for progress, and again before it is given up.
const SILENCE: Duration = Duration::from_secs(10);

/// Why there is no answer.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// There is no engine at this path, or it does not accept.
    #[error(
        "no transfer engine answers at {path}: {error}; set transfer.socket in the configuration of a server that runs"
    )]
    Connect {
        /// The path.
        path: String,
        /// What the host kernel said.
        error: io::Error,
    },
    /// The engine has not read earlier requests yet. The command comes back.
    #[error("the transfer engine has not read earlier requests yet: try again")]
    Full(Box<Command>),
    /// The stages are in an order that makes no sense.
    #[error("the order of the stages is wrong: {0}")]
    Order(String),
    /// A source or sink is memory of an accelerator, or a stage a kernel, which only an engine in the same process reaches.
    #[error(
        "an engine in another process reaches neither this memory of an accelerator nor a kernel: use an engine in this process"
    )]
    Accelerator,
    /// What was given to count ends is no eventfd that never blocks.
    #[error(
        "ends are counted in an eventfd that was made with EFD_NONBLOCK: this descriptor is another one"
    )]
    NoCounter,
    /// The engine counts ends for programs of its own user and of root only.
    #[error(
        "the transfer engine runs as another user: it counts ends in no eventfd of this one, so wait for the descriptor of the connection"
    )]
    OtherUser,
    /// The engine closed the connection.
    #[error("the transfer engine closed the connection")]
    Closed,
    /// It is stopped, or its machine is overloaded.
    #[error("the transfer engine does not answer")]
    Silent,
    /// The engine refused the connection or a message.
    #[error("the transfer engine refused: {0}")]
    Refused(RemoteError),
    /// The answer has no meaning.
    #[error("the answer of the transfer engine cannot be used: {0}")]
    Message(#[from] MessageError),
    /// Another error of the host kernel.
    #[error("the connection to the transfer engine failed: {0}")]
    Host(#[from] io::Error),
}

/// How a transfer of [`Client::run`] ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ended {
    /// Why it ended early, if it did.
    pub result: Result<(), RemoteError>,
    /// What it did.
    pub report: Report,
}

/// A connection. Closing it cancels its transfers. Its descriptor becomes readable when an answer has arrived.
pub struct Client {
    socket: LocalSocket,
    last_id: u64,
    /// Transfers of which no answer has come.
    in_flight: usize,
    /// Answers that came while [`Self::run`] waited for another one.
    early: VecDeque<Answer>,
    small: Small,
}

impl Client {
    /// Connects to the engine at this path (`transfer.socket` of its configuration).
    pub fn connect(path: &Path) -> Result<Self, ClientError> {
        let deadline = Instant::now() + CONNECT_TIMEOUT;
        loop {
            match LocalSocket::connect(path) {
                Ok(socket) => {
                    let (early, small) = (VecDeque::new(), Small::default());
                    return Ok(Self { socket, last_id: 0, in_flight: 0, early, small });
                }
                // Many others connect at the moment.
                Err(error)
                    if error.kind() == io::ErrorKind::WouldBlock && Instant::now() < deadline =>
                {
                    std::thread::sleep(CONNECT_PAUSE);
                }
                Err(error) => {
                    let path = path.display().to_string();
                    return Err(ClientError::Connect { path, error });
                }
            }
        }
    }

    /// Starts a transfer and returns its number, from 1. The engine gets copies of the descriptors; the command's own are closed, unless the
    /// error is [`ClientError::Full`].
    pub fn submit(&mut self, command: Command) -> Result<u64, ClientError> {
        check_order(&command.stages).and(command.check_head()).map_err(ClientError::Order)?;
        let id = self.last_id + 1;
        if command.more.len() >= FILES_MAX {
            return Err(ClientError::Order(format!("a source has at most {FILES_MAX} files")));
        }
        let request = Request::Start { id, start: StartRequest::of(&command) };
        if command
            .stages
            .iter()
            .any(|stage| matches!(stage, StageSpec::Kernel(..) | StageSpec::SealOn(..)))
        {
            return Err(ClientError::Accelerator);
        }
        let (Some(source), Some(sink)) = (command.source.descriptor(), command.sink.descriptor())
        else {
            return Err(ClientError::Accelerator);
        };
        let mut descriptors = vec![source];
        descriptors.extend(command.more.iter().map(|range| range.file.as_fd()));
        descriptors.push(sink);
        match self.request(&request, &descriptors) {
            Err(ClientError::Host(error)) if error.kind() == io::ErrorKind::WouldBlock => {
                return Err(ClientError::Full(Box::new(command)));
            }
            sent => sent?,
        }
        self.last_id = id;
        self.in_flight += 1;
        Ok(id)
    }

    /// Executes a transfer and waits for its end. A file of at most [`crate::SMALL_BYTES_MAX`] that goes to a socket, through nothing but digests and a
    /// seal, is read, sealed and sent by this thread, without the engine: the hop to it would take longer. For that its file system
    /// has to be one of this machine's disks or memory, and no other transfer of this connection may be in flight.
    pub fn run(&mut self, command: Command) -> Result<Ended, ClientError> {
        let piece = Piece::of(&command, &|| false);
        if let Some(ended) = piece.and_then(|piece| self.run_small(&piece)) {
            return Ok(ended);
        }
        self.run_there(command)
    }

    /// As [`Self::run`], to a stream socket that the caller keeps. A small transfer copies no descriptor.
    pub fn send<State>(
        &mut self,
        source: Pipeline<State>,
        socket: impl AsFd,
    ) -> Result<Ended, ClientError> {
        let socket = socket.as_fd();
        if let (Place::File(file, from), true) = (&source.source, source.more.is_empty()) {
            let piece = Piece {
                file: file.as_fd(),
                from: *from,
                bytes: source.bytes,
                stages: &source.stages,
                socket,
                time_limits: TimeLimits::default(),
                interrupted: &|| false,
            };
            if let Some(ended) = self.run_small(&piece) {
                return Ok(ended);
            }
        }
        let command = source.socket(socket.try_clone_to_owned()?);
        self.run_there(command)
    }

    /// In this thread, if that can be done.
    fn run_small(&mut self, piece: &Piece<'_>) -> Option<Ended> {
        if self.in_flight > 0 {
            return None;
        }
        let Outcome { result, report } = self.small.run_piece(piece)?;
        Some(Ended { result: result.map_err(|error| RemoteError::from(&error)), report })
    }

    fn run_there(&mut self, command: Command) -> Result<Ended, ClientError> {
        let id = self.submit(command)?;
        let mut asked = false;
        loop {
            match self.receive(SILENCE)? {
                Some(Answer::Ended { id: ended, result, report }) if ended == id => {
                    return Ok(Ended { result, report });
                }
                Some(Answer::Progress { id: of, .. }) if of == id => asked = false,
                Some(other) => self.early.push_back(other),
                None if asked => return Err(ClientError::Silent),
                None => {
                    self.ask_progress(id)?;
                    asked = true;
                }
            }
        }
    }

    /// Ends a transfer; its answer says what it did.
    pub fn cancel(&mut self, id: u64) -> Result<(), ClientError> {
        self.request(&Request::Cancel(id), &[])
    }

    /// Asks how far a transfer is.
    pub fn ask_progress(&mut self, id: u64) -> Result<(), ClientError> {
        self.request(&Request::Progress(id), &[])
    }

    /// Asks for the transfers in flight of all callers, or of this user if it is another one than the engine's and root.
    pub fn ask_list(&mut self) -> Result<(), ClientError> {
        self.request(&Request::List, &[])
    }

    /// Lets the engine add 1 to an eventfd for each transfer of this connection that ends, when its answer is there. Several connections, and [`crate::Outcomes`], may
    /// have the same one. It replaces an earlier one, which may count transfers that have been started before. The eventfd has `EFD_NONBLOCK`, and the program runs as the engine's user or as root.
    pub fn signal(&mut self, eventfd: impl AsFd) -> Result<(), ClientError> {
        if !is_counter(eventfd.as_fd()) {
            return Err(ClientError::NoCounter);
        }
        let own = sys::process::user();
        if own != 0 && self.socket.peer()?.user != own {
            return Err(ClientError::OtherUser);
        }
        self.request(&Request::Signal, &[eventfd.as_fd()])
    }

    /// The next answer, in the order in which transfers end; `None`: none came within `timeout`. Answers that came during [`Self::run`]
    /// are here, though the descriptor is not readable for them.
    pub fn next(&mut self, timeout: Duration) -> Result<Option<Answer>, ClientError> {
        match self.early.pop_front() {
            Some(answer) => Ok(Some(answer)),
            None => self.receive(timeout),
        }
    }

    fn receive(&mut self, timeout: Duration) -> Result<Option<Answer>, ClientError> {
        let deadline = Instant::now() + timeout;
        loop {
            let mut bytes = vec![0; ANSWER_BYTES_MAX + 1];
            match self.socket.receive(&mut bytes) {
                Ok(Some(0)) => return Err(ClientError::Closed),
                Ok(Some(len)) => {
                    return match Answer::decode(&bytes[..len])? {
                        Answer::Ended { id: 0, result: Err(error), .. } => {
                            Err(ClientError::Refused(error))
                        }
                        answer => {
                            let ended = matches!(answer, Answer::Ended { .. });
                            self.in_flight -= usize::from(ended && self.in_flight > 0);
                            Ok(Some(answer))
                        }
                    };
                }
                Ok(None) => {}
                Err(error) if error.kind() == io::ErrorKind::ConnectionReset => {
                    return Err(ClientError::Closed);
                }
                Err(error) => return Err(error.into()),
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(None);
            }
            wait_readable(&[self.socket.as_fd()], Some(left));
        }
    }

    fn request(
        &self,
        request: &Request,
        descriptors: &[BorrowedFd<'_>],
    ) -> Result<(), ClientError> {
        let mut bytes = request.encode();
        let sent = self.socket.send(&bytes, descriptors);
        // It may hold a key.
        bytes.zeroize();
        match sent {
            Ok(()) => Ok(()),
            // It may have said why.
            Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Err(ClientError::Closed),
            Err(error) => Err(error.into()),
        }
    }
}

impl AsFd for Client {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}
