//! What a change prepares beside the services that run: everything that can fail, and what undoes it.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc;

use engine::metrics::ServiceMetrics;
use engine::topology::{Listen, Service, Topology};
use engine::{ControlMessage, ServiceInstall};
use sys::{OpenPort, PortSpec, SocketOptions};
use wire::nic::PortIndex;

use super::{ChangeError, ServiceSlot, pauses_service};
use crate::server::kernel_files::KernelFiles;
use crate::server::plan::{Plan, ServiceAction};
use crate::server::shm_acceptor::{Eviction, NewPorts, PausedAcceptor};
use crate::server::supervisor::{AttachListeners, PreparedRuntime};
use crate::server::{Server, ServerError};

/// A service that is ready to be seated.
pub(super) struct PreparedService {
    /// Its place in the new topology.
    pub(super) index: usize,
    pub(super) service_slot: ServiceSlot,
    /// By worker.
    pub(super) installs: Vec<ServiceInstall<OpenPort>>,
    /// Ports taken over from its former version.
    pub(super) kept: Vec<PortIndex>,
    /// Runtimes that start before the switch, …
    pub(super) before_switch: Vec<PreparedRuntime>,
    /// … and those that come when the former version's are gone.
    pub(super) after_departure: Vec<PreparedRuntime>,
}

impl Server {
    /// Makes everything that a service of the new topology needs.
    pub(super) fn prepare(
        &mut self,
        wanted: &Topology,
        index: usize,
        files: KernelFiles,
        others: &[PreparedService],
    ) -> Result<PreparedService, ServerError> {
        let service = &wanted.services[index];
        let workers = wanted.engine.workers;
        let slots =
            self.service_slots.iter().chain(others.iter().map(|p| &p.service_slot)).map(|p| p.slot);
        let slots: Vec<u16> = slots.chain(self.leaked.iter().map(|leaked| leaked.slot)).collect();
        let slot = (0..).find(|slot| !slots.contains(slot)).expect("there is room for it");
        let before = self.topology.services.iter().position(|s| s.name == service.name);
        let metrics = match before {
            Some(before) => self.service_slots[before].metrics.clone(),
            None => Arc::new(ServiceMetrics::new(service.name.clone(), workers)),
        };
        let (ports, opened) = self.open_ports(service, before, workers, others)?;
        let runtime_metrics =
            before.map_or(Vec::new(), |before| self.service_slots[before].runtime_metrics.clone());
        let attached = match self.attach(slot, wanted, service, &files, &runtime_metrics) {
            Ok(attached) => attached,
            Err(error) => {
                self.forget(slot);
                return Err(error);
            }
        };
        let runtime_metrics = attached.runtime_metrics();
        let replaces = |runtime: &PreparedRuntime| {
            before.is_some_and(|before| runtime.spec.replaces(&self.topology, before))
        };
        let (after_departure, before_switch) = attached.runtimes.into_iter().partition(replaces);
        let mut installs =
            ServiceInstall::for_workers(slot, service, &metrics, attached.of_workers);
        if !Vec::is_empty(&after_departure) {
            installs.iter_mut().for_each(ServiceInstall::set_reconfiguring);
        }
        let drain_ns = wanted.engine.drain_ms * 1_000_000;
        for start in after_departure.iter().filter(|start| pauses_service(start)) {
            installs
                .iter_mut()
                .for_each(|install| install.pause(start.spec.position as u16, drain_ns));
        }
        for (port, of_workers) in opened {
            for (runtime, open) in installs.iter_mut().zip(of_workers) {
                let listen = (service.listen[port].transport, open.address());
                runtime.add_port(ports[port].0, listen, &wanted.limits, open);
            }
        }
        let old = before.map_or(&[][..], |before| &self.service_slots[before].ports);
        let kept = ports.iter().map(|p| p.0).filter(|p| old.iter().any(|(o, _)| o == p)).collect();
        let service_slot = ServiceSlot { slot, ports, metrics, runtime_metrics, files };
        Ok(PreparedService { index, service_slot, installs, kept, before_switch, after_departure })
    }

    /// The ports of a service, and those of them that had to be opened: place in `listen`, one for each
    /// worker.
    #[expect(clippy::type_complexity, reason = "named above")]
    pub(super) fn open_ports(
        &self,
        service: &Service,
        before: Option<usize>,
        workers: usize,
        others: &[PreparedService],
    ) -> Result<(Vec<(PortIndex, SocketAddr)>, Vec<(usize, Vec<OpenPort>)>), ServerError> {
        let mut old: Vec<(Listen, (PortIndex, SocketAddr))> = Vec::new();
        if let Some(before) = before {
            let listens = self.topology.services[before].listen.iter().copied();
            old.extend(listens.zip(self.service_slots[before].ports.iter().copied()));
        }
        let service_slots = self.service_slots.iter().chain(others.iter().map(|p| &p.service_slot));
        let mut taken: Vec<PortIndex> =
            service_slots.flat_map(|p| &p.ports).map(|port| port.0).collect();
        taken.extend(self.leaked.iter().flat_map(|leaked| &leaked.ports));
        let (mut ports, mut opened) = (Vec::new(), Vec::new());
        for (number, listen) in service.listen.iter().enumerate() {
            if let Some(found) = old.iter().position(|(other, _)| other == listen) {
                ports.push(old.swap_remove(found).1);
                continue;
            }
            let spec = PortSpec { transport: listen.transport, address: listen.address };
            let open = OpenPort::open_all(spec, workers, &SocketOptions::default())?;
            let index = (0..).find(|index| !taken.contains(index)).expect("65536 are enough");
            taken.push(index);
            ports.push((index, open[0].address()));
            opened.push((number, open));
        }
        Ok((ports, opened))
    }

    /// Every worker takes its installs.
    pub(super) fn install_all(
        &mut self,
        wanted: &Topology,
        prepared: &mut [PreparedService],
    ) -> Result<(), ChangeError> {
        let timeout = self.timeouts.obeyed;
        for PreparedService { index, installs, .. } in prepared {
            let (answer, answers) = mpsc::channel();
            for (worker, install) in (0..).zip(std::mem::take(installs)) {
                let install = ControlMessage::Install(Box::new(install), answer.clone());
                self.fabric.post(worker, install);
            }
            drop(answer);
            for _ in 0..self.fabric.workers() {
                let stuck = |_| ChangeError::Stuck(timeout);
                let answer = answers.recv_timeout(timeout).map_err(stuck)?;
                let service = &wanted.services[*index];
                answer.map_err(|error| ServerError::of_blocks(service, error))?;
            }
        }
        Ok(())
    }

    /// Starts the runtimes that need not wait for others to end, and waits until they serve.
    pub(super) fn start_before_switch(
        &mut self,
        listeners: &AttachListeners,
        prepared: &mut [PreparedService],
        give_up: &dyn Fn() -> bool,
    ) -> Result<(), ChangeError> {
        let installs: Vec<_> =
            prepared.iter_mut().flat_map(|p| p.before_switch.drain(..)).collect();
        let waits = prepared.iter().any(|p| !p.after_departure.is_empty());
        if installs.is_empty() && !waits && listeners.is_empty() {
            return Ok(());
        }
        let awaited = self.supervisor()?.add(installs, false);
        Ok(awaited.wait(&mut || give_up()).map_err(ServerError::from)?)
    }

    /// Nobody comes in by a shared-memory port until the workers have switched, and who must go is told why.
    pub(super) fn pause_shm_ports(
        &mut self,
        wanted: &Topology,
        plan: &Plan,
        new: &NewPorts,
    ) -> Result<Option<PausedAcceptor>, ChangeError> {
        if self.shm_acceptor.is_none() && new.is_empty() {
            return Ok(None);
        }
        let mut evictions = Vec::new();
        for (service, service_slot) in self.topology.services.iter().zip(&self.service_slots) {
            let (slot, name) = (service_slot.slot, &service.name);
            let action = plan.services.iter().find(|(of, _)| of == name).map(|(_, action)| *action);
            let why = match action {
                Some(ServiceAction::Removed) => format!("service {name:?} has been removed"),
                Some(ServiceAction::Changed { keeps_memory_clients: false, .. }) => {
                    format!("service {name:?} takes other messages now: connect again")
                }
                Some(ServiceAction::Changed { .. }) => {
                    let stays = |path: &PathBuf| wanted.memory_ports().any(|(_, p)| p == path);
                    let gone = service.memory_ports.iter().filter(|path| !stays(path));
                    evictions.extend(gone.map(|path| {
                        let url = crate::config::memory_url(path);
                        let why = format!("{url} is not a port of service {name:?} any more");
                        Eviction { slot, path: Some(path.clone()), why }
                    }));
                    continue;
                }
                _ => continue,
            };
            evictions.push(Eviction { slot, path: None, why });
        }
        self.shm_acceptor()?.pause(evictions).map(Some).ok_or(ChangeError::ShmPortsBusy)
    }

    /// What was prepared and not seated goes.
    pub(super) fn undo(&mut self, prepared: &[PreparedService]) {
        for PreparedService { service_slot, .. } in prepared {
            self.forget(service_slot.slot);
        }
    }

    /// What some workers may have seated goes.
    pub(super) fn undo_installed(&mut self, prepared: &[PreparedService]) {
        for PreparedService { service_slot, kept, .. } in prepared {
            let own = service_slot.ports.iter().map(|p| p.0).filter(|port| !kept.contains(port));
            self.release_slot(service_slot.slot, &service_slot.metrics, own.collect(), &|| false);
        }
        // Something of it may be left behind.
        self.publish_metrics();
    }
}
