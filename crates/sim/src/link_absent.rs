//! Without an operating system there is no encryption, and no plan has links.

use crate::fault::Fault;
use crate::net::SharedNetwork;

/// There is none.
pub enum AcceleratorLink {}

impl AcceleratorLink {
    /// Ends it.
    pub fn fail(&mut self, _: Fault) {
        match *self {}
    }

    /// Nothing arrives for a while.
    pub fn stall(&mut self) -> bool {
        match *self {}
    }

    /// The fault that ends it.
    pub fn fails(&self) -> Option<Fault> {
        match *self {}
    }

    /// The engine's side has noticed the end.
    pub fn is_broken(&self) -> bool {
        match *self {}
    }

    /// Whether all messages have arrived.
    pub fn is_settled(&self) -> bool {
        match *self {}
    }

    /// Time passes.
    pub fn advance(&mut self, _: u64, _: &SharedNetwork) {
        match *self {}
    }
}
