//! Many clients in one thread. Each has a socket of its own, keeps a few requests in flight, sends bytes
//! unique to it, and checks every reply. The counters contain the results of all requests.

use std::collections::{HashSet, VecDeque};
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use sys::{SocketNic, SocketOptions};
use wire::framing::Framing;
use wire::nic::{Close, Event, Nic, Read, StreamKey, Transport, Written};

use super::{PATIENCE, pattern};

/// How TCP messages are delimited.
pub(crate) const FRAMING: Framing = Framing::LengthU16;
/// After this a datagram's reply is no longer waited for. It may still come: then it was late, not lost.
const GIVE_UP: Duration = Duration::from_secs(2);
/// Connections that are being opened at a time: fewer than a listener's backlog.
const OPENING_MAX: usize = 500;
/// Longest wait of one turn.
const TURN_NS: u64 = 1_000_000;

/// What became of the requests of one transport.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Books {
    pub(crate) sent: u64,
    pub(crate) answered: u64,
    /// Given up, and not answered since.
    pub(crate) lost: u64,
}

/// Clients of one address.
pub(crate) struct Crowd {
    nic: SocketNic,
    server: SocketAddr,
    transport: Transport,
    clients: Vec<Client>,
    connected: usize,
    window: usize,
    asking: bool,
    books: Books,
    next_look: Instant,
    events: Vec<Event>,
    buffer: Vec<u8>,
}

#[derive(Default)]
struct Client {
    connected: bool,
    /// Number of the next request.
    next: u64,
    /// Requests in flight and when each is given up.
    waiting: VecDeque<(u64, Option<Instant>)>,
    given_up: HashSet<u64>,
    /// Something was lost and nothing was answered since.
    unheard: bool,
    input: Vec<u8>,
    output: Vec<u8>,
}

/// The bytes of one request, unlike those of any other.
fn message(client: u64, number: u64) -> Vec<u8> {
    let salt = (client * 7919 + number * 31) as usize;
    let mut message = pattern(16 + salt % 300, salt);
    message[..8].copy_from_slice(&client.to_le_bytes());
    message[8..16].copy_from_slice(&number.to_le_bytes());
    message
}

impl Crowd {
    /// `count` clients, all connected, none of which has asked anything.
    pub(crate) fn connect(
        server: SocketAddr,
        transport: Transport,
        count: usize,
        window: usize,
    ) -> Self {
        // A client's datagrams must not be lost on the client's own side.
        let options = SocketOptions { receive_buffer_bytes: 1 << 20, ..SocketOptions::default() };
        let nic = SocketNic::open(&[], options).expect("an epoll set");
        let mut crowd = Self {
            nic,
            server,
            transport,
            clients: Vec::new(),
            connected: 0,
            window,
            asking: false,
            books: Books::default(),
            next_look: Instant::now(),
            events: Vec::new(),
            buffer: vec![0; 1 << 16],
        };
        let deadline = Instant::now() + 3 * PATIENCE;
        while crowd.connected < count {
            while crowd.clients.len() < count && crowd.clients.len() < crowd.connected + OPENING_MAX
            {
                let key = crowd.clients.len() as StreamKey;
                crowd.nic.connect(server, transport, key).expect("a socket");
                // A datagram socket is connected at once, without an event.
                let connected = transport == Transport::Udp;
                crowd.clients.push(Client { connected, ..Client::default() });
                crowd.connected += usize::from(connected);
            }
            crowd.turn();
            assert!(Instant::now() < deadline, "{} of {count} are connected", crowd.connected);
        }
        crowd
    }

    pub(crate) fn books(&self) -> Books {
        self.books
    }

    /// From now on a client has at most `window` requests in flight.
    pub(crate) fn widen(&mut self, window: usize) {
        self.window = window;
    }

    /// From now on every client has as many requests in flight as it may.
    pub(crate) fn ask(&mut self) {
        self.asking = true;
        for key in 0..self.clients.len() {
            self.fill_window(key);
        }
    }

    /// Nothing new is asked but by clients that have not heard anything since they lost something: the
    /// host kernel tells the server of a loss with the next datagram only.
    pub(crate) fn stop_asking(&mut self) {
        self.asking = false;
    }

    /// Every request is answered or given up.
    pub(crate) fn is_settled(&self) -> bool {
        self.clients.iter().all(|client| client.waiting.is_empty() && !client.unheard)
    }

    /// Waits a moment for replies and, while asking, asks again for each.
    pub(crate) fn turn(&mut self) {
        let mut events = std::mem::take(&mut self.events);
        self.nic.poll(TURN_NS, &mut events);
        for event in &events {
            match *event {
                Event::Readable(key) => self.read(key),
                Event::Writable(key) => {
                    let fresh = !std::mem::replace(&mut self.clients[key as usize].connected, true);
                    self.connected += usize::from(fresh);
                    self.write(key);
                    self.fill_window(key as usize);
                }
                Event::Failed(key) => panic!("client {key}: the connection failed"),
                Event::Datagrams(_) | Event::Connections(_) => unreachable!("no ports"),
            }
        }
        self.events = events;
        if Instant::now() >= self.next_look {
            self.next_look = Instant::now() + GIVE_UP / 20;
            self.give_up();
        }
    }

    fn fill_window(&mut self, key: usize) {
        while self.asking && self.clients[key].waiting.len() < self.window {
            self.ask_once(key);
        }
    }

    fn ask_once(&mut self, key: usize) {
        let client = &mut self.clients[key];
        let message = message(key as u64, client.next);
        let datagram = self.transport == Transport::Udp;
        client.waiting.push_back((client.next, datagram.then(|| Instant::now() + GIVE_UP)));
        client.next += 1;
        self.books.sent += 1;
        match self.transport {
            Transport::Udp => {
                let written = self.nic.write(key as StreamKey, &message);
                assert_eq!(written, Written::Bytes(message.len()), "client {key}");
            }
            Transport::Tcp => {
                FRAMING.encode_request(&message, &mut client.output).unwrap();
                self.write(key as StreamKey);
            }
        }
    }

    fn write(&mut self, key: StreamKey) {
        let client = &mut self.clients[key as usize];
        while !client.output.is_empty() {
            match self.nic.write(key, &client.output) {
                Written::Bytes(count) => drop(client.output.drain(..count)),
                Written::Full => return,
                Written::Broken => panic!("client {key}: the connection broke"),
            }
        }
    }

    fn read(&mut self, key: StreamKey) {
        let mut buffer = std::mem::take(&mut self.buffer);
        loop {
            match self.nic.read(key, &mut buffer) {
                Read::Bytes(count) => match self.transport {
                    Transport::Udp => self.check_datagram(key as usize, &buffer[..count]),
                    Transport::Tcp => self.check_stream(key as usize, &buffer[..count]),
                },
                Read::Empty => break,
                end => {
                    panic!("client {key}: {end:?} with {:?}", self.clients[key as usize].waiting)
                }
            }
        }
        self.buffer = buffer;
        self.fill_window(key as usize);
    }

    fn check_datagram(&mut self, key: usize, reply: &[u8]) {
        let client = &mut self.clients[key];
        let number = u64::from_le_bytes(reply[8..16].try_into().expect("16 bytes or more"));
        assert_eq!(reply, message(key as u64, number), "client {key}: not its reply");
        client.unheard = false;
        self.books.answered += 1;
        if let Some(at) = client.waiting.iter().position(|(waiting, _)| *waiting == number) {
            client.waiting.remove(at);
        } else {
            assert!(client.given_up.remove(&number), "client {key}: {number} was answered twice");
            self.books.lost -= 1;
        }
    }

    fn check_stream(&mut self, key: usize, bytes: &[u8]) {
        let client = &mut self.clients[key];
        client.input.extend_from_slice(bytes);
        let mut taken = 0;
        while taken < client.input.len() {
            let rest = &client.input[taken..];
            let (number, _) = *client.waiting.front().expect("unexpected bytes");
            let mut reply = Vec::new();
            FRAMING.encode_reply(&message(key as u64, number), &mut reply).unwrap();
            let arrived = rest.len().min(reply.len());
            assert_eq!(rest[..arrived], reply[..arrived], "client {key}: not reply {number}");
            if arrived < reply.len() {
                break;
            }
            client.waiting.pop_front();
            self.books.answered += 1;
            taken += arrived;
        }
        client.input.drain(..taken);
    }

    /// Datagrams whose replies are overdue are lost until they come.
    fn give_up(&mut self) {
        let now = Instant::now();
        for key in 0..self.clients.len() {
            let client = &mut self.clients[key];
            while let Some(&(number, Some(until))) = client.waiting.front()
                && until < now
            {
                client.waiting.pop_front();
                client.given_up.insert(number);
                client.unheard = true;
                self.books.lost += 1;
            }
            if self.asking {
                self.fill_window(key);
            } else if self.clients[key].unheard && self.clients[key].waiting.is_empty() {
                self.ask_once(key);
            }
        }
    }

    /// Every client leaves.
    pub(crate) fn leave(mut self) {
        for key in 0..self.clients.len() {
            self.nic.close(key as StreamKey, Close::Graceful);
        }
    }
}
