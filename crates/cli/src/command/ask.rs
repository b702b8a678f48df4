//! `serval ask URL`.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use clap::Args;
use serde_json::json;
use wire::framing::Framing;

use super::bench::{Hex, hex, time};
use super::{Failure, bytes};
use crate::screen::Screen;
use bench::Target;
use bench::client::ask::{How, ask};

pub(super) const HELP: &str = "\
Sends one message and prints the reply: as text if it is printable, else as a hex dump. Over TCP the
service's framing delimits the reply; with raw or fixed:N it ends when no byte has arrived for
50 ms, unless --reply-bytes gives its length.

Examples:
  serval ask udp://127.0.0.1:9000 hello
  serval ask udp://127.0.0.1:9000 --hex 0000803f
  serval ask tcp://127.0.0.1:9000 hello --framing length:u16
  serval ask tcp://127.0.0.1:9000 --payload question.bin --framing fixed:784 --reply-bytes 44
  serval ask shm:///run/serval/echo hello --json
  printf 'get key\\r\\n' | serval ask tcp://127.0.0.1:11211 - --framing memcached

Exit codes: 0 a reply arrived, 1 no reply, 2 invalid command line or message.";

#[derive(Args, Debug)]
pub(super) struct Options {
    /// The server: udp://HOST:PORT, tcp://HOST:PORT or shm:///PATH
    #[arg(value_name = "URL")]
    target: Target,

    #[command(flatten)]
    message: Message,

    /// TCP: how messages are delimited, as in the service's configuration
    #[arg(long, value_name = "FRAMING", default_value = "raw")]
    framing: Framing,

    /// TCP with --framing raw or fixed:N: length of the reply
    #[arg(long, value_name = "BYTES")]
    reply_bytes: Option<usize>,

    /// Time limit for the reply
    #[arg(long, value_name = "TIME", default_value = "2s", value_parser = time)]
    timeout: Duration,
}

#[derive(Args, Debug)]
#[group(required = true, multiple = false)]
struct Message {
    /// The message; - reads it from standard input
    #[arg(value_name = "MESSAGE")]
    argument: Option<String>,

    /// The message, even if it starts with a dash or is one
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true)]
    text: Option<String>,

    /// The message in hexadecimal digits: 0a1b
    #[arg(long, value_name = "HEX", value_parser = hex)]
    hex: Option<Hex>,

    /// Send the contents of this file; - reads standard input
    #[arg(long, value_name = "FILE")]
    payload: Option<PathBuf>,
}

impl Message {
    fn bytes(&self) -> Result<Vec<u8>, String> {
        let input = || {
            let read = bytes::all_of(std::io::stdin().lock());
            read.map_err(|error| format!("cannot read the message from standard input: {error}"))
        };
        match (&self.argument, &self.text, &self.hex, &self.payload) {
            (Some(text), ..) if text == "-" => input(),
            (Some(text), ..) | (_, Some(text), ..) => Ok(text.clone().into_bytes()),
            (.., Some(hex), _) => Ok(hex.0.clone()),
            (.., Some(path)) if path == Path::new("-") => input(),
            (.., Some(path)) => bytes::from_file(path),
            _ => unreachable!("clap requires one of them"),
        }
    }
}

pub(super) fn run(screen: &Screen, options: &Options) -> Result<(), Failure> {
    let message = options.message.bytes().map_err(Failure::Usage)?;
    let (framing, reply_bytes) = (options.framing, options.reply_bytes);
    let how = How { framing, reply_bytes, timeout: options.timeout };
    let began = Instant::now();
    let reply = ask(&options.target, &message, &how).map_err(|error| match error {
        error @ bench::client::ask::AskError::Unframable(..) => Failure::Usage(error.to_string()),
        error => Failure::run(error),
    })?;
    let took = began.elapsed();
    screen.show(
        || bytes::shown(&reply),
        || {
            json!({
                "target": options.target.to_string(), "sent_bytes": message.len(),
                "took_us": took.as_secs_f64() * 1e6, "reply_bytes": reply.len(),
                "reply_hex": bytes::to_hex(&reply), "reply_text": bytes::printable(&reply),
            })
        },
    );
    Ok(())
}
