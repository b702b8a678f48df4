//! The chains of services: instances of functions are made, and all workers get a service's next chain in one message.
//!
//! *The order.* A chain has the functions of the file in the file's order. One that was attached at run time is behind the function that it
//! followed when the file was read again, or behind the nearest one before that which is left. If the file has a function with its name, that
//! one takes its place.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc;

use builtins::Code;
use builtins::{file_of, read_module};
use engine::metrics::FunctionMetrics;
use engine::topology::{Service, Tenant};
use engine::{ChainPlace, ChainReply, ChainRequest, ControlMessage};
use onpath::spec::FUNCTIONS_MAX;
use onpath::{Arranged, Link, Merge, OnFailure, Policy, Register, Sizes, Spec};
use sys::private_file::open_regular;

use super::objects::{Functions, Object, Origin};
use super::quota::user_of;
use super::sample::Sampling;
use super::{AttachedFunction, FunctionError, path};
use crate::base::caller::Caller;
use crate::base::engine::Engine;
use crate::base::error::Stuck;
use crate::directory::Directory;

/// A function with an instance for each worker, which are not attached yet.
pub(super) struct NewFunction {
    pub(super) attached: AttachedFunction,
    links: Vec<Link>,
}

/// A function of the next chain.
pub(super) enum Next {
    /// The one with this link stays as it is.
    Kept(u64),
    /// It stays, with other settings and another policy. It becomes what the object says.
    Configured(u64, Box<Object>, Vec<(usize, u64)>),
    /// Another one.
    New(Box<NewFunction>),
}

/// The links of one chain, by worker.
pub(crate) type ChainLinks = (Option<u16>, Vec<Vec<Link>>);

/// The next chain of a service, or of one of its backends.
pub(crate) struct NextChain {
    pub(super) service: String,
    pub(super) backend: Option<u16>,
    pub(super) places: Vec<Next>,
}

/// The functions of a service after a change.
pub(crate) enum NextFunctions {
    /// Those of the service that had this index.
    Of(usize),
    /// Others.
    New(Vec<AttachedFunction>),
}

/// A function of a chain before a reload.
struct Former {
    object: Object,
    link: u64,
    metrics: Arc<FunctionMetrics>,
}

/// A place of a merged order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Slot {
    /// The function of the file with this index.
    File(usize),
    /// The former function with this index, which was attached at run time.
    Former(usize),
}

/// See the module's text. `former` has names, and which functions stay although the file does not have them. What does not fit is left out.
fn merge_order(former: &[(&str, bool)], file: &[&str]) -> Vec<Slot> {
    let mut order: Vec<(Slot, &str)> =
        file.iter().enumerate().map(|(at, name)| (Slot::File(at), *name)).collect();
    for (at, (name, stays)) in former.iter().enumerate() {
        if !stays || file.contains(name) || order.len() >= FUNCTIONS_MAX {
            continue;
        }
        let place_of = |name: &str| order.iter().position(|(_, of)| *of == name);
        let before = former[..at].iter().rev().find_map(|(name, _)| place_of(name));
        order.insert(before.map_or(0, |before| before + 1), (Slot::Former(at), name));
    }
    order.into_iter().map(|(slot, _)| slot).collect()
}

impl Functions {
    /// The content of a function's file, or nothing.
    pub(super) fn read_file(&self, engine: &Engine, spec: &Spec) -> Result<Vec<u8>, FunctionError> {
        let read = self.content_of_file(engine, spec);
        read.inspect_err(|_| self.counters.count_load_error())
    }

    /// The same, and an error is not counted.
    pub(super) fn content_of_file(
        &self,
        engine: &Engine,
        spec: &Spec,
    ) -> Result<Vec<u8>, FunctionError> {
        if let Some(pin) = spec.pin() {
            return Ok(Directory::of(&engine.topology.engine).open(&pin)?);
        }
        let Some(file) = file_of(spec) else { return Ok(Vec::new()) };
        let file = PathBuf::from(&*file);
        let read = || -> Result<Vec<u8>, String> {
            let (opened, _) = open_regular(&file).map_err(|error| error.to_string())?;
            read_module(opened).map_err(|error| error.to_string())
        };
        read().map_err(|why| FunctionError::File { file: file.clone(), why })
    }

    /// An instance of a function.
    pub(super) fn instance(
        &self,
        code: &Code,
        spec: &Spec,
        sizes: Sizes,
    ) -> Result<Box<dyn onpath::Function>, FunctionError> {
        let instance = code.instance(spec, sizes);
        Ok(instance.inspect_err(|_| self.counters.count_init_error())?)
    }

    /// A function with an instance for each worker. Settings that commands have written are written again if the code has them.
    pub(super) fn make_function(
        &mut self,
        engine: &Engine,
        (service, backend): (&Service, Option<u16>),
        mut object: Object,
        code: Code,
        metrics: Option<Arc<FunctionMetrics>>,
    ) -> Result<NewFunction, FunctionError> {
        let workers = engine.fabric.workers();
        let hands_over = backend.is_none() && service.hands_over_for_functions();
        code.check_workers(&object.spec, workers, hands_over)?;
        let name = || object.spec.name.clone();
        let metrics = metrics.unwrap_or_else(|| {
            Arc::new(FunctionMetrics::new(path::name(service, backend), name(), workers))
        });
        let spec = &object.spec;
        let policy = Policy { on_failure: spec.on_failure, deadline_ns: spec.deadline_us * 1000 };
        let share = self.share_of(engine, &object);
        let mut registers = Vec::new();
        let mut links = Vec::with_capacity(workers);
        let link = self.next_link();
        let dictionary = self.dictionary(&service.tenant, user_of(&object), spec);
        metrics.set_dictionary(dictionary.as_ref());
        let sizes = path::sizes(service, backend);
        for worker in 0..workers {
            let instance = code.instance_with(spec, sizes, dictionary.clone());
            let instance = instance.inspect_err(|_| self.counters.count_init_error());
            let mut function = instance?;
            registers = function.registers().to_vec();
            for (setting, value) in &object.written {
                if let Some(register) = setting_of(&registers, setting) {
                    // Other code may refuse what the former took: then it has its own value.
                    let _ = function.write(register, *value);
                }
            }
            let sink = object.ring.as_ref().map(|ring| ring.sink(worker));
            let new = Link::new(link, function, policy, metrics.of_worker(worker));
            links.push(new.with_sink(sink).with_state(code.state()).with_share(share));
        }
        object.written.retain(|(setting, _)| setting_of(&registers, setting).is_some());
        let sampling = Sampling::default();
        let attached =
            AttachedFunction { object, backend, link, registers, code, metrics, sampling };
        Ok(NewFunction { attached, links })
    }

    /// The settings of a function: by register, all of them. An instance that is not used otherwise, and shares nothing with those that are,
    /// has checked them.
    pub(super) fn settings_of(
        &self,
        object: &Object,
        sizes: Sizes,
    ) -> Result<Vec<(usize, u64)>, FunctionError> {
        let spec = &object.spec;
        let code = self.open_code(spec, &object.content, user_of(object))?;
        let mut trial = self.instance(&code, spec, sizes)?;
        let of = |failure| FunctionError::Command(spec.name.clone(), failure);
        let values = trial.read().map_err(|failure| of(failure.into()))?;
        let registers = trial.registers().iter().map(|register| register.merge);
        let settings = registers.zip(values).enumerate();
        Ok(settings
            .filter(|(_, (merge, _))| *merge == Merge::Setting)
            .map(|(at, (_, value))| (at, value))
            .collect())
    }

    /// Gives a chain its functions on all workers. Created functions that it gives up are kept, detached.
    pub(super) fn arrange(
        &mut self,
        engine: &Engine,
        next: NextChain,
    ) -> Result<(), FunctionError> {
        let index = self.any_service(engine, &next.service)?;
        let mut orders: Vec<Vec<Arranged>> =
            (0..engine.fabric.workers()).map(|_| Vec::with_capacity(next.places.len())).collect();
        let all = std::mem::take(&mut self.chains[index]);
        let (mut former, others): (Vec<_>, Vec<_>) =
            all.into_iter().partition(|function| function.backend == next.backend);
        let mut functions = Vec::with_capacity(next.places.len());
        let mut keep = |link: u64| {
            let kept = former.iter().position(|function| function.link == link);
            kept.map(|kept| former.remove(kept))
        };
        for place in next.places {
            match place {
                Next::Kept(link) => {
                    functions.extend(keep(link));
                    orders.iter_mut().for_each(|order| order.push(Arranged::Kept(link)));
                }
                Next::Configured(link, object, settings) => {
                    let on_failure: OnFailure = object.spec.on_failure;
                    functions.extend(
                        keep(link).map(|kept| AttachedFunction { object: *object, ..kept }),
                    );
                    for order in &mut orders {
                        order.push(Arranged::Configured(link, settings.clone(), on_failure));
                    }
                }
                Next::New(new) => {
                    let NewFunction { attached, links } = *new;
                    for (order, link) in orders.iter_mut().zip(links) {
                        order.push(Arranged::New(link));
                    }
                    functions.push(attached);
                }
            }
        }
        functions.extend(others);
        functions.sort_by_key(|function| function.backend);
        self.chains[index] = functions;
        self.keep_created(former);
        self.publish_metrics(engine);
        let (reply, replies) = mpsc::channel();
        let place = ChainPlace { slot: engine.slots[index].slot, backend: next.backend };
        for (worker, order) in (0..).zip(orders) {
            let request = ChainRequest::Arrange(order);
            engine.fabric.post(worker, ControlMessage::Chain(place, request, reply.clone()));
        }
        drop(reply);
        for _ in 0..engine.fabric.workers() {
            // What a worker no longer has is dropped here.
            self.next_reply(engine, &replies)?;
        }
        Ok(())
    }

    pub(super) fn next_reply(
        &self,
        engine: &Engine,
        replies: &mpsc::Receiver<ChainReply>,
    ) -> Result<ChainReply, FunctionError> {
        let step = engine.timeouts.step;
        replies.recv_timeout(step).map_err(|_| Stuck(step).into())
    }

    /// The topology has other services: `next` says for each which functions it has.
    pub(crate) fn switch(&mut self, next: Vec<NextFunctions>) {
        let mut before = std::mem::take(&mut self.chains);
        let functions = next.into_iter().map(|next| match next {
            NextFunctions::Of(index) => std::mem::take(&mut before[index]),
            NextFunctions::New(functions) => functions,
        });
        self.chains = functions.collect();
        self.keep_created(before.into_iter().flatten().collect());
    }

    /// Created functions that are attached to nothing after this are kept.
    fn keep_created(&mut self, former: Vec<AttachedFunction>) {
        for function in former {
            let id = function.object.id;
            let mut attached = self.chains.iter().flatten();
            if function.object.is_created() && !attached.any(|other| other.object.id == id) {
                self.detached.push(function.object);
            }
        }
    }

    /// The functions of a service that is about to be installed, by chain; the links by worker. Those that were attached to its previous version at run time
    /// get new instances.
    pub(crate) fn first_functions(
        &mut self,
        engine: &Engine,
        service: &Service,
        tenants: &[Tenant],
    ) -> Result<(Vec<AttachedFunction>, Vec<ChainLinks>), FunctionError> {
        let mut attached = Vec::new();
        let mut chains = Vec::new();
        let before = engine.topology.services.iter().position(|s| s.name == service.name);
        for backend in path::chains(service) {
            let mut by_worker: Vec<Vec<Link>> =
                (0..engine.fabric.workers()).map(|_| Vec::new()).collect();
            let former = self.former(engine, before, service, backend);
            for slot in self.merged(&former, (service, tenants), backend) {
                let made = match slot {
                    Slot::File(at) => {
                        let spec = &path::functions(service, backend)[at];
                        let content = self.read_file(engine, spec);
                        let made = content.and_then(|content| {
                            self.make_of_file(engine, (service, backend), spec, content)
                        });
                        made?
                    }
                    Slot::Former(at) => {
                        let Former { object, metrics, .. } = &former[at];
                        let name = object.spec.name.clone();
                        let (mut object, metrics) = (object.clone(), metrics.clone());
                        object.spec = self.with_deadline(engine, &object.spec, object.origin);
                        let code = self.open_code(&object.spec, &object.content, user_of(&object));
                        let of = (service, backend);
                        let made = code.and_then(|code| {
                            self.make_function(engine, of, object, code, Some(metrics))
                        });
                        match made {
                            Ok(made) => made,
                            Err(error) => {
                                let service = path::name(service, backend);
                                tracing::error!(service, name, "detached by the reload: {error}");
                                continue;
                            }
                        }
                    }
                };
                attached.push(made.attached);
                by_worker.iter_mut().zip(made.links).for_each(|(links, link)| links.push(link));
            }
            chains.push((backend, by_worker));
        }
        Ok((attached, chains))
    }

    /// What the chain of a service, or of its backend with the same name, has at present.
    fn former(
        &self,
        engine: &Engine,
        before: Option<usize>,
        service: &Service,
        backend: Option<u16>,
    ) -> Vec<Former> {
        let Some(before) = before else { return Vec::new() };
        let running = &engine.topology.services[before];
        let name = backend.map(|at| &service.backends[usize::from(at)].name);
        let backend = name.map(|name| path::backend_at(running, name));
        if backend == Some(None) {
            return Vec::new();
        }
        let of_chain = self.chains[before].iter();
        let of_chain = of_chain.filter(|function| function.backend == backend.flatten());
        let former = of_chain.map(|function| Former {
            object: function.object.clone(),
            link: function.link,
            metrics: function.metrics.clone(),
        });
        former.collect()
    }

    /// The order of the next chain.
    fn merged(
        &self,
        former: &[Former],
        (service, tenants): (&Service, &[Tenant]),
        backend: Option<u16>,
    ) -> Vec<Slot> {
        let stays = |object: &Object| match object.origin {
            Origin::File => false,
            Origin::Attached(user) | Origin::Created { user, .. } => {
                Caller { user, connection: None }.may_attach(service, tenants)
            }
        };
        let names: Vec<(&str, bool)> =
            former.iter().map(|f| (&*f.object.spec.name, stays(&f.object))).collect();
        let file: Vec<&str> =
            path::functions(service, backend).iter().map(|spec| &*spec.name).collect();
        let order = merge_order(&names, &file);
        for (at, (name, _)) in names.iter().enumerate() {
            let at_run_time = former[at].object.origin != Origin::File;
            if at_run_time && !file.contains(name) && !order.contains(&Slot::Former(at)) {
                let service = path::name(service, backend);
                tracing::warn!(
                    service,
                    name,
                    "detached by the reload: the chain is full, or its user is neither one of `function_users` nor of the tenant's"
                );
            }
        }
        order
    }

    fn make_of_file(
        &mut self,
        engine: &Engine,
        of: (&Service, Option<u16>),
        spec: &Spec,
        content: Vec<u8>,
    ) -> Result<NewFunction, FunctionError> {
        let object = Object {
            id: self.next_id(),
            origin: Origin::File,
            spec: spec.clone(),
            written: Vec::new(),
            content: content.into(),
            ring: None,
        };
        let code = self.open_code(&object.spec, &object.content, None)?;
        self.make_function(engine, of, object, code, None)
    }

    /// The chains of a service that stays as it is, which differ from those of the file.
    pub(crate) fn next_chains(
        &mut self,
        engine: &Engine,
        service: &Service,
        tenants: &[Tenant],
    ) -> Result<Vec<NextChain>, FunctionError> {
        let index = self.any_service(engine, &service.name)?;
        let mut chains = Vec::new();
        for backend in path::chains(service) {
            let former = self.former(engine, Some(index), service, backend);
            let mut places = Vec::new();
            for slot in self.merged(&former, (service, tenants), backend) {
                places.push(match slot {
                    Slot::Former(at) => Next::Kept(former[at].link),
                    Slot::File(at) => {
                        let spec = &path::functions(service, backend)[at];
                        self.next_of_file(engine, index, (service, backend), spec)?
                    }
                });
            }
            let stays = |(place, function): (&Next, &Former)| matches!(place, Next::Kept(link) if *link == function.link);
            if places.len() != former.len() || !places.iter().zip(&former).all(stays) {
                chains.push(NextChain { service: service.name.clone(), backend, places });
            }
        }
        Ok(chains)
    }

    /// What a function of the file becomes: the one that is attached, the same with other settings, or another one.
    fn next_of_file(
        &mut self,
        engine: &Engine,
        index: usize,
        (service, backend): (&Service, Option<u16>),
        spec: &Spec,
    ) -> Result<Next, FunctionError> {
        let content = self.read_file(engine, spec)?;
        let mut attached = self.chains[index].iter();
        let same = attached.find(|function| {
            let Object { spec: of, origin, .. } = &function.object;
            let taken_over = !matches!(origin, Origin::Created { .. });
            let named = function.backend == backend && of.name == spec.name;
            named && taken_over && function.object.has_code_of(spec, &content)
        });
        let Some(kept) = same else {
            return Ok(Next::New(Box::new(self.make_of_file(
                engine,
                (service, backend),
                spec,
                content,
            )?)));
        };
        let (link, origin) = (kept.link, kept.object.origin);
        if kept.object.spec == *spec {
            if origin == Origin::File {
                return Ok(Next::Kept(link));
            }
            // What was tried at run time is in the file: it stays as it is.
            let object = Object { origin: Origin::File, ..kept.object.clone() };
            return Ok(Next::Configured(link, Box::new(object), Vec::new()));
        }
        let object = Object {
            origin: Origin::File,
            spec: spec.clone(),
            written: Vec::new(),
            ..kept.object.clone()
        };
        let settings = self.settings_of(&object, path::sizes(service, backend))?;
        Ok(Next::Configured(link, Box::new(object), settings))
    }

    /// After the switch: the chains that change get their functions. A worker that a kernel holds up gets them when it returns.
    pub(crate) fn arrange_all(&mut self, engine: &Engine, chains: Vec<NextChain>) {
        for chain in chains {
            let service = chain.service.clone();
            if let Err(error) = self.arrange(engine, chain) {
                tracing::error!(service, "{error}; its functions change when the kernel returns");
            }
        }
    }

    /// Publishes the metrics of the functions of all services.
    pub(crate) fn publish_metrics(&self, engine: &Engine) {
        let functions = self.chains.iter().flatten();
        engine.metrics.set_functions(functions.map(|of| of.metrics.clone()).collect());
    }
}

/// The register of a setting.
pub(super) fn setting_of(registers: &[Register], name: &str) -> Option<usize> {
    let is_it = |register: &Register| register.merge == Merge::Setting && &*register.name == name;
    registers.iter().position(is_it)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn named(former: &[(&str, bool)], file: &[&str]) -> Vec<String> {
        let name = |slot| match slot {
            Slot::File(at) => file[at].to_owned(),
            Slot::Former(at) => former[at].0.to_owned(),
        };
        merge_order(former, file).into_iter().map(name).collect()
    }

    #[test]
    fn what_was_attached_at_run_time_stays_behind_its_neighbour() {
        let former = [("x", true), ("a", false), ("y", true), ("z", true), ("b", false)];
        assert_eq!(named(&former, &["a", "b"]), ["x", "a", "y", "z", "b"]);
        assert_eq!(named(&former, &["b", "a"]), ["x", "b", "a", "y", "z"]);
        assert_eq!(named(&former, &["b"]), ["x", "y", "z", "b"], "a is gone");
        assert_eq!(named(&former, &["z", "a"]), ["x", "z", "a", "y"], "the file has z");
        assert_eq!(named(&former, &[]), ["x", "y", "z"]);
        assert_eq!(named(&[], &["a"]), ["a"]);
    }

    proptest! {
        #[test]
        fn a_merged_chain_has_the_files_order_and_each_name_once(
            former in proptest::collection::btree_map("[a-h]{1,2}", any::<bool>(), 0..=16),
            file in proptest::collection::btree_set("[a-h]{1,2}", 0..=16),
        ) {
            let former: Vec<(&str, bool)> = former.iter().map(|(n, s)| (&**n, *s)).collect();
            let file: Vec<&str> = file.iter().map(|n| &**n).collect();
            let merged = named(&former, &file);
            prop_assert!(merged.len() <= FUNCTIONS_MAX);
            let of_file: Vec<&str> =
                merged.iter().map(|n| &**n).filter(|n| file.contains(n)).collect();
            prop_assert_eq!(of_file, file.clone());
            let mut once = merged.clone();
            once.sort();
            once.dedup();
            prop_assert_eq!(once.len(), merged.len());
            let stay = former.iter().filter(|(n, s)| *s && !file.contains(n)).count();
            prop_assert_eq!(merged.len(), FUNCTIONS_MAX.min(file.len() + stay));
        }
    }
}
