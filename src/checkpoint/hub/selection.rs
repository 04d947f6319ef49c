//! Which files of a repository make the checkpoint that a name means, and no others.

use super::groups::{choices, chosen, groups, Group};
use crate::checkpoint::sidecar::SidecarFiles;
use std::path::{Path, PathBuf};

/// The index of safetensors in several files.
pub(super) const INDEX: &str = "model.safetensors.index.json";

/// The rest of a UQFF model, beside its shards.
const RESIDUAL: &str = "residual.safetensors";

/// The files of one checkpoint.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Selection {
    /// Config, tokenizer and the like.
    pub companions: Vec<String>,
    /// Files of weights; if there is an index, those that it lists, which are not here.
    pub weights: Vec<String>,
    pub has_index: bool,
    /// The file that is opened; `None` for the folder.
    pub opens: Option<String>,
}

impl Selection {
    /// What is opened, if the files are in this folder.
    pub fn place(&self, folder: &Path) -> PathBuf {
        match &self.opens {
            Some(file) => file.split('/').fold(folder.to_owned(), |path, part| path.join(part)),
            None => folder.to_owned(),
        }
    }
}

/// Why there is no such checkpoint: what is wrong, and how to go on.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Unfit {
    pub problem: String,
    pub remedy: String,
    /// Whether there are several.
    pub is_ambiguous: bool,
}

/// The checkpoint among these files: the model that is chosen, or else safetensors, or else the only other model.
pub(super) fn select(files: &[String], choice: Option<&str>) -> Result<Selection, Unfit> {
    let groups = groups(files);
    let has = |name: &str| files.iter().any(|file| file == name);
    let is_model =
        |file: &&String| file.starts_with("model") && file.ends_with(".safetensors") && !file.contains('/');
    let safetensors: Vec<String> = files.iter().filter(is_model).cloned().collect();
    let has_index = has(INDEX) && choice.is_none();
    let candidates = match choice {
        Some(choice) => chosen(&groups, choice),
        None if has_index || !safetensors.is_empty() => vec![],
        None => groups.iter().collect(),
    };
    let is_companion = |file: &&String| SidecarFiles::is_companion(file);
    let companions = || files.iter().filter(is_companion).cloned();
    let group = match (candidates.as_slice(), choice) {
        ([group], _) => group,
        ([], None) if has_index => {
            return Ok(Selection {
                companions: companions().collect(),
                weights: vec![],
                has_index,
                opens: None,
            });
        }
        ([], None) if !safetensors.is_empty() => {
            complete(&safetensors)?;
            return Ok(Selection {
                companions: companions().collect(),
                weights: safetensors,
                has_index,
                opens: None,
            });
        }
        ([], _) if groups.is_empty() => return Err(no_weights(files, choice)),
        ([], _) => return Err(several(&format!("no `{}`", choice.unwrap_or_default()), &groups)),
        (many, Some(choice)) => return Err(several(&format!("{} times `{choice}`", many.len()), &groups)),
        (many, None) => return Err(several(&format!("{} models", many.len()), &groups)),
    };
    if let Some(missing) = group.missing() {
        return Err(incomplete(&missing));
    }
    let mut weights = group.files.clone();
    let mut companions: Vec<String> = companions().filter(|file| file != INDEX).collect();
    if group.is_uqff {
        weights.extend(has(RESIDUAL).then(|| RESIDUAL.to_owned()));
    } else {
        companions.retain(|file| file != "uqff_report.json");
    }
    Ok(Selection { companions, opens: weights.first().cloned(), weights, has_index: false })
}

/// What every model of a repository is chosen by; `None` for safetensors.
pub(super) fn all(files: &[String]) -> Vec<Option<String>> {
    let groups = groups(files);
    let names = choices(&groups).into_iter().map(|choice| Some(choice.to_owned()));
    std::iter::once(None).chain(names).collect()
}

/// Refuses files of which the names say that others belong to them.
fn complete(files: &[String]) -> Result<(), Unfit> {
    for file in files {
        let count = file.strip_suffix(".safetensors").and_then(|stem| {
            let (rest, count) = stem.rsplit_once("-of-")?;
            let (prefix, _) = rest.rsplit_once('-')?;
            Some((prefix, count, count.parse::<usize>().ok()?))
        });
        let Some((prefix, width, count)) = count else { continue };
        let width = width.len();
        let name = |number: usize| format!("{prefix}-{number:0width$}-of-{count:0width$}.safetensors");
        if let Some(missing) = (1..=count.min(files.len() + 1)).map(name).find(|name| !files.contains(name)) {
            return Err(incomplete(&missing));
        }
    }
    Ok(())
}

/// An error of a file that others say is there.
pub(super) fn incomplete(missing: &str) -> Unfit {
    let problem = format!("`{missing}` is missing in the repository");
    Unfit { problem, remedy: "tell its owner, or take another repository".into(), is_ambiguous: false }
}

fn several(problem: &str, groups: &[Group]) -> Unfit {
    let choices: Vec<_> = choices(groups).into_iter().map(|choice| format!(":{choice}")).collect();
    Unfit {
        problem: format!("{problem}; it has {}", choices.join(", ")),
        remedy: "write one of these behind the name".into(),
        is_ambiguous: true,
    }
}

fn no_weights(files: &[String], choice: Option<&str>) -> Unfit {
    let what = match choice {
        Some(choice) => format!("no `{choice}`, for no GGUF or UQFF files"),
        None => "no safetensors, GGUF or UQFF files of a model".into(),
    };
    let is_other = |file: &&String| {
        [".bin", ".pth", ".pt", ".safetensors", ".onnx", ".npz"].iter().any(|end| file.ends_with(end))
    };
    let found = match files.iter().find(is_other) {
        Some(other) if choice.is_none() => format!("{what}, but `{other}`"),
        _ => what,
    };
    Unfit { problem: found, remedy: "take another repository of this model".into(), is_ambiguous: false }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn files(names: &str) -> Vec<String> {
        names.split_whitespace().map(str::to_owned).collect()
    }

    fn selected(names: &str, choice: Option<&str>) -> (Vec<String>, Option<String>) {
        let selection = select(&files(names), choice).unwrap_or_else(|error| panic!("{names}: {error:?}"));
        (selection.companions.into_iter().chain(selection.weights).collect(), selection.opens)
    }

    fn refused(names: &str, choice: Option<&str>) -> String {
        let Unfit { problem, remedy, .. } = select(&files(names), choice).unwrap_err();
        format!("{problem}; {remedy}")
    }

    #[test]
    fn of_safetensors_no_duplicates() {
        let names = "README.md LICENSE .gitattributes config.json tokenizer.json original/consolidated.00.pth \
            consolidated.safetensors onnx/model.onnx pytorch_model.bin pytorch_model.bin.index.json tokenizer.model \
            metal/model.bin model.safetensors modeling_x.py chat_template.jinja trainer_state.json sub/config.json";
        let expected = "config.json tokenizer.json tokenizer.model chat_template.jinja model.safetensors";
        assert_eq!(selected(names, None), (files(expected), None));
        let names = "config.json model.safetensors.index.json model-00001-of-00002.safetensors";
        let selection = select(&files(names), None).unwrap();
        assert!(selection.has_index && selection.weights.is_empty(), "{selection:?}");
        assert_eq!(selection.companions, files("config.json model.safetensors.index.json"));
        // Without an index, names say how many there are.
        let names = "model-00001-of-00002.safetensors model-00002-of-00002.safetensors";
        assert_eq!(selected(names, None), (files(names), None));
        let text = refused("model-00001-of-00002.safetensors", None);
        assert!(text.contains("`model-00002-of-00002.safetensors` is missing"), "{text}");
        let text = refused("config.json pytorch_model.bin", None);
        assert!(
            text.starts_with("no safetensors, GGUF or UQFF files of a model, but `pytorch_model.bin`"),
            "{text}"
        );
    }

    const GGUF: &str = "README.md config.json Qwen3-4B-Q4_K_M.gguf Qwen3-4B-Q4_K_S.gguf Qwen3-4B-Q4_K.gguf \
        Qwen3-4B-IQ4_XS.gguf Qwen3-4B-BF16.gguf mmproj-F16.gguf imatrix_unsloth.gguf Qwen3-4B-UD-Q4_K_XL.gguf \
        Q8_0/Qwen3-4B-Q8_0-00001-of-00002.gguf Q8_0/Qwen3-4B-Q8_0-00002-of-00002.gguf";

    #[test]
    fn a_choice_is_one_gguf_model() {
        for (choice, file) in [
            ("Q4_K_M", "Qwen3-4B-Q4_K_M.gguf"),
            ("q4_k_s", "Qwen3-4B-Q4_K_S.gguf"),
            ("Q4_K", "Qwen3-4B-Q4_K.gguf"),
            ("iq4_xs", "Qwen3-4B-IQ4_XS.gguf"),
            ("bf16", "Qwen3-4B-BF16.gguf"),
            ("UD-Q4_K_XL", "Qwen3-4B-UD-Q4_K_XL.gguf"),
            ("Q4_K_XL", "Qwen3-4B-UD-Q4_K_XL.gguf"),
            ("qwen3-4b-q4_k_m", "Qwen3-4B-Q4_K_M.gguf"),
            ("Qwen3-4B-Q4_K_M.gguf", "Qwen3-4B-Q4_K_M.gguf"),
        ] {
            let expected = (files(&format!("config.json {file}")), Some(file.to_owned()));
            assert_eq!(selected(GGUF, Some(choice)), expected, "{choice}");
        }
        let parts = "Q8_0/Qwen3-4B-Q8_0-00001-of-00002.gguf Q8_0/Qwen3-4B-Q8_0-00002-of-00002.gguf";
        let (found, opens) = selected(GGUF, Some("q8_0"));
        assert_eq!((found, opens), (files(&format!("config.json {parts}")), Some(files(parts)[0].clone())));
        let list = "it has :Q8_0, :BF16, :IQ4_XS, :Q4_K, :Q4_K_M, :Q4_K_S, :UD-Q4_K_XL; write one of these";
        for (choice, problem) in [
            (None, "7 models; "),
            (Some("Q2_K"), "no `Q2_K`; "),
            (Some("4B"), "7 times `4B`; "),
            (Some("Q4"), "no `Q4`; "),
            (Some("0"), "no `0`; "),
        ] {
            let text = refused(GGUF, choice);
            assert!(text.starts_with(problem) && text.contains(list), "{choice:?}: {text}");
        }
        let text = refused("x-Q8_0-00001-of-00003.gguf x-Q8_0-00003-of-00003.gguf", None);
        assert!(text.contains("`x-Q8_0-00002-of-00003.gguf` is missing"), "{text}");
        assert_eq!(selected("mmproj.gguf m.Q4_0.gguf", None).1.as_deref(), Some("m.Q4_0.gguf"));
        // Two of one quantization are chosen by their names.
        let text = refused("a-Q4_0.gguf b-Q4_0.gguf c-Q8_0.gguf", Some("Q4_0"));
        assert!(text.starts_with("2 times `Q4_0`; it has :a-Q4_0, :b-Q4_0, :Q8_0;"), "{text}");
        assert_eq!(selected("a-Q4_0.gguf b-Q4_0.gguf", Some("b-q4_0")).1.as_deref(), Some("b-Q4_0.gguf"));
        // What is not chosen is not GGUF, if there are safetensors.
        assert_eq!(selected("model.safetensors m-Q4_0.gguf", None), (files("model.safetensors"), None));
        assert!(refused("model.safetensors", Some("Q4_0")).starts_with("no `Q4_0`, for no GGUF"));
    }

    #[test]
    fn uqff_has_shards_and_a_residual() {
        let names =
            "config.json residual.safetensors tokenizer.json m-afq4-0.uqff m-afq4-1.uqff m-afq8-0.uqff";
        let expected = "config.json tokenizer.json m-afq4-0.uqff m-afq4-1.uqff residual.safetensors";
        assert_eq!(selected(names, Some("AFQ4")), (files(expected), Some("m-afq4-0.uqff".into())));
        assert!(refused(names, None).starts_with("2 models; it has :afq4, :afq8;"));
        let text = refused("m-afq4-0.uqff m-afq4-2.uqff", None);
        assert!(text.contains("`m-afq4-1.uqff` is missing"), "{text}");
        assert_eq!(selected("q4k.uqff residual.safetensors", None).1.as_deref(), Some("q4k.uqff"));
    }

    #[test]
    fn every_model_has_a_choice() {
        let of = |names: &str| {
            let choice = |choice: Option<String>| choice.unwrap_or_else(|| "-".into());
            all(&files(names)).into_iter().map(choice).collect::<Vec<_>>().join(" ")
        };
        assert_eq!(of("model.safetensors x-q4_0.gguf other.gguf"), "- other q4_0");
        assert_eq!(of("m-afq4-0.uqff m.uqff"), "- m afq4");
    }
}
