//! One transfer at work: its steps, its descriptors, and where its system calls are made.

pub mod apart;
pub mod flow;
pub(crate) mod held;
pub(crate) mod new_file;
pub(crate) mod plan;
pub(crate) mod reaper;
pub(crate) mod small;
pub(crate) mod users;
