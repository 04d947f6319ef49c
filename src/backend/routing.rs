//! Which experts a token uses, and how much each counts.

use crate::{Error, Result};

/// What makes scores of a router's logits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scores {
    /// Softmax over all experts.
    Softmax,
    /// The sigmoid of each.
    Sigmoid,
}

/// Groups of experts, of which a token chooses some first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExpertGroups {
    /// How many there are, of as many experts each.
    pub count: usize,
    /// How many a token chooses.
    pub chosen: usize,
    /// By what.
    pub by: GroupScore,
}

/// By what a group of experts is chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GroupScore {
    /// Its largest score.
    Largest,
    /// The sum of its two largest scores.
    TwoLargest,
}

impl ExpertGroups {
    /// Checks that so many experts can be grouped like that.
    ///
    /// # Errors
    /// If they cannot.
    pub fn validate(&self, experts: usize) -> Result<()> {
        let Self { count, chosen, by } = *self;
        let least = if by == GroupScore::TwoLargest { 2 } else { 1 };
        if count == 0 || !experts.is_multiple_of(count) || experts / count < least {
            let expected = format!("a divisor of the {experts} experts, {least} or more to a group");
            return Err(Error::mismatch("groups of experts (`n_group`)", expected, count.to_string()));
        }
        if chosen == 0 || chosen > count {
            let expected = format!("1 to {count}");
            return Err(Error::mismatch("chosen groups (`topk_group`)", expected, chosen.to_string()));
        }
        Ok(())
    }
}

/// How experts are chosen by the logits of a router: those of the largest scores, of several alike the first.
#[derive(Clone, Debug)]
pub(crate) struct Routing {
    pub(crate) experts: usize,
    pub(crate) top_k: usize,
    pub(crate) scores: Scores,
    /// What is added to the scores for the choice, but not to what an expert counts.
    pub(crate) correction: Option<Vec<f32>>,
    pub(crate) groups: Option<ExpertGroups>,
    /// Whether what the chosen experts count is made to add up to 1.
    pub(crate) normalize: bool,
    /// By what it is multiplied then.
    pub(crate) scale: f32,
}

impl Routing {
    /// The chosen experts, the largest score first, and how much each counts. NaN counts as the largest score of all, so that
    /// it is seen in what comes of it.
    pub(crate) fn choose(&self, logits: &[f32]) -> Vec<(usize, f32)> {
        let scores = self.scores(logits);
        let mut choice = scores.clone();
        if let Some(correction) = &self.correction {
            choice.iter_mut().zip(correction).for_each(|(choice, correction)| *choice += correction);
        }
        let known = |score: f32| if score.is_nan() { f32::INFINITY } else { score };
        let mut choice: Vec<Option<f32>> = choice.into_iter().map(|score| Some(known(score))).collect();
        if let Some(groups) = self.groups {
            keep_groups(&mut choice, groups);
        }
        let mut chosen = Vec::with_capacity(self.top_k);
        for _ in 0..self.top_k {
            let Some(expert) = largest(&choice) else { break };
            if let Some(taken) = choice.get_mut(expert) {
                *taken = None;
            }
            chosen.push((expert, scores.get(expert).copied().unwrap_or(f32::NAN)));
        }
        let sum: f32 = chosen.iter().map(|(_, score)| score).sum();
        let factor = if self.normalize { self.scale / sum } else { self.scale };
        chosen.iter_mut().for_each(|(_, score)| *score *= factor);
        chosen
    }

    fn scores(&self, logits: &[f32]) -> Vec<f32> {
        match self.scores {
            Scores::Sigmoid => logits.iter().map(|logit| 1. / (1. + (-logit).exp())).collect(),
            Scores::Softmax => {
                let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
                let powers: Vec<f32> = logits.iter().map(|logit| (logit - largest).exp()).collect();
                let sum: f32 = powers.iter().sum();
                powers.into_iter().map(|power| power / sum).collect()
            }
        }
    }
}

/// The first of the largest of those that are left.
fn largest(choice: &[Option<f32>]) -> Option<usize> {
    let left = choice.iter().enumerate().filter_map(|(index, score)| Some((index, (*score)?)));
    left.reduce(|best, next| if next.1 > best.1 { next } else { best }).map(|(index, _)| index)
}

/// Makes the scores of all but the chosen groups minus infinity.
fn keep_groups(choice: &mut [Option<f32>], ExpertGroups { count, chosen, by }: ExpertGroups) {
    let of_group = (choice.len() / count.max(1)).max(1);
    let score = |group: &[Option<f32>]| {
        let mut group: Vec<f32> = group.iter().flatten().copied().collect();
        group.sort_unstable_by(|a, b| b.total_cmp(a));
        let summed = if by == GroupScore::Largest { 1 } else { 2 };
        group.iter().take(summed).sum::<f32>()
    };
    let mut groups: Vec<Option<f32>> = choice.chunks(of_group).map(|group| Some(score(group))).collect();
    for _ in 0..chosen {
        let Some(best) = largest(&groups) else { break };
        if let Some(taken) = groups.get_mut(best) {
            *taken = None;
        }
    }
    for (group, left) in choice.chunks_mut(of_group).zip(groups) {
        if left.is_some() {
            group.fill(Some(f32::NEG_INFINITY));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PLAIN: Routing = Routing {
        experts: 6,
        top_k: 2,
        scores: Scores::Softmax,
        correction: None,
        groups: None,
        normalize: true,
        scale: 1.,
    };

    fn ids(routing: &Routing, logits: &[f32]) -> Vec<usize> {
        routing.choose(logits).into_iter().map(|(id, _)| id).collect()
    }

    #[test]
    fn the_largest_count_as_their_scores_say() {
        let logits = [0.5, 2., -1., 2., 0., 3.];
        let chosen = PLAIN.choose(&logits);
        // exp(3) and exp(2) of those two; of equal ones the first.
        let e = 1f64.exp();
        let expected = [(5, e / (e + 1.)), (1, 1. / (e + 1.))];
        for ((id, weight), (expected_id, expected)) in chosen.iter().zip(expected) {
            assert_eq!(*id, expected_id);
            assert!((f64::from(*weight) - expected).abs() < 1e-6);
        }
        let sigmoid = Routing { scores: Scores::Sigmoid, normalize: false, scale: 2.5, ..PLAIN };
        let weights: Vec<f64> =
            sigmoid.choose(&logits).iter().map(|(_, weight)| f64::from(*weight)).collect();
        for (weight, logit) in weights.iter().zip([3f64, 2.]) {
            assert!((weight - 2.5 / (1. + (-logit).exp())).abs() < 1e-6);
        }
    }

    #[test]
    fn corrections_choose_but_do_not_count() {
        let correction = Some(vec![0., 0., 5., 0., 0., 0.]);
        let corrected = Routing { correction, scores: Scores::Sigmoid, normalize: false, ..PLAIN };
        let chosen = corrected.choose(&[0.5, 2., -1., 2., 0., 3.]);
        assert_eq!((chosen[0].0, chosen[1].0), (2, 5));
        assert!((f64::from(chosen[0].1) - 1. / (1. + 1f64.exp())).abs() < 1e-6);
    }

    #[test]
    fn groups_are_chosen_first() {
        let groups = |by| Some(ExpertGroups { count: 3, chosen: 1, by });
        let logits = [3., -9., 2., 2.5, 0., 0.];
        let sigmoid = Routing { scores: Scores::Sigmoid, ..PLAIN };
        assert_eq!(ids(&Routing { groups: groups(GroupScore::Largest), ..sigmoid.clone() }, &logits), [0, 1]);
        assert_eq!(
            ids(&Routing { groups: groups(GroupScore::TwoLargest), ..sigmoid.clone() }, &logits),
            [3, 2]
        );
        // More experts than the group has: of the others the first.
        let more = Routing { groups: groups(GroupScore::TwoLargest), top_k: 3, ..sigmoid };
        assert_eq!(ids(&more, &logits), [3, 2, 0]);
    }

    #[test]
    fn what_is_not_a_number_is_chosen() {
        let sigmoid = Routing { scores: Scores::Sigmoid, normalize: false, ..PLAIN };
        let chosen = sigmoid.choose(&[0., 1., 2., f32::NAN, 3., 4.]);
        assert_eq!((chosen[0].0, chosen[1].0), (3, 5));
        assert!(chosen[0].1.is_nan() && !chosen[1].1.is_nan());
        let correction = Some(vec![0., f32::NAN, 0., f32::NEG_INFINITY, 0., 0.]);
        let corrected = Routing { correction, ..sigmoid };
        let chosen = corrected.choose(&[0., 1., 2., f32::NAN, 3., 4.]);
        assert_eq!((chosen[0].0, chosen[1].0), (1, 3));
        let all = PLAIN.choose(&[f32::NAN; 6]);
        assert!(all.len() == 2 && all.iter().all(|(id, weight)| *id < 6 && weight.is_nan()));
    }

    #[test]
    fn groups_that_do_not_fit_are_refused() {
        let by = GroupScore::TwoLargest;
        for (count, chosen, told) in
            [(4, 1, "divisor of the 6"), (6, 1, "2 or more"), (3, 0, "1 to 3"), (3, 4, "1 to 3")]
        {
            let error = ExpertGroups { count, chosen, by }.validate(6).unwrap_err().to_string();
            assert!(error.contains(told), "{error}");
        }
        ExpertGroups { count: 3, chosen: 3, by }.validate(6).unwrap();
    }
}
