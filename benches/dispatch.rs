//! The cost of choosing an mqueue: each policy over 1, 28 and 240 mqueues, in bursts as one read delivers them.
//!
//! The dispatcher is private to the engine, so its file is compiled into this program.

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use engine::topology::Dispatch;

/// What the file below takes from the engine.
mod base {
    pub(crate) use engine::topology;
}

#[allow(
    dead_code,
    unused_imports,
    reason = "its tests and the calls of other workers are not used here"
)]
#[path = "../crates/engine/src/service/dispatch.rs"]
mod dispatch;
use dispatch::{Credit, Dispatcher, Owner, Route};

const BURST: usize = 64;
const SLOTS: u32 = 64;

/// The mqueues of a worker, as their counts of requests in flight.
struct Table(Vec<u32>);

impl Credit for Table {
    fn count(&self) -> u32 {
        self.0.len() as u32
    }
    fn credit(&self, mqueue: u32) -> Option<u32> {
        Some(SLOTS - self.0[mqueue as usize])
    }
    fn outstanding(&self, mqueue: u32) -> u32 {
        self.0[mqueue as usize]
    }
    fn share(&self) -> u32 {
        u32::MAX
    }
    fn is_exhausted(&self) -> bool {
        false
    }
    fn other_with_most_credit(&self) -> Option<u32> {
        None
    }
}

/// Routes a burst in which every message has its own flow and key, and counts it at its mqueue.
fn route_burst(dispatcher: &mut Dispatcher, table: &mut Table, first: u64) -> u32 {
    dispatcher.burst(BURST);
    let mut routed = 0;
    for n in first..first + BURST as u64 {
        let message = n.to_le_bytes();
        let flow = if dispatcher.needs_flow() { wire::admission::key_hash(&message) } else { 0 };
        if let Route::Local(mqueue) = dispatcher.route(&message, flow, table) {
            table.0[mqueue as usize] += 1;
            routed += 1;
        }
    }
    routed
}

fn dispatch(c: &mut Criterion) {
    let key = Dispatch::KeyHash("0:8".parse().expect("a range"));
    let policies = [
        ("round-robin", Dispatch::RoundRobin),
        ("least-loaded", Dispatch::LeastLoaded),
        ("flow-hash", Dispatch::FlowHash),
        ("key-hash", key),
    ];
    for (name, policy) in policies {
        let mut group = c.benchmark_group(format!("dispatch/{name}"));
        for mqueues in [1, 28, 240] {
            let owner = Owner { workers: 1, blocks: [mqueues].into() };
            let mut dispatcher = Dispatcher::new(policy, owner, 0);
            let mut table = Table(vec![0; mqueues as usize]);
            let mut first = 0;
            group.throughput(Throughput::Elements(BURST as u64));
            group.bench_function(BenchmarkId::from_parameter(mqueues), |b| {
                b.iter(|| {
                    // Every request of the previous burst has been answered.
                    table.0.fill(0);
                    first += BURST as u64;
                    let routed = route_burst(&mut dispatcher, &mut table, first);
                    assert_eq!(routed, BURST as u32, "there was credit for every message");
                });
                let in_flight: u32 = table.0.iter().sum();
                assert_eq!(in_flight, BURST as u32, "each message went to one mqueue");
            });
        }
        group.finish();
    }
}

criterion_group!(benches, dispatch);
criterion_main!(benches);
