//! The accelerators of services: their regions and kernels, threads of this process, and runtimes in processes of their own.

mod attach;
pub(crate) mod heartbeat;
pub(crate) mod kernel_files;
mod region;
pub(crate) mod supervisor;

pub(crate) use attach::OpenRegion;
