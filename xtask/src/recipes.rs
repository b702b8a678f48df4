//! The recipes of CONTRIBUTING.md ("Adding things"): each has a small example commit in
//! `xtask/recipes/`, which applies to the sources and touches exactly the files that the recipe's row
//! names. What `cargo xtask` generates is no part of it.

use std::collections::BTreeSet;

use crate::Findings;
use crate::files::{self, File, git};

const PAGE: &str = "CONTRIBUTING.md";
const HEADING: &str = "| recipe | files of the product | tests and documents |\n|---|---|---|\n";
const FOLDER: &str = "xtask/recipes/";
/// Files of the product that an addition may touch, with those that it makes.
const PRODUCT_FILES_MAX: &[(&str, usize)] =
    &[("framing", 4), ("drop reason", 4), ("stage", 3), ("digest", 3), ("endpoint", 4)];

/// A row of the table.
struct Recipe {
    name: String,
    product: BTreeSet<String>,
    others: BTreeSet<String>,
}

pub(crate) fn check() -> Findings {
    let all = files::all();
    let text = |path: &str| all.iter().find(|file| file.path == path).map(|file| &*file.text);
    let recipes = recipes(text(PAGE).unwrap_or_default());
    let mut findings = Vec::new();
    for (name, most) in PRODUCT_FILES_MAX {
        match recipes.iter().find(|recipe| recipe.name == *name) {
            None => findings.push(format!("{PAGE}: there is no recipe {name:?}")),
            Some(recipe) if recipe.product.len() > *most => findings.push(format!(
                "{PAGE}: the recipe {name:?} has {} files of the product, and {most} is the limit",
                recipe.product.len()
            )),
            Some(_) => {}
        }
    }
    let patches = all.iter().filter(|file| file.path.starts_with(FOLDER));
    let expected: BTreeSet<String> = recipes.iter().map(Recipe::patch).collect();
    for File { path, .. } in patches.clone().filter(|file| !expected.contains(&file.path)) {
        findings.push(format!("{path}: {PAGE} has no recipe for it"));
    }
    for recipe in &recipes {
        let path = recipe.patch();
        match patches.clone().find(|file| file.path == path) {
            None => findings.push(format!("{path} is missing: an example of {:?}", recipe.name)),
            Some(patch) => findings.extend(recipe.compare(&patch.text)),
        }
    }
    findings
}

/// The rows of the table.
fn recipes(page: &str) -> Vec<Recipe> {
    let rows = page.split_once(HEADING).map_or("", |(_, after)| after);
    let row = |line: &str| {
        let mut cells = line.trim_matches('|').split('|').map(str::trim);
        let name = cells.next()?.to_owned();
        let mut paths = || {
            let cell = cells.next().unwrap_or_default();
            cell.split('`').skip(1).step_by(2).map(str::to_owned).collect()
        };
        Some(Recipe { name, product: paths(), others: paths() })
    };
    rows.lines().take_while(|line| line.starts_with('|')).filter_map(row).collect()
}

impl Recipe {
    /// The path of the example.
    fn patch(&self) -> String {
        format!("{FOLDER}{}.patch", self.name.replace(' ', "_"))
    }

    /// What is wrong with the example.
    fn compare(&self, patch: &str) -> Findings {
        let path = self.patch();
        let mut findings = Vec::new();
        if let Err(why) = git(&["apply", "--check", &path]) {
            let why = why.lines().next().unwrap_or_default();
            findings.push(format!(
                "{path} does not apply ({why}): make it again for these sources, and correct the recipe in {PAGE}"
            ));
        }
        let touched: BTreeSet<&str> = touched(patch).collect();
        let mut named = self.product.union(&self.others);
        for file in &touched {
            if !named.clone().any(|name| is_named(name, file)) {
                findings.push(format!("{path} touches {file}, which the recipe does not name"));
            }
        }
        if let Some(name) = named.find(|name| !touched.iter().any(|file| is_named(name, file))) {
            findings.push(format!("{path} does not touch {name}, which the recipe names"));
        }
        findings
    }
}

/// The files that a patch changes or makes.
fn touched(patch: &str) -> impl Iterator<Item = &str> {
    patch.lines().filter_map(|line| line.strip_prefix("diff --git a/")?.split(" b/").next())
}

/// Whether a recipe's path, which may have NAME in the place of a new name, is this file.
fn is_named(name: &str, file: &str) -> bool {
    match name.split_once("NAME") {
        Some((before, after)) => {
            let new = file.strip_prefix(before).and_then(|rest| rest.strip_suffix(after));
            new.is_some_and(|new| !new.is_empty() && !new.contains('/'))
        }
        None => name == file,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_recipe_names_the_files_of_its_example() {
        let page = format!("text\n\n{HEADING}| a b | `x/y.rs`, `z/NAME.rs` | `docs/d.md` |\n\n");
        let [recipe] = &recipes(&page)[..] else { panic!("one row") };
        assert_eq!(recipe.patch(), "xtask/recipes/a_b.patch");
        let files = |files: &[&str]| -> String {
            files.iter().map(|file| format!("diff --git a/{file} b/{file}\n")).collect()
        };
        let wrong = |patch: &str| {
            let mut found = recipe.compare(patch);
            found.retain(|finding| !finding.contains("does not apply"));
            found
        };
        assert_eq!(wrong(&files(&["x/y.rs", "z/new.rs", "docs/d.md"])), [""; 0]);
        let more = wrong(&files(&["x/y.rs", "z/new.rs", "docs/d.md", "z/a/b.rs"]));
        assert!(more[0].contains("touches z/a/b.rs"), "{more:?}");
        let less = wrong(&files(&["x/y.rs", "docs/d.md"]));
        assert!(less[0].contains("does not touch z/NAME.rs"), "{less:?}");
    }
}
