//! Messages between accelerator runtimes and engines: decoded as they were encoded, or refused.

use wire::attach::{Bye, FromEngine, FromRuntime, MESSAGE_BYTES_MAX};

/// A message to an accelerator's socket, and one from a false engine to a runtime.
pub fn message(input: &[u8]) {
    let from_runtime = FromRuntime::decode(input);
    let from_engine = FromEngine::decode(input);
    assert!(from_runtime.is_err() || from_engine.is_err(), "a message is valid in both directions");
    // A message has one encoding; a parameter may be NaN, so bytes are compared.
    match from_runtime {
        // Control characters in a sentence are decoded as question marks.
        Ok(FromRuntime::Bye(Bye { text, .. })) if text.contains('?') => {
            assert!(!text.contains(char::is_control));
        }
        Ok(message) => assert_eq!(message.encode(), input),
        Err(_) => {}
    }
    match from_engine {
        // A refusal is decoded whatever its version and characters; an encoded one is valid and short enough.
        Ok(refusal @ FromEngine::Refuse(_)) => {
            let bytes = refusal.encode();
            assert!(bytes.len() <= MESSAGE_BYTES_MAX);
            assert_eq!(FromEngine::decode(&bytes).map(|again| again.encode()), Ok(bytes));
        }
        Ok(message) => assert_eq!(message.encode(), input),
        Err(_) => {}
    }
}
