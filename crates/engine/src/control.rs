//! What changes a worker while it runs: services that come and go, accelerator generations, pauses.

pub(crate) mod drain;
pub(crate) mod generation;
pub(crate) mod install;
pub(crate) mod pause;
