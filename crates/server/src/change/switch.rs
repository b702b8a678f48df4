//! The third step of a change: all workers switch to the new services.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc;

use engine::topology::{AcceleratorKind, Launch, Service, Topology};
use engine::{ControlMessage, DrainBarrier, Leave, Switch};
use runtime::kinds;
use wire::DropReason;
use wire::nic::PortIndex;

use super::departure::DepartingService;
use super::plan::{Plan, ServiceAction};
use super::prepare::{PreparedService, pauses_service};
use crate::base::engine::Engine;
use crate::base::error::Stuck;
use crate::base::slots::ServiceSlot;
use crate::functions::{Functions, NextFunctions};
use crate::shm_acceptor::{Eviction, PausedAcceptor};

/// The devices of a service, with its tenant.
fn devices_of(topology: &Topology, service: &Service) -> Vec<(String, String)> {
    let device = |index: &usize| match &topology.accelerators[*index].kind {
        AcceleratorKind::Process { launch: Launch::Engine { .. }, device, .. } => {
            kinds::exclusive_key(device).map(|key| (key, service.tenant.clone()))
        }
        _ => None,
    };
    service.accelerators.iter().filter_map(device).collect()
}

/// The clients of shared-memory ports that must leave.
pub(super) fn evictions(engine: &Engine, wanted: &Topology, plan: &Plan) -> Vec<Eviction> {
    let mut evictions = Vec::new();
    for (service, service_slot) in engine.services() {
        let (slot, name) = (service_slot.slot, &service.name);
        let action = plan.services.iter().find(|(of, _)| of == name).map(|(_, action)| *action);
        let why = match action {
            Some(ServiceAction::Removed) => format!("service {name:?} has been removed"),
            Some(ServiceAction::Changed { keeps_memory_clients: false, .. }) => {
                format!("service {name:?} now has another message format: connect again")
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
    evictions
}

/// The new topology is the current one, with its slots and functions. Returns what the workers have to do, and the services that
/// leave.
pub(super) fn to_prepared(
    engine: &mut Engine,
    functions: &mut Functions,
    wanted: Topology,
    plan: &Plan,
    mut prepared: Vec<PreparedService>,
    paused: Option<&PausedAcceptor>,
) -> (Switch, Vec<DepartingService>) {
    let old = std::mem::take(&mut engine.slots);
    let before = engine.topology.clone();
    let mut departing = Vec::new();
    engine.refresh_addresses(&wanted);
    let mut switch = Switch::new(wanted.limits.clone(), wanted.engine.polling);
    for new in &prepared {
        let slot = new.service_slot.slot;
        switch.lead.extend(new.kept.iter().map(|(port, socket)| (*port, slot, *socket)));
    }
    let mut slots: Vec<Option<(ServiceSlot, NextFunctions)>> =
        wanted.services.iter().map(|_| None).collect();
    for ((index, service_slot), service) in old.into_iter().enumerate().zip(&before.services) {
        let name = service.name.clone();
        let at = plan.services.iter().position(|(of, _)| *of == name).expect("all are in it");
        let mut successor = prepared.iter_mut().find(|new| new.index == at);
        if plan.services[at].1 == ServiceAction::Unchanged {
            slots[at] = Some((service_slot, NextFunctions::Of(index)));
            continue;
        }
        let after_departure =
            successor.as_mut().map_or(Vec::new(), |new| std::mem::take(&mut new.after_departure));
        if after_departure.iter().any(pauses_service) {
            tracing::info!(
                service = name,
                "paused: its next version starts when this one has ended"
            );
        }
        let kept = successor.as_ref().map_or(&[][..], |new| &new.kept);
        let ports = service_slot.port_indices();
        let is_kept = |port: &PortIndex| kept.iter().any(|(kept, _)| kept == port);
        let stopped: Vec<_> = ports.filter(|port| !is_kept(port)).collect();
        switch.stop.extend(&stopped);
        let keeps = match plan.services[at].1 {
            ServiceAction::Changed { keeps_connections, keeps_memory_clients } => {
                (keeps_connections, keeps_memory_clients)
            }
            _ => (false, false),
        };
        let next = successor.as_ref().map(|new| new.service_slot.slot);
        let barrier = DrainBarrier::default();
        switch.leave.push(Leave {
            slot: service_slot.slot,
            successor: next.filter(|_| keeps.0),
            shm_successor: next.filter(|_| keeps.1),
            departing: paused.map_or(Vec::new(), |paused| paused.departing(service_slot.slot)),
            barrier: barrier.clone(),
        });
        let dropped_before = service_slot.metrics.snapshot().dropped(DropReason::DrainTimeout);
        let (slot, metrics) = (service_slot.slot, service_slot.metrics);
        let devices = devices_of(&before, service);
        departing.push(DepartingService {
            name,
            slot,
            metrics,
            barrier,
            dropped_before,
            stopped,
            devices,
            after_departure,
        });
    }
    for new in prepared {
        slots[new.index] = Some((new.service_slot, NextFunctions::New(new.functions)));
    }
    let slots = slots.into_iter().map(|of| of.expect("each is old or new"));
    let next: Vec<NextFunctions>;
    (engine.slots, next) = slots.unzip();
    engine.topology = Arc::new(wanted);
    functions.switch(next);
    (switch, departing)
}

/// Switches all workers.
pub(super) fn post(engine: &Engine, switch: Switch) {
    let (answer, answers) = mpsc::channel();
    let switch = Arc::new(switch);
    engine.fabric.post_to_all(|_| ControlMessage::Switch(switch.clone(), answer.clone()));
    drop(answer);
    for _ in 0..engine.fabric.workers() {
        if answers.recv_timeout(engine.timeouts.step).is_err() {
            // It switches when the kernel returns; until then the services that leave cannot be released.
            let stuck = Stuck(engine.timeouts.step);
            tracing::error!("{stuck}; it switches when the kernel returns");
            break;
        }
    }
}
