//! Workloads: requests, and their correct answers.

pub mod coap;
mod custom;
mod digits;
mod faces;
mod memcached;
mod sealed;
mod sockperf;
mod vectors;
mod zipf;

pub use coap::Coap;
pub use custom::{Custom, Expect};
pub use digits::{Digit, Digits};
pub use faces::{Faces, Person, Pictures, Question};
pub use memcached::{KeySpace, Lookups, Memcached};
pub use sealed::Sealed;
pub use sockperf::Sockperf;
pub use vectors::Vectors;

/// Requests and their correct answers.
pub trait Workload {
    /// Writes request number `index` into `into`, which is empty. The same index gives the same request: it may be
    /// written again if the host kernel had no room.
    fn request(&mut self, index: u64, into: &mut Vec<u8>);

    /// Whether `reply` is the correct answer to request number `index`.
    fn accepts(&mut self, index: u64, reply: &[u8]) -> bool;

    /// Whether replies contain the number of their request, for [`Self::identify`].
    fn has_identity(&self) -> bool {
        false
    }

    /// The number of the request that `reply` answers, if it can be read. [`Self::accepts`] checks the rest of the
    /// reply.
    fn identify(&self, reply: &[u8]) -> Option<u64> {
        let _ = reply;
        None
    }

    /// Whether a reply to one request is never correct for another, so that [`Self::accepts`] detects duplicates. If
    /// not, clients check for unexpected replies.
    fn replies_differ(&self) -> bool {
        true
    }

    /// Results of gets so far, including those of a warm-up, if there are any.
    fn lookups(&self) -> Lookups {
        Lookups::default()
    }
}

/// Messages that are echoed; every one is different.
#[derive(Clone, Debug)]
pub struct Echo {
    len_bytes: usize,
    expected: Vec<u8>,
}

impl Echo {
    /// Messages of this length.
    pub fn new(len_bytes: usize) -> Self {
        Self { len_bytes, expected: Vec::with_capacity(len_bytes) }
    }

    /// The number of the message, then bytes derived from it.
    fn fill(&self, index: u64, into: &mut Vec<u8>) {
        let mut word = index;
        into.reserve(self.len_bytes);
        for _ in 0..self.len_bytes / 8 {
            into.extend_from_slice(&word.to_le_bytes());
            word = word.wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(17) ^ index;
        }
        into.extend_from_slice(&word.to_le_bytes()[..self.len_bytes % 8]);
    }
}

impl Workload for Echo {
    fn request(&mut self, index: u64, into: &mut Vec<u8>) {
        self.fill(index, into);
    }

    fn accepts(&mut self, index: u64, reply: &[u8]) -> bool {
        let mut expected = std::mem::take(&mut self.expected);
        expected.clear();
        self.fill(index, &mut expected);
        let right = reply == expected.as_slice();
        self.expected = expected;
        right
    }

    fn has_identity(&self) -> bool {
        self.len_bytes >= 8
    }

    fn identify(&self, reply: &[u8]) -> Option<u64> {
        reply.first_chunk().map(|bytes| u64::from_le_bytes(*bytes))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// The contract of every workload with identities: the reply identifies its request.
    pub(super) fn identity_survives(workload: &mut dyn Workload, index: u64, reply: &[u8]) {
        assert!(workload.has_identity());
        assert_eq!(workload.identify(reply), Some(index));
        assert!(workload.accepts(index, reply));
        assert!(!workload.accepts(index + 1, reply), "{index} is not {index} + 1");
    }

    proptest! {
        #[test]
        fn echoes_differ_and_contain_their_number(index in 0..u64::MAX, len in 8..2000usize) {
            let mut echo = Echo::new(len);
            let mut message = Vec::new();
            echo.request(index, &mut message);
            prop_assert_eq!(message.len(), len);
            identity_survives(&mut echo, index, &message);
            for at in 0..len {
                message[at] ^= 1;
                prop_assert!(!echo.accepts(index, &message));
                message[at] ^= 1;
            }
            prop_assert!(!echo.accepts(index, &message[1..]));
        }
    }

    #[test]
    fn short_echoes_have_no_identity() {
        for len in 0..8 {
            let mut echo = Echo::new(len);
            assert!(!echo.has_identity());
            let mut message = Vec::new();
            echo.request(3, &mut message);
            assert_eq!(message.len(), len);
            assert!(echo.accepts(3, &message));
        }
    }
}
