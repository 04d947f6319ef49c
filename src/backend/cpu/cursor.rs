//! Which member of a team does what: work is taken from in turn, so that a member which is held up does not keep the others waiting.

use super::team::Member;
use crate::memory_nodes::{part, MOST_NODES};
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};

/// How far work is taken, on each memory node.
#[derive(Default)]
pub(super) struct Cursor([AtomicUsize; MOST_NODES]);

impl Cursor {
    /// The next `step` of `len` items that no member has taken.
    pub(super) fn take(&self, len: usize, step: usize) -> Option<Range<usize>> {
        let [taken, ..] = &self.0;
        let start = taken.fetch_add(step, Ordering::Relaxed);
        (start < len).then(|| start..len.min(start + step))
    }

    /// The next of `len` items of which each node has a part, one that is near if there are any.
    pub(super) fn take_near(&self, len: usize, member: &Member) -> Option<usize> {
        self.take_within(member, |node| part(len, node, member.nodes()), |_| 1).map(|taken| taken.start)
    }

    /// A share of the blocks that no member has taken, `least` or more, from this member's node as long as it has any: three quarters
    /// of what would be each one's. So shares are few, since a member begins each by waiting for memory, and become small where all
    /// are about to meet. Of another node it takes the least.
    pub(super) fn take_share(&self, blocks: &Blocks, least: usize, member: &Member) -> Option<Range<usize>> {
        let members = member.count().div_ceil(member.nodes());
        let section = |node| blocks.section(node, member.nodes());
        self.take_within(member, section, |left| (left.unwrap_or(0) / 4 * 3 / members).max(least))
    }

    /// Takes from the sections of nodes, the member's own first, as many as `size` says of those that are left there; of another node
    /// it is asked with none.
    fn take_within(
        &self,
        member: &Member,
        section: impl Fn(usize) -> Range<usize>,
        size: impl Fn(Option<usize>) -> usize,
    ) -> Option<Range<usize>> {
        for turn in 0..member.nodes() {
            let node = (member.node() + turn) % member.nodes();
            let (section, Some(taken)) = (section(node), self.0.get(node)) else { continue };
            let left = |taken: usize| section.len().saturating_sub(taken);
            let end = |taken: usize| {
                let left = left(taken);
                taken + size((turn == 0).then_some(left)).min(left)
            };
            let next = |taken: usize| (left(taken) > 0).then(|| end(taken));
            if let Ok(start) = taken.fetch_update(Ordering::Relaxed, Ordering::Relaxed, next) {
                return Some(section.start + start..section.start + end(start));
            }
        }
        None
    }
}

/// Blocks of rows of weights that are multiplied with the same x, in the order in which nodes have them: of each node its part of one
/// weight after the other.
pub(super) struct Blocks<'a> {
    /// How many each weight has.
    of_weights: &'a [usize],
}

impl<'a> Blocks<'a> {
    pub(super) fn new(of_weights: &'a [usize]) -> Self {
        Self { of_weights }
    }

    /// Those of a node.
    fn section(&self, node: usize, nodes: usize) -> Range<usize> {
        let up_to = |node| self.of_weights.iter().map(|blocks| blocks * node / nodes).sum();
        up_to(node)..up_to(node + 1)
    }

    /// What a share, which is of one node, has of each weight: the weight, and its blocks.
    pub(super) fn runs(
        &self,
        share: Range<usize>,
        member: &Member,
    ) -> impl Iterator<Item = (usize, Range<usize>)> + use<'a> {
        let nodes = member.nodes();
        let is_of = |node: &usize| self.section(*node, nodes).contains(&share.start);
        let node = (0..nodes).find(is_of).unwrap_or(0);
        let mut first = self.section(node, nodes).start;
        self.of_weights.iter().enumerate().filter_map(move |(weight, blocks)| {
            let own = part(*blocks, node, nodes);
            let (start, end) = (share.start.max(first), share.end.min(first + own.len()));
            let run = (start < end).then(|| (weight, own.start + start - first..own.start + end - first));
            first += own.len();
            run
        })
    }
}

#[cfg(test)]
mod tests {
    use super::super::team::{run, Crew};
    use super::*;
    use std::sync::Mutex;

    #[test]
    fn shares_are_every_block_once_and_become_small() {
        for (members, blocks, least) in [(1, 10, 1), (2, 192, 4), (3, 1000, 1), (8, 5, 2), (2, 0, 3)] {
            let (cursor, taken) = (Cursor::default(), Mutex::new(Vec::new()));
            run::<()>(Crew::Own(members), |member| {
                while let Some(share) = cursor.take_share(&Blocks::new(&[blocks]), least, member) {
                    taken.lock().unwrap().push(share);
                }
                Ok(())
            })
            .unwrap();
            let mut taken = taken.into_inner().unwrap();
            taken.sort_by_key(|share| share.start);
            let mut next = 0;
            for share in taken {
                assert_eq!(share.start, next, "{members} members");
                let of_rest = ((blocks - next) / 4 * 3 / members).max(least);
                assert_eq!(share.len(), of_rest.min(blocks - next), "{members} members at {next}");
                next = share.end;
            }
            assert_eq!(next, blocks);
        }
    }

    #[test]
    fn nodes_have_parts_of_every_weight_and_give_what_is_left() {
        for (members, nodes) in [(1, 1), (2, 2), (3, 2), (8, 4), (2, 3), (1, 8)] {
            for weights in [&[100usize, 7, 7][..], &[1], &[0, 64], &[3, 0, 5, 1]] {
                let (cursor, blocks) = (Cursor::default(), Blocks::new(weights));
                let seen: Vec<_> = weights.iter().map(|blocks| Mutex::new(vec![0; *blocks])).collect();
                let near = Cursor::default();
                let items = Mutex::new(vec![0; 11]);
                run::<()>(Crew::OnNodes(members, nodes), |member| {
                    assert_eq!(member.nodes(), nodes);
                    let mut left_own = false;
                    while let Some(share) = cursor.take_share(&blocks, 2, member) {
                        let mut count = 0;
                        for (weight, run) in blocks.runs(share.clone(), member) {
                            count += run.len();
                            let own = part(weights[weight], member.node(), nodes);
                            let of_own = run.clone().filter(|block| own.contains(block)).count();
                            assert!(of_own == run.len() || of_own == 0, "a share of one node");
                            assert!(of_own == 0 || !left_own, "its own first");
                            left_own |= of_own == 0;
                            let mut seen = seen[weight].lock().unwrap();
                            run.for_each(|block| seen[block] += 1);
                        }
                        assert_eq!(count, share.len());
                    }
                    while let Some(item) = near.take_near(11, member) {
                        items.lock().unwrap()[item] += 1;
                    }
                    Ok(())
                })
                .unwrap();
                for seen in seen {
                    assert!(seen.into_inner().unwrap().iter().all(|count| *count == 1), "{members} {nodes}");
                }
                assert!(items.into_inner().unwrap().iter().all(|count| *count == 1), "{members} {nodes}");
            }
        }
    }
}
