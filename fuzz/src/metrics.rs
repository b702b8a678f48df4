//! Requests to the metrics endpoint: the answer does not depend on how the bytes are split.

#[path = "../../crates/server/src/exporter"]
mod exporter {
    #[allow(dead_code, reason = "the exporter uses more of it")]
    mod http;

    /// A request, in chunks of the size that the first byte gives.
    pub fn request(input: &[u8]) {
        let Some((size, bytes)) = input.split_first() else { return };
        let whole = http::parse(bytes);
        // The endpoint parses after every read and stops at the first decision.
        let piece = usize::from(*size).max(1);
        let first = (0..bytes.len())
            .step_by(piece)
            .find_map(|at| http::parse(&bytes[..(at + piece).min(bytes.len())]));
        assert_eq!(first, whole, "pieces of {piece} bytes");
        match whole {
            None => assert!(bytes.len() < http::REQUEST_BYTES_MAX, "an endless request"),
            Some(Ok(request)) => {
                assert!(!request.path.contains(['?', '#', ' ', '\r', '\n']));
            }
            Some(Err(refusal)) => {
                let text = http::response(refusal.status(), http::TEXT, refusal.reason(), false);
                assert!(text.starts_with(b"HTTP/1.1 4"));
            }
        }
    }
}

pub use exporter::request;
