//! `get` and `gets` of several keys on a connection: answered if all of them are known. Otherwise the server is asked as the client asks, and nothing of its
//! answer is kept: it does not say for how long values live.

use super::answer::{FirstLine, write_end};
use super::flight::Sent;
use super::settings::AT_SAMPLE;
use super::store::About;
use super::{Asked, MemcachedCache};
use onpath::Messages;

impl MemcachedCache {
    /// A copy of keys, in memory for that.
    pub(super) fn copied(&mut self, keys: &[u8]) -> Vec<u8> {
        let mut copy = std::mem::take(&mut self.many);
        copy.clear();
        copy.extend_from_slice(keys);
        copy
    }

    /// A request for several keys, which are a [copy](Self::copied).
    pub(super) fn take_many(
        &mut self,
        messages: &mut Messages,
        asked: &Asked,
        keys: Vec<u8>,
        cas: bool,
    ) {
        if !self.answers_many(messages, asked, &keys, cas) {
            self.pass(asked);
        }
        self.many = keys;
    }

    /// Answers a request for these keys from the cache, if it has all of them. Whether it does.
    fn answers_many(
        &mut self,
        messages: &mut Messages,
        asked: &Asked,
        keys: &[u8],
        cas: bool,
    ) -> bool {
        let (Some(flight), Some(store)) = (&self.flight, &mut self.store) else { return false };
        // memcached answers datagrams for several keys in a form of its own.
        let Sent::Stream { client, .. } = &asked.sent else { return false };
        if flight.writes_of(client) {
            self.counts.ordered += 1;
            return false;
        }
        if self.settings[AT_SAMPLE] != 0 && self.hits_until_sample == 0 {
            // The next read of one key is the one that is forwarded, if this one is answered.
            self.counts.sampled += 1;
            self.hits_until_sample = self.settings[AT_SAMPLE] - 1;
            return false;
        }
        let room = messages.room();
        let out = &mut self.scratch;
        out.clear();
        let (mut hits, mut absences) = (0, 0);
        for key in keys.split(|byte| *byte == b' ').filter(|key| !key.is_empty()) {
            let hash = self.shared.secret.hash(key);
            let slot = self.shared.epochs.slot_of(hash);
            let Some(entry) = store.find(hash, key) else {
                self.counts.misses += 1;
                return false;
            };
            let (about, len) = store.about(entry);
            let About { words, asked_ns, until_ns, flags, cas: number, absent, .. } = about;
            let is_valid = self.shared.epochs.is_valid(slot, &words, asked_ns)
                || mutants::on("cache_many_unchecked");
            if asked.now_ns >= until_ns || !is_valid {
                store.remove(entry);
                self.counts.invalid += 1;
                return false;
            }
            if absent {
                store.copy_value(entry, &mut []);
                absences += 1;
                continue;
            }
            hits += 1;
            let cas = cas.then_some(number);
            FirstLine::Text { flags, len, cas }.append(key, out);
            let head = out.len();
            // The end of the line, of the value, and of the answer.
            if head + len + 16 > room.min(out.capacity()) {
                self.counts.unasked += 1;
                return false;
            }
            out.resize(head + len, 0);
            store.copy_value(entry, &mut out[head..]);
            out.extend_from_slice(b"\r\n");
        }
        write_end(out);
        self.hits_until_sample = self.hits_until_sample.saturating_sub(1);
        self.counts.hits += hits;
        self.counts.absences += absences;
        messages.reply(asked.index, &self.scratch);
        true
    }
}
