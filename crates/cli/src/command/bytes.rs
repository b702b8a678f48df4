//! Messages on the command line: input from files and hexadecimal digits, and output of bytes.

use std::io::Read;
use std::path::Path;

use sys::private_file::open_regular;

use bench::MESSAGE_BYTES_MAX;

/// `0a1b`, `0x0a 1b`, `0a:1b`.
pub(super) fn from_hex(text: &str) -> Result<Vec<u8>, String> {
    server::config::from_hex(text).map_err(str::to_owned)
}

/// The complete file, if it is not longer than a message.
pub(super) fn from_file(path: &Path) -> Result<Vec<u8>, String> {
    let failed = |error: String| format!("cannot read {}: {error}", path.display());
    let (file, _) = open_regular(path).map_err(|error| failed(error.to_string()))?;
    all_of(file).map_err(failed)
}

/// Everything up to the end, if it is not longer than a message.
pub(super) fn all_of(source: impl Read) -> Result<Vec<u8>, String> {
    let mut bytes = Vec::new();
    let read = source.take(MESSAGE_BYTES_MAX as u64 + 1).read_to_end(&mut bytes);
    read.map_err(|error| error.to_string())?;
    if bytes.len() > MESSAGE_BYTES_MAX {
        return Err(format!("it is longer than a message can be ({MESSAGE_BYTES_MAX} bytes)"));
    }
    Ok(bytes)
}

/// The bytes as text, if all of them are printable.
pub(super) fn printable(bytes: &[u8]) -> Option<&str> {
    let shows = |c: char| !c.is_control() || matches!(c, '\n' | '\r' | '\t');
    std::str::from_utf8(bytes).ok().filter(|text| text.chars().all(shows))
}

/// Two digits for each byte.
pub(super) fn to_hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// For humans: text with a line end, or a hex dump of 16 bytes per line.
pub(super) fn shown(bytes: &[u8]) -> String {
    match printable(bytes) {
        Some("") => "(an empty reply)\n".to_owned(),
        Some(text) if text.ends_with('\n') => text.to_owned(),
        Some(text) => format!("{text}\n"),
        None => {
            bytes.chunks(16).enumerate().map(|(row, bytes)| dump_line(16 * row, bytes)).collect()
        }
    }
}

fn dump_line(offset: usize, bytes: &[u8]) -> String {
    let hex: Vec<_> = bytes
        .chunks(8)
        .map(|half| half.iter().map(|byte| format!("{byte:02x}")).collect::<Vec<_>>().join(" "))
        .collect();
    let visible = |byte: &u8| if (0x20..0x7f).contains(byte) { char::from(*byte) } else { '.' };
    let text: String = bytes.iter().map(visible).collect();
    format!("{offset:08x}  {:<48}  |{text}|\n", hex.join("  "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_is_shown_unchanged_and_other_bytes_as_a_dump() {
        assert_eq!(shown("hällo".as_bytes()), "hällo\n");
        assert_eq!(shown(b"a\r\n"), "a\r\n");
        assert_eq!(shown(b""), "(an empty reply)\n");
        assert_eq!(
            shown(b"\0abcdefghijklmnop"),
            "00000000  00 61 62 63 64 65 66 67  68 69 6a 6b 6c 6d 6e 6f  |.abcdefghijklmno|\n\
             00000010  70                                                |p|\n"
        );
        // Control characters from a server must not reach the terminal.
        assert!(shown(b"\x1b[2J").starts_with("00000000  1b"));
    }

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
    fn messages_come_from_files_of_limited_length() {
        let long = std::io::repeat(0).take(MESSAGE_BYTES_MAX as u64 + 1);
        assert!(all_of(long).unwrap_err().contains("longer than a message"));
        assert_eq!(all_of(&b"ab"[..]).unwrap(), b"ab");
        assert!(
            from_file(Path::new("/dev/zero")).unwrap_err().contains("it is a device, not a file")
        );
        let fifo = std::env::temp_dir().join(format!("serval-bytes-{}", std::process::id()));
        let made = std::process::Command::new("mkfifo").arg(&fifo).status().unwrap();
        assert!(made.success());
        // It has no writer, so opening it would block.
        let refused = from_file(&fifo).unwrap_err();
        std::fs::remove_file(&fifo).unwrap();
        assert!(refused.contains("it is a FIFO, not a file"), "{refused}");
        assert!(from_file(Path::new("/there/is/no/file")).unwrap_err().contains("/there/is"));
    }
}
