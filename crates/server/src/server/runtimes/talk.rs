//! What is said with runtimes: whoever comes in is offered a seat or told why not, and what it says then moves the seat on. Messages are
//! [`wire::attach`]'s.

use std::os::fd::AsFd as _;
use std::sync::Arc;
use std::time::Instant;

use mqueue::abi::ABI_VERSION;
use sys::local::LocalSocket;
use wire::attach::{FromEngine, FromRuntime, Hello, MESSAGE_BYTES_MAX, Offer};

use super::seat::{Ending, Seat, State, absolute, word_of};
use super::{Desk, Door, START_PATIENCE};
use crate::server::lobby::{Arrived, check_user};

impl Desk {
    /// Somebody said hello.
    pub(super) fn meet(&mut self, arrived: Arrived<Door>) {
        let Arrived { door, socket, hello } = arrived;
        if let Door::Seat(id, process) = door {
            let Some(seat) = self.seats.get(&id) else { return };
            if process != seat.process || !matches!(seat.state, State::Expected { .. }) {
                // Of a process that was given up.
                return;
            }
            if hello.is_empty() {
                let text = self.exit_text(id);
                return self.end(id, Ending::lost("lost", text));
            }
        } else if hello.is_empty() {
            return;
        }
        let offered = check_user(&socket).and_then(|()| {
            let hello = match FromRuntime::decode(&hello) {
                Ok(FromRuntime::Hello(hello)) => hello,
                Ok(_) => return Err("a runtime says hello first".to_owned()),
                Err(error) => return Err(error.to_string()),
            };
            if hello.abi_version != ABI_VERSION {
                let theirs = hello.abi_version;
                return Err(format!(
                    "the engine speaks region ABI {ABI_VERSION}, the runtime {theirs}: use matching builds"
                ));
            }
            let id = match &door {
                Door::Seat(id, _) => *id,
                Door::Accelerator(name) => self.choose(name, &hello).map_err(|why| {
                    // Its seat has left, and the next version's is still to come.
                    if self.changes(name, &hello) {
                        format!("a service of accelerator {name:?} changes: there is a place soon")
                    } else {
                        why
                    }
                })?,
            };
            Ok((id, hello))
        });
        match offered {
            Ok((id, hello)) => self.offer(id, socket, &hello),
            Err(why) => {
                tracing::warn!(why, "a runtime is refused");
                // If it does not listen to the answer it has gone already.
                let _ = socket.send(&FromEngine::Refuse(why.clone()).encode(), &[]);
                if let Door::Seat(id, _) = door {
                    self.end(id, Ending::lost("refused", why));
                }
            }
        }
    }

    /// Whether a service that a runtime may be for has no seat at the moment.
    pub(super) fn changes(&self, name: &str, hello: &Hello) -> bool {
        let seated = |service: &str| {
            let stays = self.seats.values().filter(|seat| !seat.last).map(|seat| &seat.post);
            stays.into_iter().any(|p| p.accelerator.name == name && p.service.name == service)
        };
        self.users.iter().any(|(accelerator, service)| {
            let wanted = hello.service.is_empty() || *service == hello.service;
            accelerator == name && wanted && !seated(service)
        })
    }

    /// The seat for a runtime that came by the path of an accelerator; why there is none.
    pub(super) fn choose(&self, name: &str, hello: &Hello) -> Result<u64, String> {
        // Those of a service's version that leaves take nobody in any more.
        let seats = self.seats.iter().map(|(id, seat)| (*id, seat)).filter(|(_, s)| !s.last);
        let of_it: Vec<(u64, &Seat)> =
            seats.filter(|(_, s)| s.post.accelerator.name == name).collect();
        if of_it.is_empty() {
            return Err(format!("no service uses accelerator {name:?}"));
        }
        let list = |of: &dyn Fn(&Seat) -> String| {
            of_it.iter().map(|(_, seat)| of(seat)).collect::<Vec<_>>().join(", ")
        };
        let services = || list(&|seat| seat.post.service.name.clone());
        let wanted =
            |seat: &Seat| hello.service.is_empty() || seat.post.service.name == hello.service;
        let mut fitting = of_it.iter().filter(|(_, seat)| wanted(seat)).peekable();
        if fitting.peek().is_none() {
            let (wish, known) = (&hello.service, services());
            return Err(format!("accelerator {name:?} has no service {wish:?}: it has {known}"));
        }
        let runs = |seat: &Seat| hello.kernel.is_empty() || seat.post.kernel() == hello.kernel;
        let mut fitting = fitting.filter(|(_, seat)| runs(seat)).peekable();
        if fitting.peek().is_none() {
            let (wish, known) = (&hello.kernel, list(&|seat| seat.post.kernel().to_owned()));
            return Err(format!(
                "no service of accelerator {name:?} runs kernel {wish:?}: they run {known}"
            ));
        }
        let free = |seat: &Seat| matches!(seat.state, State::Vacant) && seat.life.is_some();
        let fitting: Vec<_> = fitting.collect();
        let found = fitting.iter().find(|(_, seat)| free(seat)).map(|(id, _)| *id);
        let soon = fitting.iter().any(|(_, seat)| matches!(seat.state, State::Vacant));
        found.ok_or_else(|| match services() {
            _ if soon => {
                format!(
                    "a runtime of accelerator {name:?} has just ended: its place is free again soon"
                )
            }
            services => {
                format!("accelerator {name:?} has a runtime for each of its services: {services}")
            }
        })
    }

    /// Offers a runtime the seat, and those that go with it.
    fn offer(&mut self, id: u64, socket: LocalSocket, hello: &Hello) {
        let (socket, together) = (Arc::new(socket), self.together(id));
        let mut sent = Ok(());
        if together.len() > 1 {
            sent = socket.send(&FromEngine::Together(together.len() as u32).encode(), &[]);
        }
        for at in together {
            sent = sent.and_then(|()| self.offer_one(at, &socket, hello));
            let until = Instant::now() + START_PATIENCE;
            self.seat(at).state = State::Starting { socket: socket.clone(), until };
        }
        if let Err(error) = sent {
            self.end(id, Ending::lost("lost", format!("it did not take its offer: {error}")));
        }
    }

    fn offer_one(&self, id: u64, socket: &LocalSocket, hello: &Hello) -> std::io::Result<()> {
        let seat = &self.seats[&id];
        let service = &seat.post.service;
        let life = seat.life.as_ref().expect("who takes a seat finds a region");
        let offer = Offer {
            generation: life.generation,
            region_bytes: life.memory.len_bytes() as u64,
            blocks: seat.post.blocks(),
            heartbeat_ms: seat.heartbeat().as_millis() as u32,
            service: service.name.clone(),
            accelerator: seat.post.accelerator.name.clone(),
            kernel: absolute(seat.post.kernel()),
            params: service.params.clone(),
        };
        let Hello { kind, process, .. } = hello;
        tracing::debug!(
            kind,
            process,
            service = service.name,
            generation = life.generation,
            "a runtime attaches"
        );
        let mut descriptors = vec![life.memory.fd(), life.bell.as_fd()];
        descriptors.extend(seat.post.copy());
        socket.send(&FromEngine::Offer(offer).encode(), &descriptors)
    }

    /// How a seat's process ended that closed its connection without a word.
    fn exit_text(&mut self, id: u64) -> String {
        let together = self.together(id);
        let own = together.into_iter().find(|at| self.seats[at].child.is_some());
        self.seat(own.unwrap_or(id)).exit_text()
    }

    /// A runtime said something, or its connection has ended.
    pub(super) fn hear(&mut self, id: u64) {
        // What another one said may have ended it.
        let Some(seat) = self.seats.get_mut(&id) else { return };
        let Some(socket) = seat.socket() else { return };
        let mut bytes = [0; MESSAGE_BYTES_MAX + 1];
        let len = match socket.receive(&mut bytes) {
            Ok(None) => return,
            Ok(Some(len)) => len,
            Err(_) => 0,
        };
        if let State::Leaving { socket, .. } = &mut seat.state {
            // A goodbye, most likely; whatever it is, it is the last word.
            *socket = None;
            return;
        }
        if len == 0 {
            let text = self.exit_text(id);
            return self.end(id, Ending::lost("lost", text));
        }
        let ending = match FromRuntime::decode(&bytes[..len]) {
            Ok(FromRuntime::Ready(ready)) => match self.begin(id, ready) {
                Ok(()) => return,
                Err(text) => Ending::lost("protocol", text),
            },
            Ok(FromRuntime::Bye(bye)) => {
                let word = word_of(bye.reason);
                let text = if bye.text.is_empty() { word.to_owned() } else { bye.text };
                Ending::told(word, text)
            }
            Ok(FromRuntime::Hello(_)) => Ending::lost("protocol", "it said hello twice"),
            Err(error) => Ending::lost("protocol", error.to_string()),
        };
        self.end(id, ending);
    }
}
