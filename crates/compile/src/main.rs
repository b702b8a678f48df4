//! The compiler of WebAssembly modules: a module on standard input, its code for this processor on standard output.
//!
//! It is a program of its own because the compiler is larger than all the rest of Serval and runs only when a module is loaded. `serval` starts it with limits of time and memory, and believes
//! its output (`crates/onpath/src/wasm/compiler.rs`). The settings are those of the program that runs the code, and both have to be of the same build.
#![forbid(unsafe_code)]

use std::io::{self, Read, Write};
use std::process::ExitCode;

use onpath::module_limits;
use onpath::module_settings::{BUILD, settings};
use onpath::spec::MODULE_BYTES_MAX;

const HELP: &str = "\
Compiles a WebAssembly module for Serval.

usage: serval-compile <MODULE.wasm >CODE

`serval` runs this program whenever it loads a module. It has to be of the same build and
lies beside `serval`; the environment variable SERVAL_COMPILE names another place.

exit status: 0 compiled, 1 the module is refused (standard error has one sentence), 2 wrong usage
";

fn main() -> ExitCode {
    match std::env::args().nth(1).as_deref() {
        None => {}
        Some("--help" | "-h") => {
            print!("{HELP}");
            return ExitCode::SUCCESS;
        }
        Some("--version" | "-V") => {
            println!("serval-compile {} (modules of build {BUILD})", env!("CARGO_PKG_VERSION"));
            return ExitCode::SUCCESS;
        }
        Some(other) => {
            eprintln!("{other}: serval-compile takes no arguments, see serval-compile --help");
            return ExitCode::from(2);
        }
    }
    let compiled = read().and_then(|module| compile(&module));
    let written = compiled.and_then(|code| {
        let mut output = io::stdout().lock();
        let written = output.write_all(&code).and_then(|()| output.flush());
        written.map_err(|error| format!("the code cannot be written: {error}"))
    });
    match written {
        Ok(()) => ExitCode::SUCCESS,
        Err(why) => {
            eprintln!("{why}");
            ExitCode::FAILURE
        }
    }
}

/// The module from standard input.
fn read() -> Result<Vec<u8>, String> {
    let mut module = Vec::new();
    let read = io::stdin().lock().take(MODULE_BYTES_MAX + 1).read_to_end(&mut module);
    read.map_err(|error| format!("the module cannot be read: {error}"))?;
    module_limits::check(&module, MODULE_BYTES_MAX)?;
    Ok(module)
}

fn compile(module: &[u8]) -> Result<Vec<u8>, String> {
    let one_line = |error: wasmtime::Error| {
        let text = error.root_cause().to_string();
        text.lines().next().unwrap_or_default().to_owned()
    };
    let engine = wasmtime::Engine::new(&settings()).map_err(one_line)?;
    let code = engine.precompile_module(module);
    code.map_err(|error| format!("it is no WebAssembly module: {}", one_line(error)))
}
