//! Bundles of a block of the model accelerator: taken from its RX ring, answered in parts and in any order.

use mqueue::abi::{Bundle, BundleReply, PoolEntry, kind, status};
use mqueue::{BundleReplies, CheckedBundle, Head, MappedMemory, Producer};

use crate::rng::Rng;

/// Messages of a bundle that are not answered.
struct OpenBundle {
    token: u64,
    left: u64,
    replies: BundleReplies,
    bundle: Bundle,
}

/// The open bundles of one block.
#[derive(Default)]
pub(crate) struct OpenBundles(Vec<OpenBundle>);

/// A message in any memory: its token and its bytes.
pub(crate) type Taken = (u64, Vec<u8>);

impl OpenBundles {
    /// Copies the messages of a bundle. `None`: the engine has sent something invalid.
    pub(crate) fn take(
        &mut self,
        memory: &MappedMemory,
        (token, bundle): (u64, Bundle),
        pools: &[PoolEntry],
        longest: u32,
    ) -> Option<Vec<Taken>> {
        let checked: CheckedBundle = bundle.check(token, pools, longest)?;
        let message = |i: u32| {
            let mut bytes = vec![0; checked.len(i) as usize];
            checked.copy_out(memory, i, &mut bytes);
            (checked.token(i), bytes)
        };
        let left = u64::MAX >> (64 - checked.count());
        self.0.push(OpenBundle { token, left, replies: BundleReplies::new(&checked), bundle });
        Some((0..checked.count()).map(message).collect())
    }

    /// The open bundle of a message that is not answered, and the number of the message.
    fn find(&mut self, token: u64) -> Option<(&mut OpenBundle, u32)> {
        let of = |open: &&mut OpenBundle| {
            let number = token.wrapping_sub(open.token);
            number < 64 && open.left >> number & 1 != 0
        };
        let open = self.0.iter_mut().find(of)?;
        let number = (token - open.token) as u32;
        Some((open, number))
    }

    /// Answers or drops a message. `None`: it is not one of a bundle; `false`: the TX ring has no room.
    pub(crate) fn answer(
        &mut self,
        memory: &MappedMemory,
        tx: &mut Producer<MappedMemory>,
        (token, how): (u64, (u8, u8)),
        reply: &[u8],
    ) -> Option<bool> {
        let (open, number) = self.find(token)?;
        let mut how = how;
        if how.0 == kind::MESSAGE {
            if !open.replies.continues(number, reply.len() as u32)
                && open.replies.publish(tx).is_err()
            {
                return Some(false);
            }
            if !open.replies.write(memory, number, reply) {
                how = (kind::DROP, status::TOO_LONG);
            }
        }
        if how.0 == kind::DROP && tx.push_bundle_drop(token, how.1).is_err() {
            return Some(false);
        }
        open.left &= !(1 << number);
        Some(true)
    }

    /// Whether there are replies that are not published: the TX ring had no room.
    pub(crate) fn any_unpublished(&self) -> bool {
        self.0.iter().any(|open| open.replies.any())
    }

    /// Publishes the replies so far. False: the TX ring has no room for all.
    pub(crate) fn publish(&mut self, tx: &mut Producer<MappedMemory>) -> bool {
        let mut all = true;
        for open in &mut self.0 {
            all &= open.replies.publish(tx).is_ok();
        }
        self.0.retain(|open| open.left != 0 || open.replies.any());
        all
    }

    /// Writes a completion that no correct library writes, about a bundle that may be open. None of it is an answer.
    pub(crate) fn forge(
        &self,
        tx: &mut Producer<MappedMemory>,
        (token, region_bytes): (u64, u64),
        rng: &mut Rng,
    ) {
        let Some(open) = self.0.iter().find(|open| token.wrapping_sub(open.token) < 64) else {
            return;
        };
        let Bundle { reply_offset: offset, reply_bytes, count, offset: messages, .. } = open.bundle;
        let answered = 1 << (token - open.token);
        let valid = BundleReply { answered, offset, len: 0, stride: 0 };
        // Bits of messages that the bundle does not have.
        let beyond = u64::MAX.checked_shl(count).unwrap_or(0);
        let (mut token, all) = (open.token, u64::MAX);
        let reply = match rng.below(8) {
            // The messages of the bundle, of others, of other memory.
            0 => BundleReply { answered: all, offset: messages, len: 8, stride: 8 },
            1 => BundleReply {
                answered: all,
                offset: 8 * rng.below(region_bytes / 8),
                len: 8,
                stride: reply_bytes,
            },
            2 => BundleReply { answered: all, offset: rng.draw(), len: 8, stride: 8 },
            3 => {
                BundleReply { answered: all, offset: offset + u64::from(reply_bytes) + 1, ..valid }
            }
            // Lengths that are too long, or overlap.
            4 => BundleReply {
                answered: all,
                len: reply_bytes + 1,
                stride: reply_bytes + 1,
                ..valid
            },
            5 => BundleReply { answered: all, len: 8, stride: 7, ..valid },
            6 if beyond != 0 => BundleReply { answered: beyond, ..valid },
            6 => BundleReply { answered: 0, ..valid },
            // A token of no bundle, of another generation, or not of the first message.
            _ => {
                token = rng.pick(&[token + 1, token | 1 << 63, token ^ 1 << 40]);
                valid
            }
        };
        let _ = tx.push_bundle_reply(token, &reply);
        if rng.chance(100) {
            let head = Head { token: open.token, kind: kind::BUNDLE, ..Head::default() };
            let _ = tx.push(head, &[0; 8]);
        }
    }
}
