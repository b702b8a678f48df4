//! The kernel files of services: opened before anything changes, and kept open as long as the service runs.

use std::path::PathBuf;
use std::sync::Arc;

use accel::{AccelError, KernelError};
use engine::topology::{AcceleratorKind, Launch, Service, Topology};

use crate::base::engine::Engine;
use crate::base::error::ServerError;
use crate::base::slots::KernelFiles;
use runtime::kernel_file::{self, KernelFile, Target};
use runtime::kinds::target;

/// The kernel file of a service on each of its accelerators, checked, unless `cancelled`; `None` for built-in kernels
/// and kernels of external programs.
fn kernel_files(
    topology: &Topology,
    service: &Service,
    cancelled: &mut dyn FnMut() -> bool,
) -> Result<KernelFiles, ServerError> {
    let error = |source| match source {
        AccelError::Kernel(KernelError::Abandoned) => ServerError::Cancelled,
        source => ServerError::Accelerator { service: service.name.clone(), source },
    };
    let open = |(position, index): (usize, &usize)| {
        let kind = &topology.accelerators[*index].kind;
        let Some((path, name)) = kernel_file::named(service.kernel_on(position)) else {
            return Ok(None);
        };
        let target = match kind {
            AcceleratorKind::Process { device, .. } => target(device),
            AcceleratorKind::Cpu { .. } => Target::Host,
        };
        let opened = KernelFile::open(path, target);
        if matches!(kind, AcceleratorKind::Process { launch: Launch::External { .. }, .. }) {
            // Only the runtime that attaches can interpret the path. If it is this file, a rebuild can be detected.
            return Ok(opened.ok());
        }
        let file = opened.map_err(error)?;
        file.check(name, cancelled).map_err(|source| error(source.into()))?;
        Ok(Some(file))
    };
    service.accelerators.iter().enumerate().map(open).collect()
}

/// The kernel files of every service of a new topology.
pub(crate) fn open(
    wanted: &Topology,
    cancelled: &mut dyn FnMut() -> bool,
) -> Result<Vec<KernelFiles>, ServerError> {
    wanted.services.iter().map(|service| kernel_files(wanted, service, cancelled)).collect()
}

/// Services whose kernel file has new content, and the file; `files` are those of `wanted`.
pub(crate) fn rebuilt(
    engine: &Engine,
    wanted: &Topology,
    files: &[KernelFiles],
) -> Vec<(String, PathBuf)> {
    let of_service = |(service, new): (&Service, &KernelFiles)| {
        let before = engine.index_of(&service.name)?;
        let old = engine.slots[before].files.iter().flatten();
        let changed = |old: &&Arc<KernelFile>| {
            let mut same_path = new.iter().flatten().filter(|new| new.path() == old.path());
            same_path.any(|new| !Arc::ptr_eq(new, old))
        };
        let file = old.clone().find(changed)?;
        Some((service.name.clone(), file.path().to_owned()))
    };
    wanted.services.iter().zip(files).filter_map(of_service).collect()
}
