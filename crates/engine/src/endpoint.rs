//! Endpoints: where messages come from and where they go to. One file each, which owns its state.

pub(crate) mod backend;
pub(crate) mod peer;
pub(crate) mod ports;
pub(crate) mod shm;
pub(crate) mod sources;
pub(crate) mod tcp;
mod udp;
