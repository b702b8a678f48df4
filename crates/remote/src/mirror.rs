//! One side of a mirrored region: copies messages between its rings and the link.
//!
//! The source rings of one side are the sink rings of the other. A message is read from a source and sent at once; its slot
//! is released when the other side reports that the message was released there. So both rings are full at the same time,
//! and credit means the same on both sides. Everything from the link is checked: numbers of mqueues, slots, lengths.

use std::os::fd::BorrowedFd;
use std::time::{Duration, Instant};

use mqueue::abi::kind;
use mqueue::{Consumer, Head, LoanError, MappedMemory, Producer, RingError};
use wire::link::{Frame, MessageHead, begin_message};

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
}

/// See the module's text.
pub struct Mirror {
    channel: Channel,
    side: Side,
    pairs: Vec<Pair>,
    /// The mqueue from which the next turn reads first.
    first: usize,
    /// Messages of this turn.
    outgoing: Vec<u8>,
    /// Mqueues with messages to publish.
    touched: Vec<usize>,
    /// Frames that have arrived wait: for room in a sink's arena, or for the turn after a message of the attach protocol.
    held: bool,
    last_report: Instant,
}

impl Mirror {
    /// A mirror without rings, which passes only control messages; see [`Self::install`].
    pub fn new(channel: Channel, side: Side) -> Self {
        Self {
            channel,
            side,
            pairs: Vec::new(),
            first: 0,
            outgoing: Vec::new(),
            touched: Vec::new(),
            held: false,
            last_report: Instant::now(),
        }
    }

    /// Sets the mqueues, in the order of their numbers, with the slots of their rings.
    pub fn install(&mut self, ends: Vec<(Ends, u32)>) {
        let pair = |(Ends { source, sink }, depth): (Ends, u32)| Pair {
            source_base: source.consumed(),
            sink_base: sink.committed(),
            reported: sink.committed(),
            quarter: u64::from(depth).div_ceil(4),
            source,
            sink,
        };
        self.pairs = ends.into_iter().map(pair).collect();
    }

    /// Appends a frame, which the next turn sends.
    pub fn send(&mut self, frame: &Frame<'_>) {
        frame.encode(&mut self.channel.frames);
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
        moved.sent = self.gather()?;
        let due = now.saturating_duration_since(self.last_report) >= REPORT_AFTER;
        self.report(due || moved.sent > 0, now)?;
        self.channel.frames.append(&mut self.outgoing);
        if let Err(text) = self.channel.flush() {
            // The other side may have sent its reason before it closed the connection.
            let _ = self.take_in(&mut moved, control);
            return Err(Broken::Link(text));
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
        self.held || self.channel.is_blocked() || self.pairs.iter().any(unreported)
    }

    /// Whether something that was to be sent waits for the connection.
    pub fn is_blocked(&self) -> bool {
        self.channel.is_blocked()
    }

    /// Readable when the other side has sent something.
    pub fn as_fd(&self) -> BorrowedFd<'_> {
        self.channel.as_fd()
    }

    /// Sends what is left for at most `limit`, then waits for the other side to close the connection, so that it reads
    /// everything.
    pub fn close(mut self, limit: Duration) {
        self.channel.close(limit);
    }

    /// Receives, and publishes the messages.
    fn take_in(
        &mut self,
        moved: &mut Moved,
        control: &mut dyn FnMut(Control<'_>) -> Result<(), String>,
    ) -> Result<(), Broken> {
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
                    if !pair.give(self.side, &head, payload)? {
                        self.held = true;
                        return Ok(());
                    }
                    let at = head.mqueue as usize;
                    if self.touched.last() != Some(&at) {
                        self.touched.push(at);
                    }
                    moved.received += 1;
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
            self.last_report = now;
        }
        Ok(())
    }
}

fn pair_of(pairs: &mut [Pair], mqueue: u32) -> Result<&mut Pair, Broken> {
    let refuse = || Broken::Link(format!("the other side names mqueue {mqueue}, which is none"));
    pairs.get_mut(mqueue as usize).ok_or_else(refuse)
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
    Ok(true)
}

impl Pair {
    /// Writes a message of the other side into the sink. False: its arena has no room yet.
    fn give(&mut self, side: Side, head: &MessageHead, payload: &[u8]) -> Result<bool, Broken> {
        let &MessageHead { mqueue, token, tag, kind, status } = head;
        let broken =
            |what: &str| Broken::Link(format!("the other side sent {what} to mqueue {mqueue}"));
        // The engine checks what accelerators write; kernels trust the engine.
        if side == Side::Accelerator && kind != kind::MESSAGE {
            return Err(broken("a message of an unknown kind"));
        }
        match self.sink.push(Head { token, tag, kind, status }, payload) {
            Ok(()) => Ok(true),
            Err(LoanError::TooLong) => Err(broken("a message that is too long")),
            Err(LoanError::Full) => match self.sink.credit() {
                Ok(0) => Err(broken("a message without a free slot")),
                Ok(_) => Ok(false),
                Err(_) => Err(Broken::Rings),
            },
            Err(LoanError::Corrupt) => Err(Broken::Rings),
        }
    }

    /// Releases the source's slots that the other side has released.
    fn free(&mut self, count: u64) -> Result<(), Broken> {
        let sent = self.source.consumed() - self.source_base;
        let before = self.source.released() - self.source_base;
        if !(before..=sent).contains(&count) {
            return Err(Broken::Link("the other side released messages that it never got".into()));
        }
        self.source.release_until(self.source_base + count);
        Ok(())
    }
}
