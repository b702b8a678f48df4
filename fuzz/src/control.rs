//! The control socket: requests are decoded as they were encoded or refused in a short line; no answer
//! can send control sequences to the terminal of the process that asked.

use serde_json::Value as Json;
use server::control::protocol::{REQUEST_BYTES_MAX, Request, read_answer};

/// Longest reason for a refusal, in bytes: it becomes part of an answer, and does not repeat the request.
const REASON_BYTES_MAX: usize = 200;

/// A message to the control socket, and one from a false engine.
pub fn message(input: &[u8]) {
    match Request::parse(input) {
        Ok(request) => {
            assert!(input.len() <= REQUEST_BYTES_MAX, "a request of {} bytes", input.len());
            assert_eq!(Request::parse(request.line().as_bytes()).as_ref(), Ok(&request));
            let sent: Json = serde_json::from_slice(input).expect("a request is JSON");
            let written: Json =
                serde_json::from_str(&request.line()).expect("an encoded request is JSON");
            assert_eq!(sent["command"], written["command"], "the decoded command is the one sent");
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
            // (Numbers may lose their last digit.)
            let again = read_answer(answer.to_string().as_bytes());
            assert!(again.is_ok(), "a printed answer can be parsed: {again:?}");
        }
        Err(why) => assert!(!why.contains(char::is_control), "{why:?}"),
    }
}

/// A value may contain line breaks and no other control character; a key none at all.
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
