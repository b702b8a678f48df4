//! What a function is to the chain: something that decides about batches, and has registers.

use std::sync::Arc;

use wire::session::ReplyTo;

use crate::dictionary::Dictionary;
use crate::messages::{Messages, RequestId};

/// Something that happens besides messages, for functions that [want to know](Function::wants_notices).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Notice {
    /// The function is in a chain: it sees what comes from here on.
    Attached,
    /// It is in no chain, and sees nothing more.
    Detached,
    /// Once a millisecond while the worker is awake, and when it wakes up.
    Tick {
        /// The time.
        now_ns: u64,
    },
    /// A request that passed has ended, and no reply to it is shown. Of datagrams only [`End::Unsent`] is told: whether one is answered
    /// later is not known.
    Ended {
        /// The request.
        request: RequestId,
        /// How.
        end: End,
    },
    /// A client's connection has ended, or the one to the upstream server that it has to itself. Its requests that have not ended may
    /// have reached the server, and the server may still do them.
    Gone {
        /// The client.
        client: ReplyTo,
        /// The time.
        now_ns: u64,
    },
}

/// How a request ends without a reply that functions see.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// It was not sent: another function decided about it, or there was no way to send it.
    Unsent,
    /// The upstream server has done it.
    Done,
    /// It was sent to a backend, which may still do it. Whatever comes back is not shown.
    Unknown,
}

/// Which way messages go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// From clients to kernels.
    Requests,
    /// From kernels to clients.
    Replies,
}

/// How the values of a register on several workers become one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Merge {
    /// Their sum, modulo 2^64.
    Sum,
    /// The least one.
    Min,
    /// The greatest one.
    Max,
    /// A setting: a command writes it on every worker, so all have the same value.
    Setting,
    /// It follows from the states of all workers: [`Function::state`].
    State,
}

impl Merge {
    /// One value for two workers.
    pub fn merge(self, a: u64, b: u64) -> u64 {
        match self {
            Self::Sum => a.wrapping_add(b),
            Self::Min => a.min(b),
            Self::Max => a.max(b),
            Self::Setting | Self::State => b,
        }
    }
}

/// A value of a function that commands read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Register {
    /// Lower-case letters, digits and `_`; unique within the function.
    pub name: Box<str>,
    /// How the values of workers are merged; settings can be written.
    pub merge: Merge,
}

impl Register {
    /// Registers with these names.
    pub fn list(registers: &[(&str, Merge)]) -> Vec<Self> {
        let register = |(name, merge): &(&str, Merge)| Self { name: (*name).into(), merge: *merge };
        registers.iter().map(register).collect()
    }
}

/// What an instance answers to a command.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Reading {
    /// The values of its registers.
    pub values: Vec<u64>,
    /// See [`Function::state`].
    pub state: Vec<u8>,
    /// See [`Function::state_bytes`].
    pub state_bytes: u64,
}

impl Reading {
    /// What all instances together answer. `make` makes one more, into which their states are merged if they have any.
    pub fn merge(
        registers: &[Register],
        readings: Vec<Self>,
        make: impl FnOnce() -> Result<Box<dyn Function>, Failure>,
    ) -> Result<Self, Failure> {
        let values = readings.iter().map(|reading| reading.values.clone());
        let merged = values.reduce(|before, values| {
            let pairs = before.into_iter().zip(values).zip(registers);
            pairs.map(|((a, b), register)| register.merge.merge(a, b)).collect()
        });
        let mut values = merged.unwrap_or_default();
        if readings.iter().all(|reading| reading.state.is_empty()) {
            return Ok(Self { values, ..Self::default() });
        }
        let mut whole = make()?;
        let first = whole.read()?;
        let of = |merge: Merge| move |(_, register): &(usize, &Register)| register.merge == merge;
        for (index, _) in registers.iter().enumerate().filter(of(Merge::Setting)) {
            if first.get(index) != values.get(index) {
                whole.write(index, values[index])?;
            }
        }
        let skipped = if mutants::on("merge_last_state") { readings.len() - 1 } else { 0 };
        for reading in &readings[skipped..] {
            whole.merge(&reading.state)?;
        }
        let read = whole.read()?;
        for (index, _) in registers.iter().enumerate().filter(of(Merge::State)) {
            values[index] = read[index];
        }
        let state = whole.state()?;
        Ok(Self { values, state_bytes: state.len() as u64, state })
    }
}

/// Why a function could not do what it was called for. Its text goes to the log and to who sent a command.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct Failure(pub String);

/// What a command asks of a function.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Command {
    /// The values of all registers, and the state.
    Read,
    /// The values of all registers, and how long the state is.
    Sample,
    /// Registers that are no settings go back to their first values.
    Reset,
    /// A setting gets a value.
    Write {
        /// Index of the register.
        register: usize,
        /// The value.
        value: u64,
    },
}

/// Why a command was not done.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CommandError {
    /// No function of the chain has this id.
    #[error("the function is no longer attached")]
    Gone,
    /// There is no such register, or it is no setting.
    #[error("the function has no such setting")]
    NoSetting,
    /// The function has failed and is not restarted yet.
    #[error("the function has failed and restarts later: its registers cannot be read now")]
    Failing,
    /// The function has failed and is not restarted yet. The setting is written when it is.
    #[error("the function has failed and restarts later: the setting is written then")]
    Deferred,
    /// The function does not take this value for the setting. It goes on.
    #[error("the value is refused: {0}")]
    Refused(Failure),
    /// The function failed while it did the command.
    #[error("the function failed: {0}")]
    Failed(#[from] Failure),
}

/// A function on the path of one service's messages, on one worker. Each worker has an instance of its own; what commands read is
/// merged over all of them ([`Merge`]).
///
/// After a failure, or a panic, nothing that the call decided has an effect. What becomes of the messages is in the text of
/// [`crate::Chain`]'s module.
pub trait Function: Send {
    /// Decides about the messages of a batch that are still open.
    fn decide(&mut self, direction: Direction, messages: &mut Messages) -> Result<(), Failure>;

    /// Whether [`Self::notice`] is called.
    fn wants_notices(&self) -> bool {
        false
    }

    /// Something has happened besides messages. Not called while the function has failed and is not restarted.
    fn notice(&mut self, _notice: &Notice) {}

    /// Makes the function usable again after a failure. What its registers counted may be lost. It returns at once; false: not yet, call it
    /// again later.
    fn restart(&mut self) -> Result<bool, Failure> {
        Ok(true)
    }

    /// Gives it a parameter that is a text, or the content of its file, before its first message
    /// (its row in the table of built-in functions). The error does not repeat the content of a file, which may be secret.
    fn configure(&mut self, _param: &str, _value: &[u8]) -> Result<(), Failure> {
        Err(Failure("it has no such parameter".to_owned()))
    }

    /// Gives it the dictionary of its owner that it names, before its first message. Modules get it with their instances.
    fn use_dictionary(&mut self, _dictionary: Arc<Dictionary>) {}

    /// It has all parameters, and gets no message before this. It refuses parameters that do not fit together, and takes the memory that it needs:
    /// later it runs on a worker, which does not wait for memory.
    fn ready(&mut self) -> Result<(), Failure> {
        Ok(())
    }

    /// Its registers, the same in each instance.
    fn registers(&self) -> &[Register] {
        &[]
    }

    /// The values of all registers, in order.
    fn read(&mut self) -> Result<Vec<u64>, Failure> {
        Ok(Vec::new())
    }

    /// What it has besides registers, in a form that [`Self::merge`] takes; empty: nothing. What a read returns as
    /// [`Merge::State`] is read from an instance into which the states of all workers were merged.
    fn state(&mut self) -> Result<Vec<u8>, Failure> {
        Ok(Vec::new())
    }

    /// The length of what [`Self::state`] returns.
    fn state_bytes(&mut self) -> Result<u64, Failure> {
        Ok(self.state()?.len() as u64)
    }

    /// Adds the state of another instance with the same settings. It may come from a file: anything is possible.
    fn merge(&mut self, _state: &[u8]) -> Result<(), Failure> {
        Err(Failure("it has no state".to_owned()))
    }

    /// Registers that are no settings, and the state, go back to their first values.
    fn reset(&mut self) -> Result<(), Failure> {
        Ok(())
    }

    /// Sets the register with this index, which is a [`Merge::Setting`].
    fn write(&mut self, _register: usize, _value: u64) -> Result<(), Failure> {
        Err(Failure("it has no settings".to_owned()))
    }

    /// The same for a function that has failed: a sandboxed one keeps the value for [`Self::restart`].
    fn write_at_restart(&mut self, register: usize, value: u64) -> Result<(), Failure> {
        self.write(register, value)
    }
}
