//! Do all blocks fit on a GPU at the same time?
//!
//! A persistent block never leaves its multiprocessor, so a block without room at the launch waits
//! forever: its mqueue is never served. The driver reports for each kernel alone how many of its blocks fit on
//! one multiprocessor, `n`. For one kernel the answer is exact: multiprocessors × `n` blocks.
//!
//! For several kernels it is not, because the placement of blocks cannot be controlled: small ones may block large
//! ones everywhere. The following holds for every placement. A block of a kernel takes at most the
//! share 1/n of each resource of a multiprocessor. So if one cannot be placed (of kernel `j`), then
//! every multiprocessor has shares of more than 1 - 1/n_j in use. If all other blocks together have shares of at most
//! multiprocessors × (1 - 1/n_j), that is impossible; also if there are fewer of them than multiprocessors.
//!
//! All of it holds only if a multiprocessor has the same resources whichever kernel came first. With shared memory that is
//! not so by default: a multiprocessor divides one memory between it and the L1 cache when the first kernel starts, according to
//! its needs, and keeps the division as long as anything runs there, which is forever here. (On an H100, 132
//! blocks that share 28 KB each left no room for any of 176 with 47 KB each, which have room by the rule above.) So kernels
//! that run beside others request the division with the most shared memory, before the driver is queried about them. A kernel
//! that runs alone has the division that it needs, and the larger L1 cache.

/// Blocks of one kernel that must be resident.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Demand {
    /// How many, at least one.
    pub blocks: u32,
    /// How many of them fit on one otherwise idle multiprocessor.
    pub blocks_per_multiprocessor: u32,
}

/// Maximum number of blocks of any kind on one multiprocessor: the limit of the largest GPUs.
const RESIDENT_MAX: u32 = 32;

/// A multiple of every number in [1, RESIDENT_MAX], so that shares are integers.
const WHOLE: u128 = 144_403_552_893_600;

/// A demand of which a block may not fit.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Crowded {
    /// Its index.
    pub demand: usize,
    /// The multiprocessors that the other blocks may take, and how many they may take at most for it to fit wherever they
    /// are; none if the demand alone has too many blocks.
    pub beside: Option<(f64, f64)>,
}

/// Whether the blocks of all demands are resident together, wherever the GPU places each.
pub fn all_resident(multiprocessors: u32, demands: &[Demand]) -> Result<(), Crowded> {
    let too_many = |demand: &Demand| {
        let capacity = u64::from(multiprocessors) * u64::from(demand.blocks_per_multiprocessor);
        u64::from(demand.blocks) > capacity
    };
    if let Some(demand) = demands.iter().position(too_many) {
        return Err(Crowded { demand, beside: None });
    }
    if demands.len() <= 1 {
        return Ok(());
    }
    let multiprocessors = u128::from(multiprocessors);
    // Rounding `n` down makes shares larger: never too optimistic.
    let share = |demand: &Demand| {
        WHOLE / u128::from(demand.blocks_per_multiprocessor.clamp(1, RESIDENT_MAX))
    };
    let used: u128 = demands.iter().map(|demand| u128::from(demand.blocks) * share(demand)).sum();
    let blocks: u128 = demands.iter().map(|demand| u128::from(demand.blocks)).sum();
    for (at, demand) in demands.iter().enumerate() {
        let share = share(demand);
        let (beside, room) = (used - share, multiprocessors * (WHOLE - share));
        if blocks > multiprocessors && beside > room {
            let beside = Some((beside as f64 / WHOLE as f64, room as f64 / WHOLE as f64));
            return Err(Crowded { demand: at, beside });
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all_resident(multiprocessors: u32, demands: &[Demand]) -> bool {
        super::all_resident(multiprocessors, demands).is_ok()
    }

    fn demand(blocks: u32, blocks_per_multiprocessor: u32) -> Demand {
        Demand { blocks, blocks_per_multiprocessor }
    }

    #[test]
    fn one_kernel_fits_to_the_last_block() {
        assert!(all_resident(132, &[]));
        assert!(all_resident(132, &[demand(264, 2)]));
        assert!(!all_resident(132, &[demand(265, 2)]));
        assert!(!all_resident(132, &[demand(1, 0)]));
        assert!(!all_resident(132, &[demand(4, 2), demand(1, 0)]));
    }

    #[test]
    fn several_kernels_share_the_multiprocessors() {
        // Two kernels that fit four times each: 100 + 100 of at most 400 blocks.
        assert!(all_resident(100, &[demand(100, 4), demand(100, 4)]));
        assert!(!all_resident(100, &[demand(300, 4), demand(300, 4)]));
        // One small block on each multiprocessor excludes a kernel that needs all of one.
        assert!(!all_resident(100, &[demand(100, 32), demand(1, 1)]));
        assert!(all_resident(100, &[demand(99, 32), demand(1, 1)]));
    }

    #[test]
    fn a_demand_without_room_is_refused_with_the_rule() {
        let crowded = |demands: &[Demand]| super::all_resident(100, demands).unwrap_err();
        assert_eq!(crowded(&[demand(4, 2), demand(201, 2)]), Crowded { demand: 1, beside: None });
        // 300 quarters and 30 halves are 90 multiprocessors; without one quarter they may take three quarters of each.
        let Crowded { demand: at, beside } = crowded(&[demand(300, 4), demand(30, 2)]);
        assert_eq!((at, beside), (0, Some((89.75, 75.0))));
    }

    #[test]
    fn every_number_of_resident_blocks_divides_the_whole() {
        assert!((1..=u128::from(RESIDENT_MAX)).all(|n| WHOLE % n == 0));
    }

    /// A small generator: many cases, identical in every run.
    struct Random(u64);

    impl Random {
        fn below(&mut self, bound: u32) -> u32 {
            self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            ((self.0 >> 33) % u64::from(bound)) as u32
        }
    }

    /// Places blocks one by one in the worst way: a block goes where it leaves the least room.
    #[test]
    fn admitted_blocks_fit_under_the_worst_placement() {
        const RESOURCES: [u32; 3] = [2048, 65536, 228];
        let mut random = Random(1);
        let (mut let_in, mut refused) = (0, 0);
        for _ in 0..20_000 {
            let multiprocessors = 1 + random.below(6);
            let kernels: Vec<([u32; 3], Demand)> = (0..2 + random.below(2))
                .map(|_| {
                    let part = 1 + random.below(16);
                    let needs = RESOURCES.map(|all| 1 + random.below(all / part));
                    let fit = |(all, need): (&u32, &u32)| all / need;
                    let n = RESOURCES.iter().zip(&needs).map(fit).min().unwrap();
                    (needs, demand(1 + random.below(3 * multiprocessors), n.min(RESIDENT_MAX)))
                })
                .collect();
            let demands: Vec<Demand> = kernels.iter().map(|(_, demand)| *demand).collect();
            if !all_resident(multiprocessors, &demands) {
                refused += 1;
                continue;
            }
            let_in += 1;
            let mut left = vec![RESOURCES; multiprocessors as usize];
            let mut waiting: Vec<[u32; 3]> = kernels
                .iter()
                .flat_map(|(needs, demand)| vec![*needs; demand.blocks as usize])
                .collect();
            while !waiting.is_empty() {
                let needs = waiting.swap_remove(random.below(waiting.len() as u32) as usize);
                let room = |left: &&mut [u32; 3]| left.iter().zip(&needs).all(|(l, n)| l >= n);
                let fullest = if random.below(2) == 0 {
                    left.iter_mut().filter(room).min_by_key(|left| left.iter().sum::<u32>())
                } else {
                    left.iter_mut().filter(room).max_by_key(|left| left.iter().sum::<u32>())
                };
                let place = fullest.expect("a block that was let in finds room");
                for (left, need) in place.iter_mut().zip(&needs) {
                    *left -= need;
                }
            }
        }
        assert!(let_in > 1000 && refused > 1000, "{let_in} let in, {refused} refused");
    }
}
