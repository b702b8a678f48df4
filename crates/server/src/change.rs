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
mod entries;
pub(crate) mod install;
pub(crate) mod plan;
mod prepare;
mod report;
mod switch;
#[cfg(test)]
mod tests;

use std::sync::Arc;

use engine::topology::{Service, Topology};
use sys::tap::TapFile;

use self::departure::{DepartingService, DepartureOutcome};
use self::install::Occasion;
use self::plan::{Plan, Refusal, ServiceAction};
use self::prepare::Preparation;
use self::report::report;
pub use self::report::{ChangeReport, ServiceChange};
use crate::base::error::{ServerError, Stuck};
use crate::base::slots::KernelFiles;
use crate::functions::{FunctionError, NextChain};
use crate::runtimes::kernel_files;
use crate::runtimes::supervisor::{AttachListeners, StartFailure};
use crate::server::Server;
use crate::shm_acceptor::{MemoryPort, NewPorts, PausedAcceptor};
use crate::tenants;

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
    #[error(transparent)]
    Stuck(#[from] Stuck),
}

fn list(refusals: &[Refusal]) -> String {
    refusals.iter().map(Refusal::to_string).collect::<Vec<_>>().join("; ")
}

impl Server {
    /// Starts everything; see [`Server`].
    pub fn start(topology: Topology) -> Result<Self, ServerError> {
        Self::start_unless(topology, None, None, &mut || false)
    }

    /// The same, with an optional tap on every worker's network, and the engine that does transfers of kernels, if it exists already.
    /// Runtimes in other processes may take long to start: meanwhile `cancelled` is called many times a second; if it returns true, the
    /// start is given up.
    pub fn start_unless(
        topology: Topology,
        tap: Option<&TapFile>,
        transfers: Option<&Arc<transfer::Engine>>,
        cancelled: &mut dyn FnMut() -> bool,
    ) -> Result<Self, ServerError> {
        tenants::check(&topology)?;
        let mut server = Self::without_services(&topology, tap, transfers)?;
        server.first_change(topology, cancelled)?;
        Ok(server)
    }

    /// Changes to another topology, completely or not at all. Returns when the services that leave have been removed;
    /// if `give_up` returns true, because the engine is about to end, it stops waiting.
    pub fn change(
        &mut self,
        wanted: Topology,
        give_up: &dyn Fn() -> bool,
    ) -> Result<ChangeReport, ChangeError> {
        tenants::check(&wanted).map_err(ServerError::from)?;
        if departure::reclaim_leaked(&mut self.engine, &mut self.runtimes, give_up) {
            self.publish_metrics();
        }
        let files = kernel_files::open(&wanted, &mut || give_up())?;
        let rebuilt = kernel_files::rebuilt(&self.engine, &wanted, &files);
        let names: Vec<&str> = rebuilt.iter().map(|(name, _)| name.as_str()).collect();
        let running = &self.engine.topology;
        let mut plan = Plan::new(running, &wanted, &names).map_err(ChangeError::Refused)?;
        let chains = self.next_chains(&wanted, &plan)?;
        if !chains.is_empty() {
            plan.settings.push("service.function");
        }
        let before = |name: &str| self.engine.topology.services.iter().find(|s| s.name == name);
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
        self.check_room(&plan)?;
        let departing =
            self.carry_out(wanted, &plan, files, Occasion::Reload, &mut || give_up())?;
        self.functions.arrange_all(&self.engine, chains);
        let outcomes =
            departure::remove_all(&mut self.engine, &mut self.runtimes, departing, give_up);
        self.publish_metrics();
        // They start in parallel.
        let mut outcomes: Vec<_> = outcomes.into_iter().map(|o| o.wait(give_up)).collect();
        // Other services may restart in one process with them, or without those that left.
        let drain = self.engine.drain_time();
        let regrouping = self.runtimes.supervisor().map(|runtimes| runtimes.regrouping(drain));
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
    fn first_change(
        &mut self,
        wanted: Topology,
        cancelled: &mut dyn FnMut() -> bool,
    ) -> Result<(), ServerError> {
        let files = kernel_files::open(&wanted, cancelled)?;
        let plan = Plan::new(&self.engine.topology, &wanted, &[]).map_err(ChangeError::Refused);
        let changed =
            plan.and_then(|plan| self.carry_out(wanted, &plan, files, Occasion::Start, cancelled));
        match changed {
            Ok(_) => Ok(()),
            Err(ChangeError::Start(error)) => Err(error),
            Err(ChangeError::ShmPortsBusy) => Err(ServerError::MemoryPortsLate),
            Err(error) => unreachable!("without running services this cannot fail: {error}"),
        }
    }

    /// Both versions of a service have a slot during a change.
    fn check_room(&self, plan: &Plan) -> Result<(), ChangeError> {
        let comes = |action: &ServiceAction| {
            matches!(action, ServiceAction::Added | ServiceAction::Changed { .. })
        };
        let new = plan.services.iter().filter(|(_, action)| comes(action)).count();
        let running = self.engine.slots.len() + self.engine.leaked.len();
        let most = self.engine.fabric.services_max();
        match running + new > most {
            true => Err(ChangeError::TooMany { wanted: running + new, most }),
            false => Ok(()),
        }
    }

    /// The chains that differ from those of `wanted`, among services that stay as they are.
    fn next_chains(
        &mut self,
        wanted: &Topology,
        plan: &Plan,
    ) -> Result<Vec<NextChain>, ServerError> {
        let mut chains = Vec::new();
        for (service, (_, action)) in wanted.services.iter().zip(&plan.services) {
            if *action == ServiceAction::Unchanged {
                let next = self.functions.next_chains(&self.engine, service, &wanted.tenants);
                chains.extend(next.map_err(|error| function_failed(service, error))?);
            }
        }
        Ok(chains)
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
        let running = self.engine.topology.clone();
        let listeners =
            AttachListeners::open(&wanted, Some(&running)).map_err(ServerError::from)?;
        let ports = NewPorts::open(&wanted, Some(&running)).map_err(ServerError::from)?;
        let preparation = Preparation {
            engine: &self.engine,
            functions: &mut self.functions,
            runtimes: &mut self.runtimes,
            transfers: &mut self.transfers,
            wanted: &wanted,
        };
        let mut prepared = preparation.all(plan, files)?;
        let new = &mut prepared;
        let ready = install::all(&self.engine, &mut self.workers, &wanted, new, occasion, give_up)
            .and_then(|()| {
                let runtimes = &mut self.runtimes;
                install::start_runtimes(runtimes, &listeners, &mut prepared, occasion, give_up)
            })
            .and_then(|()| self.pause_memory_ports(&wanted, plan, &ports));
        let paused = match ready {
            Ok(paused) => paused,
            Err(error) => {
                if occasion == Occasion::Reload {
                    install::undo(&mut self.engine, &mut self.runtimes, &prepared);
                    // Some slots may remain leaked.
                    self.publish_metrics();
                }
                return Err(error);
            }
        };
        let limits = wanted.limits.clone();
        self.engine.fabric.tenants().set(&wanted.tenants, |name| wanted.has_services_of(name));
        let (switch, departing) = switch::to_prepared(
            &mut self.engine,
            &mut self.functions,
            wanted,
            plan,
            prepared,
            paused.as_ref(),
        );
        self.publish_metrics();
        if let Some(runtimes) = self.runtimes.supervisor() {
            let leaving = switch.leave.iter().map(|leave| leave.slot).collect();
            runtimes.set_listeners(&self.engine.topology, listeners, leaving);
        }
        switch::post(&self.engine, switch);
        if let Some(paused) = paused {
            paused.resume(MemoryPort::all(&self.engine), ports, limits);
        }
        Ok(departing)
    }

    /// Pauses the shared-memory ports until the workers have switched. Clients that must leave get the reason.
    fn pause_memory_ports(
        &mut self,
        wanted: &Topology,
        plan: &Plan,
        new: &NewPorts,
    ) -> Result<Option<PausedAcceptor>, ChangeError> {
        if self.memory_ports.is_unused() && new.is_empty() {
            return Ok(None);
        }
        let evictions = switch::evictions(&self.engine, wanted, plan);
        let acceptor = self.memory_ports.acceptor(&self.engine)?;
        acceptor.pause(evictions).map(Some).ok_or(ChangeError::ShmPortsBusy)
    }
}

/// A function on the path of a service's messages cannot be used.
fn function_failed(service: &Service, source: FunctionError) -> ServerError {
    ServerError::Function { service: service.name.clone(), source: Box::new(source) }
}
