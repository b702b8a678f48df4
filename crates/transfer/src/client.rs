//! A program's connection to a transfer engine in another process.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::Path;
use std::time::{Duration, Instant};

use sys::local::{LocalSocket, wait_readable};
use zeroize::Zeroize as _;

use crate::message::{ANSWER_BYTES_MAX, Answer, MessageError, Order, RemoteError, Request};
use crate::pipeline::{Command, FILES_MAX};
use crate::stage::{StageSpec, check_order};

/// How long connecting may take, and the time between two attempts.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
const CONNECT_PAUSE: Duration = Duration::from_millis(5);

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
    /// The engine closed the connection.
    #[error("the transfer engine closed the connection")]
    Closed,
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

/// A connection. Closing it cancels its transfers. Its descriptor becomes readable when an answer has arrived.
pub struct Client {
    socket: LocalSocket,
    last_id: u64,
}

impl Client {
    /// Connects to the engine at this path (`transfer.socket` of its configuration).
    pub fn connect(path: &Path) -> Result<Self, ClientError> {
        let deadline = Instant::now() + CONNECT_TIMEOUT;
        loop {
            match LocalSocket::connect(path) {
                Ok(socket) => return Ok(Self { socket, last_id: 0 }),
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
        check_order(&command.stages).map_err(ClientError::Order)?;
        let id = self.last_id + 1;
        if command.more.len() >= FILES_MAX {
            return Err(ClientError::Order(format!("a source has at most {FILES_MAX} files")));
        }
        let request = Request::Start { id, order: Order::of(&command) };
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
        match self.send(&request, &descriptors) {
            Err(ClientError::Host(error)) if error.kind() == io::ErrorKind::WouldBlock => {
                return Err(ClientError::Full(Box::new(command)));
            }
            sent => sent?,
        }
        self.last_id = id;
        Ok(id)
    }

    /// Ends a transfer; its answer says what it did.
    pub fn cancel(&mut self, id: u64) -> Result<(), ClientError> {
        self.send(&Request::Cancel(id), &[])
    }

    /// Asks how far a transfer is.
    pub fn ask_progress(&mut self, id: u64) -> Result<(), ClientError> {
        self.send(&Request::Progress(id), &[])
    }

    /// Asks for the transfers in flight of all callers.
    pub fn ask_list(&mut self) -> Result<(), ClientError> {
        self.send(&Request::List, &[])
    }

    /// The next answer, in the order in which transfers end; `None`: none came within `timeout`.
    pub fn next(&mut self, timeout: Duration) -> Result<Option<Answer>, ClientError> {
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
                        answer => Ok(Some(answer)),
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

    fn send(&self, request: &Request, descriptors: &[BorrowedFd<'_>]) -> Result<(), ClientError> {
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
