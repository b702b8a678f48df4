//! Trains: replies to one client that leave together.
//!
//! Replies become ready in the order in which blocks finish, so those of several clients lie mixed. What
//! the host kernel takes by `UDP_SEGMENT` is one destination at a time, and a call's entry costs it a
//! hundred times what one more segment does (about 2900 ns against 7 to 50 over loopback). [`Trains::arrange`]
//! therefore moves departures of one destination next to each other.
//!
//! *What an arrangement keeps.* Each destination's departures keep their order. A train leaves where its
//! first departure would have left; one that is full or ended by a shorter segment is followed by another
//! of the same destination where that one begins. So nobody waits for more than the [`SEGMENTS_MAX`] - 1
//! departures that may join each train ahead, and departures that cannot make a train stay where they are.
//!
//! *What stays behind.* A busy engine is in no hurry with a short train whose client is owed more replies: they will come
//! while others are sent, and leave with it. So the short trains of a patient batch ([`TxBatch::is_patient`]) whose last
//! departure says that [more](TxDatagram::more) follows stay for the next call, and the client, which answers a train with
//! a train, sends longer ones too; the engine says when that ends. A train that nothing can join any more leaves, or what
//! comes behind it would overtake it. Where there are hardly two destinations everything leaves.
//!
//! [`TxBatch::is_patient`]: wire::nic::TxBatch::is_patient

use std::net::{IpAddr, SocketAddr};

use wire::nic::{TxDatagram, UDP_PAYLOAD_MAX};

/// Segments the host kernel takes in one train (UDP_MAX_SEGMENTS of its first version).
pub(super) const SEGMENTS_MAX: usize = 64;
/// Departures arranged with one another; no fewer than a port's batch holds.
const WINDOW: usize = 1024;
/// Places for destinations, and how many of them are looked at for one. With more destinations than fit
/// some are forgotten, and their next departure begins a train.
const PLACES: usize = 512;
const LOOKS: usize = 4;
/// Departures of a train that is long enough to leave: what a call costs is little for each of them.
const LONG: usize = 16;
/// No train stands in a place.
const NONE: u16 = u16::MAX;

/// A train that is being put together.
#[derive(Clone, Copy, Debug)]
pub(super) struct Train {
    /// Position of its first departure.
    first: u16,
    count: u16,
    /// Bytes of a segment; 0 when nothing more may join.
    segment: u32,
    bytes: u32,
    /// What its last departure says.
    more: bool,
}

impl Train {
    /// A train that begins with `departure`, at position `first`. Segments of more than
    /// `segment_bytes_max` bytes, and empty ones, travel alone.
    fn begin(first: usize, departure: &TxDatagram, segment_bytes_max: u32) -> Self {
        let len = departure.len;
        let segment = if len > segment_bytes_max { 0 } else { len };
        Self { first: first as u16, count: 1, segment, bytes: len, more: departure.more }
    }

    /// Adds a departure to the same destination behind the others, if the host kernel cuts the train up
    /// as it was put together: all segments are of one length but the last, which may be shorter.
    fn take(&mut self, departure: &TxDatagram) -> bool {
        let len = departure.len;
        let fits = (1..=self.segment).contains(&len)
            && usize::from(self.count) < SEGMENTS_MAX
            && (self.bytes + len) as usize <= UDP_PAYLOAD_MAX;
        if fits {
            self.count += 1;
            self.bytes += len;
            self.more = departure.more;
            if len < self.segment {
                self.segment = 0;
            }
        }
        fits
    }

    /// Nothing more joins it.
    fn close(&mut self) {
        self.segment = 0;
    }

    /// Whether it is worth waiting for more that joins it.
    fn may_wait(&self) -> bool {
        self.more && self.segment > 0 && usize::from(self.count) < LONG
    }
}

fn same_destination(a: &TxDatagram, b: &TxDatagram) -> bool {
    (a.peer == b.peer || mutants::on("train_to_one")) && a.local == b.local
}

/// Where the search for a destination's place begins. Clients who choose their addresses so that they
/// meet get shorter trains, nothing else.
fn spread(peer: SocketAddr) -> usize {
    let address = match peer.ip() {
        IpAddr::V4(ip) => u64::from(ip.to_bits()),
        IpAddr::V6(ip) => (ip.to_bits() as u64) ^ (ip.to_bits() >> 64) as u64,
    };
    let mixed = (address ^ u64::from(peer.port()) << 32).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    (mixed >> 48) as usize
}

/// Whether a destination may come again after another.
fn is_mixed(waiting: &[TxDatagram]) -> bool {
    let change = |pair: &&[TxDatagram]| !same_destination(&pair[0], &pair[1]);
    waiting.windows(2).filter(change).nth(1).is_some()
}

/// How many departures at the front of `waiting` can leave as one train.
pub(super) fn front_train(waiting: &[TxDatagram], segment_bytes_max: u32) -> usize {
    let first = &waiting[0];
    let mut train = Train::begin(0, first, segment_bytes_max);
    let joins = |next: &&TxDatagram| same_destination(first, next) && train.take(next);
    1 + waiting[1..].iter().take_while(joins).count()
}

/// Puts trains together; its tables serve all UDP ports of a worker.
pub(super) struct Trains {
    trains: Vec<Train>,
    /// The last train of a destination, found by the hash of its address.
    places: Box<[u16; PLACES]>,
    /// The train of each departure.
    train_of: Vec<u16>,
    arranged: Vec<TxDatagram>,
}

impl Trains {
    pub(super) fn new() -> Self {
        Self {
            trains: Vec::with_capacity(WINDOW),
            places: Box::new([NONE; PLACES]),
            train_of: Vec::with_capacity(WINDOW),
            arranged: Vec::with_capacity(WINDOW),
        }
    }

    /// Moves departures of one destination next to each other where they can leave as one train. Those of a `patient` batch
    /// that may wait for more end up behind all others; returns how many these are.
    pub(super) fn arrange(
        &mut self,
        waiting: &mut [TxDatagram],
        segment_bytes_max: u32,
        patient: bool,
    ) -> usize {
        let patient = patient && waiting.len() <= WINDOW;
        let mut kept = 0;
        for window in waiting.chunks_mut(WINDOW) {
            if is_mixed(window) {
                let moves = self.sort_into_trains(window, segment_bytes_max);
                let waits = |train: &&Train| patient && train.may_wait();
                kept = self.trains.iter().filter(waits).map(|t| usize::from(t.count)).sum();
                if moves || kept > 0 {
                    self.move_to_trains(window, patient);
                }
            }
        }
        kept
    }

    /// Finds a train for each departure. Returns whether one belongs somewhere else than where it is.
    fn sort_into_trains(&mut self, window: &[TxDatagram], segment_bytes_max: u32) -> bool {
        self.trains.clear();
        self.train_of.clear();
        self.places.fill(NONE);
        let mut moves = false;
        let mut place = 0;
        for (at, departure) in window.iter().enumerate() {
            // Often the destination is the one before.
            if at == 0 || !same_destination(&window[at - 1], departure) {
                place = self.place_for(window, departure);
            }
            let number = self.places[place];
            let last = self.trains.len().wrapping_sub(1) as u16;
            if let Some(train) = self.trains.get_mut(usize::from(number)) {
                if train.take(departure) {
                    moves |= number != last;
                    self.train_of.push(number);
                    continue;
                }
                if !mutants::on("overtake_what_waits") {
                    train.close();
                }
            }
            let begun = self.trains.len() as u16;
            self.trains.push(Train::begin(at, departure, segment_bytes_max));
            self.places[place] = begun;
            self.train_of.push(begun);
        }
        moves
    }

    /// The place of a departure's destination: where it is known, or one that is free or is now made so.
    fn place_for(&mut self, window: &[TxDatagram], departure: &TxDatagram) -> usize {
        let home = spread(departure.peer);
        for look in 0..LOOKS {
            let place = (home + look) % PLACES;
            let known = self.trains.get(usize::from(self.places[place]));
            let suits = |t: &Train| same_destination(&window[usize::from(t.first)], departure);
            if known.is_none_or(suits) {
                return place;
            }
        }
        if !mutants::on("join_forgotten_train") {
            let forgotten = std::mem::replace(&mut self.places[home % PLACES], NONE);
            self.trains[usize::from(forgotten)].close();
        }
        home % PLACES
    }

    /// A counting sort by train, which keeps the order within one; those that wait come last if the batch is `patient`.
    fn move_to_trains(&mut self, window: &mut [TxDatagram], patient: bool) {
        let mut end = 0;
        for waits in [false, true] {
            let of_these = |train: &&mut Train| (patient && train.may_wait()) == waits;
            for train in self.trains.iter_mut().filter(of_these) {
                train.first = end;
                end += train.count;
            }
        }
        self.arranged.clear();
        self.arranged.extend_from_slice(window);
        for (departure, number) in self.arranged.iter().zip(&self.train_of) {
            let next = &mut self.trains[usize::from(*number)].first;
            window[usize::from(*next)] = *departure;
            *next += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use proptest::prelude::*;

    use super::*;

    /// Departures by client, source and length; each has an offset of its own.
    fn departures(of: &[(u16, u8, u32)]) -> Vec<TxDatagram> {
        let mut offset = 0;
        let mut departure = |&(client, source, len): &(u16, u8, u32)| {
            offset += len + 1;
            TxDatagram {
                peer: ([127, 0, 0, 1], 1 + client).into(),
                local: (source > 0).then_some([127, 0, 0, source].into()),
                offset,
                len,
                more: false,
            }
        };
        of.iter().map(&mut departure).collect()
    }

    type Place = (std::net::SocketAddr, Option<std::net::IpAddr>);

    fn place(departure: &TxDatagram) -> Place {
        (departure.peer, departure.local)
    }

    /// Where each goes, by destination, in each one's order.
    fn by_client(departures: &[TxDatagram]) -> Vec<(Place, u32)> {
        let mut sorted: Vec<_> = departures.iter().map(|d| (place(d), d.offset)).collect();
        sorted.sort_by_key(|(to, _)| *to);
        sorted
    }

    /// The departures as trains of (destination, offsets, lengths).
    fn cut(mut waiting: &[TxDatagram], segment_max: u32) -> Vec<(Place, Vec<u32>, Vec<u32>)> {
        let mut trains = Vec::new();
        while !waiting.is_empty() {
            let (train, rest) = waiting.split_at(front_train(waiting, segment_max));
            let offsets = train.iter().map(|d| d.offset).collect();
            assert!(train.iter().all(|d| place(d) == place(&train[0])));
            trains.push((place(&train[0]), offsets, train.iter().map(|d| d.len).collect()));
            waiting = rest;
        }
        trains
    }

    /// What the arrangement must come to where no destination is forgotten: each departure joins the
    /// last train of its destination if the rules let it, else it begins one.
    fn model(waiting: &[TxDatagram], segment_max: u32) -> Vec<(Place, Vec<u32>, Vec<u32>)> {
        let mut trains: Vec<(Place, Vec<u32>, Vec<u32>)> = Vec::new();
        for departure in waiting {
            let last = trains.iter_mut().rev().find(|(to, ..)| *to == place(departure));
            if let Some((_, offsets, lens)) = last {
                let ends = lens.last() < lens.first();
                let bytes: u32 = lens.iter().sum();
                if !ends
                    && lens[0] <= segment_max
                    && lens.len() < 64
                    && (1..=lens[0]).contains(&departure.len)
                    && bytes + departure.len <= 65_507
                {
                    offsets.push(departure.offset);
                    lens.push(departure.len);
                    continue;
                }
            }
            trains.push((place(departure), vec![departure.offset], vec![departure.len]));
        }
        trains
    }

    fn lens() -> impl Strategy<Value = u32> {
        prop_oneof![6 => Just(64u32), 1 => 0u32..70, 1 => 1400u32..1500, 1 => 30_000u32..65_507]
    }

    proptest! {
        /// Every departure is there once, in a train that the host kernel takes, in its client's order, and
        /// there are as few trains as the rules allow.
        #[test]
        fn an_arrangement_is_that_of_the_model(
            of in prop::collection::vec((0u16..12, 0u8..2, lens()), 1..900),
            segment_max in prop_oneof![Just(65_507u32), Just(1452), Just(63)],
        ) {
            let mut waiting = departures(&of);
            let expected = model(&waiting, segment_max);
            let mut trains = Trains::new();
            trains.arrange(&mut waiting, segment_max, false);
            prop_assert_eq!(cut(&waiting, segment_max), expected.clone());
            // What did not leave is arranged again with what came after it.
            let left = waiting.len() / 3;
            let mut waiting = waiting.split_off(left);
            let again = model(&waiting, segment_max);
            trains.arrange(&mut waiting, segment_max, false);
            prop_assert_eq!(cut(&waiting, segment_max), again);
        }

        /// Kept are the last trains of destinations that more follows for, if they are open and short; all else leaves as it would
        /// if the batch were not patient.
        #[test]
        fn a_patient_batch_keeps_what_may_grow(
            of in prop::collection::vec((0u16..12, 0u8..2, lens()), 1..100),
            more in prop::collection::vec(any::<bool>(), 100),
            segment_max in prop_oneof![Just(65_507u32), Just(1452), Just(63)],
        ) {
            let mut waiting = departures(&of);
            waiting.iter_mut().zip(&more).for_each(|(departure, more)| departure.more = *more);
            let mixed = is_mixed(&waiting);
            let follows: HashMap<u32, bool> = waiting.iter().map(|d| (d.offset, d.more)).collect();
            let trains = model(&waiting, segment_max);
            let grows = |at: usize| {
                let (to, offsets, lens) = &trains[at];
                let last = trains[at + 1..].iter().all(|(other, ..)| other != to);
                let open = lens.last() == lens.first() && (1..=segment_max).contains(&lens[0]);
                mixed && last && open && offsets.len() < LONG && follows[offsets.last().unwrap()]
            };
            let (kept, leaving): (Vec<_>, Vec<_>) = (0..trains.len()).partition(|at| grows(*at));
            let chosen = |of: &[usize]| of.iter().map(|at| trains[*at].clone()).collect::<Vec<_>>();
            let count = Trains::new().arrange(&mut waiting, segment_max, true);
            let (left, stayed) = waiting.split_at(waiting.len() - count);
            prop_assert_eq!(cut(left, segment_max), chosen(&leaving));
            prop_assert_eq!(cut(stayed, segment_max), chosen(&kept));
        }

        /// Turn after turn, also with more destinations than places.
        #[test]
        fn nothing_overtakes_what_was_kept(
            turns in prop::collection::vec(
                prop::collection::vec((0u16..900, lens(), any::<bool>()), 1..700), 1..6),
        ) {
            let all: Vec<_> = turns.iter().flatten().map(|&(to, len, _)| (to, 0, len)).collect();
            let mut given = departures(&all);
            given.iter_mut().zip(turns.iter().flatten()).for_each(|(d, turn)| d.more = turn.2);
            let mut trains = Trains::new();
            let (mut waiting, mut left, mut rest) = (Vec::new(), Vec::new(), &given[..]);
            for turn in &turns {
                let (now, later) = rest.split_at(turn.len());
                rest = later;
                waiting.extend_from_slice(now);
                let kept = trains.arrange(&mut waiting, 65_507, !rest.is_empty());
                left.extend(waiting.drain(..waiting.len() - kept));
            }
            prop_assert!(waiting.is_empty());
            prop_assert_eq!(by_client(&left), by_client(&given));
        }

        /// With more destinations than places some trains are shorter; nothing else changes, and nobody
        /// waits for more than what joins the trains ahead.
        #[test]
        fn many_destinations_keep_their_order_and_their_turn(
            of in prop::collection::vec((0u16..900, Just(0u8), lens()), 1..3000),
        ) {
            let before = departures(&of);
            let mut after = before.clone();
            Trains::new().arrange(&mut after, 65_507, false);
            prop_assert_eq!(by_client(&after), by_client(&before));
            let firsts = |departures: &[TxDatagram]| {
                let mut seen = std::collections::HashSet::new();
                let first = |d: &&TxDatagram| seen.insert(d.peer);
                departures.iter().filter(first).map(|d| d.offset).collect::<Vec<_>>()
            };
            prop_assert_eq!(firsts(&after), firsts(&before));
        }
    }

    #[test]
    fn replies_that_lie_mixed_leave_in_one_train_a_client() {
        let of: Vec<_> = (0..1024).map(|i| (i % 16, 0, 64)).collect();
        let mut waiting = departures(&of);
        Trains::new().arrange(&mut waiting, 65_507, false);
        assert_eq!(cut(&waiting, 65_507).len(), 16);
        // Two hundred clients that collide somewhere are still known, but for a few.
        let of: Vec<_> = (0..1000).map(|i| (i % 200, 0, 64)).collect();
        let mut waiting = departures(&of);
        Trains::new().arrange(&mut waiting, 65_507, false);
        let trains = cut(&waiting, 65_507).len();
        assert!((200..220).contains(&trains), "{trains} trains for 200 clients");
    }

    #[test]
    fn trains_end_where_they_must() {
        let train_of = |lens: &[u32]| {
            let of: Vec<_> = lens.iter().map(|len| (0, 0, *len)).collect();
            front_train(&departures(&of), 65_507)
        };
        assert_eq!(train_of(&[10; 65]), SEGMENTS_MAX);
        assert_eq!(train_of(&[10, 10, 9, 10]), 3, "the shorter one is the last");
        assert_eq!(train_of(&[10, 11]), 1);
        assert_eq!(train_of(&[10, 0]), 1);
        assert_eq!(train_of(&[0, 0]), 1);
        assert_eq!(train_of(&[32_753, 32_754]), 1);
        assert_eq!(train_of(&[32_754, 32_753]), 2, "exactly the largest payload");
        assert_eq!(train_of(&[32_754, 32_754]), 1);
    }
}
