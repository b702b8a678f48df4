//! Accelerators that go and come back under open ports, as the control side of a server sees it.
//!
//! [`World::lose`] tells the workers that a runtime is gone, [`World::renew`] gives them the rings of its
//! next life in a region of its own, [`World::revive`] that its blocks run. Each worker hears of it in
//! its own next turn. Before a life that ends as planned [`World::hold`] has them hold the service. Nobody tells the blocks of the old life: they go on in the old region as *ghosts*,
//! read what lies there and answer it, however late; nothing of it may reach anybody.

use std::sync::{Arc, Mutex};

use engine::{Attachment, ControlMessage, DrainBarrier, RuntimeEvent};
use wire::DropReason;
use wire::nic::Nic;

use crate::accelerator::{Behaviour, ModelBlocks};
use crate::fault::Fault;
use crate::net::lock;
use crate::nic::SimSocket;
use crate::world::{World, divide};

/// Between two looks whether all has been answered.
const LOOK_NS: u64 = 100_000;

/// An accelerator that goes and comes back.
#[derive(Clone, Debug)]
pub struct Rebirth {
    /// The service.
    pub service: usize,
    /// The accelerator, by its place in the service.
    pub accelerator: usize,
    /// The turn under load after which it goes.
    pub turn: u32,
    /// Why it goes: it is lost, taken for stalled, or somebody changes who runs beside it.
    pub reason: DropReason,
    /// It goes as planned: the service is held before, for so long in nanoseconds until all has been answered.
    pub hold_ns: Option<u64>,
    /// Not all had been answered when that time was over.
    pub overdue: bool,
    /// Time until the next region is there, and from then until its blocks run.
    pub gaps_ns: (u64, u64),
    /// How the blocks of the next life behave.
    pub next: Behaviour,
    /// What is to be done next, and when; `None`: nothing yet.
    pub due: Option<(Step, u64)>,
}

/// A step of a [`Rebirth`].
#[derive(Clone, Debug)]
pub enum Step {
    /// It goes when all that was accepted has been answered, or at this time.
    Lose(DrainBarrier, u64),
    /// The next life's region is made.
    Renew,
    /// Its blocks run.
    Revive,
    /// All is done.
    Done,
}

impl Rebirth {
    /// When there is something to do.
    pub fn due_ns(&self) -> u64 {
        self.due.as_ref().map_or(u64::MAX, |(_, at_ns)| *at_ns)
    }

    /// The runtime ends.
    pub fn begin<N: Nic<Socket = SimSocket, Port = ()>>(&mut self, world: &mut World<N>) {
        lock(&world.net).struck.one(Fault::Restart);
        let Some(hold_ns) = self.hold_ns else {
            self.due = Some(self.lose(world));
            return;
        };
        lock(&world.net).struck.one(Fault::Hold);
        let barrier = world.hold(self.service, self.accelerator, hold_ns);
        let now_ns = world.now_ns();
        self.due = Some((Step::Lose(barrier, now_ns + hold_ns), now_ns + LOOK_NS));
    }

    fn lose<N: Nic<Socket = SimSocket, Port = ()>>(&self, world: &mut World<N>) -> (Step, u64) {
        world.lose(self.service, self.accelerator, self.reason);
        (Step::Renew, world.now_ns() + self.gaps_ns.0)
    }

    /// Goes on, if it is time.
    pub fn step<N: Nic<Socket = SimSocket, Port = ()>>(&mut self, world: &mut World<N>) {
        let now_ns = world.now_ns();
        let Some((step, _)) = self.due.take_if(|(_, at_ns)| *at_ns <= now_ns) else { return };
        self.due = Some(match step {
            Step::Lose(barrier, until_ns) => {
                let quiet = barrier.is_complete(world.workers.len());
                if quiet || now_ns >= until_ns {
                    self.overdue = !quiet;
                    self.lose(world)
                } else {
                    (Step::Lose(barrier, until_ns), now_ns + LOOK_NS)
                }
            }
            Step::Renew => {
                world.renew(self.service, self.accelerator, self.next);
                (Step::Revive, now_ns + self.gaps_ns.1)
            }
            Step::Revive => {
                world.revive(self.service, self.accelerator);
                (Step::Done, u64::MAX)
            }
            Step::Done => (Step::Done, u64::MAX),
        });
    }

    /// Whether it has begun and is not over.
    pub fn is_under_way(&self) -> bool {
        self.due.as_ref().is_some_and(|(step, _)| !matches!(step, Step::Done))
    }
}

impl<N: Nic<Socket = SimSocket, Port = ()>> World<N> {
    /// Every worker hears that an accelerator's life is about to end as planned, and tells when all that was accepted
    /// has been answered.
    pub fn hold(&mut self, service: usize, accelerator: usize, drain_ns: u64) -> DrainBarrier {
        let service = self.slot_of(service);
        let told = DrainBarrier::default();
        let accelerator = accelerator as u16;
        self.tell_lives(|| {
            let barrier = told.clone();
            RuntimeEvent::Paused { service, accelerator, drain_ns, barrier }
        });
        told
    }

    /// Every worker hears that it goes on after all.
    pub fn free(&mut self, service: usize, accelerator: usize) {
        let service = self.slot_of(service);
        self.tell_lives(|| RuntimeEvent::Resumed { service, accelerator: accelerator as u16 });
    }

    /// Every worker hears that nobody runs an accelerator's blocks any more.
    pub fn lose(&mut self, service: usize, accelerator: usize, reason: DropReason) {
        let service = self.slot_of(service);
        self.tell_lives(|| RuntimeEvent::Ended {
            service,
            accelerator: accelerator as u16,
            reason,
        });
    }

    /// Makes the region of an accelerator's next life and gives every worker its share. Its blocks wait
    /// for [`Self::revive`].
    pub fn renew(&mut self, service: usize, accelerator: usize, behaviour: Behaviour) {
        self.generation += 1;
        let divided = divide(&self.setup, service, accelerator, self.generation);
        self.words.push(divided.words);
        let parts = divided.ends.into_iter().zip(divided.shares).enumerate();
        for (worker, (ends, shares)) in parts {
            let place = self.place_of(worker, service, accelerator);
            let region = (divided.memory.clone(), divided.entries.clone());
            let model = lock(&self.models[place]).next_life(behaviour, region, shares);
            let model = Arc::new(Mutex::new(model));
            let ghost = std::mem::replace(&mut self.models[place], model.clone());
            lock(&ghost).become_ghost();
            self.ghosts.push(ghost);
            let attachment = Attachment { blocks: Box::new(ModelBlocks(model)), ends };
            let (service, accelerator) = (self.slot_of(service), accelerator as u16);
            let news = RuntimeEvent::RingsReplaced { service, accelerator, attachment };
            self.fabric.post(worker as u16, ControlMessage::Runtime(news));
        }
    }

    /// Every worker hears that an accelerator's blocks run.
    pub fn revive(&mut self, service: usize, accelerator: usize) {
        let service = self.slot_of(service);
        self.tell_lives(|| RuntimeEvent::Started { service, accelerator: accelerator as u16 });
    }

    /// What the workers call the service. None is being replaced meanwhile.
    fn slot_of(&self, service: usize) -> u16 {
        *self.slots[service].last().expect("every service of a plan runs")
    }

    fn tell_lives(&self, news: impl Fn() -> RuntimeEvent) {
        self.fabric.post_to_all(|_| ControlMessage::Runtime(news()));
    }

    /// Where the model of an accelerator's blocks on a worker is in the list.
    fn place_of(&self, worker: usize, service: usize, accelerator: usize) -> usize {
        let slot = self.slot_of(service);
        let of_seat = (0..self.models.len())
            .filter(|m| self.seats[*m] == (worker, service) && self.model_slots[*m] == slot);
        let mut of_accelerator =
            of_seat.filter(|m| lock(&self.models[*m]).accelerator() == accelerator);
        of_accelerator.next().expect("every worker has a share of every accelerator")
    }
}
