//! The lobby: local connections on the control side that have not said who they are.
//!
//! Whoever connects to a door says one thing, its hello, within a time, and is then somebody's: the
//! lobby hands it over with what it said. Who says nothing is shown out; when too many wait, whoever is silent
//! longest makes room, because closing the door would keep out those who speak.

use std::os::fd::{AsFd, BorrowedFd};
use std::path::Path;
use std::time::{Duration, Instant};

use sys::local::{LocalListener, LocalSocket};

/// Connections that have not said hello yet.
const STRANGERS_MAX: usize = 64;
/// How long a connection may take to say hello: also one of a process that has no core for a while. A full lobby
/// waits for nobody.
const HELLO_PATIENCE: Duration = Duration::from_secs(5);
/// How long to wait when the process has no descriptor left for whoever wants in.
const EXHAUSTED_PAUSE: Duration = Duration::from_millis(20);

/// Between two log lines about it.
const REPORT_PAUSE: Duration = Duration::from_secs(10);

/// Doors, and who came in by which; `D` names a door.
pub(super) struct Lobby<D> {
    doors: Vec<(D, LocalListener)>,
    strangers: Vec<Stranger<D>>,
    hello_bytes_max: usize,
    /// Before this it says no more about whom it cannot let in.
    next_report: Instant,
}

struct Stranger<D> {
    door: D,
    socket: LocalSocket,
    until: Instant,
}

/// Somebody who said hello, or left.
pub(super) struct Arrived<D> {
    pub(super) door: D,
    pub(super) socket: LocalSocket,
    /// What it said; a byte longer than any hello if it said more, empty if it left without a word.
    pub(super) hello: Vec<u8>,
}

impl<D: Clone> Lobby<D> {
    /// Without a door.
    pub(super) fn new(hello_bytes_max: usize) -> Self {
        let (doors, strangers) = (Vec::new(), Vec::new());
        Self { doors, strangers, hello_bytes_max, next_report: Instant::now() }
    }

    /// Nobody comes in any more, and the sockets' files go.
    pub(super) fn close(&mut self) {
        self.doors.clear();
        self.strangers.clear();
    }

    /// From now on these are the doors: `new` ones, and of those that are open whichever `name` names anew.
    pub(super) fn change_doors(
        &mut self,
        name: impl Fn(&Path) -> Option<D>,
        new: Vec<(D, LocalListener)>,
    ) {
        let old = std::mem::take(&mut self.doors).into_iter();
        let kept = old.filter_map(|(_, listener)| Some((name(listener.path())?, listener)));
        self.doors = kept.chain(new).collect();
    }

    /// Lets somebody in who did not come by a listener, and may take until then for its hello.
    pub(super) fn expect(&mut self, door: D, socket: LocalSocket, until: Instant) {
        self.strangers.push(Stranger { door, socket, until });
    }

    /// What to wait for; [`Self::look`] takes the answers in this order.
    pub(super) fn files(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        let strangers = self.strangers.iter().map(|s| s.socket.as_fd());
        strangers.chain(self.doors.iter().map(|(_, listener)| listener.as_fd()))
    }

    /// When somebody's patience ends at the latest.
    pub(super) fn until(&self) -> Option<Instant> {
        self.strangers.iter().map(|s| s.until).min()
    }

    /// Looks at who is `ready`, see [`Self::files`]: returns those who said hello or left, and lets in those who came.
    pub(super) fn look(&mut self, ready: &[bool]) -> Vec<Arrived<D>> {
        let (speaking, knocking) = ready.split_at(self.strangers.len());
        let mut arrived = Vec::new();
        let now = Instant::now();
        // From the back, so that what is removed moves nobody who is still to be looked at.
        for index in (0..speaking.len()).rev() {
            if now >= self.strangers[index].until {
                arrived.extend(self.meet_or_show_out(index));
            } else if speaking[index] {
                arrived.extend(self.meet(index));
            }
        }
        for index in (0..knocking.len()).filter(|index| knocking[*index]) {
            arrived.extend(self.accept(index));
        }
        arrived
    }

    /// `None`: it has said nothing, and stays.
    fn meet(&mut self, index: usize) -> Option<Arrived<D>> {
        let mut hello = vec![0; self.hello_bytes_max + 1];
        let len = match self.strangers[index].socket.receive(&mut hello) {
            Ok(None) => return None,
            Ok(Some(len)) => len,
            Err(_) => 0,
        };
        let Stranger { door, socket, .. } = self.strangers.swap_remove(index);
        hello.truncate(len);
        Some(Arrived { door, socket, hello })
    }

    /// Somebody has to leave who may have said hello since it was last looked at, and then is met: this thread
    /// may have stood still meanwhile.
    fn meet_or_show_out(&mut self, index: usize) -> Option<Arrived<D>> {
        let arrived = self.meet(index);
        if arrived.is_none() {
            self.strangers.swap_remove(index);
            tracing::debug!("who said nothing is shown out");
        }
        arrived
    }

    /// Lets somebody in; returns whoever had to make room and had said hello.
    fn accept(&mut self, index: usize) -> Option<Arrived<D>> {
        let (door, listener) = &self.doors[index];
        let mut arrived = None;
        match listener.accept() {
            Ok(Some(socket)) => {
                let door = door.clone();
                if self.strangers.len() >= STRANGERS_MAX {
                    let oldest = (0..self.strangers.len()).min_by_key(|i| self.strangers[*i].until);
                    arrived = self.meet_or_show_out(oldest.expect("there are some"));
                }
                self.expect(door, socket, Instant::now() + HELLO_PATIENCE);
            }
            Ok(None) => {}
            Err(error) => {
                if Instant::now() >= self.next_report {
                    self.next_report = Instant::now() + REPORT_PAUSE;
                    let path = listener.path().display();
                    tracing::warn!(%error, %path, "nobody can be let in; raise `ulimit -n`");
                }
                std::thread::sleep(EXHAUSTED_PAUSE);
            }
        }
        arrived
    }
}

/// The engine serves processes of its own user and of root, as the host kernel vouches for them.
pub(super) fn check_user(socket: &LocalSocket) -> Result<(), String> {
    let peer = socket.peer().map_err(|error| error.to_string())?;
    let own = sys::process::user();
    if peer.user == own || peer.user == 0 {
        return Ok(());
    }
    let theirs = peer.user;
    Err(format!("the engine serves processes of user {own} and root, not of user {theirs}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_spoke_while_the_lobby_stood_still_is_heard_and_who_did_not_is_shown_out() {
        let mut lobby: Lobby<()> = Lobby::new(10);
        let [spoke, silent] = [(); 2].map(|()| {
            let (ours, theirs) = LocalSocket::pair().unwrap();
            lobby.expect((), ours, Instant::now());
            theirs
        });
        spoke.send(b"hello", &[]).unwrap();
        // What was ready is of before.
        let arrived = lobby.look(&[false, false]);
        assert_eq!(arrived.iter().map(|a| &a.hello[..]).collect::<Vec<_>>(), [b"hello"]);
        assert_eq!(lobby.files().count(), 0);
        assert_eq!(silent.receive(&mut [0]).unwrap(), Some(0), "its connection has ended");
    }

    #[test]
    fn a_full_lobby_loses_nobody_who_spoke() {
        let path = std::env::temp_dir().join(format!("serval-lobby-{}", std::process::id()));
        let mut lobby: Lobby<()> = Lobby::new(10);
        lobby.change_doors(|_| None, vec![((), LocalListener::bind(&path).unwrap())]);
        let mut others = Vec::new();
        for age in (0..STRANGERS_MAX as u64).rev() {
            let (ours, theirs) = LocalSocket::pair().unwrap();
            lobby.expect((), ours, Instant::now() - Duration::from_secs(age));
            others.push(theirs);
        }
        others[0].send(b"hello", &[]).unwrap();
        let _new = [(); 2].map(|()| LocalSocket::connect(&path).unwrap());
        assert_eq!(lobby.accept(0).unwrap().hello, b"hello");
        assert_eq!(others[1].receive(&mut [0]).unwrap(), None, "there was room without it");
        assert!(lobby.accept(0).is_none());
        assert_eq!(others[1].receive(&mut [0]).unwrap(), Some(0), "silent for longest");
        assert_eq!(lobby.strangers.len(), STRANGERS_MAX);
    }
}
