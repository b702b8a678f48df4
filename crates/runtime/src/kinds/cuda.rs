//! `kind = "cuda"`: CUDA kernels on an NVIDIA GPU, in a process of their own.

use std::time::Duration;

use accel::cuda::{CudaAccelerator, Ended, Gpu, Options, Service, mps_folder};
use accel::{AccelError, CudaError};
use engine::topology::{DeviceSpec, Rings};
use mqueue::abi::reason::of_block;
use mqueue::abi::{reason, stop};
use mqueue::{MappedMemory, Words};

use super::{Flags, Key, Kind};
use crate::kernel_file::{self, KernelFile, Target};
use crate::{Device, Failure, HUNG_AFTER, Job};

pub(super) struct Cuda;

const KEYS: &[Key] = &[
    Key {
        name: "threads",
        unit: "threads of a block, a multiple of 32",
        range: 0..=1024,
        default: 0,
        multiple_of: 32,
        multiple: "warps",
        flag: "--threads N",
        what: "Size of each CUDA block; 0: a size that suits the kernel. Warp kernels always have 32.",
    },
    Key {
        name: "gpu",
        unit: "number",
        range: 0..=63,
        default: 0,
        multiple_of: 1,
        multiple: "",
        flag: "--gpu N",
        what: "The GPU, as `CUDA_VISIBLE_DEVICES` numbers them. `serval doctor --gpus` lists them.",
    },
];

impl Kind for Cuda {
    fn name(&self) -> &'static str {
        "cuda"
    }

    fn summary(&self) -> &'static str {
        "an NVIDIA GPU (gpu.md)"
    }

    fn flags(&self) -> Flags {
        Flags::default()
    }

    fn keys(&self) -> &'static [Key] {
        KEYS
    }

    /// The GPU gives processes turns of milliseconds; blocks of one process run side by side.
    fn exclusive_key(&self, device: &DeviceSpec) -> Option<String> {
        Some(format!("GPU {}", device.get("gpu")))
    }

    fn device_noun(&self) -> &'static str {
        "GPU"
    }

    /// One trip over the bus finds and fetches a message; with doorbells it takes two.
    fn default_rings(&self) -> Rings {
        Rings::Granule
    }

    fn target(&self) -> Target {
        Target::Gpu
    }

    fn place(&self, device: &DeviceSpec) -> Option<String> {
        Some(format!("NVIDIA GPU {}", device.get("gpu")))
    }

    fn check(
        &self,
        service: &engine::topology::Service,
        kernel: &str,
    ) -> Result<(), (String, String)> {
        let demands = accel::cuda::Demands {
            backends: service.backends.len() as u32,
            blocks: service.mqueues,
            sockets: if service.sockets.is_empty() { 0 } else { service.sockets_per_block },
        };
        accel::cuda::check_builtin(kernel, demands).map_err(|error| {
            let text = error.to_string();
            let (what, right) = text.split_once(": ").unwrap_or((&text, "name another kernel"));
            (what.to_owned(), right.to_owned())
        })
    }

    fn takes_bundles(&self) -> bool {
        true
    }

    fn device(
        &self,
        device: &DeviceSpec,
        options: super::Options,
    ) -> Result<Box<dyn Device>, String> {
        let number = |key| device.get(key) as u32;
        let threads = Some(number("threads")).filter(|threads| *threads > 0);
        Ok(Box::new(GpuDevice::new(number("gpu"), threads).hung_after(options.hung_after)))
    }
}

/// Runs CUDA kernels on an NVIDIA GPU; loads the GPU's driver into this process with the first life.
pub struct GpuDevice {
    index: u32,
    threads: Option<u32>,
    hung_after: Duration,
    running: Option<Running>,
}

struct Running {
    accelerator: CudaAccelerator,
    /// Of each service.
    words: Vec<Words<MappedMemory>>,
    /// Their names.
    services: Vec<String>,
    ended: Vec<Ended>,
    /// The GPU's or a kernel's fault, after which this process cannot use the GPU any more.
    fault: Option<Failure>,
}

impl GpuDevice {
    /// The GPU of this number, from 0, with `threads` threads a block (a multiple of 32), or as many as the
    /// kernel is best with.
    pub fn new(index: u32, threads: Option<u32>) -> Self {
        Self { index, threads, hung_after: HUNG_AFTER, running: None }
    }

    /// A block that has requests and does nothing for longer hangs: the life ends.
    pub fn hung_after(self, hung_after: Duration) -> Self {
        Self { hung_after, ..self }
    }
}

impl Device for GpuDevice {
    fn kind(&self) -> &str {
        "cuda"
    }

    fn takes_bundles(&self) -> bool {
        true
    }

    fn start(&mut self, jobs: &[Job]) -> Result<(), Failure> {
        let refused =
            |error: AccelError| Failure { reason: reason::REFUSED, text: error.to_string() };
        let service = |job: &Job| Service {
            name: job.service.clone(),
            region: MappedMemory::new(job.memory.clone()),
            kernel: job.kernel.clone(),
            file: None,
            params: job.params.clone(),
            threads: self.threads,
        };
        let mut to_start: Vec<Service> = jobs.iter().map(service).collect();
        for (job, service) in jobs.iter().zip(&mut to_start) {
            service.file = file(job).map_err(refused)?;
        }
        let services: Vec<String> = jobs.iter().map(|job| job.service.clone()).collect();
        let gpu = Gpu::open(self.index, None).map_err(|e| refused(e.into()))?;
        let found = gpu.found();
        let (index, name) = (found.index, &found.name);
        tracing::info!(gpu = index, name, services = services.join(", "), "uses a GPU");
        if let Some(mps) = mps_folder() {
            tracing::warn!(
                gpu = index,
                mps = %mps.display(),
                "an MPS daemon is there: programs share the GPU at the same time, and a fault of any of them may end \
                 this runtime"
            );
        }
        let options = Options { hung_after: self.hung_after, ..Options::default() };
        let accelerator = gpu.start(&to_start, options).map_err(refused)?;
        let words = jobs.iter().map(|job| job.words.clone()).collect();
        self.running =
            Some(Running { accelerator, words, services, ended: Vec::new(), fault: None });
        Ok(())
    }

    fn health(&mut self) -> Result<(), Failure> {
        self.running.as_mut().map_or(Ok(()), Running::health)
    }

    fn ended(&mut self) -> bool {
        self.running.as_ref().is_none_or(|running| running.accelerator.running() == 0)
    }

    fn stop(&mut self, timeout: Duration) -> Result<(), Failure> {
        self.running.take().map_or(Ok(()), |running| running.stop(timeout))
    }
}

impl Running {
    fn health(&mut self) -> Result<(), Failure> {
        if let Err(error) = self.accelerator.poll(&mut self.ended) {
            let fault = fault(&error);
            self.fault = Some(fault.clone());
            return Err(fault);
        }
        let asked = |end: &Ended| self.words[end.service].stop() != stop::RUN;
        let wrong = |end: &&Ended| !asked(end) || end.reason != reason::STOPPED;
        match self.ended.iter().find(wrong) {
            None => Ok(()),
            Some(Ended { service, block, reason }) => {
                let of = &self.services[*service];
                let text = format!("service {of:?}: {}", of_block(*block, *reason));
                Err(Failure { reason: *reason, text })
            }
        }
    }

    fn stop(mut self, timeout: Duration) -> Result<(), Failure> {
        if let Some(fault) = self.fault {
            return Err(fault);
        }
        for words in self.words.iter().filter(|words| words.stop() == stop::RUN) {
            words.set_stop(stop::NOW);
        }
        let mut joined = self.accelerator.join(timeout);
        if matches!(joined, Ok(false)) {
            self.words.iter().for_each(|words| words.set_stop(stop::NOW));
            joined = self.accelerator.join(Duration::from_secs(1));
        }
        match joined {
            Ok(true) => Ok(()),
            Ok(false) => {
                let text = "blocks did not leave the GPU; this process must end to free it";
                Err(Failure { reason: reason::HUNG, text: text.to_owned() })
            }
            Err(error) => Err(fault(&error)),
        }
    }
}

/// What is in a job's kernel file, if it has one.
fn file(job: &Job) -> Result<Option<Vec<u8>>, AccelError> {
    let Some((path, _)) = kernel_file::named(&job.kernel) else { return Ok(None) };
    let file = match &job.file {
        Some(copy) => KernelFile::received(path, Target::Gpu, copy.clone())?,
        None => KernelFile::open(path, Target::Gpu)?,
    };
    Ok(Some(file.copy().bytes().to_vec()))
}

/// What the driver reports while kernels run: a kernel did what none may, or the GPU failed.
fn fault(error: &CudaError) -> Failure {
    let reason = if error.is_of_the_kernel() { reason::CONTRACT } else { reason::DEVICE_FAILED };
    Failure { reason, text: error.to_string() }
}
