//! What the function `coap-auth` parses: whatever a datagram is, and whatever is in a token that the holder of a key has signed, it is refused or
//! understood without a panic, and nothing passes that has no valid signature.

use builtins::coap_auth::{Keys, Message, Refused, Times, token_of, verify};
use hmac::{Hmac, Mac};
use sha2::Sha256;

/// 32 zero bytes.
const KEY: &[u8] = b"a AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA";
const TIMES: Times = Times { now: 1 << 31, leeway: 1, window: 1 << 20 };

/// Even first byte: a datagram; odd: the header and the body of a token, divided by the first zero byte, which are signed.
pub fn message(input: &[u8]) {
    let keys = Keys::parse(KEY).expect("it is a file of keys");
    let Some((first, rest)) = input.split_first() else { return };
    if first % 2 == 1 {
        return signed(rest, &keys);
    }
    if let Some(message) = Message::parse(rest) {
        assert!(message.token.len() <= 8);
        assert!(message.payload.len() + message.token.len() + 4 <= rest.len());
        assert!(message.code != 0 || rest.len() == 4);
        if let Some(token) = token_of(message.payload) {
            assert!(token.len() < message.payload.len());
            assert!(verify(token, &keys, TIMES).is_err(), "it has no signature");
        }
    }
    let _ = token_of(rest);
    let _ = Keys::parse(rest).map_err(|why| assert!(!why.contains(char::is_control), "{why:?}"));
}

fn signed(input: &[u8], keys: &Keys) {
    let at = input.iter().position(|byte| *byte == 0).unwrap_or(input.len());
    let (header, body) = (&input[..at], &input[(at + 1).min(input.len())..]);
    let text = format!("{}.{}", base64(header), base64(body));
    let mut mac = Hmac::<Sha256>::new_from_slice(&[0; 32]).expect("any length is right");
    mac.update(text.as_bytes());
    let token = format!("{text}.{}", base64(&mac.finalize().into_bytes()));
    let has = |name: &[u8]| body.windows(name.len()).any(|part| part == name);
    match verify(token.as_bytes(), keys, TIMES) {
        Ok(accepted) => {
            assert!(accepted.until.is_some_and(|until| until >= TIMES.now) && has(b"\"iat\""));
            assert!(header.windows(7).any(|part| part == b"\"HS256\""), "another algorithm");
        }
        Err(why) => assert_ne!(why, Refused::Signature),
    }
}

fn base64(bytes: &[u8]) -> String {
    let alphabet = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_";
    let mut text = String::new();
    for three in bytes.chunks(3) {
        let mut bits = [0; 3];
        bits[..three.len()].copy_from_slice(three);
        let bits = u32::from_be_bytes([0, bits[0], bits[1], bits[2]]);
        for digit in 0..=three.len() {
            text.push(alphabet[(bits >> (18 - 6 * digit) & 63) as usize].into());
        }
    }
    text
}
