//! The trace of a run as one number: two runs with the same hash did the same things at the same
//! times. `--trace` also prints it.

use crate::rng::mix;

/// The trace of a run.
#[derive(Clone, Debug, Default)]
pub struct Trace {
    hash: u64,
    events: u64,
    print: bool,
}

impl Trace {
    /// An empty trace; `print` writes every event to stderr.
    pub fn new(print: bool) -> Self {
        Self { print, ..Self::default() }
    }

    /// Records the event `what` at `now_ns`, with its details.
    pub fn note(&mut self, now_ns: u64, what: &'static str, circumstances: &[u64]) {
        let mut hash = mix(self.hash ^ now_ns);
        for byte in what.bytes() {
            hash = hash.wrapping_mul(0x100_0000_01b3) ^ u64::from(byte);
        }
        for circumstance in circumstances {
            hash = mix(hash ^ circumstance);
        }
        self.hash = hash;
        self.events += 1;
        if self.print {
            eprintln!("{now_ns:>12} {what} {circumstances:?}");
        }
    }

    /// The hash of everything noted so far.
    pub fn hash(&self) -> u64 {
        self.hash
    }

    /// How many events were noted.
    pub fn events(&self) -> u64 {
        self.events
    }
}
