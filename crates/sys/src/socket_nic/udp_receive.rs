//! Batched UDP receive: one `recvmmsg` for up to [`SLOTS`] buffers, each possibly a GRO batch; for fewer buffers while
//! batches are so long that one call would return more than [`DATAGRAMS_AIM`] datagrams and delay the worker's other ports.
//!
//! With `UDP_GRO` the host kernel returns equal-sized datagrams of one sender as one buffer and a segment
//! size; it is split back into datagrams here (the last may be shorter). `SO_RXQ_OVFL` adds the
//! socket's running count of dropped datagrams to every message once it is not zero.

use std::io;
use std::net::IpAddr;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr;

use libc::{c_int, iovec, mmsghdr};
use wire::nic::{Datagram, RxBatch};

use super::address::{RAW_ADDRESS_LEN, RawAddress, from_in_addr};
use crate::os::{check, zeroed};

/// Buffers filled by one call.
pub(super) const SLOTS: usize = 64;
/// Target number of datagrams per call, assuming that batches keep their current length.
const DATAGRAMS_AIM: usize = 1024;
/// A GRO batch is up to 64 KiB; a smaller buffer would truncate it.
pub(super) const GRO_SLOT_BYTES_MIN: usize = 65_536;
/// Room for GRO size (24), overflow count (24) and packet destination (40), in 8-byte words.
const CONTROL_WORDS: usize = 12;

/// The arrays for `recvmmsg`, set up once; shared by all UDP ports of a worker.
pub(super) struct Receiver {
    headers: Vec<mmsghdr>,
    /// Two for each header: lent memory, which only the first headers have, and the batch's own.
    iovecs: Vec<[iovec; 2]>,
    peers: Vec<RawAddress>,
    #[expect(dead_code, reason = "owns what the headers point to")]
    controls: Vec<[u64; CONTROL_WORDS]>,
    /// Headers that the last call modified; the others are still as initialised.
    used: usize,
    /// Headers that begin with lent memory.
    lent: usize,
}

// SAFETY: the raw pointers inside `headers` and `iovecs` point into this value's own vectors, or are
// overwritten before every use (`iovecs`); nothing is tied to a thread.
unsafe impl Send for Receiver {}

/// The result of one call.
pub(super) struct Received {
    /// Buffers filled.
    pub(super) slots: usize,
    /// The socket's running drop count, if a message carried it.
    pub(super) drops: Option<u32>,
}

/// The control messages of interest.
#[derive(Default)]
struct Control {
    segment_bytes: Option<u32>,
    drops: Option<u32>,
    local: Option<IpAddr>,
}

impl Receiver {
    pub(super) fn new() -> Self {
        let mut peers = vec![RawAddress::empty(); SLOTS];
        let mut controls = vec![[0u64; CONTROL_WORDS]; SLOTS];
        let mut iovecs = vec![[iovec_at(ptr::null_mut(), 0); 2]; SLOTS];
        let mut headers = Vec::with_capacity(SLOTS);
        for slot in 0..SLOTS {
            // SAFETY: integers and pointers, for which zero is a value.
            let mut header: mmsghdr = unsafe { zeroed() };
            header.msg_hdr.msg_name = (&raw mut peers[slot]).cast();
            header.msg_hdr.msg_iov = &raw mut iovecs[slot][1];
            header.msg_hdr.msg_iovlen = 1;
            header.msg_hdr.msg_control = (&raw mut controls[slot]).cast();
            headers.push(header);
        }
        Self { headers, iovecs, peers, controls, used: SLOTS, lent: 0 }
    }

    /// Receives into at most `slots` buffers of `batch`, whose items and overflow count the caller has cleared.
    pub(super) fn receive(
        &mut self,
        socket: BorrowedFd<'_>,
        slots: usize,
        batch: &mut RxBatch,
    ) -> io::Result<Received> {
        let slot_bytes = batch.bytes.len() / SLOTS;
        self.aim(batch, slot_bytes);
        let vlen = slots.min(SLOTS) as libc::c_uint;
        // SAFETY: every header points to a peer, iovecs and a control buffer of this value (the
        // vectors never grow) with their true lengths, every iovec to its own part of
        // `batch.bytes`, or to cells of memory that the batch keeps mapped and that anyone may write; all of them outlive the call.
        let filled = check(unsafe {
            libc::recvmmsg(
                socket.as_raw_fd(),
                self.headers.as_mut_ptr(),
                vlen,
                libc::MSG_DONTWAIT,
                ptr::null_mut(),
            )
        });
        let filled = match filled {
            Ok(filled) => filled as usize,
            Err(error) => {
                self.used = 1;
                return Err(error);
            }
        };
        self.used = filled;
        let mut drops = None;
        for slot in 0..filled {
            let control = self.control(slot);
            drops = control.drops.or(drops);
            self.unpack(slot, slot_bytes, &control, batch);
        }
        Ok(Received { slots: filled, drops })
    }

    /// Restores what the last call changed and points the iovecs at this batch.
    fn aim(&mut self, batch: &mut RxBatch, slot_bytes: usize) {
        for header in &mut self.headers[..self.used] {
            header.msg_hdr.msg_namelen = RAW_ADDRESS_LEN;
            header.msg_hdr.msg_controllen = (CONTROL_WORDS * 8) as _;
        }
        let base = batch.bytes.as_mut_ptr();
        // Inside `bytes`: slot < SLOTS and slot_bytes = len / SLOTS.
        let own = |slot: usize| iovec_at(base.wrapping_add(slot * slot_bytes), slot_bytes);
        let last = &self.iovecs[SLOTS - 1][1];
        let same = last.iov_base == own(SLOTS - 1).iov_base && last.iov_len == slot_bytes;
        let changed = if same { self.lent } else { SLOTS };
        for (slot, iovecs) in self.iovecs[..changed].iter_mut().enumerate() {
            iovecs[1] = own(slot);
            let header = &mut self.headers[slot].msg_hdr;
            (header.msg_iov, header.msg_iovlen) = (&raw mut iovecs[1], 1);
        }
        // The buffers of this batch may have another arrangement. The last one stays as it is: it is looked at above.
        let aligned = batch.slot_bytes() == slot_bytes;
        self.lent = if aligned { batch.use_lent(SLOTS - 1) } else { 0 };
        for (slot, iovecs) in self.iovecs[..self.lent].iter_mut().enumerate() {
            let lent = batch.lent_to(slot);
            let skip = lent.len().min(slot_bytes);
            let rest = own(slot).iov_base.cast::<u8>().wrapping_add(skip);
            *iovecs = [
                iovec_at(lent.as_ptr().cast_mut().cast(), skip),
                iovec_at(rest, slot_bytes - skip),
            ];
            let header = &mut self.headers[slot].msg_hdr;
            (header.msg_iov, header.msg_iovlen) = (&raw mut iovecs[0], 2);
        }
    }

    /// Splits one filled buffer into datagrams.
    fn unpack(&self, slot: usize, slot_bytes: usize, control: &Control, batch: &mut RxBatch) {
        let header = &self.headers[slot];
        let Some(peer) = self.peers[slot].to_std() else {
            return;
        };
        let cut = header.msg_hdr.msg_flags & libc::MSG_TRUNC != 0;
        // The iovecs of a buffer have this many bytes.
        let total = (header.msg_len as usize).min(slot_bytes) as u32;
        let step = control.segment_bytes.unwrap_or(total);
        let start = (slot * slot_bytes) as u32;
        let count = if step == 0 { 1 } else { total.div_ceil(step).max(1) };
        let first = batch.items.len();
        batch.items.push(Datagram {
            peer,
            local: control.local,
            offset: start,
            len: step,
            truncated: false,
            followed_by: 0,
        });
        // Twice as many in each step, as bytes: written field by field, each would take three times the instructions.
        let end = first + count as usize;
        while batch.items.len() < end {
            let more = (batch.items.len() - first).min(end - batch.items.len());
            batch.items.extend_from_within(first..first + more);
        }
        // A buffer that was cut is no train.
        let followed = if cut { 0 } else { count - 1 };
        let mut at = (start, followed);
        for item in &mut batch.items[first..] {
            (item.offset, item.followed_by) = (at.0, at.1.min(255) as u8);
            at = (at.0 + step, at.1.saturating_sub(1));
        }
        if let Some(last) = batch.items.last_mut() {
            last.len = total - (count - 1) * step;
            last.truncated = cut;
        }
    }

    fn control(&self, slot: usize) -> Control {
        let mut found = Control::default();
        let header = &raw const self.headers[slot].msg_hdr;
        // SAFETY: the header describes `controls[slot]`, which the host kernel has just filled with
        // well-formed control messages of `msg_controllen` bytes in total; the macros stay inside.
        unsafe {
            let mut message = libc::CMSG_FIRSTHDR(header);
            while !message.is_null() {
                let payload = libc::CMSG_DATA(message);
                match ((*message).cmsg_level, (*message).cmsg_type) {
                    (libc::SOL_UDP, libc::UDP_GRO) => {
                        let size = payload.cast::<c_int>().read_unaligned();
                        found.segment_bytes = u32::try_from(size).ok().filter(|&size| size > 0);
                    }
                    (libc::SOL_SOCKET, libc::SO_RXQ_OVFL) => {
                        found.drops = Some(payload.cast::<u32>().read_unaligned());
                    }
                    (libc::IPPROTO_IP, libc::IP_PKTINFO) => {
                        let to = payload.cast::<libc::in_pktinfo>().read_unaligned();
                        // Not `ipi_addr`: a broadcast address cannot be a reply's source.
                        found.local = Some(IpAddr::V4(from_in_addr(to.ipi_spec_dst)));
                    }
                    (libc::IPPROTO_IPV6, libc::IPV6_PKTINFO) => {
                        let to = payload.cast::<libc::in6_pktinfo>().read_unaligned();
                        let to = IpAddr::V6(to.ipi6_addr.s6_addr.into());
                        found.local = Some(to).filter(|to| !to.is_multicast());
                    }
                    _ => {}
                }
                message = libc::CMSG_NXTHDR(header, message);
            }
        }
        found
    }
}

/// Number of buffers for the next call, after one that filled `used` buffers with `datagrams`.
pub(super) fn slots_after(used: usize, datagrams: usize) -> usize {
    match datagrams {
        0 => SLOTS,
        datagrams => (used * DATAGRAMS_AIM / datagrams).clamp(1, SLOTS),
    }
}

fn iovec_at(base: *mut u8, len: usize) -> iovec {
    iovec { iov_base: base.cast(), iov_len: len }
}
