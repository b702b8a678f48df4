//! The control socket: requests are read as they are written or refused in a short line; no answer
//! steers the terminal of who asked.

use serde_json::Value as Json;
use server::control::protocol::{REQUEST_BYTES_MAX, Request, read_answer};

/// Longest reason for a refusal, in bytes: it goes into an answer, and does not repeat what was sent.
const REASON_BYTES_MAX: usize = 200;

/// What a process says at the control socket, and what a false engine answers.
pub fn message(input: &[u8]) {
    match Request::parse(input) {
        Ok(request) => {
            assert!(input.len() <= REQUEST_BYTES_MAX, "a request of {} bytes", input.len());
            assert_eq!(Request::parse(request.line().as_bytes()), Ok(request));
            let sent: Json = serde_json::from_slice(input).expect("a request is JSON");
            let written: Json =
                serde_json::from_str(&request.line()).expect("what is written is JSON");
            assert_eq!(sent["command"], written["command"], "what was asked is what is done");
        }
        Err(why) => {
            assert!(!why.is_empty() && why.len() <= REASON_BYTES_MAX, "{why:?}");
            assert!(!why.contains(char::is_control), "{why:?}");
        }
    }
    match read_answer(input) {
        Ok(answer) => {
            assert!(answer.is_object());
            assert_tame(&answer);
            // (Numbers may lose their last digit on the way.)
            let again = read_answer(answer.to_string().as_bytes());
            assert!(again.is_ok(), "what is shown can be read: {again:?}");
        }
        Err(why) => assert!(!why.contains(char::is_control), "{why:?}"),
    }
}

/// Nothing but ends of lines in a value; none at all in a key.
fn assert_tame(value: &Json) {
    match value {
        Json::String(text) => {
            assert!(!text.contains(|c: char| c.is_control() && c != '\n'), "{text:?}");
        }
        Json::Array(values) => values.iter().for_each(assert_tame),
        Json::Object(entries) => {
            for (key, value) in entries {
                assert!(!key.contains(char::is_control), "{key:?}");
                assert_tame(value);
            }
        }
        _ => {}
    }
}
