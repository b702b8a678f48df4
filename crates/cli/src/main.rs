//! The `serval` command; everything is in the library.

use std::process::ExitCode;

fn main() -> ExitCode {
    cli::command::main()
}
