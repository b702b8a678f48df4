//! Lets everything pass: what a chain costs without a function of its own.

use onpath::Messages;
use onpath::{Direction, Failure, Function};

/// See the module's text. It has no registers.
#[derive(Default)]
pub struct Passthrough;

impl Function for Passthrough {
    fn decide(&mut self, _: Direction, _: &mut Messages) -> Result<(), Failure> {
        Ok(())
    }
}
