//! Functions as objects: who made one, and what it is made of. One that is created and not attached is the content of its file and nothing else.

use std::collections::HashMap;
use std::hash::{BuildHasher as _, RandomState};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Weak};

use super::AttachedFunction;
use super::compiled::CompiledModule;
use super::ring::ApplicationRing;
use crate::base::caller::Caller;
use builtins::builtin;
use engine::ChainPlace;
use onpath::dictionary::Dictionary;
use onpath::{Param, Spec};

/// Where a function comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Origin {
    /// The configuration file.
    File,
    /// It was made with its attachment by this user, and ends when it is detached.
    Attached(u32),
    /// It was created by this user, and exists until it is destroyed.
    Created {
        /// The user.
        user: u32,
        /// The connection with which it ends.
        connection: Option<u64>,
    },
}

impl Origin {
    /// The user at whose request a function exists; `None`: the configuration.
    pub(super) fn user(self) -> Option<u32> {
        match self {
            Self::File => None,
            Self::Attached(user) | Self::Created { user, .. } => Some(user),
        }
    }
}

/// A function, attached or not.
#[derive(Clone)]
pub(super) struct Object {
    /// No other function of this process has it, and none of an earlier process unless the clock was set back.
    pub(super) id: u64,
    pub(super) origin: Origin,
    pub(super) spec: Spec,
    /// Settings that commands have written since.
    pub(super) written: Vec<(String, u64)>,
    /// The content of its file, or nothing.
    pub(super) content: Arc<[u8]>,
    /// Where it delivers requests.
    pub(super) ring: Option<Arc<ApplicationRing>>,
}

impl Object {
    /// Whether the caller may see and change it.
    pub(super) fn is_of(&self, caller: Caller) -> bool {
        let is_own = self.origin.user() == Some(caller.user);
        caller.is_operator() || is_own || mutants::on("share_functions")
    }

    pub(super) fn is_created(&self) -> bool {
        matches!(self.origin, Origin::Created { .. })
    }

    /// Its parameters, with the settings that commands have written in place of those that it got first.
    pub(super) fn in_force(&self) -> Spec {
        let mut spec = self.spec.clone();
        for (setting, value) in &self.written {
            spec.params.retain(|(name, _)| name != setting);
            spec.params.push((setting.clone(), (*value).into()));
        }
        spec
    }

    /// A command has written a setting.
    pub(super) fn note_written(&mut self, setting: &str, value: u64) {
        match self.written.iter_mut().find(|(name, _)| name == setting) {
            Some(written) => written.1 = value,
            None => self.written.push((setting.to_owned(), value)),
        }
    }

    /// What it is made of is the same, and only its policy or settings differ that instances take while they run.
    pub(super) fn has_code_of(&self, spec: &Spec, content: &[u8]) -> bool {
        let dictionary = |spec: &Spec| (spec.dictionary.clone(), spec.dictionary_kib);
        let limits = |spec: &Spec| (spec.deadline_us, spec.memory_mib, dictionary(spec));
        let fixed = |spec: &Spec| -> Vec<(String, Param)> {
            let texts = builtin(&spec.function).map_or(&[][..], |builtin| builtin.texts);
            let is_text = |(name, value): &&(String, Param)| {
                // The memory of a cache is reserved once.
                matches!(value, Param::Text(_))
                    || texts.iter().any(|(text, _)| text == name)
                    || name == "memory_mib"
            };
            spec.params.iter().filter(is_text).cloned().collect()
        };
        self.spec.function == spec.function
            && limits(&self.spec) == limits(spec)
            && fixed(&self.spec) == fixed(spec)
            && *self.content == *content
    }
}

/// Why requests were refused, as metrics show it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refused {
    /// There is no such function, or it belongs to another user.
    Function,
    /// There is no such service, or the caller may not attach functions to it.
    Service,
    /// The caller has too many.
    Limit,
    /// The request is for the operator.
    Command,
}

/// All of [`Refused`], with their names.
pub const REFUSED: [(Refused, &str); 4] = [
    (Refused::Function, "function"),
    (Refused::Service, "service"),
    (Refused::Limit, "limit"),
    (Refused::Command, "command"),
];

/// Counters of requests about functions.
#[derive(Debug, Default)]
pub struct FunctionCounters {
    load_errors: AtomicU64,
    init_errors: AtomicU64,
    refused: [AtomicU64; REFUSED.len()],
}

impl FunctionCounters {
    /// Files that are no modules, or cannot be read.
    pub fn load_errors(&self) -> u64 {
        self.load_errors.load(Ordering::Relaxed)
    }

    /// Instances that did not start, or did not take their parameters.
    pub fn init_errors(&self) -> u64 {
        self.init_errors.load(Ordering::Relaxed)
    }

    /// Requests that were refused, in the order of [`REFUSED`].
    pub fn refused(&self) -> [u64; REFUSED.len()] {
        self.refused.each_ref().map(|count| count.load(Ordering::Relaxed))
    }

    /// A request was refused.
    pub fn count_refused(&self, why: Refused) {
        self.refused[why as usize].fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn count_load_error(&self) {
        self.load_errors.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn count_init_error(&self) {
        self.init_errors.fetch_add(1, Ordering::Relaxed);
    }
}

/// A trace that runs.
pub(super) struct Tracing {
    pub(super) place: ChainPlace,
    pub(super) count: usize,
    /// By worker.
    pub(super) recorded: Vec<Arc<AtomicUsize>>,
}

/// The functions of a server, and what is needed to make more.
pub struct Functions {
    /// By service: those on the paths of its messages, in order.
    pub(super) chains: Vec<Vec<AttachedFunction>>,
    /// Created and not attached.
    pub(super) detached: Vec<Object>,
    pub(super) counters: Arc<FunctionCounters>,
    pub(super) traces: Vec<Tracing>,
    /// Modules that were compiled for the request that is being done.
    pub(super) compiled: Vec<CompiledModule>,
    /// By tenant, user unless it is the operator, and name: those that functions use.
    dictionaries: HashMap<(String, Option<u32>, String), Weak<Dictionary>>,
    /// Ids that have been given.
    given: u64,
    /// What makes random ids of them.
    secret: RandomState,
    last_link: u64,
}

impl Functions {
    pub(crate) fn new() -> Self {
        Self {
            chains: Vec::new(),
            detached: Vec::new(),
            counters: Arc::default(),
            traces: Vec::new(),
            compiled: Vec::new(),
            dictionaries: HashMap::new(),
            given: 0,
            secret: RandomState::new(),
            last_link: 0,
        }
    }

    /// The dictionary of a tenant that a function names. It is there as long as a function uses it: those that replace others are made before
    /// those end. Functions of a user who is not the operator share those of this user only: it may not see what other services know.
    pub(super) fn dictionary(
        &mut self,
        tenant: &str,
        user: Option<u32>,
        spec: &Spec,
    ) -> Option<Arc<Dictionary>> {
        self.dictionaries.retain(|_, dictionary| dictionary.strong_count() > 0);
        let user = user.filter(|_| !mutants::on("share_dictionaries_of_users"));
        let tenant = if mutants::on("share_dictionaries_of_tenants") { "" } else { tenant };
        let key = (tenant.to_owned(), user, spec.dictionary.clone()?);
        let found = self.dictionaries.get(&key).and_then(Weak::upgrade);
        let found = found.filter(|dictionary| dictionary.kib() == spec.dictionary_kib);
        let dictionary = found.unwrap_or_else(|| Arc::new(Dictionary::new(spec.dictionary_kib)));
        self.dictionaries.insert(key, Arc::downgrade(&dictionary));
        Some(dictionary)
    }

    /// A number that cannot be guessed, also not from that of another function, and that means nothing to another engine. From 1 to 2^53 - 1, for readers with floating-point numbers.
    pub(super) fn next_id(&mut self) -> u64 {
        loop {
            self.given += 1;
            if mutants::on("count_functions") {
                return self.given;
            }
            let id = self.secret.hash_one(self.given) >> 11;
            if id != 0 {
                return id;
            }
        }
    }

    /// The id of a chain's link.
    pub(super) fn next_link(&mut self) -> u64 {
        self.last_link += 1;
        self.last_link
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn ids_are_random_and_never_repeat_also_after_a_restart() {
        let (mut first, mut second) = (Functions::new(), Functions::new());
        let mut ids: Vec<u64> = (0..1000).map(|_| first.next_id()).collect();
        ids.extend((0..1000).map(|_| second.next_id()));
        assert!(ids.iter().all(|id| (1..1 << 53).contains(id)));
        let steps: HashSet<u64> =
            ids.windows(2).map(|pair| pair[1].wrapping_sub(pair[0])).collect();
        assert!(steps.len() > 1990, "the next one follows from the last one: {ids:?}");
        // Every bit is set about as often as not.
        for bit in 0..53 {
            let set = ids.iter().filter(|id| *id >> bit & 1 == 1).count();
            assert!((800..1200).contains(&set), "bit {bit} is set in {set} of 2000");
        }
        ids.sort_unstable();
        ids.dedup();
        assert_eq!(ids.len(), 2000);
    }

    #[test]
    fn a_function_belongs_to_its_user_and_to_the_operator() {
        let own = Caller::engine();
        let (other, third) = (own.user + 1, own.user + 2);
        let caller = |user| Caller { user, connection: None };
        let spec = Spec::new("f", "passthrough");
        let of = |origin| Object {
            id: 1,
            origin,
            spec: spec.clone(),
            written: Vec::new(),
            content: [].into(),
            ring: None,
        };
        for origin in [Origin::Attached(other), Origin::Created { user: other, connection: None }] {
            let object = of(origin);
            assert!(object.is_of(own) && object.is_of(caller(0)) && object.is_of(caller(other)));
            assert!(!object.is_of(caller(third)));
        }
        let file = of(Origin::File);
        assert!(file.is_of(own) && file.is_of(caller(0)) && !file.is_of(caller(other)));
    }

    #[test]
    fn functions_of_another_tenant_or_user_have_another_dictionary() {
        let mut functions = Functions::new();
        let mut spec = Spec::new("f", "passthrough");
        spec.dictionary = Some("seen".to_owned());
        let mut of = |tenant: &str, user| functions.dictionary(tenant, user, &spec).unwrap();
        let first = of("a", None);
        let others = [of("b", None), of("a", Some(7)), of("a", Some(8)), of("b", Some(7))];
        for (at, other) in others.iter().enumerate() {
            assert!(!Arc::ptr_eq(&first, other), "{at}");
            assert!(others[..at].iter().all(|earlier| !Arc::ptr_eq(earlier, other)), "{at}");
        }
        assert!(Arc::ptr_eq(&first, &of("a", None)));
        assert!(Arc::ptr_eq(&others[1], &of("a", Some(7))));
    }

    #[test]
    fn reasons_are_counted_apart() {
        let counters = FunctionCounters::default();
        for (at, (why, _)) in REFUSED.iter().enumerate() {
            (0..=at).for_each(|_| counters.count_refused(*why));
        }
        assert_eq!(counters.refused(), [1, 2, 3, 4]);
    }
}
