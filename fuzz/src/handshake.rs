//! The handshake of shared-memory ports, both messages: decoded as encoded, or refused.

use wire::handshake::{ANSWER_BYTES_MAX, Answer, HELLO_BYTES, Hello};

/// A message to the engine, and an answer to a client.
pub fn message(input: &[u8]) {
    if let Ok(hello) = Hello::decode(input) {
        assert_eq!(input.len(), HELLO_BYTES);
        assert_eq!(Hello::decode(&hello.encode()), Ok(hello));
    }
    if let Ok(answer) = Answer::decode(input) {
        let bytes = answer.encode();
        assert!(bytes.len() <= ANSWER_BYTES_MAX);
        let again = Answer::decode(&bytes).expect("an encoded answer is valid");
        match (answer, again) {
            // A text that is too long is truncated.
            (Answer::Refused(text), Answer::Refused(cut)) => assert!(text.starts_with(&cut)),
            (answer, again) => assert_eq!(answer, again),
        }
    }
}
