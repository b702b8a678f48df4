//! What the tests of groups over real connections share.
#![allow(dead_code, reason = "every test file uses its own part")]

use std::net::{SocketAddr, TcpListener};
use std::thread;
use std::time::Duration;

use collective::{Element, Group, Member};

/// Longer than anything takes on a busy machine.
pub(crate) const LIMIT: Duration = Duration::from_secs(60);

pub(crate) fn member(ranks: usize, rank: usize) -> Member {
    Member { name: "test".to_owned(), ranks, rank }
}

/// Sockets that listen, and their addresses.
pub(crate) fn listeners(ranks: usize) -> (Vec<TcpListener>, Vec<SocketAddr>) {
    let listeners: Vec<_> = (0..ranks).map(|_| TcpListener::bind("127.0.0.1:0").unwrap()).collect();
    let addresses = listeners.iter().map(|listener| listener.local_addr().unwrap()).collect();
    (listeners, addresses)
}

/// Runs `work` as every rank of a group over TCP; the results in the order of ranks.
pub(crate) fn tcp_group<R: Send>(ranks: usize, work: impl Fn(Group) -> R + Sync) -> Vec<R> {
    let (listeners, addresses) = listeners(ranks);
    thread::scope(|scope| {
        let start = |(rank, listener): (usize, &TcpListener)| {
            let listener = listener.try_clone().unwrap();
            let (addresses, work) = (&addresses, &work);
            scope.spawn(move || {
                let member = member(ranks, rank);
                work(Group::connect(&member, &listener, addresses, LIMIT).unwrap())
            })
        };
        let threads: Vec<_> = listeners.iter().enumerate().map(start).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

pub(crate) fn ints(count: usize, value: i32) -> Vec<u8> {
    (0..count as i32).flat_map(|at| (value + at).to_ne_bytes()).collect()
}

/// Every operation for each number of ranks and elements. `group` runs its argument as every rank of a group.
pub(crate) fn check_operations(
    ranks: &[usize],
    counts: &[usize],
    group: impl Fn(usize, &(dyn Fn(Group) -> Vec<u8> + Sync)) -> Vec<Vec<u8>>,
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
