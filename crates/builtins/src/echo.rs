//! Answers each request with its own bytes: no kernel and no server sees it (NICA's echo).

use onpath::Messages;
use onpath::{Direction, Failure, Function};

/// See the module's text. It has no registers.
#[derive(Default)]
pub struct Echo;

impl Function for Echo {
    fn decide(&mut self, direction: Direction, messages: &mut Messages) -> Result<(), Failure> {
        if direction == Direction::Requests {
            (0..messages.len()).for_each(|index| messages.reply_same(index));
        }
        Ok(())
    }
}
