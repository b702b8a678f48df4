//! A function as configurations and requests describe it, and the limits of that.

mod pin;

use std::borrow::Cow;
use std::fmt;

pub use pin::Pin;

/// Functions of one service, at most.
pub const FUNCTIONS_MAX: usize = 16;
/// Longest name of a function in a chain, in bytes.
pub const NAME_BYTES_MAX: usize = 64;
/// Longest module, in bytes.
pub const MODULE_BYTES_MAX: u64 = 8 << 20;

/// Deadline of a call by default and at most, in microseconds. A worker that shares its core with others is often interrupted for
/// several milliseconds.
pub const DEADLINE_US: u64 = 50_000;
/// See [`DEADLINE_US`].
pub const DEADLINE_US_MAX: u64 = 1_000_000;
/// Memory of an instance of a module by default and at most, in MiB.
pub const MEMORY_MIB: u32 = 4;
/// Default of `dictionary_kib`.
pub const DICTIONARY_KIB: u32 = 64;
/// See [`MEMORY_MIB`].
pub const MEMORY_MIB_MAX: u32 = 1024;
/// The directory of functions, by default.
pub const DIRECTORY: &str = "/var/lib/serval/functions";
/// The end of the name of a module's file.
pub const MODULE_SUFFIX: &str = ".wasm";

/// The value of a parameter.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Param {
    /// The value of a setting.
    Integer(u64),
    /// A text, or the path of a file.
    Text(String),
}

impl From<u64> for Param {
    fn from(value: u64) -> Self {
        Self::Integer(value)
    }
}

impl From<&str> for Param {
    fn from(text: &str) -> Self {
        Self::Text(text.to_owned())
    }
}

impl fmt::Display for Param {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Integer(value) => write!(f, "{value}"),
            Self::Text(text) => write!(f, "{text:?}"),
        }
    }
}

impl Param {
    /// The value as a text: digits without quotes are one as well.
    pub fn text(&self) -> Cow<'_, str> {
        match self {
            Self::Integer(value) => value.to_string().into(),
            Self::Text(text) => text.into(),
        }
    }
}

/// What becomes of messages about which a failed function does not decide.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OnFailure {
    /// They pass.
    Open,
    /// They are dropped as `function_failed`.
    Closed,
}

/// A function as a configuration describes it: `[[service.function]]`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Spec {
    /// Its name in the chain of its service.
    pub name: String,
    /// A built-in function, the path of a WebAssembly module, which ends in `.wasm`, or a module of the directory of functions ([`Pin`]).
    pub function: String,
    /// Values of its parameters by name; the others have their defaults.
    pub params: Vec<(String, Param)>,
    /// What becomes of its messages while it does not work.
    pub on_failure: OnFailure,
    /// How long a call for a batch may take, in microseconds.
    pub deadline_us: u64,
    /// Memory of an instance of a module, in MiB.
    pub memory_mib: u32,
    /// The dictionary that it shares with the functions of its owner that name the same one.
    pub dictionary: Option<String>,
    /// The size of that, in KiB.
    pub dictionary_kib: u32,
}

/// Instances of a module that a worker may have: the one that works, and two in reserve.
pub const INSTANCES: usize = 3;

impl Spec {
    /// A function with every optional field at its default.
    pub fn new(name: &str, function: &str) -> Self {
        Self {
            name: name.to_owned(),
            function: function.to_owned(),
            params: Vec::new(),
            on_failure: OnFailure::Closed,
            deadline_us: DEADLINE_US,
            memory_mib: MEMORY_MIB,
            dictionary: None,
            dictionary_kib: DICTIONARY_KIB,
        }
    }

    /// Whether it is a module.
    pub fn is_module(&self) -> bool {
        self.function.ends_with(MODULE_SUFFIX) || self.pin().is_some()
    }

    /// The value of a setting of a built-in function, or its default.
    pub fn setting(&self, name: &str, default: u64) -> u64 {
        let given = self.params.iter().rev().find(|(of, _)| of == name);
        match given {
            Some((_, Param::Integer(value))) => *value,
            _ => default,
        }
    }

    /// Its name in the directory of functions, if it is there.
    pub fn pin(&self) -> Option<Pin> {
        self.function.parse().ok()
    }
}

/// Whether a function can have this name: 1 to 64 letters, digits, `_` and `-`. The first one is no `-`: commands would take the name for an option.
pub fn is_name(name: &str) -> bool {
    let letter = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-');
    (1..=NAME_BYTES_MAX).contains(&name.len()) && name.chars().all(letter) && !name.starts_with('-')
}

/// How long messages are.
#[derive(Clone, Copy, Debug)]
pub struct Sizes {
    /// Longest request, in bytes.
    pub message_bytes: usize,
    /// Longest reply, in bytes.
    pub reply_bytes: usize,
}
