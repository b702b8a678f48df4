//! Commands of the engine to an accelerator runtime and their completions: the two ends of a pair of command rings.
//!
//! Command rings use the same doorbell protocol as message rings, with a slot format of their own (see [`crate::abi`]), so they add no
//! ordering edge. Neither end trusts the other: malformed input produces a status or an error.

pub use crate::abi::BufferRange;
use crate::abi::{CopyCommand, DescribeCommand, SlotHeader, command, command_status, direction};
use crate::memory::Memory;
use crate::ring::{Consumer, Head, LoanError, Producer, RingError};

/// The direction of a copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// From the region's staging to the buffer.
    ToBuffer,
    /// From the buffer to the region's staging.
    FromBuffer,
}

/// Bytes to copy between the region's staging and a buffer of the accelerator.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Copy {
    /// The direction.
    pub direction: Direction,
    /// Offset in the staging.
    pub staging_offset: u64,
    /// Number of the buffer among those that the runtime has registered.
    pub buffer: u32,
    /// Offset in the buffer.
    pub buffer_offset: u64,
    /// How many; like the offsets a multiple of 8, and at least 8.
    pub bytes: u64,
}

impl Copy {
    /// Whether it consists of whole words and stays inside staging and a buffer of these sizes.
    pub fn fits(&self, staging_bytes: u64, buffer_bytes: u64) -> bool {
        let inside = |offset: u64, size: u64| {
            offset % 8 == 0 && offset.checked_add(self.bytes).is_some_and(|end| end <= size)
        };
        self.bytes > 0
            && self.bytes % 8 == 0
            && inside(self.staging_offset, staging_bytes)
            && inside(self.buffer_offset, buffer_bytes)
    }

    fn encode(&self) -> [u8; size_of::<CopyCommand>()] {
        let direction = match self.direction {
            Direction::ToBuffer => direction::TO_BUFFER,
            Direction::FromBuffer => direction::FROM_BUFFER,
        };
        let Self { staging_offset, buffer, buffer_offset, bytes, .. } = *self;
        CopyCommand { staging_offset, buffer_offset, bytes, buffer, direction }.to_bytes()
    }

    fn decode(command: CopyCommand) -> Option<Self> {
        let direction = match command.direction {
            direction::TO_BUFFER => Direction::ToBuffer,
            direction::FROM_BUFFER => Direction::FromBuffer,
            _ => return None,
        };
        let CopyCommand { staging_offset, buffer_offset, bytes, buffer, .. } = command;
        Some(Self { direction, staging_offset, buffer, buffer_offset, bytes })
    }
}

/// A command of the engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Request {
    /// Copy bytes.
    Copy(Copy),
    /// Answer with the range of the buffer of this number.
    Describe(u32),
}

/// The engine's end: commands go out, completions come back.
pub struct CommandSender<M: Memory> {
    commands: Producer<M>,
    completions: Consumer<M>,
}

/// A completion as the runtime wrote it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Done {
    /// The number of the command.
    pub number: u64,
    /// One of [`command_status`].
    pub status: u8,
    /// The answer to [`Request::Describe`].
    pub range: Option<BufferRange>,
}

impl<M: Memory> CommandSender<M> {
    pub(crate) fn new(commands: Producer<M>, completions: Consumer<M>) -> Self {
        Self { commands, completions }
    }

    /// Writes a command into the ring. Its completion will have the same number.
    pub fn send(&mut self, number: u64, request: &Request) -> Result<(), LoanError> {
        let head = |kind| Head { token: number, kind, ..Head::default() };
        match *request {
            Request::Copy(copy) => self.commands.push(head(command::COPY), &copy.encode())?,
            Request::Describe(buffer) => {
                let payload = DescribeCommand { buffer, pad: 0 }.to_bytes();
                self.commands.push(head(command::DESCRIBE), &payload)?;
            }
        }
        self.commands.publish();
        Ok(())
    }

    /// The next completion. After an error the ring cannot be used any more.
    pub fn completion(&mut self) -> Result<Option<Done>, RingError> {
        let Some(header) = self.completions.peek()? else { return Ok(None) };
        let range = match header.len {
            0 => Some(None),
            _ => payload(&self.completions, &header).map(|r| Some(BufferRange::from_bytes(r))),
        };
        self.completions.advance();
        self.completions.release();
        match range {
            Some(range) if header.kind == command::DONE => {
                Ok(Some(Done { number: header.token, status: header.status, range }))
            }
            _ => Err(RingError::BadHeader),
        }
    }
}

/// A message's payload, if it has this length.
fn payload<M: Memory, const N: usize>(ring: &Consumer<M>, header: &SlotHeader) -> Option<[u8; N]> {
    let mut bytes = [0; N];
    // A doorbell ring shows whole messages only.
    (header.len as usize == N && ring.copy_out(header, &mut bytes)).then_some(bytes)
}

/// A command as it was received: its number, and the command, or the status for a malformed or unknown one.
pub type Received = (u64, Result<Request, u8>);

/// The runtime's end: commands come in, completions go back.
pub struct CommandReceiver<M: Memory> {
    commands: Consumer<M>,
    completions: Producer<M>,
}

impl<M: Memory> CommandReceiver<M> {
    pub(crate) fn new(commands: Consumer<M>, completions: Producer<M>) -> Self {
        Self { commands, completions }
    }

    /// The next command. After an error the ring cannot be used any more.
    pub fn command(&mut self) -> Result<Option<Received>, RingError> {
        let Some(header) = self.commands.peek()? else { return Ok(None) };
        let command = self.read(&header);
        self.commands.advance();
        self.commands.release();
        Ok(Some((header.token, command.ok_or(command_status::UNKNOWN))))
    }

    fn read(&self, header: &SlotHeader) -> Option<Request> {
        match header.kind {
            command::COPY => {
                let command = CopyCommand::from_bytes(payload(&self.commands, header)?);
                Copy::decode(command).map(Request::Copy)
            }
            command::DESCRIBE => {
                let command = DescribeCommand::from_bytes(payload(&self.commands, header)?);
                Some(Request::Describe(command.buffer))
            }
            _ => None,
        }
    }

    /// Completes a command with a status, and [`Request::Describe`] with a range if that is OK. [`LoanError::Full`] is possible only if
    /// the engine has more commands in flight than the ring has slots.
    pub fn complete(&mut self, done: &Done) -> Result<(), LoanError> {
        let Done { number, status, range } = *done;
        let head = Head { token: number, kind: command::DONE, status, ..Head::default() };
        match range {
            Some(range) => self.completions.push(head, &range.to_bytes())?,
            None => self.completions.push(head, &[])?,
        }
        self.completions.publish();
        Ok(())
    }
}

impl Done {
    /// A completion without an answer.
    pub fn of(number: u64, status: u8) -> Self {
        Self { number, status, range: None }
    }
}
