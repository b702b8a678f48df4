//! Tokens that were used, for functions that accept each token once: a table of fixed size that all workers share.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

const PLACES: usize = 1 << 16;
/// Memory of the table.
pub(super) const BYTES: u64 = (PLACES * size_of::<AtomicU64>()) as u64;
/// Places that a token may have.
const NEAR: usize = 8;
/// Times in the table are in units of this, so that 20 bits tell times apart that are up to 97 days from each other.
const UNIT_S: u64 = 16;
const TIME_BITS: u32 = 20;
const USER_BITS: u32 = 12;
const TIME_MASK: u64 = (1 << TIME_BITS) - 1;

/// What is known of a token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Use {
    /// It was not used before.
    First,
    /// It was used by the same message: a retransmission.
    Again,
    /// It was used by another message.
    Replay,
    /// There is no place to remember it.
    Crowded,
}

/// See the module's text. A place is one word: 32 bits of the token, the time until which it counts, and 12 bits of the message that used it. So two
/// different tokens are taken for one in less than one of a hundred million cases.
#[derive(Default)]
pub struct Seen(OnceLock<Box<[AtomicU64]>>);

impl Seen {
    /// Reserves the memory. Before that there is no place.
    pub fn reserve(&self) {
        self.0.get_or_init(|| (0..PLACES).map(|_| AtomicU64::new(0)).collect());
    }

    /// A message `user` uses `token`, which counts until a time; both are hashes that clients cannot choose.
    pub fn note(&self, token: u64, user: u64, now_s: u64, until_s: u64) -> Use {
        let Some(places) = self.0.get() else { return Use::Crowded };
        let first = (token & u64::from(u32::MAX)) as usize % PLACES / NEAR * NEAR;
        let near = &places[first..first + NEAR];
        let tag = token >> 32;
        let user = user & ((1 << USER_BITS) - 1);
        let now = now_s / UNIT_S;
        // Later than the end by up to a unit; a place that was never used is over.
        let over = |word: u64| {
            let until = word >> USER_BITS & TIME_MASK;
            word == 0 || until.wrapping_sub(now) & TIME_MASK > TIME_MASK / 2
        };
        let until = (until_s / UNIT_S + 1) & TIME_MASK;
        let new = tag << (TIME_BITS + USER_BITS) | until << USER_BITS | user;
        loop {
            let mut free = None;
            for place in near {
                let word = place.load(Ordering::Relaxed);
                if over(word) {
                    free = free.or(Some((place, word)));
                } else if word >> (TIME_BITS + USER_BITS) == tag
                    && !mutants::on("forget_used_token")
                {
                    let same = word & ((1 << USER_BITS) - 1) == user;
                    return if same { Use::Again } else { Use::Replay };
                }
            }
            let Some((place, word)) = free else { return Use::Crowded };
            // A word is all that there is: it orders nothing else.
            if place.compare_exchange(word, new, Ordering::Relaxed, Ordering::Relaxed).is_ok() {
                return Use::First;
            }
        }
    }
}
