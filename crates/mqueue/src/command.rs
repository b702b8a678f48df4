//! Commands of the engine to an accelerator runtime and their completions: the two ends of a pair of command rings.
//!
//! Command rings use the same doorbell protocol as message rings, with a slot format of their own (see [`crate::abi`]), so they add no
//! ordering edge. Neither end trusts the other: malformed input produces a status or an error.

use crate::abi::{CopyCommand, SlotHeader, command, command_status, direction};
use crate::memory::Memory;
use crate::ring::{Consumer, Head, LoanError, Producer, RingError};

/// The direction of a copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// From the region's window to the buffer.
    ToBuffer,
    /// From the buffer to the region's window.
    FromBuffer,
}

/// Bytes to copy between the region's window and a buffer of the accelerator.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Copy {
    /// The direction.
    pub direction: Direction,
    /// Offset in the window.
    pub window_offset: u64,
    /// Number of the buffer among those that the runtime has registered.
    pub buffer: u32,
    /// Offset in the buffer.
    pub buffer_offset: u64,
    /// How many; like the offsets a multiple of 8, and at least 8.
    pub bytes: u64,
}

impl Copy {
    /// Whether it consists of whole words and stays inside a window and a buffer of these sizes.
    pub fn fits(&self, window_bytes: u64, buffer_bytes: u64) -> bool {
        let inside = |offset: u64, size: u64| {
            offset % 8 == 0 && offset.checked_add(self.bytes).is_some_and(|end| end <= size)
        };
        self.bytes > 0
            && self.bytes % 8 == 0
            && inside(self.window_offset, window_bytes)
            && inside(self.buffer_offset, buffer_bytes)
    }

    fn encode(&self) -> [u8; COPY_BYTES] {
        let direction = match self.direction {
            Direction::ToBuffer => direction::TO_BUFFER,
            Direction::FromBuffer => direction::FROM_BUFFER,
        };
        let Self { window_offset, buffer, buffer_offset, bytes, .. } = *self;
        CopyCommand { window_offset, buffer_offset, bytes, buffer, direction }.to_bytes()
    }

    fn decode(bytes: [u8; COPY_BYTES]) -> Option<Self> {
        let command = CopyCommand::from_bytes(bytes);
        let direction = match command.direction {
            direction::TO_BUFFER => Direction::ToBuffer,
            direction::FROM_BUFFER => Direction::FromBuffer,
            _ => return None,
        };
        let CopyCommand { window_offset, buffer_offset, bytes, buffer, .. } = command;
        Some(Self { direction, window_offset, buffer, buffer_offset, bytes })
    }
}

const COPY_BYTES: usize = size_of::<CopyCommand>();

/// The engine's end: commands go out, completions come back.
pub struct CommandSender<M: Memory> {
    commands: Producer<M>,
    completions: Consumer<M>,
}

impl<M: Memory> CommandSender<M> {
    pub(crate) fn new(commands: Producer<M>, completions: Consumer<M>) -> Self {
        Self { commands, completions }
    }

    /// Writes a copy command into the ring. Its completion will have the same number.
    pub fn copy(&mut self, number: u64, copy: &Copy) -> Result<(), LoanError> {
        let head = Head { token: number, kind: command::COPY, ..Head::default() };
        self.commands.push(head, &copy.encode())?;
        self.commands.publish();
        Ok(())
    }

    /// The next completion: number and status as the runtime wrote them. After an error the ring cannot be used any more.
    pub fn completion(&mut self) -> Result<Option<(u64, u8)>, RingError> {
        let Some(header) = self.completions.peek()? else { return Ok(None) };
        self.completions.advance();
        self.completions.release();
        if (header.kind, header.len) != (command::DONE, 0) {
            return Err(RingError::BadHeader);
        }
        Ok(Some((header.token, header.status)))
    }
}

/// A command as it was received: its number, and the copy, or the status for a malformed or unknown command.
pub type Received = (u64, Result<Copy, u8>);

/// The runtime's end: commands come in, completions go back.
pub struct CommandReceiver<M: Memory> {
    commands: Consumer<M>,
    completions: Producer<M>,
}

impl<M: Memory> CommandReceiver<M> {
    pub(crate) fn new(commands: Consumer<M>, completions: Producer<M>) -> Self {
        Self { commands, completions }
    }

    /// The next command: its number, and the copy, or the status for a malformed or unknown command. After an error the
    /// ring cannot be used any more.
    pub fn command(&mut self) -> Result<Option<Received>, RingError> {
        let Some(header) = self.commands.peek()? else { return Ok(None) };
        let command = self.read(&header);
        self.commands.advance();
        self.commands.release();
        Ok(Some((header.token, command.ok_or(command_status::UNKNOWN))))
    }

    fn read(&self, header: &SlotHeader) -> Option<Copy> {
        let mut bytes = [0; COPY_BYTES];
        if header.kind != command::COPY || header.len as usize != bytes.len() {
            return None;
        }
        // A doorbell ring shows whole messages only.
        self.commands.copy_out(header, &mut bytes).then_some(())?;
        Copy::decode(bytes)
    }

    /// Completes a command. [`LoanError::Full`] is possible only if the engine has more commands in flight than
    /// the ring has slots.
    pub fn complete(&mut self, number: u64, status: u8) -> Result<(), LoanError> {
        let head = Head { token: number, kind: command::DONE, status, ..Head::default() };
        self.completions.push(head, &[])?;
        self.completions.publish();
        Ok(())
    }
}
