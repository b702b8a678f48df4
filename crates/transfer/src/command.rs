//! What a caller asks for: source, stages and sink of a transfer, and what it gets back.

pub mod accelerator;
pub(crate) mod error;
pub mod pipeline;
pub(crate) mod report;
pub(crate) mod stage;
