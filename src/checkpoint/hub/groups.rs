//! GGUF and UQFF models among the files of a repository, and which one a choice means.
//!
//! A model may be in parts: `x-00001-of-00003.gguf`, `x-0.uqff`. What its quantization is called is told from its name.

use std::collections::BTreeMap;

/// One GGUF or UQFF model.
#[derive(Debug)]
pub(super) struct Group {
    /// The path without the number of a part, and without the ending.
    stem: String,
    /// All its files, the first part first.
    pub files: Vec<String>,
    /// How many parts the names of GGUF files say that there are.
    parts: Option<usize>,
    pub is_uqff: bool,
}

/// What all parts of a model have in common.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
struct Key<'f> {
    stem: &'f str,
    parts: Option<usize>,
    is_uqff: bool,
    is_numbered: bool,
}

/// The models that files of these names are.
pub(super) fn groups(files: &[String]) -> Vec<Group> {
    let mut groups: BTreeMap<Key<'_>, Vec<(usize, &String)>> = BTreeMap::new();
    for file in files {
        let name = file.rsplit('/').next().unwrap_or(file);
        // Projectors of images and matrices of importance are no models.
        let is_aside = name.starts_with("mmproj") || name.to_ascii_lowercase().contains("imatrix");
        let (key, number) = if let Some(stem) = file.strip_suffix(".gguf").filter(|_| !is_aside) {
            let (stem, number, parts) = gguf_part(stem);
            (Key { stem, parts, is_uqff: false, is_numbered: parts.is_some() }, number)
        } else if let Some(stem) = file.strip_suffix(".uqff").filter(|_| !file.contains('/')) {
            let (stem, number) = uqff_part(stem);
            let key = Key { stem, parts: None, is_uqff: true, is_numbered: number.is_some() };
            (key, number.unwrap_or(0))
        } else {
            continue;
        };
        groups.entry(key).or_default().push((number, file));
    }
    let group = |(Key { stem, parts, is_uqff, .. }, mut files): (Key<'_>, Vec<(usize, &String)>)| {
        files.sort();
        let files = files.into_iter().map(|(_, file)| file.clone()).collect();
        Group { stem: stem.to_owned(), files, parts, is_uqff }
    };
    groups.into_iter().map(group).collect()
}

/// `x-00002-of-00003`: `x`, 2, 3.
fn gguf_part(stem: &str) -> (&str, usize, Option<usize>) {
    let number = |digits: &str| digits.parse::<usize>().ok().filter(|_| digits.len() == 5);
    let part = stem.rsplit_once("-of-").and_then(|(rest, count)| {
        let (stem, first) = rest.rsplit_once('-')?;
        Some((stem, number(first)?, number(count)?))
    });
    part.map_or((stem, 1, None), |(stem, number, count)| (stem, number, Some(count)))
}

/// `x-0`: `x`, 0.
fn uqff_part(stem: &str) -> (&str, Option<usize>) {
    let number = |digits: &str| digits.parse::<usize>().ok().filter(|number| number.to_string() == digits);
    let part = stem.rsplit_once('-').and_then(|(stem, digits)| Some((stem, number(digits)?)));
    part.map_or((stem, None), |(stem, number)| (stem, Some(number)))
}

impl Group {
    /// The first part that should be there and is not.
    pub fn missing(&self) -> Option<String> {
        let Self { stem, files, parts, is_uqff } = self;
        let name = |index: usize| match (is_uqff, parts) {
            (true, _) => format!("{stem}-{index}.uqff"),
            (false, Some(count)) => format!("{stem}-{:05}-of-{count:05}.gguf", index + 1),
            (false, None) => format!("{stem}.gguf"),
        };
        let is_numbered = !is_uqff || *files != [format!("{stem}.uqff")];
        let expected = parts.unwrap_or(files.len()).min(files.len().saturating_add(1));
        (0..expected).map(name).find(|name| is_numbered && !files.contains(name))
    }

    /// The name of the model, without folders.
    fn name(&self) -> &str {
        self.stem.rsplit('/').next().unwrap_or(&self.stem)
    }

    /// What its name says of its quantization: `Q4_K_M`, `afq4`; all of the name, if that is nothing known.
    fn quant(&self) -> &str {
        let name = self.name();
        let mut end = name.len();
        while let Some(before) = name.get(..end) {
            let start = before.rfind(['-', '.']).map_or(0, |at| at + 1);
            if before.get(start..).is_some_and(is_quant) {
                // Unsloth's own mixtures are called UD-Q4_K_XL.
                let before = name.get(..start).unwrap_or_default();
                let start = if before.ends_with("UD-") { start - "UD-".len() } else { start };
                return name.get(start..end).unwrap_or(name);
            }
            if start == 0 {
                break;
            }
            end = start - 1;
        }
        name
    }

    fn matches(&self, choice: &str) -> bool {
        let stem = self.stem.to_ascii_lowercase();
        // Some write x_q4_0; of Q4_0 alone, 0 is no part.
        let parts = if is_quant(choice) { ['-', '.', '/', '_'] } else { ['-', '.', '/', '/'] };
        let is_begin = |char: Option<char>| char.is_none_or(|char| parts.contains(&char));
        let is_end = |char: Option<char>| char.is_none_or(|char| ['-', '.', '/'].contains(&char));
        stem.match_indices(choice).any(|(at, found)| {
            let (before, behind) = (stem.get(..at), stem.get(at + found.len()..));
            is_begin(before.and_then(|text| text.chars().next_back()))
                && is_end(behind.and_then(|text| text.chars().next()))
        })
    }
}

fn is_quant(word: &str) -> bool {
    let word = word.to_ascii_lowercase();
    let has_digit_behind = |prefix: &str| {
        word.strip_prefix(prefix).is_some_and(|rest| rest.starts_with(|char: char| char.is_ascii_digit()))
    };
    ["f16", "bf16", "f32", "fp8", "q8q8", "f8q8"].contains(&&*word)
        || ["q", "iq", "tq", "mxfp", "nvfp", "afq", "hqq"].into_iter().any(has_digit_behind)
}

/// How each of these models is chosen: by its quantization, or by its name if another one has the same.
pub(super) fn choices(groups: &[Group]) -> Vec<&str> {
    let quants: Vec<&str> = groups.iter().map(Group::quant).collect();
    let is_alone = |quant: &str| quants.iter().filter(|other| other.eq_ignore_ascii_case(quant)).count() == 1;
    let pairs = groups.iter().zip(&quants);
    pairs.map(|(group, quant)| if is_alone(quant) { *quant } else { group.name() }).collect()
}

/// The models that a choice means: one of exactly this name or quantization, or else those whose names have it in them.
pub(super) fn chosen<'g>(groups: &'g [Group], choice: &str) -> Vec<&'g Group> {
    let choice = choice.to_ascii_lowercase();
    let bare = choice.strip_suffix(".gguf").or_else(|| choice.strip_suffix(".uqff")).unwrap_or(&choice);
    let of = |is: &dyn Fn(&Group) -> bool| groups.iter().filter(|group| is(group)).collect::<Vec<_>>();
    let named = of(&|group| group.name().eq_ignore_ascii_case(bare));
    let quant = of(&|group| group.quant().eq_ignore_ascii_case(bare));
    [named, quant]
        .into_iter()
        .find(|found| !found.is_empty())
        .unwrap_or_else(|| of(&|group| group.matches(bare)))
}
