//! The caller of a request about functions or tenants.

use engine::topology::{Service, Tenant};

/// Who asks: a process, by the credentials of its connection to the control socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Caller {
    /// Its user.
    pub user: u32,
    /// Its connection. Functions may end with it. No other one of this process has the same number.
    pub connection: Option<u64>,
}

impl Caller {
    /// The engine itself.
    pub fn engine() -> Self {
        Self { user: sys::process::user(), connection: None }
    }

    /// The engine's user and root may do everything with all functions.
    pub fn is_operator(self) -> bool {
        self.user == 0 || self.user == sys::process::user()
    }

    /// Whether the caller may attach functions to a service.
    pub(crate) fn may_attach(self, service: &Service, tenants: &[Tenant]) -> bool {
        self.is_operator() || is_user_of(self.user, service, tenants)
    }
}

/// Whether a user may attach functions to a service besides the operator.
pub(crate) fn is_user_of(user: u32, service: &Service, tenants: &[Tenant]) -> bool {
    let owner = tenants.iter().find(|tenant| tenant.name == service.tenant);
    service.function_users.contains(&user)
        || owner.is_some_and(|tenant| tenant.users.contains(&user))
}
