//! `memcached`: the text protocol of memcached, classic and meta commands (memcached,
//! doc/protocol.txt; behaviour compared with memcached 1.6.18).
//!
//! A request is one complete command as the client sent it: the command line with its terminator and,
//! for commands that carry one, the data block with its CR LF. A reply is one complete response, from
//! its first line to its last CR LF; several values and their `END` are one response. The deprecated
//! binary protocol is refused at its first byte, 0x80.
//!
//! # Requests
//!
//! ```text
//! get|gets KEY+                                  gat|gats EXPTIME KEY+
//! set|add|replace|append|prepend KEY FLAGS EXPTIME BYTES [noreply]   + data block
//! cas KEY FLAGS EXPTIME BYTES CAS [noreply]                          + data block
//! delete KEY [0] [noreply]                       incr|decr KEY VALUE [noreply]
//! touch KEY EXPTIME [noreply]                    flush_all [DELAY] [noreply]
//! verbosity LEVEL [noreply]                      version      stats [ARG ...]      quit
//! mg|md|ma|me KEY [FLAG ...]                     ms KEY BYTES [FLAG ...]  + data block
//! mn
//! ```
//!
//! Words are separated by spaces and a bare LF ends a command line as well as CR LF does, as in
//! memcached itself. A key has 1 to 250 bytes, also control characters: memcached does not check that. A command
//! line has at most 2048 bytes, those of `get`, `gets`, `gat` and `gats` as many as a message may have.
//!
//! What memcached checks is checked here too (`command.rs`): the number of words, flags, expiry times, lengths, numbers for `cas`,
//! flags of meta commands, keys in base64. So what is forwarded is what memcached executes, and the data block that a line has here is
//! the one that memcached takes. After an error the stream goes on where memcached goes on:
//!
//! * An unknown command is refused with `ERROR`, a malformed one with the text of memcached 1.6.18, or without one if its last word is
//!   `noreply`. It has no data block, whatever its line says: what follows are commands. Commands
//!   that administer memcached's own memory and log (`slabs`, `lru`, `watch`, ...) are unknown, and `bget` is.
//! * `ms` with wrong flags is refused, and its data block is skipped.
//! * A block that does not end where its length says is refused; what is behind that length are commands.
//! * A block that is longer than a message may be is refused by its command line, and skipped.
//! * Numbers have digits only, expiry times also a minus. memcached also takes white space, a plus, and numbers that it cuts to 32
//!   bits; newer versions take them differently. Such a line, and one with a NUL, behind which memcached sees nothing, is refused. The data block
//!   that memcached 1.6.18 would take is skipped.
//! * A key in base64 that stands for bytes with an LF is refused where memcached may write these bytes into its answer: in `me`, and in
//!   `mg` with `k`.
//! * The flags `E` and `x` of newer versions are passed on.
//! * `quit` is [`Parsed::Quit`], and so is an HTTP request, on which memcached hangs up.
//! * A line that is too long ends the connection.
//! * With `noreply` a command expects [`Expects::Nothing`]. The meta flag `q` only suppresses the
//!   nominal outcome (a miss of `mg`, the success of `ms`, `md` and `ma`), so a quiet command is
//!   [`Expects::ReplyOrNothing`]. `mn` and `me` always answer.
//!
//! # Responses
//!
//! Their first word determines where they end, independent of the request:
//!
//! ```text
//! (VALUE KEY FLAGS BYTES [CAS] + data block)* END        VA BYTES [FLAG ...] + data block
//! (STAT ...)* END     (ITEM ...)* END     (PREFIX ...)* END
//! STORED  NOT_STORED  EXISTS  NOT_FOUND  DELETED  TOUCHED  OK  RESET  VERSION text  NUMBER
//! HD|NF|NS|EX [FLAG ...]     EN     MN     ME ...     ERROR|CLIENT_ERROR|SERVER_ERROR [text]
//! ```
//!
//! Every line ends in CR LF and has at most 2048 bytes. An error line may also end a list early.
//! Anything else is [`FramingError::BadResponse`], from a backend as from a kernel.
//!
//! Responses carry no number, so a backend's response is compared with the command that it would answer
//! ([`super::Framing::fits`]): the keys of `VALUE` lines, the flags `k` and `O` of meta commands where the command has
//! them, else the kind of the response. An error line fits every command. memcached writes a key in base64, or not, as it was when it was
//! stored, not as it is asked for.
//!
//! `noreply` and quiet commands are never sent to a backend: memcached still answers them when they fail, and one
//! unexpected answer would shift all later ones. A kernel that does not need an answer ignores it.

mod base64;
mod command;
mod datagram;
mod matching;
mod number;
mod request;
mod response;

pub use base64::Decoded;
pub use command::{Command, Verb};
pub use datagram::{Assembly, Piece, UDP_HEADER_BYTES, UdpHeader, bytes_left, is_request};

#[cfg(doc)]
use super::Parsed;
use super::{Expects, Fence, FramingConfigError, FramingError, Grammar, ParseState, Sizes};
use crate::error_reply::ErrorReply;

/// Longest key in bytes.
pub const KEY_BYTES_MAX: usize = 250;
/// Longest command or response line in bytes with its terminator, other than retrieval commands.
const LINE_BYTES_MAX: usize = 2048;
/// Ends response lines and data blocks.
const CRLF: &[u8] = b"\r\n";

pub(super) struct Memcached;

impl Grammar for Memcached {
    const WIRE: &'static str = "a command or a response of memcached's text protocol";

    const WORDS: &'static [&'static str] = &[
        "get ",
        "gats ",
        "set ",
        "cas ",
        "delete ",
        "incr ",
        "touch ",
        "flush_all",
        "noreply",
        "version",
        "stats",
        "quit",
        "mg ",
        "ms ",
        "md ",
        "ma ",
        "me ",
        "mn",
        " q",
        "VALUE ",
        "END\r\n",
        "VA ",
        "HD",
        "STAT ",
        "ITEM ",
        "PREFIX ",
        "STORED",
        "ERROR",
        "SERVER_ERROR ",
    ];

    fn sample_request(&self, data: &[u8]) -> Vec<u8> {
        [format!("set key 0 0 {}\r\n", data.len()).as_bytes(), data, CRLF].concat()
    }

    fn sample_reply(&self, data: &[u8]) -> Vec<u8> {
        [format!("VALUE key 0 {}\r\n", data.len()).as_bytes(), data, b"\r\nEND\r\n"].concat()
    }

    fn malformed(&self, _max: usize) -> Vec<Vec<u8>> {
        // The binary protocol: what is wrong with a command ends no connection.
        [&b"\x80\x01"[..], b"\x80", b"\x80get a\r\n"].map(<[u8]>::to_vec).to_vec()
    }

    fn check(&self, _sizes: &Sizes) -> Result<(), FramingConfigError> {
        Ok(())
    }

    fn request_bytes_max(&self, max: usize) -> usize {
        max
    }

    fn parse_request(
        &self,
        state: &mut ParseState,
        buffer: &[u8],
        max: usize,
    ) -> Result<super::Parsed, FramingError> {
        request::parse(state, buffer, max)
    }

    fn encode_reply(&self, reply: &[u8], out: &mut Vec<u8>) -> Result<(), FramingError> {
        response::check(reply)?;
        out.extend_from_slice(reply);
        Ok(())
    }

    fn encode_request(&self, request: &[u8], out: &mut Vec<u8>) -> Result<(), FramingError> {
        request::check(request)?;
        out.extend_from_slice(request);
        Ok(())
    }

    fn forward(
        &self,
        request: &[u8],
        expects: Expects,
        out: &mut Vec<u8>,
    ) -> Result<(), FramingError> {
        if request::one_command(request)? != expects {
            return Err(FramingError::Unframable);
        }
        out.extend_from_slice(request);
        Ok(())
    }

    fn fence(&self) -> Option<Fence> {
        Some(Fence { request: b"mn\r\n", response: b"MN\r\n" })
    }

    fn parse_response(
        &self,
        state: &mut ParseState,
        buffer: &[u8],
        max: usize,
    ) -> Result<super::Parsed, FramingError> {
        response::parse(state, buffer, max)
    }

    fn mark<'a>(&self, request: &'a [u8]) -> &'a [u8] {
        matching::mark(request)
    }

    fn fits(&self, mark: &[u8], response: &[u8]) -> bool {
        matching::fits(mark, response)
    }

    fn error_reply(&self, what: ErrorReply) -> Option<&'static [u8]> {
        Some(match what {
            ErrorReply::Command(error) => error.reply(),
            ErrorReply::UnknownCommand => b"ERROR\r\n",
            ErrorReply::BadCommand => b"CLIENT_ERROR bad command line format\r\n",
            ErrorReply::BadDataBlock => b"CLIENT_ERROR bad data chunk\r\n",
            // The text that client libraries recognize.
            ErrorReply::TooLong => b"SERVER_ERROR object too large for cache\r\n",
            ErrorReply::OutOfCapacity => b"SERVER_ERROR out of capacity\r\n",
            ErrorReply::Timeout => b"SERVER_ERROR timed out\r\n",
            ErrorReply::Failed => b"SERVER_ERROR request failed\r\n",
        })
    }
}

/// The words of a line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Words<'a>(&'a [u8]);

impl<'a> Words<'a> {
    /// The rest of the line.
    pub fn text(&self) -> &'a [u8] {
        self.0
    }
}

impl<'a> Iterator for Words<'a> {
    type Item = &'a [u8];

    #[inline]
    fn next(&mut self) -> Option<&'a [u8]> {
        let mut text = self.0;
        while let [b' ', rest @ ..] = text {
            text = rest;
        }
        let (word, rest) = text.split_at(crate::find_byte(b' ', text).unwrap_or(text.len()));
        self.0 = rest;
        (!word.is_empty()).then_some(word)
    }
}

/// A decimal number of at most ten digits, without a sign.
fn decimal(word: &[u8]) -> Option<usize> {
    if word.is_empty() || word.len() > 10 {
        return None;
    }
    let mut value = 0u64;
    for byte in word {
        let digit = byte.wrapping_sub(b'0');
        if digit > 9 {
            return None;
        }
        value = value * 10 + u64::from(digit);
    }
    usize::try_from(value).ok()
}
