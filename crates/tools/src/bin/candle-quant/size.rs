//! Sizes in bytes, as options take them.

/// Reads a size: a number of bytes, or of KB, MB, GB (of 1000), KiB, MiB, GiB (of 1024).
pub fn parse(text: &str) -> Result<u64, String> {
    let (number, unit) = match text.find(|c: char| c.is_ascii_alphabetic()) {
        Some(at) => text.split_at(at),
        None => (text, ""),
    };
    let unit: u64 = match unit.to_ascii_uppercase().as_str() {
        "" | "B" => 1,
        "KB" => 1000,
        "MB" => 1000u64.pow(2),
        "GB" => 1000u64.pow(3),
        "KIB" => 1 << 10,
        "MIB" => 1 << 20,
        "GIB" => 1 << 30,
        _ => return Err("expected bytes, KB, MB or GB, or KiB, MiB or GiB".into()),
    };
    let number = number.trim();
    let bytes = match number.parse::<u64>() {
        Ok(whole) => whole.checked_mul(unit),
        // A fraction of a unit, to the byte below. Beyond 2^53 it has no bytes any more.
        Err(_) if unit > 1 => {
            let bytes = number.parse::<f64>().ok().map(|number| number * unit as f64);
            bytes.filter(|bytes| (1. ..9e15).contains(bytes)).map(|bytes| bytes as u64)
        }
        Err(_) => None,
    };
    bytes.filter(|bytes| *bytes > 0).ok_or_else(|| "expected a size above zero, such as 8GB or 7.5GiB".into())
}

/// In millions of bytes.
pub fn megabytes(bytes: u64) -> String {
    format!("{:.3} MB", bytes as f64 / 1e6)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read() {
        for (text, bytes) in [
            ("1", 1),
            ("17B", 17),
            ("8GB", 8_000_000_000),
            ("8GiB", 8 << 30),
            ("500MB", 500_000_000),
            ("500 mb", 500_000_000),
            ("7.5gib", 15 << 29),
            ("0.5KB", 500),
        ] {
            assert_eq!(parse(text), Ok(bytes), "{text}");
        }
        for text in [
            "",
            "0",
            "0GB",
            "GB",
            "-1GB",
            "8G",
            "8GBs",
            "1.5",
            "1e30GB",
            "nanGB",
            "infGB",
            "18446744073709551615KB",
        ] {
            assert!(parse(text).is_err(), "{text}");
        }
    }
}
