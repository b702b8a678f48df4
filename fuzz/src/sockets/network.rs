//! A network of one listener and of peers that do what the input says.

use std::collections::BTreeMap;
use std::net::{Ipv4Addr, SocketAddr};

use wire::nic::{
    Close, Event, Nic, NicError, PortIndex, Read, RxBatch, SendOutcome, StreamKey, Transport,
    TxBatch, Written,
};

use super::PIECE_BYTES_MAX;
use crate::rings::{Choose, Tape};

/// The only port.
const LISTENER: PortIndex = 0;
/// Connections that wait at most.
const BACKLOG: u32 = 8;

/// See the module's text.
#[derive(Default)]
pub(super) struct Network {
    connections: BTreeMap<StreamKey, Connection>,
    /// Connections that were not accepted yet.
    waiting: u32,
    events: Vec<Event>,
    /// The next adoption or attempt fails.
    is_exhausted: bool,
    /// No connection begins any more.
    pub(super) is_closed: bool,
    /// Bytes that peers sent and the worker has read.
    pub(super) given: u64,
    /// Bytes that the worker has written.
    pub(super) taken: u64,
}

#[derive(Default)]
struct Connection {
    is_established: bool,
    /// Bytes that the peer sent and the worker has not read.
    unread: u64,
    /// Bytes that the peer takes.
    room: u64,
    /// The peer sends nothing more.
    has_ended: bool,
    is_broken: bool,
    /// The worker sends nothing more.
    is_shut: bool,
}

impl Network {
    /// A peer does something.
    pub(super) fn happen(&mut self, tape: &mut Tape<'_>) {
        let chosen = tape.below(self.connections.len().max(1) as u64) as usize;
        let amount = tape.below(PIECE_BYTES_MAX);
        let what = tape.below(9);
        match what {
            0 | 1 => {
                self.waiting = (self.waiting + 1).min(BACKLOG);
                return self.events.push(Event::Connections(LISTENER));
            }
            2 => return self.is_exhausted = true,
            _ => {}
        }
        let Some((key, connection)) = self.connections.iter_mut().nth(chosen) else { return };
        self.events.push(match what {
            3 | 4 if !connection.has_ended => {
                connection.unread += amount;
                Event::Readable(*key)
            }
            5 | 6 => {
                connection.room += amount;
                Event::Writable(*key)
            }
            7 => {
                connection.has_ended = true;
                Event::Readable(*key)
            }
            _ => {
                connection.is_broken = true;
                Event::Failed(*key)
            }
        });
    }

    /// Connections of both directions that exist.
    pub(super) fn established(&self) -> u64 {
        self.connections.values().filter(|connection| connection.is_established).count() as u64
    }

    /// The same with attempts.
    pub(super) fn connections(&self) -> usize {
        self.connections.len()
    }

    /// Every peer resets its connection.
    pub(super) fn reset_all(&mut self) {
        self.waiting = 0;
        for (key, connection) in &mut self.connections {
            connection.is_broken = true;
            self.events.push(Event::Failed(*key));
        }
    }

    fn open(&mut self, key: StreamKey, connection: Connection) -> Result<(), NicError> {
        if std::mem::take(&mut self.is_exhausted) || self.is_closed {
            return Err(NicError::Exhausted);
        }
        let old = self.connections.insert(key, connection);
        assert!(old.is_none(), "stream {key} is open");
        Ok(())
    }

    fn established_mut(&mut self, key: StreamKey) -> &mut Connection {
        let connection = self.connections.get_mut(&key);
        let connection = connection.unwrap_or_else(|| panic!("stream {key} is not open"));
        assert!(connection.is_established, "stream {key} is not connected");
        connection
    }
}

impl Nic for Network {
    type Socket = ();
    type Port = ();

    fn poll(&mut self, _sleep_ns: u64, events: &mut Vec<Event>) {
        events.clear();
        events.append(&mut self.events);
        for event in &*events {
            if let Event::Writable(key) = event
                && let Some(connection) = self.connections.get_mut(key)
                && !connection.is_broken
            {
                connection.is_established = true;
            }
        }
        // An attempt that failed was never writable, and new connections come last.
        events.retain(|event| match event {
            Event::Writable(key) => self.connections.get(key).is_some_and(|c| c.is_established),
            _ => true,
        });
        events.sort_by_key(|event| matches!(event, Event::Connections(_)));
    }

    fn recv(&mut self, _port: PortIndex, batch: &mut RxBatch) -> bool {
        batch.items.clear();
        false
    }

    fn send(&mut self, _port: PortIndex, _batch: &mut TxBatch) -> SendOutcome {
        SendOutcome::default()
    }

    fn accept(&mut self, port: PortIndex) -> Option<((), SocketAddr)> {
        assert_eq!(port, LISTENER);
        self.waiting = self.waiting.checked_sub(1)?;
        Some(((), (Ipv4Addr::LOCALHOST, 9).into()))
    }

    fn adopt(&mut self, (): (), key: StreamKey) -> Result<(), NicError> {
        self.open(key, Connection { is_established: true, ..Connection::default() })
    }

    fn connect(&mut self, _: SocketAddr, _: Transport, key: StreamKey) -> Result<(), NicError> {
        self.open(key, Connection::default())
    }

    fn read(&mut self, key: StreamKey, into: &mut [u8]) -> Read {
        assert!(!into.is_empty(), "a read of nothing");
        let connection = self.established_mut(key);
        let count = connection.unread.min(into.len() as u64);
        if connection.is_broken {
            return Read::Broken;
        }
        if count == 0 {
            return if connection.has_ended { Read::Closed } else { Read::Empty };
        }
        connection.unread -= count;
        self.given += count;
        Read::Bytes(count as usize)
    }

    fn write(&mut self, key: StreamKey, bytes: &[u8]) -> Written {
        assert!(!bytes.is_empty(), "a write of nothing");
        let connection = self.established_mut(key);
        assert!(!connection.is_shut, "stream {key} was shut down");
        let count = connection.room.min(bytes.len() as u64);
        if connection.is_broken {
            return Written::Broken;
        }
        if count == 0 {
            return Written::Full;
        }
        connection.room -= count;
        self.taken += count;
        Written::Bytes(count as usize)
    }

    fn shutdown(&mut self, key: StreamKey) {
        let connection = self.established_mut(key);
        assert!(!connection.is_shut, "stream {key} was shut down twice");
        connection.is_shut = true;
    }

    fn close(&mut self, key: StreamKey, _how: Close) {
        let closed = self.connections.remove(&key);
        assert!(closed.is_some(), "stream {key} is not open");
        let is_other = |event: &Event| match event {
            Event::Readable(other) | Event::Writable(other) | Event::Failed(other) => *other != key,
            Event::Connections(_) | Event::Datagrams(_) => true,
        };
        self.events.retain(is_other);
    }

    fn stop_listening(&mut self) {}

    fn add_port(&mut self, port: PortIndex, (): ()) -> Result<(), NicError> {
        assert_eq!(port, LISTENER);
        Ok(())
    }

    fn stop_port(&mut self, _port: PortIndex) {}

    fn pause_port(&mut self, _port: PortIndex, _held: bool) {}

    fn close_port(&mut self, _port: PortIndex) {}
}
