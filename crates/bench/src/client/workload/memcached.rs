//! Gets and sets of memcached's text protocol, over TCP and in UDP frames.

use std::fmt;
use std::io::Write as _;

use wire::framing::UdpHeader;

use super::zipf::{Zipf, mixed};
use super::{Person, Workload};

/// Most different keys, and most that are stored, unless a [`KeySpace`] says otherwise.
const KEYS_MAX: u64 = 10_000;
/// Approximate limit of the total size of values, so that a memcached with the default 64 MiB keeps them.
const VALUES_BYTES: usize = 32 << 20;

/// Keys and their popularity. Nothing is kept for a key: the value of a key is derived from it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KeySpace {
    /// Different keys, in [1, [`KeySpace::KEYS_MAX`]].
    pub keys: u64,
    /// A thousand times the exponent of Zipf's distribution, in [0, 5000]; 0: all keys are equally popular.
    pub exponent_thousandths: u32,
    /// How many of the most popular keys are stored before the load, at most `keys`; `None`: as many as without a key space.
    pub stored: Option<u64>,
}

impl KeySpace {
    /// Keys have nine digits.
    pub const KEYS_MAX: u64 = 999_999_999;
    /// Largest exponent, times 1000.
    pub const EXPONENT_MAX: u32 = 5000;

    /// Whether all values are in their ranges.
    pub fn is_sound(&self) -> bool {
        (1..=Self::KEYS_MAX).contains(&self.keys)
            && self.exponent_thousandths <= Self::EXPONENT_MAX
            && self.stored.is_none_or(|stored| stored <= self.keys)
    }
}

/// The keys of the requests.
#[derive(Clone, Copy, Debug)]
enum Items<'a> {
    /// Keys of this workload, each with its own constant value.
    Own { value_bytes: usize, gets_percent: u8 },
    /// The requests of the kernel `faces` to its database, for these people.
    Faces(&'a [Person<'a>]),
}

/// What is requested.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Pass {
    /// What the workload is.
    Load,
    /// Each key is stored once.
    Stores,
    /// Each key is read once.
    Reads,
}

/// Sends requests to a memcached, and compares every value byte for byte. A get without a value is correct, and
/// counted.
#[derive(Clone, Debug)]
pub struct Memcached<'a> {
    items: Items<'a>,
    /// Other keys than the default ones, and their popularity.
    space: Option<(KeySpace, Zipf)>,
    pass: Pass,
    /// Each message has a UDP frame.
    is_framed: bool,
    /// The number of the latest request.
    latest: u64,
    expected: Vec<u8>,
    lookups: Lookups,
}

/// Results of gets.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Lookups {
    /// Gets that found their value.
    pub hits: u64,
    /// Gets that found nothing.
    pub misses: u64,
}

impl Lookups {
    /// The share of gets that found their value; `None` when there were none.
    pub fn hit_ratio(self) -> Option<f64> {
        let gets = self.hits + self.misses;
        (gets > 0).then(|| self.hits as f64 / gets as f64)
    }

    pub(crate) fn add(&mut self, other: Self) {
        self.hits += other.hits;
        self.misses += other.misses;
    }
}

/// One request: a key, and the command.
#[derive(Clone, Copy)]
struct Question {
    key: u64,
    sets: bool,
}

/// The last `DIGITS` decimal digits: formatting takes longer than the rest of a request.
fn write_digits<const DIGITS: usize>(mut number: u64, into: &mut Vec<u8>) {
    let mut digits = [b'0'; DIGITS];
    for digit in digits.iter_mut().rev() {
        *digit += (number % 10) as u8;
        number /= 10;
    }
    into.extend_from_slice(&digits);
}

fn print(into: &mut Vec<u8>, text: fmt::Arguments<'_>) {
    into.write_fmt(text).expect("writing to a vector cannot fail");
}

impl<'a> Memcached<'a> {
    /// Longest value: memcached's own limit of an item is 1 MiB with its key.
    pub const VALUE_BYTES_MAX: usize = 1_000_000;

    /// Keys chosen at random; of 100 requests about `gets_percent` are gets, the others sets.
    pub fn new(value_bytes: usize, gets_percent: u8) -> Self {
        Self::of(Items::Own { value_bytes, gets_percent })
    }

    /// The database requests of the workload `faces`: two of three find the stored picture.
    pub fn faces(people: &'a [Person<'a>]) -> Self {
        Self::of(Items::Faces(people))
    }

    fn of(items: Items<'a>) -> Self {
        Self {
            items,
            space: None,
            pass: Pass::Load,
            is_framed: false,
            latest: 0,
            expected: Vec::new(),
            lookups: Lookups::default(),
        }
    }

    /// The same in UDP frames, whose 16 bits of a number identify the request: fewer than 65 536 are in flight.
    pub fn framed(self) -> Self {
        Self { is_framed: true, ..self }
    }

    /// The same with these keys; the popularity of a key decreases with its number.
    pub fn over(self, space: Option<KeySpace>) -> Self {
        let zipf = |space: KeySpace| {
            (space, Zipf::new(space.keys, f64::from(space.exponent_thousandths) / 1e3))
        };
        Self { space: space.map(zipf), ..self }
    }

    /// Whether its messages are in UDP frames.
    pub fn is_framed(&self) -> bool {
        self.is_framed
    }

    /// The requests that store values; there are [`Self::stored`] of them.
    pub fn stores(self) -> Self {
        Self { pass: Pass::Stores, ..self }
    }

    /// The requests that read these values once; there are [`Self::stored`] of them.
    pub fn reads(self) -> Self {
        Self { pass: Pass::Reads, ..self }
    }

    /// Number of different keys with a value.
    pub fn keys(&self) -> u64 {
        self.space.map_or_else(|| self.keys_that_fit(), |(space, _)| space.keys)
    }

    /// How many of them are stored before the load: the most popular ones.
    pub fn stored(&self) -> u64 {
        let asked = self.space.and_then(|(space, _)| space.stored);
        asked.unwrap_or_else(|| self.keys_that_fit()).min(self.keys())
    }

    /// The keys of a small memcached.
    fn keys_that_fit(&self) -> u64 {
        match self.items {
            Items::Own { value_bytes, .. } => {
                (VALUES_BYTES / value_bytes.max(1)).clamp(16, KEYS_MAX as usize) as u64
            }
            Items::Faces(people) => people.len() as u64,
        }
    }

    /// Longest request or reply, with a small margin.
    pub fn message_bytes(value_bytes: usize) -> usize {
        value_bytes + 128
    }

    fn question(&self, index: u64) -> Question {
        match self.items {
            _ if self.pass != Pass::Load => {
                Question { key: index % self.stored().max(1), sets: self.pass == Pass::Stores }
            }
            Items::Own { gets_percent, .. } => {
                let random = mixed(index);
                let sets = random % 100 >= u64::from(gets_percent);
                let key = match &self.space {
                    Some((_, zipf)) => zipf.rank(random),
                    None => (random >> 32) % self.keys(),
                };
                Question { key, sets }
            }
            // The second half of the keys of three questions about every person is an unknown one.
            Items::Faces(people) => {
                let number = index % (3 * people.len() as u64);
                let unknown = number % 3 == 2;
                let key = number / 3 + if unknown { people.len() as u64 } else { 0 };
                Question { key, sets: false }
            }
        }
    }

    fn write_key(&self, key: u64, into: &mut Vec<u8>) {
        match self.items {
            Items::Own { .. } => {
                into.extend_from_slice(b"serval:");
                write_digits::<9>(key, into);
            }
            Items::Faces(people) => {
                let person = &people[key as usize % people.len()];
                let unknown: Vec<u8>;
                let label = if key < people.len() as u64 {
                    person.label
                } else {
                    unknown = person.label.iter().map(|byte| !byte).collect();
                    &unknown
                };
                let stranger = Person { label, ..*person };
                into.extend_from_slice(stranger.database_key().as_bytes());
            }
        }
    }

    fn write_value(&self, key: u64, into: &mut Vec<u8>) {
        match self.items {
            Items::Own { value_bytes, .. } => {
                let mut word = mixed(!key);
                into.reserve(value_bytes + 8);
                let end = into.len() + value_bytes;
                while into.len() < end {
                    into.extend_from_slice(&word.to_le_bytes());
                    word = word.wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(17) ^ key;
                }
                into.truncate(end);
            }
            Items::Faces(people) => into.extend_from_slice(people[key as usize].stored),
        }
    }

    fn value_bytes(&self) -> usize {
        match self.items {
            Items::Own { value_bytes, .. } => value_bytes,
            Items::Faces(people) => people[0].stored.len(),
        }
    }

    /// Writes the response to a get of `key` that finds the value.
    fn write_hit(&self, key: u64, into: &mut Vec<u8>) {
        let bytes = self.value_bytes();
        if matches!(self.items, Items::Own { .. }) {
            into.extend_from_slice(b"VALUE ");
            self.write_key(key, into);
            print(into, format_args!(" 0 {bytes}\r\n"));
            self.write_value(key, into);
            into.extend_from_slice(b"\r\nEND\r\n");
        } else {
            print(into, format_args!("VA {bytes} k"));
            self.write_key(key, into);
            into.extend_from_slice(b"\r\n");
            self.write_value(key, into);
            into.extend_from_slice(b"\r\n");
        }
    }

    /// What is in the frame of a reply to this request, if there is one.
    fn unframed<'r>(&self, index: u64, reply: &'r [u8]) -> Option<&'r [u8]> {
        if !self.is_framed {
            return Some(reply);
        }
        let (header, body) = UdpHeader::split(reply)?;
        (header == UdpHeader::request(index as u16)).then_some(body)
    }

    /// Whether `reply` reports that `key` has no value.
    fn is_miss(&self, key: u64, reply: &[u8]) -> bool {
        if matches!(self.items, Items::Own { .. }) {
            return reply == b"END\r\n";
        }
        // With or without the key, depending on the version.
        let mut named = b"EN k".to_vec();
        self.write_key(key, &mut named);
        named.extend_from_slice(b"\r\n");
        reply == b"EN\r\n" || reply == named.as_slice()
    }
}

impl Workload for Memcached<'_> {
    fn request(&mut self, index: u64, into: &mut Vec<u8>) {
        let Question { key, sets } = self.question(index);
        self.latest = index;
        if self.is_framed {
            into.extend_from_slice(&UdpHeader::request(index as u16).bytes());
        }
        let meta = matches!(self.items, Items::Faces(_)) && !sets;
        into.extend_from_slice(match (sets, meta) {
            (true, _) => b"set ",
            (false, true) => b"mg ",
            (false, false) => b"get ",
        });
        self.write_key(key, into);
        if sets {
            print(into, format_args!(" 0 0 {}\r\n", self.value_bytes()));
            self.write_value(key, into);
        } else if meta {
            into.extend_from_slice(b" k v");
        }
        into.extend_from_slice(b"\r\n");
    }

    fn accepts(&mut self, index: u64, reply: &[u8]) -> bool {
        let Question { key, sets } = self.question(index);
        let Some(reply) = self.unframed(index, reply) else { return false };
        if sets {
            return reply == b"STORED\r\n";
        }
        if self.is_miss(key, reply) {
            self.lookups.misses += 1;
            return true;
        }
        if key >= self.keys() {
            return false;
        }
        let mut expected = std::mem::take(&mut self.expected);
        expected.clear();
        self.write_hit(key, &mut expected);
        let right = reply == expected.as_slice();
        self.expected = expected;
        self.lookups.hits += u64::from(right);
        right
    }

    fn has_identity(&self) -> bool {
        self.is_framed
    }

    fn identify(&self, reply: &[u8]) -> Option<u64> {
        let (header, _) = UdpHeader::split(reply)?;
        let before = (self.latest as u16).wrapping_sub(header.id);
        self.latest.checked_sub(before.into())
    }

    fn lookups(&self) -> Lookups {
        self.lookups
    }
}

#[cfg(test)]
mod tests {
    use super::super::Pictures;
    use super::super::tests::identity_survives;
    use super::*;
    use std::collections::{HashMap, HashSet};

    /// A minimal memcached: its answer to a request.
    fn answer(store: &mut HashMap<Vec<u8>, Vec<u8>>, request: &[u8]) -> Vec<u8> {
        let line_end = request.windows(2).position(|pair| pair == b"\r\n").unwrap();
        let (line, rest) = (&request[..line_end], &request[line_end + 2..]);
        let words: Vec<&[u8]> = line.split(|byte| *byte == b' ').collect();
        let key = words[1].to_vec();
        match words[0] {
            b"set" => {
                let bytes: usize = std::str::from_utf8(words[4]).unwrap().parse().unwrap();
                assert_eq!((rest.len(), &rest[bytes..]), (bytes + 2, &b"\r\n"[..]));
                store.insert(key, rest[..bytes].to_vec());
                b"STORED\r\n".to_vec()
            }
            b"get" => match store.get(&key) {
                Some(value) => {
                    let head =
                        format!("VALUE {} 0 {}\r\n", String::from_utf8_lossy(&key), value.len());
                    [head.as_bytes(), value, b"\r\nEND\r\n"].concat()
                }
                None => b"END\r\n".to_vec(),
            },
            b"mg" => match store.get(&key) {
                Some(value) => {
                    let head = format!("VA {} k{}\r\n", value.len(), String::from_utf8_lossy(&key));
                    [head.as_bytes(), value, b"\r\n"].concat()
                }
                None => b"EN\r\n".to_vec(),
            },
            word => panic!("{:?}", String::from_utf8_lossy(word)),
        }
    }

    fn asked(workload: &mut Memcached<'_>, index: u64) -> Vec<u8> {
        let mut request = Vec::new();
        workload.request(index, &mut request);
        request
    }

    fn filled(workload: &Memcached<'_>) -> HashMap<Vec<u8>, Vec<u8>> {
        let mut store = HashMap::new();
        let mut stores = workload.clone().stores();
        for index in 0..stores.keys() {
            let reply = answer(&mut store, &asked(&mut stores, index));
            assert!(stores.accepts(index, &reply));
        }
        assert_eq!(store.len() as u64, workload.keys());
        store
    }

    #[test]
    fn all_values_are_read_once() {
        let mut reads = Memcached::new(16, 0).reads();
        let mut store = filled(&reads);
        let keys = reads.keys();
        let requests: HashSet<_> = (0..keys).map(|index| asked(&mut reads, index)).collect();
        assert_eq!(requests.len() as u64, keys);
        for index in 0..keys {
            let reply = answer(&mut store, &asked(&mut reads, index));
            assert!(reads.accepts(index, &reply));
        }
        assert_eq!(reads.lookups().hit_ratio(), Some(1.0));
    }

    #[test]
    fn stored_values_are_found_and_compared_completely() {
        for value_bytes in [0, 1, 7, 8, 100, 3000] {
            let mut workload = Memcached::new(value_bytes, 90);
            let mut store = filled(&workload);
            let mut kinds = HashSet::new();
            for index in 0..300 {
                let request = asked(&mut workload, index);
                assert!(request.len() <= Memcached::message_bytes(value_bytes));
                kinds.insert(request[0]);
                let mut reply = answer(&mut store, &request);
                assert!(workload.accepts(index, &reply), "{value_bytes} {index}");
                for at in (0..reply.len()).step_by(1 + reply.len() / 50) {
                    reply[at] ^= 1;
                    assert!(!workload.accepts(index, &reply), "byte {at}");
                    reply[at] ^= 1;
                }
                assert!(!workload.accepts(index, &reply[1..]));
            }
            assert_eq!(kinds, HashSet::from([b'g', b's']));
            assert_eq!(workload.lookups().misses, 0);
            assert_eq!(workload.lookups().hit_ratio(), Some(1.0));
        }
    }

    #[test]
    fn keys_of_a_large_space_have_values_and_few_are_stored() {
        let space = |keys, stored| Some(KeySpace { keys, exponent_thousandths: 900, stored });
        let mut workload = Memcached::new(16, 50).over(space(32_000_000, None));
        assert_eq!((workload.keys(), workload.stored()), (32_000_000, 10_000));
        let store = Memcached::new(16, 50).over(space(32_000_000, Some(100)));
        assert_eq!(store.stored(), 100);
        assert_eq!(Memcached::new(16, 50).over(space(7, None)).stored(), 7);
        assert!(space(32_000_000, Some(0)).unwrap().is_sound());
        assert!(!space(10, Some(11)).unwrap().is_sound() && !space(0, None).unwrap().is_sound());
        let mut known = HashMap::new();
        let mut stores = store.clone().stores();
        for index in 0..stores.stored() {
            let reply = answer(&mut known, &asked(&mut stores, index));
            assert!(stores.accepts(index, &reply));
        }
        assert_eq!(known.len(), 100);
        let mut keys = HashSet::new();
        for index in 0..20_000 {
            let request = asked(&mut workload, index);
            keys.insert(request[4..20].to_vec());
            let reply = answer(&mut known, &request);
            assert!(workload.accepts(index, &reply), "{index}");
        }
        // Popular keys are asked for again and again, and most keys once.
        let ratio = workload.lookups().hit_ratio().unwrap();
        assert!((0.1..0.5).contains(&ratio), "{ratio}");
        assert!((5_000..19_000).contains(&keys.len()), "{}", keys.len());
        // The value of another key is wrong.
        let get = (0..).find(|index| asked(&mut workload, *index)[0] == b'g').unwrap();
        let other = (get + 1..)
            .find(|index| {
                asked(&mut workload, *index)[4..] != asked(&mut workload.clone(), get)[4..]
                    && asked(&mut workload, *index)[0] == b'g'
            })
            .unwrap();
        let mut hit = Vec::new();
        workload.write_hit(workload.question(other).key, &mut hit);
        assert!(workload.accepts(other, &hit) && !workload.accepts(get, &hit));
    }

    #[test]
    fn frames_have_the_number_of_their_request() {
        let mut workload = Memcached::new(16, 100).framed();
        let mut store = filled(&Memcached::new(16, 100));
        for index in [0, 1, 65_535, 65_536, 200_000] {
            let request = asked(&mut workload, index);
            let (header, body) = UdpHeader::split(&request).unwrap();
            let reply = [&header.bytes()[..], &answer(&mut store, body)].concat();
            identity_survives(&mut workload, index, &reply);
        }
        // The latest one is 200 000.
        for index in [200_000 - 65_535, 150_000, 199_999] {
            let reply = UdpHeader::request(index as u16).bytes();
            assert_eq!(workload.identify(&reply), Some(index));
        }
        assert_eq!(Memcached::new(16, 100).framed().identify(&[0, 1, 0, 0, 0, 1, 0, 0]), None);
        let two = UdpHeader { id: 3, sequence: 0, total: 2 }.bytes();
        assert!(!workload.accepts(3, &two) && !workload.accepts(3, b"END\r\n"));
    }

    #[test]
    fn gets_have_their_share_and_misses_are_counted() {
        for percent in [0, 50, 100] {
            let mut workload = Memcached::new(10, percent);
            let gets = (0..10_000).filter(|index| asked(&mut workload, *index)[0] == b'g').count();
            assert!(gets.abs_diff(usize::from(percent) * 100) < 200, "{gets} of {percent} %");
        }
        let mut workload = Memcached::new(10, 100);
        assert!(workload.accepts(0, b"END\r\n") && !workload.accepts(0, b"EN\r\n"));
        assert_eq!(workload.lookups(), Lookups { hits: 0, misses: 1 });
        assert_eq!(Lookups::default().hit_ratio(), None);
    }

    #[test]
    fn the_faces_are_asked_for_as_the_kernel_does() {
        let pictures = Pictures::built_in();
        let mut workload = Memcached::faces(&pictures.people);
        let mut store = filled(&workload);
        let all = 3 * workload.keys();
        for index in 0..all {
            let request = asked(&mut workload, index);
            assert_eq!(request.len(), 38, "QUERY_BYTES of the kernel");
            let reply = answer(&mut store, &request);
            assert!(workload.accepts(index, &reply), "{index}");
            assert_eq!(reply == b"EN\r\n", index % 3 == 2);
        }
        assert_eq!(workload.lookups(), Lookups { hits: 2 * all / 3, misses: all / 3 });
        // A value for an unknown label is wrong.
        let known = answer(&mut store, &asked(&mut workload, 0));
        assert!(!workload.accepts(2, &known));
    }
}
