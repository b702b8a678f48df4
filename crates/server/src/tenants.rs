//! Tenants of a running server: which there are, and how their weights and limits change. A reload gives them what the file says.

use std::sync::Arc;

use engine::metrics::TenantMetrics;
use engine::tenants::TenantUse;
use engine::topology::{DEFAULT_TENANT, Service, TENANTS_MAX, Tenant, Topology, TopologyError};

use crate::functions::Caller;
use crate::server::Server;

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

/// What [`Server::tenants`] shows of a tenant.
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

/// Whether a user may attach functions to a service besides the operator.
pub(crate) fn is_user_of(user: u32, service: &Service, tenants: &[Tenant]) -> bool {
    let owner = tenants.iter().find(|tenant| tenant.name == service.tenant);
    service.function_users.contains(&user)
        || owner.is_some_and(|tenant| tenant.users.contains(&user))
}

impl Server {
    /// The tenants that have settings or services, and that the caller may see: a user sees its own.
    pub fn tenants(&self, caller: Caller) -> Vec<TenantView> {
        let services = || self.topology.services.iter();
        let mut known = self.topology.tenants.clone();
        for service in services() {
            if known.iter().all(|tenant| tenant.name != service.tenant) {
                known.push(Tenant::new(&service.tenant));
            }
        }
        known.retain(|tenant| caller.is_operator() || tenant.users.contains(&caller.user));
        let view = |tenant: Tenant| {
            let state = self.fabric.tenants().named(&tenant.name);
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
    pub(crate) fn tenant_metrics(&self) -> Arc<[TenantMetrics]> {
        let tenants = self.tenants(Caller::engine());
        let plain = tenants.iter().all(|of| of.tenant == Tenant::new(DEFAULT_TENANT));
        let metrics = |of: TenantView| {
            let own = of.services.iter();
            let number = own.filter_map(|name| {
                self.topology.services.iter().position(|service| service.name == *name)
            });
            let services = number.map(|number| self.service_slots[number].metrics.clone());
            TenantMetrics {
                state: self.fabric.tenants().named(&of.tenant.name),
                services: services.collect(),
            }
        };
        if plain { Arc::default() } else { tenants.into_iter().map(metrics).collect() }
    }

    /// Adds a tenant, or changes one. Functions of users that it has no longer end; returns how many.
    pub fn put_tenant(
        &mut self,
        caller: Caller,
        tenant: Tenant,
        is_new: bool,
    ) -> Result<usize, TenantError> {
        if !caller.is_operator() {
            return Err(TenantError::NotOperator(caller.user));
        }
        if tenant.name == DEFAULT_TENANT && !tenant.users.is_empty() {
            return Err(TenantError::Default);
        }
        let mut tenants = self.topology.tenants.clone();
        match tenants.iter().position(|of| of.name == tenant.name) {
            Some(_) if is_new => return Err(TenantError::Taken(tenant.name)),
            Some(at) => tenants[at] = tenant,
            None if !is_new && !self.topology.has_services_of(&tenant.name) => {
                return Err(TenantError::Unknown(tenant.name));
            }
            None if tenants.len() >= TENANTS_MAX => return Err(TenantError::TooMany),
            None => tenants.push(tenant),
        }
        self.set_tenants(tenants)?;
        Ok(self.end_strangers())
    }

    /// Removes a tenant without services.
    pub fn remove_tenant(&mut self, caller: Caller, name: &str) -> Result<(), TenantError> {
        if !caller.is_operator() {
            return Err(TenantError::NotOperator(caller.user));
        }
        if name == DEFAULT_TENANT {
            return Err(TenantError::Default);
        }
        let mut tenants = self.topology.tenants.clone();
        let Some(at) = tenants.iter().position(|tenant| tenant.name == name) else {
            return Err(TenantError::Unknown(name.to_owned()));
        };
        if self.topology.has_services_of(name) {
            let own = self.topology.services.iter().filter(|service| service.tenant == name);
            let services = own.map(|service| service.name.as_str()).collect::<Vec<_>>().join(", ");
            return Err(TenantError::Owns { name: name.to_owned(), services });
        }
        tenants.remove(at);
        self.set_tenants(tenants)
    }

    /// The settings of a tenant.
    pub fn tenant(&self, name: &str) -> Option<&Tenant> {
        self.topology.tenants.iter().find(|tenant| tenant.name == name)
    }

    fn set_tenants(&mut self, tenants: Vec<Tenant>) -> Result<(), TenantError> {
        let wanted = Topology { tenants, ..(*self.topology).clone() };
        wanted.check()?;
        self.fabric.tenants().set(&wanted.tenants, |name| wanted.has_services_of(name));
        self.topology = Arc::new(wanted);
        self.publish_metrics();
        Ok(())
    }
}
