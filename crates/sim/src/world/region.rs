//! The regions of model accelerators, divided among the workers.

use engine::topology::Bundles;
use engine::{BlockEnds, take_pools};
use mqueue::abi::{PoolEntry, RingEntry};
use mqueue::{HeapMapping, MappedMemory, Pool, Region, RegionPlan, Words};

use super::Setup;
use crate::accelerator::BlockShare;
use crate::link::AcceleratorLink;
use crate::rng::Rng;
use crate::socket_block::SocketShare;
use crate::transfers::Executor;

/// A region, divided among workers. Behind a link there are two: the engine's, and the blocks'.
pub(crate) struct PreparedRegion {
    /// The engine's.
    pub(crate) words: Words<MappedMemory>,
    /// The blocks'.
    pub(crate) memory: MappedMemory,
    pub(crate) entries: Vec<RingEntry>,
    pub(crate) pool_entries: Vec<PoolEntry>,
    /// Per worker.
    pub(crate) parts: Vec<Part>,
    pub(crate) link: Option<AcceleratorLink>,
}

/// A worker's part of a region.
pub(crate) struct Part {
    pub(crate) ends: Vec<BlockEnds>,
    pub(crate) shares: Vec<BlockShare>,
    /// The engine's pool.
    pub(crate) pool: Option<Box<Pool<MappedMemory>>>,
    /// As in [`crate::accelerator::ModelBlocks`].
    pub(crate) heads: Option<(Words<MappedMemory>, Vec<u32>)>,
}

fn memory_of(plan: &RegionPlan) -> MappedMemory {
    HeapMapping::memory(plan.bytes().expect("the topology was checked") as usize)
}

/// The region of a new generation of one accelerator of a service, by its index in the service's list.
pub(crate) fn prepare_region(
    setup: &Setup,
    service: usize,
    place: usize,
    generation: u64,
    rng: &mut Rng,
) -> PreparedRegion {
    let workers = setup.topology.engine.workers;
    let linked = setup.links.contains(&(service, place));
    let mut spec = setup.topology.services[service].clone();
    if linked {
        spec.bundles = Bundles::Never;
    }
    let kind = &setup.topology.accelerators[spec.accelerators[place]].kind;
    let mut plan = spec.region_plan(place, kind, generation, workers).starting_at(setup.ring_start);
    // The directory identifies the rings, possibly in another order in each generation.
    if generation % 2 == 0 {
        plan.rings.reverse();
    }
    let memory = memory_of(&plan);
    let mut near = Region::format(memory.clone(), &plan).expect("memory of the planned size");
    let (memory, link) = if linked { link(memory, rng) } else { (memory, None) };
    let mut far = Region::join(memory.clone()).expect("just formatted");
    let words = near.words();
    let mut parts: Vec<Part> = (0..workers)
        .map(|_| Part {
            ends: Vec::new(),
            shares: Vec::new(),
            pool: None,
            heads: linked.then(|| (words.clone(), Vec::new())),
        })
        .collect();
    for block in 0..plan.block_count {
        let part = &mut parts[block as usize % workers];
        let mut ends = BlockEnds::take(&mut near, block);
        if !linked {
            place_executors(setup, service, &mut ends, rng);
        }
        part.ends.push(ends);
        // Their numbers may differ behind a link.
        let mqueues = near.mqueues_of(block).to_vec();
        let share = BlockShare { mqueues, ..share_of(&mut far, block) };
        if let Some((_, mqueues)) = &mut part.heads {
            mqueues.extend(&share.mqueues);
        }
        part.shares.push(share);
    }
    for (part, pool) in parts.iter_mut().zip(take_pools(&mut near, workers)) {
        part.pool = pool;
    }
    let (entries, pool_entries) = (far.entries().to_vec(), far.pools().to_vec());
    PreparedRegion { words, memory, entries, pool_entries, parts, link }
}

/// Who does the transfers of a block.
fn place_executors(setup: &Setup, service: usize, ends: &mut BlockEnds, rng: &mut Rng) {
    let backends = &setup.topology.services[service].backends;
    for (client, backend) in ends.clients.iter_mut().zip(backends) {
        if let Some(disk) = setup.disk(service, backend) {
            let executor = Executor::new(disk, backend.in_flight as usize, rng.fork());
            client.transfers = Some(Box::new(executor));
        }
    }
}

/// The accelerator's ends of a block's mqueues.
fn share_of(region: &mut Region<MappedMemory>, block: u32) -> BlockShare {
    let mqueues = region.mqueues_of(block).to_vec();
    let (mut clients, mut sockets) = (Vec::new(), None);
    for mqueue in &mqueues[1..] {
        let ends = region.accelerator_ends(*mqueue);
        if region.role(*mqueue).1 == mqueue::Role::Sockets {
            let entries = region.streams_of(block).to_vec();
            let (memory, streams) = (region.memory().clone(), region.block_streams(block));
            sockets = Some(SocketShare { memory, mqueue: ends, streams, entries });
        } else {
            clients.push(ends);
        }
    }
    BlockShare {
        block,
        rings: mqueues.iter().flat_map(|mqueue| region.rings_of(*mqueue)).copied().collect(),
        server: region.accelerator_ends(mqueues[0]),
        clients,
        sockets,
        mqueues,
    }
}

/// The blocks' region behind a link to this one of the engine, and the link.
#[cfg(not(target_family = "wasm"))]
fn link(memory: MappedMemory, rng: &mut Rng) -> (MappedMemory, Option<AcceleratorLink>) {
    let mut own = Region::join(memory).expect("just formatted");
    let generation = own.generation();
    let (shape, near) = remote::engine_side(&mut own).expect("plans link what can be linked");
    let plan = remote::accelerator_side(&shape, generation);
    let memory = memory_of(&plan);
    let formatted = remote::format_accelerator_side(memory.clone(), &plan);
    let (_, far) = formatted.expect("a region like the engine's");
    (memory, Some(AcceleratorLink::new(near, far, rng.fork())))
}

/// No plan has links.
#[cfg(target_family = "wasm")]
fn link(memory: MappedMemory, _: &mut Rng) -> (MappedMemory, Option<AcceleratorLink>) {
    (memory, None)
}
