//! What the tests of groups over real connections share.

use std::time::Duration;

use collective::{Element, Group, Member, Transport};

/// Longer than anything takes on a busy machine.
pub(crate) const LIMIT: Duration = Duration::from_secs(60);

pub(crate) fn member(ranks: usize, rank: usize) -> Member {
    Member { name: "test".to_owned(), ranks, rank }
}

pub(crate) fn ints(count: usize, value: i32) -> Vec<u8> {
    (0..count as i32).flat_map(|at| (value + at).to_ne_bytes()).collect()
}

/// Every operation for each number of ranks and elements. `group` runs its argument as every rank of a group.
pub(crate) fn check_operations<T: Transport>(
    ranks: &[usize],
    counts: &[usize],
    group: impl Fn(usize, &(dyn Fn(Group<T>) -> Vec<u8> + Sync)) -> Vec<Vec<u8>>,
) {
    for (&ranks, &count) in
        ranks.iter().flat_map(|ranks| counts.iter().map(move |count| (ranks, count)))
    {
        let sums = group(ranks, &|mut group| {
            let mut data = ints(count, group.rank() as i32);
            group.all_reduce(Element::Int32, &mut data).unwrap();
            let sum = data.clone();
            group.barrier().unwrap();
            group.broadcast(ranks - 1, &mut data).unwrap();
            assert!(data == sum);
            sum
        });
        let word = |at: usize| (0..ranks).map(|rank| (rank + at) as i32).sum::<i32>();
        let expected: Vec<u8> = (0..count).flat_map(|at| word(at).to_ne_bytes()).collect();
        assert!(sums.iter().all(|sum| *sum == expected), "{ranks} ranks, {count}");
    }
}
