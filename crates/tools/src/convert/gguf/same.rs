//! Whether two configs are of one model.

use candle_quant_models::Config;

/// The first line of what two configs say that is not the same; numbers are those of F32, as files have them.
pub(in crate::convert) fn difference(ours: &Config, theirs: &Config) -> Option<(String, String)> {
    // The file has a head or has none: that is checked by its tensors.
    let said = |config: &Config| format!("{:#?}", Config { tie_word_embeddings: None, ..config.clone() });
    let (ours, theirs) = (said(ours), said(theirs));
    let pairs = ours.lines().zip(theirs.lines());
    let mut different = pairs.enumerate().filter(|(_, (ours, theirs))| !is_same(ours, theirs));
    let named = |line: &str| line.trim().trim_end_matches([',', '(', '[', '{', ' ', ':']).to_owned();
    match different.next() {
        Some((index, (our, their))) => {
            // A line of a list or of a part says little without what it is in.
            let depth = |line: &str| line.len() - line.trim_start().len();
            let before = ours.lines().take(index).collect::<Vec<_>>();
            let within = before.iter().rev().find(|line| depth(line) < depth(our) && depth(line) > 0);
            let within = within.map_or(String::new(), |line| format!("{}: ", named(line)));
            Some((format!("{within}{}", named(our)), format!("{within}{}", named(their))))
        }
        None if ours.lines().count() != theirs.lines().count() => Some(("more".into(), "less".into())),
        None => None,
    }
}

fn is_same(ours: &str, theirs: &str) -> bool {
    const PRECISION: f64 = 1e-6;
    let number = |line: &str| {
        let value = line.rsplit_once(": ").map_or(line, |(_, value)| value);
        value.trim().trim_end_matches(',').parse::<f64>().ok()
    };
    let name = |line: &str| line.rsplit_once(": ").map_or(String::new(), |(name, _)| name.to_owned());
    ours == theirs
        || match (number(ours), number(theirs)) {
            (Some(a), Some(b)) => {
                name(ours) == name(theirs) && (a - b).abs() <= PRECISION * a.abs().max(b.abs())
            }
            _ => false,
        }
}
