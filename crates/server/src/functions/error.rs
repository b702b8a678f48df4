//! Why a request about functions is refused.

use std::path::PathBuf;

use builtins::LibraryError;
use onpath::spec::{FUNCTIONS_MAX, NAME_BYTES_MAX};
use onpath::{CommandError, TRACED_MAX};

use super::{CREATED_MAX, CREATED_PER_USER_MAX};
use crate::base::error::Stuck;
use crate::directory::DirectoryError;

/// Why a function was not created, attached, detached or commanded. One sentence each.
#[derive(Debug, thiserror::Error)]
pub enum FunctionError {
    /// There is no such service, or the caller may not attach functions to it.
    #[error("there is no service {name:?}: this server has {services}")]
    NoService {
        /// The name.
        name: String,
        /// Those to which the caller may attach functions.
        services: String,
    },
    /// The service has no such backend.
    #[error("service {service:?} has no backend {name:?}: it has {backends}")]
    NoBackend {
        /// The service.
        service: String,
        /// The name.
        name: String,
        /// Those that it has.
        backends: String,
    },
    /// There is no such function, or it belongs to another user.
    #[error("service {service:?} has no function {name:?}: it has {functions}")]
    NoFunction {
        /// The service.
        service: String,
        /// The name.
        name: String,
        /// The caller's functions.
        functions: String,
    },
    /// There is no such function, or it belongs to another user.
    #[error("there is no function {0} of user {1}: `serval fn list` shows those that there are")]
    NoId(u64, u32),
    /// A name that no function can have.
    #[error(
        "{0:?} cannot be a function's name: use 1 to {NAME_BYTES_MAX} letters, digits, `_` and `-`, and no `-` at the beginning"
    )]
    Name(String),
    /// The caller has created a function with this name.
    #[error("user {1} has created a function {0:?} already: destroy it first, or use another name")]
    NameTaken(String, u32),
    /// The tenant's memory is used up.
    #[error(
        "tenant {tenant:?} may use {most} MiB and would use {mib} MiB with this function: give functions less memory, detach some, or raise its `memory_mib`"
    )]
    TenantMemory {
        /// The tenant.
        tenant: String,
        /// Its limit.
        most: u64,
        /// What it would use.
        mib: u64,
    },
    /// Another function of the chain has this name.
    #[error(
        "service {service:?} has another function {name:?}: detach that one first, or create this one with another name"
    )]
    NameInChain {
        /// The service.
        service: String,
        /// The name.
        name: String,
    },
    /// There is no neighbour with this name.
    #[error("service {service:?} has no function {name:?} to be placed at: it has {functions}")]
    NoNeighbour {
        /// The service.
        service: String,
        /// The name.
        name: String,
        /// Those that the caller sees.
        functions: String,
    },
    /// The chain is full.
    #[error(
        "service {0:?} has {FUNCTIONS_MAX} functions, and a chain has no more: detach one first"
    )]
    TooMany(String),
    /// The caller, or all together, have created too many.
    #[error(
        "user {0} cannot create one more function: a user has at most {CREATED_PER_USER_MAX}, the operator and all users together {CREATED_MAX}; destroy one first"
    )]
    TooManyCreated(u32),
    /// It is attached already.
    #[error("function {name:?} is attached to service {service:?} already: detach it first")]
    Attached {
        /// The function's name.
        name: String,
        /// The service.
        service: String,
    },
    /// It is attached, so it cannot be destroyed.
    #[error("function {name:?} is attached to service {service:?}: detach it first")]
    StillAttached {
        /// The function's name.
        name: String,
        /// The service.
        service: String,
    },
    /// It is not attached, so it has no registers.
    #[error("function {0:?} is not attached, so it has no registers: attach it first")]
    NotAttached(String),
    /// Only the operator's paths are opened by the engine.
    #[error(
        "the engine opens no files for user {0}: send the content of the file with the request, as `serval fn` does"
    )]
    NoContent(u32),
    /// A service without functions.
    #[error("service {0:?} has no functions, so its messages meet none: attach one first")]
    NothingToTrace(String),
    /// A trace shows what all functions decide.
    #[error(
        "service {0:?} has functions of others, which a trace would show: ask the operator for it"
    )]
    TraceOfOthers(String),
    /// A trace of no message, or of too many.
    #[error("a trace has 1 to {TRACED_MAX} messages, not {0}")]
    TraceCount(usize),
    /// No trace runs.
    #[error("no trace of service {0:?} runs: begin one first")]
    NoTrace(String),
    /// A ring that cannot be made.
    #[error("the ring of function {0:?} cannot be made: {1}")]
    Ring(String, String),
    /// A function that ends with a connection needs one.
    #[error("the function cannot end with a connection: there is none")]
    NoConnection,
    /// The function cannot be used.
    #[error(transparent)]
    Library(#[from] LibraryError),
    /// The file of a module, or of a parameter, cannot be read.
    #[error("the file {file} cannot be read: {why}")]
    File {
        /// The file.
        file: PathBuf,
        /// Why.
        why: String,
    },
    /// The module of the directory of functions cannot be used.
    #[error(transparent)]
    Directory(#[from] DirectoryError),
    /// There is no such setting.
    #[error("the function {function:?} has no setting {register:?}: it has {settings}")]
    NoSetting {
        /// The function's name.
        function: String,
        /// The setting.
        register: String,
        /// Those that there are.
        settings: String,
    },
    /// A worker did not do the command.
    #[error("function {0:?}: {1}")]
    Command(String, CommandError),
    /// A worker does not come back from a kernel.
    #[error(transparent)]
    Stuck(#[from] Stuck),
}
