//! What is said at the control socket: requests as the engine reads them, answers as `serval reload` reads
//! them. Neither side believes the other.

use serde_json::{Map, Value as Json, json};

/// Longest request, in bytes.
pub const REQUEST_BYTES_MAX: usize = 1024;
/// Longest answer, in bytes.
pub const ANSWER_BYTES_MAX: usize = 1 << 20;

/// What somebody asks of the engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Request {
    /// What runs.
    Status,
    /// Read the configuration again.
    Reload,
    /// The page of metrics. The answer tells its length; the page is in a sealed file that comes along.
    Metrics,
}

impl Request {
    /// Reads a request; anything else is answered with the sentence.
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
            Some(_) => Err("no such command: there are status, reload and metrics".to_owned()),
            None => Err(format!("there is no command: {example}")),
        }
    }

    /// As [`Self::parse`] reads it.
    pub fn line(self) -> String {
        let command = match self {
            Self::Status => "status",
            Self::Reload => "reload",
            Self::Metrics => "metrics",
        };
        format!("{}\n", json!({ "command": command }))
    }
}

/// Reads an answer: an object whose texts steer no terminal. Control characters in them are read as `?`, but for the
/// ends of lines in sentences that have several.
pub fn read_answer(bytes: &[u8]) -> Result<Json, String> {
    match serde_json::from_slice(bytes) {
        Ok(Json::Object(answer)) => Ok(Json::Object(tame_object(answer))),
        Ok(_) => Err("no answer of a server: it is no JSON object".to_owned()),
        Err(error) => Err(format!("no answer of a server: {error}")),
    }
}

fn tame_object(object: Map<String, Json>) -> Map<String, Json> {
    let entry = |(key, value): (String, Json)| {
        let sentence = ["message", "error"].contains(&key.as_str());
        (tame_text(&key, false), tame(value, sentence))
    };
    object.into_iter().map(entry).collect()
}

/// As deep as the parser lets a value be, which is 128.
fn tame(value: Json, lines: bool) -> Json {
    match value {
        Json::String(text) => Json::String(tame_text(&text, lines)),
        Json::Array(values) => values.into_iter().map(|value| tame(value, lines)).collect(),
        Json::Object(object) => Json::Object(tame_object(object)),
        other => other,
    }
}

fn tame_text(text: &str, lines: bool) -> String {
    let steers = |c: char| c.is_control() && !(lines && c == '\n');
    text.chars().map(|c| if steers(c) { '?' } else { c }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_survive_and_others_are_told_what_is_right() {
        for request in [Request::Status, Request::Reload, Request::Metrics] {
            assert_eq!(Request::parse(request.line().as_bytes()), Ok(request));
        }
        for (bytes, why) in [
            (&b""[..], "send a JSON object"),
            (b"reload", "send a JSON object"),
            (b"{}", "there is no command"),
            (b"[1]", "there is no command"),
            (b"{\"command\": 7}", "there is no command"),
            (b"{\"command\": \"stop\"}", "no such command"),
            (&[b' '; REQUEST_BYTES_MAX + 1], "at most"),
        ] {
            assert!(Request::parse(bytes).unwrap_err().contains(why));
        }
    }

    #[test]
    fn answers_steer_no_terminal() {
        let hostile = json!({
            "message": "two\nlines\u{1b}[2J", "services": [{ "name": "a\nb", "\u{9b}": "\u{7f}" }],
        });
        let tame = json!({
            "message": "two\nlines?[2J", "services": [{ "name": "a?b", "?": "?" }],
        });
        assert_eq!(read_answer(hostile.to_string().as_bytes()), Ok(tame));
        for wrong in [&b""[..], b"7", b"[]", b"{", b"{\"result\":\xff}"] {
            assert!(read_answer(wrong).unwrap_err().starts_with("no answer of a server"));
        }
    }
}
