//! CoAP messages (RFC 7252) and the token in their payload: a CBOR map (RFC 8949) with the key "token", as NICA's CoAP function has it.

/// Types of messages.
pub(crate) const CONFIRMABLE: u8 = 0;
pub(crate) const ACKNOWLEDGEMENT: u8 = 2;
pub(crate) const RESET: u8 = 3;

const HEADER_BYTES: usize = 4;
const TOKEN_BYTES_MAX: usize = 8;
const PAYLOAD_MARKER: u8 = 0xff;
/// Depth of nested CBOR values, at most.
const DEPTH_MAX: u32 = 8;

/// A message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Message<'a> {
    /// 0: confirmable, 1: non-confirmable, 2: acknowledgement, 3: reset.
    pub kind: u8,
    /// Class in the upper three bits; 0: the empty message.
    pub code: u8,
    /// Message ID.
    pub id: u16,
    /// The token that associates responses with requests.
    pub token: &'a [u8],
    /// After the options; empty: none.
    pub payload: &'a [u8],
}

impl<'a> Message<'a> {
    /// Parses a datagram. `None`: it is no CoAP message.
    pub fn parse(bytes: &'a [u8]) -> Option<Self> {
        let (header, rest) = bytes.split_first_chunk::<HEADER_BYTES>()?;
        let [first, code, high, low] = *header;
        let (version, kind, token_bytes) = (first >> 6, first >> 4 & 3, usize::from(first & 15));
        if version != 1 || token_bytes > TOKEN_BYTES_MAX {
            return None;
        }
        // The empty message has nothing after the header.
        if code == 0 && !(token_bytes == 0 && rest.is_empty()) {
            return None;
        }
        let (token, rest) = rest.split_at_checked(token_bytes)?;
        let payload = after_options(rest)?;
        Some(Self { kind, code, id: u16::from_be_bytes([high, low]), token, payload })
    }

    /// Whether it is a request: code 0.01 to 0.31.
    pub fn is_request(&self) -> bool {
        (1..32).contains(&self.code) && self.kind < ACKNOWLEDGEMENT
    }
}

/// The payload behind the options.
fn after_options(mut rest: &[u8]) -> Option<&[u8]> {
    let mut number = 0u32;
    while let Some((first, after)) = rest.split_first() {
        if *first == PAYLOAD_MARKER {
            // A marker without a payload is a format error.
            return if after.is_empty() { None } else { Some(after) };
        }
        rest = after;
        let delta = extended(first >> 4, &mut rest)?;
        let length = extended(first & 15, &mut rest)?;
        number += delta;
        if number > u16::MAX.into() {
            return None;
        }
        rest = rest.get(length as usize..)?;
    }
    Some(rest)
}

/// A delta or a length of an option: 13 and 14 announce one and two more bytes, 15 is reserved.
fn extended(nibble: u8, rest: &mut &[u8]) -> Option<u32> {
    match nibble {
        0..13 => Some(nibble.into()),
        13 => {
            let (byte, after) = rest.split_first()?;
            *rest = after;
            Some(u32::from(*byte) + 13)
        }
        14 => {
            let (bytes, after) = rest.split_first_chunk::<2>()?;
            *rest = after;
            Some(u32::from(u16::from_be_bytes(*bytes)) + 269)
        }
        _ => None,
    }
}

/// The value of the key "token" of a CBOR map, a text or bytes. `None`: `payload` is not one such map, or has not exactly one such key.
pub fn token_of(payload: &[u8]) -> Option<&[u8]> {
    value_of(payload, b"token")
}

/// The same for any key.
pub fn value_of<'a>(payload: &'a [u8], name: &[u8]) -> Option<&'a [u8]> {
    let mut rest = payload;
    let (major, pairs) = head(&mut rest)?;
    if major != 5 {
        return None;
    }
    let mut value = None;
    let mut left = pairs;
    loop {
        match left {
            Some(0) => break,
            Some(pairs) => left = Some(pairs - 1),
            None if ended(&mut rest) => break,
            None => {}
        }
        let mut key = rest;
        skip(&mut rest, DEPTH_MAX)?;
        if text(&mut key) != Some(name) {
            skip(&mut rest, DEPTH_MAX)?;
        } else if value.replace(text(&mut rest)?).is_some() {
            return None;
        }
    }
    if rest.is_empty() { value } else { None }
}

/// The major type of an item, and its argument; `None` as argument: of indefinite length.
fn head(rest: &mut &[u8]) -> Option<(u8, Option<u64>)> {
    let (first, after) = rest.split_first()?;
    *rest = after;
    let argument = match first & 31 {
        small @ 0..24 => u64::from(small),
        size @ 24..28 => {
            let (bytes, after) = rest.split_at_checked(1 << (size - 24))?;
            *rest = after;
            bytes.iter().fold(0, |value, byte| value << 8 | u64::from(*byte))
        }
        31 if matches!(first >> 5, 2..=5 | 7) => return Some((first >> 5, None)),
        _ => return None,
    };
    Some((first >> 5, Some(argument)))
}

/// A text or bytes of definite length.
fn text<'a>(rest: &mut &'a [u8]) -> Option<&'a [u8]> {
    let (major, len) = head(rest)?;
    if !matches!(major, 2 | 3) {
        return None;
    }
    let (text, after) = rest.split_at_checked(usize::try_from(len?).ok()?)?;
    *rest = after;
    Some(text)
}

/// Whether the next byte ends an item of indefinite length; it is skipped.
fn ended(rest: &mut &[u8]) -> bool {
    let after = rest.strip_prefix(&[0xff]);
    *rest = after.unwrap_or(rest);
    after.is_some()
}

/// Skips an item.
fn skip(rest: &mut &[u8], depth: u32) -> Option<()> {
    let (major, argument) = head(rest)?;
    let Some(argument) = argument else {
        if depth == 0 || major == 7 {
            return None;
        }
        while !ended(rest) {
            skip(rest, depth - 1)?;
        }
        return Some(());
    };
    match major {
        2 | 3 => *rest = rest.get(usize::try_from(argument).ok()?..)?,
        4..=6 => {
            let items = match major {
                4 => argument,
                5 => argument.checked_mul(2)?,
                _ => 1,
            };
            // Each has a byte at least.
            if depth == 0 || items > rest.len() as u64 {
                return None;
            }
            for _ in 0..items {
                skip(rest, depth - 1)?;
            }
        }
        _ => {}
    }
    Some(())
}
