//! The files of a GGUF model: one, or the parts that it was split into.

use super::header::{self, Header, TensorEntry};
use super::metadata::Metadata;
use super::rope::Divisors;
use crate::checkpoint::file::{open_file, DataFile, Opening};
use crate::checkpoint::weight::Kind;
use crate::{Error, Result};
use safetensors::Dtype;
use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::path::Path;
use std::sync::Arc;

/// More numbers than any head has elements.
const MAX_DIVISORS_BYTES: usize = 1 << 16;

/// One file of a model.
pub(super) struct SplitFile {
    pub header: Header,
    pub file: Arc<DataFile>,
    /// The values of tensors that the config takes up.
    pub divisors: Divisors,
}

/// Opens the file at `path` and, if it is a part of a model, all other parts. The first one has the metadata.
pub(super) fn open(path: &Path, opening: &Opening) -> Result<(SplitFile, Vec<SplitFile>)> {
    let given = open_part(path, opening)?;
    let count = count_of(&given.header.metadata)?;
    if count <= 1 {
        return Ok((given, vec![]));
    }
    let wrong =
        |path: &Path, problem: String| Error::file(path, problem, "fetch all parts of one model again");
    let Some(prefix) = prefix(path, count) else {
        let name = format!("a part of {count} files, and not called `..-00001-of-{count:05}.gguf`");
        return Err(wrong(path, name));
    };
    #[allow(clippy::wildcard_enum_match_arm, reason = "all other errors stay as they are")]
    let open = |number: u32| {
        let path = path.with_file_name(format!("{prefix}-{:05}-of-{count:05}.gguf", number + 1));
        let part = open_part(&path, opening).map_err(|error| match error {
            Error::Io { error, path } if error.kind() == io::ErrorKind::NotFound => {
                wrong(&path, format!("this part of {count} is missing"))
            }
            other => other,
        })?;
        let metadata = &part.header.metadata;
        let (said, of) = (metadata.required_size("split.no")?, count_of(metadata)?);
        if (said, of) != (number, count) {
            let problem = format!("expected part {number} of {count}, found part {said} of {of}");
            return Err(wrong(&path, problem));
        }
        Ok(part)
    };
    let first = open(0)?;
    let others = (1..count).map(open).collect::<Result<Vec<_>>>()?;
    let tensors = std::iter::once(&first).chain(&others).map(|part| part.header.tensors.len()).sum::<usize>();
    match first.header.metadata.size("split.tensors.count")? {
        Some(expected) if usize::try_from(expected).ok() != Some(tensors) => {
            Err(wrong(path, format!("expected {expected} tensors in all parts, found {tensors}")))
        }
        _ => Ok((first, others)),
    }
}

fn count_of(metadata: &Metadata) -> Result<u32> {
    Ok(metadata.size("split.count")?.unwrap_or(0))
}

/// The name of a part without its number; `None` if it is no name of a part of so many.
fn prefix(path: &Path, count: u32) -> Option<&str> {
    let name = path.file_name()?.to_str()?.strip_suffix(&format!("-of-{count:05}.gguf"))?;
    let (prefix, number) = name.rsplit_once('-')?;
    (number.len() == 5 && number.bytes().all(|byte| byte.is_ascii_digit())).then_some(prefix)
}

fn open_part(path: &Path, opening: &Opening) -> Result<SplitFile> {
    let mut file = open_file(path)?;
    let header = header::read(path, &mut file, opening)?;
    let divisors = read_divisors(path, &header, &mut file)?;
    Ok(SplitFile { header, file: DataFile::new(path, file, opening.reads)?, divisors })
}

fn read_divisors(path: &Path, header: &Header, file: &mut File) -> Result<Divisors> {
    let mut divisors = Divisors::default();
    for entry in &header.tensors {
        if let Some(values) = divisors.of_name(&entry.name) {
            *values = Some(read_numbers(path, entry, file)?);
        }
    }
    Ok(divisors)
}

fn read_numbers(path: &Path, entry: &TensorEntry, file: &mut File) -> Result<Vec<f32>> {
    if !matches!(entry.block.map(|block| block.kind), Some(Kind::Dense(Dtype::F32))) {
        let found = entry.block.map_or("another type", |block| block.name);
        return Err(Error::tensor(path, &entry.name, "F32", found, "convert the model again"));
    }
    if entry.range.len() > MAX_DIVISORS_BYTES {
        let expected = "one number for each pair of a head's elements";
        return Err(Error::tensor(
            path,
            &entry.name,
            expected,
            format!("{:?}", entry.dims),
            "convert the model again",
        ));
    }
    let io = |error| Error::Io { path: path.to_owned(), error };
    let mut bytes = vec![0; entry.range.len()];
    file.seek(SeekFrom::Start(entry.range.start as u64)).map_err(io)?;
    file.read_exact(&mut bytes).map_err(io)?;
    Ok(bytes.as_chunks::<4>().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect())
}

/// Whether a file of this name is a model, or the first part of one that is split.
pub(in crate::checkpoint) fn is_model(name: &str) -> bool {
    let later_part = name.contains("-of-") && !name.contains("-00001-of-");
    // Projectors of images belong to another model.
    name.ends_with(".gguf") && !name.starts_with("mmproj") && !later_part
}
