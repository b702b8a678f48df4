//! Creation of regions.

use std::sync::Arc;

use engine::BlockEnds;
use engine::commands::{COMMANDS_IN_FLIGHT, CommandRings};
use engine::topology::Service;
use mqueue::{MappedMemory, Region, Words};
use sys::{RegionOptions, SharedMemory};

/// A region that was created and formatted.
pub(super) struct MadeRegion {
    pub(super) memory: Arc<SharedMemory>,
    pub(super) words: Words<MappedMemory>,
    /// Per worker: the ends of its blocks' mqueues.
    pub(super) ends: Vec<Vec<BlockEnds>>,
    /// The engine's ends of its command rings, and the offset of the first window.
    pub(super) commands: Option<(CommandRings, u64)>,
}

/// Creates and formats the region of one (service, accelerator, generation); `position` is the accelerator's in
/// the service's list. With a window of `window_bytes`, unless that is 0, there are command rings.
pub(super) fn make_region(
    service: &Service,
    (position, accelerator): (usize, &str),
    generation: u64,
    workers: usize,
    window_bytes: u64,
) -> Result<MadeRegion, sys::MemoryError> {
    let mut plan = service.region_plan(position, generation);
    if window_bytes > 0 {
        plan = plan.with_commands(COMMANDS_IN_FLIGHT, window_bytes);
    }
    let bytes = plan.bytes().expect("the topology was checked") as usize;
    let name = format!("serval:{}:{accelerator}:{generation}", service.name);
    let memory = Arc::new(SharedMemory::create(&name, bytes, &RegionOptions::default())?);
    let mapped = MappedMemory::new(memory.clone());
    let mut region = Region::format(mapped, &plan).expect("memory of the planned size");
    let mut ends: Vec<Vec<BlockEnds>> = (0..workers).map(|_| Vec::new()).collect();
    for block in 0..plan.block_count {
        ends[block as usize % workers].push(BlockEnds::take(&mut region, block));
    }
    let commands =
        (window_bytes > 0).then(|| (CommandRings::take(&mut region), region.window(0).0));
    Ok(MadeRegion { memory, words: region.words(), ends, commands })
}
