//! Tests of the checks: an engine that breaks a promise must be caught. Since the engine keeps
//! them, a wrapper between it and its network breaks them instead.

use std::net::{IpAddr, SocketAddr};

use sim::nic::{SimNic, SimSocket};
use sim::run::simulate_with;
use wire::nic::{
    Close, Event, Nic, NicError, PortIndex, Read, RxBatch, SendOutcome, StreamKey, Transport,
    TxBatch, Written,
};

/// Manipulations of the traffic between engine and network.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Sabotage {
    /// None: the wrapper itself does no harm.
    None,
    /// A reply goes to the recipient of the previous one.
    RedirectReply,
    /// A reply leaves twice.
    RepeatReply,
    /// A reply leaves from another address.
    WrongSource,
    /// A bit of a reply changes.
    SpoilReply,
    /// A reply is taken and never sent.
    LoseReply,
    /// A received datagram is delivered twice.
    RepeatRequest,
    /// A bit of a request changes.
    SpoilRequest,
    /// A byte of a stream's replies is left out.
    LoseByte,
    /// Bytes of a stream's replies change.
    SpoilStream,
    /// A stream is closed in order although bytes are still to be written.
    CloseEarly,
    /// Datagrams that the socket dropped are not reported.
    HideOverflow,
}

/// A network that breaks one promise at intervals.
struct Saboteur {
    inner: SimNic,
    sabotage: Sabotage,
    calls: u64,
    last_peer: Option<SocketAddr>,
}

impl Saboteur {
    /// Every fourth opportunity is taken.
    fn occurs(&mut self, sabotage: Sabotage) -> bool {
        if self.sabotage != sabotage {
            return false;
        }
        self.calls += 1;
        self.calls % 4 == 0
    }
}

fn single(peer: SocketAddr, local: Option<IpAddr>, payload: &[u8]) -> TxBatch {
    let mut batch = TxBatch::new(1, payload.len());
    batch.push(peer, local, payload.len(), |bytes| bytes.copy_from_slice(payload));
    batch
}

impl Nic for Saboteur {
    type Socket = SimSocket;
    type Port = ();

    fn poll(&mut self, sleep_ns: u64, events: &mut Vec<Event>) {
        self.inner.poll(sleep_ns, events);
    }

    fn rx_batch(&self) -> RxBatch {
        self.inner.rx_batch()
    }

    fn recv(&mut self, port: PortIndex, batch: &mut RxBatch) -> bool {
        let more = self.inner.recv(port, batch);
        if self.sabotage == Sabotage::HideOverflow {
            batch.overflowed = 0;
        }
        if let Some(first) = batch.items.first().copied() {
            if self.occurs(Sabotage::RepeatRequest) {
                batch.items.push(first);
            }
            if first.len > 20 && self.occurs(Sabotage::SpoilRequest) {
                batch.bytes[first.offset as usize + 18] ^= 1;
            }
        }
        more
    }

    fn send(&mut self, port: PortIndex, batch: &mut TxBatch) -> SendOutcome {
        batch.detach();
        let Some(departure) = batch.waiting().first().copied() else {
            return self.inner.send(port, batch);
        };
        let (mut peer, mut local) = (departure.peer, departure.local);
        let mut payload = batch.payload(&departure).to_vec();
        let last_peer = self.last_peer.replace(peer);
        if let Some(last) = last_peer
            && last != peer
            && self.occurs(Sabotage::RedirectReply)
        {
            peer = last;
        }
        if local.is_some() && self.occurs(Sabotage::WrongSource) {
            local = Some([10, 9, 9, 9].into());
        }
        if payload.len() > 20 && self.occurs(Sabotage::SpoilReply) {
            payload[19] ^= 4;
        }
        if self.occurs(Sabotage::LoseReply) {
            batch.advance(1);
            return SendOutcome { sent: 1, ..SendOutcome::default() };
        }
        if self.occurs(Sabotage::RepeatReply) {
            self.inner.send(port, &mut single(peer, local, &payload));
        }
        let outcome = self.inner.send(port, &mut single(peer, local, &payload));
        batch.advance(outcome.sent + outcome.refused);
        outcome
    }

    fn accept(&mut self, port: PortIndex) -> Option<(SimSocket, SocketAddr)> {
        self.inner.accept(port)
    }

    fn adopt(&mut self, socket: SimSocket, key: StreamKey) -> Result<(), NicError> {
        self.inner.adopt(socket, key)
    }

    fn connect(
        &mut self,
        to: SocketAddr,
        transport: Transport,
        key: StreamKey,
    ) -> Result<(), NicError> {
        self.inner.connect(to, transport, key)
    }

    fn read(&mut self, key: StreamKey, into: &mut [u8]) -> Read {
        self.inner.read(key, into)
    }

    fn write(&mut self, key: StreamKey, bytes: &[u8]) -> Written {
        if bytes.len() > 40 && self.occurs(Sabotage::CloseEarly) {
            let written = self.inner.write(key, &bytes[..30]);
            if written == Written::Bytes(30) {
                self.inner.close(key, Close::Graceful);
                return Written::Broken;
            }
            return written;
        }
        if bytes.len() > 20 && self.occurs(Sabotage::SpoilStream) {
            let mut spoilt = bytes.to_vec();
            spoilt[19] ^= 1;
            return self.inner.write(key, &spoilt);
        }
        if bytes.len() > 1 && self.occurs(Sabotage::LoseByte) {
            return match self.inner.write(key, &bytes[1..]) {
                Written::Bytes(count) => Written::Bytes(count + 1),
                other => other,
            };
        }
        self.inner.write(key, bytes)
    }

    fn shutdown(&mut self, key: StreamKey) {
        self.inner.shutdown(key);
    }

    fn close(&mut self, key: StreamKey, how: Close) {
        self.inner.close(key, how);
    }

    fn add_port(&mut self, index: PortIndex, port: ()) -> Result<(), NicError> {
        self.inner.add_port(index, port)
    }

    fn stop_port(&mut self, index: PortIndex) {
        self.inner.stop_port(index);
    }

    fn pause_port(&mut self, index: PortIndex, paused: bool) {
        self.inner.pause_port(index, paused);
    }

    fn close_port(&mut self, index: PortIndex) {
        self.inner.close_port(index);
    }

    fn stop_listening(&mut self) {
        self.inner.stop_listening();
    }
}

/// Violations among the first seeds.
fn caught(sabotage: Sabotage, seeds: u64) -> Vec<String> {
    let wrap = |inner| Saboteur { inner, sabotage, calls: 0, last_peer: None };
    let run = |seed| simulate_with(seed, false, wrap).err().map(|violation| violation.text);
    (1..=seeds).filter_map(run).collect()
}

#[test]
fn a_wrapper_that_does_nothing_is_not_accused() {
    assert_eq!(caught(Sabotage::None, 20), [""; 0]);
}

#[test]
fn every_sabotage_is_caught() {
    for (sabotage, evidence) in [
        (Sabotage::RedirectReply, &["leaves by", "unsolicited"][..]),
        (Sabotage::RepeatReply, &["second reply", "unsolicited"]),
        (Sabotage::WrongSource, &["unsolicited"]),
        (Sabotage::SpoilReply, &["garbled reply", "to no request", "should be"]),
        (Sabotage::LoseReply, &["replies"]),
        (Sabotage::RepeatRequest, &["requests", "reached kernels", "second reply"]),
        (Sabotage::SpoilRequest, &["garbled message", "met mqueue", "unsolicited"]),
        (Sabotage::LoseByte, &["replies", "garbled", "other bytes", "inside a reply", "not owed"]),
        (Sabotage::SpoilStream, &["garbled", "other bytes", "replies", "not owed", "inside"]),
        (Sabotage::CloseEarly, &["inside a reply", "replies"]),
        (Sabotage::HideOverflow, &["overflows"]),
    ] {
        let found = caught(sabotage, 25);
        assert!(!found.is_empty(), "{sabotage:?} is not caught");
        let known = |text: &&String| evidence.iter().any(|e| text.contains(e));
        let by_check = found.iter().filter(known).count();
        assert!(by_check > 0, "{sabotage:?} is caught by accident only: {found:?}");
    }
}
