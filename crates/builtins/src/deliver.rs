//! Puts every request into the ring of the application that made the function, instead of sending it on. Replies pass.

use onpath::Messages;
use onpath::{Direction, Failure, Function};

/// See the module's text. It has no registers.
#[derive(Default)]
pub struct Deliver;

impl Function for Deliver {
    fn decide(&mut self, direction: Direction, messages: &mut Messages) -> Result<(), Failure> {
        if direction == Direction::Requests {
            (0..messages.len()).for_each(|index| messages.deliver(index));
        }
        Ok(())
    }
}
