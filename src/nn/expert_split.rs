//! How a block of experts is split over ranks.

use crate::distributed::partition::{split, split_or_cut_units};
use crate::Error;
use std::fmt;
use std::ops::Range;
use std::str::FromStr;

/// How experts are split over ranks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ExpertSplit {
    /// Every rank has a part of each expert, as it has of a dense feed-forward block. Ranks have equal work.
    #[default]
    Inside,
    /// Every rank has whole experts and computes what tokens choose of them. Ranks have equal work if experts are
    /// chosen equally.
    Across,
}

impl fmt::Display for ExpertSplit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Inside => "inside",
            Self::Across => "across",
        })
    }
}

impl FromStr for ExpertSplit {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        let all = [Self::Inside, Self::Across];
        let named = all.into_iter().find(|split| split.to_string() == text);
        named.ok_or_else(|| Error::mismatch("split of experts", "`inside` or `across`", format!("`{text}`")))
    }
}

/// Experts of one rank.
#[derive(Clone, Debug, PartialEq)]
pub struct ExpertShare {
    /// The experts, of all.
    pub experts: Range<usize>,
    /// Which of their inner elements.
    pub inner: Range<usize>,
}

/// What each rank has of a block of `count` experts of `inner` elements, of which `unit` lie together in the down
/// projections; `None` if there are fewer of what is split than ranks.
pub fn expert_shares(
    how: ExpertSplit,
    count: usize,
    inner: usize,
    unit: usize,
    ranks: usize,
) -> Option<Vec<ExpertShare>> {
    let shares = match how {
        ExpertSplit::Inside => split_or_cut_units(inner, unit, ranks)?,
        ExpertSplit::Across => split(count, 1, ranks)?,
    };
    let share = |own| match how {
        ExpertSplit::Inside => ExpertShare { experts: 0..count, inner: own },
        ExpertSplit::Across => ExpertShare { experts: own, inner: 0..inner },
    };
    Some(shares.into_iter().map(share).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn experts_are_split_inside_or_across() {
        let shares = |how, ranks| expert_shares(how, 4, 192, 64, ranks);
        let lens = |how, ranks| -> Option<Vec<_>> {
            let shares = shares(how, ranks)?.into_iter();
            Some(shares.map(|share| (share.experts.len(), share.inner.len())).collect())
        };
        assert_eq!(lens(ExpertSplit::Inside, 2), Some(vec![(4, 128), (4, 64)]));
        assert_eq!(lens(ExpertSplit::Inside, 4), Some(vec![(4, 48); 4]));
        assert_eq!(lens(ExpertSplit::Inside, 193), None);
        assert_eq!(lens(ExpertSplit::Across, 3), Some(vec![(2, 192), (1, 192), (1, 192)]));
        assert_eq!(lens(ExpertSplit::Across, 5), None);
        for how in [ExpertSplit::Inside, ExpertSplit::Across] {
            assert_eq!(how.to_string().parse::<ExpertSplit>().unwrap(), how);
        }
        let message = "aside".parse::<ExpertSplit>().unwrap_err().to_string();
        assert!(message.contains("expected `inside` or `across`, found `aside`"), "{message}");
    }
}
