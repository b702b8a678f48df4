//! Accelerators that restart under open ports, as the control side of a server handles it.
//!
//! [`World::lose_runtime`] reports to the workers that a runtime is gone, [`World::replace_rings`] gives them the rings of its
//! next generation in a new region, [`World::resume_blocks`] reports that its blocks run. Each worker gets the event in
//! its own next turn. Before a planned end of a generation [`World::hold`] pauses the service. The blocks of the old generation are
//! not notified: they continue in the old region as stale blocks, read and answer what is there, however late; none of it may
//! reach a client.

use std::sync::{Arc, Mutex};

use engine::{Attachment, ControlMessage, DrainBarrier, RuntimeEvent};
use wire::DropReason;
use wire::nic::Nic;

use super::World;
use crate::accelerator::ModelBlocks;
use crate::behaviour::Behaviour;
use crate::fault::Fault;
use crate::nic::SimSocket;
use crate::shared::lock;
use crate::world::region::{Part, prepare_region};

/// Interval of checks whether everything has been answered.
const LOOK_NS: u64 = 100_000;

/// The restart of an accelerator.
#[derive(Clone, Debug)]
pub struct Restart {
    /// The service.
    pub service: usize,
    /// The accelerator, by its index in the service.
    pub accelerator: usize,
    /// The turn under load after which its runtime ends.
    pub turn: u32,
    /// Why it ends: it is lost, counts as stalled, or its neighbours on the GPU change.
    pub reason: DropReason,
    /// A planned end: the service is paused first, for at most this long in nanoseconds until everything has been answered.
    pub hold_ns: Option<u64>,
    /// Not everything had been answered in that time.
    pub overdue: bool,
    /// Time until the next region exists, and from then until its blocks run.
    pub gaps_ns: (u64, u64),
    /// Behaviour of the next generation's blocks.
    pub next: Behaviour,
    /// The next step and its time; `None`: not started.
    pub due: Option<(Step, u64)>,
}

/// A step of a [`Restart`].
#[derive(Clone, Debug)]
pub enum Step {
    /// It ends when every accepted request has been answered, or at this time.
    Lose(DrainBarrier, u64),
    /// The next generation's region is created.
    Renew,
    /// Its blocks run.
    Revive,
    /// Complete.
    Done,
}

impl Restart {
    /// Time of the next step.
    pub fn due_ns(&self) -> u64 {
        self.due.as_ref().map_or(u64::MAX, |(_, at_ns)| *at_ns)
    }

    /// The runtime ends.
    pub fn begin<N: Nic<Socket = SimSocket, Port = ()>>(&mut self, world: &mut World<N>) {
        lock(&world.net).fault_counts.one(Fault::Restart);
        let Some(hold_ns) = self.hold_ns else {
            self.due = Some(self.lose_runtime(world));
            return;
        };
        lock(&world.net).fault_counts.one(Fault::Hold);
        let barrier = world.hold(self.service, self.accelerator, hold_ns);
        let now_ns = world.now_ns();
        self.due = Some((Step::Lose(barrier, now_ns + hold_ns), now_ns + LOOK_NS));
    }

    pub(crate) fn lose_runtime<N: Nic<Socket = SimSocket, Port = ()>>(
        &self,
        world: &mut World<N>,
    ) -> (Step, u64) {
        world.lose_runtime(self.service, self.accelerator, self.reason);
        (Step::Renew, world.now_ns() + self.gaps_ns.0)
    }

    /// Performs the next step if it is due.
    pub fn step<N: Nic<Socket = SimSocket, Port = ()>>(&mut self, world: &mut World<N>) {
        let now_ns = world.now_ns();
        let Some((step, _)) = self.due.take_if(|(_, at_ns)| *at_ns <= now_ns) else { return };
        self.due = Some(match step {
            Step::Lose(barrier, until_ns) => {
                let quiet = barrier.is_complete(world.workers.len());
                if quiet || now_ns >= until_ns {
                    self.overdue = !quiet;
                    self.lose_runtime(world)
                } else {
                    (Step::Lose(barrier, until_ns), now_ns + LOOK_NS)
                }
            }
            Step::Renew => {
                world.replace_rings(self.service, self.accelerator, self.next);
                (Step::Revive, now_ns + self.gaps_ns.1)
            }
            Step::Revive => {
                world.resume_blocks(self.service, self.accelerator);
                (Step::Done, u64::MAX)
            }
            Step::Done => (Step::Done, u64::MAX),
        });
    }

    /// Whether it is in progress and of this accelerator.
    pub(crate) fn is_of(&self, service: usize, accelerator: usize) -> bool {
        self.is_in_progress() && (self.service, self.accelerator) == (service, accelerator)
    }

    /// Whether it has started and is not complete.
    pub fn is_in_progress(&self) -> bool {
        self.due.as_ref().is_some_and(|(step, _)| !matches!(step, Step::Done))
    }
}

impl<N: Nic<Socket = SimSocket, Port = ()>> World<N> {
    /// Tells every worker that an accelerator generation is about to end as planned; the workers report when all accepted
    /// requests have been answered.
    pub fn hold(&mut self, service: usize, accelerator: usize, drain_ns: u64) -> DrainBarrier {
        let service = self.slot_of(service);
        let told = DrainBarrier::default();
        let accelerator = accelerator as u16;
        self.post_event(|| {
            let barrier = told.clone();
            RuntimeEvent::Paused { service, accelerator, drain_ns, barrier }
        });
        told
    }

    /// Tells every worker that the generation continues after all.
    pub fn cancel_hold(&mut self, service: usize, accelerator: usize) {
        let service = self.slot_of(service);
        self.post_event(|| RuntimeEvent::Resumed { service, accelerator: accelerator as u16 });
    }

    /// Tells every worker that an accelerator's blocks do not run any more.
    pub fn lose_runtime(&mut self, service: usize, accelerator: usize, reason: DropReason) {
        let service = self.slot_of(service);
        self.post_event(|| RuntimeEvent::Ended {
            service,
            accelerator: accelerator as u16,
            reason,
        });
    }

    /// Creates the region of an accelerator's next generation and gives every worker its share. Its blocks wait
    /// for [`Self::resume_blocks`].
    pub fn replace_rings(&mut self, service: usize, accelerator: usize, behaviour: Behaviour) {
        self.generation += 1;
        let generation = self.generation;
        let Self { setup, rng, .. } = self;
        let divided = prepare_region(setup, service, accelerator, generation, rng);
        let behaviour = setup.placed(behaviour, service, accelerator);
        self.words.push(divided.words);
        self.replace_link(service, accelerator, divided.link);
        for (worker, part) in divided.parts.into_iter().enumerate() {
            let Part { ends, shares, pool, heads } = part;
            let place = self.place_of(worker, service, accelerator);
            let region =
                (divided.memory.clone(), divided.entries.clone(), divided.pool_entries.clone());
            let model = lock(&self.models[place]).next_generation(behaviour, region, shares);
            let model = Arc::new(Mutex::new(model));
            let ghost = std::mem::replace(&mut self.models[place], model.clone());
            lock(&ghost).retire();
            self.retired.push(ghost);
            let blocks = Box::new(ModelBlocks { model, heads });
            let attachment = Attachment { blocks, ends, pool };
            let (service, accelerator) = (self.slot_of(service), accelerator as u16);
            let news = RuntimeEvent::RingsReplaced { service, accelerator, attachment };
            self.fabric.post(worker as u16, ControlMessage::Runtime(news));
        }
    }

    /// Tells every worker that an accelerator's blocks run.
    pub fn resume_blocks(&mut self, service: usize, accelerator: usize) {
        let service = self.slot_of(service);
        self.post_event(|| RuntimeEvent::Started { service, accelerator: accelerator as u16 });
    }

    /// The workers' slot of the service. No replacement is in progress.
    fn slot_of(&self, service: usize) -> u16 {
        *self.slots[service].last().expect("every service of a plan runs")
    }

    fn post_event(&self, news: impl Fn() -> RuntimeEvent) {
        self.fabric.post_to_all(|_| ControlMessage::Runtime(news()));
    }

    /// Index of the model of an accelerator's blocks on a worker.
    fn place_of(&self, worker: usize, service: usize, accelerator: usize) -> usize {
        let slot = self.slot_of(service);
        let of_seat = (0..self.models.len())
            .filter(|m| self.model_owners[*m] == (worker, service) && self.model_slots[*m] == slot);
        let mut of_accelerator =
            of_seat.filter(|m| lock(&self.models[*m]).accelerator() == accelerator);
        of_accelerator.next().expect("every worker has a share of every accelerator")
    }
}
