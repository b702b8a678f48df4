//! Parameters: the numbers that a service passes to its kernel (`params` in the configuration).

use mqueue::abi::{PARAMS_MAX, Param};

/// Longest name in bytes: the field is zero terminated.
pub const NAME_BYTES_MAX: usize = size_of::<[u8; 24]>() - 1;

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
    /// A name occurs twice.
    #[error("parameter `{0}` is given twice: keep one")]
    Twice(String),
}

/// Encodes parameters for [`mqueue::abi::BlockArgs`].
pub fn encode(params: &[(String, f64)]) -> Result<Vec<Param>, ParamError> {
    if params.len() > PARAMS_MAX as usize {
        return Err(ParamError::TooMany(params.len()));
    }
    let mut encoded = Vec::with_capacity(params.len());
    for (i, (name, value)) in params.iter().enumerate() {
        if name.is_empty() || name.len() > NAME_BYTES_MAX || name.contains('\0') {
            return Err(ParamError::Name(name.clone()));
        }
        if !value.is_finite() {
            return Err(ParamError::Value { name: name.clone(), value: *value });
        }
        if params[..i].iter().any(|(other, _)| other == name) {
            return Err(ParamError::Twice(name.clone()));
        }
        let mut param = Param { name: [0; 24], value: *value };
        param.name[..name.len()].copy_from_slice(name.as_bytes());
        encoded.push(param);
    }
    Ok(encoded)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn named(name: &str, value: f64) -> (String, f64) {
        (name.to_owned(), value)
    }

    #[test]
    fn names_and_values_are_encoded_zero_padded() {
        let longest = "x".repeat(NAME_BYTES_MAX);
        let encoded = encode(&[named("microseconds", 2.5), named(&longest, -1.0)]).unwrap();
        assert_eq!(&encoded[0].name[..13], b"microseconds\0");
        assert_eq!(encoded[0].value, 2.5);
        assert_eq!(encoded[1].name[NAME_BYTES_MAX], 0);
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
        let twice = [named("a", 0.0), named("b", 0.0), named("a", 1.0)];
        assert_eq!(encode(&twice), Err(ParamError::Twice("a".to_owned())));
    }
}
