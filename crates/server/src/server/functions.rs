//! Functions on the path of services: which are attached, and how that changes while the server runs.
//!
//! A function has an id that no other function of this process has had, and an instance on each worker. An attach, a detach and
//! a reload give every worker the new order of a service's chain in one message: between two turns, so each message meets the
//! chain before or after the change, and none is lost. Functions that stay keep their instances. Modules are compiled here, on the thread
//! that owns the server, and what a chain gives up is freed here.
//!
//! A reload gives each chain the functions of the file: those that were attached otherwise are detached.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc;

use engine::metrics::FunctionMetrics;
use engine::topology::{Service, Topology};
use engine::{ChainReply, ChainRequest, ControlMessage};
use onpath::library::{FUNCTIONS_MAX, NAME_BYTES_MAX, is_name, read_module};
use onpath::{
    Arranged, Code, Command, CommandError, LibraryError, Link, Merge, Policy, Register, Snapshot,
    Spec,
};
use sys::private_file::open_regular;

use super::plan::{Plan, ServiceAction};
use super::{ChangeError, Server, ServerError};

/// Why a function was not attached, detached or commanded. One sentence each.
#[derive(Debug, thiserror::Error)]
pub enum FunctionError {
    /// There is no such service.
    #[error("there is no service {name:?}: this server has {services}")]
    NoService {
        /// The name.
        name: String,
        /// Those that there are.
        services: String,
    },
    /// There is no such function.
    #[error("service {service:?} has no function {name:?}: it has {functions}")]
    NoFunction {
        /// The service.
        service: String,
        /// The name.
        name: String,
        /// Those that there are.
        functions: String,
    },
    /// A name that no function can have.
    #[error(
        "{0:?} cannot be a function's name: use 1 to {NAME_BYTES_MAX} letters, digits, `_` and `-`"
    )]
    Name(String),
    /// The chain is full.
    #[error(
        "service {0:?} has {FUNCTIONS_MAX} functions, and a chain has no more: detach one first"
    )]
    TooMany(String),
    /// The function cannot be used.
    #[error(transparent)]
    Library(#[from] LibraryError),
    /// The file of a module, or of a parameter, cannot be read.
    #[error("the file {file} cannot be read: {why}")]
    File {
        /// The file.
        file: PathBuf,
        /// Why.
        why: String,
    },
    /// There is no such setting.
    #[error("the function {function:?} has no setting {register:?}: it has {settings}")]
    NoSetting {
        /// The function's name.
        function: String,
        /// The setting.
        register: String,
        /// Those that there are.
        settings: String,
    },
    /// A worker did not do the command.
    #[error("function {0:?}: {1}")]
    Command(String, CommandError),
    /// A worker does not come back from a kernel.
    #[error(transparent)]
    Stuck(#[from] Box<ChangeError>),
}

/// A function that is attached.
pub(super) struct AttachedFunction {
    id: u64,
    spec: Spec,
    /// The content of its file, or nothing.
    content: Vec<u8>,
    registers: Vec<Register>,
    metrics: Arc<FunctionMetrics>,
}

/// What [`Server::functions`] shows of a function.
pub struct FunctionView {
    /// Its service.
    pub service: String,
    /// What was asked for.
    pub spec: Spec,
    /// What it has done, on all workers.
    pub counted: Snapshot,
    /// Why its last call failed that did; empty if none did.
    pub last_failure: String,
    /// Names of its registers.
    pub registers: Vec<String>,
}

/// A function with an instance for each worker, which are not attached yet.
struct NewFunction {
    attached: AttachedFunction,
    links: Vec<Link>,
}

enum Place {
    Kept(u64),
    New(NewFunction),
}

/// The next chain of a service.
pub(super) struct NextChain {
    service: String,
    places: Vec<Place>,
}

fn list<'a>(names: impl Iterator<Item = &'a str>) -> String {
    let names: Vec<&str> = names.collect();
    if names.is_empty() { "none".to_owned() } else { names.join(", ") }
}

/// The content of a function's file, or nothing.
fn read_file(spec: &Spec) -> Result<Vec<u8>, FunctionError> {
    let Some(file) = spec.file() else { return Ok(Vec::new()) };
    let file = PathBuf::from(&*file);
    let read = || -> Result<Vec<u8>, String> {
        let (opened, _) = open_regular(&file).map_err(|error| error.to_string())?;
        read_module(opened).map_err(|error| error.to_string())
    };
    read().map_err(|why| FunctionError::File { file: file.clone(), why })
}

impl Server {
    /// What is attached to all services.
    pub fn functions(&self) -> Vec<FunctionView> {
        let mut functions = Vec::new();
        for (service, slot) in self.topology.services.iter().zip(&self.service_slots) {
            functions.extend(slot.functions.iter().map(|function| FunctionView {
                service: service.name.clone(),
                spec: function.spec.clone(),
                counted: function.metrics.snapshot(),
                last_failure: function.metrics.last_failure(),
                registers: function.registers.iter().map(|r| r.name.to_string()).collect(),
            }));
        }
        functions
    }

    /// Attaches a function to a service: in the place of the one with its name, which returns true, or else in the `place`-th place of the
    /// chain, at its end by default.
    pub fn attach_function(
        &mut self,
        service: &str,
        spec: &Spec,
        place: Option<usize>,
    ) -> Result<bool, FunctionError> {
        let index = self.service_index(service)?;
        if !is_name(&spec.name) {
            return Err(FunctionError::Name(spec.name.clone()));
        }
        let attached = &self.service_slots[index].functions;
        let former = attached.iter().position(|function| function.spec.name == spec.name);
        let mut order: Vec<u64> = attached.iter().map(|function| function.id).collect();
        let at = match former {
            Some(at) => {
                order.remove(at);
                place.unwrap_or(at)
            }
            None => place.unwrap_or(order.len()),
        };
        if order.len() == FUNCTIONS_MAX {
            return Err(FunctionError::TooMany(service.to_owned()));
        }
        let topology = self.topology.clone();
        let new = self.make_function(&topology.services[index], spec, read_file(spec)?)?;
        let mut places: Vec<Place> = order.into_iter().map(Place::Kept).collect();
        places.insert(at.min(places.len()), Place::New(new));
        self.arrange(NextChain { service: service.to_owned(), places })?;
        Ok(former.is_some())
    }

    /// Detaches a function.
    pub fn detach_function(&mut self, service: &str, name: &str) -> Result<(), FunctionError> {
        let (index, of) = self.function_index(service, name)?;
        let attached = self.service_slots[index].functions.iter().enumerate();
        let kept = attached.filter(|(at, _)| *at != of);
        let places = kept.map(|(_, function)| Place::Kept(function.id)).collect();
        self.arrange(NextChain { service: service.to_owned(), places })
    }

    /// Reads all registers of a function, merged over all workers.
    pub fn read_function(
        &self,
        service: &str,
        name: &str,
    ) -> Result<Vec<(String, u64)>, FunctionError> {
        self.command_function(service, name, Command::Read)
    }

    /// Gives all registers of a function that are no settings their first values. Returns the values afterwards.
    pub fn reset_function(
        &self,
        service: &str,
        name: &str,
    ) -> Result<Vec<(String, u64)>, FunctionError> {
        self.command_function(service, name, Command::Reset)
    }

    /// Writes a setting of a function on all workers. Returns the values of all registers afterwards.
    pub fn write_function(
        &self,
        service: &str,
        name: &str,
        setting: &str,
        value: u64,
    ) -> Result<Vec<(String, u64)>, FunctionError> {
        let (index, of) = self.function_index(service, name)?;
        let registers = &self.service_slots[index].functions[of].registers;
        let is_setting = |register: &&Register| register.merge == Merge::Setting;
        let found = registers.iter().position(|r| is_setting(&r) && &*r.name == setting);
        let register = found.ok_or_else(|| FunctionError::NoSetting {
            function: name.to_owned(),
            register: setting.to_owned(),
            settings: list(registers.iter().filter(is_setting).map(|r| &*r.name)),
        })?;
        self.command_function(service, name, Command::Write { register, value })
    }

    fn command_function(
        &self,
        service: &str,
        name: &str,
        command: Command,
    ) -> Result<Vec<(String, u64)>, FunctionError> {
        let (index, of) = self.function_index(service, name)?;
        let slot = &self.service_slots[index];
        let function = &slot.functions[of];
        let (reply, replies) = mpsc::channel();
        self.fabric.post_to_all(|_| {
            let request = ChainRequest::Command(function.id, command);
            ControlMessage::Chain(slot.slot, request, reply.clone())
        });
        drop(reply);
        let mut merged: Option<Vec<u64>> = None;
        for _ in 0..self.fabric.workers() {
            let values = match self.next_reply(&replies)? {
                ChainReply::Command(done) => {
                    done.map_err(|error| FunctionError::Command(name.to_owned(), error))?
                }
                ChainReply::Arranged(_) => Vec::new(),
            };
            merged = Some(match merged {
                None => values,
                Some(before) => {
                    let merges = function.registers.iter().map(|register| register.merge);
                    let pairs = before.into_iter().zip(values).zip(merges);
                    pairs.map(|((a, b), merge)| merge.merge(a, b)).collect()
                }
            });
        }
        let names = function.registers.iter().map(|register| register.name.to_string());
        Ok(names.zip(merged.unwrap_or_default()).collect())
    }

    fn service_index(&self, name: &str) -> Result<usize, FunctionError> {
        let services = &self.topology.services;
        services.iter().position(|service| service.name == name).ok_or_else(|| {
            FunctionError::NoService {
                name: name.to_owned(),
                services: list(services.iter().map(|service| &*service.name)),
            }
        })
    }

    fn function_index(&self, service: &str, name: &str) -> Result<(usize, usize), FunctionError> {
        let index = self.service_index(service)?;
        let functions = &self.service_slots[index].functions;
        let found = functions.iter().position(|function| function.spec.name == name);
        let of = found.ok_or_else(|| FunctionError::NoFunction {
            service: service.to_owned(),
            name: name.to_owned(),
            functions: list(functions.iter().map(|function| &*function.spec.name)),
        })?;
        Ok((index, of))
    }

    fn next_reply(
        &self,
        replies: &mpsc::Receiver<ChainReply>,
    ) -> Result<ChainReply, FunctionError> {
        let step = self.timeouts.step;
        replies.recv_timeout(step).map_err(|_| Box::new(ChangeError::Stuck(step)).into())
    }

    /// A function with an instance for each worker.
    fn make_function(
        &mut self,
        service: &Service,
        spec: &Spec,
        content: Vec<u8>,
    ) -> Result<NewFunction, FunctionError> {
        let code = Code::open(spec, &content)?;
        self.functions_made += 1;
        let id = self.functions_made;
        let workers = self.fabric.workers();
        let metrics =
            Arc::new(FunctionMetrics::new(service.name.clone(), spec.name.clone(), workers));
        let policy = Policy { on_failure: spec.on_failure, deadline_ns: spec.deadline_us * 1000 };
        let mut registers = Vec::new();
        let mut links = Vec::with_capacity(workers);
        for worker in 0..workers {
            let function = code.instance(spec, service.message_sizes())?;
            registers = function.registers().to_vec();
            links.push(Link::new(id, function, policy, metrics.of_worker(worker)));
        }
        let attached = AttachedFunction { id, spec: spec.clone(), content, registers, metrics };
        Ok(NewFunction { attached, links })
    }

    /// Gives a chain its functions on all workers.
    fn arrange(&mut self, next: NextChain) -> Result<(), FunctionError> {
        let index = self.service_index(&next.service)?;
        let mut orders: Vec<Vec<Arranged>> =
            (0..self.fabric.workers()).map(|_| Vec::with_capacity(next.places.len())).collect();
        let mut former = std::mem::take(&mut self.service_slots[index].functions);
        let mut functions = Vec::with_capacity(next.places.len());
        for place in next.places {
            match place {
                Place::Kept(id) => {
                    let kept = former.iter().position(|function| function.id == id);
                    functions.extend(kept.map(|kept| former.remove(kept)));
                    orders.iter_mut().for_each(|order| order.push(Arranged::Kept(id)));
                }
                Place::New(NewFunction { attached, links }) => {
                    for (order, link) in orders.iter_mut().zip(links) {
                        order.push(Arranged::New(link));
                    }
                    functions.push(attached);
                }
            }
        }
        self.service_slots[index].functions = functions;
        self.publish_metrics();
        let (reply, replies) = mpsc::channel();
        let slot = self.service_slots[index].slot;
        for (worker, order) in (0..).zip(orders) {
            let request = ChainRequest::Arrange(order);
            self.fabric.post(worker, ControlMessage::Chain(slot, request, reply.clone()));
        }
        drop(reply);
        for _ in 0..self.fabric.workers() {
            // What a worker no longer has is dropped here.
            self.next_reply(&replies)?;
        }
        Ok(())
    }

    /// The functions of a service that is about to be installed; the links by worker.
    pub(super) fn first_functions(
        &mut self,
        service: &Service,
    ) -> Result<(Vec<AttachedFunction>, Vec<Vec<Link>>), ServerError> {
        let mut attached = Vec::new();
        let mut by_worker: Vec<Vec<Link>> =
            (0..self.fabric.workers()).map(|_| Vec::new()).collect();
        for spec in &service.functions {
            let made =
                read_file(spec).and_then(|content| self.make_function(service, spec, content));
            let new = made.map_err(|source| Self::function_failed(service, source))?;
            attached.push(new.attached);
            by_worker.iter_mut().zip(new.links).for_each(|(links, link)| links.push(link));
        }
        Ok((attached, by_worker))
    }

    fn function_failed(service: &Service, source: FunctionError) -> ServerError {
        ServerError::Function { service: service.name.clone(), source: Box::new(source) }
    }

    /// The chains that differ from those of `wanted`, among services that stay as they are.
    pub(super) fn next_chains(
        &mut self,
        wanted: &Topology,
        plan: &Plan,
    ) -> Result<Vec<NextChain>, ServerError> {
        let mut chains = Vec::new();
        for (service, (name, action)) in wanted.services.iter().zip(&plan.services) {
            if *action != ServiceAction::Unchanged {
                continue;
            }
            let failed = |source| Self::function_failed(service, source);
            let index = self.service_index(name).map_err(failed)?;
            let mut places = Vec::new();
            for spec in &service.functions {
                let content = read_file(spec).map_err(failed)?;
                let attached = &self.service_slots[index].functions;
                let same = attached.iter().find(|f| f.spec == *spec && f.content == content);
                places.push(match same {
                    Some(kept) => Place::Kept(kept.id),
                    None => Place::New(self.make_function(service, spec, content).map_err(failed)?),
                });
            }
            let attached = &self.service_slots[index].functions;
            let stays = |(place, function): (&Place, &AttachedFunction)| matches!(place, Place::Kept(id) if *id == function.id);
            if places.len() != attached.len() || !places.iter().zip(attached).all(stays) {
                chains.push(NextChain { service: name.clone(), places });
            }
        }
        Ok(chains)
    }

    /// After the switch: the chains that change get their functions. A worker that a kernel holds up gets them when it returns.
    pub(super) fn arrange_all(&mut self, chains: Vec<NextChain>) {
        for chain in chains {
            let service = chain.service.clone();
            if let Err(error) = self.arrange(chain) {
                tracing::error!(service, "{error}; its functions change when the kernel returns");
            }
        }
    }

    /// The functions of all services, as metrics show them.
    pub(super) fn function_metrics(&self) -> Arc<[Arc<FunctionMetrics>]> {
        let slots = self.service_slots.iter();
        slots.flat_map(|slot| slot.functions.iter().map(|f| f.metrics.clone())).collect()
    }
}
