//! Functions in WebAssembly: one instance of a module for each worker.
//!
//! A module is a core module that imports nothing but calls for its dictionary, the time, and the addresses of clients (`imports.rs`). The host gives it a window at the end of its memory: descriptors of messages, their bytes,
//! and room for what it writes (`functions/include/serval_function.h` describes the binary interface). One call decides about a
//! batch.
//!
//! *Nothing that a module writes is trusted*: descriptors are copied out after the call, and each word is checked. A wrong one is a failure,
//! as a trap is, and nothing of the call has an effect. After a failure the instance is not called again; a restart takes a spare one, which a
//! thread of the module has made (`spares.rs`).
//!
//! *Limits.* A call is ended at its deadline, rounded up to whole milliseconds (at least one), by wasmtime's epochs, which one thread counts. Memory, tables and the
//! stack are limited. Traps are found by checks in the compiled code and not by signals, so that the program's signal handlers stay
//! its own.
//!
//! *The compiler is another program*, `serval-compile` (`compiler.rs`), of the same build and with the same settings (`module_settings.rs`), within limits of time and memory. What it makes is
//! loaded in `load.rs`, the only unsafe code here.

mod compiler;
mod descriptor;
mod host;
mod imports;
mod instance;
mod load;
mod manifest;
mod running;
mod spares;

pub use compiler::{PROGRAM as COMPILER, program as compiler};
pub use descriptor::{DESCRIPTOR_BYTES, Decision, read_descriptor};
pub use instance::Instance;
pub use manifest::Manifest;
pub use running::{Limits, read_registers};

use std::sync::Arc;

use wasmtime::ValType::{self, I32, I64};
use wasmtime::{ExternType, FuncType};

use crate::dictionary::Dictionary;
use host::Host;
use spares::Maker;

/// Version of the binary interface: major and minor. A module works with programs of the same major version and the same or a later minor one, so what was there
/// in a minor version keeps its meaning in later ones.
pub const ABI_VERSION: (u16, u16) = (1, 2);

/// How much more memory a loaded module takes than its image: records of functions, types and exports, as measured with empty functions, whose code is shortest.
const RECORDS_FACTOR: u64 = 2;

/// A compiled module whose imports and exports have been checked.
#[derive(Clone)]
pub struct Module {
    compiled: Compiled,
    maker: Arc<Maker>,
    manifest: Option<Arc<Manifest>>,
}

/// The code, and what runs it.
#[derive(Clone)]
struct Compiled {
    module: wasmtime::Module,
    // After the module: the last one ends the thread that counts time.
    host: Arc<Host>,
}

/// Exports: name, parameters, results, and whether a module must have it.
const EXPORTS: [(&str, &[ValType], &[ValType], bool); 10] = [
    ("serval_abi", &[], &[I32], true),
    ("serval_requests", &[I32, I32, I32, I32], &[I32], true),
    ("serval_replies", &[I32, I32, I32, I32], &[I32], false),
    ("serval_registers", &[], &[I32], false),
    ("serval_read", &[I32], &[I64], false),
    ("serval_write", &[I32, I64], &[I32], false),
    ("serval_reset", &[], &[], false),
    ("serval_state", &[], &[I32], false),
    ("serval_merge", &[I32, I32], &[I32], false),
    ("_initialize", &[], &[], false),
];

impl Module {
    /// Compiles and checks a module, which takes milliseconds to seconds. The error says what is wrong and what would be right.
    pub fn compile(bytes: &[u8]) -> Result<Self, String> {
        Self::compile_until(bytes, &|| false)
    }

    /// The same; it gives up when `stop` says that it is no longer wanted.
    pub fn compile_until(bytes: &[u8], stop: &dyn Fn() -> bool) -> Result<Self, String> {
        let host = Host::get()?;
        let module = load::load(&host.engine, &compiler::compile(bytes, stop)?)?;
        for import in module.imports() {
            if !imports::is_known(&import) {
                return Err(format!(
                    "it imports {}.{}, and a function's module imports nothing but {}: link it with -nostdlib --no-entry",
                    printable(import.module()),
                    printable(import.name()),
                    imports::names()
                ));
            }
        }
        match module.get_export("memory") {
            Some(ExternType::Memory(memory)) if !memory.is_64() && !memory.is_shared() => {}
            _ => return Err("it exports no 32-bit memory named \"memory\"".to_owned()),
        }
        for (name, params, results, required) in EXPORTS {
            check_export(&module, name, params, results, required)?;
        }
        let registers = ["serval_registers", "serval_read", "serval_reset"];
        let exported = registers.map(|name| module.get_export(name).is_some());
        if exported.contains(&true) && exported.contains(&false) {
            return Err(format!("it has {} only together", registers.join(", ")));
        }
        let [state, merge] =
            ["serval_state", "serval_merge"].map(|name| module.get_export(name).is_some());
        if state != merge {
            return Err("it has serval_state and serval_merge only together".to_owned());
        }
        let manifest = Manifest::of_module(bytes)?.map(Arc::new);
        Ok(Self { compiled: Compiled { module, host }, maker: Arc::default(), manifest })
    }

    /// The memory of its code, in bytes, with what is known about each function and export. All instances use the same.
    pub fn code_bytes(&self) -> u64 {
        let image = self.compiled.module.image_range();
        RECORDS_FACTOR * (image.end as u64).saturating_sub(image.start as u64)
    }

    /// The same module with a thread of its own that makes spare instances: functions of different owners do not wait for each other.
    #[must_use]
    pub fn apart(&self) -> Self {
        Self { maker: Arc::default(), ..self.clone() }
    }

    /// Its manifest, if it has one.
    pub fn manifest(&self) -> Option<&Manifest> {
        self.manifest.as_deref()
    }

    /// An instance.
    pub fn instance(
        &self,
        limits: Limits,
        dictionary: Option<Arc<Dictionary>>,
    ) -> Result<Instance, String> {
        Instance::new(self.clone(), limits, dictionary)
    }
}

fn check_export(
    module: &wasmtime::Module,
    name: &str,
    params: &[ValType],
    results: &[ValType],
    required: bool,
) -> Result<(), String> {
    let right = match module.get_export(name) {
        None => !required,
        Some(ExternType::Func(found)) => {
            let wanted = FuncType::new(module.engine(), params.to_vec(), results.to_vec());
            found.matches(&wanted)
        }
        Some(_) => false,
    };
    let list =
        |types: &[ValType]| types.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
    let signature = || format!("{name}({}) -> ({})", list(params), list(results));
    if right { Ok(()) } else { Err(format!("it does not export the function {}", signature())) }
}

/// An error of wasmtime without its backtrace.
fn one_line(error: &wasmtime::Error) -> String {
    let text = error.root_cause().to_string();
    printable(text.lines().next().unwrap_or_default())
}

/// Names in modules are anybody's text.
fn printable(text: &str) -> String {
    text.chars().take(200).map(|c| if c.is_control() { '?' } else { c }).collect()
}
