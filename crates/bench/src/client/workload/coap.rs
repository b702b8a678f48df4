//! CoAP requests (RFC 7252) with tokens: legitimate and forged ones.

use super::Workload;

/// The key of the tokens in base64url.
pub const KEY: &str =
    "AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8gISIjJCUmJygpKissLS4vMDEyMzQ1Njc4OTo7PD0-Pw";
/// A token that is signed with it: {"sub":"12345","iat":1700000000}.
const TOKEN: &[u8] = b"eyJhbGciOiJIUzI1NiIsInR5cCI6IkpXVCJ9.eyJzdWIiOiIxMjM0NSIsImlhdCI6MTcwMDAwMDAwMH0.YnoXAwK6S6sCjzL3mxzVJFAs92FIOMoHshFld8ugC_Q";
/// Where the signature begins.
const SIGNATURE_AT: usize = TOKEN.len() - 43;
/// 2.05 Content and 4.01 Unauthorized.
pub const CONTENT: u8 = 0x45;
pub const UNAUTHORIZED: u8 = 0x81;
/// The payload of requests and of answers.
const PAYLOAD: &[u8] = b"on";
const DONE: &[u8] = b"done";

/// Writes a confirmable POST with this number. A forged one has another signature for each number.
pub fn write_request(index: u64, forged: bool, payload: &[u8], into: &mut Vec<u8>) {
    into.extend_from_slice(&[0x48, 2, (index >> 8) as u8, index as u8]);
    into.extend_from_slice(&index.to_be_bytes());
    // A map of two: "token" and a text of 24 to 255 bytes, "payload" and up to 65 535 bytes.
    into.extend_from_slice(b"\xff\xa2\x65token\x78");
    into.push(TOKEN.len() as u8);
    let at = into.len();
    into.extend_from_slice(TOKEN);
    if forged {
        let other = if into[at + SIGNATURE_AT] == b'Z' { b'Y' } else { b'Z' };
        into[at + SIGNATURE_AT] = other;
        into[at + SIGNATURE_AT + 1] = b'A' + (index % 26) as u8;
    }
    into.extend_from_slice(b"\x67payload\x59");
    into.extend_from_slice(&(payload.len() as u16).to_be_bytes());
    into.extend_from_slice(payload);
}

/// Whether an acknowledgement with this code and payload answers this request.
pub fn answers(index: u64, code: u8, payload: &[u8], reply: &[u8]) -> bool {
    let head = [0x68, code, (index >> 8) as u8, index as u8];
    let Some(rest) = reply.strip_prefix(&head[..]) else { return false };
    let Some(rest) = rest.strip_prefix(&index.to_be_bytes()[..]) else { return false };
    match payload {
        [] => rest.is_empty(),
        _ => rest.strip_prefix(&[0xff]) == Some(payload),
    }
}

/// The number of the request that a reply answers.
pub fn number(reply: &[u8]) -> Option<u64> {
    Some(u64::from_be_bytes(reply.get(4..12)?.try_into().ok()?))
}

/// Requests to a server that answers "done", of which every one or none is forged.
#[derive(Clone, Copy, Debug)]
pub struct Coap {
    forged: bool,
}

impl Coap {
    /// Length of a request.
    pub const REQUEST_BYTES: usize = 12 + 10 + TOKEN.len() + 11 + PAYLOAD.len();

    /// Legitimate requests, or forged ones that are refused with 4.01.
    pub fn new(forged: bool) -> Self {
        Self { forged }
    }
}

impl Workload for Coap {
    fn request(&mut self, index: u64, into: &mut Vec<u8>) {
        write_request(index, self.forged, PAYLOAD, into);
    }

    fn accepts(&mut self, index: u64, reply: &[u8]) -> bool {
        let (code, payload) = if self.forged { (UNAUTHORIZED, &b""[..]) } else { (CONTENT, DONE) };
        answers(index, code, payload, reply)
    }

    fn has_identity(&self) -> bool {
        true
    }

    fn identify(&self, reply: &[u8]) -> Option<u64> {
        number(reply)
    }
}

#[cfg(test)]
mod tests {
    use builtins::coap_auth::{Keys, Message, Refused, Times, token_of, value_of, verify};

    use super::super::tests::identity_survives;
    use super::*;

    #[test]
    fn legitimate_requests_are_valid_and_forged_ones_are_not() {
        let keys = Keys::parse(format!("demo {KEY}\n").as_bytes()).unwrap();
        let times = Times { now: 1_700_000_000, leeway: 60, window: 0 };
        for index in [0, 7, 0x0102_0304] {
            for forged in [false, true] {
                let mut bytes = Vec::new();
                Coap::new(forged).request(index, &mut bytes);
                assert_eq!(bytes.len(), Coap::REQUEST_BYTES);
                let message = Message::parse(&bytes).unwrap();
                assert_eq!(value_of(message.payload, b"payload"), Some(PAYLOAD));
                let token = token_of(message.payload).unwrap();
                let refused = verify(token, &keys, times).err();
                assert_eq!(refused, forged.then_some(Refused::Signature));
            }
        }
    }

    #[test]
    fn answers_have_the_number_and_the_right_code() {
        let answer = |code: u8, payload: &[u8]| {
            [&[0x68, code, 0, 7][..], &7u64.to_be_bytes(), payload].concat()
        };
        identity_survives(&mut Coap::new(false), 7, &answer(CONTENT, b"\xffdone"));
        identity_survives(&mut Coap::new(true), 7, &answer(UNAUTHORIZED, b""));
        for (forged, code, payload) in [
            (false, CONTENT, &b"\xffdonf"[..]),
            (false, CONTENT, b""),
            (false, UNAUTHORIZED, b""),
            (true, CONTENT, b"\xffdone"),
            (true, UNAUTHORIZED, b"\xffdone"),
        ] {
            assert!(!Coap::new(forged).accepts(7, &answer(code, payload)));
        }
    }
}
