//! Control of a running worker: services that are installed and removed, accelerator generations, pauses.

mod apply;
pub(crate) mod drain;
pub(crate) mod generation;
pub(crate) mod install;
pub(crate) mod message;
pub(crate) mod pause;
pub(crate) mod service_install;
