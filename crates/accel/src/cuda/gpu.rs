//! A GPU, its launches, and their resources.

use std::ffi::c_int;
use std::path::Path;
use std::time::{Duration, Instant};

use engine::topology::ParamValue;
use mqueue::abi::{ABI_VERSION, BlockArgs, reason, ring_kind, state};
use mqueue::memory::Ordering;
use mqueue::{MappedMemory, Memory, Region, Role, Words};

use super::CudaError;
use super::block_memory::{BlockMemory, Needs};
use super::copier::{CopyResources, StreamCopier};
use super::driver::{
    Context, DeviceAddress, DeviceAttribute, Driver, Function, FunctionAttribute, Grid, Module,
    Stream,
};
use super::kernels::{Image, WARP_BACKENDS_MAX};
use super::occupancy::{Crowded, Demand, all_resident};
use super::watch::{Look, Watch};
use crate::copy::{BUFFER_BYTES, CopyAgent, CopyThread, STOP_TIMEOUT};
use crate::{AccelError, params, reason_name};

/// Minimum compute capability for atomic 16-byte accesses, as major × 10 + minor.
const CAPABILITY_MIN: u32 = 70;
/// Memory behind the addresses of a sink if the driver can map memory; otherwise a sink's memory: twice the longest message.
const SINK_PIECE_BYTES: usize = 32 << 20;
const SINK_MEMORY_BYTES: usize = 2 * mqueue::abi::MESSAGE_BYTES_MAX as usize;
/// The compute modes in which no process, and only one process, may use the GPU.
const MODE_PROHIBITED: u32 = 2;
const MODE_EXCLUSIVE: u32 = 3;

/// Properties of a GPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FoundGpu {
    /// Its number, from 0, under CUDA_VISIBLE_DEVICES.
    pub index: u32,
    /// Its name.
    pub name: String,
    /// Its PCI bus id, independent of CUDA_VISIBLE_DEVICES.
    pub bus_id: String,
    /// Memory in bytes.
    pub memory_bytes: u64,
    /// Multiprocessors.
    pub multiprocessors: u32,
    /// Compute capability, major and minor.
    pub capability: (u32, u32),
    /// The newest CUDA version that the driver supports, major and minor.
    pub driver: (u32, u32),
    /// Why it cannot serve; none if it can.
    pub unfit: Option<String>,
    /// Only one process at a time may use it.
    pub exclusive: bool,
    /// The driver loads kernels at their first launch, which would wait behind a kernel that never ends.
    pub lazy: bool,
}

/// The GPUs visible to this process, with the driver at `library` or the machine's own.
///
/// Loads the driver into this process.
pub fn survey(library: Option<&Path>) -> Result<Vec<FoundGpu>, CudaError> {
    let driver = Driver::load(library)?;
    (0..driver.device_count()?).map(|index| look_at(driver, index)).collect()
}

fn look_at(driver: &Driver, index: u32) -> Result<FoundGpu, CudaError> {
    use DeviceAttribute::*;
    let device = driver.device(index)?;
    let ask = |attribute| driver.device_attribute(device, attribute);
    let version = driver.version()?;
    let capability = (ask(ComputeMajor)?, ask(ComputeMinor)?);
    let bus_id = driver.device_bus_id(device)?;
    let lacks = |what: &str| Some(what.to_owned());
    let unfit = if 10 * capability.0 + capability.1 < CAPABILITY_MIN {
        lacks("is too old: Serval needs compute capability 7.0 or later")
    } else if ask(CanMapHostMemory)? == 0 {
        lacks("cannot read host memory: queues need that")
    } else if ask(ComputeMode)? == MODE_PROHIBITED {
        let remedy = format!("`nvidia-smi -i {bus_id} -c DEFAULT` lets programs use it");
        Some(format!("is in compute mode PROHIBITED: {remedy}"))
    } else if ask(KernelTimeLimit)? != 0 {
        lacks("drives a display, and terminates kernels that run for seconds: use another one")
    } else {
        None
    };
    Ok(FoundGpu {
        index,
        name: driver.device_name(device)?,
        bus_id,
        memory_bytes: driver.device_memory(device)?,
        multiprocessors: ask(Multiprocessors)?,
        capability,
        driver: (version / 1000, version % 1000 / 10),
        unfit,
        exclusive: ask(ComputeMode)? == MODE_EXCLUSIVE,
        lazy: driver.loads_lazily(),
    })
}

/// How services are run.
#[derive(Clone, Debug)]
pub struct Options {
    /// Time limit for all blocks to reach their first receive.
    pub start_within: Duration,
    /// A block that has requests, waits for no backend and made no progress for this long hangs. Must be longer than
    /// any message takes.
    pub hung_after: Duration,
}

impl Default for Options {
    fn default() -> Self {
        let seconds = Duration::from_secs(10);
        Self { start_within: seconds, hung_after: seconds }
    }
}

/// A service to launch.
#[derive(Clone)]
pub struct Service {
    /// Its name in messages.
    pub name: String,
    /// The region, formatted.
    pub region: MappedMemory,
    /// A built-in kernel's name, or `FILE[:NAME]` of a fatbin or cubin.
    pub kernel: String,
    /// The content of `FILE`, if it has already been read.
    pub file: Option<Vec<u8>>,
    /// The parameters of its blocks.
    pub params: Vec<(String, ParamValue)>,
    /// Threads per block, a multiple of 32; none for the kernel's default. A kernel of warps always has 32.
    pub threads: Option<u32>,
}

impl Service {
    fn image(&self) -> Result<Image, CudaError> {
        match &self.file {
            Some(file) => Image::read(&self.kernel, file.clone()),
            None => Image::find(&self.kernel),
        }
    }
}

/// A block that ended or hangs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ended {
    /// Index in the list of services.
    pub service: usize,
    /// The block.
    pub block: u32,
    /// The reason, one of [`mqueue::abi::reason`].
    pub reason: u64,
}

/// A GPU opened by this process.
pub struct Gpu {
    pub(super) driver: &'static Driver,
    device: c_int,
    pub(super) context: Context,
    found: FoundGpu,
}

impl Drop for Gpu {
    fn drop(&mut self) {
        self.driver.release_context(self.device);
    }
}

impl Gpu {
    /// Opens the GPU of this number, with the driver at `library` or the machine's own.
    pub fn open(index: u32, library: Option<&Path>) -> Result<Self, CudaError> {
        Self::open_if(index, library, |found| found.unfit.clone())
    }

    /// Opens a GPU to copy its memory, which every GPU is fit for.
    pub fn open_for_copies(index: u32, library: Option<&Path>) -> Result<Self, CudaError> {
        Self::open_if(index, library, |_| None)
    }

    fn open_if(
        index: u32,
        library: Option<&Path>,
        unfit: impl FnOnce(&FoundGpu) -> Option<String>,
    ) -> Result<Self, CudaError> {
        let driver = Driver::load(library)?;
        let count = driver.device_count()?;
        if index >= count {
            return Err(CudaError::NoGpu { index, count });
        }
        let found = look_at(driver, index)?;
        if let Some(what) = unfit(&found) {
            return Err(CudaError::Unfit { index, name: found.name, what });
        }
        let device = driver.device(index)?;
        let taken = driver.retain_context(device);
        let context = taken.map_err(|error| error.of_gpu(&found.bus_id))?;
        Ok(Self { driver, device, context, found })
    }

    /// Its properties.
    pub fn found(&self) -> &FoundGpu {
        &self.found
    }

    /// Launches services. On return, every block of every service has reached its first receive.
    ///
    /// They are started once, together: allocation is impossible while blocks run.
    pub fn start(
        self,
        services: &[Service],
        options: Options,
    ) -> Result<CudaAccelerator, AccelError> {
        self.driver.bind(self.context)?;
        let sink = Sink::new(&self)?;
        let prepared: Result<Vec<_>, _> =
            services.iter().map(|s| Prepared::new(&self, s, services.len() > 1, &sink)).collect();
        let mut prepared = prepared?;
        check_residency(&self.found, &prepared)?;
        // The driver allocates local memory for each kernel that needs more than all previous ones;
        // with the largest first, only that one allocates.
        let mut order: Vec<usize> = (0..prepared.len()).collect();
        order.sort_by_key(|&at| std::cmp::Reverse(prepared[at].local_bytes));
        let now = Instant::now();
        let mut accelerator = CudaAccelerator {
            copies: None,
            launches: Vec::new(),
            sink: Some(sink),
            gpu: Some(self),
            options,
        };
        let mut failed = None;
        for at in order {
            failed = prepared[at].launch().err();
            if failed.is_some() {
                break;
            }
        }
        accelerator.launches = prepared.drain(..).map(|one| Launch::new(one, now)).collect();
        if let Some(error) = failed {
            return Err(error.into());
        }
        accelerator.await_first_receives()?;
        accelerator.start_copies();
        Ok(accelerator)
    }
}

/// Where kernels write replies that are too long to send.
struct Sink {
    driver: &'static Driver,
    base: DeviceAddress,
    bytes: u64,
    /// One piece of memory is mapped throughout; if false, it is all memory.
    is_mapped: bool,
}

impl Sink {
    /// Longer than any length, or of [`SINK_MEMORY_BYTES`] if the driver cannot map memory: then a longer reply ends its block.
    fn new(gpu: &Gpu) -> Result<Self, CudaError> {
        let driver = gpu.driver;
        if driver.device_attribute(gpu.device, DeviceAttribute::VirtualMemory)? != 0 {
            let piece = SINK_PIECE_BYTES.next_multiple_of(driver.granularity(gpu.device)?);
            let bytes = ((1usize << 32) + 1).next_multiple_of(piece);
            let base = driver.map_again_and_again(gpu.device, piece, bytes)?;
            return Ok(Self { driver, base, bytes: bytes as u64, is_mapped: true });
        }
        let base = driver.allocate(SINK_MEMORY_BYTES)?;
        Ok(Self { driver, base, bytes: SINK_MEMORY_BYTES as u64, is_mapped: false })
    }
}

impl Drop for Sink {
    /// Only when no kernel runs: the driver would wait.
    fn drop(&mut self) {
        if self.is_mapped {
            self.driver.unmap(self.base, self.bytes as usize);
        } else {
            self.driver.free(self.base);
        }
    }
}

/// Memory, code and a stream of one service on the GPU.
struct Held {
    driver: &'static Driver,
    /// The registered memory, which must stay mapped.
    region: MappedMemory,
    module: Option<Module>,
    allocations: Vec<DeviceAddress>,
    /// Copies go through the stream on which the kernel is launched.
    stream: Option<Stream>,
    /// What the copy agent uses while the kernel runs.
    copies: Option<CopyResources>,
}

impl Drop for Held {
    /// Only when none of it is in use: the driver would wait.
    fn drop(&mut self) {
        let copies = self.copies.map(|copies| copies.stream);
        for stream in [self.stream, copies].into_iter().flatten() {
            self.driver.destroy_stream(stream);
        }
        for &address in &self.allocations {
            self.driver.free(address);
        }
        if let Some(module) = self.module {
            self.driver.unload_module(module);
        }
        self.driver.unregister(self.region.base());
    }
}

impl Held {
    fn allocate(&mut self, bytes: u64) -> Result<DeviceAddress, CudaError> {
        let address = self.driver.allocate(bytes as usize)?;
        self.allocations.push(address);
        Ok(address)
    }

    /// Memory of the GPU with this content; 0 for an empty slice.
    fn give<T: Copy>(&mut self, what: &[T]) -> Result<DeviceAddress, CudaError> {
        if what.is_empty() {
            return Ok(0);
        }
        let address = self.allocate(size_of_val(what) as u64)?;
        let stream = self.stream()?;
        self.driver.copy_in(stream, address, what)?;
        Ok(address)
    }

    /// Makes what the copy agent needs.
    fn prepare_copies(&mut self) -> Result<(), CudaError> {
        let buffer = self.allocate(BUFFER_BYTES as u64)?;
        self.copies = Some(CopyResources { stream: self.driver.stream()?, buffer });
        Ok(())
    }

    /// The service's stream.
    fn stream(&mut self) -> Result<Stream, CudaError> {
        let stream = self.stream.map_or_else(|| self.driver.stream(), Ok)?;
        self.stream = Some(stream);
        Ok(stream)
    }
}

/// A service ready to launch.
struct Prepared {
    held: Held,
    service: String,
    kernel: String,
    function: Function,
    stream: Stream,
    region: Region<MappedMemory>,
    grid: Grid,
    of_warps: bool,
    local_bytes: u32,
    blocks_per_multiprocessor: u32,
    arguments: DeviceAddress,
}

impl Prepared {
    /// `beside`: whether the process has other services.
    fn new(gpu: &Gpu, service: &Service, beside: bool, sink: &Sink) -> Result<Self, AccelError> {
        let driver = gpu.driver;
        let image = service.image()?;
        let encoded = params::encode(&service.params)?;
        let region = Region::join(service.region.clone())?;
        let memory = &service.region;
        // SAFETY: `held` keeps the mapping until it unregisters it.
        let base = unsafe { driver.register(memory.base(), memory.len_bytes() as usize) }?;
        let region_memory = memory.clone();
        let mut held = Held {
            driver,
            region: region_memory,
            module: None,
            allocations: Vec::new(),
            stream: None,
            copies: None,
        };
        if region.command_rings() > 0
            && let Err(error) = held.prepare_copies()
        {
            tracing::warn!(service = service.name, "there is no copy agent: {error}");
        }
        // SAFETY: created by the build, or its headers were checked against its length.
        let module = unsafe { driver.load_module(&image.bytes) }?;
        held.module = Some(module);
        let function =
            driver.function(module, &image.symbol()?)?.ok_or_else(|| image.no_kernel())?;
        // Code of another ABI reads its arguments in another layout, and would fault before it checks their version.
        if driver.function(module, &image.mark_of_abi()?)?.is_none() {
            return Err(image.other_abi().into());
        }
        if beside {
            driver.prefer_shared_memory(function)?;
        }
        let ask = |attribute| driver.function_attribute(function, attribute);
        // Its warps are blocks, several of which share a CUDA block: as few as spread over all multiprocessors.
        let of_warps = driver.function(module, &image.mark_of_warps()?)?.is_some();
        let clients = region.entries().iter().filter(|ring| ring.kind == ring_kind::CLIENT_RX);
        let backends = clients.map(|ring| ring.index + 1).max().unwrap_or(0);
        if of_warps && backends > WARP_BACKENDS_MAX {
            return Err(CudaError::WarpBackends { kernel: image.name, backends }.into());
        }
        let threads_max = ask(FunctionAttribute::ThreadsMax)?;
        let spread = region.block_count().div_ceil(gpu.found.multiprocessors.max(1));
        let rows = if of_warps { spread.clamp(1, (threads_max / 32).max(1)) } else { 1 };
        // The setting applies to all services of the accelerator, and those of warps have no choice.
        let asked = service.threads.filter(|_| !of_warps);
        // A default is never too large.
        let usual = image.threads().min(threads_max / 32 * 32);
        let threads = asked.unwrap_or(if of_warps { 32 } else { usual });
        let max = u64::from(threads_max);
        if !(32..=max).contains(&u64::from(threads)) || threads % 32 != 0 {
            let (what, value) = ("threads of a block (in whole 32)", threads.into());
            return Err(AccelError::Range { what, value, min: 32, max });
        }
        let longest = region.entries().iter().map(|entry| entry.message_bytes_max).max();
        let staging = BlockMemory::of(Needs {
            longest: longest.unwrap_or(0),
            mqueues: region.mqueues_per_block_max(),
            bundles: !region.pools().is_empty(),
            rows,
            spread,
            static_bytes: ask(FunctionAttribute::StaticSharedBytes)?.into(),
        });
        let rows_bytes = staging.bytes * u64::from(rows);
        let grid = Grid {
            blocks: region.block_count().div_ceil(rows),
            threads,
            rows,
            shared_bytes: if staging.shared { rows_bytes as u32 } else { 0 },
        };
        // None: the launch provides shared memory for it.
        let staging_base = if staging.shared {
            None
        } else {
            Some(held.allocate(staging.bytes * u64::from(region.block_count()))?)
        };
        let common = BlockArgs {
            abi_version: ABI_VERSION,
            block: 0,
            param_count: encoded.count,
            staging_stride: staging.stride,
            ring_first: 0,
            ring_count: 0,
            region: base,
            region_bytes: region.bytes(),
            params: held.give(&encoded.words)?,
            staging: staging_base.unwrap_or(0),
            staging_bytes: staging.bytes,
            wait: 0,
            wait_self: 0,
            now: 0,
            budget: 0,
            sink: sink.base,
            sink_bytes: sink.bytes,
        };
        let arguments = give_arguments(&mut held, common, grid, &region)?;
        Ok(Self {
            service: service.name.clone(),
            kernel: image.name,
            function,
            stream: held.stream()?,
            grid,
            of_warps,
            local_bytes: ask(FunctionAttribute::LocalBytes)?,
            blocks_per_multiprocessor: driver.resident_blocks(function, grid)?,
            arguments,
            region,
            held,
        })
    }

    fn demand(&self) -> Demand {
        Demand {
            blocks: self.grid.blocks,
            blocks_per_multiprocessor: self.blocks_per_multiprocessor,
        }
    }

    fn launch(&mut self) -> Result<(), CudaError> {
        // SAFETY: kernels of SERVAL_KERNEL take the address of their arguments, which exist for
        // every block.
        unsafe { self.held.driver.launch(self.function, self.grid, self.stream, self.arguments) }
    }
}

/// Writes the arguments of every block to the GPU's memory: the common part, and the address of each block's staging. Surplus
/// rows of the last CUDA block get a block number outside the region.
fn give_arguments(
    held: &mut Held,
    common: BlockArgs,
    grid: Grid,
    region: &Region<MappedMemory>,
) -> Result<DeviceAddress, CudaError> {
    let staging_of = |block: u32| match common.staging {
        0 => 0,
        base => base + u64::from(block) * common.staging_bytes,
    };
    let entries_of = |block: u32| match block < region.block_count() {
        true => region.directory_of(block),
        false => 0..0,
    };
    let of = |block: u32| {
        let (staging, entries) = (staging_of(block), entries_of(block));
        let (ring_first, ring_count) = (entries.start, entries.len() as u32);
        BlockArgs { block, staging, ring_first, ring_count, ..common }
    };
    let all: Vec<BlockArgs> = (0..grid.blocks * grid.rows).map(of).collect();
    held.give(&all)
}

/// Rejects services whose blocks would not all be resident.
fn check_residency(gpu: &FoundGpu, prepared: &[Prepared]) -> Result<(), CudaError> {
    let demands: Vec<Demand> = prepared.iter().map(Prepared::demand).collect();
    let Err(crowded) = all_resident(gpu.multiprocessors, &demands) else { return Ok(()) };
    let parts: Vec<String> = prepared.iter().map(|one| one.arithmetic(gpu)).collect();
    let choice = prepared.iter().any(|one| !one.of_warps);
    Err(CudaError::NotResident(format!(
        "the blocks do not all fit on {} ({} multiprocessors) at the same time: {}{}; one that waits for \
         room would never serve its mqueue, so use fewer mqueues{}",
        gpu.name,
        gpu.multiprocessors,
        parts.join("; "),
        rule(gpu, prepared, crowded),
        if choice { " or fewer threads" } else { "" }
    )))
}

/// The rule that rejected services each of which would fit alone.
fn rule(gpu: &FoundGpu, prepared: &[Prepared], crowded: Crowded) -> String {
    let Some((beside, room)) = crowded.beside else { return String::new() };
    let (one, all) = (&prepared[crowded.demand], gpu.multiprocessors);
    let n = one.blocks_per_multiprocessor;
    format!(
        "; together, a block of service `{}`, which takes up to 1/{n} of a multiprocessor, is sure to fit only if the \
         others take no more than {all} x (1 - 1/{n}) = {room:.2} multiprocessors, and they may take {beside:.2}",
        one.service
    )
}

impl Prepared {
    fn arithmetic(&self, gpu: &FoundGpu) -> String {
        let n = self.blocks_per_multiprocessor * self.grid.rows;
        format!(
            "{} blocks of `{}` (service `{}`) with {} threads, of which {n} fit on a multiprocessor, {} in all",
            self.region.block_count(),
            self.kernel,
            self.service,
            self.grid.threads,
            u64::from(n) * u64::from(gpu.multiprocessors)
        )
    }
}

/// A service whose blocks run.
struct Launch {
    held: Held,
    service: String,
    kernel: String,
    stream: Stream,
    region: Region<MappedMemory>,
    words: Words<MappedMemory>,
    /// By block; none once its end was reported.
    watches: Vec<Option<Watch>>,
    /// The kernel has left the GPU.
    done: bool,
}

impl Launch {
    fn new(prepared: Prepared, now: Instant) -> Self {
        let Prepared { held, service, kernel, stream, region, .. } = prepared;
        let words = region.words();
        let watches = (0..region.block_count()).map(|_| Some(Watch::new(now))).collect();
        Self { held, service, kernel, stream, region, words, watches, done: false }
    }

    /// Describes those of its blocks that have not reached their first receive; none if all have.
    fn absent(&self) -> Option<String> {
        let blocks = 0..self.region.block_count();
        let absent: Vec<u32> =
            blocks.filter(|block| self.words.block_state(*block) == state::ABSENT).collect();
        let (service, kernel) = (&self.service, &self.kernel);
        absent.first().map(|first| {
            let (absent, all) = (absent.len(), self.region.block_count());
            format!("{absent} of {all} blocks of service `{service}` (kernel `{kernel}`), the first is block {first}")
        })
    }

    fn look_at(&self, block: u32) -> Look {
        let (server, others) = self.region.mqueues_of(block).split_first().expect("one server");
        let [rx, tx] = self.rings(*server);
        let counts = self.words.block(block);
        Look {
            waiting: rx.held(),
            owed: others.iter().any(|mqueue| self.owes(*mqueue)),
            credit: tx.depth.saturating_sub(tx.held()),
            moved: [rx.tail, tx.head, counts.received, counts.sent, counts.dropped],
        }
    }

    /// Whether the engine still has to answer in a client mqueue: each request that it took, at the latest by a time-out, and those
    /// that it can take, because their answers have room. A block with sockets may always wait for a connection.
    fn owes(&self, mqueue: u32) -> bool {
        if self.region.role(mqueue).1 == Role::Sockets {
            return true;
        }
        let [answers, questions] = self.rings(mqueue);
        questions.tail > answers.head || (questions.held() > 0 && answers.held() < answers.depth)
    }

    /// The RX and the TX ring of an mqueue.
    fn rings(&self, mqueue: u32) -> [RingWords; 2] {
        self.region.rings_of(mqueue).map(|entry| {
            let load = |offset| self.region.memory().load(offset, Ordering::Relaxed);
            let (head, tail) = (load(entry.head_offset), load(entry.tail_offset));
            RingWords { head, tail, depth: entry.depth.into() }
        })
    }
}

/// A ring's words at one moment.
struct RingWords {
    head: u64,
    tail: u64,
    depth: u64,
}

impl RingWords {
    /// Messages that were published and not released.
    fn held(&self) -> u64 {
        self.head.wrapping_sub(self.tail)
    }
}

/// Services on a GPU. Dropping it releases the GPU if their blocks and copies have ended; otherwise everything is left
/// to the end of the process.
pub struct CudaAccelerator {
    /// Ends before anything that it uses is released; if it hangs, nothing is.
    copies: Option<CopyThread>,
    launches: Vec<Launch>,
    /// Until it is released, before the GPU.
    sink: Option<Sink>,
    /// Until it is released.
    gpu: Option<Gpu>,
    options: Options,
}

impl CudaAccelerator {
    /// Starts the copy agents of the services whose regions have command rings.
    fn start_copies(&mut self) {
        let gpu = self.gpu.as_ref().expect("given back by drop only");
        self.copies =
            CopyThread::serve(self.launches.iter().filter_map(|Launch { held, .. }| {
                let region = &held.region;
                let copier =
                    StreamCopier::new(gpu.driver, gpu.context, held.copies?, region.clone());
                Some(CopyAgent::join(region, Box::new(copier)))
            }));
    }

    fn await_first_receives(&mut self) -> Result<(), AccelError> {
        let deadline = Instant::now() + self.options.start_within;
        loop {
            self.query()?;
            let mut started = true;
            for launch in &self.launches {
                for block in 0..launch.region.block_count() {
                    let words = launch.words.block(block);
                    let kernel = || launch.kernel.clone();
                    match (words.state, words.reason) {
                        (state::ENDED, reason::REFUSED) => {
                            return Err(AccelError::Refused { kernel: kernel(), block });
                        }
                        (state::ENDED, reason) if reason > reason::STOPPED => {
                            let reason = reason_name(reason);
                            return Err(AccelError::Returned { kernel: kernel(), block, reason });
                        }
                        (state::ABSENT, _) => started = false,
                        _ => {}
                    }
                }
            }
            if started {
                return Ok(());
            }
            if Instant::now() >= deadline {
                let absent: Vec<String> = self.launches.iter().filter_map(Launch::absent).collect();
                let seconds = self.options.start_within.as_secs();
                return Err(AccelError::Absent { blocks: absent.join("; "), seconds });
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Asks the driver which kernels have left the GPU.
    fn query(&mut self) -> Result<(), CudaError> {
        let gpu = self.gpu.as_ref().expect("released by drop only");
        gpu.driver.bind(gpu.context)?;
        for launch in &mut self.launches {
            launch.done = launch.done || gpu.driver.is_done(launch.stream)?;
        }
        Ok(())
    }

    /// Checks every block, and appends those that ended or began to hang since the last call. Takes
    /// microseconds and never waits; calling it every ten milliseconds is enough, and time between two calls counts for at most a
    /// quarter of `hung_after`. An error is the fault of the GPU or of a kernel; after it nothing can be served any more, and the
    /// process should end.
    pub fn poll(&mut self, ended: &mut Vec<Ended>) -> Result<(), CudaError> {
        self.query()?;
        let now = Instant::now();
        for (service, launch) in self.launches.iter_mut().enumerate() {
            for block in 0..launch.region.block_count() {
                if launch.watches[block as usize].is_none() {
                    continue;
                }
                let words = launch.words.block(block);
                let look = launch.look_at(block);
                let watch = launch.watches[block as usize].as_mut().expect("it was just there");
                let reason = if words.state == state::ENDED {
                    words.reason
                } else if launch.done {
                    reason::RETURNED
                } else if watch.is_hung(look, now, self.options.hung_after) {
                    reason::HUNG
                } else {
                    continue;
                };
                launch.watches[block as usize] = None;
                ended.push(Ended { service, block, reason });
            }
        }
        Ok(())
    }

    /// Services of which blocks are still on the GPU, as of the last [`Self::poll`].
    pub fn running(&self) -> usize {
        self.launches.iter().filter(|launch| !launch.done).count()
    }

    /// Whether no copy is in flight. The copy engines use the region and the buffer of a service until then.
    fn copies_have_ended(&self) -> bool {
        let gpu = self.gpu.as_ref().expect("released by drop only");
        let mut copies = self.launches.iter().filter_map(|launch| launch.held.copies);
        copies.all(|copies| matches!(gpu.driver.is_done(copies.stream), Ok(true)))
    }

    /// Waits until all blocks have left the GPU, at most for `limit`; their stop words must have been set.
    /// Returns whether they have.
    pub fn join(&mut self, limit: Duration) -> Result<bool, CudaError> {
        let deadline = Instant::now() + limit;
        loop {
            self.query()?;
            if self.running() == 0 {
                return Ok(true);
            }
            if Instant::now() >= deadline {
                return Ok(false);
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

impl Drop for CudaAccelerator {
    fn drop(&mut self) {
        let stopped = self.copies.take().is_none_or(|copies| copies.stop(STOP_TIMEOUT));
        if stopped && self.query().is_ok() && self.running() == 0 && self.copies_have_ended() {
            return;
        }
        // Freeing anything would wait for the blocks and copies, and they may write to the region as long as they run.
        for launch in self.launches.drain(..) {
            std::mem::forget(launch.held);
        }
        std::mem::forget(self.sink.take());
        std::mem::forget(self.gpu.take());
    }
}
