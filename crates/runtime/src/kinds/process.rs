//! `kind = "process"`: host cores, in a process of its own for each service.

use std::sync::Arc;
use std::time::Duration;

use accel::copy::{BUFFER_BYTES, CopyAgent, CopyThread, HostCopier};
use accel::cpu::thread_count;
use accel::process::{HostBlocks, HostOptions};
use accel::{AccelError, Kernel};
use engine::topology::{DeviceSpec, SPIN_US, STACK_KIB};
use mqueue::MappedMemory;
use mqueue::abi::reason;

use super::{Flags, Key, Kind, Options};
use crate::kernel_file::{self, KernelFile, Target};
use crate::{Device, Failure, HUNG_AFTER, Job};

pub(super) struct Process;

const KEYS: &[Key] = &[Key {
    name: "spin_us",
    unit: "microseconds",
    range: 0..=10_000_000,
    default: SPIN_US,
    multiple_of: 1,
    multiple: "microseconds",
    flag: "--option spin_us=N",
    what: "How long a thread without messages polls its rings, and yields its core to others between two polls, before it sleeps. The next message wakes \
           it, which takes a few microseconds. With more than the time between two messages it uses a whole core.",
}];

impl Kind for Process {
    fn name(&self) -> &'static str {
        "process"
    }

    fn summary(&self) -> &'static str {
        "host cores, in a process of its own for each service"
    }

    fn flags(&self) -> Flags {
        Flags { host_threads: true, stack_kib: true, ..Flags::default() }
    }

    fn keys(&self) -> &'static [Key] {
        KEYS
    }

    fn takes_bundles(&self) -> bool {
        true
    }

    fn device(&self, device: &DeviceSpec, options: Options) -> Result<Box<dyn Device>, String> {
        let Options { threads, cores, stack_kib, hung_after } = options;
        let spin = Duration::from_micros(device.get("spin_us"));
        let host = HostDevice::new(threads, cores).hung_after(hung_after);
        Ok(Box::new(host.stack_kib(stack_kib).spin(spin)))
    }
}

/// Runs `cpu` kernels on threads of this process.
pub struct HostDevice {
    threads: usize,
    cores: Vec<usize>,
    hung_after: Duration,
    stack_kib: usize,
    spin: Duration,
    blocks: Option<HostBlocks>,
    copies: Option<CopyThread>,
}

impl HostDevice {
    /// At most `threads` threads, each on one of `cores` if there are any; 0: as many as suit the blocks ([`thread_count`]).
    pub fn new(threads: usize, cores: Vec<usize>) -> Self {
        Self {
            threads,
            cores,
            hung_after: HUNG_AFTER,
            stack_kib: STACK_KIB,
            spin: Duration::from_micros(SPIN_US),
            blocks: None,
            copies: None,
        }
    }

    /// A block that works on one message for longer hangs: the life ends.
    pub fn hung_after(self, hung_after: Duration) -> Self {
        Self { hung_after, ..self }
    }

    /// The stack of each block in KiB, instead of [`STACK_KIB`].
    pub fn stack_kib(self, stack_kib: usize) -> Self {
        Self { stack_kib, ..self }
    }

    /// How long an idle thread polls before it sleeps.
    pub fn spin(self, spin: Duration) -> Self {
        Self { spin, ..self }
    }
}

impl Device for HostDevice {
    fn kind(&self) -> &str {
        "cpu"
    }

    fn takes_bundles(&self) -> bool {
        true
    }

    fn start(&mut self, jobs: &[Job]) -> Result<(), Failure> {
        let refused = |error: &dyn std::fmt::Display| Failure {
            reason: reason::REFUSED,
            text: error.to_string(),
        };
        let [job] = jobs else { return Err(refused(&"host cores run one service in a process")) };
        let kernel = kernel(job).map_err(|e| refused(&e))?;
        let blocks = job.blocks as usize;
        let options = HostOptions {
            service: job.service.clone(),
            threads: thread_count(self.threads, blocks, &self.cores).min(blocks),
            cores: self.cores.clone(),
            stack_bytes: self.stack_kib << 10,
            spin: self.spin,
            sleep: job.wait(),
            hung_after: self.hung_after,
        };
        let memory = MappedMemory::new(job.memory.clone());
        let started = HostBlocks::start(&memory, &kernel, &job.params, options);
        self.blocks = Some(started.map_err(|e| refused(&e))?);
        let copier = Box::new(HostCopier::new(memory.clone(), BUFFER_BYTES));
        self.copies = CopyThread::serve([CopyAgent::join(&memory, copier)]);
        Ok(())
    }

    fn health(&mut self) -> Result<(), Failure> {
        let health = self.blocks.as_mut().map_or(Ok(()), HostBlocks::health);
        health.map_err(|(reason, text)| Failure { reason, text })
    }

    fn ended(&mut self) -> bool {
        self.blocks.as_ref().is_none_or(HostBlocks::ended)
    }

    fn stop(&mut self, timeout: Duration) -> Result<(), Failure> {
        self.copies = None;
        let Some(blocks) = self.blocks.take() else { return Ok(()) };
        let hung = blocks.stop(timeout);
        if hung.is_empty() {
            return Ok(());
        }
        Err(Failure { reason: reason::HUNG, text: format!("blocks {hung:?} did not end") })
    }
}

/// The kernel of a job on host cores.
fn kernel(job: &Job) -> Result<Arc<Kernel>, AccelError> {
    match (kernel_file::named(&job.kernel), &job.file) {
        (Some((path, name)), Some(copy)) => {
            let file = KernelFile::received(path, Target::Host, copy.clone())?;
            if !job.file_is_tried {
                file.check(name, &mut || false)?;
            }
            Ok(file.load(name)?)
        }
        _ => kernel_file::find(&job.kernel),
    }
}
