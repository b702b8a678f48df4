//! The built-in kernels for the configuration: names, parameters, and the messages they accept, so that a service
//! that could only drop its messages is rejected before it starts.

use std::any::Any;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use engine::topology::{AcceleratorKind, Launch};
use runtime::kernel_file::Target;
use runtime::kinds::target;

use super::Inspect;
use super::words::nearest;

/// A kernel that is part of Serval.
#[derive(Clone, Copy, Debug)]
pub struct Builtin {
    /// Name in `kernel = "..."`.
    pub name: &'static str,
    /// What it does, in one sentence.
    pub summary: &'static str,
    /// Parameters, each with a description.
    pub params: &'static [(&'static str, &'static str)],
    /// The only accepted length of a request in bytes; `None`: any.
    pub request_bytes: Option<u32>,
    /// The length of its reply in bytes; `None`: that of the request.
    pub reply_bytes: Option<u32>,
    /// Backends it needs.
    pub backends: u32,
    /// Stream sockets that it listens at.
    pub sockets: u32,
}

/// Maximum length of the name of an external program's kernel.
const NAME_BYTES_MAX: usize = 64;

const MICROSECONDS: &[(&str, &str)] = &[("microseconds", "how long each message takes")];

/// Every built-in kernel.
pub const BUILTINS: &[Builtin] = &[
    Builtin {
        name: "echo",
        summary: "answers every message with itself",
        params: &[],
        request_bytes: None,
        reply_bytes: None,
        backends: 0,
        sockets: 0,
    },
    Builtin {
        name: "sockperf",
        summary: "answers the sockperf benchmark (ping-pong and throughput)",
        params: &[],
        request_bytes: None,
        reply_bytes: None,
        backends: 0,
        sockets: 0,
    },
    Builtin {
        name: "spin",
        summary: "echo that computes for a time: a busy kernel",
        params: MICROSECONDS,
        request_bytes: None,
        reply_bytes: None,
        backends: 0,
        sockets: 0,
    },
    Builtin {
        name: "delay",
        summary: "echo after a delay, without computing: a busy accelerator",
        params: MICROSECONDS,
        request_bytes: None,
        reply_bytes: None,
        backends: 0,
        sockets: 0,
    },
    Builtin {
        name: "scale",
        summary: "multiplies float32 (little endian) by 3",
        params: &[],
        request_bytes: None,
        reply_bytes: None,
        backends: 0,
        sockets: 0,
    },
    Builtin {
        name: "lenet",
        summary: "reads a digit: 28x28 grey bytes to u8 digit, 3 zero bytes, 10 float32 LE logits; 8 more bytes of a request are repeated",
        params: &[],
        request_bytes: Some(784),
        reply_bytes: Some(44),
        backends: 0,
        sockets: 0,
    },
    Builtin {
        name: "faces",
        summary: "verifies a face against memcached: 12-byte label, 32x32 grey bytes to u32 LE \
                  verdict, float32 LE distance",
        params: &[("threshold", "largest distance that is a match, 0 to 2048")],
        request_bytes: Some(1036),
        reply_bytes: Some(8),
        backends: 1,
        sockets: 0,
    },
    Builtin {
        name: "stream_echo",
        summary: "sends back every byte of a connection: a server with stream sockets",
        params: &[],
        request_bytes: None,
        reply_bytes: None,
        backends: 0,
        sockets: 1,
    },
    Builtin {
        name: "matmul",
        summary: "multiplies matrices: a connection sends u32 LE n and 2 n*n float32 LE, and gets n*n float32 LE",
        params: &[],
        request_bytes: None,
        reply_bytes: None,
        backends: 0,
        sockets: 1,
    },
    Builtin {
        name: "aes256_ctr",
        summary: "encrypts pieces of streams for transfers: number and offset u64 LE, key of 32 bytes, bytes",
        params: &[],
        request_bytes: None,
        reply_bytes: None,
        backends: 0,
        sockets: 0,
    },
];

/// The kernel that `kernel = "..."` selects.
#[derive(Clone, Debug)]
pub(super) enum Kernel {
    Builtin(&'static Builtin),
    /// A compiled kernel library or fatbin that exists, and the name of the kernel in it.
    Library(PathBuf, Option<String>),
    /// A kernel of an external program, which attaches.
    Foreign,
}

/// Whether a kernel is a file: neither built in, nor a name.
pub(super) fn is_file(name: &str) -> bool {
    let is_builtin = BUILTINS.iter().any(|builtin| builtin.name == name);
    !is_builtin && ["/", ".so", ".fatbin", ".cubin"].iter().any(|mark| name.contains(mark))
}

/// Finds a kernel. A path is relative to `base`, the configuration file's folder. The error is the problem and the
/// fix. `any_name` is for external programs with their own kernels.
pub(super) fn find(name: &str, base: &Path, any_name: bool) -> Result<Kernel, (String, String)> {
    if let Some(builtin) = BUILTINS.iter().find(|builtin| builtin.name == name) {
        return Ok(Kernel::Builtin(builtin));
    }
    let letter = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-');
    if any_name && !name.is_empty() && name.len() <= NAME_BYTES_MAX && name.chars().all(letter) {
        return Ok(Kernel::Foreign);
    }
    if !is_file(name) {
        let names: Vec<&str> = BUILTINS.iter().map(|builtin| builtin.name).collect();
        let right = match nearest(name, names.iter().copied()) {
            Some(near) => format!("did you mean \"{near}\"?"),
            None => format!("one of {}, or a path to a compiled kernel", names.join(", ")),
        };
        return Err((format!("no built-in kernel is called \"{name}\""), right));
    }
    if [".cpp", ".cc", ".cu", ".cxx", ".c"].iter().any(|ending| name.ends_with(ending)) {
        let what = format!("\"{name}\" is source code, not a compiled kernel");
        return Err((what, format!("compile it first: serval kernel build {name}")));
    }
    // `PATH:NAME` is one kernel of a library that has several.
    let (file, kernel) = match name.rsplit_once(':') {
        Some((file, kernel)) if !kernel.contains('/') => (file, Some(kernel)),
        _ => (name, None),
    };
    let path = base.join(file);
    match std::fs::metadata(&path) {
        Ok(found) if found.is_file() => Ok(Kernel::Library(path, kernel.map(str::to_owned))),
        Ok(_) => Err((format!("\"{name}\" is not a file"), "name a compiled kernel".to_owned())),
        Err(error) => Err((
            format!("the kernel \"{name}\" cannot be read: {error}"),
            "compile one with: serval kernel build FILE.cpp".to_owned(),
        )),
    }
}

/// Opens an existing kernel file with `open`, as the accelerators of these kinds would; `name` is that of the kernel
/// in it. The opened files are added to `opened`. The error is the problem and the fix.
pub(super) fn inspect(
    open: Inspect,
    path: &Path,
    name: Option<&str>,
    kinds: &[&AcceleratorKind],
    opened: &mut Vec<Arc<dyn Any>>,
) -> Result<(), (String, String)> {
    let target = |kind: &&AcceleratorKind| match kind {
        // The runtime interprets the path.
        AcceleratorKind::Process { launch: Launch::External { .. }, .. } => None,
        AcceleratorKind::Process { device, .. } => Some(target(device)),
        AcceleratorKind::Cpu { .. } => Some(Target::Host),
    };
    let mut targets: Vec<Target> = kinds.iter().filter_map(target).collect();
    targets.dedup();
    let refused = targets.into_iter().find_map(|target| open(path, name, target, opened).err());
    refused.map_or(Ok(()), |text| match text.split_once(": ") {
        Some((what, right)) => Err((what.to_owned(), right.to_owned())),
        None => Err((text, "name another kernel file".to_owned())),
    })
}
