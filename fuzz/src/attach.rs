//! The conversation of accelerator runtimes and engines: read as it was written, or refused.

use wire::attach::{Bye, FromEngine, FromRuntime, MESSAGE_BYTES_MAX};

/// What a process says at an accelerator's socket, and what a false engine says to a runtime.
pub fn message(input: &[u8]) {
    let from_runtime = FromRuntime::decode(input);
    let from_engine = FromEngine::decode(input);
    assert!(from_runtime.is_err() || from_engine.is_err(), "a message of both sides");
    // A message has one form; a parameter may be no number, so bytes are compared.
    match from_runtime {
        // Control characters in a sentence are read as question marks.
        Ok(FromRuntime::Bye(Bye { text, .. })) if text.contains('?') => {
            assert!(!text.contains(char::is_control));
        }
        Ok(message) => assert_eq!(message.encode(), input),
        Err(_) => {}
    }
    match from_engine {
        // A refusal is read whatever its version and its letters; what is written is sound and short enough.
        Ok(refusal @ FromEngine::Refuse(_)) => {
            let bytes = refusal.encode();
            assert!(bytes.len() <= MESSAGE_BYTES_MAX);
            assert_eq!(FromEngine::decode(&bytes).map(|again| again.encode()), Ok(bytes));
        }
        Ok(message) => assert_eq!(message.encode(), input),
        Err(_) => {}
    }
}
