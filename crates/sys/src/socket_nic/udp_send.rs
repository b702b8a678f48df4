//! Batched UDP send: one `sendmmsg` for up to [`MESSAGES`] messages, each possibly a GSO train.
//!
//! Adjacent departures of the same length between the same two addresses leave as one message with
//! `UDP_SEGMENT` (the last may be shorter), which the host kernel carries through its stack once.
//! A train that the route cannot carry (segments over the MTU, no checksum offload) is sent again
//! one by one, and the sender remembers what it learned. Every departure is either sent or refused.

use std::io;
use std::mem::size_of;
use std::net::IpAddr;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr;

use libc::{c_int, iovec, mmsghdr};
use wire::nic::{Departure, SendOutcome, TxBatch, UDP_PAYLOAD_MAX};

use super::address::{RawAddress, in_addr, in6_addr};
use crate::os::{check, interrupted, zeroed};

/// Messages of one call.
const MESSAGES: usize = 64;
/// Segments the host kernel takes in one train (UDP_MAX_SEGMENTS of its first version).
const SEGMENTS_MAX: usize = 64;
/// Room for the source address (40) and the segment size (24), in 8-byte words.
const CONTROL_WORDS: usize = 8;
/// Tries of a call that reports the trouble of an earlier datagram (an ICMP answer) instead of its
/// own.
const STALE_ERRORS_MAX: usize = 8;

/// The largest payload that fits an Ethernet frame over IPv6 and IPv4 (1500 - 40 - 8 bytes).
const ETHERNET_PAYLOAD: u32 = 1452;

/// What a port has learned about segmentation offload.
#[derive(Clone, Copy, Debug)]
pub(super) struct Segmentation {
    /// Largest segment to try; 0 when trains are off.
    segment_bytes_max: u32,
    /// Trains the host kernel refused.
    pub(super) fallbacks: u64,
}

impl Segmentation {
    pub(super) fn new(enabled: bool) -> Self {
        Self { segment_bytes_max: if enabled { UDP_PAYLOAD_MAX as u32 } else { 0 }, fallbacks: 0 }
    }

    /// Learns from a refused train of segments of `len` bytes.
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
    iovecs: Vec<iovec>,
    peers: Vec<RawAddress>,
    controls: Vec<[u64; CONTROL_WORDS]>,
    /// Departures in each message.
    counts: Vec<usize>,
}

// SAFETY: the raw pointers inside lead into this value's own vectors, or are overwritten before
// every use (`iovecs`); nothing is tied to a thread.
unsafe impl Send for Sender {}

impl Sender {
    pub(super) fn new() -> Self {
        let mut peers = vec![RawAddress::empty(); MESSAGES];
        let mut controls = vec![[0u64; CONTROL_WORDS]; MESSAGES];
        let mut iovecs = vec![iovec { iov_base: ptr::null_mut(), iov_len: 0 }; MESSAGES];
        let mut headers = Vec::with_capacity(MESSAGES);
        for slot in 0..MESSAGES {
            // SAFETY: integers and pointers, for which zero is a value.
            let mut header: mmsghdr = unsafe { zeroed() };
            header.msg_hdr.msg_name = (&raw mut peers[slot]).cast();
            header.msg_hdr.msg_iov = &raw mut iovecs[slot];
            header.msg_hdr.msg_iovlen = 1;
            header.msg_hdr.msg_control = (&raw mut controls[slot]).cast();
            headers.push(header);
        }
        Self { headers, iovecs, peers, controls, counts: vec![0; MESSAGES] }
    }

    /// Sends from the front of `batch` until it is empty or the socket is full.
    pub(super) fn send(
        &mut self,
        socket: BorrowedFd<'_>,
        batch: &mut TxBatch,
        segmentation: &mut Segmentation,
    ) -> SendOutcome {
        let mut outcome = SendOutcome::default();
        // Departures at the front to send one by one: those of a train that was refused, which
        // teaches something about trains only if its first departure alone is then accepted.
        let mut single = 0;
        let mut suspect = None;
        let mut stale_errors = 0;
        while !batch.is_empty() {
            let messages = self.prepare(batch, *segmentation, single);
            match self.call(socket, messages) {
                Ok(accepted) => {
                    let whole = mutants::on("skip_after_partial_send");
                    let through = if whole { messages } else { accepted };
                    let departures = self.counts[..through].iter().sum();
                    batch.advance(departures);
                    outcome.sent += departures;
                    single = single.saturating_sub(departures);
                    if let Some((len, code)) = suspect.take() {
                        segmentation.refused(len, code);
                    }
                }
                Err(error) if interrupted(&error) => {}
                Err(error) => match error.raw_os_error() {
                    Some(libc::EAGAIN | libc::ENOBUFS | libc::ENOMEM) => break,
                    Some(libc::ECONNREFUSED) if stale_errors < STALE_ERRORS_MAX => {
                        stale_errors += 1
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

    fn call(&mut self, socket: BorrowedFd<'_>, messages: usize) -> io::Result<usize> {
        // SAFETY: `prepare` pointed the first `messages` headers at initialised addresses and
        // control buffers of this value and at payload of the batch, which is borrowed throughout.
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

    /// Writes the headers for the departures at the front of `batch`; returns how many messages.
    fn prepare(&mut self, batch: &TxBatch, limits: Segmentation, single: usize) -> usize {
        let waiting = batch.waiting();
        let mut at = 0;
        let mut message = 0;
        while at < waiting.len() && message < MESSAGES {
            let count = if at < single { 1 } else { train(&waiting[at..], limits) };
            let run = &waiting[at..at + count];
            let len: usize = run.iter().map(|departure| departure.len as usize).sum();
            // Borrowed as one slice so that a wrong offset is a panic here, not a read elsewhere.
            let payload = &batch.bytes()[run[0].offset as usize..][..len];
            self.write(message, &run[0], payload, (count > 1).then_some(run[0].len as u16));
            self.counts[message] = count;
            at += count;
            message += 1;
        }
        message
    }

    fn write(&mut self, slot: usize, first: &Departure, payload: &[u8], segment: Option<u16>) {
        let (peer, peer_len) = RawAddress::from_std(&first.peer);
        self.peers[slot] = peer;
        self.iovecs[slot] =
            iovec { iov_base: payload.as_ptr().cast_mut().cast(), iov_len: payload.len() };
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

/// How many departures at the front of `waiting` can leave as one train.
fn train(waiting: &[Departure], limits: Segmentation) -> usize {
    let first = &waiting[0];
    if first.len == 0 || first.len > limits.segment_bytes_max {
        return 1;
    }
    let mut end = first.offset + first.len;
    let mut total = first.len as usize;
    let mut count = 1;
    for next in &waiting[1..] {
        let fits = count < SEGMENTS_MAX
            && next.offset == end
            && (1..=first.len).contains(&next.len)
            && total + next.len as usize <= UDP_PAYLOAD_MAX
            && (next.peer == first.peer || mutants::on("train_to_one"))
            && next.local == first.local;
        if !fits {
            break;
        }
        end += next.len;
        total += next.len as usize;
        count += 1;
        if next.len < first.len {
            break;
        }
    }
    count
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
        assert_eq!(outcome, SendOutcome { sent: lens.len(), refused: 0 });
        let mut bytes = [0; 2048];
        lens.iter().map(|_| reader.recv(&mut bytes).unwrap()).collect()
    }

    #[test]
    fn a_refused_train_is_sent_one_by_one_and_remembered() {
        let from = UdpSocket::bind("127.0.0.1:0").unwrap();
        let reader = UdpSocket::bind("127.0.0.1:0").unwrap();
        // A socket without checksums cannot send trains: EINVAL, as for a segment over the MTU.
        set_option::<c_int>(from.as_fd(), libc::SOL_SOCKET, libc::SO_NO_CHECK, 1).unwrap();
        let mut learned = Segmentation::new(true);
        let lens = [100, 100, 100, 70, 5, 1600, 1600, 9];
        assert_eq!(send(&from, &reader, &lens, &mut learned), lens);
        let refusals = learned.fallbacks;
        assert!(refusals > 0);
        let lens = [100; 150];
        assert_eq!(send(&from, &reader, &lens, &mut learned), lens);
        assert_eq!(learned.fallbacks, refusals, "trains of 100 bytes are not tried again");
    }

    #[test]
    fn trains_end_where_they_must() {
        let limits = Segmentation::new(true);
        let train_of = |lens: &[usize]| {
            let mut batch = TxBatch::new(lens.len(), 1 << 20);
            for &len in lens {
                batch.push("127.0.0.1:9".parse().unwrap(), None, len, |_| {});
            }
            train(batch.waiting(), limits)
        };
        assert_eq!(train_of(&[10; 65]), SEGMENTS_MAX);
        assert_eq!(train_of(&[10, 10, 9, 10]), 3, "the shorter one is the last");
        assert_eq!(train_of(&[10, 11]), 1);
        assert_eq!(train_of(&[10, 0]), 1);
        assert_eq!(train_of(&[0, 0]), 1);
        assert_eq!(train_of(&[32_753, 32_754]), 1);
        assert_eq!(train_of(&[32_754, 32_753]), 2, "exactly the largest payload");
        assert_eq!(train_of(&[32_754, 32_754]), 1);
    }
}
