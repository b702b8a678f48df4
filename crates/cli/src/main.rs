//! The `serval` command; everything is in the library.

use std::process::ExitCode;

fn main() -> ExitCode {
    // Read here, in the smallest crate, since another value compiles its crate again.
    cli::command::set_built_from(option_env!("SERVAL_BUILT_FROM").unwrap_or_default());
    cli::command::main()
}
