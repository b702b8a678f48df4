//! Keys of sealed streams.

use std::fmt;
use std::io::{self, Read};

use zeroize::{Zeroize as _, Zeroizing};

/// Longest key file.
const KEY_FILE_BYTES_MAX: usize = 80;

/// A key of 32 bytes. Its value is not shown, and its memory is overwritten when it is dropped.
#[derive(PartialEq, Eq)]
pub struct Key(Box<Zeroizing<[u8; 32]>>);

impl Key {
    /// The key with these bytes.
    pub fn new(mut bytes: [u8; 32]) -> Self {
        let key = Self::copy(&bytes);
        bytes.zeroize();
        key
    }

    fn copy(bytes: &[u8; 32]) -> Self {
        // Filled in its place: a value that moves leaves a copy.
        let mut key = Box::<Zeroizing<[u8; 32]>>::default();
        key.copy_from_slice(bytes);
        Self(key)
    }

    /// Reads a key file. `None`: it is not one.
    pub fn read(mut file: impl Read) -> io::Result<Option<Self>> {
        let mut bytes = Zeroizing::new([0; KEY_FILE_BYTES_MAX + 1]);
        let mut len = 0;
        while len < bytes.len() {
            match file.read(&mut bytes[len..]) {
                Ok(0) => break,
                Ok(read) => len += read,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(Self::parse(&bytes[..len]))
    }

    /// The key with these bytes, if there are 32.
    pub fn of(bytes: &[u8]) -> Option<Self> {
        bytes.try_into().ok().map(Self::copy)
    }

    /// A key file: 32 bytes, or 64 hexadecimal digits with or without an end of line.
    pub fn parse(file: &[u8]) -> Option<Self> {
        if let Some(key) = Self::of(file) {
            return Some(key);
        }
        let text = std::str::from_utf8(file).ok()?.trim_end();
        if text.len() != 64 || !text.is_ascii() {
            return None;
        }
        let mut key = Self::copy(&[0; 32]);
        for (byte, at) in key.0.iter_mut().zip((0..64).step_by(2)) {
            *byte = u8::from_str_radix(&text[at..at + 2], 16).ok()?;
        }
        Some(key)
    }

    /// The bytes.
    pub fn bytes(&self) -> &[u8; 32] {
        &self.0
    }
}

impl Clone for Key {
    fn clone(&self) -> Self {
        Self::copy(&self.0)
    }
}

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Key(..)")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_file_is_binary_or_hexadecimal() {
        let hex = "00112233445566778899aabbccddeeff00112233445566778899aabbccddeeff";
        let key = Key::parse(format!("{hex}\n").as_bytes()).unwrap();
        assert_eq!(key.bytes()[1], 0x11);
        assert_eq!(Key::parse(key.bytes()), Some(key.clone()));
        assert_eq!(Key::read(&key.bytes()[..]).unwrap(), Some(key.clone()));
        assert_eq!(Key::read(std::io::repeat(b'0')).unwrap(), None, "it is not read to its end");
        for wrong in [&b"short"[..], &[b'g'; 64], &[0xff; 64], "é".repeat(32).as_bytes()] {
            assert_eq!(Key::parse(wrong), None);
        }
        assert_eq!(format!("{key:?}"), "Key(..)");
    }
}
