//! The handshake with runtimes: a peer that connects is offered a runtime slot or refused, and its messages change
//! the slot's state. The messages are those of [`wire::attach`].

use std::os::fd::AsFd as _;
use std::sync::Arc;
use std::time::Instant;

use mqueue::abi::ABI_VERSION;
use sys::local::LocalSocket;
use wire::attach::{FromEngine, FromRuntime, Hello, MESSAGE_BYTES_MAX, Offer};

use super::slot::{EndCause, RuntimeSlot, State, absolute, names_file, reason_label};
use super::state::SupervisorState;
use super::{Command, LOOK_UPS_MAX, LookUp, PeerOrigin, START_TIMEOUT};
use crate::base::handshake_queue::{HandshakePeer, check_user};

impl SupervisorState {
    /// A peer sent its hello, or closed its connection.
    pub(super) fn on_hello(&mut self, arrived: HandshakePeer<PeerOrigin>) {
        if let Some(paths) = self.paths_to_compare(&arrived) {
            return self.compare_paths(arrived, paths);
        }
        self.answer_hello(arrived, &Ok(Vec::new()));
    }

    /// The path by which the peer of an attach path names its kernel, and the kernels of its accelerator that may be of the same file.
    fn paths_to_compare(
        &self,
        arrived: &HandshakePeer<PeerOrigin>,
    ) -> Option<(String, Vec<String>)> {
        let PeerOrigin::AttachPath(accelerator) = &arrived.listener_key else { return None };
        check_user(&arrived.socket).ok()?;
        let Ok(FromRuntime::Hello(hello)) = FromRuntime::decode(&arrived.hello) else {
            return None;
        };
        let specs = self.runtimes.values().map(|runtime| &runtime.spec);
        let of_it = specs.filter(|spec| spec.accelerator.name == **accelerator);
        let mut kernels: Vec<String> = of_it.map(|spec| spec.kernel().to_owned()).collect();
        if !names_file(&hello.kernel) || kernels.contains(&hello.kernel) {
            return None;
        }
        kernels.retain(|kernel| names_file(kernel));
        (!kernels.is_empty()).then_some((hello.kernel, kernels))
    }

    /// Looks the paths up on a thread of its own: a file system that hangs must not stop this one. The peer is answered afterwards.
    fn compare_paths(
        &mut self,
        arrived: HandshakePeer<PeerOrigin>,
        (named, kernels): (String, Vec<String>),
    ) {
        let place = LookUp::begin(&self.shared);
        let Some(place) = place else {
            let why = format!(
                "{LOOK_UPS_MAX} other paths of kernels are being looked up, on a file system that does not answer: try again soon"
            );
            return self.answer_hello(arrived, &Err(why));
        };
        let (shared, is_same) = (self.shared.clone(), self.is_same_kernel);
        let look_up = move || {
            let same = kernels.into_iter().filter(|kernel| is_same(kernel, &named)).collect();
            drop(place);
            shared.command(Command::Compared(arrived, same));
        };
        let thread = std::thread::Builder::new().name("serval-paths".into());
        if let Err(error) = thread.spawn(look_up) {
            // The peer's connection has ended with it.
            tracing::warn!(%error, "the path of a runtime's kernel cannot be looked up");
        }
    }

    /// Offers a peer a runtime slot, or refuses it. `same`: the kernels that are of the file which it names, or why that is not known.
    pub(super) fn answer_hello(
        &mut self,
        arrived: HandshakePeer<PeerOrigin>,
        same: &Result<Vec<String>, String>,
    ) {
        let HandshakePeer { listener_key: origin, socket, hello } = arrived;
        if let PeerOrigin::Launched(id, process) = origin {
            let Some(runtime) = self.runtimes.get(&id) else { return };
            if process != runtime.process || !matches!(runtime.state, State::Expected { .. }) {
                // From a process that the engine has stopped waiting for.
                return;
            }
            if hello.is_empty() {
                let text = self.exit_text(id);
                return self.end_group(id, EndCause::lost("lost", text));
            }
        } else if hello.is_empty() {
            return;
        }
        let offered = check_user(&socket).and_then(|()| {
            let hello = match FromRuntime::decode(&hello) {
                Ok(FromRuntime::Hello(hello)) => hello,
                Ok(_) => return Err("the first message of a runtime must be a hello".to_owned()),
                Err(error) => return Err(error.to_string()),
            };
            if hello.abi_version != ABI_VERSION {
                let theirs = hello.abi_version;
                return Err(format!(
                    "the engine speaks region ABI {ABI_VERSION}, the runtime {theirs}: use matching builds"
                ));
            }
            let id = match &origin {
                PeerOrigin::Launched(id, _) => *id,
                PeerOrigin::AttachPath(name) => self
                    .choose_slot(name, &hello, same.as_ref().map_err(String::clone)?)
                    .map_err(|why| {
                    // Its runtime slot has been removed, and the next version's does not exist yet.
                    if self.changes(name, &hello) {
                        format!("a service of accelerator {name:?} is being changed: try again soon")
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
                // If the peer does not read the answer, it has already closed the connection.
                let _ = socket.send(&FromEngine::Refuse(why.clone()).encode(), &[]);
                if let PeerOrigin::Launched(id, _) = origin {
                    self.end_group(id, EndCause::lost("refused", why));
                }
            }
        }
    }

    /// Whether a service that a runtime may be for has no runtime slot at the moment.
    pub(super) fn changes(&self, name: &str, hello: &Hello) -> bool {
        let created = |service: &str| {
            let stays = self
                .runtimes
                .values()
                .filter(|runtime| !runtime.retiring)
                .map(|runtime| &runtime.spec);
            stays.into_iter().any(|p| p.accelerator.name == name && p.service.name == service)
        };
        self.service_accelerators.iter().any(|(accelerator, service)| {
            let wanted = hello.service.is_empty() || *service == hello.service;
            accelerator == name && wanted && !created(service)
        })
    }

    /// The runtime slot for a peer that connected to an accelerator's path, or why there is none. `same`: kernels of the file that it names.
    pub(super) fn choose_slot(
        &self,
        name: &str,
        hello: &Hello,
        same: &[String],
    ) -> Result<u64, String> {
        // Those of a version that is being removed accept no runtimes.
        let runtimes =
            self.runtimes.iter().map(|(id, runtime)| (*id, runtime)).filter(|(_, s)| !s.retiring);
        let of_it: Vec<(u64, &RuntimeSlot)> =
            runtimes.filter(|(_, s)| s.spec.accelerator.name == name).collect();
        if of_it.is_empty() {
            return Err(format!("no service uses accelerator {name:?}"));
        }
        let list = |of: &dyn Fn(&RuntimeSlot) -> String| {
            of_it.iter().map(|(_, runtime)| of(runtime)).collect::<Vec<_>>().join(", ")
        };
        let services = || list(&|runtime| runtime.spec.service.name.clone());
        let wanted = |runtime: &RuntimeSlot| {
            hello.service.is_empty() || runtime.spec.service.name == hello.service
        };
        let mut fitting = of_it.iter().filter(|(_, runtime)| wanted(runtime)).peekable();
        if fitting.peek().is_none() {
            let (wish, known) = (&hello.service, services());
            return Err(format!("accelerator {name:?} has no service {wish:?}: it has {known}"));
        }
        let runs = |runtime: &RuntimeSlot| {
            let kernel = runtime.spec.kernel();
            [kernel, ""].contains(&hello.kernel.as_str()) || same.iter().any(|of| of == kernel)
        };
        let mut fitting = fitting.filter(|(_, runtime)| runs(runtime)).peekable();
        if fitting.peek().is_none() {
            let (wish, known) = (&hello.kernel, list(&|runtime| runtime.spec.kernel().to_owned()));
            return Err(format!(
                "no service of accelerator {name:?} runs kernel {wish:?}: they run {known}"
            ));
        }
        let free = |runtime: &RuntimeSlot| {
            matches!(runtime.state, State::Vacant) && runtime.region.is_some()
        };
        let fitting: Vec<_> = fitting.collect();
        let found = fitting.iter().find(|(_, runtime)| free(runtime)).map(|(id, _)| *id);
        let soon = fitting.iter().any(|(_, runtime)| matches!(runtime.state, State::Vacant));
        found.ok_or_else(|| match services() {
            _ if soon => {
                format!("a runtime of accelerator {name:?} has just ended: try again soon")
            }
            services => {
                format!("accelerator {name:?} has a runtime for each of its services: {services}")
            }
        })
    }

    /// Offers a peer the runtime slot, and those that share its process.
    fn offer(&mut self, id: u64, socket: LocalSocket, hello: &Hello) {
        let (socket, group) = (Arc::new(socket), self.group(id));
        let mut sent = Ok(());
        if group.len() > 1 {
            sent = socket.send(&FromEngine::Together(group.len() as u32).encode(), &[]);
        }
        for at in group {
            sent = sent.and_then(|()| self.offer_one(at, &socket, hello));
            let until = Instant::now() + START_TIMEOUT;
            self.runtime(at).state = State::Starting { socket: socket.clone(), until };
        }
        if let Err(error) = sent {
            self.end_group(
                id,
                EndCause::lost("lost", format!("it did not read its offer: {error}")),
            );
        }
    }

    fn offer_one(&self, id: u64, socket: &LocalSocket, hello: &Hello) -> std::io::Result<()> {
        let runtime = &self.runtimes[&id];
        let service = &runtime.spec.service;
        let region = runtime.region.as_ref().expect("a vacant runtime slot has a region");
        let offer = Offer {
            generation: region.generation,
            region_bytes: region.memory.len_bytes() as u64,
            blocks: runtime.spec.blocks(),
            heartbeat_ms: runtime.heartbeat().as_millis() as u32,
            service: service.name.clone(),
            accelerator: runtime.spec.accelerator.name.clone(),
            kernel: absolute(runtime.spec.kernel()),
            params: service.params.clone(),
        };
        let Hello { kind, process, .. } = hello;
        tracing::debug!(
            kind,
            process,
            service = service.name,
            generation = region.generation,
            "a runtime attaches"
        );
        let mut descriptors = vec![region.memory.fd(), region.wake_fd.as_fd()];
        descriptors.extend(runtime.spec.copy());
        socket.send(&FromEngine::Offer(offer).encode(), &descriptors)
    }

    /// How the process of a runtime ended that closed its connection without a message.
    fn exit_text(&mut self, id: u64) -> String {
        let group = self.group(id);
        let own = group.into_iter().find(|at| self.runtimes[at].child.is_some());
        self.runtime(own.unwrap_or(id)).exit_text()
    }

    /// A runtime sent a message, or closed its connection.
    pub(super) fn on_message(&mut self, id: u64) {
        // A message of another runtime may have ended it.
        let Some(runtime) = self.runtimes.get_mut(&id) else { return };
        let Some(socket) = runtime.socket() else { return };
        let mut bytes = [0; MESSAGE_BYTES_MAX + 1];
        let len = match socket.receive(&mut bytes) {
            Ok(None) => return,
            Ok(Some(len)) => len,
            Err(_) => 0,
        };
        if let State::Stopping { socket, .. } = &mut runtime.state {
            // Most likely a bye; in any case it is the last message.
            *socket = None;
            return;
        }
        if len == 0 {
            let text = self.exit_text(id);
            return self.end_group(id, EndCause::lost("lost", text));
        }
        let cause = match FromRuntime::decode(&bytes[..len]) {
            Ok(FromRuntime::Ready(ready)) => match self.on_ready(id, ready) {
                Ok(()) => return,
                Err(text) => EndCause::lost("protocol", text),
            },
            Ok(FromRuntime::Bye(bye)) => {
                let word = reason_label(bye.reason);
                let text = if bye.text.is_empty() { word.to_owned() } else { bye.text };
                EndCause::reported(word, text)
            }
            Ok(FromRuntime::Hello(_)) => EndCause::lost("protocol", "it sent a second hello"),
            Err(error) => EndCause::lost("protocol", error.to_string()),
        };
        self.end_group(id, cause);
    }
}
