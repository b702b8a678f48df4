//! The UDP client with a socket for every request in flight.
//!
//! The sockets are polled by reading, without a readiness call, in the order in which their requests were sent, which
//! is the order in which most servers answer. Between two polls of the oldest one the others are polled in turn, so
//! that answers in another order are found as well. A request that has been overtaken by much later ones is probably
//! lost; it is polled rarely until its time-out.

use std::collections::VecDeque;
use std::io::{self, ErrorKind};
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};
use std::time::Duration;

use sys::time::monotonic_ns;

use super::{ClientError, Load, Outcome, RETRY_DELAY_NS, Tally, WINDOW_MAX, Workload};

/// A request that was overtaken by one sent this much later is polled rarely.
const OVERTAKEN_NS: u64 = 1_000_000;
/// Maximum number of unexpected replies that are counted at a time.
const UNASKED_MAX: usize = 16;

/// State of one socket.
#[derive(Clone, Copy)]
enum State {
    /// Idle until this time.
    Resting(u64),
    /// Ready for a request.
    Free,
    /// A request that the host kernel has not accepted yet.
    Unsent { index: u64, due_ns: u64 },
    /// A request whose reply is awaited.
    Waiting { index: u64, due_ns: u64, sent_ns: u64 },
}

struct Slot {
    socket: UdpSocket,
    state: State,
    /// The last request that was answered, to recognize a duplicate of its answer.
    answered: Option<u64>,
}

pub(super) struct Run<'w> {
    address: SocketAddr,
    slots: Vec<Slot>,
    /// Sockets that may take a request.
    free: Vec<usize>,
    /// Waiting sockets, by the time of sending.
    young: VecDeque<usize>,
    /// Index in `young` of the next poll besides the oldest.
    young_at: usize,
    /// Waiting sockets that were overtaken, and the next one to poll.
    old: Vec<usize>,
    old_at: usize,
    /// When the latest answered request was sent.
    answered_sent_ns: u64,
    tally: Tally,
    workload: &'w mut dyn Workload,
    request: Vec<u8>,
    reply: Vec<u8>,
}

fn open(address: SocketAddr) -> Result<UdpSocket, ClientError> {
    let any: SocketAddr = match address {
        SocketAddr::V4(_) => (Ipv4Addr::UNSPECIFIED, 0).into(),
        SocketAddr::V6(_) => (Ipv6Addr::UNSPECIFIED, 0).into(),
    };
    let open = || -> io::Result<UdpSocket> {
        let socket = UdpSocket::bind(any)?;
        socket.connect(address)?;
        socket.set_nonblocking(true)?;
        Ok(socket)
    };
    open().map_err(|error| ClientError::Socket(address, error.to_string()))
}

impl<'w> Run<'w> {
    pub(super) fn new(
        address: SocketAddr,
        load: &Load,
        workload: &'w mut dyn Workload,
    ) -> Result<Self, ClientError> {
        let mut tally = Tally::new(load, WINDOW_MAX)?;
        let slot =
            |_| open(address).map(|socket| Slot { socket, state: State::Free, answered: None });
        let slots = (0..load.window).map(slot).collect::<Result<Vec<_>, _>>()?;
        tally.begin(load);
        Ok(Self {
            address,
            free: (0..slots.len()).rev().collect(),
            young: VecDeque::with_capacity(slots.len()),
            young_at: 0,
            old: Vec::new(),
            old_at: 0,
            answered_sent_ns: 0,
            slots,
            tally,
            workload,
            request: Vec::new(),
            reply: vec![0; load.reply_bytes_max.max(1)],
        })
    }

    pub(super) fn run(mut self) -> Result<Outcome, ClientError> {
        loop {
            let mut found = self.ask()?;
            found |= self.look()?;
            let now_ns = monotonic_ns();
            if self.tally.search_is_due(now_ns) {
                self.search(now_ns)?;
            }
            if self.tally.turn(found, now_ns) {
                self.count_unasked_at_end();
                return Ok(self.tally.finish());
            }
            self.tally.idle(found);
        }
    }

    /// Sends what may be sent now. Returns whether anything was sent.
    fn ask(&mut self) -> Result<bool, ClientError> {
        let mut asked = false;
        while let Some(&key) = self.free.last() {
            let Some((index, due_ns)) = self.tally.next(monotonic_ns()) else { break };
            self.free.pop();
            self.send(key, index, due_ns)?;
            asked = true;
        }
        Ok(asked)
    }

    fn send(&mut self, key: usize, index: u64, due_ns: u64) -> Result<(), ClientError> {
        self.request.clear();
        self.workload.request(index, &mut self.request);
        if !self.workload.replies_differ() {
            self.count_unasked(key);
        }
        let sent_ns = monotonic_ns();
        let mut sent = self.slots[key].socket.send(&self.request);
        if sent.as_ref().is_err_and(|e| e.kind() == ErrorKind::ConnectionRefused) {
            // Possibly the error of an earlier request (ICMP), which the call has consumed.
            sent = self.slots[key].socket.send(&self.request);
        }
        match sent {
            Ok(_) => {
                self.slots[key].state = State::Waiting { index, due_ns, sent_ns };
                self.young.push_back(key);
            }
            Err(e) if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => {
                self.slots[key].state = State::Unsent { index, due_ns };
            }
            Err(e) if e.kind() == ErrorKind::ConnectionRefused => {
                self.tally.lose(due_ns, sent_ns);
                self.replace(key, true)?;
            }
            Err(e) => return Err(ClientError::Send(self.address, self.request.len(), e)),
        }
        Ok(())
    }

    /// Nothing is in flight on the socket: a reply there is a duplicate.
    fn count_unasked(&mut self, key: usize) {
        for _ in 0..UNASKED_MAX {
            match self.slots[key].socket.recv(&mut self.reply) {
                Ok(_) => self.tally.outcome.duplicated += 1,
                Err(_) => break,
            }
        }
    }

    /// A duplicate of a reply may follow the last one, or still be in flight.
    fn count_unasked_at_end(&mut self) {
        if self.workload.replies_differ() {
            return;
        }
        std::thread::sleep(Duration::from_nanos(RETRY_DELAY_NS));
        for key in 0..self.slots.len() {
            if matches!(self.slots[key].state, State::Free) {
                self.count_unasked(key);
            }
        }
    }

    /// Polls for replies. Returns whether there was one.
    fn look(&mut self) -> Result<bool, ClientError> {
        let mut found = false;
        // As many as there are at most; otherwise a fast server would keep the loop here.
        for _ in 0..self.young.len() {
            let Some(&key) = self.young.front() else { break };
            if !self.receive(key)? {
                break;
            }
            self.young.pop_front();
            self.ask()?;
            found = true;
        }
        for _ in 1..self.young.len() {
            if self.young.len() < 2 {
                break;
            }
            if self.young_at == 0 || self.young_at >= self.young.len() {
                self.young_at = 1;
            }
            if !self.receive(self.young[self.young_at])? {
                self.young_at += 1;
                break;
            }
            self.young.remove(self.young_at);
            self.ask()?;
            found = true;
        }
        if !self.old.is_empty() {
            self.old_at = (self.old_at + 1) % self.old.len();
            if self.receive(self.old[self.old_at])? {
                self.old.swap_remove(self.old_at);
                found = true;
            }
        }
        Ok(found)
    }

    /// Reads from a waiting socket. Returns true if its request has ended: the socket is to be removed from its list.
    fn receive(&mut self, key: usize) -> Result<bool, ClientError> {
        let slot = &mut self.slots[key];
        let State::Waiting { index, due_ns, sent_ns } = slot.state else { return Ok(true) };
        match slot.socket.recv(&mut self.reply) {
            Ok(len) => {
                let now_ns = monotonic_ns();
                let reply = &self.reply[..len];
                let right = self.workload.accepts(index, reply);
                if right {
                    slot.answered = Some(index);
                    slot.state = State::Free;
                    self.free.push(key);
                } else if slot.answered.is_some_and(|last| self.workload.accepts(last, reply)) {
                    self.tally.outcome.duplicated += 1;
                    return Ok(false);
                } else {
                    // Other datagrams match no request.
                    self.replace(key, false)?;
                }
                self.answered_sent_ns = self.answered_sent_ns.max(sent_ns);
                self.tally.reply(right, due_ns, now_ns);
                Ok(true)
            }
            Err(e) if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => {
                Ok(false)
            }
            // The host kernel reports that no server listens (ICMP).
            Err(_) => {
                self.tally.lose(due_ns, monotonic_ns());
                self.replace(key, true)?;
                Ok(true)
            }
        }
    }

    /// Closes a socket, so that late datagrams are not received. The new one waits if `rests`, because an immediate
    /// retry would only keep two machines busy.
    fn replace(&mut self, key: usize, rests: bool) -> Result<(), ClientError> {
        self.tally.outcome.reconnects += 1;
        let state =
            if rests { State::Resting(monotonic_ns() + RETRY_DELAY_NS) } else { State::Free };
        self.slots[key] = Slot { socket: open(self.address)?, state, answered: None };
        if !rests {
            self.free.push(key);
        }
        Ok(())
    }

    /// Checks that are not needed in every turn.
    fn search(&mut self, now_ns: u64) -> Result<(), ClientError> {
        let mut lost = false;
        for key in 0..self.slots.len() {
            match self.slots[key].state {
                State::Waiting { due_ns, sent_ns, .. } if self.tally.is_late(sent_ns, now_ns) => {
                    self.tally.lose(due_ns, now_ns);
                    self.replace(key, false)?;
                    lost = true;
                }
                State::Resting(until) if now_ns >= until => {
                    self.slots[key].state = State::Free;
                    self.free.push(key);
                }
                State::Unsent { index, due_ns } => self.send(key, index, due_ns)?,
                _ => {}
            }
        }
        let slots = &self.slots;
        let sent_ns = |key: usize| match slots[key].state {
            State::Waiting { sent_ns, .. } => Some(sent_ns),
            _ => None,
        };
        if lost {
            self.young.retain(|&key| sent_ns(key).is_some());
            self.old.retain(|&key| sent_ns(key).is_some());
        }
        let overtaken = |key| {
            sent_ns(key).is_some_and(|sent_ns| sent_ns + OVERTAKEN_NS < self.answered_sent_ns)
        };
        while let Some(&key) = self.young.front()
            && overtaken(key)
        {
            self.young.pop_front();
            self.old.push(key);
        }
        Ok(())
    }
}
