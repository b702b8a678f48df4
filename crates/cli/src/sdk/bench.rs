//! What a call of a function costs, without a server: batches of messages pass through a chain that has only this function.

use std::sync::Arc;
use std::time::{Duration, Instant};

use builtins::Code;
use onpath::{
    Chain, Counters, Direction, Link, Messages, OnFailure, Policy, Sizes, Snapshot, Spec,
};

/// What was measured.
#[derive(Clone, Debug)]
pub(crate) struct Measured {
    pub(crate) messages: u64,
    /// Of a message in the calls, of the best of all parts of the measurement.
    pub(crate) ns: f64,
    /// The same with the copy of the message into its batch.
    pub(crate) path_ns: f64,
    /// Calls that failed, and why the last one did.
    pub(crate) failures: u64,
    pub(crate) last_failure: String,
}

/// Parts of a measurement: other work of the machine makes some of them slower.
const PARTS: u32 = 10;

/// Shows `messages` to a function again and again, `batch` at a time.
pub(crate) fn measure(
    spec: &Spec,
    content: &[u8],
    messages: &[Vec<u8>],
    batch: usize,
    patience: Duration,
) -> Result<Measured, String> {
    let longest = messages.iter().map(Vec::len).max().unwrap_or_default().max(64);
    let sizes = Sizes { message_bytes: longest, reply_bytes: longest };
    let spec = &Spec { dictionary: Some("bench".to_owned()), ..spec.clone() };
    let made = Code::open(spec, content).and_then(|code| code.instance(spec, sizes));
    let function = made.map_err(|error| error.to_string())?;
    let counters = Arc::<Counters>::default();
    let policy = Policy { on_failure: OnFailure::Open, deadline_ns: spec.deadline_us * 1000 };
    let mut chain = Chain::new(vec![Link::new(1, function, policy, Arc::clone(&counters))]);
    let mut shown = Messages::new(longest, longest);
    let began = Instant::now();
    let clock = || began.elapsed().as_nanos() as u64;
    let (mut best, mut best_path, mut at) = (f64::INFINITY, f64::INFINITY, 0);
    let counted = || {
        let mut snapshot = Snapshot::default();
        snapshot.add(&counters);
        snapshot
    };
    for _ in 0..PARTS {
        let before = counted();
        let part = Instant::now();
        while part.elapsed() < patience / PARTS || counted().messages == before.messages {
            for _ in 0..64 {
                shown.clear();
                for _ in 0..batch {
                    let message = &messages[at % messages.len()];
                    at += 1;
                    if shown.has_room(message.len()) {
                        shown.push(message);
                    }
                }
                chain.decide(Direction::Requests, &mut shown, &clock);
            }
        }
        let took = part.elapsed();
        let after = counted();
        let messages = (after.messages - before.messages) as f64;
        best = best.min((after.time_ns - before.time_ns) as f64 / messages);
        best_path = best_path.min(took.as_nanos() as f64 / messages);
    }
    let all = counted();
    let last_failure = counters.last_failure();
    Ok(Measured {
        messages: all.messages,
        ns: best,
        path_ns: best_path,
        failures: all.failures,
        last_failure,
    })
}
