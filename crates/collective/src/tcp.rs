//! The transport over TCP: two connections to each other rank, one for data and one for notices.
//!
//! The connection for notices carries 8 bytes when its rank leaves or ends the group. Its end without a notice means that the
//! rank's process has ended, which is noticed even if no data is expected from that rank at the moment.

use std::io;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsFd as _;
use std::time::Duration;

use sys::descriptors::{Interest, receive_now, send_now};
use sys::local::wait_ready;

use crate::error::{CollectiveError, Loss};
use crate::frame::{NOTICE_BYTES, Notice};
use crate::group::Group;
use crate::mesh::{Member, form};
use crate::transport::{Transport, Wants};

/// Bytes that are sent with the header of a frame, in one call.
const JOINED_BYTES: usize = 16 << 10;
/// How long a call spins before it sleeps: with a core for each rank of this machine, and with fewer cores.
const SPIN: Duration = Duration::from_micros(200);
const CROWDED_SPIN: Duration = Duration::from_micros(20);
/// Longest sleep; an end of a rank ends it early.
const SLEEP_MAX: Duration = Duration::from_millis(500);

/// Connections to all other ranks.
pub struct Tcp {
    /// By rank; `None` for this one.
    links: Vec<Option<Link>>,
    joined: Vec<u8>,
    spin: Duration,
}

struct Link {
    control: TcpStream,
    data: TcpStream,
    notice: [u8; NOTICE_BYTES],
    got: usize,
    /// The rank has left in order.
    has_left: bool,
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
        let pairs = form(member, listener, addresses, limit)?;
        let own = addresses[member.rank].ip();
        let local = addresses.iter().filter(|address| address.ip() == own).count();
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let link = |pair: crate::mesh::Pair| Link {
            control: pair.control,
            data: pair.data,
            notice: [0; NOTICE_BYTES],
            got: 0,
            has_left: false,
        };
        let transport = Tcp {
            links: pairs.into_iter().map(|pair| pair.map(link)).collect(),
            joined: Vec::with_capacity(JOINED_BYTES),
            spin: if local > cores { CROWDED_SPIN } else { SPIN },
        };
        Ok(Self::new(member.ranks, member.rank, transport))
    }
}

impl Tcp {
    fn link(&mut self, peer: usize) -> &mut Link {
        self.links[peer].as_mut().expect("no schedule has transfers of a rank with itself")
    }

    /// The best explanation of an error on the connection to `peer`: a rank that ends the group says why before it closes.
    fn explain(&mut self, peer: usize, error: &io::Error) -> Loss {
        if let Err(loss) = self.read_notices() {
            return loss;
        }
        match error.kind() {
            _ if self.link(peer).has_left => Loss::Left(peer),
            io::ErrorKind::UnexpectedEof
            | io::ErrorKind::ConnectionReset
            | io::ErrorKind::BrokenPipe => Loss::Ended(peer),
            other => Loss::Host(peer, other),
        }
    }

    /// Fails if a rank has ended, or has ended the group; a reason comes before an end.
    fn read_notices(&mut self) -> Result<(), Loss> {
        let mut ended = None;
        for (rank, link) in self.links.iter_mut().enumerate() {
            let Some(link) = link.as_mut().filter(|link| !link.has_left) else { continue };
            match link.read_notice(rank) {
                Err(loss @ Loss::Ended(_)) => ended = ended.or(Some(loss)),
                other => other?,
            }
        }
        ended.map_or(Ok(()), Err)
    }
}

impl Link {
    fn read_notice(&mut self, rank: usize) -> Result<(), Loss> {
        match receive_now(self.control.as_fd(), &mut self.notice[self.got..]) {
            Ok(0) => return Err(Loss::Ended(rank)),
            Ok(got) => self.got += got,
            Err(error) if is_nothing(&error) => return Ok(()),
            Err(_) => return Err(Loss::Ended(rank)),
        }
        if self.got < NOTICE_BYTES {
            return Ok(());
        }
        match Notice::decode(&self.notice) {
            Some(Notice::Leave) => self.has_left = true,
            Some(Notice::End(why)) => return Err(Loss::Told { by: rank, why }),
            None => return Err(Loss::Garbage(rank)),
        }
        Ok(())
    }
}

fn is_nothing(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted)
}

impl Transport for Tcp {
    fn send(&mut self, peer: usize, head: &[u8], body: &[u8]) -> Result<usize, Loss> {
        let mut joined = std::mem::take(&mut self.joined);
        let data = &self.link(peer).data;
        let sent = if head.is_empty() {
            send_now(data.as_fd(), body)
        } else {
            joined.clear();
            joined.extend_from_slice(head);
            joined.extend_from_slice(&body[..body.len().min(JOINED_BYTES - head.len())]);
            send_now(data.as_fd(), &joined)
        };
        self.joined = joined;
        match sent {
            Ok(sent) => Ok(sent),
            Err(error) if is_nothing(&error) => Ok(0),
            Err(error) => Err(self.explain(peer, &error)),
        }
    }

    fn receive(&mut self, peer: usize, into: &mut [u8]) -> Result<usize, Loss> {
        match receive_now(self.link(peer).data.as_fd(), into) {
            Ok(0) => Err(self.explain(peer, &io::ErrorKind::UnexpectedEof.into())),
            Ok(got) => Ok(got),
            Err(error) if is_nothing(&error) => Ok(0),
            Err(error) => Err(self.explain(peer, &error)),
        }
    }

    fn wait(&mut self, wants: &Wants, waited: Duration, limit: Duration) -> Result<(), Loss> {
        if waited < self.spin {
            if self.spin == CROWDED_SPIN {
                std::thread::yield_now();
            }
            return Ok(());
        }
        let mut files = Vec::with_capacity(3 * self.links.len());
        for (rank, link) in self.links.iter().enumerate() {
            let Some(link) = link else { continue };
            if !link.has_left {
                files.push((link.control.as_fd(), Interest::Receive));
            }
            if wants.receive & 1 << rank != 0 {
                files.push((link.data.as_fd(), Interest::Receive));
            }
            if wants.send & 1 << rank != 0 {
                files.push((link.data.as_fd(), Interest::Send));
            }
        }
        wait_ready(&files, Some(limit.min(SLEEP_MAX)));
        self.read_notices()
    }

    fn end(&mut self, notice: Notice) {
        for link in self.links.iter().flatten() {
            // A rank that has ended needs no notice.
            let _ = send_now(link.control.as_fd(), &notice.encode());
        }
    }
}
