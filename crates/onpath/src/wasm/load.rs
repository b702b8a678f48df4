//! Loads what the module compiler has made.
//!
//! The code of a compiled module runs as it is: nothing checks instructions. So it is believed only if it comes from the program `serval-compile` of this build
//! over a pipe that this process has made (`compiler.rs`), never from a file or from a client.
#![allow(unsafe_code)]

use super::compiler::Compiled;
use super::one_line;

/// The module in `compiled`. The error says which program has to be built again.
pub(super) fn load(
    engine: &wasmtime::Engine,
    compiled: &Compiled,
) -> Result<wasmtime::Module, String> {
    // SAFETY: a `Compiled` is the output of the module compiler over a pipe of this process, and nothing else makes one. wasmtime refuses what a compiler of
    // another build, or one with other settings, has made (`module_settings.rs`).
    let module = unsafe { wasmtime::Module::deserialize(engine, compiled.bytes()) };
    module.map_err(|error| {
        format!(
            "the program {} is of another build than this one, install both together: {}",
            compiled.program().display(),
            one_line(&error)
        )
    })
}
