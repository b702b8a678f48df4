//! The grammar of command lines: what memcached 1.6.18 takes, and with which data block. See the parent module.
//!
//! Everything that needs to know what a command means reads it here: the framing of requests, the matching of answers, and the
//! function `memcached-cache`.

use super::base64::{self, Decoded};
use super::number::{Number, signed, unsigned};
use super::{KEY_BYTES_MAX, Words};
use crate::error_reply::CommandError;
use crate::framing::{Expects, FramingError};

/// Words of a meta command from which on memcached refuses it.
const META_WORDS_MAX: usize = 20;
/// Longest opaque with its flag letter.
const OPAQUE_BYTES_MAX: usize = 32;
/// Words of a line that memcached splits off at a time.
const WORDS_AT_A_TIME: usize = 23;
/// Words of the longest command without flags and lists, and one more.
const WORDS_MAX: usize = 8;

/// A command's name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verb {
    /// `get`
    Get,
    /// `gets`
    Gets,
    /// `gat`
    Gat,
    /// `gats`
    Gats,
    /// `set`
    Set,
    /// `add`
    Add,
    /// `replace`
    Replace,
    /// `append`
    Append,
    /// `prepend`
    Prepend,
    /// `cas`
    Cas,
    /// `delete`
    Delete,
    /// `incr`
    Incr,
    /// `decr`
    Decr,
    /// `touch`
    Touch,
    /// `flush_all`
    FlushAll,
    /// `verbosity`
    Verbosity,
    /// `version`
    Version,
    /// `stats`
    Stats,
    /// `mg`
    MetaGet,
    /// `ms`
    MetaSet,
    /// `md`
    MetaDelete,
    /// `ma`
    MetaArithmetic,
    /// `me`
    MetaDebug,
    /// `mn`
    MetaNoop,
    /// `quit`, and requests of HTTP, which end a connection too.
    Quit,
}

impl Verb {
    /// The command with this name.
    #[inline]
    pub(super) fn of(name: &[u8]) -> Option<Self> {
        Some(match name {
            b"get" => Self::Get,
            b"gets" => Self::Gets,
            b"gat" => Self::Gat,
            b"gats" => Self::Gats,
            b"set" => Self::Set,
            b"add" => Self::Add,
            b"replace" => Self::Replace,
            b"append" => Self::Append,
            b"prepend" => Self::Prepend,
            b"cas" => Self::Cas,
            b"delete" => Self::Delete,
            b"incr" => Self::Incr,
            b"decr" => Self::Decr,
            b"touch" => Self::Touch,
            b"flush_all" => Self::FlushAll,
            b"verbosity" => Self::Verbosity,
            b"version" => Self::Version,
            b"stats" => Self::Stats,
            b"mg" => Self::MetaGet,
            b"ms" => Self::MetaSet,
            b"md" => Self::MetaDelete,
            b"ma" => Self::MetaArithmetic,
            b"me" => Self::MetaDebug,
            b"mn" => Self::MetaNoop,
            b"quit" => Self::Quit,
            _ => return None,
        })
    }
}

/// A command line that memcached accepts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Command<'a> {
    /// Its name.
    pub verb: Verb,
    /// Its first key as it is written, at most 250 bytes; empty if it has none.
    pub key: &'a [u8],
    /// The key is written in base64.
    pub base64: bool,
    /// What follows the key: further keys, or the flags of a meta command.
    pub rest: Words<'a>,
    /// The expiry time of `gat`, `gats` and `touch`, and the delay of `flush_all`; 0 if it has none.
    pub seconds: i32,
    /// The length of its data block without CR LF; `None`: the line is the whole command.
    pub block: Option<usize>,
    /// Whether memcached answers.
    pub expects: Expects,
}

impl<'a> Command<'a> {
    /// The command of a message that is exactly one, with its data block; `None`: it is not.
    #[inline]
    pub fn of_message(message: &'a [u8]) -> Option<Self> {
        let lf = crate::find_byte(b'\n', message)?;
        let line = message[..lf].strip_suffix(b"\r").unwrap_or(&message[..lf]);
        let command = read(line).ok()?;
        let rest = &message[lf + 1..];
        let is_whole = match command.block {
            None => rest.is_empty(),
            Some(bytes) => rest.len().checked_sub(2) == Some(bytes) && rest.ends_with(super::CRLF),
        };
        is_whole.then_some(command)
    }

    fn line(verb: Verb, expects: Expects) -> Self {
        let (key, rest) = (&[][..], Words(&[]));
        Self { verb, key, base64: false, rest, seconds: 0, block: None, expects }
    }

    /// The bytes of its key; `None` if it has none, or in base64 that memcached refuses.
    pub fn decoded_key<'b>(&self, into: &'b mut Decoded) -> Option<&'b [u8]>
    where
        'a: 'b,
    {
        match self.base64 {
            true => base64::decode(self.key, into),
            false => Some(self.key).filter(|key| !key.is_empty()),
        }
    }
}

/// A command line that is not executed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Refused {
    pub(super) error: FramingError,
    /// memcached says nothing, as `noreply` asks.
    pub(super) silent: bool,
    /// The data block that memcached takes nevertheless.
    pub(super) block: Option<usize>,
}

impl From<FramingError> for Refused {
    fn from(error: FramingError) -> Self {
        Self { error, silent: false, block: None }
    }
}

impl From<CommandError> for Refused {
    fn from(error: CommandError) -> Self {
        FramingError::Command(error).into()
    }
}

const WORDS: FramingError = FramingError::UnknownCommand;
const MALFORMED: FramingError = FramingError::BadCommand;

/// Reads a command line without its terminator.
#[inline]
pub(super) fn read(line: &[u8]) -> Result<Command<'_>, Refused> {
    // Nearly all commands of a cache are these, and are read by the framing, the chain and the function.
    if let Some(key) = line.strip_prefix(b"get ")
        && (1..=KEY_BYTES_MAX).contains(&key.len())
        && !crate::find::has_space_or_control(key)
    {
        return Ok(Command { key, ..Command::line(Verb::Get, Expects::Reply) });
    }
    match crate::find_byte(0, line) {
        None => read_text(line),
        Some(nul) => Err(cut_off(&line[..nul])),
    }
}

/// memcached does not see what follows a NUL. No client means that: the command is refused, as far as memcached would take it.
#[cold]
fn cut_off(line: &[u8]) -> Refused {
    match read_text(line) {
        Err(refused) => refused,
        Ok(Command { block, expects, .. }) => {
            Refused { error: MALFORMED, silent: expects == Expects::Nothing, block }
        }
    }
}

#[inline]
fn read_text(line: &[u8]) -> Result<Command<'_>, Refused> {
    let mut words = Words(line);
    let name = words.next().ok_or(WORDS)?;
    let Some(verb) = Verb::of(name) else { return unknown(name, words) };
    match verb {
        Verb::Get | Verb::Gets => retrieval(verb, words, 0),
        Verb::Gat | Verb::Gats => {
            let seconds = words.next().ok_or(WORDS)?;
            let seconds = signed(seconds).plain().ok_or(CommandError::Exptime)?;
            retrieval(verb, words, seconds)
        }
        Verb::Set | Verb::Add | Verb::Replace | Verb::Append | Verb::Prepend => {
            storage(verb, words, 0)
        }
        Verb::Cas => storage(verb, words, 1),
        Verb::Delete => delete(words),
        Verb::Incr | Verb::Decr | Verb::Touch => keyed(verb, words),
        Verb::FlushAll => flush_all(words),
        Verb::Verbosity => verbosity(words),
        Verb::MetaGet | Verb::MetaDelete | Verb::MetaArithmetic => meta(verb, words),
        Verb::MetaSet => meta_set(words),
        Verb::MetaDebug => meta_debug(words),
        Verb::Version | Verb::Stats | Verb::MetaNoop | Verb::Quit => {
            let rest = words;
            Ok(Command { rest, ..Command::line(verb, Expects::Reply) })
        }
    }
}

/// memcached hangs up on HTTP.
#[cold]
fn unknown<'a>(name: &'a [u8], words: Words<'a>) -> Result<Command<'a>, Refused> {
    let is_other = matches!(name[0], b'g' | b's' | b'a' | b'c' | b'i' | b'd' | b't');
    let last = words.take(WORDS_AT_A_TIME - 1).last().unwrap_or(name);
    let is_meta = name[0] == b'm' && name.len() == 2;
    if !is_other && !is_meta && last.starts_with(b"HTTP/") {
        return Ok(Command::line(Verb::Quit, Expects::Reply));
    }
    Err(WORDS.into())
}

/// KEY+; `gat` and `gats` are also answered without a key.
#[inline]
fn retrieval<'a>(verb: Verb, mut words: Words<'a>, seconds: i32) -> Result<Command<'a>, Refused> {
    let key = words.next();
    let touches = matches!(verb, Verb::Gat | Verb::Gats);
    if key.is_none() && !touches {
        return Err(WORDS.into());
    }
    let key = key.unwrap_or_default();
    let mut keys = words.clone();
    if key.len() > KEY_BYTES_MAX || keys.any(|key| key.len() > KEY_BYTES_MAX) {
        return Err(MALFORMED.into());
    }
    Ok(Command { key, rest: words, seconds, ..Command::line(verb, Expects::Reply) })
}

/// The first words of a line behind the name, and how many there are: with [`WORDS_MAX`], that many or more.
struct Few<'a> {
    words: [&'a [u8]; WORDS_MAX],
    count: usize,
    /// The last word is `noreply`, which is looked at before anything else.
    silent: bool,
}

impl<'a> Few<'a> {
    /// An error unless there are this many.
    fn of(words: Words<'a>, counts: std::ops::RangeInclusive<usize>) -> Result<Self, Refused> {
        let mut few = Self { words: [&[]; WORDS_MAX], count: 0, silent: false };
        for (place, word) in few.words.iter_mut().zip(words) {
            *place = word;
            few.count += 1;
        }
        if !counts.contains(&few.count) {
            return Err(WORDS.into());
        }
        few.silent = few.count > 0 && few.words[few.count - 1] == b"noreply";
        Ok(few)
    }

    fn key(&self) -> Result<&'a [u8], Refused> {
        let key = self.words[0];
        if key.len() > KEY_BYTES_MAX { Err(self.refuse(MALFORMED)) } else { Ok(key) }
    }

    fn refuse(&self, error: FramingError) -> Refused {
        let silent = self.silent && !mutants::on("memcached_error_after_noreply");
        Refused { error, silent, block: None }
    }

    fn command(&self, verb: Verb, key: &'a [u8]) -> Command<'a> {
        let expects = if self.silent { Expects::Nothing } else { Expects::Reply };
        Command { key, ..Command::line(verb, expects) }
    }
}

/// KEY FLAGS EXPTIME BYTES, `extra` more numbers, [noreply]. Any other last word is ignored, as memcached does.
fn storage(verb: Verb, words: Words<'_>, extra: usize) -> Result<Command<'_>, Refused> {
    let few = Few::of(words, 4 + extra..=5 + extra)?;
    let key = few.key()?;
    let numbers = (|| {
        let mut flags = unsigned(few.words[1], 32).any();
        if mutants::on("memcached_flags_unchecked") {
            flags = flags.or(Some((0, true)));
        }
        let flags = flags?;
        let exptime = signed(few.words[2]).any()?;
        let bytes = signed(few.words[3]).any()?;
        let cas = match extra {
            0 => Number::Plain(0),
            _ => unsigned(few.words[4], 64),
        };
        let are_plain = flags.1 && exptime.1 && bytes.1 && cas.any()?.1;
        Some((block_of(bytes.0)?, are_plain))
    })();
    match numbers {
        None if mutants::on("memcached_refused_data") => {
            let block = signed(few.words[3]).any().and_then(|bytes| block_of(bytes.0));
            Err(Refused { block, ..few.refuse(MALFORMED) })
        }
        None => Err(few.refuse(MALFORMED)),
        // memcached reads these as other numbers than they are, or newer versions do not take them.
        Some((block, false)) => Err(Refused { block: Some(block), ..few.refuse(MALFORMED) }),
        Some((block, true)) => Ok(Command { block: Some(block), ..few.command(verb, key) }),
    }
}

/// The length of a data block that memcached reads.
fn block_of(bytes: i32) -> Option<usize> {
    usize::try_from(bytes).ok().filter(|bytes| *bytes <= i32::MAX as usize - 2)
}

/// KEY NUMBER [noreply]
fn keyed(verb: Verb, words: Words<'_>) -> Result<Command<'_>, Refused> {
    let few = Few::of(words, 2..=3)?;
    let key = few.key()?;
    let (number, error) = match verb {
        Verb::Touch => (signed(few.words[1]).plain(), CommandError::Exptime),
        _ => (unsigned(few.words[1], 64).plain().map(|_| 0), CommandError::Delta),
    };
    let seconds = number.ok_or_else(|| few.refuse(error.into()))?;
    Ok(Command { seconds, ..few.command(verb, key) })
}

/// KEY [0] [noreply]; the 0 is a delay that memcached no longer supports.
fn delete(words: Words<'_>) -> Result<Command<'_>, Refused> {
    let mut few = Few::of(words, 1..=3)?;
    // A key may have this name.
    few.silent &= few.count > 1;
    let is_valid = match few.count {
        1 => true,
        2 => few.silent || few.words[1] == b"0",
        _ => few.silent && few.words[1] == b"0",
    };
    if !is_valid {
        return Err(few.refuse(CommandError::Delete.into()));
    }
    let key = few.key()?;
    Ok(few.command(Verb::Delete, key))
}

/// [DELAY] [noreply]
fn flush_all(words: Words<'_>) -> Result<Command<'_>, Refused> {
    let few = Few::of(words, 0..=2)?;
    let mut seconds = 0;
    if few.count != usize::from(few.silent) {
        let delay = signed(few.words[0]).plain();
        seconds = delay.ok_or_else(|| few.refuse(CommandError::Exptime.into()))?;
    }
    Ok(Command { seconds, ..few.command(Verb::FlushAll, &[]) })
}

/// LEVEL [noreply]
fn verbosity(words: Words<'_>) -> Result<Command<'_>, Refused> {
    let few = Few::of(words, 1..=2)?;
    unsigned(few.words[0], 32).plain().ok_or_else(|| few.refuse(MALFORMED))?;
    Ok(few.command(Verb::Verbosity, &[]))
}

/// What the flags of a meta command say.
#[derive(Default)]
struct Flags {
    quiet: bool,
    base64: bool,
    returns_key: bool,
    mode: Option<u8>,
    long_opaque: bool,
}

/// KEY [FLAG ...]
#[inline]
fn meta(verb: Verb, mut words: Words<'_>) -> Result<Command<'_>, Refused> {
    let key = words.next().ok_or(WORDS)?;
    if key.len() > KEY_BYTES_MAX {
        return Err(MALFORMED.into());
    }
    // The name and the key are words too.
    if words.clone().nth(META_WORDS_MAX - 3).is_some() {
        return Err(match verb {
            Verb::MetaGet => CommandError::MetaGetFlags,
            _ => CommandError::MetaFlags,
        }
        .into());
    }
    let flags = flags(words.clone(), key).map_err(|error| match verb {
        Verb::MetaGet => error,
        _ => CommandError::AnyFlag.into(),
    })?;
    let is_mode = |mode| matches!(mode, b'I' | b'+' | b'D' | b'-');
    if verb == Verb::MetaArithmetic && !flags.mode.is_none_or(is_mode) {
        return Err(CommandError::ArithmeticMode.into());
    }
    if flags.long_opaque {
        return Err(CommandError::Opaque.into());
    }
    if flags.base64 && breaks_lines(key) {
        return Err(MALFORMED.into());
    }
    Ok(Command { key, base64: flags.base64, rest: words, ..Command::line(verb, flags.expects()) })
}

impl Flags {
    fn expects(&self) -> Expects {
        if self.quiet { Expects::ReplyOrNothing } else { Expects::Reply }
    }
}

/// KEY BYTES [FLAG ...]. With wrong flags memcached answers with an error and takes the data block.
fn meta_set(mut words: Words<'_>) -> Result<Command<'_>, Refused> {
    let key = words.next().ok_or(WORDS)?;
    let bytes = words.next().filter(|_| key.len() <= KEY_BYTES_MAX).ok_or(MALFORMED)?;
    if words.clone().nth(META_WORDS_MAX - 4).is_some() {
        return Err(CommandError::MetaFlags.into());
    }
    let bytes = signed(bytes).any().ok_or(MALFORMED)?;
    let block = Some(block_of(bytes.0).ok_or(MALFORMED)?);
    let refuse = |error| Refused { error, silent: false, block };
    let flags = flags(words.clone(), key).map_err(refuse)?;
    let is_mode = |mode| matches!(mode, b'E' | b'A' | b'P' | b'R' | b'S');
    if !flags.mode.is_none_or(is_mode) {
        return Err(refuse(CommandError::SetMode.into()));
    }
    if flags.long_opaque {
        return Err(refuse(CommandError::Opaque.into()));
    }
    if !bytes.1 || flags.base64 && breaks_lines(key) {
        return Err(refuse(MALFORMED));
    }
    let command = Command::line(Verb::MetaSet, flags.expects());
    Ok(Command { key, base64: flags.base64, rest: words, block, ..command })
}

/// KEY [b]; the rest is ignored.
fn meta_debug(mut words: Words<'_>) -> Result<Command<'_>, Refused> {
    let key = words.next().filter(|key| key.len() <= KEY_BYTES_MAX).ok_or(MALFORMED)?;
    let base64 = words.clone().next() == Some(b"b");
    if base64 && (base64::decode(key, &mut [0; KEY_BYTES_MAX]).is_none() || breaks_lines(key)) {
        return Err(MALFORMED.into());
    }
    Ok(Command { key, base64, rest: words, ..Command::line(Verb::MetaDebug, Expects::Reply) })
}

/// Whether a key in base64 stands for bytes that, written as they are, would end a line of the answer. memcached 1.6.18 writes them so in answers to `mg`
/// and `me` if the item was created by `mg` or `ma` with `N`, and in `stats cachedump`: a client that stores such a key could make up answers to other
/// requests.
fn breaks_lines(key: &[u8]) -> bool {
    let mut decoded = [0; KEY_BYTES_MAX];
    base64::decode(key, &mut decoded).is_some_and(|key| key.contains(&b'\n'))
}

/// Reads flags as memcached does: the last wrong value names the error, a repeated or unknown flag ends the reading.
#[inline]
fn flags<'a>(words: Words<'a>, key: &[u8]) -> Result<Flags, FramingError> {
    let mut found = Flags::default();
    let (mut seen, mut error) = (0u128, None);
    for word in words {
        let (name, value) = (word[0], &word[1..]);
        if name >= 127 || seen >> name & 1 != 0 {
            return Err(CommandError::DuplicateFlag.into());
        }
        seen |= 1 << name;
        let mut check = |is_valid: bool, wrong: FramingError| {
            if !is_valid {
                error = Some(wrong);
            }
        };
        match name {
            b'b' => {
                found.base64 = true;
                let is_valid = base64::decode(key, &mut [0; KEY_BYTES_MAX]).is_some();
                check(is_valid, CommandError::Key.into());
            }
            b'N' | b'T' | b'R' => {
                check(signed(value).plain().is_some(), CommandError::FlagValue.into());
            }
            b'F' if unsigned(value, 32).plain().is_none() => {
                error.get_or_insert(MALFORMED);
            }
            b'C' => check(unsigned(value, 64).plain().is_some(), CommandError::FlagValue.into()),
            // Newer versions know `E` and `x`. This one answers that they are invalid.
            b'E' => check(unsigned(value, 64).plain().is_some(), CommandError::InvalidFlag.into()),
            b'M' => {
                found.mode = value.first().copied();
                check(value.len() == 1, CommandError::ModeLength.into());
            }
            b'J' => check(unsigned(value, 64).plain().is_some(), CommandError::Initial.into()),
            b'D' => check(unsigned(value, 64).plain().is_some(), CommandError::DeltaValue.into()),
            b'O' => found.long_opaque = word.len() > OPAQUE_BYTES_MAX,
            b'k' => found.returns_key = true,
            b'q' => found.quiet = true,
            b'F' | b'P' | b'L' | b'l' | b's' | b't' | b'c' | b'f' | b'v' | b'h' | b'u' | b'I'
            | b'x' => {}
            _ => return Err(CommandError::InvalidFlag.into()),
        }
    }
    error.map_or(Ok(found), Err)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The short way of `read` for the usual get, beside the long one.
    #[test]
    fn both_ways_read_a_get_alike() {
        let long = "k".repeat(KEY_BYTES_MAX);
        let too_long = format!("{long}k");
        let keys = ["a", "0123456789", "k\u{e9}y", "a\tb", "a\x7f", "a b", " a", "a ", ""];
        for key in keys.into_iter().chain([&*long, &*too_long]) {
            let line = format!("get {key}");
            assert_eq!(read(line.as_bytes()), read_text(line.as_bytes()), "{line:?}");
        }
    }
}
