//! Regions as the engine makes them.

use std::sync::Arc;

use engine::BlockEnds;
use engine::topology::Service;
use mqueue::{MappedMemory, Region, Words};
use sys::{RegionOptions, SharedMemory};

/// A region that was created and formatted.
pub(super) struct MadeRegion {
    pub(super) memory: Arc<SharedMemory>,
    pub(super) words: Words<MappedMemory>,
    /// Per worker: the ends of its blocks' mqueues.
    pub(super) ends: Vec<Vec<BlockEnds>>,
}

/// Creates and formats the region of one (service, accelerator, generation); `position` is the accelerator's in
/// the service's list.
pub(super) fn make_region(
    service: &Service,
    (position, accelerator): (usize, &str),
    generation: u64,
    workers: usize,
) -> Result<MadeRegion, sys::MemoryError> {
    let plan = service.region_plan(position, generation);
    let bytes = plan.bytes().expect("the topology was checked") as usize;
    let name = format!("serval:{}:{accelerator}:{generation}", service.name);
    let memory = Arc::new(SharedMemory::create(&name, bytes, &RegionOptions::default())?);
    let mapped = MappedMemory::new(memory.clone());
    let mut region = Region::format(mapped, &plan).expect("memory of the planned size");
    let mut ends: Vec<Vec<BlockEnds>> = (0..workers).map(|_| Vec::new()).collect();
    for block in 0..plan.block_count {
        ends[block as usize % workers].push(BlockEnds::take(&mut region, block));
    }
    Ok(MadeRegion { memory, words: region.words(), ends })
}
