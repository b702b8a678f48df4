//! Functions that are part of the program.

mod passthrough;
mod threshold;

pub use passthrough::Passthrough;
pub use threshold::Threshold;
