//! The UDP side: a socket for every request in flight.

use std::net::SocketAddr;

use sys::time::monotonic_ns;
use sys::{SocketNic, SocketOptions};
use wire::nic::{Close, Event, Nic, Read, Transport, Written};

use super::{ClientError, Load, Outcome, REST_NS, Tally, Workload};

/// What one socket is doing.
#[derive(Clone, Copy)]
enum Slot {
    /// Nothing, until its time.
    Resting(u64),
    /// Ready for a request.
    Free,
    /// A request that the host kernel has not taken yet.
    Unsent(u64),
    /// A request whose reply is awaited.
    Waiting { index: u64, sent_ns: u64 },
}

pub(super) struct Run<'w> {
    nic: SocketNic,
    address: SocketAddr,
    slots: Vec<Slot>,
    tally: Tally,
    workload: &'w mut dyn Workload,
    request: Vec<u8>,
    reply: Vec<u8>,
}

/// Small buffers: a socket carries one datagram each way.
fn options() -> SocketOptions {
    SocketOptions {
        receive_buffer_bytes: 256 << 10,
        send_buffer_bytes: 256 << 10,
        ..SocketOptions::default()
    }
}

impl<'w> Run<'w> {
    pub(super) fn new(
        address: SocketAddr,
        load: &Load,
        workload: &'w mut dyn Workload,
    ) -> Result<Self, ClientError> {
        let mut tally = Tally::new(load)?;
        let failed = |error: String| ClientError::Socket(address, error);
        let mut nic = SocketNic::open(&[], options()).map_err(|e| failed(e.to_string()))?;
        for key in 0..load.window as u32 {
            nic.connect(address, Transport::Udp, key).map_err(|e| failed(e.to_string()))?;
        }
        // Opening many sockets takes time that is not the server's.
        let now_ns = monotonic_ns();
        let late = now_ns - tally.began_ns;
        tally.began_ns = now_ns;
        tally.last_ns = now_ns;
        tally.stop_ns = tally.stop_ns.saturating_add(late);
        Ok(Self {
            nic,
            address,
            slots: vec![Slot::Free; load.window],
            tally,
            workload,
            request: Vec::new(),
            reply: vec![0; load.reply_bytes_max.max(1)],
        })
    }

    pub(super) fn run(mut self) -> Result<Outcome, ClientError> {
        let mut events = Vec::new();
        for key in 0..self.slots.len() {
            self.start(key, monotonic_ns())?;
        }
        loop {
            self.nic.poll(0, &mut events);
            for event in &events {
                match *event {
                    Event::Readable(key) => self.receive(key as usize)?,
                    Event::Writable(key) => self.resume(key as usize)?,
                    Event::Failed(key) => self.replace(key as usize, true)?,
                    _ => {}
                }
            }
            let now_ns = monotonic_ns();
            if self.tally.search_is_due(now_ns) {
                self.search(now_ns)?;
            }
            if self.tally.is_over(now_ns) {
                return Ok(self.tally.finish());
            }
            self.tally.idle(!events.is_empty());
        }
    }

    /// Sends the next request, if there is one.
    fn start(&mut self, key: usize, now_ns: u64) -> Result<(), ClientError> {
        self.slots[key] = Slot::Free;
        let Some(index) = self.tally.next(now_ns) else { return Ok(()) };
        self.request.clear();
        self.workload.request(index, &mut self.request);
        self.send(key, index)
    }

    fn send(&mut self, key: usize, index: u64) -> Result<(), ClientError> {
        let sent_ns = monotonic_ns();
        match self.nic.write(key as u32, &self.request) {
            Written::Bytes(_) => self.slots[key] = Slot::Waiting { index, sent_ns },
            Written::Full => self.slots[key] = Slot::Unsent(index),
            Written::Broken => {
                self.tally.outcome.lost += 1;
                self.replace(key, false)?;
            }
        }
        Ok(())
    }

    /// The socket has room again.
    fn resume(&mut self, key: usize) -> Result<(), ClientError> {
        if let Slot::Unsent(index) = self.slots[key] {
            self.request.clear();
            self.workload.request(index, &mut self.request);
            self.send(key, index)?;
        }
        Ok(())
    }

    fn receive(&mut self, key: usize) -> Result<(), ClientError> {
        match self.nic.read(key as u32, &mut self.reply) {
            Read::Bytes(len) => {
                let now_ns = monotonic_ns();
                // Nothing was asked on this socket: a second reply.
                let Slot::Waiting { index, sent_ns } = self.slots[key] else { return Ok(()) };
                let right = self.workload.accepts(index, &self.reply[..len]);
                self.tally.reply(right, sent_ns, now_ns);
                self.start(key, now_ns)
            }
            Read::Empty => Ok(()),
            // The host kernel reports that nobody listens (ICMP), perhaps about an earlier request.
            Read::Closed | Read::Broken => self.replace(key, true),
        }
    }

    /// Gives a socket up, so that whatever still arrives there reaches nobody, and rests.
    fn replace(&mut self, key: usize, loses: bool) -> Result<(), ClientError> {
        if loses && matches!(self.slots[key], Slot::Waiting { .. } | Slot::Unsent(_)) {
            self.tally.outcome.lost += 1;
        }
        self.tally.outcome.reconnects += 1;
        self.nic.close(key as u32, Close::Reset);
        self.slots[key] = Slot::Resting(monotonic_ns() + REST_NS);
        let opened = self.nic.connect(self.address, Transport::Udp, key as u32);
        opened.map_err(|e| ClientError::Socket(self.address, e.to_string()))
    }

    fn search(&mut self, now_ns: u64) -> Result<(), ClientError> {
        for key in 0..self.slots.len() {
            match self.slots[key] {
                Slot::Waiting { sent_ns, .. }
                    if now_ns - sent_ns.min(now_ns) > self.tally.timeout_ns =>
                {
                    self.replace(key, true)?;
                }
                Slot::Resting(until) if now_ns >= until => self.start(key, now_ns)?,
                _ => {}
            }
        }
        Ok(())
    }
}
