//! The transport over TCP: three connections to each other rank, one for notices, one for data, and one for the bytes of long
//! transfers from the lower to the higher rank.

use std::io;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd as _, BorrowedFd};
use std::time::Duration;

use sys::descriptors::{receive_now, send_joined_now, send_now};
use sys::memory::SharedMemory;
use sys::readiness::Interest;
use sys::readiness::wait_ready;

use crate::control::{Controls, Socket, is_nothing};
use crate::error::{CollectiveError, Loss};
use crate::frame::{Notice, Purpose};
use crate::group::Group;
use crate::mesh::{Formed, FormingLimits, form};
use crate::network::{Member, Network};
use crate::transport::{SLEEP_MAX, Spin, Transport, Wants};

/// Connections to all other ranks.
pub struct Tcp {
    /// By rank; `None` for this one.
    peers: Vec<Option<Peer>>,
    controls: Controls<TcpStream>,
    spin: Spin,
}

struct Peer {
    data: TcpStream,
    bulk: TcpStream,
    is_lower: bool,
    /// Where the latest transfer goes on in each direction.
    sends_bulk: bool,
    receives_bulk: bool,
}

impl Group {
    /// Forms a group over TCP: returns when this rank is connected with all others, or fails after `limit`.
    ///
    /// `addresses` has the address at which each rank listens, in the order of ranks, the same on all of them; `listener` is this
    /// rank's own one. Any program that can reach the listener and knows the group's name can take the place of a missing rank: the
    /// network between the ranks has to be trusted.
    pub fn connect(
        member: &Member,
        listener: &TcpListener,
        addresses: &[SocketAddr],
        limit: Duration,
    ) -> Result<Self, CollectiveError> {
        Self::connect_unless(member, listener, addresses, limit, &mut || false)
    }

    /// [`Self::connect`], which ends early if `interrupt` returns true. It is asked about twenty times a second, and once a second
    /// while another machine does not answer at all.
    pub fn connect_unless(
        member: &Member,
        listener: &TcpListener,
        addresses: &[SocketAddr],
        limit: Duration,
        interrupt: &mut dyn FnMut() -> bool,
    ) -> Result<Self, CollectiveError> {
        member.check()?;
        if addresses.len() != member.ranks {
            let (ranks, given) = (member.ranks, addresses.len());
            let why = format!("{given} addresses for {ranks} ranks");
            return Err(CollectiveError::Argument(why));
        }
        let prepared = listener.set_nonblocking(true);
        prepared.map_err(|error| member.failed(error.to_string()))?;
        let Formed { joined, closed } = form(
            member,
            &Addresses { listener, addresses },
            FormingLimits::new(member, limit, interrupt),
        )?;
        let (mut controls, mut peers) = (Vec::new(), Vec::new());
        for (rank, joined) in joined.into_iter().enumerate() {
            let sockets = joined.map(|joined| joined.into_iter().map(|(socket, _)| socket));
            // In the order of purposes.
            let mut sockets = sockets.into_iter().flatten();
            controls.push(sockets.next());
            peers.push(sockets.next().zip(sockets.next()).map(|(data, bulk)| {
                let is_lower = rank < member.rank;
                Peer { data, bulk, is_lower, sends_bulk: false, receives_bulk: false }
            }));
        }
        let own = addresses[member.rank].ip();
        let local = addresses.iter().filter(|address| address.ip() == own).count();
        let transport =
            Tcp { peers, controls: Controls::new(controls.into_iter()), spin: Spin::of(local) };
        Ok(Self::new(member.ranks, member.rank, transport).with_closed(closed))
    }
}

/// Where the ranks listen.
struct Addresses<'a> {
    listener: &'a TcpListener,
    addresses: &'a [SocketAddr],
}

impl Network for Addresses<'_> {
    type Socket = TcpStream;
    const PURPOSES: &'static [Purpose] = &[Purpose::Control, Purpose::Data, Purpose::Bulk];
    const HAS_REGION: bool = false;

    fn place(&self, peer: usize) -> String {
        self.addresses[peer].to_string()
    }

    fn dial(&self, peer: usize, limit: Duration) -> io::Result<TcpStream> {
        // Zero means no limit.
        let limit = limit.max(Duration::from_millis(1));
        let socket = TcpStream::connect_timeout(&self.addresses[peer], limit)?;
        prepared(socket)
    }

    fn listener(&self) -> BorrowedFd<'_> {
        self.listener.as_fd()
    }

    fn accept(&self) -> io::Result<TcpStream> {
        prepared(self.listener.accept()?.0)
    }

    fn region(&self) -> io::Result<Option<SharedMemory>> {
        Ok(None)
    }

    fn introduce(
        &self,
        socket: &TcpStream,
        hello: &[u8],
        _: Option<BorrowedFd<'_>>,
    ) -> io::Result<()> {
        socket.send(hello)
    }

    fn receive(
        &self,
        socket: &TcpStream,
        into: &mut [u8],
    ) -> io::Result<(usize, Option<SharedMemory>)> {
        Ok((Socket::receive(socket, into)?, None))
    }
}

fn prepared(socket: TcpStream) -> io::Result<TcpStream> {
    socket.set_nodelay(true)?;
    socket.set_nonblocking(true)?;
    Ok(socket)
}

impl Peer {
    fn sending(&self) -> BorrowedFd<'_> {
        if self.sends_bulk { self.bulk.as_fd() } else { self.data.as_fd() }
    }

    fn receiving(&self) -> BorrowedFd<'_> {
        if self.receives_bulk { self.bulk.as_fd() } else { self.data.as_fd() }
    }

    fn send(&mut self, head: &[u8], body: &[u8], is_long: bool) -> io::Result<usize> {
        self.sends_bulk = is_long && !self.is_lower && head.is_empty();
        match () {
            () if head.is_empty() => send_now(self.sending(), body),
            () if is_long && !self.is_lower => send_now(self.sending(), head),
            () => send_joined_now(self.sending(), head, body),
        }
    }

    fn receive(&mut self, into: &mut [u8], is_bulk: bool) -> io::Result<usize> {
        self.receives_bulk = is_bulk && self.is_lower;
        match receive_now(self.receiving(), into) {
            Ok(0) => Err(io::ErrorKind::UnexpectedEof.into()),
            received => received,
        }
    }
}

impl Tcp {
    fn peer(&mut self, rank: usize) -> &mut Peer {
        self.peers[rank].as_mut().expect("no schedule has transfers of a rank with itself")
    }

    fn moved(&mut self, peer: usize, result: io::Result<usize>) -> Result<usize, Loss> {
        match result {
            Err(error) if is_nothing(&error) => Ok(0),
            result => result.map_err(|error| self.controls.explain(peer, &error)),
        }
    }
}

impl Transport for Tcp {
    fn send(
        &mut self,
        peer: usize,
        head: &[u8],
        body: &[u8],
        is_long: bool,
    ) -> Result<usize, Loss> {
        let sent = self.peer(peer).send(head, body, is_long);
        self.moved(peer, sent)
    }

    fn receive(&mut self, peer: usize, into: &mut [u8], is_bulk: bool) -> Result<usize, Loss> {
        let received = self.peer(peer).receive(into, is_bulk);
        self.moved(peer, received)
    }

    fn looks(&self) -> u32 {
        self.spin.looks()
    }

    fn wait(&mut self, wants: &Wants, waited: Duration, limit: Duration) -> Result<(), Loss> {
        if waited.is_zero() {
            self.controls.begin_wait();
        }
        if self.spin.spins(waited) {
            return Ok(());
        }
        let mut data = Vec::new();
        for (rank, peer) in self.peers.iter().enumerate() {
            let Some(peer) = peer else { continue };
            if wants.receive & 1 << rank != 0 {
                data.push((peer.receiving(), Interest::Receive));
            }
            if wants.send & 1 << rank != 0 {
                data.push((peer.sending(), Interest::Send));
            }
        }
        let controls = self.controls.files().map(|file| (file, Interest::Receive));
        let files: Vec<_> = controls.chain(data.iter().copied()).collect();
        wait_ready(&files, Some(limit.min(SLEEP_MAX)));
        self.controls.read_unless(|| Ok(wait_ready(&data, Some(Duration::ZERO)).contains(&true)))
    }

    fn end(&mut self, notice: Notice) {
        self.controls.notify_all(notice);
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use super::*;

    #[test]
    fn what_a_rank_sent_before_its_end_is_received() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let pair = || {
            let theirs = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
            (prepared(listener.accept().unwrap().0).unwrap(), theirs)
        };
        let ((control, their_control), (data, mut their_data), (bulk, _their_bulk)) =
            (pair(), pair(), pair());
        let peer = Peer { data, bulk, is_lower: false, sends_bulk: false, receives_bulk: false };
        let mut tcp = Tcp {
            peers: vec![None, Some(peer)],
            controls: Controls::new([None, Some(control)].into_iter()),
            spin: Spin::of(2),
        };
        let wants = Wants { receive: 1 << 1, send: 0 };
        let wait = |tcp: &mut Tcp, millis| {
            tcp.wait(&wants, Duration::from_millis(millis), Duration::from_secs(60))
        };
        their_data.write_all(&[1; 8]).unwrap();
        drop(their_control);
        assert_eq!(wait(&mut tcp, 0), Ok(()), "it spins");
        assert_eq!(wait(&mut tcp, 1), Ok(()));
        // A call that cannot take the bytes does not wait without end.
        assert_eq!(wait(&mut tcp, 2), Err(Loss::Ended(1)));
        assert_eq!(wait(&mut tcp, 0), Ok(()));
        assert_eq!(wait(&mut tcp, 1), Ok(()));
        assert_eq!(tcp.receive(1, &mut [0; 16], false), Ok(8));
        assert_eq!(wait(&mut tcp, 0), Ok(()));
        assert_eq!(wait(&mut tcp, 1), Err(Loss::Ended(1)));
    }
}
