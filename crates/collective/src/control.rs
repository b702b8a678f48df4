//! The connections for notices: one to each other rank. They carry 8 bytes when a rank leaves, ends the group or wakes another one.
//! The end of a connection without a notice means that the rank's process has ended, which is noticed even if no data is
//! expected from that rank at the moment.

use std::io::{self, Read as _, Write as _};
use std::net::TcpStream;
use std::os::fd::{AsFd, BorrowedFd};

use sys::local::LocalSocket;

use crate::error::Loss;
use crate::frame::{NOTICE_BYTES, Notice};

/// Notices of one rank that are read at a time.
const NOTICES_MAX: usize = 64;

/// A non-blocking socket.
pub(crate) trait Socket: AsFd {
    /// 0: the end.
    fn receive(&self, into: &mut [u8]) -> io::Result<usize>;
    /// A few bytes, of which the socket takes all or none.
    fn send(&self, bytes: &[u8]) -> io::Result<()>;
}

impl Socket for TcpStream {
    fn receive(&self, into: &mut [u8]) -> io::Result<usize> {
        (&*self).read(into)
    }

    fn send(&self, bytes: &[u8]) -> io::Result<()> {
        (&*self).write_all(bytes)
    }
}

impl Socket for LocalSocket {
    fn receive(&self, into: &mut [u8]) -> io::Result<usize> {
        Self::receive(self, into)?.ok_or_else(|| io::ErrorKind::WouldBlock.into())
    }

    fn send(&self, bytes: &[u8]) -> io::Result<()> {
        Self::send(self, bytes, &[])
    }
}

/// The connections for notices, by rank.
pub(crate) struct Controls<S> {
    links: Vec<Option<Link<S>>>,
    /// The end of a rank was seen in the present wait, while bytes could be moved.
    end_deferred: bool,
}

struct Link<S> {
    socket: S,
    notice: [u8; NOTICE_BYTES],
    got: usize,
    /// The rank has left in order.
    has_left: bool,
}

impl<S: Socket> Controls<S> {
    /// `None` for the own rank.
    pub(crate) fn new(sockets: impl Iterator<Item = Option<S>>) -> Self {
        let link = |socket| Link { socket, notice: [0; NOTICE_BYTES], got: 0, has_left: false };
        Self { links: sockets.map(|socket| socket.map(link)).collect(), end_deferred: false }
    }

    /// Whether a rank has left in order.
    pub(crate) fn has_left(&self, rank: usize) -> bool {
        self.links[rank].as_ref().is_some_and(|link| link.has_left)
    }

    /// The sockets that may still say something.
    pub(crate) fn files(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        let open = self.links.iter().flatten().filter(|link| !link.has_left);
        open.map(|link| link.socket.as_fd())
    }

    /// Reads all notices. Fails if a rank has ended, or has ended the group; a reason comes before an end.
    pub(crate) fn read(&mut self) -> Result<(), Loss> {
        let mut ended = None;
        for (rank, link) in self.links.iter_mut().enumerate() {
            let Some(link) = link else { continue };
            match link.read(rank) {
                Err(loss @ Loss::Ended(_)) => ended = ended.or(Some(loss)),
                other => other?,
            }
        }
        ended.map_or(Ok(()), Err)
    }

    /// Bytes have moved since the last wait.
    pub(crate) fn begin_wait(&mut self) {
        self.end_deferred = false;
    }

    /// [`Self::read`] at the end of a wait. A rank may have sent all that this call needs before it ended, so its end fails a wait
    /// only if nothing can be moved, or if nothing has moved since the last time: what has arrived may need another rank first.
    /// `can_move` is asked after the end was seen, and so sees all bytes that were sent before it.
    pub(crate) fn read_unless(
        &mut self,
        can_move: impl FnOnce() -> Result<bool, Loss>,
    ) -> Result<(), Loss> {
        match self.read() {
            Err(Loss::Ended(_)) if !self.end_deferred && can_move()? => {
                self.end_deferred = true;
                Ok(())
            }
            other => other,
        }
    }

    /// Sends a notice to a rank. One that has ended needs none, and one with a full socket has others to read.
    pub(crate) fn notify(&self, rank: usize, notice: Notice) {
        if let Some(link) = &self.links[rank] {
            let _ = link.socket.send(&notice.encode());
        }
    }

    /// Sends a notice to all ranks.
    pub(crate) fn notify_all(&self, notice: Notice) {
        (0..self.links.len()).for_each(|rank| self.notify(rank, notice));
    }

    /// The best explanation of an error on the connection for data to `peer`: a rank that ends the group says why before it closes.
    pub(crate) fn explain(&mut self, peer: usize, error: &io::Error) -> Loss {
        if let Err(loss) = self.read() {
            return loss;
        }
        match error.kind() {
            _ if self.has_left(peer) => Loss::Left(peer),
            io::ErrorKind::UnexpectedEof
            | io::ErrorKind::ConnectionReset
            | io::ErrorKind::BrokenPipe => Loss::Ended(peer),
            other => Loss::Host(peer, other),
        }
    }
}

impl<S: Socket> Link<S> {
    fn read(&mut self, rank: usize) -> Result<(), Loss> {
        for _ in 0..NOTICES_MAX {
            if self.has_left {
                return Ok(());
            }
            match self.socket.receive(&mut self.notice[self.got..]) {
                Ok(0) if mutants::on("miss_end_of_rank") => return Ok(()),
                Ok(0) => return Err(Loss::Ended(rank)),
                Ok(got) => self.got += got,
                Err(error) if is_nothing(&error) => return Ok(()),
                Err(_) => return Err(Loss::Ended(rank)),
            }
            if self.got < NOTICE_BYTES {
                continue;
            }
            self.got = 0;
            match Notice::decode(&self.notice) {
                Some(Notice::Leave) => self.has_left = true,
                Some(Notice::End(why)) => return Err(Loss::Told { by: rank, why }),
                Some(Notice::Wake) => {}
                None if mutants::on("ignore_garbage_notice") => {}
                None => return Err(Loss::Garbage(rank)),
            }
        }
        Ok(())
    }
}

/// There is nothing to read, or no room to write.
pub(crate) fn is_nothing(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted)
}
