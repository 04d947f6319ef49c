//! `tokenizer.json`, and what else lies beside weights and is read before text is generated.

use super::{folder_of, smallest, Seeds};
use crate::{tokenizers, Bundle};
use candle_quant::Checkpoint;
use candle_quant_tools::verify::verify_path;

pub(super) fn seeds(_: &str) -> Seeds {
    let seed = |(number, (name, json)): (usize, (&str, serde_json::Value))| {
        let bundle = super::bundle([(name, json.to_string().as_bytes())]);
        (format!("{number}-{name}"), bundle)
    };
    tokenizers::companions().into_iter().enumerate().map(seed).collect()
}

/// What `verify` passes can be used.
pub(super) fn run(bundle: &Bundle) -> bool {
    let folder =
        folder_of(&Bundle { files: [vec![smallest()], bundle.files.clone()].concat(), ..Bundle::default() });
    let report = verify_path(folder.path());
    let _ = report.to_string();
    let Ok(checkpoint) = Checkpoint::open(folder.path()) else { return false };
    let used = tokenizers::use_all(&checkpoint);
    // Some fail at the first use only.
    assert!(used.is_err() || report.passed(false), "{report}");
    used.is_ok()
}
