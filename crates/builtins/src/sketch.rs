//! Sketches of streams: small summaries whose size does not depend on how many items there were, and which can be merged.

pub mod count_min;
pub mod hash;
pub mod hyperloglog;
pub mod stream_items;
mod vector;
mod words;

pub use vector::Instructions;

/// Why a state cannot be merged.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("it is no state of a sketch with the same settings")]
pub struct OtherState;
