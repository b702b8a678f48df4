//! A number of what decides which code the module compiler makes: the settings that both programs share, the source of the compiler, and the
//! versions of the crates that it consists of. `serval` and `serval-compile` of one source have the same, others have not.

use std::path::{Path, PathBuf};
use std::{env, fs};

/// Sources that are hashed. The last two are missing in a packaged crate, whose version stands for them.
const SOURCES: [&str; 4] = [
    "src/module_settings.rs",
    "src/module_limits.rs",
    "../compile/src/main.rs",
    "../../Cargo.lock",
];
/// The compiler's crates in the lock file.
const CRATES: [&str; 5] = ["wasmtime", "cranelift", "wasmparser", "regalloc2", "target-lexicon"];

fn main() {
    let manifest = PathBuf::from(env::var_os("CARGO_MANIFEST_DIR").expect("cargo sets it"));
    // FNV-1a: it tells builds apart, and need not resist anybody.
    let mut hash = 0xcbf2_9ce4_8422_2325_u64;
    for source in SOURCES {
        let path = manifest.join(source);
        let Ok(text) = fs::read_to_string(&path) else { continue };
        println!("cargo:rerun-if-changed={}", path.display());
        for byte in relevant(Path::new(source), &text).bytes() {
            hash = (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
        }
    }
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rustc-env=SERVAL_MODULE_BUILD={hash:016x}");
}

/// Of the lock file only the packages of the compiler: another version of anything else makes the same code.
fn relevant(source: &Path, text: &str) -> String {
    if source.extension().is_none_or(|extension| extension != "lock") {
        return text.to_owned();
    }
    let of_compiler = |package: &&str| {
        let name = package.trim_start().strip_prefix("name = \"");
        name.is_some_and(|name| CRATES.iter().any(|start| name.starts_with(start)))
    };
    text.split("[[package]]").filter(of_compiler).collect()
}
