//! Questions and answers as they are on the wire: what the cache asks the server, and what it answers clients.

use super::command::Form;
use super::flight::Mark;

/// Hexadecimal digits of a mark.
const MARK_DIGITS: usize = 24;
const END: &[u8] = b"END\r\n";

/// The first line of the answer to a question of the cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Answer {
    /// The key is not there.
    Miss { mark: Mark },
    /// A value follows.
    Value { mark: Mark, head: Head },
}

/// What the line says of a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Head {
    /// Bytes of the line.
    pub(super) line: usize,
    /// Bytes of the value.
    pub(super) len: usize,
    pub(super) flags: u32,
    pub(super) cas: u64,
    /// Seconds that are left; `None`: it does not expire.
    pub(super) left_s: Option<u64>,
    /// It is stale or is being made anew.
    pub(super) odd: bool,
    /// It has the key, and not in base64: the server keeps it in the form in which it was stored.
    pub(super) plain: bool,
}

/// Writes the question for a key: its value with all that is to be known of it, and the key if the client asks for that.
pub(super) fn write_question(key: &[u8], form: Form, mark: Mark, out: &mut Vec<u8>) {
    out.extend_from_slice(b"mg ");
    out.extend_from_slice(key);
    let has_key = form == Form::Meta { key: true };
    out.extend_from_slice(if has_key { b" v f c t k O" } else { b" v f c t O" });
    let Mark { tag, generation, ticket } = mark;
    for word in [tag, generation, ticket] {
        for digit in (0..8).rev() {
            out.push(b"0123456789abcdef"[(word >> (4 * digit)) as usize & 15]);
        }
    }
    out.extend_from_slice(b"\r\n");
}

/// Reads the answer to a question of the cache; `None`: it is something else.
pub(super) fn read_answer(answer: &[u8]) -> Option<Answer> {
    let end = wire::find_byte(b'\n', answer)?;
    let line = answer[..end].strip_suffix(b"\r")?;
    let mut words = line.split(|byte| *byte == b' ');
    let name = words.next()?;
    let len = match name {
        b"EN" => 0,
        b"VA" => number(words.next()?)? as usize,
        _ => return None,
    };
    let (mut mark, mut flags, mut cas, mut left) = (None, None, None, None);
    let (mut odd, mut has_key, mut base64) = (false, false, false);
    for word in words {
        match word {
            [b'f', value @ ..] => flags = Some(u32::try_from(number(value)?).ok()?),
            [b'c', value @ ..] => cas = Some(number(value)?),
            [b't', b'-', b'1'] => left = Some(None),
            [b't', value @ ..] => left = Some(Some(number(value)?)),
            [b'O', digits @ ..] => mark = Some(read_mark(digits)?),
            [b'W' | b'X' | b'Z'] => odd = true,
            [b'b'] => base64 = true,
            [b'k', ..] => has_key = true,
            _ => {}
        }
    }
    let mark = mark?;
    if name == b"EN" {
        return Some(Answer::Miss { mark });
    }
    let plain = has_key && !base64;
    let head = Head { line: end + 1, len, flags: flags?, cas: cas?, left_s: left?, odd, plain };
    Some(Answer::Value { mark, head })
}

fn read_mark(digits: &[u8]) -> Option<Mark> {
    if digits.len() != MARK_DIGITS {
        return None;
    }
    let digit = |byte: &u8| char::from(*byte).to_digit(16);
    let word = |at: usize| {
        digits[at..at + 8].iter().try_fold(0u32, |word, byte| Some(word << 4 | digit(byte)?))
    };
    Some(Mark { tag: word(0)?, generation: word(8)?, ticket: word(16)? })
}

fn number(digits: &[u8]) -> Option<u64> {
    if digits.is_empty() || digits.len() > 20 {
        return None;
    }
    digits.iter().try_fold(0u64, |value, byte| {
        let digit = byte.wrapping_sub(b'0');
        let digit = (digit < 10).then_some(u64::from(digit))?;
        value.checked_mul(10)?.checked_add(digit)
    })
}

/// Digits of a decimal number.
#[inline(always)]
fn digits(value: u64) -> usize {
    match value {
        // Most lengths and flags.
        0..10 => 1,
        10..100 => 2,
        _ => value.ilog10() as usize + 1,
    }
}

/// Writes into memory of the right length from the front.
pub(super) struct Writer<'a> {
    into: &'a mut [u8],
    at: usize,
}

impl<'a> Writer<'a> {
    pub(super) fn new(into: &'a mut [u8]) -> Self {
        Self { into, at: 0 }
    }

    #[inline(always)]
    pub(super) fn put(&mut self, bytes: &[u8]) {
        self.next(bytes.len()).copy_from_slice(bytes);
    }

    /// The next bytes, for someone else to write.
    #[inline(always)]
    pub(super) fn next(&mut self, len: usize) -> &mut [u8] {
        let from = self.at;
        self.at += len;
        &mut self.into[from..from + len]
    }

    /// Digit by digit where they belong: a copy of bytes that were just written one by one waits for them.
    #[inline(always)]
    fn put_number(&mut self, mut value: u64) {
        if value < 10 {
            return self.put(&[b'0' + value as u8]);
        }
        for digit in self.next(digits(value)).iter_mut().rev() {
            *digit = b'0' + (value % 10) as u8;
            value /= 10;
        }
    }
}

/// The first line of an answer with a value, whose key is known where it is written.
pub(super) enum FirstLine {
    /// `VALUE KEY FLAGS BYTES [CAS]`
    Text { flags: u32, len: usize, cas: Option<u64> },
    /// `VA BYTES [kKEY]`
    Meta { len: usize, key: bool },
}

impl FirstLine {
    /// Bytes of the line with a key of this length.
    #[inline]
    pub(super) fn bytes(&self, key_len: usize) -> usize {
        match self {
            Self::Text { flags, len, cas } => {
                let numbers = digits(u64::from(*flags)) + digits(*len as u64);
                b"VALUE   \r\n".len() + key_len + numbers + cas.map_or(0, |cas| 1 + digits(cas))
            }
            Self::Meta { len, key } => {
                b"VA \r\n".len() + digits(*len as u64) + if *key { 2 + key_len } else { 0 }
            }
        }
    }

    #[inline]
    pub(super) fn write(&self, key: &[u8], into: &mut Writer<'_>) {
        match self {
            Self::Text { flags, len, cas } => {
                into.put(b"VALUE ");
                into.put(key);
                into.put(b" ");
                into.put_number((*flags).into());
                into.put(b" ");
                into.put_number(*len as u64);
                if let Some(cas) = cas {
                    into.put(b" ");
                    into.put_number(*cas);
                }
            }
            Self::Meta { len, key: with } => {
                into.put(b"VA ");
                into.put_number(*len as u64);
                if *with {
                    into.put(b" k");
                    into.put(key);
                }
            }
        }
        into.put(b"\r\n");
    }

    /// Appends it.
    pub(super) fn append(&self, key: &[u8], out: &mut Vec<u8>) {
        let from = out.len();
        out.resize(from + self.bytes(key.len()), 0);
        self.write(key, &mut Writer::new(&mut out[from..]));
    }
}

/// Writes the first line of the answer to a meta command as the client gets it: without what only the cache has asked for.
pub(super) fn write_meta(answer: &[u8], out: &mut Vec<u8>) {
    let line = answer.split(|byte| *byte == b'\r').next().unwrap_or(answer);
    let mut words = line.split(|byte| *byte == b' ');
    out.extend_from_slice(words.next().unwrap_or_default());
    let mut is_len = line.starts_with(b"VA");
    for word in words {
        if std::mem::take(&mut is_len) || !matches!(word, [b'f' | b'c' | b't' | b'O', ..]) {
            out.push(b' ');
            out.extend_from_slice(word);
        }
    }
    out.extend_from_slice(b"\r\n");
}

fn append_number(value: u64, out: &mut Vec<u8>) {
    let from = out.len();
    out.resize(from + digits(value), 0);
    Writer::new(&mut out[from..]).put_number(value);
}

/// Writes the answer to `stats` with these hits and misses, which the server has not seen.
pub(super) fn write_stats(answer: &[u8], hits: u64, misses: u64, out: &mut Vec<u8>) {
    let counts = [
        (&b"STAT cmd_get "[..], hits.saturating_add(misses)),
        (b"STAT get_hits ", hits),
        (b"STAT get_misses ", misses),
    ];
    for line in answer.split_inclusive(|byte| *byte == b'\n') {
        let counted = counts.into_iter().find_map(|(name, more)| {
            let count = line.strip_prefix(name)?.strip_suffix(b"\r\n")?;
            Some((name, number(count)?.saturating_add(more)))
        });
        match counted {
            None => out.extend_from_slice(line),
            Some((name, count)) => {
                out.extend_from_slice(name);
                append_number(count, out);
                out.extend_from_slice(b"\r\n");
            }
        }
    }
}

/// Whether a datagram can only be the answer to a write with a data block, or of one key: reads and other commands are never answered like
/// this.
pub(super) fn ends_write(body: &[u8]) -> bool {
    match body.strip_suffix(b"\r\n") {
        Some(b"STORED" | b"NOT_STORED" | b"EXISTS" | b"NOT_FOUND" | b"DELETED" | b"TOUCHED") => {
            true
        }
        // The number after `incr`, which `decr` may pad.
        Some(number) => {
            let digits = number.trim_ascii_end();
            !digits.is_empty() && digits.iter().all(u8::is_ascii_digit)
        }
        None => false,
    }
}

/// Writes what is behind the value.
pub(super) fn write_end(out: &mut Vec<u8>) {
    out.extend_from_slice(END);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_question_carries_its_mark_and_the_answer_brings_it_back() {
        let mark = Mark { tag: 0xfedc_ba98, generation: 0x0123_4567, ticket: 0x89ab_cdef };
        let mut question = Vec::new();
        write_question(b"key", Form::Text { cas: false }, mark, &mut question);
        assert_eq!(question, b"mg key v f c t Ofedcba980123456789abcdef\r\n");
        question.clear();
        write_question(b"key", Form::Meta { key: true }, mark, &mut question);
        assert_eq!(question, b"mg key v f c t k Ofedcba980123456789abcdef\r\n");
        // Recorded from memcached 1.6.18.
        let value = b"VA 5 f7 c1 t-1 Ofedcba980123456789abcdef\r\nhello\r\n";
        let mut head =
            Head { line: 42, len: 5, flags: 7, cas: 1, left_s: None, odd: false, plain: false };
        assert_eq!(read_answer(value), Some(Answer::Value { mark, head }));
        let miss = b"EN Ofedcba980123456789abcdef\r\n";
        assert_eq!(read_answer(miss), Some(Answer::Miss { mark }));
        let stale = b"VA 1 f0 c9 t30 Ofedcba980123456789abcdef W X\r\nx\r\n";
        head = Head { line: 46, len: 1, flags: 0, cas: 9, left_s: Some(30), odd: true, ..head };
        assert_eq!(read_answer(stale), Some(Answer::Value { mark, head }));
        let keyed = |key: &str| format!("VA 1 f0 c9 t30 {key} Ofedcba980123456789abcdef\r\nx\r\n");
        for (key, plain) in [("kkey", true), ("ka2V5 b", false)] {
            let Some(Answer::Value { head, .. }) = read_answer(keyed(key).as_bytes()) else {
                panic!("{key} is a value")
            };
            assert_eq!(head.plain, plain, "{key}");
        }
    }

    #[test]
    fn a_meta_answer_has_what_the_client_asked_for() {
        for (answer, expected) in [
            ("VA 5 f7 c1 t-1 O12\r\nhello\r\n", "VA 5\r\n"),
            ("VA 5 f7 c1 t-1 kfoo O12\r\nhello\r\n", "VA 5 kfoo\r\n"),
            ("VA 5 f7 c1 t-1 kZm9v O12 b W X\r\nhello\r\n", "VA 5 kZm9v b W X\r\n"),
            ("EN O12\r\n", "EN\r\n"),
            ("EN kfoo O12\r\n", "EN kfoo\r\n"),
        ] {
            let mut out = Vec::new();
            write_meta(answer.as_bytes(), &mut out);
            assert_eq!(String::from_utf8(out).unwrap(), expected);
        }
        let mut out = Vec::new();
        FirstLine::Meta { len: 5, key: true }.append(b"foo", &mut out);
        FirstLine::Meta { len: 10, key: false }.append(b"foo", &mut out);
        assert_eq!(out, b"VA 5 kfoo\r\nVA 10\r\n");
    }

    #[test]
    fn a_first_line_has_as_many_bytes_as_it_says() {
        for key in [&b"k"[..], &[b'k'; 250]] {
            for (line, expected) in [
                (
                    FirstLine::Text { flags: 0, len: 16, cas: None },
                    format!("VALUE {} 0 16\r\n", key.escape_ascii()),
                ),
                (
                    FirstLine::Text { flags: u32::MAX, len: 1 << 20, cas: Some(u64::MAX) },
                    format!("VALUE {} {} 1048576 {}\r\n", key.escape_ascii(), u32::MAX, u64::MAX),
                ),
                (FirstLine::Meta { len: 0, key: false }, "VA 0\r\n".to_owned()),
                (
                    FirstLine::Meta { len: 100, key: true },
                    format!("VA 100 k{}\r\n", key.escape_ascii()),
                ),
            ] {
                let mut out = Vec::new();
                line.append(key, &mut out);
                assert_eq!(String::from_utf8(out).unwrap(), expected);
                assert_eq!(line.bytes(key.len()), expected.len());
            }
        }
    }

    #[test]
    fn anything_else_is_no_answer_to_a_question() {
        for other in [
            "",
            "EN\r\n",
            "END\r\n",
            "EN O12\r\n",
            "EN Ofedcba980123456789abcdeg\r\n",
            "EN Ofedcba980123456789abcdef\n",
            "HD Ofedcba980123456789abcdef\r\n",
            "VA 1 Ofedcba980123456789abcdef\r\nx\r\n",
            "VA x f0 c1 t-1 Ofedcba980123456789abcdef\r\nx\r\n",
            "VA 1 f4294967296 c1 t-1 Ofedcba980123456789abcdef\r\nx\r\n",
            "VA 1 f0 c18446744073709551616 t-1 Ofedcba980123456789abcdef\r\nx\r\n",
            "VA 1 f0 c1 t-2 Ofedcba980123456789abcdef\r\nx\r\n",
            "SERVER_ERROR out of memory Ofedcba980123456789abcdef\r\n",
            "VALUE key 0 1\r\nx\r\nEND\r\n",
        ] {
            assert_eq!(read_answer(other.as_bytes()), None, "{other:?}");
        }
    }

    #[test]
    fn hits_are_added_to_what_the_server_counted() {
        let answer =
            b"STAT pid 7\r\nSTAT cmd_get 10\r\nSTAT cmd_set 3\r\nSTAT get_hits 6\r\nSTAT get_misses 4\r\nEND\r\n";
        let mut out = Vec::new();
        write_stats(answer, 5, 2, &mut out);
        let expected =
            b"STAT pid 7\r\nSTAT cmd_get 17\r\nSTAT cmd_set 3\r\nSTAT get_hits 11\r\nSTAT get_misses 6\r\nEND\r\n";
        assert_eq!(out, expected);
        out.clear();
        write_stats(b"SERVER_ERROR busy\r\n", 5, 2, &mut out);
        assert_eq!(out, b"SERVER_ERROR busy\r\n");
    }

    #[test]
    fn numbers_are_written_in_decimal() {
        for value in [0, 7, 9, 10, 99, 100, 4_294_967_295, u64::MAX] {
            let mut out = Vec::new();
            append_number(value, &mut out);
            assert_eq!(String::from_utf8(out).unwrap(), value.to_string());
        }
    }
}
