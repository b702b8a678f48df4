//! Test messages of a function: a file of messages with what becomes of them, and commands.
//!
//! ```text
//! request "ping"        reply "pong"
//! request hex:00000009  drop
//! reply "x"             pass
//! set high 5
//! read count 2
//! ```

use std::fmt::Write as _;

use builtins::Code;
use onpath::{Direction, Function, MESSAGES_MAX, Merge, Messages, Outcome, Sizes, Spec};

/// What becomes of a message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    Pass,
    Drop,
    Reply(Vec<u8>),
    Rewrite(Vec<u8>),
    Steer(u32),
    Deliver,
}

/// A line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Step {
    Message(Direction, Vec<u8>, Verdict),
    Set(String, u64),
    Read(String, u64),
    Reset,
    /// The messages before it and those behind it are different batches.
    Batch,
}

/// Steps with the numbers of their lines, from 1.
pub(crate) type Script = Vec<(usize, Step)>;

/// What did not come true.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Difference {
    pub(crate) line: usize,
    pub(crate) expected: String,
    pub(crate) found: String,
}

/// Longest messages of a script.
const MESSAGE_BYTES_MAX: usize = 65_536;
const SIZES: Sizes = Sizes { message_bytes: MESSAGE_BYTES_MAX, reply_bytes: MESSAGE_BYTES_MAX };

/// Reads a script. The error names the line.
pub(crate) fn parse(text: &str) -> Result<Script, String> {
    let mut script = Script::new();
    for (number, line) in (1..).zip(text.lines()) {
        if let Some(step) = step(line.trim()).map_err(|why| format!("line {number}: {why}"))? {
            script.push((number, step));
        }
    }
    Ok(script)
}

fn step(line: &str) -> Result<Option<Step>, String> {
    let (word, rest) = line.split_once(char::is_whitespace).unwrap_or((line, ""));
    let rest = rest.trim_start();
    let register = || -> Result<(String, u64), String> {
        let mut words = rest.split('#').next().unwrap_or_default().split_whitespace();
        let words = (words.next(), words.next().and_then(|word| word.parse().ok()), words.next());
        let (Some(name), Some(value), None) = words else {
            return Err(format!("`{word} NAME NUMBER`, not {line:?}"));
        };
        Ok((name.to_owned(), value))
    };
    let direction = match word {
        "" => return Ok(None),
        _ if word.starts_with('#') => return Ok(None),
        "set" => return register().map(|(name, value)| Some(Step::Set(name, value))),
        "read" => return register().map(|(name, value)| Some(Step::Read(name, value))),
        "reset" if rest.is_empty() => return Ok(Some(Step::Reset)),
        "batch" if rest.is_empty() => return Ok(Some(Step::Batch)),
        "request" => Direction::Requests,
        "reply" => Direction::Replies,
        _ => {
            let right = "request, reply, batch, set, read or reset";
            return Err(format!("a line begins with {right}, not with {word:?}"));
        }
    };
    let (message, rest) = bytes(rest)?;
    let (verdict, rest) = verdict(rest.trim_start())?;
    if !rest.trim().is_empty() && !rest.trim().starts_with('#') {
        return Err(format!("nothing follows the verdict, but there is {:?}", rest.trim()));
    }
    Ok(Some(Step::Message(direction, message, verdict)))
}

fn verdict(text: &str) -> Result<(Verdict, &str), String> {
    let (word, rest) = text.split_once(char::is_whitespace).unwrap_or((text, ""));
    let rest = rest.trim_start();
    Ok(match word {
        "pass" => (Verdict::Pass, rest),
        "drop" => (Verdict::Drop, rest),
        "deliver" => (Verdict::Deliver, rest),
        "reply" => bytes(rest).map(|(bytes, rest)| (Verdict::Reply(bytes), rest))?,
        "rewrite" => bytes(rest).map(|(bytes, rest)| (Verdict::Rewrite(bytes), rest))?,
        "steer" => {
            let (mqueue, rest) = rest.split_once(char::is_whitespace).unwrap_or((rest, ""));
            let mqueue = mqueue.parse().map_err(|_| "`steer` has the number of an mqueue")?;
            (Verdict::Steer(mqueue), rest)
        }
        _ => {
            let right = "pass, drop, reply, rewrite, steer or deliver";
            return Err(format!("a verdict is {right}, not {word:?}"));
        }
    })
}

/// Bytes as a text in quotes, or as `hex:`, and what follows them.
fn bytes(text: &str) -> Result<(Vec<u8>, &str), String> {
    let right = "bytes are \"text\" with \\n, \\r, \\t, \\\\, \\\" and \\xNN, or hex:NN";
    if let Some(rest) = text.strip_prefix("hex:") {
        let end = rest.find(char::is_whitespace).unwrap_or(rest.len());
        let (digits, rest) = rest.split_at(end);
        let found = unhex(digits).ok_or_else(|| format!("{digits:?} is not hex: {right}"))?;
        return bounded(found).map(|found| (found, rest));
    }
    let Some(quoted) = text.strip_prefix('"') else { return Err(right.to_owned()) };
    let mut found = Vec::new();
    let mut at = quoted.char_indices();
    while let Some((place, c)) = at.next() {
        let byte = match c {
            '"' => return bounded(found).map(|found| (found, &quoted[place + 1..])),
            '\\' => match at.next() {
                Some((_, 'n')) => b'\n',
                Some((_, 'r')) => b'\r',
                Some((_, 't')) => b'\t',
                Some((_, '"')) => b'"',
                Some((_, '\\')) => b'\\',
                Some((escape, 'x')) => {
                    let digits = quoted.get(escape + 1..escape + 3);
                    let byte = digits.and_then(unhex).ok_or_else(|| right.to_owned())?;
                    at.nth(1);
                    byte[0]
                }
                _ => return Err(right.to_owned()),
            },
            other => {
                found.extend_from_slice(other.encode_utf8(&mut [0; 4]).as_bytes());
                continue;
            }
        };
        found.push(byte);
    }
    Err(format!("a text does not end: {right}"))
}

fn bounded(bytes: Vec<u8>) -> Result<Vec<u8>, String> {
    match bytes.len() {
        0..=MESSAGE_BYTES_MAX => Ok(bytes),
        len => Err(format!("a message has at most {MESSAGE_BYTES_MAX} bytes, not {len}")),
    }
}

fn unhex(digits: &str) -> Option<Vec<u8>> {
    let digit = |byte: u8| (byte as char).to_digit(16).map(|digit| digit as u8);
    let (pairs, rest) = digits.as_bytes().as_chunks::<2>();
    let pair = |[high, low]: &[u8; 2]| Some(digit(*high)? << 4 | digit(*low)?);
    rest.is_empty().then(|| pairs.iter().map(pair).collect()).flatten()
}

/// Bytes as a script has them.
pub(crate) fn quote(bytes: &[u8]) -> String {
    let mut text = "\"".to_owned();
    for byte in bytes {
        match byte {
            b'"' | b'\\' => text.extend(['\\', *byte as char]),
            b'\n' => text.push_str("\\n"),
            b'\r' => text.push_str("\\r"),
            b'\t' => text.push_str("\\t"),
            0x20..=0x7e => text.push(*byte as char),
            _ => {
                let _ = write!(text, "\\x{byte:02x}");
            }
        }
    }
    text.push('"');
    text
}

impl Verdict {
    /// As a script has it.
    pub(crate) fn text(&self) -> String {
        match self {
            Self::Pass => "pass".to_owned(),
            Self::Drop => "drop".to_owned(),
            Self::Reply(bytes) => format!("reply {}", quote(bytes)),
            Self::Rewrite(bytes) => format!("rewrite {}", quote(bytes)),
            Self::Steer(mqueue) => format!("steer {mqueue}"),
            Self::Deliver => "deliver".to_owned(),
        }
    }

    fn of(messages: &Messages, index: usize) -> Self {
        match messages.outcome(index) {
            Outcome::Pass if messages.is_written(index) => {
                Self::Rewrite(messages.bytes(index).to_vec())
            }
            Outcome::Pass => Self::Pass,
            Outcome::Drop(_) => Self::Drop,
            Outcome::Reply => Self::Reply(messages.bytes(index).to_vec()),
            Outcome::Steer(mqueue) => Self::Steer(mqueue),
            Outcome::Deliver => Self::Deliver,
        }
    }
}

/// An instance of a module for tests.
pub(crate) struct Harness {
    function: Box<dyn Function>,
    messages: Messages,
}

impl Harness {
    /// An instance with the parameters of `spec`.
    pub(crate) fn new(spec: &Spec, module: &[u8]) -> Result<Self, String> {
        let spec = &Spec { dictionary: Some("test".to_owned()), ..spec.clone() };
        let made = Code::open(spec, module).and_then(|code| code.instance(spec, SIZES));
        let function = made.map_err(|error| error.to_string())?;
        Ok(Self { function, messages: Messages::new(MESSAGE_BYTES_MAX, MESSAGE_BYTES_MAX) })
    }

    /// What becomes of messages that arrive together. The error says why the call failed.
    pub(crate) fn decide(
        &mut self,
        direction: Direction,
        messages: &[&[u8]],
    ) -> Result<Vec<Verdict>, String> {
        let mut verdicts = Vec::with_capacity(messages.len());
        let mut rest = messages.iter().peekable();
        while rest.peek().is_some() {
            self.messages.clear();
            while let Some(message) = rest.next_if(|message| self.messages.has_room(message.len()))
            {
                self.messages.push(message);
            }
            self.function.decide(direction, &mut self.messages).map_err(|why| why.0)?;
            let decided = (0..self.messages.len()).map(|index| Verdict::of(&self.messages, index));
            verdicts.extend(decided);
        }
        Ok(verdicts)
    }

    /// Runs a script. With `alone` each message is a batch of its own. Returns what is not as expected; the error says at which line the
    /// function failed.
    pub(crate) fn run(&mut self, script: &Script, alone: bool) -> Result<Vec<Difference>, String> {
        let mut differences = Vec::new();
        let mut at = 0;
        while let Some((line, step)) = script.get(at) {
            let failed = |why: String| format!("line {line}: the function failed: {why}");
            match step {
                Step::Message(direction, ..) => {
                    let batch: Vec<_> = script[at..]
                        .iter()
                        .map_while(|(line, step)| match step {
                            Step::Message(of, bytes, verdict) if of == direction => {
                                Some((*line, &bytes[..], verdict))
                            }
                            _ => None,
                        })
                        .take(if alone { 1 } else { MESSAGES_MAX })
                        .collect();
                    at += batch.len();
                    let messages: Vec<&[u8]> = batch.iter().map(|(_, bytes, _)| *bytes).collect();
                    let found = self.decide(*direction, &messages).map_err(failed)?;
                    for ((line, _, expected), found) in batch.into_iter().zip(found) {
                        if *expected != found {
                            let (expected, found) = (expected.text(), found.text());
                            differences.push(Difference { line, expected, found });
                        }
                    }
                    continue;
                }
                Step::Batch => {}
                Step::Reset => self.function.reset().map_err(|why| failed(why.0))?,
                Step::Set(name, value) => {
                    let register = self.register(name).map_err(failed)?;
                    if self.function.registers()[register].merge != Merge::Setting {
                        return Err(format!("line {line}: {name:?} is no setting"));
                    }
                    self.function.write(register, *value).map_err(|why| failed(why.0))?;
                }
                Step::Read(name, expected) => {
                    let register = self.register(name).map_err(failed)?;
                    let found = self.function.read().map_err(|why| failed(why.0))?[register];
                    if found != *expected {
                        let (expected, found) = (expected.to_string(), found.to_string());
                        differences.push(Difference { line: *line, expected, found });
                    }
                }
            }
            at += 1;
        }
        Ok(differences)
    }

    fn register(&self, name: &str) -> Result<usize, String> {
        let registers = self.function.registers();
        let found = registers.iter().position(|register| &*register.name == name);
        found.ok_or_else(|| {
            let names: Vec<&str> = registers.iter().map(|register| &*register.name).collect();
            format!("it has no register {name:?}: it has {}", names.join(", "))
        })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_script_is_read_line_by_line() {
        let text = "# comment\n\nrequest \"a b\\x00\\\"\" pass\nreply hex:00ff rewrite \"\\n\"\nrequest \"\" steer 7 # seven\nbatch\nset high 3 # three\nread low 18446744073709551615\nreset\n";
        let expected = [
            (3, Step::Message(Direction::Requests, b"a b\0\"".to_vec(), Verdict::Pass)),
            (4, Step::Message(Direction::Replies, vec![0, 255], Verdict::Rewrite(b"\n".to_vec()))),
            (5, Step::Message(Direction::Requests, vec![], Verdict::Steer(7))),
            (6, Step::Batch),
            (7, Step::Set("high".into(), 3)),
            (8, Step::Read("low".into(), u64::MAX)),
            (9, Step::Reset),
        ];
        assert_eq!(parse(text).unwrap(), expected);
    }

    #[test]
    fn a_wrong_line_is_named() {
        for (text, expected) in [
            ("\nask \"a\" pass", "line 2: a line begins with request"),
            ("request a pass", "line 1: bytes are"),
            ("request \"a pass", "does not end"),
            ("request \"a\\q\" pass", "bytes are"),
            ("request \"\\x0\u{e9}\" pass", "bytes are"),
            ("request hex:0 pass", "is not hex"),
            ("request \"a\" pas", "a verdict is"),
            ("request \"a\"", "a verdict is"),
            ("request \"a\" pass pass", "nothing follows"),
            ("request \"a\" steer x", "the number of an mqueue"),
            ("set high", "`set NAME NUMBER`"),
            ("reset all", "a line begins with"),
        ] {
            let error = parse(text).unwrap_err();
            assert!(error.contains(expected), "{text}: {error}");
        }
    }

    proptest! {
        #[test]
        fn quoted_bytes_are_read_again(found: Vec<u8>, rest in " ?pass.*") {
            let text = format!("{}{rest}", quote(&found));
            prop_assert_eq!(bytes(&text), Ok((found, &rest[..])));
        }

        #[test]
        fn any_text_is_read_without_a_panic(text in ".*", line in "(request|reply|set|read) [\"\\\\xhe:0a ]*") {
            let _ = (parse(&text), parse(&line));
        }
    }
}
