//! A UDP port: its socket, and the datagrams that the host kernel dropped.

use std::io;
use std::os::fd::{AsFd, OwnedFd};

use libc::c_int;
use wire::nic::RxBatch;

use super::SocketOptions;
use super::listen;
use super::udp_receive::{GRO_SLOT_BYTES_MIN, Receiver, SLOTS};
use super::udp_send::Segmentation;
use super::watched::Watch;
use crate::os::set_option;

/// Retries of a receive that returns a pending socket error instead of datagrams.
pub(super) const RECEIVE_TRIES_MAX: usize = 4;

/// Empty receives between two reads of the socket's drop counter.
const EMPTY_RECEIVES_PER_DROP_CHECK: u32 = 1024;

/// A UDP port.
pub(super) struct UdpPort {
    pub(super) socket: OwnedFd,
    pub(super) receive_offload: bool,
    pub(super) segmentation: Segmentation,
    /// The socket's running drop count at the last report.
    pub(super) drops_seen: u32,
    pub(super) empty_receives: u32,
    /// Number of buffers for the next receive.
    pub(super) slots: usize,
    pub(super) stopped: bool,
    pub(super) watch: Watch,
}

impl UdpPort {
    /// A port with this socket; without receive offload where the host kernel has none.
    pub(super) fn new(socket: OwnedFd, options: &SocketOptions) -> Self {
        let gro = c_int::from(options.receive_offload);
        let receive_offload = set_option(socket.as_fd(), libc::SOL_UDP, libc::UDP_GRO, gro).is_ok();
        Self {
            socket,
            receive_offload: receive_offload && options.receive_offload,
            segmentation: Segmentation::new(options.segmentation_offload),
            drops_seen: 0,
            empty_receives: 0,
            slots: SLOTS,
            stopped: false,
            watch: Watch::default(),
        }
    }

    /// Fills `batch`; returns how many buffers were used.
    pub(super) fn receive(&mut self, receiver: &mut Receiver, batch: &mut RxBatch) -> usize {
        if self.receive_offload && batch.bytes.len() / SLOTS < GRO_SLOT_BYTES_MIN {
            let _ = set_option::<c_int>(self.socket.as_fd(), libc::SOL_UDP, libc::UDP_GRO, 0);
            self.receive_offload = false;
        }
        for _ in 0..RECEIVE_TRIES_MAX {
            match receiver.receive(
                self.socket.as_fd(),
                self.slots.min(batch.most_buffers as usize),
                batch,
            ) {
                Ok(received) => {
                    batch.overflowed = received.drops.map_or(0, |drops| self.new_drops(drops));
                    return received.slots;
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                // A pending socket error, cleared by returning it, or an interruption.
                Err(_) => {}
            }
        }
        self.empty_receives += 1;
        if self.empty_receives >= EMPTY_RECEIVES_PER_DROP_CHECK {
            self.check_drops(batch);
        }
        0
    }

    pub(super) fn check_drops(&mut self, batch: &mut RxBatch) {
        self.empty_receives = 0;
        batch.overflowed +=
            listen::drops(self.socket.as_fd()).map_or(0, |drops| self.new_drops(drops));
    }

    /// Drops since the last report. A message carries the count at the time it was queued, which may
    /// be older than one read directly.
    fn new_drops(&mut self, drops: u32) -> u32 {
        let new = drops.wrapping_sub(self.drops_seen);
        if new > u32::MAX / 2 {
            return 0;
        }
        self.drops_seen = drops;
        new
    }
}
