//! An accelerator's kernel as a stage of a transfer.
//!
//! The stream is cut into pieces, and each piece is a message to the kernel, whose reply takes its place. Many are in
//! flight at a time; replies come in any order and go on in that of the pieces.
//!
//! ```text
//! message: number of the piece u64 | its offset in the stream u64 | context (32 bytes) | bytes of the piece
//! reply:   bytes in their place, as many as the kernel likes
//! ```
//!
//! Integers are little-endian. All pieces but the last one have the same length. The context is the caller's, or the key of a stream
//! that the kernel seals with AES-256-CTR ([`crate::stages::seal`]): then the reply to a piece at offset `16 * n` is the piece combined with
//! the key stream from counter block `n` on.

use std::collections::BTreeMap;
use std::time::Duration;

use zeroize::Zeroizing;

use crate::command::error::TransferError;
use crate::command::kernel::{Kernel, KernelSource};
use crate::command::limits::{CONTEXT_BYTES, HEADER_BYTES};
use crate::stages::Ran;

/// Bytes before those of a piece.
pub const PIECE_HEADER_BYTES: usize = 48;
/// Messages and replies of a stage in flight, and those that wait for earlier ones.
const WINDOW_BYTES: usize = 8 << 20;
/// How long a step waits for a reply at most. Other transfers take turns between two steps.
const WAIT: Duration = Duration::from_millis(1);

/// A stream that goes through a kernel.
pub(crate) struct Processor {
    kernel: Box<dyn Kernel>,
    /// Goes before all else.
    header: Option<[u8; HEADER_BYTES]>,
    /// Replies have the lengths of their pieces.
    keeps_length: bool,
    /// Bytes of the piece that was sent last. Only the last one of all is shorter than the others.
    last_bytes: usize,
    /// The message of the next piece, as far as it has come.
    message: Zeroizing<Vec<u8>>,
    message_bytes: usize,
    /// Where the next piece begins, and its number.
    offset: u64,
    sent: u64,
    /// The piece whose reply goes on next, and how much of that has gone.
    next: u64,
    gone: usize,
    /// Replies that have come, by their numbers.
    here: BTreeMap<u64, Vec<u8>>,
    in_flight: usize,
    /// Pieces that are in flight or here, at most.
    window: usize,
    reply: Vec<u8>,
}

impl Processor {
    /// `header`: what the stream begins with.
    pub(crate) fn new(
        source: &KernelSource,
        context: &[u8; CONTEXT_BYTES],
        header: Option<[u8; HEADER_BYTES]>,
    ) -> Result<Self, TransferError> {
        let kernel = source.open().map_err(TransferError::Kernel)?;
        let (message_max, reply_max) = kernel.bytes_max();
        // Whole blocks of ciphers, and as many bytes in the reply.
        let piece = message_max.saturating_sub(PIECE_HEADER_BYTES).min(reply_max) / 16 * 16;
        if piece == 0 || kernel.depth() == 0 {
            let why = format!(
                "its messages have at most {message_max} bytes and its replies {reply_max}: a stage needs {} and 16 at least",
                PIECE_HEADER_BYTES + 16
            );
            return Err(TransferError::Kernel(why));
        }
        let message_bytes = PIECE_HEADER_BYTES + piece;
        let window = (WINDOW_BYTES / (message_bytes + reply_max)).clamp(1, kernel.depth());
        let mut message = Zeroizing::new(Vec::with_capacity(message_bytes));
        message.resize(PIECE_HEADER_BYTES, 0);
        message[16..PIECE_HEADER_BYTES].copy_from_slice(context);
        Ok(Self {
            kernel,
            keeps_length: header.is_some(),
            last_bytes: 0,
            header,
            message,
            message_bytes,
            offset: 0,
            sent: 0,
            next: 0,
            gone: 0,
            here: BTreeMap::new(),
            in_flight: 0,
            window,
            reply: vec![0; reply_max],
        })
    }

    /// Whether a piece is complete whose reply has not gone on.
    pub(crate) fn has_pieces(&self) -> bool {
        let is_full = self.message.len() == self.message_bytes;
        is_full || self.in_flight > 0 || !self.here.is_empty()
    }

    /// Takes a part of the stream, and gives out what the kernel has made of earlier ones; `last`: no more come after this. Waits a
    /// moment if there is nothing else to do.
    pub(crate) fn run(
        &mut self,
        input: &[u8],
        last: bool,
        out: &mut [u8],
    ) -> Result<Ran, TransferError> {
        let mut ran = Ran::default();
        if let Some(header) = self.header.take() {
            out[..HEADER_BYTES].copy_from_slice(&header);
            ran.made = HEADER_BYTES;
        }
        while self.send(input, last, &mut ran)? {}
        self.receive(out, &mut ran, Duration::ZERO)?;
        if (ran.taken, ran.made) == (0, 0) && self.in_flight > 0 {
            self.receive(out, &mut ran, WAIT)?;
        }
        let is_sent = ran.taken == input.len() && self.message.len() == PIECE_HEADER_BYTES;
        ran.done = last && is_sent && !self.has_pieces();
        Ok(ran)
    }

    /// Sends the next piece if it is complete. Returns whether it did.
    fn send(&mut self, input: &[u8], last: bool, ran: &mut Ran) -> Result<bool, TransferError> {
        let rest = &input[ran.taken..];
        let fresh = rest.len().min(self.message_bytes - self.message.len());
        self.message.extend_from_slice(&rest[..fresh]);
        ran.taken += fresh;
        let piece = self.message.len() - PIECE_HEADER_BYTES;
        let is_full = self.message.len() == self.message_bytes;
        let ends = last && ran.taken == input.len() && piece > 0;
        // What has come in and not gone on is bounded as well.
        let has_room = self.in_flight + self.here.len() < self.window;
        if !(is_full || ends) || !has_room {
            return Ok(false);
        }
        self.message[..8].copy_from_slice(&self.sent.to_le_bytes());
        self.message[8..16].copy_from_slice(&self.offset.to_le_bytes());
        if !self.kernel.send(self.sent, &self.message).map_err(TransferError::Kernel)? {
            return Ok(false);
        }
        self.offset += piece as u64;
        self.last_bytes = piece;
        self.sent += 1;
        self.in_flight += 1;
        self.message.truncate(PIECE_HEADER_BYTES);
        Ok(true)
    }

    /// Takes the replies that have come, and gives out those whose turn it is.
    fn receive(
        &mut self,
        out: &mut [u8],
        ran: &mut Ran,
        mut wait: Duration,
    ) -> Result<(), TransferError> {
        while self.in_flight > 0 {
            let reply = self.kernel.receive(&mut self.reply, wait);
            let Some((number, len)) = reply.map_err(TransferError::Kernel)? else { break };
            wait = Duration::ZERO;
            if number < self.next || number >= self.sent || self.here.contains_key(&number) {
                let why = format!("it answered piece {number} twice, or never got it");
                return Err(TransferError::Kernel(why));
            }
            self.in_flight -= 1;
            let is_last = number + 1 == self.sent;
            let piece =
                if is_last { self.last_bytes } else { self.message_bytes - PIECE_HEADER_BYTES };
            if self.keeps_length && len != piece {
                // Such as an echo, whose replies have the key.
                let why = format!(
                    "its reply to a piece of {piece} bytes has {len}: this service does not encrypt, it needs the kernel aes256_ctr"
                );
                return Err(TransferError::Kernel(why));
            }
            let reply = &self.reply[..len.min(self.reply.len())];
            if number == self.next && out.len() - ran.made >= reply.len() {
                out[ran.made..ran.made + reply.len()].copy_from_slice(reply);
                ran.made += reply.len();
                self.next += 1;
                self.give(out, ran);
            } else {
                self.here.insert(number, reply.to_vec());
            }
        }
        self.give(out, ran);
        Ok(())
    }

    /// Gives out replies that are here.
    fn give(&mut self, out: &mut [u8], ran: &mut Ran) {
        while let Some(reply) = self.here.get(&self.next) {
            let rest = &reply[self.gone..];
            let len = rest.len().min(out.len() - ran.made);
            out[ran.made..ran.made + len].copy_from_slice(&rest[..len]);
            ran.made += len;
            self.gone += len;
            if self.gone < reply.len() {
                return;
            }
            self.here.remove(&self.next);
            (self.next, self.gone) = (self.next + 1, 0);
        }
    }
}
