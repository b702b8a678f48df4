//! The request grammar. See the parent module.

use super::{CRLF, LINE_BYTES_MAX, decimal, has_control, is_key, words};
use crate::framing::{Expects, FramingError, OFFSET_MAX, ParseState, Parsed, offset};

/// First byte of a request of the deprecated binary protocol; no command begins with it.
const BINARY_MAGIC: u8 = 0x80;

/// Phase: the line is a retrieval command, whose length is limited only by the maximum.
const LONG_LINE: u8 = 1;

/// The result of parsing a command line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Command {
    /// The line is the complete command.
    Line {
        expects: Expects,
    },
    /// It is followed by a data block of `bytes` bytes and its CR LF.
    Block {
        bytes: usize,
        expects: Expects,
    },
    Quit,
}

/// Parses one command at the front of `buffer`.
pub(super) fn parse(
    state: &mut ParseState,
    buffer: &[u8],
    max: usize,
) -> Result<Parsed, FramingError> {
    let max = max.min(OFFSET_MAX);
    if let Some(incomplete) = state.missing(buffer) {
        return Ok(incomplete);
    }
    if buffer.first() == Some(&BINARY_MAGIC) {
        return Err(FramingError::BadCommand);
    }
    let window = &buffer[..buffer.len().min(max)];
    let Some(lf) = state.find_lf(window) else {
        return no_line_yet(state, window, max);
    };
    let consumed = lf + 1;
    let line = window[..lf].strip_suffix(b"\r").unwrap_or(&window[..lf]);
    if consumed > LINE_BYTES_MAX && !is_retrieval(line) {
        return Err(FramingError::TooLong);
    }
    match command(line) {
        Ok(Command::Line { expects }) => {
            *state = ParseState::default();
            Ok(Parsed::Message { consumed, start: 0, end: consumed, expects })
        }
        Ok(Command::Block { bytes, expects }) => {
            let end = consumed.saturating_add(bytes).saturating_add(CRLF.len());
            if end > max {
                return Err(FramingError::TooLong);
            }
            state.needed = offset(end);
            if let Some(incomplete) = state.missing(buffer) {
                return Ok(incomplete);
            }
            if !buffer[..end].ends_with(CRLF) {
                return Err(FramingError::BadDataBlock);
            }
            *state = ParseState::default();
            Ok(Parsed::Message { consumed: end, start: 0, end, expects })
        }
        Ok(Command::Quit) => {
            *state = ParseState::default();
            Ok(Parsed::Quit { consumed })
        }
        Err(error) if announces_block(line) => Err(error),
        Err(error) => {
            *state = ParseState::default();
            Ok(Parsed::Refused { consumed, error })
        }
    }
}

/// There is no LF in `window`: waits for it unless the line is too long.
fn no_line_yet(state: &mut ParseState, window: &[u8], max: usize) -> Result<Parsed, FramingError> {
    if window.len() >= max {
        return Err(FramingError::TooLong);
    }
    if window.len() >= LINE_BYTES_MAX && state.phase != LONG_LINE {
        if !is_retrieval(window) {
            return Err(FramingError::TooLong);
        }
        state.phase = LONG_LINE;
    }
    Ok(Parsed::Incomplete { more: 1 })
}

/// Accepts exactly one command, and only if it is always answered.
pub(super) fn check(request: &[u8]) -> Result<(), FramingError> {
    match one_command(request)? {
        Expects::Reply => Ok(()),
        Expects::Nothing | Expects::ReplyOrNothing => Err(FramingError::NotAnswered),
    }
}

/// Accepts exactly one command.
pub(super) fn one_command(request: &[u8]) -> Result<Expects, FramingError> {
    match parse(&mut ParseState::default(), request, request.len()) {
        Ok(Parsed::Message { consumed, expects, .. }) if consumed == request.len() => Ok(expects),
        Ok(Parsed::Quit { .. }) => Err(FramingError::NotAnswered),
        _ => Err(FramingError::Unframable),
    }
}

/// Whether the line is one of the commands with an unlimited number of keys.
fn is_retrieval(line: &[u8]) -> bool {
    // A name truncated by the end of `line` differs from these, and no name has 2048 bytes.
    matches!(words(line).next(), Some(b"get" | b"gets" | b"gat" | b"gats"))
}

/// Whether a data block follows the line, if it is well formed.
fn announces_block(line: &[u8]) -> bool {
    matches!(
        words(line).next(),
        Some(b"set" | b"add" | b"replace" | b"append" | b"prepend" | b"cas" | b"ms")
    )
}

/// Parses one command line, without its terminator.
fn command(line: &[u8]) -> Result<Command, FramingError> {
    let mut arguments = words(line);
    let name = arguments.next().ok_or(FramingError::UnknownCommand)?;
    let command = match name {
        b"get" | b"gets" => all_keys(arguments),
        b"gat" | b"gats" => arguments.next().and_then(|_exptime| all_keys(arguments)),
        b"set" | b"add" | b"replace" | b"append" | b"prepend" => storage(arguments, 0),
        b"cas" => storage(arguments, 1),
        b"delete" => delete(arguments),
        b"incr" | b"decr" | b"touch" => keyed(arguments, 1),
        b"flush_all" => flush_all(arguments),
        b"verbosity" => arguments.next().and_then(|_level| noreply(arguments)),
        b"version" | b"stats" | b"mn" => Some(Command::Line { expects: Expects::Reply }),
        b"mg" | b"md" | b"ma" => meta(arguments),
        b"ms" => meta_set(arguments),
        b"me" => keyed_any(arguments),
        b"quit" => Some(Command::Quit),
        _ => return Err(FramingError::UnknownCommand),
    };
    command.filter(|_| !has_control(line)).ok_or(FramingError::BadCommand)
}

/// Nothing more, or only `noreply`.
fn noreply<'a>(mut rest: impl Iterator<Item = &'a [u8]>) -> Option<Command> {
    expects(&mut rest).map(|expects| Command::Line { expects })
}

fn expects<'a>(rest: &mut impl Iterator<Item = &'a [u8]>) -> Option<Expects> {
    match (rest.next(), rest.next()) {
        (None, _) => Some(Expects::Reply),
        (Some(b"noreply"), None) => Some(Expects::Nothing),
        _ => None,
    }
}

/// KEY+
fn all_keys<'a>(keys: impl Iterator<Item = &'a [u8]>) -> Option<Command> {
    let mut keys = keys.peekable();
    keys.peek()?;
    keys.all(is_key).then_some(Command::Line { expects: Expects::Reply })
}

/// KEY FLAGS EXPTIME BYTES, `extra` more words, [noreply]
fn storage<'a>(mut words: impl Iterator<Item = &'a [u8]>, extra: usize) -> Option<Command> {
    words.next().filter(|key| is_key(key))?;
    let bytes = decimal(words.nth(2)?)?;
    for _ in 0..extra {
        words.next()?;
    }
    Some(Command::Block { bytes, expects: expects(&mut words)? })
}

/// KEY, `values` more words, [noreply]
fn keyed<'a>(mut words: impl Iterator<Item = &'a [u8]>, values: usize) -> Option<Command> {
    words.next().filter(|key| is_key(key))?;
    for _ in 0..values {
        words.next()?;
    }
    noreply(words)
}

/// KEY [0] [noreply]; the 0 is a delay that memcached no longer supports.
fn delete<'a>(mut words: impl Iterator<Item = &'a [u8]> + Clone) -> Option<Command> {
    words.next().filter(|key| is_key(key))?;
    let rest = words.clone();
    match words.next() {
        Some(b"0") => noreply(words),
        _ => noreply(rest),
    }
}

/// [DELAY] [noreply]
fn flush_all<'a>(mut words: impl Iterator<Item = &'a [u8]> + Clone) -> Option<Command> {
    let rest = words.clone();
    match words.next() {
        None | Some(b"noreply") => noreply(rest),
        Some(_delay) => noreply(words),
    }
}

/// KEY and anything
fn keyed_any<'a>(mut words: impl Iterator<Item = &'a [u8]>) -> Option<Command> {
    words.next().filter(|key| is_key(key))?;
    Some(Command::Line { expects: Expects::Reply })
}

/// KEY [FLAG ...]
fn meta<'a>(mut words: impl Iterator<Item = &'a [u8]>) -> Option<Command> {
    words.next().filter(|key| is_key(key))?;
    Some(Command::Line { expects: quiet(words) })
}

/// KEY BYTES [FLAG ...]
fn meta_set<'a>(mut words: impl Iterator<Item = &'a [u8]>) -> Option<Command> {
    words.next().filter(|key| is_key(key))?;
    let bytes = decimal(words.next()?)?;
    Some(Command::Block { bytes, expects: quiet(words) })
}

/// A flag is one letter, some followed by a value; `q` is the quiet one.
fn quiet<'a>(mut flags: impl Iterator<Item = &'a [u8]>) -> Expects {
    if flags.any(|flag| flag.first() == Some(&b'q')) {
        Expects::ReplyOrNothing
    } else {
        Expects::Reply
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::framing::Framing;

    fn request(buffer: &[u8]) -> Result<Parsed, FramingError> {
        parse(&mut ParseState::default(), buffer, 1 << 20)
    }

    fn whole(buffer: &[u8], expects: Expects) {
        let len = buffer.len();
        let message = Parsed::Message { consumed: len, start: 0, end: len, expects };
        let text = String::from_utf8_lossy(buffer);
        // The next command must not be part of this one.
        assert_eq!(request(&[buffer, b"mn\r\n"].concat()), Ok(message), "{text}");
        for cut in 0..len {
            let parsed = request(&buffer[..cut]);
            assert!(matches!(parsed, Ok(Parsed::Incomplete { .. })), "{text} cut at {cut}");
        }
    }

    #[test]
    fn commands_that_expect_a_reply() {
        for command in [
            "get a",
            "get a b c",
            "gets a",
            "gat 0 a",
            "gats -1 a b",
            "delete a",
            "delete a 0",
            "incr a 1",
            "decr a 18446744073709551615",
            "touch a 10",
            "flush_all",
            "flush_all 10",
            "verbosity 1",
            "version",
            "stats",
            "stats items",
            "stats cachedump 1 10",
            "mg a",
            "mg a v t f O123",
            "mg a Oq",
            "md a I",
            "ma a N0 J5 v",
            "me a",
            "me a q",
            "mn",
            "  get   a  ",
            "get noreply",
        ] {
            whole(format!("{command}\r\n").as_bytes(), Expects::Reply);
            whole(format!("{command}\n").as_bytes(), Expects::Reply);
        }
        whole("get \u{e9}\r\n".as_bytes(), Expects::Reply);
        whole(format!("get {}\r\n", "k".repeat(250)).as_bytes(), Expects::Reply);
    }

    #[test]
    fn commands_with_a_data_block() {
        whole(b"set a 0 0 3\r\nabc\r\n", Expects::Reply);
        whole(b"set a 0 0 3\nabc\r\n", Expects::Reply);
        whole(b"set a 0 -1 0\r\n\r\n", Expects::Reply);
        whole(b"add a 0 0 4\r\n\r\n\r\n\r\n", Expects::Reply);
        whole(b"replace a 0 0 5\r\nend\r\n\r\n", Expects::Reply);
        whole(b"append a 0 0 1\r\n\x80\r\n", Expects::Reply);
        whole(b"prepend a 0 0 1\r\n\0\r\n", Expects::Reply);
        whole(b"cas a 0 0 1 7\r\nx\r\n", Expects::Reply);
        whole(b"ms a 2\r\nhi\r\n", Expects::Reply);
        whole(b"ms a 2 T90 F1\r\nhi\r\n", Expects::Reply);
    }

    #[test]
    fn noreply_expects_nothing_and_quiet_perhaps_something() {
        for command in [
            "delete a noreply",
            "delete a 0 noreply",
            "incr a 1 noreply",
            "touch a 0 noreply",
            "flush_all noreply",
            "flush_all 0 noreply",
            "verbosity 1 noreply",
        ] {
            whole(format!("{command}\r\n").as_bytes(), Expects::Nothing);
        }
        whole(b"set a 0 0 3 noreply\r\nabc\r\n", Expects::Nothing);
        whole(b"cas a 0 0 3 9 noreply\r\nabc\r\n", Expects::Nothing);
        whole(b"mg a v q\r\n", Expects::ReplyOrNothing);
        whole(b"md a q\r\n", Expects::ReplyOrNothing);
        whole(b"ma a q N0\r\n", Expects::ReplyOrNothing);
        whole(b"ms a 3 q\r\nabc\r\n", Expects::ReplyOrNothing);
    }

    #[test]
    fn missing_bytes_of_a_data_block_are_returned_and_the_line_is_read_once() {
        let mut state = ParseState::default();
        let command = b"set a 0 0 3\r\nabc\r\n";
        let incomplete = |more| Ok(Parsed::Incomplete { more });
        assert_eq!(parse(&mut state, &command[..12], 64), incomplete(1));
        assert_eq!(parse(&mut state, &command[..13], 64), incomplete(5));
        let known = state;
        assert_eq!(parse(&mut state, &command[..17], 64), incomplete(1));
        assert_eq!(state, known);
        let message = Parsed::Message { consumed: 18, start: 0, end: 18, expects: Expects::Reply };
        assert_eq!(parse(&mut state, command, 64), Ok(message));
        assert_eq!(state, ParseState::default());
    }

    #[test]
    fn refused_commands_leave_the_connection_usable() {
        let long_key = format!("get {}", "k".repeat(251));
        let unknown = ["", "   ", "GET a", "bogus", "slabs reassign 1 2", "watch", "\x07"];
        let malformed = [
            "get",
            "gets",
            "gat 0",
            "gat",
            "get a\tb",
            "get a\rb",
            "get a\0",
            "get a\x7f",
            &long_key,
            "delete",
            "delete a 5",
            "delete a b c",
            "delete a noreply x",
            "incr a",
            "incr a 1 x",
            "touch a",
            "flush_all 1 x",
            "verbosity",
            "mg",
            "me",
            "md",
            "ma",
            "version \x01",
        ];
        let unknown = unknown.iter().map(|line| (line, FramingError::UnknownCommand));
        let malformed = malformed.iter().map(|line| (line, FramingError::BadCommand));
        for (line, error) in unknown.chain(malformed) {
            let consumed = line.len() + 2;
            let parsed = request(format!("{line}\r\nmn\r\n").as_bytes());
            assert_eq!(parsed, Ok(Parsed::Refused { consumed, error }), "{line:?}");
        }
        let parsed = request(b"\nmn\r\n");
        let error = FramingError::UnknownCommand;
        assert_eq!(parsed, Ok(Parsed::Refused { consumed: 1, error }));
    }

    #[test]
    fn a_malformed_line_before_a_data_block_ends_the_connection() {
        let key = format!("set {} 0 0 3", "k".repeat(251));
        for line in [
            "set",
            "set a 0 0",
            "set a 0 0 -1",
            "set a 0 0 x",
            "set a 0 0 3x",
            "set a 0 0 +3",
            "set a 0 0 3 quiet",
            "set a 0 0 3 noreply x",
            "set a 0 0 99999999999",
            "set a\tb 0 0 3",
            &key,
            "cas a 0 0 3",
            "cas a 0 0 3 1 x",
            "ms a",
            "ms a S3",
            "ms a 3 \x01",
        ] {
            let parsed = request(format!("{line}\r\nabc\r\n").as_bytes());
            assert_eq!(parsed, Err(FramingError::BadCommand), "{line}");
        }
        assert_eq!(request(b"\x80\x00"), Err(FramingError::BadCommand));
    }

    #[test]
    fn a_block_of_another_length_ends_the_connection() {
        for block in ["abcd\r\n", "ab\r\nx", "abc\n\r", "abcde"] {
            let parsed = request(format!("set a 0 0 3\r\n{block}").as_bytes());
            assert_eq!(parsed, Err(FramingError::BadDataBlock), "{block:?}");
        }
    }

    #[test]
    fn too_long_requests_are_refused_by_their_command_line() {
        let too_long = Err(FramingError::TooLong);
        let mut state = ParseState::default();
        assert_eq!(parse(&mut state, b"set a 0 0 1001\r\n", 1000), too_long);
        assert_eq!(request(b"ms a 4294967295\r\n"), too_long);
        assert_eq!(request(b"ms a 9999999999\r\n"), too_long);
        // 13 bytes of line, 985 of data and 2 of terminator are exactly 1000.
        let line = |bytes| format!("set a 0 0 {bytes}\r\n").into_bytes();
        let mut state = ParseState::default();
        assert_eq!(parse(&mut state, &line(983), 1000), Ok(Parsed::Incomplete { more: 985 }));
        assert_eq!(parse(&mut ParseState::default(), &line(984), 1000), too_long);
    }

    #[test]
    fn a_line_without_end_is_refused_at_its_limit() {
        for (start, limit) in [("md ", 2048), ("get ", 5000), ("gets ", 5000), ("getter ", 2048)] {
            let mut state = ParseState::default();
            let mut line = start.as_bytes().to_vec();
            while line.len() < limit - 1 {
                line.push(if line.len() % 8 == 0 { b' ' } else { b'k' });
                let parsed = parse(&mut state, &line, 5000);
                assert_eq!(parsed, Ok(Parsed::Incomplete { more: 1 }), "{start} {}", line.len());
                assert_eq!(state.scanned as usize, line.len());
            }
            line.push(b'k');
            assert_eq!(parse(&mut state, &line, 5000), Err(FramingError::TooLong), "{start}");
        }
    }

    #[test]
    fn long_lines_give_the_same_answer_whole_or_in_parts() {
        let keys = "key ".repeat(1000);
        let get = format!("get {keys}\r\n");
        let len = get.len();
        let message =
            Parsed::Message { consumed: len, start: 0, end: len, expects: Expects::Reply };
        assert_eq!(parse(&mut ParseState::default(), get.as_bytes(), len), Ok(message));
        let short = parse(&mut ParseState::default(), get.as_bytes(), len - 1);
        assert_eq!(short, Err(FramingError::TooLong));
        let stats = format!("stats {keys}\r\n");
        assert_eq!(request(stats.as_bytes()), Err(FramingError::TooLong));
        // Exactly the limit, terminator included, is still a line.
        whole(format!("stats {}\r\n", "k".repeat(2040)).as_bytes(), Expects::Reply);
        let over = request(format!("stats {}\r\n", "k".repeat(2041)).as_bytes());
        assert_eq!(over, Err(FramingError::TooLong));
    }

    #[test]
    fn quit_ends_the_connection() {
        assert_eq!(request(b"quit\r\nget a\r\n"), Ok(Parsed::Quit { consumed: 6 }));
        assert_eq!(request(b"quit now\n"), Ok(Parsed::Quit { consumed: 9 }));
    }

    #[test]
    fn a_backend_gets_exactly_one_command_that_it_answers() {
        let encode = |request: &[u8]| {
            let mut out = b"before".to_vec();
            let result = Framing::Memcached.encode_request(request, &mut out);
            let expected = [&b"before"[..], if result.is_ok() { request } else { b"" }].concat();
            assert_eq!(out, expected);
            result
        };
        assert_eq!(encode(b"get face:0123\r\n"), Ok(()));
        assert_eq!(encode(b"set a 0 0 3\r\nabc\r\n"), Ok(()));
        for unanswered in
            ["delete a noreply\r\n", "set a 0 0 1 noreply\r\nx\r\n", "mg a v q\r\n", "quit\r\n"]
        {
            assert_eq!(encode(unanswered.as_bytes()), Err(FramingError::NotAnswered));
        }
        for wrong in [
            "",
            "get a",
            "get a\r\nget b\r\n",
            "get a\r\n ",
            "nonsense\r\n",
            "get\r\n",
            "set a 0 0 3\r\nabc",
            "set a 0 0 3\r\nabcd\r\n",
            "set a 0 0 x\r\n",
        ] {
            assert_eq!(encode(wrong.as_bytes()), Err(FramingError::Unframable), "{wrong:?}");
        }
    }
}
