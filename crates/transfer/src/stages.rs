//! The stages of a transfer at work.

pub mod buffer;
pub(crate) mod chain;
pub mod compress;
pub(crate) mod digest;
pub mod kernel;
pub mod seal;
pub mod search;

/// What a stage did with its input.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Ran {
    /// Bytes that it took from its input.
    pub taken: usize,
    /// Bytes that it made.
    pub made: usize,
    /// The last byte has come out.
    pub done: bool,
}
