//! Projects of functions on the path of messages: a folder with a manifest, sources and test messages, from which a module is built.

pub(crate) mod bench;
pub(crate) mod packets;
pub(crate) mod script;

use std::fs::{self, OpenOptions};
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};
use std::process::Command;

use builtins::read_module;
use onpath::spec::is_name;
use onpath::wasm::{Manifest, Module};
use sys::process::find_program;
use toml::{Table, Value};

/// The manifest of a project.
pub(crate) const MANIFEST: &str = "function.toml";
/// The test messages of a project.
pub(crate) const MESSAGES: &str = "messages.txt";
/// How a Rust compiler gets the library of the target.
pub(crate) const RUST_REMEDY: &str =
    "rustup target add wasm32-unknown-unknown, or apt install libstd-rust-dev-wasm32";
/// How the compilers of C and C++ are installed.
pub(crate) const CLANG_REMEDY: &str = "apt install clang lld";

const TARGET: &str = "wasm32-unknown-unknown";
const CLANG_FLAGS: [&str; 9] = [
    "--target=wasm32",
    "-O2",
    "-nostdlib",
    "-mbulk-memory",
    "-Wl,--no-entry",
    "-Wl,--strip-all",
    "-Wall",
    "-Wextra",
    "-I.",
];
const RUST_FLAGS: [&str; 14] = [
    "--edition",
    "2024",
    "--crate-type",
    "cdylib",
    "--target",
    TARGET,
    "-C",
    "opt-level=3",
    "-C",
    "panic=abort",
    "-C",
    "strip=symbols",
    "-C",
    "link-arg=-zstack-size=65536",
];

/// A language that functions are written in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Language {
    /// C, compiled by clang
    C,
    /// C++, compiled by clang++
    #[value(name = "c++")]
    Cpp,
    /// Rust, compiled by rustc
    Rust,
}

impl Language {
    const ALL: [(&'static str, Self); 3] =
        [("c", Self::C), ("c++", Self::Cpp), ("rust", Self::Rust)];

    fn name(self) -> &'static str {
        match self {
            Self::C => "c",
            Self::Cpp => "c++",
            Self::Rust => "rust",
        }
    }

    /// The name of a project's source, and its content; the name of the interface, and its content.
    fn template(self) -> [(&'static str, &'static str); 2] {
        const HEADER: (&str, &str) =
            ("serval_function.h", include_str!("../functions/include/serval_function.h"));
        match self {
            Self::C => [("function.c", include_str!("sdk/templates/function.c")), HEADER],
            Self::Cpp => [("function.cpp", include_str!("sdk/templates/function.cpp")), HEADER],
            Self::Rust => [
                ("function.rs", include_str!("sdk/templates/function.rs")),
                ("serval_function.rs", include_str!("../functions/include/serval_function.rs")),
            ],
        }
    }
}

/// A project.
pub(crate) struct Project {
    folder: PathBuf,
    /// What the module says about itself.
    pub(crate) manifest: Manifest,
    language: Language,
    source: String,
}

/// Makes a project. The folder's last name is that of the function. Returns the names of its files.
pub(crate) fn make(folder: &Path, language: Language) -> Result<Vec<&'static str>, String> {
    let name = folder.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    if !is_name(name) {
        return Err(format!(
            "a function cannot be called {name:?}: name a folder with 1 to 64 letters, digits, `_` and `-`, and no `-` at the beginning"
        ));
    }
    let failed = |path: &Path, error: &io::Error| match error.kind() {
        io::ErrorKind::AlreadyExists => {
            format!("{} exists already: name another folder", path.display())
        }
        _ => format!("{} cannot be written: {error}", path.display()),
    };
    fs::create_dir_all(folder).map_err(|error| failed(folder, &error))?;
    let [source, interface] = language.template();
    let manifest = format!(
        "name = \"{name}\"\nversion = \"0.1.0\"\nsummary = \"answers ping, and drops long requests\"\n\
         # How the states of several workers belong together: \"mergeable\", \"single\" or \"by-key\" (docs/functions.md).\nstate = \"mergeable\"\n\n\
         [build]\nlanguage = \"{}\"\nsource = \"{}\"\n",
        language.name(),
        source.0
    );
    let messages = (MESSAGES, include_str!("sdk/templates/messages.txt"));
    let files = [(MANIFEST, manifest.as_str()), source, interface, messages];
    for (file, content) in files {
        let path = folder.join(file);
        let mut new = OpenOptions::new().write(true).create_new(true).open(&path);
        let written = new.as_mut().map_err(|error| failed(&path, error))?;
        written.write_all(content.as_bytes()).map_err(|error| failed(&path, &error))?;
    }
    Ok(files.map(|(file, _)| file).to_vec())
}

impl Project {
    /// Reads the manifest of a project.
    pub(crate) fn open(folder: &Path) -> Result<Self, String> {
        let path = folder.join(MANIFEST);
        let text = fs::read_to_string(&path).map_err(|error| {
            format!("{} cannot be read: {error}; `serval fn new` makes a project", path.display())
        })?;
        let at = |why: String| format!("{}: {why}", path.display());
        let mut table = text.parse::<Table>().map_err(|error| {
            at(format!("it is no TOML: {}", error.message().lines().next().unwrap_or_default()))
        })?;
        let right = "[build] has language = \"c\", \"c++\" or \"rust\", and source = \"FILE\"";
        let Some(Value::Table(build)) = table.remove("build") else {
            return Err(at(format!("it has no [build]: {right}")));
        };
        let word = |key: &str| build.get(key).and_then(Value::as_str).unwrap_or_default();
        let languages = Language::ALL.iter();
        let language = languages.clone().find(|(name, _)| *name == word("language"));
        let is_known = build.keys().all(|key| matches!(key.as_str(), "language" | "source"));
        let (Some((_, language)), true, false) = (language, is_known, word("source").is_empty())
        else {
            return Err(at(format!("[build] is wrong: {right}")));
        };
        let source = word("source").to_owned();
        if !is_in_folder(Path::new(&source)) {
            return Err(at(format!("source = {source:?} is not a file in the project's folder")));
        }
        let manifest = Manifest::of_table(&table).map_err(at)?;
        Ok(Self { folder: folder.to_owned(), manifest, language: *language, source })
    }

    /// Where the module is built.
    pub(crate) fn module(&self) -> PathBuf {
        self.folder.join(format!("{}.wasm", self.manifest.name))
    }

    /// Compiles the module, puts the manifest into it, and checks it. Returns its bytes. Warnings of the compiler go to standard error.
    pub(crate) fn build(&self) -> Result<Vec<u8>, String> {
        let module = self.module();
        let object = self.folder.join(format!(".{}.wasm", self.manifest.name));
        // The compiler would follow a symbolic link in its place.
        let _ = fs::remove_file(&object);
        let made = self.compile(&object).and_then(|()| {
            let read = fs::File::open(&object).and_then(read_module);
            read.map_err(|error| format!("{} cannot be read: {error}", object.display()))
        });
        // What the compiler left is not the module.
        let _ = fs::remove_file(&object);
        let bytes = self.manifest.put(&made?)?;
        check(&module, &bytes)?;
        // A rename replaces a symbolic link in the place of the module.
        let mut new = OpenOptions::new();
        let written = new.write(true).create_new(true).open(&object);
        let written = written.and_then(|mut file| file.write_all(&bytes));
        written.and_then(|()| fs::rename(&object, &module)).map_err(|error| {
            let _ = fs::remove_file(&object);
            format!("{} cannot be written: {error}", module.display())
        })?;
        Ok(bytes)
    }

    fn compile(&self, object: &Path) -> Result<(), String> {
        let (program, remedy, flags): (_, _, &[&str]) = match self.language {
            Language::C => (compiler("CLANG", "clang"), CLANG_REMEDY, &["-std=c11"]),
            Language::Cpp => {
                let flags = &["-std=c++17", "-fno-exceptions", "-fno-rtti"];
                (compiler("CLANGXX", "clang++"), CLANG_REMEDY, flags)
            }
            Language::Rust => (compiler("RUSTC", "rustc"), RUST_REMEDY, &RUST_FLAGS),
        };
        let mut command = Command::new(&program);
        if self.language != Language::Rust {
            command.args(CLANG_FLAGS);
        }
        let object = std::path::absolute(object).map_err(|error| error.to_string())?;
        // With "./" before it, a name is neither an option nor a file of options.
        let source = Path::new(".").join(&self.source);
        command.args(flags).arg("-o").arg(object).arg(source).current_dir(&self.folder);
        let output = command.output().map_err(|error| {
            format!("the compiler {program:?} cannot be started: {error}; {remedy}")
        })?;
        let said = String::from_utf8_lossy(&output.stderr);
        if output.status.success() {
            // Warnings.
            eprint!("{said}");
            return Ok(());
        }
        let lacks_target = said.contains(TARGET) && said.contains("can't find crate for");
        let lacks_linker = said.contains("wasm-ld") && said.contains("unable to execute");
        if lacks_target || lacks_linker {
            return Err(format!("{program} cannot compile for WebAssembly: {remedy}\n{said}"));
        }
        Err(format!("{} cannot be compiled:\n{said}", self.source))
    }
}

/// Whether a path of a project, which may come from anybody, names a file in the project's folder.
fn is_in_folder(path: &Path) -> bool {
    path.components().all(|part| matches!(part, std::path::Component::Normal(_)))
}

fn compiler(variable: &str, usual: &str) -> String {
    std::env::var(variable).ok().filter(|name| !name.trim().is_empty()).unwrap_or(usual.to_owned())
}

/// Whether a module can be a function: it is compiled, started and asked for its registers.
pub(crate) fn check(file: &Path, bytes: &[u8]) -> Result<(), String> {
    let wrong = |why: String| format!("the module {} cannot be used: {why}", file.display());
    let mut spec = onpath::Spec::new("check", "check.wasm");
    spec.dictionary = Some("check".to_owned());
    let code = builtins::Code::open(&spec, bytes).map_err(|_| {
        // Its error names a file that there is not.
        wrong(Module::compile(bytes).err().unwrap_or_default())
    })?;
    let sizes = onpath::Sizes { message_bytes: 2048, reply_bytes: 2048 };
    code.instance(&spec, sizes).map(drop).map_err(|error| {
        let text = error.to_string();
        wrong(text.split_once(": ").map_or(text.clone(), |(_, why)| why.to_owned()))
    })
}

/// A module, by its path, or by the folder of its project, which is built.
pub(crate) fn module_of(path: &Path) -> Result<(PathBuf, Vec<u8>), String> {
    if path.is_dir() {
        let project = Project::open(path)?;
        return Ok((project.module(), project.build()?));
    }
    let read = fs::File::open(path).and_then(read_module);
    let bytes = read.map_err(|error| format!("{} cannot be read: {error}", path.display()))?;
    Ok((path.to_owned(), bytes))
}

/// Where `rustc` has the library of the target, or why it has none.
pub(crate) fn rust_target() -> Result<PathBuf, String> {
    let rustc = compiler("RUSTC", "rustc");
    if find_program(&rustc).is_none() {
        return Err(format!("no {rustc} on PATH"));
    }
    let output = Command::new(&rustc).args(["--print", "sysroot"]).output();
    let output = output.map_err(|error| format!("{rustc} cannot be started: {error}"))?;
    let root = String::from_utf8_lossy(&output.stdout).trim().to_owned();
    let library = Path::new(&root).join("lib/rustlib").join(TARGET).join("lib");
    if library.is_dir() { Ok(library) } else { Err(format!("{rustc} has no library for {TARGET}")) }
}
