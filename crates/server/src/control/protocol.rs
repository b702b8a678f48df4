//! The protocol of the control socket: requests as the engine reads them, answers as `serval reload` reads them.
//! Neither side trusts the other.

use serde_json::{Map, Value as Json, json};

/// Longest request, in bytes.
pub const REQUEST_BYTES_MAX: usize = 1024;
/// Longest answer, in bytes.
pub const ANSWER_BYTES_MAX: usize = 1 << 20;

/// A request to the engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Request {
    /// The current services.
    Status,
    /// Read the configuration again.
    Reload,
    /// The page of metrics. The answer contains its length; the page is in a sealed memory file sent with it.
    Metrics,
}

impl Request {
    /// Parses a request; the error is the answer to send.
    pub fn parse(bytes: &[u8]) -> Result<Self, String> {
        if bytes.len() > REQUEST_BYTES_MAX {
            return Err(format!("a request has at most {REQUEST_BYTES_MAX} bytes"));
        }
        let example = "send a JSON object such as {\"command\": \"status\"}";
        let value: Json = serde_json::from_slice(bytes).map_err(|e| format!("{e}: {example}"))?;
        match value.get("command").and_then(Json::as_str) {
            Some("status") => Ok(Self::Status),
            Some("reload") => Ok(Self::Reload),
            Some("metrics") => Ok(Self::Metrics),
            Some(_) => {
                Err("no such command: the commands are status, reload and metrics".to_owned())
            }
            None => Err(format!("the request has no command: {example}")),
        }
    }

    /// The line that [`Self::parse`] reads.
    pub fn line(self) -> String {
        let command = match self {
            Self::Status => "status",
            Self::Reload => "reload",
            Self::Metrics => "metrics",
        };
        format!("{}\n", json!({ "command": command }))
    }
}

/// Reads an answer: an object whose texts cannot control a terminal. Control characters in them are replaced by `?`,
/// except line ends in multi-line messages.
pub fn read_answer(bytes: &[u8]) -> Result<Json, String> {
    match serde_json::from_slice(bytes) {
        Ok(Json::Object(answer)) => Ok(Json::Object(sanitize_object(answer))),
        Ok(_) => Err("not an answer of a server: it is not a JSON object".to_owned()),
        Err(error) => Err(format!("not an answer of a server: {error}")),
    }
}

fn sanitize_object(object: Map<String, Json>) -> Map<String, Json> {
    let entry = |(key, value): (String, Json)| {
        let sentence = ["message", "error"].contains(&key.as_str());
        (sanitize_text(&key, false), sanitize(value, sentence))
    };
    object.into_iter().map(entry).collect()
}

/// Recursion is limited by the parser's depth of 128.
fn sanitize(value: Json, lines: bool) -> Json {
    match value {
        Json::String(text) => Json::String(sanitize_text(&text, lines)),
        Json::Array(values) => values.into_iter().map(|value| sanitize(value, lines)).collect(),
        Json::Object(object) => Json::Object(sanitize_object(object)),
        other => other,
    }
}

fn sanitize_text(text: &str, lines: bool) -> String {
    let steers = |c: char| c.is_control() && !(lines && c == '\n');
    text.chars().map(|c| if steers(c) { '?' } else { c }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_round_trip_and_invalid_ones_get_a_fix() {
        for request in [Request::Status, Request::Reload, Request::Metrics] {
            assert_eq!(Request::parse(request.line().as_bytes()), Ok(request));
        }
        for (bytes, why) in [
            (&b""[..], "send a JSON object"),
            (b"reload", "send a JSON object"),
            (b"{}", "has no command"),
            (b"[1]", "has no command"),
            (b"{\"command\": 7}", "has no command"),
            (b"{\"command\": \"stop\"}", "no such command"),
            (&[b' '; REQUEST_BYTES_MAX + 1], "at most"),
        ] {
            assert!(Request::parse(bytes).unwrap_err().contains(why));
        }
    }

    #[test]
    fn answers_cannot_control_a_terminal() {
        let hostile = json!({
            "message": "two\nlines\u{1b}[2J", "services": [{ "name": "a\nb", "\u{9b}": "\u{7f}" }],
        });
        let sanitize = json!({
            "message": "two\nlines?[2J", "services": [{ "name": "a?b", "?": "?" }],
        });
        assert_eq!(read_answer(hostile.to_string().as_bytes()), Ok(sanitize));
        for wrong in [&b""[..], b"7", b"[]", b"{", b"{\"result\":\xff}"] {
            assert!(read_answer(wrong).unwrap_err().starts_with("not an answer of a server"));
        }
    }
}
