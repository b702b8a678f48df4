//! Messages that can go as one bundle: where they are before they are copied into the pool.

use mqueue::{Buffer, Consumer, MappedMemory, Pool};
use wire::framing::Alike;
use wire::nic::{RxBatch, Train};

use crate::service::bundle::table::MESSAGE_ALIGN;

/// Messages of one client that can go as one bundle: in any memory, of one length, except that the last may be shorter. They are
/// copied once.
pub(crate) trait Messages {
    /// How many there are.
    fn count(&self) -> u32;

    /// Bytes of a message.
    fn len_of(&self, message: u32) -> u32;

    /// Distance of messages in the bundle's buffer, at least the length of the first.
    fn stride(&self) -> u32;

    /// Their numbers, see [`wire::session::Request::number`]; `None` if those behind the first are consecutive.
    #[inline]
    fn numbers(&self) -> Option<&[u64]> {
        None
    }

    /// Copies the first `count` messages to the beginning of a buffer, which has room for them.
    fn write(&self, pool: &Pool<MappedMemory>, buffer: &Buffer, count: u32);
}

/// Messages that [`Consumer::peek_alike`] has found in a ring.
pub(crate) struct Slots<'a> {
    pub(crate) ring: &'a Consumer<MappedMemory>,
    pub(crate) len: u32,
    pub(crate) tags: &'a [u64],
}

impl Messages for Slots<'_> {
    #[inline]
    fn count(&self) -> u32 {
        self.tags.len() as u32
    }

    #[inline]
    fn len_of(&self, _: u32) -> u32 {
        self.len
    }

    #[inline]
    fn stride(&self) -> u32 {
        self.len.next_multiple_of(MESSAGE_ALIGN as u32)
    }

    #[inline]
    fn numbers(&self) -> Option<&[u64]> {
        Some(self.tags)
    }

    #[inline]
    fn write(&self, pool: &Pool<MappedMemory>, buffer: &Buffer, count: u32) {
        pool.write_from(buffer, self.stride(), self.ring, (count, self.len));
    }
}

/// Messages of a stream that [`wire::framing::Framing::requests_alike`] has found at the beginning of these bytes.
pub(crate) struct Stream<'a> {
    pub(crate) bytes: &'a [u8],
    pub(crate) alike: Alike,
}

impl Messages for Stream<'_> {
    #[inline]
    fn count(&self) -> u32 {
        self.alike.count as u32
    }

    #[inline]
    fn len_of(&self, _: u32) -> u32 {
        self.alike.len as u32
    }

    #[inline]
    fn stride(&self) -> u32 {
        let Alike { prefix, len, .. } = self.alike;
        if prefix == 0 { len as u32 } else { len.next_multiple_of(MESSAGE_ALIGN) as u32 }
    }

    fn write(&self, pool: &Pool<MappedMemory>, buffer: &Buffer, count: u32) {
        let Alike { prefix, len, .. } = self.alike;
        let distance = prefix + len;
        if prefix == 0 {
            return pool.write(buffer, 0, &self.bytes[..count as usize * distance]);
        }
        let messages = self.bytes.chunks_exact(distance).take(count as usize);
        for (at, message) in (0..).step_by(self.stride() as usize).zip(messages) {
            pool.write(buffer, at, &message[prefix..]);
        }
    }
}

/// The datagrams of a GSO batch.
pub(crate) struct Datagrams<'a> {
    pub(crate) rx: &'a RxBatch,
    pub(crate) train: Train,
}

impl Messages for Datagrams<'_> {
    #[inline]
    fn count(&self) -> u32 {
        self.train.count as u32
    }

    #[inline]
    fn len_of(&self, message: u32) -> u32 {
        self.rx.items[self.train.first + message as usize].len
    }

    #[inline]
    fn stride(&self) -> u32 {
        let len = self.len_of(0);
        if self.train.contiguous { len } else { len.next_multiple_of(MESSAGE_ALIGN as u32) }
    }

    fn write(&self, pool: &Pool<MappedMemory>, buffer: &Buffer, count: u32) {
        let messages = &self.rx.items[self.train.first..][..count as usize];
        if self.train.contiguous {
            let (first, last) = (messages[0].offset, messages[messages.len() - 1]);
            let bytes = &self.rx.bytes[first as usize..(last.offset + last.len) as usize];
            return pool.write(buffer, 0, bytes);
        }
        for (at, message) in (0..).step_by(self.stride() as usize).zip(messages) {
            pool.write(buffer, at, self.rx.payload(message));
        }
    }
}
