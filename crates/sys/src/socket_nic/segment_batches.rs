//! GSO batches: replies to one client that leave in one message.
//!
//! Replies become ready in the order in which blocks finish, so replies to several clients are interleaved.
//! `UDP_SEGMENT` sends to one destination at a time, and a message costs the host kernel a hundred times as
//! much as one more segment (about 2900 ns against 7 to 50 over loopback). [`SegmentBatches::arrange`]
//! therefore moves datagrams with the same destination next to each other. An item of the send batch may be several datagrams of
//! one length, which stay together.
//!
//! *Ordering.* Each destination's datagrams keep their order. A batch leaves at the position of its
//! first datagram; when it is full or ended by a shorter segment, the next datagram to the same
//! destination starts another batch at its own position. So a datagram is delayed by at most the
//! [`GSO_DATAGRAMS_MAX`] - 1 datagrams that may join each batch before it, and datagrams that cannot be batched
//! stay where they are.
//!
//! *Holding back.* A busy engine can delay a short batch whose client has more replies pending: they become ready
//! while others are sent, and leave with it. So in a patient send batch ([`TxBatch::may_defer`]), short batches whose
//! last datagram announces [more](TxItem::more) stay for the next call. A client that answers a batch with a
//! batch then sends longer ones too. The engine ends the delay. A batch that nothing can join any more leaves,
//! because later datagrams would otherwise overtake it. With fewer than about two destinations everything leaves.
//!
//! [`TxBatch::may_defer`]: wire::nic::TxBatch::may_defer

use std::net::{IpAddr, SocketAddr};

use wire::nic::{GSO_DATAGRAMS_MAX, TxItem, UDP_PAYLOAD_MAX};

/// Items arranged together; at least as many as a port's batch holds.
const WINDOW: usize = 1024;
/// Entries in the destination table, and how many are probed for one destination. With more destinations than
/// entries, some are evicted, and their next datagram starts a new batch.
const ENTRIES: usize = 512;
const PROBES: usize = 4;
/// Datagrams in a batch that is long enough to leave: the cost of a call per datagram is then small.
const LONG: usize = 16;
/// Marks an empty entry.
const NONE: u16 = u16::MAX;

/// A batch under construction.
#[derive(Clone, Copy, Debug)]
pub(super) struct SegmentBatch {
    /// Position of its first item.
    first: u16,
    items: u16,
    /// Its datagrams.
    count: u16,
    /// Bytes of a segment; 0 if nothing more may join.
    segment: u32,
    bytes: u32,
    /// The `more` flag of its last datagram.
    more: bool,
}

impl SegmentBatch {
    /// A batch that starts with `item`, at position `first`. Segments of more than
    /// `segment_bytes_max` bytes, and empty ones, are sent alone.
    fn start(first: usize, item: &TxItem, segment_bytes_max: u32) -> Self {
        let segment = if item.len > segment_bytes_max { 0 } else { item.len };
        let bytes = item.bytes() as u32;
        Self { first: first as u16, items: 1, count: item.count, segment, bytes, more: item.more }
    }

    /// Appends an item to the same destination if the host kernel will split the batch at the same
    /// boundaries: all segments have one length except the last, which may be shorter.
    fn join(&mut self, item: &TxItem) -> bool {
        let shortest = if item.count == 1 { 1 } else { self.segment.max(1) };
        let fits = (shortest..=self.segment).contains(&item.len)
            && usize::from(self.count + item.count) <= GSO_DATAGRAMS_MAX
            && self.bytes as usize + item.bytes() <= UDP_PAYLOAD_MAX;
        if fits {
            self.items += 1;
            self.count += item.count;
            self.bytes += item.bytes() as u32;
            self.more = item.more;
            if item.len < self.segment {
                self.segment = 0;
            }
        }
        fits
    }

    /// Nothing more can join.
    fn close(&mut self) {
        self.segment = 0;
    }

    /// Whether it may wait for more datagrams to join.
    fn may_wait(&self) -> bool {
        self.more && self.segment > 0 && usize::from(self.count) < LONG
    }
}

fn same_destination(a: &TxItem, b: &TxItem) -> bool {
    (a.peer == b.peer || mutants::on("gso_batch_ignores_destination")) && a.local == b.local
}

/// Where the probe for a destination starts. Clients who choose addresses that collide get shorter
/// batches and no other disadvantage.
fn hash(peer: SocketAddr) -> usize {
    let address = match peer.ip() {
        IpAddr::V4(ip) => u64::from(ip.to_bits()),
        IpAddr::V6(ip) => (ip.to_bits() as u64) ^ (ip.to_bits() >> 64) as u64,
    };
    let mixed = (address ^ u64::from(peer.port()) << 32).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    (mixed >> 48) as usize
}

/// Whether a destination may recur after another one.
fn is_mixed(waiting: &[TxItem]) -> bool {
    let change = |pair: &&[TxItem]| !same_destination(&pair[0], &pair[1]);
    waiting.windows(2).filter(change).nth(1).is_some()
}

/// How many items at the front of `waiting` can leave as one message, if the first can.
pub(super) fn front_batch(waiting: &[TxItem], segment_bytes_max: u32) -> usize {
    let first = &waiting[0];
    let mut batch = SegmentBatch::start(0, first, segment_bytes_max);
    let joins = |next: &&TxItem| same_destination(first, next) && batch.join(next);
    1 + waiting[1..].iter().take_while(joins).count()
}

/// Forms GSO batches; its tables serve all UDP ports of a worker.
pub(super) struct SegmentBatches {
    batches: Vec<SegmentBatch>,
    /// The last batch of a destination, by the hash of its address.
    table: Box<[u16; ENTRIES]>,
    /// The batch of each datagram.
    batch_of: Vec<u16>,
    arranged: Vec<TxItem>,
}

impl SegmentBatches {
    pub(super) fn new() -> Self {
        Self {
            batches: Vec::with_capacity(WINDOW),
            table: Box::new([NONE; ENTRIES]),
            batch_of: Vec::with_capacity(WINDOW),
            arranged: Vec::with_capacity(WINDOW),
        }
    }

    /// Moves datagrams with the same destination next to each other where they can leave as one message. In a
    /// `patient` batch, those that may wait for more are moved to the end; returns their number.
    pub(super) fn arrange(
        &mut self,
        waiting: &mut [TxItem],
        segment_bytes_max: u32,
        may_defer: bool,
    ) -> usize {
        let may_defer = may_defer && waiting.len() <= WINDOW;
        let mut kept = 0;
        for window in waiting.chunks_mut(WINDOW) {
            if is_mixed(window) {
                let moves = self.assign_batches(window, segment_bytes_max);
                let waits = |batch: &&SegmentBatch| may_defer && batch.may_wait();
                kept = self.batches.iter().filter(waits).map(|t| usize::from(t.items)).sum();
                if moves || kept > 0 {
                    self.group_by_batch(window, may_defer);
                }
            }
        }
        kept
    }

    /// Assigns each datagram to a batch. Returns whether any datagram has to move.
    fn assign_batches(&mut self, window: &[TxItem], segment_bytes_max: u32) -> bool {
        self.batches.clear();
        self.batch_of.clear();
        self.table.fill(NONE);
        let mut moves = false;
        let mut entry = 0;
        for (at, datagram) in window.iter().enumerate() {
            // Often the destination is the same as the previous one.
            if at == 0 || !same_destination(&window[at - 1], datagram) {
                entry = self.entry_for(window, datagram);
            }
            let number = self.table[entry];
            let last = self.batches.len().wrapping_sub(1) as u16;
            if let Some(batch) = self.batches.get_mut(usize::from(number)) {
                if batch.join(datagram) {
                    moves |= number != last;
                    self.batch_of.push(number);
                    continue;
                }
                if !mutants::on("overtake_held_back") {
                    batch.close();
                }
            }
            let started = self.batches.len() as u16;
            self.batches.push(SegmentBatch::start(at, datagram, segment_bytes_max));
            self.table[entry] = started;
            self.batch_of.push(started);
        }
        moves
    }

    /// The table entry of a datagram's destination: the existing one, a free one, or an evicted one.
    fn entry_for(&mut self, window: &[TxItem], datagram: &TxItem) -> usize {
        let start = hash(datagram.peer);
        for probe in 0..PROBES {
            let entry = (start + probe) % ENTRIES;
            let known = self.batches.get(usize::from(self.table[entry]));
            let suits =
                |t: &SegmentBatch| same_destination(&window[usize::from(t.first)], datagram);
            if known.is_none_or(suits) {
                return entry;
            }
        }
        if !mutants::on("join_evicted_batch") {
            let evicted = std::mem::replace(&mut self.table[start % ENTRIES], NONE);
            self.batches[usize::from(evicted)].close();
        }
        start % ENTRIES
    }

    /// A counting sort by batch, which is stable; if `patient`, batches that wait come last.
    fn group_by_batch(&mut self, window: &mut [TxItem], may_defer: bool) {
        let mut end = 0;
        for waits in [false, true] {
            let of_these = |batch: &&mut SegmentBatch| (may_defer && batch.may_wait()) == waits;
            for batch in self.batches.iter_mut().filter(of_these) {
                batch.first = end;
                end += batch.items;
            }
        }
        self.arranged.clear();
        self.arranged.extend_from_slice(window);
        for (datagram, number) in self.arranged.iter().zip(&self.batch_of) {
            let next = &mut self.batches[usize::from(*number)].first;
            window[usize::from(*next)] = *datagram;
            *next += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use proptest::prelude::*;

    use super::*;

    /// Datagrams by client, source and length; each has an offset of its own.
    fn datagrams(of: &[(u16, u8, u32)]) -> Vec<TxItem> {
        let mut offset = 0;
        let mut datagram = |&(client, source, len): &(u16, u8, u32)| {
            offset += len + 1;
            TxItem {
                peer: ([127, 0, 0, 1], 1 + client).into(),
                local: (source > 0).then_some([127, 0, 0, source].into()),
                offset,
                len,
                count: 1,
                more: false,
                lent_at: None,
            }
        };
        of.iter().map(&mut datagram).collect()
    }

    type Destination = (std::net::SocketAddr, Option<std::net::IpAddr>);

    fn destination(datagram: &TxItem) -> Destination {
        (datagram.peer, datagram.local)
    }

    /// The offsets per destination, in order.
    fn by_client(datagrams: &[TxItem]) -> Vec<(Destination, u32)> {
        let mut sorted: Vec<_> = datagrams.iter().map(|d| (destination(d), d.offset)).collect();
        sorted.sort_by_key(|(to, _)| *to);
        sorted
    }

    /// The datagrams as batches of (destination, offsets, lengths).
    fn cut(mut waiting: &[TxItem], segment_max: u32) -> Vec<(Destination, Vec<u32>, Vec<u32>)> {
        let mut batches = Vec::new();
        while !waiting.is_empty() {
            let (batch, rest) = waiting.split_at(front_batch(waiting, segment_max));
            let offsets = batch.iter().map(|d| d.offset).collect();
            assert!(batch.iter().all(|d| destination(d) == destination(&batch[0])));
            batches.push((destination(&batch[0]), offsets, batch.iter().map(|d| d.len).collect()));
            waiting = rest;
        }
        batches
    }

    /// Reference model while no destination is evicted: each datagram joins the last batch of its
    /// destination if the rules allow it, otherwise it starts one.
    fn model(waiting: &[TxItem], segment_max: u32) -> Vec<(Destination, Vec<u32>, Vec<u32>)> {
        let mut batches: Vec<(Destination, Vec<u32>, Vec<u32>)> = Vec::new();
        for datagram in waiting {
            let last = batches.iter_mut().rev().find(|(to, ..)| *to == destination(datagram));
            if let Some((_, offsets, lens)) = last {
                let ends = lens.last() < lens.first();
                let bytes: u32 = lens.iter().sum();
                if !ends
                    && lens[0] <= segment_max
                    && lens.len() < 64
                    && (1..=lens[0]).contains(&datagram.len)
                    && bytes + datagram.len <= 65_507
                {
                    offsets.push(datagram.offset);
                    lens.push(datagram.len);
                    continue;
                }
            }
            batches.push((destination(datagram), vec![datagram.offset], vec![datagram.len]));
        }
        batches
    }

    fn lens() -> impl Strategy<Value = u32> {
        prop_oneof![6 => Just(64u32), 1 => 0u32..70, 1 => 1400u32..1500, 1 => 30_000u32..65_507]
    }

    proptest! {
        /// Every datagram occurs once, in a batch that the host kernel accepts, in its client's order, and
        /// there are as few batches as the rules allow.
        #[test]
        fn an_arrangement_matches_the_model(
            of in prop::collection::vec((0u16..12, 0u8..2, lens()), 1..900),
            segment_max in prop_oneof![Just(65_507u32), Just(1452), Just(63)],
        ) {
            let mut waiting = datagrams(&of);
            let expected = model(&waiting, segment_max);
            let mut batches = SegmentBatches::new();
            batches.arrange(&mut waiting, segment_max, false);
            prop_assert_eq!(cut(&waiting, segment_max), expected.clone());
            // Datagrams held back are arranged again together with later ones.
            let left = waiting.len() / 3;
            let mut waiting = waiting.split_off(left);
            let again = model(&waiting, segment_max);
            batches.arrange(&mut waiting, segment_max, false);
            prop_assert_eq!(cut(&waiting, segment_max), again);
        }

        /// Held back are the last batches of destinations with more to come, if they are open and short; everything else leaves
        /// as in a batch that is not patient.
        #[test]
        fn a_patient_batch_holds_back_batches_that_may_grow(
            of in prop::collection::vec((0u16..12, 0u8..2, lens()), 1..100),
            more in prop::collection::vec(any::<bool>(), 100),
            segment_max in prop_oneof![Just(65_507u32), Just(1452), Just(63)],
        ) {
            let mut waiting = datagrams(&of);
            waiting.iter_mut().zip(&more).for_each(|(datagram, more)| datagram.more = *more);
            let mixed = is_mixed(&waiting);
            let follows: HashMap<u32, bool> = waiting.iter().map(|d| (d.offset, d.more)).collect();
            let batches = model(&waiting, segment_max);
            let grows = |at: usize| {
                let (to, offsets, lens) = &batches[at];
                let last = batches[at + 1..].iter().all(|(other, ..)| other != to);
                let open = lens.last() == lens.first() && (1..=segment_max).contains(&lens[0]);
                mixed && last && open && offsets.len() < LONG && follows[offsets.last().unwrap()]
            };
            let (kept, leaving): (Vec<_>, Vec<_>) = (0..batches.len()).partition(|at| grows(*at));
            let chosen = |of: &[usize]| of.iter().map(|at| batches[*at].clone()).collect::<Vec<_>>();
            let count = SegmentBatches::new().arrange(&mut waiting, segment_max, true);
            let (left, stayed) = waiting.split_at(waiting.len() - count);
            prop_assert_eq!(cut(left, segment_max), chosen(&leaving));
            prop_assert_eq!(cut(stayed, segment_max), chosen(&kept));
        }

        /// Over many turns, also with more destinations than table entries.
        #[test]
        fn nothing_overtakes_held_back_datagrams(
            turns in prop::collection::vec(
                prop::collection::vec((0u16..900, lens(), any::<bool>()), 1..700), 1..6),
        ) {
            let all: Vec<_> = turns.iter().flatten().map(|&(to, len, _)| (to, 0, len)).collect();
            let mut given = datagrams(&all);
            given.iter_mut().zip(turns.iter().flatten()).for_each(|(d, turn)| d.more = turn.2);
            let mut batches = SegmentBatches::new();
            let (mut waiting, mut left, mut rest) = (Vec::new(), Vec::new(), &given[..]);
            for turn in &turns {
                let (now, later) = rest.split_at(turn.len());
                rest = later;
                waiting.extend_from_slice(now);
                let kept = batches.arrange(&mut waiting, 65_507, !rest.is_empty());
                left.extend(waiting.drain(..waiting.len() - kept));
            }
            prop_assert!(waiting.is_empty());
            prop_assert_eq!(by_client(&left), by_client(&given));
        }

        /// Items of several datagrams stay whole, in messages that the host kernel splits at the same boundaries.
        #[test]
        fn items_of_several_datagrams_stay_whole(
            of in prop::collection::vec((0u16..6, prop_oneof![Just(64u32), 1u32..2000], 1u16..=64), 1..400),
            may_defer in any::<bool>(),
        ) {
            let lens: Vec<_> = of.iter().map(|&(client, len, _)| (client, 0, len)).collect();
            let mut before = datagrams(&lens);
            for (item, (number, &(.., count))) in before.iter_mut().zip((0..).zip(&of)) {
                item.count = count.min((UDP_PAYLOAD_MAX as u32 / item.len) as u16);
                (item.offset, item.more) = (number, count % 2 == 0);
            }
            let mut after = before.clone();
            let kept = SegmentBatches::new().arrange(&mut after, 65_507, may_defer);
            prop_assert_eq!(by_client(&after), by_client(&before));
            prop_assert!(kept == 0 || may_defer);
            let mut waiting = &after[..after.len() - kept];
            while !waiting.is_empty() {
                let (message, rest) = waiting.split_at(front_batch(waiting, 65_507));
                let count: usize = message.iter().map(|item| usize::from(item.count)).sum();
                let bytes: usize = message.iter().map(TxItem::bytes).sum();
                prop_assert!(count <= GSO_DATAGRAMS_MAX && bytes <= UDP_PAYLOAD_MAX);
                let (last, others) = message.split_last().expect("there is one");
                prop_assert!(others.iter().all(|item| item.len == message[0].len));
                let alike = last.len == message[0].len;
                prop_assert!(alike || last.count == 1 && last.len < message[0].len);
                waiting = rest;
            }
        }

        /// With more destinations than table entries some batches are shorter; nothing else changes, and no
        /// datagram is delayed by more than what joins the batches before it.
        #[test]
        fn many_destinations_keep_their_order_and_bounded_delay(
            of in prop::collection::vec((0u16..900, Just(0u8), lens()), 1..3000),
        ) {
            let before = datagrams(&of);
            let mut after = before.clone();
            SegmentBatches::new().arrange(&mut after, 65_507, false);
            prop_assert_eq!(by_client(&after), by_client(&before));
            let firsts = |datagrams: &[TxItem]| {
                let mut seen = std::collections::HashSet::new();
                let first = |d: &&TxItem| seen.insert(d.peer);
                datagrams.iter().filter(first).map(|d| d.offset).collect::<Vec<_>>()
            };
            prop_assert_eq!(firsts(&after), firsts(&before));
        }
    }

    #[test]
    fn interleaved_replies_leave_in_one_batch_per_client() {
        let of: Vec<_> = (0..1024).map(|i| (i % 16, 0, 64)).collect();
        let mut waiting = datagrams(&of);
        SegmentBatches::new().arrange(&mut waiting, 65_507, false);
        assert_eq!(cut(&waiting, 65_507).len(), 16);
        // Of two hundred clients with hash collisions nearly all keep their entry.
        let of: Vec<_> = (0..1000).map(|i| (i % 200, 0, 64)).collect();
        let mut waiting = datagrams(&of);
        SegmentBatches::new().arrange(&mut waiting, 65_507, false);
        let batches = cut(&waiting, 65_507).len();
        assert!((200..220).contains(&batches), "{batches} batches for 200 clients");
    }

    #[test]
    fn batches_end_at_their_limits() {
        let batch_of = |lens: &[u32]| {
            let of: Vec<_> = lens.iter().map(|len| (0, 0, *len)).collect();
            front_batch(&datagrams(&of), 65_507)
        };
        assert_eq!(batch_of(&[10; 65]), GSO_DATAGRAMS_MAX);
        assert_eq!(batch_of(&[10, 10, 9, 10]), 3, "the shorter one is the last");
        assert_eq!(batch_of(&[10, 11]), 1);
        assert_eq!(batch_of(&[10, 0]), 1);
        assert_eq!(batch_of(&[0, 0]), 1);
        assert_eq!(batch_of(&[32_753, 32_754]), 1);
        assert_eq!(batch_of(&[32_754, 32_753]), 2, "exactly the largest payload");
        assert_eq!(batch_of(&[32_754, 32_754]), 1);
    }
}
