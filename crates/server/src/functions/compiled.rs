//! Modules before and after they are compiled, and for whom.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use builtins::{Code, LibraryError};
use onpath::Spec;

/// For whom a module is compiled.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Beneficiary {
    /// The operator: a reload, or a request of its own.
    Operator,
    /// A tenant, for one of its users.
    Tenant(String),
    /// A user without a tenant of its own, whom a service of the default tenant names.
    User(u32),
}

/// A module that has to be compiled.
#[derive(Clone, Debug)]
pub(crate) struct Uncompiled {
    /// The function that it is for.
    pub(super) spec: Spec,
    /// The module.
    pub(super) content: Arc<[u8]>,
}

/// What became of one.
pub(crate) struct CompiledModule {
    pub(super) content: Arc<[u8]>,
    pub(super) code: Result<Code, LibraryError>,
}

impl Uncompiled {
    /// Compiles it, which may take long; it gives up when `stop` says that it is no longer wanted.
    pub(crate) fn compile(self, stop: &dyn Fn() -> bool) -> CompiledModule {
        // A fault of the reader of modules refuses the module, and no other.
        let open = || Code::open_until(&self.spec, &self.content, stop);
        let code = catch_unwind(AssertUnwindSafe(open)).unwrap_or_else(|_| {
            let why = "reading it fails with an error of the engine; the log has it".to_owned();
            Err(LibraryError::Module { file: self.spec.function.clone(), why })
        });
        CompiledModule { content: self.content, code }
    }
}
