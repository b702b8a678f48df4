//! The first step of a change: creates everything that the new services need, without an effect on running services.

use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;

use engine::ServiceInstall;
use engine::metrics::ServiceMetrics;
use engine::topology::{Launch, Listen, Service, Topology};
use sys::{OpenPort, PortSpec, SocketOptions};
use wire::nic::{PortIndex, Transport};

use super::function_failed;
use super::plan::{Plan, ServiceAction};
use crate::base::engine::Engine;
use crate::base::error::ServerError;
use crate::base::slots::{KernelFiles, ServiceSlot};
use crate::functions::{AttachedFunction, Functions};
use crate::runtimes::Runtimes;
use crate::runtimes::supervisor::PreparedRuntime;
use crate::transfers::Transfers;

/// The ports of a service, and those of them that had to be opened.
#[derive(Default)]
struct Ports {
    ports: Vec<(PortIndex, SocketAddr)>,
    unix_ports: Vec<PortIndex>,
    /// Taken over from the previous version.
    kept: Vec<(PortIndex, Option<u16>)>,
    /// With one for each worker.
    opened: Vec<(PortIndex, Listen, Option<u16>, Vec<OpenPort>)>,
}

/// A service that is ready to be installed.
pub(super) struct PreparedService {
    /// Its index in the new topology.
    pub(super) index: usize,
    pub(super) service_slot: ServiceSlot,
    /// Functions on the path of its messages, in order.
    pub(super) functions: Vec<AttachedFunction>,
    /// By worker.
    pub(super) installs: Vec<ServiceInstall<OpenPort>>,
    /// Ports taken over from its previous version, and the sockets of its blocks whose connections arrive there.
    pub(super) kept: Vec<(PortIndex, Option<u16>)>,
    /// Runtimes that start before the switch, …
    pub(super) before_switch: Vec<PreparedRuntime>,
    /// … and those that start when the previous version's have ended.
    pub(super) after_departure: Vec<PreparedRuntime>,
}

/// Whether a service is paused until this runtime serves: a runtime that the engine starts will serve soon; for other
/// runtimes that is unknown.
pub(super) fn pauses_service(start: &PreparedRuntime) -> bool {
    matches!(start.spec.launch().0, Launch::Engine { .. })
}

/// A preparation, with everything that it takes.
pub(super) struct Preparation<'a> {
    pub(super) engine: &'a Engine,
    pub(super) functions: &'a mut Functions,
    pub(super) runtimes: &'a mut Runtimes,
    pub(super) transfers: &'a mut Transfers,
    pub(super) wanted: &'a Topology,
}

impl Preparation<'_> {
    /// Prepares every service of the new topology that is added or changed.
    pub(super) fn all(
        mut self,
        plan: &Plan,
        files: Vec<KernelFiles>,
    ) -> Result<Vec<PreparedService>, ServerError> {
        let mut prepared = Vec::new();
        for (index, files) in files.into_iter().enumerate() {
            if plan.services[index].1 == ServiceAction::Unchanged {
                continue;
            }
            match self.prepare(index, files, &prepared) {
                Ok(next) => prepared.push(next),
                Err(error) => {
                    for PreparedService { service_slot, .. } in &prepared {
                        self.runtimes.release(service_slot.slot);
                    }
                    return Err(error);
                }
            }
        }
        Ok(prepared)
    }

    /// Prepares one service of the new topology.
    fn prepare(
        &mut self,
        index: usize,
        files: KernelFiles,
        others: &[PreparedService],
    ) -> Result<PreparedService, ServerError> {
        let (engine, wanted) = (self.engine, self.wanted);
        let service = &wanted.services[index];
        let workers = wanted.engine.workers;
        let slots =
            engine.slots.iter().chain(others.iter().map(|p| &p.service_slot)).map(|p| p.slot);
        let slots: Vec<u16> = slots.chain(engine.leaked.iter().map(|leaked| leaked.slot)).collect();
        let slot = (0..).find(|slot| !slots.contains(slot)).expect("there is room for it");
        let before = engine.index_of(&service.name);
        let metrics = match before {
            Some(before) => engine.slots[before].metrics.clone(),
            None => Arc::new(ServiceMetrics::new(service.name.clone(), workers)),
        };
        let made = self.functions.first_functions(engine, service, &wanted.tenants);
        let (functions, links) = made.map_err(|error| function_failed(service, error))?;
        let Ports { ports, unix_ports, kept, opened } = self.open_ports(service, before, others)?;
        let runtime_metrics =
            before.map_or(Vec::new(), |before| engine.slots[before].runtime_metrics.clone());
        let attached = self.transfers.of(service).and_then(|transfers| {
            let transfers = transfers.as_ref();
            self.runtimes.attach(slot, wanted, service, &files, &runtime_metrics, transfers)
        });
        let attached = match attached {
            Ok(attached) => attached,
            Err(error) => {
                self.runtimes.release(slot);
                return Err(error);
            }
        };
        let runtime_metrics = attached.runtime_metrics();
        let replaces = |runtime: &PreparedRuntime| {
            before.is_some_and(|before| runtime.spec.replaces(&engine.topology, before))
        };
        let (after_departure, before_switch) = attached.runtimes.into_iter().partition(replaces);
        let mut installs =
            ServiceInstall::for_workers(slot, service, &metrics, attached.of_workers);
        if !Vec::is_empty(&after_departure) {
            installs.iter_mut().for_each(ServiceInstall::set_reconfiguring);
        }
        for (backend, by_worker) in links {
            for (install, links) in installs.iter_mut().zip(by_worker) {
                if !links.is_empty() {
                    install.set_functions(backend, links);
                }
            }
        }
        let drain_ns = wanted.engine.drain_ms * 1_000_000;
        for start in after_departure.iter().filter(|start| pauses_service(start)) {
            installs
                .iter_mut()
                .for_each(|install| install.pause(start.spec.position as u16, drain_ns));
        }
        for (port, listen, socket, of_workers) in opened {
            for (runtime, open) in installs.iter_mut().zip(of_workers) {
                let listen = Listen { address: open.address(), ..listen };
                runtime.add_port(port, (listen, socket), &wanted.limits, open);
            }
        }
        let service_slot = ServiceSlot { slot, ports, unix_ports, metrics, runtime_metrics, files };
        Ok(PreparedService {
            index,
            service_slot,
            functions,
            installs,
            kept,
            before_switch,
            after_departure,
        })
    }

    /// Takes over the ports that the previous version has, and opens the others.
    fn open_ports(
        &self,
        service: &Service,
        before: Option<usize>,
        others: &[PreparedService],
    ) -> Result<Ports, ServerError> {
        let (engine, wanted) = (self.engine, self.wanted);
        let workers = wanted.engine.workers;
        let netns = wanted.confinement_of(&service.tenant).netns;
        // Ports of another namespace cannot be taken over.
        let before = before.filter(|before| {
            let tenant = &engine.topology.services[*before].tenant;
            engine.topology.confinement_of(tenant).netns == netns
        });
        let mut old: Vec<((Listen, bool), (PortIndex, SocketAddr))> = Vec::new();
        let mut old_unix: Vec<(&Path, PortIndex)> = Vec::new();
        if let Some(before) = before {
            let (service, slot) = (&engine.topology.services[before], &engine.slots[before]);
            let used = service.ports().map(|(listen, socket)| (listen, socket.is_some()));
            old.extend(used.zip(slot.ports.iter().copied()));
            let unix = service.unix_ports().map(|(path, _)| path);
            old_unix.extend(unix.zip(slot.unix_ports.iter().copied()));
        }
        let service_slots = engine.slots.iter().chain(others.iter().map(|p| &p.service_slot));
        let mut taken: Vec<PortIndex> = service_slots.flat_map(ServiceSlot::port_indices).collect();
        taken.extend(engine.leaked.iter().flat_map(|leaked| &leaked.ports));
        let mut new_index = || {
            let index = (0..).find(|index| !taken.contains(index)).expect("65536 are enough");
            taken.push(index);
            index
        };
        let options = SocketOptions::default();
        let mut found = Ports::default();
        for (listen, socket) in service.ports() {
            let used = (listen, socket.is_some());
            if let Some(place) = old.iter().position(|(other, _)| *other == used) {
                let port = old.swap_remove(place).1;
                found.ports.push(port);
                found.kept.push((port.0, socket));
                continue;
            }
            let spec = PortSpec { transport: listen.transport, address: listen.address };
            let open = || match socket {
                None => OpenPort::open_all(spec, workers, &options),
                // A connection goes to whichever worker has a block for it.
                Some(_) => OpenPort::open_shared(spec, workers, &options),
            };
            let open = match &netns {
                None => open()?,
                Some(path) => sys::netns::within(path, open).map_err(|source| {
                    let (tenant, netns) = (service.tenant.clone(), path.clone());
                    ServerError::Namespace { tenant, netns, source }
                })??,
            };
            let index = new_index();
            found.ports.push((index, open[0].address()));
            found.opened.push((index, listen, socket, open));
        }
        for (path, socket) in service.unix_ports() {
            if let Some((_, port)) = old_unix.iter().find(|(old, _)| *old == path) {
                found.unix_ports.push(*port);
                found.kept.push((*port, Some(socket)));
                continue;
            }
            let open = OpenPort::open_local(path, workers, &options)?;
            let listen = Listen { transport: Transport::Tcp, address: open[0].address() };
            let index = new_index();
            found.unix_ports.push(index);
            found.opened.push((index, listen, Some(socket), open));
        }
        Ok(found)
    }
}
