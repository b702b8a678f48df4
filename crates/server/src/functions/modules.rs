//! Modules that are compiled before a request about them is done, so that the thread that owns the server does not wait for the compiler.
//!
//! Who serves requests asks here what a request needs, has it compiled elsewhere, and gives it back before the request is done ([`Functions::use_compiled`]). The
//! request checks everything again: meanwhile others may have been done. Without that a module is compiled where it is needed.

use std::collections::HashSet;
use std::sync::Arc;

use builtins::{Code, LibraryError, file_of};
use engine::topology::{DEFAULT_TENANT, Service, Topology};
use onpath::Spec;
use onpath::spec::Pin;

use super::compiled::{Beneficiary, CompiledModule, Uncompiled};
use super::objects::{Functions, Object};
use super::quota::user_of;
use super::{Found, FunctionError, Replacement, Target, path, put};
use crate::base::caller::Caller;
use crate::base::engine::Engine;

impl Functions {
    /// For whom a module is compiled that this caller wants on the path of a service, or nowhere yet.
    pub(crate) fn beneficiary(
        &self,
        engine: &Engine,
        caller: Caller,
        service: Option<&str>,
    ) -> Beneficiary {
        if caller.is_operator() {
            return Beneficiary::Operator;
        }
        let name = service.map(|name| path::split(name).0);
        let service = engine.topology.services.iter().find(|of| Some(&*of.name) == name);
        let mut tenants = engine.topology.tenants.iter();
        let own = || tenants.find(|of| of.users.contains(&caller.user)).map(|of| of.name.clone());
        match service.map(|of| of.tenant.clone()).or_else(own) {
            Some(tenant) if tenant != DEFAULT_TENANT => Beneficiary::Tenant(tenant),
            _ => Beneficiary::User(caller.user),
        }
    }

    /// The module of a function that is created, or attached to a service. `None`: there is none, or the request will be refused.
    pub(crate) fn module_of_new(
        &self,
        engine: &Engine,
        caller: Caller,
        service: Option<&str>,
        spec: &Spec,
        content: Option<&[u8]>,
    ) -> Option<Uncompiled> {
        if !spec.is_module() || service.is_some_and(|name| !self.may_use(engine, caller, name)) {
            return None;
        }
        let content = self.content_before(engine, caller, spec, content)?;
        self.uncompiled(spec, content, caller)
    }

    /// The module of a function that was created and is attached.
    pub(crate) fn module_of_created(
        &self,
        engine: &Engine,
        caller: Caller,
        id: u64,
        service: &str,
    ) -> Option<Uncompiled> {
        let is_it = |object: &&Object| object.id == id && object.is_of(caller);
        let object = self.detached.iter().find(is_it)?;
        if !object.spec.is_module() || !self.may_use(engine, caller, service) {
            return None;
        }
        self.uncompiled(&object.spec, object.content.clone(), caller)
    }

    /// The module of a function that gets something else in place of what it has, and the service that it is attached to.
    pub(crate) fn module_of_replacement(
        &self,
        engine: &Engine,
        caller: Caller,
        target: &Target,
        by: &Replacement,
        content: Option<&[u8]>,
    ) -> Option<(Uncompiled, Option<String>)> {
        let (object, service) = match self.look_up(engine, caller, target)? {
            Found::Attached(index, of) => {
                let service = engine.topology.services[index].name.clone();
                (&self.chains[index][of].object, Some(service))
            }
            Found::Detached(at) => (&self.detached[at], None),
        };
        let mut spec = object.spec.clone();
        put(&mut spec.function, &by.function);
        if !spec.is_module() {
            return None;
        }
        let content = match by.function.is_some() {
            true => self.content_before(engine, caller, &spec, content)?,
            false => object.content.clone(),
        };
        Some((self.uncompiled(&spec, content, caller)?, service))
    }

    /// The modules of a configuration that are not attached.
    pub(crate) fn modules_of(&self, engine: &Engine, wanted: &Topology) -> Vec<Uncompiled> {
        let mut seen = HashSet::new();
        let mut modules = Vec::new();
        for service in &wanted.services {
            for backend in path::chains(service) {
                for spec in path::functions(service, backend).iter().filter(|of| of.is_module()) {
                    // A file that cannot be read is reported when the service gets its functions.
                    let Ok(content) = self.content_of_file(engine, spec) else { continue };
                    let module = self.uncompiled(spec, content.into(), Caller::engine());
                    modules.extend(module.filter(|of| seen.insert(Pin::digest(&of.content))));
                }
            }
        }
        modules
    }

    /// What was compiled is used by the next requests, instead of compiling it again, until this is called with other modules or none.
    pub(crate) fn use_compiled(&mut self, modules: Vec<CompiledModule>) {
        self.compiled = modules;
    }

    /// Whether a chain may get functions of this caller; nothing is counted.
    fn may_use(&self, engine: &Engine, caller: Caller, chain: &str) -> bool {
        let (name, tenants) = (path::split(chain).0, &engine.topology.tenants);
        engine.topology.services.iter().any(|of| of.name == name && caller.may_attach(of, tenants))
    }

    /// The content of a file before the request is done, which reads it again unless it came with the request.
    fn content_before(
        &self,
        engine: &Engine,
        caller: Caller,
        spec: &Spec,
        content: Option<&[u8]>,
    ) -> Option<Arc<[u8]>> {
        match content {
            Some(content) if file_of(spec).is_some() => Some(content.into()),
            _ if file_of(spec).is_none() || caller.is_operator() => {
                self.content_of_file(engine, spec).ok().map(Arc::from)
            }
            _ => None,
        }
    }

    /// A function of the caller, if there is one; nothing is counted.
    fn look_up(&self, engine: &Engine, caller: Caller, target: &Target) -> Option<Found> {
        let is_it = |object: &Object, service: Option<(&Service, Option<u16>)>| {
            object.is_of(caller)
                && match (target, service) {
                    (Target::Id(id), _) => object.id == *id,
                    (Target::Named { service: of, name }, Some((service, backend))) => {
                        object.spec.name == *name && path::name(service, backend) == *of
                    }
                    (Target::Named { .. }, None) => false,
                }
        };
        let services = engine.topology.services.iter().zip(&self.chains);
        for (index, (service, chain)) in services.enumerate() {
            let mut functions = chain.iter();
            let of = functions.position(|f| is_it(&f.object, Some((service, f.backend))));
            if let Some(of) = of {
                return Some(Found::Attached(index, of));
            }
        }
        self.detached.iter().position(|object| is_it(object, None)).map(Found::Detached)
    }

    fn uncompiled(&self, spec: &Spec, content: Arc<[u8]>, caller: Caller) -> Option<Uncompiled> {
        let user = Some(caller.user).filter(|_| !caller.is_operator());
        match self.known_code(spec, &content, user) {
            Some(_) => None,
            None => Some(Uncompiled { spec: spec.clone(), content }),
        }
    }

    /// The code of a module that was compiled for this request, or is attached: that of the same function, or one of the operator for another one of the operator.
    fn known_code(
        &self,
        spec: &Spec,
        content: &Arc<[u8]>,
        user: Option<u32>,
    ) -> Option<Result<Code, LibraryError>> {
        if !spec.is_module() {
            return None;
        }
        let compiled = self.compiled.iter().find(|of| of.content == *content);
        if let Some(compiled) = compiled {
            return Some(compiled.code.clone());
        }
        let mut attached = self.chains.iter().flatten();
        let found = attached.find(|of| {
            let is_same = Arc::ptr_eq(&of.object.content, content);
            let of_operator = user.is_none() && user_of(&of.object).is_none();
            of.object.spec.is_module() && (is_same || of_operator && of.object.content == *content)
        });
        found.map(|of| Ok(of.code.clone()))
    }

    /// What instances of a function of this user are made of; `None`: of the operator.
    pub(super) fn open_code(
        &self,
        spec: &Spec,
        content: &Arc<[u8]>,
        user: Option<u32>,
    ) -> Result<Code, FunctionError> {
        let opened = match self.known_code(spec, content, user) {
            Some(known) => known.map(|code| code.apart()),
            None => Code::open(spec, content),
        };
        Ok(opened.inspect_err(|_| self.counters.count_load_error())?)
    }
}
