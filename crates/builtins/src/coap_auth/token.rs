//! JSON Web Tokens (RFC 7519) with HS256 signatures (RFC 7515, 7518). No other algorithm is accepted, `none` least of all.

use hmac::{Hmac, Mac};
use sha2::Sha256;

/// Characters of a header, a body and a signature, at most.
const HEADER_MAX: usize = 256;
const BODY_MAX: usize = 2048;
const SIGNATURE_CHARS: usize = 43;
pub(crate) const SIGNATURE_BYTES: usize = 32;
/// {"alg":"HS256","typ":"JWT"}, which nearly every token has.
const USUAL_HEADER: &[u8] = b"eyJhbGciOiJIUzI1NiIsInR5cCI6IkpXVCJ9";
/// Depth of nested JSON values, at most.
const DEPTH_MAX: u32 = 8;
/// Length of a key, in bytes: at least what the hash has (RFC 7518, section 3.2).
const KEY_BYTES_MIN: usize = 32;
const KEY_BYTES_MAX: usize = 512;
const NAME_BYTES_MAX: usize = 64;

type HmacSha256 = Hmac<Sha256>;

/// Why a token is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refused {
    /// It has not the form of a token.
    Malformed,
    /// It is signed with another algorithm than HS256, or has extensions that must be understood.
    Algorithm,
    /// It names no key that there is.
    UnknownKey,
    /// The signature is wrong.
    Signature,
    /// It has expired.
    Expired,
    /// It is not valid yet.
    Early,
    /// It was issued too long ago, or does not say when.
    Stale,
}

/// Keys by name. What it has is never shown.
#[derive(Default)]
pub struct Keys(Vec<(Vec<u8>, HmacSha256)>);

impl Keys {
    /// Reads a file of keys: a name and a key in base64url on each line. Errors name the line and not what it has.
    pub fn parse(file: &[u8]) -> Result<Self, String> {
        let mut keys = Self::default();
        for (number, line) in file.split(|byte| *byte == b'\n').enumerate() {
            let wrong = |why: &str| Err(format!("line {} {why}", number + 1));
            let mut words = line.split(|b| b.is_ascii_whitespace()).filter(|w| !w.is_empty());
            let name = match words.next() {
                None => continue,
                Some(comment) if comment.starts_with(b"#") => continue,
                Some(name) => name,
            };
            let (Some(key), None) = (words.next(), words.next()) else {
                return wrong("is no name and key");
            };
            if name.len() > NAME_BYTES_MAX || !name.iter().all(u8::is_ascii_graphic) {
                return wrong("has a name that is longer than 64 letters, or no text");
            }
            if keys.of(name).is_some() {
                return wrong("has the name of an earlier line");
            }
            let mut decoded = [0; KEY_BYTES_MAX];
            let Some(len) = decode(key, &mut decoded) else {
                return wrong("has a key that is not in base64url, or has more than 512 bytes");
            };
            if len < KEY_BYTES_MIN {
                return wrong("has a key of less than 32 bytes");
            }
            let Ok(mac) = HmacSha256::new_from_slice(&decoded[..len]) else {
                return wrong("has a key that cannot be used");
            };
            keys.0.push((name.to_vec(), mac));
        }
        if keys.0.is_empty() { Err("there is no key".to_owned()) } else { Ok(keys) }
    }

    /// Forgets all keys but one. False: there is none of this name.
    pub(crate) fn keep_only(&mut self, name: &[u8]) -> bool {
        self.0.retain(|(of, _)| of == name);
        !self.0.is_empty()
    }

    /// The key of this name; without a name the only key.
    fn of(&self, name: &[u8]) -> Option<&HmacSha256> {
        self.0.iter().find(|(of, _)| of == name).map(|(_, mac)| mac)
    }
}

/// How old a token may be, in seconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Times {
    /// The time, since 1970.
    pub now: u64,
    /// By how much clocks may differ.
    pub leeway: u64,
    /// How long ago a token may have been issued; 0: any time.
    pub window: u64,
}

/// A token that is accepted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Accepted {
    /// Its signature: what is in it cannot be chosen without the key.
    pub signature: [u8; SIGNATURE_BYTES],
    /// When it is too old: with a window, the end of that; else `None`.
    pub until: Option<u64>,
}

/// Checks a token.
pub fn verify(token: &[u8], keys: &Keys, times: Times) -> Result<Accepted, Refused> {
    let mut parts = token.split(|byte| *byte == b'.');
    let (Some(header), Some(body), Some(signature), None) =
        (parts.next(), parts.next(), parts.next(), parts.next())
    else {
        return Err(Refused::Malformed);
    };
    let mac = key_of(header, keys)?;
    let mut decoded = [0; SIGNATURE_BYTES];
    if signature.len() != SIGNATURE_CHARS || body.len() > BODY_MAX {
        return Err(Refused::Malformed);
    }
    decode(signature, &mut decoded).ok_or(Refused::Malformed)?;
    let mut mac = mac.clone();
    mac.update(&token[..header.len() + 1 + body.len()]);
    // It takes the same time wherever the first difference is.
    let right = mac.verify_slice(&decoded).is_ok() || mutants::on("believe_signature");
    if !right {
        return Err(Refused::Signature);
    }
    let until = check_claims(body, times)?;
    Ok(Accepted { signature: decoded, until })
}

/// The key that a header asks for.
fn key_of<'k>(header: &[u8], keys: &'k Keys) -> Result<&'k HmacSha256, Refused> {
    let only = match keys.0.as_slice() {
        [(_, only)] => Some(only),
        _ => None,
    };
    if header == USUAL_HEADER {
        return only.ok_or(Refused::UnknownKey);
    }
    let mut decoded = [0; HEADER_MAX];
    let len = decode(header, &mut decoded).ok_or(Refused::Malformed)?;
    let [alg, kid, crit] = members(&decoded[..len], [b"alg", b"kid", b"crit"])?;
    if alg != Some(Json::Text(b"HS256")) || crit.is_some() {
        return Err(Refused::Algorithm);
    }
    match kid {
        None => only.ok_or(Refused::UnknownKey),
        Some(Json::Text(name)) => keys.of(name).ok_or(Refused::UnknownKey),
        Some(_) => Err(Refused::Malformed),
    }
}

/// Checks the times in a body whose signature is right.
fn check_claims(body: &[u8], times: Times) -> Result<Option<u64>, Refused> {
    let mut decoded = [0; BODY_MAX];
    let len = decode(body, &mut decoded).ok_or(Refused::Malformed)?;
    let found = members(&decoded[..len], [b"exp", b"nbf", b"iat"])?;
    let mut claims = [None; 3];
    for (claim, value) in claims.iter_mut().zip(found) {
        *claim = match value {
            None => None,
            Some(Json::Number(number)) => Some(seconds(number).ok_or(Refused::Malformed)?),
            Some(_) => return Err(Refused::Malformed),
        };
    }
    let [expires, not_before, issued] = claims;
    let Times { now, leeway, window } = times;
    if expires.is_some_and(|expires| now >= expires.saturating_add(leeway)) {
        return Err(Refused::Expired);
    }
    let latest = now.saturating_add(leeway);
    if not_before.is_some_and(|from| from > latest) || issued.is_some_and(|at| at > latest) {
        return Err(Refused::Early);
    }
    if window == 0 {
        return Ok(None);
    }
    let until = issued.ok_or(Refused::Stale)?.saturating_add(window).saturating_add(leeway);
    if now > until && !mutants::on("ignore_window") {
        return Err(Refused::Stale);
    }
    Ok(Some(until))
}

/// Decodes base64url without padding (RFC 4648, section 5). `None`: it is something else, has bits that are not used, or does not fit.
pub(crate) fn decode(text: &[u8], into: &mut [u8]) -> Option<usize> {
    if text.len() % 4 == 1 {
        return None;
    }
    let len = text.len() / 4 * 3 + (text.len() % 4).saturating_sub(1);
    let into = into.get_mut(..len)?;
    for (four, three) in text.chunks(4).zip(into.chunks_mut(3)) {
        let mut bits = 0u32;
        for byte in four {
            bits = bits << 6 | u32::from(DIGITS[usize::from(*byte)]);
            if DIGITS[usize::from(*byte)] > 63 {
                return None;
            }
        }
        bits <<= 6 * (4 - four.len());
        let all = bits.to_be_bytes();
        three.copy_from_slice(&all[1..1 + three.len()]);
        if all[1 + three.len()..].iter().any(|byte| *byte != 0) {
            return None;
        }
    }
    Some(len)
}

/// The value of each byte as a digit, or 255.
const DIGITS: [u8; 256] = {
    let alphabet = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_";
    let mut digits = [255; 256];
    let mut at = 0;
    while at < alphabet.len() {
        digits[alphabet[at] as usize] = at as u8;
        at += 1;
    }
    digits
};

/// A value of a JSON object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Json<'a> {
    /// Without escapes.
    Text(&'a [u8]),
    Number(&'a [u8]),
    Other,
}

/// The values of these names in a JSON object (RFC 8259). A name that occurs twice, or is written with an escape, is refused: others
/// could read it differently.
fn members<'a, const N: usize>(
    json: &'a [u8],
    names: [&[u8]; N],
) -> Result<[Option<Json<'a>>; N], Refused> {
    let mut found = [None; N];
    let mut reader = Reader(json);
    let read = reader.object(DEPTH_MAX, &mut |name, value| {
        let Some(at) = names.iter().position(|of| *of == name) else { return true };
        found[at].replace(value).is_none()
    });
    reader.blanks();
    if read.is_some() && reader.0.is_empty() { Ok(found) } else { Err(Refused::Malformed) }
}

/// The rest of a JSON text.
struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn blanks(&mut self) {
        let blank = |byte: &u8| matches!(byte, b' ' | b'\t' | b'\r' | b'\n');
        let from = self.0.iter().position(|byte| !blank(byte)).unwrap_or(self.0.len());
        self.0 = &self.0[from..];
    }

    /// Takes a byte if it comes next, after blanks.
    fn takes(&mut self, byte: u8) -> bool {
        self.blanks();
        let after = self.0.strip_prefix(&[byte]);
        self.0 = after.unwrap_or(self.0);
        after.is_some()
    }

    fn object(
        &mut self,
        depth: u32,
        each: &mut dyn FnMut(&'a [u8], Json<'a>) -> bool,
    ) -> Option<()> {
        if !self.takes(b'{') {
            return None;
        }
        if self.takes(b'}') {
            return Some(());
        }
        loop {
            self.blanks();
            // A name that is written with an escape is nothing that tokens need.
            let Json::Text(name) = self.string()? else { return None };
            if !self.takes(b':') {
                return None;
            }
            let value = self.value(depth)?;
            if !each(name, value) {
                return None;
            }
            if self.takes(b'}') {
                return Some(());
            }
            if !self.takes(b',') {
                return None;
            }
        }
    }

    fn array(&mut self, depth: u32) -> Option<()> {
        if !self.takes(b'[') {
            return None;
        }
        if self.takes(b']') {
            return Some(());
        }
        loop {
            self.value(depth)?;
            if self.takes(b']') {
                return Some(());
            }
            if !self.takes(b',') {
                return None;
            }
        }
    }

    fn value(&mut self, depth: u32) -> Option<Json<'a>> {
        self.blanks();
        let deeper = depth.checked_sub(1);
        match *self.0.first()? {
            b'"' => self.string(),
            b'{' => self.object(deeper?, &mut |_, _| true).map(|()| Json::Other),
            b'[' => self.array(deeper?).map(|()| Json::Other),
            b'-' | b'0'..=b'9' => {
                let part = |b: &u8| matches!(b, b'0'..=b'9' | b'-' | b'+' | b'.' | b'e' | b'E');
                let end = self.0.iter().position(|byte| !part(byte)).unwrap_or(self.0.len());
                let (number, rest) = self.0.split_at(end);
                self.0 = rest;
                Some(Json::Number(number))
            }
            _ => {
                let words = [&b"true"[..], b"false", b"null"];
                let rest = words.iter().find_map(|word| self.0.strip_prefix(*word))?;
                self.0 = rest;
                Some(Json::Other)
            }
        }
    }

    /// A string; one with escapes is something else.
    fn string(&mut self) -> Option<Json<'a>> {
        let inside = self.0.strip_prefix(b"\"")?;
        let mut escapes = false;
        let mut at = 0;
        loop {
            match *inside.get(at)? {
                b'"' => break,
                b'\\' => {
                    escapes = true;
                    at += 2;
                }
                0..0x20 => return None,
                _ => at += 1,
            }
        }
        self.0 = &inside[at + 1..];
        Some(if escapes { Json::Other } else { Json::Text(&inside[..at]) })
    }
}

/// More than the digits of a body: a number with a greater exponent is too large for any time, or 0.
const EXPONENT_MAX: i64 = 2 * BODY_MAX as i64;

/// A NumericDate (RFC 7519, section 2): the integer part of any JSON number, in seconds since 1970. Times before 1970 are 0, those that
/// do not fit are `u64::MAX`. `None`: it is no JSON number.
fn seconds(number: &[u8]) -> Option<u64> {
    let unsigned = number.strip_prefix(b"-");
    let (negative, rest) = (unsigned.is_some(), unsigned.unwrap_or(number));
    let (whole, rest) = digits(rest)?;
    if whole.len() > 1 && whole[0] == b'0' {
        return None;
    }
    let (fraction, rest) = match rest.strip_prefix(b".") {
        Some(rest) => digits(rest)?,
        None => (&[][..], rest),
    };
    let exponent = match rest {
        [] => 0,
        [b'e' | b'E', rest @ ..] => exponent(rest)?,
        _ => return None,
    };
    let all = || whole.iter().chain(fraction).map(|digit| u64::from(digit - b'0'));
    if negative || all().all(|digit| digit == 0) {
        return Some(0);
    }
    // Digits before the point.
    let count = usize::try_from(whole.len() as i64 + exponent).unwrap_or(0);
    let before = all().chain(std::iter::repeat(0)).take(count);
    let value = before.map(Some).reduce(|value, digit| value?.checked_mul(10)?.checked_add(digit?));
    Some(value.map_or(0, |value| value.unwrap_or(u64::MAX)))
}

/// The digits at the beginning, at least one, and the rest.
fn digits(text: &[u8]) -> Option<(&[u8], &[u8])> {
    let end = text.iter().position(|byte| !byte.is_ascii_digit()).unwrap_or(text.len());
    (end > 0).then(|| text.split_at(end))
}

/// An exponent without its letter, between [`EXPONENT_MAX`] and its negative.
fn exponent(text: &[u8]) -> Option<i64> {
    let (negative, text) = match text {
        [b'-', rest @ ..] => (true, rest),
        [b'+', rest @ ..] => (false, rest),
        _ => (false, text),
    };
    let (digits, []) = digits(text)? else { return None };
    let add = |value: i64, digit: &u8| (10 * value + i64::from(digit - b'0')).min(EXPONENT_MAX);
    let value = digits.iter().fold(0, add);
    Some(if negative { -value } else { value })
}
