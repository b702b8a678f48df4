//! Whether a response can answer a command. See the parent module.

use super::base64::decode;
use super::command::Verb;
use super::{CRLF, KEY_BYTES_MAX, Words, decimal};

/// Maximum number of passes over the keys of one retrieval command. memcached answers in the order of the keys, a
/// proxy for several servers may not.
const PASSES_MAX: u32 = 64;

/// The command line of a request, without its terminator, which is compared with the response.
pub(super) fn mark(request: &[u8]) -> &[u8] {
    first_line(request)
}

/// Whether `response`, one complete response of the protocol, can answer the command with this line. Error lines name
/// no command and fit every one.
pub(super) fn fits(line: &[u8], response: &[u8]) -> bool {
    let mut answer = Words(first_line(response));
    let mut request = Words(line);
    let (Some(word), Some(command)) = (answer.next(), request.next()) else { return false };
    if matches!(word, b"ERROR" | b"CLIENT_ERROR" | b"SERVER_ERROR") {
        return true;
    }
    let Some(verb) = Verb::of(command) else { return false };
    match verb {
        Verb::MetaGet | Verb::MetaDelete | Verb::MetaArithmetic | Verb::MetaSet => {
            meta(request, word, answer)
        }
        Verb::Get | Verb::Gets => values(request, response),
        Verb::Gat | Verb::Gats => {
            request.next();
            values(request, response)
        }
        Verb::Set | Verb::Add | Verb::Replace | Verb::Append | Verb::Prepend | Verb::Cas => {
            matches!(word, b"STORED" | b"NOT_STORED" | b"EXISTS" | b"NOT_FOUND")
        }
        Verb::Delete => matches!(word, b"DELETED" | b"NOT_FOUND"),
        Verb::Touch => matches!(word, b"TOUCHED" | b"NOT_FOUND"),
        Verb::Incr | Verb::Decr => word == b"NOT_FOUND" || word[0].is_ascii_digit(),
        Verb::FlushAll | Verb::Verbosity => word == b"OK",
        Verb::Version => word == b"VERSION",
        Verb::Stats => matches!(word, b"STAT" | b"ITEM" | b"PREFIX" | b"END" | b"RESET" | b"OK"),
        Verb::MetaNoop => word == b"MN",
        Verb::MetaDebug => word == b"EN" || word == b"ME" && debug(request, answer),
        Verb::Quit => false,
    }
}

fn first_line(bytes: &[u8]) -> &[u8] {
    let line = crate::find_byte(b'\n', bytes).map_or(bytes, |lf| &bytes[..lf]);
    line.strip_suffix(b"\r").unwrap_or(line)
}

/// Whether the key of every value of the response is one of these keys.
fn values<'a>(keys: impl Iterator<Item = &'a [u8]> + Clone, response: &[u8]) -> bool {
    let (mut left, mut passes) = (keys.clone(), 0);
    let mut rest = response;
    loop {
        let line = first_line(rest);
        let mut item = Words(line);
        match item.next() {
            Some(b"VALUE") => {}
            Some(b"END" | b"SERVER_ERROR" | b"ERROR" | b"CLIENT_ERROR") => return true,
            _ => return false,
        }
        let Some(key) = item.next() else { return false };
        if !left.any(|asked| asked == key) {
            passes += 1;
            left = keys.clone();
            if passes > PASSES_MAX || !left.any(|asked| asked == key) {
                return false;
            }
        }
        let Some(bytes) = item.nth(1).and_then(decimal) else { return false };
        let block = line.len().saturating_add(CRLF.len()).saturating_add(bytes);
        let Some(behind) = rest.get(block.saturating_add(CRLF.len())..) else { return false };
        rest = behind;
    }
}

/// A meta command may request its key (`k`) and its opaque (`O`) in the response. A miss may omit them, like
/// memcached before 1.6.10.
fn meta<'a>(
    mut request: Words<'a>,
    word: &[u8],
    answer: impl Iterator<Item = &'a [u8]> + Clone,
) -> bool {
    let required = match word {
        b"VA" | b"HD" => true,
        b"EN" | b"NF" | b"NS" | b"EX" => false,
        _ => return false,
    };
    let Some(key) = request.next() else { return false };
    let (mut wants_key, mut opaque, mut base64) = (false, None, false);
    for flag in request {
        match flag {
            [b'k', ..] => wants_key = true,
            [b'b', ..] => base64 = true,
            [b'O', value @ ..] => opaque = Some(value),
            _ => {}
        }
    }
    let key = Key::new(key, base64);
    if key.has_spaces() && wants_key {
        // memcached may write the key as it is, and then what is behind it has no certain place.
        return true;
    }
    let flag = |name: u8| answer.clone().find_map(|word| word.strip_prefix(&[name]));
    let same_key = || flag(b'k').map_or(!required, |found| key.is(found));
    let same_opaque = |opaque| flag(b'O').map_or(!required, |found| found == opaque);
    (!wants_key || same_key()) && opaque.is_none_or(same_opaque)
}

/// The answer to `me` begins with the key.
fn debug<'a>(mut request: Words<'a>, mut answer: impl Iterator<Item = &'a [u8]>) -> bool {
    let Some(key) = request.next() else { return false };
    let key = Key::new(key, request.next() == Some(b"b"));
    key.has_spaces() || answer.next().is_some_and(|found| key.is(found))
}

/// The key that a meta command asks for.
struct Key<'a> {
    text: &'a [u8],
    /// What it stands for, if it is in base64.
    decoded: Option<([u8; KEY_BYTES_MAX], usize)>,
}

impl<'a> Key<'a> {
    fn new(text: &'a [u8], base64: bool) -> Self {
        let decoded = base64.then(|| {
            let mut bytes = [0; KEY_BYTES_MAX];
            let len = decode(text, &mut bytes).map_or(0, <[u8]>::len);
            (bytes, len)
        });
        Self { text, decoded }
    }

    fn bytes(&self) -> &[u8] {
        self.decoded.as_ref().map_or(self.text, |(bytes, len)| &bytes[..*len])
    }

    fn has_spaces(&self) -> bool {
        self.decoded.is_some() && self.bytes().contains(&b' ')
    }

    /// Whether an answer names this key: memcached writes it in base64 if it was stored so, however it is asked for.
    fn is(&self, found: &[u8]) -> bool {
        let in_base64 =
            || decode(found, &mut [0; KEY_BYTES_MAX]).is_some_and(|key| key == self.bytes());
        found == self.bytes() || in_base64() && !mutants::on("memcached_key_as_asked")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(request: &str, response: &str) -> bool {
        fits(mark(request.as_bytes()), response.as_bytes())
    }

    #[test]
    fn an_answer_fits_its_command_and_its_key() {
        for (request, response) in [
            ("get a\r\n", "VALUE a 0 1\r\nx\r\nEND\r\n"),
            ("get a\n", "END\r\n"),
            ("gets a b c\r\n", "VALUE a 0 1 7\r\nx\r\nVALUE c 0 0 8\r\n\r\nEND\r\n"),
            ("get a b c\r\n", "VALUE c 0 1\r\nx\r\nVALUE a 0 1\r\nx\r\nEND\r\n"),
            ("get a\r\n", "VALUE a 0 5\r\nEND\r\n\r\nEND\r\n"),
            ("get a\r\n", "VALUE a 0 1\r\nx\r\nSERVER_ERROR out of memory\r\n"),
            ("gat 0 a\r\n", "VALUE a 0 1\r\nx\r\nEND\r\n"),
            ("set a 0 0 1\r\nx\r\n", "STORED\r\n"),
            ("cas a 0 0 1 5\r\nx\r\n", "EXISTS\r\n"),
            ("delete a\r\n", "NOT_FOUND\r\n"),
            ("touch a 1\r\n", "TOUCHED\r\n"),
            ("incr a 1\r\n", "17\r\n"),
            ("flush_all\r\n", "OK\r\n"),
            ("version\r\n", "VERSION 1.6.18\r\n"),
            ("stats\r\n", "STAT pid 7\r\nEND\r\n"),
            ("stats reset\r\n", "RESET\r\n"),
            ("mn\r\n", "MN\r\n"),
            ("me a\r\n", "ME a exp=-1\r\n"),
            ("mg a k v\r\n", "VA 1 ka\r\nx\r\n"),
            ("mg a k v\r\n", "EN\r\n"),
            ("mg a k v\r\n", "EN ka\r\n"),
            ("mg a v O12\r\n", "VA 1 O12\r\nx\r\n"),
            ("mg a v\r\n", "VA 1\r\nx\r\n"),
            ("mg YWI= b k v\r\n", "VA 1 kYWI= b\r\nx\r\n"),
            // memcached 1.6.18: as it was stored.
            ("mg ab k v\r\n", "VA 1 kYWI= b\r\nx\r\n"),
            ("mg YWI= b k v\r\n", "VA 1 kab\r\nx\r\n"),
            ("mg YWJ= b k v O1\r\n", "VA 1 kYWI= b O1\r\nx\r\n"),
            ("me ab\r\n", "ME YWI= exp=-1\r\n"),
            ("me YWI= b\r\n", "ME YWI= exp=-1\r\n"),
            ("me YWI= b\r\n", "ME ab exp=-1\r\n"),
            ("me YSBi b\r\n", "ME a b exp=-1\r\n"),
            ("gat 0\r\n", "END\r\n"),
            ("ms a 1 k O7\r\nx\r\n", "HD ka O7\r\n"),
            ("md a k\r\n", "NF\r\n"),
            ("get a\r\n", "SERVER_ERROR busy\r\n"),
            ("set a 0 0 1\r\nx\r\n", "ERROR\r\n"),
            ("mg a k v\r\n", "CLIENT_ERROR bad data chunk\r\n"),
        ] {
            assert!(check(request, response), "{request:?} {response:?}");
        }
    }

    #[test]
    fn an_answer_to_something_else_does_not_fit() {
        for (request, response) in [
            ("get a\r\n", "VALUE b 0 1\r\nx\r\nEND\r\n"),
            ("get a\r\n", "VALUE ab 0 1\r\nx\r\nEND\r\n"),
            ("get a b\r\n", "VALUE a 0 1\r\nx\r\nVALUE c 0 1\r\nx\r\nEND\r\n"),
            ("gat 7 a\r\n", "VALUE 7 0 1\r\nx\r\nEND\r\n"),
            ("get a\r\n", "STORED\r\n"),
            ("get a\r\n", "EN\r\n"),
            ("set a 0 0 1\r\nx\r\n", "END\r\n"),
            ("set a 0 0 1\r\nx\r\n", "DELETED\r\n"),
            ("delete a\r\n", "STORED\r\n"),
            ("touch a 1\r\n", "DELETED\r\n"),
            ("incr a 1\r\n", "STORED\r\n"),
            ("version\r\n", "OK\r\n"),
            ("stats\r\n", "VALUE a 0 1\r\nx\r\nEND\r\n"),
            ("mn\r\n", "HD\r\n"),
            ("me a\r\n", "ME b exp=-1\r\n"),
            ("me YWI= b\r\n", "ME abc exp=-1\r\n"),
            ("me YWI= b\r\n", "ME YWJj exp=-1\r\n"),
            ("mg ab k v\r\n", "VA 1 kYWJj b\r\nx\r\n"),
            ("mg a k v\r\n", "VA 1 kb\r\nx\r\n"),
            ("mg a k v\r\n", "VA 1\r\nx\r\n"),
            ("mg a k v\r\n", "EN kb\r\n"),
            ("mg a v O12\r\n", "VA 1 O13\r\nx\r\n"),
            ("ms a 1 O7\r\nx\r\n", "HD O8\r\n"),
            ("mg YWJjZGVm b k v\r\n", "VA 1 kYWJhZGVm b\r\nx\r\n"),
            ("mg a k v\r\n", "MN\r\n"),
        ] {
            assert!(!check(request, response), "{request:?} {response:?}");
        }
    }

    #[test]
    fn many_keys_in_a_wrong_order_cost_bounded_work() {
        let keys: Vec<String> = (0..200).map(|key| format!("key{key}")).collect();
        let request = format!("get {}\r\n", keys.join(" "));
        let answer = |keys: &mut dyn Iterator<Item = &String>| {
            let values = keys.map(|key| format!("VALUE {key} 0 1\r\nx\r\n"));
            values.collect::<String>() + "END\r\n"
        };
        assert!(check(&request, &answer(&mut keys.iter())));
        assert!(check(&request, &answer(&mut keys[..65].iter().rev())));
        assert!(!check(&request, &answer(&mut keys.iter().rev())), "more than {PASSES_MAX} passes");
    }
}
