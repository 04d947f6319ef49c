//! The lines that change.

use candle_quant::{Error, Result};
use std::path::Path;

/// One text that becomes another, wherever it stands in a file.
pub(super) struct Edit {
    pub file: &'static str,
    from: &'static str,
    to: &'static str,
    /// How often it stands there.
    count: usize,
}

impl Edit {
    const fn new(file: &'static str, count: usize, from: &'static str, to: &'static str) -> Self {
        Self { file, from, to, count }
    }

    /// The text of the file at `path`, edited.
    pub(super) fn apply(&self, path: &Path, text: &str) -> Result<String> {
        let found = text.matches(self.from).count();
        if found != self.count {
            let problem = format!("{:?} stands there {found} times, expected {}", self.from, self.count);
            return Err(Error::file(path, problem, "report it: the package is of another version"));
        }
        Ok(text.replace(self.from, self.to))
    }
}

const LINEAR: &str = "src/linear.rs";
const EMBEDDING: &str = "src/embedding.rs";
const MANIFEST: &str = "Cargo.toml";

/// Layers hold a weight that is packed or a tensor, compute on whichever it is, and load it so that it may be packed.
pub(super) const EDITS: &[Edit] = &[
    Edit::new(LINEAR, 1, "    weight: Tensor,\n", "    weight: candle_quant_packed::Weight,\n"),
    Edit::new(
        LINEAR,
        1,
        "Self { weight, bias }",
        "Self { weight: candle_quant_packed::Weight::new(weight), bias }",
    ),
    Edit::new(LINEAR, 1, "        &self.weight\n", "        self.weight.tensor()\n"),
    Edit::new(LINEAR, 3, "self.weight.t()", "self.weight.tensor().t()"),
    Edit::new(LINEAR, 2, "self.weight.broadcast_left", "self.weight.tensor().broadcast_left"),
    Edit::new(
        LINEAR,
        1,
        "        // When possible,",
        "        if let Some(packed) = self.weight.packed() {
            return packed.matmul(x, self.bias.as_ref());
        }
        // When possible,",
    ),
    Edit::new(LINEAR, 2, "let ws = vb.", "let ws = candle_quant_packed::load_packed(|| vb."),
    Edit::new(LINEAR, 2, "init_ws)?;", "init_ws))?;"),
    Edit::new(
        EMBEDDING,
        1,
        "    embeddings: Tensor,\n    hidden",
        "    embeddings: candle_quant_packed::Weight,\n    hidden",
    ),
    Edit::new(
        EMBEDDING,
        1,
        "            embeddings,\n",
        "            embeddings: candle_quant_packed::Weight::new(embeddings),\n",
    ),
    Edit::new(EMBEDDING, 1, "        &self.embeddings\n", "        self.embeddings.tensor()\n"),
    Edit::new(EMBEDDING, 1, "self.embeddings.index_select", "self.embeddings.tensor().index_select"),
    Edit::new(
        EMBEDDING,
        1,
        "        let mut final_dims",
        "        if let Some(packed) = self.embeddings.packed() {
            return packed.rows(indexes);
        }
        let mut final_dims",
    ),
    Edit::new(
        EMBEDDING,
        1,
        "= vb.get_with_hints(\n",
        "= candle_quant_packed::load_packed(|| vb.get_with_hints(\n",
    ),
    Edit::new(EMBEDDING, 1, "        },\n    )?;", "        },\n    ))?;"),
    Edit::new(
        MANIFEST,
        1,
        "[dependencies.rayon]",
        concat!(
            "[dependencies.candle-quant-packed]\nversion = \"",
            env!("CARGO_PKG_VERSION"),
            "\"\n\n[dependencies.rayon]"
        ),
    ),
    Edit::new(
        MANIFEST,
        1,
        "cuda = [\"candle/cuda\"]",
        "cuda = [\n    \"candle/cuda\",\n    \"candle-quant-packed/cuda\",\n]",
    ),
];
