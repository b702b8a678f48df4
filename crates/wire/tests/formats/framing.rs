//! Properties that hold for every framing, for any bytes and any segmentation.

use crate::support::{End, Event, Side, check_split, converse};
use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::select;
use wire::framing::{Delimits, Expects, Framing, FramingError, ParseState, Parsed};

fn config() -> ProptestConfig {
    ProptestConfig {
        cases: if cfg!(miri) { 8 } else { 1024 },
        failure_persistence: None,
        ..ProptestConfig::default()
    }
}

fn framing() -> impl Strategy<Value = Framing> {
    select(Framing::all(5).collect::<Vec<_>>())
}

fn side() -> impl Strategy<Value = Side> {
    select(vec![Side::Request, Side::Response])
}

/// Words of the memcached protocol in both directions, numbers at the edges, terminators.
fn memcached_fragment() -> impl Strategy<Value = Vec<u8>> {
    let words = [
        "get",
        "gets",
        "gat",
        "set",
        "add",
        "cas",
        "delete",
        "incr",
        "touch",
        "flush_all",
        "version",
        "stats",
        "quit",
        "verbosity",
        "mg",
        "ms",
        "md",
        "ma",
        "me",
        "mn",
        "noreply",
        "q",
        "v",
        "key",
        "VALUE",
        "END",
        "VA",
        "HD",
        "EN",
        "NF",
        "MN",
        "ME",
        "STORED",
        "STAT",
        "ITEM",
        "ERROR",
        "CLIENT_ERROR",
        "SERVER_ERROR",
        "0",
        "1",
        "2",
        "3",
        "7",
        "40",
        "4294967295",
        "99999999999",
        " ",
        "  ",
        "\r\n",
        "\r\n",
        "\r\n",
        "\n",
        "\r",
        "\0",
    ];
    prop_oneof![
        8 => select(words.to_vec()).prop_map(|word| word.as_bytes().to_vec()),
        4 => Just(b" ".to_vec()),
        1 => vec(any::<u8>(), 0..8),
    ]
}

/// A payload that `framing` can carry as a request.
fn request(framing: Framing) -> BoxedStrategy<Vec<u8>> {
    let sample = vec(any::<u8>(), 0..64).prop_map(move |data| framing.sample_request(&data));
    match framing {
        Framing::Memcached => prop_oneof![1 => sample, 4 => memcached_request()].boxed(),
        _ => sample.boxed(),
    }
}

/// A payload that `framing` can carry as a response.
fn response(framing: Framing) -> BoxedStrategy<Vec<u8>> {
    let sample = vec(any::<u8>(), 0..64).prop_map(move |data| framing.sample_reply(&data));
    match framing {
        Framing::Memcached => prop_oneof![1 => sample, 4 => memcached_response()].boxed(),
        _ => sample.boxed(),
    }
}

fn memcached_request() -> impl Strategy<Value = Vec<u8>> {
    let line = "(get|gets)( [!-~]{1,20}){1,4}|gat 10 [!-~]{1,9}|delete [!-~]{1,9}( 0)?|mn|me [!-~]{1,9}\
        |(incr|decr|touch) [!-~]{1,9} [0-9]{1,9}|version|stats|flush_all|m[gda] [!-~]{1,9}( [cfhklstuvIxOPL])?";
    let storage = ("(set|add|replace|append|prepend) [!-~]{1,9} 0 0 ", vec(any::<u8>(), 0..64));
    let meta_set = ("ms [!-~]{1,9} ", vec(any::<u8>(), 0..64));
    prop_oneof![
        line.prop_map(|line| format!("{line}\r\n").into_bytes()),
        prop_oneof![storage, meta_set].prop_map(|(line, data)| block(&line, &data, "")),
    ]
}

fn memcached_response() -> impl Strategy<Value = Vec<u8>> {
    let line = "STORED|NOT_STORED|EXISTS|NOT_FOUND|DELETED|TOUCHED|OK|END|EN|MN|(HD|NF|NS|EX)( t9)?\
        |[0-9]{1,20}|VERSION [ -~]{1,20}x|ME [!-~]{1,9}( a=b)?|(CLIENT_|SERVER_)?ERROR( [ -~]{1,30})?";
    let value = ("VALUE [!-~]{1,9} [0-9]{1,9} ", vec(any::<u8>(), 0..64));
    prop_oneof![
        line.prop_map(|line| format!("{line}\r\n").into_bytes()),
        vec(value, 1..4).prop_map(|values| {
            let values = values.into_iter().map(|(line, data)| block(&line, &data, ""));
            [values.collect::<Vec<_>>().concat(), b"END\r\n".to_vec()].concat()
        }),
        vec(any::<u8>(), 0..64).prop_map(|data| block("VA ", &data, " f1 kabc")),
        vec("STAT [!-~]{1,9} [ -~]{0,20}\r\n", 1..4)
            .prop_map(|stats| stats.concat() + "END\r\n")
            .prop_map(String::into_bytes),
    ]
}

fn block(line: &str, data: &[u8], flags: &str) -> Vec<u8> {
    [format!("{line}{}{flags}\r\n", data.len()).as_bytes(), data, b"\r\n"].concat()
}

/// A stream of well-formed messages, some of them damaged, or of fragments, or of arbitrary bytes.
fn stream() -> impl Strategy<Value = (Framing, Side, Vec<u8>)> {
    let messages = (framing(), side()).prop_flat_map(|(framing, side)| {
        let message = match side {
            Side::Request => request(framing),
            Side::Response => response(framing),
        };
        let damage = proptest::option::of((any::<prop::sample::Index>(), any::<u8>()));
        (vec(message, 0..8), damage).prop_map(move |(messages, damage)| {
            let mut bytes = Vec::new();
            for message in &messages {
                encode(framing, side, message, &mut bytes).unwrap();
            }
            if let (Some((at, byte)), false) = (damage, bytes.is_empty()) {
                let at = at.index(bytes.len());
                bytes[at] = byte;
            }
            (framing, side, bytes)
        })
    });
    let fragments = (Just(Framing::Memcached), side(), vec(memcached_fragment(), 0..60))
        .prop_map(|(framing, side, parts)| (framing, side, parts.concat()));
    let words = framing().prop_flat_map(|framing| {
        let words = framing.words().iter().map(|word| word.as_bytes().to_vec()).collect::<Vec<_>>();
        let words = [words, vec![b"7".to_vec(), b"0".to_vec(), b" ".to_vec(), vec![0xff]]].concat();
        (Just(framing), side(), vec(select(words), 0..60))
            .prop_map(|(framing, side, parts)| (framing, side, parts.concat()))
    });
    let any_bytes = (framing(), side(), vec(any::<u8>(), 0..300));
    prop_oneof![4 => messages, 2 => fragments, 1 => words, 1 => any_bytes]
}

fn encode(
    framing: Framing,
    side: Side,
    payload: &[u8],
    out: &mut Vec<u8>,
) -> Result<(), FramingError> {
    match side {
        Side::Request => framing.encode_request(payload, out),
        Side::Response => framing.encode_reply(payload, out),
    }
}

proptest! {
    #![proptest_config(config())]

    /// (a) and (c): the segmentation does not matter, nothing panics, every result makes progress; `converse` checks
    /// the rest of the contract.
    #[test]
    fn any_segmentation_gives_the_same_messages(
        (framing, side, bytes) in stream(),
        sizes in vec(1usize..40, 1..6),
        max in prop_oneof![1usize..80, Just(4096)],
    ) {
        check_split(framing, side, max, &bytes, &sizes);
        check_split(framing, side, max, &bytes, &[1]);
    }

    /// (b): messages written by one side are read by the other, one for one.
    #[test]
    fn written_messages_are_read(
        (framing, side, messages) in (framing(), side()).prop_flat_map(|(framing, side)| {
            let message = match side {
                Side::Request => request(framing),
                Side::Response => response(framing),
            };
            (Just(framing), Just(side), vec(message, 1..6))
        }),
    ) {
        let mut wire = Vec::new();
        for message in &messages {
            let start = wire.len();
            encode(framing, side, message, &mut wire).unwrap();
            // `raw` has no boundaries: one write must be one read.
            let transcript = converse(framing, side, 4096, [&wire[start..]], true);
            let expects = match side {
                Side::Request => Expects::Reply,
                Side::Response => Expects::Nothing,
            };
            let event = Event::Message { payload: message.clone(), expects };
            prop_assert_eq!(transcript.events, vec![event]);
            prop_assert_eq!(transcript.end, End::Waiting { unread: Vec::new() });
        }
        let together = converse(framing, side, 4096, [&wire[..]], false);
        prop_assert_eq!(together.payload(), messages.concat());
        if framing.delimits() != Delimits::Nothing {
            prop_assert_eq!(together.events.len(), messages.len());
        }
    }

    /// Requests that are found together are what the parser finds one by one, and as many as there are.
    #[test]
    fn requests_alike_are_those_that_are_parsed(
        framing in framing(),
        len in 1usize..70,
        runs in vec((0usize..6, 0usize..70), 1..4),
        (cut, max, most) in (0usize..8, 1usize..80, 2usize..20),
    ) {
        let mut bytes = Vec::new();
        for (count, other) in runs {
            for _ in 0..count {
                let _ = framing.encode_request(&vec![0x31; len], &mut bytes);
            }
            let _ = framing.encode_request(&vec![0x32; other], &mut bytes);
        }
        bytes.truncate(bytes.len().saturating_sub(cut));
        let found = framing.requests_alike(&bytes, max, most);
        let (mut count, mut rest, mut first) = (0, &bytes[..], None);
        while count < most && let Ok(Parsed::Message { consumed, start, end, expects }) =
            framing.parse_request(&mut ParseState::default(), rest, max)
        {
            if *first.get_or_insert((start, end)) != (start, end) || end == start {
                break;
            }
            prop_assert!(expects == Expects::Reply || found.is_none());
            if let Some(alike) = found.filter(|alike| count < alike.count) {
                prop_assert_eq!((start, end - start, consumed), (alike.prefix, alike.len, end));
            }
            rest = &rest[consumed..];
            count += 1;
        }
        let together =
            matches!(framing, Framing::Fixed(_) | Framing::LengthU16 | Framing::LengthU32);
        let expected = if together && count >= 2 { count } else { 0 };
        prop_assert_eq!(found.map_or(0, |alike| alike.count), expected);
    }

    /// A payload that cannot be encoded appends nothing to the output.
    #[test]
    fn encoding_is_all_or_nothing(
        framing in framing(),
        side in side(),
        payload in prop_oneof![
            vec(any::<u8>(), 0..100),
            vec(memcached_fragment(), 0..12).prop_map(|parts| parts.concat()),
        ],
    ) {
        let mut out = b"before".to_vec();
        let result = encode(framing, side, &payload, &mut out);
        prop_assert!(out.starts_with(b"before"));
        if result.is_err() {
            prop_assert_eq!(out, b"before");
        } else if framing.delimits() == Delimits::Both || side == Side::Request {
            // An accepted payload is one message for the other side.
            let transcript = converse(framing, side, 4096, [&out[6..]], true);
            prop_assert_eq!(transcript.payload(), payload);
            prop_assert_eq!(transcript.events.len(), 1);
        }
    }

    /// (d): a stream without an end costs at most a buffer of the documented size. `converse` gives the parser no
    /// more than that and fails if it asks for more.
    #[test]
    fn endless_input_is_bounded(
        framing in framing(),
        side in side(),
        pattern in prop_oneof![
            vec(any::<u8>(), 1..8),
            vec(memcached_fragment(), 1..6).prop_map(|parts| parts.concat()),
        ],
        start in vec(memcached_fragment(), 0..8).prop_map(|parts| parts.concat()),
        max in prop_oneof![Just(1usize), Just(64), Just(3000)],
        read in 1usize..700,
    ) {
        prop_assume!(!pattern.is_empty());
        let total = if cfg!(miri) { 2_000 } else { 20_000 };
        let endless = pattern.iter().copied().cycle().take(total);
        let bytes: Vec<u8> = start.into_iter().chain(endless).collect();
        let transcript = converse(framing, side, max, bytes.chunks(read), true);
        if let End::Waiting { unread } = transcript.end {
            let bytes_max = match side {
                Side::Request => framing.request_bytes_max(max),
                Side::Response => framing.response_bytes_max(max),
            };
            prop_assert!(unread.len() < bytes_max.max(1));
        }
    }

    /// A state of another stream is a caller's mistake, but must not panic.
    #[test]
    fn a_state_of_another_stream_is_harmless(
        framing in framing(),
        side in side(),
        first in vec(memcached_fragment(), 0..20).prop_map(|parts| parts.concat()),
        second in vec(any::<u8>(), 0..40),
    ) {
        let mut state = ParseState::default();
        for buffer in [&first, &second, &first] {
            let parsed = match side {
                Side::Request => framing.parse_request(&mut state, buffer, 64),
                Side::Response => framing.parse_response(&mut state, buffer, 64),
            };
            if let Ok(Parsed::Message { consumed, start, end, .. }) = parsed {
                prop_assert!(start <= end && end <= consumed && consumed <= buffer.len());
            }
        }
    }
}

/// The largest sizes that a configuration allows, with their length fields.
#[test]
fn eight_mebibytes_pass_in_both_directions() {
    let max = 8 << 20;
    let len = if cfg!(miri) { 100_000 } else { max };
    let data = vec![b'x'; len];
    for framing in [Framing::LengthU32, Framing::Line] {
        let mut wire = Vec::new();
        framing.encode_reply(&data, &mut wire).unwrap();
        let transcript = converse(framing, Side::Response, max, wire.chunks(65_536), true);
        assert_eq!(transcript.payload(), data);
    }
    let set = block("set key 0 0 ", &data[..len - 64], "");
    let transcript = converse(Framing::Memcached, Side::Request, max, set.chunks(65_536), true);
    assert_eq!(transcript.payload(), set);
    let value = [block("VALUE key 0 ", &data[..len - 64], ""), b"END\r\n".to_vec()].concat();
    let transcript = converse(Framing::Memcached, Side::Response, max, value.chunks(65_536), true);
    assert_eq!(transcript.payload(), value);
}

/// The documented buffer size is necessary: the longest message does not fit into one byte less.
#[test]
fn the_announced_buffer_is_exact() {
    for framing in Framing::all(100) {
        for side in [Side::Request, Side::Response] {
            for data in [0, 1, 100, 1000] {
                let data = vec![b'x'; data];
                let (payload, bytes_max) = match side {
                    Side::Request => {
                        let payload = framing.sample_request(&data);
                        (payload.clone(), framing.request_bytes_max(payload.len()))
                    }
                    Side::Response => {
                        let payload = framing.sample_reply(&data);
                        (payload.clone(), framing.response_bytes_max(payload.len()))
                    }
                };
                let mut wire = Vec::new();
                encode(framing, side, &payload, &mut wire).unwrap();
                assert!(wire.len() <= bytes_max, "{framing} {side:?} {}", payload.len());
            }
        }
    }
    // With the longest line end.
    for framing in Framing::all(100).map(|framing| framing.as_client_writes(true)) {
        let payload = framing.sample_request(&[b'x'; 100]);
        let mut wire = Vec::new();
        framing.encode_request(&payload, &mut wire).unwrap();
        assert_eq!(wire.len(), framing.request_bytes_max(payload.len()), "{framing}");
    }
}
