//! Keys in base64, as memcached reads them (base64.c): bytes that are no digits are skipped, and a group with padding is the last one.

use super::KEY_BYTES_MAX;

/// Memory for a key that was decoded.
pub type Decoded = [u8; KEY_BYTES_MAX];

/// The bytes that a key stands for, at least one; `None`: memcached refuses it.
pub(super) fn decode<'a>(text: &[u8], into: &'a mut Decoded) -> Option<&'a [u8]> {
    let digits = text.iter().filter(|byte| sextet(**byte).is_some()).count();
    if digits == 0 || !digits.is_multiple_of(4) || digits / 4 * 3 > text.len().min(into.len()) {
        return None;
    }
    let mut digits = text.iter().filter_map(|byte| Some((*byte, sextet(*byte)?)));
    let mut len = 0;
    while let Some(first) = digits.next() {
        let (mut bits, mut padding) = (0, 0);
        for (byte, value) in std::iter::once(first).chain(digits.by_ref().take(3)) {
            bits = bits << 6 | value;
            padding += usize::from(byte == b'=');
        }
        let [_, bytes @ ..] = u32::to_be_bytes(bits);
        let count = 3usize.checked_sub(padding).filter(|count| *count > 0)?;
        into.get_mut(len..len + count)?.copy_from_slice(&bytes[..count]);
        len += count;
        if padding > 0 {
            break;
        }
    }
    Some(&into[..len])
}

/// Padding counts as a digit.
fn sextet(byte: u8) -> Option<u32> {
    Some(u32::from(match byte {
        b'A'..=b'Z' => byte - b'A',
        b'a'..=b'z' => byte - b'a' + 26,
        b'0'..=b'9' => byte - b'0' + 52,
        b'+' => 62,
        b'/' => 63,
        b'=' => 0,
        _ => return None,
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_decoded_as_memcached_does() {
        let mut into = [0; KEY_BYTES_MAX];
        let mut decoded = |text: &str| decode(text.as_bytes(), &mut into).map(<[u8]>::to_vec);
        assert_eq!(decoded("Zm9v").unwrap(), b"foo");
        assert_eq!(decoded("Zm8=").unwrap(), b"fo");
        assert_eq!(decoded("Zg==").unwrap(), b"f");
        assert_eq!(decoded("+/+/").unwrap(), [0xfb, 0xff, 0xbf]);
        // Unused bits, other bytes, and what follows padding do not count.
        assert_eq!(decoded("Zh==").unwrap(), b"f");
        assert_eq!(decoded("Z!m9v").unwrap(), b"foo");
        assert_eq!(decoded("Zg==Zm9v").unwrap(), b"f");
        assert_eq!(decoded("Z=9v").unwrap(), [0x64, 0x0f]);
        for wrong in ["", "Zm9", "Zm9=v", "Z===", "====", "!!!!"] {
            assert_eq!(decoded(wrong), None, "{wrong}");
        }
        assert_eq!(decoded(&"QUFB".repeat(62)).unwrap().len(), 186);
    }
}
