//! Fields of a request.

use serde_json::Value as Json;

/// Longest text of a request that is no path, in bytes.
pub(super) const TEXT_BYTES_MAX: usize = 64;

/// A text of a request.
pub(super) fn text(request: &Json, key: &str, bytes_max: usize) -> Result<String, String> {
    let text = request.get(key).and_then(Json::as_str);
    let text = text.ok_or_else(|| format!("the request has no text {key:?}"))?;
    if text.len() > bytes_max || text.contains(char::is_control) {
        return Err(format!("{key:?} has control characters or more than {bytes_max} bytes"));
    }
    Ok(text.to_owned())
}
