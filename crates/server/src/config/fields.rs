//! Keys whose values go straight into fields: reads, checks and records them as their rows in `keys.rs` say.

use super::keys::{Setter, Target, fields};
use super::reader::{Report, Section};

/// Reads all these keys.
pub(super) fn read_fields<T: Target>(
    report: &mut Report<'_>,
    section: &mut Section<'_>,
    to: &mut T,
) {
    read_some(report, section, to, |_| true);
}

/// Reads those of these keys that `wanted` says.
pub(super) fn read_some<T: Target>(
    report: &mut Report<'_>,
    section: &mut Section<'_>,
    to: &mut T,
    wanted: impl Fn(&str) -> bool,
) {
    for (key, setter) in fields::<T>().filter(|(key, _)| wanted(key.name)) {
        read(setter, report, section, key.name, to);
    }
}

/// Reads a key into its field, which contains the default.
fn read<T>(
    setter: &Setter<T>,
    report: &mut Report<'_>,
    section: &mut Section<'_>,
    key: &'static str,
    to: &mut T,
) {
    match setter {
        Setter::Integer { range, number, .. } => {
            let number = number(to);
            let value = section.integer(report, key, range.clone(), number.value());
            number.set(value);
        }
        Setter::Boolean(field) => {
            let field = field(to);
            *field = section.boolean(report, key, *field);
        }
        Setter::Word(field) => {
            let field = field(to);
            let place = section.choice(report, key, &field.words(), field.word());
            field.choose(place);
        }
    }
}
