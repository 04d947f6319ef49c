//! Statistics in a file: safetensors, with the names that llama.cpp has for such sums.

use super::columns::ColumnSums;
use super::statistics::Statistics;
use crate::source::fingerprint;
use crate::staging::{io, write_file};
use candle_quant::{Checkpoint, Error, Result};
use safetensors::tensor::{Dtype, SafeTensors, TensorView};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, HashMap};
use std::fs;
use std::io::ErrorKind;
use std::path::Path;

/// What the metadata says of how far they are. One entry, so that the bytes are the same each time.
const KEY: &str = "candle_quant.statistics";
const SQUARES: &str = ".in_sum2";
const COUNTS: &str = ".counts";

const REMEDY: &str = "remove it, or give another file";

/// Of what statistics are, and how far.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Progress {
    /// The digest of names, sizes and times of the files of the model.
    pub source: String,
    /// That of the tokens.
    pub text: String,
    pub pieces: usize,
    pub done: usize,
}

impl Progress {
    /// Refuses statistics of another source than that of a fingerprint.
    pub fn check_source(&self, path: &Path, fingerprint: &str) -> Result<()> {
        match self.source == fingerprint {
            true => Ok(()),
            false => {
                let problem = "statistics of another source, or of this one before it was changed";
                Err(Error::file(path, problem, REMEDY))
            }
        }
    }
}

/// Statistics that may be of a part of the text.
pub(super) struct Begun {
    pub statistics: Statistics,
    pub progress: Progress,
}

impl Statistics {
    /// Those of a whole text in a file that [`Collector::write`](super::Collector::write) has written.
    ///
    /// # Errors
    /// If it can't be read, is no such file, is of another source, or of a collection that was interrupted.
    pub fn read(source: &Checkpoint, path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let Some(Begun { statistics, progress }) = Begun::read(path)? else {
            return Err(io(path)(ErrorKind::NotFound.into()));
        };
        progress.check_source(path, &fingerprint(source)?)?;
        if progress.done < progress.pieces {
            let problem = format!("statistics of {} pieces of {}", progress.done, progress.pieces);
            return Err(Error::file(path, problem, "go on with them: give the text, too (--calibrate)"));
        }
        Ok(statistics)
    }
}

impl Begun {
    pub fn write(&self, path: &Path) -> Result<()> {
        let wrong = |error: String| Error::file(path, error, "report this");
        let bytes: BTreeMap<_, _> = self
            .statistics
            .modules()
            .map(|(name, sums)| {
                let squares: Vec<u8> = sums.squares().iter().flat_map(|sum| sum.to_le_bytes()).collect();
                let counts: Vec<u8> = sums.counts().iter().flat_map(|count| count.to_le_bytes()).collect();
                (name, (vec![sums.counts().len(), sums.columns()], squares, counts))
            })
            .collect();
        let mut tensors = Vec::new();
        for (name, (dims, squares, counts)) in &bytes {
            let rows = dims.first().copied().unwrap_or_default();
            let of_squares = TensorView::new(Dtype::F64, dims.clone(), squares);
            let of_counts = TensorView::new(Dtype::U64, vec![rows], counts);
            tensors.push((format!("{name}{SQUARES}"), of_squares.map_err(|error| wrong(error.to_string()))?));
            tensors.push((format!("{name}{COUNTS}"), of_counts.map_err(|error| wrong(error.to_string()))?));
        }
        let progress = serde_json::to_string(&self.progress).map_err(|error| wrong(error.to_string()))?;
        let metadata = HashMap::from([(KEY.to_owned(), progress)]);
        let file =
            safetensors::serialize(tensors, Some(metadata)).map_err(|error| wrong(error.to_string()))?;
        write_file(path, &file)
    }

    /// Those in a file; `None` if there is none.
    pub fn read(path: &Path) -> Result<Option<Self>> {
        let bytes = match fs::read(path) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
            read => read.map_err(io(path))?,
        };
        let wrong = |problem: String| Error::file(path, format!("no statistics: {problem}"), REMEDY);
        let (_, metadata) = SafeTensors::read_metadata(&bytes).map_err(|error| wrong(error.to_string()))?;
        let progress = metadata.metadata().as_ref().and_then(|entries| entries.get(KEY));
        let progress = progress.ok_or_else(|| wrong(format!("its metadata have no `{KEY}`")))?;
        let progress = serde_json::from_str(progress).map_err(|error| wrong(format!("`{KEY}`: {error}")))?;
        let tensors = SafeTensors::deserialize(&bytes).map_err(|error| wrong(error.to_string()))?;
        let mut modules = BTreeMap::new();
        for name in tensors.names() {
            let Some(module) = name.strip_suffix(SQUARES) else {
                match name
                    .strip_suffix(COUNTS)
                    .filter(|module| tensors.tensor(&format!("{module}{SQUARES}")).is_ok())
                {
                    Some(_) => continue,
                    None => return Err(wrong(format!("a tensor `{name}`"))),
                }
            };
            let tensor = |suffix: &str, dtype| {
                let name = format!("{module}{suffix}");
                let tensor = tensors.tensor(&name).map_err(|error| wrong(format!("`{name}`: {error}")))?;
                match tensor.dtype() == dtype {
                    true => Ok(tensor),
                    false => Err(wrong(format!("`{name}`: expected {dtype:?}, found {:?}", tensor.dtype()))),
                }
            };
            let (squares, counts) = (tensor(SQUARES, Dtype::F64)?, tensor(COUNTS, Dtype::U64)?);
            let [rows, columns] = *squares.shape() else {
                return Err(wrong(format!("`{name}`: expected two dimensions, found {:?}", squares.shape())));
            };
            if counts.shape() != [rows] {
                return Err(wrong(format!(
                    "`{module}{COUNTS}`: expected [{rows}], found {:?}",
                    counts.shape()
                )));
            }
            let eights = |bytes: &[u8]| bytes.as_chunks::<8>().0.to_vec();
            let squares = eights(squares.data()).into_iter().map(f64::from_le_bytes).collect();
            let counts = eights(counts.data()).into_iter().map(u64::from_le_bytes).collect();
            let sums = ColumnSums::of(&format!("{}: `{name}`", path.display()), counts, squares, columns)?;
            modules.insert(module.to_owned(), sums);
        }
        Ok(Some(Self { statistics: Statistics::new(path.display().to_string(), modules), progress }))
    }
}
