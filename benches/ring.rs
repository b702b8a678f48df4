//! One message through a ring, both ends on one thread: the instructions, without cache traffic between
//! cores. `cargo run --release -p serval-mqueue --example ring_rate` measures two threads.

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use mqueue::abi::protocol;
use serval_benches::Ring;

fn ring(c: &mut Criterion) {
    let mut protocols = vec![("doorbell", protocol::DOORBELL), ("granule8", protocol::GRANULE8)];
    if mqueue::memory::unit16_is_atomic() {
        protocols.push(("granule16", protocol::GRANULE16));
    }
    for (name, protocol) in protocols {
        let mut group = c.benchmark_group(format!("ring/{name}"));
        for bytes in [64, 1024] {
            for batch in [1, 16, 64] {
                let mut ring = Ring::new(protocol, bytes);
                group.throughput(Throughput::Elements(batch));
                let id = BenchmarkId::new(format!("{bytes} B"), format!("batch {batch}"));
                group.bench_function(id, |b| b.iter(|| ring.pass(batch)));
                ring.check();
            }
        }
        group.finish();
    }
}

criterion_group!(benches, ring);
criterion_main!(benches);
