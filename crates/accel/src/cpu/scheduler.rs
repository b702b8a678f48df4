//! The scheduler: the coroutines of one thread, and the order in which they are resumed. See [`super`].

use std::cell::{Cell, UnsafeCell};
use std::ffi::c_void;
use std::mem::ManuallyDrop;
use std::ops::Range;
use std::sync::Arc;

use corosensei::{Coroutine, CoroutineResult, Yielder};
use engine::topology::ParamValue;
use mqueue::abi::{ABI_VERSION, BlockArgs, NO_DEADLINE, RingEntry, reason, state, stop, wait};
use mqueue::{MappedMemory, Region, Role, Words};

use super::stack::{BlockStack, Stacks};
use super::staging::{Staging, sink};
use super::timers::Timers;
use super::{Clock, Options};
use crate::crash::{self, NO_BLOCK, OnScene, Scene};
use crate::kernel::Entry;
use crate::params::{self, EncodedParams};
use crate::{AccelError, Kernel, reason_name};

/// Callbacks of a scheduler's owner during a run.
pub(super) trait Observer {
    /// A block is about to be resumed.
    #[inline]
    fn resuming(&mut self, _block: u32) {}
    /// The mqueue's TX ring has new messages.
    fn touched(&mut self, mqueue: u32);
}

impl Observer for Vec<u32> {
    #[inline]
    fn touched(&mut self, mqueue: u32) {
        self.push(mqueue);
    }
}

/// [`Block::why`] of a block that must not be resumed.
const OVER: u32 = u32::MAX;
/// Lines of a suspended block's stack that are prefetched.
const FRAME_LINES: usize = 10;
/// The role of an mqueue of the region in this scheduler.
#[derive(Clone, Copy)]
struct MqueueRole {
    /// Its block; [`FOREIGN`] for none.
    block: u32,
    /// The wait reason of a block that waits for its messages: [`wait::RX`] or [`wait::BACKEND`].
    waits_for: u32,
}

/// Not a block of this scheduler.
const FOREIGN: u32 = u32::MAX;
/// How often a block that ignores the stop word is resumed before it is abandoned.
const LAST_RESUMES: u32 = 256;

/// A block: the data that a resume accesses, on cache lines of its own.
#[repr(C, align(128))]
struct Block {
    /// Resumed only by the scheduler, never from inside. Never dropped: a kernel's frames
    /// cannot be unwound from outside.
    coroutine: UnsafeCell<ManuallyDrop<Coroutine<(), (), (), BlockStack>>>,
    /// On the block's own stack; valid while the coroutine runs.
    yielder: Cell<*const Yielder<(), ()>>,
    /// The lowest of the block's frames while it is suspended: only an address.
    frames: Cell<*const u8>,
    deadline: Cell<u64>,
    /// One of [`wait`], or [`OVER`].
    why: Cell<u32>,
    /// In one of the scheduler's lists.
    queued: Cell<bool>,
    /// TX head of the server mqueue as last reported.
    tx_head: Cell<u64>,
    /// Index in the region.
    number: u32,
    /// Its server mqueue.
    mqueue: u32,
    /// Its client mqueues and socket mqueue among the scheduler's.
    clients: Range<u32>,
    clock: *const Clock,
}

impl Block {
    /// Prefetches the lines of the block's frames in `wait` and the device library while the
    /// previous block runs (measured on echo with 240 blocks: from 61 to 53 ns per drive and message, from 73 to 58
    /// when other work has used the L2 cache in between).
    #[inline]
    fn prefetch(&self) {
        for line in 0..FRAME_LINES {
            let at = self.frames.get().wrapping_add(64 * line);
            // SAFETY: a prefetch has no visible effect and never faults.
            #[cfg(target_arch = "x86_64")]
            unsafe {
                use core::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
                _mm_prefetch::<_MM_HINT_T0>(at.cast());
            }
            // SAFETY: as above.
            #[cfg(target_arch = "aarch64")]
            unsafe {
                std::arch::asm!("prfm pldl1keep, [{}]", in(reg) at, options(nomem, nostack, preserves_flags));
            }
        }
    }
}

/// The coroutines of one thread.
///
/// Dropping it stops them; those that do not end are leaked with everything they may refer to.
pub(super) struct Scheduler {
    body: ManuallyDrop<Body>,
}

struct Body {
    words: Words<MappedMemory>,
    blocks: Box<[Block]>,
    /// By mqueue of the region.
    roles: Box<[MqueueRole]>,
    /// To be resumed in this run, in order.
    ready: Vec<u32>,
    /// To be resumed in the next run, whatever happens.
    next: Vec<u32>,
    timers: Timers,
    /// The stop word as last read.
    stop: u64,
    /// Blocks that have not ended.
    running: usize,
    /// Blocks that ended but stay suspended: they broke their contract.
    abandoned: usize,
    /// Mqueues whose TX ring got messages during the start: reported in the first run.
    early: Vec<u32>,
    /// Client and socket mqueues of all blocks, those of a block together, and their TX heads as last reported.
    clients: Box<[(u32, u64)]>,
    /// Blocks that ended since the owner last asked, and their reasons.
    ended: Vec<(u32, u64)>,
    staging: Staging,
    /// The running block, for crash reports.
    scene: Scene,
    // Not accessed after the start, but referenced by the blocks.
    _args: Box<[BlockArgs]>,
    _stacks: Stacks,
    _params: EncodedParams,
    _clock: Box<Clock>,
    _kernel: Arc<Kernel>,
    _memory: MappedMemory,
}

// SAFETY: the raw pointers point into memory that Body owns. Suspended kernels must not change
// threads: the owners of a scheduler resume it only on the thread that started it, which WorkerBlocks
// checks and the threads of ThreadBlocks ensure by never passing theirs on.
unsafe impl Send for Scheduler {}

/// Suspends the block that calls it: [`BlockArgs::wait`].
unsafe extern "C" fn wait_function(wait_self: *mut c_void, why: u32, deadline_ns: u64) {
    // SAFETY: the block's own args have the address of its Block, which lives as long as its
    // coroutine; only Cells of it are used while the coroutine runs.
    let block = unsafe { &*wait_self.cast::<Block>() };
    let here = 0u8;
    block.frames.set(std::hint::black_box(&raw const here));
    block.why.set(why);
    block.deadline.set(deadline_ns);
    // SAFETY: set by the running coroutine: a block waits on its own stack.
    unsafe { &*block.yielder.get() }.suspend(());
}

/// Returns the time of a custom clock to a block: [`BlockArgs::now`].
unsafe extern "C" fn now_function(wait_self: *mut c_void) -> u64 {
    // SAFETY: as in wait_function; the clock lives as long as the block.
    match unsafe { &*(*wait_self.cast::<Block>()).clock } {
        Clock::Custom(now) => now(),
        Clock::Monotonic => unreachable!("kernels read this clock themselves"),
    }
}

/// The arguments of a coroutine.
struct Start {
    entry: Entry,
    args: *const BlockArgs,
    block: *const Block,
}

impl Start {
    fn coroutine(self, stack: BlockStack) -> Coroutine<(), (), (), BlockStack> {
        Coroutine::with_stack(stack, move |yielder, ()| {
            // SAFETY: the Block lives as long as its coroutine.
            unsafe { &*self.block }.yielder.set(yielder);
            // SAFETY: the entry of a kernel library of our ABI, with arguments that satisfy
            // BlockArgs and live as long as the coroutine.
            unsafe { (self.entry)(self.args) };
        })
    }
}

impl Scheduler {
    /// Allocates everything for `blocks` of the region, on any thread; none of them runs before
    /// [`Self::begin`].
    pub(super) fn prepare(
        memory: MappedMemory,
        kernel: Arc<Kernel>,
        params: &[(String, ParamValue)],
        blocks: &[u32],
        options: &Options,
    ) -> Result<Self, AccelError> {
        options.check()?;
        let params = params::encode(params)?;
        let region = Region::join(memory.clone())?;
        check_blocks(blocks, region.block_count())?;
        let stride = staging_stride(region.entries());
        let buffers = 2 * region.mqueues_per_block_max() as usize * stride as usize;
        let staging_bytes = buffers + if region.pools().is_empty() { 0 } else { BATCH_BYTES };
        let staging = Staging::new(blocks.len(), staging_bytes);
        let os = |error| AccelError::Os { what: "map the blocks' stacks", error };
        let stacks = Stacks::new(blocks.len(), options.stack_bytes).map_err(os)?;
        let clock = Box::new(options.clock.clone());
        let mut args = block_args(blocks, &region, &params, &staging, stride, options)?;
        let words = region.words();
        let clients = blocks.iter().flat_map(|block| &region.mqueues_of(*block)[1..]);
        let clients = clients.map(|&mqueue| (mqueue, words.tx_head(mqueue))).collect();
        let scene = Scene {
            service: options.service.clone(),
            kernel: kernel.name().to_owned(),
            running: Cell::new(NO_BLOCK),
            blocks: blocks.into(),
            guards: stacks.guards(),
            stack_bytes: options.stack_bytes,
        };
        let places = place_blocks(&mut args, &region, &kernel, &stacks, &clock);
        Ok(Self {
            body: ManuallyDrop::new(Body {
                stop: words.stop(),
                words,
                roles: roles(&region, blocks),
                ready: Vec::with_capacity(blocks.len()),
                next: Vec::with_capacity(blocks.len()),
                timers: Timers::new(blocks.len()),
                running: 0,
                abandoned: 0,
                early: Vec::new(),
                clients,
                ended: Vec::with_capacity(blocks.len()),
                blocks: places,
                staging,
                scene,
                _args: args,
                _stacks: stacks,
                _params: params,
                _clock: clock,
                _kernel: kernel,
                _memory: memory,
            }),
        })
    }

    /// Runs each block until it waits for the first time, on the thread that will run it.
    pub(super) fn begin(&mut self) -> Result<(), AccelError> {
        self.begin_observed(|_| ())
    }

    /// The same; calls `resuming` with the index of each block before the block runs.
    pub(super) fn begin_observed(&mut self, resuming: impl Fn(u32)) -> Result<(), AccelError> {
        crash::watch_this_thread();
        self.body.running = self.body.blocks.len();
        self.body.start(resuming)
    }

    /// Resumes every block that is due once: its mqueue is one of `rang`, its deadline has passed,
    /// it only yielded in the last run, or the stop word has changed.
    #[inline]
    pub(super) fn run(&mut self, now_ns: u64, rang: &[u32], observer: &mut impl Observer) {
        self.body.run(now_ns, rang, observer);
    }

    /// When the next run is due if no mqueue is signalled: 0 immediately, [`NO_DEADLINE`] never.
    #[inline]
    pub(super) fn due_at(&self) -> u64 {
        if !self.body.next.is_empty() || !self.body.early.is_empty() {
            return 0;
        }
        self.body.timers.earliest().unwrap_or(NO_DEADLINE)
    }

    /// Whether the next run will find another stop word.
    #[inline]
    pub(super) fn stop_changed(&self) -> bool {
        self.body.words.stop() != self.body.stop
    }

    /// Resumes every block in the next run.
    pub(super) fn resume_all(&mut self) {
        self.body.resume_all();
    }

    /// The region's words.
    pub(super) fn words(&self) -> Words<MappedMemory> {
        self.body.words.clone()
    }

    /// Blocks that have not ended.
    pub(super) fn running(&self) -> usize {
        self.body.running
    }

    /// Blocks that ended since the last call, with their reasons.
    #[inline]
    pub(super) fn ended(&mut self) -> &mut Vec<(u32, u64)> {
        &mut self.body.ended
    }
}

impl Drop for Scheduler {
    fn drop(&mut self) {
        if self.body.running > 0 {
            self.body.shut_down();
        }
        if self.body.running + self.body.abandoned == 0 {
            // SAFETY: not used afterwards. Every coroutine has returned, so nothing refers to stacks,
            // staging or arguments.
            unsafe { ManuallyDrop::drop(&mut self.body) };
        } else {
            tracing::warn!(
                blocks = self.body.running + self.body.abandoned,
                kernel = self.body._kernel.name(),
                "blocks did not end: their memory is leaked"
            );
        }
    }
}

impl Body {
    /// Resumes every block for the first time, and checks that it got to its first wait.
    fn start(&mut self, resuming: impl Fn(u32)) -> Result<(), AccelError> {
        let _scene = OnScene::enter(&raw const self.scene);
        let mut touched = Vec::new();
        for i in 0..self.blocks.len() {
            let block = self.blocks[i].number;
            resuming(block);
            self.resume(i, &mut touched);
            let over = self.blocks[i].why.get() == OVER;
            // A block that was stopped before its first wait does not wait.
            if over && self.words.block(block).reason == reason::STOPPED {
                continue;
            }
            if over || self.words.block_state(block) != state::READY {
                let kernel = self._kernel.name().to_owned();
                return Err(match self.words.block(block).reason {
                    reason::REFUSED => AccelError::Refused { kernel, block },
                    reason => AccelError::Returned { kernel, block, reason: reason_name(reason) },
                });
            }
        }
        self.early = touched;
        Ok(())
    }

    #[inline]
    fn run(&mut self, now_ns: u64, rang: &[u32], observer: &mut impl Observer) {
        let _scene = OnScene::enter(&raw const self.scene);
        std::mem::swap(&mut self.ready, &mut self.next);
        let stop = self.words.stop();
        if stop != self.stop && !mutants::on("ignore_stop") {
            self.stop = stop;
            // The entries of `next` are already in `ready`, so both fit.
            self.resume_all();
            self.ready.append(&mut self.next);
        }
        for mqueue in self.early.drain(..) {
            observer.touched(mqueue);
        }
        while let Some(i) = self.timers.expired(now_ns) {
            self.deadline_came(i, now_ns);
        }
        for &mqueue in rang {
            self.queue_rung(mqueue);
        }
        for at in 0..self.ready.len() {
            let i = self.ready[at] as usize;
            if let Some(&next) = self.ready.get(at + 1) {
                self.blocks[next as usize].prefetch();
            }
            self.resume(i, observer);
        }
        self.ready.clear();
    }

    #[inline]
    fn queue(&mut self, i: u32) {
        let block = &self.blocks[i as usize];
        if !block.queued.replace(true) {
            self.ready.push(i);
        }
    }

    #[inline]
    fn queue_rung(&mut self, mqueue: u32) {
        let Some(&MqueueRole { block, waits_for }) = self.roles.get(mqueue as usize) else {
            return;
        };
        let Some(waiting) = self.blocks.get(block as usize) else { return };
        // A block that waits for something else checks this ring before it waits for it.
        if waiting.why.get() == waits_for {
            self.queue(block);
        }
    }

    #[cold]
    fn resume_all(&mut self) {
        for (i, block) in self.blocks.iter().enumerate() {
            if block.why.get() != OVER && !block.queued.replace(true) {
                self.next.push(i as u32);
            }
        }
    }

    fn deadline_came(&mut self, i: u32, now_ns: u64) {
        let block = &self.blocks[i as usize];
        if matches!(block.why.get(), wait::RX | wait::BACKEND | wait::TIME) {
            match block.deadline.get() {
                NO_DEADLINE => {}
                later if later > now_ns => self.timers.arm(i, later),
                _ => self.queue(i),
            }
        }
    }

    #[inline]
    fn resume(&mut self, i: usize, observer: &mut impl Observer) {
        let block = &self.blocks[i];
        observer.resuming(block.number);
        block.queued.set(false);
        // SAFETY: the only reference: the block's own code accesses only the Cells.
        let coroutine = unsafe { &mut *block.coroutine.get() };
        self.scene.running.set(i as u32);
        let result = coroutine.resume(());
        self.scene.running.set(NO_BLOCK);
        let head = self.words.tx_head(block.mqueue);
        if block.tx_head.replace(head) != head {
            observer.touched(block.mqueue);
        }
        if !block.clients.is_empty() {
            self.tell_clients(i, observer);
        }
        if matches!(result, CoroutineResult::Return(())) {
            self.end(i, reason::RETURNED);
        } else if !self.staging.intact(i) {
            self.end(i, reason::CONTRACT);
        } else {
            self.wait(i);
        }
    }

    /// Registers a suspended block for the event it waits for.
    #[inline]
    fn wait(&mut self, i: usize) {
        let block = &self.blocks[i];
        match block.why.get() {
            wait::RX | wait::BACKEND | wait::TIME => {
                if block.deadline.get() != NO_DEADLINE {
                    self.timers.arm(i as u32, block.deadline.get());
                }
            }
            _ => {
                block.queued.set(true);
                self.next.push(i as u32);
            }
        }
    }

    fn tell_clients(&mut self, i: usize, observer: &mut impl Observer) {
        let Range { start, end } = self.blocks[i].clients;
        for (mqueue, seen) in &mut self.clients[start as usize..end as usize] {
            let head = self.words.tx_head(*mqueue);
            if std::mem::replace(seen, head) != head {
                observer.touched(*mqueue);
            }
        }
    }

    /// Marks the block as ended. The reason is the block's own; `otherwise` if it has none.
    #[cold]
    fn end(&mut self, i: usize, otherwise: u64) {
        let block = self.blocks[i].number;
        self.blocks[i].why.set(OVER);
        let told = self.words.block(block);
        let mut why = told.reason;
        if told.state != state::ENDED || otherwise == reason::CONTRACT {
            why = otherwise;
            self.words.set_block(block, state::ENDED, why);
        }
        self.running -= 1;
        if otherwise == reason::CONTRACT {
            self.abandoned += 1;
            tracing::error!(
                block,
                kernel = self._kernel.name(),
                "the block wrote past its staging memory"
            );
        }
        self.ended.push((block, why));
    }

    /// Asks every block to end immediately.
    fn shut_down(&mut self) {
        let _scene = OnScene::enter(&raw const self.scene);
        self.words.set_stop(stop::NOW);
        let mut ignored = Vec::new();
        for i in 0..self.blocks.len() {
            for _ in 0..LAST_RESUMES {
                if self.blocks[i].why.get() == OVER {
                    break;
                }
                self.resume(i, &mut ignored);
                ignored.clear();
            }
        }
    }
}

/// The arguments of each block, without its own address.
fn block_args(
    blocks: &[u32],
    region: &Region<MappedMemory>,
    params: &EncodedParams,
    staging: &Staging,
    staging_stride: u32,
    options: &Options,
) -> Result<Box<[BlockArgs]>, AccelError> {
    let (sink, sink_bytes) = sink()?;
    let args = |(i, &block): (usize, &u32)| BlockArgs {
        abi_version: ABI_VERSION,
        block,
        param_count: params.count,
        staging_stride,
        ring_first: region.directory_of(block).start,
        ring_count: region.directory_of(block).len() as u32,
        region: region.memory().base().expose_provenance() as u64,
        region_bytes: region.bytes(),
        params: params.words.as_ptr().expose_provenance() as u64,
        staging: staging.address(i),
        staging_bytes: staging.block_bytes(),
        wait: wait_function as *const () as u64,
        wait_self: 0,
        now: match options.clock {
            Clock::Monotonic => 0,
            Clock::Custom(_) => now_function as *const () as u64,
        },
        budget: options.budget,
        sink,
        sink_bytes,
    };
    Ok(blocks.iter().enumerate().map(args).collect())
}

/// Builds the blocks and completes their arguments, which point to them.
fn place_blocks(
    args: &mut [BlockArgs],
    region: &Region<MappedMemory>,
    kernel: &Kernel,
    stacks: &Stacks,
    clock: &Clock,
) -> Box<[Block]> {
    let words = region.words();
    let mut clients = 0;
    let mut places = Box::new_uninit_slice(args.len());
    for (i, (place, args)) in places.iter_mut().zip(args).enumerate() {
        let block: *mut Block = place.as_mut_ptr();
        args.wait_self = block.expose_provenance() as u64;
        let mqueues = region.mqueues_of(args.block);
        let start = Start { entry: kernel.entry(), args, block };
        // SAFETY: stack `i` is given to this coroutine only, and the stacks outlive it in Body.
        let coroutine = start.coroutine(unsafe { stacks.get(i) });
        place.write(Block {
            coroutine: UnsafeCell::new(ManuallyDrop::new(coroutine)),
            yielder: Cell::new(std::ptr::null()),
            frames: Cell::new(std::ptr::null()),
            deadline: Cell::new(NO_DEADLINE),
            why: Cell::new(wait::BUDGET),
            queued: Cell::new(false),
            tx_head: Cell::new(words.tx_head(mqueues[0])),
            number: args.block,
            mqueue: mqueues[0],
            clients: clients..clients + mqueues.len() as u32 - 1,
            clock,
        });
        clients += mqueues.len() as u32 - 1;
    }
    // SAFETY: every element was written.
    unsafe { places.assume_init() }
}

/// What each mqueue of the region is to a scheduler of these blocks.
fn roles(region: &Region<MappedMemory>, blocks: &[u32]) -> Box<[MqueueRole]> {
    let foreign = MqueueRole { block: FOREIGN, waits_for: wait::RX };
    let mut roles = vec![foreign; region.mqueue_count() as usize];
    for (block, number) in (0..).zip(blocks) {
        for &mqueue in region.mqueues_of(*number) {
            let waits_for = match region.role(mqueue).1 {
                Role::Server => wait::RX,
                Role::Client(_) | Role::Sockets => wait::BACKEND,
            };
            roles[mqueue as usize] = MqueueRole { block, waits_for };
        }
    }
    roles.into_boxed_slice()
}

pub(super) fn check_blocks(blocks: &[u32], count: u32) -> Result<(), AccelError> {
    let mut given = vec![false; count as usize];
    for &block in blocks {
        match given.get_mut(block as usize) {
            None => return Err(AccelError::Block { block, what: "is not in the region", count }),
            Some(true) => return Err(AccelError::Block { block, what: "is given twice", count }),
            Some(seen) => *seen = true,
        }
    }
    Ok(())
}

/// Bytes of a block's staging for messages of bundles that a kernel takes at once, and the replies to them. More would save little and
/// use more of the caches.
const BATCH_BYTES: usize = 4096;

/// Bytes of one staging buffer: the longest message of any ring, in whole lines.
fn staging_stride(entries: &[RingEntry]) -> u32 {
    let longest = entries.iter().map(|entry| entry.message_bytes_max).max().unwrap_or(1);
    longest.next_multiple_of(64)
}
