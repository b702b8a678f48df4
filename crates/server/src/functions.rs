//! Functions on the path of services: which are attached, and how that changes while the server runs.
//!
//! A function has an id that no other function has had, and an instance on each worker while it is attached. An attach, a detach, a replacement and
//! a reload give every worker the new order of a service's chain in one message: between two turns, so each message meets the
//! chain before or after the change, and none is lost. Functions that stay keep their instances; other parameters are written into them.
//! Modules are compiled before a request is done (`functions/modules.rs`). What a chain gives up is freed here, on the thread that owns the server.
//!
//! A reload gives each chain the functions of the file, and keeps those that were attached at run time (`functions/chains.rs`).
//!
//! *Ownership* is checked for every call, by the user of the calling process. The engine's user and root are the operator: they may do
//! everything. Another user may attach functions to services that name it in `function_users`, or whose tenant does in `users`, and sees and changes its own functions only.

mod chains;
mod compiled;
mod error;
mod modules;
mod objects;
mod path;
mod quota;
mod request;
mod ring;
mod sample;
mod trace;

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::mpsc;

use builtins::{Code, file_of, memory_on};
use engine::metrics::FunctionMetrics;
use engine::topology::Service;
use engine::{ChainPlace, ChainReply, ChainRequest, ControlMessage};
use onpath::spec::{FUNCTIONS_MAX, is_name};
use onpath::{Command, Failure, Merge, Reading, Register, Snapshot, Spec};

use crate::base::caller::Caller;
use crate::base::engine::Engine;
use chains::{Next, setting_of};
pub(crate) use chains::{NextChain, NextFunctions};
pub(crate) use compiled::{Beneficiary, CompiledModule, Uncompiled};
pub use error::FunctionError;
pub use objects::Functions;
use objects::Object;
pub use objects::{FunctionCounters, Origin, REFUSED, Refused};
use path::ChainOf;
use quota::user_of;
pub use request::{
    Attachment, FunctionView, Place, RegisterAction, Registers, Replacement, Target,
};
use ring::{ApplicationRing, BYTES_MAX, BYTES_PER_USER_MAX};
use sample::Sampling;
pub use trace::TracedMessage;

/// Functions that are created and not destroyed, at most.
const CREATED_MAX: usize = 256;
/// Of one user, unless it is the engine's or root.
const CREATED_PER_USER_MAX: usize = 16;

/// A function that is attached.
pub(crate) struct AttachedFunction {
    object: Object,
    /// The backend on whose path it is, by its place in the service.
    backend: Option<u16>,
    /// The id of its instances.
    link: u64,
    registers: Vec<Register>,
    /// Makes an instance into which the states of all workers are merged.
    code: Code,
    metrics: Arc<FunctionMetrics>,
    sampling: Sampling,
}

fn list<'a>(names: impl Iterator<Item = &'a str>) -> String {
    let names: Vec<&str> = names.collect();
    if names.is_empty() { "none".to_owned() } else { names.join(", ") }
}

impl Functions {
    /// The functions that the caller may see: attached ones in the order of the chains, then others.
    pub fn list(&self, engine: &Engine, caller: Caller) -> Vec<FunctionView> {
        let mut functions = Vec::new();
        for (service, chain) in engine.topology.services.iter().zip(&self.chains) {
            let of_caller = chain.iter().filter(|f| f.object.is_of(caller));
            functions.extend(of_caller.map(|function| FunctionView {
                id: function.object.id,
                origin: function.object.origin,
                service: Some(path::name(service, function.backend)),
                spec: function.object.spec.clone(),
                counted: function.metrics.snapshot(),
                last_failure: function.metrics.last_failure(),
                registers: function.registers.iter().map(|r| r.name.to_string()).collect(),
            }));
        }
        let of_caller = self.detached.iter().filter(|object| object.is_of(caller));
        functions.extend(of_caller.map(|object| FunctionView {
            id: object.id,
            origin: object.origin,
            service: None,
            spec: object.spec.clone(),
            counted: Snapshot::default(),
            last_failure: String::new(),
            registers: Vec::new(),
        }));
        functions
    }

    /// Counters of requests about functions.
    pub fn counters(&self) -> Arc<FunctionCounters> {
        self.counters.clone()
    }

    /// Creates a function, which is attached to nothing. `content` is that of its file, which is read here if there is none. With `bound` it
    /// ends with the caller's connection. Returns its id.
    pub fn create(
        &mut self,
        engine: &Engine,
        caller: Caller,
        spec: &Spec,
        content: Option<Vec<u8>>,
        bound: bool,
    ) -> Result<u64, FunctionError> {
        if !is_name(&spec.name) {
            return Err(FunctionError::Name(spec.name.clone()));
        }
        let connection = match (bound, caller.connection) {
            (true, None) => return Err(FunctionError::NoConnection),
            (true, connection) => connection,
            (false, _) => None,
        };
        let of_caller = |object: &&Object| matches!(object.origin, Origin::Created { user, .. } if user == caller.user);
        let created: Vec<&Object> = self.objects().filter(|object| object.is_created()).collect();
        let own: Vec<&&Object> = created.iter().filter(|object| of_caller(object)).collect();
        if own.iter().any(|object| object.spec.name == spec.name) {
            return Err(FunctionError::NameTaken(spec.name.clone(), caller.user));
        }
        let too_many = !caller.is_operator() && own.len() >= CREATED_PER_USER_MAX;
        if too_many || created.len() >= CREATED_MAX {
            self.counters.count_refused(Refused::Limit);
            return Err(FunctionError::TooManyCreated(caller.user));
        }
        let content = self.content_of(engine, caller, spec, content)?.into();
        let origin = Origin::Created { user: caller.user, connection };
        let (id, written) = (self.next_id(), Vec::new());
        let spec = self.with_deadline(engine, spec, origin);
        let object = Object { id, origin, spec, written, content, ring: None };
        self.check_detached(&object)?;
        self.detached.push(object);
        Ok(id)
    }

    /// Gives a function that was created, and is not attached, a ring for what it delivers: with `entries` places for each worker. It replaces the
    /// one that the function has. Returns the descriptors of the region and of the wake-ups, and the number of workers.
    pub fn make_ring(
        &mut self,
        engine: &Engine,
        caller: Caller,
        id: u64,
        entries: u32,
        message_bytes: u32,
    ) -> Result<(Vec<OwnedFd>, usize), FunctionError> {
        let at = match self.find(engine, caller, &Target::Id(id))? {
            Found::Detached(at) => at,
            Found::Attached(index, of) => {
                let name = self.chains[index][of].object.spec.name.clone();
                let service = engine.topology.services[index].name.clone();
                return Err(FunctionError::Attached { name, service });
            }
        };
        let name = self.detached[at].spec.name.clone();
        // The ring that it has stays if the other one is refused.
        let bytes_of = |users: &dyn Fn(&Object) -> bool| -> u64 {
            let others = self.objects().filter(|object| object.id != id && users(object));
            others.filter_map(|object| object.ring.as_ref()).map(|ring| ring.bytes()).sum()
        };
        let left = BYTES_MAX.saturating_sub(bytes_of(&|_| true));
        let left = match self.detached[at].origin {
            Origin::Created { user, .. } if !Caller { user, connection: None }.is_operator() => {
                let own = bytes_of(
                    &|object| matches!(object.origin, Origin::Created { user: of, .. } if of == user),
                );
                left.min(BYTES_PER_USER_MAX.saturating_sub(own))
            }
            _ => left,
        };
        let left = left.min(self.ring_bytes_left(engine, id, &self.detached[at]));
        let workers = engine.fabric.workers();
        let ring = ApplicationRing::new(&name, workers, entries, message_bytes, left);
        let ring = ring.inspect_err(|_| self.counters.count_refused(Refused::Limit))?;
        let files = ring.files().map_err(|error| FunctionError::Ring(name, error.to_string()))?;
        self.detached[at].ring = Some(Arc::new(ring));
        Ok((files, workers))
    }

    /// Attaches a function that was created to a service.
    pub fn attach_created(
        &mut self,
        engine: &Engine,
        caller: Caller,
        id: u64,
        service: &str,
        place: &Place,
    ) -> Result<Attachment, FunctionError> {
        let at = match self.find(engine, caller, &Target::Id(id))? {
            Found::Detached(at) => at,
            Found::Attached(index, of) => {
                let name = self.chains[index][of].object.spec.name.clone();
                let service = engine.topology.services[index].name.clone();
                return Err(FunctionError::Attached { name, service });
            }
        };
        let chain = self.chain_for(engine, caller, service)?;
        let object = self.detached[at].clone();
        let name = &object.spec.name;
        if self.functions_on(chain).any(|function| function.object.spec.name == *name) {
            let (service, name) = (service.to_owned(), name.clone());
            return Err(FunctionError::NameInChain { service, name });
        }
        let inserted = self.insert(engine, caller, chain, object, place);
        // Also behind a worker that is late: the chain has the function then.
        if self.functions_on(chain).any(|function| function.object.id == id) {
            self.detached.retain(|object| object.id != id);
        }
        inserted?;
        Ok(Attachment { id, replaced: false })
    }

    /// Attaches a function to a service; it ends when it is detached. A function with its name is replaced.
    pub fn attach_new(
        &mut self,
        engine: &Engine,
        caller: Caller,
        service: &str,
        spec: &Spec,
        content: Option<Vec<u8>>,
        place: &Place,
    ) -> Result<Attachment, FunctionError> {
        let chain = self.chain_for(engine, caller, service)?;
        if !is_name(&spec.name) {
            return Err(FunctionError::Name(spec.name.clone()));
        }
        let attached = self.functions_on(chain);
        let former = attached.map(|f| &f.object).find(|object| object.spec.name == spec.name);
        let ring = former.and_then(|object| object.ring.clone());
        let (id, origin) = match former {
            Some(object) if !object.is_of(caller) => {
                self.counters.count_refused(Refused::Function);
                let (service, name) = (service.to_owned(), spec.name.clone());
                return Err(FunctionError::NameInChain { service, name });
            }
            Some(object) => (Some(object.id), object.origin),
            None => (None, Origin::Attached(caller.user)),
        };
        let dictionary = former.map(|of| (of.spec.dictionary.clone(), of.spec.dictionary_kib));
        let content = self.content_of(engine, caller, spec, content)?.into();
        let replaced = id.is_some();
        let id = id.unwrap_or_else(|| self.next_id());
        let (mut spec, written) = (self.with_deadline(engine, spec, origin), Vec::new());
        if let Some(former) = dictionary.filter(|_| spec.dictionary.is_none()) {
            // It stays when the function is replaced.
            (spec.dictionary, spec.dictionary_kib) = former;
        }
        let object = Object { id, origin, spec, written, content, ring };
        self.insert(engine, caller, chain, object, place)?;
        Ok(Attachment { id, replaced })
    }

    /// The same for the engine. Returns whether it has replaced a function.
    pub fn attach(
        &mut self,
        engine: &Engine,
        service: &str,
        spec: &Spec,
        place: Option<usize>,
    ) -> Result<bool, FunctionError> {
        let place = place.map_or(Place::Default, Place::At);
        let attached = self.attach_new(engine, Caller::engine(), service, spec, None, &place)?;
        Ok(attached.replaced)
    }

    /// Gives a chain one more function, in place of the one with its name if there is one. Neighbours are functions that the caller sees.
    fn insert(
        &mut self,
        engine: &Engine,
        caller: Caller,
        chain: ChainOf,
        object: Object,
        place: &Place,
    ) -> Result<(), FunctionError> {
        let topology = engine.topology.clone();
        let service = &topology.services[chain.service];
        let code = self.open_code(&object.spec, &object.content, user_of(&object))?;
        self.check_memory(engine, service, &object, &object.in_force(), &code)?;
        let of_chain = || path::name(service, chain.backend);
        let shown =
            |object: &Object| object.is_of(caller) || mutants::on("name_functions_of_others");
        let mut order: Vec<(u64, &str, bool)> = self
            .functions_on(chain)
            .map(|f| (f.link, &*f.object.spec.name, shown(&f.object)))
            .collect();
        let former = order.iter().position(|(_, name, _)| *name == object.spec.name);
        former.map(|former| order.remove(former));
        if order.len() == FUNCTIONS_MAX {
            return Err(FunctionError::TooMany(of_chain()));
        }
        let neighbour = |name: &str| {
            let found = order.iter().position(|(_, of, is_shown)| *is_shown && *of == name);
            found.ok_or_else(|| FunctionError::NoNeighbour {
                service: of_chain(),
                name: name.to_owned(),
                functions: list(order.iter().filter(|of| of.2).map(|(_, name, _)| *name)),
            })
        };
        let at = match place {
            Place::Default => former.unwrap_or(order.len()),
            Place::At(at) => order.len().min(*at),
            Place::Before(name) => neighbour(name)?,
            Place::After(name) => neighbour(name)? + 1,
        };
        let mut places: Vec<Next> = order.iter().map(|(link, ..)| Next::Kept(*link)).collect();
        let new = self.make_function(engine, (service, chain.backend), object, code, None)?;
        places.insert(at, Next::New(Box::new(new)));
        let (service, backend) = (service.name.clone(), chain.backend);
        self.arrange(engine, NextChain { service, backend, places })
    }

    /// Detaches a function. Returns where it came from: one of the file comes back with the next reload.
    pub fn detach(
        &mut self,
        engine: &Engine,
        caller: Caller,
        target: &Target,
    ) -> Result<Origin, FunctionError> {
        let (index, of) = self.attached(engine, caller, target)?;
        let function = &self.chains[index][of];
        let (link, origin, backend) = (function.link, function.object.origin, function.backend);
        let kept = self.functions_on(ChainOf { service: index, backend });
        let kept = kept.filter(|function| function.link != link);
        let places = kept.map(|function| Next::Kept(function.link)).collect();
        let service = engine.topology.services[index].name.clone();
        self.arrange(engine, NextChain { service, backend, places })?;
        Ok(origin)
    }

    /// The same for the engine.
    pub fn detach_named(
        &mut self,
        engine: &Engine,
        service: &str,
        name: &str,
    ) -> Result<(), FunctionError> {
        self.detach(engine, Caller::engine(), &named(service, name)).map(drop)
    }

    /// Destroys a function that was created and is not attached.
    pub fn destroy(
        &mut self,
        engine: &Engine,
        caller: Caller,
        id: u64,
    ) -> Result<(), FunctionError> {
        match self.find(engine, caller, &Target::Id(id))? {
            Found::Detached(at) => drop(self.detached.remove(at)),
            Found::Attached(index, of) => {
                let name = self.chains[index][of].object.spec.name.clone();
                let service = engine.topology.services[index].name.clone();
                return Err(FunctionError::StillAttached { name, service });
            }
        }
        Ok(())
    }

    /// A connection to the control socket has ended: its functions end with it. Returns how many they were.
    pub fn end_connection(&mut self, engine: &Engine, connection: u64) -> usize {
        let is_its = |object: &Object| matches!(object.origin, Origin::Created { connection: Some(of), .. } if of == connection);
        let ended: Vec<u64> = self.objects().filter(|o| is_its(o)).map(|o| o.id).collect();
        for id in &ended {
            let caller = Caller::engine();
            if let Ok(Found::Attached(..)) = self.find(engine, caller, &Target::Id(*id))
                && let Err(error) = self.detach(engine, caller, &Target::Id(*id))
            {
                tracing::error!(id, "{error}; the function ends when the kernel returns");
            }
            self.detached.retain(|object| object.id != *id);
        }
        ended.len()
    }

    /// Gives a function other code, other parameters or another policy. If only parameters and the policy for failures differ, they are written
    /// into its instances, which keep their registers; otherwise it gets new instances, and its counters begin again. Returns where it came from.
    pub fn replace(
        &mut self,
        engine: &Engine,
        caller: Caller,
        target: &Target,
        by: &Replacement,
        content: Option<Vec<u8>>,
    ) -> Result<Origin, FunctionError> {
        let found = self.find(engine, caller, target)?;
        let object = match found {
            Found::Attached(index, of) => &self.chains[index][of].object,
            Found::Detached(at) => &self.detached[at],
        };
        let mut object = object.clone();
        let (before, origin) = (object.clone(), object.origin);
        let Replacement { function, params, on_failure, deadline_us, memory_mib, .. } = by;
        let spec = &mut object.spec;
        if by.dictionary.is_some() {
            spec.dictionary.clone_from(&by.dictionary);
        }
        put(&mut spec.dictionary_kib, &by.dictionary_kib);
        put(&mut spec.function, function);
        put(&mut spec.params, params);
        put(&mut spec.on_failure, on_failure);
        put(&mut spec.deadline_us, deadline_us);
        put(&mut spec.memory_mib, memory_mib);
        if params.is_some() {
            object.written.clear();
        }
        object.spec = self.with_deadline(engine, &object.spec, origin);
        if function.is_some() || file_of(&object.spec) != file_of(&before.spec) {
            object.content = self.content_of(engine, caller, &object.spec, content)?.into();
        }
        match found {
            Found::Attached(index, of)
                if memory_on(&object.in_force(), 1) > memory_on(&before.in_force(), 1) =>
            {
                let code = &self.chains[index][of].code;
                let service = &engine.topology.services[index];
                self.check_memory(engine, service, &before, &object.in_force(), code)?;
            }
            _ => {}
        }
        match found {
            Found::Detached(at) => {
                self.check_detached(&object)?;
                self.detached[at] = object;
            }
            Found::Attached(index, of) if before.has_code_of(&object.spec, &object.content) => {
                let topology = engine.topology.clone();
                let service = &topology.services[index];
                let AttachedFunction { link, backend, .. } = self.chains[index][of];
                let mut settings = self.settings_of(&object, path::sizes(service, backend))?;
                if params.is_none() {
                    settings.clear();
                }
                let chain = self.functions_on(ChainOf { service: index, backend });
                let places = chain.map(|function| match function.link == link {
                    true => Next::Configured(link, Box::new(object.clone()), settings.clone()),
                    false => Next::Kept(function.link),
                });
                let places = places.collect();
                self.arrange(engine, NextChain { service: service.name.clone(), backend, places })?;
            }
            Found::Attached(index, of) => {
                let backend = self.chains[index][of].backend;
                let chain = ChainOf { service: index, backend };
                self.insert(engine, caller, chain, object, &Place::Default)?;
            }
        }
        Ok(origin)
    }

    /// Reads the registers of a function, merged over all workers, after what `action` says. After a change those are left out that follow from its
    /// state ([`Merge::State`]): only a read copies it.
    pub fn registers(
        &mut self,
        engine: &Engine,
        caller: Caller,
        target: &Target,
        action: &RegisterAction,
    ) -> Result<Registers, FunctionError> {
        let (index, of) = self.attached(engine, caller, target)?;
        let function = &self.chains[index][of];
        let command = match action {
            RegisterAction::Read => Command::Read,
            RegisterAction::Reset => Command::Reset,
            RegisterAction::Write(setting, value) => {
                let registers = &function.registers;
                let register = setting_of(registers, setting).ok_or_else(|| {
                    let settings = registers.iter().filter(|r| r.merge == Merge::Setting);
                    FunctionError::NoSetting {
                        function: function.object.spec.name.clone(),
                        register: setting.clone(),
                        settings: list(settings.map(|register| &*register.name)),
                    }
                })?;
                let mut object = function.object.clone();
                let before = memory_on(&object.in_force(), 1);
                object.note_written(setting, *value);
                let spec = object.in_force();
                if memory_on(&spec, 1) > before {
                    let service = &engine.topology.services[index];
                    self.check_memory(engine, service, &object, &spec, &function.code)?;
                }
                Command::Write { register, value: *value }
            }
        };
        let registers = self.registers_after(engine, index, of, command)?;
        if let RegisterAction::Write(setting, value) = action {
            self.chains[index][of].object.note_written(setting, *value);
        }
        Ok(registers)
    }

    /// Reads all registers of a function, for the engine.
    pub fn read(
        &self,
        engine: &Engine,
        service: &str,
        name: &str,
    ) -> Result<Registers, FunctionError> {
        let (index, of) = self.attached(engine, Caller::engine(), &named(service, name))?;
        self.registers_after(engine, index, of, Command::Read)
    }

    /// The state of a function, merged over all workers; empty if it has none.
    pub fn state(
        &mut self,
        engine: &Engine,
        caller: Caller,
        target: &Target,
    ) -> Result<Vec<u8>, FunctionError> {
        let (index, of) = self.attached(engine, caller, target)?;
        Ok(self.command(engine, index, of, Command::Read)?.state)
    }

    fn registers_after(
        &self,
        engine: &Engine,
        index: usize,
        of: usize,
        command: Command,
    ) -> Result<Registers, FunctionError> {
        let reading = self.command(engine, index, of, command)?;
        let registers = self.chains[index][of].registers.iter();
        let shown = registers
            .zip(reading.values)
            .filter(|(register, _)| command == Command::Read || register.merge != Merge::State);
        Ok(shown.map(|(register, value)| (register.name.to_string(), value)).collect())
    }

    fn command(
        &self,
        engine: &Engine,
        index: usize,
        of: usize,
        command: Command,
    ) -> Result<Reading, FunctionError> {
        let slot = engine.slots[index].slot;
        let function = &self.chains[index][of];
        let (reply, replies) = mpsc::channel();
        engine.fabric.post_to_all(|_| {
            let request = ChainRequest::Command(function.link, command);
            let place = ChainPlace { slot, backend: function.backend };
            ControlMessage::Chain(place, request, reply.clone())
        });
        drop(reply);
        let failed = |error| FunctionError::Command(function.object.spec.name.clone(), error);
        let mut readings = Vec::with_capacity(engine.fabric.workers());
        for _ in 0..engine.fabric.workers() {
            if let ChainReply::Command(done) = self.next_reply(engine, &replies)? {
                readings.push(done.map_err(failed)?);
            }
        }
        let sizes = path::sizes(&engine.topology.services[index], function.backend);
        let make = || {
            let made = function.code.instance(&function.object.spec, sizes);
            made.map_err(|error| Failure(error.to_string()))
        };
        let merged = Reading::merge(&function.registers, readings, make);
        merged.map_err(|failure| failed(failure.into()))
    }

    /// The content of a function's file: that which came with the request, or that of the operator's file.
    fn content_of(
        &self,
        engine: &Engine,
        caller: Caller,
        spec: &Spec,
        content: Option<Vec<u8>>,
    ) -> Result<Vec<u8>, FunctionError> {
        match content {
            Some(content) if file_of(spec).is_some() => Ok(content),
            _ if file_of(spec).is_none() || caller.is_operator() => self.read_file(engine, spec),
            _ => Err(FunctionError::NoContent(caller.user)),
        }
    }

    /// Makes an instance of a function that stays detached: it says what is wrong.
    fn check_detached(&self, object: &Object) -> Result<(), FunctionError> {
        let code = self.open_code(&object.spec, &object.content, user_of(object))?;
        let service = Service::new("", Vec::new(), "");
        self.instance(&code, &object.spec, service.message_sizes()).map(drop)
    }

    fn objects(&self) -> impl Iterator<Item = &Object> {
        let attached = self.chains.iter().flatten();
        attached.map(|function| &function.object).chain(&self.detached)
    }

    fn any_service(&self, engine: &Engine, name: &str) -> Result<usize, FunctionError> {
        self.service_for(engine, Caller::engine(), name)
    }

    /// A service to which the caller may attach functions.
    fn service_for(
        &self,
        engine: &Engine,
        caller: Caller,
        name: &str,
    ) -> Result<usize, FunctionError> {
        let tenants = &engine.topology.tenants;
        let mut services = engine.topology.services.iter();
        let found = services.position(|s| s.name == name && caller.may_attach(s, tenants));
        found.ok_or_else(|| self.no_service(engine, caller, name))
    }

    /// A chain to which the caller may attach functions.
    fn chain_for(
        &self,
        engine: &Engine,
        caller: Caller,
        name: &str,
    ) -> Result<ChainOf, FunctionError> {
        let (of, backend) = path::split(name);
        let service = self.service_for(engine, caller, of)?;
        let Some(backend) = backend else { return Ok(ChainOf { service, backend: None }) };
        let at = path::backend_at(&engine.topology.services[service], backend);
        let backend = Some(at.ok_or_else(|| self.no_backend(engine, service, backend))?);
        Ok(ChainOf { service, backend })
    }

    fn no_backend(&self, engine: &Engine, service: usize, name: &str) -> FunctionError {
        let service = &engine.topology.services[service];
        let backends = list(service.backends.iter().map(|backend| &*backend.name));
        let (service, name) = (service.name.clone(), name.to_owned());
        FunctionError::NoBackend { service, name, backends }
    }

    /// The functions of a chain.
    fn functions_on(&self, chain: ChainOf) -> impl Iterator<Item = &AttachedFunction> {
        let functions = self.chains[chain.service].iter();
        functions.filter(move |function| function.backend == chain.backend)
    }

    fn no_service(&self, engine: &Engine, caller: Caller, name: &str) -> FunctionError {
        self.counters.count_refused(Refused::Service);
        let tenants = &engine.topology.tenants;
        let those =
            engine.topology.services.iter().filter(|service| caller.may_attach(service, tenants));
        let (name, services) = (name.to_owned(), list(those.map(|service| &*service.name)));
        FunctionError::NoService { name, services }
    }

    /// A function of the caller. One of another user does not exist for it.
    fn find(
        &self,
        engine: &Engine,
        caller: Caller,
        target: &Target,
    ) -> Result<Found, FunctionError> {
        let refused = |error| {
            self.counters.count_refused(Refused::Function);
            Err(error)
        };
        match target {
            Target::Id(id) => {
                let is_it = |object: &Object| object.id == *id && object.is_of(caller);
                let detached = self.detached.iter().position(is_it);
                let attached = || {
                    let mut chains = self.chains.iter().enumerate();
                    chains.find_map(|(index, chain)| {
                        let of = chain.iter().position(|f| is_it(&f.object));
                        of.map(|of| Found::Attached(index, of))
                    })
                };
                match attached().or(detached.map(Found::Detached)) {
                    Some(found) => Ok(found),
                    None => refused(FunctionError::NoId(*id, caller.user)),
                }
            }
            Target::Named { service, name } => {
                // Also a service that the caller may not attach to any more.
                let tenants = &engine.topology.tenants;
                let (of, backend) = path::split(service);
                let index = engine.topology.services.iter().position(|s| s.name == of);
                let Some(index) = index else { return Err(self.no_service(engine, caller, of)) };
                let at = |name| path::backend_at(&engine.topology.services[index], name);
                let at = match backend {
                    None => None,
                    Some(backend) => {
                        Some(at(backend).ok_or_else(|| self.no_backend(engine, index, backend))?)
                    }
                };
                let functions = &self.chains[index];
                let of_chain = |f: &&AttachedFunction| f.backend == at && f.object.is_of(caller);
                let own = || functions.iter().filter(of_chain);
                let is_it = |function: &AttachedFunction| {
                    function.object.spec.name == *name && of_chain(&function)
                };
                if let Some(of) = functions.iter().position(is_it) {
                    return Ok(Found::Attached(index, of));
                }
                if own().next().is_none()
                    && !caller.may_attach(&engine.topology.services[index], tenants)
                {
                    return Err(self.no_service(engine, caller, service));
                }
                let functions = list(own().map(|function| &*function.object.spec.name));
                let (service, name) = (service.clone(), name.clone());
                refused(FunctionError::NoFunction { service, name, functions })
            }
        }
    }

    /// A function of the caller that is attached.
    fn attached(
        &self,
        engine: &Engine,
        caller: Caller,
        target: &Target,
    ) -> Result<(usize, usize), FunctionError> {
        match self.find(engine, caller, target)? {
            Found::Attached(index, of) => Ok((index, of)),
            Found::Detached(at) => {
                let name = self.detached[at].spec.name.clone();
                Err(FunctionError::NotAttached(name))
            }
        }
    }
}

/// Where a function is.
#[derive(Clone, Copy)]
enum Found {
    /// The index of the service, and in its chain.
    Attached(usize, usize),
    /// The index among those that are not attached.
    Detached(usize),
}

fn named(service: &str, name: &str) -> Target {
    Target::Named { service: service.to_owned(), name: name.to_owned() }
}

/// Replaces a value if there is another one.
fn put<T: Clone>(value: &mut T, other: &Option<T>) {
    if let Some(other) = other {
        value.clone_from(other);
    }
}
