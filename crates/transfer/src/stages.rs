//! The stages of a transfer at work.

pub(crate) mod buffer;
pub(crate) mod chain;
pub mod compress;
pub mod kernel;
pub mod seal;
pub mod search;
