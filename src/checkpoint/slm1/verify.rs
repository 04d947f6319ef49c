//! Whether a file is what a checksum says.

use super::header::{Header, CHECKSUM};
use super::options::{ChecksumPolicy, Slm1Options, Verification};
use super::source::Source;
use crate::{Error, Result};

/// Compares the content with its checksum, if there is a function for that.
pub(super) fn verify(source: &mut Source, header: &Header, options: &Slm1Options) -> Result<Verification> {
    let mut verification = Verification::Unverified;
    if header.checksum == 0 && !matches!(options.checksum, ChecksumPolicy::Ignore) {
        return Err(source.wrong("the checksum is 0, which no file has"));
    }
    if let ChecksumPolicy::Verify(function) = options.checksum {
        let mut bytes = source.read_range(0..source.len)?;
        if let Some(checksum) = bytes.get_mut(CHECKSUM) {
            checksum.fill(0);
        }
        let found = function(&bytes);
        if found != header.checksum {
            let problem = format!("the checksum is {found:#018x}, expected {:#018x}", header.checksum);
            return Err(source.wrong(problem));
        }
        verification = Verification::Verified;
    }
    match (source.strict, verification) {
        (true, Verification::Unverified) => Err(Error::file(
            source.path,
            "nothing to verify the file with: the algorithm of its checksum is not published",
            "give a function for the checksum, or open it leniently",
        )),
        _ => Ok(verification),
    }
}
