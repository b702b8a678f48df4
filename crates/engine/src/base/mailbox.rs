//! The mailbox of a worker: the only path by which other threads change it.
//!
//! Any thread posts a [`ControlMessage`](crate::ControlMessage) with [`Fabric::post`](crate::Fabric::post), which
//! wakes the worker. The worker takes messages at one place, near the top of a turn, in the order in which they were
//! posted; at most `MESSAGES_PER_TURN` of them, so that a full mailbox does not delay the turn. An empty mailbox
//! costs one relaxed load.
//!
//! *Answers* go through the reply channel of the message. If the sender has stopped waiting, the answer is dropped
//! with its contents. A worker that ends closes its mailbox: messages that it has not taken are dropped, and their
//! reply channels close.
//!
//! *Late messages.* The service, accelerator or client of a message may have left since it was posted; then it is ignored.
//!
//! *Length.* Connections and shared-memory clients are limited by `limits.connections`, other messages by the steps
//! of a change and by the number of accelerators; the mailbox counts the queued messages.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Messages for which there is room at the start: connections that other workers hand over allocate nothing.
const ROOM: usize = 1024;

/// See the module documentation.
pub(crate) struct Mailbox<M> {
    /// Length of the queue.
    len: AtomicUsize,
    queue: Mutex<Queue<M>>,
}

struct Queue<M> {
    messages: VecDeque<M>,
    closed: bool,
}

impl<M> Default for Mailbox<M> {
    fn default() -> Self {
        let queue = Queue { messages: VecDeque::with_capacity(ROOM), closed: false };
        Self { len: AtomicUsize::new(0), queue: Mutex::new(queue) }
    }
}

impl<M> Mailbox<M> {
    /// Number of queued messages.
    #[inline]
    pub(crate) fn len(&self) -> usize {
        self.len.load(Ordering::Relaxed)
    }

    fn lock(&self) -> MutexGuard<'_, Queue<M>> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn post(&self, message: M) {
        let mut queue = self.lock();
        if queue.closed {
            // The message's contents are dropped after the lock is released.
            drop(queue);
            return drop(message);
        }
        queue.messages.push_back(message);
        self.len.store(queue.messages.len(), Ordering::Relaxed);
    }

    pub(crate) fn take(&self) -> Option<M> {
        let mut queue = self.lock();
        let message = queue.messages.pop_front();
        self.len.store(queue.messages.len(), Ordering::Relaxed);
        message
    }

    /// Drops the queued messages; later messages are dropped too.
    pub(crate) fn close(&self) {
        let mut queue = self.lock();
        queue.closed = true;
        let left = std::mem::take(&mut queue.messages);
        self.len.store(0, Ordering::Relaxed);
        drop(queue);
        drop(left);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    #[test]
    fn messages_are_taken_in_order_and_counted() {
        let mailbox = Mailbox::default();
        (0..3).for_each(|message| mailbox.post(message));
        assert_eq!(mailbox.len(), 3);
        assert_eq!([mailbox.take(), mailbox.take()], [Some(0), Some(1)]);
        mailbox.post(3);
        assert_eq!([mailbox.take(), mailbox.take(), mailbox.take()], [Some(2), Some(3), None]);
        assert_eq!(mailbox.len(), 0);
    }

    #[test]
    fn a_closed_mailbox_drops_messages_and_their_reply_channels() {
        let mailbox = Mailbox::default();
        let (reply, replies) = mpsc::channel::<()>();
        mailbox.post(reply.clone());
        mailbox.close();
        mailbox.post(reply);
        assert_eq!(mailbox.len(), 0);
        assert_eq!(replies.try_recv(), Err(mpsc::TryRecvError::Disconnected));
    }
}
