//! The messages of transfers: decoded as encoded, or refused.

use transfer::message::{ANSWER_BYTES, Answer, REQUEST_BYTES, Request};

/// A request to a transfer engine, and an answer to its caller.
pub fn message(input: &[u8]) {
    if let Ok(request) = Request::decode(input) {
        assert_eq!(input.len(), REQUEST_BYTES);
        assert_eq!(request.encode(), input, "a request has one encoding");
    }
    if let Ok(answer) = Answer::decode(input) {
        assert_eq!(input.len(), ANSWER_BYTES);
        let encoded = answer.encode();
        assert_eq!(Answer::decode(&encoded).as_ref(), Ok(&answer));
        if let Answer::Ended { result: Err(error), .. } = &answer {
            assert!(!error.text.chars().any(char::is_control), "a text steers no terminal");
            assert!(!error.name().is_empty());
        }
    }
}
