//! The regions of a link: the engine's, and the one of the same shape on the other machine.

use mqueue::{MappedMemory, MqueuePlan, PlanError, Region, RegionPlan, RingPlan};
use wire::link::{MqueueShape, RingShape, Shape};

use crate::mirror::Ends;

/// Why a region cannot be mirrored. The message is one sentence.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NotMirrored {
    /// The blocks differ.
    #[error("a link needs blocks with the same mqueues")]
    Uneven,
    /// The blocks have sockets.
    #[error("stream sockets of kernels do not cross a link")]
    Sockets,
    /// The blocks have memory for transfers.
    #[error("memory for transfers of kernels does not cross a link")]
    Memory,
}

fn shape_of(region: &Region<MappedMemory>, mqueue: u32) -> MqueueShape {
    let rings = region.rings_of(mqueue);
    MqueueShape {
        depth: rings[0].depth,
        rings: rings.map(|ring| RingShape {
            protocol: ring.protocol,
            message_bytes_max: ring.message_bytes_max,
            arena_bytes: ring.arena_bytes,
        }),
    }
}

/// The shape of an engine's region, and the runtime's ends of its mqueues.
pub fn engine_side(region: &mut Region<MappedMemory>) -> Result<(Shape, Vec<Ends>), NotMirrored> {
    let of_block = |region: &Region<MappedMemory>, block| {
        let mqueues = region.mqueues_of(block).iter();
        mqueues.map(|mqueue| shape_of(region, *mqueue)).collect::<Vec<_>>()
    };
    let (blocks, mqueues) = (region.block_count(), of_block(region, 0));
    let mut ends = Vec::new();
    for block in 0..blocks {
        if of_block(region, block) != mqueues {
            return Err(NotMirrored::Uneven);
        }
        if !region.streams_of(block).is_empty() {
            return Err(NotMirrored::Sockets);
        }
        let has_staging = |mqueue: &u32| region.rings_of(*mqueue)[1].staging_bytes > 0;
        if region.mqueues_of(block).iter().any(has_staging) {
            return Err(NotMirrored::Memory);
        }
        for (mqueue, shape) in region.mqueues_of(block).to_vec().into_iter().zip(&mqueues) {
            let (source, sink) = region.accelerator_ends(mqueue);
            let arena_bytes = shape.rings[1].arena_bytes;
            ends.push(Ends { source, sink, depth: shape.depth, arena_bytes });
        }
    }
    Ok((Shape { blocks, mqueues }, ends))
}

/// The plan of the region on the accelerator's side, which is not believed: formatting a region checks it.
pub fn accelerator_side(shape: &Shape, generation: u64) -> RegionPlan {
    let plan_of = |ring: RingShape| {
        let RingShape { protocol, message_bytes_max, arena_bytes } = ring;
        RingPlan { protocol, message_bytes_max, arena_bytes }
    };
    // The engine's ring may have less room lost at the end of its arena than this one.
    let rx = |ring: RingShape| {
        let longest = u64::from(ring.message_bytes_max).next_multiple_of(64);
        let more = if ring.arena_bytes > 0 { longest } else { 0 };
        plan_of(RingShape { arena_bytes: ring.arena_bytes.saturating_add(more), ..ring })
    };
    let mqueue = |of: &MqueueShape| MqueuePlan {
        depth: of.depth,
        rx: rx(of.rings[0]),
        tx: plan_of(of.rings[1]),
    };
    let mqueues: Vec<MqueuePlan> = shape.mqueues.iter().map(mqueue).collect();
    RegionPlan::of_blocks(shape.blocks, &mqueues, generation)
}

/// Formats the region on the accelerator's side, and takes the engine's ends of its mqueues.
pub fn format_accelerator_side(
    memory: MappedMemory,
    plan: &RegionPlan,
) -> Result<(Region<MappedMemory>, Vec<Ends>), PlanError> {
    let mut region = Region::format(memory, plan)?;
    let of_block = |block| region.mqueues_of(block).to_vec();
    let mqueues: Vec<u32> = (0..region.block_count()).flat_map(of_block).collect();
    let ends = mqueues.into_iter().map(|mqueue| {
        let MqueueShape { depth, rings: [rx, _] } = shape_of(&region, mqueue);
        let (sink, source) = region.engine_ends(mqueue);
        Ends { source, sink, depth, arena_bytes: rx.arena_bytes }
    });
    let ends = ends.collect();
    Ok((region, ends))
}
