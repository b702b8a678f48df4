//! What requests about functions name, and what they show.

use std::fmt;

use onpath::{OnFailure, Param, Snapshot, Spec};

use super::objects::Origin;

/// What [`super::Functions::list`] shows of a function.
pub struct FunctionView {
    /// See [`Target::Id`].
    pub id: u64,
    /// Where it comes from.
    pub origin: Origin,
    /// Its service, if it is attached.
    pub service: Option<String>,
    /// What was asked for.
    pub spec: Spec,
    /// What it has done, on all workers.
    pub counted: Snapshot,
    /// Why its last call failed that did; empty if none did.
    pub last_failure: String,
    /// Names of its registers.
    pub registers: Vec<String>,
}

/// Names a function.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Target {
    /// By the id that it got when it was made.
    Id(u64),
    /// By its name in a chain.
    Named {
        /// The service.
        service: String,
        /// The name.
        name: String,
    },
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Id(id) => write!(f, "{id}"),
            Self::Named { service, name } => write!(f, "{name} of service {service}"),
        }
    }
}

/// A place in a chain.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub enum Place {
    /// That of the function that it replaces, or the end.
    #[default]
    Default,
    /// Counted from 0.
    At(usize),
    /// Before the function with this name.
    Before(String),
    /// Behind the function with this name.
    After(String),
}

/// What a function gets in place of what it has.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Replacement {
    /// A built-in function, or the path of a module. The same path: the file is read again.
    pub function: Option<String>,
    /// All its parameters; settings that commands have written are forgotten.
    pub params: Option<Vec<(String, Param)>>,
    /// See [`Spec::on_failure`].
    pub on_failure: Option<OnFailure>,
    /// See [`Spec::deadline_us`].
    pub deadline_us: Option<u64>,
    /// See [`Spec::memory_mib`].
    pub memory_mib: Option<u32>,
    /// See [`Spec::dictionary`].
    pub dictionary: Option<String>,
    /// See [`Spec::dictionary_kib`].
    pub dictionary_kib: Option<u32>,
}

/// What is done with registers before they are read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RegisterAction {
    /// Nothing.
    Read,
    /// All that are no settings get their first values.
    Reset,
    /// A setting gets a value.
    Write(String, u64),
}

/// Registers with their values, merged over all workers.
pub type Registers = Vec<(String, u64)>;

/// What an attach has done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Attachment {
    /// The function's id.
    pub id: u64,
    /// It has taken the place of another version of itself.
    pub replaced: bool,
}
