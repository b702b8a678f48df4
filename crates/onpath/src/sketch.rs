//! Sketches of streams: small summaries whose size does not depend on how many items there were, and which can be merged.

pub mod count_min;
pub mod hash;
pub mod hyperloglog;
pub mod stream_items;
mod vector;

pub use vector::Instructions;
