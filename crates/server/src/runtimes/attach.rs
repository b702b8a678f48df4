//! Attaches accelerators to a service: regions, kernels and accelerator threads; runtimes are prepared here and
//! started by the supervisor.

use std::sync::Arc;
use std::time::Duration;

use accel::Kernel;
use accel::cpu::{Options as CpuOptions, ThreadBlocks, WorkerBlocks};
use engine::accelerator::Blocks;
use engine::metrics::RuntimeMetrics;
use engine::topology::{Accelerator, AcceleratorKind, CpuPlacement, Service, Topology};
use engine::{Attachment, BlockEnds};
use mqueue::{MappedMemory, Words};
use runtime::kernel_file::{self, KernelFile};
use sys::SharedMemory;

use super::Runtimes;
use super::heartbeat::HeartbeatGuard;
use super::region::{MadeRegion, make_region};
use super::supervisor::{PreparedRuntime, RuntimeSpec};
use crate::base::error::ServerError;
use crate::base::slots::KernelFiles;
use crate::transfers::ServiceTransfers;

/// A region of a `cpu` accelerator.
pub(crate) struct OpenRegion {
    /// Slot of its service.
    pub(crate) slot: u16,
    pub(crate) words: Words<MappedMemory>,
    pub(crate) blocks: u32,
    _heartbeat: HeartbeatGuard,
    /// Kept here so that no worker drops the last reference: unmapping takes long.
    _memory: Arc<SharedMemory>,
}

/// The accelerators of one version of a service.
pub(crate) struct Attached {
    /// By worker: its share of each accelerator's region.
    pub(crate) of_workers: Vec<Vec<Attachment>>,
    /// Of accelerators whose blocks run in runtime processes.
    pub(crate) runtimes: Vec<PreparedRuntime>,
}

impl Attached {
    /// The metrics of its runtimes.
    pub(crate) fn runtime_metrics(&self) -> Vec<Arc<RuntimeMetrics>> {
        self.runtimes.iter().map(|runtime| runtime.spec.metrics.clone()).collect()
    }
}

impl Runtimes {
    /// Creates the regions of a service in `slot`, one for each of its accelerators, and starts their threads, if
    /// any. `files` are its kernel files; `runtime_metrics` are those of its previous version.
    pub(crate) fn attach(
        &mut self,
        slot: u16,
        topology: &Topology,
        service: &Service,
        files: &KernelFiles,
        runtime_metrics: &[Arc<RuntimeMetrics>],
        transfers: Option<&Arc<ServiceTransfers>>,
    ) -> Result<Attached, ServerError> {
        let workers = topology.engine.workers;
        let of_workers = (0..workers).map(|_| Vec::new()).collect();
        let mut attached = Attached { of_workers, runtimes: Vec::new() };
        for (position, index) in service.accelerators.iter().enumerate() {
            let accelerator = &topology.accelerators[*index];
            let name = &accelerator.name;
            let shares = match &accelerator.kind {
                AcceleratorKind::Cpu { placement, stack_kib } => self.attach_cpu(
                    (slot, workers),
                    service,
                    (position, accelerator),
                    files[position].as_deref(),
                    (placement, *stack_kib),
                    transfers.map(|of| &**of),
                )?,
                AcceleratorKind::Process { .. } => {
                    let of_it = |known: &&Arc<RuntimeMetrics>| known.accelerator == *name;
                    let known = runtime_metrics.iter().find(of_it).cloned();
                    let metrics =
                        known.unwrap_or_else(|| RuntimeMetrics::new(&service.name, name).into());
                    let accelerator = accelerator.clone();
                    let file = files[position].clone();
                    let confinement = topology.confinement_of(&service.tenant);
                    let service_of = service.clone();
                    let spec = RuntimeSpec {
                        slot,
                        position,
                        service: service_of,
                        accelerator,
                        workers,
                        file,
                        metrics,
                        confinement,
                        transfers: transfers.cloned(),
                    };
                    let made = PreparedRuntime::make(spec, &self.heartbeat_writer);
                    let (runtime, shares) = made.map_err(|source| ServerError::Memory {
                        service: service.name.clone(),
                        source,
                    })?;
                    attached.runtimes.push(runtime);
                    shares
                }
            };
            for (own, share) in attached.of_workers.iter_mut().zip(shares) {
                own.push(share);
            }
        }
        Ok(attached)
    }

    /// Creates the region of a service in `slot` on one `cpu` accelerator, and its blocks. Blocks on the workers'
    /// cores are started later by their workers. Returns each worker's share.
    fn attach_cpu(
        &mut self,
        (slot, workers): (u16, usize),
        service: &Service,
        (position, accelerator): (usize, &Accelerator),
        file: Option<&KernelFile>,
        (placement, stack_kib): (&CpuPlacement, usize),
        transfers: Option<&ServiceTransfers>,
    ) -> Result<Vec<Attachment>, ServerError> {
        let accelerator_error =
            |source| ServerError::Accelerator { service: service.name.clone(), source };
        let kernel = service.kernel_on(position);
        let kernel = match file {
            Some(file) => file.load(kernel_file::named(kernel).and_then(|(_, name)| name)),
            None => Kernel::builtin(kernel),
        };
        let kernel = kernel.map_err(|e| accelerator_error(e.into()))?;
        let made = make_region(service, (position, accelerator), 1, workers, transfers);
        let MadeRegion { memory, words, ends, pools, commands: _ } =
            made.map_err(|source| ServerError::Memory { service: service.name.clone(), source })?;
        let heartbeat = self.heartbeat_writer.add(words.clone());
        let (blocks, memory_held) = (service.mqueues_on(position), memory.clone());
        self.regions.push(OpenRegion {
            slot,
            words,
            blocks,
            _heartbeat: heartbeat,
            _memory: memory_held,
        });
        let memory = MappedMemory::new(memory);
        let own = |ends: &Vec<BlockEnds>| ends.iter().map(|e| e.block).collect();
        let by_worker: Vec<Vec<u32>> = ends.iter().map(own).collect();
        let options = CpuOptions {
            service: service.name.clone(),
            stack_bytes: stack_kib << 10,
            hung_after: Duration::from_millis(service.hang_ms_on(position)),
            ..CpuOptions::default()
        };
        let mut blocks: Vec<Box<dyn Blocks>> = Vec::new();
        match placement {
            CpuPlacement::Worker => {
                let names = (kernel.name(), service.name.as_str(), accelerator.name.as_str());
                let shown = self.watched.name(slot, names);
                for (own, resuming) in by_worker.iter().zip(shown) {
                    let (memory, kernel) = (memory.clone(), kernel.clone());
                    let prepared =
                        WorkerBlocks::prepare(memory, kernel, &service.params, own, &options);
                    let mut prepared = prepared.map_err(accelerator_error)?;
                    prepared.show(resuming);
                    blocks.push(Box::new(prepared));
                }
            }
            CpuPlacement::Threads { threads, cores } => {
                let count = by_worker.iter().map(Vec::len).sum();
                let threads = accel::cpu::thread_count(*threads, count, cores);
                let cores = (!cores.is_empty()).then_some(cores.as_slice());
                let (running, of_workers) = ThreadBlocks::start(
                    memory,
                    &kernel,
                    &service.params,
                    &by_worker,
                    threads,
                    cores,
                    &options,
                )
                .map_err(accelerator_error)?;
                self.accelerators.push((slot, running));
                blocks.extend(of_workers.into_iter().map(|b| Box::new(b) as Box<dyn Blocks>));
            }
        }
        let attachment = |((blocks, ends), pool)| Attachment { blocks, ends, pool };
        Ok(blocks.into_iter().zip(ends).zip(pools).map(attachment).collect())
    }
}
