//! What one instance knows of requests that are in progress to the server: a ticket for each.
//!
//! A write has a ticket until the server has done it, or cannot do it any more. It holds a pending write of its [`Scope`], which ends with it.
//! A read has one if the cache has rewritten it, with its key and with what the answer may be kept under.
//!
//! *On a connection* a ticket is found by the number of its request. When the connection is lost, its reads are forgotten, and its
//! writes linger for the grace period: the server may still do them. If the instance has missed what happened, a ticket also ends with the
//! answer to a later request of its connection, since answers are shown in order, and after [`MISSED_NS`]: by then the proxy has given up its connection.
//!
//! *Datagrams* are found by their sender and the identifier in the frame. They linger from the beginning: the loss of one is not reported, and
//! an answer ends a write only if it is the only one with this sender and identifier that may still be answered. Otherwise all of
//! these writes end after the grace period of the last.
//!
//! All memory is reserved at the start. When there is no ticket for a request it is refused. Datagrams have at most half of the tickets, since their senders
//! need not wait for answers: they take none from connections.

use std::collections::HashMap;
use std::hash::{BuildHasher, Hasher};

use wire::session::{Origin, ReplyTo};

use super::command::{Form, KEY_BYTES_MAX};
use super::epochs::{Epochs, Scope, Words};

/// Tickets, and how many of them may be reads.
const TICKETS: usize = 1 << 13;
const READS: usize = 1 << 12;
/// Memory of tickets, of the keys of reads, and of two maps that are at most half full.
pub(super) const BYTES: u64 = (TICKETS * (size_of::<Ticket>() + 2 * 2 * size_of::<(Sent, u32)>())
    + READS * (KEY_BYTES_MAX + 4)) as u64;
/// A proxy gives up a connection on which the server answers nothing for ten times `request_timeout_ms`, which is at most an hour.
const MISSED_NS: u64 = 10 * 3_600_000_000_000;
/// Lists of tickets that end by themselves, in the order in which they do: after the grace period, and after [`MISSED_NS`].
const LISTS: usize = 2;
const AFTER_GRACE: usize = 0;
const AFTER_MISSED: usize = 1;
const NIL: u32 = u32::MAX;

/// Who sent a request, and how its answer is found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Sent {
    Stream { client: ReplyTo, number: u64 },
    Datagram { client: Origin, id: u16 },
}

/// What a ticket is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Purpose {
    Write {
        scope: Scope,
    },
    /// `flush_all`; the server forgets its keys between these times after it has done the command.
    Flush {
        begin_ns: u64,
        end_ns: u64,
    },
    Read(Read),
    /// `stats`, to whose answer the hits are added.
    Stats,
}

impl Purpose {
    /// Whether it may change keys.
    fn writes(&self) -> bool {
        matches!(self, Self::Write { .. } | Self::Flush { .. })
    }
}

/// A read that was rewritten.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Read {
    pub(super) hash: u64,
    /// The answer may be kept under these, if any.
    pub(super) words: Option<Words>,
    pub(super) asked_ns: u64,
    /// How the client asked.
    pub(super) form: Form,
    /// Another request of the same sender has the same identifier.
    pub(super) confused: bool,
    /// Datagrams of the answer that have come.
    pub(super) pieces: u16,
    /// Where its key is.
    key: u32,
    key_len: u8,
}

/// What a question carries, and its answer brings back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Mark {
    /// Which cache has asked.
    pub(super) tag: u32,
    /// How often the ticket was used, and its place.
    pub(super) generation: u32,
    pub(super) ticket: u32,
}

#[derive(Clone, Copy)]
struct Ticket {
    purpose: Option<Purpose>,
    sent: Sent,
    generation: u32,
    /// Of its connection or datagrams; or the next free one.
    next: u32,
    /// The list of those that end by themselves, if it is in one.
    lingers: Option<usize>,
    earlier: u32,
    later: u32,
    until_ns: u64,
}

/// The tickets of a connection, or of datagrams of one sender with one identifier.
#[derive(Clone, Copy)]
struct Group {
    first: u32,
    last: u32,
    /// Writes among them.
    writes: u32,
    /// Datagrams: there was more than one at a time.
    mixed: bool,
}

/// Hashes what clients may choose, with a secret.
#[derive(Clone)]
pub(super) struct Secret(pub(super) [u64; 2]);

/// See [`Secret`].
pub(super) struct Folded {
    state: u64,
    factor: u64,
}

#[inline]
fn fold(a: u64, b: u64) -> u64 {
    let product = u128::from(a) * u128::from(b);
    product as u64 ^ (product >> 64) as u64
}

impl Secret {
    /// Of these bytes.
    #[inline]
    pub(super) fn hash(&self, bytes: &[u8]) -> u64 {
        let mut hasher = self.build_hasher();
        hasher.write(bytes);
        hasher.finish()
    }
}

impl BuildHasher for Secret {
    type Hasher = Folded;

    #[inline]
    fn build_hasher(&self) -> Folded {
        Folded { state: self.0[0], factor: self.0[1] | 1 }
    }
}

impl Hasher for Folded {
    #[inline]
    fn write(&mut self, bytes: &[u8]) {
        self.write_u64(bytes.len() as u64);
        let (words, rest) = bytes.as_chunks::<8>();
        for word in words {
            self.write_u64(u64::from_le_bytes(*word));
        }
        if !rest.is_empty() {
            let mut last = [0; 8];
            last[..rest.len()].copy_from_slice(rest);
            self.write_u64(u64::from_le_bytes(last));
        }
    }

    #[inline]
    fn write_u64(&mut self, word: u64) {
        self.state = fold(self.state ^ word, self.factor).wrapping_add(word.rotate_left(23));
    }

    #[inline]
    fn finish(&self) -> u64 {
        fold(self.state, self.factor ^ 0x9e37_79b9_7f4a_7c15)
    }
}

/// See the module's text.
pub(super) struct Flight {
    tag: u32,
    tickets: Vec<Ticket>,
    free: u32,
    keys: Vec<u8>,
    free_keys: Vec<u32>,
    streams: HashMap<ReplyTo, Group, Secret>,
    datagrams: HashMap<(Origin, u16), Group, Secret>,
    /// Writes on connections.
    stream_writes: u32,
    /// Tickets of datagrams, and how many of them are reads.
    datagram_tickets: usize,
    datagram_reads: usize,
    /// First and last ticket of each list.
    lingering: [(u32, u32); LISTS],
    pub(super) grace_ns: u64,
}

impl Flight {
    pub(super) fn new(secret: &Secret, grace_ns: u64) -> Self {
        let nowhere = Sent::Datagram {
            client: Origin::Datagram {
                port: 0,
                peer: (std::net::Ipv4Addr::UNSPECIFIED, 0).into(),
                local: None,
            },
            id: 0,
        };
        let ticket = |next| Ticket {
            purpose: None,
            sent: nowhere,
            generation: 0,
            next,
            lingers: None,
            earlier: NIL,
            later: NIL,
            until_ns: 0,
        };
        let mut tickets: Vec<_> = (1..=TICKETS as u32).map(ticket).collect();
        tickets[TICKETS - 1].next = NIL;
        // Maps that are at most half full use the places of removed entries again.
        Self {
            tag: secret.hash(b"mark") as u32,
            tickets,
            free: 0,
            keys: vec![0; READS * KEY_BYTES_MAX],
            free_keys: (0..READS as u32).collect(),
            streams: HashMap::with_capacity_and_hasher(2 * TICKETS, secret.clone()),
            datagrams: HashMap::with_capacity_and_hasher(2 * TICKETS, secret.clone()),
            stream_writes: 0,
            datagram_tickets: 0,
            datagram_reads: 0,
            lingering: [(NIL, NIL); LISTS],
            grace_ns,
        }
    }

    /// Whether there is a ticket for a request that is no read.
    pub(super) fn has_room(&self, sent: &Sent) -> bool {
        let part = match sent {
            Sent::Datagram { .. } if !mutants::on("cache_datagrams_take_all") => TICKETS / 2,
            _ => TICKETS,
        };
        self.free != NIL && (part == TICKETS || self.datagram_tickets < part)
    }

    /// The same for a read.
    pub(super) fn has_room_to_read(&self, sent: &Sent) -> bool {
        let is_over = matches!(sent, Sent::Datagram { .. }) && self.datagram_reads >= READS / 2;
        self.has_room(sent) && !is_over && !self.free_keys.is_empty()
    }

    /// Whether writes of this connection are in progress.
    #[inline]
    pub(super) fn writes_of(&self, client: &ReplyTo) -> bool {
        self.stream_writes > 0 && self.streams.get(client).is_some_and(|group| group.writes > 0)
    }

    /// Whether an answer with this sender and identifier is awaited.
    pub(super) fn awaits(&self, client: &Origin, id: u16) -> bool {
        self.datagrams.contains_key(&(*client, id))
    }

    /// A datagram that gets no ticket has the identifier of one that may still be answered.
    pub(super) fn confuse(&mut self, client: &Origin, id: u16) {
        if let Some(group) = self.datagrams.get_mut(&(*client, id))
            && !std::mem::replace(&mut group.mixed, true)
        {
            let mut at = group.first;
            while at != NIL {
                let ticket = &mut self.tickets[at as usize];
                if let Some(Purpose::Read(read)) = &mut ticket.purpose {
                    read.confused = true;
                }
                at = ticket.next;
            }
        }
    }

    /// A read is about to be forwarded; there is room.
    pub(super) fn add_read(
        &mut self,
        sent: Sent,
        key: &[u8],
        (hash, words): (u64, Option<Words>),
        (asked_ns, form): (u64, Form),
    ) -> Mark {
        let at = self.free_keys.pop().expect("the caller asks first");
        self.keys[at as usize * KEY_BYTES_MAX..][..key.len()].copy_from_slice(key);
        let (confused, pieces, key_len) = (false, 0, key.len() as u8);
        let read = Read { hash, words, asked_ns, form, confused, pieces, key: at, key_len };
        self.add(sent, Purpose::Read(read), asked_ns)
    }

    /// A request is about to be forwarded; there is room.
    pub(super) fn add(&mut self, sent: Sent, purpose: Purpose, now_ns: u64) -> Mark {
        let at = self.free;
        let ticket = &mut self.tickets[at as usize];
        self.free = ticket.next;
        (ticket.purpose, ticket.sent, ticket.next) = (Some(purpose), sent, NIL);
        ticket.generation = ticket.generation.wrapping_add(1);
        let mark = self.mark_of(at);
        let is_write = purpose.writes();
        let empty = Group { first: NIL, last: NIL, writes: 0, mixed: false };
        let group = match sent {
            Sent::Stream { client, .. } => {
                self.stream_writes += u32::from(is_write);
                self.streams.entry(client).or_insert(empty)
            }
            Sent::Datagram { client, id } => {
                self.datagram_tickets += 1;
                self.datagram_reads += usize::from(matches!(purpose, Purpose::Read(_)));
                self.datagrams.entry((client, id)).or_insert(empty)
            }
        };
        group.writes += u32::from(is_write);
        match group.last {
            NIL => group.first = at,
            last => self.tickets[last as usize].next = at,
        }
        group.last = at;
        if let Sent::Datagram { client, id } = sent {
            if group.first != at {
                self.confuse(&client, id);
            }
            self.linger(at, AFTER_GRACE, now_ns);
        }
        mark
    }

    /// A ticket ends by itself after the time of this list, which it was not in.
    fn linger(&mut self, at: u32, list: usize, now_ns: u64) {
        self.stay(at);
        let grace_ns = if mutants::on("cache_no_grace") { 0 } else { self.grace_ns };
        let wait_ns = if list == AFTER_GRACE { grace_ns } else { MISSED_NS };
        let last = self.lingering[list].1;
        let ticket = &mut self.tickets[at as usize];
        (ticket.lingers, ticket.earlier, ticket.later) = (Some(list), last, NIL);
        ticket.until_ns = now_ns.saturating_add(wait_ns);
        match last {
            NIL => self.lingering[list].0 = at,
            last => self.tickets[last as usize].later = at,
        }
        self.lingering[list].1 = at;
    }

    /// A ticket does not end by itself any more.
    fn stay(&mut self, at: u32) {
        let Ticket { lingers: Some(list), earlier, later, .. } = self.tickets[at as usize] else {
            return;
        };
        match earlier {
            NIL => self.lingering[list].0 = later,
            earlier => self.tickets[earlier as usize].later = later,
        }
        match later {
            NIL => self.lingering[list].1 = earlier,
            later => self.tickets[later as usize].earlier = earlier,
        }
        self.tickets[at as usize].lingers = None;
    }

    /// The tickets of a stream's request: usually the first of its connection.
    fn find_stream(&self, client: &ReplyTo, number: u64) -> Option<u32> {
        let mut at = self.streams.get(client)?.first;
        while at != NIL {
            let ticket = &self.tickets[at as usize];
            if matches!(ticket.sent, Sent::Stream { number: n, .. } if n == number) {
                return Some(at);
            }
            at = ticket.next;
        }
        None
    }

    /// Whether a request of a connection has a ticket: it was shown before.
    pub(super) fn has(&self, client: &ReplyTo, number: u64) -> bool {
        let Some(group) = self.streams.get(client) else { return false };
        let last = self.tickets[group.last as usize].sent;
        let is_new = matches!(last, Sent::Stream { number: last, .. } if last < number);
        !is_new && self.find_stream(client, number).is_some()
    }

    /// The server has answered a request of a connection: it has done those before it, whose answers were missed.
    pub(super) fn end_before(
        &mut self,
        client: &ReplyTo,
        number: u64,
        epochs: &Epochs,
        now_ns: u64,
    ) {
        while let Some(Group { first, .. }) = self.streams.get(client).copied() {
            match self.tickets[first as usize] {
                Ticket { sent: Sent::Stream { number: before, .. }, lingers, .. }
                    if before < number && lingers == Some(AFTER_MISSED) =>
                {
                    self.remove(first, epochs, now_ns);
                }
                _ => return,
            }
        }
    }

    /// A request of a connection has ended. Returns what its ticket was for.
    pub(super) fn end_stream(
        &mut self,
        client: &ReplyTo,
        number: u64,
        epochs: &Epochs,
        now_ns: u64,
    ) -> Option<Purpose> {
        let at = self.find_stream(client, number)?;
        Some(self.remove(at, epochs, now_ns))
    }

    /// It is not known whether the server has done, or will do, a request of a connection.
    pub(super) fn lose_request(
        &mut self,
        client: &ReplyTo,
        number: u64,
        epochs: &Epochs,
        now_ns: u64,
    ) {
        if let Some(at) = self.find_stream(client, number) {
            self.lose(at, epochs, now_ns);
        }
    }

    /// A read is forgotten, a write lingers.
    fn lose(&mut self, at: u32, epochs: &Epochs, now_ns: u64) {
        let purpose = self.tickets[at as usize].purpose;
        if !purpose.is_some_and(|purpose| purpose.writes()) {
            self.remove(at, epochs, now_ns);
        } else if self.tickets[at as usize].lingers != Some(AFTER_GRACE)
            || mutants::on("cache_restart_grace")
        {
            self.linger(at, AFTER_GRACE, now_ns);
        }
    }

    /// An answer came in a datagram. Returns the only ticket that it can belong to.
    pub(super) fn find_datagram(&self, client: &Origin, id: u16) -> Option<(Mark, Purpose)> {
        let group = self.datagrams.get(&(*client, id))?;
        if group.mixed {
            return None;
        }
        Some((self.mark_of(group.first), self.tickets[group.first as usize].purpose?))
    }

    /// The read with this mark, if it was sent like this.
    pub(super) fn find_read(&mut self, mark: Mark, client: &Origin, id: u16) -> Option<&mut Read> {
        let ticket = self.tickets.get_mut(mark.ticket as usize)?;
        let sent = Sent::Datagram { client: *client, id };
        if ticket.generation != mark.generation || ticket.sent != sent {
            return None;
        }
        match &mut ticket.purpose {
            Some(Purpose::Read(read)) => Some(read),
            _ => None,
        }
    }

    fn mark_of(&self, ticket: u32) -> Mark {
        Mark { tag: self.tag, generation: self.tickets[ticket as usize].generation, ticket }
    }

    /// Whether the cache has asked the question with this mark.
    pub(super) fn is_own(&self, mark: Mark) -> bool {
        mark.tag == self.tag
    }

    /// The key of a read, whose ticket may have ended just now.
    pub(super) fn key_of(&self, read: &Read) -> &[u8] {
        &self.keys[read.key as usize * KEY_BYTES_MAX..][..usize::from(read.key_len)]
    }

    /// Ends a ticket.
    pub(super) fn end(&mut self, mark: Mark, epochs: &Epochs, now_ns: u64) {
        self.remove(mark.ticket, epochs, now_ns);
    }

    /// A connection is lost.
    pub(super) fn lose_stream(&mut self, client: &ReplyTo, epochs: &Epochs, now_ns: u64) {
        let Some(group) = self.streams.get(client) else { return };
        let mut at = group.first;
        while at != NIL {
            let next = self.tickets[at as usize].next;
            self.lose(at, epochs, now_ns);
            at = next;
        }
    }

    /// Ends what has lingered for long enough.
    #[inline]
    pub(super) fn expire(&mut self, epochs: &Epochs, now_ns: u64) {
        for list in 0..LISTS {
            while let (first, _) = self.lingering[list]
                && first != NIL
                && self.tickets[first as usize].until_ns <= now_ns
            {
                self.remove(first, epochs, now_ns);
            }
        }
    }

    /// What has happened to requests of connections may have been missed, from now on it is not.
    pub(super) fn see_again(&mut self, now_ns: u64) {
        let list = if mutants::on("cache_missed_grace") { AFTER_GRACE } else { AFTER_MISSED };
        for at in 0..self.tickets.len() as u32 {
            let ticket = &self.tickets[at as usize];
            if ticket.purpose.is_some() && ticket.lingers.is_none() {
                self.linger(at, list, now_ns);
            }
        }
    }

    fn remove(&mut self, at: u32, epochs: &Epochs, now_ns: u64) -> Purpose {
        let ticket = self.tickets[at as usize];
        let purpose = ticket.purpose.expect("only tickets in use are removed");
        if matches!(ticket.sent, Sent::Datagram { .. }) {
            self.datagram_tickets -= 1;
            self.datagram_reads -= usize::from(matches!(purpose, Purpose::Read(_)));
        }
        self.leave_group(at, &ticket, purpose.writes());
        self.stay(at);
        match purpose {
            Purpose::Write { scope } => epochs.end(scope),
            Purpose::Flush { begin_ns, end_ns } => {
                epochs.add_window(now_ns, now_ns + begin_ns, now_ns + end_ns);
                epochs.end(Scope::Whole);
            }
            Purpose::Read(read) => self.free_keys.push(read.key),
            Purpose::Stats => {}
        }
        let entry = &mut self.tickets[at as usize];
        (entry.purpose, entry.next) = (None, self.free);
        self.free = at;
        purpose
    }

    fn leave_group(&mut self, at: u32, ticket: &Ticket, is_write: bool) {
        let group = match &ticket.sent {
            Sent::Stream { client, .. } => {
                self.stream_writes -= u32::from(is_write);
                self.streams.get_mut(client)
            }
            Sent::Datagram { client, id } => self.datagrams.get_mut(&(*client, *id)),
        };
        let group = group.expect("a ticket has a group");
        group.writes -= u32::from(is_write);
        if group.first == at {
            group.first = ticket.next;
        } else {
            let mut before = group.first;
            while self.tickets[before as usize].next != at {
                before = self.tickets[before as usize].next;
            }
            self.tickets[before as usize].next = ticket.next;
            if group.last == at {
                group.last = before;
            }
        }
        if group.first == NIL {
            match &ticket.sent {
                Sent::Stream { client, .. } => _ = self.streams.remove(client),
                Sent::Datagram { client, id } => _ = self.datagrams.remove(&(*client, *id)),
            }
        }
    }
}
