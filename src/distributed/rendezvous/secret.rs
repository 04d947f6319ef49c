//! The secret of a group of processes.

use crate::{Error, Result};
use sha2::{Digest, Sha256};
use std::{env, fmt};

/// What only the ranks of one group know. It is never sent: it is a key of their handshake, without which no message of
/// it can be made or read.
#[derive(Clone)]
pub struct Secret([u8; 32]);

/// Bytes of a secret, at least: an eavesdropper can try all short ones.
const SHORTEST: usize = 16;
/// Where [`Secret::from_env`] looks.
pub const VARIABLE: &str = "CANDLE_QUANT_SECRET";
/// The key is none of anything else that is made of the same secret.
const PURPOSE: &[u8] = b"candle-quant: key of a group of ranks\n";

impl Secret {
    /// Any bytes, the same for all ranks.
    ///
    /// # Errors
    /// If there are less than 16.
    pub fn new(bytes: impl Into<Vec<u8>>) -> Result<Self> {
        let bytes = bytes.into();
        if bytes.len() < SHORTEST {
            let expected = format!("{SHORTEST} bytes or more, such as those of `openssl rand -hex 32`");
            return Err(Error::mismatch("secret of the ranks", expected, format!("{} bytes", bytes.len())));
        }
        Ok(Self(Sha256::new().chain_update(PURPOSE).chain_update(bytes).finalize().into()))
    }

    /// The text of the environment variable `CANDLE_QUANT_SECRET`.
    ///
    /// # Errors
    /// If it is not set, or too short.
    pub fn from_env() -> Result<Self> {
        let text = env::var(VARIABLE).map_err(|_| {
            let expected = "the same on all ranks, such as the output of `openssl rand -hex 32`";
            Error::mismatch(format!("environment variable {VARIABLE}"), expected, "nothing; it has to be set")
        })?;
        Self::new(text.trim())
    }

    /// Of 32 bytes, as handshakes need it.
    pub(super) fn key(&self) -> &[u8; 32] {
        &self.0
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(..)")
    }
}
