//! What functions and rings of a tenant may use, and what of its users ends with their right to it.

use builtins::{Code, memory_on};
use engine::topology::{Service, Tenant};
use onpath::Spec;

use super::objects::{Functions, Object, Origin, Refused};
use super::{AttachedFunction, FunctionError, Target};
use crate::base::caller::{Caller, is_user_of};
use crate::base::engine::Engine;

/// The user at whose request a function exists, unless it is the operator.
pub(super) fn user_of(object: &Object) -> Option<u32> {
    operator_or_user(object.origin)
}

fn operator_or_user(origin: Origin) -> Option<u32> {
    origin.user().filter(|user| !Caller { user: *user, connection: None }.is_operator())
}

impl Functions {
    /// The function as it will be: the deadline of a user's one has a limit.
    pub(super) fn with_deadline(&self, engine: &Engine, spec: &Spec, origin: Origin) -> Spec {
        let most = engine.topology.engine.user_deadline_us;
        let deadline_us = match operator_or_user(origin) {
            None => spec.deadline_us,
            Some(_) => spec.deadline_us.min(most),
        };
        Spec { deadline_us, ..spec.clone() }
    }

    /// The part of a worker's time, in percent, that a user's functions may take on a chain.
    pub(super) fn share_of(&self, engine: &Engine, object: &Object) -> Option<u32> {
        let share = engine.topology.engine.user_function_percent;
        user_of(object).and((share < 100).then_some(share))
    }

    /// Memory of a tenant: regions of its services, what functions on their paths may use on all workers, their code, their dictionaries, rings of those functions, and
    /// those of its users' functions that are attached to nothing. Without the function `except`.
    fn memory_of(&self, engine: &Engine, tenant: &Tenant, except: u64) -> u64 {
        let ring = |object: &Object| object.ring.as_ref().map_or(0, |ring| ring.bytes());
        let own = engine.topology.services.iter().zip(&self.chains);
        let attached = own.filter(|(service, _)| service.tenant == tenant.name);
        let attached = attached.flat_map(|(_, chain)| chain);
        let attached = attached.filter(|function| function.object.id != except);
        let workers = engine.fabric.workers();
        let used = attached.map(|AttachedFunction { object, code, .. }| {
            memory_on(&object.in_force(), workers) + code.code_bytes() + ring(object)
        });
        let of_users = self.detached.iter().filter(|object| {
            object.id != except && user_of(object).is_some_and(|user| tenant.users.contains(&user))
        });
        let of_users: u64 = of_users.map(ring).sum();
        engine.topology.region_bytes_of(&tenant.name) + used.sum::<u64>() + of_users
    }

    /// What is left for a function of this number with a ring of the same user, in bytes, among the tenants that have it as a user.
    pub(super) fn ring_bytes_left(&self, engine: &Engine, id: u64, object: &Object) -> u64 {
        let user = user_of(object);
        let limited = engine.topology.tenants.iter().filter(|tenant| {
            tenant.memory_mib > 0 && user.is_some_and(|user| tenant.users.contains(&user))
        });
        let left = limited.map(|tenant| {
            (tenant.memory_mib << 20).saturating_sub(self.memory_of(engine, tenant, id))
        });
        left.min().unwrap_or(u64::MAX)
    }

    /// Whether the tenant of a service may have this function, which may be there already, with these parameters and this code besides what it has.
    pub(super) fn check_memory(
        &self,
        engine: &Engine,
        service: &Service,
        object: &Object,
        spec: &Spec,
        code: &Code,
    ) -> Result<(), FunctionError> {
        let Some(tenant) = engine.tenant(&service.tenant).filter(|of| of.memory_mib > 0) else {
            return Ok(());
        };
        let ring = object.ring.as_ref().map_or(0, |ring| ring.bytes());
        let more = memory_on(spec, engine.fabric.workers()) + code.code_bytes() + ring;
        let mib = (self.memory_of(engine, tenant, object.id) + more).div_ceil(1 << 20);
        if more == 0 || mib <= tenant.memory_mib {
            return Ok(());
        }
        self.counters.count_refused(Refused::Limit);
        let (tenant, most) = (tenant.name.clone(), tenant.memory_mib);
        Err(FunctionError::TenantMemory { tenant, most, mib })
    }

    /// Detaches functions of users who may no longer attach any there, and destroys those, with their rings, of users who may attach them nowhere.
    /// Returns how many have ended.
    pub(crate) fn end_without_right(&mut self, engine: &Engine) -> usize {
        let tenants = &engine.topology.tenants;
        let services = engine.topology.services.iter().zip(&self.chains);
        let without_right: Vec<(u64, u32, String, String)> = services
            .flat_map(|(service, chain)| chain.iter().map(move |f| (service, &f.object)))
            .filter_map(|(service, object)| {
                let user = user_of(object).filter(|user| !is_user_of(*user, service, tenants))?;
                Some((object.id, user, service.name.clone(), object.spec.name.clone()))
            })
            .collect();
        let mut ended = 0;
        for (id, user, service, name) in without_right {
            match self.detach(engine, Caller::engine(), &Target::Id(id)) {
                Ok(_) => {
                    ended += 1;
                    tracing::warn!(
                        user,
                        service,
                        name,
                        "audit: a function was detached: its user may attach none there"
                    );
                }
                Err(error) => {
                    tracing::error!(
                        user,
                        service,
                        name,
                        "audit: a function cannot be detached: {error}"
                    );
                }
            }
        }
        let topology = engine.topology.clone();
        let may = |user: u32| {
            topology.services.iter().any(|service| is_user_of(user, service, &topology.tenants))
        };
        self.detached.retain(|object| {
            let Some(user) = user_of(object) else { return true };
            let stays = may(user);
            if !stays {
                ended += 1;
                let name = &object.spec.name;
                tracing::warn!(
                    user,
                    name,
                    "audit: a function and its ring were destroyed: its user may attach none"
                );
            }
            stays
        });
        ended
    }
}
