//! Commands: requests of one side to the other that are not messages.
//!
//! The first command is a copy that the engine requests from an accelerator runtime, because only the runtime reaches the accelerator's own memory.
//! [`CommandRings`] sends commands through the command rings of a region; an accelerator in this process executes them directly
//! (`accel/src/copy.rs`). Neither side waits: the submitter polls for completions, and every command has a deadline.

pub mod address_map;

use mqueue::abi::command_status;
use mqueue::command::{CommandSender, Copy};
use mqueue::{LoanError, MappedMemory, Region, RingError};

/// What to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Command {
    /// Bytes to copy between the region's window and a buffer of the accelerator.
    Copy(Copy),
}

/// How a command ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// It was done.
    Done,
    /// It names memory or a buffer that does not exist.
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
    last_number: u64,
}

struct Ring {
    sender: CommandSender<MappedMemory>,
    /// As many as the ring has slots, at most.
    in_flight: Vec<InFlight>,
    usable: bool,
}

struct InFlight {
    number: u64,
    deadline_ns: u64,
    /// Its outcome was reported because the deadline passed.
    reported: bool,
}

/// Maximum number of commands in flight per ring; rings have as many slots.
pub const COMMANDS_IN_FLIGHT: u32 = 8;
/// Size of the window in a region: the bytes that commands copy to and from the accelerator's memory.
pub const WINDOW_BYTES: u64 = 4096;

impl CommandRings {
    /// Takes the engine's ends of the command rings. Panics when taken before.
    pub fn take(region: &mut Region<MappedMemory>) -> Self {
        let pairs = region.command_rings();
        let ring = |pair| Ring {
            sender: region.command_sender(pair),
            in_flight: Vec::with_capacity(COMMANDS_IN_FLIGHT as usize),
            usable: true,
        };
        Self { rings: (0..pairs).map(ring).collect(), last_number: 0 }
    }
}

impl Commands for CommandRings {
    fn submit(
        &mut self,
        ring: u32,
        command: &Command,
        deadline_ns: u64,
    ) -> Result<u64, SubmitError> {
        let ring = self.rings.get_mut(ring as usize).filter(|ring| ring.usable);
        let ring = ring.ok_or(SubmitError::Unusable)?;
        if ring.in_flight.len() == COMMANDS_IN_FLIGHT as usize {
            return Err(SubmitError::Full);
        }
        let number = self.last_number + 1;
        let Command::Copy(copy) = command;
        match ring.sender.copy(number, copy) {
            Ok(()) => {}
            Err(LoanError::Full) => return Err(SubmitError::Full),
            Err(LoanError::TooLong | LoanError::Corrupt) => {
                ring.usable = false;
                return Err(SubmitError::Unusable);
            }
        }
        self.last_number = number;
        ring.in_flight.push(InFlight { number, deadline_ns, reported: false });
        Ok(number)
    }

    fn poll(&mut self, now_ns: u64, done: &mut Vec<Completion>, budget: usize) {
        let end = done.len() + budget;
        for ring in &mut self.rings {
            while ring.usable && done.len() < end {
                match ring.next() {
                    Ok(None) => break,
                    Ok(Some(reported)) => done.extend(reported),
                    Err(_) => ring.usable = false,
                }
            }
            ring.end_overdue(now_ns, done, end);
        }
    }
}

impl Ring {
    /// Reads a completion, if one has arrived. The inner option is empty if the command's timeout was reported
    /// already. A completion of an unknown command is an error.
    fn next(&mut self) -> Result<Option<Option<Completion>>, RingError> {
        let Some((number, status)) = self.sender.completion()? else { return Ok(None) };
        let place = self.in_flight.iter().position(|command| command.number == number);
        let command = self.in_flight.swap_remove(place.ok_or(RingError::Corrupt)?);
        let outcome = match status {
            command_status::OK => Outcome::Done,
            command_status::RANGE => Outcome::Range,
            command_status::UNKNOWN => Outcome::Unknown,
            _ => Outcome::Failed,
        };
        Ok(Some((!command.reported).then_some(Completion { number, outcome })))
    }

    /// Ends the commands whose deadline has passed, or all commands if the ring is unusable.
    fn end_overdue(&mut self, now_ns: u64, done: &mut Vec<Completion>, end: usize) {
        let outcome = if self.usable { Outcome::Timeout } else { Outcome::Lost };
        for command in &mut self.in_flight {
            let over = !self.usable || now_ns >= command.deadline_ns;
            if over && !command.reported && done.len() < end {
                command.reported = true;
                done.push(Completion { number: command.number, outcome });
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use mqueue::command::{CommandReceiver, Direction};
    use mqueue::{HeapMapping, MqueuePlan, RegionPlan, RingPlan};

    use super::*;

    const COPY: Command = Command::Copy(Copy {
        direction: Direction::ToBuffer,
        window_offset: 0,
        buffer: 0,
        buffer_offset: 0,
        bytes: 8,
    });

    fn rings() -> (CommandRings, CommandReceiver<MappedMemory>) {
        let ring = RingPlan::doorbell(32, 0);
        let plan = RegionPlan::of_blocks(1, &[MqueuePlan { depth: 2, rx: ring, tx: ring }], 1)
            .with_commands(COMMANDS_IN_FLIGHT, 64);
        let memory = HeapMapping::memory(plan.bytes().unwrap() as usize);
        let mut near = Region::format(memory.clone(), &plan).unwrap();
        let receiver = Region::join(memory).unwrap().command_receiver(0);
        (CommandRings::take(&mut near), receiver)
    }

    fn polled(rings: &mut CommandRings, now_ns: u64) -> Vec<(u64, Outcome)> {
        let mut done = Vec::new();
        rings.poll(now_ns, &mut done, 100);
        done.into_iter().map(|done| (done.number, done.outcome)).collect()
    }

    #[test]
    fn every_command_ends_once_with_the_status_that_came_back() {
        let (mut rings, mut receiver) = rings();
        let statuses = [
            (command_status::OK, Outcome::Done),
            (command_status::RANGE, Outcome::Range),
            (command_status::UNKNOWN, Outcome::Unknown),
            (command_status::TIMEOUT, Outcome::Failed),
            (command_status::FAILED, Outcome::Failed),
            (200, Outcome::Failed),
        ];
        for (status, outcome) in statuses {
            let number = rings.submit(0, &COPY, 10).unwrap();
            assert_eq!(polled(&mut rings, 9), []);
            let (asked, command) = receiver.command().unwrap().expect("it was submitted");
            assert_eq!((asked, Command::Copy(command.unwrap())), (number, COPY));
            receiver.complete(number, status).unwrap();
            assert_eq!(polled(&mut rings, 9), [(number, outcome)]);
            assert_eq!(polled(&mut rings, 1000), []);
        }
        assert_eq!(rings.submit(1, &COPY, 10), Err(SubmitError::Unusable));
    }

    #[test]
    fn a_deadline_ends_a_command_but_its_place_is_free_only_when_it_is_completed() {
        let (mut rings, mut receiver) = rings();
        let numbers: Vec<u64> =
            (0..COMMANDS_IN_FLIGHT).map(|n| rings.submit(0, &COPY, n.into()).unwrap()).collect();
        assert_eq!(rings.submit(0, &COPY, 100), Err(SubmitError::Full));
        let mut done = Vec::new();
        rings.poll(100, &mut done, 3);
        assert_eq!(done.len(), 3, "limited by the budget");
        rings.poll(100, &mut done, 100);
        let ended: Vec<u64> = done.iter().map(|done| done.number).collect();
        assert!(ended == numbers && done.iter().all(|done| done.outcome == Outcome::Timeout));
        assert_eq!(rings.submit(0, &COPY, 200), Err(SubmitError::Full));
        while let Some((number, _)) = receiver.command().unwrap() {
            receiver.complete(number, command_status::OK).unwrap();
        }
        assert_eq!(polled(&mut rings, 101), [], "a late completion is not reported again");
        assert!(rings.submit(0, &COPY, 200).is_ok());
    }

    #[test]
    fn an_unknown_completion_makes_the_ring_unusable() {
        for forged in [0, 3, u64::MAX] {
            let (mut rings, mut receiver) = rings();
            let numbers = [1, 2].map(|_| rings.submit(0, &COPY, 10).unwrap());
            receiver.complete(forged, command_status::OK).unwrap();
            let lost = numbers.map(|number| (number, Outcome::Lost));
            assert_eq!(polled(&mut rings, 0), lost);
            assert_eq!(polled(&mut rings, 100), []);
            assert_eq!(rings.submit(0, &COPY, 10), Err(SubmitError::Unusable));
        }
        let (mut rings, mut receiver) = rings();
        let number = rings.submit(0, &COPY, 10).unwrap();
        receiver.complete(number, command_status::OK).unwrap();
        receiver.complete(number, command_status::OK).unwrap();
        assert_eq!(polled(&mut rings, 0), [(number, Outcome::Done)], "the command ends once");
        assert_eq!(rings.submit(0, &COPY, 10), Err(SubmitError::Unusable));
    }
}
