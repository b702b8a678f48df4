//! Changes a running server from one topology to another, without losing requests in flight. The start of a server is
//! the change from an empty topology.
//!
//! | step | where |
//! |---|---|
//! | make a [`Plan`]: which services are added, changed, kept, removed | `change/plan.rs` |
//! | create regions, open kernels, bind ports, start accelerator threads | `change/prepare.rs` |
//! | install the new services on every worker; start runtimes of other processes and wait for them | `change/install.rs` |
//! | switch all workers | `change/switch.rs` |
//! | drain the services that leave, end their runtimes, release their slots | `change/departure.rs` |
//!
//! A step before the switch may fail without an effect on running services; then the change is undone. Nothing fails
//! after the switch. Services that leave finish their accepted requests for up to `drain_ms`.
//!
//! Two runtimes cannot run at the same time if they would have to share a device such as a GPU in time slices, or if
//! another program starts them. In these cases the next runtime starts when the last one has ended. Meanwhile the
//! service is paused (`engine/src/control/pause.rs`) if the engine starts the runtime; otherwise requests are dropped
//! as `reconfiguring`.
//!
//! Workers get the steps through their mailboxes (`engine/src/base/mailbox.rs`). A worker that is inside a long
//! kernel takes them later. What it may still use is not reused, and is reported as left behind until a change after
//! the kernel has returned.

mod departure;
mod install;
pub(crate) mod local_addresses;
pub(crate) mod plan;
mod prepare;
mod report;
mod switch;
#[cfg(test)]
mod tests;

use std::time::Duration;

use engine::topology::Topology;

use crate::base::error::ServerError;
use crate::change::plan::{Plan, Refusal, ServiceAction};
use crate::runtimes::kernel_files::KernelFiles;
use crate::runtimes::supervisor::{AttachListeners, StartFailure};
use crate::server::Server;
use crate::shm_acceptor::NewPorts;
pub(crate) use departure::LeakedSlot;
use departure::{DepartingService, DepartureOutcome};
pub(crate) use prepare::ServiceSlot;
pub(crate) use report::entries;
use report::report;
pub use report::{ChangeReport, EntryChange, ServiceChange};

/// How long a change waits for workers.
pub(crate) struct Timeouts {
    /// Until a worker has taken a step: it may be inside a long kernel.
    pub(crate) step: Duration,
    /// Until a service has ended after its drain time.
    expiry: Duration,
}

impl Default for Timeouts {
    fn default() -> Self {
        Self { step: Duration::from_secs(30), expiry: Duration::from_secs(5) }
    }
}

/// The occasion of a change.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Occasion {
    /// The first change. There are no running services: if it fails, the server ends and nothing is undone.
    Start,
    /// A change of a running engine.
    Reload,
}

/// Why a change failed. The message is complete.
#[derive(Debug, thiserror::Error)]
pub enum ChangeError {
    /// Some settings cannot change while the engine runs.
    #[error("{}", list(.0))]
    Refused(Vec<Refusal>),
    /// A resource of a new service is not available.
    #[error(transparent)]
    Start(#[from] ServerError),
    /// The slots do not suffice for this many services.
    #[error(
        "{wanted} services at a time are more than the {most} that this engine has room for: restart \
         to apply it"
    )]
    TooMany {
        /// Number of services after the change, including those that leave.
        wanted: usize,
        /// Maximum number of services.
        most: usize,
    },
    /// The acceptor of shared-memory clients did not pause in time.
    #[error("timed out pausing shared-memory ports: a region is still being created; reload again")]
    ShmPortsBusy,
    /// A worker does not return from a kernel.
    #[error("a worker did not answer within {} s: it is inside a kernel", .0.as_secs_f32())]
    Stuck(Duration),
}

fn list(refusals: &[Refusal]) -> String {
    refusals.iter().map(Refusal::to_string).collect::<Vec<_>>().join("; ")
}

impl Server {
    /// Changes to another topology, completely or not at all. Returns when the services that leave have been removed;
    /// if `give_up` returns true, because the engine is about to end, it stops waiting.
    pub fn change(
        &mut self,
        wanted: Topology,
        give_up: &dyn Fn() -> bool,
    ) -> Result<ChangeReport, ChangeError> {
        wanted.check().map_err(ServerError::from)?;
        self.reclaim_leaked(give_up);
        let files = self.open_files(&wanted, &mut || give_up())?;
        let rebuilt = self.rebuilt(&wanted, &files);
        let names: Vec<&str> = rebuilt.iter().map(|(name, _)| name.as_str()).collect();
        let mut plan = Plan::new(&self.topology, &wanted, &names).map_err(ChangeError::Refused)?;
        let chains = self.next_chains(&wanted, &plan)?;
        if !chains.is_empty() {
            plan.settings.push("service.function");
        }
        let before = |name: &str| self.topology.services.iter().find(|s| s.name == name);
        let other_users = wanted.services.iter().any(|service| {
            before(&service.name).is_some_and(|b| b.function_users != service.function_users)
        });
        if other_users {
            plan.settings.push("service.function_users");
        }
        if plan.is_empty() {
            return Ok(report(plan, &[], &[]));
        }
        for (service, file) in &rebuilt {
            tracing::info!("kernel {} changed: service {service} restarts with it", file.display());
        }
        let comes = |action: &ServiceAction| {
            matches!(action, ServiceAction::Added | ServiceAction::Changed { .. })
        };
        let new = plan.services.iter().filter(|(_, action)| comes(action)).count();
        let (running, most) =
            (self.service_slots.len() + self.leaked.len(), self.fabric.services_max());
        if running + new > most {
            return Err(ChangeError::TooMany { wanted: running + new, most });
        }
        let departing =
            self.carry_out(wanted, &plan, files, Occasion::Reload, &mut || give_up())?;
        self.arrange_all(chains);
        let outcomes = self.remove_all(departing, give_up);
        self.publish_metrics();
        // They start in parallel.
        let mut outcomes: Vec<_> = outcomes.into_iter().map(|o| o.wait(give_up)).collect();
        // Other services may restart in one process with them, or without those that left.
        let drain = self.drain_time();
        let regrouping = self.supervisor.as_ref().map(|runtimes| runtimes.regrouping(drain));
        let moved = regrouping.map_or(Ok(()), |regrouping| regrouping.wait(&mut || give_up()));
        let failed = moved.err().map_or(Vec::new(), StartFailure::reasons);
        for (name, why) in failed {
            match outcomes.iter_mut().find(|outcome| outcome.name == name) {
                Some(outcome) => drop(outcome.not_started.get_or_insert(why)),
                None => outcomes.push(DepartureOutcome {
                    not_started: Some(why),
                    ..DepartureOutcome::of(name)
                }),
            }
        }
        Ok(report(plan, &outcomes, &rebuilt))
    }

    /// Changes from the empty topology to the first one.
    pub(crate) fn first_change(
        &mut self,
        wanted: Topology,
        cancelled: &mut dyn FnMut() -> bool,
    ) -> Result<(), ServerError> {
        let files = self.open_files(&wanted, cancelled)?;
        let plan = Plan::new(&self.topology, &wanted, &[]).map_err(ChangeError::Refused);
        let changed =
            plan.and_then(|plan| self.carry_out(wanted, &plan, files, Occasion::Start, cancelled));
        match changed {
            Ok(_) => Ok(()),
            Err(ChangeError::Start(error)) => Err(error),
            Err(ChangeError::ShmPortsBusy) => Err(ServerError::MemoryPortsLate),
            Err(error) => unreachable!("without running services this cannot fail: {error}"),
        }
    }

    /// Every step up to the switch, and the switch; returns the services that leave. After an error nothing has
    /// changed.
    fn carry_out(
        &mut self,
        wanted: Topology,
        plan: &Plan,
        files: Vec<KernelFiles>,
        occasion: Occasion,
        give_up: &mut dyn FnMut() -> bool,
    ) -> Result<Vec<DepartingService>, ChangeError> {
        let listeners =
            AttachListeners::open(&wanted, Some(&self.topology)).map_err(ServerError::from)?;
        let ports = NewPorts::open(&wanted, Some(&self.topology)).map_err(ServerError::from)?;
        let mut prepared = self.prepare_all(&wanted, plan, files)?;
        let ready = self
            .install_all(&wanted, &mut prepared, occasion, give_up)
            .and_then(|()| self.start_runtimes(&listeners, &mut prepared, occasion, give_up))
            .and_then(|()| self.pause_shm_ports(&wanted, plan, &ports));
        let paused = match ready {
            Ok(paused) => paused,
            Err(error) => {
                if occasion == Occasion::Reload {
                    self.undo_installed(&prepared);
                }
                return Err(error);
            }
        };
        let limits = wanted.limits.clone();
        self.fabric.tenants().set(&wanted.tenants, |name| wanted.has_services_of(name));
        let departing = self.switch(wanted, plan, prepared, listeners, paused.as_ref());
        if let Some(paused) = paused {
            paused.resume(self.memory_ports(), ports, limits);
        }
        Ok(departing)
    }
}
