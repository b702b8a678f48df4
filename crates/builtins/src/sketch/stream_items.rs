//! Items of one length in byte streams, whose chunks end anywhere.

use wire::session::{Origin, ReplyTo};

use onpath::RequestId;

/// The longest item on a stream.
pub const ITEM_BYTES_MAX: usize = 64;
/// Connections whose items are continued: more than an engine has.
const CONNECTIONS_MAX: usize = 1 << 20;

/// What is kept of a connection between two chunks.
#[derive(Clone, Copy)]
struct Rest {
    /// 0: none.
    generation: u32,
    /// Bytes at its beginning that are still to be skipped.
    to_skip: u32,
    len: u8,
    bytes: [u8; ITEM_BYTES_MAX],
}

const NONE: Rest = Rest { generation: 0, to_skip: 0, len: 0, bytes: [0; ITEM_BYTES_MAX] };

/// Where the items of each connection are, by its key, on one worker.
#[derive(Default)]
pub struct StreamItems {
    rests: Vec<Rest>,
}

impl StreamItems {
    /// Calls `add` with the bytes of one or more whole items each time. Each connection begins with `skip` bytes that belong to no item. Chunks come
    /// in their order. False: the chunk is of no stream, or `item` is not from 1 to [`ITEM_BYTES_MAX`].
    pub fn split(
        &mut self,
        request: &RequestId,
        (skip, item): (u32, usize),
        mut chunk: &[u8],
        mut add: impl FnMut(&[u8]),
    ) -> bool {
        let Origin::Client(ReplyTo { key, generation, .. }) = request.origin else { return false };
        let place = key as usize;
        if !(1..=ITEM_BYTES_MAX).contains(&item) || place >= CONNECTIONS_MAX {
            return false;
        }
        if self.rests.len() <= place {
            self.rests.resize(place + 1, NONE);
        }
        let rest = &mut self.rests[place];
        if rest.generation != generation {
            *rest = Rest { generation, to_skip: skip, ..NONE };
        }
        let skipped = chunk.len().min(rest.to_skip as usize);
        rest.to_skip -= skipped as u32;
        chunk = &chunk[skipped..];
        if rest.len > 0 {
            let kept = usize::from(rest.len);
            let taken = chunk.len().min(item - kept);
            rest.bytes[kept..kept + taken].copy_from_slice(&chunk[..taken]);
            rest.len += taken as u8;
            chunk = &chunk[taken..];
            if usize::from(rest.len) < item {
                return true;
            }
            add(&rest.bytes[..item]);
        }
        let whole = chunk.len() / item * item;
        if whole > 0 {
            add(&chunk[..whole]);
        }
        let left = &chunk[whole..];
        rest.bytes[..left.len()].copy_from_slice(left);
        rest.len = left.len() as u8;
        true
    }

    /// Forgets what it has: the next chunk of each connection begins with an item, behind what is skipped.
    pub fn clear(&mut self) {
        self.rests.clear();
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use wire::session::EndpointKind;

    use super::*;

    fn of(key: u32, generation: u32) -> RequestId {
        let to = ReplyTo { endpoint: EndpointKind::Tcp, worker: 0, key, generation };
        RequestId { origin: Origin::Client(to), number: 0 }
    }

    proptest! {
        /// However a stream is cut, and whatever other streams do: its items are those of the whole.
        #[test]
        fn items_do_not_depend_on_chunks(
            item in 1..=ITEM_BYTES_MAX,
            skip in 0..100_u32,
            streams in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..2000), 1..4),
            cuts in prop::collection::vec((0..4_usize, 1..300_usize), 0..100),
        ) {
            let mut items = StreamItems::default();
            let mut found = vec![Vec::new(); streams.len()];
            let mut taken = vec![0; streams.len()];
            // At last all that is left.
            let rest = (0..streams.len()).map(|stream| (stream, usize::MAX));
            for (stream, len) in cuts.into_iter().chain(rest) {
                let stream = stream % streams.len();
                let left = &streams[stream][taken[stream]..];
                let chunk = &left[..len.min(left.len())];
                taken[stream] += chunk.len();
                let found = &mut found[stream];
                let split = items.split(&of(stream as u32, 1), (skip, item), chunk, |bytes| {
                    assert!(!bytes.is_empty() && bytes.len() % item == 0);
                    found.extend_from_slice(bytes);
                });
                prop_assert!(split);
            }
            for (stream, found) in streams.iter().zip(found) {
                let all = stream.get(skip as usize..).unwrap_or_default();
                prop_assert_eq!(&found[..], &all[..all.len() / item * item]);
            }
        }
    }

    #[test]
    fn a_new_connection_begins_with_an_item() {
        let mut items = StreamItems::default();
        let mut found = Vec::new();
        items.split(&of(3, 1), (0, 4), b"1234567", |bytes| found.extend_from_slice(bytes));
        items.split(&of(3, 3), (0, 4), b"abcdef", |bytes| found.extend_from_slice(bytes));
        assert_eq!(found, b"1234abcd");
        assert!(!items.split(&of(u32::MAX, 1), (0, 4), b"1234", |_| panic!("there is no place")));
        assert!(!items.split(&of(0, 1), (0, 65), b"1234", |_| panic!("too long")));
        assert!(!items.split(&of(0, 1), (0, 0), b"1234", |_| panic!("no item")));
    }
}
