//! Datagrams that are received in lent memory and sent from there, with the host kernel's receive and segmentation offload.

use std::num::NonZero;
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::sync::atomic::AtomicU8;

use mqueue::memory::Memory;
use mqueue::{HeapMapping, MappedMemory};
use sys::{SocketNic, SocketOptions};
use wire::nic::{Nic, RxBatch, SharedBytes, TxBatch};

use crate::support::{open, pattern, udp, until};

const LEN: usize = 784;
const COUNT: usize = 40;
/// Less than a batch of [`COUNT`] messages: message 20 begins in lent memory and ends elsewhere.
const LENT: u32 = 16 << 10;
const AT: u64 = 4096;

struct Lent(MappedMemory);

impl std::fmt::Debug for Lent {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Lent")
    }
}

impl SharedBytes for Lent {
    fn cells(&self, at: u64, len: usize) -> &[AtomicU8] {
        self.0.cells(at, len)
    }
    fn copy_out(&self, at: u64, into: &mut [u8]) {
        self.0.copy_out_unaligned(at, into);
    }
    fn copy_in(&self, at: u64, from: &[u8]) {
        self.0.copy_in(at, from);
    }
}

fn memory() -> Arc<dyn SharedBytes> {
    Arc::new(Lent(HeapMapping::memory(1 << 20)))
}

/// Whether the host kernel merges datagrams.
fn has_receive_offload() -> bool {
    let socket = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
    let on: libc::c_int = 1;
    // SAFETY: the value outlives the call, and its size is given.
    let set = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            libc::SOL_UDP,
            libc::UDP_GRO,
            (&raw const on).cast(),
            size_of_val(&on) as libc::socklen_t,
        )
    };
    set == 0
}

/// Sends messages to `to` as one GSO batch.
fn send_batch(client: &mut SocketNic, to: std::net::SocketAddr) -> Vec<Vec<u8>> {
    let messages: Vec<_> = (0..COUNT).map(|number| pattern(LEN, number)).collect();
    let mut batch = TxBatch::new(8, 1 << 20);
    batch.push_many((to, None), (LEN, COUNT), false, |bytes| {
        bytes.copy_from_slice(&messages.concat());
    });
    assert_eq!(client.send(0, &mut batch).sent, COUNT);
    messages
}

#[test]
fn a_gro_batch_is_received_in_lent_memory() {
    let (mut server, addresses) = open(&[udp("127.0.0.1:0")]);
    let (mut client, _) = open(&[udp("127.0.0.1:0")]);
    let memory = memory();
    let mut rx = RxBatch::new(64, 65_536 + 1088);
    for round in 0..3 {
        assert!(rx.lend(&memory, AT, LENT));
        let mut messages = send_batch(&mut client, addresses[0]);
        until(|| {
            server.recv(0, &mut rx);
            (!rx.items.is_empty()).then_some(())
        });
        if has_receive_offload() {
            assert_eq!(rx.items.len(), COUNT, "they come as one buffer");
            let in_place: Vec<_> = rx.items.iter().map(|item| rx.is_in_place(item)).collect();
            let within = LENT as usize / LEN;
            assert!(in_place[..=within].iter().all(|in_place| *in_place));
            assert!(in_place[within + 1..].iter().all(|in_place| !in_place));
            let place = rx.place_in_lent(&rx.items[1]);
            assert_eq!(place, Some((0, LEN as u32, LENT - LEN as u32)));
            assert_eq!(rx.place_in_lent(&rx.items[within]), None, "it ends elsewhere");
            let mut first = [0; LEN];
            memory.copy_out(AT, &mut first);
            assert_eq!(first[..], messages[0]);
            // What others write there meanwhile changes only what is copied later.
            memory.copy_in(AT + LEN as u64, &[round; LEN]);
            messages[1] = vec![round; LEN];
        } else {
            assert!(rx.items.iter().all(|item| item.followed_by == 0));
        }
        rx.detach();
        memory.copy_in(AT, &[0xee; LENT as usize]);
        assert!(rx.items.iter().all(|item| !rx.is_in_place(item)));
        let mut received: Vec<_> = rx.items.iter().map(|item| rx.payload(item).to_vec()).collect();
        rx.end_loan();
        until(|| {
            if received.len() < COUNT {
                server.recv(0, &mut rx);
                received.extend(rx.items.iter().map(|item| rx.payload(item).to_vec()));
            }
            (received.len() == COUNT).then_some(())
        });
        assert_eq!(received, messages);
        // Without a loan the next receive is as ever.
        let messages = send_batch(&mut client, addresses[0]);
        let mut received = Vec::new();
        until(|| {
            server.recv(0, &mut rx);
            received.extend(rx.items.iter().map(|item| rx.payload(item).to_vec()));
            (received.len() == COUNT).then_some(())
        });
        assert_eq!(received, messages);
    }
    rx.forget_lent();
    assert_eq!(Arc::strong_count(&memory), 1);
}

/// Datagrams of several senders, of several lengths, and more than the loans: all of them arrive, in lent memory or not.
#[test]
fn whatever_arrives_can_be_copied_out_of_lent_memory() {
    let (mut server, addresses) = open(&[udp("127.0.0.1:0")]);
    let mut clients = [0; 2].map(|_| open(&[udp("127.0.0.1:0")]).0);
    let memory = memory();
    let mut rx = RxBatch::new(64, 65_536 + 1088);
    for round in 0..20usize {
        let mut expected = Vec::new();
        for (number, client) in clients.iter_mut().enumerate() {
            let mut batch = TxBatch::new(16, 1 << 20);
            for at in 0..8usize {
                let seed = round * 16 + number * 8 + at;
                let len = [1, 64, 784, 5000, 0, 64, 64, 63][(at + round) % 8];
                let payload = pattern(len, seed);
                batch.push(addresses[0], None, len, |into| into.copy_from_slice(&payload));
                expected.push(payload);
            }
            assert_eq!(client.send(0, &mut batch).sent, 8);
        }
        let mut received = Vec::new();
        until(|| {
            for slot in 0..3 {
                assert!(rx.lend(&memory, AT + slot * (128 << 10), 4096));
            }
            server.recv(0, &mut rx);
            rx.detach();
            received.extend(rx.items.iter().map(|item| rx.payload(item).to_vec()));
            rx.end_loan();
            (received.len() == expected.len()).then_some(())
        });
        received.sort();
        expected.sort();
        assert_eq!(received, expected);
    }
}

#[test]
fn datagrams_leave_from_lent_memory_with_and_without_segmentation() {
    for segmentation_offload in [true, false] {
        let options = SocketOptions { segmentation_offload, ..SocketOptions::default() };
        let mut server = SocketNic::open(&[udp("127.0.0.1:0")], options).unwrap();
        let (mut client, addresses) = open(&[udp("127.0.0.1:0")]);
        let memory = memory();
        let messages: Vec<_> = (0..COUNT).map(|number| pattern(LEN, number)).collect();
        memory.copy_in(AT, &messages.concat());
        let own = pattern(LEN, COUNT);
        let mut batch = TxBatch::new(8, 1 << 20);
        let to = (addresses[0], None);
        let at = |skip: usize| NonZero::new(AT + skip as u64).unwrap();
        // Two items that are adjacent in memory, and one of the batch's own.
        assert!(batch.push_lent(to, (LEN, 16), false, &memory, at(0)));
        assert!(batch.push_lent(to, (LEN, COUNT - 16), false, &memory, at(16 * LEN)));
        batch.push(addresses[0], None, LEN, |into| into.copy_from_slice(&own));
        assert_eq!(server.send(0, &mut batch).sent, COUNT + 1);
        batch.forget_lent();
        assert_eq!(Arc::strong_count(&memory), 1);
        memory.copy_in(AT, &[0; 4096]);
        let mut rx = RxBatch::new(64, 65_536);
        let mut received = Vec::new();
        until(|| {
            client.recv(0, &mut rx);
            received.extend(rx.items.iter().map(|item| rx.payload(item).to_vec()));
            (received.len() == COUNT + 1).then_some(())
        });
        assert_eq!(received[..COUNT], messages);
        assert_eq!(received[COUNT], own);
    }
}
