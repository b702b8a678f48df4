//! The control and status words of a region.

use core::mem::offset_of;

use crate::abi::*;
use crate::doorbell::{set_sleeping, sleeping};
use crate::memory::{Memory, Ordering};

use super::from_words;

/// The control and status words of a region. Each has one writer; see [`crate::abi`].
#[derive(Clone)]
pub struct Words<M: Memory> {
    pub(super) memory: M,
    pub(super) blocks_offset: u64,
    pub(super) block_count: u32,
    pub(super) mqueue_count: u32,
    pub(super) tx_heads_offset: u64,
    pub(super) tx_tails_offset: u64,
    pub(super) rx_heads_offset: u64,
}

macro_rules! words {
    ($( $(#[doc = $doc:literal])+ $get:ident $set:ident = $at:expr; )+) => { $(
        $(#[doc = $doc])+
        #[inline]
        pub fn $get(&self) -> u64 {
            // EDGE STOP HEARTBEAT STATE (acquire half)
            self.memory.load($at as u64, Ordering::Acquire)
        }
        $(#[doc = $doc])+
        #[inline]
        pub fn $set(&self, value: u64) {
            // EDGE STOP HEARTBEAT STATE (release half)
            self.memory.store($at as u64, value, Ordering::Release);
        }
    )+ };
}

impl<M: Memory> Words<M> {
    words! {
        /// The engine's stop request, one of [`crate::abi::stop`]. A runtime in another process stores NOW itself when its
        /// generation has ended; see ORDERING.md.
        stop set_stop = ENGINE_WORDS_OFFSET + offset_of!(EngineWords, stop) as u64;
        /// The engine's heartbeat.
        engine_heartbeat set_engine_heartbeat = ENGINE_WORDS_OFFSET + offset_of!(EngineWords, heartbeat) as u64;
        /// The accelerator runtime's state, one of [`crate::abi::state`]. Set the reason first, so
        /// that a reader that sees ENDED sees the reason.
        accelerator_state set_accelerator_state = ACCELERATOR_WORDS_OFFSET + offset_of!(AcceleratorWords, state) as u64;
        /// Why the accelerator runtime ended, one of [`crate::abi::reason`].
        accelerator_reason set_accelerator_reason = ACCELERATOR_WORDS_OFFSET + offset_of!(AcceleratorWords, reason) as u64;
        /// The accelerator runtime's heartbeat.
        accelerator_heartbeat set_accelerator_heartbeat = ACCELERATOR_WORDS_OFFSET + offset_of!(AcceleratorWords, heartbeat) as u64;
        /// The last round trip to a remote accelerator, in nanoseconds; any value if the runtime is hostile.
        round_trip_ns set_round_trip_ns = ACCELERATOR_WORDS_OFFSET + offset_of!(AcceleratorWords, round_trip_ns) as u64;
        /// What the library of the blocks can do, of [`crate::abi::feature`]; any value if the runtime is hostile.
        accelerator_features set_accelerator_features = ACCELERATOR_WORDS_OFFSET + offset_of!(AcceleratorWords, features) as u64;
    }

    /// Announces that a worker is about to sleep (or no longer is). After that it must check its
    /// rings once more before it sleeps: either it sees the last message, or the publisher sees the flag.
    pub fn set_parked(&self, parked: bool) {
        set_sleeping(&self.memory, ENGINE_PARKED_OFFSET, parked);
    }

    /// Whether a worker sleeps. Call this after publishing, and wake it if so.
    #[inline]
    pub fn parked(&self) -> bool {
        sleeping(&self.memory, ENGINE_PARKED_OFFSET)
    }

    /// The same from the accelerator's side: see [`Self::set_parked`].
    pub fn set_accelerator_parked(&self, parked: bool) {
        set_sleeping(&self.memory, ACCELERATOR_PARKED_OFFSET, parked);
    }

    /// Whether the accelerator's side sleeps. Call this after publishing, and wake it if so.
    #[inline]
    pub fn accelerator_parked(&self) -> bool {
        sleeping(&self.memory, ACCELERATOR_PARKED_OFFSET)
    }

    fn block_offset(&self, block: u32) -> u64 {
        assert!(block < self.block_count, "no block {block}");
        self.blocks_offset + u64::from(block) * size_of::<BlockWords>() as u64
    }

    /// A block's line of the status page. If its state is ENDED, reason and counts are final.
    pub fn block(&self, block: u32) -> BlockWords {
        // The state first: its release store orders the writer's earlier stores.
        let state = self.block_state(block);
        let words =
            self.memory.load_words::<{ size_of::<BlockWords>() / 8 }>(self.block_offset(block));
        BlockWords { state, ..from_words(words) }
    }

    /// Publishes a block's state; the reason goes first, so that a reader that sees ENDED sees the reason.
    pub fn set_block(&self, block: u32, state: u64, reason: u64) {
        let at = self.block_offset(block);
        let word = |field: usize| at + field as u64;
        self.memory.store(word(offset_of!(BlockWords, reason)), reason, Ordering::Relaxed);
        // EDGE STATE (release half)
        self.memory.store(word(offset_of!(BlockWords, state)), state, Ordering::Release);
    }

    /// Only a block's state word.
    #[inline]
    pub fn block_state(&self, block: u32) -> u64 {
        let at = self.block_offset(block) + offset_of!(BlockWords, state) as u64;
        // EDGE STATE (acquire half)
        self.memory.load(at, Ordering::Acquire)
    }

    /// The doorbell of an mqueue's TX ring: its head word. A reader that sees it sees the messages below it.
    #[inline]
    pub fn tx_head(&self, mqueue: u32) -> u64 {
        self.head_word(self.tx_heads_offset, mqueue)
    }

    /// For the engine: whether an mqueue's TX ring holds messages that it has not released. Unlike a remembered
    /// head, this finds a message whose head was seen before the message itself.
    #[inline]
    pub fn tx_waiting(&self, mqueue: u32) -> bool {
        // The engine's own word: no other side's stores depend on it.
        let head = self.tx_head(mqueue);
        head != self.memory.load(self.tx_tails_offset + 8 * u64::from(mqueue), Ordering::Relaxed)
    }

    /// Adds to `found` those of `mqueues` for which [`Self::tx_waiting`] holds.
    // Without a branch that depends on the result: a worker checks each mqueue in every turn, and the
    // results are unpredictable.
    #[inline]
    pub fn tx_waiting_among(&self, mqueues: &[u32], found: &mut Vec<u32>) {
        let before = found.len();
        found.resize(before + mqueues.len(), 0);
        let (room, mut count) = (&mut found[before..], 0);
        for &mqueue in mqueues {
            room[count] = mqueue;
            count += usize::from(self.tx_waiting(mqueue));
        }
        found.truncate(before + count);
    }

    /// The doorbell of an mqueue's RX ring: its head word. A reader that sees it sees the messages below it.
    #[inline]
    pub fn rx_head(&self, mqueue: u32) -> u64 {
        self.head_word(self.rx_heads_offset, mqueue)
    }

    #[inline]
    fn head_word(&self, heads_offset: u64, mqueue: u32) -> u64 {
        assert!(mqueue < self.mqueue_count, "no mqueue {mqueue}");
        // EDGE RX_PUBLISH TX_PUBLISH DOORBELL (acquire half): a head that is remembered must not be ahead of its messages
        self.memory.load(heads_offset + 8 * u64::from(mqueue), Ordering::Acquire)
    }
}

const ENGINE_PARKED_OFFSET: u64 = ENGINE_WORDS_OFFSET + offset_of!(EngineWords, parked) as u64;
const ACCELERATOR_PARKED_OFFSET: u64 =
    ACCELERATOR_WORDS_OFFSET + offset_of!(AcceleratorWords, parked) as u64;
