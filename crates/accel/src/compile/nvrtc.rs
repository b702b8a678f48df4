//! The CUDA compiler library (NVRTC): builds kernels for GPUs on a machine without nvcc.
//!
//! Two CUDA libraries, found at run time: `libnvrtc` compiles a source for one GPU architecture, `libnvfatbin` packs the
//! code for several into one file. The code hardly differs from nvcc's. NVRTC does not see the host's headers; [`write_headers`]
//! creates those that kernels use from libcu++, which the device library needs anyway.
//!
//! A compiler inside the process is acceptable only for a command that compiles and exits.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::path::{Path, PathBuf};
use std::{fs, io, ptr};

use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};

use super::toolkit;
use crate::elf::loader_message;
use crate::table::table;

/// The default names for the dynamic linker.
pub(super) const LIBRARIES: [&str; 2] = ["libnvrtc.so.13", "libnvrtc.so.12"];

/// The minimum version: it supports the default GPUs.
const VERSION_MIN: (c_int, c_int) = (12, 8);

/// The default options. The builtins are those of g++ and clang++ that NVRTC knows by their plain names.
const OPTIONS: &[&str] = &["-std=c++17", "-D__builtin_memcpy=memcpy", "-D__builtin_memset=memset"];

/// Standard headers that libcu++ has under `cuda/std`.
const STANDARD: &[&str] =
    &["array", "cmath", "cstddef", "cstdint", "limits", "tuple", "type_traits", "utility"];

/// The other headers that a kernel may include, and their replacements for NVRTC. It has printf, assert, memcpy, memset
/// and mathematics built in. Its own offsetof is not a constant expression.
const STAND_INS: &[(&str, &str)] = &[
    ("assert.h", ""),
    ("cstring", "namespace std { using ::memcpy; using ::memset; }\n"),
    ("climits", "#include <cuda/std/climits>\n"),
    ("limits.h", "#include <cuda/std/climits>\n"),
    ("math.h", ""),
    (
        "stddef.h",
        "#include <cuda/std/cstddef>\n#undef offsetof\n\
         #define offsetof(type, member) ((size_t)__INTADDR__(&((type*)0)->member))\n",
    ),
    ("stdint.h", "#include <cuda/std/cstdint>\n"),
    ("stdio.h", ""),
    ("string.h", ""),
];

/// Why NVRTC cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum NvrtcError {
    /// The library cannot be loaded.
    #[error("{path} cannot be loaded ({}): `pip install nvidia-cuda-nvrtc` brings it", loader_message(.error))]
    NotLoaded {
        /// The library asked for.
        path: PathBuf,
        /// The dynamic loader's error.
        error: libloading::Error,
    },
    /// The library lacks a required function.
    #[error("{path} has no `{symbol}`: use the one of CUDA 12.8 or later")]
    Old {
        /// The library.
        path: PathBuf,
        /// The missing function.
        symbol: &'static str,
    },
    /// The library is too old.
    #[error("{path} is NVRTC {version}: use the one of CUDA 12.8 or later")]
    TooOld {
        /// The library.
        path: PathBuf,
        /// Its version.
        version: String,
    },
    /// libcu++ is missing.
    #[error(
        "{library} comes without the header <cuda/atomic> (looked for in {searched}): \
         `pip install nvidia-cuda-cccl` brings it, or name its folder with --include"
    )]
    NoHeaders {
        /// The library.
        library: PathBuf,
        /// Folders, separated by commas.
        searched: String,
    },
    /// This version does not support the GPU.
    #[error(
        "NVRTC {version} does not support {gpu}, only {known}: name one of these with --gpu, or use another version"
    )]
    UnknownGpu {
        /// The GPU requested.
        gpu: String,
        /// The library's version.
        version: String,
        /// The GPUs it supports.
        known: String,
    },
    /// The library that packs code for several GPUs is missing.
    #[error(
        "a .fatbin needs libnvfatbin of version {from} or later, which is neither beside {library} nor in CUDA's library \
         folders: install it with `pip install nvidia-nvfatbin`, or build for one GPU, `--gpu sm_90 -o FILE.cubin`"
    )]
    NoPacker {
        /// The compiler library.
        library: PathBuf,
        /// Its major version.
        from: u32,
    },
    /// A library call failed.
    #[error("{library} cannot {what}: {why}")]
    Failed {
        /// The library.
        library: PathBuf,
        /// The operation.
        what: &'static str,
        /// The library's error.
        why: String,
    },
    /// The compiler rejected the source; its output.
    #[error("{0}")]
    Refused(String),
}

type ErrorText = unsafe extern "C" fn(c_int) -> *const c_char;
/// A program of the compiler, and a fatbin under construction. Zero is none.
type Program = usize;
type Pack = usize;

table! {
    Compiler:
    version = "nvrtcVersion" (*mut c_int, *mut c_int);
    gpu_count = "nvrtcGetNumSupportedArchs" (*mut c_int);
    gpus = "nvrtcGetSupportedArchs" (*mut c_int);
    create = "nvrtcCreateProgram" (*mut Program, *const c_char, *const c_char, c_int, *const *const c_char,
                                   *const *const c_char);
    compile = "nvrtcCompileProgram" (Program, c_int, *const *const c_char);
    destroy = "nvrtcDestroyProgram" (*mut Program);
    log_bytes = "nvrtcGetProgramLogSize" (Program, *mut usize);
    log = "nvrtcGetProgramLog" (Program, *mut c_char);
    code_bytes = "nvrtcGetCUBINSize" (Program, *mut usize);
    code = "nvrtcGetCUBIN" (Program, *mut c_char);
    ptx_bytes = "nvrtcGetPTXSize" (Program, *mut usize);
    ptx = "nvrtcGetPTX" (Program, *mut c_char);
}

table! {
    Packer:
    create = "nvFatbinCreate" (*mut Pack, *const *const c_char, usize);
    destroy = "nvFatbinDestroy" (*mut Pack);
    add_code = "nvFatbinAddCubin" (Pack, *const c_void, usize, *const c_char, *const c_char);
    add_ptx = "nvFatbinAddPTX" (Pack, *const c_char, usize, *const c_char, *const c_char, *const c_char);
    bytes = "nvFatbinSize" (Pack, *mut usize);
    get = "nvFatbinGet" (Pack, *mut c_void);
}

/// A loaded library and its functions. It is never unloaded, because it may have threads of its own.
struct Loaded<T> {
    path: PathBuf,
    table: T,
    error_text: ErrorText,
}

impl<T> Loaded<T> {
    fn open(
        path: &Path,
        find: fn(&Library) -> Result<T, &'static str>,
        error_text: &'static str,
    ) -> Result<Self, NvrtcError> {
        // SAFETY: loading runs the library's constructors. It belongs to the machine's CUDA, or was named by the user
        // of the compiler.
        let library = match unsafe { Library::open(Some(path), RTLD_NOW | RTLD_LOCAL) } {
            Ok(library) => library,
            Err(error) => return Err(NvrtcError::NotLoaded { path: path.to_owned(), error }),
        };
        let old = |symbol| NvrtcError::Old { path: path.to_owned(), symbol };
        let table = find(&library).map_err(old)?;
        // SAFETY: the library's symbol of this name is a function of this type.
        let text = unsafe { library.get::<ErrorText>(error_text) };
        let text = *text.map_err(|_| old(error_text))?;
        std::mem::forget(library);
        // SAFETY: a function's address.
        let path = unsafe { library_of(text as *const c_void) }.unwrap_or_else(|| path.to_owned());
        Ok(Self { path, table, error_text: text })
    }

    /// An error unless `code` is success.
    fn check(&self, what: &'static str, code: c_int) -> Result<(), NvrtcError> {
        if code == 0 {
            return Ok(());
        }
        // SAFETY: returns a constant string for every number, or null.
        let text = unsafe {
            let text = (self.error_text)(code);
            (!text.is_null()).then(|| CStr::from_ptr(text).to_string_lossy().into_owned())
        };
        let why = text.unwrap_or_else(|| format!("error {code}"));
        Err(NvrtcError::Failed { library: self.path.clone(), what, why })
    }

    fn folder(&self) -> &Path {
        self.path.parent().unwrap_or(Path::new("/"))
    }
}

/// The file that a function was loaded from.
///
/// # Safety
///
/// `function` is the address of a function.
unsafe fn library_of(function: *const c_void) -> Option<PathBuf> {
    use std::os::unix::ffi::OsStrExt as _;
    let mut found = libc::Dl_info {
        dli_fname: ptr::null(),
        dli_fbase: ptr::null_mut(),
        dli_sname: ptr::null(),
        dli_saddr: ptr::null_mut(),
    };
    // SAFETY: writes to `found` only; the name in it is valid as long as the library, which is never unloaded.
    let name = unsafe {
        let known = libc::dladdr(function, &mut found) != 0 && !found.dli_fname.is_null();
        known.then(|| CStr::from_ptr(found.dli_fname))?
    };
    Path::new(std::ffi::OsStr::from_bytes(name.to_bytes())).canonicalize().ok()
}

/// The result of compiling one source for one GPU architecture.
struct Compiled {
    /// The number and optional letter after `sm_`.
    gpu: CString,
    cubin: Vec<u8>,
    /// With a terminating zero.
    ptx: Vec<u8>,
    log: String,
}

/// The result of compiling a source.
pub(super) struct Image {
    /// A fatbin or cubin.
    pub(super) bytes: Vec<u8>,
    /// The names of the kernels, sorted.
    pub(super) kernels: Vec<String>,
    pub(super) warnings: String,
}

/// The compiler.
pub(super) struct Nvrtc {
    library: Loaded<Compiler>,
    version: (c_int, c_int),
}

impl Nvrtc {
    /// This machine's compiler, if there is one: the first that is complete, otherwise the first.
    pub(super) fn find() -> Option<Self> {
        // An installed package may be newer than the default.
        let [newer, older] = LIBRARIES.map(PathBuf::from);
        let from = VERSION_MIN.0 as u32;
        let folders = toolkit::library_folders().into_iter();
        let installed = folders.filter_map(|folder| toolkit::newest(&folder, "libnvrtc", from));
        let all = [newer].into_iter().chain(installed).chain([older]);
        let mut first = None;
        for nvrtc in all.filter_map(|library| Self::open(&library).ok()) {
            if nvrtc.check().is_ok() {
                return Some(nvrtc);
            }
            first.get_or_insert(nvrtc);
        }
        first
    }

    /// The compiler in this library, a path or a name for the dynamic linker.
    pub(super) fn open(path: &Path) -> Result<Self, NvrtcError> {
        let library = Loaded::open(path, Compiler::find, "nvrtcGetErrorString")?;
        let (mut major, mut minor) = (0, 0);
        // SAFETY: writes two integers.
        let code = unsafe { (library.table.version)(&mut major, &mut minor) };
        library.check("tell its version", code)?;
        if (major, minor) < VERSION_MIN {
            let version = format!("{major}.{minor}");
            return Err(NvrtcError::TooOld { path: library.path, version });
        }
        // It loads this library by name at its first compilation, and Python's packages do not set a search path.
        let builtins = library.folder().join(format!("libnvrtc-builtins.so.{major}.{minor}"));
        // SAFETY: a part of the library that is already loaded.
        if let Ok(builtins) = unsafe { Library::open(Some(builtins), RTLD_NOW | RTLD_LOCAL) } {
            std::mem::forget(builtins);
        }
        Ok(Self { library, version: (major, minor) })
    }

    /// The compiler's name for users.
    pub(super) fn name(&self) -> String {
        format!("NVRTC {}, {}", self.version_text(), self.library.path.display())
    }

    fn version_text(&self) -> String {
        format!("{}.{}", self.version.0, self.version.1)
    }

    /// Folders of CUDA's headers. libcu++ is in one of them or in `given`.
    pub(super) fn header_folders(&self, given: &[PathBuf]) -> Result<Vec<PathBuf>, NvrtcError> {
        let mut searched = toolkit::header_folders(self.library.folder());
        let has = |folder: &Path, header: &str| folder.join(header).is_file();
        let lack = |searched: &[PathBuf]| {
            !given.iter().chain(searched).any(|folder| has(folder, "cuda/atomic"))
        };
        // Only in this case: headers of two versions are incompatible.
        if lack(&searched) {
            searched.extend(toolkit::package_header_folders());
        }
        if lack(&searched) {
            let names = given.iter().chain(&searched).map(|folder| folder.display().to_string());
            let searched = names.collect::<Vec<_>>().join(", ");
            return Err(NvrtcError::NoHeaders { library: self.library.path.clone(), searched });
        }
        // Leave out the host's headers, which would conflict.
        let is_cuda = |folder: &PathBuf| has(folder, "cuda/atomic") || has(folder, "cuda_fp16.h");
        Ok(searched.into_iter().filter(is_cuda).collect())
    }

    /// Checks that everything for a build is present.
    pub(super) fn check(&self) -> Result<(), NvrtcError> {
        self.header_folders(&[])?;
        self.packer().map(|_| ())
    }

    /// Compiles `source` for the GPUs of these numbers: a cubin for a single one if `cubin`, otherwise a fatbin, with PTX for
    /// the last. `options` follow the compiler's own.
    pub(super) fn build(
        &self,
        source: &Path,
        (gpus, cubin): (&[String], bool),
        options: &[CString],
    ) -> Result<Image, NvrtcError> {
        self.knows(gpus)?;
        let packer = if cubin { None } else { Some(self.packer()?) };
        let name = c_string(source.as_os_str().as_encoded_bytes())?;
        let text = fs::read(source).map_err(|error| NvrtcError::Refused(error.to_string()))?;
        let text = c_string(&text)?;
        let compile = |gpu: &String| self.compile(&text, &name, c_string(gpu.as_bytes())?, options);
        // Each compilation takes seconds and is independent of the others.
        let compiled = std::thread::scope(|scope| {
            let compile = &compile;
            let all: Vec<_> = gpus.iter().map(|gpu| scope.spawn(move || compile(gpu))).collect();
            all.into_iter()
                .map(|one| one.join().expect("the compilation does not panic"))
                .collect::<Result<Vec<_>, _>>()
        })?;
        let mut warnings: Vec<&str> = compiled.iter().map(|one| one.log.trim_end()).collect();
        warnings.dedup();
        let warnings = warnings.join("\n");
        let kernels = kernels(&compiled[0].ptx);
        let bytes = match packer {
            Some(packer) => packer.pack(&compiled, &name)?,
            None => compiled.into_iter().next().map(|one| one.cubin).unwrap_or_default(),
        };
        Ok(Image { bytes, kernels, warnings })
    }

    /// Rejects GPUs that this version does not support.
    fn knows(&self, gpus: &[String]) -> Result<(), NvrtcError> {
        let (library, table) = (&self.library, &self.library.table);
        let mut count = 0;
        // SAFETY: writes one integer.
        library.check("count GPUs", unsafe { (table.gpu_count)(&mut count) })?;
        let mut known = vec![0; count.max(0) as usize];
        // SAFETY: writes as many integers as `gpu_count` returned.
        library.check("list GPUs", unsafe { (table.gpus)(known.as_mut_ptr()) })?;
        let is_known = |gpu: &&String| {
            let number = gpu.trim_end_matches(|letter: char| letter.is_ascii_alphabetic());
            known.iter().any(|known| known.to_string() == number)
        };
        match gpus.iter().find(|gpu| !is_known(gpu)) {
            None => Ok(()),
            Some(gpu) => Err(NvrtcError::UnknownGpu {
                gpu: format!("sm_{gpu}"),
                version: self.version_text(),
                known: known.iter().map(|n| format!("sm_{n}")).collect::<Vec<_>>().join(", "),
            }),
        }
    }

    fn compile(
        &self,
        source: &CStr,
        name: &CStr,
        gpu: CString,
        options: &[CString],
    ) -> Result<Compiled, NvrtcError> {
        let (library, table) = (&self.library, &self.library.table);
        let mut program = Running { library, program: 0 };
        // SAFETY: reads two strings, without headers, writes one handle.
        let code = unsafe {
            let none = ptr::null();
            (table.create)(&mut program.program, source.as_ptr(), name.as_ptr(), 0, none, none)
        };
        library.check("take the source", code)?;
        let arch = c_string(&[b"-arch=sm_", gpu.as_bytes()].concat())?;
        let pointers: Vec<_> = [&arch].into_iter().chain(options).map(|o| o.as_ptr()).collect();
        // SAFETY: reads as many strings as are given.
        let code =
            unsafe { (table.compile)(program.program, pointers.len() as c_int, pointers.as_ptr()) };
        let log = program.fetch("tell what it found", table.log_bytes, table.log)?;
        let log = String::from_utf8_lossy(&log).trim_end_matches(['\0', '\n']).to_owned();
        if let Err(error) = library.check("compile", code) {
            return Err(if log.is_empty() { error } else { NvrtcError::Refused(log) });
        }
        Ok(Compiled {
            gpu,
            cubin: program.fetch("give code", table.code_bytes, table.code)?,
            ptx: program.fetch("give PTX", table.ptx_bytes, table.ptx)?,
            log,
        })
    }

    /// The library that packs: the one beside the compiler, otherwise one that is not older.
    fn packer(&self) -> Result<Loaded<Packer>, NvrtcError> {
        let open = |path: &Path| Loaded::open(path, Packer::find, "nvFatbinGetErrorString");
        let beside = toolkit::beside(self.library.folder());
        let from = self.version.0 as u32;
        let newest = |folder: PathBuf| toolkit::newest(&folder, "libnvfatbin", from);
        let usual = PathBuf::from(format!("libnvfatbin.so.{from}"));
        let found = beside.into_iter().filter_map(newest).chain([usual]);
        let elsewhere = toolkit::library_folders().into_iter().filter_map(newest);
        let opened = found.chain(elsewhere).find_map(|path| open(&path).ok());
        opened.ok_or_else(|| NvrtcError::NoPacker { library: self.library.path.clone(), from })
    }
}

/// A program of the compiler, destroyed on drop.
struct Running<'a> {
    library: &'a Loaded<Compiler>,
    program: Program,
}

impl Running<'_> {
    /// An output of the program, whose size is queried first.
    fn fetch(
        &self,
        what: &'static str,
        bytes: unsafe extern "C" fn(Program, *mut usize) -> c_int,
        get: unsafe extern "C" fn(Program, *mut c_char) -> c_int,
    ) -> Result<Vec<u8>, NvrtcError> {
        let mut len = 0;
        // SAFETY: a program of the library; writes one size.
        self.library.check(what, unsafe { bytes(self.program, &mut len) })?;
        let mut all = vec![0u8; len];
        // SAFETY: writes as many bytes as the size returned before.
        self.library.check(what, unsafe { get(self.program, all.as_mut_ptr().cast()) })?;
        Ok(all)
    }
}

impl Drop for Running<'_> {
    fn drop(&mut self) {
        // SAFETY: a program of the library that is no longer used, or zero, which it rejects.
        unsafe { (self.library.table.destroy)(&mut self.program) };
    }
}

impl Loaded<Packer> {
    /// A fatbin of code for all these GPUs and of PTX for the last.
    fn pack(&self, compiled: &[Compiled], name: &CStr) -> Result<Vec<u8>, NvrtcError> {
        let table = &self.table;
        let mut pack: Pack = 0;
        // SAFETY: reads no options, writes one handle.
        self.check("begin a fatbin", unsafe { (table.create)(&mut pack, ptr::null(), 0) })?;
        let add = |one: &Compiled| {
            // SAFETY: reads as many bytes as are given, and two strings.
            self.check("pack code", unsafe {
                let (code, len) = (one.cubin.as_ptr().cast(), one.cubin.len());
                (table.add_code)(pack, code, len, one.gpu.as_ptr(), name.as_ptr())
            })
        };
        let rest = || {
            let last = compiled.last().expect("at least one GPU");
            // SAFETY: reads as many bytes as are given, including a terminating zero, and three strings.
            self.check("pack PTX", unsafe {
                let (ptx, len) = (last.ptx.as_ptr().cast(), last.ptx.len());
                (table.add_ptx)(pack, ptx, len, last.gpu.as_ptr(), name.as_ptr(), c"".as_ptr())
            })?;
            let mut len = 0;
            // SAFETY: writes one size.
            self.check("measure a fatbin", unsafe { (table.bytes)(pack, &mut len) })?;
            let mut fatbin = vec![0u8; len];
            // SAFETY: writes as many bytes as the size returned before.
            self.check("finish a fatbin", unsafe {
                (table.get)(pack, fatbin.as_mut_ptr().cast())
            })?;
            Ok(fatbin)
        };
        let packed = compiled.iter().try_for_each(add).and_then(|()| rest());
        // SAFETY: created by `create` and no longer used.
        unsafe { (table.destroy)(&mut pack) };
        packed
    }
}

/// The names of the kernels in PTX, sorted.
fn kernels(ptx: &[u8]) -> Vec<String> {
    let name = |line: &str| {
        let (_, entry) = line.split_once(".entry serval_kernel_")?;
        Some(entry.split_once('(').map_or(entry, |(name, _)| name).trim_end().to_owned())
    };
    let mut names: Vec<String> = String::from_utf8_lossy(ptx).lines().filter_map(name).collect();
    names.sort();
    names
}

/// The options of a build: the compiler's own, then header folders in this order, then `arguments`.
pub(super) fn options<'a>(
    folders: impl Iterator<Item = &'a Path>,
    arguments: &[std::ffi::OsString],
) -> Result<Vec<CString>, NvrtcError> {
    let own = OPTIONS.iter().map(|option| c_string(option.as_bytes()));
    let folders =
        folders.map(|folder| c_string(&[b"-I", folder.as_os_str().as_encoded_bytes()].concat()));
    let more = arguments.iter().map(|argument| c_string(argument.as_encoded_bytes()));
    own.chain(folders).chain(more).collect()
}

/// Writes the C and C++ headers that NVRTC lacks to `folder`; libcu++ is in one of `cuda`.
pub(super) fn write_headers(folder: &Path, cuda: &[PathBuf]) -> io::Result<()> {
    for (name, text) in STAND_INS {
        fs::write(folder.join(name), text)?;
    }
    // Older versions have fewer; including a missing one is a compile error.
    let has = |name: &&&str| cuda.iter().any(|folder| folder.join("cuda/std").join(name).is_file());
    for name in STANDARD.iter().filter(has) {
        let text =
            format!("#include <cuda/std/{name}>\nnamespace std {{ using namespace cuda::std; }}\n");
        fs::write(folder.join(name), text)?;
    }
    Ok(())
}

fn c_string(bytes: &[u8]) -> Result<CString, NvrtcError> {
    CString::new(bytes).map_err(|_| NvrtcError::Refused("it contains a zero byte".to_owned()))
}
