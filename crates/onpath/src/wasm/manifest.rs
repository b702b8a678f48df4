//! The manifest of a module: who it is, and how its state lives. It is a TOML document in the custom section `serval.manifest` of the
//! module, so the module is one file, and who pins or signs that file pins or signs the manifest with it.
//!
//! A module without a manifest has a state that can be merged, as its registers say.

use toml::{Table, Value};

use crate::module_limits::{HEADER, Section, read_number, sections};
use crate::spec::is_name;
use crate::state::{Key, StateKind};

/// The custom section that holds it.
const SECTION: &str = "serval.manifest";
/// Longest text of a manifest, in bytes.
const TEXT_BYTES_MAX: usize = 16 << 10;
const VERSION_BYTES_MAX: usize = 32;
const SUMMARY_BYTES_MAX: usize = 200;
/// The greatest offset and length of a key.
const KEY_OFFSET_MAX: u32 = 65_535;
const KEY_LENGTH_MAX: u32 = 256;

/// See the module's text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Manifest {
    /// The name of the function.
    pub name: String,
    /// Its version: letters, digits, `.`, `-` and `+`.
    pub version: String,
    /// What it does, one sentence.
    pub summary: String,
    /// How its state lives.
    pub state: StateKind,
}

impl Manifest {
    /// Reads a document. The error says what is wrong and what would be right.
    pub fn parse(text: &str) -> Result<Self, String> {
        Self::of_table(&read_table(text)?)
    }

    /// The same for a document that was read, such as that of a project without what is not in the module.
    pub fn of_table(table: &Table) -> Result<Self, String> {
        let keys = ["name", "version", "summary", "state", "key"];
        if let Some(key) = table.keys().find(|key| !keys.contains(&key.as_str())) {
            return Err(format!("the manifest has no key {key:?}: it has {}", keys.join(", ")));
        }
        let text = |key: &str| match table.get(key) {
            None => Ok(""),
            Some(Value::String(text)) => Ok(text.as_str()),
            Some(_) => Err(format!("`{key}` of the manifest is a text in quotes")),
        };
        let (name, version, summary) = (text("name")?, text("version")?, text("summary")?);
        if !is_name(name) {
            let right = "1 to 64 letters, digits, `_` and `-`, and no `-` at the beginning";
            return Err(format!("`name` of the manifest is {name:?}: it has {right}"));
        }
        let letter = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '+');
        if !(1..=VERSION_BYTES_MAX).contains(&version.len()) || !version.chars().all(letter) {
            let right = format!("1 to {VERSION_BYTES_MAX} letters, digits, `.`, `-` and `+`");
            return Err(format!("`version` of the manifest is {version:?}: it has {right}"));
        }
        if summary.len() > SUMMARY_BYTES_MAX || summary.chars().any(char::is_control) {
            let right = format!("one line of at most {SUMMARY_BYTES_MAX} bytes");
            return Err(format!("`summary` of the manifest is too long: it is {right}"));
        }
        let state = match (text("state")?, table.get("key")) {
            ("" | "mergeable", None) => StateKind::Mergeable,
            ("single", None) => StateKind::Single,
            ("by-key", Some(Value::Table(key))) => StateKind::ByKey(read_key(key)?),
            ("by-key", _) => {
                let right = "key = { offset = 0, length = 8 }";
                return Err(format!("the manifest has state = \"by-key\" and no key: add {right}"));
            }
            ("" | "mergeable" | "single", Some(_)) => {
                let right = "remove it, or write state = \"by-key\"";
                return Err(format!("`key` of the manifest has no meaning: {right}"));
            }
            (other, _) => {
                let right = "\"mergeable\", \"single\" or \"by-key\"";
                return Err(format!("`state` of the manifest is {other:?}: it is {right}"));
            }
        };
        let [name, version, summary] = [name, version, summary].map(str::to_owned);
        Ok(Self { name, version, summary, state })
    }

    /// The document.
    pub fn text(&self) -> String {
        let Self { name, version, summary, state } = self;
        // Without control characters only these two have an escape in TOML.
        let summary = summary.replace('\\', "\\\\").replace('"', "\\\"");
        let mut text =
            format!("name = \"{name}\"\nversion = \"{version}\"\nsummary = \"{summary}\"\n");
        text.push_str(&format!("state = \"{state}\"\n"));
        if let StateKind::ByKey(Key { offset, length }) = state {
            text.push_str(&format!("key = {{ offset = {offset}, length = {length} }}\n"));
        }
        text
    }

    /// The manifest of a module, if it has one. The rest of the module is not checked.
    pub fn of_module(module: &[u8]) -> Result<Option<Self>, String> {
        let mut found = None;
        for section in sections(module)? {
            let Some(text) = custom(&section, SECTION) else { continue };
            if found.is_some() {
                return Err("it has two manifests".to_owned());
            }
            let text = std::str::from_utf8(text);
            let text = text.map_err(|_| "its manifest is not UTF-8".to_owned())?;
            found = Some(Self::parse(text)?);
        }
        Ok(found)
    }

    /// A module with this manifest in place of the one that it has.
    pub fn put(&self, module: &[u8]) -> Result<Vec<u8>, String> {
        let mut put = HEADER.to_vec();
        for section in sections(module)? {
            if custom(&section, SECTION).is_none() {
                put.extend_from_slice(section.whole);
            }
        }
        let (name, text) = (SECTION.as_bytes(), self.text());
        put.push(0);
        write_number(&mut put, (1 + name.len() + text.len()) as u32);
        write_number(&mut put, name.len() as u32);
        put.extend_from_slice(name);
        put.extend_from_slice(text.as_bytes());
        Ok(put)
    }
}

/// Reads a TOML document of a manifest.
fn read_table(text: &str) -> Result<Table, String> {
    if text.len() > TEXT_BYTES_MAX {
        return Err(format!("the manifest has more than {TEXT_BYTES_MAX} bytes"));
    }
    text.parse::<Table>().map_err(|error| {
        let line = error.message().lines().next().unwrap_or_default().to_owned();
        format!("the manifest is no TOML: {}", super::printable(&line))
    })
}

fn read_key(table: &Table) -> Result<Key, String> {
    let right = format!(
        "key = {{ offset = 0 to {KEY_OFFSET_MAX}, length = 0 to {KEY_LENGTH_MAX} }}, where the length 0 is all that follows"
    );
    let number = |name: &str, most: u32| match table.get(name) {
        Some(Value::Integer(value)) => u32::try_from(*value).ok().filter(|value| *value <= most),
        None => Some(0),
        Some(_) => None,
    };
    let is_known = table.keys().all(|name| matches!(name.as_str(), "offset" | "length"));
    match (number("offset", KEY_OFFSET_MAX), number("length", KEY_LENGTH_MAX)) {
        (Some(offset), Some(length)) if is_known => Ok(Key { offset, length }),
        _ => Err(format!("`key` of the manifest is wrong: it is {right}")),
    }
}

/// What follows the name, if it is the custom section of that name.
fn custom<'a>(section: &Section<'a>, name: &str) -> Option<&'a [u8]> {
    if section.id != 0 {
        return None;
    }
    let (len, rest) = read_number(section.content)?;
    let found = rest.get(..len as usize)?;
    (found == name.as_bytes()).then(|| &rest[len as usize..])
}

fn write_number(to: &mut Vec<u8>, mut number: u32) {
    while number >= 0x80 {
        to.push(number as u8 | 0x80);
        number >>= 7;
    }
    to.push(number as u8);
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn module() -> Vec<u8> {
        wat::parse_str("(module (memory (export \"memory\") 1))").unwrap()
    }

    fn manifest(state: StateKind) -> Manifest {
        let [name, version, summary] = ["mine", "1.2.0", "drops \"all\" of it"].map(str::to_owned);
        Manifest { name, version, summary, state }
    }

    #[test]
    fn a_module_keeps_its_code_and_gets_one_manifest() {
        assert_eq!(Manifest::of_module(&module()), Ok(None));
        let by_key = StateKind::ByKey(Key { offset: 4, length: 16 });
        let mut with = module();
        for state in [StateKind::Mergeable, StateKind::Single, by_key] {
            with = manifest(state).put(&with).unwrap();
            assert_eq!(Manifest::of_module(&with), Ok(Some(manifest(state))));
            assert!(with.starts_with(&module()), "the code is as before");
        }
        let twice = [with.clone(), with[module().len()..].to_vec()].concat();
        assert_eq!(Manifest::of_module(&twice), Err("it has two manifests".to_owned()));
    }

    #[test]
    fn what_is_wrong_is_said_in_one_sentence() {
        let good = "name = \"a\"\nversion = \"1\"\n";
        assert_eq!(Manifest::parse(good).unwrap().state, StateKind::Mergeable);
        for (text, expected) in [
            ("name = 1", "`name` of the manifest is a text"),
            ("version = \"1\"", "`name` of the manifest is \"\""),
            ("name = \"../a\"\nversion = \"1\"", "`name` of the manifest is \"../a\""),
            ("name = \"a\"", "`version` of the manifest"),
            ("name = \"a\"\nversion = \"1/2\"", "`version` of the manifest"),
            ("name = \"a\"\nversion = \"1\"\nsummary = \"a\\nb\"", "`summary` of the manifest"),
            ("name = \"a\"\nversion = \"1\"\nstate = \"x\"", "`state` of the manifest is \"x\""),
            ("name = \"a\"\nversion = \"1\"\nstate = \"by-key\"", "and no key: add key ="),
            ("name = \"a\"\nversion = \"1\"\nkey = { offset = 1 }", "`key` of the manifest has no"),
            (
                "name = \"a\"\nversion = \"1\"\nstate = \"by-key\"\nkey = { offset = -1 }",
                "is wrong",
            ),
            ("name = \"a\"\nversion = \"1\"\nstate = \"by-key\"\nkey = { x = 1 }", "is wrong"),
            ("nmae = \"a\"", "no key \"nmae\""),
            ("name = ", "is no TOML"),
        ] {
            let error = Manifest::parse(text).unwrap_err();
            assert!(error.contains(expected) && !error.contains('\n'), "{text}: {error}");
        }
        assert!(Manifest::parse(&"#".repeat(TEXT_BYTES_MAX + 1)).is_err());
    }

    proptest! {
        #[test]
        fn any_bytes_are_read_without_a_panic(
            mut bytes in prop::collection::vec(any::<u8>(), 0..64),
            with_header: bool,
        ) {
            if with_header {
                bytes = [&HEADER[..], &bytes].concat();
            }
            if let Ok(put) = manifest(StateKind::Single).put(&bytes) {
                let own = Manifest::of_module(&bytes);
                prop_assert!(own.is_err() || own == Ok(None));
                prop_assert_eq!(Manifest::of_module(&put), Ok(Some(manifest(StateKind::Single))));
            }
        }

        #[test]
        fn numbers_are_read_as_they_are_written(number: u32, rest: Vec<u8>) {
            let mut bytes = Vec::new();
            write_number(&mut bytes, number);
            bytes.extend_from_slice(&rest);
            prop_assert_eq!(read_number(&bytes), Some((number, &rest[..])));
        }
    }
}
