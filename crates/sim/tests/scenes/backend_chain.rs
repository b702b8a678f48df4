//! A chain of functions between kernels and a backend that fails, answers late or not at all.

use std::collections::HashSet;
use std::sync::{Arc, Mutex};

use crate::scene::{MS, Scene, request, script};
use engine::topology::Sockets;
use onpath::{Direction, End, Failure, Function, Messages, Notice, OnFailure, RequestId};
use sim::backend::BackendBehaviour;
use sim::message::{Ask, Body};
use wire::DropReason;
use wire::framing::Framing;
use wire::nic::Transport;

/// What a function has seen of each request.
#[derive(Default)]
struct Books {
    open: HashSet<RequestId>,
    requests: u64,
    replies: u64,
    unsent: u64,
    unknown: u64,
    ticks: u64,
}

/// Passes everything, and keeps books: a request is shown once, and ends once.
#[derive(Clone, Default)]
struct Watches {
    books: Arc<Mutex<Books>>,
    /// Drops requests, or answers.
    drops: Option<Direction>,
    /// Panics with each message.
    panics: bool,
}

impl Function for Watches {
    fn decide(&mut self, direction: Direction, messages: &mut Messages) -> Result<(), Failure> {
        assert!(!self.panics, "as it was told");
        let mut books = self.books.lock().unwrap();
        for index in 0..messages.len() {
            let request = *messages.request(index);
            let drops = self.drops == Some(direction);
            match direction {
                Direction::Requests => {
                    assert!(drops || books.open.insert(request), "{request:?} is shown twice");
                    books.requests += 1;
                }
                Direction::Replies => {
                    assert!(books.open.remove(&request), "{request:?} is not open");
                    books.replies += 1;
                }
            }
            if drops {
                messages.drop(index, DropReason::FunctionDrop);
            }
        }
        Ok(())
    }

    fn wants_notices(&self) -> bool {
        true
    }

    fn notice(&mut self, notice: &Notice) {
        let mut books = self.books.lock().unwrap();
        match notice {
            Notice::Ended { request, end } => {
                assert!(books.open.remove(request), "{request:?} has ended before");
                match end {
                    End::Unsent => books.unsent += 1,
                    End::Unknown => books.unknown += 1,
                    End::Done => panic!("backends do not end requests like this"),
                }
            }
            Notice::Tick { .. } => books.ticks += 1,
            _ => {}
        }
    }
}

impl Watches {
    fn attach(&self, scene: &mut Scene, on_failure: OnFailure) {
        let functions = vec![(Box::new(self.clone()) as Box<dyn Function>, on_failure)];
        scene.world.set_functions_of(0, (0, Some(0)), functions);
        scene.run(1);
    }
}

fn asking(transport: Transport, sockets: Sockets, behaviour: BackendBehaviour) -> Scene {
    let mut script = script(Framing::LengthU16);
    let backend = script.backend(transport);
    (backend.sockets, backend.in_flight) = (sockets, 2);
    script.setup.honest_backends = vec![behaviour.is_honest()];
    script.backend_behaviour = behaviour;
    script.play()
}

fn question(sequence: u32) -> Body {
    Body { ask: Ask::Backend, ..request(sequence) }
}

#[test]
fn each_request_is_shown_once_and_ends_once_whatever_the_backend_does() {
    let sound = BackendBehaviour { delay_ns: (MS, 3 * MS), ..BackendBehaviour::SOUND };
    let late = BackendBehaviour { late: 400, late_ns: 150 * MS, ..sound };
    let (mut unknown, mut unsent) = (0, 0);
    for behaviour in [
        sound,
        late,
        BackendBehaviour { hang: 200, ..late },
        BackendBehaviour { close: 300, cut: 200, ..sound },
        BackendBehaviour { garbage: 200, unasked: 200, ..sound },
        BackendBehaviour { too_long: 300, change_reachability: 20, ..late },
    ] {
        for transport in [Transport::Tcp, Transport::Udp] {
            for sockets in [Sockets::Persistent, Sockets::PerRequest] {
                let mut scene = asking(transport, sockets, behaviour);
                let watch = Watches::default();
                watch.attach(&mut scene, OnFailure::Closed);
                for sequence in 0..24 {
                    scene.ask(question(sequence));
                    scene.wait_ms(5);
                }
                for _ in 0..200 {
                    scene.wait_ms(20);
                    if watch.books.lock().unwrap().open.is_empty() {
                        break;
                    }
                }
                let counted = scene.world.metrics.service(0);
                let books = watch.books.lock().unwrap();
                let case = format!("{behaviour:?} {transport:?} {sockets:?}");
                assert!(books.open.is_empty() && books.requests > 0 && books.ticks > 0, "{case}");
                let ended = books.replies + books.unsent + books.unknown;
                assert_eq!(books.requests, ended, "{case}");
                assert_eq!(counted.backend_sent, books.replies + books.unknown, "{case}");
                assert_eq!(counted.backend_answered, ended, "each has one answer: {case}");
                (unknown, unsent) = (unknown + books.unknown, unsent + books.unsent);
                drop(books);
                scene.world.check().unwrap();
            }
        }
    }
    assert!(unknown > 0 && unsent > 0, "{unknown} {unsent}");
}

#[test]
fn what_is_dropped_is_answered_with_a_status() {
    for (direction, sent) in [(Direction::Requests, 0), (Direction::Replies, 3)] {
        let mut scene = asking(Transport::Tcp, Sockets::Persistent, BackendBehaviour::SOUND);
        let watch = Watches { drops: Some(direction), ..Watches::default() };
        watch.attach(&mut scene, OnFailure::Closed);
        for sequence in 0..3 {
            scene.ask(question(sequence));
            scene.wait_ms(5);
        }
        let counted = scene.world.metrics.service(0);
        assert_eq!((counted.backend_sent, counted.backend_answered), (sent, 3));
        assert_eq!(scene.dropped(DropReason::BackendFunction), 3);
        assert_eq!(scene.replied(), 3, "the kernel replies without an answer");
        assert!(watch.books.lock().unwrap().open.is_empty());
        // Without functions everything passes again.
        scene.world.set_functions_of(0, (0, Some(0)), Vec::new());
        scene.run(1);
        scene.ask(question(3));
        scene.wait_ms(5);
        assert_eq!(scene.world.metrics.service(0).backend_sent, sent + 1);
        assert_eq!(scene.dropped(DropReason::BackendFunction), 3);
        scene.world.check().unwrap();
    }
}

#[test]
fn messages_with_which_a_function_fails_pass_or_are_dropped() {
    for (on_failure, lost) in [(OnFailure::Open, 0), (OnFailure::Closed, 1)] {
        let mut scene = asking(Transport::Tcp, Sockets::Persistent, BackendBehaviour::SOUND);
        let watch = Watches { panics: true, ..Watches::default() };
        watch.attach(&mut scene, on_failure);
        scene.ask(question(0));
        scene.wait_ms(5);
        assert_eq!(scene.dropped(DropReason::BackendFunction), lost);
        assert_eq!(scene.world.metrics.service(0).backend_sent, 1 - lost);
        assert_eq!(scene.replied(), 1);
    }
}
