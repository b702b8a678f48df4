//! Tenants: who owns services, which part of the workers they get, and what they may use.

use std::path::PathBuf;

use super::Topology;

/// The name of the tenant that owns what names no other.
pub const DEFAULT_TENANT: &str = "default";
/// Largest [`Tenant::weight`].
pub const WEIGHT_MAX: u32 = 1000;
/// Most tenants of an engine: metrics have a label for each.
pub const TENANTS_MAX: usize = 4096;

/// Namespaces, besides that of users, that a tenant's processes can have of their own.
pub const NAMESPACES: [&str; 3] = ["ipc", "mount", "pid"];

/// What of a tenant is apart from the engine's surroundings. It cannot change while the tenant owns services.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Confinement {
    /// The network namespace in which its ports are opened; `None`: the engine's.
    pub netns: Option<PathBuf>,
    /// The user of its isolated processes, by number; `None`: the engine's.
    pub user: Option<u32>,
    /// Namespaces that its isolated processes have of their own, of [`NAMESPACES`].
    pub namespaces: Vec<&'static str>,
}

/// `[[tenant]]`. A limit of 0 is none.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tenant {
    /// Name that services use.
    pub name: String,
    /// Its part of a worker on which others wait too, relative to theirs; in [1, [`WEIGHT_MAX`]].
    pub weight: u32,
    /// Messages a second, over all its services and all workers.
    pub messages_per_s: u64,
    /// Payload bytes of requests a second.
    pub bytes_per_s: u64,
    /// How long it may have sent nothing and then send that much at once, in milliseconds.
    pub burst_ms: u64,
    /// Messages in flight.
    pub outstanding: u64,
    /// Open TCP connections and clients over shared memory.
    pub connections: u64,
    /// Mqueues of its services.
    pub mqueues: u64,
    /// Memory of the regions of its services, of their functions and of rings, in MiB.
    pub memory_mib: u64,
    /// Users, by number, whose processes may make requests about its services and functions.
    pub users: Vec<u32>,
    /// What is apart from the engine's surroundings.
    pub confinement: Confinement,
}

impl Topology {
    /// Whether a tenant owns services.
    pub fn has_services_of(&self, tenant: &str) -> bool {
        self.services.iter().any(|service| service.tenant == tenant)
    }

    /// See [`Confinement`]; of a tenant without settings: nothing.
    pub fn confinement_of(&self, tenant: &str) -> Confinement {
        let found = self.tenants.iter().find(|of| of.name == tenant);
        found.map_or_else(Confinement::default, |of| of.confinement.clone())
    }

    /// Memory of the regions of a tenant's services, in bytes.
    pub fn region_bytes_of(&self, tenant: &str) -> u64 {
        let own = self.services.iter().filter(|service| service.tenant == tenant);
        own.map(|service| self.region_bytes(service)).sum()
    }
}

impl Tenant {
    /// A tenant with every optional field at its default.
    pub fn new(name: &str) -> Self {
        Self {
            name: name.to_owned(),
            weight: 1,
            messages_per_s: 0,
            bytes_per_s: 0,
            burst_ms: 100,
            outstanding: 0,
            connections: 0,
            mqueues: 0,
            memory_mib: 0,
            users: Vec::new(),
            confinement: Confinement::default(),
        }
    }
}
