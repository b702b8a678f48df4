//! What a cache has to know of a command of memcached's text protocol.
//!
//! The framing has the grammar; here a command is sorted by what it does to keys.

use wire::framing::{Framing, ParseState, Parsed};

/// Longest key, in bytes.
pub(super) const KEY_BYTES_MAX: usize = 250;

/// What a command does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Command<'a> {
    /// The value of one key.
    Get { key: &'a [u8], form: Form },
    /// The values of several keys, which are separated by spaces; `gets` has their numbers.
    GetMany { keys: &'a [u8], cas: bool },
    /// It changes nothing, and its answer is not known here.
    Other,
    /// `stats` without arguments.
    Stats,
    /// It may change what is known of a key.
    Write(Key<'a>),
    /// It may change keys that are not known, or many.
    WriteMany,
    /// All keys are forgotten.
    Flush(FlushAt),
}

/// How a client asks for a value, and is answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Form {
    /// `get`, or `gets`, which has the number that `cas` compares.
    Text { cas: bool },
    /// `mg KEY v`, or `mg KEY k v`, whose answer has the key.
    Meta { key: bool },
}

/// When all keys are forgotten.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum FlushAt {
    Delay {
        delay_s: u32,
    },
    /// Seconds since 1970.
    Date {
        unix_s: u32,
    },
}

/// A key as a command names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Key<'a> {
    pub(super) text: &'a [u8],
    /// It is written in base64.
    pub(super) base64: bool,
}

/// A command that was sorted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Sorted<'a> {
    pub(super) command: Command<'a>,
    /// It makes a key stale instead of removing it: from then on `mg` changes what it reads.
    pub(super) makes_stale: bool,
}

/// Sorts a message that is exactly one command; `None`: it is not.
#[inline]
pub(super) fn sort(message: &[u8]) -> Option<Sorted<'_>> {
    if let Some(key) = plain_get(message) {
        let command = Command::Get { key, form: Form::Text { cas: false } };
        return Some(Sorted { command, makes_stale: false });
    }
    sort_any(message)
}

/// The key of `get KEY`, as nearly every client writes it.
#[inline]
pub(super) fn plain_get(message: &[u8]) -> Option<&[u8]> {
    let key = message.strip_prefix(b"get ")?.strip_suffix(b"\r\n")?;
    let is_key = |key: &[u8]| key.iter().fold(true, |is, b| is & (*b > b' ') & (*b != 0x7f));
    ((1..=KEY_BYTES_MAX).contains(&key.len()) && is_key(key)).then_some(key)
}

fn sort_any(message: &[u8]) -> Option<Sorted<'_>> {
    let mut state = ParseState::default();
    match Framing::Memcached.parse_request(&mut state, message, message.len()) {
        Ok(Parsed::Message { consumed, .. }) if consumed == message.len() => {}
        _ => return None,
    }
    let line = message.split(|byte| *byte == b'\n').next()?;
    let line = line.strip_suffix(b"\r").unwrap_or(line);
    let mut words = line.split(|byte| *byte == b' ').filter(|word| !word.is_empty());
    let name = words.next()?;
    let mut makes_stale = false;
    let plain = |text| Command::Write(Key { text, base64: false });
    let is_read = mutants::on("cache_touch_is_read");
    let command = match name {
        b"get" | b"gets" => {
            let (key, more) = (words.next()?, words.next());
            let cas = name == b"gets";
            match more {
                None => Command::Get { key, form: Form::Text { cas } },
                Some(_) => Command::GetMany { keys: line.strip_prefix(name)?, cas },
            }
        }
        b"touch" | b"gat" | b"gats" | b"incr" | b"decr" | b"append" | b"prepend" if is_read => {
            Command::Other
        }
        b"gat" | b"gats" => {
            words.next()?;
            let (key, more) = (words.next()?, words.next());
            if more.is_some() { Command::WriteMany } else { plain(key) }
        }
        b"set" | b"add" | b"replace" | b"append" | b"prepend" | b"cas" | b"delete" | b"incr"
        | b"decr" | b"touch" => plain(words.next()?),
        b"flush_all" => flush(words.next()),
        b"stats" if words.next().is_none() => Command::Stats,
        b"version" | b"stats" | b"verbosity" | b"mn" | b"me" => Command::Other,
        b"mg" | b"ms" | b"md" | b"ma" => {
            let text = words.next()?;
            let flag = |name: u8| words.clone().any(|flag| flag[0] == name);
            let key = Key { text, base64: flag(b'b') };
            makes_stale = matches!(name, b"ms" | b"md") && flag(b'I');
            // Flags of `mg` that change a key: its time, or that it is created or won.
            let reads = name == b"mg" && !b"NRTEI".iter().any(|name| flag(*name));
            let wants_key = match (words.next(), words.next(), words.next()) {
                (Some(b"v"), None, None) => Some(false),
                (Some(b"k"), Some(b"v"), None) | (Some(b"v"), Some(b"k"), None) => Some(true),
                _ => None,
            };
            match wants_key {
                Some(key) if name == b"mg" => Command::Get { key: text, form: Form::Meta { key } },
                _ if reads => Command::Other,
                _ => Command::Write(key),
            }
        }
        _ => return None,
    };
    Some(Sorted { command, makes_stale })
}

/// memcached takes a long delay for a date, and does nothing with what is no number of 32 bits.
fn flush(delay: Option<&[u8]>) -> Command<'static> {
    const DATE_S: u32 = 60 * 60 * 24 * 30;
    let number = delay.and_then(|word| std::str::from_utf8(word).ok()?.parse::<i32>().ok());
    Command::Flush(match number.map_or(0, |number| number.max(0) as u32) {
        unix_s if unix_s > DATE_S => FlushAt::Date { unix_s },
        delay_s => FlushAt::Delay { delay_s },
    })
}

/// The bytes that a key in base64 stands for; `None` unless it is written in the one way that is canonical, which memcached does not demand.
pub(super) fn decode_key<'a>(text: &[u8], into: &'a mut [u8; KEY_BYTES_MAX]) -> Option<&'a [u8]> {
    let (groups, rest) = text.as_chunks::<4>();
    let (last, whole) = groups.split_last()?;
    if !rest.is_empty() || groups.len() * 3 > KEY_BYTES_MAX + 2 {
        return None;
    }
    let mut len = 0;
    for group in whole {
        let bits = group.iter().try_fold(0u32, |bits, b| Some(bits << 6 | sextet(*b)?))?;
        into.get_mut(len..len + 3)?.copy_from_slice(&bits.to_be_bytes()[1..]);
        len += 3;
    }
    let padding = last.iter().rev().take_while(|byte| **byte == b'=').count();
    if padding > 2 {
        return None;
    }
    let digits = &last[..4 - padding];
    let bits = digits.iter().try_fold(0u32, |bits, b| Some(bits << 6 | sextet(*b)?))?;
    let bits = bits << (6 * padding);
    let [_, bytes @ ..] = bits.to_be_bytes();
    let (bytes, unused) = bytes.split_at(3 - padding);
    if unused.iter().any(|byte| *byte != 0) {
        return None;
    }
    into.get_mut(len..len + bytes.len())?.copy_from_slice(bytes);
    Some(&into[..len + bytes.len()])
}

fn sextet(byte: u8) -> Option<u32> {
    Some(u32::from(match byte {
        b'A'..=b'Z' => byte - b'A',
        b'a'..=b'z' => byte - b'a' + 26,
        b'0'..=b'9' => byte - b'0' + 52,
        b'+' => 62,
        b'/' => 63,
        _ => return None,
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn command(message: &str) -> Command<'_> {
        sort(message.as_bytes()).unwrap_or_else(|| panic!("{message:?} is a command")).command
    }

    fn plain(text: &str) -> Command<'_> {
        Command::Write(Key { text: text.as_bytes(), base64: false })
    }

    #[test]
    fn commands_are_sorted_by_what_they_do() {
        let get =
            |key: &'static str, cas| Command::Get { key: key.as_bytes(), form: Form::Text { cas } };
        for (line, key) in [("mg a v", false), ("mg a k v", true), ("mg a v k", true)] {
            let form = Form::Meta { key };
            assert_eq!(command(&format!("{line}\r\n")), Command::Get { key: b"a", form });
        }
        assert_eq!(command("get a\r\n"), get("a", false));
        assert_eq!(command("get  a \n"), get("a", false));
        assert_eq!(command("gets a\r\n"), get("a", true));
        let many = |keys: &'static str, cas| Command::GetMany { keys: keys.as_bytes(), cas };
        assert_eq!(command("get a b\r\n"), many(" a b", false));
        assert_eq!(command("gets a  b \r\n"), many(" a  b ", true));
        for other in ["version", "stats items", "verbosity 1", "mn", "me a"] {
            assert_eq!(command(&format!("{other}\r\n")), Command::Other, "{other}");
        }
        for other in
            ["mg a", "mg a k", "mg a v v", "mg Zm9v v b", "mg a v k q", "mg a h l t", "mg a v Oabc"]
        {
            assert_eq!(command(&format!("{other}\r\n")), Command::Other, "{other}");
        }
        assert_eq!(command("stats\r\n"), Command::Stats);
        for line in ["set a 0 0 1", "add a 0 0 1", "append a 0 0 1 noreply", "cas a 0 0 1 7"] {
            assert_eq!(command(&format!("{line}\r\nx\r\n")), plain("a"), "{line}");
        }
        for line in ["delete a", "incr a 1", "decr a 1 noreply", "touch a 0", "gat 9 a", "gats 9 a"]
        {
            assert_eq!(command(&format!("{line}\r\n")), plain("a"), "{line}");
        }
        for line in ["mg a v N30", "mg a R30", "mg a T0 q", "md a", "ma a N0", "ma a v"] {
            assert_eq!(command(&format!("{line}\r\n")), plain("a"), "{line}");
        }
        assert_eq!(command("gat 9 a b\r\n"), Command::WriteMany);
        let base64 = Command::Write(Key { text: b"Zm9v", base64: true });
        assert_eq!(command("ms Zm9v 1 b\r\nx\r\n"), base64);
    }

    #[test]
    fn what_makes_keys_stale_is_known() {
        let stale = |message: &[u8]| sort(message).unwrap().makes_stale;
        assert!(stale(b"md a I T30\r\n") && stale(b"ms a 1 I\r\nx\r\n"));
        assert!(!stale(b"md a q\r\n") && !stale(b"ma a I\r\n") && !stale(b"mg a v\r\n"));
    }

    #[test]
    fn flushes_have_a_delay_or_a_date() {
        let at = |line: &str| match command(line) {
            Command::Flush(at) => at,
            other => panic!("{other:?}"),
        };
        let delay = |delay_s| FlushAt::Delay { delay_s };
        assert_eq!(at("flush_all\r\n"), delay(0));
        assert_eq!(at("flush_all noreply\r\n"), delay(0));
        assert_eq!(at("flush_all 3 noreply\r\n"), delay(3));
        assert_eq!(at("flush_all -1\r\n"), delay(0));
        assert_eq!(at("flush_all 2592000\r\n"), delay(2_592_000));
        assert_eq!(at("flush_all 2592001\r\n"), FlushAt::Date { unix_s: 2_592_001 });
        assert_eq!(at("flush_all 99999999999\r\n"), delay(0));
    }

    #[test]
    fn what_is_not_one_command_is_not_sorted() {
        let long = format!("get {}\r\n", "k".repeat(251));
        let wrong =
            ["", "get a", "get a\r\nget b\r\n", "set a 0 0 5\r\nab\r\n", "bogus\r\n", "quit\r\n"];
        for wrong in wrong.into_iter().chain([&*long, "get a\tb\r\n", "get \r\n", "\u{80}x"]) {
            assert_eq!(sort(wrong.as_bytes()), None, "{wrong:?}");
        }
    }

    #[test]
    fn keys_in_base64_are_decoded_if_they_are_canonical() {
        let mut into = [0; KEY_BYTES_MAX];
        let mut decoded = |text: &str| decode_key(text.as_bytes(), &mut into).map(<[u8]>::to_vec);
        assert_eq!(decoded("Zm9v").unwrap(), b"foo");
        assert_eq!(decoded("Zm8=").unwrap(), b"fo");
        assert_eq!(decoded("Zg==").unwrap(), b"f");
        assert_eq!(decoded("+/+/").unwrap(), [0xfb, 0xff, 0xbf]);
        for wrong in ["", "Zm9", "Zm9=", "Zh==", "Z===", "====", "!!!!", "Zg==Zg==", "Zm8=Zm9v"] {
            assert_eq!(decoded(wrong), None, "{wrong}");
        }
        let longest = "QUFB".repeat(83) + "QQ==";
        assert_eq!(decoded(&longest).unwrap().len(), 250);
        assert_eq!(decoded(&"QUFB".repeat(84)), None);
    }
}
