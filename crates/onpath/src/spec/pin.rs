//! The name of a module in a directory of functions: `NAME@sha256:DIGEST`.

use std::fmt;
use std::str::FromStr;

use sha2::{Digest as _, Sha256};

use super::is_name;

/// What stands between the name and the digest.
const MIDDLE: &str = "@sha256:";

/// A module by its name and the digest of its bytes.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Pin {
    /// The name in its manifest.
    pub name: String,
    /// SHA-256 of the module.
    pub sha256: [u8; 32],
}

impl Pin {
    /// The digest of a module.
    pub fn digest(module: &[u8]) -> [u8; 32] {
        Sha256::digest(module).into()
    }

    /// Whether a text is meant to be one, right or wrong.
    pub fn is_meant(text: &str) -> bool {
        text.contains('@')
    }
}

impl fmt::Display for Pin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{MIDDLE}", self.name)?;
        self.sha256.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl FromStr for Pin {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || {
            "a module of the directory is NAME@sha256:DIGEST, with 64 hexadecimal digits: `serval fn list --installed` shows them"
                .to_owned()
        };
        let (name, digest) = text.split_once(MIDDLE).ok_or_else(wrong)?;
        let (pairs, rest) = digest.as_bytes().as_chunks::<2>();
        if !is_name(name) || pairs.len() != 32 || !rest.is_empty() {
            return Err(wrong());
        }
        let mut sha256 = [0; 32];
        for (byte, pair) in sha256.iter_mut().zip(pairs) {
            let digits = std::str::from_utf8(pair).ok().filter(|d| !d.starts_with('+'));
            let digits = digits.filter(|d| !d.contains(|c: char| c.is_ascii_uppercase()));
            *byte = digits.and_then(|d| u8::from_str_radix(d, 16).ok()).ok_or_else(wrong)?;
        }
        Ok(Self { name: name.to_owned(), sha256 })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_pin_has_one_form() {
        let text = format!("mine@sha256:{}", "0123456789abcdef".repeat(4));
        assert_eq!(text.parse::<Pin>().unwrap().to_string(), text);
        for wrong in [
            "mine".to_owned(),
            "mine@sha256:00".to_owned(),
            text.to_uppercase(),
            text.replace("01", "+1"),
            text.replace("01", "0A"),
            format!("{text}0"),
            format!("../{text}"),
            format!("--help{}", &text[4..]),
            text.replace("mine", ""),
            text.replace("sha256", "sha512"),
        ] {
            assert!(wrong.parse::<Pin>().unwrap_err().contains("NAME@sha256:DIGEST"), "{wrong}");
        }
    }

    proptest! {
        #[test]
        fn pins_are_read_as_they_are_written(name in "[a-zA-Z0-9_][a-zA-Z0-9_-]{0,63}", sha256: [u8; 32]) {
            let pin = Pin { name, sha256 };
            prop_assert_eq!(pin.to_string().parse(), Ok(pin));
        }

        #[test]
        fn any_text_is_read_without_a_panic(text in ".*", digest in "[0-9a-f+é]{62,66}") {
            let _ = (text.parse::<Pin>(), format!("a@sha256:{digest}").parse::<Pin>());
        }
    }
}
