//! What changes a worker while it runs: services that come and go, accelerator generations, pauses.

mod apply;
pub(crate) mod drain;
pub(crate) mod generation;
pub(crate) mod install;
pub(crate) mod mailbox;
pub(crate) mod message;
pub(crate) mod pause;
pub(crate) mod service_install;
pub(crate) mod vote;
