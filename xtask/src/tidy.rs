//! House rules that a tool can check: `cargo xtask tidy`.

use crate::files::{self, File, lines_without_tests};
use crate::{Findings, cycles, links, metric_names, mutants, words};

/// Lines of a source file without its tests.
const LINES_MAX: usize = 800;
/// Lines of any source file, tests included.
const LINES_MAX_HARD: usize = 900;
/// Generated files.
const GENERATED: &[&str] = &["device/include/serval/abi.h", "device/models/lenet_weights.h"];
/// Where unsafe code is allowed: the only list. [`UNSAFE_DOCUMENTS`] repeat it, with the reasons.
const UNSAFE_PATHS: &[&str] = &[
    "crates/mqueue/",
    "crates/mqueue-loom/",
    "crates/sys/",
    "crates/accel/",
    "crates/builtins/src/sketch/vector.rs",
    "crates/onpath/src/wasm/load.rs",
    "functions/include/serval_function.rs",
    "python/src/collective.rs",
    "python/src/gpu.rs",
    "python/src/ring.rs",
];
/// The documents that name these paths: all of them between backquotes, on the line that ends with [`UNSAFE_MARK`].
const UNSAFE_DOCUMENTS: &[&str] = &["ARCHITECTURE.md", "CONTRIBUTING.md"];
const UNSAFE_MARK: &str = "<!-- unsafe code -->";
/// Words without information, which names of types and modules must not contain.
const BANNED_WORDS: &[&str] = &["helper", "data", "info", "ctx"];

/// The files of the data path.
const DATA_PATH: &[&str] = &[
    "crates/mqueue/src/",
    "crates/wire/src/",
    "crates/engine/src/",
    "crates/accel/src/cpu/",
    "crates/sys/src/socket_nic",
];
/// The locks in these files, with their number and purpose; no message takes one.
const LOCKS: &[(&str, usize, &str)] = &[
    ("crates/engine/src/base/tenants.rs", 1, "the list of tenants, at a change"),
    ("crates/engine/src/base/shared.rs", 2, "the machine's addresses, at a change"),
    (
        "crates/engine/src/base/mailbox.rs",
        5,
        "messages of the control side, and accepted connections",
    ),
    (
        "crates/engine/src/base/metrics.rs",
        6,
        "the list of services; results of accelerator generations; samples and dictionaries of functions for the page of metrics",
    ),
    ("crates/accel/src/cpu/threads.rs", 3, "finished blocks"),
];

pub(crate) fn check() -> Findings {
    let mut findings = mutants::check();
    let all = files::all();
    cycles::check(&all, &mut findings);
    metric_names::check(&all, &mut findings);
    links::check_examples(&all, &mut findings);
    let installed = links::installed_pages().unwrap_or_else(|error| {
        findings.push(format!("make installed-pages: {error}"));
        Vec::new()
    });
    for file in all {
        locks(&file, &mut findings);
        machine_paths(&file, &mut findings);
        if is_source(&file) && !GENERATED.contains(&file.path.as_str()) {
            length(&file, &mut findings);
            left_overs(&file, &mut findings);
            one_processor(&file, &mut findings);
        }
        if file.extension() == "rs" {
            unsafe_address(&file, &mut findings);
            forbids_unsafe(&file, &mut findings);
            names(&file, &mut findings);
            vector_forms(&file, &mut findings);
        }
        if UNSAFE_DOCUMENTS.contains(&file.path.as_str()) {
            unsafe_document(&file, &mut findings);
        }
        words::check(&file, &mut findings);
        // Notes are parts of docs/benchmarks.md.
        if file.extension() == "md" && !file.path.ends_with("/note.md") {
            links::check(&file, &mut findings);
            links::check_installed(&file, &installed, &mut findings);
        }
    }
    findings
}

fn is_source(file: &File) -> bool {
    ["rs", "h", "c", "cpp", "cu", "cuh", "py", "sh", "inc"].contains(&file.extension())
}

fn is_test(file: &File) -> bool {
    file.path.contains("/tests/")
}

fn length(file: &File, findings: &mut Findings) {
    let (all, code) = (file.text.lines().count(), lines_without_tests(&file.text));
    if code > LINES_MAX && !is_test(file) {
        findings.push(format!("{}: {code} lines of code, at most {LINES_MAX}", file.path));
    } else if all > LINES_MAX_HARD {
        findings.push(format!("{}: {all} lines with tests, at most {LINES_MAX_HARD}", file.path));
    }
}

/// No message waits for a lock: every lock on the data path must be listed with its purpose.
fn locks(file: &File, findings: &mut Findings) {
    if file.extension() != "rs" || !DATA_PATH.iter().any(|folder| file.path.starts_with(folder)) {
        return;
    }
    let code = file.text.lines().take(lines_without_tests(&file.text)).map(code_of);
    let taken = code.map(|line| locks_of(&line)).sum::<usize>();
    let known =
        LOCKS.iter().find(|(path, ..)| *path == file.path).map_or(0, |(_, count, _)| *count);
    if taken != known {
        findings.push(format!(
            "{}: takes {taken} locks, expected {known}: add the purpose to LOCKS in xtask/src/tidy.rs",
            file.path
        ));
    }
}

/// Number of locks that a line of code takes; kinds of locks that are not allowed count too.
fn locks_of(line: &str) -> usize {
    let within_a_word = |at: usize| line[..at].ends_with(|c: char| c.is_alphanumeric() || c == '_');
    let taken = line.match_indices("lock(").filter(|(at, _)| !within_a_word(*at)).count();
    let others = ["RwLock", "Condvar", "Barrier"]
        .map(|kind| line.match_indices(kind).filter(|(at, _)| !within_a_word(*at)).count());
    taken + others.iter().sum::<usize>()
}

/// Marks of unfinished code. (Concatenated, so that this file passes the check itself.)
fn left_overs(file: &File, findings: &mut Findings) {
    let marks = [concat!("FIX", "ME"), concat!("todo", "!("), concat!("unimplemented", "!(")];
    for (line, text) in file.text.lines().enumerate() {
        if let Some(mark) = marks.iter().find(|mark| text.contains(*mark)) {
            findings.push(format!("{}: {mark}", file.at(line)));
        }
    }
}

/// Paths of a particular machine.
fn machine_paths(file: &File, findings: &mut Findings) {
    let paths = [concat!("/wo", "rk/"), concat!("/ro", "ot/"), concat!("/ho", "me/")];
    for (line, text) in file.text.lines().enumerate() {
        for path in paths {
            let starts_here = |at: usize| {
                let before = text[..at].chars().next_back();
                before.is_none_or(|c| !c.is_alphanumeric() && !"._-/}".contains(c))
            };
            if text.match_indices(path).any(|(at, _)| starts_here(at)) {
                findings.push(format!("{}: a path of one machine, {path}", file.at(line)));
            }
        }
    }
}

/// The line without its strings and its comment; an approximation that suffices for finding words.
fn code_of(line: &str) -> String {
    let unescaped = line.replace("\\\"", "").replace("'\"'", "");
    let outside: Vec<&str> = unescaped.split('"').step_by(2).collect();
    let mut code = outside.join(" ");
    code.truncate(code.find("//").unwrap_or(code.len()));
    code
}

fn tokens(text: &str) -> impl Iterator<Item = &str> {
    text.split(|c: char| !c.is_alphanumeric() && c != '_').filter(|word| !word.is_empty())
}

/// Marks of code for one processor architecture, and the conditions that must precede them.
const PROCESSOR_MARKS: &[&str] =
    &["arch::x86_64", "is_x86_feature_detected", "asm!", "_mm_", "immintrin.h"];
const PROCESSOR_CONDITIONS: &[&str] = &["target_arch = \"x86_64\"", "__x86_64__"];
/// Maximum distance of a condition above its mark, in lines.
const CONDITION_LINES: usize = 30;

/// Code for one architecture must be conditional. The build for aarch64 shows that there is code for other ones.
fn one_processor(file: &File, findings: &mut Findings) {
    let lines: Vec<&str> = file.text.lines().collect();
    let whole = |line: &&str| line.starts_with("#![cfg(") && line.contains(PROCESSOR_CONDITIONS[0]);
    if lines.iter().any(whole) {
        return;
    }
    for (line, text) in lines.iter().enumerate() {
        let code = code_of(text);
        let Some(mark) = PROCESSOR_MARKS.iter().find(|mark| code.contains(**mark)) else {
            continue;
        };
        let above = &lines[line.saturating_sub(CONDITION_LINES)..=line];
        if !above.iter().any(|text| PROCESSOR_CONDITIONS.iter().any(|c| text.contains(c))) {
            findings
                .push(format!("{}: {mark} without a condition on the architecture", file.at(line)));
        }
    }
}

/// Vector register moves in their SSE form, and the prefix of the AVX forms, which processors without AVX do not
/// support.
const VECTOR_MOVES: &[&str] =
    &["movdqa ", "movdqu ", "movups ", "movaps ", "movupd ", "movapd ", "movntdq ", "vmov"];

/// In a program built for AVX an SSE instruction in inline assembly costs hundreds of cycles, which no functional test
/// shows: `vector!` emits the form that matches the build.
fn vector_forms(file: &File, findings: &mut Findings) {
    for (line, text) in file.text.lines().enumerate() {
        let is_bare = |mark: &str| {
            let quoted = format!("\"{mark}");
            text.match_indices(&quoted).any(|(at, _)| !text[..at].ends_with("vector!("))
        };
        if VECTOR_MOVES.iter().any(|mark| is_bare(mark)) && file.path != "xtask/src/tidy.rs" {
            findings.push(format!("{}: vector registers are used without vector!", file.at(line)));
        }
    }
}

fn unsafe_address(file: &File, findings: &mut Findings) {
    if UNSAFE_PATHS.iter().any(|path| file.path.starts_with(path)) {
        return;
    }
    for (line, text) in file.text.lines().enumerate() {
        if tokens(&code_of(text)).any(|word| word == "unsafe") {
            let paths = UNSAFE_PATHS.join(", ");
            findings.push(format!("{}: unsafe code is allowed only in {paths}", file.at(line)));
        }
    }
}

/// A crate outside of the list forbids unsafe code, so that no macro brings it in. One that contains a file of the list
/// denies it, and that file allows it.
fn forbids_unsafe(file: &File, findings: &mut Findings) {
    let is_listed = || UNSAFE_PATHS.iter().any(|path| file.path.starts_with(path));
    let Some(folder) = file.path.strip_suffix("lib.rs").filter(|_| !is_listed()) else {
        return;
    };
    let level = match UNSAFE_PATHS.iter().any(|path| path.starts_with(folder)) {
        true => "#![deny(unsafe_code)]",
        false => "#![forbid(unsafe_code)]",
    };
    if folder.ends_with("src/") && !file.text.contains(level) {
        findings.push(format!("{}: {level} is missing", file.path));
    }
}

/// A document that says where unsafe code is allowed names what [`UNSAFE_PATHS`] has, and nothing else.
fn unsafe_document(file: &File, findings: &mut Findings) {
    let Some((line, text)) =
        file.text.lines().enumerate().find(|(_, text)| text.contains(UNSAFE_MARK))
    else {
        findings.push(format!("{}: no line with {UNSAFE_MARK}", file.path));
        return;
    };
    let named: Vec<&str> =
        text.split('`').skip(1).step_by(2).filter(|name| name.contains('/')).collect();
    for path in UNSAFE_PATHS.iter().filter(|path| !named.contains(*path)) {
        findings.push(format!("{}: unsafe code is allowed in {path} too", file.at(line)));
    }
    for name in named.iter().filter(|name| !UNSAFE_PATHS.contains(name)) {
        findings.push(format!("{}: unsafe code is not allowed in {name}", file.at(line)));
    }
}

/// Checks names of types, modules and functions where they are defined.
fn names(file: &File, findings: &mut Findings) {
    for (line, text) in file.text.lines().enumerate() {
        let code = code_of(text);
        let mut tokens = tokens(&code).skip_while(|word| {
            ["pub", "crate", "super", "in", "const", "async", "unsafe", "extern", "C"]
                .contains(word)
        });
        let Some(kind) = tokens.next() else { continue };
        if !["struct", "enum", "trait", "type", "mod", "fn"].contains(&kind) {
            continue;
        }
        let Some(name) = tokens.next() else { continue };
        if let Some(problem) = banned(kind, name) {
            findings.push(format!("{}: {kind} {name}: {problem}", file.at(line)));
        }
    }
}

fn banned(kind: &str, name: &str) -> Option<String> {
    if kind == "fn" && name.starts_with("get_") {
        return Some("name it after the value it returns, without get_".to_owned());
    }
    if kind == "fn" {
        return None;
    }
    let word = parts(name).into_iter().find(|part| BANNED_WORDS.contains(&part.as_str()))?;
    Some(format!("{word:?} carries no information; use a specific name"))
}

/// The words of a name in snake or camel case, in lower case.
fn parts(name: &str) -> Vec<String> {
    let mut parts = vec![String::new()];
    for c in name.chars() {
        if c == '_' || c.is_uppercase() {
            parts.push(String::new());
        }
        if c != '_' {
            parts.last_mut().expect("never empty").extend(c.to_lowercase());
        }
    }
    parts.retain(|part| !part.is_empty());
    parts
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(path: &str, text: &str) -> File {
        File { path: path.to_owned(), text: text.to_owned() }
    }

    fn found(check: fn(&File, &mut Findings), path: &str, text: &str) -> usize {
        let mut findings = Vec::new();
        check(&file(path, text), &mut findings);
        findings.len()
    }

    #[test]
    fn tests_do_not_count_as_code() {
        let text =
            format!("{}#[cfg(test)]\nmod tests {{\n{}}}\n", "x\n".repeat(800), "y\n".repeat(50));
        assert_eq!(found(length, "crates/a/src/b.rs", &text), 0);
        assert_eq!(found(length, "crates/a/src/b.rs", &format!("x\n{text}")), 1);
        assert_eq!(found(length, "crates/a/tests/b.rs", &"x\n".repeat(900)), 0);
        assert_eq!(found(length, "crates/a/tests/b.rs", &"x\n".repeat(901)), 1);
    }

    #[test]
    fn names_are_checked_word_by_word() {
        assert_eq!(found(names, "a.rs", "pub(crate) struct RingHelper;"), 1);
        assert_eq!(found(names, "a.rs", "    pub fn get_ring(&self) {"), 1);
        assert_eq!(found(names, "a.rs", "enum OnPathData {"), 1);
        assert_eq!(found(names, "a.rs", "struct Datagram; // data"), 0);
        assert_eq!(found(names, "a.rs", "mod information {"), 0);
        assert_eq!(found(names, "a.rs", "let data = get_it();"), 0);
    }

    #[test]
    fn unsafe_code_has_an_address() {
        assert_eq!(found(unsafe_address, "crates/wire/src/a.rs", "unsafe { x() }"), 1);
        assert_eq!(found(unsafe_address, "crates/mqueue/src/a.rs", "unsafe { x() }"), 0);
        assert_eq!(found(unsafe_address, "crates/wire/src/a.rs", "#![forbid(unsafe_code)]"), 0);
        assert_eq!(found(unsafe_address, "crates/wire/src/a.rs", "// unsafe is not needed"), 0);
        assert_eq!(found(unsafe_address, "crates/wire/src/a.rs", "say(\"unsafe\");"), 0);
        assert_eq!(found(unsafe_address, "crates/wire/src/a.rs", "say(\"x\"); unsafe { x() }"), 1);
    }

    #[test]
    fn crates_forbid_unsafe_code() {
        let (forbid, deny) = ("#![forbid(unsafe_code)]", "#![deny(unsafe_code)]");
        assert_eq!(found(forbids_unsafe, "crates/wire/src/lib.rs", forbid), 0);
        assert_eq!(found(forbids_unsafe, "crates/wire/src/lib.rs", deny), 1);
        assert_eq!(found(forbids_unsafe, "crates/onpath/src/lib.rs", deny), 0);
        assert_eq!(found(forbids_unsafe, "crates/mqueue/src/lib.rs", ""), 0);
        assert_eq!(found(forbids_unsafe, "crates/wire/src/token.rs", ""), 0);
    }

    #[test]
    fn documents_name_where_unsafe_code_is() {
        let all = UNSAFE_PATHS.iter().map(|path| format!("`{path}`")).collect::<Vec<_>>();
        let line = |paths: &[String]| format!("# A\n{} {UNSAFE_MARK}\n", paths.join(", "));
        assert_eq!(found(unsafe_document, "a.md", &line(&all)), 0);
        assert_eq!(found(unsafe_document, "a.md", &line(&all[1..])), 1);
        let one_more = [&all[..], &["`crates/wire/`".to_owned()]].concat();
        assert_eq!(found(unsafe_document, "a.md", &line(&one_more)), 1);
        assert_eq!(found(unsafe_document, "a.md", "`crates/mqueue/`"), 1);
    }

    #[test]
    fn code_for_one_processor_has_its_condition() {
        let found = |text: &str| {
            let mut findings = Findings::new();
            let file = File { path: "crates/x/src/x.rs".to_owned(), text: text.to_owned() };
            one_processor(&file, &mut findings);
            findings.len()
        };
        let call = concat!("core::arch::", "x86_64::thing();");
        assert_eq!(found(call), 1);
        assert_eq!(found(&format!("// {call}")), 0);
        assert_eq!(found(&format!("#[cfg(target_arch = \"x86_64\")]\n{call}")), 0);
    }

    #[test]
    fn vector_registers_are_used_in_the_form_of_the_program() {
        let line = format!("\"{}{{a}}, [{{from}}]\",", VECTOR_MOVES[2]);
        assert_eq!(found(vector_forms, "a.rs", &line), 1);
        assert_eq!(found(vector_forms, "a.rs", &format!("vector!({line})")), 0);
        assert_eq!(found(vector_forms, "a.rs", &format!("vector!({line}), {line}")), 1);
        assert_eq!(found(vector_forms, "a.rs", &line.replace("mov", "vmov")), 1);
    }

    #[test]
    fn locks_are_counted() {
        for (line, count) in [
            ("let x = words.block(3); self.clock();", 0),
            ("link.ended.lock().unwrap().push(lock(&a));", 2),
            ("fn lock<T>(mutex: &Mutex<T>)", 0),
            ("state: RwLock<u32>,", 1),
            ("barrier: DrainBarrier,", 0),
        ] {
            assert_eq!(locks_of(line), count, "{line}");
        }
        let file = |path: &str| File { path: path.to_owned(), text: "a.lock();\n".to_owned() };
        let found = |path: &str| {
            let mut findings = Findings::new();
            locks(&file(path), &mut findings);
            findings.len()
        };
        assert_eq!(found("crates/engine/src/depart.rs"), 1);
        assert_eq!(found("crates/server/src/server.rs"), 0);
    }

    #[test]
    fn machine_paths_are_found_at_their_start() {
        let path = concat!("/wo", "rk/");
        assert_eq!(found(machine_paths, "a.md", &format!("see {path}shared")), 1);
        assert_eq!(found(machine_paths, "a.md", &format!("home{path}shared")), 0);
    }
}
