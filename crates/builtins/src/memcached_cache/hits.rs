//! Requests for one key: their preparation by batches, and the answers from the cache.

use std::hint::black_box;

use wire::framing::UdpHeader;
use wire::session::Origin;

use super::answer::{FirstLine, Writer};
use super::command::{Form, KEY_BYTES_MAX, plain_get};
use super::settings::AT_SAMPLE;
use super::store::About;
use super::{Asked, MemcachedCache, Shared};
use onpath::Messages;

/// The key that a request asks for.
#[derive(Clone, Copy)]
pub(super) struct Asks {
    hash: u64,
    form: Form,
    /// Where it is in the message.
    at: u32,
    len: u8,
}

impl Asks {
    /// `key` is a part of the message.
    pub(super) fn new(message: &[u8], key: &[u8], hash: u64, form: Form) -> Self {
        let at = (key.as_ptr().addr() - message.as_ptr().addr()) as u32;
        Self { hash, form, at, len: key.len() as u8 }
    }

    fn key<'a>(&self, message: &'a [u8]) -> &'a [u8] {
        &message[self.at as usize..][..self.len.into()]
    }
}

/// The command of a message from this sender, and the header in front of it in a datagram. `None`: it is not a whole request.
#[inline]
pub(super) fn split<'a>(
    origin: &Origin,
    message: &'a [u8],
) -> Option<(Option<UdpHeader>, &'a [u8])> {
    match origin {
        Origin::Client(_) => Some((None, message)),
        Origin::Datagram { .. } => match UdpHeader::split(message)? {
            (header @ UdpHeader { sequence: 0, total: 1, .. }, body) => Some((Some(header), body)),
            _ => None,
        },
    }
}

impl MemcachedCache {
    /// Finds out which requests of a batch are `get KEY`, and reads the memory that these need, for all of them at once.
    pub(super) fn prepare(&mut self, messages: &Messages) {
        let Self { shared, store: Some(store), plain, hashes, places, .. } = self else { return };
        hashes.clear();
        for index in 0..messages.len() {
            let message = messages.bytes(index);
            let body = split(&messages.request(index).origin, message).map(|(_, body)| body);
            plain.push(body.and_then(plain_get).map(|key| {
                let hash = shared.secret.hash(key);
                hashes.push(hash);
                Asks::new(message, key, hash, Form::Text { cas: false })
            }));
        }
        black_box((store.touch(hashes, places), shared.epochs.touch(hashes)));
    }

    /// Forwards a request for one key that [`Self::hit`] has not answered.
    pub(super) fn miss(&mut self, messages: &mut Messages, asked: &Asked, asks: &Asks) {
        let mut copy = [0; KEY_BYTES_MAX];
        let key = &mut copy[..asks.len.into()];
        key.copy_from_slice(asks.key(messages.bytes(asked.index)));
        self.ask(messages, asked, key, asks.hash, asks.form);
    }

    /// Answers a request for one key from the cache, if that may be. Whether it does.
    #[inline]
    pub(super) fn hit(&mut self, messages: &mut Messages, index: usize, asks: &Asks) -> bool {
        let Shared { epochs, .. } = &*self.shared;
        let (Some(flight), Some(store)) = (&self.flight, &mut self.store) else { return false };
        let Asks { hash, form, .. } = *asks;
        let (counts, origin) = (&mut self.counts, &messages.request(index).origin);
        let message = messages.bytes(index);
        let Some(entry) = store.find(hash, asks.key(message)) else {
            counts.misses += 1;
            return false;
        };
        let (about, len) = store.about(entry);
        let About { words, asked_ns, until_ns, flags, cas: number, plain, absent } = about;
        let is_valid = epochs.is_valid(epochs.slot_of(hash), &words, asked_ns)
            || absent && mutants::on("cache_absent_unchecked");
        if messages.now_ns() >= until_ns || !is_valid {
            store.remove(entry);
            counts.invalid += 1;
            return false;
        }
        if matches!(origin, Origin::Client(client) if flight.writes_of(client)) {
            counts.ordered += 1;
            return false;
        }
        if form == (Form::Meta { key: true }) && (absent || !plain) {
            counts.misses += 1;
            return false;
        }
        if self.settings[AT_SAMPLE] != 0 && self.hits_until_sample == 0 {
            self.hits_until_sample = self.settings[AT_SAMPLE] - 1;
            counts.sampled += 1;
            return false;
        }
        self.hits_until_sample = self.hits_until_sample.saturating_sub(1);
        let frame = split(origin, message)
            .and_then(|(header, _)| header)
            .map(|header| UdpHeader::request(header.id).bytes());
        let (line, behind) = match form {
            Form::Text { .. } if absent => (None, &b"END\r\n"[..]),
            Form::Meta { .. } if absent => (None, &b"EN\r\n"[..]),
            Form::Text { cas } => {
                let cas = cas.then_some(number);
                (Some(FirstLine::Text { flags, len, cas }), &b"\r\nEND\r\n"[..])
            }
            Form::Meta { key } => (Some(FirstLine::Meta { len, key }), &b"\r\n"[..]),
        };
        let head = line.as_ref().map_or(0, |line| line.bytes(asks.len.into()));
        let whole = frame.map_or(0, |frame| frame.len()) + head + len + behind.len();
        if whole > messages.room() {
            counts.unasked += 1;
            return false;
        }
        *(if absent { &mut counts.absences } else { &mut counts.hits }) += 1;
        messages.reply_with(index, whole, |request, reply| {
            let mut reply = Writer::new(reply);
            if let Some(frame) = &frame {
                reply.put(frame);
            }
            if let Some(line) = &line {
                line.write(asks.key(request), &mut reply);
            }
            store.copy_value(entry, reply.next(len));
            reply.put(behind);
        });
        true
    }
}
