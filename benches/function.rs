//! The cost of a function on the path: a chain of one function, batches of 32 messages of 64 bytes as one receive call brings them. The copy of
//! the messages into the batch is part of it.

use std::sync::Arc;
use std::time::Instant;

use builtins::Code;
use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use onpath::{Chain, Counters, Direction, Link, Messages, OnFailure, Outcome, Policy, Sizes, Spec};

const BATCH: usize = 32;
const LEN_BYTES: usize = 64;
const MODULE: &[u8] = include_bytes!("../functions/threshold.wasm");

fn chain(function: &str) -> Chain {
    let mut spec = Spec::new("f", function);
    if function != "passthrough" {
        spec.params = vec![("high".into(), 1000.into())];
    }
    let sizes = Sizes { message_bytes: 1024, reply_bytes: 1024 };
    let code = Code::open(&spec, MODULE).expect("it is a function");
    let instance = code.instance(&spec, sizes).expect("it starts");
    let policy = Policy { on_failure: OnFailure::Closed, deadline_ns: 1_000_000_000 };
    Chain::new(vec![Link::new(1, instance, policy, Arc::new(Counters::default()))])
}

fn functions(c: &mut Criterion) {
    let mut group = c.benchmark_group("function");
    group.throughput(Throughput::Elements(BATCH as u64));
    let begin = Instant::now();
    let clock = || begin.elapsed().as_nanos() as u64;
    let mut message = [7; LEN_BYTES];
    message[14..18].copy_from_slice(&500u32.to_be_bytes());
    for function in ["passthrough", "threshold", "threshold.wasm"] {
        let mut chain = chain(function);
        let mut messages = Messages::new(1024, 1024);
        group.bench_function(BenchmarkId::from_parameter(function), |b| {
            b.iter(|| {
                messages.clear();
                (0..BATCH).for_each(|_| messages.push(&message));
                chain.decide(Direction::Requests, &mut messages, &clock);
                assert_eq!(messages.outcome(BATCH - 1), Outcome::Pass);
            });
        });
    }
    group.finish();
}

criterion_group!(benches, functions);
criterion_main!(benches);
