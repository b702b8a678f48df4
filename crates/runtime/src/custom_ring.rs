//! The application's side of a ring into which its function on the path of messages delivers requests (`FunctionClient::make_ring` of the server
//! crate; docs/functions.md).

use std::net::{SocketAddr, SocketAddrV4};
use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use mqueue::{Consumer, MappedMemory, Region, Words};
use sys::SharedMemory;
use sys::readiness::{WakeFd, wait_readable};

/// Largest region that is mapped, in bytes.
const BYTES_MAX: usize = 1 << 30;

/// Bit of a tag with a client's address.
const HAS_ADDRESS: u64 = 1 << 48;

/// The tag of a request from this client: bit 48, the port in bits 32 to 47, the address in bits 0 to 31; 0 if it is not over IPv4.
pub fn tag_of(client: &SocketAddr) -> u64 {
    match client {
        SocketAddr::V4(client) => {
            HAS_ADDRESS | u64::from(client.port()) << 32 | u64::from(u32::from(*client.ip()))
        }
        SocketAddr::V6(_) => 0,
    }
}

/// The client in a tag.
pub fn client_of(tag: u64) -> Option<SocketAddrV4> {
    let client = SocketAddrV4::new((tag as u32).into(), (tag >> 32) as u16);
    (tag & HAS_ADDRESS != 0).then_some(client)
}

/// A request that was read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Delivered {
    /// The worker that received it. Requests of one worker are read in the order in which it delivered them.
    pub worker: u32,
    /// Its number on this worker, from 0. Those that are missing found no room.
    pub number: u64,
    /// Its client, if it came as a datagram over IPv4.
    pub client: Option<SocketAddrV4>,
}

/// Reads what workers deliver.
pub struct CustomRing {
    rings: Vec<Consumer<MappedMemory>>,
    /// Requests that were read and whose places are not given back, by worker.
    held: Vec<u32>,
    words: Words<MappedMemory>,
    bell: WakeFd,
    next: usize,
    batch: u32,
}

impl CustomRing {
    /// The descriptors as the server sent them. The error says what is wrong with them.
    pub fn open(files: Vec<OwnedFd>) -> Result<Self, String> {
        let [region, bell] = <[OwnedFd; 2]>::try_from(files)
            .map_err(|files| format!("the server sent {} descriptors for a ring", files.len()))?;
        let memory = SharedMemory::open(region, BYTES_MAX, false).map_err(|e| e.to_string())?;
        let region = Region::join(MappedMemory::new(Arc::new(memory)));
        let mut region = region.map_err(|error| error.to_string())?;
        let workers = region.block_count();
        if region.mqueue_count() != workers {
            return Err("the server sent a region that is no ring".to_owned());
        }
        let depth = region.rings_of(0)[0].depth;
        let rings = (0..workers).map(|worker| region.accelerator_ends(worker).0).collect();
        let held = vec![0; workers as usize];
        let (words, bell) = (region.words(), WakeFd::received(bell));
        Ok(Self { rings, held, words, bell, next: 0, batch: (depth / 4).max(1) })
    }

    /// Reads a request into `message`, of one worker after the other. `None`: there is none. The error ends the ring.
    pub fn read(&mut self, message: &mut Vec<u8>) -> Result<Option<Delivered>, String> {
        for _ in 0..self.rings.len() {
            let worker = self.next;
            self.next = (worker + 1) % self.rings.len();
            let ring = &mut self.rings[worker];
            let Some(header) = ring.peek().map_err(|error| error.to_string())? else {
                self.give_back(worker);
                continue;
            };
            message.resize(header.len as usize, 0);
            if !ring.copy_out(&header, message) {
                return Err("the ring has a message that is not complete".to_owned());
            }
            ring.advance();
            self.held[worker] += 1;
            if self.held[worker] >= self.batch {
                self.give_back(worker);
            }
            let client = client_of(header.tag);
            return Ok(Some(Delivered { worker: worker as u32, number: header.token, client }));
        }
        Ok(None)
    }

    /// Waits until a request can be read, at most for `timeout`. May return earlier.
    pub fn wait(&mut self, timeout: Duration) {
        self.words.set_accelerator_parked(true);
        // Either the worker sees that this side sleeps, or its message is seen here.
        let any = self.rings.iter_mut().any(|ring| ring.peek().is_ok_and(|found| found.is_some()));
        if !any {
            wait_readable(&[self.bell.as_fd()], Some(timeout));
            self.bell.clear();
        }
        self.words.set_accelerator_parked(false);
    }

    /// The worker gets the places of what was read.
    fn give_back(&mut self, worker: usize) {
        if std::mem::take(&mut self.held[worker]) > 0 {
            self.rings[worker].release();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tag_has_the_client_of_a_datagram_over_ipv4() {
        for client in ["0.0.0.0:0", "127.0.0.1:9000", "255.255.255.255:65535"] {
            let client: SocketAddr = client.parse().unwrap();
            assert_eq!(client_of(tag_of(&client)).map(SocketAddr::from), Some(client));
        }
        assert_eq!(client_of(tag_of(&"[::1]:9000".parse().unwrap())), None);
        assert_eq!(client_of(0), None);
    }
}
