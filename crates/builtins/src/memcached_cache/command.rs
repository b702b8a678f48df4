//! What a cache has to know of a command of memcached's text protocol.
//!
//! `wire::framing::memcached` has the grammar; here a command is sorted by what it does to keys.

use wire::framing::memcached::{self, Decoded, Verb};

/// Longest key, in bytes.
pub(super) const KEY_BYTES_MAX: usize = memcached::KEY_BYTES_MAX;

/// What a command does.
#[derive(Clone, Debug, PartialEq, Eq)]
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
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Key<'a>(memcached::Command<'a>);

impl Key<'_> {
    /// Its bytes.
    pub(super) fn bytes<'b>(&'b self, into: &'b mut Decoded) -> Option<&'b [u8]> {
        match mutants::on("cache_base64_as_text") {
            true => Some(self.0.key),
            false => self.0.decoded_key(into),
        }
    }
}

/// A command that was sorted.
#[derive(Clone, Debug, PartialEq, Eq)]
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
    let whole = memcached::Command::of_message(message)?;
    let memcached::Command { verb, key, seconds, .. } = whole;
    let is_single = || whole.rest.clone().next().is_none();
    let makes_stale = matches!(verb, Verb::MetaSet | Verb::MetaDelete)
        && whole.rest.clone().any(|f| f[0] == b'I');
    let is_read = mutants::on("cache_touch_is_read");
    let command = match verb {
        Verb::Get | Verb::Gets => {
            let cas = verb == Verb::Gets;
            match is_single() {
                true => Command::Get { key, form: Form::Text { cas } },
                // Both are parts of the line: the keys begin with the first.
                false => Command::GetMany { keys: keys(message, key), cas },
            }
        }
        Verb::Touch
        | Verb::Gat
        | Verb::Gats
        | Verb::Incr
        | Verb::Decr
        | Verb::Append
        | Verb::Prepend
            if is_read =>
        {
            Command::Other
        }
        // It names no key.
        Verb::Gat | Verb::Gats if key.is_empty() => Command::Other,
        Verb::Gat | Verb::Gats if !is_single() => Command::WriteMany,
        Verb::Gat | Verb::Gats => Command::Write(Key(whole)),
        Verb::Set
        | Verb::Add
        | Verb::Replace
        | Verb::Append
        | Verb::Prepend
        | Verb::Cas
        | Verb::Delete
        | Verb::Incr
        | Verb::Decr
        | Verb::Touch
        | Verb::MetaSet
        | Verb::MetaDelete
        | Verb::MetaArithmetic => Command::Write(Key(whole)),
        Verb::FlushAll => Command::Flush(flush(seconds)),
        Verb::Stats if whole.rest.clone().next().is_none() => Command::Stats,
        Verb::Version | Verb::Stats | Verb::Verbosity | Verb::MetaNoop | Verb::MetaDebug => {
            Command::Other
        }
        Verb::MetaGet => meta_get(whole),
        Verb::Quit => return None,
    };
    Some(Sorted { command, makes_stale })
}

/// All keys of a retrieval command, from the first on.
fn keys<'a>(message: &'a [u8], first: &[u8]) -> &'a [u8] {
    let from = first.as_ptr().addr() - message.as_ptr().addr();
    let line = &message[from..];
    let line = line.strip_suffix(b"\n").unwrap_or(line);
    line.strip_suffix(b"\r").unwrap_or(line)
}

fn meta_get(whole: memcached::Command<'_>) -> Command<'_> {
    let mut flags = whole.rest.clone();
    let key = whole.key;
    match (flags.next(), flags.next(), flags.next()) {
        (Some(b"v"), None, None) => Command::Get { key, form: Form::Meta { key: false } },
        (Some(b"k"), Some(b"v"), None) | (Some(b"v"), Some(b"k"), None) => {
            Command::Get { key, form: Form::Meta { key: true } }
        }
        // Other flags change a key: its time, or that it is created or won. What others will mean is not known.
        _ if whole.rest.clone().all(|flag| b"bcfhklqstuvOPL".contains(&flag[0])) => Command::Other,
        _ => Command::Write(Key(whole)),
    }
}

/// memcached takes a long delay for a date, and a negative one for none.
fn flush(seconds: i32) -> FlushAt {
    const DATE_S: u32 = 60 * 60 * 24 * 30;
    match seconds.max(0) as u32 {
        unix_s if unix_s > DATE_S => FlushAt::Date { unix_s },
        delay_s => FlushAt::Delay { delay_s },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn command(message: &str) -> Command<'_> {
        sort(message.as_bytes()).unwrap_or_else(|| panic!("{message:?} is a command")).command
    }

    /// The key that a command writes.
    fn written(message: &str) -> Option<Vec<u8>> {
        match command(message) {
            Command::Write(key) => key.bytes(&mut [0; KEY_BYTES_MAX]).map(<[u8]>::to_vec),
            other => panic!("{message:?} writes a key: {other:?}"),
        }
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
        assert_eq!(command("get a b\r\n"), many("a b", false));
        assert_eq!(command("gets  a  b \n"), many("a  b ", true));
        for other in ["version", "stats items", "verbosity 1", "mn", "me a", "gat 0"] {
            assert_eq!(command(&format!("{other}\r\n")), Command::Other, "{other}");
        }
        for other in ["mg a", "mg a k", "mg Zm9v v b", "mg a v k q", "mg a h l t", "mg a v Oabc"] {
            assert_eq!(command(&format!("{other}\r\n")), Command::Other, "{other}");
        }
        assert_eq!(command("stats\r\n"), Command::Stats);
        for line in ["set a 0 0 1", "add a 0 0 1", "append a 0 0 1 noreply", "cas a 0 0 1 7"] {
            assert_eq!(written(&format!("{line}\r\nx\r\n")).unwrap(), b"a", "{line}");
        }
        for line in ["delete a", "incr a 1", "decr a 1 noreply", "touch a 0", "gat 9 a", "gats 9 a"]
        {
            assert_eq!(written(&format!("{line}\r\n")).unwrap(), b"a", "{line}");
        }
        for line in ["mg a v N30", "mg a R30", "mg a T0 q", "mg a E1", "md a", "md a x", "ma a v"] {
            assert_eq!(written(&format!("{line}\r\n")).unwrap(), b"a", "{line}");
        }
        assert_eq!(command("gat 9 a b\r\n"), Command::WriteMany);
        // Spellings of one key.
        for base64 in ["ms Zm9v 1 b\r\nx\r\n", "ms Zm9!v 1 b\r\nx\r\n"] {
            assert_eq!(written(base64).unwrap(), b"foo");
        }
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
    }

    #[test]
    fn what_is_not_one_command_is_not_sorted() {
        let long = format!("get {}\r\n", "k".repeat(251));
        let wrong =
            ["", "get a", "get a\r\nget b\r\n", "set a 0 0 5\r\nab\r\n", "bogus\r\n", "quit\r\n"];
        let numbers = [
            "flush_all 99999999999\r\n",
            "flush_all +5\r\n",
            "set a x 0 1\r\nx\r\n",
            "mg a v v\r\n",
        ];
        let wrong = wrong.into_iter().chain(numbers);
        for wrong in wrong.chain([&*long, "get a\0b\r\n", "get \r\n", "\u{80}x"]) {
            assert_eq!(sort(wrong.as_bytes()), None, "{wrong:?}");
        }
    }
}
