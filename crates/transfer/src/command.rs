//! What a caller asks for: source, stages and sink of a transfer, and what it gets back.

pub mod accelerator;
pub mod compression;
pub mod device;
pub(crate) mod error;
pub mod kernel;
pub(crate) mod key;
pub mod limits;
pub mod pipeline;
pub(crate) mod report;
pub(crate) mod stage;
