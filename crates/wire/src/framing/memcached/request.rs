//! Requests in a stream of bytes. See the parent module; `command.rs` has the grammar of their lines.

use super::command::{self, Command, Refused, Verb};
use super::{CRLF, LINE_BYTES_MAX, Words};
use crate::framing::{Expects, FramingError, OFFSET_MAX, ParseState, Parsed, offset};

/// First byte of a request of the deprecated binary protocol; no command begins with it.
const BINARY_MAGIC: u8 = 0x80;

/// Phase: the line is a retrieval command, whose length is limited only by the maximum.
const LONG_LINE: u8 = 1;
/// Phase: the next `needed` bytes are the data block of a command that was refused.
const REFUSED_BLOCK: u8 = 2;

/// Parses one command at the front of `buffer`.
pub(super) fn parse(
    state: &mut ParseState,
    buffer: &[u8],
    max: usize,
) -> Result<Parsed, FramingError> {
    let max = max.min(OFFSET_MAX);
    if state.phase == REFUSED_BLOCK {
        return Ok(skip(state, buffer));
    }
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
    let Command { verb, block, expects, .. } = match command::read(line) {
        Ok(command) => command,
        Err(refused) => return Ok(refuse(state, consumed, refused)),
    };
    let Some(bytes) = block else {
        *state = ParseState::default();
        return Ok(match verb {
            Verb::Quit => Parsed::Quit { consumed },
            _ => Parsed::Message { consumed, start: 0, end: consumed, expects },
        });
    };
    let silent = expects == Expects::Nothing;
    let end = consumed.saturating_add(bytes).saturating_add(CRLF.len());
    if end > max && mutants::on("memcached_limit_ends") {
        return Err(FramingError::TooLong);
    }
    if end > max {
        let error = FramingError::TooLong;
        return Ok(refuse(state, consumed, Refused { error, silent, block }));
    }
    state.needed = offset(end);
    if let Some(incomplete) = state.missing(buffer) {
        return Ok(incomplete);
    }
    *state = ParseState::default();
    if !buffer[..end].ends_with(CRLF) {
        return Ok(Parsed::Refused { consumed: end, error: FramingError::BadDataBlock, silent });
    }
    Ok(Parsed::Message { consumed: end, start: 0, end, expects })
}

/// Refuses a command line. If memcached takes a data block all the same, that is skipped.
fn refuse(state: &mut ParseState, consumed: usize, refused: Refused) -> Parsed {
    let Refused { error, silent, block } = refused;
    *state = ParseState::default();
    if let Some(bytes) = block {
        state.phase = REFUSED_BLOCK;
        state.needed = offset(bytes + CRLF.len());
    }
    Parsed::Refused { consumed, error, silent }
}

fn skip(state: &mut ParseState, buffer: &[u8]) -> Parsed {
    let consumed = buffer.len().min(state.needed as usize);
    if consumed == 0 {
        return Parsed::Incomplete { more: 1 };
    }
    state.needed -= consumed as u32;
    if state.needed == 0 {
        *state = ParseState::default();
    }
    Parsed::Skipped { consumed }
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
    matches!(Words(line).next(), Some(b"get" | b"gets" | b"gat" | b"gats"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error_reply::CommandError;
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
            // As memcached, which ignores these words, or looks for no key.
            "gat 0",
            "delete noreply",
            "incr a 1 x",
            "touch a 1 x",
            "flush_all 1 x",
            "verbosity 1 x",
            "stats \x01",
            "get a\tb",
            "get a\rb",
            "get a\x7f",
            "mg a E5",
            "md a x",
            "mg Zm9v b k",
            "me Zm9v b",
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
        whole(b"ms Zm9v 2 MS C5 E6 b\r\nhi\r\n", Expects::Reply);
        // memcached ignores the last word unless it is `noreply`.
        whole(b"set a 0 0 3 quiet\r\nabc\r\n", Expects::Reply);
        whole(b"cas a 0 0 1 7 x\r\nx\r\n", Expects::Reply);
        whole(b"set a\tb 4294967295 -2147483648 3\r\nabc\r\n", Expects::Reply);
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

    /// What follows a refused line, unless a block is skipped.
    const NEXT: &str = "mn\r\n";

    fn refused(line: &str) -> (FramingError, bool) {
        let text = format!("{line}\r\n{NEXT}");
        let mut state = ParseState::default();
        match parse(&mut state, text.as_bytes(), 1 << 20) {
            Ok(Parsed::Refused { consumed, error, silent }) => {
                assert_eq!(consumed, line.len() + 2, "{line:?}");
                assert_eq!(state, ParseState::default(), "{line:?} has no block");
                (error, silent)
            }
            other => panic!("{line:?}: {other:?}"),
        }
    }

    #[test]
    fn refused_commands_leave_the_connection_usable() {
        use CommandError::*;
        let long = "k".repeat(251);
        let flags = "f v c t s h l k q u O P L N0 T0 R0 D1";
        let (unknown, bad) = (FramingError::UnknownCommand, FramingError::BadCommand);
        let told = |error: CommandError| FramingError::Command(error);
        let mut cases: Vec<(String, FramingError)> = Vec::new();
        let mut all = |error: FramingError, lines: &[&str]| {
            cases.extend(lines.iter().map(|line| (line.replace("LONG", &long), error)));
        };
        all(
            unknown,
            &[
                "",
                "   ",
                "GET a",
                "bogus",
                "slabs reassign 1 2",
                "watch",
                "\x07",
                "mx a",
                "get\0 a",
            ],
        );
        all(unknown, &["bget a", "get", "gets", "gat", "delete", "delete a b c d", "incr a"]);
        all(
            unknown,
            &["incr a 1 2 3", "touch a", "flush_all 1 2 3", "verbosity", "verbosity 1 2 3"],
        );
        all(unknown, &["mg", "md", "ma", "ms", "set", "set a 0 0", "set a 0 0 3 noreply x"]);
        all(unknown, &["cas a 0 0 3", "cas a 0 0 3 1 noreply x", "gaga HTTP/1.1"]);
        all(
            bad,
            &["get LONG", "get a LONG", "gat 0 LONG", "delete LONG", "incr LONG 1", "mg LONG v"],
        );
        all(bad, &["get a\0", "version \0", "me", "me LONG", "me !! b", "verbosity x"]);
        all(bad, &["ms a", "ms LONG 3", "ms a S3", "ms a -1", "ms a 3x", "ms a 2147483646"]);
        all(
            bad,
            &["set LONG 0 0 3", "set a 0 0 -1", "set a 0 0 x", "set a 0 0 3x", "set a -1 0 3"],
        );
        all(
            bad,
            &[
                "set a x 0 3",
                "set a 0 x 3",
                "set a 0 0 99999999999999999999",
                "set a 0 0 2147483646",
            ],
        );
        all(bad, &["cas a 0 0 3 x", "cas a 0 0 3 -1", "mg a Fx", "mg Cgo= b k", "me Cgo= b"]);
        all(
            told(Exptime),
            &["gat x a", "touch a x", "touch a +1", "flush_all x", "flush_all noreply x"],
        );
        all(told(Delta), &["incr a x", "decr a -1", "incr a 1x"]);
        all(told(Delete), &["delete a 5", "delete a b c", "delete a noreply x"]);
        all(told(DuplicateFlag), &["mg a k k", "mg a \u{e9}"]);
        all(told(InvalidFlag), &["mg a S1", "mg a Z", "mg a k Z k", "mg a Ex"]);
        all(told(AnyFlag), &["md a k k", "ma a Z", "md a Tx", "ma !! b"]);
        all(told(Key), &["mg !! b", "mg Z=== b"]);
        all(told(FlagValue), &["mg a T", "mg a N+1", "mg a R99999999999", "mg a Cx", "mg a Fx Tx"]);
        all(told(ModeLength), &["mg a M", "mg a MII"]);
        all(told(ArithmeticMode), &["ma a Mx"]);
        all(told(Initial), &["mg a J"]);
        all(told(DeltaValue), &["mg a D-1"]);
        let opaque = format!("mg a O{}", "x".repeat(32));
        all(told(Opaque), &[&*opaque, &*opaque.replace("mg", "ma"), &*opaque.replace("mg", "md")]);
        all(told(MetaGetFlags), &[&*format!("mg a {flags} J1")]);
        all(told(MetaFlags), &[&*format!("md a {flags} J1"), &*format!("ms a 1 {flags}")]);
        for (line, error) in cases {
            assert_eq!(refused(&line), (error, false), "{line:?}");
        }
        whole(format!("mg a {flags}\r\n").as_bytes(), Expects::ReplyOrNothing);
        let parsed = request(b"\nmn\r\n");
        assert_eq!(parsed, Ok(Parsed::Refused { consumed: 1, error: unknown, silent: false }));
    }

    #[test]
    fn errors_are_silent_where_memcached_looks_for_noreply_first() {
        for line in [
            "set a x 0 1 noreply",
            "set a 0 0 noreply",
            "cas a 0 0 1 noreply",
            "incr a noreply",
            "incr a x noreply",
            "touch a noreply",
            "delete a 5 noreply",
            "flush_all x noreply",
            "flush_all noreply noreply",
            "verbosity noreply",
            "verbosity x noreply",
        ] {
            assert!(refused(line).1, "{line}");
        }
        for line in ["set a 0 noreply", "set a 0 0 1 2 noreply", "delete a noreply x", "mg a Z q"] {
            assert!(!refused(line).1, "{line}");
        }
        let parsed = request(b"set a 0 0 3 noreply\r\nabcde");
        let error = FramingError::BadDataBlock;
        assert_eq!(parsed, Ok(Parsed::Refused { consumed: 26, error, silent: true }));
    }

    /// The command is refused with this error, and this number of bytes is skipped, however they arrive.
    fn skips(line: &str, max: usize, error: FramingError, silent: bool, bytes: usize) {
        let block = "x".repeat(bytes);
        let stream = format!("{line}\r\n{block}mn\r\n").into_bytes();
        for step in [1, 3, stream.len()] {
            let (mut state, mut from, mut to, mut skipped) = (ParseState::default(), 0, 0, 0);
            let mut was_refused = false;
            loop {
                match parse(&mut state, &stream[from..to], max).unwrap() {
                    Parsed::Incomplete { .. } => to = (to + step).min(stream.len()),
                    Parsed::Refused { consumed, error: found, silent: is_silent } => {
                        assert_eq!((consumed, found), (line.len() + 2, error), "{line}");
                        assert_eq!((is_silent, was_refused), (silent, false), "{line}");
                        (from, was_refused) = (from + consumed, true);
                    }
                    Parsed::Skipped { consumed } => {
                        (from, skipped) = (from + consumed, skipped + consumed);
                    }
                    Parsed::Message { consumed, .. } => {
                        assert_eq!(&stream[from..from + consumed], b"mn\r\n", "{line}");
                        break;
                    }
                    Parsed::Quit { .. } => panic!("{line}"),
                }
            }
            assert_eq!((skipped, state), (bytes, ParseState::default()), "{line}");
        }
    }

    #[test]
    fn the_data_of_a_refused_command_are_skipped_where_memcached_takes_them() {
        use CommandError as E;
        let opaque = format!("ms a 3 O{}", "x".repeat(32));
        let bad = FramingError::BadCommand;
        for (line, error) in [
            ("ms a 3 Z", E::InvalidFlag.into()),
            ("ms a 3 k k", E::DuplicateFlag.into()),
            ("ms a 3 Tx", E::FlagValue.into()),
            ("ms a 3 MX", E::SetMode.into()),
            ("ms !! 3 b", E::Key.into()),
            (&*opaque, E::Opaque.into()),
            ("ms a +3", bad),
            ("ms a 4294967299", bad),
            ("set a +0 0 3", bad),
            ("set a 4294967296 0 3", bad),
            ("set a 0 4294967296 3", bad),
            ("set a 0 0 +3", bad),
            ("set a 0 0 3\r", bad),
            ("set a 0 0 4294967299", bad),
            ("set a 0 0 3\0 4 5 6 7", bad),
            ("cas a 0 0 3 -0", bad),
        ] {
            skips(line, 1 << 20, error, false, 5);
        }
        skips("set a 0 +0 3 noreply", 1 << 20, bad, true, 5);
    }

    #[test]
    fn a_block_of_another_length_is_refused_and_the_stream_goes_on_behind_its_length() {
        for block in ["abcd\r\n", "ab\r\nx", "abc\n\r", "abcde"] {
            let parsed = request(format!("set a 0 0 3\r\n{block}").as_bytes());
            let error = FramingError::BadDataBlock;
            let refused = Parsed::Refused { consumed: 18, error, silent: false };
            assert_eq!(parsed, Ok(refused), "{block:?}");
        }
        assert_eq!(request(b"\x80\x00"), Err(FramingError::BadCommand));
    }

    #[test]
    fn too_long_blocks_are_refused_by_their_command_line_and_skipped() {
        let too_long = FramingError::TooLong;
        skips("set a 0 0 1001", 1000, too_long, false, 1003);
        skips("set a 0 0 5000 noreply", 1000, too_long, true, 5002);
        skips("ms a 70000 q", 1000, too_long, false, 70_002);
        let refused = |line: &[u8]| {
            Ok(Parsed::Refused { consumed: line.len(), error: too_long, silent: false })
        };
        assert_eq!(request(b"ms a 2147483645\r\n"), refused(b"ms a 2147483645\r\n"));
        // 13 bytes of line, 985 of data and 2 of terminator are exactly 1000.
        let line = |bytes| format!("set a 0 0 {bytes}\r\n").into_bytes();
        let mut state = ParseState::default();
        assert_eq!(parse(&mut state, &line(983), 1000), Ok(Parsed::Incomplete { more: 985 }));
        assert_eq!(parse(&mut ParseState::default(), &line(984), 1000), refused(&line(984)));
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
        assert_eq!(request(b"GET / HTTP/1.1\r\n"), Ok(Parsed::Quit { consumed: 16 }));
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
