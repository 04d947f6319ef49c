//! Regular expressions, whose repetitions the crate writes out.

const MAX_BYTES: usize = 16 << 10;

/// The most that the repetitions of a pattern, one in another, may come to.
const MAX_REPETITIONS: u64 = 10_000;

/// Refuses a pattern that would become a program of any size: it repeats something a million times, or is long.
pub(super) fn check(pattern: &str) -> Result<(), String> {
    if pattern.len() > MAX_BYTES {
        return Err(format!("a pattern of {} bytes; at most {MAX_BYTES} are read", pattern.len()));
    }
    // Numbers in braces, whatever they repeat: names of classes stand there, too, but no code points.
    let counts = pattern.match_indices('{').filter_map(|(at, _)| {
        let (count, _) = pattern.get(at + 1..)?.split_once('}')?;
        (!is_code_point(pattern.get(..at)?)).then_some(count)
    });
    let largest = |count: &str| {
        let numbers = count.split(',').map(|number| number.trim().parse::<u64>());
        numbers.filter_map(Result::ok).max().unwrap_or(1).max(1)
    };
    let product = counts.map(largest).fold(1u64, u64::saturating_mul);
    match product <= MAX_REPETITIONS {
        true => Ok(()),
        false => Err(format!("a pattern of {product} repetitions; at most {MAX_REPETITIONS} are read")),
    }
}

/// Whether a brace behind this belongs to `\x{..}` or `\u{..}`, whose backslash is none that is escaped itself.
fn is_code_point(before: &str) -> bool {
    let Some(escape) = before.strip_suffix(['x', 'u']) else { return false };
    let backslashes = escape.len() - escape.trim_end_matches('\\').len();
    !backslashes.is_multiple_of(2)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn repetitions_multiply() {
        for pattern in [
            r"\p{N}{1,3}",
            r"\p{Lu}{2,}x{,3}",
            "{",
            "a{}",
            "a}{b",
            r"\x{10FFFF}",
            r"[\x{20000}-\x{99999}]",
            r"\u{99999}",
            "",
        ] {
            assert_eq!(check(pattern), Ok(()), "{pattern}");
        }
        for pattern in [
            "a{10001}",
            "(a{101}){100}",
            "(?=a{2,999999})",
            "(a{ 101 }){100}",
            "a{99999999999999999999}b{99999}",
            "x{99999}",
            r"\\x{99999}",
        ] {
            assert!(check(pattern).is_err(), "{pattern}");
        }
    }
}
