//! Batched UDP send: one `sendmmsg` for up to [`MESSAGES`] messages, each possibly a GSO batch.
//!
//! Datagrams of the same length between the same two addresses leave as one message with
//! `UDP_SEGMENT` (the last may be shorter), which passes through the host kernel's stack once;
//! `segment_batches.rs` selects them. Payloads are not copied: a message has an iovec for each
//! piece, also in memory that others may write meanwhile. Lengths and addresses are never read from there. A batch that the route cannot carry (segments over the MTU, no checksum offload) is resent
//! datagram by datagram, and the sender remembers the limit. Every datagram is either sent or refused.

use std::io;
use std::mem::size_of;
use std::net::IpAddr;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr;

use libc::{c_int, iovec, mmsghdr};
use wire::nic::{GSO_DATAGRAMS_MAX, SendOutcome, TxBatch, TxItem, UDP_PAYLOAD_MAX};

use super::address::{RawAddress, in_addr, in6_addr};
use super::segment_batches::{SegmentBatches, front_batch};
use crate::os::{check, interrupted, zeroed};

/// Messages of one call.
const MESSAGES: usize = 64;
/// Pieces of payload per call; a batch has at most one for each of its segments.
const PIECES: usize = 1024;
/// Room for the source address (40) and the segment size (24), in 8-byte words.
const CONTROL_WORDS: usize = 8;
/// Retries of a call that returns the error of an earlier datagram (an ICMP error) instead of its
/// own.
const STALE_ERRORS_MAX: usize = 8;

/// The largest payload that fits an Ethernet frame over IPv6 and IPv4 (1500 - 40 - 8 bytes).
const ETHERNET_PAYLOAD: u32 = 1452;

/// Known limits of segmentation offload on a port.
#[derive(Clone, Copy, Debug)]
pub(super) struct Segmentation {
    /// Largest segment to try; 0 when segmentation is off.
    segment_bytes_max: u32,
    /// Batches that the host kernel refused.
    pub(super) fallbacks: u64,
}

impl Segmentation {
    pub(super) fn new(enabled: bool) -> Self {
        Self { segment_bytes_max: if enabled { UDP_PAYLOAD_MAX as u32 } else { 0 }, fallbacks: 0 }
    }

    /// Adjusts the limits after a refused batch of segments of `len` bytes.
    fn refused(&mut self, len: u32, code: Option<i32>) {
        self.fallbacks += 1;
        match code {
            // The segment did not fit the route's MTU.
            Some(libc::EINVAL | libc::EMSGSIZE) => {
                let next = if len > ETHERNET_PAYLOAD { ETHERNET_PAYLOAD } else { len - 1 };
                self.segment_bytes_max = self.segment_bytes_max.min(next);
            }
            // The device cannot offload the checksum.
            Some(libc::EIO | libc::EOPNOTSUPP | libc::ENOPROTOOPT) => self.segment_bytes_max = 0,
            _ => {}
        }
    }
}

/// The arrays `sendmmsg` needs; shared by all UDP ports of a worker.
pub(super) struct Sender {
    headers: Vec<mmsghdr>,
    /// The pieces of payload of all messages, in order of messages.
    pieces: Vec<iovec>,
    peers: Vec<RawAddress>,
    controls: Vec<[u64; CONTROL_WORDS]>,
    /// Datagrams in each message.
    counts: Vec<usize>,
    segment_batches: SegmentBatches,
}

// SAFETY: the raw pointers inside point into this value's own vectors, or are overwritten before
// every use (`pieces`); nothing is tied to a thread.
unsafe impl Send for Sender {}

impl Sender {
    pub(super) fn new() -> Self {
        let mut peers = vec![RawAddress::empty(); MESSAGES];
        let mut controls = vec![[0u64; CONTROL_WORDS]; MESSAGES];
        let pieces = vec![iovec { iov_base: ptr::null_mut(), iov_len: 0 }; PIECES];
        let mut headers = Vec::with_capacity(MESSAGES);
        for slot in 0..MESSAGES {
            // SAFETY: integers and pointers, for which zero is a value.
            let mut header: mmsghdr = unsafe { zeroed() };
            header.msg_hdr.msg_name = (&raw mut peers[slot]).cast();
            header.msg_hdr.msg_control = (&raw mut controls[slot]).cast();
            headers.push(header);
        }
        let counts = vec![0; MESSAGES];
        Self { headers, pieces, peers, controls, counts, segment_batches: SegmentBatches::new() }
    }

    /// Sends from the front of `batch` until it is empty or the socket is full.
    pub(super) fn send(
        &mut self,
        socket: BorrowedFd<'_>,
        batch: &mut TxBatch,
        segmentation: &mut Segmentation,
    ) -> SendOutcome {
        let (longest, may_defer) = (segmentation.segment_bytes_max, batch.may_defer());
        let mut kept = 0;
        if longest > 0 {
            kept = self.segment_batches.arrange(batch.waiting_mut(), longest, may_defer);
        }
        self.send_front(socket, batch, segmentation, kept, false)
    }

    /// Sends the first `count` items of `batch` from a connected socket to its peer, whatever addresses they have.
    pub(super) fn send_connected(
        &mut self,
        socket: BorrowedFd<'_>,
        batch: &mut TxBatch,
        segmentation: &mut Segmentation,
        count: usize,
    ) -> SendOutcome {
        let kept = batch.waiting().len().saturating_sub(count);
        let outcome = self.send_front(socket, batch, segmentation, kept, true);
        SendOutcome { kept: 0, ..outcome }
    }

    /// Sends all but the last `kept` items.
    fn send_front(
        &mut self,
        socket: BorrowedFd<'_>,
        batch: &mut TxBatch,
        segmentation: &mut Segmentation,
        kept: usize,
        connected: bool,
    ) -> SendOutcome {
        let mut outcome = SendOutcome { kept, ..SendOutcome::default() };
        // Datagrams at the front to send one by one: those of a refused batch. The refusal was due to
        // segmentation only if the first of them is then accepted alone.
        let mut single = 0;
        let mut suspect = None;
        let mut stale_errors = 0;
        while batch.waiting().len() > outcome.kept {
            let leaving = batch.waiting().len() - outcome.kept;
            let messages = self.prepare(batch, leaving, *segmentation, single);
            if connected {
                self.unname(messages);
            }
            match self.call(socket, messages) {
                Ok(accepted) => {
                    let whole = mutants::on("skip_after_partial_send");
                    let through = if whole { messages } else { accepted };
                    let sent = self.counts[..through].iter().sum();
                    batch.advance(sent);
                    outcome.sent += sent;
                    single = single.saturating_sub(sent);
                    if let Some((len, code)) = suspect.take() {
                        segmentation.refused(len, code);
                    }
                }
                Err(error) if interrupted(&error) => {}
                Err(error) => match error.raw_os_error() {
                    Some(libc::EAGAIN | libc::ENOBUFS | libc::ENOMEM) => break,
                    Some(libc::ECONNREFUSED) if stale_errors < STALE_ERRORS_MAX => {
                        stale_errors += 1;
                        outcome.bounced |= connected;
                    }
                    code if self.counts[0] > 1 => {
                        suspect = Some((batch.waiting()[0].len, code));
                        single = self.counts[0];
                    }
                    _ => {
                        suspect = None;
                        batch.advance(1);
                        outcome.refused += 1;
                        single = single.saturating_sub(1);
                    }
                },
            }
        }
        outcome
    }

    /// Takes the destinations out of the first `messages`: with one, the host kernel would look for a route again.
    fn unname(&mut self, messages: usize) {
        for header in &mut self.headers[..messages] {
            header.msg_hdr.msg_namelen = 0;
        }
    }

    fn call(&mut self, socket: BorrowedFd<'_>, messages: usize) -> io::Result<usize> {
        // SAFETY: `prepare` pointed the first `messages` headers at initialised addresses, control
        // buffers and pieces of this value, and those at payload of the batch, which is borrowed
        // throughout: its own, or cells of memory that it keeps mapped and that anyone may write.
        let accepted = check(unsafe {
            libc::sendmmsg(
                socket.as_raw_fd(),
                self.headers.as_mut_ptr(),
                messages as libc::c_uint,
                libc::MSG_DONTWAIT,
            )
        })?;
        Ok(accepted as usize)
    }

    /// Writes the headers for at most `leaving` items at the front of `batch`, whose first `single` datagrams are sent one by one;
    /// returns the number of messages.
    fn prepare(
        &mut self,
        batch: &TxBatch,
        leaving: usize,
        limits: Segmentation,
        single: usize,
    ) -> usize {
        let waiting = &batch.waiting()[..leaving];
        let (mut at, mut message, mut piece, mut datagrams) = (0, 0, 0, 0);
        while at < waiting.len() && message < MESSAGES && piece + GSO_DATAGRAMS_MAX <= PIECES {
            let longest = if datagrams >= single { limits.segment_bytes_max } else { 0 };
            let first = &waiting[at];
            if first.count > 1 && first.len > longest {
                for number in 0..first.count.min((MESSAGES - message) as u16) {
                    piece = self.write_message(message, piece, batch, &[first.datagram(number)]);
                    message += 1;
                }
                datagrams += usize::from(first.count);
                at += 1;
                continue;
            }
            let items = front_batch(&waiting[at..], longest);
            piece = self.write_message(message, piece, batch, &waiting[at..at + items]);
            datagrams += self.counts[message];
            at += items;
            message += 1;
        }
        message
    }

    /// Writes the header of a message with these items, and its iovecs from `at` on. Returns the index after the last of them.
    fn write_message(
        &mut self,
        message: usize,
        at: usize,
        batch: &TxBatch,
        items: &[TxItem],
    ) -> usize {
        let after = self.write_iovecs(at, batch, items);
        let header = &mut self.headers[message].msg_hdr;
        header.msg_iov = &raw mut self.pieces[at];
        header.msg_iovlen = (after - at) as _;
        let count = items.iter().map(|item| usize::from(item.count)).sum();
        self.address(message, &items[0], (count > 1).then_some(items[0].len as u16));
        self.counts[message] = count;
        after
    }

    /// Writes the iovecs of a message, starting at `at`: one per contiguous piece of payload. Returns
    /// the index after the last.
    fn write_iovecs(&mut self, mut at: usize, batch: &TxBatch, items: &[TxItem]) -> usize {
        let mut rest = items;
        while let Some(first) = rest.first() {
            let mut bytes = 0;
            let adjacent = |next: &&TxItem| {
                let adjacent = match (next.lent_at, first.lent_at) {
                    (None, None) => next.offset == first.offset + bytes as u32,
                    (Some(next), Some(first)) => next.get() == first.get() + bytes as u64,
                    _ => false,
                };
                bytes += if adjacent { next.bytes() } else { 0 };
                adjacent
            };
            rest = &rest[rest.iter().take_while(adjacent).count()..];
            // Borrowed as one slice so that a wrong offset panics here instead of reading elsewhere.
            let payload: *const u8 = match first.lent_at {
                None => batch.bytes()[first.offset as usize..][..bytes].as_ptr(),
                Some(lent_at) => batch.lent(lent_at, bytes).as_ptr().cast(),
            };
            self.pieces[at] = iovec { iov_base: payload.cast_mut().cast(), iov_len: bytes };
            at += 1;
        }
        at
    }

    /// Sets a message's destination, source and segment size.
    fn address(&mut self, slot: usize, first: &TxItem, segment: Option<u16>) {
        let (peer, peer_len) = RawAddress::from_std(&first.peer);
        self.peers[slot] = peer;
        let mut control = ControlWriter { buffer: &mut self.controls[slot], used: 0 };
        match first.local.filter(|_| !mutants::on("answer_from_another_address")) {
            Some(IpAddr::V4(ip)) => control.push(
                libc::IPPROTO_IP,
                libc::IP_PKTINFO,
                libc::in_pktinfo {
                    ipi_ifindex: 0,
                    ipi_spec_dst: in_addr(ip),
                    ipi_addr: libc::in_addr { s_addr: 0 },
                },
            ),
            Some(IpAddr::V6(ip)) => control.push(
                libc::IPPROTO_IPV6,
                libc::IPV6_PKTINFO,
                libc::in6_pktinfo { ipi6_addr: in6_addr(ip), ipi6_ifindex: 0 },
            ),
            None => {}
        }
        if let Some(segment) = segment {
            control.push(libc::SOL_UDP, libc::UDP_SEGMENT, segment);
        }
        let control_len = control.used;
        let header = &mut self.headers[slot].msg_hdr;
        header.msg_namelen = peer_len;
        header.msg_controllen = control_len as _;
    }
}

/// Appends control messages to a zeroed, 8-byte aligned buffer.
struct ControlWriter<'a> {
    buffer: &'a mut [u64; CONTROL_WORDS],
    used: usize,
}

impl ControlWriter<'_> {
    fn push<T: Copy>(&mut self, level: c_int, kind: c_int, value: T) {
        let len = size_of::<T>() as libc::c_uint;
        // SAFETY: pure arithmetic.
        let (space, total) =
            unsafe { (libc::CMSG_SPACE(len) as usize, libc::CMSG_LEN(len) as usize) };
        assert!(self.used + space <= CONTROL_WORDS * 8);
        let base = self.buffer.as_mut_ptr().cast::<u8>();
        // SAFETY: `space` bytes from `used` on lie inside the buffer (asserted); `used` is a
        // multiple of 8, so the header is aligned; the value is written unaligned.
        unsafe {
            let header = base.add(self.used).cast::<libc::cmsghdr>();
            (*header).cmsg_len = total as _;
            (*header).cmsg_level = level;
            (*header).cmsg_type = kind;
            libc::CMSG_DATA(header).cast::<T>().write_unaligned(value);
        }
        self.used += space;
    }
}

#[cfg(test)]
mod tests {
    use std::net::UdpSocket;
    use std::os::fd::AsFd;

    use super::*;
    use crate::os::set_option;

    /// Sends `lens` to `to` and returns the lengths that `reader` got.
    fn send(
        from: &UdpSocket,
        reader: &UdpSocket,
        lens: &[usize],
        learned: &mut Segmentation,
    ) -> Vec<usize> {
        let mut batch = TxBatch::new(lens.len(), 1 << 20);
        for &len in lens {
            batch.push(reader.local_addr().unwrap(), None, len, |into| into.fill(len as u8));
        }
        let outcome = Sender::new().send(from.as_fd(), &mut batch, learned);
        assert_eq!(outcome, SendOutcome { sent: lens.len(), ..SendOutcome::default() });
        let mut bytes = [0; 2048];
        lens.iter().map(|_| reader.recv(&mut bytes).unwrap()).collect()
    }

    #[test]
    fn a_refused_batch_does_not_resend_held_back_datagrams() {
        let from = UdpSocket::bind("127.0.0.1:0").unwrap();
        set_option::<c_int>(from.as_fd(), libc::SOL_SOCKET, libc::SO_NO_CHECK, 1).unwrap();
        let readers = [0; 2].map(|_| UdpSocket::bind("127.0.0.1:0").unwrap());
        let mut batch = TxBatch::new(40, 1 << 20);
        for at in 0..40 {
            let to = readers[at % 2].local_addr().unwrap();
            batch.push(to, None, 100, |into| into.fill(at as u8));
            if at % 2 == 1 && at > 20 {
                batch.more_follows();
            }
        }
        // The second reader's first datagrams are as many as a batch that waits may have.
        let mut learned = Segmentation::new(true);
        let mut sender = Sender::new();
        batch.set_may_defer(true);
        let kept = batch.waiting().len();
        let outcome = sender.send(from.as_fd(), &mut batch, &mut learned);
        assert_eq!(outcome.sent + outcome.kept, kept);
        assert_eq!((batch.waiting().len(), outcome.refused), (outcome.kept, 0));
        assert!(learned.fallbacks > 0);
        // Segmentation is now known to fail, so nothing waits for a batch.
        let outcome = sender.send(from.as_fd(), &mut batch, &mut learned);
        assert_eq!((outcome.kept, batch.is_empty()), (0, true));
        let mut bytes = [0; 200];
        for (number, reader) in readers.iter().enumerate() {
            for at in (number..40).step_by(2) {
                assert_eq!(reader.recv(&mut bytes).unwrap(), 100);
                assert_eq!(usize::from(bytes[0]), at);
            }
        }
    }

    #[test]
    fn a_refused_batch_is_sent_one_by_one_and_remembered() {
        let from = UdpSocket::bind("127.0.0.1:0").unwrap();
        let reader = UdpSocket::bind("127.0.0.1:0").unwrap();
        // A socket without checksums cannot segment: EINVAL, as for a segment over the MTU.
        set_option::<c_int>(from.as_fd(), libc::SOL_SOCKET, libc::SO_NO_CHECK, 1).unwrap();
        let mut learned = Segmentation::new(true);
        let lens = [100, 100, 100, 70, 5, 1600, 1600, 9];
        assert_eq!(send(&from, &reader, &lens, &mut learned), lens);
        let refusals = learned.fallbacks;
        assert!(refusals > 0);
        let lens = [100; 150];
        assert_eq!(send(&from, &reader, &lens, &mut learned), lens);
        assert_eq!(learned.fallbacks, refusals, "batches of 100 bytes are not tried again");
    }
}
