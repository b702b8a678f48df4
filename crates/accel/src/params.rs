//! Parameters: the numbers and texts that a service passes to its kernel (`params` in the configuration).

use engine::topology::ParamValue;
use mqueue::abi::{PARAM_TEXT, PARAM_TEXT_BYTES_MAX, PARAMS_MAX, Param};

/// Longest name in bytes: the field is zero terminated.
pub const NAME_BYTES_MAX: usize = size_of::<[u8; 24]>() - 1;
/// Words of one entry of the table.
const ENTRY_WORDS: usize = size_of::<Param>() / 8;

/// Why a parameter cannot be passed to a kernel.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum ParamError {
    /// There are too many.
    #[error("{0} parameters are given, a kernel takes at most {PARAMS_MAX}: remove some")]
    TooMany(usize),
    /// The name is empty, too long or contains a zero byte.
    #[error("parameter name {0:?} must have 1 to {NAME_BYTES_MAX} bytes, none of them zero")]
    Name(String),
    /// The value is not a number.
    #[error("parameter `{name}` is {value}: give a finite number")]
    Value {
        /// Its name.
        name: String,
        /// Its value.
        value: f64,
    },
    /// The text is too long or contains a zero byte.
    #[error(
        "parameter `{0}` must be a text of at most {PARAM_TEXT_BYTES_MAX} bytes, none of them zero"
    )]
    Text(String),
    /// A name occurs twice.
    #[error("parameter `{0}` is given twice: keep one")]
    Twice(String),
}

/// Parameters as blocks read them: see [`mqueue::abi::Param`].
#[derive(Clone, Debug, Default, PartialEq)]
pub struct EncodedParams {
    /// How many, at most [`PARAMS_MAX`].
    pub count: u32,
    /// The table of [`Param`], then the texts.
    pub words: Box<[u64]>,
}

/// Encodes parameters for [`mqueue::abi::BlockArgs`].
pub fn encode(params: &[(String, ParamValue)]) -> Result<EncodedParams, ParamError> {
    if params.len() > PARAMS_MAX as usize {
        return Err(ParamError::TooMany(params.len()));
    }
    let mut table: Vec<u8> = Vec::with_capacity(params.len() * size_of::<Param>());
    let mut texts: Vec<u8> = Vec::new();
    for (i, (name, value)) in params.iter().enumerate() {
        if name.is_empty() || name.len() > NAME_BYTES_MAX || name.contains('\0') {
            return Err(ParamError::Name(name.clone()));
        }
        if params[..i].iter().any(|(other, _)| other == name) {
            return Err(ParamError::Twice(name.clone()));
        }
        let bits = match value {
            ParamValue::Number(value) if value.is_finite() => value.to_bits(),
            ParamValue::Number(value) => {
                return Err(ParamError::Value { name: name.clone(), value: *value });
            }
            ParamValue::Text(text) => {
                if text.len() > PARAM_TEXT_BYTES_MAX as usize || text.contains('\0') {
                    return Err(ParamError::Text(name.clone()));
                }
                let offset = (params.len() * size_of::<Param>() + texts.len()) as u64;
                texts.extend_from_slice(text.as_bytes());
                texts.push(0);
                PARAM_TEXT | (text.len() as u64) << 32 | offset
            }
        };
        let mut field = [0; NAME_BYTES_MAX + 1];
        field[..name.len()].copy_from_slice(name.as_bytes());
        table.extend_from_slice(&field);
        table.extend_from_slice(&bits.to_ne_bytes());
    }
    debug_assert_eq!(table.len(), params.len() * ENTRY_WORDS * 8);
    table.append(&mut texts);
    table.resize(table.len().next_multiple_of(8), 0);
    let (words, _) = table.as_chunks::<8>();
    let words = words.iter().map(|word| u64::from_ne_bytes(*word)).collect();
    Ok(EncodedParams { count: params.len() as u32, words })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn named(name: &str, value: impl Into<ParamValue>) -> (String, ParamValue) {
        (name.to_owned(), value.into())
    }

    fn bytes(encoded: &EncodedParams) -> Vec<u8> {
        encoded.words.iter().flat_map(|word| word.to_ne_bytes()).collect()
    }

    #[test]
    fn names_and_values_are_encoded_zero_padded() {
        let longest = "x".repeat(NAME_BYTES_MAX);
        let encoded = encode(&[named("microseconds", 2.5), named(&longest, -1.0)]).unwrap();
        assert_eq!((encoded.count, encoded.words.len()), (2, 2 * ENTRY_WORDS));
        let bytes = bytes(&encoded);
        assert_eq!(&bytes[..13], b"microseconds\0");
        assert_eq!(f64::from_bits(encoded.words[3]), 2.5);
        assert_eq!(bytes[size_of::<Param>() + NAME_BYTES_MAX], 0);
        assert_eq!(encode(&[]), Ok(EncodedParams::default()));
    }

    #[test]
    fn texts_lie_behind_the_table_and_end_in_a_zero_byte() {
        let longest = "é".repeat(PARAM_TEXT_BYTES_MAX as usize / 2);
        let given = [named("path", "/a b"), named("n", 3.0), named("e", ""), named("l", &*longest)];
        let encoded = encode(&given).unwrap();
        let bytes = bytes(&encoded);
        assert_eq!(bytes.len() % 8, 0);
        for (place, (_, value)) in given.iter().enumerate() {
            let bits = encoded.words[place * ENTRY_WORDS + 3];
            match value {
                ParamValue::Number(value) => assert_eq!(f64::from_bits(bits), *value),
                ParamValue::Text(text) => {
                    assert!(f64::from_bits(bits).is_nan(), "what an older kernel finds");
                    assert_eq!(bits >> 48, PARAM_TEXT >> 48);
                    let (len, at) = ((bits >> 32 & 0xffff) as usize, (bits & 0xffff_ffff) as usize);
                    assert_eq!(&bytes[at..at + len], text.as_bytes());
                    assert_eq!(bytes[at + len], 0);
                }
            }
        }
    }

    #[test]
    fn what_a_kernel_cannot_be_given_is_refused() {
        let many: Vec<_> = (0..33).map(|i| named(&format!("p{i}"), 0.0)).collect();
        assert_eq!(encode(&many), Err(ParamError::TooMany(33)));
        assert!(encode(&many[..32]).is_ok());
        for name in ["", "a\0b", &"x".repeat(24)] {
            assert_eq!(encode(&[named(name, 0.0)]), Err(ParamError::Name(name.to_owned())));
        }
        for value in [f64::NAN, f64::INFINITY] {
            assert!(matches!(encode(&[named("a", value)]), Err(ParamError::Value { .. })));
        }
        for text in ["a\0b", &"x".repeat(256)] {
            assert_eq!(encode(&[named("a", text)]), Err(ParamError::Text("a".to_owned())));
        }
        let twice = [named("a", 0.0), named("b", 0.0), named("a", 1.0)];
        assert_eq!(encode(&twice), Err(ParamError::Twice("a".to_owned())));
    }
}
