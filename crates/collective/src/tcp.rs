//! The transport over TCP: two connections to each other rank, one for data and one for notices.

use std::io;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd as _, BorrowedFd};
use std::time::Duration;

use sys::descriptors::{Interest, receive_now, send_now};
use sys::local::wait_ready;
use sys::memory::SharedMemory;

use crate::control::{Controls, Socket, is_nothing};
use crate::error::{CollectiveError, Loss};
use crate::frame::{Notice, Purpose};
use crate::group::Group;
use crate::mesh::{Member, Network, form};
use crate::transport::{SLEEP_MAX, Spin, Transport, Wants};

/// Bytes that are sent with the header of a frame, in one call.
const JOINED_BYTES: usize = 16 << 10;

/// Connections to all other ranks.
pub struct Tcp {
    /// By rank; `None` for this one.
    data: Vec<Option<TcpStream>>,
    controls: Controls<TcpStream>,
    joined: Vec<u8>,
    spin: Spin,
}

impl Group<Tcp> {
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
        member.check()?;
        if addresses.len() != member.ranks {
            let (ranks, given) = (member.ranks, addresses.len());
            let why = format!("{given} addresses for {ranks} ranks");
            return Err(CollectiveError::Argument(why));
        }
        let prepared = listener.set_nonblocking(true);
        prepared.map_err(|error| member.failed(error.to_string()))?;
        let pairs = form(member, &Addresses { listener, addresses }, limit)?;
        let (mut controls, mut data) = (Vec::new(), Vec::new());
        for pair in pairs {
            // In the order of purposes.
            let [control, stream] = match pair.map(<[_; 2]>::try_from) {
                Some(Ok(pair)) => pair.map(|(socket, _)| Some(socket)),
                _ => [None, None],
            };
            controls.push(control);
            data.push(stream);
        }
        let own = addresses[member.rank].ip();
        let local = addresses.iter().filter(|address| address.ip() == own).count();
        let transport = Tcp {
            data,
            controls: Controls::new(controls.into_iter()),
            joined: Vec::with_capacity(JOINED_BYTES),
            spin: Spin::of(local),
        };
        Ok(Self::new(member.ranks, member.rank, transport))
    }
}

/// Where the ranks listen.
struct Addresses<'a> {
    listener: &'a TcpListener,
    addresses: &'a [SocketAddr],
}

impl Network for Addresses<'_> {
    type Socket = TcpStream;
    const PURPOSES: &'static [Purpose] = &[Purpose::Control, Purpose::Data];
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

impl Tcp {
    fn data(&self, peer: usize) -> BorrowedFd<'_> {
        let socket = self.data[peer].as_ref();
        socket.expect("no schedule has transfers of a rank with itself").as_fd()
    }
}

impl Transport for Tcp {
    fn send(&mut self, peer: usize, head: &[u8], body: &[u8]) -> Result<usize, Loss> {
        let sent = if head.is_empty() {
            send_now(self.data(peer), body)
        } else {
            let mut joined = std::mem::take(&mut self.joined);
            joined.clear();
            joined.extend_from_slice(head);
            joined.extend_from_slice(&body[..body.len().min(JOINED_BYTES - head.len())]);
            let sent = send_now(self.data(peer), &joined);
            self.joined = joined;
            sent
        };
        match sent {
            Ok(sent) => Ok(sent),
            Err(error) if is_nothing(&error) => Ok(0),
            Err(error) => Err(self.controls.explain(peer, &error)),
        }
    }

    fn receive(&mut self, peer: usize, into: &mut [u8]) -> Result<usize, Loss> {
        match receive_now(self.data(peer), into) {
            Ok(0) => Err(self.controls.explain(peer, &io::ErrorKind::UnexpectedEof.into())),
            Ok(got) => Ok(got),
            Err(error) if is_nothing(&error) => Ok(0),
            Err(error) => Err(self.controls.explain(peer, &error)),
        }
    }

    fn wait(&mut self, wants: &Wants, waited: Duration, limit: Duration) -> Result<(), Loss> {
        if self.spin.spins(waited) {
            return Ok(());
        }
        let controls = self.controls.files().map(|file| (file, Interest::Receive));
        let mut files: Vec<_> = controls.collect();
        for (rank, socket) in self.data.iter().enumerate() {
            let Some(socket) = socket else { continue };
            if wants.receive & 1 << rank != 0 {
                files.push((socket.as_fd(), Interest::Receive));
            }
            if wants.send & 1 << rank != 0 {
                files.push((socket.as_fd(), Interest::Send));
            }
        }
        wait_ready(&files, Some(limit.min(SLEEP_MAX)));
        self.controls.read()
    }

    fn end(&mut self, notice: Notice) {
        self.controls.notify_all(notice);
    }
}
