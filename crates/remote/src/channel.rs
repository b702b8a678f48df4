//! An authenticated link: frames in encrypted records on a byte stream that never blocks, which is a TCP connection
//! except in the simulator.

use std::io::{self, ErrorKind, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::os::fd::{AsFd as _, BorrowedFd};
use std::time::{Duration, Instant};

use aws_lc_rs::aead::{Aad, LessSafeKey, Nonce};
use sys::local::wait_readable;
use wire::link::{RECORD_BYTES_MAX, TAG_BYTES, record_bytes};

use crate::handshake::{Handshake, HandshakeError};
use crate::secret::Secret;

/// Bytes of a read.
const READ_BYTES: usize = 2 * (4 + RECORD_BYTES_MAX + TAG_BYTES);
/// While this many bytes wait for the connection no further messages are taken from the rings.
const UNSENT_BYTES_MAX: usize = 256 << 10;
/// While this many bytes wait for the connection neither released slots nor heartbeats are reported.
const UNSENT_REPORTS_MAX: usize = UNSENT_BYTES_MAX + (64 << 10);

/// The keys of a link: for what this side sends, and for what it receives.
pub(crate) type Keys = [LessSafeKey; 2];

/// See the module's text. Errors are one sentence.
pub struct Channel<S = TcpStream> {
    stream: S,
    seal: LessSafeKey,
    open: LessSafeKey,
    /// Records sent and received.
    sealed: u64,
    opened: u64,
    /// Records that have not arrived as a whole: the first `raw_len` bytes.
    raw: Box<[u8]>,
    raw_len: usize,
    /// Decrypted frames; those before `plain_at` have been handled.
    pub(crate) plain: Vec<u8>,
    pub(crate) plain_at: usize,
    /// Frames to send.
    pub(crate) frames: Vec<u8>,
    /// Records to send; those before `sent` have been.
    records: Vec<u8>,
    sent: usize,
    /// Bytes that the connection has taken since the link began.
    taken: u64,
}

fn nonce(record: u64) -> Nonce {
    let mut bytes = [0; 12];
    bytes[..8].copy_from_slice(&record.to_le_bytes());
    Nonce::assume_unique_for_key(bytes)
}

impl Channel {
    pub(crate) fn new(stream: TcpStream, keys: Keys) -> io::Result<Self> {
        stream.set_nonblocking(true)?;
        stream.set_nodelay(true)?;
        Ok(Self::over(stream, keys))
    }

    /// Readable when the other side has sent something.
    pub(crate) fn as_fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }

    /// Sends what is left, then waits for the other side to close the connection, in all for at most `limit`.
    pub(crate) fn close(&mut self, limit: Duration) {
        let deadline = Instant::now() + limit;
        let mut ended = false;
        while self.flush().is_ok() && Instant::now() < deadline {
            if !self.is_blocked() && !std::mem::replace(&mut ended, true) {
                let _ = self.stream.shutdown(Shutdown::Write);
            }
            // What still arrives is not read: the link is over.
            match self.stream.read(&mut self.raw) {
                Ok(0) => return,
                Ok(_) => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    let left = deadline.saturating_duration_since(Instant::now());
                    let pause = if ended { left } else { Duration::from_millis(1) };
                    wait_readable(&[self.stream.as_fd()], Some(pause.min(left)));
                }
                Err(_) => return,
            }
        }
    }
}

impl<S: Read + Write> Channel<S> {
    /// The engine's and the accelerator's side of a link inside this process, over two streams that never block.
    pub fn pair(streams: [S; 2], secret: &Secret) -> Result<[Self; 2], HandshakeError> {
        let (mut to_far, mut to_near) = (Vec::new(), Vec::new());
        let mut near = Handshake::engine(secret, &mut to_far)?;
        let mut far = Handshake::accelerator(secret);
        far.advance(&mut to_far, &mut to_near)?;
        near.advance(&mut to_near, &mut to_far)?;
        let far = far.advance(&mut to_far, &mut to_near)?.ok_or(HandshakeError::Order)?;
        let near = near.advance(&mut to_near, &mut to_far)?.ok_or(HandshakeError::Order)?;
        let [near_stream, far_stream] = streams;
        Ok([Self::over(near_stream, near), Self::over(far_stream, far)])
    }

    fn over(stream: S, keys: Keys) -> Self {
        let [seal, open] = keys;
        Self {
            stream,
            seal,
            open,
            sealed: 0,
            opened: 0,
            raw: vec![0; READ_BYTES].into(),
            raw_len: 0,
            plain: Vec::with_capacity(READ_BYTES),
            plain_at: 0,
            frames: Vec::with_capacity(UNSENT_BYTES_MAX),
            records: Vec::with_capacity(UNSENT_BYTES_MAX + RECORD_BYTES_MAX),
            sent: 0,
            taken: 0,
        }
    }

    /// Whether records wait for the connection.
    pub(crate) fn is_blocked(&self) -> bool {
        self.sent < self.records.len()
    }

    /// Bytes that the connection has taken since the link began.
    pub(crate) fn taken(&self) -> u64 {
        self.taken
    }

    /// Bytes that wait for the connection.
    fn unsent(&self) -> usize {
        self.frames.len() + self.records.len() - self.sent
    }

    /// Whether further messages may be appended to [`Self::frames`] and `more` bytes.
    pub(crate) fn has_room_for(&self, more: usize) -> bool {
        self.unsent() + more < UNSENT_BYTES_MAX
    }

    /// Whether a heartbeat or a report of released slots may be appended to [`Self::frames`].
    pub(crate) fn has_room_for_report(&self) -> bool {
        self.unsent() < UNSENT_REPORTS_MAX
    }

    /// Encrypts all frames and writes as much as the connection takes, in one call.
    pub(crate) fn flush(&mut self) -> Result<(), String> {
        for text in self.frames.chunks(RECORD_BYTES_MAX) {
            let len = ((text.len() + TAG_BYTES) as u32).to_le_bytes();
            self.records.extend_from_slice(&len);
            let at = self.records.len();
            self.records.extend_from_slice(text);
            let sealed = self.seal.seal_in_place_separate_tag(
                nonce(self.sealed),
                Aad::from(len),
                &mut self.records[at..],
            );
            let tag = sealed.map_err(|_| "a record cannot be encrypted".to_owned())?;
            self.records.extend_from_slice(tag.as_ref());
            self.sealed += 1;
        }
        self.frames.clear();
        while self.sent < self.records.len() {
            match self.stream.write(&self.records[self.sent..]) {
                Ok(0) => return Err("the other side closed the connection".into()),
                Ok(count) => {
                    self.sent += if mutants::on("resend_written") { 0 } else { count };
                    self.taken += count as u64;
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    if self.sent > UNSENT_BYTES_MAX {
                        self.records.drain(..self.sent);
                        self.sent = 0;
                    }
                    return Ok(());
                }
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(format!("the connection broke: {error}")),
            }
        }
        self.records.clear();
        self.sent = 0;
        Ok(())
    }

    /// Reads once and decrypts what is complete. Returns whether anything arrived.
    pub(crate) fn receive(&mut self) -> Result<bool, String> {
        match self.stream.read(&mut self.raw[self.raw_len..]) {
            Ok(0) => return Err("the other side closed the connection".into()),
            Ok(count) => self.raw_len += count,
            Err(error)
                if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) =>
            {
                return Ok(false);
            }
            Err(error) => return Err(format!("the connection broke: {error}")),
        }
        if self.plain_at > 0 {
            self.plain.drain(..self.plain_at);
            self.plain_at = 0;
        }
        let mut at = 0;
        while let Some(len) =
            record_bytes(&self.raw[at..self.raw_len]).map_err(|error| error.to_string())?
        {
            if self.raw_len - at < len {
                break;
            }
            let (head, body) = self.raw[at..at + len].split_first_chunk_mut::<4>().expect("more");
            let opened = self.open.open_in_place(nonce(self.opened), Aad::from(*head), body);
            let text = opened.map_err(|_| "a record was forged or damaged".to_owned())?;
            self.plain.extend_from_slice(text);
            self.opened += 1;
            at += len;
        }
        self.raw.copy_within(at..self.raw_len, 0);
        self.raw_len -= at;
        Ok(true)
    }
}
