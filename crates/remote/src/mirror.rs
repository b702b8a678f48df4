//! One side of a mirrored region: copies messages between its rings and the link.
//!
//! The source rings of one side are the sink rings of the other. A message is read from a source and sent at once; its slot
//! is released when the other side reports that the message was released there. So both rings are full at the same time,
//! and credit means the same on both sides. Everything from the link is checked: numbers of mqueues, slots, lengths.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::fd::BorrowedFd;
use std::time::{Duration, Instant};

use mqueue::abi::{INLINE_BYTES_MAX, kind};
use mqueue::{Consumer, Head, LoanError, MappedMemory, Producer, RingError};
use wire::link::{Frame, MESSAGE_HEAD_BYTES, MessageHead, begin_message};

use crate::channel::Channel;

/// Messages of one mqueue in a turn.
const RUN_MAX: usize = 64;
/// Reads of the connection in a turn.
const READS_MAX: usize = 4;
/// Released slots are reported with the next messages, and without any after this time.
const REPORT_AFTER: Duration = Duration::from_millis(1);

/// Why a mirror cannot go on. The message is one sentence.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Broken {
    /// The link ended, or the other side broke the protocol.
    #[error("the link is lost: {0}")]
    Link(String),
    /// The rings on this side have impossible words.
    #[error("its rings contain impossible words")]
    Rings,
}

/// Which side of a link this is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// The engine's.
    Engine,
    /// The accelerator's.
    Accelerator,
}

/// This side's ends of one mqueue.
pub struct Ends {
    /// The ring whose messages are sent.
    pub source: Consumer<MappedMemory>,
    /// The ring that gets the messages of the other side.
    pub sink: Producer<MappedMemory>,
    /// Slots of each ring.
    pub depth: u32,
    /// Bytes of the sink's arena.
    pub arena_bytes: u64,
}

/// What the other side sends besides messages.
#[derive(Debug)]
pub enum Control<'a> {
    /// A message of the attach protocol.
    Attach(&'a [u8]),
    /// The shape of a region.
    Shape(wire::link::Shape),
    /// The stop word.
    Stop(u32),
    /// A heartbeat.
    Beat(u64),
    /// The digest of the file of an offer's kernel.
    Kernel([u8; wire::link::DIGEST_BYTES]),
}

impl std::fmt::Display for Control<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Attach(_) => f.write_str("a message of the attach protocol"),
            Self::Shape(_) => f.write_str("a second shape"),
            Self::Stop(word) => write!(f, "the stop word {word}"),
            Self::Beat(_) => f.write_str("a heartbeat"),
            Self::Kernel(_) => f.write_str("the digest of a kernel"),
        }
    }
}

/// What a turn moved.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Moved {
    /// Messages to the other side.
    pub sent: usize,
    /// Messages from the other side, published.
    pub received: usize,
    /// Bytes arrived.
    pub heard: bool,
}

impl Moved {
    /// Whether nothing happened.
    pub fn is_nothing(&self) -> bool {
        *self == Self::default()
    }
}

struct Pair {
    source: Consumer<MappedMemory>,
    sink: Producer<MappedMemory>,
    /// Messages in either ring before the mirror started.
    source_base: u64,
    sink_base: u64,
    /// The last released count of the sink that was reported.
    reported: u64,
    /// Slots after whose release a report does not wait for messages.
    quarter: u64,
    /// Frames of messages for which the sink's arena has no room yet, in order; those before `waiting_at` are in the ring.
    waiting: Vec<u8>,
    waiting_at: usize,
    /// How many these are, and how many bytes they may have.
    waiting_count: u32,
    waiting_max: u64,
}

/// See the module's text.
pub struct Mirror<S = TcpStream> {
    channel: Channel<S>,
    side: Side,
    pairs: Vec<Pair>,
    /// The mqueue from which the next turn reads first.
    first: usize,
    /// Messages of this turn.
    outgoing: Vec<u8>,
    /// Mqueues with messages to publish.
    touched: Vec<usize>,
    /// Mqueues whose messages wait for room in a sink's arena.
    waiting: Vec<usize>,
    /// Frames that have arrived wait for the turn after a message of the attach protocol.
    held: bool,
    /// Of the first turn, or later.
    last_report: Option<Instant>,
    /// When bytes arrived last, and since when the connection takes nothing of what waits for it.
    heard_at: Option<Instant>,
    stuck_at: Option<Instant>,
}

impl Mirror {
    /// Readable when the other side has sent something.
    pub fn as_fd(&self) -> BorrowedFd<'_> {
        self.channel.as_fd()
    }

    /// Sends what is left for at most `limit`, then waits for the other side to close the connection, so that it reads
    /// everything.
    pub fn close(mut self, limit: Duration) {
        self.channel.close(limit);
    }
}

impl<S: Read + Write> Mirror<S> {
    /// A mirror without rings, which passes only control messages; see [`Self::install`].
    pub fn new(channel: Channel<S>, side: Side) -> Self {
        Self {
            channel,
            side,
            pairs: Vec::new(),
            first: 0,
            outgoing: Vec::new(),
            touched: Vec::new(),
            waiting: Vec::new(),
            held: false,
            last_report: None,
            heard_at: None,
            stuck_at: None,
        }
    }

    /// Sets the mqueues, in the order of their numbers. The times of [`Self::check`] restart.
    pub fn install(&mut self, ends: Vec<Ends>) {
        let pair = |Ends { source, sink, depth, arena_bytes }: Ends| Pair {
            source_base: source.consumed(),
            sink_base: sink.committed(),
            reported: sink.committed(),
            quarter: u64::from(depth).div_ceil(4),
            waiting: Vec::new(),
            waiting_at: 0,
            waiting_count: 0,
            waiting_max: arena_bytes
                + u64::from(depth) * (u64::from(INLINE_BYTES_MAX) + MESSAGE_HEAD_BYTES as u64),
            source,
            sink,
        };
        self.pairs = ends.into_iter().map(pair).collect();
        (self.heard_at, self.stuck_at) = (None, None);
    }

    /// Appends a frame, which the next turn sends.
    pub fn send(&mut self, frame: &Frame<'_>) {
        frame.encode(&mut self.channel.frames);
    }

    /// Appends a heartbeat, unless too much waits for the connection already. Returns whether it did.
    pub fn send_beat(&mut self, beat: u64) -> bool {
        let has_room = self.channel.has_room_for_report();
        if has_room {
            self.send(&Frame::Beat(beat));
        }
        has_room
    }

    /// Fails if nothing has arrived for `limit`, or if the connection has taken nothing of what waits for it.
    pub fn check(&mut self, now: Instant, limit: Duration) -> Result<(), Broken> {
        let since = |at: Instant| now.saturating_duration_since(at);
        let (what, at) = match (*self.heard_at.get_or_insert(now), self.stuck_at) {
            (heard_at, _) if since(heard_at) >= limit => ("was silent", heard_at),
            (_, Some(stuck_at)) if since(stuck_at) >= limit => ("has read nothing", stuck_at),
            _ => return Ok(()),
        };
        if mutants::on("outlive_silence") {
            return Ok(());
        }
        let ms = since(at).as_millis();
        Err(Broken::Link(format!("the other side {what} for {ms} ms")))
    }

    /// Moves what can be moved without waiting. `control` gets what is not a message; an error that it returns ends the link. A turn
    /// handles nothing after a message of the attach protocol.
    pub fn turn(
        &mut self,
        now: Instant,
        control: &mut dyn FnMut(Control<'_>) -> Result<(), String>,
    ) -> Result<Moved, Broken> {
        let mut moved = Moved::default();
        self.take_in(&mut moved, control)?;
        if moved.heard {
            self.heard_at = Some(now);
        }
        moved.sent = self.gather()?;
        let since = |last| now.saturating_duration_since(last);
        let mut due = self.last_report.is_none_or(|last| since(last) >= REPORT_AFTER);
        due &= !mutants::on("report_late");
        self.report(due || moved.sent > 0, now)?;
        self.channel.frames.append(&mut self.outgoing);
        let taken = self.channel.taken();
        if let Err(text) = self.channel.flush() {
            // The other side may have sent its reason before it closed the connection.
            let _ = self.take_in(&mut moved, control);
            return Err(Broken::Link(text));
        }
        if !self.channel.is_blocked() {
            self.stuck_at = None;
        } else if self.stuck_at.is_none() || self.channel.taken() != taken {
            self.stuck_at = Some(now);
        }
        Ok(moved)
    }

    /// Whether a message waits in a source ring.
    pub fn has_messages(&self) -> bool {
        self.pairs.iter().any(|pair| pair.source.hinted())
    }

    /// Whether [`Self::turn`] must be called again soon although nothing arrives.
    pub fn is_pending(&self) -> bool {
        let unreported = |pair: &Pair| pair.reported != pair.sink.committed();
        self.held
            || !self.waiting.is_empty()
            || self.channel.is_blocked()
            || self.pairs.iter().any(unreported)
    }

    /// Whether all messages of the sources were released on the other side, and all to the sinks here, which was reported.
    pub fn is_settled(&self) -> bool {
        let settled = |pair: &Pair| {
            !pair.source.hinted()
                && pair.source.released() == pair.source.consumed()
                && pair.waiting_count == 0
                && pair.reported == pair.sink.committed()
        };
        self.pairs.iter().all(settled)
    }

    /// Whether something that was to be sent waits for the connection.
    pub fn is_blocked(&self) -> bool {
        self.channel.is_blocked()
    }

    /// Receives, and publishes the messages.
    fn take_in(
        &mut self,
        moved: &mut Moved,
        control: &mut dyn FnMut(Control<'_>) -> Result<(), String>,
    ) -> Result<(), Broken> {
        self.take_waiting(moved)?;
        let mut result = if self.held { self.take_frames(moved, control) } else { Ok(()) };
        for _ in 0..READS_MAX {
            if self.held || result.is_err() {
                break;
            }
            match self.channel.receive() {
                Ok(false) => break,
                Ok(true) => moved.heard = true,
                Err(text) => {
                    result = Err(Broken::Link(text));
                    break;
                }
            }
            result = self.take_frames(moved, control);
        }
        for at in self.touched.drain(..) {
            self.pairs[at].sink.publish();
        }
        result
    }

    /// Moves messages for which an arena has room again into their rings.
    fn take_waiting(&mut self, moved: &mut Moved) -> Result<(), Broken> {
        let Self { side, pairs, waiting, touched, .. } = self;
        let mut result = Ok(());
        waiting.retain(|at| {
            match pairs[*at].give_waiting(*side) {
                Ok(0) => {}
                Ok(count) => {
                    touched.push(*at);
                    moved.received += count;
                }
                Err(error) => result = Err(error),
            }
            pairs[*at].waiting_count > 0
        });
        result
    }

    /// Handles the frames that have arrived as a whole.
    fn take_frames(
        &mut self,
        moved: &mut Moved,
        control: &mut dyn FnMut(Control<'_>) -> Result<(), String>,
    ) -> Result<(), Broken> {
        self.held = false;
        loop {
            let rest = &self.channel.plain[self.channel.plain_at..];
            let decoded = Frame::decode(rest).map_err(|error| Broken::Link(error.to_string()))?;
            let Some((frame, len)) = decoded else { return Ok(()) };
            match frame {
                Frame::Message(head, payload) => {
                    let pair = pair_of(&mut self.pairs, head.mqueue)?;
                    let at = head.mqueue as usize;
                    if pair.waiting_count > 0 || !pair.give(self.side, &head, payload)? {
                        if mutants::on("lose_waiting") {
                            self.channel.plain_at += len;
                            continue;
                        }
                        // Only this mqueue waits.
                        if pair.waiting_count == 0 {
                            self.waiting.push(at);
                        }
                        pair.wait(self.side, &head, &rest[..len])?;
                    } else {
                        if self.touched.last() != Some(&at) {
                            self.touched.push(at);
                        }
                        moved.received += 1;
                    }
                }
                Frame::Released(mqueue, count) => pair_of(&mut self.pairs, mqueue)?.free(count)?,
                Frame::Attach(bytes) => {
                    control(Control::Attach(bytes)).map_err(Broken::Link)?;
                    // What follows may be for rings that are installed because of it.
                    self.channel.plain_at += len;
                    self.held = true;
                    return Ok(());
                }
                Frame::Shape(shape) => control(Control::Shape(shape)).map_err(Broken::Link)?,
                Frame::Stop(stop) => control(Control::Stop(stop)).map_err(Broken::Link)?,
                Frame::Beat(beat) => control(Control::Beat(beat)).map_err(Broken::Link)?,
                Frame::Kernel(digest) => control(Control::Kernel(digest)).map_err(Broken::Link)?,
            }
            self.channel.plain_at += len;
        }
    }

    /// Reads messages from the sources, each mqueue first in one of the turns.
    fn gather(&mut self) -> Result<usize, Broken> {
        let (count, mut sent) = (self.pairs.len(), 0);
        for nth in 0..count {
            let at = (self.first + nth) % count;
            let source = &mut self.pairs[at].source;
            if !source.hinted() {
                continue;
            }
            for _ in 0..RUN_MAX {
                if !self.channel.has_room_for(self.outgoing.len()) {
                    self.first = at;
                    return Ok(sent);
                }
                if !read_message(source, at as u32, &mut self.outgoing)? {
                    break;
                }
                sent += 1;
            }
        }
        self.first = (self.first + 1) % count.max(1);
        Ok(sent)
    }

    /// Reports released slots: all of them, or only if a quarter of a ring waits for it.
    fn report(&mut self, all: bool, now: Instant) -> Result<(), Broken> {
        for (at, pair) in self.pairs.iter_mut().enumerate() {
            if !self.channel.has_room_for_report() {
                break;
            }
            if pair.reported == pair.sink.committed() {
                continue;
            }
            pair.sink.credit().map_err(|_| Broken::Rings)?;
            let released = pair.sink.released();
            let waiting = released - pair.reported;
            if waiting > 0 && (all || waiting >= pair.quarter) {
                pair.reported = released;
                let count = released - pair.sink_base;
                Frame::Released(at as u32, count).encode(&mut self.channel.frames);
            }
        }
        if all {
            self.last_report = Some(now);
        }
        Ok(())
    }
}

fn pair_of(pairs: &mut [Pair], mqueue: u32) -> Result<&mut Pair, Broken> {
    let refuse = || Broken::Link(format!("the other side names mqueue {mqueue}, which is none"));
    pairs.get_mut(mqueue as usize).ok_or_else(refuse)
}

const NO_SLOT: &str = "a message without a free slot";

/// The other side sent something to an mqueue that it may not.
fn broken(mqueue: u32, what: &str) -> Broken {
    Broken::Link(format!("the other side sent {what} to mqueue {mqueue}"))
}

/// The engine checks what accelerators write; kernels trust the engine.
fn check_kind(side: Side, head: &MessageHead) -> Result<(), Broken> {
    let believes = mutants::on("believe_kind");
    if side == Side::Accelerator && head.kind != kind::MESSAGE && !believes {
        return Err(broken(head.mqueue, "a message of an unknown kind"));
    }
    Ok(())
}

/// Appends the next message of a ring to `outgoing`. False: there is none.
fn read_message(
    source: &mut Consumer<MappedMemory>,
    mqueue: u32,
    outgoing: &mut Vec<u8>,
) -> Result<bool, Broken> {
    let header = match source.peek() {
        Ok(Some(header)) => header,
        Ok(None) => return Ok(false),
        Err(RingError::BadHeader) => {
            // The engine drops it with its reason.
            source.advance();
            if mutants::on("lose_bad_header") {
                return Ok(false);
            }
            begin_message(outgoing, &MessageHead { mqueue, ..MessageHead::default() }, 0);
            return Ok(true);
        }
        Err(RingError::Corrupt) => return Err(Broken::Rings),
    };
    let (token, tag, kind, status) = (header.token, header.tag, header.kind, header.status);
    let before = outgoing.len();
    let head = MessageHead { mqueue, token, tag, kind, status };
    let payload = begin_message(outgoing, &head, header.len as usize);
    // False: a part of it has not arrived; a later turn takes it.
    if !source.copy_out(&header, payload) {
        outgoing.truncate(before);
        return Ok(false);
    }
    source.advance();
    if mutants::on("release_unread") {
        source.release();
    }
    Ok(true)
}

impl Pair {
    /// Writes a message of the other side into the sink. False: its arena has no room yet.
    fn give(&mut self, side: Side, head: &MessageHead, payload: &[u8]) -> Result<bool, Broken> {
        check_kind(side, head)?;
        let &MessageHead { mqueue, token, tag, kind, status } = head;
        match self.sink.push(Head { token, tag, kind, status }, payload) {
            Ok(()) => Ok(true),
            Err(LoanError::TooLong) => Err(broken(mqueue, "a message that is too long")),
            Err(LoanError::Full) => match self.sink.credit() {
                Ok(0) => Err(broken(mqueue, NO_SLOT)),
                Ok(_) => Ok(false),
                Err(_) => Err(Broken::Rings),
            },
            Err(LoanError::Corrupt) => Err(Broken::Rings),
        }
    }

    /// Keeps a message until the arena has room. The other side has its messages in a ring of the same size, which
    /// bounds their number and their bytes.
    fn wait(&mut self, side: Side, head: &MessageHead, frame: &[u8]) -> Result<(), Broken> {
        check_kind(side, head)?;
        if self.waiting_count >= self.sink.credit().map_err(|_| Broken::Rings)? {
            return Err(broken(head.mqueue, NO_SLOT));
        }
        if self.waiting_at > 0 {
            self.waiting.drain(..self.waiting_at);
            self.waiting_at = 0;
        }
        if (self.waiting.len() + frame.len()) as u64 > self.waiting_max {
            return Err(broken(head.mqueue, "more than fits in its ring"));
        }
        self.waiting.extend_from_slice(frame);
        self.waiting_count += 1;
        Ok(())
    }

    /// Writes messages that waited into the sink; their number.
    fn give_waiting(&mut self, side: Side) -> Result<usize, Broken> {
        let frames = std::mem::take(&mut self.waiting);
        let mut count = 0;
        let result = loop {
            let Ok(Some((Frame::Message(head, payload), len))) =
                Frame::decode(&frames[self.waiting_at..])
            else {
                break Ok(());
            };
            match self.give(side, &head, payload) {
                Ok(true) => {
                    self.waiting_at += len;
                    self.waiting_count -= 1;
                    count += 1;
                }
                Ok(false) => break Ok(()),
                Err(error) => break Err(error),
            }
        };
        self.waiting = frames;
        if self.waiting_count == 0 {
            self.waiting.clear();
            self.waiting_at = 0;
        }
        result.map(|()| count)
    }

    /// Releases the source's slots that the other side has released.
    fn free(&mut self, count: u64) -> Result<(), Broken> {
        let sent = self.source.consumed() - self.source_base;
        let before = self.source.released() - self.source_base;
        if !(before..=sent).contains(&count) && !mutants::on("believe_released") {
            return Err(Broken::Link("the other side released messages that it never got".into()));
        }
        self.source.release_until(self.source_base + count);
        Ok(())
    }
}
