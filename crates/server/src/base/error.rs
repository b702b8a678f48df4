//! Why a server does not start.

use std::time::Duration;

use accel::AccelError;
use engine::accelerator::StartError;
use engine::topology::{Service, TopologyError};
use wire::nic::NicError;

/// Why a server did not start. The message is one sentence for the operator.
#[derive(Debug, thiserror::Error)]
pub enum ServerError {
    /// The topology is invalid.
    #[error(transparent)]
    Topology(#[from] TopologyError),
    /// A port cannot be opened.
    #[error(transparent)]
    Open(#[from] sys::OpenError),
    /// A tenant's network namespace cannot be entered.
    #[error(
        "tenant {tenant:?}: ports cannot be opened in the network namespace {netns:?}: {source}; it has to exist (`ip netns add`), and the \
         engine needs CAP_SYS_ADMIN to enter it"
    )]
    Namespace {
        /// The tenant.
        tenant: String,
        /// The file of the namespace.
        netns: std::path::PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// A shared-memory port, or the path of an accelerator, cannot be opened.
    #[error(transparent)]
    MemoryPort(#[from] sys::local::LocalError),
    /// A region cannot be created.
    #[error("service {service:?}: {source}")]
    Memory {
        /// The service whose region it is.
        service: String,
        /// Why.
        source: sys::MemoryError,
    },
    /// A file that transfers of a service's kernels use cannot be used.
    #[error("service {service:?}: {why}")]
    File {
        /// The service.
        service: String,
        /// Why.
        why: String,
    },
    /// A kernel cannot be used, or an accelerator did not start.
    #[error("service {service:?}: {source}")]
    Accelerator {
        /// The service.
        service: String,
        /// Why.
        source: accel::AccelError,
    },
    /// A function on the path of a service's messages cannot be used.
    #[error("service {service:?}: {source}")]
    Function {
        /// The service.
        service: String,
        /// Why.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// A runtime that the engine starts does not serve.
    #[error("service {service:?}: its runtime did not start: {why}")]
    Runtime {
        /// The service.
        service: String,
        /// Why.
        why: String,
    },
    /// The start was cancelled.
    #[error("stopped before it was ready")]
    Cancelled,
    /// A worker cannot install a service.
    #[error("service {service:?}: a worker cannot install it: {why}")]
    Install {
        /// The service.
        service: String,
        /// Why, and what to do.
        why: String,
    },
    /// A thread cannot be started.
    #[error(
        "thread {name} cannot be started: {source}: raise `ulimit -u` and the control group's \
         `pids.max` if threads are short, `ulimit -n` if descriptors are"
    )]
    Thread {
        /// Its name.
        name: String,
        /// Why.
        source: std::io::Error,
    },
    /// A worker ended before it was ready.
    #[error(
        "a worker thread ended while it started: it panicked, report the message before this one"
    )]
    Panicked,
    /// The acceptor of shared-memory clients does not answer.
    #[error("the shared-memory ports did not open in time: the host is overloaded, start again")]
    MemoryPortsLate,
}

/// A worker does not return from a kernel.
#[derive(Clone, Copy, Debug, thiserror::Error)]
#[error("a worker did not answer within {} s: it is inside a kernel", .0.as_secs_f32())]
pub struct Stuck(pub Duration);

impl ServerError {
    /// Blocks did not start.
    pub(crate) fn of_blocks(service: &Service, error: StartError) -> Self {
        let service = service.name.clone();
        match error.downcast::<AccelError>() {
            Ok(source) => Self::Accelerator { service, source: *source },
            Err(error) => Self::Install { service, why: install_error_text(&error) },
        }
    }

    pub(crate) fn no_thread(name: &str) -> impl Fn(std::io::Error) -> Self {
        let name = format!("serval-{name}");
        move |source| Self::Thread { name: name.clone(), source }
    }
}

fn install_error_text(error: &StartError) -> String {
    match error.downcast_ref::<NicError>() {
        // The remaining cause when descriptors are not exhausted.
        Some(NicError::Refused(text)) => {
            format!(
                "the host kernel cannot add its port to epoll ({text}): free memory, then reload"
            )
        }
        _ => error.to_string(),
    }
}
