//! CoAP requests with tokens, for demos: legitimate and forged ones.

use std::path::PathBuf;

use onpath::{Param, Spec};

use super::DemoError;

/// A key, and a token signed with it: {"sub":"12345","iat":1700000000}.
const KEY: &str =
    "AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8gISIjJCUmJygpKissLS4vMDEyMzQ1Njc4OTo7PD0-Pw";
const TOKEN: &[u8] = b"eyJhbGciOiJIUzI1NiIsInR5cCI6IkpXVCJ9.eyJzdWIiOiIxMjM0NSIsImlhdCI6MTcwMDAwMDAwMH0.YnoXAwK6S6sCjzL3mxzVJFAs92FIOMoHshFld8ugC_Q";
/// Where the signature begins.
const SIGNATURE_AT: usize = TOKEN.len() - 43;
/// 2.05 Content and 4.01 Unauthorized.
pub(super) const CONTENT: u8 = 0x45;
pub(super) const UNAUTHORIZED: u8 = 0x81;

/// Writes a confirmable POST with this number. A forged one has another signature for each number.
pub(super) fn request(index: u64, forged: bool, payload: &[u8], into: &mut Vec<u8>) {
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
pub(super) fn answers(index: u64, code: u8, payload: &[u8], reply: &[u8]) -> bool {
    let head = [0x68, code, (index >> 8) as u8, index as u8];
    let Some(rest) = reply.strip_prefix(&head[..]) else { return false };
    let Some(rest) = rest.strip_prefix(&index.to_be_bytes()[..]) else { return false };
    match payload {
        [] => rest.is_empty(),
        _ => rest.strip_prefix(&[0xff]) == Some(payload),
    }
}

/// The number of the request that a reply answers.
pub(super) fn number(reply: &[u8]) -> Option<u64> {
    Some(u64::from_be_bytes(reply.get(4..12)?.try_into().ok()?))
}

/// A file with the key, while this lives.
pub(super) struct KeyFile(PathBuf);

impl KeyFile {
    pub(super) fn write() -> Result<Self, DemoError> {
        let path = std::env::temp_dir().join(format!("serval-demo-{}.keys", std::process::id()));
        std::fs::write(&path, format!("demo {KEY}\n")).map_err(|error| {
            let what = format!("write the keys {}", path.display());
            DemoError::Io { what, error }
        })?;
        Ok(Self(path))
    }

    /// The function with this key, and these other parameters.
    pub(super) fn function(&self, params: &[(&str, &str)]) -> Spec {
        let mut spec = Spec::new("auth", "coap-auth");
        // The client, and other programs, may interrupt the worker.
        spec.deadline_us = onpath::library::DEADLINE_US_MAX;
        spec.params = vec![("keys".into(), Param::Text(self.0.to_string_lossy().into_owned()))];
        spec.params.extend(params.iter().map(|(name, value)| ((*name).into(), (*value).into())));
        spec
    }
}

impl Drop for KeyFile {
    fn drop(&mut self) {
        // A file that is left in the temporary folder does no harm.
        let _ = std::fs::remove_file(&self.0);
    }
}

#[cfg(test)]
mod tests {
    use onpath::builtin::coap_auth::{Keys, Message, Refused, Times, token_of, value_of, verify};

    use super::*;

    #[test]
    fn legitimate_requests_are_valid_and_forged_ones_are_not() {
        let keys = Keys::parse(format!("demo {KEY}\n").as_bytes()).unwrap();
        let times = Times { now: 1_700_000_000, leeway: 60, window: 0 };
        for index in [0, 7, 0x0102_0304] {
            for forged in [false, true] {
                let mut bytes = Vec::new();
                request(index, forged, b"face", &mut bytes);
                let message = Message::parse(&bytes).unwrap();
                assert_eq!(value_of(message.payload, b"payload"), Some(&b"face"[..]));
                let token = token_of(message.payload).unwrap();
                let refused = verify(token, &keys, times).err();
                assert_eq!(refused, forged.then_some(Refused::Signature));
            }
        }
        let mut reply = [&[0x68, CONTENT, 0, 7][..], &7u64.to_be_bytes(), b"\xffdone"].concat();
        assert!(answers(7, CONTENT, b"done", &reply) && number(&reply) == Some(7));
        assert!(!answers(8, CONTENT, b"done", &reply) && !answers(7, CONTENT, b"", &reply));
        *reply.last_mut().unwrap() ^= 1;
        assert!(!answers(7, CONTENT, b"done", &reply));
    }
}
