//! Creation of regions.

use std::sync::Arc;

use engine::commands::CommandRings;
use engine::topology::{Accelerator, Service};
use engine::{BlockEnds, take_pools};
use mqueue::{MappedMemory, Pool, Region, Words};
use sys::{RegionOptions, SharedMemory};

use crate::transfers::ServiceTransfers;

/// A region that was created and formatted.
pub(crate) struct MadeRegion {
    pub(crate) memory: Arc<SharedMemory>,
    pub(crate) words: Words<MappedMemory>,
    /// Per worker: the ends of its blocks' mqueues.
    pub(crate) ends: Vec<Vec<BlockEnds>>,
    /// Per worker.
    pub(crate) pools: Vec<Option<Box<Pool<MappedMemory>>>>,
    /// The engine's ends of its command rings, and the offset of the first staging.
    pub(crate) commands: Option<(CommandRings, u64)>,
}

/// Creates and formats the region of one (service, accelerator, generation); `position` is the accelerator's in
/// the service's list. `transfers` does those of its blocks, if they ask for any.
pub(crate) fn make_region(
    service: &Service,
    (position, accelerator): (usize, &Accelerator),
    generation: u64,
    workers: usize,
    transfers: Option<&ServiceTransfers>,
) -> Result<MadeRegion, sys::MemoryError> {
    let plan = service.region_plan(position, &accelerator.kind, generation, workers);
    let bytes = plan.bytes().expect("the topology was checked") as usize;
    let name = format!("serval:{}:{}:{generation}", service.name, accelerator.name);
    let memory = Arc::new(SharedMemory::create(&name, bytes, &RegionOptions::default())?);
    let mapped = MappedMemory::new(memory.clone());
    let mut region = Region::format(mapped, &plan).expect("memory of the planned size");
    let mut ends: Vec<Vec<BlockEnds>> = (0..workers).map(|_| Vec::new()).collect();
    for block in 0..plan.block_count {
        let mut of_block = BlockEnds::take(&mut region, block);
        if let Some(transfers) = transfers {
            transfers.equip(&mut of_block, &memory);
        }
        ends[block as usize % workers].push(of_block);
    }
    let commands = (region.command_rings() > 0)
        .then(|| (CommandRings::take(&mut region), region.staging(0).0));
    let pools = take_pools(&mut region, workers);
    Ok(MadeRegion { memory, words: region.words(), ends, pools, commands })
}
