//! Commands: requests of one side to the other that are not messages.
//!
//! The engine requests copies from an accelerator runtime, because only the runtime reaches the accelerator's own memory.
//! [`CommandRings`] sends commands through the command rings of a region; an accelerator in this process executes them directly
//! (`accel/src/copy.rs`). Neither side waits: the submitter polls for completions, and every command has a deadline.
//!
//! A copy names memory of the accelerator as an offset in a buffer, or by the accelerator's virtual address. Buffers that were described are in the
//! [`address_map`], which translates addresses before anything is submitted.

pub mod address_map;
mod buffers;
mod counters;

use std::sync::Arc;

pub use buffers::{AddressCopy, Buffers, Refused};
pub use counters::{CopyBytes, CopyCounters};
use mqueue::abi::command_status;
use mqueue::command::{BufferRange, CommandSender, Copy, Done, Request};
use mqueue::{LoanError, MappedMemory, Region, RingError};

/// What to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Command {
    /// Bytes to copy between the region's staging and a buffer of the accelerator.
    Copy(Copy),
    /// Bytes to copy between the region's staging and the accelerator's memory at an address.
    CopyAt(AddressCopy),
    /// Register the address of the buffer of this number, for [`Self::CopyAt`].
    Describe(u32),
}

/// How a command ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// It was done.
    Done,
    /// It names memory or a buffer that does not exist, or describes a buffer that cannot be registered.
    Range,
    /// The receiver does not know this command.
    Unknown,
    /// The accelerator failed, or did not finish it in time.
    Failed,
    /// No completion came before the deadline. The command may still be carried out.
    Timeout,
    /// The other side wrote impossible words into its ring, which cannot be used any more.
    Lost,
}

/// A command that has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Completion {
    /// What [`Commands::submit`] returned.
    pub number: u64,
    /// How it ended.
    pub outcome: Outcome,
}

/// Why a command was not taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SubmitError {
    /// The limit of commands in flight is reached; timed-out commands count until the other side completes them.
    #[error("too many commands are in flight")]
    Full,
    /// The ring does not exist, or the other side has made it unusable.
    #[error("the command ring cannot be used")]
    Unusable,
    /// A copy by address names memory that it must not.
    #[error(transparent)]
    Refused(#[from] Refused),
}

/// Submits commands and polls for their completions.
pub trait Commands {
    /// Submits a command to ring `ring` and returns the number that its completion will have. `deadline_ns` is in the
    /// clock of [`Self::poll`].
    fn submit(
        &mut self,
        ring: u32,
        command: &Command,
        deadline_ns: u64,
    ) -> Result<u64, SubmitError>;

    /// Appends completions, at most `budget`. Every submitted command ends exactly once, at its deadline at the latest.
    fn poll(&mut self, now_ns: u64, done: &mut Vec<Completion>, budget: usize);
}

/// The engine's side of the command rings of one region.
pub struct CommandRings {
    rings: Vec<Ring>,
    buffers: Buffers,
    counters: Arc<CopyCounters>,
    last_number: u64,
}

struct Ring {
    sender: CommandSender<MappedMemory>,
    staging_bytes: u64,
    in_flight: Vec<InFlight>,
    usable: bool,
}

/// A command, which is one message in the ring, or several if its range goes through several buffers.
struct InFlight {
    number: u64,
    deadline_ns: u64,
    what: What,
    /// Messages that were not completed.
    messages: u32,
    /// The first outcome of a message that is not [`Outcome::Done`].
    outcome: Outcome,
    /// Its outcome was reported because the deadline passed.
    reported: bool,
}

#[derive(Clone, Copy)]
enum What {
    /// A copy of this many bytes.
    Copy(u64),
    /// A description of this buffer.
    Describe(u32),
}

/// Maximum number of commands in flight per ring; rings have as many slots.
pub const COMMANDS_IN_FLIGHT: u32 = 8;
/// Size of the staging of a region: the bytes that commands copy to and from the accelerator's memory.
pub const STAGING_BYTES: u64 = 4096;

impl CommandRings {
    /// Takes the engine's ends of the command rings. Panics when taken before.
    pub fn take(region: &mut Region<MappedMemory>) -> Self {
        let pairs = region.command_rings();
        let ring = |pair| Ring {
            sender: region.command_sender(pair),
            staging_bytes: region.staging(pair).1,
            in_flight: Vec::with_capacity(COMMANDS_IN_FLIGHT as usize),
            usable: true,
        };
        let rings = (0..pairs).map(ring).collect();
        Self { rings, buffers: Buffers::default(), counters: Arc::default(), last_number: 0 }
    }

    /// Counts copies in `counters` from now on; before the first is submitted.
    pub fn counted_in(mut self, counters: Arc<CopyCounters>) -> Self {
        self.counters = counters;
        self
    }

    /// Where a buffer is that was described.
    pub fn buffer(&self, ring: u32, number: u32) -> Option<BufferRange> {
        self.buffers.range(ring, number)
    }
}

impl Commands for CommandRings {
    fn submit(
        &mut self,
        ring: u32,
        command: &Command,
        deadline_ns: u64,
    ) -> Result<u64, SubmitError> {
        let Self { rings, buffers, counters, last_number } = self;
        let (of, number) = (ring, *last_number + 1);
        let ring = rings.get_mut(ring as usize).filter(|ring| ring.usable);
        let ring = ring.ok_or(SubmitError::Unusable)?;
        let room = COMMANDS_IN_FLIGHT - ring.in_flight.iter().map(|one| one.messages).sum::<u32>();
        let (what, messages) = match *command {
            Command::Copy(copy) => {
                (What::Copy(copy.bytes), ring.send(room, number, [Request::Copy(copy)])?)
            }
            Command::Describe(buffer) => {
                (What::Describe(buffer), ring.send(room, number, [Request::Describe(buffer)])?)
            }
            Command::CopyAt(copy) => {
                let copies = buffers.copies(of, ring.staging_bytes, &copy);
                let copies = copies.inspect_err(|why| counters.count_refused(*why))?;
                (What::Copy(copy.bytes), ring.send(room, number, copies.map(Request::Copy))?)
            }
        };
        *last_number = number;
        if let What::Copy(bytes) = what {
            counters.count_taken(bytes);
        }
        let outcome = Outcome::Done;
        let command = InFlight { number, deadline_ns, what, messages, outcome, reported: false };
        ring.in_flight.push(command);
        Ok(number)
    }

    fn poll(&mut self, now_ns: u64, done: &mut Vec<Completion>, budget: usize) {
        let (begin, end) = (done.len(), done.len() + budget);
        let Self { rings, buffers, counters, .. } = self;
        for (of, ring) in (0..).zip(rings) {
            while ring.usable && done.len() < end {
                match ring.next((of, buffers), counters) {
                    Ok(None) => break,
                    Ok(Some(reported)) => done.extend(reported),
                    Err(_) => ring.usable = false,
                }
            }
            ring.end_overdue(now_ns, done, end, counters);
        }
        debug_assert!(done.len() - begin <= budget);
    }
}

impl Drop for CommandRings {
    /// What is in flight ends with the rings.
    fn drop(&mut self) {
        let left = self.rings.iter().flat_map(|ring| &ring.in_flight);
        left.filter(|command| !command.reported)
            .for_each(|command| command.what.count_end(Outcome::Lost, &self.counters));
    }
}

impl What {
    fn count_end(self, outcome: Outcome, counters: &CopyCounters) {
        if let Self::Copy(bytes) = self {
            counters.count_end(bytes, outcome == Outcome::Done);
        }
    }
}

impl Ring {
    /// Writes the messages of one command, if there is room for all. Returns how many they are.
    fn send(
        &mut self,
        room: u32,
        number: u64,
        requests: impl IntoIterator<Item = Request>,
    ) -> Result<u32, SubmitError> {
        let mut all = [Request::Describe(0); COMMANDS_IN_FLIGHT as usize];
        let mut count = 0;
        for (place, request) in all.iter_mut().zip(requests) {
            (*place, count) = (request, count + 1);
        }
        if count > room {
            return Err(SubmitError::Full);
        }
        for (sent, request) in (0..).zip(&all[..count as usize]) {
            match self.sender.send(number, request) {
                Ok(()) => {}
                Err(LoanError::Full) if sent == 0 => return Err(SubmitError::Full),
                // A runtime that releases slots has room for a message that may be in flight.
                Err(LoanError::Full | LoanError::TooLong | LoanError::Corrupt) => {
                    self.usable = false;
                    return Err(SubmitError::Unusable);
                }
            }
        }
        Ok(count)
    }

    /// Reads a completion, if one has arrived. The inner option is empty if the command has further messages, or its timeout was
    /// reported already. A completion of an unknown command is an error.
    fn next(
        &mut self,
        buffers: (u32, &mut Buffers),
        counters: &CopyCounters,
    ) -> Result<Option<Option<Completion>>, RingError> {
        let Some(done) = self.sender.completion()? else { return Ok(None) };
        let place = self.in_flight.iter().position(|command| command.number == done.number);
        let place = place.ok_or(RingError::Corrupt)?;
        let command = &mut self.in_flight[place];
        let outcome = match (command.what, done.range) {
            (What::Describe(buffer), Some(range)) => describe(buffers, buffer, range, &done),
            (What::Copy(_), Some(_)) => return Err(RingError::Corrupt),
            (What::Describe(_), None) if done.status == command_status::OK => Outcome::Unknown,
            _ => outcome_of(&done),
        };
        command.messages -= 1;
        if command.outcome == Outcome::Done {
            command.outcome = outcome;
        }
        if command.messages > 0 {
            return Ok(Some(None));
        }
        let InFlight { number, what, outcome, reported, .. } = self.in_flight.swap_remove(place);
        if reported {
            return Ok(Some(None));
        }
        what.count_end(outcome, counters);
        Ok(Some(Some(Completion { number, outcome })))
    }

    /// Ends the commands whose deadline has passed, or all commands if the ring is unusable.
    fn end_overdue(
        &mut self,
        now_ns: u64,
        done: &mut Vec<Completion>,
        end: usize,
        counters: &CopyCounters,
    ) {
        let outcome = if self.usable { Outcome::Timeout } else { Outcome::Lost };
        for command in &mut self.in_flight {
            let over = !self.usable || now_ns >= command.deadline_ns;
            if over && !command.reported && done.len() < end {
                command.reported = true;
                command.what.count_end(outcome, counters);
                done.push(Completion { number: command.number, outcome });
            }
        }
    }
}

fn outcome_of(done: &Done) -> Outcome {
    match done.status {
        command_status::OK => Outcome::Done,
        command_status::RANGE => Outcome::Range,
        command_status::UNKNOWN => Outcome::Unknown,
        _ => Outcome::Failed,
    }
}

/// Registers a buffer as the runtime described it.
fn describe(
    (ring, buffers): (u32, &mut Buffers),
    buffer: u32,
    range: BufferRange,
    done: &Done,
) -> Outcome {
    if done.status != command_status::OK {
        return outcome_of(done);
    }
    match buffers.register(ring, buffer, range) {
        Ok(()) => Outcome::Done,
        Err(error) => {
            let BufferRange { address, bytes } = range;
            tracing::warn!(
                "buffer {buffer} at {address:#x}, {bytes} bytes, is not registered: {error}"
            );
            Outcome::Range
        }
    }
}

#[cfg(test)]
mod tests;
