//! Every operation on every number of ranks gives the result of a serial calculation, whatever the streams do, and every failure
//! ends the call on all ranks.

mod common;

use collective::{CollectiveError, Element, Loss, Operation, RANKS_MAX};
use common::{Order, Random, Spoil, World};
use proptest::prelude::*;

fn words(random: &mut Random, count: usize, element: Element) -> Vec<u8> {
    let word = |random: &mut Random| match element {
        // Exponents of a few dozens, so that the order of additions matters.
        Element::Float32 => {
            let sign = (random.next() as u32) << 31;
            let exponent = 100 + random.below(40) as u32;
            (sign | exponent << 23 | random.next() as u32 & 0x7f_ffff).to_ne_bytes()
        }
        _ => (random.next() as u32).to_ne_bytes(),
    };
    (0..count).flat_map(|_| word(random)).collect()
}

fn int(bytes: &[u8]) -> Vec<i32> {
    bytes.chunks_exact(4).map(|word| i32::from_ne_bytes(word.try_into().unwrap())).collect()
}

fn float(bytes: &[u8]) -> Vec<f32> {
    bytes.chunks_exact(4).map(|word| f32::from_ne_bytes(word.try_into().unwrap())).collect()
}

/// Runs an all-reduce and checks it; returns the result, which is the same on all ranks.
fn all_reduce(world: &mut World, element: Element, inputs: &[Vec<u8>]) -> Vec<u8> {
    let order = Order { operation: Operation::AllReduce, element };
    let mut data = inputs.to_vec();
    let results = world.call(&vec![order; inputs.len()], &mut data, None);
    assert!(results.iter().all(|result| *result == Some(Ok(()))), "{results:?}");
    for other in &data[1..] {
        assert!(*other == data[0], "ranks differ");
    }
    match element {
        Element::Int32 => {
            let mut sum = vec![0i32; inputs[0].len() / 4];
            for input in inputs {
                let add = |(sum, value): (&mut i32, i32)| *sum = sum.wrapping_add(value);
                sum.iter_mut().zip(int(input)).for_each(add);
            }
            assert!(int(&data[0]) == sum);
        }
        _ => {
            for (at, got) in float(&data[0]).into_iter().enumerate() {
                let values = inputs.iter().map(|input| float(&input[4 * at..4 * at + 4])[0]);
                let (sum, size) = values.fold((0.0, 0.0), |(sum, size), value| {
                    (sum + f64::from(value), size + f64::from(value).abs())
                });
                assert!((f64::from(got) - sum).abs() <= size * 1e-6, "{got} is not {sum}");
            }
        }
    }
    data.swap_remove(0)
}

/// Counts around the limits of the algorithms, with remainders.
const COUNTS: [usize; 12] = [0, 1, 2, 3, 5, 7, 16, 1023, 1027, 8192, 8195, 20_001];

#[test]
fn sums_are_right_on_all_numbers_of_ranks_and_the_same_in_every_run() {
    let mut random = Random::new(1);
    for ranks in 1..=RANKS_MAX {
        for count in COUNTS {
            for element in [Element::Int32, Element::Float32] {
                let input = |_| words(&mut random, count, element);
                let inputs: Vec<Vec<u8>> = (0..ranks).map(input).collect();
                let run = |seed| {
                    let mut world = World::new(ranks, 1 << 16, seed);
                    all_reduce(&mut world, element, &inputs)
                };
                assert!(run(3) == run(4), "{ranks} ranks, {count} {element:?}: runs differ");
            }
        }
    }
}

#[test]
fn long_sums_are_right() {
    let mut random = Random::new(9);
    for ranks in [3, 4, 8] {
        let input = |_| words(&mut random, (1 << 18) + 3, Element::Float32);
        let inputs: Vec<Vec<u8>> = (0..ranks).map(input).collect();
        all_reduce(&mut World::new(ranks, 1 << 20, 5), Element::Float32, &inputs);
    }
}

/// What documents promise: the sum of a NaN and anything is the NaN 0x7fc00000, whatever the processor does.
#[test]
fn every_nan_becomes_the_documented_one_and_infinities_stay() {
    const NAN: u32 = 0x7fc0_0000;
    let [plus, minus] = [f32::INFINITY, f32::NEG_INFINITY].map(f32::to_bits);
    let nans = [0x7f80_0001u32, 0xffc0_1234, 0x7fff_ffff];
    // Finite sums are exact.
    let finite = [0.0f32, 1.0, -2.0, 4.0].map(f32::to_bits);
    let mut random = Random::new(11);
    let mut seen = std::collections::BTreeSet::new();
    for ranks in 2..=RANKS_MAX {
        // Of each algorithm.
        for count in [40, 1100, 9000] {
            let mut word = || match random.below(6 * ranks) {
                0 => nans[random.below(nans.len())],
                1 => plus,
                2 => minus,
                _ => finite[random.below(finite.len())],
            };
            let inputs: Vec<Vec<u32>> =
                (0..ranks).map(|_| (0..count).map(|_| word()).collect()).collect();
            let sum = |at: usize| {
                let sum: f32 = inputs.iter().map(|input| f32::from_bits(input[at])).sum();
                if sum.is_nan() { NAN } else { sum.to_bits() }
            };
            let expected: Vec<u32> = (0..count).map(sum).collect();
            let bytes =
                |words: &Vec<u32>| words.iter().flat_map(|word| word.to_ne_bytes()).collect();
            let mut data: Vec<Vec<u8>> = inputs.iter().map(bytes).collect();
            let order = Order { operation: Operation::AllReduce, element: Element::Float32 };
            let results = World::new(ranks, 4096, 7).call(&vec![order; ranks], &mut data, None);
            assert!(results.iter().all(|result| *result == Some(Ok(()))), "{results:?}");
            for got in &data {
                let got: Vec<u32> = float(got).into_iter().map(f32::to_bits).collect();
                assert!(got == expected, "{ranks} ranks, {count} words");
            }
            seen.extend([NAN, plus, minus].into_iter().filter(|word| expected.contains(word)));
        }
    }
    assert_eq!(seen.len(), 3, "{seen:x?}");
}

/// A call of each algorithm, and a bit more than the largest of each short one.
fn orders(ranks: usize) -> Vec<(Order, usize)> {
    let sum = |count| (Order { operation: Operation::AllReduce, element: Element::Int32 }, count);
    let root = ranks - 1;
    let copy =
        |count| (Order { operation: Operation::Broadcast { root }, element: Element::Byte }, count);
    let barrier = Order { operation: Operation::Barrier, element: Element::Byte };
    vec![sum(1), sum(1100), sum(9000), copy(50), copy(70_000), (barrier, 0)]
}

/// Small streams and a narrow step: every rank makes dozens of advances in each call, and is killed at each of them.
#[test]
fn a_rank_that_ends_at_each_step_of_each_operation_ends_the_call_on_the_others() {
    for ranks in [2, 3, 4, 7] {
        for (order, count) in orders(ranks) {
            let data = vec![vec![1; count * order.element.bytes()]; ranks];
            let capacity = (data[0].len() / 3).max(24);
            for victim in [0, 1, ranks - 1] {
                for at in 0.. {
                    let mut world = World::new(ranks, capacity, (at + 1) as u64);
                    let mut data = data.clone();
                    let kill = Some((victim, at));
                    let results = world.call(&vec![order; ranks], &mut data, kill);
                    for (rank, result) in results.iter().enumerate() {
                        let known = match result {
                            Some(Ok(())) => true,
                            Some(Err(error)) => {
                                *error == CollectiveError::Lost(Loss::Ended(victim))
                            }
                            None => rank == victim,
                        };
                        assert!(known, "{order:?} of {ranks}, {victim} ends at {at}: {results:?}");
                    }
                    if results[victim].is_some() {
                        // It had returned before.
                        assert!(at > 0);
                        break;
                    }
                }
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 120, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn calls_one_after_the_other_over_narrow_streams(
        ranks in 2..=RANKS_MAX,
        capacity in 8usize..200,
        counts in proptest::collection::vec(0usize..400, 1..4),
        seed: u64,
    ) {
        let mut world = World::new(ranks, capacity, seed);
        let mut random = Random::new(seed ^ 77);
        for count in counts {
            let element = if random.below(2) == 0 { Element::Int32 } else { Element::Float32 };
            let inputs: Vec<Vec<u8>> = (0..ranks).map(|_| words(&mut random, count, element)).collect();
            all_reduce(&mut world, element, &inputs);
        }
    }

    #[test]
    fn a_broadcast_copies_the_root(
        ranks in 1..=RANKS_MAX,
        capacity in 8usize..100_000,
        bytes in prop_oneof![0usize..100, 60_000usize..300_000],
        seed: u64,
    ) {
        let mut random = Random::new(seed);
        let root = random.below(ranks);
        let data = |_| (0..bytes).map(|_| random.next() as u8).collect();
        let mut data: Vec<Vec<u8>> = (0..ranks).map(data).collect();
        let expected = data[root].clone();
        let order = Order { operation: Operation::Broadcast { root }, element: Element::Byte };
        let mut world = World::new(ranks, capacity.max(bytes / 500), seed);
        let results = world.call(&vec![order; ranks], &mut data, None);
        prop_assert!(results.iter().all(|result| *result == Some(Ok(()))));
        prop_assert!(data.iter().all(|got| *got == expected));
        let barrier = Order { operation: Operation::Barrier, element: Element::Byte };
        let results = world.call(&vec![barrier; ranks], &mut vec![Vec::new(); ranks], None);
        prop_assert!(results.iter().all(|result| *result == Some(Ok(()))));
    }

    #[test]
    fn a_rank_that_ends_at_any_moment_ends_the_call_on_the_others(
        ranks in 2..=RANKS_MAX,
        count in prop_oneof![0usize..40, 1000usize..3000, 9000usize..10_000],
        seed: u64,
        at in 0usize..300,
    ) {
        let mut random = Random::new(seed);
        let victim = random.below(ranks);
        let mut data: Vec<Vec<u8>> = (0..ranks).map(|_| words(&mut random, count, Element::Int32)).collect();
        let order = Order { operation: Operation::AllReduce, element: Element::Int32 };
        let mut world = World::new(ranks, 4096, seed);
        // It returns: no rank waits indefinitely. Those that had all they needed are done, and the rest name the victim.
        let results = world.call(&vec![order; ranks], &mut data, Some((victim, at)));
        for (rank, result) in results.iter().enumerate().filter(|(rank, _)| *rank != victim) {
            let known = matches!(result, Some(Ok(())))
                || *result == Some(Err(CollectiveError::Lost(Loss::Ended(victim))));
            prop_assert!(known, "rank {}: {:?}", rank, result);
        }
    }

    /// A changed byte of a header ends the call on all ranks, and the receiver names the sender. One of the data is a wrong result:
    /// streams are trusted not to change bytes, as TCP's checksum and memory are.
    #[test]
    fn a_changed_byte_anywhere_is_noticed_or_harmless(
        ranks in 2..=RANKS_MAX,
        kind in 0usize..6,
        at in prop_oneof![0usize..32, 0usize..40_000],
        mask in 1u8..,
        seed: u64,
    ) {
        let (order, count) = orders(ranks)[kind];
        let mut random = Random::new(seed);
        let from = random.below(ranks);
        let to = (from + 1 + random.below(ranks - 1)) % ranks;
        let mut data = vec![vec![3; count * order.element.bytes()]; ranks];
        let mut world = World::new(ranks, 4096, seed);
        world.net.borrow_mut().spoil = Some(Spoil { from, to, at, mask });
        let results = world.call(&vec![order; ranks], &mut data, None);
        let happened = world.net.borrow().spoil.is_some_and(|spoil| spoil.at == usize::MAX);
        let noticed = |error: &CollectiveError| match error {
            CollectiveError::Disagreement { rank, .. } => *rank == from,
            CollectiveError::Lost(loss) => *loss == Loss::Garbage(from) || matches!(loss, Loss::Told { .. }),
            _ => false,
        };
        for (rank, result) in results.iter().enumerate() {
            let known = match result {
                Some(Ok(())) => true,
                Some(Err(error)) => happened && noticed(error),
                None => false,
            };
            prop_assert!(known, "rank {} of {:?}: {:?}", rank, order, results);
        }
        if happened && at < 32 {
            let named = |error: &CollectiveError| noticed(error) && error.name() != "group_ended";
            prop_assert!(matches!(&results[to], Some(Err(error)) if named(error)), "{:?}", results);
        }
    }

    #[test]
    fn ranks_that_disagree_learn_about_what(
        ranks in 2..=RANKS_MAX,
        seed: u64,
        kind in 0usize..5,
    ) {
        // A broadcast waits for one rank. If no rank has sent it anything, only its deadline ends it; that happens only with other numbers of ranks.
        let ranks = if kind == 3 { ranks.next_power_of_two() } else { ranks };
        let mut random = Random::new(seed);
        let odd = random.below(ranks);
        let mut orders = vec![Order { operation: Operation::AllReduce, element: Element::Int32 }; ranks];
        let mut data: Vec<Vec<u8>> = (0..ranks).map(|_| words(&mut random, 20, Element::Int32)).collect();
        let expected = match kind {
            0 => { data[odd].truncate(40); "count" }
            1 => { orders[odd].element = Element::Float32; "type" }
            // Other algorithms, so other partners in other steps.
            2 => { data[odd].resize(4 * (1000 + random.below(100_000)), 0); "count" }
            3 => {
                let root = (odd + 1 + random.below(ranks - 1)) % ranks;
                orders[odd] = Order { operation: Operation::Broadcast { root }, element: Element::Byte };
                "operation"
            }
            _ => {
                orders[odd] = Order { operation: Operation::Barrier, element: Element::Byte };
                data[odd].clear();
                "operation"
            }
        };
        let results = World::new(ranks, 4096, seed).call(&orders, &mut data, None);
        let named = |result: &Option<Result<(), CollectiveError>>| matches!(
            result,
            Some(Err(CollectiveError::Disagreement { what, .. })) if *what == expected
        );
        let all_failed = results.iter().all(|result| matches!(result, Some(Err(_))));
        prop_assert!(results.iter().any(named) && all_failed, "{:?}", results);
    }
}
