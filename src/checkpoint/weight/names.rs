//! Names of tensors and paths of modules.

use std::cmp::Ordering;

/// The module path of a weight's name; that of a weight at the root is empty.
pub fn module_of(tensor: &str) -> Option<&str> {
    match tensor.strip_suffix("weight")? {
        "" => Some(""),
        // `.weight` is the name of no module's weight: that at the root has no dot.
        path => path.strip_suffix('.').filter(|module| !module.is_empty()),
    }
}

/// The name of one tensor of a module.
pub fn tensor_of(module: &str, suffix: &str) -> String {
    match module {
        "" => suffix.to_owned(),
        path => format!("{path}.{suffix}"),
    }
}

/// Compares names of tensors piece by piece, numbers by value: layer 2 comes before layer 10.
///
/// ```
/// use candle_quant::checkpoint::natural_order;
///
/// let mut names = ["layers.10.norm", "layers.2.up_proj", "layers.2.norm"];
/// names.sort_by(|a, b| natural_order(a, b));
/// assert_eq!(names, ["layers.2.norm", "layers.2.up_proj", "layers.10.norm"]);
/// ```
pub fn natural_order(a: &str, b: &str) -> Ordering {
    #[derive(PartialEq, Eq, PartialOrd, Ord)]
    enum Piece<'a> {
        Number(u64),
        Text(&'a str),
    }
    fn pieces(path: &str) -> impl Iterator<Item = Piece<'_>> {
        let piece = |text: &'_ str| text.parse().map(Piece::Number);
        path.split('.').map(move |text| piece(text).unwrap_or(Piece::Text(text)))
    }
    pieces(a).cmp(pieces(b)).then_with(|| a.cmp(b))
}
