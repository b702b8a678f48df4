//! HyperLogLog on payloads of 1408 bytes, against Apache DataSketches' HLL_8 with the same precision: sketches that have seen eight million different
//! items, as in a long stream. Both get the same words; theirs takes one at a time.

use builtins::sketch::Instructions;
use builtins::sketch::hash::finish64;
use builtins::sketch::hyperloglog::{HyperLogLog, Settings};
use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use datasketches::hll::{HllSketch, HllType};

const PRECISION: u8 = 14;
const PAYLOAD_BYTES: usize = 1408;
const PAYLOADS: usize = 32;
/// Words that were seen before.
const BEFORE: u64 = 1 << 23;

fn words(from: u64, count: u64) -> Vec<u8> {
    (from..from + count).flat_map(|n| finish64(n).to_le_bytes()).collect()
}

fn hyperloglog(c: &mut Criterion) {
    let payloads = words(1 << 40, (PAYLOADS * PAYLOAD_BYTES / 8) as u64);
    let before = words(1, BEFORE);
    let mut group = c.benchmark_group("hyperloglog");
    for (item_bytes, wide) in [(8, true), (4, true), (4, false)] {
        let items = (payloads.len() / usize::from(item_bytes)) as u64;
        group.throughput(Throughput::Elements(items));
        for instructions in Instructions::all() {
            let settings = Settings { precision: PRECISION, wide, item_bytes, seed: 1 };
            let mut sketch = HyperLogLog::new(settings, instructions);
            before.chunks(PAYLOAD_BYTES).for_each(|payload| sketch.add_words(payload));
            let hash = if wide { 64 } else { 32 };
            let name = format!("{item_bytes} bytes, {hash}-bit hash, {instructions:?}");
            group.bench_function(BenchmarkId::from_parameter(name), |b| {
                b.iter(|| payloads.chunks(PAYLOAD_BYTES).for_each(|p| sketch.add_words(p)));
            });
            let expected = (before.len() / usize::from(item_bytes)) as f64;
            assert!((sketch.estimate() / expected - 1.0).abs() < 0.05, "{}", sketch.estimate());
        }
    }
    let mut theirs = HllSketch::new(PRECISION, HllType::Hll8).expect("it is a precision");
    let add = |sketch: &mut HllSketch, bytes: &[u8]| {
        let words = bytes.as_chunks::<8>().0.iter();
        words.for_each(|word| sketch.update(u64::from_le_bytes(*word)));
    };
    add(&mut theirs, &before);
    group.throughput(Throughput::Elements((payloads.len() / 8) as u64));
    group.bench_function(BenchmarkId::from_parameter("DataSketches HLL_8, 8 bytes"), |b| {
        b.iter(|| payloads.chunks(PAYLOAD_BYTES).for_each(|payload| add(&mut theirs, payload)));
    });
    assert!((theirs.estimate() / BEFORE as f64 - 1.0).abs() < 0.05, "{}", theirs.estimate());
    group.finish();
}

criterion_group!(benches, hyperloglog);
criterion_main!(benches);
