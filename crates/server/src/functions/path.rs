//! Chains by name: `SERVICE` is the one on the path of the service's clients, `SERVICE/BACKEND` the one between its kernels and a backend.

use engine::topology::Service;
use onpath::{Sizes, Spec};

/// A chain: the index of its service, and the place of the backend on whose path it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ChainOf {
    pub(super) service: usize,
    pub(super) backend: Option<u16>,
}

/// The name of a chain as it is written, in two parts.
pub(super) fn split(name: &str) -> (&str, Option<&str>) {
    match name.split_once('/') {
        Some((service, backend)) => (service, Some(backend)),
        None => (name, None),
    }
}

/// The place of a backend.
pub(super) fn backend_at(service: &Service, name: &str) -> Option<u16> {
    service.backends.iter().position(|backend| backend.name == name).map(|at| at as u16)
}

/// All chains that a service may have.
pub(super) fn chains(service: &Service) -> impl Iterator<Item = Option<u16>> + use<> {
    std::iter::once(None).chain((0..service.backends.len() as u16).map(Some))
}

/// The name of a chain.
pub(super) fn name(service: &Service, backend: Option<u16>) -> String {
    match backend {
        None => service.name.clone(),
        Some(at) => format!("{}/{}", service.name, service.backends[usize::from(at)].name),
    }
}

/// What the file says about a chain.
pub(super) fn functions(service: &Service, backend: Option<u16>) -> &[Spec] {
    match backend {
        None => &service.functions,
        Some(at) => &service.backends[usize::from(at)].functions,
    }
}

/// How long the messages of a chain may be.
pub(super) fn sizes(service: &Service, backend: Option<u16>) -> Sizes {
    match backend {
        None => service.message_sizes(),
        Some(at) => {
            let longest = service.backends[usize::from(at)].max_message_bytes as usize;
            Sizes { message_bytes: longest, reply_bytes: longest }
        }
    }
}
