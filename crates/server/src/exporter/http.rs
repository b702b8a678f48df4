//! The part of HTTP/1.1 (RFC 9112) that the exporter needs: one request per connection, no body.

use std::fmt::Write as _;

/// Longest request, in bytes: request line and headers.
pub const REQUEST_BYTES_MAX: usize = 8192;
/// Maximum number of header lines.
const HEADERS_MAX: usize = 64;

pub(super) const TEXT: &str = "text/plain; charset=utf-8";
pub(super) const OPEN_METRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// A client's request.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Request {
    /// Path, without the query.
    pub(super) path: String,
    /// HEAD: like GET, without the body.
    pub(super) head_only: bool,
}

/// Why a request is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Refusal {
    NotHttp,
    Method,
    TooLong,
}

impl Refusal {
    pub(super) fn status(self) -> u16 {
        match self {
            Self::NotHttp => 400,
            Self::Method => 405,
            Self::TooLong => 431,
        }
    }

    pub(super) fn reason(self) -> &'static str {
        match self {
            Self::NotHttp => "this is not an HTTP/1 request\n",
            Self::Method => "only GET and HEAD are answered\n",
            Self::TooLong => "the request is too long\n",
        }
    }
}

/// Parses the bytes received so far; `None` if the request is incomplete.
pub(super) fn parse(bytes: &[u8]) -> Option<Result<Request, Refusal>> {
    let mut headers = [httparse::EMPTY_HEADER; HEADERS_MAX];
    let mut request = httparse::Request::new(&mut headers);
    // A longer request is refused, whether complete or not.
    let seen = &bytes[..bytes.len().min(REQUEST_BYTES_MAX)];
    match request.parse(seen) {
        Ok(httparse::Status::Complete(_)) => {}
        Ok(httparse::Status::Partial) if bytes.len() >= REQUEST_BYTES_MAX => {
            return Some(Err(Refusal::TooLong));
        }
        Ok(httparse::Status::Partial) => return None,
        Err(httparse::Error::TooManyHeaders) => return Some(Err(Refusal::TooLong)),
        Err(_) => return Some(Err(Refusal::NotHttp)),
    }
    let head_only = match request.method {
        Some("GET") => false,
        Some("HEAD") => true,
        _ => return Some(Err(Refusal::Method)),
    };
    let target = request.path.unwrap_or_default();
    let path = target.split(['?', '#']).next().unwrap_or_default().to_owned();
    Some(Ok(Request { path, head_only }))
}

/// A complete response; the connection is closed after it.
pub(super) fn response(status: u16, kind: &str, body: &str, head_only: bool) -> Vec<u8> {
    let phrase = match status {
        200 => "OK",
        400 => "Bad Request",
        404 => "Not Found",
        405 => "Method Not Allowed",
        431 => "Request Header Fields Too Large",
        503 => "Service Unavailable",
        _ => "Internal Server Error",
    };
    let mut text = format!(
        "HTTP/1.1 {status} {phrase}\r\nContent-Type: {kind}\r\nContent-Length: {}\r\n\
         Cache-Control: no-store\r\nX-Content-Type-Options: nosniff\r\nConnection: close\r\n",
        body.len()
    );
    if status == 405 {
        let _ = write!(text, "Allow: GET, HEAD\r\n");
    }
    text.push_str("\r\n");
    if !head_only {
        text.push_str(body);
    }
    text.into_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn path(text: &str) -> Option<Result<String, Refusal>> {
        parse(text.as_bytes()).map(|r| r.map(|r| r.path))
    }

    #[test]
    fn requests_are_parsed_once_they_are_complete() {
        let request = "GET /metrics?x=1 HTTP/1.1\r\nHost: a\r\n\r\n";
        for cut in 0..request.len() {
            assert_eq!(path(&request[..cut]), None, "{cut}");
        }
        assert_eq!(path(request), Some(Ok("/metrics".into())));
        assert_eq!(path("GET / HTTP/1.0\n\n"), Some(Ok("/".into())));
        assert!(parse(b"HEAD / HTTP/1.1\r\n\r\n").unwrap().unwrap().head_only);
    }

    #[test]
    fn everything_else_is_refused() {
        assert_eq!(path("POST / HTTP/1.1\r\n\r\n"), Some(Err(Refusal::Method)));
        assert_eq!(path("\u{16}\u{3}\u{1}\u{2}"), Some(Err(Refusal::NotHttp)));
        assert_eq!(path("GET / HTTP/2.0\r\n\r\n"), Some(Err(Refusal::NotHttp)));
        assert_eq!(path("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"), Some(Err(Refusal::NotHttp)));
        let many = format!("GET / HTTP/1.1\r\n{}\r\n", "A: b\r\n".repeat(100));
        assert_eq!(path(&many), Some(Err(Refusal::TooLong)));
        let long = format!("GET /{} HTTP/1.1\r\n\r\n", "a".repeat(REQUEST_BYTES_MAX));
        assert_eq!(path(&long), Some(Err(Refusal::TooLong)));
    }

    #[test]
    fn a_head_response_has_the_length_but_no_body() {
        let text = String::from_utf8(response(200, TEXT, "hello", true)).unwrap();
        assert!(text.contains("Content-Length: 5\r\n") && text.ends_with("\r\n\r\n"), "{text}");
    }

    proptest::proptest! {
        #[test]
        fn no_bytes_panic(bytes in proptest::collection::vec(0u8..=255, 0..2000)) {
            let _ = parse(&bytes);
        }
    }
}
