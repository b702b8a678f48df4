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
    let bytes = vec![b'x'; BYTES];
    let mut sockperf = vec![0; BYTES];
    // A sockperf message that requests a reply; the length is that of the whole message.
    sockperf[8..10].copy_from_slice(&3_u16.to_be_bytes());
    sockperf[10..14].copy_from_slice(&(BYTES as u32).to_be_bytes());
    let value = format!("VALUE key 0 {BYTES}\r\n{}\r\nEND\r\n", "x".repeat(BYTES));
    let plain = |framing| (framing, bytes.clone(), bytes.clone());
    vec![
        plain(Framing::Raw),
        plain(Framing::Fixed(BYTES as u32)),
        plain(Framing::LengthU16),
        plain(Framing::LengthU32),
        plain(Framing::Line),
        (Framing::Sockperf, sockperf.clone(), sockperf),
        (Framing::Memcached, b"get some_key_of_usual_length\r\n".to_vec(), value.into_bytes()),
    ]
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
