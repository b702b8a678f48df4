//! Clients of shared-memory ports that send requests continuously and check every outcome.

use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use bench::client::shm::{Client, Options, ShmError};

use wire::DropReason;

use super::{PATIENCE, eventually};

pub(crate) fn connect(path: &Path) -> Client {
    Client::connect(path, &Options { depth: 64, timeout: PATIENCE }).expect("the client is let in")
}

/// The counters of a client.
#[derive(Default)]
pub(crate) struct Talk {
    answered: AtomicU64,
}

impl Talk {
    /// Sends requests until stopped, with several in flight; every request that the engine took must be answered
    /// correctly. Returns the engine's reason if it ended the connection.
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
                // Its port is removed: requests in the ring are no longer taken.
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

    pub(crate) fn keeps_getting_answers(&self) {
        let before = self.count();
        eventually("it is answered", || self.count() > before + 100);
    }
}
