//! Settings of the module compiler and of what runs the code: both programs have to use the same ones, and to be of the same build.

use wasmtime::ModuleVersionStrategy;

/// The build of this program, as far as compiled modules depend on it (`build.rs`). Code of another build is refused.
pub const BUILD: &str = concat!(env!("CARGO_PKG_VERSION"), "-", env!("SERVAL_MODULE_BUILD"));
/// How much address space an instance's memory has from the start. A module that may have more is moved when it grows.
const RESERVED_BYTES: u64 = 4 << 20;
const STACK_BYTES: usize = 256 << 10;

/// The settings. Traps are found by checks in the compiled code and not by signals; epochs end a call at its deadline.
pub fn settings() -> wasmtime::Config {
    let mut config = wasmtime::Config::new();
    config
        .epoch_interruption(true)
        .signals_based_traps(false)
        .memory_reservation(RESERVED_BYTES)
        .memory_reservation_for_growth(0)
        .memory_guard_size(0)
        .memory_init_cow(false)
        .max_wasm_stack(STACK_BYTES);
    // Without this only the major version of wasmtime is compared.
    let build = ModuleVersionStrategy::Custom(BUILD.to_owned());
    config.module_version(build).expect("it has at most 255 bytes");
    config
}
