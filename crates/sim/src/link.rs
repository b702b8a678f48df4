//! A link to a model accelerator on another machine: two real mirrors ([`remote::Mirror`]) and the connection between them.
//!
//! The engine uses one region, the blocks another one of the same shape. The connection is two pipes that delay and stall, take and give
//! less than they could, and are damaged, cut or silent for good. Time passes in steps as long as something is in flight, whatever the
//! distance between two turns of the workers.

use std::collections::VecDeque;
use std::io::{self, ErrorKind, Read, Write};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use remote::{Broken, Channel, Control, Ends, Mirror, Secret, Side};

use crate::fault::Fault;
use crate::net::{LinkFaults, SharedNetwork};
use crate::rng::Rng;
use crate::shared::lock;

/// A mirror with something pending has another turn after this time.
const PENDING_NS: u64 = 1_000_000;
/// Shortest time between two turns while bytes have arrived that were not read.
const STEP_NS: u64 = 1_000;
/// Heartbeats in the time after which a silent link is lost.
const BEATS: u64 = 4;

/// One direction of a connection.
#[derive(Default)]
struct Pipe {
    /// When they arrive, and the bytes.
    segments: VecDeque<(u64, VecDeque<u8>)>,
    bytes: usize,
    /// A bit of the next bytes changes.
    damage: bool,
    /// Nothing follows what is in the pipe; whether the reader gets an error, not an orderly end.
    ended: Option<bool>,
}

impl Pipe {
    /// The first `kept` bytes arrive, then the end.
    fn end(&mut self, kept: usize, reset: bool) {
        while self.bytes > kept {
            let (_, last) = self.segments.back_mut().expect("it has bytes");
            let more = (self.bytes - kept).min(last.len());
            last.truncate(last.len() - more);
            self.bytes -= more;
            if last.is_empty() {
                self.segments.pop_back();
            }
        }
        self.ended.get_or_insert(reset);
    }
}

/// A connection. `pipes[0]` goes to the accelerator.
struct Line {
    pipes: [Pipe; 2],
    faults: LinkFaults,
    now_ns: u64,
    /// Nothing arrives before this time, ...
    stalled_until_ns: u64,
    /// ... and from this one on.
    silent_from_ns: u64,
    /// Reads and writes of less than was possible.
    short: u64,
    rng: Rng,
}

impl Line {
    /// At most `most`; sometimes less, down to nothing.
    fn shortened(&mut self, most: usize) -> usize {
        if !self.rng.chance(self.faults.short) {
            return most;
        }
        self.short += 1;
        self.rng.below(most as u64 + 1) as usize
    }

    fn write(&mut self, to: usize, bytes: &[u8]) -> io::Result<usize> {
        if self.pipes[to].ended.is_some() {
            return Err(ErrorKind::BrokenPipe.into());
        }
        let room = self.faults.pipe_bytes.saturating_sub(self.pipes[to].bytes);
        let count = self.shortened(bytes.len().min(room));
        if count == 0 {
            return Err(ErrorKind::WouldBlock.into());
        }
        let mut taken: VecDeque<u8> = bytes[..count].iter().copied().collect();
        let (low, high) = self.faults.delay_ns;
        let due_ns = self.now_ns + self.rng.between(low, high);
        let pipe = &mut self.pipes[to];
        if std::mem::take(&mut pipe.damage) {
            taken[self.rng.below(count as u64) as usize] ^= 1 << self.rng.below(8);
        }
        let after_ns = pipe.segments.back().map_or(0, |(due_ns, _)| *due_ns);
        pipe.segments.push_back((due_ns.max(after_ns), taken));
        pipe.bytes += count;
        Ok(count)
    }

    fn read(&mut self, from: usize, into: &mut [u8]) -> io::Result<usize> {
        let arrived = |(due_ns, _): &&mut (u64, VecDeque<u8>)| *due_ns <= self.now_ns;
        let stalled = self.stalled_until_ns > self.now_ns || self.silent_from_ns <= self.now_ns;
        let pipe = &mut self.pipes[from];
        let front = pipe.segments.front_mut().filter(arrived).filter(|_| !stalled);
        let most = front.map_or(0, |(_, bytes)| bytes.len().min(into.len()));
        if most == 0 {
            return match pipe.ended {
                Some(reset) if pipe.bytes == 0 && !stalled => {
                    if reset {
                        Err(ErrorKind::ConnectionReset.into())
                    } else {
                        Ok(0)
                    }
                }
                _ => Err(ErrorKind::WouldBlock.into()),
            };
        }
        let count = self.shortened(most);
        if count == 0 {
            return Err(ErrorKind::WouldBlock.into());
        }
        let pipe = &mut self.pipes[from];
        let (_, bytes) = pipe.segments.front_mut().expect("it was there");
        for (to, byte) in into.iter_mut().zip(bytes.drain(..count)) {
            *to = byte;
        }
        if bytes.is_empty() {
            pipe.segments.pop_front();
        }
        pipe.bytes -= count;
        Ok(count)
    }

    /// When something arrives next, or could have been read.
    fn due_ns(&self) -> u64 {
        let fronts = self.pipes.iter().filter_map(|pipe| pipe.segments.front());
        let due_ns = fronts.map(|(due_ns, _)| *due_ns).min();
        due_ns.map_or(u64::MAX, |due_ns| due_ns.max(self.stalled_until_ns))
    }
}

/// One side's end of a connection.
struct End {
    line: Arc<Mutex<Line>>,
    /// The pipe that this end writes.
    writes: usize,
}

impl Read for End {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        lock(&self.line).read(1 - self.writes, into)
    }
}

impl Write for End {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        lock(&self.line).write(self.writes, bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Drop for End {
    /// The connection is closed: what is in flight arrives, and what the other side still sends does not.
    fn drop(&mut self) {
        let mut line = lock(&self.line);
        let in_flight = line.pipes[self.writes].bytes;
        line.pipes[self.writes].end(in_flight, false);
        line.pipes[1 - self.writes].end(0, true);
    }
}

/// See the module's text.
pub struct AcceleratorLink {
    line: Arc<Mutex<Line>>,
    near: Option<Mirror<End>>,
    far: Option<Mirror<End>>,
    /// The virtual time 0.
    start: Instant,
    now_ns: u64,
    /// When the engine's side sends its next heartbeat.
    beat_ns: u64,
    /// A heartbeat that the other side has not sent back.
    echo: Option<u64>,
    /// Messages to the accelerator and from it: sent, and received.
    sent: [u64; 2],
    received: [u64; 2],
    /// The fault that ends it.
    fails: Option<Fault>,
    rng: Rng,
}

impl AcceleratorLink {
    /// A link between the rings of two regions.
    pub fn new(near: Vec<Ends>, far: Vec<Ends>, mut rng: Rng) -> Self {
        let line = Arc::new(Mutex::new(Line {
            pipes: Default::default(),
            faults: LinkFaults::default(),
            now_ns: 0,
            stalled_until_ns: 0,
            silent_from_ns: u64::MAX,
            short: 0,
            rng: rng.fork(),
        }));
        let secret = Secret::of(b"a secret of the simulator, of at least 32 bytes");
        let ends = [0, 1].map(|writes| End { line: line.clone(), writes });
        let [to_far, to_near] = Channel::pair(ends, &secret).expect("both know the secret");
        let mut mirrors =
            [Mirror::new(to_far, Side::Engine), Mirror::new(to_near, Side::Accelerator)];
        mirrors[0].install(near);
        mirrors[1].install(far);
        let [near, far] = mirrors.map(Some);
        Self {
            line,
            near,
            far,
            start: Instant::now(),
            now_ns: 0,
            beat_ns: 0,
            echo: None,
            sent: [0; 2],
            received: [0; 2],
            fails: None,
            rng,
        }
    }

    /// Ends it: cuts, damages or silences the connection.
    pub fn fail(&mut self, fault: Fault) {
        let Self { line, rng, fails, .. } = self;
        let mut line = lock(line);
        *fails = Some(fault);
        match fault {
            Fault::LinkCut => {
                for pipe in &mut line.pipes {
                    let kept = rng.below(pipe.bytes as u64 + 1) as usize;
                    pipe.end(kept, rng.chance(500));
                }
            }
            Fault::LinkDamage => {
                line.pipes[rng.below(2) as usize].damage = true;
                // A record with another length may only end when much more has arrived.
                line.silent_from_ns = self.now_ns + line.faults.heartbeat_ns;
            }
            _ => line.silent_from_ns = self.now_ns,
        }
    }

    /// Nothing arrives for a part of the time after which a silent link is lost, unless it has stalled shortly before.
    pub fn stall(&mut self) -> bool {
        let mut line = lock(&self.line);
        let limit_ns = line.faults.heartbeat_ns;
        let stalls = self.now_ns >= line.stalled_until_ns + limit_ns / 2;
        if stalls {
            line.stalled_until_ns = self.now_ns + self.rng.below(limit_ns / BEATS);
        }
        stalls
    }

    /// The fault that ends it, if there was one.
    pub fn fails(&self) -> Option<Fault> {
        self.fails
    }

    /// The engine's side has noticed the end.
    pub fn is_broken(&self) -> bool {
        self.near.is_none()
    }

    /// Whether all messages have arrived and all slots were returned.
    pub fn is_settled(&self) -> bool {
        let settled =
            |mirror: &Option<Mirror<End>>| mirror.as_ref().is_some_and(Mirror::is_settled);
        settled(&self.near) && settled(&self.far) && self.sent == self.received
    }

    /// Time passes.
    pub fn advance(&mut self, until_ns: u64, net: &SharedNetwork) {
        if self.now_ns == 0 {
            (self.now_ns, self.beat_ns) = (until_ns, until_ns);
        }
        lock(&self.line).faults = lock(net).faults.link;
        let before = self.received;
        loop {
            self.turn(net);
            let next_ns = self.next_ns().max(self.now_ns + STEP_NS);
            if next_ns >= until_ns || self.near.is_none() {
                break;
            }
            self.now_ns = next_ns;
        }
        self.now_ns = until_ns;
        self.turn(net);
        let mut net = lock(net);
        for (sent, received) in self.sent.iter().zip(self.received) {
            if received > *sent {
                net.ledger.violate(|| format!("a link delivered {received} of {sent} messages"));
            }
        }
        if self.received != before {
            net.trace.note(until_ns, "link", &self.received);
        }
        net.fault_counts.many(Fault::LinkShort, std::mem::take(&mut lock(&self.line).short));
    }

    /// When one of the mirrors should have a turn.
    fn next_ns(&self) -> u64 {
        let mirrors = [&self.near, &self.far].into_iter().flatten();
        let pending = mirrors.into_iter().any(Mirror::is_pending);
        let pending_ns = if pending { self.now_ns + PENDING_NS } else { u64::MAX };
        // Later it would be silent.
        lock(&self.line).due_ns().min(self.beat_ns).min(pending_ns)
    }

    /// A turn of both mirrors, in any order.
    fn turn(&mut self, net: &SharedNetwork) {
        lock(&self.line).now_ns = self.now_ns;
        let near_first = self.rng.chance(500);
        for near in [near_first, !near_first] {
            let result = if near { self.turn_near() } else { self.turn_far() };
            let Err(broken) = result else { continue };
            if self.fails.is_none() {
                lock(net).ledger.violate(|| format!("a link broke without a cause: {broken}"));
            }
            // Its connection closes; the other side notices that.
            *(if near { &mut self.near } else { &mut self.far }) = None;
            if near {
                self.far = None;
            }
        }
    }

    fn turn_near(&mut self) -> Result<(), Broken> {
        let Some(near) = &mut self.near else { return Ok(()) };
        let heartbeat_ns = lock(&self.line).faults.heartbeat_ns;
        if self.now_ns >= self.beat_ns {
            self.beat_ns = self.now_ns + heartbeat_ns / BEATS;
            near.send_beat(self.now_ns);
        }
        let now = self.start + Duration::from_nanos(self.now_ns);
        let moved = near.turn(now, &mut |control| match control {
            Control::Beat(_) => Ok(()),
            other => Err(format!("the accelerator sent {other:?}")),
        })?;
        self.sent[0] += moved.sent as u64;
        self.received[1] += moved.received as u64;
        near.check(now, Duration::from_nanos(heartbeat_ns))
    }

    fn turn_far(&mut self) -> Result<(), Broken> {
        let Some(far) = &mut self.far else { return Ok(()) };
        let heartbeat_ns = lock(&self.line).faults.heartbeat_ns;
        let now = self.start + Duration::from_nanos(self.now_ns);
        let echo = &mut self.echo;
        let moved = far.turn(now, &mut |control| match control {
            Control::Beat(beat) => {
                *echo = Some(beat);
                Ok(())
            }
            other => Err(format!("the engine sent {other:?}")),
        })?;
        if self.echo.is_some_and(|beat| far.send_beat(beat)) {
            self.echo = None;
        }
        self.received[0] += moved.received as u64;
        self.sent[1] += moved.sent as u64;
        far.check(now, Duration::from_nanos(heartbeat_ns))
    }
}
