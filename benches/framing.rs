//! The cost of parsing a request in a receive buffer and of framing a reply, for each framing.

use std::hint::black_box;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use serval_benches::Pipeline;
use wire::framing::Framing;

/// Requests in one read from a pipelining client.
const REQUESTS: usize = 64;
const BYTES: usize = 64;

/// Each framing with a request of its own and a reply.
fn cases() -> Vec<(Framing, Vec<u8>, Vec<u8>)> {
    let bytes = [b'x'; BYTES];
    let case = |framing: Framing| {
        let request = match framing {
            // More common than the `set` of its sample.
            Framing::Memcached => b"get some_key_of_usual_length\r\n".to_vec(),
            _ => framing.sample_request(&bytes),
        };
        (framing, request, framing.sample_reply(&bytes))
    };
    Framing::all(BYTES as u32).map(case).collect()
}

fn parse(c: &mut Criterion) {
    let mut group = c.benchmark_group("framing/parse_request");
    for (framing, request, _) in cases() {
        let pipeline = Pipeline::new(framing, &request, REQUESTS);
        group.throughput(Throughput::Elements(pipeline.requests() as u64));
        group.bench_function(BenchmarkId::from_parameter(framing), |b| {
            b.iter(|| {
                pipeline.parse(|message| {
                    black_box(message);
                });
            });
        });
    }
    group.finish();
}

fn encode(c: &mut Criterion) {
    let mut group = c.benchmark_group("framing/encode_reply");
    for (framing, _, reply) in cases() {
        let mut out = Vec::with_capacity(REQUESTS * (reply.len() + 64));
        group.throughput(Throughput::Elements(REQUESTS as u64));
        group.bench_function(BenchmarkId::from_parameter(framing), |b| {
            b.iter(|| {
                out.clear();
                for _ in 0..REQUESTS {
                    framing.encode_reply(&reply, &mut out).expect("a reply of this framing");
                }
                black_box(out.len())
            });
            assert!(out.len() >= REQUESTS * reply.len(), "{framing}: every reply was written");
        });
    }
    group.finish();
}

criterion_group!(benches, parse, encode);
criterion_main!(benches);
