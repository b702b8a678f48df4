//! The messages of the model peers, built so that each can be checked by itself.
//!
//! A request's *body* contains its client, its number and the reply that the kernel shall give; a
//! checksum covers these, and the filler is derived from them. The reply is a function of the request
//! ([`Body::reply`]), so a client knows every byte of its one correct reply, and no other client's reply
//! is equal to it.
//!
//! ```text
//! 0       1     4     8        12         16    20     24      28
//! | magic | ask | len | client | sequence | key | want | check | filler ...    little endian
//! ```
//!
//! Each framing has a grammar of its own, so a body is sent as it is, behind a sockperf header, in
//! hexadecimal digits (`line`), or as key and value of a memcached command. The code here is
//! intentionally independent of the engine's framings: it is the other side. A framing that carries any bytes and has no
//! code here is written and read by the engine's own code, whose properties `crates/wire/tests` checks.

use wire::admission::KeyRange;
use wire::framing::{Delimits, Framing, ParseState, Parsed, SOCKPERF_HEADER_BYTES};
use wire::matching::MatchId;

use crate::rng::{Rng, mix};

/// Bytes of a body without filler.
pub const BODY_BYTES_MIN: usize = 28;
/// Offset of the checksum; it covers everything before it.
const CHECK_AT: usize = 24;
const MAGIC_REQUEST: u8 = 0x5e;
const MAGIC_REPLY: u8 = 0xa7;
/// Longer than any reply.
const REPLY_BYTES_MAX: usize = 1 << 20;

/// The request to the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Ask {
    /// The correct reply.
    Answer = 0,
    /// The same, after a request to the (first) backend.
    Backend = 1,
    /// A drop with the status `REJECTED`.
    Reject = 2,
    /// A drop with the status `BAD_LENGTH`.
    BadLength = 3,
    /// A reply that the framing cannot carry, if there is one.
    Unframable = 4,
}

impl Ask {
    fn of(byte: u8) -> Option<Self> {
        [Self::Answer, Self::Backend, Self::Reject, Self::BadLength, Self::Unframable]
            .into_iter()
            .find(|ask| *ask as u8 == byte)
    }
}

/// Whether the client expects a reply, as its protocol expresses it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Flavor {
    /// It does.
    Plain,
    /// It does not (memcached `noreply`, sockperf without the reply flag).
    Silent,
    /// The kernel decides (memcached `q`).
    Quiet,
}

/// The content of a request or a reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Body {
    /// The client.
    pub client: u32,
    /// Number among the client's requests.
    pub sequence: u32,
    /// Dispatch key; a reply repeats it.
    pub key: u32,
    /// The request to the kernel; [`Ask::Answer`] in replies.
    pub ask: Ask,
    /// Request: filler bytes of the reply. Reply: checksum of the request.
    pub want: u32,
    /// Filler bytes of this body.
    pub filler: u32,
}

impl Body {
    /// The one correct reply to this request.
    pub fn reply(&self) -> Self {
        Self { want: self.check(MAGIC_REQUEST), ask: Ask::Answer, filler: self.want, ..*self }
    }

    /// The encoded body of this request.
    pub fn request_bytes(&self) -> Vec<u8> {
        self.bytes(MAGIC_REQUEST)
    }

    /// The encoded body of this reply.
    pub fn reply_bytes(&self) -> Vec<u8> {
        self.bytes(MAGIC_REPLY)
    }

    fn head(&self, magic: u8) -> [u8; BODY_BYTES_MIN] {
        let len = BODY_BYTES_MIN as u32 + self.filler;
        let mut head = [0; BODY_BYTES_MIN];
        head[..2].copy_from_slice(&[magic, self.ask as u8]);
        let words = [len, self.client, self.sequence, self.key, self.want];
        for (bytes, word) in head[4..].chunks_exact_mut(4).zip(words) {
            bytes.copy_from_slice(&word.to_le_bytes());
        }
        let (covered, check) = head.split_at_mut(CHECK_AT);
        let word = |bytes: &[u8]| u64::from_le_bytes(bytes.try_into().expect("eight bytes"));
        let hash = covered.chunks_exact(8).fold(0, |hash, bytes| mix(hash ^ word(bytes)));
        check.copy_from_slice(&(hash as u32).to_le_bytes());
        head
    }

    fn check(&self, magic: u8) -> u32 {
        let head = self.head(magic);
        u32::from_le_bytes(head[CHECK_AT..].try_into().expect("four bytes"))
    }

    /// The generator of the filler, eight bytes at a time.
    fn filler_words(&self, magic: u8) -> Rng {
        let sequence = u64::from(self.client) << 32 | u64::from(self.sequence);
        Rng::new(mix(sequence + u64::from(magic)))
    }

    fn bytes(&self, magic: u8) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(BODY_BYTES_MIN + self.filler as usize);
        bytes.extend(self.head(magic));
        bytes.resize(BODY_BYTES_MIN + self.filler as usize, 0);
        let mut words = self.filler_words(magic);
        let mut chunks = bytes[BODY_BYTES_MIN..].chunks_exact_mut(8);
        for chunk in &mut chunks {
            chunk.copy_from_slice(&words.draw().to_le_bytes());
        }
        let rest = chunks.into_remainder();
        rest.copy_from_slice(&words.draw().to_le_bytes()[..rest.len()]);
        bytes
    }

    /// The request in `bytes`, if every byte is correct.
    pub fn of_request(bytes: &[u8]) -> Option<Self> {
        let (head, filler) = bytes.split_at_checked(BODY_BYTES_MIN)?;
        Self::of(head, filler, MAGIC_REQUEST)
    }

    /// The reply in `bytes`, if every byte is correct.
    pub fn of_reply(bytes: &[u8]) -> Option<Self> {
        let (head, filler) = bytes.split_at_checked(BODY_BYTES_MIN)?;
        Self::of(head, filler, MAGIC_REPLY)
    }

    fn of(head: &[u8], filler: &[u8], magic: u8) -> Option<Self> {
        let word = |at: usize| Some(u32::from_le_bytes(head.get(at..at + 4)?.try_into().ok()?));
        let body = Self {
            ask: Ask::of(*head.get(1)?)?,
            client: word(8)?,
            sequence: word(12)?,
            key: word(16)?,
            want: word(20)?,
            filler: filler.len() as u32,
        };
        (body.head(magic) == head && body.is_filler(magic, filler)).then_some(body)
    }

    fn is_filler(&self, magic: u8, filler: &[u8]) -> bool {
        let mut words = self.filler_words(magic);
        let mut chunks = filler.chunks_exact(8);
        let whole = chunks.all(|chunk| chunk == words.draw().to_le_bytes());
        let rest = filler.chunks_exact(8).remainder();
        whole && rest == &words.draw().to_le_bytes()[..rest.len()]
    }
}

/// The position of the key in a request's payload, in the configuration's form.
pub fn key_range(framing: Framing) -> KeyRange {
    let (offset, len) = key_place(framing);
    format!("{offset}:{len}").parse().expect("a byte range")
}

/// Offset and length.
fn key_place(framing: Framing) -> (usize, usize) {
    match framing {
        Framing::Sockperf => (30, 4),
        Framing::Line | Framing::LineCrLf => (32, 8),
        Framing::Memcached => (36, 8),
        _ => (16, 4),
    }
}

/// The key in a request's payload, as dispatch hashes it.
pub fn key_bytes(framing: Framing, payload: &[u8]) -> Option<&[u8]> {
    let (offset, len) = key_place(framing);
    payload.get(offset..offset + len)
}

/// The most filler a request of at most `max` payload bytes can hold; `None` when no body fits.
pub fn request_filler_max(framing: Framing, max: usize) -> Option<usize> {
    match framing {
        Framing::Fixed(size) => (size as usize).checked_sub(BODY_BYTES_MIN),
        Framing::Sockperf => max.checked_sub(SOCKPERF_HEADER_BYTES + BODY_BYTES_MIN),
        Framing::Line | Framing::LineCrLf => (max / 2).checked_sub(BODY_BYTES_MIN),
        Framing::Memcached => max.checked_sub(MEMCACHED_REQUEST_BYTES),
        _ => max.checked_sub(BODY_BYTES_MIN),
    }
}

/// The most filler a reply of at most `max` payload bytes can hold.
pub fn reply_filler_max(framing: Framing, max: usize) -> Option<usize> {
    match framing {
        Framing::Sockperf => max.checked_sub(SOCKPERF_HEADER_BYTES + BODY_BYTES_MIN),
        Framing::Line | Framing::LineCrLf => (max / 2).checked_sub(BODY_BYTES_MIN),
        Framing::Memcached => max.checked_sub(MEMCACHED_REPLY_BYTES),
        _ => max.checked_sub(BODY_BYTES_MIN),
    }
}

/// `set `, key, ` 0 0 `, length, ` noreply`, two line ends.
const MEMCACHED_REQUEST_BYTES: usize = 4 + 2 * BODY_BYTES_MIN + 5 + 6 + 8 + 4;
/// `VALUE `, key, ` 0 `, length, two line ends, `END` and its line end.
const MEMCACHED_REPLY_BYTES: usize = 6 + 2 * BODY_BYTES_MIN + 3 + 6 + 4 + 5;

/// A request's payload: what the kernel sees.
pub fn request_payload(framing: Framing, body: &Body, flavor: Flavor) -> Vec<u8> {
    let bytes = body.request_bytes();
    match framing {
        Framing::Sockperf => sockperf(&bytes, if flavor == Flavor::Silent { 1 } else { 3 }),
        Framing::Line | Framing::LineCrLf => hex(&bytes),
        Framing::Memcached => {
            let (key, value) = bytes.split_at(BODY_BYTES_MIN);
            let key = String::from_utf8(hex(key)).expect("digits");
            let len = value.len();
            let start = match flavor {
                Flavor::Quiet => return format!("mg  {key} v q\r\n").into_bytes(),
                Flavor::Plain if len == 0 => return format!("get {key}\r\n").into_bytes(),
                Flavor::Plain => format!("set {key} 0 0 {len}\r\n"),
                Flavor::Silent => format!("set {key} 0 0 {len} noreply\r\n"),
            };
            [start.as_bytes(), value, b"\r\n"].concat()
        }
        _ => bytes,
    }
}

/// A reply's payload: what the kernel writes. `flavor` is that of the request.
pub fn reply_payload(framing: Framing, reply: &Body, flavor: Flavor) -> Vec<u8> {
    let bytes = reply.reply_bytes();
    match framing {
        Framing::Sockperf => sockperf(&bytes, 2),
        Framing::Line | Framing::LineCrLf => hex(&bytes),
        Framing::Memcached => {
            let (key, value) = bytes.split_at(BODY_BYTES_MIN);
            let key = String::from_utf8(hex(key)).expect("digits");
            let len = value.len();
            let (start, end) = match flavor {
                Flavor::Quiet => (format!("VA {len} k{key}\r\n"), &b"\r\n"[..]),
                _ => (format!("VALUE {key} 0 {len}\r\n"), &b"\r\nEND\r\n"[..]),
            };
            [start.as_bytes(), value, end].concat()
        }
        _ => bytes,
    }
}

/// A backend's answer to a request with this payload and content.
pub fn answer_payload(framing: Framing, question: &[u8], body: &Body) -> Vec<u8> {
    match framing {
        Framing::Raw => question.to_vec(),
        Framing::Memcached => {
            let words = question.split(|byte| byte.is_ascii_whitespace());
            let key = words.filter(|word| !word.is_empty()).nth(1).expect("a decoded question");
            let value = body.reply().reply_bytes();
            let len = format!(" 0 {}\r\n", value.len());
            [b"VALUE ", key, len.as_bytes(), &value, b"\r\nEND\r\n"].concat()
        }
        framing => reply_payload(framing, &body.reply(), Flavor::Plain),
    }
}

/// The position of the request number in a backend request and its answer; none with memcached.
pub fn match_id(framing: Framing) -> Option<MatchId> {
    let place = match framing {
        Framing::Memcached => return None,
        // The key of the body, behind the header or in digits.
        Framing::Sockperf => "id:26:8",
        Framing::Line | Framing::LineCrLf => "id:32:8",
        _ => "id:12:8",
    };
    Some(place.parse().expect("a place"))
}

/// Whether a backend's answer is the right one for a request.
pub fn is_answer_to(framing: Framing, question: &Body, answer: &[u8]) -> bool {
    let asked = request_payload(framing, question, Flavor::Plain);
    answer_payload(framing, &asked, question) == answer
}

/// The most filler in an answer of at most `max` payload bytes.
pub fn answer_filler_max(framing: Framing, max: usize) -> Option<usize> {
    let most = reply_filler_max(framing, max)?;
    // The key of memcached's answer is the question's, so its value holds the whole body.
    if framing == Framing::Memcached { most.checked_sub(BODY_BYTES_MIN) } else { Some(most) }
}

/// Decodes a request's payload.
pub fn decode_request(framing: Framing, payload: &[u8]) -> Option<(Body, Flavor)> {
    match framing {
        Framing::Sockperf => {
            let body = Body::of_request(payload.get(SOCKPERF_HEADER_BYTES..)?)?;
            let flavor = if payload[9] & 2 == 0 { Flavor::Silent } else { Flavor::Plain };
            Some((body, flavor))
        }
        Framing::Line | Framing::LineCrLf => {
            Some((Body::of_request(&unhex(payload)?)?, Flavor::Plain))
        }
        Framing::Memcached => {
            let lf = payload.iter().position(|b| *b == b'\n')?;
            let line = std::str::from_utf8(&payload[..lf]).ok()?.trim_end();
            let key = line.split_ascii_whitespace().nth(1)?;
            let value = payload[lf + 1..].strip_suffix(b"\r\n").unwrap_or(&[]);
            let body = Body::of(&unhex(key.as_bytes())?, value, MAGIC_REQUEST)?;
            let flavor = match () {
                () if line.starts_with("mg") => Flavor::Quiet,
                () if line.ends_with("noreply") => Flavor::Silent,
                () => Flavor::Plain,
            };
            Some((body, flavor))
        }
        _ => Some((Body::of_request(payload)?, Flavor::Plain)),
    }
}

/// Decodes a reply's payload.
pub fn decode_reply(framing: Framing, payload: &[u8]) -> Option<Body> {
    match framing {
        Framing::Sockperf => Body::of_reply(payload.get(SOCKPERF_HEADER_BYTES..)?),
        Framing::Line | Framing::LineCrLf => Body::of_reply(&unhex(payload)?),
        Framing::Memcached => {
            let lf = payload.iter().position(|b| *b == b'\n')?;
            let line = std::str::from_utf8(&payload[..lf]).ok()?.trim_end();
            let mut words = line.split_ascii_whitespace();
            let (key, end) = match words.next()? {
                "VALUE" => (words.next()?, &b"\r\nEND\r\n"[..]),
                "VA" => (words.nth(1)?.strip_prefix('k')?, &b"\r\n"[..]),
                _ => return None,
            };
            let value = payload[lf + 1..].strip_suffix(end)?;
            Body::of(&unhex(key.as_bytes())?, value, MAGIC_REPLY)
        }
        _ => Body::of_reply(payload),
    }
}

/// A request as a client writes it to a stream.
pub fn request_wire(framing: Framing, payload: &[u8]) -> Vec<u8> {
    let len = payload.len();
    match framing {
        Framing::LengthU16 => [&(len as u16).to_be_bytes(), payload].concat(),
        Framing::LengthU32 => [&(len as u32).to_be_bytes()[..], payload].concat(),
        // Both line ends are valid; each client uses one.
        Framing::Line | Framing::LineCrLf if ends_in_lf(payload) => [payload, b"\n"].concat(),
        Framing::Line | Framing::LineCrLf => [payload, b"\r\n"].concat(),
        Framing::Sockperf | Framing::Memcached => payload.to_vec(),
        framing if framing.delimits() != Delimits::Both => payload.to_vec(),
        framing => {
            let mut wire = Vec::new();
            framing.encode_request(payload, &mut wire).expect("a framing that carries any bytes");
            wire
        }
    }
}

/// Whether the client of this request or reply, in hexadecimal digits, ends its lines in LF alone.
fn ends_in_lf(payload: &[u8]) -> bool {
    const CLIENT_AT: usize = 2 * 8 + 1;
    payload.get(CLIENT_AT).is_some_and(|digit| digit % 2 == 1)
}

/// The next element of a stream of replies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FromStream<'a> {
    /// The payload of a reply.
    Reply(&'a [u8]),
    /// An error report of the protocol.
    Error,
}

/// The bytes of a stream of replies, in arbitrary pieces. (Replies of `raw` streams cannot be
/// separated.)
#[derive(Clone, Debug, Default)]
pub struct ReplyStream {
    bytes: Vec<u8>,
    /// Bytes of replies already returned.
    told: usize,
    /// Minimum number of further bytes needed for the next one.
    wanted: usize,
    /// Of those, bytes known to contain no end of a line.
    searched: usize,
}

impl ReplyStream {
    /// Appends received bytes.
    pub fn push(&mut self, bytes: &[u8]) {
        if self.told == self.bytes.len() {
            self.bytes.clear();
            self.told = 0;
        }
        self.bytes.extend_from_slice(bytes);
    }

    /// Bytes of an incomplete reply.
    pub fn left(&self) -> usize {
        self.bytes.len() - self.told
    }

    /// The next reply, once it is complete.
    pub fn next(&mut self, framing: Framing) -> Option<FromStream<'_>> {
        let bytes = &self.bytes[self.told..];
        if bytes.len() < self.wanted {
            return None;
        }
        match first_reply(framing, bytes, &mut self.searched) {
            Ok((len, what)) => {
                self.told += len;
                (self.wanted, self.searched) = (0, 0);
                Some(what)
            }
            Err(wanted) => {
                self.wanted = wanted;
                None
            }
        }
    }
}

/// The reply at the front of `bytes` and its length on the wire, or the minimum number of bytes needed
/// to decide. The first `searched` bytes are known not to end a line.
fn first_reply<'a>(
    framing: Framing,
    bytes: &'a [u8],
    searched: &mut usize,
) -> Result<(usize, FromStream<'a>), usize> {
    let there = |len: usize| if bytes.len() < len { Err(len) } else { Ok(&bytes[..len]) };
    let reply = |prefix: usize, len: usize, after: usize| {
        let whole = there(prefix + len + after)?;
        Ok((whole.len(), FromStream::Reply(&whole[prefix..prefix + len])))
    };
    match framing {
        Framing::LengthU16 => {
            let prefix = there(2)?.try_into().expect("two bytes");
            reply(2, u16::from_be_bytes(prefix).into(), 0)
        }
        Framing::LengthU32 => {
            let prefix = there(4)?.try_into().expect("four bytes");
            reply(4, u32::from_be_bytes(prefix) as usize, 0)
        }
        Framing::Sockperf => {
            let header = there(SOCKPERF_HEADER_BYTES)?;
            let len = header[10..14].try_into().expect("four bytes");
            reply(0, u32::from_be_bytes(len) as usize, 0)
        }
        Framing::Line | Framing::LineCrLf => {
            let line = line_end(bytes, searched)?;
            let lf = framing == Framing::Line && ends_in_lf(&bytes[..line - 1]);
            match lf || !bytes[..line].ends_with(b"\r\n") {
                // A CR of a wrong line end, or a missing one, makes it invalid.
                true if lf => reply(0, line - 1, 1),
                true => reply(0, 0, line),
                false => reply(0, line - 2, 2),
            }
        }
        Framing::Memcached => {
            let line_len = line_end(bytes, searched)?;
            let unclear = bytes.len() + 1;
            let line = std::str::from_utf8(&bytes[..line_len]).map_err(|_| unclear)?;
            let word = |n: usize| line.split_ascii_whitespace().nth(n);
            let number = |n: usize| word(n).and_then(|w| w.parse::<usize>().ok()).ok_or(unclear);
            match word(0) {
                Some("VALUE") => reply(0, line_len + number(3)? + 7, 0),
                Some("VA") => reply(0, line_len + number(1)? + 2, 0),
                Some("ERROR" | "CLIENT_ERROR" | "SERVER_ERROR") => {
                    Ok((line_len, FromStream::Error))
                }
                _ => reply(0, line_len, 0),
            }
        }
        framing if framing.delimits() != Delimits::Both => {
            let header = there(BODY_BYTES_MIN)?;
            let len = header[4..8].try_into().expect("four bytes");
            reply(0, (u32::from_le_bytes(len) as usize).max(1), 0)
        }
        framing => match framing.parse_response(&mut ParseState::default(), bytes, REPLY_BYTES_MAX)
        {
            Ok(Parsed::Incomplete { more }) => Err(bytes.len() + more),
            Ok(Parsed::Message { consumed, start, end, .. }) => {
                Ok((consumed, FromStream::Reply(&bytes[start..end])))
            }
            // Not a reply, and nothing after it can be found.
            _ => reply(0, 0, bytes.len()),
        },
    }
}

/// The end of the first line that ends after `searched` bytes, or the minimum number of bytes needed.
fn line_end(bytes: &[u8], searched: &mut usize) -> Result<usize, usize> {
    let found = bytes[*searched..].iter().position(|b| *b == b'\n');
    let end = found.map(|at| *searched + at + 1);
    end.ok_or_else(|| {
        *searched = bytes.len();
        bytes.len() + 1
    })
}

fn sockperf(body: &[u8], flags: u8) -> Vec<u8> {
    let len = (SOCKPERF_HEADER_BYTES + body.len()) as u32;
    [&body[8..16], &[0, flags], &len.to_be_bytes(), body].concat()
}

fn hex(bytes: &[u8]) -> Vec<u8> {
    let digit = |n: u8| b"0123456789abcdef"[usize::from(n)];
    let mut text = vec![0; 2 * bytes.len()];
    for (pair, byte) in text.chunks_exact_mut(2).zip(bytes) {
        pair.copy_from_slice(&[digit(byte >> 4), digit(byte & 15)]);
    }
    text
}

/// The value of each character as a digit; 16 and above: not a digit.
const DIGITS: [u8; 256] = {
    let mut digits = [16; 256];
    let mut value = 0;
    while value < 16 {
        digits[b"0123456789abcdef"[value] as usize] = value as u8;
        digits[b"0123456789ABCDEF"[value] as usize] = value as u8;
        value += 1;
    }
    digits
};

fn unhex(text: &[u8]) -> Option<Vec<u8>> {
    let mut wrong = text.len() % 2;
    let mut bytes = vec![0; text.len() / 2];
    for (byte, pair) in bytes.iter_mut().zip(text.chunks_exact(2)) {
        let (high, low) = (DIGITS[usize::from(pair[0])], DIGITS[usize::from(pair[1])]);
        wrong |= usize::from((high | low) >> 4);
        *byte = high << 4 | low;
    }
    (wrong == 0).then_some(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn body(filler: u32) -> Body {
        Body { client: 7, sequence: 9, key: 0x1234_5678, ask: Ask::Answer, want: 100, filler }
    }

    #[test]
    fn messages_survive_their_framing_and_the_engine_agrees() {
        for framing in Framing::all(64) {
            let flavors: &[Flavor] = match framing {
                Framing::Memcached => &[Flavor::Plain, Flavor::Silent, Flavor::Quiet],
                Framing::Sockperf => &[Flavor::Plain, Flavor::Silent],
                _ => &[Flavor::Plain],
            };
            for &flavor in flavors {
                let filler = match framing {
                    Framing::Fixed(_) => 36,
                    _ if flavor == Flavor::Quiet => 0,
                    _ => request_filler_max(framing, 256).unwrap() as u32,
                };
                let body = body(filler);
                let payload = request_payload(framing, &body, flavor);
                assert!(payload.len() <= 256, "{framing} {}", payload.len());
                assert_eq!(decode_request(framing, &payload), Some((body, flavor)), "{framing}");
                let wire = request_wire(framing, &payload);
                let parsed = framing.parse_request(&mut ParseState::default(), &wire, 256);
                let Ok(Parsed::Message { consumed, start, end, .. }) = parsed else {
                    panic!("{framing}: {parsed:?}")
                };
                assert_eq!((consumed, &wire[start..end]), (wire.len(), &payload[..]));
                let key = key_bytes(framing, &payload).unwrap();
                assert_eq!(key_range(framing).of(&payload), Ok(key));

                let reply = body.reply();
                let payload = reply_payload(framing, &reply, flavor);
                assert_eq!(decode_reply(framing, &payload), Some(reply));
                let crlf = wire.ends_with(b"\r\n");
                let mut wire = Vec::new();
                framing.as_client_writes(crlf).encode_reply(&payload, &mut wire).unwrap();
                let mut stream = ReplyStream::default();
                // Twice, byte by byte: nothing is returned before its end or forgotten after it.
                for byte in [&wire[..], &wire[..]].concat() {
                    assert_eq!(stream.next(framing), None, "{framing}");
                    stream.push(&[byte]);
                    if stream.left() == wire.len() {
                        let told = stream.next(framing);
                        assert_eq!(told, Some(FromStream::Reply(&payload)), "{framing}");
                    }
                }
                assert_eq!(stream.left(), 0, "{framing}");
            }
        }
    }

    #[test]
    fn any_changed_bit_is_noticed() {
        let bytes = body(20).request_bytes();
        assert_eq!(Body::of_request(&bytes), Some(body(20)));
        assert_eq!(Body::of_reply(&bytes), None);
        for bit in 0..8 * bytes.len() {
            let mut changed = bytes.clone();
            changed[bit / 8] ^= 1 << (bit % 8);
            assert_ne!(Body::of_request(&changed), Some(body(20)), "bit {bit}");
        }
        assert_ne!(body(20).reply(), Body { sequence: 10, ..body(20) }.reply());
    }

    #[test]
    fn the_largest_replies_fit() {
        for framing in Framing::all(64) {
            let filler = reply_filler_max(framing, 512).unwrap() as u32;
            let payload = reply_payload(framing, &Body { filler, ..body(0) }, Flavor::Plain);
            assert!(payload.len() <= 512, "{framing} {}", payload.len());
        }
    }
}
