//! Tenants of a running server: which there are, and how their weights and limits change. A reload gives them what the file says.

use std::sync::Arc;

use builtins::memory_on;
use engine::metrics::TenantMetrics;
use engine::tenants::TenantUse;
use engine::topology::{DEFAULT_TENANT, Service, TENANTS_MAX, Tenant, Topology, TopologyError};

use crate::base::caller::Caller;
use crate::base::engine::Engine;

/// Why a request about tenants failed; one sentence.
#[derive(Debug, thiserror::Error)]
pub enum TenantError {
    /// The caller is not the operator.
    #[error("user {0} may not change tenants: only the engine's user and root may")]
    NotOperator(u32),
    /// There is one with this name.
    #[error("there is a tenant {0:?} already: change it with `serval tenant set`")]
    Taken(String),
    /// There is none with this name.
    #[error("there is no tenant {0:?}: `serval tenant list` shows those that there are")]
    Unknown(String),
    /// It owns services.
    #[error("tenant {name:?} owns {services}: remove them first, or give them another tenant")]
    Owns {
        /// The tenant.
        name: String,
        /// Its services.
        services: String,
    },
    /// There are too many.
    #[error("there are {TENANTS_MAX} tenants, and no more can be added: remove one first")]
    TooMany,
    /// The default tenant is the operator's own.
    #[error(
        "tenant {DEFAULT_TENANT:?} is the operator's own: it has no users and cannot be removed"
    )]
    Default,
    /// A quota is less than what its services have.
    #[error(transparent)]
    Invalid(#[from] TopologyError),
}

/// What [`list`] shows of a tenant.
#[derive(Clone, Debug)]
pub struct TenantView {
    /// Its number, which no other tenant ever gets.
    pub id: u64,
    /// Its weight and limits.
    pub tenant: Tenant,
    /// Its services.
    pub services: Vec<String>,
    /// Mqueues of its services.
    pub mqueues: u64,
    /// What it has used.
    pub used: TenantUse,
}

/// The tenants that have settings or services, and that the caller may see: a user sees its own.
pub fn list(engine: &Engine, caller: Caller) -> Vec<TenantView> {
    let services = || engine.topology.services.iter();
    let mut known = engine.topology.tenants.clone();
    for service in services() {
        if known.iter().all(|tenant| tenant.name != service.tenant) {
            known.push(Tenant::new(&service.tenant));
        }
    }
    known.retain(|tenant| caller.is_operator() || tenant.users.contains(&caller.user));
    let view = |tenant: Tenant| {
        let state = engine.fabric.tenants().named(&tenant.name);
        let own = || services().filter(|service| service.tenant == tenant.name);
        TenantView {
            id: state.id,
            services: own().map(|service| service.name.clone()).collect(),
            mqueues: own().map(Service::mqueues_total).sum(),
            used: state.used(),
            tenant,
        }
    };
    known.into_iter().map(view).collect()
}

/// The tenants of the metrics page: none while there is only the default one, without settings.
pub(crate) fn metrics(engine: &Engine) -> Arc<[TenantMetrics]> {
    let tenants = list(engine, Caller::engine());
    let plain = tenants.iter().all(|of| of.tenant == Tenant::new(DEFAULT_TENANT));
    let metrics = |of: TenantView| {
        let own = of.services.iter();
        let number = own.filter_map(|name| {
            engine.topology.services.iter().position(|service| service.name == *name)
        });
        let services = number.map(|number| engine.slots[number].metrics.clone());
        TenantMetrics {
            state: engine.fabric.tenants().named(&of.tenant.name),
            services: services.collect(),
        }
    };
    if plain { Arc::default() } else { tenants.into_iter().map(metrics).collect() }
}

/// Adds a tenant, or changes one.
pub(crate) fn put(
    engine: &mut Engine,
    caller: Caller,
    tenant: Tenant,
    is_new: bool,
) -> Result<(), TenantError> {
    if !caller.is_operator() {
        return Err(TenantError::NotOperator(caller.user));
    }
    if tenant.name == DEFAULT_TENANT && !tenant.users.is_empty() {
        return Err(TenantError::Default);
    }
    let mut tenants = engine.topology.tenants.clone();
    match tenants.iter().position(|of| of.name == tenant.name) {
        Some(_) if is_new => return Err(TenantError::Taken(tenant.name)),
        Some(at) => tenants[at] = tenant,
        None if !is_new && !engine.topology.has_services_of(&tenant.name) => {
            return Err(TenantError::Unknown(tenant.name));
        }
        None if tenants.len() >= TENANTS_MAX => return Err(TenantError::TooMany),
        None => tenants.push(tenant),
    }
    set(engine, tenants)
}

/// Removes a tenant without services.
pub(crate) fn remove(engine: &mut Engine, caller: Caller, name: &str) -> Result<(), TenantError> {
    if !caller.is_operator() {
        return Err(TenantError::NotOperator(caller.user));
    }
    if name == DEFAULT_TENANT {
        return Err(TenantError::Default);
    }
    let mut tenants = engine.topology.tenants.clone();
    let Some(at) = tenants.iter().position(|tenant| tenant.name == name) else {
        return Err(TenantError::Unknown(name.to_owned()));
    };
    if engine.topology.has_services_of(name) {
        let own = engine.topology.services.iter().filter(|service| service.tenant == name);
        let services = own.map(|service| service.name.as_str()).collect::<Vec<_>>().join(", ");
        return Err(TenantError::Owns { name: name.to_owned(), services });
    }
    tenants.remove(at);
    set(engine, tenants)
}

fn set(engine: &mut Engine, tenants: Vec<Tenant>) -> Result<(), TenantError> {
    let wanted = Topology { tenants, ..(*engine.topology).clone() };
    check(&wanted)?;
    engine.fabric.tenants().set(&wanted.tenants, |name| wanted.has_services_of(name));
    engine.topology = Arc::new(wanted);
    Ok(())
}

/// Whether a topology can run: what the engine says, and the memory of tenants.
pub(crate) fn check(topology: &Topology) -> Result<(), TopologyError> {
    topology.check()?;
    memory_problems(topology).into_iter().next().map_or(Ok(()), Err)
}

/// Tenants whose regions and functions need more memory than they may use.
pub(crate) fn memory_problems(topology: &Topology) -> Vec<TopologyError> {
    let problem = |(index, tenant): (usize, &Tenant)| {
        let most = tenant.memory_mib;
        let regions = topology.region_bytes_of(&tenant.name).div_ceil(1 << 20);
        let functions = function_bytes_of(topology, &tenant.name).div_ceil(1 << 20);
        if most == 0 || regions + functions <= most {
            return None;
        }
        let (needed, fewer) = match functions {
            0 => (format!("regions of its services need {regions} MiB"), ""),
            _ => (
                format!("regions of its services need {regions} MiB and functions {functions} MiB"),
                "give functions less memory, ",
            ),
        };
        Some(TopologyError {
            place: format!("tenant {:?}", tenant.name),
            path: ("tenant", index, None),
            field: "memory_mib",
            message: format!(
                "is {most}, but {needed}: {fewer}use fewer mqueues or slots, or raise it"
            ),
        })
    };
    topology.tenants.iter().enumerate().filter_map(problem).collect()
}

/// What the functions of the configuration on the paths of a tenant's services may use, in bytes.
fn function_bytes_of(topology: &Topology, tenant: &str) -> u64 {
    let own = topology.services.iter().filter(|service| service.tenant == tenant);
    let specs = own.flat_map(|service| {
        let of_backends = service.backends.iter().flat_map(|backend| &backend.functions);
        service.functions.iter().chain(of_backends)
    });
    specs.map(|spec| memory_on(spec, topology.engine.workers)).sum()
}
