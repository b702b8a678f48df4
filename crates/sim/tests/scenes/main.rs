//! Scenes in the simulator: one program, since each one would compile the engine again.

mod backend_chain;
mod bundles;
mod chain;
mod change;
mod checks;
mod drops;
mod fairness;
mod links;
mod owners;
mod promises;
mod proxy;
mod relay;
#[path = "../scene/mod.rs"]
mod scene;
mod socket_transfers;
mod sockets;
mod stages;
mod tenant_limits;
mod tenants;
mod transfers;
