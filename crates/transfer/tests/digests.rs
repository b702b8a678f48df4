//! Digests of several streams at a time against other implementations of them, in every way that the processor has.

use md5::{Digest, Md5};
use proptest::prelude::*;
use sha2::Sha256;
use sys::digests::{BLOCK_BYTES, MD5_START, Run, SHA256_START, Way, md5_ways, sha256_ways};

/// The padding of a message, and its length with `to_bytes`.
fn padded(message: &[u8], to_bytes: fn(u64) -> [u8; 8]) -> Vec<u8> {
    let mut padded = [message, &[0x80]].concat();
    while padded.len() % BLOCK_BYTES != BLOCK_BYTES - 8 {
        padded.push(0);
    }
    padded.extend(to_bytes(8 * message.len() as u64));
    padded
}

/// The digests of all messages in one way; each message comes in parts that end after these blocks.
fn digests<const WORDS: usize>(
    way: &Way<WORDS>,
    start: [u32; WORDS],
    messages: &[Vec<u8>],
    cuts: &[usize],
    to_bytes: fn(u64) -> [u8; 8],
) -> Vec<[u32; WORDS]> {
    let padded: Vec<Vec<u8>> = messages.iter().map(|message| padded(message, to_bytes)).collect();
    let mut states = vec![start; messages.len()];
    let mut from = 0;
    for cut in cuts.iter().copied().chain([usize::MAX / BLOCK_BYTES]) {
        let to = (from + cut.min(usize::MAX / BLOCK_BYTES - from)) * BLOCK_BYTES;
        let within = |bytes: &Vec<u8>, at: usize| at.min(bytes.len());
        let mut runs: Vec<_> = states
            .iter_mut()
            .zip(&padded)
            .map(|(state, bytes)| {
                let blocks = &bytes[within(bytes, from * BLOCK_BYTES)..within(bytes, to)];
                Run { state, blocks }
            })
            .collect();
        way.run(&mut runs);
        from = to / BLOCK_BYTES;
    }
    states
}

fn check(messages: &[Vec<u8>], cuts: &[usize]) {
    for way in md5_ways() {
        let states = digests(way, MD5_START, messages, cuts, u64::to_le_bytes);
        for (message, state) in messages.iter().zip(states) {
            let value = state.map(u32::to_le_bytes);
            assert_eq!(value.as_flattened(), Md5::digest(message).as_slice(), "{way:?}");
        }
    }
    for way in sha256_ways() {
        let states = digests(way, SHA256_START, messages, cuts, u64::to_be_bytes);
        for (message, state) in messages.iter().zip(states) {
            let value = state.map(u32::to_be_bytes);
            assert_eq!(value.as_flattened(), Sha256::digest(message).as_slice(), "{way:?}");
        }
    }
}

proptest! {
    /// Any number of streams of any lengths, so lanes are empty, are refilled and end at different times.
    #[test]
    fn every_way_has_the_digests_of_other_implementations(
        lengths in prop::collection::vec(
            prop_oneof![3 => 0..200usize, 2 => 0..5000usize, 1 => Just(0usize), 1 => 55..66usize],
            0..40,
        ),
        cuts in prop::collection::vec(0..20usize, 0..4),
        seed in any::<u64>(),
    ) {
        let mut state = seed | 1;
        let mut byte = move || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (state >> 56) as u8
        };
        let messages: Vec<Vec<u8>> =
            lengths.iter().map(|length| (0..*length).map(|_| byte()).collect()).collect();
        check(&messages, &cuts);
    }
}

#[test]
fn every_number_of_streams_fills_lanes() {
    for streams in 0..=35 {
        let equal: Vec<Vec<u8>> = (0..streams).map(|n| vec![n as u8; 700]).collect();
        check(&equal, &[3]);
        let growing: Vec<Vec<u8>> = (0..streams).map(|n| vec![n as u8; 64 * n]).collect();
        check(&growing, &[]);
    }
}

/// RFC 1321, A.5, and FIPS 180-4.
#[test]
fn every_way_has_the_published_values() {
    let messages = [&b""[..], b"a", b"abc", b"message digest"].map(<[u8]>::to_vec);
    let shown = |value: &[u8]| value.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
    let md5 = [
        "d41d8cd98f00b204e9800998ecf8427e",
        "0cc175b9c0f1b6a831c399e269772661",
        "900150983cd24fb0d6963f7d28e17f72",
        "f96b697d7cb7938d525a2f31aaf161d0",
    ];
    for way in md5_ways() {
        let states = digests(way, MD5_START, &messages, &[], u64::to_le_bytes);
        let values =
            states.into_iter().map(|state| shown(state.map(u32::to_le_bytes).as_flattened()));
        assert_eq!(values.collect::<Vec<_>>(), md5, "{way:?}");
    }
    for way in sha256_ways() {
        let states = digests(way, SHA256_START, &messages[2..3], &[], u64::to_be_bytes);
        let value = shown(states[0].map(u32::to_be_bytes).as_flattened());
        let abc = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
        assert_eq!(value, abc, "{way:?}");
    }
}

/// What is longer than whole blocks is left out, and a stream of fewer bytes is untouched.
#[test]
fn parts_of_blocks_are_left_out() {
    for way in md5_ways() {
        let (mut first, mut second, mut third) = (MD5_START, MD5_START, MD5_START);
        let bytes = [7; 130];
        let mut runs = [
            Run { state: &mut first, blocks: &bytes },
            Run { state: &mut second, blocks: &bytes[..63] },
            Run { state: &mut third, blocks: &bytes[..128] },
        ];
        way.run(&mut runs);
        assert!(first == third && second == MD5_START, "{way:?}");
    }
}
