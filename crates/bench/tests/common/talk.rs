//! Clients of shared-memory ports that ask all the time and check every outcome.

use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use bench::client::shm::{Client, Options, ShmError};

use wire::DropReason;

use super::{PATIENCE, eventually};

pub(crate) fn connect(path: &Path) -> Client {
    Client::connect(path, &Options { depth: 64, timeout: PATIENCE }).expect("the client is let in")
}

/// What a client counted.
#[derive(Default)]
pub(crate) struct Talk {
    answered: AtomicU64,
}

impl Talk {
    /// Asks until told to stop, with several requests under way; every request that the engine took is
    /// answered rightly. Returns what the engine said at the end if it ended the connection.
    pub(crate) fn run(&self, path: &Path, stop: &AtomicBool) -> Option<String> {
        let mut client = connect(path);
        let mut reply = vec![0; client.reply_bytes_max()];
        let (mut tag, mut ends) = (0_u64, false);
        loop {
            let stopped = stop.load(Ordering::Relaxed);
            if stopped && client.in_flight() == 0 {
                return None;
            }
            while !stopped && !ends && client.in_flight() < 16 {
                client.try_send(tag, &tag.to_le_bytes()).expect("there is room");
                tag += 1;
            }
            match client.receive(&mut reply, PATIENCE) {
                // Its port goes: what waited in the ring is not taken any more.
                Ok(Some(answer)) if answer.lost == Some(DropReason::Draining.into()) => ends = true,
                Ok(Some(answer)) => {
                    assert_eq!(answer.lost, None, "request {}", answer.tag);
                    assert_eq!(reply[..answer.len], answer.tag.to_le_bytes());
                    self.answered.fetch_add(1, Ordering::Relaxed);
                }
                Ok(None) => panic!("no outcome of {} requests", client.in_flight()),
                Err(ShmError::Ended(why)) => return Some(why),
                Err(error) => panic!("{error}"),
            }
        }
    }

    pub(crate) fn count(&self) -> u64 {
        self.answered.load(Ordering::Relaxed)
    }

    pub(crate) fn goes_on(&self) {
        let before = self.count();
        eventually("it is answered", || self.count() > before + 100);
    }
}
