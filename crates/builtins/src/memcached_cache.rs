//! A cache in front of an unmodified memcached: it answers `get` and `gets`, and never serves what was overwritten.
//!
//! *Answers.* A hit of `get`, `gets`, `mg KEY v` or `mg KEY k v` is answered where it arrives, and the server does not see it. On a miss the request
//! is forwarded as `mg KEY v f c t`, which brings the flags, the number for `cas` and the remaining time as well, and the client gets the answer in the form in which
//! it asked. All other commands are forwarded as they are.
//!
//! *Writes* are all commands that may change a key, also if they fail: `set` of a value that is too long removes the former one. A write
//! makes entries of its key invalid before it is forwarded, and they stay so until the server has answered it, or a grace period
//! has passed if that is not known. The instances of all workers share this knowledge, and nothing else: `epochs.rs` has the argument,
//! `flight.rs` says which requests are in progress, and `store.rs` keeps the values of one worker.
//!
//! *Time.* An entry is served for a second less than the server said it would live, counted from when it was asked, and at most for
//! `age_ms`. Every `sample`-th hit is forwarded, so that the server knows which keys are in use.
//!
//! *Absence.* With `absent_ms` it is also kept that the server does not have a key, under the same rules: a command that creates the key is a write.
//!
//! *Order.* A request on a connection is not answered from the cache while a write of the same connection is in progress, so a
//! client sees what it wrote. Pipelined reads may be answered from different moments.
//!
//! *Refused* are messages that are not exactly one command that is known, and datagrams that are not a whole request: memcached takes the next
//! datagram, of any client, for the rest of an incomplete one. They are dropped.

mod answer;
mod command;
mod epochs;
#[cfg(test)]
mod epochs_tests;
mod flight;
mod hits;
mod many;
mod settings;
mod store;

use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;
use std::sync::atomic::{self, AtomicBool, AtomicU64, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

use wire::DropReason;
use wire::framing::{UDP_HEADER_BYTES, UdpHeader};
use wire::session::Origin;

use self::answer::{
    Answer, FirstLine, Head, ends_write, read_answer, write_end, write_meta, write_question,
    write_stats,
};
use self::command::{Command, FlushAt, Form, KEY_BYTES_MAX, Key, sort};
use self::epochs::{Epochs, Scope};
use self::flight::{Flight, Purpose, Read, Secret, Sent};
use self::hits::{Asks, split};
use self::settings::{
    AT_ABSENT, AT_AGE, AT_GRACE, AT_MEMORY, AT_UDP_WRITES, COUNTS, Counts, SETTINGS,
};
use self::store::{About, Store};
use crate::instances::{Instances, Memory};
use onpath::Spec;
use onpath::{Direction, End, Failure, Function, Merge, Notice, Register, RequestId};
use onpath::{MESSAGES_MAX, Messages};
use settings::CACHE_MEMORY_MIB;

const SLOT_BITS: u32 = 18;
/// A smaller batch is not prepared.
const PREPARED_MIN: usize = 4;
const MS: u64 = 1_000_000;
const SECOND: u64 = 1_000_000_000;
/// memcached counts whole seconds, and a flush with a delay strikes up to two seconds early.
const FLUSH_EARLY_S: u64 = 2;
const FLUSH_LATE_S: u64 = 1;

/// What the instances of all workers share.
struct Shared {
    epochs: Epochs,
    secret: Secret,
    /// The server may have stale keys, which `mg` changes: `get` is not forwarded as `mg` any more.
    has_stale: AtomicBool,
    /// Of all instances: values that they served, and keys of which they said that they are not there.
    hits: AtomicU64,
    absences: AtomicU64,
}

/// A pending write of all keys, which says that an instance does not see the messages of its worker. It is counted once.
#[derive(Clone)]
struct Blind {
    shared: Arc<Shared>,
    is_counted: Arc<AtomicBool>,
}

impl Blind {
    fn begin(&self) {
        if !self.is_counted.swap(true, Ordering::Relaxed) {
            self.shared.epochs.begin(Scope::Whole);
        }
    }

    fn end(&self) {
        if self.is_counted.swap(false, Ordering::Relaxed) {
            self.shared.epochs.end(Scope::Whole);
        }
    }
}

/// Whether an instance sees the messages of its worker. [`Blind`] is counted unless it does.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Sees {
    /// It never did: it is not attached.
    Nothing,
    /// It does not any more.
    NothingMore,
    /// From now on it does.
    FromNow,
    Everything,
}

/// The cache of one worker. See the module's text.
pub struct MemcachedCache {
    shared: Arc<Shared>,
    blind: Blind,
    sees: Sees,
    flight: Option<Box<Flight>>,
    store: Option<Store>,
    settings: [u64; SETTINGS.len()],
    counts: Counts,
    hits_until_sample: u64,
    now_ns: u64,
    scratch: Vec<u8>,
    /// The keys of a request for several.
    many: Vec<u8>,
    /// What [`Self::prepare`] has found out about the requests of this batch, from the first on, and memory for that.
    plain: Vec<Option<Asks>>,
    hashes: Vec<u64>,
    places: Vec<u32>,
    registers: Vec<Register>,
}

/// The caches of one service.
pub(crate) fn instances() -> Instances {
    let random = RandomState::new();
    let secret = Secret([random.hash_one(1), random.hash_one(2)]);
    let epochs = Epochs::new(SLOT_BITS);
    let shared = Arc::new(Shared {
        epochs,
        secret,
        has_stale: AtomicBool::new(false),
        hits: AtomicU64::new(0),
        absences: AtomicU64::new(0),
    });
    Arc::new(move || Box::new(MemcachedCache::new(Arc::clone(&shared))))
}

/// A request of a client as the cache sees it.
#[derive(Clone, Copy)]
struct Asked {
    index: usize,
    sent: Sent,
    now_ns: u64,
}

impl MemcachedCache {
    fn new(shared: Arc<Shared>) -> Self {
        let blind = Blind { shared: Arc::clone(&shared), is_counted: Arc::default() };
        if !mutants::on("cache_serve_unattached") {
            blind.begin();
        }
        let register = |name: &&str, merge| Register { name: (*name).into(), merge };
        let counts = COUNTS.iter().map(|name| register(name, Merge::Sum));
        let used = ["entries", "bytes"].map(|name| register(&name, Merge::Sum));
        let settings = SETTINGS.iter().map(|(name, ..)| register(name, Merge::Setting));
        Self {
            shared,
            blind,
            sees: Sees::Nothing,
            flight: None,
            store: None,
            settings: SETTINGS.map(|(_, value, ..)| value),
            counts: Counts::default(),
            hits_until_sample: 0,
            now_ns: 0,
            scratch: Vec::new(),
            many: Vec::new(),
            plain: Vec::new(),
            hashes: Vec::new(),
            places: Vec::new(),
            registers: counts.chain(used).chain(settings).collect(),
        }
    }

    /// The instance does not see what passes from now on.
    fn see_nothing(&mut self) {
        match self.sees {
            Sees::Everything | Sees::FromNow => self.blind.begin(),
            // It was never sent to a worker.
            Sees::Nothing => self.blind.end(),
            Sees::NothingMore => {}
        }
        self.sees = Sees::NothingMore;
    }

    /// At the beginning of a call, or of a millisecond.
    fn begin(&mut self, now_ns: u64) {
        let epochs = &self.shared.epochs;
        if let Some(flight) = &mut self.flight {
            if self.sees == Sees::FromNow {
                // What passed unseen before may be in progress.
                epochs.raise_floor(now_ns + flight.grace_ns);
                flight.see_again(now_ns);
                self.blind.end();
                self.sees = Sees::Everything;
            }
            flight.expire(epochs, now_ns);
        }
        epochs.open_windows(now_ns);
    }

    fn refuse(&mut self, messages: &mut Messages, index: usize) {
        self.counts.refused += 1;
        messages.drop(index, DropReason::FunctionDrop);
    }

    fn take_request(&mut self, messages: &mut Messages, index: usize) {
        let plain = self.plain.get(index).copied().flatten();
        if plain.is_some_and(|asks| self.hit(messages, index, &asks)) {
            return;
        }
        let RequestId { origin, number } = *messages.request(index);
        let now_ns = messages.now_ns();
        let message = messages.bytes(index);
        let (sent, body) = match (split(&origin, message), origin) {
            (Some((None, body)), Origin::Client(client)) => (Sent::Stream { client, number }, body),
            (Some((Some(UdpHeader { id, .. }), body)), client) => {
                (Sent::Datagram { client, id }, body)
            }
            _ => return self.refuse(messages, index),
        };
        let asked = Asked { index, sent, now_ns };
        if let Some(asks) = plain {
            return self.miss(messages, &asked, &asks);
        }
        let Some(sorted) = sort(body) else { return self.refuse(messages, index) };
        if sorted.makes_stale {
            self.shared.has_stale.store(true, Ordering::Release);
        }
        match sorted.command {
            Command::Get { key, form } => {
                let asks = Asks::new(message, key, self.shared.secret.hash(key), form);
                if !self.hit(messages, index, &asks) {
                    self.miss(messages, &asked, &asks);
                }
            }
            Command::GetMany { keys, cas } => {
                let keys = self.copied(keys);
                self.take_many(messages, &asked, keys, cas);
            }
            Command::Other => self.pass(&asked),
            Command::Stats => self.stats(&asked),
            Command::Write(key) => {
                let scope = self.scope_of(&key);
                let forgotten = mutants::on("cache_noreply_forgotten") && is_quiet(message);
                self.write(messages, &asked, Purpose::Write { scope }, forgotten);
            }
            Command::WriteMany => {
                self.write(messages, &asked, Purpose::Write { scope: Scope::Whole }, false);
            }
            Command::Flush(at) => self.flush(messages, &asked, at),
        }
    }

    fn scope_of(&self, key: &Key<'_>) -> Scope {
        let Shared { epochs, secret, .. } = &*self.shared;
        let mut decoded = [0; KEY_BYTES_MAX];
        let bytes = key.bytes(&mut decoded);
        bytes.map_or(Scope::Whole, |key| Scope::Slot(epochs.slot_of(secret.hash(key))))
    }

    /// A request that has no ticket is forwarded.
    fn pass(&mut self, asked: &Asked) {
        if let (Sent::Datagram { client, id }, Some(flight)) = (asked.sent, &mut self.flight) {
            flight.confuse(&client, id);
        }
    }

    fn stats(&mut self, asked: &Asked) {
        match (&asked.sent, &mut self.flight) {
            (Sent::Stream { client, number }, Some(flight))
                if flight.has_room(&asked.sent) && !flight.has(client, *number) =>
            {
                flight.add(asked.sent, Purpose::Stats, asked.now_ns);
            }
            _ => self.pass(asked),
        }
    }

    /// Forwards a read as a question of the cache's own.
    fn ask(&mut self, messages: &mut Messages, asked: &Asked, key: &[u8], hash: u64, form: Form) {
        let Shared { epochs, has_stale, .. } = &*self.shared;
        let Some(flight) = &mut self.flight else { return };
        let has_room = flight.has_room_to_read(&asked.sent);
        let is_known = match &asked.sent {
            Sent::Stream { client, number } => {
                flight.has(client, *number) && !mutants::on("cache_ask_again")
            }
            Sent::Datagram { client, id } => flight.awaits(client, *id),
        };
        // No question is longer than this.
        let fits = messages.room() >= UDP_HEADER_BYTES + 2 * KEY_BYTES_MAX;
        if !has_room || is_known || !fits || has_stale.load(Ordering::Acquire) {
            self.counts.unasked += 1;
            return self.pass(asked);
        }
        let words = epochs.words(epochs.slot_of(hash));
        let mark = flight.add_read(asked.sent, key, (hash, words), (asked.now_ns, form));
        let out = &mut self.scratch;
        out.clear();
        if let Sent::Datagram { id, .. } = asked.sent {
            out.extend_from_slice(&UdpHeader::request(id).bytes());
        }
        write_question(key, form, mark, out);
        messages.rewrite(asked.index, out);
    }

    fn write(&mut self, messages: &mut Messages, asked: &Asked, purpose: Purpose, forgotten: bool) {
        let Some(flight) = &mut self.flight else { return };
        let is_datagram = matches!(asked.sent, Sent::Datagram { .. });
        let is_known =
            matches!(&asked.sent, Sent::Stream { client, number } if flight.has(client, *number));
        if is_known && !mutants::on("cache_write_again") {
            return;
        }
        if !flight.has_room(&asked.sent) || is_datagram && self.settings[AT_UDP_WRITES] == 0 {
            return self.refuse(messages, asked.index);
        }
        self.counts.writes += 1;
        let scope = match &purpose {
            Purpose::Write { scope } => *scope,
            Purpose::Flush { .. } | Purpose::Read(_) | Purpose::Stats => Scope::Whole,
        };
        self.shared.epochs.begin(scope);
        if forgotten {
            return self.shared.epochs.end(scope);
        }
        flight.add(asked.sent, purpose, asked.now_ns);
    }

    fn flush(&mut self, messages: &mut Messages, asked: &Asked, at: FlushAt) {
        let delay_s = match at {
            FlushAt::Delay { delay_s } => u64::from(delay_s),
            // Rare enough to look at the clock.
            FlushAt::Date { unix_s } => {
                let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
                u64::from(unix_s).saturating_sub(now.as_secs())
            }
        };
        if mutants::on("cache_ignore_flush") || delay_s > 0 && mutants::on("cache_flush_at_once") {
            return;
        }
        let begin_ns = delay_s.saturating_sub(FLUSH_EARLY_S) * SECOND;
        let end_ns = (delay_s + FLUSH_LATE_S) * SECOND;
        let now_ns = asked.now_ns;
        self.shared.epochs.add_window(now_ns, now_ns + begin_ns, now_ns + end_ns);
        self.write(messages, asked, Purpose::Flush { begin_ns, end_ns }, false);
    }

    fn take_reply(&mut self, messages: &mut Messages, index: usize) {
        let RequestId { origin, number } = *messages.request(index);
        match origin {
            Origin::Client(client) => {
                let (Some(flight), now_ns) = (&mut self.flight, messages.now_ns()) else { return };
                flight.end_before(&client, number, &self.shared.epochs, now_ns);
                match flight.end_stream(&client, number, &self.shared.epochs, now_ns) {
                    Some(Purpose::Read(read)) => self.answer(messages, index, &read, None),
                    Some(Purpose::Stats) => {
                        let [hits, absences] = [&self.shared.hits, &self.shared.absences]
                            .map(|count| count.load(Ordering::Relaxed));
                        self.scratch.clear();
                        write_stats(messages.bytes(index), hits, absences, &mut self.scratch);
                        messages.rewrite(index, &self.scratch);
                    }
                    Some(Purpose::Write { .. } | Purpose::Flush { .. }) => {}
                    None => {
                        let body = messages.bytes(index);
                        // A write that passed unseen has been done.
                        if ends_write(body) || body == b"OK\r\n" {
                            self.shared.epochs.raise_floor(now_ns);
                        }
                        self.check_unknown(messages, index, 0);
                    }
                }
            }
            Origin::Datagram { .. } => self.take_datagram(messages, index, &origin),
        }
    }

    fn take_datagram(&mut self, messages: &mut Messages, index: usize, client: &Origin) {
        let now_ns = messages.now_ns();
        let Some(flight) = &mut self.flight else { return };
        let Some((header, body)) = UdpHeader::split(messages.bytes(index)) else { return };
        let marked = match read_answer(body) {
            Some(Answer::Miss { mark } | Answer::Value { mark, .. }) => Some(mark),
            None => None,
        };
        let marked = marked.filter(|mark| flight.find_read(*mark, client, header.id).is_some());
        let found = flight.find_datagram(client, header.id);
        let mark = match (marked, found) {
            (Some(mark), _) => mark,
            (None, Some((mark, Purpose::Write { .. })))
                if header.total == 1 && ends_write(body) =>
            {
                return flight.end(mark, &self.shared.epochs, now_ns);
            }
            // Only the first piece of an answer has a mark.
            (None, Some((mark, Purpose::Read(_)))) if header.sequence > 0 => mark,
            (None, _) => return self.check_unknown(messages, index, UDP_HEADER_BYTES),
        };
        let Some(read) = flight.find_read(mark, client, header.id) else { return };
        read.pieces = read.pieces.saturating_add(1);
        let read = *read;
        if read.pieces >= header.total {
            flight.end(mark, &self.shared.epochs, now_ns);
        }
        if header.total > 1 && read.confused && !mutants::on("cache_mix_answers") {
            // A part of it may answer another request.
            return messages.drop(index, DropReason::FunctionDrop);
        }
        self.answer(messages, index, &read, Some(header));
    }

    /// An answer that belongs to no ticket is not shown to the client if the cache has asked for it: its ticket has ended.
    fn check_unknown(&mut self, messages: &mut Messages, index: usize, skip: usize) {
        let answer = read_answer(&messages.bytes(index)[skip..]);
        if let Some(Answer::Miss { mark } | Answer::Value { mark, .. }) = answer
            && self.flight.as_ref().is_some_and(|flight| flight.is_own(mark))
        {
            messages.drop(index, DropReason::FunctionDrop);
        }
    }

    /// Gives the answer to a question the form in which the client asked, and keeps the value.
    fn answer(
        &mut self,
        messages: &mut Messages,
        index: usize,
        read: &Read,
        header: Option<UdpHeader>,
    ) {
        let (Some(flight), Some(store)) = (&self.flight, &mut self.store) else { return };
        let mut read = *read;
        if mutants::on("cache_fill_unchecked") {
            read.words = self.shared.epochs.words(self.shared.epochs.slot_of(read.hash));
        }
        let message = messages.bytes(index);
        let body = &message[if header.is_some() { UDP_HEADER_BYTES } else { 0 }..];
        let (sequence, total) = header.map_or((0, 1), |header| (header.sequence, header.total));
        let key = flight.key_of(&read);
        let out = &mut self.scratch;
        out.clear();
        if header.is_some() {
            out.extend_from_slice(&message[..UDP_HEADER_BYTES]);
        }
        match (sequence, read_answer(body)) {
            (0, Some(Answer::Miss { .. })) => {
                if let Form::Meta { .. } = read.form {
                    write_meta(body, out);
                }
                if total == 1 && messages.is_open(index) {
                    keep_absence(store, &mut self.counts, &self.settings, key, &read);
                }
            }
            (0, Some(Answer::Value { head, .. })) => {
                let Head { line, len, flags, cas, .. } = head;
                match read.form {
                    Form::Text { cas: with } => {
                        let cas = with.then_some(cas);
                        FirstLine::Text { flags, len, cas }.append(key, out);
                    }
                    Form::Meta { .. } => write_meta(body, out),
                }
                out.extend_from_slice(&body[line..]);
                let is_open = messages.is_open(index) || mutants::on("cache_fill_dropped");
                if body.len() == line + len + 2 && is_open {
                    keep(
                        store,
                        &mut self.counts,
                        &self.settings,
                        key,
                        &read,
                        &head,
                        &body[line..line + len],
                    );
                }
            }
            (1.., _) => out.extend_from_slice(body),
            // An error line, which every client knows.
            (0, None) => return,
        }
        if sequence + 1 == total && matches!(read.form, Form::Text { .. }) {
            write_end(out);
        }
        messages.rewrite(index, out);
    }
}

/// Keeps a value, unless it expires soon, or it is not known under which words.
fn keep(
    store: &mut Store,
    counts: &mut Counts,
    settings: &[u64; SETTINGS.len()],
    key: &[u8],
    read: &Read,
    head: &Head,
    value: &[u8],
) {
    let age_ns = match settings[AT_AGE] {
        0 => u64::MAX,
        age_ms => age_ms * MS,
    };
    // The server's seconds are not as long as they look.
    let left_ns = match head.left_s {
        Some(left_s) if !mutants::on("cache_ignore_ttl") => {
            left_s.saturating_sub(1).saturating_mul(SECOND)
        }
        _ => u64::MAX,
    };
    let kept = read.words.filter(|_| !head.odd && left_ns > 0).and_then(|words| {
        let until_ns = read.asked_ns.saturating_add(left_ns.min(age_ns));
        let Head { cas, flags, plain, .. } = *head;
        let (asked_ns, absent) = (read.asked_ns, false);
        let about = About { words, asked_ns, until_ns, cas, flags, plain, absent };
        store.insert(read.hash, key, value, &about)
    });
    match kept {
        Some(evicted) => {
            counts.fills += 1;
            counts.evictions += evicted;
        }
        None => counts.unkept += 1,
    }
}

/// Keeps that a key is not there, if that is wanted.
fn keep_absence(
    store: &mut Store,
    counts: &mut Counts,
    settings: &[u64; SETTINGS.len()],
    key: &[u8],
    read: &Read,
) {
    let absent_ms = settings[AT_ABSENT];
    if absent_ms == 0 {
        return;
    }
    let kept = read.words.and_then(|words| {
        let until_ns = read.asked_ns.saturating_add(absent_ms * MS);
        let (asked_ns, absent) = (read.asked_ns, true);
        let about = About { words, asked_ns, until_ns, absent, ..About::default() };
        store.insert(read.hash, key, b"", &about)
    });
    match kept {
        Some(_) => counts.fills += 1,
        None => counts.unkept += 1,
    }
}

/// Values and requests in flight of each worker, and what is known about keys by all of them.
pub(crate) fn memory(spec: &Spec) -> Memory {
    let values = spec.setting("memory_mib", CACHE_MEMORY_MIB).saturating_mul(1 << 20);
    Memory { of_worker: values.saturating_add(flight::BYTES), of_all: 8 << SLOT_BITS }
}

impl Function for MemcachedCache {
    /// All memory is taken here.
    fn ready(&mut self) -> Result<(), Failure> {
        let grace_ns = self.settings[AT_GRACE] * MS;
        let memory_mib = self.settings[AT_MEMORY];
        let store = Store::new((memory_mib as usize) << 20).map_err(|_| {
            let name = SETTINGS[AT_MEMORY].0;
            Failure(format!("there is no memory for {name} = {memory_mib}: set it lower"))
        })?;
        self.flight = Some(Box::new(Flight::new(&self.shared.secret, grace_ns)));
        self.store = Some(store);
        self.scratch.reserve(64 << 10);
        self.many.reserve(64 << 10);
        self.plain.reserve(MESSAGES_MAX);
        self.hashes.reserve(MESSAGES_MAX);
        self.places.reserve(MESSAGES_MAX);
        Ok(())
    }

    fn decide(&mut self, direction: Direction, messages: &mut Messages) -> Result<(), Failure> {
        self.now_ns = messages.now_ns();
        self.begin(self.now_ns);
        let before = self.counts;
        self.plain.clear();
        if direction == Direction::Requests && messages.len() >= PREPARED_MIN {
            self.prepare(messages);
        }
        // If this panics, messages pass unseen until the restart.
        let mut watch = Watch { blind: self.blind.clone(), panicked: true };
        for index in 0..messages.len() {
            match direction {
                Direction::Requests if messages.is_open(index) => {
                    self.take_request(messages, index);
                }
                Direction::Requests => {}
                Direction::Replies => self.take_reply(messages, index),
            }
        }
        watch.panicked = false;
        for (shared, now, before) in [
            (&self.shared.hits, self.counts.hits, before.hits),
            (&self.shared.absences, self.counts.absences, before.absences),
        ] {
            if now != before {
                shared.fetch_add(now - before, Ordering::Relaxed);
            }
        }
        Ok(())
    }

    fn wants_notices(&self) -> bool {
        true
    }

    fn notice(&mut self, notice: &Notice) {
        let mut watch = Watch { blind: self.blind.clone(), panicked: true };
        match *notice {
            Notice::Attached => self.sees = Sees::FromNow,
            Notice::Detached => self.see_nothing(),
            Notice::Tick { now_ns } => {
                self.begin(now_ns);
                self.now_ns = now_ns;
            }
            Notice::Ended {
                request: RequestId { origin: Origin::Client(client), number },
                end,
            } => {
                let (epochs, now_ns) = (&self.shared.epochs, self.now_ns);
                match (&mut self.flight, end) {
                    (None, _) => {}
                    (Some(flight), End::Unknown) => {
                        flight.lose_request(&client, number, epochs, now_ns);
                    }
                    (Some(flight), End::Unsent | End::Done) => {
                        flight.end_stream(&client, number, epochs, now_ns);
                    }
                }
            }
            // Datagrams have no numbers: which one it was is not known.
            Notice::Ended { .. } => {}
            Notice::Gone { client, now_ns } => {
                if let Some(flight) = &mut self.flight {
                    flight.lose_stream(&client, &self.shared.epochs, now_ns);
                }
            }
        }
        watch.panicked = false;
    }

    fn restart(&mut self) -> Result<bool, Failure> {
        self.blind.begin();
        self.sees = Sees::FromNow;
        Ok(true)
    }

    fn registers(&self) -> &[Register] {
        &self.registers
    }

    fn read(&mut self) -> Result<Vec<u64>, Failure> {
        let mut values = self.counts.values();
        let (entries, bytes) = self.store.as_ref().map_or((0, 0), Store::used);
        values.extend([entries as u64, bytes as u64]);
        values.extend(self.settings);
        Ok(values)
    }

    fn reset(&mut self) -> Result<(), Failure> {
        self.counts = Counts::default();
        Ok(())
    }

    fn write(&mut self, register: usize, value: u64) -> Result<(), Failure> {
        let at = register - (self.registers.len() - SETTINGS.len());
        let (name, _, least, most) = SETTINGS[at];
        if !(least..=most).contains(&value) {
            return Err(Failure(format!("{name} is between {least} and {most}")));
        }
        match (at, &mut self.flight) {
            (AT_MEMORY, Some(_)) if value != self.settings[AT_MEMORY] => {
                let why =
                    "is given when the function is attached: attach it again with another one";
                return Err(Failure(format!("{name} {why}")));
            }
            (AT_GRACE, Some(flight)) => flight.grace_ns = value * MS,
            _ => {}
        }
        self.settings[at] = value;
        Ok(())
    }
}

impl Drop for MemcachedCache {
    fn drop(&mut self) {
        self.see_nothing();
    }
}

/// A call during which the instance may panic.
struct Watch {
    blind: Blind,
    panicked: bool,
}

impl Drop for Watch {
    fn drop(&mut self) {
        if self.panicked {
            self.blind.begin();
        }
    }
}

/// Whether a command asks for no answer, or only for some.
fn is_quiet(message: &[u8]) -> bool {
    let line = message.split(|byte| *byte == b'\r').next().unwrap_or(message);
    line.ends_with(b" noreply") || line.ends_with(b" q")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_taken_before_the_first_message() {
        let random = RandomState::new();
        let shared = Shared {
            epochs: Epochs::new(1),
            secret: Secret([random.hash_one(1), random.hash_one(2)]),
            has_stale: AtomicBool::new(false),
            hits: AtomicU64::new(0),
            absences: AtomicU64::new(0),
        };
        let mut cache = MemcachedCache::new(Arc::new(shared));
        assert!(cache.store.is_none() && cache.flight.is_none());
        cache.ready().unwrap();
        let reserved = cache.hashes.capacity() >= MESSAGES_MAX;
        assert!(cache.store.is_some() && cache.flight.is_some() && reserved);
    }
}
