//! One transfer at work: its steps, its descriptors, and where its system calls are made.

pub mod apart;
pub(crate) mod check;
pub(crate) mod descriptors;
pub mod flow;
pub(crate) mod new_file;
pub mod plan;
pub(crate) mod progress;
pub(crate) mod reaper;
pub(crate) mod small;
pub(crate) mod stall;
pub(crate) mod user_process;
