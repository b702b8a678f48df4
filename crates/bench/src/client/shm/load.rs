//! A load over a shared-memory port.

use std::path::Path;

use sys::time::monotonic_ns;

use super::{Client, Options, ShmError};
use crate::client::{ClientError, Load, Outcome, Pace, Tally, WINDOW_MAX, Workload};

/// Outcomes received before new requests are sent.
const BATCH: usize = 64;
/// Outcomes per reading of the clock.
const LOOK: usize = 8;

/// State of a request's slot in the window.
#[derive(Clone, Copy, Debug)]
enum Slot {
    Free,
    Waiting { index: u64, due_ns: u64, sent_ns: u64 },
}

/// One run. A tag is a request's index in the window (low half) and the generation of that index (high half), so that
/// an outcome that arrives after its request was given up is recognized as late.
pub(in crate::client) struct Run<'a> {
    client: Client,
    path: &'a Path,
    slots: Vec<Slot>,
    lives: Vec<u32>,
    free: Vec<u32>,
    /// A request that found no room: its number and arrival time.
    held: Option<(u64, u64)>,
    workload: &'a mut dyn Workload,
    tally: Tally,
    request: Vec<u8>,
    reply: Vec<u8>,
}

impl<'a> Run<'a> {
    pub(in crate::client) fn new(
        path: &'a Path,
        load: &Load,
        workload: &'a mut dyn Workload,
    ) -> Result<Self, ClientError> {
        let mut tally = Tally::new(load, WINDOW_MAX)?;
        let options = Options { depth: load.window as u32, ..Options::default() };
        let client = Client::connect(path, &options)?;
        if !client.answers() {
            return Err(ClientError::NoReplies(path.to_owned()));
        }
        let depth = client.depth();
        if load.window > depth && load.pace == Pace::Closed {
            return Err(ClientError::Depth(load.window, path.to_owned(), depth));
        }
        // An open loop has the requests that have arrived; those without room are counted as unsent.
        let window = load.window.min(depth);
        tally.begin(load);
        Ok(Self {
            reply: vec![0; client.reply_bytes_max().max(load.reply_bytes_max)],
            client,
            path,
            slots: vec![Slot::Free; window],
            lives: vec![0; window],
            free: (0..window as u32).rev().collect(),
            held: None,
            workload,
            tally,
            request: Vec::new(),
        })
    }

    pub(in crate::client) fn run(mut self) -> Result<Outcome, ClientError> {
        // One reading of the clock is used for several messages: latencies begin with the reading before the request
        // was made, never after it.
        let mut now_ns = monotonic_ns();
        loop {
            self.send(now_ns)?;
            let mut received = 0;
            while received < BATCH {
                match self.client.try_receive(&mut self.reply)? {
                    Some(reply) => {
                        if received % LOOK == 0 {
                            now_ns = monotonic_ns();
                        }
                        received += 1;
                        self.settle(reply, now_ns);
                    }
                    None => break,
                }
            }
            if received == 0 {
                now_ns = monotonic_ns();
                if self.tally.search_is_due(now_ns) {
                    self.search(now_ns)?;
                }
            }
            if self.tally.turn(received > 0, now_ns) {
                return Ok(self.tally.finish());
            }
            self.tally.idle(received > 0);
        }
    }

    /// Fills the window, as far as the rings have room.
    fn send(&mut self, now_ns: u64) -> Result<(), ClientError> {
        while let Some(place) = self.free.last().copied() {
            // Requests that were given up still occupy a slot of the rings.
            if self.client.in_flight() == self.client.depth() {
                break;
            }
            let next = self.held.take().or_else(|| self.tally.next(now_ns));
            let Some((index, due_ns)) = next else { break };
            self.request.clear();
            self.workload.request(index, &mut self.request);
            let life = self.lives[place as usize];
            let tag = u64::from(life) << 32 | u64::from(place);
            match self.client.try_send(tag, &self.request) {
                Ok(()) => {
                    self.free.pop();
                    self.slots[place as usize] = Slot::Waiting { index, due_ns, sent_ns: now_ns };
                }
                // No room for a long message until the engine has taken earlier ones.
                Err(ShmError::Full) => {
                    self.held = Some((index, due_ns));
                    break;
                }
                Err(error) => return Err(error.into()),
            }
        }
        self.client.publish();
        Ok(())
    }

    fn settle(&mut self, reply: super::Reply, now_ns: u64) {
        let place = reply.tag as u32 as usize;
        // A tag of an earlier generation: its request was given up.
        let known = self.lives.get(place).is_some_and(|life| *life == (reply.tag >> 32) as u32);
        let Some(Slot::Waiting { index, due_ns, .. }) =
            self.slots.get(place).copied().filter(|_| known)
        else {
            self.tally.outcome.late += u64::from(reply.lost.is_none());
            return;
        };
        match reply.lost {
            None => {
                let right = self.workload.accepts(index, &self.reply[..reply.len]);
                self.tally.reply(right, due_ns, now_ns);
            }
            Some(_) => self.tally.lose(due_ns, now_ns),
        }
        self.retire(place);
    }

    fn retire(&mut self, place: usize) {
        self.slots[place] = Slot::Free;
        self.lives[place] = self.lives[place].wrapping_add(1);
        self.free.push(place as u32);
    }

    fn search(&mut self, now_ns: u64) -> Result<(), ClientError> {
        if self.client.is_closed() {
            return Err(ClientError::Ended(self.path.to_owned()));
        }
        for place in 0..self.slots.len() {
            if let Slot::Waiting { due_ns, sent_ns, .. } = self.slots[place]
                && self.tally.is_late(sent_ns, now_ns)
            {
                self.tally.lose(due_ns, now_ns);
                self.retire(place);
            }
        }
        Ok(())
    }
}
