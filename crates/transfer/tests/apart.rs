//! A transfer that fails while another thread sends a part of it.

use std::io::{self, IoSliceMut};
use std::sync::{Arc, Mutex};

use transfer::command::device::SocketSender;
use transfer::command::device::{Blocked, End};
use transfer::command::limits::CHUNK_BYTES;
use transfer::command::pipeline::WhenBlocked;
use transfer::run::apart::Apart;
use transfer::run::flow::Flow;
use transfer::run::plan::{Cut, Plan};
use transfer::stages::buffer::Buffers;
use transfer::{Device, Devices, TransferError};

/// A file of ones, and a socket that takes this many bytes at a time.
struct Ends {
    takes: usize,
    sent: Arc<Mutex<usize>>,
}

impl Devices for Ends {
    fn read_at(&mut self, parts: &mut [IoSliceMut<'_>], _: u64) -> io::Result<usize> {
        parts.iter_mut().for_each(|part| part.fill(1));
        Ok(parts.iter().map(|part| part.len()).sum())
    }

    fn sender(&self) -> Option<Arc<SocketSender>> {
        let (takes, sent) = (self.takes, self.sent.clone());
        Some(Arc::new(move |bytes| {
            let mut sent = sent.lock().unwrap();
            if *sent > 0 {
                return Err(io::ErrorKind::WouldBlock.into());
            }
            *sent = takes.min(bytes.len());
            Ok(*sent)
        }))
    }

    fn send(&mut self, _: &[u8]) -> io::Result<usize> {
        unreachable!("another thread sends")
    }

    fn write_at(&mut self, _: &[u8], _: u64) -> io::Result<usize> {
        unreachable!("the sink is a socket")
    }

    fn sync(&mut self) -> io::Result<()> {
        unreachable!("the sink is a socket")
    }

    fn receive(&mut self, _: &mut [u8]) -> io::Result<usize> {
        unreachable!("the source is a file")
    }
}

#[test]
fn a_failure_waits_for_the_part_that_is_away_and_counts_it() {
    let plan = Plan {
        source: Device::File,
        sink: Device::Socket,
        from: 0,
        bytes: Some(8 * CHUNK_BYTES as u64),
        to: 0,
        stages: Vec::new(),
        when_blocked: WhenBlocked::Wait,
        sync: false,
        part: None,
        cut: Cut::No,
        parts_max: 1,
        head: Vec::new(),
    };
    let sent = Arc::new(Mutex::new(0));
    let mut flow = Flow::new(&plan, Ends { takes: 1000, sent: sent.clone() }).unwrap();
    let mut buffers = Buffers::default();
    assert_eq!(flow.step(End::Source, &mut buffers).ended, None);
    let Some(Apart::Send(mut away)) = flow.part_for_socket() else { panic!("there is a chunk") };
    flow.fail(TransferError::Reset);
    assert_eq!((flow.ended(), flow.next(Blocked::default())), (None, None));
    assert!(away.run(), "the socket is full");
    assert_eq!(flow.join(Apart::Send(away), &mut buffers), 1000);
    let result = flow.ended().expect("nothing is away");
    assert_eq!(result, Err(TransferError::Reset));
    assert_eq!((flow.report(&result, &mut buffers).written, *sent.lock().unwrap()), (1000, 1000));
}
