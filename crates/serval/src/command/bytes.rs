//! Messages on the command line: from files and hexadecimal digits, and how bytes are shown.

use std::fs::File;
use std::io::Read;
use std::path::Path;

use crate::bench::MESSAGE_BYTES_MAX;

/// `0a1b`, `0x0a 1b`, `0a:1b`.
pub(super) fn from_hex(text: &str) -> Result<Vec<u8>, String> {
    let text = text.strip_prefix("0x").or(text.strip_prefix("0X")).unwrap_or(text);
    let digits = text.chars().filter(|c| !c.is_ascii_whitespace() && *c != ':');
    let digits: Option<Vec<u8>> = digits.map(|c| c.to_digit(16).map(|digit| digit as u8)).collect();
    let pairs = digits.as_deref().map(<[u8]>::as_chunks::<2>).filter(|(_, rest)| rest.is_empty());
    let (pairs, _) = pairs.ok_or("must be pairs of hexadecimal digits, such as 0a1b")?;
    Ok(pairs.iter().map(|[high, low]| high << 4 | low).collect())
}

/// The whole file, if it can be a message.
pub(super) fn from_file(path: &Path) -> Result<Vec<u8>, String> {
    let failed = |error: std::io::Error| format!("cannot read {}: {error}", path.display());
    let file = File::open(path).map_err(failed)?;
    if !file.metadata().map_err(failed)?.is_file() {
        return Err(format!("cannot read {}: it is not a regular file", path.display()));
    }
    all_of(file).map_err(|error| format!("cannot read {}: {error}", path.display()))
}

/// Everything until the end, if it can be a message.
pub(super) fn all_of(source: impl Read) -> Result<Vec<u8>, String> {
    let mut bytes = Vec::new();
    let read = source.take(MESSAGE_BYTES_MAX as u64 + 1).read_to_end(&mut bytes);
    read.map_err(|error| error.to_string())?;
    if bytes.len() > MESSAGE_BYTES_MAX {
        return Err(format!("it is longer than a message can be ({MESSAGE_BYTES_MAX} bytes)"));
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hexadecimal_digits_come_in_pairs() {
        assert_eq!(from_hex("0a1B"), Ok(vec![0x0a, 0x1b]));
        assert_eq!(from_hex("0x0a 1b:ff\n"), Ok(vec![0x0a, 0x1b, 0xff]));
        assert_eq!(from_hex(""), Ok(vec![]));
        for text in ["0", "0g", "0x", "x0", "ä0"] {
            assert_eq!(from_hex(text).is_err(), text != "0x", "{text}");
        }
    }

    #[test]
    fn what_is_too_long_or_no_file_is_no_message() {
        let long = std::io::repeat(0).take(MESSAGE_BYTES_MAX as u64 + 1);
        assert!(all_of(long).unwrap_err().contains("longer than a message"));
        assert_eq!(all_of(&b"ab"[..]).unwrap(), b"ab");
        assert!(from_file(Path::new("/dev/zero")).unwrap_err().contains("not a regular file"));
        assert!(from_file(Path::new("/there/is/no/file")).unwrap_err().contains("/there/is"));
    }
}
